"""The tensors that a call works on, given or not, and the device it therefore runs on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from utils.machine.device import default_device


def tensors_of(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Tensors in a call: arguments, containers, modules, and what a function's closure and its globals hold."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif depth < 4:
        if isinstance(value, functools.partial):
            value = [value.func, value.args, value.keywords]
        elif callable(value) and not isinstance(value, type):
            value = _within(value)
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (list, tuple)):
            for item in value[:256]:
                yield from tensors_of(item, depth + 1)


def _within(fn: Callable) -> list:
    """What a function works on without being given it: its object, closure, attributes, and globals it names."""
    found = [getattr(fn, "__self__", None), getattr(fn, "__dict__", None)]
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a variable not yet bound
            continue
    names = getattr(getattr(fn, "__code__", None), "co_names", ())
    variables = getattr(fn, "__globals__", {})
    return found + [variables[name] for name in names if name in variables]


def pick_device(device, *values) -> torch.device:
    """The device asked for; else that of the call's tensors, a GPU before the CPU; else the default device."""
    if device is not None:
        chosen = torch.device(device)
    else:
        kinds = {tensor.device for value in values for tensor in tensors_of(value)}
        on_gpu = [found for found in kinds if found.type == "cuda"]
        chosen = (on_gpu or list(kinds) or [default_device()])[0]
    if chosen.type not in ("cuda", "cpu"):
        raise ValueError(f'measure() times CUDA GPUs and CPUs, not {chosen.type!r}; pass device="cpu" or "cuda".')
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"device={str(chosen)!r} was asked for and there is no CUDA GPU here; "
                'leave device out or pass device="cpu".'
            )
        if chosen.index is None:
            chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen
