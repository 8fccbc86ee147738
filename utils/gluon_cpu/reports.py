"""What the simulator says about a kernel: a kind, a sentence, and the source lines it is about."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, field
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
        return f"line {self.line} in {self.function}: {self.text}"


NOWHERE = Site("", 0, "the launch")


@dataclass(frozen=True)
class Report:
    """One finding. `kind` is one of KINDS; `others` are the further lines that `message` speaks about."""

    kind: str
    message: str
    site: Site
    partition: str = ""
    program: tuple[int, ...] = ()
    callers: tuple[Site, ...] = ()
    others: tuple[Site, ...] = field(default=())

    @property
    def line(self) -> int:
        """The source line where it happened."""
        return self.site.line

    def __str__(self) -> str:
        at = f"{self.kind} in program {self.program}, partition {self.partition}" if self.partition else self.kind
        lines = [f"{at}:", f"  {self.message}"]
        if self.site.line:
            lines.append(f"  at {self.site.file}:{self.site.line} ({self.site.function}): {self.site.text}")
        lines += [f"    called from {site}" for site in self.callers]
        return "\n".join(lines)


class SimulationError(RuntimeError):
    """Base of everything the simulator refuses; `.report` holds the finding as data."""

    kind = "error"

    def __init__(self, report: Report):
        super().__init__(str(report))
        self.report = report


class DeadlockError(SimulationError):
    """Every partition waits and nothing is under way that could wake one."""

    kind = "deadlock"


class RaceError(SimulationError):
    """Two accesses to the same memory or registers, one of them a write, that nothing puts in order."""

    kind = "race"


class FenceError(SimulationError):
    """Ordinary and asynchronous access to shared memory in order, but without the fence between the two proxies."""

    kind = "missing fence"


class UninitializedError(SimulationError):
    """Shared memory that was read but never written."""

    kind = "uninitialized"


class BarrierError(SimulationError):
    """An mbarrier used in a way that the hardware leaves undefined, or that breaks its counting."""

    kind = "barrier"


class LayoutError(SimulationError):
    """A layout or shape that the compiler or the hardware refuses."""

    kind = "layout"


class UnfinishedError(SimulationError):
    """The kernel ended while copies were still under way."""

    kind = "unfinished"


class GlobalMemoryError(SimulationError):
    """An access outside of the tensor that the pointer came from."""

    kind = "out of bounds"


class UnknownOperationError(SimulationError):
    """An operation that the simulator does not know."""

    kind = "unknown operation"


class KernelError(SimulationError):
    """Code that is no valid Gluon: a run-time value where a constexpr is needed, types that do not fit."""

    kind = "kernel"


class EndlessLoopError(SimulationError):
    """More steps than a program may take."""

    kind = "endless loop"


ERRORS = {error.kind: error for error in SimulationError.__subclasses__()}
KINDS = tuple(ERRORS)
