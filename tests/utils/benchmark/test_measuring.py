"""measure() and compare() on known work: counts are exact, times have wide bounds because machines are busy."""

import dataclasses
import functools
import itertools
import json
import statistics
import time

import pytest
import torch

from utils.benchmark import sampling
from utils.benchmark.cpu_timer import Call
from utils.benchmark.measuring import compare as compare_anywhere
from utils.benchmark.measuring import measure as measure_anywhere
from utils.benchmark.measuring import pick_device
from utils.benchmark.result import Measurement
from utils.benchmark.roofs import Roofs
from utils.machine import device

ROOFS = Roofs("test part", "datasheet", {"fp32": 1.0, "bf16": 4.0}, 0.5)

# Functions without tensors would be timed on the GPU where there is one.
measure = functools.partial(measure_anywhere, device="cpu")
compare = functools.partial(compare_anywhere, device="cpu")


def exactly(milliseconds):
    """Return a Measurement of one known time."""
    return Measurement(samples_ms=(milliseconds,), interval_ms=(milliseconds, milliseconds))


def busy(milliseconds):
    """Keep the CPU at work for a time: unlike a sleep it cannot oversleep by much."""
    until = time.perf_counter_ns() + int(milliseconds * 1e6)
    while time.perf_counter_ns() < until:
        pass


def test_a_sleep_takes_what_it_takes():
    own_clock = []

    def sleep(seconds):
        begin = time.perf_counter()
        time.sleep(seconds)
        own_clock.append((time.perf_counter() - begin) * 1e3)

    result = measure(sleep, 0.005, warmup=1, iterations=20)
    # On a loaded machine sleeps last longer; what the function saw itself is the truth to be met.
    assert 5.0 <= result.min_ms <= 7.0 and result.median_ms >= 5.0
    # Between the two clocks a loaded machine may run others too, at a few of the calls.
    assert all(ms > own for ms, own in zip(result.samples_ms, own_clock[1:], strict=True))
    assert result.median_ms == pytest.approx(statistics.median(own_clock[1:]), rel=0.01)
    assert 5.0 <= result.min_ms <= result.median_ms <= result.p95_ms <= result.p99_ms <= result.max_ms
    assert result.interval_ms[0] <= result.median_ms <= result.interval_ms[1]
    assert len(result.samples_ms) == 20
    assert result.label == "sleep"
    assert not result.below_floor


def test_method_says_what_was_done():
    calls = []
    result = measure(calls.append, 1, warmup=3, iterations=7, calls_per_sample=2)
    method = result.method
    assert len(calls) == 3 + 2 * 7
    assert method["clock"] == "time.perf_counter_ns" and method["device"] == "cpu"
    assert (method["warmup"], method["samples"], method["calls_per_sample"]) == (3, 7, 2)
    assert method["l2"] == "warm" and method["graph"] is False
    assert method["stopped"] == "all 7 iterations done"
    assert 0 < method["floor_ms"] < 0.1
    assert result.environment["torch"] == torch.__version__


def test_fast_functions_are_batched_and_the_floor_is_reported():
    calls = []
    result = measure(lambda: calls.append(1), iterations=20)
    assert result.method["calls_per_sample"] > 20 and len(calls) > 20 * result.method["calls_per_sample"]
    assert result.median_ms < 0.01
    assert result.below_floor == (result.median_ms <= 1.1 * result.method["floor_ms"])
    marked = Measurement((1e-5,), (1e-5, 1e-5), method={"below_floor": True, "floor_ms": 2e-5})
    assert "as short as an empty call, which takes 20 ns here" in repr(marked)


def test_arguments_and_keywords_reach_the_function():
    seen = []

    def fn(*args, **kwargs):
        seen.append((args, kwargs))

    measure(fn, 1, 2, warmup=0, iterations=1, calls_per_sample=1, key="value")
    assert seen == [((1, 2), {"key": "value"})]
    # A keyword with an option's name is bound beforehand.
    measure(functools.partial(fn, label="mine"), warmup=0, iterations=1, calls_per_sample=1)
    assert seen[-1] == ((), {"label": "mine"})


def test_rates_are_exact_arithmetic_on_the_median():
    result = Measurement(samples_ms=(1.0, 2.0, 9.0), interval_ms=(1.0, 9.0), flops=4e9, bytes=6e6)
    assert result.median_ms == 2.0 and result.mean_ms == 4.0
    assert result.tflops == pytest.approx(2.0)  # 4e9 FLOPs in 2 ms
    assert result.gb_s == pytest.approx(3.0)  # 6e6 bytes in 2 ms
    assert exactly(1.0).tflops is None and exactly(1.0).gb_s is None


def test_share_of_the_roof_is_that_of_the_nearer_roof():
    x = torch.randn(8, 8)
    # 2 ms of work: 1e9 FLOPs need 1 ms at 1 TFLOP/s, 2.5e8 bytes need 0.5 ms at 0.5 TB/s.
    result = measure(lambda t: busy(2.0), x, warmup=0, iterations=5, flops=1e9, bytes=2.5e8, roofs=ROOFS)
    assert result.roof_share == pytest.approx(1.0 / result.median_ms)
    assert result.dtype == "fp32" and result.roof["tflops"] == 1.0
    result = measure(lambda t: busy(2.0), x, warmup=0, iterations=5, flops=1e9, bytes=7.5e8, roofs=ROOFS)
    assert result.roof_share == pytest.approx(1.5 / result.median_ms)
    result = measure(lambda t: busy(2.0), x, warmup=0, iterations=5, flops=1e9, roofs=ROOFS, dtype=torch.bfloat16)
    assert result.roof_share == pytest.approx(0.25 / result.median_ms) and result.dtype == "bf16"
    assert not result.over_roof


def test_a_time_budget_cuts_the_samples_and_says_so():
    cut = measure(busy, 0.5, warmup=0, iterations=1000, calls_per_sample=1, max_seconds=0.1)
    assert 3 <= len(cut.samples_ms) < 1000
    assert cut.method["stopped"].startswith(f"time budget of 0.1 s used after {len(cut.samples_ms)} ")


def test_three_samples_at_least_unless_one_call_is_over_the_budget():
    result = measure(time.sleep, 0.06, warmup=1, iterations=50, max_seconds=0.1)
    assert len(result.samples_ms) == 3
    result = measure(time.sleep, 0.2, warmup=1, iterations=50, max_seconds=0.1)
    assert len(result.samples_ms) == 1
    assert any("cut the warm-up" in note for note in measure(time.sleep, 0.06, max_seconds=0.1).method["notes"])


def test_a_cold_cache_costs_time_and_a_warm_one_does_not():
    x = torch.randn(512 * 1024)  # 2 MB: in the last-level cache when warm
    warm = measure(torch.sum, x, iterations=30, calls_per_sample=1)
    cold = measure(torch.sum, x, iterations=30, l2="cold")
    assert cold.method["l2"] == "cold" and cold.method["l2_flush_bytes"] >= 64 * 1024**2
    assert cold.method["calls_per_sample"] == 1
    assert cold.min_ms > warm.min_ms


def test_an_exception_goes_through_with_label_and_phase():
    turn = iter(range(100))

    def fails():
        if next(turn) == 7:
            raise RuntimeError("the student's own message")

    with pytest.raises(RuntimeError, match="the student's own message") as caught:
        measure(fails, warmup=5, iterations=20, calls_per_sample=1, label="my kernel")
    assert caught.value.__notes__ == ["raised by 'my kernel' in timed calls"]
    turn = iter([0, 0, 0, 0, 7])
    with pytest.raises(RuntimeError) as caught:
        measure(fails, warmup=5)
    assert caught.value.__notes__ == ["raised by 'fails' in warm-up calls"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 0}, "iterations is 0; it must be a whole number, 1 or more"),
        ({"l2": "hot"}, 'l2 must be "warm" or "cold", got \'hot\''),
        ({"l2": "cold", "calls_per_sample": 4}, "only the first of calls_per_sample=4 calls would be cold"),
        *(({"max_seconds": x}, f"max_seconds must be a finite number above 0, got {x!r}") for x in (0, "1", True)),
        *(({"flops": x}, f"flops must be a finite number above 0, got {x!r}") for x in (-1, "1e9", float("nan"))),
        ({"bytes": float("inf")}, "bytes must be a finite number above 0, got inf"),
        ({"discard": None}, "discard is None"),
        *(({"labels": x}, f"labels must be two names, of a and of b, got {x!r}") for x in (("a",), "ab")),
        ({"flops": 1.0, "roofs": ROOFS, "dtype": "fp8"}, "no peak for fp8; they have fp32, bf16"),
        ({"discard": "outliers"}, "discard is 'outliers'; it is a list of 'outliers' and 'throttled'"),
        ({"discard": ["slow"]}, "discard is ['slow']"),
        ({"roofs": "A100"}, "roofs is 'A100'; give machine_roofs(), or datasheet_roofs of a GPU's name"),
        ({"device": "meta"}, "CUDA GPUs and CPUs are measured, not 'meta'"),
        ({"graph": True, "device": "cpu"}, "graph=True captures a CUDA graph and needs a CUDA GPU"),
    ],
)
def test_bad_options_are_errors_in_sentences(options, message):
    with pytest.raises(ValueError) as caught:
        (functools.partial(compare, busy) if "labels" in options else measure)(busy, **options)
    assert message in str(caught.value)


WEIGHTS = torch.zeros(2, 2)


def uses_a_global():
    return WEIGHTS + 1


def test_the_device_is_that_of_the_calls_tensors(monkeypatch):
    monkeypatch.setattr("utils.benchmark.measuring.default_device", lambda: torch.device("meta"))
    x = torch.zeros(2)
    layer = torch.nn.Linear(2, 2)
    inner = {"x": [x]}
    for value in (
        x,
        [x],
        {"x": x},
        layer,
        layer.forward,
        functools.partial(torch.add, x),
        lambda: x + 1,
        lambda: inner["x"][0],
        uses_a_global,
        lambda: uses_a_global(),
    ):
        assert pick_device(None, value) == torch.device("cpu")
    for value in (3, time.sleep, torch.mm, lambda: 1, None):
        with pytest.raises(ValueError, match="not 'meta'"):
            pick_device(None, value)
    monkeypatch.setattr("utils.benchmark.measuring.default_device", device.default_device)
    assert pick_device(None).type == device.default_device().type


def test_records_survive_json():
    result = measure(
        torch.mm, torch.randn(32, 32), torch.randn(32, 32), iterations=5, flops=2 * 32**3, bytes=12288, roofs=ROOFS
    )
    record = json.loads(json.dumps(result.to_dict()))
    assert record["median_ms"] == result.median_ms and len(record["samples_ms"]) == 5
    assert Measurement.from_dict(record) == result
    assert repr(Measurement.from_dict(record)) == repr(result)
    with pytest.raises(KeyError, match="interval_ms"):
        Measurement.from_dict({"samples_ms": [1.0]})


@pytest.fixture
def thread_clock(monkeypatch):
    """The timer's clock stands still while a busy machine runs others."""
    monkeypatch.setattr(time, "perf_counter_ns", time.thread_time_ns)


def test_a_function_twice_as_slow_is_slower_and_the_reverse_is_faster(thread_clock):
    slower = compare(lambda: busy(0.5), lambda: busy(1.0), warmup=1, iterations=30, labels=("once", "twice"))
    assert slower.verdict == "slower"
    assert 0.45 <= slower.speedup <= 0.55
    assert slower.sentence() == "twice is slower than once"
    assert "whether twice and once differ" in dataclasses.replace(slower, verdict="not enough data").sentence()
    assert slower.a.median_ms / slower.b.median_ms == pytest.approx(slower.speedup, rel=0.2)
    faster = compare(lambda: busy(1.0), lambda: busy(0.5), warmup=1, iterations=30)
    assert faster.verdict == "faster" and 1.8 <= faster.speedup <= 2.2
    assert "as fast as" in repr(faster)


def test_a_function_is_as_fast_as_itself(thread_clock):
    result = compare(busy, busy, 0.3, warmup=1, iterations=40, same_within=0.05)
    assert result.verdict == "same" and abs(result.speedup - 1) < 0.05, result


def timed_turns(turns):
    """Return the turns without the untimed call of a function that follows the other."""
    return "".join(turn for before, turn in zip([turns[0], *turns[:-1]], turns, strict=True) if turn == before)


def test_samples_of_a_and_b_are_interleaved():
    turns = []
    compare(lambda: turns.append("a"), lambda: turns.append("b"), warmup=0, iterations=4, calls_per_sample=1)
    assert "".join(turns) == "abbbaaabbbaa" and timed_turns(turns) == "abbaabba"


# ---- a GPU whose clocks move ---------------------------------------------------------------------------------------


class PacedTimer:
    """A timer whose samples take 1 ms each and are numbered by the clock of the run, which is moved on by hand."""

    def __init__(self, clock, state):
        self.clock, self.busy, self.state = clock, 0.0, state

    def work(self, call, seconds):
        self.clock[0] += seconds
        self.busy += seconds

    def sample(self, calls):
        self.work(None, 0.001 * len(calls))
        calls[0].timed += [(True, False)] * len(calls)
        return [1e3 * self.clock[0]] * len(calls)


STEADY = {"sm_clock_mhz": 1980, "sm_clock_max_mhz": 1980, "throttle_reasons": []}


@pytest.mark.parametrize(
    ("state", "moves"),
    [
        (STEADY, False),
        (STEADY | {"sm_clock_mhz": 1965}, True),
        (STEADY | {"throttle_reasons": ["software power cap"]}, True),
        (STEADY | {"sm_clock_mhz": 900, "throttle_reasons": ["application clocks set"]}, False),
        (STEADY | {"power_w": 489.0, "power_limit_w": 700.0}, True),
        (STEADY | {"power_w": 430.0, "power_limit_w": 700.0}, False),
        ({"unavailable": "no NVML"}, False),
    ],
)
def test_whether_the_clocks_move(state, moves):
    assert sampling.clocks_move(state) is moves


@pytest.mark.parametrize(
    ("state", "budget_s", "seconds"),
    [(STEADY, None, 0.5), (STEADY | {"sm_clock_mhz": 1700}, None, 2.0), (STEADY | {"sm_clock_mhz": 1700}, 1.0, 0.25)],
)
def test_a_measurement_is_spread_over_time_with_the_gpu_at_work(monkeypatch, state, budget_s, seconds):
    clock = [0.0]
    monkeypatch.setattr(sampling.time, "perf_counter", lambda: clock[0])
    options = dict(warmup=0, iterations=20, l2="warm", graph=False, max_seconds=budget_s)
    gpu = torch.device("cuda", 0)
    timing = sampling.Timing(gpu, **options, calls_per_sample=None, queue_ahead=True)
    timer, call = PacedTimer(clock, state), Call(busy, (), {}, "busy")
    call.run_ms = 1.0
    spread = sampling.spread_samples(timer, call, timing)
    (taken,) = sampling._collect(timer, [call], None, timing, 0.0, spread)
    assert len(taken) == len(call.timed) == 20 and len(call.notes) == (state != STEADY)
    assert clock[0] == pytest.approx(timer.busy) == pytest.approx(seconds, abs=0.05)  # the GPU never rests
    assert max(b - a for a, b in itertools.pairwise([0.0, *taken])) <= 1e3 * seconds / 20 * 2  # evenly spread


def test_a_far_sample_is_named_and_left_out_where_that_is_asked_for(monkeypatch):
    turns = itertools.count()

    def sample(self, sequence, phase="timed"):
        return [30.0 if next(turns) % 13 == 7 else 1.0 for _ in sequence]

    monkeypatch.setattr(sampling.CpuTimer, "sample", sample)
    options = {"warmup": 0, "iterations": 39, "calls_per_sample": 1}
    named = measure(busy, 0.1, **options)
    assert named.method["outliers"] == 3 and len(named.samples_ms) == 39 and "far above the others" in repr(named)
    assert named.method["discarded"] == 0 and "throttled" not in named.method  # a CPU's clocks are not read
    kept = measure(busy, 0.1, **options, discard=["outliers", "throttled"])
    assert kept.max_ms == 1.0 and kept.method["discarded"] == 3 and kept.method["samples"] == len(kept.samples_ms) == 36
    assert "3 samples left out" in repr(kept) and "no sample is left out as throttled" in repr(kept)
    assert "all 39 iterations done" in repr(kept)
    pair = compare(busy, busy, 0.1, **options, discard=["outliers"])
    assert len(pair.a.samples_ms) == len(pair.b.samples_ms) == 39 - pair.a.method["discarded"] < 39


@pytest.mark.parametrize(
    ("samples", "throttled", "discard", "left", "said"),
    [
        ([[1.0] * 20 + [9.0], [2.0] * 21], [], ["outliers"], 20, ""),  # the pair goes with its outlier
        ([[1.0] * 20, [2.0] * 20], [[0, 1], [1, 2]], ["throttled"], 17, ""),
        ([[1.0] * 19 + [9.0]], [[0, 1]], ["outliers", "throttled"], 17, ""),
        ([[1.0] * 20], [[0, 1]], [], 20, ""),
        ([[1.0] * 20], [list(range(11))], ["throttled"], 20, "11 of 20 samples were to be left out"),
        ([[1.0] * 20], [], ["throttled"], 20, "not known here"),
    ],
)
def test_what_is_left_out(samples, throttled, discard, left, said):
    kept, counts, notes = sampling.discard_rounds(samples, throttled, discard)
    assert {len(times) for times in kept} == {left} and said in " ".join(notes) and len(notes) == bool(said)
    assert [count.get("throttled") for count in counts] == ([len(held) for held in throttled] or [None] * len(samples))
    assert {count["discarded"] for count in counts} == {len(samples[0]) - left}


def test_a_result_above_a_measured_roof_has_it_measured_again(monkeypatch):
    higher = dataclasses.replace(ROOFS, tflops={"fp32": 1e9})
    monkeypatch.setattr(Roofs, "remeasure", lambda self: higher)
    work = dict(flops=1e15, dtype="fp32", roofs=ROOFS, iterations=3, warmup=0)
    for result in (measure(busy, 0.1, **work), compare(busy, busy, 0.1, **work).b):
        assert result.roof["tflops"] == 1e9 and not result.over_roof
