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
# # Lab 4: SDPA backends and cuDNN
#
# `F.scaled_dot_product_attention` is one line. Behind it stand four programs that compute it: *math*, *flash*,
# *efficient* and *cuDNN*. A dispatcher picks one. It does not say which, and it does not say why.
#
# In this lab you ask it. You will prove which program ran, make it run the one you want, and measure what its choice
# costs. Then you go below: why decode cannot use the FLOPs of the chip, which strides lose you the fast program, and why
# two right answers differ in their bits.
#
# **After this lab you can**
# 1. tell which backend computed a call, and get the reason when one refuses;
# 2. pin a backend so that nothing else can run, and say why a list of two pins nothing;
# 3. predict time from FLOPs and bytes for prefill and decode, and split a decode step over the keys;
# 4. find out whether two results differ by rounding or by a mistake;
# 5. read a table of benchmark results, and choose from it.
#
# | Part | You will |
# |---|---|
# | 1. Who decides? | read operators, collect refusals, write a pin |
# | 2. Four programs, one formula | count, measure time, memory, launches and error; look at traces |
# | 3. Prefill and decode | find the ridge, split the keys, merge the parts |
# | 4. Layouts that lose the fast kernel | build strides that are refused, and strides that are not |
# | 5. Same formula, other bits | put each rounding where it belongs, count steps between bf16 numbers |
# | 6. A table from an H200 | explore recorded results as data, and write a rule |
#
# You need lab 1 (FLOPs, bytes, the roofline), PyTorch tensors and a little pandas. Plan six hours, two more for the bonus (an
# estimate).
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
# - **Trust no name.** A function called `flash_attention` may run math. Part 1 gives you the tools to check. Use them.
# - **Two kinds of numbers.** What you measure comes from your machine. What was recorded on an H200 is marked as
#   recorded, and you treat it as data.
# - **Three hints** are folded away in each question: the idea, the plan, and the line that people miss. Try first.
#
# Write code where it says `# YOUR CODE HERE` and delete the line `raise NotImplementedError()`. A function leaves the
# tensors, lists and tables that it gets as they are. The cell of checks below an answer names the mistakes that it
# knows. Grading tries the same on other shapes, dtypes and options, and counts what a question limits. All checks use
# CPU tensors, so they come out the same with and without a GPU.
#
# A CPU has two of the four backends, math and flash. A GPU has all four. The same cells run on both. In a terminal, `labs bench
# list-targets --chapter labs/cudnn_sdpa_bench` lists the same contests with sizes of your own, and `labs bench run --targets
# labs/cudnn_sdpa_bench:flash_sdp --profile minimal` runs one.

# %% nbgrader={"grade_id": "setup", "locked": true}
import functools
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
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator
from torch.nn.attention import SDPBackend, sdpa_kernel

from utils import *
from utils.attention import attention_decode
from utils.benchmark.measuring import measure_together
from utils.checking import (
    SizeWatch, check, expect_close, expect_number, forbid, is_answered, leaves_inputs, watch_operations,
)
from utils.checking.mistakes import known_mistake
from utils.checking.watching import FUSED_ATTENTION
from utils.machine.environment import environment
from utils.files import output_path, recorded_table
from utils.visualization import series, style_axes

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps the profiler from writing a line for each start and stop
torch.manual_seed(0)
device = default_device()
on_gpu = device.type == "cuda"
dtype = torch.bfloat16 if on_gpu else torch.float32  # of what is timed; what is compared in bits is bf16 everywhere
print("looking at this machine: some seconds without a GPU ...", flush=True)
roofs = machine_roofs()  # this machine's peak FLOP/s per dtype and its memory bandwidth
dtype_name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
peak, bandwidth = roofs.tflops[dtype_name], roofs.memory_bandwidth_tb_s  # TFLOP/s, TB/s

BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class BackendRefused(RuntimeError):
    """The backend that was asked for cannot run this call."""


def random_qkv(batch, heads, length, head_dim, kv_heads=None, kv_length=None, dtype=dtype):
    """Normal q (B, H, S, D) and k, v (B, Hkv, L, D) on this machine's device."""
    keys = batch, kv_heads or heads, kv_length or length, head_dim
    shapes = (batch, heads, length, head_dim), keys, keys
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def show(rows: list[dict] | pd.DataFrame, index: str | list[str]) -> None:
    """Display a table with four significant digits and texts in full."""
    with pd.option_context("display.float_format", "{:.4g}".format, "display.max_colwidth", None):
        display(pd.DataFrame(rows).set_index(index))


def plain_ticks(axis, ticks=None, subs=(1, 2, 5)) -> None:
    """Plain numbers on a logarithmic axis: at `ticks`, or at `subs` times each power of ten."""
    axis.set_major_locator(FixedLocator(ticks) if ticks else LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


RECORDED = Path("assets/results/h200/lab4.json")  # this lab's tables from an H200
NEW_NAMES = {  # of columns that the record names in other words
    "predicted MB": "MB moved (predicted)",
    "one query alone, bf16: share of other numbers": "one query alone, bf16: share of numbers that differ",
}
results = {}  # this run's tables, saved at the end
guesses, outcomes = {}, {}  # your predictions, and what came out


def beside_guess(what: str, measured: object) -> None:
    """Print a measured value beside your guess, and keep both."""
    guess, outcomes[what] = guesses.get(what), measured
    shown = format(measured, ".3g") if isinstance(measured, float) else str(measured)
    print(f"{what}: {shown}" + ("   (no guess)" if guess is None else f"   (you guessed {guess})"))


def show_recorded(table: str) -> None:
    """Show a table of this lab as it was recorded on an H200, and say that it was not measured here."""
    rows = recorded_table(RECORDED, table)
    if rows is None:
        return
    if set(BACKENDS) < set(rows.columns):  # a map of calls and backends
        show_map([row | {"call": row["call"].replace("yours:", "the course's:")} for row in rows.to_dict("records")])
        return
    if {"ran", "backend"} <= set(rows.columns) and rows["ran"].equals(rows["backend"]):
        rows = rows.drop(columns="ran")  # what was asked for is what ran; without it the table fits a laptop's screen
    with pd.option_context("display.float_format", "{:.4g}".format, "display.max_colwidth", None):
        display(rows.rename(columns=NEW_NAMES))


def runs(backend: str, query, key, value, **options) -> bool:
    """Whether torch runs this call with `backend` alone."""
    with warnings.catch_warnings(), sdpa_kernel(BACKENDS[backend]):
        warnings.simplefilter("ignore")
        try:
            F.scaled_dot_product_attention(query, key, value, **options)
        except RuntimeError:
            return False
    return True


def reasons_against(backend: str, q, k, v, **options) -> list[str]:
    """Why a backend does not run a call: by your why_not (Question 1.2) once you have written it, else in few words."""
    if runs(backend, q, k, v, **options):
        return []
    if is_answered(ask := globals().get("why_not")):
        return list(ask(backend, q, k, v, **options))
    return ["torch refuses it; your why_not of Question 1.2 will say why"]


def running_backends(q, k, v, **options) -> list[str]:
    """The backends that run this call here; the others are named with their reasons."""
    left = [backend for backend in BACKENDS if runs(backend, q, k, v, **options)]
    for backend in BACKENDS:
        if backend not in left:
            print(f"{backend:9} is left out here: {' '.join(reasons_against(backend, q, k, v, **options))[:100]}")
    return left


def show_map(rows: list[dict]) -> None:
    """Show which backend runs which call; reasons get numbers, and stand below the table."""
    shown, numbers = [], {}
    for row in rows:
        line = {"call": row["call"]}
        for backend in BACKENDS:
            reasons = [row[backend]] if isinstance(row[backend], str) else row[backend]
            marks = [f"({numbers.setdefault(reason, len(numbers) + 1)})" for reason in reasons if reason != "runs"]
            line[backend] = "no " + " ".join(marks) if marks else "runs"
        shown.append(line)
    show(shown, "call")
    for reason, number in numbers.items():
        print(f"({number}) {reason}")


def who_runs(calls: dict[str, tuple]) -> list[dict]:
    """Show who runs each call, {name: (q, k, v, options)}, with torch's reasons below; returns rows with the reasons."""
    rows = []
    for name, (q, k, v, options) in calls.items():
        rows.append({"call": name} | {b: reasons_against(b, q, k, v, **options) or ["runs"] for b in BACKENDS})
    show_map(rows)
    return [{"call": row["call"]} | {b: " ".join(row[b]) for b in BACKENDS} for row in rows]


def time_in_turn(calls: dict, iterations: int = 11) -> dict[str, Measurement]:
    """Measure calls that take turns (a b c c b a ...), so that a change of the machine's speed meets all of them."""
    timed = measure_together(list(calls.values()), labels=list(calls), warmup=2, iterations=iterations)
    return dict(zip(calls, timed, strict=True))


def pinned(backend: str, *tensors, **options):
    """A call of SDPA without arguments that allows one backend alone. (Question 1.3 asks for more: it explains refusals.)"""

    def call():
        with sdpa_kernel(BACKENDS[backend]):
            return F.scaled_dot_product_attention(*tensors, **options)

    return call


print(f"device        {torch.cuda.get_device_name() if on_gpu else 'CPU'}, PyTorch {torch.__version__}")
print(f"dtype         {dtype_name} where something is timed")
print(f"roofs         {roofs.origin}: {peak:.3g} TFLOP/s in {dtype_name}, {bandwidth * 1e3:.4g} GB/s, "
      f"ridge {peak / bandwidth:.3g} FLOPs/Byte")
print(f"sizes         {'full: made for a data-centre GPU' if on_gpu else 'small: made for a laptop'}")

# %% [markdown]
# # Part 1: Who decides?
#
# Each call of `F.scaled_dot_product_attention` (SDPA) goes through a dispatcher. It walks through a list of backends,
# asks each one whether it can do *this* call, and takes the first that can. What it asks about: device, dtype, shapes,
# strides, mask, dropout, gradients. Math can do everything, so a call hardly ever fails. It only gets slow.
#
# ![The SDPA dispatcher asks one backend after the other, and math takes whatever is left](assets/lab4_dispatcher.svg)

# %% [markdown]
# ## Who are the four?
#
# | Backend | Who wrote it | What it does | On an H200 |
# |---|---|---|---|
# | *math* | PyTorch | two matrix products with a softmax between them, as separate operators; the scores lie in memory | products by cuBLAS, NVIDIA's library of matrix products; one kernel for each step |
# | *flash* | Tri Dao and others, [FlashAttention-2](https://arxiv.org/abs/2307.08691) | one fused kernel: a tile of scores at a time, [online softmax](https://arxiv.org/abs/2205.14135), scores never in memory | compiled for `sm80`, the A100 |
# | *efficient* | Meta's xFormers, after [Rabe and Staats](https://arxiv.org/abs/2112.05682) | the same idea, built from NVIDIA's [CUTLASS](https://github.com/NVIDIA/cutlass); takes masks and more dtypes | compiled for `sm80`: `fmha_cutlassF_bf16_aligned_64x128_rf_sm80` |
# | *cuDNN* | NVIDIA, [cuDNN](https://docs.nvidia.com/deeplearning/cudnn/latest/) (closed source) | the same idea, with kernels that the library generates for the shape and the chip | made for `sm90`: `..._sm90_flash_fprop_wgmma_f16_...` |
#
# The names in the last column are kernel names that the profiler recorded; Part 2 shows them. They explain much of what you
# are going to measure. The kernels for `sm80` were written for an A100. There, a warp of 32 threads loads its operands into
# registers and waits for its product (`mma.sync`). An H200 runs them, but its tensor cores can do more: `wgmma` lets four
# warps start one large product whose operands the hardware reads from shared memory, and go on while it runs
# ([PTX manual](https://docs.nvidia.com/cuda/parallel-thread-execution/), lab 3). A kernel that uses it keeps the tensor cores
# busy, and one that does not reaches about half of their speed, whatever its algorithm.
# [FlashAttention-3](https://arxiv.org/abs/2407.08608) is flash for this chip; SDPA's *flash* is version 2.
#
# The same operator, [`scaled_dot_product_attention`](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html),
# stands in front of all four. Its documentation promises the formula, and no backend.

# %% [markdown]
# ### Question 1.1: Which backend ran? {points}
#
# Do not ask what was requested. Look at what ran. The profiler records every operator of a call, and each backend leaves
# an operator that no other one leaves:
#
# | Backend | Operator |
# |---|---|
# | math | `aten::_scaled_dot_product_attention_math` |
# | flash | `aten::_scaled_dot_product_flash_attention`, on a CPU `aten::_scaled_dot_product_flash_attention_for_cpu` |
# | efficient | `aten::_scaled_dot_product_efficient_attention` |
# | cudnn | `aten::_scaled_dot_product_cudnn_attention` |
#
# Around it stand others: the frame (`aten::scaled_dot_product_attention`), the work inside (`aten::bmm`,
# `aten::_flash_attention_forward`), the backward pass (`..._backward`), and whatever else the program does.

# %% nbgrader={"grade_id": "operators_of", "locked": true}
def operators_of(call) -> list[str]:
    """The names of everything that call() ran on the CPU side, in order, from torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        call()
    events = sorted(recorded.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events]


x = torch.randn(1, 2, 16, 32)
for name in operators_of(lambda: F.scaled_dot_product_attention(x, x, x)):
    print(name)

# %% [markdown]
# Write `backends_in`: from such a list, the names of the backends that ran, one for each call of attention, in their
# order. Forward calls only. A list without attention gives `[]`.
#
# {hint idea}
# Only one operator of a call names the backend. The table lists it; everything else in the list is noise.
#
# {hint plan}
# Make a dictionary from the table's operator names to backends, walk through the list, and keep what is in the
# dictionary.
#
# {hint line}
# Compare whole names: `aten::_flash_attention_forward` contains *flash*, and so does a backward operator. Flash has two
# names.

# %% nbgrader={"grade_id": "q1_1", "solution": true}
def backends_in(operators: list[str]) -> list[str]:
    """The SDPA backends ("math", "flash", "efficient", "cudnn") that a list of operator names shows, in order."""
    ### BEGIN SOLUTION
    backend_of = {
        "aten::_scaled_dot_product_attention_math": "math",
        "aten::_scaled_dot_product_flash_attention": "flash",
        "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
        "aten::_scaled_dot_product_efficient_attention": "efficient",
        "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    }
    return [backend_of[name] for name in operators if name in backend_of]
    ### END SOLUTION


# %% nbgrader={"grade_id": "q1_1_tests", "grade": true, "points": 4}
@check("1.1", "Which backend ran?")
def check_backends_in(backends_in):
    x, turned = torch.randn(1, 2, 16, 32), torch.randn(1, 2, 32, 16).transpose(2, 3)

    def two_calls():
        F.scaled_dot_product_attention(x, x, x)
        F.scaled_dot_product_attention(turned, x, x)

    frame, head = "aten::scaled_dot_product_attention", "aten::_scaled_dot_product_"
    inside = "One attention call leaves several operators, one inside the other; only one of them is in the table."
    cpu = "Look at the table again: on a CPU flash has a name of its own."
    for operators, expected, what, hint in (
        (operators_of(two_calls), ["flash", "math"], "two calls on this CPU", cpu),
        ([frame, head + "flash_attention", "aten::_flash_attention_forward"], ["flash"], "a call of flash on a GPU", inside),
        ([frame, head + "efficient_attention", "aten::_efficient_attention_forward"], ["efficient"], "a call of efficient", inside),
        ([frame, head + "cudnn_attention", "aten::_cudnn_attention_forward"], ["cudnn"], "a call of cuDNN", inside),
        (["aten::cudnn_convolution", "flash attention, step 3", "aten::_efficientzerotensor", "math"], [],
         "a program without attention", "Only the operators of the table tell, by their whole names."),
        ([frame, head + "flash_attention"] * 2, ["flash", "flash"], "two calls that both ran flash", "One entry for each call."),
        ([frame, head + "flash_attention", head + "flash_attention_backward", "aten::_flash_attention_backward"], ["flash"],
         "a forward and a backward pass", "A backward operator is no call of attention."),
        ([frame, head + "flash_attention_for_cpu", head + "flash_attention_for_cpu_backward"], ["flash"],
         "the same on a CPU", "A backward operator is no call of attention."),
    ):
        got = backends_in(list(operators))
        got = list(got) if isinstance(got, tuple) else got
        assert got == expected, f"backends_in of {what} is {got!r}, expected {expected!r}. {hint}\n  {', '.join(operators)[:400]}"


check_backends_in(backends_in).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.backends_in(backends_in).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# The second call of that check has the same shape and the same sizes as the first. Only its strides differ. That was
# enough to lose flash, without a word.

# %% [markdown]
# ### Question 1.2: Ask it why {points}
#
# Torch does know why. `sdpa_kernel(backend)` allows one backend for the length of a `with` block. If that one cannot do
# the call, SDPA raises a `RuntimeError`, and before that it tells its reasons **as warnings**. Look:

# %%
with sdpa_kernel(SDPBackend.FLASH_ATTENTION), warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    try:
        x = torch.randn(1, 2, 16, 32)
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
    except RuntimeError as error:
        print(f"RuntimeError: {error}\n")
for warning in said:
    print(f"warning: {warning.message}\n")

# %% [markdown]
# There is a second way, for CUDA tensors only: `torch.backends.cuda.can_use_flash_attention(params, debug=True)`, with
# `SDPAParams(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa)`, and the same for `efficient` and `cudnn`. For CPU
# tensors it answers `False` and gives no reason, so it does not serve here.
#
# Write `why_not`: the reasons why `backend` cannot do the call, as a list of texts; `[]` if it can. The texts are
# torch's own, word for word, one for each warning that is a reason.
#
# - A headline (`... kernel not used because:`) is no reason. Neither is a line about another backend that your pin
#   switched off (`... has been runtime disabled.`).
# - Cut each warning where ` (Triggered internally` begins. Each reason once.
# - If torch raises and no reason is left, the first line of the exception is the reason.
# - It must work when the caller has silenced warnings, and when it is called inside of another `sdpa_kernel` block.
# - Afterwards everything is as before: the allowed backends, the warning filters.
#
# {hint idea}
# Torch says its reasons as warnings while it fails. Make it fail, and listen.
#
# {hint plan}
# Allow one backend for the call, record warnings, call, and catch the error. No error: no reasons. Otherwise sort out
# what is a headline, cut the rest, drop repetitions.
#
# {hint line}
# The caller may have silenced warnings, so your own filter has to be set inside of your own recording. And what remains
# if torch raises and warned about nothing?

# %% nbgrader={"grade_id": "q1_2", "solution": true}
def why_not(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> list[str]:
    """Why `backend` (a key of BACKENDS) cannot run SDPA on q, k, v with these options; [] if it can."""
    ### BEGIN SOLUTION
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")  # public
        try:
            F.scaled_dot_product_attention(q, k, v, **options)
            return []
        except RuntimeError as error:  # public
            first_line = str(error).splitlines()[0]
    reasons = [str(warning.message).split(" (Triggered internally")[0] for warning in said]
    reasons = [text for text in reasons if "not used because" not in text and "runtime disabled" not in text]
    return list(dict.fromkeys(reasons)) or [first_line]
    ### END SOLUTION


# %% nbgrader={"grade_id": "q1_2_tests", "grade": true, "points": 6}
@check("1.2", "Ask it why")
def check_why_not(why_not):
    why_not = leaves_inputs(why_not)
    def switches():
        return [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")]

    x, turned = torch.randn(2, 2, 16, 32), torch.randn(2, 2, 32, 16).transpose(2, 3)
    calls = {"plain attention": ((x, x, x), {}, ""), "a q with other strides": ((turned, x, x), {}, "last dimension"),
             "dropout": ((x, x, x), {"dropout_p": 0.5}, "dropout"), "causal attention": ((x, x, x), {"is_causal": True}, "")}
    for outside in ("default", "ignore"):
        for name, (tensors, options, word) in calls.items():
            with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
                warnings.simplefilter(outside)
                before, filters = switches(), list(warnings.filters)
                got, by_math = why_not("flash", *tensors, **options), why_not("math", *tensors, **options)
                after, filters_after = switches(), list(warnings.filters)
            what = f"why_not of flash for {name}"
            assert isinstance(got, list | tuple), f"{what} should be a list of sentences, and is {got!r}"
            for reason in got:
                assert "not used because" not in reason, f"{what} holds a headline ('... because:'), which is no reason: {reason!r}"
                assert "runtime disabled" not in reason, f"{what} holds {reason!r}: it is no reason, your own pin switched it off"
                assert "Triggered" not in reason, f"{what}: cut each reason where ' (Triggered internally' begins: {reason!r}"
            assert len(set(got)) == len(got), f"{what} says something twice: {got!r}. Each reason once."
            if not word:
                assert not got, f"{what} is {got!r}, but flash runs this here: the list should be empty"
            else:
                silenced = outside == "ignore"
                assert got, f"{what} is empty" + (
                    " while the caller silences warnings: open your own filter inside" if silenced else "; torch refuses the call")
                assert any(word in reason.lower() for reason in got), f"{what} is {got!r}, and torch's reason speaks of {word!r}"
            assert not by_math, f"why_not of math for {name} is {by_math!r}: math runs it, also inside of another sdpa_kernel block"
            assert before == after, "after why_not inside of an sdpa_kernel block other backends are switched on than before"
            assert filters == filters_after, "after why_not the warning filters are others than before: use warnings.catch_warnings()"
    got = why_not("efficient", x, x, x)
    assert got, ("efficient does not exist for CPU tensors, and why_not of it is empty. Torch says so in an exception alone: "
                 "then its first line is the reason")
    assert len(got) == 1 and "\n" not in got[0], f"why_not of efficient should be the exception's first line alone, and is {got!r}"


check_why_not(why_not).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.why_not(why_not).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Which backends does this machine have at all?
#
# **Before you run.** How many of the four will run plain attention in bf16? In fp32? In fp64?

# %%
guesses["backends that run bf16"] = None  # 0 to 4
guesses["backends that run fp32"] = None
guesses["backends that run fp64"] = None
kinds = torch.bfloat16, torch.float32, torch.float64
results["dtypes"] = who_runs({str(kind): (*random_qkv(1, 4, 128, 64, dtype=kind), {}) for kind in kinds})
for kind, row in zip(("bf16", "fp32", "fp64"), results["dtypes"], strict=True):
    beside_guess(f"backends that run {kind}", sum(row[backend] == "runs" for backend in BACKENDS))
if not on_gpu:
    show_recorded("dtypes")

# %% [markdown]
# Torch reports that as *No viable backend*: for CPU tensors the kernels of efficient and cuDNN do not exist.

# %% [markdown]
# ### Question 1.3: A pin that pins {points}
#
# A benchmark named "cuDNN against math" is worth nothing if the first half ran flash. It happens: allow `[cudnn, flash]`,
# give it a shape that cuDNN refuses, and flash runs under cuDNN's name.
#
# Write `pinned_sdpa`: SDPA with one backend **alone**, or `BackendRefused`.
#
# - All options (`attn_mask`, `is_causal`, `scale`, `enable_gqa`, ...) go through to SDPA.
# - If the backend cannot do the call, raise `BackendRefused` with torch's reasons, as `why_not` gives them, in its message. No
#   other backend, no copies of the inputs that nobody asked for.
# - Torch's warnings may appear. Any `RuntimeError` of the call counts as a refusal.
# - If it can, compute attention **once**. Asking first would double each time that you measure with it.
# - It must pin inside of another `sdpa_kernel` block, too, and leave no switch behind. A refusal also leaves none.
#
# {hint idea}
# A pin is `sdpa_kernel` with one backend around one call. The rest is what to do when it fails.
#
# {hint plan}
# Call inside of the block and return the result. Catch the error, find the reasons with `why_not`, and raise the
# exception of your own with them in its message.
#
# {hint line}
# Ask for reasons after the failure, not before: asking computes attention. And hand every option on, by its name.

# %% nbgrader={"grade_id": "q1_3", "solution": true}
def pinned_sdpa(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> torch.Tensor:
    """SDPA of (B, H, S, D) computed by `backend` alone; BackendRefused says why it cannot."""
    ### BEGIN SOLUTION
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # public
        try:
            return F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as error:  # public
            reasons = " ".join(why_not(backend, q, k, v, **options))
            raise BackendRefused(f"{backend} cannot run this call: {reasons}") from error
    ### END SOLUTION


# %% nbgrader={"grade_id": "q1_3_tests", "grade": true, "points": 5}
@check("1.3", "A pin that pins")
def check_pin(pinned_sdpa):
    pinned_sdpa = leaves_inputs(pinned_sdpa)
    def switches():
        return [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")]

    x, turned = torch.randn(2, 4, 16, 32), torch.randn(2, 4, 32, 16).transpose(2, 3)
    few, mask = torch.randn(2, 2, 16, 32), torch.ones(16, 16, dtype=torch.bool).tril(2)
    on_cpu = {f"aten::_scaled_dot_product_{tail}": b for b, tail in (("math", "attention_math"), ("flash", "flash_attention_for_cpu"))}
    before = switches()
    for backend in ("math", "flash"):
        for tensors, options in (((x, x, x), {}), ((x, x, x), {"is_causal": True, "scale": 0.3}), ((x, x, x), {"attn_mask": mask}),
                                 ((x, few, few), {"enable_gqa": True})):
            what, results = f"pinned_sdpa({backend!r}, q, k, v{''.join(f', {name}=...' for name in options)})", []
            for outside in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
                with sdpa_kernel(outside):
                    inner = switches()
                    names = operators_of(lambda t=tensors, o=options, b=backend, r=results: r.append(pinned_sdpa(b, *t, **o)))
                    assert switches() == inner, f"after {what} inside of an sdpa_kernel block other backends are allowed than before"
                ran = [on_cpu[name] for name in names if name in on_cpu]
                assert set(ran) <= {backend}, f"{what} ran {ran}. A pin allows one backend, alone, also inside of another block."
                assert len(ran) == 1, (f"{what} computed attention {len(ran)} times. Compute once: asking first would double every "
                                       "time that you measure.")
            expected = F.scaled_dot_product_attention(*tensors, **options)
            hint = "Do all options reach SDPA?"
            expect_close(results[0], expected, rtol=1e-4, atol=1e-5, what=what, hint=hint)
    for backend, tensors, options, word, what in (
        ("flash", (turned, x, x), {}, "last dimension", "flash of a q with other strides"),
        ("flash", (x, x, x), {"dropout_p": 0.5}, "dropout", "flash with dropout"), ("cudnn", (x, x, x), {}, "", "cudnn on CPU tensors"),
        ("math", (x, x, x), {"attn_mask": torch.zeros(16, 19)}, "", "math with a mask of another size"),
    ):
        ran = []
        try:
            with warnings.catch_warnings(record=True):  # torch's own words about a refusal would stand above this check's
                warnings.simplefilter("always")
                ran = operators_of(lambda b=backend, t=tensors, o=options: pinned_sdpa(b, *t, **o))
        except BackendRefused as refused:
            assert str(refused) and word in str(refused).lower(), f"the message for {what} should hold torch's reason; it is {str(refused)!r}"
        except RuntimeError:
            raise AssertionError(f"a bare RuntimeError came out of pinned_sdpa for {what}: it should raise BackendRefused") from None
        else:
            ran = [on_cpu[name] for name in ran if name in on_cpu]
            copies = " (on copies, which nobody asked for)" if ran == [backend] else ""
            raise AssertionError(f"torch refuses {what}, and pinned_sdpa returned a result all the same{copies}; {ran} ran")
        assert switches() == before, f"after a refusal ({what}) other backends are allowed than before"


check_pin(pinned_sdpa).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.pinned_sdpa(pinned_sdpa).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 1.4: The order of priority {points}
#
# `sdpa_kernel` also takes a list. What does it mean? Torch keeps an *order* in which it asks the backends, and a *set* of
# those that are allowed. A list changes the set, and leaves the order alone. With `set_priority=True`, the list also
# becomes the beginning of the order.
#
# Write `dispatch`, the dispatcher in miniature: the first backend in the order that is allowed and has no reason against
# it. If there is none, raise `BackendRefused`. With `set_priority`, the allowed ones are asked in the order in which
# `allowed` names them.
#
# {hint idea}
# There is an order and a set. A backend runs if it is in the set, has no reason against it, and nobody before it in the
# order could.
#
# {hint plan}
# Choose which list you walk through. Return the first name that passes both conditions. After the loop, nobody was
# left.
#
# {hint line}
# With `set_priority` the list that you walk through changes, and nothing else. What happens after the loop must not be
# silent.

# %% nbgrader={"grade_id": "q1_4", "solution": true}
def dispatch(order: list[str], allowed: list[str], reasons: dict[str, list[str]], set_priority: bool = False) -> str:
    """The backend that runs; `reasons[name]` is [] for a backend that can do the call."""
    ### BEGIN SOLUTION
    for name in allowed if set_priority else order:
        if name in allowed and not reasons[name]:
            return name
    raise BackendRefused(f"none of {allowed} can run this call")
    ### END SOLUTION


# %% nbgrader={"grade_id": "q1_4_tests", "grade": true, "points": 3}
@check("1.4", "The order of priority")
def check_dispatch(dispatch):
    order = ["flash", "efficient", "math", "cudnn"]
    able = {name: [] for name in order}
    no_flash = able | {"flash": ["strides"]}
    is_set, in_turn = "Without set_priority the order of `allowed` says nothing: it is a set.", (
        "With set_priority, the allowed ones are asked in the order in which `allowed` names them.")
    for allowed, reasons, first, expected, hint in (
        (["math", "flash"], able, False, "flash", is_set), (["math", "flash"], able, True, "math", in_turn),
        (["cudnn", "math"], able, False, "math", "That one is not allowed, or not asked first."),
        (["flash", "math"], no_flash, False, "math", "A backend with a reason cannot run."),
        (["flash", "cudnn", "math"], no_flash, True, "cudnn", in_turn),
        (["flash", "cudnn", "math"], no_flash, False, "math", is_set),
    ):
        what = f"dispatch(order={order}, allowed={allowed}, reasons={reasons}, set_priority={first})"
        try:
            got = dispatch(list(order), list(allowed), dict(reasons), first)
        except BackendRefused:
            got = "BackendRefused"
        assert got == expected, f"{what} is {got!r}, expected {expected!r}. {hint}"
    for allowed, first in ((["flash"], False), (["flash"], True)):
        try:
            got = dispatch(list(order), allowed, dict(no_flash), first)
        except BackendRefused:
            continue
        raise AssertionError(f"flash alone is allowed and has a reason against it: raise BackendRefused. dispatch returned {got!r}")


check_dispatch(dispatch).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.dispatch(dispatch).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Now the real one. The next cell allows flash and math with `set_priority=True`: three calls with flash first, then the
# same three with math first.
#
# **Before you run.** Which backend runs in each of the six calls? Which line would you have noticed in a benchmark?

# %%
guesses["calls of six that run flash"] = None  # 0 to 6
q, k, v = random_qkv(1, 4, 256, 64)
numbers = {int(value): name.removesuffix("_ATTENTION").lower() for name, value in SDPBackend.__members__.items()}
calls = {
    "as it is": ((q, k, v), {}),
    "q with other strides": ((torch.randn(1, 4, 64, 256, device=device, dtype=dtype).transpose(2, 3), k, v), {}),
    "dropout": ((q, k, v), {"dropout_p": 0.1}),
}
F.scaled_dot_product_attention(q, k, v)  # a GPU's order is settled by the first call
order = [numbers[n] for n in torch._C._get_sdp_priority_order() if numbers.get(n) in BACKENDS]
print("torch asks in this order:", ", ".join(order))
rows = []
for first in ("flash", "math"):
    second = "math" if first == "flash" else "flash"
    for name, (tensors, options) in calls.items():
        with sdpa_kernel([BACKENDS[first], BACKENDS[second]], set_priority=True):
            ran = backends_in(operators_of(functools.partial(F.scaled_dot_product_attention, *tensors, **options)))
        refused = reasons_against(first, *tensors, **options)
        rows.append({"allowed": f"{first}, then {second}", "call": name, "ran": ran[0], "refused by the first": refused[0][:50] if refused else ""})
show(rows, "allowed")
results["order"] = [{"torch asks": ", ".join(order)} | row for row in rows]
beside_guess("calls of six that run flash", sum(row["ran"] == "flash" for row in rows))
if not on_gpu:
    show_recorded("order")

# %% [markdown]
# Allowing two backends says which may run. It does not say which will: torch still asks them in its own order. On a CPU even
# `set_priority` changes nothing: the dispatcher for CPU tensors knows flash and math and asks flash first, whatever the order
# says. You would not have known without looking at the operators.
#
# Look at the order that was printed. A CPU never uses it. Where math stands before cuDNN, as in the order that torch starts
# with, cuDNN can never run, because math takes every call. For a GPU like the H200 torch moves cuDNN to the front: in the
# table of Part 6 the default is cuDNN for every shape. The figure at the top of this part shows that order.

# %% [markdown]
# # Part 2: Four programs, one formula
#
# All backends compute $\text{softmax}(QK^\top/\sqrt{D})\,V$. *Math* does it with two products, a softmax and some helpers,
# and the score matrix lies in memory. The others fuse: scores exist for one tile at a time, on the chip. Lab 1 counted
# one head of each. Real calls have grouped heads, a mask, and keys that are longer than the queries.

# %% [markdown]
# ### Question 2.1: FLOPs and bytes of attention {points}
#
# Count a call with `q` (B, H, Sq, D) and `k`, `v` (B, Hkv, Sk, D). `attention_costs` returns three numbers:
#
# 1. **FLOPs** of the two matrix products, only for the (query, key) pairs that the mask lets through. With `causal=True`
#    the last query sees the last key: query $i$ sees the keys $0 \dots i + S_k - S_q$.
# 2. **fused bytes**: `q`, `k`, `v` read once, the output written once.
# 3. **unfused bytes**: those, and the matrix of scores for all query heads: written by the first product, read and
#    written by the softmax, read by the second product. A mask does not make the matrix smaller.
#
# A group of query heads shares its keys and values. Nobody copies them. (SDPA's own `is_causal` lets query $i$ see the
# keys $0 \dots i$. Where Sq = Sk that is the same.)
#
# {hint idea}
# Count pairs first. FLOPs follow from pairs and heads; bytes follow from the shapes of tensors.
#
# {hint plan}
# Pairs: all, or for causal the sum over the queries of the keys that each sees. Elements: q and output have the
# queries' shape, k and v that of the keys. The score matrix has a number for each pair of each query head, masked or
# not.
#
# {hint line}
# For causal, write down how many keys the first and the last of 3 queries over 6 keys see, and count how many times the
# scores cross the memory.

# %% nbgrader={"grade_id": "q2_1", "solution": true}
def attention_costs(
    batch: int, heads: int, kv_heads: int, query_len: int, kv_len: int, head_dim: int, dtype: torch.dtype,
    causal: bool = False,
) -> tuple[int, int, int]:
    """(FLOPs, fused bytes, unfused bytes) of one attention call."""
    ### BEGIN SOLUTION
    pairs = query_len * kv_len
    if causal:
        pairs = query_len * (kv_len - query_len) + query_len * (query_len + 1) // 2
    elements = 2 * batch * heads * query_len * head_dim + 2 * batch * kv_heads * kv_len * head_dim
    scores = 4 * batch * heads * query_len * kv_len
    return 4 * batch * heads * head_dim * pairs, elements * dtype.itemsize, (elements + scores) * dtype.itemsize
    ### END SOLUTION


# %% nbgrader={"grade_id": "q2_1_tests", "grade": true, "points": 5}
@check("2.1", "FLOPs and bytes of attention")
def check_attention_costs(attention_costs):
    # 5 sequences, 6 query heads over 2 key heads, 3 queries, 7 keys, D = 10, bf16
    got = attention_costs(5, 6, 2, 3, 7, 10, torch.bfloat16)
    assert isinstance(got, tuple | list) and len(got) == 3, f"expected (FLOPs, fused bytes, unfused bytes), got {got!r}"
    where = "5 sequences, 6 heads over 2 key heads, 3 queries, 7 keys, D = 10, bf16:"
    expect_number(got[0], 25_200, rel=0, unit="FLOPs", what=f"{where} the number of FLOPs", mistakes={
        "Count FLOPs for query heads: each has its own scores.": 8_400, "Each sequence counts.": 5_040,
        "A multiply-accumulate is two FLOPs, and there are two products.": 12_600})
    expect_number(got[1], 6_400, rel=0, unit="bytes", what=f"{where} the fused size", mistakes={
        "Keys and values have kv_heads heads, and the group shares them.": 12_000, "The output is written, too.": 4_600,
        "These are elements: multiply by dtype.itemsize.": 3_200, "Each sequence counts.": 1_280,
        "Queries and outputs have the queries' length, keys and values that of the keys.": 4_800,
        "Queries and outputs have the heads of the queries.": 4_000})
    expect_number(got[2], 11_440, rel=0, unit="bytes", what=f"{where} the unfused size", mistakes={
        "The scores travel four times: written, read and written by the softmax, read.": 8_920,
        "The matrix of scores is missing.": 6_400, "The scores travel four times, not three.": 10_180,
        "The scores travel four times, not once.": 7_660, "There are scores for all query heads.": 8_080,
        "These are elements: multiply by dtype.itemsize.": 5_720,
        "Keys and values have kv_heads heads, and the group shares them.": 17_040})
    causal = attention_costs(5, 6, 2, 3, 7, 10, torch.bfloat16, causal=True)
    expect_number(causal[0], 21_600, rel=0, unit="FLOPs", what="the same, causal: the queries see 5, 6 and 7 keys;", mistakes={
        "The mask takes pairs away: causal costs fewer FLOPs.": 25_200,
        "The last query sees the last key: query i sees i + 1 + (kv_len - query_len) keys.": 7_200,
        "Half of all pairs leaves out half of the diagonal.": 12_600})
    expect_number(causal[2], 11_440, rel=0, unit="bytes", what="the same, causal: the unfused size", mistakes={
        "The mask takes no bytes away: the whole score matrix is written, and read.": 10_720})
    wide = attention_costs(1, 4, 4, 5, 5, 6, torch.float64, True)
    expect_number(wide[0], 1_440, rel=0, unit="FLOPs", what="4 heads, 5 queries and keys, D = 6, causal:", mistakes={
        "Half of all pairs leaves out half of the diagonal.": 1_200})
    expect_number(wide[1], 3_840, rel=0, unit="bytes", what="4 heads, 5 queries and keys, D = 6, fp64: the fused size")


check_attention_costs(attention_costs).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.attention_costs(attention_costs).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 2.2: Error against float64 {points}
#
# "The outputs agree" means nothing before you say with what, and how well. The yardstick is attention computed in
# float64 **from the very inputs that the backend got**. They may be bf16: then the bf16 numbers are the true inputs, and
# their own rounding is not the backend's fault.
#
# Write `errors(out, q, k, v, causal)`, two numbers:
# 1. the largest absolute error;
# 2. the relative root mean square: $\sqrt{\text{mean}((O - O_{64})^2)\,/\,\text{mean}(O_{64}^2)}$.
#
# Heads may be grouped: query head $h$ reads key head $h \,//\, (H / H_{kv})$. The lengths are equal. The reference
# stays in float64 to the end: rounded to the dtype of `out`, it would hide what you look for. Write the reference
# yourself (SDPA on float64 inputs may help): one of the course or of another library does not count.
#
# {hint idea}
# The reference is attention in float64, computed from the inputs as they are. The error is what remains after
# subtracting it.
#
# {hint plan}
# Turn q, k and v into float64, give every query head its key head, compute scores, mask if causal, softmax, product.
# Then the two numbers from the difference.
#
# {hint line}
# Which query heads share key head 0: the first ones, or every Hkv-th? And keep the reference in float64 until after the
# subtraction.

# %% nbgrader={"grade_id": "q2_2", "solution": true}
def errors(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False
) -> tuple[float, float]:
    """(largest absolute error, relative rms error) of an attention output against float64."""
    ### BEGIN SOLUTION
    group = q.shape[1] // k.shape[1]
    keys, values = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = q.double() @ keys.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if causal:
        hidden_keys = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden_keys, -math.inf)
    exact = torch.softmax(scores, dim=-1) @ values
    difference = out.double() - exact
    rms = (difference.square().mean() / exact.square().mean()).sqrt()
    return difference.abs().max().item(), rms.item()
    ### END SOLUTION


# %% nbgrader={"grade_id": "q2_2_tests", "grade": true, "points": 4}
@check("2.2", "Error against float64")
def check_errors(errors):
    errors = leaves_inputs(errors)
    q, k, v = torch.randn(2, 6, 20, 10), torch.randn(2, 2, 20, 10), torch.randn(2, 2, 20, 10)
    for causal in (False, True):
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=True)
        other = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=not causal, enable_gqa=True)
        turned = F.scaled_dot_product_attention(q.double(), k.repeat(1, 3, 1, 1).double(), v.repeat(1, 3, 1, 1).double(),
                                                is_causal=causal)
        noise = torch.rand_like(exact)
        for out, what in ((exact.float(), "a float32 output without an error but its rounding"),
                          ((exact + noise).float(), "an output that is up to 1 too large"), (3 * exact.float(), "three times the output")):
            got = errors(out, q, k, v, causal)
            assert isinstance(got, tuple | list) and len(got) == 2, f"errors should be (largest, rms), two numbers, and is {got!r}"
            d, what = (out.double() - exact), f"{what}, 6 heads over 2, causal={causal}"
            largest, rms = d.abs().max().item(), (d.square().mean() / exact.square().mean()).sqrt().item()
            known = {"The reference is causal when causal is True, and only then.": (out - other).abs().max().item(),
                     "Query head h reads key head h // (H / Hkv): neighbours share.": (out - turned).abs().max().item(),
                     "The largest error: take the maximum, not the mean.": d.abs().mean().item(),
                     "Take the absolute value first.": d.max().item() if d.max() != d.abs().max() else math.nan}
            if what.startswith("a float32") and largest > 0 and float(got[0]) == 0:
                raise AssertionError("the error of a float32 output is its rounding, about 1e-8, and not 0: the reference stays in "
                                     "float64. Rounded to the output's dtype, it hides the rounding.")
            expect_number(got[0], largest, rel=1e-3, what=f"the largest error of {what},", mistakes=known)
            mean = exact.square().mean().sqrt().item()
            expect_number(got[1], rms, rel=1e-3, what=f"the relative rms error of {what},", mistakes={
                "Relative: divide by the root mean square of the reference.": rms * mean, "Root mean square: take the root.": rms**2,
                "That is a mean of absolute values, not a root mean square.": (d.abs().mean() / exact.abs().mean()).item(),
                "Relative to the reference, not to the output.": (d.square().mean() / out.double().square().mean()).sqrt().item()})
    small = [t.bfloat16() for t in (q, k, v)]
    exact = F.scaled_dot_product_attention(*(t.double() for t in small), enable_gqa=True)
    out = exact.bfloat16()
    _, rms = errors(out, *small)
    right = ((out.double() - exact).square().mean() / exact.square().mean()).sqrt().item()
    expect_number(rms, right, rel=1e-3, what="the rms error of a bf16 output that is rounded and nothing else (about 2e-3)", mistakes={
        "The reference stays in float64: rounded to the output's dtype, it hides the rounding.": 0.0})


check_errors(errors).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.errors(errors).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Everything is ready for the table: time, memory, launches and error of each backend, on the same tensors. Each call is pinned
# to its backend, and the operators prove what ran. The calls take turns (math, flash, flash, math, ...), so that a machine that
# slows down slows all of them down; *from* and *to* are the 95% interval of the median.
#
# **Before you run.** Math against flash: by what factor in time, by what factor in memory? How many kernels (on a CPU:
# operators) does each take? Which one is *more* exact?

# %%


def measure_all(batch, heads, length, head_dim, causal) -> pd.DataFrame:
    """A row for each backend that runs this shape here; their calls take turns, and the operators prove what ran."""
    q, k, v = random_qkv(batch, heads, length, head_dim)
    flops, fused, unfused = attention_costs(batch, heads, heads, length, length, head_dim, dtype, causal)
    calls = {b: pinned(b, q, k, v, is_causal=causal) for b in running_backends(q, k, v, is_causal=causal)}
    timed, rows = time_in_turn(calls), []
    for backend, call in calls.items():
        ran = backends_in(operators_of(call))
        assert ran == [backend], f"{backend} was pinned, and {ran} ran"
        m = timed[backend]
        _, added_gb = benchmark_memory(call, n_warmup=1, n_repeat=1)
        launches = count_cuda_kernels(profile(call, steps=2, warmup=1))["total"]
        largest, rms = errors(call()[:1], q[:1], k[:1], v[:1], causal)
        rows.append({
            "B": batch, "H": heads, "S": length, "D": head_dim, "causal": causal, "backend": backend, "ran": ran[0],
            "ms": m.median_ms, "from": m.interval_ms[0], "to": m.interval_ms[1], "added MB": added_gb * 1e3,
            "kernels" if on_gpu else "operators": launches, "largest error": largest, "rms error": rms,
            "TFLOP/s": flops / m.median_ms / 1e9, "MB moved (predicted)": (unfused if backend == "math" else fused) / 1e6,
        })
    return pd.DataFrame(rows)


guesses["math / flash, time"] = None  # a ratio
guesses["math / flash, added memory"] = None
guesses["operators (on a GPU: kernels) of math"] = None
guesses["the more exact one"] = None  # "math", "flash" or "equal"
tables = []
for length, causal in ((4096, False), (4096, True)) if on_gpu else ((1024, False), (1024, True)):
    print(f"measuring {length} tokens, {'causal' if causal else 'full'}, in turn ...", flush=True)
    tables.append(measure_all(*((2, 16) if on_gpu else (1, 4)), length, 128 if on_gpu else 64, causal))
backend_table = pd.concat(tables, ignore_index=True)
results["backends"] = backend_table.to_dict("records")
show(backend_table.drop(columns=["ran", "B", "H", "D"]), ["S", "causal", "backend"])
math_row, flash_row = (tables[0].set_index("backend").loc[name] for name in ("math", "flash"))
beside_guess("math / flash, time", float(math_row["ms"] / flash_row["ms"]))
beside_guess("math / flash, added memory", float(math_row["added MB"] / flash_row["added MB"]))
beside_guess("operators (on a GPU: kernels) of math", int(math_row["kernels" if on_gpu else "operators"]))
ratio = math_row["rms error"] / flash_row["rms error"]
beside_guess("the more exact one", "equal" if 0.8 < ratio < 1.25 else "math" if ratio < 1 else "flash")
if not on_gpu:
    show_recorded("backends")

# %% [markdown]
# Is a ratio of two of these numbers real? `compare` takes turns call by call and gives an interval for the ratio itself: an
# interval that contains 1 says that this measurement cannot tell the two apart.

# %%
guesses["how many times faster than math flash is"] = None
q, k, v = random_qkv(2, 16, 4096, 128) if on_gpu else random_qkv(1, 4, 1024, 64)
for backend in running_backends(q, k, v):
    if backend != "flash":
        versus = compare(pinned(backend, q, k, v), pinned("flash", q, k, v), labels=(backend, "flash"), max_seconds=3 if on_gpu else 6)
        print(versus)
        if backend == "math":
            beside_guess("how many times faster than math flash is", float(versus.speedup))

# %% [markdown]
# ## Host time and device time
#
# A call costs twice. The **host** (the CPU that runs Python) checks the arguments, asks the dispatcher, allocates the output and
# launches. The **device** computes. A long call hides the first behind the second. A short one is nothing but the first, and
# then no faster kernel helps.
#
# So the next cell measures a call on 16 tokens, where there is hardly anything to compute, and one of full size. On a GPU
# the short one is measured with a clock around many calls that nobody waits for; a CPU is host and device in one, so there
# its time on 16 tokens stands for the host's part. Two calls of each size: as torch decides, and pinned in a `with` block.
#
# **Before you run.** How many microseconds does torch need before it computes? And the `with` block on top?

# %%
guesses["host time of a call, us"] = None
guesses["what the pin adds, us"] = None
rows = []
for size, tensors in (("16 tokens", random_qkv(1, 4, 16, 64)), ("full size", random_qkv(2, 16, 4096, 128) if on_gpu else random_qkv(1, 4, 1024, 64))):
    ways = {"torch decides": functools.partial(F.scaled_dot_product_attention, *tensors), "pinned to flash": pinned("flash", *tensors)}
    for way, m in time_in_turn(ways).items():
        host_us, whole_us = math.nan, m.median_ms * 1e3
        if size == "16 tokens":
            host = []
            for _ in range(5):  # the calls are only issued: a GPU works while the clock runs on
                began = time.perf_counter()
                for _ in range(200):
                    ways[way]()
                host.append((time.perf_counter() - began) / 200 * 1e6)
            host_us = sorted(host)[2]
            if on_gpu:
                torch.cuda.synchronize()
            else:
                whole_us = host_us  # a CPU is host and device in one
        rows.append({"call": f"{size}, {way}", "host us": host_us, "device us" if on_gpu else "whole call us": whole_us})
results["host"] = rows
show(rows, "call")
beside_guess("host time of a call, us", rows[0]["host us"])
beside_guess("what the pin adds, us", rows[1]["host us"] - rows[0]["host us"])
if not on_gpu:
    show_recorded("host")

# %% [markdown]
# Look at what follows. A decode step of a small model runs hundreds of such calls, each shorter on the device than its launch:
# the GPU waits for Python. A faster attention kernel gains nothing there; fewer launches do (a CUDA graph, a compiled step). And
# a benchmark that pins inside of the timed call measures the pin as well: for short calls, stand the block around the loop.

# %% [markdown]
# Now the traces, one above the other. Each is one call: on a CPU the operators inside each other, on a GPU also the
# kernels. To walk through one, open [ui.perfetto.dev](https://ui.perfetto.dev) and drop its file, in `out`, on it.
#
# In the figure an operator lasts as long as everything that runs inside of it. The table counts *self* time: without what
# runs inside. `isneginf`, `all` and `where` are parts of `_safe_softmax`: they look for rows that are masked in full. On a GPU the names of the
# kernels say for which chip each was written: look for `sm80` and `sm90`. To see more of a kernel than its time, such as the
# use of the tensor cores, Nsight Compute is the tool; `nsys profile labs bench run ...` records a timeline for each backend.
#
# **Before you run.** In math's trace, which operator will take most of the time by itself? How large is its share?

# %%
guesses["math's longest operator or kernel"] = None  # a name
guesses["its share"] = None  # 0 to 1
q, k, v = random_qkv(2, 16, 4096, 128) if on_gpu else random_qkv(1, 4, 1024, 64)
running = running_backends(q, k, v)
figure, axes = plt.subplots(len(running), 1, figsize=(9, 3.2 * len(running)), squeeze=False)
trace_rows = []
for backend, ax in zip(running, axes[:, 0], strict=True):
    path = output_path(f"sdpa_trace_{backend}.json")
    with sdpa_kernel(BACKENDS[backend]):
        profile(F.scaled_dot_product_attention, q, k, v, steps=1, warmup=2, trace_path=path)
    step = [event for event in read_trace(path) if event.name.startswith("ProfilerStep#")][-1]
    plot_timeline(path, ax=ax, window_ms=(step.start_us / 1e3, step.end_us / 1e3), title=f"{backend} ({path.name})")
    for row in summarize_trace(path, top=4):
        trace_rows.append({"backend": backend, "name": row["name"][:70], "count": row["count"],
                           "self ms": row["self_us"] / 1e3, "share": row["share"]})
figure.tight_layout()
plt.show()
results["traces"] = trace_rows
longest = next(row for row in trace_rows if row["backend"] == "math")
beside_guess("math's longest operator or kernel", longest["name"])
beside_guess("its share", float(longest["share"]))
show(trace_rows, "backend")
if not on_gpu:
    show_recorded("traces")

# %% [markdown]
# ### Question 2.3: Explain the table and the traces {points}
#
# With numbers from your table and your traces (and the recorded ones, where you say so):
# 1. Math and a fused backend do the same products. Where does math lose its time? Name operators from its trace and
#    their share.
# 2. "added MB" against "MB moved (predicted)": which tensors does each backend allocate? Why may math allocate less, or
#    more, than the bytes that it moves?
# 3. Causal: by what factor did each backend get faster? Which backend does *not* profit, and what does it do with the
#    masked scores?
# 4. Which backend has the smallest error, and is it the slowest? (In fp32 on a CPU they are level. For bf16, look at the
#    column `rms error` of the recorded table.) What would you need to know before you call the others wrong?
# 5. On the H200, cuDNN is 1.9 times as fast as flash, with the same FLOPs, bytes and algorithm. Which words in the recorded
#    kernel names explain it? And if somebody reports "1.0 times": which two mistakes of Part 1 would you look for?
#
# {hint idea}
# Two products are common to all. What differs is where the scores are in between, and for which chip the kernel was
# written.
#
# {hint plan}
# Read the table for 1, 3 and 4 (ratios of time, of causal to full, of errors), the trace for the operators between the
# products, and the kernel names for 5.
#
# {hint line}
# For 2, ask of each tensor whether it is alive at the same time as the others, and how often it crosses the memory. The
# two counts are not the same.

# %% [markdown] nbgrader={"grade_id": "q2_3", "grade": true, "solution": true, "points": 5}
# 1. Beside the two products (bmm) there are operators that read and write the whole S x S matrix: softmax, the search for
#    rows that are masked throughout (isneginf, all, where), and for bf16 the casts to fp32 and back. In the trace of 1024
#    tokens on a CPU bmm has about half of the time; softmax, isneginf, all and where share the rest.
# 2. Fused: the output and one number a row (the log-sum-exp). Math: scores and probabilities, B·H·S²·itemsize each, and
#    scaled copies of q and k. Allocated is the most that is alive at once; moved is each read and each write, so a tensor
#    that is written once and read twice counts three times. It may allocate more where it makes copies in another dtype.
# 3. Flash gets nearly twice as fast, because it skips tiles above the diagonal. Math computes all scores, adds a mask and
#    throws half of them away: it gets no faster, or slower.
# 4. Math, and it is the slowest: it converts bf16 inputs to fp32 and rounds once, at the end (1.6e-3 on an H200). The
#    fused ones also round P to bf16 (2.27e-3, all three alike). One has to know what the roundings cost that a backend
#    cannot avoid: errors of that size are no mistake.
# 5. `sm90` and `wgmma` in cuDNN's kernel; flash's is the kernel written for sm80 (`flash_fwd_kernel`, mma.sync), which
#    reaches half of the tensor cores' speed there. At 1.0 times: the two runs were the same backend, by a list of allowed backends, so that flash ran under cuDNN's name; or a call
#    that cuDNN refuses (strides, dtype) and that fell through. Proof: operators or kernel names of the timed call.
#
# === BEGIN MARK SCHEME ===
# 1 point for each of the five; numbers from the student's own run in at least three, otherwise take off one.
# 1: softmax / elementwise over S² named from the trace, with a share.
# 2: output and lse against scores and probabilities; allocated (alive at once) is not moved.
# 3: fused skip masked tiles (about 2x); math computes and masks, no gain.
# 4: any sound reading of the table, and the error of rounding the output as a yardstick.
# 5: half for sm90/wgmma against a kernel for sm80; half for pinned to more than one backend or a silent fallback, with
# operators or kernels as proof.
# === END MARK SCHEME ===

# %% [markdown]
# ### Bonus Question 2.4: The backward pass by hand {points}
#
# Training runs attention backward as well. A fused kernel did not keep $P$. It kept the log-sum-exp $L_i$ of each row, and
# computes $P_{ij} = e^{S_{ij} - L_i}$ again, with $S = QK^\top/\sqrt{D}$. With $dO$ the gradient of the output:
#
# $$dV = P^\top dO, \qquad dP = dO\,V^\top, \qquad \delta_i = \sum_d dO_{id}\,O_{id}, \qquad
# dS_{ij} = P_{ij}\,(dP_{ij} - \delta_i),$$
# $$dQ = dS\,K/\sqrt{D}, \qquad dK = dS^\top Q/\sqrt{D}.$$
#
# Five products where forward has two. Write it for (B, H, Sq, D) and (B, H, Sk, D), `lse` (B, H, Sq), with five products at
# most, by torch's operators. The gradients have the dtype of the inputs. $P$ comes from the `lse` that is given. Autograd,
# softmax, logsumexp and SDPA are forbidden; `@` is allowed.
#
# {hint idea}
# The formulas above are the algorithm. The only thing to find out is the shape of each factor.
#
# {hint plan}
# P from the scores and the log-sum-exp, then dV. dP, then delta, then dS. Then dQ and dK.
#
# {hint line}
# delta is one number for each row of P, so it needs a dimension to broadcast. And count in which of the three gradients
# the scale stands.

# %% nbgrader={"grade_id": "bonus_2_4", "solution": true}
def attention_backward(q, k, v, out, lse, dout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients (dq, dk, dv) of attention, from its output and log-sum-exp; no mask."""
    ### BEGIN SOLUTION
    scale = 1 / math.sqrt(q.shape[-1])
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    delta = (dout * out).sum(dim=-1, keepdim=True)
    ds = p * (dout @ v.mT - delta)
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ dout
    ### END SOLUTION


# %% nbgrader={"grade_id": "bonus_2_4_tests", "grade": true, "points": 8}
@check("Bonus 2.4", "The backward pass")
def check_backward(attention_backward):
    attention_backward = leaves_inputs(attention_backward)
    q, k, v = (torch.randn(2, 3, length, 10, requires_grad=True) for length in (6, 9, 9))
    out = F.scaled_dot_product_attention(q, k, v)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    lse = torch.logsumexp(q @ k.mT / math.sqrt(10), dim=-1)
    inputs = [t.detach() for t in (q, k, v, out, lse)]
    with watch_operations() as watch:
        got = attention_backward(*inputs, dout)
    forbid(watch, (*FUSED_ATTENTION, r".*softmax.*", r".*logsumexp.*"), hint="the probabilities are e^(score - lse)")
    assert isinstance(got, tuple | list) and len(got) == 3, f"attention_backward should return (dq, dk, dv), and returned {got!r:.80}"
    hints = {"dq": "dS = P * (dP - delta), delta the sum of dO * O over a row; then dS K and the scale.",
             "dk": "dK is dS transposed times Q, with the scale.", "dv": "dV is P transposed times dO."}
    wide = attention_backward(*(t.double() for t in (*inputs, dout)))
    assert all(t.dtype == torch.float64 for t in wide), "the gradients have the dtype of the inputs: of inputs in float64 they should be float64"
    # without delta, dS would be P * dP: the same as for an output of zeros
    no_delta = attention_backward(*inputs[:3], torch.zeros_like(inputs[3]), inputs[4], dout)
    for name, mine, right, bare in zip(("dq", "dk", "dv"), got, expected, no_delta, strict=True):
        hint = hints[name]
        if name != "dv" and isinstance(mine, torch.Tensor) and torch.equal(mine, bare):
            hint = "delta is missing: the output makes no difference to your gradient."
        hint = known_mistake(mine, {"The scale 1/sqrt(D) is missing in this gradient.": right * math.sqrt(10),
                                    "The scale 1/sqrt(D) stands twice in this gradient.": right / math.sqrt(10),
                                    "Its sign is wrong.": -right}, otherwise=hint)
        expect_close(mine, right, rtol=1e-3, atol=1e-4, what=f"{name} for 6 queries and 9 keys", hint=hint)


check_backward(attention_backward).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.attention_backward(attention_backward).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Forward and backward, timed. Seven products instead of two is 3.5 times the FLOPs.
#
# **Before you run.** Will forward plus backward take 3.5 times as long as forward? For which backend more, for which less?

# %%
guesses["flash, forward and backward / forward"] = None
guesses["math, forward and backward / forward"] = None
q, k, v = random_qkv(2, 16, 4096, 128) if on_gpu else random_qkv(1, 4, 512, 64)
leaves = [t.clone().requires_grad_() for t in (q, k, v)]
dout = torch.randn_like(q)
running = running_backends(q, k, v)


def both_passes(backend):
    """A call of forward and backward, pinned to one backend."""
    forward = pinned(backend, *leaves)
    return lambda: torch.autograd.grad(forward(), leaves, dout)


ways = {f"{b}, forward": pinned(b, q, k, v) for b in running} | {f"{b}, both": both_passes(b) for b in running}
timed = time_in_turn(ways)
rows = []
for backend in running:
    forward_ms, both_ms = timed[f"{backend}, forward"].median_ms, timed[f"{backend}, both"].median_ms
    _, added = benchmark_memory(both_passes(backend), n_warmup=1, n_repeat=1)
    rows.append({"backend": backend, "forward ms": forward_ms, "both ms": both_ms, "ratio": both_ms / forward_ms, "added MB": added * 1e3})
    if backend in ("flash", "math"):
        beside_guess(f"{backend}, forward and backward / forward", both_ms / forward_ms)
results["training"] = rows
show(rows, "backend")
if not on_gpu:
    show_recorded("training")

# %% [markdown]
# # Part 3: Prefill and decode
#
# Serving a language model has two phases. **Prefill** reads the prompt: as many queries as keys. **Decode** writes one
# token after the other: one query, and all keys so far. It is the same formula, and the same four backends. The roofline
# tells them apart.

# %% [markdown]
# ### Question 3.1: Intensity, prefill and decode {points}
#
# Fused attention without a mask; `group` query heads share one head of keys and values. Per key head it reads
# `group` × `query_len` queries, `kv_len` keys and `kv_len` values, and writes as many outputs as queries.
#
# 1. `intensity`: FLOPs/Byte. Derive it on paper first. One of the arguments cancels: which?
# 2. `queries_to_ridge`: the smallest number of queries (an integer) whose intensity reaches `ridge`, for a given `kv_len`.
#    With ever more queries the intensity approaches a limit. If the ridge lies at the limit or beyond, return `None`.
#
# {hint idea}
# FLOPs over bytes, for one key head: write both as products of q, L, g, D and the bytes of a number, and cancel.
#
# {hint plan}
# Derive the intensity on paper. For the second function set it equal to the ridge and solve for the number of queries;
# then look at what the formula does when the ridge is too high.
#
# {hint line}
# The answer is a whole number that reaches the ridge: round in the direction that still reaches it. A denominator of
# zero or below means that no number does.

# %% nbgrader={"grade_id": "q3_1", "solution": true}
def intensity(query_len: int, kv_len: int, group: int, head_dim: int, dtype: torch.dtype) -> float:
    """FLOPs/Byte of fused attention without a mask, `group` query heads to a key head."""
    ### BEGIN SOLUTION
    flops = 4 * group * query_len * kv_len * head_dim
    elements = 2 * group * query_len * head_dim + 2 * kv_len * head_dim
    return flops / (elements * dtype.itemsize)
    ### END SOLUTION


def queries_to_ridge(ridge: float, kv_len: int, group: int, head_dim: int, dtype: torch.dtype) -> int | None:
    """Smallest query_len with intensity(...) >= ridge; None if no number of queries gets there."""
    ### BEGIN SOLUTION
    # 2 g q L / ((g q + L) b) >= r   <=>   g q (2 L - r b) >= r b L
    slack = 2 * kv_len - ridge * dtype.itemsize
    if slack <= 0:
        return None
    return math.ceil(ridge * dtype.itemsize * kv_len / (group * slack))
    ### END SOLUTION


# %% nbgrader={"grade_id": "q3_1_tests", "grade": true, "points": 5}
@check("3.1", "Intensity, prefill and decode")
def check_intensity(intensity, queries_to_ridge):
    # 4 FLOPs a pair and number; (2 x 3 x 20 + 2 x 120) numbers of 2 bytes: 3 heads share the keys
    expect_number(intensity(20, 120, 3, 10, torch.bfloat16), 40.0, rel=1e-6, unit="FLOPs/Byte",
                  what="the intensity of 20 queries, 120 keys, 3 heads to a key head, bf16,", mistakes={
        "The heads of a group share keys and values: they are read once.": 120 / 7,
        "These are FLOPs per element: divide by the bytes of an element.": 80.0, "Two FLOPs a multiply-accumulate.": 20.0,
        "Each query head of the group has queries and an output of its own.": 360 / 7,
        "Keys are as long as the cache, not as the queries.": 15.0})
    expect_number(intensity(20, 120, 3, 10, torch.float32), 20.0, rel=1e-6, unit="FLOPs/Byte", what="the same in fp32", mistakes={
        "An element has dtype.itemsize bytes.": 40.0})
    n = queries_to_ridge(50.3, 120, 3, 10, torch.bfloat16)
    assert isinstance(n, int), f"a number of queries is an integer; got {n!r}"
    expect_number(n, 29, rel=0, what="queries_to_ridge of a ridge of 50.3, 120 keys, 3 heads to a key head, bf16", mistakes={
        "One query fewer still lies left of the ridge: round up.": 28, "The group shares the keys, too: group * queries count.": 87,
        "Queries and outputs have bytes as well, not only the cache.": 17, "An element has itemsize bytes.": 11})
    n = queries_to_ridge(50.7, 1000, 1, 64, torch.bfloat16)
    expect_number(n, 54, rel=0, what="queries_to_ridge of a ridge of 50.7, 1000 keys, 1 head, bf16", mistakes={
        "One query fewer still lies left of the ridge: round up.": 53,
        "Queries and outputs have bytes as well, not only the cache.": 51})
    for ridge in (12.0, 10.0):
        n = queries_to_ridge(ridge, 10, 4, 64, torch.bfloat16)
        assert n is None, (f"over 10 keys in bf16 the intensity stays below 10 however many queries there are, and the ridge is "
                           f"{ridge}: return None. Got {n!r}")


check_intensity(intensity, queries_to_ridge).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.intensities(intensity, queries_to_ridge).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Put it under the roof. Below are prefill over three lengths and three head dimensions, and decode, each run by flash.
#
# **Before you run.** Intensity does not depend on the head dimension. Will the measured points? And how far left will
# decode lie?

# %%
heads, kv_long = (16, 65536) if on_gpu else (4, 16384)
lengths, head_dims = ((512, 2048, 8192), (64, 128, 256)) if on_gpu else ((64, 256, 1024), (32, 64, 128))
cases = [(f"S {length}", length, length, head_dims[1]) for length in lengths]
cases += [(f"D {head_dim}", lengths[1], lengths[1], head_dim) for head_dim in (head_dims[0], head_dims[2])]
cases += [("decode", 1, kv_long, head_dims[1]), ("16 queries", 16, kv_long, head_dims[1])]
guesses["share of the roof, longest prefill"] = None  # 0 to 1
guesses["share of the roof, decode"] = None
tensors = {name: random_qkv(4, heads, n, d, kv_length=m) for name, n, m, d in cases}
timed = time_in_turn({name: pinned("flash", *qkv) for name, qkv in tensors.items()})
measured, rows = {}, []
for name, query_len, kv_len, head_dim in cases:
    flops, fused, _ = attention_costs(4, heads, heads, query_len, kv_len, head_dim, dtype)
    ms = timed[name].median_ms
    point = intensity(query_len, kv_len, 1, head_dim, dtype), flops / ms / 1e9
    measured[name] = point
    rows.append({"case": name, "queries": query_len, "keys": kv_len, "D": head_dim, "ms": ms, "FLOPs/Byte": point[0],
                 "TFLOP/s": point[1], "GB/s": fused / ms / 1e6,
                 "share of roof": point[1] / roofs.attainable_tflops(point[0], dtype_name)})
results["roofline"] = rows
plot_roofline(roofs.name, peak, bandwidth, measured=measured, title="Flash attention: prefill (S at one D, D at one S) and decode")
plt.show()
show(rows, "case")
beside_guess("share of the roof, longest prefill", rows[2]["share of roof"])
beside_guess("share of the roof, decode", rows[5]["share of roof"])
if max(row["share of roof"] for row in rows) > 1.05:
    print("A point stands above its roof: the roofs were measured while something else ran. Close it, and run the setup cell again.")
if not on_gpu:
    show_recorded("roofline")

# %% [markdown]
# A point above the roof? Roofs are measured in the setup cell, so a machine that was busy then has roofs that are too low: run it
# again. A decode point may also be above the memory roof because keys and values came from the cache of the chip.
#
# Decode reads the whole cache for one query. A second query, or a group that shares the keys, would ride along for
# nothing. That is what speculative decoding and grouped-query attention live on. How many may ride?
#
# **Before you run.** From `queries_to_ridge`: how many queries until decode is limited by compute? Up to which number
# will the time stay within a quarter of that of one query?

# %%
guesses["queries that ride for at most 1.25 times the time"] = None  # a power of two
heads, kv_long = (16, 65536) if on_gpu else (4, 16384)
ridge = peak / bandwidth
print(f"this machine, {dtype_name}: ridge {ridge:.1f}, {queries_to_ridge(ridge, kv_long, 1, 64, dtype)} queries")
for name in ("A100", "H200", "B200"):
    if name in GPU_SPECS:
        at = get_ridge_point(name, "bf16")
        print(f"{name}, bf16: ridge {at:.0f}, {queries_to_ridge(at, 65536, 1, 64, torch.bfloat16)} queries, "
              f"{queries_to_ridge(at, 65536, 8, 64, torch.bfloat16)} with 8 heads to a key head")
query_lens = (1, 2, 4, 8, 16, 32, 64, 128, 256)
tensors = {n: random_qkv(2, heads, n, 64, kv_length=kv_long) for n in query_lens}
timed = time_in_turn({n: pinned("flash", *qkv) for n, qkv in tensors.items()}, iterations=9)
rows = [{"queries": n, "ms": m.median_ms, "from": m.interval_ms[0], "to": m.interval_ms[1], "ms a query": m.median_ms / n}
        for n, m in timed.items()]
flat = max(row["queries"] for row in rows if row["ms"] <= 1.25 * rows[0]["ms"])
riding = pd.DataFrame(rows)
results["queries"] = rows
figure, ax = plt.subplots(figsize=(6.5, 3.2))
ax.plot(riding["queries"], riding["ms"], **series(0).line, label="measured")
ax.set(xscale="log", yscale="log")
ax.axvline(queries_to_ridge(ridge, kv_long, 1, 64, dtype), color="black", linestyle="--", linewidth=1, label="ridge")
plain_ticks(ax.xaxis, riding["queries"].tolist())
plain_ticks(ax.yaxis, subs=(1, 1.5, 2, 3, 5, 7))
ax.legend()
style_axes(ax, x="queries", y="time (ms)", title=f"One call over {kv_long:,} keys")
plt.show()
show(rows, "queries")
beside_guess("queries that ride for at most 1.25 times the time", flat)
if not on_gpu:
    show_recorded("queries")

# %% [markdown]
# ### Question 3.2: Split the keys {points}
#
# A fused kernel gives each program one tile of queries of one head. Prefill has thousands of tiles. A decode step of 1
# sequence with 8 heads has 8. An H200 has 132 multiprocessors, so 124 idle.
#
# **Split-KV** (flash decoding) cuts the keys into parts and starts a program for each part. A part cannot finish the
# softmax: it does not know the other parts' sums. So it returns its own output $O_p$, and its own log-sum-exp
# $L_p = \log\sum_{j\in p} e^{s_j}$. A second, small kernel merges:
#
# $$O = \sum_p \frac{e^{L_p}}{\sum_r e^{L_r}}\, O_p.$$
#
# ![Split-KV: the keys are cut into parts, each part gives an output and a log-sum-exp, and a second kernel merges them](assets/lab4_split_kv.svg)
#
# 1. `attend_part(q, k, v)`: the part's output and log-sum-exp, of `q` (B, H, Sq, D) and `k`, `v` (B, Hkv, Lp, D). Both
#    in **float32**, of shapes (B, H, Sq, D) and (B, H, Sq). Natural logarithm. SDPA cannot give you the second, and is
#    forbidden here: write both, with two matrix products at most; `torch.softmax` and `torch.logsumexp` are allowed.
#    Heads are grouped as in Question 2.2.
# 2. `split_kv_attention(q, k, v, splits)`: cut the keys into `splits` parts of sizes that differ by at most 1, attend
#    to each part **alone**, once for all queries, by `attend_part`, and merge, in tensors of torch. The result has the dtype of `q`.
#    Scores may be in the thousands, so $e^{L_p}$ as it stands overflows. There may be more splits than keys: some parts
#    are empty then.
#
# {hint idea}
# A part knows its own maximum and its own sum. Two numbers, its output and its log-sum-exp, are enough to merge it with
# the others.
#
# {hint plan}
# `attend_part` is attention as in Question 2.2, in float32, with the log-sum-exp beside it. `split_kv_attention`: cut k
# and v alike, attend to each part, stack outputs and log-sum-exps, weigh and add.
#
# {hint line}
# The weights of the parts add up to 1, and come from the log-sum-exps by an operation that subtracts the maximum by
# itself. Which parts have no keys at all?

# %% nbgrader={"grade_id": "q3_2", "solution": true}
def attend_part(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, H, Sq, D) and log-sum-exp (B, H, Sq) of attention over these keys, in float32; no mask."""
    ### BEGIN SOLUTION
    group = q.shape[1] // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = q.float() @ keys.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)
    ### END SOLUTION


def split_kv_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, splits: int) -> torch.Tensor:
    """Attention of q over k, v, computed in `splits` parts of the keys and merged."""
    ### BEGIN SOLUTION
    parts = zip(k.tensor_split(splits, dim=2), v.tensor_split(splits, dim=2), strict=True)
    outputs, lses = zip(*(attend_part(q, *part) for part in parts if part[0].shape[2]), strict=True)
    weights = torch.softmax(torch.stack(lses), dim=0)
    return (weights[..., None] * torch.stack(outputs)).sum(dim=0).to(q.dtype)
    ### END SOLUTION


# %% nbgrader={"grade_id": "q3_2_part_tests", "grade": true, "points": 3}
@check("3.2", "Attention over one part")
def check_attend_part(attend_part):
    attend_part = leaves_inputs(attend_part)
    for dtype, large in ((torch.float32, 1), (torch.bfloat16, 1), (torch.float32, 30)):
        q = large * torch.randn(2, 6, 3, 10, dtype=dtype)
        k, v = large * torch.randn(2, 2, 9, 10, dtype=dtype), torch.randn(2, 2, 9, 10, dtype=dtype)
        with watch_operations() as watch:
            got = attend_part(q, k, v)
        forbid(watch, FUSED_ATTENTION, hint="write the products and the softmax yourself: SDPA does not return the lse")
        assert isinstance(got, tuple | list) and len(got) == 2, f"attend_part should return (output, lse), and returned {got!r:.80}"
        wide = [t.float() for t in (q, k, v)]
        turned = [t.repeat(1, 3, 1, 1) for t in wide[1:]]
        expected = F.scaled_dot_product_attention(*wide, enable_gqa=True)
        hint = known_mistake(got[0], {
            "Query head h reads key head h // (H / Hkv): neighbours share, so repeat_interleave, not repeat.":
                F.scaled_dot_product_attention(wide[0], *turned),
            "Divide the scores by sqrt(D).": F.scaled_dot_product_attention(*wide, enable_gqa=True, scale=1.0),
            "Divide the scores by sqrt(D), not by D.": F.scaled_dot_product_attention(*wide, enable_gqa=True, scale=0.1)},
            otherwise="Divide by the part's own sum.")
        what = f"attend_part of 6 heads over 2 in {dtype}{', scores in the thousands' if large > 1 else ''}".replace("torch.", "")
        expect_close(got[0], expected, rtol=1e-3, atol=1e-3 if large > 1 else 1e-5, what=f"the output of {what}", hint=hint)
        # e^lse is the sum of all e^score: over one key it is that score, over the same key n times it is log(n) more
        _, one = attend_part(q, k[:, :, :1], v[:, :, :1])
        score = (wide[0] * wide[1][:, :, :1].repeat_interleave(3, dim=1)).sum(-1) / math.sqrt(10)
        expect_close(one, score, rtol=1e-3, atol=1e-3, what=f"the lse over one key, {what}", hint=known_mistake(one, {
            "It is the natural logarithm, not that to base 2.": score / math.log(2),
            "It is the log of the sum, not the sum.": score.exp(), "The scores are scaled by 1/sqrt(D), also in the lse.": score * math.sqrt(10),
            "The maximum that was subtracted is missing: add it again.": torch.zeros_like(score)}))
        _, five = attend_part(q, k[:, :, :1].expand(2, 2, 5, 10), v[:, :, :5])
        expect_close(five, score + math.log(5), rtol=1e-3, atol=1e-3, what=f"the lse over five equal keys, {what}",
                     hint=known_mistake(five, {"It is the natural logarithm of the sum of all e^score, not the largest score.": score},
                                        otherwise="It is the natural logarithm of the sum of all e^score."))


check_attend_part(attend_part).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.attend_part(attend_part).raise_if_wrong()
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "q3_2_tests", "grade": true, "points": 5}
@check("3.2", "Split-KV attention")
def check_split(split_kv_attention):
    names, split_kv_attention = getattr(split_kv_attention, "__globals__", {}), leaves_inputs(split_kv_attention)
    for dtype, keys, splits, large, rtol in ((torch.float32, 10, 1, 1, 1e-3), (torch.float32, 10, 4, 1, 1e-3),
                                             (torch.float32, 11, 3, 1, 1e-3), (torch.bfloat16, 10, 4, 1, 2e-2),
                                             (torch.float32, 10, 4, 40, 1e-2), (torch.float32, 10, 16, 1, 1e-3)):
        q = large * torch.randn(2, 6, 3, 12, dtype=dtype)
        k, v = large * torch.randn(2, 2, keys, 12, dtype=dtype), torch.randn(2, 2, keys, 12, dtype=dtype)
        wide = [t.float() for t in (q, k, v)]
        expected = F.scaled_dot_product_attention(*wide, enable_gqa=True)
        with SizeWatch() as sizes, watch_operations() as watch:
            got = split_kv_attention(q, k, v, splits)
        forbid(watch, FUSED_ATTENTION, hint="each part comes from attend_part")
        what = f"split_kv_attention over {keys} keys in {splits} splits, {dtype}".replace("torch.", "")
        what += ", scores in the thousands" if large > 1 else ""
        hint = ""
        if large == 1 and 1 < splits <= keys:
            # the parts, each with its own softmax, and three wrong ways to merge them
            parts = [F.scaled_dot_product_attention(wide[0], *(t.tensor_split(splits, 2)[i] for t in wide[1:]), enable_gqa=True)
                     for i in range(splits)]
            scores = wide[0] @ wide[1].repeat_interleave(3, dim=1).mT / math.sqrt(12)
            lse_to_base_2 = torch.stack([s.logsumexp(-1) for s in scores.tensor_split(splits, -1)]) / math.log(2)
            weights = torch.softmax(lse_to_base_2, dim=0)[..., None]
            halved = torch.softmax(lse_to_base_2 * math.log(2) ** 2, dim=0)[..., None]
            short = keys // splits * splits
            hint = known_mistake(got, {
                "Parts do not count equally: weight each by its e^lse over the sum of all e^lse.": sum(parts) / splits,
                "Outputs of parts cannot just be added: weight each by its e^lse over the sum of all e^lse.": sum(parts),
                "The weights are e^L of an L to base 2: attend_part's lse is the natural logarithm.": (weights * torch.stack(parts)).sum(0),
                "The weights are 2^L, and L is a natural logarithm: they should be e^L.": (halved * torch.stack(parts)).sum(0),
                f"The last {keys - short} keys are left out: {splits} does not divide {keys}.": F.scaled_dot_product_attention(
                    wide[0], wide[1][:, :, :short], wide[2][:, :, :short], enable_gqa=True) if short < keys else got * math.nan,
            }, rtol=2e-2, atol=2e-2, otherwise="Weigh the parts with their log-sum-exp, and let the weights add up to 1.")
        elif large > 1:
            hint = "e^lse overflows: subtract the largest lse first."
        elif splits > keys:
            hint = "With more splits than keys some parts are empty: leave them out, or give them weight 0."
        expect_close(got, expected.to(dtype), rtol=rtol, atol=rtol / 2, what=what, hint=hint)
        # the shapes of the products with D tell how many keys each part had
        lengths = [n if m in (3, 9) else m for _, m, inner, n in sizes.products if inner == 12 and {m, n} & {3, 9}]
        if 1 < splits <= keys and lengths:
            limit = -(-keys // splits)
            assert max(lengths) <= limit, (f"{what}: {max(lengths)} scores at once for a query, and a part of {limit} keys has "
                                           f"{limit}. Each part must be computed from its own keys alone.")
            assert max(lengths) - min(lengths) <= 1, (f"{what}: the parts have {sorted(set(lengths))} keys; their sizes should differ "
                                                      "by at most 1")
    # Two parts of known weights, in place of yours: the first one's sum is three times the second's, so it counts three quarters.
    if "attend_part" in names:
        own = names["attend_part"]

        def known_part(q, k, v):
            first = k.mean().item() > 0
            return torch.full(q.shape, 1.0 if first else 0.0), torch.full(q.shape[:3], math.log(3) if first else 0.0)

        names.update({"attend_part": known_part})
        try:
            keys = torch.cat([torch.ones(1, 2, 5, 8), -torch.ones(1, 2, 5, 8)], dim=2)
            got = split_kv_attention(torch.ones(1, 2, 3, 8), keys, keys, 2)
        finally:
            names.update({"attend_part": own})
        of_base_2 = torch.full((1, 2, 3, 8), 2 ** math.log(3) / (2 ** math.log(3) + 1))
        hint = known_mistake(got, {"The weights are 2^L, and L is a natural logarithm: they should be e^L.": of_base_2},
                             otherwise="A part weighs as much as its sum, and its sum is e^L.")
        expect_close(got, torch.full((1, 2, 3, 8), 0.75), rtol=1e-3, atol=1e-3, hint=hint,
                     what="split_kv_attention of a part of ones with log-sum-exp ln 3, and a part of zeros with log-sum-exp 0")

check_split(split_kv_attention).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.split_kv_attention(split_kv_attention).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 3.3: How many splits? {points}
#
# More splits keep more multiprocessors busy. They also make more parts to merge. Model a decode step:
#
# - There are `programs` independent pieces of work without splitting (batch × key heads), and `splits` times as many
#   with it. The chip runs `units` of them at a time: a **wave**. A wave that is not full takes as long as a full one.
# - A program walks through its keys, `kv_len / splits` rounded up, in tiles of `tile` keys. A tile that is not full takes
#   as long as a full one: `tile_us` microseconds.
# - With more than one split a second kernel merges the parts: `combine_us` microseconds.
#
# `decode_us` is the time of a step. `best_splits` is the number of splits from 1 to `most` that takes the least time; of
# several equally fast ones the smallest.
#
# {hint idea}
# A wave is a batch of programs that run together; a tile is a batch of keys. Both are rounded up.
#
# {hint plan}
# Waves from programs times splits, keys of a part from kv_len over splits, tiles from those. Multiply, and add the
# merge if there is one. For the best number try all from 1 to `most`.
#
# {hint line}
# Three things are rounded up, one after the other. With one split there is nothing to merge. And of equal times the
# first one is wanted.

# %% nbgrader={"grade_id": "q3_3", "solution": true}
def decode_us(
    programs: int, kv_len: int, splits: int, units: int, tile: int, tile_us: float, combine_us: float
) -> float:
    """Microseconds of one decode step over kv_len keys in `splits` parts."""
    ### BEGIN SOLUTION
    waves = math.ceil(programs * splits / units)
    tiles = math.ceil(math.ceil(kv_len / splits) / tile)
    return waves * tiles * tile_us + (combine_us if splits > 1 else 0.0)
    ### END SOLUTION


def best_splits(
    programs: int, kv_len: int, units: int, tile: int, tile_us: float, combine_us: float, most: int = 64
) -> int:
    """The fewest splits, from 1 to `most`, that take the least time."""
    ### BEGIN SOLUTION
    costs = [decode_us(programs, kv_len, n, units, tile, tile_us, combine_us) for n in range(1, most + 1)]
    return 1 + costs.index(min(costs))
    ### END SOLUTION


# %% nbgrader={"grade_id": "q3_3_tests", "grade": true, "points": 4}
@check("3.3", "How many splits?")
def check_splits(decode_us, best_splits):
    # 3 programs on 4 units, 1000 keys in tiles of 128, 2 us a tile, 5 us to merge
    waves = "A part of a wave takes as long as a whole one: round the waves up."
    tiles = "A part of a tile takes as long as a whole one: round the tiles up."
    expect_number(decode_us(3, 1000, 1, 4, 128, 2.0, 5.0), 16.0, rel=1e-9, unit="us",
                  what="3 programs on 4 units, 1000 keys in tiles of 128 (2 us each), no split,", mistakes={
        "One split needs no second kernel.": 21.0, waves: 12.0, tiles: 15.625, "Both waves and tiles are rounded up.": 11.71875})
    expect_number(decode_us(3, 1000, 3, 4, 128, 2.0, 5.0), 23.0, rel=1e-9, unit="us",
                  what="the same in 3 splits (9 programs, 334 keys each)", mistakes={
        waves: 18.5, tiles: 20.625, "Splitting makes more programs: programs * splits.": 11.0,
        "Splitting makes parts shorter: kv_len / splits keys each.": 53.0, "Results of several splits are merged by a second kernel.": 18.0,
        "The second kernel runs once, whatever the number of splits.": 33.0})
    expect_number(decode_us(4, 1024, 2, 4, 128, 2.0, 5.0), 21.0, rel=1e-9, unit="us", what="4 programs, 1024 keys, 2 splits", mistakes={
        "A wave that is just full is one wave.": 29.0})
    fewest, most = "Of splits that take equally long, take the fewest.", "More splits are not always faster: compare the times."
    for arguments, expected, what, mistakes in (
        ((2, 1000, 4, 100, 1.0, 3.0, 8), 2, "2 programs on 4 units, 1000 keys, 3 us to merge: 1 split takes 10 us, 2 splits 8,", {
            most: 8, "Splitting pays here: compare the times.": 1}),
        ((4, 1000, 4, 100, 1.0, 3.0, 8), 1, "4 programs fill 4 units: no number of splits is faster than one,", {most: 8}),
        ((1, 400, 9, 100, 1.0, 0.5, 16), 4, "1 program on 9 units, 400 keys in tiles of 100: 4 to 9 splits take 1.5 us,", {
            fewest: 9, most: 16}),
        ((1, 10_000, 64, 100, 1.0, 0.5, 16), 15, "1 program on 64 units, 100 tiles: 15 and 16 splits take 7.5 us,", {fewest: 16}),
    ):
        expect_number(best_splits(*arguments), expected, rel=0, what=f"the best number of splits of {what}", mistakes=mistakes)


check_splits(decode_us, best_splits).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.splits(decode_us, best_splits).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# What the model says about an H200 (132 multiprocessors), 65536 keys, tiles of 128 that take 0.5 µs, 4 µs to merge.
#
# **Before you run.** By how much does the best number of splits gain at batch 1? At which batch is nothing left to gain?

# %%
guesses["gain of the best split, batch 1"] = None
guesses["gain of the best split, batch 64"] = None
machine_model = {"units": 132, "tile": 128, "tile_us": 0.5, "combine_us": 4.0}
figure, ax = plt.subplots(figsize=(7, 3.4))
for i, batch in enumerate((1, 4, 16, 64)):
    programs = 8 * batch
    counts = range(1, 65)
    one = decode_us(programs, 65536, 1, **machine_model)
    gains = [one / decode_us(programs, 65536, n, **machine_model) for n in counts]
    best = best_splits(programs, 65536, **machine_model)
    if batch in (1, 64):
        beside_guess(f"gain of the best split, batch {batch}", gains[best - 1])
    ax.plot(counts, gains, **series(i).line, markersize=3, label=f"batch {batch}: best {best}, {gains[best - 1]:.2f}×")
ax.set(xscale="log", yscale="log")
plain_ticks(ax.xaxis, (1, 2, 4, 8, 16, 32, 64))
plain_ticks(ax.yaxis)
ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
style_axes(ax, x="splits", y="gain over one split (×)", title="A model of split-KV, 8 key heads")
plt.show()

# %% [markdown]
# The teeth are waves that are not full. At batch 4, four splits are nearly as good as 37.
#
# And the real backends. A decode step on this machine, by batch: how near to the memory roof does each come, and does it
# split? On a GPU the names of the longest kernels tell: look for `split` and `combine`. (The idea is that of
# [Flash-Decoding](https://pytorch.org/blog/flash-decoding/).)
#
# **Before you run.** Which share of the memory bandwidth will flash reach at batch 1?

# %%
guesses["share of the bandwidth, batch 1, flash"] = None  # 0 to 1
rows = []
for batch in (1, 16) if on_gpu else (1, 8):
    kv_heads, group, kv_len, head_dim = (8, 4, 32768, 128) if on_gpu else (2, 4, 8192, 64)
    q, k, v = random_qkv(batch, kv_heads * group, 1, head_dim, kv_heads=kv_heads, kv_length=kv_len)
    _, fused, _ = attention_costs(batch, kv_heads * group, kv_heads, 1, kv_len, head_dim, dtype)
    calls = {b: pinned(b, q, k, v, enable_gqa=True) for b in running_backends(q, k, v, enable_gqa=True)}
    for backend, m in time_in_turn(calls, iterations=7).items():
        longest = [row["name"][:60] for row in summarize_trace(profile(calls[backend], steps=1, warmup=1), top=3)]
        rows.append({"batch": batch, "backend": backend, "ms": m.median_ms, "GB/s": fused / m.median_ms / 1e6,
                     "share of bandwidth": fused / m.median_ms / 1e9 / bandwidth,
                     "kernels" if on_gpu else "operators": "; ".join(longest)})
        if (batch, backend) == (1, "flash"):
            beside_guess("share of the bandwidth, batch 1, flash", rows[-1]["share of bandwidth"])
results["decode"] = rows
show(rows, ["batch", "backend"])
if any(row["share of bandwidth"] > 1 for row in rows):
    print("A share over 1: keys and values came from the cache.")
if not on_gpu:
    show_recorded("decode")

# %% [markdown]
# ## A kernel that shares the work evenly
#
# The course has a decode kernel of its own, written in Gluon, the language of lab 3. It splits the keys as you did, and it
# does not choose a number of splits. It lays the blocks of keys of all heads of all sequences in one row, and gives each
# multiprocessor the same number of neighbours in that row. So no wave is left half empty, also when sequences are of
# different lengths. A head that lies on several multiprocessors is merged. You call it by
#
# ```python
# attention_decode(q, k_cache, v_cache, seqlens=lengths, block_table=pages)
# ```
#
# `seqlens` says how many tokens of each sequence are in the cache, the new ones included, and `block_table` where the pages
# of a paged cache are. Both may be left out. On a machine without a Hopper GPU the same call goes to SDPA, and the
# result is the same but for rounding. Hold it against your own splits, with sequences of two lengths:

# %%
q, k, v = random_qkv(2, 8, 1, 64, kv_heads=2, kv_length=600, dtype=torch.float16 if on_gpu else torch.float32)
lengths = torch.tensor([37, 600], dtype=torch.int32, device=device)  # the first sequence uses 37 of its 600 places
out = attention_decode(q, k, v, seqlens=lengths)
for b, length in enumerate(lengths.tolist()):
    one = slice(b, b + 1)
    mine = split_kv_attention(q[one], k[one, :, :length], v[one, :, :length], splits=4)
    print(f"sequence {b}, {length} keys: largest difference from your splits {(out[one] - mine).abs().max().item():.1e}")

# %% [markdown]
# How good is it? The recorded figures are microseconds of device time on an H200, with a cold L2 cache. The contenders were
# cuDNN, FlashAttention 2 (SDPA's flash), 3 and 4, and their calls were interleaved. `best other / Gluon` above 1
# means that the course's kernel was faster than the best of them. It is the median of the ratios of calls that stood side by
# side, so it may differ by a few percent from the ratio of two columns. The copy is a copy of 1 GiB, read and written.
#
# **Before you run.** At how many of the ten shapes will the course's kernel be at least as fast as the best other: with 1
# new token, with 8, with 16?

# %%
guesses["Gluon ahead, 1 new token"] = None  # 0 to 10
guesses["Gluon ahead, 8 new tokens"] = None
guesses["Gluon ahead, 16 new tokens"] = None
record_file = Path("assets/results/h200/decode.json")
if record_file.exists():
    record = json.loads(record_file.read_text())
    machine = record["environment"]
    print(f"Recorded on {machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']}. Not measured here:")
    rows = [{"sequences": row["batch"], "heads": f"{row['heads']}/{row['kv_heads']}", "keys": row["keys"], "D": row["head_dim"],
             "new": row["new_tokens"], **{name: row["us"].get(name, math.nan) for name in ("gluon", "cudnn", "fa2", "fa3", "fa4")},
             "share of a copy": row["tb_s"] / record["copy_tb_s"], "best other / Gluon": row["ratio"]} for row in record["rows"]]
    recorded_decode = pd.DataFrame(rows).sort_values("new", kind="stable")
    show(recorded_decode, ["new", "sequences", "heads", "keys", "D"])
    for new, ahead in recorded_decode.groupby("new")["best other / Gluon"]:
        beside_guess(f"Gluon ahead, {new} new token{'s' if new > 1 else ''}", int((ahead >= 1).sum()))
else:
    print(f"No recorded table {record_file} here.")

# %% [markdown]
# With one new token the kernel is 1.43 to 1.45 times as fast as the best other for one sequence of 2048 or 8192 keys. There the
# launch and the merge count as much as the bytes: 2048 keys reach less than a quarter of the speed of a copy. So the
# multiprocessors that share a head form a cluster and hand each other their parts through shared memory. With eight sequences
# or more the kernel and cuDNN are within 9% of each other, and the kernel reads the cache at 0.87 to 1.00 of the speed of a copy,
# so little is left to gain. With 16 new tokens FlashAttention 4 is ahead at one of the ten shapes, where the ratio is 0.98.
# Over 128 sequences of 1024 keys the ratio was 0.89 when a multiprocessor, which computes several whole heads of keys one
# after the other, multiplied nothing between two of them. Now the next head begins before the last one is stored, and the ratio
# is 1.00. `docs/kernels/decode.md` tells what was tried.
# cuDNN and FlashAttention 2 ran without a causal mask here, as they cannot place it at the last key.
#
# With a Hopper GPU, time it on your machine:

# %%
rows = []
for batch in (1, 16) if on_gpu else (1,):
    kv_heads, group, kv_len, head_dim = (8, 4, 32768, 128) if on_gpu else (2, 4, 64, 64)
    q, k, v = random_qkv(batch, kv_heads * group, 1, head_dim, kv_heads=kv_heads, kv_length=kv_len, dtype=torch.bfloat16)
    course = functools.partial(attention_decode, q, k, v, backend="gluon")
    try:
        course()
    except ValueError as refused:
        print(refused)
        break
    calls = {b: pinned(b, q, k, v, enable_gqa=True) for b in ("flash", "cudnn") if runs(b, q, k, v, enable_gqa=True)}
    for name, m in time_in_turn({"attention_decode": course} | calls, iterations=7).items():
        rows.append({"batch": batch, "by": name, "ms": m.median_ms, "from": m.interval_ms[0], "to": m.interval_ms[1],
                     "GB/s": (k.nbytes + v.nbytes + 2 * q.nbytes) / m.median_ms / 1e6})
if rows:
    results["decode_gluon"] = rows
    show(rows, ["batch", "by"])

# %% [markdown]
# ### Question 3.4: Explain decode {points}
#
# 1. Why is decode limited by memory at every length of the cache? Use your formula for one query: which limit does the
#    intensity approach for a long cache, with and without a group?
# 2. In your measurement, up to how many queries did the time stay nearly flat, and what did `queries_to_ridge` say? Name
#    a reason why they differ.
# 3. What does split-KV change: FLOPs, bytes, or something else? Why does it gain next to nothing at batch 64?
# 4. "Our decode is slow, so we use a faster FP8 tensor core." What does FP8 help here, and what does not help?
#
# {hint idea}
# Decode reads the whole cache for a few FLOPs. Everything here follows from FLOPs/Byte.
#
# {hint plan}
# Put one query into your formula and let L grow. Read the table of queries: where does the time begin to rise, and what
# did the ridge say? For split-KV count FLOPs and bytes with and without.
#
# {hint line}
# For 3, count programs against multiprocessors at batch 1 and at batch 64. For 4, ask which of the two, bytes or FLOPs,
# is the limit.

# %% [markdown] nbgrader={"grade_id": "q3_4", "grade": true, "solution": true, "points": 4}
# 1. I = 2·g·q·L / ((g·q + L)·b). For q = 1 and long L it approaches 2·g/b: 1 FLOP/Byte in bf16 without a group, 8 with a
#    group of 8. Longer caches bring as many bytes as FLOPs. Both lie far left of the ridge (206 on an H200).
# 2. On a CPU flat up to 2 or 4 queries and half as much again at 8, where queries_to_ridge says 25 to 30. The kernel does
#    not reach the peak that the ridge is computed from, and softmax is not in the FLOPs. An H200 is flat up to 64 and
#    takes three times as long at 256, predicted are 207: a tile of queries is computed whole, filled or not, so the time
#    moves in steps of tiles.
# 3. Neither FLOPs nor bytes (some bytes more, for the parts). It changes how many programs there are, so how much of the
#    chip reads at the same time. At batch 64 there are 512 programs for 132 SMs without it.
# 4. The cache in FP8 has half the bytes, so decode takes about half the time. The faster tensor core does not help: the
#    FLOPs were never the limit.
#
# === BEGIN MARK SCHEME ===
# 1 point for each of the four; a number from the student's run in 2, otherwise half a point off.
# 1: limit 2·group/itemsize, independent of the length; compares with a ridge.
# 2: quotes both numbers and one sound reason.
# 3: parallelism (occupancy, more programs), not work; enough programs at batch 64.
# 4: bytes of the cache halve; FLOP/s do not matter.
# === END MARK SCHEME ===

# %% [markdown]
# # Part 4: Layouts that lose the fast kernel
#
# A tensor is a shape and a way to walk through memory: its **strides**. `x.transpose(1, 2)` moves no byte, it swaps two
# strides. Kernels do not care about most strides. About one they do.

# %% [markdown]
# ### Question 4.1: Strides {points}
#
# `x` has shape (B, H, S, D); S and D are larger than 1. Write two functions that return a tensor with the **same shape
# and the same values**:
#
# 1. `knocked_out_by_strides(x)`: flash refuses it (as `q`).
# 2. `strided_and_fast(x)`: not contiguous, and flash runs it all the same.
#
# You can find out with `why_not`. The check asks the dispatcher, not the strides.
#
# {hint idea}
# Shape and values are one thing, the order in memory is another. Two calls change the second without the first.
#
# {hint plan}
# Make a tensor in another memory order and look at it through swapped dimensions, so that the shape is as before. Ask
# `why_not` which strides flash minds.
#
# {hint line}
# `transpose` alone gives a view; which call really moves the numbers? Which of the four dimensions does a kernel read
# in one piece?

# %% nbgrader={"grade_id": "q4_1", "solution": true}
def knocked_out_by_strides(x: torch.Tensor) -> torch.Tensor:
    """x with strides that flash refuses."""
    ### BEGIN SOLUTION
    return x.transpose(2, 3).contiguous().transpose(2, 3)
    ### END SOLUTION


def strided_and_fast(x: torch.Tensor) -> torch.Tensor:
    """x, not contiguous, in a layout that flash runs."""
    ### BEGIN SOLUTION
    return x.transpose(1, 2).contiguous().transpose(1, 2)
    ### END SOLUTION


# %% nbgrader={"grade_id": "q4_1_tests", "grade": true, "points": 4}
@check("4.1", "Strides")
def check_strides(knocked_out_by_strides, strided_and_fast):
    knocked_out_by_strides = leaves_inputs(knocked_out_by_strides)
    strided_and_fast = leaves_inputs(strided_and_fast)
    x = torch.randn(2, 3, 10, 16)
    for function in (knocked_out_by_strides, strided_and_fast):
        got, what = function(x), f"{function.__name__}(x)"
        assert isinstance(got, torch.Tensor), f"{what} should be a tensor, and is a {type(got).__name__}"
        assert got.shape == x.shape, (f"{what} should keep the shape {tuple(x.shape)}, and has {tuple(got.shape)}: a tensor that was "
                                      "transposed has to be transposed back. Only the memory may differ")
        assert torch.equal(got, x), f"{what} should hold the values of x"
    bad, good = knocked_out_by_strides(x), strided_and_fast(x)
    assert not runs("flash", bad, x, x), (f"flash still runs with knocked_out_by_strides(x), strides {bad.stride()}, as q. Which "
                                          "dimension does a kernel want to read in one piece?")
    assert not good.is_contiguous(), "strided_and_fast(x) is contiguous. It should not be, and flash should run it"
    assert runs("flash", good, x, x), f"flash refuses strided_and_fast(x), strides {good.stride()}, as q"


check_strides(knocked_out_by_strides, strided_and_fast).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.strides(knocked_out_by_strides, strided_and_fast).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 4.2: Four more knock-outs {points}
#
# Strides are one way to lose flash. Find at least **four more**, each refused for a reason of its own. A knock-out is a
# function: it gets `q`, `k`, `v` of shape (B, H, S, D) in float32 and returns the arguments of SDPA in a dict, with the
# keys `query`, `key`, `value`, and options if you like. Math must be able to compute it.
#
# ```python
# KNOCK_OUTS = {"my first": lambda q, k, v: {"query": q, "key": k, "value": v, "is_causal": True}, ...}
# ```
#
# Look for them on **CPU tensors**, with `why_not("flash", ...)`: that is what the check asks, on every machine. A GPU's
# flash has other rules. The cell below the check shows yours on this machine, and the course's on an H200, recorded with
# torch 2.11. Ideas: what else can a tensor or a call have, apart from strides? How many dimensions? Equal sizes? Which
# options are there?
#
# The torch that is installed decides, and versions differ. On a CPU, flash of torch 2.11 to 2.13 refuses tensors
# without a batch dimension, and one head of keys and values for all heads of queries without `enable_gqa`; flash of torch
# 2.14 and 2.15 runs both. Keys of length zero are refused by torch 2.11 alone. Others are safer: your answer may be graded
# with another version than yours.
#
# {hint idea}
# The dispatcher asks about shapes, sizes, options, mask and gradients. Each question can be answered with no.
#
# {hint plan}
# Change one thing at a time in a call that runs, and ask `why_not` for flash. Keep what is refused in new words. Let
# math compute it as well.
#
# {hint line}
# Numbers of dimensions, sizes of k and v that differ from those of q in one place, options of SDPA, shapes of a mask:
# read the signature of SDPA from left to right.

# %% nbgrader={"grade_id": "q4_2", "solution": true}
KNOCK_OUTS = {}
### BEGIN SOLUTION
KNOCK_OUTS = {
    "dropout": lambda q, k, v: {"query": q, "key": k, "value": v, "dropout_p": 0.1},
    "narrow values": lambda q, k, v: {"query": q, "key": k, "value": v[..., :16].contiguous()},
    "mask of three dimensions": lambda q, k, v: {
        "query": q, "key": k, "value": v, "attn_mask": torch.zeros(q.shape[1], q.shape[2], k.shape[2])
    },
    "one batch of keys": lambda q, k, v: {"query": q, "key": k[:1], "value": v[:1]},
}
### END SOLUTION

# %% nbgrader={"grade_id": "q4_2_tests", "grade": true, "points": 4}
@check("4.2", "Four more knock-outs")
def check_knock_outs(knock_outs):
    assert knock_outs != {}, "not answered yet: KNOCK_OUTS is empty."
    assert isinstance(knock_outs, dict) and len(knock_outs) >= 4, f"four were asked for; KNOCK_OUTS is {knock_outs!r:.120}"
    found = {}
    for name, build in knock_outs.items():
        arguments = build(*(torch.randn(2, 4, 24, 32) for _ in range(3)))
        assert isinstance(arguments, dict), f"KNOCK_OUTS[{name!r}] should return a dict of SDPA's arguments, and returns {arguments!r:.80}"
        missing = {"query", "key", "value"} - set(arguments)
        assert not missing, f"KNOCK_OUTS[{name!r}] lacks {sorted(missing)}"
        can = {}
        for backend, meaning in (("math", "a wrong call is no knock-out"), ("flash", "a defect of torch, no refusal with a reason")):
            try:
                can[backend] = runs(backend, **arguments)
            except Exception as error:
                text = f"{type(error).__name__}: {str(error).splitlines()[0]:.90}"
                raise AssertionError(f"KNOCK_OUTS[{name!r}] ends inside of SDPA, pinned to {backend}, with {text}. That is {meaning}: "
                                     "find another call") from None
        assert can["math"], f"math cannot compute KNOCK_OUTS[{name!r}] either: a wrong call is no knock-out"
        assert not can["flash"], f"flash runs KNOCK_OUTS[{name!r}]: with torch {torch.__version__} it is no knock-out"
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                F.scaled_dot_product_attention(**arguments)
            except RuntimeError as error:
                told = [str(w.message) for w in said if "because" not in str(w.message) and "disabled" not in str(w.message)]
                reason = (told or [str(error)])[0].split(" (Triggered")[0].splitlines()[0]
        assert "stride" not in reason, f"KNOCK_OUTS[{name!r}] is refused for its strides. That was asked for above, in 4.1: find another way"
        same = found.setdefault("".join(c for c in reason if not c.isdigit())[:60], name)
        assert same == name, (f"KNOCK_OUTS[{name!r}] is refused for the reason of {same!r}: {reason[:90].rstrip('.')}. Four different "
                              "reasons were asked for")


check_knock_outs(KNOCK_OUTS).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.knock_outs(KNOCK_OUTS).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# The map of this machine: layouts and calls against backends.
#
# **Before you run.** Which columns will hold "runs" from top to bottom? In how many rows will flash run?

# %%
guesses["rows that flash runs"] = None
guesses["backends that run every row"] = None
q, k, v = random_qkv(2, 4, 24, 32)
grouped = random_qkv(2, 2, 24, 32)
mask = torch.ones(24, 24, dtype=torch.bool, device=device).tril()
calls = {
    "contiguous": (q, k, v, {}),
    "knocked out by strides": (knocked_out_by_strides(q), k, v, {}),
    "strided and fast": (strided_and_fast(q), strided_and_fast(k), strided_and_fast(v), {}),
    "boolean mask": (q, k, v, {"attn_mask": mask}),
    "grouped heads": (q, *grouped[1:], {"enable_gqa": True}),
    "float64": (q.double(), k.double(), v.double(), {}),
    "head dimension 300": (*random_qkv(1, 2, 24, 300), {}),
    "one query": (q[:, :, :1], k, v, {}),
}
for name, build in KNOCK_OUTS.items():
    arguments = build(*(torch.randn(2, 4, 24, 32) for _ in range(3)))
    for key, x in arguments.items():  # in the dtype of the other rows: otherwise a GPU would refuse them for their dtype alone
        if isinstance(x, torch.Tensor):
            arguments[key] = x.to(device, dtype if x.is_floating_point() else x.dtype)
    calls[f"yours: {name}"] = (*(arguments.pop(key) for key in ("query", "key", "value")), arguments)
results["layouts"] = who_runs(calls)
beside_guess("rows that flash runs", sum(row["flash"] == "runs" for row in results["layouts"]))
beside_guess("backends that run every row", sum(all(row[b] == "runs" for row in results["layouts"]) for b in BACKENDS))
if not on_gpu:
    show_recorded("layouts")

# %% [markdown]
# ### Question 4.3: Apart without a copy {points}
#
# A model computes queries, keys and values with one projection. Its output `packed` has shape (B, S, (H + 2 Hkv) · D):
# for each token first the `heads` query heads, then the `kv_heads` key heads, then as many value heads. The numbers of a token
# lie side by side; tokens and sequences may lie anywhere, as in a slice of a larger tensor.
#
# 1. `unpack_qkv(packed, heads, kv_heads)`: `q` (B, H, S, D), `k` and `v` (B, Hkv, S, D), as **views**: they lie in the
#    memory of `packed`, and flash runs them.
# 2. `ready_for_flash(x)`: a tensor of the shape and values of `x` that flash runs. It lies in the memory of `x` if the
#    strides of `x` are fine, and is a copy only if they are not. `x.contiguous()` copies too often.
#
# {hint idea}
# All three tensors lie in `packed` already. Find the strides that show them.
#
# {hint plan}
# Split the last dimension into heads and numbers of a head. Bring heads before tokens. Then take the query heads, the
# key heads and the value heads apart.
#
# {hint line}
# Which operations return views, and which copy when they must? Compare `data_ptr()`. For the second function, only one
# stride matters.

# %% nbgrader={"grade_id": "q4_3", "solution": true}
def unpack_qkv(packed: torch.Tensor, heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (B, H, S, D) and k, v (B, Hkv, S, D) as views of a projection's output (B, S, (H + 2 Hkv) D)."""
    ### BEGIN SOLUTION
    all_heads = packed.unflatten(2, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    return all_heads.split([heads, kv_heads, kv_heads], dim=1)
    ### END SOLUTION


def ready_for_flash(x: torch.Tensor) -> torch.Tensor:
    """x, copied only if flash would refuse its strides."""
    ### BEGIN SOLUTION
    return x if x.stride(-1) == 1 else x.contiguous()
    ### END SOLUTION


# %% nbgrader={"grade_id": "q4_3_tests", "grade": true, "points": 4}
@check("4.3", "Apart without a copy")
def check_unpack(unpack_qkv, ready_for_flash):
    unpack_qkv = leaves_inputs(unpack_qkv)
    ready_for_flash = leaves_inputs(ready_for_flash)
    packed = torch.arange(2 * 3 * 24.0).reshape(2, 3, 24)  # 2 query heads, 2 key and 2 value heads of 4 numbers each
    wide = torch.arange(2 * 5 * 64.0).reshape(2, 5, 64)  # 4 query heads, 2 key and 2 value heads of 8 numbers each
    for x, heads, kv_heads, tokens, size in ((packed, 2, 2, 3, 4), (wide, 4, 2, 5, 8)):
        got = unpack_qkv(x, heads, kv_heads)
        what = f"unpack_qkv of {tuple(x.shape)} with {heads} query heads and {kv_heads} key heads"
        assert isinstance(got, tuple | list) and len(got) == 3, f"{what} should be (q, k, v), and is {got!r:.80}"
        first = 0
        for name, tensor, count in zip("qkv", got, (heads, kv_heads, kv_heads), strict=True):
            assert tensor.shape == (2, count, tokens, size), f"{name} of {what} should have shape {(2, count, tokens, size)}, and has {tuple(tensor.shape)}"
            for h in range(count):
                numbers = x[1, tokens - 1, first : first + size].tolist()
                assert tensor[1, h, tokens - 1].tolist() == numbers, (
                    f"{name} of {what}: head {h} of the last token should be its numbers {first} to {first + size - 1}, and is others. "
                    "Split each token's numbers into heads first, then swap tokens and heads: a reshape mixes tokens.")
                first += size
            assert tensor.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), f"{name} of {what} is a copy, and a view was asked for"
        assert runs("flash", *got, enable_gqa=True), "flash refuses the strides of these views"
    x = torch.randn(2, 3, 12, 16)
    for tensor, copied, what in ((x, False, "a contiguous tensor"), (x.transpose(1, 2).contiguous().transpose(1, 2), False, "transposed heads"),
                                 (x[:, :, ::2], False, "every second token"), (x.mT.contiguous().mT, True, "a transposed memory"),
                                 (x[..., ::2], True, "every second number")):
        got = ready_for_flash(tensor)
        assert isinstance(got, torch.Tensor) and torch.equal(got, tensor), f"ready_for_flash of {what} should hold the same values"
        assert runs("flash", got, got, got), f"flash refuses ready_for_flash of {what}, strides {got.stride()}"
        same = got.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert same or copied, f"ready_for_flash of {what} (strides {tensor.stride()}) is a copy, and flash runs it as it is. Copy only where it is needed"


check_unpack(unpack_qkv, ready_for_flash).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.unpack(unpack_qkv, ready_for_flash).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# What does a lost kernel cost, and what would the copy have cost?
#
# **Before you run.** Three ways to use a `q` with bad strides: let the dispatcher fall back, copy, and let a fused kernel
# run, or store it right in the first place. Guess the ratios.

# %%
guesses["fallback / stored right"] = None
guesses["copied first / stored right"] = None
q, k, v = random_qkv(2, 16, 4096, 128) if on_gpu else random_qkv(1, 4, 1024, 64)
bad = knocked_out_by_strides(q)
ways = {
    "bad strides, torch decides": lambda: F.scaled_dot_product_attention(bad, k, v),
    "bad strides, copied first": lambda: F.scaled_dot_product_attention(ready_for_flash(bad), k, v),
    "stored right": lambda: F.scaled_dot_product_attention(q, k, v),
}
timed = time_in_turn(ways)
rows = [{"way": name, "ran": backends_in(operators_of(way))[0], "ms": timed[name].median_ms, "from": timed[name].interval_ms[0],
         "to": timed[name].interval_ms[1]} for name, way in ways.items()]
beside_guess("fallback / stored right", rows[0]["ms"] / rows[2]["ms"])
beside_guess("copied first / stored right", rows[1]["ms"] / rows[2]["ms"])
results["strides"] = rows
show(rows, "way")
if not on_gpu:
    show_recorded("strides")

# %% [markdown]
# # Part 5: Same formula, other bits
#
# The backends compute the same formula, and their outputs differ. Nobody made a mistake. Real numbers may be added in any
# order. Floating-point numbers may not: $(a + b) + c$ and $a + (b + c)$ round differently. And a kernel that keeps an
# intermediate result in bf16 rounds once more than one that does not.
#
# bf16 has 8 significant bits. Rounding a number to bf16 changes it by up to $2^{-8}$ of its size, 0.4%.

# %% [markdown]
# ### Question 5.1: Where rounding happens {points}
#
# Write attention with switches. Everything is computed in float64, and rounded to bf16 **only where a switch says so**
# (`to_bf16` below: to bf16 and back). Then each rounding can be blamed on its own.
#
# 1. $s = QK^\top/\sqrt{D}$. With `scores`, round $s$.
# 2. $e = \exp(s - \max s)$, row by row, and $\ell = \sum e$ **before** anything else is rounded.
# 3. With `normalize_first`: $P = e/\ell$; with `p`, round $P$; $O = PV$. This is the textbook's order.
# 4. Without `normalize_first`: with `p`, round $e$; $O = (eV)/\ell$. This is the order of a fused kernel, which divides
#    once, at the end.
# 5. With `output`, round $O$. Return float64.
#
# {hint idea}
# Each switch stands at one place of the formula. Compute in float64 and round at that place only.
#
# {hint plan}
# Write the formula without switches and compare it with SDPA in float64. Then add one `if` after the other. The two
# orders differ in what is multiplied with V, and in when the sum divides.
#
# {hint line}
# The sum is taken before anything is rounded. And with `p`, it depends on `normalize_first` which numbers are rounded.

# %% nbgrader={"grade_id": "to_bf16", "locked": true}
def to_bf16(x: torch.Tensor) -> torch.Tensor:
    """x rounded to bf16, as float64."""
    return x.to(torch.bfloat16).double()


# %% nbgrader={"grade_id": "q5_1", "solution": true}
def rounded_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: bool = False, p: bool = False,
    normalize_first: bool = True, output: bool = False,
) -> torch.Tensor:
    """Attention of (B, H, S, D) in float64, rounded to bf16 where the switches say."""
    ### BEGIN SOLUTION
    s = q.double() @ k.double().transpose(-2, -1) / math.sqrt(q.shape[-1])
    if scores:
        s = to_bf16(s)
    e = torch.exp(s - s.amax(dim=-1, keepdim=True))
    total = e.sum(dim=-1, keepdim=True)
    weights = e / total if normalize_first else e
    if p:
        weights = to_bf16(weights)
    out = weights @ v.double()
    if not normalize_first:
        out = out / total
    return to_bf16(out) if output else out
    ### END SOLUTION


# %% nbgrader={"grade_id": "q5_1_tests", "grade": true, "points": 6}
@check("5.1", "Where rounding happens")
def check_rounded(rounded_attention):
    q, k, v = (torch.randn(2, 3, length, 10, dtype=torch.bfloat16) for length in (20, 50, 50))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    for first in (True, False):
        got = rounded_attention(q, k, v, normalize_first=first)
        expect_close(got, exact, rtol=1e-6, atol=1e-8, what=f"rounded_attention without rounding, normalize_first={first}",
                     hint="Compute in float64, and round only where a switch says so.")
    got = rounded_attention(q, k, v, output=True)
    assert got.dtype == torch.float64, f"the result should be float64, and is {got.dtype}"
    assert torch.equal(got, to_bf16(got)), "with output=True every number of the result should be a bf16 number"
    expect_close(got, to_bf16(exact), rtol=1e-2, atol=1e-6, what="the rounded output")
    # one query and four keys, computed by hand with each rounding
    q = torch.tensor([[[[1.0, -0.5, 2.0]]]], dtype=torch.bfloat16)
    k = torch.tensor([[[[0.5, 1.0, 0.75], [-1.0, 0.25, 1.5], [2.0, -1.0, 0.3125], [0.1, 0.7, -0.4]]]], dtype=torch.bfloat16)
    v = torch.tensor([[[[1.0], [-2.0], [3.0], [0.7]]]], dtype=torch.bfloat16)
    bare, p_first, e_late = 1.2619220209, 1.2604379654, 1.2611877311
    first_or_late = "normalize_first decides what is rounded: P itself, or e^(s - max), which is divided by its sum at the end."
    before = "The sum is that of the numbers before they are rounded."
    largest = "Subtract the maximum before the exponential: e^s rounds differently."
    none = "Nothing was rounded at that place."
    for switches, expected, mistakes in (
        ({"scores": True}, 1.2595055602, {none: bare, "Round the scores after they are scaled.": 1.2618713040}),
        ({"p": True}, p_first, {none: bare, first_or_late: e_late}),
        ({"p": True, "normalize_first": False}, e_late, {none: bare, first_or_late: p_first, before: 1.2613347195, largest: 1.2584492055}),
        ({"scores": True, "p": True, "normalize_first": False}, 1.2590798424, {
            before: 1.2578434713, largest: 1.2541361155, first_or_late: p_first, "The scores are not rounded here.": e_late,
            "P is not rounded here.": 1.2595055602}),
        ({"scores": True, "p": True}, p_first, {first_or_late: 1.2590798424, "P is not rounded here.": 1.2595055602}),
    ):
        got = rounded_attention(q, k, v, **switches)
        what = f"one query over four keys with {', '.join(f'{name}={value}' for name, value in switches.items())}"
        expect_number(got.flatten()[0].item(), expected, rel=1e-7, what=what, mistakes=mistakes)


check_rounded(rounded_attention).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.rounded_attention(rounded_attention).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Now play detective. Below are the errors of some recipes, and those of the real backends in bf16 on this machine. Find
# for each backend a recipe with the same error.
#
# **Before you run.** Which single rounding costs most: of the scores, of $P$, of the output? And does math, with its
# score matrix in memory, have the larger error or the smaller one?

# %%
guesses["the rounding that costs most"] = None  # "scores", "P" or "output"
guesses["math's error / flash's error, bf16"] = None
q, k, v = random_qkv(1, 4, 2048 if on_gpu else 512, 64, dtype=torch.bfloat16)
recipes = {
    "output": {"output": True},
    "P, output": {"p": True, "output": True},
    "e, output": {"p": True, "normalize_first": False, "output": True},
    "scores, output": {"scores": True, "output": True},
    "scores, P, output": {"scores": True, "p": True, "output": True},
}
rows = []
for name, switches in recipes.items():
    largest, rms = errors(rounded_attention(q, k, v, **switches), q, k, v)
    rows.append({"what": f"rounded: {name}", "largest error": largest, "rms error": rms})
bf16_outputs = {}
for backend in BACKENDS:
    if runs(backend, q, k, v):
        with sdpa_kernel(BACKENDS[backend]):
            bf16_outputs[backend] = F.scaled_dot_product_attention(q, k, v)
        largest, rms = errors(bf16_outputs[backend], q, k, v)
        rows.append({"what": backend, "largest error": largest, "rms error": rms})
rounding = pd.DataFrame(rows)
rms_of = rounding.set_index("what")["rms error"]
alone = {"output": rms_of["rounded: output"]} | {  # errors add up in squares
    name: math.sqrt(max(rms_of[f"rounded: {name}, output"] ** 2 - rms_of["rounded: output"] ** 2, 0.0)) for name in ("P", "scores")}
beside_guess("the rounding that costs most", max(alone, key=alone.get))
beside_guess("math's error / flash's error, bf16", float(rms_of["math"] / rms_of["flash"]))
results["rounding"] = rows
figure, ax = plt.subplots(figsize=(7, 3.4))
colors = ["#9a9a9a" if name.startswith("rounded") else series(0).color for name in rounding["what"]]
ax.bar_label(ax.barh(rounding["what"], rounding["rms error"], color=colors), fmt="%.4f", padding=3)
ax.margins(x=0.15)
ax.invert_yaxis()
style_axes(ax, x="relative rms error against float64", title=f"bf16 attention over {q.shape[2]} keys")
figure.tight_layout()
plt.show()
show(rounding, "what")
if not on_gpu:
    show_recorded("rounding")

# %% [markdown]
# ### Question 5.2: Steps between bf16 numbers {points}
#
# "They differ by 0.001": is that much? Near 1 two neighbouring bf16 numbers lie 0.0078 apart, near 0.001 only 0.000008.
# Count in **steps**: how many bf16 numbers one has to walk from $a$ to $b$. The unit is called *ulp*, unit in the last
# place.
#
# Write `ulps_apart(a, b)` for two bf16 tensors of one shape: a tensor of integers, of that shape. Neighbours are 1
# apart, over powers of two and around zero as well. 0 and -0 are the same number. There is no NaN and no infinity.
#
# The 16 bits of a positive number, read as an integer (`x.view(torch.int16)`), count the numbers from 0 on.
#
# {hint idea}
# Positive bf16 numbers, read as integers, are in order and without gaps. Negative ones run the other way.
#
# {hint plan}
# Map each number to a place on one line, so that neighbours are 1 apart. Then the distance is a difference.
#
# {hint line}
# Print the integers of 0, -0, the smallest positive number and the smallest negative one. Where should each lie? And
# how large can a difference become?

# %% nbgrader={"grade_id": "q5_2", "solution": true}
def ulps_apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many bf16 numbers lie between a and b, one end included: 0 if equal, 1 for neighbours."""
    ### BEGIN SOLUTION
    def place(x):
        bits = x.view(torch.int16).to(torch.int32)
        return torch.where(bits >= 0, bits, -32768 - bits)

    return (place(a) - place(b)).abs()
    ### END SOLUTION


# %% nbgrader={"grade_id": "q5_2_tests", "grade": true, "points": 3}
@check("5.2", "Steps between bf16 numbers")
def check_ulps(ulps_apart):
    ulps_apart = leaves_inputs(ulps_apart)
    smallest = 2.0**-133  # the smallest positive bf16 number
    far = "The largest distance is about 65,000: compute with more than 16 bits."
    for a, b, steps, what, hint in (
        (1.0, 1.0, 0, "1 and 1", ""), (1.0, 1.0078125, 1, "1 and its neighbour above", "Reinterpret the 16 bits as an integer."),
        (0.001, 0.001, 0, "0.001 and itself", ""), (4.0, 4.0625, 2, "4 and 4.0625", "Reinterpret the 16 bits: spacing grows with the number."),
        (1.0, 0.99609375, 1, "1 and its neighbour below", "Spacing changes at a power of two: count steps, not sizes."),
        (0.001, 0.0010147, 2, "0.001 and 0.0010147", "Reinterpret the 16 bits: spacing shrinks with the number."),
        (-1.0, -1.0078125, 1, "-1 and its neighbour", "Below zero the integers run backwards."),
        (0.0, -0.0, 0, "0 and -0", "They are the same number: 0 steps."),
        (smallest, 0.0, 1, "the smallest number and 0", "Neighbours are one step apart, also around 0."),
        (-smallest, smallest, 2, "the smallest number and its negative", "From one to the other it is two steps, through 0."),
        (1.0, -1.0, 32_512, "1 and -1", "Put the numbers on one line, negative ones left of 0."),
        (3e38, -3e38, 65_220, "3e38 and -3e38", far),
    ):
        for x, y in ((a, b), (b, a)):
            got = ulps_apart(torch.tensor([[x]], dtype=torch.bfloat16), torch.tensor([[y]], dtype=torch.bfloat16))
            assert isinstance(got, torch.Tensor) and not got.is_floating_point(), f"ulps_apart should be a tensor of integers, and is {got!r}"
            assert got.shape == (1, 1), f"ulps_apart should keep the shape (1, 1), and has {tuple(got.shape)}"
            assert int(got) == steps, f"{what} are {steps} steps apart; ulps_apart says {int(got)}. {hint}"


check_ulps(ulps_apart).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.ulps_apart(ulps_apart).raise_if_wrong()
### END HIDDEN TESTS

# %%
rows = []
names = list(bf16_outputs)
pairs = [(one, other) for i, one in enumerate(names) for other in names[i + 1 :]]
for one, other in pairs:
    steps = ulps_apart(bf16_outputs[one], bf16_outputs[other]).flatten().float()
    size = bf16_outputs[one].abs().flatten().float()
    common = steps[size > size.median()]  # a number near 0 is many steps from its neighbour in value
    rows.append({"backends": f"{one}, {other}", "equal bits": (steps == 0).float().mean().item(),
                 "at most 1 step": (steps <= 1).float().mean().item(), "most steps": int(steps.max()),
                 "most steps, larger half": int(common.max())})
results["ulps"] = rows
show(rows, "backends")
if not on_gpu:
    show_recorded("ulps")

# %% [markdown]
# ### Question 5.3: Same bits every time? {points}
#
# Two backends may differ. What about the same backend, twice? A kernel that adds with atomic operations adds in the order
# in which its programs happen to finish. Then no two runs need to agree.
#
# Write `distinct_results(fn, runs)`: call `fn()` `runs` times and count how many **different** results came, bit for
# bit. 1 means: the same every time. `fn` may return a tensor of any floating-point dtype or a tuple of tensors, all of
# which count. It may write its result into the same memory each time. A NaN with the same bits is the same result, one
# with other bits is another; 0 and -0 are two.
#
# {hint idea}
# Two results are the same if their bytes are the same. A set of bytes counts different ones.
#
# {hint plan}
# Call, turn the result into something that compares by bits and that you can keep, and put it into a collection. Return
# its size.
#
# {hint line}
# Values are not bits: think of NaN, of 0 and -0. And `fn` may write its next result over the last one.

# %% nbgrader={"grade_id": "q5_3", "solution": true}
def distinct_results(fn, runs: int) -> int:
    """Number of results of fn(), out of `runs` calls, that differ in at least one bit."""
    ### BEGIN SOLUTION
    found = set()
    for _ in range(runs):
        result = fn()
        tensors = result if isinstance(result, tuple | list) else (result,)
        found.add(b"".join(t.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes() for t in tensors))
    return len(found)
    ### END SOLUTION


# %% nbgrader={"grade_id": "q5_3_tests", "grade": true, "points": 3}
@check("5.3", "Same bits every time?")
def check_distinct(distinct_results):
    x = torch.randn(3, 4)
    near, holes = x.clone(), x.clone()
    near[1, 2] = torch.nextafter(near[1, 2], torch.tensor(9.0))
    holes[0, 0] = math.nan
    other = holes.clone()
    other.view(torch.int32)[0, 0] += 1
    buffer = torch.empty(3, 4)
    bits = "compare bits, without a tolerance"
    for results, expected, what, hint in (
        ([x, x.clone(), x.clone()], 1, "three equal results", ""), ([x, 2 * x, x, 3 * x], 3, "A, B, A, C", "Count different results."),
        ([x, near, near.clone(), x], 2, "A, B, B, A", "Count different results, not changes, and not differences from the first; " + bits),
        ([holes, holes.clone()], 1, "two equal results with a NaN", f"NaN != NaN, but its bits are equal: {bits}"),
        ([torch.zeros(3), -torch.zeros(3)], 2, "0 and -0", f"They compare equal, and their bits differ: {bits}"),
        ([holes, other, holes], 2, "two results whose NaN have other bits", f"Both are NaN, and their bits differ: {bits}"),
        ([x.to(torch.float8_e4m3fn), (2 * x).to(torch.float8_e4m3fn)], 2, "fp8 results A, B", "Any floating-point dtype may come."),
        ([x.bfloat16(), x.bfloat16(), (2 * x).bfloat16()], 2, "bf16 results A, A, B", "Any floating-point dtype may come."),
        ([x.double(), x.double() * (1 + 2**-52), x.double()], 2, "float64 results that differ in their last bits", bits),
        ([(x, near), (x.clone(), near.clone()), (x, x)], 2, "tuples of two tensors", "All tensors of a tuple count."),
        ([buffer, x, near, 2 * x], 3, "three results in one buffer, which fn writes again",
         "Keep a copy of each result: fn may write the next one into the same memory."),
    ):
        shared = results[0] is buffer
        calls = iter(results[1:] if shared else results)
        runs_asked = len(results) - shared
        try:
            got = distinct_results(lambda c=calls, s=shared: buffer.copy_(next(c)) if s else next(c), runs_asked)
        except StopIteration:
            raise AssertionError(f"fn was called more than {runs_asked} times: `runs` says how often") from None
        assert next(calls, None) is None, f"fn was called fewer than {runs_asked} times: `runs` says how often"
        assert got == expected, f"distinct_results of {what} is {got!r}, expected {expected}. {hint}"


check_distinct(distinct_results).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.distinct_results(distinct_results).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Four questions about each backend. Does forward repeat itself? Does backward, as it is and in deterministic mode? Does
# the output of *one* sequence depend on what else is in the batch? Does that of *one* query?
#
# **Before you run.** Guess for flash. (The last question is one of the reasons why a chatbot at temperature 0 does not always
# give the same answer. Matrix products and norms whose kernel depends on the batch are others;
# [He et al.](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/) tell the whole story.)

# %%
guesses["flash: different outputs of 8"] = None
guesses["flash: different gradients of 8"] = None
guesses["flash: share of numbers that differ, one query alone"] = None  # 0 to 1
q, k, v = random_qkv(4, 8, 2048 if on_gpu else 256, 64, dtype=torch.bfloat16)
leaves = [t.clone().requires_grad_() for t in (q, k, v)]
dout = torch.randn_like(q)


def gradients():
    return torch.autograd.grad(F.scaled_dot_product_attention(*leaves), leaves, dout)


rows = []
for backend in BACKENDS:
    if not runs(backend, *leaves):
        continue
    with sdpa_kernel(BACKENDS[backend]):
        row = {"backend": backend, "forward": distinct_results(lambda: F.scaled_dot_product_attention(q, k, v), 8)}
        row["backward"] = distinct_results(gradients, 8)
        torch.use_deterministic_algorithms(True)  # warn_only=True would warn, and go on with the same kernel
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row["backward, deterministic"] = str(distinct_results(gradients, 8))
        except RuntimeError as error:
            row["backward, deterministic"] = "refused"
            print(f"{backend} in deterministic mode: {str(error).splitlines()[0][:150]}")
        finally:
            torch.use_deterministic_algorithms(False)
        whole = F.scaled_dot_product_attention(q, k, v)
        alone = F.scaled_dot_product_attention(q[:1], k[:1], v[:1])
        timed_dtype = [t.to(dtype) for t in (q, k, v)]  # bf16 hides most differences in fp32 sums
        among_others = F.scaled_dot_product_attention(*timed_dtype)[:, :, -1:]
        one_query = F.scaled_dot_product_attention(timed_dtype[0][:, :, -1:], *timed_dtype[1:])
    row["one sequence alone: most steps"] = int(ulps_apart(alone, whole[:1].contiguous()).max())
    row[f"one query alone, {dtype_name}: share of numbers that differ"] = (one_query != among_others).float().mean().item()
    rows.append(row)
    if backend == "flash":
        beside_guess("flash: different outputs of 8", row["forward"])
        beside_guess("flash: different gradients of 8", row["backward"])
        beside_guess("flash: share of numbers that differ, one query alone", (one_query != among_others).float().mean().item())
results["determinism"] = rows
show(rows, "backend")
if not on_gpu:
    show_recorded("determinism")

# %% [markdown]
# ### Question 5.4: Explain the bits {points}
#
# With numbers from your tables:
# 1. Which recipe explains flash, and which explains math on your machine? What does math do with bf16 inputs, then?
# 2. Why does a fused kernel round $e$ to bf16 at all, although its scores are in fp32?
# 3. Two backends agree in only part of their bits. Give a test that tells "rounding" from "a mistake", with a threshold
#    and where it comes from. Why is "at most 1 step everywhere" no good threshold?
# 4. Forward repeats itself. Backward may not, on a GPU: look at the column `backward` of the table that was recorded on an
#    H200, how many different gradients each backend gave in 8 runs. Which sum is added in changing order, and what would a
#    deterministic kernel have to do instead?
# 5. The same query gives other bits alone than among others. Nothing is random there. What changed?
#
# {hint idea}
# A sum in another order is rounded at other places. Every one of the five answers is about which sum, and which order.
#
# {hint plan}
# 1: match the errors in the table. 2: what do tensor cores take as operands? 3: what is a right result allowed to
# differ by? 4 and 5: who adds what, and in which order?
#
# {hint line}
# For 4, ask which gradient several programs have to add to at the same time. For 5, nothing is random: the shape of the
# problem chose another kernel, or another split.

# %% [markdown] nbgrader={"grade_id": "q5_4", "grade": true, "solution": true, "points": 5}
# 1. Flash: e rounded before the product, and the output (2.2e-3 relative rms for 512 keys). Math has the error of
#    rounding the output alone (1.66e-3): it converts bf16 inputs to fp32, computes there, and rounds once at the end.
# 2. The tensor cores (or AMX/AVX-512 bf16 units) multiply bf16 by bf16 and add in fp32. P must be bf16 to be an operand;
#    in fp32 it would need the slow units, and twice the registers.
# 3. Compare both with float64 in relative rms: a backend is right if its error is at most, say, twice that of a recipe
#    that rounds the same places (here 2.3e-3, so 5e-3). Numbers near 0 that come from cancellation are off by many of
#    their own tiny steps although the absolute error is small, so a bound in steps fails a right kernel.
# 4. dQ: programs that own a block of keys each add to the same rows of dQ with atomic additions (dK and dV are each owned
#    by one program). A deterministic kernel adds in a fixed order: each program writes its part apart and a second pass
#    sums them up, or programs wait for their turn. The first costs memory, both cost time.
# 5. Another shape takes another path: other tile sizes or a split over the keys, or matrix-vector instead of
#    matrix-matrix products. So sums are added in another order. Each path repeats itself.
#
# === BEGIN MARK SCHEME ===
# 1 point for each of the five; numbers from the student's tables in 1 and 3, otherwise take off half a point each.
# 1: e/P and output for flash; output only for math, so fp32 inside (or the recipe that fits the student's GPU).
# 2: operands of the matrix unit are bf16.
# 3: comparison with float64 and a threshold from rounding; many steps near zero are harmless.
# 4: atomic adds into dQ (or dK/dV, if the kernel is parallel over queries); a fixed order, by parts or by waiting.
# 5: other tiling / split / kernel for another shape, so another order of summation.
# === END MARK SCHEME ===

# %% [markdown]
# ### Bonus Question 5.5: FP8 with scales {points}
#
# FP8 (`torch.float8_e4m3fn`) has 4 significant bits and ends at 448. Half of the bytes of bf16, and on a Hopper GPU twice
# the FLOP/s. To use its range, a tensor is divided by a **scale** before it is rounded, so that its largest absolute
# value lands on 448. One scale for the whole tensor is simple. But a token that is ten thousand times larger than the
# others pushes them to the lower end of the range, where the format runs out of bits. With a scale for each block of
# tokens, the damage stays in the block.
#
# 1. `quantize_fp8(x, block)` for `x` (B, H, S, D): `(x8, scale)` with `x8` in `torch.float8_e4m3fn`, shape of `x`, and
#    `scale` in float32. `block=None`: one scale, shape (1, 1, 1, 1). Otherwise one scale for each batch, head and block
#    of `block` tokens: shape (B, H, ceil(S / block), 1); the last block may be shorter. `x8 = x / scale`. A block of
#    zeros gets scale 1.
# 2. `dequantize_fp8(x8, scale, block)`: back to float32.
#
# {hint idea}
# A scale moves the numbers into the range of the format. The error is then relative to the largest number under the
# same scale.
#
# {hint plan}
# Find the largest absolute value for each scale, divide it by the largest number of the format, divide x by the scale
# in float32 and cast. Back: cast, multiply by the same scale.
#
# {hint line}
# A block of zeros has no largest value. The last block may be shorter. And each token has to meet the scale of its own
# block.

# %% nbgrader={"grade_id": "bonus_5_5", "solution": true}
def quantize_fp8(x: torch.Tensor, block: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x (B, H, S, D) as float8_e4m3fn, and the float32 scales of the tensor or of its blocks of tokens."""
    ### BEGIN SOLUTION
    largest_fp8 = torch.finfo(torch.float8_e4m3fn).max
    x = x.float()
    if block is None:
        amax = x.abs().amax().reshape(1, 1, 1, 1)
    else:
        amax = torch.stack([part.abs().amax(dim=(2, 3)) for part in x.split(block, dim=2)], dim=2)[..., None]
    scale = torch.where(amax > 0, amax / largest_fp8, 1.0)
    return (x / spread_scales(scale, block, x.shape[2])).to(torch.float8_e4m3fn), scale


def spread_scales(scale, block, length):
    return scale if block is None else scale.repeat_interleave(block, dim=2)[:, :, :length]
    ### END SOLUTION


def dequantize_fp8(x8: torch.Tensor, scale: torch.Tensor, block: int | None = None) -> torch.Tensor:
    """The float32 numbers that x8 and its scales stand for."""
    ### BEGIN SOLUTION
    return x8.float() * spread_scales(scale, block, x8.shape[2])
    ### END SOLUTION


# %% nbgrader={"grade_id": "bonus_5_5_tests", "grade": true, "points": 7}
@check("Bonus 5.5", "FP8 with scales")
def check_fp8(quantize_fp8, dequantize_fp8):
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 3, 40, 8, dtype=dtype)
        x[0, 0, 0] *= 1000
        x[1, 2, 16:32] = 0.0  # a block of zeros
        for block, shape in ((None, (1, 1, 1, 1)), (16, (2, 3, 3, 1)), (1, (2, 3, 40, 1))):
            what = f"quantize_fp8 of {tuple(x.shape)} with block {block}"
            got = quantize_fp8(x, block)
            assert isinstance(got, tuple | list) and len(got) == 2, f"{what} should be (x8, scale), and is {got!r:.80}"
            x8, scale = got
            assert x8.dtype == torch.float8_e4m3fn and x8.shape == x.shape, f"x8 of {what} should be float8_e4m3fn of x's shape, and is {x8.dtype}"
            assert scale.dtype == torch.float32, f"scale of {what} should be float32, and is {scale.dtype}"
            assert tuple(scale.shape) == shape, f"scale of {what} has shape {tuple(scale.shape)}, expected {shape}"
            assert torch.isfinite(x8.float()).all() and torch.isfinite(scale).all(), (
                f"{what} holds NaN or infinity: a block of zeros has no largest value to divide by. Its scale is 1")
            largest = x8.float().abs().max().item()
            assert largest == 448, f"{what}: the largest absolute value should land on 448, and the largest is {largest:g}"
            # the scale of the first block, or of all, is given by token 0, which is the largest there
            top = x[0, 0, :1].float().abs().max().item()
            expect_number(scale.flatten()[0].item(), top / 448, rel=1e-3, what=f"the first scale of {what}", mistakes={
                "It is the inverse: x8 = x / scale, and x = x8 * scale.": 448 / top})
            if block == 16:
                expect_number(scale[1, 2, 1, 0].item(), 1.0, rel=0, what=f"the scale of a block of zeros, {what}")
                last = x[0, 1, 32:].float().abs().max().item() / 448
                expect_number(scale[0, 1, 2, 0].item(), last, rel=1e-3, what=f"the scale of the last, shorter block, {what}")
            back = dequantize_fp8(x8, scale, block)
            wide, spread = x.float(), scale if block is None else scale.repeat_interleave(block, dim=2)[:, :, :40]
            assert isinstance(back, torch.Tensor) and back.dtype == torch.float32 and back.shape == x.shape, f"dequantize_fp8 after {what} should be float32 of x's shape"
            worst = ((back - wide).abs() - wide.abs() / 16 * 1.01 - spread * 2**-10 * 1.01).max().item()
            assert worst <= 0, (f"dequantize_fp8 after {what} misses x by more than e4m3 rounds. x8 is x / scale, computed in float32; "
                                "back, each number is multiplied by the scale of its own block")


check_fp8(quantize_fp8, dequantize_fp8).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.fp8(quantize_fp8, dequantize_fp8).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# First the format alone: every 128th token is made larger by a factor, and the error is that of the *other* tokens. Then
# attention of plain random numbers with `q`, `k` and `v` in FP8. The products are computed in fp32 here; only the
# rounding is that of FP8.
#
# **Before you run.** bf16 rounds by up to 2⁻⁸ of a number, e4m3 by up to 2⁻⁴. What error do you expect? From which factor
# on does a scale for each token save a third of the error: 100, 10,000 or 100,000? And where would INT8 need them, whose steps are all of one size? (The table has a
# column for INT8 with one scale.)

# %%
kinds_of_scale = {"one scale": None, "blocks of 64": 64, "a scale for each token": 1}
guesses["error of e4m3 / error of bf16"] = None
guesses["a scale for each token saves a third of the error from"] = None  # "100 times", "10000 times" or "100000 times"
rows = []
for factor in (1, 10, 100, 10_000, 100_000):
    x = random_qkv(1, 4, 1024, 64, dtype=torch.float32)[0]
    ordinary = torch.arange(1024, device=device) % 128 != 0
    x[:, :, ~ordinary] *= factor
    row = {"large tokens": f"{factor} times"}
    for name, block in kinds_of_scale.items():
        wrong = (dequantize_fp8(*quantize_fp8(x, block), block) - x)[:, :, ordinary]
        row[name] = (wrong.square().mean() / x[:, :, ordinary].square().mean()).sqrt().item()
    scale = x.abs().max() / 127  # INT8 has 255 numbers, -127 to 127, one step apart
    wrong = ((x / scale).round() * scale - x)[:, :, ordinary]
    row["INT8, one scale"] = (wrong.square().mean() / x[:, :, ordinary].square().mean()).sqrt().item()
    rows.append(row)
results["fp8"] = rows
show(rows, "large tokens")
q, k, v = random_qkv(1, 4, 512, 64, dtype=torch.float32)
for name, block in kinds_of_scale.items():
    rounded = [dequantize_fp8(*quantize_fp8(t, block), block) for t in (q, k, v)]
    print(f"attention, FP8, {name:22} rms error {errors(F.scaled_dot_product_attention(*rounded), q, k, v)[1]:.4f}")
in_bf16 = F.scaled_dot_product_attention(*(t.bfloat16() for t in (q, k, v)))
print(f"attention, bf16 {'':23} rms error {errors(in_bf16, q, k, v)[1]:.4f}")
rounded = [dequantize_fp8(*quantize_fp8(t), None) for t in (q, k, v)]
beside_guess("error of e4m3 / error of bf16", errors(F.scaled_dot_product_attention(*rounded), q, k, v)[1] / errors(in_bf16, q, k, v)[1])
saved = [row["large tokens"] for row in rows if row["a scale for each token"] < 2 / 3 * row["one scale"]]
beside_guess("a scale for each token saves a third of the error from", saved[0] if saved else "none of these")
if not on_gpu:
    show_recorded("fp8")

# %% [markdown]
# FP8 is a floating-point format: its steps shrink with the number, so a token that is a hundred times smaller than the largest
# keeps its 4 significant bits, until the exponent ends. The steps of INT8 are all of one size, that of the largest number over
# 127. At a factor of 10 the ordinary tokens have a few steps left; at 100 most of their numbers are rounded to zero.

# %% [markdown]
# # Part 6: A table from an H200
#
# The course measured all four backends on an NVIDIA H200, over shapes of training, prefill and decode. Each shape was
# timed with its backends taking turns, each was compared with float64 first, and each backend was proved from its
# kernels. What stands in the file are **recorded** numbers. Your machine had no part in them, and you will treat them as
# a data set.
#
# One row is one shape and one backend. Columns that you need:
#
# | Column | What it holds |
# |---|---|
# | `kind` | training, prefill or decode |
# | `pass` | "forward", or "both": forward and backward |
# | `shape` | the shape's number; its sizes are `batch`, `heads`, `kv_heads`, `seq_len_q`, `seq_len_kv`, `head_dim` |
# | `backend`, `is_default` | the backend, and whether torch picks it by itself |
# | `status`, `refused` | "ok", or why there is no time; torch's reason |
# | `ms`, `tflops`, `gb_s` | time (ms), TFLOP/s, GB/s |
# | `error` | relative, against float64; of output and gradients the worst |
# | `kernels` | the names of the kernels that ran |
#
# Decode rows have 1 or 4 queries. Four is speculative decoding: the model checks four tokens at once.

# %%
GRID = Path("assets/results/h200/sdpa_grid.json")
SHAPE = ["kind", "pass", "batch", "heads", "kv_heads", "seq_len_q", "seq_len_kv", "head_dim", "causal"]


def load_grid(path: Path, which: str = "grid") -> pd.DataFrame:
    """The rows of a recorded sweep ("grid" or "held-out"), SDPA's four backends, with a number for each shape."""
    if not path.exists():
        print(f"There is no {path} here: the cells below work on an empty table.")
        return pd.DataFrame(columns=[*SHAPE, "shape", "backend", "status", "ms", "is_default", "tflops", "gb_s", "error",
                                     "refused"])
    document = json.loads(path.read_text())
    machine = document["environment"]
    print(f"Recorded on {machine['gpu']}, torch {machine['torch']}, commit {machine['commit']}. Not measured here.")
    rows = pd.DataFrame(document["rows"])
    if "set" in rows:
        rows = rows[rows["set"] == which]
    rows = rows[rows["backend"].isin(list(BACKENDS))].copy()
    rows["is_default"] = rows["is_default"].eq(True)
    rows["shape"] = rows.groupby(SHAPE).ngroup()
    return rows.reset_index(drop=True)


grid = load_grid(GRID)
print(f"{len(grid)} rows, {grid['shape'].nunique()} shapes")
if len(grid):
    display(grid.groupby(["kind", "backend"])["status"].value_counts().unstack(fill_value=0))
    columns = ["shape", *SHAPE, "backend", "status", "is_default", "ms", "tflops", "gb_s", "error"]
    first_rows = grid.sort_values("shape")[columns].head(5).reset_index(drop=True).T  # rows as columns: so wide a table would not fit the page
    show(first_rows.reset_index(names="column"), "column")

# %% [markdown]
# ### Question 6.1: Who is fastest, and what does the default lose? {points}
#
# Three functions of such a table. Only rows with `status` "ok" have a time that counts.
#
# 1. `fastest(grid)`: a Series, indexed by `shape`: the backend with the smallest `ms`. A shape without any time is left
#    out.
# 2. `default_slowdown(grid)`: a Series, indexed by `shape`: `ms` of the default's row over the smallest `ms` of that
#    shape. 1.0 means that the default is the best. A shape whose default has no time is left out.
# 3. `geometric_mean(values)`: $\left(\prod x_i\right)^{1/n}$ of a Series, the right mean for ratios. It must not
#    overflow with hundreds of values.
#
# {hint idea}
# Throw away what has no valid time first. Then each question is one step of grouping.
#
# {hint plan}
# `fastest`: of each shape the row with the smallest time. `default_slowdown`: two Series with the same index, one
# divided by the other. `geometric_mean`: through logarithms.
#
# {hint line}
# A refused row may hold a number in `ms`. A division of two Series leaves NaN where one of them has no entry: what
# should happen to those shapes?

# %% nbgrader={"grade_id": "q6_1", "solution": true}
def fastest(grid: pd.DataFrame) -> pd.Series:
    """The fastest backend of each shape."""
    ### BEGIN SOLUTION
    timed = grid[grid["status"] == "ok"]
    return timed.loc[timed.groupby("shape")["ms"].idxmin()].set_index("shape")["backend"]
    ### END SOLUTION


def default_slowdown(grid: pd.DataFrame) -> pd.Series:
    """Time of torch's default over the best time, for each shape."""
    ### BEGIN SOLUTION
    timed = grid[grid["status"] == "ok"]
    best = timed.groupby("shape")["ms"].min()
    default = timed[timed["is_default"]].set_index("shape")["ms"]
    return (default / best).dropna()
    ### END SOLUTION


def geometric_mean(values: pd.Series) -> float:
    """The n-th root of the product of n positive values."""
    ### BEGIN SOLUTION
    return math.exp(sum(math.log(value) for value in values) / len(values))
    ### END SOLUTION


# %% nbgrader={"grade_id": "q6_1_tests", "grade": true, "points": 6}
@check("6.1", "The fastest and the default")
def check_fastest(fastest, default_slowdown, geometric_mean):
    # shape 0: cudnn wins; shape 1: cudnn failed, whatever its ms; shape 4: the default was refused; shape 7: no time at all
    rows = [(0, "math", 9.0, "ok", False), (0, "flash", 2.0, "ok", True), (0, "cudnn", 1.0, "ok", False),
            (1, "math", 8.0, "ok", False), (1, "flash", 3.0, "ok", True), (1, "cudnn", 0.5, "failed", False),
            (4, "math", 6.0, "ok", False), (4, "flash", 0.1, "refused", True), (4, "cudnn", 4.0, "ok", False),
            (7, "math", 3.0, "out of memory", False), (7, "flash", math.nan, "refused", True)]
    small = pd.DataFrame(rows, columns=["shape", "backend", "ms", "status", "is_default"], index=range(20, 9, -1)).sample(frac=1)
    before = small.copy(deep=True)
    got, only_ok = fastest(small), 'Rows that are not "ok" do not count, whatever stands in their `ms`.'
    assert isinstance(got, pd.Series), f"fastest(grid) should be a Series, and is a {type(got).__name__}"
    right = {0: "cudnn", 1: "flash", 4: "cudnn"}
    hint = only_ok if dict(got) == {0: "cudnn", 1: "cudnn", 4: "flash", 7: "math"} else (
        "The fastest has the smallest time." if dict(got) == {0: "math", 1: "math", 4: "math"} else
        "A shape without any time is left out; the index is `shape`.")
    assert dict(got) == right, f"fastest(grid) is {dict(got)}, expected {right}. {hint}"
    got = default_slowdown(small)
    assert isinstance(got, pd.Series), f"default_slowdown(grid) should be a Series, and is a {type(got).__name__}"
    got, right = dict(got), {0: 2.0, 1: 1.0}
    hint = "The index is `shape`."
    if set(got) > {0, 1}:
        hint = "A shape whose default has no time is left out: a missing default is no 1, and no NaN. " + only_ok
    elif got == {0: 0.5, 1: 1.0}:
        hint = "Time of the default over the best time, not the other way round."
    elif got.get(1) == 6.0:
        hint = only_ok
    assert got == right, f"default_slowdown(grid) is {got}, expected {right}. {hint}"
    assert small.equals(before), "one of the functions changed the table it was given: work on a copy"
    expect_number(geometric_mean(pd.Series([1.0, 2.0, 32.0])), 4.0, rel=1e-6, what="the geometric mean of 1, 2 and 32", mistakes={
        "That is the arithmetic mean.": 35 / 3, "That is the median.": 2.0, "Take the n-th root of the product.": 64.0,
        "The n-th root, not always the square root.": 8.0})
    got = geometric_mean(pd.Series([100.0] * 400))
    assert math.isfinite(got), "the geometric mean of 400 times 100 is 100, and the product of all overflows: add logarithms instead"
    expect_number(got, 100.0, rel=1e-6, what="the geometric mean of 400 times 100")


check_fastest(fastest, default_slowdown, geometric_mean).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.fastest_and_default(fastest, default_slowdown, geometric_mean).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# **Before you run.** On which share of the shapes will the default be the best? And which backend will win decode?

# %%
guesses["share of shapes where the default is the best"] = None  # 0 to 1
guesses["the backend that wins most decode shapes"] = None
if len(grid):
    shapes = grid.drop_duplicates("shape").set_index("shape")
    wins = pd.crosstab(shapes["kind"], fastest(grid))
    display(wins)
    results["recorded_wins"] = wins.reset_index().to_dict("records")
    default_of = grid[grid["is_default"]].set_index("shape")["backend"]
    beside_guess("share of shapes where the default is the best", float((fastest(grid) == default_of.reindex(fastest(grid).index)).mean()))
    beside_guess("the backend that wins most decode shapes", wins.loc["decode"].idxmax())
    colors = {"math": "#9a9a9a", "flash": series(0).color, "efficient": series(1).color, "cudnn": series(2).color}
    beside = {"math": 0.82, "flash": 0.92, "efficient": 1.0, "cudnn": 1.09}  # points of one shape stand side by side
    counted = grid.query("status == 'ok'")
    panels = {"training": counted["kind"] == "training", "prefill": counted["kind"] == "prefill"}
    for queries in (1, 4):
        panels[f"decode, {queries} quer{'y' if queries == 1 else 'ies'}"] = (counted["kind"] == "decode") & (counted["seq_len_q"] == queries)
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.6), sharey=True, sharex=True, layout="constrained")
    for ax, (title, which) in zip(axes.flat, panels.items(), strict=True):
        part = counted[which]
        best = part.groupby("shape")["ms"].transform("min")
        for (backend, head_dim), rows in part.assign(slowdown=part["ms"] / best).groupby(["backend", "head_dim"]):
            marker = {64: "o", 128: "s", 256: "^"}[head_dim]
            ax.plot(rows["seq_len_kv"] * beside[backend], rows["slowdown"], marker, color=colors[backend], markersize=5,
                    markerfacecolor="none", alpha=0.8)
        ax.set(xscale="log", yscale="log")
        plain_ticks(ax.xaxis, (128, 1024, 8192, 65536))
        plain_ticks(ax.yaxis, (1, 1.5, 2, 3, 5, 10, 30, 100))
        style_axes(ax, title=title, x="keys" if ax in axes[1] else None, y="time / best time" if ax in axes[:, 0] else None)
    handles = [plt.Line2D([], [], color=c, marker="s", linestyle="", label=b) for b, c in colors.items() if b in set(counted["backend"])]
    handles += [plt.Line2D([], [], color="black", marker=m, linestyle="", markerfacecolor="none", label=f"head dim {d}") for d, m in ((64, "o"), (128, "s"), (256, "^"))]
    figure.legend(handles=handles, loc="outside right center", frameon=False)
    figure.suptitle("Recorded on an H200, not measured here")
    plt.show()

# %% [markdown]
# The recorded kernels also say who splits the keys. A decode call that launches flash's `splitkv` and `combine`, or
# cuDNN's kernel and a `reduction` after it, did what you wrote in Question 3.2.
#
# **Before you run.** Your model in Question 3.3: at which batch does splitting stop paying? Guess the share of flash's one-query
# calls that split with 1 to 8 programs (batch × key heads), and with more than 132.

# %%
guesses["flash splits, 1-8 programs"] = None  # 0 to 1
guesses["flash splits, over 132 programs"] = None
if len(grid):
    decode = grid[(grid["kind"] == "decode") & (grid["status"] == "ok") & grid["backend"].isin(["flash", "cudnn"])]
    in_two = decode["kernels"].map(lambda names: any("combine" in name or "reduction" in name for name in names))
    programs = decode["batch"] * decode["kv_heads"]
    of_programs = pd.cut(programs, [0, 8, 32, 132, 10_000], labels=["1-8", "9-32", "33-132", "over 132"])
    by = [decode["backend"], decode["seq_len_q"], of_programs]
    split_share = in_two.groupby(by, observed=True).agg(["mean", "size"])
    split_share.index.names = ["backend", "queries", "batch × key heads"]
    split_share = split_share.rename(columns={"mean": "share of calls that split", "size": "shapes"}).reset_index()
    show(split_share, ["backend", "queries"])
    for programs in ("1-8", "over 132"):
        rows = split_share.query("backend == 'flash' and queries == 1")
        rows = rows[rows["batch × key heads"] == programs]
        if len(rows):
            name = f"flash splits, {programs} programs"
            beside_guess(name, float(rows["share of calls that split"].iloc[0]))

# %% [markdown]
# ### Question 6.2: Seven questions about the table {points}
#
# Write `grid_answers(grid)`: a dict with these keys. Compute each answer from the table, so that it holds for any table
# of this form. Only rows with `status` "ok" have numbers that count. The memory bandwidth of an H200 in **TB/s** is
# `GPU_SPECS["H200"]["memory_bandwidth_tb_s"]`.
#
# | Key | Question |
# |---|---|
# | `default_wins` | over the shapes that have a fastest backend: share (0 to 1) where it is the default |
# | `default_loss` | geometric mean of `default_slowdown` over the shapes that have one |
# | `decode_winner` | the backend that is fastest on the most decode shapes |
# | `worst_default` | the largest `default_slowdown` among prefill shapes |
# | `peak_tflops` | the largest `tflops` of a prefill row with head dimension 128 |
# | `decode_bandwidth` | the largest `gb_s` of a decode row, as a share of an H200's memory bandwidth |
# | `cudnn_over_flash` | geometric mean, over the training shapes that both run, of flash's `ms` over cuDNN's |
#
# {hint idea}
# Each answer is a filter, then one number. Write the filters first.
#
# {hint plan}
# Make the table of valid rows, and from it those of decode, prefill and training. Use your functions of Question 6.1.
# `pivot` puts flash and cuDNN side by side.
#
# {hint line}
# For `default_wins` every shape that has a fastest backend counts, also one whose default has no time. GB/s and TB/s
# differ by 1000.

# %% nbgrader={"grade_id": "q6_2", "solution": true}
def grid_answers(grid: pd.DataFrame) -> dict:
    """Answers of Question 6.2 by key, computed from a table of results."""
    ### BEGIN SOLUTION
    timed = grid[grid["status"] == "ok"]
    kinds = grid.drop_duplicates("shape").set_index("shape")["kind"]
    winners, loss = fastest(grid), default_slowdown(grid)
    default = timed[timed["is_default"]].set_index("shape")["backend"]
    decode, prefill = timed[timed["kind"] == "decode"], timed[timed["kind"] == "prefill"]
    training = timed[timed["kind"] == "training"].pivot(index="shape", columns="backend", values="ms")
    return {
        "default_wins": float((default.reindex(winners.index) == winners).mean()),
        "default_loss": geometric_mean(loss),
        "decode_winner": winners[kinds.reindex(winners.index) == "decode"].value_counts().idxmax(),
        "worst_default": loss[kinds.reindex(loss.index) == "prefill"].max(),
        "peak_tflops": prefill.loc[prefill["head_dim"] == 128, "tflops"].max(),
        "decode_bandwidth": decode["gb_s"].max() / 1e3 / GPU_SPECS["H200"]["memory_bandwidth_tb_s"],
        "cudnn_over_flash": geometric_mean((training["flash"] / training["cudnn"]).dropna()),
    }
    ### END SOLUTION


# %% nbgrader={"grade_id": "q6_2_tests", "grade": true, "points": 7}
@check("6.2", "Seven questions about the table")
def check_answers(grid_answers):
    def row(shape, kind, backend, ms, tflops, gb_s, status="ok", head_dim=128):
        return {"shape": shape, "kind": kind, "backend": backend, "ms": ms, "status": status, "head_dim": head_dim,
                "is_default": backend == "flash", "tflops": tflops, "gb_s": gb_s}

    small = pd.DataFrame([
        row(0, "training", "flash", 3.0, 900, 100), row(0, "training", "cudnn", 2.0, 800, 200), row(0, "training", "math", 90.0, 9, 9),
        row(1, "training", "flash", 8.0, 70, 100), row(1, "training", "cudnn", 1.0, 80, 5000), row(1, "training", "math", 90.0, 9, 9),
        row(2, "prefill", "flash", 4.0, 500, 100), row(2, "prefill", "cudnn", 1.0, 600, 200), row(2, "prefill", "math", 0.1, 999, 9, "failed"),
        row(3, "prefill", "flash", 3.0, 50, 100, head_dim=64), row(3, "prefill", "cudnn", 2.0, 700, 200, head_dim=64),
        row(4, "decode", "flash", 1.0, 5, 2400), row(4, "decode", "cudnn", 2.0, 4, 1200), row(4, "decode", "math", 0.5, 9, 4700, "failed"),
        row(5, "decode", "flash", 1.0, 5, 100), row(5, "decode", "cudnn", 3.0, 4, 100),
        row(6, "decode", "flash", 0.1, 5, 100, "refused"), row(6, "decode", "cudnn", 3.0, 4, 100), row(6, "decode", "math", 9.0, 4, 100),
        row(7, "training", "flash", 0.1, 5, 100, "refused"), row(7, "training", "cudnn", 7.0, 4, 100),
    ])
    got = grid_answers(small.copy(deep=True))
    keys = {"default_wins", "default_loss", "decode_winner", "worst_default", "peak_tflops", "decode_bandwidth",
            "cudnn_over_flash"}
    assert isinstance(got, dict) and set(got) == keys, f"the keys should be {sorted(keys)}; got {got!r:.200}"
    assert got["decode_winner"] == "flash", (f"flash wins two of three decode shapes; decode_winner is {got['decode_winner']!r}. Count "
                                             "among decode shapes only, the shapes that a backend wins")
    loss = [1.5, 8.0, 4.0, 1.5, 1.0, 1.0]
    bandwidth = GPU_SPECS["H200"]["memory_bandwidth_tb_s"]
    for key, right, mistakes in (
        ("default_wins", 2 / 8, {"Shapes whose default has no time count, too: they are no wins.": 2 / 6,
                                 "It is a share of shapes, between 0 and 1.": 2.0, "In percent? It should lie between 0 and 1.": 25.0,
                                 "A share of shapes, not of rows.": 2 / 17}),
        ("default_loss", math.prod(loss) ** (1 / 6), {"Geometric mean, not the arithmetic one.": sum(loss) / 6,
                                                      "Geometric mean, not the median.": 1.5}),
        ("worst_default", 4.0, {"Among prefill shapes only.": 8.0, "The largest: the default loses most there.": 1.5}),
        ("peak_tflops", 600.0, {"Head dimension 128 only.": 700.0, "Prefill only.": 900.0, 'Rows that are not "ok" do not count.': 999.0}),
        ("decode_bandwidth", 2.4 / bandwidth, {
            "As a share: GB/s over the bandwidth in GB/s.": 2400.0, "Memory bandwidth in the table is in TB/s, and gb_s in GB/s.": 2400 / bandwidth,
            "Decode only.": 5.0 / bandwidth, 'Rows that are not "ok" do not count.': 4.7 / bandwidth, "As a share of the bandwidth.": 2.4}),
        ("cudnn_over_flash", math.sqrt(1.5 * 8), {"It is flash's time over cuDNN's: above 1, cuDNN is faster.": 1 / math.sqrt(12),
            "The mean of ratios, shape by shape, not the ratio of sums.": 11 / 3, "Geometric mean, not the arithmetic one.": 4.75,
            "Training shapes only.": (1.5 * 8 * 4 * 1.5 * 0.5 / 3) ** (1 / 6)}),
    ):
        expect_number(got[key], right, rel=1e-6, what=f"{key} of a small table of 8 shapes", mistakes=mistakes)
    # Of 400 such tables in one the answers are the same, and the products of all ratios are beyond what 64 bits hold.
    many = grid_answers(pd.concat([small.assign(shape=small["shape"] + 8 * i) for i in range(400)], ignore_index=True))
    for key, right in got.items():
        if key != "decode_winner":
            expect_number(many[key], right, rel=1e-6, what=f"{key} of a table of 3200 shapes, the small table 400 times,")


check_answers(grid_answers).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.grid_answers(grid_answers).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# **Before you run.** Write seven numbers down. You will be surprised by two of them.

# %%
guesses |= dict.fromkeys([
    "default_wins", "default_loss", "decode_winner", "worst_default", "peak_tflops", "decode_bandwidth", "cudnn_over_flash"
])  # set the ones you guess below this line, for example guesses["default_wins"] = 0.5
if len(grid):
    print("recorded on an H200:")
    for key, value in grid_answers(grid).items():
        beside_guess(key, value if isinstance(value, str) else float(value))
    loss = default_slowdown(grid)
    table = grid.drop_duplicates("shape").set_index("shape")[SHAPE].assign(
        default=grid[grid["is_default"]].set_index("shape")["backend"], fastest=fastest(grid), slowdown=loss)
    show(table.sort_values("slowdown", ascending=False).head(8).reset_index(), "shape")
    refused = grid[grid["status"] == "refused"]
    reasons = refused["refused"].str.partition(". ")[0].rename("reason")  # the first sentence; the second names sizes
    show(refused.groupby(["backend", reasons]).size().rename("shapes").reset_index(), "backend")

# %% [markdown]
# ### Question 6.3: Write the rule {points}
#
# You run a service on H200s. Training, prefill and decode go through SDPA.
#
# 1. Write a rule of at most four lines: which backend for which calls? Look at the number of queries. Support each line
#    with numbers from the table.
# 2. What does your rule gain over the default, as a geometric mean? What does it lose against picking the best for every
#    shape? (Compute both. Add cells.)
# 3. Which calls does your favourite refuse? The sweep holds no such call for cuDNN or flash: use the recorded map of
#    Part 4. What does your rule do then?
# 4. Name two reasons why the table may be wrong for your service tomorrow, and one measurement that would tell you.
# 5. Somebody wants to ship the rule for A100s as well. What do you answer?
#
# {hint idea}
# A rule is good if it is short, and if you know what it costs.
#
# {hint plan}
# Look at winners by kind first, then by the number of queries, then by head dimension. Then write the rule as a
# function of a row, add a column of times, and compare with the default and with the best.
#
# {hint line}
# Where is the default slow by more than 1.5? What do these shapes have in common? And which calls did the map of Part 4
# refuse for your favourite?

# %% [markdown] nbgrader={"grade_id": "q6_3", "grade": true, "solution": true, "points": 5}
# 1. For example: cuDNN for training and prefill (it wins 90 of 93 shapes); flash for decode of four queries with at most
#    16 programs, batch × key heads (18 of 19 shapes, 1.9 times as fast: it splits the keys there, and cuDNN does not);
#    flash for decode of one query with head dimension 256 (29 of 36, 1.15 times); cuDNN for the other decode shapes.
# 2. `rule = ...; geometric_mean(ms of the default / ms of the rule)`, and the same of the rule over the best of each
#    shape. The rule above gains 1.07, and takes 1.01 times the best.
# 3. cuDNN: strides, fp32 and fp64, head dimension 300, tensors of three dimensions (torch 2.11), a mask of three dimensions,
#    one batch of keys for all, in torch's words. The rule pins a list, or catches the refusal and runs the next one, and
#    counts how often that happens, so that nobody gets math without knowing.
# 4. Another version of torch, cuDNN or the driver; shapes that the grid does not have; launches that count (the table's
#    times are those of the device alone); other clocks or power limits. A measurement: held-out shapes of the service,
#    interleaved, once in a while.
# 5. That nothing was measured there: another chip has no wgmma or TMA, cuDNN has other kernels, the default may be right.
#    Run the sweep there.
#
# === BEGIN MARK SCHEME ===
# 1 point for each of the five.
# 1: a rule that the table supports, with numbers. 2: both means, computed. 3: names refusals and a fallback that is seen.
# 4: two of: version, shapes off the grid, launch overhead, clocks, contention; and a measurement. 5: measure there.
# === END MARK SCHEME ===

# %% [markdown]
# ### Bonus Question 6.4: A shape that nobody measured {points}
#
# No table holds the shapes of tomorrow. Write `choose_backend(grid, call, able)`: the backend for a call whose shape need
# not be in the table.
#
# - `call` is a dict with `kind`, `head_dim`, `causal`, `batch`, `heads`, `kv_heads`, `seq_len_q`, `seq_len_kv`. `able` is
#   the list of backends that can run it: a choice outside of it is useless.
# - Look only at shapes of the same `kind`, `head_dim` and `causal` for which at least one backend of `able` has a time
#   (`status` "ok").
# - Take the **nearest** of them: the smallest sum of $\big(\log_2(a/b)\big)^2$ over `batch`, `heads`, `kv_heads`,
#   `seq_len_q` and `seq_len_kv`. From 512 to 1024 is as far as from 8192 to 16384. Of two equally near ones take the one
#   with the smaller `shape`.
# - The answer is the fastest backend of `able` there. If no shape is left, the answer is `able[0]`.
#
# {hint idea}
# Nearest means: the sizes differ by the smallest factors. Logarithms turn factors into distances.
#
# {hint plan}
# Filter: valid times, backends in `able`, same kind, head dimension and causality. Nothing left: the first of `able`.
# Otherwise the distance of each row, the smallest, and the fastest backend there.
#
# {hint line}
# Filter by `able` before you look for the nearest: a shape that only others can run does not count. Two equal distances
# may differ in the last bit.

# %% nbgrader={"grade_id": "bonus_6_4", "solution": true}
def choose_backend(grid: pd.DataFrame, call: dict, able: list[str]) -> str:
    """The backend of `able` that was fastest on the measured shape nearest to this call."""
    ### BEGIN SOLUTION
    near = grid[(grid["status"] == "ok") & grid["backend"].isin(able)]
    for name in ("kind", "head_dim", "causal"):
        near = near[near[name] == call[name]]
    if near.empty:
        return able[0]
    sizes = ("batch", "heads", "kv_heads", "seq_len_q", "seq_len_kv")
    distance = sum((near[name] / call[name]).map(math.log2) ** 2 for name in sizes)
    ranked = near.assign(distance=distance.round(9)).sort_values(["distance", "shape", "ms"])
    return ranked["backend"].iloc[0]
    ### END SOLUTION


# %% nbgrader={"grade_id": "bonus_6_4_tests", "grade": true, "points": 5}
@check("Bonus 6.4", "A shape that nobody measured")
def check_choose(choose_backend):
    base = {"kind": "prefill", "head_dim": 64, "causal": True, "batch": 1, "heads": 8, "kv_heads": 8, "status": "ok"}

    def rows(shape, times, **sizes):
        length = sizes.pop("length", 1024)
        return [base | {"shape": shape, "seq_len_q": length, "seq_len_kv": length} | sizes | {"backend": backend, "ms": abs(ms)}
                | ({"status": "failed"} if ms < 0 else {}) for backend, ms in times.items()]

    small = pd.DataFrame([
        *rows(0, {"flash": 1.0, "cudnn": 2.0}, length=512), *rows(1, {"flash": 2.0, "cudnn": 1.0, "math": -0.1}, length=2048),
        *rows(2, {"math": 1.0, "efficient": 2.0}, length=1024, batch=64), *rows(3, {"efficient": 1.0, "cudnn": 2.0}, length=1024, kind="training"),
        *rows(4, {"math": 1.0, "cudnn": 2.0}, length=1024, head_dim=128), *rows(5, {"efficient": 1.0, "flash": 3.0}, length=1024, causal=False),
        *rows(6, {"efficient": 1.0, "flash": 3.0}, length=16384),
    ])
    before, every = small.copy(deep=True), ["math", "flash", "efficient", "cudnn"]
    call = {key: value for key, value in base.items() if key != "status"} | {"seq_len_q": 600, "seq_len_kv": 600}
    same = "Look only at shapes of the same kind, head dimension and causality."
    for change, able, expected, hint in (
        ({}, every, "flash", f"600 tokens are nearest to shape 0, of 512. {same}"),
        ({"seq_len_q": 1500, "seq_len_kv": 1500}, every, "cudnn",
         'Shape 1, of 2048 tokens, is the nearest. Rows that are not "ok" have no time that counts.'),
        ({"seq_len_q": 1120, "seq_len_kv": 1120}, every, "cudnn", "Measure distance in powers of two: 2048 is nearer to 1120 than 512 is."),
        ({"seq_len_q": 1024, "seq_len_kv": 1024}, every, "flash", "512 and 2048 are equally far from 1024: take the smaller `shape`."),
        ({"batch": 60, "seq_len_q": 1024, "seq_len_kv": 1024}, every, "math", "All five sizes count, the batch as well."),
        ({"seq_len_q": 1500, "seq_len_kv": 1500}, ["flash"], "flash", "cudnn is not in `able`."),
        ({}, ["efficient", "math"], "math", "Of the nearest shapes only those count for which a backend in `able` has a time: shape 2."),
        ({"head_dim": 256}, ["efficient", "cudnn"], "efficient", "No shape of this head dimension was measured: the answer is able[0]."),
    ):
        got = choose_backend(small, call | change, list(able))
        what = f"choose_backend for {call | change} and able {able}"
        assert got in able, f"{what} is {got!r}, which cannot run the call: it is not in `able`. If no shape is left, it is able[0]"
        if got in ("math", "efficient"):
            hint += f" Or: {same} And all five sizes count."
        assert got == expected, f"{what} is {got!r}, expected {expected!r}. {hint}"
    assert small.equals(before), "choose_backend changed the table it was given: work on a copy"


check_choose(choose_backend).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab4_sdpa as hidden
hidden.choose_backend(choose_backend).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# The sweep also measured shapes at random, off the grid. They were *held out*: your function has not seen them. How much
# time does its choice lose against the best backend of each?
#
# **Before you run.** On this H200 the default was cuDNN for every shape. On what share of the held-out shapes will you be
# within 3% of the best? Predict two numbers: yours, and always cuDNN.

# %%
guesses["held out, within 3% of the best: yours"] = None  # 0 to 1
guesses["held out, within 3% of the best: always cudnn"] = None
held_out = load_grid(GRID, "held-out")
rows = []
for _, group in held_out.groupby("shape"):
    group_ms = group.query("status == 'ok'").set_index("backend")["ms"]
    picks = {"yours": choose_backend(grid, group.iloc[0].to_dict(), list(group_ms.index)), "always cudnn": "cudnn",
             "always flash": "flash"}
    rows.append({name: group_ms.get(pick, math.nan) / group_ms.min() for name, pick in picks.items()})
if rows:
    lost = pd.DataFrame(rows)
    show(pd.DataFrame({"within 3% of the best": (lost <= 1.03).mean(), "geometric mean": lost.apply(lambda x: math.exp(
        x.map(math.log).mean())), "worst": lost.max()}).rename_axis("choice").reset_index(), "choice")
    for choice in ("yours", "always cudnn"):
        beside_guess(f"held out, within 3% of the best: {choice}", float((lost[choice] <= 1.03).mean()))

# %% [markdown]
# ## Save your results
#
# The tables of this run, with the machine they were made on. Compare them with those of another machine.

# %%
machine = environment()
record = {
    "machine": torch.cuda.get_device_name() if on_gpu else roofs.name,
    "commit": machine.get("commit"),
    "environment": machine,
    "tables": {name: table for name, table in results.items() if not name.startswith("recorded")},
    "guesses": {what: {"guess": guesses.get(what), "outcome": outcome} for what, outcome in outcomes.items()},
}
saved = output_path("lab4_results.json")
saved.write_text(json.dumps(record, indent=1, default=str))
print(f"saved {', '.join(record['tables']) or 'no table'} to {saved}")

# %% [markdown]
# ## What you know now
#
# - What ran is what the operators and kernels say. Not the name of the function, not what was asked for.
# - A list of backends says which may run. One backend alone is a pin, and a refusal has words.
# - A kernel made for the chip is worth a factor of two, and a short call is all host time.
# - Decode reads a cache for a handful of FLOPs. Splitting the keys brings the whole chip to read it; it saves
#   no byte and no FLOP.
# - One stride decides whether the fast kernel runs. A copy is often cheaper than the fallback, and a right layout is free.
# - Backends differ by rounding. Compare each with float64, not with each other.
# - A dispatcher's order was written by somebody who did not have your shapes. Measure, then choose.
