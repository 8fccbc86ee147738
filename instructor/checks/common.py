"""Shared by the checks of all labs: fresh inputs, sizes of operators, numbers with their known mistakes."""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from utils.checking import expect_number

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
# Operators that compute, without views, allocations and copies.
_ARITHMETIC = (
    "mul add sub div sum mean prod cumsum addcmul addcdiv nansum exp exp2 expm1 max amax maximum pow logaddexp masked_fill "
    "where _softmax"
)
ARITHMETIC = frozenset(_ARITHMETIC.split())


class Draw:
    """Fresh random inputs: different ones each time with `seed=None`, the same ones with the same number."""

    def __init__(self, seed: int | None) -> None:
        self.numbers = random.Random(seed)
        self.generator = torch.Generator().manual_seed(self.numbers.getrandbits(48))

    def size(self, low: int, high: int) -> int:
        """Draw an integer from low to high, both included."""
        return self.numbers.randint(low, high)

    def sizes(self, count: int, low: int, high: int) -> list[int]:
        """Draw `count` different integers from low to high: if an answer mixes up two sizes, the result is wrong."""
        return self.numbers.sample(range(low, high + 1), count)

    def real(self, low: float, high: float) -> float:
        """Draw a number from low to high."""
        return self.numbers.uniform(low, high)

    def choice(self, values: Sequence) -> Any:
        """Draw one of the values."""
        return self.numbers.choice(values)

    def some(self, count: int, values: Sequence) -> list:
        """Draw `count` different values: a mistake that one value hides still shows with another."""
        return self.numbers.sample(values, count)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Draw standard normal values."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(dtype)


def by_value(function: Callable) -> Callable:
    """Mark a check's function that runs where the answer runs, as a profiler or a counter of the student's needs it.

    The grader sends such a function, with what it refers to, into the student's process. It may hold nothing that gives
    an answer away. Functions that it refers to are called from afar if they are not marked.
    """
    function.travels_by_value = True  # type: ignore[attr-defined]
    return function


def beside(answer: object, function: Callable) -> Callable:
    """Return a `by_value` function so that it runs in the process where the answer lives."""
    run = getattr(answer, "remote_run", None)
    return function if run is None else functools.partial(run, function)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def expect_value(
    got: Any, expected: float, unit: str, what: str, mistakes: Mapping[str, float] | None = None, rel: float = 1e-6
) -> None:
    """Assert a number; if it is wrong, say what was expected and which known mistake gives this number.

    Args:
        got: the answer.
        expected: the right number.
        unit: of the number; "" if it has none.
        what: name of the answer, the subject of the message.
        mistakes: {hint: the number that this mistake leads to}.
        rel: relative tolerance.
    """
    try:
        expect_number(got, expected, rel=rel, unit=unit, what=what)
    except AssertionError as error:
        if got is None or got is ... or isinstance(got, bool):
            raise
        try:
            value = float(got)
        except (TypeError, ValueError):
            raise error from None
        tail = f" {unit}" if unit else ""
        got_text, expected_text = _shown(value), _shown(expected)
        # At some sizes two mistakes lead to the same number; then the message names both.
        hints = [
            hint
            for hint, number in (mistakes or {}).items()
            if abs(value - number) <= rel * max(abs(number), 1e-300) and abs(number - expected) > rel * abs(expected)
        ]
        if hints:
            hint = " Or: ".join(hints)
            raise AssertionError(f"{what} is {got_text}{tail}, expected {expected_text}. {hint}") from None
        raise AssertionError(f"{error} Expected here: {expected_text}{tail}.") from None


def _shown(number: float) -> str:
    return f"{int(number):,}" if float(number).is_integer() else f"{number:.6g}"


def expect_counts(
    got: Any,
    expected: Sequence[float],
    units: Sequence[str],
    what: str,
    mistakes: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Assert a tuple of numbers; `mistakes` maps a hint to the tuple that the mistake leads to."""
    if not isinstance(got, tuple | list) or len(got) != len(expected):
        raise AssertionError(f"{what} should be ({', '.join(units)}), {len(expected)} numbers, and is {got!r}.")
    for i, unit in enumerate(units):
        known = {hint: numbers[i] for hint, numbers in (mistakes or {}).items()}
        expect_value(got[i], expected[i], unit, f"{what}[{i}]", known)


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


def expect_unchanged(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], what: str) -> None:
    """Assert that a function did not change its inputs."""
    for old, new in zip(before, after, strict=True):
        if not torch.equal(torch.nan_to_num(old), torch.nan_to_num(new)):
            raise AssertionError(f"{what} changed one of its inputs. Work on new tensors: `x += ...` writes into x.")
