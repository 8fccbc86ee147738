"""Time the forward ladder of attention with two versions of Triton on one GPU.

    python -m tools.record.triton_versions time --out 36-1.json                      with the Triton that Python finds
    PYTHONPATH=/path/to/triton39 python -m tools.record.triton_versions time --out 39-1.json
    python -m tools.record.triton_versions table 36-*.json 39-*.json --out assets/results/h200/triton_versions.json

One process has one Triton, so the versions take turns by processes: old, new, old, new. A row of a process is the median of
ten launches after four, each behind a pause of the GPU so that the host's time does not count. `table` takes the mean over
the processes, and says how far the processes of one version lie apart: a ratio below that says nothing.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path

import torch

from tools.record.common import Record, arguments_parser, read_record

STEPS, LENGTHS, HEADS, HEAD_DIM, LAUNCHES = (5, 4, 3, 2, 1), (4096, 16384), 16, 128, 10


def time_launch(point: tuple[int, bool, int]) -> dict:
    """Return the row of a step, a mask and a length: milliseconds of each launch, and their median."""
    from utils.attention.gluon.launch import forward

    step, causal, length = point
    torch.manual_seed(0)
    shape = (2 if length == 4096 else 1, HEADS, length, HEAD_DIM)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    for _ in range(4):
        forward(q, k, v, causal=causal, step=step)
    times = []
    for _ in range(LAUNCHES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)
        begin.record()
        forward(q, k, v, causal=causal, step=step)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return {"step": step, "causal": causal, "length": length, "ms": sorted(times)[LAUNCHES // 2], "all": times}


def ratios(records: list[dict]) -> list[dict]:
    """Return a row for each step, mask and length: the mean of each Triton, their ratio, and the spread of the processes."""
    found: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for row in record["rows"]:
            found[row["step"], row["causal"], row["length"]][record["environment"]["triton"]].append(row["ms"])
    rows = []
    for (step, causal, length), by_triton in found.items():
        old, new = sorted(by_triton, key=lambda version: tuple(map(int, version.split(".")[:2])))
        means = {version: statistics.mean(times) for version, times in by_triton.items()}
        spread = max(max(times) / min(times) - 1 for times in by_triton.values())
        rows.append(
            {"step": step, "causal": causal, "length": length}
            | {f"ms_{version}": round(means[version], 4) for version in (old, new)}
            | {"ratio": round(means[new] / means[old], 3), "spread": round(spread, 3)}
        )
    return rows


def main() -> None:
    """Do what the first argument says."""
    parser = arguments_parser(__doc__ or "")
    parser.add_argument("command", choices=("time", "table"))
    parser.add_argument("files", nargs="*", type=Path, help="table: the records of the processes")
    options = parser.parse_args()
    if options.command == "time":
        record = Record(options.out, "the forward ladder with one Triton")
        points = [(step, causal, length) for step in STEPS for causal in (False, True) for length in LENGTHS]
        record.fill(points, time_launch, lambda row: f"step {row['step']}, {row['length']}: {row['ms']:.3f} ms")
    else:
        if len(options.files) < 2:
            parser.error("table takes records of at least two processes, one for each Triton.")
        records = [read_record(path) for path in options.files]
        record = Record(options.out, "the forward ladder with two versions of Triton, by processes in turn", "cpu")
        method = f"{HEADS} heads of {HEAD_DIM}, bf16; 2 sequences of 4096 tokens or 1 of 16384; median of {LAUNCHES} launches"
        record.contents |= {"measured_in": [r["environment"] for r in records], "method": method}
        record.fill(ratios(records), dict, lambda row: f"step {row['step']}, {row['length']}: {row['ratio']:.3f}")
    record.finish()


if __name__ == "__main__":
    main()
