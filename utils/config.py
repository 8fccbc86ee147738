"""Facts: what each GPU can do at most, and the shape of the model the labs take apart.

Every tensor rate below is dense. Vendors print a rate for 2:4 structured sparsity beside it or instead of it:
twice as high, and out of reach of an ordinary matrix product. 1 FMA counts as 2 FLOPs. 16- and 8-bit rates
are those with FP32 accumulation, the ones torch uses.
"""

from __future__ import annotations

import difflib

DTYPES = ("fp16", "bf16", "fp32", "tf32", "fp8")

# fp32_tflops            TFLOP/s of the plain FMA units, no tensor cores
# memory_bandwidth_tb_s  TB/s (1e12)
# memory_gb              GB as the vendor names the part
# l2_mb                  MiB
# sram_per_sm_kb         KiB of L1 cache and shared memory together, for each SM
# None                   the part has no such unit
GPU_SPECS: dict[str, dict] = {
    "A6000": {
        "fp16_tflops": 154.8,
        "bf16_tflops": 154.8,
        "fp32_tflops": 38.7,
        "tf32_tflops": 77.4,
        "fp8_tflops": None,
        "memory_bandwidth_tb_s": 0.768,
        "memory_gb": 48,
        "l2_mb": 6,
        "sm_count": 84,
        "sram_per_sm_kb": 128,
        "compute_capability": (8, 6),
        "full_name": "NVIDIA RTX A6000 48 GB",
        "source": "NVIDIA Ampere GA102 GPU Architecture whitepaper V2.1 (2021), RTX A6000 table, dense. "
        "The RTX A6000 datasheet prints only the sparse rate (309.7); dense is half of it.",
    },
    "A10": {
        "fp16_tflops": 125.0,
        "bf16_tflops": 125.0,
        "fp32_tflops": 31.2,
        "tf32_tflops": 62.5,
        "fp8_tflops": None,
        "memory_bandwidth_tb_s": 0.6,
        "memory_gb": 24,
        "l2_mb": 6,
        "sm_count": 72,
        "sram_per_sm_kb": 128,
        "compute_capability": (8, 6),
        "full_name": "NVIDIA A10 24 GB",
        "source": "NVIDIA A10 Tensor Core GPU datasheet (2021), dense column.",
    },
    "A100": {
        "fp16_tflops": 312.0,
        "bf16_tflops": 312.0,
        "fp32_tflops": 19.5,
        "tf32_tflops": 156.0,
        "fp8_tflops": None,
        "memory_bandwidth_tb_s": 2.039,
        "memory_gb": 80,
        "l2_mb": 40,
        "sm_count": 108,
        "sram_per_sm_kb": 192,
        "compute_capability": (8, 0),
        "full_name": "NVIDIA A100 SXM4 80 GB",
        "source": "NVIDIA A100 Tensor Core GPU datasheet r4 (2021), SXM 80 GB column, dense.",
    },
    "A100-40GB": {
        "fp16_tflops": 312.0,
        "bf16_tflops": 312.0,
        "fp32_tflops": 19.5,
        "tf32_tflops": 156.0,
        "fp8_tflops": None,
        "memory_bandwidth_tb_s": 1.555,
        "memory_gb": 40,
        "l2_mb": 40,
        "sm_count": 108,
        "sram_per_sm_kb": 192,
        "compute_capability": (8, 0),
        "full_name": "NVIDIA A100 40 GB (SXM4 or PCIe)",
        "source": "NVIDIA A100 Tensor Core GPU Architecture whitepaper V1.0 (2020), dense.",
    },
    "H100": {
        "fp16_tflops": 989.4,
        "bf16_tflops": 989.4,
        "fp32_tflops": 66.9,
        "tf32_tflops": 494.7,
        "fp8_tflops": 1978.9,
        "memory_bandwidth_tb_s": 3.35,
        "memory_gb": 80,
        "l2_mb": 50,
        "sm_count": 132,
        "sram_per_sm_kb": 256,
        "compute_capability": (9, 0),
        "full_name": "NVIDIA H100 SXM5 80 GB",
        "source": "NVIDIA H100 Tensor Core GPU Architecture whitepaper V1.04 (2023), H100 SXM5, dense. "
        "The H100 datasheet prints only the sparse rates; dense is half of them.",
    },
    "H100-PCIe": {
        "fp16_tflops": 756.0,
        "bf16_tflops": 756.0,
        "fp32_tflops": 51.2,
        "tf32_tflops": 378.0,
        "fp8_tflops": 1513.0,
        "memory_bandwidth_tb_s": 2.0,
        "memory_gb": 80,
        "l2_mb": 50,
        "sm_count": 114,
        "sram_per_sm_kb": 256,
        "compute_capability": (9, 0),
        "full_name": "NVIDIA H100 PCIe 80 GB",
        "source": "NVIDIA H100 Tensor Core GPU Architecture whitepaper V1.04 (2023), H100 PCIe, dense. "
        "The H100 PCIe datasheet prints only the sparse rates (1,513 in bf16); dense is half of them.",
    },
    "H200": {
        "fp16_tflops": 989.4,
        "bf16_tflops": 989.4,
        "fp32_tflops": 66.9,
        "tf32_tflops": 494.7,
        "fp8_tflops": 1978.9,
        "memory_bandwidth_tb_s": 4.8,
        "memory_gb": 141,
        "l2_mb": 60,
        "sm_count": 132,
        "sram_per_sm_kb": 256,
        "compute_capability": (9, 0),
        "full_name": "NVIDIA H200 SXM 141 GB",
        "source": "NVIDIA H200 Tensor Core GPU datasheet (2024), H200 SXM. It prints only the sparse rates "
        "(1,979 in bf16); dense is half of them, given here to the digits of the H100 SXM5 whitepaper. "
        "L2 as the driver reports it.",
    },
    "4090": {
        "fp16_tflops": 165.2,
        "bf16_tflops": 165.2,
        "fp32_tflops": 82.6,
        "tf32_tflops": 82.6,
        "fp8_tflops": 330.3,
        "memory_bandwidth_tb_s": 1.008,
        "memory_gb": 24,
        "l2_mb": 72,
        "sm_count": 128,
        "sram_per_sm_kb": 128,
        "compute_capability": (8, 9),
        "full_name": "NVIDIA GeForce RTX 4090 24 GB",
        "source": "NVIDIA Ada GPU Architecture whitepaper V2.01 (2023), RTX 4090 table, dense, FP32 "
        "accumulation (FP16 accumulation runs at twice the rate).",
    },
    "L4": {
        "fp16_tflops": 121.0,
        "bf16_tflops": 121.0,
        "fp32_tflops": 30.3,
        "tf32_tflops": 60.0,
        "fp8_tflops": 242.5,
        "memory_bandwidth_tb_s": 0.3,
        "memory_gb": 24,
        "l2_mb": 48,
        "sm_count": 58,
        "sram_per_sm_kb": 128,
        "compute_capability": (8, 9),
        "full_name": "NVIDIA L4 24 GB",
        "source": "NVIDIA L4 Tensor Core GPU datasheet (2023). It prints only the sparse tensor rates "
        "(242 in bf16, 120 in tf32, 485 in fp8); dense is half of them.",
    },
    "L40S": {
        "fp16_tflops": 362.05,
        "bf16_tflops": 362.05,
        "fp32_tflops": 91.6,
        "tf32_tflops": 183.0,
        "fp8_tflops": 733.0,
        "memory_bandwidth_tb_s": 0.864,
        "memory_gb": 48,
        "l2_mb": 96,
        "sm_count": 142,
        "sram_per_sm_kb": 128,
        "compute_capability": (8, 9),
        "full_name": "NVIDIA L40S 48 GB",
        "source": "NVIDIA L40S GPU datasheet (2023), dense column.",
    },
    "B200": {
        "fp16_tflops": 2250.0,
        "bf16_tflops": 2250.0,
        "fp32_tflops": 75.0,
        "tf32_tflops": 1100.0,
        "fp8_tflops": 4500.0,
        "memory_bandwidth_tb_s": 7.7,
        "memory_gb": 180,
        "l2_mb": 126,
        "sm_count": 148,
        "sram_per_sm_kb": 256,
        "compute_capability": (10, 0),
        "full_name": "NVIDIA B200 SXM 180 GB",
        "source": "NVIDIA Blackwell datasheet (2025), HGX B200 column, one GPU. It prints only the sparse "
        "tensor rates (4,500 in bf16, 2,200 in tf32, 9,000 in fp8); dense is half of them. Other sheets "
        "round the bandwidth to 8 TB/s. L2 as the driver reports it.",
    },
    "GB10": {
        "fp16_tflops": 125.0,
        "bf16_tflops": 125.0,
        "fp32_tflops": 31.0,
        "tf32_tflops": 62.5,
        "fp8_tflops": 250.0,
        "memory_bandwidth_tb_s": 0.273,
        "memory_gb": 128,
        "l2_mb": 24,
        "sm_count": 48,
        "sram_per_sm_kb": 128,
        "compute_capability": (12, 1),
        "full_name": "NVIDIA GB10 (DGX Spark) 128 GB, shared with the CPU",
        "source": "NVIDIA DGX Spark User Guide (2025); fp32 from NVIDIA's Hot Chips 2025 talk. The vendor "
        "prints one tensor rate, 1,000 TFLOP/s in sparse FP4; dense is half of it. fp8, bf16 and tf32 are "
        "derived from that, half the rate for twice the width: no datasheet gives them.",
    },
}

_ALIASES = {
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "tf32": "tf32",
    "tensorfloat32": "tf32",
    "fp8": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


def dtype_name(dtype) -> str:
    """Short name of a dtype ("fp16", "bf16", "fp32", "tf32", "fp8"), given as a string or a torch.dtype."""
    name = str(dtype).removeprefix("torch.")
    if name not in _ALIASES:
        raise ValueError(_unknown("dtype", dtype, DTYPES, _ALIASES))
    return _ALIASES[name]


def gpu_spec(gpu_name: str) -> dict:
    """The row of GPU_SPECS under `gpu_name`; an unknown name is an error that lists the known ones."""
    if not isinstance(gpu_name, str) or gpu_name not in GPU_SPECS:
        raise ValueError(_unknown("GPU", gpu_name, GPU_SPECS, GPU_SPECS))
    return GPU_SPECS[gpu_name]


def peak_tflops(gpu_name: str, dtype="fp16") -> float:
    """Dense peak of a GPU in TFLOP/s for one dtype; an error where the part has no unit for it."""
    name = dtype_name(dtype)
    peak = gpu_spec(gpu_name)[f"{name}_tflops"]
    if peak is None:
        has = ", ".join(known for known in DTYPES if GPU_SPECS[gpu_name][f"{known}_tflops"] is not None)
        raise ValueError(f"The {GPU_SPECS[gpu_name]['full_name']} has no {name} unit; choose one of {has}.")
    return peak


def get_ridge_point(gpu_name: str, dtype: str = "fp16") -> float:
    """Ridge point in FLOPs/Byte: below it an operation is memory-bound, above it compute-bound.

    It is the peak FLOP/s of `dtype` over the memory bandwidth of the GPU. `gpu_name` is a key of GPU_SPECS.
    `dtype` is "fp16", "bf16", "fp32", "tf32", "fp8" or a torch.dtype: that of the operands, since an fp32
    peak over bf16 bytes gives a ridge that no kernel has.
    """
    return peak_tflops(gpu_name, dtype) / gpu_spec(gpu_name)["memory_bandwidth_tb_s"]


def _unknown(kind: str, given, known, candidates) -> str:
    by_lower = {name.lower(): name for name in candidates}
    nearest = difflib.get_close_matches(given.lower(), by_lower, n=1) if isinstance(given, str) else []
    hint = f": did you mean {by_lower[nearest[0]]!r}?" if nearest else "."
    return f"{given!r} is not a known {kind}{hint} Known: {', '.join(known)}."


def _gemma_config():
    from transformers import Gemma3TextConfig

    # google/gemma-3-270m-it, config.json. Transformers 5 takes one rope entry for each layer type; the older
    # rope_theta, rope_local_base_freq and rope_scaling arguments are only read when converting old files.
    return Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32_768,
        sliding_window=512,
        # Five sliding layers, then one that sees everything: layers 5, 11 and 17.
        layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(18)],
        query_pre_attn_scalar=256,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )


def __getattr__(name: str):
    # GEMMA_CONFIG needs transformers, two seconds of import: it is built when first asked for.
    if name == "GEMMA_CONFIG":
        globals()[name] = _gemma_config()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "GEMMA_CONFIG"})
