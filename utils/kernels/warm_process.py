"""A process that has imported slow libraries once, and forks a fresh child for each job.

Importing torch and Triton takes two to seven seconds; interpreting or compiling a small kernel takes a fraction of a
second. So the first job of a program starts a server process that imports both, runs no kernel itself, and forks a child
for each job. A kernel then finds nothing that an earlier kernel left behind, and whatever it does to its process ends
with the job. The server ends when its program ends, or after five minutes without a job; the next job then starts
another server.

A process that has one thread and already the environment of the jobs forks the child itself: the grader's processes do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from utils.files import ROOT

IDLE_SECONDS = 300
JOB, ANSWER, PRINTED, COMPLAINTS = "job.pt", "answer.pt", "printed", "complaints"  # files of a job's folder


@dataclass(frozen=True)
class Ended:
    """How a job's process ended: its exit status (minus the signal's number), what it printed, and its answer if it has one."""

    status: int
    printed: str
    complaints: str
    answer: Any = None


class WarmProcess:
    """Runs jobs in forks of a server, `python -m MODULE`, which is started with the first job.

    Args:
        module: Name of the module that keeps this object, and calls its `serve` when it is run as a program.
        prepare: Imports the slow libraries.
        work: Returns the answer to one job. Both are dictionaries, lists, plain values and tensors.
        **variables: Environment variables of the jobs, in addition to the caller's own.
    """

    def __init__(
        self, module: str, prepare: Callable[[], object], work: Callable[[Any], Any], **variables: str
    ) -> None:
        self.module, self.prepare, self.work, self.variables = module, prepare, work, variables
        self.server: subprocess.Popen[str] | None = None
        self.owner = 0
        self._one_at_a_time = threading.Lock()

    def run(self, job: Any, timeout: float) -> Ended:
        """Run one job, in a folder of its own that is then deleted; timeout: seconds, without the start of a server.

        Raises:
            TimeoutError: The job did not end in time; its process has been killed.
        """
        with tempfile.TemporaryDirectory(prefix="job-") as folder:
            torch.save(job, Path(folder, JOB))
            if self.variables.items() <= os.environ.items() and has_one_thread():
                self.prepare()
                status = self._run_fork(folder, timeout, dict(os.environ))
            else:
                status = self._ask_server(folder, timeout)
            if status == -signal.SIGALRM:
                raise TimeoutError
            files = [Path(folder, name) for name in (PRINTED, COMPLAINTS)]
            texts = [file.read_text("utf-8", errors="replace") if file.exists() else "" for file in files]
            whole = status == 0 and Path(folder, ANSWER).exists()
            return Ended(status, *texts, torch.load(Path(folder, ANSWER), weights_only=True) if whole else None)

    def serve(self) -> None:
        """Be the server: run each job that comes as a line of standard input, and print its exit status."""
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what the libraries print is no answer
        self.prepare()
        signal.alarm(IDLE_SECONDS)
        for job in sys.stdin:  # until the program has ended
            signal.alarm(0)
            print(self._run_fork(*json.loads(job)), file=answers, flush=True)
            signal.alarm(IDLE_SECONDS)

    def _ask_server(self, folder: str, timeout: float) -> int:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **self.variables}
        with self._one_at_a_time:
            # A server may have been idle for too long; and a fork of this process must not write into its parent's pipe.
            if self.server is None or self.owner != os.getpid() or self.server.poll() is not None:
                self.owner, self._complaints = os.getpid(), tempfile.TemporaryFile()  # noqa: SIM115 (the server's)
                self.server = subprocess.Popen(
                    [sys.executable, "-m", self.module],
                    env=environment,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._complaints,
                    start_new_session=True,  # Ctrl-C reaches the caller alone
                )
            assert self.server.stdin and self.server.stdout
            try:
                print(json.dumps([folder, timeout, environment]), file=self.server.stdin, flush=True)
                status = int(self.server.stdout.readline())
                if status == -signal.SIGALRM:
                    raise TimeoutError
                return status
            except (ValueError, BrokenPipeError):  # the server has ended
                self._complaints.seek(0)
                Path(folder, COMPLAINTS).write_bytes(self._complaints.read())
                return 1
            except BaseException:  # too late, or an interrupt of the caller: what the job has started ends, too
                os.killpg(self.server.pid, signal.SIGKILL)
                self.server.wait()
                raise

    def _run_fork(self, folder: str, timeout: float, environment: dict[str, str]) -> int:
        """Do one job in a fork of this process and return its exit status; that of SIGALRM if it took too long."""
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, timeout)
            os.chdir(folder)
            for number, name in enumerate((os.devnull, PRINTED, COMPLAINTS)):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # a descriptor of the parent's is no business of a kernel's
            # The parent's streams may be a notebook's or a test's.
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            os.environ.clear()
            os.environ.update(environment)
            torch.save(self.work(torch.load(JOB, weights_only=True)), ANSWER)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def has_one_thread() -> bool:
    """Whether this process can be forked safely: a fork has one thread, and a lock of another's would stay locked."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False
