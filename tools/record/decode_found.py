"""Time decode by what a call finds: translations of addresses, and what the L2 still holds of its own tensors.

    python -m tools.record.decode_found --workers 15 --seconds 88 --out decode_found.json

- `found`: the same call behind a flush of the L2, where the call before it had read the same tensors (`same`), or others
  (`other`); behind a flush eight times the L2's size (`large`); and where, behind the flush, all SMs have read one word of
  each 2 MiB of K and V (`touched`), and of the small tensors, too (`all touched`); where a dozen other kernels have run in front of
  the flush, whose instructions then stand in the SMs' caches (`code`).
- `rows`: query rows as rows, the mask's instructions run once at the start.
- `fp8`: variants of the kernel that reads an fp8 cache with 17 query rows and more.

Each call is compared with float64 in all sequences before it is timed. All cases of a row are timed in one process, in random
order, each behind a flush of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from tools.record import decode_bound
from tools.record.decode import draw, in_pages, others
from tools.record.decode_divide import add_right
from tools.record.decode_variants import right_calls
from utils.attention import decode_reference
from utils.benchmark.cuda_timer import gpu_flush_bytes

SIZES_8 = (8, 32, 8, 8192, 128, 1)
# Sequences, heads, heads of keys, keys, head dimension, new tokens, tokens of a page (0: in one piece), whether lengths are given.
FOUND = (
    *((*SIZES_8, page, True) for page in (0, 256, 64, 16)),
    (*SIZES_8, 0, False),
    *((1, 32, 8, keys, 128, 1, 0, False) for keys in (2048, 8192, 32768)),
    (1, 32, 8, 8192, 128, 1, 64, True),
    (1, 32, 8, 32768, 128, 1, 256, True),
    (16, 64, 8, 8192, 128, 1, 0, False),
)
FP8 = tuple(
    (*sizes, 16)
    for sizes in (
        (64, 32, 8, 4096, 128),
        (8, 32, 8, 8192, 128),
        (1, 32, 8, 131072, 128),
        (16, 64, 8, 8192, 128),
        (128, 64, 8, 1024, 128),
    )
)
ROWS = ((16, 64, 8, 8192, 128, 16), (16, 64, 8, 8192, 128, 8), (1, 32, 8, 131072, 128, 16))
POINTS = {"found": FOUND, "fp8": FP8, "rows": ROWS}
PAGE_BYTES = 2 << 20  # of the GPU's memory


@dataclass
class Sample:
    """A call, what runs in front of the flush, how many times its size the flush has, and what runs behind the flush."""

    call: Callable
    before: Callable | None = None
    flushes: int = 1
    behind: Callable | None = None


@triton.jit
def read_words(pointer, out, step, count, BLOCK: tl.constexpr):
    """Each program reads one word of each `step` words."""
    at = tl.arange(0, BLOCK)
    words = tl.load(pointer + at.to(tl.int64) * step, mask=at < count, other=0)
    tl.store(out + tl.program_id(0), tl.sum(words, 0))


def touch(tensors: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    """Read one word of each 2 MiB of the tensors, from all SMs."""
    for tensor in tensors:
        words = tensor.view(torch.int32).flatten()
        count = -(-4 * words.numel() // PAGE_BYTES)
        read_words[(len(out),)](words, out, PAGE_BYTES // 4, count, triton.next_power_of_2(count))


def other_kernels() -> Callable[[], None]:
    """Return a call of kernels of other operations, on small tensors."""
    x = torch.randn(512, 512, device="cuda")
    half, image = x.to(torch.bfloat16), x.view(1, 4, 256, 256)
    filters = torch.randn(8, 4, 3, 3, device="cuda")
    operations: tuple[Callable, ...] = (
        lambda: half @ half,
        lambda: x @ x,
        lambda: torch.sort(x),
        lambda: torch.topk(x, 16),
        lambda: torch.cumsum(x, 1),
        lambda: torch.softmax(x, 1),
        lambda: F.layer_norm(x, (512,)),
        lambda: F.gelu(x),
        lambda: F.conv2d(image, filters),
        lambda: torch.fft.fft(x),
        lambda: torch.median(x, 1),
    )

    def call() -> None:
        for operation in operations:
            operation()

    return call


def time_samples(samples: dict[str, Sample], bytes_: int, iterations: int) -> dict[str, list[float]]:
    """Time each sample `iterations` times, in random order: microseconds."""
    buffer = torch.empty(gpu_flush_bytes(torch.device("cuda")) // 4, dtype=torch.int32, device="cuda")
    draws, times = random.Random(0), {name: [] for name in samples}
    for number in range(iterations + 3):
        events = {}
        torch.cuda._sleep(12_000_000)  # the queue is ahead of the GPU
        for name in draws.sample(list(samples), len(samples)):
            sample = samples[name]
            begin, end = events[name] = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            if sample.before:
                sample.before()
            for _ in range(sample.flushes):
                buffer.zero_()
            if sample.behind:
                sample.behind()
            begin.record()
            sample.call()
            end.record()
        torch.cuda.synchronize()
        for name, (begin, end) in events.items():
            if number >= 3:
                times[name].append(1e3 * begin.elapsed_time(end))
    return times


def prepare_found(point: tuple) -> list[tuple[dict, dict[str, Sample], int]]:
    """Prepare two caches of a size, and the calls on the first one behind calls on either."""
    *sizes, page, lengths = point
    row: dict = {"point": list(point), "series": 0, "errors": {}, "left_out": {}}
    tensors: list[tuple] = []
    for _ in range(2):
        q, k, v = draw(*sizes)
        used = torch.full((len(q),), sizes[3], dtype=torch.int32, device="cuda") if lengths else None
        expected = decode_reference(q, k, v)
        table = None
        if page:
            table = torch.randperm(sizes[0] * sizes[3] // page, device="cuda").int().view(sizes[0], -1)
            k, v = (in_pages(x, page, table) for x in (k, v))
        tensors.append((expected, q, k, v, used, table))
    own, other = dict[str, Callable](), dict[str, Callable]()
    named: dict[str, dict] = {"default": {}}
    if sizes[0] <= 8:
        ways_early = {"prefetched": {"touch": 1}, "loaded": {"touch": 2}, "rehearsed": {"rehearse": True}}
        named |= {name: variant(point) | choice for name, choice in ways_early.items()}
    add_right(own, row, named, *tensors[0])
    add_right(other, row, {"default": {}}, *tensors[1])
    _, q, k, v, used, table = tensors[0]
    small = (q, *(x for x in (used, table) if x is not None and x.numel() >= 1))
    out = torch.zeros(264, dtype=torch.int32, device="cuda")
    before = {"same": own["default"], "other": other["default"]}
    samples = {f"{name}, {place}": Sample(call, before[place]) for name, call in own.items() for place in before}
    samples["default, same, large"] = Sample(own["default"], before["same"], 8)
    samples["default, other, large"] = Sample(own["default"], before["other"], 8)
    samples["default, other, touched"] = Sample(own["default"], before["other"], 1, partial(touch, (k, v), out))
    code = other_kernels()
    for name, call in own.items():
        samples[f"{name}, same, code"] = Sample(call, lambda: (before["same"](), code()))
    everything = partial(touch, (*small, k, v), out)
    samples["default, other, all touched"] = Sample(own["default"], before["other"], 1, everything)
    if not (lengths or page):
        cudnn = others(q, k, v, False, False, row["left_out"]).get("cudnn")
        if cudnn:
            samples |= {f"cudnn, {place}": Sample(cudnn, before[place]) for place in before}
    for sample in samples.values():  # what has to be compiled or loaded is now
        for call in (sample.before, sample.behind, sample.call):
            if call:
                call()
    row["bytes_of_small"] = [x.numel() * x.element_size() for x in small]
    return [(row, samples, 4 * k.numel())]


def variant(point: tuple) -> dict:
    """Return the default's choices, spelled out."""
    batch, _, _, _, _, _, page, lengths = point
    if batch == 1:
        return {"cluster": 8, "in_turn": lengths and page < 256}
    if lengths:
        return {"cluster": 8, "block_n": 64, "per_sm": 2, "slots": 4, "halvings": 3}
    return {"cluster": 2, "block_n": 128, "slots": 4}


def prepare_fp8(point: tuple) -> list[tuple[dict, dict[str, Sample], int]]:
    """Prepare a cache in e4m3, by the default and by variants, beside the same one in bf16, by its default."""
    q, k, v = draw(*point)
    row: dict = {"point": list(point), "series": 0, "errors": {}, "left_out": {}}
    calls, row["left_out"] = right_calls({"bf16": {}}, decode_reference(q[:1], k[:1], v[:1]), q, k, v)
    small, scales = [x.to(torch.float8_e4m3fn) for x in (k, v)], torch.rand(2, point[2], device="cuda") + 0.5
    expected = decode_reference(q[:1], *(x[:1] for x in small), kv_scales=scales)
    named: dict[str, dict] = {f"each {each}": {"fp8": True, "each": each} for each in (16, 8)}
    if point[1] // point[2] * point[5] <= 64:
        named |= {f"each {each}, held": {"fp8": True, "each": each, "held": True} for each in (16, 8)}
    found, missing = right_calls(named, expected, q, *small, scales=scales, errors=row["errors"])
    row["left_out"] |= missing
    return [(row, {name: Sample(call) for name, call in (calls | found).items()}, 2 * k.numel())]


def prepare_rows(point: tuple) -> list[tuple[dict, dict[str, Sample], int]]:
    """Prepare the default with query rows as rows, and with the mask in a head's second block, too."""
    q, k, v = draw(*point)
    row: dict = {"point": list(point), "series": 0, "errors": {}, "left_out": {}}
    calls = dict[str, Callable]()
    add_right(calls, row, {"default": {}, "rehearsed": rehearsed(point)}, decode_reference(q, k, v), q, k, v)
    code = other_kernels()
    samples = {name: Sample(call) for name, call in calls.items()}
    samples |= {f"{name}, code": Sample(call, code) for name, call in calls.items()}
    code()
    return [(row, samples, 4 * k.numel())]


def rehearsed(point: tuple) -> dict:
    """Return the default's choices, spelled out, with the mask's instructions run once at the start."""
    if point[0] == 1:
        return {"consumers": 1, "slots": 4, "rehearse": True}
    return {"consumers": 2 if point[5] == 16 else 1, "block_n": 128, "aligned": True, "rehearse": True}


def ways(options) -> dict[str, Callable]:
    """Return what prepares a point of each table."""
    return {"found": prepare_found, "fp8": prepare_fp8, "rows": prepare_rows}


def show(rows: list[dict]) -> str:
    """Return a point as a line: the medians, and what is wrong."""
    us = rows[0]["us"]
    batch, heads, kv_heads, keys, _, new, *more = rows[0]["point"]
    line = f"{batch}x{heads}/{kv_heads}x{keys} q{new} {' '.join(map(str, more))}: "
    line += ", ".join(f"{name.replace('default, ', '')} {time:.1f}" for name, time in us.items())
    known = "fa2", "fa3", "fa4", "cudnn", "flashinfer", "fa3_lengths"
    out = {name: why[:60] for name, why in rows[0]["left_out"].items() if name not in known}
    return line + (f" OUT {out}" if out else "")


if __name__ == "__main__":
    what = "decode: by what a call finds, and an fp8 cache"
    decode_bound.run("tools.record.decode_found", __doc__, POINTS, ways, show, what, time_samples)
