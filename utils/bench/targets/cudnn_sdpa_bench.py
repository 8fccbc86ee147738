"""labs/cudnn_sdpa_bench: SDPA with one backend pinned, or a kernel with a backward pass. Backends come by flag alone."""

from __future__ import annotations

from collections.abc import Mapping

from utils.bench.errors import BenchError
from utils.bench.knobs import Knob
from utils.bench.targets.attention import CAUSAL, AttentionTarget, plain_workload, shape_knobs
from utils.bench.targets.backends import SDPA_CHOICES
from utils.bench.workload import DIRECTIONS, LAYOUTS

# SDPA's backends, and those outside of torch that have a backward pass.
CHOICES = (*SDPA_CHOICES, "gluon", "cute", "flash_attn")


class FlashSdp(AttentionTarget):
    """One backend against another, forward, backward or both, in any layout and grouping: by default of SDPA."""

    chapter, workload = "labs/cudnn_sdpa_bench", "flash_sdp"
    summary = "one attention backend against another on the same inputs, forward and backward"
    sides: Mapping[str, str] = {
        "baseline": "--baseline-backend (SDPA's math)",
        "optimized": "--backend (SDPA's own choice)",
    }
    knobs = (
        *shape_knobs(cpu=(1, 4, 1024, 64, "fp32"), gpu=(4, 16, 4096, 128, "bf16")),
        CAUSAL,
        Knob("kv-heads", "heads of k and v, Hkv, a divisor of H; 0: as many", 0, 0, least=0),
        Knob("seq-len-kv", "tokens of k and v, Sk; 0: as many as q", 0, 0, least=0),
        Knob("window", "only keys fewer than this many positions away, by a boolean mask; 0: none", 0, 0, least=0),
        Knob("layout", "bhsd is contiguous, bshd a view of (B, S, H, D)", "bhsd", "bhsd", choices=LAYOUTS),
        Knob("pass", "what is timed", "forward", "forward", choices=DIRECTIONS),
        Knob("backend", "backend of the optimized side; auto is torch's own choice", "auto", "auto", choices=CHOICES),
        Knob("baseline-backend", "backend of the baseline side", "math", "math", choices=CHOICES),
    )

    def workload_of(self, settings, device):
        """Make the workload of these settings; raise BenchError for values that do not go together."""
        given = {key: settings[key].value or None for key in ("kv_heads", "seq_len_kv", "window")}
        workload = plain_workload(settings, layout=settings["layout"].value, direction=settings["pass"].value, **given)
        if (workload.causal or workload.window) and workload.seq_len > workload.sk:
            raise BenchError(
                f"--seq-len is {workload.seq_len} and --seq-len-kv {workload.sk}: with --causal or "
                "--window the last query is at the last key, and the first queries would see none. "
                "Choose --seq-len-kv at least --seq-len."
            )
        return workload

    def backend(self, case, side):
        """Return the name of a side's backend."""
        return case.value("backend" if side == "optimized" else "baseline_backend")


TARGETS = (FlashSdp(),)
