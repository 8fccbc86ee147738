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
# ![A case from recorded numbers: with one query cuDNN is mostly the fastest, with four queries it takes up to 5.4 times as long as the best](assets/lab4_case.svg)
#
# `F.scaled_dot_product_attention` (SDPA) is one line. Four programs can compute it: *math*, *flash*, *efficient* and *cuDNN*.
# Torch picks one, and says neither which nor why.
#
# The picture holds a case. On an H200 torch picked cuDNN for every call: for one query a kernel made for an older chip, mostly
# the fastest; for four queries a kernel made for this chip, which took up to 5.4 times as long as the best. Why? You collect
# the evidence in five parts, and close the case in Part 6.
#
# Run the next cell. Then find out who computed a call.

# %% nbgrader={"grade_id": "setup", "locked": true}
import functools
import math
import warnings

import pandas as pd
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from utils import *
from utils.labs.lab4_sdpa import *

torch.manual_seed(0)
print("looking at this machine: some seconds without a GPU ...", flush=True)
roofs = machine_roofs(refresh=True)  # peak FLOP/s per dtype, memory bandwidth; run again, it keeps the best
peak, bandwidth = roofs.tflops[dtype_name], roofs.memory_bandwidth_tb_s  # TFLOP/s, TB/s
print(f"{'GPU' if on_gpu else 'CPU'}, PyTorch {torch.__version__}, times in {dtype_name}; {roofs.origin}: {format_rate(peak)}, "
      f"{bandwidth * 1e3:.4g} GB/s, ridge {peak / bandwidth:.3g} FLOPs/Byte")

# %% [markdown]
# ### Question 1.1: Which backend ran? {points}
#
# Look at what ran, not at what was requested. Torch's profiler records every operator of a call, and each backend
# leaves one operator that no other leaves. `BACKEND_OF` says which.
#
# Write `backends_in`: from a list of operators, the backends that ran, one for each call of attention, in their order. Only
# forward calls count. A list without attention gives `[]`.
#
# {hint idea} Only one operator of a call names the backend; everything else in the list is noise.
# {hint line} Compare whole names: `aten::_flash_attention_forward` contains *flash*, and so does a backward operator.

# %% nbgrader={"grade_id": "operators_of", "locked": true}
for operator, backend in BACKEND_OF.items():
    print(f"{backend:9} {operator}")
x = torch.randn(1, 2, 16, 32)
print("\none call ran:", *operators_of(lambda: F.scaled_dot_product_attention(x, x, x)), sep="\n  ")

# %% nbgrader={"grade_id": "q1_1", "solution": true}
def backends_in(operators: list[str]) -> list[str]:
    """The SDPA backends ("math", "flash", "efficient", "cudnn") that a list of operator names shows, in order."""
    ### BEGIN SOLUTION
    return [BACKEND_OF[name] for name in operators if name in BACKEND_OF]
    ### END SOLUTION
### TESTS q1_1_tests, 4 points: check_backends_in(backends_in)

# %% [markdown]
# The check made two calls of the same shape. One ran flash, one math: only the strides differ. That lost flash, without a word.
#
# ## How to work
#
# Everything goes as in lab 1.
#
# <details>
# <summary>What the lab holds, and its {points:regular} points</summary>
#
# {points:table}
#
# Bonus questions give {points:bonus} points more. You need lab 1 (FLOPs, bytes, the roofline), tensors of PyTorch and a
# little pandas. Plan six hours, two more for the bonus (an estimate).
#
# The code of the checks is in `utils/checking/labs/lab4_sdpa`. Grading asks the same on other shapes, dtypes and
# options. All checks use CPU tensors. A CPU has two of the four backends, math and flash; what was recorded on an H200
# is drawn beside what you measure.
#
# </details>

# %% [markdown]
# # Part 1: Who decides?
#
# Each call goes through a dispatcher. It asks one backend after the other, and takes the first that can do *this* call. Math
# can do everything, so a call hardly ever fails. It only gets slow.
#
# ![The SDPA dispatcher asks one backend after the other, and math takes whatever is left](assets/lab4_dispatcher.svg)
#
# <details>
# <summary>Who are the four?</summary>
#
# | Backend | Who wrote it | What it does | Its kernels on an H200 |
# |---|---|---|---|
# | *math* | PyTorch | two matrix products with a softmax between them; the scores lie in memory | cuBLAS and one kernel for each step |
# | *flash* | Tri Dao and others, [FlashAttention-2](https://arxiv.org/abs/2307.08691) | one fused kernel with [online softmax](https://arxiv.org/abs/2205.14135): a tile of scores at a time, on the chip | for `sm80`, the A100 |
# | *efficient* | Meta's xFormers, after [Rabe and Staats](https://arxiv.org/abs/2112.05682) | the same idea, from NVIDIA's [CUTLASS](https://github.com/NVIDIA/cutlass); takes masks and more dtypes | for `sm80`: `fmha_cutlassF_bf16_aligned_64x128_rf_sm80` |
# | *cuDNN* | NVIDIA, [cuDNN](https://docs.nvidia.com/deeplearning/cudnn/latest/) (closed source) | the same idea, generated for the shape and the chip | for `sm90` or for `sm80`: which, and when, is the case |
#
# A kernel for `sm80` multiplies by `mma.sync`: a warp of 32 threads loads its operands into registers and waits. An H200 runs it,
# but its tensor cores can do more: with `wgmma` four warps start one large product whose operands the hardware reads from shared
# memory, and go on while it runs ([PTX manual](https://docs.nvidia.com/cuda/parallel-thread-execution/), lab 3).
# [FlashAttention-3](https://arxiv.org/abs/2407.08608) is flash for this chip; SDPA's *flash* is version 2. The
# [documentation of SDPA](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html)
# promises the formula, and no backend.
#
# </details>

# %% [markdown]
# ### Question 1.2: Ask it why {points}
#
# Torch does know why. `sdpa_kernel(backend)` allows one backend for the length of a `with` block. If that one cannot do
# the call, SDPA raises a `RuntimeError`, and tells its reasons before that **as warnings**:

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
# Write `why_not`: the reasons why `backend` cannot do the call, `[]` if it can. They are torch's own words, one text for each
# warning that is a reason.
#
# - A headline (`... kernel not used because:`) is no reason. Neither is a backend that your pin switched off
#   (`... has been runtime disabled.`).
# - Cut each warning where ` (Triggered internally` begins.
# - If torch raises and no reason is left, the reason is the first line of the exception.
#
# It works where the caller has silenced warnings, and inside of another `sdpa_kernel` block.
#
# <details>
# <summary>What the check counts</summary>
#
# After the call everything is as before: the allowed backends, and the warning filters. (For CUDA tensors torch has another way,
# `torch.backends.cuda.can_use_flash_attention(params, debug=True)`. For CPU tensors it gives no reason.)
#
# </details>
#
# {hint plan} Allow one backend for the call, record warnings, call, and catch the error. No error: no reasons. Otherwise sort out
# what is a headline, and cut the rest.
# {hint line} The caller may have silenced warnings, so your own filter has to be set inside of your own recording. And what remains
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
    return reasons or [first_line]
    ### END SOLUTION
### TESTS q1_2_tests, 7 points: check_why_not(why_not)

# %% [markdown]
# Which backends does this machine have at all? The H200 runs all four in bf16, math and efficient in fp32, and only math in fp64.
#
# **Before you run.** How many of the four will run plain attention here in bf16? In fp32? In fp64?

# %%
guesses["backends that run bf16"] = None  # 0 to 4
guesses["backends that run fp32"] = None
guesses["backends that run fp64"] = None
kinds = torch.bfloat16, torch.float32, torch.float64
results["dtypes"] = who_runs({str(kind): (*random_qkv(1, 4, 128, 64, dtype=kind), {}) for kind in kinds}, why_not)
for kind, row in zip(("bf16", "fp32", "fp64"), results["dtypes"], strict=True):
    beside_guess(f"backends that run {kind}", sum(row[backend] == "runs" for backend in BACKENDS))

# %% [markdown]
# ### Question 1.3: A pin that pins {points}
#
# A benchmark named "cuDNN against math" is worth nothing if its first half ran flash. It happens: allow `[cudnn, flash]`,
# give it a shape that cuDNN refuses, and flash runs under cuDNN's name.
#
# Write `pinned_sdpa`: SDPA by one backend **alone**, or `BackendRefused` with torch's reasons, as `why_not` gives them, in its
# message. All options (`attn_mask`, `is_causal`, `scale`, `enable_gqa`, ...) go through to SDPA. It pins inside of another `sdpa_kernel`
# block, too.
#
# <details>
# <summary>What the check counts</summary>
#
# Attention is computed once where the backend takes the call: asking first would double each time that you measure. Any
# `RuntimeError` of the call is a refusal; torch's warnings may appear. The inputs are handed on as they are, without copies, and no
# switch is left behind, also after a refusal.
#
# </details>
#
# {hint plan} Call inside of the block and return the result. Catch the error, find the reasons with `why_not`, and raise the
# exception of your own with them in its message.
# {hint line} Ask for reasons after the failure, not before: asking computes attention. And hand every option on, by its name.

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
### TESTS q1_3_tests, 5 points: check_pinned_sdpa(pinned_sdpa)

# %% [markdown]
# ### Question 1.4: The rule of the order {points}
#
# Who is asked first? Torch decides that once for each machine:
#
# ![Two orders: with compute capability 9.0 or 10.0 and a cuDNN newer than 9.15.0 cuDNN comes first; everywhere else flash comes first and cuDNN stands behind math](assets/lab4_order.svg)
#
# Write `default_backend(capability, cudnn, reasons)`: the first backend of the right order that has no reason against it. If every
# one has a reason, raise `BackendRefused`. `capability` is a pair, as `torch.cuda.get_device_capability()` gives it. `cudnn` is a
# number, as `torch.backends.cudnn.version()` gives it: 91500 is 9.15.0.
#
# {hint idea} Two orders, one condition. Then the first of the order that can.
# {hint line} 9.15.0 itself is not newer than 9.15.0. What happens after the loop must not be silent.

# %% nbgrader={"grade_id": "q1_4", "solution": true}
def default_backend(capability: tuple[int, int], cudnn: int, reasons: dict[str, list[str]]) -> str:
    """The backend that runs on a GPU by itself; `reasons[name]` is [] for a backend that can do the call."""
    ### BEGIN SOLUTION
    order = ["flash", "efficient", "math", "cudnn"]
    if capability in ((9, 0), (10, 0)) and cudnn > 91500:
        order = ["cudnn", "flash", "efficient", "math"]
    for name in order:
        if not reasons[name]:
            return name
    raise BackendRefused("every backend has a reason against this call")
    ### END SOLUTION
### TESTS q1_4_tests, 3 points: check_default_backend(default_backend)

# %% [markdown]
# So an A100 and an H200 run different programs for the same line, and an update of cuDNN may change yours over night. The rule
# knows versions. It knows nothing of shapes: that is the first piece of evidence. (It is `check_prefer_cudnn_attention` in torch's
# `sdp_utils.cpp`, and grows: newer releases also ask for 10.3.)
#
# Can a list change the order? `sdpa_kernel([a, b])` changes who is *allowed*. With `set_priority=True` it should change who is
# *asked first*. The next cell makes three calls with flash first, then the same three with math first.
#
# **Before you run.** Which backend runs in each of the six calls?

# %%
guesses["calls of six that run flash"] = None  # 0 to 6
first_version = None  # your line: the smallest number of a cuDNN that an H200 asks first
check_first_version(first_version)
third = None  # your line: the backend that an A100 asks third, as a word
check_third(third)
q, k, v = random_qkv(1, 4, 256, 64)
turned = torch.randn(1, 4, 64, 256, device=device, dtype=dtype).transpose(2, 3)
calls = {"as it is": (q, {}), "q with other strides": (turned, {}), "dropout": (q, {"dropout_p": 0.1})}
rows = []
for first, second in (("flash", "math"), ("math", "flash")):
    for name, (query, options) in calls.items():
        with sdpa_kernel([BACKENDS[first], BACKENDS[second]], set_priority=True):
            ran = backends_in(operators_of(functools.partial(F.scaled_dot_product_attention, query, k, v, **options)))
        rows.append({"allowed": f"{first}, then {second}", "call": name, "ran": ran[0]})
results["order"] = rows
show(rows, "allowed")
beside_guess("calls of six that run flash", sum(row["ran"] == "flash" for row in rows))
show_recorded("order")

# %% [markdown]
# A list says which may run, not which will. On a CPU even `set_priority` changes nothing: the dispatcher for CPU tensors asks
# flash first, whatever the order says.

# %% [markdown]
# # Part 2: Four programs, one formula
#
# All backends compute $\text{softmax}(QK^\top/\sqrt{D})\,V$. *Math* writes the scores to memory and reads them again. The others
# fuse: scores exist for one tile at a time, on the chip.
#
# ![Unfused, the scores cross the memory four times; fused, only q, k, v and the output do](assets/lab4_traffic.svg)

# %% [markdown]
# ### Question 2.1: FLOPs and bytes of attention {points}
#
# Count a call with `q` (B, H, Sq, D) and `k`, `v` (B, Hkv, Sk, D). `attention_costs` returns three numbers:
#
# 1. **FLOPs** of the two products, for the (query, key) pairs that the mask lets through. With `causal=True` the last query sees
#    the last key: query $i$ sees the keys $0 \dots i + S_k - S_q$.
# 2. **fused bytes**: `q`, `k`, `v` read once, the output written once.
# 3. **unfused bytes**: those, and the scores of all query heads, four times, as in the picture.
#
# A group of query heads shares its keys and values.
#
# {hint plan} Pairs: all, or for causal the sum over the queries of the keys that each sees. Elements: q and output have the
# queries' shape, k and v that of the keys. The score matrix has a number for each pair of each query head, masked or
# not.
# {hint line} For causal, write down how many keys the first and the last of 3 queries over 6 keys see. (SDPA's own `is_causal` lets query
# $i$ see the keys $0 \dots i$. Where Sq = Sk that is the same.)

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
### TESTS q2_1_tests, 5 points: check_attention_costs(attention_costs)

# %% [markdown]
# ### Question 2.2: Error against float64 {points}
#
# "The outputs agree" means nothing before you say with what. The yardstick is attention in float64 **from the very inputs that
# the backend got**: if they are bf16, the bf16 numbers are the true inputs.
#
# Write `errors(out, q, k, v, causal)`, two numbers:
# 1. the largest absolute error;
# 2. the relative root mean square: $\sqrt{\text{mean}((O - O_{64})^2)\,/\,\text{mean}(O_{64}^2)}$.
#
# Heads may be grouped: query head $h$ reads key head $h \,//\, (H / H_{kv})$. The lengths are equal. The reference stays in
# float64 to the end.
#
# {counts}
#
# {hint plan} Turn q, k and v into float64, give every query head its key head, compute scores, mask if causal, softmax, product (SDPA
# on float64 inputs may help). Then the two numbers from the difference.
# {hint line} Which query heads share key head 0: the first ones, or every Hkv-th? Rounded to the dtype of `out`, the reference would hide
# what you look for.

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
### TESTS q2_2_tests, 4 points: check_errors(errors)

# %% [markdown]
# Now the table. Each call is pinned, and the operators prove what ran. The calls take turns, so that a machine that slows down
# slows all of them.
#
# **Before you run.** Math against flash: by what factor in time, by what factor in memory? How many kernels (on a CPU:
# operators) does math take? Which one is *more* exact?

# %%
def measure_all(batch, heads, length, head_dim, causal) -> list[dict]:
    """A row for each backend that runs this shape here; their calls take turns, and the operators prove what ran."""
    q, k, v = random_qkv(batch, heads, length, head_dim)
    flops, fused, unfused = attention_costs(batch, heads, heads, length, length, head_dim, dtype, causal)
    calls = {b: pinned(b, q, k, v, is_causal=causal) for b in running_backends(q, k, v, is_causal=causal)}
    timed, rows = time_in_turn(calls), []
    for backend, call in calls.items():
        assert list(backends_in(operators_of(call))) == [backend], f"{backend} was pinned, and another one ran"
        _, added_gb = benchmark_memory(call, n_warmup=1, n_repeat=1)
        largest, rms = errors(call()[:1], q[:1], k[:1], v[:1], causal)
        ms = timed[backend].median_ms
        rows.append({
            "causal": causal, "backend": backend, "ms": ms, "TFLOP/s": flops / ms / 1e9,
            "added MB": added_gb * 1e3, "MB moved (predicted)": (unfused if backend == "math" else fused) / 1e6,
            "kernels" if on_gpu else "operators": count_cuda_kernels(profile(call, steps=2, warmup=1))["total"],
            "largest error": largest, "rms error": rms,
        })
    return rows


guesses["math / flash, time"] = None  # a ratio
guesses["math / flash, added memory"] = None
guesses["operators (on a GPU: kernels) of math"] = None
guesses["the more exact one"] = None  # "math", "flash" or "equal"
score_mb = None  # your line: MB of one matrix of scores of 4 heads, 1024 tokens, fp32
check_score_mb(score_mb)
size = (2, 16, 4096, 128) if on_gpu else (1, 4, 1024, 64)  # sequences, heads, tokens, head dimension
print(f"measuring {size[2]} tokens, full and causal, in turn ...", flush=True)
rows = measure_all(*size, causal=False) + measure_all(*size, causal=True)
results["backends"] = rows
show(rows, ["causal", "backend"])
plot_beside("backends", ["ms", "added MB", "rms error"], ["causal", "backend"])
math_row, flash_row = (next(row for row in rows if row["backend"] == name) for name in ("math", "flash"))
beside_guess("math / flash, time", float(math_row["ms"] / flash_row["ms"]))
beside_guess("math / flash, added memory", float(math_row["added MB"] / flash_row["added MB"]))
beside_guess("operators (on a GPU: kernels) of math", int(math_row["kernels" if on_gpu else "operators"]))
ratio = math_row["rms error"] / flash_row["rms error"]
beside_guess("the more exact one", "equal" if 0.8 < ratio < 1.25 else "math" if ratio < 1 else "flash")

# %% [markdown]
# A short call costs what its launch costs, as in lab 1. Recorded on an H200: torch needs 25 µs on the host before a call of 16
# tokens computes for 6 µs, and a pin in a `with` block adds 16 µs. So a benchmark that pins inside of the timed call measures the
# pin as well, and a decode step of hundreds of short calls needs fewer launches, not a faster kernel.

# %% [markdown]
# ## Look inside
#
# The traces show the operators inside each other, on a GPU also the kernels. An operator lasts as long as everything inside of
# it; the table counts *self* time. `isneginf`, `all` and `where` are parts of `_safe_softmax`: they look for rows that are
# masked in full. On a GPU the names of the kernels say for which chip each was written.
#
# **Before you run.** In math's trace, which operator will take most of the time by itself? How large is its share?

# %%
guesses["math's longest operator or kernel"] = None  # a name, such as "aten::where"
guesses["its share"] = None  # 0 to 1
q, k, v = random_qkv(2, 16, 4096, 128) if on_gpu else random_qkv(1, 4, 1024, 64)
paths, rows = {}, []
for backend in running_backends(q, k, v):
    paths[backend] = output_path(f"sdpa_trace_{backend}.json")
    with sdpa_kernel(BACKENDS[backend]):
        profile(F.scaled_dot_product_attention, q, k, v, steps=1, warmup=2, trace_path=paths[backend])
    for row in summarize_trace(paths[backend], top=4):
        rows.append({"backend": backend, "name": row["name"][:70], "count": row["count"],
                     "self ms": row["self_us"] / 1e3, "share": row["share"]})
plot_traces(paths)
results["traces"] = rows
longest = next(row for row in rows if row["backend"] == "math")
beside_guess("math's longest operator or kernel", longest["name"])
beside_guess("its share", float(longest["share"]))
show(rows, "backend")
show_recorded("traces")

# %% [markdown]
# <details>
# <summary>Which tool for which question, and the same from a terminal</summary>
#
# | Question | Tool |
# |---|---|
# | Which backend ran? | operators of torch's profiler (Question 1.1) |
# | Which kernel ran, and when? | this trace, on [ui.perfetto.dev](https://ui.perfetto.dev); or Nsight Systems: `nsys profile labs bench run ...` |
# | What holds the kernel up: tensor cores, memory, waiting? | Nsight Compute: `labs bench run ... --profile deep_dive` |
# | Is it slower than last month? | `labs bench check`, against the file of this GPU in `expectations/` |
#
# `labs bench list-targets --chapter labs/cudnn_sdpa_bench` lists these contests with sizes of your own. One of them, with its
# trace, and the backend by a flag alone:
#
# ```bash
# labs bench run --targets labs/cudnn_sdpa_bench:flash_sdp --profile minimal \
#     --target-extra-arg labs/cudnn_sdpa_bench:flash_sdp="--backend cudnn"
# labs bench check RUN  # the name that the line above printed
# ```
#
# </details>

# %% [markdown]
# ### Question 2.3: Explain the table and the traces {points}
#
# With your numbers, or recorded ones:
# 1. Where does math lose its time? Name operators.
# 2. Which tensors does each backend allocate? Why is "added MB" of math not "MB moved (predicted)"?
# 3. Causal: how much faster did each backend get? What does the one that did not do with masked scores?
# 4. Which backend has the smallest error? What do you need to know to call the others wrong?
# 5. On the H200, cuDNN is 1.9 times as fast as flash. Which words in the kernel names say why? Somebody reports "1.0 times":
#    which two mistakes of Part 1?
#
# {hint idea} Two products are common to all. What differs is where the scores are in between, and for which chip the kernel was
# written.
# {hint plan} Read the table for 1, 3 and 4 (ratios of time, of causal to full, of errors; in fp32 the errors are level, so take the recorded
# ones), the trace for the operators between the products, and the kernel names for 5.
# {hint line} For 2, ask of each tensor whether it is alive at the same time as the others, and how often it crosses the memory. The
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
# 5. `sm90` and `wgmma` in cuDNN's kernel; flash's was written for sm80 (`flash_fwd_kernel`, mma.sync), and reached about half of
#    cuDNN's speed. At 1.0 times: the two runs were the same backend, by a list of allowed backends, so that flash ran under cuDNN's
#    name; or a call that cuDNN refuses (strides, dtype) and that fell through. Proof: operators or kernel names of the timed call.
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
# A fused kernel did not keep $P$ for training. It kept the log-sum-exp $L_i$ of each row, and computes $P_{ij} = e^{S_{ij} - L_i}$
# again, with $S = QK^\top/\sqrt{D}$. With $dO$ the gradient of the output:
#
# $$dV = P^\top dO, \qquad dP = dO\,V^\top, \qquad \delta_i = \sum_d dO_{id}\,O_{id}, \qquad
# dS_{ij} = P_{ij}\,(dP_{ij} - \delta_i),$$
# $$dQ = dS\,K/\sqrt{D}, \qquad dK = dS^\top Q/\sqrt{D}.$$
#
# Five products where forward has two. Write it for (B, H, Sq, D) and (B, H, Sk, D), `lse` (B, H, Sq), with five products by torch's
# operators. The gradients have the dtype of the inputs. $P$ comes from the `lse` that is given.
#
# {counts}
#
# {hint idea} The formulas above are the algorithm. The only thing to find out is the shape of each factor.
# {hint line} delta is one number for each row of P, so it needs a dimension to broadcast. And count in which of the three gradients
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
### TESTS bonus_2_4_tests, 10 points: check_attention_backward(attention_backward)

# %% [markdown]
# For 16 heads of 16384 tokens $P$ would be 8.6 GB in bf16, and the log-sum-exp is 1 MB. The price is one product more. Forward
# and backward, timed:
#
# **Before you run.** How many times the FLOPs, and the time, of forward do both passes take?

# %%
both_flops = None  # your line: FLOPs of both passes over those of forward
check_both_flops(both_flops)
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
plot_beside("training", ["both ms", "ratio", "added MB"], "backend")

# %% [markdown]
# # Part 3: Prefill and decode
#
# **Prefill** reads the prompt: as many queries as keys. **Decode** writes one token after the other: one query, and all keys so
# far. The formula is the same. The roofline tells them apart.
#
# ![Three roofs of decode on an H200: bytes of the cache, FLOPs of the chip, and what a call of four programs can read](assets/lab4_roofs.svg)

# %% [markdown]
# ### Question 3.1: Intensity, prefill and decode {points}
#
# Fused attention without a mask; `group` query heads share a key head. For each key head it reads `group` × `query_len` queries,
# `kv_len` keys and values, and writes as many outputs as queries.
#
# 1. `intensity`: FLOPs/Byte. Derive it on paper first. One of the arguments cancels: which?
# 2. `queries_to_ridge`: the smallest number of queries (an integer) whose intensity reaches `ridge`. With ever more queries the
#    intensity approaches a limit; for a ridge at the limit or beyond, return `None`.
#
# {hint idea} FLOPs over bytes, for one key head: write both as products of q, L, g, D and the bytes of a number, and cancel.
# {hint plan} For the second function set the intensity equal to the ridge and solve for the number of queries;
# then look at what the formula does when the ridge is too high.
# {hint line} The answer is a whole number that reaches the ridge: round in the direction that still reaches it. A denominator of
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
### TESTS q3_1_tests, 5 points: check_intensities(intensity, queries_to_ridge)

# %% [markdown]
# Put it under the roof: prefill over three lengths and three head dimensions, and decode, each run by flash.
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
    measured[name] = intensity(query_len, kv_len, 1, head_dim, dtype), flops / ms / 1e9
    roof = roofs.attainable_tflops(measured[name][0], dtype_name)
    rows.append({"case": name, "queries": query_len, "keys": kv_len, "D": head_dim, "ms": ms, "FLOPs/Byte": measured[name][0],
                 "TFLOP/s": measured[name][1], "GB/s": fused / ms / 1e6, "share of roof": measured[name][1] / roof})
results["roofline"] = rows
plot_roofline(roofs.name, peak, bandwidth, measured=measured, title="Flash attention: prefill (S at one D, D at one S) and decode")
plot_beside("roofline", ["share of roof", "GB/s"], "case")
beside_guess("share of the roof, longest prefill", rows[2]["share of roof"])
beside_guess("share of the roof, decode", rows[5]["share of roof"])

# %% [markdown]
# A point above the roof? Either something else ran while the setup cell measured the roofs (run it again), or keys and values came
# from the cache of the chip.
#
# Decode reads the whole cache for one query. A second query, or a group that shares the keys, would ride along for nothing. That
# is what speculative decoding and grouped-query attention live on. How many may ride?
#
# **Before you run.** From `queries_to_ridge`: how many queries until decode is limited by compute? Up to which number is their
# time below 1.25 times that of one query?

# %%
guesses["queries that ride for at most 1.25 times the time"] = None  # a power of two
heads, kv_long = (16, 65536) if on_gpu else (4, 16384)
ridge = peak / bandwidth
print(f"this machine, {dtype_name}: ridge {ridge:.1f}, {queries_to_ridge(ridge, kv_long, 1, 64, dtype)} queries")
for name in ("A100", "H200", "B200"):
    at = get_ridge_point(name, "bf16")
    print(f"{name}, bf16: ridge {at:.0f}, {queries_to_ridge(at, 65536, 1, 64, torch.bfloat16)} queries, "
          f"{queries_to_ridge(at, 65536, 8, 64, torch.bfloat16)} with 8 heads to a key head")
query_lens = (1, 2, 4, 8, 16, 32, 64, 128, 256)
tensors = {n: random_qkv(2, heads, n, 64, kv_length=kv_long) for n in query_lens}
timed = time_in_turn({n: pinned("flash", *qkv) for n, qkv in tensors.items()}, iterations=9)
rows = [{"queries": n, "ms": m.median_ms, "95% from": m.interval_ms[0], "95% to": m.interval_ms[1], "ms a query": m.median_ms / n}
        for n, m in timed.items()]
results["queries"] = rows
at = get_ridge_point("H200", "bf16")
reach = {"this machine": queries_to_ridge(ridge, kv_long, 1, 64, dtype), "H200, recorded": queries_to_ridge(at, 65536, 1, 64, torch.bfloat16)}
plot_queries(rows, kv_long, reach)
show(rows, "queries")
beside_guess("queries that ride for at most 1.25 times the time",
             max(row["queries"] for row in rows if row["ms"] <= 1.25 * rows[0]["ms"]))

# %% [markdown]
# ### Question 3.2: Split the keys {points}
#
# Decode with 8 heads has 8 programs: 124 of 132 multiprocessors idle. **Split-KV** cuts the keys into parts, a program for each:
#
# ![Split-KV: the keys are cut into parts, each part gives an output and a log-sum-exp, and a second kernel merges them](assets/lab4_split_kv.svg)
#
# 1. `attend_part(q, k, v)`, of `q` (B, H, Sq, D) and `k`, `v` (B, Hkv, Lp, D): the part's output $O_p$ (B, H, Sq, D) and log-sum-exp
#    $L_p = \log\sum_{j\in p} e^{s_j}$ (B, H, Sq), both in **float32**. Heads are grouped as in 2.2.
# 2. `split_kv_attention(q, k, v, splits)`: cut the keys into `splits` parts of nearly equal size (they differ by 1), attend to
#    each by `attend_part`, and merge, in the dtype of `q`.
#
# Scores may be in the thousands, where $e^{L_p}$ overflows. With more splits than keys some parts are empty.
#
# {counts}
#
# {hint idea} A part knows its own maximum and its own sum. Two numbers, its output and its log-sum-exp, are enough to merge it with
# the others.
# {hint line} The weights of the parts add up to 1, and come from the log-sum-exps by an operation that subtracts the maximum by
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
### TESTS q3_2_part_tests, 3 points: check_attend_part(attend_part)
### TESTS q3_2_tests, 7 points: check_split_kv_attention(split_kv_attention)

# %% [markdown]
# ### Question 3.3: How many splits? {points}
#
# More splits keep more multiprocessors busy. They also make more parts to merge.
#
# ![Waves: 8 programs leave 124 of 132 multiprocessors idle; 16 splits fill one wave nearly; 17 splits need a second one for 4 programs](assets/lab4_waves.svg)
#
# - There are `programs` × `splits` pieces of work. The chip runs `units` of them at a time: a **wave**.
# - A piece has `kv_len / splits` keys, rounded up, in tiles of `tile` keys. A tile takes `tile_us` microseconds.
# - A wave or a tile that is not full takes as long as a full one.
# - With more than one split a second kernel merges: `combine_us` microseconds.
#
# `decode_us` is the time of a step. `best_splits` is the number of splits, from 1 to `most`, with the least time; of equal ones
# the smallest.
#
# {hint plan} Waves from programs times splits, keys of a part from kv_len over splits, tiles from those. Multiply, and add the
# merge if there is one. For the best number try all from 1 to `most`.
# {hint line} Three things are rounded up, one after the other. With one split there is nothing to merge. Of equal times, take the first.

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
### TESTS q3_3_tests, 4 points: check_splits(decode_us, best_splits)

# %% [markdown]
# What the model says about an H200 (132 multiprocessors), 65536 keys, tiles of 128 that take 0.5 µs, 4 µs to merge.
#
# **Before you run.** By how much does the best number of splits gain at batch 1? At which batch is nothing left to gain?

# %%
full_batch = None  # your line: the batch from which on 8 key heads a sequence, unsplit, fill 132 multiprocessors
check_full_batch(full_batch)
guesses["gain of the best split, batch 1"] = None
guesses["gain of the best split, batch 64"] = None
model = {"units": 132, "tile": 128, "tile_us": 0.5, "combine_us": 4.0}
gains = {}
for batch in (1, 4, 16, 64):
    times = [decode_us(8 * batch, 65536, n, **model) for n in range(1, 65)]
    best = best_splits(8 * batch, 65536, **model)
    gains[f"batch {batch}: best {best}, {times[0] / times[best - 1]:.2f}×"] = [times[0] / time for time in times]
    if batch in (1, 64):
        beside_guess(f"gain of the best split, batch {batch}", times[0] / times[best - 1])
plot_gains(gains)

# %% [markdown]
# The teeth are waves that are not full. At batch 4, four splits are nearly as good as 37.
#
# And the real backends? On a GPU the names of the longest kernels tell who splits: look for `split`, `combine` and `reduction`.
# (The idea is that of [Flash-Decoding](https://pytorch.org/blog/flash-decoding/).)
#
# **Before you run.** Which share of the memory bandwidth will flash reach at batch 1?

# %%
guesses["share of the bandwidth, batch 1, flash"] = None  # 0 to 1
cache_mb = None  # your line: MB of a cache of 8 key heads (32 query heads), 32768 keys, head dimension 128, bf16
check_cache_mb(cache_mb)
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
plot_beside("decode", ["share of bandwidth", "ms"], ["batch", "backend"])
if any(row["share of bandwidth"] > 1 for row in rows):
    print("A share over 1: keys and values came from the cache.")

# %% [markdown]
# ## A kernel that shares the work evenly
#
# The course has a decode kernel of its own, written in Gluon, the language of lab 3. It lays the blocks of keys of all heads of all
# sequences in one row, and gives each multiprocessor the same number of neighbours in that row. So no wave is left half empty,
# also when sequences are of different lengths. `attention_decode(q, k_cache, v_cache, seqlens=..., block_table=...)` calls it; on a
# machine without a Hopper GPU the same call goes to SDPA. Hold it against your own splits, with sequences of two lengths:

# %%
from utils.attention import attention_decode

q, k, v = random_qkv(2, 8, 1, 64, kv_heads=2, kv_length=600, dtype=torch.float16 if on_gpu else torch.float32)
lengths = torch.tensor([37, 600], dtype=torch.int32, device=device)  # the first sequence uses 37 of its 600 places
out = attention_decode(q, k, v, seqlens=lengths)
for b, length in enumerate(lengths.tolist()):
    one = slice(b, b + 1)
    mine = split_kv_attention(q[one], k[one, :, :length], v[one, :, :length], splits=4)
    print(f"sequence {b}, {length} keys: largest difference from your splits {(out[one] - mine).abs().max().item():.1e}")

if on_gpu:
    q, k, v = random_qkv(1, 32, 1, 128, kv_heads=8, kv_length=32768)
    calls = {"the course's": functools.partial(attention_decode, q, k, v)}
    calls |= {b: pinned(b, q, k, v, enable_gqa=True) for b in ("flash", "cudnn") if runs(b, q, k, v, enable_gqa=True)}
    results["decode_gluon"] = [{"by": name, "ms": m.median_ms} for name, m in time_in_turn(calls, iterations=7).items()]
    show(results["decode_gluon"])

# %% [markdown]
# How good is it? Recorded on an H200 with a cold L2 cache, against the best of cuDNN, FlashAttention 2, 3 and 4; their calls were
# interleaved:
#
# ![The recorded decode contest: time of the best other over the Gluon kernel's, with 1, 8 and 16 new tokens](assets/lab4_contest.svg)
#
# With one new token the kernel is 1.3 times as fast as the best other for one sequence of 2048 or 8192 keys. There the launch and
# the merge count as much as the bytes: 2048 keys reach less than a quarter of the speed of a copy. With eight sequences or more
# the kernel and the best other are within 5% of each other, and the kernel reads the cache at 0.84 to 0.98 of the speed of a
# copy, so little is left to gain. `docs/kernels/decode.md` tells what was tried.

# %% [markdown]
# ### Question 3.4: Explain decode {points}
#
# 1. Which intensity does one query approach for a long cache, with and without a group, and what does it say of decode?
# 2. Up to how many queries did your time stay nearly flat, and what did `queries_to_ridge` say? Why do they differ?
# 3. What does split-KV change: FLOPs, bytes, or something else? Why does it gain next to nothing at batch 64?
# 4. "Our decode is slow, so we use a faster FP8 tensor core." What does FP8 help here, and what does not?
#
# {hint plan} Put one query into your formula and let L grow. Read the table of queries: where does the time begin to rise, and what
# did the ridge say? For split-KV count FLOPs and bytes with and without.
# {hint line} For 3, count programs against multiprocessors at batch 1 and at batch 64. For 4: are bytes or FLOPs the limit?

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
#
# ![Three layouts of one tensor: contiguous, heads between tokens, and a head dimension that is not the last in memory, which flash refuses](assets/lab4_strides.svg)

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
# {hint idea} Shape and values are one thing, the order in memory is another. Two calls change the second without the first.
# {hint plan} Make a tensor in another memory order and look at it through swapped dimensions, so that the shape is as before. Ask
# `why_not` which strides flash minds.
# {hint line} `transpose` alone gives a view; which call really moves the numbers? Which of the four dimensions does a kernel read
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
### TESTS q4_1_tests, 4 points: check_strides(knocked_out_by_strides, strided_and_fast)

# %% [markdown]
# ### Question 4.2: Four more knock-outs {points}
#
# Strides are one way to lose flash. Find **four more**, each refused for a reason of its own. A knock-out is a function of `q`, `k`,
# `v`, of shape (B, H, S, D) in float32, that returns the arguments of SDPA in a dict. Math has to run them.
#
# ```python
# KNOCK_OUTS = {"my first": lambda q, k, v: {"query": q, "key": k, "value": v, "is_causal": True}, ...}
# ```
#
# Look for them on **CPU tensors**, with `why_not("flash", ...)`: the check asks that on every machine.
#
# <details>
# <summary>What the check counts</summary>
#
# The torch that is installed decides, and versions differ: newer ones run calls without a batch dimension, one head of keys for
# all heads of queries, and keys of length zero. Other knock-outs are safer, where your answer is graded with another version.
#
# </details>
#
# {hint idea} The dispatcher asks about shapes, sizes, options, mask and gradients. Each question can be answered with no.
# {hint plan} Change one thing at a time in a call that runs, and ask `why_not` for flash. Keep what is refused in new words. Let
# math compute it as well.
# {hint line} Numbers of dimensions, sizes of k and v that differ from those of q in one place, options of SDPA, shapes of a mask:
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
### TESTS q4_2_tests, 4 points: check_knock_outs(KNOCK_OUTS)

# %% [markdown]
# The map of your machine, with your knock-outs, and the map that was recorded on an H200 with torch 2.11, with the course's:
#
# ![The recorded map of an H200: math runs every call; strides knock out all three fused backends; masks, groups, dtypes and large heads knock out some](assets/lab4_map.svg)
#
# **Before you run.** In how many rows will flash run? How many backends run every row?

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
results["layouts"] = who_runs(calls, why_not)
beside_guess("rows that flash runs", sum(row["flash"] == "runs" for row in results["layouts"]))
beside_guess("backends that run every row", sum(all(row[b] == "runs" for row in results["layouts"]) for b in BACKENDS))

# %% [markdown]
# SDPA is not the only way in. The course's `attention(q, k, v, ..., backend=...)` has sixteen backends behind one call, and takes
# what SDPA does not: lengths, packed sequences, sinks, a log-sum-exp. A backend that cannot do what was asked says why, and another
# one never runs in its place. The next cell asks each backend of this machine.
#
# **Before you run.** How many of them give the log-sum-exp that Question 3.2 needs? How many take fp8?

# %%
guesses["backends that give a log-sum-exp"] = None
guesses["backends that take fp8"] = None
lse_numbers = None  # your line: how many numbers the log-sum-exp of a q (2, 4, 24, 32) has
check_lse_numbers(lse_numbers)
results["door"] = ask_the_door()
for what, call in (("give a log-sum-exp", "return_lse=True, sink=..."), ("take fp8", "q, k, v in fp8")):
    (row,) = (row for row in results["door"] if row["call"] == call)
    beside_guess(f"backends that {what}", list(row.values()).count("runs"))

# %% [markdown]
# ### Question 4.3: Apart without a copy {points}
#
# The output `packed` of a model's projection has shape (B, S, (H + 2 Hkv) · D): for each token first the query heads, then the key
# heads, then the value heads. It may be a slice: tokens may lie anywhere, the numbers of a token side by side.
#
# 1. `unpack_qkv(packed, heads, kv_heads)`: `q` (B, H, S, D), `k` and `v` (B, Hkv, S, D), as **views** into `packed` that flash
#    runs.
# 2. `ready_for_flash(x)`: a tensor of the shape and values of `x` that flash runs, a copy only where the strides of `x` need one.
#    (`x.contiguous()` copies too often.)
#
# {hint idea} All three tensors lie in `packed` already. Find the strides that show them.
# {hint plan} Split the last dimension into heads and numbers of a head. Bring heads before tokens. Then take the query heads, the
# key heads and the value heads apart.
# {hint line} Which operations return views, and which copy when they must? Compare `data_ptr()`. For the second function, only one
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
### TESTS q4_3_tests, 4 points: check_unpack(unpack_qkv, ready_for_flash)

# %% [markdown]
# **Before you run.** Three ways to use a `q` with bad strides: let the dispatcher fall back, copy first, or store it right in the
# first place. Guess the ratios.

# %%
your_strides = None  # your line: x.stride() of an x (2, 3, 10, 16) that lies in memory as (B, S, H, D)
check_your_strides(your_strides)
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
rows = [{"way": name, "ran": backends_in(operators_of(way))[0], "ms": timed[name].median_ms} for name, way in ways.items()]
beside_guess("fallback / stored right", rows[0]["ms"] / rows[2]["ms"])
beside_guess("copied first / stored right", rows[1]["ms"] / rows[2]["ms"])
results["strides"] = rows
plot_beside("strides", ["ms"], ["way", "ran"])

# %% [markdown]
# # Part 5: Same formula, other bits
#
# The backends compute the same formula, and their outputs differ. Nobody made a mistake: $(a + b) + c$ and $a + (b + c)$ round
# differently, and a kernel that keeps an intermediate result in bf16 rounds once more than one that does not.
#
# ![Two orders of attention, with the four places where a number may be rounded to bf16](assets/lab4_rounding.svg)

# %% [markdown]
# ### Question 5.1: Where rounding happens {points}
#
# Write attention with switches, in float64, rounded **only where a switch says so** by `to_bf16(x)`: to bf16 and back.
#
# 1. $s = QK^\top/\sqrt{D}$. With `scores`, round $s$.
# 2. $e = \exp(s - \max s)$, row by row, and $\ell = \sum e$ **before** anything else is rounded.
# 3. With `normalize_first`, the textbook's order: $P = e/\ell$; with `p`, round $P$; $O = PV$.
# 4. Without it, the order of a fused kernel: with `p`, round $e$; $O = (eV)/\ell$.
# 5. With `output`, round $O$. Return float64.
#
# {hint plan} Write the formula without switches and compare it with SDPA in float64. Then add one `if` after the other. The two
# orders differ in what is multiplied with V, and in when the sum divides.
# {hint line} The sum is taken before anything is rounded. And with `p`, it depends on `normalize_first` which numbers are rounded.

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
### TESTS q5_1_tests, 7 points: check_rounded_attention(rounded_attention)

# %% [markdown]
# Now find for each backend a recipe with the same error: below are the errors of some recipes, and of the real backends in bf16.
#
# **Before you run.** Which single rounding costs most: of the scores, of $P$, of the output? And does math, with its
# score matrix in memory, have the larger error or the smaller one?

# %%
guesses["the rounding that costs most"] = None  # "scores", "P" or "output"
guesses["math's error / flash's error, bf16"] = None
both_errors = None  # your line: the rms of two independent errors of rms 0.003 and 0.004 together
check_both_errors(both_errors)
q, k, v = random_qkv(1, 4, 2048 if on_gpu else 512, 64, dtype=torch.bfloat16)
recipes = {
    "output": {"output": True},
    "P, output": {"p": True, "output": True},
    "e, output": {"p": True, "normalize_first": False, "output": True},
    "scores, output": {"scores": True, "output": True},
    "scores, P, output": {"scores": True, "p": True, "output": True},
}
outputs = {f"rounded: {name}": rounded_attention(q, k, v, **switches) for name, switches in recipes.items()}
bf16_outputs = {backend: pinned(backend, q, k, v)() for backend in running_backends(q, k, v)}
rows = []
for name, out in (outputs | bf16_outputs).items():
    largest, rms = errors(out, q, k, v)
    rows.append({"what": name, "largest error": largest, "rms error": rms})
results["rounding"] = rows
plot_beside("rounding", ["rms error"], "what")
rms_of = {row["what"]: row["rms error"] for row in rows}
alone = {"output": rms_of["rounded: output"]} | {  # errors add up in squares
    name: math.sqrt(max(rms_of[f"rounded: {name}, output"] ** 2 - rms_of["rounded: output"] ** 2, 0.0)) for name in ("P", "scores")}
beside_guess("the rounding that costs most", max(alone, key=alone.get))
beside_guess("math's error / flash's error, bf16", float(rms_of["math"] / rms_of["flash"]))

# %% [markdown]
# ### Question 5.2: Steps between bf16 numbers {points}
#
# "They differ by 0.001": is that much? Count in **steps** (*ulp*, unit in the last place): how many bf16 numbers one walks from
# $a$ to $b$.
#
# Write `ulps_apart(a, b)` for two bf16 tensors of one shape: a tensor of integers, of that shape. Neighbours are 1
# apart, over powers of two and around zero as well. 0 and -0 are the same number. There is no NaN and no infinity.
#
# {hint idea} The 16 bits of a positive number, read as an integer (`x.view(torch.int16)`), count the numbers from 0 on, in order and without
# gaps. Negative ones run the other way.
# {hint plan} Map each number to a place on one line, so that neighbours are 1 apart. Then the distance is a difference.
# {hint line} Print the integers of 0, -0, the smallest positive number and the smallest negative one. Where should each lie? And
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
### TESTS q5_2_tests, 3 points: check_ulps_apart(ulps_apart)

# %%
after_one = None  # your line: the next bf16 number after 1
check_after_one(after_one)
rows = []
names = list(bf16_outputs)
for one, other in [(one, other) for i, one in enumerate(names) for other in names[i + 1 :]]:
    steps = ulps_apart(bf16_outputs[one], bf16_outputs[other]).flatten().float()
    size = bf16_outputs[one].abs().flatten().float()
    common = steps[size > size.median()]  # a number near 0 is many steps from its neighbour in value
    rows.append({"backends": f"{one}, {other}", "equal bits": (steps == 0).float().mean().item(),
                 "at most 1 step": (steps <= 1).float().mean().item(), "most steps": int(steps.max()),
                 "most steps, larger half": int(common.max())})
results["ulps"] = rows
plot_beside("ulps", ["equal bits", "at most 1 step", "most steps", "most steps, larger half"], "backends")

# %% [markdown]
# ### Question 5.3: Same bits every time? {points}
#
# Two backends may differ. What about the same backend, twice? A kernel that adds with atomic operations adds in the order in which
# its programs happen to finish.
#
# Write `distinct_results(fn, runs)`: call `fn()` `runs` times and count how many **different** results came, bit for
# bit. `fn` may return a tensor of any floating-point dtype, or a tuple of tensors, all of which count. It may write its result into
# the same memory each time.
#
# {hint idea} Two results are the same if their bytes are the same. A set of bytes counts different ones.
# {hint line} Values are not bits: a NaN with the same bits is the same result, and 0 and -0 are two. And `fn` may write its next result over
# the last one.

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
### TESTS q5_3_tests, 3 points: check_distinct_results(distinct_results)

# %% [markdown]
# Four questions about each backend. Does forward repeat itself? Does backward, as it is and in deterministic mode? Does
# the output of *one* sequence depend on what else is in the batch? Does that of *one* query?
#
# **Before you run.** Guess for flash. (The last question is one of the reasons why a chatbot at temperature 0 does not always
# give the same answer; [He et al.](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/) tell the story.)

# %%
guesses["flash: different outputs of 8"] = None
guesses["flash: different gradients of 8"] = None
guesses["flash: share of numbers that differ, one query alone"] = None  # 0 to 1
q, k, v = random_qkv(4, 8, 2048 if on_gpu else 256, 64, dtype=torch.bfloat16)
wide = [t.to(dtype) for t in (q, k, v)]  # bf16 hides most differences in fp32 sums
leaves, dout = [t.clone().requires_grad_() for t in (q, k, v)], torch.randn_like(q)


def gradients():
    return torch.autograd.grad(F.scaled_dot_product_attention(*leaves), leaves, dout)


rows = []
for backend in running_backends(*leaves):
    with warnings.catch_warnings(), sdpa_kernel(BACKENDS[backend]):
        warnings.simplefilter("ignore")
        row = {"backend": backend, "forward": distinct_results(lambda: F.scaled_dot_product_attention(q, k, v), 8)}
        row["backward"] = distinct_results(gradients, 8)
        torch.use_deterministic_algorithms(True)  # warn_only=True would warn, and go on with the same kernel
        try:
            row["backward, deterministic"] = str(distinct_results(gradients, 8))
        except RuntimeError as error:
            row["backward, deterministic"] = "refused"
            print(f"{backend} in deterministic mode: {str(error).splitlines()[0][:150]}")
        finally:
            torch.use_deterministic_algorithms(False)
        whole, alone = (F.scaled_dot_product_attention(q[:n], k[:n], v[:n]) for n in (4, 1))
        among_others = F.scaled_dot_product_attention(*wide)[:, :, -1:]
        one_query = F.scaled_dot_product_attention(wide[0][:, :, -1:], *wide[1:])
    row["one sequence alone: most steps"] = int(ulps_apart(alone, whole[:1].contiguous()).max())
    share = (one_query != among_others).float().mean().item()
    row[f"one query alone, {dtype_name}: share of numbers that differ"] = share
    rows.append(row)
    if backend == "flash":
        beside_guess("flash: different outputs of 8", row["forward"])
        beside_guess("flash: different gradients of 8", row["backward"])
        beside_guess("flash: share of numbers that differ, one query alone", share)
results["determinism"] = rows
show(rows, "backend")
if not on_gpu:
    show_recorded("determinism")

# %% [markdown]
# ### Question 5.4: Explain the bits {points}
#
# With numbers from your tables:
# 1. Which recipe explains flash, and which math on your machine? What does math do with bf16 inputs, then?
# 2. Why does a fused kernel round $e$ to bf16 at all, although its scores are in fp32?
# 3. Give a test that tells "rounding" from "a mistake", and say where its threshold comes from. Why not "1 step everywhere"?
# 4. Backward does not always repeat itself on a GPU (recorded column `backward`). Which sum is added in changing order, and what
#    does a deterministic kernel do instead?
# 5. The same query gives other bits alone than among others. Nothing is random there. What changed?
#
# {hint idea} A sum in another order is rounded at other places. Every one of the five answers is about which sum, and which order.
# {hint plan} 1: match the errors in the table. 2: what do tensor cores take as operands? 3: what is a right result allowed to
# differ by? 4 and 5: who adds what, and in which order?
# {hint line} For 4, ask which gradient several programs have to add to at the same time. For 5, nothing is random: the shape of the
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
# FP8 (`torch.float8_e4m3fn`) has 4 significant bits and ends at 448. A tensor is divided by a **scale** before it is rounded, so that
# its largest absolute value lands on 448. With a scale for each block of tokens, a very large token damages its own block alone.
#
# 1. `quantize_fp8(x, block)` for `x` (B, H, S, D): `(x8, scale)`, with `x8 = x / scale` in FP8. `scale` is float32, of shape
#    (1, 1, 1, 1) for `block=None`; otherwise (B, H, ceil(S / block), 1), one for each `block` tokens of a head. The last block may
#    be shorter. A block of zeros gets scale 1.
# 2. `dequantize_fp8(x8, scale, block)`: back to float32.
#
# {hint idea} A scale moves the numbers into the range of the format. The error is then relative to the largest number under the
# same scale.
# {hint line} A block of zeros has no largest value. The last block may be shorter. And each token has to meet the scale of its own
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
### TESTS bonus_5_5_tests, 10 points: check_fp8(quantize_fp8, dequantize_fp8)

# %% [markdown]
# First the format alone: every 128th token is made larger by a factor, and the error is that of the *other* tokens. Then attention
# with `q`, `k` and `v` in FP8; the products are computed in fp32. Only the rounding counts, so every machine gives these numbers.
#
# **Before you run.** bf16 rounds by up to 2⁻⁸ of a number, e4m3 by up to 2⁻⁴. What error do you expect? From which factor on does a
# scale for each token save a third of the error: 100, 10,000 or 100,000? And where would INT8 need it, whose steps are equal?

# %%
kinds_of_scale = {"one scale": None, "blocks of 64": 64, "a scale for each token": 1}
guesses["error of e4m3 / error of bf16"] = None
guesses["a scale for each token saves a third of the error from"] = None  # "100 times", "10000 times" or "100000 times"
rows = []
for factor in (1, 10, 100, 10_000, 100_000):
    x = random_qkv(1, 4, 1024, 64, dtype=torch.float32)[0]
    ordinary = torch.arange(1024, device=device) % 128 != 0
    x[:, :, ~ordinary] *= factor
    scale = x.abs().max() / 127  # INT8 has 255 numbers, -127 to 127, one step apart
    rounded = {name: dequantize_fp8(*quantize_fp8(x, block), block) for name, block in kinds_of_scale.items()}
    rounded["INT8, one scale"] = (x / scale).round() * scale
    size = x[:, :, ordinary].square().mean()
    rows.append({"large tokens": f"{factor} times"} | {
        name: ((back - x)[:, :, ordinary].square().mean() / size).sqrt().item() for name, back in rounded.items()})
results["fp8"] = rows
show(rows, "large tokens")
q, k, v = random_qkv(1, 4, 512, 64, dtype=torch.float32)
by_format = {"bf16": [t.bfloat16() for t in (q, k, v)]}
by_format |= {f"FP8, {name}": [dequantize_fp8(*quantize_fp8(t, block), block) for t in (q, k, v)] for name, block in kinds_of_scale.items()}
attention_errors = {name: errors(F.scaled_dot_product_attention(*rounded), q, k, v)[1] for name, rounded in by_format.items()}
show([{"attention": name, "rms error": error} for name, error in attention_errors.items()], "attention")
beside_guess("error of e4m3 / error of bf16", attention_errors["FP8, one scale"] / attention_errors["bf16"])
saved = [row["large tokens"] for row in rows if row["a scale for each token"] < 2 / 3 * row["one scale"]]
beside_guess("a scale for each token saves a third of the error from", saved[0] if saved else "none of these")

# %% [markdown]
# FP8 is a floating-point format: its steps shrink with the number, so a token that is a hundred times smaller than the largest
# keeps its 4 significant bits, until the exponent ends. At a factor of 10 the ordinary tokens have a few steps of INT8 left; at
# 100 most of their numbers are rounded to zero.

# %% [markdown]
# # Part 6: The case
#
# The course measured all four backends on an H200, over shapes of training, prefill and decode: backends took turns, each was
# compared with float64 first, and proved from its kernels. The numbers are **recorded**. One row is one shape and one backend.
#
# <details>
# <summary>The columns</summary>
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
# | `kernels` | a list: the names of the kernels that ran |
#
# Decode rows have 1 or 4 queries. Four is speculative decoding: the model checks four tokens at once.
#
# </details>

# %%
grid = load_grid()
display(grid.groupby(["kind", "backend"])["status"].value_counts().unstack(fill_value=0))
columns = ["shape", *SHAPE, "backend", "status", "is_default", "ms", "gb_s", "kernels"]
show(grid[grid["backend"] == "cudnn"].sort_values("shape")[columns].set_index("shape").iloc[[0, -1]].T.reset_index(names="shape"), "shape")

# %% [markdown]
# Three functions of such a table come with the lab, and count rows with `status` "ok" alone. `fastest(grid)` is the backend with the
# smallest `ms` of each shape that has a time. `default_slowdown(grid)` is `ms` of the default over that smallest `ms`, of each shape
# whose default has a time. Both are Series, indexed by `shape`. `geometric_mean(values)` is the right mean for ratios.
#
# **Before you run.** On which share of the shapes will the default be the best? And which backend will win decode?

# %%
guesses["share of shapes where the default is the best"] = None  # 0 to 1
your_mean = None  # your line: the right mean of a gain of 1.25 on one shape and of 0.8 on another
check_your_mean(your_mean)
guesses["the backend that wins most decode shapes"] = None
of_shape = grid.drop_duplicates("shape").set_index("shape")
wins = pd.crosstab(of_shape["kind"], fastest(grid))
display(wins)
default_of = grid[grid["is_default"]].set_index("shape")["backend"]
beside_guess("share of shapes where the default is the best", float((fastest(grid) == default_of.reindex(fastest(grid).index)).mean()))
beside_guess("the backend that wins most decode shapes", wins.loc["decode"].idxmax())
plot_slowdowns(grid)

# %% [markdown]
# ### Question 6.1: The case of two kernels {points}
#
# A kernel's name tells its chip (`sm80`, `sm90`), and a `reduction` after cuDNN's kernel merges parts, as in Question 3.2. Write
# `grid_answers(grid)`, a dict, for any such table, from its rows with `status` "ok".
#
# | Key | Question |
# |---|---|
# | `default_wins` | share (0 to 1) of the shapes with a fastest backend where it is the default |
# | `default_loss` | geometric mean of `default_slowdown` |
# | `decode_winner` | the fastest on most decode shapes |
# | `worst_default` | the largest `default_slowdown` in decode |
# | `decode_bandwidth` | the largest `gb_s` in decode over `GPU_SPECS["H200"]["memory_bandwidth_tb_s"]` |
# | `sm80_one_query` | of cuDNN's decode rows with one query: share with `sm80` in a kernel's name |
# | `splits_four_queries` | of those with four queries: share with `reduction` in a kernel's name |
#
# {hint plan} Make the table of valid rows, and from it those of decode and of cuDNN's decode. The given functions do the rest. For the
# kernels, `map` a function over the column that looks for a word in any of the names.
# {hint line} For `default_wins` every shape that has a fastest backend counts, also one whose default has no time. GB/s and TB/s
# differ by 1000. A row that is not "ok" may have no list of kernels.

# %% nbgrader={"grade_id": "q6_1", "solution": true}
def grid_answers(grid: pd.DataFrame) -> dict:
    """Answers of Question 6.1 by key, computed from a table of results."""
    ### BEGIN SOLUTION
    timed = grid[grid["status"] == "ok"]
    kinds = grid.drop_duplicates("shape").set_index("shape")["kind"]
    winners, loss = fastest(grid), default_slowdown(grid)
    default = timed[timed["is_default"]].set_index("shape")["backend"]
    decode = timed[timed["kind"] == "decode"]
    cudnn = decode[decode["backend"] == "cudnn"]

    def share(queries, word):
        names = cudnn.loc[cudnn["seq_len_q"] == queries, "kernels"]
        return float(names.map(lambda kernels: any(word in name for name in kernels)).mean())

    return {
        "default_wins": float((default.reindex(winners.index) == winners).mean()),
        "default_loss": geometric_mean(loss),
        "decode_winner": winners[kinds.reindex(winners.index) == "decode"].value_counts().idxmax(),
        "worst_default": loss[kinds.reindex(loss.index) == "decode"].max(),
        "decode_bandwidth": decode["gb_s"].max() / 1e3 / GPU_SPECS["H200"]["memory_bandwidth_tb_s"],
        "sm80_one_query": share(1, "sm80"),
        "splits_four_queries": share(4, "reduction"),
    }
    ### END SOLUTION
### TESTS q6_1_tests, 9 points: check_grid_answers(grid_answers)

# %% [markdown]
# **Before you run.** Write the numbers down that you dare to guess.

# %%
guesses["default_loss"] = None
guesses["worst_default"] = None
guesses["decode_bandwidth"] = None  # 0 to 1
guesses["sm80_one_query"] = None  # 0 to 1
guesses["splits_four_queries"] = None
answers = grid_answers(grid)
for key in ("default_loss", "worst_default", "decode_bandwidth", "sm80_one_query", "splits_four_queries"):
    beside_guess(key, float(answers[key]))
plot_case(grid)

# %% [markdown]
# **The case is closed.** One query multiplies next to nothing: bytes are the limit, so a kernel for an old chip loses nothing, and
# cuDNN splits the keys where there are few programs. With four queries another kernel answers. It could multiply faster, and that
# does not help; it never splits, so a call of 4 programs reads with 4 of 132 multiprocessors. Flash splits there. From about 32
# programs on cuDNN wins again. The rule of Question 1.4 sees none of this: it asks for versions, not shapes.
#
# The sweep also measured shapes at random, off the grid. They were *held out*: a rule that was made to fit the grid has not seen
# them. Write a rule into the next cell, and run it until you would take it to work.
#
# **Before you run.** On this H200 the default was cuDNN for every shape. On what share of the held-out shapes is it within 3% of the
# best?

# %%
guesses["held out, within 3% of the best: always cuDNN"] = None  # 0 to 1


def rule(call):
    """Your rule: the backend for a call, which is a row of the table; for example `call["head_dim"] > 128` may decide."""
    return "cudnn"  # your lines


held_out = load_grid("held-out")
show([score_rule(rule, grid, "the grid"), score_rule(rule, held_out, "held out")])
always = score_rule(lambda call: "cudnn", held_out, "held out")
beside_guess("held out, within 3% of the best: always cuDNN", always["within 3% of the best"])

# %% [markdown]
# ### Question 6.2: Write the rule {points}
#
# You run a service on H200s. Write the rule that you take to work.
#
# 1. A rule of four lines: which backend for which calls? Support each line with numbers.
# 2. What does it gain over the default, as a geometric mean? What does it lose against the best for every shape? And off the grid?
# 3. Which calls does your favourite refuse (the map of Part 4)? What does your rule do then?
# 4. Name two reasons why the table may be wrong for your service tomorrow, and one measurement that would tell you.
# 5. Somebody wants to ship the rule for A100s as well. What do you answer?
#
# {hint plan} Look at winners by kind first, then by the number of queries, then by head dimension. Each line of the rule is one
# condition; the cell above says what it gains and loses.
# {hint line} Where is the default slow by more than 1.5? What do these shapes have in common? And which calls did the map of Part 4
# refuse for your favourite?

# %% [markdown] nbgrader={"grade_id": "q6_2", "grade": true, "solution": true, "points": 5}
# 1. For example: cuDNN for training and prefill (it wins 90 of 93 shapes); flash for decode of four queries with at most
#    16 programs, batch × key heads (18 of 19 shapes, 1.9 times as fast: it splits the keys there, and cuDNN does not);
#    flash for decode of one query with head dimension 256 (29 of 36, 1.15 times); cuDNN for the other decode shapes.
# 2. The rule above gains 1.07, and takes 1.01 times the best.
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
# ## Save your results

# %%
save()

# %% [markdown]
# ## What you know now
#
# - What ran is what the operators and kernels say. Not the name of the function, not what was asked for.
# - A list of backends says which may run. One backend alone is a pin, and a refusal has words.
# - A kernel made for the chip is worth a factor of two where products are the limit, and nothing where bytes are.
# - Decode reads a cache for a handful of FLOPs. Splitting the keys brings the whole chip to read it; it saves no byte.
# - One stride decides whether the fast kernel runs. A copy is often cheaper than the fallback, and a right layout is free.
# - Backends differ by rounding. Compare each with float64, not with each other.
# - A dispatcher's order was written by somebody who did not have your shapes. Measure, then choose.
