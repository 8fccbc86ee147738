"""A configuration of the GEMM's Gluon kernels: its tile, its pipeline, and how blocks share the work. Nothing here needs Triton.

`gemm_plan` lists the configurations, and `gemm_choose` says which one a product gets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from utils.machine.versions import installed_version

SHARED_BYTES = 232448 - 1024  # that an SM of an H100 or H200 gives a block, less what barriers take
# Clusters whose blocks share operands: how many tiles below each other, which share B, and abreast, which share A.
SHAPES = {
    **{"": (1, 1), "B": (2, 1), "A": (1, 2)},
    **{"4x1": (4, 1), "1x4": (1, 4), "2x2": (2, 2), "4x2": (4, 2), "2x4": (2, 4)},
}


@dataclass(frozen=True)
class Config:
    """Tile and pipeline of the kernel, and into how many parts the sums of some tiles are cut."""

    block_m: int
    block_n: int
    consumers: int = 2  # warpgroups that multiply, block_m / consumers rows each
    block_k: int = 64  # 128 bytes of 16-bit elements: one swizzled row of shared memory
    stages: int = 4  # slots of the ring
    pieces: int = 4  # column blocks in which columns[0] of C are stored
    buffers: int = 2  # a consumer's buffers for pieces of C, which take turns; a tile's pieces are a multiple of them
    group_m: int = 8  # rows of tiles that are walked abreast, for the L2
    split: int = 1  # parts along K of a tile that would leave SMs idle: one of SPLITS
    short: bool = False  # the kernel of `gemm_short`: a block a tile, several blocks on an SM
    pairs: bool = False  # a tile has rows of one parity, see `gemm_gluon`: for late rows of a row-major A
    in_cluster: bool = False  # the parts of a tile are a cluster's blocks, which add up their sums in shared memory
    multicast: str = ""  # one of SHAPES: blocks of a cluster share what they read alike, each loads a piece for all
    stream: str = (
        ""  # "A" or "B": half of the lines of that operand are the first to leave the L2 (`gemm_choose.for_l2`)
    )
    early: bool = True  # the launch begins while the one before it in the stream ends
    prefetch: bool = True  # with early: the TMA descriptors are fetched before the wait for the launch before
    lean: bool = True  # without barriers of all warps that Triton puts in and that protect nothing (`gemm_ptx`)
    transposed: bool = False  # the kernel computes the transpose of C, from those of B and A, and stores it as C
    join: bool = True  # products of both parts of the columns are one instruction, where B lies so that they can be
    width: int = 0  # set by `placed`: columns that are multiplied; 0 for all
    pad: bool = (
        False  # set by `placed`: the second part of B comes in blocks of 64 columns, which are not all multiplied
    )
    simulated: bool = False  # for the simulator, which has no clusters and no addresses in shared memory

    @property
    def rows(self) -> int:
        """Rows of a consumer."""
        return self.block_m // self.consumers

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of A and B."""
        return 2

    @property
    def shift(self) -> int:
        """Elements in 16 bytes: with `pairs`, tiles of odd rows begin so many earlier along K."""
        return 16 // self.element_bytes

    @property
    def cluster(self) -> int:
        """Blocks of a cluster: of neighbouring tiles (below each other they share B, abreast A), or of one tile's parts."""
        return self.split if self.in_cluster else self.down * self.abreast

    @property
    def down(self) -> int:
        """Blocks of a cluster with tiles below each other, which share B."""
        return SHAPES[self.multicast][0]

    @property
    def abreast(self) -> int:
        """Blocks of a cluster with tiles abreast, which share A."""
        return SHAPES[self.multicast][1]

    @property
    def on_clusters(self) -> bool:
        """Whether blocks are launched in clusters."""
        return (self.multicast != "" or self.in_cluster) and not self.simulated

    @property
    def rewritten(self) -> bool:
        """Whether the kernel's PTX is rewritten before it is assembled (`gemm_ptx.adapted`)."""
        return bool(
            self.on_clusters or self.stream or self.prefetch or self.lean or self.join or 0 < self.width < self.block_n
        )

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Rows and columns of C that a cluster computes at a time."""
        return self.block_m * self.down, self.block_n * self.abreast

    def sharers(self, operand: str) -> int:
        """Return how many blocks read the same tile of an operand, "A" or "B", each of them a piece of it for all; "C" is one's own."""
        return {"A": self.abreast, "B": self.down}.get(operand, 1)

    def box(self, operand: str, rows: int, columns: int, transposed: bool = False) -> list[int]:
        """Box that one TMA copy of an operand brings: rows and columns of a matrix, or a piece of them, as they lie in memory.

        In shared memory rows of at most 128 bytes follow each other, so the pieces of a tile are pieces of its rows.
        Longer rows lie there as blocks of 128 bytes side by side, so the pieces are such blocks, or pieces of their rows.
        """
        box = [columns, rows] if transposed else [rows, columns]
        pieces = self.sharers(operand)
        abreast = min(pieces, max(1, box[1] * self.element_bytes // 128))
        return [box[0] * abreast // pieces, box[1] // abreast]

    @property
    def tile(self) -> tuple[int, int, str, bool, bool, bool, bool]:
        """What makes a tile another one in a search: its size, its cluster, its direction, its kernel, and its rows' parity."""
        cluster = "" if self.in_cluster else self.multicast
        return self.block_m, self.block_n, cluster, self.in_cluster, self.transposed, self.short, self.pairs

    @property
    def columns(self) -> tuple[int, int]:
        """Columns of the tile as powers of two, which Gluon's tiles must be: (256, 0), or (128, 64) for 192.

        With three consumers ptxas refuses a product of 256 columns at once: its sums alone take 128 registers.
        """
        first = 1 << self.block_n.bit_length() - 1
        first = min(first, 128) if self.consumers == 3 else first
        return first, self.block_n - first

    @property
    def can_join(self) -> bool:
        """Whether the columns are two parts whose products can be one instruction.

        A slot's first part is then seen as a view that is larger than what it is a view of, which Triton 3.9 refuses.
        """
        views_may_be_larger = (installed_version("triton") or (3, 8)) < (3, 9)
        return 0 < self.columns[1] < self.columns[0] and self.block_n <= 256 and views_may_be_larger

    @property
    def brought(self) -> int:
        """Columns of B that come with the second part of the columns: more than are multiplied with `pad`."""
        return max(64, self.columns[1]) if self.pad else self.columns[1]

    def width_at(self, n: int) -> int:
        """Columns that are multiplied where C has n columns: where one tile is wider than C, as few as C needs, in steps of 16."""
        return min(self.block_n, -(-n // 16) * 16) if self.one_product else self.block_n

    @property
    def one_product(self) -> bool:
        """Whether a step's product of all columns is one instruction, or can be made one."""
        return self.columns[1] == 0 or (self.join and self.can_join)

    def placed(self, n: int, b_along_k: bool, simulated: bool = False) -> Self:
        """Return this configuration as it is launched, with what the instructions need to know (`gemm_ptx.other_products`).

        Products of both parts of the columns become one instruction, if the parts of B follow each other in shared memory as
        one tile would lie there: in rows of 128 bytes along K, or in blocks of 64 columns. If that takes more memory than
        there is, the ring has fewer slots. A first part that is one block of 64 columns stays apart there: Triton does not
        write into its descriptors how far the next block is.

        Args:
            n: columns of C; of its transpose, if that is computed.
            b_along_k: whether B's neighbours in memory are neighbours along K, not columns.
            simulated: whether the simulator runs the kernel.
        """
        blocks = self.columns[0] > 64 or b_along_k
        join = self.join and self.can_join and blocks and not simulated
        pad = join and not b_along_k and self.columns[1] % 64 > 0
        width = 0 if simulated or (self.columns[1] and not join) else self.width_at(n)
        in_cluster = self.in_cluster and not simulated  # the simulator adds the parts up as they are without clusters
        stream = "" if simulated else self.stream
        config = replace(
            self, join=join, pad=pad, width=width, simulated=simulated, in_cluster=in_cluster, stream=stream
        )
        while config.shared_bytes > SHARED_BYTES and config.stages > 2:
            config = replace(config, stages=config.stages - 1)
        return config

    @property
    def piece(self) -> list[int]:
        """Rows and columns of a piece of C."""
        return [self.rows, self.columns[0] // self.pieces]

    @property
    def registers(self) -> int:
        """Registers of a consumer thread; three consumers and a producer of 32 share the 65536 of an SM."""
        return 160 if self.consumers == 3 else 232

    @property
    def slot_bytes(self) -> int:
        """Bytes of A and B in a slot of the ring."""
        return (self.block_m + self.columns[0] + self.brought) * self.block_k * self.element_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory for ring and pieces of C, in bytes; an SM of an H100 or H200 gives a block 232448."""
        ring = self.stages * self.slot_bytes
        if self.short:  # C goes through the ring's memory when its last slot has been read
            return max(ring, 2 * self.block_m * self.block_n)
        sums = 4 * self.block_m * self.block_n if self.in_cluster else 0
        return ring + sums + self.buffers * self.block_m * self.piece[1] * 2

    @property
    def blocks(self) -> int:
        """Blocks on an SM, by shared memory: 233472 bytes, of which each block takes 1024 more than it asks for."""
        return 233472 // (self.shared_bytes + 1024 + 64)

    @property
    def name(self) -> str:
        """Name in the records, such as "128x256/4": tile and parts."""
        kind, rows = "short " if self.short else "", " pairs" if self.pairs else ""
        both = f" both {self.multicast}" if self.multicast in ("A", "B") else f" {self.multicast}" * (self.cluster > 1)
        both = "" if self.in_cluster else both
        turned = "T " if self.transposed else ""
        apart = " apart" if self.can_join and not self.join else ""
        waiting = "" if self.early else " waiting"
        parts = f"{self.split} cluster" if self.in_cluster else self.split
        slots = f" {self.stages} slots" if self.stages > 8 else ""
        stream = f" streams {self.stream}" if self.stream else ""
        return f"{turned}{kind}{self.block_m}x{self.block_n}/{parts}{rows}{both}{slots}{apart}{waiting}{stream}"
