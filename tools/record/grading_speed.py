"""Grade the same class with this engine and with stock `nbgrader autograde`: seconds, and whether the scores agree.

    python -m tools.record.grading_speed lab1 --submissions 40 --jobs 2
    python -m tools.record.grading_speed lab1 --submissions 40 --stock 4      stock grades the first 4 only

Stock nbgrader grades one submission after the other, each in a new kernel; its time for the class is its time for one
submission times their number when `--stock` is smaller. It has the threads it takes by itself; a worker of the engine
has one. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from instructor.build import Built, build_lab
from instructor.course import Course, answered_notebook
from instructor.grading.class_.cluster import grade_class
from instructor.grading.class_.intake import submissions
from instructor.points import lab_path
from utils.machine.environment import environment


def class_of(built: Built, count: int) -> dict[str, str]:
    """{student: notebook}: solved ones, with one answer missing in turn, and some untouched."""
    import nbformat

    released = {cell.id: cell.source for cell in nbformat.reads(built.student, as_version=4).cells}
    answers = [
        cell.id
        for cell in nbformat.reads(built.student, as_version=4).cells
        if cell.cell_type == "code" and cell.metadata.get("nbgrader", {}).get("solution")
    ]
    found = {}
    for number in range(count):
        if number % 10 == 9:
            text = built.student
        elif number % 2:
            missing = answers[number // 2 % len(answers)]
            text = answered_notebook(built, {missing: released[missing]})
        else:
            text = answered_notebook(built)
        found[f"student{number:03}"] = text
    return found


def compare(lab: str, count: int, stock: int, jobs: int, timeout: int) -> dict:
    """Both engines on the same class; returns the table with machine and versions."""
    built = build_lab(Path(lab) if lab.endswith(".py") else lab_path(lab))
    notebooks = class_of(built, count)
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Course(Path(folder, "ours")), Course(Path(folder, "stock"), timeout=timeout)
        for number, (student, text) in enumerate(notebooks.items()):
            ours.submit(built.name, student, text)
            if number < stock:
                theirs.submit(built.name, student, text)
        theirs.release(built)
        began = time.perf_counter()
        expected = theirs.grade(built.name)
        stock_seconds = time.perf_counter() - began
        began = time.perf_counter()
        summary = grade_class(ours, built, submissions(ours.root, built.name), jobs=jobs, timeout=timeout)
        our_seconds = time.perf_counter() - began
        scores = ours.scores(built.name)
    differing = {
        f"{student} {cell}": [vars(score), vars(scores[student][cell])]
        for student, cells in expected.items()
        for cell, score in cells.items()
        if score != scores[student][cell]
    }
    overheads = [r.seconds - r.cell_seconds for r in summary.graded]
    return {
        "what": f"{count} submissions for {built.name}, {jobs} workers; stock nbgrader autograde on {stock} of them",
        "environment": environment(),
        "stock_seconds": round(stock_seconds, 1),
        "stock_seconds_for_all": round(stock_seconds / stock * count, 1),
        "engine_seconds": round(our_seconds, 1),
        "times_faster": round(stock_seconds / stock * count / our_seconds, 2),
        "cell_seconds": round(statistics.median(r.cell_seconds for r in summary.graded), 2),
        "overhead_seconds": {"median": round(statistics.median(overheads), 3), "largest": round(max(overheads), 3)},
        "scores_compared": sum(map(len, expected.values())),
        "scores_that_differ": differing,
        "flagged": {r.student: [vars(flag) for flag in r.flags] for r in summary.flagged},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lab")
    parser.add_argument("--submissions", type=int, default=40)
    parser.add_argument("--stock", type=int, help="how many of them stock nbgrader grades; all if left out")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=300)
    parser.add_argument("--to", type=Path, help="also write the table to this JSON file")
    said = parser.parse_args()
    table = compare(said.lab, said.submissions, said.stock or said.submissions, said.jobs, said.timeout)
    text = json.dumps(table, indent=1)
    print(text)
    if said.to:
        said.to.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
