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
def errors_as_lines(*kinds: type[Exception]) -> Iterator[None]:
    """Print errors that the user can solve as one line and leave with exit status 2.

    They are BenchError, OSError for a file that cannot be read or written, and the kinds that are given.
    """
    solvable: tuple[type[Exception], ...] = (BenchError, *kinds)
    try:
        yield
    except solvable as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(USAGE) from None
    except OSError as error:
        if error.filename is None:
            raise
        typer.echo(f"error: {error.filename}: {error.strerror}. Name a folder that you may write to.", err=True)
        raise typer.Exit(USAGE) from None


def console(stderr: bool = False) -> Console:
    """Open a rich console. It is 200 columns wide when the output is no terminal, so that no cell is cut."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 200, highlight=False)


def show_table(columns: Sequence[str], lines: Sequence[Sequence[object]], *, wrap: Sequence[str] = ()) -> None:
    """Print a table on standard output; the cells are shown as they are, without rich's markup.

    A table that is wider than the terminal would break numbers inside. It is printed as records instead: the first cell as
    a heading, unless the line above has the same, and below it a line `name  cell` for each cell that is not empty.

    Args:
        columns: the names of the columns.
        lines: the cells of each line.
        wrap: columns of sentences, which may be broken between words, down to 30 characters.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name not in wrap)
    for line in lines:
        table.add_row(*(Text(str(cell)) for cell in line))
    screen = console()
    widths = [max(len(str(cell)) for cell in cells) for cells in zip(columns, *lines, strict=True)]
    narrowest = [min(width, 30) if name in wrap else width for name, width in zip(columns, widths, strict=True)]
    if sum(narrowest) + 3 * len(narrowest) + 1 <= screen.width:
        screen.print(table)
        return
    heading = None
    for first, *rest in lines:
        if heading is not None:
            screen.print()
        if first != heading:
            screen.print(Text(str(first)))
        heading = first
        record = Table.grid(padding=(0, 2))
        record.add_column(no_wrap=True, min_width=max(map(len, columns[1:])) + 2)
        record.add_column(overflow="fold")
        for name, cell in zip(columns[1:], map(str, rest), strict=True):
            if cell.strip():
                record.add_row(f"  {name}", Text(cell.rstrip()))
        screen.print(record)


def show_json(value: Any) -> None:
    """Print a value as JSON on standard output; paths become strings."""
    typer.echo(json.dumps(value, indent=1, default=str))


def progress_bar(*, remaining: bool = False) -> Progress:
    """Make a progress bar, with the time passed or remaining, on standard error; none if that is no terminal."""
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
