"""Measure the variants of the decode kernel at the thirty points of `tools.record.decode`, and in pages, on a Hopper GPU.

    python -m tools.record.decode_variants right --seconds 40                            # random cases, float64
    python -m tools.record.decode_variants points --warm 0/8                             # compile, in 8 processes
    python -m tools.record.decode_variants points --fa3 fa3/_C.so --out decode_variants.json
    python -m tools.record.decode_variants pages --fa3 fa3/_C.so --out decode_variants_pages.json
    python -m tools.record.decode_variants fp8 --out decode_fp8.json

A variant is a set of arguments of `Launch`: which kernel (`consumers`), how parts are merged, how many programs share the
keys, how many keys a block has. All variants of a row and the other libraries are timed in one process, interleaved,
with a cold L2 cache. A variant whose result is not attention is named and not timed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tools.record.common import Record, arguments_parser
from tools.record.decode import CACHES, NEW_TOKENS, PAGED_CACHES, PAGES, draw, in_pages, median, others, time_together
from utils.attention import decode_reference
from utils.attention.gluon.decode.launch import TOGETHER_BYTES, Launch
from utils.attention.gluon.decode.plan import Plan, make_plan

WRONG = 5e-3  # relative error; the kernels have 2e-3 in bf16
ITERATIONS = 11


def variants(point: tuple) -> dict[str, dict]:
    """Name the variants that are worth a measurement at a point: {name: arguments of Launch}."""
    batch, heads, kv_heads, keys, head_dim, new_tokens = point
    rows = heads // kv_heads * new_tokens
    wide = head_dim == 256
    consumers = 1 if rows <= 64 else 2
    found: dict[str, dict] = {"keys": {}, "rows": {"consumers": consumers}}
    if rows >= 32:
        found["rows, other softmax"] = {"consumers": consumers, "halves": head_dim == 64}
    if rows >= 64 and not wide:
        found["rows, one Q"] = {"consumers": consumers, "q_slots": 1}
        found["rows, two Q"] = {"consumers": consumers, "q_slots": 2}
    if batch * kv_heads > 132:
        found["rows, equal shares"] = {"consumers": consumers, "aligned": False}
    if 4 * batch * kv_heads * keys * head_dim <= TOGETHER_BYTES:
        # What counts is launch, split and merge: who merges, and two to four blocks a program.
        small = 32 if wide else 64
        for name, kernel in (("keys", {}), ("rows", {"consumers": consumers})):
            for merge in ("last", "second"):
                found[f"{name}, merged by {merge}"] = kernel | {"merge": merge}
            found[f"{name}, 128 programs"] = kernel | {"programs": 128}
            found[f"{name}, small blocks"] = kernel | {"programs": 128, "block_n": small}
            found[f"{name}, small blocks, last"] = kernel | {"programs": 128, "block_n": small, "merge": "last"}
            found[f"{name}, 64 programs"] = kernel | {"programs": 64, "block_n": small}
    elif batch == 1:
        found["keys, 128 programs"] = {"programs": 128}
        found["rows, 128 programs"] = {"consumers": consumers, "programs": 128}
    # What is the default at this point is not measured again under another name.
    distinct: dict[tuple, str] = {}
    for name, choices in found.items():
        outside = tuple((key, choices[key]) for key in ("programs", "aligned", "merge") if key in choices)
        distinct.setdefault((plan_of(point, choices), *outside), name)
    return {name: found[name] for name in distinct.values()}


def plan_of(point: tuple, choices: dict) -> Plan:
    """Return the tile of a variant at a point."""
    _, heads, kv_heads, _, head_dim, new_tokens = point
    tile = {key: value for key, value in choices.items() if key not in ("programs", "aligned")}
    return make_plan(head_dim, heads // kv_heads, new_tokens, **tile)


def bound(choices: dict, q, k, v, seqlens=None, table=None, scales=None, **case) -> Callable[[], torch.Tensor]:
    """Return a variant's call."""
    causal, window = case.get("causal", True), case.get("window") or 0
    launch = Launch(q, k, v, causal, window, seqlens is not None, table, **choices)
    return partial(launch, q, k, v, q.shape[-1] ** -0.5, seqlens, table, scales)


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error against float64."""
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def right_calls(
    named: dict[str, dict], expected: torch.Tensor, *tensors, scales=None
) -> tuple[dict[str, Callable], dict[str, str]]:
    """Return the variants' calls whose first sequence is right, each tried twice, and why others are left out."""
    calls, left_out = {}, {}
    for name, choices in named.items():
        try:
            call = bound(choices, *tensors, scales=scales)
            errors = [
                error_of(call()[:1], expected) for _ in range(2)
            ]  # the second call finds the counters of the first
            if max(errors) < WRONG:
                calls[name] = call
            else:
                left_out[name] = f"wrong: relative errors {errors}"
        except Exception as error:  # one variant that cannot run must not end the others
            left_out[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[-1][:160]}"
        if name in left_out:
            print(f"  {name}: {left_out[name]}", flush=True)
    return calls, left_out


def measure_point(point: tuple, fa3: bool, warm: bool = False, rows: bool = True) -> dict:
    """Measure a point's variants beside the other libraries; warm: only compile them. rows: query rows as rows, too."""
    q, k, v = draw(*point)
    expected = decode_reference(q[:1], k[:1], v[:1])
    chosen = {name: choices for name, choices in variants(point).items() if rows or "consumers" not in choices}
    calls, left_out = right_calls(chosen, expected, q, k, v)
    row: dict = {"point": list(point), "left_out": left_out}
    if warm or not calls:
        return row
    calls |= others(q, k, v, fa3, False, left_out)
    size = 2 * k.numel() * k.element_size()
    us = {name: round(median(times), 2) for name, times in time_together(calls, size, ITERATIONS).items()}
    own = {name: us[name] for name in us if name in chosen}
    peers = {name: us[name] for name in us if name not in own}
    best = min(own, key=own.__getitem__)
    ratio = round(min(peers.values()) / own[best], 3) if peers else None
    return row | {"us": us, "best": best, "ratio": ratio, "tb_s": round(size / own[best] / 1e6, 3)}


def measure_pages(cache: tuple, fa3: bool, warm: bool = False) -> dict:
    """Measure one new token over a cache in pages: both kernels beside one piece and FlashAttention 3."""
    q, k, v = draw(*cache, 1)
    used = torch.full((len(q),), cache[3], dtype=torch.int32, device="cuda")
    expected = decode_reference(q[:1], k[:1], v[:1])
    kernels: dict[str, dict] = {"keys": {}, "rows": {"consumers": 1}}
    calls, left_out = right_calls(
        {f"one piece, {name}": choices for name, choices in kernels.items()}, expected, q, k, v
    )
    for page in PAGES:
        table = torch.randperm(cache[0] * cache[3] // page, device="cuda").int().view(cache[0], -1)
        pages = [in_pages(x, page, table) for x in (k, v)]
        named = {f"pages of {page}, {name}": choices for name, choices in kernels.items()}
        found, missing = right_calls(named, expected, q, *pages, used, table)
        calls |= found
        left_out |= missing
        if fa3 and not warm:
            tokens_first = [x.transpose(1, 2) for x in (q, *pages)]
            options = {"seqused_k": used, "page_table": table, "num_splits": 0}
            calls[f"pages of {page}, FA3"] = partial(torch.ops.flash_attn_3.fwd, *tokens_first, **options)
    row: dict = {"cache": list(cache), "left_out": left_out}
    if warm or not calls:
        return row
    size = 2 * k.numel() * k.element_size()
    return row | {"us": {n: round(median(t), 2) for n, t in time_together(calls, size, ITERATIONS).items()}}


def measure_fp8(point: tuple, warm: bool = False) -> dict:
    """Measure a cache in e4m3 beside the same one in bf16, which both kernels read."""
    q, k, v = draw(*point)
    kernels: dict[str, dict] = {"bf16, keys": {}, "bf16, rows": {"consumers": 1}}
    calls, left_out = right_calls(kernels, decode_reference(q[:1], k[:1], v[:1]), q, k, v)
    small, scales = [x.to(torch.float8_e4m3fn) for x in (k, v)], torch.rand(2, point[2], device="cuda") + 0.5
    expected = decode_reference(q[:1], small[0][:1], small[1][:1], kv_scales=scales)
    named: dict[str, dict] = {"fp8": {"fp8": True}}
    if point[4] <= 128:
        named["fp8, half the keys a block"] = {"fp8": True, "block_n": 32 if point[4] == 128 else 64}
    found, missing = right_calls(named, expected, q, *small, scales=scales)
    calls |= found
    row: dict = {"point": list(point), "left_out": left_out | missing}
    if warm or not calls:
        return row
    us = {n: round(median(t), 2) for n, t in time_together(calls, k.numel(), ITERATIONS).items()}
    bf16, fp8 = (min(us[n] for n in us if n.startswith(kind)) for kind in ("bf16", "fp8"))
    return row | {"us": us, "ratio": round(bf16 / fp8, 3), "tb_s": round(2 * k.numel() / fp8 / 1e6, 3)}


def random_case(seed: int) -> dict:
    """Compare one variant on random shapes, lengths, pages and masks with float64, twice."""
    from tests.utils.attention.decode_cases import random_cache

    rng = random.Random(seed)
    dtype = rng.choice((torch.bfloat16, torch.float16))
    consumers = rng.choice((0, 1, 2, 1, 2))
    batch, kv_heads, group = rng.choice((1, 2, 5, 17)), rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 4, 8, 16))
    sq, head_dim = rng.choice((1, 2, 7, 16, 33)), rng.choice((64, 128, 128, 256, 80))
    slots, page = rng.choice((5, 129, 700, 1500, 4097)), rng.choice((None, None, 16, 64, 256))
    case = {"causal": rng.random() < 0.7, "window": rng.choice((None, None, 1, 100, 1000))}
    k, v, lengths, table = (
        x if x is None else x.cuda() for x in random_cache(batch, kv_heads, slots, head_dim, dtype, seed, page)
    )
    q = torch.randn(batch, kv_heads * group, sq, head_dim, device="cuda", dtype=dtype)
    choices = {"consumers": consumers, "merge": rng.choice(("last", "second")), "programs": rng.choice((0, 3, 128))}
    scales = None
    if rng.random() < 0.25 and head_dim % 16 == 0:
        choices = choices | {"consumers": 1, "fp8": True}
        k, v, scales = (
            k.to(torch.float8_e4m3fn),
            v.to(torch.float8_e4m3fn),
            torch.rand(2, kv_heads, device="cuda") + 0.5,
        )
    call = bound(choices, q, k, v, lengths, table, scales, **case)
    expected = decode_reference(q, k, v, seqlens=lengths, block_table=table, kv_scales=scales, **case)
    errors = [error_of(call(), expected) for _ in range(2)]
    shape = (batch, kv_heads * group, kv_heads, sq, slots, head_dim, page)
    return {
        "seed": seed,
        "shape": shape,
        "case": case,
        "choices": choices,
        "error": max(errors),
        "right": max(errors) < WRONG,
    }


def main() -> None:
    """Run what the command line names."""
    parser = arguments_parser(__doc__)
    parser.add_argument("table", choices=("right", "points", "pages", "fp8"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--fa3", type=Path, help="the built library of FlashAttention 3")
    parser.add_argument(
        "--warm", default="", help="part/parts: compile the variants of every parts-th row, and time none"
    )
    parser.add_argument("--without-rows", action="store_true", help="for `points`: leave out the kernel of `rows.py`")
    parser.add_argument("--cases", type=int, default=60, help="for `right`: random cases")
    parser.add_argument("--first", type=int, default=0, help="for `right`: the first seed")
    options = parser.parse_args()
    if options.fa3:
        torch.ops.load_library(str(options.fa3.expanduser()))
    warm = bool(options.warm)
    part, parts = map(int, options.warm.split("/")) if warm else (0, 1)
    record = Record(options.out, f"decode: variants, {options.table}", "cuda", options.seconds, l2="cold")
    points = [(*cache, new) for cache in CACHES for new in NEW_TOKENS]
    tables: dict[str, tuple] = {
        "right": (range(options.first, options.first + options.cases), random_case, str),
        "points": (
            points,
            partial(measure_point, fa3=options.fa3 is not None, warm=warm, rows=not options.without_rows),
            show_row,
        ),
        "fp8": ([(*c, n) for c in CACHES for n in (1, 16)], partial(measure_fp8, warm=warm), show_row),
        "pages": (PAGED_CACHES, partial(measure_pages, fa3=options.fa3 is not None, warm=warm), show_row),
    }
    rows, measure, show = tables[options.table]
    if record.fill(list(rows)[part::parts], measure, show):
        record.finish()
    if options.table == "right":
        wrong = [row for row in record.contents["rows"] if not row["right"]]
        print(f"{len(record.contents['rows'])} cases, {len(wrong)} wrong: {wrong}")


def show_row(row: dict) -> str:
    """Return a row as a line: the times, the fastest first."""
    where = row.get("point") or row.get("cache")
    times = sorted(row.get("us", {}).items(), key=lambda pair: pair[1])
    return f"{where} x{row.get('ratio')} " + ", ".join(f"{name} {us:.1f}" for name, us in times)


if __name__ == "__main__":
    main()
