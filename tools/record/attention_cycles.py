"""How many cycles attention takes, and at which clock: of each contender, under the power limit.

    python -m tools.record.attention_cycles --peers fa3,cute --out build/attention_cycles.json

A small kernel in front of each call and one behind it read the clock of every SM and the time, so that cycles and megahertz of each
contender are known apart. The contenders take turns, each round in an order of its own, and the queue is kept full: what the host
does is in no figure. `h100/attention_cycles.json` has a column "cool", too, one call at a time after a pause, which holds the host's time,
and variants of step 5 that lost (docs/attention-log.md, entry 41).
"""

from __future__ import annotations

import random
import statistics
import sys
from functools import partial

import torch
import triton
import triton.language as tl

from tools.record.attention_plans import CAUSAL, FULL, WRONG, errors_of, tensors
from tools.record.common import Record, arguments_parser
from utils.attention import attention, find_backend, make_problem

# Batch, heads, heads of keys, queries, keys, head dim, mask, window.
CASES = (
    (1, 32, 32, 16384, 16384, 64, FULL, None),
    (4, 32, 32, 4096, 4096, 64, CAUSAL, None),
    (4, 16, 16, 4096, 4096, 128, FULL, None),
    (4, 8, 8, 4096, 4096, 256, FULL, None),
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


def timed(calls: dict, rounds: int) -> dict[str, tuple[float, float]]:
    """Return cycles and microseconds of each contender, medians of the rounds and, in each, of the SMs."""
    stamps = {name: torch.zeros((rounds, 2, 256, 2), dtype=torch.int64, device="cuda") for name in calls}
    order = random.Random(0)
    for r in range(rounds):
        for name in order.sample(list(calls), len(calls)):
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


def measure(sizes: tuple, peers: tuple[str, ...]) -> dict:
    """Count the cycles of Gluon's kernel and the peers at one shape."""
    causal, window = sizes[6:]
    q, k, v = tensors((sizes,))
    mask = {"causal": causal, "window": window}
    calls, results = {}, {}
    problem = make_problem(q, k, v, **mask)
    for name in ("gluon", *peers):
        if find_backend(name).support(problem):
            calls[name] = partial(attention, q, k, v, backend=name, **mask)
            results[name] = calls[name]()
    errors = errors_of(results, q, k, v, mask)
    calls = {name: call for name, call in calls.items() if errors[name] < WRONG}
    timed(calls, 20)  # until the power limit has set the clock
    rows = {
        name: {"cycles": round(cycles), "us": round(us, 2), "MHz": round(cycles / us)}
        for name, (cycles, us) in timed(calls, 25).items()
    }
    names = ("batch", "heads", "kv_heads", "sq", "sk", "head_dim", "causal")
    return dict(zip(names, sizes, strict=False)) | {"steady": rows, "errors": errors}


def show(row: dict) -> str:
    """Return the lines that are printed for a shape."""
    lines = [f"{row['sq']} {row['head_dim']} {'causal' if row['causal'] else 'full'}"]
    for name, x in row["steady"].items():
        lines.append(f"  {name:<30}{x['cycles']:>9} cycles {x['us']:>8.1f} us {x['MHz']} MHz")
    return "\n".join(lines)


def main() -> int:
    """Measure all shapes; return the exit status."""
    parser = arguments_parser(__doc__, pairs=1)
    parser.add_argument("--peers", default="cudnn,fa3,cute")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: clocks are read on an NVIDIA GPU: torch.cuda.is_available() is False here.", file=sys.stderr)
        return 1
    print(torch.cuda.get_device_name())
    record = Record(options.out, "cycles and clock of attention under the power limit", "cuda", options.seconds)
    complete = record.fill(CASES, partial(measure, peers=tuple(options.peers.split(","))), show)
    record.finish() if complete else record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
