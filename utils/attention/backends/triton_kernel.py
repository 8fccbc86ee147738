"""The Triton kernel of the backend "triton"; triton.py describes it. Importing this file imports Triton."""

import triton
import triton.language as tl


@triton.jit
def flash_forward_kernel(
    q,
    k,
    v,
    out,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    sq,
    sk,
    head_dim,
    heads,
    group,
    window,
    c,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute BLOCK_M rows of one head in one pass over the keys, with a running maximum m and a running sum."""
    q_b, q_h, q_s, q_d = q_strides
    k_b, k_h, k_s, k_d = k_strides
    v_b, v_h, v_s, v_d = v_strides
    o_b, o_h, o_s, o_d = o_strides
    row = tl.program_id(0) * BLOCK_M
    # A row or a head times its stride can exceed 32 bits.
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    rows = row + tl.arange(0, BLOCK_M)
    far_rows = rows[:, None].to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    position = rows + sk - sq
    q_tile = tl.load(
        q + b * q_b + h * q_h + far_rows * q_s + d[None, :] * q_d,
        mask=(rows[:, None] < sq) & (d[None, :] < head_dim),
        other=0.0,
    )
    k_base = k + b * k_b + (h // group) * k_h
    v_base = v + b * v_b + (h // group) * v_h

    first = 0
    last = sk
    if CAUSAL:
        last = tl.minimum(sk, tl.maximum(row + BLOCK_M + sk - sq, 0))
    elif WINDOW:
        last = tl.minimum(sk, tl.maximum(row + BLOCK_M - 1 + sk - sq + window, 0))
    if WINDOW:
        first = tl.maximum(row + sk - sq - window + 1, 0) // BLOCK_N * BLOCK_N

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for key in range(first, last, BLOCK_N):
        keys = key + tl.arange(0, BLOCK_N)
        inside = (keys[:, None] < sk) & (d[None, :] < head_dim)
        far_keys = keys[:, None].to(tl.int64)
        k_tile = tl.load(k_base + far_keys * k_s + d[None, :] * k_d, mask=inside, other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * c
        keep = keys[None, :] < sk
        if CAUSAL:
            keep = keep & (keys[None, :] <= position[:, None])
        if WINDOW:
            keep = keep & (keys[None, :] > position[:, None] - window)
            if not CAUSAL:
                keep = keep & (keys[None, :] < position[:, None] + window)
        s = tl.where(keep, s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(s - shift[:, None])
        alpha = tl.exp2(m - shift)
        total = total * alpha + tl.sum(p, 1)
        v_tile = tl.load(v_base + far_keys * v_s + d[None, :] * v_d, mask=inside, other=0.0)
        acc = acc * alpha[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        m = top
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + b * o_b + h * o_h + far_rows * o_s + d[None, :] * o_d,
        acc.to(out.dtype.element_ty),
        mask=(rows[:, None] < sq) & (d[None, :] < head_dim),
    )
