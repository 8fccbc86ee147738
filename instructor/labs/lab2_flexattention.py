# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: nbgrader,tags,-all
#     notebook_metadata_filter: -jupytext.text_representation.format_version,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 2: FlexAttention
#
# Eight short documents are packed into one long row. A token may look at its own document only, so seven of eight
# scores are masked. Give the mask to attention as a tensor, and you wait as long as without a mask, or longer. Every
# score is computed, the mask is read from memory, and then seven eighths of the work are thrown away.
#
# Give the same mask as a *program*, four lines of Python, and attention gets several times faster. This lab is about
# that difference.
#
# **After this lab you can**
# 1. say what a mask costs as data, and what it costs as a program;
# 2. write mask functions and score modifiers for FlexAttention, and see what they do;
# 3. count blocks, and predict the speed-up of a mask before you measure it;
# 4. compile attention, find your own line of Python in the generated kernel, and keep it compiled;
# 5. design a mask, and the order of the tokens that goes with it.
#
# | Part | You will |
# |---|---|
# | 1. A mask as data | write masked attention, count what it wastes, and time it |
# | 2. A mask as a program | write mask functions, from causal to packed documents, and compose them |
# | 3. Blocks | count full, partial and empty blocks, predict a speed-up, write attention that skips |
# | 4. Score modifiers | soft-cap, ALiBi and a learned bias as functions of one score |
# | 5. From Python to a kernel | compare eager, compiled and CuTe; read the generated code; look at traces |
# | 6. The recompile cliff | fall off it, measure how deep it is, and build a railing |
# | 7. Design | sweep block size and document length, then lay out a batch so that blocks can be skipped |
# | 8. Pages and ragged batches | masks for a paged KV cache and for texts of different lengths (bonus) |
#
# You need lab 1 (the roofline, FLOPs and bytes) and PyTorch tensors. Plan six hours, two more for the bonus (an estimate).
#
# The lab gives {points:regular} points, and {points:bonus} bonus points.
#
# {points:table}

# %% [markdown]
# ## How to work
#
# - **Run all cells in order.** Later parts use earlier answers. A cell that needs one says which one.
# - **Predict first.** Where it says *Before you run*, the next cell has a line `guesses[...] = None`: write your guess
#   there, then run. The measured value is printed beside it, and both are saved. A wrong guess teaches more than a right one.
# - **Look at every mask.** A mask is a picture. Most mistakes are visible at once.
# - **Think about why.** The questions in words are graded by hand, and ask for numbers from your own run.
# - **Three hints** are folded away in each question: the idea, the plan, and the line that people miss. Try first.
#
# Write code where it says `# YOUR CODE HERE` and delete the line `raise NotImplementedError()`. Below each answer is a
# cell of checks. It names the mistakes that it knows. Grading tries the same on other sizes, layouts and masks, and counts
# what a question limits.
#
# Two rules hold for every answer. The inputs stay as they are: `x *= 2` would change the caller's tensor. And where a question
# forbids or limits an operator, compute with PyTorch's operators alone: the numbers of q, k and v must not leave PyTorch.
#
# Read more: the [FlexAttention paper](https://arxiv.org/abs/2412.05496), its
# [introduction](https://pytorch.org/blog/flexattention/), and [attention-gym](https://github.com/meta-pytorch/attention-gym), a
# collection of masks and score modifiers. In a terminal, `labs bench run --targets labs/flexattention:flex_attention` measures the
# same race with your own sizes.
#
# The lab runs with and without a GPU, at sizes made for each. On a GPU, FlexAttention generates Triton. On a CPU it
# generates C++, and the same masks skip the same blocks.

# %% nbgrader={"grade_id": "setup", "locked": true}
import dataclasses
import functools
import inspect
import itertools
import json
import math
import os
import time
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from utils import *
from utils.checking import (
    SizeWatch, check, expect_close, expect_number, expect_rounded_once, forbid, leaves_inputs, watch_operations,
)
from utils.checking.masks import expect_program, expect_rows, kernels_for, modified, pairs
from utils.checking.mistakes import known_mistake
from utils.checking.watching import FUSED_ATTENTION
from utils.machine.device import compile_support, flash_attn_support, gluon_support
from utils.machine.environment import environment
from utils.attention import AttentionUnsupported, attention_decode, prepare
from utils.attention.backends.flex import needed_kernel_options
from utils.attention.masks import dense_mask, documents
from utils.attention.masks import named as with_name
from utils.attention.masks.sparsity import sparsity
from utils.attention.prepared import compiled_versions, own_copy
from utils.benchmark.measuring import measure_together
from utils.files import output_path, recorded_table
from utils.visualization import plot_mask, plot_sparsity_sweep, series, style_axes

torch.manual_seed(0)
device = default_device()
on_gpu = device.type == "cuda"
dtype = torch.bfloat16 if on_gpu else torch.float32  # the dtype of every benchmark below
dtype_name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
batch, heads, length, head_dim = (1, 16, 8192, 128) if on_gpu else (1, 4, 2048, 64)  # every benchmark's default

tolerance = 0.1 if on_gpu else 1e-3  # between two ways to compute the same attention, in this dtype

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps the profiler from writing a line for each start and stop
RECORDED = Path("assets/results/h200/lab2.json")  # this lab's tables from an H200
results = {}  # this run's tables, saved at the end
guesses, outcomes = {}, {}  # your predictions, and what came out


def beside_guess(what: str, measured: object) -> None:
    """Print a measured value beside your guess, and keep both."""
    guess, outcomes[what] = guesses.get(what), measured
    shown = format(measured, ".3g") if isinstance(measured, float) else str(measured)
    print(f"{what}: {shown}" + ("   (no guess)" if guess is None else f"   (you guessed {guess})"))


def everything(b, h, q, k):
    """A mask that lets every pair through: the same kernel, blocks and tiles as under other masks, and nothing to skip."""
    return q >= 0


def random_qkv(length: int = length) -> list[torch.Tensor]:
    """Three tensors (batch, heads, length, head_dim) of normal values."""
    return [torch.randn(batch, heads, length, head_dim, device=device, dtype=dtype) for _ in range(3)]


def time_ways(ways: dict, samples: int = 11) -> pd.DataFrame:
    """Median time of each function of no arguments, with its 95% interval; the calls take turns."""
    taken = measure_together(list(ways.values()), labels=list(ways), warmup=2, iterations=samples)
    rows = [(name, m.median_ms, m.interval_ms[0], m.interval_ms[1]) for name, m in zip(ways, taken, strict=True)]
    return pd.DataFrame(rows, columns=["way", "ms", "from", "to"])


def arrivals(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(conversation, position) of tokens of conversations of these lengths, in a random order of arrival (Part 7)."""
    conversation = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    conversation = conversation[torch.randperm(len(conversation))]
    position = torch.zeros_like(conversation)
    for number in range(len(lengths)):
        mine = conversation == number
        position[mine] = torch.arange(int(mine.sum()))
    return conversation, position


def keep(name: str, table: pd.DataFrame, digits: int = 3) -> None:
    """Show a table and keep it in results."""
    results[name] = table.to_dict("records")
    display(whole_numbers(table.set_index(table.columns[0])).round(digits))


def whole_numbers(table: pd.DataFrame) -> pd.DataFrame:
    """Show counts as 256, not as 256.0."""
    counts = [c for c in ("full", "partial", "empty", "blocks", "computed") if c in table and table[c].notna().all()]
    return table.astype(dict.fromkeys(counts, int))


def show_recorded(table: str) -> None:
    """Show a table of this lab as it was recorded on an H200, and say that it was not measured here."""
    rows = recorded_table(RECORDED, table)
    if rows is not None:
        display(whole_numbers(rows).round(3))


compiler = compile_support()
print(f"device        {torch.cuda.get_device_name() if on_gpu else 'CPU'}, PyTorch {torch.__version__}")
print(f"benchmarks    {batch} x {heads} heads, {length} tokens, head dim {head_dim}, {dtype_name}")
print(f"compiler      {compiler.reason}")

# %% [markdown]
# # Part 1: A mask as data
#
# Attention compares each query with each key and lets every query take a weighted mean of the values:
#
# $$O_i = \sum_j P_{ij} V_j, \qquad P_{i\cdot} = \operatorname{softmax}_j\!\left(\tfrac{Q_i \cdot K_j}{\sqrt{D}}\right).$$
#
# A **mask** says which pairs $(i, j)$ exist. Where it is false, the score becomes $-\infty$, and its weight 0. The
# simplest way to say so is a tensor of $S \times S$ truth values.

# %% [markdown]
# ### Question 1.1: Attention under a mask {points}
#
# Write `masked_attention` from plain tensor operators.
#
# - `q` is (B, H, S, D), `k` and `v` are (B, H, L, D), `mask` is (S, L), bool, True where the query sees the key. The
#   result is (B, H, S, D).
# - Scores are divided by $\sqrt{D}$. Each query's weights add up to 1 over the keys it sees.
# - A query that sees no key gets zeros, not NaN.
# - No `F.scaled_dot_product_attention`, no `flex_attention`.
#
# {hint idea}
# Attention is a softmax over the keys that a query sees. A key that is not seen must not take part in the softmax at
# all, so something has to happen before it.
#
# {hint plan}
# Scores first, then the mask, then the softmax, then the product with the values. Test each step on a mask of 3 × 4
# pairs that you can check by hand. A row of the mask without a single True comes last.
#
# {hint line}
# What does the softmax make of a row in which every score is minus infinity? Print it once. Then decide what such a row
# should hold, and for which rows.

# %% nbgrader={"grade_id": "q1_1", "solution": true}
def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention of q (B, H, S, D) over k, v (B, H, L, D) where mask (S, L) is True."""
    ### BEGIN SOLUTION
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    return torch.where(mask.any(dim=-1)[:, None], weights, 0.0) @ v
    ### END SOLUTION


# %% nbgrader={"grade_id": "q1_1_tests", "grade": true, "points": 5}
@check("1.1", "Attention under a mask")
def check_masked_attention(masked_attention):
    masked_attention = leaves_inputs(masked_attention)
    # With the identity as values, the output is the weights: every rule of the question can be read off them.
    q, k, eye = torch.randn(1, 2, 5, 6), torch.randn(1, 2, 6, 6), torch.eye(6).expand(1, 2, 6, 6)
    mask = torch.ones(5, 6, dtype=torch.bool).tril(1)
    with watch_operations() as watch:
        weights = masked_attention(q, k, eye, mask)
    forbid(watch, FUSED_ATTENTION, hint="write product, mask, softmax, product yourself")
    expected = F.scaled_dot_product_attention(q, k, eye, attn_mask=mask)
    if isinstance(weights, torch.Tensor) and weights.shape == expected.shape:
        on_hidden, on_seen = weights[:, :, ~mask].abs().max().item(), weights[:, :, mask].abs().max().item()
        if on_hidden > 1e-4 and on_seen < 1e-4:
            raise AssertionError("only masked pairs get a weight: the mask is upside down. True means that the query sees the key.")
        if on_hidden > 1e-4:
            same = torch.allclose(weights, masked_attention(q, k, eye, torch.ones_like(mask)), atol=1e-4)
            raise AssertionError(f"a masked pair has the weight {on_hidden:.3g}, and should have 0. " + (
                "The mask is ignored: without it your result is the same."
                if same else "Before the softmax its score should be -inf, not 0: e^0 is 1."))
        if on_seen > 1e-4 and (weights.sum(-1) - 1).abs().max() > 1e-4:
            raise AssertionError(f"the weights of a query add up to {weights.sum(-1).flatten()[0]:.3g} over the keys it sees, and "
                                 "should add up to 1: mask the scores before the softmax, not the weights after it.")
    hint = known_mistake(weights, {
        "Divide the scores by sqrt(D).": F.scaled_dot_product_attention(q, k, eye, attn_mask=mask, scale=1.0),
        "Divide the scores by sqrt(D), not by D.": F.scaled_dot_product_attention(q, k, eye, attn_mask=mask, scale=1 / 6),
        "The heads are in another order.": expected.flip(1),
    })
    expect_close(weights, expected, rtol=1e-4, atol=1e-5, what="the weights (v is the identity)", hint=hint)
    q, k, v = torch.randn(2, 3, 5, 10), torch.randn(2, 3, 7, 10), torch.randn(2, 3, 7, 10)
    mask = torch.rand(5, 7) < 0.5
    mask[:, 0], mask[2] = True, False
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.clone().index_fill_(0, torch.tensor([2]), True))
    expected[:, :, 2] = 0.0
    got = masked_attention(q, k, v, mask)
    what, hint = "masked_attention, 2 sequences of 3 heads, query 2 sees no key,", ""
    if isinstance(got, torch.Tensor) and got.shape == expected.shape:
        if not torch.allclose(got[:, :, 2], expected[:, :, 2]):
            hint = "A query that sees no key gets zeros: the softmax of nothing is 0 divided by 0."
        for head in range(3):
            if not hint and any(torch.allclose(got[0, head], expected[0, o], atol=1e-4) for o in range(3) if o != head):
                hint = "The heads are in another order."
    expect_close(got, expected, rtol=1e-4, atol=1e-5, what=what, hint=hint)


check_masked_attention(masked_attention).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.masked_attention(masked_attention).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 1.2: What the tensor costs {points}
#
# Count for one call with `batch` sequences and `heads` heads, all under the same `mask` of shape (S, L):
#
# - **density**: the share of pairs that the mask lets through.
# - **wasted FLOPs**: dense attention computes every pair, 4·D FLOPs each ($D$ multiply-adds for the score, $D$ for the
#   value). How many FLOPs go into pairs that the mask then removes, over all heads and sequences?
# - **mask bytes**: fused kernels take the mask as numbers of the dtype of `q`, to be added to the scores. Every head of
#   every sequence reads one number per pair. How many bytes is that?
#
# {hint idea}
# All three numbers are counts. Count for one head of one sequence first, then ask which of the counts each further head
# and sequence repeats.
#
# {hint plan}
# Find the number of pairs, and how many of them stay. The pairs that go cost FLOPs for nothing. Every pair, whether it
# stays or goes, has a number in the mask that the kernel reads.
#
# {hint line}
# Two products, each with one multiply-add for each of the D numbers: and a multiply-add is how many FLOPs? The dtype
# decides the bytes of the mask, and it is not bool.

# %% nbgrader={"grade_id": "q1_2", "solution": true}
def mask_costs(
    mask: torch.Tensor, batch: int, heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[float, int, int]:
    """(density, wasted FLOPs, mask bytes) of dense attention under mask (S, L)."""
    ### BEGIN SOLUTION
    seen = int(mask.sum())
    pairs = mask.numel()
    return seen / pairs, 4 * head_dim * batch * heads * (pairs - seen), batch * heads * pairs * dtype.itemsize
    ### END SOLUTION


# %% nbgrader={"grade_id": "q1_2_tests", "grade": true, "points": 4}
@check("1.2", "Costs of a mask")
def check_mask_costs(mask_costs):
    mask_costs = leaves_inputs(mask_costs)
    # 10 of 24 pairs stay and 14 go; 5 sequences of 3 heads, D = 10, in fp32
    got = mask_costs(torch.ones(4, 6, dtype=torch.bool).tril(), 5, 3, 10, torch.float32)
    assert isinstance(got, tuple | list) and len(got) == 3, f"expected (density, wasted FLOPs, mask bytes), got {got!r}"
    where = "of a causal mask of 4 x 6 pairs, 5 sequences of 3 heads, D = 10, fp32,"
    density, flops, size = got
    expect_number(density, 10 / 24, rel=1e-6, what=f"the density {where}", mistakes={
        "This is the share of the pairs that are masked.": 14 / 24, "A share of the pairs is asked for, not their number.": 10})
    expect_number(flops, 8400, rel=0, unit="FLOPs", what=f"the number of wasted FLOPs {where}", mistakes={
        "Each head of each sequence computes its own pairs.": 560, "Each sequence computes its own pairs.": 1680,
        "Each head computes its own pairs.": 2800, "These are the FLOPs of all pairs.": 14400,
        "These are the FLOPs of the pairs that stay.": 6000,
        "A multiply-add is two FLOPs, and both products count.": 4200, "Each pair costs 4 D FLOPs.": 210})
    expect_number(size, 1440, rel=0, unit="bytes", what=f"the size {where}", mistakes={
        "A truth value takes one byte. Fused kernels take the mask as numbers of the dtype of q.": 360,
        "Every head of every sequence reads a number for each pair.": 96, "Every sequence reads them.": 288,
        "Every head reads them.": 480, "All pairs have a number, the masked ones too.": 600,
        "The pairs that stay have a number, too.": 840})
    half = mask_costs(torch.ones(4, 6, dtype=torch.bool).tril(), 5, 3, 10, torch.bfloat16)[2]
    expect_number(half, 720, rel=0, unit="bytes", what="the same in bf16", mistakes={
        "A bf16 number has 2 bytes: dtype.itemsize.": 1440})


check_mask_costs(mask_costs).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.mask_costs(mask_costs).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Time it. Four calls of the library's fused attention, SDPA: no mask; a causal mask and a mask of documents, as tensors;
# causal as a word, `is_causal=True`, which the kernel understands.
#
# **Before you run.** The documents leave one pair in eight. How long does attention take with that tensor, compared with no
# mask at all?

# %%
guesses["documents as a tensor, time over no mask"] = None  # a ratio
guesses["causal as a word, time over no mask"] = None
q, k, v = random_qkv()
positions = torch.arange(length, device=device)
span = length // 8
document_tensor = positions[:, None] // span == positions[None, :] // span
causal_tensor = positions[:, None] >= positions[None, :]
sdpa = F.scaled_dot_product_attention
print(f"timing four calls over {length} tokens ...", flush=True)
data_table = time_ways({
    "no mask": lambda: sdpa(q, k, v),
    "causal, as a tensor": lambda: sdpa(q, k, v, attn_mask=causal_tensor),
    f"documents of {span}, as a tensor": lambda: sdpa(q, k, v, attn_mask=document_tensor),
    "causal, as is_causal=True": lambda: sdpa(q, k, v, is_causal=True),
})
no_mask = torch.ones(length, length, dtype=torch.bool, device=device)
masks = (no_mask, causal_tensor, document_tensor, causal_tensor)
costs = [mask_costs(mask, batch, heads, head_dim, dtype) for mask in masks]
data_table["density"] = [float(density) for density, _, _ in costs]
data_table["mask MB read"] = [int(costs[i][2]) / 1e6 if i in (1, 2) else 0.0 for i in range(4)]
data_table["time over no mask"] = data_table["ms"] / data_table["ms"][0]
keep("mask_as_data", data_table)
beside_guess("documents as a tensor, time over no mask", float(data_table["time over no mask"][2]))
beside_guess("causal as a word, time over no mask", float(data_table["time over no mask"][3]))
if not on_gpu:
    show_recorded("mask_as_data")

# %% [markdown]
# ### Question 1.3: Explain the time {points}
#
# With numbers from your table:
# 1. The documents leave an eighth of the pairs. Which share of the time did their tensor save, and why?
# 2. For one head of 8192 tokens with D = 128 in bf16: how many MB are $Q$, $K$, $V$ and $O$ together, and how many is
#    the mask? What does that do to the FLOPs/Byte of the kernel?
# 3. `is_causal=True` says the same as the causal tensor. What can a kernel do with the word that it cannot do with
#    the tensor?
#
# {hint idea}
# When does a kernel learn that a score will be thrown away: before it computes it, or after?
#
# {hint plan}
# Take your table: time with the tensor over time without. Then count the bytes that a head reads anyway, and the bytes
# of its mask. FLOPs/Byte before and after, beside a ridge point of lab 1.
#
# {hint line}
# The word *causal* is known without reading memory. Think of a whole tile of keys above the diagonal: what can the
# kernel do with it?

# %% [markdown] nbgrader={"grade_id": "q1_3", "grade": true, "solution": true, "points": 4}
# 1. None: the time is that without a mask, or more (1.2 to 1.4 times on two cores, 2.2 on an H200). A tensor of values is known only when
#    it is read. The kernel computes every score, reads the mask's value for it and throws seven eighths of them away.
# 2. Q, K, V, O: 4 · 8192 · 128 · 2 bytes = 8.4 MB. The mask: 8192² · 2 bytes = 134 MB, sixteen times as much. The FLOPs
#    stay 4 · 8192² · 128 = 34 GFLOPs, so the intensity falls from 4096 to about 241 FLOPs/Byte: from far right of the
#    ridge of an H200 (206) to the ridge itself, and every head reads it again.
# 3. It knows before the loop starts which tiles of keys a tile of queries needs, and ends the loop at the diagonal. Half
#    of the tiles are neither loaded nor computed, and only those on the diagonal are compared element by element. From a
#    tensor it cannot know that a tile is empty without reading all of it.
#
# === BEGIN MARK SCHEME ===
# 1 point: 1, with a number of the student's own table: nothing (or less than nothing) saved, because every score is
# computed before the mask is looked at.
# 1.5 points: 2, half a point each for 8.4 MB (8 MiB), 134 MB (128 MiB) and the fall of the intensity by about 17.
# 1.5 points: 3, it skips whole tiles; it knows them without reading anything.
# === END MARK SCHEME ===

# %% [markdown]
# # Part 2: A mask as a program
#
# [FlexAttention](https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html) takes a mask as a function:
#
# ```python
# def mask_mod(b, h, q, k):  # sequence, head, index of the query, index of the key
#     return q >= k          # True: the query sees the key
# ```
#
# It is asked about **one pair at a time**. All four arguments are integers, held in tensors, and the answer is one truth
# value, also a tensor. A `mask_mod` takes exactly four positional arguments; FlexAttention counts them, so `*args` does
# not work. The kernel never reads an $S \times S$ tensor. (Part 3: `create_block_mask` evaluates every pair once,
# beforehand.)
#
# ![The same mask twice: as data, a matrix that is read from memory, and as a program, one comparison in registers](assets/lab2_mask_program.svg)
#
# The function becomes part of a kernel. So it may do what a kernel can do for one pair: arithmetic, comparisons, `&`,
# `|`, `~`, and reading tensors by index. Python's `and`, `or`, `not`, `if` and chained comparisons (`a <= b < c`) need a
# truth value while the function is traced. There is none yet: they raise an error. `&` and `|` bind more tightly than
# comparisons do: put each comparison in parentheses.
#
# Parameters come in through a closure: a function that returns a `mask_mod`.

# %% [markdown]
# ### Question 2.1: Three masks {points}
#
# - `causal`: a query sees its own key and all before it.
# - `sliding_window(window)` returns a `mask_mod`: causal, and only the last `window` keys, its own included.
# - `prefix_lm(prefix)` returns a `mask_mod`: every query sees the first `prefix` keys (the prompt, which is read in both
#   directions); beyond the prefix the mask is causal.
#
# One rule holds for every mask and every score modifier of this lab: it is a program for one pair. It looks up a few
# numbers of its query and its key and computes with them. When it is asked, it neither makes nor reads a tensor of
# pairs, and it does not go through many tokens to decide about one pair. Grading evaluates each function on single
# pairs, looks at the size of everything it touches, and counts its operators.
#
# {hint idea}
# A mask function is one question about two numbers: may position q look at position k?
#
# {hint plan}
# Write each rule as a sentence with *and* and *or* first, for example "the key is not later, and it is one of the last
# w". Then replace the words by comparisons in parentheses and `&`, `|`.
#
# {hint line}
# How many keys lie between the query and a key that is just outside of the window? Try a window of 1: which key is the
# only one that is seen?

# %% nbgrader={"grade_id": "q2_1", "solution": true}
def causal(b, h, q, k):
    """True where the key is the query's own or an earlier one."""
    ### BEGIN SOLUTION
    return k <= q
    ### END SOLUTION


def sliding_window(window: int):
    """A mask_mod: causal, the last `window` keys only."""
    ### BEGIN SOLUTION
    def mask_mod(b, h, q, k):
        return (k <= q) & (k > q - window)

    return mask_mod
    ### END SOLUTION


def prefix_lm(prefix: int):
    """A mask_mod: the first `prefix` keys for every query, causal beyond them."""
    ### BEGIN SOLUTION
    def mask_mod(b, h, q, k):
        return (k < prefix) | (k <= q)

    return mask_mod
    ### END SOLUTION


# %% nbgrader={"grade_id": "q2_1_tests", "grade": true, "points": 6}
@check("2.1", "Three masks")
def check_three_masks(causal, sliding_window, prefix_lm):
    own, later = "A query sees its own key.", "Keys after the query are hidden: it is causal."
    expect_rows(causal, "1000/1100/1110", "causal", {(1, 1): own, (0, 1): later, (1, 0): "Keys before the query are seen."},
                mistakes={"q and k are the wrong way round: the key comes before the query.": "1111/0111/0011"})
    expect_rows(sliding_window(3), "10000/11000/11100/01110/00111", "sliding_window(3)",
                {(0, 1): later, (0, 0): own, (3, 0): "The window holds `window` keys, and the query's own key is one of them.",
                 (2, 0): "The window is too narrow: it holds `window` keys, the query's own key included."},
                mistakes={"The window counts back from the query, not on from key 0.": "10000/11000/11100/11100/11100"})
    expect_rows(prefix_lm(3), "11100/11100/11100/11110/11111", "prefix_lm(3)",
                {(0, 2): "Every query sees the first `prefix` keys, the queries of the prefix as well. Beyond it the mask is "
                         "causal. Which of & and | joins the two?",
                 (4, 3): "Beyond the prefix the mask is causal: which of & and | joins the two?",
                 (3, 4): later, (0, 3): "The prefix has one key too many: keys 0 ... prefix - 1."})
    for mod, what in ((causal, "causal"), (sliding_window(5), "sliding_window(5)"), (prefix_lm(5), "prefix_lm(5)")):
        expect_program(mod, 16, what)


check_three_masks(causal, sliding_window, prefix_lm).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.three_masks(causal, sliding_window, prefix_lm).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 2.2: Packed documents {points}
#
# Training on short texts wastes most of a batch on padding, so texts are **packed**: one after the other into one row.
# A token may only see its own text. Which token belongs to which text is data, and a `mask_mod` may read data: it
# captures a tensor and indexes it with `b`, `q` or `k`.
#
# - `document_numbers(lengths, size, device)`: an integer tensor (size,) on `device` that gives the number of each
#   token's document: 0 for the first `lengths[0]` tokens, 1 for the next, and so on. Tokens after the last document are
#   padding and get −1. If the documents together exceed `size`, raise a `ValueError`.
# - `packed_documents(numbers)`: a `mask_mod` for `numbers` of shape (B, S), **one row for each sequence of the batch**:
#   causal, inside of one document. Padding sees nothing, and nobody sees padding.
#
# {hint idea}
# Two tokens belong together if the same number stands at both places. So one mask needs two look-ups in the same
# tensor.
#
# {hint plan}
# `document_numbers`: begin with a tensor of padding, and write the number of each document over its tokens.
# `packed_documents`: a condition for *same document*, one for *causal*, one for *no padding*.
#
# {hint line}
# Padding tokens carry equal numbers, too. And the row of `numbers` depends on the sequence: which argument of the mask
# says which sequence it is?

# %% nbgrader={"grade_id": "q2_2", "solution": true}
def document_numbers(lengths: list[int], size: int, device: torch.device) -> torch.Tensor:
    """The document of each of `size` tokens, (size,) integers; -1 for padding."""
    ### BEGIN SOLUTION
    if sum(lengths) > size:
        raise ValueError(f"documents of {sum(lengths)} tokens do not fit into {size}")
    numbers = torch.full((size,), -1, device=device)
    start = 0
    for number, length in enumerate(lengths):
        numbers[start : start + length] = number
        start += length
    return numbers
    ### END SOLUTION


def packed_documents(numbers: torch.Tensor):
    """A mask_mod for packed documents: numbers (B, S), causal inside each; -1 is padding."""
    ### BEGIN SOLUTION
    def mask_mod(b, h, q, k):
        return (numbers[b, q] == numbers[b, k]) & (numbers[b, q] >= 0) & (q >= k)

    return mask_mod
    ### END SOLUTION


# %% nbgrader={"grade_id": "q2_2_tests", "grade": true, "points": 6}
@check("2.2", "Packed documents")
def check_documents(document_numbers, packed_documents):
    cpu = torch.device("cpu")
    for lengths, size, expected in (([2, 1], 5, [0, 0, 1, -1, -1]), ([1, 3], 4, [0, 1, 1, 1]), ([3], 4, [0, 0, 0, -1])):
        got, what = document_numbers(lengths, size, cpu), f"document_numbers({lengths}, {size}, cpu)"
        assert isinstance(got, torch.Tensor) and not got.is_floating_point() and got.dtype != torch.bool, (
            f"{what} should be a tensor of integers, and is {getattr(got, 'dtype', type(got).__name__)}")
        hint = " Tokens after the last document are padding: -1." if -1 in expected and -1 not in got.tolist() else ""
        assert got.tolist() == expected, f"{what} is {got.tolist()}, expected {expected}.{hint}"
    try:
        on = document_numbers([1], 2, torch.device("meta")).device.type
    except RuntimeError:
        on = "meta"  # a meta tensor has no values: code that reads some is not judged here
    assert on == "meta", f"document_numbers should put its tensor on the device it is given; it is on the {on}"
    try:
        got = document_numbers([3, 2], 4, cpu)
    except ValueError:
        pass
    else:
        raise AssertionError(f"documents of 3 and 2 tokens do not fit into 4: raise a ValueError. It returned {got}")
    rows = torch.tensor([[0, 0, 1, 1, -1, -1], [0, 1, 1, 1, 2, -1]])
    mod = packed_documents(rows)
    hints = {(0, 1): "Inside of a document the mask is causal.", (2, 1): "A token sees its own document only.",
             (4, 4): "Padding sees padding here: -1 equals -1.", (1, 0): "A token sees the earlier tokens of its document."}
    expect_rows(mod, "100000/110000/001000/001100/000000/000000", "packed_documents", hints)
    expect_rows(mod, "100000/010000/011000/011100/000010/000000", "packed_documents", {
        (5, 5): "Padding sees padding here: -1 equals -1."}, b=1, mistakes={
        "It looks at sequence 0 only: each sequence b has documents of its own.": "100000/110000/001000/001100/000000/000000"})
    long = torch.zeros(1, 64, dtype=torch.int64)
    expect_program(packed_documents(long), 64, "packed_documents of 64 tokens", 64, 64)


check_documents(document_numbers, packed_documents).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.packed_documents(document_numbers, packed_documents).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 2.3: Compose {points}
#
# Masks are functions, so they compose. Large masks should be built of small ones that have been looked at.
#
# - `both(*mods)`: the pairs that **all** of the masks let through. `either(*mods)`: the pairs that **at least one** does.
#   Any number of masks from one up.
# - `window_per_head(windows)`: as `sliding_window`, but each head has a window of its own: `windows` is an integer tensor
#   (H,).
# - `sinks_and_window(sinks, window)`: a sliding window, and in addition the first `sinks` keys are seen by every query
#   that comes at or after them: it stays causal. (Models with a sliding window keep such
#   [attention sinks](https://arxiv.org/abs/2309.17453): the first tokens take the weight that a query has to put somewhere.)
#   Compose it
#   of the functions above, or write it as one expression.
#
# {hint idea}
# A composed mask is a mask: a function of the same four arguments, which asks other masks.
#
# {hint plan}
# Start with the first mask's answer and join the others to it one after the other. For the windows, one number is
# looked up by head. For the sinks, say the rule as a sentence: it stays causal, and then one of two things has to hold.
#
# {hint line}
# Hand all four arguments on as they came: a mask may look at b and h. And with sinks and window, put parentheses around
# the *or*, since `&` binds first.

# %% nbgrader={"grade_id": "q2_3", "solution": true}
def both(*mods):
    """A mask_mod: True where all of mods are."""
    ### BEGIN SOLUTION
    def mask_mod(b, h, q, k):
        return functools.reduce(lambda x, y: x & y, (mod(b, h, q, k) for mod in mods))

    return mask_mod
    ### END SOLUTION


def either(*mods):
    """A mask_mod: True where at least one of mods is."""
    ### BEGIN SOLUTION
    def mask_mod(b, h, q, k):
        return functools.reduce(lambda x, y: x | y, (mod(b, h, q, k) for mod in mods))

    return mask_mod
    ### END SOLUTION


def window_per_head(windows: torch.Tensor):
    """A mask_mod: causal, head h sees the last windows[h] keys."""
    ### BEGIN SOLUTION
    def mask_mod(b, h, q, k):
        return (k <= q) & (q - k < windows[h])

    return mask_mod
    ### END SOLUTION


def sinks_and_window(sinks: int, window: int):
    """A mask_mod: causal, the last `window` keys and the first `sinks` keys."""
    ### BEGIN SOLUTION
    def mask_mod(b, h, q, k):
        return (k <= q) & ((k > q - window) | (k < sinks))

    return mask_mod
    ### END SOLUTION


# %% nbgrader={"grade_id": "q2_3_tests", "grade": true, "points": 3}
@check("2.3", "both and either")
def check_compositions(both, either):
    def even_keys(b, h, q, k):
        return k % 2 == 0

    def past(b, h, q, k):
        return k <= q

    def not_first(b, h, q, k):
        return k > 0

    def shifted(b, h, q, k):
        return k == b + 2 * h

    swapped = "It does what the other of the two should do."
    expect_rows(both(even_keys, past), "100/100/101", "both(even keys, causal)", mistakes={
        swapped: "101/111/111", "Only the first mask counts here.": "101/101/101", "Only the last mask counts here.": "100/110/111",
        "^ is exclusive: it counts an odd number of masks.": "001/011/010"})
    expect_rows(either(even_keys, past), "101/111/111", "either(even keys, causal)", mistakes={
        swapped: "100/100/101", "Only the first mask counts here.": "101/101/101", "Only the last mask counts here.": "100/110/111",
        "^ is exclusive: it hides what two masks let through.": "001/011/010"})
    expect_rows(both(even_keys, past, not_first), "000/000/001", "both of three masks", mistakes={
        "Only the first two masks count here: any number may come.": "100/100/101"})
    expect_rows(either(even_keys, past, not_first), "111/111/111", "either of three masks", mistakes={
        "Only the first two masks count here: any number may come.": "101/111/111",
        "^ is exclusive: it counts an odd number of masks.": "010/000/001"})
    expect_rows(both(past), "100/110/111", "both of one mask")
    expect_rows(either(past), "100/110/111", "either of one mask")
    for b, h, rows in ((1, 0, "0100/0100/0100/0100"), (0, 1, "0010/0010/0010/0010")):
        for compose, name in ((both, "both"), (either, "either")):
            expect_rows(compose(shifted, shifted), rows, f"{name} of two masks that look at b and h", b=b, h=h, mistakes={
                "Pass b and h on to the masks as they are.": "1000/1000/1000/1000",
                "b and h are mixed up.": "0010/0010/0010/0010" if b else "0100/0100/0100/0100",
                "^ is exclusive: it hides what two masks let through.": "0000/0000/0000/0000"})


check_compositions(both, either).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.compositions(both, either).raise_if_wrong()
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "q2_3_heads_tests", "grade": true, "points": 4}
@check("2.3", "Windows and sinks")
def check_windows(window_per_head, sinks_and_window):
    mod = window_per_head(torch.tensor([1, 2, 4]))
    tables = ["1000/0100/0010/0001", "1000/1100/0110/0011", "1000/1100/1110/1111"]
    for h, rows in enumerate(tables):
        expect_rows(mod, rows, "window_per_head of windows 1, 2 and 4", {
            (0, 1): "It has to be causal too.", (2 if h == 1 else 1 if h == 0 else 0, 0): "The query's own key is one of the window."},
            b=1, h=h, mistakes={
            hint: tables[i] for i, hint in ((0, "All heads have the window of head 0."), (2, "All heads have the largest window."),
                                            (1, "Index the windows with h: b is the sequence.")) if i != h})
    expect_program(mod, 16, "window_per_head of three windows")
    expect_rows(sinks_and_window(2, 1), "1000/1100/1110/1101", "sinks_and_window(2, 1)", {
        (0, 1): "Sinks are causal as well: no query sees a key after it.", (3, 0): "The sinks are missing.",
        (3, 2): "Is there one sink too many, or a window that is too wide?", (2, 2): "The window is missing."}, mistakes={
        "The two arguments are the wrong way round.": "1000/1100/1110/1011"})
    expect_rows(sinks_and_window(1, 3), "10000/11000/11100/11110/10111", "sinks_and_window(1, 3)", {
        (4, 1): "Is there one sink too many, or a window that is too wide?", (4, 0): "The sinks are missing.",
        (2, 1): "A key has to be in one of the two, not in both."}, mistakes={
        "The two arguments are the wrong way round.": "10000/11000/11100/11110/11101"})
    expect_program(sinks_and_window(2, 3), 16, "sinks_and_window(2, 3)")


check_windows(window_per_head, sinks_and_window).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.windows_and_sinks(window_per_head, sinks_and_window).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Now look at them. Each mask is drawn twice: pair by pair, and in blocks of 16 × 16. The block pattern is what the next
# part is about.
#
# **Before you look.** Which of these masks leaves the most blocks without a single pair, and what share of them?

# %%
guesses["the mask with the most empty blocks"] = None  # a name of the gallery below
guesses["its share of empty blocks"] = None  # 0 to 1
packed = packed_documents(document_numbers([50, 20, 7, 40, 30], 160, torch.device("cpu"))[None])
gallery = {
    "causal": causal,
    "sliding_window(24)": sliding_window(24),
    "prefix_lm(50)": prefix_lm(50),
    "packed documents, padding": packed,
    "sinks_and_window(4, 24)": sinks_and_window(4, 24),
}
fig, axes = plt.subplots(2, len(gallery), figsize=(17, 7.4), layout="constrained")
plot_mask(list(gallery.values()), 160, block_size=16, labels=list(gallery), ax=list(axes.T.flat))
plt.show()
empty = {name: counted.empty / counted.total for name, mod in gallery.items() for counted in [sparsity(mod, 160, 160, block_size=16)]}
beside_guess("the mask with the most empty blocks", max(empty, key=empty.get))
beside_guess("its share of empty blocks", max(empty.values()))

# %% [markdown]
# # Part 3: Blocks
#
# A kernel does not work on pairs. It works on tiles: a block of queries against a block of keys, say 128 × 128 pairs in
# one go. So FlexAttention sorts the blocks once, before the kernel runs:
#
# - **empty**: no pair is visible. The block is skipped: nothing is loaded, nothing is computed.
# - **full**: every pair is visible. Computed, and the mask is not asked at all.
# - **partial**: some pairs are. Computed whole, and the mask is asked for every pair.
#
# ![A mask of packed documents in blocks: full, partial and empty ones, and the two tables of block indices that the kernel walks](assets/lab2_blocks.svg)
#
# `create_block_mask(mask_mod, B, H, S, L, device=..., BLOCK_SIZE=128)` does the sorting. With `B=None, H=None` it does so
# once for all sequences and heads, which is right as long as the mask ignores `b` and `h`. A mask that looks at them needs
# `B=` and `H=` their numbers, and gets tables for each.

# %% [markdown]
# ### Question 3.1: Count the blocks {points}
#
# `count_blocks(mask, block)` sorts the blocks of `block` × `block` pairs of a mask (S, L) and returns the three numbers
# `(full, partial, empty)`. S and L need not be multiples of `block`. A block that sticks out over the edge is never
# full: the pairs outside do not exist, and a kernel must mask them. It is partial or empty. Count yourself, with neither the
# course's `sparsity` nor `create_block_mask`.
#
# {hint idea}
# A block is judged by how many of its pairs are visible: all that it could hold, none, or something between.
#
# {hint plan}
# Bring the mask to a multiple of the block on both sides. Look at it as rows of blocks × rows in a block × columns of
# blocks × columns in a block, and count the visible pairs of each block.
#
# {hint line}
# What do you fill the border with, so that a block which sticks out cannot be full?

# %% nbgrader={"grade_id": "q3_1", "solution": true}
def count_blocks(mask: torch.Tensor, block: int) -> tuple[int, int, int]:
    """(full, partial, empty) blocks of a mask (S, L)."""
    ### BEGIN SOLUTION
    padded = F.pad(mask, (0, -mask.shape[1] % block, 0, -mask.shape[0] % block))
    rows, columns = padded.shape[0] // block, padded.shape[1] // block
    seen = padded.view(rows, block, columns, block).sum(dim=(1, 3))
    full, empty = int((seen == block * block).sum()), int((seen == 0).sum())
    return full, rows * columns - full - empty, empty
    ### END SOLUTION


# %% nbgrader={"grade_id": "q3_1_tests", "grade": true, "points": 6}
@check("3.1", "Counting blocks")
def check_count_blocks(count_blocks):
    count_blocks = leaves_inputs(count_blocks)
    causal_8_4 = torch.ones(8, 4, dtype=torch.bool).tril()
    column = torch.zeros(5, 7, dtype=torch.bool)
    column[:, 2] = True
    for mask, block, expected, what, mistakes in (
        (causal_8_4, 2, (5, 2, 1), "a causal mask of 8 x 4", {
            "The order is (full, partial, empty).": (1, 2, 5), "Partial are those that are neither full nor empty.": (5, 7, 1),
            "A partial block counts as full here.": (7, 2, 1), "True means visible: full and empty are exchanged.": (1, 2, 5)}),
        (causal_8_4[:7], 2, (3, 4, 1), "a causal mask of 7 x 4 (its last row of blocks sticks out)", {
            "The blocks at the edges are left out.": (3, 2, 1),
            "A block that sticks out over the edge is not full: the kernel has to mask what is outside.": (5, 2, 1)}),
        (column, 3, (0, 2, 4), "a mask of 5 x 7 in which key 2 alone is seen", {
            "The blocks at the edges are left out.": (0, 1, 1)}),
        (torch.ones(4, 6, dtype=torch.bool), 2, (6, 0, 0), "a mask of 4 x 6 in which everything is seen", {
            "The edges of this mask are edges of blocks: nothing sticks out.": (2, 4, 0)}),
    ):
        got = count_blocks(mask.clone(), block)
        what = f"count_blocks of {what}, in blocks of {block},"
        assert isinstance(got, tuple | list) and len(got) == 3, f"{what} should be (full, partial, empty), and is {got!r}"
        got = tuple(int(number) for number in got)
        hint = " Or: ".join(text for text, wrong in mistakes.items() if got == wrong) or "Draw it, and sort its blocks by hand."
        assert got == expected, f"{what} is {got}, and full should be {expected[0]}. {hint}"


check_count_blocks(count_blocks).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.count_blocks(count_blocks).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 3.2: What a block costs, and what a mask promises {points}
#
# - `block_flops(counts, block, batch, heads, head_dim)`: the FLOPs that a block kernel does. `counts` is
#   `(full, partial, empty)` of one head. A block that is computed is computed whole: 4·D FLOPs for each of its pairs.
# - `promised_speedup(counts)`: how many times faster than without a mask the kernel can be, if time goes with the number
#   of computed blocks. There is at least one of them.
# - `document_blocks(length, span, block)`: how many blocks are computed for documents of `span` tokens each, **not**
#   causal, over `length` tokens. All three are powers of two, `span` and `block` no larger than `length`. Work it out
#   on paper: no mask, and no loop over blocks, rows of blocks or documents. Grading asks about billions of them.
#
# {hint idea}
# A kernel pays for blocks. Whether a computed block is full or partial makes no difference to its FLOPs.
#
# {hint plan}
# FLOPs: pairs in a block, times the FLOPs of a pair, times the blocks that are computed, for each head of each
# sequence. For the documents, draw 8 tokens with documents of 4 and blocks of 2, then documents of 2 and blocks of 4.
#
# {hint line}
# A document of n blocks a side has how many blocks? And what happens to the diagonal when several documents fit into
# one block?

# %% nbgrader={"grade_id": "q3_2", "solution": true}
def block_flops(counts: tuple[int, int, int], block: int, batch: int, heads: int, head_dim: int) -> int:
    """FLOPs of attention that computes the full and partial blocks of each head whole."""
    ### BEGIN SOLUTION
    full, partial, _ = counts
    return 4 * head_dim * batch * heads * (full + partial) * block**2
    ### END SOLUTION


def promised_speedup(counts: tuple[int, int, int]) -> float:
    """Blocks without a mask over blocks with it."""
    ### BEGIN SOLUTION
    return sum(counts) / (counts[0] + counts[1])
    ### END SOLUTION


def document_blocks(length: int, span: int, block: int) -> int:
    """Blocks computed for documents of `span` tokens, not causal, over `length` tokens."""
    ### BEGIN SOLUTION
    return length // block * max(1, span // block)
    ### END SOLUTION


# %% nbgrader={"grade_id": "q3_2_tests", "grade": true, "points": 5}
@check("3.2", "Promises")
def check_promises(block_flops, promised_speedup, document_blocks):
    # 2 full, 3 partial and 6 empty blocks of 4 x 4; 5 sequences of 7 heads, D = 10: 4 D x 16 = 640 FLOPs a block
    expect_number(block_flops((2, 3, 6), 4, 5, 7, 10), 112_000, rel=0, unit="FLOPs",
                  what="block_flops of (2, 3, 6) blocks of 4 x 4, 5 sequences of 7 heads, D = 10,", mistakes={
        "Partial blocks are computed as well, whole.": 44_800, "Partial blocks are computed whole, not half.": 78_400,
        "Empty blocks are skipped.": 246_400, "The counts are those of one head of one sequence.": 3_200,
        "Each sequence has its blocks, too.": 22_400, "Each head has its blocks, too.": 16_000,
        "A block has block x block pairs.": 28_000, "A multiply-add is two FLOPs, and there are two products.": 56_000})
    expect_number(promised_speedup((2, 3, 6)), 2.2, rel=1e-9, what="promised_speedup((2, 3, 6))", mistakes={
        "This is the share of blocks that are computed; the speed-up is its inverse.": 5 / 11,
        "Partial blocks are computed as well.": 5.5, "A partial block costs as much as a full one.": 11 / 3.5,
        "Compare with all blocks, not with the empty ones.": 1.2})
    expect_number(promised_speedup((0, 5, 5)), 2.0, rel=1e-9, what="promised_speedup((0, 5, 5)), no full block,")
    expect_number(document_blocks(64, 16, 4), 64, rel=0, unit="blocks", what="document_blocks(64, 16, 4)", mistakes={
        "These are all blocks.": 256, "A document of n blocks a side has n x n blocks, not n.": 16,
        "Not causal: both halves count.": 40})
    short = "Documents shorter than a block still need the block, and share it."
    expect_number(document_blocks(64, 2, 16), 4, rel=0, unit="blocks", what="document_blocks(64, 2, 16)", mistakes={
        short: 0.5, "A block that two documents share is computed once.": 32})
    expect_number(document_blocks(64, 8, 16), 4, rel=0, unit="blocks", what="document_blocks(64, 8, 16)", mistakes={
        short: 2, "A block that two documents share is computed once.": 8})
    expect_number(document_blocks(32, 8, 8), 4, rel=0, unit="blocks", what="document_blocks(32, 8, 8)")


check_promises(block_flops, promised_speedup, document_blocks).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.promises(block_flops, promised_speedup, document_blocks).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Now the promise meets the clock. The table predicts with your functions, then measures FlexAttention compiled, one
# kernel for each mask. `prepare` prepares a call: it builds the block mask, compiles, runs once, and raises an error should
# the call ever be compiled a second time. `documents(span)` comes with the course: documents of `span` tokens, not causal.
#
# The promise compares with a kernel that computes *all* blocks of the same size. So that is the baseline: `everything`, a mask
# that lets every pair through. *No mask* is another kernel, with tiles of its own, and has a row to show it.
#
# **Before you run.** Sliding window of an eighth of the text: what is promised, and how much of it will arrive? What does asking
# for blocks cost when none can be skipped?

# %%
guesses["promise of the sliding window"] = None  # times faster
guesses["share of it that arrives"] = None  # 0 to 1
guesses["everything in blocks, time over no mask"] = None
q, k, v = random_qkv()
block = 128
span = length // 8
tried = {
    "everything, in blocks": everything, "no mask": None, "causal": causal, f"sliding_window({span})": sliding_window(span),
    f"documents({span})": documents(span),
}
if compiler:
    print("compiling five kernels, then timing: up to half a minute on two CPU cores ...", flush=True)
    calls = {name: prepare(q, k, v, mask_mod=mod, backend="flex", block_size=block) for name, mod in tried.items()}
    rows = []
    for mod in tried.values():
        counts = ((length // block) ** 2, 0, 0)
        if mod is not None:
            counts = tuple(map(int, count_blocks(dense_mask(mod, length, length, device), block)))
        rows.append((*counts, block_flops(counts, block, batch, heads, head_dim) / 1e9, promised_speedup(counts)))
    promise_table = time_ways(calls)
    promise_table[["full", "partial", "empty", "GFLOPs", "promised"]] = rows
    promise_table["measured"] = promise_table["ms"][0] / promise_table["ms"]
    promise_table["kept"] = promise_table["measured"] / promise_table["promised"]
    keep("promises", promise_table)
    beside_guess("promise of the sliding window", float(promise_table["promised"][3]))
    beside_guess("share of it that arrives", float(promise_table["kept"][3]))
    beside_guess("everything in blocks, time over no mask", float(promise_table["ms"][0] / promise_table["ms"][1]))
else:
    print(f"torch.compile cannot run here: {compiler.reason} {compiler.remedy}")
if not on_gpu:
    show_recorded("promises")

# %% [markdown]
# kept = measured speed-up / promised speed-up. 0.7 means that 70% of the promise arrived. In Part 7 you will find where the rest
# goes: starting a tile, partial blocks, uneven rows.
#
# Why does *no mask* have a row of its own? Without a block mask FlexAttention has no blocks. On a CPU its tile is then *all*
# queries against *all* keys, and the scores of a whole head lie in memory: slower than the same work in blocks, so that a mask
# would seem to keep more than it promised. On a GPU the kernel's tiles are the same with blocks of 128 and without. An honest
# baseline changes one thing only. (A recorded table without the row *everything, in blocks* was made before this lab had it: its
# *kept* compares with *no mask*.)

# %% [markdown]
# ### Question 3.3: Attention that skips {points}
#
# Write the loop that the kernel runs. A `BlockMask` holds, for each row of blocks, the **numbers of the key blocks to
# visit**, partial and full ones apart. For sequence and head 0 (this mask is shared by all) and row `i`:
#
# - `block_mask.kv_num_blocks[0, 0, i]`: how many partial blocks; `block_mask.kv_indices[0, 0, i]`: their numbers. Only
#   that many entries count, the rest is filler.
# - `block_mask.full_kv_num_blocks` and `block_mask.full_kv_indices`: the same for full blocks. (The class allows `None`
#   there. `create_block_mask` always fills them in, and all masks here are made by it.)
# - `block_mask.BLOCK_SIZE`: (queries, keys) of a block. `block_mask.mask_mod`: the mask itself. It takes index tensors
#   that broadcast: `mask_mod(b, h, queries[:, None], keys[None, :])` gives one block of truth values. The indices count
#   from the start of the text. `b` and `h` are tensors too, here `torch.tensor(0)` each: the mask is the same for all.
#
# Write `block_sparse_attention` for `q` (B, H, S, D) and `k`, `v` (B, H, L, D), S and L multiples of their blocks:
# - compute the products of visited blocks only, each once, and ask `mask_mod` in partial blocks only. Grading counts both.
# - work on the scores of one row of blocks at a time: once the next row has come, none of them is used. No tensor that you create, a mask
#   neither, may be as large as all scores of a head, S × L. (Tensors as large as `q`, `k` or the output are fine.)
# - a query may see nothing in a partial block, or nothing at all: then its output is 0, not NaN.
# - compute in float32 or wider; the result has the dtype of `q`. No SDPA, no FlexAttention.
#
# {hint idea}
# Each row of blocks is a small attention of its own: its queries against the keys of the blocks that its tables name.
#
# {hint plan}
# For a row: collect the scores of each visited key block and its values. Ask the mask in the blocks of the partial
# table only. Put the row's scores side by side, one softmax, one product, write the rows of the output.
#
# {hint line}
# The tables are padded with filler: how many entries of a row count? And a query can see nothing in a partial block, or
# nothing in the whole row: look at that row after the softmax.

# %% nbgrader={"grade_id": "q3_3", "solution": true}
def block_sparse_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: BlockMask) -> torch.Tensor:
    """Attention of q (B, H, S, D) over k, v (B, H, L, D) that visits the blocks of block_mask only."""
    ### BEGIN SOLUTION
    size_q, size_k = block_mask.BLOCK_SIZE
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    output = torch.zeros_like(q)
    for i in range(q.shape[2] // size_q):
        rows = slice(i * size_q, (i + 1) * size_q)
        queries = torch.arange(rows.start, rows.stop, device=q.device)
        partial = block_mask.kv_indices[0, 0, i, : int(block_mask.kv_num_blocks[0, 0, i])].tolist()
        full = block_mask.full_kv_indices[0, 0, i, : int(block_mask.full_kv_num_blocks[0, 0, i])].tolist()
        scores, values = [], []
        for j in partial + full:
            columns = slice(j * size_k, (j + 1) * size_k)
            tile = q[:, :, rows].to(wide) @ k[:, :, columns].to(wide).mT / math.sqrt(q.shape[-1])
            if j in partial:
                keys = torch.arange(columns.start, columns.stop, device=q.device)
                seen = block_mask.mask_mod(zero, zero, queries[:, None], keys[None, :])
                tile = tile.masked_fill(~seen, -math.inf)
            scores.append(tile)
            values.append(v[:, :, columns].to(wide))
        if scores:
            weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1).nan_to_num(0.0)
            output[:, :, rows] = (weights @ torch.cat(values, dim=2)).to(q.dtype)
    return output
    ### END SOLUTION


# %% nbgrader={"grade_id": "q3_3_tests", "grade": true, "points": 9}
@check("3.3", "Attention that skips")
def check_block_sparse(block_sparse_attention):
    block_sparse_attention = leaves_inputs(block_sparse_attention)
    numbers = torch.tensor([0] * 6 + [1] * 6)
    asked = []

    def mod(b, h, q, k):
        asked.append(torch.broadcast_shapes(q.shape, k.shape))
        return (numbers[q] == numbers[k]) & (q >= k) & (q > 0)  # query 0 sees nothing

    block_mask = create_block_mask(mod, None, None, 12, 12, device="cpu", BLOCK_SIZE=(2, 3))
    mask = dense_mask(mod, 12, 12)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        q, k, v = (torch.randn(2, 3, 12, 10).to(dtype) for _ in range(3))
        wide = [x.float() for x in (q, k, v)]
        expected = F.scaled_dot_product_attention(*wide, attn_mask=mask)
        expected[:, :, 0] = 0.0
        asked.clear()
        with watch_operations() as watch:
            block_sparse_attention(q, k, v, block_mask)
        forbid(watch, FUSED_ATTENTION, hint="walk the tables yourself")
        asked.clear()
        with SizeWatch() as sizes:
            got = block_sparse_attention(q, k, v, block_mask)
        seen = sum(math.prod(shape) for shape in asked)
        what, hint = f"block_sparse_attention in {dtype}, blocks of (2, 3), query 0 sees nothing,".replace("torch.", ""), ""
        if isinstance(got, torch.Tensor) and got.shape == q.shape:
            full = torch.zeros(12, 12, dtype=torch.bool)
            touched = torch.zeros(12, 12, dtype=torch.bool)
            for i in range(6):
                for j in range(4):
                    tile = mask[2 * i : 2 * i + 2, 3 * j : 3 * j + 3]
                    full[2 * i : 2 * i + 2, 3 * j : 3 * j + 3] = tile.all()
                    touched[2 * i : 2 * i + 2, 3 * j : 3 * j + 3] = tile.any()
            wrong = {"The mask is not applied inside of partial blocks.": touched, "Full blocks are missing.": mask & ~full,
                     "Partial blocks are missing.": full}
            hint = known_mistake(got, {text: F.scaled_dot_product_attention(*wide, attn_mask=m).nan_to_num(0.0)
                                       for text, m in wrong.items()} | {
                "Divide the scores by sqrt(D).": F.scaled_dot_product_attention(*wide, attn_mask=mask, scale=1.0).nan_to_num(0.0),
                "The heads are in another order.": expected.flip(1), "The heads are in another order: rolled.": expected.roll(1, 1),
            }, rtol=3e-2, atol=3e-2)
            if got.isnan().any():
                hint = "A query that sees nothing in a block, or nothing at all, must not end in NaN: its weights are 0."
        expect_close(got, expected.to(dtype), rtol=tolerance, atol=tolerance, what=what, hint=hint)
        if dtype == torch.bfloat16:
            exact = F.scaled_dot_product_attention(*(x.double() for x in wide), attn_mask=mask).nan_to_num(0.0)
            expect_rounded_once(got, exact, what, "scores, weights and sums")
        visited = int(block_mask.kv_num_blocks.sum() + block_mask.full_kv_num_blocks.sum())
        one = 2 * 2 * 3 * 6 * 10  # multiply-adds of a block, both products, all heads of both sequences
        assert sizes.macs <= one * visited, (
            f"{what} does the products of {sizes.macs / one:.0f} blocks, and {visited} of 24 hold a visible pair. Visit those in "
            "the tables, and only the first kv_num_blocks entries of a row.")
        partial = int(block_mask.kv_num_blocks.sum())
        assert seen <= 6 * partial, (
            f"{what} asks mask_mod about {seen} pairs, and the {partial} partial blocks hold {6 * partial}. "
            "In full blocks every pair is visible: do not ask.")
        row = 2 * 3 * 2 * 12
        over = sizes.over(row, frozenset({"exp", "exp2", "expm1", "amax", "max", "_softmax"})) or sizes.over(max(row, q.numel()))
        assert over is None, (
            f"{what} works on a tensor of {over[1]} elements (in {over[0]}), and one row of blocks has {row} scores. "
            "Work on the scores of one row of blocks at a time.")


check_block_sparse(block_sparse_attention).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.block_sparse_attention(block_sparse_attention).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# That is the algorithm of FlexAttention's kernel. The compiled one starts a program for each row of blocks. As many run at
# the same time as the chip has room for, and the rest wait. It uses online softmax instead of keeping a row of scores.

# %% [markdown]
# # Part 4: Score modifiers
#
# A mask decides whether a pair exists. A **score modifier** changes the score of a pair that does:
#
# ```python
# def unchanged(score, b, h, q, k):  # a score_mod
#     return score
# ```
#
# `score` is $Q_q \cdot K_k / \sqrt{D}$, already scaled; the result goes into the softmax. The other arguments are those of
# a `mask_mod`. The same rules hold: one pair at a time, arithmetic and captured tensors, no `if`. (`torch.where` chooses.)

# %% [markdown]
# ### Question 4.1: Soft-cap, ALiBi, and in what order {points}
#
# - `soft_cap(cap)`: squeezes scores into (−cap, cap): $\text{cap} \cdot \tanh(s / \text{cap})$.
#   [Gemma 2](https://arxiv.org/abs/2408.00118) does so with 50.
# - `alibi(slopes)` ([Press et al.](https://arxiv.org/abs/2108.12409)): a penalty that grows with the distance, $s - m_h\,(q - k)$. `slopes` is a tensor (H,): one
#   $m_h$ for each head.
# - `in_turn(*score_mods)`: applies the modifiers from left to right; each takes the score the one before returned.
#
# {hint idea}
# A score modifier takes one number and returns one number. The indices tell it which pair the number belongs to.
#
# {hint plan}
# Soft-cap: shrink, bend, stretch again. ALiBi: the penalty is a slope times a distance. `in_turn`: keep the score in a
# variable and let each modifier replace it.
#
# {hint line}
# Soft-cap must leave small scores nearly alone: put a score of 0.1 and a cap of 50 into yours. In ALiBi, check the sign
# with a key far behind the query.

# %% nbgrader={"grade_id": "q4_1", "solution": true}
def soft_cap(cap: float):
    """A score_mod: cap * tanh(score / cap)."""
    ### BEGIN SOLUTION
    def score_mod(score, b, h, q, k):
        return cap * torch.tanh(score / cap)

    return score_mod
    ### END SOLUTION


def alibi(slopes: torch.Tensor):
    """A score_mod: score - slopes[h] * (q - k)."""
    ### BEGIN SOLUTION
    def score_mod(score, b, h, q, k):
        return score - slopes[h] * (q - k)

    return score_mod
    ### END SOLUTION


def in_turn(*score_mods):
    """A score_mod: all of score_mods, from left to right."""
    ### BEGIN SOLUTION
    def score_mod(score, b, h, q, k):
        for mod in score_mods:
            score = mod(score, b, h, q, k)
        return score

    return score_mod
    ### END SOLUTION


# %% nbgrader={"grade_id": "q4_1_tests", "grade": true, "points": 7}
@check("4.1", "Score modifiers")
def check_score_mods(soft_cap, alibi, in_turn):
    def at(mod, what, score=3.0, b=2, h=1, q=5, k=2):
        """What the modifier makes of one score, in one pair, asked as FlexAttention asks."""
        return modified(lambda s, b, h, i, j: mod(s, b, h, i + q, j + k), torch.full((1, 1), score), what, b, h)

    expect_number(at(soft_cap(2.0), "soft_cap(2)"), 1.81030, rel=1e-4, what="soft_cap(2) of a score of 3", mistakes={
        "Multiply by the cap again after the tanh.": 0.905148, "Divide by the cap before the tanh.": 1.990110,
        "That cuts scores off; a soft-cap bends them.": 2.0, "The score is unchanged.": 3.0, "tanh, not tan.": 28.2028})
    slopes = torch.tensor([1.0, 0.5, 0.25])
    what = "alibi([1, 0.5, 0.25]) of a score of 3 in sequence 2, head 1, query 5, key 2 (distance q - k = 3: a penalty),"
    expect_number(at(alibi(slopes), what), 1.5, rel=1e-6, what=what, mistakes={
        "The sign is wrong: keys that lie further back lose.": 4.5, "Every head has a slope of its own: slopes[h].": 0.0,
        "Index the slopes with h: b is the sequence.": 2.25, "The score itself is lost.": -1.5, "The score is unchanged.": 3.0,
        "Multiply the slope by the distance.": 2.5})
    what = "alibi of a score of 3 in head 1, query 2, key 5 (q - k = -3),"
    expect_number(at(alibi(slopes), what, q=2, k=5), 4.5, rel=1e-6, what=what, mistakes={
        "The distance is q - k, and negative for keys after the query.": 1.5})
    add, double = (lambda s, b, h, q, k: s + 10 * h + b), (lambda s, b, h, q, k: 2 * s)
    got = at(in_turn(add, double, soft_cap(50.0)), "in_turn")
    expect_number(got, 26.8525, rel=1e-4, what="in_turn(add 10 h + b, double, soft_cap(50)) of a score of 3, sequence 2, head 1,",
                  mistakes={"They run from the last to the first here.": 17.9928, "Only the first modifier runs.": 15.0,
                            "Each modifier gets what the one before it returned.": 2.99641, "Pass b and h on.": 5.97150})
    expect_number(at(in_turn(double), "in_turn"), 6.0, rel=1e-6, what="in_turn of one modifier")


check_score_mods(soft_cap, alibi, in_turn).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.score_mods(soft_cap, alibi, in_turn).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 4.2: A learned bias by distance {points}
#
# A model can learn a bias for each head and each distance. ([T5](https://arxiv.org/abs/1910.10683) does so in a coarser way: it
# learns one for each *bucket* of distances, and large distances share a bucket.) `relative_bias(table)`: `table` is a tensor
# (H, 2R + 1). Column $R$ is the bias of distance 0, column $R + 1$ that of $q - k = 1$ (the key before the query), column
# $R - 1$ that of $q - k = -1$. Distances beyond $\pm R$ take the column at that end. The bias is added to the score, and
# the result keeps the dtype of the score.
#
# {hint idea}
# The bias is a look-up: the head chooses the row, the distance chooses the column.
#
# {hint plan}
# Compute R from the shape of the table. Bring the distance between -R and R, shift it so that distance 0 lands on the
# middle column, look up, add.
#
# {hint line}
# A tensor has no value for Python's `min` and `max` here. And a table in float32 widens a bf16 score: which of the two
# should change its dtype?

# %% nbgrader={"grade_id": "q4_2", "solution": true}
def relative_bias(table: torch.Tensor):
    """A score_mod: adds table[h, R + (q - k)], distances held within -R ... R; table is (H, 2R + 1)."""
    ### BEGIN SOLUTION
    reach = table.shape[1] // 2

    def score_mod(score, b, h, q, k):
        return score + table[h, reach + (q - k).clamp(-reach, reach)].to(score.dtype)

    return score_mod
    ### END SOLUTION


# %% nbgrader={"grade_id": "q4_2_tests", "grade": true, "points": 4}
@check("4.2", "A learned bias")
def check_relative_bias(relative_bias):
    bias = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0], [10.0, 20.0, 30.0, 40.0, 50.0]])  # two heads, R = 2
    mod, scores = relative_bias(bias), torch.full((7, 7), 0.5)
    got = modified(mod, scores, "relative_bias", h=1)
    assert isinstance(got, torch.Tensor) and got.shape == scores.shape, "relative_bias should return one score a pair"
    for q, k, column in ((4, 4, 2), (4, 3, 3), (4, 5, 1), (4, 2, 4), (2, 4, 0), (6, 0, 4), (0, 6, 0), (6, 1, 4), (1, 4, 0)):
        distance = q - k
        wrong = {"The distance is q - k: it has the wrong sign.": 4 - column,
                 "Distances beyond R take the column at that end: this one wraps around.": (2 + distance) % 5,
                 "Column R is distance 0.": min(abs(distance), 4)}
        known = {text: 0.5 + 10 * (c + 1) for text, c in wrong.items() if c != column}
        known |= {"Every head has a row of its own.": 1.5 + column, "The score itself is lost.": 10.0 * (column + 1),
                  "The bias is missing.": 0.5, "Add the bias.": 5.0 * (column + 1)}
        what = f"a score of 0.5 in head 1 at query {q}, key {k} (distance q - k = {distance}), R = 2, row [10, 20, 30, 40, 50],"
        expect_number(got[q, k], 0.5 + 10 * (column + 1), rel=1e-6, what=what, mistakes=known)
    small = modified(mod, scores.bfloat16(), "relative_bias", h=1).dtype
    assert small == torch.bfloat16, f"a bf16 score should keep its dtype, and becomes {small}: convert the bias, not the score"


check_relative_bias(relative_bias).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.relative_bias(relative_bias).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# See what they do. All scores are 8 to begin with, and the cap is 4. The pictures show what is left after the modifier and a
# causal mask.
#
# **Before you look.** ALiBi first and soft-cap after, or the other way round: far from the diagonal, which of the two can
# still push a score below −4?

# %%
guesses["the one that goes below -4"] = None  # "soft_cap, then alibi" or "alibi, then soft_cap"
slopes = torch.tensor([0.5])
bumps = 3 * torch.sin(torch.arange(65) / 4.0)[None]
shown = {
    "soft_cap(4)": soft_cap(4.0),
    "alibi": alibi(slopes),
    "soft_cap(4), then alibi": in_turn(soft_cap(4.0), alibi(slopes)),
    "alibi, then soft_cap(4)": in_turn(alibi(slopes), soft_cap(4.0)),
    "relative_bias": relative_bias(bumps),
}
index = torch.arange(64)
nothing = torch.zeros((), dtype=torch.int64)
fig, axes = plt.subplots(1, len(shown), figsize=(13, 3), sharey=True, layout="constrained")
for ax, (name, mod) in zip(axes, shown.items(), strict=True):
    left = mod(torch.full((64, 64), 8.0), nothing, nothing, index[:, None], index[None, :])
    left = left.expand(64, 64).masked_fill(index[None, :] > index[:, None], math.nan)
    image = ax.imshow(left, cmap="viridis", vmin=-8, vmax=12)
    if "then" in name and left.nan_to_num(0.0).min() < -4.0:
        beside_guess("the one that goes below -4", name.replace("(4)", ""))
    ax.set_title(name, loc="left", fontsize=9.5, fontweight="bold")
    ax.set_xlabel("key")
axes[0].set_ylabel("query")
fig.colorbar(image, ax=axes, label="score", shrink=0.8, extend="min")
plt.show()

# %% [markdown]
# # Part 5: From Python to a kernel
#
# The same call can take three ways.
#
# - **Eager.** FlexAttention runs as ordinary PyTorch: it computes all scores, asks your functions for every pair, builds
#   the mask, softmax, second product. It skips nothing and stores everything. It is there to be read and debugged.
# - **Compiled.** `torch.compile` traces your two functions, and Inductor, its code generator, puts them into the template of
#   a flash-attention kernel: Triton on a GPU, C++ on a CPU. This one walks the block tables.
# - **CuTe.** The same call with another back end: FlashAttention 4, a kernel in NVIDIA's CuTe DSL, with your functions
#   translated into it. It needs a Hopper or Blackwell GPU.
#
# ![From two Python functions to one kernel: traced, lowered into a template, generated as Triton, C++ or CuTe](assets/lab2_paths.svg)

# %% [markdown]
# ### Question 5.1: Prepare once, call often {points}
#
# A block mask costs as much to build as one call of the kernel, or as several. In a model, it is built once for a step and
# used by every layer and every head. Write `prepare_flex`. It returns a function `attend(q, k, v)`.
#
# - `attention` is FlexAttention, compiled or not: `attend` calls `attention(q, k, v, score_mod=..., block_mask=...,
#   enable_gqa=...)` once, with q, k and v as they are, and returns what it returns.
# - The block mask is built **in `prepare_flex`, once**, with blocks of `block_size`, for `length` queries and keys, and
#   shared by all sequences and heads. `mask_mod` may be None: then there is no block mask.
# - `enable_gqa` must be True when there are fewer key-value heads than query heads.
#
# {hint idea}
# What is the same for every call belongs outside of `attend`; what depends on q, k and v belongs inside.
#
# {hint plan}
# Build the block mask (or none) first. Then define `attend`, which hands everything on to `attention`, and return it.
#
# {hint line}
# Which argument tells FlexAttention that there are fewer key heads than query heads? And B and H of a block mask that
# is the same for all sequences and heads?

# %% nbgrader={"grade_id": "q5_1", "solution": true}
def prepare_flex(attention, mask_mod, score_mod, length: int, device: torch.device, block_size: int = 128):
    """attend(q, k, v) under mask_mod and score_mod, its block mask built beforehand."""
    ### BEGIN SOLUTION
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, None, None, length, length, device=device, BLOCK_SIZE=block_size)

    def attend(q, k, v):
        grouped = q.shape[1] != k.shape[1]
        return attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=grouped)

    return attend
    ### END SOLUTION


# %% nbgrader={"grade_id": "q5_1_tests", "grade": true, "points": 6}
@check("5.1", "Prepare once")
def check_prepare(prepare_flex):
    signature, calls, asked, cpu = inspect.signature(flex_attention), [], [], torch.device("cpu")

    def attention(*args, **options):
        """Stands in for FlexAttention: keeps what it is called with."""
        calls.append(signature.bind(*args, **options).arguments)
        return args[0] if args else options["query"]

    def near(b, h, q, k):
        asked.append(1)
        return (k <= q) & (q - k < 20)

    def bias(score, b, h, q, k):
        return score - 0.1 * (q - k)

    attend = prepare_flex(attention, near, bias, 48, cpu, 16)
    assert callable(attend), f"prepare_flex should return a function attend(q, k, v), and returns a {type(attend).__name__}"
    assert not calls, "prepare_flex already calls attention; that is what attend is for"
    built = len(asked)
    assert built, "prepare_flex does not build the block mask before the first call: it never called mask_mod"
    q, k, v = torch.randn(2, 4, 48, 16), torch.randn(2, 2, 48, 16), torch.randn(2, 2, 48, 16)
    attend(q, k, v)
    attend(q, k, v)
    assert len(calls) == 2, f"two calls of attend should call attention twice, and called it {len(calls)} times"
    assert len(asked) == built, "attend calls the mask_mod again. Build it once, in prepare_flex: the block mask of the first call serves all"
    given = calls[0]
    assert given["query"] is q and given["key"] is k and given["value"] is v, "attend should pass q, k and v on as they are"
    block_mask = given.get("block_mask")
    assert isinstance(block_mask, BlockMask), "attend calls attention without a block_mask: every block would be computed"
    assert tuple(block_mask.BLOCK_SIZE) == (16, 16), f"block_size is 16, and the block mask has blocks of {block_mask.BLOCK_SIZE}"
    assert tuple(block_mask.kv_num_blocks.shape) == (1, 1, 3), (
        f"the block mask has tables for {tuple(block_mask.kv_num_blocks.shape[:2])} (sequences, heads); one, shared by all: "
        "B=None, H=None")
    seen = block_mask.kv_num_blocks + block_mask.full_kv_num_blocks
    assert seen.flatten().tolist() == [1, 2, 3], f"rows of blocks see {seen.flatten().tolist()} blocks, and should see [1, 2, 3]"
    assert given.get("score_mod") is bias, "attend calls attention without the score_mod"
    assert given.get("enable_gqa"), "4 query heads over 2 key-value heads: pass enable_gqa=True"
    try:
        attend = prepare_flex(attention, None, None, 48, cpu)
    except TypeError:
        raise AssertionError("prepare_flex fails when mask_mod is None: then there is no block mask to build") from None
    attend(q, q, q)
    assert calls[-1].get("block_mask") is None, "without a mask_mod there should be no block mask"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eager FlexAttention warns that it is eager
        got = prepare_flex(flex_attention, lambda b, h, q, k: k <= q, None, 48, cpu, 16)(q, q, q)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    expect_close(got, expected, rtol=1e-4, atol=1e-5, what="attend(q, k, v) under a causal mask, by FlexAttention itself")


check_prepare(prepare_flex).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.prepare_flex(prepare_flex).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Race them, under one mask: causal inside of documents. Two more contenders make the race honest: SDPA with the mask as a
# tensor, and plain matmul-softmax-matmul **compiled** with the mask as a tensor. A speed-up over slow Python would only say
# that Python is slow.
#
# **Before you run.** Which of them will be the slowest? By what factor do you expect eager and compiled FlexAttention to differ?

# %%
guesses["the slowest"] = None  # a name of the list below
guesses["eager over compiled FlexAttention"] = None  # a ratio
guesses["mask as a tensor over compiled FlexAttention"] = None
q, k, v = random_qkv()
span = length // 8
mask = with_name(both(causal, documents(span)), f"both(causal, documents({span}))")
contenders = {}
for name, backend in (
    ("FlexAttention, eager", "flex_eager"), ("matmul, softmax, matmul, compiled", "naive_compiled"),
    ("SDPA, mask as a tensor", "sdpa"), ("FlexAttention, compiled", "flex"), ("FlexAttention, CuTe", "flex_flash"),
):
    print(f"preparing {name} ...", flush=True)
    try:
        contenders[name] = prepare(q, k, v, mask_mod=mask, backend=backend)
    except (AttentionUnsupported, torch.OutOfMemoryError) as reason:
        print(f"  not here: {reason}")
if compiler:
    compiled_attention = torch.compile(own_copy(flex_attention), dynamic=False)
    yours = prepare_flex(compiled_attention, mask, None, length, device)
    contenders["FlexAttention, yours"] = functools.partial(yours, q, k, v)
reference = contenders["SDPA, mask as a tensor"]()
for name, attend in contenders.items():
    error = (attend().float() - reference.float()).abs().max().item()
    assert error < tolerance, f"{name} differs from SDPA by {error}"
race_table = time_ways(contenders, samples=5)
race_table[f"speed-up over {race_table['way'][0]}"] = race_table["ms"][0] / race_table["ms"]
keep("race", race_table)
race_ms = race_table.set_index("way")["ms"]
beside_guess("the slowest", race_ms.idxmax())
if "FlexAttention, compiled" in race_ms and "FlexAttention, eager" in race_ms:
    beside_guess("eager over compiled FlexAttention", float(race_ms["FlexAttention, eager"] / race_ms["FlexAttention, compiled"]))
    tensor_ms = race_ms["SDPA, mask as a tensor"]
    beside_guess("mask as a tensor over compiled FlexAttention", float(tensor_ms / race_ms["FlexAttention, compiled"]))
for name, attend in contenders.items():
    if hasattr(attend, "seconds"):
        print(f"{name:34}", ", ".join(f"{what} {seconds:.3f} s" for what, seconds in attend.seconds.items()))
if not on_gpu:
    show_recorded("race")

# %% [markdown]
# The last lines say what was paid once: building the block mask, and compiling. A block mask that serves every layer and
# every head of a step costs little. One that is built anew for every call costs about as much as the attention itself, or
# more.

# %% [markdown]
# ### Question 5.2: Find your line in the kernel {points}
#
# The next cell compiles attention with a causal mask and a soft-cap of 17.25, a number that nobody else uses. Then it
# writes the generated code to `out/flex_generated_kernel.txt` and shows the places around that number. Open the file; the
# kernel is one function, a few hundred lines long. The questions to answer stand below the cell; the hints are about them.
#
# **Before you run.** Your soft-cap is one line of Python. In how many lines of the kernel will its constant stand?
#
# {hint idea}
# The generated kernel holds your function step by step: each operator of your expression is a line.
#
# {hint plan}
# Search for 17.25 in the file. Read the lines after it: a division, a function, a product. Your mask is near: search
# for the comparison of two indices and for infinity.
#
# {hint line}
# To say where both stand, find the first product, the maximum and the exponentials in the same function, and look which
# comes first. For full blocks, look for a second loop, or a table with *full* in its name.

# %%
guesses["lines of the kernel with 17.25"] = None


def show_code(code: str, needle: str, before: int = 4, after: int = 8, places: int = 2) -> None:
    """Print the surroundings of the first places where needle stands in code."""
    lines = code.splitlines()
    found = [i for i, line in enumerate(lines) if needle in line]
    print(f"{needle!r} stands in {len(found)} of {len(lines)} lines")
    shown_to, margin = -1, 0
    for i in found:
        if i > shown_to and places:
            places -= 1
            first, shown_to = max(i - before, shown_to + 1), min(i + after, len(lines) - 1)
            indents = [len(line) - len(line.lstrip()) for line in lines[first : shown_to + 1] if line.strip()]
            margin = margin or min(indents)  # of the first place; generated code is deeply indented
            print("\n".join(f"{j + 1:5} {lines[j].rstrip()[margin:][:110]}" for j in range(first, shown_to + 1)), "\n")


if compiler:
    short = min(length, 1024)
    q, k, v = random_qkv(short)
    print("compiling ...", flush=True)
    capped = prepare(q, k, v, mask_mod=causal, score_mod=soft_cap(17.25), backend="flex")
    generated = capped.generated_code()
    output_path("flex_generated_kernel.txt").write_text(generated)
    show_code(generated, "17.25")
    beside_guess("lines of the kernel with 17.25", sum("17.25" in line for line in generated.splitlines()))
else:
    print(f"torch.compile cannot run here: {compiler.reason} {compiler.remedy}")

# %% [markdown]
# **Explain**, with lines copied from your file:
# 1. Which lines are your soft-cap? Say for each which part of the Python expression it is.
# 2. Find the lines of your causal mask. What do they compare, and what is put in place of a masked score?
# 3. Where do both stand, relative to the two products and to the softmax? Which of the two is not run for full blocks?
# 4. What is missing in this code, compared with eager FlexAttention?

# %% [markdown] nbgrader={"grade_id": "q5_2", "grade": true, "solution": true, "points": 5}
# 1. C++: `tmp1 = static_cast<float>(17.25)` is cap, `tmp3 = tmp0 / tmp2` is score / cap, `tmp4 = tmp3.tanh()` the tanh,
#    `tmp5 = tmp4 * tmp2` the multiplication by cap. Triton: the same four steps on a whole tile, the tanh as
#    `libdevice.tanh` or written with exponentials.
# 2. The indices of query and key, `q_idx` and `kv_idx` in C++, `m` and `n` in Triton (`tmp <= tmp`); where the result is
#    false the score becomes minus infinity (`-std::numeric_limits<...>::infinity()`, `float("-inf")`).
# 3. After the product of Q and K, before the maximum and the exponentials of the online softmax, so before the product
#    with V. For full blocks only the score modifier runs: the mask is not asked (in Triton the inner loop is called a
#    second time with IS_FULL_BLOCKS).
# 4. No tensor of scores and no tensor of the mask: S x S numbers are never stored, only a tile of them. No loop over
#    empty blocks either: it goes over kv_indices, kv_num_blocks entries a row.
#
# === BEGIN MARK SCHEME ===
# 1.5 points: 1, the lines of division, tanh and multiplication quoted and named.
# 1.5 points: 2, a comparison of two indices quoted, and minus infinity.
# 1 point: 3, between the first product and the softmax (half), mask not run for full blocks (half).
# 1 point: 4, no stored scores or mask (half), empty blocks are not visited (half).
# The lines must come from the student's own file: the tmp numbers differ between versions, a copied answer shows.
# === END MARK SCHEME ===

# %% [markdown]
# ### Question 5.3: Fusion, seen in a trace {points}
#
# The cell profiles the same call eager and compiled, each inside of a named range (`nvtx_range`: Nsight shows it too), and
# exports both as Chrome traces. Drop `out/flex_eager.json` and
# `out/flex_compiled.json` on [ui.perfetto.dev](https://ui.perfetto.dev) to walk through them. The questions to answer stand
# below the cell; the hints are about them.
#
# {hint idea}
# Eager stores every step in memory. Compiled keeps a step in registers and hands it to the next.
#
# {hint plan}
# Count in your table. Compute B·H·S² times the bytes of a number for one score tensor, and divide the extra memory by
# it. Name operators from the picture: product, cap, mask, softmax, product.
#
# {hint line}
# Two different things make the compiled call fast. Ask of each: would it still be there without the mask?

# %%
q, k, v = random_qkv(min(length, 1024))
traced = {}
for name, backend in (("eager", "flex_eager"), ("compiled", "flex")):
    print(f"preparing and profiling {name} ...", flush=True)
    try:
        attend = prepare(q, k, v, mask_mod=causal, score_mod=soft_cap(17.25), backend=backend)
    except AttentionUnsupported as error:
        print(f"{name}: not here: {error}")
        continue

    def step(attend=attend, name=name):
        with nvtx_range(f"flex {name}"):
            attend()

    trace = output_path(f"flex_{name}.json")
    prof = profile(step, steps=3, trace_path=trace)
    counts = count_cuda_kernels(prof)
    _, extra_gb = benchmark_memory(step, n_warmup=1, n_repeat=3)
    traced[name] = (counts["total"], step, extra_gb * 1e3)
    events = read_trace(trace)
    call = [event for event in events if event.name == f"flex {name}"][-1]
    inside = [  # the axis begins with the call, and names fit their bars
        dataclasses.replace(event, name=event.name.removeprefix("aten::"))
        for event in events if call.start_us <= event.start_us <= call.end_us
    ]
    plot_timeline(inside, max_depth=9, title=f"FlexAttention, {name}: one call")
    plt.show()
traced_ms = time_ways({name: step for name, (_, step, _) in traced.items()})["ms"]
trace_table = pd.DataFrame(
    [(name, count, ms, extra) for (name, (count, _, extra)), ms in zip(traced.items(), traced_ms, strict=True)],
    columns=["path", "kernels" if on_gpu else "operators", "ms", "extra memory, MB"],
)
keep("traces", trace_table)
if not on_gpu:
    show_recorded("traces")

# %% [markdown]
# Two notes on these traces. The eager call shows a *Torch-Compiled Region* as well: PyTorch traces it, and then runs what
# it traced operator by operator. And on a CPU the compiled call counts zero operators: the generated kernel is a plain C++
# function there, and the profiler counts PyTorch's own. Zero means that not one of them is left. On a GPU,
# [Nsight Systems](https://developer.nvidia.com/nsight-systems) shows the same ranges (`nsys profile python ...`), and Nsight
# Compute the inside of one kernel.
#
# **Explain**, with numbers from your table and names from your traces:
# 1. How many kernels (on a CPU: operators) does one eager call run, and one compiled call? Name three of the eager ones,
#    and say which step of attention each is.
# 2. Compute the bytes of one full score tensor of this call (B·H·S²·itemsize; eager may hold it in fp32). Compare with
#    the extra memory of both.
# 3. The compiled call runs a little more than half of the same FLOPs. From where does its speed come? Name two sources, and
#    say which of them the mask is responsible for.

# %% [markdown] nbgrader={"grade_id": "q5_3", "grade": true, "solution": true, "points": 4}
# 1. Eager: some dozens (38 operators on a CPU), compiled: one kernel (on a CPU none, the generated function is no operator).
#    For example bmm for the scores, div, tanh and mul for the soft-cap, where for the mask, logsumexp and softmax, bmm for
#    the values.
# 2. 1 x 4 x 1024² x 4 bytes = 17 MB (H200: 1 x 16 x 1024² x 4 = 67 MB). Eager adds several times that, because several
#    such tensors live at once; compiled adds only the output (1 MB here) and little more.
# 3. Fusion: scores stay in registers or cache, no traffic for them and no launches in between; that has nothing to do
#    with the mask. Skipping: the upper half of the blocks is not computed; that is the mask's part, at best 2x here.
#
# === BEGIN MARK SCHEME ===
# 1 point: 1, two counts and three names with their steps.
# 1 point: 2, the bytes right, and eager a multiple of them, compiled far below.
# 2 points: 3, a point for each source; both half if it is not said that only skipping comes from the mask.
# === END MARK SCHEME ===

# %% [markdown]
# ## Training under a mask
#
# Everything so far was forward. Training runs attention backward as well, with five products where forward has two, and a mask
# that skips blocks can skip them in all seven. Three ways to train under the mask of the race:
#
# - SDPA with the mask as a tensor: every block is computed, in both directions;
# - your `block_sparse_attention` of Question 3.3: autograd recorded only the blocks that you visited, so backward visits only
#   those (it is a Python loop, so a short text and large blocks will do);
# - compiled FlexAttention. On a GPU its backward is a second generated kernel, which walks the same tables once by rows for
#   $dQ$ and once by columns for $dK$ and $dV$. On a CPU FlexAttention has no backward at all: it raises an error.
#
# **Before you run.** Forward and backward, SDPA with the tensor against blocks that are skipped: what do the blocks promise,
# and will your Python loop keep any of it?

# %%
guesses["promise of the blocks"] = None  # times faster
guesses["your loop, forward and backward: speed-up over the tensor"] = None
tokens, block = (4096, 512) if on_gpu else (2048, 256)
mask = with_name(both(causal, documents(tokens // 8)), f"both(causal, documents({tokens // 8}))")
leaves = [t.float().requires_grad_() for t in random_qkv(tokens)]
upstream = torch.randn_like(leaves[0])
dense = dense_mask(mask, tokens, tokens, device)
tables = create_block_mask(mask, None, None, tokens, tokens, device=device, BLOCK_SIZE=block)
forwards = {
    "SDPA, mask as a tensor": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=dense),
    "your block_sparse_attention": lambda q, k, v: block_sparse_attention(q, k, v, tables),
}
if on_gpu:
    trained = torch.compile(own_copy(flex_attention), dynamic=False)
    fine = create_block_mask(mask, None, None, tokens, tokens, device=device)
    forwards["FlexAttention, compiled"] = lambda q, k, v: trained(q, k, v, block_mask=fine)


def gradients(forward):
    """A call of forward and backward."""
    return lambda: torch.autograd.grad(forward(*leaves), leaves, upstream)


reference = gradients(forwards["SDPA, mask as a tensor"])()
for name, forward in forwards.items():
    error = max((a - b).abs().max().item() for a, b in zip(gradients(forward)(), reference, strict=True))
    assert error < (0.1 if on_gpu else 1e-3), f"the gradients of {name} differ from those of SDPA by {error}"
plain = [t.detach() for t in leaves]
ways = {f"{name}, forward": functools.partial(forward, *plain) for name, forward in forwards.items()}
ways |= {f"{name}, both": gradients(forward) for name, forward in forwards.items()}
training_ms = time_ways(ways, samples=7).set_index("way")["ms"]
full, partial, empty = map(int, count_blocks(dense, block))
training_table = pd.DataFrame([
    {"way": name, "forward ms": training_ms[f"{name}, forward"], "both ms": training_ms[f"{name}, both"],
     "both / forward": training_ms[f"{name}, both"] / training_ms[f"{name}, forward"],
     "speed-up, both": training_ms["SDPA, mask as a tensor, both"] / training_ms[f"{name}, both"]} for name in forwards])
training_table["blocks promise"] = [1.0] + [promised_speedup((full, partial, empty))] * (len(forwards) - 1)
keep("training", training_table)
beside_guess("promise of the blocks", float(training_table["blocks promise"][1]))
beside_guess("your loop, forward and backward: speed-up over the tensor", float(training_table["speed-up, both"][1]))
if not on_gpu:
    show_recorded("training")

# %% [markdown]
# The gradients agree: a pair that is masked has the weight 0, so nothing flows back through it, and skipping it loses nothing.
# The blocks promise the same factor for backward as for forward. How much of it arrives is a matter of what each block costs
# beside its products: a Python loop pays a dozen operators for each, a generated kernel a few look-ups in its tables. Those
# operators are launched by the CPU. In the recorded run on an H200 the loop took 10.1 ms forward and backward. In a second one,
# with a busier CPU, 18.2 ms: slower than the mask as a tensor. FlexAttention took 9.2 and 9.3 ms.

# %% [markdown]
# # Part 6: The recompile cliff
#
# `torch.compile` can treat a shape in two ways. A **static** shape becomes a constant of the kernel: the compiler knows every
# loop's length, and another length needs another kernel. A **dynamic** shape is an argument of the kernel: one kernel serves all
# lengths, and has to check and compute what the static one knew. The switch is called `dynamic`:
#
# - `dynamic=False`: always static. Eight lengths are eight kernels.
# - `dynamic=None`, the default: static at first. When a second length comes, PyTorch compiles once more, now dynamically.
# - `dynamic=True`: dynamic from the beginning.
#
# Why would anyone set `False`, as this lab does in its benchmarks? A kernel for one shape may be faster, a CUDA graph needs fixed
# shapes, and not everything compiles dynamically: on a CPU a mask that captures a tensor does not. The price is the cliff of this
# part. After `recompile_limit` kernels for the same function (eight, if nobody changes it) PyTorch compiles no more and logs a
# warning. The lengths it knows stay fast; every **new** length runs **eager**. Results stay right. Nothing fails. It is only slow.
# PyTorch's page on [recompilation](https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/compile/programming_model.recompilation.html)
# therefore begins with the advice not to set `dynamic=False`.
#
# Walk up to the cliff, with all three. So that you need not wait for eight kernels, the cell lowers the limit to two. (The red
# lines below it are PyTorch's warning. In a program that logs a lot, they are easily missed.)
#
# **Before you run.** Five lengths, each a little longer than the one before. What will the speed of `dynamic=False` do between
# the second length and the third? How many kernels will the other two have at the end?

# %%
guesses["dynamic=False: speed at the second length / at the third"] = None  # a ratio
guesses["kernels of the default"] = None
guesses["kernels of dynamic=True"] = None
if compiler:
    limit = 2
    # On a GPU long enough that a kernel takes longer than its launch.
    lengths = [length * (i + 4) // 8 if on_gpu else length * (i + 3) // 16 for i in range(5)]
    print(f"walking three times, with at most {limit} kernels each: up to 30 s on two CPU cores ...", flush=True)
    unit, flops = ("TFLOP/s", 1e12) if on_gpu else ("GFLOP/s", 1e9)
    settings = {"dynamic=False": False, "default": None, "dynamic=True": True}
    walked = {name: own_copy(flex_attention) for name in settings}  # functions of their own: nothing else is touched
    for number, function in enumerate(walked.values()):  # and names of their own, by which PyTorch remembers the sizes it saw
        function.__code__ = function.__code__.replace(co_name=f"walk_{number}_{time.time_ns()}")
    walking = {name: torch.compile(walked[name], dynamic=dynamic) for name, dynamic in settings.items()}
    rows = []
    with torch._dynamo.config.patch(recompile_limit=limit):
        for n in lengths:
            q, k, v = random_qkv(n)
            first_s = {}
            for name, attend in walking.items():
                first_s[name] = benchmark_latency(attend, q, k, v, n_warmup=0, n_repeat=1) / 1e3
            timed = time_ways({name: functools.partial(attend, q, k, v) for name, attend in walking.items()}, samples=9)
            for name, ms in zip(timed["way"], timed["ms"], strict=True):
                speed = 4 * batch * heads * head_dim * n**2 / (ms / 1e3) / flops
                rows.append((name, n, compiled_versions(walked[name]), first_s[name], ms, speed))
    cliff_table = pd.DataFrame(rows, columns=["setting", "tokens", "kernels so far", "first call, s", "ms", unit])
    cliff_table = cliff_table.sort_values(["setting", "tokens"], key=lambda c: c.map(list(settings).index) if c.name == "setting" else c)
    keep("cliff", cliff_table)
    speed_of = cliff_table.set_index(["setting", "tokens"])[unit]
    beside_guess("dynamic=False: speed at the second length / at the third",
                 float(speed_of["dynamic=False", lengths[1]] / speed_of["dynamic=False", lengths[2]]))
    beside_guess("kernels of the default", compiled_versions(walked["default"]))
    beside_guess("kernels of dynamic=True", compiled_versions(walked["dynamic=True"]))

    fig, ax = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
    for i, (name, rows_of_setting) in enumerate(cliff_table.groupby("setting", sort=False)):
        ax.plot(rows_of_setting["tokens"], rows_of_setting[unit], **series(i).line, label=name)
    ax.axvspan(lengths[limit] - length // 64, lengths[-1] + length // 64, color=series(1).color, alpha=0.15)
    ax.text(lengths[limit], ax.get_ylim()[1] * 0.08, "dynamic=False: past the limit, eager", fontsize=9)
    ax.set_ylim(0)
    ax.legend(bbox_to_anchor=(1.0, 1.0), loc="upper left")
    style_axes(ax, x="tokens", y=unit, title="The same call, one length after the other")
    plt.show()
else:
    print(f"torch.compile cannot run here: {compiler.reason} {compiler.remedy}")
if not on_gpu:
    show_recorded("cliff")

# %% [markdown]
# Read the table in both directions. Down a column: the static kernels fall off the cliff, the dynamic ones do not. Across, at the
# first two lengths: what the static kernel is worth where it exists. For this call the default is the right choice. Where static
# shapes are worth it, or needed, the answer is not a kernel for each length but a few lengths that everything is padded to.

# %% [markdown]
# ### Question 6.1: Buckets {points}
#
# A service gets texts of any length and wants static shapes, for CUDA graphs or for speed. One kernel for each length is too many;
# one kernel for the longest wastes work. **Buckets** are the compromise: a few lengths, and each text is padded to the smallest one that holds it.
#
# Write `bucketed_attention(attend, q, k, v, buckets)`:
# - `q`, `k`, `v` are (B, H, S, D); `buckets` is a list of lengths, in any order. Pad to the smallest bucket that holds S
#   tokens. No bucket holds them: raise a `ValueError`, before `attend` is called.
# - call `attend(q, k, v, mask_mod)` **once** with the padded tensors and a `mask_mod` that hides the padded keys from
#   everybody. Attention is not causal here.
# - return (B, H, S, D): what `attend` returned, without its padding.
# - **The mask must not cause a recompile.** A Python number that a mask captures becomes a constant of the kernel, and
#   another number means another kernel. A tensor is an argument of the kernel: its values may change. Grading compiles
#   your mask and counts the kernels.
#
# {hint idea}
# Pad to a size that the compiler has seen, hide the padding, cut it off again.
#
# {hint plan}
# Of the buckets that are large enough take the smallest, and raise an error if there is none. Pad the token dimension
# of q, k and v. The mask asks one thing of a key: is it real?
#
# {hint line}
# What does your mask capture: a Python number, or a tensor with one number in it? The first is a constant of the
# kernel.

# %% nbgrader={"grade_id": "q6_1", "solution": true}
def bucketed_attention(
    attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, buckets: list[int]
) -> torch.Tensor:
    """attend(q, k, v, mask_mod) on tensors padded to the smallest bucket that holds them; (B, H, S, D)."""
    ### BEGIN SOLUTION
    tokens = q.shape[2]
    large_enough = [bucket for bucket in buckets if bucket >= tokens]
    if not large_enough:
        raise ValueError(f"{tokens} tokens, and the largest bucket holds {max(buckets)}")
    padding = (0, 0, 0, min(large_enough) - tokens)
    end = torch.tensor(tokens, device=q.device)

    def mask_mod(b, h, q, k):
        return k < end

    return attend(F.pad(q, padding), F.pad(k, padding), F.pad(v, padding), mask_mod)[:, :, :tokens]
    ### END SOLUTION


# %% nbgrader={"grade_id": "q6_1_tests", "grade": true, "points": 6}
@check("6.1", "Buckets")
def check_buckets(bucketed_attention):
    bucketed_attention = leaves_inputs(bucketed_attention)
    calls = []

    def attend(q, k, v, mask_mod):
        calls.append((q.shape[2], mask_mod))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(mask_mod, q.shape[2], k.shape[2]))

    for tokens, bucket in ((5, 8), (3, 4), (4, 4), (8, 8), (9, 16)):
        q, k, v = (torch.randn(2, 3, tokens, 6) for _ in range(3))
        calls.clear()
        got = bucketed_attention(attend, q, k, v, [8, 16, 4])
        sizes = [size for size, _ in calls]
        assert sizes == [bucket], (
            f"{tokens} tokens and buckets of [8, 16, 4]: attend should be called once, with {bucket} tokens, the smallest bucket "
            f"that holds them; it was called with {sizes}")
        wide = [F.pad(x, (0, 0, 0, bucket - tokens)) for x in (q, k, v)]
        hint = known_mistake(got, {
            "Padded keys take part in the softmax: hide them.": F.scaled_dot_product_attention(*wide)[:, :, :tokens],
            "Attention is not causal here.": F.scaled_dot_product_attention(q, k, v, is_causal=True)})
        expected = F.scaled_dot_product_attention(q, k, v)
        if isinstance(got, torch.Tensor) and got.shape[2:] != expected.shape[2:]:
            hint = "Return the result without its padding."
            assert got.shape[2] == tokens, f"{tokens} tokens came in, and the result has {got.shape[2]}: cut the padding off, so that the shape is that of q"
        expect_close(got, expected, rtol=1e-4, atol=1e-5, what=f"{tokens} tokens in a bucket of {bucket}", hint=hint)
    masks = []
    for tokens in (5, 7):
        calls.clear()
        q = torch.randn(1, 1, tokens, 6)
        bucketed_attention(attend, q, q, q, [8, 16, 4])
        masks.append(calls[0][1])
    count = kernels_for(masks, 8)
    assert count == 1, (
        f"the masks of 5 and 7 tokens in the same bucket need {count} kernels: their length is a Python number, and became a "
        "constant. Capture a tensor.")
    q = torch.randn(1, 1, 17, 6)
    try:
        bucketed_attention(attend, q, q, q, [8, 16, 4])
    except ValueError:
        pass
    else:
        raise AssertionError("17 tokens fit into no bucket of [8, 16, 4]: raise a ValueError")


check_buckets(bucketed_attention).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.buckets(bucketed_attention).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# The railing at work: twelve texts of twelve lengths, two buckets, and an error instead of silence should the limit
# be reached.
#
# **Before you run.** How many kernels will there be at the end? And how much of the work is padding?

# %%
guesses["kernels behind the railing"] = None
guesses["padding"] = None  # 0 to 1
if compiler:
    guarded = own_copy(flex_attention)
    behind_railing = torch.compile(guarded, dynamic=False)

    def attend_padded(q, k, v, mask_mod):
        """Compiled FlexAttention under mask_mod, its block mask built for this call."""
        block_mask = create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2], device=device)
        return behind_railing(q, k, v, block_mask=block_mask)

    buckets = [length // 4, length // 2]
    texts = [length // 2 - 61 * i * length // 2048 for i in range(12)]
    print(f"{len(texts)} texts, compiling when a bucket is new ...", flush=True)
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True):
        for tokens in texts:
            q, k, v = random_qkv(tokens)
            try:
                got = bucketed_attention(attend_padded, q, k, v, buckets)
            except torch._dynamo.exc.FailOnRecompileLimitHit:
                raise RuntimeError(
                    "your mask made a new kernel for a new length: capture a tensor, not a number (6.1)"
                ) from None
            error = (got.float() - F.scaled_dot_product_attention(q, k, v).float()).abs().max().item()
            assert error < tolerance, f"{tokens} tokens: differs from SDPA by {error}"
    padded = sum(min(bucket for bucket in buckets if bucket >= n) for n in texts)
    print(f"{len(set(texts))} lengths, {compiled_versions(guarded)} kernels, {padded / sum(texts) - 1:.0%} padding")
    beside_guess("kernels behind the railing", compiled_versions(guarded))
    beside_guess("padding", padded / sum(texts) - 1)
    results["buckets"] = [{"lengths": len(set(texts)), "kernels": compiled_versions(guarded), "padding": padded / sum(texts) - 1}]
else:
    print(f"torch.compile cannot run here: {compiler.reason} {compiler.remedy}")

# %% [markdown]
# ### Question 6.2: Explain the cliff {points}
#
# With numbers from your run:
# 1. By what factor did the speed fall at the limit, and what ran from there on? Why would a test of correctness not
#    notice?
# 2. A benchmark loops over ten lengths and plots the speed of compiled FlexAttention. Its first eight points are right.
#    Name two ways to make sure that the last two are right as well, or that the benchmark stops.
# 3. Twice as many buckets: what gets better, what gets worse?
# 4. `sliding_window(window)` captures a Python number. When is that right, and when should `window` be a tensor?
#
# {hint idea}
# Right and fast are two properties, and a test of the first says nothing about the second.
#
# {hint plan}
# Take the speeds on both sides of the limit from your table. For 2, think of an error instead of a warning, of a fresh
# start for each length, and of the other two lines in the figure. For 3, what does one more bucket cost once, and what
# does it save each time?
#
# {hint line}
# For 4, ask how often the number changes while the program runs: never, or with each call?

# %% [markdown] nbgrader={"grade_id": "q6_2", "grade": true, "solution": true, "points": 4}
# 1. The student's own factor (two CPU cores: 3 to 6 times; an H200: more than tenfold). Eager FlexAttention
#    ran: all scores stored, one operator after the other. It computes the same numbers, only slowly.
# 2. Leave `dynamic` at its default, so that the second length brings a kernel for all; `fail_on_recompile_limit_hit`, which turns the silence into an error; `torch._dynamo.reset()` or a fresh function for
#    each length, so that each has its own limit; a higher `recompile_limit`; counting compiled versions or looking at what
#    ran (a profile). Raising the limit alone only moves the cliff, counting alone does not prevent it.
# 3. Better: less padding, so less wasted work. Worse: more kernels, so more seconds of compiling, more memory, and nearer
#    to the limit.
# 4. A number is right for what never changes in a model, such as the window of its architecture: the kernel gets a
#    constant, which is faster than a load. A tensor is right for what changes from call to call.
#
# === BEGIN MARK SCHEME ===
# 1 point for each of the four.
# 1: a factor from the student's own table; eager; results are right. 2: two ways that work, one of them an error or a
# check. 3: one of each. 4: constants of the model against data of the call.
# === END MARK SCHEME ===

# %% [markdown]
# # Part 7: Design
#
# First, a map. Documents of different lengths, blocks of different sizes: which promises are kept? For each
# point the speed-up over *everything in blocks of the same size* is measured and divided by two ideals: what the *pairs* promise (1/density), and
# what the *blocks* promise. The heat maps show the speed-up, and its share of what the blocks promise. The shortest
# documents are a quarter of the largest block.
#
# (A baseline of the same blocks matters. On a GPU blocks of 64 make the kernel's tiles smaller, and smaller tiles are slower by
# themselves, whatever the mask skips. The column `everything, ms` shows it.)
#
# **Before you run.** Documents of half a block: can any kernel of this kind keep the promise of their pairs? Large blocks
# or small blocks: which reach more of the promise of their pairs, which more of the promise of their blocks?

# %%
guesses["block size with the best mean share of its pairs' promise"] = None  # 64, 128 or 256
guesses["block size with the best mean share of its blocks' promise"] = None
guesses["documents of half a block: best share of the pairs' promise"] = None  # 0 to 1
if compiler:
    q, k, v = random_qkv()
    block_sizes = [64, 128, 256]
    spans = [64, 128, 256, length // 8, length // 2] if on_gpu else [64, 128, 256, 512, 1024]
    print(f"compiling a kernel for each of {len(block_sizes)} block sizes: up to 20 s on two CPU cores ...", flush=True)
    calls, kernels = {}, {}
    for block in block_sizes:
        kernels[block] = own_copy(flex_attention)
        attend = torch.compile(kernels[block], dynamic=False)
        options = needed_kernel_options((block, block)) if on_gpu else None  # tiles that divide the blocks
        for span in [*spans, length]:  # a document as long as the text: everything is visible
            ids = torch.arange(length, device=device) // span  # a tensor: one kernel serves every span
            block_mask = create_block_mask(documents(ids), None, None, length, length, device=device, BLOCK_SIZE=block)
            calls[block, span] = functools.partial(attend, q, k, v, block_mask=block_mask, kernel_options=options or None)
    sweep_times = time_ways(calls, samples=5)
    assert all(compiled_versions(kernel) == 1 for kernel in kernels.values()), "a kernel was compiled twice"
    ms_of = dict(zip(calls, sweep_times["ms"], strict=True))
    rows = []
    for block, span in calls:
        if span < length:
            counts = tuple(map(int, count_blocks(dense_mask(documents(span), length, length, device), block)))
            rows.append((block, span, ms_of[block, length], length / span, promised_speedup(counts), ms_of[block, length] / ms_of[block, span]))
    sweep_table = pd.DataFrame(rows, columns=["block", "span", "everything, ms", "pairs promise", "blocks promise", "measured"])
    sweep_table["of pairs"] = sweep_table["measured"] / sweep_table["pairs promise"]
    sweep_table["of blocks"] = sweep_table["measured"] / sweep_table["blocks promise"]
    for promise in ("pairs", "blocks"):
        mean_share = sweep_table.groupby("block")[f"of {promise}"].mean()
        beside_guess(f"block size with the best mean share of its {promise}' promise", int(mean_share.idxmax()))
    half = sweep_table[2 * sweep_table["span"] == sweep_table["block"]]
    beside_guess("documents of half a block: best share of the pairs' promise", float(half["of pairs"].max()))
    keep("sweep", sweep_table)

    drawn = sweep_table.rename(columns={"block": "block_size", "span": "doc_span", "measured": "speedup"})
    plot_sparsity_sweep(drawn.assign(ideal=drawn["blocks promise"]).to_dict("records"), title="times as fast as everything in these blocks")
    plt.show()
else:
    print(f"torch.compile cannot run here: {compiler.reason} {compiler.remedy}")
if not on_gpu:
    show_recorded("sweep")

# %% [markdown]
# ### Question 7.1: Lay out a batch {points}
#
# A server streams tokens of many conversations into one row **in the order of their arrival**: a token of the third, one
# of the first, two of the fifth. Two integer tensors of shape (S,) say what each token is: `conversation` and `position`
# (0, 1, 2, … within its conversation). Conversation 0 is special: it holds the **instructions**, which all share.
#
# The mask that is wanted, for the query token $i$ and the key token $j$:
# - within a conversation: $j$ is visible if its position is not after that of $i$, and less than `window` positions
#   before it. For the instructions themselves there is no window, only the order of positions.
# - every token of every **other** conversation sees **all** instructions.
# - nothing else is visible. In particular, instructions see instructions only.
#
# In the order of arrival every block has a few visible pairs, and none can be skipped. But attention does not care
# about the order in which tokens are stored, as long as the mask knows who is who. So choose the order:
#
# `lay_out(conversation, position, window)` returns `(order, mask_mod)`. `order` is a permutation (S,): row $r$ of
# the new layout holds token `order[r]`. `mask_mod` is the mask **for the new rows**. It may capture tensors of S numbers,
# and no tensor of pairs.
#
# You are judged twice: is the mask right, pair by pair; and how many blocks does it leave to compute. Blocks are
# 128 × 128 (32 × 32 and 16 × 16 in the checks). They are counted for your order under the right mask, so a mistake in the mask
# costs nothing here, and at most 1.15 times the blocks of a simple good order are accepted. No padding is needed.
#
# {hint idea}
# A block is empty if no query in it looks at any key in it. So put those together who look at each other.
#
# {hint plan}
# First the order: which tokens should be neighbours, and in which order among themselves? Then reorder both tensors,
# and write the mask with them: it is asked about rows of the new layout.
#
# {hint line}
# Row r holds token order[r]: index `conversation` and `position` by the order once, and let the mask look into the
# results. The window counts positions, not rows.

# %% nbgrader={"grade_id": "q7_1", "solution": true}
def lay_out(conversation: torch.Tensor, position: torch.Tensor, window: int):
    """(order, mask_mod): a permutation (S,) of the tokens, and the mask between the rows in that order."""
    ### BEGIN SOLUTION
    order = torch.argsort(conversation * (int(position.max()) + 1) + position)
    owner, place = conversation[order], position[order]

    def mask_mod(b, h, q, k):
        earlier = (place[k] <= place[q]) & ((place[q] - place[k] < window) | (owner[q] == 0))
        return ((owner[q] == owner[k]) & earlier) | ((owner[q] > 0) & (owner[k] == 0))

    return order, mask_mod
    ### END SOLUTION


# %% nbgrader={"grade_id": "q7_1_tests", "grade": true, "points": 4}
@check("7.1", "The mask of the layout")
def check_lay_out(lay_out):
    lay_out = leaves_inputs(lay_out)
    # tokens 2, 5, 7 are the instructions, 0, 3, 6, 9 are conversation 1, and 1, 4, 8 conversation 2; the window is 2
    conversation = torch.tensor([1, 2, 0, 1, 2, 0, 1, 0, 2, 1])
    position = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3])
    result = lay_out(conversation.clone(), position.clone(), 2)
    assert isinstance(result, tuple | list) and len(result) == 2, f"lay_out should return (order, mask_mod), and returns {result!r:.80}"
    order, mod = result
    assert isinstance(order, torch.Tensor) and sorted(order.tolist()) == list(range(10)), (
        f"order should be a permutation of 0 ... 9, a tensor of integers, and is {order!r:.120}")
    got = pairs(mod, 10, 10, "the mask_mod of lay_out")
    by_token = torch.zeros_like(got)
    by_token[order[:, None], order[None, :]] = got
    own = {2: "2", 5: "25", 7: "257", 0: "0", 3: "03", 6: "36", 9: "69", 1: "1", 4: "14", 8: "48"}
    right = torch.zeros_like(got)
    for token, keys in own.items():
        right[token, [int(key) for key in keys + ("" if token in (2, 5, 7) else "257")]] = True
    if torch.equal(by_token, right):
        return
    hints = {
        "This is the mask between tokens as they arrived; the rows are in the new order.": torch.equal(got, right),
        "Rows and tokens are mixed up: row r of the new layout holds token order[r], not the other way round.":
            torch.equal(got[order][:, order], right),
        "The instructions have no window: they see all instructions up to their own position.": not by_token[7, 2],
        "Every token of every other conversation sees all instructions.": not by_token[[0, 1], :][:, [2, 5, 7]].all(),
        "There is a window within a conversation.": bool(by_token[9, 0] or by_token[8, 1]),
        "Within a conversation, later positions are hidden.": bool(by_token[0, 3] or by_token[1, 4]),
        "Instructions see instructions only, and no later ones.": bool(by_token[2, [5, 7, 0, 1]].any()),
        "A conversation does not see another one.": bool(by_token[0, 1] or by_token[9, 8] or by_token[1, 0]),
    }
    q, k = (by_token != right).nonzero()[0].tolist()
    hint = next((text for text, true in hints.items() if true), "")
    raise AssertionError(
        f"of ten tokens, {int((by_token & ~right).sum())} pairs too many are seen and {int((right & ~by_token).sum())} are hidden. "
        f"The first wrong pair is token {q} (conversation {conversation[q]}, position {position[q]}) that "
        f"{'sees' if by_token[q, k] else 'does not see'} token {k} (conversation {conversation[k]}, position {position[k]}). {hint}")


check_lay_out(lay_out).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.layout_mask(lay_out).raise_if_wrong()
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "q7_1_blocks_tests", "grade": true, "points": 4}
@check("7.1", "The blocks of the layout")
def check_layout_blocks(lay_out):
    lay_out = leaves_inputs(lay_out)
    # Blocks are counted for your order under the mask that is wanted: a mistake in your mask costs nothing here.
    for lengths, block, enough in (([32] * 8, 32, 15), ([64] * 4, 16, 79)):
        conversation, position = arrivals(lengths)
        order = lay_out(conversation.clone(), position.clone(), 16)[0].tolist()
        assert sorted(order) == list(range(256)), "order should hold each of 0 ... 255 once"
        tokens = list(zip(conversation[order].tolist(), position[order].tolist(), strict=True))
        computed = {
            (i // block, j // block)
            for i, (own, at) in enumerate(tokens)
            for j, (other, there) in enumerate(tokens)
            if (other == 0 < own) or (own == other and there <= at and (own == 0 or at - there < 16))
        }
        pieces = 1 + sum(a[0] != b[0] for a, b in itertools.pairwise(tokens))
        hint = "Tokens that see each other should be neighbours."
        if pieces == len(lengths):
            hint = "Each conversation is in one piece. Are its tokens in the order of their positions?"
        assert len(computed) <= 1.15 * enough, (
            f"your order of {len(lengths)} conversations of {lengths[0]} tokens, window 16, leaves {len(computed)} of "
            f"{(256 // block) ** 2} blocks of {block} x {block} to compute, and {enough} are enough. {hint}"
        )


check_layout_blocks(lay_out).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.layout_blocks(lay_out).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Your layout at work: the same attention in the order of arrival and in yours.
#
# **Before you run.** Seven conversations, and instructions that are an eighth of all tokens. What does your layout promise, and
# how much of it will be kept?

# %%
guesses["promise of your layout"] = None  # times faster
guesses["share of the layout's promise that is kept"] = None  # 0 to 1
shares = [2, 3, 1, 2, 2, 3, 1, 2]  # sixteenths of the row; the first are the instructions
lengths = [length // 16 * share for share in shares]
conversation, position = (t.to(device) for t in arrivals(lengths))
order, mine = lay_out(conversation, position, window=length)
back = torch.argsort(order)


def as_they_arrive(b, h, q, k):
    """The same mask, between tokens in the order of their arrival."""
    return mine(b, h, back[q], back[k])


print("evaluating both masks, pair by pair ...", flush=True)
plot_mask([as_they_arrive, mine], length, device=device, labels=["in the order of arrival", "in your layout"])
plt.show()
if compiler:
    print("compiling three kernels, then timing: up to 20 s on two CPU cores ...", flush=True)
    q, k, v = random_qkv()
    rows = [t[:, :, order] for t in (q, k, v)]
    ways = {
        "everything, in blocks": prepare(q, k, v, mask_mod=everything, backend="flex"),
        "order of arrival": prepare(q, k, v, mask_mod=as_they_arrive, backend="flex"),
        "your layout": prepare(*rows, mask_mod=mine, backend="flex"),
    }
    error = (ways["your layout"]()[:, :, back].float() - ways["order of arrival"]().float()).abs().max().item()
    assert error < tolerance, f"the two layouts differ by {error}"
    layout_table = time_ways(ways)
    blocks = [0, 0, 0]
    for i, mod in enumerate((everything, as_they_arrive, mine)):
        full, partial, _ = map(int, count_blocks(dense_mask(mod, length, length, device), 128))
        blocks[i] = full + partial
    layout_table["blocks"] = blocks
    layout_table["promised"] = blocks[0] / layout_table["blocks"]
    layout_table["measured"] = layout_table["ms"][0] / layout_table["ms"]
    keep("layout", layout_table)
    beside_guess("promise of your layout", float(layout_table["promised"][2]))
    beside_guess("share of the layout's promise that is kept", float(layout_table["measured"][2] / layout_table["promised"][2]))
else:
    print(f"torch.compile cannot run here: {compiler.reason} {compiler.remedy}")
if not on_gpu:
    show_recorded("layout")

# %% [markdown]
# ### Question 7.2: Where the rest of the promise goes {points}
#
# With numbers from your tables (sweep and layout):
# 1. Documents shorter than a block: which promise cannot be kept, and which column of the sweep shows it?
# 2. Smaller blocks skip more. Name two reasons why they are not always faster.
# 3. Where does your kernel keep the promise of its blocks worst, and why there? Think of what each row of blocks has to do
#    however few blocks it visits, of partial blocks, and of rows that have more to do than others.
# 4. In the order of arrival the mask was slower than letting everything through, or no faster. Why?
#
# {hint idea}
# A block is computed whole or not at all, and every row of blocks has a fixed cost.
#
# {hint plan}
# Look for the place in the sweep where *of pairs* falls while *of blocks* does not; for the block sizes side by side at
# one document length; and for the smallest *of blocks*. Then the row *order of arrival* of the layout.
#
# {hint line}
# For 3, write down what a row of blocks does before its first block and after its last one, and divide it by the number
# of blocks that it visits.

# %% [markdown] nbgrader={"grade_id": "q7_2", "grade": true, "solution": true, "points": 4}
# 1. That of the pairs: a block is computed whole, so documents of half a block reach at most half of the pairs' promise,
#    those of a quarter at most a quarter: "of pairs" falls there, "of blocks" does not.
# 2. A smaller tile does fewer FLOPs for each element it loads, so it is nearer to the memory (cache) roof and uses the
#    matrix units worse; the loop has more turns, each with its own index lookup, maximum and rescaling; more partial
#    blocks ask the mask more often; the tables are larger.
# 3. For short documents: a row of blocks loads its queries, sets up, divides and writes its output whether it visits two
#    blocks or thirty, and the first loads are not overlapped with anything. All their blocks may be partial, and the mask
#    is evaluated for each pair. Rows that visit more blocks finish last while other units idle (causal: the last rows).
# 4. Every block is partial: all are computed, and on top the mask is evaluated for every pair, with reads of the captured
#    tensors. Nothing is skipped, so the mask is pure extra work.
#
# === BEGIN MARK SCHEME ===
# 1 point each. Numbers from the student's own tables in at least two of them, otherwise one point off.
# 2: two of: intensity of a tile, more turns, more partial blocks, tables. 3: a place in the table and one of fixed
# cost per row, partial blocks, imbalance. 4: all blocks partial, nothing skipped, mask evaluated everywhere.
# === END MARK SCHEME ===

# %% [markdown]
# ## Three more things that the same call can do
#
# Nothing here is graded.
#
# **A mask over two dimensions.** The tokens are patches of a picture, 128 to a row. A patch looks at its neighbours, at most 8 rows
# and 8 columns away ([neighborhood attention](https://arxiv.org/abs/2204.07143)). A patch has two coordinates, and a token has one
# index. Stored row by row, a block of 128 tokens is one row of the picture. Stored tile by tile, it is a square-like piece of 8 × 16
# patches ([sliding tile attention](https://arxiv.org/abs/2502.04507) stores videos so). The mask is the same, the pairs are the
# same, and only the order differs, as in Question 7.1.
#
# **Fewer key heads.** With grouped heads (`enable_gqa=True`) several query heads share one head of keys and values. The products are
# the same; the cache that has to be kept and read is smaller.
#
# **The sum of the weights.** `return_aux=AuxRequest(lse=True)` also returns the log-sum-exp $L$ of each row. With it a row can be
# changed after the kernel is done. For example, a *sink*: one more logit $z$, which takes weight and has no value. Its output is
# $O \cdot \sigma(L - z)$, where $\sigma(x) = 1 / (1 + e^{-x})$. On a CPU only eager FlexAttention returns it.
#
# **Before you run.** How many times fewer blocks are computed tile by tile than row by row? Will one head of keys instead of all
# make the call faster?

# %%
guesses["blocks row by row / blocks tile by tile"] = None
guesses["one key head, time over all key heads"] = None
from torch.nn.attention.flex_attention import AuxRequest

reach, width = 8, 128
index = torch.arange(length, device=device)
by_row = index // width, index % width  # row and column of each token
tile, inside = index // 128, index % 128
by_tile = tile // (width // 16) * 8 + inside // 16, tile % (width // 16) * 16 + inside % 16


def neighbours(row, column, name):
    """A mask_mod: the patches at most `reach` rows and columns away; row and column are those of each token."""

    def near(b, h, q, k):
        return ((row[q] - row[k]).abs() <= reach) & ((column[q] - column[k]).abs() <= reach)

    return with_name(near, name)


pictures = {"row by row": neighbours(*by_row, "neighbours, row by row"), "tile by tile": neighbours(*by_tile, "neighbours, tile by tile")}
plot_mask(list(pictures.values()), length, device=device, labels=list(pictures))
plt.show()
counted = {name: tuple(map(int, count_blocks(dense_mask(mod, length, length, device), 128))) for name, mod in pictures.items()}
beside_guess("blocks row by row / blocks tile by tile", sum(counted["row by row"][:2]) / sum(counted["tile by tile"][:2]))
if compiler:
    print("compiling four kernels, then timing: up to 20 s on two CPU cores ...", flush=True)
    q, k, v = random_qkv()
    ways = {f"neighbours, {name}": prepare(q, k, v, mask_mod=mod, backend="flex") for name, mod in pictures.items()}
    ways["causal, all key heads"] = prepare(q, k, v, mask_mod=causal, backend="flex")
    ways["causal, one key head"] = prepare(q, k[:, :1].contiguous(), v[:, :1].contiguous(), mask_mod=causal, backend="flex")
    more_table = time_ways(ways)
    more_table["promised"] = [*(promised_speedup(counts) for counts in counted.values()), math.nan, math.nan]
    more_table["keys and values, MB"] = [2 * k.nbytes / 1e6] * 3 + [2 * k.nbytes / heads / 1e6]
    keep("more", more_table)
    beside_guess("one key head, time over all key heads", float(more_table["ms"][3] / more_table["ms"][2]))
else:
    print(f"torch.compile cannot run here: {compiler.reason} {compiler.remedy}")

small, sink = [t[:, :, :256].float() for t in random_qkv()], 1.5
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # eager FlexAttention warns that it is eager
    blocks = create_block_mask(causal, None, None, 256, 256, device=device)
    out, extra = flex_attention(*small, block_mask=blocks, return_aux=AuxRequest(lse=True))
with_sink = out * torch.sigmoid(extra.lse - sink)[..., None]
scores = (small[0] @ small[1].mT / math.sqrt(head_dim)).masked_fill(~dense_mask(causal, 256, 256, device), -math.inf)
scores = torch.cat((scores, torch.full_like(scores[..., :1], sink)), dim=-1)  # the sink as a column of its own
expected = torch.softmax(scores, dim=-1)[..., :-1] @ small[2]
print(f"a sink by the log-sum-exp against a sink as a column: largest difference {(with_sink - expected).abs().max().item():.1e}")

# %% [markdown]
# The same pairs, another order, and less than half of the blocks. One key head computes as much as all of them: it saves memory, and
# it saves time only where reading keys and values is the limit, which is decode (lab 4).
#
# On a GPU two more switches are worth a try. `torch.compile(flex_attention, mode="max-autotune")` tries several tiles when it
# compiles, and `kernel_options={"BLOCK_M": 64, ...}` sets them by hand; `TORCH_COMPILE_MODE=max-autotune labs bench run --targets
# labs/flexattention:flex_attention` measures the first. With few queries and many keys FlexAttention takes another template,
# FlexDecoding, which splits the keys as in lab 4, Question 3.2. These were not measured for this lab.

# %% [markdown]
# # Part 8: Pages and ragged batches
#
# Three masks from serving, for bonus points. Each maps the kernel's index to the index that the mask is about.

# %% [markdown]
# ### Bonus Question 8.1: Decode {points}
#
# While a model decodes, there are few queries, and they do not start at position 0: query $i$ of sequence `b` stands at
# position `positions[b] + i`. The key of index $k$ stands at position $k$.
#
# `at_positions(mask_mod, positions)` turns a mask between positions into one for such queries. `positions` is an
# integer tensor (B,), captured as a tensor, so that the next token needs no new kernel.
#
# {hint idea}
# The query's index says where it lies in the tensor; the mask wants to know where it stands in the text.
#
# {hint plan}
# Return a function of the same four arguments that asks the given mask about another query position.
#
# {hint line}
# Every sequence has a position of its own: which argument chooses it? Only one of the two indices moves.

# %% nbgrader={"grade_id": "bonus_8_1", "solution": true}
def at_positions(mask_mod, positions: torch.Tensor):
    """mask_mod for queries of which the first of sequence b stands at positions[b]."""
    ### BEGIN SOLUTION
    def moved(b, h, q, k):
        return mask_mod(b, h, q + positions[b], k)

    return moved
    ### END SOLUTION


# %% nbgrader={"grade_id": "bonus_8_1_tests", "grade": true, "points": 4}
@check("Bonus 8.1", "Decode")
def check_positions(at_positions):
    def window(b, h, q, k):
        return (k <= q) & (q - k < 3 + h)

    mod = at_positions(window, torch.tensor([0, 3]))
    expect_rows(mod, "100000/110000", "at_positions of [0, 3], window of 3,", b=0)
    moved = {"The queries are not moved: query q stands at positions[b] + q.": "100000/110000",
             "The queries move, not the keys.": "000000/000000", "Query q stands at positions[b] + q.": "011100/011100"}
    expect_rows(mod, "011100/001110", "at_positions of [0, 3], window of 3,", b=1, mistakes=moved | {
        "Each sequence has a position of its own: positions[b].": "100000/110000"})
    expect_rows(mod, "111100/011110", "at_positions of [0, 3], a window that depends on h,", b=1, h=1, mistakes={
        "Pass b and h on to the mask as they are.": "011100/001110"})
    by_sequence = at_positions(lambda b, h, q, k: k == q + b, torch.tensor([0, 3]))
    expect_rows(by_sequence, "000010/000001", "at_positions of a mask that looks at b", b=1, mistakes={
        "Pass b and h on to the mask as they are.": "000100/000010"})
    expect_program(mod, 16, "at_positions")


check_positions(at_positions).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.at_positions(at_positions).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Bonus Question 8.2: A paged KV cache {points}
#
# A server keeps the keys of all sequences in one pool of **pages** of `page_size` tokens, in any order
# ([vLLM](https://arxiv.org/abs/2309.06180) made this usual). Two integer
# tensors (P,) describe the pool: `owner[p]` is the sequence that page `p` belongs to, −1 if it is free, and `number[p]`
# says which page of that sequence it is: 0 holds its positions 0 … page_size − 1, and so on. The `number` of a free page
# is what its last owner left there, 0 or more. Attention runs over the whole pool, so key index $k$ is a place in the pool.
#
# ![A pool of pages: two sequences share it, page by page, and a mask over places in the pool finds out who owns each key](assets/lab2_pages.svg)
#
# `paged_mask(mask_mod, owner, number, page_size)` turns a mask between positions into one over the pool: query $q$
# of sequence `b` sees the key at place $k$ if the page belongs to `b`, and `mask_mod` lets $q$ see the position that lies
# there. Free pages are seen by nobody. About each pair, `mask_mod` is asked once.
#
# {hint idea}
# Translate the place in the pool into a position of a sequence, then ask the mask about that position.
#
# {hint plan}
# From a place get the page, and the place inside of the page. The page's number tells which positions lie in it. Two
# conditions: the page is mine, and the mask allows the position.
#
# {hint line}
# Test with a free page whose old number is still there, and with the second token of a page.

# %% nbgrader={"grade_id": "bonus_8_2", "solution": true}
def paged_mask(mask_mod, owner: torch.Tensor, number: torch.Tensor, page_size: int):
    """mask_mod over the places of a pool of pages; owner and number are (P,)."""
    ### BEGIN SOLUTION
    def over_pool(b, h, q, k):
        page = k // page_size
        place = number[page] * page_size + k % page_size
        return (owner[page] == b) & mask_mod(b, h, q, place)

    return over_pool
    ### END SOLUTION


# %% nbgrader={"grade_id": "bonus_8_2_tests", "grade": true, "points": 8}
@check("Bonus 8.2", "Pages")
def check_pages(paged_mask):
    # places 0-1: page 1 of sequence 0; 2-3: page 0 of sequence 1; 4-5: free, its number is an old one; 6-7: page 0 of sequence 0
    owner, number = torch.tensor([0, 1, -1, 0]), torch.tensor([1, 0, 0, 0])
    mod = paged_mask(lambda b, h, q, k: (k <= q) & (q - k < 3 + h), owner, number, 2)
    free = "Pages of other sequences are visible: look at the owner."
    expect_rows(mod, "00000010/00000011/10000011/11000001", "paged_mask", {
        (0, 2): free, (2, 4): "Free pages are seen by nobody."}, mistakes={
        "The key's position is not its place in the pool.": "10000000/11000000/11000000/01000000",
        "The mask itself is missing.": "11000011/11000011/11000011/11000011",
        "A page holds page_size positions: multiply its number.": "00000010/10000011/11000011/11000001",
        "The place inside of the page is missing: k % page_size.": "00000011/00000011/11000011/11000000",
        "number[p] counts in the sequence, p in the pool.": "10000000/11000000/11000000/01000000"})
    expect_rows(mod, "00100000/00110000/00110000/00010000", "paged_mask", b=1, mistakes={
        "The key's position is not its place in the pool.": "00000000/00000000/00100000/00110000"})
    expect_rows(mod, "00000010/00000011/10000011/11000011", "paged_mask of a mask that looks at h", h=1, mistakes={
        "Pass b and h on to the mask as they are.": "00000010/00000011/10000011/11000001"})
    expect_program(mod, 16, "paged_mask of 4 pages", 8, 8)


check_pages(paged_mask).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.paged_mask(paged_mask).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Your mask describes the pool from the side of the pages: whose are you? A server's kernel asks from the side of the
# sequences, by a **block table**: row `b` lists the pages of sequence `b` in order. Then a sequence touches its own pages
# and no others, and no mask has to be sorted into blocks when a page changes its owner. The course's kernel for one new token
# over a long cache reads pages in this way (Part 3 of lab 4 tells how it shares them among the multiprocessors). On a machine
# without a Hopper GPU the same call gathers the pages and goes to SDPA. Both descriptions are of one pool, so they give
# the same attention:

# %%
page_size, sequences, each = 64, 2, 4  # tokens of a page, sequences, pages of a sequence
table = torch.randperm(sequences * each, device=device).view(sequences, each).int()  # the pages of each sequence, in order
owner, number = torch.empty(2, sequences * each, dtype=torch.long, device=device)
for b, pages in enumerate(table.long()):
    owner[pages], number[pages] = b, torch.arange(each, device=device)
q = torch.randn(sequences, heads, 1, head_dim, device=device, dtype=dtype)
k_pages, v_pages = (torch.randn(len(owner), heads, page_size, head_dim, device=device, dtype=dtype) for _ in range(2))
lengths = torch.tensor([100, 256], dtype=torch.int32, device=device)  # tokens in use, the new one included
by_table = attention_decode(q, k_pages, v_pages, seqlens=lengths, block_table=table)
over_pool = paged_mask(lambda b, h, q, k: k < lengths[b], owner, number, page_size)
k_pool, v_pool = (pages.transpose(0, 1).flatten(1, 2)[None] for pages in (k_pages, v_pages))  # (1, H, places, D)
for b in range(sequences):
    mask = dense_mask(over_pool, 1, k_pool.shape[2], device=device, b=b)
    by_mask = F.scaled_dot_product_attention(q[b : b + 1], k_pool, v_pool, attn_mask=mask)
    difference = (by_table[b : b + 1] - by_mask).abs().max().item()
    print(f"sequence {b}, {int(lengths[b])} tokens: largest difference between table and mask {difference:.1e}")

# %% [markdown]
# What do pages cost? On a Hopper GPU the next cell races the kernel over pages with the same cache in one piece, and with
# what one does without such a kernel: copy the pages together, then attend. Elsewhere it shows what was recorded on an H200,
# beside FlashAttention 3, which reads pages, too.

# %%
if gluon_support():
    rows = []
    sequences, kv_heads, tokens = 8, 8, 8192
    q = torch.randn(sequences, 32, 1, 128, device=device, dtype=dtype)
    k, v = (torch.randn(sequences, kv_heads, tokens, 128, device=device, dtype=dtype) for _ in range(2))
    lengths = torch.full((sequences,), tokens, dtype=torch.int32, device=device)
    ways = {"one piece": functools.partial(attention_decode, q, k, v, seqlens=lengths)}
    for page_size in (256, 64, 16):
        table = torch.randperm(sequences * tokens // page_size, device=device).view(sequences, -1).int()
        pages = []
        for x in (k, v):
            pool = torch.empty(table.numel(), kv_heads, page_size, 128, device=device, dtype=dtype)
            pool[table.flatten().long()] = (
                x.view(sequences, kv_heads, -1, page_size, 128).transpose(1, 2).reshape(pool.shape)
            )
            pages.append(pool)
        call = functools.partial(attention_decode, q, *pages, seqlens=lengths, block_table=table)
        ways[f"pages of {page_size}"] = call
    ways["pages of 16, gathered, then SDPA"] = functools.partial(call, backend="sdpa")
    keep("pages", time_ways(ways), digits=4)
else:
    record_file = Path("assets/results/h200/decode_pages.json")
    print(gluon_support().reason)
    if record_file.exists():
        record = json.loads(record_file.read_text())
        print(f"Microseconds, recorded on {record['environment']['gpu']}. Not measured here:")
        display(pd.DataFrame([{"sequences": row["batch"], "tokens": row["keys"], **row["us"]} for row in record["rows"]]))

# %% [markdown]
# ### Bonus Question 8.3: A ragged batch {points}
#
# Texts of different lengths, no padding at all. `ragged_attention(attend, texts)`: `texts` is a list of `(q, k, v)`,
# each (H, S_i, D) with an S_i of its own. Put all texts end to end into one row of batch 1, call
# `attend(q, k, v, mask_mod)` **once**, and return the list of results (H, S_i, D). Each text attends to itself alone,
# causally. An empty text (S_i = 0) gives an empty result.
#
# {hint idea}
# Put end to end, the texts are packed documents, causal inside of each.
#
# {hint plan}
# Count the sizes, number the tokens by text, join q, k and v along the tokens, add a batch dimension, call once, take
# the batch dimension away, split by the sizes.
#
# {hint line}
# A text of no tokens has a size, too: 0. It takes part in the list of sizes and in nothing else.

# %% nbgrader={"grade_id": "bonus_8_3", "solution": true}
def ragged_attention(attend, texts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Causal attention of each text (H, S_i, D) in one call of attend; a list of (H, S_i, D)."""
    ### BEGIN SOLUTION
    sizes = [q.shape[1] for q, _, _ in texts]
    text_of = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor(sizes)).to(texts[0][0].device)

    def mask_mod(b, h, q, k):
        return (text_of[q] == text_of[k]) & (k <= q)

    q, k, v = (torch.cat(parts, dim=1)[None] for parts in zip(*texts, strict=True))
    return list(attend(q, k, v, mask_mod)[0].split(sizes, dim=1))
    ### END SOLUTION


# %% nbgrader={"grade_id": "bonus_8_3_tests", "grade": true, "points": 6}
@check("Bonus 8.3", "A ragged batch")
def check_ragged(ragged_attention):
    ragged_attention = leaves_inputs(ragged_attention)
    shapes = []

    def attend(q, k, v, mask_mod):
        shapes.append(tuple(q.shape))
        if not q.shape[2]:
            return q
        return F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(mask_mod, q.shape[2], k.shape[2]))

    sizes = [3, 0, 5, 2]
    texts = [tuple(torch.randn(2, size, 6) for _ in range(3)) for size in sizes]
    got = ragged_attention(attend, texts)
    assert len(shapes) == 1, f"attend should be called once for all texts, and was called {len(shapes)} times"
    assert shapes[0] == (1, 2, 10, 6), (
        f"texts of {sizes} tokens make one row of 10, (1, 2, 10, 6); attend got {shapes[0]}. No padding: put them end to end")
    assert isinstance(got, tuple | list) and len(got) == 4, "expected a list with a result for each of the four texts"
    for i, (q, k, v) in enumerate(texts):
        expected, hint = torch.zeros_like(q), ""
        if sizes[i]:
            expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            hint = known_mistake(got[i], {"Each text is causal.": F.scaled_dot_product_attention(q, k, v)}) or (
                "Does it look at other texts?")
        expect_close(got[i], expected, rtol=1e-4, atol=1e-5, what=f"text {i} of lengths {sizes}", hint=hint)


check_ragged(ragged_attention).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.ragged_attention(ragged_attention).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ## Save your results
#
# The tables of this run, with the machine they were made on. Compare them with those of another machine.

# %%
machine = environment()
record = {
    "machine": torch.cuda.get_device_name() if on_gpu else machine.get("cpu"),
    "commit": machine.get("commit"),
    "environment": machine,
    "tables": results,
    "guesses": {what: {"guess": guesses.get(what), "outcome": outcome} for what, outcome in outcomes.items()},
}
saved = output_path("lab2_results.json")
saved.write_text(json.dumps(record, indent=1, default=str))
print(f"saved {', '.join(results) or 'no table'} to {saved}")

# %% [markdown]
# ## What you know now
#
# - A mask as data is read pair by pair, after the work is done. A mask as a program is known before it starts.
# - Kernels skip blocks, not pairs. What a mask promises is one over its block density.
# - A score modifier becomes a few lines of a generated kernel. You have seen yours.
# - A baseline changes one thing only. "No mask" changed the tiles as well.
# - Compiled code that silently stops being compiled is a benchmark's worst enemy. PyTorch's default would not have fallen.
# - The order of the tokens is yours to choose. A good layout makes blocks empty.
#
# Look at the first paragraph of this lab again. Which three decisions turn seven eighths of wasted work into time saved?
#
# <details>
# <summary>An answer to compare yours with</summary>
#
# To give the mask as a program, so that it is known before the work starts. To sort it into blocks once, so that a kernel
# skips what is empty. To store the tokens in an order in which blocks are empty.
#
# </details>
