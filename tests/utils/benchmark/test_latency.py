"""The three documented functions: exact call counts, known allocations, known operators, hand-made GPU traces."""

import gc
import time
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from utils.benchmark.latency import (
    benchmark_latency,
    benchmark_memory,
    count_cuda_kernels,
    default_schedule,
    live_cpu_tensor_bytes,
)

MB = 2**20
KEYS = ["gemm", "elementwise", "softmax", "layernorm", "memory", "other", "total"]


def test_latency_is_a_mean_in_ms():
    # Every tenth call takes ten times as long: a median would not see it.
    turn = iter(range(100))
    uneven = benchmark_latency(lambda: time.sleep(0.02 if next(turn) % 10 == 0 else 0.002), n_warmup=0, n_repeat=20)
    assert isinstance(uneven, float) and uneven >= 3.8


def test_latency_calls_exactly_as_often_as_documented():
    calls = []
    benchmark_latency(calls.append, 1)
    assert len(calls) == 10 + 100
    calls.clear()
    benchmark_latency(calls.append, 1, n_warmup=0, n_repeat=3)
    assert len(calls) == 3


def test_arguments_reach_the_function_also_with_an_options_name():
    seen = []

    def fn(*args, **kwargs):
        seen.append((args, kwargs))

    benchmark_latency(fn, 1, n_warmup=0, n_repeat=1, label="mine", iterations=7, device="x")
    assert seen == [((1,), {"label": "mine", "iterations": 7, "device": "x"})]


def test_bad_counts_are_refused():
    for measuring in (benchmark_latency, benchmark_memory):
        with pytest.raises(ValueError, match="n_repeat is 0; it must be a whole number, 1 or more"):
            measuring(time.sleep, 0, n_repeat=0)
        with pytest.raises(ValueError, match="n_warmup is -1; it must be a whole number, 0 or more"):
            measuring(time.sleep, 0, n_warmup=-1)


def temporaries(x):
    """Allocate 64 MB at most at once; 16 MB of them, the result, stay."""
    large = torch.zeros(48 * MB, dtype=torch.int8)
    result = torch.zeros(16 * MB, dtype=torch.int8)
    del large
    again = torch.zeros(8 * MB, dtype=torch.int8)
    del again
    return result


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's own way of measuring")
def test_memory_is_what_the_call_adds_and_the_absolute_peak_comes_first():
    x = torch.ones(32 * MB, dtype=torch.int8)
    gc.collect()  # other tests' tensors that only wait to be collected
    before = live_cpu_tensor_bytes()
    peak_memory_gb, allocated_memory_gb = benchmark_memory(temporaries, x, n_warmup=1, n_repeat=3)
    assert allocated_memory_gb == pytest.approx(64 * MB / 1e9, rel=1e-3)
    assert peak_memory_gb == pytest.approx((before + 64 * MB) / 1e9, rel=1e-3)
    assert peak_memory_gb >= (32 + 64) * MB / 1e9


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's own way of measuring")
def test_memory_calls_exactly_as_often_as_documented_and_drops_results():
    calls = []

    def fn():
        calls.append(1)
        return torch.zeros(4 * MB, dtype=torch.int8)

    _, added = benchmark_memory(fn)
    assert len(calls) == 10 + 100
    assert added == pytest.approx(4 * MB / 1e9, rel=1e-3)
    _, added = benchmark_memory(lambda: calls.append(fn()), n_warmup=1, n_repeat=3)  # what calls keep adds up
    assert added == pytest.approx(3 * 4 * MB / 1e9, rel=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's own way of measuring")
def test_memory_inside_a_profiler_is_an_error_and_not_a_ruined_profile():
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        with pytest.raises(RuntimeError, match="a profiler is already running"):
            benchmark_memory(torch.exp, torch.ones(4), n_warmup=0, n_repeat=1)
        torch.exp(torch.ones(4))
    assert any(event.name == "aten::exp" for event in prof.events())


def test_default_schedule_waits_1_warms_up_3_records_6():
    actions = [default_schedule(step) for step in range(10)]
    record = ProfilerAction.RECORD
    assert actions == [ProfilerAction.NONE, *[ProfilerAction.WARMUP] * 3, *[record] * 5, ProfilerAction.RECORD_AND_SAVE]


def block(x):
    """Run 1 gemm, 2 elementwise, 1 softmax, 1 layernorm, 1 copy, 1 reduction and 1 attention, in views and wrappers."""
    y = torch.nn.functional.layer_norm(x, (64,))
    y = torch.softmax(y @ y.t(), -1)
    y = torch.nn.functional.gelu(y + 1).view(-1).reshape(64, 64).to(x.dtype)
    y = y.t().clone(memory_format=torch.contiguous_format)
    y = torch.nn.functional.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None])
    return y.sum()


def record_cpu(fn, steps, **options):
    with profile(activities=[ProfilerActivity.CPU], **options) as prof:
        for _ in range(steps):
            fn()
            prof.step()
    return prof


def test_cpu_leaf_operators_per_step():
    x = torch.randn(64, 64)
    counts = count_cuda_kernels(record_cpu(lambda: block(x), 10, schedule=default_schedule))
    assert list(counts) == KEYS
    assert counts == {"gemm": 1, "elementwise": 2, "softmax": 1, "layernorm": 1, "memory": 1, "other": 2, "total": 8}


def test_a_loop_that_ends_before_or_after_its_schedule_is_counted_right_or_refused():
    x = torch.randn(8, 8)
    for calls in range(4, 12):
        prof = record_cpu(lambda: [x @ x for _ in range(3)], calls, schedule=default_schedule)
        if 5 <= calls <= 10:
            assert count_cuda_kernels(prof)["gemm"] == 3, calls
        else:
            with pytest.raises(ValueError, match="kept no step"):
                count_cuda_kernels(prof)


def test_uneven_steps_are_rounded():
    x, turn = torch.randn(8, 8), iter(range(100))

    def sometimes():
        torch.exp(x)
        if next(turn) == 5:
            x @ x

    counts = count_cuda_kernels(record_cpu(sometimes, 10, schedule=default_schedule))
    assert counts["elementwise"] == 1 and counts["gemm"] == 0


def gpu_event(name, activity="kernel", device=DeviceType.CUDA, annotation=False):
    return SimpleNamespace(
        name=name,
        device_type=device,
        activity_type=activity,
        is_user_annotation=annotation,
        cpu_children=[],
        cpu_parent=None,
    )


def test_gpu_kernels_per_step_without_annotations_and_synchronization():
    step = [
        gpu_event("ProfilerStep*", "user_annotation", DeviceType.CPU, True),
        gpu_event("attention block", "user_annotation", DeviceType.CPU, True),
        gpu_event("aten::mm", "cpu_op", DeviceType.CPU),
        gpu_event("ProfilerStep*", "gpu_user_annotation", annotation=True),
        gpu_event("attention block", "gpu_user_annotation", annotation=True),
        gpu_event("Context Sync", "cuda_sync"),
        gpu_event("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"),
        gpu_event("nvjet_tst_64x16_64x16_2x1_v_bz_splitK_TNT"),
        gpu_event("void cublasLt::splitKreduce_kernel<32, 16, int, float>"),
        gpu_event("triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_0"),
        gpu_event("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64> >"),
        gpu_event("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >"),
        gpu_event("Memcpy DtoD (Device -> Device)", "gpu_memcpy"),
        gpu_event("Memset (Device)", "gpu_memset"),
    ]
    expected = {"gemm": 3, "elementwise": 1, "softmax": 0, "layernorm": 1, "memory": 2, "other": 1, "total": 8}
    counts = count_cuda_kernels(SimpleNamespace(events=lambda: step * 6))
    assert counts == expected
    # Older profilers do not say what kind of activity an event is: an annotation is known by its name on the CPU.
    for event in step:
        event.activity_type = None
        event.is_user_annotation = event.device_type == DeviceType.CPU and event.is_user_annotation
    older = [event for event in step if event.name != "Context Sync"]
    assert count_cuda_kernels(SimpleNamespace(events=lambda: older * 6)) == expected


def test_an_unfinished_profile_is_an_error():
    with pytest.raises(ValueError, match=r"needs a torch.profiler.profile .* got dict"):
        count_cuda_kernels({})
    with profile(activities=[ProfilerActivity.CPU], schedule=default_schedule) as prof:
        torch.ones(2)
    with pytest.raises(ValueError, match="whose schedule reached its active steps"):
        count_cuda_kernels(prof)


@pytest.mark.gpu
def test_gpu_memory_and_latency():
    x = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    benchmark_memory(lambda: x @ x, n_repeat=2)  # cuBLAS's workspace
    other = torch.empty(256 * MB, dtype=torch.int8, device="cuda")
    peak, added = benchmark_memory(lambda: x @ x, n_repeat=5)
    assert added == pytest.approx(2 * MB / 1e9, rel=0.01)
    assert peak >= (other.nbytes + x.nbytes + 2 * MB) / 1e9 * 0.99
    assert benchmark_latency(torch.mm, x, x) > 0.0
