"""Profile step 5 of the forward with Nsight Compute, and print which units are busy and where its warps stall.

    ncu --clock-control none --set full --import-source no -k regex:attention_step5 -s 1 -c 1 -o build/forward64 python -m tools.record.attention_profile run --head-dim 64 --length 16384
    python -m tools.record.attention_profile table build/forward64.ncu-rep --out build/forward64.json

`run` launches the kernel that attention takes, three times. `table` reads a report: the units of the SM in percent of what they
could do, why warps waited, and the lines of machine code at which most samples were taken. It needs `ncu`, and no GPU.
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.record.common import arguments_parser, to_text
from tools.record.sass import unit_of
from utils.files import write_whole
from utils.machine.environment import environment

ALL_SAMPLES, EXECUTED = "Warp Stall Sampling (All Samples)", "Instructions Executed"
# Where a counter's name begins so, it says how busy a unit is; of several spellings of a unit those that the report has are shown.
UNITS = {
    "tensor cores": "sm__inst_executed_pipe_tensor|sm__pipe_tensor_cycles_active|sm__pipe_tensor_op_hmma_cycles_active",
    "exponentials (XU)": "sm__inst_executed_pipe_xu",
    "FMA": "sm__pipe_fma_cycles_active|sm__inst_executed_pipe_fma.|sm__inst_executed_pipe_fmaheavy|sm__pipe_fmaheavy_cycles_active",
    "ALU": "sm__pipe_alu_cycles_active|sm__inst_executed_pipe_alu",
    "uniform": "sm__inst_executed_pipe_uniform",
    "LSU": "sm__inst_executed_pipe_lsu",
    "issue slots": "sm__inst_issued|smsp__issue_active|sm__instruction_throughput",
    "shared memory": "l1tex__data_pipe_lsu_wavefronts|l1tex__data_bank",
}
WHOLE = ("gpu__time_duration.sum", "sm__cycles_elapsed.max", "smsp__cycles_active.avg", "sm__cycles_active.avg")


def number(text: str | None) -> float:
    """Read a cell; an empty one is 0."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return 0.0


def page(report: Path, name: str, *options: str) -> str:
    """Return one page of a report as text."""
    command = ["ncu", "--import", str(report), "--page", name, "--csv", "--print-units", "base", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def busy_units(raw: str) -> dict[str, float]:
    """Return the counters of the raw page that say how busy units are, in percent, and the kernel's time and cycles."""
    table = list(csv.reader(io.StringIO(raw[raw.find('"ID"') :])))
    cells = dict(zip(table[0], table[2], strict=False))
    found = {name: number(cells[name]) for name in WHOLE if name in cells}
    for prefixes in UNITS.values():
        for name in sorted(cells):
            share = "pct_of_peak_sustained_active" in name or name.startswith("smsp__issue_active.avg.per_cycle")
            if share and any(name.startswith(prefix) for prefix in prefixes.split("|")):
                found[name] = number(cells[name])
    return found


def lines_of(source: str) -> list[dict]:
    """Return a row for each line of machine code of the source page: what it is, how often it ran, its samples by reason."""
    rows = list(csv.reader(io.StringIO(source)))
    at = next((i for i, row in enumerate(rows) if "Source" in row and ALL_SAMPLES in row), None)
    if at is None:
        raise ValueError(f"The source page has no table with the columns 'Source' and '{ALL_SAMPLES}'.")
    names = rows[at]
    found = []
    for row in rows[at + 1 :]:
        cells = dict(zip(names, row, strict=False))
        if not cells.get("Source") or cells["Source"] == "Source":
            continue
        # A reason has two columns: all samples, and those in which the scheduler issued nothing ("... (Not Issued)").
        reasons = {
            name.removeprefix("stall_"): number(value)
            for name, value in cells.items()
            if name.startswith("stall_") and "ssued" not in name and number(value)
        }
        line = {"text": " ".join(cells["Source"].split()), "executed": number(cells.get(EXECUTED))}
        found.append(line | {"samples": number(cells.get(ALL_SAMPLES)), "reasons": reasons})
    return found


def sums_by(lines: Sequence[dict]) -> dict[str, float]:
    """Return the share of each reason among all samples, the largest first."""
    sums: dict[str, float] = {}
    for line in lines:
        for reason, samples in line["reasons"].items():
            sums[reason] = sums.get(reason, 0) + samples
    total = sum(sums.values()) or 1
    return {reason: round(x / total, 4) for reason, x in sorted(sums.items(), key=lambda pair: -pair[1])}


def executed_by_unit(lines: Sequence[dict]) -> dict[str, float]:
    """Return the share of the executed instructions by the unit that they need."""
    sums: dict[str, float] = {}
    for line in lines:
        unit = unit_of(line["text"])
        sums[unit] = sums.get(unit, 0) + line["executed"]
    total = sum(sums.values()) or 1
    return {unit: round(x / total, 4) for unit, x in sorted(sums.items(), key=lambda pair: -pair[1])}


def show(found: dict, most: int) -> str:
    """Return the tables as text, the lines with most samples in the order of the code."""
    total = sum(line["samples"] for line in found["lines"]) or 1
    texts = [f"{name:<70}{value:>14.2f}" for name, value in found["units"].items()]
    texts.append("reasons " + ", ".join(f"{name} {100 * x:.1f}%" for name, x in [*found["reasons"].items()][:12]))
    texts.append("executed " + ", ".join(f"{name} {100 * x:.1f}%" for name, x in found["executed"].items()))
    chosen = sorted(range(len(found["lines"])), key=lambda i: -found["lines"][i]["samples"])[:most]
    for i in sorted(chosen):
        line = found["lines"][i]
        reasons = sorted(line["reasons"].items(), key=lambda pair: -pair[1])[:2]
        why = ", ".join(f"{name} {x:.0f}" for name, x in reasons)
        texts.append(f"{i:>5} {100 * line['samples'] / total:5.1f}%  {line['text'][:48]:<50}{why}")
    return "\n".join(texts)


def run(head_dim: int, length: int, causal: bool) -> None:
    """Launch the kernel three times, on inputs of B x S = 16384 tokens."""
    import torch

    from tools.record.attention_ratios import inputs
    from utils.attention import attention

    q, k, v = inputs(head_dim, length)
    for _ in range(3):
        attention(q, k, v, backend="gluon", causal=causal)
    torch.cuda.synchronize()


def main(arguments: list[str] | None = None) -> int:
    """Run the kernel, or print a report; return the exit status."""
    parser = arguments_parser(__doc__)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("report", type=Path, nargs="?", help="table: a report of ncu")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--lines", type=int, default=40, help="table: how many lines of machine code to print")
    options = parser.parse_args(arguments)
    if options.what == "run":
        run(options.head_dim, options.length, options.causal)
        return 0
    if options.report is None:
        parser.error("table needs a report of ncu")
    lines = lines_of(page(options.report, "source", "--print-source", "sass"))
    found = {"units": busy_units(page(options.report, "raw")), "reasons": sums_by(lines)}
    found |= {"executed": executed_by_unit(lines), "lines": lines}
    print(show(found, options.lines))
    if options.out:
        what = "step 5 of the forward, as Nsight Compute saw it"
        write_whole(options.out, to_text({"what": what, "environment": environment()} | found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
