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
# # Lab 1: Efficient AI Foundations
#
# An H200 can do 989 trillion bf16 operations a second. While a layer of Gemma-3 writes a reply to one user, word after
# word, it does less than one hundredth of a percent of that. Nothing is broken. The chip is waiting: for memory, and, as
# you will see, for the program that feeds it. Memory alone would allow three to four hundred times as much.
#
# This lab is about these sentences. You will count the operations and the bytes of a computation *before* it runs,
# predict how fast it can be, measure how fast it is, and explain the difference. You start with a matrix product in
# three loops and end with flash attention, written by you.
#
# **After this lab you can**
# 1. measure latency, and compute MACs, FLOPs and I/O of matrix products;
# 2. tell with a roofline model whether an operation is limited by compute or by memory;
# 3. profile code with the PyTorch profiler and read a timeline;
# 4. remove launch overhead with kernel fusion, `torch.compile`, and a CUDA graph that you capture yourself;
# 5. explain why flash attention is fast and small.
#
# | Part | You will |
# |---|---|
# | 1. Fundamental metrics | write GEMM twice, time it honestly, count its work, and write it once more in Triton |
# | 2. The roofline model | predict the speed of GEMM and GEMV, then measure it on this machine |
# | 3. A Gemma-3 decoder layer | count attention and MLP, compare prefill with decode, build a KV-cache loop |
# | 4. Profiling and kernel fusion | look at a timeline, fuse a GELU, compile it, capture it in a graph |
# | 5. Flash attention | see where standard attention runs out of memory, then write online softmax and attention without the score matrix |
#
# **You need** Python and PyTorch tensors (shapes, broadcasting, `@`), and to know what a matrix product and a softmax are.
# You do not need to have written a GPU kernel, and you do not need a GPU. Plan ten hours, four more for
# the bonus (an estimate: take it in two or three sittings, a part or two each).
#
# The lab gives {points:regular} points, and {points:bonus} bonus points.
#
# {points:table}

# %% [markdown]
# ## How to work
#
# - **Run all cells in order.** Later parts use earlier answers. Each cell begins with a line `needs(...)`, which tells you
#   which answer or which earlier cell is missing, for example after a restart of the kernel.
# - **Three hints** are folded away below each question: the idea, the plan, and the line that people miss. Try first.
# - **Read each question to the end.** Most lost points are a sentence not read.
# - **Predict first.** Where it says *Before you run*, the next cell has a line `guesses[...] = None`: write your guess
#   there, then run on. The measured value is printed beside it, and both are saved. A wrong guess teaches more than a
#   right table.
# - **Think about why.** A number is half an answer. The questions in words ask for the other half.
# - **Try the bonus questions.** They go one step further than the lecture.
#
# Write code where it says `# YOUR CODE HERE` and delete the line `raise NotImplementedError()`. Below each answer is a
# cell of checks. It names the mistakes that it knows. Grading tries the same on other shapes, dtypes and tile sizes, and
# counts what a question limits.
#
# Two rules hold for every answer. The inputs stay as they are: `x *= 2` would change the caller's tensor. And where a question
# forbids or limits an operator, compute with PyTorch's operators alone: the inputs' numbers must not leave PyTorch, for NumPy or
# for lists. Single numbers may leave, as in `a[i, k].item()`, and only what runs counts: `np.sqrt(d)` or a comparison with the
# library under `if DEBUG:` costs nothing.
#
# The lab runs with and without a GPU. On a GPU it uses real sizes and 16-bit numbers. On a CPU it uses small sizes and
# 32-bit numbers. The same ideas hold on both, because a CPU has a roof and a memory too. What was recorded on an H200 is
# shown beside your own numbers. The setup cell below says which machine you have.

# %% [markdown]
# ## A GPU in ten minutes
#
# ![A GPU: the CPU puts kernels into a queue; the GPU deals their thread blocks to its SMs, which share an L2 cache and the HBM](assets/gpu_in_ten_minutes.svg)
#
# **A kernel** is a function that runs on the GPU, once for each of very many pieces of data. `torch.relu(x)` runs one. The CPU
# **launches** it: it puts the kernel into a queue, called a **stream**, and goes on without waiting. The GPU takes the kernels
# of a stream out one after the other. So two clocks run: the CPU's, which launches, and the GPU's, which works.
#
# **A streaming multiprocessor (SM)** is the part that computes; an H200 has 132 of them. A kernel is cut into **thread blocks**
# (Triton says *programs*), each is given to one SM, and stays there. When there are more blocks than fit at once, the others
# wait; one filling of the GPU is a **wave**. A block has up to 1024 **threads**, and 32 threads that always take the same step
# together are a **warp**. While one warp waits for memory, the SM runs another. How many warps live on an SM, out of the 64
# that could, is its **occupancy**.
#
# **Tensor cores** are the units of an SM that multiply small matrices. Nearly all FLOP/s of a modern GPU are theirs: what is
# not a matrix product runs on the ordinary units, which are more than ten times slower.
#
# **Memory** comes in levels. **Registers** belong to a thread. **Shared memory**, up to 228 KB an SM on an H200, belongs to a
# block. The **L2 cache**, 60 MB, is shared by all SMs. **HBM**, the 141 GB in the GPU's name, is the main memory: 4.8 TB/s, which is
# fast, and still the narrowest pipe of all. A kernel reads its inputs from HBM and writes its result there. What the next
# kernel needs makes that trip again.
#
# | word | meaning | where it matters |
# |---|---|---|
# | launch | the CPU's work to start one kernel: some microseconds, whatever the kernel does | 1.3, 4.4 |
# | synchronize | wait on the CPU until the GPU has finished its queue | 1.3, 4.1 |
# | tile | the piece of a matrix that one thread block works on | 1.2, 1.5, 1.6 |
# | arithmetic intensity | FLOPs for each byte moved to or from HBM | Part 2 |
# | memory-, compute-, launch-bound | what a kernel waits for | Parts 2 to 4 |
# | fusion | several operators in one kernel, without the trips to HBM in between | Parts 4, 5 |
# | prefill, decode | reading a prompt, all tokens at once; writing a reply, one token at a time | Part 3 |
# | KV cache | the keys and values of earlier tokens, kept for the later ones | 3.4 |
#
# A CPU has the same levels with other names: cores for SMs, vector units for tensor cores, L1, L2 and L3 caches, DRAM for
# HBM. It has no launches: an operator is a function call.
#
# **To read on.** S. Williams, A. Waterman, D. Patterson, *Roofline: an insightful visual performance model* (CACM 2009);
# N. Shazeer, [*Fast transformer decoding*](https://arxiv.org/abs/1911.02150) (2019), on decode and memory;
# M. Milakov, N. Gimelshein, [*Online normalizer calculation for softmax*](https://arxiv.org/abs/1805.02867) (2018);
# T. Dao and others, [*FlashAttention*](https://arxiv.org/abs/2205.14135) (2022);
# J. Austin and others, [*How to scale your model*](https://jax-ml.github.io/scaling-book/) (2025), on rooflines at scale;
# NVIDIA's [CUDA C++ programming guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/), on kernels, streams and
# graphs; [Triton's tutorials](https://triton-lang.org/main/getting-started/tutorials/).

# %% nbgrader={"grade_id": "setup", "locked": true}
import functools
import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.ticker import LogLocator, NullFormatter

from utils import *
from utils.checking import require_answer
from utils.checking.labs.lab1 import *
from utils.benchmark.measuring import measure_together
from utils.attention import attention_decode
from utils.machine.device import compile_support, cuda_graph_support, gluon_support
from utils.machine.environment import environment
from utils.files import output_path, recorded_table
from utils.visualization import series, style_axes

torch.manual_seed(0)
device = default_device()
on_gpu = device.type == "cuda"
dtype = torch.bfloat16 if on_gpu else torch.float32  # the dtype of every benchmark below
print("looking at this machine: some seconds without a GPU ...", flush=True)
roofs = machine_roofs()  # this machine's peak FLOP/s per dtype and its memory bandwidth
dtype_name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
peak, bandwidth = roofs.tflops[dtype_name], roofs.memory_bandwidth_tb_s  # TFLOP/s, TB/s


def synchronize() -> None:
    """Wait until the device has finished everything it was given."""
    if on_gpu:
        torch.cuda.synchronize()


RECORDED = Path("assets/results/h200/lab1.json")  # this lab's tables from an H200
results = {}  # this run's tables, saved at the end
guesses = {}  # your predictions; a measured value is printed beside its guess
outcomes = {}  # what came out, by the same names


def beside_guess(what: str, measured: object) -> None:
    """Print a measured value beside your guess, and keep both."""
    guess, outcomes[what] = guesses.get(what), measured
    shown = f"{measured:.4g}" if isinstance(measured, float) else str(measured)
    print(f"{what}: {shown}" + ("   (no guess)" if guess is None else f"   (you guessed {guess})"))


def report_measured(name: str, measured: dict[str, tuple[float, float]]) -> None:
    """Print measured points, {name: (FLOPs/Byte, TFLOP/s)}, with their share of this machine's roof; keep them.

    A measured roof may be too low, because the machine was busy while it was measured. So when a point stands more than
    10% above a measured roof, the roofs are measured again, and the higher ones are kept.
    """
    global roofs, peak, bandwidth

    def share(point: tuple[float, float]) -> float:
        return point[1] / roofs.attainable_tflops(point[0], dtype_name)

    if roofs.origin == "measured" and max(map(share, measured.values())) > 1.1:
        print("A point stands above its roof. Was the machine busy when the roofs were measured? Measuring them again ...")
        before, roofs = roofs, machine_roofs(refresh=True)  # which keeps the higher ones
        peak, bandwidth = roofs.tflops[dtype_name], roofs.memory_bandwidth_tb_s
        print(f"roofs now: {peak:.3g} TFLOP/s (before: {before.tflops[dtype_name]:.3g}), {bandwidth * 1e3:.4g} GB/s "
              f"(before: {before.memory_bandwidth_tb_s * 1e3:.4g})")
        if max(map(share, measured.values())) > 1.1:
            print("A point is still above its roof. Is the machine busy? If not, which assumption of the model fails for the point?")
    results[name] = []
    for operation, (intensity, speed) in measured.items():
        part = share((intensity, speed))
        print(f"{operation:12} {intensity:8.1f} FLOPs/Byte  {speed * 1e3:12.2f} GFLOP/s  {part:6.1%} of its roof")
        results[name].append({"operation": operation, "FLOPs/Byte": intensity, "TFLOP/s": speed, "share": part})


def show_recorded(table: str) -> None:
    """Show a table of this lab as it was recorded on an H200, and say that it was not measured here."""
    rows = recorded_table(RECORDED, table)
    if rows is not None:
        display(rows.round(4))


def plot_recorded(table: str, title: str) -> None:
    """Draw the points of a table that was recorded on an H200 under that GPU's roof."""
    rows = recorded_table(RECORDED, table)
    if rows is not None:
        h200 = GPU_SPECS["H200"]
        points = {row["operation"]: (row["FLOPs/Byte"], row["TFLOP/s"]) for row in rows.to_dict("records")}
        plot_roofline("H200", h200["bf16_tflops"], h200["memory_bandwidth_tb_s"], measured=points, title=title)
        plt.show()


# Medians of interleaved calls, as a caller of the functions waits for them: launches included.
TIMES = {"warmup": 5, "iterations": 30} if on_gpu else {"warmup": 2, "iterations": 7}


def median_times(functions: dict, **options) -> dict[str, Measurement]:
    """Measure functions without arguments, taking turns; {name: Measurement}, with medians and their intervals."""
    options = {**TIMES, **options}
    measured = measure_together(list(functions.values()), labels=list(functions), queue_ahead=False, device=device, **options)
    return dict(zip(functions, measured, strict=True))


def plus_minus(measurement: Measurement) -> str:
    """`1.23 ± 0.04`: a median in ms and the half width of its interval."""
    low, high = measurement.interval_ms
    half = (high - low) / 2
    return f"{measurement.median_ms:.4g} ± {half:{'.0f' if half >= 100 else '.2g'}}"


print(f"device        {torch.cuda.get_device_name() if on_gpu else 'CPU'}, PyTorch {torch.__version__}")
print(f"dtype         {dtype_name} in benchmarks")
print(f"roofs         {roofs.origin}: " + ", ".join(f"{name} {peak:.3g} TFLOP/s" for name, peak in roofs.tflops.items()))
print(f"bandwidth     {roofs.memory_bandwidth_tb_s * 1e3:.4g} GB/s")
print(f"sizes         {'full: made for a data-centre GPU' if on_gpu else 'small: made for a laptop'}")

# %% [markdown]
# # Part 1: Fundamental metrics
#
# A neural network is mostly matrix products. So we start with one:
#
# $$C_{ij} = \sum_{k=0}^{K-1} A_{ik}\,B_{kj}, \qquad A \in \mathbb{R}^{M\times K},\; B \in \mathbb{R}^{K\times N}.$$
#
# Its name in every library is **GEMM**, general matrix-matrix multiplication. When $B$ is a vector ($N = 1$), it is
# **GEMV**. Three numbers describe what it costs:
#
# - **Latency**: the time from start to finish, in milliseconds.
# - **MACs and FLOPs**: the arithmetic. One multiply-accumulate, $c \leftarrow c + a \cdot b$, is one MAC and two
#   FLOPs: a multiplication and an addition.
# - **I/O**: the bytes that must travel between memory and the processor.
#
# Keep FLOPs and FLOP/s apart. FLOPs is an amount of work. FLOP/s is a speed.

# %% [markdown]
# ### Question 1.1: Naive GEMM {points}
#
# Write the formula as three loops: over the rows of $A$, over the columns of $B$, over the sum. Each pass of the inner
# loop does **one** MAC on **two numbers**. No arithmetic may work on more than one element of $A$ or $B$ at a time. (Views and
# copies are no arithmetic.)
#
# - `a` has shape (M, K), `b` has shape (K, N). Any shape must work, square or not.
# - The result has shape (M, N), and the dtype and device of `a`.
# - No library product: no `@`, `torch.matmul`, `einsum`, `F.linear`, no NumPy. The check watches what runs, not how it
#   is spelled. You may take values out of a tensor one at a time (`a[i, k].item()`), not as a whole.

# %% [markdown]
# {hint idea}
# One element of $C$ is a sum over $k$. Two loops choose the element, the third one runs over its sum.
#
# {hint plan}
# Allocate $C$ with the shape (M, N). For each row and each column: start a sum, run over $k$, take one number of $A$
# and one of $B$, multiply, add; after the inner loop, write the sum to its place.
#
# {hint line}
# Where does the sum start anew? And which of the four shapes in `a.shape` and `b.shape` does each loop need, when no
# two are equal?

# %% nbgrader={"grade_id": "q1_1", "solution": true}
def gemm_naive(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply (M, K) by (K, N) in three loops, one multiply-accumulate at a time."""
    ### BEGIN SOLUTION
    m_size, k_size = a.shape
    n_size = b.shape[1]
    c = torch.zeros(m_size, n_size, dtype=a.dtype, device=a.device)
    for i in range(m_size):
        for j in range(n_size):
            total = 0.0
            for k in range(k_size):
                total += a[i, k].item() * b[k, j].item()
            c[i, j] = total
    return c
    ### END SOLUTION


# %% nbgrader={"grade_id": "q1_1_tests", "grade": true, "points": 3}
check_gemm_naive(gemm_naive).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.gemm_naive(gemm_naive).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 1.2: Tiled GEMM {points}
#
# The three loops fetch every element of $A$ again for each of the $N$ columns, and every element of $B$ again for each
# of the $M$ rows. That is $2MNK$ loads for $2MNK$ FLOPs: one load a FLOP. No main memory is fast enough for that: to keep its
# 989 TFLOP/s busy in bf16, an H200 would need almost 2,000 TB/s, and has 4.8.
#
# **Tiling** fixes it. Cut $C$ into tiles of `tile_m` × `tile_n`. For one tile of $C$, walk along $K$ in steps of
# `tile_k`: fetch a tile of $A$ and a tile of $B$ into fast memory, multiply them, and add the product to an accumulator
# that never leaves fast memory. An element of $A$ is now fetched once for each *tile* column, $N / \text{tile}_n$ times
# instead of $N$ times.
#
# ![Tiled matrix product: one tile of C is the sum of products of a row of A tiles and a column of B tiles](assets/gemm_tiling.svg)
#
# Every fast GEMM on every chip is this picture. The tiles sit in registers and shared memory on a GPU, and in
# registers and caches on a CPU.
#
# ![The memory hierarchy: each level is larger and slower than the one above it](assets/memory_hierarchy.svg)
#
# Write it:
# - Loop over the tiles of $C$, and over the steps along $K$, of at most `tile_k` each.
# - Multiply two tiles from elementwise products and sums. One way: column $k$ of the $A$ tile times row $k$ of the $B$
#   tile, broadcast, is an *outer product*; add up `tile_k` of them. Library products are forbidden as before.
# - Every size must work: matrices that the tiles do not divide, tiles larger than the matrix, tiles that are not
#   square.
# - Work on one step at a time. Whatever you compute, copy or convert has at most `tile_m * tile_n * tile_k` elements, those it
#   reads and those it makes, and each tile is fetched and multiplied once. This is free: views; copies and conversions of a
#   *whole* matrix, before the loops; allocating $C$ and putting its tiles together.
# - **Accumulate in float32**, or wider, whatever the dtype of `a` and `b`, and round once, when a tile of $C$ is done. A
#   bf16 number has 8 significant bits: once the sum is 512 times a new product, adding that product changes nothing.
#   Tensor cores and every library do the same: narrow inputs, wide accumulator.
# - Same rule as before for shape, dtype and device of the result.

# %% [markdown]
# {hint idea}
# A tile of $C$ needs a strip of $A$ (its rows) and a strip of $B$ (its columns). Walk along both strips at once, a
# piece at a time.
#
# {hint plan}
# Two outer loops with steps `tile_m` and `tile_n`. For each tile: an accumulator of the tile's true size, a loop over
# $k$ with step `tile_k`, and inside the sum of outer products of the two pieces. After it, write the accumulator to
# $C$. A slice that runs past the edge is cut by PyTorch itself.
#
# {hint line}
# The dtype of the accumulator, which has nothing to do with the dtype of `a`; and that an operation on a bf16 tile is
# rounded to bf16 *before* it is added.

# %% nbgrader={"grade_id": "q1_2", "solution": true}
def gemm_tiled(
    a: torch.Tensor, b: torch.Tensor, tile_m: int = 64, tile_n: int = 64, tile_k: int = 64
) -> torch.Tensor:
    """Multiply (M, K) by (K, N) tile by tile; tiles at the edges may be smaller."""
    ### BEGIN SOLUTION
    m_size, k_size = a.shape
    n_size = b.shape[1]
    c = torch.empty(m_size, n_size, dtype=a.dtype, device=a.device)
    for i in range(0, m_size, tile_m):
        rows = slice(i, min(i + tile_m, m_size))
        for j in range(0, n_size, tile_n):
            cols = slice(j, min(j + tile_n, n_size))
            accumulator = torch.zeros(rows.stop - i, cols.stop - j, dtype=torch.float32, device=a.device)
            for k in range(0, k_size, tile_k):
                a_tile = a[rows, k : k + tile_k].float()
                b_tile = b[k : k + tile_k, cols].float()
                for step in range(a_tile.shape[1]):
                    accumulator += a_tile[:, step, None] * b_tile[step, None, :]
            c[rows, cols] = accumulator
    return c
    ### END SOLUTION


# %% nbgrader={"grade_id": "q1_2_tests", "grade": true, "points": 7}
check_gemm_tiled(gemm_tiled).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.gemm_tiled(gemm_tiled).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 1.3: Why one timing lies {points}
#
# You want to know how fast something is. You take the time, run it, take the time again. What can go wrong?
#
# A GPU works **asynchronously**. A call puts work into a queue and returns; the kernel runs later. A clock stopped when
# the call returns has timed the queue. To time the work, wait for the device: once *before* the clock starts, so that
# older work is not billed to you, and once *before* it stops.
#
# The next cell builds such a device out of a clock, so that you can see the effect on any machine.

# %% nbgrader={"grade_id": "queueing_device", "locked": true}
class QueueingDevice:
    """A pretend GPU: accepts work at once, finishes it later."""

    def __init__(self):
        self.busy_until = time.perf_counter()

    def launch(self, work_ms: float) -> None:
        """Queue work_ms milliseconds of work and return immediately."""
        self.busy_until = max(self.busy_until, time.perf_counter()) + work_ms / 1e3

    def synchronize(self) -> None:
        """Wait until the queue is empty."""
        time.sleep(max(0.0, self.busy_until - time.perf_counter()))


pretend = QueueingDevice()
began = time.perf_counter()
pretend.launch(work_ms=50)
print(f"clock stopped when the call returned: {(time.perf_counter() - began) * 1e3:7.3f} ms")
pretend.synchronize()
print(f"clock stopped when the work was done: {(time.perf_counter() - began) * 1e3:7.3f} ms")

# %% [markdown]
# **Your turn.** Write `time_calls`: it calls `fn` exactly `n_calls` times and times **each call on its own**. It gets the
# function that waits for the device as an argument, and returns a list of milliseconds. `time.perf_counter()` is the clock for
# this: it counts seconds and never runs backwards.

# %% [markdown]
# {hint idea}
# You time work that somebody else does. So the clock may only start when they are idle, and only stop when they are
# done.
#
# {hint plan}
# For each call: wait, read the clock, call, wait, read the clock, keep the difference in ms. One list entry for each
# call.
#
# {hint line}
# A wait comes before and after each call, not one for all; and `time.perf_counter()` counts seconds.

# %% nbgrader={"grade_id": "q1_3", "solution": true}
def time_calls(fn, n_calls: int, synchronize) -> list[float]:
    """Time n_calls calls of fn, each on its own, in ms; synchronize() waits for the device."""
    ### BEGIN SOLUTION
    times_ms = []
    for _ in range(n_calls):
        synchronize()
        start = time.perf_counter()
        fn()
        synchronize()
        times_ms.append((time.perf_counter() - start) * 1e3)
    return times_ms
    ### END SOLUTION


# %% nbgrader={"grade_id": "q1_3_tests", "grade": true, "points": 2}
check_time_calls(time_calls).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.time_calls(time_calls).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Now use it on something real, a small network layer that has never run before, 200 times over.
#
# **Before you run.** It is the same layer with the same input each time. By what factor will the slowest call differ
# from the fastest? Which call will be the slowest?

# %%
guesses["slowest call / fastest call"] = None  # a number
guesses["number of the slowest call"] = None  # 0 to 199

# %%
n = 4096 if on_gpu else 384
x = torch.randn(n, n, device=device, dtype=dtype)
layer = torch.nn.Sequential(torch.nn.Linear(n, n), torch.nn.GELU()).to(device=device, dtype=dtype)  # never used before

times_ms = time_calls(lambda: layer(x), 200, synchronize)
without_wait_ms = time_calls(lambda: layer(x), 200, lambda: None)
synchronize()
harness_ms = benchmark_latency(layer, x)

ordered = sorted(times_ms)
median_ms = ordered[len(ordered) // 2]
print(f"first call                {times_ms[0]:9.4f} ms")
print(f"fastest, median, slowest  {ordered[0]:9.4f}, {median_ms:.4f}, {ordered[-1]:.4f} ms")
print(f"mean of all 200           {sum(times_ms) / len(times_ms):9.4f} ms")
print(f"median without waiting    {sorted(without_wait_ms)[100]:9.4f} ms")
print(f"benchmark_latency         {harness_ms:9.4f} ms")
beside_guess("slowest call / fastest call", ordered[-1] / ordered[0])
beside_guess("number of the slowest call", times_ms.index(ordered[-1]))

fig, ax = plt.subplots(figsize=(9, 3), layout="constrained")
ax.plot(times_ms, ".", color=series(0).color, label="one call, waited for")
ax.plot(without_wait_ms, "x", color=series(1).color, markersize=4, label="one call, not waited for")
ax.axhline(harness_ms, color="black", linewidth=1, linestyle="--", label="benchmark_latency")
ax.set_yscale("log")
ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
ax.yaxis.set_major_formatter("{x:g}")
ax.yaxis.set_minor_formatter(NullFormatter())
ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
style_axes(ax, x="call", y="time (ms)", title=f"The same layer, n = {n}, 200 times")
plt.show()

# %% [markdown]
# `benchmark_latency` first calls the function a few times without looking at the clock (*warm-up*), then measures many
# calls, and returns their mean. On a GPU it lets the device itself take the time, with events in the queue. `measure` and
# `compare` keep every sample, and give medians with intervals. From here on the lab compares medians, of calls that take
# turns, so that a disturbance hits both sides alike.
#
# **Explain** (3 to 6 sentences, with numbers from your run):
# 1. Why is the first call slow, and why is warm-up right for a benchmark?
# 2. Which single number would you report for this layer, and why not the mean of all 200 calls?
# 3. What would the times without waiting have told you on a GPU? If your machine has none, use what the pretend device
#    showed.

# %% [markdown] nbgrader={"grade_id": "q1_3_explain", "grade": true, "solution": true, "points": 3}
# 1. The first call pays for things that happen once: loading the library's kernels, choosing one for this shape,
#    allocating memory and touching it for the first time, waking up clocks and caches. A network calls the product
#    millions of times, so the steady state is what counts. Warm-up leaves the one-time cost out.
# 2. The median, or the mean after warm-up with its spread. Noise only ever *adds* time (another process, an interrupt, a
#    clock change), so a few outliers pull the mean of all calls up and leave the median alone.
# 3. Only how long it takes to put the work into the queue. On the pretend device the call returned after some
#    microseconds although the work took 50 ms. On a GPU the times without waiting even grow once the queue is full,
#    because then a launch has to wait for a free slot.
#
# === BEGIN MARK SCHEME ===
# 1 point: names at least one one-time cost, and says that warm-up leaves it out because the steady state is of interest.
# 1 point: median, minimum or mean after warm-up, with the reason: the noise is one-sided or outliers pull the mean.
# 1 point: says that without waiting one measures the launch (the queue), not the work, and quotes a number.
# No point for a sentence without a number from the student's own run in 1 or 2: take half a point off once.
# === END MARK SCHEME ===

# %% [markdown]
# ### Question 1.4: MACs, FLOPs and bytes {points}
#
# Count before you measure. For $C = AB$ with $A$ of shape $(M, K)$ and $B$ of shape $(K, N)$:
#
# - **MACs**: one for each step of the inner loop of Question 1.1.
# - **FLOPs**: two for each MAC.
# - **I/O**: the *least* traffic that any program needs. $A$ and $B$ are read once, $C$ is written once.
#
# The number of bytes depends on the dtype: ask `dtype.itemsize`. GEMV is $y = Ax$ with $A$ of shape $(M, K)$ and $x$ of
# length $K$.
#
# Both functions return three numbers: `(macs, flops, bytes)`.

# %% [markdown]
# {hint idea}
# Each element of $C$ needs $K$ multiply-accumulates. Each of the three matrices travels once.
#
# {hint plan}
# Count the elements of $C$, times $K$. Count the elements of all three matrices, times the bytes of one. GEMV is the
# same with $N = 1$.
#
# {hint line}
# The result is written, and that is traffic as well.

# %% nbgrader={"grade_id": "q1_4", "solution": true}
def gemm_macs_flops_bytes(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """MACs, FLOPs and least I/O (bytes) of (M, K) @ (K, N)."""
    ### BEGIN SOLUTION
    macs = m * n * k
    return macs, 2 * macs, (m * k + k * n + m * n) * dtype.itemsize
    ### END SOLUTION


def gemv_macs_flops_bytes(m: int, k: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """MACs, FLOPs and least I/O (bytes) of (M, K) @ (K,)."""
    ### BEGIN SOLUTION
    return m * k, 2 * m * k, (m * k + k + m) * dtype.itemsize
    ### END SOLUTION


# %% nbgrader={"grade_id": "q1_4_tests", "grade": true, "points": 4}
check_costs(gemm_macs_flops_bytes, gemv_macs_flops_bytes).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.gemm_and_gemv_costs(gemm_macs_flops_bytes, gemv_macs_flops_bytes).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# **Back to Question 1.2: what does the accumulator's dtype cost?** The next cell multiplies bf16 matrices three times: with
# `gemm_tiled`, with an accumulator in bf16, and with the library, and compares each with the exact product.

# %%
x, y = torch.randn(32, 1024, dtype=torch.bfloat16), torch.randn(1024, 32, dtype=torch.bfloat16)
narrow = torch.zeros(32, 32, dtype=torch.bfloat16)
for k in range(1024):
    narrow += x[:, k, None] * y[None, k]
exact = x.double() @ y.double()
for name, product in (("gemm_tiled", gemm_tiled(x, y)), ("accumulator in bf16", narrow), ("torch.matmul", x @ y)):
    error = (product.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    print(f"{name:20} off by {error:.2%} (root mean square), K = 1024")

# %% [markdown]
# Rounding the result to bf16 costs 0.2%. A bf16 accumulator costs over ten times as much, and more the longer the sum is.
#
# **How far are your loops from the library?** The next cell times all three versions and turns latency into speed:
# FLOPs ÷ latency.
#
# **Before you run.** Naive, tiled, library: guess the speed of each in FLOP/s, to the nearest power of ten.

# %%
guesses["GFLOP/s of gemm_naive"] = None
guesses["GFLOP/s of gemm_tiled"] = None
guesses["GFLOP/s of torch.matmul"] = None

# %%
naive_size = 24
sizes = [256, 512, 1024] if on_gpu else [64, 128, 256, 512]
print(f"naive at {naive_size}, tiled and torch.matmul at {sizes}, {dtype}")

a = torch.randn(naive_size, naive_size, device=device, dtype=dtype)
naive_ms = median_times({"gemm_naive": functools.partial(gemm_naive, a, a)}, warmup=1, iterations=3)["gemm_naive"].median_ms
naive_flops = gemm_macs_flops_bytes(naive_size, naive_size, naive_size, dtype)[1]
print(f"gemm_naive    n {naive_size:5}  {naive_ms:10.3f} ms  {naive_flops / naive_ms / 1e6:10.4g} GFLOP/s")

tiled_ms, matmul_ms = [], []
for n in sizes:
    a = torch.randn(n, n, device=device, dtype=dtype)
    b = torch.randn(n, n, device=device, dtype=dtype)
    calls = {"gemm_tiled": functools.partial(gemm_tiled, a, b, 128, 128, 128), "torch.matmul": functools.partial(torch.matmul, a, b)}
    times = median_times(calls, warmup=1, iterations=5)
    tiled_ms.append(times["gemm_tiled"].median_ms)
    matmul_ms.append(times["torch.matmul"].median_ms)
    flops = gemm_macs_flops_bytes(n, n, n, dtype)[1]
    for name, taken in times.items():
        print(f"{name:13} n {n:5}  {taken.median_ms:10.3f} ms  {flops / taken.median_ms / 1e6:10.4g} GFLOP/s")
beside_guess("GFLOP/s of gemm_naive", naive_flops / naive_ms / 1e6)
beside_guess("GFLOP/s of gemm_tiled", flops / tiled_ms[-1] / 1e6)
beside_guess("GFLOP/s of torch.matmul", flops / matmul_ms[-1] / 1e6)

plot_gemm_torch_matmul_latency(sizes, tiled_ms, matmul_ms)
plt.show()

# %% [markdown]
# The naive version spends nearly all of its time on Python and on asking PyTorch for one number at a time. The tiled
# version hands over whole tiles of work and gains a factor of some thousands, but each outer product is still its own
# operation: its result goes out to memory, and comes back to be added. The library does the same arithmetic in **one**
# kernel whose accumulator stays in registers. That is worth writing once yourself.

# %% [markdown]
# ### Question 1.5: The same tiles in Triton {points}
#
# [Triton](https://triton-lang.org) is a language for GPU kernels inside Python. You write what **one program** does with
# **one tile**; the grid starts one program for each tile of $C$, and the GPU runs as many at once as fit, in any order (an
# H200 has 132 SMs; a product of 4096 cubed has 4096 tiles of 64). Your two outer loops become the grid. The inner loop
# stays. `K: tl.constexpr` makes $K$ a constant of the compiled kernel: each new $K$ compiles it anew.
#
# There are no slices. A tile is a block of *pointers*: for a matrix with strides $(s_r, s_c)$, element $(r, c)$ lies at
# `pointer + r * s_r + c * s_c`. `rows[:, None] * stride_r + cols[None, :] * stride_c` gives a whole block of addresses
# at once. Blocks have a fixed size, so at the edge some addresses lie outside the matrix. A **mask** says which to leave
# alone: `tl.load(pointers, mask=..., other=0.0)` puts 0 where the mask is false, and `tl.store(pointers, value,
# mask=...)` writes nothing there. Without `other=`, what a load gives there is undefined; this course's interpreter gives
# NaN, so that you see it.
#
# Fill in the two gaps in the file that the next cell writes:
# 1. In the loop: load one tile of A and one of B, and nothing that lies outside of the matrices, at **any** edge; add their
#    product to `accumulator`. Use `tl.dot(x, y, accumulator, input_precision="ieee")`, which multiplies two tiles and adds.
#    Without `"ieee"` a GPU rounds float32 tiles to ten bits first; the interpreter does not, so the grader looks for it.
# 2. After the loop: store the accumulator into C, masked. C may be a 16-bit matrix: `tl.store` converts.
#
# Each program reads no more elements than a whole tile of C needs, makes one `tl.dot` a step, and writes each element once.
#
# Do not assume that matrices are contiguous: use the strides.
#
# On a GPU the file is compiled. Without one it runs in Triton's **interpreter**, block by block on the CPU: slow, but
# the same answer. The checks use the interpreter on every machine.

# %% [markdown]
# {hint idea}
# What was a slice in Question 1.2 is now a block of pointers and a block of booleans of the same shape.
#
# {hint plan}
# For A: rows go down (`[:, None]`), ks go across (`[None, :]`), each with its own stride; the mask says which rows and
# which ks exist. For B: ks go down, cols go across. Then one `tl.dot` that adds to the accumulator. For C: rows and
# cols, after the loop.
#
# {hint line}
# The mask of a load has two conditions, one for each direction; and the accumulator has to be given to `tl.dot`, and
# its result kept.

# %% nbgrader={"grade_id": "q1_5", "solution": true}
# %%writefile gemm_triton.py
"""C = A @ B in Triton: one program computes one tile of C."""
import torch
import triton
import triton.language as tl


@triton.jit
def gemm_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K: tl.constexpr,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # the rows of A and C that this program owns
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # the columns of B and C that it owns
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        ### BEGIN SOLUTION
        a_tile = tl.load(
            a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak,
            mask=(rows[:, None] < M) & (ks[None, :] < K), other=0.0,
        )
        b_tile = tl.load(
            b_ptr + ks[:, None] * stride_bk + cols[None, :] * stride_bn,
            mask=(ks[:, None] < K) & (cols[None, :] < N), other=0.0,
        )
        accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision="ieee")
        ### END SOLUTION
    ### BEGIN SOLUTION
    c_tile = c_ptr + rows[:, None] * stride_cm + cols[None, :] * stride_cn
    tl.store(c_tile, accumulator, mask=(rows[:, None] < M) & (cols[None, :] < N))
    ### END SOLUTION


def gemm(a, b, block=64):
    """Launch gemm_kernel on (M, K) @ (K, N): one program for each block x block tile of C."""
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(c.shape[0], block), triton.cdiv(c.shape[1], block))
    gemm_kernel[grid](
        a, b, c, c.shape[0], c.shape[1], a.shape[1], *a.stride(), *b.stride(), *c.stride(),
        BLOCK_M=block, BLOCK_N=block, BLOCK_K=32,
    )
    return c


# %% nbgrader={"grade_id": "q1_5_tests", "grade": true, "points": 5}
check_gemm_triton(Path("gemm_triton.py").read_text()).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.gemm_triton(Path("gemm_triton.py").read_text()).raise_if_wrong()
### END HIDDEN TESTS

# %%
source = Path("gemm_triton.py").read_text()
require_answer("gemm_kernel", None if "raise NotImplementedError" in source else source, "1.5")
if on_gpu:
    import importlib

    import gemm_triton

    importlib.reload(gemm_triton)
    for n in (1024, 4096):
        a = torch.randn(n, n, device=device, dtype=dtype)
        flops = 2 * n**3
        times = median_times({
            "your Triton kernel": functools.partial(gemm_triton.gemm, a, a), "torch.matmul": functools.partial(torch.matmul, a, a)})
        for name, taken in times.items():
            print(f"n {n:5}  {name:18}  {plus_minus(taken)} ms  {flops / taken.median_ms / 1e9:7.1f} TFLOP/s")
else:
    print("No GPU here, so there is nothing to time: the interpreter proves that the kernel is right, not that it is fast.")

# %% [markdown]
# ### Bonus Question 1.6: How large should a tile be? {points}
#
# With tiles of `tile_m` × `tile_n`, the matrices are no longer read once. A row of $A$ tiles is fetched again for every
# tile column of $C$, and a column of $B$ tiles for every tile row. Assume that nothing survives in a cache between two
# tiles of $C$, and that tiles at the edge fetch only what exists.
#
# 1. `tiled_gemm_bytes`: the bytes that such a tiled GEMM moves. $C$ is written once.
# 2. `largest_square_tile`: the largest $t$ for which one fp32 accumulator of $t \times t$, one $A$ tile of
#    $t \times \text{tile}_k$ and one $B$ tile of $\text{tile}_k \times t$ (both of `dtype`) fit into `fast_bytes` bytes
#    of fast memory.

# %% [markdown]
# {hint idea}
# How many tiles of $C$ stand side by side in one row of tiles? Each of them fetches the same rows of $A$.
#
# {hint plan}
# Number of tile columns times all of $A$, number of tile rows times all of $B$, once $C$. For the second function:
# write the bytes as a function of $t$, and find the largest $t$ that fits, by a loop or by solving the quadratic
# equation.
#
# {hint line}
# A last tile that is not whole is still a tile. And the accumulator is fp32, whatever `dtype` is.

# %% nbgrader={"grade_id": "bonus_1_6", "solution": true}
def tiled_gemm_bytes(m: int, n: int, k: int, tile_m: int, tile_n: int, dtype: torch.dtype) -> int:
    """Bytes that a tiled (M, K) @ (K, N) moves when no tile survives in a cache."""
    ### BEGIN SOLUTION
    tile_rows, tile_cols = math.ceil(m / tile_m), math.ceil(n / tile_n)
    return (tile_cols * m * k + tile_rows * k * n + m * n) * dtype.itemsize
    ### END SOLUTION


def largest_square_tile(fast_bytes: int, tile_k: int, dtype: torch.dtype) -> int:
    """Largest t with a t x t fp32 accumulator and two t x tile_k input tiles in fast_bytes."""
    ### BEGIN SOLUTION
    t = 0
    while 4 * (t + 1) ** 2 + 2 * (t + 1) * tile_k * dtype.itemsize <= fast_bytes:
        t += 1
    return t
    ### END SOLUTION


# %% nbgrader={"grade_id": "bonus_1_6_tests", "grade": true, "points": 5}
check_tile_traffic(tiled_gemm_bytes, largest_square_tile).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.tile_traffic(tiled_gemm_bytes, largest_square_tile).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Look at what the tile buys. The intensity of a tiled GEMM grows with its tile, and at some tile it crosses the ridge
# of an H200 (Part 2 says what that means). The vertical line is the largest tile that fits into the 228 KB of an SM.

# %%
tiles = [16, 32, 64, 128, 256, 512, 1024]
n = 8192
intensities = [2 * n**3 / tiled_gemm_bytes(n, n, n, t, t, torch.bfloat16) for t in tiles]
fig, ax = plt.subplots(figsize=(9, 3), layout="constrained")
ax.plot(tiles, intensities, **series(0).line, label=f"tiled GEMM, n = {n}, bf16")
ax.axhline(get_ridge_point("H200", "bf16"), color="black", linestyle="--", label="ridge point of an H200, bf16")
fits = largest_square_tile(228 * 1024, 64, torch.bfloat16)
ax.axvline(fits, color=series(4).color, linestyle=":", label=f"largest tile in one SM: {fits}")
ax.set(xscale="log", yscale="log")
ax.set_xticks(tiles, [str(t) for t in tiles])
ax.minorticks_off()
ax.yaxis.set_major_formatter("{x:g}")
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))  # beside the lines: inside, it would cover the ridge
style_axes(ax, x="tile size t", y="FLOPs/Byte", title="A larger tile reads less")
plt.show()

# %% [markdown]
# Read literally, this says that no GEMM can be compute-bound: the tile that reaches the ridge does not fit. Real kernels
# use tiles of about 128 × 256, and reach 80% of the peak all the same. How? The assumption is wrong that nothing survives
# between two tiles. Tiles that run at the same time on neighbouring SMs share rows of $A$ and columns of $B$, and these
# come out of the L2 cache. To the main memory, a whole wave of tiles is one large tile.

# %% [markdown]
# # Part 2: The roofline model
#
# A kernel must do its FLOPs, and it must move its bytes. The two overlap, so the slower one decides:
#
# $$t \;\ge\; \max\left(\frac{\text{FLOPs}}{\text{peak}},\; \frac{\text{bytes}}{\text{bandwidth}}\right).$$
#
# Divide the FLOPs by this time and you get the highest speed that the kernel can reach. It depends on one property of
# the kernel only, its **arithmetic intensity** $I = \text{FLOPs} / \text{bytes}$:
#
# $$\text{attainable}(I) = \min\left(\text{peak},\; I \cdot \text{bandwidth}\right).$$
#
# Drawn over $I$ on logarithmic axes, this is a slope and a ceiling: the **roofline**. They meet at the **ridge point**.
# Left of it, a kernel is **memory-bound**: more compute units would change nothing. To the right, it is **compute-bound**:
# faster memory would change nothing.
#
# ![Anatomy of a roofline: a slope set by bandwidth, a ceiling set by peak compute, and the ridge point between them](assets/roofline_anatomy.svg)

# %% [markdown]
# ### Question 2.1: Arithmetic intensity {points}
#
# Write the intensity of GEMM and of GEMV, in FLOPs/Byte. It pays to write the counts out again instead of calling your
# functions: you see what cancels, and a slip in Question 1.4 cannot follow you here.

# %% [markdown]
# {hint idea}
# FLOPs over bytes. Both are in Question 1.4; here you see what cancels.
#
# {hint plan}
# Write the FLOPs above and the bytes below the line, with `dtype.itemsize`. Try it on paper for $M = N = K$.
#
# {hint line}
# Three matrices below the line, and FLOPs, not MACs, above it.

# %% nbgrader={"grade_id": "q2_1", "solution": true}
def gemm_intensity(m: int, n: int, k: int, dtype: torch.dtype) -> float:
    """Arithmetic intensity of (M, K) @ (K, N) in FLOPs/Byte."""
    ### BEGIN SOLUTION
    return 2 * m * n * k / ((m * k + k * n + m * n) * dtype.itemsize)
    ### END SOLUTION


def gemv_intensity(m: int, k: int, dtype: torch.dtype) -> float:
    """Arithmetic intensity of (M, K) @ (K,) in FLOPs/Byte."""
    ### BEGIN SOLUTION
    return 2 * m * k / ((m * k + k + m) * dtype.itemsize)
    ### END SOLUTION


# %% nbgrader={"grade_id": "q2_1_tests", "grade": true, "points": 3}
check_intensity(gemm_intensity, gemv_intensity).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.intensities(gemm_intensity, gemv_intensity).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# **Before you run.** Which of the two grows with the matrix? What does halving the bytes of a number do to each?

# %%
guesses["grows with the matrix"] = None  # "gemm", "gemv", "both" or "neither"
guesses["half the bytes multiply the intensity by"] = None

# %%
rows = []
for n in (64, 256, 1024, 4096):
    row = {"n": n}
    for kind in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        name = str(kind).removeprefix("torch.")
        row[f"gemm {name}"] = gemm_intensity(n, n, n, kind)
        row[f"gemv {name}"] = gemv_intensity(n, n, kind)
    rows.append(row)
growing = [kind for kind in ("gemm", "gemv") if rows[-1][f"{kind} float32"] > 2 * rows[0][f"{kind} float32"]]
beside_guess("grows with the matrix", " and ".join(growing))
beside_guess("half the bytes multiply the intensity by", rows[0]["gemm bfloat16"] / rows[0]["gemm float32"])
pd.DataFrame(rows).set_index("n").sort_index(axis="columns").round(2)

# %% [markdown]
# ### Question 2.2: Ridge point and roof {points}
#
# Write the ridge point and the roof itself. Mind the units: peak in TFLOP/s ($10^{12}$ FLOP/s), bandwidth in TB/s
# ($10^{12}$ byte/s), intensity in FLOPs/Byte.

# %% [markdown]
# {hint idea}
# The ridge is where slope and ceiling meet: where intensity times bandwidth is the peak.
#
# {hint plan}
# Solve that equation for the intensity. The roof at any intensity is one of two numbers.
#
# {hint line}
# A kernel obeys both limits, so which of the two numbers is it?

# %% nbgrader={"grade_id": "q2_2", "solution": true}
def ridge_point(peak_tflops: float, bandwidth_tb_s: float) -> float:
    """Intensity in FLOPs/Byte at which memory-bound turns into compute-bound."""
    ### BEGIN SOLUTION
    return peak_tflops / bandwidth_tb_s
    ### END SOLUTION


def attainable_tflops(intensity: float, peak_tflops: float, bandwidth_tb_s: float) -> float:
    """Highest TFLOP/s that a kernel of this intensity (FLOPs/Byte) can reach."""
    ### BEGIN SOLUTION
    return min(peak_tflops, intensity * bandwidth_tb_s)
    ### END SOLUTION


# %% nbgrader={"grade_id": "q2_2_tests", "grade": true, "points": 4}
check_roof(ridge_point, attainable_tflops).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.ridge_and_roof(ridge_point, attainable_tflops).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Compare your ridge with the course's `get_ridge_point`, for every GPU in the table. The numbers are *dense* peaks from
# the datasheets. (Marketing likes the sparse ones, which are twice as high.)
#
# **Before you run.** Compute grew faster than bandwidth for ten years. So do ridge points of newer chips lie further
# left or further right? What does that do to a kernel that has not changed?

# %%
guesses["bf16 ridge points from old to new"] = None  # "left", "right" or "both ways"

# %%
rows = []
for name, spec in GPU_SPECS.items():
    row = {"GPU": name, "TB/s": spec["memory_bandwidth_tb_s"]}
    for kind in ("fp32", "bf16", "fp8"):
        if spec[f"{kind}_tflops"] is not None:
            yours = ridge_point(spec[f"{kind}_tflops"], spec["memory_bandwidth_tb_s"])
            assert math.isclose(yours, get_ridge_point(name, kind), rel_tol=1e-6), (name, kind, yours)
            row[f"ridge {kind}"] = round(yours, 1)
    rows.append(row)
years = {"V100": 2017, "A100": 2020, "H100": 2022, "H200": 2024, "B200": 2024}  # of the launch
bf16 = {name: get_ridge_point(name, "bf16" if GPU_SPECS[name]["bf16_tflops"] else "fp16") for name in years if name in GPU_SPECS}
steps = [later - earlier for earlier, later in zip(list(bf16.values()), list(bf16.values())[1:], strict=False)]
beside_guess("bf16 ridge points from old to new", "right" if min(steps) > 0 else "left" if max(steps) < 0 else "both ways")
print("data-centre GPUs by year:", ", ".join(f"{name} {years[name]}: {ridge:.0f}" for name, ridge in bf16.items()))
pd.DataFrame(rows, dtype=object).set_index("GPU").fillna("-")

# %% [markdown]
# To the right, then back (the H200 is an H100 with faster memory), and to the right again. A kernel that has not changed can
# find itself on the other side of the ridge.
#
# Now place GEMM and GEMV under the roof of an A100, as the datasheet draws it.

# %%
spec = GPU_SPECS["A100"]
operations = {f"gemm {n}": gemm_intensity(n, n, n, torch.bfloat16) for n in (128, 512, 4096)}
operations["gemv 4096"] = gemv_intensity(4096, 4096, torch.bfloat16)
plot_roofline("A100", spec["bf16_tflops"], spec["memory_bandwidth_tb_s"], operations)
plt.show()

# %% [markdown]
# ### Question 2.3: From milliseconds to the roof {points}
#
# The picture so far is a promise. To put a *measured* point on it, you need the speed that was reached. And to choose
# sizes worth measuring, you need the size at which GEMM changes sides.
#
# 1. `achieved_tflops`: FLOPs and a latency in **ms** give TFLOP/s.
# 2. `smallest_compute_bound_gemm`: the smallest integer $n$ for which an $n \times n \times n$ GEMM reaches the ridge
#    point ($I \ge$ ridge). On paper, $I(n)$ is short.

# %% [markdown]
# {hint idea}
# Put $M = N = K = n$ into the intensity of Question 2.1. It becomes a short formula in $n$.
#
# {hint plan}
# Set it equal to the ridge and solve for $n$. For the other function: ms to seconds, then FLOP/s to TFLOP/s.
#
# {hint line}
# $n$ is an integer that *reaches* the ridge: which way do you round, and what if the result is an integer already?

# %% nbgrader={"grade_id": "q2_3", "solution": true}
def achieved_tflops(flops: int, latency_ms: float) -> float:
    """Speed in TFLOP/s of a kernel that does flops FLOPs in latency_ms milliseconds."""
    ### BEGIN SOLUTION
    return flops / (latency_ms * 1e-3) / 1e12
    ### END SOLUTION


def smallest_compute_bound_gemm(ridge: float, dtype: torch.dtype) -> int:
    """Smallest n whose (n, n) @ (n, n) has at least this intensity (FLOPs/Byte)."""
    ### BEGIN SOLUTION
    # I(n) = 2 n^3 / (3 n^2 itemsize) = 2 n / (3 itemsize)
    return math.ceil(1.5 * dtype.itemsize * ridge)
    ### END SOLUTION


# %% nbgrader={"grade_id": "q2_3_tests", "grade": true, "points": 4}
check_achieved(achieved_tflops, smallest_compute_bound_gemm).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.achieved_and_smallest(achieved_tflops, smallest_compute_bound_gemm).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Now measure. The roof below is this machine's: from the datasheet if it is a GPU the course knows, measured otherwise.
# The product of two large matrices gives the ceiling, the copy of a large buffer gives the slope.
#
# **Before you run.** Where will the large GEMM land, in percent of its roof? The small one? The large GEMV, which reads
# a matrix far larger than any cache, and the small one, which fits into it?

# %%
guesses["percent of its roof: smallest gemm"] = None
guesses["percent of its roof: largest gemm"] = None
guesses["percent of its roof: small gemv"] = None
guesses["percent of its roof: large gemv"] = None

# %%
ridge = roofs.ridge_point(dtype_name)
print(f"{roofs.name} ({roofs.origin}): {peak:.3g} TFLOP/s in {dtype_name}, {bandwidth:.3g} TB/s, ridge {ridge:.1f}")
print(f"smallest compute-bound GEMM: n = {smallest_compute_bound_gemm(ridge, dtype)}\n")

gemm_sizes, gemv_sizes = ((256, 1024, 8192), (1024, 16384)) if on_gpu else ((32, 256, 1536), (256, 8192))
calls = {}
for n in gemm_sizes:
    square = torch.randn(n, n, device=device, dtype=dtype)
    calls[f"gemm {n}"] = functools.partial(torch.matmul, square, square)
for n in gemv_sizes:
    square, vector = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, device=device, dtype=dtype)
    calls[f"gemv {n}"] = functools.partial(torch.mv, square, vector)
# One after the other, not in turns: the small GEMV is to find its matrix where its own last call left it.
times = {name: measure(call, queue_ahead=False, device=device, **TIMES) for name, call in calls.items()}
measured = {}
for n in gemm_sizes:
    measured[f"gemm {n}"] = gemm_intensity(n, n, n, dtype), achieved_tflops(2 * n**3, times[f"gemm {n}"].median_ms)
for n in gemv_sizes:
    measured[f"gemv {n}"] = gemv_intensity(n, n, dtype), achieved_tflops(2 * n**2, times[f"gemv {n}"].median_ms)
for name, time_of_call in times.items():
    print(f"{name:12} {plus_minus(time_of_call)} ms")
report_measured("roofline", measured)
for name, row in zip(("smallest gemm", None, "largest gemm", "small gemv", "large gemv"), results["roofline"], strict=True):
    if name:
        beside_guess(f"percent of its roof: {name}", 100 * row["share"])

plot_roofline(roofs.name, peak, bandwidth, measured=measured)
plt.show()

# %% [markdown]
# ### Question 2.4: Explain each gap {points}
#
# The model assumes that bytes travel at full bandwidth, that FLOPs run at peak, and that nothing else takes time. Each
# point that misses its roof breaks one of these. Go through **your** plot:
#
# 1. The smallest GEMM. What takes the time? Compare its time with that of the shortest call that you have seen (Question
#    1.3, or the smallest size in the table after Question 1.4), and with the time that its FLOPs need at the peak. (On a CPU
#    it may stand above the slope. Then number 4 is about it as well.)
# 2. The largest GEMM: which roof limits it, and why does it not touch it? (A CPU's roof was measured with a GEMM. If
#    yours touches it, or lies a little above, say why that is no surprise.)
# 3. The large GEMV: which roof limits it? Would a chip with twice the FLOP/s help?
# 4. The small GEMV: is it nearer to the roof than the large one, or even above it? Which assumption of the model is
#    wrong for it, and what would a second slope on the plot show?
# 5. An LLM at batch 1 is a chain of GEMVs. From this plot, what do you do to make it faster?

# %% [markdown]
# {hint idea}
# For each point, ask which of the model's three assumptions breaks: full bandwidth, full peak, nothing else takes time.
#
# {hint plan}
# Take the share of the roof of each point, and one time in µs or ms for the smallest. Say what limits it, and what
# would have to change to make it faster.
#
# {hint line}
# The small GEMV runs many times in a row on the same matrix. Where is the matrix at the second run?

# %% [markdown] nbgrader={"grade_id": "q2_4", "grade": true, "solution": true, "points": 5}
# 1. The smallest GEMM has so little work that fixed cost decides: the Python call, PyTorch's dispatch, on a GPU the
#    kernel launch (some microseconds). At n = 32 the arithmetic takes well under a microsecond, and the whole call
#    several: about as long as the shortest call of any operator, whatever its size. On a GPU there are also too few tiles
#    to fill all SMs. The model has no term for either.
# 2. It lies right of the ridge, so the compute roof limits it. It reaches most of the peak, not all: the tiles do not
#    divide evenly over the cores (a last, half-filled wave), the first tiles must be loaded before arithmetic starts,
#    and a chip under full load lowers its clock to stay within its power limit, while a datasheet assumes the boost
#    clock. A measured roof is itself the speed of a large GEMM, so there the point lies at 100%, give or take the noise
#    of two measurements.
# 3. The memory roof. Its intensity is about 0.5 FLOPs/Byte in fp32 or 1 in bf16, whatever its size. Twice the FLOP/s
#    moves only the ceiling, which it never touches. It would not help.
# 4. The small matrix stays in the cache from one repetition to the next, so its bytes do not come from main memory. The
#    slope to compare it with is that of the cache, which lies above the other. That is how a point can lie above "the"
#    roof. If it is still lower than the large one, launch overhead hides the effect.
# 5. Move fewer bytes: smaller dtypes (quantised weights) or more requests in one batch, so that a weight that has been
#    fetched is used more than once. More FLOP/s do not help.
#
# === BEGIN MARK SCHEME ===
# 1 point for each of the five, for the reason, with a number from the student's plot in at least two of them.
# 1: fixed overhead (launch, dispatch) or too little parallelism, beside the time of a short call or the time at the peak.
#    Not: "small matrices are slow".
# 2: compute roof, and one honest reason (tile quantisation, clocks or power, prologue, datasheet boost clock); where the
#    roof was measured: that it is a GEMM as well.
# 3: memory roof, and no.
# 4: cache instead of main memory. Full marks also for a GPU where the launch hides it, if the reason is given.
# 5: fewer bytes a FLOP: batching or a smaller dtype. Half a point for "more bandwidth".
# === END MARK SCHEME ===

# %% [markdown]
# # Part 3: Case study, a Gemma-3 decoder layer
#
# Now a real network. Gemma-3-270m is a stack of 18 decoder layers, all built alike (two details differ, below): attention,
# then an MLP, with norms around them.
#
# ![A Gemma-3 decoder layer: norm, attention with four query heads and one key-value head, norm, gated MLP](assets/decoder_layer.svg)
#
# Serving it has two phases.
# - **Prefill** reads the prompt: all $S$ tokens at once.
# - **Decode** writes the answer: one token at a time. Each new token attends to all tokens before it. Their keys and
#   values have been computed already, so they are kept, in the **KV cache**.
#
# ![The KV cache: prefill fills it with one entry per prompt token, each decode step reads it all and adds one](assets/kv_cache.svg)
#
# Two details of Gemma-3 matter for the counts:
# - **Grouped-query attention (GQA).** There are 4 query heads, but only 1 head of keys and values. All four share it. One
#   shared head is the extreme case, which is also called multi-query attention.
# - **Sliding window.** In five of six layers a token attends to the last 512 positions only, itself included. Every
#   sixth layer attends to everything.

# %%
config = GEMMA_CONFIG
for name in (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "sliding_window",
):
    print(f"{name:22} {getattr(config, name)}")
kinds = [kind.removesuffix("_attention") for kind in config.layer_types]
for first in range(0, len(kinds), 6):
    print(f"{'' if first else 'layer_types':22} {' '.join(kinds[first : first + 6])}")

# %% [markdown]
# ### Question 3.1: The cost of attention {points}
#
# **Which pairs count?** There are `kv_len` tokens so far, and the last `query_len` of them are the queries. (Prefill:
# the two are equal. Decode: `query_len` is 1.) A query at position $p$ attends to the keys at positions $0 \dots p$. With
# a window of $w$ it attends to the last $w$ of these only: the keys $p - w + 1 \dots p$. `attended_pairs` counts the
# (query, key) pairs of one head of one sequence, `window=None` means no window.
#
# **What does it cost?** Let $h$ be the hidden size, $H$ the query heads, $H_{kv}$ the key-value heads, $D$ the head
# dimension, and $T = \text{batch} \cdot \text{query\_len}$ the number of new tokens. Count **operator by operator**: each
# reads its inputs from memory once, and writes its output once. There are five:
#
# | operator | reads | writes |
# |---|---|---|
# | `q_proj` | the $T$ hidden states, its weight ($h \times H D$) | queries |
# | `k_proj` | the hidden states again, its weight ($h \times H_{kv} D$) | keys of the new tokens, into the cache |
# | `v_proj` | the hidden states again, its weight | values of the new tokens, into the cache |
# | attention | queries; the cached keys and values that *at least one* query can see | one vector of $D$ per query and head |
# | `o_proj` | those vectors, its weight ($H D \times h$) | $T$ hidden states |
#
# Attention is one fused operator here: scores stay on the chip. (Part 5 asks what happens if they do not.) Its MACs are
# $D$ for the score and $D$ for the value, for each attended pair and each **query** head. Count matrix products only;
# norms, rotary embedding and softmax are small.

# %% [markdown]
# {hint idea}
# For the pairs: how many keys does one query see? Then add up over the queries. For the cost: five operators, and each
# has inputs, weights and an output.
#
# {hint plan}
# Go through the table of operators row by row and write down the elements that each reads and writes; add them, times
# the bytes of one. For the MACs: tokens times the elements of each weight, and for attention two times $D$ for each
# pair, query head and sequence.
#
# {hint line}
# The queries are the last positions, so the first of them has `kv_len - query_len` keys before it. And a vector that
# one operator writes and the next reads counts twice. With a window, two neighbouring queries see nearly the same keys: draw
# both, and count the keys that at least one of them sees.

# %% nbgrader={"grade_id": "q3_1", "solution": true}
def attended_pairs(query_len: int, kv_len: int, window: int | None = None) -> int:
    """Number of (query, key) pairs that a causal mask, with or without a window, lets through."""
    ### BEGIN SOLUTION
    positions = range(kv_len - query_len, kv_len)
    return sum(min(p + 1, window or p + 1) for p in positions)
    ### END SOLUTION


def attention_macs_flops_bytes(
    batch: int, query_len: int, kv_len: int, config, dtype: torch.dtype, window: int | None = None
) -> tuple[int, int, int]:
    """MACs, FLOPs and I/O (bytes) of one attention block, its four projections included."""
    ### BEGIN SOLUTION
    hidden = config.hidden_size
    q_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    tokens = batch * query_len
    weights = 2 * hidden * q_width + 2 * hidden * kv_width
    macs = tokens * weights + 2 * batch * q_width * attended_pairs(query_len, kv_len, window)
    keys_read = kv_len if window is None else min(kv_len, query_len + window - 1)
    elements = weights
    elements += 3 * tokens * hidden + tokens * (q_width + 2 * kv_width)  # q, k and v projections
    elements += tokens * q_width + 2 * batch * keys_read * kv_width + tokens * q_width  # attention
    elements += tokens * q_width + tokens * hidden  # output projection
    return macs, 2 * macs, elements * dtype.itemsize
    ### END SOLUTION


# %% nbgrader={"grade_id": "q3_1_pairs_tests", "grade": true, "points": 3}
check_pairs(attended_pairs).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.attended_pairs(attended_pairs).raise_if_wrong()
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "q3_1_cost_tests", "grade": true, "points": 5}
check_attention_cost(attention_macs_flops_bytes, lambda *place: attended_pairs(*place)).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.attention_cost(attention_macs_flops_bytes, lambda *place: attended_pairs(*place)).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 3.2: The MLP and the norms {points}
#
# Gemma's MLP has a gate: $\text{down}\big(\text{GELU}(\text{gate}(x)) \odot \text{up}(x)\big)$. With $i$ the intermediate
# size, `gate` and `up` map $h \to i$, and `down` maps $i \to h$. Run without fusion it is **five** operators: `gate`,
# `up`, GELU, the elementwise product, `down`. Count as before: each reads its inputs once and writes its output once.
# For MACs and FLOPs, count the three matrix products only.
#
# RMSNorm maps each token's vector $x$ of width $n$ to $x_j \cdot r \cdot (1 + g_j)$ with
# $r = 1/\sqrt{\operatorname{mean}(x^2) + \varepsilon}$. Count it as one fused operator: it reads the tokens and the
# weight $g$, and writes the tokens. Count 4 FLOPs an element: the square, its addition to the sum, and two
# multiplications. It returns `(flops, bytes)`.

# %% [markdown]
# {hint idea}
# Five operators, five lines: what does each read, what does it write?
#
# {hint plan}
# gate and up: tokens in, weight in, wide out, each. GELU: wide in, wide out. Product: two wide in, one out. down: wide
# in, weight in, tokens out. Only three of them are matrix products.
#
# {hint line}
# `gate` and `up` each read the tokens. And the weight of the norm is one vector for all tokens.

# %% nbgrader={"grade_id": "q3_2", "solution": true}
def mlp_macs_flops_bytes(tokens: int, config, dtype: torch.dtype) -> tuple[int, int, int]:
    """MACs, FLOPs and I/O (bytes) of the gated MLP, run as five operators."""
    ### BEGIN SOLUTION
    hidden, wide = config.hidden_size, config.intermediate_size
    macs = 3 * tokens * hidden * wide
    elements = 3 * hidden * wide  # weights
    elements += 2 * (tokens * hidden + tokens * wide)  # gate and up
    elements += 2 * tokens * wide + 3 * tokens * wide  # GELU, product
    elements += tokens * wide + tokens * hidden  # down
    return macs, 2 * macs, elements * dtype.itemsize
    ### END SOLUTION


def rms_norm_flops_bytes(tokens: int, width: int, dtype: torch.dtype) -> tuple[int, int]:
    """FLOPs and I/O (bytes) of a fused RMSNorm over (tokens, width)."""
    ### BEGIN SOLUTION
    return 4 * tokens * width, (2 * tokens * width + width) * dtype.itemsize
    ### END SOLUTION


# %% nbgrader={"grade_id": "q3_2_tests", "grade": true, "points": 4}
check_mlp(mlp_macs_flops_bytes, rms_norm_flops_bytes).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.mlp_and_norm_costs(mlp_macs_flops_bytes, rms_norm_flops_bytes).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Put the counts together: where does a layer's work go, and how intense is it?
#
# **Before you run.** Prefill of 8 prompts of 2048 tokens in bf16 is a huge matrix product. Is the MLP compute-bound on
# an H100, whose ridge lies at 295 FLOPs/Byte?

# %%
guesses["MLP in prefill, on an H100"] = None  # "compute-bound" or "memory-bound"

# %%
rows = []
for phase, phase_batch, query_len, kv_len in (("prefill", 8, 2048, 2048), ("decode", 8, 1, 2048), ("decode", 256, 1, 2048)):
    for block, (_, flops, n_bytes) in {
        "attention, full": attention_macs_flops_bytes(phase_batch, query_len, kv_len, config, torch.bfloat16),
        "attention, sliding": attention_macs_flops_bytes(phase_batch, query_len, kv_len, config, torch.bfloat16, 512),
        "MLP": mlp_macs_flops_bytes(phase_batch * query_len, config, torch.bfloat16),
    }.items():
        rows.append((phase, phase_batch, block, flops / 1e9, n_bytes / 1e6, flops / n_bytes))
table = pd.DataFrame(rows, columns=["phase", "batch", "block", "GFLOPs", "MB", "FLOPs/Byte"])
table["on an H100"] = [
    "compute-bound" if x > get_ridge_point("H100", "bf16") else "memory-bound" for x in table["FLOPs/Byte"]
]
beside_guess("MLP in prefill, on an H100", table["on an H100"][2])
table.round(2)

# %% [markdown]
# Surprised? The three matrix products alone would be compute-bound. It is GELU and the elementwise product, which write
# and read $T \times i$ numbers and compute next to nothing, that pull the MLP below the ridge. Part 4 shows how to get rid of them.
# (Why an H100 here? The ridge of an H200, whose memory is faster, lies at 206, and there the same MLP is just compute-bound.)

# %% [markdown]
# ### Question 3.3: Ask PyTorch {points}
#
# Never trust a count that nothing has checked. PyTorch counts too: `torch.utils.flop_counter.FlopCounterMode` is a context
# manager that watches the operators that run and adds up the FLOPs of the matrix products; `.get_total_flops()` returns
# the sum. Write `counted_flops`: call `fn(*args)` once, under the counter, and return what it counts. (`display=False` keeps it
# from printing a table.)

# %% [markdown]
# {hint idea}
# The counter sees what runs inside of its `with` block.
#
# {hint plan}
# Make a `FlopCounterMode` without display, call `fn(*args)` once inside of the block, ask it for the sum afterwards.
#
# {hint line}
# Once: a call before the block, to warm up, is a second call.

# %% nbgrader={"grade_id": "q3_3", "solution": true}
def counted_flops(fn, *args) -> int:
    """FLOPs of one call fn(*args), as PyTorch's FlopCounterMode counts them."""
    ### BEGIN SOLUTION
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        fn(*args)
    return counter.get_total_flops()
    ### END SOLUTION


# %% nbgrader={"grade_id": "q3_3_tests", "grade": true, "points": 2}
check_counted_flops(counted_flops).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.counted_flops(counted_flops).raise_if_wrong()
### END HIDDEN TESTS

# %%


def prefill_call(batch: int, length: int, layer_idx: int, implementation: str):
    """A function of no arguments that runs the prefill of one layer, without a cache."""
    layer, rotary_emb = build_decoder_layer(config, layer_idx, dtype, device, attn_implementation=implementation)
    hidden_states, position_ids = create_prefill_inputs(batch, length, config.hidden_size, dtype, device)
    embeddings = get_position_embeddings(hidden_states, position_ids, rotary_emb, layer.self_attn.layer_type)
    return lambda: prefill_forward(layer, hidden_states, position_ids, embeddings)


# %%
counted_batch, counted_length, full = 2, 640, 5
ours = (
    attention_macs_flops_bytes(counted_batch, counted_length, counted_length, config, dtype)[1]
    + mlp_macs_flops_bytes(counted_batch * counted_length, config, dtype)[1]
)
masked = counted_length**2 - attended_pairs(counted_length, counted_length)
print(f"your count                        {ours:,}")
masked_flops = 4 * config.head_dim * config.num_attention_heads * counted_batch * masked  # two products, two FLOPs a MAC
print(f"your count, masked pairs included {ours + masked_flops:,}")
for implementation in ("eager", "sdpa"):
    try:
        counted = f"{counted_flops(prefill_call(counted_batch, counted_length, full, implementation)):,}"
    except AssertionError as error:  # an older counter's formula for fused attention on a GPU knows no GQA
        counted = f"gives up: {error}"
    print(f"PyTorch counts, {implementation:5}             {counted}")

# %% [markdown]
# The second and third line must agree to the last digit. They differ from the first because eager attention computes the
# full square of scores and then masks half of it: PyTorch counts what runs, you counted what is needed. The last line
# shows a limit of the counter. It has no formula for the fused CPU kernel, and counts its products as nothing. For the
# fused GPU kernels it counts the full square, although a causal kernel computes about half of it (and in some older
# versions of PyTorch it gives up at GQA). A tool that counts is still a tool that somebody wrote.

# %% [markdown]
# ### Question 3.4: Prefill, decode and the KV cache {points}
#
# Without a cache, each new token runs the whole sequence through the layer again. With a cache, it runs one token.
#
# **Write the loop.** `decode_with_cache` gets a `prompt` (B, S, hidden) and `new_tokens` (B, T, hidden). It prefills the
# prompt **once**, then decodes the new tokens **one by one** with the cache, and returns their outputs, (B, T, hidden).
# These must equal what a prefill of all S + T tokens gives for the last T. These functions of the course do the work:
#
# - `initialize_kv_cache(layer.config, max_cache_len)`: an empty cache. How many tokens must it hold? (More than twice as many are refused.)
# - `get_position_embeddings(hidden_states, position_ids, rotary_emb, layer.self_attn.layer_type)`; `position_ids` is
#   (B, number of tokens)
# - `prefill_forward(layer, hidden_states, position_ids, position_embeddings, past_key_values)` fills the cache
# - `decode_forward(layer, hidden_states, position_ids, position_embeddings, use_kv_cache=True, past_key_values=...,
#   cache_positions=...)` takes one token, (B, 1, hidden). `cache_positions` is a tensor of shape (1,): the position of
#   the token.
#
# **Count the cache.** `kv_cache_bytes` returns the bytes of the keys and values of **all layers** of the model, for
# `batch` sequences of `length` tokens. A sliding layer (`config.layer_types` tells which) keeps at most
# `config.sliding_window` tokens.

# %% [markdown]
# {hint idea}
# Prefill puts keys and values of the prompt at positions $0 \dots S-1$ of the cache. The first new token has position
# $S$, the next $S+1$.
#
# {hint plan}
# Make a cache for all tokens, prompt and new ones. Prefill the prompt. Then for each new token: cut it out as (B, 1,
# hidden), make its position, its embeddings, call `decode_forward`, keep the output. At the end, join the outputs. For
# the bytes: add up the tokens that each layer keeps.
#
# {hint line}
# Three things know the position of a token: `position_ids`, the rotary embeddings and `cache_positions`. All three
# advance.

# %% nbgrader={"grade_id": "q3_4", "solution": true}
def decode_with_cache(layer, rotary_emb, prompt: torch.Tensor, new_tokens: torch.Tensor) -> torch.Tensor:
    """Prefill prompt (B, S, hidden), then decode new_tokens (B, T, hidden) one by one with a KV cache."""
    ### BEGIN SOLUTION
    batch, prompt_len, _ = prompt.shape
    layer_type = layer.self_attn.layer_type
    cache = initialize_kv_cache(layer.config, prompt_len + new_tokens.shape[1])
    position_ids = torch.arange(prompt_len, device=prompt.device).expand(batch, -1)
    embeddings = get_position_embeddings(prompt, position_ids, rotary_emb, layer_type)
    prefill_forward(layer, prompt, position_ids, embeddings, cache)
    outputs = []
    for step in range(new_tokens.shape[1]):
        token = new_tokens[:, step : step + 1]
        cache_positions = torch.tensor([prompt_len + step], device=prompt.device)
        position_ids = cache_positions.expand(batch, 1)
        embeddings = get_position_embeddings(token, position_ids, rotary_emb, layer_type)
        output = decode_forward(layer, token, position_ids, embeddings, True, cache, cache_positions)
        outputs.append(output)
    return torch.cat(outputs, dim=1)
    ### END SOLUTION


def kv_cache_bytes(batch: int, length: int, config, dtype: torch.dtype) -> int:
    """Bytes of the KV cache of all layers for batch sequences of length tokens."""
    ### BEGIN SOLUTION
    tokens = sum(
        min(length, config.sliding_window) if kind == "sliding_attention" else length for kind in config.layer_types
    )
    return 2 * batch * tokens * config.num_key_value_heads * config.head_dim * dtype.itemsize
    ### END SOLUTION


# %% nbgrader={"grade_id": "q3_4_decode_tests", "grade": true, "points": 4}
check_decode(decode_with_cache).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.decode_with_cache(decode_with_cache).raise_if_wrong()
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "q3_4_bytes_tests", "grade": true, "points": 2}
check_kv_cache_bytes(kv_cache_bytes).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.kv_cache_bytes(kv_cache_bytes).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Your loop, at work: 256 tokens of prompt and 16 new ones, with the cache and without.

# %%
def decode_without_cache(layer, rotary_emb, prompt, new_tokens):
    """Run the whole sequence anew for each new token, and keep the last output."""
    outputs = []
    for step in range(1, new_tokens.shape[1] + 1):
        tokens = torch.cat((prompt, new_tokens[:, :step]), dim=1)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)
        embeddings = get_position_embeddings(tokens, positions, rotary_emb, layer.self_attn.layer_type)
        outputs.append(prefill_forward(layer, tokens, positions, embeddings)[:, -1:])
    return torch.concatenate(outputs, dim=1)


own_layer, own_rotary = build_decoder_layer(config, 5, dtype, device)
own_tokens = torch.randn(1, 272, config.hidden_size, device=device, dtype=dtype)
loops = {
    "with your cache": functools.partial(decode_with_cache, own_layer, own_rotary, own_tokens[:, :256], own_tokens[:, 256:]),
    "without": functools.partial(decode_without_cache, own_layer, own_rotary, own_tokens[:, :256], own_tokens[:, 256:]),
}
difference = (loops["with your cache"]() - loops["without"]()).abs().max().item()
for name, taken in median_times(loops, warmup=1, iterations=3).items():
    print(f"16 tokens {name:16} {plus_minus(taken)} ms")
print(f"largest difference of the outputs: {difference:.2g}")

# %% [markdown]
# **Before you run.** The next cell measures three things over texts of $S$ tokens: a prefill, one token decoded with the
# cache, and one decoded without it. Decode with a cache does about $1/S$ of the work of a prefill. Will it take $1/S$ of the
# time? And what does a larger batch cost, in each of the three columns?

# %%
guesses["gain of the cache, longest text, batch 1"] = None  # uncached time / cached time
guesses["gain of the cache, longest text, largest batch"] = None

# %%
def layer_latencies(batch: int, length: int, layer_idx: int = 5) -> dict[str, float]:
    """Latencies in ms of one layer: prefill, one decoded token with the cache, one without."""
    layer, rotary_emb = build_decoder_layer(config, layer_idx, dtype, device)
    kind, hidden = layer.self_attn.layer_type, config.hidden_size
    cache = initialize_kv_cache(layer.config, length + 1)

    x, position_ids = create_prefill_inputs(batch, length, hidden, dtype, device)
    embeddings = get_position_embeddings(x, position_ids, rotary_emb, kind)
    calls = {"prefill_ms": functools.partial(prefill_forward, layer, x, position_ids, embeddings, cache)}
    calls["prefill_ms"]()  # fills the cache

    x, position_ids, cache_positions = create_decode_inputs_with_cache(batch, length, hidden, dtype, device)
    embeddings = get_position_embeddings(x, position_ids, rotary_emb, kind)
    calls["cached_ms"] = functools.partial(
        decode_forward, layer, x, position_ids, embeddings, use_kv_cache=True,
        past_key_values=cache, cache_positions=cache_positions,
    )

    x, position_ids, past = create_decode_inputs_without_cache(batch, length, hidden, dtype, device)
    embeddings = get_position_embeddings(torch.cat((past, x), dim=1), position_ids, rotary_emb, kind)
    calls["uncached_ms"] = functools.partial(
        decode_forward, layer, x, position_ids, embeddings, use_kv_cache=False, prefill_hidden_states=past
    )
    times = median_times(calls) if on_gpu else median_times(calls, warmup=1, iterations=5)
    return {"batch": batch, "length": length, **{name: taken.median_ms for name, taken in times.items()}}


batches, lengths = ((1, 8, 32), (512, 2048, 8192)) if on_gpu else ((1, 4), (128, 512, 1024))
latency_rows = []
for layer_batch in batches:
    for layer_length in lengths:
        print(f"measuring batch {layer_batch}, {layer_length} tokens ...", flush=True)
        latency_rows.append(layer_latencies(layer_batch, layer_length))
latencies = pd.DataFrame(latency_rows)
latencies["cache gains"] = latencies["uncached_ms"] / latencies["cached_ms"]
results["decoder_layer"] = latencies.to_dict("records")
beside_guess("gain of the cache, longest text, batch 1", float(latencies["cache gains"][len(lengths) - 1]))
beside_guess("gain of the cache, longest text, largest batch", float(latencies["cache gains"].iloc[-1]))
display(latencies.round(3))
if not on_gpu:
    show_recorded("decoder_layer")

# %%
fig, axes = plt.subplots(1, len(batches), figsize=(4 * len(batches), 3.2), sharey=True, layout="constrained")
for ax, plotted_batch in zip(axes, batches, strict=True):
    part = latencies[latencies["batch"] == plotted_batch]
    for i, (column, label) in enumerate(
        {"prefill_ms": "prefill", "uncached_ms": "decode, no cache", "cached_ms": "decode, KV cache"}.items()
    ):
        ax.plot(part["length"], part[column], **series(i).line, label=label)
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(lengths, [str(x) for x in lengths])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter("{x:g}")
    style_axes(ax, x="tokens before this one", title=f"batch {plotted_batch}")
axes[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
style_axes(axes[-1])
style_axes(axes[0], y="latency of one layer (ms)")
plt.show()

# %%
weights_gb = 2 * 18 * (2 * 640 * 1024 + 2 * 640 * 256 + 3 * 640 * 2048) / 1e9
print(f"Weights of the 18 layers in bf16: {weights_gb:.2f} GB. KV cache in bf16:")
pd.DataFrame(
    {
        f"{length} tokens": [f"{kv_cache_bytes(batch, length, config, torch.bfloat16) / 1e9:.3f} GB" for batch in (1, 8, 64)]
        for length in (512, 4096, 32768)
    },
    index=pd.Index((1, 8, 64), name="batch"),
)

# %% [markdown]
# ### Question 3.5: Two phases, two roofs {points}
#
# Now the layer on the roofline, with the roof of the dtype that really ran: mixing the bytes of one dtype with the peak
# of another can put a point on the wrong side. The points below are whole layers (attention and MLP), measured in the
# cells above. Beside your machine's, the second picture shows what an H200 did.

# %%


def layer_flops_bytes(batch: int, query_len: int, kv_len: int) -> tuple[int, int]:
    """FLOPs and I/O (bytes) of one full-attention layer, norms left out."""
    _, attention_flops, attention_bytes = attention_macs_flops_bytes(batch, query_len, kv_len, config, dtype)
    _, mlp_flops, mlp_bytes = mlp_macs_flops_bytes(batch * query_len, config, dtype)
    return attention_flops + mlp_flops, attention_bytes + mlp_bytes


measured = {}
for row in latencies[latencies["length"] == lengths[-1]].to_dict("records"):
    row_batch, row_length = int(row["batch"]), int(row["length"])
    for phase, query_len, kv_len, column in (
        ("prefill", row_length, row_length, "prefill_ms"), ("decode", 1, row_length + 1, "cached_ms")
    ):
        flops, n_bytes = layer_flops_bytes(row_batch, query_len, kv_len)
        measured[f"{phase} B{row_batch}"] = flops / n_bytes, achieved_tflops(flops, row[column])
report_measured("layer_roofline", measured)
plot_roofline(roofs.name, peak, bandwidth, measured=measured)
plt.show()
if not on_gpu:
    plot_recorded("layer_roofline", "One Gemma-3 layer on an H200 (8192 tokens, recorded)")

# %% [markdown]
# Look at decode at batch 1 on the H200: it stands far below the slope. It reaches less than one percent of its *memory* roof.
# So a third limit must be at work, one that this picture does not draw: the program that **launches** the kernels. With it,
#
# $$t \;\ge\; \max\left(\frac{\text{FLOPs}}{\text{peak}},\; \frac{\text{bytes}}{\text{bandwidth}},\; \text{kernels} \cdot t_\text{launch}\right).$$
#
# Part 4 measures the third term, and takes it away.

# %% [markdown]
# **Explain**, with numbers from your tables:
# 1. Why does prefill lie far right and decode far left, although both run the same layer with the same weights?
# 2. A larger batch moves decode to the right. Which bytes are shared by the batch, and which are not? What does that say
#    about very long contexts?
# 3. Decode with a cache does about $1/S$ of the work of decode without one. Does it gain a factor of $S$ in your table?
#    Why not?
# 4. Five of six layers slide. What does that change for the cache at 32768 tokens, and what for the MLP?
# 5. A colleague says: "Our decode uses 0.01% of the GPU's FLOP/s, so the kernels must be bad." Which two numbers would you
#    look at before you answer? What do they say about the H200 at batch 1?

# %% [markdown]
# {hint idea}
# For each answer, split the bytes into those that every token shares and those that it does not.
#
# {hint plan}
# 1 and 2: which bytes are the weights', which are the cache's? 3: compare the time of a cached step with its bytes over
# the bandwidth. 4: count tokens in 15 sliding and 3 full layers. 5: there are two more roofs than the one that the
# colleague looks at.
#
# {hint line}
# The same weights are read for one token or for thousands. What does that do to FLOPs per byte?

# %% [markdown] nbgrader={"grade_id": "q3_5", "grade": true, "solution": true, "points": 5}
# 1. A weight is read once in both cases. Prefill uses it for every one of the B·S tokens, decode for B tokens. So the
#    FLOPs differ by a factor of S while the weight bytes stay the same: about 1 FLOP/Byte per sequence in the batch in
#    bf16 for decode, over a hundred for prefill.
# 2. Shared: the weights. Not shared: each sequence's own KV cache and activations. Batching raises the intensity of the
#    projections and of the MLP, but never that of attention over the cache. With long contexts the cache becomes most of
#    the traffic and batching stops helping.
# 3. Far less. One token leaves hardly any arithmetic, so the time is the weights' trip from memory plus fixed overhead:
#    eighty to ninety operators, each with its dispatch and launch. Those do not shrink with S.
# 4. A sliding layer keeps 512 tokens instead of 32768, 1/64. The whole cache is 15·512 + 3·32768 tokens instead of
#    18·32768, less than a fifth. The MLP does not look at other tokens: nothing changes.
# 5. The share of the memory roof, since decode lies left of the ridge, and the time that launching its kernels takes. Near
#    the memory roof, 0.01% of the FLOP/s would be all there is to get. On the H200 at batch 1 it is 0.3% of the memory
#    roof: neither roof limits it. Some 90 kernels wait to be launched, so the kernels are not bad, but too many and too
#    short: fuse them or launch them together.
#
# === BEGIN MARK SCHEME ===
# 1 point for each of the five. Numbers from the student's own run are needed in at least two; otherwise take off one.
# 1: weight reuse per token, or FLOPs grow with S and weight bytes do not.
# 2: weights shared, KV cache not; long context means cache-dominated, batching saturates.
# 3: no; names weight traffic or per-operator overhead. Half a point for "overhead" alone without saying of what.
# 4: cache of sliding layers capped at the window (a figure for the ratio), MLP unchanged.
# 5: share of the memory roof (or bandwidth), and launches (or kernels times launch time); at batch 1 the launches limit.
# === END MARK SCHEME ===

# %% [markdown]
# ### Bonus Question 3.6: The floor under decode {points}
#
# A step cannot be faster than its bytes. Each decode step of the model reads all weights of its 18 layers, and the whole KV
# cache of each sequence. Weights and cache may be stored in different formats (fp8 weights, bf16
# cache, ...), so their bytes per number are arguments: `weight_bytes`, `cache_bytes`. A layer's weights are four
# attention projections and three MLP matrices. Leave out norms, embeddings and activations.
#
# 1. `decode_floor_ms`: the least time of one decode step of the 18 layers, in ms, with `length` tokens in each cache.
#    Sliding layers read at most their window. (The output head comes on top; the cell after the test asks about it.)
# 2. `break_even_batch`: the smallest batch at which the cache traffic is at least as large as the weight traffic. From
#    there on, quantising the weights gains less than quantising the cache.

# %% [markdown]
# {hint idea}
# Time is bytes over bandwidth. The weights are read once a step for the whole batch, the cache once for each sequence.
#
# {hint plan}
# Weights: four projections and three MLP matrices, times the number of layers. Cache: two (keys and values), times the
# tokens that each layer keeps, times the width of the key-value heads. Each part with its own bytes per number. The
# break-even batch is where the second part reaches the first.
#
# {hint line}
# TB/s is $10^{12}$ bytes a second and the answer is in ms. And a batch is an integer: at which of the two neighbours is
# the cache the larger part?

# %% nbgrader={"grade_id": "bonus_3_6", "solution": true}
def decode_floor_ms(
    batch: int, length: int, config, bandwidth_tb_s: float, weight_bytes: float = 2, cache_bytes: float = 2
) -> float:
    """Least time in ms of one decode step of all layers, from its memory traffic."""
    ### BEGIN SOLUTION
    attention = 2 * config.hidden_size * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    weights = (attention + mlp) * config.num_hidden_layers
    cached_tokens = sum(
        min(length, config.sliding_window) if kind == "sliding_attention" else length for kind in config.layer_types
    )
    cache = 2 * cached_tokens * config.num_key_value_heads * config.head_dim
    return (weights * weight_bytes + batch * cache * cache_bytes) / (bandwidth_tb_s * 1e12) * 1e3
    ### END SOLUTION


def break_even_batch(length: int, config, weight_bytes: float = 2, cache_bytes: float = 2) -> int:
    """Smallest batch whose KV-cache traffic is at least the weights' traffic."""
    ### BEGIN SOLUTION
    weights = decode_floor_ms(0, length, config, 1.0, weight_bytes, 0)
    cache_of_one = decode_floor_ms(1, length, config, 1.0, 0, cache_bytes)
    return math.ceil(weights / cache_of_one)
    ### END SOLUTION


# %% nbgrader={"grade_id": "bonus_3_6_tests", "grade": true, "points": 5}
check_floor(decode_floor_ms, break_even_batch).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.decode_floor(decode_floor_ms, break_even_batch).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# The layers are not all. To choose a word, each step multiplies its last hidden state by the output head: one row of 640
# numbers for each of the 262,144 words that Gemma-3 knows. What does that do to the floor of an H200?

# %%
head_gb = 2 * 262_144 * 640 / 1e9  # bf16
layers_ms = decode_floor_ms(1, 512, config, 4.8)
head_ms = head_gb / 4.8
print(f"floor of one step on an H200, batch 1, 512 tokens: 18 layers {layers_ms:.3f} ms, output head {head_ms:.3f} ms")
print(f"the head has {head_gb / (head_gb + 0.2005):.0%} of the weights that a step reads")

# %% [markdown]
# # Part 4: Profiling and kernel fusion
#
# A roofline tells you *that* time is lost. A profiler tells you *where*. Between two kernels lies more than you think:
# Python, PyTorch's dispatcher, the driver, the launch itself. Each kernel costs about 5 to 20 µs of CPU time before it
# may start, Python included, whatever it computes: you will measure yours. One token in one Gemma-3 layer reads 11 MB of
# weights. An H200 does that in 2.3 µs, less than the time to launch *one* kernel. And the layer launches dozens.

# %% [markdown]
# ### Question 4.1: Profile and export a trace {points}
#
# [`torch.profiler.profile`](https://docs.pytorch.org/docs/stable/profiler.html) records every operator on the CPU and every kernel on the GPU. A **schedule** tells it when:
# the course's `default_schedule` waits 1 step, warms up for 3, and records 6. So you call the function 10 times and say
# `prof.step()` after each call.
#
# There is Question 1.3 again: `fn()` returns while its kernels still wait in the queue. `prof.step()` would end the step too
# early, and kernels of the warm-up would run, and be counted, in the recorded steps. So call `synchronize()`, from the setup
# cell and by that name, between `fn()` and `prof.step()`. (On a CPU it does nothing.)
#
# Write `profile_steps`:
# - call `fn()` ten times under a profiler with `schedule=default_schedule`, so that exactly the 6 active steps are recorded, with
#   `synchronize()` between each call and its `prof.step()`;
# - write a Chrome trace to `trace_path`, with `prof.export_chrome_trace`;
# - return the profiler.
#
# Without the CUDA activity, where `torch.cuda.is_available()`, a GPU's trace has no kernels in it. And the trace is complete after
# the `with` block only.

# %% [markdown]
# {hint idea}
# The schedule counts steps, and only `prof.step()` tells it that a step is over.
#
# {hint plan}
# Collect the activities, open `torch.profiler.profile` with them and the schedule, and in it ten times: call,
# synchronize, step. After the block, export and return.
#
# {hint line}
# The export stands after the `with` block. And without the wait, kernels of one step are counted in a later one.

# %% nbgrader={"grade_id": "q4_1", "solution": true}
def profile_steps(fn, trace_path: str) -> torch.profiler.profile:
    """Profile 6 steps of fn() after 1 waiting and 3 warm-up steps; export a Chrome trace."""
    ### BEGIN SOLUTION
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, schedule=default_schedule) as prof:
        for _ in range(10):
            fn()
            synchronize()
            prof.step()
    prof.export_chrome_trace(str(trace_path))
    return prof
    ### END SOLUTION


# %% nbgrader={"grade_id": "q4_1_tests", "grade": true, "points": 3}
check_profile(profile_steps).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.profile_steps(profile_steps).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Profile a decode step, and look at it. The timeline below is drawn from the file that you exported. To walk through
# it, open [ui.perfetto.dev](https://ui.perfetto.dev) (or `chrome://tracing`) and drop `out/decode_trace.json` on it.
#
# **Before you run.** How many operators does one token need in one layer? 10, 100, 1000?

# %%
guesses["operators (on a GPU: kernels) of a decode step"] = None

# %%
def decode_step(batch: int, length: int, layer_idx: int = 5, attend="auto"):
    """A function of no arguments that decodes one token with the cache; attend: the attention, None for the layer's own."""
    layer, rotary_emb = build_decoder_layer(config, layer_idx, dtype, device)
    kind = layer.self_attn.layer_type
    cache = initialize_kv_cache(layer.config, length + 1)
    x, position_ids = create_prefill_inputs(batch, length, config.hidden_size, dtype, device)
    prefill_forward(layer, x, position_ids, get_position_embeddings(x, position_ids, rotary_emb, kind), cache)
    x, position_ids, positions = create_decode_inputs_with_cache(batch, length, config.hidden_size, dtype, device)
    embeddings = get_position_embeddings(x, position_ids, rotary_emb, kind)
    return lambda: decode_forward(
        layer, x, position_ids, embeddings, use_kv_cache=True, past_key_values=cache, cache_positions=positions, attend=attend
    )


# %%
step, trace = decode_step(batch=1, length=512), str(output_path("decode_trace.json"))
prof = profile_steps(step, trace)
counts = count_cuda_kernels(prof)
print(f"{'kernels' if on_gpu else 'operators'} a step:", counts)
beside_guess("operators (on a GPU: kernels) of a decode step", counts["total"])
taken = median_times({"a decode step": step})["a decode step"]
print(f"latency of a step: {plus_minus(taken)} ms, {1e3 * taken.median_ms / counts['total']:.1f} µs for each of them")
last_step = [event for event in read_trace(trace) if event.name.startswith("ProfilerStep#")][-1]
plot_timeline(trace, window_ms=(last_step.start_us / 1e3, last_step.end_us / 1e3))
plt.show()
summary = summarize_trace(trace, top=12, dataframe=True)  # the slivers without a name, by their names
summary[["name", "family", "count", "self_us", "mean_us", "share"]].round(3)

# %% [markdown]
# ### Question 4.2: GELU, operator by operator {points}
#
# Gemma's activation is the tanh form of GELU:
#
# $$\text{GELU}(x) = \tfrac{1}{2}\,x\left(1 + \tanh\!\left(\sqrt{2/\pi}\,\left(x + 0.044715\,x^3\right)\right)\right).$$
#
# Each `+`, `*` and `tanh` you write is one operator: it reads its whole input from memory and writes its whole output. (A
# number such as 0.5 is no tensor: `0.5 * x` reads one. `x * x` is counted as two inputs, though it is the same one.
# `x ** 3` is one operator with one input.)
# A **fused** kernel reads $x$ once, keeps everything in between in registers, and writes once.
#
# ![Kernel fusion: a chain of kernels with memory traffic between them becomes one kernel](assets/kernel_fusion.svg)
#
# 1. `gelu_by_hand`: the formula from elementwise operators of whole tensors: no GELU of a library, no matrix product, no table
#    in which values are looked up. Same shape and dtype as `x`; `x` itself must not change. (Leave `torch.compile` to Question
#    4.3: there it is set beside this function.)
# 2. `elementwise_bytes`: the bytes that a chain of elementwise operators moves. `one_input` of them read one tensor,
#    `two_inputs` read two, and each writes one. All tensors have `numel` elements.
# 3. `fusion_speedup`: how many times faster the fused kernel is than this chain, if memory traffic is all that matters.

# %% [markdown]
# {hint idea}
# Write the formula from left to right: every sign is one operator.
#
# {hint plan}
# First the inner part, then tanh of it, then the two factors. For the bytes: an operator with one input moves two
# tensors, one with two inputs moves three. For the speed-up: all that the chain moves over what one fused kernel moves.
#
# {hint line}
# `x *= ...` changes the caller's tensor. And every operator writes, too.

# %% nbgrader={"grade_id": "q4_2", "solution": true}
def gelu_by_hand(x: torch.Tensor) -> torch.Tensor:
    """tanh-GELU from elementwise operators."""
    ### BEGIN SOLUTION
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + torch.tanh(inner))
    ### END SOLUTION


def elementwise_bytes(numel: int, dtype: torch.dtype, one_input: int, two_inputs: int) -> int:
    """Bytes moved by one_input unary and two_inputs binary elementwise operators on numel elements."""
    ### BEGIN SOLUTION
    return (2 * one_input + 3 * two_inputs) * numel * dtype.itemsize
    ### END SOLUTION


def fusion_speedup(one_input: int, two_inputs: int) -> float:
    """Memory traffic of the chain over that of one fused kernel with one input and one output."""
    ### BEGIN SOLUTION
    return (2 * one_input + 3 * two_inputs) / 2
    ### END SOLUTION


# %% nbgrader={"grade_id": "q4_2_tests", "grade": true, "points": 2}
check_gelu(gelu_by_hand).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.gelu_by_hand(gelu_by_hand).raise_if_wrong()
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "q4_2_bytes_tests", "grade": true, "points": 2}
check_fusion(elementwise_bytes, fusion_speedup).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.fusion_bytes(elementwise_bytes, fusion_speedup).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 4.3: Let the compiler fuse {points}
#
# [`torch.compile`](https://docs.pytorch.org/docs/stable/generated/torch.compile.html) records the operators of a function and generates one kernel for as many of them as it can. You judge it
# by counting. Write `kernels_per_step`: the number of kernels (on a GPU) or leaf operators (on a CPU) that one call of
# `fn()` runs. Profile it with a `schedule` and a `synchronize()` before each step, as in Question 4.1, and let
# `count_cuda_kernels(prof)` count: its `total` is per step.

# %% [markdown]
# {hint idea}
# It is Question 4.1 without the file, and with a number at the end.
#
# {hint plan}
# The same profile with the same schedule, ten calls, then let `count_cuda_kernels` count, and take one of its entries.
#
# {hint line}
# `count_cuda_kernels` already divides by the number of recorded steps.

# %% nbgrader={"grade_id": "q4_3", "solution": true}
def kernels_per_step(fn) -> int:
    """Number of kernels (GPU) or leaf operators (CPU) that one call fn() runs."""
    ### BEGIN SOLUTION
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, schedule=default_schedule) as prof:
        for _ in range(10):
            fn()
            synchronize()
            prof.step()
    return count_cuda_kernels(prof)["total"]
    ### END SOLUTION


# %% nbgrader={"grade_id": "q4_3_tests", "grade": true, "points": 2}
check_kernels(kernels_per_step).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.kernels_per_step(kernels_per_step).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Now GELU four ways, then the whole layer before and after the compiler.
#
# **Before you run.** Count the operators in your `gelu_by_hand`. What speed-up does `fusion_speedup` promise? Will you get
# it? (Compiling takes some seconds the first time.)

# %%
guesses["operators in your gelu_by_hand"] = None
guesses["speed-up of F.gelu"] = None

# %%
numel = 2**26 if on_gpu else 2**22
gelu_input = torch.randn(numel, device=device, dtype=dtype)
print(f"{numel:,} elements in {dtype_name}")
ways = {"by hand": gelu_by_hand, "F.gelu": lambda t: F.gelu(t, approximate="tanh")}
compiler = compile_support()
if compiler:
    ways["by hand, compiled"] = torch.compile(gelu_by_hand, dynamic=False)
else:
    print(f"torch.compile cannot run here: {compiler.reason} {compiler.remedy}")
if on_gpu:
    from utils.kernels.gelu import gelu_triton

    ways["Triton kernel"] = gelu_triton

print(f"measuring {', '.join(ways)}, in turns ...", flush=True)
times = median_times({name: functools.partial(way, gelu_input) for name, way in ways.items()})
rows = []
for name, way in ways.items():
    count = kernels_per_step(functools.partial(way, gelu_input))
    # the bytes that a fused kernel moves (one read, one write), over the time that this way takes
    rows.append((name, count, times[name].median_ms, 2 * gelu_input.nbytes / times[name].median_ms / 1e6))
gelu_table = pd.DataFrame(rows, columns=["GELU", "kernels" if on_gpu else "operators", "ms", "GB/s of one read and one write"])
gelu_table["speed-up"] = gelu_table["ms"][0] / gelu_table["ms"]
results["gelu"] = gelu_table.to_dict("records")
beside_guess("operators in your gelu_by_hand", int(gelu_table.iloc[0, 1]))
beside_guess("speed-up of F.gelu", float(gelu_table["speed-up"][1]))
display(gelu_table.set_index("GELU").round(2))
if not on_gpu:
    show_recorded("gelu")

# %%
compiler = compile_support()
if compiler:
    print("compiling the decoder layer: about 10 s the first time ...", flush=True)
    layer, rotary_emb = build_decoder_layer(config, 5, dtype, device)
    hidden_states, position_ids = create_prefill_inputs(1, 512, config.hidden_size, dtype, device)
    embeddings = get_position_embeddings(hidden_states, position_ids, rotary_emb, layer.self_attn.layer_type)
    compiled = torch.compile(layer, dynamic=False)
    with torch.no_grad():
        both = {
            name: functools.partial(module, hidden_states, position_embeddings=embeddings, position_ids=position_ids)
            for name, module in (("eager", layer), ("compiled", compiled))
        }
        verdict = compare(*both.values(), labels=tuple(both), queue_ahead=False, device=device, **TIMES)
        rows = [
            (name, kernels_per_step(both[name]), side.median_ms) for name, side in (("eager", verdict.a), ("compiled", verdict.b))
        ]
    compiled_table = pd.DataFrame(rows, columns=["layer", "kernels" if on_gpu else "operators", "ms"])
    results["compiled_layer"] = compiled_table.to_dict("records")
    display(compiled_table.set_index("layer").round(3))
    print(verdict)
    if not on_gpu:
        show_recorded("compiled_layer")
else:
    print(f"torch.compile cannot run here: {compiler.reason} {compiler.remedy}")

# %% [markdown]
# A note on the zero that a CPU shows for the compiled GELU: the kernel that the compiler generates there is a plain C++
# function, and the profiler counts PyTorch's operators. Zero means that not one of them is left; they are one generated
# loop now. On a GPU a generated kernel is launched like any other, and is counted.

# %% [markdown]
# ## Mixed precision
#
# Nothing here is graded. Fusion removes trips to memory. The other way to move fewer bytes is a narrower number, and for matrix
# products it is also the faster one: the tensor cores of an H200 do 989 TFLOP/s in bf16, and its ordinary units 67 in fp32. For a
# model that only answers, the weights are simply stored in bf16. Training cannot do that so simply: an optimizer adds small
# steps to the weights, and a step below 1/512 of a bf16 number is lost, as in the bf16 sum of Question 1.2.
#
# So training is done in **mixed precision** ([Micikevicius and others](https://arxiv.org/abs/1710.03740)): the weights stay in fp32, and each product gets bf16 copies of them.
# [`torch.autocast`](https://docs.pytorch.org/docs/stable/amp.html) does this operator by operator: matrix products run in bf16, sums such as a loss run in fp32. The next cell
# runs the MLP of a Gemma-3 layer three ways, and then adds a thousand small steps to a weight.
#
# **Before you run.** Is the error of autocast nearer to that of fp32, or to that of bf16? And what is 1 after 1000 steps of
# 0.001, in bf16?

# %%
guesses["autocast has an error as in"] = None  # "fp32" or "bf16"
guesses["1 after a thousand steps of 0.001, in bf16"] = None

# %%
import copy

mlp = build_decoder_layer(config, 5, torch.float32, device)[0].mlp
hidden_states = torch.randn(8192 if on_gpu else 512, config.hidden_size, device=device)
narrow_mlp, narrow_states = copy.deepcopy(mlp).bfloat16(), hidden_states.bfloat16()


def in_autocast():
    """The MLP under autocast: fp32 weights and inputs, products in bf16."""
    with torch.autocast(device.type, dtype=torch.bfloat16):
        return mlp(hidden_states)


with torch.no_grad():
    exact = copy.deepcopy(mlp).double()(hidden_states.double())
    ways = {"fp32": lambda: mlp(hidden_states), "autocast": in_autocast, "bf16": lambda: narrow_mlp(narrow_states)}
    times = median_times(ways, iterations=5)
    rows = []
    for name, way in ways.items():
        out = way()
        relative = ((out.double() - exact).square().mean() / exact.square().mean()).sqrt().item()
        weights = (narrow_mlp if name == "bf16" else mlp).parameters()
        rows.append({"way": name, "ms": times[name].median_ms, "rms error": relative, "weights, MB": sum(w.nbytes for w in weights) / 1e6,
                     "result": str(out.dtype).removeprefix("torch.")})
precision_table = pd.DataFrame(rows)
results["mixed_precision"] = rows
display(precision_table.assign(**{"rms error": precision_table["rms error"].map("{:.1e}".format)}).set_index("way").round(2))
weight = {kind: torch.ones((), dtype=kind) for kind in (torch.float32, torch.bfloat16)}
for _ in range(1000):
    for w in weight.values():
        w += 0.001
print(f"1 after 1000 steps of 0.001: {weight[torch.float32].item():.3f} in fp32, {weight[torch.bfloat16].item():.3f} in bf16")
size = dict(zip(precision_table["way"], precision_table["rms error"].map(math.log), strict=True))
beside_guess("autocast has an error as in", min(("fp32", "bf16"), key=lambda way: abs(size[way] - size["autocast"])))
beside_guess("1 after a thousand steps of 0.001, in bf16", weight[torch.bfloat16].item())

# %% [markdown]
# Autocast and bf16 have errors of one size: both round the numbers that go into each product. They differ in what they keep.
# With autocast the weights in memory are those of fp32, twice as many bytes, so that small steps are not lost, and each call
# pays for the copies. Whether narrow products are faster is up to the machine: a CPU without units for bf16 is slower with
# them. The H200 record of this lab has no such table.

# %% [markdown]
# ### Question 4.4: The launch queue, and CUDA graphs {points}
#
# The CPU puts kernels into a queue, the GPU takes them out. Launching one takes the CPU `launch_us`, running one takes
# the GPU `kernel_us`, and the two work at the same time. For `n` kernels in a row, all alike:
#
# - **Eager.** Launch $i$ ends at $i \cdot t_\text{launch}$, for $i = 1 \dots n$. A kernel starts as soon as it is launched
#   **and** its predecessor is done. Draw it for $t_\text{launch} > t_\text{kernel}$ and for the opposite.
# - **[CUDA graph](https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).** The whole sequence was recorded before. One launch of `launch_us`, then all `n` kernels run back to
#   back.
#
# Both functions return the time in µs from the first launch's start to the last kernel's end.

# %% [markdown]
# {hint idea}
# Two workers, one queue: draw three kernels on paper, once with a slow and once with a fast launch.
#
# {hint plan}
# Before the first kernel there is always one launch. After the last launch there is always one kernel. Between them,
# the slower of the two sets the pace, $n - 1$ times.
#
# {hint line}
# Try $n = 1$: both functions give one launch and one kernel.

# %% nbgrader={"grade_id": "q4_4", "solution": true}
def eager_time_us(n: int, launch_us: float, kernel_us: float) -> float:
    """Time in µs of n equal kernels, each launched on its own."""
    ### BEGIN SOLUTION
    return launch_us + (n - 1) * max(launch_us, kernel_us) + kernel_us
    ### END SOLUTION


def graph_time_us(n: int, launch_us: float, kernel_us: float) -> float:
    """Time in µs of n equal kernels, launched together as one CUDA graph."""
    ### BEGIN SOLUTION
    return launch_us + n * kernel_us
    ### END SOLUTION


# %% nbgrader={"grade_id": "q4_4_tests", "grade": true, "points": 2}
check_launches(eager_time_us, graph_time_us).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.launch_model(eager_time_us, graph_time_us).raise_if_wrong()
### END HIDDEN TESTS

# %%
kernel_us = [0.5 * 2**i for i in range(10)]
fig, ax = plt.subplots(figsize=(8, 3), layout="constrained")
for i, launch_us in enumerate((6, 15)):  # a launch alone, and one with PyTorch and Python around it
    gains = [eager_time_us(80, launch_us, t) / graph_time_us(80, launch_us, t) for t in kernel_us]
    ax.plot(kernel_us, gains, **series(i).line, label=f"{launch_us} µs a launch")
ax.axhline(1, color="black", linewidth=1)
ax.set_xscale("log")
ax.set_xticks([1, 10, 100], ["1", "10", "100"])
ax.legend()
style_axes(ax, x="time of one kernel (µs)", y="gain of a graph (×)", title="80 kernels: what a CUDA graph is worth")
plt.show()

# %% [markdown]
# Now the real thing: **capture a graph yourself.** On a GPU, fill in the three lines of `captured` below (there are no points
# for it, and nothing is graded). While a graph is captured, kernels are recorded, not run; afterwards `replay()` launches
# all of them at once, on the same tensors. Without a GPU there are no launches to save, since a CPU operator is a function
# call: the cell then shows what was recorded on an H200.

# %%
def captured(step):
    """A function of no arguments that replays one call of step() as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a capture runs on a stream of its own, so warm up on one
        step()
    torch.cuda.current_stream().wait_stream(stream)
    # Three lines are missing: make a `torch.cuda.CUDAGraph()`, call step() inside of `with torch.cuda.graph(...)`, and return
    # the graph's `replay`. Until then the next cell lets `measure(..., graph=True)` capture.
    return None


# %% [markdown]
# **Before you run.** A decode step of batch 1 took so many kernels (Question 4.1) and so many ms. If a graph takes all
# launches but one away, what is left? And what does a graph gain for the prefill of 8192 tokens, at batch 1 and at batch 8?

# %%
guesses["gain of a graph, decode, batch 1"] = None
guesses["gain of a graph, prefill of 8192 tokens, batch 1"] = None
guesses["gain of a graph, prefill of 8192 tokens, batch 8"] = None

# %%
def launches_of(call) -> int:
    """How often the CPU launches a kernel, or a whole graph, in one call."""
    events = read_trace(profile(call, steps=1, warmup=2))
    return sum(event.category.startswith("cuda") and "Launch" in event.name for event in events)


if cuda_graph_support():
    rows = []
    for phase, graph_batch, step in (
        ("decode after 512", 1, decode_step(1, 512)), ("decode after 512", 32, decode_step(32, 512)),
        ("prefill of 8192", 1, prefill_call(1, 8192, 5, "sdpa")),
        ("prefill of 8192", 8, prefill_call(8, 8192, 5, "sdpa")),
    ):
        step()
        row = {"phase": phase, "batch": graph_batch, "kernels": kernels_per_step(step), "launches": launches_of(step)}
        if replay := captured(step):
            times = median_times({"eager_ms": step, "graph_ms": replay})
            row |= {name: taken.median_ms for name, taken in times.items()}
            row["launches of the graph"] = launches_of(replay)
        else:
            row["eager_ms"] = measure(step, queue_ahead=False, **TIMES).median_ms
            row["graph_ms"] = measure(step, graph=True, queue_ahead=False, calls_per_sample=1, **TIMES).median_ms
        rows.append(row)
    graphs = pd.DataFrame(rows)
    graphs["gain"] = graphs["eager_ms"] / graphs["graph_ms"]
    results["cuda_graphs"] = graphs.to_dict("records")
    display(graphs.round(4))
else:
    print(f"{cuda_graph_support().reason}")
    graphs = recorded_table(RECORDED, "cuda_graphs")
    if graphs is not None:
        display(graphs.round(4))
for what, row in (("decode, batch 1", 0), ("prefill of 8192 tokens, batch 1", 2), ("prefill of 8192 tokens, batch 8", 3)):
    if graphs is not None and row < len(graphs):
        beside_guess(f"gain of a graph, {what}", float(graphs["gain"][row]))

# %% [markdown]
# The graph does the same work on the same bytes, and one launch is left of about ninety. Now put the three limits side by
# side for decode at batch 1: the bytes of the layer need 2.3 µs on an H200, the kernels one after the other need the time of
# the graph, and launching them one by one takes the eager time. The graph is still far above the memory floor: ninety tiny
# kernels, each of which fills a fraction of the GPU and waits for the one before. That is what fusion is for.
#
# ## One kernel of the ninety
#
# One of these kernels is attention. For a Hopper GPU the course has a kernel of its own for one new token over a long cache,
# `attention_decode`; lab 4 shows how it shares the keys among the multiprocessors. In a graph `decode_forward` takes it by
# itself; `attend=None` keeps the layer's own attention. A better kernel helps only where something waits for it. The next
# cell takes the layer that attends to everything, with one sequence and with 64, launched one by one and in a graph.
#
# **Before you run.** By what factor is the step of 64 sequences with 4096 tokens each faster with the decode kernel, in a
# graph? And launched one by one, with one sequence of 2048 tokens?

# %%
guesses["gain of the decode kernel, 64 x 4096, graph"] = None
guesses["gain of the decode kernel, 1 x 2048, one by one"] = None

# %%
if cuda_graph_support() and gluon_support():
    rows = []
    for step_batch, cached in ((1, 2048), (1, 32768), (64, 4096)):
        row = {"batch": step_batch, "tokens": cached}
        for name, attend in (("own", None), ("decode kernel", attention_decode)):
            step = decode_step(step_batch, cached, attend=attend)
            row[f"{name}, one by one, us"] = 1e3 * measure(step, queue_ahead=False, **TIMES).median_ms
            row[f"{name}, graph, us"] = (
                1e3 * measure(step, graph=True, queue_ahead=False, calls_per_sample=1, **TIMES).median_ms
            )
        rows.append(row)
    results["decode_kernel"] = rows
else:
    print(gluon_support().reason)
    record_file, rows = Path("assets/results/h200/decode_layer.json"), []
    if record_file.exists():
        record = json.loads(record_file.read_text())
        print(f"Recorded on {record['environment']['gpu']}. Not measured here:")
        for recorded in record["rows"]:
            if recorded["type"] == "full_attention":
                row = {"batch": recorded["batch"], "tokens": recorded["tokens"]}
                for name in ("own", "decode kernel"):
                    # Launched one by one, a step takes as long as the CPU takes to launch it.
                    row[f"{name}, one by one, us"] = recorded[name]["host_us"]
                    row[f"{name}, graph, us"] = recorded[name]["graph_us"]
                rows.append(row)
if rows:
    kernels = pd.DataFrame(rows)
    for how in ("one by one", "graph"):
        kernels[f"gain, {how}"] = kernels[f"own, {how}, us"] / kernels[f"decode kernel, {how}, us"]
    display(kernels.round(2))
    beside_guess("gain of the decode kernel, 64 x 4096, graph", float(kernels["gain, graph"].iloc[-1]))
    beside_guess("gain of the decode kernel, 1 x 2048, one by one", float(kernels["gain, one by one"].iloc[0]))

# %% [markdown]
# In a graph the kernel gains more the longer the caches are, because then attention is a larger part of the step: 1.08 times
# with one sequence of 2048 tokens, 1.22 with 32,768, and 1.77 with 64 sequences of 4096 (an H200). Launched one by one, the
# step is as fast as the CPU launches its kernels. The differences that you see there are the CPU's: they do not follow the
# length of the cache.

# %% [markdown]
# ### Question 4.5: Explain the fusion {points}
#
# With numbers from your tables and the timeline:
# 1. On the timeline of the decode step: what takes more time, the matrix products or all the rest? What is the rest?
# 2. GELU by hand against fused: which speed-up did `fusion_speedup` promise, which did you get, and why do they differ?
# 3. `torch.compile` of the whole layer: which operators disappeared, and which did not?
# 4. Fusion and CUDA graphs both make decode faster. Which cost does each one remove? Which of them reduces the bytes?
# 5. For the prefill of 8192 tokens a CUDA graph gains nothing at batch 8, and a part of the time at batch 1 (the table above).
#    Explain both with the model of Question 4.4.

# %% [markdown]
# {hint idea}
# Two costs: bytes between operators, and launches. For each question, say which of them you talk about.
#
# {hint plan}
# 1: the table below the timeline has the names. 2: put the two speed-ups side by side. 3: compare the two counts, and
# ask which operators are calls of a library. 4: what does a graph do to the bytes? 5: compare time ÷ kernels with the
# launch time.
#
# {hint line}
# A graph runs exactly the same kernels.

# %% [markdown] nbgrader={"grade_id": "q4_5", "grade": true, "solution": true, "points": 5}
# 1. At batch 1 the matrix products are short (GEMVs), and there are seven of them. The rest is some dozens of small
#    elementwise operators: four norms (each a chain of cast, square, mean, rsqrt, products), rotary embedding, the cache
#    update, the residual additions. On a GPU the timeline is mostly gaps between short kernels.
# 2. The chain of nine operators (five with one input, four with two, `x * x` counted as two) moves (2 · 5 + 3 · 4) / 2 = 11
#    times the bytes of the fused one. (With `x * x` read once it is 10.5, as in the picture; with `x ** 3` there are eight
#    operators and the factor is 9.) Measured is less on a CPU: tanh costs arithmetic that fusion does not remove, parts of the intermediate tensors stay in cache,
#    and a fused kernel does not reach the full bandwidth. On a large GPU tensor it comes close.
# 3. The elementwise ones disappeared: norms, rotary embedding, GELU, the product with the gate, the residuals; they are a
#    few generated kernels now. The matrix products and the attention stay, because they call a library kernel each.
# 4. Fusion removes the traffic between operators and also their launches. A graph removes the launch cost only: the same
#    kernels run and move the same bytes. So only fusion reduces bytes.
# 5. At batch 8 the kernels are longer than a launch (7.7 ms / 90 kernels = 85 µs). Eager time is t_launch + n · t_kernel,
#    exactly that of the graph: the CPU is ahead, and launches hide behind running kernels. At batch 1 a kernel takes 13 µs
#    on average (1.1 ms / 85), and a launch with its Python about 17 µs (the decode step: 1.6 ms / 93): the launches set the
#    pace, and the graph takes them away.
#
# === BEGIN MARK SCHEME ===
# 1 point for each of the five; numbers from the student's run in at least two, otherwise take off one.
# 1: names norms / rotary / elementwise chains as the rest and refers to the timeline.
# 2: promised against measured figure, and one valid reason (compute of tanh, cache, launch overhead, bandwidth).
# 3: elementwise fused; GEMMs and attention remain as library calls.
# 4: fusion: memory traffic (and launches); graphs: launches only.
# 5: batch 8: kernel time above launch time, so launches are hidden; batch 1: the other way round. Refers to
#    max(launch, kernel).
# === END MARK SCHEME ===

# %% [markdown]
# # Part 5: Flash attention
#
# Attention is three lines:
#
# $$S = \frac{QK^\top}{\sqrt{D}}, \qquad P = \text{softmax}(S), \qquad O = PV.$$
#
# $Q$, $K$, $V$ and $O$ grow with the length $L$ of the text. The scores $S$ and the probabilities $P$ grow with its
# **square**. Twice the text, four times the scores. That is where long contexts go to die.

# %% [markdown]
# ### Question 5.1: Standard attention, until it hurts {points}
#
# 1. `standard_attention`: the three lines, for `q`, `k`, `v` of shape (B, H, L, D). Not causal. You may use `@` and
#    `torch.softmax`, but not `scaled_dot_product_attention`.
# 2. `score_bytes`: the bytes of **one** matrix of scores, for all heads and batches.
# 3. `longest_length`: the largest length $L$ for which scores and probabilities, both alive at once, fit into
#    `memory_bytes`. Ignore all else.

# %% [markdown]
# {hint idea}
# Three lines: scores, softmax over the keys, weighted sum of the values.
#
# {hint plan}
# Product of `q` with the transposed last two dimensions of `k`, divided by a root; softmax over the last dimension;
# product with `v`. For the length: two matrices of $L^2$ scores for each head and sequence fit into the memory; solve
# for $L$.
#
# {hint line}
# The root is of the head dimension, which is the last one. And a length is an integer that fits: look at `math.isqrt`.

# %% nbgrader={"grade_id": "q5_1", "solution": true}
def standard_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v for (B, H, L, D), with the whole score matrix in memory."""
    ### BEGIN SOLUTION
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ v
    ### END SOLUTION


def score_bytes(batch: int, heads: int, length: int, dtype: torch.dtype) -> int:
    """Bytes of the attention scores (B, H, L, L)."""
    ### BEGIN SOLUTION
    return batch * heads * length * length * dtype.itemsize
    ### END SOLUTION


def longest_length(memory_bytes: int, batch: int, heads: int, dtype: torch.dtype) -> int:
    """Largest L for which scores and probabilities (B, H, L, L) fit into memory_bytes together."""
    ### BEGIN SOLUTION
    return math.isqrt(memory_bytes // (2 * batch * heads * dtype.itemsize))
    ### END SOLUTION


# %% nbgrader={"grade_id": "q5_1_tests", "grade": true, "points": 2}
check_standard(standard_attention).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.standard_attention(standard_attention).raise_if_wrong()
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "q5_1_memory_tests", "grade": true, "points": 2}
check_score_memory(score_bytes, longest_length).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.attention_memory(score_bytes, longest_length).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Double the length until the *prediction* says stop. Never let the machine say it: on a GPU that is an out-of-memory
# error, on a laptop it is a frozen screen. The next cells may use 1 GB (on a GPU, 40% of what is free).
#
# **Before you run.** At which length does that budget end, and at which the whole memory of your machine?

# %%
guesses["longest text in the budget"] = None  # tokens
guesses["longest text in the whole memory"] = None

# %%
flash_batch, flash_heads, flash_dim = (1, 16, 128) if on_gpu else (1, 4, 64)
memory_budget = 0.4 * torch.cuda.mem_get_info()[0] if on_gpu else 1e9  # bytes that the next cells may use
whole_memory = torch.cuda.mem_get_info()[1] if on_gpu else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
print(f"batch {flash_batch}, {flash_heads} heads of {flash_dim}, {dtype_name}, at most {memory_budget / 1e9:.1f} GB")

# %%
tokens = 1024 if on_gpu else 256
while 3 * score_bytes(flash_batch, flash_heads, tokens, dtype) <= memory_budget:  # S, S / sqrt(D) and P
    q, k, v = (torch.randn(flash_batch, flash_heads, tokens, flash_dim, device=device, dtype=dtype) for _ in range(3))
    _, added_gb = benchmark_memory(standard_attention, q, k, v, n_warmup=1, n_repeat=1)  # above what was there
    one_mb = score_bytes(flash_batch, flash_heads, tokens, dtype) / 1e6
    print(f"{tokens:6} tokens: one score matrix {one_mb:9.1f} MB, the call needs {1e3 * added_gb:9.1f} MB", flush=True)
    tokens *= 2
one_gb = score_bytes(flash_batch, flash_heads, tokens, dtype) / 1e9
print(f"{tokens:6} tokens: over the budget, one score matrix alone would take {one_gb:.2f} GB")
for gigabytes in (8, 80, 141):
    longest = longest_length(int(gigabytes * 1e9), flash_batch, flash_heads, dtype)
    print(f"a memory of {gigabytes:3} GB ends at {longest:,} tokens")
beside_guess("longest text in the budget", longest_length(int(memory_budget), flash_batch, flash_heads, dtype))
beside_guess("longest text in the whole memory", longest_length(int(whole_memory), flash_batch, flash_heads, dtype))

# %% [markdown]
# ### Question 5.2: Flash attention, with the right layout {points}
#
# PyTorch's `F.scaled_dot_product_attention` (SDPA) computes the same attention in one fused kernel, where one exists for
# the machine. Its inputs are laid out as **(B, H, S, D)**. A projection produces (B, S, H, D). Both have four dimensions,
# so a mistake raises no error. It computes attention over *heads* instead of tokens, very fast, and very wrong.
#
# (In a shape, S is the length of the sequence, as in PyTorch's documentation; as a matrix, $S$ is the scores.)
#
# Write `attention_bshd`: causal attention for `q` (B, S, H, D) and `k`, `v` (B, S, Hkv, D), by one call of SDPA, which leaves no
# product and no exponential to you; the result is (B, S, H, D). `Hkv` may be smaller than `H` (GQA): `enable_gqa=True` lets SDPA
# share the heads.

# %% [markdown]
# {hint idea}
# SDPA takes the last two dimensions as tokens and head dimension. Which ones are they in your inputs?
#
# {hint plan}
# Exchange two dimensions of all three inputs, call SDPA with the mask and the grouped heads, and exchange the same
# dimensions of the result.
#
# {hint line}
# The result has to be turned back, and causal is not the default.

# %% nbgrader={"grade_id": "q5_2", "solution": true}
def attention_bshd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of q (B, S, H, D) over k, v (B, S, Hkv, D); returns (B, S, H, D)."""
    ### BEGIN SOLUTION
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    ### END SOLUTION


# %% nbgrader={"grade_id": "q5_2_tests", "grade": true, "points": 2}
check_layout(attention_bshd).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.attention_bshd(attention_bshd).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 5.3: Online softmax, and flash attention by hand {points}
#
# How can attention do without the score matrix? Softmax needs the maximum and the sum of a whole row. Or does it?
#
# Let a row arrive in blocks $x^{(1)}, x^{(2)}, \dots$. Keep two running numbers: the maximum $m$ so far, and the sum
# $\ell = \sum e^{x - m}$ so far. When a new block brings a larger maximum, all old terms of the sum were computed with the
# wrong $m$. But they are all wrong by the *same factor*:
#
# $$m' = \max\big(m, \max x^{(j)}\big), \qquad
# \ell' = \underbrace{e^{\,m - m'}}_{\text{rescale}} \ell + \sum e^{\,x^{(j)} - m'}.$$
#
# Start with $m = -\infty$ and $\ell = 0$. After the last block, $\text{softmax}(x) = e^{x - m} / \ell$. This is **online
# softmax**: one pass, two numbers a row.
#
# Flash attention carries a third along, the output that is not yet divided by $\ell$. It is rescaled by the same factor:
#
# $$O' = e^{\,m - m'}\, O + e^{\,S^{(j)} - m'}\, V^{(j)}, \qquad \text{and at the end } O / \ell.$$
#
# ![Flash attention: a tile of queries stays on chip while tiles of keys and values stream past](assets/flash_attention.svg)
#
# **Before you write.** Take a row with the blocks $[1, 3]$ and $[5]$. What are $m$ and $\ell$ after each block?
#
# 1. `online_softmax_stats` gets an *iterator* over blocks of shape (rows, width); widths may differ. Each block can be
#    looked at once, and there is no going back: keep a few numbers a row, and no block. Return `(m, l)`, each of shape (rows,) and of
#    the blocks' dtype. Values may be as large as 1000, so never compute $e^x$ without subtracting a maximum. Any operator of
#    PyTorch is allowed, on one block at a time.
# 2. `flash_attention_tiled`: attention without a mask, tile by tile. `q` is (B, H, S, D), `k` and `v` are (B, H, L, D);
#    S and L may differ, and neither need be a multiple of its tile. Here `@` is allowed; the library's softmax and
#    logsumexp, under any name, and SDPA are not. Scores exist for one tile of queries and one tile of keys at a time, and are used
#    up before the next tile comes. One pass over the keys is enough; more than two are refused. No tensor that you create may be
#    as large as the scores of one head, S × L; a mask neither. (Tensors as large as `q`, `k` or the output are fine.) Compute in
#    float32 inside, the scores too; the result has the dtype of `q`.

# %% [markdown]
# {hint idea}
# When the maximum grows from $m$ to $m'$, every old term $e^{x-m}$ has to become $e^{x-m'}$. That is one multiplication
# for the whole sum.
#
# {hint plan}
# Keep $m$ and $\ell$, and for flash attention $O$. For each block: new maximum, factor $e^{m-m'}$, old sum times the
# factor plus the new terms, the same for $O$, then remember the new maximum. For flash attention this is the inner loop
# over keys; the outer loop is over tiles of queries, and the division comes after the inner loop.
#
# {hint line}
# $O$ is rescaled by the same factor as $\ell$. The new terms use the *new* maximum, the factor uses old and new. And
# `.float()` comes before the product, not after it.

# %% nbgrader={"grade_id": "q5_3", "solution": true}
def online_softmax_stats(blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum m and sum l of exp(x - m) of each row, from an iterator of (rows, width) blocks."""
    ### BEGIN SOLUTION
    m = l = None
    for block in blocks:
        if m is None:
            m = torch.full_like(block[:, 0], -math.inf)
            l = torch.zeros_like(m)
        new_m = torch.maximum(m, block.amax(dim=1))
        l = l * torch.exp(m - new_m) + torch.exp(block - new_m[:, None]).sum(dim=1)
        m = new_m
    return m, l
    ### END SOLUTION


def flash_attention_tiled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile_q: int = 64, tile_k: int = 64
) -> torch.Tensor:
    """Attention of q (B, H, S, D) over k, v (B, H, L, D), one tile of scores at a time."""
    ### BEGIN SOLUTION
    output = torch.empty_like(q)
    for i in range(0, q.shape[2], tile_q):
        q_tile = q[:, :, i : i + tile_q].float() / math.sqrt(q.shape[-1])
        m = torch.full_like(q_tile[..., :1], -math.inf)
        l = torch.zeros_like(m)
        accumulator = torch.zeros_like(q_tile)
        for j in range(0, k.shape[2], tile_k):
            scores = q_tile @ k[:, :, j : j + tile_k].float().transpose(-2, -1)
            new_m = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
            p = torch.exp(scores - new_m)
            rescale = torch.exp(m - new_m)
            l = l * rescale + p.sum(dim=-1, keepdim=True)
            accumulator = accumulator * rescale + p @ v[:, :, j : j + tile_k].float()
            m = new_m
        output[:, :, i : i + tile_q] = (accumulator / l).to(q.dtype)
    return output
    ### END SOLUTION


# %% nbgrader={"grade_id": "q5_3_tests", "grade": true, "points": 3}
check_online_softmax(online_softmax_stats).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.online_softmax_stats(online_softmax_stats).raise_if_wrong()
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "q5_3_flash_tests", "grade": true, "points": 4}
check_flash(flash_attention_tiled).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.flash_attention_tiled(flash_attention_tiled).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# You have written flash attention. The library's version is the same loop in one kernel: a tile of queries for each
# program, the accumulator in registers, tiles of keys and values in shared memory.
#
# And the row of *Before you write*? After $[1, 3]$: $m = 3$ and $\ell = e^{-2} + 1 = 1.135$. After $[5]$: $m = 5$ and
# $\ell = e^{3-5} \cdot 1.135 + 1 = 1.154$.
#
# Now all three, on the same inputs, in turns: standard attention, your loop in Python, and the library's kernel.
#
# **Before you run.** By what factor will the library's flash kernel be faster than standard attention at the longest
# length, and by what factor smaller? And your own loop, whose every line is still an operator of its own?

# %%
guesses["library: times faster than standard"] = None
guesses["library: times smaller than standard"] = None
guesses["yours: times faster than standard"] = None
guesses["yours: times smaller than standard"] = None

# %%
from torch.nn.attention import SDPBackend, sdpa_kernel


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """SDPA of (B, H, S, D), pinned to the flash kernel: it raises an error instead of running another."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


own_tile = 1024 if on_gpu else 256  # large tiles: each line of the loop is an operator, with its launch


def own_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Your flash attention, with large tiles."""
    return flash_attention_tiled(q, k, v, own_tile, own_tile)


rows = []
for tokens in (1024, 2048, 4096, 8192, 16384) if on_gpu else (256, 512, 1024, 2048, 4096):
    if 3 * flash_batch * flash_heads * tokens**2 * dtype.itemsize > memory_budget:
        print(f"{tokens} tokens are left out: standard attention would need more than {memory_budget / 1e9:.1f} GB")
        break
    print(f"measuring {tokens} tokens ...", flush=True)
    q, k, v = (torch.randn(flash_batch, flash_heads, tokens, flash_dim, device=device, dtype=dtype) for _ in range(3))
    functions = {"standard": standard_attention, "yours": own_flash, "library": flash_attention}
    calls = {name: functools.partial(function, q, k, v) for name, function in functions.items()}
    times = median_times(calls) if on_gpu else median_times(calls, warmup=1, iterations=3)
    row = {"seq_len": tokens}
    for name, call in calls.items():
        row[f"{name}_ms"] = times[name].median_ms
        row[f"{name}_mem_gb"] = benchmark_memory(call, n_warmup=1, n_repeat=1)[1]
    outputs = {name: call() for name, call in calls.items()}
    row["largest difference"] = max((outputs[name] - outputs["standard"]).abs().max().item() for name in outputs)
    rows.append(row)
    del outputs
flash_table = pd.DataFrame(rows)
results["flash_attention"] = flash_table.to_dict("records")
names = tuple(functions)
plot_flash_attn_improvement(
    flash_table, [f"{name}_ms" for name in names], [f"{name}_mem_gb" for name in names], labels=names,
    title="Standard attention, your flash attention, the library's",
)
plt.show()
longest_row = flash_table.iloc[-1]
for name in ("library", "yours"):
    beside_guess(f"{name}: times faster than standard", float(longest_row["standard_ms"] / longest_row[f"{name}_ms"]))
    beside_guess(f"{name}: times smaller than standard", float(longest_row["standard_mem_gb"] / longest_row[f"{name}_mem_gb"]))
display(flash_table.set_index("seq_len").map(lambda x: f"{x:.0f}" if x >= 1000 else f"{x:.4g}"))
if not on_gpu:
    show_recorded("flash_attention")

# %% [markdown]
# Look at the memory of your loop: it grows like the library's, not like the square. And at its time. What it still pays
# for is every line of its own: each reads and writes its tile of scores, where one kernel keeps them in registers. On a GPU
# it is even slower than standard attention: your products are in float32, and tensor cores do not multiply float32.

# %% [markdown]
# ## When is the memory in use?
#
# Nothing here is graded. One number, the highest point, says *how much* memory a call needs. Each allocation and each release
# together say *which line* needs it. The profiler records them with `profile_memory=True`. The next cell draws what each of
# the three calls holds from its start to its end, beyond its inputs.
#
# **Before you run.** How many score matrices does your `standard_attention` hold at its highest point? One, two or three? Look
# at your three lines: a tensor lives as long as a name, or an expression that is under way, refers to it.

# %%
guesses["score matrices at once, standard attention"] = None

# %%
import tempfile


def memory_during(call) -> tuple[list[float], list[float]]:
    """(ms since the start, MB held beyond what was there before) after each allocation and release of one call."""
    call()
    synchronize()
    with torch.profiler.profile(profile_memory=True) as recorded:
        call()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        recorded.export_chrome_trace(f"{folder}/memory.json")
        events = json.loads(Path(folder, "memory.json").read_text())["traceEvents"]
    kind = 1 if on_gpu else 0  # PyTorch's number of the kind of device
    changes = sorted(
        (e["ts"] / 1e3, e["args"]["Bytes"] / 1e6)
        for e in events
        if e["name"] == "[memory]" and e["args"]["Device Type"] == kind
    )
    held, steps = 0.0, [0.0]
    for _, change in changes:
        held += change
        steps.append(held)
    began = changes[0][0] if changes else 0.0
    return [0.0, *(when - began for when, _ in changes)], steps


tokens = 4096 if on_gpu else 1024
q, k, v = (torch.randn(flash_batch, flash_heads, tokens, flash_dim, device=device, dtype=dtype) for _ in range(3))
one_matrix_mb = score_bytes(flash_batch, flash_heads, tokens, dtype) / 1e6
fig, axes = plt.subplots(1, 3, figsize=(10, 3), sharey=True, layout="constrained")
for i, (name, function) in enumerate({"standard": standard_attention, "yours": own_flash, "library": flash_attention}.items()):
    ms, megabytes = memory_during(functools.partial(function, q, k, v))
    axes[i].fill_between(ms, megabytes, step="post", color=series(i).color, alpha=0.3)
    axes[i].step(ms, megabytes, where="post", color=series(i).color)
    axes[i].axhline(one_matrix_mb, color="black", linewidth=1, linestyle="--")
    style_axes(axes[i], x="time in the call (ms)", title=f"{name}: up to {max(megabytes):.0f} MB")
    if name == "standard":
        beside_guess("score matrices at once, standard attention", round(max(megabytes) / one_matrix_mb, 1))
style_axes(axes[0], y="memory held (MB)")
axes[2].annotate("one score matrix", (0, one_matrix_mb), xytext=(4, 3), textcoords="offset points", fontsize=8.5)
plt.show()

# %% [markdown]
# The steps of *standard* are its lines: the product makes a matrix, the division another one, the softmax a third, and Python
# releases a matrix as soon as nothing refers to it any more. *Yours* is a row of small teeth, one for each tile of scores. On a
# GPU the same events can be kept with the Python line of each allocation: `torch.cuda.memory._record_memory_history()` and
# `_dump_snapshot(file)`, to be opened at [pytorch.org/memory_viz](https://pytorch.org/memory_viz). (The leading underscores
# mean that the names may change.)

# %% [markdown]
# ### Question 5.4: Kernels and roofline, before and after {points}
#
# Flash attention does the same FLOPs as standard attention (a few more, for the rescaling). What changes is I/O. For one
# head with $L$ queries and $L$ keys, count two matrix products ($4 L^2 D$ FLOPs) and this traffic:
#
# - **standard**: $Q$, $K$, $V$ read, $O$ written; the scores written by the first product, read and written by the
#   softmax, and read by the second product;
# - **flash**: $Q$, $K$, $V$ read, $O$ written. (Keys and values are read again for each tile of queries, but then they
#   come from the L2 cache.)

# %% [markdown]
# {hint idea}
# Four tensors of $L \times D$ travel in both. Standard attention has the score matrix on top, several times.
#
# {hint plan}
# FLOPs: two products. Bytes: elements of Q, K, V, O; for standard attention the scores, once for each write and each
# read in the list; times the bytes of an element.
#
# {hint line}
# Count the list: written, read, written, read.

# %% nbgrader={"grade_id": "q5_4", "solution": true}
def attention_intensity(length: int, head_dim: int, dtype: torch.dtype, flash: bool) -> float:
    """FLOPs/Byte of one head of attention over length tokens, standard or flash."""
    ### BEGIN SOLUTION
    elements = 4 * length * head_dim + (0 if flash else 4 * length * length)
    return 4 * length * length * head_dim / (elements * dtype.itemsize)
    ### END SOLUTION


# %% nbgrader={"grade_id": "q5_4_tests", "grade": true, "points": 2}
check_attention_intensity(attention_intensity).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.attention_intensity(attention_intensity).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# **Before you run.** What limit does the standard intensity approach for long texts? Does it depend on the length?

# %%
guesses["FLOPs/Byte of standard attention, very long text"] = None

# %%
longest_measured = int(flash_table["seq_len"].iloc[-1])
measured = {}
for name, function in (("standard", standard_attention), ("yours", own_flash), ("library", flash_attention)):
    first_512 = [torch.randn(flash_batch, flash_heads, 512, flash_dim, device=device, dtype=dtype) for _ in range(3)]
    count = kernels_per_step(functools.partial(function, *first_512))
    flops = 4 * flash_batch * flash_heads * longest_measured**2 * flash_dim
    speed = achieved_tflops(flops, flash_table[f"{name}_ms"].iloc[-1])
    # your loop writes its tiles of scores to memory, too: its intensity is that of standard attention
    measured[name] = attention_intensity(longest_measured, flash_dim, dtype, flash=name == "library"), speed
    print(f"{name:9} {count:3} {'kernels' if on_gpu else 'operators'} for 512 tokens")
report_measured("attention_roofline", measured)
beside_guess("FLOPs/Byte of standard attention, very long text", attention_intensity(10**7, flash_dim, dtype, flash=False))
plot_roofline(roofs.name, peak, bandwidth, measured=measured, title=f"Attention over {longest_measured} tokens: before and after")
plt.show()
if not on_gpu:
    plot_recorded("attention_roofline", "Attention over 16384 tokens on an H200 (recorded)")

# %% [markdown]
# ### Question 5.5: Explain flash attention {points}
#
# With numbers from your tables ("flash" is the library's kernel; say where yours differs):
# 1. Memory against length: how does each version grow, and which term is responsible?
# 2. Flash does not do fewer FLOPs. Why is it faster? Use the roofline. (On a CPU the standard point may lie right of the
#    ridge and still be slow. Which of its operators is not in the FLOP count?)
# 3. The intensity of standard attention approaches a limit, however long the text. Which number of the model sets it? Is
#    that limit left or right of the ridge of an H200 in bf16, for D = 128?
# 4. What would go wrong in online softmax without the rescaling factor? When would nobody notice?

# %% [markdown]
# {hint idea}
# FLOPs are the same. What differs is how often the square travels.
#
# {hint plan}
# 1: divide the memory at the last length by that at half of it. 2: put both points on the roofline. 3: let the length
# grow in the formula of 5.4, and see what is left. 4: take the blocks [1, 3] and [5] and leave the factor out.
#
# {hint line}
# A row whose largest value comes first never needs the factor.

# %% [markdown] nbgrader={"grade_id": "q5_5", "grade": true, "solution": true, "points": 4}
# 1. Standard grows with L²: the scores and probabilities, 2·B·H·L²·itemsize bytes; twice the length takes four times the
#    memory. Flash grows with L: only Q, K, V, O and two numbers per row.
# 2. Its traffic is 4·L·D elements instead of 4·L·D + 4·L². The intensity goes from about D/itemsize to L/itemsize, which
#    is right of the ridge, so the limit moves from the memory roof to the compute roof. It also needs one kernel instead
#    of four. On a CPU with a low ridge both lie right of it; there the softmax, which is no product, goes over the L²
#    scores several times in memory, while flash does it on a tile that sits in the cache.
# 3. The head dimension: for long texts 4L²D / (4L²·itemsize) = D / itemsize FLOPs/Byte. L cancels. For D = 128 in bf16 it
#    is 64, left of the ridge of an H200 (206): memory-bound at any length.
# 4. Terms of old blocks would count relative to an old maximum, new ones relative to the new: old terms too heavy by
#    e^(m' − m). Nobody would notice if the maximum of each row lies in its first block.
#
# === BEGIN MARK SCHEME ===
# 1 point for each of the four; numbers from the student's own tables in 1 and 2, otherwise take off half a point each.
# 1: quadratic against linear, names scores/probabilities.
# 2: fewer bytes, higher intensity, crosses the ridge (or comes nearer to it). Not: "fewer FLOPs", not only "fused".
# 3: head dimension (over itemsize), and 64 is left of 206.
# 4: wrong relative weights of blocks; unnoticed if the first block holds the maximum.
# === END MARK SCHEME ===

# %% [markdown]
# ### Bonus Question 5.6: Do not compute what the mask removes {points}
#
# With a causal mask, query $i$ sees keys $0 \dots i$. A tile of scores that lies wholly above the diagonal is computed
# only to be thrown away. Write `flash_attention_causal` for `q`, `k`, `v` of shape (B, H, S, D): as
# `flash_attention_tiled`, with all of its rules, but causal, and tiles without a single visible score are **not computed**, the
# others once. The check counts the multiply-accumulates of your products. Tiles that the diagonal crosses need a mask.

# %% [markdown]
# {hint idea}
# For a tile of queries, from which key on is nothing visible? The last query of the tile decides.
#
# {hint plan}
# Take `flash_attention_tiled` for one length. End the loop over keys after the tile that holds the last query's own
# position. Mask the scores whose key lies after their query before you take the maximum.
#
# {hint line}
# Only tiles on the diagonal need the mask, but a mask on every tile is right as well. A tile that is skipped must not
# be multiplied at all.

# %% nbgrader={"grade_id": "bonus_5_6", "solution": true}
def flash_attention_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile_q: int = 64, tile_k: int = 64
) -> torch.Tensor:
    """Causal attention of (B, H, S, D), one tile of scores at a time, skipping masked tiles."""
    ### BEGIN SOLUTION
    length = q.shape[2]
    positions = torch.arange(length, device=q.device)
    output = torch.empty_like(q)
    for i in range(0, length, tile_q):
        q_tile = q[:, :, i : i + tile_q].float() / math.sqrt(q.shape[-1])
        last_query = min(i + tile_q, length) - 1
        m = torch.full_like(q_tile[..., :1], -math.inf)
        l = torch.zeros_like(m)
        accumulator = torch.zeros_like(q_tile)
        for j in range(0, last_query + 1, tile_k):
            scores = q_tile @ k[:, :, j : j + tile_k].float().transpose(-2, -1)
            hidden_keys = positions[i : i + tile_q, None] < positions[None, j : j + tile_k]
            scores = scores.masked_fill(hidden_keys, -math.inf)
            new_m = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
            p = torch.exp(scores - new_m)
            rescale = torch.exp(m - new_m)
            l = l * rescale + p.sum(dim=-1, keepdim=True)
            accumulator = accumulator * rescale + p @ v[:, :, j : j + tile_k].float()
            m = new_m
        output[:, :, i : i + tile_q] = (accumulator / l).to(q.dtype)
    return output
    ### END SOLUTION


# %% nbgrader={"grade_id": "bonus_5_6_tests", "grade": true, "points": 5}
check_causal(flash_attention_causal).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.flash_attention_causal(flash_attention_causal).raise_if_wrong()
### END HIDDEN TESTS

# %%
causal_calls = {}
causal_tokens = 4096 if on_gpu else 1024
q, k, v = (torch.randn(flash_batch, flash_heads, causal_tokens, flash_dim, device=device, dtype=dtype) for _ in range(3))
causal_tile = 512 if on_gpu else 128
for name, function in (("all tiles", flash_attention_tiled), ("tiles below the diagonal", flash_attention_causal)):
    causal_calls[name] = functools.partial(function, q, k, v, causal_tile, causal_tile)
times = median_times(causal_calls, warmup=1, iterations=5)
tiles = causal_tokens // causal_tile
for name, taken in times.items():
    print(f"{name:26} {plus_minus(taken)} ms")
print(f"{tiles * (tiles + 1) // 2} of {tiles**2} tiles are left")

# %% [markdown]
# ### Bonus Question 5.7: Split the keys, merge the results {points}
#
# In decode there is one query and a long cache. One program that walks along all keys leaves the rest of the GPU idle.
# *Flash decoding* cuts the cache into parts, computes attention over each part at the same time, and merges. Each part
# returns its output $O_p$ (already divided by its own sum) and the logarithm of its sum,
# $L_p = \log \sum_{j \in p} e^{s_j}$. That is enough to get the output over all keys, and its $L$.
#
# Write `merge_attention`: `outputs` (P, ..., D) and `lses` (P, ...) of P parts give `(output, lse)` of shapes (..., D)
# and (...). Scores may be around ±1000. A part may be empty for some queries (all of it masked): its $L_p$ is $-\infty$,
# and whatever its output holds, even NaN, must not count. At least one part is not empty. The library's softmax and
# logsumexp are forbidden under any name; `torch.logaddexp` is allowed.

# %% [markdown]
# {hint idea}
# Each part is already divided by its own sum $e^{L_p}$. To add them up, give each part its weight back.
#
# {hint plan}
# Find the largest $L_p$, take $e^{L_p - \max}$ as weights, add up weights and weighted outputs, divide one by the
# other. The new $L$ is the largest one plus the logarithm of the sum of weights.
#
# {hint line}
# Zero times NaN is NaN: what a part with weight zero holds has to be replaced before it is multiplied.

# %% nbgrader={"grade_id": "bonus_5_7", "solution": true}
def merge_attention(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over P parts of the keys: (P, ..., D), (P, ...) -> (..., D), (...)."""
    ### BEGIN SOLUTION
    largest = lses.amax(dim=0)
    weights = torch.exp(lses - largest)
    total = weights.sum(dim=0)
    outputs = torch.where(weights[..., None] > 0, outputs, 0.0)
    merged = (weights[..., None] * outputs).sum(dim=0) / total[..., None]
    return merged, largest + torch.log(total)
    ### END SOLUTION


# %% nbgrader={"grade_id": "bonus_5_7_tests", "grade": true, "points": 5}
check_merge(merge_attention).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.merge_attention(merge_attention).raise_if_wrong()
### END HIDDEN TESTS

# %%
# One query, a long cache, four parts: attention over each part, merged, against attention over all of it.
q = torch.randn(1, flash_heads, 1, flash_dim, device=device)
k, v = (torch.randn(1, flash_heads, 8192, flash_dim, device=device) for _ in range(2))
part_outputs, part_lses = [], []
for part_k, part_v in zip(k.split(2048, dim=2), v.split(2048, dim=2), strict=True):
    part_scores = q @ part_k.transpose(-2, -1) / math.sqrt(flash_dim)
    part_lses.append(torch.logsumexp(part_scores, dim=-1))
    part_outputs.append(torch.softmax(part_scores, dim=-1) @ part_v)
merged, _ = merge_attention(torch.stack(part_outputs), torch.stack(part_lses))
whole = F.scaled_dot_product_attention(q, k, v)
print(f"four parts of 2048 keys, merged: off by at most {(merged - whole).abs().max().item():.1e}")

# %% [markdown]
# ### Bonus Question 5.8: Flash attention in Triton {points}
#
# Your loop of Question 5.3 pays for every line: each is an operator of its own, with its launch and its trips to memory. Now
# the same loop as **one** kernel, in the language of Question 1.5. One program takes `BLOCK_M` queries of one head and walks
# along the keys in blocks of `BLOCK_N`, each once. Scores, $m$, $\ell$ and the output stay on the chip from the first block to the
# last: a program writes each element once.
#
# The pointers and the loads are there. Fill in the two gaps in the file that the next cell writes:
# 1. In the loop: the scores of the block, and with them $m$, `l` and `accumulator` as in Question 5.3. The product of a tile
#    with a transposed tile is `tl.dot(x, tl.trans(y), input_precision="ieee")`, and both products of a block come from `tl.dot`
#    (with `"ieee"`, as in Question 1.5). In the last block some keys do not exist: their
#    loads gave 0, and a score of 0 is a score like others. `tl.where(condition, a, b)` chooses.
# 2. After the loop: the division, and the store, masked. The result has the dtype of `o_ptr`: `tl.store` converts.
#
# `tl.max(x, 1)` and `tl.sum(x, 1)` go along a row, `tl.maximum(a, b)` takes the larger of two values, and `tl.exp` is the
# exponential. `tl.dot` wants both sides in one dtype: `p.to(v_tile.dtype)`. No mask was asked for.

# %% [markdown]
# {hint idea}
# Read your own inner loop of 5.3 line by line: each line has one line here.
#
# {hint plan}
# Scores: product, times `scale`, minus infinity where the key does not exist. New maximum of each row, weights, the factor for
# what is there already. Then `l` and `accumulator`, each rescaled before the new part is added, and the new maximum is kept.
#
# {hint line}
# `m`, `l` and the factor are vectors of rows, and the accumulator is a matrix: which of them needs `[:, None]`? And every
# product is added to something.

# %% nbgrader={"grade_id": "bonus_5_8", "solution": true}
# %%writefile flash_triton.py
"""Flash attention in Triton: one program computes BLOCK_M rows of the output of one head."""
import torch
import triton
import triton.language as tl


@triton.jit
def flash_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, queries, keys, scale,
    stride_qh, stride_qs, stride_qd, stride_kh, stride_ks, stride_kd,
    stride_vh, stride_vs, stride_vd, stride_oh, stride_os, stride_od,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # the queries that this program owns
    dims = tl.arange(0, D)
    q_tile = tl.load(
        q_ptr + head * stride_qh + rows[:, None] * stride_qs + dims[None, :] * stride_qd,
        mask=rows[:, None] < queries, other=0.0,
    )
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    accumulator = tl.zeros((BLOCK_M, D), tl.float32)
    for start in range(0, keys, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)  # the keys of this block
        k_tile = tl.load(
            k_ptr + head * stride_kh + columns[:, None] * stride_ks + dims[None, :] * stride_kd,
            mask=columns[:, None] < keys, other=0.0,
        )
        v_tile = tl.load(
            v_ptr + head * stride_vh + columns[:, None] * stride_vs + dims[None, :] * stride_vd,
            mask=columns[:, None] < keys, other=0.0,
        )
        ### BEGIN SOLUTION
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        scores = tl.where(columns[None, :] < keys, scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp(scores - new_m[:, None])
        rescale = tl.exp(m - new_m)
        l = l * rescale + tl.sum(p, 1)
        new = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        accumulator = accumulator * rescale[:, None] + new
        m = new_m
        ### END SOLUTION
    ### BEGIN SOLUTION
    o_tile = o_ptr + head * stride_oh + rows[:, None] * stride_os + dims[None, :] * stride_od
    tl.store(o_tile, accumulator / l[:, None], mask=rows[:, None] < queries)
    ### END SOLUTION


def flash(q, k, v, block_m=64, block_n=64):
    """Attention of q (H, S, D) over k, v (H, L, D) without a mask; D is a power of two from 16 up."""
    o = torch.empty_like(q)
    grid = (triton.cdiv(q.shape[1], block_m), q.shape[0])
    flash_kernel[grid](
        q, k, v, o, q.shape[1], k.shape[1], q.shape[2] ** -0.5, *q.stride(), *k.stride(), *v.stride(), *o.stride(),
        D=q.shape[2], BLOCK_M=block_m, BLOCK_N=block_n,
    )
    return o


# %% nbgrader={"grade_id": "bonus_5_8_tests", "grade": true, "points": 5}
check_flash_triton(Path("flash_triton.py").read_text()).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.flash_triton(Path("flash_triton.py").read_text()).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# **Before you run.** On a GPU, at the longest length of Question 5.3: how much of the library's speed will your kernel reach,
# and how many times faster is it than standard attention?

# %%
guesses["your kernel: share of the library's speed"] = None  # 0 to 1
guesses["your kernel: times faster than standard"] = None

# %%
flash_source = Path("flash_triton.py").read_text()
require_answer("flash_kernel", None if "raise NotImplementedError" in flash_source else flash_source, "Bonus 5.8")
triton_table = None
if on_gpu:
    import importlib

    import flash_triton

    importlib.reload(flash_triton)
    rows = []
    for tokens in (1024, 4096, 16384):
        q, k, v = (torch.randn(flash_heads, tokens, flash_dim, device=device, dtype=dtype) for _ in range(3))
        calls = {
            "standard": functools.partial(standard_attention, q[None], k[None], v[None]),
            "your kernel": functools.partial(flash_triton.flash, q, k, v),
            "library": functools.partial(F.scaled_dot_product_attention, q[None], k[None], v[None]),
        }
        apart = (calls["your kernel"]().float() - calls["library"]()[0].float()).abs().max().item()
        assert apart < 0.05, f"at {tokens} tokens your kernel differs from the library by {apart}"
        times = median_times(calls)
        rows.append({"tokens": tokens, **{f"{name}, ms": taken.median_ms for name, taken in times.items()},
                     "your TFLOP/s": achieved_tflops(4 * flash_heads * tokens**2 * flash_dim, times["your kernel"].median_ms)})
    results["flash_triton"] = rows
    triton_table = pd.DataFrame(rows)
else:
    print("No GPU here, so there is nothing to time: the interpreter proves that the kernel is right, not that it is fast.")
    triton_table = recorded_table(RECORDED.with_name("lab1_flash_triton.json"), "flash_triton")
if triton_table is not None:
    display(triton_table.set_index("tokens").round(4))
    longest_row = triton_table.iloc[-1]
    beside_guess("your kernel: share of the library's speed", float(longest_row["library, ms"] / longest_row["your kernel, ms"]))
    beside_guess("your kernel: times faster than standard", float(longest_row["standard, ms"] / longest_row["your kernel, ms"]))

# %% [markdown]
# Recorded on an H200 at 16384 tokens, the model answer is three times as fast as standard attention, and has 0.6 of the speed of
# the library, which is cuDNN there. Blocks of 64 × 64 were the fastest of six sizes tried. Your loop in Python was slower than
# standard attention there, and it was the same algorithm: one kernel makes the difference. What the library has more, copies and
# products that run on their own, is lab 3.

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
    "tables": results,
    "guesses": {what: [guesses.get(what), outcome] for what, outcome in outcomes.items()},  # [yours, measured]
}
saved = output_path("lab1_results.json")
saved.write_text(json.dumps(record, indent=1, default=str))
print(f"saved {', '.join(results) or 'no table'} to {saved}")
made = [what for what in outcomes if guesses.get(what) is not None]
print(f"you made {len(made)} of {len(outcomes)} guesses")
if made:
    display(pd.DataFrame([(what, guesses[what], outcomes[what]) for what in made], columns=["", "you guessed", "measured"]))

# %% [markdown]
# ## What you know now
#
# - A time without a synchronisation and a warm-up is a rumour.
# - FLOPs over bytes tells you what limits a kernel, before you write it.
# - Prefill and decode are the same layer on opposite sides of the ridge.
# - Elementwise operators cost bytes, and small kernels cost launches. Fusion removes both, a CUDA graph the launches.
# - Flash attention does not compute less. It moves less.
#
# Look at the first sentences of this lab again. Can you now compute that hundredth of a percent, and say which part of it
# is memory's and which is the launches'?
