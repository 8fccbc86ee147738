"""Measure the variants of the decode kernel at the thirty points of `tools.record.decode`, in pages and in fp8.

    for i in $(seq 0 14); do                                                             # 15 processes share the GPU
      python -m tools.record.decode_variants points --part $i/15 --turns /tmp/turns --out rows/points-$i.json & done
    python -m tools.record.decode_variants between --out decode_between.json             # sizes between the thirty points
    python -m tools.record.decode_variants pages --fa3 fa3/_C.so --out decode_variants_pages.json
    python -m tools.record.decode_variants fp8 --out decode_fp8.json
    python -m tools.record.decode_variants join --read rows --out decode_variants.json
    python -m tools.record.decode_variants default --read decode_variants.json --out decode.json

A variant is a set of arguments of `arrangement.arrange`: which kernel (`consumers`), how parts are merged, how many programs
share the keys, how many keys a block has. All variants of a row and the other libraries are timed in one process,
interleaved, with a cold L2 cache. A variant whose result is not attention is named and not timed. With `--turns` rows are
prepared in several processes (`turns.py`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tools.record.common import Record, arguments_parser, read_record, to_text
from tools.record.decode import (
    CACHES,
    NEW_TOKENS,
    PAGED_CACHES,
    PAGES,
    copy_tb_s,
    draw,
    in_pages,
    median,
    others,
    time_together,
)
from tools.record.turns import Turns
from utils.attention import decode_reference
from utils.attention.gluon.decode.arrangement import Arrangement, arrange
from utils.attention.gluon.decode.launch import Launch
from utils.benchmark.intervals import speedup
from utils.files import write_whole

# Sizes that the thirty points do not have, with heads of 128: shares of a cluster that differ, and other numbers of heads.
BETWEEN = (
    *((1, 32, 8, keys, 128, 1) for keys in (1000, 1500, 2100, 3000, 5000, 20000)),
    *((1, 32, 8, keys, 128, new) for keys in (3000, 4096) for new in (8, 16)),
    *((1, 32, 8, 8192, 128, new) for new in (2, 4)),
    *((8, 32, 8, keys, 128, new) for keys in (1000, 2048, 4100) for new in (1, 16)),
    *((2, 32, 8, keys, 128, new) for keys in (2048, 8192) for new in (1, 8)),
    *((4, 32, 8, keys, 128, new) for keys in (2048, 8192) for new in (1, 8)),
    *((1, 32, 4, keys, 128, 1) for keys in (2048, 8192)),
    (1, 32, 32, 2048, 128, 1),
    (1, 40, 8, 8192, 128, 1),
)
WRONG = 5e-3  # relative error; the kernels have 2e-3 in bf16
ITERATIONS = 21
MULTIPROCESSORS = 132


def variants(point: tuple) -> dict[str, dict]:
    """Name the variants that are worth a measurement at a point: {name: arguments of `arrangement.arrange`}."""
    batch, heads, kv_heads, _, head_dim, new_tokens = point
    rows = heads // kv_heads * new_tokens
    block = 64 if head_dim == 256 else 128
    keys: dict = {"consumers": 0}
    by_rows: dict = {"consumers": 1 if rows <= 64 else 2, "block_n": block}
    small = by_rows | {"block_n": block // 2}
    found: dict[str, dict] = {"default": {}, "no clusters": {"cluster": 0}, "rows": by_rows}
    if rows <= 32:
        found["keys"] = keys
        found["keys, two programs an SM"] = keys | {"per_sm": 2, "block_n": block if head_dim == 64 else block // 2}
    if arrangement(point, by_rows).aligned:
        if rows >= 32:
            found["rows, one Q"] = by_rows | {"q_slots": 1}
            found["rows, two Q"] = by_rows | {"q_slots": 2}
            found["rows, two programs an SM"] = small | {"per_sm": 2}
            found["rows, one softmax"] = by_rows | {"halves": False}
            found["rows, small blocks, two Q"] = small | {"q_slots": 2}
            found["rows, ahead"] = by_rows | {"ahead": True}
            found["rows, ahead, small blocks"] = small | {"ahead": True}
        found["rows, equal shares"] = by_rows | {"aligned": False}
        found["rows, small blocks"] = small
    else:
        even = {"programs": MULTIPROCESSORS // (batch * kv_heads) * batch * kv_heads}
        other = {"merge": "second" if arrangement(point, by_rows).plan.merge == "together" else "together"}
        merged = f"merged {other['merge']}"
        full = {"programs": MULTIPROCESSORS}
        found["rows, small blocks"] = small | full
        found["rows, even programs"] = by_rows | even
        found["rows, small blocks, even programs"] = small | even
        found[f"rows, even programs, {merged}"] = by_rows | even | other
        found[f"rows, small blocks, even programs, {merged}"] = small | even | other
        if "keys" in found:
            found[f"keys, {merged}"] = keys | other
            found["keys, even programs"] = keys | even
    found |= {"L2 hint": {"hint": True}, "no L2 hint": {"hint": False}}
    bytes_ = 4 * batch * kv_heads * point[3] * head_dim
    for parts in fitting_clusters(point):
        for hint, block_n in itertools.product((False, True) if bytes_ < 256 << 20 else (False,), (64, 128)):
            choices = {"cluster": parts, "block_n": block_n, "hint": hint}
            with contextlib.suppress(ValueError):  # too little memory, or too few blocks
                arrangement(point, choices)
                found[f"clusters of {parts}, {block_n} keys{', L2 hint' * hint}"] = choices
    return distinct(point, found)


def variants_between(point: tuple) -> dict[str, dict]:
    """Name the variants by which the rule for clusters and for the hint is judged at a size between the thirty points."""
    found: dict[str, dict] = {"default": {}, "no clusters": {"cluster": 0, "hint": False}}
    found["no clusters, L2 hint"] = {"cluster": 0, "hint": True}
    for parts, hint in itertools.product(fitting_clusters(point), (False, True)):
        choices = {"cluster": parts, "hint": hint}
        with contextlib.suppress(ValueError):
            arrangement(point, choices)
            found[f"clusters of {parts}{', L2 hint' * hint}"] = choices
    return distinct(point, found)


def fitting_clusters(point: tuple) -> list[int]:
    """Return sizes of clusters that give a third of the SMs work or more, each program at most 64 query rows."""
    batch, heads, kv_heads, _, _, new_tokens = point
    sizes = [parts for parts in (2, 4, 8, 16) if MULTIPROCESSORS // 3 < parts * batch * kv_heads <= MULTIPROCESSORS]
    return sizes if heads // kv_heads * new_tokens <= 64 else []


def distinct(point: tuple, found: dict[str, dict]) -> dict[str, dict]:
    """Keep one name for each way to compute a point: what is the default there is not measured again under another name."""
    names: dict[Arrangement, str] = {}
    for name, choices in found.items():
        names.setdefault(arrangement(point, choices), name)
    return {name: found[name] for name in names.values() if fits(arrangement(point, found[name]))}


def arrangement(point: tuple, choices: dict) -> Arrangement:
    """Return how a variant computes a point."""
    batch, heads, kv_heads, keys, head_dim, new_tokens = point
    return arrange(batch, kv_heads, heads // kv_heads, new_tokens, keys, head_dim, MULTIPROCESSORS, **choices)


def describe(found: Arrangement) -> str:
    """Say how a point is computed: what must be equal for two measurements to be of the same thing."""
    plan, merge = found.plan, found.merge_plan
    tile = f"{'rows' if plan.consumers else 'keys'}: {plan.columns} columns, {plan.block_n} keys, {plan.slots} slots"
    warps = f"{plan.q_slots} Q, {f'{plan.consumers} consumers' if plan.consumers else '4 warps'}, halves {plan.halves}"
    warps += ", ahead" * plan.ahead + ", L2 hint" * found.hint
    warps += ", wide stores" * plan.wide + ", output by TMA" * plan.by_tma + ", lean" * plan.lean
    warps += ", products in fp16" * plan.fp16
    warps += ", two programs an SM" * (plan.per_sm == 2 and plan.consumers > 0)
    warps += ", backward" * plan.backward + ", K first" * plan.k_first + ", rings filled early" * (plan.prefill > 0)
    if plan.cluster:
        turns = ", blocks in turn" * plan.in_turn + ", two programs an SM" * (plan.per_sm == 2)
        return f"{tile}, {warps}{turns}; {found.programs} programs, clusters of {plan.cluster}"
    if found.aligned:
        return f"{tile}, {warps}; {found.programs} programs, whole heads"
    parts = f"{merge.merge_warps} x {merge.merge_parts} parts x {merge.merge_width} numbers x {merge.merge_steps}"
    return f"{tile}, {warps}; {found.programs} programs; merge {plan.merge}, {parts}, {found.merge_pieces} pieces"


def fits(found: Arrangement) -> bool:
    """Whether a variant's tiles fit into shared memory, with two slots of K and of V; clusters have one for one block."""
    return found.plan.slots >= (2 if found.plan.cluster else 4)


def bound(choices: dict, q, k, v, seqlens=None, table=None, scales=None, **case) -> Callable[[], torch.Tensor]:
    """Return a variant's call."""
    causal, window = case.get("causal", True), case.get("window") or 0
    launch = Launch(q, k, v, causal, window, seqlens is not None, table, **choices)
    return partial(launch, q, k, v, q.shape[-1] ** -0.5, seqlens, table, scales)


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error against float64."""
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def right_calls(
    named: dict[str, dict], expected: torch.Tensor, *tensors, scales=None, errors: dict | None = None
) -> tuple[dict[str, Callable], dict[str, str]]:
    """Return the variants' calls whose first sequence is right, each tried twice, and why others are left out.

    The larger relative error of the two goes into `errors`.
    """
    calls, left_out = {}, {}
    for name, choices in named.items():
        try:
            call = bound(choices, *tensors, scales=scales)
            # The second call finds the counters of the first.
            found = [error_of(call()[:1], expected) for _ in range(2)]
            error = max(found)
            if errors is not None:
                errors[name] = float(f"{error:.2e}")
            if all(error < WRONG for error in found):  # `max` might pass over nan
                calls[name] = call
            else:
                left_out[name] = f"wrong: relative error {error:.2e}"
        except Exception as problem:  # one variant that cannot run must not end the others
            left_out[name] = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[-1][:160]}"
        if name in left_out:
            print(f"  {name}: {left_out[name]}", flush=True)
    return calls, left_out


def prepare_point(
    point: tuple, fa3: bool, fa4: bool = False, names: list[str] | None = None
) -> tuple[dict, dict[str, Callable], int]:
    """Return a point's row so far, the calls to time, and the bytes of its cache: its variants and the other libraries."""
    q, k, v = draw(*point)
    expected = decode_reference(q[:1], k[:1], v[:1])
    chosen = {name: c for name, c in variants(point).items() if names is None or name in ("default", *names)}
    errors: dict[str, float] = {}
    calls, left_out = right_calls(chosen, expected, q, k, v, errors=errors)
    calls |= others(q, k, v, fa3, fa4, left_out)
    own = {name: describe(arrangement(point, choices)) for name, choices in chosen.items()}
    row = {"point": list(point), "left_out": left_out, "own": own, "errors": errors}
    return row, calls, 2 * k.numel() * k.element_size()


def prepare_between(point: tuple) -> tuple[dict, dict[str, Callable], int]:
    """Return a size's row so far, its variants' calls, and the bytes of its cache."""
    q, k, v = draw(*point)
    chosen, errors = variants_between(point), dict[str, float]()
    calls, left_out = right_calls(chosen, decode_reference(q[:1], k[:1], v[:1]), q, k, v, errors=errors)
    own = {name: describe(arrangement(point, choices)) for name, choices in chosen.items()}
    return {"point": list(point), "left_out": left_out, "own": own, "errors": errors}, calls, 4 * k.numel()


def finish_point(row: dict, samples: dict[str, list[float]], bytes_: int) -> dict:
    """Return a point's row with the best variant, all variants' ratios to the best other library, and TB/s."""
    us = row["us"]
    peers = [name for name in us if name not in row["own"]]
    best = min((name for name in us if name in row["own"]), key=us.__getitem__)
    row |= {"bytes": bytes_, "best": best, "tb_s": round(bytes_ / us[best] / 1e6, 3)}
    if peers:
        row["best_other"] = other = min(peers, key=us.__getitem__)
        row["ratios"] = {n: round(speedup(samples[other], samples[n]), 3) for n in us if n in row["own"]}
        row["ratio"] = row["ratios"][best]
    return row


def prepare_pages(point: tuple, fa3: bool) -> tuple[dict, dict[str, Callable], int]:
    """Prepare one new token over a cache in pages: both kernels beside one piece, lengths alone, and FlashAttention 3.

    Beside pages in random order stand pages that follow one another, so that the order's price is seen.
    """
    *cache, page = point
    q, k, v = draw(*cache, 1)
    used = torch.full((len(q),), cache[3], dtype=torch.int32, device="cuda")
    expected = decode_reference(q[:1], k[:1], v[:1])
    by_rows: dict = {"consumers": 1, "block_n": 128}
    kernels: dict[str, dict] = {
        "default": {},
        "keys": {"consumers": 0},
        "keys, level": {"consumers": 0, "level": True},
        "rows": by_rows,
        "rows, level": by_rows | {"level": True},
        "rows, level, two producers": by_rows | {"level": True, "producers": 2},
    }
    plain = {name: kernels[name] for name in ("default", "keys", "rows")}
    calls, left_out = right_calls({f"one piece, {name}": c for name, c in plain.items()}, expected, q, k, v)

    def add(kind: str, choices: dict[str, dict], *tensors) -> None:
        found, missing = right_calls({f"{kind}, {name}": c for name, c in choices.items()}, expected, *tensors)
        calls.update(found)
        left_out.update(missing)

    add("lengths", plain, q, k, v, used)
    count = cache[0] * cache[3] // page
    in_order = torch.arange(count, device="cuda", dtype=torch.int32).view(cache[0], -1)
    add(f"pages of {page} in order", plain, q, *(in_pages(x, page, in_order) for x in (k, v)), used, in_order)
    table = torch.randperm(count, device="cuda").int().view(cache[0], -1)
    pages = [in_pages(x, page, table) for x in (k, v)]
    add(f"pages of {page}", kernels, q, *pages, used, table)
    if fa3:
        tokens_first = [x.transpose(1, 2) for x in (q, *pages)]
        options = {"seqused_k": used, "page_table": table, "num_splits": 0}
        calls[f"pages of {page}, FA3"] = partial(torch.ops.flash_attn_3.fwd, *tokens_first, **options)
    return {"cache": cache, "page": page, "left_out": left_out}, calls, 2 * k.numel() * k.element_size()


def finish_pages(row: dict, samples: dict[str, list[float]], bytes_: int) -> dict:
    """Return a row of the table of pages."""
    return row | {"bytes": bytes_}


def prepare_fp8(point: tuple) -> tuple[dict, dict[str, Callable], int]:
    """Prepare a cache in e4m3, by the default and by variants, beside the same one in bf16, by its default."""
    q, k, v = draw(*point)
    kernels: dict[str, dict] = {"bf16": {}}
    calls, left_out = right_calls(kernels, decode_reference(q[:1], k[:1], v[:1]), q, k, v)
    small, scales = [x.to(torch.float8_e4m3fn) for x in (k, v)], torch.rand(2, point[2], device="cuda") + 0.5
    expected = decode_reference(q[:1], small[0][:1], small[1][:1], kv_scales=scales)
    keys: dict = {"fp8": True, "consumers": 0}
    named: dict[str, dict] = {"fp8": {"fp8": True}, "fp8, rows": {"fp8": True, "consumers": 1}, "fp8, keys": keys}
    if point[4] <= 128:
        named["fp8, keys, small blocks"] = keys | {"block_n": 64}
        named["fp8, keys, three programs an SM"] = keys | {"block_n": 64, "per_sm": 3}
    if point[4] == 64:
        named["fp8, keys, large blocks"] = keys | {"block_n": 256}
        named["fp8, keys, three programs an SM, whole blocks"] = keys | {"block_n": 128, "per_sm": 3}
    distinct: dict[Arrangement, str] = {}
    for name, choices in named.items():
        if arrangement(point, choices).plan.raw_slots >= 2:
            distinct.setdefault(arrangement(point, choices), name)
    named = {name: named[name] for name in distinct.values()}
    found, missing = right_calls(named, expected, q, *small, scales=scales)
    row = {"point": list(point), "left_out": left_out | missing}
    return row, calls | found, 2 * k.numel()


def finish_fp8(row: dict, samples: dict[str, list[float]], bytes_: int) -> dict:
    """Return a row of the fp8 table: bf16's time by fp8's, by the default of each, and TB/s of the fp8 cache's bytes."""
    bf16, fp8 = (row["us"].get(name, float("nan")) for name in ("bf16", "fp8"))
    return row | {"ratio": round(bf16 / fp8, 3), "tb_s": round(bytes_ / fp8 / 1e6, 3)}


def timed(prepared: tuple[dict, dict[str, Callable], int], finish: Callable) -> dict:
    """Time a prepared row."""
    row, calls, bytes_ = prepared
    if not calls:
        return row
    samples = time_together(calls, bytes_, ITERATIONS)
    row["us"] = {name: round(median(times), 2) for name, times in samples.items()}
    return finish(row, samples, bytes_)


def measure_in_turns(
    points: list, prepare: Callable, finish: Callable, turns: Turns, name: str, record: Record
) -> None:
    """Prepare the rows beside the other processes, then time each alone on the GPU."""
    prepared = []
    for point in points:
        if not turns.time_left():
            print(f"not prepared in time: {point}", flush=True)
            continue
        prepared.append(prepare(point))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    turns.wait_for_all(name)
    if name == "points-0":
        with turns.alone():
            record.contents["copy_tb_s"] = copy_tb_s()

    def alone(row) -> dict:
        with turns.alone():
            return timed(row, finish)

    if record.fill(prepared, alone, show_row) and len(prepared) == len(points):
        record.finish()


def points_of_default(record: dict, base: dict | None = None) -> dict:
    """The table of `tools.record.decode points` for what is the default now, out of the measured variants.

    A default may have been chosen from this very record; then the row of the variant that it was chosen from is taken.
    base: a table that was measured before, whose rows stay where the variants do not have the point, or lack the library
    that was the best other.
    """
    rows = []
    for row in record["rows"]:
        if isinstance(row["point"][0], str):
            continue  # of a cache with lengths, in pages, or in fp8
        point = tuple(row["point"])
        now = describe(arrangement(point, {}))
        name = next((name for name, what in row["own"].items() if what == now), None)
        if name is None:
            raise ValueError(f"{point}: nothing measured is what is the default now, {now}. Measured: {row['own']}")
        us = {"gluon": row["us"][name]} | {n: t for n, t in row["us"].items() if n not in row["own"]}
        shape = dict(zip(("batch", "heads", "kv_heads", "keys", "head_dim", "new_tokens"), point, strict=True))
        found = {"bytes": row["bytes"], "us": us, "best_other": row["best_other"], "ratio": row["ratios"][name]}
        tb_s = round(row["bytes"] / us["gluon"] / 1e6, 3)
        rows.append({**shape, **found, "tb_s": tb_s, "error": row["errors"][name], "arrangement": now})
    if base is None:
        return {**record, "what": "decode: points", "rows": rows}
    shape = ("batch", "heads", "kv_heads", "keys", "head_dim", "new_tokens")
    later = {tuple(row[name] for name in shape): row for row in rows}
    kept = []
    for before in base["rows"]:
        row = later.get(tuple(before[name] for name in shape), before)
        kept.append(row if before["best_other"] in row["us"] else before)
    later_rows = {"commit": record["environment"]["commit"], "rows": sum("arrangement" in row for row in kept)}
    return {**base, "later": later_rows, "rows": kept}


def join(folder: Path, record: Record) -> None:
    """Join the records of several processes' rows, in the order of the points; random cases in that of their seeds."""
    points = [(*cache, new) for cache in CACHES for new in NEW_TOKENS]
    order = {point: i for i, point in enumerate((*points, *BETWEEN))}
    records = [read_record(path) for path in sorted(folder.glob("*.json"))]
    rows = [row for found in records for row in found["rows"]]
    rows.sort(key=lambda row: (order.get(tuple(row.get("point", ())), len(order)), row.get("seed", 0)))
    record.contents = {**records[0], "complete": all(found["complete"] for found in records), "rows": rows}
    record.save()


def main() -> None:
    """Run what the command line names."""
    parser = arguments_parser(__doc__)
    parser.add_argument("table", choices=("points", "between", "pages", "fp8", "join", "default"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--fa3", type=Path, help="the built library of FlashAttention 3")
    parser.add_argument(
        "--fa4", action="store_true", help="for `points`: time flash-attn-4 too; it compiles for seconds"
    )
    parser.add_argument("--part", default="0/1", help="part/parts: every parts-th row")
    parser.add_argument("--turns", type=Path, help="a folder: prepare beside other processes, and time in turns")
    parser.add_argument("--processes", type=int, help="that share the folder of `--turns`; by default, the parts")
    parser.add_argument("--prepare", type=float, default=50, help="with `--turns`: seconds to prepare rows")
    parser.add_argument("--names", nargs="*", help="for `points`: these variants only, beside the default")
    parser.add_argument(
        "--read", type=Path, help="for `join`: the folder of the rows' records; for `default`: the record"
    )
    parser.add_argument("--base", type=Path, help="for `default`: a table of points, for those that the record lacks")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    turns = Turns(options.turns, options.processes or parts, options.prepare) if options.turns else None
    if options.fa3:
        torch.ops.load_library(str(options.fa3.expanduser()))
    if options.table == "default":
        base = read_record(options.base) if options.base else None
        write_whole(options.out, to_text(points_of_default(read_record(options.read), base)))
        return
    device = None if options.table == "join" else "cuda"
    method = {"l2": "cold", "iterations": ITERATIONS}
    record = Record(options.out, f"decode: variants, {options.table}", device, options.seconds, **method)
    if options.table == "join":
        join(options.read, record)
        return
    fa3 = options.fa3 is not None
    tables: dict[str, tuple] = {
        "points": (
            [(*c, n) for c in CACHES for n in NEW_TOKENS],
            partial(prepare_point, fa3=fa3, fa4=options.fa4, names=options.names),
            finish_point,
        ),
        "between": (BETWEEN, prepare_between, finish_point),
        "fp8": ([(*c, n) for c in CACHES for n in (1, 4, 8, 16)], prepare_fp8, finish_fp8),
        "pages": ([(*c, p) for c in PAGED_CACHES for p in PAGES], partial(prepare_pages, fa3=fa3), finish_pages),
    }
    rows, prepare, finish = tables[options.table]
    rows = list(rows)[part::parts]
    if turns:
        measure_in_turns(rows, prepare, finish, turns, f"{options.table}-{part}", record)
    elif record.fill(rows, lambda point: timed(prepare(point), finish), show_row):
        record.finish()


def show_row(row: dict) -> str:
    """Return a row as a line: the times, the fastest first."""
    where = row.get("point") or row.get("cache")
    times = sorted(row.get("us", {}).items(), key=lambda pair: pair[1])
    return f"{where} x{row.get('ratio')} " + ", ".join(f"{name} {us:.1f}" for name, us in times)


if __name__ == "__main__":
    main()
