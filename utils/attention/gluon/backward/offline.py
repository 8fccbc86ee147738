"""Compile a step of the backward ladder for Hopper without a GPU, and read registers, spills and instructions.

python -m utils.attention.gluon.backward.offline 3 --head-dim 128 --causal
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import Any

from utils.attention.gluon.backward.launch import kernel_of
from utils.attention.gluon.backward.plan import STEPS, BackwardCase, BackwardPlan, plan_for
from utils.kernels.offline import Assembly, compile_gluon, read_assembly


def compile_backward(
    step: int,
    head_dim: int = 128,
    *,
    dtype: str = "bf16",
    causal: bool = False,
    window: bool = False,
    tail: bool = False,
    dq: bool = True,
    plan: BackwardPlan | None = None,
) -> Assembly:
    """Compile a step of the backward ladder for sm_90a.

    Args:
        step: 1 to 6.
        head_dim: Head dimension; the tile is the next larger of 64, 128 and 256.
        dtype: "bf16" or "fp16".
        causal: Whether the mask is causal.
        window: Whether there is a sliding window.
        tail: Whether the keys are no multiple of a block.
        dq: Whether dQ is summed in this kernel.
        plan: Tile and pipeline; the step's own by default.
    """
    from triton.experimental.gluon import language as gl

    plan = plan or plan_for(step, head_dim, causal)
    kernel = kernel_of(step, plan)
    constants = {"PLAN": plan, "CASE": BackwardCase(causal, window, tail, dq), "HEAD_DIM": head_dim}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    numbers = gl.NVMMASharedLayout(0, 32, rank=2)
    rows = {
        "q": plan.block_m,
        "do": plan.block_m,
        "k": plan.block_n,
        **dict.fromkeys(("v", "dk", "dv"), 128 if step == 6 and plan.block_d < 256 else 64),
    }
    kinds = {name + "_desc": f"tensordesc<{dtype}[1, 1, {n}, {plan.block_d}],{layout!r}>" for name, n in rows.items()}
    kinds |= {name: f"tensordesc<fp32[1, {plan.block_m}],{numbers!r}>" for name in ("lse_desc", "delta_desc")}
    kinds["sums_desc"] = f"tensordesc<fp32[32, 128],{numbers!r}>"
    kinds["counter_ptr"] = "*i32"
    kinds |= {name: "*fp32" for name in ("dq_sums_ptr", "lse2_ptr", "delta_ptr", "parts_ptr")} | {
        "c": "fp32",
        "scale": "fp32",
    }
    signature = {
        name: kinds.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
        if name not in constants
    }
    # A launch tells the compiler that tensors and their rows start at multiples of 16 bytes.
    multiples = [name for name in kernel.arg_names if name.endswith(("_ptr", "_batch", "_head", "_row"))]
    warps = (
        8 if (plan.block_d == 256 and step < 3) or (plan.block_d < 256 and step == 6 and not plan.producer_first) else 4
    )
    return read_assembly(compile_gluon(kernel, signature, constants, multiples, warps), kernel.__name__)


def main() -> None:
    """Compile the step that the command line names, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", type=int, choices=STEPS)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    for flag in ("causal", "window", "tail"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--without-dq", dest="dq", action="store_false")
    parser.add_argument("--sass", action="store_true", help="print the disassembly")
    parser.add_argument("--ptx", action="store_true", help="print the PTX")
    parser.add_argument("changes", nargs="*", help="fields of the plan, such as q_slots=3")
    options = vars(parser.parse_intermixed_args())
    changes: dict[str, Any] = {
        name: int(value) for name, value in (change.split("=") for change in options.pop("changes"))
    }
    step, head_dim = options.pop("step"), options.pop("head_dim")
    plan = replace(plan_for(step, head_dim, options["causal"]), **changes)
    show_sass, show_ptx = options.pop("sass"), options.pop("ptx")
    kernel = compile_backward(step, head_dim, plan=plan, **options)
    if show_ptx:
        print(kernel.ptx)
    if show_sass:
        print(kernel.sass)
    print(
        f"{kernel.name}: {kernel.registers} registers at launch, {kernel.spill_bytes} bytes spilled, "
        f"{kernel.shared_bytes} bytes shared"
    )
    for instruction in (
        "HGMMA",
        "UTMALDG",
        "REDG",
        "SYNCS",
        "MUFU.EX2",
        "BAR.SYNC",
        "STSM",
        "LDS",
        "USETMAXREG",
        "LDL",
        "STL",
    ):
        print(f"  {instruction:<12}{kernel.count(re.escape(instruction)):>6}")
    for line in kernel.warnings:
        print(" ", line)


if __name__ == "__main__":
    main()
