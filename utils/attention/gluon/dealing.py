"""Deal out tiles of different lengths to programs, on the host, so that all programs end together.

A tile's length is the number of blocks of keys that its rows see: under a causal mask or a window, tiles differ. They go longest
first to the program with the least load; where a program has few tiles, exchanges follow, which end up to 12% sooner.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

# K and V of the heads that are computed at the same time. A third of an H100's L2: they stay there beside Q and the output, and the
# programs' first tiles do not ask for the K and V of more heads at once.
SECTION_BYTES = 16 << 20
_LAST_SECTION = 2  # sections in the last one: it has the short tiles that are left when the programs end
# What a tile costs beyond its key blocks, in key blocks: first scores, last product, storing. 1.5 to 4, by head dimension and shape.
TILE_OVERHEAD = 2.5
_EXCHANGED = 16  # tiles for each program: more of them are dealt well enough longest first
_LOOKED_AT = 40_000  # tiles, in all exchanges together: some 10 ms


def _longest_first(costs: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Deal tiles in rounds, one to each program, the longest to the least load; add to `load`, and return their programs."""
    order = np.argsort(-costs, kind="stable")
    found: np.ndarray = np.empty(len(costs), dtype=np.intp)
    for start in range(0, len(costs), len(load)):
        tiles = order[start : start + len(load)]
        programs = np.argsort(load, kind="stable")[: len(tiles)]
        found[tiles] = programs
        load[programs] += costs[tiles]
    return found


def _exchange(costs: np.ndarray, owner: np.ndarray, load: np.ndarray, section: np.ndarray) -> None:
    """Improve who has which tile: as long as it helps, the busiest program gives a tile away, or for a shorter one.

    Each time that exchange is taken after which the longer of the two programs is shortest. Only tiles of one section are
    exchanged, and only tiles of the last one are given away.
    """
    for _ in range(_LOOKED_AT // len(costs)):
        busiest = load.argmax()
        own, others = np.flatnonzero(owner == busiest), np.flatnonzero(owner != busiest)
        given = costs[own][:, None]
        less = np.hstack([given - costs[others], np.broadcast_to(given, (len(own), len(load)))])  # of the busiest
        partner = np.concatenate([owner[others], np.arange(len(load))])
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


def deal_tiles(blocks: Sequence[int], heads_total: int, group: int, head_bytes: int, programs: int) -> list[list[int]]:
    """Deal tiles to the programs so that all end together; return the tiles of each: row tile + head * row tiles.

    Heads are dealt in sections (SECTION_BYTES), one after the other.

    Args:
        blocks: How many blocks of keys each row tile of a head sees.
        heads_total: Query heads of all sequences.
        group: Query heads that share a head of keys.
        head_bytes: Bytes of one head's K and V.
        programs: Number of programs.
    """
    section_heads = max(1, SECTION_BYTES // head_bytes) * group
    last = heads_total - min(_LAST_SECTION * section_heads, heads_total)
    starts = sorted({0, *range(last % section_heads, last + 1, section_heads), heads_total})
    costs = np.tile(np.array(blocks) + TILE_OVERHEAD, heads_total)
    load = np.zeros(programs)
    owner: np.ndarray = np.empty(len(costs), dtype=np.intp)
    section: np.ndarray = np.empty(len(costs), dtype=np.intp)
    for first, behind in itertools.pairwise(starts):
        tiles = slice(first * len(blocks), behind * len(blocks))
        section[tiles] = first
        owner[tiles] = _longest_first(costs[tiles], load)
    if len(costs) <= _EXCHANGED * programs:
        _exchange(costs, owner, load, section)
    # A program computes the sections in turn, and the longest tiles of each first.
    order = np.lexsort((-costs, section, owner))
    return [tiles.tolist() for tiles in np.split(order, np.searchsorted(owner[order], np.arange(1, programs)))]
