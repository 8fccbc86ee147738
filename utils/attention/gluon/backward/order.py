"""In which order blocks of keys are taken, so that all SMs end together. Plain Python, no Triton.

An SM holds one block at a time and takes the next one in order when it is free. A block takes as long as it has tiles of
queries: under a causal mask one to all of them, with grouped heads as many times that as query heads share its keys. Two
things make SMs wait for each other at the end:

- A long block that starts late. Heads come in sections that fit in the L2, the longest blocks of a section first. 16 heads
  in sections of 15 and 1 end with all blocks of one head: 198 us of work took 265. So sections are of equal size.
- Fewer blocks than SMs, or a last round of few blocks. Then these blocks are cut into pieces (`shares.py`), if that gains more
  than the sums of the pieces cost. All pieces of a block come before the next block's, so that the last ones are short.

In the schedule each block goes to the SM that is free first, with costs that were fitted to recorded times.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from utils.attention.gluon.backward.plan import BackwardPlan

if TYPE_CHECKING:
    import torch

# What the heads in flight should fit in, of the H200's 60 MB. Measured: half as much costs 0 to 2%, no limit up to 30%.
L2_BYTES = 32 << 20
# In tiles of queries, each 2.1 to 2.4 us, and 1.6 us of a wide head:
BLOCK_TILES = 1.4, 4.7  # beginning and end of a block, and of a wide head's: the first K and Q, stores of dV and dK
FINISH_TILES = 0.5, 2.0  # more work for the last kernel, which a wide head has for pieces alone
PIECE_TILES = 2.9, 4.7  # beginning and end of a piece: its sums are in fp32
ADD_TILES = 0.0061  # a sum of 128 keys x 64 columns, its zeros and reading it, of all SMs together
DQ_TILES = 1.2, 3.0  # a tile of keys, and beginning and end, of a program of dQ's own kernel
# Blocks are cut where the schedule gives at most so much of the time: it is right to a few percent.
PIECES_GAIN = 0.985
MOST_BLOCKS = 10  # of an SM, that are scheduled one by one: those before them end at about the same time on all SMs
PIECES = range(2, 13)  # of a block


@dataclass(frozen=True)
class Order:
    """The order of blocks: heads of keys in sections; of a section the first keys of all its heads come first."""

    section: int  # heads of keys
    whole: int  # so many blocks are taken as they are
    pieces: int = 1  # of each block behind them
    slots: int = 0  # of all these blocks


@dataclass(frozen=True)
class Blocks:
    """Blocks of keys of a launch: `tiles` of queries that each block of a head sees, and how many heads of both kinds."""

    tiles: tuple[int, ...]  # of one query head
    heads: int  # of keys, of all sequences
    group: int  # query heads that share one
    fit: int  # heads of keys that fit in the L2 together
    sms: int
    width: int = 128  # columns
    dq: tuple[int, ...] = ()  # tiles of keys that each 128 rows of dQ's own kernel see
    dq_pieces: int = 1  # of these, each a program

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.tiles) * self.heads


def query_tiles(sq: int, sk: int, block_m: int, block_n: int, back: int, ahead: int) -> tuple[int, ...]:
    """Return how many tiles of queries see each block of keys, as the kernel counts them (`Sizes.tiles_of`).

    back, ahead: a query sees so many keys before its position, and so many behind it.
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
    plan: BackwardPlan, q: torch.Tensor, k: torch.Tensor, sms: int, reach: tuple, tiles=(), deterministic=False
) -> Blocks:
    """Return the blocks of a launch; reach: back and ahead of `query_tiles`; tiles: those of packed sequences' blocks."""
    (batch, heads, sq, _), (_, kv_heads, sk, _) = q.shape, k.shape
    tiles = tiles or query_tiles(sq, sk, plan.block_m, plan.block_n, *reach)
    # Of a head Q and dO in 16 bits, and the sums of dQ in 32.
    fit = max(1, L2_BYTES // (-(-sq // 128) * 128 * plan.block_d * 8 * (heads // kv_heads)))
    keys = 128 if plan.block_d == 64 else 64
    # To a query, keys are what queries are to a key. The last rows come first.
    dq = () if plan.dq else query_tiles(sk, sq, keys, 128, *reach[::-1])[::-1]
    few = sms // (2 * batch * heads * len(dq)) if not deterministic and max(dq, default=0) >= 32 else 1
    return Blocks(tiles, batch * kv_heads, heads // kv_heads, fit, sms, plan.block_d, dq, max(1, few))


@functools.lru_cache(maxsize=2)
def in_order(blocks: Blocks, section: int) -> list[int]:
    """Return how many tiles each block has, in the order in which SMs take them."""
    found: list[int] = []
    for start in range(0, blocks.heads, section):
        for tiles in blocks.tiles:
            found += [tiles * blocks.group] * min(section, blocks.heads - start)
    return found


def list_schedule(costs: list[float], sms: int) -> float:
    """Return when the last SM ends, if each takes the next program as soon as it is free."""
    free = costs[:sms]
    heapq.heapify(free)
    for cost in costs[sms:]:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def schedule_tiles(blocks: Blocks, order: Order) -> float:
    """Return how long an order takes, in tiles, with the kernel that adds up the pieces."""
    tiles, pieces, wide = in_order(blocks, order.section), order.pieces, blocks.width == 256
    # The programs of dQ's own kernel begin before the others.
    numbers = range(blocks.heads * blocks.group * blocks.dq_pieces)
    costs = [DQ_TILES[0] * n / blocks.dq_pieces + DQ_TILES[1] for n in blocks.dq for _ in numbers]
    costs += [n + BLOCK_TILES[wide] for n in tiles[: order.whole]]
    rest = tiles[order.whole :]
    costs += [n * (i + 1) // pieces - n * i // pieces + PIECE_TILES[wide] for n in rest for i in range(pieces)]
    sums = order.slots // (1 if blocks.dq else pieces)
    first = max(len(costs) // blocks.sms - MOST_BLOCKS, 0) * blocks.sms
    end = sum(costs[:first]) / blocks.sms + list_schedule(costs[first:], blocks.sms)
    return end + (FINISH_TILES[wide] + ADD_TILES * (blocks.width // 64) * sums if rest else 0)


@functools.lru_cache(maxsize=512)
def best_order(blocks: Blocks) -> Order:
    """Return the order that ends first: of whole blocks, or with those of the last round or section in pieces."""
    # Even sections of heads that fit in the L2. Heads that run at the same time anyway need not fit.
    section = -(-blocks.heads // -(-blocks.heads // max(blocks.fit, -(-blocks.sms // len(blocks.tiles)))))
    time, found = functools.partial(schedule_tiles, blocks), Order(section, blocks.count)
    last = (blocks.heads - 1) // section * section * len(blocks.tiles)  # the last section's first block
    cut = [
        Order(section, whole, pieces, (blocks.count - whole) * pieces)
        for whole in (last, blocks.count - blocks.count % blocks.sms)
        for pieces in PIECES
        if 0 < (blocks.count - whole) * pieces <= MOST_BLOCKS * blocks.sms
    ]
    best = min(cut, key=time, default=found)
    return best if time(best) < PIECES_GAIN * time(found) else found
