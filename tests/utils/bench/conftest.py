"""A small run on the CPU, made once, for the tests of results, reports and comparisons."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.utils.bench.bench_runs import SDPA, SMALL, run_cpu
from utils.benchmark import roofs


@contextmanager
def small_roofs() -> Iterator[None]:
    """Measure the roofs of a CPU on small matrices and copies: these tests need roofs, not true ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(roofs._SIDE, "cpu", 256)
        patch.setitem(roofs._COPY_BYTES, "cpu", 16_000_000)
        patch.setattr(roofs, "last_level_cache_bytes", lambda: 1_000_000)
        patch.setattr(roofs, "_machine_roofs", {})  # the roofs that are kept stay true for other tests
        yield


@pytest.fixture(scope="module", autouse=True)
def small_roofs_in_this_module():
    with small_roofs():
        yield


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with small_roofs():  # fixtures of a session come before those of a module
        document = run_cpu(folder, [SDPA], [f"{SMALL} --backend flash --causal"], profile="minimal")
    return folder, document


@pytest.fixture
def document(small_run):
    return copy.deepcopy(small_run[1])
