"""Fixtures for tests of labs: the lab built from its source, its cells and checks, and its grades by stock nbgrader."""

import json
from pathlib import Path
from types import ModuleType

import nbformat
import pandas as pd
import pytest

from instructor.build import ROOT, Built, build_lab
from instructor.course import Course, Score, _import_nbgrader
from instructor.execute import execute

pytest.register_assert_rewrite(*(f"tests.instructor.{name}" for name in ("lab_cases", "every_lab", "visible")))

from tests.instructor import lab_cases  # noqa: E402
from tests.instructor.visible import VisibleChecks  # noqa: E402

_import_nbgrader()  # without its extensions of Jupyter's server, which take two seconds in each process

FIXTURE_LAB = Path(__file__).parent / "fixture_lab.py"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Let the whole notebook of a lab wait for `make test-class` where its test file says so."""
    for item in items:
        overnight = getattr(getattr(item, "module", None), "NOTEBOOK_OVERNIGHT", False)
        if overnight and "solved" in item.fixturenames:
            item.add_marker(pytest.mark.overnight)


@pytest.fixture(scope="session")
def small_lab() -> Built:
    """A lab of four small questions: two automatic, one by hand, one bonus."""
    return build_lab(FIXTURE_LAB)


@pytest.fixture(scope="session")
def grade_notebooks(tmp_path_factory):
    """Grade with stock nbgrader: `grade_notebooks(built, {student: notebook})` -> (course, {student: {cell id: Score}})."""

    def grade(
        built: Built, notebooks: dict[str, str], timeout: int = 300
    ) -> tuple[Course, dict[str, dict[str, Score]]]:
        course = Course(tmp_path_factory.mktemp("course"), timeout=timeout)
        course.release(built)
        for student, notebook in notebooks.items():
            course.submit(built.name, student, notebook)
        course.nbgrader("autograde", built.name, "--force")
        return course, course.scores(built.name)

    return grade


# ---- the lab of a test file, which names it in LAB ---------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(request) -> Built:
    return lab_cases.built(request.module.LAB)


@pytest.fixture(scope="module")
def checks(request) -> ModuleType:
    """The lab's hidden checks."""
    return lab_cases.checks_of(request.module.LAB)


@pytest.fixture(scope="module")
def cells(lab) -> list:
    """The instructor's notebook."""
    return nbformat.reads(lab.instructor, as_version=4).cells


@pytest.fixture(scope="module")
def visible(cells) -> VisibleChecks:
    """The checks that students see."""
    return VisibleChecks(cells)


@pytest.fixture(scope="module")
def answers(cells) -> dict[str, str]:
    """The model answers: {id of an answer cell: its source}."""
    return lab_cases.answers_in(cells)


@pytest.fixture
def names(request, cells, answers, tmp_path, monkeypatch) -> dict:
    """The notebook's names after its setup (SETUP of the test file) and the model answers, in a folder with its files."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(request.module.SETUP, names)
    files = {cell.id: cell.source for cell in cells if cell.source.startswith("%%writefile")}
    return lab_cases.run_answers(files | answers, names)


@pytest.fixture(scope="module")
def calls(cells) -> dict[str, str]:
    """The calls of hidden checks: {id of a test cell: the call}."""
    return lab_cases.hidden_calls(cells)


@pytest.fixture(scope="module")
def recorded(request) -> dict[str, pd.DataFrame]:
    """The tables of the lab that were recorded on an H200, by name."""
    record = ROOT / "assets" / "results" / "h200" / f"{request.module.LAB.split('_')[0]}.json"
    return {name: pd.DataFrame(rows) for name, rows in json.loads(record.read_text())["tables"].items()}


@pytest.fixture(scope="module")
def prose(cells) -> str:
    """All text of the instructor's notebook, without line breaks."""
    return " ".join(" ".join(cell.source for cell in cells if cell.cell_type == "markdown").split())


@pytest.fixture(scope="module")
def solved(lab, tmp_path_factory) -> nbformat.NotebookNode:
    """The solved notebook with its hidden checks, executed in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        return execute(lab.instructor, folder=tmp_path_factory.mktemp("solved")).notebook


@pytest.fixture(scope="module")
def graded_untouched(lab, grade_notebooks) -> lab_cases.Graded:
    """Stock nbgrader on the notebook as students get it."""
    return lab_cases.graded_by_nbgrader(lab, grade_notebooks, untouched=lab.student)
