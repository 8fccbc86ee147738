"""Verdicts on calls: the rows that they wrote, compared with float64, and their times, compared with what is possible."""

from __future__ import annotations

import secrets

import torch

from instructor.grading.race.compiling import Refused
from instructor.grading.race.problem import Shape, reference_rows, rows_to_read
from instructor.grading.race.track import Call, Seen

# A row's error is |got - right| / |right|. On an H200, of 216 calls of eight honest kernels the largest mean was 0.23%, and the
# largest row 0.33%. P in 8 bits had a mean of 1.1%; the tail without its mask 4%.
MEAN_ERROR, ROW_ERROR = 0.005, 0.01


def new_call(kernel: str, shape: Shape, *, cold: bool = True) -> Call:
    """Return a call whose inputs and rows nobody can foresee."""
    return Call(kernel, shape, secrets.randbits(48), secrets.randbits(48), cold)


def expect_right(call: Call, seen: Seen, device: torch.device | str, most_flops_a_ms: float) -> tuple[float, float]:
    """Raise Refused unless a call wrote the right rows, in a time that is possible; return the (mean, largest) error.

    Args:
        call: what was asked for.
        seen: what the track saw.
        device: where the reference is computed: of the same kind as the track's, since inputs come from a generator there.
        most_flops_a_ms: the roof, in the unit of `seen.ms`.
    """
    where = f"{call.shape.name}: "
    heads, rows = rows_to_read(call.shape, call.seed, call.lot)
    right = reference_rows(call.shape, call.seed, heads, rows, device).cpu()
    unwritten = int((~seen.rows.isfinite()).any(-1).sum())
    if unwritten:
        raise Refused(f"{where}{unwritten} of {len(rows)} rows of the output are not finite, or were not written.")
    errors = (seen.rows - right).norm(dim=-1) / right.norm(dim=-1)
    mean, largest = float(errors.mean()), float(errors.max())
    if mean > MEAN_ERROR or largest > ROW_ERROR:
        wrong = int((errors > ROW_ERROR).sum())
        raise Refused(
            f"{where}rows differ from float64 by {mean:.2%} on average (limit {MEAN_ERROR:.1%}), and {wrong} of {len(rows)} "
            f"by more than {ROW_ERROR:.0%}, the worst by {largest:.0%}: is precision lowered, or work left out?"
        )
    if seen.inputs_changed:
        raise Refused(f"{where}the kernel wrote into its inputs.")
    if seen.late:
        raise Refused(f"{where}the output changed after the kernel's end.")
    least = call.shape.flops / most_flops_a_ms
    if seen.ms < least:
        raise Refused(
            f"{where}{seen.ms:.4g} is faster than the roof, {least:.4g}: nothing on this machine computes so fast."
        )
    return mean, largest
