"""Measure entries 43 and 44 of decode's log: clusters with lengths, pages and two warpgroups; fp8 products in fp16.

    python -m tools.record.decode_clusters --workers 14 --seconds 85 --fa3 fa3/_C.so --fa4 --out decode_clusters.json

- `pages`: one new token, a cache in one piece, with lengths, and in pages of random order, by the default and by clusters; the
  goal is that pages cost 3% at most.
- `lengths`: sequences whose lengths differ, so that programs of a short one have nothing to do while others read.
- `tokens`: many query rows, by one warpgroup and by two, beside the default, one token, and the other libraries.
- `fp8`: a cache in e4m3 and many query rows, with products in the queries' type and in fp16, beside the same cache in bf16.

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
# Sequences, heads, heads of keys, keys, head dimension; tokens of a page, or 0 for lengths alone.
CACHES = {(1, 32, 8, 32768, 128): 8, (8, 32, 8, 8192, 128): 2, (1, 32, 8, 8192, 128): 8}
PAGED = [("pages", (*cache, page)) for cache in CACHES for page in (0, 256, 64, 16)]
UNEQUAL = [("lengths", (8, 32, 8, 8192, 128, page)) for page in (0, 64)]
TOKENS = [
    ("tokens", (batch, heads, 8, keys, 128, new))
    for batch, heads, keys in ((1, 32, 8192), (1, 32, 2048), (1, 32, 32768), (8, 32, 8192), (1, 32, 131072))
    for new in (16, 8, 1)
] + [("tokens", (16, 64, 8, 8192, 128, 16))]
FP8 = [
    ("fp8", (batch, heads, 8, keys, 128, new))
    for batch, heads, keys, new in (
        (64, 32, 4096, 16),
        (16, 64, 8192, 16),
        (8, 32, 8192, 16),
        (128, 64, 1024, 16),
        (1, 32, 131072, 16),
        (1, 32, 8192, 16),
    )
]
CASES = [*TOKENS, *PAGED, *UNEQUAL, *FP8]


def variants_of_tokens(point: tuple) -> dict[str, dict]:
    """Name the ways to compute a point with many query rows: {name: arguments of `arrangement.arrange`}."""
    batch, heads, kv_heads, keys, _, new = point
    found: dict[str, dict] = {"default": {}}
    parts = {8: 8, 64: 2}.get(batch * kv_heads)
    if parts is None:
        return found | {"four slots": {"slots": 4}}
    hint = 16 << 20 <= 4 * batch * kv_heads * keys * 128 <= 192 << 20
    for in_turn in (True, False):
        way = {"cluster": parts, "hint": hint, "in_turn": in_turn}
        order = "in turn" if in_turn else "runs"
        found[f"cluster, {order}"] = way
        if heads // kv_heads * new >= 32:
            found[f"two teams, {order}"] = way | {"teams": 2}
    if heads // kv_heads * new >= 32 and not hint and batch * keys < 1 << 17:
        found["two teams, hint"] = {"cluster": parts, "hint": True, "teams": 2}
    return distinct(point, found)


def prepare_tokens(point: tuple, fa3: bool, fa4: bool) -> tuple[dict, dict[str, Callable], int]:
    """Return a row so far, the calls to time, and the bytes of the cache."""
    q, k, v = draw(*point)
    named = variants_of_tokens(point)
    errors: dict[str, float] = {}
    calls, left_out = right_calls(named, decode_reference(q[:1], k[:1], v[:1]), q, k, v, errors=errors)
    found = others(q, k, v, fa3, fa4 and point[0] == 16, left_out)
    calls |= {n: call for n, call in found.items() if n not in NOT_TIMED and (n != "cudnn" or point[5] == 1)}
    own = {name: describe(arrangement(point, choices)) for name, choices in named.items()}
    return {"point": list(point), "own": own, "errors": errors, "left_out": left_out}, calls, 4 * k.numel()


def prepare_pages(point: tuple, fa3: bool, unequal: bool) -> tuple[dict, dict[str, Callable], int]:
    """Prepare one new token over a cache with lengths or in pages, by the default and by clusters."""
    *cache, page = point
    parts = CACHES[tuple(cache)]
    q, k, v = draw(*cache, 1)
    used = torch.full((len(q),), cache[3], dtype=torch.int32, device="cuda")
    if unequal:
        used = torch.linspace(cache[3] // 8, cache[3], len(q), device="cuda").int().flip(0)
    seqlens = {"seqlens": used[:1]} if unequal else {}
    expected = decode_reference(q[:1], k[:1], v[:1], **seqlens)
    row: dict = {"point": list(point), "left_out": {}, "errors": {}}
    calls: dict[str, Callable] = {}
    if not unequal:
        calls, row["left_out"] = right_calls({"one piece": {}}, expected, q, k, v)
    named = {"default": {}, "cluster": {"cluster": parts, "hint": False}}
    named["cluster, hint"] = {"cluster": parts, "hint": True}
    if unequal:
        named = {
            "default": {},
            "cluster": {"cluster": parts},
            "cluster, never apart": {"cluster": parts, "else_shared": False},
        }
    tensors: tuple = (q, k, v, used, None)
    if page and not unequal:
        named["cluster of two teams"] = {"cluster": parts, "hint": False, "teams": 2}
    if page:
        table = torch.randperm(cache[0] * cache[3] // page, device="cuda").int().view(cache[0], -1)
        pages = [in_pages(x, page, table) for x in (k, v)]
        tensors = (q, *pages, used, table)
    found, missing = right_calls(named, expected, *tensors, errors=row["errors"])
    calls |= found
    row["left_out"] |= missing
    if fa3:
        tokens_first = [x.transpose(1, 2) for x in tensors[:3]]
        options = {"seqused_k": used, "num_splits": 0} | ({"page_table": tensors[4]} if page else {})
        calls["fa3"] = partial(torch.ops.flash_attn_3.fwd, *tokens_first, **options)
    return row, calls, 4 * k.numel()


def prepare_fp8(point: tuple) -> tuple[dict, dict[str, Callable], int]:
    """Prepare a cache in e4m3, read by `quantized.py` in both ways, beside the same one in bf16."""
    q, k, v = draw(*point)
    row: dict = {"point": list(point), "errors": {}}
    calls, row["left_out"] = right_calls({"bf16": {}}, decode_reference(q[:1], k[:1], v[:1]), q, k, v)
    small, scales = [x.to(torch.float8_e4m3fn) for x in (k, v)], torch.rand(2, point[2], device="cuda") + 0.5
    expected = decode_reference(q[:1], small[0][:1], small[1][:1], kv_scales=scales)
    named: dict[str, dict] = {"fp8": {"fp8": True}, "fp8, fp16": {"fp8": True, "fp16": True}}
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


def worker(options, part: int) -> None:
    """Prepare every `workers`-th row beside the other processes, then time each alone on the GPU."""
    record = Record(
        options.out.with_suffix(f".{part}.json"), "decode: clusters", "cuda", l2="cold", iterations=ITERATIONS
    )
    if options.fa3:
        torch.ops.load_library(str(options.fa3.expanduser()))
    turns = Turns(options.out.with_suffix(".turns"), options.workers, options.prepare)
    fa3, prepared = options.fa3 is not None, []
    prepare: dict[str, Callable] = {
        "tokens": partial(prepare_tokens, fa3=fa3, fa4=options.fa4),
        "pages": partial(prepare_pages, fa3=fa3, unequal=False),
        "lengths": partial(prepare_pages, fa3=fa3, unequal=True),
        "fp8": prepare_fp8,
    }
    for table, point in CASES[part :: options.workers]:
        if turns.time_left():
            prepared.append((table, prepare[table](point)))
    torch.cuda.synchronize()
    turns.wait_for_all(str(part))

    def timed(each: tuple) -> dict:
        table, (row, calls, bytes_) = each
        with turns.alone():
            samples = time_together(calls, bytes_, ITERATIONS)
        us = {name: round(median(times), 2) for name, times in samples.items()}
        return {"table": table} | row | {"bytes": bytes_, "us": us}

    if record.fill(prepared, timed, lambda row: "") and len(prepared) == len(CASES[part :: options.workers]):
        record.finish()


def main() -> None:
    """Start the processes, join what they wrote, and print it."""
    parser = arguments_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=85, help="stop after this time, with the rows so far")
    parser.add_argument("--prepare", type=float, default=40, help="seconds to prepare rows")
    parser.add_argument("--fa3", type=Path, help="the built library of FlashAttention 3")
    parser.add_argument("--fa4", action="store_true", help="time flash-attn-4 at 16 sequences")
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
    order = {case: i for i, case in enumerate(CASES)}
    rows = sorted((row for r in records for row in r["rows"]), key=lambda row: order[row["table"], tuple(row["point"])])
    record = Record(options.out, "decode: clusters")
    record.contents = {**records[0], "complete": len(rows) == len(CASES), "rows": rows}
    record.save()
    print(machine_name(record.contents), f"{time.monotonic() - began:.0f} s")
    print("\n".join(show(row) for row in rows))
    for path in parts:
        path.unlink()


if __name__ == "__main__":
    main()
