"""`simulate()`: launches of Gluon kernels run here, program by program, while it is open."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import context
from .reports import Report
from .timeline import CostModel, Event, plot_events

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUPPORTED = ((3, 6), (3, 7))
# Launch options that change how a kernel is compiled, not what it computes.
IGNORED = {
    "maxnreg",
    "num_stages",
    "debug",
    "warmup",
    "launch_cooperative_grid",
    "launch_pdl",
    "enable_fp_fusion",
    "instrumentation_mode",
    "sanitize_overflow",
}


class Run:
    """What a simulation found. `reports`: findings; `events`: the timeline; `cycles`: model cycles of each program."""

    def __init__(
        self, seed: int | None, stop_at_first: bool, timeline: int, max_steps: int, max_seconds: float, model: CostModel
    ):
        self.seed, self.stop_at_first, self.timeline = seed, stop_at_first, timeline
        self.max_steps, self.max_seconds, self.model = max_steps, max_seconds, model
        self.reports: list[Report] = []
        self.events: list[Event] = []
        self.cycles: list[float] = []
        self.launches = 0
        self.recorded = 0

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.reports

    def plot(self, *, ax: Axes | None = None, title: str | None = None) -> tuple[Figure, Axes]:
        """Draw the timeline. Returns (Figure, Axes)."""
        return plot_events(self.events, ax=ax, title=title)

    def __repr__(self) -> str:
        return f"<gluon_cpu run: {self.launches} launches, {len(self.cycles)} programs, {len(self.reports)} reports>"

    def launch(self, kernel, args: tuple, grid, options: dict) -> None:
        """Run every program of one launch."""
        from . import copies, memory
        from .interpreter import call, run_jit
        from .scheduler import Program

        names = list(_parameters(kernel))
        values = dict(zip(names, args, strict=False))
        if len(args) > len(names):
            raise TypeError(f"{kernel.fn.__name__} takes {len(names)} arguments, got {len(args)}.")
        for name in list(options):
            if name in names:
                values[name] = options[name] if name == "num_warps" else options.pop(name)
        num_warps = _option(options, "num_warps", 4)
        if _option(options, "num_ctas", 1) != 1:
            raise NotImplementedError("gluon_cpu simulates single blocks; num_ctas must be 1.")
        for name in options:
            if name not in IGNORED and name not in names:
                raise TypeError(f"{kernel.fn.__name__} has no parameter or option {name}.")
        if num_warps < 1 or num_warps & (num_warps - 1):
            raise ValueError(f"num_warps must be a power of two, got {num_warps}.")
        if callable(grid):
            grid = grid(values)
        grid = tuple(int(g) for g in (grid if isinstance(grid, (tuple, list)) else (grid,)))
        grid = (*grid, 1, 1)[:3]
        constant = {p.name for p in kernel.params if p.is_constexpr}
        arguments = {name: value if name in constant else _argument(value, name) for name, value in values.items()}
        self.launches += 1
        deadline = time.monotonic() + self.max_seconds
        for z, y, x in itertools.product(*(range(g) for g in grid[::-1])):
            events = self.events if self.recorded < self.timeline else None
            program = Program(
                (x, y, z),
                grid,
                num_warps,
                call=call,
                seed=self.seed,
                model=self.model,
                limits={"max_steps": self.max_steps, "deadline": deadline},
                reports=self.reports,
                collecting=not self.stop_at_first,
                events=events,
            )
            self.recorded += events is not None
            context.set_program(program)
            try:
                run_jit(kernel, (), arguments)
                copies.finish(program)
                memory.finish(program)
            finally:
                context.set_program(None)
            self.cycles.append(max(p.time for p in program.partitions))


def _parameters(kernel) -> list[str]:
    return [p.name for p in kernel.params]


def _option(options: dict, name: str, default: int) -> int:
    value = options.pop(name, default)
    return getattr(value, "value", value)


def _argument(value: Any, name: str):
    """A launch argument as the kernel sees it."""
    import torch
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .global_memory import host_descriptor, pointer
    from .tensors import NUMBERS, to_tensor

    if isinstance(value, torch.Tensor):
        return pointer(value, name)
    if isinstance(value, TensorDescriptor):
        return host_descriptor(value, name)
    if isinstance(value, gl.constexpr):
        return value.value
    if isinstance(value, NUMBERS):
        return to_tensor(value)
    if isinstance(value, (tuple, list)):
        return tuple(_argument(v, f"{name}[{i}]") for i, v in enumerate(value))
    if value is None:
        return None
    raise TypeError(
        f"A kernel takes tensors, TMA descriptors, numbers and None; {name} is {type(value).__name__}. "
        "Types and layouts go to gl.constexpr parameters."
    )


def check_version() -> None:
    """Refuse a Triton whose Gluon was not tried."""
    try:
        import triton
    except ImportError as error:
        raise ImportError(
            "gluon_cpu runs Gluon kernels and needs Triton for the language itself (no GPU): "
            "pip install 'triton>=3.6,<3.8'; there are wheels for Linux only."
        ) from error
    major_minor = tuple(int(x) for x in triton.__version__.split(".")[:2])
    if major_minor not in SUPPORTED:
        known = " and ".join(".".join(map(str, v)) for v in SUPPORTED)
        raise RuntimeError(f"gluon_cpu knows the Gluon of Triton {known}; this is {triton.__version__}.")


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
    """Run the Gluon kernels launched inside on the CPU, and check them. `@simulate()` does it for a whole function.

    Args:
        seed: None runs by the cost model's times; a number stretches and shrinks them at random. Same seed, same run.
        stop_at_first: raise the first finding; False collects findings in `run.reports` and goes on where it can.
        timeline: how many programs to record events of; True is one.
        max_steps: calls and loop turns one program may take, against endless loops.
        max_seconds: wall-clock limit of one launch.
        model: the CostModel; the data sheet of an H100/H200 without.
    """
    check_version()
    from triton.experimental.gluon._runtime import GluonJITFunction

    run = Run(seed, stop_at_first, int(timeline), max_steps, max_seconds, model or CostModel())

    def launch(kernel, *args, grid, warmup=False, **options):
        run.launch(kernel, args, grid, options)

    missing = object()
    before = GluonJITFunction.__dict__.get("run", missing)
    GluonJITFunction.run = launch
    try:
        yield run
    finally:
        if before is missing:
            del GluonJITFunction.run
        else:
            GluonJITFunction.run = before
