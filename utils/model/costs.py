"""The work of an operation, and the number of query-key pairs under a mask.

FLOPs count matrix products only: one multiply-accumulate (MAC) is 2 FLOPs. Bytes are the least traffic of an operation that
runs alone: it reads each operand once and writes each result once.
"""

from __future__ import annotations

from dataclasses import dataclass

from utils.validation import whole_numbers


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of an operation."""

    flops: int
    bytes: int


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
