"""What is raced: the shapes, the inputs of a call, drawn from its seed, and which rows of its output are read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FILE = "lab3_overlap.py"
CELL = "q5_3"
TILE_ROWS = 64  # queries of one consumer
ROWS_A_TILE = 2  # rows of each such tile that are read
SPECIAL_ROWS = 8  # of each head: half of them sharp, half with a needle
SHARP = 40.0  # factor of a sharp query: its scores reach 150, and exp(150) is above fp32's range
NEEDLE = 2.0  # a needle's key is this many times its query: it gets nearly all of the weight


@dataclass(frozen=True)
class Shape:
    """Attention of one batch in bf16, and the launch's tile and slots."""

    name: str  # for tables
    heads: int  # of one batch
    queries: int  # of a head
    keys: int  # of a head
    head_dim: int = 128
    block: int = 128  # keys of a block
    stages: int = 2  # slots of the rings

    @property
    def flops(self) -> float:
        """FLOPs of the two products."""
        return 4.0 * self.heads * self.queries * self.keys * self.head_dim

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs: one for each 128 queries of a head."""
        return math.ceil(self.queries / (2 * TILE_ROWS)), self.heads, 1

    @property
    def scale(self) -> float:
        """C of the kernel: log2(e) / sqrt(head_dim)."""
        return math.log2(math.e) / math.sqrt(self.head_dim)


# Timed: one that fits into no cache, and one whose tensors fit into the L2 of an H200 (60 MB). Both are multiples of the
# tile, so an untimed shape with a tail has to be right before: a kernel that leaves out its mask would win otherwise.
LONG = Shape("16384 keys", 16, 16384, 16384)
SHORT = Shape("2048 keys", 16, 2048, 2048)
TAIL = Shape("tail", 3, 200, 333)
TIMED = (LONG, SHORT)


def special_rows(shape: Shape, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (heads, rows, keys, which of them are sharp) of the rows that a shortcut would get wrong.

    A sharp query has scores whose exponentials overflow unless the largest is subtracted. A needle is a key that
    gets nearly all of one query's weight, so that whoever leaves it out has another result.
    """
    drawing = torch.Generator().manual_seed(seed)
    heads = torch.arange(shape.heads).repeat_interleave(SPECIAL_ROWS)
    # No row and no key twice: two assignments to one place have no order on a GPU, and judge and track would differ.
    rows, keys = (
        torch.cat([torch.randperm(size, generator=drawing)[:SPECIAL_ROWS] for _ in range(shape.heads)])
        for size in (shape.queries, shape.keys)
    )
    return heads, rows, keys, torch.arange(len(heads)) % 2 == 0


def draw_inputs(shape: Shape, seed: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw q, k, v (1, heads, S, D) in bf16: the same for the same seed on the same kind of device."""
    drawing = torch.Generator(device).manual_seed(seed)
    sizes = (shape.queries, shape.keys, shape.keys)
    q, k, v = (
        torch.randn(1, shape.heads, size, shape.head_dim, generator=drawing, device=device, dtype=torch.bfloat16)
        for size in sizes
    )
    heads, rows, keys, sharp = (x.to(device) for x in special_rows(shape, seed))
    factors = torch.where(sharp, SHARP, 1.0)[:, None]
    k[0, heads, keys] = torch.where(sharp[:, None], k[0, heads, keys], (q[0, heads, rows] * NEEDLE))
    q[0, heads, rows] = (q[0, heads, rows] * factors).to(q.dtype)
    return q, k, v


def rows_to_read(shape: Shape, seed: int, lot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (heads, rows) to read of a call's output: some of every tile by `lot`, and the special ones of its inputs by `seed`."""
    drawing = torch.Generator().manual_seed(lot)
    starts = torch.arange(0, shape.queries, TILE_ROWS)
    sizes = (shape.queries - starts).clamp(max=TILE_ROWS)
    draws = torch.rand(shape.heads, len(starts), ROWS_A_TILE, generator=drawing)
    rows = starts[None, :, None] + (draws * sizes[None, :, None]).long()
    heads = torch.arange(shape.heads)[:, None, None].expand_as(rows)
    special_heads, special, _, _ = special_rows(shape, seed)
    return torch.cat([heads.flatten(), special_heads]), torch.cat([rows.flatten(), special])


def reference_rows(
    shape: Shape, inputs: tuple[torch.Tensor, ...], heads: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Compute rows of attention in float64, (rows, D)."""
    q, k, v = inputs
    expected = torch.empty(len(rows), shape.head_dim, dtype=torch.float64, device=q.device)
    for head in range(shape.heads):
        chosen = heads == head
        scores = q[0, head, rows[chosen]].double() @ k[0, head].double().T / math.sqrt(shape.head_dim)
        expected[chosen] = torch.softmax(scores, -1) @ v[0, head].double()
    return expected
