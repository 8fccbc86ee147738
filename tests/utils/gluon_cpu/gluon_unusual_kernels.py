"""Kernels that are right though unusual, which a simulator easily refuses, and some that only the compiler used to refuse."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import libdevice

from tests.utils.gluon_cpu.gluon_small_kernels import store_matrix
from utils.attention.gluon.shared import tma_load

aggregate = gluon.aggregate


@gluon.jit
def matmul_from_registers(a_desc, b_desc, c_ptr, steps, SCALE: gl.constexpr, WAITS: gl.constexpr):
    """C = SCALE A B^T, with A in registers; the next copy overwrites the only tiles without a fence."""
    M: gl.constexpr = a_desc.block_type.shape[0]
    N: gl.constexpr = b_desc.block_type.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    a_tile = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b_tile = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    acc = gl.zeros([M, N], gl.float32, layout)
    for k in range(steps):
        mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma_load(a_desc, [0, k * a_desc.block_type.shape[1]], full, a_tile)
        tma_load(b_desc, [0, k * b_desc.block_type.shape[1]], full, b_tile)
        mbarrier.wait(full, k & 1)
        a = gl.convert_layout((a_tile.load(rows) * SCALE).to(a_desc.dtype), gl.DotOperandLayout(0, layout, 2))
        acc = warpgroup_mma(a, b_tile.permute([1, 0]), acc, is_async=True)
        if WAITS:
            acc = warpgroup_mma_wait(0, deps=[acc])
    acc = warpgroup_mma_wait(0, deps=[acc])
    store_matrix(c_ptr, acc)


@gluon.jit
def product(
    a_ptr, b_desc, c_ptr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, layout: gl.constexpr, shared: gl.constexpr
):
    """C = A B^T, with any layout of the accumulator and of A in shared memory."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], layout.warps_per_cta, [1, 0])
    a_tile = gl.allocate_shared_memory(b_desc.dtype, [M, K], shared)
    b_tile = gl.allocate_shared_memory(b_desc.dtype, [N, K], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, b_desc.block_type.nbytes)
    tma_load(b_desc, [0, 0], full, b_tile)
    i = gl.arange(0, M, gl.SliceLayout(1, rows))
    j = gl.arange(0, K, gl.SliceLayout(0, rows))
    a_tile.store(gl.load(a_ptr + i[:, None] * K + j[None, :]))
    fence_async_shared()
    mbarrier.wait(full, 0)
    acc = warpgroup_mma(a_tile, b_tile.permute([1, 0]), gl.zeros([M, N], gl.float32, layout))
    store_matrix(c_ptr, acc)


@gluon.jit
def copy_by_cp_async(x_ptr, y_ptr, row, column, layout: gl.constexpr):
    """Copy 128 x 128 fp16 values; the pointers, not the layout's order, decide which are neighbours in memory."""
    tile = gl.allocate_shared_memory(gl.float16, [128, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    i = gl.arange(0, 128, gl.SliceLayout(1, layout))
    j = gl.arange(0, 128, gl.SliceLayout(0, layout))
    at = i[:, None] * row + j[None, :] * column
    async_copy.async_load(tile, x_ptr + at)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.store(y_ptr + at, tile.load(layout))


@gluon.jit
def load(x):
    """Double x; a method below has the same name."""
    return 2 * x


@aggregate
class Number:
    """A number whose method `load` calls the global function `load`."""

    value_of: gl.tensor

    @gluon.constexpr_function
    def __init__(self, value_of):
        self.value_of = value_of

    @gluon.jit
    def load(self):
        return load(self.value_of)


@gluon.jit
def method_and_function_of_one_name(y_ptr, n):
    gl.store(y_ptr, Number(n + 0).load())


@gluon.jit
def coalesced(x_ptr, y_ptr, n):
    """Use a layout that the compiler chooses, and functions of CUDA's library."""
    i = gl.arange(0, 16, gl.CoalescedLayout())
    j = gl.arange(0, 64, gl.CoalescedLayout())
    at = i[:, None] * 64 + j[None, :]
    x = gl.load(x_ptr + at, mask=at < n)
    gl.store(y_ptr + at, libdevice.fast_dividef(libdevice.fast_expf(x), 2.0), mask=at < n)
