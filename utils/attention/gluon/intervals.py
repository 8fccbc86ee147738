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

from utils.attention.gluon.shared import keep_columns, uniform, zero_columns
from utils.kernels.capture import tensor_on


@dataclass(frozen=True, eq=False)
class Intervals:
    """The bounds of all queries and keys.

    bounds: first, behind, earliest and past (4, S). table: the same on the GPU, int32.
    """

    bounds: np.ndarray
    table: torch.Tensor

    def key_blocks(self, rows: int, block_n: int) -> tuple[int, ...]:
        """Return how many blocks of keys each tile of queries sees."""
        return _blocks(*self.bounds[:2], rows, block_n)

    def query_tiles(self, block_m: int, block_n: int) -> tuple[int, ...]:
        """Return how many tiles of queries see each block of keys."""
        return _blocks(*self.bounds[2:], block_n, block_m)


def _blocks(first: np.ndarray, behind: np.ndarray, rows: int, block: int) -> tuple[int, ...]:
    begins = np.arange(0, len(first), rows)
    ends = np.minimum(begins + rows, len(first)) - 1
    return tuple((-(-behind[ends] // block) - first[begins] // block).tolist())


@functools.lru_cache(maxsize=64)
def packed_intervals(lengths: tuple[int, ...], causal: bool, window: int, device: torch.device) -> Intervals:
    """Return the bounds of sequences of these lengths, one behind the other; window 0: none."""
    ends = np.cumsum(lengths)
    first, behind = np.repeat(ends - lengths, lengths), np.repeat(ends, lengths)
    position = np.arange(ends[-1])
    if causal:
        behind = position + 1
    if window:
        first = np.maximum(first, position - window + 1)
        behind = np.minimum(behind, position + window)
    earliest, past = (np.searchsorted(bound, position, side="right") for bound in (behind, first))
    bounds = np.stack([first, behind, earliest, past])
    return Intervals(bounds, tensor_on(device, bounds.astype(np.int32)))


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
