"""Measure what bounds decode where both it and its peers read the cache nearly as fast as a copy does.

    python -m tools.record.decode_bound --workers 14 --seconds 85 --fa4 --out decode_bound.json

- `read`: the cache read by TMA and not looked at (`read_alone.py`): how fast it can be read at all, by the order of its blocks
  and the bytes on their way.
- `bound`: variants of the kernel at points of `decode.json` whose bytes decide, beside cuDNN and FlashAttention 4. Each point
  is timed in several series, each with tensors at other addresses and a row of its own.
- `tokens`: one sequence in pages with 8 and 16 new tokens: by a cluster, and by the default.
- `lengths`: sequences whose lengths are equal, and others: with clusters of which two programs share an SM, and without.

All calls of a row are timed in one process, interleaved, with a cold L2 cache; the processes prepare side by side and time
one after another (`turns.py`). A variant that is not right on the drawn tensors, against float64, is named and not timed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tools.record.common import Record, arguments_parser, machine_name, read_record
from tools.record.decode import draw, in_pages, median, others, time_together
from tools.record.decode_variants import WRONG, arrangement, describe, error_of, right_calls
from tools.record.read_alone import reader
from tools.record.turns import Turns, run_parts
from utils.attention import decode_reference

ITERATIONS, SERIES = 21, 2
SHOWN = "default", "cudnn", "fa4", "copy of half"  # beside the fastest
NOT_TIMED = "fa2", "fa3_lengths", "flashinfer"
# Sequences, heads, heads of keys, keys, head dimension, new tokens.
BOUND = (
    (16, 64, 8, 8192, 128, 16),
    (16, 64, 8, 8192, 128, 8),
    # Between the thirty points: 268 and 134 MB.
    (16, 64, 8, 4096, 128, 16),
    (16, 64, 8, 4096, 128, 8),
    (32, 64, 8, 2048, 128, 8),
    (64, 64, 8, 512, 128, 16),
    (32, 64, 8, 1024, 128, 16),
    (16, 64, 8, 2048, 128, 1),
    (32, 64, 8, 1024, 128, 1),
    (64, 64, 8, 512, 128, 1),
    (64, 16, 16, 1024, 64, 8),
)
READ = ((16, 8, 8192, 128),)  # sequences, heads of keys, keys, head dimension
TOKENS = tuple((1, 32, 8, keys, 128, new) for keys in (8192, 16384, 32768) for new in (8, 16))
# The same, then tokens of a page (0: in one piece) and each sequence's keys as fractions of the cache's.
LENGTHS = (
    *((8, 32, 8, 8192, 128, 1, page, kind) for kind in ("equal", "one long", "even steps") for page in (0, 64)),
    *((8, 32, 8, 2048, 128, 1, page, kind) for kind in ("equal", "one long") for page in (0, 64)),
    *((16, 32, 8, 8192, 128, 1, 64, kind) for kind in ("equal", "one long", "even steps")),
    *((4, 32, 8, keys, 128, 1, 64, kind) for keys in (2048, 16384) for kind in ("equal", "one long")),
    *((4, 4 * kv_heads, kv_heads, 8192, 128, 1, 64, kind) for kv_heads in (4, 16) for kind in ("equal", "one long")),
    *((32, 32, 8, 4096, 128, 1, 64, kind) for kind in ("equal", "even steps")),
)
FRACTIONS = {
    "equal": lambda batch: [1.0] * batch,
    "even steps": lambda batch: [1 - i / batch for i in range(batch)],
    "one long": lambda batch: [1.0] + [1 / 64] * (batch - 1),
}
POINTS = {"bound": BOUND, "read": READ, "tokens": TOKENS, "lengths": LENGTHS}
PAGE = 64


def variants(point: tuple) -> dict[str, dict]:
    """Name the variants of a point: {name: arguments of `arrangement.arrange`}."""
    batch, heads, kv_heads, _, head_dim, new_tokens = point
    rows, all_heads = heads // kv_heads * new_tokens, batch * kv_heads
    found: dict[str, dict] = {"default": {}}
    if rows < 32:
        large, small = (256, 128) if head_dim == 64 else (128, 64)
        one: dict = {"consumers": 0, "aligned": True, "programs": all_heads, "block_n": large}
        found |= {f"{large} x {slots}": one | {"slots": slots} for slots in (4, 6)}
        found |= {f"{large} x {slots}, no hint": one | {"slots": slots, "hint": False} for slots in (4, 6)}
        two: dict = one | {"per_sm": 2, "block_n": small}
        return found | {f"two an SM, {small} x {slots}": two | {"slots": slots} for slots in (4, 6)}
    own: dict = {"consumers": 2 if rows == 128 else 1, "aligned": True, "programs": all_heads}
    if all_heads > 132 and rows == 64:
        own |= {"per_sm": 2, "block_n": 64}
    if all_heads > 132 and rows == 128:
        found["ahead"] = {"consumers": 2, "ahead": True, "block_n": 64}
        own |= {"ahead": False, "block_n": 128}
    found |= {f"a program a head, {slots} slots": own | {"slots": slots} for slots in (4, 6)}
    if all_heads <= 132:
        found["132 programs"] = own | {"programs": 132, "slots": 4}
    return found


def prepare_bound(point: tuple, fa4: bool) -> list[tuple[dict, dict[str, Callable], int]]:
    """Return a row, the calls to time, and the bytes of the cache, for each series."""
    series, named = [], variants(point)
    ways: dict = {}
    for name, choices in named.items():
        ways.setdefault(arrangement(point, choices), name)
    named = {name: named[name] for name in ways.values()}
    for number in range(SERIES):
        q, k, v = draw(*point)
        errors: dict[str, float] = {}
        calls, left_out = right_calls(named, decode_reference(q[:1], k[:1], v[:1]), q, k, v, errors=errors)
        whole = calls["default"]().double()  # `right_calls` has looked at the first sequence
        for name in [name for name in calls if not error_of(calls[name](), whole) < WRONG]:
            left_out[name] = "wrong: other sequences"
            del calls[name]
        found = others(q, k, v, False, fa4 and point[0] > 1, left_out)
        few = point[5] == 1 or point[4] == 64
        calls |= {n: call for n, call in found.items() if n not in NOT_TIMED and (n != "cudnn" or few)}
        if number == 0:
            own = {name: describe(arrangement(point, choices)) for name, choices in named.items()}
        row = {"point": list(point), "series": number, "own": own, "errors": errors, "left_out": left_out}
        series.append((row, calls, 4 * k.numel()))
    return series


def prepare_read(cache: tuple) -> list[tuple[dict, dict[str, Callable], int]]:
    """Prepare the reading of a cache by TMA alone, and a copy of half of its bytes, which moves as many."""
    k, v = (torch.randn(cache, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rows, width = cache[0] * cache[1] * cache[2], cache[3]
    calls: dict[str, Callable] = {}
    for programs, block, slots, group in (
        *((128, 128, slots, 1) for slots in (2, 4, 6)),
        (128, 256, 2, 1),
        (128, 64, 4, 1),
        *((128, 128, 4, group) for group in (2, 4, 8, 128)),
        *((132, 128, slots, 132) for slots in (4, 6)),
    ):
        name = f"{programs} programs, {block} x {slots}, runs of {group}"
        calls[name] = reader(k.view(rows, width), v.view(rows, width), programs, block, slots, group)
        calls[name]()
    calls["copy of half"] = partial(torch.empty_like(k).copy_, v)
    torch.cuda.synchronize()
    return [({"point": list(cache), "left_out": {}, "series": 0}, calls, 4 * k.numel())]


def prepare_tokens(point: tuple) -> list[tuple[dict, dict[str, Callable], int]]:
    """Prepare one sequence in pages: by a cluster of eight with one warpgroup a program, and by the default."""
    q, k, v = draw(*point)
    used = torch.full((1,), point[3], dtype=torch.int32, device="cuda")
    expected = decode_reference(q, k, v)
    row: dict = {"point": [*point, PAGE], "series": 0, "errors": {}}
    calls, row["left_out"] = right_calls({"one piece": {}, "one piece, cluster": {"cluster": 8}}, expected, q, k, v)
    table = torch.randperm(point[3] // PAGE, device="cuda").int().view(1, -1)
    paged = (q, *(in_pages(x, PAGE, table) for x in (k, v)), used, table)
    named = {"default": {}, "cluster": {"cluster": 8}}
    for kind, tensors in (("pages", paged), ("lengths", (q, k, v, used, None))):
        ways = {f"{kind}, {name}": choices for name, choices in named.items()}
        found, missing = right_calls(ways, expected, *tensors, errors=row["errors"])
        calls |= found
        row["left_out"] |= missing
    return [(row, calls, 4 * k.numel())]


def prepare_lengths(point: tuple) -> list[tuple[dict, dict[str, Callable], int]]:
    """Prepare sequences of other lengths: with clusters and without, with few and many parts in a thread of the merge."""
    *sizes, page, kind = point
    q, k, v = draw(*sizes)
    used = torch.tensor([int(x * sizes[3]) for x in FRACTIONS[kind](len(q))], dtype=torch.int32, device="cuda")
    tensors: tuple = (q, k, v, used, None)
    if page:
        table = torch.randperm(sizes[0] * sizes[3] // page, device="cuda").int().view(sizes[0], -1)
        tensors = (q, *(in_pages(x, page, table) for x in (k, v)), used, table)
    named: dict[str, dict] = {"default": {}}
    named["no clusters"] = {"cluster": 0}
    for parts in {4: (16,), 8: (4, 8), 16: (4,)}[sizes[2]]:
        two = {"cluster": parts, "per_sm": 2, "block_n": 64}
        named |= {f"clusters of {parts}, two an SM, {slots} slots": two | {"slots": slots} for slots in (4, 6)}
    row: dict = {"point": list(point), "series": 0, "errors": {}, "left_out": {}}
    expected, calls = decode_reference(q, k, v, seqlens=used), dict[str, Callable]()
    for name, choices in named.items():
        found, missing = right_calls({name: choices}, expected[:1], *tensors, errors=row["errors"])
        for call in found.values():  # the other sequences, too
            if error_of(call(), expected) < WRONG:
                calls[name] = call
            else:
                missing[name] = "wrong: other sequences"
        row["left_out"] |= missing
    return [(row, calls, 4 * k.numel())]


def show(rows: list[dict]) -> str:
    """Return the series of a point as a line: the medians, the fastest first, and what was not timed."""
    us = {name: [row["us"][name] for row in rows if name in row["us"]] for name in rows[0]["us"]}
    times = sorted((sum(found) / len(found), name) for name, found in us.items())
    named = [name for _, name in times[:7]]
    times = [(mean, name) for mean, name in times if name in named or name in SHOWN]
    out = {name: why[:50] for name, why in rows[0]["left_out"].items() if name not in (*NOT_TIMED, "cudnn")}
    line = ", ".join(f"{name} {mean:.1f}" for mean, name in times)
    return f"{rows[0]['table']} {'x'.join(map(str, rows[0]['point']))}: {line}" + (f" OUT {out}" if out else "")


def ways_to_prepare(options) -> dict[str, Callable]:
    """Return what prepares a point of each table."""
    bound = partial(prepare_bound, fa4=options.fa4)
    return {"bound": bound, "read": prepare_read, "tokens": prepare_tokens, "lengths": prepare_lengths}


def worker(options, cases: list[tuple[str, tuple]], ways: dict[str, Callable], what: str) -> None:
    """Prepare every `workers`-th row beside the other processes, then time each alone on the GPU."""
    path = options.out.with_suffix(f".{options.part}.json")
    record = Record(path, what, "cuda", l2="cold", iterations=ITERATIONS)
    turns = Turns(options.out.with_suffix(".turns"), options.workers, options.prepare)
    cases, prepared = cases[options.part :: options.workers], []
    for table, point in cases:
        if turns.time_left():
            prepared += [(table, each) for each in ways[table](point)]
    torch.cuda.synchronize()
    turns.wait_for_all(str(options.part))

    def timed(each: tuple) -> dict:
        table, (row, calls, bytes_) = each
        with turns.alone():
            samples = time_together(calls, bytes_, ITERATIONS)
        us = {name: round(median(times), 2) for name, times in samples.items()}
        return {"table": table} | row | {"bytes": bytes_, "us": us}

    if record.fill(prepared, timed, lambda row: "") and len(prepared) >= len(cases):
        record.finish()


def run(module: str, description: str, points: dict[str, tuple], ways: Callable, line: Callable, what: str) -> None:
    """Start the processes, join what they wrote, and print it.

    Args:
        module: of the script, which is started again for each process.
        description: its docstring.
        points: of each table.
        ways: returns {table: what prepares a point}, from the options.
        line: what to print of a point's rows.
        what: the record's first words.
    """
    parser = arguments_parser(description)
    parser.add_argument("--seconds", type=float, default=85, help="stop after this time, with the rows so far")
    parser.add_argument("--prepare", type=float, default=45, help="seconds to prepare rows")
    parser.add_argument("--fa3", type=Path, help="the built library of FlashAttention 3, for the tables that take it")
    parser.add_argument("--fa4", action="store_true", help="time flash-attn-4; it compiles for seconds")
    parser.add_argument("--tables", nargs="*", default=list(points), choices=list(points))
    parser.add_argument("--workers", type=int, default=14, help="processes")
    parser.add_argument("--part", type=int, help="the rows of one process; by default all are started")
    options = parser.parse_args()
    cases = [(table, point) for table in options.tables for point in points[table]]
    if options.part is not None:
        if options.fa3:
            torch.ops.load_library(str(options.fa3.expanduser()))
        worker(options, cases, ways(options), what)
        return
    began = time.monotonic()
    command = [sys.executable, "-m", module, *sys.argv[1:]]
    run_parts([[*command, "--part", str(i)] for i in range(options.workers)], began + options.seconds)
    parts = [path for i in range(options.workers) if (path := options.out.with_suffix(f".{i}.json")).exists()]
    records = [read_record(path) for path in parts]
    rows = [row for r in records for row in r.get("rows", ())]
    of_case = {
        case: [row for row in rows if row["table"] == case[0] and tuple(row["point"][: len(case[1])]) == case[1]]
        for case in cases
    }
    record = Record(options.out, what)
    ordered = [row for found in of_case.values() for row in sorted(found, key=lambda row: row["series"])]
    record.contents = {**records[0], "complete": all(r["complete"] for r in records), "rows": ordered}
    record.save()
    print(machine_name(record.contents), f"{time.monotonic() - began:.0f} s, {len(of_case)} points")
    print("\n".join(line(found) for found in of_case.values() if found))
    for path in parts:
        path.unlink()


if __name__ == "__main__":
    run("tools.record.decode_bound", __doc__, POINTS, ways_to_prepare, show, "decode: what bounds it")
