"""`tune=True` of the GEMM: what is timed, kept and found again; on a CPU with a timer that is told the times."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from utils.kernels import gemm, gemm_launch, gemm_tune

hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache of a user, in a process that has timed nothing, on a device with 132 SMs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LABS_COMPILE_CACHE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    forget()
    yield tmp_path
    forget()


def forget():
    """Leave what the process knows: what comes now is as in a new process."""
    gemm_tune._kept.clear()
    gemm_tune._file.cache_clear()


@pytest.fixture
def timed(monkeypatch):
    """The products that were timed, one after another. The third of the configurations is always the fastest."""
    products = []

    def time_them(a, b, configs):
        products.append(gemm_tune.product_name(a, b))
        return {configs[i].name: us for us, i in ((5.0, 2), (6.0, 0), (7.0, 3), (8.0, 1))}

    monkeypatch.setattr(gemm_tune, "fastest_first", time_them)
    return products


def operands(m=104, n=3456, k=4352, dtype=torch.float16):
    return torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=dtype).T


def test_a_product_is_timed_once_in_a_process_and_found_by_the_next(cache, timed):
    a, b = operands()
    candidates = gemm_tune.candidates_of(a, b)
    assert len(candidates) == gemm_tune.CANDIDATES == 4
    for _ in range(3):
        assert gemm_tune.tuned(a, b) == candidates[2]
    forget()
    assert gemm_tune.tuned(a, b) == candidates[2]
    assert len(timed) == 1
    (file,) = cache.rglob("*.json")
    assert file.parent == cache / "gpu-efficiency-labs" / "gemm" and file.name.startswith(
        "NVIDIA-H100-80GB-HBM3_triton-"
    )
    ((product, times),) = json.loads(file.read_text()).items()
    assert product == "104 x 3456 x 4352 float16, strides (4352, 1) and (1, 4352)"
    assert [*times] == [candidates[i].name for i in (2, 0, 3, 1)]


def test_sizes_strides_and_dtypes_are_timed_apart_and_kept_together(cache, timed):
    a, b = operands()
    padded = torch.empty(104, 4360, dtype=torch.float16)[:, :4352]
    others = [(a, b.contiguous()), (padded, b), operands(dtype=torch.bfloat16), operands(k=4288)]
    for pair in ((a, b), *others):
        gemm_tune.tuned(*pair)
    assert len(timed) == len({*timed}) == 5
    forget()
    for pair in (*others, (a, b)):
        gemm_tune.tuned(*pair)
    assert len(timed) == 5


def test_another_gpu_and_another_table_are_timed_anew(cache, timed, monkeypatch):
    pair = operands()
    gemm_tune.tuned(*pair)
    forget()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    gemm_tune.tuned(*pair)
    assert len(timed) == 2 and len([*cache.rglob("*.json")]) == 2
    forget()
    # A file that names no configuration of the present table.
    path = gemm_tune._file(0)
    path.write_text(path.read_text().replace("x", "y").replace(" y ", " x "))
    gemm_tune.tuned(*pair)
    assert len(timed) == 3


def test_a_change_of_a_kernel_is_another_file(cache, monkeypatch, tmp_path):
    before = gemm_tune._file(0)
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "gemm_tune.py").write_text("changed")
    forget()
    monkeypatch.setattr(gemm_tune, "__file__", str(folder / "gemm_tune.py"))
    assert gemm_tune._file(0).name.rpartition("_")[0] == before.name.rpartition("_")[0]
    assert gemm_tune._file(0) != before


@pytest.mark.parametrize("content", ["", "{", "\x00"])
def test_a_damaged_file_is_no_file(cache, timed, content):
    path = gemm_tune._file(0)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    gemm_tune.tuned(*operands())
    forget()
    gemm_tune.tuned(*operands())
    assert len(timed) == 1


def test_a_cache_that_is_off_or_read_only_keeps_times_in_the_process_alone(cache, timed, monkeypatch):
    monkeypatch.setenv("LABS_COMPILE_CACHE", "off")
    gemm_tune.tuned(*operands())
    assert len(timed) == 1 and not [*cache.rglob("*.json")]
    monkeypatch.delenv("LABS_COMPILE_CACHE")
    forget()
    (cache / "gpu-efficiency-labs").write_text("a file where the folder should be")
    for _ in range(2):
        gemm_tune.tuned(*operands())
    assert len(timed) == 2


def test_within_a_capture_only_what_was_timed_before(cache, timed, monkeypatch):
    pair = operands()
    chosen = gemm_tune.tuned(*pair)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert gemm_tune.tuned(*pair) == chosen
    with pytest.raises(RuntimeError, match=r"time 104 x 3456 x 4288 float16.*before the capture, or leave tune out"):
        gemm_tune.tuned(*operands(k=4288))


@pytest.fixture
def on_cpu(monkeypatch):
    """Launches that multiply on the CPU; those of names in the set are wrong."""
    wrong: set[str] = set()

    def launch(a, b, config):
        def call(a, b):
            c = a @ b
            return c * 0.9 if config.name in wrong else c

        return call(a, b), call

    monkeypatch.setattr(gemm_launch, "gemm_and_launch", launch)
    return wrong


def told(us):
    """A timer that calls each function once and returns these times in us."""

    def timer(calls, labels):
        assert all(call().shape == (104, 136) for call in calls)
        return [SimpleNamespace(median_ms=1e-3 * us[label]) for label in labels]

    return timer


def test_the_fastest_comes_first_and_the_caller_s_random_numbers_stay(cache, on_cpu):
    a, b = operands(n=136, k=256)
    configs = gemm_tune.candidates_of(a, b)
    us = dict(zip((config.name for config in configs), (9.0, 7.5, 8.0, 11.0), strict=True))
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    times = gemm_tune.fastest_first(a, b, configs, told(us))
    assert torch.equal(torch.rand(3), expected)
    assert [*times] == sorted(us, key=us.get) and times == pytest.approx(us)


def test_a_wrong_product_is_named_and_left_out(cache, on_cpu):
    a, b = operands(n=136, k=256)
    configs = gemm_tune.candidates_of(a, b)
    on_cpu.add(configs[0].name)
    us = dict(zip((config.name for config in configs), (1.0, 7.5, 8.0, 11.0), strict=True))
    with pytest.warns(
        UserWarning, match=f"leaves out {configs[0].name}: it differs from torch.matmul by 0.1, .*mistake"
    ):
        times = gemm_tune.fastest_first(a, b, configs, told(us))
    assert [*times] == [config.name for config in configs[1:]]
    on_cpu |= {config.name for config in configs}
    with (
        pytest.warns(UserWarning),
        pytest.raises(RuntimeError, match=r"No configuration gives torch\.matmul's product"),
    ):
        gemm_tune.fastest_first(a, b, configs, told(us))


def test_where_nothing_can_be_timed_the_call_says_so():
    half = torch.ones(2, 8).half()
    with pytest.raises(ValueError, match="runs on a Hopper GPU"):
        gemm.gemm_warp_specialized(half, half.T, tune=True)
    with FlopCounterMode(display=False), pytest.raises(RuntimeError, match=r"not called plainly.*Leave tune out there"):
        gemm.gemm_warp_specialized(half, half.T, tune=True)


@pytest.mark.gpu
@hopper
def test_a_tuned_product_is_right_fast_to_repeat_and_captured(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LABS_COMPILE_CACHE", raising=False)
    forget()
    a = torch.randn(232, 2000, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(3816, 2000, device="cuda", dtype=torch.bfloat16).T
    state = torch.cuda.get_rng_state()
    c = gemm.gemm_warp_specialized(a, b, tune=True)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    exact = a.double() @ b.double()
    assert (c.double() - exact).norm() / exact.norm() < 2.0**-8
    (times,) = json.loads(gemm_tune._file(0).read_text()).values()
    assert len(times) == 4 and [*times.values()] == sorted(times.values())
    monkeypatch.setattr(gemm_tune, "fastest_first", None)  # nothing is timed any more
    chosen = gemm_tune.tuned(a, b)
    assert chosen.name == next(iter(times)) and torch.equal(c, gemm_launch.gemm(a, b, chosen))
    assert torch.equal(c, gemm.gemm_warp_specialized(a, b, tune=True))
    forget()
    assert gemm_tune.tuned(a, b) == chosen
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gemm.gemm_warp_specialized(a, b, tune=True)
        with pytest.raises(RuntimeError, match="before the capture"):
            gemm.gemm_warp_specialized(a[:, :1000], b[:1000], tune=True)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, c)
    assert gemm.gemm_warp_specialized(a[:0], b, tune=True).shape == (0, 3816)
