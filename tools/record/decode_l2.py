"""Time decode after a flush that leaves the L2 full of written lines, and after one that leaves it full of read lines.

    python -m tools.record.decode_l2 --fa3 fa3/_C.so --out decode_l2.json

The timer's cold L2 (`utils/benchmark/cuda_timer.py`) comes from zeros written to a buffer twice its size. What of them the L2 still
holds is written to memory while the timed call reads its cache, and takes a part of the bandwidth. Here each call
is timed after such a flush, and after one that is followed by reading another buffer. The difference is what the written
lines cost. All calls of a row are interleaved in one process. The last row reads 1 GiB and copies 1 GiB, as a measure.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tools.record.common import Record, arguments_parser
from tools.record.decode import CACHES, draw, median, others
from utils.attention.decode import attention_decode

ITERATIONS = 21
FLUSH_BYTES = 256 << 20  # written, and read: several times the L2
SPIN_CYCLES = 400_000  # about 0.2 ms, in which the CPU queues a sample
READ, WRITTEN = "read", "written"


def time_after(calls: dict[str, Callable], left: str, buffers: tuple[torch.Tensor, torch.Tensor]) -> dict[str, list]:
    """Time the calls, interleaved, microseconds of each sample; left: what the flush leaves in the L2."""
    for call in calls.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ITERATIONS):
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(SPIN_CYCLES)
            buffers[0].zero_()
            if left == READ:
                buffers[1].sum()
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(1e3 * begin.elapsed_time(end))
    return samples


def measure_row(cache: tuple, buffers: tuple[torch.Tensor, torch.Tensor], fa3: bool) -> dict:
    """Measure one new token over a cache; an empty cache stands for reading and copying 1 GiB."""
    if cache:
        q, k, v = draw(*cache, 1)
        calls = {"gluon": partial(attention_decode, q, k, v, backend="gluon")} | others(q, k, v, fa3, False)
        bytes_ = 2 * k.numel() * k.element_size()
    else:
        x = torch.ones(2**28, device="cuda")
        y = torch.empty_like(x[: 2**27])
        calls = {"read": x.sum, "copy": partial(y.copy_, x[: 2**27])}  # both move 1 GiB
        bytes_ = 4 * x.numel()
    times = {left: {n: median(t) for n, t in time_after(calls, left, buffers).items()} for left in (WRITTEN, READ)}
    us = {left: {name: round(t, 2) for name, t in found.items()} for left, found in times.items()}
    tb_s = {left: {name: round(bytes_ / t / 1e6, 3) for name, t in found.items()} for left, found in times.items()}
    return {"cache": list(cache), "bytes": bytes_, "us": us, "tb_s": tb_s}


def show_row(row: dict) -> str:
    """Return a row as a line."""
    return f"{row['cache'] or '1 GiB'} x " + "; ".join(f"{left}: {us}" for left, us in row["us"].items())


def main() -> None:
    """Measure all rows that the time allows."""
    parser = arguments_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--fa3", type=Path, help="the built library of FlashAttention 3")
    options = parser.parse_args()
    if options.fa3:
        torch.ops.load_library(str(options.fa3.expanduser()))
    buffers = tuple(torch.ones(FLUSH_BYTES // 4, device="cuda") for _ in range(2))
    method = {"l2": "cold, written or read", "iterations": ITERATIONS}
    record = Record(options.out, "decode: what the flush leaves in the L2", "cuda", options.seconds, **method)
    rows = [(), *CACHES]
    if record.fill(rows, lambda cache: measure_row(cache, buffers, options.fa3 is not None), show_row):
        record.finish()


if __name__ == "__main__":
    main()
