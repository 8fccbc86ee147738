"""The students' bundle: what is in it, and that the scan finds a secret wherever it hides."""

import dataclasses
import gzip
import json
import zipfile

import nbformat
import pytest
from typer.testing import CliRunner

from instructor.build import build_lab
from instructor.grading import release as releasing
from instructor.grading.commands import app
from instructor.grading.release import (
    GradingError,
    bundle_files,
    find_leaks,
    release,
    secrets_of_all_labs,
    worked_solutions,
)
from instructor.points import lab_names, lab_path
from tests.marks import slow_but_first

HIDDEN = '    hint = "Which index does each of the three loops run over, and where is the sum set back to zero?"'

THREE_LINES = """
def gemm(a, b, c, i, j, k_size):
    total = 0.0
    for k in range(k_size):
        total += a[i, k].item() * b[k, j].item()
    return total
"""  # of gemm_naive


@pytest.fixture(scope="module")
def secrets():
    return secrets_of_all_labs()


@pytest.fixture(scope="module")
def lab1():
    return build_lab(lab_path("lab1"))


@pytest.mark.slow
def test_no_bundle_holds_a_secret(lab1, secrets, tmp_path):
    path, count = release(lab1, tmp_path)  # looks through all of it
    with zipfile.ZipFile(path) as archive:
        names = [name.removeprefix("lab1/") for name in archive.namelist()]
        assert archive.read("lab1/lab1.ipynb").decode() == lab1.student
    assert len(names) == count
    assert {"lab1.ipynb", "utils/checking/verdicts.py", "environment.yml", "README.md"} <= set(names)
    assert not [name for name in names if name.startswith(("instructor", "tests", ".git", "build"))]
    assert [name for name in names if name.endswith(".ipynb")] == ["lab1.ipynb"]
    assert path.read_bytes() == releasing.packed(bundle_files(lab1), "lab1")  # always the same
    # The bundles differ in their notebook alone.
    notebooks = {f"{name}.ipynb": build_lab(lab_path(name)).student.encode() for name in lab_names()}
    assert find_leaks(notebooks, secrets) == []


def in_an_output(lab):
    notebook = nbformat.reads(lab.student, as_version=4)
    cell = next(c for c in notebook.cells if c.cell_type == "code")
    cell.outputs = [nbformat.v4.new_output("stream", text=f"first\n{HIDDEN}\nlast")]
    return nbformat.writes(notebook).encode()


@pytest.mark.parametrize("place", ["output", "cell", "attachment", "checks in utils", "solution in utils"])
def test_a_planted_secret_is_found(lab1, secrets, place):
    from instructor.build import ROOT

    files = {
        "output": {"lab1.ipynb": in_an_output(lab1)},
        "cell": {"lab1.ipynb": json.dumps({"cells": [{"source": ["x = 1\n", HIDDEN + "\n"]}]}).encode()},
        "attachment": {"lab2.ipynb": json.dumps({"metadata": {"a": [{"b": HIDDEN}]}}).encode()},
        "checks in utils": {"utils/copy.py": (ROOT / "instructor/checks/lab1/gemm.py").read_bytes()},
        "solution in utils": {"utils/gemm.py": THREE_LINES.encode()},
    }[place]
    leaks = find_leaks(files, secrets)
    assert leaks and all("lab1" in leak.origin for leak in leaks)
    assert str(leaks[0]).startswith(next(iter(files)))


def test_a_leak_stops_the_release(lab1, tmp_path, monkeypatch):
    monkeypatch.setattr(releasing, "bundle_files", lambda built: {"lab1.ipynb": in_an_output(lab1)})
    with pytest.raises(GradingError, match="secret lines are in the bundle of lab1"):
        release(lab1, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("data", [releasing.packed({"x.txt": HIDDEN.encode()}, "x"), gzip.compress(HIDDEN.encode())])
def test_an_archive_in_the_bundle_is_refused(secrets, data):
    with pytest.raises(GradingError, match="is an archive"):
        find_leaks({"assets/data.bin": data}, secrets)


# ---- worked solutions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_but_first(lab_names()))
def test_worked_solutions_hold_answers_and_no_test(name):
    lab = build_lab(lab_path(name))
    text = worked_solutions(lab)
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert "import lab" not in text and "MARK SCHEME" not in text
    code = [line for cell in notebook.cells if cell.cell_type == "code" for line in cell.source.splitlines()]
    assert not [line for line in code if line.strip() == "raise NotImplementedError()"]
    marks = "BEGIN SOLUTION", "HIDDEN TESTS", "# public"
    assert not [line for line in text.splitlines() if any(mark in line for mark in marks)]
    assert not [cell for cell in notebook.cells if "nbgrader" in cell.metadata]  # it cannot be handed in
    student = nbformat.reads(lab.student, as_version=4)
    assert len(notebook.cells) == len(student.cells) + 1


def test_worked_solutions_refuse_a_hidden_test(lab1):
    """A line of a hidden check in the prose of the lab is found."""
    leaking = dataclasses.replace(
        lab1, student=lab1.student.replace("## How to work", HIDDEN.strip().replace('"', "'"))
    )
    worked_solutions(leaking)  # other quotes: another line
    leaking = dataclasses.replace(
        lab1, student=lab1.student.replace("## How to work", HIDDEN.strip().replace('"', '\\"'))
    )
    with pytest.raises(GradingError, match="secret lines are in the worked solutions of lab1"):
        worked_solutions(leaking)


def test_command_for_worked_solutions(tmp_path):
    done = CliRunner().invoke(app, ["release", "lab1", "--solutions", "--to", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "no hidden test and no marking scheme" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["lab1-solutions.ipynb"]
