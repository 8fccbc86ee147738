"""What a target is: its knobs, its cases, and two sides that can be supported, built, proved and named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from utils.bench.errors import BenchError
from utils.bench.knobs import Knob, Setting
from utils.bench.targets.proof import Launched
from utils.bench.workload import DTYPES, MASKS, Workload, make_inputs, reference
from utils.machine.device import Support, compute_capability

SIDES = ("baseline", "optimized")
SHAPE_KNOBS = ("batch", "heads", "seq_len", "head_dim", "dtype")
# Knobs that make the workload or its inputs; the others choose what computes it.
WORKLOAD_KNOBS = (
    *SHAPE_KNOBS,
    "causal",
    "mask",
    "doc_span",
    "score_mod",
    "seed",
    "kv_heads",
    "seq_len_kv",
    "window",
    "layout",
    "pass",
)


@dataclass(frozen=True)
class Case:
    """One workload of a target on one device, with every knob in force."""

    target: str
    workload: Workload
    settings: Mapping[str, Setting]
    device: torch.device

    def value(self, key: str) -> Any:
        return self.settings[key].value

    @property
    def label(self) -> str:
        return self.workload.label

    def knobs_record(self) -> dict:
        """{knob: {"value", "origin"}} as it stands in the results: a matrix's knobs with this case's values."""
        return {
            key: {
                "value": getattr(self.workload, key) if key in SHAPE_KNOBS else setting.value,
                "origin": setting.origin,
            }
            for key, setting in self.settings.items()
        }


@dataclass
class Built:
    """One side, ready to be called: `fn()` is exactly what is verified, proved and timed."""

    fn: Callable[[], torch.Tensor]
    provider: str  # what was asked for; "auto" where torch chooses
    implementation: str = ""
    after: Callable[[], None] = field(default=lambda: None)  # raises if the timed calls were not what they should be


def shape_knobs(cpu: tuple, gpu: tuple, *, many_dtypes: bool = False) -> tuple[Knob, ...]:
    """--batch --heads --seq-len --head-dim --dtype --seed; `cpu` and `gpu` are (B, H, S, D, dtype) defaults."""
    names = (
        ("batch", "sequences, B"),
        ("heads", "attention heads, H"),
        ("seq-len", "tokens of a sequence, S"),
        ("head-dim", "numbers of a head, D"),
    )
    knobs = [Knob(name, text, cpu[i], gpu[i]) for i, (name, text) in enumerate(names)]
    knobs.append(
        Knob(
            "dtype",
            "dtype of q, k and v" + (", several with commas" if many_dtypes else ""),
            cpu[4],
            gpu[4],
            choices=tuple(DTYPES),
            many=many_dtypes,
        )
    )
    knobs.append(Knob("seed", "seed of the random inputs", 42, 42, least=0))
    return tuple(knobs)


CAUSAL = Knob("causal", "a query sees no later key", False, False)


def mask_knobs(cpu_span: int, gpu_span: int) -> tuple[Knob, ...]:
    return (
        Knob("mask", "which keys a query sees", "causal_document", "causal_document", choices=MASKS),
        Knob("doc-span", "tokens of a document, for the document masks", cpu_span, gpu_span, env="DOC_SPAN"),
    )


def masked_workload(settings: Mapping[str, Setting], score_mod: str = "none") -> Workload:
    """The workload of settings with a --mask; a document span that the mask would ignore is an error."""
    mask, span = settings["mask"].value, settings["doc_span"]
    if "document" in mask:
        return Workload(
            *(settings[key].value for key in SHAPE_KNOBS), mask, min(span.value, settings["seq_len"].value), score_mod
        )
    if span.origin != "default":
        where = "--doc-span" if span.origin == "flag" else "DOC_SPAN"
        raise BenchError(
            f"{where} is {span.value} and --mask {mask} has no documents; use --mask causal_document or "
            f"document, or leave {where} out."
        )
    return Workload(*(settings[key].value for key in SHAPE_KNOBS), mask, None, score_mod)


def plain_workload(settings: Mapping[str, Setting]) -> Workload:
    """The workload of settings with a --causal switch."""
    return Workload(*(settings[key].value for key in SHAPE_KNOBS), "causal" if settings["causal"].value else "full")


def dtype_support(dtype: str, device: torch.device) -> Support:
    """Whether a dtype is worth timing on this device."""
    if device.type == "cpu" and dtype == "fp16":
        return Support(
            False,
            "fp16 matrix products run near 1 GFLOP/s on a CPU, so their time says nothing.",
            "Use --dtype fp32 or --dtype bf16.",
        )
    if device.type == "cuda" and dtype == "bf16" and compute_capability() < (8, 0):
        return Support(
            False,
            "bf16 needs tensor cores of compute capability 8.0; this GPU has {}.{}.".format(*compute_capability()),
            "Use --dtype fp16 or --dtype fp32.",
        )
    return Support(True)


class Target:
    """A benchmark with a baseline and an optimized side. One file for each family subclasses it."""

    chapter: str  # "labs/flexattention"
    workload: str  # "flex_attention"
    summary: str
    sides: Mapping[str, str]  # {"baseline": "eager FlexAttention", "optimized": ...}, for list-targets
    knobs: tuple[Knob, ...]
    # (warm-up calls, timed samples) unless --warmup and --iterations say otherwise
    protocol: Mapping[str, tuple[int, int]] = {"cpu": (5, 30), "cuda": (20, 100)}

    @property
    def name(self) -> str:
        return f"{self.chapter}:{self.workload}"

    def side_name(self, side: str) -> str:
        """Such as "labs/flexattention:baseline_flex_attention"."""
        return f"{self.chapter}:{side}_{self.workload}"

    def cases(self, settings: Mapping[str, Setting], device: torch.device) -> list[Case]:
        """The cases of these settings; raises BenchError for values that do not go together."""
        raise NotImplementedError

    def support(self, case: Case, side: str) -> Support:
        """Whether this machine runs this side of the case, and why not."""
        raise NotImplementedError

    def score_buffers(self, case: Case, side: str) -> float:
        """How many fp32 buffers of (B, H, S, S) the side needs at once: 0 for a fused kernel."""
        return 0.0

    def inputs(self, case: Case) -> tuple[torch.Tensor, ...]:
        """What `build` and `expected` are given: q, k, v (B, H, S, D)."""
        return make_inputs(case.workload, case.device, case.value("seed"))

    def expected(self, case: Case, *inputs: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """In float64 what a side's call returns; of a call that returns several tensors all of them, by name."""
        return reference(case.workload, *inputs)

    def facts(self, case: Case, side: str, built: Built) -> dict:
        """What else the results are to say of a side that was verified and proved, such as its memory."""
        return {}

    def build(self, case: Case, side: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Built:
        """The side's call on these inputs."""
        raise NotImplementedError

    def prove(self, case: Case, side: str, built: Built, launched: Launched) -> str:
        """The name of what really ran, told from what was launched; raises Refused if it is not what was asked for."""
        raise NotImplementedError

    def range_name(self, side: str, ran: str) -> str:
        """NVTX range of the side in a profile."""
        return f"{self.workload}_{side}_{ran}"
