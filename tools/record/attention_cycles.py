"""How many cycles a kernel takes, and at which clock it runs: steadily, under the power limit, and alone on a cool GPU.

    python -m tools.record.attention_cycles --peers fa3,cute --processes 16 --out build/attention_cycles.json

A small kernel in front of each call and one behind it read the clock of every SM and the time, so that cycles and megahertz of each
contender are known apart. "steady": calls of all contenders in turns, each round in an order of its own, the queue kept full.
"cool": one call at a time, with a pause before it in which the GPU does nothing, so that no limit has slowed the clock down.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
import triton
import triton.language as tl

from tools.record.attention_plans import CAUSAL, FULL, WRONG, compile_plan, errors_of, run_plan, tensors
from tools.record.common import Record, arguments_parser
from utils.attention import attention, find_backend, make_problem

_A = "ring=1, halves=1, pin=1, pairs=1"
_THREE = tuple("ahead of three, " + x for x in ("ring=1", "bare=1, ring=1", _A, "bare=1, " + _A, "ring=1, split=1, pairs=1"))
_WHOLE = tuple("whole, " + x for x in ("ring=1", "bare=1, ring=1", _A, "bare=1, " + _A))
CASES = (
    ((1, 32, 32, 16384, 16384, 64, FULL, None), _THREE),
    ((4, 32, 32, 4096, 4096, 64, CAUSAL, None), _WHOLE),
    ((4, 16, 16, 4096, 4096, 128, FULL, None), ("ahead, bare=1, ring=1",)),
    ((4, 8, 8, 4096, 4096, 256, FULL, None), ("whole, bare=1, ring=1",)),
)
PROBES = 132


@triton.jit
def read_clocks(out):
    """Write each SM's clock and the time to its own place; one warp an SM."""
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    clock = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(out + 2 * sm, clock)
    tl.store(out + 2 * sm + 1, now)


def timed(calls: dict, rounds: int, pause: float) -> dict[str, tuple[float, float]]:
    """Return cycles and microseconds of each contender, medians. pause: seconds without work before each call."""
    stamps = {name: torch.zeros((rounds, 2, 256, 2), dtype=torch.int64, device="cuda") for name in calls}
    order = random.Random(0)
    for r in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            if pause:
                torch.cuda.synchronize()
                time.sleep(pause)
            read_clocks[(PROBES,)](stamps[name][r, 0], num_warps=1)
            calls[name]()
            read_clocks[(PROBES,)](stamps[name][r, 1], num_warps=1)
    torch.cuda.synchronize()
    found = {}
    for name, table in stamps.items():
        rows = []
        for before, behind in table.cpu():
            both = (before[:, 0] != 0) & (behind[:, 0] != 0)
            cycles, nanoseconds = (behind - before)[both].double().median(0).values.tolist()
            rows.append((cycles, nanoseconds / 1e3))
        found[name] = tuple(statistics.median(x) for x in zip(*rows, strict=True))
    return found


def measure(case: tuple, peers: tuple[str, ...]) -> dict:
    """Count the cycles of the plans and the peers at one shape."""
    sizes, plans = case
    causal, window = sizes[6:]
    q, k, v = tensors(case)
    mask = {"causal": causal, "window": window}
    calls, results = {}, {}
    for plan in plans:
        results[plan] = torch.empty_like(q)
        calls[plan] = run_plan(plan, 1, q, k, v, results[plan], causal, window)
    problem = make_problem(q, k, v, **mask)
    for name in ("gluon", *peers):
        if find_backend(name).support(problem):
            calls[name] = partial(attention, q, k, v, backend=name, **mask)
            results[name] = calls[name]()
    errors = errors_of(results, q, k, v, mask)
    calls = {name: call for name, call in calls.items() if errors[name] < WRONG}
    timed(calls, 20, 0.0)  # until the power limit has set the clock
    steady, cool = timed(calls, 25, 0.0), timed(calls, 5, 0.06)
    names = ("batch", "heads", "kv_heads", "sq", "sk", "head_dim", "causal")
    rows = {
        name: {
            kind: {"cycles": round(x[name][0]), "us": round(x[name][1], 2), "MHz": round(x[name][0] / x[name][1])}
            for kind, x in (("steady", steady), ("cool", cool))
        }
        for name in calls
    }
    return dict(zip(names, sizes, strict=False)) | {"contenders": rows, "errors": errors}


def show(row: dict) -> str:
    """Return the lines that are printed for a shape."""
    lines = [f"{row['sq']} {row['head_dim']} {'causal' if row['causal'] else 'full'}"]
    for name, kinds in row["contenders"].items():
        lines.append(
            f"  {name:<44}" + "  ".join(f"{kind} {x['cycles']:>8} {x['us']:>7.1f} us {x['MHz']} MHz" for kind, x in kinds.items())
        )
    return "\n".join(lines)


def main() -> int:
    """Measure all shapes; return the exit status."""
    parser = arguments_parser(__doc__, pairs=1)
    parser.add_argument("--peers", default="cudnn,fa3,cute")
    parser.add_argument("--processes", type=int, default=0, help="compile so many kernels side by side beforehand")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: clocks are read on an NVIDIA GPU: torch.cuda.is_available() is False here.", file=sys.stderr)
        return 1
    print(torch.cuda.get_device_name())
    record = Record(options.out, "cycles and clocks of attention, steadily and on a cool GPU", "cuda", options.seconds)
    if options.processes:
        kernels = {(case[0][5:], plan): (case, plan) for case in CASES for plan in case[1]}
        with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_plan, kernels.values()))
    complete = record.fill(CASES, partial(measure, peers=tuple(options.peers.split(","))), show)
    record.finish() if complete else record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
