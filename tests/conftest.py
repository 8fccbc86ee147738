"""The rules for every test: one thread a process, GPU tests on a GPU only, no slow test without its mark.

The rule for slow tests: a test without the mark `slow` is named at the end of the output when one of its phases (its
fixtures, or the test itself) uses more than 20 s of CPU time, in this process and in its children that have ended. A busy
machine makes a test take longer, but it hardly makes the test use more CPU time. A fixture that several tests share
counts once, for the first of them.

The limit is that of the machine on which the suite was written: a slower one allows as many times more as it takes
longer for a small calculation. A name is a warning: no test fails by it.
The environment variable SLOW_TEST_SECONDS replaces the 20 s; 0 switches the rule off.
"""

import functools
import json
import os
import resource
import sys
import time
from collections.abc import Callable

import pytest

# One thread for each process: two multi-threaded torch processes on two cores slow each other down tenfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

LIMIT_S = float(os.environ.get("SLOW_TEST_SECONDS", "20"))
CALCULATION_S = 0.05  # CPU time of `calculation_seconds` on the machine on which the suite was written

# The files that take longest, by measured CPU time: they start first, so that none of them runs alone at the end.
LONGEST = (
    "utils/attention/test_decode.py",
    "instructor/test_lab1.py",
    "instructor/test_lab3.py",
    "instructor/grading/test_grading_class.py",
    "instructor/grading/test_grading_honest.py",
    "instructor/test_lab4.py",
    "utils/kernels/test_gemm_gluon.py",
    "utils/kernels/test_gemm_simulated.py",
    "instructor/grading/test_grading_faults.py",
    "utils/attention/test_attention.py",
    "utils/attention/test_prepared.py",
    "utils/attention/test_backward.py",
)

SLOW = "slow test"  # the key of a report's property that says why the test needs the mark

_left_out = pytest.StashKey[int]()
_costs = pytest.StashKey[dict]()


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


def _gpu_found() -> bool:
    import torch

    return torch.cuda.is_available()


# ---- what a test costs -------------------------------------------------------------------------------------------


def cpu_seconds() -> float:
    """CPU seconds so far of this process and of its children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def calculation_seconds() -> float:
    """Return the CPU seconds of a small calculation, the least of five: what this machine's speed is known by."""
    seconds = []
    for _ in range(5):
        begin = time.process_time()
        sum(i * i % 7 for i in range(400_000))
        sorted({str(i): i for i in range(60_000)}, reverse=True)
        seconds.append(time.process_time() - begin)
    return min(seconds)


@functools.cache
def machine_factor() -> float:
    """Return how many times as long as the suite's first machine this one takes, at least 1."""
    return max(1.0, calculation_seconds() / CALCULATION_S)


def is_slow(cpu_s: float, factor: Callable[[], float] = machine_factor) -> bool:
    """Return whether a phase with these CPU seconds is over the limit; the machine's speed is asked only where it matters."""
    return 0 < LIMIT_S < cpu_s and cpu_s > LIMIT_S * factor()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    costs = item.stash.setdefault(_costs, {})
    now = cpu_seconds()
    cpu_s = now - costs.get("until", now)
    costs["until"] = now
    costs[call.when] = {"cpu": round(cpu_s, 3), "clock": round(call.duration, 3)}
    if report.passed and call.when in ("setup", "call") and not _may_be_slow(item) and is_slow(cpu_s):
        phase = "its fixtures" if call.when == "setup" else "it"
        used = f"used {cpu_s:.1f} s of CPU time, more than {LIMIT_S * machine_factor():.3g} s"
        reason = f"{phase} {used}: mark it @pytest.mark.slow, or make it quicker (tests/README.md)"
        report.user_properties.append((SLOW, reason))
    return report


def pytest_terminal_summary(terminalreporter):
    """Name the slow tests; the main process has the reports of all workers."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    slow = {
        (report.nodeid, reason): None
        for report in reports
        for key, reason in getattr(report, "user_properties", ())
        if key == SLOW
    }
    if slow:
        terminalreporter.section("slow tests without the mark")
        for name, reason in slow:
            terminalreporter.write_line(f"{name}: {reason}")


def _may_be_slow(item) -> bool:
    return any(item.get_closest_marker(name) for name in ("slow", "overnight", "gpu"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    item.stash[_costs] = {"until": cpu_seconds()}
    result = yield
    path = item.config.getoption("--cpu-times")
    if path:
        costs = {when: value for when, value in item.stash[_costs].items() if when != "until"}
        with open(path, "a", encoding="utf-8") as file:  # a line is one write: the workers of xdist share the file
            file.write(json.dumps({"test": item.nodeid, **costs}) + "\n")
    return result


# ---- what was left out -------------------------------------------------------------------------------------------


def pytest_deselected(items):
    config = items[0].config
    if not config.option.keyword:  # what -k leaves out is no loss
        names = [{mark.name for mark in item.iter_markers()} for item in items]
        config.stash[_left_out] = sum("slow" in marks and not marks & {"overnight", "gpu"} for marks in names)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Read the count of a worker of xdist: each worker collects all tests, the main process none."""
    count = getattr(node, "workeroutput", {}).get("left_out", 0)
    node.config.stash[_left_out] = max(count, node.config.stash.get(_left_out, 0))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    """Write the last line of the output, after the summary. A worker of xdist sends its count to the main process."""
    in_worker = hasattr(session.config, "workeroutput")
    if in_worker:
        session.config.workeroutput["left_out"] = session.config.stash.get(_left_out, 0)
    result = yield
    count = session.config.stash.get(_left_out, 0)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if count and reporter and not in_worker:
        reporter.write_line(f"{count} test{'s' * (count > 1)} left out (slow): make test-slow runs them.")
    return result
