"""Output of the `labs bench` commands: tables, progress bars, and errors as one line."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from utils.bench.errors import BenchError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

FAILED, USAGE, STOPPED = 1, 2, 130  # exit codes: a failed benchmark, wrong input, Ctrl-C

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
ArtifactsDir = Annotated[Path, typer.Option("--artifacts-dir", help="Where runs are kept, each in a folder of its id.")]
RunName = Annotated[str, typer.Argument(help="A run id, its folder, or a results file.")]


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """Print a BenchError as one line on standard error and leave with exit status 2."""
    try:
        yield
    except BenchError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(USAGE) from None


def console(stderr: bool = False) -> Console:
    """Open a rich console. It is 200 columns wide when the output is no terminal, so that no cell is cut."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 200, highlight=False)


def show_table(columns: Sequence[str], lines: Sequence[Sequence[object]], title: str | None = None) -> None:
    """Print a table on standard output; the cells are shown as they are, without rich's markup."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name == "Target")
    for line in lines:
        table.add_row(*(escape(str(cell)) for cell in line))
    console().print(table)


def show_json(value: Any) -> None:
    """Print a value as JSON on standard output; paths become strings."""
    typer.echo(json.dumps(value, indent=1, default=str))


def progress_bar(*, remaining: bool = False) -> Progress:
    """Make a progress bar on standard error; it shows nothing if that is no terminal.

    Args:
        remaining: show the time that is left instead of the time that has passed.
    """
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn() if remaining else progress.TimeElapsedColumn(),
        console=console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
