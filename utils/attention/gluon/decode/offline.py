"""Compile the decode kernel for Hopper without a GPU, and read registers, spills and instructions.

python -m utils.attention.gluon.decode.offline --head-dim 128 --group 4 --queries 1
"""

from __future__ import annotations

import argparse

from utils.attention.gluon.decode.plan import Case, Plan, make_plan
from utils.kernels.offline import Assembly, compile_gluon, read_assembly


def compile_decode(plan: Plan, case: Case, dtype: str = "bf16", merge: bool = False) -> Assembly:
    """Compile the kernel, or the one of the second launch, for sm_90a."""
    from triton.experimental.gluon import language as gl

    from utils.attention.gluon.decode import cluster, kernel, quantized, quantized_keys, rows, rows_ahead

    attend = rows.attention_decode_rows if plan.consumers else kernel.attention_decode
    if plan.cluster:
        attend = cluster.attention_decode_cluster
    if plan.ahead:
        attend = rows_ahead.attention_decode_rows_ahead
    if plan.raw_slots:
        attend = quantized.attention_decode_fp8 if plan.consumers else quantized_keys.attention_decode_fp8_keys
    function = kernel.attention_decode_merge if merge else attend
    q = gl.NVMMASharedLayout(128, 16, rank=5)
    bits = 8 if plan.raw_slots else 16
    kv = gl.NVMMASharedLayout(min(plan.block_d * bits // 8, 128), bits, rank=4)
    cache = "u8" if plan.raw_slots else dtype
    kinds = {
        "q_desc": f"tensordesc<{dtype}[1, 1, {plan.heads}, {plan.queries}, {plan.block_d}],{q!r}>",
        "k_desc": f"tensordesc<{cache}[1, 1, {plan.box}, {plan.block_d}],{kv!r}>",
        "v_desc": f"tensordesc<{cache}[1, 1, {plan.box}, {plan.block_d}],{kv!r}>",
        "o_desc": f"tensordesc<{dtype}{plan.output_box},{q!r}>",
        "out_ptr": f"*{dtype}",
        "parts_ptr": "*fp32",
        "counters_ptr": "*i32",
        "lens_ptr": "*i32",
        "table_ptr": "*i32",
        "c": "fp32",
        "scales_ptr": "*fp32",
    }
    constants = {"PLAN": plan, "CASE": case}
    if "o_desc" in function.arg_names and not (plan.ahead or plan.by_tma):
        constants["o_desc"] = None
    names = [name for name in function.arg_names if name not in constants]
    signature = {name: kinds.get(name, "i32") for name in names}
    pointers = [name for name in names if name.endswith("_ptr")]
    options = {"num_warps": 4} if merge else plan.options
    compiled = compile_gluon(function, signature, constants, pointers, **options)
    return read_assembly(compiled, function.__name__)


def main() -> None:
    """Compile the kernel that the command line names, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--page", type=int)
    parser.add_argument("--block-n", type=int)
    for flag in ("causal", "window", "lengths", "aligned"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--sass", action="store_true", help="print the disassembly")
    a = parser.parse_args()
    plan = make_plan(a.head_dim, a.group, a.queries, a.page, a.block_n)
    case = Case(a.causal, a.window, a.lengths, 16, a.page or 0, a.aligned, a.lengths or bool(a.page))
    assembly = compile_decode(plan, case)
    if a.sass:
        print(assembly.sass)
    print(plan, plan.shared_bytes)
    print(
        f"{assembly.name}: {assembly.registers} registers, {assembly.spill_bytes} bytes spilled, "
        f"{assembly.shared_bytes} bytes shared, {len(assembly.sass)} characters of SASS"
    )
    for instruction in ("HGMMA", "UTMALDG", "SYNCS", "MUFU", "BAR.SYNC", "SHFL", "STS", "STSM", "LDS", "LDL", "STL"):
        print(f"  {instruction:<12}{assembly.count(instruction):>6}")


if __name__ == "__main__":
    main()
