"""Functions under `torch.vmap`, across processes: plain tensors travel, and the dimensions along which each vmap maps them.

A mask or score modifier is called under one vmap for each of its indices, and its arguments are wrapped tensors without
memory of their own. `across` unwraps them, and wraps the result again; the other side calls the function by `mapped`, under
the same vmaps. So the function meets what it would meet in the process of its caller: control flow that depends on data
fails there as it fails here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C import _functorch
from torch._functorch.pyfunctorch import VmapInterpreter
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as leave_levels
from torch.utils._pytree import tree_map_only

from instructor.grading.wire.channel import WireError

MAX_LEVELS = 16
Vmaps = Sequence  # [[a dimension or None for each argument, randomness], ...] of each vmap, the outermost first


def across(call: Callable, args: tuple, kwargs: dict):
    """Return `call(args, kwargs, vmaps)` with plain tensors, made outside of this thread's vmaps, and its result inside of them."""
    levels = [(number, level) for number, level in enumerate(_functorch.get_interpreter_stack() or (), 1)]
    if any(level.key() != _functorch.TransformType.Vmap for _, level in levels):
        raise WireError("a function under a transformation of torch.func other than vmap cannot travel")
    unwrapped = [_unwrap(value) for value in (*args, *kwargs.values())]
    plain, vmaps, mapped_at = [value for value, _ in unwrapped], [], []
    for number, level in levels:
        dims = [found.get(number) for _, found in unwrapped]
        if any(dim is not None for dim in dims):
            vmaps.append([dims, VmapInterpreter(level).randomness()])
            mapped_at.append((number, VmapInterpreter(level).batch_size()))
    with leave_levels():
        result = call(tuple(plain[: len(args)]), dict(zip(kwargs, plain[len(args) :], strict=True)), vmaps)
    with torch._C.DisableTorchFunction():
        return tree_map_only(torch.Tensor, lambda tensor: _wrap(tensor, mapped_at), result)


def mapped(function: Callable, args: tuple, kwargs: dict, vmaps: Vmaps):
    """Call a function under vmaps that `across` described; they may be forged."""

    def call(*values):
        return function(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

    call.__name__ = str(getattr(function, "__name__", "answer"))  # torch's errors name it
    if len(vmaps) > MAX_LEVELS:
        raise WireError("a call under too many vmaps")
    for dims, randomness in reversed(vmaps):
        call = torch.vmap(call, in_dims=tuple(dims), randomness=randomness)
    return call(*args, *kwargs.values())


def _unwrap(value: object) -> tuple[object, dict[int, int]]:
    """The plain value, and {level: dimension} of each vmap that maps it."""
    dims = {}
    while isinstance(value, torch.Tensor) and _functorch.is_batchedtensor(value):
        dims[_functorch.maybe_get_level(value)] = _functorch.maybe_get_bdim(value)
        value = _functorch.get_unwrapped(value)
    return value, dims


def _wrap(tensor: torch.Tensor, levels: list[tuple[int, int]]) -> torch.Tensor:
    """A tensor whose first dimensions are those of the vmaps (number, size), inside of them."""
    if list(tensor.shape[: len(levels)]) != [size for _, size in levels]:
        raise WireError("a result of another size than its vmap's")
    for number, _ in levels:
        tensor = _functorch._add_batch_dim(tensor, 0, number)
    return tensor
