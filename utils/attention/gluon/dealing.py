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
# What a tile costs beyond its key blocks, in key blocks: first scores, last product, storing.
TILE_OVERHEAD = 1.5
_OVERHEADS = (1.5, 2.5, 4.0)  # as much as it may be, by head dimension and shape
_MOST_TILES = 1 << 16
_MOST_EXCHANGES = 1000


# Up to this number of tiles for each program several ways to deal them are judged, which takes the host 40 ms; up to the second
# number one way is improved by exchanges (10 to 20 ms); more are dealt well enough longest first.
SEARCHED, _EXCHANGED = 5, 16


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


def _first_fit(tiles: list[tuple[float, int]], loads: list[float], limit: float) -> list[int] | None:
    """Give each tile to the first program that it does not bring above a limit; None if there is none for one of them."""
    loads, found = loads.copy(), []
    for cost, _ in tiles:
        program = next((i for i, load in enumerate(loads) if load + cost <= limit), None)
        if program is None:
            return None
        loads[program] += cost
        found.append(program)
    return found


def _searched(tiles: list[tuple[float, int]], loads: list[float]) -> list[int]:
    """Deal out tiles so that the busiest program ends early: longest first and by first fit, each improved by exchanges.

    With three or four tiles for each program this ends up to 12% sooner than giving each to the least loaded. But it may give
    one program many short tiles, and what a tile costs beyond its blocks is not known well: of several ways that is taken
    which is best at the worst of _OVERHEADS.
    """

    def makespan(found: list[int], extra: float) -> float:
        after = loads.copy()
        for (cost, _), program in zip(tiles, found, strict=True):
            after[program] += cost + extra
        return max(after) / sum(after)

    extras, ways = [overhead - TILE_OVERHEAD for overhead in _OVERHEADS], list[list[int]]()
    for extra in extras:
        longer = [(cost + extra, tile) for cost, tile in tiles]
        for found in (_longest_first(longer, loads.copy()), _multifit(longer, loads)):
            ways += [found, _exchanged(longer, loads, found)]
    return min(ways, key=lambda found: max(makespan(found, extra) for extra in extras))


def _exchanged(
    tiles: list[tuple[float, int]], loads: list[float], programs: list[int], sections: list[int] | None = None
) -> list[int]:
    """Improve who has which tile: as long as it helps, the busiest program gives a tile away, or for a shorter one.

    Each time that exchange is taken after which the longer of the two programs is shortest. sections: of the tiles; if given, only tiles
    of one section are exchanged, and none is given away.
    """
    section = None if sections is None else np.array(sections)
    costs, owner = np.array([cost for cost, _ in tiles], dtype=float), np.array(programs, dtype=np.intp)
    load = loads + np.bincount(owner, weights=costs, minlength=len(loads))
    for _ in range(_MOST_EXCHANGES):
        busiest = load.argmax()
        own, others = np.flatnonzero(owner == busiest), np.flatnonzero(owner != busiest)
        if not len(own):
            break
        given = costs[own][:, None]
        less = np.hstack([given - costs[others], np.broadcast_to(given, (len(own), len(load)))])  # of the busiest
        partner = np.concatenate([owner[others], np.arange(len(load))])
        longer = np.maximum(load[busiest] - less, load[partner] + less)
        longer[:, partner == busiest] = np.inf
        if section is not None:
            longer[:, len(others) :] = np.inf
            longer[:, : len(others)][section[own][:, None] != section[others]] = np.inf
        tile, other = np.unravel_index(longer.argmin(), longer.shape)
        if longer[tile, other] > load[busiest] - 1e-6:
            break
        if other < len(others):
            owner[others[other]] = busiest
        owner[own[tile]] = partner[other]
        load[busiest] -= less[tile, other]
        load[partner[other]] += less[tile, other]
    return owner.tolist()


def _multifit(tiles: list[tuple[float, int]], loads: list[float]) -> list[int]:
    """Deal out tiles by first fit, under the smallest limit under which they fit."""
    after = loads.copy()
    found = _longest_first(tiles, after)
    high, low = max(after), max(max(loads), (sum(loads) + sum(cost for cost, _ in tiles)) / len(loads))
    for _ in range(8):
        middle = (low + high) / 2
        fitting = _first_fit(tiles, loads, middle)
        if fitting is None:
            low = middle
        else:
            found, high = fitting, middle
    return found


def deal_tiles(
    blocks: Sequence[int], heads_total: int, group: int, head_bytes: int, programs: int, exchanged: int = _EXCHANGED
) -> tuple[tuple[int, ...], ...] | None:
    """Deal tiles to the programs, longest first and so that all end together: row tile | head << 16.

    Heads are dealt in sections (SECTION_BYTES). The last one is improved by itself, and then all of them by exchanges within each.

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
    extra = _OVERHEADS[1] - TILE_OVERHEAD
    loads = [0.0] * programs
    tiles: list[tuple[float, int]] = []
    found: list[int] = []  # the programs of the tiles
    sections: list[int] = []
    for first, behind in itertools.pairwise(starts):
        more = [(blocks[m] + TILE_OVERHEAD, m | head << 16) for m in order for head in range(first, behind)]
        if first == last and len(more) <= min(SEARCHED, exchanged) * programs:
            found += _searched(more, loads)
        elif first == last and len(more) <= exchanged * programs:
            longest_first = _longest_first(more, loads.copy())
            found += _exchanged([(cost + extra, tile) for cost, tile in more], loads, longest_first)
        else:
            found += _longest_first(more, loads)
        tiles += more
        sections += [first] * len(more)
    if last and len(tiles) <= exchanged * programs:
        found = _exchanged([(cost + extra, tile) for cost, tile in tiles], [0.0] * programs, found, sections)
    dealt: list[list[int]] = [[] for _ in range(programs)]
    for (_, tile), program in zip(tiles, found, strict=True):
        dealt[program].append(tile)
    return tuple(map(tuple, dealt))
