"""The fingerprint of a calibration: it changes with what decides a grade, and with nothing else."""

import shutil

import pytest

from instructor.build import ROOT, build_lab
from instructor.grading.submission import sources
from instructor.grading.submission.sources import fingerprint, read_references
from instructor.points import lab_path

OUTSIDE = (
    "utils/cli.py",
    "utils/cli.py",
    "instructor/grading/class_/cluster.py",
    "instructor/checks/lab4_sdpa/grid.py",
)
INSIDE = (
    "utils/__init__.py",  # the notebook imports it
    "utils/visualization/__init__.py",  # the notebook plots, by `from utils import *`
    "utils/machine/device.py",  # below what the notebook measures with
    "utils/checking/watching.py",  # below the checks
    "utils/kernels/interpreter.py",  # the checks start it
    "utils/bench/choose/report.py",  # a function of it is kept from students
    "instructor/checks/common.py",
    "instructor/checks/lab1/gemm.py",
    "instructor/grading/submission/student.py",  # the engine starts it, by a string
    "instructor/grading/sandbox/walls.py",
)


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A copy of the course's sources, in which a test may edit files."""
    root = tmp_path_factory.mktemp("course")
    for name in ("utils", "instructor"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.fixture(scope="module")
def lab1():
    return build_lab(lab_path("lab1"))


@pytest.mark.parametrize(("names", "changes"), [(OUTSIDE, False), (INSIDE, True)], ids=["outside", "inside"])
def test_the_fingerprint_follows_the_imports(lab1, course, monkeypatch, names, changes):
    monkeypatch.setattr(sources, "ROOT", course)
    before = fingerprint(lab1)
    for name in names:
        path = course / name
        text = path.read_text(encoding="utf-8")
        path.write_text(text + "# edited\n", encoding="utf-8")
        assert (fingerprint(lab1) != before) is changes, name
        path.write_text(text, encoding="utf-8")
    assert fingerprint(lab1) == before


def test_a_new_version_of_a_library_changes_the_fingerprint(lab1, monkeypatch):
    before = fingerprint(lab1)
    monkeypatch.setattr(sources, "_version", lambda library: "99.0")
    assert fingerprint(lab1) != before


def test_imports_are_found_however_they_are_written():
    text = (
        "from . import near\nfrom .. import far\nfrom ..other import thing\nimport utils.config as c\n"
        "def late():\n    '''utils.cli is only mentioned.'''\n    import utils.files\n    run('-m utils.bench.run')\n"
        "    return importlib.import_module(f'utils.attention.{name}'), import_module(name)\n"
    )
    found = read_references(text, "utils.here.module")
    assert found.modules >= {"utils.here.near", "utils.far", "utils.other.thing", "utils.config", "utils.files"}
    assert "utils.bench.run" in found.modules and "utils.cli" not in found.modules
    assert found.packages == {"utils.attention", "utils.here"}
    assert read_references("from . import near", "utils.here", is_package=True).modules >= {"utils.here.near"}


def test_a_package_that_loads_names_when_they_are_used():
    text = "{table}def __getattr__(name):\n    return getattr(import_module(f'utils.here.{{find(name)}}'), name)\n"
    found = read_references(text.format(table="_HOME = {'plot': 'plots'}\n"), "utils.here", is_package=True)
    assert found.exports == {"plot": "utils.here.plots"} and not found.packages
    # Without a table that can be read, it may load any of its modules.
    assert read_references(text.format(table=""), "utils.here", is_package=True).packages == {"utils.here"}
