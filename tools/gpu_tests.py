"""Run the GPU tests in many processes at once: most of their time is spent compiling kernels, one core a process.

    python -m tools.gpu_tests                                      all of them, which takes minutes on 16 cores
    python -m tools.gpu_tests tests/utils/kernels --seconds 300    one folder, stopped after five minutes

`make test-gpu` runs them one after another and has the last word where a test measures time: beside other processes a timer's
test may fail, and one that finds no memory left. Each process writes a log, `shard-0.log` and so on. The exit status is 0 if every
test has passed or was skipped.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from utils.files import ROOT

# The options of pyproject.toml name plugins that a GPU machine may lack.
PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-o",
    "addopts=--import-mode=importlib",
    "-p",
    "no:cacheprovider",
    "-m",
    "gpu",
]
TO_WRITE_S = 10.0  # for pytest's summary, behind the end of the time
_OUTCOME = re.compile(r"^(\S.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)


def collect(paths: list[str]) -> list[str]:
    """Return the ids of the GPU tests under these paths."""
    done = subprocess.run([*PYTEST, "--collect-only", "-q", *paths], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: pytest could not collect the tests of {' '.join(paths)}:\n{done.stdout}{done.stderr}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def deal(tests: list[str], processes: int) -> list[list[str]]:
    """Deal the tests out in turns, so that the neighbours of a long one, which are often long too, are spread."""
    return [shard for i in range(processes) if (shard := tests[i::processes])]


def outcomes(log: str) -> dict[str, str]:
    """Return what became of each test that ended, by its id, out of the log of `pytest -v`."""
    return {test: outcome for test, outcome in _OUTCOME.findall(log) if "::" in test}


@contextmanager
def interruptible() -> Iterator[None]:
    """Start processes that SIGINT interrupts, also where it is ignored here, as in a shell's background: they would inherit that."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run(tests: list[str], folder: Path, processes: int, seconds: float) -> dict[str, str]:
    """Run the tests, stop all processes after the time, and return what became of each test; "NOT RUN" of the rest."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("shard-*.log"):
        old.unlink()
    deadline, running = time.monotonic() + seconds, []
    for i, shard in enumerate(deal(tests, processes)):
        ids, log = folder / f"shard-{i}.txt", folder / f"shard-{i}.log"
        ids.write_text("\n".join(shard) + "\n", encoding="utf-8")
        with log.open("w", encoding="utf-8") as file:
            command = [*PYTEST, "-v", "--tb=short", "-rf", f"@{ids}"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "400"}
            with interruptible():
                process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment)
        running.append((process, log))
    for process, _ in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0))
    for process, _ in running:
        process.send_signal(signal.SIGINT)  # as by Ctrl-C: pytest writes why tests have failed, and ends
    deadline = time.monotonic() + TO_WRITE_S
    ended: dict[str, str] = {}
    for process, log in running:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        ended |= outcomes(log.read_text(encoding="utf-8", errors="replace"))
    return {test: ended.get(test, "NOT RUN") for test in tests}


def reasons(log: str) -> list[str]:
    """Return the lines of pytest's summary that say what failed, and why."""
    return [line for line in log.splitlines() if line.startswith(("FAILED ", "ERROR "))]


def main(arguments: list[str] | None = None) -> int:
    """Run the tests that the command line names and print what failed; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=["tests"], help="files, folders or ids of tests")
    parser.add_argument("--processes", type=int, default=max((os.cpu_count() or 4) - 2, 1), help="at the same time")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop all of them after this time")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu_tests", help="folder of the logs")
    options = parser.parse_args(arguments)
    tests = collect(options.paths)
    if not tests:
        print("no GPU tests there")
        return 1
    result = run(tests, options.out, options.processes, options.seconds)
    # What failed comes last, where a terminal shows it, and with its reason.
    for test, outcome in sorted(result.items(), key=lambda entry: entry[1] != "NOT RUN"):
        if outcome not in ("PASSED", "SKIPPED", "XFAIL"):
            print(f"{outcome:8} {test}")
    for log in sorted(options.out.glob("shard-*.log")):
        for line in reasons(log.read_text(encoding="utf-8", errors="replace")):
            print(line)
    counts = Counter(result.values())
    print(
        ", ".join(f"{count} {outcome.lower()}" for outcome, count in counts.most_common()), f"(logs in {options.out})"
    )
    return 0 if set(counts) <= {"PASSED", "SKIPPED", "XFAIL"} else 1


if __name__ == "__main__":
    sys.exit(main())
