"""Hardware counters of a side's kernels, out of Nsight Compute's raw page: time, bytes, tensor cores, FLOPs.

What the counters say stands beside what was counted by hand from the shape: more DRAM bytes than q, k, v and the
output have are data that was read again or stored in between, fewer were still in the L2; more FLOPs are products that
the mask throws away.
"""

from __future__ import annotations

import csv
import io
import re

# Counted on every GPU since Volta; Nsight Compute's sets hold the others.
REQUESTED = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_bytes.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    *(
        f"smsp__sass_thread_inst_executed_op_{name}_pred_on.sum"
        for name in ("fadd", "fmul", "ffma", "hadd", "hmul", "hfma")
    ),
)
# FLOPs of one instruction of one thread outside of the tensor cores; the h ones work on pairs.
THREAD_FLOPS = {"fadd": 1, "fmul": 1, "ffma": 2, "hadd": 2, "hmul": 2, "hfma": 4}
TENSOR_FLOPS = re.compile(
    r"sm__ops_path_tensor_src_(?:bf16|fp16|tf32|fp64|fp8|fp6|fp4)(?:_dst_\w+?)?"
    r"(_sparsity_o(?:n|ff))?\.sum"
)
# Where a set has them: in Nsight Compute's words, and in ours.
FURTHER = {
    "lts__t_sector_hit_rate.pct": "l2_hit_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "launch__registers_per_thread": "registers_per_thread",
    "launch__shared_mem_per_block": "shared_memory_per_block_bytes",
    "launch__waves_per_multiprocessor": "waves",
}


def read_raw_page(text: str) -> list[dict]:
    """One row for each kernel of `ncu --import REPORT --page raw --csv --print-units base`.

    A text that holds no such table, or no kernel, is a ValueError.
    """
    start = text.find('"ID",')
    if start < 0:
        raise ValueError("Nsight Compute printed no table")
    table = list(csv.reader(io.StringIO(text[start:])))
    if len(table) < 3 or "Kernel Name" not in table[0]:
        raise ValueError("Nsight Compute's table holds no kernel")
    return [_kernel(dict(zip(table[0], line, strict=False))) for line in table[2:] if line and line[0]]


def _number(cells: dict, name: str) -> float | None:
    text = cells.get(name, "").replace(",", "")
    try:
        return float(text)
    except ValueError:
        return None  # not on this GPU, or not in this set


def _tensor_flops(cells: dict) -> float | None:
    """FLOPs of the tensor cores. The formats are counted in one row each, or in one with and one without sparsity."""
    plain, split = [], []
    for name in cells:
        found = TENSOR_FLOPS.fullmatch(name)
        if found and (value := _number(cells, name)) is not None:
            (split if found[1] else plain).append(value)
    return max(sum(plain), sum(split)) if plain or split else None


def _kernel(cells: dict) -> dict:
    threads = [_number(cells, f"smsp__sass_thread_inst_executed_op_{name}_pred_on.sum") for name in THREAD_FLOPS]
    cores = (
        None
        if None in threads
        else sum(count * flops for count, flops in zip(threads, THREAD_FLOPS.values(), strict=True))
    )
    nanoseconds = _number(cells, "gpu__time_duration.sum")
    return {
        "name": cells["Kernel Name"],
        "grid": cells.get("Grid Size"),
        "block": cells.get("Block Size"),
        "time_us": None if nanoseconds is None else nanoseconds / 1e3,
        "dram_read_bytes": _number(cells, "dram__bytes_read.sum"),
        "dram_write_bytes": _number(cells, "dram__bytes_write.sum"),
        "l2_bytes": _number(cells, "lts__t_bytes.sum"),
        "tensor_core_percent": _number(cells, "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"),
        "tensor_flops": _tensor_flops(cells),
        "cuda_core_flops": cores,
        **{ours: value for theirs, ours in FURTHER.items() if (value := _number(cells, theirs)) is not None},
    }


def total(kernels: list[dict]) -> dict:
    """The side's sums over its kernels; the tensor cores' share is the mean over time. None where a counter lacks."""

    def added(name: str) -> float | None:
        values = [kernel[name] for kernel in kernels]
        return None if None in values else sum(values)

    found = {
        name: added(name)
        for name in ("time_us", "dram_read_bytes", "dram_write_bytes", "l2_bytes", "tensor_flops", "cuda_core_flops")
    }
    busy = [kernel["tensor_core_percent"] for kernel in kernels]
    known = found["time_us"] and None not in busy
    found["tensor_core_percent"] = (
        sum(share * kernel["time_us"] for share, kernel in zip(busy, kernels, strict=True)) / found["time_us"]
        if known
        else None
    )
    return found


def hardware_roofline(sums: dict, by_hand: dict, roof: dict | None) -> dict:
    """The side on the roofline by what the hardware counted, beside the counts made by hand.

    Args:
        sums: from `total`.
        by_hand: the side's measurement, with the "flops" and "bytes" that its shape needs.
        roof: the roof it is held against; None leaves out what is attainable.
    """
    parts = sums["tensor_flops"], sums["cuda_core_flops"]
    flops = None if None in parts else sum(parts)
    moved = sums["dram_read_bytes"], sums["dram_write_bytes"]
    dram = None if None in moved else sum(moved)
    found = {
        "flops": flops,
        "dram_bytes": dram,
        "flops_over_by_hand": flops / by_hand["flops"] if flops is not None else None,
        "tensor_flops_over_by_hand": sums["tensor_flops"] / by_hand["flops"] if parts[0] is not None else None,
        "dram_bytes_over_by_hand": dram / by_hand["bytes"] if dram is not None else None,
        "dram_tb_s": None,
        "l2_tb_s": None,
        "flops_per_byte": None,
        "achieved_tflops": None,
        "bound": None,
        "attainable_tflops": None,
        "share": None,
    }
    if seconds := (sums["time_us"] or 0.0) / 1e6:
        found["dram_tb_s"] = dram / seconds / 1e12 if dram is not None else None
        found["l2_tb_s"] = sums["l2_bytes"] / seconds / 1e12 if sums["l2_bytes"] is not None else None
        found["achieved_tflops"] = flops / seconds / 1e12 if flops is not None else None
    if flops and dram:
        found["flops_per_byte"] = flops / dram
        if roof is not None and found["achieved_tflops"] is not None:
            memory = found["flops_per_byte"] * roof["memory_bandwidth_tb_s"]
            found["bound"] = "memory" if memory < roof["tflops"] else "compute"
            found["attainable_tflops"] = min(memory, roof["tflops"])
            found["share"] = found["achieved_tflops"] / found["attainable_tflops"]
    return found


def sentences(counted: dict) -> list[str]:
    """The counters in words, for a report; what was not counted on this GPU is left out."""
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
