"""In which order blocks of keys are taken, and which are split in parts, so that all SMs end together. Plain Python, no Triton.

An SM holds one block at a time and takes the next one in order when it is free. A block takes as long as it has tiles of
queries: under a causal mask one to all of them, with grouped heads as many times that as query heads share its keys. Two
things make SMs wait for each other at the end:

- A long block that starts late. Heads come in sections that fit in the L2, the longest blocks of a section first. 16 heads
  in sections of 15 and 1 end with all blocks of one head: 198 us of work took 265. So sections are of equal size, and as
  many as give the shortest schedule.
- Fewer blocks than SMs, or blocks longer than the mean work of an SM. They are split (`split.py`), as far as the parts gain
  more than they cost.

The schedule is computed as a list schedule: each block goes to the SM that is free first. Its three costs are fitted to
recorded times (docs/backward-log.md, entry 42); with them it gives the times of eight recorded shapes within 6%.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from utils.attention.gluon.backward.plan import BackwardPlan, fastest_step, plan_for

# What the heads in flight should fit in, of the H200's 60 MB. Measured: half as much costs 0 to 2%, no limit up to 30%.
L2_BYTES = 32 << 20
# In tiles of queries, each 2.1 to 2.4 us:
BLOCK_TILES = 1.4  # beginning and end of a block: barriers, the first K and Q, stores of dV and dK
PART_TILES = 2.0  # the same of a part, whose dV and dK are stored in fp32
FINISH_TILES = 2.0  # launch of the kernel that adds up the parts
ADD_TILES = 0.03  # writing and reading a part of 128 keys x 128 columns once more, of all SMs together
WIDER = 0.03  # share of the time that each doubling of the sections beyond the L2 costs: a guess, 30% were seen for all heads
# With equal shares all heads are in flight: twice L2_BYTES cost nothing, and each L2_BYTES more a tenth of the time.
ROOMY, BEYOND = 2.0, 0.1
BLOCK_UNITS = 2  # what the kernel takes for the beginning and end of a block where programs have equal shares
# Equal shares are taken where the schedule gives at most so much of the time: it is right to a few percent.
EVEN_GAIN = 0.97
MOST_PARTS = 16
MOST_BLOCKS = 8  # of an SM: with more of them no block is so long that a schedule would have to be computed


@dataclass(frozen=True)
class Order:
    """The order of blocks: heads of keys in sections; of a section the first keys of all its heads come first."""

    section: int  # heads of keys
    blocks: int
    whole: int  # so many blocks are taken as they are; each of the others is split
    parts: int = 1  # in so many programs
    even: int = 0  # programs with an equal share of all tiles each (`queue.py`); 0: programs take blocks
    units: int = 0  # with even: tiles of all blocks, and BLOCK_UNITS for each block

    @property
    def programs(self) -> int:
        """Number of programs, or of what programs draw from a queue."""
        return self.even or self.whole + (self.blocks - self.whole) * self.parts


@dataclass(frozen=True)
class Blocks:
    """Blocks of keys of a launch: `tiles` of queries that each block of a head sees, and how many heads of both kinds."""

    tiles: tuple[int, ...]  # of one query head
    heads: int  # of keys, of all sequences
    group: int  # query heads that share one
    fit: int  # heads of keys that fit in the L2 together
    sms: int

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.tiles) * self.heads


def query_tiles(
    sq: int, sk: int, block_m: int, block_n: int, *, causal: bool = False, window: int = 0
) -> tuple[int, ...]:
    """Return how many tiles of queries see each block of keys, as the kernel counts them (`Sizes.tiles_of`).

    Args:
        sq: Queries.
        sk: Keys.
        block_m: Queries of a tile.
        block_n: Keys of a block.
        causal: Whether the mask is causal.
        window: Sliding window; 0: none.
    """
    found = []
    shift = sk - sq
    for key in range(0, max(sk, 1), block_n):
        lo, hi = 0, -(-sq // block_m)
        if causal:
            lo = max(key - shift, 0) // block_m
        elif window:
            lo = max(key - window + 1 - shift, 0) // block_m
        if window:
            hi = min(hi, -(-max(min(key + block_n, sk) - 1 + window - shift, 0) // block_m))
        found.append(max(hi - lo, 0))
    return tuple(found)


def blocks_of(
    plan: BackwardPlan, sq: int, sk: int, heads: int, group: int, sms: int, *, causal: bool = False, window: int = 0
) -> Blocks:
    """Return the blocks of a launch; heads: of keys, of all sequences."""
    tiles = query_tiles(sq, sk, plan.block_m, plan.block_n, causal=causal, window=window)
    rows = -(-sq // 128) * 128
    # Q and dO in 16 bits, the sums of dQ in 32.
    fit = max(1, L2_BYTES // (rows * plan.block_d * 8 * group))
    return Blocks(tiles, heads, group, fit, sms)


def in_order(blocks: Blocks, order: Order) -> list[float]:
    """Return what each program of a launch takes, in tiles, in the order in which SMs take them."""
    costs: list[float] = []
    for start in range(0, blocks.heads, order.section):
        wide = min(order.section, blocks.heads - start)
        for tiles in blocks.tiles:
            costs += [tiles * blocks.group + BLOCK_TILES] * wide
    split = [
        part
        for cost in costs[order.whole :]
        for part in [(cost - BLOCK_TILES) / order.parts + PART_TILES] * order.parts
    ]
    return costs[: order.whole] + split


def list_schedule(costs: Iterable[float], sms: int) -> float:
    """Return when the last SM ends, if each takes the next program as soon as it is free."""
    free = [0.0] * sms
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def schedule_tiles(blocks: Blocks, order: Order) -> float:
    """Return how long an order takes, in tiles, with the kernel that adds up the parts."""
    if order.even:
        # All heads are in flight, and what is beyond the L2 slows every tile down.
        beyond = max(0.0, blocks.heads / blocks.fit - ROOMY)
        return order.units / order.even * (1 + BEYOND * beyond) + PART_TILES + FINISH_TILES + ADD_TILES * 2 * order.even
    end = list_schedule(in_order(blocks, order), blocks.sms)
    split = blocks.count - order.whole
    return end + (FINISH_TILES + ADD_TILES * split * order.parts if split else 0.0)


def even_order(blocks: Blocks) -> Order:
    """Return the order in which each program has an equal share of all tiles."""
    units = sum(n * blocks.group + BLOCK_UNITS for n in blocks.tiles) * blocks.heads
    even = max(1, min(blocks.sms, units // (4 * BLOCK_UNITS)))
    return Order(blocks.heads, blocks.count, blocks.count, even=even, units=units)


def split_order(blocks: Blocks, section: int) -> Order:
    """Return the order for blocks that all take the same time: those of the last round are split.

    A round of parts takes as long as one of them, so few rounds of nearly full length win.
    """
    rest, tiles = blocks.count % blocks.sms, blocks.tiles[0] * blocks.group
    parts = min(
        range(1, MOST_PARTS + 1),
        key=lambda n: -(-rest * n // blocks.sms) * (-(-tiles // n) + PART_TILES) + ADD_TILES * rest * n,
    )
    return Order(section, blocks.count, blocks.count - rest, parts)


def sections(blocks: Blocks) -> list[int]:
    """Return sizes of sections to choose from, that which fits in the L2 first; the sections of a size are as even as can be."""
    # Heads that run at the same time anyway need not fit.
    fit = max(blocks.fit, -(-blocks.sms // len(blocks.tiles)))
    most = -(-blocks.heads // fit)
    return [-(-blocks.heads // count) for count in range(most, max(most - 8, 0), -1)]


def block_order(blocks: Blocks, split: bool) -> Order:
    """Return the order that ends first where programs take blocks, by the schedule; split: whether blocks can be."""
    sizes = sections(blocks)
    if min(blocks.tiles) == max(blocks.tiles):
        whole = Order(sizes[0], blocks.count, blocks.count)
        orders = [whole, split_order(blocks, sizes[0])] if split else [whole]
    elif blocks.count > MOST_BLOCKS * blocks.sms:
        return Order(sizes[0], blocks.count, blocks.count)
    else:
        orders = [Order(size, blocks.count, blocks.count) for size in sizes]

    def cost(order: Order) -> float:
        return schedule_tiles(blocks, order) * (1 + WIDER * max(0.0, math.log2(order.section / sizes[0])))

    return min(orders, key=cost)


@functools.lru_cache(maxsize=512)
def order_of(
    plan: BackwardPlan, sq: int, sk: int, heads: int, group: int, sms: int, causal: bool, window: int
) -> Order:
    """Return the order of blocks that a plan's kernel takes; arguments as for `blocks_of`."""
    blocks = blocks_of(plan, sq, sk, heads, group, sms, causal=causal, window=window)
    return even_order(blocks) if plan.even else block_order(blocks, plan.split)


@functools.lru_cache(maxsize=512)
def choose_plan(
    head_dim: int,
    sq: int,
    sk: int,
    heads: int,
    group: int,
    sms: int,
    causal: bool = False,
    window: int = 0,
    deterministic: bool = False,
) -> tuple[int, BackwardPlan]:
    """Return the step of the ladder that is taken for a shape, and its plan.

    The step that was measured fastest for head dimension, length and mask, programs taking blocks in a balanced order; or
    step 6 with equal shares of all tiles, where blocks are so few or so unequal that the schedule says that this ends earlier.

    Args:
        head_dim: Head dimension.
        sq: Queries.
        sk: Keys.
        heads: Heads of keys, of all sequences.
        group: Query heads that share one.
        sms: SMs of the GPU.
        causal: Whether the mask is causal.
        window: Sliding window; 0: none. No measurement of step 6 had one.
        deterministic: Whether the same inputs must give the same bits.
    """
    step = fastest_step(head_dim, causal=causal, window=window > 0, deterministic=deterministic)
    plan = plan_for(step, head_dim, causal)
    if plan.block_d == 256 or window or deterministic:
        return step, plan
    even = replace(plan_for(6, head_dim, causal), queue=True, even=True, split=False)
    blocks = blocks_of(plan, sq, sk, heads, group, sms, causal=causal)
    by_blocks = schedule_tiles(blocks, block_order(blocks, plan.split))
    if schedule_tiles(blocks, even_order(blocks)) < EVEN_GAIN * by_blocks:
        return 6, even
    return step, plan
