"""Parts that the checks of all labs share: fresh inputs, sizes of operators, numbers with their known mistakes."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from utils.checking import expect_items, expect_number

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
# The seed of a check whose caller gives no seed. Students do not have this file. Tests draw with many other seeds.
COURSE_SEED = 715_517


def draw_for(submission: bytes) -> None:
    """Draw the inputs of one submission from now on: a file always gets the same inputs, and another file other inputs.

    A message about a wrong answer names the inputs and the expected result. A student who hands in again gets other
    inputs, so a table of expected results is of no use.
    """
    global COURSE_SEED
    COURSE_SEED = int.from_bytes(hashlib.sha256(b"715517" + submission).digest()[:6], "big")


class Draw:
    """Random inputs: equal seeds draw equal inputs, and `seed=None` is the course's own seed."""

    def __init__(self, seed: int | None) -> None:
        self.numbers = random.Random(COURSE_SEED if seed is None else seed)
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

    def choose(self, count: int, values: Sequence) -> list:
        """Draw `count` different values: if one value hides a mistake, the next value shows it."""
        return self.numbers.sample(values, count)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Draw standard normal values."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(dtype)


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
        unit: the unit of the number; "" if the number has no unit.
        what: name of the answer, the subject of the message.
        mistakes: {hint: the number that this mistake leads to}.
        rel: relative tolerance.
    """
    expect_number(got, expected, rel, unit, what, mistakes=mistakes, tell=True)


def expect_counts(
    got: Any,
    expected: Sequence[float],
    units: Sequence[str],
    what: str,
    mistakes: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Assert a tuple of numbers; `mistakes` maps a hint to the tuple that the mistake leads to."""
    expect_items(got, ", ".join(unit or "share" for unit in units), what)
    for i, unit in enumerate(units):
        known = {hint: numbers[i] for hint, numbers in (mistakes or {}).items()}
        expect_value(got[i], expected[i], unit, f"{what}[{i}]", known)
