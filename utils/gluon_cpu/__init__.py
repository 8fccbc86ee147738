"""Run Gluon and Triton kernels on a CPU: see what they compute, when they deadlock and where they race.

    with gluon_cpu.simulate(timeline=True) as run:
        kernel[grid](a, b, c, num_warps=4)      # the unchanged kernel, CPU tensors
    run.events, run.plot()

How it works:
- The kernel's own source runs as Python (rewriting.py, interpreter.py). A table has the meaning of each function (known.py),
  on NumPy data (language.py, tensors.py, global_memory.py, ...) and by Triton's rules for types and layouts. Programs run
  one after another.
- Partitions of warp_specialize are threads, and one thread runs at a time. They switch where they synchronize
  (scheduler.py). Each has a clock in model cycles, and the partition that is furthest behind runs next. Copies and
  products end at their own times. So a run is a discrete-event simulation of one block, with a simple cost model
  (timeline.py). A seed stretches the times.
- The simulator finds bugs by order, not by luck. Every partition, barrier and queue has a component in a vector clock
  (context.py), and a wait for a phase of a barrier learns the clocks of all arrivals (barriers.py). An access to shared
  memory must come after all conflicting accesses, and a fence must lie between an ordinary and an asynchronous access
  (accesses.py). So a read before its TMA copy is a race in every run, even if the copy was fast. If all partitions wait and
  no copy or product is under way, that is a deadlock.
- Each buffer has its own memory. The compiler may give the memory to a later buffer, which is checked by time (reuse.py).
- Layouts are Triton's own objects; the rules of wgmma, TMA and cp.async are checked (products.py, layouts.py).
- A kernel for a cluster (num_ctas) is one program with the cluster's tensors, as in Gluon. Its blocks step together, and
  each has its own clock: a multicast copy into a slot that another block may still read is a race.
- Blackwell's tensor memory is in tensor_memory.py; its products, also in pairs of blocks and with scales, in tcgen05.py.
- Aggregates follow Triton's rules (aggregates.py), and reports name memory by its path: `k_ring.bars.full[1]`.

Limits:
- A partition is one actor. The simulator does not check the barriers between its warps (gl.barrier); the compiler inserts
  most of them.
- A missing fence between mbarrier.init and the first copy is not reported: Triton's own tutorials have none, and the
  compiler does not add one.
- Programs run one at a time, so a loop that waits for another program of the grid is reported as endless.
- A missing fence inside of one partition is a note (`run.notes`) with Triton 3.7 and later, because the compiler adds it.
- In a cluster, a block reads and writes its own shared memory; only multicast copies, arrivals at mbarriers,
  gl.convert_layout and reductions cross blocks. Nothing checks that a block lives until other blocks have used its memory.
- Race checks cover shared memory and accumulators, not global memory.
- Only the compiler can refuse some mistakes: a variable that changes its type in a loop, a cp.async with an unproved
  alignment, too many registers. They pass here, so compile for sm_90a as well (compiling.py).
- Sums of fp8 products have fp32's precision here; a GPU keeps fewer bits of them.
- A running program may take over (clc) any program of the grid that has not begun; on a GPU, one without a place on an SM.
- TMA's im2col mode and most inline assembly (ptx.py) are refused by name.
"""

# ruff: noqa: F401 (these imports are the names of the package)
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
