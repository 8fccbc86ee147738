"""Hardware counters of a side's kernels, from Nsight Compute's raw page: time, bytes, tensor cores, FLOPs.

The report shows the counters next to the counts made by hand from the shape. More DRAM bytes than q, k, v and the
output have mean data that was read again or stored in between; fewer bytes mean data that was still in the L2. More
FLOPs are products that the mask throws away.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence

# FLOPs of one instruction of one thread outside of the tensor cores; the h instructions work on pairs.
THREAD_FLOPS = {"fadd": 1, "fmul": 1, "ffma": 2, "hadd": 2, "hmul": 2, "hfma": 4}
THREAD_COUNTERS = {f"smsp__sass_thread_inst_executed_op_{name}_pred_on.sum": n for name, n in THREAD_FLOPS.items()}
TENSOR_PERCENT = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
BYTES = {"dram_read_bytes": "dram__bytes_read.sum", "dram_write_bytes": "dram__bytes_write.sum"}
BYTES |= {"l2_bytes": "lts__t_bytes.sum"}
# Counted on every GPU since Volta; Nsight Compute's sets contain the others.
REQUESTED = ("gpu__time_duration.sum", *BYTES.values(), TENSOR_PERCENT, *THREAD_COUNTERS)
TENSOR_FLOPS = re.compile(
    r"sm__ops_path_tensor_src_(?:bf16|fp16|tf32|fp64|fp8|fp6|fp4)(?:_dst_\w+?)?"
    r"(_sparsity_o(?:n|ff))?\.sum"
)
# Further counters, where a set has them: Nsight Compute's name -> the name in the results
FURTHER = {
    "lts__t_sector_hit_rate.pct": "l2_hit_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "launch__registers_per_thread": "registers_per_thread",
    "launch__shared_mem_per_block": "shared_memory_per_block_bytes",
    "launch__waves_per_multiprocessor": "waves",
}


def read_raw_page(text: str) -> list[dict]:
    """Read one row for each kernel of `ncu --import REPORT --page raw --csv --print-units base`.

    Raises ValueError if the text has no such table, or the table has no kernel.
    """
    start = text.find('"ID",')
    if start < 0:
        raise ValueError("Nsight Compute printed no table")
    table = list(csv.reader(io.StringIO(text[start:])))
    if len(table) < 3 or "Kernel Name" not in table[0]:
        raise ValueError("Nsight Compute's table holds no kernel")
    return [_kernel(dict(zip(table[0], line, strict=False))) for line in table[2:] if line and line[0]]


def _number(cells: Mapping[str, str], name: str) -> float | None:
    try:
        return float(cells.get(name, "").replace(",", ""))
    except ValueError:
        return None  # not on this GPU, or not in this set


def _sum(values: Sequence[float | None]) -> float | None:
    """Add counters; None if one of them was not counted."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _ratio(value: float | None, divisor: float | None, scale: float = 1.0) -> float | None:
    """Divide counters; None if one of them is missing or the divisor is 0."""
    return None if value is None or not divisor else value / divisor / scale


def _tensor_flops(cells: Mapping[str, str]) -> float | None:
    """Return the FLOPs of the tensor cores. A format has one counter, or one with and one without sparsity."""
    plain: list[float] = []
    split: list[float] = []
    for name in cells:
        match = TENSOR_FLOPS.fullmatch(name)
        if match and (value := _number(cells, name)) is not None:
            (split if match[1] else plain).append(value)
    return max(sum(plain), sum(split)) if plain or split else None


def _kernel(cells: Mapping[str, str]) -> dict:
    threads = [(_number(cells, name), flops) for name, flops in THREAD_COUNTERS.items()]
    return {
        "name": cells["Kernel Name"],
        "grid": cells.get("Grid Size"),
        "block": cells.get("Block Size"),
        "time_us": _ratio(_number(cells, "gpu__time_duration.sum"), 1e3),
        **{name: _number(cells, counter) for name, counter in BYTES.items()},
        "tensor_core_percent": _number(cells, TENSOR_PERCENT),
        "tensor_flops": _tensor_flops(cells),
        "cuda_core_flops": _sum([None if count is None else count * flops for count, flops in threads]),
        **{name: value for counter, name in FURTHER.items() if (value := _number(cells, counter)) is not None},
    }


def under_roof(flops_per_byte: float, achieved_tflops: float, roof: dict) -> dict:
    """Place a measurement on the roofline: {"bound", "attainable_tflops", "share"}."""
    memory = flops_per_byte * roof["memory_bandwidth_tb_s"]
    attainable = min(memory, roof["tflops"])
    bound = "memory" if memory < roof["tflops"] else "compute"
    return {"bound": bound, "attainable_tflops": attainable, "share": achieved_tflops / attainable}


def total(kernels: Sequence[dict]) -> dict:
    """Add the counters of a side's kernels; the tensor cores' share is the mean over time. None if one is missing."""
    names = ("time_us", *BYTES, "tensor_flops", "cuda_core_flops")
    sums = {name: _sum([kernel[name] for kernel in kernels]) for name in names}
    shares = [(kernel["tensor_core_percent"], kernel["time_us"]) for kernel in kernels]
    weighted = _sum([None if None in pair else pair[0] * pair[1] for pair in shares])
    return {**sums, "tensor_core_percent": _ratio(weighted, sums["time_us"])}


def hardware_roofline(sums: dict, by_hand: dict, roof: dict | None) -> dict:
    """Place a side on the roofline by what the hardware counted, with the ratios to the counts made by hand.

    Args:
        sums: from `total`.
        by_hand: the side's measurement, with the "flops" and "bytes" that its shape needs.
        roof: the roof of the GPU; None leaves out what is attainable.
    """
    flops = _sum([sums["tensor_flops"], sums["cuda_core_flops"]])
    dram = _sum([sums["dram_read_bytes"], sums["dram_write_bytes"]])
    seconds = (sums["time_us"] or 0.0) / 1e6
    intensity, achieved = _ratio(flops, dram) or None, _ratio(flops, seconds, 1e12)
    roofline: dict[str, float | str | None] = {
        "flops": flops,
        "dram_bytes": dram,
        "flops_over_by_hand": _ratio(flops, by_hand["flops"]),
        "tensor_flops_over_by_hand": _ratio(sums["tensor_flops"], by_hand["flops"]),
        "dram_bytes_over_by_hand": _ratio(dram, by_hand["bytes"]),
        "dram_tb_s": _ratio(dram, seconds, 1e12),
        "l2_tb_s": _ratio(sums["l2_bytes"], seconds, 1e12),
        "flops_per_byte": intensity,
        "achieved_tflops": achieved,
        "bound": None,
        "attainable_tflops": None,
        "share": None,
    }
    if roof is not None and intensity is not None and achieved is not None:
        roofline |= under_roof(intensity, achieved, roof)
    return roofline


def sentences(counted: dict) -> list[str]:
    """Describe the counters for a report; counters that this GPU lacks are left out."""
    kernels, sums, roof = counted["kernels"], counted["total"], counted["roofline"]
    facts = []
    if roof["dram_bytes"] is not None:
        facts.append(
            f"DRAM {sums['dram_read_bytes'] / 1e6:.4g} MB read and {sums['dram_write_bytes'] / 1e6:.4g} MB "
            f"written, {roof['dram_bytes_over_by_hand']:.3g} times the bytes counted by hand, "
            f"{roof['dram_tb_s']:.3g} TB/s"
        )
    if sums["l2_bytes"] is not None:
        facts.append(f"L2 {sums['l2_bytes'] / 1e9:.4g} GB, {roof['l2_tb_s']:.3g} TB/s")
    if sums["tensor_core_percent"] is not None:
        facts.append(f"tensor cores busy {sums['tensor_core_percent']:.1f}% of the time")
    lines = [
        f"hardware counters ({len(kernels)} kernel{'s' * (len(kernels) != 1)}, {sums['time_us'] or 0.0:.4g} us, "
        f"{counted['caches']}): {'; '.join(facts) or 'none of those asked for'}"
    ]
    if roof["bound"]:
        lines.append(
            f"roofline counted by the hardware: {roof['flops_per_byte']:.3g} FLOPs/Byte of DRAM, "
            f"{roof['bound']}-bound, {roof['achieved_tflops']:.3g} of {roof['attainable_tflops']:.3g} TFLOP/s "
            f"attainable; {roof['flops_over_by_hand']:.4g} times the FLOPs counted by hand, "
            f"{roof['tensor_flops_over_by_hand']:.4g} on tensor cores"
        )
    return lines
