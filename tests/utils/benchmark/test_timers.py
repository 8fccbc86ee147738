"""The two timers: the CPU's on real calls, the GPU's on a simulated stream whose times are known exactly."""

import contextlib
import gc
import itertools
import time
from types import SimpleNamespace

import pytest
import torch

from utils.benchmark import cpu_timer, cuda_timer, sampling
from utils.benchmark.cpu_timer import Call, CpuTimer
from utils.benchmark.cuda_timer import CudaTimer
from utils.benchmark.sampling import Timing


class Stream:
    """A GPU stream in virtual milliseconds: work starts when the CPU has issued it and the work before it is done."""

    def __init__(self):
        self.host = 0.0  # what the CPU's clock says
        self.done = 0.0  # when all work issued so far will have run
        self.busy_from_launch = []

    def launch(self, duration, issue=0.004):
        self.host += issue
        self.done = max(self.done, self.host) + duration

    def synchronize(self, device=None):
        self.host = max(self.host, self.done)

    def event(stream):
        class Event:
            def __init__(self, enable_timing=False):
                self.at = None

            def record(self):
                stream.host += 0.001
                self.at = max(stream.done, stream.host)

            def query(self):
                return self.at <= stream.host

            def synchronize(self):
                stream.host = max(stream.host, self.at)

            def elapsed_time(self, end):
                return end.at - self.at

        return Event


@pytest.fixture
def stream(monkeypatch):
    stream = Stream()
    cuda_timer._spin_cycles_per_ms.cache_clear()
    monkeypatch.setattr(cuda_timer, "_GPU_FLOORS", {})
    clock = SimpleNamespace(perf_counter=lambda: stream.host / 1e3, perf_counter_ns=lambda: int(stream.host * 1e6))
    monkeypatch.setattr(cpu_timer, "time", clock)
    monkeypatch.setattr(torch.cuda, "Event", stream.event())
    monkeypatch.setattr(torch.cuda, "synchronize", stream.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: stream.launch(cycles / 1.5e6 + 0.001), raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.contextmanager(lambda: (yield))())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50_000_000))
    yield stream
    cuda_timer._spin_cycles_per_ms.cache_clear()


def gpu_timer(stream, monkeypatch=None, cold=False, queue_ahead=True):
    if cold:
        flush = SimpleNamespace(zero_=lambda: stream.launch(0.070))
        monkeypatch.setattr(torch, "zeros", lambda size, **options: vars(flush).update(nbytes=4 * size) or flush)
    return CudaTimer(torch.device("cuda", 0), cold=cold, graph=False, queue_ahead=queue_ahead)


def kernel(stream, duration, issue=0.008):
    return Call(lambda: stream.launch(duration, issue), (), {}, "kernel")


def test_a_kernel_shorter_than_its_launch_is_timed_without_the_launch(stream):
    timer, call = gpu_timer(stream), kernel(stream, 0.005)
    timer.warm_up(call, 10)
    timer.calibrate(call)
    assert call.runs_per_sample >= 30  # 200 us of 5 us kernels
    samples = timer.sample([call] * 20)
    assert samples == pytest.approx([0.005] * 20)
    assert timer.describe(call)["queue"].startswith("kept ahead by a spin kernel")


def test_a_pause_of_the_host_in_the_warm_up_leaves_the_calls_of_a_sample(stream):
    runs = []

    def paused():
        runs.append(1)
        stream.launch(0.005, 5.0 if len(runs) == 10 else 0.008)

    timer, call = gpu_timer(stream), Call(paused, (), {}, "kernel")
    timer.prepare(call, 10, None)
    assert call.runs_per_sample >= 30 and timer.sample([call]) == pytest.approx([0.005])


def test_as_issued_the_launch_shows(stream):
    timer, call = gpu_timer(stream, queue_ahead=False), kernel(stream, 0.005)
    timer.warm_up(call, 10)
    call.runs_per_sample = 50
    assert timer.sample([call] * 4) == pytest.approx([0.008] * 4, rel=0.05)
    assert "launch gaps are included" in timer.describe(call)["queue"]


def test_a_burst_that_the_spin_did_not_cover_is_repeated(stream):
    runs = []
    call = Call(lambda: (runs.append(1), stream.launch(0.005, 0.5)), (), {}, "kernel")  # no warm-up: 0.05 ms is assumed
    assert gpu_timer(stream).sample([call] * 8) == pytest.approx([0.005] * 8)
    assert call.queueable and len(runs) > 8, "the repeated bursts were run too"


def test_a_function_that_waits_does_not_spoil_the_other_one(stream):
    """In one comparison, each function keeps its own way of being timed."""

    def waits():
        stream.launch(0.5)
        stream.synchronize()

    timer, call = gpu_timer(stream), kernel(stream, 0.130, issue=0.3)
    waiting = Call(waits, (), {}, "waits")
    for each in (waiting, call):
        timer.warm_up(each, 10)
    samples = timer.sample([waiting, call, call, waiting, waiting, call, call, waiting])
    assert [samples[i] for i in (1, 2, 5, 6)] == pytest.approx([0.130] * 4)
    assert call.queueable and not call.notes and not waiting.queueable and len(waiting.notes) == 1
    assert "device work only" in timer.describe(call)["queue"] and "gaps" in timer.describe(waiting)["queue"]


def test_a_sample_says_whether_it_was_queued_ahead_and_whether_the_clocks_were_held_back(stream, monkeypatch):
    reasons, readings, waits = ["idle"], [], []
    monkeypatch.setattr(cuda_timer, "gpu_state", lambda device: readings.append(1) or {"throttle_reasons": [*reasons]})
    monkeypatch.setattr(cuda_timer, "time", cpu_timer.time)
    timer = gpu_timer(stream)
    call = Call(lambda: (stream.launch(0.5), waits and stream.synchronize()), (), {}, "waits later")
    timer.warm_up(call, 10)
    for phase in ("calibration", "timed", "timed"):
        timer.sample([call] * 4, phase)
    assert len(call.timed) == 8 and len(readings) == 1, "read once in 0.1 s"
    assert timer.describe(call)["queue"].endswith("device work only, no launch gaps")
    waits.append(True)
    reasons[:], stream.host = ["software power cap"], stream.host + 200.0
    timer.sample([call] * 4)
    assert call.timed == [(True, False)] * 8 + [(False, True)] * 4
    assert "ahead by a spin kernel for 8 of 12 samples; the others include" in timer.describe(call)["queue"]


def test_throttled_samples_are_left_out(stream, monkeypatch):
    def state(device):
        return {"throttle_reasons": ["software power cap"] * (stream.host < 200.0)}

    for module in (cuda_timer, sampling):
        monkeypatch.setattr(module, "gpu_state", state)
    monkeypatch.setattr(cuda_timer, "time", cpu_timer.time)
    monkeypatch.setattr(sampling, "time", cpu_timer.time)
    monkeypatch.setattr(sampling, "environment", lambda device: {})
    timing = Timing(torch.device("cuda", 0), warmup=0, discard=["throttled"])
    (alone,) = sampling.time_calls(timing, [kernel(stream, 2.0)], itertools.repeat((0,)))
    left = len(alone.samples_ms)
    assert alone.method["throttled"] == alone.method["discarded"] == 100 - left and 50 < left < 100
    stream.host = stream.done = 0.0
    pair = [kernel(stream, 2.0), kernel(stream, 1.0)]
    a, b = sampling.time_calls(timing, pair, itertools.cycle(((0, 1), (1, 0))))
    assert len(a.samples_ms) == len(b.samples_ms) == 100 - a.method["discarded"] and 0 < a.method["throttled"] < 100
    assert "taken while the GPU's clocks were held back" in repr(a) and "left out, with the samples" in repr(b)


def test_an_error_of_the_gpu_names_what_was_running(stream, monkeypatch):
    timer, call = gpu_timer(stream), kernel(stream, 0.5)

    def broken(device=None):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        timer.sample([call] * 3)
    assert caught.value.__notes__ == ["raised while 3 timed samples of kernel were on the GPU"]


def test_the_gpu_hardly_rests_between_bursts_of_long_kernels(stream):
    timer, call = gpu_timer(stream), kernel(stream, 0.5)
    timer.warm_up(call, 10)
    timer.sample([call] * 10)
    before, spun = stream.done, []
    sleep, torch.cuda._sleep = torch.cuda._sleep, lambda cycles: (spun.append(cycles / 1.5e6), sleep(cycles))
    timer.sample([call] * 200)
    assert stream.done - before > 100 and sum(spun) < 0.05 * (stream.done - before)


def test_a_warm_cache_is_the_functions_own(stream, monkeypatch):
    """Functions that take turns make an untimed call before a sample that follows the other's, if it matters."""

    def cached(name, cold, warm):
        def run():
            stream.launch(warm if owners[-1] == name else cold, 0.008)
            owners.append(name)

        return Call(run, (), {}, name)

    owners = [None]
    turns = (a := cached("a", 0.200, 0.120)), (b := cached("b", 0.300, 0.150))
    timer = gpu_timer(stream)
    for call in turns:
        timer.warm_up(call, 10)
    samples = timer.sample([a, b, b, a] * 5)
    assert samples == pytest.approx([0.120, 0.150, 0.150, 0.120] * 5)
    long = cached("long", 3.1, 3.0)
    timer.warm_up(long, 4)
    assert timer.sample([a, long])[1] == pytest.approx(3.1)  # no untimed call: for a long function it hardly matters
    flushed, before = gpu_timer(stream, monkeypatch, cold=True), len(owners)
    flushed.sample([a, b, b, a])
    assert owners[before:] == ["a", "b", "b", "a"]  # the cache is flushed: no untimed calls


def test_the_flush_is_outside_of_the_timed_region(stream, monkeypatch):
    timer, call = gpu_timer(stream, monkeypatch, cold=True), kernel(stream, 0.030)
    assert timer.describe(call)["l2_flush_bytes"] == 256 * 1024**2
    timer.warm_up(call, 10)
    before = stream.done
    assert timer.sample([call] * 10) == pytest.approx([0.030] * 10)
    assert stream.done - before > 10 * (0.030 + 0.070)  # it did run


def test_the_floor_is_an_empty_kernel_sampled_alike(stream):
    timer, call = gpu_timer(stream), kernel(stream, 0.005)
    timer.warm_up(call, 10)
    timer.calibrate(call)
    assert timer.floor_ms(call) == pytest.approx(0.001)
    host_only = Call(lambda: None, (), {}, "no GPU work")
    timer.warm_up(host_only, 10)
    assert max(timer.sample([host_only] * 3)) <= timer.floor_ms(host_only)


def test_warm_up_runs_exactly_as_often_as_asked_or_until_the_deadline():
    for wanted in (0, 1, 2, 3, 10, 37):
        seen = []
        CpuTimer(cold=False).warm_up(call := Call(seen.append, (1,), {}, "f"), wanted)
        assert call.warmed_up == wanted == len(seen)
    call = Call(time.sleep, (0.02,), {}, "sleep")
    CpuTimer(cold=False).warm_up(call, 1000, time.perf_counter() + 0.1)
    assert 1 <= call.warmed_up <= 6


def test_the_garbage_collector_pauses_and_resumes():
    during = []
    timer, call = CpuTimer(cold=False), Call(lambda: during.append(gc.isenabled()), (), {}, "f")
    assert gc.isenabled()
    timer.sample([call] * 3)
    assert during == [False] * 3 and gc.isenabled()


def test_the_cpu_flush_streams_more_than_the_last_level_cache(monkeypatch):
    monkeypatch.setattr(cpu_timer, "last_level_cache_bytes", lambda: 40 * 1024**2)
    timer = CpuTimer(cold=True)
    call = Call(lambda: None, (), {}, "f")
    assert timer.flush.nbytes == timer.describe(call)["l2_flush_bytes"] == 80 * 1024**2
    timer.sample([call] * 3)
    assert timer.flush.unique().tolist() == [3]  # every line was written, once a sample
