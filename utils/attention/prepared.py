"""A prepared attention call: it is bound and compiled once, and a guard checks that exactly this code runs."""

from __future__ import annotations

import time
import types
import warnings
from collections.abc import Callable

import torch

from utils.attention.masks.blocks import synchronize
from utils.attention.masks.mask_mods import captures, name_of
from utils.attention.problem import Attend, AttentionUnsupported, Bound, Problem

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # the modes of torch.compile


class Recompiled(RuntimeError):
    """A prepared call does not have exactly one compiled version, or its mask has changed."""


def compiled_versions(function: Callable) -> int:
    """Return the number of compiled versions of a function in torch.compile; more than one means a recompile."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(function.__code__))


def own_copy(function: Callable) -> Callable:
    """Copy a function and its code object: torch.compile keeps and counts versions by code object."""
    names = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copy = types.FunctionType(function.__code__.replace(), *names)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def compile_attend(function: Callable, mode: str, **inductor_options: object) -> Attend:
    """Compile a function for fixed shapes in one graph, so that no part of it can run as eager Python.

    Args:
        function: a function of q, k and v.
        mode: torch.compile's mode.
        **inductor_options: further settings of inductor.
    """
    # torch.compile takes a mode or options, not both, so the mode becomes options, too.
    options = torch._inductor.list_mode_options(mode) | inductor_options
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


class Prepared:
    """Attention by one backend, prepared for tensors of fixed shapes and layouts.

    Attributes:
        fn: the bare function of q, k, v, without the guard; benchmarks time it.
        inputs: the tensors for which it was prepared.
        backend: the name of the backend.
        settings: the settings in force: the backend, the mask, shapes, and the options.
        seconds: time of the preparation: {"block_mask": ..., "compile": ...} or {"first_call": ...}.
        source: the function that torch.compile compiled, if it did.
        block_mask: FlexAttention's BlockMask, if there is one.
    """

    def __init__(self, bound: Bound, problem: Problem, inputs: tuple[torch.Tensor, ...], settings: dict):
        self.inputs, self.seconds, self.backend = inputs, bound.seconds, settings["backend"]
        self._codes: list[str] = []
        self._metadata = tuple(map(_metadata, inputs))
        self._grad, self._mask = problem.needs_autograd, problem.mask_mod
        self._read = {captures(self._mask)}
        first = bound.first or bound.call
        began = time.perf_counter()
        with warnings.catch_warnings():  # ignore eager FlexAttention's warning that it stores all scores
            warnings.simplefilter("ignore")
            if bound.source is None:
                self._run(first, *inputs)
            else:
                self._codes = _with_code(lambda: self._run(first, *inputs))
        synchronize(problem.device)
        # Read these after the first call, which may change them while it tries options.
        self.fn, self.source, self.block_mask = bound.call, bound.source, bound.block_mask
        self.seconds["compile" if self.source else "first_call"] = time.perf_counter() - began
        self.settings = settings | _problem_settings(problem) | bound.settings
        self.check()

    def __call__(
        self, q: torch.Tensor | None = None, k: torch.Tensor | None = None, v: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the output (B, H, Sq, D) for the tensors of the preparation, or for tensors of the same shapes and layouts."""
        if q is None and k is None and v is None:
            q, k, v = self.inputs
        elif q is None or k is None or v is None:
            raise TypeError("give q, k and v, or none of them for the tensors that the call was prepared with.")
        elif (given := tuple(map(_metadata, (q, k, v)))) != self._metadata:
            raise ValueError(
                f"this call was prepared for {_describe(self._metadata)} and was given {_describe(given)}: prepare "
                "another one with prepare(...); compiled code is for one shape, type and layout."
            )
        if captures(self._mask) not in self._read:
            raise Recompiled(
                f"{name_of(self._mask)} reads something else than when this call was prepared: prepare it anew."
            )
        if self.source is None:
            return self._run(self.fn, q, k, v)
        before = compiled_graphs()
        out = self._run(self.fn, q, k, v)
        if compiled_graphs() != before:
            raise Recompiled(
                f"backend {self.backend!r} was compiled again by this call ({self.settings['mask']}, "
                f"{self.settings['score_mod']}): torch.compile's state was reset or a setting it guards "
                "was changed, so what was timed was not the prepared kernel. Prepare it anew with prepare()."
            )
        return out

    def _run(self, function: Attend, q, k, v) -> torch.Tensor:
        if self._grad:
            return function(q, k, v)
        with torch.no_grad():
            return function(q, k, v)

    def check(self) -> None:
        """Raise Recompiled unless there is exactly one compiled version: none means eager Python, two mean a recompile."""
        if self.source is None:
            return
        versions = compiled_versions(self.source)
        if versions != 1:
            raise Recompiled(
                f"backend {self.backend!r} has {versions} compiled versions and one is right: "
                + ("it ran as eager Python." if versions == 0 else "a guard failed.")
            )

    def generated_code(self) -> str:
        """Return the code that inductor wrote: Triton on a GPU, C++ on a CPU. Other backends refuse."""
        if not self._codes:
            raise AttentionUnsupported(self.backend, "it generates no code that inductor would show", ("flex",))
        return "\n".join(self._codes)


def _problem_settings(problem: Problem) -> dict:
    names = ("batch", "heads", "kv_heads", "sq", "sk", "head_dim")
    functions = {"mask": name_of(problem.mask_function()), "score_mod": name_of(problem.score_mod)}
    kind = {"dtype": problem.type_name, "device": str(problem.device), "scale": problem.scale}
    return functions | {name: getattr(problem, name) for name in names} | kind


def _metadata(x: torch.Tensor) -> tuple:
    return tuple(x.shape), tuple(x.stride()), x.dtype, x.device, x.requires_grad


def _describe(metadata: tuple) -> str:
    (shape, _, dtype, device, grad), (key_shape, *_), _ = metadata
    strides = " ".join(str(list(tensor[1])) for tensor in metadata)
    text = f"q {shape} {str(dtype).removeprefix('torch.')} on {device}, {key_shape[2]} keys, strides {strides}"
    return f"{text}, requiring a gradient" if grad else text


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has compiled in this process. This imports Triton."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _with_code(call: Callable) -> list[str]:
    """Return inductor's code from `call`: wrapper and kernels, new or from its cache."""
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    before = GraphLowering.__dict__["save_output_code"]  # inductor's hook for its code; None if unused
    GraphLowering.save_output_code = staticmethod(codes.append)
    try:
        call()
    finally:
        GraphLowering.save_output_code = before
    return list(dict.fromkeys(codes))
