"""Which tile, in how many parts, by which of the two Gluon kernels: the GEMM's configurations and the choice between them.

A model of the time, fitted to measured times by `tools.record.gemm_choice`, estimates each configuration that could do a
product; `choose` takes the first. Nothing here needs Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


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
    pieces: int = 4  # column blocks in which columns[0] of C are stored: even, two buffers take turns
    group_m: int = 8  # rows of tiles that are walked abreast, for the L2
    split: int = 1  # parts along K of a tile that would leave SMs idle: one of SPLITS
    short: bool = False  # the kernel of `gemm_short`: a block a tile, several blocks on an SM
    pairs: bool = False  # a tile has rows of one parity, see `gemm_gluon`: for late rows of a row-major A
    copies: tuple[bool, bool] = (False, False)  # A, B: first copied to rows that start at multiples of 128 bytes

    @property
    def rows(self) -> int:
        """Rows of a consumer."""
        return self.block_m // self.consumers

    @property
    def columns(self) -> tuple[int, int]:
        """Columns of the tile as powers of two, which Gluon's tiles must be: (256, 0), or (128, 64) for 192.

        With three consumers ptxas refuses a product of 256 columns at once: its sums alone take 128 registers.
        """
        first = 1 << self.block_n.bit_length() - 1
        first = min(first, 128) if self.consumers == 3 else first
        return first, self.block_n - first

    @property
    def piece(self) -> list[int]:
        """Rows and columns of a piece of C."""
        return [self.rows, self.columns[0] // self.pieces]

    @property
    def registers(self) -> int:
        """Registers of a consumer thread; three consumers and a producer of 32 share the 65536 of an SM."""
        return 160 if self.consumers == 3 else 232

    @property
    def shared_bytes(self) -> int:
        """Shared memory for ring and pieces of C, in bytes; an SM of an H100 or H200 gives a block 232448."""
        ring = self.stages * (self.block_m + self.block_n) * self.block_k * 2
        if self.short:  # C goes through the ring's memory when its last slot has been read
            return max(ring, 2 * self.block_m * self.block_n)
        return ring + 2 * self.block_m * self.piece[1] * 2

    @property
    def blocks(self) -> int:
        """Blocks on an SM, by shared memory: 233472 bytes, of which each block takes 1024 more than it asks for."""
        return 233472 // (self.shared_bytes + 1024 + 64)

    @property
    def name(self) -> str:
        """Short name, such as "128x256/4": tile and parts."""
        kind = "short " if self.short else ""
        more = " pairs" if self.pairs else ""
        copies = "".join(x for x, is_copied in zip("AB", self.copies, strict=True) if is_copied)
        return f"{kind}{self.block_m}x{self.block_n}/{self.split}{more}{' copy ' + copies if copies else ''}"


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
SHORT_CONFIGS = (
    Config(64, 32, consumers=1, pieces=1, stages=4, short=True),
    Config(64, 64, consumers=1, pieces=1, stages=4, short=True),
    Config(64, 128, consumers=1, pieces=1, stages=4, short=True),
    Config(128, 64, consumers=1, pieces=1, stages=4, short=True),
    Config(128, 128, consumers=1, pieces=1, stages=6, short=True),
    Config(64, 64, consumers=1, pieces=1, stages=8, short=True),
    Config(128, 128, consumers=1, pieces=1, stages=3, short=True),
)
# How many parts a tile may have: where tiles are large, many parts would cost more to add up than they gain.
SPLITS = (1, 2, 3, 4, 6, 8, 16)
MOST_PARTS = {config: 16 if config.block_m * config.block_n <= 8192 else 4 for config in CONFIGS}
MOST_PARTS |= {config: 8 for config in CONFIGS if config.block_m * config.block_n == 16384}


def parts_of(m: int, n: int, config: Config, sms: int) -> tuple[int, int]:
    """Return how many tiles are computed whole, and how many in parts.

    Those that would not fill a round of all SMs are; the short kernel, which is for few tiles, cuts all or none.
    """
    tiles = (2 * _ceil(m // 2, config.block_m) if config.pairs else _ceil(m, config.block_m)) * _ceil(n, config.block_n)
    rest = 0 if config.split == 1 else tiles if config.short else tiles % sms
    return tiles - rest, rest


def candidates(m: int, n: int, k: int, sms: int) -> list[Config]:
    """Return the configurations that can do a product: each tile whole, and in parts of two steps at least."""
    steps = _ceil(k, 64)
    found = []
    for config in CONFIGS:
        found.append(config)
        if not parts_of(m, n, replace(config, split=2), sms)[1]:
            continue  # every round is full
        found += [
            replace(config, split=split) for split in SPLITS if 1 < split <= MOST_PARTS[config] and 2 * split <= steps
        ]
    return found


@dataclass(frozen=True)
class Cost:
    """Constants of a model of the kernel's time, in microseconds; fitted by `tools.record.gemm_choice`."""

    product: float = 0.68  # of 2**21 multiplications on one SM: 128 x 256 x 64
    bytes: float = 0.0081  # of a KB of A and B that an SM reads
    late: float = 2.0  # how many times the bytes count where rows start at odd multiples of 16 bytes
    tile: float = 0.71  # of a tile's start and end
    store: float = 0.035  # of a KB of C
    part: float = 1.2  # of leaving a part's sums and counting
    add: float = 0.0073  # of a KB of sums that the last part reads
    traffic: float = 0.47  # of a MB of sums that all parts write and read
    launch: float = 5.1


COST = Cost()


def estimate(
    m: int, n: int, k: int, config: Config, sms: int, late: tuple[int, int] = (0, 0), cost: Cost | None = None
) -> float:
    """Estimate the time of a product in microseconds, for a choice between configurations.

    A step takes as long as its products or its bytes, whichever is longer; a little longer where both are alike.

    Args:
        m: rows of C.
        n: columns of C.
        k: terms of the sums.
        config: tile and parts.
        sms: multiprocessors.
        late: whether rows of A and of B (columns, where column-major) start at odd multiples of 16 bytes.
        cost: the constants; None for COST.
    """
    cost = cost or COST
    steps = _ceil(k, config.block_k)
    whole, rest = parts_of(m, n, config, sms)
    rounds = _ceil(whole, sms)  # of the busiest SM
    all_steps, time = rounds * steps, cost.launch
    if rest:
        extra = _ceil(rest * config.split, sms)
        rounds += extra
        all_steps += extra * _ceil(steps, config.split)
        time += cost.part * extra
        time += cost.add * config.rows * config.block_n * config.split / 256
        time += cost.traffic * rest * config.split * config.block_m * config.block_n / 2**18
    a_kb, b_kb = (
        rows * config.block_k / 512 * (cost.late if is_late else 1.0)
        for rows, is_late in zip((config.block_m, config.block_n), late, strict=True)
    )
    product = cost.product * config.block_m * config.block_n * config.block_k / 2**21
    step = (product**6 + (cost.bytes * (a_kb + b_kb)) ** 6) ** (1 / 6)
    return time + all_steps * step + rounds * (cost.tile + cost.store * config.block_m * config.block_n / 512)


def choose(m: int, n: int, k: int, sms: int, late: tuple[int, int] = (0, 0)) -> Config:
    """Return the configuration with the shortest estimated time; the arguments are those of `estimate`."""
    return min(candidates(m, n, k, sms), key=lambda config: estimate(m, n, k, config, sms, late))
