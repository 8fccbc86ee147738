"""Grade a few submissions with `labs grade --gpu` on this machine: `python -m tests.instructor.grading.grade_on_gpu`.

For a machine with a GPU, where the test suite may not be installed. A lab is calibrated first, which grades the model
answers. Then three submissions are graded, each of which has the score that it was made for: by the command `labs grade`,
or with `--direct` by the function that its workers call, where Dask and nbgrader are not installed. What is known so far
stands in the file at any time.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import nbformat

from instructor.build import Built, build_lab
from instructor.course import answered_notebook
from instructor.grading import Limits, SubmissionResult, calibrate, grade_notebook
from instructor.grading.submission import engine
from instructor.points import lab_path
from utils.machine.environment import environment

SUITE = Path(__file__).parent / "suite_lab.py"
LIMITS = Limits(gpu=True)


def submissions(built: Built, full: float) -> dict[str, tuple[str, float]]:
    """{what: (notebook, the most points it may get)}; with an answer missing it may be less: others may need it."""
    cells = nbformat.reads(built.instructor, as_version=4).cells
    test = next(c for c in cells if c.metadata.get("nbgrader", {}).get("grade") and c.cell_type == "code")
    without = answered_notebook(built, {test.id.removesuffix("_tests"): "pass"})
    return {
        "a-model-answers": (answered_notebook(built), full),
        "b-untouched": (built.student, 0.0),
        "c-one-answer-missing": (without, full - test.metadata.nbgrader["points"]),
    }


def row_of(result: SubmissionResult, expected: float, seconds: float) -> dict:
    """What the record keeps of a result."""
    row = {"score": result.score, "expected": expected, "seconds": round(seconds, 1), "walls": result.walls}
    row["flags"] = [asdict(flag) for flag in result.flags]
    row["cell seconds"] = {name: round(cell.seconds, 2) for name, cell in result.cells.items()}
    row["cells"] = {n: (c.status, c.message[:200]) for n, c in result.cells.items() if c.status != "passed"}
    return row


def by_command(built: Built, source: Path, tries: dict, seconds: float) -> tuple[str, dict]:
    """Run `labs grade --gpu` on a course of these submissions; returns what it printed, and a row for each graded one."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        course = Path(folder, "course")
        for student, (text, _) in tries.items():
            path = course / "submitted" / student / built.name / f"{built.name}.ipynb"
            path.parent.mkdir(parents=True)
            path.write_text(text, encoding="utf-8")
        # Not `labs`: it finds the instructor's commands only where the project is installed.
        labs = [sys.executable, "-c", "from instructor.cli import app; app()"]
        command = [*labs, "grade", str(source), "--gpu", "--course", str(course)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "140"},
        )
        try:
            printed, _ = process.communicate(timeout=max(5.0, seconds))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # what was graded until then is kept
            try:
                printed, _ = process.communicate(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                printed = process.communicate()[0]
        for path in sorted((course / "grading" / built.name / "results").glob("*.json")):
            kept = json.loads(path.read_text())
            kept.pop("key")
            result = SubmissionResult.from_json(kept)
            rows[result.student] = row_of(result, tries[result.student][1], result.seconds)
    return printed, rows


def main() -> None:
    """Calibrate each lab, and grade its submissions until the time is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--labs", nargs="*", default=["suite"])
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0)
    chosen = parser.parse_args()
    ends = time.monotonic() + chosen.seconds
    record = {"environment": environment(), "command": not chosen.direct, "labs": {}}

    def save() -> None:
        chosen.out.write_text(json.dumps(record, indent=1, default=str))

    def told(grade):
        """Print and keep what each grading of the calibration gives, which may take all the time that there is."""

        def grade_and_tell(self, job, seconds):
            started = time.monotonic()
            report = grade(self, job, seconds)
            automatic = sum(c.max_points for c in report.result.cells.values() if c.status != "by_hand")
            row = row_of(report.result, automatic, time.monotonic() - started)
            rows.setdefault("calibration gradings", []).append(row)
            save()
            print(f"{name}: calibration: {row['score']:g} of {row['expected']:g}, {row['seconds']} s", flush=True)
            return report

        return grade_and_tell

    engine.Zygote.grade = told(engine.Zygote.grade)
    for name in chosen.labs:
        source = SUITE if name == "suite" else lab_path(name)
        built = build_lab(source)
        began = time.monotonic()
        rows = record["labs"][name] = {}
        try:
            calibration = calibrate(built, LIMITS)
            rows["calibration"] = {"seconds": round(time.monotonic() - began, 1), "modes": calibration.modes}
            save()
            engine.close_all()
            tries = submissions(built, calibration.result.score)
            if chosen.direct:
                for what, (text, expected) in tries.items():
                    started = time.monotonic()
                    result = grade_notebook(built, text, limits=LIMITS, timeout=120)
                    rows[what] = row_of(result, expected, time.monotonic() - started)
                    save()
            else:
                printed, graded = by_command(built, source, tries, ends - time.monotonic() - 20)
                rows |= graded
                rows["printed"] = printed[-6000:]
        except Exception as error:
            rows["error"] = f"{type(error).__name__}: {error}"
            print(f"{name}: {rows['error'][:1500]}")
        save()
        for what in [w for w in rows if "-" in w]:
            row = rows[what]
            words = f"{row['score']:g}, expected {row['expected']:g}, {row['seconds']} s, {len(row['flags'])} flags"
            print(f"{name}: {what}: {words}", flush=True)


if __name__ == "__main__":
    main()
