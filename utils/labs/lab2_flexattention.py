# ruff: noqa: F401 (what the cells use is imported for them)
"""Helpers of lab 2's cells that a student need not read: this machine, sizes, timing, and plots of the experiments."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch

from utils.attention import AttentionUnsupported, prepare
from utils.attention.backends.flex import needed_kernel_options
from utils.attention.masks import dense_mask, documents
from utils.attention.masks import named as with_name
from utils.attention.masks.sparsity import sparsity
from utils.attention.prepared import compiled_versions, own_copy
from utils.benchmark.measuring import measure_together
from utils.checking.labs.lab2_flexattention import *  # noqa: F403
from utils.files import output_path
from utils.labs import session
from utils.labs.session import H200, beside_guess, guesses, keep, plot_bars, results, small_task
from utils.machine.device import compile_support, default_device
from utils.visualization import plot_mask, plot_sparsity_sweep, plot_timeline, series, style_axes
from utils.visualization.style import CARD

device = default_device()
on_gpu = device.type == "cuda"
dtype = torch.bfloat16 if on_gpu else torch.float32  # the dtype of every benchmark
dtype_name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
batch, heads, length, head_dim = (1, 16, 8192, 128) if on_gpu else (1, 4, 2048, 64)  # the default of every benchmark
tolerance = 0.1 if on_gpu else 1e-3  # tolerance between two ways to compute the same attention in this dtype
compiler = compile_support()
show_recorded = functools.partial(session.show_recorded, "lab2")
plot_beside = functools.partial(session.plot_beside, "lab2")
save = functools.partial(session.save, "lab2")


def describe_machine() -> None:
    """Print this machine, and the sizes of the lab's problems on it."""
    print(f"device        {torch.cuda.get_device_name() if on_gpu else 'CPU'}, PyTorch {torch.__version__}")
    print(f"benchmarks    {batch} x {heads} heads, {length} tokens, head dim {head_dim}, {dtype_name}")
    print(f"compiler      {compiler.reason}")


def can_compile() -> bool:
    """Return whether torch.compile works here; otherwise print the reason."""
    if not compiler:
        print(f"torch.compile cannot run here: {compiler.reason} {compiler.remedy}")
    return bool(compiler)


def everything(b, h, q, k):
    """Allow every pair. FlexAttention uses the same kernel, blocks and tiles as for other masks, and skips no block."""
    return q >= 0


def random_qkv(length: int = length) -> list[torch.Tensor]:
    """Return three tensors (batch, heads, length, head_dim) of normal values."""
    return [torch.randn(batch, heads, length, head_dim, device=device, dtype=dtype) for _ in range(3)]


def time_ways(ways: Mapping[object, Callable], samples: int = 11) -> pd.DataFrame:
    """Measure functions without arguments, which take turns; return their median times with 95% intervals."""
    taken = measure_together(list(ways.values()), labels=[str(way) for way in ways], warmup=2, iterations=samples)
    rows = [(way, m.median_ms, *m.interval_ms) for way, m in zip(ways, taken, strict=True)]
    return pd.DataFrame(rows, columns=["way", "ms", "95% from", "95% to"])


check_mask_outweighs = small_task(
    "tokens from which on a mask outweighs Q, K, V and O",
    512,
    "A number for each pair, beside 4 L D numbers: does the dtype matter?",
    {128: "There are four of them: Q, K, V and O.", 1024: "The mask has L numbers for each of L queries."},
)
check_longest_mask = small_task(
    "tokens whose mask fills an H200",
    (141e9 / 2) ** 0.5,
    "L² numbers of two bytes each: solve for L.",
    {141e9**0.5: "A number has two bytes.", 141e9 / 2: "There is a number for each pair, not for each token."},
)
check_seen_by_60 = small_task(
    "the first and the last key that token 60 sees",
    (50, 60),
    "In which document is it, and which of its tokens come later?",
    {(50, 69): "It does not see later tokens.", (0, 60): "It sees its own document only."},
    rel=0,
)
check_boundaries = small_task(
    "where documents begin, and the last one ends",
    (0, 5, 6, 9, 11, 12, 16),
    "Seven numbers: 0, and the sums of the sixteenths so far.",
    {
        (5, 6, 9, 11, 12, 16): "The first document begins at 0.",
        (0, 5, 6, 9, 11, 12): "And where does the last one end?",
    },
)
check_causal_promise = small_task(
    "the promise of causal",
    64 * 64 / (64 * 65 / 2),
    "A row of 64 blocks: the first row computes one of them, the last one all.",
    {2: "Blocks on the diagonal are computed whole.", 65 / 128: "That is the share that is computed."},
    rel=0.005,
)
check_slope = small_task("the slope of ALiBi", 0.125, "The penalty is slope times distance.", {8: "Over 64 tokens."})
check_weight = small_task(
    "the factor of the weight",
    math.exp(-8),
    "A weight is the exponential of a score.",
    {8: "That is what the score loses.", math.exp(8): "It becomes smaller.", 1 / 8: "Not a share of the score."},
)
check_calls = small_task(
    "calls from which on a block mask costs less than a tenth",
    28,
    "3 / (3 + n) < 1/10.",
    {27: "With 27 it is a tenth.", 30: "All of the time is the mask's and the calls'.", 31: "The mask takes 3 of all."},
    rel=0,
)
check_eager_lengths = small_task(
    "lengths that run eager",
    4,
    "The limit is eight kernels, one for each length.",
    {12: "The first ones were compiled."},
)
check_training_promise = small_task(
    "the promise of blocks of 128",
    32 * 32 / (8 * 10),
    "A document has 4 x 4 blocks, and causal leaves 10 of them.",
    {8: "Inside of a document it is causal.", 1024 / 48: "Blocks on the diagonal count.", 16: "Blocks, not pairs."},
)
check_padding = small_task(
    "padding over tokens",
    0.5,
    "Half of the texts are padded to 1024, and half to 2048; the mean text has 1024 tokens.",
    {
        1 / 3: "Over the tokens, not over what is computed.",
        512: "That is the mean padding in tokens.",
        1.5: "Padding alone.",
    },
)
check_quarter_block = small_task(
    "the most that a quarter of a block reaches",
    0.25,
    "A block is computed whole: how much of it holds a visible pair?",
)
check_place = small_task(
    "the place of token 100",
    164,
    "Which of its pages is it in, and where in the page?",
    {100: "That is its position. Page 7 comes first.", 36: "That is its place in the page."},
)
check_empty = small_task(
    "places that are reserved and empty",
    24,
    "Whole pages: 16 of them.",
    {40: "So many places of the last page are used.", 1024: "Those are all its places."},
)
check_patch = small_task(
    "row and column of token 200",
    (4, 24),
    "A tile has 128 tokens: which tile, and which place in it? Rows of a tile have 16 patches.",
    {(1, 72): "That is row by row.", (4, 8): "The second tile begins in column 16."},
    rel=0,
)


def check_sparse_mask(mod: Callable) -> None:
    """Print whether a mask allows at most 1/8 of the causal pairs of 160 tokens, with a pair in each causal block."""
    seen, size = dense_mask(mod, 160, 160), 16
    blocks = seen.unfold(0, size, size).unfold(1, size, size).any(dim=(2, 3))
    below, share = torch.ones(10, 10, dtype=torch.bool).tril(), seen.sum().item() / (160 * 161 / 2)
    empty = int((below & ~blocks).sum())
    if seen.triu(1).any():
        print("✗ your mask: it is not causal any more.")
    elif share > 1 / 8 or empty:
        hint = "Let keys through at a distance." if empty else "Let fewer pairs through."
        print(f"… your mask: {share:.0%} of the causal pairs, {empty} of 55 blocks are empty. {hint}")
    else:
        print(
            f"✓ your mask: {share:.0%} of the causal pairs, and a kernel has to compute every block: it saves nothing."
        )


def plot_scores(shown: Mapping[str, Callable], score: float = 8.0, size: int = 64) -> dict[str, float]:
    """Draw the results of each modifier for equal scores under a causal mask; return the lowest score for each."""
    index, nothing, lowest = torch.arange(size), torch.zeros((), dtype=torch.int64), {}
    figure, axes = plt.subplots(1, len(shown), figsize=(13, 3), sharey=True, layout="constrained", facecolor=CARD)
    for ax, (name, mod) in zip(axes, shown.items(), strict=True):
        left = mod(torch.full((size, size), score), nothing, nothing, index[:, None], index[None, :])
        left = left.expand(size, size).masked_fill(index[None, :] > index[:, None], math.nan)
        lowest[name] = float(left.nan_to_num(math.inf).min())
        image = ax.imshow(left, cmap="RdBu_r", vmin=-12, vmax=12)  # white is a score of 0
        ax.set_title(f"{name}\n{lowest[name]:.3g} to {left.nan_to_num(-math.inf).max():.3g}", loc="left", fontsize=9.5)
        ax.set(xlabel="key", facecolor="#c8c8c8")  # a masked pair has no score
    axes[0].set_ylabel("query")
    figure.colorbar(image, ax=axes, label="score", shrink=0.8, extend="both")
    plt.show()
    return lowest


def show_code(code: str, needle: str, before: int = 4, after: int = 8, places: int = 2) -> int:
    """Print the lines around the first places of `needle` in the code; return the number of lines with it."""
    lines = code.splitlines()
    found = [i for i, line in enumerate(lines) if needle in line]
    print(f"{needle!r} stands in {len(found)} of {len(lines)} lines")
    shown_to, margin = -1, 0
    for i in found:
        if i > shown_to and places:
            places -= 1
            first, shown_to = max(i - before, shown_to + 1), min(i + after, len(lines) - 1)
            indents = [len(line) - len(line.lstrip()) for line in lines[first : shown_to + 1] if line.strip()]
            margin = margin or min(indents)  # the indentation of the first place, as generated code is deeply indented
            print("\n".join(f"{j + 1:5} {lines[j].rstrip()[margin:][:110]}" for j in range(first, shown_to + 1)), "\n")
    return len(found)


def plot_trace(trace: Path, call_name: str, title: str) -> None:
    """Draw the last call of this name in a trace, from its beginning; the generated kernel gets a readable name."""
    plot_timeline(session.inside_of_last(trace, call_name, without="aten::"), max_depth=9, title=title)
    plt.show()


def plot_cliff(limit: int = 2) -> None:
    """Draw the speed of each setting of `dynamic` over the lengths; shade lengths without static kernels."""
    tables = session.here_and_recorded("lab2", "cliff")
    if not tables:
        return
    _, axes = plt.subplots(1, len(tables), figsize=(1 + 5 * len(tables), 3.4), layout="constrained", squeeze=False)
    for ax, (place, table) in zip(axes[0], tables.items(), strict=True):
        unit, lengths = table.columns[-1], sorted(table["tokens"].unique())
        for i, (name, rows) in enumerate(table.groupby("setting", sort=False)):
            ax.plot(rows["tokens"], rows[unit], **series(i).line, label=name)
        band = {"color": series(1).color, "alpha": 0.15, "label": "past the limit"}
        ax.axvspan(lengths[limit] - length // 64, lengths[-1] + length // 64, **band)
        ax.set_ylim(0)
        if ax is axes[0][-1]:
            ax.legend(bbox_to_anchor=(1.0, 1.0), loc="upper left")
        style_axes(ax, x="tokens", y=unit, title=place)
    plt.show()


def plot_sweep() -> None:
    """Draw the speed-up for packed documents at each block size, and its share of the promised speed-up."""
    for place, table in session.here_and_recorded("lab2", "sweep").items():
        drawn = table.rename(columns={"block": "block_size", "span": "doc_span", "measured": "speedup"})
        rows = drawn.assign(ideal=drawn["blocks promise"]).to_dict("records")
        plot_sparsity_sweep(rows, title=f"times as fast: {place}")
        plt.show()


def plot_pages() -> None:
    """Draw the recorded times of an H200 for decoding over pages, and over a cache without pages."""
    record = json.loads((H200 / "decode_pages.json").read_text())
    rows = {f"{row['batch']} x {row['keys']} tokens": pd.Series(row["us"]) for row in record["rows"]}
    tables = {name: us.rename_axis("way").rename("µs").reset_index() for name, us in rows.items()}
    plot_bars(tables, ["µs"], title=f"Microseconds, recorded on {record['environment']['gpu']}, not measured here")


__all__ = [name for name in globals() if not name.startswith("_") and name not in ("annotations", "session")]
