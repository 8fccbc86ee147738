"""Plans: the tile and the slots of each step, and which program computes which tile. This module does not need Triton.

The plans were chosen on an H200 (docs/kernels/attention.md). Gluon's tile shapes are powers of two. A block has at most 227 KiB of
shared memory, and a thread at most 255 registers. An SM has 65536 registers, which suffice for two consumers
(2 x 128 x 240 + 128 x 24), for three (3 x 128 x 160 + 128 x 32), or for four (4 x 128 x 112 + 128 x 24).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

BLOCK_M = 64  # query rows of a warpgroup: one wgmma m64
STEPS = range(1, 6)  # the steps of the ladder
HEAD_DIMS = (64, 128, 256)  # tile widths; a head dimension, any multiple of 8 up to 256, takes the next larger width


@dataclass(frozen=True)
class Plan:
    """Tile and pipeline of one kernel. Step 5 is compiled for a plan; its kernel reads the fields, not the properties."""

    block_d: int  # tile width: the head dimension, rounded up
    block_n: int  # keys of a block
    consumers: int = 1  # warpgroups that compute 64 query rows each
    stages: int = 2  # slots of the K ring; step 5's V ring has as many, but at least 3
    depth: int = 0  # 80 or 96: the products use this number of the 128 columns of Q, K and V; 0: they use all columns

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return BLOCK_M * self.consumers


@dataclass(frozen=True)
class Case:
    """The mask and the tiles of an attention. Step 5 is compiled for each case.

    mask: "", "causal", "window", "packed", or "packed window". Under a packed mask a table has the interval of each row
    (`intervals.py`). dealt: whether the host deals the tiles (`deal_tiles`). overhang: whether a tile can have rows before the
    first query of its head (`row_offset`), or behind the last row of its packed sequence. Code for such rows in every kernel would
    cost causal attention at head dimension 64 between 3 and 6%.
    """

    mask: str = ""
    dealt: bool = False
    overhang: bool = False


# Step 5's plans, by tile width and variant (`variant_for`).
_STEP_5 = {
    (64, ""): Plan(64, 128, 3, 4),
    (64, "few"): Plan(64, 128, 2, 3),
    # Causal attention over few keys: in blocks of 64 keys fewer scores are masked, and a tile starts and ends sooner.
    (64, "narrow"): Plan(64, 64, 3, 6),
    (64, "four"): Plan(64, 64, 4, 7),
    (128, ""): Plan(128, 128, 2, 2),
    # Full attention in tiles of 192 rows, if these make fewer rounds.
    (128, "three"): Plan(128, 64, 3, 4),
    (64, "one"): Plan(64, 128, 1, 4),
    (128, "one"): Plan(128, 128, 1, 2),
    (256, "one"): Plan(256, 64, 1, 2),
    (256, ""): Plan(256, 64, 2, 2),
}
VARIANTS = tuple(dict.fromkeys(variant for _, variant in _STEP_5))


def block_head_dim(head_dim: int) -> int:
    """Return the tile width that holds a head dimension: 64, 128 or 256."""
    return next(width for width in HEAD_DIMS if head_dim <= width)


def row_offset(causal: bool, shift: int) -> int:
    """Return the number of rows by which step 5's first tile begins before the first query.

    A consumer's 64 rows then begin at the position of the first or the middle key of a block. So the diagonal of these rows lies in
    one block, and the other blocks need no mask. causal: whether the mask is causal and has no window. shift: Sk - Sq.
    """
    return shift % BLOCK_M if causal else 0


def whole_tiles(tiles: int, consumers: int, programs: int) -> int:
    """Return how many tiles of full attention stay whole. If the programs suffice, the last round's tiles become parts of 64 rows."""
    last = tiles % programs
    return tiles - last if last * consumers <= programs else tiles


_PART = {1: 1.0, 2: 0.8, 3: 0.6}  # {consumers: time of a part, as a fraction of a whole tile's time}

# Causal attention at head dimension 64 on an H200: microseconds for a program (beyond "few"), for a tile, and for 128 keys of a tile.
_CAUSAL = {"": (0.8, 1.5, 1.3), "few": (0.0, 1.2, 1.0), "narrow": (0.8, 0.5, 1.6), "four": (0.8, 0.8, 2.0)}


def list_schedule(costs: list[float], programs: int) -> float:
    """Return the end of the last program, if each program takes the next cost when it is free."""
    free = costs[:programs]
    heapq.heapify(free)
    for cost in costs[programs:]:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def variant_for(head_dim: int, causal: bool, window: int, sq: int, sk: int, heads: int, programs: int) -> str:
    """Name the variant of step 5's plan that an attention takes.

    window: 0 means no window. heads: query heads of all sequences. programs: the number of multiprocessors.

    "one": tiles of 64 rows. Each program has one tile at most; or two, if tiles of 128 rows just exceed a round, or if causal work is
    then more even. "few": tiles of 128 rows at head dimension 64, for few tiles or many masks. "narrow", "four": few causal keys.
    "three": full attention in fewer rounds of larger tiles. "": all other attentions.
    """
    d, full = block_head_dim(head_dim), not causal and not window
    small = "few" if d == 64 else ""

    def rounds(name: str) -> float:
        plan = plan_for(5, head_dim, name)
        tiles = len(tile_blocks(plan, sq, sk, causal, window)) * heads
        whole = whole_tiles(tiles, plan.consumers, programs) if full else tiles
        return -(-whole // programs) + (_PART[plan.consumers] if whole < tiles else 0)

    if rounds(small) <= 1:  # a program has one tile, so tiles cannot overlap
        # Two causal tiles of 64 rows, long and short, take 0.75 to 0.95 of the time of a tile of 128 rows (eight shapes on an H200).
        return "one" if rounds("one") == 1 or (causal and not window and sq == sk) else small
    if d > 64:  # a round of tiles of 192 rows takes 1.52 times as long as a round of tiles of 128 rows
        return "three" if full and d == 128 and 1.52 * rounds("three") <= rounds("") else ""
    if causal and not window:

        def load(name: str) -> float:
            plan, (program, tile, keys) = plan_for(5, head_dim, name), _CAUSAL[name]
            costs = [tile + keys * n * plan.block_n / 128 for n in tile_blocks(plan, sq, sk, True, 0)]
            if len(costs) * heads > 8 * programs:
                return program + sum(costs) * heads / programs
            # Each tile goes to the program with the least work (`deal_tiles`), the longest tiles first.
            return program + list_schedule([x for x in sorted(costs, reverse=True) for _ in range(heads)], programs)

        return min(_CAUSAL, key=load)
    few, large, blocks = rounds("few"), rounds(""), -(-sk // 128)
    if window:
        # Many masks: more than a quarter of the blocks that a tile sees contain the window's edges or the diagonal.
        seen = min(blocks, (192 + (1 if causal else 2) * (window - 1) - 1) // 128 + 2)
        fits = seen < (12 if causal else 20) and (128 if causal else 160) * few <= 192 * large
    elif rounds("one") == 2:  # tiles of 128 rows just exceed a round: 0.87 and 0.95 of the time of tiles of 192 rows
        return "one"
    else:  # a larger tile takes 1.29 times as long for a block of keys; its start and end take as long as 3.6 blocks, not 2
        fits = few * (blocks + 2) <= large * (1.29 * blocks + 3.6)
    return "few" if fits else ""


def packed_variant(head_dim: int, lengths: Sequence[int], causal: bool, window: int, heads: int, programs: int) -> str:
    """Name the variant for packed sequences. Little work at head dimension 64 takes smaller tiles or smaller blocks of keys."""
    few = -(-sum(lengths) // _STEP_5[64, ""].rows) * heads < 3 * programs
    # In blocks of 64 keys, causal sequences of 250 to 420 tokens take 0.91 of the time, and longer ones, from 1000 tokens on, 1.05.
    short = causal and not window and sum(lengths) < 700 * len(lengths)
    return "" if head_dim > 64 else "few" if few else "narrow" if short else ""


def plan_for(step: int, head_dim: int, variant: str = "") -> Plan:
    """Return the plan of a step of the ladder for a head dimension. variant: step 5's variant (`variant_for`)."""
    d = block_head_dim(head_dim)
    if step in (1, 2):
        return Plan(d, 32 if d == 256 else 64)
    if step == 3:
        return Plan(d, 64 if d == 256 else 128)
    if step == 4:
        return replace(_STEP_5[d, ""], stages=3 if d == 64 else 2)
    if step == 5:
        plan = _STEP_5.get((d, variant)) or _STEP_5[d, ""]
        return replace(plan, depth=-(-head_dim // 16) * 16 if 64 < head_dim <= 96 else 0)
    raise ValueError(f"The ladder has the steps 1 to 5; got step {step!r}.")


def tile_blocks(plan: Plan, sq: int, sk: int, causal: bool, window: int) -> list[int]:
    """Return for each row tile of a head, from the first to the last, how many blocks of keys it sees (`shared.key_blocks`)."""
    last, shift, counts = -(-sk // plan.block_n), sk - sq, []
    for row in range(-row_offset(causal and not window, shift), sq, plan.rows):
        behind = row + plan.rows + shift + (0 if causal else window - 1)  # the first key that no row of the tile sees
        high = min(last, -(-max(behind, 0) // plan.block_n)) if causal or window else last
        low = min(max(row + shift - window + 1, 0) // plan.block_n, last - 1) if window else 0
        counts.append(max(high - low, 1))
    return counts


# A section is a group of heads that are computed at the same time; its K and V have this number of bytes. They take a third of
# an H100's L2, beside Q and the output. With small sections the programs' first tiles load K and V of few heads at once.
SECTION_BYTES = 16 << 20
_LAST_SECTION = 2  # the last section is twice as large: it has enough short tiles for all programs to end together
TILE_OVERHEAD = 1.5  # time of a tile's first scores, last product and store, in the time of a block of keys
_MOST_TILES = 1 << 16


def deal_tiles(blocks: Sequence[int], heads_total: int, group: int, head_bytes: int, programs: int) -> list[list[int]]:
    """Deal tiles of different lengths to the programs so that all programs end together. Return the tiles of each program.

    A tile is the number head << bits | row tile. The longest tiles come first, and each goes to the program with the least work. If
    there are very many tiles, the programs take them in turns. The sections of heads (SECTION_BYTES) follow each other.

    Args:
        blocks: Number of blocks of keys that each row tile of a head sees.
        heads_total: Number of query heads of all sequences.
        group: Number of query heads that share a head of keys.
        head_bytes: Bytes of one head's K and V.
        programs: Number of programs.
    """
    bits, order = (len(blocks) - 1).bit_length(), sorted(reversed(range(len(blocks))), key=lambda m: -blocks[m])
    if len(blocks) * heads_total > _MOST_TILES:
        tiles = [head << bits | m for m in order for head in range(heads_total)]
        return [tiles[program::programs] for program in range(programs)]
    section = max(1, SECTION_BYTES // head_bytes) * group
    last = heads_total - min(_LAST_SECTION * section, heads_total)
    starts = sorted({0, *range(last % section, last + 1, section), heads_total})
    loads = [(0.0, program) for program in range(programs)]  # a heap
    dealt: list[list[int]] = [[] for _ in loads]
    for first, behind in itertools.pairwise(starts):
        for m, head in itertools.product(order, range(first, behind)):
            load, program = loads[0]
            heapq.heapreplace(loads, (load + blocks[m] + TILE_OVERHEAD, program))
            dealt[program].append(head << bits | m)
    return dealt
