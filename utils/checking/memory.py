"""Rules for memory: an answer reads no memory before it is written, and its result is on the device of its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.overrides import TorchFunctionMode

from utils.checking.answers import run_beside


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new memory of `torch.empty` with NaN, so that a function that reads it before writing gets NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch fills new memory in this mode
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class _ScalarsOfNothing(TorchFunctionMode):
    """A mode that returns 1.0 when code reads a value of a meta tensor, which has no values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("item", "__float__"):
            return 1.0
        return func(*args, **(kwargs or {}))


def _on_meta(function: Callable[..., torch.Tensor], inputs: list) -> torch.Tensor:
    with _ScalarsOfNothing():
        return function(*inputs)


def expect_follows_device(function: Callable[..., torch.Tensor], *arguments: tuple[int, ...] | int, what: str) -> None:
    """Assert that the result is on the device of the inputs. The check uses the device "meta", which every machine has.

    Its tensors have shapes, but no values. A function that needs values of its inputs, for example to branch on them,
    cannot run there, and is not judged. A tuple among the arguments is the shape of an input.
    """
    inputs = [torch.empty(*given, device="meta") if isinstance(given, tuple) else given for given in arguments]
    hint = "Create tensors with device=a.device (the device of the input): on a GPU they must not land on the CPU."
    try:
        result = run_beside(function)(_on_meta, function, inputs)
    except Exception as error:
        if "same device" not in str(error):
            return
        raise AssertionError(f"{what} mixes devices when its inputs are not on the CPU. {hint}") from None
    if isinstance(result, torch.Tensor) and result.device.type != "meta":
        raise AssertionError(f"{what} should be on its inputs' device, and is on the {result.device.type}. {hint}")
