"""Packed sequences in the kernels: tables of tiles, which begin where a sequence begins, and of what each row sees.

A query sees an interval of keys, and its bounds only rise from query to query, whether the mask is causal or has a window
or not; so each key is seen by an interval of queries whose bounds rise, too. The forward pass has tiles of queries (rows)
over blocks of keys (columns), the backward pass blocks of keys over tiles of queries, and both read the same kind of table:

    low, high    row i sees the columns low[i] <= j < high[i]: S numbers each
    tiles        for each tile of rows: its first row, the end of its rows, and two numbers more

In the backward pass these are the blocks of columns [lo, hi) that the rows see. In the forward pass blocks are counted from the
first key that the tile's first row sees, so that it sees the first block whole: that key, and how many blocks there are.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.shared import keep_columns, uniform
from utils.kernels.capture import tensor_on


class PackedTable(NamedTuple):
    """A table on the GPU, int32, and how many blocks of columns each tile of rows sees."""

    table: torch.Tensor
    blocks: tuple[int, ...]


def packed_bounds(lengths: tuple[int, ...], causal: bool, window: int) -> np.ndarray:
    """Return low and high of queries, and low and high of keys (4, S); window 0: none."""
    ends: np.ndarray = np.cumsum(lengths)
    low: np.ndarray = np.repeat(ends - lengths, lengths)
    high: np.ndarray = np.repeat(ends, lengths)
    position = np.arange(ends[-1])
    if causal:
        high = position + 1
    if window:
        low = np.maximum(low, position - window + 1)
        high = np.minimum(high, position + window)
    return np.stack([low, high, *(np.searchsorted(bound, position, side="right") for bound in (high, low))])


@functools.lru_cache(maxsize=512)
def _packed_table(
    lengths: tuple[int, ...], causal: bool, window: int, rows: int, block: int, device: torch.device, forward: bool
) -> PackedTable:
    """Return the table of one pass: tiles of `rows` rows over blocks of `block` columns."""
    bounds = packed_bounds(lengths, causal, window)
    bounds = bounds[:2] if forward else bounds[2:]
    ends: np.ndarray = np.cumsum(lengths)
    starts = np.concatenate([np.arange(end - n, end, rows) for end, n in zip(ends, lengths, strict=True)])
    stops = np.minimum(starts + rows, np.repeat(ends, [-(-n // rows) for n in lengths]))
    low, high = bounds[0][starts], bounds[1][stops - 1]
    if forward:
        blocks = -(-(high - low) // block)
        tiles = np.stack([starts, stops, low, blocks], 1)
    else:
        lo, hi = low // block, -(-high // block)
        order = np.argsort(lo - hi, kind="stable")
        tiles, blocks = np.stack([starts, stops, lo, hi], 1)[order], (hi - lo)[order]
    table = np.concatenate([bounds.ravel(), tiles.ravel()]).astype(np.int32)
    return PackedTable(tensor_on(device, table), tuple(blocks.tolist()))


# Tiles of queries over blocks of keys, in the order of the rows.
packed_queries = functools.partial(_packed_table, forward=True)
# Tiles of keys over blocks of queries; the tile with the most blocks comes first.
packed_keys = functools.partial(_packed_table, forward=False)


@gluon.jit
def tile_entry(table, tile, rows, WHICH: gl.constexpr):
    """Of a tile, its first row (0), the end of its rows (1), or one of the numbers behind them (2, 3)."""
    return uniform(gl.load(table + 2 * rows + 4 * tile + WHICH))


@gluon.jit
def visible_interval(table, row, ROWS: gl.constexpr, stop, rows, BLOCK: gl.constexpr, base):
    """Blocks [lo, hi), from column `base` on, that the rows row .. row+ROWS-1 of a tile see whose rows end at `stop`."""
    low = uniform(gl.load(table + gl.minimum(row, stop - 1)))
    high = uniform(gl.load(table + (rows + gl.minimum(row + ROWS, stop) - 1)))
    return (low - base) // BLOCK, gl.cdiv(high - base, BLOCK)


@gluon.jit
def clean_interval(table, row, ROWS: gl.constexpr, stop, rows, BLOCK: gl.constexpr, base=0):
    """Blocks [first, end), from column `base` on, that all of these rows see whole: first may be behind end."""
    low = uniform(gl.load(table + (gl.minimum(row + ROWS, stop) - 1)))
    high = uniform(gl.load(table + rows + gl.minimum(row, stop - 1)))
    return gl.cdiv(low - base, BLOCK), (high - base) // BLOCK


@gluon.jit
def row_bounds(table, at, stop, rows):
    """Low and high of the rows `at`, and 0 of those from `stop` on: they see nothing."""
    exists = at < stop
    return gl.load(table + at, mask=exists, other=0), gl.load(table + rows + at, mask=exists, other=0)


@gluon.jit
def keep_interval(s, table, row, key, rows):
    """Replace the scores [64, BLOCK_N] of rows row.. and keys key.. by minus infinity where a row does not look."""
    low, high = row_bounds(table, row + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout)), rows, rows)
    return keep_columns(s, low - key, high - key)
