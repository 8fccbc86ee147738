"""The table of verdicts: small kernels, correct ones and ones with a planted bug, each with the reason for its verdict.

A case is a kernel of `verdict_kernels.py` with a few lines changed, and the sizes of its launch. For a planted bug it says which
kinds of report are right and which line has to be reported. `simulate_case` asks the simulator; `tools/record/gluon_verdicts.py`
records what the simulator, ConSan and compute-sanitizer say.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.utils.gluon_cpu.gluon_helpers import descriptor

TYPES = {torch.float32: "fp32", torch.float16: "fp16"}
KERNELS = Path(__file__).with_name("verdict_kernels.py")


@dataclass(frozen=True)
class Case:
    """A kernel and what should be said about it.

    Attributes:
        kernel: the section of `verdict_kernels.py`.
        name: the case's name, unique within the kernel.
        reason: why it is a bug, or why it is correct.
        edits: (old, new) texts; each old text stands once in the section.
        sizes: arguments of the launch, where they are not the usual ones.
        bug: the class of the planted bug; "" for a correct kernel.
        kinds: kinds of report that are right. Several, where it depends on the timing what goes wrong first.
        at: a part of the line that has to be reported; of any of the lines, if there are several.
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
        """The name by which the tables and the command line know the case."""
        return f"{self.kernel}: {self.name}"


CORRECT: list[Case] = []
BUGS: list[Case] = []


def correct(kernel: str, name: str, reason: str, *edits: tuple[str, str], **sizes) -> None:
    """Add a correct kernel."""
    CORRECT.append(Case(kernel, name, reason, edits, sizes))


def bug(kernel: str, name: str, what: str, kinds: str, at: str, reason: str, *edits: tuple[str, str], **sizes) -> None:
    """Add a planted bug; several kinds, or several lines, stand with ` | ` between them."""
    BUGS.append(Case(kernel, name, reason, edits, sizes, what, tuple(kinds.split(" | ")), tuple(at.split(" | "))))


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


# ---- correct kernels -----------------------------------------------------------------------------------------------

WAIT = ("        mbarrier.wait(full.index(slot), i // STAGES & 1)\n", "")
RING_REFILL = """        # TMA must not overwrite what a thread still reads.
        fence_async_shared()
        mbarrier.expect(full.index(slot), NBYTES, pred=ahead < steps)
        tma_load(x_desc, [0, ahead * COLUMNS], full.index(slot), slots.index(slot), pred=ahead < steps)
"""

correct("ring", "as written", "Each tile is waited for, and refilled after a fence.")
correct(
    "ring",
    "a parity that flips",
    "`1 - parity` once a round is the same as i // STAGES & 1.",
    ("    for i in range(steps):\n", "    parity = 0\n    for i in range(steps):\n"),
    ("i // STAGES & 1)\n", "parity)\n"),
    (
        "        ahead = i + STAGES\n",
        "        if slot == STAGES - 1:\n            parity = 1 - parity\n        ahead = i + STAGES\n",
    ),
)
correct("ring", "waited for twice", "A phase that is over stays over until the next one ends.", (WAIT[0], 2 * WAIT[0]))
correct(
    "ring",
    "expect after the copy",
    "The phase cannot end before the arrival that comes with expect, however early the bytes are.",
    (
        RING_REFILL.splitlines(keepends=True)[2] + RING_REFILL.splitlines(keepends=True)[3],
        RING_REFILL.splitlines(keepends=True)[3] + RING_REFILL.splitlines(keepends=True)[2],
    ),
)

correct("consumers", "as written", "A slot is free after two arrivals, one of each consumer.")
correct(
    "consumers",
    "four arrivals awaited",
    "Each consumer arrives with count 2, and the barrier waits for 4.",
    ("mbarrier.arrive(empty.index(slot))", "mbarrier.arrive(empty.index(slot), count=2)"),
    ("mbarrier.init(empty.index(s), count=2)", "mbarrier.init(empty.index(s), count=4)"),
)
correct(
    "consumers",
    "released after the store",
    "A later release only costs time.",
    ("        mbarrier.arrive(empty.index(slot))\n", ""),
    ("+ column, x * factor)\n", "+ column, x * factor)\n        mbarrier.arrive(empty.index(slot))\n"),
)
correct(
    "consumers",
    "releases that nobody waits for",
    "The last slots are not filled again, so their release may be left out.",
    ("mbarrier.arrive(empty.index(slot))", "mbarrier.arrive(empty.index(slot), pred=i + STAGES < steps)"),
)

correct("stores", "as written", "Before a buffer is written, the store that read it has been waited for.")
correct(
    "stores",
    "every store waited for",
    "Waiting for all stores is more than is needed.",
    ("tma.store_wait(BUFFERS - 1)", "tma.store_wait(pendings=0)"),
)
correct(
    "stores",
    "waited for before the load",
    "The wait may come earlier than the line that needs it.",
    ("        tma.store_wait(BUFFERS - 1)\n", ""),
    ("    for i in range(steps):\n", "    for i in range(steps):\n        tma.store_wait(BUFFERS - 1)\n"),
)
correct(
    "stores",
    "a barrier more",
    "gl.barrier lets the warps meet and does no harm.",
    ("        fence_async_shared()\n", "        fence_async_shared()\n        gl.barrier()\n"),
)

correct("product", "as written", "One product runs while the slot of the one before it is filled.")
correct(
    "product",
    "synchronous",
    "A product that is not asynchronous is over when the call returns.",
    ("acc, is_async=True)", "acc)"),
    ("        acc = warpgroup_mma_wait(1, deps=[acc])\n", ""),
    ("    acc = warpgroup_mma_wait(0, deps=[acc])\n", ""),
)
correct(
    "product",
    "every product waited for",
    "Waiting for all products is more than is needed.",
    ("warpgroup_mma_wait(1, deps=[acc])", "warpgroup_mma_wait(num_outstanding=0, deps=[acc])"),
)

correct("operand", "as written", "A fence lies between the threads' stores and each product.")
correct(
    "operand",
    "fence after the wait",
    "Fence and wait may change places: both come before the product.",
    (
        "    fence_async_shared()\n    mbarrier.wait(full, 0)\n",
        "    mbarrier.wait(full, 0)\n    fence_async_shared()\n",
    ),
)
correct(
    "operand",
    "synchronous",
    "The first product is over before its operand is written again.",
    ("use_acc=False, is_async=True)", "use_acc=False)"),
    ("    acc = warpgroup_mma_wait(0, deps=[acc])\n", ""),
)
correct(
    "operand",
    "a buffer of its own",
    "The second product has an operand of its own, allocated before the first one is issued, so the first may still run. "
    "Allocated after it, the compiler would put it where `a` is, which no later line uses.",
    (
        "    b = gl.allocate_shared_memory(b_desc.dtype, [SIZE, SIZE], b_desc.layout)\n",
        "    b = gl.allocate_shared_memory(b_desc.dtype, [SIZE, SIZE], b_desc.layout)\n"
        "    other = gl.allocate_shared_memory(b_desc.dtype, [SIZE, SIZE], b_desc.layout)\n",
    ),
    ("    acc = warpgroup_mma_wait(0, deps=[acc])\n", ""),
    ("    a.store(x + x)\n", "    other.store(x + x)\n"),
    ("warpgroup_mma(a, b, acc, is_async=True)", "warpgroup_mma(other, b, acc, is_async=True)"),
)

correct("groups", "as written", "The oldest of three groups is over when two may be under way.")
correct(
    "groups",
    "every group waited for",
    "Waiting for all groups is more than is needed.",
    ("async_copy.wait_group(STAGES - 1)", "async_copy.wait_group(num_outstanding=0)"),
)
correct(
    "groups",
    "two groups a turn",
    "An empty group in each turn: twice as many may be under way.",
    ("        async_copy.commit_group()\n    for i", 2 * "        async_copy.commit_group()\n" + "    for i"),
    ("        async_copy.commit_group()  # of the loop\n", 2 * "        async_copy.commit_group()\n"),
    ("async_copy.wait_group(STAGES - 1)", "async_copy.wait_group(2 * (STAGES - 1))"),
)

correct("signals", "as written", "32 threads arrive when their copies are over.")
correct(
    "signals",
    "released after the store",
    "A later release only costs time.",
    ("        mbarrier.arrive(empty.index(slot))\n", ""),
    ("x * 0.5, mask=at < n)\n", "x * 0.5, mask=at < n)\n        mbarrier.arrive(empty.index(slot))\n"),
)

correct("handoff", "as written", "The tile goes to and fro between two partitions by two barriers.")
correct(
    "handoff",
    "loaded late",
    "The tile may be waited for before the values are loaded.",
    ("        mbarrier.wait(drained, (i & 1) ^ 1)\n", ""),
    (
        "    for i in range(steps):\n        x = gl",
        "    for i in range(steps):\n        mbarrier.wait(drained, (i & 1) ^ 1)\n        x = gl",
    ),
)
correct(
    "handoff",
    "two fences",
    "A second fence does no harm, on the side that stores least of all.",
    ("        mbarrier.wait(ready, i & 1)\n", "        mbarrier.wait(ready, i & 1)\n        fence_async_shared()\n"),
)
correct(
    "handoff",
    "two arrivals",
    "The barrier waits for 2 arrivals, and one call makes both.",
    ("mbarrier.init(ready, count=1)", "mbarrier.init(ready, count=2)"),
    ("mbarrier.arrive(ready)", "mbarrier.arrive(ready, count=2)"),
)

correct("sums", "as written", "Each reduction has read the tile before it is written again.")
correct(
    "sums",
    "two tiles",
    "The second reduction reads a tile of its own, so the first may still be under way.",
    (
        "    full = gl.all",
        "    once = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)\n    full = gl.all",
    ),
    ("    tma.store_wait(0)\n    twice.store(x)\n", "    once.store(x)\n"),
    ("tma_add(y_desc, (0, 0), twice)", "tma_add(y_desc, [0, 0], once)"),
)

correct("tails", "as written", "Rows and columns beyond the matrix are masked.")
correct(
    "tails",
    "stored by rows in two halves",
    "Both halves of the tile are written before it is read.",
    (
        "    tile.store(x)\n",
        "    half: gl.constexpr = ROWS // 2\n"
        "    tile.slice(0, half, dim=0).store(gl.full([half, COLUMNS], 0.0, gl.float32, layout))\n"
        "    tile.slice(half, half, dim=0).store(gl.full([half, COLUMNS], 0.0, gl.float32, layout))\n"
        "    tile.store(x)\n",
    ),
)

# ---- planted bugs --------------------------------------------------------------------------------------------------

LOAD = "x = slots.index(slot).load(layout)"
RING_WAIT, RING_COPY = "mbarrier.wait(full", "tma_load(x_desc, [0, ahead"

bug("ring", "no wait", "wait left out", "race", LOAD, "The tile is read before TMA has written it.", WAIT)
bug(
    "ring",
    "parity turned round",
    "phase",
    "race | barrier",
    f"{LOAD} | {RING_WAIT}",
    "The first wait passes at once.",
    ("i // STAGES & 1", "(i // STAGES & 1) ^ 1"),
)
bug(
    "ring",
    "parity of the tile",
    "phase",
    "race | barrier",
    f"{LOAD} | {RING_WAIT}",
    "A parity counts rounds of the ring, not tiles: tile 1 has parity 0.",
    ("i // STAGES & 1", "i & 1"),
)
bug(
    "ring",
    "half of the bytes",
    "bytes expected",
    "barrier",
    f"{RING_COPY} | mbarrier.expect(full.index(slot)",
    "The phase ends, or breaks, when half of the tile has come.",
    ("mbarrier.expect(full.index(slot), NBYTES,", "mbarrier.expect(full.index(slot), NBYTES // 2,"),
)
bug(
    "ring",
    "too many bytes",
    "bytes expected",
    "deadlock",
    RING_WAIT,
    "The last 16 bytes never come.",
    ("mbarrier.expect(full.index(s), NBYTES,", "mbarrier.expect(full.index(s), NBYTES + 16,"),
)
bug(
    "ring",
    "no expect",
    "bytes expected",
    "deadlock | barrier",
    f"{RING_WAIT} | {RING_COPY}",
    "Nobody arrives at the barrier of a refilled slot.",
    ("        mbarrier.expect(full.index(slot), NBYTES, pred=ahead < steps)\n", ""),
)
bug(
    "ring",
    "no fence",
    "missing fence",
    "missing fence",
    RING_COPY,
    "TMA may overwrite what threads still read.",
    ("        fence_async_shared()\n", ""),
)
bug(
    "ring",
    "the next slot refilled",
    "slot reused early",
    "race",
    f"{RING_COPY} | {LOAD}",
    "The copy goes into a slot whose tile has not been read.",
    ("slots.index(slot), pred=ahead < steps", "slots.index((slot + 1) % STAGES), pred=ahead < steps"),
)
bug(
    "ring",
    "two arrivals awaited",
    "count",
    "deadlock",
    RING_WAIT,
    "Only one arrival comes in each phase, that of expect.",
    ("count=1)", "count=2)"),
)
bug(
    "ring",
    "no column mask",
    "out of bounds",
    "out of bounds",
    "gl.store(y_ptr",
    "The last tile is wider than what is left of the matrix.",
    (" & (column + i * COLUMNS < width)", ""),
)
bug(
    "ring",
    "no row mask",
    "out of bounds",
    "out of bounds",
    "gl.store(y_ptr",
    "The tile has more rows than the matrix.",
    ("(row < rows) & ", ""),
)
bug(
    "ring",
    "a slot nobody fills",
    "uninitialized read",
    "uninitialized",
    "slots.index(STAGES).load",
    "The slot behind the ring is never written.",
    ("[STAGES, ROWS, COLUMNS]", "[STAGES + 1, ROWS, COLUMNS]"),
    (LOAD, "x = slots.index(STAGES).load(layout)"),
)

FILL, EMPTY = "tma_load(x_desc, [0, i", "mbarrier.wait(empty"
bug(
    "consumers",
    "no fence before the release",
    "missing fence",
    "missing fence",
    FILL,
    "TMA may overwrite what a consumer still reads.",
    ("        fence_async_shared()\n", ""),
)
bug(
    "consumers",
    "released before it is read",
    "slot reused early",
    "race",
    f"{FILL} | {LOAD}",
    "The producer refills a slot that is still read.",
    ("        mbarrier.arrive(empty.index(slot))\n", ""),
    (f"        {LOAD}\n", f"        mbarrier.arrive(empty.index(slot))\n        {LOAD}\n"),
)
bug(
    "consumers",
    "one arrival awaited",
    "count",
    "barrier | race",
    f"mbarrier.expect(full | {FILL} | mbarrier.arrive(empty | {LOAD}",
    "The slot counts as free when one of two consumers has read it.",
    ("empty.index(s), count=2", "empty.index(s), count=1"),
)
bug(
    "consumers",
    "no wait for a free slot",
    "wait left out",
    "race | barrier",
    f"{FILL} | mbarrier.expect(full",
    "The producer laps the consumers.",
    ("        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)\n", ""),
)
bug(
    "consumers",
    "the producer's parity",
    "phase",
    "deadlock",
    f"{EMPTY} | mbarrier.wait(full",
    "The first wait is for a release that comes after the first tile.",
    ("(i // STAGES & 1) ^ 1", "i // STAGES & 1"),
)
bug(
    "consumers",
    "waits for the next slot",
    "order of waits",
    "race | deadlock | barrier",
    f"{LOAD} | mbarrier.wait(full",
    "The slot that is read is not the one that was waited for.",
    (
        "mbarrier.wait(full.index(slot), i // STAGES & 1)",
        "mbarrier.wait(full.index((slot + 1) % STAGES), i // STAGES & 1)",
    ),
)

SEND, PUT = "tma_store(y_desc, [0, i", "buffer.store(x * 2.0)"
bug(
    "stores",
    "no fence",
    "missing fence",
    "missing fence",
    SEND,
    "TMA may read what was there before.",
    ("        fence_async_shared()\n", ""),
)
bug(
    "stores",
    "no wait",
    "wait left out",
    "race",
    PUT,
    "The buffer is overwritten while TMA reads it.",
    ("        tma.store_wait(BUFFERS - 1)\n", ""),
)
bug(
    "stores",
    "one store too many under way",
    "count",
    "race",
    PUT,
    "The store that read this buffer is one of those that may be under way.",
    ("tma.store_wait(BUFFERS - 1)", "tma.store_wait(BUFFERS)"),
)
bug(
    "stores",
    "wait after the store",
    "order of waits",
    "race",
    PUT,
    "The wait comes a line too late.",
    ("        tma.store_wait(BUFFERS - 1)\n", ""),
    (f"        {PUT}\n", f"        {PUT}\n        tma.store_wait(BUFFERS - 1)\n"),
)
bug(
    "stores",
    "always the first buffer",
    "slot reused early",
    "race",
    PUT,
    "The wait allows for as many stores as there are buffers.",
    ("out.index(i % BUFFERS)", "out.index(0)"),
)
bug(
    "stores",
    "another buffer sent",
    "uninitialized read",
    "uninitialized | race",
    f"{SEND} | {PUT}",
    "The first store sends a buffer that nothing was written to.",
    (f"{SEND} * COLUMNS], buffer)", f"{SEND} * COLUMNS], out.index((i + 1) % BUFFERS))"),
)
bug(
    "stores",
    "a tile too far",
    "out of bounds",
    "out of bounds",
    "gl.load(x_ptr",
    "The last tile is read behind the end of the matrix.",
    ("+ i * COLUMNS + column", "+ (i + 1) * COLUMNS + column"),
)

MMA, FREE = "warpgroup_mma(a.index(slot)", "tma_load(a_desc, [0, ahead | tma_load(b_desc, [ahead"
bug(
    "product",
    "no wait for the tiles",
    "wait left out",
    "race",
    MMA,
    "The tensor cores read before TMA has written.",
    WAIT,
)
bug(
    "product",
    "parity turned round",
    "phase",
    "race | barrier",
    f"{MMA} | mbarrier.wait(full",
    "The first wait passes at once.",
    ("i // STAGES & 1", "(i // STAGES & 1) ^ 1"),
)
bug(
    "product",
    "two products under way",
    "count",
    "race",
    FREE,
    "The product before this one may still read the slot that is filled.",
    ("warpgroup_mma_wait(1,", "warpgroup_mma_wait(2,"),
)
bug(
    "product",
    "the slot in use refilled",
    "slot reused early",
    "race",
    FREE,
    "The product that was just started reads the slot.",
    ("free = ahead % STAGES", "free = i % STAGES"),
)
bug(
    "product",
    "no fence before the store",
    "missing fence",
    "missing fence",
    "tma_store(c_desc",
    "TMA may read what was there before.",
    ("    fence_async_shared()\n", ""),
)
bug(
    "product",
    "bytes of A alone",
    "bytes expected",
    "barrier | race",
    f"tma_load(b_desc | tma_load(a_desc | {MMA} | mbarrier.expect",
    "The phase ends, or breaks, when one of two tiles has come.",
    ("a_desc.block_type.nbytes + b_desc.block_type.nbytes", "a_desc.block_type.nbytes"),
)
bug(
    "product",
    "B not copied",
    "bytes expected",
    "deadlock",
    "mbarrier.wait(full",
    "Bytes are announced that nobody copies.",
    ("        tma_load(b_desc, [ahead * K, 0], full.index(free), b.index(free), pred=ahead < steps)\n", ""),
)
bug(
    "product",
    "waited for too late",
    "order of waits",
    "race",
    MMA,
    "The wait for the tiles comes after the product that reads them.",
    WAIT,
    ("        ahead = i + STAGES - 1\n", f"{WAIT[0]}        ahead = i + STAGES - 1\n"),
)

FIRST, SECOND = "warpgroup_mma(a, b, acc, use_acc=False", "warpgroup_mma(a, b, acc, is_async"
bug(
    "operand",
    "no fence",
    "missing fence",
    "missing fence",
    FIRST,
    "The tensor cores may not see the threads' stores.",
    ("    fence_async_shared()\n", ""),
)
bug(
    "operand",
    "written while it is read",
    "slot reused early",
    "race",
    "a.store(x + x)",
    "The wait lets one product go on, the one that reads the operand.",
    ("warpgroup_mma_wait(0, deps=[acc])", "warpgroup_mma_wait(1, deps=[acc])"),
)
bug(
    "operand",
    "no wait for B",
    "wait left out",
    "race",
    FIRST,
    "The tensor cores read before TMA has written.",
    ("    mbarrier.wait(full, 0)\n", ""),
)
bug(
    "operand",
    "half of A written",
    "uninitialized read",
    "uninitialized",
    FIRST,
    "The product reads rows that nothing has written.",
    (
        "    a.store(x)\n",
        "    a.slice(0, SIZE // 2, dim=0).store(gl.full([SIZE // 2, SIZE], 1.0, b_desc.dtype, loads))\n",
    ),
)
bug(
    "operand",
    "a row too far",
    "out of bounds",
    "out of bounds",
    "gl.store(c_ptr",
    "The last row is stored behind the end of the matrix.",
    ("c_ptr + row * SIZE", "c_ptr + (row + 1) * SIZE"),
)

LINE, COPY = "x = slots.index(i % STAGES).load(layout)", "x_ptr + ahead"
bug(
    "groups",
    "no wait",
    "wait left out",
    "race",
    LINE,
    "The line is read before its copy is over.",
    ("        async_copy.wait_group(STAGES - 1)\n", ""),
)
bug(
    "groups",
    "one group too many under way",
    "count",
    "race",
    LINE,
    "The group that is read is one of those that may be under way.",
    ("async_copy.wait_group(STAGES - 1)", "async_copy.wait_group(STAGES)"),
)
bug(
    "groups",
    "copied into the slot in use",
    "slot reused early",
    "race",
    f"{COPY} | {LINE}",
    "The copy and the load are of the same slot.",
    ("slots.index((i + STAGES - 1) % STAGES)", "slots.index((i + STAGES) % STAGES)"),
)
bug(
    "groups",
    "wait after the load",
    "order of waits",
    "race",
    LINE,
    "The wait comes a line too late.",
    (
        f"        async_copy.wait_group(STAGES - 1)\n        {LINE}\n",
        f"        {LINE}\n        async_copy.wait_group(STAGES - 1)\n",
    ),
)
bug(
    "groups",
    "copy without a mask",
    "out of bounds",
    "out of bounds",
    COPY,
    "Lines behind the end are copied.",
    ("x_ptr + ahead, mask=ahead < n)", "x_ptr + ahead)"),
)
bug(
    "groups",
    "a slot nobody fills",
    "uninitialized read",
    "uninitialized",
    "slots.index(STAGES).load",
    "The slot behind the ring is never written.",
    ("[STAGES, SIZE]", "[STAGES + 1, SIZE]"),
    (LINE, "x = slots.index(STAGES).load(layout)"),
)

GET = "cp_async(slots.index(slot), x_ptr"
bug(
    "signals",
    "one arrival awaited",
    "count",
    "barrier | race",
    f"async_copy.mbarrier_arrive | {LOAD} | {GET}",
    "The phase ends with the first of 32 threads.",
    ("count=32", "count=1"),
)
bug(
    "signals",
    "signalled before the copy",
    "order of waits",
    "race",
    f"{LOAD} | {GET}",
    "The signal is for the copies before it.",
    ("        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)\n", ""),
    (
        "        at = i * SIZE + gl.arange(0, SIZE, layout)\n        cp",
        "        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)\n        at = i * SIZE + gl.arange(0, SIZE, layout)\n        cp",
    ),
)
bug(
    "signals",
    "the consumer's parity",
    "phase",
    "race | barrier",
    f"{LOAD} | mbarrier.wait(full",
    "The first wait passes at once.",
    ("mbarrier.wait(full.index(slot), i // STAGES & 1)", "mbarrier.wait(full.index(slot), (i // STAGES & 1) ^ 1)"),
)

TILE, OUT = "tile.store(x * x)", "tma_store(y_desc, [0, i"
bug(
    "handoff",
    "no fence",
    "missing fence",
    "missing fence",
    OUT,
    "TMA may read what was there before.",
    ("        fence_async_shared()\n", ""),
)
bug(
    "handoff",
    "ready before the tile",
    "order of waits",
    "race",
    f"{OUT} | {TILE}",
    "The other partition may read before the store.",
    ("        mbarrier.arrive(ready)\n", ""),
    (f"        {TILE}\n", f"        mbarrier.arrive(ready)\n        {TILE}\n"),
)
bug(
    "handoff",
    "both wait first",
    "phase",
    "deadlock",
    "mbarrier.wait(drained | mbarrier.wait(ready",
    "Each partition waits for the other one to begin.",
    ("mbarrier.wait(drained, (i & 1) ^ 1)", "mbarrier.wait(drained, i & 1)"),
)

bug(
    "sums",
    "double the bytes",
    "bytes expected",
    "deadlock",
    "mbarrier.wait(full, 0)",
    "Half of the announced bytes never come.",
    ("mbarrier.expect(full, x_desc.block_type.nbytes)", "mbarrier.expect(full, 2 * x_desc.block_type.nbytes)"),
)
bug(
    "sums",
    "another tile added",
    "uninitialized read",
    "uninitialized",
    "tma_add(y_desc, [0, 0], empty)",
    "The tile that is added was never written.",
    (
        "    fence_async_shared()\n    tma_add(y_desc, [0, 0], twice)\n",
        "    fence_async_shared()\n    empty = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)\n    tma_add(y_desc, [0, 0], empty)\n",
    ),
)

bug(
    "tails",
    "load without a mask",
    "out of bounds",
    "out of bounds",
    "gl.load(x_ptr",
    "The last tiles reach beyond the matrix.",
    ("x_ptr + row * columns + column, mask=inside, other=0.0)", "x_ptr + row * columns + column)"),
)
bug(
    "tails",
    "nothing stored",
    "uninitialized read",
    "uninitialized",
    "y = tile.load",
    "The tile is read and never written.",
    ("    tile.store(x)\n", ""),
)

CASES = {case.label: case for case in (*CORRECT, *BUGS)}


# ---- running a case ------------------------------------------------------------------------------------------------


def source(case: Case) -> str:
    """Return the text of a file with the case's kernel alone, its edits made."""
    header, *sections = re.split(r"^(?=# ==== )", KERNELS.read_text(), flags=re.MULTILINE)
    (section,) = [text for text in sections if text.startswith(f"# ==== {case.kernel}:")]
    for old, new in case.edits:
        if section.count(old) != 1:
            raise ValueError(f"{case.label}: {old!r} stands {section.count(old)} times in the section, not once.")
        section = section.replace(old, new)
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
    try:
        with gluon_cpu.simulate(seed=seed, max_steps=60_000, max_seconds=60):
            output, expected = launch(case, "cpu")
    except gluon_cpu.SimulationError as error:
        report = error.report
        sites = (report.site, *(report.others if report.kind == "deadlock" else ()))
        found = any(at in site.text for at in case.at for site in sites)
        verdict = {"kind": report.kind, "line": report.site.text, "report": " ".join(report.message.split())}
        verdict["right"] = report.kind in case.kinds and found
    else:
        same = agrees(output, expected)
        verdict = {"kind": "", "line": "", "report": "" if same else "wrong result", "right": same and not case.bug}
    return {**verdict, "seconds": round(time.process_time() - start, 3)}


def compile_case(case: Case, instrumentation: str = "") -> None:
    """Compile a case for sm_90a, without a GPU.

    Args:
        case: the case.
        instrumentation: "consan" compiles it as Triton's concurrency sanitizer runs it.
    """
    from triton import knobs
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from utils.kernels.offline import compile_gluon

    def signature_of(value) -> str:
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
        return f"*{TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else "i32"

    def compile_launch(kernel, *args, grid, warmup=False, **options):
        values = dict(zip((p.name for p in kernel.params), args, strict=True))
        constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
        signature = {name: signature_of(value) for name, value in values.items() if name not in constants}
        aligned = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
        assert compile_gluon(kernel, signature, constants, aligned, instrumentation_mode=instrumentation).asm["cubin"]

    before = vars(GluonJITFunction).get("run")
    # Triton 3.6 asks the knob, later versions the option.
    GluonJITFunction.run, knobs.compilation.instrumentation_mode = compile_launch, instrumentation
    try:
        launch(case, "cpu")
    finally:
        knobs.compilation.instrumentation_mode = ""
        if before is None:
            del GluonJITFunction.run
        else:
            GluonJITFunction.run = before
