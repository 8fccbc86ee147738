"""Tables for packed sequences: where each tile of rows begins and ends, and which interval of columns each row sees.

A query sees an interval of keys. Under every mask, the bounds of this interval only rise from query to query. So an
interval of queries sees each key, and its bounds rise, too. In the forward pass rows are queries and columns are keys;
in the backward pass rows are keys and columns are queries. Both passes read the same kind of table:

    low, high    row i sees the columns low[i] <= j < high[i]; each array has S numbers
    tiles        four numbers for each tile of rows: its first row, the end of its rows, and two more

In the backward pass, the last two numbers are the blocks of columns [lo, hi) that the tile's rows see. In the forward
pass, they are the first key that the tile's first row sees, where block 0 begins, and the number of blocks.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.shared import uniform
from utils.kernels.capture import tensor_on


class PackedTable(NamedTuple):
    """A table on the GPU in int32, and the number of blocks of columns that each tile of rows sees."""

    table: torch.Tensor
    blocks: tuple[int, ...]


def packed_bounds(lengths: tuple[int, ...], causal: bool, window: int) -> np.ndarray:
    """Return low and high of queries, and low and high of keys, as an array (4, S). window: 0 means no window."""
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
    """Read one of a tile's four numbers: its first row (0), the end of its rows (1), and the last two numbers (2, 3)."""
    return uniform(gl.load(table + 2 * rows + 4 * tile + WHICH))


@gluon.jit
def visible_interval(table, row, ROWS: gl.constexpr, stop, rows, BLOCK: gl.constexpr, base):
    """Return the blocks [lo, hi) that the rows row .. row+ROWS-1 see. Blocks begin at column `base`; the tile's rows end at `stop`."""
    low = uniform(gl.load(table + gl.minimum(row, stop - 1)))
    high = uniform(gl.load(table + (rows + gl.minimum(row + ROWS, stop) - 1)))
    return (low - base) // BLOCK, gl.cdiv(high - base, BLOCK)


@gluon.jit
def clean_interval(table, row, ROWS: gl.constexpr, stop, rows, BLOCK: gl.constexpr, base=0):
    """Return the blocks [first, end) that each of these rows sees whole; none if first >= end. Blocks begin at column `base`."""
    low = uniform(gl.load(table + (gl.minimum(row + ROWS, stop) - 1)))
    high = uniform(gl.load(table + rows + gl.minimum(row, stop - 1)))
    return gl.cdiv(low - base, BLOCK), (high - base) // BLOCK


@gluon.jit
def row_bounds(table, at, stop, rows):
    """Return low and high of the rows `at`. For rows from `stop` on both are 0: these rows see nothing."""
    exists = at < stop
    return gl.load(table + at, mask=exists, other=0), gl.load(table + rows + at, mask=exists, other=0)
