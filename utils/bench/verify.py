"""Compare an output with its float64 reference. The dtype's rounding bounds the error of the whole and of every row."""

from __future__ import annotations

from typing import NamedTuple

import torch

from utils.bench.errors import VerificationError

# Unit of rounding of the numbers that a kernel stores or multiplies. For fp32 it is 8 times the format's own: sums run
# over thousands of keys, in any order, and exp() is wrong by a few units in the last place.
ROUNDING = {"fp16": 2.0**-11, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-21}
WHOLE = 3.0  # bound, in units of rounding, on the relative error of the whole output (Frobenius norm)
ROW = 12.0  # bound, in units of rounding, on the relative error of the worst row of D numbers
# The backward pass computes dP - rowsum(dO * O) from the stored, rounded O. If both nearly cancel in a row, the rounding
# error remains. Over all fused backends on an H200 in bf16, the worst row had an error of 13.5 units.
GRADIENT_ROW = 24.0


class Verification(NamedTuple):
    """Relative errors, measured against the float64 reference, and their bounds."""

    whole: float
    worst_row: float
    whole_bound: float
    row_bound: float
    precision: str


def rounding_bounds(precision: str, gradient: bool = False) -> tuple[float, float]:
    """Return the bounds, for the whole and for the worst row, that follow from the rounding of a precision."""
    return WHOLE * ROUNDING[precision], (GRADIENT_ROW if gradient else ROW) * ROUNDING[precision]


@torch.no_grad()
def verify(
    output: torch.Tensor,
    reference: torch.Tensor,
    precision: str,
    *,
    dtype: torch.dtype | None,
    what: str = "output",
    gradient: bool = False,
    bounds: tuple[float, float] | None = None,
) -> Verification:
    """Compare the output with its float64 reference; raise VerificationError if the error is above the limit.

    All numbers are compared, so a single NaN or infinity fails. In a gradient, differences may cancel. So an error is
    divided by at least the root mean square of the rows, and the bound is twice as wide.

    Args:
        output: the output (B, H, S, D), or a gradient.
        reference: the same in float64.
        precision: "fp16", "bf16", "fp32" or "tf32": the precision of the products.
        dtype: dtype that the output must have; None for any.
        what: the output's name in an error.
        gradient: whether the output is a gradient.
        bounds: for the whole and for the worst row; None takes `rounding_bounds`.
    """
    if not isinstance(output, torch.Tensor):
        raise VerificationError(f"{what} is a {type(output).__name__} and no tensor.")
    if output.shape != reference.shape:
        raise VerificationError(f"{what} has shape {tuple(output.shape)}; the reference has {tuple(reference.shape)}.")
    if dtype is not None and output.dtype != dtype:
        raise VerificationError(f"{what} is {output.dtype}; the inputs are {dtype}.")
    bad = int((~torch.isfinite(output)).sum())
    if bad:
        raise VerificationError(f"{what} holds {bad} values that are NaN or infinite, of {output.numel()}.")
    difference = (output.double() - reference).norm(dim=-1)
    size = reference.norm(dim=-1)
    scale = size.square().mean().sqrt()
    # The terms of a very small row are as large as in the other rows, and so is their rounding: use the scale of all rows.
    floor = (1.0 if gradient else 0.1) * scale
    rows = difference / torch.maximum(size, floor).clamp_min(torch.finfo(torch.float64).tiny)
    whole = float(difference.norm() / size.norm().clamp_min(torch.finfo(torch.float64).tiny))
    result = Verification(whole, float(rows.max()), *(bounds or rounding_bounds(precision, gradient)), precision)
    if not (result.whole <= result.whole_bound and result.worst_row <= result.row_bound):  # `not` includes nan
        place = [int(index) for index in torch.unravel_index(rows.argmax(), rows.shape)]
        row = f"row {', '.join(map(str, place)) or 0}"
        where = "batch {}, head {}, query {}".format(*place) if len(place) == 3 else row
        raise VerificationError(
            f"{what} is not the float64 reference's within the bounds for {precision}: relative error {whole:.3g} "
            f"(allowed {result.whole_bound:.3g}), in the worst row {result.worst_row:.3g} (allowed "
            f"{result.row_bound:.3g}), at {where}."
        )
    return result
