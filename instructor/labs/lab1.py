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
# An H200 can do 989 trillion bf16 operations a second. While it writes a reply to one user, word after word, it does
# less than one percent of that. Nothing is broken. The chip is waiting for memory.
#
# This lab is about that sentence. You will count the operations and the bytes of a computation *before* it runs,
# predict how fast it can be, measure how fast it is, and explain the difference. You start with a matrix product in
# three loops and end with flash attention, written by you.
#
# **After this lab you can**
# 1. measure latency, and compute MACs, FLOPs and I/O of matrix products;
# 2. tell with a roofline model whether an operation is limited by compute or by memory;
# 3. profile code with the PyTorch profiler and read a timeline;
# 4. remove launch overhead with kernel fusion, `torch.compile` and CUDA graphs;
# 5. explain why flash attention is fast and small.
#
# | Part | You will |
# |---|---|
# | 1. Fundamental metrics | write GEMM twice, time it honestly, count its work, and write it once more in Triton |
# | 2. The roofline model | predict the speed of GEMM and GEMV, then measure it on this machine |
# | 3. A Gemma-3 decoder layer | count attention and MLP, compare prefill with decode, build a KV-cache loop |
# | 4. Profiling and kernel fusion | look at a timeline, fuse a GELU, compile it, capture it in a graph |
# | 5. Flash attention | watch standard attention run out of memory, then write online softmax |
#
# The lab gives {points:regular} points, and {points:bonus} bonus points.
#
# {points:table}

# %% [markdown]
# ## How to work
#
# - **Run all cells in order.** Later parts use earlier answers. A cell that needs one tells you which.
# - **Read each question to the end.** Most lost points are a sentence not read.
# - **Predict first.** Cells marked *Before you run* ask for a guess. Say a number, then run. A wrong guess teaches more
#   than a right table.
# - **Think about why.** A number is half an answer. The questions in words ask for the other half.
# - **Try the bonus questions.** They go one step further than the lecture.
#
# Write code where it says `# YOUR CODE HERE` and delete the line `raise NotImplementedError()`. Below each answer is a
# cell of checks. It gives you a first, light test. Grading adds more: other shapes, other dtypes, other tile sizes.
#
# The lab runs with and without a GPU. On a GPU it uses real sizes and 16-bit numbers. On a CPU it uses small sizes and
# 32-bit numbers. The same ideas hold on both, because a CPU has a roof and a memory too. The next cell says which
# machine you have.

# %% nbgrader={"grade_id": "setup", "locked": true}
import functools
import json
import math
import time
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.ticker import LogLocator, NullFormatter

from utils import *
from utils.checking import MATMUL, check, expect_close, expect_number, forbid, require_answer, watch_operations
from utils.machine.device import compile_support, cuda_graph_support
from utils.machine.environment import environment
from utils.files import recorded_table

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


def report_measured(name: str, measured: dict[str, tuple[float, float]]) -> None:
    """Print measured points, {name: (FLOPs/Byte, TFLOP/s)}, with their share of this machine's roof; keep them."""
    results[name] = []
    for operation, (intensity, speed) in measured.items():
        share = speed / roofs.attainable_tflops(intensity, dtype_name)
        print(f"{operation:12} {intensity:8.1f} FLOPs/Byte  {speed * 1e3:12.2f} GFLOP/s  {share:6.1%} of its roof")
        results[name].append({"operation": operation, "FLOPs/Byte": intensity, "TFLOP/s": speed, "share": share})


def show_recorded(table: str) -> None:
    """Show a table of this lab as it was recorded on an H200, and say that it was not measured here."""
    rows = recorded_table(RECORDED, table)
    if rows is not None:
        display(rows.round(4))


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
# loop does **one** MAC on **two numbers**. No operation may touch more than one element of $A$ or $B$.
#
# - `a` has shape (M, K), `b` has shape (K, N). Any shape must work, square or not.
# - The result has shape (M, N), and the dtype and device of `a`.
# - No library product: no `@`, `torch.matmul`, `einsum`, `F.linear`, no NumPy. The check watches what runs, not how it
#   is spelled. You may take values out of a tensor one at a time (`a[i, k].item()`), not as a whole.

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
@check("1.1", "Naive GEMM")
def check_gemm_naive(gemm_naive):
    a = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    b = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    with watch_operations() as watch:
        got = gemm_naive(a, b)
    forbid(watch, MATMUL, hint="write the three loops yourself")
    expect_close(got, torch.tensor([[4.0, 5.0], [10.0, 11.0]]), rtol=1e-6, atol=0, what="gemm_naive(a, b)")


check_gemm_naive(gemm_naive).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.gemm_naive(gemm_naive).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 1.2: Tiled GEMM {points}
#
# The three loops fetch every element of $A$ again for each of the $N$ columns, and every element of $B$ again for each
# of the $M$ rows. That is $2MNK$ loads for $2MNK$ FLOPs: one load a FLOP. No memory in the world is fast enough for
# that.
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
# - Loop over the tiles of $C$, and inside over the steps along $K$.
# - Multiply two tiles from elementwise products and sums. One way: column $k$ of the $A$ tile times row $k$ of the $B$
#   tile, broadcast, is an *outer product*; add up `tile_k` of them. Library products are forbidden as before.
# - Every size must work: matrices that the tiles do not divide, tiles larger than the matrix, tiles that are not
#   square. The tiles at the edge are smaller.
# - No operation may work on more than one tile: its result has at most `tile_m * tile_n * tile_k` elements. Only
#   allocating and returning $C$ is exempt.
# - Same rule as before for shape, dtype and device of the result.

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
            accumulator = torch.zeros(rows.stop - i, cols.stop - j, dtype=a.dtype, device=a.device)
            for k in range(0, k_size, tile_k):
                a_tile = a[rows, k : k + tile_k]
                b_tile = b[k : k + tile_k, cols]
                for step in range(a_tile.shape[1]):
                    accumulator += a_tile[:, step, None] * b_tile[step, None, :]
            c[rows, cols] = accumulator
    return c
    ### END SOLUTION


# %% nbgrader={"grade_id": "q1_2_tests", "grade": true, "points": 7}
@check("1.2", "Tiled GEMM")
def check_gemm_tiled(gemm_tiled):
    a, b = torch.arange(20.0).reshape(4, 5), torch.arange(30.0).reshape(5, 6)
    expected = a @ b
    for tiles in ((2, 3, 5), (3, 4, 2), (64, 64, 64)):
        with watch_operations() as watch:
            got = gemm_tiled(a, b, *tiles)
        forbid(watch, MATMUL, hint="build the product of two tiles from elementwise products and sums")
        expect_close(got, expected, rtol=1e-6, atol=0, what=f"gemm_tiled of (4, 5) @ (5, 6) with tiles {tiles}")


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
# function that waits for the device as an argument. Use `time.perf_counter()`, which counts seconds and never runs
# backwards.

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
@check("1.3", "Timing")
def check_time_calls(time_calls):
    pretend = QueueingDevice()
    times_ms = time_calls(lambda: pretend.launch(work_ms=20), 3, pretend.synchronize)
    assert isinstance(times_ms, list) and len(times_ms) == 3, f"expected a list of 3 times, got {times_ms!r}"
    for got in times_ms:
        assert got >= 19.8, f"each call takes the device 20 ms, and time_calls says {got:.4g} ms"


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
require_answer("time_calls", time_calls, "1.3")
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

fig, ax = plt.subplots(figsize=(8, 3))
ax.plot(times_ms, ".", color="tab:blue", label="one call, waited for")
ax.plot(without_wait_ms, "x", color="tab:orange", markersize=4, label="one call, not waited for")
ax.axhline(harness_ms, color="black", linewidth=1, linestyle="--", label="benchmark_latency")
ax.set(xlabel="call", ylabel="time (ms)", yscale="log", title=f"The same layer, n = {n}, 200 times")
ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
ax.yaxis.set_major_formatter("{x:g}")
ax.yaxis.set_minor_formatter(NullFormatter())
ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
plt.show()

# %% [markdown]
# `benchmark_latency` first calls the function a few times without looking at the clock (*warm-up*), then measures many
# calls. On a GPU it lets the device itself take the time, with events in the queue.
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
# Both functions return three integers: `(macs, flops, bytes)`.

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
@check("1.4", "MACs, FLOPs and bytes")
def check_costs(gemm_macs_flops_bytes, gemv_macs_flops_bytes):
    got = gemm_macs_flops_bytes(2, 4, 3, torch.float32)
    assert len(got) == 3, f"expected (macs, flops, bytes), got {got!r}"
    for value, expected, unit in zip(got, (24, 48, 104), ("MACs", "FLOPs", "bytes"), strict=True):
        expect_number(value, expected, rel=0, unit=unit, what=f"gemm_macs_flops_bytes(2, 4, 3, torch.float32), {unit},")
    expect_number(gemv_macs_flops_bytes(2, 3, torch.float32)[0], 6, rel=0, unit="MACs", what="GEMV of (2, 3)")


check_costs(gemm_macs_flops_bytes, gemv_macs_flops_bytes).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.gemm_and_gemv_costs(gemm_macs_flops_bytes, gemv_macs_flops_bytes).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# **How far are your loops from the library?** The next cell times all three versions and turns latency into speed:
# FLOPs ÷ latency.
#
# **Before you run.** Naive, tiled, library: guess the speed of each in FLOP/s, to the nearest power of ten.

# %%
require_answer("gemm_naive", gemm_naive, "1.1")
require_answer("gemm_tiled", gemm_tiled, "1.2")
require_answer("gemm_macs_flops_bytes", gemm_macs_flops_bytes, "1.4")

naive_size = 24
sizes = [256, 512, 1024] if on_gpu else [64, 128, 256, 512]
print(f"naive at {naive_size}, tiled and torch.matmul at {sizes}, {dtype}")

a = torch.randn(naive_size, naive_size, device=device, dtype=dtype)
naive_ms = benchmark_latency(gemm_naive, a, a, n_warmup=1, n_repeat=3)
naive_flops = gemm_macs_flops_bytes(naive_size, naive_size, naive_size, dtype)[1]
print(f"gemm_naive    n {naive_size:5}  {naive_ms:10.3f} ms  {naive_flops / naive_ms / 1e6:12.6f} GFLOP/s")

tiled_ms, matmul_ms = [], []
for n in sizes:
    a = torch.randn(n, n, device=device, dtype=dtype)
    b = torch.randn(n, n, device=device, dtype=dtype)
    tiled_ms.append(benchmark_latency(gemm_tiled, a, b, 128, 128, 128, n_warmup=1, n_repeat=3))
    matmul_ms.append(benchmark_latency(torch.matmul, a, b))
    flops = gemm_macs_flops_bytes(n, n, n, dtype)[1]
    for name, latency_ms in (("gemm_tiled", tiled_ms[-1]), ("torch.matmul", matmul_ms[-1])):
        print(f"{name:13} n {n:5}  {latency_ms:10.3f} ms  {flops / latency_ms / 1e6:12.6f} GFLOP/s")

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
# **one tile**; the grid starts one program for each tile of $C$, and they all run at the same time. Your two outer
# loops become the grid. The inner loop stays.
#
# There are no slices. A tile is a block of *pointers*: for a matrix with strides $(s_r, s_c)$, element $(r, c)$ lies at
# `pointer + r * s_r + c * s_c`. `rows[:, None] * stride_r + cols[None, :] * stride_c` gives a whole block of addresses
# at once. Blocks have a fixed size, so at the edge some addresses lie outside the matrix. A **mask** says which to leave
# alone: `tl.load(pointers, mask=..., other=0.0)` puts 0 where the mask is false, and `tl.store(pointers, value,
# mask=...)` writes nothing there.
#
# Fill in the two gaps in the file that the next cell writes:
# 1. In the loop: load one tile of A and one of B, masked at **all** edges, and add their product to `accumulator`. Use
#    `tl.dot(x, y, accumulator, input_precision="ieee")`, which multiplies two tiles and adds.
# 2. After the loop: store the accumulator into C, masked. C may be a 16-bit matrix: `tl.store` converts.
#
# Do not assume that matrices are contiguous: use the strides.
#
# On a GPU the file is compiled. Without one it runs in Triton's **interpreter**, block by block on the CPU: slow, but
# the same answer. The checks use the interpreter on every machine.

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
from importlib.util import find_spec

from utils.kernels.interpreter import run_interpreted_source

print("running gemm_triton.py in the interpreter ...", flush=True)


@check("1.5", "GEMM in Triton")
def check_gemm_triton(source):
    if "raise NotImplementedError" in source:
        raise NotImplementedError
    assert find_spec("triton"), "Triton is not installed here (it exists for Linux), so the kernel waits for grading"
    for m, n, k in ((64, 64, 64), (50, 70, 40)):
        a, b = torch.randn(m, k), torch.randn(k, n)
        got = run_interpreted_source(source, "gemm", a, b)
        expect_close(got, a @ b, rtol=1e-3, atol=1e-3, what=f"gemm of ({m}, {k}) @ ({k}, {n})")


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
        for name, function in (("your Triton kernel", gemm_triton.gemm), ("torch.matmul", torch.matmul)):
            latency_ms = benchmark_latency(function, a, a)
            print(f"n {n:5}  {name:18}  {latency_ms:8.3f} ms  {flops / latency_ms / 1e9:7.1f} TFLOP/s")
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
@check("Bonus 1.6", "Tile traffic")
def check_tile_traffic(tiled_gemm_bytes, largest_square_tile):
    whole = tiled_gemm_bytes(6, 10, 4, 6, 10, torch.float32)
    expect_number(whole, (24 + 40 + 60) * 4, rel=0, unit="bytes", what="one tile that holds all of C: everything once")
    expect_number(largest_square_tile(8192, 32, torch.float16), 32, rel=0, what="largest_square_tile(8192, 32, float16)")


check_tile_traffic(tiled_gemm_bytes, largest_square_tile).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.tile_traffic(tiled_gemm_bytes, largest_square_tile).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Look at what the tile buys. The intensity of a tiled GEMM grows with its tile, and at some tile it crosses the ridge
# of an H100 (Part 2 says what that means).

# %%
require_answer("tiled_gemm_bytes", tiled_gemm_bytes, "Bonus 1.6")
tiles = [16, 32, 64, 128, 256, 512, 1024]
n = 8192
intensities = [2 * n**3 / tiled_gemm_bytes(n, n, n, t, t, torch.bfloat16) for t in tiles]
fig, ax = plt.subplots(figsize=(7, 3))
ax.plot(tiles, intensities, "o-", label=f"tiled GEMM, n = {n}, bf16")
ax.axhline(get_ridge_point("H100", "bf16"), color="black", linestyle="--", label="ridge point of an H100, bf16")
ax.set(xscale="log", yscale="log", xlabel="tile size t", ylabel="FLOPs/Byte", title="A larger tile reads less")
ax.set_xticks(tiles, [str(t) for t in tiles])
ax.legend()
plt.show()

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
# Left of it a kernel is **memory-bound**: more compute units would change nothing. Right of it it is **compute-bound**:
# faster memory would change nothing.
#
# ![Anatomy of a roofline: a slope set by bandwidth, a ceiling set by peak compute, and the ridge point between them](assets/roofline_anatomy.svg)

# %% [markdown]
# ### Question 2.1: Arithmetic intensity {points}
#
# Write the intensity of GEMM and of GEMV, in FLOPs/Byte. Write the counts out again instead of calling your functions:
# you will see what cancels, and a slip in Question 1.4 cannot follow you here.

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
@check("2.1", "Arithmetic intensity")
def check_intensity(gemm_intensity, gemv_intensity):
    expect_number(gemm_intensity(1024, 1024, 1024, torch.bfloat16), 341.3, rel=1e-3, unit="FLOPs/Byte",
                  what="intensity of a 1024-cube GEMM in bf16")
    assert 0.4 < gemv_intensity(4096, 4096, torch.float32) < 0.6, "a GEMV in fp32 does about one FLOP for two bytes"


check_intensity(gemm_intensity, gemv_intensity).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.intensities(gemm_intensity, gemv_intensity).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# **Before you run.** Which of the two grows with the matrix? What does halving the bytes of a number do to each?

# %%
require_answer("gemm_intensity", gemm_intensity, "2.1")
require_answer("gemv_intensity", gemv_intensity, "2.1")
rows = []
for n in (64, 256, 1024, 4096):
    row = {"n": n}
    for kind in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        name = str(kind).removeprefix("torch.")
        row[f"gemm {name}"] = gemm_intensity(n, n, n, kind)
        row[f"gemv {name}"] = gemv_intensity(n, n, kind)
    rows.append(row)
pd.DataFrame(rows).set_index("n").sort_index(axis="columns").round(2)

# %% [markdown]
# ### Question 2.2: Ridge point and roof {points}
#
# Write the ridge point and the roof itself. Mind the units: peak in TFLOP/s ($10^{12}$ FLOP/s), bandwidth in TB/s
# ($10^{12}$ byte/s), intensity in FLOPs/Byte.

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
@check("2.2", "Ridge point and roof")
def check_roof(ridge_point, attainable_tflops):
    expect_number(ridge_point(10.0, 0.5), 20.0, rel=1e-6, unit="FLOPs/Byte", what="ridge_point(10 TFLOP/s, 0.5 TB/s)")
    expect_number(attainable_tflops(4.0, 10.0, 0.5), 2.0, rel=1e-6, unit="TFLOP/s", what="attainable, left of the ridge,")


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
require_answer("ridge_point", ridge_point, "2.2")
rows = []
for name, spec in GPU_SPECS.items():
    row = {"GPU": name, "TB/s": spec["memory_bandwidth_tb_s"]}
    for kind in ("fp32", "bf16", "fp8"):
        if spec[f"{kind}_tflops"] is not None:
            yours = ridge_point(spec[f"{kind}_tflops"], spec["memory_bandwidth_tb_s"])
            assert math.isclose(yours, get_ridge_point(name, kind), rel_tol=1e-6), (name, kind, yours)
            row[f"ridge {kind}"] = round(yours, 1)
    rows.append(row)
pd.DataFrame(rows, dtype=object).set_index("GPU").fillna("-")

# %% [markdown]
# Now place GEMM and GEMV under the roof of an A100, as the datasheet draws it.

# %%
require_answer("gemm_intensity", gemm_intensity, "2.1")
require_answer("gemv_intensity", gemv_intensity, "2.1")
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
#    point ($I \ge$ ridge). Derive $I(n)$ on paper first; it is short.

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
@check("2.3", "Achieved speed and the smallest compute-bound GEMM")
def check_achieved(achieved_tflops, smallest_compute_bound_gemm):
    expect_number(achieved_tflops(2 * 1000**3, 10.0), 0.2, rel=1e-6, unit="TFLOP/s", what="2 GFLOPs in 10 ms")
    n = smallest_compute_bound_gemm(40.1, torch.float32)
    assert isinstance(n, int), f"n is an integer; got {n!r}"


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
require_answer("gemm_intensity", gemm_intensity, "2.1")
require_answer("gemv_intensity", gemv_intensity, "2.1")
require_answer("achieved_tflops", achieved_tflops, "2.3")
require_answer("smallest_compute_bound_gemm", smallest_compute_bound_gemm, "2.3")
ridge = roofs.ridge_point(dtype_name)
print(f"{roofs.name} ({roofs.origin}): {peak:.3g} TFLOP/s in {dtype_name}, {bandwidth:.3g} TB/s, ridge {ridge:.1f}")
print(f"smallest compute-bound GEMM: n = {smallest_compute_bound_gemm(ridge, dtype)}\n")

measured = {}
for n in (256, 1024, 8192) if on_gpu else (32, 256, 1536):
    a = torch.randn(n, n, device=device, dtype=dtype)
    latency_ms = benchmark_latency(torch.matmul, a, a, n_warmup=5, n_repeat=20)
    measured[f"gemm {n}"] = gemm_intensity(n, n, n, dtype), achieved_tflops(2 * n**3, latency_ms)
for n in (1024, 16384) if on_gpu else (256, 8192):
    a, x = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, device=device, dtype=dtype)
    latency_ms = benchmark_latency(torch.mv, a, x, n_warmup=5, n_repeat=20)
    measured[f"gemv {n}"] = gemv_intensity(n, n, dtype), achieved_tflops(2 * n**2, latency_ms)
report_measured("roofline", measured)

plot_roofline(roofs.name, peak, bandwidth, measured=measured)
plt.show()

# %% [markdown]
# ### Question 2.4: Explain each gap {points}
#
# The model assumes that bytes travel at full bandwidth, that FLOPs run at peak, and that nothing else takes time. Each
# point that misses its roof breaks one of these. Go through **your** plot:
#
# 1. The smallest GEMM. What takes the time? Name a number from an earlier question that supports you.
# 2. The largest GEMM: which roof limits it, and why does it not touch it? (A CPU's roof was measured with a GEMM. If
#    yours touches it, or lies a little above, say why that is no surprise.)
# 3. The large GEMV: which roof limits it? Would a chip with twice the FLOP/s help?
# 4. The small GEMV: is it nearer to the roof than the large one, or even above it? Which assumption of the model is
#    wrong for it, and what would a second slope on the plot show?
# 5. An LLM at batch 1 is a chain of GEMVs. From this plot, what do you do to make it faster?

# %% [markdown] nbgrader={"grade_id": "q2_4", "grade": true, "solution": true, "points": 5}
# 1. The smallest GEMM has so little work that fixed cost decides: the Python call, PyTorch's dispatch, on a GPU the
#    kernel launch (some microseconds). At n = 32 the arithmetic takes well under a microsecond, and the whole call
#    several. On a GPU there are also too few tiles to fill all SMs. The model has no term for either.
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
# 1: fixed overhead (launch, dispatch) or too little parallelism. Not: "small matrices are slow".
# 2: compute roof, and one honest reason (tile quantisation, clocks or power, prologue, datasheet boost clock); where the
#    roof was measured: that it is a GEMM as well.
# 3: memory roof, and no.
# 4: cache instead of main memory. Full marks also for a GPU where the launch hides it, if the reason is given.
# 5: fewer bytes a FLOP: batching or a smaller dtype. Half a point for "more bandwidth".
# === END MARK SCHEME ===

# %% [markdown]
# # Part 3: Case study, a Gemma-3 decoder layer
#
# Now a real network. Gemma-3-270m is a stack of 18 decoder layers, and each is the same: attention, then an MLP, with
# norms around them.
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
# - **Grouped-query attention (GQA).** There are 4 query heads, but only 1 head of keys and values. All four share it.
# - **Sliding window.** In five of six layers a token attends to the last 512 positions only, itself included. Every
#   sixth layer attends to everything.

# %%
config = GEMMA_CONFIG
for name in (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "sliding_window",
):
    print(f"{name:22} {getattr(config, name)}")
print(f"{'layer_types':22} {' '.join(kind.removesuffix('_attention') for kind in config.layer_types)}")

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
@check("3.1", "Attended pairs")
def check_pairs(attended_pairs):
    # 4 tokens, window 2: the queries see 1, 2, 2 and 2 keys
    expect_number(attended_pairs(4, 4, 2), 7, rel=0, unit="pairs", what="attended_pairs(4, 4, window=2)")
    expect_number(attended_pairs(1, 4), 4, rel=0, unit="pairs", what="attended_pairs(1, 4)")


check_pairs(attended_pairs).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.attended_pairs(attended_pairs).raise_if_wrong()
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "q3_1_cost_tests", "grade": true, "points": 5}
@check("3.1", "Cost of attention")
def check_attention_cost(attention_macs_flops_bytes):
    macs, flops, n_bytes = attention_macs_flops_bytes(1, 1, 1, GEMMA_CONFIG, torch.bfloat16)
    # one token, no other to look at: 1.64 million weights, used once each, and 2 * 4 * 256 MACs more
    expect_number(macs, 1_640_448, rel=0, unit="MACs", what="MACs of a single token")
    assert flops == 2 * macs, "two FLOPs for each MAC"
    assert n_bytes > 2 * 1_638_400, "the weights alone are 1,638,400 numbers of 2 bytes"


check_attention_cost(attention_macs_flops_bytes).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.attention_cost(attention_macs_flops_bytes).raise_if_wrong()
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
@check("3.2", "MLP and norms")
def check_mlp(mlp_macs_flops_bytes, rms_norm_flops_bytes):
    _, flops, n_bytes = mlp_macs_flops_bytes(8 * 2048, GEMMA_CONFIG, torch.bfloat16)
    expect_number(flops / n_bytes, 212.05, rel=1e-4, unit="FLOPs/Byte", what="intensity of the MLP for 8 x 2048 tokens in bf16")
    assert len(rms_norm_flops_bytes(3, 5, torch.float32)) == 2, "expected (flops, bytes)"


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
require_answer("attention_macs_flops_bytes", attention_macs_flops_bytes, "3.1")
require_answer("mlp_macs_flops_bytes", mlp_macs_flops_bytes, "3.2")
rows = []
for phase, batch, query_len, kv_len in (("prefill", 8, 2048, 2048), ("decode", 8, 1, 2048), ("decode", 256, 1, 2048)):
    for block, (_, flops, n_bytes) in {
        "attention, full": attention_macs_flops_bytes(batch, query_len, kv_len, config, torch.bfloat16),
        "attention, sliding": attention_macs_flops_bytes(batch, query_len, kv_len, config, torch.bfloat16, 512),
        "MLP": mlp_macs_flops_bytes(batch * query_len, config, torch.bfloat16),
    }.items():
        rows.append((phase, batch, block, flops / 1e9, n_bytes / 1e6, flops / n_bytes))
table = pd.DataFrame(rows, columns=["phase", "batch", "block", "GFLOPs", "MB", "FLOPs/Byte"])
table["on an H100"] = [
    "compute-bound" if x > get_ridge_point("H100", "bf16") else "memory-bound" for x in table["FLOPs/Byte"]
]
table.round(2)

# %% [markdown]
# Surprised? The three matrix products alone would be compute-bound. It is GELU and the elementwise product, which write
# and read $T \times i$ numbers and compute next to nothing, that pull the MLP below the ridge. Part 4 shows how to get rid of them.

# %% [markdown]
# ### Question 3.3: Ask PyTorch {points}
#
# Never trust a count that nothing has checked. PyTorch counts too: `torch.utils.flop_counter.FlopCounterMode` is a context
# manager that watches the operators that run and adds up the FLOPs of the matrix products; `.get_total_flops()` returns
# the sum. Write `counted_flops`: call `fn(*args)` once under the counter, without printing its table
# (`display=False`).

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
@check("3.3", "PyTorch's FLOP counter")
def check_counted_flops(counted_flops):
    got = counted_flops(torch.matmul, torch.ones(2, 3), torch.ones(3, 4))
    expect_number(got, 48, rel=0, unit="FLOPs", what="counted_flops(torch.matmul, (2, 3), (3, 4))")


check_counted_flops(counted_flops).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.counted_flops(counted_flops).raise_if_wrong()
### END HIDDEN TESTS

# %%
require_answer("attention_macs_flops_bytes", attention_macs_flops_bytes, "3.1")
require_answer("mlp_macs_flops_bytes", mlp_macs_flops_bytes, "3.2")
require_answer("attended_pairs", attended_pairs, "3.1")
require_answer("counted_flops", counted_flops, "3.3")


def prefill_call(batch: int, length: int, layer_idx: int, implementation: str):
    """A function of no arguments that runs the prefill of one layer, without a cache."""
    layer, rotary_emb = build_decoder_layer(config, layer_idx, dtype, device, attn_implementation=implementation)
    hidden_states, position_ids = create_prefill_inputs(batch, length, config.hidden_size, dtype, device)
    embeddings = get_position_embeddings(hidden_states, position_ids, rotary_emb, layer.self_attn.layer_type)
    return lambda: prefill_forward(layer, hidden_states, position_ids, embeddings)


batch, length, full = 2, 640, 5
ours = (
    attention_macs_flops_bytes(batch, length, length, config, dtype)[1]
    + mlp_macs_flops_bytes(batch * length, config, dtype)[1]
)
masked = length**2 - attended_pairs(length, length)
print(f"your count                        {ours:,}")
print(f"your count, masked pairs included {ours + 4 * batch * 4 * 256 * masked:,}")
for implementation in ("eager", "sdpa"):
    try:
        counted = f"{counted_flops(prefill_call(batch, length, full, implementation)):,}"
    except AssertionError as error:  # on a GPU the counter's formula for fused attention knows no GQA
        counted = f"gives up: {error}"
    print(f"PyTorch counts, {implementation:5}             {counted}")

# %% [markdown]
# The second and third line must agree to the last digit. They differ from the first because eager attention computes the
# full square of scores and then masks half of it: PyTorch counts what runs, you counted what is needed. The last line
# shows a limit of the counter. It has no formula for the fused CPU kernel, and counts its products as nothing. Its formula
# for the fused GPU kernels expects as many key-value heads as query heads, and gives up at GQA. A tool that counts is
# still a tool that somebody wrote.

# %% [markdown]
# ### Question 3.4: Prefill, decode and the KV cache {points}
#
# Without a cache, each new token runs the whole sequence through the layer again. With a cache, it runs one token.
#
# **Write the loop.** `decode_with_cache` gets a `prompt` (B, S, hidden) and `new_tokens` (B, T, hidden). It prefills the
# prompt **once**, then decodes the new tokens **one by one** with the cache, and returns their outputs, (B, T, hidden).
# These must equal what a prefill of all S + T tokens gives for the last T. These functions of the course do the work:
#
# - `initialize_kv_cache(layer.config, max_cache_len)`: an empty cache. How many tokens must it hold?
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
@check("3.4", "Decoding with a KV cache")
def check_decode(decode_with_cache):
    layer, rotary_emb = build_decoder_layer(GEMMA_CONFIG, 5, torch.float32, "cpu")
    tokens = torch.randn(2, 12, GEMMA_CONFIG.hidden_size)
    positions = torch.arange(12).repeat(2, 1)
    embeddings = get_position_embeddings(tokens, positions, rotary_emb, layer.self_attn.layer_type)
    everything = prefill_forward(layer, tokens, positions, embeddings)
    got = decode_with_cache(layer, rotary_emb, tokens[:, :8], tokens[:, 8:])
    expect_close(got, everything[:, 8:], rtol=1e-3, atol=1e-4, what="decode_with_cache, 8 + 4 tokens,")


check_decode(decode_with_cache).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.decode_with_cache(decode_with_cache).raise_if_wrong()
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "q3_4_bytes_tests", "grade": true, "points": 2}
@check("3.4", "KV-cache bytes")
def check_kv_cache_bytes(kv_cache_bytes):
    # one token: keys and values of 256 numbers in each of 18 layers
    expect_number(kv_cache_bytes(1, 1, GEMMA_CONFIG, torch.bfloat16), 18_432, rel=0, unit="bytes", what="one token")


check_kv_cache_bytes(kv_cache_bytes).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.kv_cache_bytes(kv_cache_bytes).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# **Before you run.** Decode with a cache does about $1/S$ of the work of a prefill. Will it take $1/S$ of the time? And
# what does a larger batch cost, in each of the three columns?

# %%
def layer_latencies(batch: int, length: int, layer_idx: int = 5) -> dict[str, float]:
    """Latencies in ms of one layer: prefill, one decoded token with the cache, one without."""
    layer, rotary_emb = build_decoder_layer(config, layer_idx, dtype, device)
    kind, hidden = layer.self_attn.layer_type, config.hidden_size
    cache = initialize_kv_cache(layer.config, length + 1)

    x, position_ids = create_prefill_inputs(batch, length, hidden, dtype, device)
    embeddings = get_position_embeddings(x, position_ids, rotary_emb, kind)
    times = {"n_warmup": 2, "n_repeat": 20} if on_gpu else {"n_warmup": 1, "n_repeat": 3}
    row = {"batch": batch, "length": length}
    row["prefill_ms"] = benchmark_latency(prefill_forward, layer, x, position_ids, embeddings, cache, **times)

    x, position_ids, cache_positions = create_decode_inputs_with_cache(batch, length, hidden, dtype, device)
    embeddings = get_position_embeddings(x, position_ids, rotary_emb, kind)
    row["cached_ms"] = benchmark_latency(
        decode_forward, layer, x, position_ids, embeddings, use_kv_cache=True,
        past_key_values=cache, cache_positions=cache_positions, **times,
    )

    x, position_ids, past = create_decode_inputs_without_cache(batch, length, hidden, dtype, device)
    embeddings = get_position_embeddings(torch.cat((past, x), dim=1), position_ids, rotary_emb, kind)
    row["uncached_ms"] = benchmark_latency(
        decode_forward, layer, x, position_ids, embeddings, use_kv_cache=False, prefill_hidden_states=past, **times
    )
    return row


batches, lengths = ((1, 8, 32), (512, 2048, 8192)) if on_gpu else ((1, 4), (128, 512, 1024))
latencies = []
for batch in batches:
    for length in lengths:
        print(f"measuring batch {batch}, {length} tokens ...", flush=True)
        latencies.append(layer_latencies(batch, length))
latencies = pd.DataFrame(latencies)
latencies["cache gains"] = latencies["uncached_ms"] / latencies["cached_ms"]
results["decoder_layer"] = latencies.to_dict("records")
display(latencies.round(3))
if not on_gpu:
    show_recorded("decoder_layer")

# %%
fig, axes = plt.subplots(1, len(batches), figsize=(4 * len(batches), 3.2), sharey=True, layout="constrained")
for ax, batch in zip(axes, batches, strict=True):
    part = latencies[latencies["batch"] == batch]
    for column, label, marker in (
        ("prefill_ms", "prefill", "s"), ("uncached_ms", "decode, no cache", "^"), ("cached_ms", "decode, KV cache", "o")
    ):
        ax.plot(part["length"], part[column], marker=marker, label=label)
    ax.set(xscale="log", yscale="log", xlabel="tokens before this one", title=f"batch {batch}")
    ax.set_xticks(lengths, [str(x) for x in lengths])
    ax.minorticks_off()
axes[0].set_ylabel("latency of one layer (ms)")
axes[0].legend()
plt.show()

# %%
require_answer("kv_cache_bytes", kv_cache_bytes, "3.4")
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
# of another puts every point on the wrong side. The points below are whole layers (attention and MLP), measured in the
# cells above.

# %%
require_answer("attention_macs_flops_bytes", attention_macs_flops_bytes, "3.1")
require_answer("mlp_macs_flops_bytes", mlp_macs_flops_bytes, "3.2")
require_answer("achieved_tflops", achieved_tflops, "2.3")


def layer_flops_bytes(batch: int, query_len: int, kv_len: int) -> tuple[int, int]:
    """FLOPs and I/O (bytes) of one full-attention layer, norms left out."""
    _, attention_flops, attention_bytes = attention_macs_flops_bytes(batch, query_len, kv_len, config, dtype)
    _, mlp_flops, mlp_bytes = mlp_macs_flops_bytes(batch * query_len, config, dtype)
    return attention_flops + mlp_flops, attention_bytes + mlp_bytes


measured = {}
for row in latencies[latencies["length"] == lengths[-1]].to_dict("records"):
    batch, length = int(row["batch"]), int(row["length"])
    for phase, query_len, kv_len, column in (
        ("prefill", length, length, "prefill_ms"), ("decode", 1, length + 1, "cached_ms")
    ):
        flops, n_bytes = layer_flops_bytes(batch, query_len, kv_len)
        measured[f"{phase} B{batch}"] = flops / n_bytes, achieved_tflops(flops, row[column])
report_measured("layer_roofline", measured)
plot_roofline(roofs.name, peak, bandwidth, measured=measured)
plt.show()

# %% [markdown]
# **Explain**, with numbers from your tables:
# 1. Why does prefill lie far right and decode far left, although both run the same layer with the same weights?
# 2. A larger batch moves decode to the right. Which bytes are shared by the batch, and which are not? What does that say
#    about very long contexts?
# 3. Decode with a cache does about $1/S$ of the work of decode without one. Does it gain a factor of $S$ in your table?
#    Why not?
# 4. Five of six layers slide. What does that change for the cache at 32768 tokens, and what for the MLP?
# 5. A colleague says: "Our decode uses 1% of the GPU's FLOP/s, so the kernels must be bad." Answer in two sentences.

# %% [markdown] nbgrader={"grade_id": "q3_5", "grade": true, "solution": true, "points": 5}
# 1. A weight is read once in both cases. Prefill uses it for every one of the B·S tokens, decode for B tokens. So the
#    FLOPs differ by a factor of S while the weight bytes stay the same: about 1 FLOP/Byte per sequence in the batch in
#    bf16 for decode, over a hundred for prefill.
# 2. Shared: the weights. Not shared: each sequence's own KV cache and activations. Batching raises the intensity of the
#    projections and of the MLP, but never that of attention over the cache. With long contexts the cache becomes most of
#    the traffic and batching stops helping.
# 3. Far less. One token leaves hardly any arithmetic, so the time is the weights' trip from memory plus fixed overhead:
#    some twenty operators, each with its dispatch and launch. Those do not shrink with S.
# 4. A sliding layer keeps 512 tokens instead of 32768, 1/64. The whole cache is 15·512 + 3·32768 tokens instead of
#    18·32768, less than a fifth. The MLP does not look at other tokens: nothing changes.
# 5. Decode is memory-bound, so 1% of peak FLOP/s can be 100% of what its roof allows. Compare with the bandwidth: if the
#    bytes per second are near the peak, the kernels are good, and only fewer bytes or a larger batch will help.
#
# === BEGIN MARK SCHEME ===
# 1 point for each of the five. Numbers from the student's own run are needed in at least two; otherwise take off one.
# 1: weight reuse per token, or FLOPs grow with S and weight bytes do not.
# 2: weights shared, KV cache not; long context means cache-dominated, batching saturates.
# 3: no; names weight traffic or per-operator overhead. Half a point for "overhead" alone without saying of what.
# 4: cache of sliding layers capped at the window (a figure for the ratio), MLP unchanged.
# 5: share of the roof or of the bandwidth is what counts, not the share of peak FLOP/s.
# === END MARK SCHEME ===

# %% [markdown]
# ### Bonus Question 3.6: The floor under decode {points}
#
# A memory-bound step cannot be faster than its bytes. Each decode step of the model reads all weights of its 18 layers,
# and the whole KV cache of each sequence. Weights and cache may be stored in different formats (fp8 weights, bf16
# cache, ...), so their bytes per number are arguments: `weight_bytes`, `cache_bytes`. A layer's weights are four
# attention projections and three MLP matrices. Leave out norms, embeddings and activations.
#
# 1. `decode_floor_ms`: the least time of one decode step of the whole model, in ms, with `length` tokens in each cache.
#    Sliding layers read at most their window.
# 2. `break_even_batch`: the smallest batch at which the cache traffic is at least as large as the weight traffic. From
#    there on, quantising the weights gains less than quantising the cache.

# %% nbgrader={"grade_id": "bonus_3_6", "solution": true}
def decode_floor_ms(
    batch: int, length: int, config, bandwidth_tb_s: float, weight_bytes: float = 2, cache_bytes: float = 2
) -> float:
    """Least time in ms of one decode step of the whole model, from its memory traffic."""
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
@check("Bonus 3.6", "The floor under decode")
def check_floor(decode_floor_ms, break_even_batch):
    short = decode_floor_ms(1, 1, GEMMA_CONFIG, 1.0)
    # 100 million weights of 2 bytes at 1 TB/s
    expect_number(short, 0.2006, rel=1e-3, unit="ms", what="one token in the cache, 1 TB/s")
    assert isinstance(break_even_batch(1000, GEMMA_CONFIG), int), "a batch is an integer"


check_floor(decode_floor_ms, break_even_batch).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.decode_floor(decode_floor_ms, break_even_batch).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# # Part 4: Profiling and kernel fusion
#
# A roofline tells you *that* time is lost. A profiler tells you *where*. Between two kernels lies more than you think:
# Python, PyTorch's dispatcher, the driver, the launch itself. Each kernel costs about 5 to 10 µs of CPU time before it
# may start, whatever it computes. One token in one Gemma-3 layer reads 11 MB of weights. An H200 does that in 2.3 µs,
# less than the time to launch *one* kernel. And the layer launches dozens.

# %% [markdown]
# ### Question 4.1: Profile and export a trace {points}
#
# `torch.profiler.profile` records every operator on the CPU and every kernel on the GPU. A **schedule** tells it when:
# the course's `default_schedule` waits 1 step, warms up for 3, and records 6. So you call the function 10 times and say
# `prof.step()` after each call.
#
# Write `profile_steps`:
# - profile `fn()` with the CPU activity, and the CUDA activity where `torch.cuda.is_available()`;
# - use `schedule=default_schedule`, so that exactly the 6 active steps are recorded;
# - write a Chrome trace to `trace_path`, with `prof.export_chrome_trace`, after the `with` block;
# - return the profiler.
#
# On a CPU, PyTorch 2.13 prints two lines that begin with `USDT:` whenever a profile starts and stops. They are its own, and
# mean nothing to you.

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
            prof.step()
    prof.export_chrome_trace(str(trace_path))
    return prof
    ### END SOLUTION


# %% nbgrader={"grade_id": "q4_1_tests", "grade": true, "points": 3}
@check("4.1", "Profile and trace")
def check_profile(profile_steps):
    x = torch.randn(100)
    prof = profile_steps(lambda: torch.erf(x), "check_trace.json")
    assert isinstance(prof, torch.profiler.profile), f"return the profiler; got {type(prof).__name__}"
    events = json.loads(Path("check_trace.json").read_text())["traceEvents"]
    recorded = sum(event.get("name") == "aten::erf" for event in events)
    assert recorded == 6, f"the trace should hold 6 calls of erf, one an active step, and holds {recorded}"


check_profile(profile_steps).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.profile_steps(profile_steps).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Profile a decode step, and look at it. The timeline below is drawn from the file that you exported. To walk through
# it, open [ui.perfetto.dev](https://ui.perfetto.dev) (or `chrome://tracing`) and drop `decode_trace.json` on it.
#
# **Before you run.** How many operators does one token need in one layer? 10, 100, 1000?

# %%
def decode_step(batch: int, length: int, layer_idx: int = 5):
    """A function of no arguments that decodes one token with the cache."""
    layer, rotary_emb = build_decoder_layer(config, layer_idx, dtype, device)
    kind = layer.self_attn.layer_type
    cache = initialize_kv_cache(layer.config, length + 1)
    x, position_ids = create_prefill_inputs(batch, length, config.hidden_size, dtype, device)
    prefill_forward(layer, x, position_ids, get_position_embeddings(x, position_ids, rotary_emb, kind), cache)
    x, position_ids, positions = create_decode_inputs_with_cache(batch, length, config.hidden_size, dtype, device)
    embeddings = get_position_embeddings(x, position_ids, rotary_emb, kind)
    return lambda: decode_forward(
        layer, x, position_ids, embeddings, use_kv_cache=True, past_key_values=cache, cache_positions=positions
    )


# %%
require_answer("profile_steps", profile_steps, "4.1")
step = decode_step(batch=1, length=512)
prof = profile_steps(step, "decode_trace.json")
counts = count_cuda_kernels(prof)
print(f"{'kernels' if on_gpu else 'operators'} a step:", counts)
print(f"latency of a step: {benchmark_latency(step, n_repeat=20):.3f} ms")
last_step = [event for event in read_trace("decode_trace.json") if event.name.startswith("ProfilerStep#")][-1]
plot_timeline("decode_trace.json", window_ms=(last_step.start_us / 1e3, last_step.end_us / 1e3))
plt.show()

# %% [markdown]
# ### Question 4.2: GELU, operator by operator {points}
#
# Gemma's activation is the tanh form of GELU:
#
# $$\text{GELU}(x) = \tfrac{1}{2}\,x\left(1 + \tanh\!\left(\sqrt{2/\pi}\,\left(x + 0.044715\,x^3\right)\right)\right).$$
#
# Each `+`, `*` and `tanh` you write is one operator: it reads its whole input from memory and writes its whole output.
# A **fused** kernel reads $x$ once, keeps everything in between in registers, and writes once.
#
# ![Kernel fusion: a chain of kernels with memory traffic between them becomes one kernel](assets/kernel_fusion.svg)
#
# 1. `gelu_by_hand`: the formula from elementwise operators. Not `F.gelu`, not `torch.nn.GELU`, not `torch.compile`.
#    Same shape and dtype as `x`; `x` itself must not change.
# 2. `elementwise_bytes`: the bytes that a chain of elementwise operators moves. `one_input` of them read one tensor,
#    `two_inputs` read two, and each writes one. All tensors have `numel` elements.
# 3. `fusion_speedup`: how many times faster the fused kernel is than this chain, if memory traffic is all that matters.

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
@check("4.2", "GELU by hand")
def check_gelu(gelu_by_hand):
    x = torch.linspace(-4, 4, 9)
    expect_close(gelu_by_hand(x), F.gelu(x, approximate="tanh"), rtol=1e-4, atol=1e-6, what="gelu_by_hand(x)")


check_gelu(gelu_by_hand).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.gelu_by_hand(gelu_by_hand).raise_if_wrong()
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "q4_2_bytes_tests", "grade": true, "points": 2}
@check("4.2", "Bytes of fusion")
def check_fusion(elementwise_bytes, fusion_speedup):
    # exp(x) + y on 100 numbers in fp32: exp reads 1 and writes 1, + reads 2 and writes 1
    expect_number(elementwise_bytes(100, torch.float32, 1, 1), 2000, rel=0, unit="bytes", what="exp(x) + y")
    expect_number(fusion_speedup(1, 0), 1.0, rel=1e-6, what="the speed-up of fusing one operator with nothing")


check_fusion(elementwise_bytes, fusion_speedup).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.fusion_bytes(elementwise_bytes, fusion_speedup).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 4.3: Let the compiler fuse {points}
#
# `torch.compile` records the operators of a function and generates one kernel for as many of them as it can. You judge it
# by counting. Write `kernels_per_step`: the number of kernels (on a GPU) or leaf operators (on a CPU) that one call of
# `fn()` runs. Profile it with a `schedule`, as in Question 4.1, and let `count_cuda_kernels(prof)` count: its `total` is
# per step.

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
            prof.step()
    return count_cuda_kernels(prof)["total"]
    ### END SOLUTION


# %% nbgrader={"grade_id": "q4_3_tests", "grade": true, "points": 2}
@check("4.3", "Kernels per step")
def check_kernels(kernels_per_step):
    x = torch.randn(100, device=device)
    expect_number(kernels_per_step(lambda: torch.sin(x).exp().cos()), 3, rel=0, what="kernels of sin, exp, cos")


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
require_answer("gelu_by_hand", gelu_by_hand, "4.2")
require_answer("kernels_per_step", kernels_per_step, "4.3")
numel = 2**26 if on_gpu else 2**22
x = torch.randn(numel, device=device, dtype=dtype)
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

rows = []
for name, way in ways.items():
    print(f"measuring {name} ...", flush=True)
    latency_ms = benchmark_latency(way, x, n_warmup=3, n_repeat=20)
    count = kernels_per_step(lambda way=way: way(x))
    rows.append((name, count, latency_ms, 2 * x.nbytes / latency_ms / 1e6))
gelu_table = pd.DataFrame(rows, columns=["GELU", "kernels" if on_gpu else "operators", "ms", "GB/s if fused"])
gelu_table["speed-up"] = gelu_table["ms"][0] / gelu_table["ms"]
results["gelu"] = gelu_table.to_dict("records")
display(gelu_table.set_index("GELU").round(2))
if not on_gpu:
    show_recorded("gelu")

# %%
require_answer("kernels_per_step", kernels_per_step, "4.3")
compiler = compile_support()
if compiler:
    print("compiling the decoder layer: about 10 s the first time ...", flush=True)
    layer, rotary_emb = build_decoder_layer(config, 5, dtype, device)
    hidden_states, position_ids = create_prefill_inputs(1, 512, config.hidden_size, dtype, device)
    embeddings = get_position_embeddings(hidden_states, position_ids, rotary_emb, layer.self_attn.layer_type)
    compiled = torch.compile(layer, dynamic=False)
    rows = []
    for name, module in (("eager", layer), ("compiled", compiled)):
        with torch.no_grad():
            call = functools.partial(module, hidden_states, position_embeddings=embeddings, position_ids=position_ids)
            rows.append((name, kernels_per_step(call), benchmark_latency(call, n_warmup=3, n_repeat=10)))
    compiled_table = pd.DataFrame(rows, columns=["layer", "kernels" if on_gpu else "operators", "ms"])
    results["compiled_layer"] = compiled_table.to_dict("records")
    display(compiled_table.set_index("layer").round(3))
else:
    print(f"torch.compile cannot run here: {compiler.reason} {compiler.remedy}")

# %% [markdown]
# A note on the zero that a CPU shows for the compiled GELU: the kernel that the compiler generates there is a plain C++
# function, and the profiler counts PyTorch's operators. Zero means that not one of them is left; they are one generated
# loop now. On a GPU a generated kernel is launched like any other, and is counted.

# %% [markdown]
# ### Question 4.4: The launch queue, and CUDA graphs {points}
#
# The CPU puts kernels into a queue, the GPU takes them out. Launching one takes the CPU `launch_us`, running one takes
# the GPU `kernel_us`, and the two work at the same time. For `n` kernels in a row, all alike:
#
# - **Eager.** Launch $i$ ends at $i \cdot t_\text{launch}$, for $i = 1 \dots n$. A kernel starts as soon as it is launched
#   **and** its predecessor is done. Draw it for $t_\text{launch} > t_\text{kernel}$ and for the opposite.
# - **CUDA graph.** The whole sequence was recorded before. One launch of `launch_us`, then all `n` kernels run back to
#   back.
#
# Both functions return the time in µs from the first launch's start to the last kernel's end.

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
@check("4.4", "The launch queue")
def check_launches(eager_time_us, graph_time_us):
    # launches end at 6, 12 and 18 µs; the last kernel runs from 18 to 20
    expect_number(eager_time_us(3, launch_us=6, kernel_us=2), 20, rel=1e-9, unit="µs", what="3 short kernels, eager,")
    assert eager_time_us(1, 6, 2) == graph_time_us(1, 6, 2), "for a single kernel both are the same"


check_launches(eager_time_us, graph_time_us).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.launch_model(eager_time_us, graph_time_us).raise_if_wrong()
### END HIDDEN TESTS

# %%
require_answer("eager_time_us", eager_time_us, "4.4")
require_answer("graph_time_us", graph_time_us, "4.4")
kernel_us = [0.5 * 2**i for i in range(10)]
fig, ax = plt.subplots(figsize=(7, 3))
ax.plot(kernel_us, [eager_time_us(40, 6, t) / graph_time_us(40, 6, t) for t in kernel_us], "o-")
ax.axvline(6, color="black", linestyle="--", linewidth=1)
ax.annotate("launch = kernel", (6, 6), xytext=(4, 0), textcoords="offset points")
ax.set(xscale="log", xlabel="time of one kernel (µs)", ylabel="gain of a graph (×)",
       title="40 kernels, 6 µs a launch: what a CUDA graph is worth")
plt.show()

# %% [markdown]
# Now the real thing. On a GPU the next cell captures a decode step in a graph and replays it. On a machine without one
# there are no launches to save (a CPU operator is a function call), so the cell shows what was recorded on a GPU.
#
# **Before you run.** A decode step of batch 1 took so many kernels (Question 4.1) and so many ms. If every kernel costs
# 6 µs to launch, how much of the step is launching?

# %%
if cuda_graph_support():
    rows = []
    for batch in (1, 32):
        step = decode_step(batch, 512)
        step()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # a capture runs on a stream of its own, so warm up on one
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        rows.append({"batch": batch, "eager_ms": benchmark_latency(step), "graph_ms": benchmark_latency(graph.replay)})
    graphs = pd.DataFrame(rows)
    graphs["gain"] = graphs["eager_ms"] / graphs["graph_ms"]
    results["cuda_graphs"] = graphs.to_dict("records")
    display(graphs.round(4))
else:
    print(f"{cuda_graph_support().reason}")
    show_recorded("cuda_graphs")

# %% [markdown]
# ### Question 4.5: Explain the fusion {points}
#
# With numbers from your tables and the timeline:
# 1. On the timeline of the decode step: what takes more time, the matrix products or all the rest? What is the rest?
# 2. GELU by hand against fused: which speed-up did `fusion_speedup` promise, which did you get, and why do they differ?
# 3. `torch.compile` of the whole layer: which operators disappeared, and which did not?
# 4. Fusion and CUDA graphs both make decode faster. Which cost does each one remove? Which of them reduces the bytes?
# 5. For the prefill of 8192 tokens a CUDA graph gains nothing. Use the model of Question 4.4 to say why.

# %% [markdown] nbgrader={"grade_id": "q4_5", "grade": true, "solution": true, "points": 5}
# 1. At batch 1 the matrix products are short (GEMVs), and there are seven of them. The rest is some dozens of small
#    elementwise operators: four norms (each a chain of cast, square, mean, rsqrt, products), rotary embedding, the cache
#    update, the residual additions. On a GPU the timeline is mostly gaps between short kernels.
# 2. The chain of nine operators (five with one input, four with two) moves (2 · 5 + 3 · 4) / 2 = 11 times the bytes of
#    the fused one. Measured is less on a CPU: tanh costs arithmetic that fusion does not remove, parts of the intermediate tensors stay in cache,
#    and a fused kernel does not reach the full bandwidth. On a large GPU tensor it comes close.
# 3. The elementwise ones disappeared: norms, rotary embedding, GELU, the product with the gate, the residuals; they are a
#    few generated kernels now. The matrix products and the attention stay, because they call a library kernel each.
# 4. Fusion removes the traffic between operators and also their launches. A graph removes the launch cost only: the same
#    kernels run and move the same bytes. So only fusion reduces bytes.
# 5. There the kernels are much longer than a launch. Eager time is t_launch + n · t_kernel, exactly that of the graph:
#    the CPU is ahead, and launches hide behind running kernels.
#
# === BEGIN MARK SCHEME ===
# 1 point for each of the five; numbers from the student's run in at least two, otherwise take off one.
# 1: names norms / rotary / elementwise chains as the rest and refers to the timeline.
# 2: promised against measured figure, and one valid reason (compute of tanh, cache, launch overhead, bandwidth).
# 3: elementwise fused; GEMMs and attention remain as library calls.
# 4: fusion: memory traffic (and launches); graphs: launches only.
# 5: kernel time above launch time, so launches are hidden; refers to max(launch, kernel).
# === END MARK SCHEME ===

# %% [markdown]
# # Part 5: Flash attention
#
# Attention is three lines:
#
# $$S = \frac{QK^\top}{\sqrt{D}}, \qquad P = \text{softmax}(S), \qquad O = PV.$$
#
# $Q$, $K$, $V$ and $O$ grow with the length of the text. $S$ and $P$ grow with its **square**. Twice the text, four times
# the scores. That is where long contexts go to die.

# %% [markdown]
# ### Question 5.1: Standard attention, until it hurts {points}
#
# 1. `standard_attention`: the three lines, for `q`, `k`, `v` of shape (B, H, S, D). Not causal. You may use `@` and
#    `torch.softmax`, but not `scaled_dot_product_attention`.
# 2. `score_bytes`: the bytes of **one** matrix of scores, for all heads and batches.
# 3. `longest_length`: the largest length $S$ for which `S` and `P`, both alive at once, fit into `memory_bytes`. Ignore
#    all else.

# %% nbgrader={"grade_id": "q5_1", "solution": true}
def standard_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v for (B, H, S, D), with the whole score matrix in memory."""
    ### BEGIN SOLUTION
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ v
    ### END SOLUTION


def score_bytes(batch: int, heads: int, length: int, dtype: torch.dtype) -> int:
    """Bytes of the attention scores (B, H, S, S)."""
    ### BEGIN SOLUTION
    return batch * heads * length * length * dtype.itemsize
    ### END SOLUTION


def longest_length(memory_bytes: int, batch: int, heads: int, dtype: torch.dtype) -> int:
    """Largest S for which scores and probabilities (B, H, S, S) fit into memory_bytes together."""
    ### BEGIN SOLUTION
    return math.isqrt(memory_bytes // (2 * batch * heads * dtype.itemsize))
    ### END SOLUTION


# %% nbgrader={"grade_id": "q5_1_tests", "grade": true, "points": 2}
@check("5.1", "Standard attention")
def check_standard(standard_attention):
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    expect_close(standard_attention(q, k, v), F.scaled_dot_product_attention(q, k, v), rtol=1e-4, atol=1e-5,
                 what="standard_attention(q, k, v)")


check_standard(standard_attention).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.standard_attention(standard_attention).raise_if_wrong()
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "q5_1_memory_tests", "grade": true, "points": 2}
@check("5.1", "Memory of the scores")
def check_score_memory(score_bytes, longest_length):
    expect_number(score_bytes(2, 4, 1000, torch.bfloat16), 16e6, rel=0, unit="bytes", what="2 texts, 4 heads, 1000 tokens, bf16")
    assert isinstance(longest_length(10**9, 1, 1, torch.float32), int), "a length is an integer"


check_score_memory(score_bytes, longest_length).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.attention_memory(score_bytes, longest_length).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Double the length until the *prediction* says stop. Never let the machine say it: on a GPU that is an out-of-memory
# error, on a laptop it is a frozen screen.
#
# **Before you run.** At which length does your machine give up?

# %%
batch, heads, head_dim = (1, 16, 128) if on_gpu else (1, 4, 64)
memory_budget = 0.4 * torch.cuda.mem_get_info()[0] if on_gpu else 1e9  # bytes that the next cells may use
print(f"batch {batch}, {heads} heads of {head_dim}, {dtype_name}, at most {memory_budget / 1e9:.1f} GB")

# %%
require_answer("standard_attention", standard_attention, "5.1")
require_answer("score_bytes", score_bytes, "5.1")
require_answer("longest_length", longest_length, "5.1")
length = 1024 if on_gpu else 256
while 3 * score_bytes(batch, heads, length, dtype) <= memory_budget:  # S, S / sqrt(D) and P
    q, k, v = (torch.randn(batch, heads, length, head_dim, device=device, dtype=dtype) for _ in range(3))
    _, added_gb = benchmark_memory(standard_attention, q, k, v, n_warmup=1, n_repeat=1)  # above what was there
    one_gb = score_bytes(batch, heads, length, dtype) / 1e9
    print(f"{length:6} tokens: one score matrix {one_gb:8.4f} GB, the call needs {added_gb:8.4f} GB", flush=True)
    length *= 2
one_gb = score_bytes(batch, heads, length, dtype) / 1e9
print(f"{length:6} tokens: stopped, one score matrix alone would take {one_gb:.2f} GB")
for gigabytes in (8, 80, 141):
    print(f"a memory of {gigabytes:3} GB ends at {longest_length(int(gigabytes * 1e9), batch, heads, dtype):,} tokens")

# %% [markdown]
# ### Question 5.2: Flash attention, with the right layout {points}
#
# PyTorch's `F.scaled_dot_product_attention` (SDPA) computes the same attention in one fused kernel, where one exists for
# the machine. Its inputs are laid out as **(B, H, S, D)**. A projection produces (B, S, H, D). Both have four dimensions,
# so a mistake raises no error. It computes attention over *heads* instead of tokens, very fast, and very wrong.
#
# Write `attention_bshd`: causal attention for `q` (B, S, H, D) and `k`, `v` (B, S, Hkv, D), through SDPA; the result is
# (B, S, H, D). `Hkv` may be smaller than `H` (GQA): `enable_gqa=True` lets SDPA share the heads.

# %% nbgrader={"grade_id": "q5_2", "solution": true}
def attention_bshd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of q (B, S, H, D) over k, v (B, S, Hkv, D); returns (B, S, H, D)."""
    ### BEGIN SOLUTION
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    ### END SOLUTION


# %% nbgrader={"grade_id": "q5_2_tests", "grade": true, "points": 2}
@check("5.2", "Attention with (B, S, H, D) inputs")
def check_layout(attention_bshd):
    q, k, v = (torch.randn(2, 7, 3, 8) for _ in range(3))
    got = attention_bshd(q, k, v)
    # The first token sees itself only, so its output is its own value.
    expect_close(got[:, 0], v[:, 0], rtol=1e-5, atol=1e-6, what="the output of the first token")
    assert got.shape == q.shape, f"expected shape {tuple(q.shape)}, got {tuple(got.shape)}"


check_layout(attention_bshd).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.attention_bshd(attention_bshd).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# Standard against flash: same inputs, same layout, same result.
#
# **Before you run.** By what factor will flash be faster at the longest length? And by what factor smaller?

# %%
require_answer("standard_attention", standard_attention, "5.1")
from torch.nn.attention import SDPBackend, sdpa_kernel


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """SDPA of (B, H, S, D), pinned to the flash kernel: it raises an error instead of running another."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


rows = []
for length in (1024, 2048, 4096, 8192, 16384) if on_gpu else (256, 512, 1024, 2048, 4096):
    if 3 * batch * heads * length**2 * dtype.itemsize > memory_budget:
        print(f"{length} tokens are left out: standard attention would need more than {memory_budget / 1e9:.1f} GB")
        break
    print(f"measuring {length} tokens ...", flush=True)
    q, k, v = (torch.randn(batch, heads, length, head_dim, device=device, dtype=dtype) for _ in range(3))
    row = {"seq_len": length}
    for name, function in (("sdpa", standard_attention), ("flash", flash_attention)):
        row[f"{name}_ms"] = benchmark_latency(function, q, k, v, n_warmup=2, n_repeat=10 if on_gpu else 3)
        row[f"{name}_mem_gb"] = benchmark_memory(function, q, k, v, n_warmup=1, n_repeat=1)[1]
    error = (flash_attention(q, k, v) - standard_attention(q, k, v)).abs().max().item()
    row["largest difference"] = error
    rows.append(row)
flash_table = pd.DataFrame(rows)
results["flash_attention"] = flash_table.to_dict("records")
plot_flash_attn_improvement(flash_table, labels=("standard", "flash"), title="Standard and flash attention")
plt.show()
display(flash_table.set_index("seq_len"))
if not on_gpu:
    show_recorded("flash_attention")

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
#    looked at once, and there is no going back. Return `(m, l)`, each of shape (rows,). Values may be as large as 1000,
#    so never compute $e^x$ without subtracting a maximum.
# 2. `flash_attention_tiled`: attention without a mask, tile by tile. `q` is (B, H, S, D), `k` and `v` are (B, H, L, D);
#    S and L may differ, and neither need be a multiple of its tile. Here `@` is allowed, `torch.softmax`, `logsumexp` and
#    SDPA are not. No tensor that you create may be as large as the whole score matrix: scores exist for one tile of
#    queries and one tile of keys at a time. Compute in float32 inside; the result has the dtype of `q`.

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
@check("5.3", "Online softmax")
def check_online_softmax(online_softmax_stats):
    blocks = [torch.tensor([[1.0, 3.0]]), torch.tensor([[5.0]])]
    m, l = online_softmax_stats(iter(blocks))
    expect_close(m, torch.tensor([5.0]), rtol=1e-6, atol=0, what="m of the blocks [1, 3] and [5]")
    expect_close(l, torch.tensor([1.153651]), rtol=1e-5, atol=0, what="l of the blocks [1, 3] and [5]")


check_online_softmax(online_softmax_stats).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.online_softmax_stats(online_softmax_stats).raise_if_wrong()
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "q5_3_flash_tests", "grade": true, "points": 4}
@check("5.3", "Flash attention by hand")
def check_flash(flash_attention_tiled):
    q, k, v = torch.randn(1, 2, 10, 8), torch.randn(1, 2, 14, 8), torch.randn(1, 2, 14, 8)
    expected = F.scaled_dot_product_attention(q, k, v)
    for tiles in ((5, 7), (4, 4), (64, 64)):
        got = flash_attention_tiled(q, k, v, *tiles)
        expect_close(got, expected, rtol=1e-4, atol=1e-5, what=f"flash_attention_tiled with tiles {tiles}")


check_flash(flash_attention_tiled).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.flash_attention_tiled(flash_attention_tiled).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# You have written flash attention. The library's version is the same loop in one kernel: a tile of queries for each
# program, the accumulator in registers, tiles of keys and values in shared memory.

# %% [markdown]
# ### Question 5.4: Kernels and roofline, before and after {points}
#
# Flash attention does the same FLOPs as standard attention (a few more, for the rescaling). What changes is I/O. For one
# head and $S$ queries and keys, count two matrix products ($4 S^2 D$ FLOPs) and this traffic:
#
# - **standard**: $Q$, $K$, $V$ read, $O$ written; the scores written by the first product, read and written by the
#   softmax, and read by the second product;
# - **flash**: $Q$, $K$, $V$ read, $O$ written. (Keys and values are read again for each tile of queries, but then they
#   come from the L2 cache.)

# %% nbgrader={"grade_id": "q5_4", "solution": true}
def attention_intensity(length: int, head_dim: int, dtype: torch.dtype, flash: bool) -> float:
    """FLOPs/Byte of one head of attention over length tokens, standard or flash."""
    ### BEGIN SOLUTION
    elements = 4 * length * head_dim + (0 if flash else 4 * length * length)
    return 4 * length * length * head_dim / (elements * dtype.itemsize)
    ### END SOLUTION


# %% nbgrader={"grade_id": "q5_4_tests", "grade": true, "points": 2}
@check("5.4", "Intensity of attention")
def check_attention_intensity(attention_intensity):
    expect_number(attention_intensity(1000, 50, torch.bfloat16, flash=True), 500.0, rel=1e-6, unit="FLOPs/Byte",
                  what="flash attention, 1000 tokens, D = 50, bf16,")


check_attention_intensity(attention_intensity).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.attention_intensity(attention_intensity).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# **Before you run.** What limit does the standard intensity approach for long texts? Does it depend on $S$?

# %%
require_answer("standard_attention", standard_attention, "5.1")
require_answer("kernels_per_step", kernels_per_step, "4.3")
require_answer("attention_intensity", attention_intensity, "5.4")
require_answer("achieved_tflops", achieved_tflops, "2.3")
length = int(flash_table["seq_len"].iloc[-1])
q, k, v = (torch.randn(batch, heads, length, head_dim, device=device, dtype=dtype) for _ in range(3))
measured = {}
for name, function, column in (("standard", standard_attention, "sdpa_ms"), ("flash", flash_attention, "flash_ms")):
    first_512 = [t[:, :, :512].contiguous() for t in (q, k, v)]
    count = kernels_per_step(functools.partial(function, *first_512))
    flops = 4 * batch * heads * length**2 * head_dim
    speed = achieved_tflops(flops, flash_table[column].iloc[-1])
    measured[name] = attention_intensity(length, head_dim, dtype, flash=name == "flash"), speed
    print(f"{name:9} {count:3} {'kernels' if on_gpu else 'operators'}")
report_measured("attention_roofline", measured)
plot_roofline(roofs.name, peak, bandwidth, measured=measured, title=f"Attention over {length} tokens: before and after")
plt.show()

# %% [markdown]
# ### Question 5.5: Explain flash attention {points}
#
# With numbers from your tables:
# 1. Memory against length: how does each version grow, and which term is responsible?
# 2. Flash does not do fewer FLOPs. Why is it faster? Use the roofline. (On a CPU the standard point may lie right of the
#    ridge and still be slow. Which of its operators is not in the FLOP count?)
# 3. The intensity of standard attention approaches a limit, however long the text. Which number of the model sets it? Is
#    that limit left or right of the ridge of an H200 in bf16, for D = 128?
# 4. What would go wrong in online softmax without the rescaling factor? When would nobody notice?

# %% [markdown] nbgrader={"grade_id": "q5_5", "grade": true, "solution": true, "points": 4}
# 1. Standard grows with S²: the scores and probabilities, 2·B·H·S²·itemsize bytes; twice the length takes four times the
#    memory. Flash grows with S: only Q, K, V, O and two numbers per row.
# 2. Its traffic is 4·S·D elements instead of 4·S·D + 4·S². The intensity goes from about D/itemsize to S/itemsize, which
#    is right of the ridge, so the limit moves from the memory roof to the compute roof. It also needs one kernel instead
#    of four. On a CPU with a low ridge both lie right of it; there the softmax, which is no product, goes over the S²
#    scores several times in memory, while flash does it on a tile that sits in the cache.
# 3. The head dimension: for long texts 4S²D / (4S²·itemsize) = D / itemsize FLOPs/Byte. S cancels. For D = 128 in bf16 it
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
# `flash_attention_tiled`, but causal, and tiles without a single visible score are **not computed**. The check counts the
# FLOPs of your products. Tiles that the diagonal crosses need a mask.

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
@check("Bonus 5.6", "Causal flash attention")
def check_causal(flash_attention_causal):
    q, k, v = (torch.randn(1, 2, 10, 8) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    got = flash_attention_causal(q, k, v, 4, 4)
    expect_close(got, expected, rtol=1e-4, atol=1e-5, what="flash_attention_causal with tiles (4, 4)")


check_causal(flash_attention_causal).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.flash_attention_causal(flash_attention_causal).raise_if_wrong()
### END HIDDEN TESTS

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
# and whatever its output holds, even NaN, must not count. At least one part is not empty. `torch.logsumexp` and
# `torch.softmax` are forbidden.

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
@check("Bonus 5.7", "Merging")
def check_merge(merge_attention):
    scores, v = torch.randn(3, 10), torch.randn(10, 4)
    parts = scores.split(5, dim=1)
    outputs = torch.stack([torch.softmax(part, dim=1) @ v[5 * i : 5 * i + 5] for i, part in enumerate(parts)])
    lses = torch.stack([torch.logsumexp(part, dim=1) for part in parts])
    output, lse = merge_attention(outputs, lses)
    expect_close(output, torch.softmax(scores, dim=1) @ v, rtol=1e-4, atol=1e-5, what="the merged output")
    expect_close(lse, torch.logsumexp(scores, dim=1), rtol=1e-4, atol=1e-5, what="the merged L")


check_merge(merge_attention).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab1 as hidden
hidden.merge_attention(merge_attention).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ## Save your results
#
# The tables of this run, with the machine they were made on. Compare them with those of another machine.

# %%
from utils.files import output_path

machine = environment()
record = {
    "machine": torch.cuda.get_device_name() if on_gpu else roofs.name,
    "commit": machine.get("commit"),
    "environment": machine,
    "tables": results,
}
saved = output_path("lab1_results.json")
saved.write_text(json.dumps(record, indent=1, default=str))
print(f"saved {', '.join(results) or 'no table'} to {saved}")

# %% [markdown]
# ## What you know now
#
# - A time without a synchronisation and a warm-up is a rumour.
# - FLOPs over bytes tells you what limits a kernel, before you write it.
# - Prefill and decode are the same layer on opposite sides of the ridge.
# - Elementwise operators cost bytes, and small kernels cost launches. Fusion removes both.
# - Flash attention does not compute less. It moves less.
#
# Look at the first sentence of this lab again. Can you now compute that one percent?
