"""A warm process: the libraries imported and the lab's setup run once; every submission is graded in forks of it.

    worker ── zygote ──┬── checker (trusted, one for each submission; reads the hidden tests)
                       └── walls ── first process of its namespace ── the student's process

No hidden test and no other submission may be in the memory of a student's process. So the zygote, from which it descends,
never reads any. While a checker works, the zygote is its warden: it starts and ends students' processes as the checker asks.

Run as `python -m instructor.grading.submission.zygote DESCRIPTOR`, with an environment without secrets (`engine` does).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import json
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import traceback
from dataclasses import asdict

import psutil

from instructor.grading.sandbox import walls
from instructor.grading.submission import checker
from instructor.grading.submission.enclosure import Enclosure
from instructor.grading.submission.remote import Remote
from instructor.grading.submission.results import Job, WarmUp, how_it_ended
from instructor.grading.submission.warmup import Warm, warm_up
from instructor.grading.wire.channel import Channel, Closed


def serve(descriptor: int) -> None:
    """Warm up, then fork a checker for each submission; ends when the worker does."""
    sock = socket.socket(fileno=descriptor)
    channel = Channel(sock)
    options: WarmUp = pickle.loads(channel.receive()[1][0])  # from the worker, which is trusted
    try:
        warm = warm_up(options)
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    gc.collect()
    gc.freeze()  # or else the collector touches, and so copies, the memory of the libraries in every fork
    channel.send({"op": "ready"})
    while True:
        _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
        if not descriptors:
            os._exit(0)  # the worker has ended, and there is nothing to tidy up
        ours, theirs = socket.socketpair()
        if (process := os.fork()) == 0:
            walls.die_with_parent()
            sock.close()
            ours.close()
            _grade(descriptors[0], warm, theirs)
        theirs.close()
        _be_warden(ours, warm, process, descriptors[0])
        if status := os.waitpid(process, 0)[1]:
            with contextlib.suppress(Closed):
                Channel(socket.socket(fileno=os.dup(descriptors[0]))).send(
                    {"op": "crashed", "why": f"its checker {how_it_ended(os.waitstatus_to_exitcode(status))}"}
                )
        os.close(descriptors[0])


def _grade(descriptor: int, warm: Warm, warden: socket.socket) -> None:
    """Run the checker's process, from fork to end; `descriptor` is that of the channel to the worker."""
    try:
        faulthandler.enable()
        walls.first_to_go()  # a checker that a submission made large ends before anybody else does
        limits = warm.options.limits
        if not limits.gpu:
            walls.limit_memory(max(2.0, limits.memory_gb))
        channel = Channel(socket.socket(fileno=descriptor))
        job: Job = pickle.loads(channel.receive()[1][0])

        try:
            result = checker.Checker(job, warm.names(), functools.partial(_ask_for_student, warden)).grade()
            # As a blob: a notebook with its pictures may be longer than the header of a frame may be.
            channel.send({"op": "graded"}, [json.dumps(asdict(result)).encode()])
        except BaseException as error:
            channel.send({"op": "crashed", "why": "".join(traceback.format_exception(error))[-4000:]})
        os._exit(0)
    finally:
        os._exit(1)


def _ask_for_student(warden: socket.socket, clean: bool = False) -> Remote:
    """Have a warden start a student's process, or a clean one, which runs no cell and so needs no setup."""
    ours, theirs = socket.socketpair()
    socket.send_fds(warden, [CLEAN if clean else START], [theirs.fileno()])
    theirs.close()
    process, channel = Channel(warden).receive()[0]["process"], Channel(ours)

    def end() -> None:
        socket.send_fds(warden, [KILL + struct.pack("<I", process)], [])
        Channel(warden).receive()

    raised = channel.receive()[0]["walls"]
    if "all" in raised:  # no fault of the submission
        raise RuntimeError(f"a student's process could not be started: {raised['all']}")
    return Remote(channel, raised, end)


# ---- the warden --------------------------------------------------------------------------------------------------

WATCH_EVERY = 0.5  # seconds between two looks at the memory of a submission's processes
# What a checker asks of its warden: START and CLEAN with a descriptor, KILL with a process number.
START, CLEAN, KILL = b"s", b"c", b"k"


def _be_warden(sock: socket.socket, warm: Warm, checker_process: int, worker: int) -> None:
    """Start and end students' processes until the checker that asks by `sock` has ended; this process runs no code of theirs.

    When the worker closes its channel, whose descriptor is `worker`, the checker is ended.
    """
    folders: dict[int, str] = {}
    watch = select.poll()
    watch.register(sock, select.POLLIN)
    watch.register(worker, 0)  # only that the other side has closed it
    try:
        while True:
            events = dict(watch.poll(WATCH_EVERY * 1000))
            if worker in events:
                os.kill(checker_process, signal.SIGKILL)
                break
            if not events:
                for process in folders:
                    _end_if_too_large(process, warm.options.limits)
                continue
            request, descriptors, _, _ = socket.recv_fds(sock, 5, 1)
            if not request:
                break
            if request[:1] == KILL:
                process = struct.unpack("<I", request[1:5])[0]
                _kill(process, folders.pop(process, ""))
                Channel(sock).send({"op": "ended"})
                continue
            folder = tempfile.mkdtemp(prefix="scratch-")
            process = os.fork()
            if process == 0:
                sock.close()
                channel = Channel(socket.socket(fileno=descriptors[0]))
                Enclosure(channel, folder, warm, clean=request[:1] == CLEAN).run()
            for descriptor in descriptors:
                os.close(descriptor)
            folders[process] = folder
            Channel(sock).send({"process": process})
    except (Closed, OSError):
        pass
    finally:
        for process, folder in folders.items():
            _kill(process, folder)
        sock.close()


def _kill(process: int, folder: str) -> None:
    """End a student's process with all that descends from it."""
    _end_all([process, *_descendants(process)])
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, 0)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _end_all(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def _end_if_too_large(process: int, limits: walls.Limits) -> None:
    """End a student's process whose whole tree holds more memory than one submission may: children count, too."""
    tree = _descendants(process)
    if len(tree) > 2 and not limits.gpu and sum(map(_own_memory, tree)) > limits.memory_gb * 1e9:
        _end_all(tree)


def _own_memory(process: int) -> int:
    """Bytes that a process shares with no other; 0 if that cannot be read."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process).memory_full_info().uss
    return 0


def _descendants(root: int) -> list[int]:
    """The numbers of all processes below one."""
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(root).children(recursive=True)]
    return []


if __name__ == "__main__":
    serve(int(sys.argv[1]))
