"""A prepared attention call: compiled once, guarded against running as anything else, with its code to read."""

from __future__ import annotations

import time
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from utils.attention import masks
from utils.attention.flex_support import FlexUnsupported


class Recompiled(RuntimeError):
    """A prepared call was compiled again, or not at all, where one compiled version is right."""


def compiled_versions(function: Callable) -> int:
    """How many compiled versions torch.compile holds of a function; more than one is a recompile."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(function.__code__))


def own_copy(function: Callable) -> Callable:
    """The function on a code object of its own: torch.compile keeps and counts compiled versions by code object."""
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@dataclass
class Prepared:
    """Attention on one path, ready to be called with tensors like those it was made for."""

    fn: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    settings: dict
    seconds: dict = field(default_factory=dict)  # {"block_mask": ..., "compile": ...}, what was spent once
    source: Callable | None = None  # the function that torch.compile compiled
    codes: list[str] = field(default_factory=list)
    block_mask: object = None

    def __post_init__(self):
        self._like = tuple(_metadata(x) for x in self.inputs)
        self._grad = torch.is_grad_enabled() and any(x.requires_grad for x in self.inputs)
        # The first call: inductor compiles, and libraries load.
        began = time.perf_counter()
        with warnings.catch_warnings():  # eager FlexAttention warns that it stores all scores: that is known here
            warnings.simplefilter("ignore")
            if self.source is None:
                self._run(*self.inputs)
            else:
                self.codes = _with_code(lambda: self._run(*self.inputs))
        masks._synchronize(self.inputs[0].device)
        self.seconds["compile" if self.source else "first_call"] = time.perf_counter() - began
        self.check()

    @property
    def path(self) -> str:
        return self.settings["path"]

    def __call__(
        self, q: torch.Tensor | None = None, k: torch.Tensor | None = None, v: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The output (B, H, Sq, D), on the tensors it was prepared with or on others exactly like them."""
        if q is None:
            return self._guarded(*self.inputs)
        given = tuple(_metadata(x) for x in (q, k, v))
        if given != self._like:
            raise ValueError(
                f"this call was prepared for {_tell(self._like)} and was given {_tell(given)}: prepare "
                "another one with flex(...); compiled code is for one shape, type and layout."
            )
        return self._guarded(q, k, v)

    def _guarded(self, q, k, v) -> torch.Tensor:
        if self.source is None:
            return self._run(q, k, v)
        before = _compiles()
        out = self._run(q, k, v)
        if _compiles() != before:
            raise Recompiled(
                f"path {self.path!r} was compiled again by this call ({self.settings['mask']}, "
                f"{self.settings['score_mod']}): torch.compile's state was reset or a setting it guards "
                "was changed, so what was timed was not the prepared kernel. Prepare it anew with flex()."
            )
        return out

    def _run(self, q, k, v) -> torch.Tensor:
        if self._grad:
            return self.fn(q, k, v)
        with torch.no_grad():
            return self.fn(q, k, v)

    def check(self) -> None:
        """Raise Recompiled unless exactly one compiled version is there: none is eager, two are a recompile."""
        if self.source is None:
            return
        versions = compiled_versions(self.source)
        if versions != 1:
            raise Recompiled(
                f"path {self.path!r} has {versions} compiled versions and one is right: "
                + ("it ran as eager Python." if versions == 0 else "a guard failed.")
            )

    def generated_code(self) -> str:
        """The code that inductor wrote: Triton on a GPU, C++ on a CPU. Refused by paths that write none."""
        if not self.codes:
            raise FlexUnsupported(self.path, "generates no code that inductor would show", ("compiled",))
        return "\n".join(self.codes)


def _metadata(x: torch.Tensor) -> tuple:
    return tuple(x.shape), tuple(x.stride()), x.dtype, x.device, x.requires_grad


def _tell(metadata: tuple) -> str:
    (shape, _, dtype, device, grad) = metadata[0]
    lengths = f", {metadata[1][0][2]} keys" if metadata[1][0][2] != shape[2] else ""
    strides = " ".join(str(list(one[1])) for one in metadata)
    return f"q {shape} {str(dtype).removeprefix('torch.')} on {device}{lengths}, strides {strides}" + (
        ", requiring a gradient" if grad else ""
    )


def _compiles() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _with_code(call: Callable) -> list[str]:
    """The code that inductor writes while `call` runs: its wrapper and kernels, from the cache as from new."""
    from torch._inductor.graph import GraphLowering

    found: list[str] = []
    before = GraphLowering.__dict__["save_output_code"]  # inductor's own hook, for this purpose; None if unused
    GraphLowering.save_output_code = staticmethod(found.append)
    try:
        call()
    finally:
        GraphLowering.save_output_code = before
    return list(dict.fromkeys(found))
