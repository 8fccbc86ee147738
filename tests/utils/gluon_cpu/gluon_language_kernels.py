"""Small kernels for parts of Gluon that the course's own kernels do not use: clusters, fp8, TMA reductions and others."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from utils.machine.versions import adopt_newest_gluon_names

adopt_newest_gluon_names()
# Triton 3.7 wants the initialization of mbarriers made visible to the cluster; from 3.8 on the compiler does so.
SYNC: gl.constexpr = gl.constexpr(hasattr(mbarrier, "sync_cluster_init"))


# ---- clusters ----------------------------------------------------------------------------------------------------


@gluon.jit
def multicast_copy(in_desc, out_desc, BYTES: gl.constexpr, INIT_VISIBLE: gl.constexpr):
    smem = gl.allocate_shared_memory(in_desc.dtype, in_desc.block_type.shape, in_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    if SYNC and INIT_VISIBLE:
        mbarrier.sync_cluster_init()
    mbarrier.expect(bar, BYTES)
    tma.async_load(in_desc, [0, 0], bar, smem, multicast=True)
    mbarrier.wait(bar, 0)
    tma.async_store(out_desc, [0, 0], smem)
    tma.store_wait(0)


@gluon.jit
def copy_tile(in_desc, out_desc, row, place, column=0):
    """Copy a tile of a matrix to the rows of another from `place` on."""
    smem = gl.allocate_shared_memory(in_desc.dtype, in_desc.block_type.shape, in_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, in_desc.block_type.nbytes)
    tma.async_load(in_desc, [row, column], bar, smem)
    mbarrier.wait(bar, 0)
    tma.async_store(out_desc, [place, 0], smem)
    tma.store_wait(0)


@gluon.jit
def cluster_matmul(
    a_desc,
    b_desc,
    c_ptr,
    steps,
    ACC: gl.constexpr,
    EMPTY: gl.constexpr,
    GROUPS: gl.constexpr,
    BYTES: gl.constexpr,
    MULTICAST: gl.constexpr,
    WAITS: gl.constexpr,
    MEETS: gl.constexpr,
):
    """Each block multiplies its rows of A by the tile of B that the first block copies for all of them."""
    STAGES: gl.constexpr = 2
    m: gl.constexpr = a_desc.block_type.shape[0]
    n: gl.constexpr = b_desc.block_type.shape[0]
    k: gl.constexpr = a_desc.block_type.shape[1]
    a_slots = gl.allocate_shared_memory(gl.float16, [STAGES, m, k], a_desc.layout)
    b_slots = gl.allocate_shared_memory(gl.float16, [STAGES, n, k], b_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, GROUPS], EMPTY)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    if SYNC:
        mbarrier.sync_cluster_init()
    acc = gl.zeros([m, n], gl.float32, ACC)
    for step in range(steps):
        slot = step % STAGES
        if WAITS:
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), BYTES)
        tma.async_load(a_desc, [0, step * k], full.index(slot), a_slots.index(slot))
        tma.async_load(b_desc, [0, step * k], full.index(slot), b_slots.index(slot), multicast=MULTICAST)
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        acc = warpgroup_mma(a_slots.index(slot), b_slots.index(slot).permute((1, 0)), acc)
        mbarrier.arrive(empty.index(slot), count=1)
        if MEETS:
            gl.barrier(cluster=True)
    rows = gl.arange(0, m, gl.SliceLayout(1, ACC))
    columns = gl.arange(0, n, gl.SliceLayout(0, ACC))
    gl.store(c_ptr + rows[:, None] * n + columns[None, :], acc)


@gluon.jit
def between_blocks(x_ptr, y_ptr, FIRST: gl.constexpr, SECOND: gl.constexpr):
    rows = gl.arange(0, 64, gl.SliceLayout(1, FIRST))
    columns = gl.arange(0, 64, gl.SliceLayout(0, FIRST))
    x = gl.convert_layout(gl.load(x_ptr + rows[:, None] * 64 + columns[None, :]), SECOND)
    rows = gl.arange(0, 64, gl.SliceLayout(1, SECOND))
    columns = gl.arange(0, 64, gl.SliceLayout(0, SECOND))
    gl.store(y_ptr + rows[:, None] * 64 + columns[None, :], x + gl.num_ctas())


@gluon.jit
def cluster_softmax(x_ptr, y_ptr, N: gl.constexpr, LAYOUT: gl.constexpr):
    at = gl.program_id(0) * N + gl.arange(0, N, LAYOUT)
    x = gl.load(x_ptr + at)
    weights = gl.exp(x - gl.max(x, 0))
    gl.store(y_ptr + at, weights / gl.sum(weights, 0))


@gluon.jit
def through_memory(
    x_ptr,
    y_ptr,
    FIRST: gl.constexpr,
    SECOND: gl.constexpr,
    SHARED: gl.constexpr,
    PART: gl.constexpr,
    WHOLE: gl.constexpr = None,
):
    smem = gl.allocate_shared_memory(gl.float32, [64, 64], SHARED)
    smem.store(gl.zeros([64, 64], gl.float32, FIRST))
    if PART == "slice":
        smem = smem.slice(0, 32, 0)
    if PART == "reinterpret":
        smem = smem._reinterpret(gl.float32, [64, 64], WHOLE)
    gl.store(y_ptr, gl.sum(gl.sum(smem.load(SECOND), 1), 0))


@gluon.jit
def meeting(KIND: gl.constexpr):
    if KIND == "arrive":
        hopper.cluster.arrive()
        hopper.cluster.wait()
    else:
        gl.barrier(cluster=True)


@gluon.jit
def meeting_in_a_partition(KIND: gl.constexpr):
    gl.warp_specialize([(meeting, (KIND,)), (meeting, ("",))], [4], [64])


@gluon.jit
def arrival_of_the_first_block(y_ptr, FROM: gl.constexpr):
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.arrive(bar, count=1, from_cta=FROM)
    mbarrier.wait(bar, 0)
    gl.store(y_ptr, 1)


# ---- fp8 ---------------------------------------------------------------------------------------------------------


@gluon.jit
def fp8_product(a_desc, b_desc, c_ptr, ACC: gl.constexpr, BYTES: gl.constexpr, IN_REGISTERS: gl.constexpr):
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, BYTES)
    tma.async_load(a_desc, [0, 0], bar, a)
    tma.async_load(b_desc, [0, 0], bar, b)
    mbarrier.wait(bar, 0)
    m: gl.constexpr = a_desc.block_type.shape[0]
    n: gl.constexpr = b_desc.block_type.shape[0]
    acc = gl.zeros([m, n], gl.float32, ACC)
    if IN_REGISTERS:
        left = a.load(gl.DotOperandLayout(0, ACC, 4))
        acc = warpgroup_mma(left, b.permute((1, 0)), acc, is_async=True)
    else:
        acc = warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    rows = gl.arange(0, m, gl.SliceLayout(1, ACC))
    columns = gl.arange(0, n, gl.SliceLayout(0, ACC))
    gl.store(c_ptr + rows[:, None] * n + columns[None, :], acc)


@gluon.jit
def fp8_conversions(x_ptr, y_ptr, bits_ptr, back_ptr, TYPE: gl.constexpr, LAYOUT: gl.constexpr):
    at = gl.arange(0, 256, LAYOUT)
    y = gl.load(x_ptr + at).to(TYPE)
    gl.store(y_ptr + at, y)
    gl.store(bits_ptr + at, y.to(gl.uint8, bitcast=True))
    gl.store(back_ptr + at, y.to(gl.uint8, bitcast=True).to(TYPE, bitcast=True).to(gl.float32))


@gluon.jit
def fp8_sum(y_ptr, LAYOUT: gl.constexpr):
    x = gl.full([256], 1.0, gl.float32, LAYOUT).to(gl.float8e4nv)
    gl.store(y_ptr + gl.arange(0, 256, LAYOUT), x + x)


# ---- others ------------------------------------------------------------------------------------------------------


@gluon.jit
def tma_reduction(desc, x_ptr, REDUCE: gl.constexpr, LAYOUT: gl.constexpr):
    smem = gl.allocate_shared_memory(desc.dtype, desc.block_type.shape, desc.layout)
    rows = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))
    smem.store(gl.load(x_ptr + rows[:, None] * 32 + columns[None, :]))
    fence_async_shared()
    REDUCE(desc, [0, 0], smem)
    tma.store_wait(0)


@gluon.jit
def carried_tuples(y_ptr, n, LAYOUT: gl.constexpr):
    at = gl.arange(0, 128, LAYOUT)
    sums = (gl.zeros([128], gl.int32, LAYOUT), gl.full([128], 1, gl.int32, LAYOUT))
    for i in range(n):
        sums = (sums[0] + i, sums[1] + sums[0])
    for i in gl.static_range(2):
        gl.store(y_ptr + i * 128 + at, sums[i])


@gluon.jit
def descriptor_of_the_kernel(x_ptr, y_ptr, rows, columns, SHARED: gl.constexpr):
    x_desc = tma.make_tensor_descriptor(x_ptr, [rows, columns], [columns, 1], [16, 32], SHARED)
    y_desc = tma.make_tensor_descriptor(y_ptr, [rows, columns], [columns, 1], [16, 32], SHARED)
    copy_tile(x_desc, y_desc, 0, 0, 32)


# ---- layouts -----------------------------------------------------------------------------------------------------


@gluon.jit
def line_of_ones(N: gl.constexpr, layout: gl.constexpr):
    return gl.full([N], 1.0, gl.float32, layout)


@gluon.jit
def unnamed_layout(y_ptr, N: gl.constexpr, layout: gl.constexpr):
    at = gl.arange(0, N, layout=layout)
    gl.store(y_ptr + at, line_of_ones(N, at.type.layout))


@gluon.jit
def named_layout(y_ptr, N: gl.constexpr, layout: gl.constexpr):
    at = gl.arange(0, N, layout=layout)
    of_line: gl.constexpr = at.type.layout
    gl.store(y_ptr + at, line_of_ones(N, of_line))
