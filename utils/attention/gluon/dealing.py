"""Deal out tiles of different lengths to programs, on the host, so that all programs end together.

A tile's length is the number of blocks of keys that its rows see: under a causal mask or a window, tiles differ.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

# K and V of the heads that are computed at the same time. A third of an H100's L2: they stay there beside Q and the output, and the
# programs' first tiles do not ask for the K and V of more heads at once.
SECTION_BYTES = 16 << 20
_LAST_SECTION = 2  # sections in the last one: it has the short tiles that are left when the programs end
TILE_OVERHEAD = 1.5  # what a tile costs beyond its key blocks, in key blocks: first scores, last product, storing
_LONGER = 1.0  # more of it where tiles are exchanged: at some head dimensions and shapes a tile costs 2.5 in all
_MOST_TILES = 1 << 16
_MOST_EXCHANGES = 1000
# Up to this number of tiles for each program they are exchanged, which takes the host 10 to 20 ms; more are dealt well enough
# longest first.
_EXCHANGED = 16


def _longest_first(tiles: list[tuple[float, int]], loads: list[float]) -> list[int]:
    """Give each tile to the program with the least load, and add it there; return the programs of the tiles."""
    heap = [(time, program) for program, time in enumerate(loads)]
    heapq.heapify(heap)
    found = []
    for cost, _ in tiles:
        time, program = heapq.heappop(heap)
        found.append(program)
        loads[program] = time + cost
        heapq.heappush(heap, (time + cost, program))
    return found


def _exchanged(tiles: list[tuple[float, int]], programs: list[int], sections: list[int], count: int) -> list[int]:
    """Improve who has which tile: as long as it helps, the busiest program gives a tile away, or for a shorter one.

    Each time that exchange is taken after which the longer of the two programs is shortest. Tiles are exchanged within a section,
    and given away in the last one. count: of programs.
    """
    section = np.array(sections)
    costs, owner = np.array([cost + _LONGER for cost, _ in tiles]), np.array(programs, dtype=np.intp)
    load = np.bincount(owner, weights=costs, minlength=count)
    for _ in range(_MOST_EXCHANGES):
        busiest = load.argmax()
        own, others = np.flatnonzero(owner == busiest), np.flatnonzero(owner != busiest)
        given = costs[own][:, None]
        less = np.hstack([given - costs[others], np.broadcast_to(given, (len(own), count))])  # of the busiest
        partner = np.concatenate([owner[others], np.arange(count)])
        longer = np.maximum(load[busiest] - less, load[partner] + less)
        longer[:, partner == busiest] = np.inf
        longer[:, : len(others)][section[own][:, None] != section[others]] = np.inf
        longer[section[own] != section[-1], len(others) :] = np.inf
        tile, other = np.unravel_index(longer.argmin(), longer.shape)
        if longer[tile, other] > load[busiest] - 1e-6:
            break
        if other < len(others):
            owner[others[other]] = busiest
        owner[own[tile]] = partner[other]
        load[busiest] -= less[tile, other]
        load[partner[other]] += less[tile, other]
    return owner.tolist()


def deal_tiles(
    blocks: Sequence[int], heads_total: int, group: int, head_bytes: int, programs: int, exchanged: int = _EXCHANGED
) -> tuple[tuple[int, ...], ...] | None:
    """Deal tiles to the programs, longest first and so that all end together: row tile | head << 16.

    Heads are dealt in sections (SECTION_BYTES), and then tiles exchanged within each.

    Args:
        blocks: How many blocks of keys each row tile of a head sees.
        heads_total: Query heads of all sequences.
        group: Query heads that share a head of keys.
        head_bytes: Bytes of one head's K and V.
        programs: Number of programs.
        exchanged: Up to so many tiles of a program are improved by exchanges; 0, which takes a few ms, where the next
            call will have other lengths.

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
    loads = [0.0] * programs
    tiles: list[tuple[float, int]] = []
    found: list[int] = []  # the programs of the tiles
    sections: list[int] = []
    for first, behind in itertools.pairwise(starts):
        more = [(blocks[m] + TILE_OVERHEAD, m | head << 16) for m in order for head in range(first, behind)]
        found += _longest_first(more, loads)
        tiles += more
        sections += [first] * len(more)
    if len(tiles) <= exchanged * programs:
        found = _exchanged(tiles, found, sections, programs)
    dealt: list[list[int]] = [[] for _ in range(programs)]
    for (_, tile), program in zip(tiles, found, strict=True):
        dealt[program].append(tile)
    return tuple(map(tuple, dealt))
