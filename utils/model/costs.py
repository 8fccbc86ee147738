"""FLOPs and bytes of the course's operations, by formula.

FLOPs are those of matrix products: one multiply-accumulate (MAC) is 2 FLOPs. Norms, GELU, softmax and rotary embedding
have bytes and no FLOPs. Attention counts only the query-key pairs that its mask lets through.

Bytes are the least that an operation moves when it runs alone: each operand is read once, each result is written once.
Attention is one fused operation that never stores its scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from utils.validation import whole_numbers

if TYPE_CHECKING:
    from transformers import Gemma3TextConfig


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of an operation; `sum()` adds costs up."""

    flops: int
    bytes: int

    @property
    def macs(self) -> int:
        """Multiply-accumulates, 2 FLOPs each."""
        return self.flops // 2

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOPs/Byte."""
        return self.flops / self.bytes

    def __add__(self, other: Cost) -> Cost:
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __radd__(self, start: int) -> Cost:
        return self if start == 0 else NotImplemented  # sum() starts from 0


def gemm(m: int, n: int, k: int, dtype: torch.dtype) -> Cost:
    """Return the cost of (M, K) @ (K, N)."""
    whole_numbers(m=m, n=n, k=k)
    return Cost(2 * m * n * k, (m * k + k * n + m * n) * dtype.itemsize)


def gemv(m: int, k: int, dtype: torch.dtype) -> Cost:
    """Return the cost of (M, K) @ (K,)."""
    return gemm(m, 1, k, dtype)


def elementwise(elements: int, reads: int, dtype: torch.dtype) -> Cost:
    """Return the cost of reading `reads` tensors of `elements` numbers and writing one; no matrix product."""
    whole_numbers(elements=elements, reads=reads)
    return Cost(0, elements * (reads + 1) * dtype.itemsize)


def rms_norm(rows: int, size: int, dtype: torch.dtype) -> Cost:
    """Return the cost of RMSNorm of (rows, size) with a weight (size,): one read, one write."""
    return Cost(0, (2 * rows * size + size) * dtype.itemsize)


def attended_pairs(sq: int, sk: int, causal: bool = False, window: int | None = None) -> int:
    """Count the query-key pairs that the mask lets through; the queries are the last `sq` of `sk` positions.

    With a window of w a query sees itself and the w - 1 positions before it.
    """
    whole_numbers(sq=sq, sk=sk)
    if not causal:
        if window is not None:
            raise ValueError(f"window is {window} and causal is False; a sliding window needs causal=True")
        return sq * sk
    if sq > sk:
        raise ValueError(f"causal attention of {sq} queries over {sk} keys: the first queries see nothing")
    window = sk if window is None else window
    whole_numbers(window=window)
    # Query number i (from 0) sees min(window, sk - sq + 1 + i) keys.
    growing = min(max(window - (sk - sq + 1), 0), sq)
    return growing * (sk - sq + 1) + growing * (growing - 1) // 2 + (sq - growing) * min(window, sk)


def attention(
    b: int, h: int, hkv: int, sq: int, sk: int, d: int, dtype: torch.dtype, causal=False, window: int | None = None
) -> Cost:
    """Return the cost of fused attention, forward: q and out (B, H, Sq, D), k and v (B, Hkv, Sk, D)."""
    whole_numbers(b=b, h=h, hkv=hkv, d=d)
    pairs = attended_pairs(sq, sk, causal, window)
    keys_seen = sk if window is None else min(sk, sq + window - 1)
    return Cost(4 * b * h * d * pairs, 2 * b * d * (h * sq + hkv * keys_seen) * dtype.itemsize)


def decoder_layer(
    config: Gemma3TextConfig,
    batch: int,
    tokens: int,
    past: int = 0,
    layer_type: str = "full_attention",
    dtype: torch.dtype = torch.bfloat16,
    cached: bool = True,
) -> dict[str, Cost]:
    """Return the cost of each part of one Gemma-3 decoder layer, forward; `sum(costs.values())` is the whole layer.

    Args:
        config: the model's sizes.
        batch: number of sequences.
        tokens: new tokens of each sequence: the length of the prompt in prefill, 1 in decode.
        past: tokens already in the KV cache: 0 in prefill.
        layer_type: "sliding_attention" (within `config.sliding_window`) or "full_attention".
        dtype: of weights and activations.
        cached: whether new keys and values are copied into a cache.
    """
    if layer_type not in ("sliding_attention", "full_attention"):
        raise ValueError(f"layer_type is {layer_type!r}; allowed: sliding_attention, full_attention")
    window = config.sliding_window if layer_type == "sliding_attention" else None
    hidden, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    h, hkv = config.num_attention_heads, config.num_key_value_heads
    rows = batch * tokens
    parts = {
        "norms": sum((rms_norm(rows, hidden, dtype) for _ in range(4)), Cost(0, 0)),
        "q_proj": gemm(rows, h * d, hidden, dtype),
        "k_proj": gemm(rows, hkv * d, hidden, dtype),
        "v_proj": gemm(rows, hkv * d, hidden, dtype),
        "qk_norm": rms_norm(rows * h, d, dtype) + rms_norm(rows * hkv, d, dtype),
        # q and k are read and written; one cos and one sin for each position is read
        "rotary": elementwise(rows * (h + hkv) * d, 1, dtype) + Cost(0, 2 * tokens * d * dtype.itemsize),
        "attention": attention(batch, h, hkv, tokens, past + tokens, d, dtype, causal=True, window=window),
        "o_proj": gemm(rows, hidden, h * d, dtype),
        "gate_proj": gemm(rows, inner, hidden, dtype),
        "up_proj": gemm(rows, inner, hidden, dtype),
        # gelu(gate), then times up
        "activation": elementwise(rows * inner, 1, dtype) + elementwise(rows * inner, 2, dtype),
        "down_proj": gemm(rows, hidden, inner, dtype),
        "residuals": elementwise(2 * rows * hidden, 2, dtype),
    }
    if cached:
        parts["cache_write"] = elementwise(2 * rows * hkv * d, 1, dtype)
    return parts
