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
# # A small lab
#
# It is worth {points:regular} points and {points:bonus} bonus points.
#
# {points:table}

# %% nbgrader={"grade_id": "setup", "locked": true}
import torch

from utils.checking import MATMUL, check, expect_close, expect_number

# %% [markdown]
# ### Question 1.1: A product {points}
#
# Multiply two matrices by broadcasting.


# %% nbgrader={"grade_id": "q1_1", "solution": true}
def gemm_broadcast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply (M, K) by (K, N)."""
    ### BEGIN SOLUTION
    return (a[:, :, None] * b[None]).sum(dim=1)
    ### END SOLUTION


# %% nbgrader={"grade_id": "q1_1_tests", "grade": true, "points": 6}
@check("1.1", "A product", forbids=MATMUL, hint="multiply and sum")
def check_gemm(gemm, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(3, 4, generator=generator), torch.randn(4, 5, generator=generator)
    expect_close(gemm(a, b), a @ b, rtol=1e-4, atol=1e-5, what="gemm_broadcast(a, b)")


check_gemm(gemm_broadcast).raise_if_wrong()
### BEGIN HIDDEN TESTS
for hidden_seed in (3, 17):
    check_gemm(gemm_broadcast, seed=hidden_seed).raise_if_wrong()
### END HIDDEN TESTS

# %%
later = gemm_broadcast(torch.ones(2, 3), torch.ones(3, 2))

# %% [markdown]
# ### Question 1.2: In words {points}
#
# Why is it slow?

# %% [markdown] nbgrader={"grade_id": "q1_2", "grade": true, "solution": true, "points": 4}
# It writes every one of the M K N products to memory before it adds them.
#
# === BEGIN MARK SCHEME ===
# Two points for the intermediate tensor, two for its size.
# === END MARK SCHEME ===

# %% [markdown]
# ### Question 1.3: A number {points}

# %% nbgrader={"grade_id": "q1_3", "solution": true}
macs = None
### BEGIN SOLUTION
macs = 1024 * 1024 * 1024
### END SOLUTION


# %% nbgrader={"grade_id": "q1_3_tests", "grade": true, "points": 2.5}
@check("1.3")
def check_macs(value):
    expect_number(value, 1024**3, rel=1e-6, unit="MACs", what="macs")


check_macs(macs).raise_if_wrong()

# %% [markdown]
# ### Bonus Question 1.4: A GEMV {points}


# %% nbgrader={"grade_id": "bonus_1_4", "solution": true}
def gemv(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Multiply (M, K) by (K,)."""
    ### BEGIN SOLUTION
    return torch.stack([(row * x).sum() for row in a])
    ### END SOLUTION


# %% nbgrader={"grade_id": "bonus_1_4_tests", "grade": true, "points": 3}
@check("Bonus 1.4")
def check_gemv(answer):
    a, x = torch.randn(3, 4), torch.randn(4)
    expect_close(answer(a, x), a @ x, rtol=1e-4, atol=1e-5, what="gemv(a, x)")


check_gemv(gemv).raise_if_wrong()

# %% [markdown]
# The end.

# %%
print("the end")
