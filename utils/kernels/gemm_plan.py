"""Which tile, in how many parts, by which of the two Gluon kernels: the GEMM's configurations.

`gemm_model.choose` takes the one that a model of the time ranks first. Nothing here needs Triton.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from utils.machine.versions import installed_version

SHARED_BYTES = 232448 - 1024  # that an SM of an H100 or H200 gives a block, less what barriers take


def _ceil(x: int, y: int) -> int:
    return -(-x // y)


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
    split: int = (
        1  # parts along K of a tile that would leave SMs idle: one of SPLITS; EVEN for equal shares of all steps
    )
    short: bool = False  # the kernel of `gemm_short`: a block a tile, several blocks on an SM
    pairs: bool = False  # a tile has rows of one parity, see `gemm_gluon`: for late rows of a row-major A
    in_cluster: bool = False  # the parts of a tile are a cluster's blocks, which add up their sums in shared memory
    multicast: str = ""  # one of SHAPES: blocks of a cluster share what they read alike, each loads a piece for all
    early: bool = True  # the launch begins while the one before it in the stream ends
    prefetch: bool = True  # with early: the TMA descriptors are fetched before the wait for the launch before
    lean: bool = True  # without barriers of all warps that Triton puts in and that protect nothing (`gemm_ptx`)
    spread: bool = (
        False  # tiles begin at 16 different places along K, so that not all blocks read the same lines at once
    )
    transposed: bool = False  # the kernel computes the transpose of C, from those of B and A, and stores it as C
    join: bool = True  # products of both parts of the columns are one instruction, where B lies so that they can be
    width: int = 0  # set by `placed`: columns that are multiplied; 0 for all
    pad: bool = (
        False  # set by `placed`: the second part of B comes in blocks of 64 columns, which are not all multiplied
    )
    simulated: bool = False  # for the simulator, which has no clusters and no addresses in shared memory

    @property
    def even(self) -> bool:
        """Whether the steps of the tiles that fill no round are shared evenly among all SMs, wherever tiles begin."""
        return self.split == EVEN

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
        return self.on_clusters or self.prefetch or self.lean or self.join or 0 < self.width < self.block_n

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
        return min(self.block_n, _ceil(n, 16) * 16) if self.one_product else self.block_n

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
        config = replace(self, join=join, pad=pad, width=width, simulated=simulated, in_cluster=in_cluster)
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
        turned += "spread " if self.spread else ""
        apart = " apart" if self.can_join and not self.join else ""
        waiting = "" if self.early else " waiting"
        parts = "even" if self.even else f"{self.split} cluster" if self.in_cluster else self.split
        slots = f" {self.stages} slots" if self.stages > 8 else ""
        return f"{turned}{kind}{self.block_m}x{self.block_n}/{parts}{rows}{both}{slots}{apart}{waiting}"


AnyConfig = TypeVar("AnyConfig", bound=Config)

# Smaller tiles re-read A and B more often, but give small matrices enough tiles for all SMs. Among tiles that the model
# holds to be equal the first is taken: 64 x 128 was faster than 128 x 64 wherever both were measured.
CONFIGS = (
    Config(128, 256),
    Config(128, 128, stages=6, pieces=2),
    Config(256, 128),
    Config(256, 192, stages=3),
    Config(128, 192, stages=5),
    Config(192, 192, consumers=3),
    Config(192, 256, consumers=3, stages=3),
    Config(192, 128, consumers=3, stages=5),
    Config(64, 256, consumers=1, stages=5),
    Config(64, 128, consumers=1, stages=8, pieces=2),
    Config(128, 64, stages=8, pieces=2),
    Config(64, 64, consumers=1, stages=8, pieces=2),
    Config(64, 96, consumers=1, stages=8),
)
# Widths between powers of two: C's edge fits better, and so does the number of tiles to that of SMs.
WIDTHS = (
    Config(64, 80, consumers=1, stages=8, buffers=5),
    Config(64, 144, consumers=1, stages=8, pieces=8, buffers=3),
    Config(64, 160, consumers=1, stages=7, buffers=5),
    Config(128, 80, stages=7, buffers=5),
    Config(128, 96, stages=7, pieces=2, buffers=3),
    Config(128, 144, stages=6, pieces=8, buffers=3),
    Config(128, 160, stages=5, buffers=5),
    Config(192, 144, consumers=3, stages=4, pieces=8, buffers=3),
    Config(192, 160, consumers=3, stages=4, pieces=8, buffers=5),
    Config(256, 144, stages=4, pieces=8, buffers=3),
    Config(256, 160, stages=4, pieces=8),
)
# As many slots as there is memory for: where few bytes of a step are on their way, a step waits for them.
DEEP = (
    Config(64, 64, consumers=1, stages=13, pieces=2),
    Config(64, 80, consumers=1, stages=11, buffers=5),
    Config(64, 96, consumers=1, stages=11),
)
SHORT_CONFIGS = (
    Config(64, 32, consumers=1, pieces=1, stages=4, short=True),
    Config(64, 64, consumers=1, pieces=1, stages=4, short=True),
    Config(64, 128, consumers=1, pieces=1, stages=4, short=True),
    Config(128, 64, consumers=1, pieces=1, stages=4, short=True),
    Config(128, 128, consumers=1, pieces=1, stages=3, short=True),
)
# Clusters whose blocks share operands: how many tiles below each other, which share B, and abreast, which share A.
SHAPES = {
    **{"": (1, 1), "B": (2, 1), "A": (1, 2)},
    **{"4x1": (4, 1), "1x4": (1, 4), "2x2": (2, 2), "4x2": (4, 2), "2x4": (2, 4)},
}
SPLITS = (1, 2, 3, 4, 6, 8, 16)
EVEN = 0
LEAST_SHARE = 4  # steps of an SM
LARGER = tuple(shape for shape, (down, abreast) in SHAPES.items() if down * abreast > 2)
AT_ONCE = {3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}  # clusters of so many blocks on an H200 with 132 SMs
MOST_IN_CLUSTER = 8  # blocks of a cluster that every GPU with clusters can run


FEW = 512  # rows or columns: one or a few columns of tiles, whose blocks all read the same lines


def most_parts(config: Config) -> int:
    """Return how many parts a tile may have: where tiles are large, many cost more to add up than they gain."""
    size = config.block_m * config.block_n
    return 16 if size <= 8192 else 8 if size == 16384 else 4


def parts_of(m: int, n: int, config: Config, sms: int) -> tuple[int, int]:
    """Return how many tiles are computed whole, and how many in parts; a cluster's tiles count as one.

    Those that would not fill a round of all SMs are; the short kernel, which is for few tiles, cuts all or none. A tile
    that a cluster computes in parts counts as whole.
    """
    rows, columns = config.cluster_tile
    tiles = (2 * _ceil(m // 2, rows) if config.pairs else _ceil(m, rows)) * _ceil(n, columns)
    if config.split == 1 or config.in_cluster:
        return tiles, 0
    rest = tiles if config.short else tiles % clusters_at_once(config.cluster, sms)
    return tiles - rest, rest


def in_parts(configs: Iterable[AnyConfig], m: int, n: int, k: int, sms: int) -> list[AnyConfig]:
    """Return each configuration whole, and where some rounds are not full, in parts of two steps at least."""
    found = []
    for config in configs:
        found.append(config)
        if not parts_of(m, n, replace(config, split=2), sms)[1]:
            continue  # every round is full
        most = min(most_parts(config), _ceil(k, config.block_k) // 2)
        found += [replace(config, split=split) for split in SPLITS if 1 < split <= most]
    return found


def in_shares(configs: Iterable[AnyConfig], m: int, n: int, k: int, sms: int) -> list[AnyConfig]:
    """Return configurations whose last tiles are shared evenly, where that gives each SM some steps.

    Measured as slower (docs/gemm-log.md, entry 34), and no candidates. Adding shares up, the largest tiles spill.
    """
    found = [replace(x, split=EVEN) for x in configs if not x.short and x.rows * x.block_n <= 18432]
    found = [x for x in found if x.consumers < 3 or x.block_n < 192]
    return [
        x
        for x in found
        if parts_of(m, n, x, sms)[1] * _ceil(k, x.block_k) >= LEAST_SHARE * clusters_at_once(x.cluster, sms)
    ]


def clusters_at_once(blocks: int, sms: int) -> int:
    """Return how many clusters of so many blocks run at once, a block on each SM.

    A cluster lies within one of the GPU's groups of SMs, which differ in size, so some SMs are left over. The driver says how
    many there are (`tools.record.clusters_at_once`, on an H200); one cluster more is a second round.
    """
    return AT_ONCE.get(blocks, sms // blocks) if sms == 132 else sms // blocks


def in_clusters(configs: Iterable[AnyConfig], m: int, n: int, k: int, sms: int) -> list[AnyConfig]:
    """Return configurations whose tiles are computed by a cluster each, in parts of two steps at least, all tiles at once."""
    found = []
    for config in configs:
        if config.short or config.multicast:
            continue
        for split in range(2, min(MOST_IN_CLUSTER, _ceil(k, config.block_k) // 2) + 1):
            clustered = as_cluster(config, split)
            tiles = parts_of(m, n, clustered, sms)[0]
            if clustered.shared_bytes <= SHARED_BYTES and tiles <= clusters_at_once(split, sms):
                found.append(clustered)
    return found


def as_cluster(config: AnyConfig, split: int) -> AnyConfig:
    """Return a configuration whose tiles are computed by clusters, with fewer slots where the sums need the memory."""
    # Column blocks of 16 columns, so that there is one or more for most blocks of the cluster.
    clustered = replace(config, split=split, in_cluster=True, pieces=config.columns[0] // 16, buffers=1)
    while clustered.shared_bytes > SHARED_BYTES and clustered.stages > 3:
        clustered = replace(clustered, stages=clustered.stages - 1)
    return clustered


def items_of(m: int, n: int, config: Config, sms: int) -> int:
    """Return how many items of work there are: whole tiles, and parts of the others, or two for each SM's share."""
    whole, rest = parts_of(m, n, config, sms)
    return whole + (2 * clusters_at_once(config.cluster, sms) * (rest > 0) if config.even else rest * config.split)


def partial_tiles(m: int, n: int, config: Config, sms: int) -> int:
    """Return how many sums of a tile may be left in global memory."""
    rest = parts_of(m, n, config, sms)[1]
    return config.cluster * (
        2 * clusters_at_once(config.cluster, sms) * (rest > 0) if config.even else rest * config.split
    )


def candidates(m: int, n: int, k: int, sms: int, late: tuple[int, int] = (0, 0), by_tma: bool = True) -> list[Config]:
    """Return the configurations that can do a product: each tile whole, and in parts of two steps at least.

    Where rows are late (see `gemm_model.estimate`) or few, also with tiles that two blocks share: elsewhere the bytes are not
    the limit, and what was measured was no faster. Where A is late along K, with rows by parity; and where TMA can store C
    (`by_tma`), with its transpose computed, and with clusters for a tile's parts.
    """
    few = min(m, n) <= FEW
    share = 1 in late or 2 in late or few
    tiles = tiles_for(n, late[1])
    neighbours = with_neighbours(tiles, m, n) if share else tiles
    found = in_parts([*neighbours, *SHORT_CONFIGS], m, n, k, sms)
    if few:
        found += in_parts(with_larger_clusters(tiles, m, n, sms), m, n, k, sms)
    if by_tma:
        found += in_clusters(tiles, m, n, k, sms)
    if late[0] == 1 and m % 2 == 0 and n % 8 == 0:
        found += by_parity(found, m, n, sms)
    found = [*at_other_places(found, m, n), *found]
    if by_tma:
        transposed = [replace(config, transposed=True) for config in tiles_for(m, late[0])]
        turned = in_parts(with_neighbours(transposed, n, m) if share else transposed, n, m, k, sms)
        if few:
            turned += in_parts(with_larger_clusters(transposed, n, m, sms), n, m, k, sms)
        found += [*at_other_places(turned, n, m), *turned, *in_clusters(transposed, n, m, k, sms)]
    return found


def tiles_for(n: int, late: int) -> list[Config]:
    """Return the tiles for n columns of B: those between powers of two only where C needs the second part of their columns.

    Where B's neighbours in memory are columns (`late` is 2 or 3), two parts of 64 columns and fewer would stay two products.
    """
    widths = [config for config in WIDTHS if n > config.columns[0] and (late < 2 or config.columns[0] > 64)]
    return [*CONFIGS, *widths, *(config for config in DEEP if n > config.columns[0] or config.columns[1] == 0)]


def by_parity(configs: Iterable[AnyConfig], m: int, n: int, sms: int) -> list[AnyConfig]:
    """Return configurations with rows by parity, where there are neighbours and parts for them too."""
    found = [replace(x, pairs=True) for x in configs if 2 * _ceil(m // 2, x.block_m) >= 2 * x.down]
    found = [x for x in found if not x.in_cluster or parts_of(m, n, x, sms)[0] <= clusters_at_once(x.split, sms)]
    return [x for x in found if x.split == 1 or x.in_cluster or parts_of(m, n, x, sms)[1]]


def at_other_places(configs: Iterable[AnyConfig], m: int, n: int) -> list[AnyConfig]:
    """Return configurations whose tiles begin at other places along K, where all tiles need one operand, and no two the other.

    Elsewhere blocks that run side by side find in the L2 what their neighbours have just read: where they began at different
    places, products took up to 1.35 times as long.
    """
    found = [x for x in configs if x.multicast and not x.short]
    one = [x for x in found if m <= x.cluster_tile[0] or n <= x.cluster_tile[1]]
    return [replace(x, spread=True) for x in one]


def with_neighbours(configs: Iterable[AnyConfig], m: int, n: int) -> list[AnyConfig]:
    """Return configurations, and each with tiles that two blocks share where there are two tiles below each other or abreast."""
    found = [*configs]
    shared = [replace(config, multicast="B") for config in found if m > config.block_m]
    return found + shared + [replace(config, multicast="A") for config in found if n > config.block_n]


def with_larger_clusters(configs: Iterable[AnyConfig], m: int, n: int, sms: int) -> list[AnyConfig]:
    """Return configurations in clusters of four and eight blocks, where there are tiles for all of them.

    A piece of a tile has eight rows at least, as they are swizzled: of 16 columns four blocks cannot share.
    """
    found = [replace(config, multicast=shape) for config in configs for shape in LARGER]
    found = [x for x in found if x.cluster <= sms]
    found = [x for x in found if _ceil(m, x.block_m) >= x.down and _ceil(n, x.block_n) >= x.abreast]
    return [x for x in found if x.columns[1] != 16 or x.down < 4]
