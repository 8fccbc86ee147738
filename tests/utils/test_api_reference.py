"""The documented API, name by name: arguments and their defaults, and a tooltip for each function."""

import inspect

import pytest

import utils

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
