"""In which order the backward's blocks are taken, and when they are cut into pieces: plain Python, no kernel."""

import itertools
import random

import pytest
import torch

from utils.attention.gluon.backward.order import (
    Blocks,
    Order,
    best_order,
    blocks_of,
    query_tiles,
    schedule_tiles,
    tiles_in_order,
)
from utils.attention.gluon.backward.plan import plan_for, span
from utils.attention.gluon.plan import list_schedule


def blocks_at(batch, heads, kv_heads, length, head_dim, causal, sms=132):
    q, k = (torch.empty(batch, n, length, head_dim, device="meta") for n in (heads, kv_heads))
    return blocks_of(plan_for(6, head_dim), q, k, sms, span(causal, 0))


@pytest.mark.parametrize("seed", range(30))
def test_tiles_are_those_that_hold_a_pair_which_the_mask_allows(seed):
    """Checked pair by pair; all tiles between the first and the last that see a block are counted."""
    rng = random.Random(seed)
    sq, sk, block_m, block_n = rng.randint(1, 60), rng.randint(1, 60), rng.choice((4, 8)), rng.choice((4, 8))
    causal, window = rng.random() < 0.5, rng.choice((0, 1, 3, 17))
    back, ahead = span(causal, window)
    found = query_tiles(sq, sk, block_m, block_n, back, ahead)
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
    """2 x 8 x 4128, causal: 15 of 16 heads fit in the L2, and the last one, a section of its own, began when the others ended."""
    blocks = blocks_at(2, 8, 8, 4128, 64, True)
    assert blocks.fit == 15
    before = schedule_tiles(blocks, Order(15, blocks.count))
    chosen = best_order(blocks)
    assert chosen.section == 8
    assert before > 1.3 * schedule_tiles(blocks, chosen)
    assert schedule_tiles(blocks, chosen) < 1.1 * sum(tiles_in_order(blocks, chosen.section)) / blocks.sms


@pytest.mark.parametrize(("count", "pieces"), [(2048, True), (300, True), (8, True), (132, False), (135, True)])
def test_the_last_round_is_cut_where_that_ends_earlier(count, pieces):
    """2048 blocks on 132 SMs, for example, are fifteen full rounds and one of 68 blocks, which is cut."""
    blocks = Blocks((256,) * count, 1, 1, count, 132)
    order = best_order(blocks)
    assert order.whole == (count - count % 132 if pieces else count)
    assert (order.pieces > 1) == pieces and order.slots == (count - order.whole) * order.pieces
    assert schedule_tiles(blocks, order) <= schedule_tiles(blocks, Order(1, blocks.count))


def test_a_schedule_gives_the_next_program_to_whoever_is_free():
    assert list_schedule([5, 1, 1, 1, 1], 2) == 5
    assert list_schedule([1, 1, 1, 1, 5], 2) == 7


@pytest.mark.parametrize(
    ("shape", "pieces", "section"),
    [
        ((1, 24, 3, 3056, 64, False), True, 3),  # 72 blocks, 132 SMs
        ((1, 4, 2, 6955, 128, True), True, 2),
        ((2, 24, 3, 526, 64, True), True, 6),
        ((3, 2, 2, 2628, 128, False), False, 6),
        ((2, 8, 8, 4128, 128, True), False, 6),
        ((4, 16, 16, 4096, 128, True), False, 8),
        ((4, 32, 32, 4096, 64, True), False, 16),
        ((1, 32, 32, 16384, 64, False), False, 4),
        ((1, 16, 16, 16384, 128, False), False, 2),
        ((2, 4, 1, 636, 256, True), True, 2),  # 20 blocks, of up to 40 tiles
    ],
)
def test_few_blocks_are_cut_and_sections_are_those_that_were_measured(shape, pieces, section):
    order = best_order(blocks_at(*shape))
    assert (order.slots > 0 and order.whole == 0, order.section) == (pieces, section)


@pytest.mark.parametrize(("queries", "deterministic", "pieces"), [(128, False, 16), (128, True, 1), (2048, False, 1)])
def test_few_programs_of_wide_heads_take_their_keys_in_pieces(queries, deterministic, pieces):
    q, k = (torch.empty(1, 4, n, 256, device="meta") for n in (queries, 8192))
    assert blocks_of(plan_for(6, 256), q, k, 132, span(False, 0), (), deterministic).dq_pieces == pieces
