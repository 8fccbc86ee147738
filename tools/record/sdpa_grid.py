"""Measure SDPA's four backends at every shape of an earlier grid, on this machine: the sweep that lab 4 plots.

    python -m tools.record.sdpa_grid --read assets/results/h200/sdpa_grid.json --out assets/results/h100/sdpa_grid.json

Backends that take a shape are verified against float64, proved by their operators, and timed in turns.
A row says who ran, or in torch's words why not, and whether torch chooses that backend by itself ("is_default").
"""

from __future__ import annotations

from pathlib import Path

import torch

from tools.record.common import Record, arguments_parser, read_record
from utils.bench.errors import BenchError, Refused
from utils.bench.run import check_side
from utils.bench.targets.backends import SDPA, bind, prove
from utils.bench.targets.base import Built, Case
from utils.bench.workload import Workload, arithmetic, make_inputs, reference
from utils.benchmark import benchmark_memory
from utils.benchmark.measuring import measure_together
from utils.benchmark.profiling import launched
from utils.machine.device import default_device

SAMPLES, SEED = 21, 2
SIZES = ("batch", "heads", "kv_heads", "seq_len_q", "seq_len_kv", "head_dim")
FACTS = ("set", "kind", *SIZES, "dtype", "causal", "pass")


def shapes_of(record: dict) -> list[dict]:
    """Return what a recorded grid says about each of its shapes, once each."""
    found = {tuple(row[name] for name in FACTS): None for row in record["rows"]}
    return [dict(zip(FACTS, facts, strict=True)) for facts in found]


def workload_of(shape: dict) -> Workload:
    """Return the workload of a shape."""
    batch, heads, kv_heads, queries, keys, head_dim = (shape[name] for name in SIZES)
    mask, sizes = "causal" if shape["causal"] else "full", (batch, heads, queries, head_dim)
    return Workload(*sizes, shape["dtype"], mask, kv_heads=kv_heads, seq_len_kv=keys, direction=shape["pass"])


def measure_shape(shape: dict, device: torch.device) -> list[dict]:
    """Return a row for each backend at one shape: its time, or why it does not run."""
    workload = workload_of(shape)
    work = workload.cost
    inputs = make_inputs(workload, device, SEED)
    expected = reference(workload, *inputs)
    case, rows, calls = Case("sdpa_grid", workload, {}, device), dict[str, dict](), {}
    default = prove("auto", launched(bind(workload, "auto", inputs)), workload.direction)
    for name in SDPA:
        rows[name] = shape | {"label": workload.label, "flops": work.flops, "backend": name, "status": "ok"}
        rows[name] |= {"refused": None, "default": default, "is_default": name == default}
        try:
            call = bind(workload, name, inputs)
        except Refused as refusal:
            rows[name] |= {"status": "refused", "refused": str(refusal.__cause__)}
            continue
        try:
            precision = arithmetic(workload.dtype, device)
            checked = check_side(case, Built(call, name), expected, precision, name, None)
            ran = launched(call)
            prove(name, ran, workload.direction)
        except BenchError as error:
            rows[name] |= {"status": "failed", "refused": str(error)}
            continue
        rows[name] |= {"error": checked.whole, "kernels": list(ran.kernels or ran.operators)}
        rows[name] |= {"peak_mb": 1e3 * benchmark_memory(call, n_warmup=1, n_repeat=1)[1]}
        calls[name] = call
    if calls:
        how = {"warmup": 3, "iterations": SAMPLES, "device": device, "flops": work.flops, "bytes": work.bytes}
        timed = measure_together(list(calls.values()), labels=list(calls), **how)
        for one in timed:
            low, high = one.interval_ms
            rows[one.label] |= {"ms": one.median_ms, "ms_low": low, "ms_high": high}
            rows[one.label] |= {"tflops": one.tflops, "gb_s": one.gb_s}
    return list(rows.values())


def main(arguments: list[str] | None = None) -> None:
    """Measure the shapes of the grid that the command line names."""
    parser = arguments_parser(__doc__)
    parser.add_argument("--read", type=Path, required=True, help="a recorded grid, whose shapes are measured")
    options = parser.parse_args(arguments)
    device = default_device()
    timing = f"{SAMPLES} samples, interleaved, L2 warm"
    record = Record(options, "SDPA's backends over a grid", device, timing=timing, seed=SEED)
    rows = (row for shape in shapes_of(read_record(options.read)) for row in measure_shape(shape, device))
    record.fill(rows, dict, lambda row: f"{row['label']} {row['backend']}: {row.get('ms') or row['refused']}")
    record.finish()


if __name__ == "__main__":
    main()
