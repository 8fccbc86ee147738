"""Part 1: attention with a mask in memory, and its cost."""

from __future__ import annotations

import math

from instructor.checks.common import DTYPES, Draw, dtype_name, expect_counts
from instructor.checks.lab2_flexattention.common import attend_densely
from utils.checking import FUSED_ATTENTION, check, expect_close
from utils.checking.labs.lab2_flexattention.masks import masking_mistake


@check("1.1", "Attention under a mask", forbids=FUSED_ATTENTION, hint="write product, mask, softmax, product yourself")
def masked_attention(masked_attention, seed=None):
    """Check softmax(q k^T / sqrt(D) where mask) v, without a fused operator."""
    draw = Draw(seed)
    for large in (False, False, True):
        b, h, s, length, d = draw.sizes(5, 2, 20)
        d = 128 if large else d  # as in models
        q = draw.normal(b, h, s, d)
        k, v = (draw.normal(b, h, length, d) for _ in range(2))
        mask = draw.normal(s, length) > 0
        mask[:, 0] = True
        got = masked_attention(q, k, v, mask)
        what = f"masked_attention of ({b}, {h}, {s}, {d}) over {length} keys"
        right = attend_densely(q, k, v, mask)
        expect_close(got, right, rtol=1e-4, atol=1e-5, what=what, hint=masking_mistake(got, q, k, v, mask))
    mask[draw.size(0, s - 1)] = False
    got = masked_attention(q, k, v, mask)
    right, what = attend_densely(q, k, v, mask), "masked_attention with a query that sees no key"
    expect_close(got, right, rtol=1e-4, atol=1e-5, what=what, hint=masking_mistake(got, q, k, v, mask))


@check("1.2", "Costs of a mask")
def mask_costs(mask_costs, seed=None):
    """Check (density, wasted FLOPs, bytes of the mask)."""
    draw = Draw(seed)
    for dtype in DTYPES[:3]:
        s, length, batch, heads, head_dim = draw.sizes(5, 9, 40)  # no size equals the size of a dtype
        mask = draw.normal(s, length) > 0.5
        seen, total, size = int(mask.sum()), s * length, dtype.itemsize
        lost, many = total - seen, batch * heads
        expected = seen / total, 4 * head_dim * many * lost, many * total * size
        expect_counts(
            mask_costs(mask, batch, heads, head_dim, dtype),
            expected,
            ("", "FLOPs", "bytes"),
            f"mask_costs of ({s}, {length}), batch {batch}, {heads} heads, D {head_dim}, {dtype_name(dtype)}",
            {
                "This is the masked share.": (lost / total, 4 * head_dim * many * seen, many * seen * size),
                "A multiply-add is two FLOPs.": (math.nan, 2 * head_dim * many * lost, math.nan),
                "Each head of each sequence computes its own pairs.": (math.nan, 4 * head_dim * lost, total * size),
                "Each sequence of the batch counts.": (math.nan, 4 * head_dim * heads * lost, heads * total * size),
                "Both products count, 2 D FLOPs a pair each.": (math.nan, 2 * head_dim * many * lost, math.nan),
                "A truth value takes one byte; fused kernels take the mask as numbers of the dtype of q.": (
                    math.nan,
                    math.nan,
                    many * total,
                ),
                "These are all FLOPs, not the wasted ones.": (math.nan, 4 * head_dim * many * total, math.nan),
            },
        )
