"""Plans of the Gluon GEMM: the table of tiles, the items of work of a product, and the choice of a plan for a product.

This module needs neither Triton nor a GPU. A kernel is compiled once for each dtype and each order of A and B in memory. The sizes of
a product, its number of parts and the width of its tiles are arguments of the launch, so a new shape compiles nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

# A block of an H100 or H200 can have 227. The others are for barriers, and for two blocks of `add_kernel` on the same SM.
SHARED_KILOBYTES = 224
BLOCK_K = 64  # 128 bytes of 16-bit elements: one swizzled row of shared memory
STEP = 16  # the width of the persistent kernel's tiles is a multiple of this, from 64 columns on
SLOTS = 8  # a ring has at most this number of slots
GROUP_M = 16  # rows of tiles that are computed together, because they share data in the L2
SPLITS = tuple(range(1, 17))  # numbers of parts, along K, of a tile that would leave SMs idle
AT_ONCE = {2: 66, 4: 30}  # {blocks of a cluster: clusters that run at once on 132 SMs}, from the driver


def ceil_div(x: int, y: int) -> int:
    """Return x / y, rounded up."""
    return -(-x // y)


@dataclass(frozen=True)
class Plan:
    """Tile and cluster of a launch, and the order of its operands in memory. A kernel is compiled for the plan of its widest tile."""

    block_m: int
    block_n: int
    cluster: int = 1  # blocks of a cluster; their tiles lie below each other, and they share B
    short: int = 0  # the short kernel runs this number of blocks on an SM, each with one tile; 0: the persistent kernel
    transposed: bool = False  # the kernel computes C^T = B^T A^T, so that its columns are rows of C
    a_column_major: bool = False
    b_column_major: bool = False

    @property
    def kernel(self) -> Plan:
        """The plan for which the kernel is compiled: the plan of its widest tile."""
        return self if self.short else self.tile(256)

    def tile(self, width: int) -> Plan:
        """Return the plan with a tile of `width` columns."""
        return replace(self, block_n=width)

    def with_order(self, a_column_major: bool, b_column_major: bool) -> Plan:
        """Return the plan for this order of A and B in memory."""
        a, b = (not b_column_major, not a_column_major) if self.transposed else (a_column_major, b_column_major)
        return replace(self, a_column_major=a, b_column_major=b)

    @property
    def warps(self) -> int:
        """Number of warps that multiply: four in the short kernel, four for each 64 rows in the persistent kernel."""
        return 4 if self.short else self.block_m // 16

    @property
    def columns(self) -> int:
        """Number of columns of the tile's tensors. Gluon needs a power of two, while wgmma takes any multiple of 8."""
        return 1 << (self.block_n - 1).bit_length()

    @property
    def a_tile(self) -> list[int]:
        """Rows and columns of A's part of a slot, in the order of memory."""
        return [BLOCK_K, self.block_m] if self.a_column_major else [self.block_m, BLOCK_K]

    @property
    def b_tile(self) -> list[int]:
        """Rows and columns of B's part of a slot, in the order of memory."""
        return [self.columns, BLOCK_K] if self.b_column_major else [BLOCK_K, self.columns]

    @property
    def b_columns(self) -> int:
        """Number of B's columns in a slot: block_n, rounded up to whole copies."""
        unit = 8 * self.cluster if self.b_column_major else min(64, self.columns)
        return ceil_div(self.block_n, unit) * unit

    @property
    def b_box(self) -> list[int]:
        """Rows and columns of `b_tile` in one TMA copy: all, or in a cluster a block's share, in steps of at most 64 columns of B."""
        share = self.b_columns // self.cluster
        return self.b_tile if self.cluster == 1 else [share if self.b_column_major else math.gcd(64, share), BLOCK_K]

    @property
    def piece(self) -> list[int]:
        """Rows and columns of a piece of a tile. Pieces are stored one after the other, through buffers in turn."""
        return [self.block_m, min(64, self.block_n)]

    @property
    def boxes(self) -> tuple[list[int], ...]:
        """Rows and columns of the TMA copies of A, B, a piece of C, and a tile's last piece of C, in the order of memory."""
        tail = [self.block_m, self.block_n % self.piece[1] or self.piece[1]]
        pieces = (self.piece,) if self.short else (self.piece, tail)
        return self.a_tile, self.b_box, *(piece[::-1] if self.transposed else piece for piece in pieces)

    @property
    def pieces(self) -> int:
        """Number of pieces of a tile. The last piece may be narrower."""
        return ceil_div(self.block_n, self.piece[1])

    @property
    def buffers(self) -> int:
        """Number of buffers for pieces of C. The short kernel has a buffer for each piece, in the memory of its ring."""
        return self.pieces if self.short else 2

    @property
    def ring_kilobytes(self) -> int:
        """Kilobytes of the kernel's ring. The short kernel stores C through the ring, and the persistent kernel through buffers."""
        if self.short:
            return SHARED_KILOBYTES // self.short - 2
        return SHARED_KILOBYTES - self.buffers * self.block_m * self.piece[1] // 512

    @property
    def slots(self) -> int:
        """Number of slots of the ring. A slot has the size of the tile's operands."""
        return min(SLOTS, 8 * self.ring_kilobytes // (self.block_m + self.b_columns))

    @property
    def compiled_boxes(self) -> tuple[list[int], ...]:
        """Boxes for which the kernel is compiled. In a cluster the rows of B's box vary, and the kernel knows 8 rows, a swizzle's."""
        a, b, *c = self.boxes
        return a, b if self.cluster == 1 else [8, BLOCK_K], *c

    @property
    def name(self) -> str:
        """Name in the records, such as "128x256 2x1": the tile and the cluster."""
        cluster = f" {self.cluster}x1" if self.cluster > 1 else ""
        return f"{'short ' if self.short else ''}{self.block_m}x{self.block_n}{cluster}{' transposed' if self.transposed else ''}"


class Items(NamedTuple):
    """The items of work of a product. The tiles of a cluster count as one."""

    number: int  # whole tiles and parts together
    whole: int  # tiles that stay whole
    rest: int  # tiles that are cut into parts
    split: int  # parts of each tile that is cut


def clusters_at_once(blocks: int, sms: int) -> int:
    """Return how many clusters of `blocks` blocks run at once, with a block on each SM.

    A cluster lies within one group of the GPU's SMs. The groups differ in size, so some SMs stay idle.
    """
    return AT_ONCE.get(blocks, sms // blocks) if sms == 132 else sms // blocks


def items_of(m: int, n: int, plan: Plan, split: int, sms: int) -> Items:
    """Return the items of work of a product C (m, n).

    The persistent kernel cuts the tiles that would not fill a round of all SMs. The short kernel cuts all tiles, or none.
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


# Constants of a model of the kernels' time, in microseconds. The model lies between calls with a cold L2 and calls back to back.
# The constants were fitted to 45,000 times of 1,700 drawn products on an H200: the chosen plan takes little longer than the fastest.
LAUNCH = 1.82  # time by which a launch of the persistent kernel is longer than a launch of the short kernel
PRODUCT = 0.87  # time of 2**21 multiplications on one SM
ALONE = 0.0452  # further time of a step, if only four warps of the persistent kernel multiply: no other product runs while they wait
BYTES = 0.0239  # time of a KB of A and B on each SM, if all SMs read
FEW = 0.237  # if a share of the SMs reads, the time of a KB is multiplied by this power of the share
TILE, STORE = 0.892, 0.0114  # time of a tile's start and end, and further time of each KB of the tile
ADD, READ = 1.01, 0.247  # time of the launch that adds up parts, and of a KB of sums that each SM writes and reads


def estimate(m: int, n: int, k: int, plan: Plan, split: int, sms: int) -> float:
    """Estimate the time of a product in microseconds, to compare plans.

    A step takes as long as its products or its bytes, and 7% longer if both take the same time. The busiest SM's steps are added up.
    """
    m, n = (n, m) if plan.transposed else (m, n)
    items, once, steps = items_of(m, n, plan, split, sms), clusters_at_once(plan.cluster, sms), ceil_div(k, BLOCK_K)
    whole, parts = ceil_div(items.whole, once), ceil_div(items.rest * items.split, once)
    products = PRODUCT * plan.block_m * plan.block_n * BLOCK_K / 2**21
    products += 0 if plan.short or plan.warps == 8 else ALONE
    busy = min(1.0, items.number * plan.cluster / sms)
    loads = BYTES * busy**FEW * (plan.block_m + plan.b_columns / plan.cluster) * BLOCK_K / 512
    kb_c = plan.block_m * plan.block_n / 512
    steps_in_all = whole * steps + parts * ceil_div(steps, items.split)
    time = (0.0 if plan.short else LAUNCH) + steps_in_all * (products**10 + loads**10) ** 0.1
    time += ceil_div(whole + parts, plan.short or 1) * (TILE + STORE * kb_c)
    if items.rest:
        time += ADD + READ * items.rest * items.split * plan.cluster / sms * kb_c
    return time


def choose(m: int, n: int, k: int, a_column_major: bool, b_column_major: bool, sms: int) -> tuple[Plan, int]:
    """Return the plan with the shortest estimated time, and the number of parts of the tiles that are cut (`items_of`)."""
    plans = [plan.with_order(a_column_major, b_column_major) for plan in PLANS if plan.cluster <= sms]
    candidates = [(plan, split) for plan in plans for split in SPLITS if split <= max(1, k // 128)]
    return min(candidates, key=lambda x: estimate(m, n, k, x[0], x[1], sms))
