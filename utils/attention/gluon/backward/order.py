"""Choose the order of the blocks of keys, so that all SMs end together. Plain Python, no Triton.

An SM holds one block at a time and takes the next block when it is free. The time of a block grows with its tiles of queries.
Under a causal mask a block has between one tile and all tiles; with grouped heads it has the tiles of each query head in the
group. Two things make SMs wait for each other at the end:

- A long block starts late. Heads come in sections that fit in the L2, and a section begins with its longest blocks. 16 heads
  in sections of 15 and 1 would end with all blocks of one head: 198 us of work took 265. So sections are of equal size.
- There are fewer blocks than SMs, or the last round has few blocks. Then these blocks are cut into pieces (`shares.py`), if
  that gains more than the sums of the pieces cost. All pieces of a block come before the pieces of the next block.

The schedule gives each block to the SM that is free first. Its costs are fitted to recorded times.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from utils.attention.gluon.backward.plan import BackwardPlan
from utils.attention.gluon.plan import list_schedule

if TYPE_CHECKING:
    import torch

# The heads in flight should fit in so much of the H200's 60 MB. Measured: half as much costs 0 to 2%, no limit costs up to 30%.
L2_BYTES = 32 << 20
# Costs in tiles of queries: 2.1 to 2.4 us a tile, 1.6 us at head dimension 256. Of two numbers, the second is for 256.
BLOCK_TILES = 1.4, 4.7  # beginning and end of a block: the first K and Q, stores of dV and dK
FINISH_TILES = 0.5, 2.0  # more work for `finish_backward`, which at 256 runs for pieces only
PIECE_TILES = 2.9, 4.7  # beginning and end of a piece: its sums are in fp32
ADD_TILES = 0.0061  # writing zeros, adding and reading a sum of 128 keys x 64 columns, for all SMs together
DQ_TILES = 1.2, 3.0  # in dQ's kernel: a tile of keys; beginning and end of a program
# Blocks are cut if the schedule promises at most so much of the time: it is right to a few percent.
PIECES_GAIN = 0.985
MOST_BLOCKS = 10  # the last blocks of an SM, which are scheduled one by one: the earlier ones end at about the same time on all SMs
PIECES = range(2, 13)  # pieces of a block


@dataclass(frozen=True)
class Order:
    """The order of blocks: sections of heads come one after another, and a section begins with the first keys of all its heads."""

    section: int  # heads of keys in a section
    whole: int  # number of whole blocks; all blocks behind them are cut
    pieces: int = 1  # pieces of each cut block
    slots: int = 0  # pieces of all cut blocks


@dataclass(frozen=True)
class Blocks:
    """The blocks of keys of a launch: the work of each block, and the numbers of heads."""

    tiles: tuple[int, ...]  # for each block of a head, the tiles of one query head that see it
    heads: int  # heads of keys of all sequences
    group: int  # query heads that share a head of keys
    fit: int  # heads of keys that fit in the L2 together
    sms: int
    width: int = 128  # columns
    dq: tuple[int, ...] = ()  # in dQ's kernel, the tiles of keys for each 128 rows
    dq_pieces: int = 1  # programs that share these tiles

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.tiles) * self.heads


def query_tiles(sq: int, sk: int, block_m: int, block_n: int, back: int, ahead: int) -> tuple[int, ...]:
    """Return for each block of keys the number of query tiles that see it, as the kernel counts (`Sizes.tiles_of`).

    back, ahead: a query sees so many keys before its position, and so many after its position.
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
    """Return the blocks of a launch; reach: back and ahead of `query_tiles`; tiles: for packed sequences, the tiles of each block."""
    (batch, heads, sq, _), (_, kv_heads, sk, _) = q.shape, k.shape
    tiles = tiles or query_tiles(sq, sk, plan.block_m, plan.block_n, *reach)
    # A head has Q and dO in 16 bits, and the sums of dQ in 32 bits.
    fit = max(1, L2_BYTES // (-(-sq // 128) * 128 * plan.block_d * 8 * (heads // kv_heads)))
    keys = 128 if plan.block_d == 64 else 64
    # dQ's kernel has queries and keys exchanged. The last rows come first.
    dq = () if plan.dq else query_tiles(sk, sq, keys, 128, *reach[::-1])[::-1]
    few = sms // (2 * batch * heads * len(dq)) if not deterministic and max(dq, default=0) >= 32 else 1
    return Blocks(tiles, batch * kv_heads, heads // kv_heads, fit, sms, plan.block_d, dq, max(1, few))


@functools.lru_cache(maxsize=2)
def tiles_in_order(blocks: Blocks, section: int) -> list[int]:
    """Return the number of tiles of each block, in the order in which SMs take the blocks."""
    found: list[int] = []
    for start in range(0, blocks.heads, section):
        for tiles in blocks.tiles:
            found += [tiles * blocks.group] * min(section, blocks.heads - start)
    return found


def schedule_tiles(blocks: Blocks, order: Order) -> float:
    """Return the time of an order in tiles, with `finish_backward` for pieces."""
    tiles, pieces, wide = tiles_in_order(blocks, order.section), order.pieces, blocks.width == 256
    # The programs of dQ's kernel begin before the blocks.
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
    """Return the fastest order: all blocks whole, or the blocks of the last round or section in pieces."""
    # Sections are even and fit in the L2. A section may also have all heads that run at the same time anyway.
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
