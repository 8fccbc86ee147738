"""labs/host_time: the host time of a call next to its device time, for torch's SDPA and for the course's `attention`.

As in every target, the times of the two sides are device times. The host time of the same call, from the call to its
return while the GPU's queue is never full, is a fact of each side, and a note says which of the two a caller waits for:
where the GPU needs longer than the host, the host's time is hidden.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from utils.attention import BACKENDS, AttentionUnsupported, attention, find_backend, last_run
from utils.bench.errors import Refused
from utils.bench.knobs import Knob
from utils.bench.targets.attention import CAUSAL, AttentionTarget, shape_knobs
from utils.bench.targets.base import Built
from utils.benchmark.cpu_timer import collector_paused
from utils.benchmark.measuring import measure

QUEUED = 20  # calls between two waits for the GPU: far below the thousand launches that a queue holds
ROUNDS, CALLS, WARMUP = 5, 100, 20


def host_time_us(call: Callable[[], object]) -> float:
    """Return the host time of a call in microseconds: the smallest median of the rounds, which other work lengthens."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(WARMUP):
        call()
    medians = []
    with collector_paused():
        for _ in range(ROUNDS):
            times_ns = []
            for i in range(CALLS // ROUNDS):
                if i % QUEUED == 0:
                    synchronize()
                began = time.perf_counter_ns()
                call()
                times_ns.append(time.perf_counter_ns() - began)
            medians.append(statistics.median(times_ns) / 1e3)
    synchronize()
    return min(medians)


class HostTime(AttentionTarget):
    """One call of torch's SDPA against one call of `attention`: both as a user would write them."""

    chapter, workload = "labs/host_time", "attention_call"
    summary = "host time and device time of one call: torch's SDPA, and attention(backend=...)"
    sides: Mapping[str, str] = {
        "baseline": "F.scaled_dot_product_attention",
        "optimized": "attention(q, k, v, backend=--provider)",
    }
    knobs = (
        *shape_knobs(cpu=(1, 2, 64, 64, "fp32"), gpu=(1, 16, 512, 128, "bf16")),
        CAUSAL,
        Knob("provider", "backend behind the door", "auto", "auto", choices=("auto", *BACKENDS)),
    )

    def backend(self, case, side):
        """Return the name of a side's backend."""
        return "auto" if side == "baseline" else case.value("provider")

    def build(self, case, side, q, k, v):
        """Return the plain call; it has run once, so that everything is compiled and decided."""
        arguments = case.workload.attention_arguments
        if side == "baseline":
            causal = arguments.get("causal", False)
            return Built(
                lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), "auto", "torch's own choice"
            )
        name = case.value("provider")

        def call() -> torch.Tensor:
            return attention(q, k, v, backend=name, **arguments)

        try:
            call()
        except AttentionUnsupported as error:
            raise Refused(str(error)) from None
        ran = last_run().backend
        return Built(call, ran, find_backend(ran).implementation())

    def facts(self, case, side, built):
        """Return the host's time and the device's, and a note that says which one a caller waits for."""
        host_us = host_time_us(built.fn)
        if case.device.type == "cpu":
            return {
                "host_us": host_us,
                "notes": [f"{side}: {host_us:.0f} us from call to return; the CPU is host and device."],
            }
        device_us = 1e3 * measure(built.fn, warmup=5, iterations=20, floor=False).median_ms
        longer = "host" if host_us > device_us else "device"
        note = f"{side}: the host takes {host_us:.0f} us a call and the device {device_us:.0f} us: the {longer} sets the pace."
        return {"host_us": host_us, "device_us": device_us, "notes": [note]}


TARGETS = (HostTime(),)
