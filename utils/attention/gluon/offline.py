"""Compile a step for Hopper, or the kernel for Blackwell, without a GPU; read the PTX, the SASS, the registers and the spills.

    python -m utils.attention.gluon.offline 5 --head-dim 128 --causal
    python -m utils.attention.gluon.offline blackwell

Not for a process that interprets Triton kernels (TRITON_INTERPRET). It shows the instructions; whether the numbers are
right and nothing deadlocks needs a GPU.
"""

from __future__ import annotations

import argparse
import re

from utils.attention.gluon.launch import kernel_of
from utils.attention.gluon.plan import BLOCK_M, STEPS, VARIANTS, Case, Plan, plan_for
from utils.kernels.assembling import narrow_kernel
from utils.kernels.offline import BLACKWELL, Assembly, compile_gluon, read_assembly


def compile_step(
    step: int,
    head_dim: int = 128,
    *,
    dtype: str = "bf16",
    variant: str = "",
    plan: Plan | None = None,
    mask: str = "",
    overhang: bool = False,
    lse: bool = False,
) -> Assembly:
    """Compile a step of the ladder for sm_90a.

    Args:
        step: 1 to 5.
        head_dim: Head dimension; the tile is the next larger of 64, 128 and 256.
        dtype: "bf16" or "fp16".
        variant: Variant of step 5's plan (`plan.variant_for`).
        plan: Tile and pipeline; by default the plan of the step.
        mask: "causal" or "" for steps 1 to 4, any mask of `plan.Case` for step 5. Under a mask the host deals the tiles.
        overhang: As in `plan.Case`.
        lse: Whether steps 1 to 4 store the log-sum-exp. In step 5 an argument of the launch says it.
    """
    from triton.experimental.gluon import language as gl

    if step < 5 and mask not in ("", "causal"):
        raise ValueError(f"Steps 1 to 4 are causal or not; got the mask {mask!r}, which step 5 has.")
    plan = plan or plan_for(step, head_dim, variant)
    kernel = kernel_of(step)
    constants = {name.upper(): value for name, value in vars(plan).items()}  # BLOCK_N, STAGES, ...
    constants |= {"HEAD_DIM": head_dim, "BLOCK_M": BLOCK_M, "LSE": lse, "PLAN": plan}
    constants |= {"CASE": Case(mask, mask != "", overhang), "CAUSAL": mask == "causal"}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    kinds = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr", "out_ptr"), f"*{dtype}")
    kinds |= {"lse_ptr": "*fp32", "schedule": "*i32", "c": "fp32"}
    kinds["back"] = "*i32" if mask.startswith("packed") else "i32"
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    for name, rows in (("q", BLOCK_M), ("o", BLOCK_M), ("k", plan.block_n), ("v", plan.block_n)):
        kinds[f"{name}_desc"] = f"tensordesc<{dtype}[1, 1, {rows}, {plan.block_d}],{layout!r}>"
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names if name not in constants}
    # As at a launch, the compiler knows that tensors and their rows start at multiples of 16 bytes.
    multiples = [name for name in kernel.arg_names if name.endswith(("_ptr", "_batch", "_head", "_row"))]
    compiled = compile_gluon(kernel, signature, constants, multiples)
    return read_assembly(narrow_kernel(compiled, plan.depth) if step == 5 else compiled, f"attention_step{step}")


def compile_blackwell(
    head_dim: int = 128, *, dtype: str = "bf16", causal: bool = False, capability: int = BLACKWELL
) -> Assembly:
    """Compile the kernel for Blackwell.

    Args:
        head_dim: 64 or 128.
        dtype: "bf16" or "fp16".
        causal: Whether the mask is causal.
        capability: BLACKWELL or BLACKWELL_ULTRA of `utils.kernels.offline`.
    """
    from triton.experimental.gluon import language as gl

    from utils.attention.gluon.blackwell.attention import BLOCK, attention_blackwell

    tile = f"tensordesc<{dtype}[1, 1, {BLOCK}, {head_dim}],{gl.NVMMASharedLayout(128, 16, rank=4)!r}>"
    signature = dict.fromkeys(("q_desc", "k_desc", "v_desc", "o_desc"), tile) | {"lse_ptr": "*fp32", "c": "fp32"}
    signature |= dict.fromkeys(("sq", "sk", "heads", "group"), "i32")
    constants = {"BLOCK_D": head_dim, "STAGES": 3 if head_dim == 64 else 2, "CAUSAL": causal, "LSE": True}
    compiled = compile_gluon(attention_blackwell, signature, constants, ("lse_ptr",), capability=capability)
    return read_assembly(compiled, f"attention_blackwell for sm_{capability}a")


# The report counts these instructions.
INSTRUCTIONS = (
    *("HGMMA", "UTCHMMA", "LDTM", "STTM", "UTMALDG", "UTMASTG", "LDGSTS", "SYNCS", "MUFU.EX2", "BAR.SYNC"),
    *("USETMAXREG", "LDL", "STL"),
)


def main() -> None:
    """Compile the step that the command line names, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=[*map(str, STEPS), "blackwell"])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--variant", choices=VARIANTS, default="")
    parser.add_argument("--mask", choices=("", "causal", "window", "packed", "packed window"), default="")
    parser.add_argument("--lse", action="store_true")
    parser.add_argument("--overhang", action="store_true")
    parser.add_argument("--sass", action="store_true", help="print the disassembly")
    options = vars(parser.parse_args())
    show_sass, step, mask = options.pop("sass"), options.pop("step"), options["mask"]
    if step == "blackwell":
        kernel = compile_blackwell(options["head_dim"], dtype=options["dtype"], causal=mask == "causal")
    else:
        kernel = compile_step(int(step), options.pop("head_dim"), **options)
    if show_sass:
        print(kernel.sass)
    print(f"{kernel.name}: {kernel.registers} registers at launch, {kernel.spill_bytes} bytes spilled")
    print(f"{kernel.shared_bytes} bytes shared, {kernel.columns} columns of tensor memory")
    print(*(f"  {name:<12}{kernel.count(re.escape(name)):>6}" for name in INSTRUCTIONS), *kernel.warnings, sep="\n")


if __name__ == "__main__":
    main()
