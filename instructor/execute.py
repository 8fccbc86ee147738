"""Run a lab's notebook from top to bottom without a browser, and note each cell's time and errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from utils.files import ROOT
from utils.progress.record import notebook_client


@dataclass(frozen=True)
class Execution:
    """An executed notebook, the seconds of each code cell by id, and the errors that cells ended with."""

    notebook: NotebookNode = field(repr=False)
    seconds: dict[str, float]
    errors: dict[str, str]

    def record(self) -> dict:
        """Machine, versions, commit and timings, as they are kept with recorded results."""
        from utils.machine.environment import environment

        return {
            "what": "seconds of each code cell, executed headless from top to bottom",
            "environment": environment(),
            "total_seconds": round(sum(self.seconds.values()), 1),
            "cells": {name: round(value, 2) for name, value in self.seconds.items()},
            "errors": self.errors,
        }


def execute(
    text: str, *, timeout: int = 600, folder: Path = ROOT, on_cell: Callable[[int], None] = lambda index: None
) -> Execution:
    """Execute a notebook given as text; the cells after one that fails run, too.

    Args:
        text: the notebook.
        timeout: seconds for one cell.
        folder: where the kernel runs.
        on_cell: called with the index of each code cell that has run.
    """
    notebook = nbformat.reads(text, as_version=4)
    started: dict[int, float] = {}
    seconds: dict[str, float] = {}

    def start(cell, cell_index):
        started[cell_index] = time.perf_counter()

    def finish(cell, cell_index, execute_reply):
        seconds[cell.id] = time.perf_counter() - started[cell_index]
        on_cell(cell_index)

    notebook_client(notebook, folder, timeout, on_cell_execute=start, on_cell_executed=finish).execute()
    errors = {
        cell.id: f"{output.ename}: {output.evalue}"
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "error"
    }
    return Execution(notebook, seconds, errors)
