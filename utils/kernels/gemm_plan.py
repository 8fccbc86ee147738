"""Which tiles the GEMM's kernels have, and into how many parts a tile's sums are cut. Nothing here needs Triton.

`gemm_candidates` combines both into all configurations, and `gemm_choose.choose` takes the one that a model of the time ranks first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from utils.kernels.gemm_config import SHARED_BYTES, Config


def ceil_div(x: Any, y: Any) -> Any:
    """Return x / y, rounded up: of whole numbers, or of arrays of them."""
    return -(-x // y)


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
SPLITS = (1, 2, 3, 4, 6, 8, 16)
AT_ONCE = {3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}  # clusters of so many blocks on an H200 with 132 SMs
MOST_IN_CLUSTER = 8  # blocks of a cluster that every GPU with clusters can run


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
    tiles = (2 * ceil_div(m // 2, rows) if config.pairs else ceil_div(m, rows)) * ceil_div(n, columns)
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
        most = min(most_parts(config), ceil_div(k, config.block_k) // 2)
        found += [replace(config, split=split) for split in SPLITS if 1 < split <= most]
    return found


def clusters_at_once(blocks: int, sms: int) -> int:
    """Return how many clusters of so many blocks run at once, a block on each SM.

    A cluster lies within one of the GPU's groups of SMs, which differ in size, so some SMs are left over. The driver says how
    many there are (`tools.record.clusters_at_once`, on an H200); one cluster more is a second round.
    """
    return AT_ONCE.get(blocks, sms // blocks) if sms == 132 else sms // blocks


def as_cluster(config: AnyConfig, split: int) -> AnyConfig:
    """Return a configuration whose tiles are computed by clusters, with fewer slots where the sums need the memory."""
    # Column blocks of 16 columns, so that there is one or more for most blocks of the cluster.
    clustered = replace(config, split=split, in_cluster=True, pieces=config.columns[0] // 16, buffers=1)
    while clustered.shared_bytes > SHARED_BYTES and clustered.stages > 3:
        clustered = replace(clustered, stages=clustered.stages - 1)
    return clustered


def items_of(m: int, n: int, config: Config, sms: int) -> int:
    """Return how many items of work there are: whole tiles, and parts of the others."""
    whole, rest = parts_of(m, n, config, sms)
    return whole + rest * config.split


def partial_tiles(m: int, n: int, config: Config, sms: int) -> int:
    """Return how many sums of a tile may be left in global memory."""
    return config.cluster * parts_of(m, n, config, sms)[1] * config.split


def by_parity(configs: Iterable[AnyConfig], m: int, n: int, sms: int) -> list[AnyConfig]:
    """Return configurations with rows by parity, where there are neighbours and parts for them too."""
    found = [replace(x, pairs=True) for x in configs if 2 * ceil_div(m // 2, x.block_m) >= 2 * x.down]
    found = [x for x in found if not x.in_cluster or parts_of(m, n, x, sms)[0] <= clusters_at_once(x.split, sms)]
    return [x for x in found if x.split == 1 or x.in_cluster or parts_of(m, n, x, sms)[1]]


def with_neighbours(configs: Iterable[AnyConfig], m: int, n: int) -> list[AnyConfig]:
    """Return configurations, and each with tiles that two blocks share where there are two tiles below each other or abreast."""
    found = [*configs]
    shared = [replace(config, multicast="B") for config in found if m > config.block_m]
    return found + shared + [replace(config, multicast="A") for config in found if n > config.block_n]
