"""The launches of lab 3's kernels: a kernel's arguments by name, and the right outputs.

Inputs come from a function like torch.randn, so that the notebook and the grader draw different inputs. Two sizes
differ wherever equal sizes could hide a mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from utils import attention
from utils.checking.kernel_exercises import Launch, Tile, Try

Normal = Callable[..., torch.Tensor]  # standard normal values: normal(*shape, dtype=...)
# Attention in 16 bits differs from float64 by 2e-3 at most in these launches, and by 0.2% of large outputs.
CLOSE: dict[str, Any] = {"rtol": 1e-2, "atol": 5e-3}
Attention = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v (heads, S, D), expected output


def transpose_launch(m: int, n: int, normal: Normal = torch.randn, spare: int = 0) -> Try:
    """Return a launch on a random (m, n) matrix, and its transpose; there are `spare` elements between two rows."""
    x, y = normal(m, n + spare)[:, :n], torch.empty(n, m + spare)[:, :m]
    args = dict(x_ptr=x, y_ptr=y, m=m, n=n, x_stride=n + spare, y_stride=m + spare)
    grid = (math.ceil(m / 32), math.ceil(n / 32))
    return Launch("transpose", grid, args, outputs=("y_ptr",), file="lab3_transpose.py"), {"y_ptr": x.T}


def transpose_mistakes(launch: Launch, expected: dict) -> dict[str, torch.Tensor]:
    """Return {mistake: the transpose that this mistake gives}, with NaN where the kernel would write nothing."""
    args = launch.args
    x, y, (m, n) = args["x_ptr"], args["y_ptr"], args["x_ptr"].shape
    exchanged = torch.full_like(y, math.nan)
    exchanged[:m, :n] = x.T[:m, :n]
    return {
        "The mask of the store has m and n exchanged: rows are those of X, below m, and columns below n.": exchanged
    }


def async_copy_launch(n: int, tiles: int, stages: int, tile: int = 256, normal: Normal = torch.randn) -> Try:
    """Return a launch on n elements, and their sums; a program has `tiles` tiles of `tile` elements."""
    a, b = normal(n), normal(n)
    args = dict(a_ptr=a, b_ptr=b, c_ptr=torch.empty(n), n=n, TILE=tile, TILES=tiles, STAGES=stages)
    launch = Launch("add", (math.ceil(n / (tile * tiles)),), args, outputs=("c_ptr",), file="lab3_async_copy.py")
    return launch, {"c_ptr": a + b}


def tma_ring_launch(
    rows: int, columns: int, stages: int, dtype: torch.dtype = torch.float16, normal: Normal = torch.randn
) -> Try:
    """Return a launch on a random matrix, and the sums of squares of its rows."""
    x = normal(rows, columns, dtype=dtype)
    args = dict(x_desc=Tile(x, [16, 64]), y_ptr=torch.empty(rows), rows=rows, columns=columns, STAGES=stages)
    launch = Launch("sum_of_squares", (math.ceil(rows / 16),), args, outputs=("y_ptr",), file="lab3_tma_ring.py")
    return launch, {"y_ptr": x.double().square().sum(1)}


def ring_mistakes(launch: Launch, expected: dict) -> dict[str, torch.Tensor]:
    """Return {mistake: the sums of squares that this mistake gives}."""
    args = launch.args
    x, tile = args["x_desc"].tensor.double(), 64
    columns, stages = x.shape[1], args["STAGES"]
    tiles = math.ceil(columns / tile)
    piece = [x[:, i * tile : (i + 1) * tile].square().sum(1) for i in range(tiles)]
    right = expected["y_ptr"]
    turned = torch.cat([x[:16, row : row + tile].square().sum(1) for row in range(0, len(x), 16)])[: len(x)]

    def sum_from(start: Callable[[int], int]) -> torch.Tensor:
        """Return the sums of tiles whose copies begin at these columns."""
        return torch.stack([x[:, start(i) : start(i) + tile].square().sum(1) for i in range(tiles)]).sum(0)

    elements = "row and column count elements."
    return {
        "The last tile is left out.": right - piece[-1],
        "Only the first tiles are added, as many as there are slots: is a slot refilled?": torch.stack(
            piece[:stages]
        ).sum(0),
        "Every tile is the first one: which column does a refill begin at?": tiles * piece[0],
        "The last tile alone is in the sum: add to `total`.": piece[-1],
        "This is the sum of x, not of x * x.": x.sum(1),
        "The coordinates of a copy are [row, column], in this order.": right - sum(piece[:stages]) + turned,
        f"The copies begin at the tile's number: {elements}": sum_from(lambda i: i),
        f"The refills begin at the tile's number: {elements}": sum_from(lambda i: i * tile if i < stages else i),
    }


def repair_launch(stages: int, tiles: int = 6, normal: Normal = torch.randn) -> Try:
    """Return a launch of the ring to repair, and the right output."""
    x = normal(16, 32 * tiles)
    tile, out = Tile(x, [16, 32]), Tile(torch.empty_like(x), [16, 32])
    args = dict(x_desc=tile, y_desc=out, tiles=tiles, factor=2.5, STAGES=stages)
    return Launch("scale", (1,), args, outputs=("y_desc",), file="lab3_broken.py"), {"y_desc": 2.5 * x}


def wgmma_launch(
    m: int,
    n: int,
    k: int,
    block_n: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    normal: Normal = torch.randn,
    block_m: int = 64,
    file: str = "lab3_wgmma.py",
) -> Try:
    """Return a launch on random matrices A (m, k) and B (n, k), and the product of A and B transposed."""
    a, b = normal(m, k, dtype=dtype), normal(n, k, dtype=dtype)
    c = torch.empty(m, n, dtype=dtype)
    args = dict(
        a_desc=Tile(a, [block_m, 64]), b_desc=Tile(b, [block_n, 64]), c_desc=Tile(c, [block_m, block_n]), k_size=k
    )
    launch = Launch("matmul", (math.ceil(m / block_m), math.ceil(n / block_n)), args, ("c_desc",), file=file)
    return launch, {"c_desc": a.double() @ b.double().T}


tcgen05_launch = partial(wgmma_launch, block_m=128, file="lab3_tcgen05.py")  # tensor memory has 128 lanes


def cancelling(normal: Normal = torch.randn) -> Normal:
    """Return a function that draws A, then B. The first 64 products are above 100,000, and the next 64 cancel them."""
    signs = iter((1.0, -1.0))

    def draw(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
        large = 32.0 * 2.0 ** (normal(rows, 64) > 0)
        return torch.cat([large, next(signs) * large, normal(rows, k - 128)], dim=1).to(dtype)

    return draw


def wgmma_mistakes(launch: Launch, expected: dict) -> dict[str, torch.Tensor]:
    """Return {mistake: the product that this mistake gives}."""
    args = launch.args
    a, b = (args[name].tensor.double() for name in ("a_desc", "b_desc"))
    last = (a.shape[1] - 1) // 64 * 64
    c, (rows, columns) = expected["c_desc"], args["c_desc"].block
    misplaced = torch.full_like(c, math.nan)
    for row, column in ((i, j) for i in range(0, c.shape[0], rows) for j in range(0, c.shape[1], columns)):
        target = misplaced[column : column + rows, row : row + columns]
        tile = F.pad(c[row : row + rows, column : column + columns], (0, columns, 0, rows))
        target.copy_(tile[: target.shape[0], : target.shape[1]])
    return {
        "A tile of C leaves to [column, row]: the coordinates are [row, column].": misplaced,
        "Only the last step along K is in the result: each product must add to the accumulator.": a[:, last:]
        @ b[:, last:].T,
    }


# ---- attention ----------------------------------------------------------------------------------------------------


def with_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> Attention:
    """Return q, k, v (heads, S, D) in a dtype, and attention over them in float64."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    return q, k, v, attention.reference(q[None], k[None], v[None])[0][0]


def attention_inputs(
    heads: int,
    sq: int,
    sk: int,
    d: int = 64,
    sharp: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
    normal: Normal = torch.randn,
) -> Attention:
    """Return random q, k, v (heads, S, D), and attention over them in float64; `sharp` multiplies the scores."""
    q, k, v = (normal(heads, length, d) for length in (sq, sk, sk))
    return with_reference(q * sharp, k, v, dtype)


def edge_inputs(
    sq: int, sk: int, d: int = 64, dtype: torch.dtype = torch.bfloat16, normal: Normal = torch.randn
) -> Attention:
    """Return inputs of three heads for which a wrong edge of the mask changes the result by more than a rounding.

    In head 0 all scores are far below zero: a key beyond the edge, with score zero, would have almost all the weight.
    In head 1 the last key has the highest score, so the result changes without this key. Head 2 is random, and the
    scores of the first block are the highest: then a sum or an output with a wrong factor shows.
    """
    q, k, v = (normal(3, length, d) for length in (sq, sk, sk))
    q[:2], k[:2] = q[:2].abs(), -k[:2].abs() * 0.5
    k[1, -1] = 1.0
    k[2, :1] *= 2.0
    return with_reference(q, k, v, dtype)


def falling_inputs(upward: bool, normal: Normal = torch.randn) -> Attention:
    """Return two heads with 128 keys. One block has scores far above zero, the other block has scores far below."""
    q, k, v = (normal(2, length, 64) for length in (64, 128, 128))
    q, k = q.abs(), k.abs()
    k[:, slice(0, 64) if upward else slice(64, 128)] *= -40
    return with_reference(q, k, v, torch.bfloat16)


def tile(x: torch.Tensor, rows: int) -> Tile:
    """Return x as TMA sees it: tiles of `rows` rows of the last two dimensions."""
    return Tile(x, [1] * (x.dim() - 2) + [rows, x.shape[-1]])


def exponent_scale(d: int) -> float:
    """Return c, the factor of a score in the exponent of 2: log2(e) / sqrt(d)."""
    return math.log2(math.e) / math.sqrt(d)


def attention_launch(file: str, rows: int, q, k, v, expected, keys: int = 64, **constants) -> Try:
    """Return a launch of `attention`. A program computes `rows` queries of a head, in blocks of `keys` keys."""
    out = torch.empty_like(q)
    args = dict(q_desc=tile(q, 64), k_desc=tile(k, keys), v_desc=tile(v, keys), o_desc=tile(out, 64), sk=k.shape[1])
    args |= dict(c=exponent_scale(q.shape[-1]), **constants)
    grid = (math.ceil(q.shape[1] / rows), q.shape[0])
    return Launch("attention", grid, args, outputs=("o_desc",), file=file), {"o_desc": expected}


def overlap_launch(
    q, k, v, expected, stages: int = 2, block_n: int = 64, block_m: int = 64, file: str = "lab3_overlap.py"
) -> Try:
    """Return a launch on q, k, v (heads, S, D). A program computes two tiles of `block_m` queries of a head."""
    q, k, v, expected = (x[None] for x in (q, k, v, expected))
    heads, sq = q.shape[1:3]
    args: dict[str, Any] = dict(q_desc=tile(q, block_m), k_desc=tile(k, block_n), v_desc=tile(v, block_n))
    args |= dict(o_desc=tile(torch.empty_like(q), block_m), sq=sq, sk=k.shape[2], heads=heads)
    args |= dict(c=exponent_scale(q.shape[-1]), STAGES=stages)
    launch = Launch("attention", (math.ceil(sq / (2 * block_m)), heads), args, outputs=("o_desc",), file=file)
    return launch, {"o_desc": expected}


two_softmax_launch = partial(overlap_launch, block_n=128, block_m=128, file="lab3_two_softmax.py")
