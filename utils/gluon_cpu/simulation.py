"""`simulate()`: inside of it, launches of Gluon kernels run on the CPU, one program after another."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.machine import versions

from . import context
from .context import refuse
from .reports import Report
from .timeline import CostModel, Event, plot_events

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Launch options that change the compiled code, but not the results.
IGNORED = {"maxnreg", "num_stages", "debug", "warmup", "launch_cooperative_grid", "launch_pdl", "enable_fp_fusion"}
IGNORED |= {"instrumentation_mode", "sanitize_overflow"}

_ONE_THREAD = threading.RLock()  # one thread simulates at a time: it redirects all launches of the process
# Errors from NumPy or the simulator's functions after a wrong call in a kernel: a misspelled keyword, a text for a number.
PYTHON_ERRORS = (TypeError, ValueError, LookupError, AttributeError, NameError, ArithmeticError, RecursionError)


@dataclass(repr=False)
class Run:
    """A simulation: its settings and its findings.

    Attributes:
        seed: stretches and shrinks times at random; None takes the times of the cost model.
        stop_at_first: whether the first report ends the simulation.
        timeline: number of programs to record.
        max_steps: limit of calls and loop turns in one program.
        max_seconds: limit of wall-clock time for one launch.
        model: the cost model.
        reports: the mistakes in the kernels.
        notes: findings that the compiler repairs: a missing fence inside of one partition.
        events: the timeline.
        cycles: model cycles of each program.
        launches: number of launches.
        recorded: number of programs on the timeline.
        ends: number of events up to the end of each recorded program.
        waiting: programs of the launch that have not begun; a running program may take them over.
        longest: the length of the longest arange.
        gluon: whether the last kernel is in Gluon; False for plain Triton.
    """

    seed: int | None
    stop_at_first: bool
    timeline: int
    max_steps: int
    max_seconds: float
    model: CostModel
    reports: list[Report] = field(default_factory=list)
    notes: list[Report] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    cycles: list[float] = field(default_factory=list)
    launches: int = 0
    recorded: int = 0
    ends: list[int] = field(default_factory=list)
    waiting: deque[tuple[int, int, int]] = field(default_factory=deque)
    longest: int = 0
    gluon: bool = True

    @property
    def ok(self) -> bool:
        """Whether there are no reports."""
        return not self.reports

    def programs(self) -> list[list[Event]]:
        """Return the events of each recorded program."""
        return [self.events[begin:end] for begin, end in zip([0, *self.ends], self.ends, strict=False)]

    def plot(self, *, ax: Axes | None = None, window: tuple[float, float] | None = None) -> tuple[Figure, Axes]:
        """Draw the timeline, and on it the first finding if there is one; returns (Figure, Axes).

        Args:
            ax: Axes to draw in; None for a new figure.
            window: the cycles (first, last) to show; None shows all.
        """
        report = self.reports[0] if self.reports else None
        return plot_events(self.events, ax=ax, report=report, window=window)

    def __repr__(self) -> str:
        found = f"{len(self.reports)} reports, {len(self.notes)} notes"
        return f"<gluon_cpu run: {self.launches} launches, {len(self.cycles)} programs, {found}>"

    def launch(self, kernel, args: tuple, grid, options: dict) -> None:
        """Run every program of one launch.

        Args:
            kernel: the @gluon.jit function.
            args: its positional arguments.
            grid: the grid's size, or a function of the arguments that returns it.
            options: its arguments by name, and launch options such as num_warps.
        """
        from . import copies, memory, reuse, tcgen05
        from .interpreter import call, run_jit
        from .scheduler import Program

        values, num_warps, num_ctas = _bind(kernel, args, options)
        grid = grid(values) if callable(grid) else grid
        grid = tuple(int(g) for g in (grid if isinstance(grid, (tuple, list)) else (grid,)))
        grid = (*grid, 1, 1)[:3]
        constant = {p.name for p in kernel.params if p.is_constexpr}
        arguments = {name: value if name in constant else _argument(value, name) for name, value in values.items()}
        self.launches += 1
        self.gluon = kernel.is_gluon()
        deadline = time.monotonic() + self.max_seconds
        np.seterr(all="ignore")  # a GPU overflows to infinity without a warning; simulate() restores the setting
        self.waiting = deque((x, y, z) for z, y, x in itertools.product(*(range(g) for g in grid[::-1])))
        while self.waiting:
            ids = self.waiting.popleft()
            events = self.events if self.recorded < self.timeline else None
            self.recorded += events is not None
            program = Program(self, call, ids, grid, num_warps, num_ctas, deadline, events)
            context.set_program(program)
            try:
                run_jit(kernel, (), arguments)
                copies.finish(program)
                tcgen05.finish(program)
                memory.finish(program)
                reuse.finish(program)
            except PYTHON_ERRORS as error:
                context.refuse_error(error)
            finally:
                context.set_program(None)
            self.cycles.append(max(p.time for p in program.partitions))
            if events is not None:
                self.ends.append(len(events))


def _bind(kernel, args: tuple, options: dict) -> tuple[dict[str, Any], int, int]:
    """Return the values of the kernel's parameters by name, num_warps and num_ctas; drop launch options without an effect."""
    names = [p.name for p in kernel.params]
    named = {name: options[name] for name in names if name in options}
    values = inspect.signature(kernel.fn).bind_partial(*args, **named).arguments
    unknown = [name for name in options if name not in (*names, *IGNORED, "num_warps", "num_ctas")]
    if unknown:
        raise TypeError(f"{kernel.fn.__name__} has no parameter or option {unknown[0]}.")
    given = options.get("num_warps", 4), options.get("num_ctas", 1)
    num_warps, num_ctas = (getattr(value, "value", value) for value in given)
    if num_ctas not in (1, 2, 4, 8, 16):
        raise ValueError(f"num_ctas must be 1, 2, 4, 8 or 16, the blocks of a cluster; got {num_ctas}.")
    if num_warps < 1 or num_warps & (num_warps - 1):
        raise ValueError(f"num_warps must be a power of two, got {num_warps}.")
    return values, num_warps, num_ctas


def _argument(value: Any, name: str):
    """Return the simulator's value for a launch argument."""
    import torch
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .global_memory import host_descriptor, pointer
    from .tensors import NUMBERS, to_tensor

    if isinstance(value, torch.Tensor):
        return pointer(value, name)
    if isinstance(value, TensorDescriptor):
        return host_descriptor(value, name)
    if value is None or isinstance(value, gl.constexpr):
        return getattr(value, "value", None)
    if isinstance(value, NUMBERS):
        return to_tensor(value)
    if isinstance(value, (tuple, list)):
        return tuple(_argument(v, f"{name}[{i}]") for i, v in enumerate(value))
    if "Im2Col" in type(value).__name__:
        refuse(
            "unknown operation",
            f"{name} is a {type(value).__name__}: gluon_cpu does not know TMA's im2col mode. Copy plain tiles with a "
            "TensorDescriptor, or load elements by their addresses with gl.load.",
        )
    kinds = "A kernel takes tensors, TMA descriptors, numbers and None"
    raise TypeError(f"{kinds}; {name} is {type(value).__name__}. Types and layouts go to gl.constexpr parameters.")


def check_version() -> None:
    """Raise an error unless Triton is installed and new enough. `import utils` warns about untested newer versions."""
    oldest, version = versions.TESTED["triton"][0], versions.installed_version("triton")
    name = ".".join(map(str, oldest))
    if version is None:
        raise ImportError(
            "gluon_cpu runs Gluon kernels and needs Triton for the language itself (no GPU): "
            f"pip install 'triton>={name}'; there are wheels for Linux only."
        )
    if version < oldest:
        raise RuntimeError(f"gluon_cpu knows the Gluon of Triton {name} and later; this is {version[0]}.{version[1]}.")


@contextlib.contextmanager
def simulate(
    *,
    seed: int | None = None,
    stop_at_first: bool = True,
    timeline: bool | int = False,
    max_steps: int = 2_000_000,
    max_seconds: float = 300.0,
    model: CostModel | None = None,
) -> Iterator[Run]:
    """Run the Gluon and Triton kernels that are launched inside on the CPU, and check them.

    `@simulate()` does so for a whole function. Only one thread simulates at a time; other threads wait.

    Args:
        seed: None takes the times of the cost model; a number stretches and shrinks them at random, the same number always alike.
        stop_at_first: raise the first report as an error; False collects reports in `run.reports` and goes on if possible.
        timeline: number of programs to record; True is one.
        max_steps: limit of calls and loop turns in one program, against endless loops.
        max_seconds: limit of wall-clock time for one launch.
        model: rates of the hardware's units; by default from the data sheet of an H100 or H200.
    """
    check_version()
    from triton.runtime.jit import JITFunction

    run = Run(seed, stop_at_first, int(timeline), max_steps, max_seconds, model or CostModel())

    def launch(kernel, *args, grid, warmup=False, **options):
        run.launch(kernel, args, grid, options)

    with _ONE_THREAD:
        before, numpy_errors = JITFunction.run, np.geterr()
        JITFunction.run = launch  # Gluon's kernels inherit it
        try:
            yield run
        finally:
            np.seterr(**numpy_errors)
            JITFunction.run = before
