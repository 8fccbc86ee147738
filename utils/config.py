"""Facts with their sources: the peak rates of each GPU, and the shape of the model that the labs take apart.

Every tensor rate below is dense. Vendors also print the rate for 2:4 structured sparsity, and some print only this
rate. It is twice as high, and an ordinary matrix product cannot reach it. 1 FMA counts as 2 FLOPs. The rates in 16 and
8 bits are for sums in FP32, as in torch.
"""

from __future__ import annotations

import functools
from typing import Any

from utils.validation import did_you_mean

_NAMES_OF_DTYPES = {
    "fp16": "fp16 float16 half",
    "bf16": "bf16 bfloat16",
    "fp32": "fp32 float32 float",
    "tf32": "tf32 tensorfloat32",
    "fp8": "fp8 float8_e4m3fn float8_e5m2",
}
DTYPES = tuple(_NAMES_OF_DTYPES)

# Column                 Key in GPU_SPECS["A100"]    Unit
# fp16, bf16, tf32, fp8  "fp16_tflops", ...          TFLOP/s of the tensor cores; "-" becomes None: the GPU has no such unit
# fp32                   "fp32_tflops"               TFLOP/s of the plain FMA units, no tensor cores
# TB/s                   "memory_bandwidth_tb_s"     1e12 bytes/s
# GB                     "memory_gb"                 GB, as in the vendor's name of the GPU
# L2                     "l2_mb"                     MiB
# SMs                    "sm_count"
# SRAM                   "sram_per_sm_kb"            KiB of L1 cache and shared memory together, for each SM
# CC                     "compute_capability"        (8, 0) for 8.0
# name                   "full_name"; the key "source" is the document of the row
_TABLE = """
             fp16    bf16  fp32    tf32     fp8   TB/s   GB   L2  SMs  SRAM    CC  name
A6000       154.8   154.8  38.7    77.4       -  0.768   48    6   84   128   8.6  NVIDIA RTX A6000 48 GB
A10         125.0   125.0  31.2    62.5       -    0.6   24    6   72   128   8.6  NVIDIA A10 24 GB
A100        312.0   312.0  19.5   156.0       -  2.039   80   40  108   192   8.0  NVIDIA A100 SXM4 80 GB
A100-40GB   312.0   312.0  19.5   156.0       -  1.555   40   40  108   192   8.0  NVIDIA A100 40 GB (SXM4 or PCIe)
H100        989.4   989.4  66.9   494.7  1978.9   3.35   80   50  132   256   9.0  NVIDIA H100 SXM5 80 GB
H100-PCIe   756.0   756.0  51.2   378.0  1513.0    2.0   80   50  114   256   9.0  NVIDIA H100 PCIe 80 GB
H200        989.4   989.4  66.9   494.7  1978.9    4.8  141   60  132   256   9.0  NVIDIA H200 SXM 141 GB
4090        165.2   165.2  82.6    82.6   330.3  1.008   24   72  128   128   8.9  NVIDIA GeForce RTX 4090 24 GB
L4          121.0   121.0  30.3    60.0   242.5    0.3   24   48   58   128   8.9  NVIDIA L4 24 GB
L40S       362.05  362.05  91.6   183.0   733.0  0.864   48   96  142   128   8.9  NVIDIA L40S 48 GB
B200       2250.0  2250.0  75.0  1100.0  4500.0    7.7  180  126  148   256  10.0  NVIDIA B200 SXM 180 GB
GB10        125.0   125.0  31.0    62.5   250.0  0.273  128   24   48   128  12.1  NVIDIA GB10 (DGX Spark) 128 GB, shared with the CPU
"""

_SOURCES = {
    "A6000": (
        "NVIDIA Ampere GA102 GPU Architecture whitepaper V2.1 (2021), RTX A6000 table, dense. The RTX A6000 "
        "datasheet prints only the sparse rate (309.7); dense is half of it."
    ),
    "A10": "NVIDIA A10 Tensor Core GPU datasheet (2021), dense column.",
    "A100": "NVIDIA A100 Tensor Core GPU datasheet r4 (2021), SXM 80 GB column, dense.",
    "A100-40GB": "NVIDIA A100 Tensor Core GPU Architecture whitepaper V1.0 (2020), dense.",
    "H100": (
        "NVIDIA H100 Tensor Core GPU Architecture whitepaper V1.04 (2023), H100 SXM5, dense. The H100 datasheet "
        "prints only the sparse rates; dense is half of them."
    ),
    "H100-PCIe": (
        "NVIDIA H100 Tensor Core GPU Architecture whitepaper V1.04 (2023), H100 PCIe, dense. The H100 PCIe "
        "datasheet prints only the sparse rates (1,513 in bf16); dense is half of them."
    ),
    "H200": (
        "NVIDIA H200 Tensor Core GPU datasheet (2024), H200 SXM. It prints only the sparse rates (1,979 in bf16); "
        "dense is half of them, given here to the digits of the H100 SXM5 whitepaper. L2 as the driver reports it."
    ),
    "4090": (
        "NVIDIA Ada GPU Architecture whitepaper V2.01 (2023), RTX 4090 table, dense, FP32 accumulation (FP16 "
        "accumulation runs at twice the rate)."
    ),
    "L4": (
        "NVIDIA L4 Tensor Core GPU datasheet (2023). It prints only the sparse tensor rates (242 in bf16, 120 in "
        "tf32, 485 in fp8); dense is half of them."
    ),
    "L40S": "NVIDIA L40S GPU datasheet (2023), dense column.",
    "B200": (
        "NVIDIA Blackwell datasheet (2025), HGX B200 column, one GPU. It prints only the sparse tensor rates (4,500 "
        "in bf16, 2,200 in tf32, 9,000 in fp8); dense is half of them. Other sheets round the bandwidth to 8 TB/s. "
        "L2 as the driver reports it."
    ),
    "GB10": (
        "NVIDIA DGX Spark User Guide (2025); fp32 from NVIDIA's Hot Chips 2025 talk. The vendor prints one tensor "
        "rate, 1,000 TFLOP/s in sparse FP4; dense is half of it. fp8, bf16 and tf32 are derived from that, half the "
        "rate for twice the width: no datasheet gives them."
    ),
}


def _read_table() -> dict[str, dict]:
    """Return GPU_SPECS: for each GPU's name a dictionary of its row in the table, with the source."""
    rates = [f"{dtype}_tflops" for dtype in DTYPES] + ["memory_bandwidth_tb_s"]
    sizes = ["memory_gb", "l2_mb", "sm_count", "sram_per_sm_kb"]
    specs: dict[str, dict] = {}
    for line in _TABLE.strip().splitlines()[1:]:
        key, *numbers, capability, full_name = line.split(maxsplit=len(rates) + len(sizes) + 2)
        spec: dict = {name: None if text == "-" else float(text) for name, text in zip(rates, numbers, strict=False)}
        spec |= {name: int(text) for name, text in zip(sizes, numbers[len(rates) :], strict=True)}
        spec["compute_capability"] = tuple(map(int, capability.split(".")))
        specs[key] = spec | {"full_name": full_name, "source": _SOURCES[key]}
    return specs


GPU_SPECS = _read_table()

_ALIASES = {alias: short for short, aliases in _NAMES_OF_DTYPES.items() for alias in aliases.split()}


def dtype_name(dtype) -> str:
    """Return the short name of a dtype, "fp16", "bf16", "fp32", "tf32" or "fp8", given a string or a torch.dtype."""
    name = str(dtype).removeprefix("torch.")
    if name not in _ALIASES:
        raise ValueError(f"{dtype!r} is not a known dtype.{did_you_mean(dtype, _ALIASES)} Known: {', '.join(DTYPES)}.")
    return _ALIASES[name]


def gpu_spec(gpu_name: str) -> dict:
    """Return the row `gpu_name` of GPU_SPECS. An unknown name raises an error that lists the known names."""
    if not isinstance(gpu_name, str) or gpu_name not in GPU_SPECS:
        raise ValueError(
            f"{gpu_name!r} is not a known GPU.{did_you_mean(gpu_name, GPU_SPECS)} Known: {', '.join(GPU_SPECS)}."
        )
    return GPU_SPECS[gpu_name]


def get_ridge_point(gpu_name: str, dtype: str = "fp16") -> float:
    """Ridge point in FLOPs/Byte: below it an operation is memory-bound, above it compute-bound.

    The ridge point is the peak FLOP/s of `dtype` divided by the memory bandwidth of the GPU.

    Args:
        gpu_name: a key of GPU_SPECS.
        dtype: dtype of the operands: "fp16", "bf16", "fp32", "tf32", "fp8" or a torch.dtype. It must fit the counted bytes: with the
            fp32 peak and bytes in bf16, the ridge point would be wrong.
    """
    spec, name = gpu_spec(gpu_name), dtype_name(dtype)
    peak = spec[f"{name}_tflops"]
    if peak is None:
        has = ", ".join(known for known in DTYPES if spec[f"{known}_tflops"] is not None)
        raise ValueError(f"The {spec['full_name']} has no {name} unit; choose one of {has}.")
    return peak / spec["memory_bandwidth_tb_s"]


@functools.cache
def _gemma_config():
    from transformers import Gemma3TextConfig

    # The values are from config.json of google/gemma-3-270m-it. Transformers 5 takes a rope entry for each layer type.
    # The older arguments rope_theta, rope_local_base_freq and rope_scaling serve only to convert old files.
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
        # The layers 5, 11 and 17 attend to all positions; the other layers have the sliding window.
        layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(18)],
        query_pre_attn_scalar=256,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )


class Gemma3TextConfig:
    """Stand-in for transformers' class of this name until the first use of `GEMMA_CONFIG`.

    The import of transformers takes about as long as the import of torch, so the first use does it. Every use, such as
    reading an attribute, makes the object a full instance of transformers' class.
    """

    def __getattribute__(self, name: str):
        if name == "__class__":  # isinstance() compares it with the object's type, which must not change here
            return type(_gemma_config())
        return getattr(_become_real(self), name)

    __hash__ = None  # type: ignore[assignment]  # transformers' class has no hash either


def _become_real(config):
    real = _gemma_config()
    object.__setattr__(config, "__dict__", real.__dict__)
    object.__setattr__(config, "__class__", type(real))
    return config


def _special_method(name: str):
    """Return a special method for the stand-in. Python looks special methods up in the class, without `__getattribute__`."""
    return lambda self, *arguments: getattr(_become_real(self), name)(*arguments)


for _name in ("__setattr__", "__dir__", "__repr__", "__eq__", "__reduce_ex__"):
    setattr(Gemma3TextConfig, _name, _special_method(_name))

GEMMA_CONFIG: Any = object.__new__(Gemma3TextConfig)
