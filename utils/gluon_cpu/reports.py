"""Reports of the simulator: a kind of mistake, a message, and lines of the source."""

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


_ROOT = f"{Path(__file__).parents[2]}{os.sep}"  # reports name the file of a line in the course's `utils`
NOWHERE = Site("", 0, "the launch")


@dataclass(frozen=True)
class Report:
    """A mistake in a kernel.

    Attributes:
        kind: one of KINDS.
        message: what happened, and what to do about it.
        site: the line of the mistake.
        partition: the partition's name.
        program: the program's index in the grid.
        callers: the lines of the calls around it, innermost first.
        others: further lines in the message.
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
        """The number of the source line of the mistake."""
        return self.site.line

    def __str__(self) -> str:
        who = f" in {self.partition}" if self.partition not in ("", "default") else ""
        lines = [f"{self.kind}{who}, program {self.program}:", f"    {self.message}"]
        if self.site.line:
            lines.append(f"  at {self.site}")
        lines += [f"  called from {site}" for site in self.callers[:2]]  # a recursion has hundreds of them
        return "\n".join(lines)


class SimulationError(RuntimeError):
    """A mistake in a kernel; `.report` has it as data."""

    kind = "error"

    def __init_subclass__(cls, kind: str):
        cls.kind = kind

    def __init__(self, report: Report):
        super().__init__(str(report))
        self.report = report


class DeadlockError(SimulationError, kind="deadlock"):
    """Every partition waits, and no running copy or product could wake one of them."""


class RaceError(SimulationError, kind="race"):
    """Nothing puts two accesses to the same memory or registers in order, and at least one of them writes."""


class FenceError(SimulationError, kind="missing fence"):
    """An ordinary and an asynchronous access to shared memory are in order, but no fence lies between the two proxies."""


class UninitializedError(SimulationError, kind="uninitialized"):
    """The kernel reads shared memory that nothing has written."""


class BarrierError(SimulationError, kind="barrier"):
    """The use of an mbarrier is undefined in hardware, or breaks its counting."""


class LayoutError(SimulationError, kind="layout"):
    """The compiler or the hardware refuses a layout or a shape."""


class UnfinishedError(SimulationError, kind="unfinished"):
    """The kernel ends while copies are still under way."""


class GlobalMemoryError(SimulationError, kind="out of bounds"):
    """An access lies outside of the tensor of its pointer."""


class UnknownOperationError(SimulationError, kind="unknown operation"):
    """The simulator does not know an operation."""


class KernelError(SimulationError, kind="kernel"):
    """The code is no valid Gluon: a run-time value in place of a constexpr, or types that do not fit."""


class EndlessLoopError(SimulationError, kind="endless loop"):
    """A program takes more steps than it may."""


ERRORS = {error.kind: error for error in SimulationError.__subclasses__()}
KINDS = tuple(ERRORS)
