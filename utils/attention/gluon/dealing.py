"""Deal out tiles of different lengths to programs, on the host, so that all programs end together.

A tile's length is the number of blocks of keys that its rows see: under a causal mask or a window, tiles differ.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

# K and V of the heads that are computed at the same time. A third of an H100's L2: they stay there beside Q and the output, and the
# programs' first tiles do not ask for the K and V of more heads at once.
SECTION_BYTES = 16 << 20
_LAST_SECTION = 2  # sections in the last one: it has the short tiles that are left when the programs end
TILE_OVERHEAD = 1.5  # what a tile costs beyond its key blocks, in key blocks: first scores, last product, storing
_MOST_TILES = 1 << 16


def deal_tiles(
    blocks: Sequence[int], heads_total: int, group: int, head_bytes: int, programs: int
) -> tuple[tuple[int, ...], ...] | None:
    """Deal tiles to the programs, longest first, each to the program with the least work: row tile | head << 16.

    Heads are dealt in sections (SECTION_BYTES), one after another.

    Args:
        blocks: How many blocks of keys each row tile of a head sees.
        heads_total: Query heads of all sequences.
        group: Query heads that share a head of keys.
        head_bytes: Bytes of one head's K and V.
        programs: Number of programs.

    Returns:
        The tiles of each program; None if there are so many that any order is balanced, or that 16 bits cannot
        number them.
    """
    if len(blocks) * heads_total > _MOST_TILES or len(blocks) > 0xFFFF or heads_total > 0x7FFF:
        return None
    section = max(1, SECTION_BYTES // head_bytes) * group
    last = heads_total - min(_LAST_SECTION * section, heads_total)
    starts = sorted({0, *range(last % section, last + 1, section), heads_total})
    order = sorted(reversed(range(len(blocks))), key=lambda m: -blocks[m])
    loads = [(0.0, program) for program in range(programs)]  # a heap
    dealt: list[list[int]] = [[] for _ in loads]
    for first, behind in itertools.pairwise(starts):
        for m, head in itertools.product(order, range(first, behind)):
            load, program = loads[0]
            heapq.heapreplace(loads, (load + blocks[m] + TILE_OVERHEAD, program))
            dealt[program].append(m | head << 16)
    return tuple(map(tuple, dealt))
