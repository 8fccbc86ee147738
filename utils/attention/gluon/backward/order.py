"""In which order blocks of keys are taken, so that all SMs end together. Plain Python, no Triton.

An SM holds one block at a time and takes the next one in order when it is free. A block takes as long as it has tiles of
queries: under a causal mask one to all of them, with grouped heads as many times that as query heads share its keys. Two
things make SMs wait for each other at the end:

- A long block that starts late. Heads come in sections that fit in the L2, the longest blocks of a section first. 16 heads
  in sections of 15 and 1 end with all blocks of one head: 198 us of work took 265. So sections are of equal size, and as
  many as give the shortest schedule.
- Fewer blocks than SMs, or blocks longer than the mean work of an SM. Then programs get equal shares of all blocks' tiles
  (`shares.py`), if that gains more than the sums of the parts cost.

The schedule is computed as a list schedule: each block goes to the SM that is free first. With its costs, fitted to recorded
times, it gives the times of eight recorded shapes within 6%.
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
PART_TILES = 1.0  # the same of a part, whose dV and dK are stored in fp32
FINISH_TILES = 1.5  # launch of the kernel that adds up the parts
ADD_TILES = 0.01  # writing and reading a part of 128 keys x 128 columns once more, of all SMs together
WIDER = 0.03  # share of the time that each doubling of the sections beyond the L2 costs: a guess, 30% were seen for all heads
# With equal shares all heads are in flight: twice L2_BYTES cost nothing, and each L2_BYTES more a tenth of the time.
ROOMY, BEYOND = 2.0, 0.1
BLOCK_UNITS = 2  # what the kernel takes for the beginning and end of a block where programs have equal shares
# Equal shares are taken where the schedule gives at most so much of the time: it is right to a few percent.
EVEN_GAIN = 0.97
MOST_BLOCKS = 8  # of an SM: with more of them no block is so long that a schedule would have to be computed


@dataclass(frozen=True)
class Order:
    """The order of blocks: heads of keys in sections; of a section the first keys of all its heads come first."""

    section: int  # heads of keys
    whole: int  # so many blocks are taken as they are
    shares: int = 0  # equal shares of the blocks behind them
    units: int = 0  # tiles of those blocks, and BLOCK_UNITS for each block


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


def query_tiles(sq: int, sk: int, block_m: int, block_n: int, *, back: int, ahead: int) -> tuple[int, ...]:
    """Return how many tiles of queries see each block of keys, as the kernel counts them (`Sizes.tiles_of`).

    Args:
        sq: Queries.
        sk: Keys.
        block_m: Queries of a tile.
        block_n: Keys of a block.
        back: A query sees so many keys before its position.
        ahead: And so many behind it.
    """
    found = []
    shift = sk - sq
    for key in range(0, max(sk, 1), block_n):
        last = min(key + block_n, sk) - 1
        lo = max(key - ahead - shift, 0) // block_m
        hi = min(-(-sq // block_m), -(-max(last + back - shift + 1, 0) // block_m))
        found.append(max(hi - lo, 0))
    return tuple(found)


def blocks_of(
    plan: BackwardPlan, sq: int, sk: int, heads: int, group: int, sms: int, *, back: int, ahead: int
) -> Blocks:
    """Return the blocks of a launch; heads: of keys, of all sequences. back, ahead: as for `query_tiles`."""
    tiles = query_tiles(sq, sk, plan.block_m, plan.block_n, back=back, ahead=ahead)
    rows = -(-sq // 128) * 128
    # Q and dO in 16 bits, the sums of dQ in 32.
    fit = max(1, L2_BYTES // (rows * plan.block_d * 8 * group))
    return Blocks(tiles, heads, group, fit, sms)


def in_order(blocks: Blocks, section: int) -> list[float]:
    """Return what each block takes, in tiles, in the order in which SMs take them."""
    costs: list[float] = []
    for start in range(0, blocks.heads, section):
        for tiles in blocks.tiles:
            costs += [tiles * blocks.group + BLOCK_TILES] * min(section, blocks.heads - start)
    return costs


def list_schedule(costs: Iterable[float], sms: int) -> float:
    """Return when the last SM ends, if each takes the next program as soon as it is free."""
    free = [0.0] * sms
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def schedule_tiles(blocks: Blocks, order: Order) -> float:
    """Return how long an order takes, in tiles, with the kernel that adds up the parts."""
    end = list_schedule(in_order(blocks, order.section)[: order.whole], blocks.sms)
    if not order.shares:
        return end
    # The heads in flight that are beyond the L2 slow every tile down.
    beyond = max(0.0, order.section / blocks.fit - ROOMY)
    tiles = order.units / order.shares * (1 + BEYOND * beyond)
    return end + tiles + PART_TILES + FINISH_TILES + ADD_TILES * 2 * order.shares


def even_order(blocks: Blocks) -> Order:
    """Return the order in which each program has an equal share of all tiles."""
    units = sum(n * blocks.group + BLOCK_UNITS for n in blocks.tiles) * blocks.heads
    return Order(blocks.heads, 0, most_shares(blocks, units), units)


def last_round_order(blocks: Blocks, section: int) -> Order:
    """Return the order of blocks of one length in which those of the last round are shared."""
    rest = blocks.count % blocks.sms
    units = rest * (blocks.tiles[0] * blocks.group + BLOCK_UNITS)
    shares = min(most_shares(blocks, units), 2 * rest)  # more parts of a block cost more than they gain
    return Order(section, blocks.count - rest, shares, units) if rest else Order(section, blocks.count)


def most_shares(blocks: Blocks, units: int) -> int:
    """Return a share for each SM, or fewer of four blocks' beginnings each, or so few that 32 bits hold units * shares."""
    return max(1, min(blocks.sms, units // (4 * BLOCK_UNITS), (1 << 31) // max(units, 1) - 1))


def sections(blocks: Blocks) -> list[int]:
    """Return sizes of sections to choose from, that which fits in the L2 first; the sections of a size are as even as can be."""
    # Heads that run at the same time anyway need not fit.
    fit = max(blocks.fit, -(-blocks.sms // len(blocks.tiles)))
    most = -(-blocks.heads // fit)
    return [-(-blocks.heads // count) for count in range(most, max(most - 8, 0), -1)]


def block_order(blocks: Blocks, shares: bool) -> Order:
    """Return the order that ends first where programs take blocks, by the schedule; shares: whether they can be shared."""
    sizes = sections(blocks)
    orders = [Order(size, blocks.count) for size in sizes]
    if min(blocks.tiles) == max(blocks.tiles):
        orders = [orders[0], last_round_order(blocks, sizes[0])] if shares else orders[:1]
    elif blocks.count > MOST_BLOCKS * blocks.sms:
        return orders[0]

    def cost(order: Order) -> float:
        return schedule_tiles(blocks, order) * (1 + WIDER * max(0.0, math.log2(order.section / sizes[0])))

    return min(orders, key=cost)


@functools.lru_cache(maxsize=512)
def order_of(
    plan: BackwardPlan, sq: int, sk: int, heads: int, group: int, sms: int, span: tuple[int, int], shares: bool
) -> Order:
    """Return the order that ends first; arguments as for `blocks_of`. shares: whether the kernel knows equal shares."""
    return best_order(blocks_of(plan, sq, sk, heads, group, sms, back=span[0], ahead=span[1]), shares)


def best_order(blocks: Blocks, shares: bool) -> Order:
    """Return the order of these blocks that ends first."""
    by_blocks, even = block_order(blocks, shares), even_order(blocks)
    if shares and schedule_tiles(blocks, even) < EVEN_GAIN * schedule_tiles(blocks, by_blocks):
        return even
    return by_blocks
