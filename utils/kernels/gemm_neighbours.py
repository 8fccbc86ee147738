"""What the model of the GEMM's time is off by, learned from products that were measured near the one that is asked for.

The model (`gemm_model.py`) has terms for what was understood. What it gets wrong is alike at products that are alike: of the same
tile, with as many rounds, and with the same share of the time for products, bytes, waits and stores. So its error at a configuration
is taken to be a Gaussian process over such features: the expected error is a mean of the errors at 2141 measured
configurations of 258 products, each with the more weight the nearer it is, and nothing where none is near.

    file             what is in it
    gemm_measured    products (sizes, lateness), configurations, and a weight for each that was timed at a product; the weights
                     are fitted by `python -m tools.record.gemm_neighbours`, to products that are in neither of the
                     recorded tables, so the tables say what a choice does at products that it has not seen

Measured: docs/gemm-log.md, entry 47.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from utils.kernels.gemm_candidates import Traits, at_once, tiles_of
from utils.kernels.gemm_config import Config
from utils.kernels.gemm_model import COST, Cost, estimates
from utils.kernels.gemm_plan import ceil_div

FILE = Path(__file__).with_name("gemm_measured.json")
SMS = 132  # of the GPU that was measured
REACH = 5.0  # distance in features, each divided by its standard deviation, over which errors are alike
# Constants of the model whose share of the time is a feature.
SHARES = (("product",), ("bytes", "port"), ("wait",), ("far",), ("store", "tile"), ("launch", "short_launch"), ("hot",))


def known(sms: int) -> bool:
    """Whether there are measured neighbours for a GPU of so many multiprocessors."""
    return sms == SMS


def corrections(m: int, n: int, k: int, traits: Traits, sms: int, late: tuple[int, int]) -> np.ndarray:
    """Return for each configuration the expected logarithm of its measured over its estimated time, as far as it is its own.

    What all configurations of a product have in common is not in it. The arguments are those of `gemm_model.estimates`.
    """
    measured = _measured()
    return nearness(measured.scaled(features(m, n, k, traits, sms, late)), measured.points) @ measured.weights


def features(m: Any, n: Any, k: Any, t: Traits, sms: int, late: tuple[Any, Any]) -> np.ndarray:
    """Return what makes configurations at products alike, a row for each; the product may be another for each of them."""
    # One estimate with all constants, and one without those of each share, all at once.
    names = [name for group in SHARES for name in group]
    rows = {
        name: np.array([getattr(COST, name) * (name not in group) for group in ((), *SHARES)])[:, None]
        for name in names
    }
    times = estimates(m, n, k, t, sms, late, Cost(**{**asdict(COST), **rows}))
    rows_of_c, columns = np.where(t.transposed, n, m), np.where(t.transposed, m, n)
    late_a, late_b = np.where(t.transposed, late[1], late[0]), np.where(t.transposed, late[0], late[1])
    once = at_once(sms)[t.cluster]
    tiles = tiles_of(rows_of_c, columns, t, t.pairs)
    in_parts = (t.split > 1) & ~t.in_cluster
    rest = np.where(in_parts, np.where(t.short, tiles, tiles % once), 0)
    items = tiles - rest + rest * t.split
    high, wide = t.block_m * t.down, t.block_n * t.abreast
    found = [
        np.log2(times[0]),
        *times[1:] / times[0],
        np.log2(ceil_div(tiles - rest, once) + ceil_div(rest * t.split, once)),  # rounds
        np.minimum(items, once) / once,
        (tiles - rest) / once % 1.0,  # how full the last round is
        once * t.cluster / sms,
        rows_of_c / (ceil_div(rows_of_c, high) * high),  # of the tiles, the share that lies inside of C
        columns / (ceil_div(columns, wide) * wide),
        *(np.log2(x) for x in (t.block_m, t.block_n, t.down, t.abreast, t.stages)),
        np.where(t.in_cluster, np.log2(t.split), 0.0),
        np.where(t.in_cluster, 0.0, np.log2(t.split)),
        np.log2(ceil_div(k, t.block_k) / t.split),
        np.log2(2e-6 * k * (m + n)),
        *(late_a == 1, late_a == 2, late_b == 1, late_b == 2, late_a < 2, late_b < 2),
        *(t.transposed, t.short, t.pairs, t.one_product, t.early, t.second > 0),
    ]
    return np.stack(np.broadcast_arrays(*found), axis=1).astype(float)


def nearness(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return for two lists of scaled features how alike the errors at each two are: 1 at the same place, 0 far away."""
    squares = (points**2).sum(1)[:, None] + (others**2).sum(1) - 2 * points @ others.T
    return np.exp(-np.maximum(squares, 0.0) / (2 * REACH**2))


class Measured:
    """The measured configurations as points in the space of features, and their weights."""

    def __init__(self, contents: dict) -> None:
        products = np.array(contents["products"])
        configs = [Config(**changes) for changes in contents["configurations"]]
        product, config, weights = zip(*contents["entries"], strict=True)
        m, n, k, *late = products[np.array(product)].T
        traits = Traits.of_all(configs).take(np.array(config))
        raw = features(m, n, k, traits, SMS, tuple(late))
        self.mean, self.deviation = raw.mean(0), np.maximum(raw.std(0), 1e-6)
        self.points, self.weights = self.scaled(raw), np.array(weights)

    def scaled(self, raw: np.ndarray) -> np.ndarray:
        """Return features in standard deviations from their mean over the measured configurations."""
        return (raw - self.mean) / self.deviation


@functools.cache
def _measured() -> Measured:
    return Measured(json.loads(FILE.read_text(encoding="utf-8")))


def described(config: Config) -> dict:
    """Return the fields of a configuration that differ from their defaults, as they stand in the file."""
    return {x.name: value for x in fields(config) if (value := getattr(config, x.name)) != x.default}
