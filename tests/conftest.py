"""The rules for every test: one thread a process, GPU tests on a GPU only, the longest files first.

`--cpu-times FILE` writes what each test costs: a busy machine makes a test take longer, but it hardly makes it use more CPU time.
"""

import json
import os
import resource
import sys
import time

import pytest

# One thread for each process: two multi-threaded torch processes on two cores slow each other down tenfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

# The files that take longest, by measured CPU time: they start first, so that none of them runs alone at the end.
LONGEST = (
    "instructor/test_lab1.py",
    "instructor/test_lab3.py",
    "instructor/test_lab4.py",
    "instructor/grading/test_grading_class.py",
    "instructor/grading/test_grading_honest.py",
    "utils/attention/test_decode.py",
    "utils/attention/test_attention.py",
    "utils/attention/test_offline.py",
    "utils/kernels/test_gemm_gluon.py",
    "utils/kernels/test_gemm_simulated.py",
    "test_recipes.py",
    "instructor/test_nbgrader.py",
)


def pytest_addoption(parser):
    parser.addoption(
        "--cpu-times", metavar="FILE", help="append each test's CPU and clock seconds to FILE, a JSON object a line"
    )


def pytest_collection_modifyitems(items):
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.split("::")[0].removeprefix("tests/"), len(LONGEST)))
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not _gpu_found():
        reason = "needs an NVIDIA GPU: torch.cuda.is_available() is False here"
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def nothing_compiled_before():
    """What torch compiled under a check's watch, in an earlier file of this process, is not used again."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture
def unwritten_is_nan():
    """What torch allocates is nan until it is written."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _gpu_found() -> bool:
    import torch

    return torch.cuda.is_available()


def cpu_seconds() -> float:
    """CPU seconds so far of this process and of its children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    path, cpu, clock = item.config.getoption("--cpu-times"), cpu_seconds(), time.monotonic()
    result = yield
    if path:  # with the fixtures that it is the first to use
        costs = {"cpu": round(cpu_seconds() - cpu, 3), "clock": round(time.monotonic() - clock, 3)}
        with open(path, "a", encoding="utf-8") as file:  # a line is one write: the workers of xdist share the file
            file.write(json.dumps({"test": item.nodeid, **costs}) + "\n")
    return result
