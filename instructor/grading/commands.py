"""`labs release`, `labs grade` and `labs feedback`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from instructor.grading.submission.results import GradingError
from utils.bench.terminal import STOPPED
from utils.validation import UserError

app = typer.Typer()

Lab = Annotated[str, typer.Argument(help="A lab, in full or by its beginning (lab4), or the path of its source.")]
CourseFolder = Annotated[Path, typer.Option("--course", help="The folder of the course, with submitted/.")]


def _build(lab: str):
    from instructor.build import build_lab
    from instructor.points import lab_path

    return build_lab(Path(lab) if lab.endswith(".py") else lab_path(lab))


def _name(lab: str) -> str:
    """Return the name in full of a lab; a class may also have a lab whose source is not here."""
    from instructor.points import lab_path

    try:
        return Path(lab).stem if lab.endswith(".py") else lab_path(lab).stem
    except UserError:
        return Path(lab).stem


@app.command()
def release(
    lab: Lab,
    target: Annotated[Path, typer.Option("--to", help="The folder for the bundle.")] = Path("build/release"),
    solutions: Annotated[
        bool, typer.Option("--solutions", help="Worked solutions instead, for after the deadline: one notebook.")
    ] = False,
) -> None:
    """Make the bundle that students get, after searching all of it for solutions and hidden tests."""
    from instructor.grading.release import release as make_bundle
    from instructor.grading.release import release_solutions

    if solutions:
        path = release_solutions(_build(lab), target)
        typer.echo(f"{path}: answers and explanations; no hidden test and no marking scheme in it")
        return
    path, files = make_bundle(_build(lab), target)
    typer.echo(f"{path}: {files} files, {path.stat().st_size / 1e6:.1f} MB; no secret line in any of them")


@app.command()
def grade(
    lab: Lab,
    course_folder: CourseFolder = Path("course"),
    archive: Annotated[Path | None, typer.Option("--zip", help="Take in a learning platform's zip first.")] = None,
    jobs: Annotated[int, typer.Option(help="Worker processes on this machine.", min=1)] = os.cpu_count() or 1,
    scheduler: Annotated[str | None, typer.Option(help="A Dask scheduler instead, such as tcp://host:8786.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a cell, or a question's tests, may take.", min=1)] = 120,
    gpu: Annotated[bool, typer.Option("--gpu", help="One submission a GPU (workers' Dask resource GPU).")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Grade this student again; may be repeated.")] = None,
    memory: Annotated[float, typer.Option(help="GB that a process of a submission may add.", min=0.5)] = 6.0,
    due: Annotated[str | None, typer.Option(help="The due date, such as '2026-12-01 23:59 +0100'.")] = None,
    zone: Annotated[
        str | None, typer.Option(help="The time zone of --zip's times, and of --due without one; else this machine's.")
    ] = None,
    roster: Annotated[
        Path | None, typer.Option(help="A CSV with id, first_name, last_name, email; kept in the course.")
    ] = None,
) -> None:
    """Grade the submissions for a lab, each isolated, into nbgrader's gradebook; interrupted, it goes on next time."""
    if find_spec("distributed") is None:
        raise GradingError("grading needs distributed, which is not installed here: pip install -e '.[grading]'.")
    from instructor.grading.class_.dates import read_date, time_zone
    from instructor.grading.class_.gradebook import only_grader
    from instructor.grading.sandbox.walls import Limits

    limits = Limits(gpu=gpu, memory_gb=memory)
    if archive is None and not course_folder.is_dir():
        raise GradingError(
            f"{course_folder} is no folder: name the course's with --course, or take in a zip with --zip."
        )
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # several torch processes on few cores slow each other down tenfold
    with _interrupts_as_line(), only_grader(course_folder, _name(lab)):
        from instructor.course import Course
        from instructor.grading.class_.cluster import grade_class
        from instructor.grading.class_.late import set_due_date
        from instructor.grading.submission.harmless import for_terminal
        from utils.bench.terminal import show_steps

        built = _build(lab)
        course = Course(course_folder, timeout=int(timeout))
        local = time_zone(zone)
        date = read_date(due, local) if due is not None else None
        found = _found(course, built, roster, archive, local, only)
        with show_steps(remaining=True) as show:
            show("warming up", 0, len(found))
            summary = grade_class(
                course,
                built,
                found,
                jobs=jobs,
                scheduler=scheduler,
                timeout=timeout,
                limits=limits,
                again=bool(only),
                progress=lambda student, done, total: show(for_terminal(student, 60), done, total),
            )
        if date is not None:
            set_due_date(course, built.name, date)
            typer.echo(f"due {date:%Y-%m-%d %H:%M} UTC")
        _report(summary, course, built.name)
    if summary.failed:
        raise typer.Exit(1)


@contextmanager
def _interrupts_as_line() -> Iterator[None]:
    """Say after Ctrl-C how to go on, and leave with status 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted: what was graded is in the gradebook; run the same command again to go on", err=True)
        raise typer.Exit(STOPPED) from None


def _found(course, built, roster: Path | None, archive: Path | None, zone: tzinfo, only: list[str] | None) -> list:
    """Take in the roster and the zip, and find the submissions."""
    from instructor.grading.class_ import roster as people
    from instructor.grading.class_.intake import submissions, take_in
    from instructor.grading.submission.harmless import for_terminal
    from instructor.points import counted
    from utils.files import write_whole

    if roster is not None:
        known = people.read_roster(roster)
        write_whole(people.roster_path(course), roster.read_bytes())
        typer.echo(f"{len(known)} people in the roster")
    if archive is not None:
        intake = take_in(archive, course.root, built.name, zone)
        where = zone.tzname(datetime.now()) or zone
        taken = sum(bool(arrival.file) for arrival in intake.values())
        typer.echo(f"{counted(taken, 'submission')} taken in from {archive.name}, its times read as {where}")
        for student, arrival in intake.items():
            if not arrival.file:
                typer.echo(f"  not taken in: {for_terminal(student)}: {for_terminal(arrival.note)}")
    return submissions(course.root, built.name, only)


def _report(summary, course, lab: str) -> None:
    """Print who has what, and write it as a table."""
    from instructor.grading.class_ import report, roster
    from instructor.grading.submission.harmless import for_terminal
    from instructor.points import answers_wait, number_text

    ran = {result.student for result in summary.graded}
    roster.put_names(course, ran)
    students = report.everybody(course, lab, summary.failed)
    table = report.write_summary(course, lab, students)
    resumed = f" ({len(summary.resumed)} of them before)" if summary.resumed else ""
    waiting = sum(len(student.waiting) for student in students if student.id in ran)
    typer.echo(
        f"{len(ran) - len(summary.failed)} graded{resumed} in {summary.seconds:.0f} s, {len(summary.flagged)} flagged, "
        f"{answers_wait(waiting)}: labs formgrader --course {course.root}"
    )
    for student in students:
        if student.id in ran or student.outcome == "no notebook":
            typer.echo(f"  {for_terminal(student.id)}: {for_terminal(report.in_words(student))}")
    if summary.flagged:
        typer.echo("flags, each for a person to look at:")
    for result in sorted(summary.flagged, key=lambda r: r.student):
        typer.echo(f"  {for_terminal(result.student)}: {number_text(result.score)} points")
        for flag in result.flags:
            typer.echo(f"    {flag.question or 'submission'}: {flag.kind}: {for_terminal(flag.detail)}")
    walls: dict[str, str] = next((result.walls for result in summary.graded if result.walls), {})
    if walls:
        typer.echo("walls that stood:")
        for wall, how in walls.items():
            typer.echo(f"  {wall}: {how}")
    typer.echo(f"everybody, as a table: {table}")
    typer.echo(f"gradebook: {course.root / 'gradebook.db'}")


@app.command()
def feedback(
    lab: Lab,
    course_folder: CourseFolder = Path("course"),
    only: Annotated[list[str] | None, typer.Option(help="For this student alone; may be repeated.")] = None,
) -> None:
    """Write a page of feedback for each student, by `nbgrader generate_feedback`."""
    lab = _name(lab)
    from instructor.course import CourseError
    from instructor.grading.class_.feedback import finish_pages
    from instructor.grading.class_.intake import suggestion
    from instructor.grading.class_.report import class_of
    from instructor.grading.submission.harmless import for_terminal

    problem, folder, course = "", course_folder / "feedback", _course(course_folder)
    students = class_of(course, lab)
    known = [student.id for student in students]
    if unknown := sorted(set(only or ()) - set(known)):
        who = ", ".join(map(for_terminal, unknown))
        raise GradingError(
            f"nothing of {who} has been graded for {lab} in {course_folder}.{suggestion(unknown, known)}"
        )
    for choice in [["--student", student] for student in only or []] or [[]]:
        try:
            course.nbgrader("generate_feedback", lab, "--force", *choice)
        except CourseError as error:
            problem = str(error)
    finish_pages(folder, lab, students)
    pages = [page for page in folder.glob(f"*/{lab}/*.html") if not only or page.parts[-3] in only]
    typer.echo(f"{len(pages)} pages in {folder}")
    if problem:  # one that fails stops nobody else's
        having = {page.parts[-3] for page in pages}
        without = ", ".join(map(for_terminal, sorted(set(only or known) - having))) or "nobody"
        raise GradingError(f"without a page: {without}. What nbgrader said ends with:\n{problem[-2000:]}")


def _course(folder: Path):
    """The course in a folder, which has a gradebook and can be written."""
    from instructor.course import Course

    if not (folder / "gradebook.db").is_file():
        raise GradingError(f"{folder} has no gradebook.db: run `labs grade` with --course {folder} first.")
    if not os.access(folder, os.W_OK):
        raise GradingError(
            f"{folder} cannot be written, by you or because its disk is read-only: nbgrader keeps its results there."
        )
    return Course(folder)
