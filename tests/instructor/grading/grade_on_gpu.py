"""Grade a small class of a lab with `labs grade --gpu`, and record what came of it.

    python -m tests.instructor.grading.grade_on_gpu lab1 --out FOLDER

For a machine with a GPU. `labs release` makes the students' bundle. Then four submissions are handed in, made from the
notebook in that bundle: solved, with one answer missing, untouched, and with a wrong answer of the catalogue in
`tests/instructor`. The command `labs grade` grades them. The record has the points beside those that each submission was
made for, the seconds, the walls, and which verdicts rest on numbers that the GPU computed. After --seconds the command is
interrupted as by Ctrl-C; what was graded until then is recorded.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from dataclasses import asdict
from pathlib import Path

import nbformat

from instructor.build import Built, build_lab
from instructor.course import answered_notebook
from instructor.grading import Limits, SubmissionResult
from instructor.grading.submission.engine import known_calibration
from instructor.points import lab_path
from tests.instructor.lab_cases import WrongAnswer, answers_in, changed_text, has_role
from utils.files import write_whole
from utils.machine.environment import environment

# The wrong answer of each lab: the first of the catalogue whose answer cell is this one.
WRONG = {"lab1": "q2_3", "lab2_flexattention": "q2_1", "lab3_gluon": "q5_1", "lab4_sdpa": "q1_1"}


def wrong_answer(lab: str) -> WrongAnswer:
    """A catalogued wrong answer of a lab."""
    known = importlib.import_module(f"tests.instructor.{lab.partition('_')[0]}_wrong_answers").WRONG_ANSWERS
    return next((wrong for wrong in known if wrong.cell == WRONG.get(lab)), known[0])


def submissions(built: Built) -> dict[str, tuple[str, set[str]]]:
    """{student: (notebook, the test cells that have to lose their points)}; all of them for an untouched notebook."""
    model = answers_in(nbformat.reads(built.instructor, as_version=4).cells)
    released = answers_in(nbformat.reads(built.student, as_version=4).cells)
    wrong = wrong_answer(built.name)
    answer = changed_text(model[wrong.cell], wrong.replaces)
    answer = f"{answer}\n{wrong.code}" if wrong.code else answer
    tests = test_cells(built)
    missing = next(name for name in released if f"{name}_tests" in tests)
    return {
        "ada-solved": (answered_notebook(built), set()),
        "ben-wrong": (answered_notebook(built, {wrong.cell: answer}), wrong.lost),
        "cleo-missing": (
            answered_notebook(built, {missing: released[missing]}),
            {t for t in tests if t.startswith(f"{missing}_")},
        ),
        "dan-untouched": (built.student, tests),
    }


def test_cells(built: Built) -> set[str]:
    """The ids of the test cells that give points."""
    cells = nbformat.reads(built.instructor, as_version=4).cells
    return {cell.id for cell in cells if cell.cell_type == "code" and has_role(cell, "grade")}


def run(command: list[str], log: Path, seconds: float) -> int:
    """Run a command, its terminal output added to a log; interrupt it after some seconds. Returns its status."""
    environment = {**os.environ, "COLUMNS": "140", "PYTHONUNBUFFERED": "1"}
    with log.open("a", encoding="utf-8") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            return process.wait(timeout=max(5.0, seconds))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # what was graded until then is kept
            try:
                return process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return process.wait()


def row_of(result: SubmissionResult, automatic: set[str], lost: set[str]) -> dict:
    """What the record keeps of a graded submission: of its test cells, and of those that it was made to lose."""
    tests = {name: cell for name, cell in result.cells.items() if name in automatic}
    unexpected = {
        name: (cell.status, cell.message[:300])
        for name, cell in tests.items()
        if (cell.status != "passed") != (name in lost)
    }
    return {
        "score": result.score,
        "of": sum(cell.max_points for cell in tests.values()),
        "made to lose": sum(cell.max_points for name, cell in tests.items() if name in lost),
        "verdicts that were not expected": unexpected,
        "seconds": round(result.seconds, 1),
        "seconds of its cells": round(result.cell_seconds, 1),
        "flags": [asdict(flag) for flag in result.flags],
        "verdicts": len(tests),
        "verdicts from the GPU": sorted(name for name, cell in tests.items() if cell.on_gpu),
        "verdicts without the GPU": sorted(name for name, cell in tests.items() if not cell.on_gpu),
        "cell seconds": {name: round(cell.seconds, 2) for name, cell in tests.items()},
        "lost": {name: (cell.status, cell.message[:300]) for name, cell in tests.items() if cell.status != "passed"},
        "walls": result.walls,
    }


def main() -> None:
    """Release a lab, hand in four submissions, grade them, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lab", help="a lab by name, such as lab1")
    parser.add_argument("--out", type=Path, required=True, help="the folder for the record and the log")
    parser.add_argument("--seconds", type=float, default=600.0, help="the time for everything")
    parser.add_argument("--cpu", action="store_true", help="without --gpu, to try this script")
    chosen = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore SIGINT
    ends = time.monotonic() + chosen.seconds
    built = build_lab(lab_path(chosen.lab))
    lab, limits, automatic = built.name, Limits(gpu=not chosen.cpu), test_cells(built)
    chosen.out.mkdir(parents=True, exist_ok=True)
    path, log = chosen.out / f"grade_gpu_{lab}.json", chosen.out / f"{lab}.log"
    labs = str(Path(sysconfig.get_path("scripts"), "labs"))
    record = {"environment": environment(), "lab": lab, "submissions": {}}

    def save() -> None:
        write_whole(path, json.dumps(record, indent=1, default=str))

    save()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        status = run([labs, "release", lab, "--to", folder], log, ends - time.monotonic())
        record["release"] = {"status": status, "seconds": round(time.monotonic() - began, 1)}
        with zipfile.ZipFile(Path(folder, f"{lab}.zip")) as bundle:
            name = next(name for name in bundle.namelist() if Path(name).name == f"{lab}.ipynb")
            record["release"]["notebook is the built one"] = bundle.read(name).decode() == built.student
        course, handed_in = Path(folder, "course"), submissions(built)
        for student, (text, _) in handed_in.items():
            notebook = course / "submitted" / student / lab / f"{lab}.ipynb"
            notebook.parent.mkdir(parents=True)
            notebook.write_text(text, encoding="utf-8")
        record["wrong answer"] = wrong_answer(lab).mistake
        began = time.monotonic()
        command = [labs, "grade", lab, "--course", str(course), *([] if chosen.cpu else ["--gpu"])]
        status = run(command, log, ends - time.monotonic() - 25)
        record["grade"] = {
            "command": command[1:],
            "status": status,
            "seconds, the model answers included": round(time.monotonic() - began, 1),
        }
        calibration = known_calibration(built, limits)
        if calibration is not None:
            record["model answers"] = row_of(calibration, automatic, set())
        for kept in sorted((course / "grading" / lab / "results").glob("*.json")):
            fields = json.loads(kept.read_text(encoding="utf-8"))
            fields.pop("key")
            result = SubmissionResult.from_json(fields)
            record["submissions"][result.student] = row_of(result, automatic, handed_in[result.student][1])
        table = course / "grading" / lab / "summary.csv"
        record["table"] = table.read_text(encoding="utf-8").splitlines() if table.is_file() else []
        save()
    for student, row in record["submissions"].items():
        words = f"{row['score']:g} of {row['of']:g}, made to lose {row['made to lose']:g}, {row['seconds']} s"
        from_gpu = f"{len(row['verdicts from the GPU'])} of {row['verdicts']} verdicts from the GPU"
        print(f"{lab}: {student}: {words}, {len(row['flags'])} flags, {from_gpu}", flush=True)
        for name, (kind, message) in row["verdicts that were not expected"].items():
            print(f"  not expected: {name}: {kind}: {message}")
    if status:
        print(
            f"{lab}: labs grade ended with status {status}; its last lines:",
            *log.read_text().splitlines()[-12:],
            sep="\n",
        )
    sys.exit(status)


if __name__ == "__main__":
    main()
