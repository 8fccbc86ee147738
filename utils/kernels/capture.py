"""Copy numbers from the host while a CUDA graph is captured, at once and outside of the graph."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def tensor_on(device: torch.device, numbers: list) -> torch.Tensor:
    """Copy numbers to the device as int32, whether or not its current stream is being captured.

    A captured stream refuses the wait after such a copy, and a captured copy would read the host's memory at each replay,
    when it may be free. So during a capture the copy uses a new stream and is complete on return. The caller keeps the
    tensor as long as the graph may be replayed.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return torch.tensor(numbers, dtype=torch.int32, device=device)
    with _relaxed(), torch.cuda.stream(torch.cuda.Stream(device)):
        copied = torch.tensor(numbers, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()
    return copied


@contextlib.contextmanager
def _relaxed() -> Iterator[None]:
    """Let this thread allocate and wait during the capture of a stream, which CUDA forbids by default."""
    driver, mode = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(_RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # `mode` then holds the old mode
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
