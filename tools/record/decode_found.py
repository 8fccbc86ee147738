"""Time decode by what differs between equal runs: where clusters run, and what a process has done before.

    python -m tools.record.decode_found --workers 16 --seconds 90 --fa4 --out decode_found.json

- `modes`: eight sequences of equal lengths: ways to share their heads, all samples; one variant keeps each program's SM and times
  (`where-*.json` beside the record).
- `stages`: one call in one piece, timed in two ways behind each of the steps in which rows of other tables differ: other caches,
  reference results, pages, kernels of other libraries; and with other buffers to flush the L2 with.
- `fp8`: variants of the kernel that reads an fp8 cache with 17 query rows and more.
- `rows`: query rows as rows, other rings, beside FlashAttention 4.

Each call is compared with float64 before it is timed. All cases of a row are timed in one process, in random order, each behind a
flush of its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from tools.record import decode_bound
from tools.record.decode import draw, in_pages, others, time_together
from tools.record.decode_divide import add_right
from tools.record.decode_variants import bound, right_calls
from utils.attention import decode_reference
from utils.benchmark.cuda_timer import gpu_flush_bytes

EIGHT = (8, 32, 8, 8192, 128, 1)
# Sequences, heads, heads of keys, keys, head dimension, new tokens; then tokens of a page (0: in one piece).
MODES = tuple((*EIGHT, page) for page in (64, 256, 0, 16))
FP8 = tuple(
    (*sizes, 16)
    for sizes in (
        (64, 32, 8, 4096, 128),
        (8, 32, 8, 8192, 128),
        (1, 32, 8, 131072, 128),
        (16, 64, 8, 8192, 128),
        (128, 64, 8, 1024, 128),
        (1, 32, 8, 32768, 128),
        (1, 32, 8, 8192, 128),
        (1, 4, 1, 32768, 256),
    )
)
ROWS = ((16, 64, 8, 8192, 128, 16), (128, 64, 8, 1024, 128, 16))
POINTS = {"stages": (EIGHT,), "modes": MODES, "fp8": FP8, "rows": ROWS}
ROUNDS = 61  # of `modes`


@dataclass
class Sample:
    """A call, and what runs behind it, untimed."""

    call: Callable
    behind: Callable | None = None
    rounds: int = 0  # 0: as many as the others
    finish: Callable | None = None  # gets the times


class Stages(dict):
    """One call, timed again and again while the process does other things."""

    def run(self) -> dict[str, list[float]]:
        """Return the microseconds of each stage."""
        q, k, v = draw(*EIGHT)
        call = bound({}, q, k, v)
        call()
        times = dict[str, list[float]]()
        buffers = [flush_buffer()]

        def stage(name: str) -> None:
            calls = {"call": call, "empty": partial(torch.cuda._sleep, 0)}
            found = time_together(calls, 4 * k.numel())
            times[f"{name}: timer"], times[f"{name}: empty"] = found["call"], found["empty"]
            for i, buffer in enumerate(buffers):
                times[f"{name}: own, buffer {i}"] = time_samples({"call": Sample(call)}, 0, 21, buffer)["call"]

        stage("first")
        expected = decode_reference(q, k, v)
        stage("reference")
        other = draw(*EIGHT)
        stage("other cache")
        again = bound({}, *other)
        found = time_together({"call": call, "other": again}, 4 * k.numel())
        times |= {"together: call": found["call"], "together: other": found["other"]}
        used = torch.full((len(q),), EIGHT[3], dtype=torch.int32, device="cuda")
        lengths = bound({}, q, k, v, used)
        found = time_together({"call": call, "lengths": lengths}, 4 * k.numel())
        times |= {"with lengths: call": found["call"], "with lengths: lengths": found["lengths"]}
        stage("lengths")
        table = torch.randperm(EIGHT[0] * EIGHT[3] // 64, device="cuda").int().view(EIGHT[0], -1)
        stage("drawn table")
        pages = tuple(in_pages(x, 64, table) for x in (k, v))
        stage("pages")
        paged = bound({}, q, *pages, used, table)
        found = time_together({"call": call, "paged": paged}, 4 * k.numel())
        times |= {"with paged: call": found["call"], "with paged: paged": found["paged"]}
        other_kernels()()
        stage("other kernels")
        calls = others(q, k, v, False, False, {})
        found = time_together({"call": call, **{n: calls[n] for n in ("cudnn",) if n in calls}}, 4 * k.numel())
        times |= {f"with cudnn: {name}": found[name] for name in found}
        buffers.append(flush_buffer())
        stage("last")
        kept = [draw(*EIGHT) for _ in range(3)]
        for i, tensors in enumerate(kept):
            one = bound({}, *tensors)
            one()
            times[f"cache {i}: timer"] = time_together({"call": one}, 4 * k.numel())["call"]
        torch.cuda.empty_cache()
        stage("emptied")
        assert ((call().double() - expected).norm() / expected.norm()).item() < 5e-3
        return times


def flush_buffer() -> torch.Tensor:
    """Return a buffer of twice the L2's size."""
    return torch.empty(gpu_flush_bytes(torch.device("cuda")) // 4, dtype=torch.int32, device="cuda")


def other_kernels() -> Callable[[], None]:
    """Return a call of kernels of other operations, on small tensors."""
    x = torch.randn(512, 512, device="cuda")
    half, image = x.to(torch.bfloat16), x.view(1, 4, 256, 256)
    filters = torch.randn(8, 4, 3, 3, device="cuda")
    operations: tuple[Callable, ...] = (
        lambda: half @ half,
        lambda: torch.sort(x),
        lambda: torch.cumsum(x, 1),
        lambda: torch.softmax(x, 1),
        lambda: F.conv2d(image, filters),
        lambda: torch.fft.fft(x),
    )

    def call() -> None:
        for operation in operations:
            operation()

    return call


def time_samples(
    samples: dict[str, Sample], bytes_: int, iterations: int, buffer: torch.Tensor | None = None
) -> dict[str, list[float]]:
    """Time each sample `iterations` times, in random order: microseconds."""
    if isinstance(samples, Stages):
        return samples.run()
    buffer = flush_buffer() if buffer is None else buffer
    draws, times = random.Random(0), {name: [] for name in samples}
    rounds = max([iterations, *(sample.rounds for sample in samples.values())])
    for number in range(rounds + 3):
        events = {}
        torch.cuda._sleep(6_000_000)  # the queue is ahead of the GPU
        for name in draws.sample(list(samples), len(samples)):
            begin, end = events[name] = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            buffer.zero_()
            begin.record()
            samples[name].call()
            end.record()
            if samples[name].behind and number >= 3:
                samples[name].behind()
        torch.cuda.synchronize()
        for name, (begin, end) in events.items():
            if number >= 3:
                times[name].append(1e3 * begin.elapsed_time(end))
    for name, sample in samples.items():
        if sample.finish:
            sample.finish(times[name])
    return times


def prepare_modes(point: tuple, folder: Path) -> list[tuple[dict, dict[str, Sample], int]]:
    """Prepare ways to share the heads of eight sequences of equal lengths."""
    *sizes, page = point
    row: dict = {"point": list(point), "series": 0, "errors": {}, "left_out": {}}
    q, k, v = draw(*sizes)
    used = torch.full((len(q),), sizes[3], dtype=torch.int32, device="cuda")
    expected = decode_reference(q, k, v)
    calls = dict[str, Callable]()
    add_right(calls, row, {"piece": {}}, expected, q, k, v)
    table = None
    if page:
        table = torch.randperm(sizes[0] * sizes[3] // page, device="cuda").int().view(sizes[0], -1)
        k, v = (in_pages(x, page, table) for x in (k, v))
    divided = {"cluster": 8, "per_sm": 2, "block_n": 64, "slots": 4, "halvings": 3}
    two_an_sm = 80_000  # bytes: three programs would have more than there are
    named: dict[str, dict] = {
        "divided": divided,
        "pad": divided | {"pad": two_an_sm},
        "order 4": divided | {"order": 4},
        "fours": divided | {"cluster": 4, "halvings": 2},
        "two": {"cluster": 2, "block_n": 128, "slots": 4},
        "two, small": {"cluster": 2, "block_n": 64, "per_sm": 2, "slots": 4},
    }
    add_right(calls, row, named, expected, q, k, v, used, table)
    samples = {name: Sample(call, rounds=ROUNDS) for name, call in calls.items()}
    for name in ("divided", "order 4"):
        call = bound(named[name] | {"where": True}, q, k, v, used, table)
        call()
        maps: list[torch.Tensor] = []
        behind = partial(keep, maps, call.func)
        finish = partial(write_places, maps, folder / f"where-{page}-{name.replace(' ', '-')}.json")
        samples[f"{name}, kept"] = Sample(call, behind, ROUNDS, finish)
    return [(row, samples, 4 * k.numel())]


def keep(maps: list[torch.Tensor], launch) -> None:
    """Copy what a launch has kept."""
    maps.append(launch.kept.clone())


def write_places(maps: list[torch.Tensor], path: Path, times: list[float]) -> None:
    """Write each launch's microseconds, and of its programs with work the number, the SM, begin and end in ns behind the first one's."""
    launches = []
    for kept, time in zip(maps, times, strict=True):
        found = kept.view(torch.int32).view(-1, 3).long().cpu()
        begin, end = found[:, 1] - found[:, 1].min(), found[:, 2] - found[:, 1].min()
        work = (end - begin > 8000).nonzero().flatten().tolist()
        programs = [[i, found[i, 0].item(), begin[i].item(), end[i].item()] for i in work]
        launches.append({"us": round(time, 2), "programs": programs})
    path.write_text(json.dumps(launches))


def prepare_fp8(point: tuple) -> list[tuple[dict, dict[str, Sample], int]]:
    """Prepare a cache in e4m3, by the default and by variants, beside the same one in bf16, by its default."""
    q, k, v = draw(*point)
    row: dict = {"point": list(point), "series": 0, "errors": {}, "left_out": {}}
    calls, row["left_out"] = right_calls({"bf16": {}}, decode_reference(q[:1], k[:1], v[:1]), q, k, v)
    small, scales = [x.to(torch.float8_e4m3fn) for x in (k, v)], torch.rand(2, point[2], device="cuda") + 0.5
    expected = decode_reference(q[:1], *(x[:1] for x in small), kv_scales=scales)
    named: dict[str, dict] = {f"each {each}": {"fp8": True, "each": each} for each in (16, 8)}
    eight = named["each 8"]
    named |= {f"8, raw {raw}": eight | {"raw": raw} for raw in (4, 6)}
    if point[4] == 128:
        named["8, six converted"] = eight | {"slots": 6}
    if point[4] == 128 and point[1] // point[2] * point[5] <= 64:
        named |= {"8, held": eight | {"held": True}, "8, 128 keys": eight | {"block_n": 128}}
        named["8, held, raw 6"] = eight | {"held": True, "raw": 6}
    found, missing = right_calls(named, expected, q, *small, scales=scales, errors=row["errors"])
    row["left_out"] |= missing
    return [(row, {name: Sample(call) for name, call in (calls | found).items()}, 2 * k.numel())]


def prepare_rows(point: tuple, fa4: bool) -> list[tuple[dict, dict[str, Sample], int]]:
    """Prepare the default with query rows as rows, and rings of three and five tiles."""
    q, k, v = draw(*point)
    row: dict = {"point": list(point), "series": 0, "errors": {}, "left_out": {}}
    calls = dict[str, Callable]()
    own = {"consumers": 2, "block_n": 128, "aligned": True, "programs": point[0] * point[2], "ahead": False}
    named: dict[str, dict] = {"default": {}} | {f"{slots} slots": own | {"slots": slots} for slots in (3, 5)}
    add_right(calls, row, named, decode_reference(q, k, v), q, k, v)
    calls |= {n: call for n, call in others(q, k, v, False, fa4, row["left_out"]).items() if n == "fa4"}
    return [(row, {name: Sample(call) for name, call in calls.items()}, 4 * k.numel())]


def ways(options) -> dict[str, Callable]:
    """Return what prepares a point of each table."""
    return {
        "stages": lambda point: [({"point": list(point), "series": 0, "left_out": {}}, Stages(), 0)],
        "modes": partial(prepare_modes, folder=options.out.parent),
        "fp8": prepare_fp8,
        "rows": partial(prepare_rows, fa4=options.fa4),
    }


def show(rows: list[dict]) -> str:
    """Return a point as a line: the medians, quarters where all samples count, and what is wrong."""
    row = rows[0]
    batch, heads, kv_heads, keys, _, new, *more = row["point"]
    line = f"{row['table']} {batch}x{heads}/{kv_heads}x{keys} q{new} {' '.join(map(str, more))}: "
    if row["table"] == "modes":
        quarters = {n: [s[len(s) // 4], s[len(s) // 2], s[3 * len(s) // 4]] for n, s in row["samples"].items()}
        line += ", ".join(f"{name} {'/'.join(map(str, found))}" for name, found in quarters.items())
    else:
        line += ", ".join(f"{name} {time:.1f}" for name, time in row["us"].items())
    known = "fa2", "fa3", "fa4", "cudnn", "flashinfer", "fa3_lengths"
    out = {name: why[:60] for name, why in row["left_out"].items() if name not in known}
    return line + (f" OUT {out}" if out else "")


if __name__ == "__main__":
    what = "decode: by what differs between equal runs, and an fp8 cache"
    decode_bound.run("tools.record.decode_found", __doc__, POINTS, ways, show, what, time_samples)
