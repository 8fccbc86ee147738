"""Helpers of the browser's tests: start JupyterLab, open a notebook, run it, and write small notebooks."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat

# Variables of the tests that a user's JupyterLab does not have: with MPLBACKEND, no cell would show its plots.
LEFT_OUT = ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND")


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def run_labs(course: Path, *words: str) -> str:
    """Run `labs` in a copy of the course."""
    environment = {**os.environ, "PYTHONPATH": str(course), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "utils.cli", *words]
    done = subprocess.run(command, cwd=course, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def jupyterlab(course: Path, folder: Path, *options: str):
    """Start a JupyterLab by `labs open` in the copy; give a function from the path of a file to its address.

    Args:
        course: the copy.
        folder: an empty folder, for Jupyter's settings and its log.
        options: further ones of `labs open`.
    """
    environment = {
        **{key: value for key, value in os.environ.items() if key not in LEFT_OUT},
        **{f"JUPYTER_{kind}_DIR": str(folder / kind) for kind in ("RUNTIME", "CONFIG", "DATA")},
        "PYTHONPATH": str(course),  # an instructor's server starts in the folder of the class
    }
    log = folder / "jupyter.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "utils.cli", "open", "lab1", *options],
            **{"cwd": course, "stdout": output, "stderr": output, "env": environment, "start_new_session": True},
        )
    try:
        for _ in range(600):
            if found := re.search(r"(http://localhost:\d+)/lab/tree/lab1\.ipynb(\?token=\w+)", log.read_text()):
                break
            time.sleep(0.2)
        assert found, log.read_text()
        yield lambda path: f"{found[1]}/lab/tree/{path}{found[2]}&reset"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def base_and_token(address: str) -> tuple[str, str]:
    """Split an address into that of the server and "?token=..."."""
    return re.match(r"(http://localhost:\d+).*(\?token=\w+)", address).groups()


def open_notebook(page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell")
    page.wait_for_selector("text=/Python 3.*Idle|\\| Idle/")


def run_every_cell(page, seconds: int) -> None:
    """Run all cells from the menu, and wait until the kernel is idle again."""
    page.click("li.lm-MenuBar-item:has-text('Run')")
    page.click("li.lm-Menu-item:has-text('Run All Cells')")
    page.wait_for_timeout(1500)
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status='idle']", timeout=1000 * seconds)


def run_all(page, course: Path, name: str, seconds: int) -> dict:
    """Run all cells, wait until the last one has run, save; return the notebook as it is on disk then."""
    run_every_cell(page, seconds)
    page.keyboard.press("Control+s")
    deadline = time.monotonic() + 30
    while True:
        text = (course / name).read_text()  # empty while Jupyter writes it
        last = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"][-1] if text else {}
        if last.get("execution_count") or time.monotonic() > deadline:
            return json.loads(text)
        time.sleep(0.5)


def stop_kernels(page, address: str) -> None:
    """End all kernels of a server: the next test has the memory and the cores for itself."""
    base, token = base_and_token(address)
    for session in page.request.get(f"{base}/api/sessions{token}").json():
        assert page.request.delete(f"{base}/api/sessions/{session['id']}{token}").ok


def small_lab(course: Path, name: str, *cells) -> None:
    notebook = nbformat.v4.new_notebook(cells=list(cells))
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    (course / name).write_text(nbformat.writes(notebook))


def graded(source: str, grade_id: str, **meta):
    cell = nbformat.v4.new_code_cell(source, id=grade_id)
    fields = {"grade": False, "solution": False, "locked": True, "task": False, "schema_version": 3}
    cell.metadata["nbgrader"] = {**fields, "grade_id": grade_id, **meta}
    return cell
