"""Roofs: the arithmetic, the datasheets, and what is measured on this machine."""

import pytest
import torch

from utils.benchmark import roofs
from utils.benchmark.result import Measurement
from utils.benchmark.roofs import Roofs, datasheet_roofs, machine_roofs, measure_roofs
from utils.config import GPU_SPECS

TOY = Roofs("toy", "measured", {"fp32": 10.0, "bf16": 40.0}, 0.5, "made up")


@pytest.mark.parametrize(
    ("intensity", "dtype", "tflops"),
    [(0.0, "fp32", 0.0), (19.9, "fp32", 9.95), (1e6, "fp32", 10.0), (20.0, "bf16", 10.0), (200, torch.bfloat16, 40.0)],
)
def test_under_the_roofs(intensity, dtype, tflops):
    assert TOY.attainable_tflops(intensity, dtype) == pytest.approx(tflops)


def test_a_dtype_without_a_peak_is_an_error_that_lists_the_peaks():
    for ask in (TOY.ridge_point, TOY.peak_tflops, lambda dtype: TOY.attainable_tflops(1.0, dtype)):
        with pytest.raises(ValueError, match=r"roofs of toy have no peak for tf32; they have fp32, bf16\."):
            ask("tf32")
    with pytest.raises(ValueError, match="'int8' is not a known dtype"):
        TOY.ridge_point("int8")
    for intensity in (float("nan"), -1.0):
        with pytest.raises(ValueError, match=f"intensity is {intensity}"):
            TOY.attainable_tflops(intensity, "fp32")


def test_datasheet_roofs_are_the_row():
    spec, sheet = GPU_SPECS["A100"], datasheet_roofs("A100")
    assert sheet.origin == "datasheet"
    assert sheet.name == spec["full_name"] and sheet.detail == spec["source"]
    assert sheet.memory_bandwidth_tb_s == spec["memory_bandwidth_tb_s"]
    for dtype in ("fp16", "bf16", "fp32", "tf32", "fp8"):
        assert sheet.tflops.get(dtype) == spec[f"{dtype}_tflops"]
    assert sheet.ridge_point("bf16") == spec["bf16_tflops"] / spec["memory_bandwidth_tb_s"]


# Measured


# The figures repeat within 10% on a quiet machine. On a busy one a sample may get a tenth of it. A slip of units is a
# factor of 1000, and a lost factor of two is found below, where the times are given.


def test_the_best_sample_counts_with_all_its_flops_and_bytes(monkeypatch):
    def timed(calls, *, labels, **options):
        out = calls[0]()
        assert out.shape == (2048, 2048) and out.dtype == torch.float32 and out.std() > 10, "not random data"
        least = {"fp32": 100.0, "copy": 20.0}
        return [Measurement((3 * least[label], least[label]), (0, 0), label) for label in labels]

    monkeypatch.setattr(roofs, "measure_together", timed)
    monkeypatch.setattr(roofs, "_copy_bytes", lambda device: 256_000_000)
    monkeypatch.setattr(roofs, "_fast_dtypes", lambda device: ("fp32",))
    measured = measure_roofs("cpu")
    assert measured.tflops == dict.fromkeys(("fp32", "bf16"), pytest.approx(2 * 2048**3 / 0.1 / 1e12))
    assert measured.memory_bandwidth_tb_s == pytest.approx(2 * 256e6 / 0.02 / 1e12)
    assert measured.detail.endswith("2 rounds; bf16 as fp32, since torch has no bf16 kernel for this CPU")


@pytest.mark.parametrize("timed", [("fp32", "bf16"), ("fp32",)])
def test_bf16_without_a_kernel_for_it_is_not_timed(monkeypatch, timed):
    """As on an x86 CPU without AVX-512, where one bf16 product of side 2048 takes from ten seconds to a minute."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: "bf16" in timed)
    assert roofs._fast_dtypes(torch.device("cpu")) == timed


def test_the_copy_is_far_larger_than_the_cache_and_fits_the_memory(monkeypatch):
    cpu = torch.device("cpu")

    def copy_bytes(free, cache):
        monkeypatch.setattr(roofs, "available_memory_bytes", lambda device: free)
        monkeypatch.setattr(roofs, "last_level_cache_bytes", lambda: cache)
        return roofs._copy_bytes(cpu)

    assert copy_bytes(64e9, 32_000_000) == 256_000_000 // 4096 * 4096
    assert 4 * 0.99e9 < copy_bytes(64e9, 1_000_000_000) <= 4e9
    assert copy_bytes(800_000_000, 32_000_000) <= 200_000_000
    assert copy_bytes(64e9, None) == 256_000_000 // 4096 * 4096
    with pytest.raises(ValueError, match="Free some memory of 'cpu' first"):
        copy_bytes(400_000_000, 32_000_000)


def fp32_precision():
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    return torch.get_float32_matmul_precision(), [backend.fp32_precision for backend in backends]


@pytest.mark.parametrize("legacy", ["highest", "high", "medium"])
def test_fp32_products_are_exact_and_the_setting_comes_back(legacy):
    before = fp32_precision()
    a, b = torch.randn(256, 512), torch.randn(512, 256)
    exact = a.double() @ b.double()
    try:
        torch.set_float32_matmul_precision(legacy)
        inside = fp32_precision()
        with roofs._fp32_products("ieee"):
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
            # bf16 products, which "medium" allows, are off by 1e-1 here.
            assert (torch.mm(a, b).double() - exact).abs().max() < 1e-3
        assert fp32_precision() == inside
        with pytest.raises(KeyError), roofs._fp32_products("tf32"):
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
            raise KeyError
        assert fp32_precision() == inside
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = before[1]
    assert fp32_precision() == before


@pytest.fixture
def measured_in_turn(monkeypatch):
    """machine_roofs() on a CPU, with the roofs of this list as its measurements, one after the other."""
    queue: list[Roofs] = []
    monkeypatch.setattr(roofs, "detect_gpu", lambda: None)
    monkeypatch.setattr(roofs, "default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(roofs, "measure_roofs", lambda device: queue.pop(0))
    monkeypatch.setattr(roofs, "_machine_roofs", {})
    return queue


def test_machine_roofs_are_measured_once_and_the_best_of_all_measurements_is_kept(measured_in_turn, monkeypatch):
    measured_in_turn += [
        Roofs("m", "measured", {"fp32": value}, bandwidth) for value, bandwidth in ((2, 0.1), (1, 0.3))
    ]
    assert machine_roofs() is machine_roofs()
    best = machine_roofs(refresh=True)
    assert (best.tflops, best.memory_bandwidth_tb_s) == ({"fp32": 2}, 0.3) and machine_roofs() is best
    measured_in_turn.append(Roofs("other", "measured", {"fp32": 1.0}, 0.1))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4321)  # another number of threads has other roofs
    assert machine_roofs().name == "other"


def test_a_busy_machine_is_named(measured_in_turn, capsys):
    measured_in_turn += [
        Roofs("m", "measured", {"fp32": 1.0}, 0.1, others=0.63),
        Roofs("m", "measured", {"fp32": 1.0}, 0.1, others=0.05),
    ]
    machine_roofs()
    assert "other processes used 63% of the CPU" in capsys.readouterr().err  # not among what a command prints
    assert machine_roofs(refresh=True).busy == "" and capsys.readouterr() == ("", "")


def test_a_known_gpu_has_its_datasheet_roofs(monkeypatch):
    monkeypatch.setattr(roofs, "detect_gpu", lambda: "H200")
    monkeypatch.setattr(roofs, "measure_roofs", lambda device: pytest.fail("measured a known part"))
    assert machine_roofs() == datasheet_roofs("H200")


@pytest.mark.gpu
def test_measured_roofs_of_a_gpu():
    from utils.machine.device import detect_gpu

    torch.set_float32_matmul_precision("high")
    try:
        before = fp32_precision()
        measured = measure_roofs("cuda")
        assert fp32_precision() == before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert measured.name == torch.cuda.get_device_name()
    if torch.cuda.get_device_capability() < (8, 0):
        assert list(measured.tflops) == ["fp16", "fp32"]
        return
    assert list(measured.tflops) == ["fp16", "bf16", "fp32", "tf32"]
    assert measured.tflops["tf32"] > 1.2 * measured.tflops["fp32"]
    assert measured.tflops["bf16"] == pytest.approx(measured.tflops["fp16"], rel=0.3)
    row = detect_gpu()
    if row is not None:
        sheet = datasheet_roofs(row)
        assert 0.6 < measured.memory_bandwidth_tb_s / sheet.memory_bandwidth_tb_s < 1.02
        for dtype, peak in measured.tflops.items():
            assert 0.4 * sheet.tflops[dtype] < peak < 1.1 * sheet.tflops[dtype], dtype
