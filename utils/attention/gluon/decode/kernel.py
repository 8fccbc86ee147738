"""The kernel of the first launch: it has the sizes of a call, and calls the function ATTEND of its compilation.

ATTEND is `keys.attend_keys`, `rows.attend_rows`, `cluster.attend_cluster` or `quantized_keys.attend_fp8`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.decode.merge import Results, in_eights
from utils.attention.gluon.decode.work import Cache
from utils.kernels.early_launch import let_next_launch_begin

# `do_not_specialize` makes one kernel for all sizes: without it, sizes of 1 and multiples of 16 would have further kernels.
SIZES = ["table_stride", "batch", "kv_heads", "rows", "sq", "sk", "left", "right", "lengths", "page_bits", "pages"]
SIZES += ["head_dim", "whole", "bits", "policy"]


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["lens_ptr", "table_ptr", "scales_ptr"])
def attention_decode(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    parts_ptr,
    lens_ptr,
    table_ptr,
    scales_ptr,
    table_stride,
    batch,
    kv_heads,
    rows,
    sq,
    sk,
    left,
    right,
    lengths,
    page_bits,
    pages,
    head_dim,
    whole,
    bits,
    c,
    policy,
    PLAN: gl.constexpr,
    ATTEND: gl.constexpr,
):
    """Attend to a program's share of the blocks of all heads: grid (tiles of query rows, programs), or clusters (`cluster.py`).

    The sizes are fields of `Cache`. scales_ptr: (2, Hkv) fp32, of K and of V, for an fp8 cache. policy: of the L2 (`assembling.py`).
    """
    cache = Cache(
        lens_ptr,
        table_ptr,
        table_stride,
        batch,
        kv_heads,
        rows,
        sq,
        sk,
        left,
        right,
        lengths,
        page_bits,
        pages,
        whole,
        bits,
        c,
        PLAN,
    )
    results = Results(out_ptr, parts_ptr, in_eights(head_dim), cache)
    let_next_launch_begin()
    ATTEND(results, q_desc, k_desc, v_desc, scales_ptr)
