"""A model of the time of the GEMM's kernels, fitted to measured times: by it a product's configuration is chosen.

`estimate` says how long a product takes by a configuration, `estimates` by many; `gemm_choose.choose` takes the first. Nothing
here needs Triton.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from utils.kernels.gemm_candidates import Traits, at_once, tiles_of
from utils.kernels.gemm_config import Config
from utils.kernels.gemm_plan import ceil_div


@dataclass(frozen=True)
class Cost:
    """Constants of a model of the kernels' time, in microseconds; fitted by `tools.record.gemm_choice`."""

    product: float = 0.5988  # of 2**21 multiplications on one SM: 128 x 256 x 64
    bytes: float = 0.01453  # of a KB of A and B that each SM reads, where all read at once
    port: float = 0.005441  # of a KB that an SM reads, where few do
    late: float = 1.326  # how many times a byte of A or B counts whose rows are late and lie along K
    late_across: float = 1.425  # and where they lie along M or N
    late_n: float = 1.071  # and how many times that again where these are B's rows, not A's
    hot: float = 0.3445  # how many times more a byte counts that many SMs read at once, where few others are read
    lines: float = 1.597  # by which power of 96 over the number of lines that is more
    many: float = 70.99  # SMs that are as many as it takes
    shared: float = 0.6158  # how many times a byte counts for each of two blocks that share it; squared: of four
    shared_more: float = 0.7448  # how many times that again for each of four
    far: float = 0.2834  # of a MB of A and B, which has to come from memory or the L2's other half once
    wait: float = 0.8216  # from asking for a slot's bytes to reading them; a block waits for `stages` slots at once
    wait_shared: float = 1.774  # and where two blocks share a tile: a slot waits for both
    wait_more: float = 0.8405  # how many times as long where four do, and again where eight do
    wait_both: float = 1.08  # and where both operands are shared
    wait_parts: float = 2.326  # and where blocks add up a tile's parts
    slots: float = 0.5173  # by which power of the number of slots that becomes less
    few: float = 0.5058  # by which power of the share of SMs that run the bytes take less
    edge: float = 0.0  # by which power of the share of a tile that lies inside of C its bytes count
    tile: float = 0.02165  # of a tile's start and end
    store: float = 0.03261  # of a KB of C
    narrow: float = 0.82  # how many times more it counts in pieces whose rows have 32 bytes
    part: float = 0.7136  # of leaving a part's sums and counting
    add: float = 0.009468  # of a KB of sums that the last part reads
    turned: float = 4.318  # how many times as long that takes where C's transpose is computed
    traffic: float = 0.5762  # of a MB of sums that all parts write and read
    meet: float = 0.01885  # of a block of a cluster that adds up its parts' sums
    gather: float = 0.04588  # of a KB of sums that each of its blocks stores, and reads as many
    launch: float = 2.416
    launch_parts: float = 0.3589  # more of one of clusters that add up a tile's parts
    launch_cluster: float = 0.09932  # more of one of clusters that share tiles, for each doubling of their blocks
    waiting: float = 1.28  # of a launch that does not begin while the one before it ends
    short_launch: float = 0.6274  # of the short kernel
    short_tile: float = 0.479  # of a block of the short kernel, as many as share an SM at once
    short_part: float = 0.655  # of a part there
    short_add: float = 0.0193  # of a KB of sums that the last part reads there


COST = Cost()
SLOTS = 6  # slots of a ring at which `Cost.slots` changes nothing


class _Numbers:
    """The functions of numpy that the model needs, for plain numbers, where numpy's would take twenty times as long."""

    where = staticmethod(lambda condition, x, y: x if condition else y)
    minimum, maximum, log2 = min, max, math.log2


def read_together(m: Any, n: Any, t: Traits, tiles: Any, cost: Cost, xp: Any = _Numbers) -> tuple[Any, Any]:
    """Return how many times more a byte of A and of B counts, in units of `Cost.hot`, because many SMs read it at once.

    Blocks run through K side by side, so where all tiles have the same columns of B, all SMs ask for the same few lines of
    the L2 at the same time, and those lie unevenly in its slices, of which there are about 96.

    Args:
        m: rows of C.
        n: columns of C.
        t: traits of the configuration.
        tiles: how many are computed at once; a cluster's count as one.
        cost: the constants `many` and `lines`.
        xp: where minimum and the like are from: numpy for arrays.
    """
    rows, columns = t.block_m * t.down, t.block_n * t.abreast
    tiles_m, tiles_n = ceil_div(m, rows), ceil_div(n, columns)
    down = xp.minimum(tiles_m, tiles)
    down = xp.where(tiles_n > 1, xp.minimum(down, xp.maximum(1, t.group_m * t.block_m // rows)), down)
    along = xp.minimum(tiles_n, xp.maximum(1.0, tiles / down))

    def more(lines: Any, readers: Any) -> Any:
        return (96 / lines) ** cost.lines * xp.minimum(1.0, (readers - 1) / cost.many)

    return more(xp.minimum(down * rows, m), along), more(xp.minimum(along * columns, n), down)


def _time(m: Any, n: Any, k: Any, t: Traits, sms: int, late: tuple[Any, Any], cost: Cost, xp: Any) -> Any:
    """Return the estimated time; what is given is numbers or arrays."""
    where, minimum, maximum = xp.where, xp.minimum, xp.maximum
    m, n = where(t.transposed, n, m), where(t.transposed, m, n)
    late_a, late_b = where(t.transposed, late[1], late[0]), where(t.transposed, late[0], late[1])
    steps = ceil_div(k, t.block_k)
    # From here on a cluster, with its tiles, counts as one.
    once = at_once(sms)[t.cluster]
    tiles = tiles_of(m, n, t, t.pairs)
    parts_of_tile = t.split
    in_parts = (t.split != 1) & (t.in_cluster ^ True)
    rest = where(in_parts, where(t.short, tiles, tiles % once), 0)
    whole = tiles - rest
    cut = rest > 0
    sums = t.rows * t.block_n / 256  # KB of a consumer
    size = t.block_m * t.block_n / 512  # KB of C
    # The short kernel: all blocks of the busiest SM, several of which run at once.
    blocks = ceil_div(whole + rest * t.split, once)
    abreast = maximum(1, minimum(blocks, t.blocks))
    together, short_rounds = where(t.short, abreast, 1), blocks / abreast
    short_time = cost.short_launch + where(cut, cost.short_part + cost.short_add * sums * t.split, 0.0)
    # The other: rounds of whole tiles, then of parts.
    rounds, extra = ceil_div(whole, once) * 1.0, where(cut, ceil_div(rest * t.split, once), 0)
    part_steps = ceil_div(steps, parts_of_tile)
    time = cost.launch + where(t.in_cluster, cost.launch_parts, 0.0)
    time = time + where(t.multicast, cost.launch_cluster * xp.log2(t.cluster), 0.0)
    time = time + where(t.in_cluster, rounds * (cost.meet * t.split + cost.gather * 2 * size), 0.0)
    all_steps = rounds * where(t.in_cluster, part_steps, steps) + extra * part_steps
    turned = where(t.transposed, cost.turned, 1.0)
    time = time + where(cut, cost.part * extra + cost.add * turned * sums * t.split, 0.0)
    rounds = rounds + extra
    time = where(t.short, short_time, time)
    all_steps = where(t.short, short_rounds * part_steps, all_steps)
    rounds = where(t.short, short_rounds, rounds)
    parts = rest * t.split
    time = time + where(t.early, 0.0, cost.waiting)
    time = time + cost.traffic * parts * t.cluster * size / 512
    # Bytes of a step. TMA reads nothing outside of A and B, but a round takes as long as its fullest tiles.
    rows, columns = t.block_m * t.down, t.block_n * t.abreast
    inside_a = t.block_m * (m / (ceil_div(m, rows) * rows)) ** cost.edge
    inside_b = t.block_n * (n / (ceil_div(n, columns) * columns)) ** cost.edge
    # `Config.pad`: columns that are fetched and not multiplied.
    padded = (late_b > 1) & (n > columns) & (t.first > 64) & (t.second % 64 > 0)
    inside_b = inside_b * where(padded, (t.first + 64) / t.block_n, 1.0)

    def counted(kind: Any) -> Any:
        return where(kind == 1, cost.late, where(kind == 2, cost.late_across, 1.0))

    kb_a = inside_a * t.block_k / 512 * counted(where(t.pairs, 0, late_a))
    kb_b = inside_b * t.block_k / 512 * counted(late_b) * where(late_b == 2, cost.late_n, 1.0)
    at_a_time = minimum(whole + rest * t.split, once * together) / where(whole > 0, 1, parts_of_tile)
    hot_a, hot_b = read_together(m, n, t, at_a_time, cost, xp)

    def shared(blocks: Any) -> Any:
        return cost.shared ** xp.log2(blocks) * where(blocks > 2, cost.shared_more, 1.0)

    sent = kb_a * (1 + cost.hot * hot_a) * shared(t.abreast) + kb_b * (1 + cost.hot * hot_b) * shared(t.down)
    active = minimum(whole + parts, once) / once
    bytes_time = maximum(cost.port * (kb_a + kb_b), cost.bytes * active**cost.few * sent)
    width = where(t.one_product, minimum(t.block_n, ceil_div(n, 16) * 16), t.block_n)
    product = cost.product * t.block_m * width * t.block_k / 2**21
    wait_shared = cost.wait_shared * cost.wait_more ** maximum(xp.log2(t.cluster) - 1, 0.0)
    wait_shared = wait_shared * where((t.down > 1) & (t.abreast > 1), cost.wait_both, 1.0)
    wait = where(t.multicast, wait_shared, where(t.in_cluster, cost.wait * cost.wait_parts, cost.wait))
    wait = wait / (SLOTS * (t.stages / SLOTS) ** cost.slots)
    step = ((together * product) ** 6 + (together * bytes_time) ** 6 + wait**6) ** (1 / 6)
    far = cost.far * 2 * k * (m + n) / 1e6
    time = time + ((all_steps * step) ** 6 + far**6) ** (1 / 6)
    narrow = where(t.short | (t.piece_row >= 64), 0.0, cost.narrow * (16 / t.piece_row) ** 2)
    store = cost.store * (1 + narrow) / where(t.in_cluster, parts_of_tile, 1)
    return time + rounds * (where(t.short, cost.short_tile, cost.tile) + together * store * size)


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
    return float(_time(m, n, k, Traits.of(config), sms, late, cost or COST, _Numbers))


def estimates(
    m: Any, n: Any, k: Any, traits: Traits, sms: int, late: tuple[Any, Any] = (0, 0), cost: Cost | None = None
) -> np.ndarray:
    """Estimate as `estimate` does, for many configurations; the product may be another for each of them."""
    return _time(m, n, k, traits, sms, late, cost or COST, np)
