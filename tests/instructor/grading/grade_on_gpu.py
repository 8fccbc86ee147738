"""Grade a few submissions with `Limits(gpu=True)` on this machine: `python -m tests.instructor.grading.grade_on_gpu`.

For a machine with a GPU, where the test suite may not be installed. Each submission has the score that it was made for.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import nbformat

from instructor.build import build_lab
from instructor.course import answered_notebook
from instructor.grading import Limits, calibrate, grade_notebook
from instructor.points import lab_path
from utils.machine.environment import environment

SUITE = Path(__file__).parent / "suite_lab.py"


def main() -> None:
    """Grade the model answers, an untouched notebook, and the model answers with one left out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--labs", nargs="*", default=["suite"])
    chosen = parser.parse_args()
    limits, record = Limits(gpu=True), {"environment": environment(), "labs": {}}
    for name in chosen.labs:
        built = build_lab(SUITE if name == "suite" else lab_path(name))
        began = time.monotonic()
        rows = record["labs"][name] = {}
        try:
            calibration = calibrate(built, limits)
            rows["calibration"] = {"seconds": round(time.monotonic() - began, 1), "modes": calibration.modes}
            full = calibration.result.score
            cells = nbformat.reads(built.instructor, as_version=4).cells
            test = next(c for c in cells if c.metadata.get("nbgrader", {}).get("grade") and c.cell_type == "code")
            answer, points = test.id.removesuffix("_tests"), test.metadata.nbgrader["points"]
            tries = {
                "model answers": (answered_notebook(built), full),
                "one answer missing": (
                    answered_notebook(built, {answer: "pass"}),
                    full - points,
                ),  # or less: others may need it
                "untouched": (built.student, 0.0),
            }
            for what, (text, expected) in tries.items():
                started = time.monotonic()
                result = grade_notebook(built, text, limits=limits, timeout=120)
                seconds = round(time.monotonic() - started, 1)
                row = {"score": result.score, "expected": expected, "seconds": seconds, "walls": result.walls}
                row["flags"] = [asdict(flag) for flag in result.flags]
                row["cells"] = {n: (c.status, c.message[:200]) for n, c in result.cells.items() if c.status != "passed"}
                rows[what] = row
                print(
                    f"{name}: {what}: {result.score:g}, expected {expected:g}, {seconds} s, {len(result.flags)} flags"
                )
        except Exception as error:
            rows["error"] = f"{type(error).__name__}: {error}"
            print(f"{name}: {rows['error'][:1500]}")
        chosen.out.write_text(json.dumps(record, indent=1, default=str))
    print(json.dumps(next(iter(record["labs"].values())).get("model answers", {}).get("walls")))


if __name__ == "__main__":
    main()
