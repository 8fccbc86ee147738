"""Each wall, tried from inside; and what the plan of a submission leaves out."""

import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import nbformat
import psutil
import pytest

from instructor.build import ROOT, build_lab
from instructor.course import answered_notebook
from instructor.grading.sandbox.walls import Limits
from instructor.grading.submission import engine
from instructor.grading.submission.engine import calibrate, grade_notebook, setup_cells, zygote
from instructor.grading.submission.plan import make_plan, names_taken, plan_tests, used_names
from instructor.grading.submission.results import CellResult, GradingError, SubmissionResult, how_it_ended
from instructor.points import lab_path

PROBES = """
import ctypes, json, os, platform, resource, socket, subprocess, sys, threading
def tried(what):
    try:
        return repr(what())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
def connect():
    with socket.socket() as s:
        s.settimeout(3)
        return s.connect(("127.0.0.1", 22))
def thread():
    seen = []
    one = threading.Thread(target=lambda: seen.append(subprocess.run(["true"]).returncode))
    one.start()
    one.join()
    return seen
def clone(flag):
    number = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    child = ctypes.CDLL(None, use_errno=True).syscall(number, flag | 17, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    return child
found = {
    "memory without a name": tried(lambda: os.memfd_create("mine")),
    "shared memory": tried(lambda: ctypes.CDLL(None).shmget(0, 10**9, 0o1600)),
    "namespaces": [tried(lambda: clone(flag)) for flag in (1 << 28, 1 << 17, 1 << 30)],
    "threads and programs": tried(thread),
    "network": tried(connect),
    "interfaces": tried(lambda: os.listdir("/sys/class/net")),
    "write": [tried(lambda: open(path + "/mine", "w")) for path in (ROOT + "/utils", sys.prefix, "/usr", "/", "/etc")],
    "scratch": tried(lambda: open("mine", "w").write("x")),
    "instructor": tried(lambda: os.listdir(ROOT + "/instructor")),
    "kept lines": tried(lambda: [name for name in __import__("linecache").cache if "instructor" in name]),
    "installed": tried(lambda: sorted(os.listdir(SITE)) + os.listdir(SITE + "/instructor")),
    "root": tried(lambda: sorted(os.listdir(ROOT))),
    "home": tried(lambda: os.listdir("/root") + os.listdir("/home")),
    "processes": tried(lambda: len([p for p in os.listdir("/proc") if p.isdigit()])),
    "user": os.getuid(),
    "setuid": tried(lambda: os.setuid(0)),
    "environment": "TOKEN" in str(dict(os.environ)) or "TOKEN" in tried(lambda: open("/proc/self/environ").read()),
    "threads": torch.get_num_threads(),
    "memory": tried(lambda: len(bytearray(20 * 10**9))),
    "large file": tried(lambda: [open("large", "ab").write(bytes(10**8)) for _ in range(20)]),
    "mount": tried(lambda: subprocess.run(["mount", "-t", "tmpfs", "x", "/mnt"], check=True, capture_output=True)),
    "unshare": tried(lambda: subprocess.run(["unshare", "-r", "true"], check=True, capture_output=True)),
    "limits": resource.getrlimit(resource.RLIMIT_NPROC)[0],
    "new privileges": "NoNewPrivs:\\t1" in open("/proc/self/status").read(),
}
print("PROBES" + json.dumps(found))
macs = 1024**3
"""


@pytest.fixture(scope="module")
def probed(small_lab, tmp_path_factory):
    site = tmp_path_factory.mktemp("installed") / "site-packages"  # the course, installed and not editable
    shutil.copytree(ROOT / "instructor", site / "instructor", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "some_library").mkdir()
    for folder in (site, *site.iterdir()):
        folder.chmod(0o755)
    limits = Limits(scratch_mb=500)  # no other test has these: the warm process starts here, and finds the folder
    environment = engine.Zygote._environment
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADING_SECRET_TOKEN", "SECRET")
        patch.setenv("OMP_NUM_THREADS", "3")
        libraries = {"PYTHONPATH": f"{ROOT}{os.pathsep}{site}"}
        patch.setattr(engine.Zygote, "_environment", lambda self, limits: environment(self, limits) | libraries)
        code = f"ROOT, SITE = {str(ROOT)!r}, {str(site)!r}\n{PROBES}"
        notebook = answered_notebook(small_lab, {"q1_3": code})
        result = grade_notebook(small_lab, notebook, timeout=60, limits=limits)
    cells = nbformat.reads(result.notebook, as_version=4).cells
    (text,) = (o.text for c in cells if c.id == "q1_3" for o in c.outputs if "PROBES" in o.get("text", ""))
    return json.loads(text.split("PROBES")[1]), result


def needs(probed, wall, words):
    if not probed[1].walls[wall].startswith(words):
        pytest.skip(f"this machine does not allow the wall {wall}: {probed[1].walls[wall]}")


@pytest.mark.slow
def test_no_network(probed):
    assert "Error" in probed[0]["network"], probed[0]["network"]


@pytest.mark.slow
def test_nothing_but_the_scratch_folder(probed):
    needs(probed, "files", "own root")
    found = probed[0]
    assert found["scratch"] == "1"
    assert all("Read-only" in said or "Permission" in said for said in found["write"]), found["write"]
    assert "FileNotFoundError" in found["instructor"] or found["instructor"] == "[]"
    assert found["kept lines"] == "[]"
    assert found["root"] == "['assets', 'utils']" or not str(sys.prefix).startswith("/usr")
    assert "instructor" not in found["root"].replace("'instructor'", "") and "tests" not in found["root"]


@pytest.mark.slow
def test_a_copy_of_the_course_among_the_libraries_is_hidden(probed):
    needs(probed, "files", "own root")
    assert probed[0]["installed"] == "['instructor', 'some_library']"  # both folders, and nothing in the first


@pytest.mark.slow
def test_alone_and_without_privileges(probed):
    needs(probed, "processes", "namespace")
    found = probed[0]
    assert int(found["processes"]) <= 4
    assert found["user"] != 0 or "user namespace" in probed[1].walls["privileges"]
    assert "Error" in found["setuid"] or found["user"] == 0
    assert found["new privileges"]
    assert "Error" in found["mount"] and "Error" in found["unshare"]


@pytest.mark.slow
def test_no_new_namespace_and_no_memory_that_no_limit_counts(probed):
    needs(probed, "system calls", "seccomp")
    assert probed[0]["namespaces"] == ["-1"] * 3
    assert "PermissionError" in probed[0]["memory without a name"] and probed[0]["shared memory"] == "-1"
    assert probed[0]["threads and programs"] == "[0]"


@pytest.mark.slow
def test_no_secret_in_the_environment(probed):
    assert probed[0]["environment"] is False


@pytest.mark.slow
def test_one_thread_whatever_the_graders_environment_says(probed):
    # A fork of a process that computed with several waits for the others for ever: lab 1 was never graded to its end.
    assert probed[0]["threads"] == 1


@pytest.mark.slow
def test_limits(probed):
    found = probed[0]
    assert found["memory"].startswith("MemoryError")
    assert "OSError" in found["large file"]
    assert found["limits"] == 64


@pytest.mark.slow
def test_a_look_at_the_walls_costs_nothing(probed):
    assert probed[1].score == 11.5 and not probed[1].flags


# ---- the plan ----------------------------------------------------------------------------------------------------


def test_names_that_code_takes_from_the_notebook():
    code = "import a\ndef f(x, y=d):\n    z = x + g\n    return [i for i in z if h(i)]\nclass C(B):\n    k = m\n"
    code += "print(n)"
    assert used_names(code) == {"d", "g", "h", "B", "m", "n"}
    assert used_names("%%writefile x.py\ny") == set() and used_names("x = = 3") == set()


@pytest.mark.parametrize(
    ("code", "taken"),
    [
        ("x = 1\nprint(x, y)", {"y"}),
        ("print(x)\nx = 1", {"x"}),
        ("x = 1\ndef f():\n    return x", {"x"}),  # another cell may bind it before f is called
        ("x = 1\nf = lambda: x", {"x"}),
        ("import time\ndef f():\n    return time.time()", set()),  # the module, whatever another cell calls so
        ("g = (n * k for n in rows)", {"k", "rows"}),
        ("for row in rows:\n    print(row)", {"rows"}),
        ("for row in rows:\n    last = row\nprint(row, last)", {"rows", "row", "last"}),  # rows may be empty
        ("for row in rows:\n    total += row", {"rows", "total"}),
        ("if a:\n    b = 1\nprint(b)", {"a", "b"}),
        ("try:\n    x = f()\nexcept E:\n    pass\nprint(x)", {"f", "E", "x"}),
        ("x = [n for n in range(k) if n != m]\ny = {n: x for x in x}", {"k", "m", "n"}),
        ("x += 1", {"x"}),
        ("table['a'], n = 1, 2\nn", {"table"}),
        ("class C(B):\n    x = y", {"B", "y"}),
        ("while n:\n    n = n - 1", {"n"}),
        ("(x := y)\nx", {"x", "y"}),
        ("import a.b\na.b\nfrom c import d as e\ne", set()),
    ],
)
def test_names_that_code_reads_before_it_binds_them(code, taken):
    assert names_taken(code) == taken


@pytest.fixture(scope="module")
def lab1():
    return build_lab(lab_path("lab1"))


def test_cells_that_only_show_something_are_left_out(lab1):
    solved = answered_notebook(lab1)
    steps = make_plan(lab1, solved).steps
    run = [s for s in steps if s.kind == "student"]
    # Answers, and the locked cells among them.
    assert all(s.answer or s.cell.metadata.get("nbgrader", {}).get("locked") for s in run)
    assert sum(s.kind == "skipped" for s in steps) > 20
    # An answer that uses a name of such a cell brings it back; so does a change of the cell.
    using = {"q5_4": "def attention_intensity(length, head_dim, dtype, flash):\n    return len(results), flash_table"}
    steps = make_plan(lab1, answered_notebook(lab1, using)).steps
    assert any("flash_table = " in s.source for s in steps if s.kind == "student")
    changed = solved.replace("n = 4096 if on_gpu else 384", "n = 4096 if on_gpu else 385")
    steps = make_plan(lab1, changed).steps
    assert any("else 385" in s.source for s in steps if s.kind == "student")


def test_cells_that_bind_the_same_loop_variable_do_not_hold_each_other():
    lab3 = build_lab(lab_path("lab3_gluon"))
    steps = make_plan(lab3, answered_notebook(lab3)).steps
    run = [s for s in steps if s.kind == "student"]
    assert all(s.answer or s.cell.metadata.get("nbgrader", {}).get("locked") for s in run)
    assert not any("compile_for_hopper" in s.source for s in run)


def test_tests_get_what_they_need_and_no_more(lab1):
    planned = plan_tests(lab1.instructor)
    assert planned["q1_3_tests"] == (["time_calls"], []) and planned["q1_5_tests"] == ([], ["gemm_triton.py"])


def test_the_setup_is_what_stands_before_the_first_answer(small_lab, lab1):
    assert [name for name, _ in setup_cells(small_lab)] == ["setup"]
    (setup, first_try) = setup_cells(lab1)
    assert setup[0] == "setup" and "first_try(time_work)" in first_try[1]


# ---- results -----------------------------------------------------------------------------------------------------


def test_a_result_survives_its_form_as_json():
    good = SubmissionResult("ada", "lab1", {"q1_1_tests": CellResult(1.0, "passed", "")}, (), {}, "{}")
    said = json.loads(json.dumps(dataclasses.asdict(good)))
    assert SubmissionResult.from_json(said) == good
    with pytest.raises(TypeError):
        SubmissionResult.from_json({**said, "of an older version": 1})


@pytest.mark.slow
def test_a_checker_that_ends_without_an_answer_is_named_with_how(small_lab):
    calibrate(small_lab)
    parent = psutil.Process(zygote(small_lab, Limits()).process.pid)
    there = {child.pid for child in parent.children()}

    def end() -> None:
        while not (new := [child for child in parent.children() if child.pid not in there]):
            time.sleep(0.01)
        new[0].send_signal(signal.SIGABRT)

    killer = threading.Thread(target=end)
    killer.start()
    slow = answered_notebook(small_lab, {"q1_3": "import time\ntime.sleep(30)\n"})
    with pytest.raises(GradingError, match="its checker ended by signal SIGABRT"):
        grade_notebook(small_lab, slow, limits=Limits())
    killer.join()
    assert [how_it_ended(code).split()[-1] for code in (-signal.SIGKILL, -signal.SIGSEGV, 1)] == [
        "--jobs",
        "SIGSEGV",
        "1",
    ]


@pytest.mark.slow
def test_a_check_that_never_returns_costs_its_submission_alone(small_lab, monkeypatch):
    tests = small_lab.instructor.replace("for hidden_seed in (3, 17):", r"while True: hidden_seed = 3\nfor _ in ():")
    lab = dataclasses.replace(small_lab, instructor=tests)
    for name, value in (
        ("calibrate", lambda built, limits: types.SimpleNamespace(seconds=1.0)),
        ("total_seconds", lambda model, timeout: 5.0),
        ("GRACE", 5.0),
    ):
        monkeypatch.setattr(engine, name, value)
    result = grade_notebook(lab, answered_notebook(lab))
    assert [flag.kind for flag in result.flags] == ["not graded"] and "longer than the 10 s" in result.flags[0].detail
    assert [flag.kind for flag in grade_notebook(lab, b"").flags] == ["unreadable"]  # the warm process goes on


@pytest.mark.slow
def test_the_checker_leaves_no_folder_behind(small_lab):
    limits = Limits()
    folders = tempfile.gettempdir(), zygote(small_lab, limits).folder.name
    before = [
        set(Path(folder).glob("checker-*")) for folder in folders
    ]  # an earlier test's checker may still be ending
    assert grade_notebook(small_lab, small_lab.student, limits=limits).cells
    assert all(set(Path(folder).glob("checker-*")) <= left for folder, left in zip(folders, before, strict=True))
