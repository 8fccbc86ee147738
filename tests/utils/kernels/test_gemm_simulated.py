"""The two kernels of the Gluon GEMM, launched in the simulator: their products, for many operands."""

import importlib.util
import random

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.utils.kernels.products import assert_product, matrix
from utils import gluon_cpu
from utils.kernels import gemm_launch
from utils.kernels.gemm_plan import PLANS, SPLITS, Plan, items_of
from utils.kernels.gemm_work import add_kernel

SMS = 3


@pytest.fixture
def simulated(monkeypatch):
    """Return a function that computes A @ B by a plan on a GPU of a few SMs, in the simulator; new memory is full of nan."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **given: empty(*shape, **given).fill_(torch.nan))

    def product(a, b, plan, split=1, seed=None, sms=SMS):
        properties = type("Properties", (), {"multi_processor_count": sms})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        with gluon_cpu.simulate(seed=seed) as run:
            c = gemm_launch.prepare(a, b, plan, split)(a, b)
        assert run.ok
        return c

    return product


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan.short], ids=lambda plan: plan.name)
@pytest.mark.parametrize("split, n, k", [(6, 104, 600), (1, 101, 600), (1, 48, 40)])
def test_short_kernel(simulated, plan, split, n, k):
    """More steps than slots, and fewer; incomplete tiles along M, N and K, parts, and rows of C that TMA cannot address."""
    a, b = matrix(100, k, split == 6, device="cpu"), matrix(k, n, n == 101, device="cpu")
    assert_product(simulated(a, b, plan, split, seed=split), a, b)


@pytest.mark.parametrize("split, column_major", [(1, False), (2, True)])
@pytest.mark.parametrize("consumers", [1, 2])
def test_warp_specialized_kernel(simulated, consumers, split, column_major):
    """The ring goes on from tile to tile; tiles are incomplete along M, N and K; with parts, some tiles are whole and some cut."""
    plan = Plan(64 * consumers, 64 * 3 - 64 * consumers, transposed=column_major)
    m, n = (360, 520) if plan.transposed else (520, 360)
    assert split == 1 or min(items_of(520, 360, plan, split, sms=4)[1:3]) > 0
    a, b = matrix(m, 264, column_major, device="cpu"), matrix(264, n, column_major, device="cpu")
    assert_product(simulated(a, b, plan, split, 2, sms=4), a, b)


@pytest.mark.parametrize("plan", [Plan(64, 80, cluster=4), Plan(128, 64, cluster=2, transposed=True)])
def test_parts_of_the_tiles_of_a_cluster_come_to_their_places_in_c(plan):
    """The simulator has no clusters, so the test makes the sums that a launch would leave, in the order of the threads' registers."""
    rows, columns = -(-1000 // (plan.block_m * plan.cluster)), -(-240 // plan.block_n)
    parts = torch.randn(3, rows * plan.cluster * plan.block_m, columns * plan.block_n)
    tiles = parts.unflatten(1, (rows * plan.cluster, -1, 2, 8)).unflatten(-1, (columns, -1, 4, 2))
    sums = tiles.permute(5, 1, 0, 6, 2, 4, 7, 3, 8).contiguous()
    expected = parts.sum(0)[:1000, :240].T if plan.transposed else parts.sum(0)[:1000, :240]
    c = torch.empty(expected.shape)
    sizes = rows, columns, 0, 3, plan.cluster, plan.block_m, plan.block_n // 8, int(plan.transposed)
    with gluon_cpu.simulate() as run:
        grid = sums.shape[0] * sums.shape[1], plan.block_m * plan.block_n // 256
        add_kernel[grid](sums, c, *sizes, len(c), c.shape[1] // 8, **gemm_launch.ADDING)
    assert run.ok
    torch.testing.assert_close(c, expected)


def test_which_tiles_are_cut_in_parts():
    def cut(m, n, plan, split, sms=SMS):
        items = items_of(m, n, plan, split, sms)
        return items.whole, items.rest, items.split

    assert cut(300, 100, Plan(64, 64, short=2), 4) == (0, 10, 4)  # all tiles
    assert cut(300, 100, Plan(64, 64), 4) == (9, 1, 4)  # the tiles of the incomplete round
    assert cut(300, 60, Plan(64, 64), 4, 5) == (5, 0, 1)  # every round is full
    assert cut(300, 100, Plan(64, 64, cluster=2), 2, 8) == (4, 2, 2)  # three rows of two clusters


def test_more_parts_than_steps_are_refused(simulated):
    x = matrix(64, 64, device="cpu")
    with pytest.raises(ValueError, match="parts"):
        simulated(x, x, PLANS[0], 2)


def check_random(simulated, seed):
    """Check a product of random sizes, pitches and orders in memory, by any plan that can do it on a few SMs."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sms = rng.choice((2, 3, 4, 5, 7, 9, 13))
    sizes = (1, 7, 8, 63, 64, 65, 100, 128, 136, 192, 264, 320, 500)
    m, n, k = rng.choice(sizes), rng.choice(sizes), rng.choice((*sizes, 1000, 1500))
    m, n = (min(m, 200), min(n, 200)) if k > 500 else (m, n)

    def drawn(rows, columns):
        """Draw a matrix whose rows (or columns) have gaps of nan between them in memory."""
        column_major = rng.random() < 0.4
        outer, inner = (columns, rows) if column_major else (rows, columns)
        x = torch.full((outer, -(-inner // 8) * 8 + 8 * rng.choice((0, 0, 1, 2, 3))), torch.nan).half()[:, :inner]
        x.copy_(torch.randn(outer, inner))
        return x.T if column_major else x

    a, b = drawn(m, k), drawn(k, n)
    plan = rng.choice(PLANS)
    split = rng.choice([split for split in SPLITS if split <= max(1, k // 64)])
    assert_product(simulated(a, b, plan, split, rng.choice((None, seed)), sms), a, b)
    return plan, split > 1


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(100, 200), marks=pytest.mark.slow)])
def test_random_products(simulated, seeds):
    assert len({check_random(simulated, seed) for seed in seeds}) > 3
