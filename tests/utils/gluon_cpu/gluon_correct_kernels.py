"""Correct Gluon kernels beside those of verdict_kernels.py: arithmetic, strides, reductions, products. They compile for a GPU unchanged."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from utils.attention.gluon.shared import tma_load, tma_store


@gluon.jit
def offsets_2d(row, column, row_stride, column_stride, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    return rows[:, None] * row_stride + columns[None, :] * column_stride, rows, columns


@gluon.jit
def scale_add_2d(
    a_ptr, b_ptr, c_ptr, m, n, a_row, a_column, b_row, b_column, scale, ROWS: gl.constexpr, COLUMNS: gl.constexpr
):
    """C = scale * a + b with any strides; c is row-major."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    row = gl.program_id(0) * ROWS
    column = gl.program_id(1) * COLUMNS
    a_at, rows, columns = offsets_2d(row, column, a_row, a_column, ROWS, COLUMNS, layout)
    b_at, rows, columns = offsets_2d(row, column, b_row, b_column, ROWS, COLUMNS, layout)
    c_at, rows, columns = offsets_2d(row, column, n, 1, ROWS, COLUMNS, layout)
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    a = gl.load(a_ptr + a_at, mask=mask, other=0.0).to(gl.float32)
    b = gl.load(b_ptr + b_at, mask=mask, other=0.0).to(gl.float32)
    gl.store(c_ptr + c_at, (a * scale + b).to(c_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def softmax_rows(x_ptr, y_ptr, m, n, stride, ROWS: gl.constexpr, COLUMNS: gl.constexpr, num_warps: gl.constexpr):
    """Y = softmax(x) over rows of up to COLUMNS elements."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [num_warps, 1], [1, 0])
    at, rows, columns = offsets_2d(gl.program_id(0) * ROWS, 0, stride, 1, ROWS, COLUMNS, layout)
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    x = gl.load(x_ptr + at, mask=mask, other=-float("inf")).to(gl.float32)
    x = gl.where((rows < m)[:, None], x, 0.0)
    p = gl.exp2((x - gl.max(x, 1)[:, None]) * 1.4426950408889634)
    y = p / gl.sum(p, 1)[:, None]
    gl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def transpose(x_ptr, y_ptr, m, n, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    reading: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    writing: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [0, 1])
    row = gl.program_id(0) * ROWS
    column = gl.program_id(1) * COLUMNS
    at, rows, columns = offsets_2d(row, column, n, 1, ROWS, COLUMNS, reading)
    x = gl.load(x_ptr + at, mask=(rows < m)[:, None] & (columns < n)[None, :])
    x = gl.convert_layout(x, writing)
    at, rows, columns = offsets_2d(row, column, 1, m, ROWS, COLUMNS, writing)
    gl.store(y_ptr + at, x, mask=(rows < m)[:, None] & (columns < n)[None, :])


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def reductions(x_ptr, y_ptr, SIZE: gl.constexpr):
    """Store five numbers: maximum (by a combine function), minimum, sum, sum of the even elements, last running sum."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    x = gl.load(x_ptr + gl.arange(0, SIZE, layout))
    pairs = x.reshape([SIZE // 2, 2])
    even, odd = pairs.split()
    both = gl.join(even, odd).reshape([SIZE])
    gl.static_assert(gl.max(x.to(gl.float16), 0).dtype == gl.float32)
    gl.static_assert(gl.maximum(x.to(gl.bfloat16), 0.0).dtype == gl.float32)
    gl.store(y_ptr, gl.reduce(x, 0, larger))
    gl.store(y_ptr + 1, gl.min(x, 0))
    gl.store(y_ptr + 2, gl.sum(both, 0))
    gl.store(y_ptr + 3, gl.sum(even, 0))
    gl.store(y_ptr + 4, gl.max(gl.associative_scan(gl.abs(x), 0, plus), 0))


@gluon.jit
def sum_in_fp16(y_ptr):
    at = gl.arange(0, 512, gl.BlockedLayout([4], [32], [4], [0]))
    gl.store(y_ptr, gl.sum(gl.where(at == 0, 2048.0, 0.5).to(gl.float16), 0))


@gluon.jit
def integers(y_ptr, a, b, n):
    """Compute by C's rules: division rounds to zero, int32 wraps around."""
    gl.store(y_ptr, a // b)
    gl.store(y_ptr + 1, a % b)
    gl.store(y_ptr + 2, a * 1000003)
    gl.store(y_ptr + 3, min(max(a, b), 3))
    total = 0
    for i in range(0, n, 3):
        if i % 2 == 0:
            total += i
        else:
            total -= 1
    gl.store(y_ptr + 4, total)
    while total > 5:
        total = total // 2
    gl.store(y_ptr + 5, total)
    gl.store(y_ptr + 6, (a * 1e20).to(gl.int32))


@gluon.jit
def matmul(
    a_desc, b_desc, c_desc, k_size, TRANSPOSE_B: gl.constexpr, A_IN_REGISTERS: gl.constexpr, num_warps: gl.constexpr
):
    """C = A @ B, one tile for each program; it waits for each product at once."""
    BLOCK_M: gl.constexpr = c_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = c_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, BLOCK_N // (num_warps // 4), 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    a_tile = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b_tile = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    row = gl.program_id(0) * BLOCK_M
    column = gl.program_id(1) * BLOCK_N
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    phase = 0
    for k in range(0, k_size, BLOCK_K):
        mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma_load(a_desc, [row, k], full, a_tile)
        if TRANSPOSE_B:
            tma_load(b_desc, [column, k], full, b_tile)
        else:
            tma_load(b_desc, [k, column], full, b_tile)
        mbarrier.wait(full, phase)
        phase ^= 1
        b = b_tile.permute((1, 0)) if TRANSPOSE_B else b_tile
        if A_IN_REGISTERS:
            acc = warpgroup_mma(a_tile.load(left), b, acc)
            fence_async_shared()
        else:
            acc = warpgroup_mma(a_tile, b, acc)
    c_tile = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    c_tile.store(acc.to(c_desc.dtype))
    fence_async_shared()
    tma_store(c_desc, [row, column], c_tile)
    tma.store_wait(0)
