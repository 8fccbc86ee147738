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
# ![One token through one layer of Gemma-3 on an H200, on a logarithmic axis: 1,608 µs launched kernel by kernel, 168 µs in a CUDA graph, 158 µs with a better attention kernel, and a floor of 2.4 µs](assets/lab1_decode_step.svg)
#
# An H200 can do 989 trillion bf16 operations a second. While a layer of Gemma-3 adds one word to a long reply, it does
# less than one hundredth of a percent of that. The chip is waiting: for memory, and for the program that feeds it.
# Memory alone would allow three to four hundred times as much. (Long is 8,192 tokens here; the picture shows a token
# after 512.)
#
# In this lab you find out who makes it wait, by formulas, measurements and kernels of your own. You need Python and
# PyTorch tensors, but no GPU.
#
# **Start here.** Run the next two cells. A pretend GPU gets 50 ms of work, and a clock says that it took no time. Add the
# missing line.

# %% nbgrader={"grade_id": "setup", "locked": true}
import functools
import itertools
import math
import time

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F

from utils import *
from utils.labs.lab1 import *  # device, dtype, on_gpu, synchronize, the checks, and what only draws and measures

torch.manual_seed(0)
show_machine()

# %%
def time_work(device) -> float:
    """How many ms do 50 ms of work take?"""
    began = time.perf_counter()
    device.launch(work_ms=50)
    # One line is missing here: the device has a method synchronize(), which waits until its queue is empty.
    return (time.perf_counter() - began) * 1e3


first_try(time_work)

# %% [markdown]
# # Part 1: Fundamental metrics
#
# A neural network is mostly matrix products. We start with one:
#
# $$C_{ij} = \sum_{k=0}^{K-1} A_{ik}\,B_{kj}, \qquad A \in \mathbb{R}^{M\times K},\; B \in \mathbb{R}^{K\times N}.$$
#
# Libraries call it **GEMM**, general matrix-matrix multiplication. When $B$ is a vector ($N = 1$), it is **GEMV**.

# %% [markdown]
# ### Question 1.1: Naive GEMM {points}
#
# Write the formula as three loops: over the rows of $A$, over the columns of $B$, over the sum. Each pass of the inner loop
# does **one** multiply-accumulate on **two numbers**.
#
# `a` has shape (M, K) and `b` has shape (K, N), square or not. The result has shape (M, N), and the dtype and device of `a`.
#
# {counts}
#
# {hint plan} Allocate $C$ with the shape (M, N). For each row and each column: start a sum, run over $k$, take one number
# of $A$ and one of $B$, multiply, add; after the inner loop, write the sum to its place.
# {hint line} Where does the sum start anew? And which of the four shapes in `a.shape` and `b.shape` does each loop need?

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
### TESTS q1_1_tests, 3 points: check_gemm_naive(gemm_naive)

# %% [markdown]
# ## How to work
#
# The rest goes the same way: read, write below `# YOUR CODE HERE`, run the check. A check names the
# mistakes that it knows. Later, your answers also meet other shapes, dtypes and sizes.
#
# - **Run the cells in order**, also after a restart. A cell that needs an answer says which.
# - **Predict first.** Where it says *Before you run*, write your guess into the line `guesses[...] = None`. What was measured
#   is printed beside it, with the score: you against the machine. A wrong guess teaches more than none.
# - What a check counts is folded below its question; hints, too.
#
# The lab has two halves of about five hours: Parts 1 to 3 count and predict, Parts 4 and 5 make things fast. Bonus questions
# take an hour more. On a GPU it uses real sizes and 16-bit numbers, on a CPU small sizes and 32-bit numbers; what
# an H200 did is drawn beside your own.
#
# <details><summary>The points</summary>
#
# The lab gives {points:regular} points, and {points:bonus} bonus points.
#
# {points:table}
# </details>
#
# <details><summary>Two rules for every answer</summary>
#
# The inputs stay as they are: `x *= 2` would change the caller's tensor. And where a question forbids or limits an operator,
# tensors stay in PyTorch, since nobody sees what NumPy does with them; single numbers may leave, as in `a[i, k].item()`. Only
# what runs counts: `np.sqrt(d)` or a comparison with the library under `if DEBUG:` costs nothing.
# </details>

# %% [markdown]
# ## A GPU in ten minutes
#
# ![A GPU: the CPU puts kernels into a queue; the GPU deals their thread blocks to its SMs, which share an L2 cache and the HBM](assets/gpu_in_ten_minutes.svg)
#
# **A kernel** is a function that runs on the GPU, once for each of very many pieces of data. `torch.relu(x)` runs one.
# The CPU **launches** it: it puts the kernel into a queue, called a **stream**, and goes on without waiting. So two
# clocks run: the CPU's, which launches, and the GPU's, which works.
#
# **A streaming multiprocessor (SM)** is the part that computes; an H200 has 132 of them. A kernel is cut into **thread blocks**
# (Triton says *programs*), each is given to one SM, and stays there. **Tensor cores** are the units of an SM that multiply
# small matrices. Nearly all FLOP/s of a modern GPU are theirs.
#
# **Memory** comes in levels. Shared memory belongs to a block, the L2 cache to all SMs. **HBM**, the 141 GB in the GPU's name,
# is the main memory: 4.8 TB/s, which is fast, and still the GPU's narrowest pipe. A kernel reads its inputs from HBM and
# writes its result there. What the next kernel needs makes that trip again.
#
# <details><summary>More words</summary>
#
# When there are more blocks than fit at once, the others wait; one filling of the GPU is a **wave**. A block has up to 1024
# **threads**, and 32 threads that always take the same step together are a **warp**. While one warp waits for memory, the SM
# runs another. How many warps live on an SM, out of the 64 that could, is its **occupancy**. **Registers** belong to a thread.
# Of an SM's 256 KB of memory, up to 228 KB are shared memory and the rest is its L1 cache. The L2 cache has 60 MB.
# [The glossary](docs/glossary.md) has all words of the labs, each with its formula.
#
# A CPU has the same levels with other names: cores for SMs, vector units for tensor cores, L1, L2 and L3 caches, DRAM for
# HBM. It has no launches: an operator is a function call.
# </details>
#
# <details><summary>To read on</summary>
#
# N. Shazeer, [*Fast transformer decoding*](https://arxiv.org/abs/1911.02150) (2019), on decode and memory;
# T. Dao and others, [*FlashAttention*](https://arxiv.org/abs/2205.14135) (2022);
# J. Austin and others, [*How to scale your model*](https://jax-ml.github.io/scaling-book/) (2025), on rooflines at scale;
# NVIDIA's [CUDA C++ programming guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/);
# [Triton's tutorials](https://triton-lang.org/main/getting-started/tutorials/).
# </details>

# %% [markdown]
# ## Tiles
#
# The three loops fetch every element of $A$ again for each of the $N$ columns, and every element of $B$ again for each of the
# $M$ rows: one load a FLOP. No main memory is fast enough for that. To keep its 989 TFLOP/s busy in bf16, an H200 would need
# almost 2,000 TB/s, and has 4.8.
#
# **Tiling** mends it. Cut $C$ into tiles of `tile_m` × `tile_n`. For one tile of $C$, walk along $K$ in steps of `tile_k`: fetch a
# tile of $A$ and a tile of $B$ into fast memory, multiply them, and add the product to an accumulator that never leaves it. An
# element of $A$ is now fetched $N / \text{tile}_n$ times instead of $N$ times.
#
# ![Naive and tiled matrix product: one element of C needs a row of A and a column of B, one tile of C a row of A tiles and a column of B tiles](assets/gemm_tiling.svg)
#
# The tiles sit in registers and shared memory on a GPU, and in caches on a CPU.
#
# ![The memory hierarchy: each level is slower than the one above it, and none is smaller](assets/memory_hierarchy.svg)
#
# A bf16 number has 8 significant bits: beside a large sum, a new product is lost. So tensor cores and libraries read
# narrow numbers, and multiply and add in wide ones.

# %%
full_sum = None  # your line: from which sum on, a power of two, does adding 1 change nothing in bf16?
check_full_sum(full_sum)

# %% [markdown]
# ### Question 1.2: Tiled GEMM {points}
#
# Loop over the tiles of $C$, and over the steps along $K$. Multiply two tiles by elementwise products and sums: column $k$ of
# the $A$ tile times row $k$ of the $B$ tile, broadcast, is an *outer product*; add up `tile_k` of them. Every size works: tiles
# that do not divide the matrix, are larger than it, or are not square.
#
# **Multiply and add in float32**, or wider, whatever the dtype of `a` and `b`, and round once, when a tile of $C$ is done.
#
# One operator may touch the `tile_m * tile_n * tile_k` numbers of one step. Views, copies of a *whole* matrix before the loops,
# and putting $C$ together are free.
#
# {counts}
#
# {hint plan} Two outer loops with steps `tile_m` and `tile_n`. For each tile: an accumulator of the tile's true size, a
# loop over $k$ with step `tile_k`, and inside the sum of outer products of the two pieces. After it, write the
# accumulator to $C$. A slice that runs past the edge is cut by PyTorch itself.
# {hint line} The dtype of the accumulator, which has nothing to do with the dtype of `a`; and that an operation on a bf16
# tile is rounded to bf16 *before* it is added.

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
### TESTS q1_2_tests, 7 points: check_gemm_tiled(gemm_tiled)

# %% [markdown]
# A GPU works **asynchronously**, as the pretend device did: a call puts work into a queue and returns. A clock that stops when
# the call returns has timed the queue. To time the work, wait twice: *before* the clock starts, so that older work is not billed
# to you, and *before* it stops.
#
# ### Question 1.3: Why one timing lies {points}
#
# Write `time_calls`: it calls `fn` `n_calls` times, times **each call on its own**, and returns a list of milliseconds. Its argument
# `synchronize` is the function that waits. `time.perf_counter()` counts seconds and never runs backwards.
#
# {hint plan} For each call: wait, read the clock, call, wait, read the clock, keep the difference in ms: one entry a call.

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
### TESTS q1_3_tests, 2 points: check_time_calls(time_calls)

# %% [markdown]
# Now use it on something real, a small network layer that has never run before, 200 times over.
#
# **Before you run.** It is the same layer with the same input each time. By what factor will the slowest call differ
# from the fastest? Which call will be the slowest?

# %%
guesses["slowest call / fastest call"] = None  # a number
guesses["number of the slowest call"] = None  # 0 to 199
n = 4096 if on_gpu else 384
x = torch.randn(n, n, device=device, dtype=dtype)
layer = torch.nn.Sequential(torch.nn.Linear(n, n), torch.nn.GELU()).to(device=device, dtype=dtype)  # never used before

times_ms = time_calls(lambda: layer(x), 200, synchronize)
without_wait_ms = time_calls(lambda: layer(x), 200, lambda: None)
synchronize()
harness_ms = benchmark_latency(layer, x)

ordered = sorted(times_ms)
print(f"first call                {times_ms[0]:9.4f} ms")
print(f"fastest, median, slowest  {ordered[0]:9.4f}, {ordered[100]:.4f}, {ordered[-1]:.4f} ms")
print(f"mean of all 200           {sum(times_ms) / len(times_ms):9.4f} ms")
print(f"median without waiting    {sorted(without_wait_ms)[100]:9.4f} ms")
print(f"benchmark_latency         {harness_ms:9.4f} ms")
beside_guess("slowest call / fastest call", ordered[-1] / ordered[0])
beside_guess("number of the slowest call", times_ms.index(ordered[-1]))
plot_calls(times_ms, without_wait_ms, harness_ms, f"The same layer, n = {n}, 200 times")

# %% [markdown]
# `benchmark_latency` first calls the function a few times without looking at the clock (*warm-up*), then measures many
# calls, and returns their mean. On a GPU it lets the device itself take the time, with events in the queue. `measure` and
# `compare` keep every sample, and give medians with intervals. From here on the lab compares medians of calls that take
# turns: a disturbance then hits both sides alike.
#
# **Explain** (3 to 6 sentences, with numbers from your run):
# 1. Why is the first call slow, and why is warm-up right for a benchmark?
# 2. Which single number would you report for this layer, and why not the mean of all 200 calls?
# 3. What would the times without waiting have told you on a GPU? If your machine has none, use the pretend device.

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
# - **MACs** (multiply-accumulates): one for each pass of the inner loop of Question 1.1.
# - **FLOPs** (floating-point operations): two for each MAC, a multiplication and an addition. FLOP/s is a speed.
# - **I/O**: the *least* traffic that any program needs. $A$ and $B$ are read once, $C$ is written once. An element has
#   `dtype.itemsize` bytes.
#
# GEMV is $y = Ax$ with $A$ of shape $(M, K)$ and $x$ of length $K$. Both functions return `(macs, flops, bytes)`.
#
# {hint plan} Count the elements of $C$, times $K$. Count the elements of all three matrices, times the bytes of one. GEMV
# is the same with $N = 1$.
# {hint line} The result is written, and that is traffic as well.

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
### TESTS q1_4_tests, 4 points: check_gemm_and_gemv_costs(gemm_macs_flops_bytes, gemv_macs_flops_bytes)

# %% [markdown]
# **How far are your loops from the library?** The next cell times all three versions; speed is FLOPs ÷ latency.
#
# **Before you run.** Naive, tiled, library: guess the speed of each, to the nearest power of ten.

# %%
guesses["GFLOP/s of gemm_naive"] = None
guesses["GFLOP/s of gemm_tiled"] = None
guesses["GFLOP/s of torch.matmul"] = None
matmul_sizes = [256, 512, 1024] if on_gpu else [64, 128, 256, 512]
speed, taken_ms = {}, {}  # the ms of each version at each of its sizes
for name, function, sizes in (
    ("gemm_naive", gemm_naive, [24]),
    ("gemm_tiled", functools.partial(gemm_tiled, tile_m=128, tile_n=128, tile_k=128), matmul_sizes),
    ("torch.matmul", torch.matmul, matmul_sizes),
):
    taken_ms[name] = []
    for n in sizes:
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        taken_ms[name].append(median_times({name: functools.partial(function, a, b)}, warmup=1, iterations=5)[name].median_ms)
        speed[name] = gemm_macs_flops_bytes(n, n, n, dtype)[1] / taken_ms[name][-1] / 1e6
        print(f"{name:13} n {n:5}  {taken_ms[name][-1]:10.3f} ms  {speed[name]:10.4g} GFLOP/s")
    beside_guess(f"GFLOP/s of {name}", speed[name])
plot_gemm_torch_matmul_latency(matmul_sizes, taken_ms["gemm_tiled"], taken_ms["torch.matmul"])
plt.show()

# %% [markdown]
# The naive version spends its time on Python, which asks for one number at a time. The tiled version hands over whole
# tiles and is thousands of times as fast, but each outer product is its own operation: its result goes out to memory, and
# comes back to be added. The library does the same arithmetic in **one** kernel, its sums in registers.

# %% [markdown]
# ## Triton
#
# [Triton](https://triton-lang.org) is a language for GPU kernels inside Python. You write what **one program** does with **one
# tile**. A **grid** of programs, one for each tile of $C$, replaces your two outer loops; the GPU runs as many at once as fit, in
# any order. The inner loop stays.
#
# There are no slices. A tile is a block of *pointers*: for a matrix with strides $(s_r, s_c)$, element $(r, c)$ lies at
# `pointer + r * s_r + c * s_c`, and `rows[:, None] * stride_r + cols[None, :] * stride_c` gives a whole block of addresses at
# once. At the edge some of them lie outside the matrix. A **mask** says which exist: `tl.load(pointers, mask=...,
# other=0.0)` puts 0 where the mask is false, and `tl.store(pointers, value, mask=...)` writes nothing there.
#
# Without a GPU your kernel runs in the course's **simulator**, one program after another on the CPU: slow, but the same answer.

# %% [markdown]
# ### Question 1.5: The same tiles in Triton {points}
#
# Fill in the two gaps in the file that the next cell writes:
# 1. In the loop: load one tile of A and one of B, and nothing that lies outside of the matrices, at **any** edge; add their product
#    to `accumulator`, with `tl.dot(x, y, accumulator, input_precision="ieee")`. (Without `"ieee"` a GPU rounds float32 tiles to ten
#    bits first.)
# 2. After the loop: store the accumulator into C, masked. C may be a 16-bit matrix: `tl.store` converts.
#
# Matrices need not be contiguous: use the strides. A load without `other=` puts NaN outside here, so that you see it.
#
# {hint idea} What was a slice in Question 1.2 is now a block of pointers and a block of booleans of the same shape.
# {hint plan} For A: rows go down (`[:, None]`), ks go across (`[None, :]`), each with its own stride; the mask says which
# rows and which ks exist. For B: ks go down, cols go across. Then one `tl.dot` that adds to the accumulator. For C: rows
# and cols, after the loop.
# {hint line} The mask of a load has two conditions, one for each direction; and the accumulator has to be given to
# `tl.dot`, and its result kept.

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
### TESTS q1_5_tests, 5 points: check_gemm_triton(text_of("gemm_triton.py"))

# %%
if kernels := compiled_file("gemm_triton.py"):
    for n in (1024, 4096):
        a = torch.randn(n, n, device=device, dtype=dtype)
        times = median_times({
            "your Triton kernel": functools.partial(kernels.gemm, a, a), "torch.matmul": functools.partial(torch.matmul, a, a)})
        for name, taken in times.items():
            print(f"n {n:5}  {name:18}  {plus_minus(taken)} ms  {2 * n**3 / taken.median_ms / 1e9:7.1f} TFLOP/s")

# %% [markdown]
# With tiles, the matrices are no longer read once: a row of $A$ tiles is fetched again for every tile column of $C$, and a column of
# $B$ tiles for every tile row.
#
# ### Bonus Question 1.6: How large should a tile be? {points}
#
# Assume that nothing survives in a cache between two tiles of $C$, and that tiles at the edge fetch only what exists.
#
# 1. `tiled_gemm_bytes`: the bytes that such a tiled GEMM moves. $C$ is written once.
# 2. `largest_square_tile`: the largest $t$ for which one fp32 accumulator of $t \times t$, one $A$ tile of $t \times \text{tile}_k$ and
#    one $B$ tile of $\text{tile}_k \times t$ (both of `dtype`) fit into `fast_bytes` bytes of fast memory.
#
# {hint idea} How many tiles of $C$ stand side by side in one row of tiles? Each of them fetches the same rows of $A$.
# {hint plan} Number of tile columns times all of $A$, number of tile rows times all of $B$, once $C$. For the second
# function: write the bytes as a function of $t$, and find the largest $t$ that fits, by a loop or by solving the
# quadratic equation.
# {hint line} A last tile that is not whole is still a tile. And the accumulator is fp32, whatever `dtype` is.

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
### TESTS bonus_1_6_tests, 5 points: check_tile_traffic(tiled_gemm_bytes, largest_square_tile)

# %% [markdown]
# Look at what the tile buys. The intensity of a tiled GEMM grows with its tile, and at some tile it crosses the ridge of an
# H200 (Part 2 says what that means). The dotted line is what the largest tile reaches that fits into the 228 KB of an SM.

# %%
tiles, n = [16, 32, 64, 128, 256, 512, 1024], 8192
largest = largest_square_tile(228 * 1024, 64, torch.bfloat16)
reached = {t: 2 * n**3 / tiled_gemm_bytes(n, n, n, t, t, torch.bfloat16) for t in (*tiles, largest)}
levels = {"ridge point of an H200, bf16": get_ridge_point("H200", "bf16"), f"largest tile in an SM: {largest}": reached[largest]}
plot_lines({f"tiled GEMM, n = {n}, bf16": [reached[t] for t in tiles]}, tiles, "tile size t", "FLOPs/Byte", "A larger tile reads less", levels)

# %% [markdown]
# Read literally, this says that no GEMM can be compute-bound: the tile that reaches the ridge does not fit. Real kernels
# use tiles of about 128 × 256, and reach 80% of the peak all the same. How? The assumption is wrong that nothing survives
# between two tiles. Tiles that run at the same time on different SMs share rows of $A$ and columns of $B$, and these
# come out of the L2 cache. To the main memory, all tiles that run at once are one large tile.

# %% [markdown]
# # Part 2: The roofline model
#
# At best, a kernel does its FLOPs at the chip's *peak* (FLOP/s) and moves its bytes at its *bandwidth* (bytes/s). The two overlap,
# so the slower one decides:
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
# Write the intensity of GEMM and of GEMV, in FLOPs/Byte. Spell the counts out: you see what cancels.
#
# {hint plan} Write the FLOPs above and the bytes below the line, with `dtype.itemsize`. Try it on paper for $M = N = K$.
# {hint line} Three matrices below the line, and FLOPs, not MACs, above it.

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
### TESTS q2_1_tests, 3 points: check_intensities(gemm_intensity, gemv_intensity)

# %% [markdown]
# **Before you run.** Which of the two grows with the matrix? What does halving the bytes of a number do to each?

# %%
guesses["grows with the matrix"] = None  # "gemm", "gemv", "both" or "neither"
guesses["half the bytes multiply the intensity by"] = None
sizes, lines = (64, 256, 1024, 4096), {}
for kind in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
    lines[f"gemm {str(kind)[6:]}"] = [gemm_intensity(n, n, n, kind) for n in sizes]
    lines[f"gemv {str(kind)[6:]}"] = [gemv_intensity(n, n, kind) for n in sizes]
growing = [kind for kind in ("gemm", "gemv") if lines[f"{kind} float32"][-1] > 2 * lines[f"{kind} float32"][0]]
beside_guess("grows with the matrix", " and ".join(growing))
beside_guess("half the bytes multiply the intensity by", lines["gemm bfloat16"][0] / lines["gemm float32"][0])
ridges = {f"ridge of an {name}, bf16": get_ridge_point(name, "bf16") for name in ("H200", "A100")}
plot_lines(lines, sizes, "n", "FLOPs/Byte", "One of the two grows", ridges)

# %% [markdown]
# ### Question 2.2: Ridge point and roof {points}
#
# Write the ridge point and the roof itself. Mind the units: peak in TFLOP/s ($10^{12}$ FLOP/s), bandwidth in TB/s
# ($10^{12}$ byte/s), intensity in FLOPs/Byte.
#
# {hint plan} At the ridge, intensity times bandwidth is the peak: solve for the intensity. The roof at any intensity is one of
# two numbers.
# {hint line} A kernel obeys both limits, so which of the two numbers is it?

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
### TESTS q2_2_tests, 4 points: check_ridge_and_roof(ridge_point, attainable_tflops)

# %% [markdown]
# Compare your ridge with the course's `get_ridge_point`, for every GPU in the table. The numbers are *dense* peaks from the
# datasheets.
#
# **Before you run.** Compute grew faster than bandwidth for ten years. So do ridge points of newer chips lie further
# left or further right? What does that do to a kernel that has not changed?

# %%
guesses["bf16 ridge points from old to new"] = None  # "left", "right" or "both ways"
ridges = {}
for name, spec in GPU_SPECS.items():
    peaks = {kind: spec[f"{kind}_tflops"] for kind in ("fp32", "bf16", "fp8") if spec[f"{kind}_tflops"] is not None}
    ridges[name] = {kind: ridge_point(peak, spec["memory_bandwidth_tb_s"]) for kind, peak in peaks.items()}
    for kind, yours in ridges[name].items():
        assert math.isclose(yours, get_ridge_point(name, kind), rel_tol=1e-6), (name, kind, yours)
by_year = {name: ridges[name]["bf16"] for name in ("A100", "H100", "H200", "B200")}  # of 2020, 2022, 2024 and 2024
grows = [later > earlier for earlier, later in itertools.pairwise(by_year.values())]
beside_guess("bf16 ridge points from old to new", "right" if all(grows) else "both ways" if any(grows) else "left")
print("data-centre GPUs from old to new:", ", ".join(f"{name} {ridge:.0f}" for name, ridge in by_year.items()))
pd.DataFrame(ridges).T.rename_axis("ridge").round(1).astype(object).fillna("-")

# %% [markdown]
# To the right, then back (the H200 is an H100 with faster memory), and to the right again. A kernel that has not changed can
# find itself on the other side of the ridge. **Two lines of yours:** what brings an H200 back to the ridge of an A100, and which
# GEMM stands at that ridge? Change `your_size`, first by trying. (Question 2.3 asks for the formula.)

# %%
your_bandwidth = None  # your line: TB/s with which an H200 would have the ridge of an A100, in bf16
check_bandwidth(your_bandwidth)
your_size = 100  # your line: change it until your point stands at the ridge
spec = GPU_SPECS["A100"]
operations = {f"gemm {n}": gemm_intensity(n, n, n, torch.bfloat16) for n in (128, 4096)}
operations["gemv 4096"] = gemv_intensity(4096, 4096, torch.bfloat16)
operations[f"yours: gemm {your_size}"] = gemm_intensity(your_size, your_size, your_size, torch.bfloat16)
on_the_ridge(operations[f"yours: gemm {your_size}"], ridge_point(spec["bf16_tflops"], spec["memory_bandwidth_tb_s"]))
plot_roofline("A100", spec["bf16_tflops"], spec["memory_bandwidth_tb_s"], operations)
plt.show()

# %% [markdown]
# ### Question 2.3: From milliseconds to the roof {points}
#
# A *measured* point needs the speed that was reached, and sizes worth measuring lie where GEMM changes sides.
#
# 1. `achieved_tflops`: FLOPs and a latency in **ms** give TFLOP/s.
# 2. `smallest_compute_bound_gemm`: the smallest integer $n$ for which an $n \times n \times n$ GEMM reaches the ridge
#    point ($I \ge$ ridge). On paper, $I(n)$ is short.
#
# {hint idea} Put $M = N = K = n$ into the intensity of Question 2.1. It becomes a short formula in $n$.
# {hint plan} Set it equal to the ridge and solve for $n$. For the other function: ms to seconds, then FLOP/s to TFLOP/s.
# {hint line} $n$ is an integer that *reaches* the ridge: which way do you round, and what if it is an integer?

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
### TESTS q2_3_tests, 4 points: check_achieved_and_smallest(achieved_tflops, smallest_compute_bound_gemm)

# %% [markdown]
# Now measure. The roof below is that of this machine. It comes from the datasheet if the course knows the GPU, and is measured otherwise.
# The product of two large matrices gives the ceiling, the copy of a large buffer gives the slope.
#
# **Before you run.** Where will the large GEMM land, in percent of its roof? The small one? The large GEMV, whose
# matrix is far larger than any cache, and the small one, whose matrix fits into a cache?

# %%
guesses["percent of its roof: smallest gemm"] = None
guesses["percent of its roof: largest gemm"] = None
guesses["percent of its roof: small gemv"] = None
guesses["percent of its roof: large gemv"] = None
roofs = this_roof()
ridge = roofs.ridge_point(dtype_name)
peaks = ", ".join(f"{name} {format_rate(peak)}" for name, peak in roofs.tflops.items())
print(f"{roofs.name} ({roofs.origin}): {peaks}, {roofs.memory_bandwidth_tb_s * 1e3:.3g} GB/s, ridge in {dtype_name} {ridge:.1f}")
print(f"smallest compute-bound GEMM: n = {smallest_compute_bound_gemm(ridge, dtype)}\n")

gemm_sizes, gemv_sizes = ((256, 1024, 8192), (1024, 16384)) if on_gpu else ((32, 256, 1536), (256, 8192))
calls, work = {}, {}  # work: (FLOPs/Byte, FLOPs)
for n in gemm_sizes:
    square = torch.randn(n, n, device=device, dtype=dtype)
    calls[f"gemm {n}"] = functools.partial(torch.matmul, square, square)
    work[f"gemm {n}"] = gemm_intensity(n, n, n, dtype), 2 * n**3
for n in gemv_sizes:
    square, vector = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, device=device, dtype=dtype)
    calls[f"gemv {n}"] = functools.partial(torch.mv, square, vector)
    work[f"gemv {n}"] = gemv_intensity(n, n, dtype), 2 * n**2
# One after the other, not in turns: the small GEMV is to find its matrix where its own last call left it.
times = {name: measure(call, queue_ahead=False, device=device, **TIMES) for name, call in calls.items()}
measured = {name: (work[name][0], achieved_tflops(work[name][1], taken.median_ms)) for name, taken in times.items()}
for name, taken in times.items():
    print(f"{name:12} {plus_minus(taken)} ms")
report_measured("roofline", measured)
for place, name in ((0, "smallest gemm"), (2, "largest gemm"), (3, "small gemv"), (4, "large gemv")):
    beside_guess(f"percent of its roof: {name}", 100 * results["roofline"][place]["share"])

# %% [markdown]
# The model assumes that bytes travel at full bandwidth, that FLOPs run at peak, and that the rest is free. Each point
# that misses its roof breaks one of these.
#
# ### Question 2.4: Explain each gap {points}
#
# Go through **your** plot:
#
# 1. The smallest GEMM: what takes the time? Compare it with the time that its FLOPs need at the peak.
# 2. The largest GEMM: which roof limits it, and why does it not touch it? (A CPU's roof was measured with a GEMM.)
# 3. The large GEMV: which roof limits it? Would a chip with twice the FLOP/s help?
# 4. The small GEMV: above its roof, or farther below it than the large one? Which assumption is wrong for it?
# 5. An LLM at batch 1 is a chain of GEMVs. From this plot, what do you do to make it faster?
#
# {hint plan} Take the share of the roof of each point, and one time in µs or ms for the smallest. Say what limits it, and
# what would have to change to make it faster.
# {hint line} The small GEMV runs many times in a row on the same matrix. Where is the matrix at the second run? What does a launch cost?

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
# Gemma-3-270m is a stack of 18 decoder layers. Each is attention, then an MLP, with norms around them.
#
# ![A Gemma-3 decoder layer: norm, attention with four query heads and one key-value head, norm, gated MLP](assets/decoder_layer.svg)
#
# Serving it has two phases.
# - **Prefill** reads the prompt: all $S$ tokens at once.
# - **Decode** writes the answer: one token at a time. Each new token attends to all tokens before it. Their keys and
#   values have been computed already, so they are kept, in the **KV cache**.
#
# ![The KV cache: prefill fills it with one entry per prompt token, each decode step adds one and reads all, or the last ones of a sliding window](assets/kv_cache.svg)
#
# Two details of Gemma-3 matter for the counts:
# - **Grouped-query attention (GQA).** There are 4 query heads, and 1 head of keys and values, which all four share.
# - **Sliding window.** In five of six layers a token attends to the last 512 positions only, itself included. Every
#   sixth layer attends to everything.

# %%
for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window"):
    print(f"{name:22} {getattr(config, name)}")
print(f"{'layer_types':22} {' '.join(kind.removesuffix('_attention') for kind in config.layer_types[:6])}, ... ({config.num_hidden_layers})")

# %% [markdown]
# ## The five operators of attention
#
# Let $h$ be the hidden size, $H$ the query heads, $H_{kv}$ the key-value heads, $D$ the head dimension, and
# $T = \text{batch} \cdot \text{query\_len}$ the number of new tokens. Each operator reads its inputs from memory once, and writes
# its output once:
#
# ![The five operators of an attention block: q_proj, k_proj and v_proj read the hidden states and a weight each; attention reads queries and the cache; o_proj reads the vectors and writes hidden states](assets/lab1_five_operators.svg)
#
# Attention is one operator here: scores stay on the chip. (Part 5 asks what happens if they do not.) It reads the cached keys and
# values that *at least one* query can see. Its MACs are $D$ for the score and $D$ for the value, for each attended pair and each
# **query** head. Norms, rotary embedding and softmax are small, and left out.

# %% [markdown]
# ### Question 3.1: The cost of attention {points}
#
# There are `kv_len` tokens so far, and the last `query_len` of them are the queries. (Prefill: the two are equal. Decode:
# `query_len` is 1.) A query at position $p$ attends to the keys at positions $0 \dots p$ (*causal* attention); with a window of
# $w$ to the last $w$ of these.
#
# 1. `attended_pairs`: the (query, key) pairs of one head of one sequence. `window=None` means no window.
# 2. `attention_macs_flops_bytes`: the cost of the five operators in the picture.
#
# {hint plan} Go through the picture operator by operator and write down the elements that each reads and writes; add
# them, times the bytes of one. For the MACs: tokens times the elements of each weight, and for attention two times $D$
# for each pair, query head and sequence.
# {hint line} The queries are the last positions, so the first of them has `kv_len - query_len` keys before it. And a
# vector that one operator writes and the next reads counts twice. With a window, two neighbouring queries see nearly the
# same keys: draw both, and count the keys that at least one of them sees.

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
### TESTS q3_1_pairs_tests, 3 points: check_attended_pairs(attended_pairs)
### TESTS q3_1_cost_tests, 6 points: check_attention_cost(attention_macs_flops_bytes, lambda *place: attended_pairs(*place))

# %% [markdown]
# ### Question 3.2: The MLP and the norms {points}
#
# Gemma's MLP has a gate: $\text{down}\big(\text{GELU}(\text{gate}(x)) \odot \text{up}(x)\big)$. With $i$ the intermediate size, `gate`
# and `up` map $h \to i$, and `down` maps $i \to h$. Run without fusion it is **five** operators: `gate`, `up`, GELU, the elementwise
# product, `down`. Count as before; MACs and FLOPs of the three matrix products only.
#
# RMSNorm maps each token's vector $x$ of width $n$ to $x_j \cdot r \cdot (1 + g_j)$ with
# $r = 1/\sqrt{\operatorname{mean}(x^2) + \varepsilon}$. It is one fused operator: it reads the tokens and the weight $g$, and writes
# the tokens. Count 4 FLOPs an element. It returns `(flops, bytes)`.
#
# {hint plan} gate and up: tokens in, weight in, wide out, each. GELU: wide in, wide out. Product: two wide in, one out.
# down: wide in, weight in, tokens out. Only three of them are matrix products.
# {hint line} `gate` and `up` each read the tokens. And the weight of the norm is one vector for all tokens.

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
### TESTS q3_2_tests, 4 points: check_mlp_and_norm_costs(mlp_macs_flops_bytes, rms_norm_flops_bytes)

# %% [markdown]
# Put the counts together: where does a layer's work go, and how intense is it?
#
# **Before you run.** Prefill of 8 prompts of 2048 tokens in bf16 is a huge matrix product. Is the MLP compute-bound on
# an H100, whose ridge lies at 295 FLOPs/Byte?

# %%
guesses["MLP in prefill, on an H100"] = None  # "compute-bound" or "memory-bound"
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
# **Your line:** with how many tokens at once does the MLP reach the ridge of an H200?

# %%
your_tokens = 2048  # your line
_, flops, n_bytes = mlp_macs_flops_bytes(your_tokens, config, torch.bfloat16)
on_the_ridge(flops / n_bytes, get_ridge_point("H200", "bf16"))

# %% [markdown]
# ## Ask PyTorch
#
# PyTorch counts, too: `FlopCounterMode` watches the operators that run, and adds up the FLOPs of the matrix products.
#
# **Before you run.** Prefill of 2 texts of 640 tokens. How many times your FLOPs will PyTorch count for eager attention, and for SDPA?

# %%
from torch.utils.flop_counter import FlopCounterMode

guesses["PyTorch's FLOPs over yours, eager"] = None
guesses["PyTorch's FLOPs over yours, sdpa"] = None
counted_batch, counted_length = 2, 640
ours = attention_macs_flops_bytes(counted_batch, counted_length, counted_length, config, dtype)[1]
ours += mlp_macs_flops_bytes(counted_batch * counted_length, config, dtype)[1]
masked = counted_length**2 - attended_pairs(counted_length, counted_length)
print(f"your count                        {ours:,}")
masked_flops = 4 * config.head_dim * config.num_attention_heads * counted_batch * masked  # two products, two FLOPs a MAC
print(f"your count, masked pairs included {ours + masked_flops:,}")
for implementation in ("eager", "sdpa"):
    layer_call = prefill_call(counted_batch, counted_length, implementation)
    try:
        with FlopCounterMode(display=False) as counter:
            layer_call()
    except AssertionError as error:  # an older counter's formula for fused attention on a GPU knows no GQA
        print(f"PyTorch gives up, {implementation}: {error}")
        continue
    print(f"PyTorch counts, {implementation:5}             {counter.get_total_flops():,}")
    beside_guess(f"PyTorch's FLOPs over yours, {implementation}", counter.get_total_flops() / ours)

# %% [markdown]
# The second and third line agree to the last digit. They differ from the first because eager attention computes the full square
# of scores and then masks half of it: PyTorch counts what runs, you counted what is needed. The last line shows a limit of the
# counter. It has no formula for the fused CPU kernel, whose products are nothing to it. For the fused GPU kernels it counts the
# full square, although a causal kernel computes about half of it.

# %% [markdown]
# ### Question 3.3: Prefill, decode and the KV cache {points}
#
# **Write the loop.** `decode_with_cache` gets a `prompt` (B, S, hidden) and `new_tokens` (B, N, hidden). It prefills the prompt
# **once**, then decodes the new tokens **one by one** with the cache, and returns their outputs, (B, N, hidden). They equal the
# last N outputs of a prefill of all S + N tokens. Four functions of the course do the work:
#
# ```python
# cache = initialize_kv_cache(layer.config, max_cache_len)  # for how many tokens?
# embeddings = get_position_embeddings(tokens, position_ids, rotary_emb, layer.self_attn.layer_type)  # ids: (B, tokens)
# prefill_forward(layer, tokens, position_ids, embeddings, cache)
# output = decode_forward(layer, token, position_ids, embeddings, use_kv_cache=True, past_key_values=cache,
#                         cache_positions=positions)  # token: (B, 1, hidden), positions: a tensor of shape (1,)
# ```
#
# **Count the cache.** `kv_cache_bytes` returns the bytes of the keys and values of **all layers** of the model. A sliding layer
# (`config.layer_types` tells which) keeps the last `config.sliding_window` tokens.
#
# {hint idea} Prefill puts keys and values of the prompt at positions $0 \dots S-1$ of the cache. The first new token has
# position $S$, the next $S+1$.
# {hint plan} Make a cache for all tokens, prompt and new ones. Prefill the prompt. Then for each new token: cut it out as
# (B, 1, hidden), make its position, its embeddings, call `decode_forward`, keep the output. At the end, join the outputs.
# For the bytes: add up the tokens that each layer keeps.
# {hint line} Three things know the position of a token: `position_ids`, the rotary embeddings and `cache_positions`. All
# three advance.

# %% nbgrader={"grade_id": "q3_3", "solution": true}
def decode_with_cache(layer, rotary_emb, prompt: torch.Tensor, new_tokens: torch.Tensor) -> torch.Tensor:
    """Prefill prompt (B, S, hidden), then decode new_tokens (B, N, hidden) one by one with a KV cache."""
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
### TESTS q3_3_decode_tests, 5 points: check_decode_with_cache(decode_with_cache)
### TESTS q3_3_bytes_tests, 2 points: check_kv_cache_bytes(kv_cache_bytes)

# %% [markdown]
# **Before you run.** Without a cache, each new token needs a prefill of all $S$ tokens. With it, decode does about $1/S$ of that
# work. How many times as fast will it be? And with a larger batch?

# %%
guesses["gain of the cache, longest text, batch 1"] = None  # uncached time / cached time
guesses["gain of the cache, longest text, largest batch"] = None
batches, lengths = ((1, 8, 32), (512, 2048, 8192)) if on_gpu else ((1, 4), (128, 512, 1024))
latencies = layer_latencies(batches, lengths)
beside_guess("gain of the cache, longest text, batch 1", float(latencies["cache gains"][len(lengths) - 1]))
beside_guess("gain of the cache, longest text, largest batch", float(latencies["cache gains"].iloc[-1]))
latencies.round(3)

# %%
your_users = None  # your line, by kv_cache_bytes: users of 32768 tokens (bf16) in 141 GB beside 0.2 GB of weights
check_users(your_users)

# %% [markdown]
# ## The layer on the roofline
#
# The points below are whole layers (attention and MLP), measured above, under the roof of the dtype that really ran.

# %%
def layer_flops_bytes(batch: int, query_len: int, kv_len: int) -> tuple[int, int]:
    """FLOPs and I/O (bytes) of one full-attention layer, norms left out."""
    _, attention_flops, attention_bytes = attention_macs_flops_bytes(batch, query_len, kv_len, config, dtype)
    _, mlp_flops, mlp_bytes = mlp_macs_flops_bytes(batch * query_len, config, dtype)
    return attention_flops + mlp_flops, attention_bytes + mlp_bytes


measured, length = {}, lengths[-1]
for row in latencies[latencies["length"] == length].to_dict("records"):
    batch = int(row["batch"])
    for phase, query_len, kv_len, ms in (("prefill", length, length, row["prefill_ms"]), ("decode", 1, length + 1, row["cached_ms"])):
        flops, n_bytes = layer_flops_bytes(batch, query_len, kv_len)
        measured[f"{phase} B{batch}"] = flops / n_bytes, achieved_tflops(flops, ms)
report_measured("layer_roofline", measured)

# %% [markdown]
# Look at decode at batch 1 on the H200: it stands far below the slope. It reaches less than one percent of its *memory* roof. A
# third limit is at work, which this picture does not draw: the program that **launches** the kernels.
#
# ![Three roofs over one decode step: compute allows 0.013 µs, memory 2.4 µs, and launching ninety kernels one by one takes 1,608 µs; the largest decides](assets/lab1_three_roofs.svg)
#
# $$t \;\ge\; \max\left(\frac{\text{FLOPs}}{\text{peak}},\; \frac{\text{bytes}}{\text{bandwidth}},\; \text{kernels} \cdot t_\text{launch}\right).$$

# %% [markdown]
# ### Question 3.4: Two phases, two roofs {points}
#
# **Explain**, with numbers from your tables:
# 1. Why does prefill lie far right and decode far left?
# 2. A larger batch moves decode to the right. Which bytes does it share, which not? And long contexts?
# 3. Decode with a cache does $1/S$ of the work of decode without one. Is it $S$ times as fast in your table? Why not?
# 4. Five of six layers slide. What does that change for the cache at 32768 tokens, and for the MLP?
# 5. "Our decode uses 0.01% of the FLOP/s, so the kernels are bad." Which two numbers do you look at first, and what do they say
#    about the H200 at batch 1?
#
# {hint plan} 1 and 2: which bytes are the weights', which are the cache's? 3: compare the time of a cached step with its
# bytes over the bandwidth. 4: count tokens in 15 sliding and 3 full layers. 5: there are two more roofs than the one that
# the colleague looks at.
# {hint line} The same weights are read for one token or for thousands. What does that do to FLOPs per byte?

# %% [markdown] nbgrader={"grade_id": "q3_4", "grade": true, "solution": true, "points": 5}
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
# ### Bonus Question 3.5: The floor under decode {points}
#
# A step cannot be faster than its bytes: all weights of the 18 layers (four attention projections and three MLP matrices each),
# and the whole KV cache of each sequence. Both may be stored in formats of their own (fp8 weights, bf16 cache), so their bytes per
# number are arguments. Norms, embeddings and activations do not count.
#
# 1. `decode_floor_ms`: the least time of one decode step, in ms, with `length` tokens in each cache. Sliding layers read their
#    window.
# 2. `break_even_batch`: the smallest batch at which the cache traffic is at least as large as the weight traffic. From there on,
#    quantising the weights gains less than quantising the cache.
#
# {hint plan} Weights: four projections and three MLP matrices, times the number of layers. Cache: two (keys and values),
# times the tokens that each layer keeps, times the width of the key-value heads. Each part with its own bytes per number.
# The break-even batch is where the second part reaches the first.
# {hint line} TB/s is $10^{12}$ bytes a second and the answer is in ms. And a batch is an integer: at which of the two
# neighbours is the cache the larger part?

# %% nbgrader={"grade_id": "bonus_3_5", "solution": true}
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
### TESTS bonus_3_5_tests, 5 points: check_decode_floor(decode_floor_ms, break_even_batch)

# %% [markdown]
# To choose a word, each step also multiplies its last hidden state by the output head: one row of 640 numbers for each
# of the 262,144 words that Gemma-3 knows. That is 63% of the weights that a step reads. On an H200, at batch 1 and 512
# tokens, your floor of 0.044 ms for the layers becomes 0.114 ms.

# %% [markdown]
# # Half time
#
# Your counts give the lowest line of a scoreboard, the floor: the bytes of one layer's decode step, over the bandwidth of an
# H200. No program can be faster.

# %%
step_bytes = attention_macs_flops_bytes(1, 1, 513, config, torch.bfloat16)[2] + mlp_macs_flops_bytes(1, config, torch.bfloat16)[2]
scoreboard(memory=step_bytes / 4.8e12 * 1e6)

# %% [markdown]
# The recorded step takes several hundred times your floor. It waits for launches. The second half takes them away, and then
# makes the longest kernel of all small. A good place to stop for a week.
#
# # Part 4: Profiling and kernel fusion
#
# A roofline tells you *that* time is lost. A profiler tells you *where*. Between two kernels lie Python, PyTorch's dispatcher,
# the driver, the launch itself. Each kernel costs about 5 to 20 µs of CPU time before it may start, Python
# included. One token in one Gemma-3 layer reads 11 MB of weights. An H200 does that in 2.3 µs, less than the time to launch *one*
# kernel. And the layer launches dozens.

# %% [markdown]
# ### Question 4.1: Profile and export a trace {points}
#
# [`torch.profiler.profile`](https://docs.pytorch.org/docs/stable/profiler.html) records every operator on the CPU and, with the
# CUDA activity, every kernel on a GPU. A **schedule** tells it when: `default_schedule` waits 1 step, warms up for 3, and records
# 6. `prof.step()` ends a step.
#
# Write `profile_steps`:
# - call `fn()` ten times under a profiler with `schedule=default_schedule`, and the CUDA activity where `torch.cuda.is_available()`;
# - call `synchronize()` between `fn()` and `prof.step()`, as in Question 1.3: without it a step ends while its kernels are still
#   in the queue;
# - write a Chrome trace to `trace_path`, with `prof.export_chrome_trace`, and return the profiler.
#
# {hint idea} The schedule counts steps, and only `prof.step()` tells it that a step is over.
# {hint plan} Collect the activities, open `torch.profiler.profile` with them and the schedule, and in it ten times: call,
# synchronize, step. After the block, export and return.

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
### TESTS q4_1_tests, 5 points: check_profile_steps(profile_steps)

# %% [markdown]
# Profile a decode step, and look at it. The timeline below is drawn from the file that you exported: a row for each family of
# operators, and gaps where nothing runs. To walk through it, open [ui.perfetto.dev](https://ui.perfetto.dev) and drop
# `out/decode_trace.json` on it.
#
# **Before you run.** How many operators does one token need in one layer? 10, 100, 1000?

# %%
guesses["operators (on a GPU: kernels) of a decode step"] = None
step, trace = decode_step(batch=1, length=512), str(output_path("decode_trace.json"))
prof = profile_steps(step, trace)
operators = count_cuda_kernels(prof)["total"]
beside_guess("operators (on a GPU: kernels) of a decode step", operators)
taken = median_times({"a decode step": step})["a decode step"]
print(f"latency of a step: {plus_minus(taken)} ms, {1e3 * taken.median_ms / operators:.1f} µs for each of them")
plot_last_step(trace)
summary = summarize_trace(trace, top=12, dataframe=True)
summary[["name", "family", "count", "self_us", "mean_us", "share"]].round(3)

# %% [markdown]
# ## Fusion
#
# Gemma's activation is the tanh form of GELU:
#
# $$\text{GELU}(x) = \tfrac{1}{2}\,x\left(1 + \tanh\!\left(\sqrt{2/\pi}\,\left(x + 0.044715\,x^3\right)\right)\right).$$
#
# Each `+`, `*` and `tanh` you write is one operator: it reads its whole input from memory and writes its whole output. (A number
# such as 0.5 is no tensor: `0.5 * x` reads one. `x * x` reads two, though they are the same.)
# A **fused** kernel reads $x$ once, keeps everything in between in registers, and writes once.
#
# ![Kernel fusion: a chain of kernels with memory traffic between them becomes one kernel](assets/kernel_fusion.svg)

# %% [markdown]
# ### Question 4.2: GELU, operator by operator {points}
#
# 1. `gelu_by_hand`: the formula from elementwise operators of whole tensors, with the shape and dtype of `x`. It will meet
#    `torch.compile`.
# 2. `elementwise_bytes`: the bytes that a chain of elementwise operators moves. `one_input` of them read one tensor, `two_inputs`
#    read two, and each writes one. All tensors have `numel` elements.
# 3. `fusion_speedup`: how many times faster the fused kernel is than this chain, if memory traffic is all that matters.
#
# {counts}
#
# {hint plan} First the inner part, then tanh of it, then the two factors. For the bytes: an operator with one input moves
# two tensors, one with two inputs moves three. For the speed-up: all that the chain moves over what one fused kernel
# moves.
# {hint line} `x *= ...` changes the caller's tensor. And every operator writes, too.

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
### TESTS q4_2_tests, 2 points: check_gelu_by_hand(gelu_by_hand)
### TESTS q4_2_bytes_tests, 2 points: check_fusion_bytes(elementwise_bytes, fusion_speedup)

# %% [markdown]
# ## Let the compiler fuse
#
# [`torch.compile`](https://docs.pytorch.org/docs/stable/generated/torch.compile.html) records the operators of a function and
# generates one kernel for as many of them as it can. You judge it by counting: `kernels_per_step` counts the kernels of a call in
# your profile of Question 4.1 (on a CPU the leaf operators, those that call no other).
#
# Now GELU by hand, fused and compiled, then the whole layer before and after the compiler.
#
# **Before you run.** Count the operators in your `gelu_by_hand`. What speed-up does `fusion_speedup` promise? Will you get
# it? (Compiling takes some seconds the first time.)

# %%
guesses["operators in your gelu_by_hand"] = None
guesses["speed-up of F.gelu"] = None


def kernels_per_step(fn) -> int:
    """Kernels (on a CPU: leaf operators) of one call of fn(), counted in your profile of ten calls."""
    return count_cuda_kernels(profile_steps(fn, str(output_path("counted_trace.json"))))["total"]


gelu_input = torch.randn(2**26 if on_gpu else 2**22, device=device, dtype=dtype)
print(f"{gelu_input.numel():,} elements in {dtype_name}")
ways = {"by hand": gelu_by_hand, "F.gelu": lambda t: F.gelu(t, approximate="tanh")}
if compiler := compile_support():
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
beside_guess("operators in your gelu_by_hand", int(gelu_table.iloc[0, 1]))
beside_guess("speed-up of F.gelu", float(gelu_table["speed-up"][1]))
keep("gelu", gelu_table)
plot_beside("gelu", ["speed-up"], title="GELU: how many times faster than by hand")

# %%
if compile_support():
    print("compiling the decoder layer: about 10 s the first time ...", flush=True)
    both = {"eager": prefill_call(1, 512), "compiled": prefill_call(1, 512, compiled=True)}
    verdict = compare(*both.values(), labels=tuple(both), queue_ahead=False, device=device, **TIMES)
    sides = zip(both, (verdict.a, verdict.b), strict=True)
    rows = [(name, kernels_per_step(both[name]), side.median_ms) for name, side in sides]
    keep("compiled_layer", pd.DataFrame(rows, columns=["layer", "kernels" if on_gpu else "operators", "ms"]))
    print(verdict)
    if not on_gpu:
        show_recorded("compiled_layer")

# %% [markdown]
# A CPU shows zero for the compiled GELU: what the compiler generates there is a plain C++ function, and the profiler counts
# PyTorch's operators. On a GPU a generated kernel is launched, and counts, like any other.

# %% [markdown]
# ## Mixed precision
#
# Fusion removes trips to memory. The other way to move fewer bytes is a narrower number, and for matrix products it is also the
# faster one: the tensor cores of an H200 do 989 TFLOP/s in bf16, and its ordinary units 67 in fp32. A model that only answers
# stores its weights in bf16. Training adds small steps to them, and a step below 1/512 of a bf16 number is lost. So in **mixed
# precision** ([Micikevicius and others](https://arxiv.org/abs/1710.03740)) the weights stay in fp32, and each product gets bf16
# copies of them. [`torch.autocast`](https://docs.pytorch.org/docs/stable/amp.html) does this operator by operator.

# %% [markdown]
# ## The launch queue
#
# The CPU puts kernels into a queue, the GPU takes them out, and the two work at the same time. A whole sequence of kernels can
# be recorded once, and then needs only one launch: a **[CUDA graph](https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs)**.
#
# ![Two lanes, CPU and GPU: eager, each of four launches takes longer than a kernel and the GPU waits in between; as a graph, one launch and four kernels back to back](assets/lab1_launch_queue.svg)

# %% [markdown]
# ### Question 4.3: The launch queue, and CUDA graphs {points}
#
# A launch takes the CPU `launch_us` ($t_\text{launch}$), a kernel takes the GPU `kernel_us` ($t_\text{kernel}$). For `n` equal kernels:
#
# - **Eager.** Launch $i$ ends at $i \cdot t_\text{launch}$, for $i = 1 \dots n$. A kernel starts as soon as it is launched **and** its
#   predecessor is done.
# - **CUDA graph.** One launch of `launch_us`, then all `n` kernels run back to back.
#
# Both functions return the time in µs from the first launch's start to the last kernel's end.
#
# {hint idea} Two workers, one queue: draw three kernels on paper, once with a slow and once with a fast launch.
# {hint plan} Before the first kernel there is always one launch. After the last launch there is always one kernel.
# Between them, the slower of the two sets the pace, $n - 1$ times.
# {hint line} Try $n = 1$: both functions give one launch and one kernel.

# %% nbgrader={"grade_id": "q4_3", "solution": true}
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
### TESTS q4_3_tests, 2 points: check_launch_model(eager_time_us, graph_time_us)

# %%
your_kernel_us = None  # your line: kernels of at least so many µs hide launches of 17 µs
check_kernel_us(your_kernel_us)
your_busy = None  # your line: the share of the time in which the GPU works: 93 kernels of 1.8 µs, 17 µs a launch
check_busy(your_busy)
kernel_us = [0.5 * 2**i for i in range(10)]
gains = {f"{us} µs a launch": [eager_time_us(80, us, t) / graph_time_us(80, us, t) for t in kernel_us] for us in (6, 15)}
plot_lines(gains, kernel_us, "time of one kernel (µs)", "gain (×)", "80 kernels: what a CUDA graph is worth", {"no gain": 1})
scoreboard(eager=eager_time_us(93, 17, 1.8), graph=graph_time_us(93, 17, 1.8))  # 93 kernels of 1.8 µs; a launch with its Python takes 17

# %% [markdown]
# Your model and the record agree within ten percent: the step waits for launches, and the graph takes them away.
#
# **Capture a graph yourself.** On a GPU, fill in the three lines of `captured` below (ungraded). While a graph is
# captured, kernels are recorded, not run; afterwards `replay()` launches all of them at once, on the same tensors. A
# CPU operator is a function call and has no launch to save: there the cell shows what was recorded on an H200.

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
# **Before you run.** A graph takes away all launches of a decode step but one. How many times as fast is the step? And the prefill
# of 8192 tokens, at batch 1 and at batch 8?

# %%
guesses["gain of a graph, decode, batch 1"] = None
guesses["gain of a graph, prefill of 8192 tokens, batch 1"] = None
guesses["gain of a graph, prefill of 8192 tokens, batch 8"] = None
if cuda_graph_support():
    rows = []
    for phase, graph_batch, step in (
        ("decode after 512", 1, decode_step(1, 512)), ("decode after 512", 32, decode_step(32, 512)),
        ("prefill of 8192", 1, prefill_call(1, 8192)), ("prefill of 8192", 8, prefill_call(8, 8192)),
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
        rows.append(row | {"gain": row["eager_ms"] / row["graph_ms"]})
    graphs = pd.DataFrame(rows)
    keep("cuda_graphs", graphs)
else:
    print(cuda_graph_support().reason)
    graphs = recorded_table(RECORDED, "cuda_graphs")
    display(graphs.round(4))
for what, row in (("decode, batch 1", 0), ("prefill of 8192 tokens, batch 1", 2), ("prefill of 8192 tokens, batch 8", 3)):
    beside_guess(f"gain of a graph, {what}", float(graphs["gain"][row]))
plot_graphs(graphs)

# %% [markdown]
# The graph does the same work on the same bytes, and one launch is left of about ninety. It still takes seventy times as long as
# the memory floor allows: it runs ninety tiny kernels, one after the other, and each fills a small part of the GPU. Fusion makes fewer
# and larger ones.
#
# ## One kernel of the ninety
#
# One of these kernels is attention. A better one helps only where something waits for it. The course's *decode kernel* (lab 4 shows
# how it works) makes the step in a graph 1.08 times as fast with one sequence of 2048 tokens, and 1.77 times with 64 sequences of
# 4096: the longer the caches, the larger is attention's part of the step. Launched one by one, nothing changes.

# %% [markdown]
# ### Question 4.4: Explain the fusion {points}
#
# With numbers from your tables and the timeline:
# 1. On the timeline of the decode step: what takes more time, the matrix products or all the rest? What is the rest?
# 2. GELU by hand against fused: which speed-up did `fusion_speedup` promise, which did you get, and why do they differ?
# 3. `torch.compile` of the whole layer: which operators disappeared, and which did not?
# 4. Which cost does fusion remove, and which a CUDA graph? Which of them reduces the bytes?
# 5. For the prefill of 8192 tokens a CUDA graph gains nothing at batch 8, and a part of the time at batch 1. Explain both with the
#    model of Question 4.3.
#
# {hint idea} Two costs: bytes between operators, and launches. For each question, say which of them you talk about.
# {hint plan} 1: the table below the timeline has the names. 2: put the two speed-ups side by side. 3: compare the two
# counts, and ask which operators are calls of a library. 4: what does a graph do to the bytes? 5: compare time ÷ kernels
# with the launch time.
# {hint line} A graph runs exactly the same kernels.

# %% [markdown] nbgrader={"grade_id": "q4_4", "grade": true, "solution": true, "points": 5}
# 1. At batch 1 the matrix products are short (GEMVs), and there are seven of them. The rest is some dozens of small
#    elementwise operators: four norms (each a chain of cast, square, mean, rsqrt, products), rotary embedding, the cache
#    update, the residual additions. On a GPU the timeline is mostly gaps between short kernels.
# 2. The chain of nine operators (five with one input, four with two, `x * x` counted as two) moves (2 · 5 + 3 · 4) / 2 = 11
#    times the bytes of the fused one. (With `x * x` read once it is 10.5; with `x ** 3` there are eight operators and the
#    factor is 9.) Measured is less on a CPU: tanh costs arithmetic that fusion does not remove, parts of the intermediate
#    tensors stay in cache, and a fused kernel does not reach the full bandwidth. On a large GPU tensor it comes close.
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
# **square**. Twice the text, four times the scores. *Flash attention* computes the same $O$, and never stores them.

# %% [markdown]
# ### Question 5.1: Standard attention, until it hurts {points}
#
# 1. `standard_attention`: the three lines, for `q`, `k`, `v` of shape (B, H, L, D). Not causal.
# 2. `score_bytes`: the bytes of **one** matrix of scores, for all heads and batches.
# 3. `longest_length`: the largest length $L$ for which scores and probabilities, both alive at once, fit into `memory_bytes`. Ignore
#    all else.
#
# {counts}
#
# {hint plan} Product of `q` with the transposed last two dimensions of `k`, divided by a root; softmax over the last
# dimension; product with `v`. For the length: two matrices of $L^2$ scores for each head and sequence fit into the
# memory; solve for $L$.
# {hint line} The root is of the head dimension, which is the last one. And a length is an integer that fits: look at
# `math.isqrt`.

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
### TESTS q5_1_tests, 2 points: check_standard_attention(standard_attention)
### TESTS q5_1_memory_tests, 2 points: check_attention_memory(score_bytes, longest_length)

# %% [markdown]
# Let the *prediction* say where a machine ends. Never let the machine say it: on a GPU that is an out-of-memory error, on a laptop
# it is a frozen screen. The cells below may use 1 GB (on a GPU, 40% of what is free).
#
# **Before you run.** At which length does that budget end, and at which the whole memory of your machine?

# %%
guesses["longest text in the budget"] = None  # tokens
guesses["longest text in the whole memory"] = None
memory_budget, whole_memory = memory_of_this_machine()  # bytes: what the cells below may use, and all of it
print(f"batch {flash_batch}, {flash_heads} heads of {flash_dim}, {dtype_name}, at most {memory_budget / 1e9:.1f} GB")
for gigabytes in (8, 80, 141):
    longest = longest_length(int(gigabytes * 1e9), flash_batch, flash_heads, dtype)
    print(f"a memory of {gigabytes:3} GB ends at {longest:,} tokens")
beside_guess("longest text in the budget", longest_length(int(memory_budget), flash_batch, flash_heads, dtype))
beside_guess("longest text in the whole memory", longest_length(int(whole_memory), flash_batch, flash_heads, dtype))

# %% [markdown]
# PyTorch's `F.scaled_dot_product_attention` (SDPA) computes the same attention in one fused kernel, where one exists for the machine.
# Its inputs are laid out as **(B, H, S, D)**. A projection produces (B, S, H, D). Both have four dimensions, so a mistake raises no
# error. It computes attention over *heads* instead of tokens, very fast, and very wrong.
#
# ### Question 5.2: Flash attention, with the right layout {points}
#
# Write `attention_bshd`: causal attention for `q` (B, S, H, D) and `k`, `v` (B, S, Hkv, D), by one call of SDPA; the result is
# (B, S, H, D). `Hkv` may be smaller than `H` (GQA): `enable_gqa=True` lets SDPA share the heads. (In a shape S is the length, as in
# PyTorch's documentation; the matrix $S$ holds scores.)
#
# {hint idea} SDPA takes the last two dimensions as tokens and head dimension. Which ones are they in your inputs?
# {hint plan} Exchange two dimensions of all three inputs, call SDPA with the mask and the grouped heads, and exchange the
# same dimensions of the result.

# %% nbgrader={"grade_id": "q5_2", "solution": true}
def attention_bshd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of q (B, S, H, D) over k, v (B, S, Hkv, D); returns (B, S, H, D)."""
    ### BEGIN SOLUTION
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    ### END SOLUTION
### TESTS q5_2_tests, 2 points: check_attention_bshd(attention_bshd)

# %% [markdown]
# ## Online softmax
#
# How can attention do without the score matrix? Softmax needs the maximum and the sum of a whole row. Or does it?
#
# Let a row arrive in blocks $x^{(1)}, x^{(2)}, \dots$. Keep two running numbers: the maximum $m$ so far, and the sum
# $\ell = \sum e^{x - m}$ so far. When a new block brings a larger maximum, all old terms of the sum were computed with the wrong $m$.
# But they are all wrong by the *same factor*:
#
# $$m' = \max\big(m, \max x^{(j)}\big), \qquad
# \ell' = \underbrace{e^{\,m - m'}}_{\text{rescale}} \ell + \sum e^{\,x^{(j)} - m'}.$$
#
# Start with $m = -\infty$ and $\ell = 0$. After the last block, $\text{softmax}(x) = e^{x - m} / \ell$: one pass, two numbers a row.
#
# ![Online softmax of a row in three blocks: after each block the running maximum, the rescaled sum, and the new terms as bars](assets/lab1_online_softmax.svg)
#
# Flash attention carries a third along, the output that is not yet divided by $\ell$, rescaled by the same factor:
#
# $$O' = e^{\,m - m'}\, O + e^{\,S^{(j)} - m'}\, V^{(j)}, \qquad \text{and at the end } O / \ell.$$
#
# ![Flash attention: a tile of queries stays on chip while tiles of keys and values stream past](assets/flash_attention.svg)

# %%
row_stats = None  # your line: after the block [1, 3], and then after [5]: ((m, l), (m, l))
check_row_stats(row_stats)

# %% [markdown]
# ### Question 5.3: Online softmax, and flash attention by hand {points}
#
# 1. `online_softmax_stats` gets an *iterator* over blocks of shape (rows, width); widths may differ, and there is no going back.
#    Return `(m, l)`, each of shape (rows,) and of the blocks' dtype. Values may be as large as 1000, so never compute $e^x$ without
#    subtracting a maximum.
# 2. `flash_attention_tiled`: attention without a mask, tile by tile. `q` is (B, H, S, D), `k` and `v` are (B, H, L, D); no length
#    need be a multiple of its tile. Use `@`. Scores exist for one tile of queries and one tile of keys at a time. Compute in
#    float32 inside, the scores too; the result has the dtype of `q`.
#
# {counts}
#
# {hint plan} Keep $m$ and $\ell$, and for flash attention $O$. For each block: new maximum, factor $e^{m-m'}$, old sum
# times the factor plus the new terms, the same for $O$, then remember the new maximum. For flash attention this is the
# inner loop over keys; the outer loop is over tiles of queries, and the division comes after the inner loop.
# {hint line} $O$ is rescaled by the same factor as $\ell$. The new terms use the *new* maximum, the factor uses old and
# new. And `.float()` comes before the product, not after it.

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
### TESTS q5_3_tests, 3 points: check_online_softmax_stats(online_softmax_stats)
### TESTS q5_3_flash_tests, 4 points: check_flash_attention_tiled(flash_attention_tiled)

# %% [markdown]
# You have written flash attention. The library's version is the same loop in one kernel.
#
# **Before you run.** At the longest length, how many times faster than standard attention will the library's flash kernel be, and
# how many times less memory will it need? And your own loop, in which every line is still an operator?

# %%
guesses["library: times faster than standard"] = None
guesses["library: times smaller than standard"] = None
guesses["yours: times faster than standard"] = None
guesses["yours: times smaller than standard"] = None
from torch.nn.attention import SDPBackend, sdpa_kernel


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """SDPA of (B, H, S, D), pinned to the flash kernel: it raises an error instead of running another."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def own_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Your flash attention, with large tiles: each line of the loop is an operator, with its launch."""
    tile = 1024 if on_gpu else 256
    return flash_attention_tiled(q, k, v, tile, tile)


versions = {"standard": standard_attention, "yours": own_flash, "library": flash_attention}
rows = []
for tokens in (1024, 2048, 4096, 8192, 16384) if on_gpu else (256, 512, 1024, 2048, 4096):
    if 3 * flash_batch * flash_heads * tokens**2 * dtype.itemsize > memory_budget:
        print(f"{tokens} tokens are left out: standard attention would need more than {memory_budget / 1e9:.1f} GB")
        break
    print(f"measuring {tokens} tokens ...", flush=True)
    q, k, v = random_qkv(tokens)
    calls = {name: functools.partial(function, q, k, v) for name, function in versions.items()}
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
keep("flash_attention", flash_table)
longest_row = flash_table.iloc[-1]
for name in ("library", "yours"):
    beside_guess(f"{name}: times faster than standard", float(longest_row["standard_ms"] / longest_row[f"{name}_ms"]))
    beside_guess(f"{name}: times smaller than standard", float(longest_row["standard_mem_gb"] / longest_row[f"{name}_mem_gb"]))
plot_flash_versions(flash_table, tuple(versions))

# %% [markdown]
# Look at the memory of your loop: it grows like the library's, not like the square. Its time pays for every line: each reads
# and writes its tile of scores, where one kernel keeps them in registers. On a GPU it is even slower than standard attention:
# your products are in float32, and tensor cores do not multiply float32.

# %% [markdown]
# ## When is the memory in use?
#
# The highest point says *how much* memory a call needs, and all allocations and releases say *which line* needs it. The
# next cell draws what each of the three calls holds beyond its inputs.
#
# **Before you run.** How many score matrices does your `standard_attention` hold at its highest point? One, two or three? Look at your
# three lines: a tensor lives as long as a name, or an expression that is under way, refers to it.

# %%
guesses["score matrices at once, standard attention"] = None
tokens = 4096 if on_gpu else 1024
q, k, v = random_qkv(tokens)
one_matrix_mb = score_bytes(flash_batch, flash_heads, tokens, dtype) / 1e6
highest = plot_memory({name: functools.partial(function, q, k, v) for name, function in versions.items()}, one_matrix_mb)
beside_guess("score matrices at once, standard attention", round(highest["standard"] / one_matrix_mb, 1))

# %% [markdown]
# The steps of *standard* are its lines: the product makes a matrix, the division another one, the softmax a third, and Python releases
# a matrix as soon as nothing refers to it any more. *Yours* is a row of small teeth, one for each tile of scores.
#
# Flash attention does the same FLOPs as standard attention (a few more, for the rescaling). What changes is I/O.
#
# ### Question 5.4: Kernels and roofline, before and after {points}
#
# Write `attention_intensity`. For one head with $L$ queries and $L$ keys, count two matrix products ($4 L^2 D$ FLOPs) and this traffic:
#
# - **standard**: $Q$, $K$, $V$ read, $O$ written; the scores written by the first product, read and written by the softmax, and
#   read by the second product;
# - **flash**: $Q$, $K$, $V$ read, $O$ written. (Keys and values are read again for each tile of queries, but then from the L2 cache.)
#
# {hint plan} FLOPs: two products. Bytes: elements of Q, K, V, O; for standard attention the scores, once for each write
# and each read in the list; times the bytes of an element.

# %% nbgrader={"grade_id": "q5_4", "solution": true}
def attention_intensity(length: int, head_dim: int, dtype: torch.dtype, flash: bool) -> float:
    """FLOPs/Byte of one head of attention over length tokens, standard or flash."""
    ### BEGIN SOLUTION
    elements = 4 * length * head_dim + (0 if flash else 4 * length * length)
    return 4 * length * length * head_dim / (elements * dtype.itemsize)
    ### END SOLUTION
### TESTS q5_4_tests, 2 points: check_attention_intensity(attention_intensity)

# %%
your_limit = None  # your line: FLOPs/Byte that standard attention approaches for long texts, D = 128 in bf16
check_limit(your_limit)
measured = {}
for name, function in versions.items():
    count = kernels_per_step(functools.partial(function, *random_qkv(512)))
    flops = 4 * flash_batch * flash_heads * longest_row["seq_len"] ** 2 * flash_dim
    # your loop writes its tiles of scores to memory, too: its intensity is that of standard attention
    intensity = attention_intensity(int(longest_row["seq_len"]), flash_dim, dtype, flash=name == "library")
    measured[name] = intensity, achieved_tflops(flops, longest_row[f"{name}_ms"])
    print(f"{name:9} {count:3} {'kernels' if on_gpu else 'operators'} for 512 tokens")
report_measured("attention_roofline", measured)

# %% [markdown]
# ### Question 5.5: Explain flash attention {points}
#
# With numbers from your tables ("flash" is the library's kernel):
# 1. Memory against length: how does each version grow, and which term is responsible?
# 2. Flash does not do fewer FLOPs. Why is it faster? Use the roofline. (On a CPU: which operator is not in the FLOP count?)
# 3. The intensity of standard attention approaches a limit. Which number of the model sets it? Is that limit left or right of the
#    ridge of an H200 in bf16, for D = 128?
# 4. What would go wrong in online softmax without the rescaling factor? When would nobody notice?
#
# {hint idea} FLOPs are the same. What differs is how often the square travels.
# {hint plan} 1: divide the memory at the last length by that at half of it. 2: put both points on the roofline. 3: let
# the length grow in the formula of 5.4, and see what is left. 4: take the blocks [1, 3] and [5] and leave the factor out.
# {hint line} A row whose largest value comes first never needs the factor.

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
# ## The loop as one kernel
#
# Now your loop of Question 5.3 as **one** kernel. One program takes `BLOCK_M` queries of one head and walks along the keys in
# blocks of `BLOCK_N`, each once. Scores, $m$, $\ell$ and the output stay on the chip.
#
# ### Bonus Question 5.6: Flash attention in Triton {points}
#
# The pointers and the loads are there. Fill in the two gaps:
# 1. In the loop: the scores of the block, and with them `m`, `l` and `accumulator` as in Question 5.3, both products by `tl.dot` with
#    `"ieee"`. In the last block some keys do not exist: their loads gave 0, and a score of 0 is a score like others.
# 2. After the loop: the division, and the store, masked.
#
# <details><summary>The words that you need</summary>
#
# `tl.dot(x, tl.trans(y), input_precision="ieee")` multiplies a tile by a transposed one. `tl.where(condition, a, b)` chooses. `tl.max(x, 1)`
# and `tl.sum(x, 1)` go along a row, `tl.maximum(a, b)` takes the larger of two values, and `tl.exp` is the exponential. `tl.dot` wants both
# sides in one dtype: `p.to(v_tile.dtype)`. `tl.store` converts.
# </details>
#
# {hint idea} Read your own inner loop of 5.3 line by line: each line has one line here.
# {hint plan} Scores: product, times `scale`, minus infinity where the key does not exist. New maximum of each row,
# weights, the factor for what is there already. Then `l` and `accumulator`, each rescaled before the new part is added,
# and the new maximum is kept.
# {hint line} `m`, `l` and the factor are vectors of rows, and the accumulator is a matrix: which of them needs `[:,
# None]`? And every product is added to something.

# %% nbgrader={"grade_id": "bonus_5_6", "solution": true}
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
### TESTS bonus_5_6_tests, 5 points: check_flash_triton(text_of("flash_triton.py"))

# %% [markdown]
# **Before you run.** On a GPU, at the longest length of Question 5.3: how much of the library's speed will your kernel reach,
# and how many times faster is it than standard attention?

# %%
guesses["your kernel: share of the library's speed"] = None  # 0 to 1
guesses["your kernel: times faster than standard"] = None
if kernels := compiled_file("flash_triton.py"):
    rows = []
    for tokens in (1024, 4096, 16384):
        q, k, v = random_qkv(tokens)
        calls = {
            "standard": functools.partial(standard_attention, q, k, v),
            "your kernel": functools.partial(kernels.flash, q[0], k[0], v[0]),
            "library": functools.partial(F.scaled_dot_product_attention, q, k, v),
        }
        apart = (calls["your kernel"]().float() - calls["library"]()[0].float()).abs().max().item()
        assert apart < 0.05, f"at {tokens} tokens your kernel differs from the library by {apart}"
        times = median_times(calls)
        rows.append({"tokens": tokens, **{f"{name}, ms": taken.median_ms for name, taken in times.items()},
                     "your TFLOP/s": achieved_tflops(4 * flash_heads * tokens**2 * flash_dim, times["your kernel"].median_ms)})
    triton_table = pd.DataFrame(rows)
    keep("flash_triton", triton_table)
else:
    triton_table = recorded_table(RECORDED.with_name("lab1_flash_triton.json"), "flash_triton")
    display(triton_table.round(4))
last = triton_table.iloc[-1]
beside_guess("your kernel: share of the library's speed", float(last["library, ms"] / last["your kernel, ms"]))
beside_guess("your kernel: times faster than standard", float(last["standard, ms"] / last["your kernel, ms"]))

# %% [markdown]
# Recorded on an H200 at 16384 tokens, the model answer is three times as fast as standard attention, and has 0.6 of the speed of
# the library, which is cuDNN there. Blocks of 64 × 64 were the fastest of six sizes tried. Your loop in Python was slower than
# standard attention there, and it was the same algorithm: one kernel makes the difference. The library also has asynchronous
# copies and products: they are the subject of lab 3.

# %% [markdown]
# ## Your score
#
# And the scoreboard, a last time.

# %%
save_results()
scoreboard()

# %% [markdown]
# ## What you know now
#
# - A time without a synchronisation and a warm-up is a rumour.
# - FLOPs over bytes tells you what limits a kernel, before you write it.
# - Prefill and decode are the same layer on opposite sides of the ridge.
# - Elementwise operators cost bytes, and small kernels cost launches. Fusion removes both, a CUDA graph the launches.
# - Flash attention does not compute less. It moves less.
#
# Look at the first sentences of this lab again. Can you now compute that hundredth of a percent, and say which part of the
# waiting is memory's and which is the launches'?
