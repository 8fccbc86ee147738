"""The table of verdicts: small kernels, correct ones and ones with a planted bug, each with the reason for its verdict.

A case is a kernel of `verdict_kernels.py` with a few lines changed, and the sizes of its launch. For a planted bug it says which
kinds of report are right and which line has to be reported. `simulate_case` asks the simulator; `tools/record/gluon_verdicts.py`
records what the simulator, ConSan and compute-sanitizer say.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.utils.gluon_cpu.gluon_helpers import descriptor

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32"}
KERNELS = Path(__file__).with_name("verdict_kernels.py")


@dataclass(frozen=True)
class Case:
    """A kernel and the verdict that it should get.

    Attributes:
        kernel: the section of `verdict_kernels.py`.
        name: the case's name, unique within the kernel.
        reason: why it is a bug, or why it is correct.
        edits: (old, new) lines; the old ones stand once in the section.
        sizes: arguments of the launch, where they are not the usual ones.
        bug: the class of the planted bug; "" for a correct kernel.
        kinds: kinds of report that are right; several, where the timing decides what fails first.
        at: parts of lines, one of which has to be in the reported line.
    """

    kernel: str
    name: str
    reason: str
    edits: tuple[tuple[str, str], ...] = ()
    sizes: dict[str, Any] = field(default_factory=dict)
    bug: str = ""
    kinds: tuple[str, ...] = ()
    at: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The case's name in the tables and on the command line."""
        return f"{self.kernel}: {self.name}"


def read_cases(text: str) -> list[Case]:
    """Read cases: label, class and kinds; the places of a report; the reason; lines - and +, with `...` between two edits."""
    cases = []
    for block in text.strip("\n").split("\n\n"):
        title, *lines = block.splitlines()
        label, bug, kinds = [*title.split(" | "), "", ""][:3]
        at = lines.pop(0)[2:].split(" @ ") if lines[0].startswith("@ ") else []
        edits: list[list[str]] = []
        for sign, changed in groupby(lines[1:], lambda line: line[0]):
            part = "".join(line[1:] + "\n" for line in changed)
            if sign == "-":
                edits.append([part, ""])
            elif sign == "+":
                edits[-1][1] = part
        found = tuple((old, new) for old, new in edits)
        kernel, name = label.split(": ", 1)
        cases.append(Case(kernel, name, lines[0], found, {}, bug, tuple(kinds.split(", ")), tuple(at)))
    return cases


# ---- launches ------------------------------------------------------------------------------------------------------


def launch_ring(kernels, device, stages=2, steps=6, rows=13, width=188, dtype=torch.float32):
    x = torch.randn(rows, width, dtype=dtype).to(device)
    y = torch.zeros_like(x)
    kernels.ring[(1,)](descriptor(x, [16, 32]), y, rows, width, steps, stages)
    return y, x + 1


def launch_consumers(kernels, device, stages=2, steps=6):
    x = torch.randn(16, 32 * steps).to(device)
    y, z = torch.zeros_like(x), torch.zeros_like(x)
    kernels.consumers[(1,)](descriptor(x, [16, 32]), y, z, steps, stages)
    return torch.cat([y, z]), torch.cat([2 * x, 3 * x])


def launch_stores(kernels, device, buffers=2, steps=6):
    x = torch.randn(16, 32 * steps).to(device)
    y = torch.zeros_like(x)
    kernels.stores[(1,)](x, descriptor(y, [16, 32]), steps, buffers)
    return y, 2 * x


def launch_product(kernels, device, stages=2, k=256, n=64):
    a, b = (torch.randn(64, k) / 8).half().to(device), (torch.randn(k, n) / 8).half().to(device)
    c = torch.zeros(64, n, dtype=torch.float16, device=device)
    kernels.product[(1,)](descriptor(a, [64, 64]), descriptor(b, [64, n]), descriptor(c, [64, n]), k, stages)
    return c, (a.double() @ b.double()).half()


def launch_operand(kernels, device, size=64):
    a, b = (torch.randn(size, size) / 8).half().to(device), (torch.randn(size, size) / 8).half().to(device)
    c = torch.zeros(size, size, device=device)
    kernels.operand[(1,)](a, descriptor(b, [size, size]), c, size)
    return c, (3 * (a.double() @ b.double())).float()


def launch_groups(kernels, device, stages=3, n=1500, size=256):
    x = torch.randn(n).to(device)
    y = torch.zeros_like(x)
    kernels.groups[(1,)](x, y, n, -(-n // size), size, stages)
    return y, x / 2


def launch_signals(kernels, device, stages=2, n=1500, size=256):
    x = torch.randn(n).to(device)
    y = torch.zeros_like(x)
    kernels.signals[(1,)](x, y, n, -(-n // size), size, stages)
    return y, x / 2


def launch_handoff(kernels, device, steps=6):
    x = torch.randn(16, 32 * steps).to(device)
    y = torch.zeros_like(x)
    kernels.handoff[(1,)](x, descriptor(y, [16, 32]), steps)
    return y, x * x


def launch_sums(kernels, device, programs=3):
    x = torch.randn(16 * programs, 32).to(device)
    y = torch.zeros(16, 32, device=device)
    kernels.sums[(programs,)](descriptor(x, [16, 32]), descriptor(y, [16, 32]))
    return y, 3 * x.reshape(programs, 16, 32).sum(0)


def launch_tails(kernels, device, rows=50, columns=45, tile=(16, 32)):
    x = torch.randn(rows, columns).to(device)
    y = torch.zeros_like(x)
    kernels.tails[(-(-rows // tile[0]), -(-columns // tile[1]))](x, y, rows, columns, *tile)
    return y, 2 * x


# ---- the cases ---------------------------------------------------------------------------------------------------

CORRECT = read_cases("""
ring: as written
Each tile is waited for, and refilled after a fence.

ring: a parity that flips
`1 - parity` once a round is the same as i // STAGES & 1.
-    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
+    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
+    parity = 0
-        mbarrier.wait(full.index(slot), i // STAGES & 1)
+        mbarrier.wait(full.index(slot), parity)
-        gl.store(y_ptr + row * width + column + i * COLUMNS, x + 1.0, mask=inside)
+        gl.store(y_ptr + row * width + column + i * COLUMNS, x + 1.0, mask=inside)
+        if slot == STAGES - 1:
+            parity = 1 - parity

ring: waited for twice
A phase that is over stays over until the next one ends.
-        mbarrier.wait(full.index(slot), i // STAGES & 1)
+        mbarrier.wait(full.index(slot), i // STAGES & 1)
+        mbarrier.wait(full.index(slot), i // STAGES & 1)

ring: expect after the copy
The phase cannot end before the arrival that comes with expect, however early the bytes are.
-        fence_async_shared()
+        fence_async_shared()
+        tma_load(x_desc, [0, ahead * COLUMNS], full.index(slot), slots.index(slot), pred=ahead < steps)
-        tma_load(x_desc, [0, ahead * COLUMNS], full.index(slot), slots.index(slot), pred=ahead < steps)

consumers: as written
A slot is free after two arrivals, one of each consumer.

consumers: four arrivals awaited
Each consumer arrives with count 2, and the barrier waits for 4.
-        mbarrier.arrive(empty.index(slot))
+        mbarrier.arrive(empty.index(slot), count=2)
-        mbarrier.init(empty.index(s), count=2)
+        mbarrier.init(empty.index(s), count=4)

consumers: released after the store
A later release only costs time.
-        fence_async_shared()
+        fence_async_shared()
+        gl.store(y_ptr + row * (steps * COLUMNS) + i * COLUMNS + column, x * factor)
-        gl.store(y_ptr + row * (steps * COLUMNS) + i * COLUMNS + column, x * factor)

consumers: releases that nobody waits for
The last slots are not filled again, so their release may be left out.
-        mbarrier.arrive(empty.index(slot))
+        mbarrier.arrive(empty.index(slot), pred=i + STAGES < steps)

stores: as written
Before a buffer is written, the store that read it has been waited for.

product: as written
One product runs while the slot of the one before it is filled.

product: synchronous
A product that is not asynchronous is over when the call returns.
-        acc = warpgroup_mma(a.index(slot), b.index(slot), acc, is_async=True)
+        acc = warpgroup_mma(a.index(slot), b.index(slot), acc)
-        acc = warpgroup_mma_wait(1, deps=[acc])
...
-    acc = warpgroup_mma_wait(0, deps=[acc])

product: every product waited for
Waiting for all products is more than is needed.
-        acc = warpgroup_mma_wait(1, deps=[acc])
+        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])

operand: as written
A fence lies between the threads' stores and each product.

operand: fence after the wait
Fence and wait may change places: both come before the product.
-    # wgmma does not see what threads have stored before the fence.
+    # wgmma does not see what threads have stored before the fence.
+    mbarrier.wait(full, 0)
-    mbarrier.wait(full, 0)

operand: a buffer of its own
The second product has an operand of its own, allocated before the first one is issued, so the first may still run. Allocated after it, the compiler would put it where `a` is, which no later line uses.
-    b = gl.allocate_shared_memory(b_desc.dtype, [SIZE, SIZE], b_desc.layout)
+    b = gl.allocate_shared_memory(b_desc.dtype, [SIZE, SIZE], b_desc.layout)
+    other = gl.allocate_shared_memory(b_desc.dtype, [SIZE, SIZE], b_desc.layout)
-    acc = warpgroup_mma_wait(0, deps=[acc])
-    a.store(x + x)
+    other.store(x + x)
-    acc = warpgroup_mma(a, b, acc, is_async=True)
+    acc = warpgroup_mma(other, b, acc, is_async=True)

groups: as written
The oldest of three groups is over when two may be under way.

groups: two groups a turn
An empty group in each turn: twice as many may be under way.
-        async_copy.commit_group()
+        async_copy.commit_group()
+        async_copy.commit_group()
-        async_copy.commit_group()  # of the loop
-        async_copy.wait_group(STAGES - 1)
+        async_copy.commit_group()
+        async_copy.commit_group()
+        async_copy.wait_group(2 * (STAGES - 1))

signals: as written
32 threads arrive when their copies are over.

handoff: as written
The tile goes to and fro between two partitions by two barriers.

sums: as written
Each reduction has read the tile before it is written again.

sums: two tiles
The second reduction reads a tile of its own, so the first may still be under way.
-    twice = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
+    twice = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
+    once = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
-    tma.store_wait(0)
-    twice.store(x)
+    once.store(x)
-    tma_add(y_desc, (0, 0), twice)
+    tma_add(y_desc, [0, 0], once)

tails: as written
Rows and columns beyond the matrix are masked.

tails: stored by rows in two halves
Both halves of the tile are written before it is read.
-    x = gl.load(x_ptr + row * columns + column, mask=inside, other=0.0)
+    x = gl.load(x_ptr + row * columns + column, mask=inside, other=0.0)
+    half: gl.constexpr = ROWS // 2
+    tile.slice(0, half, dim=0).store(gl.full([half, COLUMNS], 0.0, gl.float32, layout))
+    tile.slice(half, half, dim=0).store(gl.full([half, COLUMNS], 0.0, gl.float32, layout))
""")

BUGS = read_cases("""
ring: no wait | wait left out | race
@ x = slots.index(slot).load(layout)
The tile is read before TMA has written it.
-        mbarrier.wait(full.index(slot), i // STAGES & 1)

ring: parity turned round | phase | race, barrier
@ x = slots.index(slot).load(layout) @ mbarrier.wait(full
The first wait passes at once.
-        mbarrier.wait(full.index(slot), i // STAGES & 1)
+        mbarrier.wait(full.index(slot), (i // STAGES & 1) ^ 1)

ring: parity of the tile | phase | race, barrier
@ x = slots.index(slot).load(layout) @ mbarrier.wait(full
A parity counts rounds of the ring, not tiles: tile 1 has parity 0.
-        mbarrier.wait(full.index(slot), i // STAGES & 1)
+        mbarrier.wait(full.index(slot), i & 1)

ring: half of the bytes | bytes expected | barrier
@ tma_load(x_desc, [0, ahead @ mbarrier.expect(full.index(slot)
The phase ends, or breaks, when half of the tile has come.
-        mbarrier.expect(full.index(slot), NBYTES, pred=ahead < steps)
+        mbarrier.expect(full.index(slot), NBYTES // 2, pred=ahead < steps)

ring: too many bytes | bytes expected | deadlock
@ mbarrier.wait(full
The last 16 bytes never come.
-        mbarrier.expect(full.index(s), NBYTES, pred=s < steps)
+        mbarrier.expect(full.index(s), NBYTES + 16, pred=s < steps)

ring: no expect | bytes expected | deadlock, barrier
@ mbarrier.wait(full @ tma_load(x_desc, [0, ahead
Nobody arrives at the barrier of a refilled slot.
-        mbarrier.expect(full.index(slot), NBYTES, pred=ahead < steps)

ring: no fence | missing fence | missing fence
@ tma_load(x_desc, [0, ahead
TMA may overwrite what threads still read.
-        fence_async_shared()

ring: the next slot refilled | slot reused early | race
@ tma_load(x_desc, [0, ahead @ x = slots.index(slot).load(layout)
The copy goes into a slot whose tile has not been read.
-        tma_load(x_desc, [0, ahead * COLUMNS], full.index(slot), slots.index(slot), pred=ahead < steps)
+        tma_load(x_desc, [0, ahead * COLUMNS], full.index(slot), slots.index((slot + 1) % STAGES), pred=ahead < steps)

ring: two arrivals awaited | count | deadlock
@ mbarrier.wait(full
Only one arrival comes in each phase, that of expect.
-        mbarrier.init(full.index(s), count=1)
+        mbarrier.init(full.index(s), count=2)

ring: no column mask | out of bounds | out of bounds
@ gl.store(y_ptr
The last tile is wider than what is left of the matrix.
-        inside = (row < rows) & (column + i * COLUMNS < width)
+        inside = (row < rows)

ring: a slot nobody fills | uninitialized read | uninitialized
@ slots.index(STAGES).load
The slot behind the ring is never written.
-    slots = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, COLUMNS], x_desc.layout)
+    slots = gl.allocate_shared_memory(x_desc.dtype, [STAGES + 1, ROWS, COLUMNS], x_desc.layout)
-        x = slots.index(slot).load(layout)
+        x = slots.index(STAGES).load(layout)

consumers: no fence before the release | missing fence | missing fence
@ tma_load(x_desc, [0, i
TMA may overwrite what a consumer still reads.
-        fence_async_shared()

consumers: released before it is read | slot reused early | race
@ tma_load(x_desc, [0, i @ x = slots.index(slot).load(layout)
The producer refills a slot that is still read.
-        mbarrier.wait(full.index(slot), i // STAGES & 1)
+        mbarrier.wait(full.index(slot), i // STAGES & 1)
+        mbarrier.arrive(empty.index(slot))
-        mbarrier.arrive(empty.index(slot))

consumers: one arrival awaited | count | barrier, race
@ mbarrier.expect(full @ tma_load(x_desc, [0, i @ mbarrier.arrive(empty @ x = slots.index(slot).load(layout)
The slot counts as free when one of two consumers has read it.
-        mbarrier.init(empty.index(s), count=2)
+        mbarrier.init(empty.index(s), count=1)

consumers: no wait for a free slot | wait left out | race, barrier
@ tma_load(x_desc, [0, i @ mbarrier.expect(full
The producer laps the consumers.
-        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)

consumers: the producer's parity | phase | deadlock
@ mbarrier.wait(empty @ mbarrier.wait(full
The first wait is for a release that comes after the first tile.
-        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
+        mbarrier.wait(empty.index(slot), i // STAGES & 1)

consumers: waits for the next slot | order of waits | race, deadlock, barrier
@ x = slots.index(slot).load(layout) @ mbarrier.wait(full
The slot that is read is not the one that was waited for.
-        mbarrier.wait(full.index(slot), i // STAGES & 1)
+        mbarrier.wait(full.index((slot + 1) % STAGES), i // STAGES & 1)

stores: no fence | missing fence | missing fence
@ tma_store(y_desc, [0, i
TMA may read what was there before.
-        fence_async_shared()

stores: no wait | wait left out | race
@ buffer.store(x * 2.0)
The buffer is overwritten while TMA reads it.
-        tma.store_wait(BUFFERS - 1)

stores: one store too many under way | count | race
@ buffer.store(x * 2.0)
The store that read this buffer is one of those that may be under way.
-        tma.store_wait(BUFFERS - 1)
+        tma.store_wait(BUFFERS)

stores: wait after the store | order of waits | race
@ buffer.store(x * 2.0)
The wait comes a line too late.
-        # The store that read this buffer, BUFFERS stores ago, must have read it.
+        # The store that read this buffer, BUFFERS stores ago, must have read it.
+        buffer.store(x * 2.0)
-        buffer.store(x * 2.0)

product: no wait for the tiles | wait left out | race
@ warpgroup_mma(a.index(slot)
The tensor cores read before TMA has written.
-        mbarrier.wait(full.index(slot), i // STAGES & 1)

product: two products under way | count | race
@ tma_load(a_desc, [0, ahead @ tma_load(b_desc, [ahead
The product before this one may still read the slot that is filled.
-        acc = warpgroup_mma_wait(1, deps=[acc])
+        acc = warpgroup_mma_wait(2, deps=[acc])

product: the slot in use refilled | slot reused early | race
@ tma_load(a_desc, [0, ahead @ tma_load(b_desc, [ahead
The product that was just started reads the slot.
-        free = ahead % STAGES
+        free = i % STAGES

product: bytes of A alone | bytes expected | barrier, race
@ tma_load(b_desc @ tma_load(a_desc @ warpgroup_mma(a.index(slot) @ mbarrier.expect
The phase ends, or breaks, when one of two tiles has come.
-    NBYTES: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
+    NBYTES: gl.constexpr = a_desc.block_type.nbytes

operand: no fence | missing fence | missing fence
@ warpgroup_mma(a, b, acc, use_acc=False
The tensor cores may not see the threads' stores.
-    fence_async_shared()

operand: written while it is read | slot reused early | race
@ a.store(x + x)
The wait lets one product go on, the one that reads the operand.
-    acc = warpgroup_mma_wait(0, deps=[acc])
+    acc = warpgroup_mma_wait(1, deps=[acc])

operand: half of A written | uninitialized read | uninitialized
@ warpgroup_mma(a, b, acc, use_acc=False
The product reads rows that nothing has written.
-    a.store(x)
+    a.slice(0, SIZE // 2, dim=0).store(gl.full([SIZE // 2, SIZE], 1.0, b_desc.dtype, loads))

groups: no wait | wait left out | race
@ x = slots.index(i % STAGES).load(layout)
The line is read before its copy is over.
-        async_copy.wait_group(STAGES - 1)

groups: one group too many under way | count | race
@ x = slots.index(i % STAGES).load(layout)
The group that is read is one of those that may be under way.
-        async_copy.wait_group(STAGES - 1)
+        async_copy.wait_group(STAGES)

groups: copied into the slot in use | slot reused early | race
@ x_ptr + ahead @ x = slots.index(i % STAGES).load(layout)
The copy and the load are of the same slot.
-        cp_async(slots.index((i + STAGES - 1) % STAGES), x_ptr + ahead, mask=ahead < n)
+        cp_async(slots.index((i + STAGES) % STAGES), x_ptr + ahead, mask=ahead < n)

groups: wait after the load | order of waits | race
@ x = slots.index(i % STAGES).load(layout)
The wait comes a line too late.
-        async_copy.commit_group()  # of the loop
+        async_copy.commit_group()  # of the loop
+        x = slots.index(i % STAGES).load(layout)
-        x = slots.index(i % STAGES).load(layout)

groups: copy without a mask | out of bounds | out of bounds
@ x_ptr + ahead
Lines behind the end are copied.
-        cp_async(slots.index((i + STAGES - 1) % STAGES), x_ptr + ahead, mask=ahead < n)
+        cp_async(slots.index((i + STAGES - 1) % STAGES), x_ptr + ahead)

signals: one arrival awaited | count | barrier, race
@ async_copy.mbarrier_arrive @ x = slots.index(slot).load(layout) @ cp_async(slots.index(slot), x_ptr
The phase ends with the first of 32 threads.
-        mbarrier.init(full.index(s), count=32)
+        mbarrier.init(full.index(s), count=1)

signals: signalled before the copy | order of waits | race
@ x = slots.index(slot).load(layout) @ cp_async(slots.index(slot), x_ptr
The signal is for the copies before it.
-        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
+        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
+        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
-        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)

handoff: no fence | missing fence | missing fence
@ tma_store(y_desc, [0, i
TMA may read what was there before.
-        fence_async_shared()

handoff: ready before the tile | order of waits | race
@ tma_store(y_desc, [0, i @ tile.store(x * x)
The other partition may read before the store.
-        mbarrier.wait(drained, (i & 1) ^ 1)
+        mbarrier.wait(drained, (i & 1) ^ 1)
+        mbarrier.arrive(ready)
-        mbarrier.arrive(ready)

handoff: both wait first | phase | deadlock
@ mbarrier.wait(drained @ mbarrier.wait(ready
Each partition waits for the other one to begin.
-        mbarrier.wait(drained, (i & 1) ^ 1)
+        mbarrier.wait(drained, i & 1)

tails: nothing stored | uninitialized read | uninitialized
@ y = tile.load
The tile is read and never written.
-    tile.store(x)

stores: no wait at the end | wait left out | unfinished
@ tma_store(y_desc, [0, i
The kernel ends while TMA may still read the last buffer.
-    tma.store_wait(0)

groups: no wait at the end | wait left out | unfinished
@ cp_async(slots.index(
The kernel ends while its last copies are under way.
-    async_copy.wait_group(0)

consumers: a tile nobody waits for | wait left out | unfinished
@ tma_load(x_desc, [0, i
The producer copies a tile more than the consumers read.
-    for i in range(steps):
-        slot = i % STAGES
-        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
+    for i in range(steps + 1):
+        slot = i % STAGES
+        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
""")
CASES = {case.label: case for case in (*CORRECT, *BUGS)}

# Mistakes with mbarriers on which no sanitizer of a GPU was run.
MISUSES = read_cases("""
handoff: not initialized | misuse | barrier
@ mbarrier.wait(drained @ mbarrier.arrive(drained
An mbarrier is nothing before mbarrier.init.
-    mbarrier.init(drained, count=1)

handoff: initialized twice | misuse | barrier
@ mbarrier.init(drained
The second initialization needs an mbarrier.invalidate before it.
-    mbarrier.init(drained, count=1)
+    mbarrier.init(drained, count=1)
+    mbarrier.init(drained, count=1)

handoff: two arrivals | misuse | barrier
@ mbarrier.arrive(ready
The phase waits for one.
-        mbarrier.arrive(ready)
+        mbarrier.arrive(ready, count=2)

handoff: an arrival of nobody | misuse | barrier
@ mbarrier.arrive(ready
A count is 1 or more.
-        mbarrier.arrive(ready)
+        mbarrier.arrive(ready, count=0)

consumers: the last tile passed by without a wait | misuse | barrier, race
@ mbarrier.arrive(empty @ tma_load(x_desc, [0, i
A consumer that does not wait may arrive for the tile before, in the other consumer's place.
-        mbarrier.wait(full.index(slot), i // STAGES & 1)
+        mbarrier.wait(full.index(slot), i // STAGES & 1, pred=i + 1 < steps)
-        x = slots.index(slot).load(layout)
+        x = slots.index(slot * (i + 1 < steps).to(gl.int32)).load(layout)

sums: announced twice | misuse | barrier
@ mbarrier.expect(full
Each mbarrier.expect arrives, and the phase waits for one arrival.
-    mbarrier.expect(full, x_desc.block_type.nbytes)
+    mbarrier.expect(full, x_desc.block_type.nbytes)
+    mbarrier.expect(full, x_desc.block_type.nbytes)

ring: a phase in place of its parity | misuse | barrier
@ mbarrier.wait(full
A parity is 0 or 1.
-        mbarrier.wait(full.index(slot), i // STAGES & 1)
+        mbarrier.wait(full.index(slot), 2 + i // STAGES)
""")


# ---- running a case ------------------------------------------------------------------------------------------------


def source(case: Case) -> str:
    """Return the text of a file with the case's kernel alone, its edits made."""
    header, *sections = re.split(r"^(?=# ==== )", KERNELS.read_text(), flags=re.MULTILINE)
    (section,) = [text for text in sections if text.startswith(f"# ==== {case.kernel}:")]
    places = []
    for old, new in case.edits:
        if section.count(f"\n{old}") != 1:
            raise ValueError(f"{case.label}: {old!r} stands {section.count(old)} times in the section, not once.")
        places.append((section.index(f"\n{old}") + 1, old, new))
    for at, old, new in sorted(places, reverse=True):
        section = section[:at] + new + section[at + len(old) :]
    return header + section


def load_kernels(case: Case) -> ModuleType:
    """Write the case's kernel to a file and import it."""
    from utils.gluon_cpu.compiling import import_file, write_source

    return import_file(write_source(source(case), f"{case.kernel}.py"))


def launch(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the case's kernel on random inputs; return its output and what is expected, both on the CPU."""
    torch.manual_seed(0)
    output, expected = globals()[f"launch_{case.kernel}"](load_kernels(case), device, **case.sizes)
    return output.cpu(), expected.cpu()


def agrees(output: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether an output is the expected one, up to the rounding of fp16 products."""
    return torch.allclose(output.double(), expected.double(), rtol=2e-3, atol=2e-3)


def simulate_case(case: Case, seed: int | None = None) -> dict:
    """Run a case in the simulator; return the verdict.

    Returns:
        kind: the kind of report, "" for none. line: the line that was reported. report: the message. right: whether a
        correct kernel was found correct, or the bug was reported by the right kind at the right line. seconds: CPU time.
    """
    from utils import gluon_cpu

    start = time.process_time()
    report = None
    try:
        with gluon_cpu.simulate(seed=seed, max_steps=60_000, max_seconds=60) as run:
            output, expected = launch(case, "cpu")
    except gluon_cpu.SimulationError as error:
        report = error.report
    else:
        report = run.notes[0] if run.notes else None  # a fence that this version of the compiler adds
    if report is not None:
        sites = (report.site, *(report.others if report.kind == "deadlock" else ()))
        found = any(at in site.text for at in case.at for site in sites)
        verdict = {"kind": report.kind, "line": report.site.text, "report": " ".join(report.message.split())}
        verdict["right"] = report.kind in case.kinds and found
    else:
        same = agrees(output, expected)
        verdict = {"kind": "", "line": "", "report": "" if same else "wrong result", "right": same and not case.bug}
    return {**verdict, "seconds": round(time.process_time() - start, 3)}


@contextlib.contextmanager
def compiling(instrumentation: str = "") -> Iterator[list[str]]:
    """Compile the Gluon kernels that are launched inside for sm_90a, without a GPU; yield the list of their names.

    Args:
        instrumentation: "consan" compiles them as Triton's concurrency sanitizer runs them.
    """
    from triton import knobs
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from utils.kernels.offline import compile_gluon

    names: list[str] = []

    def signature_of(value) -> str:
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
        return (
            f"*{TYPES[value.dtype]}"
            if isinstance(value, torch.Tensor)
            else "fp32"
            if isinstance(value, float)
            else "i32"
        )

    def compile_launch(kernel, *args, grid, warmup=False, num_warps=4, **options):
        values = dict(zip((p.name for p in kernel.params), args, strict=False)) | options
        constants = {p.name: values.get(p.name, num_warps) for p in kernel.params if p.is_constexpr}
        signature = {name: signature_of(value) for name, value in values.items() if name not in constants}
        aligned = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
        options = dict(num_warps=num_warps, instrumentation_mode=instrumentation)
        assert compile_gluon(kernel, signature, constants, aligned, **options).asm["cubin"]
        names.append(kernel.fn.__name__)

    before = vars(GluonJITFunction).get("run")
    # Triton 3.6 asks the knob, later versions the option.
    GluonJITFunction.run, knobs.compilation.instrumentation_mode = compile_launch, instrumentation
    try:
        yield names
    finally:
        knobs.compilation.instrumentation_mode = ""
        if before is None:
            del GluonJITFunction.run
        else:
            GluonJITFunction.run = before
