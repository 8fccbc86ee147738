"""A fork server: a process that has imported slow libraries once, and forks a fresh child for each job.

Importing torch and Triton takes two to four seconds; interpreting or compiling a small kernel takes a fraction of a
second. So the first job of a program starts a server process that imports both, runs no kernel itself, and forks a child
for each job. A kernel then finds nothing that an earlier kernel left behind, and whatever it does to its process ends
with the job. The server ends when its program ends, or after five minutes without a job; the next job then starts
another server.

The grader does not use the server, so that a student's kernel meets no process that other students' kernels meet: the process
behind the walls, which one submission has, forks a child for each job (`ForkedProcess`), or starts a new one.

A module that uses this calls `serve` when it is run as a program, and keeps a `WarmProcess` with its own name.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from utils.files import ROOT

IDLE_SECONDS = 300.0
SERVE = "--serve"
STREAMS = "printed", "complaints"  # files of a job's folder that get what it prints


@dataclass(frozen=True)
class Ended:
    """How a job's process ended: its exit status (minus the signal's number), and what it printed."""

    status: int
    printed: str
    complaints: str


class WarmProcess:
    """Runs jobs in forks of a server, `python -m MODULE`, which is started with the first job.

    Args:
        module: Name of a module that calls `serve` when it is run as a program.
        **variables: Environment variables of the jobs, in addition to the caller's own.
    """

    def __init__(self, module: str, **variables: str) -> None:
        self.module, self.variables = module, variables
        self.server: subprocess.Popen | None = None
        self.owner = 0
        self._one_at_a_time = threading.Lock()

    def run(self, folder: str, timeout: float) -> Ended:
        """Run the job whose inputs are in a folder.

        Args:
            folder: The job's current folder; the module writes its results there, or prints them.
            timeout: Seconds, the start of a process included.

        Raises:
            TimeoutError: The job did not end in time; its process has been killed.
        """
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **self.variables}
        command = [sys.executable, "-m", self.module]
        if os.environ.get("LABS_COMPILE_CACHE") == "off":  # as the grader sets it: nothing is shared between jobs
            return run_anew([*command, folder], environment, timeout)
        with self._one_at_a_time:
            deadline = time.monotonic() + timeout
            # A server may have been idle for too long; and a fork of this process must not write into its parent's pipe.
            if self.server is None or self.owner != os.getpid() or self.server.poll() is not None:
                self._start(command, environment)
            assert self.server is not None
            try:
                self._channel.send_bytes(json.dumps({"folder": folder, "environment": environment}).encode())
                if not self._channel.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                return _ended(int(self._channel.recv_bytes()), folder)
            except (EOFError, ConnectionError):  # the server has ended
                self._complaints.seek(0)
                return Ended(1, "", self._complaints.read().decode(errors="replace"))
            except BaseException:  # also an interrupt of the caller
                with suppress(ConnectionError):
                    self._channel.send_bytes(b"stop")  # the server ends the job and itself
                self.server.wait()
                raise

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        self.owner = os.getpid()
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process writes to it)
        self._channel, theirs = multiprocessing.Pipe()
        with theirs:
            self.server = subprocess.Popen(
                [*command, SERVE, str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._complaints,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the caller alone
            )


class ForkedProcess:
    """Runs jobs in forks of this very process, which has imported what they need; as a `WarmProcess` otherwise.

    Args:
        work: does one job, given its folder.
    """

    def __init__(self, work: Callable[[str], object]) -> None:
        self.work = work

    def run(self, folder: str, timeout: float) -> Ended:
        """Run the job whose inputs are in a folder; as `WarmProcess.run`."""
        deadline = time.monotonic() + timeout
        status = _run_fork(self.work, folder, dict(os.environ), lambda: time.monotonic() > deadline)
        if status is None:
            raise TimeoutError
        return _ended(status, folder)


def serve(prepare: Callable[[], object], work: Callable[[str], object]) -> None:
    """Do the job of the folder that the command line names, or fork a child for each job that comes through a channel.

    Args:
        prepare: Imports the slow libraries.
        work: Does one job, given its folder.
    """
    if sys.argv[1] != SERVE:
        work(sys.argv[1])
        return
    channel = Connection(int(sys.argv[2]))
    prepare()
    with suppress(EOFError, ConnectionError):  # the program has ended
        while channel.poll(IDLE_SECONDS):
            # No job is sent while one runs: what can be read then is a word to stop, or that the program has ended.
            status = _run_fork(work, given_up=channel.poll, **json.loads(channel.recv_bytes()))
            if status is None:
                return
            channel.send_bytes(b"%d" % status)


def run_anew(command: list[str], environment: dict[str, str], timeout: float) -> Ended:
    """Run a program whose last argument is a job's folder, there; as `WarmProcess.run`."""
    folder = command[-1]
    with open(Path(folder, STREAMS[0]), "wb") as out, open(Path(folder, STREAMS[1]), "wb") as err:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            return _ended(child.wait(timeout), folder)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            if child.poll() is None:  # also on an interrupt of the caller
                _kill_group(child.pid)
                child.wait()


def _run_fork(
    work: Callable[[str], object], folder: str, environment: dict[str, str], given_up: Callable[[], bool]
) -> int | None:
    """Do one job in a fork and return its exit status; or kill it and return None, once `given_up` says so."""
    pid = os.fork()
    if not pid:
        _do_in_fork(work, folder, environment)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if given_up():
            _kill_group(pid)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.002)


def _do_in_fork(work: Callable[[str], object], folder: str, environment: dict[str, str]) -> None:
    os.setsid()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # a channel of the parent's is no business of a kernel's
    os.chdir(folder)
    for number, (name, mode) in enumerate([(os.devnull, "rb"), *((name, "wb") for name in STREAMS)]):
        with open(name, mode) as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    status = 1
    try:
        work(folder)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _ended(status: int, folder: str) -> Ended:
    """Return how a job ended, with what it left in its folder's files."""
    files = [Path(folder, name) for name in STREAMS]
    return Ended(status, *(file.read_text("utf-8", errors="replace") if file.exists() else "" for file in files))


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the process alone, if it has not become the leader of a group yet
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
            return
