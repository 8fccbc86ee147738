"""Measure what bounds decode where both it and its peers read the cache nearly as fast as a copy does.

    python -m tools.record.decode_bound --workers 14 --seconds 85 --fa4 --out decode_bound.json

- `read`: the cache read by TMA and not looked at (`read_alone.py`): how fast it can be read at all, by the order of its blocks,
  the bytes on their way, and the box of a copy.
- `bound`: variants of the kernel at points of `decode.json` whose bytes decide, beside cuDNN and FlashAttention 4. Each point
  is timed in several series, with tensors at other addresses, and its row has the medians over all of them.
- `tokens`: one sequence in pages with 8 and 16 new tokens: by a cluster, and by the default.

All calls of a row are timed in one process, interleaved, with a cold L2 cache; the processes prepare side by side and time
one after another (`turns.py`). A variant that is not right on the drawn tensors, against float64, is named and not timed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from tools.record.common import Record, arguments_parser, machine_name, read_record
from tools.record.decode import draw, in_pages, median, others, time_together
from tools.record.decode_variants import WRONG, arrangement, describe, error_of, fits, right_calls
from tools.record.read_alone import reader
from tools.record.turns import Turns, run_parts
from utils.attention import decode_reference

ITERATIONS, SERIES = 21, 2
SHOWN = "default", "cudnn", "fa4", "copy of half"  # beside the fastest
NOT_TIMED = "fa2", "fa3_lengths", "flashinfer"
# Sequences, heads, heads of keys, keys, head dimension, new tokens.
BOUND = (
    (16, 64, 8, 8192, 128, 1),
    (64, 32, 8, 4096, 128, 1),
    (128, 64, 8, 1024, 128, 16),
    (16, 64, 8, 8192, 128, 16),
    (64, 16, 16, 2048, 64, 8),
    (64, 16, 16, 2048, 64, 16),
    (128, 64, 8, 1024, 128, 1),
    (64, 32, 8, 4096, 128, 8),
    (64, 16, 16, 2048, 64, 1),
    (1, 32, 8, 131072, 128, 1),
    (16, 64, 8, 8192, 128, 8),
    (128, 64, 8, 1024, 128, 8),
    (8, 32, 8, 8192, 128, 1),
)
READ = ((16, 8, 8192, 128), (64, 16, 2048, 64))  # sequences, heads of keys, keys, head dimension
TOKENS = ((1, 32, 8, 8192, 128, 8), (1, 32, 8, 8192, 128, 16), (1, 32, 8, 2048, 128, 16), (1, 32, 8, 4096, 128, 8))
# The same, then tokens of a page (0: in one piece) and each sequence's keys as fractions of the cache's.
LENGTHS = (
    *((8, 32, 8, 8192, 128, 1, page, "one long") for page in (0, 64)),
    *((8, 32, 8, 8192, 128, 1, page, "even steps") for page in (0, 64)),
    *((2, 32, 8, 8192, 128, 1, page, kind) for kind in ("equal", "one long", "halves") for page in (0, 64)),
    (16, 64, 8, 8192, 128, 1, 0, "one long"),
)
FRACTIONS = {
    "equal": lambda batch: [1.0] * batch,
    "even steps": lambda batch: [1 - i / batch for i in range(batch)],
    "one long": lambda batch: [1.0] + [1 / 64] * (batch - 1),
    "halves": lambda batch: [1.0] + [1 / 2] * (batch - 1),
}
POINTS = {"bound": BOUND, "read": READ, "tokens": TOKENS, "lengths": LENGTHS}
PAGE = 64


def variants(point: tuple) -> dict[str, dict]:
    """Name the variants of a point: {name: arguments of `arrangement.arrange`}."""
    batch, heads, kv_heads, _, head_dim, new_tokens = point
    rows, all_heads = heads // kv_heads * new_tokens, batch * kv_heads
    default = arrangement(point, {}).plan
    found: dict[str, dict] = {"default": {}}
    if default.cluster:
        base: dict = {"cluster": default.cluster}
        found |= {f"box {box}": base | {"box": box} for box in (64, 32, 16)}
        return found | {"hint": base | {"hint": True}, "no hint": base | {"hint": False}}
    if rows < 32:
        large, small = (256, 128) if head_dim == 64 else (128, 64)
        one: dict = {"consumers": 0, "aligned": True, "programs": max(all_heads, 132) if all_heads < 132 else all_heads}
        two = one | {"per_sm": 2, "block_n": small}
        best = two if default.per_sm == 2 else one | {"block_n": default.block_n}
        found |= {f"{large} x {slots}": one | {"block_n": large, "slots": slots} for slots in (4, 6)}
        found |= {f"{small} x {slots}": one | {"block_n": small, "slots": slots} for slots in (4, 6, 8, 12)}
        if all_heads > 132:
            found |= {f"two an SM, {small} x {slots}": two | {"slots": slots} for slots in (4, 6)}
            found["132 programs"] = best | {"programs": 132 * default.per_sm}
        short = best | {"slots": 4}
        found |= {f"x 4, box {box}": short | {"box": box} for box in (32, 16)}
        found |= {"x 4, turned": short | {"turned": True}}
        found |= {f"x 4, hint {kind}": short | {"hint": kind} for kind in (True, "unchanged")}
        found |= {"box 32": best | {"box": 32}, "turned": best | {"turned": True}, "hint": best | {"hint": True}}
        return found
    own: dict = {"consumers": default.consumers, "block_n": default.block_n, "per_sm": default.per_sm}
    own |= {"ahead": True} if default.ahead else {}
    own |= {"slots": default.slots}
    found |= {"box 32": own | {"box": 32}, "turned": own | {"turned": True}, "hint": own | {"hint": True}}
    if default.per_sm == 1 and not default.ahead:
        found["64 x 6"] = own | {"block_n": 64, "slots": 6}
    if default.ahead:
        whole: dict = {"consumers": 2, "ahead": False, "aligned": True, "programs": all_heads}
        found["ahead, 128 x 4"] = own | {"slots": 4, "block_n": 128}
        found["ahead, K first, early"] = own | {"k_first": True, "prefill": True}
        found["ahead, forwards"] = own | {"backward": False}
        found |= {f"a program a head, 128 x {slots}": whole | {"block_n": 128, "slots": slots} for slots in (4, 6)}
        found |= {f"a program a head, 64 x {slots}": whole | {"block_n": 64, "slots": slots} for slots in (8,)}
        found["a program a head, 128 x 4, backward"] = whole | {"block_n": 128, "slots": 4, "backward": True}
        found["two tiles, two an SM"] = {"consumers": 1, "per_sm": 2, "block_n": 64, "slots": 4}
    return found


def prepare_bound(point: tuple, fa4: bool) -> list[tuple[dict, dict[str, Callable], int]]:
    """Return a row, the calls to time, and the bytes of the cache, for each series."""
    series, named = [], variants(point)
    named = {name: choices for name, choices in named.items() if fits(arrangement(point, choices))}
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
    block = 128 if width == 128 else 256
    for programs, slots, box, in_turn in (
        (128, 6, block, False),
        (128, 4, block, False),
        (128, 3, block, False),
        (128, 2, block, False),
        (128, 4, 32, False),
        (128, 4, 16, False),
        (128, 4, block, True),
        (128, 4, 32, True),
        (132, 4, block, True),
        (132, 6, block, True),
    ):
        name = f"{programs} programs, {slots} slots, box {box}, {'in turn' if in_turn else 'runs'}"
        calls[name] = reader(k.view(rows, width), v.view(rows, width), programs, block, slots, box, in_turn)
        calls[name]()
    calls["copy of half"] = partial(torch.empty_like(k).copy_, v)
    calls["sum"] = partial(torch.sum, k.view(torch.int32))
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
    named = {"default": {}, "cluster": {"cluster": 8}, "cluster, hint": {"cluster": 8, "hint": True}}
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
    parts = {16: 4, 64: 2}.get(sizes[0] * sizes[2], 0)
    named: dict[str, dict] = {"default": {}}
    for ahead in (4, 16):
        own = {"length_parts": ahead}
        named[f"no clusters, {ahead} parts"] = own | {"cluster": 0}
        if parts:
            named[f"clusters, {ahead} parts"] = own | {"cluster": parts}
    if parts:
        named["clusters, never apart"] = {"cluster": parts, "else_shared": False}
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


def cases_of(options) -> list[tuple[str, tuple]]:
    """Return the points of the chosen tables: the processes take them in turn."""
    return [(table, point) for table in options.tables for point in POINTS[table]]


def worker(options, part: int) -> None:
    """Prepare every `workers`-th row beside the other processes, then time each alone on the GPU."""
    path = options.out.with_suffix(f".{part}.json")
    record = Record(path, "decode: what bounds it", "cuda", l2="cold", iterations=ITERATIONS)
    turns = Turns(options.out.with_suffix(".turns"), options.workers, options.prepare)
    ways: dict[str, Callable] = {
        "bound": partial(prepare_bound, fa4=options.fa4),
        "read": prepare_read,
        "tokens": prepare_tokens,
        "lengths": prepare_lengths,
    }
    cases, prepared = cases_of(options)[part :: options.workers], []
    for table, point in cases:
        if turns.time_left():
            prepared += [(table, each) for each in ways[table](point)]
    torch.cuda.synchronize()
    turns.wait_for_all(str(part))

    def timed(each: tuple) -> dict:
        table, (row, calls, bytes_) = each
        with turns.alone():
            samples = time_together(calls, bytes_, ITERATIONS)
        us = {name: round(median(times), 2) for name, times in samples.items()}
        return {"table": table} | row | {"bytes": bytes_, "us": us}

    if record.fill(prepared, timed, lambda row: "") and len(prepared) >= len(cases):
        record.finish()


def main() -> None:
    """Start the processes, join what they wrote, and print it."""
    parser = arguments_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=85, help="stop after this time, with the rows so far")
    parser.add_argument("--prepare", type=float, default=45, help="seconds to prepare rows")
    parser.add_argument("--fa4", action="store_true", help="time flash-attn-4; it compiles for seconds")
    parser.add_argument("--tables", nargs="*", default=list(POINTS), choices=list(POINTS))
    parser.add_argument("--workers", type=int, default=14, help="processes")
    parser.add_argument("--part", type=int, help="the rows of one process; by default all are started")
    options = parser.parse_args()
    if options.part is not None:
        worker(options, options.part)
        return
    began = time.monotonic()
    command = [sys.executable, "-m", "tools.record.decode_bound", *sys.argv[1:]]
    run_parts([[*command, "--part", str(i)] for i in range(options.workers)], began + options.seconds)
    parts = [path for i in range(options.workers) if (path := options.out.with_suffix(f".{i}.json")).exists()]
    records = [read_record(path) for path in parts]
    cases = cases_of(options)
    rows = [row for r in records for row in r.get("rows", ())]
    of_case = {
        case: [row for row in rows if row["table"] == case[0] and tuple(row["point"][: len(case[1])]) == case[1]]
        for case in cases
    }
    record = Record(options.out, "decode: what bounds it")
    ordered = [row for found in of_case.values() for row in sorted(found, key=lambda row: row["series"])]
    record.contents = {**records[0], "complete": all(r["complete"] for r in records), "rows": ordered}
    record.save()
    print(machine_name(record.contents), f"{time.monotonic() - began:.0f} s")
    print("\n".join(show(found) for found in of_case.values() if found))
    for path in parts:
        path.unlink()


if __name__ == "__main__":
    main()
