"""Which of the GEMM's configurations: a model of the kernels' time, fitted to measured times, and the choice by it.

`estimate` says how long a product takes by a configuration; `choose` takes the first. Nothing here needs Triton.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from utils.kernels.gemm_plan import Config, candidates, clusters_at_once, parts_of


def _ceil(x: int, y: int) -> int:
    return -(-x // y)


@dataclass(frozen=True)
class Cost:
    """Constants of a model of the kernels' time, in microseconds; fitted by `tools.record.gemm_choice`."""

    product: float = 0.6496  # of 2**21 multiplications on one SM: 128 x 256 x 64
    bytes: float = 0.01544  # of a KB of A and B that each SM reads, where all read at once
    port: float = 0.008217  # of a KB that an SM reads, where few do
    late: float = 1.346  # how many times a byte of A or B counts whose rows are late and lie along K
    late_across: float = 1.581  # and where they lie along M or N
    hot: float = 0.4911  # how many times more a byte counts that many SMs read at once, where few others are read
    many: float = 79.08  # SMs that are as many as it takes
    shared: float = 0.4368  # how many times a byte counts for each of two blocks that share it; squared: of four
    far: float = 0.2602  # of a MB of A and B, which has to come from memory or the L2's other half once
    wait: float = 0.6666  # from asking for a slot's bytes to reading them; a block waits for `stages` slots at once
    wait_shared: float = 2.044  # and where two blocks share a tile: a slot waits for both
    wait_more: float = 0.5605  # how many times as long where four do, and again where eight do
    tile: float = 0.04637  # of a tile's start and end
    store: float = 0.02876  # of a KB of C
    narrow: float = 1.013  # how many times more it counts in pieces whose rows have 32 bytes
    part: float = 1.094  # of leaving a part's sums and counting
    add: float = 0.007785  # of a KB of sums that the last part reads
    turned: float = 4.481  # how many times as long that takes where C's transpose is computed
    traffic: float = 0.4516  # of a MB of sums that all parts write and read
    meet: float = 0.01246  # of a block of a cluster that adds up its parts' sums
    gather: float = 0.03303  # of a KB of sums that each of its blocks stores, and reads as many
    launch: float = 2.527
    waiting: float = 1.28  # of a launch that does not begin while the one before it ends
    short_launch: float = 1.342  # of the short kernel
    short_tile: float = 0.1738  # of a block of the short kernel, as many as share an SM at once
    short_part: float = 0.6279  # of a part there
    short_add: float = 0.0163  # of a KB of sums that the last part reads there


COST = Cost()


def read_together(m: int, n: int, config: Config, sms: int, together: int, many: float) -> list[float]:
    """Return how many times more a byte of A and of B counts, in units of `Cost.hot`, because many SMs read it at once.

    Blocks run through K side by side, so where all tiles have the same columns of B, all SMs ask for the same few lines of
    the L2 at the same time, and those lie unevenly in its slices, of which there are about 96.

    Args:
        m: rows of C.
        n: columns of C.
        config: tile and parts.
        sms: multiprocessors, or clusters of them.
        together: blocks on one of them.
        many: `Cost.many`.
    """
    whole, rest = parts_of(m, n, config, sms * config.cluster)
    rows, columns = config.cluster_tile
    tiles_m, tiles_n = _ceil(m, rows), _ceil(n, columns)
    if config.even:
        tiles = float(sms if whole else rest)
    else:
        tiles = min(whole + rest * config.split, sms * together) / (1 if whole else config.split)
    down = min(tiles_m, tiles, max(1, config.group_m * config.block_m // rows) if tiles_n > 1 else tiles)
    along = min(tiles_n, max(1.0, tiles / down))
    lines = min(down * rows, m), min(along * columns, n)
    return [
        math.sqrt(96 / count) * min(1.0, (readers - 1) / many)
        for count, readers in zip(lines, (along, down), strict=True)
    ]


def estimate(
    m: int, n: int, k: int, config: Config, sms: int, late: tuple[int, int] = (0, 0), cost: Cost | None = None
) -> float:
    """Estimate the time of a product in microseconds, for a choice between configurations.

    A step takes as long as its products, its bytes, or the wait for a slot, whichever is longest; a little longer where
    they are alike.

    Args:
        m: rows of C.
        n: columns of C.
        k: terms of the sums.
        config: tile and parts.
        sms: multiprocessors.
        late: for A and for B, how their rows (columns, where column-major) lie and start: 0 along K, 1 along K and at odd
            multiples of 16 bytes, 2 along M or N and so, 3 along M or N.
        cost: the constants; None for COST.
    """
    cost = cost or COST
    if config.transposed:
        m, n, late = n, m, (late[1], late[0])
    steps = _ceil(k, config.block_k)
    whole, rest = parts_of(m, n, config, sms)
    # From here on a cluster, with its tiles, counts as one.
    sms = clusters_at_once(config.cluster, sms)
    if config.short:
        blocks = _ceil(whole + rest * config.split, sms)  # of the busiest SM
        together = min(blocks, config.blocks)
        rounds = blocks / together
        all_steps = rounds * _ceil(steps, config.split)
        time, tile = cost.short_launch, cost.short_tile
        time += cost.short_part + cost.short_add * config.rows * config.block_n * config.split / 256 if rest else 0.0
    else:
        together, rounds = 1, float(_ceil(whole, sms))
        all_steps = rounds * (_ceil(steps, config.split) if config.in_cluster else steps)
        time, tile = cost.launch, cost.tile
        if config.in_cluster:
            time += rounds * (cost.meet * config.split + cost.gather * config.block_m * config.block_n / 256)
        if rest and config.even:
            rounds += 2  # a share begins in one tile and mostly ends in another
            all_steps += rest * steps / sms
            time += 2 * cost.part
            time += cost.add * config.rows * config.block_n * (1 + sms / rest) / 256
        elif rest:
            extra = _ceil(rest * config.split, sms)
            rounds += extra
            all_steps += extra * _ceil(steps, config.split)
            time += cost.part * extra
            turned = cost.turned if config.transposed else 1.0
            time += cost.add * turned * config.rows * config.block_n * config.split / 256
    time += 0.0 if config.early else cost.waiting
    parts = rest + sms if config.even else rest * config.split
    if rest:
        time += cost.traffic * parts * config.cluster * config.block_m * config.block_n / 2**18
    received, sent, factors = 0.0, 0.0, (1.0, cost.late, cost.late_across, 1.0)
    # TMA reads nothing outside of A and B: of tiles over the edge only what is inside counts.
    tile_rows, tile_columns = config.cluster_tile
    inside = (
        m / _ceil(m, tile_rows) * config.block_m / tile_rows,
        n / _ceil(n, tile_columns) * config.block_n / tile_columns,
    )
    first, second = config.columns
    if late[1] > 1 and n > tile_columns and first > 64 and second % 64:  # `Config.pad`: fetched, and not multiplied
        inside = inside[0], inside[1] * (first + 64) / config.block_n
    late_bytes = (0 if config.pairs else late[0], late[1])
    # Blocks that begin at 16 places read 16 times as many lines at once.
    hot = read_together(m, n, config, sms, together, cost.many)
    for operand, rows, kind, more in zip("AB", inside, late_bytes, hot, strict=True):
        kb = rows * config.block_k / 512 * factors[kind]
        received += kb
        more = more / 4 if config.spread else more
        sent += kb * (1 + cost.hot * more) * cost.shared ** math.log2(config.sharers(operand))
    product = cost.product * config.block_m * config.width_at(n) * config.block_k / 2**21
    active = min(whole + parts, sms) / sms
    bytes_time = max(cost.port * received, cost.bytes * active * sent)
    wait = cost.wait
    if config.multicast:
        wait = cost.wait_shared * cost.wait_more ** (math.log2(config.cluster) - 1)
    limits = (together * product, together * bytes_time, wait / config.stages)
    step = sum(limit**6 for limit in limits) ** (1 / 6)
    far = cost.far * 2 * k * (m + n) / 1e6
    steps_time = ((all_steps * step) ** 6 + far**6) ** (1 / 6)
    row = config.rows if config.transposed else config.piece[1]  # elements of a row of a piece of C, as it is stored
    store = cost.store if config.short or row >= 64 else cost.store * (1 + cost.narrow * (16 / row) ** 2)
    store /= config.split if config.in_cluster else 1
    return time + steps_time + rounds * (tile + together * store * config.block_m * config.block_n / 512)


def choose(m: int, n: int, k: int, sms: int, late: tuple[int, int] = (0, 0), by_tma: bool = True) -> Config:
    """Return the configuration with the shortest estimated time; the arguments are those of `candidates` and `estimate`."""
    return min(candidates(m, n, k, sms, late, by_tma), key=lambda config: estimate(m, n, k, config, sms, late))
