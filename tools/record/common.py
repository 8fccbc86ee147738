"""What the recording scripts share: the options of their command lines, and the file that they write.

A recorded file is one JSON object. It says what was measured ("what"), on which machine, with which versions and at which
commit ("environment"), whether the run came to its end ("complete"), and holds a table ("rows") with one row a line.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from utils.files import write_whole
from utils.machine.environment import environment


def arguments_parser(description: str, pairs: int | None = None) -> argparse.ArgumentParser:
    """Make a parser with the options that the recording scripts share.

    Args:
        description: the docstring of the script; its first line is printed by `--help`.
        pairs: default of `--pairs`, for a script that compares many points.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write; for `plot`, the picture")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no row after this time")
    if pairs is not None:
        parser.add_argument("--pairs", type=int, default=pairs, help="interleaved pairs of each comparison")
    return parser


class Record:
    """A recorded file that grows row by row; a run that is stopped leaves the rows that it has measured."""

    def __init__(
        self, options: argparse.Namespace, what: str, device: torch.device | str | None = None, **method: Any
    ) -> None:
        """Begin the record; end the script with a sentence where it needs a GPU that is not here.

        Args:
            options: those of the parser: without `out` no file is written, and the rows are only printed.
            what: a sentence or a word for the reader of the file.
            device: the device whose machine is described; by default this machine's own.
            **method: how it was measured, such as `pairs=15`.
        """
        if device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("This is measured on an NVIDIA GPU, and torch finds none here.")
        self.path, self.seconds, self.began, self.stopped = options.out, options.seconds, time.monotonic(), False
        self.contents = {"what": what, "environment": environment(device), **method, "complete": False}

    def fill(self, points: Iterable, measure: Callable, show: Callable[[dict], str], table: str = "rows") -> None:
        """Measure each point, the first one in any case, print its row and save the file; stop when the time is over.

        Args:
            points: what `measure` takes, one for each row.
            measure: returns the row of a point as a dictionary.
            show: returns the line to print for a row.
            table: the key of the table in the file.
        """
        rows = self.contents.setdefault(table, [])
        for point in points:
            if rows and time.monotonic() - self.began > self.seconds:
                print(f"stopped after {self.seconds:g} s, before the table was complete")
                self.stopped = True
                return
            rows.append(measure(point))
            print(show(rows[-1]), flush=True)
            self.save()

    def finish(self) -> None:
        """Save the record, as complete unless the time was over before the end."""
        self.contents["complete"] = not self.stopped
        self.save()

    def save(self) -> None:
        """Replace the file in one step by what is there now."""
        if self.path is not None:
            write_whole(self.path, to_text(self.contents))


def to_text(contents: dict) -> str:
    """Write a record as JSON: one line for each key, and one line for each row of a table."""
    entries = []
    for key, value in contents.items():
        text = json.dumps(value, default=str)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(f"  {json.dumps(row, default=str)}" for row in value) + "\n ]"
        entries.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def read_record(path: Path) -> dict:
    """Read a recorded file; end the script with a sentence where it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {path} is no recorded file: {error}") from None


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return |a - b| / |b| in the Frobenius norm, computed in float64."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def save_picture(figure: Any, path: Path) -> None:
    """Write a matplotlib figure, without the date if the file is an SVG, and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(f"wrote {path}")
