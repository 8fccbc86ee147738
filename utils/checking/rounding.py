"""Whether a result in 16 bits was computed in wider numbers and rounded once."""

from __future__ import annotations

import torch

# Share of the results that may differ from the exact ones, rounded. With float32 inside, only those few differ that lie almost
# in the middle of two numbers of the dtype: none of most inputs, half a percent of scores in float16 that are large. With weights
# of 8 bits it is 7 to 86 percent, with scores, the sum or the output in 16 bits on the way 41 to 74.
_OTHERWISE = 0.04


def expect_rounded_once(got: torch.Tensor, exact: torch.Tensor, what: str, suspects: str) -> None:
    """Assert that results are the exact ones, rounded to their dtype, but for the few that float32 rounds the other way.

    The size of an error hides what happens inside: the last rounding is as large. Here the last rounding is taken out.

    Args:
        got: the results, of a dtype with 16 bits.
        exact: the same in float64.
        what: the value in the student's words.
        suspects: what may be in 16 bits, such as `scores, weights and sums`.
    """
    otherwise = float((got.detach() != exact.to(got.dtype)).double().mean())
    if otherwise > _OTHERWISE:
        dtype = str(got.dtype).removeprefix("torch.")
        raise AssertionError(
            f"{what}: {otherwise:.0%} of the results are not the exact ones rounded to {dtype}. With float32 inside and one rounding at the "
            f"end it is less than 1%. Which of {suspects} has fewer bits than float32 on the way?"
        )
