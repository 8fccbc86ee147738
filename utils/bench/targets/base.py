"""A target: its knobs, its cases, and its two sides, which can be supported, built, proved and named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from utils.bench.errors import BenchError
from utils.bench.knobs import Knob, Setting
from utils.bench.workload import DTYPES, MASKS, Workload, make_inputs, reference
from utils.benchmark.profiling import Launched
from utils.machine.device import Support, compute_capability

SIDES = ("baseline", "optimized")
SHAPE_KNOBS = ("batch", "heads", "seq_len", "head_dim", "dtype")
# Knobs that make the workload or its inputs. The other knobs choose the kernel that computes it.
WORKLOAD_KNOBS = (
    *SHAPE_KNOBS,
    *("causal", "mask", "doc_span", "score_mod", "seed", "kv_heads", "seq_len_kv", "window", "layout", "pass"),
    *("inputs", "m", "n", "k", "elements"),
)


@dataclass(frozen=True)
class Case:
    """One workload of a target on one device, with every knob in force."""

    target: str
    workload: Any  # a Workload, or another object with its label, dtype, cost, density, to_dict and bytes_needed
    settings: Mapping[str, Setting]
    device: torch.device
    swept: Mapping[str, str] = field(default_factory=dict)  # the value of `--sweep` that made this case

    def value(self, key: str) -> Any:
        """Return the value in force of the knob `key`."""
        return self.settings[key].value

    @property
    def label(self) -> str:
        """The workload in short: "B4 H16 S4096 D64 bf16 causal"."""
        return self.workload.label

    def knobs_record(self) -> dict:
        """Return {knob: {"value", "origin"}} for the results; knobs of the shape get this case's values."""
        return {
            key: {
                "value": getattr(self.workload, key, setting.value) if key in SHAPE_KNOBS else setting.value,
                "origin": setting.origin,
            }
            for key, setting in self.settings.items()
        }


@dataclass
class Built:
    """One side, ready to be called: exactly `fn()` is verified, proved and timed."""

    fn: Callable[[], torch.Tensor]
    provider: str  # the provider that was asked for; "auto" where torch chooses
    implementation: str = ""
    after: Callable[[], None] = field(default=lambda: None)  # raises if the timed calls went wrong, e.g. recompiled


def shape_knobs(cpu: tuple, gpu: tuple, *, many_dtypes: bool = False) -> tuple[Knob, ...]:
    """Make the knobs --batch --heads --seq-len --head-dim --dtype --seed.

    Args:
        cpu: the defaults (B, H, S, D, dtype) on a CPU.
        gpu: the defaults on a GPU.
        many_dtypes: whether --dtype takes several dtypes, separated by commas.
    """
    sizes = (
        ("batch", "sequences, B"),
        ("heads", "attention heads, H"),
        ("seq-len", "tokens of a sequence, S"),
        ("head-dim", "numbers of a head, D"),
    )
    meaning = "dtype of q, k and v" + (", several with commas" if many_dtypes else "")
    return (
        *(Knob(name, text, cpu[i], gpu[i]) for i, (name, text) in enumerate(sizes)),
        Knob("dtype", meaning, cpu[4], gpu[4], choices=tuple(DTYPES), many=many_dtypes),
        Knob("seed", "seed of the random inputs", 42, 42, least=0),
    )


CAUSAL = Knob("causal", "a query sees no later key", False, False)


def mask_knobs(cpu_span: int, gpu_span: int) -> tuple[Knob, ...]:
    """Make the knobs --mask and --doc-span; the arguments are the default spans, in tokens, on a CPU and on a GPU."""
    return (
        Knob("mask", "which keys a query sees", "causal_document", "causal_document", choices=MASKS),
        Knob("doc-span", "tokens of a document, for the document masks", cpu_span, gpu_span, env="DOC_SPAN"),
    )


def _shape(settings: Mapping[str, Setting]) -> dict[str, Any]:
    return {key: settings[key].value for key in SHAPE_KNOBS}


def masked_workload(settings: Mapping[str, Setting], score_mod: str = "none") -> Workload:
    """Make the workload of settings with a --mask.

    A document span that the mask would ignore is an error, and so is one that is longer than the text. The default is cut
    to the text.
    """
    shape, mask, span = _shape(settings), settings["mask"].value, settings["doc_span"]
    source = {"default": "", "flag": "--doc-span"}.get(span.origin, "DOC_SPAN")
    if "document" in mask:
        if source and span.value > shape["seq_len"]:
            raise BenchError(
                f"{source} is {span.value} and the text has {shape['seq_len']} tokens (--seq-len): documents are at most as "
                "long as the text. Take a shorter span or a longer text."
            )
        return Workload(**shape, mask=mask, doc_span=min(span.value, shape["seq_len"]), score_mod=score_mod)
    if source:
        raise BenchError(
            f"{source} is {span.value} and --mask {mask} has no documents; use --mask causal_document or "
            f"document, or leave {source} out."
        )
    return Workload(**shape, mask=mask, score_mod=score_mod)


def plain_workload(settings: Mapping[str, Setting]) -> Workload:
    """Make the workload of settings with a --causal switch."""
    return Workload(**_shape(settings), mask="causal" if settings["causal"].value else "full")


def dtype_support(dtype: str, device: torch.device) -> Support:
    """Say whether a dtype is worth timing on this device."""
    if device.type == "cpu" and dtype == "fp16":
        return Support(
            False,
            "fp16 matrix products run near 1 GFLOP/s on a CPU, so their time says nothing.",
            "Use --dtype fp32 or --dtype bf16.",
        )
    capability = compute_capability() or (0, 0)
    if device.type == "cuda" and dtype == "bf16" and capability < (8, 0):
        return Support(
            False,
            "bf16 needs tensor cores of compute capability 8.0; this GPU has {}.{}.".format(*capability),
            "Use --dtype fp16 or --dtype fp32.",
        )
    return Support(True)


class Target:
    """A benchmark with a baseline and an optimized side. Each family of targets has a file with its subclass."""

    chapter: str  # "labs/flexattention"
    workload: str  # "flex_attention"
    summary: str
    sides: Mapping[str, str]  # {"baseline": "eager FlexAttention", "optimized": ...}, for list-targets
    knobs: tuple[Knob, ...]
    # (warm-up calls, timed samples) unless --warmup and --iterations say otherwise
    protocol: Mapping[str, tuple[int, int]] = {"cpu": (5, 30), "cuda": (20, 100)}

    @property
    def name(self) -> str:
        """The target's name, such as "labs/flexattention:flex_attention"."""
        return f"{self.chapter}:{self.workload}"

    def side_name(self, side: str) -> str:
        """Return the name of one side, such as "labs/flexattention:baseline_flex_attention"."""
        return f"{self.chapter}:{side}_{self.workload}"

    def cases(self, settings: Mapping[str, Setting], device: torch.device) -> list[Case]:
        """Make the cases of these settings; raise BenchError for values that do not go together."""
        raise NotImplementedError

    def support(self, case: Case, side: str) -> Support:
        """Say whether this machine runs this side of the case, and if not, why."""
        raise NotImplementedError

    def score_buffers(self, case: Case, side: str) -> float:
        """Count the fp32 buffers of (B, H, S, S) that the side needs at once: 0 for a fused kernel."""
        return 0.0

    def inputs(self, case: Case) -> tuple[torch.Tensor, ...]:
        """Make the inputs of `build` and `expected`: q, k, v, and the output's gradient unless the pass is forward."""
        inputs = make_inputs(case.workload, case.device, case.value("seed"))
        return inputs.qkv if inputs.dout is None else inputs

    def expected(self, case: Case, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the float64 reference of each result, by name."""
        return reference(case.workload, *inputs)

    def bounds(self, case: Case, side: str, precision: str, earlier: Mapping[str, dict]) -> tuple[float, float] | None:
        """Return the errors allowed, of the whole and of the worst row; None for what the rounding explains.

        Args:
            case: the case.
            side: the side to verify.
            precision: the precision of its products.
            earlier: the verifications of the sides before it, by side.
        """
        return None

    def facts(self, case: Case, side: str, built: Built) -> dict:
        """Return further facts for the results about a side that was verified and proved, such as its memory."""
        return {}

    def build(self, case: Case, side: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Built:
        """Build the side's call on these inputs."""
        raise NotImplementedError

    def prove(self, case: Case, side: str, built: Built, launched: Launched) -> str:
        """Name what really ran, judged by what was launched; raise WrongRun if it is not what was asked for."""
        raise NotImplementedError

    def range_name(self, side: str, ran: str) -> str:
        """Name the NVTX range of the side in a profile."""
        return f"{self.workload}_{side}_{ran}"
