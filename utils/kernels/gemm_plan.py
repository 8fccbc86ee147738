"""Plans of the Gluon GEMM: the tiles that exist, how a product is cut into items of work, and which plan a product gets.

Nothing here needs Triton or a GPU. A plan is compiled once for each dtype and each order of A and B in memory; the sizes of a
product and its number of parts are arguments of the launch, so that a new shape compiles nothing.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

SHARED_BYTES = 232448 - 1024  # that an SM of an H100 or H200 gives a block, less what barriers take
BLOCK_K = 64  # 128 bytes of 16-bit elements: one swizzled row of shared memory
GROUP_M = 8  # rows of tiles that are walked abreast, for the L2
SPLITS = (1, 2, 3, 4, 6, 8)  # parts along K of a tile that would leave SMs idle
AT_ONCE = {2: 66, 4: 30, 8: 15}  # clusters of so many blocks on an H100 or H200 with 132 SMs, as the driver says


def ceil_div(x: int, y: int) -> int:
    """Return x / y, rounded up."""
    return -(-x // y)


@dataclass(frozen=True)
class Plan:
    """Tile and pipeline of a kernel, and how its operands lie in memory. With the dtype it is all that a kernel is compiled for."""

    block_m: int
    block_n: int
    stages: int = 4  # slots of the ring
    down: int = 1  # blocks of a cluster whose tiles lie below each other: they share B
    abreast: int = 1  # blocks of a cluster whose tiles lie side by side: they share A; only one of both is more than 1
    short: bool = False  # the kernel for short products: one block a tile, several blocks on an SM
    a_column_major: bool = False
    b_column_major: bool = False

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.down * self.abreast

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply; the short kernel has one, the other one for 64 rows."""
        return 1 if self.short else self.block_m // 64

    @property
    def rows(self) -> int:
        """Rows of a consumer."""
        return self.block_m // self.consumers

    @property
    def a_tile(self) -> list[int]:
        """A consumer's rows of A in a slot, as they lie in memory."""
        return [BLOCK_K, self.rows] if self.a_column_major else [self.rows, BLOCK_K]

    @property
    def columns(self) -> int:
        """Columns of the tile's tensors, a power of two: wgmma takes any multiple of 8 columns, Gluon's tensors do not."""
        return 1 << (self.block_n - 1).bit_length()

    @property
    def b_tile(self) -> list[int]:
        """B's columns in a slot, as they lie in memory."""
        return [self.columns, BLOCK_K] if self.b_column_major else [BLOCK_K, self.columns]

    @property
    def b_times(self) -> int:
        """Copies that bring B's tile: of a width between powers of two 64 columns each, since no tensor is as wide."""
        return 1 if self.columns == self.block_n else ceil_div(self.block_n, BLOCK_K)

    @property
    def a_box(self) -> list[int]:
        """Rows and columns of `a_tile` that one TMA copy brings."""
        return _piece(self.a_tile, self.abreast)

    @property
    def b_box(self) -> list[int]:
        """Rows and columns of `b_tile` that one TMA copy brings."""
        return _piece(self.b_tile if self.b_times == 1 else [BLOCK_K, BLOCK_K], self.down)

    @property
    def piece(self) -> list[int]:
        """Rows and columns of a piece of a tile: a consumer stores its rows by pieces, through buffers that take turns."""
        return [self.rows, 32 if self.consumers == 3 else math.gcd(64, self.block_n)]

    @property
    def pieces(self) -> int:
        """Pieces of a consumer's rows."""
        return self.block_n // self.piece[1]

    @property
    def buffers(self) -> int:
        """Buffers of a consumer for pieces of C; the short kernel has one for each, in the memory of the ring that it has read."""
        return self.pieces if self.short else min(2, self.pieces)

    @property
    def worker_warps(self) -> list[int]:
        """Warps of all roles but the first consumer: the other consumers, the producer, and warps without a role."""
        return [4] * (self.consumers - 1) + [1, 1, 2]

    @property
    def worker_registers(self) -> list[int]:
        """Registers of a thread of each of these roles; three consumers and a producer of 32 share the 65536 of an SM."""
        consumer, rest = (160, 32) if self.consumers == 3 else (232, 24)
        return [consumer] * (self.consumers - 1) + [rest] * 3

    @property
    def slot_bytes(self) -> int:
        """Bytes of A and B that TMA brings for a slot of the ring."""
        return 2 * (self.block_m + (self.columns if self.b_times == 1 else self.b_times * BLOCK_K)) * BLOCK_K

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory for the ring and for pieces of C; the short kernel stores C through the ring's memory."""
        ring = self.stages * 2 * (self.block_m + self.columns) * BLOCK_K
        return max(ring, 2 * self.block_m * self.block_n) if self.short else ring + 4 * self.block_m * self.piece[1]

    @property
    def name(self) -> str:
        """Name in the records, such as "128x256 2x1": the tile and the cluster."""
        cluster = f" {self.down}x{self.abreast}" if self.cluster > 1 else ""
        return f"{'short ' if self.short else ''}{self.block_m}x{self.block_n}{cluster}"


def _piece(tile: list[int], blocks: int) -> list[int]:
    """Return the piece of a tile that each of the blocks that share it fetches for all.

    In shared memory rows of at most 128 bytes follow each other, so the pieces are pieces of the tile's rows. Longer rows lie
    there as blocks of 128 bytes side by side, so the pieces are such blocks, or pieces of their rows.
    """
    abreast = min(blocks, max(1, tile[1] * 2 // 128))
    return [tile[0] * abreast // blocks, tile[1] // abreast]


@dataclass(frozen=True)
class Items:
    """How a product is cut: tiles that are computed whole, the rest of them, and into how many parts each of the rest is cut."""

    whole: int  # a cluster's tiles count as one
    rest: int
    split: int

    @property
    def number(self) -> int:
        """Items of work: whole tiles, and parts of the others."""
        return self.whole + self.rest * self.split


def clusters_at_once(blocks: int, sms: int) -> int:
    """Return how many clusters of so many blocks run at once, a block on each SM.

    A cluster lies within one of the GPU's groups of SMs, which differ in size, so some SMs are left over.
    """
    return AT_ONCE.get(blocks, sms // blocks) if sms == 132 else sms // blocks


def items_of(m: int, n: int, plan: Plan, split: int, sms: int) -> Items:
    """Return how C (m, n) is cut into items of work.

    The tiles that would not fill a round of all SMs are cut; the short kernel, which is for few tiles, cuts all or none.
    """
    tiles = ceil_div(m, plan.block_m * plan.down) * ceil_div(n, plan.block_n * plan.abreast)
    rest = tiles if plan.short else tiles % clusters_at_once(plan.cluster, sms)
    return Items(tiles - rest, rest, split) if split > 1 and rest else Items(tiles, 0, 1)


PLANS = (
    Plan(64, 32, stages=6, short=True),
    Plan(64, 64, stages=6, short=True),
    Plan(64, 128, stages=8, short=True),
    Plan(128, 128, stages=3, short=True),
    Plan(64, 128, stages=8, down=4),
    Plan(128, 128, stages=6, down=4),
    Plan(192, 128, stages=5, abreast=2),
    Plan(128, 256, stages=4, down=2),
)


# Constants of a model of the kernels' time, in microseconds: between that of a call with a cold L2 and that of one behind another.
# They were fitted to 2,552 times at 355 drawn products on an H200, so that the plan chosen takes little longer than the fastest.
LAUNCH, SHORT_LAUNCH = 3.92, 1.85  # of a kernel, and of the short kernel
PRODUCT = 0.539  # of 2**21 multiplications on one SM
BYTES = 0.015  # of a KB of A and B that each SM reads
SHARED = 0.442  # how many times a byte counts where two blocks share it; squared: four
TILE = 0.57  # of a tile's start and end
LEAVE = 0.125  # of a KB of C whose sums a part leaves
PART = 1.52  # of counting parts
ADD = 0.0112  # of a KB of sums that the last part reads
WORK = 0.003  # of 2**21 multiplications, an SM's share of all: where the busiest SM has as much to do, less work in all is faster


def estimate(m: int, n: int, k: int, plan: Plan, split: int, sms: int) -> float:
    """Estimate the time of a product in microseconds, for a choice between plans.

    A step takes as long as its products or its bytes, whichever is longer; a little longer where they are alike. All steps of the
    busiest SM are one after the other.
    """
    items, once, steps = items_of(m, n, plan, split, sms), clusters_at_once(plan.cluster, sms), ceil_div(k, BLOCK_K)
    whole, parts = ceil_div(items.whole, once), ceil_div(items.rest * items.split, once)
    # The short kernel's blocks share an SM, as its 233472 bytes allow: each takes 1024 more of them than it asks for.
    together = min(whole + parts, 233472 // (plan.shared_bytes + 1024 + 64)) if plan.short else 1
    rounds, all_steps = (whole + parts) / together, (whole * steps + parts * ceil_div(steps, items.split)) / together
    kb_a = plan.block_m * BLOCK_K / 512 * SHARED ** math.log2(plan.abreast)
    kb_b = plan.block_n * BLOCK_K / 512 * SHARED ** math.log2(plan.down)
    products = plan.block_m * plan.block_n * BLOCK_K / 2**21
    step = together * ((PRODUCT * products) ** 6 + (BYTES * (kb_a + kb_b)) ** 6) ** (1 / 6)
    kb_c = plan.block_m * plan.block_n / 512
    time = SHORT_LAUNCH if plan.short else LAUNCH
    time += all_steps * step + rounds * TILE + parts * LEAVE * kb_c
    time += WORK * products * steps * (items.whole + items.rest) * plan.cluster / sms
    return time + (PART + ADD * 2 * kb_c / plan.consumers * items.split if items.rest else 0)


def choose(m: int, n: int, k: int, sms: int) -> tuple[Plan, int, bool]:
    """Return the plan with the shortest estimated time, in how many parts tiles are that fill no round, and whether C is transposed."""
    splits = [split for split in SPLITS if split <= max(1, k // 128)]
    plans = [plan for plan in PLANS if plan.cluster <= sms]
    found = itertools.product(plans, splits, (False, True))
    return min(found, key=lambda one: estimate(*((n, m) if one[2] else (m, n)), k, one[0], one[1], sms))
