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
correct("ring", "one slot", "With one slot every round waits for the copy of its own turn.", stages=1)
correct("ring", "three slots", "The parity counts rounds of the ring, whatever its size.", stages=3)
correct("ring", "more slots than tiles", "Copies beyond the last tile are not started.", stages=4, steps=3, width=96)
correct("ring", "one tile", "Only one copy is started and waited for.", steps=1, width=20)
correct("ring", "half precision", "The bytes are counted by the descriptor's type.", dtype=torch.float16, width=184)
correct("ring", "whole tiles", "No mask is needed, and none does harm.", width=192, rows=16)
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
correct("consumers", "one slot", "Producer and consumers take turns.", stages=1)
correct("consumers", "four slots", "The ring holds four of six tiles.", stages=4)
correct("consumers", "one tile", "The first wait for an empty slot passes at once.", steps=1)
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
correct("stores", "one buffer", "Each store is waited for before the next tile.", buffers=1)
correct("stores", "three buffers", "Two stores may be under way.", buffers=3)
correct("stores", "one tile", "The wait before the first store has nothing to wait for.", steps=1)
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
correct("product", "three slots", "Two tiles are under way.", stages=3)
correct("product", "four slots, two steps", "Copies beyond the last step are not started.", stages=4, k=128)
correct("product", "one step", "The loop runs once; nothing is refilled.", k=64)
correct("product", "a part of a tile", "TMA fills what lies beyond the matrix with zeros.", k=200)
correct("product", "wide", "The accumulator has two instructions' width.", n=128)
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
correct("operand", "larger", "The same with 128 x 128.", size=128)
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
correct("groups", "two slots", "One group is under way.", stages=2)
correct("groups", "four slots", "Three groups are under way.", stages=4)
correct("groups", "one line", "The groups behind the first copy nothing.", n=100)
correct("groups", "whole lines", "The masks leave nothing out.", n=1024)
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
correct("signals", "one slot", "Copying and computing take turns.", stages=1)
correct("signals", "four slots", "Four lines are under way.", stages=4)
correct("signals", "one line", "One line, partly masked.", n=70)
correct(
    "signals",
    "released after the store",
    "A later release only costs time.",
    ("        mbarrier.arrive(empty.index(slot))\n", ""),
    ("x * 0.5, mask=at < n)\n", "x * 0.5, mask=at < n)\n        mbarrier.arrive(empty.index(slot))\n"),
)

correct("handoff", "as written", "The tile goes to and fro between two partitions by two barriers.")
correct("handoff", "one tile", "The first wait for the drained tile passes at once.", steps=1)
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
correct("sums", "one program", "Nobody else adds.", programs=1)
correct("sums", "eight programs", "Reductions of several programs may come in any order.", programs=8)
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
correct("tails", "whole tiles", "The masks leave nothing out.", rows=48, columns=64)
correct("tails", "one element", "All threads but one are masked.", rows=1, columns=1)
correct("tails", "one row", "A single row of three tiles.", rows=1, columns=70)
correct("tails", "one column", "A single column of four tiles.", rows=61, columns=1)
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
    "parity never changes",
    "phase",
    "race | barrier | deadlock",
    f"{LOAD} | {RING_WAIT}",
    "From the second round on the wait is for a phase that ended a round ago.",
    ("i // STAGES & 1", "0"),
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
    "refilled before it is read",
    "slot reused early",
    "race",
    f"{RING_COPY} | {LOAD}",
    "The next copy into the slot starts before the load.",
    (RING_REFILL, ""),
    (f"        {LOAD}\n", f"        ahead = i + STAGES\n{RING_REFILL}        {LOAD}\n"),
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
    "a tile too many",
    "count",
    "deadlock",
    RING_WAIT,
    "Nobody copies a tile for the last turn.",
    ("    for i in range(steps):", "    for i in range(steps + 1):"),
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
bug(
    "ring",
    "another slot read",
    "wait left out",
    "race | out of bounds",
    "slots.index(1 - slot).load",
    "The wait was for another slot than the one that is read.",
    (LOAD, "x = slots.index(1 - slot).load(layout)"),
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
    "three arrivals awaited",
    "count",
    "deadlock",
    f"{EMPTY} | mbarrier.wait(full",
    "Two consumers arrive, and the third never comes.",
    ("empty.index(s), count=2", "empty.index(s), count=3"),
)
bug(
    "consumers",
    "two arrivals each",
    "count",
    "barrier | race",
    f"mbarrier.expect(full | {FILL} | mbarrier.arrive(empty",
    "The first consumer frees the slot alone.",
    ("mbarrier.arrive(empty.index(slot))", "mbarrier.arrive(empty.index(slot), count=2)"),
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
    "no wait for the tile",
    "wait left out",
    "race",
    LOAD,
    "The tile is read before TMA has written it.",
    WAIT,
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
bug(
    "consumers",
    "expect before the wait",
    "order of waits",
    "barrier | race",
    f"mbarrier.expect(full | {FILL} | {EMPTY}",
    "The next round is announced while the last one is under way.",
    (
        "        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)\n        mbarrier.expect(full.index(slot), x_desc.block_type.nbytes)\n",
        "        mbarrier.expect(full.index(slot), x_desc.block_type.nbytes)\n        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)\n",
    ),
    stages=1,
)
bug(
    "consumers",
    "a tile nobody waits for",
    "wait left out",
    "unfinished",
    FILL,
    "The kernel ends while TMA still writes its shared memory.",
    (
        "    for i in range(steps):\n        slot = i % STAGES\n        mbarrier.wait(empty",
        "    for i in range(steps + 1):\n        slot = i % STAGES\n        mbarrier.wait(empty",
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
    "fence before the store",
    "missing fence",
    "missing fence",
    SEND,
    "A fence orders what comes before it.",
    ("        fence_async_shared()\n", ""),
    (f"        {PUT}\n", f"        fence_async_shared()\n        {PUT}\n"),
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
    "no wait at the end",
    "wait left out",
    "unfinished",
    SEND,
    "The kernel ends while TMA still reads its shared memory.",
    ("    tma.store_wait(0)\n", ""),
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
    "no wait at the end",
    "wait left out",
    "race | kernel",
    "c.store(acc",
    "The accumulator is read while the last product runs.",
    ("    acc = warpgroup_mma_wait(0, deps=[acc])\n", ""),
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
    "two arrivals awaited",
    "count",
    "deadlock",
    "mbarrier.wait(full",
    "Only one arrival comes in each phase.",
    ("count=1)", "count=2)"),
)
bug(
    "product",
    "the store not waited for",
    "wait left out",
    "unfinished",
    "tma_store(c_desc",
    "The kernel ends while TMA still reads its shared memory.",
    ("    tma.store_wait(0)\n", ""),
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
    "no second fence",
    "missing fence",
    "missing fence",
    SECOND,
    "The second store needs a fence of its own.",
    ("    fence_async_shared()  # again\n", ""),
)
bug(
    "operand",
    "fence before the store",
    "missing fence",
    "missing fence",
    FIRST,
    "A fence orders what comes before it.",
    ("    fence_async_shared()\n", ""),
    ("    a.store(x)\n", "    fence_async_shared()\n    a.store(x)\n"),
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
    "the last product not waited for",
    "wait left out",
    "race | kernel",
    "gl.store(c_ptr",
    "The accumulator is read while the product runs.",
    ("warpgroup_mma_wait(0, deps=(acc,))", "warpgroup_mma_wait(1, deps=(acc,))"),
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
    "no commit",
    "wait left out",
    "race",
    LINE,
    "Copies outside of a group are not waited for.",
    ("        async_copy.commit_group()  # of the loop\n", ""),
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
    "a mask of one element more",
    "out of bounds",
    "out of bounds",
    COPY,
    "Element n does not exist.",
    ("mask=ahead < n", "mask=ahead <= n"),
)
bug(
    "groups",
    "store without a mask",
    "out of bounds",
    "out of bounds",
    "gl.store(y_ptr",
    "The last line is shorter than the tile.",
    ("x * 0.5, mask=i * SIZE + at < n)", "x * 0.5)"),
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
bug(
    "groups",
    "no wait at the end",
    "wait left out",
    "unfinished",
    COPY,
    "The kernel ends while copies still write its shared memory.",
    ("    async_copy.wait_group(0)\n", ""),
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
    "33 arrivals awaited",
    "count",
    "deadlock",
    "mbarrier.wait(full | mbarrier.wait(empty",
    "32 threads arrive.",
    ("count=32", "count=33"),
)
bug("signals", "no wait for the line", "wait left out", "race", LOAD, "The line is read before its copy is over.", WAIT)
bug(
    "signals",
    "no wait for a free slot",
    "wait left out",
    "race | barrier",
    f"{GET} | async_copy.mbarrier_arrive",
    "The copying warp laps the others.",
    ("        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)\n", ""),
)
bug(
    "signals",
    "released before it is read",
    "slot reused early",
    "race",
    f"{GET} | {LOAD}",
    "The slot is filled again while it is read.",
    ("        mbarrier.arrive(empty.index(slot))\n", ""),
    (f"        {LOAD}\n", f"        mbarrier.arrive(empty.index(slot))\n        {LOAD}\n"),
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
    "fence on the other side",
    "missing fence",
    "missing fence",
    OUT,
    "The fence belongs to the threads that stored, before they arrive.",
    (
        "        fence_async_shared()\n        mbarrier.arrive(ready)\n",
        "        mbarrier.arrive(ready)\n        fence_async_shared()\n",
    ),
)
bug(
    "handoff",
    "no wait for the drained tile",
    "wait left out",
    "race | barrier",
    f"{TILE} | {OUT} | mbarrier.arrive(ready)",
    "The tile is overwritten while TMA reads it.",
    ("        mbarrier.wait(drained, (i & 1) ^ 1)\n", ""),
)
bug(
    "handoff",
    "no wait for the ready tile",
    "wait left out",
    "race | uninitialized | barrier",
    f"{OUT} | {TILE} | mbarrier.arrive(drained) | mbarrier.wait(drained",
    "TMA reads the tile before it is written.",
    ("        mbarrier.wait(ready, i & 1)\n", ""),
)
bug(
    "handoff",
    "no wait for the store",
    "slot reused early",
    "race",
    TILE,
    "Drained is said when the store has begun, not when it has read the tile.",
    ("        tma.store_wait(0)\n", ""),
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
    "drained never said",
    "count",
    "deadlock",
    "mbarrier.wait(drained | mbarrier.wait(ready",
    "Nobody frees the tile.",
    ("        mbarrier.arrive(drained)\n", ""),
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
    "handoff",
    "the storing parity",
    "phase",
    "race | uninitialized | barrier",
    f"{OUT} | {TILE} | mbarrier.wait(ready | mbarrier.wait(drained",
    "The first wait passes at once.",
    ("mbarrier.wait(ready, i & 1)", "mbarrier.wait(ready, (i & 1) ^ 1)"),
)

bug(
    "sums",
    "no fence",
    "missing fence",
    "missing fence",
    "tma_add(y_desc, [0, 0], twice)",
    "TMA may read what was there before.",
    ("    fence_async_shared()\n", ""),
)
bug(
    "sums",
    "no second fence",
    "missing fence",
    "missing fence",
    "tma_add(y_desc, (0, 0), twice)",
    "The second store needs a fence of its own.",
    ("    fence_async_shared()  # again\n", ""),
)
bug(
    "sums",
    "written while it is read",
    "slot reused early",
    "race",
    "twice.store(x)",
    "The first reduction may still read the tile.",
    ("    tma.store_wait(0)\n", ""),
)
bug(
    "sums",
    "no wait at the end",
    "wait left out",
    "unfinished",
    "tma_add(y_desc",
    "The kernel ends while TMA still reads its shared memory.",
    ("    tma.store_wait(0)  # again\n", ""),
)
bug(
    "sums",
    "no wait for the tile",
    "wait left out",
    "race",
    "x = tile.load",
    "The tile is read before TMA has written it.",
    ("    mbarrier.wait(full, 0)\n", ""),
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
    "store without a mask",
    "out of bounds",
    "out of bounds",
    "gl.store(y_ptr",
    "The last tiles reach beyond the matrix.",
    ("y + y, mask=inside)", "y + y)"),
)
bug(
    "tails",
    "one row too many",
    "out of bounds",
    "out of bounds",
    "gl.load(x_ptr",
    "Row number `rows` does not exist.",
    ("row < rows", "row <= rows"),
)
bug(
    "tails",
    "or in place of and",
    "out of bounds",
    "out of bounds",
    "gl.load(x_ptr",
    "A row beyond the end is inside if its column is.",
    (") & (column", ") | (column"),
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
bug(
    "tails",
    "half stored",
    "uninitialized read",
    "uninitialized",
    "y = tile.load",
    "The lower half of the tile is never written.",
    (
        "    tile.store(x)\n",
        "    tile.slice(0, ROWS // 2, dim=0).store(gl.full([ROWS // 2, COLUMNS], 1.0, gl.float32, layout))\n",
    ),
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
