"""Lab 1's setup cell imports this: facts of the machine, experiments that a student only runs, and their pictures."""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.ticker import LogLocator, NullFormatter

from utils import (
    GEMMA_CONFIG,
    GPU_SPECS,
    Measurement,
    Roofs,
    build_decoder_layer,
    create_decode_inputs_with_cache,
    create_decode_inputs_without_cache,
    create_prefill_inputs,
    decode_forward,
    default_device,
    get_position_embeddings,
    get_ridge_point,
    initialize_kv_cache,
    machine_roofs,
    plot_flash_attn_improvement,
    plot_roofline,
    plot_timeline,
    prefill_forward,
    profile,
    read_trace,
)
from utils.benchmark.measuring import measure_together
from utils.benchmark.result import format_rate as format_rate
from utils.checking.labs.lab1 import *  # noqa: F403
from utils.checking.labs.lab1.gemm import Queue
from utils.files import ROOT, recorded_table
from utils.files import output_path as output_path
from utils.labs import session
from utils.labs.session import answered, small_task
from utils.labs.session import beside_guess as beside_guess
from utils.labs.session import guesses as guesses
from utils.labs.session import keep as keep
from utils.labs.session import results as results
from utils.labs.session import text_of as text_of
from utils.machine.device import compile_support as compile_support
from utils.machine.device import cuda_graph_support as cuda_graph_support
from utils.visualization import series, style_axes

device = default_device()
on_gpu = device.type == "cuda"
dtype = torch.bfloat16 if on_gpu else torch.float32  # the dtype of every benchmark of this lab
dtype_name = "bf16" if on_gpu else "fp32"
config = GEMMA_CONFIG
flash_batch, flash_heads, flash_dim = (1, 16, 128) if on_gpu else (1, 4, 64)  # sizes of Part 5
RECORDED = ROOT / "assets/results/h200/lab1.json"  # this lab's tables from an H200
# Medians of interleaved calls. A time is the caller's waiting time, with launches.
TIMES = {"warmup": 5, "iterations": 30} if on_gpu else {"warmup": 2, "iterations": 7}
show_recorded = functools.partial(session.show_recorded, "lab1")
plot_beside = functools.partial(session.plot_beside, "lab1")
save_results = functools.partial(session.save, "lab1")


def random_qkv(tokens: int) -> list[torch.Tensor]:
    """Return three tensors (flash_batch, flash_heads, tokens, flash_dim) of normal values, for Part 5."""
    return [torch.randn(flash_batch, flash_heads, tokens, flash_dim, device=device, dtype=dtype) for _ in range(3)]


def synchronize() -> None:
    """Wait until the device has finished all its work."""
    if on_gpu:
        torch.cuda.synchronize()


def show_machine() -> None:
    """Print the name of this machine, and the sizes of the lab's problems on it."""
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    sizes = "full: made for a data-centre GPU" if on_gpu else "small: made for a laptop"
    print(f"{name}, PyTorch {torch.__version__}; benchmarks in {dtype_name}; sizes {sizes}")


def first_try(time_work: Callable) -> None:
    """Call the student's first function on a pretend device, and say whether it timed the work."""
    took = time_work(Queue())
    if took < 49:
        print(
            f"… {took:.3f} ms for 50 ms of work: the clock stopped when the call returned. The line is missing, or its parentheses."
        )
    else:
        print(f"✓ {took:.1f} ms: you timed the work, and not the queue. Every measurement here rests on that line.")


def on_the_ridge(intensity: float, ridge: float) -> None:
    """Say whether an operation in a student's line is on the ridge, left of it, or right of it."""
    side = (
        "✓ on the ridge" if abs(intensity / ridge - 1) < 0.005 else "left of it" if intensity < ridge else "right of it"
    )
    print(f"yours: {intensity:.1f} FLOPs/Byte; the ridge lies at {ridge:.1f}: {side}")


# ---- lines that a student writes for no points -----------------------------------------------------------------------

check_full_sum = small_task(
    "the sum that 1 no longer changes",
    256,
    "Try it: torch.tensor(64.0, dtype=torch.bfloat16) + 1.",
    {512: "At 512 it is lost as well. Is it not lost before?", 128: "129 has 8 significant bits, too."},
)
check_bandwidth = small_task(
    "TB/s of an H200 with the ridge of an A100",
    GPU_SPECS["H200"]["bf16_tflops"] / get_ridge_point("A100", "bf16"),
    "The ridge is the peak over the bandwidth: which of the two stays?",
    {
        GPU_SPECS["A100"][
            "memory_bandwidth_tb_s"
        ]: "With that the ridge would lie further right: the H200's peak is higher."
    },
)
check_users = small_task(
    "users of 32768 tokens beside the weights",
    1297,
    "Divide the bytes that are left by the bytes of one user's cache, and round down.",
    {1299: "They share the memory with the weights, and half a cache is useless.", 233: "Five of six layers slide."},
    rel=0,
)
check_kernel_us = small_task(
    "µs of a kernel that hides a launch",
    17,
    "While one kernel runs, the CPU launches the next: which of the two has to last?",
)
check_busy = small_task(
    "the share of the step in which the GPU works",
    93 * 1.8 / (93 * 17 + 1.8),
    "The time of its kernels, over eager_time_us.",
    {93 * 1.8: "A share, between 0 and 1."},
)
check_row_stats = small_task(
    "m and l after each block",
    ((3, 1 + math.exp(-2)), (5, 1 + math.exp(-2) + math.exp(-4))),
    "m is the largest so far, l the sum of exp(x - m) of all x so far.",
    {((3, 1 + math.exp(-2)), (5, 2 + math.exp(-2))): "The old sum has to be rescaled by exp(3 - 5)."},
)
check_limit = small_task(
    "FLOPs/Byte of standard attention, very long text",
    64,
    "For long texts only the scores count: 4 L² D FLOPs, and their four trips.",
    {128: "That is FLOPs for each number; a number has two bytes.", 256: "The scores travel four times."},
)


# ---- measuring -----------------------------------------------------------------------------------------------------


def median_times(functions: Mapping[str, Callable], **options) -> dict[str, Measurement]:
    """Measure functions without arguments, which take turns; return {name: Measurement} with medians and intervals."""
    options = {"labels": list(functions), "queue_ahead": False, "device": device, **TIMES, **options}
    return dict(zip(functions, measure_together(list(functions.values()), **options), strict=True))


def plus_minus(measurement: Measurement) -> str:
    """Return a text such as `1.23 ± 0.04`: a median in ms and the half width of its interval."""
    low, high = measurement.interval_ms
    half = (high - low) / 2
    return f"{measurement.median_ms:.4g} ± {half:{'.0f' if half >= 100 else '.2g'}}"


@functools.cache
def this_roof() -> Roofs:
    """Return this machine's roofs: from the datasheet if the course knows the GPU, otherwise measured."""
    print("looking at this machine's roofs: some seconds without a GPU ...", flush=True)
    return machine_roofs()


def report_measured(name: str, measured: Mapping[str, tuple[float, float]]) -> None:
    """Print measured points, {name: (FLOPs/Byte, TFLOP/s)}, and their shares of this machine's roof; draw them.

    A measured roof may be too low, because the machine was busy. So if a point is more than 10% above a measured roof,
    this measures the roofs again and uses the higher roofs.
    """

    def share(point: tuple[float, float]) -> float:
        return point[1] / this_roof().attainable_tflops(point[0], dtype_name)

    if this_roof().origin == "measured" and max(map(share, measured.values())) > 1.1:
        print("A point stands above its roof. Was the machine busy when they were measured? Measuring them again ...")
        machine_roofs(refresh=True)  # it stores the higher roofs
        this_roof.cache_clear()
        if max(map(share, measured.values())) > 1.1:
            print("A point is still above its roof. Is the machine busy? If not, which assumption fails for it?")
    results[name] = []
    for operation, (intensity, speed) in measured.items():
        part = share((intensity, speed))
        print(f"{operation:12} {intensity:8.1f} FLOPs/Byte  {format_rate(speed):>14}  {part:6.1%} of its roof")
        results[name].append({"operation": operation, "FLOPs/Byte": intensity, "TFLOP/s": speed, "share": part})
    plot_measured(name, measured)


def plot_measured(name: str, measured: Mapping[str, tuple[float, float]]) -> None:
    """Draw points under this machine's roof, and in a second picture the points of an H200 under its roof."""
    roofs = this_roof()
    peak, bandwidth = roofs.tflops[dtype_name], roofs.memory_bandwidth_tb_s
    plot_roofline(roofs.name, peak, bandwidth, measured=measured, title=f"This machine: {roofs.name}")
    plt.show()
    rows = None if on_gpu else recorded_table(RECORDED, name)
    if rows is not None:
        h200 = GPU_SPECS["H200"]
        points = {row["operation"]: (row["FLOPs/Byte"], row["TFLOP/s"]) for row in rows.to_dict("records")}
        title = "The same on an H200 (recorded, larger sizes)"
        plot_roofline("H200", h200["bf16_tflops"], h200["memory_bandwidth_tb_s"], measured=points, title=title)
        plt.show()


def launches_of(call: Callable) -> int:
    """Count how often the CPU launches a kernel, or a whole graph, in one call."""
    events = read_trace(profile(call, steps=1, warmup=2))
    return sum(event.category.startswith("cuda") and "Launch" in event.name for event in events)


def memory_of_this_machine() -> tuple[float, float]:
    """Return the bytes that an experiment may use, and all bytes of the memory."""
    if on_gpu:
        free, whole = torch.cuda.mem_get_info()
        return 0.4 * free, whole
    return 1e9, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def compiled_file(name: str):
    """Import an answer's file, such as gemm_triton.py, again if there is a GPU; otherwise return None."""
    import importlib

    answered(name)
    if on_gpu:
        return importlib.reload(importlib.import_module(name.removesuffix(".py")))
    print("No GPU, so there is nothing to time: the simulator proves that the kernel is right, not that it is fast.")
    return None


# ---- the Gemma-3 layer ---------------------------------------------------------------------------------------------


def prefill_call(batch: int, length: int, implementation: str = "sdpa", compiled: bool = False) -> Callable:
    """Return a function without arguments: the prefill of a layer with full attention, without a cache."""
    layer, rotary_emb = build_decoder_layer(config, 5, dtype, device, attn_implementation=implementation)
    x, position_ids = create_prefill_inputs(batch, length, config.hidden_size, dtype, device)
    embeddings = get_position_embeddings(x, position_ids, rotary_emb, layer.self_attn.layer_type)
    if compiled:
        layer.compile(dynamic=False)
    return lambda: prefill_forward(layer, x, position_ids, embeddings)


def layer_calls(batch: int, length: int) -> dict[str, Callable]:
    """Return functions without arguments: a prefill of `length` tokens, a further token with the cache, and without."""
    layer, rotary_emb = build_decoder_layer(config, 5, dtype, device)
    kind, hidden = layer.self_attn.layer_type, config.hidden_size
    cache = initialize_kv_cache(layer.config, length + 1)
    x, position_ids = create_prefill_inputs(batch, length, hidden, dtype, device)
    embeddings = get_position_embeddings(x, position_ids, rotary_emb, kind)
    prefill = functools.partial(prefill_forward, layer, x, position_ids, embeddings, cache)
    prefill()  # this call fills the cache
    x, position_ids, positions = create_decode_inputs_with_cache(batch, length, hidden, dtype, device)
    embeddings = get_position_embeddings(x, position_ids, rotary_emb, kind)
    options = {"past_key_values": cache, "cache_positions": positions}
    cached = functools.partial(decode_forward, layer, x, position_ids, embeddings, use_kv_cache=True, **options)
    x, position_ids, past = create_decode_inputs_without_cache(batch, length, hidden, dtype, device)
    embeddings = get_position_embeddings(torch.cat((past, x), dim=1), position_ids, rotary_emb, kind)
    options = {"use_kv_cache": False, "prefill_hidden_states": past}
    uncached = functools.partial(decode_forward, layer, x, position_ids, embeddings, **options)
    return {"prefill_ms": prefill, "cached_ms": cached, "uncached_ms": uncached}


def decode_step(batch: int, length: int) -> Callable:
    """Return a function without arguments that decodes one token with the cache."""
    return layer_calls(batch, length)["cached_ms"]


def layer_latencies(batches: tuple[int, ...], lengths: tuple[int, ...]) -> pd.DataFrame:
    """Measure a layer in ms: prefill, a token with the cache, a token without. Store the table and draw it."""
    rows = []
    for batch in batches:
        for length in lengths:
            print(f"measuring batch {batch}, {length} tokens ...", flush=True)
            calls = layer_calls(batch, length)
            times = median_times(calls) if on_gpu else median_times(calls, warmup=1, iterations=5)
            rows.append({"batch": batch, "length": length, **{name: taken.median_ms for name, taken in times.items()}})
    table = pd.DataFrame(rows)
    table["cache gains"] = table["uncached_ms"] / table["cached_ms"]
    results["decoder_layer"] = table.to_dict("records")
    recorded = None if on_gpu else recorded_table(RECORDED, "decoder_layer")
    for place, found in {"this machine": table, "an H200, recorded": recorded}.items():
        if found is not None:
            plot_latencies(found, place)
    return table


# ---- the scoreboard ------------------------------------------------------------------------------------------------

scores: dict[str, float] = {}  # results of the student's formulas, in µs


def scoreboard(**yours: float) -> None:
    """Draw the times of a layer's decode step on an H200 at batch 1: recorded, and by your formulas so far.

    Args:
        **yours: a formula's µs, by its name: `memory`, `eager` or `graph`.
    """
    scores.update(yours)
    tables = json.loads(RECORDED.read_text())["tables"]
    steps = json.loads(RECORDED.with_name("decode_layer.json").read_text())["rows"]
    full = next(row for row in steps if row["type"] == "full_attention")
    step = next(row for row in tables["cuda_graphs"] if row["batch"] == 1 and row["phase"].startswith("decode"))
    names = {
        "memory": "your floor: its bytes over 4.8 TB/s",
        "eager": "your model: launched kernel by kernel",
        "graph": "your model: in a CUDA graph",
    }
    rows = [
        ("launched kernel by kernel", 1e3 * step["eager_ms"], 0),
        ("in a CUDA graph", 1e3 * step["graph_ms"], 0),
        ("in a graph, with the course's decode kernel", full["decode kernel"]["graph_us"], 0),
        *((names[name], value, 1) for name, value in scores.items()),
    ]
    rows.sort(key=lambda row: -row[1])
    _, ax = plt.subplots(figsize=(9, 0.9 + 0.4 * len(rows)), layout="constrained")
    for place, (_, value, kind) in enumerate(rows):
        ax.plot([value], [place], series(kind).marker, color=series(kind).color, markersize=8)
        shown = f"{value:,.0f} µs" if value >= 10 else f"{value:.2g} µs"
        ax.annotate(shown, (value, place), xytext=(9, 0), textcoords="offset points", va="center")
    ax.set(xscale="log", xlim=(1, 5000), yticks=range(len(rows)), yticklabels=[name for name, _, _ in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.xaxis.set_major_formatter("{x:g}")
    style_axes(
        ax,
        x="µs (log scale); circles: recorded, squares: yours",
        title="Scoreboard: one token, one layer, one user, an H200",
    )
    plt.show()


# ---- pictures ------------------------------------------------------------------------------------------------------


def _log_ticks(ax, ticks) -> None:
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(list(ticks), [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter("{x:g}")


def plot_calls(times_ms: list[float], without_wait_ms: list[float], harness_ms: float, title: str) -> None:
    """Draw the time of each call with and without a wait, and the result of `benchmark_latency`."""
    _, ax = plt.subplots(figsize=(9, 3), layout="constrained")
    ax.plot(times_ms, ".", color=series(0).color, label="one call, waited for")
    ax.plot(without_wait_ms, "x", color=series(1).color, markersize=4, label="one call, not waited for")
    ax.axhline(harness_ms, color="black", linewidth=1, linestyle="--", label="benchmark_latency")
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    style_axes(ax, x="call", y="time (ms)", title=title)
    plt.show()


def plot_lines(
    lines: Mapping[str, Sequence[float]],
    ticks: Sequence[float],
    x: str,
    y: str,
    title: str,
    levels: Mapping[str, float],
) -> None:
    """Draw {label: values at the ticks} on logarithmic axes, and {label: value} as dashed lines across them."""
    _, ax = plt.subplots(figsize=(9, 3.2), layout="constrained")
    for i, (label, values) in enumerate(lines.items()):
        ax.plot(ticks, values, **series(i).line, label=label)
    for (label, level), style in zip(levels.items(), ("--", ":"), strict=False):
        ax.axhline(level, color="black", linewidth=1, linestyle=style, label=label)
    _log_ticks(ax, ticks)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))  # beside the lines, because inside it would cover them
    style_axes(ax, x=x, y=y, title=title)
    plt.show()


def plot_latencies(table: pd.DataFrame, place: str) -> None:
    """Draw the latency of a layer over the number of earlier tokens, in a panel for each batch."""
    batches, lengths = sorted(set(table["batch"])), sorted(set(table["length"]))
    _, axes = plt.subplots(1, len(batches), figsize=(4 * len(batches), 3), sharey=True, layout="constrained")
    for ax, batch in zip(axes, batches, strict=True):
        part = table[table["batch"] == batch]
        names = {"prefill_ms": "prefill", "uncached_ms": "decode, no cache", "cached_ms": "decode, KV cache"}
        for i, (column, label) in enumerate(names.items()):
            ax.plot(part["length"], part[column], **series(i).line, label=label)
        _log_ticks(ax, lengths)
        style_axes(ax, x="tokens before this one", title=f"batch {batch}, {place}")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    style_axes(axes[-1])
    style_axes(axes[0], y="latency of one layer (ms)")
    plt.show()


def plot_last_step(trace: str) -> None:
    """Draw the last step of a trace: a row for each family of operators, with its share of the step's time."""
    inside = session.inside_of_last(trace, "ProfilerStep#")
    kernels = [event for event in inside if event.category in ("kernel", "gpu_memcpy")]
    kernels = kernels or [event for event in inside if event.category == "cpu_op"]
    kernels.sort(key=lambda event: (event.start_us, -event.duration_us))
    bars, until = [], 0.0
    for event, following in zip(kernels, [*kernels[1:], None], strict=True):
        end = event.start_us + event.duration_us
        calls_others = following is not None and following.start_us < end
        # The time of a product is that of its outermost operator; for conversions and views the operators below count.
        if event.start_us < until or (calls_others and event.family in ("memory", "other")):
            continue
        until, named = end, {"name": event.name, "category": event.family, "lane": event.family}
        bars.append({**named, "start_us": event.start_us, "duration_us": event.duration_us})
    plot_timeline(bars, title="One decode step by families of operators")
    plt.show()


def plot_graphs(table: pd.DataFrame) -> None:
    """Draw the eager time and the graph time of each step, recorded or measured, with a line between the two."""
    _, ax = plt.subplots(figsize=(9, 0.9 + 0.4 * len(table)), layout="constrained")
    for row, line in enumerate(table.to_dict("records")):
        ax.plot([line["graph_ms"], line["eager_ms"]], [row, row], color="black", linewidth=1, zorder=1)
        for i, column in enumerate(("eager_ms", "graph_ms")):
            ax.plot(line[column], row, series(i).marker, color=series(i).color, label=column[:-3] if row == 0 else None)
        ax.annotate(
            f"{line['gain']:.1f}×", (line["eager_ms"], row), xytext=(9, 0), textcoords="offset points", va="center"
        )
    names = [f"{line['phase']} tokens, batch {line['batch']}" for line in table.to_dict("records")]
    ax.set(xscale="log", yticks=range(len(table)), yticklabels=names, ylim=(len(table) - 0.5, -0.5))
    ax.margins(x=0.15)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    style_axes(ax, x="ms (log scale)", title="One layer, launched kernel by kernel and as a graph")
    plt.show()


def plot_flash_versions(table: pd.DataFrame, names: tuple[str, ...]) -> None:
    """Draw time and memory of attention over the length, on this machine and on an H200 (recorded)."""
    recorded = None if on_gpu else recorded_table(RECORDED, "flash_attention")
    for place, found in {"on this machine": table, "on an H200, recorded": recorded}.items():
        if found is not None:
            columns = [f"{name}_ms" for name in names], [f"{name}_mem_gb" for name in names]
            plot_flash_attn_improvement(found, *columns, labels=names, title=f"Three ways to attend, {place}")
            plt.show()


def memory_during(call: Callable) -> tuple[list[float], list[float]]:
    """Return (ms since the start, MB allocated since the start) after each allocation and release of a call."""
    call()
    synchronize()
    with torch.profiler.profile(profile_memory=True) as recorded:
        call()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        recorded.export_chrome_trace(f"{folder}/memory.json")
        events = json.loads(Path(folder, "memory.json").read_text())["traceEvents"]
    kind = 1 if on_gpu else 0  # PyTorch's number of the kind of device
    found = [e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == kind]
    changes = sorted((e["ts"] / 1e3, e["args"]["Bytes"] / 1e6) for e in found)
    held, steps = 0.0, [0.0]
    for _, change in changes:
        held += change
        steps.append(held)
    began = changes[0][0] if changes else 0.0
    return [0.0, *(when - began for when, _ in changes)], steps


def plot_memory(calls: Mapping[str, Callable], one_matrix_mb: float) -> dict[str, float]:
    """Draw the memory of each call over time, beside the size of a score matrix; return the maxima in MB."""
    _, axes = plt.subplots(1, len(calls), figsize=(10, 3), sharey=True, layout="constrained")
    highest = {}
    for i, (ax, (name, call)) in enumerate(zip(axes, calls.items(), strict=True)):
        ms, megabytes = memory_during(call)
        highest[name] = max(megabytes)
        ax.fill_between(ms, megabytes, step="post", color=series(i).color, alpha=0.3)
        ax.step(ms, megabytes, where="post", color=series(i).color)
        ax.axhline(one_matrix_mb, color="black", linewidth=1, linestyle="--")
        style_axes(ax, x="time in the call (ms)", title=f"{name}: up to {max(megabytes):.0f} MB")
    style_axes(axes[0], y="memory held (MB)")
    axes[-1].annotate("one score matrix", (0, one_matrix_mb), xytext=(4, 3), textcoords="offset points", fontsize=8.5)
    plt.show()
    return highest
