"""`labs`: the course's command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from utils.bench.cli import app as bench
from utils.files import ROOT

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The GPU efficiency labs: check, open, measure.")

app.add_typer(bench, name="bench", help="List, run, compare and check benchmarks.")


@app.callback()
def labs() -> None:
    """The GPU efficiency labs: check, open, measure."""


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


def has_display() -> bool:
    """Whether a browser window could open here."""
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def jupyter_command(notebook: Path, port: int | None) -> list[str]:
    """Return the command that starts JupyterLab on one notebook, from the folder of the labs."""
    # The notebook is the default address, not a file to open: the address that Jupyter prints then leads to it.
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={ROOT}"]
    command.append(f"--LabApp.default_url=/lab/tree/{notebook.relative_to(ROOT)}")
    if port is not None:
        command.append(f"--ServerApp.port={port}")
    if not has_display():
        command.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    return command


@app.command("open")
def open_lab(
    lab: Annotated[str, typer.Argument(help="lab1, lab2_flexattention, lab3_gluon or lab4_sdpa")] = "lab1",
    port: Annotated[int | None, typer.Option(help="The port to serve on; JupyterLab chooses one if not given.")] = None,
) -> None:
    """Open JupyterLab on a lab; without a display, print the address to open elsewhere."""
    name = lab.removesuffix(".ipynb")
    notebook = ROOT / f"{name}.ipynb"
    if not notebook.exists():
        present = ", ".join(sorted(path.stem for path in ROOT.glob("lab*.ipynb"))) or "none"
        typer.echo(f"error: there is no {name}.ipynb in {ROOT}; the labs here are: {present}.", err=True)
        raise typer.Exit(2)
    if not has_display():
        typer.echo("No display here: open the address below in a browser.")
    raise typer.Exit(subprocess.run(jupyter_command(notebook, port), cwd=ROOT, check=False).returncode)


def mount_plugins() -> None:
    """Add the commands that other installed packages offer, such as the instructor's `labs build`."""
    for entry in metadata.entry_points(group="labs.commands"):
        if find_spec(entry.module.split(".")[0]) is None:
            continue  # a student's copy has no instructor/ folder
        plugin = entry.load()
        app.registered_commands.extend(plugin.registered_commands)
        app.registered_groups.extend(plugin.registered_groups)


def main() -> None:
    """Run `labs`."""
    mount_plugins()
    app()


if __name__ == "__main__":
    main()
