"""Record the tables of a GPU anew, one script after another, within a time limit.

    python -m tools.record.everything --out out/record --seconds 1500        all of them, in the order of the table below
    python -m tools.record.everything --out out/record gemm_shapes timer    these
    python -m tools.record.everything --list

Each table is measured by the script of its name, in a process of its own, and written to the folder, from where it is
compared with `assets/results` and copied there. Whoever fails does not stop the others, and what there is no time for is left
out; `everything.json` says how each ended. A table that the folder has, complete, is not measured again, so that the same
command goes on after an interruption. FLASH_ATTENTION_3_LIBRARY names FlashAttention 3's built library, where there is one;
for a copy of the tree without its history, LABS_COMMIT names the commit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tools.record.common import read_record
from utils.attention.backends.fa3 import VARIABLE
from utils.files import ROOT, write_whole

MARGIN_S = 20.0  # a script whose time is over still finishes its row and writes its file


@dataclass(frozen=True)
class Table:
    """A table of `assets/results/h200` and the command that measures it."""

    name: str
    words: str  # after `python -m tools.`; {fa3} is the option that names its library, or nothing
    least_s: float  # not begun with less time left
    takes_seconds: bool = True  # whether the script has --seconds; otherwise it is ended when the time is over

    def command(self, out: Path, seconds: float) -> list[str]:
        """Return the command that writes the table to `out` in this time."""
        library = os.environ.get(VARIABLE)
        words = [word for word in self.words.split() if word != "{fa3}"]
        if "{fa3}" in self.words.split() and library:
            words += ["--fa3", library]
        limit = ["--seconds", f"{seconds:.0f}"] if self.takes_seconds and math.isfinite(seconds) else []
        return [sys.executable, "-m", f"tools.{words[0]}", *words[1:], *limit, "--out", str(out)]


TABLES = {
    table.name: table
    for table in (
        Table("gpu_tests", "gpu_tests tests/utils/kernels tests/utils/attention", 120),
        Table("gemm_shapes", "record.gemm_shapes", 90),
        Table("attention_ratios", "record.attention_ratios ratios", 60),
        Table("attention_random", "record.attention_ratios random --against cudnn,fa3,cute", 60),
        Table("decode", "record.decode points {fa3} --fa4", 60),
        Table("decode_pages", "record.decode pages {fa3}", 30),
        Table("decode_layer", "record.decode layer", 30),
        Table("backward_ratios", "record.backward ratios {fa3}", 60),
        Table("backward_errors", "record.backward errors {fa3}", 30),
        Table("attention_ladder", "record.attention_ratios ladder --pairs 8", 40),
        Table("sdpa_grid", "record.sdpa_grid --read assets/results/h200/sdpa_grid.json", 60),
        Table("timer", "record.timer_check", 30, takes_seconds=False),
    )
}


def is_complete(path: Path) -> bool:
    """Whether the folder has this table, measured to its end."""
    try:
        return bool(read_record(path).get("complete"))
    except (OSError, json.JSONDecodeError):
        return False


def measure_table(table: Table, folder: Path, seconds: float) -> str:
    """Measure one table, write its log beside it, and say how it ended."""
    out, log = folder / f"{table.name}.json", folder / f"{table.name}.log"
    if table.name == "gpu_tests":
        out = folder / table.name  # a folder of logs
    elif is_complete(out):
        return "there already"
    if seconds < table.least_s:
        return f"left out: {seconds:.0f} s are left, and it is begun with {table.least_s:.0f} or more"
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            table.command(out, max(seconds - MARGIN_S, 1.0)), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(None if math.isinf(seconds) else seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"ended after {time.monotonic() - began:.0f} s: the time was over"
    what = "ended well" if status == 0 else f"FAILED with exit status {status}, see {log.name}"
    return f"{what} after {time.monotonic() - began:.0f} s"


def main(arguments: list[str] | None = None) -> int:
    """Measure the tables that the command line names; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"by default all: {', '.join(TABLES)}")
    parser.add_argument("--out", type=Path, help="folder of the records and logs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for everything together")
    parser.add_argument("--list", action="store_true", help="print the tables and their commands, and measure nothing")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.tables if name not in TABLES]
    if unknown:
        parser.error(f"no table is called {', '.join(unknown)}; choose from {', '.join(TABLES)}")
    tables = [TABLES[name] for name in options.tables or TABLES]
    if options.list:
        for table in tables:
            print(f"{table.name:20} python -m tools.{table.words}")
        return 0
    if options.out is None:
        parser.error("--out names the folder to write")
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    deadline, ended = time.monotonic() + options.seconds, {}
    for table in tables:
        ended[table.name] = measure_table(table, folder, max(deadline - time.monotonic(), 0.0))
        print(f"{table.name:20} {ended[table.name]}", flush=True)
        write_whole(folder / "everything.json", json.dumps(ended, indent=1) + "\n")
    return int(any("FAILED" in how for how in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
