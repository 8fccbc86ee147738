"""The state that all modules share: the running program and partition, the line of source, the knowledge of partitions.

Vector clocks keep the knowledge. A clock maps components to counts: ("partition", p, c) counts the ordinary instructions of
a partition in block c of the cluster, ("barrier", b) the completed phases of an mbarrier, ("wgmma", p, c),
("tma store", p, c) and ("cp.async", p, c) the in-order queues of a partition, and ("init", p, c) its initialized mbarriers.
A partition knows that an event is over if its clock has at least the event's count.
"""

from __future__ import annotations

import sys
import traceback
from types import CodeType
from typing import TYPE_CHECKING, NoReturn

from .reports import ERRORS, NOWHERE, Report, Site

if TYPE_CHECKING:
    from .scheduler import Partition, Program

Clock = dict[tuple, int]

_program: Program | None = None
_kernel_code: dict[int, CodeType] = {}  # the keys are ids, because hashing code is slow
_sites: dict[tuple[int, int], Site] = {}  # {(code, place in it): line}, because asking a frame for its line is slow
_kernel_modules: set[object] = set()  # the names of the modules with kernel code


def join(into: Clock, other: Clock) -> None:
    """Add the knowledge of the clock `other` to the clock `into`."""
    get = into.get
    for component, time in other.items():
        if get(component, 0) < time:
            into[component] = time


class Knowledge:
    """The knowledge of a partition: `clock` has events that are over, `fenced` the events before a fence."""

    __slots__ = ("clock", "fenced")

    def __init__(self, clock: Clock, fenced: Clock):
        self.clock, self.fenced = clock, fenced

    def learn(self, other: Knowledge) -> None:
        """Add the knowledge of `other`."""
        join(self.clock, other.clock)
        join(self.fenced, other.fenced)

    def copy(self, ends: Clock | None = None) -> Knowledge:
        """Return a copy of the knowledge, plus the `ends` of operations that are under way."""
        return Knowledge(self.clock | (ends or {}), dict(self.fenced))


class Block(Knowledge):
    """The knowledge of one block of the cluster in one partition. Without clusters a partition has one Block."""

    __slots__ = ("index", "inits", "me")

    def __init__(self, partition: int, index: int):
        self.index = index
        self.me = ("partition", partition, index)
        super().__init__({self.me: 1}, {})
        self.inits: Clock = {}  # the initializations that a fence has made visible to the cluster

    def tick(self) -> int:
        """Count one ordinary access, and return the new count."""
        self.clock[self.me] += 1
        return self.clock[self.me]


def set_program(program: Program | None) -> None:
    """Set the running program; None: no program runs."""
    global _program
    _program = program


def program() -> Program:
    """Return the program (thread block) that runs now."""
    if _program is None:
        raise RuntimeError("No kernel is running: this belongs inside `with gluon_cpu.simulate():`.")
    return _program


def partition() -> Partition:
    """Return the partition that runs now; exactly one does."""
    return program().partition


def register_code(code: CodeType, module: object) -> None:
    """Remember that frames of a function's code are kernel source; module: the `__name__` in the function's globals."""
    _kernel_modules.add(module)
    _kernel_code[id(code)] = code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            register_code(constant, module)


# Reading `f_code` is an audit event, reading `f_globals` is not. A student's process has an audit hook during grading, and most
# frames are the simulator's own. So the module of a frame is compared first.
def sites() -> tuple[Site, ...]:
    """Return the lines of kernel source on the stack, innermost first."""
    lines, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _kernel_modules and id(frame.f_code) in _kernel_code:
            lines.append(Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return tuple(lines)


def site() -> Site:
    """Return the innermost line of kernel source."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _kernel_modules and id(code := frame.f_code) in _kernel_code:
            key = id(code), frame.f_lasti
            if key not in _sites:
                _sites[key] = Site(code.co_filename, frame.f_lineno, code.co_name)
            return _sites[key]
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return NOWHERE


def _finding(kind: str, message: str, stack: tuple[Site, ...], partition: str | None, others=()) -> Report:
    """Return a report with the innermost line as its site, and the lines of the calls around it."""
    name = _program.partition.name if _program and partition is None else partition or ""
    ids = _program.ids if _program else ()
    return Report(kind, message, stack[0] if stack else NOWHERE, name, ids, stack[1:], others)


def report(
    kind: str, message: str, at: Site | None = None, others: tuple[Site, ...] = (), partition: str | None = None
) -> None:
    """Report a mistake; raise it unless the simulation collects reports.

    Args:
        kind: one of KINDS.
        message: what happened, and what to do about it.
        at: the line; None: the running line.
        others: further lines in the message.
        partition: the partition's name; None: the running partition's.
    """
    stack = sites()
    if at is not None:
        stack = (at, *(stack[1:] if stack and stack[0] == at else ()))
    error = _keep(_finding(kind, message, stack, partition, others))
    if _program is None or _program.run.stop_at_first:
        raise error


def note(kind: str, message: str, others: tuple[Site, ...]) -> None:
    """Keep a finding that the compiler repairs. It is no mistake on the machine, and the run goes on."""
    program().collect(_finding(kind, message, sites(), None, others), program().run.notes)


def _keep(finding: Report) -> Exception:
    """Put a finding into the run and on its timeline, and return its error."""
    if _program is not None:
        _program.mark(finding)
        _program.collect(finding, _program.run.reports)
    return ERRORS[finding.kind](finding)


def refuse_error(error: Exception) -> NoReturn:
    """Report a Python error in kernel code with its line of the kernel; without such a line raise the error unchanged."""
    steps = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    stack = [Site(code.co_filename, line, code.co_name) for code, line in steps if id(code) in _kernel_code]
    if not stack:
        raise error
    raise _keep(_finding("kernel", f"{type(error).__name__}: {error}", tuple(stack[::-1]), None)) from error


def refuse(kind: str, message: str) -> NoReturn:
    """Report a mistake that ends the kernel. kind: one of KINDS; message: what happened, and what to do about it."""
    raise _keep(_finding(kind, message, sites(), None))
