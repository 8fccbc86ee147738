"""The verdict in one process and at a distance is the same, for every right and wrong answer of the labs' catalogues.

In one process the test cells run on the student's objects, as in stock nbgrader. At a distance they run on proxies. What
one of the two sees and the other does not would be a hole in grading or an injustice.

The whole catalogue takes many minutes a lab: `make test-class`. One pack of one lab, which SAME_VERDICT_SEED chooses, takes
half a minute: `-k sample`.
"""

import contextlib
import importlib
import io
import os
import random
import sys
import types

import pytest
from torch.nn.attention import _cur_sdpa_kernel_backends, _sdpa_kernel

from instructor.build import build_lab
from instructor.course import answered_notebook
from instructor.grading.submission.engine import calibrate, grade_notebook, setup_cells
from instructor.grading.submission.exceptions import explain
from instructor.grading.submission.plan import plan_tests
from instructor.names import FILE_CELL, python_of
from instructor.points import lab_path
from tests.instructor import lab_cases

LABS = ("lab1", "lab2_flexattention", "lab3_gluon", "lab4_sdpa")
SEED = int(os.environ.get("SAME_VERDICT_SEED", "1"))
MOST = 6  # answers changed in one notebook
PARTS = {"lab1": 5}  # tests that share a lab's notebooks, so that several processes can run them


def _changes(lab: str, model: dict[str, str]) -> list[tuple[str, str, str]]:
    """(name, answer cell, its text) of each catalogued answer."""
    short = lab.partition("_")[0]
    wrong = importlib.import_module(f"tests.instructor.{short}_wrong_answers").WRONG_ANSWERS
    right = importlib.import_module(f"tests.instructor.{short}_right_answers").RIGHT_ANSWERS
    found = [(case.mistake, case.cell, lab_cases.source_of(model, case)) for case in wrong]
    for name, cell, change in right:
        text = lab_cases.right_source(model, (name, cell, change))
        if isinstance(change, str):  # code, which runs behind the model answer or is a file of its own
            is_file = FILE_CELL.match(model[cell])
            text = f"{is_file[0] if is_file else model[cell]}\n{text}"
        found.append((name, cell, text))
    return found


def _packs(changes: list[tuple[str, str, str]]) -> list[list[tuple[str, str, str]]]:
    """Changes of different answers together, a few in one notebook."""
    packs: list[list] = []
    for change in changes:
        room = (p for p in packs if len(p) < MOST and all(other[1] != change[1] for other in p))
        if (pack := next(room, None)) is None:
            packs.append(pack := [])
        pack.append(change)
    return packs


class OneProcess:
    """A lab whose cells and tests run here, on the student's own objects."""

    def __init__(self, lab, folder):
        self.lab, self.folder, self.needs = lab, folder, plan_tests(lab.instructor)
        notebook = types.ModuleType("the_notebook")  # torch.compile looks for a function's module by its name
        sys.modules[notebook.__name__] = notebook
        self.base = vars(notebook)
        self.backends = _cur_sdpa_kernel_backends(with_priority=True)
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
            for name, source in setup_cells(lab):
                exec(compile(python_of(source), name, "exec"), self.base)

    def verdicts(self, answers: dict[str, str], cells) -> dict[str, tuple[str, str]]:
        """{test cell: (status, message)}, with these texts for answers."""
        names, found, before = self.base, {}, dict(self.base)
        _sdpa_kernel(self.backends, set_priority=True)  # an answer before may have left others
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(io.StringIO()):
            for cell in cells:
                facts = cell.metadata.get("nbgrader", {})
                source = answers.get(cell.id, cell.source)
                if cell.cell_type != "code":
                    continue
                if file := FILE_CELL.match(source):
                    (self.folder / file[1]).write_text(source.partition("\n")[2] + "\n")
                elif facts.get("grade") and not facts.get("solution"):
                    found[cell.id] = self._verdict(cell, names)
                elif facts.get("solution") or facts.get("locked"):
                    with contextlib.suppress(Exception):  # as Jupyter: the next cell runs all the same
                        exec(compile(python_of(source) or "", cell.id, "exec"), names)
        names.clear()
        names.update(before)
        return found

    def _verdict(self, cell, names: dict) -> tuple[str, str]:
        own = {**self.base, **{n: names[n] for n in self.needs[cell.id].names if n in names}}
        try:
            exec(compile(python_of(cell.source), f"<tests of {cell.id}>", "exec"), own)
        except Exception as error:
            return explain(error)
        return "passed", ""


def _difference(lab, one: OneProcess, pack, cells) -> dict:
    answers = {cell: text for _, cell, text in pack}
    here = one.verdicts(answers, cells)
    there = grade_notebook(lab, answered_notebook(lab, answers), timeout=120)
    different = {}
    for test, (status, message) in here.items():
        cell = there.cells[test]
        if (status == "passed") != (cell.status == "passed"):
            names = [name for name, answer, _ in pack if test.startswith(f"{answer}_")]
            different[test] = {"answer": names, "here": (status, message), "there": (cell.status, cell.message)}
    return {**different, **({"flags": there.flags} if there.flags else {})}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Get a lab ready for both ways, once: (lab, what runs it here, its cells, its packs)."""
    import nbformat

    made = {}

    def prepare(name: str):
        if name not in made:
            lab = build_lab(lab_path(name))
            calibrate(lab)
            cells = nbformat.reads(lab.instructor, as_version=4).cells
            packs = _packs(_changes(name, lab_cases.answers_in(cells)))
            made[name] = lab, OneProcess(lab, tmp_path_factory.mktemp(name)), cells, packs
        return made[name]

    return prepare


@pytest.mark.overnight
@pytest.mark.parametrize(("name", "part"), [(lab, part) for lab in LABS for part in range(PARTS.get(lab, 1))])
def test_every_catalogued_answer_gets_the_same_verdict(prepared, name, part):
    lab, one, cells, packs = prepared(name)
    packs = packs[part :: PARTS.get(name, 1)]
    different = {}
    for number, pack in enumerate(packs):
        if found := _difference(lab, one, pack, cells):
            different[number] = found
            print(number, found)
    assert different == {}, f"{len(different)} of {len(packs)} notebooks"


@pytest.mark.overnight
@pytest.mark.parametrize("name", LABS)
def test_a_sample_gets_the_same_verdict(prepared, name):
    lab, one, cells, packs = prepared(name)
    assert _difference(lab, one, random.Random(SEED).choice(packs), cells) == {}


def test_every_answer_is_in_one_pack():
    changes = [(str(n), f"q{n % 3}", "") for n in range(20)]
    packs = _packs(changes)
    assert sorted(c for pack in packs for c in pack) == sorted(changes)
    assert all(len({cell for _, cell, _ in pack}) == len(pack) <= MOST for pack in packs)
