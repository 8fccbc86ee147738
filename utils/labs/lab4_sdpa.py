"""Lab 4's setup cell imports this: facts of the machine, tensors, timing, recorded tables, plots and checks."""

from __future__ import annotations

import functools
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.ticker import FixedLocator, NullLocator
from torch.nn.attention import sdpa_kernel

# ruff: noqa: F401, F403 (what is imported here is what the notebook gets)
from utils.attention import BACKENDS as ATTENTION_BACKENDS
from utils.attention import find_backend, make_problem
from utils.attention.sequences import packed_mask, padded_mask
from utils.benchmark.measuring import measure_together
from utils.benchmark.result import Measurement, format_rate
from utils.checking.labs.lab4_sdpa import *
from utils.checking.labs.lab4_sdpa.common import BACKENDS, BackendRefused, runs
from utils.checking.labs.lab4_sdpa.dispatch import operators_of
from utils.checking.labs.lab4_sdpa.grid import default_slowdown, fastest, geometric_mean
from utils.checking.labs.lab4_sdpa.numerics import to_bf16
from utils.files import output_path, recorded_table
from utils.labs import session
from utils.labs.session import COLORS, H200, beside_guess, guesses, results, show, small_task
from utils.machine.device import default_device
from utils.visualization import plot_timeline, series, style_axes
from utils.visualization.style import CARD

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler writes a line at each start and stop
device = default_device()
on_gpu = device.type == "cuda"
dtype = torch.bfloat16 if on_gpu else torch.float32  # the dtype of timed calls; calls whose bits are compared use bf16
dtype_name = "bf16" if on_gpu else "fp32"

BACKEND_OF = {  # the operator that tells which backend computed a call
    "aten::_scaled_dot_product_attention_math": "math",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
}
SHAPE = ["kind", "pass", "batch", "heads", "kv_heads", "seq_len_q", "seq_len_kv", "head_dim", "causal"]
save = functools.partial(session.save, "lab4")
show_recorded = functools.partial(session.show_recorded, "lab4")
plot_beside = functools.partial(session.plot_beside, "lab4")


def random_qkv(batch, heads, length, head_dim, kv_heads=None, kv_length=None, dtype=dtype) -> list[torch.Tensor]:
    """Return normal q (B, H, S, D) and k, v (B, Hkv, L, D) on this machine's device."""
    keys = batch, kv_heads or heads, kv_length or length, head_dim
    shapes = (batch, heads, length, head_dim), keys, keys
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


# ---- lines that a student writes for no points -----------------------------------------------------------------------

check_first_version = small_task(
    "the smallest cuDNN that is asked first", 91501, "Newer than 9.15.0.", {91500: "9.15.0 itself is not newer."}, rel=0
)
check_third = small_task(
    "the third on an A100", "math", "It has capability 8.0.", {"efficient": "The second.", "cudnn": "The last."}
)
check_score_mb = small_task(
    "MB of one matrix of scores",
    16.777,
    "A number for each pair of each head.",
    {4.194: "Each head has scores of its own. (Or: four bytes a number.)", 16: "MB are 10^6 bytes."},
)
check_both_flops = small_task(
    "FLOPs of both passes over forward",
    3.5,
    "Two products forward and five backward.",
    {2.5: "Forward counts, too.", 5: "Divide by the products of forward."},
)
check_full_batch = small_task(
    "the batch that fills the chip", 17, "Programs are batch times key heads.", {16: "128 programs: four idle."}, rel=0
)
check_cache_mb = small_task(
    "MB of keys and values", 134.2, "Two tensors, two bytes each.", {67.1: "And values.", 536.9: "8 heads are kept."}
)
check_lse_numbers = small_task(
    "numbers of a log-sum-exp", 192, "One for each query of each head.", {6144: "None for D.", 24: "Each head has one."}
)
check_your_strides = small_task(
    "strides of (2, 3, 10, 16)",
    (480, 16, 48, 1),
    "How far apart lie neighbours in B, H, S and D? A token has 3 heads of 16 numbers.",
    {
        (480, 160, 16, 1): "So it lies as (B, H, S, D).",
        (480, 48, 16, 1): "These are the strides in the order of memory.",
    },
)
check_both_errors = small_task(
    "rms of two errors together", 0.005, "Independent errors add in squares.", {0.007: "Squares, then the root."}
)
check_after_one = small_task(
    "the bf16 number after 1",
    1 + 2**-7,
    "8 significant bits: 7 behind the point.",
    {1 + 2**-8: "That lies halfway, and is rounded to 1."},
    rel=1e-4,
)
check_your_mean = small_task(
    "the mean of 1.25 and 0.8", 1.0, "Ratios multiply.", {1.025: "So one would gain both ways round."}, rel=1e-3
)


# ---- who runs a call, and how long it takes ------------------------------------------------------------------------


def pinned(backend: str, *tensors, **options) -> Callable[[], torch.Tensor]:
    """Return a call of SDPA without arguments that allows one backend alone; Question 1.3 asks for more."""

    def call():
        with sdpa_kernel(BACKENDS[backend]):
            return F.scaled_dot_product_attention(*tensors, **options)

    return call


def running_backends(q, k, v, **options) -> list[str]:
    """Return the backends that run this call here."""
    return [backend for backend in BACKENDS if runs(backend, q, k, v, **options)]


def time_in_turn(calls: Mapping[str, Callable], iterations: int = 11) -> dict[str, Measurement]:
    """Measure calls that take turns (a b c c b a ...), so that a change of the machine's speed affects all calls."""
    timed = measure_together(list(calls.values()), labels=list(calls), warmup=2, iterations=iterations)
    return dict(zip(calls, timed, strict=True))


def who_runs(calls: Mapping[str, tuple], why_not: Callable[..., list[str]], backends=tuple(BACKENDS)) -> list[dict]:
    """Draw the backends that run each call, {name: (q, k, v, options)}; return rows with the reasons for refusals."""
    rows = []
    for name, (*tensors, options) in calls.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows.append({"call": name} | {b: list(why_not(b, *tensors, **options)) or ["runs"] for b in backends})
    _, ax = plt.subplots(figsize=(max(7.5, 2.5 + len(backends)), 0.8 + 0.3 * len(rows)), layout="constrained")
    numbers: dict[str, int] = {}
    for y, row in enumerate(rows):
        for x, backend in enumerate(backends):
            works, color = row[backend] == ["runs"], COLORS.get(backend, "0.5")
            marks = " ".join(f"({numbers.setdefault(r, len(numbers) + 1)})" for r in row[backend] if r != "runs")
            look = {"facecolor": color if works else "white", "edgecolor": color, "alpha": 0.55}
            ax.add_patch(plt.Rectangle((x, y), 0.94, 0.86, **look))
            ax.text(x + 0.47, y + 0.43, marks or "runs", ha="center", va="center", fontsize=8)
    ax.set(xlim=(0, len(backends)), ylim=(len(rows), 0))
    style_axes(ax, title="this machine")
    ax.set_xticks([x + 0.47 for x in range(len(backends))], backends)
    ax.set_yticks([y + 0.43 for y in range(len(rows))], [row["call"] for row in rows])
    ax.grid(False)
    plt.show()
    for reason, number in numbers.items():
        print(f"({number}) {reason}")
    return [{"call": row["call"]} | {b: " ".join(row[b]) for b in backends} for row in rows]


def ask_the_door() -> list[dict]:
    """Draw the backends of the course's `attention` that take problems that SDPA does not take."""
    q, k, v = random_qkv(2, 4, 24, 32)
    of_one, number = (q[:1], k[:1], v[:1]), functools.partial(torch.tensor, dtype=torch.int32, device=device)
    lengths, starts = padded_mask(q, k, number([24, 7]), False, None), packed_mask(*of_one[:2], number([0, 10, 24]))
    calls = {
        "nothing more": (q, k, v, {}),
        "a gradient": (q.clone().requires_grad_(), k, v, {}),
        "return_lse=True, sink=...": (q, k, v, {"with_lse": True}),
        "seqlens=...": (q, k, v, {"mask_mod": lengths}),
        "cu_seqlens=...": (*of_one, {"mask_mod": starts}),
        "a mask of b and h": (q, k, v, {"mask_mod": lambda b, h, i, j: j <= i + b + h}),
        "V narrower than K": (q, k, v[..., :16], {}),
        "q, k, v in fp8": (*(x.to(torch.float8_e4m3fn) for x in (q, k, v)), {}),
    }
    support = {name: find_backend(name).machine() for name in ATTENTION_BACKENDS}
    print("not on this machine:", ", ".join(name for name, here in support.items() if not here))

    def why_not(backend: str, *tensors, **asked) -> list[str]:
        able = find_backend(backend).support(make_problem(*tensors, **asked))
        return [] if able else [able.reason.partition(", and the mask is")[0]]

    return who_runs(calls, why_not, tuple(name for name, here in support.items() if here))


# ---- recorded tables -----------------------------------------------------------------------------------------------


def load_grid(which: str = "grid") -> pd.DataFrame:
    """Return the table "grid" or "held-out": SDPA's four backends on an H200. A column has the shape's number."""
    document = json.loads((H200 / "sdpa_grid.json").read_text(encoding="utf-8"))
    machine = document["environment"]
    print(f"Recorded on {machine['gpu']}, torch {machine['torch']}, cuDNN {machine['cudnn']}. Not measured here.")
    rows = pd.DataFrame(document["rows"])
    rows = rows[(rows["set"] == which) & rows["backend"].isin(list(BACKENDS))].copy()
    rows["is_default"] = rows["is_default"].eq(True)
    rows["shape"] = rows.groupby(SHAPE).ngroup()
    return rows.reset_index(drop=True)


def score_rule(rule: Callable[[pd.Series], str], grid: pd.DataFrame, where: str) -> dict:
    """Return a rule's gain over torch's default and its loss to the best backend; the rule maps a row to a backend."""
    timed = grid[grid["status"] == "ok"]
    ms = timed.pivot(index="shape", columns="backend", values="ms")
    calls = timed.drop_duplicates("shape").set_index("shape")
    answers = {shape: rule(call) for shape, call in calls.iterrows()}
    if unknown := set(answers.values()) - set(ms):
        raise ValueError(f"A rule returns one of {list(ms)} for every call, and this one returned {unknown.pop()!r}.")
    chosen = pd.Series({shape: ms.at[shape, backend] for shape, backend in answers.items()})
    lost = chosen / ms.min(axis=1)
    return {
        "shapes": where,
        "refused": int(chosen.isna().sum()),
        "within 3% of the best": float((lost <= 1.03).mean()),
        "default / rule": geometric_mean((default_slowdown(grid) / lost).dropna()),
        "rule / best": geometric_mean(lost.dropna()),
        "worst": lost.max(),
    }


# ---- plots ---------------------------------------------------------------------------------------------------------


def log_axes(ax, x_ticks, y_ticks=(1, 1.5, 2, 3, 5, 10, 30, 100), **labels) -> None:
    """Make both axes logarithmic, with plain numbers at these ticks, and label them."""
    for axis, scale, ticks in ((ax.xaxis, ax.set_xscale, x_ticks), (ax.yaxis, ax.set_yscale, y_ticks)):
        scale("log")
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
    style_axes(ax, **labels)


def plot_traces(paths: Mapping[str, Path]) -> None:
    """Draw the last step of each backend's trace, in a panel for each backend."""
    figure, axes = plt.subplots(len(paths), 1, figsize=(9, 3.2 * len(paths)), squeeze=False)
    for (backend, path), ax in zip(paths.items(), axes[:, 0], strict=True):
        plot_timeline(session.inside_of_last(path, "ProfilerStep#"), ax=ax, title=f"{backend} ({path.name})")
        ax.set_facecolor(CARD)
    figure.set_facecolor(CARD)
    figure.tight_layout()
    plt.show()


def plot_queries(rows: list[dict], keys: int, reach: Mapping[str, int | None]) -> None:
    """Draw the time over the number of queries, here and on an H200. `reach`: {panel: queries at the ridge}."""
    recorded = None if on_gpu else recorded_table(H200 / "lab4.json", "queries")
    tables = {"this machine": (pd.DataFrame(rows), keys), "H200, recorded": (recorded, 65536)}
    tables = {machine: table for machine, table in tables.items() if table[0] is not None}
    _, grid = plt.subplots(1, len(tables), figsize=(4.6 * len(tables), 3.2), squeeze=False, layout="constrained")
    for ax, (machine, (data, count)) in zip(grid[0], tables.items(), strict=True):
        ax.plot(data["queries"], data["ms"] / data["ms"].iloc[0], **series(0).line)
        if at := reach.get(machine):
            ax.axvline(at, color="black", linestyle="--", linewidth=1)
            ax.text(at, 0.92, "ridge ", transform=ax.get_xaxis_transform(), fontsize=8, ha="right")
        labels = {"x": "queries", "y": "time / time of one query", "title": f"{machine}, {count:,} keys"}
        log_axes(ax, data["queries"].tolist(), **labels)
    plt.show()


def plot_gains(gains: Mapping[str, list[float]]) -> None:
    """Draw the gain over a single split by the number of splits, with a line for each call."""
    _, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for i, (label, values) in enumerate(gains.items()):
        ax.plot(range(1, len(values) + 1), values, **series(i).line, markersize=3, label=label)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    labels = {"x": "splits", "y": "gain over one split (×)", "title": "A model of split-KV, 8 key heads"}
    log_axes(ax, (1, 2, 4, 8, 16, 32, 64), (0.5, 1, 2, 5, 10, 20), **labels)
    plt.show()


def plot_slowdowns(grid: pd.DataFrame) -> None:
    """Draw the time of each backend over the best time, with a panel for each kind of call."""
    timed = grid[grid["status"] == "ok"]
    timed = timed.assign(slowdown=timed["ms"] / timed.groupby("shape")["ms"].transform("min"))
    beside = {"math": 0.82, "flash": 0.92, "efficient": 1.0, "cudnn": 1.09}  # moves a shape's points apart
    markers = {64: "o", 128: "s", 256: "^"}
    panels = {"training": timed["kind"] == "training", "prefill": timed["kind"] == "prefill"}
    for queries, title in ((1, "decode, 1 query"), (4, "decode, 4 queries")):
        panels[title] = (timed["kind"] == "decode") & (timed["seq_len_q"] == queries)
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.6), sharey=True, sharex=True, layout="constrained")
    for ax, (title, which) in zip(axes.flat, panels.items(), strict=True):
        for (backend, head_dim), rows in timed[which].groupby(["backend", "head_dim"]):
            look = {"color": COLORS[backend], "markersize": 5, "markerfacecolor": "none", "alpha": 0.8}
            ax.plot(rows["seq_len_kv"] * beside[backend], rows["slowdown"], markers[head_dim], **look)
        labels = {"x": "keys" if ax in axes[1] else None, "y": "time / best" if ax in axes[:, 0] else None}
        log_axes(ax, (128, 1024, 8192, 65536), title=title, **labels)
    handles = [plt.Line2D([], [], color=c, marker="s", linestyle="", label=b) for b, c in COLORS.items()]
    look = {"color": "black", "linestyle": "", "markerfacecolor": "none"}
    handles += [plt.Line2D([], [], **look, marker=m, label=f"head dim {d}") for d, m in markers.items()]
    figure.legend(handles=handles, loc="outside right center", frameon=False)
    figure.suptitle("Recorded on an H200, not measured here")
    plt.show()


def plot_case(grid: pd.DataFrame) -> None:
    """Draw the ratio of cuDNN's time to flash's time in decode by the programs of a call; filled points split keys."""
    timed = grid[(grid["status"] == "ok") & (grid["kind"] == "decode")]
    cudnn = timed[timed["backend"] == "cudnn"]
    flash = timed[timed["backend"] == "flash"].set_index("shape")["ms"]
    ratio = cudnn["ms"] / cudnn["shape"].map(flash)
    splits = cudnn["kernels"].map(lambda names: any("reduction" in name for name in names))
    _, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    for ax, queries in zip(axes, (1, 4), strict=True):
        for filled in (True, False):
            rows = (cudnn["seq_len_q"] == queries) & (splits == filled)
            look = {"markerfacecolor": COLORS["cudnn"] if filled else "white", "color": COLORS["cudnn"]}
            label = "splits the keys" if filled else "does not split"
            programs = cudnn["batch"] * cudnn["kv_heads"]
            ax.plot(programs[rows], ratio[rows], "o", **look, markersize=5, alpha=0.8, label=label)
        ax.axhline(1, color="black", linewidth=1)
        ax.axvline(132, color="black", linestyle="--", linewidth=1)
        ax.legend()
        title = f"{queries} quer{'y' if queries == 1 else 'ies'}: {'sm80' if queries == 1 else 'sm90'} kernel"
        labels = {"x": "programs: batch × key heads (132 multiprocessors)", "y": "cuDNN / flash, time"}
        log_axes(ax, (1, 4, 16, 64, 132, 512), (0.5, 1, 2, 5), title=title, **labels)
    plt.show()


__all__ = [name for name in globals() if not name.startswith("_") and name not in ("annotations", "session")]
