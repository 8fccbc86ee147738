"""`labs`: the course's command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from utils.bench.cli import app as bench
from utils.bench.terminal import Commands, show_steps, show_table
from utils.files import ROOT
from utils.progress import record
from utils.validation import UserError, lab_named

app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, help="The GPU efficiency labs: check, open, measure."
)

app.add_typer(bench, name="bench", help="List, run, compare and check benchmarks.")


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False) -> None:
    """Say which parts of each lab this machine can run, and the remedy for the parts it cannot."""
    from utils.attention import backend_table
    from utils.machine.doctor import examine_machine, print_report

    report = examine_machine(backend_table())
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        print_report(report)
    if report["faults"]:
        raise typer.Exit(1)


def find_lab(name: str) -> Path:
    """Return the notebook of a lab, given its name or the beginning of its name, such as lab3; raise UserError otherwise."""
    # Do not remove other folders from the name: a notebook elsewhere is not a lab of this course.
    lab = lab_named(name.removeprefix("./"), sorted(path.stem for path in ROOT.glob("lab*.ipynb")))
    return ROOT / f"{lab}.ipynb"


@app.command("open")
def open_lab(
    lab: Annotated[str, typer.Argument(help="A lab, in full or by its beginning: lab3 is enough.")] = "lab1",
    port: Annotated[
        int | None,
        typer.Option(help="The port to serve on; by default the first free one from 8888.", min=1, max=65535),
    ] = None,
    instructor: Annotated[bool, typer.Option("--instructor", help="Show the formgrader and all files.")] = False,
    course: Annotated[
        Path | None,
        typer.Option(help="With --instructor: the class that the formgrader shows, a folder below this one."),
    ] = None,
) -> None:
    """Open JupyterLab on a lab; without a display, print the address to open elsewhere."""
    from utils.server import forwarding_command, free_port, has_display, jupyter_command

    notebook = find_lab(lab)
    folder = class_folder(course) if instructor else ROOT
    record.keep_original(notebook)
    if port is None and "JUPYTER_PORT" not in os.environ:
        port = free_port()
    where = "in your browser" if has_display() else "at the address below: open it in a browser"
    typer.echo(f"JupyterLab opens {notebook.name} {where}. Ctrl-C here asks whether to stop it.")
    if port and (forwarding := forwarding_command(port)):
        typer.echo(f"You came by SSH. First run this on your own machine: {forwarding}")
    if folder != ROOT:
        typer.echo(f"Answers in words: menu Nbgrader, Formgrader; the class is in {folder.relative_to(ROOT)}.")
    command = jupyter_command(notebook, port, instructor)
    if sys.platform == "win32":  # on Windows execv would return to the terminal at once
        raise typer.Exit(subprocess.run(command, cwd=folder, check=False).returncode)
    # This process becomes the server. A parent process would kill the server at Ctrl-C, before the user answers its question.
    sys.stdout.flush()
    os.chdir(folder)
    os.execv(command[0], command)


def class_folder(course: Path | None) -> Path:
    """Return the folder in which an instructor's server starts: `course`, made by `labs grade`, or the labs' folder without a class."""
    folder = (course or ROOT / "course").resolve()
    if not (folder / "nbgrader_config.py").is_file():
        if course is None:
            return ROOT
        raise UserError(f"{folder} has no nbgrader_config.py; `labs grade` makes a class.")
    if ROOT not in folder.parents:
        raise UserError(f"{folder} is not below {ROOT}, where JupyterLab's files begin: move it there.")
    return folder


@app.command("check")
def check_lab(
    lab: Annotated[str, typer.Argument(help="A lab, in full or by its beginning.")] = "lab1",
    timeout: Annotated[int, typer.Option(help="Seconds that one cell may take.", min=1)] = 300,
) -> None:
    """Run a copy of a lab and its visible checks here; print the table of points; status 1 if a check did not pass."""
    with show_steps(remaining=True) as show:
        notebook = find_lab(lab)
        show(step := f"running {notebook.name}")
        executed = record.run_checks(notebook, timeout, lambda done, total: show(step, done, total))
        record.keep_outcomes(notebook, record.outcomes_of(executed))
    found = record.parts(executed)
    rows = [
        [f"{part.question}{' (bonus)' if part.bonus else ''}", part.title, f"{part.points:g}", _verdict(part)]
        for part in found
    ]
    show_table(["Question", "", "Points", "Visible check"], rows, wrap=["", "Visible check"])
    typer.echo(f"{record.summary(found)} Grading also tries other inputs.")
    if any(part.state not in (record.PASSED, record.BY_HAND) and not part.bonus for part in found):
        raise typer.Exit(1)


def _verdict(part: record.Part) -> str:
    message = re.sub(r"^(Bonus )?(Question )?[\d.]+:? ?", "", part.message)
    return f"{part.state}: {message}" if part.state == record.FAILED and message else part.state


@app.command("progress")
def show_progress() -> None:
    """Say which points the visible checks gave so far, in all labs."""
    for notebook in sorted(ROOT.glob("lab*.ipynb")):
        found = record.parts(record.read_notebook(notebook), record.read_record(notebook))
        typer.echo(f"{notebook.stem:20} {record.summary(found)}")


@app.command("reset")
def reset_lab(lab: Annotated[str, typer.Argument(help="A lab, in full or by its beginning.")]) -> None:
    """Start a lab again; the old work is kept in out/backup."""
    notebook = find_lab(lab)
    backup = record.reset(notebook)
    typer.echo(f"{notebook.name} starts again. Your old work: {backup.relative_to(ROOT)}")


def mount_plugins() -> None:
    """Add the commands that other installed packages offer, such as the instructor's `labs build`."""
    for entry in metadata.entry_points(group="labs.commands"):
        if find_spec(entry.module.split(".")[0]) is None:
            continue  # a student's copy has no instructor/ folder
        plugin = entry.load()
        for command in plugin.registered_commands:
            command.rich_help_panel = "For instructors"
        app.registered_commands.extend(plugin.registered_commands)


def main() -> None:
    """Run `labs`."""
    mount_plugins()
    app()


if __name__ == "__main__":
    main()
