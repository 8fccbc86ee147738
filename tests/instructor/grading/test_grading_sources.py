"""What decides a grade decides whether a submission is graded again."""

import shutil
import types

import pytest

from instructor.build import ROOT, build_lab
from instructor.grading.submission import engine
from instructor.grading.submission.engine import fingerprint
from instructor.points import lab_path


@pytest.fixture(scope="module")
def lab1():
    return build_lab(lab_path("lab1"))


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A copy of the folders that decide, in which a test may change files."""
    for folder in (*engine.FOLDERS, "instructor/checks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(engine, "ROOT", tmp_path)
    engine._sources.cache_clear()
    yield tmp_path
    engine._sources.cache_clear()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("instructor/checks/lab1/gemm.py", True),
        ("instructor/checks/common.py", True),
        ("instructor/grading/wire/values.py", True),
        ("utils/checking/verdicts.py", True),
        ("instructor/checks/lab4_sdpa/grid.py", False),
    ],
)
def test_the_fingerprint_follows_what_decides(lab1, course, name, changes):
    before = fingerprint(lab1)
    path = course / name
    path.write_text(path.read_text() + "\n# changed\n")
    engine._sources.cache_clear()  # as in the next process
    assert (fingerprint(lab1) != before) == changes


def test_a_new_version_of_a_library_changes_the_fingerprint(lab1, course, monkeypatch):
    before = fingerprint(lab1)
    monkeypatch.setattr(engine, "distributions", lambda name: [types.SimpleNamespace(version="99")])
    engine._sources.cache_clear()
    assert fingerprint(lab1) != before
