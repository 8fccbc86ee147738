"""Time the plans of step 5 against each other and the peers, where the choice between them matters.

    python -m tools.record.attention_plans tails --out attention_plans.json
    python -m tools.record.attention_plans few tails --out attention_tails.json

Tables: "tails", full attention at head dim 64, with and without a tail; "windows"; "few", fewer tiles than multiprocessors;
"dealt", causal tiles that the host deals out; "slots", tiles of Q and slots of the rings; "narrow", small windows; "choice", plans of head dim 64 by mask; "order", what comes before what in a block and at a start. A plan is named by its variant, and by
fields of it that are changed ("few, q_slots=1"); where programs share tiles, by their number. With `--processes` the kernels are compiled
side by side before anything is timed. A plan whose output is wrong is not timed.

`attention_tails.json`, `attention_slots.json` and `attention_narrow.json` of `assets/results/h200/` are of this script. `attention_plans.json` has the tables "tails", "rows" and "three",
`attention_few_tiles.json` has "windows", "few" and "dealt", and `attention_early.json`, `attention_woven.json` and `attention_outputs.json` of `assets/results/h100/` have tables of their own commits (docs/attention-log.md,
entries 36 to 38), all with plans that were tried: those that lost are no longer in `utils.attention.gluon.plan`. So are `attention_sections.json`, `attention_one_edge.json` and `attention_loads.json`,
"order" at three commits (entries 45 to 47).
"""

from __future__ import annotations

import multiprocessing
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from unittest import mock

import torch

from tools.record.common import Record, arguments_parser
from utils.attention import attention, find_backend, make_problem
from utils.attention.gluon import dealing
from utils.attention.gluon.plan import Plan, plan_for
from utils.attention.reference import reference
from utils.benchmark.measuring import measure_together

FULL, CAUSAL = False, True
# Batch, heads, heads of keys, queries, keys, head dim, mask, window; then the plans: a variant, or (variant, parts).
TAILS = (
    (16, 8, 515, 515),
    (8, 16, 777, 777),
    (8, 16, 777, 1543),
    (4, 16, 1500, 1500),
    (2, 32, 3001, 3001),
    (1, 32, 10007, 10007),
    (1, 32, 16383, 16383),
    (1, 32, 16384, 16384),
    (16, 32, 1024, 1024),
    (8, 32, 2048, 2048),
    (4, 32, 4096, 4096),
    (2, 32, 8192, 8192),
    (3, 16, 5000, 5000),
)
CASES = {
    "tails": [((b, h, h, sq, sk, 64, FULL, None), ("", "ahead", "ahead of three")) for b, h, sq, sk in TAILS],
    "windows": [
        ((2, 16, 4, 4096, 4096, 64, FULL, 1024), ("", "few", "short")),
        ((1, 64, 8, 5248, 5248, 64, CAUSAL, 4096), ("", "few", "short")),
        ((2, 8, 2, 1408, 1408, 64, FULL, 256), ("", "few", "short")),
        ((8, 8, 8, 1024, 1024, 64, CAUSAL, 256), ("", "few", "short")),
        ((4, 16, 8, 8192, 8192, 64, CAUSAL, 1024), ("", "few", "short")),
        ((3, 1, 1, 5259, 5259, 64, FULL, 4096), ("", "few")),
    ],
    "few": [
        ((1, 2, 2, 1920, 1920, 128, FULL, None), ("", ("", 2), ("", 3), ("", 4))),
        ((1, 2, 2, 4096, 4096, 128, FULL, None), ("", ("", 2))),
        ((1, 8, 1, 384, 6000, 128, FULL, None), ("", ("", 2), ("", 4), ("", 5))),
        ((1, 4, 4, 1024, 4096, 128, CAUSAL, None), ("", ("", 2), ("", 4))),
        ((1, 1, 1, 1024, 16384, 128, FULL, None), (("", 4), ("", 8))),
        ((8, 1, 1, 896, 896, 64, CAUSAL, None), ("", "few", ("few", 2))),
        ((1, 4, 1, 2048, 2048, 64, FULL, None), ("few", ("few", 2))),
        ((1, 1, 1, 2048, 2048, 64, FULL, None), ("few", ("few", 2), ("few", 4), ("few", 8))),
        ((1, 2, 2, 2048, 8192, 64, CAUSAL, None), ("few", ("few", 2), ("few", 4))),
        ((1, 2, 1, 2048, 2048, 256, FULL, None), ("", ("", 2), ("", 4))),
        ((1, 4, 2, 1024, 1024, 256, CAUSAL, None), ("", ("", 2), ("", 4))),
        ((1, 2, 2, 512, 8192, 256, FULL, None), (("", 4), ("", 8))),
        ((8, 1, 1, 528, 528, 128, CAUSAL, None), ("", ("", 2), ("", 3))),
        ((2, 8, 2, 896, 896, 128, FULL, None), ("", "ahead")),
        ((1, 16, 4, 1024, 1024, 64, FULL, None), ("few", "ahead", "")),
    ],
    "dealt": [
        ((4, 4, 4, 4736, 9790, 64, CAUSAL, None), ("", "few")),
        ((1, 4, 2, 15381, 16013, 64, CAUSAL, None), ("", "few")),
        ((3, 2, 2, 2944, 2944, 64, CAUSAL, None), ("few", "short")),
        ((8, 2, 1, 6144, 6144, 64, CAUSAL, None), ("", "short")),
        ((4, 16, 4, 3001, 3001, 64, CAUSAL, None), ("", "short")),
        ((1, 8, 8, 8192, 8192, 64, CAUSAL, None), ("", "short", "few")),
        ((2, 6, 2, 5000, 5000, 128, CAUSAL, None), ("",)),
        ((3, 4, 4, 3000, 9000, 128, CAUSAL, None), ("",)),
    ],
}
# Of head dim 64: one tile of Q or two, three slots or four, smaller blocks of keys.
CASES["slots"] = [
    ((2, 8, 2, 1408, 1408, 64, FULL, 256), ("", "narrow", "few", "few, q_slots=1")),
    ((8, 8, 8, 1024, 1024, 64, CAUSAL, 256), ("narrow", "few", "few, q_slots=1")),
    ((4, 16, 8, 8192, 8192, 64, CAUSAL, 1024), ("", ", stages=3", ", stages=3, q_slots=1", "narrow")),
    ((1, 64, 8, 5248, 5248, 64, CAUSAL, 4096), ("", ", stages=3", ", stages=3, q_slots=1", "narrow")),
    ((2, 16, 4, 4096, 4096, 64, FULL, 1024), ("few", "few, q_slots=1", "narrow")),
    *[
        ((b, 32, 32, s, s, 64, CAUSAL, None), ("", ", stages=3", ", stages=3, q_slots=1", "short", "short, q_slots=1"))
        for b, s in ((16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384))
    ],
    *[
        ((b, 32, 32, s, s, 64, FULL, None), ("ahead of three", "ahead of three, stages=3"))
        for b, s in ((4, 4096), (2, 8192), (1, 16384))
    ],
    *[
        ((b, 16, 16, s, s, 128, CAUSAL, None), ("", ", o_in_q=0, q_slots=1"))
        for b, s in ((16, 1024), (8, 2048), (4, 4096), (1, 16384))
    ],
]
# Windows whose tiles each program has one of, or two: slots and tiles of Q of "narrow", and its softmax by halves.
_NARROW = (
    "narrow",
    "narrow, q_slots=1",
    "narrow, stages=8",
    "narrow, stages=10, q_slots=1",
    "narrow, halves=1",
    "few, block_n=64",
)
CASES["narrow"] = [
    ((2, 8, 2, 1408, 1408, 64, FULL, 256), _NARROW),
    ((2, 8, 8, 1536, 1536, 64, FULL, 300), _NARROW),
    ((4, 4, 1, 1337, 1337, 64, FULL, 128), _NARROW),
    ((8, 8, 8, 1024, 1024, 64, CAUSAL, 256), _NARROW),
    ((3, 12, 4, 2111, 2111, 64, CAUSAL, 200), _NARROW),
]
# The first loads before the roles begin, heads that are dealt together, and plans for windows.
_OLD = ", section=32"
_P1, _P2 = ", prefill=1", ", prefill=2"
CASES["order"] = [
    ((16, 16, 16, 1024, 1024, 128, CAUSAL, None), ("whole", _P1, _P2, _OLD)),
    ((16, 8, 8, 1024, 1024, 256, CAUSAL, None), ("whole", _P1, _OLD)),
    ((2, 8, 2, 1408, 1408, 64, FULL, 256), ("narrow", "narrow, prefill=2", "narrow, q_slots=1")),
    ((2, 8, 8, 1536, 1536, 64, FULL, 300), ("narrow", "narrow, prefill=2", "narrow, q_slots=1")),
    ((8, 8, 8, 1024, 1024, 64, CAUSAL, 256), ("narrow", "narrow, prefill=2", "narrow, prefill=0")),
    ((4, 16, 8, 8192, 8192, 64, CAUSAL, 1024), ("whole", _OLD, _P1)),
    ((1, 16, 16, 16384, 16384, 128, CAUSAL, None), ("whole", _OLD, _P1)),
    ((8, 16, 16, 2048, 2048, 128, CAUSAL, None), ("whole", _OLD, _P1)),
    ((2, 16, 4, 4096, 4096, 64, FULL, 1024), ("few", "few, prefill=1", "whole", "narrow")),
    ((1, 64, 8, 5248, 5248, 64, CAUSAL, 4096), ("whole", _P1, ", both=1")),
    ((8, 1, 1, 896, 896, 64, CAUSAL, None), ("one, prefill=0", "one", "one, prefill=2")),
    ((8, 1, 1, 528, 528, 128, CAUSAL, None), ("one, prefill=0", "one")),
    ((2, 4, 1, 1024, 1024, 256, FULL, 256), ("one, prefill=0", "one")),
    ((1, 2, 2, 1920, 1920, 128, FULL, None), (("", 4), (_P1, 4))),
    ((16, 32, 32, 1024, 1024, 64, CAUSAL, None), ("short", "short, prefill=1", "short" + _OLD)),
    ((8, 32, 32, 2048, 2048, 64, CAUSAL, None), ("whole", _OLD, _P1)),
    ((8, 8, 8, 2048, 2048, 256, CAUSAL, None), ("whole", _OLD)),
    ((16, 32, 32, 1024, 1024, 64, FULL, None), ("ahead", "ahead, prefill=1")),
    ((16, 16, 16, 1024, 1024, 128, FULL, None), ("ahead", "ahead, prefill=1")),
    ((4, 16, 16, 4096, 4096, 128, CAUSAL, None), ("whole", _OLD, _P1)),
    ((4, 32, 32, 4096, 4096, 64, CAUSAL, None), ("whole", _OLD)),
    ((2, 32, 8, 2944, 2944, 128, CAUSAL, None), ("whole", _OLD)),
    ((1, 4, 2, 15381, 16013, 64, CAUSAL, None), ("whole", _OLD)),
    ((4, 4, 4, 4736, 9790, 64, CAUSAL, None), ("whole", _OLD)),
    ((16, 8, 8, 1024, 1024, 256, FULL, None), ("whole", ", prefill=0, keys_first=0")),
    ((1, 8, 8, 16384, 16384, 256, CAUSAL, None), ("whole", _OLD)),
]
# Which plan of head dim 64 a mask takes, since "short" waits for P V first and a mask costs less.
_CAUSAL, _WINDOW = ("", "short", "few"), ("", "few", "narrow")
CASES["choice"] = [
    ((8, 32, 32, 2048, 2048, 64, CAUSAL, None), _CAUSAL),
    ((2, 16, 4, 4096, 4096, 64, FULL, 1024), _WINDOW),
    ((8, 16, 16, 2048, 2048, 64, CAUSAL, 512), _WINDOW),
    ((4, 16, 4, 3001, 3001, 64, CAUSAL, None), _CAUSAL),
    ((3, 2, 2, 2944, 2944, 64, CAUSAL, None), _CAUSAL),
    ((8, 2, 1, 6144, 6144, 64, CAUSAL, None), _CAUSAL),
    ((4, 16, 8, 4096, 4096, 64, FULL, 512), _WINDOW),
    ((4, 16, 8, 8192, 8192, 64, CAUSAL, 1024), _WINDOW),
    ((4, 32, 32, 1536, 1536, 64, CAUSAL, None), _CAUSAL),
    ((4, 32, 32, 4096, 4096, 64, CAUSAL, None), _CAUSAL),
    ((8, 8, 8, 1024, 1024, 64, CAUSAL, 256), _WINDOW),
    ((3, 1, 1, 5259, 5259, 64, FULL, 4096), ("", "few")),
]
# Head dim 64, full: one tile of 192 rows a program, which nothing overlaps with, and tails over many.
_S = tuple(f", stagger={n}" for n in (100, 200, 300, 500, 800))
_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
CASES["lone"] = [
    *(((1, 8, 8, 2688, n, 64, FULL, None), ("", "ahead of three")) for n in _LENGTHS),
    ((1, 8, 8, 2685, 2685, 64, FULL, None), ("", *_S, ", stagger=300, prefill=2", ", stages=5, q_slots=1, prefill=5")),
    ((1, 1, 1, 19840, 19840, 64, FULL, 4096), ("", *_S)),
    ((1, 8, 8, 2816, 2816, 64, FULL, None), ("", *_S)),
    ((4, 8, 8, 2816, 2816, 64, FULL, None), ("", "ahead of three", ", stagger=300")),
    ((1, 32, 32, 16384, 16384, 64, FULL, None), ("", "ahead of three", ", stagger=300")),
    ((3, 8, 4, 17916, 20194, 64, CAUSAL, None), ("", ", stagger=300")),
]
PEERS = ("cudnn", "fa3", "cute")
WRONG = 8e-3  # relative error: a contender with more is not timed


def named_plan(name: str, head_dim: int) -> Plan:
    """Return the plan of a name: a variant, and fields that are changed, such as "few, q_slots=1"."""
    variant, *changes = name.split(", ")
    plan = plan_for(5, head_dim, "" if variant == "whole" else variant)
    pairs = (change.split("=") for change in changes if not change.startswith("section="))
    return replace(plan, **{field: type(getattr(plan, field))(int(value)) for field, value in pairs})


def section_of(name: str) -> int:
    """Return how many bytes of K and V the heads that are dealt together have; "section=32" in a plan's name: MiB."""
    found = [change.split("=")[1] for change in name.split(", ") if change.startswith("section=")]
    return int(found[0]) << 20 if found else dealing.SECTION_BYTES


def run_plan(variant: str, parts: int, q, k, v, out, causal: bool, window: int | None):
    """Run step 5 with the plan of a variant, and so many parts of each tile; return the call that repeats it."""
    from utils.attention.gluon.arguments import Arguments, unused
    from utils.attention.gluon.launch import LOG2_E, step_module

    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    head_dim, nothing = q.shape[-1], unused(q.device)
    plan, c = named_plan(variant, head_dim), head_dim**-0.5 * LOG2_E
    arguments = Arguments(q, k, v, out, nothing, causal, window or 0, False, c, plan, programs)
    step5 = step_module(5)
    step5.tile_schedule.cache_clear()  # it does not know of sections
    with (
        mock.patch.object(step5, "parts_for", lambda *given: parts),
        mock.patch.object(dealing, "SECTION_BYTES", section_of(variant)),
    ):
        launched = step5.launch(arguments)
    step5.tile_schedule.cache_clear()
    return partial(launched, q, k, v, out, nothing)


def tensors(case: tuple) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw q, k and v of a case."""
    batch, heads, kv_heads, sq, sk, head_dim = case[0][:6]
    q = torch.randn(batch, heads, sq, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, kv_heads, sk, head_dim, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    return q, k, v


def compile_plan(case_and_plan: tuple) -> None:
    """Compile the kernel of a case and plan, in a process of its own, for the cache on the disk."""
    case, plan = case_and_plan
    q, k, v = tensors(case)
    variant, parts = plan if isinstance(plan, tuple) else (plan, 1)
    try:
        run_plan(variant, parts, q, k, v, torch.empty_like(q), *case[0][6:])
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{case[0]} {plan}: {type(error).__name__}: {error}"[:300], flush=True)


def errors_of(outputs: dict[str, torch.Tensor], q, k, v, mask: dict) -> dict[str, float]:
    """Return the largest relative error, against float64, of the last head's last 300 rows and of the first head's first ones.

    The first rows of causal attention are a problem of their own, with fewer keys: the last query is at the last key. Under a
    window they are left out.
    """
    sq, sk = q.shape[2], k.shape[2]
    rows = min(300, sq)
    checked = [(slice(-1, None), slice(sq - rows, sq), sk)]
    keys = sk - sq + rows if mask["causal"] else sk
    if keys > 0 and not mask["window"]:
        checked.append((slice(0, 1), slice(0, rows), keys))
    found = dict.fromkeys(outputs, 0.0)
    for head, some, keys in checked:
        exact = reference(q[head, head, some], k[head, head, :keys], v[head, head, :keys], **mask)[0]
        for name, out in outputs.items():
            error = ((out[head, head, some].double() - exact).norm() / exact.norm()).item()
            found[name] = max(found[name], error)
    return found


def shape_row(case: tuple, pairs: int, peers: tuple[str, ...] = PEERS) -> dict:
    """Time the plans and the peers that take the shape, interleaved."""
    (batch, heads, kv_heads, sq, sk, head_dim, causal, window), plans = case
    q, k, v = tensors(case)
    mask = {"causal": causal, "window": window}
    calls, results = {}, {}
    for plan in plans:
        variant, parts = plan if isinstance(plan, tuple) else (plan, 1)
        name = ("" if variant[:1] not in ("", ",") else "whole") + variant + (f", {parts} parts" if parts > 1 else "")
        results[name] = torch.empty_like(q)
        calls[name] = run_plan(variant, parts, q, k, v, results[name], causal, window)
    problem = make_problem(q, k, v, **mask)
    for name in ("gluon", *peers):  # "gluon": the plan that is chosen
        if find_backend(name).support(problem):
            calls[name] = partial(attention, q, k, v, backend=name, **mask)
            results[name] = calls[name]()
    errors = errors_of(results, q, k, v, mask)
    calls = {name: call for name, call in calls.items() if errors[name] < WRONG}
    timed = measure_together(
        list(calls.values()), labels=list(calls), warmup=3, iterations=pairs, device="cuda", l2="cold", max_seconds=2.5
    )
    us = {name: 1e3 * result.median_ms for name, result in zip(calls, timed, strict=True)}
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "sq": sq, "sk": sk, "head_dim": head_dim}
    return sizes | mask | {"us": us, "errors": errors}


def show(row: dict) -> str:
    """Return the line that is printed for a row."""
    kind = ("causal" if row["causal"] else "full") + (f" window {row['window']}" if row["window"] else "")
    shape = f"{row['batch']} x {row['heads']}/{row['kv_heads']} x {row['sq']} x {row['sk']} D={row['head_dim']} {kind}"
    worst = max(row["errors"], key=row["errors"].__getitem__)
    times = "  ".join(f"{name} {us:.1f}" for name, us in row["us"].items())
    return f"{shape}: {times}  (largest error {row['errors'][worst]:.5f}, {worst})"


def main() -> int:
    """Measure and record the tables; return the exit status."""
    parser = arguments_parser(__doc__, pairs=11)
    parser.add_argument("tables", nargs="+", choices=tuple(CASES))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--processes", type=int, default=0, help="compile so many kernels side by side beforehand")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: the plans are timed on an NVIDIA GPU: torch.cuda.is_available() is False here.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    record = Record(
        options.out, "Plans of step 5 against the peers", "cuda", options.seconds, pairs=options.pairs, l2="cold"
    )
    if options.processes:
        kernels = {
            (case[0][5:], re.sub(", section=[0-9]+", "", str(plan))): (case, plan)
            for table in options.tables
            for case in CASES[table]
            for plan in case[1]
        }
        with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_plan, kernels.values()))
    complete = True
    measure = partial(shape_row, pairs=options.pairs, peers=tuple(options.peers.split(",")))
    for table in options.tables:
        complete &= record.fill(CASES[table], measure, show, table=table)
    record.finish() if complete else record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
