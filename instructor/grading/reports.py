"""`labs stats`, `similar`, `export`, `formgrader` and `race`: what a class did, and grading by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from instructor.grading.commands import CourseFolder, Lab, _build, _course, _name
from instructor.grading.submission.results import GradingError

app = typer.Typer()


@app.command()
def stats(lab: Lab, course_folder: CourseFolder = Path("course")) -> None:
    """Write how many got what of each question, the commonest mistakes, and a picture of both."""
    from instructor.grading.class_.report import WORDS, as_csv, class_of, class_picture, statistics_rows
    from instructor.points import counted, number_text
    from utils.files import write_whole

    name, course = _name(lab), _course(course_folder)
    students, folder = class_of(course, name), course.root / "grading" / name
    rows = statistics_rows(students)
    write_whole(folder / "statistics.csv", as_csv(rows))
    write_whole(folder / "class.svg", class_picture(students, name))
    for row in rows:
        mean = number_text(row["mean"]) if row["mean"] != "" else "-"
        states = ", ".join(f"{words} {row[state]}" for state, words in WORDS.items() if row[state])
        typer.echo(f"{row['question']}: {mean} of {number_text(row['of'])}; {states}")
        if row["times"]:
            typer.echo(f"    {counted(row['times'], 'time')}: {row['commonest mistake']}")
    for name in ("statistics.csv", "class.svg"):
        typer.echo(str(folder / name))


@app.command()
def similar(lab: Lab, course_folder: CourseFolder = Path("course")) -> None:
    """Name the submissions whose code is alike, the lab's own code left out. A person has to look at each pair."""
    from importlib import import_module

    from instructor.grading.class_.intake import submissions
    from instructor.grading.class_.report import as_csv
    from instructor.grading.class_.similarity import alike, answers_of, given_code
    from instructor.grading.submission.harmless import for_terminal
    from instructor.grading.submission.library import ANSWERS
    from instructor.points import counted
    from utils.files import write_whole

    built = _build(lab)
    found = submissions(course_folder, built.name)
    classes = {s.student: answers_of(built, s.path.read_bytes()) for s in found}
    for module in ANSWERS.get(built.name, {}):  # whoever copied an answer of the course is alike its file
        path = Path(str(import_module(module).__file__))
        classes[f"utils/{path.name}"] = {"file": path.read_text(encoding="utf-8")}
    pairs = alike(classes, given_code(built))
    for pair in pairs:
        names = f"{for_terminal(pair.one)} and {for_terminal(pair.other)}"
        typer.echo(f"{names}: {pair.share:.0%} alike ({pair.shared} places), most in {', '.join(pair.cells)}")
    rows = [{**pair._asdict(), "share": round(pair.share, 3), "cells": " ".join(pair.cells)} for pair in pairs]
    table = course_folder / "grading" / built.name / "similar.csv"
    write_whole(table, as_csv(rows) or "one,other,share,shared,cells\n")
    typer.echo(
        f"{counted(len(pairs), 'pair')} of {counted(len(found), 'submission')}: {table}. Alike is not copied: look at each."
    )


@app.command()
def export(
    lab: Annotated[str | None, typer.Argument(help="A lab by name; needed for every form but nbgrader's.")] = None,
    course_folder: CourseFolder = Path("course"),
    form: Annotated[str, typer.Option("--as", help="nbgrader (all labs), questions, moodle or canvas.")] = "nbgrader",
    to: Annotated[Path | None, typer.Option(help="The CSV file; else in the course's folder.")] = None,
) -> None:
    """Write the grades as CSV, or in the form of a learning platform."""
    from instructor.grading.class_.platforms import FORMS, export_class, export_gradebook

    if form not in ("nbgrader", *FORMS):
        raise GradingError(f"there is no form {form!r}: choose nbgrader, {', '.join(FORMS)}.")
    if form != "nbgrader" and lab is None:
        raise GradingError(f"--as {form} is for one lab: `labs export lab1 --as {form}`.")
    course = _course(course_folder)
    if form == "nbgrader" or lab is None:
        path = to or course_folder / "grades.csv"
        notes = export_gradebook(course, path)
    else:
        name = _name(lab)
        path = to or course_folder / f"{name}-{form}.csv"
        notes = export_class(course, name, form, path)
    typer.echo(f"{path}")
    for note in notes:
        typer.echo(f"  {note}.")


@app.command()
def formgrader(
    course_folder: CourseFolder = Path("course"),
    port: Annotated[int, typer.Option(help="The port of the server.", min=1, max=65535)] = 8890,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser.")] = True,
) -> None:
    """Grade answers in words: nbgrader's formgrader, with marking schemes, and without a button that runs their code."""
    import os
    import subprocess
    import sys

    from instructor.build import ROOT

    course = _course(course_folder)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "jupyterlab", f"--port={port}"]
    command += ["--LabApp.default_url=/formgrader/manage_assignments"]
    command += ["--ServerApp.jpserver_extensions={'instructor.grading.formgrader': True}"]
    command += [] if browser else ["--no-browser"]
    command += ["--allow-root"] if os.name == "posix" and os.getuid() == 0 else []
    typer.echo(f"the formgrader: http://localhost:{port}/formgrader (Ctrl-C ends it)")
    try:
        raise typer.Exit(subprocess.run(command, cwd=course.root, env={**os.environ, "PYTHONPATH": path}).returncode)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def race(lab: Lab = "lab3_gluon", course_folder: CourseFolder = Path("course")) -> None:
    """Time the class's kernels of lab 3, Question 5.3, on this machine's GPU, each call with fresh inputs and checked."""
    from contextlib import closing

    from instructor.grading.class_.gradebook import as_csv
    from instructor.grading.class_.intake import submissions
    from instructor.grading.race import race as racing
    from instructor.grading.submission.harmless import for_terminal
    from utils.files import write_whole

    if _name(lab) != "lab3_gluon":
        raise GradingError(f"{lab} has no race: lab3_gluon has.")
    built = _build(lab)
    found = submissions(course_folder, "lab3_gluon")
    entries = {s.student: racing.entry_of(built, s.path.read_bytes()) for s in found}
    with closing(racing.Race(racing.model_answer(built))) as one:
        results = racing.race_class(
            one, entries, lambda r: typer.echo(f"{for_terminal(r.student)} {'refused' if r.refused else 'done'}")
        )
    rows, lines = racing.table(results)
    for line in lines:
        typer.echo(for_terminal(line))
    path = course_folder / "grading" / "lab3_gluon" / "race.csv"
    write_whole(path, as_csv(rows))
    typer.echo(str(path))
