"""Which configuration a product gets: the model's first few, corrected by measured neighbours, and told about the L2."""

import importlib.util
import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from utils.kernels import gemm_choose, gemm_neighbours
from utils.kernels.gemm_candidates import Traits
from utils.kernels.gemm_choose import choose, first_by_model, first_choices, for_l2
from utils.kernels.gemm_config import Config
from utils.kernels.gemm_plan import CONFIGS, SHORT_CONFIGS, as_cluster

PRODUCTS = (
    (104, 3456, 4352, (0, 0)),
    (10216, 88, 1760, (2, 2)),
    (4096, 4096, 4096, (0, 3)),
    (2048, 512, 256, (1, 0)),
    (320, 112, 12712, (3, 1)),
)


def as_ranked(config):
    """The configuration as the model ranks it, before it is told about the L2."""
    return replace(config, early=True, stream="")


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_the_first_choices_are_different_tiles_of_the_model_s_first_and_the_first_is_the_choice(product):
    m, n, k, late = product
    found = first_choices(m, n, k, 132, late, True, 4)
    assert found[0] == choose(m, n, k, 132, late)
    assert len({config.tile for config in found}) == len({config.name for config in found}) == 4
    ranked, us = first_by_model(m, n, k, 132, late, True, gemm_choose.RANKED_ANEW)
    assert {as_ranked(config) for config in found} <= {*ranked}
    corrected = us * np.exp(gemm_neighbours.corrections(m, n, k, Traits.of_all(ranked), 132, late))
    assert [as_ranked(config) for config in found] == [ranked[i] for i in np.argsort(corrected)[:4]]


def test_on_another_gpu_the_model_alone_chooses():
    for m, n, k, late in PRODUCTS:
        (first,), _ = first_by_model(m, n, k, 114, late, True, 1)
        assert as_ranked(choose(m, n, k, 114, late)) == first


def test_far_from_all_that_was_measured_nothing_is_corrected():
    tiny = gemm_neighbours.corrections(8, 8, 10**7, Traits.of_all(CONFIGS), 132, (0, 0))
    assert np.abs(tiny).max() < 0.02
    measured = gemm_neighbours._measured()
    assert 0.01 < np.abs(gemm_neighbours.nearness(measured.points, measured.points) @ measured.weights).mean() < 0.2


def test_features_of_many_products_are_those_of_each():
    draw = random.Random(3)
    configs = [*CONFIGS, *SHORT_CONFIGS, as_cluster(CONFIGS[1], 4)]
    configs += [replace(CONFIGS[9], split=3, transposed=True), replace(CONFIGS[4], multicast="2x4")]
    products = [[8 * draw.randint(8, 900) for _ in "mnk"] + [draw.randrange(4), draw.randrange(4)] for _ in configs]
    m, n, k, *late = (np.array(column) for column in zip(*products, strict=True))
    together = gemm_neighbours.features(m, n, k, Traits.of_all(configs), 132, tuple(late))
    assert together.shape == (len(configs), gemm_neighbours._measured().points.shape[1]) and np.isfinite(together).all()
    for i, (config, (m, n, k, *late)) in enumerate(zip(configs, products, strict=True)):
        alone = gemm_neighbours.features(m, n, k, Traits.of_all([config]), 132, tuple(late))
        assert alone[0] == pytest.approx(together[i], rel=1e-9)


def test_the_file_has_no_product_of_the_tables_and_is_what_the_script_writes():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("the script that fits the weights imports Triton")
    from tools.record import gemm_neighbours as script
    from utils.files import ROOT

    contents = json.loads(gemm_neighbours.FILE.read_text())
    tables = {script.product_of(row) for row in script.tuned_rows()}
    assert len(tables) == 160 and not {tuple(product[:3]) for product in contents["products"]} & tables
    rows = script.rows_of(sorted(ROOT.glob("assets/results/h?00/gemm_choice_*.json")))
    points = script.Points([row for row in rows if script.product_of(row) not in tables])
    weights = script.fitted(points.raw, points.errors, points.weight)[2]
    again = script.contents(points, weights)
    assert again["products"] == contents["products"] and again["configurations"] == contents["configurations"]
    assert [entry[:2] for entry in again["entries"]] == [entry[:2] for entry in contents["entries"]]
    # As exactly as the weights are written; other constants of the model would need other weights.
    assert np.allclose([x[2] for x in again["entries"]], [x[2] for x in contents["entries"]], rtol=2e-3, atol=1e-5)
    alone, corrected = points.judge(), points.judge(script.held_out(points))
    assert corrected["best / chosen"] > alone["best / chosen"] + 0.005
    assert corrected["under 0.90 of torch"] < alone["under 0.90 of torch"]


TILE = replace(CONFIGS[1], multicast="4x1")


@pytest.mark.parametrize(
    "config, m, n, k, stream, early",
    [
        (TILE, 10216, 88, 1760, "A", False),  # 80 blocks, 36 MB
        (replace(TILE, transposed=True, multicast="1x4"), 10216, 88, 1760, "B", False),
        (replace(TILE, transposed=True), 88, 10216, 1760, "A", False),
        (TILE, 8024, 88, 1760, "", False),  # 29 MB: all of it stays, if it stays on its side
        (TILE, 6008, 88, 1760, "", True),  # 21 MB
        (TILE, 15000, 88, 1760, "A", True),  # 53 MB: too much for its side as well
        (TILE, 14000, 88, 1300, "A", True),  # 112 blocks: few others are free
        (TILE, 10216, 88, 4000, "", True),  # 82 MB
        (TILE, 2000, 264, 9000, "A", False),  # three columns of tiles read A at the same time
        (replace(TILE, multicast="2x4"), 1304, 648, 10000, "", True),  # 39 MB, but products are the limit
        (TILE, 16000, 264, 1400, "", True),  # 375 tiles: A's lines are needed in another round
        (CONFIGS[1], 10216, 88, 1760, "A", True),  # no cluster
        (as_cluster(CONFIGS[1], 4), 1000, 88, 16000, "A", True),
        (SHORT_CONFIGS[4], 10216, 88, 1760, "", True),
    ],
    ids=lambda x: x.name if isinstance(x, Config) else None,
)
def test_what_a_launch_is_told_about_the_l2(config, m, n, k, stream, early):
    told = for_l2(config, m, n, k, 132)
    assert told == replace(config, stream=stream, early=early)
    assert (f" streams {stream}" in told.name) == bool(stream) and (" waiting" in told.name) != early
    assert math.isclose(told.shared_bytes, config.shared_bytes)
