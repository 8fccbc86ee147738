"""From a bundle to exported grades: a small class through the commands, resumed, graded again, and by a cluster."""

import csv
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import zipfile
from contextlib import contextmanager, suppress
from datetime import datetime

import nbformat
import psutil
import pytest
from typer.testing import CliRunner

from instructor.build import ROOT
from instructor.course import Course, answered_notebook
from instructor.grading.class_ import cluster, gradebook, intake, report
from instructor.grading.class_.cluster import grade_class
from instructor.grading.class_.dates import time_zone
from instructor.grading.class_.gradebook import only_grader
from instructor.grading.class_.intake import (
    GradingError,
    arrivals,
    submissions,
    take_in,
    usable_name,
    without_submission,
)
from instructor.grading.class_.late import apply_penalties, set_due_date
from instructor.grading.class_.roster import Person, put_names, roster_path
from instructor.grading.sandbox.walls import Limits
from instructor.grading.submission.engine import grade_notebook
from tests.instructor.conftest import FIXTURE_LAB
from tests.instructor.grading.faults import BROKEN_FILES
from utils.cli import app, mount_plugins
from utils.machine.device import cuda_support

HANG = "import time\n\ndef gemm_broadcast(a, b):\n    while True:\n        time.sleep(0.1)\n"
DIES = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
WRONG = "def gemm_broadcast(a, b):\n    return a[:, :1] * b[:1]\n"
PATCHED = "import torch\ntorch.allclose = lambda *a, **k: True\n\n" + WRONG
OFTEN = "import torch\n\ndef gemm_broadcast(a, b):\n    return torch.stack([(a * c).sum(1) for c in b.T], 1)\n"
FULL = {"q1_1_tests": 6.0, "q1_3_tests": 2.5, "bonus_1_4_tests": 3.0}
TIMEOUT = 3.0  # seconds; a cell of an honest submission to this lab takes 0.25 s on a busy machine


def without(*questions):
    return {name: 0.0 if name in questions else points for name, points in FULL.items()}


def class_of(lab):
    """{student: (notebook, automatic points by cell)} of a small class."""
    return {
        "ada": (answered_notebook(lab), FULL),
        "Zoë 漢": (answered_notebook(lab, {"q1_1": OFTEN}), FULL),
        "untouched": (lab.student, without(*FULL)),
        "wrong": (answered_notebook(lab, {"q1_1": WRONG}), without("q1_1_tests")),
        "hangs": (answered_notebook(lab, {"q1_1": HANG}), without("q1_1_tests")),
        "dies": (answered_notebook(lab, {"q1_3": DIES}), without("q1_3_tests")),
        "patched": (answered_notebook(lab, {"q1_1": PATCHED}), without("q1_1_tests")),
        "corrupted": (answered_notebook(lab)[:4000], without(*FULL)),
    }


def run(*arguments):
    if "grade" not in {command.name or command.callback.__name__ for command in app.registered_commands}:
        mount_plugins()
    return CliRunner().invoke(app, [str(a) for a in arguments])


def dask(folder, *arguments):
    """Start `dask ARGUMENTS` as docs/grading.md says; its output goes to a file."""
    with (folder / f"{arguments[0]}.log").open("w") as log:
        command = [sys.executable, "-m", "dask", *map(str, arguments)]
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    """The address of a `dask scheduler` with two worker processes, all of them started as an instructor does."""
    folder = tmp_path_factory.mktemp("dask")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    started = [dask(folder, "scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard", "--no-show")]
    try:
        started.append(dask(folder, "worker", address, "--nworkers", 2, "--nthreads", 1, "--no-dashboard"))
        yield address
    finally:
        for process in reversed(started):  # what it started ends with it
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def graded(small_lab, scheduler, tmp_path_factory):
    """A class graded by `labs grade`: (course, the command's output)."""
    root = tmp_path_factory.mktemp("class") / "course"
    course = Course(root)
    # What was graded with other sources is graded again; here they may change while the tests run.
    frozen = pytest.MonkeyPatch()
    basis = cluster.fingerprint(small_lab)
    frozen.setattr(cluster, "fingerprint", lambda built: basis)
    for student, (notebook, _) in class_of(small_lab).items():
        course.submit(small_lab.name, student, notebook)
    folder = root / "submitted" / "wrong" / small_lab.name
    (folder / f"{small_lab.name}.ipynb").rename(folder / "my work.ipynb")
    said = run("grade", FIXTURE_LAB, "--course", root, "--scheduler", scheduler, "--timeout", TIMEOUT)
    assert said.exit_code == 0 and "8/8 " in said.output, said.output
    yield course, said.output
    frozen.undo()


def automatic(course, lab):
    return {
        student: {name: score.auto for name, score in scores.items() if name in FULL}
        for student, scores in course.scores(lab).items()
    }


@pytest.mark.slow
def test_every_grade_is_in_the_gradebook(small_lab, graded):
    course, _ = graded
    assert automatic(course, small_lab.name) == {s: points for s, (_, points) in class_of(small_lab).items()}


@pytest.mark.slow
def test_answers_in_words_wait_for_a_person(small_lab, graded):
    scores = graded[0].scores(small_lab.name)
    assert scores["ada"]["q1_2"].needs_manual_grade and scores["ada"]["q1_2"].auto is None
    assert not scores["untouched"]["q1_2"].needs_manual_grade and scores["untouched"]["q1_2"].auto == 0


@pytest.mark.slow
def test_the_summary_names_who_is_flagged_and_why(graded):
    said = graded[1]
    assert "8 graded" in said and "1 flagged" in said
    assert "submission: unreadable: The submitted file" in said and "the file was called my work.ipynb" in said
    assert "network: " in said  # how this wall was raised


@pytest.mark.slow
def test_feedback_shows_the_students_error_and_no_hidden_test(small_lab, graded):
    course, _ = graded
    said = run("feedback", FIXTURE_LAB, "--course", course.root)
    assert said.exit_code == 0 and "8 pages" in said.output, said.output
    for student in class_of(small_lab):
        page = (course.root / "feedback" / student / small_lab.name / f"{small_lab.name}.html").read_text()
        assert "hidden_seed" not in page and "HIDDEN TESTS" not in page
    wrong = (course.root / "feedback" / "wrong" / small_lab.name / f"{small_lab.name}.html").read_text()
    assert "gemm_broadcast(a, b) is wrong in" in wrong
    hangs = (course.root / "feedback" / "hangs" / small_lab.name / f"{small_lab.name}.html").read_text()
    assert "Question 1.1" in hangs and f"ran longer than the {TIMEOUT:g} s" in hangs
    unknown = run("feedback", FIXTURE_LAB, "--course", course.root, "--only", "adaa")
    assert unknown.exit_code == 2 and "Did you mean 'ada'?" in unknown.output


@pytest.mark.slow
def test_export(small_lab, graded, tmp_path):
    course, _ = graded
    said = run("export", "--course", course.root, "--to", tmp_path / "grades.csv")
    assert said.exit_code == 0, said.output
    with (tmp_path / "grades.csv").open(encoding="utf-8") as file:
        rows = {row["student_id"]: float(row["raw_score"]) for row in csv.DictReader(file)}
    assert rows == {student: sum(points.values()) for student, (_, points) in class_of(small_lab).items()}
    assert "wait for a person" in said.output


@pytest.mark.slow
def test_what_the_class_did_late_days_and_the_platforms_forms(small_lab, graded, tmp_path):
    """Statistics, penalties by nbgrader's plugin, names of the roster, and each platform's form, of the graded class."""
    course = graded[0]
    config = course.root / "nbgrader_config.py"
    before, lost = config.read_text(), 0.4 * 11.5  # two days have begun
    plugin = 'c.AssignLatePenalties.plugin_class = "instructor.grading.class_.late.LateDays"\nc.LateDays.percent_a_day = 20\n'
    set_due_date(course, small_lab.name, datetime(2026, 12, 2))
    (course.root / "submitted" / "ada" / small_lab.name / "timestamp.txt").write_text("2026-12-03 01:00:00\n")
    people = [Person("ada", "Ada", "Lovelace", "ada@x.org"), Person("gone", "Kurt", "Gödel")]
    rows = ["id,first_name,last_name,email", *(f"{p.id},{p.first_name},{p.last_name},{p.email}" for p in people)]
    roster_path(course).write_text("\n".join(rows))
    try:
        put_names(course, class_of(small_lab))
        assert apply_penalties(course, small_lab.name) == {}
        gradebook.merge(course, [gradebook.load_record(course, small_lab.name, "ada", None)])
        assert apply_penalties(course, small_lab.name) == {"ada": 0.0}  # a due date alone costs nothing
        config.write_text(before + plugin)
        assert apply_penalties(course, small_lab.name) == {"ada": pytest.approx(lost)}
        for _ in range(2):  # again: the same, and not twice
            done = run("stats", small_lab.name, "--course", str(course.root))
            assert done.exit_code == 0, done.output
        assert re.search(r"\d+ times?: ", done.output) and "class.svg" in done.output
        folder = course.root / "grading" / small_lab.name
        summary = report.write_summary(course, small_lab.name, report.everybody(course, small_lab.name, {}))
        table = {row["student"]: row for row in csv.DictReader(summary.open())}
        assert (table["gone"]["points"], table["gone"]["note"]) == ("", "Kurt Gödel: handed in nothing")
        ada = table["ada"]
        assert (ada["penalty"], ada["late"], ada["last_name"]) == ("4.6", "late", "Lovelace")
        assert table["ada"]["Question 1.1"] == "6.0" and table["ada"]["Question 1.2"] == "waits"
        assert table["ada"]["bonus"] == "3.0" and table["wrong"]["Question 1.1"] == "0.0"
        assert "<svg" in (folder / "class.svg").read_text()

        export = ("export", small_lab.name, "--course", course.root, "--as")
        for form in ("moodle", "canvas", "questions"):
            assert run(*export, form, "--to", tmp_path / form).exit_code == 0
        run(*export, "canvas")  # by itself into the course's folder
        assert (course.root / f"{small_lab.name}-canvas.csv").read_text() == (tmp_path / "canvas").read_text()
        moodle = {row["Identifier"]: row for row in csv.DictReader((tmp_path / "moodle").open())}
        assert float(moodle["ada"]["Grade"]) == pytest.approx(6.9) and moodle["ada"]["Email address"] == "ada@x.org"
        first, *canvas = csv.DictReader((tmp_path / "canvas").open())
        assert "Points Possible" in first["Student"] and float(first[small_lab.name]) == 12.5
        assert "Lovelace, Ada" in {row["Student"] for row in canvas}

        done = run("similar", str(FIXTURE_LAB), "--course", str(course.root))
        assert done.exit_code == 0 and "Alike is not copied" in done.output, done.output
        assert run("export", "--as", "moodle", "--course", str(course.root)).exit_code == 2
        assert "choose nbgrader" in run("export", "x", "--as", "excel", "--course", str(course.root)).output
    finally:
        config.write_text(before)
        roster_path(course).unlink()
        (course.root / "submitted" / "ada" / small_lab.name / "timestamp.txt").unlink()


@pytest.mark.slow
def test_a_persons_grade_stays_when_a_student_is_graded_again(small_lab, graded, scheduler):
    course, _ = graded
    with course.gradebook() as book:
        book.find_grade("q1_2", small_lab.name, small_lab.name, "ada").manual_score = 3
        book.db.commit()
    where = ("--course", course.root, "--scheduler", scheduler)
    said = run("grade", FIXTURE_LAB, *where, "--timeout", TIMEOUT, "--only", "ada")
    assert said.exit_code == 0 and automatic(course, small_lab.name)["ada"] == FULL, said.output
    assert course.scores(small_lab.name)["ada"]["q1_2"].manual == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--only", "nobody"), "no submission of nobody"),
        (("--scheduler", "tcp://127.0.0.1:1", "--only", "ada"), "no Dask scheduler answers"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_done_is_said(graded, arguments, words):
    said = run("grade", FIXTURE_LAB, "--course", graded[0].root, "--timeout", TIMEOUT, *arguments)
    assert said.exit_code == 2 and words in said.output


# ---- clusters that cannot grade, and GPUs ------------------------------------------------------------------------


@pytest.fixture
def grade_again(graded, monkeypatch):
    """`grade_again(arguments)`: grade one of the class; a cluster gets no time to wait for workers in."""
    monkeypatch.setattr(cluster, "ARRIVE", 0.0)
    return lambda *arguments: run(
        "grade", FIXTURE_LAB, "--course", graded[0].root, "--timeout", TIMEOUT, "--only", "wrong", *arguments
    )


@pytest.mark.slow
def test_gpus_are_asked_for_and_there_are_none(grade_again, scheduler):
    if cuda_support():
        pytest.skip("this machine has a GPU")
    said = grade_again("--gpu")
    assert said.exit_code == 2 and "--gpu needs an NVIDIA GPU" in said.output and "torch" in said.output
    said = grade_again("--gpu", "--scheduler", scheduler)
    assert said.exit_code == 2 and "none of the 2 workers" in said.output and "--resources GPU=1" in said.output


@contextmanager
def threads(count, **options):
    """A cluster within this process; yields its address."""
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=min(count, 1),
        threads_per_worker=count,
        processes=False,
        protocol="tcp",
        silence_logs=50,
        dashboard_address=":0",
        **options,
    ) as found:
        yield found.scheduler_address


@pytest.mark.slow
@pytest.mark.parametrize(("count", "words"), [(0, "has no workers"), (2, "has 2 threads")])
def test_a_cluster_that_cannot_grade(grade_again, count, words):
    with threads(count) as address:
        said = grade_again("--scheduler", address)
    assert said.exit_code == 2 and words in said.output and "--nthreads 1" in said.output


@pytest.mark.slow
def test_workers_of_another_version_of_the_course(grade_again, scheduler, monkeypatch):
    monkeypatch.setattr(cluster, "fingerprint", lambda built: os.getpid())  # as if each process had its own
    said = grade_again("--scheduler", scheduler)
    assert said.exit_code == 2 and "has another version of the course" in said.output


def test_whoever_waits_for_the_model_answers_is_told(small_lab, tmp_path, monkeypatch):
    class Began(Exception):
        pass

    def workers(*arguments):
        raise Began

    monkeypatch.setattr(gradebook, "prepare", lambda course, built: None)
    monkeypatch.setattr(cluster, "calibration_path", lambda built, limits: tmp_path / "none")
    monkeypatch.setattr(cluster, "connect", workers)
    course, said = Course(tmp_path), []
    course.submit(small_lab.name, "ada", small_lab.student)
    with pytest.raises(Began):
        found = submissions(course.root, small_lab.name)
        grade_class(course, small_lab, found, progress=lambda who, done, total: said.append(who))
    assert said and "model answers first" in said[0]


def test_the_last_worker_goes_and_then_the_scheduler(monkeypatch):
    """The run ends with an error; it does not wait for workers without end."""
    from distributed import Client

    monkeypatch.setattr(cluster, "ABSENT", 0.2)
    with threads(0) as address:
        client = Client(address, set_as_default=False)
        future = client.submit(os.getpid)
        with pytest.raises(cluster.GradingError, match="there is no worker"):
            list(cluster._in_order_of_end(client, [future], gpu=False))
    monkeypatch.setattr(cluster, "ABSENT", 60)
    with pytest.raises(cluster.GradingError, match="connection to the scheduler is lost"):
        list(cluster._in_order_of_end(client, [future], gpu=False))
    client.close(timeout=5)


def test_each_worker_of_this_machine_has_a_gpu_of_its_own(monkeypatch):
    """By its number; workers of a scheduler keep the GPU that they were started with."""
    monkeypatch.setattr("distributed.get_worker", lambda: types.SimpleNamespace(name="1"))
    assert cluster._on_own_gpu(Limits(gpu=True), ["GPU-one", "GPU-two"]).device == "GPU-two"
    assert cluster._on_own_gpu(Limits(gpu=True), []).device == ""


def test_no_other_program_can_send_work_to_the_workers_of_this_machine(small_lab):
    with cluster.connect(None, 2, small_lab) as client:
        assert client.scheduler.address.startswith("inproc://")
        assert client.submit(threading.get_ident).result() != threading.get_ident()
        assert {c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"} <= {"127.0.0.1"}


def test_a_timer_of_a_closed_cluster_prints_nothing(small_lab, caplog):
    with cluster.connect(None, 1, small_lab) as client:
        loop = client.loop.asyncio_loop
    left = loop.create_future()
    left.set_exception(TimeoutError("Timeout"))
    del left
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


# ---- Ctrl-C ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c(small_lab, scheduler, tmp_path):
    """As a terminal sends it: to the command and to all processes of its group."""
    course = Course(tmp_path / "course")
    for student in range(4):
        slow = f"import time\ntime.sleep(0.5)  # {student}\n{OFTEN}"
        course.submit(small_lab.name, f"s{student}", answered_notebook(small_lab, {"q1_1": slow}))
    arguments = ["grade", str(FIXTURE_LAB), "--course", str(course.root), "--timeout", str(TIMEOUT)]
    started = subprocess.Popen(
        [sys.executable, "-m", "utils.cli", *arguments, "--jobs", "1"],
        cwd=ROOT,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        # A shell without job control starts `make test &` with SIGINT ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    records = course.root / "grading" / small_lab.name / "results"
    while started.poll() is None and not list(records.glob("*.json")):
        time.sleep(0.05)
    processes = psutil.Process(started.pid).children(recursive=True)
    os.killpg(started.pid, signal.SIGINT)
    _, said = started.communicate(timeout=120)
    assert started.returncode == 130 and said.splitlines()[-1].startswith("interrupted: what was graded"), said
    assert "Traceback" not in said
    assert processes and psutil.wait_procs(processes, timeout=20)[1] == []
    before = {path.stem: path.stat().st_mtime_ns for path in records.glob("*.json")}
    assert 1 <= len(before) < 4
    assert automatic(course, small_lab.name) == dict.fromkeys(before, FULL)
    done = run(*arguments, "--scheduler", scheduler)
    assert done.exit_code == 0 and f"4 graded ({len(before)} of them before)" in done.output, done.output
    assert {s: (records / f"{s}.json").stat().st_mtime_ns for s in before} == before
    assert automatic(course, small_lab.name) == {f"s{student}": FULL for student in range(4)}


# ---- many, and a worker that dies --------------------------------------------------------------------------------


def faulty(lab) -> dict[str, tuple[dict[str, bytes | str | None], str, float | None]]:
    """{kind: (files of the folder, the verdict's state, the points)}; a file that is None is a symbolic link."""
    kinds, right = class_of(lab), answered_notebook(lab)
    name = f"{lab.name}.ipynb"
    large = json.loads(right)
    large["metadata"]["padding"] = "x" * 19_000_000
    broken = ("empty", "zero bytes throughout", "cut in the middle", "no JSON", "not UTF-8", "deep JSON")
    unreadable = {name: BROKEN_FILES[name](right) for name in broken}
    found: dict[str, tuple] = {kind: ({name: data}, "unreadable", 0.0) for kind, data in unreadable.items()}
    found |= {kind: ({name: kinds[kind][0]}, "graded", sum(kinds[kind][1].values())) for kind in ("dies", "patched")}
    found |= {
        "hangs": ({name: kinds["hangs"][0]}, "graded", sum(kinds["hangs"][1].values())),
        "65 MB": ({name: bytes(65 << 20)}, "unreadable", 0.0),
        "19 MB of right answers": ({name: json.dumps(large)}, "graded", 11.5),
        "renamed": ({"my work.ipynb": right}, "graded", 11.5),
        "no cells": ({name: json.dumps(json.loads(right) | {"cells": []})}, "unreadable", 0.0),
        "a symbolic link": ({name: None}, "no notebook", None),
        "only a text": ({"notes.txt": "I was ill."}, "no notebook", None),
        "two of other names": ({"a.ipynb": right, "b.ipynb": right}, "no notebook", None),
        "an empty folder": ({}, "no notebook", None),
    }
    return found


@pytest.mark.overnight
@pytest.mark.slow
def test_three_hundred_with_forty_faults_and_a_worker_killed(small_lab, scheduler, tmp_path):
    """Everybody gets one verdict by name; that of a graded one is the same as in a serial run."""
    from distributed import Client

    kinds, faults = class_of(small_lab), faulty(small_lab)
    good = [kinds["ada"], kinds["Zoë 漢"], kinds["wrong"], kinds["untouched"]]
    course, expected = Course(tmp_path / "course"), {}
    for i in range(300):
        student = f"s{i:03}"
        folder = course.root / "submitted" / student / small_lab.name
        folder.mkdir(parents=True)
        if i % 15 in (7, 14):
            files, state, points = list(faults.values())[(i // 15 * 2 + (i % 15 == 14)) % len(faults)]
        else:
            text, cells = good[i % 4]
            files, state, points = {f"{small_lab.name}.ipynb": text}, "graded", sum(cells.values())
        for name, data in files.items():
            if data is None:
                (folder / name).symlink_to("/etc/hostname")
            else:
                (folder / name).write_bytes(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)
        expected[student] = (state, points)
    killed = []
    with Client(scheduler, set_as_default=False) as client:

        def progress(student, done, total):
            if done >= 40 and not killed:
                killed.append(next(iter(client.run(os.getpid).values())))
                os.kill(killed[0], signal.SIGKILL)

        found = submissions(course.root, small_lab.name)
        summary = grade_class(course, small_lab, found, timeout=TIMEOUT, progress=progress, scheduler=scheduler)
    assert killed and not summary.failed
    rows = report.class_rows(report.everybody(course, small_lab.name, summary.failed))
    by_student = {row["student"]: row for row in rows}
    assert len(rows) == 300 and set(by_student) == set(expected)
    wrong = {}
    for student, (state, points) in expected.items():
        row = by_student[student]
        got = row["points"] + row["bonus"] if row["points"] != "" else None
        fits = (row["state"], got) == (state, points)
        if not fits or (row["state"] != "graded" and not row["note"]):
            wrong[student] = (state, points, row)
    assert not wrong
    serial = {}
    for submission in found:  # alike ones once
        data = submission.path.read_bytes()
        if data not in serial:
            serial[data] = grade_notebook(small_lab, data, timeout=TIMEOUT)
    for result in summary.graded:
        path = next(s.path for s in found if s.student == result.student)
        alone = serial[path.read_bytes()]
        assert {n: (c.points, c.status) for n, c in result.cells.items()} == {
            n: (c.points, c.status) for n, c in alone.cells.items()
        }
        assert result.flags == alone.flags
    assert sorted(course.scores(small_lab.name)) == sorted(r.student for r in summary.graded)


@pytest.mark.slow
def test_a_submission_that_takes_its_worker_along_is_flagged_after_four(small_lab, scheduler, tmp_path, monkeypatch):
    """Nothing is graded here: the test is about which worker tries again, and how often."""
    course, tries = Course(tmp_path / "course"), tmp_path / "tries"
    tries.mkdir()
    for student in ("deadly", "fine"):
        course.submit(small_lab.name, student, small_lab.student)
    result = grade_notebook(small_lab, small_lab.student, timeout=TIMEOUT, student="fine")
    folder = str(tries)

    def deadly(built, data, student, timeout, limits, devices):
        if student == "deadly":
            with open(f"{folder}/{time.time_ns()}", "w"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    monkeypatch.setattr(cluster, "grade_one", deadly)
    found = submissions(course.root, small_lab.name)
    summary = grade_class(course, small_lab, found, timeout=TIMEOUT, scheduler=scheduler)
    assert len(list(tries.iterdir())) == 1 + cluster.RETRIES
    assert set(summary.failed) == {"deadly"} and "4 attempts" in summary.failed["deadly"]
    assert [r.student for r in summary.flagged] == ["deadly"]
    assert "fine" in course.scores(small_lab.name)


# ---- taking in ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("member", "student"),
    [
        ("Ada Lovelace_4711_assignsubmission_file_/my answers.ipynb", "Ada Lovelace_4711"),
        ("lovelaceada_LATE_12_3456_lab1-1.ipynb", "lovelaceada_12"),
        ("ada/lab1/lab1.ipynb", "ada"),
        ("ada/lab1.ipynb", "ada"),
        ("lab1.ipynb", None),
        ("ada/.ipynb_checkpoints/lab1.ipynb", None),
        ("__MACOSX/ada/lab1.ipynb", None),
        ("../ada/lab1.ipynb", None),
    ],
)
def test_names_in_the_zips_of_platforms(tmp_path, member, student):
    archive = tmp_path / "class.zip"
    _zip(archive, {member: "{}", "other/lab1.ipynb": "{}"})
    assert set(take_in(archive, tmp_path, "lab1")) == {"other"} | ({student} if student else set())


@pytest.mark.parametrize("around", ["", "class/", "course/submitted/"])
@pytest.mark.parametrize("own", ["", "lab1/", "homework/", "ada/", "Ada_7_assignsubmission_file_/", "submission_4/"])
def test_whose_a_file_is_says_the_platforms_folder_and_none_in_it(tmp_path, around, own):
    """A folder in a student's own, or a file's name there, can be another student's name."""
    for file in ("lab1.ipynb", "ada_1_2_lab1.ipynb", "Ada_7_2_lab1.ipynb"):
        root = tmp_path / file
        root.mkdir()
        members = {f"{around}{who}/lab1.ipynb": who for who in ("ada", "Ada_7", "submission_4")}
        _zip(root / "class.zip", members | {f"{around}mallory/{own}{file}": "mallory"})
        taken = _taken_in(root)
        assert taken == {name: name for name in ("ada", "Ada_7", "submission_4", "mallory")}


@pytest.mark.parametrize("own", ["", "submission_13/", "assignment_1_export/"])
@pytest.mark.parametrize("around", ["", "assignment_1_export/"])
def test_a_student_renames_nobody(tmp_path, around, own):
    """Gradescope's list of names lies beside the submissions; a student can hand in a file of that name."""
    names = "".join(f"{who}:\n  :submitters:\n  - :name: Mallory\n" for who in ("submission_12", "Ada_1"))
    members = {f"{around}submission_{n}/lab1.ipynb": str(n) for n in (12, 13)}
    _zip(tmp_path / "class.zip", members | {f"{around}submission_13/{own}submission_metadata.yml": names})
    taken = _taken_in(tmp_path)
    assert taken == {"submission_12": "12", "submission_13": "13"}


def test_two_people_of_one_name_have_a_grade_each(tmp_path):
    people = {12: "Wei Wang", 13: "Wei Wang", 14: "Grace Hopper"}
    names = "".join(f"submission_{n}:\n  :submitters:\n  - :name: {name}\n" for n, name in people.items())
    members = {f"x/submission_{n}/lab1.ipynb": str(n) for n in (*people, 15)} | {"x/submission_metadata.yml": names}
    members |= {f"x/{name}/lab1.ipynb": name for name in ("O:Brien", "O?Brien", "\U0001f600" * 120)}
    _zip(tmp_path / "class.zip", members)
    taken = _taken_in(tmp_path)
    assert len(taken) == 7 and taken["Wei Wang_12"] == "12" and taken["Wei Wang_13"] == "13"
    assert (taken["Grace Hopper"], taken["submission_15"]) == ("14", "15")
    assert {"O:Brien", "O?Brien"} < set(taken.values())


def _taken_in(root):
    """{student: text of the notebook} of a zip that holds nothing else."""
    return {
        s: (root / "submitted" / s / "lab1/lab1.ipynb").read_text() for s in take_in(root / "class.zip", root, "lab1")
    }


def _zip(archive, members, links=()):
    with zipfile.ZipFile(archive, "w") as file:
        for name, text in members.items():
            file.writestr(zipfile.ZipInfo(name, (2026, 11, 20, 23, 58, 10)), text)
        for name in links:
            link = zipfile.ZipInfo(name)
            link.external_attr = 0o120777 << 16
            file.writestr(link, "/etc/passwd")


def test_a_zip_is_taken_in_and_everybody_is_named(tmp_path):
    archive = tmp_path / "class.zip"
    members = {
        "Ada_1_assignsubmission_file_/lab1.ipynb": "{}",
        "../../evil/lab1.ipynb": "{}",
        "notes.txt": "no notebook",
        "O'Brien, Pat (Hans)_2_assignsubmission_file_/lab1.ipynb": "{}",
        "Jose\u0301_3_assignsubmission_file_/Lab1.ipynb": "{}",
        "สมชาย ใจดี_4_assignsubmission_file_/lab1_final.ipynb": "{}",
        "Two_5_assignsubmission_file_/a.ipynb": "{}",
        "Two_5_assignsubmission_file_/lab1.ipynb": '{"mine": 1}',
        "Pdf_6_assignsubmission_file_/lab1.pdf": "x",
        "Other_7_assignsubmission_file_/lab4_sdpa.ipynb": "{}",
        "lovelaceada_LATE_8_99_lab1-1.ipynb": "{}",
    }
    _zip(archive, members, links=["Link_9_assignsubmission_file_/lab1.ipynb"])
    found = take_in(archive, tmp_path, "lab1", time_zone("Europe/Berlin"))
    refused = {student: arrival.note for student, arrival in found.items() if not arrival.file}
    assert set(found) - set(refused) == {
        *("Ada_1", "O'Brien, Pat (Hans)_2", "Jos\u00e9_3", "สมชาย ใจดี_4", "Two_5", "lovelaceada_8")
    }
    assert set(refused) == {"Pdf_6", "Other_7", "Link_9"}
    assert "lab4_sdpa.ipynb" in refused["Other_7"] and "symbolic link" in refused["Link_9"]
    assert (tmp_path / "submitted" / "Two_5" / "lab1" / "lab1.ipynb").read_text() == '{"mine": 1}'
    stamp = tmp_path / "submitted" / "Ada_1" / "lab1" / "timestamp.txt"
    assert stamp.read_text() == "2026-11-20 22:58:10 UTC\n"
    known = arrivals(tmp_path, "lab1")
    assert known["lovelaceada_8"].late and not known["Ada_1"].late and "Lab1" not in known["Ada_1"].note
    assert known["สมชาย ใจดี_4"].note == "the file was called lab1_final.ipynb"
    assert set(without_submission(tmp_path, "lab1")) == set(refused)
    assert not (tmp_path.parent / "evil").exists()
    with pytest.raises(GradingError, match="cannot be unpacked"):
        (tmp_path / "no.zip").write_text("no zip")
        take_in(tmp_path / "no.zip", tmp_path, "lab1")
    with pytest.raises(GradingError, match="is no file"):
        take_in(tmp_path / "absent.zip", tmp_path, "lab1")


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("..", None),
        ("../x", "__x"),
        ("a/b\\c", "a_b_c"),
        ("  a \n b ", "a _ b"),
        ("\u202eabc", "_abc"),
        ("李小龍", "李小龍"),
    ],
)
def test_names_as_folders(name, folder):
    assert usable_name(name) == folder


def test_renamed_links_and_empty_folders_are_accounted_for(tmp_path):
    for student in ("fine", "renamed", "two", "link", "empty"):
        (tmp_path / "submitted" / student / "lab1").mkdir(parents=True)
    place = tmp_path / "submitted"
    (place / "fine" / "lab1" / "lab1.ipynb").write_text("{}")
    (place / "renamed" / "lab1" / "my lab.ipynb").write_text("{}")
    (place / "two" / "lab1" / "a.ipynb").write_text("{}")
    (place / "two" / "lab1" / "b.ipynb").write_text("{}")
    (place / "link" / "lab1" / "lab1.ipynb").symlink_to(place / "fine" / "lab1" / "lab1.ipynb")
    assert {s.student: s.note for s in submissions(tmp_path, "lab1")} == {
        "fine": "",
        "renamed": "the file was called my lab.ipynb",
    }
    why = without_submission(tmp_path, "lab1")
    assert set(why) == {"two", "link", "empty"} and "symbolic link" in why["link"]


def test_a_folder_whose_name_nothing_can_hold_is_named_and_stops_nobody(tmp_path):
    for name in (b"ada", b"\xff\xfebob", b"e" * 245, b"[a-c]da", b"two\nlines"):
        folder = bytes(tmp_path) + b"/submitted/" + name + b"/lab1"
        (tmp_path / "submitted").mkdir(exist_ok=True)

        os.makedirs(folder)
        with open(folder + b"/lab1.ipynb", "w") as file:
            file.write("{}")
    (tmp_path / "submitted" / "carl" / "lab1" / "lab1.ipynb").mkdir(parents=True)  # a folder of that name
    assert [s.student for s in submissions(tmp_path, "lab1")] == ["ada"]
    missing = without_submission(tmp_path, "lab1")
    assert set(missing) == {"??bob", "e" * 245, "carl", "[a-c]da", "two\nlines"} and "not UTF-8" in missing["??bob"]
    json.dumps(missing).encode()
    with pytest.raises(GradingError, match="no submission of"):
        submissions(tmp_path, "lab1", ["e" * 245])


def test_a_second_grader_says_so_and_stops(tmp_path):
    with (
        only_grader(tmp_path, "lab1"),
        pytest.raises(cluster.GradingError, match=f"being graded already.*{os.getpid()}"),
        only_grader(tmp_path, "lab1"),
    ):
        pass
    with only_grader(tmp_path, "lab1"):  # the first one has ended
        pass


def test_commands_that_only_read_load_no_torch(tmp_path):
    """`labs grade` is refused, since the lab is being graded already; the others have nothing to read."""
    script = f"""
import sys
from typer.testing import CliRunner
from utils.cli import app, mount_plugins

mount_plugins()
for arguments in ("grade lab2", "stats lab2", "export", "feedback lab2", "release"):
    done = CliRunner().invoke(app, [*arguments.split(), *(["--help"] if arguments == "release" else ["--course", {str(tmp_path)!r}])])
    assert "Usage" in done.output or "error: " in done.output, done.output
assert "torch" not in sys.modules
"""
    with only_grader(tmp_path, "lab2_flexattention"):
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_folder_that_cannot_be_written_is_said_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "gradebook.db").write_text("not empty")
    (tmp_path / "autograded").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    said = run("feedback", "lab2", "--course", tmp_path)
    assert said.exit_code == 2 and "cannot be written" in said.output and "Traceback" not in said.output


@pytest.mark.slow
def test_an_empty_gradebook_of_a_full_disk_is_removed_and_alembic_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", os.defpath)  # as without an activated environment
    (tmp_path / "gradebook.db").touch()
    with Course(tmp_path).gradebook() as book:
        assert book.students == []
    with Course(tmp_path).gradebook() as book:  # the second time nbgrader asks alembic for the version
        assert book.students == []


def test_too_many_files_stop_their_owner_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(intake, "MAX_MEMBERS", 3)
    many = {f"Many_1_assignsubmission_file_/{n}.ipynb": "{}" for n in range(4)}
    _zip(tmp_path / "class.zip", {**many, "Ada_2_assignsubmission_file_/lab1.ipynb": "{}"})
    found = take_in(tmp_path / "class.zip", tmp_path, "lab1")
    assert found["Ada_2"].file and not found["Many_1"].file and "at most 3" in found["Many_1"].note


def test_a_table_names_everybody_and_runs_nothing_in_a_spreadsheet(tmp_path):
    broken = report.Student("=cmd()", None, {"q1_1": 0.0}, {"q1_1": 6.0}, late=True, outcome="unreadable", note="empty")
    absent = report.Student("link", None, outcome="no notebook", note="lab1.ipynb is a symbolic link")
    text = report.write_summary(Course(tmp_path), "lab1", [broken, absent]).read_text()
    assert "\n'=cmd()," in text and "late,unreadable,empty," in text
    assert "link,,,,,,,,,,no notebook,lab1.ipynb is a symbolic link," in text
    assert report.in_words(broken) == "0 of 6, late, unreadable, empty"
    assert report.in_words(absent) == "-, no notebook, lab1.ipynb is a symbolic link"


@pytest.mark.slow
def test_the_gradebook_keeps_all_of_a_submission_or_nothing(small_lab, graded, monkeypatch):
    course, _ = graded
    result = gradebook.load_record(course, small_lab.name, "wrong", _key(course, small_lab.name, "wrong"))
    before = automatic(course, small_lab.name)["wrong"]
    cells = {**result.cells, "q9_9_tests": result.cells["q1_1_tests"]}
    cells["q1_3_tests"] = type(cells["q1_3_tests"])(0.0, "failed", "")
    broken = type(result)(**{**vars(result), "cells": cells})
    with pytest.raises(cluster.GradingError, match="another version"):
        gradebook.merge(course, [broken])
    assert automatic(course, small_lab.name)["wrong"] == before


def _key(course, lab, student):
    return json.loads(gradebook.record_path(course, lab, student).read_text())["key"]


@pytest.mark.slow
def test_the_autograded_notebook_is_valid_and_without_hidden_tests(small_lab, graded):
    course, _ = graded
    for student in class_of(small_lab):
        path = course.root / "autograded" / student / small_lab.name / f"{small_lab.name}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert "hidden_seed" not in path.read_text()
