"""All configurations of the 16-bit GEMM as one table of numbers, from which a product takes those that can do it.

A product has about 2000 candidates of the table's 8000. As objects they would take longer to make and to compare than many a
product takes to compute; as arrays (`Traits`) both are a millisecond or two. The table is made once for a process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from utils.kernels.gemm_config import SHAPES, SHARED_BYTES, Config
from utils.kernels.gemm_plan import (
    CONFIGS,
    DEEP,
    MOST_IN_CLUSTER,
    SHORT_CONFIGS,
    SPLITS,
    WIDTHS,
    as_cluster,
    ceil_div,
    clusters_at_once,
    most_parts,
)

# Bytes of A and B, twice an H100's L2, from which on tiles are shared by four or eight blocks only where all of them are computed
# at once: at three products of several rounds such clusters took 4 to 15% longer than a pair (docs/gemm-log.md, entry 44).
BEYOND_L2 = 100e6


@dataclass(frozen=True)
class Traits:
    """What the model of the time needs to know of a configuration, or of many: then each field is an array."""

    block_m: Any
    block_n: Any
    block_k: Any
    rows: Any  # of a consumer
    first: Any  # columns of the tile's first part
    second: Any
    piece_row: Any  # elements of a row of a piece of C, as it is stored
    stages: Any
    blocks: Any  # on an SM, of the short kernel
    group_m: Any
    split: Any
    cluster: Any
    down: Any
    abreast: Any
    one_product: Any
    short: Any
    pairs: Any
    in_cluster: Any
    multicast: Any
    early: Any
    transposed: Any

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the traits of one configuration, as plain numbers."""
        first, second = config.columns
        return cls(
            block_m=config.block_m,
            block_n=config.block_n,
            block_k=config.block_k,
            rows=config.rows,
            first=first,
            second=second,
            piece_row=config.rows if config.transposed else config.piece[1],
            stages=config.stages,
            blocks=config.blocks if config.short else 1,
            group_m=config.group_m,
            split=config.split,
            cluster=config.cluster,
            down=config.down,
            abreast=config.abreast,
            one_product=config.one_product,
            short=config.short,
            pairs=config.pairs,
            in_cluster=config.in_cluster,
            multicast=config.multicast != "",
            early=config.early,
            transposed=config.transposed,
        )

    @classmethod
    def of_all(cls, configs: Iterable[Config]) -> Self:
        """Return the traits of many configurations, as arrays."""
        found = [cls.of(config) for config in configs]
        return cls(**{field.name: np.array([getattr(x, field.name) for x in found]) for field in fields(cls)})

    def take(self, index: np.ndarray, **changes: np.ndarray) -> Self:
        """Return the traits at these positions, some of them replaced."""
        kept = {field.name: getattr(self, field.name)[index] for field in fields(self) if field.name not in changes}
        return type(self)(**kept, **changes)


@functools.cache
def at_once(sms: int) -> np.ndarray:
    """Return by the number of blocks of a cluster, from 0, how many such clusters run at once."""
    return np.array([1, *(max(1, clusters_at_once(blocks, sms)) for blocks in range(1, MOST_IN_CLUSTER + 1))])


class Table:
    """Every configuration: a tile of a kernel, alone, in parts, or shared by a cluster, direct or transposed, by parity or not.

    Of configurations that the model holds to be equal the first is taken, so direct ones stand before transposed ones.

    Attributes:
        configs: one for each tile, form of cluster and direction.
        index: of each entry, which of these it is.
        traits: of each entry, with its number of parts, and whether rows are by parity.
        width: of each entry, whether its tile is between powers of two.
        deep: of each entry, whether its ring fills shared memory.
    """

    def __init__(self) -> None:
        tiles = [*enumerate((*CONFIGS, *WIDTHS, *DEEP))]
        # A piece of a shared tile has eight rows at least, as they are swizzled: of 16 columns four blocks cannot share.
        shared = [
            (i, replace(x, multicast=shape))
            for shape, (down, _) in SHAPES.items()
            for i, x in tiles
            if x.columns[1] != 16 or down < 4
        ]
        parts = [(i, as_cluster(x, split)) for i, x in tiles for split in range(2, MOST_IN_CLUSTER + 1)]
        parts = [(i, x) for i, x in parts if x.shared_bytes <= SHARED_BYTES]
        groups = [[*shared, *((0, x) for x in SHORT_CONFIGS)], parts]
        groups += [[(i, replace(x, transposed=True)) for i, x in group] for group in (shared, parts)]
        self.configs = [config for group in groups for _, config in group]
        numbers = iter(range(len(self.configs)))
        entries: list[tuple[int, int, bool]] = []  # which configuration, parts, by parity
        for direct in (True, False):
            found = []
            for group in groups[:2] if direct else groups[2:]:
                for _, config in group:
                    number = next(numbers)
                    splits = (config.split,) if config.in_cluster else SPLITS
                    most = config.split if config.in_cluster else most_parts(config)
                    found += [(number, split, False) for split in splits if split <= most]
            if direct:
                found += [(number, split, True) for number, split, _ in found]
            entries += found
        self.index, split, pairs = (np.array(column) for column in zip(*entries, strict=True))
        self.traits = Traits.of_all(self.configs).take(self.index, split=split, pairs=pairs)
        tile = np.array([i for group in groups for i, _ in group])[self.index]
        self.width = (tile >= len(CONFIGS)) & (tile < len(CONFIGS) + len(WIDTHS))
        self.deep = tile >= len(CONFIGS) + len(WIDTHS)

    def config(self, entry: int) -> Config:
        """Return the configuration of an entry."""
        traits = self.traits
        return replace(self.configs[self.index[entry]], split=int(traits.split[entry]), pairs=bool(traits.pairs[entry]))

    def possible(self, m: int, n: int, k: int, sms: int, late: tuple[int, int], by_tma: bool) -> np.ndarray:
        """Return the entries that can do a product; the arguments are those of `candidates`."""
        t = self.traits
        steps = ceil_div(k, t.block_k)
        rows, columns = np.where(t.transposed, n, m), np.where(t.transposed, m, n)
        late_b = np.where(t.transposed, late[0], late[1])
        # Where B's neighbours in memory are columns, two parts of 64 columns and fewer would stay two products.
        fits = ~self.width | ((columns > t.first) & ((late_b < 2) | (t.first > 64)))
        fits &= ~self.deep | (columns > t.first) | (t.second == 0)
        fits &= (ceil_div(rows, t.block_m) >= t.down) & (ceil_div(columns, t.block_n) >= t.abreast) & (t.cluster <= sms)
        fits &= ~t.transposed | by_tma
        split = (t.split > 1) & ~t.in_cluster
        once = at_once(sms)[t.cluster]
        for by_parity in (False, True):
            tiles = tiles_of(rows, columns, t, by_parity)
            cut = ~split | t.short | (tiles % once > 0)
            whole = ~t.in_cluster | (by_tma & (tiles <= once))
            fits &= (cut & whole) | (by_parity & ~t.pairs)
        fits &= (t.split == 1) | (t.split <= steps // 2)
        if 2 * k * (m + n) > BEYOND_L2:
            fits &= ~t.multicast | (t.cluster == 2) | (tiles_of(rows, columns, t, t.pairs) <= once)
        if not (late[0] == 1 and m % 2 == 0 and n % 8 == 0):
            return np.flatnonzero(fits & ~t.pairs)
        return np.flatnonzero(fits & (~t.pairs | (ceil_div(m // 2, t.block_m) >= t.down)))


def tiles_of(m: Any, n: Any, traits: Traits, pairs: Any) -> Any:
    """Return how many tiles C has, a cluster's as one; `pairs`: with tiles of rows of one parity."""
    rows, columns = traits.block_m * traits.down, traits.block_n * traits.abreast
    return (ceil_div(m, rows) * (1 - pairs) + 2 * ceil_div(m // 2, rows) * pairs) * ceil_div(n, columns)


@functools.cache
def table() -> Table:
    """Return the table of all configurations."""
    return Table()


def candidates(m: int, n: int, k: int, sms: int, late: tuple[int, int] = (0, 0), by_tma: bool = True) -> list[Config]:
    """Return the configurations that can do a product: each tile whole, and in parts of two steps at least.

    Tiles are alone or shared by a cluster.

    Args:
        m: rows of C.
        n: columns of C.
        k: terms of the sums.
        sms: multiprocessors.
        late: how rows of A and B lie, see `gemm_model.estimate`. Where A is late along K, rows by parity are candidates too.
        by_tma: whether TMA can store C: if so, the transpose of C and clusters for a tile's parts are candidates too.
    """
    return [table().config(int(entry)) for entry in table().possible(m, n, k, sms, late, by_tma)]
