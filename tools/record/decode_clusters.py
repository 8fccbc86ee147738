"""Measure entries 43 and 44 of decode's log: clusters with lengths and pages; shorter rings; fp8 products in fp16.

    python -m tools.record.decode_clusters --workers 14 --seconds 85 --fa3 fa3/_C.so --fa4 --out decode_clusters.json

- `tokens`: many query rows by clusters, beside the default and the other libraries.
- `pages`: a cache in one piece, with lengths, and in pages of random order, by the default and without clusters; the goal is that
  pages cost 3% at most. Sequences whose lengths differ are there, too.
- `fp8`: a cache in e4m3 and many query rows, with products in the queries' type and in fp16, beside the same cache in bf16.
- `rings`: fewer tiles of K and V on their way.

All calls of a row are timed in one process, interleaved, with a cold L2 cache; the processes prepare side by side and time one
after another (`turns.py`). A variant that is not right on the drawn tensors, against float64, is named and not timed.
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
from tools.record.decode_variants import arrangement, describe, distinct, right_calls
from tools.record.turns import Turns, run_parts
from utils.attention import decode_reference

ITERATIONS = 21
NOT_TIMED = "fa2", "fa3_lengths", "flashinfer"
# Sequences, heads, heads of keys, keys, head dimension, new tokens.
TOKENS = tuple(
    (batch, 32, 8, keys, 128, new)
    for batch, keys in ((1, 8192), (1, 2048), (1, 32768), (8, 8192), (1, 131072), (4, 4096))
    for new in (16, 8)
)
RINGS = tuple(
    (*cache, new)
    for cache in ((16, 64, 8, 8192, 128), (64, 32, 8, 4096, 128), (128, 64, 8, 1024, 128), (1, 32, 8, 131072, 128))
    for new in (16, 8, 1)
)
# The same, then tokens of a page (0: a cache in one piece, with lengths) and the kind of lengths (LENGTHS).
PAGES = (
    *((1, 32, 8, 32768, 128, 1, page, "equal") for page in (0, 256, 64, 16)),
    *((8, 32, 8, 8192, 128, 1, page, "equal") for page in (0, 256, 64, 16)),
    *((8, 32, 8, 8192, 128, 1, page, kind) for kind in ("even steps", "one long") for page in (0, 64)),
    (8, 32, 8, 1024, 128, 1, 64, "equal"),
    (2, 32, 8, 8192, 128, 1, 64, "equal"),
    (1, 32, 8, 8192, 128, 8, 64, "equal"),
    (1, 32, 8, 32768, 128, 16, 64, "equal"),
)
FP8 = (
    (64, 32, 8, 4096, 128, 16),
    (16, 64, 8, 8192, 128, 16),
    (8, 32, 8, 8192, 128, 16),
    (128, 64, 8, 1024, 128, 16),
    (1, 32, 8, 131072, 128, 16),
    (1, 32, 8, 8192, 128, 16),
)
POINTS = {"tokens": TOKENS, "pages": PAGES, "fp8": FP8, "rings": RINGS}
# Keys of each sequence, as fractions of the cache's: its length is that of the longest.
LENGTHS = {
    "equal": lambda batch: [1.0] * batch,
    "even steps": lambda batch: [1 - i / batch for i in range(batch)],
    "one long": lambda batch: [1.0] + [1 / 64] * (batch - 1),
}


def clusters_of(point: tuple) -> int:
    """Return how many programs of a cluster there are for a head, by the number of heads."""
    return {8: 8, 16: 4, 32: 2, 64: 2}[point[0] * point[2]]


def prepare(point: tuple, named: dict[str, dict], fa3: bool, fa4: bool) -> tuple[dict, dict[str, Callable], int]:
    """Return a row so far, the calls to time, and the bytes of the cache."""
    q, k, v = draw(*point)
    named, errors = distinct(point, named), dict[str, float]()
    calls, left_out = right_calls(named, decode_reference(q[:1], k[:1], v[:1]), q, k, v, errors=errors)
    found = others(q, k, v, fa3, fa4, left_out)
    calls |= {n: call for n, call in found.items() if n not in NOT_TIMED and (n != "cudnn" or point[5] == 1)}
    own = {name: describe(arrangement(point, choices)) for name, choices in named.items()}
    return {"point": list(point), "own": own, "errors": errors, "left_out": left_out}, calls, 4 * k.numel()


def prepare_tokens(point: tuple, fa3: bool) -> tuple[dict, dict[str, Callable], int]:
    """Prepare many query rows: clusters, whose blocks are taken in turn or in runs."""
    way = {"cluster": clusters_of(point)}
    named = {"default": {}, "runs": way, "in turn": way | {"in_turn": True}}
    return prepare(point, named, fa3, False)


def prepare_rings(point: tuple, fa3: bool, fa4: bool) -> tuple[dict, dict[str, Callable], int]:
    """Prepare shorter rings: FlashAttention 4 has two blocks of K and two of V."""
    plan = arrangement(point, {}).plan
    own = {"cluster": plan.cluster} if plan.cluster else {}
    named = {"default": {}} | {
        f"{slots} slots": own | {"slots": slots} for slots in (4, 5, 6, 8) if slots != plan.slots
    }
    if plan.cluster:
        named.pop("5 slots", None)  # as many of K as of V
    return prepare(point, named, fa3, fa4 and point[0] > 1)


def prepare_pages(point: tuple, fa3: bool) -> tuple[dict, dict[str, Callable], int]:
    """Prepare a cache with lengths or in pages: the default, and no clusters."""
    *sizes, page, kind = point
    q, k, v = draw(*sizes)
    fractions = LENGTHS[kind](len(q))
    used = torch.tensor([max(1, int(x * sizes[3])) for x in fractions], dtype=torch.int32, device="cuda")
    expected = decode_reference(q[:1], k[:1], v[:1])  # the first sequence is the longest one
    row: dict = {"point": list(point), "left_out": {}, "errors": {}}
    calls: dict[str, Callable] = {}
    if kind == "equal":
        calls, row["left_out"] = right_calls({"one piece": {}}, expected, q, k, v)
    parts = clusters_of(point)
    named: dict[str, dict] = {"default": {}, "no clusters": {"cluster": 0}}
    if sizes[0] == 2 or sizes[5] > 1:
        named["cluster"] = {"cluster": parts}
    tensors: tuple = (q, k, v, used, None)
    if page:
        table = torch.randperm(sizes[0] * sizes[3] // page, device="cuda").int().view(sizes[0], -1)
        tensors = (q, *(in_pages(x, page, table) for x in (k, v)), used, table)
    found, missing = right_calls(named, expected, *tensors, errors=row["errors"])
    calls |= found
    row["left_out"] |= missing
    if fa3:
        tokens_first = [x.transpose(1, 2) for x in tensors[:3]]
        options = {"seqused_k": used, "num_splits": 0, "is_causal": sizes[5] > 1}
        options |= {"page_table": tensors[4]} if page else {}
        calls["fa3"] = partial(torch.ops.flash_attn_3.fwd, *tokens_first, **options)
    return row, calls, 4 * k.numel()


def prepare_fp8(point: tuple) -> tuple[dict, dict[str, Callable], int]:
    """Prepare a cache in e4m3, read by `quantized.py` in both ways, beside the same one in bf16."""
    q, k, v = draw(*point)
    row: dict = {"point": list(point), "errors": {}}
    calls, row["left_out"] = right_calls({"bf16": {}}, decode_reference(q[:1], k[:1], v[:1]), q, k, v)
    small, scales = [x.to(torch.float8_e4m3fn) for x in (k, v)], torch.rand(2, point[2], device="cuda") + 0.5
    expected = decode_reference(q[:1], small[0][:1], small[1][:1], kv_scales=scales)
    named: dict[str, dict] = {"fp8": {"fp8": True, "fp16": False}, "fp8, fp16": {"fp8": True, "fp16": True}}
    found, missing = right_calls(named, expected, q, *small, scales=scales, errors=row["errors"])
    row["left_out"] |= missing
    return row, calls | found, 2 * k.numel()


def show(row: dict) -> str:
    """Return a row as a line: the times, the fastest first, and what was not timed."""
    times = sorted(row.get("us", {}).items(), key=lambda pair: pair[1])
    out = {name: why[:60] for name, why in row["left_out"].items() if name not in (*NOT_TIMED, "cudnn")}
    point = "x".join(map(str, row["point"]))
    return (
        f"{row['table']} {point}: "
        + ", ".join(f"{name} {us:.1f}" for name, us in times)
        + (f" OUT {out}" if out else "")
    )


def cases_of(options) -> list[tuple[str, tuple]]:
    """Return the points of the chosen tables: the processes take them in turn."""
    return [(table, point) for table in options.tables for point in POINTS[table]]


def worker(options, part: int) -> None:
    """Prepare every `workers`-th row beside the other processes, then time each alone on the GPU."""
    record = Record(
        options.out.with_suffix(f".{part}.json"), "decode: clusters", "cuda", l2="cold", iterations=ITERATIONS
    )
    if options.fa3:
        torch.ops.load_library(str(options.fa3.expanduser()))
    turns = Turns(options.out.with_suffix(".turns"), options.workers, options.prepare)
    fa3, prepared = options.fa3 is not None, []
    ways: dict[str, Callable] = {
        "tokens": partial(prepare_tokens, fa3=fa3),
        "pages": partial(prepare_pages, fa3=fa3),
        "fp8": prepare_fp8,
        "rings": partial(prepare_rings, fa3=fa3, fa4=options.fa4),
    }
    cases = cases_of(options)[part :: options.workers]
    for table, point in cases:
        if turns.time_left():
            prepared.append((table, ways[table](point)))
    torch.cuda.synchronize()
    turns.wait_for_all(str(part))

    def timed(each: tuple) -> dict:
        table, (row, calls, bytes_) = each
        with turns.alone():
            samples = time_together(calls, bytes_, ITERATIONS)
        us = {name: round(median(times), 2) for name, times in samples.items()}
        return {"table": table} | row | {"bytes": bytes_, "us": us}

    if record.fill(prepared, timed, lambda row: "") and len(prepared) == len(cases):
        record.finish()


def main() -> None:
    """Start the processes, join what they wrote, and print it."""
    parser = arguments_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=85, help="stop after this time, with the rows so far")
    parser.add_argument("--prepare", type=float, default=40, help="seconds to prepare rows")
    parser.add_argument("--fa3", type=Path, help="the built library of FlashAttention 3")
    parser.add_argument(
        "--fa4", action="store_true", help="time flash-attn-4 in the table of rings; it compiles for seconds"
    )
    parser.add_argument("--tables", nargs="*", default=list(POINTS), choices=list(POINTS))
    parser.add_argument("--workers", type=int, default=14, help="processes")
    parser.add_argument("--part", type=int, help="the rows of one process; by default all are started")
    options = parser.parse_args()
    if options.part is not None:
        worker(options, options.part)
        return
    began = time.monotonic()
    command = [sys.executable, "-m", "tools.record.decode_clusters", *sys.argv[1:]]
    run_parts([[*command, "--part", str(i)] for i in range(options.workers)], began + options.seconds)
    parts = [path for i in range(options.workers) if (path := options.out.with_suffix(f".{i}.json")).exists()]
    records = [read_record(path) for path in parts]
    cases = cases_of(options)
    order = {case: i for i, case in enumerate(cases)}
    rows = sorted((row for r in records for row in r["rows"]), key=lambda row: order[row["table"], tuple(row["point"])])
    record = Record(options.out, "decode: clusters")
    record.contents = {**records[0], "complete": len(rows) == len(cases), "rows": rows}
    record.save()
    print(machine_name(record.contents), f"{time.monotonic() - began:.0f} s")
    print("\n".join(show(row) for row in rows))
    for path in parts:
        path.unlink()


if __name__ == "__main__":
    main()
