"""Tensors under `torch.vmap`, across processes: the plain tensor travels, with the dimension of each level.

A mask or score modifier is called under one vmap for each of its indices, and its arguments are wrapped tensors without
memory of their own. Here they are unwrapped, sent with the levels that they were wrapped at, and wrapped again on the
other side, where the same levels are entered before the function runs. So the function meets what it would meet in the
process of its caller: control flow that depends on data fails there as it fails here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch._C import _functorch
from torch._functorch.pyfunctorch import VmapInterpreter, temporarily_clear_interpreter_stack
from torch._functorch.vmap import lazy_load_decompositions

MAX_LEVELS = 16
MAX_BATCH = 1 << 31
RANDOMNESS = ("error", "same", "different")
Levels = Sequence  # [[size, randomness], ...], the outermost first


class NotVmap(Exception):
    """A transformation other than vmap (grad, jvp) is on: its tensors do not travel."""


def levels_here() -> Levels:
    """The vmaps that this thread is under."""
    found = []
    for interpreter in _functorch.get_interpreter_stack() or ():
        if interpreter.key() != _functorch.TransformType.Vmap:
            raise NotVmap(f"torch.func's {interpreter.key().name.lower()} is on")
        vmap = VmapInterpreter(interpreter)
        found.append([vmap.batch_size(), vmap.randomness()])
    return found


@contextlib.contextmanager
def leave_levels() -> Iterator[None]:
    """Leave all vmaps for the time of a `with` block."""
    if _functorch.peek_interpreter_stack() is None:
        yield
        return
    with temporarily_clear_interpreter_stack():
        yield


@contextlib.contextmanager
def enter_levels(levels: Levels) -> Iterator[None]:
    """Enter exactly these vmaps for the time of a `with` block."""
    if levels:
        lazy_load_decompositions()  # as torch.vmap does: some operators have no other rule
    with leave_levels():
        depth = 0
        try:
            for size, randomness in levels:
                _functorch._vmap_increment_nesting(size, randomness)
                depth += 1
            yield
        finally:
            for _ in range(depth):
                _functorch._vmap_decrement_nesting()


def expect_levels(levels: object) -> Levels:
    """Return levels that came from another process; `ValueError` if they are not well formed."""
    if type(levels) is not list or len(levels) > MAX_LEVELS:
        raise ValueError("the levels of vmap are no short list")
    for level in levels:
        size, randomness = level
        if type(level) is not list or type(size) is not int or not 0 <= size < MAX_BATCH:
            raise ValueError("a level of vmap has no size")
        if randomness not in RANDOMNESS:
            raise ValueError("a level of vmap has no randomness")
    return levels


def unwrap(tensor: torch.Tensor) -> tuple[torch.Tensor, list[list[int]]]:
    """The plain tensor, and [level, dimension] of each vmap that it is wrapped at, the outermost first."""
    found = []
    while _functorch.is_batchedtensor(tensor):
        found.append([_functorch.maybe_get_level(tensor), _functorch.maybe_get_bdim(tensor)])
        tensor = _functorch.get_unwrapped(tensor)
    if _functorch.is_functorch_wrapped_tensor(tensor):
        raise NotVmap("a tensor of torch.func cannot travel")
    return tensor, found[::-1]


def wrap(tensor: torch.Tensor, dims: list[list[int]], levels: Levels) -> torch.Tensor:
    """Undo `unwrap`; `ValueError` where `dims` contradict the tensor or the levels."""
    last = 0
    for level, dim in dims:
        if type(level) is not int or not last < level <= len(levels):
            raise ValueError("a tensor is wrapped at a level of vmap that is not there")
        if type(dim) is not int or not 0 <= dim < tensor.dim() or tensor.shape[dim] != levels[level - 1][0]:
            raise ValueError("a tensor is wrapped along a dimension that does not fit its level of vmap")
        tensor, last = _functorch._add_batch_dim(tensor, dim, level), level
    return tensor
