"""The instructor's commands: `labs build`, `points`, `demo`, and those of `instructor.grading.commands`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from instructor.grading.commands import app as grading
from instructor.grading.reports import app as reports
from instructor.source import LabError
from utils.bench.terminal import Commands

app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, help="Build the labs' notebooks from their sources."
)
app.registered_commands.extend([*grading.registered_commands, *reports.registered_commands])

Names = Annotated[list[str] | None, typer.Argument(help="Labs by name, such as lab1; all of them if left out.")]


def _names(labs: list[str] | None) -> list[str]:
    from instructor.points import lab_names

    names = labs or lab_names()
    if not names:
        raise LabError(["there is no lab in instructor/labs."])
    return names


@app.command()
def build(
    labs: Names = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if a notebook is out of date.")] = False,
) -> None:
    """Build the instructor's and the students' notebook of each lab."""
    from instructor import build as builder
    from instructor.points import lab_path, number_text
    from instructor.refusals import refusals

    stale, problems = [], []
    for name in _names(labs):
        try:
            built = builder.build_lab(lab_path(name))
        except LabError as error:
            problems += error.problems
            continue
        if found := refusals(built):
            problems += found
            continue
        regular, bonus = (sum(q.points for q in built.questions if q.bonus == which) for which in (False, True))
        sums = f"{number_text(regular)} points + {number_text(bonus)} bonus in {len(built.questions)} questions"
        if check:
            outdated = builder.stale_files(built, builder.ROOT)
            stale += outdated
            typer.echo(f"{name}: {sums}; {'out of date' if outdated else 'up to date'}")
            continue
        written = builder.write_files(built.files(builder.ROOT))
        typer.echo(f"{name}: {sums}")
        for path in built.files(builder.ROOT):
            state = "written" if path in written else "unchanged"
            typer.echo(f"  {path.relative_to(builder.ROOT)}  {state}")
    if problems:
        raise LabError(problems)
    for path in stale:
        relative = path.relative_to(builder.ROOT)
        typer.echo(f"error: {relative} differs from its source: run `labs build {path.stem}`.", err=True)
    if stale:
        raise typer.Exit(1)


@app.command()
def points(
    labs: Names = None,
    readme: Annotated[
        Path | None, typer.Option(help="Put each table between <!-- points:LAB --> and <!-- /points --> of this file.")
    ] = None,
) -> None:
    """Print each lab's table of questions and points, or put it into a README."""
    from instructor.points import lab_path, points_table, put_points_table
    from utils.files import write_whole

    tables = {path.stem: points_table(path.stem) for path in map(lab_path, _names(labs))}
    if readme is None:
        typer.echo("\n\n".join(f"{name}\n\n{table}" for name, table in tables.items()))
        return
    text = readme.read_text(encoding="utf-8", errors="surrogateescape")  # what is not UTF-8 stays as it is
    for name, table in tables.items():
        text = put_points_table(text, name, table)
    write_whole(readme, text.encode(errors="surrogateescape"))


@app.command()
def demo(
    labs: Names = None,
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("out/demo"),
    timeout: Annotated[int, typer.Option(help="Seconds that one cell may take.", min=1)] = 900,
) -> None:
    """Run the solved labs under one bar; write notebooks, pages, traces and a summary."""
    from instructor.build import build_lab
    from instructor.demo import run_demo
    from instructor.points import lab_path
    from utils.bench.terminal import show_steps

    built = [build_lab(lab_path(name)) for name in _names(labs)]
    out.mkdir(parents=True, exist_ok=True)
    with show_steps(remaining=True) as show:
        summary, failed = run_demo(built, out.absolute(), show, timeout)
    typer.echo(f"The demo is ready: {summary}")
    for problem in failed:
        typer.echo(f"error: {problem}", err=True)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
