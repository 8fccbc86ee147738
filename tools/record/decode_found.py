"""Time clusters that are divided by the lengths, eight or sixteen programs each, and keep where they run.

    python -m tools.record.decode_found --workers 16 --seconds 90 --out decode_found.json

- `kinds`: sequences of equal and of other lengths: divided clusters of eight, the same with an order by which those with work lie
  evenly where lengths are equal (`order`), and clusters of sixteen that are always halved (`sixteen`).
- `single`: one sequence by a cluster for each head, each program's SM and times kept (`where-*.json` beside the record).

Each call is compared with float64 before it is timed. All cases of a row are timed in one process, in random order, each behind a
flush of its own, and with them a kernel that only counts cycles (`100000 cycles`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tools.record import decode_bound
from tools.record.decode import draw, in_pages
from tools.record.decode_divide import FRACTIONS, add_right
from tools.record.decode_variants import bound
from utils.attention import decode_reference
from utils.benchmark.cuda_timer import gpu_flush_bytes

EIGHT = (8, 32, 8, 8192, 128, 1)
# Sequences, heads, heads of keys, keys, head dimension, new tokens; then tokens of a page (0: in one piece) and the lengths.
KINDS = (
    *((*EIGHT, page, "equal") for page in (64, 256, 0, 16)),
    *(
        (*EIGHT, page, kind)
        for kind in ("one long", "even steps", "two long", "drawn", "half short")
        for page in (64, 0)
    ),
    (*EIGHT, 64, "one long, last"),
    *((16, *EIGHT[1:], 0, kind) for kind in ("equal", "one long", "drawn")),
    *((batch, *EIGHT[1:], 64, kind) for batch in (5, 6, 7) for kind in ("equal", "drawn")),
    *((8, 32, 8, keys, 128, 1, 64, kind) for keys in (2048, 16384) for kind in ("equal", "one long", "drawn")),
)
SINGLE = ((1, 32, 8, 32768, 128, 1), (1, 32, 8, 8192, 128, 1), (8, 32, 8, 8192, 128, 1))
POINTS = {"kinds": KINDS, "single": SINGLE}
ROUNDS = 61  # of `modes`


@dataclass
class Sample:
    """A call, and what runs behind it, untimed."""

    call: Callable
    behind: Callable | None = None
    rounds: int = 0  # 0: as many as the others
    finish: Callable | None = None  # gets the times


def flush_buffer() -> torch.Tensor:
    """Return a buffer of twice the L2's size."""
    return torch.empty(gpu_flush_bytes(torch.device("cuda")) // 4, dtype=torch.int32, device="cuda")


def time_samples(
    samples: dict[str, Sample], bytes_: int, iterations: int, buffer: torch.Tensor | None = None
) -> dict[str, list[float]]:
    """Time each sample `iterations` times, in random order: microseconds."""
    samples["100000 cycles"] = Sample(partial(torch.cuda._sleep, 100_000))
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


def prepare_kinds(point: tuple, folder: Path) -> list[tuple[dict, dict[str, Sample], int]]:
    """Prepare ways to divide clusters."""
    *sizes, page, kind = point
    row: dict = {"point": list(point), "series": 0, "errors": {}, "left_out": {}}
    q, k, v = draw(*sizes)
    used = torch.tensor([int(x * sizes[3]) for x in FRACTIONS[kind](len(q))], dtype=torch.int32, device="cuda")
    expected = decode_reference(q, k, v, seqlens=used)
    calls = dict[str, Callable]()
    if kind == "equal":
        add_right(calls, row, {"piece": {}}, expected, q, k, v)
    table = None
    if page:
        table = torch.randperm(sizes[0] * sizes[3] // page, device="cuda").int().view(sizes[0], -1)
        k, v = (in_pages(x, page, table) for x in (k, v))
    divided = {"cluster": 8, "per_sm": 2, "block_n": 64, "slots": 4, "halvings": 3}
    named: dict[str, dict] = {"divided": divided, "order": divided | {"order": True}}
    if sizes[0] <= 8:
        named["sixteen"] = divided | {"cluster": 16, "base": 1}
    named |= {"two, small": {"cluster": 2, "block_n": 64, "per_sm": 2, "slots": 4}} if kind == "equal" else {}
    add_right(calls, row, named, expected, q, k, v, used, table)
    samples = {name: Sample(call, rounds=ROUNDS) for name, call in calls.items()}
    if kind == "equal" and page == 64 and sizes[0] == 8:
        for name in ("order", "sixteen"):
            if name in named:
                call = bound(named[name] | {"where": True}, q, k, v, used, table)
                samples |= placed(f"{sizes[3]}-{name}", call, folder)
    return [(row, samples, 4 * k.numel())]


def placed(name: str, call: Callable, folder: Path) -> dict[str, Sample]:
    """Return a sample of a call that keeps where its programs run."""
    call()
    maps: list[torch.Tensor] = []
    finish = partial(write_places, maps, folder / f"where-{name}.json")
    return {f"{name}, kept": Sample(call, partial(keep, maps, call.func), ROUNDS, finish)}


def prepare_single(point: tuple, folder: Path) -> list[tuple[dict, dict[str, Sample], int]]:
    """Prepare the default without lengths, by clusters, and the same with the programs' SMs and times kept."""
    q, k, v = draw(*point)
    row: dict = {"point": list(point), "series": 0, "errors": {}, "left_out": {}}
    calls = dict[str, Callable]()
    way = {"cluster": 8} if point[0] == 1 else {"cluster": 2, "block_n": 128, "slots": 4}
    add_right(calls, row, {"default": {}}, decode_reference(q, k, v), q, k, v)
    samples = {name: Sample(call, rounds=ROUNDS) for name, call in calls.items()}
    samples |= placed(f"{point[0]}x{point[3]}", bound(way | {"where": True}, q, k, v), folder)
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


def ways(options) -> dict[str, Callable]:
    """Return what prepares a point of each table."""
    folder = options.out.parent
    return {"kinds": partial(prepare_kinds, folder=folder), "single": partial(prepare_single, folder=folder)}


def show(rows: list[dict]) -> str:
    """Return a point as a line: the medians, quarters where all samples count, and what is wrong."""
    row = rows[0]
    batch, heads, kv_heads, keys, _, new, *more = row["point"]
    line = f"{row['table']} {batch}x{heads}/{kv_heads}x{keys} q{new} {' '.join(map(str, more))}: "
    if "equal" in more or row["table"] == "single":
        quarters = {n: [s[len(s) // 4], s[len(s) // 2], s[3 * len(s) // 4]] for n, s in row["samples"].items()}
        line += ", ".join(f"{name} {'/'.join(map(str, found))}" for name, found in quarters.items())
    else:
        line += ", ".join(f"{name} {time:.1f}" for name, time in row["us"].items())
    known = "fa2", "fa3", "fa4", "cudnn", "flashinfer", "fa3_lengths"
    out = {name: why[:60] for name, why in row["left_out"].items() if name not in known}
    return line + (f" OUT {out}" if out else "")


if __name__ == "__main__":
    what = "decode: clusters divided by the lengths, and where they run"
    decode_bound.run("tools.record.decode_found", __doc__, POINTS, ways, show, what, time_samples)
