"""Parts 2 to 4: transpose, cp.async, the TMA ring, the repair of a broken one, the first wgmma, and tcgen05."""

from __future__ import annotations

from functools import partial

import torch

from instructor.checks.common import Draw
from utils.checking import check
from utils.checking.gluon_launches import (
    async_copy_launch,
    cancelling,
    repair_launch,
    tcgen05_launch,
    tma_ring_launch,
    transpose_launch,
    wgmma_launch,
)
from utils.checking.kernel_exercises import Seeds, run_tries
from utils.checking.labs.lab3_gluon import rules

HALVES = (torch.float16, torch.bfloat16)


def timings(draw: Draw, count: int = 1) -> Seeds:
    """Return None, the cost model's own timing, and drawn numbers of further timings."""
    return None, *(draw.size(1, 9999) for _ in range(count))


@check("2.2", "Transpose")
def transpose(source: str, seed=None):
    """Check the output at any size; loads and stores move whole sectors of 32 bytes."""
    draw = Draw(seed)
    small, large = (draw.size(1, 31), draw.size(33, 63)), (draw.size(65, 90), draw.size(1, 60))
    sizes = [(*small, 0), (*large, 0), (*large, draw.size(1, 9)), (64, 32, 0)]
    sizes.append((32 * draw.size(1, 4), 32 * draw.size(5, 8), 0))
    sizes.append((32 * draw.size(1, 3), 32 * draw.size(2, 5), 8 * draw.size(1, 4)))
    rules.transpose(source, [transpose_launch(m, n, draw.normal, spare) for m, n, spare in sizes])


@check("3.1", "cp.async pipeline")
def async_copy(source: str, seed=None):
    """Check the output for every number of slots; copies must overlap."""
    draw = Draw(seed)
    tries = []
    for stages in (2, 4, 1, 3):
        tiles = draw.size(stages + 1, 7)
        tries.append(async_copy_launch(128 * tiles + draw.size(1, 127), tiles, stages, 128, draw.normal))

    def ring(stages, tiles):
        return async_copy_launch(2 * 256 * tiles, tiles, stages, normal=draw.normal)

    rules.async_copy(source, tries, ring, (1, 2, 3, 5), timings(draw))


@check("3.2", "TMA ring")
def tma_ring(source: str, seed=None):
    """Check the output for every number of slots, also with fewer tiles than slots; copies must overlap."""
    draw = Draw(seed)
    tries = [
        tma_ring_launch(draw.size(17, 40), columns, stages, draw.choice(HALVES), draw.normal)
        for stages, columns in ((2, 320), (3, 8 * draw.size(9, 60)), (4, 64 + 8 * draw.size(0, 8)), (1, 192))
    ]

    def ring(stages, tiles):
        return tma_ring_launch(2 * 16, 64 * tiles, stages, draw.choice(HALVES), draw.normal)

    rules.tma_ring(source, tries, ring, (1, 2, 3, 5), timings(draw))
    hint = (
        "In 16 bits these squares overflow, or are rounded down: convert x with `.to(gl.float32)` before you square it."
    )
    for dtype, scale in ((torch.float16, 512.0), (torch.bfloat16, 1.0)):
        tries = [tma_ring_launch(16, 192, 2, dtype, partial(_numbers_to_square, draw, scale))]
        list(run_tries(source, tries, hint=hint, close=rules.SUMS))


def _numbers_to_square(draw: Draw, scale: float, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw numbers, times `scale`, with random signs and powers of two. bf16 rounds their squares down by 0.27%."""
    noise = draw.normal(*shape)
    return (noise.sign() * 1.0546875 * 2.0 ** noise.abs().round().clamp(max=2) * scale).to(dtype)


@check("Bonus 3.4", "Repair")
def repairs(source: str, repairs, seed=None):
    """Check that the repaired ring is right with any number of slots and tiles and in any timing."""
    draw = Draw(seed)
    ring = partial(repair_launch, normal=draw.normal)
    tries = [ring(stages, draw.size(4, 7)) for stages in (1, 2, 3)]
    rules.repairs(rules.repair_text(source, repairs()), tries, ring, (1, 3, 5), timings(draw, 4))


def _products(source: str, seed: int | None, launch_of, rows: int) -> None:
    draw = Draw(seed)
    tries = []
    for block_n, dtype in ((128, torch.bfloat16), (32, torch.float16)):
        m, n, k = draw.size(rows + 1, 2 * rows - 8), 8 * draw.size(9, 24), 64 * draw.size(2, 5) - 8 * draw.size(0, 7)
        tries.append(launch_of(m, n, k, block_n, dtype, draw.normal))
    rules.matmul(source, tries, timings(draw))
    sizes = [(draw.size(33, 64), 8 * draw.size(5, 16), dtype) for dtype in HALVES]
    rules.cancelling(source, [launch_of(m, n, 192, 64, dtype, cancelling(draw.normal)) for m, n, dtype in sizes])


@check("4.1", "The first wgmma")
def wgmma(source: str, seed=None):
    """Check the output for several sizes and dtypes; the product runs on the tensor cores, and TMA stores it."""
    _products(source, seed, wgmma_launch, 64)


@check("Bonus 6.1", "The same product by tcgen05")
def tcgen05(source: str, seed=None):
    """Check the kernel for Blackwell as `wgmma` checks the kernel for Hopper."""
    _products(source, seed, tcgen05_launch, 128)
