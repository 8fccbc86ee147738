"""In which order the backward's blocks are taken, and when programs get equal shares: plain Python, no kernel."""

import itertools
import random

import pytest

from utils.attention.gluon.backward.balance import (
    BLOCK_TILES,
    Blocks,
    Order,
    block_order,
    blocks_of,
    choose_plan,
    even_order,
    in_order,
    list_schedule,
    query_tiles,
    schedule_tiles,
)
from utils.attention.gluon.backward.plan import plan_for


def blocks_at(batch, heads, kv_heads, length, head_dim, causal, sms=132):
    plan = plan_for(6, head_dim, causal)
    return blocks_of(plan, length, length, batch * kv_heads, heads // kv_heads, sms, causal=causal)


def in_sections_of(blocks, section):
    return Order(section, blocks.count, blocks.count)


@pytest.mark.parametrize("seed", range(30))
def test_tiles_are_those_that_hold_a_pair_which_the_mask_allows(seed):
    """All pairs of a query and a key, one by one: a tile between the first and the last that see a block is walked over."""
    rng = random.Random(seed)
    sq, sk, block_m, block_n = rng.randint(1, 60), rng.randint(1, 60), rng.choice((4, 8)), rng.choice((4, 8))
    causal, window = rng.random() < 0.5, rng.choice((0, 1, 3, 17))
    found = query_tiles(sq, sk, block_m, block_n, causal=causal, window=window)
    expected = []
    for key in range(0, sk, block_n):
        seen = set()
        for i, j in itertools.product(range(sq), range(key, min(key + block_n, sk))):
            distance = i + sk - sq - j
            if (not causal or distance >= 0) and (not window or abs(distance) < window):
                seen.add(i // block_m)
        expected.append(len(seen) and max(seen) - min(seen) + 1)
    assert found == tuple(expected)


def test_a_section_of_one_head_left_over_is_what_cost_a_third():
    """2 x 8 x 4128 causal: 15 heads of 64 columns fit in the L2, and the sixteenth began when the others ended."""
    blocks = blocks_at(2, 8, 8, 4128, 64, True)
    assert blocks.fit == 15
    before = schedule_tiles(blocks, in_sections_of(blocks, 15))
    chosen = block_order(blocks, False)
    assert chosen.section == 8
    assert before > 1.3 * schedule_tiles(blocks, chosen)
    mean = sum(in_order(blocks, chosen)) / blocks.sms
    assert schedule_tiles(blocks, chosen) < 1.03 * mean


@pytest.mark.parametrize(
    ("shape", "section"),
    [((4, 32, 32, 4096, 64, True), 16), ((1, 32, 32, 16384, 64, True), 4), ((1, 16, 16, 16384, 128, False), 2)],
)
def test_the_tables_points_keep_the_sections_that_were_measured(shape, section):
    assert block_order(blocks_at(*shape), False).section == section


@pytest.mark.parametrize(("count", "rest", "share"), [(2048, 68, 0.58), (4096, 4, 0.08), (8, 8, 0.08), (132, 0, 0)])
def test_the_last_round_is_split(count, rest, share):
    """On 132 SMs, with 256 tiles a block: the parts of the last round take at most so much of a block's time."""
    order = block_order(Blocks((256,) * count, 1, 1, 1, 132), True)
    assert order.whole == count - rest
    assert order.programs == order.whole + rest * order.parts
    assert -(-rest * order.parts // 132) / order.parts <= share


def test_a_schedule_gives_the_next_program_to_whoever_is_free():
    assert list_schedule([5, 1, 1, 1, 1], 2) == 5
    assert list_schedule([1, 1, 1, 1, 5], 2) == 7
    assert list_schedule([3], 4) == 3


def test_equal_shares_are_one_row_of_tiles():
    blocks = Blocks((3, 2, 0), 2, 4, 2, 132)
    order = even_order(blocks)
    assert order.units == 2 * ((12 + 2) + (8 + 2) + 2)
    assert 1 <= order.even <= order.units // 8
    assert sum(in_order(blocks, in_sections_of(blocks, 2))) == pytest.approx(2 * (12 + 8) + 6 * BLOCK_TILES)


@pytest.mark.parametrize(
    ("shape", "step", "even"),
    [
        ((1, 24, 3, 3056, 64, False), 6, True),  # 72 blocks, 132 SMs
        ((7, 24, 3, 914, 128, True), 6, False),  # all heads are five times what fits in the L2
        ((1, 4, 2, 6955, 128, True), 6, True),
        ((2, 24, 3, 526, 64, True), 6, True),
        ((2, 8, 8, 4128, 128, True), 6, False),
        ((4, 16, 16, 4096, 128, True), 6, False),
        ((1, 32, 32, 16384, 64, False), 6, False),
    ],
)
def test_few_blocks_get_equal_shares(shape, step, even):
    batch, heads, kv_heads, length, head_dim, causal = shape
    found, plan = choose_plan(head_dim, length, length, batch * kv_heads, heads // kv_heads, 132, causal)
    assert (found, plan.even) == (step, even)
    assert plan.queue or not plan.even


def test_windows_and_the_deterministic_mode_keep_step_5():
    for changes in ({"window": 500}, {"deterministic": True}):
        step, plan = choose_plan(64, 3056, 3056, 3, 8, 132, **changes)
        assert step == 5 and not plan.even
