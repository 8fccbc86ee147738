"""A process that has imported slow libraries once, and forks a fresh child for each job.

Importing torch and Triton takes two to seven seconds; compiling a small kernel takes a fraction of a second. So the first
job of a program starts a server process that imports both, and forks a child for each job. The child ends with its job, so
a job cannot harm the next job. The server ends when its program ends, or after five minutes without a job; then the next
job starts a new server.

A process with one thread, such as the grader's, can be forked safely, and forks the child itself.
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
JOB, ANSWER, WORDS = "job.pt", "answer.pt", "words.txt"  # files in the folder of a job


@dataclass(frozen=True)
class Ended:
    """The end of a job's process: its exit status (minus the number of a signal), its output, and its answer or None."""

    status: int
    words: str
    answer: Any


class WarmProcess:
    """Runs jobs in forks of a server, `python -m MODULE`. The first job starts the server.

    Args:
        module: Name of the module that keeps this object. Run as a program, it calls `serve`.
        prepare: Imports the slow libraries.
        work: Returns the answer to one job. Both are dictionaries, lists, plain values and tensors.
    """

    def __init__(self, module: str, prepare: Callable[[], object], work: Callable[[Any], Any]) -> None:
        self.module, self.prepare, self.work = module, prepare, work
        self.server: subprocess.Popen[str] | None = None
        self.owner = 0
        self._one_at_a_time = threading.Lock()

    def run(self, job: Any, timeout: float) -> Ended:
        """Run one job in a temporary folder. timeout: seconds, without the start of a server.

        Raises:
            TimeoutError: The job did not end in time; its process has been killed.
        """
        with tempfile.TemporaryDirectory(prefix="job-") as folder:
            torch.save(job, Path(folder, JOB))
            if has_one_thread():
                self.prepare()
                status = self._run_fork(folder, timeout, dict(os.environ))
            else:
                status = self._ask_server(folder, timeout)
            if status == -signal.SIGALRM:
                raise TimeoutError
            words = Path(folder, WORDS)
            whole = status == 0 and Path(folder, ANSWER).exists()
            answer = torch.load(Path(folder, ANSWER), weights_only=True) if whole else None
            return Ended(status, words.read_text("utf-8", errors="replace") if words.exists() else "", answer)

    def serve(self) -> None:
        """Serve: run each job that comes as a line of standard input, and print its exit status."""
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # output of the libraries must not look like an answer
        self.prepare()
        signal.alarm(IDLE_SECONDS)
        for job in sys.stdin:  # until the program has ended
            signal.alarm(0)
            print(self._run_fork(*json.loads(job)), file=answers, flush=True)
            signal.alarm(IDLE_SECONDS)

    def _ask_server(self, folder: str, timeout: float) -> int:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        with self._one_at_a_time:
            # The server may have ended because it was idle; and a fork of this process must not write into its parent's pipe.
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
                Path(folder, WORDS).write_bytes(self._complaints.read())
                return 1
            except BaseException:  # a timeout or an interrupt of the caller: end the job and its children
                os.killpg(self.server.pid, signal.SIGKILL)
                self.server.wait()
                raise

    def _run_fork(self, folder: str, timeout: float, environment: dict[str, str]) -> int:
        """Do one job in a fork of this process and return its exit status; -SIGALRM if it took too long."""
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, timeout)
            os.chdir(folder)
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(os.open(WORDS, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
            os.dup2(1, 2)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # a kernel must not reach the open files of the parent
            # The parent may be a notebook or a test, with streams that are no files.
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
    """Whether this process can be forked safely: a fork has one thread, and locks of other threads would stay locked."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False
