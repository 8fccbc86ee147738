"""Signs of tampering in a student's process: what was tried (audit events) and what was replaced (identities).

Signs protect nothing; the walls and the distance to the checker do that. By the signs a grader learns of an attempt.
An honest notebook must not cause any. So only what a student's own line does counts, not what a library does, and of
the functions that were replaced only those that a check may rely on. What was replaced is put back, so that the next
question runs in a process that is whole.

A sign names the cell whose code caused it, by the file name of that code: a function of an earlier cell that is called
in a later one counts for its own question.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import gc
import json
import logging
import operator
import os
import random
import re
import signal
import socket
import sys
import sysconfig
import threading
import traceback
import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from utils.checking import watching

# The originals, whatever a student puts into the modules.
os_write, json_dumps, parts_of, is_same = os.write, json.dumps, gc.get_referents, operator.is_
_STDLIB = (sysconfig.get_paths()["stdlib"] + os.sep, "<frozen")
_READS = ("sys._getframe", "sys._current_frames", "gc.get_objects", "gc.get_referrers", "gc.get_referents")
_FRAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")  # attributes by which code reaches a frame
_GIVES_FRAMES = ((logging, "currentframe"), (traceback, "walk_stack"))
_NOTED = "labs.noted"  # an audit event of this module's own
_TRACES = ("sys.settrace", "sys.setprofile", "sys.addaudithook", "sys.monitoring.register_callback")
_NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request")
_LOADER = ("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "PYTHONSTARTUP", "PYTHONPATH", "PYTHONHOME")
_SECRET = ("instructor/", "gradebook", "/proc/1/", "/proc/self/mem", "/proc/self/environ", "/etc/shadow", "submitted/")
_OPEN = ("/scratch", "/tmp", "/dev", "/out", "/proc/self/fd")
_SIGNALS = tuple(number for number in signal.Signals if number not in (signal.SIGKILL, signal.SIGSTOP))
_EVENTS = frozenset(
    {
        _NOTED,
        "object.__getattr__",
        *_READS,
        *_TRACES,
        *_NETWORK,
        *("socket.__new__", "exec", "compile", "code.__new__", "import", "open", "fcntl.fcntl", "subprocess.Popen"),
        *("os.fork", "os.forkpty", "os.symlink", "os.putenv", "os.kill", "os.killpg", "os.exec", "os.posix_spawn"),
        *("ctypes.dlopen", "ctypes.dlsym", "ctypes.string_at", "ctypes.wstring_at", "ctypes.cdata", "ctypes.addressof"),
        *("ctypes.PyObj_FromPtr", "ctypes.cdata/buffer", "ctypes.set_errno", "ctypes.call_function"),
    }
)
_WATCHED_MODULES = (
    *("utils", "utils.checking", "utils.checking.verdicts", "utils.checking.watching"),
    *("torch", "numpy", "time", "builtins"),
)
_STRICT = ("builtins", "time", "utils")  # no library replaces a function there
_HOOKS = ("showtraceback", "_showtraceback", "showsyntaxerror", "run_cell", "run_code", "run_ast_nodes", "displayhook")
_GONE = object()
_TESTS = ("<tests of ", "<definitions of ")  # how the checker names the code of a test cell
# Methods that a comparison or conversion in a check would call.
_ANSWERING = (
    *("__class__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__getitem__"),
    *("__float__", "__int__", "__index__", "__sub__", "__rsub__", "__abs__", "__truediv__"),
    *("__torch_function__", "__torch_dispatch__", "__array__"),
)
_MATMUL = re.compile("|".join(f"(?:{name})" for name in watching.MATMUL))
_FUSED = re.compile("|".join(f"(?:{name})" for name in watching.FUSED_ATTENTION))


class Sign(NamedTuple):
    """Something that looks like tampering."""

    cell: str  # whose code did it
    kind: str
    detail: str
    during: str  # the cell that ran, or was tested, at the time


class Place(NamedTuple):
    """A namespace whose functions a check may rely on."""

    name: str
    space: Mapping[str, Any]
    owner: Any  # the module or class


class Watcher:
    """Writes one JSON line for each sign into a pipe, from which this process cannot take it back.

    Args:
        descriptor: the end of the pipe.
        channel: the descriptor of the channel to the checker.
        places: the namespaces to compare with what they are now.
        shell: the IPython shell in which cells run.
        answers: files of the course whose functions answer questions; nobody loads them a second time.
    """

    # No attribute of an instance can hide a method.
    __slots__ = (
        *(
            "answers",
            "before",
            "builtins",
            "builtins_space",
            "busy",
            "cell",
            "channel",
            "codes",
            "descriptor",
            "files",
            "finders",
            "functions",
        ),
        *("hooks", "kept", "lists", "magics", "mended", "modules", "parts", "reported", "seen", "shell", "signals"),
    )

    def __init__(self, descriptor: int, channel: int, places: list[Place], shell, answers: Iterable[str] = ()):
        self.answers = frozenset(answers)
        self.descriptor, self.channel, self.cell = descriptor, channel, ""
        self.reported: set[Sign] = set()
        self.busy = False
        self.mended: list[tuple[str, object]] = []
        self.files: dict[str, str] = {}  # file name of a cell's code -> the cell
        self.shell = shell
        self._guard_ends()
        self.builtins_space = vars(builtins)
        self.builtins = [(key, value) for key, value in vars(builtins).items() if callable(value)]
        self.before = [(name, space, owner, dict(space)) for name, space, owner in places]
        self.codes = [
            (f"{name}.{key}", value, value.__code__, value.__defaults__)
            for name, space, _ in places
            if name.startswith("utils")
            for key, value in space.items()
            # isinstance() would ask the value, and some of ours are imported when they are asked.
            if type(value) is types.FunctionType
        ]
        self.functions = [value for _, value, _, _ in self.codes]
        self.parts = parts_of(*self.functions)
        self.seen: dict[str, list] = {}  # the values of a namespace at the last scan
        self.finders = list(sys.meta_path)
        self.modules = {name: sys.modules[name] for name in _WATCHED_MODULES if name in sys.modules}
        self.signals = {number: signal.getsignal(number) for number in _SIGNALS}
        self.hooks = {name: getattr(shell, name) for name in _HOOKS}
        self.lists = [shell.ast_transformers, shell.input_transformers_post, shell.input_transformers_cleanup]
        self.lists += list(shell.events.callbacks.values())
        self.magics = {kind: dict(known) for kind, known in shell.magics_manager.magics.items()}
        self.kept = [list(known) for known in self.lists]

    def beat(self, number: object) -> None:
        """Report that the watch was whole when this request was answered; the checker waits for it."""
        whole = all(vars(Watcher).get(name) is method for name, method in _METHODS.items())
        with contextlib.suppress(OSError):
            os_write(self.descriptor, json_dumps({"beat": number if whole else None}).encode() + b"\n")

    def begin(self, cell: str) -> None:
        """Note which cell runs, or is tested, from now on."""
        self.cell = cell

    def sign(self, kind: str, detail: str, code: types.CodeType | None = None) -> None:
        """Report a sign, once; `code` is the student's code that caused it, if that is known."""
        cell = self.files.get(code.co_filename, self.cell) if code is not None else self.cell
        # What an earlier answer does while another question is tested makes that test worthless, too.
        during = self.cell if kind != "patched" and threading.current_thread() is threading.main_thread() else cell
        sign = Sign(cell, kind, detail[:300], during)
        if sign not in self.reported and len(self.reported) < 200:
            self.reported.add(sign)
            line = json.dumps(sign._asdict()) + "\n"
            with contextlib.suppress(OSError):  # the student closed it: no beat arrives any more
                os_write(self.descriptor, line.encode())

    def _guard_ends(self) -> None:
        """Note the ways to end the process, or to run after its end, that have no audit event."""

        def noting(function, what, kind="ends the process"):
            # By an audit event, and not by the watcher itself: whatever a closure holds is in a student's reach.
            @functools.wraps(function)
            def noted(*args, **kwargs):
                code = sys._getframe(1).f_code
                if is_students(code):
                    sys.audit(_NOTED, kind, what, code)
                return function(*args, **kwargs)

            return noted

        os._exit, os.abort = noting(os._exit, "os._exit"), noting(os.abort, "os.abort")
        atexit.register = noting(atexit.register, "atexit.register", "runs at the end")
        for module, name in _GIVES_FRAMES:
            function = getattr(module, name)
            setattr(module, name, noting(function, f"{module.__name__}.{name}", "inspects frames or objects"))

    # ---- what was replaced -----------------------------------------------------------------------------------

    def mend(self) -> None:
        """Put the builtins back; calls nothing that a student could have replaced."""
        space = self.builtins_space
        for key, old in self.builtins:
            new = space.get(key, _GONE)
            if new is not old:
                self.mended += [(key, new)]
                space[key] = old

    def scan(self) -> None:
        """Compare what checks rely on with what it was before the first cell, and put it back."""
        self.busy = True
        try:
            self.mend()
            while self.mended:
                key, new = self.mended.pop()
                self.sign("patched", f"builtins.{key} was replaced", _code_of(new))
            for name, space, owner, before in self.before:
                self._compare(name, space, owner, before)
            self._scan_codes()
            self._scan_modules()
            self._scan_shell()
            for number, old in self.signals.items():
                new = signal.getsignal(number)
                if new is not old and callable(new) and _by_student(new):
                    self.sign("patched", f"a handler of {number.name} was set", _code_of(new))
                    signal.signal(number, old)
                    signal.setitimer(signal.ITIMER_REAL, 0)
            threading._profile_hook = threading._trace_hook = None  # type: ignore[attr-defined]
            sys.settrace(None)
            sys.setprofile(None)
        finally:
            self.busy = False

    def _compare(self, name: str, space, owner, before: dict) -> None:
        # Compared with the last scan, and not by `id`: each call of it is an audit event, and there are 16,000 values.
        seen = self.seen.get(name)
        if seen is not None and len(space) == len(seen) and all(map(is_same, space.values(), seen)):
            return
        strict = name.split(".")[0] in _STRICT
        for key, old in before.items():
            new = space.get(key, _GONE)
            if new is old or not (callable(old) or isinstance(old, property | classmethod | staticmethod)):
                continue
            if strict or isinstance(old, types.BuiltinFunctionType) or _by_student(new):
                self.sign("patched", f"{name}.{key} was replaced", _code_of(new))
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(owner, key, old)
        if isinstance(owner, type):  # a new name hides the one of a base class
            for key in [k for k in space if k not in before]:
                hides = any(key in vars(base) for base in owner.__mro__[1:])
                new = callable(space[key]) or isinstance(space[key], property)
                if new and (strict or (hides and (owner is torch.Tensor or _by_student(space[key])))):
                    self.sign("patched", f"{name}.{key} was replaced", _code_of(space[key]))
                    with contextlib.suppress(AttributeError, TypeError):
                        delattr(owner, key)
        self.seen[name] = list(space.values())

    def _scan_codes(self) -> None:
        # To read `__code__` is an audit event, and there are a thousand functions. What they refer to is one event, and
        # a function refers to its code. The list keeps what it names alive, so no other object can take its place.
        parts = parts_of(*self.functions)
        if len(parts) == len(self.parts) and all(map(is_same, parts, self.parts)):
            return
        for name, function, code, defaults in self.codes:
            if function.__code__ is not code:
                self.sign("patched", f"the code of {name} was replaced", function.__code__)
                function.__code__, function.__defaults__ = code, defaults
        self.parts = parts_of(*self.functions)

    def _scan_modules(self) -> None:
        for finder in list(sys.meta_path):
            if not any(finder is old for old in self.finders) and _by_student(finder):
                self.sign("patched", "an import hook was added", _code_of(finder))
                sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n == "instructor" or n.startswith("instructor.")]:
            self.sign("reads the checker", f"a module {name} was planted")
            del sys.modules[name]
        for name, module in self.modules.items():
            if sys.modules.get(name) is not module:
                self.sign("patched", f"the module {name} was replaced")
                sys.modules[name] = module

    def _scan_shell(self) -> None:
        shell = self.shell
        for name, old in self.hooks.items():
            new = getattr(shell, name, None)
            if new != old and _by_student(new):
                self.sign("patched", f"IPython's {name} was replaced", _code_of(new))
                with contextlib.suppress(Exception):
                    setattr(shell, name, old)
        for known, kept in zip(self.lists, self.kept, strict=True):
            for new in [n for n in known if not any(n is k for k in kept) and _by_student(n)]:
                self.sign("patched", "IPython calls a function of the student's at each cell", _code_of(new))
                known.remove(new)
        for kind, known in self.magics.items():
            for name, old in known.items():
                new = shell.magics_manager.magics[kind].get(name)
                if new is not old and _by_student(new):
                    self.sign("patched", f"the magic {name} was replaced", _code_of(new))
                    shell.magics_manager.magics[kind][name] = old

    def look_at(self, value: Any, depth: int = 0) -> None:
        """Report a result that answers a check's comparisons itself: a number or tensor with methods of its own."""
        kind = type(value)
        if kind in (list, tuple) and depth < 3:
            for item in value[:100]:
                self.look_at(item, depth + 1)
        elif kind is dict and depth < 3:
            for item in list(value.values())[:100]:
                self.look_at(item, depth + 1)
        elif kind.__module__ == "__main__" and not isinstance(value, type):
            own = [base for base in kind.__mro__ if base.__module__ == "__main__"]
            plain = issubclass(kind, int | float | complex | str | bytes | dict | list | tuple | torch.Tensor)
            names = [name for base in own for name in _ANSWERING if name in vars(base)]
            if "__class__" in names or (plain and names) or (plain and depth == 0 and self._holds_liars(value, kind)):
                code = next((_code_of(base) for base in own if _code_of(base)), None)
                self.sign("lying result", f"a {kind.__name__} with {(names or ['parts of its own'])[0]}", code)

    def _holds_liars(self, value, kind: type) -> bool:
        """True for a list or dict of the student's that holds such values."""
        parts: Iterable
        if issubclass(kind, list | tuple):
            parts = list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value)
        elif issubclass(kind, dict):
            parts = dict.values(value)
        else:
            return False
        return any(type(p).__module__ == "__main__" and any(n in vars(type(p)) for n in _ANSWERING) for p in parts)

    # ---- what was tried --------------------------------------------------------------------------------------

    def hook(self, event: str, args: tuple) -> None:
        """Note an audit event; Python cannot remove a hook for them."""
        if self.busy or event not in _EVENTS:
            return
        if event == "object.__getattr__" and args[1] not in _FRAMES:  # the most frequent, such as a frame's `f_code`
            return
        self.busy = True
        try:
            self._note(event, args)
        except Exception:
            pass
        finally:
            self.busy = False

    def _note(self, event: str, args: tuple) -> None:
        caller = sys._getframe(2)
        code = caller.f_code
        if event == _NOTED:
            self.sign(*args)
        elif event == "object.__getattr__":
            if is_students(code):
                self.sign("inspects frames or objects", str(args[1]), code)
        elif event == "exec":
            if args[0].co_filename in self.answers:
                self.sign("an answer of the course", f"{args[0].co_filename} was loaded again", _beyond_library(caller))
            if is_students(code) and is_students(args[0]) and (library := watching.copied_from(args[0])):
                self.sign("an answer of the course", f"the text of {library} was compiled", code)
            if is_students(args[0]):
                self.files.setdefault(args[0].co_filename, self.files.get(code.co_filename, self.cell))
        elif event in _READS:
            above = caller.f_back
            if above is not None and code.co_filename.endswith("inspect.py") and not is_students(code):
                code = above.f_code
            if is_students(code):
                self.sign("inspects frames or objects", event, code)
        elif event in _TRACES:
            if is_students(code):
                self.sign("traces the interpreter", event, code)
        elif event in ("os.fork", "os.forkpty", "os.kill", "os.killpg"):
            if is_students(code):
                self.sign("processes", event, code)
        elif event == "compile":
            name = os.fsdecode(args[1]) if isinstance(args[1], str | bytes) else ""
            hidden = name.startswith(_TESTS) or (os.path.isabs(name) and not name.startswith(_OPEN))
            if is_students(code) and hidden:
                self.sign("hides its code", f"code was compiled as {name}", code)
        elif event == "fcntl.fcntl":
            if is_students(code) and args[0] == self.channel:
                self.sign("protocol", "the channel to the checker was touched", code)
        elif event == "code.__new__":
            if is_students(code):
                self.sign("hides its code", "a code object was made by hand", code)
        else:
            code = _beyond_library(caller)
            if is_students(code):
                self._note_beyond(event, args, code)

    def _note_beyond(self, event: str, args: tuple, code: types.CodeType) -> None:
        """Note events that the standard library may cause on a student's behalf."""
        if event == "socket.__new__":
            if args[1] in (socket.AF_INET, socket.AF_INET6):
                self.sign("network", "an internet socket was made", code)
        elif event in _NETWORK:
            if event != "socket.connect" or not isinstance(args[-1], str | bytes):  # a path is a Unix socket
                address = args[-1] if event == "socket.connect" else args[0] if args else ""
                self.sign("network", f"{event} {address!r}"[:200], code)
        elif event == "import":
            if str(args[0]).partition(".")[0] == "instructor":
                self.sign("reads the checker", f"import {args[0]}", code)
        elif event == "open":
            self._note_open(args, code)
        elif event.startswith("ctypes"):
            self.sign("memory", event, code)
        elif event in ("os.exec", "os.posix_spawn"):
            self.sign("processes", event, code)
        elif event == "subprocess.Popen":
            if isinstance(args[3], dict) and any(name in args[3] for name in _LOADER if name not in os.environ):
                self.sign("environment", "a program was started with another loader", code)
        elif event == "os.symlink":
            target = os.path.normpath(os.path.join(os.getcwd(), os.fsdecode(args[0])))
            if not target.startswith(_OPEN) or target.startswith("/dev"):
                self.sign("files", f"a link to {target}", code)
        elif event == "os.putenv" and os.fsdecode(args[0]) in _LOADER:
            self.sign("environment", f"{os.fsdecode(args[0])} was set", code)

    def _note_open(self, args: tuple, code: types.CodeType) -> None:
        if not isinstance(args[0], str | bytes):
            return
        path = os.path.normpath(os.path.join(os.getcwd(), os.fsdecode(args[0])))
        flags = args[2] if isinstance(args[2], int) else 0
        secret = any(word in path + "/" for word in _SECRET)
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        outside = writes and (not path.startswith(_OPEN) or "/.ipython/" in path)  # what starts with the next shell
        part = path.split("/")[2] if path.startswith("/proc/") else ""
        if secret or outside or (part.isdigit() and part != str(os.getpid())):
            self.sign("files", f"{'writes' if outside else 'reads'} {path}", code)


_METHODS = {name: value for name, value in vars(Watcher).items() if isinstance(value, types.FunctionType)}


def is_students(code: types.CodeType) -> bool:
    """True for a student's code, and False for tests: these have file names that a student's code may not have."""
    return not code.co_filename.startswith(_TESTS) and watching.is_students(code)


def _beyond_library(frame) -> types.CodeType:
    """The code that called the standard library, above the frames of pathlib, shutil, ctypes and the like."""
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_STDLIB) or frame.f_code.co_name == "_modified_open"  # IPython's open()
    ):
        frame = frame.f_back
    return frame.f_code


def _code_of(value) -> types.CodeType | None:
    """The code of a function, also of a wrapped one; of a class or object, that of its first own method."""
    for _ in range(8):
        if isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, types.MethodType | staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, types.FunctionType):
            inner = vars(value).get("__wrapped__")
            if inner is None or is_students(value.__code__):
                return value.__code__
            value = inner
        else:
            break
    kind = value if isinstance(value, type) else type(value)
    methods = [v.__code__ for v in vars(kind).values() if isinstance(v, types.FunctionType)]
    return next((code for code in methods if is_students(code)), None)


def _by_student(value) -> bool:
    """True if a student wrote the function or class, or the class of the object; also if it is wrapped."""
    if value is _GONE:
        return True
    kind = value if isinstance(value, type) else type(value)
    code = _code_of(value)
    return (code is not None and is_students(code)) or getattr(kind, "__module__", "") == "__main__"


def watched_places() -> list[Place]:
    """The namespaces whose functions a check may rely on."""
    modules = [n for n in sys.modules if n.partition(".")[0] == "utils" and sys.modules[n] is not None]
    modules += ["torch", "torch.testing", "torch.testing._comparison", "torch.nn.functional", "torch.cuda"]
    modules += ["torch.overrides", "torch.utils._python_dispatch", "torch.utils.flop_counter"]
    modules += ["time", "math", "json", "inspect", "gc", "os", "sys", "random"]
    places = []
    for name in modules:
        if name in sys.modules:
            module = sys.modules[name]
            places.append(Place(name, vars(module), module))
            for key, value in list(vars(module).items()):
                # isinstance() would ask the value, and some of ours are imported when they are asked.
                if issubclass(type(value), type) and value.__module__ == name and name != "torch":
                    places.append(Place(f"{name}.{key}", vars(value), value))
    owners = (torch.Tensor, torch.nn.Module, torch.cuda.Event, torch.Event, random.Random, random.SystemRandom)
    return places + [Place(f"{owner.__module__}.{owner.__name__}", vars(owner), owner) for owner in owners]


# ---- the watch, checked from below -------------------------------------------------------------------------------


class Profile:
    """What torch's profiler sees of a call: operators in every thread, also where Python's modes are switched off."""

    def __enter__(self) -> Profile:
        from torch._C._profiler import _ExperimentalConfig
        from torch.autograd import ProfilerActivity, ProfilerConfig, ProfilerState, _enable_profiler, _prepare_profiler

        config = ProfilerConfig(
            ProfilerState.KINETO, False, False, False, False, False, _ExperimentalConfig(profile_all_threads=True), ""
        )
        _prepare_profiler(config, {ProfilerActivity.CPU})
        _enable_profiler(config, {ProfilerActivity.CPU})
        return self

    def __exit__(self, *error: object) -> None:
        from torch.autograd import _disable_profiler

        self._events = _disable_profiler().events()
        self.names = {event.name().removeprefix("aten::") for event in self._events}

    def in_order(self) -> list[str]:
        """The names of what ran, in the order in which it began."""
        return [event.name() for event in sorted(self._events, key=lambda event: event.start_ns())]

    def fused(self) -> set[str]:
        """Entries to attention in one call that ran; the modes see only what torch takes some of them apart into."""
        return {name for name in self.names if _FUSED.fullmatch(name.strip("_"))}

    def unseen(self, recorded: set[str], refused: bool = False) -> str:
        """A matrix product that ran although the record of operators holds none, or nothing.

        Args:
            recorded: the names in the record.
            refused: the call raised; then SDPA's entry alone may be there, since it began and no backend took the call.
        """
        # einsum is no product by itself: one that sums over nothing, or over one element, multiplies element by element,
        # and what it calls otherwise is in the profile, too.
        names = self.names - {"einsum"} - ({"scaled_dot_product_attention"} if refused else set())
        ran = sorted(name for name in names if _MATMUL.fullmatch(name.strip("_")))
        seen = any(_MATMUL.fullmatch(name.strip("_")) for name in recorded)
        return ran[0] if ran and not seen else ""
