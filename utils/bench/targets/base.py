"""The base class of targets. A target has knobs, cases and two sides; it builds, proves and names a side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from utils.attention.prepared import Prepared
from utils.bench.knobs import Knob, Setting
from utils.benchmark.profiling import Launched
from utils.machine.device import Support, compute_capability

SIDES = ("baseline", "optimized")
SHAPE_KNOBS = ("batch", "heads", "seq_len", "head_dim", "dtype")
# Knobs that make the workload or its inputs ("layout" in older results). All other knobs choose the kernel.
WORKLOAD_KNOBS = (
    *SHAPE_KNOBS,
    *("causal", "mask", "doc_span", "score_mod", "seed", "kv_heads", "seq_len_kv", "window", "layout", "pass"),
    *("inputs", "m", "n", "k", "elements"),
)


@dataclass(frozen=True)
class Case:
    """One workload of a target on one device, with the settings of all knobs."""

    target: str
    workload: Any  # a Workload, or an object that also has label, dtype, cost, to_dict and bytes_needed
    settings: Mapping[str, Setting]
    device: torch.device
    swept: Mapping[str, str] = field(default_factory=dict)  # this case's values of `--sweep`

    def value(self, key: str) -> Any:
        """Return the value of the knob `key`."""
        return self.settings[key].value

    @property
    def label(self) -> str:
        """A short text of the workload: "B4 H16 S4096 D64 bf16 causal"."""
        return self.workload.label

    def knobs_record(self) -> dict:
        """Return {knob: {"value", "origin"}} for the results, with this case's shape."""
        return {
            key: {
                "value": getattr(self.workload, key, setting.value) if key in SHAPE_KNOBS else setting.value,
                "origin": setting.origin,
            }
            for key, setting in self.settings.items()
        }


@dataclass
class Built:
    """One side, ready for its call. The run verifies, proves and times the same `fn()`."""

    fn: Callable[[], torch.Tensor]
    provider: str  # the requested provider; "auto" if torch chooses
    implementation: str = ""
    prepared: Prepared | None = None  # result of `utils.attention.prepare`, if the side uses it


def interpreted(name: str, device: torch.device) -> Support:
    """Refuse a kernel in Triton on a CPU."""
    if device.type == "cpu":
        return Support(False, f"{name} on a CPU runs in the simulator, whose time says nothing.", "Use a GPU.")
    return Support(True)


class Target:
    """A benchmark with a baseline and an optimized side. Each family of targets has a subclass in a separate file."""

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
        """Make the cases of these settings; raise BenchError for a combination that is not allowed."""
        raise NotImplementedError

    def support(self, case: Case, side: str) -> Support:
        """Whether this machine runs this side of the case, and why not. The base class checks that the dtype is fast enough."""
        kind, dtype = case.device.type, case.workload.dtype
        if kind == "cpu" and dtype == "fp16":
            why = "fp16 matrix products run near 1 GFLOP/s on a CPU, so their time says nothing."
            return Support(False, why, "Use --dtype fp32 or --dtype bf16.")
        major, minor = compute_capability() or (0, 0)
        if kind == "cuda" and dtype == "bf16" and major < 8:
            why = f"bf16 needs tensor cores of compute capability 8.0; this GPU has {major}.{minor}."
            return Support(False, why, "Use --dtype fp16 or --dtype fp32.")
        return Support(True)

    def bytes_needed(self, case: Case, side: str) -> int:
        """Estimate the bytes of a run with this side."""
        return case.workload.bytes_needed()

    def inputs(self, case: Case) -> tuple[torch.Tensor, ...]:
        """Make the inputs of `build` and `expected`."""
        raise NotImplementedError

    def expected(self, case: Case, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the float64 reference of each result, by name."""
        raise NotImplementedError

    def bounds(self, case: Case, side: str, precision: str, earlier: Mapping[str, dict]) -> tuple[float, float] | None:
        """Return the bounds on the errors of the whole and of the worst row; None takes `rounding_bounds`.

        precision: of the products. earlier: a side -> its verification, for the sides before this side.
        """
        return None

    def facts(self, case: Case, side: str, built: Built) -> dict:
        """Return more facts for the results, such as the memory of a side, after its verification and proof."""
        return {}

    def build(self, case: Case, side: str, *inputs: torch.Tensor) -> Built:
        """Build the side's call on these inputs."""
        raise NotImplementedError

    def prove(self, case: Case, side: str, built: Built, launched: Launched) -> str:
        """Name the kernel or backend that ran, judged by the launches; raise WrongRun if it is the wrong one."""
        raise NotImplementedError

    def range_name(self, side: str, ran: str) -> str:
        """Name the NVTX range of the side in a profile."""
        return f"{self.workload}_{side}_{ran}"
