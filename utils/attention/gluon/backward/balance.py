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
from dataclasses import dataclass

from utils.attention.gluon.backward.plan import BackwardPlan

# What the heads in flight should fit in, of the H200's 60 MB. Measured: half as much costs 0 to 2%, no limit up to 30%.
L2_BYTES = 32 << 20
# In tiles of queries, each 2.1 to 2.4 us:
BLOCK_TILES = 1.4  # beginning and end of a block: barriers, the first K and Q, stores of dV and dK
PART_TILES = 2.0  # the same of a part, whose dV and dK are stored in fp32
FINISH_TILES = 2.0  # launch of the kernel that adds up the parts
ADD_TILES = 0.03  # writing and reading a part of 128 keys x 128 columns once more, of all SMs together
WIDER = 0.03  # share of the time that each doubling of the sections beyond the L2 costs: a guess, 30% were seen for all heads
BLOCK_UNITS = 2  # what the kernel takes for the beginning and end of a block where programs have equal shares
MOST_PARTS = 16
MOST_BLOCKS = 8  # of an SM: with more of them no block is so long that a schedule would have to be computed


@dataclass(frozen=True)
class Order:
    """The order of blocks: heads of keys in sections; of a section the first keys of all its heads come first.

    Blocks first .. first + split - 1 of that order are split in `parts` programs each.
    """

    section: int
    first: int = 0
    split: int = 0
    parts: int = 1
    even: int = 0  # programs with an equal share of all tiles each (`queue.py`); 0: programs take blocks
    units: int = 0  # with even: tiles of all blocks, and BLOCK_UNITS for each block

    def programs(self, blocks: int) -> int:
        """Return how many programs so many blocks are."""
        return blocks + self.split * (self.parts - 1)


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
    for key in range(0, sk, block_n):
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


def part_lengths(tiles: int, group: int, parts: int) -> list[int]:
    """Return the tiles of each part of a block: the tiles of all its query heads, one head after another, are dealt evenly."""
    return [tiles * group * (i + 1) // parts - tiles * group * i // parts for i in range(parts)]


def in_order(blocks: Blocks, order: Order) -> list[float]:
    """Return what each program of a launch takes, in tiles, in the order in which SMs take them."""
    costs: list[float] = []
    number = 0
    for start in range(0, blocks.heads, order.section):
        wide = min(order.section, blocks.heads - start)
        for tiles in blocks.tiles:
            for _head in range(wide):
                if order.first <= number < order.first + order.split:
                    costs += [n + PART_TILES for n in part_lengths(tiles, blocks.group, order.parts)]
                else:
                    costs.append(tiles * blocks.group + BLOCK_TILES)
                number += 1
    return costs


def list_schedule(costs: Iterable[float], sms: int) -> float:
    """Return when the last SM ends, if each takes the next program as soon as it is free."""
    free = [0.0] * sms
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def schedule_tiles(blocks: Blocks, order: Order) -> float:
    """Return how long an order takes, in tiles, with the kernel that adds up the parts."""
    if order.even:
        return order.units / order.even + PART_TILES + FINISH_TILES + ADD_TILES * 2 * order.even
    end = list_schedule(in_order(blocks, order), blocks.sms)
    return end + (FINISH_TILES + ADD_TILES * order.split * order.parts if order.split else 0.0)


def sections(blocks: Blocks) -> list[int]:
    """Return sizes of sections to choose from, the one that fits in the L2 first; all sections of a size are as even as can be."""
    # Heads that run at the same time anyway need not fit.
    fit = max(blocks.fit, -(-blocks.sms // len(blocks.tiles)))
    most = -(-blocks.heads // fit)
    return [-(-blocks.heads // count) for count in range(most, max(most - 8, 0), -1)]


def splits(blocks: Blocks, section: int) -> list[Order]:
    """Return orders with split blocks to choose from, for one size of sections."""
    if min(blocks.tiles) == max(blocks.tiles):
        # All blocks take the same time: those of the last round are split. A round of parts takes as long as one of them.
        rest, tiles = blocks.count % blocks.sms, blocks.tiles[0] * blocks.group
        parts = min(
            range(2, MOST_PARTS + 1),
            key=lambda n: -(-rest * n // blocks.sms) * (-(-tiles // n) + PART_TILES) + ADD_TILES * rest * n,
        )
        return [Order(section, blocks.count - rest, rest, parts)] if rest else []
    if section < blocks.heads:
        return []
    # The longest blocks come first. Those above a share of an SM's mean work are split, so that no part is longer.
    longest = blocks.tiles[0] * blocks.group
    mean = sum(blocks.tiles) * blocks.heads * blocks.group / blocks.sms
    found = []
    for share in (1.0, 0.75, 0.5, 0.35):
        split = next((i for i, n in enumerate(blocks.tiles) if n * blocks.group <= share * mean), len(blocks.tiles))
        parts = min(-(-longest // max(int(share * mean), 1)), MOST_PARTS)
        if split and parts > 1:
            found.append(Order(section, 0, split * blocks.heads, parts))
    return found


def even_order(blocks: Blocks) -> Order:
    """Return the order in which each program has an equal share of all tiles."""
    units = sum(n * blocks.group + BLOCK_UNITS for n in blocks.tiles) * blocks.heads
    return Order(blocks.heads, even=max(1, min(blocks.sms, units // (4 * BLOCK_UNITS))), units=units)


@functools.lru_cache(maxsize=512)
def choose_order(blocks: Blocks, split: bool) -> Order:
    """Return the order that ends first, by the schedule.

    Args:
        blocks: The blocks of the launch.
        split: Whether the kernel can split blocks.
    """
    sizes = sections(blocks)
    equal = min(blocks.tiles) == max(blocks.tiles)
    if equal or blocks.count > MOST_BLOCKS * blocks.sms:
        sizes = sizes[:1]
    orders = [Order(size) for size in sizes]
    if split and (equal or len(sizes) > 1 or blocks.count <= MOST_BLOCKS * blocks.sms):
        orders += [order for size in sizes for order in splits(blocks, size)]
    if len(orders) == 1:
        return orders[0]

    def cost(order: Order) -> float:
        return schedule_tiles(blocks, order) * (1 + WIDER * max(0.0, math.log2(order.section / sizes[0])))

    return min(orders, key=cost)
