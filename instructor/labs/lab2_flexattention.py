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
# The lab gives {points:regular} points, and {points:bonus} bonus points.
#
# {points:table}

# %% [markdown]
# ## How to work
#
# - **Run all cells in order.** Later parts use earlier answers. A cell that needs one tells you which.
# - **Predict first.** Cells marked *Before you run* ask for a guess. Say a number, then run.
# - **Look at every mask.** A mask is a picture. Most mistakes are visible at once.
# - **Think about why.** The questions in words are graded by hand, and ask for numbers from your own run.
#
# Write code where it says `# YOUR CODE HERE` and delete the line `raise NotImplementedError()`. Below each answer is a
# cell of checks. It gives you a first, light test. Grading adds more: other sizes, other layouts, other masks.
#
# The lab runs with and without a GPU, at sizes made for each. On a GPU, FlexAttention generates Triton. On a CPU it
# generates C++, and the same masks skip the same blocks.

# %% nbgrader={"grade_id": "setup", "locked": true}
import functools
import json
import math
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from utils import *
from utils.checking import check, expect_close, expect_number, forbid, require_answer, watch_operations
from utils.machine.device import compile_support, flash_attn_support
from utils.machine.environment import environment
from utils.attention import AttentionUnsupported, prepare
from utils.attention.backends.flex import needed_kernel_options
from utils.attention.masks import dense_mask, documents
from utils.attention.masks import named as with_name
from utils.attention.masks.sparsity import sparsity
from utils.attention.prepared import compiled_versions, own_copy
from utils.benchmark.measuring import measure_together
from utils.files import recorded_table
from utils.visualization import plot_mask, plot_sparsity_sweep

torch.manual_seed(0)
device = default_device()
on_gpu = device.type == "cuda"
dtype = torch.bfloat16 if on_gpu else torch.float32  # the dtype of every benchmark below
dtype_name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
batch, heads, length, head_dim = (1, 16, 8192, 128) if on_gpu else (1, 4, 2048, 64)  # every benchmark's default

tolerance = 0.1 if on_gpu else 1e-3  # between two ways to compute the same attention, in this dtype

RECORDED = Path("assets/results/h200/lab2.json")  # this lab's tables from an H200
results = {}  # this run's tables, saved at the end


def random_qkv(length: int = length) -> list[torch.Tensor]:
    """Three tensors (batch, heads, length, head_dim) of normal values."""
    return [torch.randn(batch, heads, length, head_dim, device=device, dtype=dtype) for _ in range(3)]


def time_ways(ways: dict, samples: int = 11) -> pd.DataFrame:
    """Median time of each function of no arguments, with its 95% interval; the calls take turns."""
    taken = measure_together(list(ways.values()), labels=list(ways), warmup=2, iterations=samples)
    rows = [(name, m.median_ms, m.interval_ms[0], m.interval_ms[1]) for name, m in zip(ways, taken, strict=True)]
    return pd.DataFrame(rows, columns=["way", "ms", "from", "to"])


def rows_of(mask_mod, queries: int, keys: int, b: int = 0, h: int = 0) -> list[list[int]]:
    """A mask as lists of 0 and 1, one list a query; a function that FlexAttention would refuse is refused here."""
    assert callable(mask_mod), f"expected a mask_mod, got a {type(mask_mod).__name__}: is a return missing?"
    try:
        mask = dense_mask(mask_mod, queries, keys, b=b, h=h)
    except TypeError as error:
        raise AssertionError(str(error)) from None
    try:
        create_block_mask(mask_mod, b + 1, h + 1, queries, keys, device="cpu", BLOCK_SIZE=1)
    except AssertionError as error:
        raise AssertionError(
            f"FlexAttention refuses your mask_mod: {error}. It takes exactly four positional arguments (b, h, q, k), and "
            "*args does not count."
        ) from None
    return mask.int().tolist()


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
    display(table.set_index(table.columns[0]).round(digits))


def show_recorded(table: str) -> None:
    """Show a table of this lab as it was recorded on an H200, and say that it was not measured here."""
    rows = recorded_table(RECORDED, table)
    if rows is not None:
        display(rows.round(3))


compiler = compile_support()
print(f"device        {torch.cuda.get_device_name() if on_gpu else 'CPU'}, PyTorch {torch.__version__}")
print(f"benchmarks    {batch} x {heads} heads, {length} tokens, head dim {head_dim}, {dtype_name}")
print(f"torch.compile {compiler.reason}")

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
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    hint = "Are scores divided by sqrt(D), and masked before the softmax?"
    expect_close(masked_attention(q, k, v, mask), expected, rtol=1e-4, atol=1e-5, what="masked_attention, causal", hint=hint)
    mask[0], expected[:, :, 0] = False, 0.0
    what, hint = "masked_attention with a query 0 that sees no key", "Such a query gets zeros."
    expect_close(masked_attention(q, k, v, mask), expected, rtol=1e-4, atol=1e-5, what=what, hint=hint)


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
    got = mask_costs(torch.ones(4, 4, dtype=torch.bool).tril(), 1, 1, 10, torch.float32)
    assert isinstance(got, tuple) and len(got) == 3, f"expected (density, wasted FLOPs, mask bytes), got {got!r}"
    # a causal mask of 4 x 4: 10 pairs stay, 6 go
    for value, (expected, unit, what) in zip(
        got, ((0.625, "", "density"), (240, "FLOPs", "number of wasted FLOPs"), (64, "bytes", "size")), strict=True
    ):
        what = f"the {what} of a causal mask over 4 tokens, D = 10, in fp32,"
        expect_number(value, expected, rel=1e-9, unit=unit, what=what)


check_mask_costs(mask_costs).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.mask_costs(mask_costs).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Time it. Four calls of the library's fused attention, SDPA: no mask; a causal mask and a mask of documents, as tensors;
# causal as a word, `is_causal=True`, which the kernel understands.
#
# **Before you run.** The documents leave one pair in eight. How much faster is attention with that tensor than without
# any mask?

# %%
require_answer("mask_costs", globals().get("mask_costs"), "1.2")
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
# No mask may build or read a tensor of pairs. Grading evaluates each function on single pairs and looks at the size of
# everything it touches.

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
    for mod, what, expected in (
        (causal, "causal", [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]),
        (sliding_window(2), "sliding_window(2)", [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]),
        (prefix_lm(2), "prefix_lm(2)", [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]),
    ):
        got = rows_of(mod, 4, 4)
        assert got == expected, f"{what} over 4 tokens is\n{got}, one list a query."


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
    numbers = document_numbers([2, 1], 4, torch.device("cpu"))
    assert numbers.tolist() == [0, 0, 1, -1], f"document_numbers([2, 1], 4, cpu) is {numbers.tolist()}"
    got = rows_of(packed_documents(numbers[None]), 4, 4)
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert got == expected, f"the mask of documents of 2 and 1 tokens and one of padding is\n{got}, one list a query."


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
#   that comes at or after them: it stays causal. (Models with a sliding window keep such *attention sinks*.) Compose it
#   of the functions above, or write it as one expression.

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
    even_keys, past = (lambda b, h, q, k: k % 2 == 0), (lambda b, h, q, k: k <= q)
    got = rows_of(both(even_keys, past), 3, 3)
    assert got == [[1, 0, 0], [1, 0, 0], [1, 0, 1]], f"both(even keys, causal) over 3 tokens is {got}"
    got = rows_of(either(even_keys, past), 3, 3)
    assert got == [[1, 0, 1], [1, 1, 1], [1, 1, 1]], f"either(even keys, causal) over 3 tokens is {got}"


check_compositions(both, either).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.compositions(both, either).raise_if_wrong()
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "q2_3_heads_tests", "grade": true, "points": 4}
@check("2.3", "Windows and sinks")
def check_windows(window_per_head, sinks_and_window):
    mod = window_per_head(torch.tensor([1, 3]))
    got = [sum(map(sum, rows_of(mod, 3, 3, h=head))) for head in (0, 1)]
    assert got == [3, 6], f"windows of 1 and 3 over 3 tokens let {got} pairs through, not [3, 6]"
    got = rows_of(sinks_and_window(1, 2), 4, 4)
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]
    assert got == expected, f"sinks_and_window(1, 2) over 4 tokens is\n{got}, one list a query."


check_windows(window_per_head, sinks_and_window).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.windows_and_sinks(window_per_head, sinks_and_window).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Now look at them. Each mask is drawn twice: pair by pair, and in blocks of 16 × 16. The block pattern is what the next
# part is about.
#
# **Before you look.** Which of these masks leaves the most blocks without a single pair?

# %%
require_answer("sliding_window", globals().get("sliding_window"), "2.1")
require_answer("causal", globals().get("causal"), "2.1")
require_answer("prefix_lm", globals().get("prefix_lm"), "2.1")
require_answer("document_numbers", globals().get("document_numbers"), "2.2")
require_answer("packed_documents", globals().get("packed_documents"), "2.2")
require_answer("sinks_and_window", globals().get("sinks_and_window"), "2.3")
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
# full: the pairs outside do not exist, and a kernel must mask them. It is partial or empty.

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
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    got = count_blocks(mask, 2)
    assert isinstance(got, tuple) and len(got) == 3, f"expected (full, partial, empty), got {got!r}"
    assert got == (3, 3, 3), f"a causal mask of 6 x 6 in blocks of 2 gives {got}; sort its nine blocks by hand"


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
#   on paper: no mask, no loop over blocks.

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
    expect_number(block_flops((3, 3, 3), 2, 1, 1, 10), 960, rel=0, unit="FLOPs",
                  what="block_flops of 3 full, 3 partial and 3 empty blocks of 2 x 2, one head, D = 10,")
    expect_number(promised_speedup((3, 3, 3)), 1.5, rel=1e-9, what="promised_speedup((3, 3, 3))")
    expect_number(document_blocks(8, 4, 2), 8, rel=0, unit="blocks", what="document_blocks(8, 4, 2)")
    expect_number(document_blocks(8, 2, 4), 2, rel=0, unit="blocks", what="document_blocks(8, 2, 4)")


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
# **Before you run.** Sliding window of an eighth of the text: what is promised? Which of the masks will keep its promise
# best, which worst?

# %%
require_answer("count_blocks", globals().get("count_blocks"), "3.1")
require_answer("promised_speedup", globals().get("promised_speedup"), "3.2")
require_answer("block_flops", globals().get("block_flops"), "3.2")
require_answer("causal", globals().get("causal"), "2.1")
require_answer("sliding_window", globals().get("sliding_window"), "2.1")
q, k, v = random_qkv()
block = 128
span = length // 8
tried = {
    "no mask": None, "causal": causal, f"sliding_window({span})": sliding_window(span),
    f"documents({span})": documents(span),
}
if compiler:
    print("compiling four kernels, then timing: up to half a minute on two CPU cores ...", flush=True)
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
else:
    print(f"torch.compile cannot run here: {compiler.reason} {compiler.remedy}")
if not on_gpu:
    show_recorded("promises")

# %% [markdown]
# *Kept* is measured over promised. On a CPU it may be more than 1: the blocks of a mask are also the kernel's tiles there,
# and without a mask its tile takes all keys at once, which no cache holds. On a GPU tiles are the same with and without a
# mask, and a part of the promise is lost. Part 7 asks where.

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
# - compute the products of visited blocks only, and ask `mask_mod` in partial blocks only. Grading counts both.
# - at no time may there be a tensor as large as all scores. One row of blocks may be there at once.
# - a query may see nothing in a partial block, or nothing at all: then its output is 0, not NaN.
# - compute in float32 or wider; the result has the dtype of `q`. No SDPA, no FlexAttention.

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
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    numbers = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])

    def mod(b, h, q, k):
        return (numbers[q] == numbers[k]) & (q >= k)

    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(mod, 8, 8))
    block_mask = create_block_mask(mod, None, None, 8, 8, device="cpu", BLOCK_SIZE=2)
    got = block_sparse_attention(q, k, v, block_mask)
    hint = (
        "Are full blocks visited? Only the first kv_num_blocks entries used? Are the indices counted from the start of the "
        "text?"
    )
    what = "block_sparse_attention with two documents in blocks of 2"
    expect_close(got, expected, rtol=1e-4, atol=1e-5, what=what, hint=hint)


check_block_sparse(block_sparse_attention).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.block_sparse_attention(block_sparse_attention).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# That is the algorithm of FlexAttention's kernel. The compiled one runs one program for each row of blocks, all at the same
# time, and uses online softmax instead of keeping a row of scores.

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
# - `soft_cap(cap)`: squeezes scores into (−cap, cap): $\text{cap} \cdot \tanh(s / \text{cap})$. Gemma 2 does so with 50.
# - `alibi(slopes)`: a penalty that grows with the distance, $s - m_h\,(q - k)$. `slopes` is a tensor (H,): one
#   $m_h$ for each head.
# - `in_turn(*score_mods)`: applies the modifiers from left to right; each takes the score the one before returned.

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
    zero, one, five, two = (torch.tensor(i) for i in (0, 1, 5, 2))
    score = torch.tensor(3.0)
    expect_number(soft_cap(2.0)(score, zero, one, five, two), 1.81030, rel=1e-4, what="soft_cap(2) of a score of 3")
    slopes = torch.tensor([1.0, 0.5])
    expect_number(alibi(slopes)(score, zero, one, five, two), 1.5, rel=1e-6,
                  what="alibi([1, 0.5]) of a score of 3 in head 1, query 5, key 2 (distance q - k = 3: a penalty),")
    got = in_turn(soft_cap(2.0), alibi(slopes))(score, zero, one, five, two)
    expect_number(got, 0.31030, rel=1e-3, what="soft-cap, then ALiBi, of the same score")


check_score_mods(soft_cap, alibi, in_turn).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.score_mods(soft_cap, alibi, in_turn).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 4.2: A learned bias by distance {points}
#
# T5 and its relatives learn a bias for each head and each distance. `relative_bias(table)`: `table` is a tensor
# (H, 2R + 1). Column $R$ is the bias of distance 0, column $R + 1$ that of $q - k = 1$ (the key before the query), column
# $R - 1$ that of $q - k = -1$. Distances beyond $\pm R$ take the column at that end. The bias is added to the score, and
# the result keeps the dtype of the score.

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
    mod = relative_bias(torch.tensor([[10.0, 20.0, 30.0]]))
    score, zero, four = torch.tensor(1.0), torch.tensor(0), torch.tensor(4)
    try:  # under vmap, as FlexAttention asks: no index has a value that Python can look at
        got = torch.vmap(lambda key: mod(score, zero, zero, four, key))(torch.tensor([4, 3, 5]))
    except RuntimeError as error:
        if "data-dependent" not in str(error):
            raise
        raise AssertionError(
            "Python's `max`, `min`, `and`, `or` and `if` cannot choose by the value of a tensor; .clamp and torch.where can."
        ) from None
    for value, key, bias in zip(got, (4, 3, 5), (20.0, 30.0, 10.0), strict=True):
        what = f"a score of 1 at query 4, key {key} (distance q - k = {4 - key}), table [10, 20, 30],"
        expect_number(value, 1.0 + bias, rel=1e-6, what=what)


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
require_answer("soft_cap", globals().get("soft_cap"), "4.1")
require_answer("alibi", globals().get("alibi"), "4.1")
require_answer("in_turn", globals().get("in_turn"), "4.1")
require_answer("relative_bias", globals().get("relative_bias"), "4.2")
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
    ax.set_title(name, fontsize=10)
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
# - **Compiled.** `torch.compile` traces your two functions, and Inductor puts them into the template of a flash-attention
#   kernel: Triton on a GPU, C++ on a CPU. This one walks the block tables.
# - **CuTe.** The same call with another back end: FlashAttention 4, a kernel in NVIDIA's CuTe DSL, with your functions
#   translated into it. It needs a Hopper or Blackwell GPU.
#
# ![From two Python functions to one kernel: traced, lowered into a template, generated as Triton, C++ or CuTe](assets/lab2_paths.svg)

# %% [markdown]
# ### Question 5.1: Prepare once, call often {points}
#
# A block mask costs about as much to build as several calls of the kernel. In a model, it is built once for a step and
# used by every layer and every head. Write `prepare_flex`. It returns a function `attend(q, k, v)`.
#
# - `attention` is FlexAttention, compiled or not: call `attention(q, k, v, score_mod=..., block_mask=...,
#   enable_gqa=...)` in `attend`, and nothing else that computes.
# - The block mask is built **in `prepare_flex`, once**, with blocks of `block_size`, for `length` queries and keys, and
#   shared by all sequences and heads. `mask_mod` may be None: then there is no block mask.
# - `enable_gqa` must be True when there are fewer key-value heads than query heads.

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
    q, k, v = (torch.randn(1, 2, 32, 16) for _ in range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eager FlexAttention warns that it is eager
        attend = prepare_flex(flex_attention, lambda b, h, q, k: k <= q, None, 32, torch.device("cpu"), 16)
        got = attend(q, k, v)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    expect_close(got, expected, rtol=1e-4, atol=1e-5, what="attend(q, k, v) under a causal mask")
    asked = []  # one entry each time that the mask_mod is called

    def counted(b, h, q, k):
        asked.append(1)
        return k <= q

    attend = prepare_flex(lambda q, k, v, *more, **named: q, counted, None, 32, torch.device("cpu"), 16)
    built = len(asked)
    assert built, "prepare_flex does not build the block mask: it never called mask_mod"
    attend(q, k, v)
    attend(q, k, v)
    assert len(asked) == built, "attend calls mask_mod again: build the block mask once, in prepare_flex"


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
# **Before you run.** Put the five in order. By what factor do you expect eager and compiled FlexAttention to differ?

# %%
require_answer("causal", globals().get("causal"), "2.1")
require_answer("both", globals().get("both"), "2.3")
require_answer("prepare_flex", globals().get("prepare_flex"), "5.1")
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
for name, attend in contenders.items():
    if hasattr(attend, "seconds"):
        print(f"{name:34}", ", ".join(f"{what} {seconds:.3f} s" for what, seconds in attend.seconds.items()))
if not on_gpu:
    show_recorded("race")
    print("The recorded race has no CuTe row: flash-attn-4 was not installed on that machine.")

# %% [markdown]
# The last lines say what was paid once: building the block mask, and compiling. A block mask that serves every layer and
# every head of a step costs little. One that is built anew for every call costs more than the attention itself.

# %% [markdown]
# ### Question 5.2: Find your line in the kernel {points}
#
# The next cell compiles attention with a causal mask and a soft-cap of 17.25, a number that nobody else uses. Then it
# writes the generated code to `flex_generated_kernel.txt` and shows the places around that number. Open the file; the
# kernel is one function, a few hundred lines long.
#
# **Before you run.** Your soft-cap is one line of Python. How many lines of the kernel will it become?

# %%
require_answer("causal", globals().get("causal"), "2.1")
require_answer("soft_cap", globals().get("soft_cap"), "4.1")


def show_code(code: str, needle: str, before: int = 4, after: int = 8, places: int = 2) -> None:
    """Print the surroundings of the first places where needle stands in code."""
    lines = code.splitlines()
    found = [i for i, line in enumerate(lines) if needle in line]
    print(f"{needle!r} stands in {len(found)} of {len(lines)} lines")
    shown_to = -1
    for i in found:
        if i > shown_to and places:
            places -= 1
            first, shown_to = max(i - before, shown_to + 1), min(i + after, len(lines) - 1)
            print("\n".join(f"{j + 1:5} {lines[j].rstrip()[:150]}" for j in range(first, shown_to + 1)), "\n")


if compiler:
    short = min(length, 1024)
    q, k, v = random_qkv(short)
    print("compiling ...", flush=True)
    capped = prepare(q, k, v, mask_mod=causal, score_mod=soft_cap(17.25), backend="flex")
    generated = capped.generated_code()
    Path("flex_generated_kernel.txt").write_text(generated)
    show_code(generated, "17.25")
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
# exports both as Chrome traces. Drop `flex_eager.json` and `flex_compiled.json` on
# [ui.perfetto.dev](https://ui.perfetto.dev) to walk through them.

# %%
require_answer("causal", globals().get("causal"), "2.1")
require_answer("soft_cap", globals().get("soft_cap"), "4.1")
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

    prof = profile(step, steps=3, trace_path=f"flex_{name}.json")
    counts = count_cuda_kernels(prof)
    _, extra_gb = benchmark_memory(step, n_warmup=1, n_repeat=3)
    traced[name] = (counts["total"], benchmark_latency(step, n_warmup=2, n_repeat=10), extra_gb * 1e3)
    ranges = [event for event in read_trace(f"flex_{name}.json") if event.name == f"flex {name}"]
    window = (ranges[-1].start_us / 1e3, ranges[-1].end_us / 1e3)
    plot_timeline(f"flex_{name}.json", window_ms=window, max_depth=9, title=f"FlexAttention, {name}: one call")
    plt.show()
trace_table = pd.DataFrame(
    [(name, *row) for name, row in traced.items()],
    columns=["path", "kernels" if on_gpu else "operators", "ms", "extra memory, MB"],
)
keep("traces", trace_table)
if not on_gpu:
    show_recorded("traces")

# %% [markdown]
# Two notes on these traces. The eager call shows a *Torch-Compiled Region* as well: PyTorch traces it, and then runs what
# it traced operator by operator. And on a CPU the compiled call counts zero operators: the generated kernel is a plain C++
# function there, and the profiler counts PyTorch's own. Zero means that not one of them is left. (Lines that begin with
# `USDT:` are printed by the profiler.)
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
# # Part 6: The recompile cliff
#
# With `dynamic=False`, `torch.compile` makes one kernel for one set of shapes. A new length means a new kernel: some seconds.
# That is the price you see. There is another one. After eight kernels for the same function, PyTorch compiles no more and
# logs a warning. The lengths it knows stay fast; every **new** length runs **eager**. Results stay right. Nothing fails. It
# is only slow.
#
# Walk up to the cliff. So that you need not wait for eight kernels, the cell lowers the limit to two.
#
# **Before you run.** Five lengths, each a little longer than the one before. What will the speed of a call do between the
# second length and the third?

# %%
if compiler:
    limit = 2
    # On a GPU long enough that a kernel takes longer than its launch.
    lengths = [length * (i + 4) // 8 if on_gpu else length * (i + 3) // 16 for i in range(5)]
    print(f"walking, with kernels for {limit} lengths: up to 20 s on two CPU cores ...", flush=True)
    unit, flops = ("TFLOP/s", 1e12) if on_gpu else ("GFLOP/s", 1e9)
    cliff = own_copy(flex_attention)  # a function of its own: what happens to it does not touch the rest of the lab
    walking = torch.compile(cliff, dynamic=False)
    rows = []
    with torch._dynamo.config.patch(recompile_limit=limit):
        for n in lengths:
            q, k, v = random_qkv(n)
            first_ms = benchmark_latency(walking, q, k, v, n_warmup=0, n_repeat=1)
            ms = benchmark_latency(walking, q, k, v, n_warmup=1, n_repeat=15)
            speed = 4 * batch * heads * head_dim * n**2 / (ms / 1e3) / flops
            rows.append((n, compiled_versions(cliff), first_ms / 1e3, ms, speed))
    cliff_table = pd.DataFrame(rows, columns=["tokens", "kernels so far", "first call, s", "ms", unit])
    keep("cliff", cliff_table)

    fig, ax = plt.subplots(figsize=(7, 3), layout="constrained")
    ax.plot(cliff_table["tokens"], cliff_table[unit], "o-", color="tab:blue")
    ax.axvspan(lengths[limit] - length // 64, lengths[-1] + length // 64, color="tab:orange", alpha=0.2, label="past the limit: eager")
    ax.set(xlabel="tokens", ylabel=unit, title="The same call, one length after the other", ylim=0)
    ax.legend(frameon=False)
    plt.show()
else:
    print(f"torch.compile cannot run here: {compiler.reason} {compiler.remedy}")
if not on_gpu:
    show_recorded("cliff")

# %% [markdown]
# ### Question 6.1: Buckets {points}
#
# A service gets texts of any length. One kernel for each length is too many; one kernel for the longest wastes work.
# **Buckets** are the compromise: a few lengths, and each text is padded to the smallest one that holds it.
#
# Write `bucketed_attention(attend, q, k, v, buckets)`:
# - `q`, `k`, `v` are (B, H, S, D); `buckets` is a list of lengths, in any order. Pad to the smallest bucket that holds S
#   tokens. No bucket holds them: raise a `ValueError`.
# - call `attend(q, k, v, mask_mod)` **once** with the padded tensors and a `mask_mod` that hides the padded keys from
#   everybody. Attention is not causal here.
# - return (B, H, S, D): the result without its padding.
# - **The mask must not cause a recompile.** A Python number that a mask captures becomes a constant of the kernel, and
#   another number means another kernel. A tensor is an argument of the kernel: its values may change. Grading compiles
#   your mask and counts the kernels.

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
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    lengths_seen = []

    def attend(q, k, v, mask_mod):
        lengths_seen.append(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(mask_mod, q.shape[2], k.shape[2]))

    got = bucketed_attention(attend, q, k, v, [4, 8, 16])
    assert lengths_seen == [8], f"5 tokens belong into the bucket of 8, and attend was called with {lengths_seen}"
    expect_close(got, F.scaled_dot_product_attention(q, k, v), rtol=1e-4, atol=1e-5, what="5 tokens in a bucket of 8")


check_buckets(bucketed_attention).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.buckets(bucketed_attention).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# The railing at work: twelve texts of twelve lengths, two buckets, and an error instead of silence should the limit
# be reached.
#
# **Before you run.** How many kernels will there be at the end?

# %%
require_answer("bucketed_attention", globals().get("bucketed_attention"), "6.1")
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

# %% [markdown] nbgrader={"grade_id": "q6_2", "grade": true, "solution": true, "points": 4}
# 1. The student's own factor (two CPU cores: 3 to 6 times; an H200: from 248 to 14 TFLOP/s, eighteenfold). Eager FlexAttention
#    ran: all scores stored, one operator after the other. It computes the same numbers, only slowly.
# 2. `fail_on_recompile_limit_hit`, which turns the silence into an error; `torch._dynamo.reset()` or a fresh function for
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
# point the speed-up over no mask is measured and divided by two ideals: what the *pairs* promise (1/density), and
# what the *blocks* promise. The heat maps show the speed-up, and its share of what the blocks promise. The shortest
# documents are a quarter of the largest block.
#
# **Before you run.** Documents of half a block: can any kernel of this kind keep the promise of their pairs? Large blocks
# or small blocks: which reach more of the promise of their pairs, which more of the promise of their blocks?

# %%
require_answer("count_blocks", globals().get("count_blocks"), "3.1")
require_answer("promised_speedup", globals().get("promised_speedup"), "3.2")
if compiler:
    q, k, v = random_qkv()
    block_sizes = [64, 128, 256]
    spans = [64, 128, 256, length // 8, length // 2] if on_gpu else [64, 128, 256, 512, 1024]
    print(f"compiling a kernel for each of {len(block_sizes)} block sizes: up to 20 s on two CPU cores ...", flush=True)
    calls, kernels = {(0, 0): prepare(q, k, v, backend="flex")}, {}
    for block in block_sizes:
        kernels[block] = own_copy(flex_attention)
        attend = torch.compile(kernels[block], dynamic=False)
        options = needed_kernel_options((block, block)) if on_gpu else None  # tiles that divide the blocks
        for span in spans:
            ids = torch.arange(length, device=device) // span  # a tensor: one kernel serves every span
            block_mask = create_block_mask(documents(ids), None, None, length, length, device=device, BLOCK_SIZE=block)
            calls[block, span] = functools.partial(attend, q, k, v, block_mask=block_mask, kernel_options=options or None)
    sweep_times = time_ways(calls, samples=5)
    assert all(compiled_versions(kernel) == 1 for kernel in kernels.values()), "a kernel was compiled twice"
    rows = []
    for (block, span), ms in zip(list(calls)[1:], sweep_times["ms"][1:], strict=True):
        counts = tuple(map(int, count_blocks(dense_mask(documents(span), length, length, device), block)))
        measured = sweep_times["ms"][0] / ms
        rows.append((block, span, length / span, promised_speedup(counts), measured))
    sweep_table = pd.DataFrame(rows, columns=["block", "span", "pairs promise", "blocks promise", "measured"])
    sweep_table["of pairs"] = sweep_table["measured"] / sweep_table["pairs promise"]
    sweep_table["of blocks"] = sweep_table["measured"] / sweep_table["blocks promise"]
    keep("sweep", sweep_table)

    drawn = sweep_table.rename(columns={"block": "block_size", "span": "doc_span", "measured": "speedup"})
    plot_sparsity_sweep(drawn.assign(ideal=drawn["blocks promise"]).to_dict("records"))
    plt.show()
else:
    print(f"torch.compile cannot run here: {compiler.reason} {compiler.remedy}")
if not on_gpu:
    show_recorded("sweep")
    print("The recorded sweep has long documents only: none is shorter than a block.")

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
# 128 × 128 (32 × 32 in the check, 16 × 16 in grading). A good order is enough; no padding.

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
    conversation, position = torch.tensor([2, 0, 1, 0, 1]), torch.tensor([0, 0, 0, 1, 1])
    order, mod = lay_out(conversation, position, 8)
    assert sorted(order.tolist()) == [0, 1, 2, 3, 4], f"order should be a permutation of 0 ... 4, and is {order.tolist()}"
    rows = rows_of(mod, 5, 5)
    sees = {(int(order[q]), int(order[k])) for q in range(5) for k in range(5) if rows[q][k]}
    # tokens 1 and 3 are the instructions, 2 and 4 are conversation 1, and token 0 is all of conversation 2
    expected = {(0, 0), (0, 1), (0, 3), (1, 1), (2, 1), (2, 2), (2, 3), (3, 1), (3, 3), (4, 1), (4, 2), (4, 3), (4, 4)}
    assert sees == expected, f"of five tokens, (query, key) too many {sorted(sees - expected)}, missing {sorted(expected - sees)}"


check_lay_out(lay_out).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.layout_mask(lay_out).raise_if_wrong()
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "q7_1_blocks_tests", "grade": true, "points": 4}
@check("7.1", "The blocks of the layout")
def check_layout_blocks(lay_out):
    conversation, position = arrivals([32] * 8)
    _, mod = lay_out(conversation, position, 1000)
    computed = sparsity(mod, 256, 256, block_size=32)
    # each conversation fits a block of its own: 8 on the diagonal, 7 more for the instructions
    assert computed.total == 64 and computed.full + computed.partial <= 15, (
        f"your layout of 8 conversations of 32 tokens leaves {computed.full + computed.partial} of 64 blocks of 32 x 32 "
        "to compute; tokens that see each other should be neighbours"
    )


check_layout_blocks(lay_out).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.layout_blocks(lay_out).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Your layout at work: the same attention in the order of arrival and in yours.
#
# **Before you run.** Seven conversations, and instructions that are an eighth of all tokens. Read the promise off the
# picture, then see whether it is kept.

# %%
require_answer("lay_out", globals().get("lay_out"), "7.1")
require_answer("count_blocks", globals().get("count_blocks"), "3.1")
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
        "no mask": prepare(q, k, v, backend="flex"),
        "order of arrival": prepare(q, k, v, mask_mod=as_they_arrive, backend="flex"),
        "your layout": prepare(*rows, mask_mod=mine, backend="flex"),
    }
    error = (ways["your layout"]()[:, :, back].float() - ways["order of arrival"]().float()).abs().max().item()
    assert error < tolerance, f"the two layouts differ by {error}"
    layout_table = time_ways(ways)
    blocks = [0, 0, 0]
    for i, mod in enumerate((None, as_they_arrive, mine)):
        full, partial = (length // 128) ** 2, 0
        if mod is not None:
            full, partial, _ = map(int, count_blocks(dense_mask(mod, length, length, device), 128))
        blocks[i] = full + partial
    layout_table["blocks"] = blocks
    layout_table["promised"] = blocks[0] / layout_table["blocks"]
    layout_table["measured"] = layout_table["ms"][0] / layout_table["ms"]
    keep("layout", layout_table)
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
# 4. In the order of arrival the mask was slower than no mask at all, or no faster. Why?

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
    mod = at_positions(lambda b, h, q, k: k <= q, torch.tensor([0, 3]))
    got = [rows_of(mod, 2, 6, b=b) for b in (0, 1)]
    expected = [[[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]], [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]]
    assert got == expected, f"two queries from positions 0 and 3 on, causal: sequence 0 sees {got[0]}, sequence 1 {got[1]}"


check_positions(at_positions).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.at_positions(at_positions).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Bonus Question 8.2: A paged KV cache {points}
#
# A server keeps the keys of all sequences in one pool of **pages** of `page_size` tokens, in any order. Two integer
# tensors (P,) describe the pool: `owner[p]` is the sequence that page `p` belongs to, −1 if it is free, and `number[p]`
# says which page of that sequence it is: 0 holds its positions 0 … page_size − 1, and so on. The `number` of a free page
# is what its last owner left there, 0 or more. Attention runs over the whole pool, so key index $k$ is a place in the pool.
#
# ![A pool of pages: two sequences share it, page by page, and a mask over places in the pool finds out who owns each key](assets/lab2_pages.svg)
#
# `paged_mask(mask_mod, owner, number, page_size)` turns a mask between positions into one over the pool: query $q$
# of sequence `b` sees the key at place $k$ if the page belongs to `b`, and `mask_mod` lets $q$ see the position that lies
# there. Free pages are seen by nobody.

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
    mod = paged_mask(lambda b, h, q, k: k <= q, torch.tensor([0, 1, 0]), torch.tensor([1, 0, 0]), 2)
    got = [rows_of(mod, 3, 6, b=b) for b in (0, 1)]
    expected = [[[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1], [1, 0, 0, 0, 1, 1]],
                [[0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0]]]
    assert got == expected, f"three pages of two tokens: sequence 0 sees {got[0]}, sequence 1 sees {got[1]}"


check_pages(paged_mask).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab2_flexattention as hidden
hidden.paged_mask(paged_mask).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Bonus Question 8.3: A ragged batch {points}
#
# Texts of different lengths, no padding at all. `ragged_attention(attend, texts)`: `texts` is a list of `(q, k, v)`,
# each (H, S_i, D) with an S_i of its own. Put all texts end to end into one row of batch 1, call
# `attend(q, k, v, mask_mod)` **once**, and return the list of results (H, S_i, D). Each text attends to itself alone,
# causally. An empty text (S_i = 0) gives an empty result.

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
    def attend(q, k, v, mask_mod):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(mask_mod, q.shape[2], k.shape[2]))

    texts = [tuple(torch.randn(2, size, 4) for _ in range(3)) for size in (3, 5)]
    got = ragged_attention(attend, texts)
    assert isinstance(got, list) and len(got) == 2, "expected a list with a result for each of the two texts"
    for i, (q, k, v) in enumerate(texts):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        expect_close(got[i], expected, rtol=1e-4, atol=1e-5, what=f"text {i} of lengths 3 and 5")


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
from utils.files import output_path

machine = environment()
record = {
    "machine": torch.cuda.get_device_name() if on_gpu else machine.get("cpu"),
    "commit": machine.get("commit"),
    "environment": machine,
    "tables": results,
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
# - Compiled code that silently stops being compiled is a benchmark's worst enemy.
# - The order of the tokens is yours to choose. A good layout makes blocks empty.
#
# Look at the first paragraph of this lab again. Which three decisions turn seven eighths of wasted work into time saved?
