"""Compile the decode kernels for Hopper without a GPU, and read registers, spills and instructions."""

from __future__ import annotations

from utils.attention.gluon.decode.plan import MERGE_OPTIONS, Plan
from utils.kernels.offline import Assembly, compile_gluon, read_assembly


def attend_of(plan: Plan):
    """Return the function ATTEND for the kernel of a plan."""
    from utils.attention.gluon.decode import cluster, keys, quantized_keys, rows

    if plan.cluster:
        return cluster.attend_cluster
    if plan.fp8:
        return quantized_keys.attend_fp8
    return rows.attend_rows if plan.consumers else keys.attend_keys


def compile_decode(plan: Plan | None, dtype: str = "bf16") -> Assembly:
    """Compile the kernel of a plan for sm_90a. None compiles the kernel of the second launch."""
    from triton.experimental.gluon import language as gl

    from utils.attention.gluon.decode.kernel import attention_decode
    from utils.attention.gluon.decode.merge import attention_decode_merge

    function = attention_decode if plan else attention_decode_merge
    kinds = {"out_ptr": f"*{dtype}", "parts_ptr": "*fp32", "lens_ptr": "*i32", "table_ptr": "*i32", "c": "fp32"}
    kinds |= {"policy": "i64", "scales_ptr": "*fp32"}
    if plan:
        bits = 8 if plan.fp8 else 16
        q = gl.NVMMASharedLayout(128, 16, rank=4)
        kv = gl.NVMMASharedLayout(min(plan.block_d * bits // 8, 128), bits, rank=4)
        kinds["q_desc"] = f"tensordesc<{dtype}[1, 1, {plan.columns}, {plan.block_d}],{q!r}>"
        for name in ("k_desc", "v_desc"):
            kinds[name] = f"tensordesc<{'u8' if plan.fp8 else dtype}[1, 1, {plan.box}, {plan.block_d}],{kv!r}>"
    constants = {"PLAN": plan, "ATTEND": attend_of(plan)} if plan else {}
    names = [name for name in function.arg_names if name not in constants]
    signature = {name: kinds.get(name, "i32") for name in names}
    pointers = [name for name in names if name.endswith("_ptr") and name not in ("lens_ptr", "table_ptr", "scales_ptr")]
    options = plan.options if plan else MERGE_OPTIONS
    return read_assembly(compile_gluon(function, signature, constants, pointers, **options), function.__name__)
