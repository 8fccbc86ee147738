"""The row of each GPU name, and the answers of the probes on this machine and on simulated machines."""

import os
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from utils.config import GPU_SPECS
from utils.machine import device
from utils.machine.device import Support, default_device, detect_gpu, usable_device

PROBES = [
    device.cuda_support,
    device.triton_support,
    device.gluon_support,
    device.compile_support,
    device.flash_attn_support,
    device.cuda_graph_support,
]


@pytest.fixture(autouse=True)
def fresh_probes():
    def clear():
        for function in vars(device).values():
            getattr(function, "cache_clear", lambda: None)()

    clear()
    yield
    clear()


@pytest.fixture
def hopper(monkeypatch):
    """Pretend a machine with an H200, up to the point where a probe runs something on it."""
    pretend_gpu(monkeypatch, (9, 0))


def pretend_gpu(monkeypatch, capability):
    monkeypatch.setattr(device, "cuda_support", lambda: Support(True, "a GPU is pretended."))
    monkeypatch.setattr(device, "compute_capability", lambda: capability)
    monkeypatch.setattr(device, "default_device", lambda: torch.device("cuda"))


def pretend_versions(monkeypatch, **versions):
    monkeypatch.setattr(device, "package_version", lambda name: versions.get(name.replace("-", "_")))


def run_python(code: str, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ROWS = {
    "A6000": ["NVIDIA RTX A6000"],
    "A10": ["NVIDIA A10"],
    "A100": ["NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"],
    "A100-40GB": ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"],
    "H100": ["NVIDIA H100 80GB HBM3"],
    "H100-PCIe": ["NVIDIA H100 PCIe"],
    "H200": ["NVIDIA H200"],
    "4090": ["NVIDIA GeForce RTX 4090"],
    "L4": ["NVIDIA L4"],
    "L40S": ["NVIDIA L40S"],
    "B200": ["NVIDIA B200"],
    "GB10": ["NVIDIA GB10"],
    None: [
        *("NVIDIA A10G", "NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM-64GB", "NVIDIA A800-SXM4-80GB", "NVIDIA A40"),
        *("NVIDIA H100 NVL", "NVIDIA H800", "NVIDIA H20", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA GB200"),
        *("NVIDIA B300 SXM6 AC", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L40"),
        *("NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX A6000-48Q", "NVIDIA L20", "Tesla T4", "GRID A100-10C"),
        *("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA H200 MIG 3g.71gb", "AMD Instinct MI300X", "H", "A1", "CPU", ""),
    ],
}


def test_a_name_is_its_row_and_another_part_is_none():
    found = {name: (row, detect_gpu(name)) for row, names in ROWS.items() for name in names}
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}
    assert set(ROWS) - {None} <= set(GPU_SPECS)


def test_a_slice_under_the_whole_name_is_no_row(monkeypatch):
    for sm_count, row in ((132, "H200"), (16, None)):
        properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=sm_count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, found=properties: found)
        assert detect_gpu() == row


@pytest.mark.parametrize("wrong", ["abc", "", True, 1.5, -1, 99, "cuda:99"])
def test_a_device_that_is_not_here_is_refused_in_a_sentence(wrong):
    with pytest.raises(ValueError, match=r"^device is .*pass (device=)?\"cpu\""):
        usable_device(wrong)


def test_a_device_is_taken_as_torch_takes_it():
    assert usable_device("cpu") == usable_device(torch.device("cpu")) == torch.device("cpu")
    assert usable_device("meta").type == "meta" and usable_device(None) == default_device()


@pytest.mark.slow
def test_probing_imports_neither_triton_nor_transformers():
    probes = ", ".join(f"device.{probe.__name__}" for probe in PROBES)
    out = run_python(
        f"import sys; from utils.machine import device; [probe() for probe in ({probes})];"
        "print([name for name in ('triton', 'transformers', 'matplotlib', 'pandas') if name in sys.modules])"
    )
    assert out == "[]"


# Triton: compiled or interpreted
# (what a process does first, words of its answer); each is a fork of one process that has not imported Triton.
MODES = [
    ("", "True", "in the simulator"),
    ("import triton", "True", "in the simulator"),
    ("os.environ['TRITON_INTERPRET'] = '1'", "False", "as TRITON_INTERPRET asks", "Restart Python without"),
    ("import triton; os.environ['TRITON_INTERPRET'] = '1'", "False", "as TRITON_INTERPRET asks"),
    (
        "os.environ['TRITON_INTERPRET'] = '1'; import triton; del os.environ['TRITON_INTERPRET']",
        "False",
        "interprets kernels in this process",
    ),
]
ASK = """
import os, sys
from utils.machine import device
for begin in sys.argv[1:]:
    if os.fork() == 0:
        exec(begin)
        support = device.triton_support()
        print(support.ok, support.reason, support.remedy, flush=True)
        os._exit(0)
    os.wait()
"""
needs_triton = pytest.mark.skipif(device.package_version("triton") is None, reason="Triton is not installed")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU answers")


@needs_triton
@no_gpu
def test_a_process_that_interprets_kernels_is_refused():
    answers = run_python(ASK, *(begin for begin, *_ in MODES)).splitlines()
    for (begin, *words), said in zip(MODES, answers, strict=True):
        assert said.startswith(words[0]) and all(word in said for word in words), (begin, said)


def test_triton_on_a_gpu_compiles_unless_the_interpreter_is_requested(monkeypatch, hopper):
    monkeypatch.setattr(device, "_c_compiler", lambda: Support(True))
    pretend_versions(monkeypatch, triton="3.6.0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "3.6.0" in device.triton_support().reason and "9.0" in device.triton_support().reason
    assert device.compile_support()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not device.compile_support() and "TRITON_INTERPRET" in device.compile_support().reason


def test_triton_absent_or_the_gpu_too_old(monkeypatch):
    pretend_versions(monkeypatch)
    assert device.triton_support().reason == "Triton is not installed."
    pretend_gpu(monkeypatch, (7, 5))
    pretend_versions(monkeypatch, triton="3.6.0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "8.0" in device.triton_support().reason and "7.5" in device.triton_support().reason
    assert not device.compile_support()


# The other probes on machines that are not here


@pytest.mark.parametrize(
    ("capability", "version", "ok"),
    [
        ((9, 0), "3.6.0", True),
        ((9, 0), "3.10.0rc1", True),
        ((9, 0), "3.5.1", False),
        ((9, 0), None, False),
        ((8, 9), "3.6.0", False),
        ((10, 0), "3.6.0", False),
    ],
)
def test_gluon_kernels_run_on_hopper_alone_with_a_recent_triton(monkeypatch, capability, version, ok):
    pretend_gpu(monkeypatch, capability)
    pretend_versions(monkeypatch, triton=version)
    monkeypatch.setattr(device, "_c_compiler", lambda: Support(True))
    assert device.gluon_support().ok is ok


def test_flash_attention_packages(monkeypatch, hopper):
    pretend_versions(monkeypatch, flash_attn="2.8.3")
    assert device.flash_attn_support(2)
    four = device.flash_attn_support()
    assert not four and "flash-attn-4 is not installed" in four.reason and ".[gpu]" in four.remedy


# The C++ compiler


@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="this CPU has no AVX2")
def test_a_compiler_that_fails_is_found_out(monkeypatch, tmp_path):
    broken = tmp_path / "broken-g++"
    broken.write_text("#!/bin/sh\necho 'fatal error: Python.h: No such file' >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(broken))
    support = device._compile_on_cpu()
    assert not support and "fatal error: Python.h" in support.reason and "python3-dev" in support.remedy
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    device._compile_on_cpu.cache_clear()
    assert "No such file" in device._compile_on_cpu().reason


# On a GPU


@pytest.mark.gpu
def test_answers_on_a_gpu():
    assert device.cuda_support()
    assert device.cuda_graph_support()
    assert torch.cuda.get_device_name() in device.cuda_support().reason
    if torch.cuda.get_device_capability() == (9, 0):
        assert device.gluon_support()
