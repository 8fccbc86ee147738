"""The decode kernel for a cache in fp8 (e4m3) with a scale a head: its bytes are converted on their way to the products.

K and V come as bytes, half as many as in bf16. A warpgroup of its own converts each tile to the queries' type, which holds
every e4m3 number exactly, and the consumer (`rows.py`) multiplies as ever. K's scale goes into the factor of the scores,
V's into the output. Bad numbers stay bad: the converting instruction makes e4m3's nan a nan.

    role          warps    what
    producer      1        TMA copies of Q, and of K and V as bytes, into rings of their own
    converters    4 + 4    bytes -> the queries' type, one for K and one for V, into rings of two tiles each, three with two consumers
                  4        at head dimension 256: one for both, since the consumer needs the registers
    consumers     4 or 8   64 query rows each, as in rows.py; they share what was converted

With products in the queries' type it is 1.1 times as fast on an H200 as a cache in bf16, and 0.9 times with more than 64 query rows
(docs/decode-log.md, entry 38); with products in fp16, for large caches, 1.2 to 1.8 times on an H100, in blocks of 128 keys up to 64 query rows (entries 46, 60 and 61). Up to 16 query rows `quantized_keys.py` reads an fp8 cache, 1.06 to 1.87 times as fast as one in bf16
(assets/results/h200/decode_fp8.json; docs/decode-log.md says what bounds both).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from utils.attention.gluon.decode.heads import Share
from utils.attention.gluon.decode.kernel import SIZES
from utils.attention.gluon.decode.merge import Results, in_eights
from utils.attention.gluon.decode.rows import consumer, producer
from utils.attention.gluon.decode.work import Cache
from utils.attention.gluon.pipeline import Ring, allocate_ring
from utils.kernels.early_launch import let_next_launch_begin

# Four numbers of e4m3 in one register become four of fp16 in two, exactly.
CONVERT = gl.constexpr(
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)


@gluon.jit
def convert_tile(raw, ring, i, PLAN: gl.constexpr):
    """Convert the bytes of load number i into its slot of the other ring, a few rows at a time."""
    ROWS: gl.constexpr = min(PLAN.block_n, 4096 // PLAN.block_d)
    # A thread has eight neighbours: what eight threads store at once are 128 bytes that lie side by side. With sixteen it would be every
    # second 16 bytes of 256, whose halves lie in the same banks.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // PLAN.block_d, PLAN.block_d // 8], [4, 1], [1, 0])
    raw.wait_full(i)
    ring.wait_empty(i)
    source = raw.tile(i)
    target = ring.tile(i)
    for piece in gl.static_range(PLAN.block_n // ROWS):
        e4m3 = source.slice(piece * ROWS, ROWS).load(layout)
        fp16 = gl.inline_asm_elementwise(CONVERT, "=r,=r,r", [e4m3], dtype=gl.float16, is_pure=True, pack=4)
        target.slice(piece * ROWS, ROWS).store(fp16.to(target.dtype))
    # wgmma reads what was stored through the async proxy, and TMA writes the next bytes through it: without the fence
    # the one may read the last tile, and the other overtake these loads.
    fence_async_shared()
    raw.release(i)
    async_copy.mbarrier_arrive(ring.full.index(ring.slot(i)), increment_count=False)


@gluon.jit
def converter(share, raw, ring):
    """One warpgroup: from the ring of K's or of V's bytes to the ring that the consumers read."""
    for i in range(share.end - share.begin):
        convert_tile(raw, ring, i, share.PLAN)


@gluon.jit
def converter_of_both(share, raw_k, raw_v):
    """One warpgroup for K and V, one tile of each in turn."""
    for i in range(share.end - share.begin):
        convert_tile(raw_k, share.k, i, share.PLAN)
        convert_tile(raw_v, share.v, i, share.PLAN)


@gluon.jit
def allocate_converted(dtype: gl.constexpr, SLOTS: gl.constexpr, PLAN: gl.constexpr):
    """A ring that a converter fills: each of its threads arrives for itself."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    tiles = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, PLAN.block_n, PLAN.block_d], layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=128 * PLAN.consumers)
    return Ring(tiles, full, empty, SLOTS, 1)


@gluon.jit
def attend_fp8(results, split, q_desc, k_desc, v_desc, scales_ptr, program):
    """The blocks of one program: allocate rings and barriers, and start the roles."""
    cache = results.cache
    PLAN: gl.constexpr = cache.PLAN
    q = allocate_ring(q_desc, PLAN.q_slots, 1, PLAN.consumers)
    raw_k = allocate_ring(k_desc, PLAN.raw_slots, 1, 1, PLAN.block_n)
    raw_v = allocate_ring(v_desc, PLAN.raw_slots, 1, 1, PLAN.block_n)
    # Products are in the queries' type, or in fp16, into which bytes are converted with fewer instructions.
    dtype: gl.constexpr = gl.float16 if PLAN.fp16 else q_desc.dtype
    k = allocate_converted(dtype, PLAN.slots // 2, PLAN)
    v = allocate_converted(dtype, PLAN.slots // 2, PLAN)
    if PLAN.fp16:
        rows: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        place = gl.allocate_shared_memory(gl.float16, [PLAN.columns, PLAN.block_d], rows)
    else:
        place: gl.constexpr = None
    # TMA completes the barriers through the async proxy, and may otherwise find them as they were before.
    fence_async_shared()
    begin = split.begin(program)
    start = cache.locate(begin)
    end = split.begin(program + 1)
    c = results.c
    share = Share(results, begin, end, start, q, k, v, c, scales_ptr, c, PLAN, cache.CASE)
    loads = Share(results, begin, end, start, q, raw_k, raw_v, c, scales_ptr, c, PLAN, cache.CASE)
    # The first role has four warps and the registers that are left by the others.
    if PLAN.consumers == 2:
        gl.warp_specialize(
            [
                (consumer, (share, None, place, 0)),
                (consumer, (share, None, place, 1)),
                (converter, (share, raw_k, k)),
                (converter, (share, raw_v, v)),
                (producer, (loads, q_desc, k_desc, v_desc)),
            ],
            [4, 4, 4, 1],
            [PLAN.registers, PLAN.converter_registers, PLAN.converter_registers, PLAN.producer_registers],
        )
    elif PLAN.block_d == 256:
        # The output of 64 rows takes 128 registers of a thread, and ptxas compiles a block of sixteen warps for 128 in all.
        gl.warp_specialize(
            [
                (consumer, (share, None, place, 0)),
                (converter_of_both, (share, raw_k, raw_v)),
                (producer, (loads, q_desc, k_desc, v_desc)),
            ],
            [4, 1],
            [PLAN.converter_registers, PLAN.producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (share, None, place, 0)),
                (converter, (share, raw_k, k)),
                (converter, (share, raw_v, v)),
                (producer, (loads, q_desc, k_desc, v_desc)),
            ],
            [4, 4, 1],
            [PLAN.converter_registers, PLAN.converter_registers, PLAN.producer_registers],
        )


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["lens_ptr", "table_ptr", "scales_ptr"])
def attention_decode_fp8(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    parts_ptr,
    counters_ptr,
    lens_ptr,
    table_ptr,
    table_stride,
    batch,
    kv_heads,
    group,
    sq,
    sk,
    window,
    tiles,
    pages,
    head_dim,
    c,
    scales_ptr,
    PLAN: gl.constexpr,
    CASE: gl.constexpr,
):
    """One program an SM: its share of the blocks of all heads; scales_ptr: (2, Hkv) fp32, of K and of V."""
    heads = kv_heads * tiles
    cache = Cache(lens_ptr, table_ptr, table_stride, batch, heads, sq, sk, window, pages, PLAN, CASE)
    results = Results(out_ptr, parts_ptr, counters_ptr, group, tiles, in_eights(head_dim), c, cache)
    split = cache.split()
    program = gl.program_id(0)
    if PLAN.early and PLAN.merge == "second":
        let_next_launch_begin()
    if program < split.programs:
        attend_fp8(results, split, q_desc, k_desc, v_desc, scales_ptr, program)
        results.merge_own(split, program)
