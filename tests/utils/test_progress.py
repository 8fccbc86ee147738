"""`labs progress`, `labs check`, `labs reset` and the panel: the memory outlives the kernel, and no work is lost."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from utils.files import ROOT
from utils.progress import panel as progress_panel
from utils.progress import record as progress


def cell(grade_id: str, source: str = "x", *, run: bool = False, error: str = "", **meta) -> dict:
    outputs = [{"output_type": "error", "ename": "WrongAnswer", "evalue": error, "traceback": []}] if error else []
    made = {
        "cell_type": "code",
        "id": grade_id or "plain",
        "metadata": {"nbgrader": {"grade_id": grade_id, **meta}} if grade_id else {},
        "source": [source],
        "execution_count": 1 if run else None,
        "outputs": outputs,
    }
    return made


def heading(text: str) -> dict:
    return {"cell_type": "markdown", "id": "h", "metadata": {}, "source": [text]}


def test_states_points_and_titles_of_a_lab():
    notebook = {
        "cells": [
            heading("### Question 1.1: Naive GEMM (3 points)"),
            cell("q1_1_part_tests", run=True, grade=True, points=3),
            heading("### Bonus Question 1.1: More (5 bonus points)"),
            cell("bonus_1_1_tests", run=True, error="wrong by half\nsecond line", grade=True, points=5),
            cell("q1_2_tests", grade=True, points=7),
            cell("q1_3", grade=True, solution=True, points=4),
        ]
    }
    found = progress.parts(notebook)
    assert [(p.title, p.state, p.bonus) for p in found] == [
        ("Naive GEMM (part)", progress.PASSED, False),
        ("More", progress.FAILED, True),
        ("", progress.NOT_RUN, False),
        ("", progress.BY_HAND, False),
    ]
    assert found[1].message == "wrong by half"
    assert progress.summary(found) == "3 of 10 points by visible checks, 0 of 5 bonus; 4 points are graded by hand."


@pytest.mark.parametrize("lab", sorted(path.name for path in ROOT.glob("lab*.ipynb")))
def test_every_point_of_every_lab_is_counted_and_has_a_title(lab):
    notebook = json.loads((ROOT / lab).read_text())
    found = progress.parts(notebook)
    assert progress.points(found, (*progress.CHECKED, progress.BY_HAND), False) == 100
    assert all(part.title for part in found)
    answers = progress.answer_hashes(notebook)
    assert all((part.bonus, part.question) in answers for part in found if part.state != progress.BY_HAND)
    cells = {cell["metadata"].get("nbgrader", {}).get("grade_id"): cell["id"] for cell in notebook["cells"]}
    assert all(cells[part.name] == part.name for part in found), "the panel knows a cell that runs by its id"


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(progress, "OUT", tmp_path / "out")
    shutil.copy(ROOT / "lab3_gluon.ipynb", tmp_path)
    return tmp_path / "lab3_gluon.ipynb"


def test_reset_brings_the_untouched_lab_back_keeps_the_work_and_forgets_what_the_checks_said(course):
    untouched = course.read_bytes()
    progress.keep_original(course)
    work = untouched.replace(b"YOUR ANSWER HERE", b"my answer")
    course.write_bytes(work)
    progress.keep_original(course)  # opening the lab again must not replace the original by work
    progress.keep_outcomes(course, {"q1_1_tests": progress.Outcome(progress.PASSED, "", "")})
    first = progress.reset(course)
    assert progress.read_record(course) == {}
    assert course.read_bytes() == untouched and first.read_bytes() == work
    course.write_bytes(b"half a noteb")
    second = progress.reset(course)
    assert second != first and second.read_bytes() == b"half a noteb" and course.read_bytes() == untouched


def test_reset_without_an_original_changes_nothing(course):
    work = course.read_bytes().replace(b"YOUR ANSWER HERE", b"my answer")
    course.write_bytes(work)
    with pytest.raises(progress.ProgressError, match=r"no untouched lab3_gluon\.ipynb was found"):
        progress.reset(course)
    assert course.read_bytes() == work


def test_a_file_that_is_no_notebook_is_one_sentence(course):
    for text in ("{", "[" * 100_000, '{"cells": []}', '{"cells": [{"cell_type": "code", "metadata": {}}]}'):
        course.write_text(text)
        with pytest.raises(progress.ProgressError, match="is no notebook"):
            progress.read_notebook(course)
    course.write_text(json.dumps({"nbformat": 6, "cells": [cell("first")]}))
    with pytest.raises(progress.ProgressError, match="format 4"):
        progress.run_checks(course, 2)


SMALL = {
    "nbformat": 4,
    "nbformat_minor": 5,
    "metadata": {"kernelspec": {"name": "conda-env-mine-py", "display_name": "Mine"}},
    "cells": [
        cell("", "from utils.checking import Verdict"),
        cell("q1_1_tests", "Verdict('1.1', True).raise_if_wrong()", grade=True, points=3),
        cell("q1_2_tests", "Verdict('1.2', False, 'off by one').raise_if_wrong()", grade=True, points=7),
    ],
}


@pytest.fixture
def opened(tmp_path, monkeypatch) -> Path:
    """The notebook of a kernel that a Jupyter server started."""
    monkeypatch.setattr(progress, "OUT", tmp_path / "out")
    monkeypatch.delenv(progress_panel._INSTALLED, raising=False)
    answers = [cell("q1_1", "one = 1", solution=True), cell("q1_2", "two = 2", solution=True)]
    notebook = {**SMALL, "cells": [cell("", "setup = 0"), *answers, *SMALL["cells"][1:]]}
    path = tmp_path / "lab9.ipynb"
    path.write_text(json.dumps(notebook))
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    return path


@pytest.fixture
def kernel(opened, monkeypatch):
    """A function that starts a shell with the panel, as a kernel's first cell does, and the panels that it showed."""
    shown = []
    monkeypatch.setattr(progress_panel, "_display", lambda page, text, first=None: shown.append((first, text)))

    def start():
        shell = InteractiveShell()
        shell.kernel = object()
        monkeypatch.setattr("IPython.get_ipython", lambda: shell)
        progress_panel.install()

        def run(source: str, cell_id: str, *, works: bool = True) -> None:
            shell.showtraceback = lambda *args, **kwargs: None
            assert shell.run_cell(source, cell_id=cell_id).success is works

        run("from utils.checking import Verdict", "plain")
        return run

    monkeypatch.setattr(os, "environ", os.environ.copy())  # the panel marks its kernel there
    return start, shown


def test_the_panel_follows_the_checks_and_outlives_the_kernel(kernel, opened):
    start, shown = kernel
    run = start()
    assert shown[-1][0] is True and "0 of 10 points" in shown[-1][1] and "○ not run: 1.1, 1.2" in shown[-1][1]
    run("one = 1", "q1_1")
    run("Verdict('1.1', True).raise_if_wrong()", "q1_1_tests")
    (update, panel), (line, points) = shown[-2:]
    assert update is False and line is None and "3 of 10 points" in points and "✓ passed: 1.1" in panel
    for words in ("Question 1.2 is not answered yet.", "not answered yet: KNOCK_OUTS is empty."):
        run(f"Verdict('1.2', False, {words!r}).raise_if_wrong()", "q1_2_tests", works=False)
        assert "… waits for an answer: 1.2" in shown[-1][1]
    run("Verdict('1.2', False, 'off by one').raise_if_wrong()", "q1_2_tests", works=False)
    assert "✗ not passed: 1.2" in shown[-1][1]
    run = start()  # another kernel
    assert shown[-1][0] is True and "3 of 10 points" in shown[-1][1] and "✗ not passed: 1.2" in shown[-1][1]
    run("one = 11", "q1_1")
    assert "0 of 10 points" in shown[-1][1] and "↻ changed since its check ran: 1.1" in shown[-1][1]
    run("one = 1", "q1_1")
    assert "3 of 10 points" in shown[-1][1], "the answer that passed is back"
    assert progress.summary(progress.parts(progress.read_notebook(opened), progress.read_record(opened))).startswith(
        "3 of"
    )


def test_an_edit_that_was_saved_and_did_not_run_is_a_change(kernel, opened):
    run = kernel[0]()
    run("one = 1", "q1_1")
    run("1", "q1_1_tests")
    edited = opened.read_text().replace("one = 1", "one = 12")
    opened.write_text(edited)
    os.utime(opened, (time.time() + 5, time.time() + 5))
    run("two = 3", "q1_2")
    assert "↻ changed since its check ran: 1.1" in kernel[1][-1][1]
    run("1", "q1_1_tests")  # it tests what ran, and that is not what the file has by now
    assert "↻ changed since its check ran: 1.1" in kernel[1][-1][1]


def test_a_panel_says_everything_in_html_too_and_escapes_it(opened):
    progress.keep_outcomes(opened, {"q1_1_tests": progress.Outcome("not passed", "a < b", "")})
    panel = progress_panel.Panel(opened)
    panel.found = [progress.Part("q1_1_tests", "1.1", "A & B", 3, False, progress.FAILED, "a < b")]
    assert 'title="A &amp; B, 3 points: not passed: a &lt; b"' in panel.page() and "1.1 ✗" in panel.page()


def test_a_lost_notebook_or_a_broken_record_disturbs_nobody(kernel, opened):
    run = kernel[0]()
    progress.record_path(opened).parent.mkdir(parents=True)
    progress.record_path(opened).write_text("{")
    run("1", "q1_1_tests")
    assert "3 of 10 points" in kernel[1][-1][1]
    opened.unlink()
    run("1", "q1_2_tests")


@pytest.mark.slow
def test_checks_run_in_a_copy(tmp_path, monkeypatch, capfd):
    """Also from a cell of a notebook that has a panel: the copy's kernel has none."""
    monkeypatch.setattr(progress, "OUT", tmp_path / "out")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path, steps = tmp_path / "lab9.ipynb", []
    path.write_text(json.dumps(SMALL))
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    monkeypatch.setenv(progress_panel._INSTALLED, str(os.getpid()))
    executed = progress.run_checks(path, 60, lambda done, total: steps.append((done, total)))
    assert [output["output_type"] for c in executed["cells"] for output in c["outputs"]] == ["stream", "error"]
    found = progress.parts(executed)
    assert [(part.state, part.message) for part in found] == [
        (progress.PASSED, "✓ Question 1.1: passed."),
        (progress.FAILED, "Question 1.2: off by one"),
    ]
    assert json.loads(path.read_text()) == SMALL and steps[-1] == (3, 3)
    assert capfd.readouterr().err == "", "a kernel has nothing to say on the terminal"


@pytest.mark.slow
def test_a_cell_without_end_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "OUT", tmp_path / "out")
    path = tmp_path / "lab9.ipynb"
    path.write_text(json.dumps({**SMALL, "cells": [cell("first"), cell("", "while True: pass")]}))
    with pytest.raises(progress.ProgressError, match=r"`while True: pass` of .* took longer than 2 s"):
        progress.run_checks(path, 2)


@pytest.mark.slow
def test_an_interrupt_ends_a_run(tmp_path):
    path = tmp_path / "lab9.ipynb"
    interrupt = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(9)"
    path.write_text(json.dumps({**SMALL, "cells": [cell("first", interrupt)]}))
    with pytest.raises(KeyboardInterrupt):
        progress.run_checks(path, 60)
