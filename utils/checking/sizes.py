"""How large the tensors are that an answer works on, whether it reads memory that nothing was written to, and its device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that compute, without views, allocations and copies.
_ARITHMETIC = (
    "mul add sub div sum mean prod cumsum addcmul addcdiv nansum exp exp2 expm1 max amax maximum pow logaddexp masked_fill "
    "where _softmax"
)
ARITHMETIC = frozenset(_ARITHMETIC.split())


class SizeWatch(TorchDispatchMode):
    """Records the operators that run, with the elements of the largest tensor that each one reads or writes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[str, int] = {}
        self.products: list[tuple[int, int, int, int]] = []  # (batch, m, k, n) of each matrix product

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1].rstrip("_") or func.__name__
        tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
        if isinstance(result, tuple):
            tensors += [t for t in result if isinstance(t, torch.Tensor)]
        elements = max((t.numel() for t in tensors), default=0)
        self.largest[name] = max(self.largest.get(name, 0), elements)
        if name in ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv"):
            pair = [t for t in args if isinstance(t, torch.Tensor)][-2:]
            left, right = pair[0], pair[1]
            batch = left.shape[0] if left.dim() == 3 else 1
            columns = right.shape[-1] if right.dim() >= 2 else 1
            self.products.append((batch, left.shape[-2], left.shape[-1], columns))
        return result

    @property
    def macs(self) -> int:
        """Return the multiply-accumulates of all matrix products."""
        return sum(math.prod(product) for product in self.products)

    def over(self, limit: int, names: frozenset[str] = ARITHMETIC) -> tuple[str, int] | None:
        """Return the operator of `names` with the most elements, and their number, if it is more than `limit`."""
        name = max((n for n in self.largest if n in names), key=self.largest.__getitem__, default=None)
        return (name, self.largest[name]) if name and self.largest[name] > limit else None


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new memory of `torch.empty` with NaN: a function that reads it before writing gets NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


class _ScalarsOfNothing(TorchFunctionMode):
    """Answers 1.0 when a value of a meta tensor is read; such a tensor has no values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("item", "__float__"):
            return 1.0
        return func(*args, **(kwargs or {}))


def expect_follows_device(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...], what: str) -> None:
    """Assert that the result is on the device of the inputs, with inputs on a device that is not the default one.

    That device is "meta": tensors with shapes and without values, which every machine has. A function that needs values of
    its inputs, for example to branch on them, cannot run there and is not judged.

    Args:
        function: the answer.
        *shapes: shapes of its inputs.
        what: name of the answer, the subject of the message.
    """
    inputs = [torch.empty(*shape, device="meta") for shape in shapes]
    hint = "Create tensors with device=a.device (the device of the input): on a GPU they must not land on the CPU."
    try:
        with _ScalarsOfNothing():
            result = function(*inputs)
    except RuntimeError as error:
        if "same device" in str(error) or "devices" in str(error):
            raise AssertionError(f"{what} mixes devices when its inputs are not on the CPU. {hint}") from None
        return
    except Exception:
        return
    if isinstance(result, torch.Tensor) and result.device.type != "meta":
        raise AssertionError(f"{what} should be on its inputs' device, and is on the {result.device.type}. {hint}")
