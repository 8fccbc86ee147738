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
# # Lab 3: From Naive Attention to a Warp-Specialized Kernel
#
# Flash attention moves few bytes. On a Hopper GPU that is not enough. A kernel that loads, multiplies and computes its
# softmax one after the other leaves the tensor cores idle for more than half of the time. This lab is about that half.
#
# You will write kernels in **Gluon**, the language under Triton. In Triton the compiler decides which thread holds which
# element, where a tile lies in shared memory, when it is loaded and who waits for whom. In Gluon you decide. You need
# no GPU for it: on any Linux machine the course's simulator runs your kernels, and finds deadlocks and races that a GPU
# would punish with a hang, or with wrong numbers once in a thousand runs.
#
# **After this lab you can**
# 1. say what a streaming multiprocessor consists of, and which part limits a kernel;
# 2. choose layouts, and tell what they cost;
# 3. build pipelines with `cp.async`, and with TMA copies and mbarriers;
# 4. multiply with `wgmma`, and keep its asynchrony in order;
# 5. split a kernel into producer and consumers, and overlap its products with its softmax;
# 6. read what became of it: the PTX and SASS of your own lines, registers, a timeline.
#
# | Part | You will |
# |---|---|
# | 1. What a GPU is | compute what a tile costs and needs, and measure naive against fused attention |
# | 2. Layouts | find out who holds which element, and transpose a matrix with whole sectors |
# | 3. Copies that run on their own | build a `cp.async` pipeline and a TMA ring, and read a deadlock |
# | 4. Tensor cores | multiply with `wgmma` |
# | 5. Flash attention | online softmax, producer and consumers, overlap; then the race |
#
# Plan twelve hours, two more for the bonus (an estimate: take it in three sittings, a part or two each).
#
# The lab gives {points:regular} points, and {points:bonus} bonus points.
#
# {points:table}

# %% [markdown]
# ## The map
#
# This checklist turns a naive attention into a warp-specialized one. It was written for Blackwell GPUs. The last column
# says what each line becomes on Hopper, and where in this lab you do it. Come back to it.
#
# | | Naive | Optimized, on Blackwell | On Hopper | Here |
# |---|---|---|---|---|
# | Pipeline | one group of warps loads, multiplies, does the softmax | partitions for loads, products, softmax | a producer warp; consumers multiply *and* do the softmax | 5.2 |
# | Layouts | the compiler's choice | explicit block, product and swizzle layouts | the same, with `wgmma`'s accumulator layout | 2.1, 2.2, 4.1 |
# | Softmax | once, after the product | in two parts, so that each overlaps the other's products | online, under the product of the block before | 5.1, 5.3 |
# | Sync | implicit barriers | mbarriers, in an order in which the less critical waits come first | mbarriers, full and empty for each slot; the consumer waits for K before V | 3.2, 5.2, 5.3 |
# | Memory | the compiler's choice | accumulators and P in tensor memory (TMEM) | accumulators and P in registers, Q K V in shared memory | 1.1, 4.1 |
# | Loads | each warp loads small pieces | TMA: one thread issues the copy of a whole tile | the same | 3.2 |
# | Critical path | products wait for softmax and back | the softmax limits; products and loads hide behind it | the same, within each consumer | 5.3 |
# | Schedule | heuristics | partition counts, parts, order of barriers written in the source | the same: tiles, slots, registers of each partition | 1.1, 5.2 |
# | Masking | in the one loop | in the softmax partitions, only where needed | in the consumers, only where needed | Bonus 5.5 |

# %% [markdown]
# ## How to work
#
# - **Run all cells in order.** Each exercise is a file: its cell begins with `%%writefile`, and running it writes the
#   file. Write code where it says `# YOUR CODE HERE` and delete the line `raise NotImplementedError()`. Leave the lines
#   that are given as they are. A file holds imports of the kernel languages, kernels and their helpers, and nothing
#   else.
# - **Then run the cell below it.** It runs your kernel in the simulator and compares the result. If two partitions wait
#   for each other, it says who waits for what. If two accesses to shared memory are in no order, it names both lines.
#   **Read the report to the end**: it is the feedback. Its line numbers count from the file's first line: one less than
#   the cell's, whose first line is `%%writefile`.
# - **Predict first.** Where it says *Before you run*, the next cell has lines `guesses[...] = None`: write your guess there,
#   then run. What came out is printed beside it, and both are saved. A wrong guess teaches more than a right one.
# - After the simulator, your kernel is compiled for a Hopper GPU (`sm_90a`); no GPU is needed for that. With a Hopper
#   GPU it also runs there, and must give the same result.
# - **Hints** are folded below each question: the idea, the plan, and the line that people miss. Open one at a time.
#
# Grading tries other shapes, other numbers of slots, and other timings: the simulator can stretch and shrink the time
# that copies and products take. A kernel that is right only because a copy happens to be fast is wrong.
#
# The simulator and the compiler need the package `triton`, which exists for Linux only, and no GPU. On Windows take WSL,
# on macOS a container or a remote machine. On a GPU two tools look for the same mistakes: Triton's own ConSan
# (`instrumentation_mode="consan"`), and NVIDIA's `compute-sanitizer`.
#
# **Words.** To *issue* an operation is to start it: the thread goes on at once. A *partition* is a group of warps that
# runs one function. In layouts, `order` says which dimension counts fastest. A *CTA* is CUDA's word for a thread block:
# `warps_per_cta` are the warps of a block.

# %% nbgrader={"grade_id": "setup", "locked": true}
import json
import math
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps the profiler from writing a line for each start and stop

import matplotlib.pyplot as plt
import pandas as pd
import torch

from utils import *
from utils.checking import check, expect_number
from utils.machine.device import gluon_support, offline_compile_support
from utils.machine.environment import environment
from utils.attention import attention
from utils.files import recorded_table
from utils.visualization import series, style_axes

assert find_spec("triton"), "This lab needs Triton for the language itself: pip install triton (Linux, no GPU needed)."
from utils import gluon_cpu
from utils.checking.gluon_launches import (
    CLOSE,
    Cancelling,
    async_copy_launch,
    attention_inputs,
    attention_launch,
    causal_launch,
    edge_inputs,
    falling_inputs,
    overlap_launch,
    repair_launch,
    ring_mistakes,
    tma_ring_launch,
    transpose_launch,
    wgmma_launch,
    wgmma_mistakes,
)
from utils.checking.kernel_exercises import (
    Launch,
    Tile,
    compile_for_hopper,
    descriptor,
    expect_kernel,
    load_kernels,
    machine_code,
    overlap,
    simulate_failure,
    simulate_launch,
)
from utils.checking.kernel_mistakes import BLOCKS, OVERLAP, SOFTMAX, attention_mistakes, causal

torch.manual_seed(0)
device = default_device()
on_gpu = device.type == "cuda"
on_hopper = bool(gluon_support())
RECORDED = Path("assets/results/h200")
results = {}  # this run's tables, saved at the end
guesses, outcomes = {}, {}  # your predictions, and what came out


def beside_guess(what: str, measured: object) -> None:
    """Print what came out beside your guess, and keep both."""
    guess, outcomes[what] = guesses.get(what), measured
    shown = format(measured, ".3g") if isinstance(measured, float) else str(measured)
    print(f"{what}: {shown}" + ("   (no guess)" if guess is None else f"   (you guessed {guess})"))


def text_of(file: str) -> str:
    """The text of an exercise's file."""
    if not Path(file).exists():
        raise FileNotFoundError(f"{file} is not there: run the cell that begins with %%writefile {file}.")
    return Path(file).read_text()


def answered(file: str) -> str | None:
    """The text of an exercise's file, or None while its hole is still there."""
    text = Path(file).read_text() if Path(file).exists() else ""
    open_still = any(line.strip().startswith("raise NotImplementedError") for line in text.splitlines())
    return text if text and not open_still else None


def plot_run(run, title: str, until: float | None = None, **options) -> None:
    """Draw the first program of a simulated run, up to `until` if given; model cycles, not nanoseconds."""
    _, ax = run.plot(**options)
    ax.set_xlim(right=until)
    style_axes(ax, title=title)
    ax.grid(False, axis="y")
    plt.show()


def show_timeline(text: str, launch: Launch, title: str, until: float | None = None, **options):
    """Simulate a launch and draw its first program, up to `until` if given; model cycles, not nanoseconds."""
    _, run = simulate_launch(text, launch, timeline=True, **options)
    plot_run(run, f"{title}: {run.cycles[0]:,.0f} model cycles", until)
    return run


def show_recorded(table: str, renamed: dict[str, str] | None = None) -> None:
    """Show a table of this lab as it was recorded on an H200, and say that it was not measured here."""
    rows = recorded_table(RECORDED / "lab3.json", table)
    if rows is not None:
        display(rows.rename(columns=renamed or {}).round(4))


print(f"device      {torch.cuda.get_device_name() if on_gpu else 'CPU'}, PyTorch {torch.__version__}")
print(f"simulator   Gluon of Triton {__import__('triton').__version__}")
print(f"compiler    {offline_compile_support().reason}")
print(f"Hopper GPU  {'yes: your kernels run here, too' if on_hopper else gluon_support().reason}")

# %% nbgrader={"grade_id": "launches", "locked": true}
def repaired(text: str, repairs: dict[str, str]) -> str:
    """The broken file with repairs in place of the lines they name."""
    assert isinstance(repairs, dict), f"repairs() should be a dict, and is {type(repairs).__name__}."
    assert len(repairs) <= 6, f"repairs changes {len(repairs)} lines; 6 at most. Change what is wrong."
    found = [line.strip() for line in text.splitlines()]
    for line in repairs:
        assert found.count(line) == 1, (
            f"`{line}` stands {found.count(line)} times in lab3_broken.py: copy a whole line that stands there once, without its indentation."
        )
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        new = repairs.get(line.strip(), line.strip())
        lines += [indent + part.strip() if part.strip() else "" for part in new.split("\n")]
    return "\n".join(lines) + "\n"


FROM_L2 = gluon_cpu.CostModel(global_bytes=40.0, global_latency=300.0)
big = attention_inputs(1, 128, 512, d=128)


def copies_before_the_first_read(run) -> int:
    """How many copies the first program has issued when it reads shared memory for the first time."""
    first = min((e.start for e in run.events if e.kind == "shared load"), default=math.inf)
    return sum(e.kind == "issue" and e.start <= first for e in run.events)


def tensor_core_share(run) -> float:
    """Share of the first program's time in which a product was under way."""
    busy = sum(e.end - e.start for e in run.events if e.kind == "wgmma")
    return busy / run.cycles[0]

# %% [markdown]
# # Part 1: What a GPU is
#
# An H200 has 132 **streaming multiprocessors** (SMs). A kernel is cut into blocks; a block stays on one SM. So think of
# one SM. It is not a big processor with many cores. It is a small factory:
#
# ![One SM of a Hopper GPU: four quarters with a tensor core, arithmetic and special function units and registers each; shared memory, the TMA copy engine and mbarriers that all of them use](assets/lab3_sm.svg)
#
# - Four **quarters**. Each runs warps of 32 threads and has its own registers, arithmetic units, 4 special function units
#   (exponentials, logarithms) and one **tensor core**.
# - A **warpgroup** is four neighbouring warps, one on each quarter of the SM. It issues products for the tensor cores
#   together: `wgmma` multiplies a tile of 64 rows, and all 128 threads hold a part of the result in their registers.
# - **Shared memory**, 227 KiB for a block, is where tensor cores read their operands from.
# - The **TMA** is a copy engine. One thread gives it the coordinates of a tile; it computes all addresses, copies, and
#   reports to an **mbarrier** how many bytes have arrived.
#
# Ordinary instructions wait by themselves: the hardware stops a thread until the register that it needs is there. The
# tensor cores and the TMA are different. Once told to, they run on their own, and nobody waits for them unless the
# program says so. This is where the speed is, and where the bugs are.

# %% [markdown]
# ### Question 1.1: What a tile costs, and what it needs {points}
#
# One step of flash attention takes `rows` queries and a block of `keys` keys, of head dimension `d`, in bf16:
# $S = QK^\top$, the softmax of $S$ (one exponential for each score), and $O \mathrel{+}= PV$. One SM of an H200 does in
# one cycle
#
# - 4096 bf16 FLOPs on its tensor cores (989 TFLOP/s / 132 SMs / 1.83 GHz),
# - 16 exponentials (4 in each quarter),
# - 20 bytes from memory (its share of 4.8 TB/s). Keys and values come from there; $Q$ is on chip already.
#
# 1. `tile_cycles`: how many cycles each of the three takes for one step: (products, exponentials, loads).
# 2. `shared_bytes`: shared memory for $Q$ of `consumers` warpgroups (64 rows each) and two rings of `stages` slots each,
#    one for $K$ and one for $V$, in bf16. A slot holds a block of `keys` rows. (A **ring** is a few slots that are filled
#    and emptied in turn, so that the next blocks are on their way while one is used. You will build one in Part 3.)
# 3. `registers_per_thread`: registers that one thread of a warpgroup needs for its part of the scores (64 × `keys`) and
#    of the output (64 × `d`), both fp32. A register holds 4 bytes.
#
# {hint idea}
# Three units work on the same step. For each, count what it has to do, and divide by what it does per cycle.
#
# {hint plan}
# Two products: $QK^\top$ and $PV$, each `rows` × `keys` × `d` multiply-accumulates. One exponential for each score.
# Loads: the block of K and the block of V, in bf16. For memory count tiles: Q once for each consumer, K and V once for
# each slot. For registers count elements of the two accumulators and share them among the threads of a warpgroup.
#
# {hint line}
# A multiply-accumulate is two FLOPs, an element of bf16 is two bytes, and one of fp32 is a whole register. Q is not
# loaded in the step.

# %% nbgrader={"grade_id": "q1_1", "solution": true}
def tile_cycles(rows: int, keys: int, d: int) -> tuple[float, float, float]:
    """Cycles of one SM for a step of rows queries and keys keys: (products, exponentials, loads)."""
    ### BEGIN SOLUTION
    return 2 * 2 * rows * keys * d / 4096, rows * keys / 16, 2 * keys * d * 2 / 20
    ### END SOLUTION


def shared_bytes(consumers: int, keys: int, d: int, stages: int) -> int:
    """Bytes of shared memory for Q and for the rings of K and V, in bf16."""
    ### BEGIN SOLUTION
    return 2 * (consumers * 64 * d + 2 * stages * keys * d)
    ### END SOLUTION


def registers_per_thread(keys: int, d: int) -> float:
    """Registers of one of 128 threads for fp32 scores (64, keys) and output (64, d)."""
    ### BEGIN SOLUTION
    return 64 * (keys + d) / 128
    ### END SOLUTION


# %% nbgrader={"grade_id": "q1_1_tests", "grade": true, "points": 3}
@check("1.1", "What a tile costs")
def check_tile_cycles(tile_cycles):
    for rows, keys, d, right in ((100, 40, 50, (195.3125, 250, 400)), (192, 96, 64, (1152, 1152, 1228.8))):
        got, what = tile_cycles(rows, keys, d), f"tile_cycles({rows}, {keys}, {d})"
        assert isinstance(got, (tuple, list)) and len(got) == 3, f"{what} should be three numbers, and is {got!r}."
        hints = (
            {"Count both products, and two FLOPs for each multiply-accumulate.": right[0] / 2},
            {"One quarter takes 4 a cycle, and an SM has four quarters.": 4 * right[1]},
            {"Load K and V, two bytes an element.": right[2] / 2, "Each element has two bytes.": 2 * right[2],
             "Q is loaded once, before the loop.": right[2] + 2 * rows * d / 20},
        )
        for name, number, expected, known in zip(("products", "exponentials", "loads"), got, right, hints, strict=True):
            expect_number(number, expected, rel=1e-6, unit="cycles", what=f"{name} of {what}", mistakes=known)


check_tile_cycles(tile_cycles).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab3_gluon as hidden
hidden.tile_cycles(tile_cycles).raise_if_wrong()
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "q1_1_budget_tests", "grade": true, "points": 3}
@check("1.1", "What a tile needs")
def check_tile_budget(shared_bytes, registers_per_thread):
    for consumers, keys, d, stages in ((1, 16, 10, 2), (3, 96, 128, 4)):
        q, ring = 128 * consumers * d, 4 * stages * keys * d
        expect_number(shared_bytes(consumers, keys, d, stages), q + ring, rel=1e-6, unit="bytes",
                      what=f"shared_bytes({consumers}, {keys}, {d}, {stages})", mistakes={
            "K and V need a ring each.": q + ring // 2,
            "An element of bf16 takes two bytes.": 2 * (q + ring),
            "That counts elements; one of bf16 takes two bytes.": (q + ring) // 2,
            "Each consumer has 64 rows of Q of its own.": q // consumers + ring,
            "Both rings have `stages` slots.": q + 2 * (stages + 1) * keys * d,
        })
    for keys, d, right in ((20, 40, 30), (160, 64, 112)):
        expect_number(registers_per_thread(keys, d), right, rel=1e-6, unit="registers",
                      what=f"registers_per_thread({keys}, {d})", mistakes={
            "The output (64 × d) lies in registers, too.": keys / 2,
            "A warpgroup is four warps: 128 threads share the tile.": 4 * right,
            "Accumulators are fp32: an element takes a whole register.": right / 2,
        })


check_tile_budget(shared_bytes, registers_per_thread).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab3_gluon as hidden
hidden.tile_budget(shared_bytes, registers_per_thread).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# **Before you run.** For 64 queries and head dimension 128: which of the three is the longest? How many rows of queries
# (64, 128, 192, ...) must share a block of keys until the loads are no longer the longest?

# %%
guesses["64 queries, head dim 128: the longest"] = None  # "products", "exponentials" or "loads"
guesses["rows of queries until it is not the loads"] = None
rows = []
for d, queries, keys in ((64, 64, 128), (64, 192, 128), (128, 64, 128), (128, 128, 128), (128, 256, 128), (256, 128, 64)):
    products, exponentials, loads = tile_cycles(queries, keys, d)
    rows.append({"head dim": d, "queries": queries, "keys": keys, "products": products, "exponentials": exponentials,
                 "loads": loads, "longest over products": max(products, exponentials, loads) / products,
                 "shared KiB, 2 slots": shared_bytes(queries // 64, keys, d, 2) / 1024,
                 "registers": registers_per_thread(keys, d)})
display(pd.DataFrame(rows).round(2))
cycles = dict(zip(("products", "exponentials", "loads"), tile_cycles(64, 128, 128), strict=True))
beside_guess("64 queries, head dim 128: the longest", max(cycles, key=cycles.get))
hidden_at = [n for n in range(64, 2048, 64) if tile_cycles(n, 128, 128)[2] <= max(tile_cycles(n, 128, 128)[:2])]
beside_guess("rows of queries until it is not the loads", hidden_at[0] if hidden_at else "more than 2000")

# %% [markdown]
# Two lessons. First, the exponentials are no detail: at head dimension 64 they take as long as the products, at 128 half
# as long. If they do not run *at the same time*, the tensor cores idle for half
# of the time at head dimension 64, and for a third at 128. Second, 20 bytes per cycle are too few for 64 rows. Real
# kernels let several warpgroups share each block of keys, and fetch it from the L2 cache, where it lies because other
# blocks of the same head read it, too.
#
# ## Naive against fused, measured
#
# The naive version is three operators: a matrix product, a softmax, a matrix product. It is written as well as three
# operators can be: the scale goes into $Q$, which is small, and not into the scores, and the softmax reads and writes the
# inputs' dtype (inside it computes in fp32). A weaker baseline would make every other number look better. The fused
# version is the library's flash attention. Same result, nearly the same FLOPs. The column *MB moved* counts what each must
# move at least: the naive version writes and reads its scores and its probabilities once each. One operator may launch
# more than one kernel. In the recorded table the naive version has six: the two products, the softmax, the scaling, and two
# short `Memset`s (0.8 µs each) that come with the products.
#
# **Before you run.** How many kernels does each launch (on a CPU: how many operators)? How many bytes must each move?

# %%
guesses["kernels or operators, naive"] = None
guesses["kernels or operators, fused"] = None
guesses["MB moved, naive"] = None
guesses["MB moved, fused"] = None


def naive_attention(q, k, v):
    """Attention by three operators; the scores are a tensor in memory."""
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    return torch.softmax(scores, -1) @ v


if on_gpu:
    batch, heads, length, d, dtype = 4, 16, 4096, 128, torch.bfloat16
else:
    batch, heads, length, d, dtype = 1, 4, 1024, 64, torch.float32
q, k, v = (torch.randn(batch, heads, length, d, device=device, dtype=dtype) for _ in range(3))
naive, fused = partial(naive_attention, q, k, v), partial(attention, q, k, v, backend="flash")
with nvtx_range("flashattention_baseline_unfused"):  # these names show in a trace
    expected = naive()
with nvtx_range("flashattention_optimized_flash"):
    difference = (fused().float() - expected.float()).abs().max().item()
print(f"(B, H, S, D) = ({batch}, {heads}, {length}, {d}), {dtype}; largest difference {difference:.1e}")

result = compare(naive, fused, warmup=3, iterations=15, labels=("naive", "fused"))
qkvo, scores = 4 * batch * heads * length * d, batch * heads * length**2
rows = []
for name, call, measurement, elements in (
    ("naive", naive, result.a, qkvo + 4 * scores),  # scores and probabilities are written once and read once each
    ("fused", fused, result.b, qkvo),
):
    counts = count_cuda_kernels(profile(call))
    rows.append({"": name, "kernels" if on_gpu else "operators": counts["total"], "ms": measurement.median_ms,
                 "MB moved": elements * dtype.itemsize / 1e6,
                 "TFLOP/s": 4 * scores * d / measurement.median_ms / 1e9})
results["naive_and_fused"] = rows
display(pd.DataFrame(rows).round(4))
print(result.sentence())
for row in rows:
    beside_guess(f"kernels or operators, {row['']}", row["kernels" if on_gpu else "operators"])
    beside_guess(f"MB moved, {row['']}", row["MB moved"])
show_recorded("naive_and_fused")

# %% [markdown]
# ### Question 1.2: Why fusion is the beginning, not the end {points}
#
# With numbers from your two tables (or the recorded one):
# 1. Which bytes does the naive version move and the fused one not? How many are they for this size?
# 2. Fused, 128 queries and head dimension 128: what limits an SM if products, exponentials and loads run one after the
#    other? How much faster can it get if all three run at the same time?
# 3. Why not simply take 512 rows of queries a block? Name two things of the SM that run out, with your numbers of 1.1.
#
# {hint idea}
# Fusion removes bytes. What is left takes cycles on three units, and the question is whether they work in turns or
# together.
#
# {hint plan}
# 1: which tensors of size S × S does the naive version make, and how often does each cross the memory bus? 2: take a
# row of your first table; in turns the three times add up, together the longest one counts. 3: compute shared memory
# and registers for 512 rows with your own functions.
#
# {hint line}
# In 3 mind the registers of the whole SM: 65536, shared by all threads of the block.

# %% [markdown] nbgrader={"grade_id": "q1_2", "grade": true, "solution": true, "points": 4}
# 1. The scores and the probabilities, S × S for each head: written and read, 4·B·H·S² elements (for B 1, H 4, S 1024 in
#    fp32: 67 MB against 4 MB for Q, K, V and O).
# 2. One after the other the sum counts: 2048 + 1024 + 3277 cycles for 128 keys at 20 bytes a cycle. At the same time the
#    longest counts: 3277, the loads, a factor of 1.9; with K and V from L2 the loads shrink and 2048 remain, the products.
# 3. Shared memory: Q of 512 rows takes 128 KiB at head dimension 128, and two slots of K and V another 128 KiB: more
#    than 227. Registers: eight warpgroups have 1024 threads; 65536 registers are 64 a thread, and 128 are needed for
#    scores and output alone.
#
# === BEGIN MARK SCHEME ===
# 1 point for the scores/probabilities with a number. 2 points for the sum against the maximum, with cycles (1 if only
# "overlap is faster"). 1 point for two of: shared memory, registers (64 a thread at 1024 threads), fewer blocks than SMs,
# with a number.
# === END MARK SCHEME ===

# %% [markdown]
# ### Bonus Question 1.3: Bytes in flight {points}
#
# A copy from memory takes hundreds of nanoseconds. While it travels, others must be under way, or memory idles. Little's
# law says how many bytes: bandwidth × latency.
#
# 1. `bytes_in_flight`: bytes that **one SM** must have under way so that all SMs together reach the bandwidth.
# 2. `slots_needed`: how many ring slots of `slot_bytes` bytes hold that many bytes; at least 1.
#
# {hint idea}
# A pipe that delivers B bytes per second and is T seconds long holds B · T bytes when it is full.
#
# {hint plan}
# First the bytes for the whole chip, then one SM's share. Then how many slots hold them.
#
# {hint line}
# Units: TB/s and ns. And a number of slots is whole: which way must it be rounded, and what is the least?

# %% nbgrader={"grade_id": "bonus_1_3", "solution": true}
def bytes_in_flight(bandwidth_tb_s: float, latency_ns: float, sms: int) -> float:
    """Bytes under way for each SM, so that memory is never idle."""
    ### BEGIN SOLUTION
    return bandwidth_tb_s * 1e12 * latency_ns * 1e-9 / sms
    ### END SOLUTION


def slots_needed(bandwidth_tb_s: float, latency_ns: float, sms: int, slot_bytes: int) -> int:
    """Ring slots of slot_bytes bytes that keep memory busy."""
    ### BEGIN SOLUTION
    return max(1, math.ceil(bytes_in_flight(bandwidth_tb_s, latency_ns, sms) / slot_bytes))
    ### END SOLUTION


# %% nbgrader={"grade_id": "bonus_1_3_tests", "grade": true, "points": 4}
@check("Bonus 1.3", "Bytes in flight")
def check_bytes_in_flight(bytes_in_flight, slots_needed):
    for bandwidth, latency, sms, slot, right, slots in ((2.0, 500, 100, 4096, 10_000, 3), (4.8, 700, 132, 32_768, 25_454.5454, 1)):
        expect_number(bytes_in_flight(bandwidth, latency, sms), right, rel=1e-6, unit="bytes",
                      what=f"bytes_in_flight({bandwidth}, {latency}, {sms})", mistakes={
            "That is the whole chip: divide by the number of SMs.": right * sms,
            "1 TB/s is 1e12 bytes a second, and 1 ns is 1e-9 s.": right * 1e-3,
        })
        expect_number(slots_needed(bandwidth, latency, sms, slot), slots, rel=1e-6, unit="slots",
                      what=f"slots_needed({bandwidth}, {latency}, {sms}, {slot})", mistakes={
            "There is no half slot: round up.": right // slot,
            "That is one slot too many: round up, and no further.": slots + 1,
            "A number of slots is a whole number: round up.": right / slot,
        })


check_bytes_in_flight(bytes_in_flight, slots_needed).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab3_gluon as hidden
hidden.bytes_in_flight(bytes_in_flight, slots_needed).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# # Part 2: Layouts
#
# In Gluon a tensor lives in registers, spread over the threads of a partition. **Who holds which element is its
# layout**, and it is part of the tensor's type: two tensors can only be added if their layouts agree.
#
# `gl.BlockedLayout(size_per_thread, threads_per_warp, warps_per_cta, order)` builds it up in three steps. With
# `BlockedLayout([1, 4], [4, 8], [2, 1], [1, 0])`:
#
# - each thread holds a piece of 1 × 4 elements;
# - the 32 lanes of a warp stand in a grid of 4 × 8 pieces: a warp covers 4 × 32 elements;
# - two warps stand in a grid of 2 × 1: together 8 × 32. A larger tensor repeats that tile; each repetition takes
#   further registers of the same threads.
# - `order` names the dimension whose index changes fastest: with `[1, 0]` the column index does, so neighbours within a
#   row come first. That holds for the elements of a thread, the lanes, the warps and the repetitions alike.
#
# ![A tile of 8 rows and 32 columns in a blocked layout: lanes 0 to 7 hold row 0 of warp 0 with four columns each, lanes 8 to 15 row 1; rows 4 to 7 belong to warp 1; beside it the slices of the layout](assets/lab3_blocked_layout.svg)
#
# A vector lacks a dimension, and so does its layout: **`gl.SliceLayout(d, L)` is `L` without dimension `d`**. A vector with
# one value for each row has lost dimension 1, the columns: `SliceLayout(1, L)`. A vector with one value for each column
# has lost dimension 0. `[:, None]` puts dimension 1 back, `[None, :]` dimension 0; then both have the layout `L` again and
# may be added. Every lane of a row holds the row's value.

# %% [markdown]
# ### Question 2.1: Who holds an element? {points}
#
# Write `owner`. It returns (warp, lane, register) of element (`row`, `column`) of a tensor of shape `shape`. All sizes
# are powers of two, and the shape is one or more whole tiles in each dimension. Registers count first within the
# thread's piece, then over repetitions.
#
# {hint idea}
# A position is written in mixed radix: first within the piece of a thread, then the lane, then the warp, then the
# repetition, for each dimension on its own.
#
# {hint plan}
# For each dimension divide the index by the piece's size, then by the number of lanes, then by the number of warps; the
# remainders are the places in the piece, in the warp, in the block, and what is left is the repetition. Then turn each
# pair of places into one number.
#
# {hint line}
# The pair becomes one number by `order`: its first entry names the dimension that counts with weight 1. The weight of
# the other is the extent of the first, and for repetitions that extent depends on the shape.

# %% nbgrader={"grade_id": "q2_1", "solution": true}
def owner(row: int, column: int, shape: tuple, size: tuple, threads: tuple, warps: tuple, order: tuple) -> tuple:
    """(warp, lane, register) that hold an element under BlockedLayout(size, threads, warps, order)."""
    ### BEGIN SOLUTION
    def flatten(place: list, extent) -> int:
        fast, slow = order
        return place[fast] + extent[fast] * place[slow]

    position = (row, column)
    tile = [size[i] * threads[i] * warps[i] for i in (0, 1)]
    piece = flatten([position[i] % size[i] for i in (0, 1)], size)
    lane = flatten([position[i] // size[i] % threads[i] for i in (0, 1)], threads)
    warp = flatten([position[i] // (size[i] * threads[i]) % warps[i] for i in (0, 1)], warps)
    repetition = flatten([position[i] // tile[i] for i in (0, 1)], [shape[i] // tile[i] for i in (0, 1)])
    return warp, lane, piece + size[0] * size[1] * repetition
    ### END SOLUTION


# %% nbgrader={"grade_id": "q2_1_tests", "grade": true, "points": 6}
@check("2.1", "Who holds an element")
def check_owner(owner):
    along, down = ((1, 4), (4, 8), (2, 1), (1, 0)), ((4, 1), (8, 4), (1, 4), (0, 1))
    odd = ((2, 2), (4, 8), (2, 2), (0, 1))
    backwards, repetitions = (
        "`order` names the fastest dimension first.", "Repetitions are counted in the layout's order, too.")
    pieces, dropped = (
        "Registers count first within the piece of a thread, and then over the repetitions.",
        "A tensor that is larger than the layout's tile repeats it: each repetition takes further registers.")
    for layout, row, column, shape, right, known in (
        (along, 0, 0, (8, 32), (0, 0, 0), {}), (along, 0, 3, (8, 32), (0, 0, 3), {}),
        (along, 0, 4, (8, 32), (0, 1, 0), {(0, 4, 0): backwards}), (along, 1, 0, (8, 32), (0, 8, 0), {(0, 1, 0): backwards}),
        (along, 5, 0, (8, 32), (1, 8, 0), {(1, 1, 0): backwards}),
        (along, 0, 33, (8, 64), (0, 0, 5), {(0, 0, 3): pieces, (0, 0, 1): dropped}), (along, 8, 1, (16, 64), (0, 0, 9), {}),
        (down, 5, 3, (32, 16), (0, 25, 1), {(0, 7, 1): backwards}), (down, 5, 7, (32, 16), (1, 25, 1), {}),
        (down, 37, 3, (64, 32), (0, 25, 5), {(0, 25, 9): repetitions, (0, 25, 1): dropped}),
        (down, 37, 23, (64, 32), (1, 25, 13), {}),
        (odd, 9, 41, (32, 64), (1, 16, 11), {(1, 16, 7): repetitions, (1, 16, 14): pieces}),
    ):
        got = owner(row, column, shape, *layout)
        assert isinstance(got, (tuple, list)) and len(got) == 3, f"owner should return three numbers, and returned {got!r}."
        if tuple(got) != right:
            hint = known.get(tuple(got), "")
            if got[1] >= 32:
                hint = "A warp has lanes 0 to 31: its grid of pieces repeats from warp to warp."
            part = next(name for name, a, b in zip(("warp", "lane", "register"), got, right, strict=True) if a != b)
            raise AssertionError(
                f"element ({row}, {column}) of {shape} in BlockedLayout{layout} is held by (warp, lane, register) {right}, "
                f"not {tuple(got)}: the {part} is wrong. {hint}"
            )


check_owner(owner).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab3_gluon as hidden
hidden.owner(owner).raise_if_wrong()
### END HIDDEN TESTS

# %%
layouts = {
    "[1, 4] [4, 8] [4, 1], order [1, 0]": ((1, 4), (4, 8), (4, 1), (1, 0)),
    "[4, 1] [8, 4] [1, 4], order [0, 1]": ((4, 1), (8, 4), (1, 4), (0, 1)),
}
figure, axes = plt.subplots(1, 2, figsize=(9.6, 4.6), layout="constrained")
for ax, (name, layout) in zip(axes, layouts.items(), strict=True):
    held = [[owner(row, column, (32, 32), *layout) for column in range(32)] for row in range(32)]
    ax.imshow([[lane for _, lane, _ in line] for line in held], cmap="viridis", aspect="auto")
    for row in range(32):
        for column in range(32):
            if held[row][column][1] == 5:
                ax.text(column, row, held[row][column][0], ha="center", va="center", color="white", fontsize=6)
    ax.set(xlabel="column", ylabel="row")
    ax.set_title(f"BlockedLayout {name}", loc="left", fontsize=9, fontweight="bold")
figure.suptitle("Lane that holds each element (colour); lane 5 carries its warp's number", fontsize=10)
plt.show()

# %% [markdown]
# Memory answers in **sectors** of 32 bytes. When a warp loads 32 numbers of 4 bytes that lie side by side, it gets 4
# sectors and needs all of them. When they lie a row apart, it gets 32 sectors and needs an eighth of each.

# %% [markdown]
# ### Question 2.2: A transpose with two layouts {points}
#
# $Y = X^\top$, tile by tile. Read along the rows of $X$, and neighbouring lanes write elements of $Y$ that lie a whole row
# apart. Read along the columns, and it is the load that suffers. The way out is a layout to read, a layout to write,
# and `gl.convert_layout` between them, which moves the data between threads through shared memory.
#
# Write the body of `transpose`, with `gl.convert_layout`. Each program loads and stores one tile of 32 × 32, 4-byte
# elements. `x_ptr` is (m, n), its rows `x_stride` elements apart; `y_ptr` is (n, m), its rows `y_stride` elements
# apart. Any size and any stride must work: nothing outside of X is read, and nothing outside of Y written. The program
# has 4 warps. The check counts sectors: at whole tiles, not one more than needed, in the load and in the store.
#
# You can do it with `gl.BlockedLayout`, `gl.arange(0, 32, gl.SliceLayout(1, layout))` for rows,
# `SliceLayout(0, layout)` for columns, `[:, None]`, `[None, :]`, `gl.load(pointers, mask=...)`,
# `gl.convert_layout(tensor, layout)` and `gl.store(pointers, tensor, mask=...)`. Layouts are compile-time values: `name: gl.constexpr = ...`.
#
# {hint idea}
# Neighbouring lanes must hold neighbours in memory, once for the load and once for the store; those are two different
# dimensions.
#
# {hint plan}
# Two blocked layouts with 4 warps that cover 32 × 32. Rows, columns and mask in the first one, the load, one
# conversion; rows, columns and mask again in the second one, the store.
#
# {hint line}
# Pointers and masks belong to a layout: after the conversion those of the load no longer fit, so compute them anew with
# slices of the second layout.

# %% nbgrader={"grade_id": "q2_2", "solution": true}
# %%writefile lab3_transpose.py
"""Y = X transposed: one program turns one tile of 32 x 32."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def transpose(x_ptr, y_ptr, m, n, x_stride, y_stride):
    row = gl.program_id(0) * 32  # the tile's first row and column in X
    column = gl.program_id(1) * 32
    ### BEGIN SOLUTION
    reading: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    writing: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    rows = row + gl.arange(0, 32, gl.SliceLayout(1, reading))
    columns = column + gl.arange(0, 32, gl.SliceLayout(0, reading))
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    tile = gl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask)
    tile = gl.convert_layout(tile, writing)
    rows = row + gl.arange(0, 32, gl.SliceLayout(1, writing))
    columns = column + gl.arange(0, 32, gl.SliceLayout(0, writing))
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    gl.store(y_ptr + columns[None, :] * y_stride + rows[:, None], tile, mask=mask)
    ### END SOLUTION

# %% nbgrader={"grade_id": "q2_2_tests", "grade": true, "points": 8}
@check("2.2", "Transpose")
def check_transpose(text):
    for m, n in ((32, 64), (96, 32), (45, 70), (3, 65), (33, 1)):
        run = expect_kernel(text, *transpose_launch(m, n), rtol=0, atol=0, compiles=(m, n) == (45, 70),
                            hint=f"X is ({m}, {n}). Where is row i, column j of X in Y?")
        expect_kernel(text, *transpose_launch(m, n, spare=3), rtol=0, atol=0,
                      hint=f"Rows of X ({m}, {n}) lie x_stride = {n + 3} elements apart, and rows of Y y_stride = {m + 3}.")
        for e in run.events:
            if e.kind in ("load", "store") and e.bytes and m % 32 == n % 32 == 0:
                assert e.bytes <= 4 * 32 * 32, f"line {e.line} moves {e.bytes} bytes; a program moves one 32 x 32 tile."
                assert 32 * e.sectors <= e.bytes, (
                    f"X is ({m}, {n}): the {e.kind} at line {e.line} moves {e.bytes} bytes and touches {e.sectors} "
                    f"sectors of 32 bytes; {e.bytes // 32} would do. What do neighbouring lanes hold?"
                )


check_transpose(text_of("lab3_transpose.py")).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab3_gluon as hidden
hidden.transpose(text_of("lab3_transpose.py")).raise_if_wrong()
### END HIDDEN TESTS

# %%
_, run = simulate_launch(answered("lab3_transpose.py"), transpose_launch(32, 32)[0], timeline=True)
for event in run.events:
    if event.bytes:
        print(f"{event.kind:6} line {event.line}: {event.bytes} bytes, {event.sectors} sectors of 32 bytes, "
              f"{event.bytes / 32 / event.sectors:.0%} of what came was used")

# %% [markdown]
# # Part 3: Copies that run on their own
#
# An ordinary load ends in registers, and the thread that uses the value waits. An **asynchronous copy** goes to shared
# memory and does not hold anybody up. The price: somebody has to say when it is over.
#
# `cp.async` is the older kind. Each thread copies its own few bytes. Copies are collected into **groups**:
#
# ```python
# async_copy.async_load(ring.index(slot), pointers, mask=...)    # start; returns at once
# async_copy.commit_group()        # all copies started since the last commit are one group
# async_copy.wait_group(2)         # wait until at most 2 groups are still under way
# ```
#
# (Before Triton 3.8, Gluon called it `async_copy.async_copy_global_to_shared`. The course adds the newer name there.)
#
# `wait_group` counts groups in the order in which they were committed: at most the last two are still under way. So a
# pipeline of three slots keeps two groups under way while it works on the third.
#
# In Gluon the compiler adds what the hardware asks for beyond that: `wait_group` waits for the copies of the *own* thread
# only, and a barrier of all threads must follow before one thread reads what another one copied. The same holds after
# `mbarrier.init`. If you write CUDA one day, `__syncthreads()` is yours to write.
#
# There are two kinds of loops. `for i in range(n)` runs on the GPU, and `i` is known only there. `for i in
# gl.static_range(3)` is unrolled by the compiler, and `i` is a constant in each copy of the body. A variable keeps its
# kind: what was a constant before a `range` loop cannot become a run-time value inside of it.

# %% [markdown]
# ### Question 3.1: A cp.async pipeline {points}
#
# Write the loop of `add`: `c = a + b`, `TILES` tiles of `TILE` elements for each program, through rings of
# `STAGES` slots (1 ≤ STAGES ≤ TILES). Issue the copies of the first `STAGES - 1` tiles before the loop. In step `i` issue
# those of tile `i + STAGES - 1` if there is one, wait until tile `i` has arrived, and add it. `start_copy(...)` issues one
# copy. Its slot is the tile's number modulo `STAGES`. All copies must be over when the kernel ends.
#
# The check counts: each tile comes once and is read from its slot once, and when tile `i` is read, the copies of all
# tiles before tile `i + STAGES` have been issued. With three slots a program takes less than 0.6 of the model cycles
# that it takes with one.
#
# `ring.index(slot).load(layout)` reads a slot into registers. An empty commit still counts as a group. So it is simplest to
# commit in every step, also when nothing was issued: then the number that you give to `wait_group` always means "tile `i` has
# arrived".
#
# {hint idea}
# Keep `STAGES - 1` groups under way while you work on one tile. Each step issues one group, waits for the oldest, and
# adds.
#
# {hint plan}
# Before the loop: for each of the first tiles two copies and one commit. In the loop: the copies of the tile that is
# `STAGES - 1` ahead, if it exists; one commit; a wait; two loads from shared memory; one store to memory with a mask.
#
# {hint line}
# Count the groups: after the commit of step `i` there are `i + STAGES` of them, and tile `i` is the one with number `i`
# from 0. How many younger ones may still be under way? That only works if every step commits.

# %% nbgrader={"grade_id": "q3_1", "solution": true}
# %%writefile lab3_async_copy.py
"""c = a + b with cp.async: tiles of both are under way while earlier ones are added."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def start_copy(ring, slot, ptr, start, n, TILE: gl.constexpr, layout: gl.constexpr):
    """Start the copy of elements start .. start+TILE-1 into a slot. Nothing behind element n is touched."""
    at = start + gl.arange(0, TILE, layout)
    async_copy.async_load(ring.index(slot), ptr + at, mask=at < n)


@gluon.jit
def add(a_ptr, b_ptr, c_ptr, n, TILE: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    # Element after element, without a swizzle (Part 4 says what that is).
    plain: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    a_ring = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], plain)
    b_ring = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], plain)
    first = gl.program_id(0) * (TILE * TILES)  # this program adds TILES tiles from here on
    ### BEGIN SOLUTION
    for i in gl.static_range(STAGES - 1):
        start_copy(a_ring, i, a_ptr, first + i * TILE, n, TILE, layout)
        start_copy(b_ring, i, b_ptr, first + i * TILE, n, TILE, layout)
        async_copy.commit_group()
    for i in range(TILES):
        ahead = i + STAGES - 1
        if ahead < TILES:
            start_copy(a_ring, ahead % STAGES, a_ptr, first + ahead * TILE, n, TILE, layout)
            start_copy(b_ring, ahead % STAGES, b_ptr, first + ahead * TILE, n, TILE, layout)
        async_copy.commit_group()
        async_copy.wait_group(STAGES - 1)
        total = a_ring.index(i % STAGES).load(layout) + b_ring.index(i % STAGES).load(layout)
        at = first + i * TILE + gl.arange(0, TILE, layout)
        gl.store(c_ptr + at, total, mask=at < n)
    ### END SOLUTION

# %% nbgrader={"grade_id": "q3_1_tests", "grade": true, "points": 10}
@check("3.1", "cp.async pipeline")
def check_async_copy(text):
    for n, tiles, stages in ((2051, 5, 2), (2001, 4, 3), (700, 3, 1), (1089, 4, 4)):
        run = expect_kernel(text, *async_copy_launch(n, tiles, stages), rtol=0, atol=0, seeds=(None, 1), compiles=stages == 3,
                            hint=f"n = {n}, {tiles} tiles for each program, {stages} slots. Which tile lies in which slot?")
        issued = copies_before_the_first_read(run)
        assert issued >= 2 * stages, (
            f"{issued // 2} tiles have been ordered when tile 0 is read, and with {stages} slots {stages} should be: "
            "issue the copies of tile i + STAGES - 1 before you wait for tile i."
        )
    slow, fast = (simulate_launch(text, async_copy_launch(2048, 8, stages)[0])[1].cycles[0] for stages in (1, 3))
    assert fast < 0.6 * slow, (
        f"three slots take {fast:.0f} model cycles, one slot {slow:.0f}: the copies wait for each other. Is tile "
        "i + STAGES - 1 issued before you wait for tile i, and does the wait leave the younger groups under way?"
    )


check_async_copy(text_of("lab3_async_copy.py")).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab3_gluon as hidden
hidden.async_copy(text_of("lab3_async_copy.py")).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# The simulator keeps a clock. Its cost model is simple: every unit runs at its peak rate, a copy takes 600 cycles and its
# share of the bandwidth. Read it as a ruler, not as a stopwatch. It shows what waits for what. Grey bars wait: plain
# for a barrier, hatched for a product, dotted for a copy.
#
# **Before you run.** Eight tiles, one slot against three. What will the ratio of the times be?

# %%
guesses["cycles with one slot / cycles with three"] = None
until, taken = None, []
for stages in (1, 3):
    name = f"add with {stages} {'slot' if stages == 1 else 'slots'}"
    run = show_timeline(answered("lab3_async_copy.py"), async_copy_launch(2048, 8, stages)[0], name, until)
    until = until or 1.05 * run.cycles[0]  # both pictures to one scale, with matplotlib's margin
    taken.append(run.cycles[0])
beside_guess("cycles with one slot / cycles with three", taken[0] / taken[1])

# %% [markdown]
# Less than three times: three slots share the latency of a copy among three tiles. The bandwidth, the issuing and the
# addition are paid for every tile as before, and the first tiles have nothing to hide behind.

# %% [markdown]
# ## TMA and mbarriers
#
# With `cp.async` all threads compute addresses. With **TMA** one thread says: tile (row, column) of this tensor into that
# slot. Row and column are those of the tile's first element: they count elements, not tiles. The tensor is described
# once, by a *descriptor* that the host makes. What lies outside of the tensor arrives as
# zeros and counts as bytes: announce whole tiles, so that the number of bytes is the same for every
# tile. The copy reports to an **mbarrier**, eight bytes of shared memory that count.
#
# ![A ring of two slots over six tiles: copies fill a slot, the barrier of the slot flips its phase, the wait for parity 0, 0, 1, 1 passes](assets/lab3_ring.svg)
#
# ```python
# mbarrier.init(bar, count=1)             # a phase is over after 1 arrival, and when all announced bytes are there
# mbarrier.expect(bar, NBYTES)            # announce bytes; this is the arrival
# tma_load(desc, [row, column], bar, slot)  # start the copy; its bytes count down at the barrier
# mbarrier.wait(bar, parity)              # go on when the phase of this parity is over
# ```
#
# A barrier goes through phases 0, 1, 2, ... and starts the next one at once. You wait with the **parity** of the phase, its
# number modulo 2. A slot that is used again has its barrier's next phase: tile `i` lies in slot `i % STAGES` and is
# phase `i // STAGES` of that slot's barrier.
#
# ![A table of what one barrier counts: after init one arrival is missing; each expect is the arrival and announces 2048 bytes; when the bytes are there the phase ends, the parity flips, and the wait for the old parity passes](assets/lab3_barrier_states.svg)

# %% [markdown]
# ### Question 3.2: A TMA ring {points}
#
# Write the middle of `sum_of_squares`: for 16 rows, add up the squares of `tiles` tiles, through a ring of `STAGES` slots.
#
# 1. Initialize the barriers `full.index(0)`, `full.index(1)`, ...
# 2. Issue the copies of the first `STAGES` tiles, tile `i` into slot `i % STAGES`. There may be fewer tiles than slots: `expect`
#    and `tma_load` take `pred=condition` and do nothing where it is false.
# 3. In step `i`: wait for the tile, read it into registers and convert it to fp32 (`.to(gl.float32)`), refill its slot
#    with tile `i + STAGES` if there is one, and add `gl.sum(x * x, 1)` to `total` (refill first, or add first).
#
# The check counts: each tile comes once, by `tma_load`, and is read from its slot once, and when tile `i` is read, the copies of
# all tiles before tile `i + STAGES` have been issued. With three slots a program takes less than 0.65 of the model cycles that it
# takes with one.
#
# One more rule. Threads read and write shared memory through one path, the TMA through another (the *async proxy*).
# Between your read and the copy that overwrites the slot there must be a `fence_async_shared()`. It is a rule of the
# hardware's memory model, and the simulator holds you to it. Sometimes the compiler puts a forgotten fence back; below you
# will see when, and what happens when it does not.
#
# {hint idea}
# The barrier of a slot tells when its tile is there. Whoever issues a copy announces its bytes first, at the same
# barrier.
#
# {hint plan}
# Initialize; for each slot announce and copy, if there is such a tile. In each step: wait, read, fence, announce and
# copy the tile that comes into this slot next, if there is one, and add.
#
# {hint line}
# The parity is that of the slot's round, not that of the tile. And the refill may only be issued when the tile is in
# registers.

# %% nbgrader={"grade_id": "q3_2", "solution": true}
# %%writefile lab3_tma_ring.py
"""Sum of squares of each row, by a ring of TMA copies: the first half of an RMSNorm."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from utils.attention.gluon.shared import tma_load  # its name differs between versions of Triton


@gluon.jit
def sum_of_squares(x_desc, y_ptr, rows, columns, STAGES: gl.constexpr):
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    NBYTES: gl.constexpr = x_desc.block_type.nbytes
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, COLUMNS], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    row = gl.program_id(0) * ROWS
    tiles = gl.cdiv(columns, COLUMNS)
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    ### BEGIN SOLUTION
    for i in gl.static_range(STAGES):  # public
        mbarrier.init(full.index(i), count=1)  # public
    for i in gl.static_range(STAGES):  # public
        mbarrier.expect(full.index(i), NBYTES, pred=i < tiles)
        tma_load(x_desc, [row, i * COLUMNS], full.index(i), ring.index(i), pred=i < tiles)
    for i in range(tiles):  # public
        slot = i % STAGES  # public
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)  # public
        x = ring.index(slot).load(layout).to(gl.float32)
        fence_async_shared()  # public
        more = i + STAGES < tiles
        mbarrier.expect(full.index(slot), NBYTES, pred=more)
        tma_load(x_desc, [row, (i + STAGES) * COLUMNS], full.index(slot), ring.index(slot), pred=more)
        total += gl.sum(x * x, 1)
    ### END SOLUTION
    at = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    gl.store(y_ptr + at, total, mask=at < rows)

# %% nbgrader={"grade_id": "q3_2_tests", "grade": true, "points": 12}
@check("3.2", "TMA ring")
def check_tma_ring(text):
    for rows, columns, stages, dtype in ((16, 320, 2, torch.float16), (40, 440, 3, torch.bfloat16),
                                         (19, 72, 4, torch.float16), (16, 192, 1, torch.float16)):
        launch, expected = tma_ring_launch(rows, columns, stages, dtype)
        run = expect_kernel(text, launch, expected, rtol=1e-4, atol=1e-3, seeds=(None, 1), compiles=stages == 3,
                            hint=f"{rows} rows, {columns} columns, {stages} slots.",
                            mistakes=partial(ring_mistakes, launch, expected))
        copies = sum(e.kind == "copy in" for e in run.events)
        tiles = math.ceil(columns / 64)
        assert copies == tiles, f"{columns} columns are {tiles} tiles, and a program starts {copies} TMA copies."
        issued = copies_before_the_first_read(run)
        assert issued >= min(stages, tiles), (
            f"{issued} tiles have been ordered when tile 0 is read, and with {stages} slots {min(stages, tiles)} should be."
        )
    slow, fast = (simulate_launch(text, tma_ring_launch(16, 512, stages)[0])[1].cycles[0] for stages in (1, 3))
    assert fast < 0.65 * slow, (
        f"three slots take {fast:.0f} model cycles, one slot {slow:.0f}: the copies wait for each other. How many are "
        "under way before the loop, and when is a slot filled again?"
    )


check_tma_ring(text_of("lab3_tma_ring.py")).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab3_gluon as hidden
hidden.tma_ring(text_of("lab3_tma_ring.py")).raise_if_wrong()
### END HIDDEN TESTS

# %%
_ = show_timeline(answered("lab3_tma_ring.py"), tma_ring_launch(16, 512, 3)[0], "TMA ring of 3 slots")
for stages in (1, 2, 3, 4, 5, 6, 7, 8):
    _, run = simulate_launch(answered("lab3_tma_ring.py"), tma_ring_launch(16, 2048, stages)[0])
    print(f"{stages} slot{' ' if stages == 1 else 's'}: {run.cycles[0]:7,.0f} model cycles for 32 tiles of 2 KiB")

# %% [markdown]
# ## What the host does
#
# The checks launch your kernels for you. By hand it is three steps: describe each tensor that the TMA shall copy, choose
# the grid, call. On a Hopper GPU you would leave out `simulate()`, and the tensors would be on the GPU.

# %%
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

x, y = torch.randn(40, 440, dtype=torch.float16), torch.zeros(40)
block = [16, 64]  # what one copy moves
x_desc = TensorDescriptor(x, list(x.shape), list(x.stride()), block, gl.NVMMASharedLayout.get_default_for(block, gl.float16))
module = load_kernels(text_of("lab3_tma_ring.py"), tma_ring_launch(40, 440, 3)[0])
with gluon_cpu.simulate() as run:
    grid = (math.ceil(x.shape[0] / block[0]),)  # one program for each 16 rows
    module.sum_of_squares[grid](x_desc, y, *x.shape, STAGES=3, num_warps=4)
print(f"largest difference {(y - x.float().square().sum(1)).abs().max().item():.1e}; the layout is {x_desc.layout}")

# %% [markdown]
# ## What a wrong barrier looks like
#
# On a GPU a wrong parity means one of two things. The wait never passes: the kernel hangs, and you see nothing. Or it
# passes too early: you read what was there before, and with luck that is even right. Here both have a name. The next cell
# has a small kernel with one slot and one wait, and breaks it in two ways. A timeline shows how far it came. Framed in red
# is what the report is about; the dashed arrow is the order that is missing: nothing makes the second wait for the first.
#
# **Before you run.** (a) The parity of the wait is turned around. (b) The barrier expects 64 bytes too many. Which
# hangs, which reads too early, and where?

# %%
guesses["(a) turned parity"] = None  # "hangs" or "reads too early"
guesses["(b) 64 bytes too many"] = None
BROKEN = '''
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from utils.attention.gluon.shared import tma_load


@gluon.jit
def read_one(x_desc, y_ptr, TURN: gl.constexpr, EXTRA: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slot = gl.allocate_shared_memory(x_desc.dtype, [16, 64], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, x_desc.block_type.nbytes + EXTRA)
    tma_load(x_desc, [0, 0], full, slot)
    mbarrier.wait(full, 0 ^ TURN)
    gl.store(y_ptr, gl.max(gl.max(slot.load(layout).to(gl.float32), 1), 0))
'''
for what, turn, extra in (("right", 0, 0), ("(a) turned parity", 1, 0), ("(b) 64 bytes too many", 0, 64)):
    launch = Launch("read_one", (1,), dict(x_desc=Tile(torch.ones(16, 64).half(), [16, 64]), y_ptr=torch.zeros(1),
                                           TURN=turn, EXTRA=extra), outputs=("y_ptr",))
    report, run = simulate_failure(BROKEN, launch)
    print(f"{what}: {report or simulate_launch(BROKEN, launch)[0]['y_ptr'].item()}\n")
    if report:
        beside_guess(what, "hangs" if "deadlock" in report else "reads too early" if "race" in report else report)
        plot_run(run, what)

# %% [markdown]
# ## Who put the fence back?
#
# Take your ring of 3.2, delete the fence, and compile. The next cell counts the fences for the async proxy in the machine
# code, with and without yours. Then it prints what the compiler made of your own lines.
#
# **Before you run.** How many fences will be left in your ring without yours?

# %%
guesses["fences in the machine code without yours"] = None


def without_fences(text: str) -> str:
    """The text of a file with `pass` in place of every fence."""
    return "\n".join(line.split("fence_async_shared()")[0] + "pass" if line.strip().startswith("fence_async_shared()")
                     else line for line in text.splitlines()) + "\n"


ring = tma_ring_launch(40, 440, 3)[0]
if offline_compile_support():
    text = text_of("lab3_tma_ring.py")
    with_fence, without = (compile_for_hopper(kernel, ring) for kernel in (text, without_fences(text)))
    print(f"3.2 with your fence: {with_fence['proxy fences']} in the machine code; without: {without['proxy fences']}")
    beside_guess("fences in the machine code without yours", without["proxy fences"])
    print()
    print(machine_code(text, ring, "tma_load(|mbarrier.|.load(layout)|fence_async_shared()", with_fence))
else:
    print(offline_compile_support().reason)
if (RECORDED / "gluon_fences.json").exists():
    fences = json.loads((RECORDED / "gluon_fences.json").read_text())
    print(f"\nRecorded on an {fences['gpu']} with Triton {fences['triton']}, not measured here: launches with wrong results.")
    display(pd.DataFrame(fences["rows"]))

# %% [markdown]
# In the ring the compiler put the fence back: it saw a read and then a TMA copy into the same memory, in one partition.
# What it sees depends on its version. Triton 3.6 puts a fence before a TMA *load*, and none before a TMA *store*; so the
# recorded 4.1 and 5.1 without their fence gave wrong numbers in *every* launch. Triton 3.7 puts both back. Neither does so
# *between* partitions, where the read and the copy are in different functions: there it is up to you. In the record the
# ring of 3.4 came through without that fence. That is luck, not a proof: DeepEP, a library for mixtures of experts, once
# left out the fence between a read and the TMA copy that overwrites it, and had to repair it.
#
# `UTMALDG` is a TMA copy, `SYNCS` an mbarrier operation, `FENCE.VIEW.ASYNC` the fence. `BAR.SYNC` is a barrier of all
# threads that you did not write: the compiler puts one where all threads must be done before one of them goes on.

# %% [markdown]
# ### Question 3.3: Phases and proofs {points}
#
# 1. Why can a wait tell phase 0 from phase 1, but not from phase 2? What makes that enough for a ring?
# 2. On a GPU (a) may still print 1.0, when an earlier launch left the same tile there. Why is it a race all the same,
#    and why does the simulator find it in *every* run, also when its copy happens to be fast?
# 3. A fresh barrier lets `wait(bar, 1)` pass at once. Which partition of a producer and consumer pair makes use of that?
# 4. From your table of slots: from how many on do more slots gain less than 5 %? Which number sets that point?
#
# {hint idea}
# Think of what the barrier can show (one bit), and of who may be how far ahead of whom.
#
# {hint plan}
# 1: compare the bits of phases 0, 1, 2; then ask how far the waiting side can fall behind in a ring. 2: which
# instruction makes the read come after the copy? 3: who may start at once? 4: find the row in your table, then compute
# latency times bandwidth.
#
# {hint line}
# In 4 use the cost model's own numbers: 600 cycles and 20 bytes per cycle, and divide by the size of a slot.

# %% [markdown] nbgrader={"grade_id": "q3_3", "grade": true, "solution": true, "points": 4}
# 1. The barrier shows only the parity of the running phase. In a ring nobody can be two phases ahead: a slot is refilled
#    only after its reader has been through the phase, so the waiting side is at most one phase behind.
# 2. Nothing puts the read after the copy: the wait for parity 1 passes at once on a fresh barrier. A tile that an earlier launch left
#    there hides it.
#    The simulator asks whether the order is *known*, from waits and arrivals (vector clocks), not which came first.
# 3. The producer: all slots are free at first, so it waits for the parity of "the phase before the first" and goes on.
# 4. Where copies under way cover the latency: latency × bandwidth of the SM (600 cycles × 20 bytes = 12 KB, 6 slots of
#    2 KiB); more slots only wait for the bandwidth. (In the table the sixth slot gains 11 %, the seventh 3 %.)
#
# === BEGIN MARK SCHEME ===
# 1 point each. 1: parity = phase mod 2, and the ring keeps both sides within one phase. 2: no order between copy and
# read; found by order, not by timing. 3: producer, slots are empty at the start. 4: a number from the student's table and
# latency × bandwidth (Little).
# === END MARK SCHEME ===

# %% [markdown]
# ### Bonus Question 3.4: Repair a ring {points}
#
# `scale` should compute `y = x * factor` with two partitions: a producer that loads, a consumer that scales and stores.
# **Five things in it are wrong.** Some hang, some race; one shows only under some timings. The next cell writes the
# file, the one after it runs it.
#
# Write `repairs`. It returns a dict from a wrong line (copied whole, without its indentation) to what should stand there
# instead. A replacement may be several lines, separated by `\n`, or `"pass"` to remove a line. At most six lines may
# change. Work like with a compiler: repair what the report names, run, read the next report. The check writes the file
# with your repairs to `lab3_repaired.py`; the line numbers of its reports are those of that file.
#
# The repaired kernel is still this ring: `load_tiles` loads each tile once, `scale_tiles` stores each once, all slots are used,
# and three slots take less than 0.8 of the model cycles that one takes.
#
# {hint idea}
# Every wait needs somebody who ends its phase, and every slot needs to be full before it is read and empty before it is
# filled.
#
# {hint plan}
# Repair one report at a time. Write down for each barrier: who arrives, how often in a phase, which bytes are
# announced, and which parity the first wait has. Then look at the order of read, fence and arrival in the consumer, and
# at what the second store may overwrite.
#
# {hint line}
# One mistake is a line at the wrong place: removing it there and adding it elsewhere changes two lines. Run with other
# timings: one of the five shows only then.

# %% nbgrader={"grade_id": "broken_ring", "locked": true}
# %%writefile lab3_broken.py
"""y = x * scale, tile by tile: a TMA ring between a producer and a consumer. Five lines of it are wrong."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from utils.attention.gluon.shared import tma_load, tma_store


@gluon.jit
def load_tiles(x_desc, ring, full, empty, tiles, STAGES: gl.constexpr):
    for i in range(tiles):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), (i // STAGES) & 1)
        mbarrier.expect(full.index(slot), x_desc.block_type.nbytes // 2)
        tma_load(x_desc, [0, i * x_desc.block_type.shape[1]], full.index(slot), ring.index(slot))


@gluon.jit
def scale_tiles(y_desc, ring, out, full, empty, tiles, factor, STAGES: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    for i in range(tiles):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        mbarrier.arrive(empty.index(slot), count=1)
        x = ring.index(slot).load(layout)
        tma.store_wait(1)
        out.store(x * factor)
        fence_async_shared()
        tma_store(y_desc, [0, i * y_desc.block_type.shape[1]], out)
    tma.store_wait(0)


@gluon.jit
def scale(x_desc, y_desc, tiles, factor, STAGES: gl.constexpr):
    ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 16, 32], x_desc.layout)
    out = gl.allocate_shared_memory(y_desc.dtype, [16, 32], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize([
        (scale_tiles, (y_desc, ring, out, full, empty, tiles, factor, STAGES)),
        (load_tiles, (x_desc, ring, full, empty, tiles, STAGES)),
    ], [1], [24])

# %%
try:
    simulate_launch(repaired(text_of("lab3_broken.py"), {}), repair_launch(2)[0])
except AssertionError as report:
    print(report)

# %% nbgrader={"grade_id": "bonus_3_4", "solution": true}
def repairs() -> dict[str, str]:
    """{a wrong line of lab3_broken.py: what should stand there}"""
    ### BEGIN SOLUTION
    return {
        "mbarrier.wait(empty.index(slot), (i // STAGES) & 1)":
            "mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)",
        "mbarrier.expect(full.index(slot), x_desc.block_type.nbytes // 2)":
            "mbarrier.expect(full.index(slot), x_desc.block_type.nbytes)",
        "mbarrier.arrive(empty.index(slot), count=1)": "pass",
        "x = ring.index(slot).load(layout)":
            "x = ring.index(slot).load(layout)\nfence_async_shared()\nmbarrier.arrive(empty.index(slot), count=1)",
        "tma.store_wait(1)": "tma.store_wait(0)",
        "mbarrier.init(empty.index(i), count=2)": "mbarrier.init(empty.index(i), count=1)",
    }
    ### END SOLUTION


# %% nbgrader={"grade_id": "bonus_3_4_tests", "grade": true, "points": 6}
@check("Bonus 3.4", "Repair")
def check_repairs(repairs):
    text = repaired(text_of("lab3_broken.py"), repairs())
    Path("lab3_repaired.py").write_text(text)  # reports count the lines of this file
    for stages in (2, 1, 3):
        expect_kernel(text, *repair_launch(stages), rtol=0, atol=0, seeds=(None, 1, 2, 3))
    slow, fast = (simulate_launch(text, repair_launch(stages, 8)[0])[1].cycles[0] for stages in (1, 3))
    assert fast < 0.8 * slow, f"three slots take {fast:.0f} model cycles, one {slow:.0f}: a repair serialized the ring."


check_repairs(repairs).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab3_gluon as hidden
hidden.repairs(text_of("lab3_broken.py"), repairs).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# # Part 4: Tensor cores
#
# On Hopper a warpgroup multiplies with `wgmma`. Its operands lie in shared memory (the left one may also lie in
# registers), its accumulator in the registers of all 128 threads:
#
# ```python
# layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])  # version, warps, one warp's instruction
# acc = gl.zeros([64, N], gl.float32, layout)
# acc = warpgroup_mma(a, b, acc, is_async=True)    # a (64, K) and b (K, N) in shared memory; returns at once
# acc = warpgroup_mma_wait(0, deps=[acc])          # until at most 0 products are under way; then acc may be read
# ```
#
# `version [3, 0]` is Hopper's. `[16, N, 16]` is one warp's share of an instruction: 16 rows, N columns, and 16 steps along
# K, which are 32 bytes of a 16-bit type. Four warps stand along the rows, 16 rows each: 64. Who holds what:
#
# ![16 rows of a wgmma accumulator: row r is held by lanes 4 r to 4 r + 3 with two neighbouring columns each, row r + 8 by the same lanes; lane 5 holds columns 2, 3, 10 and 11 of rows 1 and 9](assets/lab3_wgmma_fragment.svg)
#
# Tiles lie in shared memory in a *swizzled* layout, `NVMMASharedLayout`. Shared memory has 32 **banks**, and each gives 4
# bytes in a turn. A read whose addresses fall into the same bank takes several turns: a **bank conflict**. Rows of 128
# bytes are as wide as all banks together, so a column of plain rows lies in a single bank. The swizzle moves chunk `c` of row
# `r` to place `c` XOR `r`:
#
# ![Eight rows of eight chunks: plain rows keep chunk 2 of every row in banks 8 to 11, eight turns; swizzled rows spread it over all 32 banks, one turn](assets/lab3_swizzle.svg)
#
# The TMA swizzles on the way in, so the descriptor's layout and the tile's layout are the same object.
#
# `wgmma` reads shared memory through the async proxy, as the TMA does. Until the wait, the product reads its operands
# and writes its accumulator. Refilling a slot before that wait corrupts the product.
#
# On Blackwell this instruction is `tcgen05`: its accumulator lies in *tensor memory*, a memory of its own beside the
# registers, a single thread issues it, and two SMs may share one product (2-CTA). With 2-CTA each SM loads half of B. More
# on that in 5.4.
#
# Before the question, the next cell lets Triton count bank conflicts: a tile of 64 rows of 128 bytes, stored by lanes that
# stand along a row or along a column. The count is that of *extra* turns: 0 means that one turn was enough.
#
# **Before you run.** How many extra turns will the lanes along a column need in plain rows, and in the swizzle of 128 bytes?

# %%
guesses["extra turns, lanes along a column, plain rows"] = None
guesses["extra turns, lanes along a column, swizzle of 128 bytes"] = None
CONFLICTS = '''
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def conflicts(y_ptr, shared: gl.constexpr, layout: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], shared)
    x = gl.full([64, 64], 1.0, gl.float16, layout)
    tile.store(x)
    gl.store(y_ptr, gl.bank_conflicts(x.type, tile.type))
'''
from triton.experimental.gluon import language as gl

rows = []
for name, shared in (("plain rows", gl.SwizzledSharedLayout(8, 1, 1, [1, 0])),
                     *((f"swizzle of {width} bytes", gl.NVMMASharedLayout(width, 16, rank=2)) for width in (32, 64, 128))):
    row = {"layout of the tile": name}
    for how, layout in (("lanes along a row", gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])),
                        ("lanes along a column", gl.BlockedLayout([1, 8], [32, 1], [1, 4], [0, 1]))):
        launch = Launch("conflicts", (1,), dict(y_ptr=torch.zeros(1, dtype=torch.int32), shared=shared, layout=layout),
                        outputs=("y_ptr",), file="conflicts.py")
        row[how] = simulate_launch(CONFLICTS, launch)[0]["y_ptr"].item()
    rows.append(row)
display(pd.DataFrame(rows))
for row in (rows[0], rows[-1]):
    beside_guess(f"extra turns, lanes along a column, {row['layout of the tile']}", row["lanes along a column"])


# %% [markdown]
# Plain rows make the lanes along a column take eight turns, the seven extra ones of the picture. Every swizzle removes
# them. The narrow swizzles charge the other direction: a tile that is wider than the swizzle is stored as panels of 32 or
# 64 bytes a row, one panel after the other, so the pieces of one row lie in the same banks, four pieces or two. That is
# why `get_default_for` takes the widest swizzle that fits the tile.

# %% [markdown]
# ### Question 4.1: The first wgmma {points}
#
# $C = A B^\top$: `a_desc` is (M, K), `b_desc` is (N, K), as queries and keys are. One program computes one tile of $C$. The
# copies are there, without a ring: load a step, wait, multiply. Write what is missing:
#
# 1. the accumulator's layout, and the accumulator in fp32;
# 2. the product of a step, one `warpgroup_mma`, which adds to the accumulator. `b_tile` is (BLOCK_N, BLOCK_K), and the
#    product wants (BLOCK_K, BLOCK_N): `.permute([1, 0])` of a tile is a *view*, the same bytes read the other way
#    round, and copies nothing. The tiles are overwritten right behind your lines, so the product must be over by then;
# 3. the way out: store `acc` into `c_tile` in the dtype of `c_desc`, tell the async proxy, `tma_store(c_desc, [row,
#    column], c_tile)` once, and wait until it has been read (`tma.store_wait(0)`).
#
# {hint idea}
# The layout of the accumulator decides the instruction: four warps along the rows, 16 rows each, and as many columns as
# the tile has.
#
# {hint plan}
# Accumulator: layout and zeros in fp32. In each step: one asynchronous product that adds to the accumulator, and a
# wait. At the end: convert, store into the tile, fence, TMA store, wait.
#
# {hint line}
# The wait returns the tensor that you may read: the old name is still the one under way. And before the TMA reads what
# you stored there must be a fence.

# %% nbgrader={"grade_id": "q4_1", "solution": true}
# %%writefile lab3_wgmma.py
"""C = A @ B.T, both operands with K contiguous: one warpgroup, one tile of C, products by wgmma."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from utils.attention.gluon.shared import tma_load, tma_store


@gluon.jit
def matmul(a_desc, b_desc, c_desc, k_size):
    BLOCK_M: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    NBYTES: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    a_tile = gl.allocate_shared_memory(a_desc.dtype, [BLOCK_M, BLOCK_K], a_desc.layout)
    b_tile = gl.allocate_shared_memory(b_desc.dtype, [BLOCK_N, BLOCK_K], b_desc.layout)
    c_tile = gl.allocate_shared_memory(c_desc.dtype, [BLOCK_M, BLOCK_N], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    row = gl.program_id(0) * BLOCK_M
    column = gl.program_id(1) * BLOCK_N
    phase = 0
    ### BEGIN SOLUTION
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    ### END SOLUTION
    for k in range(0, k_size, BLOCK_K):
        mbarrier.expect(full, NBYTES)
        tma_load(a_desc, [row, k], full, a_tile)
        tma_load(b_desc, [column, k], full, b_tile)
        mbarrier.wait(full, phase)
        phase ^= 1
        ### BEGIN SOLUTION
        acc = warpgroup_mma(a_tile, b_tile.permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])  # public
        ### END SOLUTION
    ### BEGIN SOLUTION
    c_tile.store(acc.to(c_desc.dtype))
    fence_async_shared()  # public
    tma_store(c_desc, [row, column], c_tile)  # public
    tma.store_wait(0)  # public
    ### END SOLUTION

# %% nbgrader={"grade_id": "q4_1_tests", "grade": true, "points": 10}
@check("4.1", "The first wgmma")
def check_wgmma(text):
    for m, n, k, block_n, dtype in ((64, 128, 64, 128, torch.bfloat16), (100, 72, 200, 32, torch.float16),
                                    (129, 65 * 8, 72, 128, torch.bfloat16)):
        launch, expected = wgmma_launch(m, n, k, block_n, dtype)
        run = expect_kernel(text, launch, expected, rtol=1e-2, atol=2e-2, seeds=(None, 1), compiles=m == 100,
                            hint=f"A is ({m}, {k}), B is ({n}, {k}).", mistakes=partial(wgmma_mistakes, launch, expected))
        products = sum(e.kind == "wgmma" for e in run.events)
        steps = math.ceil(k / 64)
        assert products == steps, f"K = {k} takes {steps} steps, and a program starts {products} products: one a step."
        assert any(e.kind == "copy out" for e in run.events), "C should leave by TMA: into c_tile, then tma_store."
    launch, expected = wgmma_launch(40, 72, 192, 64, torch.float16, Cancelling())
    expect_kernel(text, launch, expected, rtol=1e-2, atol=2e-2,
                  hint="Two steps of these numbers cancel, and their sums overflow in 16 bits: the accumulator is fp32.")


check_wgmma(text_of("lab3_wgmma.py")).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab3_gluon as hidden
hidden.wgmma(text_of("lab3_wgmma.py")).raise_if_wrong()
### END HIDDEN TESTS

# %%
_ = show_timeline(answered("lab3_wgmma.py"), wgmma_launch(64, 128, 512, 128)[0], "C = A Bᵀ, 64 × 128, K = 512")

# %% [markdown]
# ### Question 4.2: What is asynchronous, and who must know {points}
#
# 1. `warpgroup_mma(..., is_async=True)` returns at once. Name the three things that nobody may touch until its wait, and
#    what may go on meanwhile.
# 2. Why does your store into `c_tile` need a fence before `tma_store`, while the product needs none after the TMA copy
#    into its operands?
# 3. Look at your timeline. The tensor cores are idle for most of the time. What would you change, and what does a tile of
#    128 × 128 change about the ratio of products to loads?
#
# {hint idea}
# Ask for each memory who reads or writes it, when, and through which path.
#
# {hint plan}
# 1: list the operands and the result of a product. 2: name the path of your store, of the TMA store, of the TMA copy
# and of the product. 3: compare how FLOPs and bytes grow when both edges of the tile double.
#
# {hint line}
# In 3 count bytes as rows of A plus rows of B: 64 + 128 against 128 + 128.

# %% [markdown] nbgrader={"grade_id": "q4_2", "grade": true, "solution": true, "points": 4}
# 1. The two operand tiles (not to be overwritten) and the accumulator's registers (neither read nor written). If the left
#    operand lies in registers, those as well. Meanwhile: other loads, softmax, further products.
# 2. The store goes through the ordinary path, the TMA reads through the async proxy: the fence makes the store visible
#    there. A TMA copy and wgmma both are in the async proxy, and the wait at the mbarrier orders them.
# 3. Loads are too slow for so little work: more slots, a larger tile, or several products per load. Products grow with
#    the area (×2 for 128 rows at the same N), loads with the edges: 256 rows instead of 192, ×1.33. Half as much again for each byte.
#
# === BEGIN MARK SCHEME ===
# 1: 1.5 points (operands, accumulator, and something that may go on). 2: 1.5 points (two proxies; both in the async
# proxy). 3: 1 point (reuse grows with the tile; a number or ratio).
# === END MARK SCHEME ===

# %% [markdown]
# # Part 5: Flash attention
#
# Now the pieces come together. Scores, probabilities and the output stay in registers. For each block of keys:
# $S = QK^\top$ by `wgmma`, the online softmax on the accumulator, and $O = O\alpha + PV$ by a second `wgmma`, whose left
# operand $P$ comes straight from registers (`gl.convert_layout(p, left)` costs nothing there: both layouts put the same
# elements into the same threads, as the picture in Part 4 shows).
#
# The softmax in base 2 saves a multiplication: $e^{x} = 2^{x \log_2 e}$. With $c = \text{scale} \cdot \log_2 e$ the weights are
# $2^{c\,(s - m)}$, in code `p = gl.exp2(s * c - m * c)`: one multiply-add and one `exp2` for each
# score, since `m * c` is computed once for each row.

# %% [markdown]
# ### Question 5.1: Online softmax in a kernel {points}
#
# The kernel is complete but for two things:
#
# 1. `online_softmax`: mask the keys that do not exist, find the new maximum of each row, the probabilities, the new sum,
#    and the output, which is only rescaled here.
# 2. the division, once, at the end.
#
# `m`, `total` and your factor have the layout `SliceLayout(1, scores)`. The same threads hold row $i$ of the scores and
# row $i$ of the output, but the layouts are different types. To multiply `o` by a factor of each row, convert the factor
# to `gl.SliceLayout(1, output)`; that moves nothing. Then `[:, None]`. `gl.max(x, 1)` and `gl.sum(x, 1)` reduce over the
# columns; `gl.maximum(a, b)` takes the larger of two values, element by element. One way to mask is `gl.where(condition, s,
# float("-inf"))`: $2^{-\infty} = 0$, so a masked key counts nothing.
#
# {hint idea}
# The softmax of all keys is built block by block: when the maximum grows, everything so far must shrink by the same
# factor.
#
# {hint plan}
# Key numbers in a slice of the scores' layout; the mask; the new maximum of each row; the factor from the old to the
# new one; the probabilities; the new sum; the output times the factor. After the loop, the division.
#
# {hint line}
# The factor of the first block is $2^{-\infty} = 0$, and that is right. Keys are counted over all blocks, not within
# one. And a factor for `o` must have the output's slice, not the scores'.

# %% nbgrader={"grade_id": "q5_1", "solution": true}
# %%writefile lab3_softmax.py
"""Attention of one warpgroup: 64 queries a program, online softmax over blocks of keys."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from utils.attention.gluon.shared import tma_load, tma_store


@gluon.jit
def online_softmax(s, m, total, o, c, key, sk):
    """One block of keys. s: scores [64, BLOCK_N]; m, total: maximum and sum of each row so far; o: output so far.

    c is scale * log2(e): softmax(scale * s) = 2^(c * s) / sum. Keys key, key+1, ... belong to the columns of s; those
    from sk on do not exist. Returns p [64, BLOCK_N], the new m and total, and o rescaled to the new maximum.
    """
    scores: gl.constexpr = s.type.layout
    output: gl.constexpr = o.type.layout
    ### BEGIN SOLUTION
    keys = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, scores))
    s = gl.where((keys < sk)[None, :], s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1))
    alpha = gl.exp2((m - top) * c)
    p = gl.exp2((s - top[:, None]) * c)
    total = total * alpha + gl.sum(p, 1)
    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]  # public
    return p, top, total, o
    ### END SOLUTION


@gluon.jit
def attention(q_desc, k_desc, v_desc, o_desc, sk, c):
    """q, o (heads, Sq, D); k, v (heads, sk, D). Program (i, h): rows 64 i .. of head h."""
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[1]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    q_tile = gl.allocate_shared_memory(dtype, [1, BLOCK_M, BLOCK_D], q_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, BLOCK_N, BLOCK_D], v_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    row = gl.program_id(0) * BLOCK_M
    head = gl.program_id(1)
    mbarrier.expect(full, q_desc.block_type.nbytes)
    tma_load(q_desc, [head, row, 0], full, q_tile)
    mbarrier.wait(full, 0)
    phase = 1
    m = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, scores))
    o = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, output)
    q = q_tile.reshape([BLOCK_M, BLOCK_D])
    for key in range(0, sk, BLOCK_N):
        mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma_load(k_desc, [head, key, 0], full, k_tile)
        tma_load(v_desc, [head, key, 0], full, v_tile)
        mbarrier.wait(full, phase)
        phase ^= 1
        k = k_tile.reshape([BLOCK_N, BLOCK_D]).permute([1, 0])
        s = warpgroup_mma(q, k, gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores), use_acc=False)
        p, m, total, o = online_softmax(s, m, total, o, c, key, sk)
        o = warpgroup_mma(gl.convert_layout(p.to(dtype), left), v_tile.reshape([BLOCK_N, BLOCK_D]), o)
    ### BEGIN SOLUTION
    o = o / gl.convert_layout(total, gl.SliceLayout(1, output))[:, None]
    ### END SOLUTION
    q.store(o.to(dtype))  # Q is not needed any more: its tile carries the output away
    fence_async_shared()
    tma_store(o_desc, [head, row, 0], q_tile)
    tma.store_wait(0)

# %% nbgrader={"grade_id": "q5_1_tests", "grade": true, "points": 10}
@check("5.1", "Online softmax in a kernel")
def check_softmax(text):
    cases = [(edge_inputs(70, 3, dtype=torch.float16), "three keys, all other columns are masked"),
             (edge_inputs(60, 65), "the second block has one key, its other columns are masked"),
             (edge_inputs(60, 1), "one key, all other columns are masked"),
             (attention_inputs(2, 100, 200, 128, dtype=torch.float16), ""),
             (attention_inputs(1, 64, 130, 64, 60.0), "large scores"),
             (falling_inputs(False), "scores fall from block to block"),
             (falling_inputs(True), "scores rise from block to block")]
    for (q, k, v, expected), words in cases:
        launch, outputs = attention_launch("lab3_softmax.py", 64, q, k, v, expected)
        hint = f"{q.shape[1]} queries, {k.shape[1]} keys in blocks of 64, head dimension {q.shape[2]}; {words or q.dtype}."
        expect_kernel(text, launch, outputs, **CLOSE, compiles=k.shape[1] == 200, hint=hint,
                      mistakes=partial(attention_mistakes, q, k, v, SOFTMAX))


check_softmax(text_of("lab3_softmax.py")).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab3_gluon as hidden
hidden.softmax(text_of("lab3_softmax.py")).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# For the timelines of attention we tell the cost model that keys and values come from the L2 cache. We assume twice the
# bandwidth of memory and half its latency: 40 bytes per cycle, after 300 cycles. These are round numbers to draw with,
# and were not measured.
#
# **Before you run.** One warpgroup, everything in one partition. What share of the time will the tensor cores work? And with a
# producer and two consumers (Question 5.2), and with the overlap (5.3)?

# %%
guesses["tensor cores at work, 5.1"] = None  # 0 to 1
guesses["tensor cores at work, 5.2"] = None
guesses["tensor cores at work, 5.3"] = None
launch, _ = attention_launch("lab3_softmax.py", 64, *big)
run = show_timeline(answered("lab3_softmax.py"), launch, "One warpgroup, 64 queries", model=FROM_L2)
beside_guess("tensor cores at work, 5.1", tensor_core_share(run))
print("In the rest nothing multiplies: the one partition waits for a copy, or computes its softmax.")

# %% [markdown]
# ## Producer and consumers
#
# `gl.warp_specialize` splits the block into **partitions** that run different functions at the same time:
#
# ![A block split into three partitions: a producer warp fills a ring of K and V slots by TMA; two consumer warpgroups multiply and compute the softmax; full barriers go from the TMA to the consumers, empty barriers from the consumers back to the producer](assets/lab3_specialized.svg)
#
# - The **producer** is one warp with 24 registers for each thread. It only issues copies, and runs ahead as far as the
#   ring allows.
# - Each **consumer** is a warpgroup with 64 rows of queries, and gets the registers that the producer gave up.
# - Between them stand two barriers for each slot. `full`: the copy has arrived. `empty`: *both* consumers are done.
#
# Both consumers read the same K and V, so each copy serves 128 rows.
#
# The call ends in `[4, 1], [240, 24]`: the warps and registers of the second and third partition. The first partition is
# the kernel's own 4 warps; the compiler gives it the registers that are left (here 240). Registers move by whole warpgroups: the producer's warp counts as 128
# threads. The block starts with 384 × 168 registers, and 256 × 240 + 128 × 24 is just as many.

# %% [markdown]
# ### Question 5.2: Split the kernel {points}
#
# Fill the four holes. K and V of a block share a slot number and the barriers of that slot.
#
# 1. The producer's loop: wait until the slot is free, announce the bytes of K **and** V, issue both copies. In the first
#    round every slot is free. The producer waits for nothing but a free slot, and it alone issues copies, each block once.
# 2. The consumer: wait until the block is there, before the product.
# 3. The consumer: say that it is done with the slot. Products here are not asynchronous (`is_async` is left out), so
#    they are over when the line is.
# 4. The barriers' counts. How many arrivals end a phase of `full`, how many one of `empty`? `mbarrier.arrive(bar,
#    count=1)` counts one for the whole partition.
#
# {hint idea}
# Two barriers for each slot: `full` ends the consumers' waiting, `empty` the producer's.
#
# {hint plan}
# Producer: wait for empty, announce, two copies. Consumer: wait for full, multiply, arrive at empty. Counts: who
# arrives at each of them in one phase?
#
# {hint line}
# In the first round nobody has emptied anything: which parity passes on a fresh barrier? And a copy's bytes are no
# arrival; the announcement is.

# %% nbgrader={"grade_id": "q5_2", "solution": true}
# %%writefile lab3_specialized.py
"""Attention with a producer and two consumers: one warp loads, two warpgroups of 64 queries compute."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from utils.attention.gluon.shared import inverse_and_lse, mask_scores, online_softmax, tma_load, tma_store


@gluon.jit
def load_partition(descs, tiles, bars, sk, STAGES: gl.constexpr):
    """The producer: Q of both consumers, then K and V, as far ahead as there are free slots."""
    q_desc, k_desc, v_desc = descs
    q_tiles, k_ring, v_ring = tiles
    q_full, full, empty = bars
    BLOCK_N: gl.constexpr = k_ring.shape[2]
    BLOCK_M: gl.constexpr = q_tiles.shape[2]
    row = gl.program_id(0) * (2 * BLOCK_M)
    head = gl.program_id(1)
    for w in gl.static_range(2):
        mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
        tma_load(q_desc, [head, row + w * BLOCK_M, 0], q_full.index(w), q_tiles.index(w))
    ### BEGIN SOLUTION
    for i in range(gl.cdiv(sk, BLOCK_N)):  # public
        slot = i % STAGES  # public
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma_load(k_desc, [head, i * BLOCK_N, 0], full.index(slot), k_ring.index(slot))
        tma_load(v_desc, [head, i * BLOCK_N, 0], full.index(slot), v_ring.index(slot))
    ### END SOLUTION


@gluon.jit
def compute_partition(o_desc, tiles, bars, sk, c, W: gl.constexpr, STAGES: gl.constexpr):
    """Consumer W, one warpgroup: rows 64 W .. 64 W + 63 of the program's 128 queries."""
    q_tiles, k_ring, v_ring = tiles
    q_full, full, empty = bars
    dtype: gl.constexpr = q_tiles.dtype
    BLOCK_M: gl.constexpr = q_tiles.shape[2]
    BLOCK_D: gl.constexpr = q_tiles.shape[3]
    BLOCK_N: gl.constexpr = k_ring.shape[2]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    row = gl.program_id(0) * (2 * BLOCK_M) + W * BLOCK_M
    m = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, scores))
    o = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, output)
    q = q_tiles.index(W).reshape([BLOCK_M, BLOCK_D])
    mbarrier.wait(q_full.index(W), 0)
    for i in range(gl.cdiv(sk, BLOCK_N)):
        slot = i % STAGES
        k = k_ring.index(slot).reshape([BLOCK_N, BLOCK_D]).permute([1, 0])
        v = v_ring.index(slot).reshape([BLOCK_N, BLOCK_D])
        ### BEGIN SOLUTION
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)  # public
        ### END SOLUTION
        s = warpgroup_mma(q, k, gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores), use_acc=False)
        s = mask_scores(s, 0, i * BLOCK_N, 0, sk, 0, scores, False, False)  # keys from sk on count as minus infinity
        p, m, total, alpha = online_softmax(s, m, total, c)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]
        o = warpgroup_mma(gl.convert_layout(p.to(dtype), left), v, o)
        ### BEGIN SOLUTION
        mbarrier.arrive(empty.index(slot), count=1)  # public
        ### END SOLUTION
    inverse, log_sum = inverse_and_lse(m, total, c)
    q.store((o * gl.convert_layout(inverse, gl.SliceLayout(1, output))[:, None]).to(dtype))
    fence_async_shared()
    tma_store(o_desc, [gl.program_id(1), row, 0], q_tiles.index(W))
    tma.store_wait(0)


@gluon.jit
def attention(q_desc, k_desc, v_desc, o_desc, sk, c, STAGES: gl.constexpr):
    """q, o (heads, Sq, D); k, v (heads, sk, D). Program (i, h): rows 128 i .. of head h."""
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[1]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[2]
    q_tiles = gl.allocate_shared_memory(dtype, [2, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
    ### BEGIN SOLUTION
    for i in gl.static_range(STAGES):  # public
        mbarrier.init(full.index(i), count=1)  # public
        mbarrier.init(empty.index(i), count=2)  # public
    ### END SOLUTION
    tiles = (q_tiles, k_ring, v_ring)
    bars = (q_full, full, empty)
    gl.warp_specialize([
        (compute_partition, (o_desc, tiles, bars, sk, c, 0, STAGES)),
        (compute_partition, (o_desc, tiles, bars, sk, c, 1, STAGES)),
        (load_partition, ((q_desc, k_desc, v_desc), tiles, bars, sk, STAGES)),
    ], [4, 1], [240, 24])

# %% nbgrader={"grade_id": "q5_2_tests", "grade": true, "points": 12}
@check("5.2", "Producer and consumers")
def check_specialized(text):
    for sq, sk, stages, dtype in ((128, 257, 2, torch.bfloat16), (100, 195, 3, torch.float16), (70, 193, 1, torch.bfloat16)):
        q, k, v, expected = edge_inputs(sq, sk, dtype=dtype)
        launch, outputs = attention_launch("lab3_specialized.py", 128, q, k, v, expected, STAGES=stages)
        run = expect_kernel(text, launch, outputs, **CLOSE, seeds=(None, 1, 2), compiles=stages == 3,
                            hint=f"{sq} queries, {sk} keys, {stages} slots.",
                            mistakes=partial(attention_mistakes, q, k, v, BLOCKS))
        copies, blocks = [e for e in run.events if e.kind == "copy in"], math.ceil(sk / 64)
        assert len(copies) == 2 + 2 * blocks, (
            f"{blocks} blocks of keys: two copies for Q and two for each block are {2 + 2 * blocks}, and there are "
            f"{len(copies)}. Both consumers read the same tiles."
        )
        who = {e.partition for e in copies}
        assert who == {"load_partition"}, f"load_partition alone issues copies; here {', '.join(sorted(who))} did."


check_specialized(text_of("lab3_specialized.py")).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab3_gluon as hidden
hidden.specialized(text_of("lab3_specialized.py")).raise_if_wrong()
### END HIDDEN TESTS

# %%
launch, _ = attention_launch("lab3_specialized.py", 128, *big, STAGES=2)
run = show_timeline(answered("lab3_specialized.py"), launch, "A producer and two consumers, 128 queries", model=FROM_L2)
beside_guess("tensor cores at work, 5.2", tensor_core_share(run))
print(f"softmax under a product of the same consumer: {overlap(run):.0%}")

# %% [markdown]
# Look at the red bars of the two consumers. They take turns: while one computes its softmax, the other may multiply.
# That overlap was left to chance. *Inside* a consumer nothing overlaps yet: scores, softmax, P V, one after the other.

# %% [markdown]
# ### Question 5.3: Overlap {points}
#
# The softmax of block $i$ needs the scores of block $i$, but nothing of $P_{i-1} V_{i-1}$. So issue both products, wait
# for the scores only, and compute the softmax while the tensor cores still work on $P_{i-1} V_{i-1}$:
#
# ![Two schedules of one consumer. One after the other: scores, softmax and P V of each block, and the tensor cores idle during the softmax. Overlapped: the next scores and this P V are issued together, the softmax of the next block runs under P V](assets/lab3_overlap_schedule.svg)
#
# The picture is the specification. Write the body of the loop: scores of block `i`, $P_{i-1} V_{i-1}$, and the softmax of
# block `i`, whose results are `p_next`, `m`, `total` and `alpha`. At the end of a turn `o` is rescaled, and `p` is the new
# `p_next` in the layout `left`. Decide for yourself how many products may still run at each wait, and when a slot of K and a
# slot of V are free. `warpgroup_mma_wait(n, ...)` counts products in the order in which they were issued. The check wants
# the right result in any timing, two products for each block of keys in each consumer, the second product of each turn issued
# while the first one runs, and at least 12 % of each consumer's softmax under a product of its own.
#
# With one entry in `deps`, `warpgroup_mma_wait` returns a tensor, with two a pair:
# `s, o = warpgroup_mma_wait(1, deps=[s, o])`.
#
# Only the body of the loop is missing. The producer is the one of the course's own step 4. It has separate barriers
# for K and V: the scores can start before V is there, and K's slot is free half a block earlier than V's. It brings the
# last block of keys first, so that the block with the tail needs its mask before the loop and no other does. Its tensors
# have a batch dimension: (B, H, S, D).
#
# This schedule is that of **FlashAttention-3** ([Shah et al., 2024](https://arxiv.org/abs/2407.08608)): a producer warp,
# consumer warpgroups, and the softmax of one block under the products of another. There the two consumers also take turns
# on purpose (*ping-pong*); here their turns are left to chance.
#
# {hint idea}
# Two products are under way at once, and you wait for the older one only.
#
# {hint plan}
# Five steps. K of block `i` is there: issue its scores. V of block `i - 1` is there: issue P V. Wait until one product is
# left, then the scores may be read, and K's slot is free. The softmax. Wait until none is left, then V's slot is free and
# `o` may be rescaled; `p` is the new one.
#
# {hint line}
# Rescaling `o` reads and writes the registers of the product P V: it must be over by then. `p` is still read by that
# product, too, so the new one needs another name until the wait.

# %% nbgrader={"grade_id": "q5_3", "solution": true}
# %%writefile lab3_overlap.py
"""Attention whose products run under the softmax: the next scores are issued before this block's P V."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from utils.attention.gluon.shared import inverse_and_lse, mask_scores, online_softmax, tma_store
from utils.attention.gluon.step4_warp_specialized import producer


@gluon.jit
def compute_partition(o_desc, tiles, bars, shape, c, W: gl.constexpr, STAGES: gl.constexpr):
    """Consumer W. The producer brings the last block of keys first; K and V have barriers of their own."""
    q_tiles, k_ring, v_ring = tiles
    q_full, k_full, k_empty, v_full, v_empty = bars
    sq, sk, window, heads, group = shape
    dtype: gl.constexpr = q_tiles.dtype
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    BLOCK_D: gl.constexpr = q_tiles.shape[4]
    BLOCK_N: gl.constexpr = k_ring.shape[3]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
    m = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, scores))
    o = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, output)
    q = q_tiles.index(W).reshape([BLOCK_M, BLOCK_D])
    blocks = gl.cdiv(sk, BLOCK_N)

    # Block 0: its scores and their softmax. P waits for its product with V.
    mbarrier.wait(q_full.index(W), 0)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q, k_ring.index(0).reshape([BLOCK_N, BLOCK_D]).permute([1, 0]), zero, use_acc=False)
    mbarrier.arrive(k_empty.index(0), count=1)
    s = mask_scores(s, 0, (blocks - 1) * BLOCK_N, 0, sk, 0, scores, False, False)
    p, m, total, alpha = online_softmax(s, m, total, c)
    p = gl.convert_layout(p.to(dtype), left)
    for i in range(1, blocks):
        k_slot = i % STAGES
        k_phase = (i // STAGES) & 1
        v_slot = (i - 1) % STAGES  # V is one block behind K
        v_phase = ((i - 1) // STAGES) & 1
        k = k_ring.index(k_slot).reshape([BLOCK_N, BLOCK_D]).permute([1, 0])
        v = v_ring.index(v_slot).reshape([BLOCK_N, BLOCK_D])
        ### BEGIN SOLUTION
        mbarrier.wait(k_full.index(k_slot), k_phase)
        s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_slot), v_phase)
        o = warpgroup_mma(p, v, o, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(k_slot), count=1)
        p_next, m, total, alpha = online_softmax(s, m, total, c)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]  # public
        p = gl.convert_layout(p_next.to(dtype), left)
        ### END SOLUTION
    # The last block's P V.
    slot = (blocks - 1) % STAGES
    mbarrier.wait(v_full.index(slot), ((blocks - 1) // STAGES) & 1)
    o = warpgroup_mma(p, v_ring.index(slot).reshape([BLOCK_N, BLOCK_D]), o)
    mbarrier.arrive(v_empty.index(slot), count=1)
    inverse, log_sum = inverse_and_lse(m, total, c)
    q.store((o * gl.convert_layout(inverse, gl.SliceLayout(1, output))[:, None]).to(dtype))
    fence_async_shared()
    batch = gl.program_id(1) // heads
    row = gl.program_id(0) * (2 * BLOCK_M) + W * BLOCK_M
    tma_store(o_desc, [batch, gl.program_id(1) - batch * heads, row, 0], q_tiles.index(W))
    tma.store_wait(0)


@gluon.jit
def attention(q_desc, k_desc, v_desc, o_desc, sq, sk, heads, c, STAGES: gl.constexpr):
    """q, o (B, heads, sq, D); k, v (B, heads, sk, D). Program (i, b * heads + h): rows 128 i .. of head h."""
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for w in gl.static_range(2):
        mbarrier.init(q_full.index(w), count=1)
    for j in gl.static_range(STAGES):
        mbarrier.init(k_full.index(j), count=1)
        mbarrier.init(v_full.index(j), count=1)
        mbarrier.init(k_empty.index(j), count=2)
        mbarrier.init(v_empty.index(j), count=2)
    tiles = (q_tiles, k_ring, v_ring)
    bars = (q_full, k_full, k_empty, v_full, v_empty)
    shape = (sq, sk, 0, heads, 1)
    gl.warp_specialize([
        (compute_partition, (o_desc, tiles, bars, shape, c, 0, STAGES)),
        (compute_partition, (o_desc, tiles, bars, shape, c, 1, STAGES)),
        (producer, (((q_desc, k_desc, v_desc), tiles, bars, shape), 2, STAGES, False, False)),
    ], [4, 1], [240, 24])

# %% nbgrader={"grade_id": "q5_3_tests", "grade": true, "points": 8}
@check("5.3", "Overlap")
def check_overlap(text):
    for (q, k, v, expected), stages in ((edge_inputs(128, 257), 2), (edge_inputs(100, 195, dtype=torch.float16), 3),
                                        (attention_inputs(1, 128, 256, 64, 20.0), 2)):
        launch, outputs = overlap_launch(q, k, v, expected, stages=stages)
        expect_kernel(text, launch, outputs, **CLOSE, seeds=(None, 1), compiles=stages == 3,
                      hint=f"{q.shape[1]} queries, {k.shape[1]} keys, {stages} slots.",
                      mistakes=partial(attention_mistakes, q[None], k[None], v[None], SOFTMAX | BLOCKS | OVERLAP,
                                       downward=True))
    _, run = simulate_launch(text, overlap_launch(*big)[0], timeline=True)
    assert overlap(run) > 0.12, f"only {overlap(run):.0%} of the softmax runs under a product; what do you wait for?"


check_overlap(text_of("lab3_overlap.py")).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab3_gluon as hidden
hidden.overlap(text_of("lab3_overlap.py")).raise_if_wrong()
### END HIDDEN TESTS

# %%
run = show_timeline(answered("lab3_overlap.py"), overlap_launch(*big)[0], "Overlapped, 128 queries", model=FROM_L2)
beside_guess("tensor cores at work, 5.3", tensor_core_share(run))
print(f"softmax under a product of the same consumer: {overlap(run):.0%}")
window = (0.38 * run.cycles[0], 0.62 * run.cycles[0])
plot_run(run, "Enlarged: the softmax (blue) of a consumer runs under its product with V (red)", window[1], window=window)

# %% [markdown]
# ## What your kernels became
#
# The compiler turned each of your files into SASS, the machine code of `sm_90a`. The next cell counts what matters.
# `UTMALDG` and `UTMASTG` are TMA copies, `HGMMA` is `wgmma`, `SYNCS` are mbarrier operations, `MUFU.EX2` exponentials.
# These are instructions in the program, not executions. Below the table stands what became of your lines of 4.1 and 5.3.

# %%
kernels = {
    "3.1 cp.async": ("lab3_async_copy.py", async_copy_launch(2000, 4, 3)),
    "3.2 TMA ring": ("lab3_tma_ring.py", tma_ring_launch(40, 440, 3)),
    "4.1 wgmma": ("lab3_wgmma.py", wgmma_launch(100, 72, 200)),
    "5.1 one warpgroup": ("lab3_softmax.py", attention_launch("lab3_softmax.py", 64, *attention_inputs(2, 100, 200))),
    "5.2 specialized": ("lab3_specialized.py", attention_launch("lab3_specialized.py", 128,
                                                                *attention_inputs(2, 100, 200), STAGES=2)),
    "5.3 overlapped": ("lab3_overlap.py", overlap_launch(*attention_inputs(2, 100, 200))),
}
rows, whole = [], {}
for name, (file, (launch, _)) in kernels.items():
    if answered(file) is None or not offline_compile_support():
        print(f"{name}: {'not answered yet' if answered(file) is None else offline_compile_support().reason}")
        continue
    try:
        compiled = compile_for_hopper(answered(file), launch)
    except AssertionError as refused:
        print(f"{name}: {refused}")
        continue
    whole[name] = compiled
    rows.append({"kernel": name, **compiled.instructions, "registers": compiled.registers,
                 "spilled bytes": compiled.spill_bytes, "shared KiB": compiled.shared_bytes / 1024})
if rows:
    results["instructions"] = rows
    display(pd.DataFrame(rows).set_index("kernel").T.map(lambda number: f"{number:.4g}"))
for name, lines in (("4.1 wgmma", "tma_load(|.wait(|warpgroup_mma|c_tile.store|fence_async|tma_store("),
                    ("5.3 overlapped", "mbarrier.wait(k_full.index(k_slot)|warpgroup_mma|mbarrier.arrive(k_empty")):
    file, (launch, _) = kernels[name]
    if name in whole:
        print(f"{name}\n{machine_code(answered(file), launch, lines, whole[name])}\n")

# %% [markdown]
# ### Question 5.4: The checklist, on Hopper and on Blackwell {points}
#
# 1. Compare 5.1, 5.2 and 5.3 in your table. Which instructions came with the split, and what does "register moves"
#    (`USETMAXREG`) do for the consumers? (A block starts with the same number of registers for every thread.)
# 2. 5.2 has no global loads and no `cp.async`, neither in the producer nor in the consumers. Who computes the addresses?
# 3. Take the three differences named at the start of Part 4: `tcgen05` with its accumulator in tensor memory, one thread
#    that issues a product, products over two SMs. For each: what of *your* kernel 5.3 would change, and what becomes free
#    (registers, shared memory, a warpgroup's threads), if anything?
#
# {hint idea}
# Each instruction in the table belongs to a line that you can see below it.
#
# {hint plan}
# 1: subtract the columns. Multiply registers by threads before and after the move. 2: look at what the TMA instruction
# is given. 3: take each of the three differences and go through 5.3 line by line: what would be elsewhere, what would
# wait elsewhere?
#
# {hint line}
# Free registers are only part of the answer: what lies in tensor memory must be fetched before the softmax can use it.

# %% [markdown] nbgrader={"grade_id": "q5_4", "grade": true, "solution": true, "points": 6}
# 1. More mbarrier operations (full and empty), `USETMAXREG`: the producer gives registers back (24 a thread), the
#    consumers take them (240), enough for scores 64 × 128, output and P without spilling. 5.3 has more wgmma and
#    exponentials because blocks before, in and after the loop are separate code.
# 2. The TMA engine, from the descriptor and the coordinates that one thread gives.
# 3. Tensor memory: scores and output leave the registers (64 × keys + 64 × d over 128 threads: 128 of 240 at d = 128), so
#    the softmax can have more warps or larger tiles; but they must be fetched (tcgen05.ld) before the softmax, and P or
#    the rescaled O stored back. One thread issues products: the product moves out of the consumers into a partition of
#    its own, and the consumers become pure softmax warps; warpgroup_mma_wait becomes a wait at an mbarrier. Two SMs: each
#    loads half of B; shared memory for K and V is halved per SM, or tiles double; barriers span the cluster.
#
# === BEGIN MARK SCHEME ===
# 1: 2 points (barriers/USETMAXREG; registers move from producer to consumers). 2: 1 point (TMA, descriptor).
# 3: 1 point for each of the three that names the change in the student's kernel and what becomes free, if anything.
# === END MARK SCHEME ===

# %% [markdown]
# ## The race
#
# On a Hopper GPU your own kernel of 5.3 now runs against the naive version of Part 1, the library's FlashAttention 2, cuDNN,
# FlashAttention 3 where its package is installed, and the five steps of the course's ladder. The last step is what your
# kernel can still become: persistent blocks (one for each SM, which walks over several tiles, so that the end of one tile hides
# the start of the next), the softmax in halves, and arrivals at an mbarrier that do not first wait for the whole warpgroup.
# Elsewhere you see the recorded tables; there "5.3" is the model answer.
#
# **Before you run.** At head dimension 128 and 16384 tokens: what share of cuDNN's speed does each of the five steps reach? Think
# of the shares of the tensor cores that you saw in 5.1, 5.2 and 5.3.
#
# In the last table `cute` is the package of FlashAttention 4, called directly, and `flex_flash` is FlexAttention with that
# package as its backend. FlashAttention 4's own algorithm is for Blackwell. On Hopper the package runs a reimplementation
# of FlashAttention 3's forward kernel, so there it is FlashAttention 3's algorithm that you race against.
#
# **Read ratios, not absolute figures.** The same library at the same shape reads differently in the three tables, because
# they were recorded at different moments, and a GPU at its power limit lowers its clock. Within a row both contenders ran
# in turns, at the same clocks: only that ratio is a result.

# %%
guesses |= dict.fromkeys([f"ladder step {step}, speed over cuDNN's" for step in range(1, 6)])
# Set the ones you guess below this line, for example guesses["ladder step 1, speed over cuDNN's"] = 0.5
if on_hopper:
    from utils.attention.gluon.launch import forward

    module = load_kernels(answered("lab3_overlap.py"), overlap_launch(*big)[0])

    def student_attention(q, k, v, block_n=128, stages=2):
        """The kernel of 5.3 on GPU tensors (B, H, S, D)."""
        out = torch.empty_like(q)
        blocks = [descriptor(x, [1, 1, rows, q.shape[-1]])
                  for x, rows in ((q, 64), (k, block_n), (v, block_n), (out, 64))]
        grid = (math.ceil(q.shape[2] / 128), q.shape[0] * q.shape[1])
        module.attention[grid](*blocks, q.shape[2], k.shape[2], q.shape[1], math.log2(math.e) / math.sqrt(q.shape[-1]),
                               stages, num_warps=4)
        return out

    batch, heads, length, d = 1, 16, 16384, 128
    q, k, v = (torch.randn(batch, heads, length, d, device=device, dtype=torch.bfloat16) for _ in range(3))
    mine = student_attention(q, k, v)
    expected = attention(q, k, v, backend="flash")
    difference = ((mine.double() - expected.double()).norm() / expected.double().norm()).item()
    assert difference < 0.01, f"on this GPU your kernel differs from flash attention by {difference:.3f}: no race then"
    contenders = {"naive": partial(naive_attention, q, k, v),
                  "FlashAttention 2": partial(attention, q, k, v, backend="flash"),
                  "cuDNN": partial(attention, q, k, v, backend="cudnn")}
    if find_spec("flash_attn_interface"):  # FlashAttention 3's package; its tensors are (B, S, H, D)
        from flash_attn_interface import flash_attn_func

        contenders["FlashAttention 3"] = partial(flash_attn_func, *(x.transpose(1, 2).contiguous() for x in (q, k, v)))
    contenders |= {f"ladder step {step}": partial(forward, q, k, v, step=step) for step in range(1, 6)}
    flops, rows = 4 * batch * heads * length**2 * d, []
    for name, call in contenders.items():
        try:
            race = compare(call, partial(student_attention, q, k, v), warmup=2, iterations=8, labels=(name, "yours"))
        except (RuntimeError, ValueError) as refused:
            print(f"{name}: {refused}")
            continue
        rows.append({"against": name, "its TFLOP/s": flops / race.a.median_ms / 1e9,
                     "your TFLOP/s": flops / race.b.median_ms / 1e9, "you are faster by": race.speedup})
    results["race"] = rows
    display(pd.DataFrame(rows).round(3))
else:
    print(f"No race here. {gluon_support().reason}")
show_recorded("race", {"your TFLOP/s": "5.3 TFLOP/s", "you are faster by": "5.3 faster by"})

# %%
for file in ("attention_ladder.json", "attention_ratios.json"):
    if not (RECORDED / file).exists():
        print(f"No recorded table {RECORDED / file} here.")
        continue
    record = json.loads((RECORDED / file).read_text())
    where = record["environment"]
    print(f"Recorded on {where['gpu']}, torch {where['torch']}, Triton {where['triton']}, commit {where['commit']}. "
          "Not measured here:")
    chosen = [row for row in record["rows"] if "ratio" in row and not row["causal"]
              and (row["head_dim"], row["length"]) == (128, 16384)]
    table = pd.DataFrame(chosen)
    shown = (["step"] if "ladder" in file else []) + ["against", "tflops", "against_tflops", "ratio"]
    display(table[shown].rename(columns={"tflops": "Gluon TFLOP/s", "against_tflops": "its TFLOP/s"}).round(3))
    for row in chosen if "ladder" in file else ():
        beside_guess(f"ladder step {row['step']}, speed over cuDNN's", row["ratio"])

# %% [markdown]
# Hold the TFLOP/s against Part 1, where the tensor cores could do 989. For 128 queries at head dimension 128 products,
# exponentials and loads from memory take 2048, 1024 and 3277 cycles: one after the other, the tensor cores would work for a
# third of the time. Step 1 to step 5 compute the same thing with the same FLOPs. What changes is who waits for whom. Step 3 is
# slower than step 2 at head dimension 128. The likely reason, not measured apart: its tiles of 128 keys take 147 KB of shared
# memory, so one block fits on an SM; two blocks of step 2 fit, and their waits overlap.

# %% [markdown]
# ### Bonus Question 5.5: Do not compute what the mask removes {points}
#
# With a causal mask, query `i` sees keys `0 ... i + sk - sq` (the last query stands at the last key; sq ≤ sk). Blocks of
# keys that no row of the tile sees must be neither loaded nor multiplied: the check counts the products. Blocks that
# the diagonal crosses need a mask. The kernel is the one of 5.1, without a ring. Write the number of `blocks` for this
# tile, and the mask.
#
# {hint idea}
# The last row of the tile sees the most keys: it decides how many blocks are needed.
#
# {hint plan}
# Position of the last row, the first key that it does not see, rounded up to blocks, and never more than there are. In
# the mask compare a column of positions with a row of keys, and keep the tail's mask.
#
# {hint line}
# The last query stands at the last key, so positions are shifted by `sk - sq`. And a query sees the key at its own
# position.

# %% nbgrader={"grade_id": "bonus_5_5", "solution": true}
# %%writefile lab3_causal.py
"""Causal attention of one warpgroup: blocks of keys that no row of the tile sees are neither loaded nor multiplied."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from utils.attention.gluon.shared import inverse_and_lse, online_softmax, tma_load, tma_store


@gluon.jit
def attention_causal(q_desc, k_desc, v_desc, o_desc, sq, sk, c):
    """As in 5.1, and query i sees keys 0 .. i + sk - sq (sq <= sk): the last query stands at the last key."""
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[1]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    q_tile = gl.allocate_shared_memory(dtype, [1, BLOCK_M, BLOCK_D], q_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, BLOCK_N, BLOCK_D], v_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    row = gl.program_id(0) * BLOCK_M
    head = gl.program_id(1)
    mbarrier.expect(full, q_desc.block_type.nbytes)
    tma_load(q_desc, [head, row, 0], full, q_tile)
    mbarrier.wait(full, 0)
    phase = 1
    m = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, scores))
    o = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, output)
    q = q_tile.reshape([BLOCK_M, BLOCK_D])
    ### BEGIN SOLUTION
    blocks = gl.minimum(gl.cdiv(sk, BLOCK_N), gl.cdiv(row + BLOCK_M + sk - sq, BLOCK_N))
    ### END SOLUTION
    for i in range(blocks):
        mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma_load(k_desc, [head, i * BLOCK_N, 0], full, k_tile)
        tma_load(v_desc, [head, i * BLOCK_N, 0], full, v_tile)
        mbarrier.wait(full, phase)
        phase ^= 1
        k = k_tile.reshape([BLOCK_N, BLOCK_D]).permute([1, 0])
        s = warpgroup_mma(q, k, gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores), use_acc=False)
        ### BEGIN SOLUTION
        position = row + sk - sq + gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores))
        keys = i * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))
        seen = (keys[None, :] <= position[:, None]) & (keys < sk)[None, :]
        s = gl.where(seen, s, float("-inf"))
        ### END SOLUTION
        p, m, total, alpha = online_softmax(s, m, total, c)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]
        o = warpgroup_mma(gl.convert_layout(p.to(dtype), left), v_tile.reshape([BLOCK_N, BLOCK_D]), o)
    inverse, log_sum = inverse_and_lse(m, total, c)
    q.store((o * gl.convert_layout(inverse, gl.SliceLayout(1, output))[:, None]).to(dtype))
    fence_async_shared()
    tma_store(o_desc, [head, row, 0], q_tile)
    tma.store_wait(0)

# %% nbgrader={"grade_id": "bonus_5_5_tests", "grade": true, "points": 6}
@check("Bonus 5.5", "Causal attention")
def check_causal(text):
    for sq, sk, d, dtype in ((64, 65, 64, torch.bfloat16), (130, 130, 64, torch.float16), (70, 150, 128, torch.bfloat16),
                             (3, 193, 64, torch.bfloat16)):
        q, k, v, _ = attention_inputs(2, sq, sk, d, dtype=dtype)
        q[0], k[0] = q[0].abs(), k[0].abs() * (torch.arange(sk)[:, None] / sk).to(dtype)  # later keys weigh more
        launch, outputs = causal_launch(q, k, v)
        run = expect_kernel(text, launch, outputs, **CLOSE, compiles=sq == 130,
                            hint=f"{sq} queries, {sk} keys, head dimension {d}: query i sees keys 0 ... i + {sk - sq}.",
                            mistakes=partial(attention_mistakes, q, k, v, causal(sk - sq)))
        blocks = min(math.ceil(sk / 64), math.ceil((64 + sk - sq) / 64))
        products = sum(e.kind == "wgmma" for e in run.events)
        assert products == 2 * blocks, (
            f"{sq} queries, {sk} keys: the first 64 rows see {blocks} of {math.ceil(sk / 64)} blocks, which are "
            f"{2 * blocks} products, and their program makes {products}."
        )


check_causal(text_of("lab3_causal.py")).raise_if_wrong()
### BEGIN HIDDEN TESTS
from instructor.checks import lab3_gluon as hidden
hidden.attention_causal(text_of("lab3_causal.py")).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ## And backward?
#
# Nothing here is graded. Training also needs the gradients of $Q$, $K$ and $V$, and you now know all that their kernel is made
# of. For a block of keys and a tile of queries it takes five products where forward takes two:
#
# $$S^\top = KQ^\top, \qquad dP^\top = V\,dO^\top, \qquad dV \mathrel{+}= P^\top dO, \qquad
# dK \mathrel{+}= dS^\top Q, \qquad dQ \mathrel{+}= dS\,K.$$
#
# **What is computed again.** The first product was computed by forward already. Forward did not keep $P$: for 16 heads of
# 16384 tokens it would be 8.6 GB in bf16, written once and read once. It kept the log-sum-exp of each row, 4 bytes a row, 1 MB.
# With it one product and one exponential for each score give $P$ again, without a maximum and without a sum.
#
# **Where the additions stand.** A block of threads owns a block of keys and walks over the queries. So its $dK$ and $dV$ stay in
# registers, as $O$ did in forward. $dQ$ belongs to the queries, and every block of keys has a part of it. Each block adds its
# part to sums in memory with atomic additions, in fp32, in the order in which the blocks happen to come by. Therefore two
# runs of it may differ in their last bits (lab 4, Question 5.3). A deterministic backward computes $dQ$ in a kernel
# of its own that walks as forward does, with seven products in place of five.
#
# The course's ladder had five steps when this table was recorded. In step 1 the threads load the tiles, and add to $dQ$
# element by element. Step 2 loads by TMA. Step 3 has a producer and two consumers, keeps $P$ in registers, and adds four
# numbers at once. In step 4 $dQ$ is computed beside the next tile's $dV$ and $dK$, and the TMA adds it from shared memory. In step 5
# a warp of its own hands $dQ$ to the TMA, and tiles on the diagonal have a loop of their own, so that no other tile decides
# whether it needs a mask. Three steps remain in `utils/attention/gluon/backward`: step 1, step 3, and step 6, which came later.
# It joins the two consumers of step 5 into one of eight warps, and is the kernel that `attention` calls.
#
# **Before you run.** Which of these changes makes the big difference? And the deterministic mode at head dimension 256, where
# $dK$ and $dV$ leave few registers: is it slower than the additions, or faster?

# %%
guesses["backward: step with the largest gain over the one before"] = None  # "step2" to "step5"
guesses["backward at 256: deterministic / adding"] = None  # a ratio of speeds
if (RECORDED / "backward_ratios.json").exists():
    record = json.loads((RECORDED / "backward_ratios.json").read_text())
    where = record["environment"]
    print(f"Recorded on {where['gpu']}, torch {where['torch']}, Triton {where['triton']}. Not measured here.")
    ladder = record["ladder"][0]["tflops"]
    at = {row["head_dim"]: row for row in record["rows"] if row["length"] == 16384 and not row["causal"]}
    shown = [name for name in ("step1", "step2", "step3", "step4", "step5", "cudnn") if name in ladder]
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.6), layout="constrained")
    for name in shown:
        axes[0].bar_label(axes[0].bar(name, ladder[name], **series(1 if name == "cudnn" else 0).bar), fmt="%.0f")
    axes[0].margins(y=0.12)
    style_axes(axes[0], y="TFLOP/s of backward", title="The ladder at head dimension 128")
    ways = ("adding to dQ (step 5; at 256 step 4)", "cudnn", "deterministic", "fa3", "fa4")
    for i, name in enumerate(ways):
        # at 64 and 128 the default adds; at 256 it is the deterministic kernel, and step 4 is the one that adds
        tflops = [at[d]["tflops"][("step4" if d == 256 else at[d]["default"]) if name.startswith("adding") else name]
                  for d in (64, 128, 256)]
        axes[1].bar([x + (i - 2) * 0.16 for x in range(3)], tflops, 0.16, label=name, **series(i).bar)
    axes[1].set(xticks=range(3), xticklabels=["head dim 64", "128", "256"])
    axes[1].legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, -0.42))
    style_axes(axes[1], title="16384 tokens, full")
    plt.show()
    gains = {f"step{i}": ladder[f"step{i}"] / ladder[f"step{i - 1}"] for i in range(2, 6) if f"step{i}" in ladder}
    print("gain over the step before:", ", ".join(f"{step} {gain:.2f}" for step, gain in gains.items()))
    beside_guess("backward: step with the largest gain over the one before", max(gains, key=gains.get))
    beside_guess("backward at 256: deterministic / adding", at[256]["tflops"]["deterministic"] / at[256]["tflops"]["step4"])
else:
    print(f"No recorded table {RECORDED / 'backward_ratios.json'} here.")

# %% [markdown]
# TMA alone changes little here, and step 3 is 2.6 times as fast as step 2. How much of that each of its three changes
# brings was not measured. Steps 4 and 5 are within 2% of step 3 here; the loops of step 5 pay where there is a mask. What is
# left is the additions. The same kernel without them, whose $dQ$ is wrong, ran at 775 TFLOP/s in place of 575 in one run at
# head dimension 128 (`docs/kernels/backward.md`). So at head dimension 256 the deterministic kernel with its two products
# more is the faster one: it adds nothing to memory. At 64 and 128 it is the slower one.

# %% [markdown]
# ## Save your results
#
# The tables of this run, with the machine they were made on.

# %%
from utils.files import output_path

machine = environment()
record = {
    "machine": torch.cuda.get_device_name() if on_gpu else "CPU",
    "commit": machine.get("commit"),
    "environment": machine,
    "tables": results,
    "guesses": {what: {"guess": guesses.get(what), "outcome": outcome} for what, outcome in outcomes.items()},
}
saved = output_path("lab3_results.json")
saved.write_text(json.dumps(record, indent=1, default=str))
print(f"saved {', '.join(results) or 'no table'} to {saved}")

# %% [markdown]
# ## What you know now
#
# - An SM is a factory of units that run on their own. A kernel is the order in which they wait for each other.
# - A layout says who holds what. A wrong one costs sectors, bank conflicts, or a trip through shared memory.
# - A copy is over when a barrier says so, not when it was fast enough.
# - Two paths lead to shared memory. What crosses from one to the other needs a fence, and a run that happens to be right
#   does not prove that it may be left out.
# - Producer and consumers need two barriers for each slot: *full* and *empty*.
# - At head dimension 64 exponentials take as long as products, at 128 half as long. Flash attention is fast where the
#   two run at the same time.
#
# The ladder in `utils/attention/gluon` goes on where you stopped, and you can read every line of it now. How it compares
# with other libraries is in the recorded tables above, and in `docs/kernels/attention.md` with each step's prediction. On the
# command line, `labs bench list-targets --chapter labs/flashattention_gluon` lists the same contest, and
# `labs bench run --targets labs/flashattention_gluon:baseline_flashattention_gluon --profile minimal` runs its baseline.
#
# **To read on**
# - Triton's own [Gluon tutorials](https://github.com/triton-lang/triton/tree/main/python/tutorials/gluon): layouts, TMA,
#   `wgmma`, persistence, warp specialization, Blackwell.
# - NVIDIA's [PTX manual](https://docs.nvidia.com/cuda/parallel-thread-execution/): the chapters on mbarrier, on
#   asynchronous warpgroup level matrix instructions, and on proxies.
# - Shah et al., [FlashAttention-3](https://arxiv.org/abs/2407.08608), and Dao,
#   [FlashAttention-2](https://arxiv.org/abs/2307.08691).
# - A missing fence in the wild: [DeepEP, pull request 642](https://github.com/deepseek-ai/DeepEP/pull/642).
