"""Tiles, slots and registers of each step, and which program computes which tile: plain Python, no Triton.

Chosen on an H200 (docs/kernels/attention.md). Gluon's tile shapes are powers of two. Shared memory holds 227 KiB a block;
a thread has at most 255 registers, an SM 65536: 2 x 128 x 240 + 128 x 24, 3 x 128 x 160 + 128 x 32, or 4 x 128 x 112 + 128 x 24.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

BLOCK_M = 64  # query rows of a warpgroup: one wgmma m64
STEPS = {
    1: "one warpgroup, synchronous",
    2: "cp.async, double-buffered",
    3: "TMA and mbarriers",
    4: "warp-specialized",
    5: "overlapped and persistent",
}
HEAD_DIMS = (64, 128, 256)  # tile widths; any multiple of 8 up to 256 runs in the next larger one


@dataclass(frozen=True)
class Plan:
    """Tile and pipeline of one kernel. Step 5 is compiled for a plan: it reads the fields, not the properties."""

    block_d: int  # tile width: the head dimension, rounded up
    block_n: int  # keys of a block
    consumers: int = 1  # warpgroups that compute, 64 query rows each
    stages: int = 2  # slots of the K ring, and of step 5's V ring, which has at least 3
    depth: int = 0  # 80 or 96: so many columns of Q and K make the scores, and so many of V the output, not all 128 of their tiles

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return BLOCK_M * self.consumers


@dataclass(frozen=True)
class Case:
    """What an attention needs of step 5's kernel: a kernel is compiled for each.

    mask: "" for none, "causal", "window", where keys before the last block hide, too, "packed" where a table has the interval of
    each row (`intervals.py`), or "packed window". dealt: the host deals out the tiles (`deal_tiles`). offset: a head's first tile
    begins before its first query (`row_offset`), or a packed one ends before its rows do; 64 causal loses 3 to 6% if every kernel
    has the code for it.
    """

    mask: str = ""
    dealt: bool = False
    offset: bool = False


# Step 5's plans, by tile width and variant (`variant_for`).
_STEP_5 = {
    (64, ""): Plan(64, 128, 3, 4),
    (64, "few"): Plan(64, 128, 2, 3),
    # Causal attention over few keys: blocks of 64 keys leave less of the diagonal's to masks, and a tile starts and ends sooner.
    (64, "narrow"): Plan(64, 64, 3, 6),
    (64, "four"): Plan(64, 64, 4, 7),
    (128, ""): Plan(128, 128, 2, 2),
    # Full attention in tiles of 192 rows, where they make fewer rounds.
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
    """Return how many rows before the first query the tiles of step 5 begin. causal: and without a window. shift: Sk - Sq.

    Where a consumer's 64 rows begin at the position of a block's first key or its middle one, their diagonal lies in one
    block, and the others need no mask.
    """
    return shift % BLOCK_M if causal else 0


def whole_tiles(tiles: int, consumers: int, programs: int) -> int:
    """Return how many tiles of full attention are computed whole: those of a last round become parts of 64 rows, if a program has one at most."""
    last = tiles % programs
    return tiles - last if last * consumers <= programs else tiles


_PART = {1: 1.0, 2: 0.8, 3: 0.6}  # how long a part takes, in whole tiles, by consumers

# Causal attention at head dimension 64 on an H200: microseconds of a program beyond the fewest, of a tile, and of 128 keys of a tile.
_CAUSAL = {"": (0.8, 1.5, 1.3), "few": (0.0, 1.2, 1.0), "narrow": (0.8, 0.5, 1.6), "four": (0.8, 0.8, 2.0)}


def longest_load(costs: Sequence[float], heads: int, programs: int) -> float:
    """Return how long the program with the most work takes, if each tile of each head goes to the one with the least (`deal_tiles`)."""
    if len(costs) * heads > 8 * programs:
        return sum(costs) * heads / programs
    loads = [0.0] * programs  # a heap
    for cost in sorted(costs, reverse=True):
        for _ in range(heads):
            heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


def variant_for(head_dim: int, causal: bool, window: int, sq: int, sk: int, heads: int, programs: int) -> str:
    """Name the variant of step 5's plan that an attention takes.

    window: 0 for none. heads: of all sequences. programs: multiprocessors.

    "one": each program has a tile of 64 rows at most, or two where tiles of 128 are a few too many, or causal rows are dealt out
    more evenly. "few": tiles of 128 rows at head dimension 64, for few tiles or many masks. "narrow", "four": few causal keys.
    "three": full attention in fewer rounds of larger tiles. "": any other.
    """
    d, full = block_head_dim(head_dim), not causal and not window
    small = "few" if d == 64 else ""

    def rounds(name: str) -> float:
        plan = plan_for(5, head_dim, name)
        tiles = len(tile_blocks(plan, sq, sk, causal, window)) * heads
        whole = whole_tiles(tiles, plan.consumers, programs) if full else tiles
        return -(-whole // programs) + (_PART[plan.consumers] if whole < tiles else 0)

    if rounds(small) <= 1:  # a program has one tile: none to overlap with
        # Two causal tiles of 64 rows, a long and a short one, take 0.75 to 0.95 of the time of one of 128 (eight shapes on an H200).
        return "one" if rounds("one") == 1 or (causal and not window and sq == sk) else small
    if d > 64:  # a round of 192 rows takes 1.52 times as long as one of 128
        return "three" if full and d == 128 and 1.52 * rounds("three") <= rounds("") else ""
    if causal and not window:

        def load(name: str) -> float:
            plan, (program, tile, keys) = plan_for(5, head_dim, name), _CAUSAL[name]
            costs = [tile + keys * n * plan.block_n / 128 for n in tile_blocks(plan, sq, sk, True, 0)]
            return program + longest_load(costs, heads, programs)

        return min(_CAUSAL, key=load)
    few, large, blocks = rounds("few"), rounds(""), -(-sk // 128)
    if window:
        # Many masks: the window's edges, or the diagonal, go through more than a quarter of the blocks that a tile sees.
        seen = min(blocks, (192 + (1 if causal else 2) * (window - 1) - 1) // 128 + 2)
        fits = seen < (12 if causal else 20) and (128 if causal else 160) * few <= 192 * large
    elif rounds("one") == 2:  # just over a round of 128 rows: 0.87 and 0.95 of the time of tiles of 192
        return "one"
    else:  # larger tiles take 1.29 times as long for a block of keys, and 3.6 blocks, not 2, for start and end
        fits = few * (blocks + 2) <= large * (1.29 * blocks + 3.6)
    return "few" if fits else ""


def packed_variant(head_dim: int, lengths: Sequence[int], causal: bool, window: int, heads: int, programs: int) -> str:
    """Name the variant for packed sequences: at head dimension 64 smaller tiles, or blocks of keys, where there is little to compute."""
    few = -(-sum(lengths) // _STEP_5[64, ""].rows) * heads < 3 * programs
    # Causal sequences of 250 to 420 tokens take 0.91 of the time in blocks of 64 keys, those of 1000 and more 1.05.
    short = causal and not window and sum(lengths) < 700 * len(lengths)
    return "" if head_dim > 64 else "few" if few else "narrow" if short else ""


def plan_for(step: int, head_dim: int, variant: str = "") -> Plan:
    """Return the plan of a step of the ladder for a head dimension. variant: of step 5, see `variant_for`."""
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
    """Return how many blocks of keys each row tile of a head sees (`shared.key_blocks`), from the first to the last."""
    last, shift, found = -(-sk // plan.block_n), sk - sq, []
    for row in range(-row_offset(causal and not window, shift), sq, plan.rows):
        behind = row + plan.rows + shift + (0 if causal else window - 1)  # of the first key that no row sees
        high = min(last, -(-max(behind, 0) // plan.block_n)) if causal or window else last
        low = min(max(row + shift - window + 1, 0) // plan.block_n, last - 1) if window else 0
        found.append(max(high - low, 1))
    return found


# K and V of the heads that are computed at the same time. A third of an H100's L2: they stay there beside Q and the output, and the
# programs' first tiles do not ask for the K and V of more heads at once.
SECTION_BYTES = 16 << 20
_LAST_SECTION = 2  # sections in the last one: it has the short tiles that are left when the programs end
TILE_OVERHEAD = 1.5  # what a tile costs beyond its key blocks, in key blocks: first scores, last product, storing
_MOST_TILES = 1 << 16


def deal_tiles(blocks: Sequence[int], heads_total: int, group: int, head_bytes: int, programs: int) -> list[list[int]]:
    """Deal tiles of different lengths to the programs so that all end together: head << bits of a row tile | row tile.

    The longest come first, each to the program with the least work, or in turns if there are so many that any order is
    balanced. Heads are dealt in sections (SECTION_BYTES), one after another.

    Args:
        blocks: How many blocks of keys each row tile of a head sees.
        heads_total: Query heads of all sequences.
        group: Query heads that share a head of keys.
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
