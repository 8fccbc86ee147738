"""Hidden checks of lab 3: each takes the text of a student's file, or functions, and returns a Verdict.

The checks simulate kernels, so the verdict is the same with and without a GPU. `seed=None` draws fresh inputs at each call.
"""

from instructor.checks.lab3_gluon.attention import overlap, softmax, specialized, two_softmax
from instructor.checks.lab3_gluon.machine import owner, tile_budget, tile_cycles
from instructor.checks.lab3_gluon.pipelines import async_copy, repairs, tcgen05, tma_ring, transpose, wgmma

__all__ = [
    "async_copy",
    "overlap",
    "owner",
    "repairs",
    "softmax",
    "specialized",
    "tcgen05",
    "tile_budget",
    "tile_cycles",
    "tma_ring",
    "transpose",
    "two_softmax",
    "wgmma",
]
