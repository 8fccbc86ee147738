"""A warm process: the libraries imported and the lab's setup run once; every submission is graded in forks of it.

    worker ── zygote ──┬── checker (trusted, one a submission, reads the hidden tests)
                       │      └── warden (trusted, has read nothing)
                       │             └── walls ── first process of its namespace ── the student's process

The student's process must not have hidden tests or other submissions in its memory. So everything that it descends
from, the zygote and the warden, never reads any: the warden is forked before the checker reads its job.

Run as `python -m instructor.grading.submission.zygote DESCRIPTOR`, with an environment without secrets (`engine` does).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types

from instructor.grading.sandbox import tampering, walls
from instructor.grading.submission import checker, student
from instructor.grading.wire.protocol import Channel, Closed

WARM = (
    "matplotlib.pyplot",
    "pandas",
    "transformers",
    "utils.model",
    "torch.profiler",
    "torch.utils.flop_counter",
    "torch.nn.attention",
    "importlib.util",
    "linecache",
    "cloudpickle",
    "utils.kernels.interpreter",
    "matplotlib_inline.backend_inline",
)


def make_shell():
    """An IPython shell in this process: cells run as in Jupyter, and starting one costs nothing."""
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell.instance(config=config)

    class Publisher(DisplayPublisher):
        def publish(self, data, metadata=None, **rest):
            shell.outputs.display(data, metadata)

        def clear_output(self, wait=False):
            pass

    class Hook(DisplayHook):
        def __call__(self, result=None):
            if result is not None:
                data, metadata = self.compute_format_data(result)
                shell.outputs.display(data, metadata, count=1)

        def flush(self):
            pass

    def show_error(kind, value, lines):
        shell.outputs.error(getattr(kind, "__name__", str(kind)), str(value), list(lines))

    shell.outputs = student.Outputs()
    shell.display_pub = Publisher(parent=shell)
    shell.displayhook = Hook(parent=shell, shell=shell)
    shell.display_trap.hook = shell.displayhook
    shell._showtraceback = show_error
    return shell


def warm_up(message: dict) -> tuple[object, dict, list[str]]:
    """Import what labs need and run the cells before the first answer; returns the shell, its names, problems.

    The setup of a lab asks for the GPU, and a process that has started CUDA cannot be forked with it. So with GPUs
    every process runs the setup for itself.
    """
    os.environ.setdefault("MPLBACKEND", "Agg")
    for name in WARM:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    shell = make_shell()
    base, problems = (None, []) if message["limits"]["gpu"] else set_up(shell, message)
    exercise()
    sys.stdout.flush()
    return shell, base, problems


def set_up(shell, message: dict) -> tuple[dict, list[str]]:
    """Run the cells before the first answer; returns the names that they give, and problems."""
    problems = []
    for name, source in message["setup"]:
        result = shell.run_cell(source, store_history=False)
        if not result.success:
            problems.append(f"the setup cell {name} failed: {result.error_before_exec or result.error_in_exec!r}")
    return dict(shell.user_ns), problems


def exercise() -> None:
    """Use once what loads itself at its first use, so that no fork has to do it again."""
    import torch

    from utils.checking import check, expect_close, watch_operations

    state = torch.get_rng_state()
    a = torch.randn(3, 3)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        with watch_operations(), student.Recorder():
            x = a.to(dtype)
            torch.softmax(x @ x.T, dim=-1).sum(dim=1).clone().exp()
        torch.nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3)
    torch.nn.functional.gelu(torch.nn.functional.linear(a, a), approximate="tanh")
    torch.vmap(torch.sum)(a)
    if "torch.nn.attention.flex_attention" in sys.modules:  # a block mask needs it, and it takes seconds to import
        importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")
    if "utils.gluon_cpu.compiling" in sys.modules:  # lab 3: forks compile kernels
        sys.modules["utils.gluon_cpu.compiling"].warm_up()
    check("1.1")(lambda: expect_close(a, a + 1, rtol=0, atol=0))()
    torch.set_rng_state(state)


def serve(descriptor: int) -> None:
    """Warm up, then fork a checker for each submission; ends when the worker does."""
    sock = socket.socket(fileno=descriptor)
    channel = Channel(sock)
    message, _ = channel.receive()
    os.chdir(message["folder"])
    runner = start_runner(message)
    shell, base, problems = warm_up(message)
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and thereby copying, the pages of the libraries
    # Native threads (torch's autograd keeps one) are idle here and hold no lock; Python's could.
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        problems.append(f"threads run after the setup ({', '.join(threads)}); such a process cannot be forked safely")
    channel.send({"op": "ready", "problems": problems})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        try:
            _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
        except InterruptedError:
            continue
        if not descriptors:
            os._exit(0)  # the worker is gone; there is nothing to tidy up
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            walls.die_with_parent()
            sock.close()
            _grade(descriptors[0], shell, base, message, runner)
        os.close(descriptors[0])


def _grade(descriptor: int, shell, base: dict | None, message: dict, runner: socket.socket | None) -> None:
    """The checker's process, from fork to end. base: the names that the setup gave, or None where it has not run."""
    try:
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            os.close(descriptor)
            _warden(theirs, shell, base, message)
        theirs.close()
        channel = Channel(socket.socket(fileno=descriptor))
        job, _ = channel.receive()

        def start(run_text: bool = False):
            keeper = runner if run_text and runner is not None else ours
            mine, his = socket.socketpair()
            read, write = os.pipe()
            socket.send_fds(keeper, [b"s"], [his.fileno(), write])
            his.close()
            os.close(write)
            said = Channel(keeper).receive()[0]
            if "all" in said["walls"]:  # no fault of the submission
                raise RuntimeError(f"a student's process could not be started: {said['walls']['all']}")
            return Channel(mine), read, said["walls"], lambda: _end(keeper, said["process"])

        try:
            if base is None:
                base, problems = set_up(shell, message)
                if problems:
                    raise RuntimeError("; ".join(problems))
            answer = {"op": "graded", "result": checker.Checker(job, base, start).grade()}
        except BaseException as error:
            answer = {"op": "crashed", "why": checker.explain_crash(error)}
        channel.send(answer)
    finally:
        os._exit(0)


def _end(sock: socket.socket, process: int) -> None:
    socket.send_fds(sock, [b"k" + struct.pack("<I", process)], [])
    Channel(sock).receive()


# ---- Triton's interpreter ----------------------------------------------------------------------------------------


class _Forked:
    """A child process of `utils.kernels.interpreter`, forked instead of started: torch and Triton are there already."""

    def __init__(self, command: list, *, cwd: str, **rest):
        self.command, self.returncode = command, None
        self.shown = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 (communicate closes them)
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setsid()
                for number, file in enumerate(self.shown, 1):
                    os.dup2(file.fileno(), number)
                sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
                os.chdir(cwd)
                importlib.import_module("utils.kernels.interpreter")._child(command[-1])
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(Exception):
                        stream.flush()
                os._exit(status)

    def poll(self):
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        deadline = time.monotonic() + (timeout or 3600)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.command, timeout)
            time.sleep(0.002)
        texts = [os.pread(file.fileno(), 20_000, 0).decode(errors="replace") for file in self.shown]
        for file in self.shown:
            file.close()
        return texts[0], texts[1]


def start_runner(message: dict) -> socket.socket | None:
    """A second warm process in which Triton interprets kernels; None where it cannot be.

    Triton decides at its import whether it compiles or interprets, so this has to be forked before it is imported.
    """
    if "triton" in sys.modules or importlib.util.find_spec("triton") is None:
        return None
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return ours
    try:
        walls.die_with_parent()
        ours.close()
        os.environ["TRITON_INTERPRET"] = "1"
        importlib.import_module("triton.language")
        interpreter = importlib.import_module("utils.kernels.interpreter")
        interpreter.repair()
        interpreter.subprocess = types.SimpleNamespace(
            Popen=_Forked, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
        )
        shell = make_shell()
        gc.freeze()
        _warden(theirs, shell, {}, message)
    finally:
        os._exit(1)


# ---- the warden --------------------------------------------------------------------------------------------------


def _warden(sock: socket.socket, shell, base: dict | None, message: dict) -> None:
    """Start and end students' processes on request; runs nothing of theirs."""
    walls.die_with_parent()
    folders: dict[int, str] = {}
    limits = walls.Limits(**message["limits"])
    try:
        while True:
            data, descriptors, _, _ = socket.recv_fds(sock, 5, 2)
            if not data:
                break
            if data[:1] == b"k":
                process = struct.unpack("<I", data[1:5])[0]
                _kill(process, folders.pop(process, ""))
                Channel(sock).send({"op": "ended"})
                continue
            report, write = os.pipe()
            folder = tempfile.mkdtemp(prefix="scratch-")
            process = os.fork()
            if process == 0:
                os.close(report)
                sock.close()
                _behind_walls(*descriptors, write, folder, limits, shell, base, message)
            for d in (*descriptors, write):
                os.close(d)
            folders[process] = folder
            with os.fdopen(report, "rb") as pipe:
                said = pipe.read(65536)
            Channel(sock).send({"process": process, "walls": json.loads(said) if said else {"all": "none"}})
    except (Closed, OSError):
        pass
    finally:
        for process, folder in folders.items():
            _kill(process, folder)
        os._exit(0)


def _kill(process: int, folder: str) -> None:
    """End a student's process with all that descends from it."""
    descendants = _descendants(process)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    for pid in descendants:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, 0)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _descendants(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat") as file:
                parents.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(int(name))
    found, queue = [], [root]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


def _behind_walls(control, flags, report, folder, limits, shell, base, message) -> None:
    """Raise the walls, and run the student's process behind them."""
    try:
        walls.die_with_parent()
        os.setsid()
        stand: dict[str, str] = {}
        _close_others({control, flags, report, 0, 1, 2})
        own_root = walls.enter_namespaces(stand)
        if own_root:
            try:
                walls.build_root(message["visible"], message["course"], message["hidden"], limits, stand)
            except OSError as error:
                stand["files"] = f"none ({error})"
                own_root = False
        user = 61000 + os.getpid() % 4000
        if not own_root:
            os.chdir(folder)
            os.chmod(folder, 0o700)
            if os.getuid() == 0:
                os.chown(folder, user, user)
        if stand.get("processes") == "namespace":
            first = os.fork()
            if first:
                os.close(control)
                os.close(flags)
                os.close(report)
                os.waitpid(first, 0)
                os._exit(0)
            walls.die_with_parent()
        if own_root:
            walls.finish_root()
        walls.limit_resources(limits, stand)
        walls.drop_privileges(stand, user)
        walls.die_with_parent()  # a change of user clears it
        if stand.get("processes") == "namespace":
            child = os.fork()
            if child:  # the first process of the namespace: when it ends, all in it end
                os.close(control)
                os.close(flags)
                os.close(report)
                _reap(child)
        place = walls.SCRATCH if own_root else folder
        _settle(place, "/out" if own_root else folder, own_root)
        walls.filter_calls(stand, network=False)
        stand["output"] = f"{limits.output_mb} MB a cell kept at most"
        if base is None:
            base, problems = set_up(shell, message)
            if problems:
                raise RuntimeError("; ".join(problems))
        os.write(report, json.dumps(stand).encode())
        os.close(report)
        _become_student(control, flags, shell, base)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(report, json.dumps({"all": f"none: {error!r}"}).encode())
    finally:
        os._exit(1)


def _close_others(keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _reap(child: int) -> None:
    while True:
        try:
            if os.waitpid(-1, 0)[0] == child:
                os._exit(0)
        except ChildProcessError:
            os._exit(0)
        except InterruptedError:
            continue


def _settle(place: str, output: str, own_root: bool) -> None:
    """Working folder, environment and the three standard descriptors."""
    os.chdir(place)
    os.umask(0o077)
    os.environ.update(
        HOME=place,
        TMPDIR="/tmp" if own_root else place,
        USER="student",
        IPYTHONDIR=f"{place}/.ipython",
        MPLCONFIGDIR=f"{place}/.matplotlib",
        TRITON_HOME=place,
        TORCHINDUCTOR_CACHE_DIR=f"{place}/.inductor",
    )
    tempfile.tempdir = None
    null = os.open("/dev/null", os.O_RDONLY)
    shown = os.open(f"{output}/shown", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (shown, 1), (shown, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(shown)


def _become_student(control: int, flags: int, shell, base: dict) -> None:
    shell.starting_dir = os.getcwd()
    channel = Channel(socket.socket(fileno=control))
    watcher = tampering.Watcher(flags, control, tampering.watched_places(), shell)
    sys.addaudithook(watcher.hook)
    for name in [n for n in sys.modules if n == "instructor" or n.startswith("instructor.")]:
        del sys.modules[name]
    student.Student(channel, shell, base, watcher).serve()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
