"""A small run on the CPU, made once, for the tests of results, reports and comparisons."""

import copy

import pytest

from tests.utils.bench.bench_runs import SDPA, SMALL, run_cpu


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    document = run_cpu(folder, [SDPA], [f"{SMALL} --backend flash --causal"], profile="minimal")
    return folder, document


@pytest.fixture
def document(small_run):
    return copy.deepcopy(small_run[1])
