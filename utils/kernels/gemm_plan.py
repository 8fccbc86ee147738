"""Plans of the Gluon GEMM: the tiles that exist, how a product is cut into items of work, and which plan a product gets.

Nothing here needs Triton or a GPU. A kernel is compiled once for each dtype and each order of A and B in memory; the sizes of a
product, its number of parts and the width of its tiles are arguments of the launch, so that a new shape compiles nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

# Of the 227 that an SM of an H100 or H200 gives a block: barriers take some, and so do two blocks of `add_kernel` beside it.
SHARED_KILOBYTES = 224
BLOCK_K = 64  # 128 bytes of 16-bit elements: one swizzled row of shared memory
STEP = 16  # columns by which tiles of the persistent kernel differ; the narrowest has four times as many
SLOTS = 8  # of a ring, at most
GROUP_M = 16  # rows of tiles that are walked abreast, for the L2
SPLITS = tuple(range(1, 17))  # parts along K of a tile that would leave SMs idle
AT_ONCE = {2: 66, 4: 30}  # clusters of so many blocks on an H100 or H200 with 132 SMs, as the driver says


def ceil_div(x: int, y: int) -> int:
    """Return x / y, rounded up."""
    return -(-x // y)


@dataclass(frozen=True)
class Plan:
    """Tile and cluster of a launch, and how its operands lie in memory; that of the widest tile is what a kernel is compiled for."""

    block_m: int
    block_n: int
    cluster: int = 1  # blocks whose tiles lie below each other: they share B
    short: int = 0  # blocks on an SM of the kernel for short products, one a tile; 0: the persistent kernel
    transposed: bool = False  # the kernel computes C^T = B^T A^T, so that its columns are rows of C
    a_column_major: bool = False
    b_column_major: bool = False

    @property
    def kernel(self) -> Plan:
        """The plan that the kernel is compiled for: that of its widest tile."""
        return self if self.short else self.tile(256)

    def tile(self, width: int) -> Plan:
        """Return the plan of a tile of so many columns."""
        return replace(self, block_n=width)

    def ordered(self, a_column_major: bool, b_column_major: bool) -> Plan:
        """Return the plan for a product whose A and B lie so in memory."""
        a, b = (not b_column_major, not a_column_major) if self.transposed else (a_column_major, b_column_major)
        return replace(self, a_column_major=a, b_column_major=b)

    @property
    def warps(self) -> int:
        """Warps that multiply: four in the short kernel, four for 64 rows in the other."""
        return 4 if self.short else self.block_m // 16

    @property
    def columns(self) -> int:
        """Columns of the tile's tensors, a power of two: wgmma takes any multiple of 8 columns, Gluon's tensors do not."""
        return 1 << (self.block_n - 1).bit_length()

    @property
    def a_tile(self) -> list[int]:
        """A's rows in a slot, as they lie in memory."""
        return [BLOCK_K, self.block_m] if self.a_column_major else [self.block_m, BLOCK_K]

    @property
    def b_tile(self) -> list[int]:
        """B's columns in a slot, as they lie in memory."""
        return [self.columns, BLOCK_K] if self.b_column_major else [BLOCK_K, self.columns]

    @property
    def brought(self) -> int:
        """Columns of B in a slot: 64 lie in a row of shared memory, or 8 of each block of the cluster below each other."""
        unit = 8 * self.cluster if self.b_column_major else min(64, self.columns)
        return ceil_div(self.block_n, unit) * unit

    @property
    def b_box(self) -> list[int]:
        """Rows and columns of `b_tile` that one TMA copy brings: all, or of the share of a block as many rows as 64 columns have."""
        share = self.brought // self.cluster
        return self.b_tile if self.cluster == 1 else [share if self.b_column_major else math.gcd(64, share), BLOCK_K]

    @property
    def piece(self) -> list[int]:
        """Rows and columns of a piece of a tile, which is stored by pieces, through buffers that take turns."""
        return [self.block_m, min(64, self.block_n)]

    @property
    def boxes(self) -> tuple[list[int], ...]:
        """Rows and columns, as they lie in memory, of one TMA copy of A, B, C, and C where a tile ends within a piece."""
        tail = [self.block_m, self.block_n % self.piece[1] or self.piece[1]]
        pieces = (self.piece,) if self.short else (self.piece, tail)
        return self.a_tile, self.b_box, *(piece[::-1] if self.transposed else piece for piece in pieces)

    @property
    def pieces(self) -> int:
        """Pieces of a tile, the last of which may be narrower."""
        return ceil_div(self.block_n, self.piece[1])

    @property
    def buffers(self) -> int:
        """Buffers for pieces of C; the short kernel has one for each, in the memory of the ring that it has read."""
        return self.pieces if self.short else 2

    @property
    def ring_kilobytes(self) -> int:
        """Kilobytes of the kernel's ring. The short kernel stores C through its memory."""
        if self.short:
            return SHARED_KILOBYTES // self.short - 2
        return SHARED_KILOBYTES - self.buffers * self.block_m * self.piece[1] // 512

    @property
    def slots(self) -> int:
        """Slots of the ring, each as large as the tile's operands."""
        return min(SLOTS, 8 * self.ring_kilobytes // (self.block_m + self.brought))

    @property
    def declared(self) -> tuple[list[int], ...]:
        """Boxes that the kernel is compiled for: of the copies of B to a cluster only as many rows as a swizzle has."""
        a, b, *c = self.boxes
        return a, b if self.cluster == 1 else [8, BLOCK_K], *c

    @property
    def name(self) -> str:
        """Name in the records, such as "128x256 2x1": the tile and the cluster."""
        cluster = f" {self.cluster}x1" if self.cluster > 1 else ""
        return f"{'short ' if self.short else ''}{self.block_m}x{self.block_n}{cluster}{' transposed' if self.transposed else ''}"


class Items(NamedTuple):
    """How a product is cut into items of work. A cluster's tiles count as one."""

    number: int  # whole tiles, and parts of the others
    whole: int
    rest: int  # tiles that are cut
    split: int  # into so many parts each


def clusters_at_once(blocks: int, sms: int) -> int:
    """Return how many clusters of so many blocks run at once, a block on each SM.

    A cluster lies within one of the GPU's groups of SMs, which differ in size, so some SMs are left over.
    """
    return AT_ONCE.get(blocks, sms // blocks) if sms == 132 else sms // blocks


def items_of(m: int, n: int, plan: Plan, split: int, sms: int) -> Items:
    """Return how C (m, n) is cut into items of work.

    The tiles that would not fill a round of all SMs are cut; the short kernel, which is for few tiles, cuts all or none.
    """
    tiles = ceil_div(m, plan.block_m * plan.cluster) * ceil_div(n, plan.block_n)
    rest = tiles if plan.short else tiles % clusters_at_once(plan.cluster, sms)
    if split == 1 or not rest:
        return Items(tiles, tiles, 0, 1)
    return Items(tiles - rest + rest * split, tiles - rest, rest, split)


KERNELS = (
    Plan(64, 32, short=3),
    Plan(64, 64, short=2),
    Plan(64, 128, short=2, transposed=True),
    Plan(128, 128, short=2, transposed=True),
    Plan(64, 256, cluster=4),
    Plan(64, 256, cluster=4, transposed=True),
    Plan(128, 256, cluster=4),
    Plan(128, 256, cluster=4, transposed=True),
    Plan(128, 256, cluster=2),
    Plan(128, 256, cluster=2, transposed=True),
)
PLANS = tuple(p.tile(n) for p in KERNELS for n in range(p.block_n if p.short else 4 * STEP, p.block_n + 1, STEP))


# Constants of a model of the kernels' time, in microseconds: between that of a call with a cold L2 and that of one behind another.
# They were fitted to 45,000 times at 1,700 drawn products on an H200, so that the plan chosen takes little longer than the fastest.
LAUNCH = 1.82  # of the persistent kernel, more than of the short one
PRODUCT = 0.87  # of 2**21 multiplications on one SM
ALONE = 0.0452  # of a step, where four warps of the persistent kernel multiply: nothing else is queued while they wait
BYTES = 0.0239  # of a KB of A and B that each SM reads, where all SMs do
FEW = 0.237  # the power of the share of SMs that run, by which their bytes take less
TILE, STORE = 0.892, 0.0114  # of a tile's start and end, and of a KB of it
ADD, READ = 1.01, 0.247  # of the launch that adds up parts, and of a KB of C whose sums each SM leaves and reads


def estimate(m: int, n: int, k: int, plan: Plan, split: int, sms: int) -> float:
    """Estimate the time of a product in microseconds, for a choice between plans.

    A step takes as long as its products or its bytes, and 7% longer where both take as long. The busiest SM takes its steps in turn.
    """
    m, n = (n, m) if plan.transposed else (m, n)
    items, once, steps = items_of(m, n, plan, split, sms), clusters_at_once(plan.cluster, sms), ceil_div(k, BLOCK_K)
    whole, parts = ceil_div(items.whole, once), ceil_div(items.rest * items.split, once)
    products = PRODUCT * plan.block_m * plan.block_n * BLOCK_K / 2**21
    products += 0 if plan.short or plan.warps == 8 else ALONE
    busy = min(1.0, items.number * plan.cluster / sms)
    loads = BYTES * busy**FEW * (plan.block_m + plan.brought / plan.cluster) * BLOCK_K / 512
    kb_c = plan.block_m * plan.block_n / 512
    steps_in_all = whole * steps + parts * ceil_div(steps, items.split)
    time = (0.0 if plan.short else LAUNCH) + steps_in_all * (products**10 + loads**10) ** 0.1
    time += ceil_div(whole + parts, plan.short or 1) * (TILE + STORE * kb_c)
    if items.rest:
        time += ADD + READ * items.rest * items.split * plan.cluster / sms * kb_c
    return time


def choose(m: int, n: int, k: int, a_column_major: bool, b_column_major: bool, sms: int) -> tuple[Plan, int]:
    """Return the plan with the shortest estimated time, and into how many parts its tiles are cut that fill no round."""
    plans = [plan.ordered(a_column_major, b_column_major) for plan in PLANS if plan.cluster <= sms]
    found = [(plan, split) for plan in plans for split in SPLITS if split <= max(1, k // 128)]
    return min(found, key=lambda x: estimate(m, n, k, x[0], x[1], sms))
