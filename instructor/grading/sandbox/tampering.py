"""Signs of tampering in a student's process: what its code tried, by Python's audit events.

Signs protect nothing; the walls and the distance to the checker do that. By the signs a person learns of an attempt at the
channel, at the memory of the process or at the walls, and an answer that made one waits for that person. Only what a
student's own line does counts, and not what a library does.

A sign names the cell that ran, or was tested, at the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
import types
from typing import NamedTuple

from utils.checking.authors import is_students

KINDS = ("protocol", "memory", "walls")
_STDLIB = (sysconfig.get_paths()["stdlib"] + os.sep, "<frozen")
_MEMORY = ("string_at", "wstring_at", "cdata", "cdata/buffer", "addressof", "PyObj_FromPtr", "call_function")
_EVENTS = frozenset({"open", "import", "fcntl.fcntl", *(f"ctypes.{name}" for name in _MEMORY)})
_SECRET = ("instructor/", "gradebook", "/proc/1/", "/proc/self/environ", "/etc/shadow", "submitted/")
_MOST = 50  # signs of one process: they fit into their pipe, which is read when the process has ended


class Sign(NamedTuple):
    """Something that looks like tampering."""

    cell: str  # the one that ran, or was tested, at the time
    kind: str  # one of KINDS
    detail: str


class Watcher:
    """Writes one JSON line for each sign into a pipe, from which this process cannot take it back.

    Args:
        descriptor: the end of the pipe.
        channel: the descriptor of the channel to the checker.
    """

    def __init__(self, descriptor: int, channel: int):
        self.descriptor, self.channel = descriptor, channel
        self.cell, self.busy = "", False
        self.reported: set[Sign] = set()

    def sign(self, kind: str, detail: str) -> None:
        """Report a sign, once."""
        sign = Sign(self.cell, kind, detail[:300])
        if sign not in self.reported and len(self.reported) < _MOST:
            self.reported.add(sign)
            with contextlib.suppress(OSError):  # the student closed it
                os.write(self.descriptor, json.dumps(sign._asdict()).encode() + b"\n")

    def hook(self, event: str, args: tuple) -> None:
        """Note an audit event; Python cannot remove a hook for them."""
        if self.busy or event not in _EVENTS:
            return
        self.busy = True
        try:
            if is_students(_beyond_library(sys._getframe(1))) and (found := self._kind(event, args)):
                self.sign(*found)
        except Exception:  # a sign that cannot be read is none; the student's call goes on
            pass
        finally:
            self.busy = False

    def _kind(self, event: str, args: tuple) -> tuple[str, str] | None:
        """(kind, detail) of an event that a student's line caused; None for one that is nothing to look at."""
        if event == "open":
            return _opened(args)
        if event == "fcntl.fcntl":
            return ("protocol", "the channel to the checker was touched") if args[0] == self.channel else None
        if event == "import":
            name = str(args[0])
            return ("walls", f"import {name}") if name.partition(".")[0] == "instructor" else None
        return "memory", event


def _opened(args: tuple) -> tuple[str, str] | None:
    """The sign of a file that is opened: the memory of a process, or what lies behind the walls."""
    if not isinstance(args[0], str | bytes):
        return None
    path = os.path.normpath(os.path.join(os.getcwd(), os.fsdecode(args[0])))
    if path.startswith("/proc/") and path.endswith("/mem"):
        return "memory", f"opens {path}"
    process = path.split("/")[2] if path.startswith("/proc/") else ""
    if any(word in path + "/" for word in _SECRET) or (process.isdigit() and process != str(os.getpid())):
        return "walls", f"opens {path}"
    return None


def _beyond_library(frame) -> types.CodeType:
    """The code that called the standard library, above the frames of pathlib, shutil, ctypes and the like."""
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_STDLIB) or frame.f_code.co_name == "_modified_open"  # IPython's open()
    ):
        frame = frame.f_back
    return frame.f_code
