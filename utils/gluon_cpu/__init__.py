"""Run Gluon and Triton kernels on a CPU, as a teacher: what they compute, when they deadlock, where they race.

    with gluon_cpu.simulate(timeline=True) as run:
        kernel[grid](a, b, c, num_warps=4)      # the unchanged kernel, CPU tensors
    run.events, run.plot()

How it works:
- The kernel's own source runs as Python (rewriting.py, interpreter.py). Each call is looked up in a table of known functions
  (known.py) and done on NumPy data (language.py, tensors.py, global_memory.py, ...), by Triton's rules for types and
  layouts. Programs run one after another.
- Partitions of warp_specialize are threads of which one runs at a time; they switch where they synchronize
  (scheduler.py). Each has a clock in model cycles, and the partition that is furthest behind runs next. Copies and
  products end at their own times. So a run is a discrete-event simulation of one block, with a simple cost model
  (timeline.py). A seed stretches the times.
- Bugs are found by order, not by luck. Every partition, barrier and queue has a component in a vector clock
  (context.py), and a phase of a barrier passes on what those who arrived knew (barriers.py). An access to shared memory
  must come after all accesses that it conflicts with, and a fence must lie between an ordinary and an asynchronous one
  (accesses.py). So a read before its TMA copy is a race in every run, even if the copy was fast. If everybody waits and
  nothing is under way, that is a deadlock.
- Each buffer has memory of its own. That the compiler may give it to a later buffer is checked by time (reuse.py).
- Layouts are Triton's own objects; the rules of wgmma, TMA and cp.async are checked (products.py, layouts.py).
- A kernel for a cluster (num_ctas) is one program with the cluster's tensors, as in Gluon. Its blocks step together, and
  each has a clock of its own: a multicast copy into a slot that another block may still read is a race.
- Blackwell's tensor memory is in tensor_memory.py; its products, also in pairs of blocks and with scales, in tcgen05.py.
- Aggregates follow Triton's rules (aggregates.py), and reports name memory by its path: `k_ring.bars.full[1]`.

Limits:
- A partition is one actor. Its own warps need barriers among themselves (gl.barrier); those are left to the compiler,
  which inserts them.
- A missing fence between mbarrier.init and the first copy is not reported: Triton's own tutorials have none, and the
  compiler does not add one.
- One program at a time: a loop that waits for another program of the grid is reported as endless.
- A fence that is missing inside of one partition is a note (`run.notes`) with Triton 3.7 and later, whose compiler adds it.
- In a cluster, a block reads and writes its own shared memory; only multicast copies, arrivals at mbarriers,
  gl.convert_layout and reductions cross blocks. Nothing checks that a block lives until the others are done with it.
- Race checks cover shared memory and accumulators, not global memory.
- Some mistakes only the compiler can refuse: a variable that changes its type in a loop, a cp.async whose alignment it
  cannot prove, too many registers. They pass here, so compile for sm_90a as well (compiling.py).
- Sums of fp8 products have fp32's precision here; a GPU keeps fewer bits of them.
- A program that runs takes over the next one of the grid (clc); on a GPU it is one that has found no place yet.
- TMA's im2col mode and most inline assembly (ptx.py) are refused by name.
"""

# ruff: noqa: F401 (what is imported here is what the package offers)
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
