"""labs/cudnn_sdpa_bench: scaled_dot_product_attention with one backend pinned. Backends come by flag alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from utils.attention import find_backend
from utils.bench.errors import BenchError
from utils.bench.knobs import Knob
from utils.bench.targets import sdpa
from utils.bench.targets.base import CAUSAL, SHAPE_KNOBS, Built, Case, Target, dtype_support, shape_knobs
from utils.bench.targets.proof import BACKEND_OF, prove
from utils.bench.workload import DIRECTIONS, LAYOUTS, Inputs, Workload
from utils.machine.device import Support


def sdpa_support(name: str, case: Case) -> Support:
    """Whether a backend (or "auto", torch's own choice) exists on this machine.

    Whether the backend takes the shape is torch's to say, when the side is built.
    """
    return dtype_support(case.workload.dtype, case.device) and find_backend(BACKEND_OF.get(name, name)).machine()


def build_sdpa(name: str, case: Case, inputs: Inputs) -> Built:
    """Bind SDPA with one backend pinned, or with torch's choice; raise Refused, with torch's reason, if it refuses."""
    sdpa.refuse(case.workload, name, inputs)
    backend = find_backend(BACKEND_OF.get(name, name))
    implementation = f"SDPA of torch {torch.__version__}" if name == "auto" else backend.implementation()
    return Built(sdpa.bind(case.workload, name, inputs), name, implementation)


def _count(value: int | None) -> int | None:
    return value or None  # 0 means "as many as q has", or no window


class FlashSdp(Target):
    """One SDPA backend against another, in any direction, layout and grouping."""

    chapter, workload = "labs/cudnn_sdpa_bench", "flash_sdp"
    summary = "one SDPA backend against another on the same inputs"
    sides: Mapping[str, str] = {"baseline": "SDPA with --baseline-backend (math)", "optimized": "SDPA with --backend"}
    choices = ("auto", *sdpa.BACKENDS)
    knobs = (
        *shape_knobs(cpu=(1, 4, 1024, 64, "fp32"), gpu=(4, 16, 4096, 128, "bf16")),
        CAUSAL,
        Knob("kv-heads", "heads of k and v, Hkv, a divisor of H; 0: as many", 0, 0, least=0),
        Knob("seq-len-kv", "tokens of k and v, Sk; 0: as many as q", 0, 0, least=0),
        Knob("window", "only keys fewer than this many positions away, by a boolean mask; 0: none", 0, 0, least=0),
        Knob("layout", "bhsd is contiguous, bshd a view of (B, S, H, D)", "bhsd", "bhsd", choices=LAYOUTS),
        Knob("pass", "what is timed", "forward", "forward", choices=DIRECTIONS),
        Knob("backend", "backend of the optimized side; auto is torch's own choice", "auto", "auto", choices=choices),
        Knob("baseline-backend", "backend of the baseline side", "math", "math", choices=choices),
    )

    def cases(self, settings, device):
        """Return the one case of these settings; raise BenchError for values that do not go together."""
        workload = Workload(
            *(settings[key].value for key in SHAPE_KNOBS),
            "causal" if settings["causal"].value else "full",
            kv_heads=_count(settings["kv_heads"].value),
            seq_len_kv=_count(settings["seq_len_kv"].value),
            layout=settings["layout"].value,
            direction=settings["pass"].value,
            window=_count(settings["window"].value),
        )
        if workload.heads % workload.hkv:
            raise BenchError(
                f"--kv-heads is {workload.hkv} and --heads {workload.heads}: each head of k and v serves "
                "as many heads of q, so --heads must be a multiple of --kv-heads."
            )
        if workload.needs_mask and workload.seq_len > workload.sk:
            raise BenchError(
                f"--seq-len is {workload.seq_len} and --seq-len-kv {workload.sk}: with --causal or "
                "--window the last query is at the last key, and the first queries would see none. "
                "Choose --seq-len-kv at least --seq-len."
            )
        return [Case(self.name, workload, settings, device)]

    def _backend(self, case: Case, side: str) -> str:
        return case.value("backend" if side == "optimized" else "baseline_backend")

    def support(self, case, side):
        """Whether this machine runs this side of the case, and why not."""
        return sdpa_support(self._backend(case, side), case)

    def score_buffers(self, case, side):
        """Fp32 buffers of (B, H, S, S) that the side needs at once."""
        return 3.0 if self._backend(case, side) == "math" else 0.0

    def build(self, case, side, q, k, v, dout=None):
        """Bind the side's call."""
        return build_sdpa(self._backend(case, side), case, Inputs(q, k, v, dout))

    def prove(self, case, side, built, launched):
        """Return the backend that ran; raise WrongRun if it is not the pinned one."""
        return prove(built.provider, launched, case.workload.direction)

    def facts(self, case, side, built):
        """Return the memory that a call needs."""
        return {"memory": sdpa.memory(built.fn)}


TARGETS = (FlashSdp(),)
