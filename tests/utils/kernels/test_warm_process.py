"""The process that forks a child for each job: answers, failures, and that a job leaves nothing behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.utils.kernels.warm_jobs import PROCESS
from utils.kernels import warm_process
from utils.kernels.warm_process import WarmProcess


@pytest.fixture
def served(monkeypatch):
    """Send jobs to the server even if this process has one thread."""
    monkeypatch.setattr(warm_process, "has_one_thread", lambda: False)


def test_calls_share_one_start_and_nothing_else(served, monkeypatch):
    first = PROCESS.run("mark", 60)
    monkeypatch.setenv("A_WORD", "7")
    second = PROCESS.run("mark", 60).answer
    assert (first.status, first.words, first.answer[2]) == (0, "printed mark\n", PROCESS.server.pid)
    assert first.answer[0] == second[0] == 0 and first.answer[1] != second[1] and first.answer[2] == second[2]
    assert (first.answer[3], second[3]) == (0, 7)  # each job gets the environment of its call


def test_a_killed_server_is_replaced_and_a_fork_gets_its_own(served, monkeypatch):
    first = PROCESS.run("mark", 60).answer
    PROCESS.server.kill()
    PROCESS.server.wait()
    second = PROCESS.run("mark", 60).answer
    assert second[2] != first[2]
    monkeypatch.setattr(PROCESS, "owner", 0)  # as in a fork of the process that started the server
    assert PROCESS.run("mark", 60).answer[2] != second[2]


def test_a_job_that_fails_or_takes_too_long_says_so(served):
    assert PROCESS.run("exit", 60).status == 3
    assert PROCESS.run("segfault", 60).status == -11
    ended = PROCESS.run("raise", 60)
    assert (ended.status, ended.answer) == (1, None) and "ValueError: a wrong job" in ended.words
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        PROCESS.run("sleep", 0.5)
    assert time.monotonic() - began < 15


def test_a_server_that_does_not_start_is_heard(served):
    ended = WarmProcess("tests.no_such_module", lambda: None, lambda job: None).run("mark", 60)
    assert ended.status == 1 and "no_such_module" in ended.words


def test_the_server_ends_with_its_program():
    code = (
        "from tests.utils.kernels.warm_jobs import PROCESS\nfrom utils.kernels import warm_process\n"
        "warm_process.has_one_thread = lambda: False\nprint(PROCESS.run('mark', 60).answer[2])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    server, until = int(done.stdout), time.monotonic() + 20
    while psutil.pid_exists(server) and psutil.Process(server).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the server has outlived its program"
        time.sleep(0.05)


def test_a_process_with_one_thread_forks_the_job_itself_which_has_none_of_its_files(tmp_path, monkeypatch):
    mine = os.open(tmp_path / "mine", os.O_RDWR | os.O_CREAT)

    def work(job):
        os.write(1, f"printed {job}".encode())
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(mine, b"reached")  # the parent's descriptor is closed in the child
        return [os.getppid(), os.getcwd()]

    monkeypatch.setattr(warm_process, "has_one_thread", lambda: True)
    ended = WarmProcess("none", lambda: None, work).run("it", timeout=30)
    os.close(mine)
    parent, folder = ended.answer
    assert parent == os.getpid() and not Path(folder).exists()
    assert (ended.words, ended.status) == ("printed it", 0)
    assert (tmp_path / "mine").read_bytes() == b""
