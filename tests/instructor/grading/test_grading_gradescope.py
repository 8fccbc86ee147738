"""The autograder for Gradescope: what it takes, what it answers, and its own scripts in a folder laid out as theirs."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from instructor.course import answered_notebook
from instructor.grading.class_.gradescope import bundle_scripts, make_bundle, results_of, submitted_notebook
from instructor.grading.submission.results import CellResult, Flag, SubmissionResult
from tests.instructor.conftest import FIXTURE_LAB


@pytest.fixture
def folder(tmp_path):
    """Puts files into a folder: `folder(lab1=..., notes_txt=...)`."""

    def put(**files: str) -> Path:
        for number, (name, text) in enumerate(files.items()):
            path = tmp_path / name.replace("_txt", ".txt").replace("_nb", ".ipynb")
            path.write_text(text)
            os.utime(path, (1000 + number, 1000 + number))
        return tmp_path

    return put


@pytest.mark.parametrize(
    ("files", "data", "note"),
    [
        ({"lab1_nb": "right", "notes_txt": "x"}, b"right", ""),
        ({"final version_nb": "mine"}, b"mine", "the file was called final version.ipynb"),
        ({"lab1_nb": "old", "lab1 (1)_nb": "new"}, b"new", "2 notebooks; the newest, lab1 (1).ipynb, was taken"),
        ({"lab2_nb": "another lab"}, None, "handed in no notebook of lab1: lab2.ipynb"),
        ({"notes_txt": "x"}, None, "handed in no notebook of lab1: notes.txt"),
        ({}, None, "handed in no notebook of lab1: no file at all"),
    ],
)
def test_what_was_handed_in(folder, files, data, note):
    assert submitted_notebook(folder(**files), "lab1") == (data, note)


def test_a_link_is_not_followed(folder, tmp_path):
    os.symlink("/etc/passwd", folder() / "lab1.ipynb")
    assert submitted_notebook(tmp_path, "lab1") == (None, "handed in a symbolic link")


def test_results_name_every_question_and_keep_flags_from_students():
    cells = {
        "q1_1_tests": CellResult(5, 5, "passed", "", 1),
        "q1_2_tests": CellResult(0, 4, "failed", "Question 1.2: 7 was given.", 1),
        "q1_3_explain": CellResult(0, 3, "by_hand", "", 0),
        "bonus_2_1_tests": CellResult(2, 2, "passed", "", 1),
    }
    flags = (Flag("q1_1", "structure", "a test cell was edited"),)
    result = SubmissionResult("x", "lab1", cells, flags, {"files": "none (Operation not permitted)"}, "{}")
    results = results_of(result, "the file was called mine.ipynb")
    assert results["score"] == 7 and "mine.ipynb" in results["output"]
    named = {test["name"]: test for test in results["tests"]}
    assert set(named) == {"Question 1.1", "Question 1.2", "Question 1.3", "Bonus 2.1", "For the instructors"}
    assert (
        named["Question 1.2"]["output"] == "Question 1.2: 7 was given." and named["Question 1.2"]["status"] == "failed"
    )
    assert "waits for a person" in named["Question 1.3"]["output"] and "status" not in named["Question 1.3"]
    hidden = named.pop("For the instructors")
    assert (
        hidden["visibility"] == "hidden" and "structure" in hidden["output"] and "wall: files: none" in hidden["output"]
    )
    assert "structure" not in json.dumps(list(named.values()))


PROBE = """
import os, pathlib
def refused(what):
    try:
        what()
    except OSError:
        return True
    return False
TOP = {top!r}
tries = [
    lambda: os.listdir(TOP + "/source/instructor"),
    lambda: open(TOP + "/source/instructor/labs/fixture_lab.py").read(),
    lambda: os.listdir(TOP + "/source/build"),
    lambda: open(TOP + "/results/results.json", "w"),
    lambda: os.listdir(TOP + "/submission"),
    lambda: open(TOP + "/source/utils/config.py", "a"),
    lambda: open(TOP + "/source/run_autograder", "a"),
    lambda: os.setuid(0),
    lambda: __import__("socket").create_connection(("127.0.0.1", 9), 1),
]
found = [refused(what) for what in tries]
macs = 1024**3
"""
TELL = """
def gemv(a, x):
    assert False, f"PROBES {found}"
"""


def readable_python(tmp_path_factory) -> list[str]:
    """A command in front of which Python may be read by every user, as in a container, also where it lies below /root."""
    python = Path(os.path.realpath(sys.executable)).parent.parent
    closed = next((p for p in reversed(python.parents) if p.stat().st_mode & 5 != 5), None)
    if closed is None:
        return []
    # In mounts of its own: an open folder in the place of the closed one, and Python in its old place below it.
    aside = tmp_path_factory.mktemp("aside")
    steps = (
        f"mount --bind '{python}' '{aside}' && mount -t tmpfs -o mode=755 open '{closed}' && mkdir -p '{python}' && "
        f"mount --bind '{aside}' '{python}' && exec \"$@\""
    )
    return ["unshare", "--mount", "bash", "-c", steps, "bash"]


@pytest.mark.slow
def test_the_bundles_own_scripts_in_a_container_without_namespaces(small_lab, tmp_path_factory):
    """As in Docker: root, and not allowed to make namespaces. The environment is the one that runs this test."""
    if os.name != "posix" or os.getuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("a container is tried as root, with the command setpriv")
    top = tmp_path_factory.mktemp("autograder")
    for place in (top, *top.parents):
        if place.owner() == "root" and place.name.startswith("pytest-"):
            place.chmod(0o755)  # in a container every folder above is open
    with zipfile.ZipFile(make_bundle("lab1", top)) as bundle:
        bundle.extractall(top / "source")
        assert bundle.getinfo("run_autograder").external_attr >> 16 & 0o111  # its mode travels
    (top / "lab1-gradescope.zip").unlink()
    shutil.copy(FIXTURE_LAB, top / "source/instructor/labs/fixture_lab.py")
    for name, text in bundle_scripts("fixture_lab").items():
        (top / "source" / name).write_text(text)
    for name in ("submission", "results"):
        (top / name).mkdir()
    (top / "venv").symlink_to(sys.prefix)
    environment = {"PATH": os.environ["PATH"], "AUTOGRADER": str(top), "HOME": str(tmp_path_factory.mktemp("home"))}
    lowered = ["setpriv", "--bounding-set=-sys_admin"]

    def run(script: str) -> str:
        command = [*readable_python(tmp_path_factory), *lowered, "bash", str(top / "source" / script)]
        done = subprocess.run(command, cwd=top, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    answers = answered_notebook(small_lab, {"q1_3": PROBE.format(top=str(top)), "bonus_1_4": TELL})
    (top / "submission" / "fixture_lab.ipynb").write_text(answers)
    run("run_autograder")
    results = json.loads((top / "results/results.json").read_text())
    by_name = {test["name"]: test for test in results["tests"]}
    assert "wall: files: none" in by_name["For the instructors"]["output"]  # there is no container without this
    assert "network" in by_name["For the instructors"]["output"]  # the attempt is told
    assert f"PROBES {[True] * 9}" in by_name["Bonus 1.4"]["output"], by_name["Bonus 1.4"]
    assert "walls" in by_name["Question 1.3"]["output"]  # to have tried lets its question wait for a person
    assert by_name["Question 1.1"]["status"] == "passed"
