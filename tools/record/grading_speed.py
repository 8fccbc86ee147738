"""Grade the same class with `labs grade` and with stock `nbgrader autograde`: seconds, and whether the scores agree.

    python -m tools.record.grading_speed lab1 --submissions 40 --jobs 2
    python -m tools.record.grading_speed lab1 --submissions 40 --stock 4      # stock nbgrader grades the first 4 only

Stock nbgrader grades one submission after the other, each in a new kernel. With a smaller `--stock`, its time for the class
is computed from its time for one submission. Stock nbgrader may use all threads; each worker of `labs grade` has one
thread. Nothing else should run on the machine.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from instructor.build import Built, build_lab
from instructor.course import Course, answered_notebook
from instructor.grading.class_.cluster import grade_class
from instructor.grading.class_.intake import submissions
from instructor.points import lab_path
from tools.record.common import Record, arguments_parser, to_text


def class_of(built: Built, count: int) -> dict[str, str]:
    """Make the notebooks of a class, {student: notebook}: solved, with one answer missing in turn, and untouched.

    Each answer ends with the student's name in a comment: no two students hand in the same text, and what a cache keeps
    of one text, such as lab 3's of compiled kernels, helps no other student.
    """
    import nbformat

    released = {cell.id: cell.source for cell in nbformat.reads(built.student, as_version=4).cells}
    model = {cell.id: cell.source for cell in nbformat.reads(built.instructor, as_version=4).cells}
    answers = [
        cell.id
        for cell in nbformat.reads(built.student, as_version=4).cells
        if cell.cell_type == "code" and cell.metadata.get("nbgrader", {}).get("solution")
    ]
    notebooks = {}
    for number in range(count):
        student = f"student{number:03}"
        written = {name: f"{model[name]}\n# {student}" for name in answers}
        if number % 2:
            missing = answers[number // 2 % len(answers)]
            written[missing] = released[missing]
        notebooks[student] = built.student if number % 10 == 9 else answered_notebook(built, written)
    return notebooks


def compare(built: Built, count: int, stock: int, jobs: int, timeout: int) -> dict:
    """Grade the same class with both engines.

    Args:
        built: the lab.
        count: submissions in the class.
        stock: how many of them stock nbgrader grades.
        jobs: workers of `labs grade`.
        timeout: seconds for a cell.

    Returns:
        Seconds of both engines, the scores that differ, and the flagged submissions.
    """
    notebooks = class_of(built, count)
    with tempfile.TemporaryDirectory() as folder:
        engine_course, stock_course = Course(Path(folder, "ours")), Course(Path(folder, "stock"), timeout=timeout)
        for number, (student, text) in enumerate(notebooks.items()):
            engine_course.submit(built.name, student, text)
            if number < stock:
                stock_course.submit(built.name, student, text)
        stock_course.release(built)
        began = time.perf_counter()
        stock_course.nbgrader("autograde", built.name, "--force")
        stock_scores = stock_course.scores(built.name)
        stock_seconds = time.perf_counter() - began
        began = time.perf_counter()
        handed_in = submissions(engine_course.root, built.name)
        summary = grade_class(engine_course, built, handed_in, jobs=jobs, timeout=timeout)
        engine_seconds = time.perf_counter() - began
        engine_scores = engine_course.scores(built.name)
    differing = {
        f"{student} {cell}": [vars(score), vars(engine_scores[student][cell])]
        for student, cells in stock_scores.items()
        for cell, score in cells.items()
        if score != engine_scores[student][cell]
    }
    stock_seconds_for_all = stock_seconds / stock * count
    return {
        "stock_seconds": round(stock_seconds, 1),
        "stock_seconds_for_all": round(stock_seconds_for_all, 1),
        "engine_seconds": round(engine_seconds, 1),
        "times_faster": round(stock_seconds_for_all / engine_seconds, 2),
        "seconds_of_a_submission": round(statistics.median(result.seconds for result in summary.graded), 2),
        "scores_compared": sum(map(len, stock_scores.values())),
        "scores_that_differ": differing,
        "flagged": {result.student: [vars(flag) for flag in result.flags] for result in summary.flagged},
    }


def main(arguments: list[str] | None = None) -> None:
    """Grade a class with both engines and record the comparison."""
    parser = arguments_parser(__doc__)
    parser.add_argument("lab", help="a lab's name, or the path of its source")
    parser.add_argument("--submissions", type=int, default=40)
    parser.add_argument("--stock", type=int, help="how many of them stock nbgrader grades; without it, all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=300, help="seconds for a cell")
    options = parser.parse_args(arguments)
    built = build_lab(Path(options.lab) if options.lab.endswith(".py") else lab_path(options.lab))
    count, stock = options.submissions, options.stock or options.submissions
    record = Record(
        options,
        f"{count} submissions for {built.name}, {options.jobs} workers; stock nbgrader autograde on {stock} of them",
    )
    record.contents |= compare(built, count, stock, options.jobs, options.timeout)
    record.finish()
    print(to_text(record.contents))


if __name__ == "__main__":
    main()
