"""Which program computes what in a GEMM, by the kernel's own code, and which plans products get: without a GPU."""

import itertools
import math
import random
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.utils.kernel_code import Number, kernel_code
from tools.record.gemm_shapes import chosen, draw_shapes
from utils.kernels.gemm_plan import BLOCK_K, GROUP_M, KERNELS, PLANS, SPLITS, choose, clusters_at_once, items_of

CODE = kernel_code(
    "utils/kernels/gemm_work.py",
    "@gluon.jit\ndef place",
    "# The ring is",
    quotient=lambda x, y: Number(np.float32(x + 0.5) / np.float32(y)),
    BLOCK_K=BLOCK_K,
    GROUP_M=GROUP_M,
)


def size(rng):
    return rng.choice(
        (1, 7, 8, 64, 65, 128, 136, 192, 256, 1000, int(2 ** rng.uniform(0, 14.3)), rng.randint(1, 20_000))
    )


def check(m, n, k, plan, split, sms):
    """Check one product by one plan: every tile is computed once, whole or in parts, and every part of K once."""
    items = items_of(m, n, plan, split, sms)
    groups = items.number if plan.short else min(clusters_at_once(plan.cluster, sms), items.number)
    CODE.gl.programs = groups * plan.cluster
    tiles = -(-m // (plan.block_m * plan.cluster)), -(-n // plan.block_n), -(-k // BLOCK_K)
    work = CODE.Work(*map(Number, (*tiles, items.number, items.whole, items.split, plan.slots, plan.block_n)), plan)
    tiles, places_of_sums = {}, set()
    for program in range(CODE.gl.programs):
        CODE.gl.program = program
        for item in map(Number, range(program // plan.cluster, items.number, groups)):
            first, last, *origin = map(int, work.locate(item))
            tiles.setdefault(tuple(origin), []).append((first, last))
            assert first < last  # a part without a step would release a slot that nobody filled
            if item >= work.whole:
                tile, part = map(int, work.tile_and_part(item))
                assert (tile, part) not in places_of_sums
                places_of_sums.add((tile, part))
    assert places_of_sums == set(itertools.product(range(items.rest * plan.cluster), range(items.split)))
    rows, columns = plan.block_m * plan.cluster, plan.block_n
    assert set(tiles) == set(  # so C is covered, since tiles do not overlap
        itertools.product(
            range(0, -(-m // rows) * rows, plan.block_m), range(0, -(-n // columns) * columns, plan.block_n)
        )
    )
    for parts in tiles.values():
        parts.sort()
        assert parts[0][0] == 0 and parts[-1][1] == -(-k // BLOCK_K)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
        assert len(parts) in (1, items.split)


def check_some(rng, most_items):
    sms = rng.choice((132, 132, 114, 144, 9))
    m, n, k, plan = size(rng), size(rng), size(rng), rng.choice(PLANS)
    split = rng.choice([split for split in SPLITS if split <= -(-k // BLOCK_K)])
    if items_of(m, n, plan, split, sms).number <= most_items:
        check(m, n, k, plan, split, sms)


def test_each_tile_is_computed_once_whole_or_in_parts():
    rng = random.Random(2)
    for _ in range(80):
        check_some(rng, 600)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_each_tile_of_many_more_sizes_is_computed_once(seed):
    rng = random.Random(2000 + seed)
    for _ in range(400):
        check_some(rng, 6000)


def test_every_plan_fits_and_is_whole():
    assert len(set(KERNELS)) == len(KERNELS) < 12  # one more adds up parts
    for plan in PLANS:
        assert plan.kernel in KERNELS and plan.block_m in (64, 128)
        assert plan.short or 16 <= plan.boxes[3][plan.transposed - 1] <= 64
        assert not plan.short or plan.warps == 4 * plan.cluster == 4
        for column_major in (False, True):
            plan = replace(plan, b_column_major=column_major)
            kernel = plan.kernel
            ring, buffers = 128 * plan.slots * (plan.block_m + plan.b_columns), 4 * kernel.block_m * kernel.piece[1]
            assert ring <= 1024 * kernel.ring_kilobytes <= 224 * 1024 - (not plan.short) * buffers
            assert plan.slots >= kernel.slots >= 3
            assert plan.b_box[0] % 8 == 0 and plan.b_box[1] >= 32  # the swizzle has rows of 8
            each = plan.b_columns * BLOCK_K // plan.cluster  # elements that a block fetches
            assert plan.block_n <= plan.b_columns <= kernel.columns and each % math.prod(plan.b_box) == 0


def test_what_is_chosen_is_sound():
    """Chosen plans have at least two steps in each part, few partial sums, and a cluster that the GPU can run."""
    rng = random.Random(3)
    for _ in range(200):
        m, n, k, sms = size(rng), size(rng), size(rng), rng.choice((132, 114, 5))
        plan, split = choose(m, n, k, *rng.choices((False, True), k=2), sms)
        items = items_of(*((n, m) if plan.transposed else (m, n)), plan, split, sms)
        assert split == 1 or 2 * split <= -(-k // BLOCK_K)
        assert 4 * items.rest * plan.cluster * items.split * plan.block_m * plan.block_n < 2**30
        assert plan.cluster <= sms and items.number < 2**31
    large, _ = choose(8192, 8192, 8192, False, False, 132)
    assert large.block_m * large.block_n >= 128 * 192 and large.cluster > 1
    few, split = choose(320, 112, 12712, False, False, 132)  # few tiles, and long sums: parts keep more SMs busy
    assert items_of(320, 112, few, split, 132).number > 20
    shapes, start = draw_shapes(seed=2026, count=122), time.perf_counter()
    assert len({replace(chosen(s)[0].kernel, a_column_major=False, b_column_major=False) for s in shapes}) > 4
    assert time.perf_counter() - start < 122 * 0.02  # the first call of a new shape may take 20 ms
