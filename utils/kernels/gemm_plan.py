"""Plans of the Gluon GEMM: the tiles that exist, how a product is cut into items of work, and which plan a product gets.

Nothing here needs Triton or a GPU. A plan is compiled once for each dtype and each order of A and B in memory; the sizes of a
product and its number of parts are arguments of the launch, so that a new shape compiles nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

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
    stages: int  # slots of the ring
    cluster: int = 1  # blocks whose tiles lie below each other: they share B
    short: bool = False  # the kernel for short products: one block a tile, several blocks on an SM
    transposed: bool = False  # the kernel computes C^T = B^T A^T, so that its columns are rows of C
    a_column_major: bool = False
    b_column_major: bool = False

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply; the short kernel has one, the other one for 64 rows."""
        return 1 if self.short else self.block_m // 64

    @property
    def rows(self) -> int:
        """Rows of a consumer."""
        return self.block_m // self.consumers

    @property
    def columns(self) -> int:
        """Columns of the tile's tensors, a power of two: wgmma takes any multiple of 8 columns, Gluon's tensors do not."""
        return 1 << (self.block_n - 1).bit_length()

    @property
    def a_tile(self) -> list[int]:
        """A consumer's rows of A in a slot, as they lie in memory."""
        return [BLOCK_K, self.rows] if self.a_column_major else [self.rows, BLOCK_K]

    @property
    def b_tile(self) -> list[int]:
        """B's columns in a slot, as they lie in memory."""
        return [self.columns, BLOCK_K] if self.b_column_major else [BLOCK_K, self.columns]

    @property
    def brought(self) -> int:
        """Columns of B that TMA brings: whole rows of shared memory, as B may lie there with 64 columns in a row."""
        unit = min(64, self.columns)
        return ceil_div(self.block_n, unit) * unit

    @property
    def b_box(self) -> list[int]:
        """Rows and columns of `b_tile` that one TMA copy brings: all, or of the share of a block as many rows as 64 columns have."""
        whole = self.cluster == 1 and self.columns == self.block_n
        return self.b_tile if whole else [math.gcd(64, self.brought // self.cluster), BLOCK_K]

    @property
    def piece(self) -> list[int]:
        """Rows and columns of a piece of a tile: a consumer stores its rows by pieces, through buffers that take turns."""
        return [self.rows, math.gcd(64, self.block_n)]

    @property
    def boxes(self) -> tuple[list[int], ...]:
        """Rows and columns, as they lie in memory, of one TMA copy of A, B and C."""
        return self.a_tile, self.b_box, self.piece[::-1] if self.transposed else self.piece

    @property
    def pieces(self) -> int:
        """Pieces of a consumer's rows."""
        return self.block_n // self.piece[1]

    @property
    def buffers(self) -> int:
        """Buffers of a consumer for pieces of C; the short kernel has one for each, in the memory of the ring that it has read."""
        return self.pieces if self.short else min(2, self.pieces)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory for the ring and for pieces of C; the short kernel stores C through the ring's memory."""
        ring = self.stages * 2 * (self.block_m + self.columns) * BLOCK_K
        buffers = 2 * self.block_m * self.piece[1] * self.buffers
        return max(ring, buffers) if self.short else ring + buffers

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


PLANS = (
    Plan(64, 32, stages=6, short=True),
    Plan(64, 64, stages=6, short=True),
    Plan(64, 128, stages=4, short=True, transposed=True),
    Plan(128, 128, stages=3, short=True, transposed=True),
    Plan(64, 128, stages=8, cluster=4),
    Plan(128, 128, stages=6, cluster=4, transposed=True),
    Plan(128, 160, stages=4, cluster=4),
    Plan(128, 192, stages=4, cluster=2),
    Plan(128, 192, stages=4, cluster=2, transposed=True),
    Plan(128, 224, stages=4, cluster=2),
    Plan(128, 224, stages=4, cluster=2, transposed=True),
    Plan(128, 256, stages=4, cluster=2),
)


# Constants of a model of the kernels' time, in microseconds: between that of a call with a cold L2 and that of one behind another.
# They were fitted to 946 times at 150 drawn products on an H200, so that the plan chosen takes little longer than the fastest.
LAUNCH = 2.98  # of the persistent kernel, more than of the short one
PRODUCT = 0.63  # of 2**21 multiplications on one SM
BYTES = 0.0187  # of a KB of A and B that each SM reads, where all SMs do
FEW = 0.093  # the power of the share of SMs that run, by which their bytes take less
TILE = 2.54  # of a tile's start and end
LEAVE = 0.196  # of a KB of C whose sums a part leaves
ADD = 0.029  # of a KB of sums that the last part reads


def estimate(m: int, n: int, k: int, plan: Plan, split: int, sms: int) -> float:
    """Estimate the time of a product in microseconds, for a choice between plans.

    A step takes as long as its products or its bytes, whichever is longer. All steps of the busiest SM are one after the other.
    """
    m, n = (n, m) if plan.transposed else (m, n)
    items, once, steps = items_of(m, n, plan, split, sms), clusters_at_once(plan.cluster, sms), ceil_div(k, BLOCK_K)
    whole, parts = ceil_div(items.whole, once), ceil_div(items.rest * items.split, once)
    # The short kernel's blocks share an SM, as its 233472 bytes allow: each takes 1024 more of them than it asks for.
    together = min(whole + parts, 233472 // (plan.shared_bytes + 1024 + 64)) if plan.short else 1
    products = PRODUCT * plan.block_m * plan.block_n * BLOCK_K / 2**21
    busy = min(1.0, items.number * plan.cluster / sms)
    loads = BYTES * busy**FEW * (plan.block_m + plan.brought / plan.cluster) * BLOCK_K / 512
    kb_c = plan.block_m * plan.block_n / 512
    time = 0.0 if plan.short else LAUNCH
    time += (whole * steps + parts * ceil_div(steps, items.split)) * max(products, loads)
    time += (whole + parts) / together * TILE + parts * LEAVE * kb_c
    return time + (ADD * 2 * kb_c / plan.consumers * items.split if items.rest else 0)


def choose(m: int, n: int, k: int, sms: int) -> tuple[Plan, int]:
    """Return the plan with the shortest estimated time, and into how many parts its tiles are cut that fill no round."""
    found = [(plan, split) for plan in PLANS if plan.cluster <= sms for split in SPLITS if split <= max(1, k // 128)]
    return min(found, key=lambda one: estimate(m, n, k, one[0], one[1], sms))
