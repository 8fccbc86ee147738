"""Time the plans of step 5 against each other and the peers, at lengths with and without a tail: full, head dim 64.

    python -m tools.record.attention_plans --out attention_plans.json

`assets/results/h200/attention_plans.json` has three such tables, "tails", "rows" and "three", of plans that were tried: those
that lost are no longer in `utils.attention.gluon.plan`, and a new run has the plans of today only.
"""

from __future__ import annotations

import sys
from functools import partial

import torch

from tools.record.common import Record, arguments_parser
from utils.attention import attention, find_backend, make_problem
from utils.attention.reference import reference
from utils.benchmark.measuring import measure_together

SHAPES = (  # batch, heads, queries, keys
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
HEAD_DIM = 64
VARIANTS = {"clean": "", "ahead": "ahead", "ahead of three": "ahead of three"}  # the names of the table
PEERS = ("cudnn", "fa3", "cute")


def run_plan(variant: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor):
    """Run step 5 with the plan of a variant; return the call that repeats it."""
    from utils.attention.gluon.arguments import Arguments, unused
    from utils.attention.gluon.launch import LOG2_E, step_module
    from utils.attention.gluon.plan import plan_for

    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    c, nothing = HEAD_DIM**-0.5 * LOG2_E, unused(q.device)
    plan = plan_for(5, HEAD_DIM, variant)
    handle = step_module(5).launch(Arguments(q, k, v, out, nothing, False, 0, False, c, plan, programs))
    return partial(handle, q, k, v, out, nothing)


def shape_row(shape: tuple[int, int, int, int], pairs: int) -> dict:
    """Time the plans and the peers that take the shape, interleaved; errors are those of the first head."""
    batch, heads, sq, sk = shape
    q = torch.randn(batch, heads, sq, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, heads, sk, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    exact = reference(q[:1, :1], k[:1, :1], v[:1, :1])[0]
    calls, results = {}, {}
    for name, variant in VARIANTS.items():
        results[name] = torch.empty_like(q)
        calls[name] = run_plan(variant, q, k, v, results[name])
    problem = make_problem(q, k, v)
    for name in PEERS:
        if find_backend(name).support(problem):
            calls[name] = partial(attention, q, k, v, backend=name)
            results[name] = calls[name]()
    errors = {name: ((out[:1, :1].double() - exact).norm() / exact.norm()).item() for name, out in results.items()}
    timed = measure_together(
        list(calls.values()), labels=list(calls), warmup=3, iterations=pairs, device="cuda", l2="cold"
    )
    us = {name: 1e3 * result.median_ms for name, result in zip(calls, timed, strict=True)}
    return {"shape": shape, "us": us, "errors": errors}


def show(row: dict) -> str:
    """Return the line that is printed for a row."""
    return f"{row['shape']}: " + "  ".join(f"{name} {us:.1f}" for name, us in row["us"].items())


def main() -> int:
    """Measure and record the table; return the exit status."""
    options = arguments_parser(__doc__, pairs=15).parse_args()
    if not torch.cuda.is_available():
        print("error: the plans are timed on an NVIDIA GPU: torch.cuda.is_available() is False here.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    what = "Plans of step 5 against the peers: head dim 64, full"
    record = Record(options.out, what, "cuda", options.seconds, pairs=options.pairs, l2="cold")
    complete = record.fill(SHAPES, partial(shape_row, pairs=options.pairs), show, table="tails")
    record.finish() if complete else record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
