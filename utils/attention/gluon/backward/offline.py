"""Compile a kernel of the backward ladder for Hopper without a GPU, and read registers, spills and instructions."""

from __future__ import annotations

import math

from utils.attention.gluon.backward.arguments import MAIN_KERNELS, WIDE_KERNEL, kernel_of
from utils.attention.gluon.backward.plan import plan_for
from utils.kernels.offline import Assembly, compile_gluon, read_assembly


def compile_backward(
    step: int, head_dim: int = 128, *, dtype: str = "bf16", edges: int = 2, deterministic: bool = False
) -> Assembly:
    """Compile a step of the backward ladder for sm_90a; a kernel takes all sizes, and all masks or none.

    Args:
        step: 1, 3 or 6.
        head_dim: Head dimension; the tile is the next larger of 64, 128 and 256.
        dtype: "bf16" or "fp16".
        edges: As for `plan_for`.
        deterministic: Whether dQ is left to the kernel of `dq.py`.
    """
    from triton.experimental.gluon import language as gl

    plan = plan_for(step, head_dim, deterministic, edges)
    wide = plan.block_d == 256
    kernel = kernel_of(WIDE_KERNEL if wide else MAIN_KERNELS[step])
    constants = {n: x for n, x in {"PLAN": plan, "HEAD_DIM": head_dim}.items() if n in kernel.arg_names}
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    numbers = gl.NVMMASharedLayout(0, 32, rank=2)
    keys = 128 if step == 6 and not wide else 64
    rows = {"q": plan.block_m, "do": plan.block_m, "k": plan.block_n, "v": keys, "dk": keys, "dv": keys}
    kinds = {n + "_desc": f"tensordesc<{dtype}[1, 1, {count}, {plan.block_d}],{layout!r}>" for n, count in rows.items()}
    kinds |= {n: f"tensordesc<fp32[1, {plan.block_m}],{numbers!r}>" for n in ("lse_desc", "delta_desc")}
    kinds["sums_desc"] = f"tensordesc<fp32[{math.gcd(32, (plan.depth or 128) // 2)}, 128],{numbers!r}>"
    kinds |= dict.fromkeys(("dq_sums_ptr", "lse2_ptr", "delta_ptr", "parts_ptr"), "*fp32") | {
        "c": "fp32",
        "scale": "fp32",
        "back": "*i32" if edges == 3 else "i32",
    }
    kinds["counter_ptr"] = "*i32"
    signature = {
        n: kinds.get(n, f"*{dtype}" if n.endswith("_ptr") else "i32") for n in kernel.arg_names if n not in constants
    }
    # A launch tells the compiler that tensors and their rows start at multiples of 16 bytes.
    multiples = [n for n in kernel.arg_names if n.endswith(("_ptr", "_batch", "_head", "_row"))]
    warps = 8 if step == 6 and not wide else 4
    return read_assembly(compile_gluon(kernel, signature, constants, multiples, warps), kernel.__name__)
