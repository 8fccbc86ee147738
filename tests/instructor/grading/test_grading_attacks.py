"""Each attack costs its question and changes nothing else: no other point, file or process."""

import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import pytest

from instructor.build import ROOT, read_lab, secret_lines
from instructor.course import answered_notebook
from instructor.grading.submission.engine import grade_notebook
from instructor.grading.submission.plan import make_plan
from tests.instructor.grading.attacks import ATTACKS, COST, EDITS, WRONG, packed

TIMEOUT = 6  # seconds; no cell of an honest submission to this lab takes one
TOKEN = "token-7f3a-of-the-grader"


@dataclass
class Surroundings:
    """What a grader has lying around, and what an attack may not reach."""

    folder: Path
    server: socket.socket
    files: dict[Path, bytes] = field(default_factory=dict)

    def fill_in(self, source: str) -> str:
        port = str(self.server.getsockname()[1])
        for word, value in (("OUTSIDE", str(self.folder)), ("PORT", port), ("SLEEP", "86399.7"), ("ROOT", str(ROOT))):
            source = source.replace(word, value)
        return source

    def connections(self) -> int:
        count = 0
        try:
            while True:
                self.server.accept()[0].close()
                count += 1
        except BlockingIOError:
            return count


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class")
    (folder / "submitted" / "other").mkdir(parents=True)
    (folder / "submitted" / "other" / "answer.txt").write_text("cache_bytes = 109051904\n")
    (folder / "gradebook.db").write_text("SQLite 109051904\n")
    (folder / "right.toml").write_text("BLOCK_M = 64\nBLOCK_N = 64\nBLOCK_K = 16\n")
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    found = Surroundings(folder, server)
    watched = [*folder.rglob("*"), ROOT / "utils" / "checking" / "verdicts.py", ROOT / "instructor" / "build.py"]
    found.files = {path: path.read_bytes() for path in watched if path.is_file()}
    os.environ["GRADER_TOKEN"] = TOKEN
    yield found
    del os.environ["GRADER_TOKEN"]
    server.close()


@pytest.fixture(scope="module")
def hidden_lines(suite_lab):
    """Lines of hidden tests that no feedback may show."""
    lab = read_lab(Path(__file__).parent / "suite_lab.py")
    return [line for line, (cell, _) in secret_lines(lab).items() if cell.has("HIDDEN TESTS")]


def _notebook(lab, attacks, surroundings) -> str:
    answers = {attack.question: surroundings.fill_in(attack.source) for attack in attacks}
    notebook = nbformat.reads(answered_notebook(lab, answers), as_version=4)
    for cell in notebook.cells:
        cell.source = surroundings.fill_in(cell.source)
    return nbformat.writes(notebook, version=4)


def _sleepers() -> list[str]:
    """Processes that an attack started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if line.startswith(b"sleep\x0086399.7"):
            found.append(process.name)
    return found


@pytest.mark.slow
def test_wrong_answers_alone_get_nothing_and_no_flag(suite_lab, full_points):
    """What the attacks build on: wrong, and nothing worse than that."""
    result = grade_notebook(suite_lab, answered_notebook(suite_lab, WRONG), timeout=TIMEOUT)
    assert _points(result) == dict.fromkeys(full_points, 0)
    assert not result.flags


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_the_notebook_changes_no_test(suite_lab, name):
    """What runs as tests, and for how many points, comes from the lab."""

    def tests(notebook) -> list[tuple]:
        plan = make_plan(suite_lab, nbformat.writes(notebook, version=4))
        return [(s.name, s.source, s.points, s.needs, s.cell.metadata) for s in plan.steps if s.kind == "tests"]

    notebook = nbformat.reads(answered_notebook(suite_lab, {COST: WRONG[COST]}), as_version=4)
    expected = tests(notebook)
    EDITS[name](notebook)
    assert tests(notebook) == expected


@pytest.mark.slow
def test_a_test_cell_that_was_edited_is_the_labs_when_it_runs(suite_lab, full_points):
    notebook = nbformat.reads(answered_notebook(suite_lab, {COST: WRONG[COST]}), as_version=4)
    for edit in EDITS.values():
        edit(notebook) if edit is not EDITS["the test cell deleted"] else None
    result = grade_notebook(suite_lab, nbformat.writes(notebook, version=4), timeout=TIMEOUT)
    assert _points(result) == {**full_points, f"{COST}_tests": 0}
    assert not result.flags


@pytest.mark.slow
@pytest.mark.parametrize("attacks", packed(ATTACKS, 7), ids=lambda attacks: f"{attacks[0].name}, {len(attacks)} in all")
def test_attacks_get_no_credit(suite_lab, full_points, surroundings, hidden_lines, attacks):
    result = grade_notebook(suite_lab, _notebook(suite_lab, attacks, surroundings), timeout=TIMEOUT)

    loses = set().union(*(attack.loses for attack in attacks))
    expected = {name: 0 if name in loses else most for name, most in full_points.items()}
    said = {name: (cell.status, cell.message) for name, cell in result.cells.items() if name in loses}
    assert _points(result) == expected, said
    assert result.score == sum(expected.values())

    shown = result.notebook + "".join(cell.message for cell in result.cells.values())
    assert TOKEN not in shown
    assert [line for line in hidden_lines if line in shown] == []
    assert _changes(surroundings) == [] and surroundings.connections() == 0
    deadline = time.monotonic() + 30  # the kernel takes a moment to end a namespace
    while _sleepers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _sleepers() == []


def _points(result) -> dict[str, float]:
    return {name: cell.points for name, cell in result.cells.items() if cell.status != "by_hand"}


def _changes(surroundings: Surroundings) -> list[Path]:
    changed = [path for path, data in surroundings.files.items() if path.read_bytes() != data]
    new = [p for p in surroundings.folder.rglob("*") if p.is_file() and p not in surroundings.files]
    planted = [ROOT / "new.txt", Path("/new.txt"), Path.home() / ".ipython/profile_default/startup/00-of-the-attack.py"]
    return changed + new + [path for path in planted if path.exists()]
