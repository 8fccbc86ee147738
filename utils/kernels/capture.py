"""Copies from the host while a CUDA graph is captured: they are made now, and are no part of the graph."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def tensor_on(device: torch.device, numbers: list) -> torch.Tensor:
    """Copy numbers to the device as int32, whether or not its current stream is being captured.

    A captured stream refuses the wait behind such a copy; and a copy that was captured would read ordinary memory of the
    host at each replay, when nobody keeps it. So there it goes over a stream of its own and is complete on return.
    Whoever launches a captured kernel on it keeps the tensor as long as the graph may be replayed.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return torch.tensor(numbers, dtype=torch.int32, device=device)
    with _relaxed(), torch.cuda.stream(torch.cuda.Stream(device)):
        copied = torch.tensor(numbers, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()
    return copied


@contextlib.contextmanager
def _relaxed() -> Iterator[None]:
    """Let this thread allocate and wait while another of its streams is captured, which CUDA forbids by default."""
    driver, mode = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(_RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # leaves the mode that was there in `mode`
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
