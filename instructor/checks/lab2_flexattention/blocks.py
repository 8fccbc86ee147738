"""Part 3: counts of blocks, the speed-up that they promise, and attention that skips blocks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

from instructor.checks.common import Draw, expect_value
from instructor.checks.lab2_flexattention.common import PairCounter, attend_densely
from utils.attention.masks import dense_mask
from utils.checking import check, expect_close, expect_items, expect_rounded_once, poisoned_memory
from utils.checking.labs.lab2_flexattention.blocks import PROMISES, SKIPPING, expect_skipped, skipping_mistake


def _counts(mask: torch.Tensor, block: int, filler: bool = False) -> tuple[int, int, int]:
    """Return (full, partial, empty); `filler` is the value of pairs beyond the edges."""
    padded = F.pad(mask, (0, -mask.shape[1] % block, 0, -mask.shape[0] % block), value=filler)
    seen = padded.unfold(0, block, block).unfold(1, block, block).sum(dim=(2, 3))
    full, empty = int((seen == block * block).sum()), int((seen == 0).sum())
    return full, seen.numel() - full - empty, empty


@check("3.1", "Counting blocks", forbids=(), hint="count the pairs of each block")
def count_blocks(count_blocks, seed=None):
    """Check (full, partial, empty), also for blocks at the edges."""
    draw = Draw(seed)
    for block in (*(draw.size(3, 7) for _ in range(3)), draw.size(30, 40)):
        rows, columns = draw.sizes(2, 3, 6) if block < 30 else draw.sizes(2, 10, 14)
        s, length = rows * block - draw.size(1, block - 1), columns * block - draw.size(1, block - 1)
        mask = torch.ones(s, length, dtype=torch.bool).tril(draw.size(-2, 2 * block))
        mask[:, : block + 1] = False  # a column of empty blocks, and a column of partial ones
        mask[:block] = True
        whole = mask[: s // block * block, : length // block * block]
        full, partial, empty = expected = _counts(mask, block)
        what = f"count_blocks of a ({s}, {length}) mask in blocks of {block}"
        numbers = tuple(map(int, expect_items(count_blocks(mask, block), "full, partial, empty", what)))
        if numbers != expected:
            for hint, wrong in {
                "The blocks at the edges are left out.": _counts(whole, block),
                "A block that sticks out over the edge is not full: the kernel has to mask what is outside.": _count_full_edges(
                    mask, block
                ),
                "The order is (full, partial, empty).": (empty, partial, full),
                "A partial block is neither full nor empty.": (full, partial + full, empty),
                "A partial block has a visible pair; this counts masked ones.": _counts(~mask, block),
            }.items():
                if numbers == wrong:
                    raise AssertionError(f"{what} is {numbers}, expected {expected}. {hint}")
            raise AssertionError(f"{what} is {numbers}, expected {expected}.")


def _count_full_edges(mask: torch.Tensor, block: int) -> tuple[int, int, int]:
    """Count a block as full if all its existing pairs are visible."""
    tiles = [tile for band in mask.split(block) for tile in band.split(block, dim=1)]
    full, empty = sum(bool(tile.all()) for tile in tiles), sum(not tile.any() for tile in tiles)
    return full, len(tiles) - full - empty, empty


@check(**PROMISES)
def promises(block_flops, promised_speedup, document_blocks, seed=None):
    """Check the FLOPs of the computed blocks, the promised speed-up, and the blocks of packed documents."""
    draw = Draw(seed)
    for _ in range(3):
        full, partial, empty, block, batch, heads, head_dim = draw.sizes(7, 2, 60)
        counts, computed, many = (full, partial, empty), full + partial, batch * heads
        one = 4 * head_dim * block**2
        expect_value(
            block_flops(counts, block, batch, heads, head_dim),
            one * many * computed,
            "FLOPs",
            f"block_flops({counts}, {block}, {batch}, {heads}, {head_dim})",
            {
                "Partial blocks are computed as well, whole.": one * many * full,
                "Partial blocks are computed whole, not half.": one * many * (full + partial / 2),
                "Empty blocks are skipped.": one * many * (computed + empty),
                "A multiply-add is two FLOPs, and there are two products.": one // 2 * many * computed,
                "The counts are for one head of one sequence.": one * computed,
                "A block has block x block pairs.": one // block * many * computed,
            },
        )
        expect_value(
            promised_speedup(counts),
            (computed + empty) / computed,
            "",
            f"promised_speedup({counts})",
            {
                "Partial blocks are computed as well.": (computed + empty) / full,
                "This is the density; the speed-up is its inverse.": computed / (computed + empty),
                "Compare with all blocks, not with the empty ones.": empty / computed,
                "A partial block costs as much as a full one.": (computed + empty) / (full + partial / 2),
            },
        )
    for i in range(8):
        block = 2 ** draw.size(2, 6)
        length = block * 2 ** draw.size(3, 5)
        span = (
            (block // 2, block * 2, block * 4, block, block // 4)[i]
            if i < 5
            else 2 ** draw.size(1, int(math.log2(length)))
        )
        expected = (length // block) * max(1, span // block)
        expect_value(
            document_blocks(length, span, block),
            expected,
            "blocks",
            f"document_blocks({length}, {span}, {block})",
            {
                "Documents shorter than a block still need the block.": length * span / block**2,
                "A document of n blocks a side has n x n blocks, not n.": max(length // block, length // span),
                "A block that two documents share is computed once.": length // span * max(1, span // block) ** 2,
                "These are all blocks.": (length // block) ** 2,
                "Not causal: both halves count.": (length // max(span, block))
                * (max(1, span // block) * (max(1, span // block) + 1) // 2),
                "A block is square: divide by its side twice.": length * max(span, block) // block,
            },
        )


@check(**SKIPPING)
def block_sparse_attention(block_sparse_attention, seed=None):
    """Check attention along the tables of a BlockMask: output, products, evaluations of the mask, memory."""
    draw = Draw(seed)
    for block, dtype in ((8, torch.float32), ((4, 8), torch.bfloat16)):
        size_q, size_k = (block, block) if isinstance(block, int) else block
        batch, heads, head_dim = draw.size(1, 2), draw.size(2, 3), 16
        s, length = 8 * size_q, 6 * size_k
        shapes = [(batch, heads, tokens, head_dim) for tokens in (s, length, length)]
        q, k, v = (2 * draw.normal(*shape).to(dtype) for shape in shapes)
        cut, shift = draw.size(2, size_q - 1), draw.size(1, 3)
        ids = torch.arange(max(s, length)) // (2 * size_k + shift)

        def mod(b, h, q, k, ids=ids, cut=cut, s=s):
            return ((ids[q] == ids[k]) | (k < 2 * size_k)) & (k <= q + 3) & (q >= cut) & (q < s - size_q)  # noqa: B023

        mask = dense_mask(mod, s, length)
        counter = PairCounter(mod)
        block_mask = create_block_mask(counter, None, None, s, length, device="cpu", BLOCK_SIZE=block)
        counter.pairs = 0
        what = f"block_sparse_attention of ({batch}, {heads}, {s}, {head_dim}) over {length} keys, blocks of {block}"
        row = batch * heads * size_q * length
        # An operator may work on a row of blocks of scores, or on a whole q, k, v or output, as in `q / sqrt(D)`.
        limited = block_sparse_attention.with_limit(max(row, q.numel(), k.numel()))
        with poisoned_memory():
            got = limited(q, k, v, block_mask)
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        right = attend_densely(q, k, v, mask)
        hint = skipping_mistake(got, q, k, v, mask, block_mask)
        expect_close(got, right, **tolerance, what=what, hint=hint)
        expect_skipped(what, limited.watch, counter.pairs, block_mask, q, k)
    _expect_wide_inside(block_sparse_attention, draw)


def _expect_wide_inside(block_sparse_attention, draw: Draw) -> None:
    """Assert that the answer computes in float32 for bf16 inputs. Rounded scores or weights give a larger error."""
    s = 256
    q, k, v = (draw.normal(1, 2, s, 16, dtype=torch.bfloat16) for _ in range(3))
    block_mask = create_block_mask(lambda b, h, q, k: k <= q, None, None, s, s, device="cpu", BLOCK_SIZE=32)
    exact = attend_densely(q.double(), k.double(), v.double(), torch.ones(s, s, dtype=torch.bool).tril())
    got = block_sparse_attention(q, k, v, block_mask)
    what = f"block_sparse_attention of {s} tokens in bfloat16"
    expect_close(got, exact.to(q.dtype), rtol=0.1, atol=0.1, what=what)
    expect_rounded_once(got, exact, what, "scores, weights and sums")
