"""The Gluon GEMM's two kernels through their launch, in the simulator: what is computed, with which operands."""

import importlib.util
import random
from dataclasses import replace

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from utils import gluon_cpu
from utils.kernels import gemm_launch
from utils.kernels.gemm_candidates import candidates
from utils.kernels.gemm_config import Config
from utils.kernels.gemm_plan import SHORT_CONFIGS, parts_of

SMS = 3


def matrix(rows, columns, column_major):
    """A random matrix whose rows (or columns) start at multiples of 16 bytes."""
    outer, inner = (columns, rows) if column_major else (rows, columns)
    x = torch.randn(outer, -(-inner // 8) * 8).half()[:, :inner]
    return x.T if column_major else x


@pytest.fixture
def simulated(monkeypatch):
    """Return a function that computes A @ B by a configuration on a GPU of three SMs, in the simulator."""
    properties = type("Properties", (), {"multi_processor_count": SMS})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    kept = []

    def workspace(c, partial_sums, counters):
        kept.append(torch.zeros(max(1, counters), dtype=torch.int32))
        return torch.full((max(1, partial_sums),), float("nan")), kept[-1]

    monkeypatch.setattr(gemm_launch, "workspace", workspace)

    def product(a, b, config, seed=None):
        c = torch.full((a.shape[0], b.shape[1]), float("nan")).half()
        with gluon_cpu.simulate(seed=seed) as run:
            assert gemm_launch.launch(a, b, c, config) is None
        assert run.ok
        assert not kept[-1].any()  # the next launch finds the counters as this one did
        return c

    return product


def assert_close(c, a, b):
    want = a.double() @ b.double()
    assert (torch.isfinite(c) == torch.isfinite(want)).all()
    finite = torch.isfinite(want)
    assert (c.double() - want)[finite].abs().max() < 2e-3 * want[finite].abs().max()


@pytest.mark.parametrize("config", SHORT_CONFIGS, ids=str)
@pytest.mark.parametrize("split, n, seed", [(1, 104, 1), (3, 104, 2), (1, 101, None)])
def test_short_kernel(simulated, config, split, n, seed):
    """More steps than slots, an edge in all directions, parts, and C from registers where TMA cannot store it."""
    a = matrix(100, 600, column_major=split == 3)
    b = matrix(600, n, column_major=n == 101)
    assert_close(simulated(a, b, replace(config, split=split), seed), a, b)


@pytest.mark.parametrize(
    "config", [SHORT_CONFIGS[1], Config(128, 64, stages=3, pieces=2)], ids=lambda config: config.name
)
def test_launches_that_begin_early(simulated, config):
    a, b = matrix(200, 264, False), matrix(264, 96, True)
    assert_close(simulated(a, b, replace(config, early=True, split=2), 3), a, b)


@pytest.mark.parametrize("config", SHORT_CONFIGS[:1])
def test_short_kernel_with_fewer_steps_than_slots(simulated, config):
    a, b = matrix(70, 40, False), matrix(40, 48, False)
    assert_close(simulated(a, b, config, 3), a, b)


PAIRS = (
    Config(128, 64, stages=3, pieces=2, pairs=True),
    Config(128, 64, stages=3, pieces=2, pairs=True, split=2),
    Config(192, 96, consumers=3, stages=3, pairs=True),
    replace(SHORT_CONFIGS[2], pairs=True, split=2),
)


@pytest.mark.parametrize("k", [264, 312, 128])
@pytest.mark.parametrize("config", PAIRS, ids=["128x64", "128x64/2", "192x96", "short 64x128/2"])
def test_rows_by_parity(simulated, config, k):
    """An infinity or NaN stays in its row: what TMA reads before an odd row's first element is zero, not its neighbour."""
    a, b = matrix(300, k + 8 * (k % 16 == 0), False)[:, :k], matrix(k, 104, column_major=k == 264)
    assert gemm_launch.lateness("A", a) == 1  # where K is whole steps, an odd row needs one more
    a[3, k - 1], a[7, 0], a[8, k - 1], b[0, 5] = torch.inf, torch.nan, torch.inf, 1.0
    assert_close(simulated(a, b, config, 1), a, b)


def test_rows_by_parity_need_pairs_of_rows(simulated):
    with pytest.raises(ValueError, match="an even number of rows of A, row-major, and C by TMA"):
        simulated(matrix(301, 24, False), matrix(24, 104, False), PAIRS[0])
    with pytest.raises(ValueError, match="rows by their parity"):
        simulated(matrix(304, 24, True), matrix(24, 104, False), PAIRS[0])


# Without a cluster each block fetches all pieces: the tiles, the parts and the places of the pieces are those of a cluster.
SHARED = (
    Config(128, 128, stages=3, pieces=2, multicast="B"),
    Config(128, 192, stages=2, multicast="B", split=2),
    Config(64, 96, consumers=1, stages=3, multicast="B", group_m=2),
    Config(128, 64, stages=3, pieces=2, multicast="A", split=2),
    Config(192, 96, consumers=3, stages=2, multicast="A"),
    Config(128, 64, stages=3, pieces=2, multicast="B", pairs=True, split=2),
    Config(128, 64, stages=3, pieces=2, multicast="A", pairs=True),
    Config(64, 128, consumers=1, stages=3, pieces=2, multicast="4x1", split=2),
    Config(64, 128, consumers=1, stages=3, pieces=2, multicast="1x4", pairs=True),
    Config(128, 96, stages=2, pieces=2, buffers=3, multicast="2x2"),
    Config(64, 64, consumers=1, stages=3, pieces=2, multicast="4x2", split=2),
    Config(64, 80, consumers=1, stages=3, buffers=5, multicast="2x4"),
)


@pytest.mark.parametrize("a_column_major, b_column_major", [(False, False), (True, True)])
@pytest.mark.parametrize("config", SHARED, ids=lambda config: config.name)
def test_tiles_that_blocks_share(simulated, monkeypatch, config, a_column_major, b_column_major):
    # So many SMs that, with parts, some tiles are whole and some are cut.
    possible = [sms for sms in (5, 9, 11, 21, 33) if sms >= config.cluster]
    sms = next(sms for sms in possible if config.split == 1 or min(parts_of(520, 360, config, sms)) > 0)
    properties = type("Properties", (), {"multi_processor_count": sms})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    a = matrix(520, 264, a_column_major and not config.pairs)
    b = matrix(264, 360, b_column_major)
    assert_close(simulated(a, b, replace(config, simulated=True), 2), a, b)


@pytest.mark.parametrize("column_major", [False, True])
def test_which_rows_are_late(column_major):
    late, aligned = matrix(40, 72, column_major), matrix(48, 64, column_major)
    along_k, across = (2, 1) if column_major else (1, 2)
    assert gemm_launch.lateness("A", late) == along_k == gemm_launch.lateness("B", late.T)
    assert gemm_launch.lateness("A", late.T) == across == gemm_launch.lateness("B", late)
    assert gemm_launch.lateness("A", late, pairs=False) == 2
    along_k, across = (3, 0) if column_major else (0, 3)
    assert gemm_launch.lateness("A", aligned) == along_k == gemm_launch.lateness("B", aligned.T)
    assert gemm_launch.lateness("A", aligned.T) == across == gemm_launch.lateness("B", aligned)


def test_which_tiles_are_cut_in_parts():
    assert parts_of(300, 100, replace(SHORT_CONFIGS[1], split=4), SMS) == (0, 10)  # all tiles
    assert parts_of(300, 100, Config(64, 64, consumers=1, split=4), SMS) == (9, 1)  # those that fill no round
    assert parts_of(300, 100, PAIRS[1], SMS) == (6, 2)
    both = Config(64, 64, consumers=1, split=2, multicast="B")
    assert parts_of(300, 100, both, SMS) == (6, 0) and parts_of(300, 100, both, 8) == (4, 2)  # three rows of two tiles


def test_a_kernel_without_parts_is_compiled_without_counters(simulated, monkeypatch):
    """Six tiles on three SMs: none is cut. Then C stands for the counters, and Triton compiles no atomics on bf16."""
    given = []
    real = gemm_launch.replace
    monkeypatch.setattr(
        gemm_launch, "replace", lambda config, **changes: given.append(changes) or real(config, **changes)
    )
    a, b = matrix(128, 64, False), matrix(64, 192, False)
    config = Config(64, 64, consumers=1, stages=4, pieces=2, split=1)
    assert_close(simulated(a, b, replace(config, split=1)), a, b)
    given.clear()
    a, b = matrix(128, 128, False), matrix(128, 192, False)
    assert parts_of(128, 192, replace(config, split=2), SMS) == (6, 0)
    assert_close(simulated(a, b, replace(config, split=2)), a, b)
    assert {"split": 1} in given


def check_random(simulated, monkeypatch, seed):
    """A product of random sizes, pitches and orders in memory, by any configuration that can do it on a few SMs."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sms = rng.choice((2, 3, 4, 5, 7, 9, 13))
    properties = type("Properties", (), {"multi_processor_count": sms})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    sizes = (1, 7, 8, 63, 64, 65, 100, 128, 136, 192, 264, 320, 500)
    m, n, k = rng.choice(sizes), rng.choice(sizes), rng.choice((*sizes, 1000, 1500))
    m, n = (min(m, 200), min(n, 200)) if k > 500 else (m, n)

    def drawn(rows, columns):
        """Rows (or columns) are farther apart than long; what lies between them is nan."""
        column_major = rng.random() < 0.4
        outer, inner = (columns, rows) if column_major else (rows, columns)
        x = torch.full((outer, -(-inner // 8) * 8 + 8 * rng.choice((0, 0, 1, 2, 3))), torch.nan).half()[:, :inner]
        x.copy_(torch.randn(outer, inner))
        return x.T if column_major else x

    a, b = drawn(m, k), drawn(k, n)
    late = gemm_launch.lateness("A", a, n % 8 == 0), rng.choice((1, gemm_launch.lateness("B", b)))
    found = candidates(m, n, k, sms, late, n % 8 == 0)
    config = rng.choice(rng.choice((found, [x for x in found if x.split > 1] or found)))
    assert_close(simulated(a, b, config, rng.choice((None, seed))), a, b)
    return config.short, config.pairs, config.multicast, config.split > 1, config.transposed


def test_random_products(simulated, monkeypatch):
    assert len({check_random(simulated, monkeypatch, seed) for seed in range(8)}) > 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400, 50))
def test_many_random_products(simulated, monkeypatch, seed):
    for each in range(seed, seed + 50):
        check_random(simulated, monkeypatch, each)
