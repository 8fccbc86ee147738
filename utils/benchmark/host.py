"""The time that a call takes the host: from the call to its return, while the GPU's queue is never full.

A call on a GPU returns when its kernels are queued. Where the GPU needs longer than the host, the host's time is
hidden; where it needs less, as for a few tokens, the host's time is what a caller waits for. `measure` gives the
device's time; this gives the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from utils.benchmark.cpu_timer import collector_paused
from utils.validation import whole_number

QUEUED = 20  # calls between two waits for the GPU: far below the thousand launches that a queue holds


def host_time_us(call: Callable[[], object], *, warmup: int = 20, calls: int = 400) -> float:
    """Return the median host time of a call in microseconds.

    Args:
        call: the function; its results are dropped.
        warmup: calls before, not timed.
        calls: calls that are timed, each by itself.
    """
    whole_number("warmup", warmup, 0)
    whole_number("calls", calls)
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(warmup):
        call()
    times_ns = []
    with collector_paused():
        for i in range(calls):
            if i % QUEUED == 0:
                synchronize()
            began = time.perf_counter_ns()
            call()
            times_ns.append(time.perf_counter_ns() - began)
    synchronize()
    return statistics.median(times_ns) / 1e3
