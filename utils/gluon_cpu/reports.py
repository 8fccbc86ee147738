"""Reports of the simulator: a kind of mistake, a message, and the lines of the source that it is about."""

from __future__ import annotations

import linecache
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Site(NamedTuple):
    """A line of kernel source."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """The source line itself, without indentation and comment."""
        return linecache.getline(self.file, self.line).split("  #")[0].strip()

    def __str__(self) -> str:
        library = f" of {self.file[len(_ROOT) :]}" if self.file.startswith(f"{_ROOT}utils{os.sep}") else ""
        return f"line {self.line}{library} in {self.function}: {self.text}"


_ROOT = f"{Path(__file__).parents[2]}{os.sep}"  # a line of the course's own files in utils is named with its file
NOWHERE = Site("", 0, "the launch")


@dataclass(frozen=True)
class Report:
    """A mistake in a kernel.

    Attributes:
        kind: one of KINDS.
        message: what happened, and what to do about it.
        site: the line where it happened.
        partition: the partition's name.
        program: the program's index in the grid.
        callers: the lines of the calls that led there, innermost first.
        others: further lines that the message speaks about.
    """

    kind: str
    message: str
    site: Site
    partition: str = ""
    program: tuple[int, ...] = ()
    callers: tuple[Site, ...] = ()
    others: tuple[Site, ...] = ()

    @property
    def line(self) -> int:
        """The number of the source line where it happened."""
        return self.site.line

    def __str__(self) -> str:
        who = f" in {self.partition}" if self.partition not in ("", "default") else ""
        lines = [f"{self.kind}{who}, program {self.program}:", f"    {self.message}"]
        if self.site.line:
            lines.append(f"  at {self.site}")
        lines += [f"  called from {site}" for site in self.callers[:2]]  # a recursion has hundreds
        return "\n".join(lines)


class SimulationError(RuntimeError):
    """A mistake that the simulator found; `.report` has it as data."""

    kind = "error"

    def __init__(self, report: Report):
        super().__init__(str(report))
        self.report = report


class DeadlockError(SimulationError):
    """Every partition waits, and nothing is under way that could wake one of them."""

    kind = "deadlock"


class RaceError(SimulationError):
    """Nothing puts two accesses to the same memory or registers in order, and at least one of them writes."""

    kind = "race"


class FenceError(SimulationError):
    """An ordinary and an asynchronous access to shared memory are in order, but no fence lies between the two proxies."""

    kind = "missing fence"


class UninitializedError(SimulationError):
    """The kernel reads shared memory that nothing has written."""

    kind = "uninitialized"


class BarrierError(SimulationError):
    """The use of an mbarrier is undefined in hardware, or breaks its counting."""

    kind = "barrier"


class LayoutError(SimulationError):
    """The compiler or the hardware refuses a layout or a shape."""

    kind = "layout"


class UnfinishedError(SimulationError):
    """The kernel ends while copies are still under way."""

    kind = "unfinished"


class GlobalMemoryError(SimulationError):
    """An access lies outside of the tensor that its pointer came from."""

    kind = "out of bounds"


class UnknownOperationError(SimulationError):
    """The simulator does not know an operation."""

    kind = "unknown operation"


class KernelError(SimulationError):
    """The code is no valid Gluon: a run-time value in place of a constexpr, or types that do not fit."""

    kind = "kernel"


class EndlessLoopError(SimulationError):
    """A program takes more steps than it may."""

    kind = "endless loop"


ERRORS = {error.kind: error for error in SimulationError.__subclasses__()}
KINDS = tuple(ERRORS)
