"""The documented API, name by name: arguments, defaults, returns and every example of the reference."""

import inspect

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch

import utils
from utils import (
    GEMMA_CONFIG,
    GPU_SPECS,
    benchmark_latency,
    benchmark_memory,
    build_decoder_layer,
    count_cuda_kernels,
    create_decode_inputs_with_cache,
    create_decode_inputs_without_cache,
    create_prefill_inputs,
    decode_forward,
    default_schedule,
    get_position_embeddings,
    get_ridge_point,
    initialize_kv_cache,
    plot_flash_attn_improvement,
    plot_gemm_torch_matmul_latency,
    plot_roofline,
    prefill_forward,
)

# Documented arguments in their order, and documented defaults.
SIGNATURES = {
    "get_ridge_point": (["gpu_name", "dtype"], {"dtype": "fp16"}),
    "benchmark_latency": (["fn", "args", "n_warmup", "n_repeat", "kwargs"], {"n_warmup": 10, "n_repeat": 100}),
    "benchmark_memory": (["fn", "args", "n_warmup", "n_repeat", "kwargs"], {"n_warmup": 10, "n_repeat": 100}),
    "count_cuda_kernels": (["prof"], {}),
    "plot_roofline": (["gpu_name", "peak_flops", "peak_bandwidth", "operations"], {"operations": None}),
    "plot_gemm_torch_matmul_latency": (["sizes", "gemm_tiled_latency_ms", "torch_matmul_latency_ms"], {}),
    "plot_flash_attn_improvement": (["df", "latency_cols", "memory_cols", "seq_len_col"], {}),
    "create_prefill_inputs": (["batch_size", "seq_len", "hidden_size", "dtype", "device"], {}),
    "create_decode_inputs_with_cache": (["batch_size", "current_seq_len", "hidden_size", "dtype", "device"], {}),
    "create_decode_inputs_without_cache": (["batch_size", "current_seq_len", "hidden_size", "dtype", "device"], {}),
    "get_position_embeddings": (["hidden_states", "position_ids", "rotary_emb", "layer_type"], {}),
    "initialize_kv_cache": (["config", "max_cache_len"], {}),
    "prefill_forward": (["layer", "hidden_states", "position_ids", "position_embeddings", "past_key_values"], {}),
    "decode_forward": (
        [
            "layer",
            "hidden_states",
            "position_ids",
            "position_embeddings",
            "use_kv_cache",
            "past_key_values",
            "cache_positions",
            "prefill_hidden_states",
        ],
        {},
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_defaults(name):
    names, defaults = SIGNATURES[name]
    parameters = inspect.signature(getattr(utils, name)).parameters
    assert list(parameters)[: len(names)] == names
    for argument, default in defaults.items():
        assert parameters[argument].default == default
    for extra in list(parameters.values())[len(names) :]:
        optional = extra.kind in (extra.KEYWORD_ONLY, extra.VAR_KEYWORD) or extra.default is not extra.empty
        assert optional, f"{extra} would break a documented call"


@pytest.mark.parametrize("name", [name for name in utils.__all__ if callable(getattr(utils, name))])
def test_every_exported_function_has_a_tooltip(name):
    first_line = (inspect.getdoc(getattr(utils, name)) or "").partition("\n")[0]
    assert len(first_line) > 15, f"{name} has no docstring that would do as a tooltip"


def test_gemma_config():
    documented = {
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "num_hidden_layers": 18,
    }
    assert type(GEMMA_CONFIG).__name__ == "Gemma3TextConfig"
    assert {key: getattr(GEMMA_CONFIG, key) for key in documented} == documented


def test_gpu_specs_example():
    gpu_spec = GPU_SPECS["A100"]
    assert gpu_spec["fp32_tflops"] == 19.5
    assert gpu_spec["memory_bandwidth_tb_s"] == pytest.approx(2.0, abs=0.05)
    documented = {"fp16_tflops", "bf16_tflops", "fp32_tflops", "memory_bandwidth_tb_s", "memory_gb"}
    for name in ("A6000", "A10", "A100", "H100", "H200", "4090"):
        assert documented <= set(GPU_SPECS[name])


def test_ridge_point_is_peak_over_bandwidth_in_fp16_by_default():
    spec = GPU_SPECS["H100"]
    assert get_ridge_point("H100") == pytest.approx(spec["fp16_tflops"] / spec["memory_bandwidth_tb_s"])


def test_benchmark_latency_returns_a_mean_in_ms():
    calls = []

    def wait(seconds, *, more=0.0):
        import time

        calls.append(1)
        time.sleep(seconds + more)

    latency = benchmark_latency(wait, 0.002, more=0.003, n_warmup=2, n_repeat=5)
    assert isinstance(latency, float) and 5.0 <= latency < 20.0
    assert len(calls) == 7


def test_benchmark_memory_returns_peak_and_allocated_in_gb():
    def add_up(x):
        return (x + 1).sum()

    x = torch.ones(4_000_000)  # 16 MB, and 16 MB more inside
    peak, allocated = benchmark_memory(add_up, x, n_warmup=1, n_repeat=2)
    assert allocated == pytest.approx(0.016, rel=0.05)
    assert peak >= allocated


def test_default_schedule_waits_1_warms_up_3_and_records_6():
    actions = [default_schedule(step).name for step in range(10)]
    assert actions == ["NONE"] + ["WARMUP"] * 3 + ["RECORD"] * 5 + ["RECORD_AND_SAVE"]


def test_count_cuda_kernels_has_the_documented_keys():
    x = torch.randn(64, 64)
    with torch.profiler.profile(schedule=default_schedule) as prof:
        for _ in range(10):
            torch.softmax(x @ x, -1)
            prof.step()
    counts = count_cuda_kernels(prof)
    assert list(counts) == ["gemm", "elementwise", "softmax", "layernorm", "memory", "other", "total"]
    if not torch.cuda.is_available():
        assert (counts["gemm"], counts["softmax"]) == (1, 1), counts
        assert "CPU" in counts.counted


def test_plot_roofline_example():
    ai_to_plot = {"gemm_1024": 341.3, "gemv_1024": 1.0}
    figure, axes = plot_roofline("A100", 19.5, 2.0, ai_to_plot)
    assert "A100" in axes.get_title(loc="left") + axes.get_title() + "".join(text.get_text() for text in figure.texts)
    plt.close(figure)


def test_plot_latency_and_flash_attention_examples():
    figure, _ = plot_gemm_torch_matmul_latency([128, 256], [3.0, 20.0], [0.1, 0.4])
    plt.close(figure)
    df = pd.DataFrame(
        {
            "seq_len": [512, 1024],
            "sdpa_ms": [1.0, 4.0],
            "flash_ms": [0.5, 1.5],
            "sdpa_mem_gb": [0.1, 0.4],
            "flash_mem_gb": [0.01, 0.02],
        }
    )
    figure, axes = plot_flash_attn_improvement(df, ["sdpa_ms", "flash_ms"], ["sdpa_mem_gb", "flash_mem_gb"], "seq_len")
    assert len(axes) == 2
    plt.close(figure)


def test_the_decoder_layer_from_prefill_to_decode():
    """The documented functions in the documented order: both ways of decoding give the same token."""
    batch_size, seq_len, hidden_size = 2, 20, GEMMA_CONFIG.hidden_size
    layer, rotary_emb = build_decoder_layer(dtype=torch.float32, device="cpu")
    layer_type = layer.self_attn.layer_type

    hidden_states, position_ids = create_prefill_inputs(batch_size, seq_len, hidden_size, torch.float32, "cpu")
    assert hidden_states.shape == (batch_size, seq_len, hidden_size) and position_ids.shape[-1] == seq_len
    cos, sin = get_position_embeddings(hidden_states, position_ids, rotary_emb, layer_type)
    assert cos.shape == sin.shape and cos.shape[-2:] == (seq_len, GEMMA_CONFIG.head_dim)
    cache = initialize_kv_cache(GEMMA_CONFIG, seq_len + 1)
    assert type(cache).__name__ == "StaticCache"
    output = prefill_forward(layer, hidden_states, position_ids, (cos, sin), cache)
    assert output.shape == hidden_states.shape

    token, position_ids, cache_positions = create_decode_inputs_with_cache(
        batch_size, seq_len, hidden_size, torch.float32, "cpu"
    )
    embeddings = get_position_embeddings(token, position_ids, rotary_emb, layer_type)
    cached = decode_forward(layer, token, position_ids, embeddings, True, cache, cache_positions, None)

    _, position_ids, prefill_hidden_states = create_decode_inputs_without_cache(
        batch_size, seq_len, hidden_size, torch.float32, "cpu"
    )
    assert prefill_hidden_states.shape == hidden_states.shape
    everything = torch.cat((hidden_states, token), dim=1)
    embeddings = get_position_embeddings(everything, position_ids, rotary_emb, layer_type)
    uncached = decode_forward(layer, token, position_ids, embeddings, False, None, None, hidden_states)
    torch.testing.assert_close(cached, uncached, rtol=1e-4, atol=1e-4)
