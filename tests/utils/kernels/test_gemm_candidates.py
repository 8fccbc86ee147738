"""The table of the GEMM's configurations, and the choice that is made by it."""

import math
import random
from dataclasses import astuple, replace

import numpy as np
import pytest

from utils.kernels.gemm_candidates import Traits, candidates, table, tiles_of
from utils.kernels.gemm_choose import first_by_model
from utils.kernels.gemm_config import SHARED_BYTES
from utils.kernels.gemm_model import COST, estimate, estimates
from utils.kernels.gemm_plan import CONFIGS, DEEP, SHORT_CONFIGS, WIDTHS, as_cluster, clusters_at_once, parts_of


def products(count: int, seed: int) -> list[tuple]:
    """Draw products: sizes, multiprocessors, how rows lie, whether TMA can store C."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        m, n, k = (8 * round(math.exp(draw.uniform(math.log(64), math.log(9000))) / 8) for _ in "mnk")
        late = draw.randrange(4), draw.randrange(4)
        found.append((m, n, k, draw.choice((132, 132, 114, 16)), late, draw.random() < 0.8))
    return found


def test_no_configuration_stands_in_the_table_twice_and_all_fit():
    found = [table().config(entry) for entry in range(len(table().index))]
    assert len(set(found)) > 0.99 * len(found)  # a ring that fills memory and gives some up for a cluster's sums
    for config in found:
        assert config.short or config.shared_bytes <= SHARED_BYTES, config
        assert not (config.pairs and config.transposed)
    tiles = {(x.block_m, x.block_n, x.short) for x in found}
    assert tiles == {(x.block_m, x.block_n, x.short) for x in (*CONFIGS, *WIDTHS, *DEEP, *SHORT_CONFIGS)}


def test_the_traits_of_an_entry_are_those_of_its_configuration():
    draw = random.Random(4)
    for entry in draw.sample(range(len(table().index)), 200):
        of_entry = astuple(table().traits.take(np.array([entry])))
        assert [x[0] for x in of_entry] == [*astuple(Traits.of(table().config(entry)))]


@pytest.mark.parametrize("product", products(8, 1), ids=str)
def test_what_is_chosen_is_the_first_of_all_candidates_by_the_model(product):
    m, n, k, sms, late, by_tma = product
    found = candidates(m, n, k, sms, late, by_tma)
    times = [estimate(m, n, k, config, sms, late) for config in found]
    first, us = first_by_model(m, n, k, sms, late, by_tma, 3)
    assert first[0] == found[times.index(min(times))] and [*us] == sorted(us) and us[0] == pytest.approx(min(times))
    assert len({config.tile for config in first}) == 3
    together = estimates(m, n, k, Traits.of_all(found), sms, late)
    assert together == pytest.approx(times, rel=1e-12)


@pytest.mark.parametrize("product", products(6, 2), ids=str)
def test_a_candidate_can_do_the_product(product):
    m, n, k, sms, late, by_tma = product
    for config in candidates(m, n, k, sms, late, by_tma):
        rows, columns = (n, m) if config.transposed else (m, n)
        whole, rest = parts_of(rows, columns, config, sms)
        assert tiles_of(rows, columns, Traits.of(config), config.pairs) == whole + rest
        assert by_tma or not (config.transposed or config.in_cluster)
        assert not config.pairs or (late[0] == 1 and m % 2 == 0)
        assert config.split == 1 or 2 * config.split <= -(-k // config.block_k)
        if config.in_cluster:
            assert whole <= clusters_at_once(config.split, sms)
        else:
            assert (config.split > 1) == (rest > 0)
        blocks = m // 2 if config.pairs else rows
        assert -(-blocks // config.block_m) >= config.down and -(-columns // config.block_n) >= config.abreast


def test_products_of_different_sizes_are_estimated_at_once():
    given = products(30, 3)
    configs = [random.Random(i).choice(candidates(*product)) for i, product in enumerate(given)]
    m, n, k = (np.array([product[i] for product in given]) for i in range(3))
    late = np.array([p[4][0] for p in given]), np.array([p[4][1] for p in given])
    found = estimates(m, n, k, Traits.of_all(configs), 132, late)
    alone = [estimate(*p[:3], config, 132, p[4]) for p, config in zip(given, configs, strict=True)]
    assert found == pytest.approx(alone, rel=1e-12)


def test_what_the_model_says_of_few_blocks_edges_and_slots():
    tile = CONFIGS[1]
    # Half of the SMs: a block's step is not twice as fast, though all read half as many bytes.
    half, all_sms = (estimate(128 * tiles, 128, 8192, tile, 132) for tiles in (66, 132))
    assert 0.6 * all_sms < half < all_sms
    # A tile that is half outside of C takes nearly as long.
    cost = replace(COST, hot=0.0, far=0.0)
    assert estimate(128 * 64, 72, 8192, tile, 132, cost=cost) > 0.75 * estimate(
        128 * 64, 128, 8192, tile, 132, cost=cost
    )
    # Twice the slots do not halve a wait.
    slow = replace(COST, wait=50.0, product=1e-6, bytes=1e-6, port=1e-6)
    few, many = (estimate(512, 512, 65536, replace(tile, stages=x), 132, cost=slow) for x in (4, 8))
    assert 0.55 * few < many < 0.85 * few
    # A cluster that adds up a tile's parts begins later than blocks that are alone.
    cluster = as_cluster(tile, 2)
    sooner = replace(COST, launch_parts=0.0)
    more = estimate(512, 512, 4096, cluster, 132) - estimate(512, 512, 4096, cluster, 132, cost=sooner)
    assert more == pytest.approx(COST.launch_parts)
