"""GPU facts against each other and against unit counts and clocks; the Gemma-3 configuration."""

import json
import os
import subprocess
import sys

import pytest
import torch

from utils.config import DTYPES, GPU_SPECS, dtype_name, get_ridge_point

FIELDS = {f"{name}_tflops" for name in DTYPES} | {
    "memory_bandwidth_tb_s",
    "memory_gb",
    "l2_mb",
    "sm_count",
    "sram_per_sm_kb",
    "compute_capability",
    "full_name",
    "source",
}
# {compute capability: (dense bf16 FLOPs per clock and SM with FP32 accumulation, FP32 lanes of an SM)}, by the architectures'
# whitepapers. GeForce has FP32 accumulation at half rate.
UNITS = {
    (8, 0): (2048, 64),
    (8, 6): (1024, 128),
    (8, 9): (1024, 128),
    (9, 0): (4096, 128),
    (10, 0): (8192, 128),
    (12, 0): (1024, 128),
    (12, 1): (1024, 128),
}


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", GPU_SPECS)
def test_a_row_is_complete(name):
    spec = GPU_SPECS[name]
    assert set(spec) == FIELDS
    numbers = FIELDS - {"fp8_tflops", "compute_capability", "full_name", "source"}
    assert all(isinstance(spec[field], (int, float)) and spec[field] > 0 for field in numbers)
    assert len(spec["compute_capability"]) == 2
    assert "NVIDIA" in spec["source"] and "dense" in spec["source"]
    assert "20" in spec["source"], "the source carries no year"


@pytest.mark.parametrize("name", GPU_SPECS)
def test_the_rates_are_those_of_units_at_one_clock(name):
    """A sparse rate would ask for twice the clock, and a rate of another part for another one in the two units."""
    spec = GPU_SPECS[name]
    tensor, lanes = UNITS[spec["compute_capability"]]
    if "GeForce" in spec["full_name"]:
        tensor //= 2
    tensor_ghz = 1e3 * spec["bf16_tflops"] / spec["sm_count"] / tensor
    boost_ghz = 1e3 * spec["fp32_tflops"] / spec["sm_count"] / lanes / 2
    assert 1.3 < tensor_ghz < 2.7 and 1.3 < boost_ghz < 2.7
    # Tensor cores run at a lower clock than the plain lanes: 1.83 and 1.98 GHz on an H100.
    assert 0.9 < tensor_ghz / boost_ghz < 1.03


@pytest.mark.parametrize("name", GPU_SPECS)
def test_tensor_rates_keep_their_ratios(name):
    spec = GPU_SPECS[name]
    assert spec["fp16_tflops"] == spec["bf16_tflops"]
    # Half the rate for twice the width; the B200 sheet rounds 1,125 down to 1,100.
    assert spec["tf32_tflops"] == pytest.approx(spec["bf16_tflops"] / 2, rel=0.03)
    if spec["compute_capability"] >= (8, 9):
        assert spec["fp8_tflops"] == pytest.approx(2 * spec["bf16_tflops"], rel=0.03)
    else:
        assert spec["fp8_tflops"] is None


def test_figures_that_the_course_quotes():
    assert GPU_SPECS["A100"]["fp32_tflops"] == 19.5
    assert round(GPU_SPECS["A100"]["memory_bandwidth_tb_s"], 1) == 2.0
    assert GPU_SPECS["A6000"]["bf16_tflops"] == 154.8  # not 309.7, the sparse rate
    assert get_ridge_point("A100") == pytest.approx(153.0, abs=0.05)
    assert get_ridge_point("H100", "bf16") == pytest.approx(295, abs=0.5)
    assert get_ridge_point("H200", "bf16") == pytest.approx(206, abs=0.5)
    assert get_ridge_point("A6000", "fp32") == pytest.approx(50.4, abs=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ridge_point_is_peak_over_bandwidth(dtype):
    spec = GPU_SPECS["H100"]
    assert get_ridge_point("H100", dtype) == spec[f"{dtype}_tflops"] / spec["memory_bandwidth_tb_s"]
    with pytest.raises(ValueError, match=r"has no fp8 unit; choose one of fp16, bf16, fp32, tf32\."):
        get_ridge_point("A100", "fp8")


def test_dtype_names():
    names = {
        "fp16": (torch.float16, torch.half, "float16", "fp16"),
        "bf16": (torch.bfloat16, "bfloat16", "torch.bfloat16"),
        "fp32": (torch.float32, "float32"),
        "tf32": ("tf32",),
        "fp8": (torch.float8_e5m2, "fp8"),
    }
    assert all(dtype_name(given) == short for short, spellings in names.items() for given in spellings)


@pytest.mark.parametrize(
    ("given", "nearest"), [("h100", "H100"), ("RTX 4090", "4090"), ("RTX A6000", "A6000"), ("L40", "L40S")]
)
def test_an_unknown_gpu_names_the_nearest_and_the_known(given, nearest):
    with pytest.raises(ValueError) as caught:
        get_ridge_point(given)
    message = str(caught.value)
    assert repr(given) in message and f"Did you mean {nearest}?" in message
    assert all(name in message for name in GPU_SPECS)


def test_an_unknown_dtype_names_the_nearest_and_the_known():
    with pytest.raises(ValueError, match=r"'bf61' is not a known dtype\. Did you mean bf16\? Known: fp16, bf16"):
        get_ridge_point("A100", "bf61")
    for wrong in (torch.int8, torch.float64, None, "FP16 "):
        with pytest.raises(ValueError, match="is not a known dtype"):
            get_ridge_point("A100", wrong)


def test_gemma_config_has_a_full_layer_after_five_that_slide():
    from transformers import Gemma3TextConfig

    from utils.config import GEMMA_CONFIG

    assert isinstance(GEMMA_CONFIG, Gemma3TextConfig)
    full = [layer for layer, kind in enumerate(GEMMA_CONFIG.layer_types) if kind == "full_attention"]
    assert full == [5, 11, 17]
    assert len(GEMMA_CONFIG.layer_types) == 18
    assert set(GEMMA_CONFIG.layer_types) == {"full_attention", "sliding_attention"}


FIRST_USES = {
    "isinstance": "isinstance(g, Gemma3TextConfig)",
    "attribute": "g.head_dim == 256 and type(g) is Gemma3TextConfig",
    "copy": "type(copy.deepcopy(g)) is Gemma3TextConfig and type(copy.copy(g)) is Gemma3TextConfig",
    "pickle": "pickle.loads(pickle.dumps(g)).head_dim == 256",
    "assignment": "setattr(g, 'extra', 3) is None and g.extra == 3 and g.head_dim == 256",
    "text": "'head_dim' in repr(g)",
    "name of the type": "type(g).__name__ == 'Gemma3TextConfig'",
}


# Each use is the first one in a process of its own: a fork of one process that has imported everything and used nothing.
USE_IN_FORKS = """
import copy, json, os, pickle, sys
from utils import *
g = GEMMA_CONFIG
assert "transformers" not in sys.modules
from transformers import Gemma3TextConfig
for name, use in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        print(json.dumps([name, bool(eval(use)), isinstance(g, Gemma3TextConfig)]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def first_uses():
    command = [sys.executable, "-c", USE_IN_FORKS, json.dumps(FIRST_USES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return {name: found for name, *found in map(json.loads, done.stdout.splitlines())}, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
@pytest.mark.parametrize("use", FIRST_USES)
def test_whatever_uses_gemma_config_first_finds_transformers_class(first_uses, use):
    found, said = first_uses
    assert found.get(use) == [True, True], said


def test_facts_cost_no_heavy_import():
    heavy = ["torch", "transformers", "matplotlib", "pandas", "triton"]
    out = run_python(
        "import sys, utils.config as c; c.get_ridge_point('A100', 'bf16');"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert out == "[]"


@pytest.mark.gpu
def test_the_row_of_this_gpu_agrees_with_the_driver():
    from utils.machine.device import detect_gpu

    row = detect_gpu()
    if row is None:
        pytest.skip(f"{torch.cuda.get_device_name()} has no row in GPU_SPECS")
    spec, properties = GPU_SPECS[row], torch.cuda.get_device_properties()
    assert spec["sm_count"] == properties.multi_processor_count
    assert spec["compute_capability"] == (properties.major, properties.minor)
    assert spec["l2_mb"] * 2**20 == pytest.approx(properties.L2_cache_size, rel=0.02)
    # The driver keeps a part of the memory for itself; GB and GiB are 7% apart.
    assert spec["memory_gb"] * 1e9 == pytest.approx(properties.total_memory, rel=0.1)
    # CUDA keeps a part of it as L1.
    shared_kb = properties.shared_memory_per_multiprocessor / 1024
    assert 0.5 * spec["sram_per_sm_kb"] < shared_kb < spec["sram_per_sm_kb"]
