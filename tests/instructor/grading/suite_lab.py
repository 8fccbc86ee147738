# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: nbgrader,tags,-all
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A lab to attack
#
# One question of each kind that the labs have, each small. {points:regular} points and {points:bonus} bonus points.
#
# {points:table}

# %% nbgrader={"grade_id": "setup", "locked": true}
import random
import time
import tomllib
from pathlib import Path

import torch

from utils.attention.masks import dense_mask
from utils.checking import MATMUL, check, expect_close, expect_number

torch.manual_seed(0)

# %% [markdown]
# ## Part 1
#
# ### Question 1.1: A product {points}
#
# Multiply two matrices by broadcasting. Library products are not allowed.


# %% nbgrader={"grade_id": "q1_1", "solution": true}
def gemm_broadcast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply (M, K) by (K, N)."""
    ### BEGIN SOLUTION
    return (a[:, :, None] * b[None]).sum(dim=1)
    ### END SOLUTION


# %% nbgrader={"grade_id": "q1_1_tests", "grade": true, "points": 4}
@check("1.1", "A product", forbids=MATMUL, hint="multiply and sum")
def check_gemm(gemm, shape=(2, 3, 2), seed=0):
    generator = torch.Generator().manual_seed(seed)
    m, k, n = shape
    a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    expect_close(gemm(a, b), a @ b, rtol=1e-4, atol=1e-5, what="gemm_broadcast(a, b)")


check_gemm(gemm_broadcast).raise_if_wrong()
### BEGIN HIDDEN TESTS
for hidden_shape in ((4, 5, 3), (1, 7, 1), (6, 2, 5)):
    check_gemm(gemm_broadcast, hidden_shape, seed=random.SystemRandom().getrandbits(40)).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# The same product again, in numbers that one can follow.

# %%
print(gemm_broadcast(torch.arange(6.0).reshape(2, 3), torch.ones(3, 2)))

# %% [markdown]
# ### Question 1.2: Its costs {points}
#
# Return `{"flops": ..., "bytes": ...}` for one product, with each matrix read or written once.


# %% nbgrader={"grade_id": "q1_2", "solution": true}
def gemm_cost(m: int, n: int, k: int, dtype: torch.dtype) -> dict:
    """FLOPs and least bytes of (M, K) @ (K, N)."""
    ### BEGIN SOLUTION
    return {"flops": 2 * m * n * k, "bytes": (m * k + k * n + m * n) * dtype.itemsize}
    ### END SOLUTION


# %% nbgrader={"grade_id": "q1_2_tests", "grade": true, "points": 3}
@check("1.2", "Costs")
def check_cost(cost, m=4, n=8, k=16, dtype=torch.float32):
    got = cost(m, n, k, dtype)
    assert isinstance(got, dict) and set(got) == {"flops", "bytes"}, f"expected flops and bytes, got {got!r}"
    expect_number(got["flops"], 2 * m * n * k, rel=1e-9, unit="FLOPs", what="flops")
    expect_number(got["bytes"], (m * k + k * n + m * n) * dtype.itemsize, rel=1e-9, unit="bytes", what="bytes")


check_cost(gemm_cost).raise_if_wrong()
### BEGIN HIDDEN TESTS
for hidden_dtype in (torch.float64, torch.bfloat16, torch.float32):
    hidden_m, hidden_n, hidden_k = random.SystemRandom().sample(range(11, 900), 3)
    check_cost(gemm_cost, hidden_m, hidden_n, hidden_k, hidden_dtype).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 1.3: A number {points}
#
# How many bytes does a bf16 KV cache take for 26 layers, one key head of 256, 4096 tokens, keys and values?

# %% nbgrader={"grade_id": "q1_3", "solution": true}
cache_bytes = None
### BEGIN SOLUTION
cache_bytes = 2 * 26 * 256 * 4096 * 2
### END SOLUTION

# %% nbgrader={"grade_id": "q1_3_tests", "grade": true, "points": 2}
assert cache_bytes is not None, "cache_bytes is not set yet"


### BEGIN HIDDEN TESTS
@check("1.3", "A number")
def check_cache(value):
    expect_number(value, 109051904, rel=1e-9, unit="bytes", what="cache_bytes")


check_cache(cache_bytes).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 1.4: A file {points}
#
# Write `BLOCK_M`, `BLOCK_N` and `BLOCK_K` for an fp16 GEMM: two stages of both tiles in 96 KiB of shared memory, M and
# N tiles from 64 on, the K tile a multiple of 16.

# %% nbgrader={"grade_id": "q1_4", "solution": true}
# %%writefile tiles.toml
### BEGIN SOLUTION
BLOCK_M = 128
BLOCK_N = 128
BLOCK_K = 64
### END SOLUTION


# %% nbgrader={"grade_id": "q1_4_tests", "grade": true, "points": 3}
@check("1.4", "Tiles")
def check_tiles(text):
    tiles = tomllib.loads(text)
    assert set(tiles) == {"BLOCK_M", "BLOCK_N", "BLOCK_K"}, f"expected three tile sizes, got {sorted(tiles)}"


check_tiles(Path("tiles.toml").read_text()).raise_if_wrong()


### BEGIN HIDDEN TESTS
@check("1.4", "Tiles that fit")
def check_tiles_fit(text):
    chosen = tomllib.loads(text)
    m, n, k = (chosen[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    assert all(type(size) is int and size >= 16 for size in (m, n, k)), "tile sizes are integers from 16 on"
    assert k % 16 == 0 and m >= 64 and n >= 64, "the tiles are too small"
    assert 2 * (m * k + k * n) * 2 <= 96 * 1024, "two stages of these tiles do not fit"


check_tiles_fit(Path("tiles.toml").read_text()).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ## Part 2
#
# ### Question 2.1: A timer {points}
#
# Call `fn` `n_calls` times and time each call on its own, in ms. `synchronize()` waits for the device.


# %% nbgrader={"grade_id": "q2_1", "solution": true}
def time_calls(fn, n_calls: int, synchronize) -> list[float]:
    """Time n_calls calls of fn, each on its own, in ms."""
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


# %% nbgrader={"grade_id": "q2_1_tests", "grade": true, "points": 3}
class Queue:
    """A pretended device: a launch returns at once, the work is done after `work_s`."""

    def __init__(self, work_s):
        self.work_s, self.done, self.log = work_s, 0.0, []

    def launch(self):
        self.log.append("call")
        self.done = max(self.done, time.perf_counter()) + self.work_s[min(self.log.count("call"), len(self.work_s)) - 1]

    def synchronize(self):
        self.log.append("wait")
        time.sleep(max(0.0, self.done - time.perf_counter()))


@check("2.1", "A timer")
def check_timer(time_calls, work_s=(0.02, 0.01)):
    device = Queue(work_s)
    began = time.perf_counter()
    times = time_calls(device.launch, len(work_s), device.synchronize)
    elapsed_ms = (time.perf_counter() - began) * 1e3
    assert isinstance(times, list) and len(times) == len(work_s), f"expected {len(work_s)} times, got {times!r}"
    assert device.log.count("call") == len(work_s), "fn was not called n_calls times"
    for got, work in zip(times, work_s, strict=True):
        assert float(got) >= 0.99e3 * work, f"the work takes {work * 1e3:.1f} ms, and time_calls says {got:.4g} ms"
    assert sum(map(float, times)) <= elapsed_ms * 1.01 + 1, "the times add up to more than went by"


check_timer(time_calls).raise_if_wrong()
### BEGIN HIDDEN TESTS
check_timer(time_calls, [random.SystemRandom().uniform(0.005, 0.03) for _ in range(4)]).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 2.2: A module {points}
#
# RMSNorm with a weight that starts at ones.


# %% nbgrader={"grade_id": "q2_2", "solution": true}
class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dimension."""

    ### BEGIN SOLUTION
    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps) * self.weight

    ### END SOLUTION


# %% nbgrader={"grade_id": "q2_2_tests", "grade": true, "points": 3}
@check("2.2", "RMSNorm")
def check_norm(norm_class, width=8, seed=0):
    x = 3 * torch.randn(4, width, generator=torch.Generator().manual_seed(seed))
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    with torch.no_grad():
        got = norm_class(width, eps=1e-5)(x)
    expect_close(got, expected, rtol=1e-4, atol=1e-5, what="RMSNorm(width)(x)")


check_norm(RMSNorm).raise_if_wrong()
### BEGIN HIDDEN TESTS
for hidden_width in (3, 33):
    check_norm(RMSNorm, hidden_width, seed=random.SystemRandom().getrandbits(40)).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 2.3: An MLP {points}
#
# `relu(x w1) w2`, with your own product of Question 1.1.


# %% nbgrader={"grade_id": "q2_3", "solution": true}
def mlp(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """relu(x w1) w2."""
    ### BEGIN SOLUTION
    return gemm_broadcast(torch.relu(gemm_broadcast(x, w1)), w2)
    ### END SOLUTION


# %% nbgrader={"grade_id": "q2_3_tests", "grade": true, "points": 3}
@check("2.3", "An MLP", forbids=MATMUL, hint="use gemm_broadcast")
def check_mlp(mlp, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, w1, w2 = (torch.randn(*shape, generator=generator) for shape in ((3, 4), (4, 6), (6, 2)))
    expect_close(mlp(x, w1, w2), torch.relu(x @ w1) @ w2, rtol=1e-4, atol=1e-5, what="mlp(x, w1, w2)")


check_mlp(mlp).raise_if_wrong()
### BEGIN HIDDEN TESTS
check_mlp(mlp, seed=random.SystemRandom().getrandbits(40)).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ### Question 2.4: In words {points}
#
# Why is the product by broadcasting slow?

# %% [markdown] nbgrader={"grade_id": "q2_4", "grade": true, "solution": true, "points": 4}
# It writes every one of the M K N products to memory before it adds them.
#
# === BEGIN MARK SCHEME ===
# Two points for the intermediate tensor, two for its size.
# === END MARK SCHEME ===

# %% [markdown]
# ### Bonus Question 2.5: A GEMV {points}


# %% nbgrader={"grade_id": "bonus_2_5", "solution": true}
def gemv(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Multiply (M, K) by (K,)."""
    ### BEGIN SOLUTION
    return torch.stack([(row * x).sum() for row in a])
    ### END SOLUTION


# %% nbgrader={"grade_id": "bonus_2_5_tests", "grade": true, "points": 2}
@check("Bonus 2.5", "A GEMV")
def check_gemv(gemv, m=3, k=4):
    a, x = torch.randn(m, k), torch.randn(k)
    expected = a @ x
    expect_close(gemv(a, x), expected, rtol=1e-4, atol=1e-5, what="gemv(a, x)")


check_gemv(gemv).raise_if_wrong()
### BEGIN HIDDEN TESTS
for hidden_m in random.SystemRandom().sample(range(2, 20), 3):
    check_gemv(gemv, hidden_m, hidden_m + 3).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# ## Part 3
#
# ### Question 3.1: A mask {points}
#
# A mask function: a token sees those of its own document (`numbers`, one a token) that `also` lets through.


# %% nbgrader={"grade_id": "q3_1", "solution": true}
def documents_and(numbers: torch.Tensor, also):
    """mask_mod(b, h, q, k): the same document, and also(b, h, q, k)."""

    ### BEGIN SOLUTION
    def mask_mod(b, h, q, k):
        return (numbers[q] == numbers[k]) & also(b, h, q, k)

    return mask_mod
    ### END SOLUTION


# %% nbgrader={"grade_id": "q3_1_tests", "grade": true, "points": 3}
@check("3.1", "A mask")
def check_mask(documents_and, size=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 3, (size,), generator=generator)
    far = torch.rand(size, size, generator=generator) < 0.7
    mod = documents_and(numbers, lambda b, h, q, k: far[q, k] | (h > 0))
    same = numbers[:, None] == numbers
    for head, expected in ((0, same & far), (1, same)):
        for _ in range(2):
            got = dense_mask(mod, size, size, h=head)
            assert torch.equal(got, expected), f"head {head}: {int((got != expected).sum())} pairs are wrong"


check_mask(documents_and).raise_if_wrong()
### BEGIN HIDDEN TESTS
for hidden_size in random.SystemRandom().sample(range(8, 24), 2):
    check_mask(documents_and, hidden_size, seed=random.SystemRandom().getrandbits(40)).raise_if_wrong()
### END HIDDEN TESTS

# %% [markdown]
# The end.
