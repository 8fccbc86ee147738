"""Gluon kernels on a CPU, as a teacher: what they compute, when they deadlock, where they race.

    with gluon_cpu.simulate(timeline=True) as run:
        kernel[grid](a, b, c, num_warps=4)      # the unchanged @gluon.jit kernel, CPU tensors
    run.events, run.plot()

The kernel's own source runs as Python (interpreter.py): each call is looked up by identity and done on NumPy data
(language.py, tensors.py, global_memory.py), with Triton's rules for types and layouts. Programs run one after another.

Partitions of warp_specialize are threads of which one runs at a time (scheduler.py); they switch where they
synchronize. Each has a clock in model cycles, the one furthest behind runs, copies and products end at their own
times: a discrete-event simulation of one block, from a simple cost model (timeline.py). A seed stretches the times.

Bugs are found by order, not by luck. Every partition, barrier and queue has a component in a vector clock (clocks.py);
a barrier phase hands on what its arrivers knew (barriers.py). An access to shared memory must come after all that it
conflicts with, and a fence must lie between an ordinary and an asynchronous one (memory.py). So a read before its TMA
copy is a race in every run, also where the copy was fast. If everybody waits and nothing is under way, that is a
deadlock. Layouts are Triton's own objects; the rules of wgmma, TMA and cp.async are checked (layouts.py).

Limits. A partition is one actor: what its own warps owe each other (gl.barrier) is left to the compiler, which puts
those barriers in. One block at a time: no clusters, no waiting for other blocks. Race checks cover shared memory and
accumulators, not global memory. What only the compiler can refuse (a variable that changes its type in a loop, a
cp.async whose alignment it cannot prove, too many registers) passes here: compile for sm_90a as well. fp8, Blackwell's
tensor memory and most inline assembly are unknown, and say so.
"""

from .reports import (
    KINDS,
    BarrierError,
    DeadlockError,
    EndlessLoopError,
    FenceError,
    GlobalMemoryError,
    KernelError,
    LayoutError,
    RaceError,
    Report,
    SimulationError,
    Site,
    UnfinishedError,
    UninitializedError,
    UnknownOperationError,
)
from .simulation import Run, simulate
from .timeline import CostModel, Event, plot_events

__all__ = [
    "KINDS",
    "BarrierError",
    "CostModel",
    "DeadlockError",
    "EndlessLoopError",
    "Event",
    "FenceError",
    "GlobalMemoryError",
    "KernelError",
    "LayoutError",
    "RaceError",
    "Report",
    "Run",
    "SimulationError",
    "Site",
    "UnfinishedError",
    "UninitializedError",
    "UnknownOperationError",
    "plot_events",
    "simulate",
]
