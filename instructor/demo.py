"""`labs demo`: the solved labs, run from top to bottom, as pages to look at with a summary."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import nbformat

from instructor.build import Built
from instructor.execute import Execution, execute
from utils.files import ROOT, write_whole

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ddd;padding:.4rem .6rem;text-align:left}.time{white-space:nowrap}"
    "@media(prefers-color-scheme:dark){body{background:#14181e;color:#ddd}a{color:#7fb6e8}td,th{border-color:#333}}"
)


def run_demo(
    labs: Sequence[Built], target: Path, step: Callable[[str, int, int], None], timeout: int = 900
) -> tuple[Path, list[str]]:
    """Run solved labs; write their notebooks, pages, traces and a summary into `target`.

    Each lab runs in a folder of its own, so that the files that it writes, such as traces, are next to its page. The summary is
    written after every lab: a run that is stopped leaves what was done.

    Args:
        labs: the labs.
        target: the folder.
        step: called before each lab and after each cell with the name of the lab, the number of cells that have run, and of all.
        timeout: seconds that one cell may take.

    Returns:
        The summary's path, and a sentence for each cell that ended with an error.
    """
    totals = [len(nbformat.reads(built.instructor, as_version=4).cells) for built in labs]
    summary, done = target / "index.html", 0
    rows: list[tuple[str, Execution, list[str]]] = []
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # kernels import utils from it
    with mock.patch.dict(os.environ, PYTHONPATH=path, MPLBACKEND="module://matplotlib_inline.backend_inline"):
        for built, total in zip(labs, totals, strict=True):
            folder = target / built.name
            folder.mkdir(parents=True, exist_ok=True)
            link = folder / "assets"  # figures and recorded results, which the labs read from the current folder
            if not link.exists():
                link.symlink_to(ROOT / "assets")

            def count(index: int, name: str = built.name, before: int = done) -> None:
                step(name, before + index + 1, sum(totals))

            step(built.name, done, sum(totals))
            execution = execute(built.instructor, timeout=timeout, folder=folder, on_cell=count)
            done += total
            rows.append((built.name, execution, _write(folder, built.name, execution)))
            write_whole(summary, summary_page(rows))
    failed = [
        f"{name}, cell under {section_of(execution.notebook, cell)!r}: {error.strip().splitlines()[-1]}"
        for name, execution, _ in rows
        for cell, error in execution.errors.items()
    ]
    return summary, failed


def _write(folder: Path, name: str, execution: Execution) -> list[str]:
    """Write notebook, page and record of an executed lab; return the names of all files in its folder."""
    from nbconvert import HTMLExporter

    nbformat.write(execution.notebook, folder / f"{name}.ipynb")
    body, _ = HTMLExporter(embed_images=True).from_notebook_node(
        execution.notebook, resources={"metadata": {"path": str(folder)}}
    )
    write_whole(folder / f"{name}.html", body)
    write_whole(folder / "run.json", json.dumps(execution.record(), indent=1) + "\n")
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "assets" not in path.relative_to(folder).parts and "__pycache__" not in path.parts
    )


def section_of(notebook: nbformat.NotebookNode, cell_id: str) -> str:
    """Return the heading that a cell stands under; the id if there is none. Most ids mean nothing to a reader."""
    heading = cell_id
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := re.findall(r"^#+ +(.+)$", cell.source, re.MULTILINE)):
            heading = re.sub(r" \([\d.]+ (bonus )?points?\)$", "", found[-1])
        if cell.id == cell_id:
            return heading
    return cell_id


def summary_page(rows: Sequence[tuple[str, Execution, list[str]]]) -> str:
    """Return the page that says what ran, where, for how long, and what ended with an error."""
    machine = rows[0][1].record()["environment"]
    lines = []
    for name, execution, files in rows:
        slowest = max(execution.seconds, key=execution.seconds.__getitem__, default="-")
        place = section_of(execution.notebook, slowest)
        failed = "; ".join(f"{cell}: {text.splitlines()[0]}" for cell, text in execution.errors.items()) or "none"
        links = ", ".join(f'<a href="{name}/{html.escape(file)}">{html.escape(file)}</a>' for file in files)
        seconds = f"{sum(execution.seconds.values()):.0f} s"
        longest = f"{execution.seconds.get(slowest, 0):.0f} s, in: {html.escape(place)}"
        page = f'<a href="{name}/{name}.html"><b>{name}</b></a>'
        lines.append(
            f"<tr><td>{page}</td><td class='time'>{seconds}</td><td>{longest}</td><td>{html.escape(failed)}</td><td>{links}</td></tr>"
        )
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    where = machine["gpu"] or f"{machine['cpu']}, {threads}, no GPU"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>GPU Efficiency Labs: demo</title><style>{STYLE}</style>'
        f"<h1>GPU Efficiency Labs</h1><p>The solved labs, run from top to bottom on {html.escape(where)}: torch "
        f"{machine['torch']}, Triton {machine['triton']}, commit {(machine['commit'] or 'unknown')[:7]}. Traces (.json) open "
        "in ui.perfetto.dev or chrome://tracing.</p><table><tr><th>Lab</th><th>Took</th><th>Longest cell</th><th>Errors</th>"
        f"<th>Files</th></tr>{''.join(lines)}</table></html>\n"
    )
