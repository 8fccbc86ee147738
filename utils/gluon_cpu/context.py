"""Which program and partition are running, and where in the kernel's source: what every other module asks."""

from __future__ import annotations

import sys
from types import CodeType
from typing import TYPE_CHECKING, NoReturn

from .reports import ERRORS, NOWHERE, Report, Site

if TYPE_CHECKING:
    from .scheduler import Partition, Program

_program: Program | None = None
_kernel_code: set[CodeType] = set()


def set_program(program: Program | None) -> None:
    global _program
    _program = program


def program() -> Program:
    """The program (thread block) that runs now."""
    if _program is None:
        raise RuntimeError("No kernel is running: this belongs inside `with gluon_cpu.simulate():`.")
    return _program


def partition() -> Partition:
    """The partition that runs now; exactly one does."""
    return program().partition


def register_code(code: CodeType) -> None:
    """Remember that frames of this code are kernel source."""
    _kernel_code.add(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            register_code(constant)


def sites() -> tuple[Site, ...]:
    """Kernel source lines on the stack, innermost first."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code in _kernel_code:
            found.append(Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


def site() -> Site:
    """The innermost kernel source line."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _kernel_code:
            return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return NOWHERE


def report(
    kind: str, message: str, at: Site | None = None, others: tuple[Site, ...] = (), partition: str | None = None
) -> None:
    """Hand in a finding; raises it unless the simulation collects findings."""
    stack = sites()
    where = at or (stack[0] if stack else NOWHERE)
    callers = stack[1:] if at is None or (stack and stack[0] == at) else ()
    running = _program
    finding = Report(
        kind,
        message,
        where,
        partition if partition is not None else running.partition.name if running else "",
        running.ids if running else (),
        callers,
        others,
    )
    if running is not None and running.collect(finding):
        return
    raise ERRORS[kind](finding)


def refuse(kind: str, message: str) -> NoReturn:
    """Raise a finding after which the kernel cannot go on."""
    stack = sites()
    running = _program
    finding = Report(
        kind,
        message,
        stack[0] if stack else NOWHERE,
        running.partition.name if running else "",
        running.ids if running else (),
        stack[1:],
    )
    if running is not None:
        running.collect(finding)
    raise ERRORS[kind](finding)
