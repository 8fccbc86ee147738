"""Memory that a kernel needs for one launch only: partial sums of programs that share a tile, and counters of arrivals."""

from __future__ import annotations

import torch

_counters: dict[tuple[int, int], torch.Tensor] = {}  # zeros, by device and stream


def workspace(like: torch.Tensor, partial_sums: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for partial sums, and counters that are zero, as the kernel leaves them.

    Launches of one stream run one after another and share their counters. A captured graph may be replayed on any
    stream, so it gets counters of its own.

    Args:
        like: a tensor on the device.
        partial_sums: fp32 numbers.
        counters: int32 numbers.
    """
    sums = torch.empty(partial_sums, dtype=torch.float32, device=like.device)
    if not like.is_cuda or torch.cuda.is_current_stream_capturing():
        return sums, torch.zeros(counters, dtype=torch.int32, device=like.device)
    key = like.device.index, torch._C._cuda_getCurrentRawStream(like.device.index)
    zeros = _counters.get(key)
    if zeros is None or len(zeros) < counters:
        zeros = _counters[key] = torch.zeros(max(1024, counters), dtype=torch.int32, device=like.device)
    return sums, zeros
