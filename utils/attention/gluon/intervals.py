"""Masks that are an interval of keys for each query, given as tables: sequences packed one behind the other.

Query i sees the keys first[i] <= j < behind[i], and both bounds only rise with i, as they do for packed sequences, causal
or not, with a window or without. So the bounds of a tile are those of its first and its last query; and key j is seen by
the queries earliest[j] <= i < past[j], whose bounds rise too, which is all that the backward pass needs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.shared import keep_columns, uniform
from utils.kernels.capture import tensor_on

KEYS = gl.constexpr(128)  # of a block in the backward pass


@dataclass(frozen=True, eq=False)
class Intervals:
    """The bounds of all queries and keys.

    bounds: first, behind, earliest and past (4, S). table: the same on the GPU, int32, and behind it the numbers of
    the blocks of keys, those first that most queries see, and how many tiles of 64 and of 128 queries that are.
    """

    bounds: np.ndarray
    table: torch.Tensor

    def key_blocks(self, rows: int, block_n: int) -> tuple[int, ...]:
        """Return how many blocks of keys each tile of queries sees."""
        return _blocks(self.bounds[:2], rows, block_n)

    def query_tiles(self, block_m: int, block_n: int) -> tuple[int, ...]:
        """Return how many tiles of queries see each block of keys."""
        return _blocks(self.bounds[2:], block_n, block_m)


def _blocks(bounds: np.ndarray, rows: int, block: int) -> tuple[int, ...]:
    first, behind = bounds
    begins = np.arange(0, len(first), rows)
    ends = np.minimum(begins + rows, len(first)) - 1
    return tuple((-(-behind[ends] // block) - first[begins] // block).tolist())


@functools.lru_cache(maxsize=64)
def packed_intervals(lengths: tuple[int, ...], causal: bool, window: int, device: torch.device) -> Intervals:
    """Return the bounds of sequences of these lengths, one behind the other; window 0: none."""
    ends: np.ndarray = np.cumsum(lengths)
    first: np.ndarray = np.repeat(ends - lengths, lengths)
    behind: np.ndarray = np.repeat(ends, lengths)
    position = np.arange(ends[-1])
    if causal:
        behind = position + 1
    if window:
        first = np.maximum(first, position - window + 1)
        behind = np.minimum(behind, position + window)
    earliest, past = (np.searchsorted(bound, position, side="right") for bound in (behind, first))
    bounds = np.stack([first, behind, earliest, past])
    small, large = (np.array(_blocks(bounds[2:], KEYS.value, rows)) for rows in (64, 128))
    longest = np.argsort(-small, kind="stable")
    table = np.concatenate([bounds.ravel(), longest, small[longest], large[longest]])
    return Intervals(bounds, tensor_on(device, table.astype(np.int32)))


@gluon.jit
def bound(table, i, count):
    """The bound of row i, or of the last of `count` rows if there is no row i."""
    return uniform(gl.load(table + gl.minimum(i, count - 1)))


@gluon.jit
def visible_interval(table, row, ROWS: gl.constexpr, sq, sk, BLOCK_N: gl.constexpr):
    """Blocks of keys [lo, hi) that the rows row .. row+ROWS-1 see; never empty."""
    lo = gl.minimum(bound(table, row, sq) // BLOCK_N, gl.cdiv(sk, BLOCK_N) - 1)
    return lo, gl.maximum(gl.cdiv(bound(table + sq, row + ROWS - 1, sq), BLOCK_N), lo + 1)


@gluon.jit
def clean_interval(table, row, ROWS: gl.constexpr, lo, hi, sq, BLOCK_N: gl.constexpr):
    """The blocks of [lo, hi) that need no mask, counted from the last one down: right <= i < left."""
    right = gl.maximum(hi - bound(table + sq, row, sq) // BLOCK_N, 0)
    return right, hi - gl.maximum(gl.cdiv(bound(table, row + ROWS - 1, sq), BLOCK_N), lo)


@gluon.jit
def keep_interval(s, table, row, key, sq):
    """Replace the scores [64, BLOCK_N] of rows row.. and keys key.. by minus infinity where a row does not look."""
    rows = row + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
    first = gl.load(table + rows, mask=rows < sq, other=0)
    behind = gl.load(table + sq + rows, mask=rows < sq, other=0)
    return keep_columns(s, first - key, behind - key, True)


# The backward pass: `sizes` is its `Sizes`, whose `back` is the table, and what sees is a key.


@gluon.jit
def block_of(sizes, n):
    """The n-th block of keys in the order of decreasing work."""
    return uniform(gl.load(sizes.back + 4 * sizes.sq + n))


@gluon.jit
def tiles_of_block(sizes, n):
    """How many tiles of queries see the n-th block of keys in that order."""
    row: gl.constexpr = 1 if sizes.PLAN.block_m == 64 else 2
    return uniform(gl.load(sizes.back + 4 * sizes.sq + row * gl.cdiv(sizes.sk, KEYS) + n))


@gluon.jit
def interval_tiles(sizes, key):
    """Tiles of queries [lo, hi) that see some of the keys key .. key + BLOCK_N - 1."""
    PLAN: gl.constexpr = sizes.PLAN
    return visible_interval(sizes.back + 2 * sizes.sq, key, PLAN.block_n, sizes.sk, sizes.sq, PLAN.block_m)


@gluon.jit
def clean_interval_tiles(sizes, key, ROWS: gl.constexpr):
    """Tiles of queries [first, end) of which each query sees all keys key .. key + ROWS - 1 that there are."""
    BLOCK_M: gl.constexpr = sizes.PLAN.block_m
    table = sizes.back + 2 * sizes.sq
    first = gl.cdiv(bound(table, key + ROWS - 1, sizes.sk), BLOCK_M)
    return first, bound(table + sizes.sq, key, sizes.sk) // BLOCK_M


@gluon.jit
def interval_columns(sizes, key, row, p):
    """The columns first <= j < behind of p [keys, queries], from keys key.. and queries row.. on, that see each key."""
    keys = key + gl.arange(0, p.shape[0], gl.SliceLayout(1, p.type.layout))
    table = sizes.back + 2 * sizes.sq + keys
    # Keys that do not exist were loaded as zeros; their probabilities could still be infinite.
    first = gl.load(table, mask=keys < sizes.sk, other=0) - row
    return first, gl.load(table + sizes.sq, mask=keys < sizes.sk, other=0) - row
