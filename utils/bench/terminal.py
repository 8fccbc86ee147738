"""Output of the `labs bench` commands: tables, progress bars, and errors as one line."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from utils.validation import UserError

if TYPE_CHECKING:
    from rich.console import Console

FAILED, USAGE, STOPPED = 1, 2, 130  # exit codes: a failed benchmark, wrong input, Ctrl-C
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
ArtifactsDir = Annotated[Path, typer.Option("--artifacts-dir", help="Where runs are kept, each in a folder of its id.")]
RunName = Annotated[str, typer.Argument(help="A run id, its folder, or a results file.")]


class Commands(TyperGroup):
    """Commands that end with one line and exit status 2, without a traceback, if the user can solve the error."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command. An OSError means that a file cannot be read or written, or that the disk is full."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            typer.echo(f"error: {error}", err=True)
        except OSError as error:
            if error.filename is None and error.errno not in FULL:
                raise
            place = "the output" if error.filename is None else error.filename
            typer.echo(f"error: {place}: {error.strerror}. Name a folder that you may write to.", err=True)
        raise typer.Exit(USAGE)


def console(stderr: bool = False) -> Console:
    """Open a rich console. It is 200 columns wide when the output is no terminal, so that no cell is cut."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 200, highlight=False)


def show_table(columns: Sequence[str], lines: Sequence[Sequence[object]], *, wrap: Sequence[str] = ()) -> None:
    """Print a table on standard output; the cells are shown as they are, without rich's markup.

    In a table wider than the terminal, numbers would break. So common cells then stand above the table, and lines with the
    same first cell become a separate table. If this is still too wide, the lines stand side by side as columns.

    Args:
        columns: the names of the columns.
        lines: the cells of each line.
        wrap: columns of sentences. They may break between words and become as narrow as 15 characters.
    """
    from rich.table import Table
    from rich.text import Text

    screen = console()
    by_column = list(zip(columns, *(map(str, line) for line in lines), strict=True))

    def is_wide() -> bool:
        widths = [min(max(map(len, cells)), 15 if cells[0] in wrap else screen.width) for cells in by_column]
        return sum(widths) + 3 * len(widths) + 1 > screen.width

    if is_wide() and len({*map(str, lines)}) > 1:
        for name, first, *others in [cells for cells in by_column if len({*cells[1:]}) == 1]:
            by_column.remove((name, first, *others))
            screen.print(Text(f"{name}  {first or '-'}"), soft_wrap=True)
    names, *rows = zip(*by_column, strict=True)
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row[0])]
    if not is_wide():
        table = Table(pad_edge=False)
        for name in names:
            table.add_column(name, overflow="fold", no_wrap=name not in wrap)
        for row in rows:
            table.add_row(*map(Text, row))
        screen.print(table)
    elif 1 < len(groups) <= len(rows) // 2:
        for group in groups:
            show_table(names, group, wrap=wrap)
    else:
        while rows:
            ends = itertools.accumulate((2 + max(map(len, row)) for row in rows), initial=max(map(len, names)))
            count = max(sum(end <= screen.width for end in ends) - 1, 1)
            turned = Table.grid(padding=(0, 2, 0, 0))
            for column in (names, *rows[:count]):
                turned.add_column(overflow="fold", no_wrap=column is names)
            for cells in zip(names, *rows[:count], strict=True):
                if any(cells[1:]):
                    turned.add_row(*map(Text, cells))
            screen.print(turned, "")
            rows = rows[count:]


def show_json(value: Any) -> None:
    """Print a value as JSON on standard output; paths become strings."""
    typer.echo(json.dumps(value, indent=1, default=str))


@contextlib.contextmanager
def show_steps(*, remaining: bool = False) -> Iterator[Callable]:
    """Show steps on standard error as a bar with the time. Without a terminal, print a line after each tenth.

    It yields a function of three arguments: the step in words, the number of done steps, and the number of all steps.
    """
    from rich import progress

    said = None
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
    )
    clock = progress.TimeRemainingColumn() if remaining else progress.TimeElapsedColumn()
    hidden = not sys.stderr.isatty()
    with progress.Progress(*columns, clock, console=console(stderr=True), transient=True, disable=hidden) as bar:
        task = bar.add_task("starting", total=None)

        def show(step: str, done: int = 0, total: int | None = None) -> None:
            nonlocal said
            bar.update(task, description=step, completed=done, total=total)
            line = step, 10 * done // total if total else 0
            if hidden and line != said:
                said = line
                typer.echo(f"{done}/{total} {step}" if total else step, err=True)

        yield show
