"""Measure what decode's thirty points leave open: ties with other libraries, and numbers of heads between them.

    for i in $(seq 0 14); do                                                                # 15 processes share the GPU
      python -m tools.record.decode_again --part $i/15 --turns /tmp/turns --fa4 --out rows/again-$i.json & done
    python -m tools.record.decode_again --read rows --out assets/results/h200/decode_again.json

- `ties`: where the best other library is within 3%, one run says little about who is first. Each row has several series,
  each with tensors at other addresses, and an interval of the ratio over all of them. Beside them stands a copy that
  moves as many bytes as the cache has, in the same process and after the same flush of the L2.
- `heads`: the sizes of `assets/results/h200/choose_providers_*.json` at which another library was faster, with the L2 as
  that table had it (warm) and cold. There heads are more than SMs, or somewhat fewer, and the question is whether a
  program takes a whole head, and whether the hint that keys leave the L2 first is one for a cache that is in it already.

FlashAttention 2 and FlashAttention 3 with lengths are nowhere the best there (`decode.json`) and are not timed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch

from tools.record.common import Record, arguments_parser, read_record
from tools.record.decode import draw, median, others, time_together
from tools.record.decode_variants import arrangement, describe, distinct, right_calls
from tools.record.turns import Turns
from utils.attention import decode_reference
from utils.attention.gluon.decode.cluster_plan import FITTING_CLUSTERS
from utils.attention.gluon.decode.plan import KEYS_BLOCK, block_width
from utils.benchmark.intervals import speedup, speedup_interval

SERIES, ITERATIONS = {"ties": 5, "heads": 3}, 21
NOT_TIMED = "fa2", "fa3_lengths"
OLD: dict = {"backward": False, "k_first": False, "prefill": False}
ORDERS = {
    "the old order": OLD,
    "backward": OLD | {"backward": True},
    "k first": OLD | {"k_first": True},
    "rings filled early": OLD | {"prefill": True},
    "k first, rings filled early": OLD | {"k_first": True, "prefill": True},
    "all three": {"backward": True, "k_first": True, "prefill": True},
}
# Sequences, heads, heads of keys, keys, head dimension, new tokens: the most important first.
TIES = (
    (16, 64, 8, 8192, 128, 16),
    (16, 64, 8, 8192, 128, 8),
    (64, 16, 16, 2048, 64, 1),
    (16, 64, 8, 8192, 128, 1),
    (128, 64, 8, 1024, 128, 16),
    (64, 32, 8, 4096, 128, 16),
    (64, 32, 8, 4096, 128, 8),
    (64, 32, 8, 4096, 128, 1),
    (128, 64, 8, 1024, 128, 1),
    (128, 64, 8, 1024, 128, 8),
    (1, 32, 8, 131072, 128, 16),
    (1, 32, 8, 131072, 128, 8),
    (1, 32, 8, 32768, 128, 16),
    (1, 32, 8, 8192, 128, 16),
    (8, 32, 8, 8192, 128, 16),
)
HEADS = (
    (24, 32, 8, 512, 128, 1),
    (24, 32, 8, 512, 64, 1),
    (6, 32, 8, 2048, 64, 1),
    (20, 32, 8, 2048, 64, 1),
    (8, 32, 8, 512, 64, 1),
    (12, 32, 8, 2048, 128, 1),
    (24, 32, 8, 2048, 64, 1),
    (14, 32, 8, 2048, 128, 1),
    (20, 32, 8, 2048, 128, 1),
    (14, 32, 8, 16384, 128, 1),
    (16, 32, 8, 16384, 128, 1),
    (32, 32, 8, 16384, 128, 1),
    (64, 32, 8, 16384, 128, 1),
    (64, 32, 8, 2048, 128, 1),
    # Sizes at which the rule for heads that are not as many as SMs takes what its neighbours were faster with.
    (12, 32, 8, 2048, 64, 1),
    (14, 32, 8, 8192, 64, 1),
    (24, 32, 8, 2048, 128, 1),
    (20, 32, 8, 1024, 64, 1),
    (16, 96, 12, 1000, 128, 1),
    (6, 32, 8, 2048, 128, 1),
    (4, 32, 8, 4096, 64, 1),
    (2, 32, 8, 4096, 64, 1),
    (1, 32, 8, 8192, 64, 1),
    (8, 32, 8, 8192, 64, 1),
    (6, 32, 8, 2048, 64, 4),
    (12, 32, 8, 2048, 128, 4),
)


def variants_of_ties(point: tuple) -> dict[str, dict]:
    """Name the default, and the orders in which `rows.py` may read and load; for one token, whole heads."""
    default = arrangement(point, {})
    found: dict[str, dict] = {"default": {}}
    if default.plan.consumers and not default.plan.cluster:
        found |= {name: c for name, c in ORDERS.items() if default.aligned or not c["backward"]}
        found["two slots of K and of V"] = {"slots": 4}
        return distinct(point, found)
    return distinct(point, found | ({} if default.plan.cluster else variants_of_heads(point)))


def variants_of_heads(point: tuple) -> dict[str, dict]:
    """Name the ways in which programs take whole heads at one new token, beside the default."""
    batch, _, kv_heads, _, head_dim, _ = point
    heads, block = batch * kv_heads, KEYS_BLOCK[block_width(head_dim)]
    whole: dict = {"consumers": 0, "aligned": True, "programs": heads}
    found: dict[str, dict] = {
        "default": {},
        "no L2 hint": {"hint": False},
        "a program a head": whole,
        "a program a head, two an SM": whole | {"per_sm": 2, "block_n": block // 2},
        "a program a head, three an SM": whole | {"per_sm": 3, "block_n": 64},
        "a program a head, three an SM, no L2 hint": whole | {"per_sm": 3, "block_n": 64, "hint": False},
        "a program a head, four an SM": whole | {"per_sm": 4, "block_n": 64},
    }
    if heads > 264:
        two = {"per_sm": 2, "block_n": block // 2}
        found["a program a head, four slots"] = whole | {"slots": 4}
        found["a program a head, two an SM, four slots"] = whole | two | {"slots": 4}
        found["two an SM"] = {"consumers": 0, **two}
    for parts in (4, 8):
        if heads <= FITTING_CLUSTERS[parts] and heads * parts > 40:
            found[f"clusters of {parts}"] = {"cluster": parts}
    if heads <= 66:
        found["clusters of 2"] = {"cluster": 2}
        found["clusters of 2, no L2 hint"] = {"cluster": 2, "hint": False}
        found["two programs a head, small blocks"] = {"consumers": 0, "programs": 2 * heads, "block_n": block // 2}
    # What was the default before: the keys are shared evenly, and merged.
    found["equal shares"] = {"consumers": 0, "aligned": False}
    return distinct(point, found)


def bound_calls(point: tuple, named: dict[str, dict], row: dict, fa3: bool, fa4: bool) -> dict[str, Callable]:
    """Draw tensors, and return the calls of the variants that are right on them, of the other libraries, and the copy."""
    q, k, v = draw(*point)
    errors: dict[str, float] = {}
    calls, left_out = right_calls(named, decode_reference(q[:1], k[:1], v[:1]), q, k, v, errors=errors)
    row["errors"] = {n: max(error, row["errors"].get(n, 0.0)) for n, error in errors.items()}
    calls |= {name: call for name, call in others(q, k, v, fa3, fa4, left_out).items() if name not in NOT_TIMED}
    row["left_out"] |= left_out
    target = torch.empty_like(k)
    calls["copy of as many bytes"] = lambda: target.copy_(k)
    return calls


def prepare(case: tuple, fa3: bool, fa4: bool) -> dict:
    """Compile all of a row's kernels and try each variant once against float64; return the row so far."""
    table, point = case
    named = (variants_of_ties if table == "ties" else variants_of_heads)(point)
    own = {name: describe(arrangement(point, choices)) for name, choices in named.items()}
    batch, _, kv_heads, keys, head_dim, _ = point
    row = {"table": table, "point": list(point), "bytes": 4 * batch * kv_heads * keys * head_dim}
    row |= {"own": own, "choices": named, "errors": {}, "left_out": {}}
    bound_calls(point, named, row, fa3, fa4)
    return row


def measure_row(row: dict, fa3: bool, fa4: bool) -> dict:
    """Time a row: `us` and `ratio` of all series together for each state of the L2, and the ratios of each series."""
    place = random.Random(str(row["point"]))
    samples: dict[str, list[dict[str, list[float]]]] = {}
    for _ in range(SERIES[row["table"]]):
        spacer = torch.empty(place.randrange(1 << 12, 1 << 26), dtype=torch.uint8, device="cuda")
        calls = bound_calls(tuple(row["point"]), row["choices"], row, fa3, fa4)
        for l2 in ("cold",) if row["table"] == "ties" else ("cold", "warm"):
            samples.setdefault(l2, []).append(time_together(calls, row["bytes"], ITERATIONS, l2))
        del calls, spacer
        torch.cuda.empty_cache()  # the next series' tensors lie elsewhere
    return row | {l2: summary(found, row) for l2, found in samples.items()}


def summary(series: list[dict[str, list[float]]], row: dict) -> dict:
    """Return medians and, for each variant, the ratio to the best other library with its 95% interval."""
    names = [name for name in series[0] if all(name in found for found in series)]
    pooled = {name: [t for found in series for t in found[name]] for name in names}
    us = {name: round(median(times), 2) for name, times in pooled.items()}
    peers = [name for name in names if name not in row["own"] and not name.startswith("copy")]
    result: dict = {"us": us, "series_us": {n: [round(median(found[n]), 2) for found in series] for n in names}}
    if peers:
        result["best_other"] = other = min(peers, key=us.__getitem__)
        for name in names:
            if name in row["own"]:
                interval = speedup_interval(pooled[other], pooled[name])
                each = [round(speedup(found[other], found[name]), 4) for found in series]
                whole = round(speedup(pooled[other], pooled[name]), 4)
                result.setdefault("ratios", {})[name] = {
                    "ratio": whole,
                    "interval": [round(x, 4) for x in interval],
                    "series": each,
                }
    return result


def show_row(row: dict) -> str:
    """Return a row as a few lines: each state of the L2, the fastest first."""
    lines = [f"{row['table']} {row['point']} left out: {row['left_out']}"]
    for l2 in ("cold", "warm"):
        if l2 in row:
            times = sorted(row[l2]["us"].items(), key=lambda pair: pair[1])
            lines.append(f"  {l2}: " + ", ".join(f"{name} {us:.2f}" for name, us in times))
            ratios = row[l2].get("ratios", {}).items()
            lines.append("    " + ", ".join(f"{n} {r['ratio']} {r['interval']}" for n, r in ratios))
    return "\n".join(lines)


def join(folder: Path, record: Record) -> None:
    """Join the records of several processes in the order of the tables."""
    records = [read_record(path) for path in sorted(folder.glob("again-*.json"))]
    order = {case: i for i, case in enumerate([("ties", p) for p in TIES] + [("heads", p) for p in HEADS])}
    rows = [row for found in records for row in found["rows"]]
    rows.sort(key=lambda row: order[row["table"], tuple(row["point"])])
    record.contents = {**records[0], "complete": all(found["complete"] for found in records), "rows": rows}
    record.save()


def main() -> None:
    """Prepare this process's rows beside the others, and time each alone on the GPU."""
    parser = arguments_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no row after this time")
    parser.add_argument("--fa3", type=Path, help="the built library of FlashAttention 3")
    parser.add_argument("--fa4", action="store_true", help="time flash-attn-4 too; it compiles for seconds")
    parser.add_argument("--part", default="0/1", help="part/parts: every parts-th row")
    parser.add_argument("--turns", type=Path, help="a folder: prepare beside other processes, and time in turns")
    parser.add_argument("--prepare", type=float, default=60, help="with `--turns`: seconds to prepare rows")
    parser.add_argument("--read", type=Path, help="join the records of this folder instead of measuring")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    method = {"series": SERIES, "iterations": ITERATIONS, "order": "random in each round"}
    record = Record(options.out, "decode: again", None if options.read else "cuda", options.seconds, **method)
    if options.read:
        join(options.read, record)
        return
    if options.fa3:
        torch.ops.load_library(str(options.fa3.expanduser()))
    libraries = options.fa3 is not None, options.fa4
    turns = Turns(options.turns, parts, options.prepare) if options.turns else None
    cases = ([("ties", point) for point in TIES] + [("heads", point) for point in HEADS])[part::parts]
    prepared = []
    for case in cases:
        if turns is None or turns.time_left():
            prepared.append(prepare(case, *libraries))
            torch.cuda.empty_cache()
        else:
            print(f"not prepared in time: {case}", flush=True)
    if turns:
        turns.wait_for_all(str(part))

    def timed(row: dict) -> dict:
        if turns is None:
            return measure_row(row, *libraries)
        with turns.alone():
            return measure_row(row, *libraries)

    if record.fill(prepared, timed, show_row) and len(prepared) == len(cases):
        record.finish()


if __name__ == "__main__":
    main()
