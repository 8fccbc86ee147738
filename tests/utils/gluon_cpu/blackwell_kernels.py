"""Right kernels for Blackwell; test_gluon_blackwell.py breaks them line by line."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    get_tmem_reg_layout,
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tma,
)

from utils.machine.versions import adopt_newest_gluon_names

adopt_newest_gluon_names()


@gluon.jit
def load_tiles(a_desc, b_desc, rings, full, empty, tiles, STAGES: gl.constexpr):
    a_ring, b_ring = rings
    row = gl.program_id(0) * a_desc.block_type.shape[0]
    column = gl.program_id(1) * b_desc.block_type.shape[0]
    for i in range(tiles):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            a_desc, [row, i * a_desc.block_type.shape[1]], full.index(slot), a_ring.index(slot)
        )
        tma.async_copy_global_to_shared(
            b_desc, [column, i * b_desc.block_type.shape[1]], full.index(slot), b_ring.index(slot)
        )


@gluon.jit
def multiply_tiles(rings, acc, full, empty, done, tiles, STAGES: gl.constexpr):
    a_ring, b_ring = rings
    for i in range(tiles):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        tcgen05_mma(a_ring.index(slot), b_ring.index(slot).permute((1, 0)), acc, use_acc=i > 0)
        tcgen05_commit(empty.index(slot))
    tcgen05_commit(done)


@gluon.jit
def store_tile(c_desc, c_tile, acc, done):
    registers: gl.constexpr = get_tmem_reg_layout(gl.float32, acc.shape, acc.layout, gl.num_warps())
    mbarrier.wait(done, 0)
    c_tile.store(acc.load(registers).to(c_desc.dtype))
    fence_async_shared()
    at = [gl.program_id(0) * c_desc.block_type.shape[0], gl.program_id(1) * c_desc.block_type.shape[1]]
    tma.async_copy_shared_to_global(c_desc, at, c_tile)
    tma.store_wait(0)


@gluon.jit
def product(a_desc, b_desc, c_desc, tiles, STAGES: gl.constexpr):
    """C = A B^T: a ring of tiles, the accumulator in tensor memory, a partition for each of load, product and store."""
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES, *a_desc.block_type.shape], a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES, *b_desc.block_type.shape], b_desc.layout)
    c_tile = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    done = gl.allocate_shared_memory(gl.int64, [1], bar)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    mbarrier.init(done, count=1)
    columns: gl.constexpr = TensorMemoryLayout(c_desc.block_type.shape, col_stride=1)
    acc = allocate_tensor_memory(gl.float32, c_desc.block_type.shape, columns)
    rings = (a_ring, b_ring)
    gl.warp_specialize(
        [
            (store_tile, (c_desc, c_tile, acc, done)),
            (multiply_tiles, (rings, acc, full, empty, done, tiles, STAGES)),
            (load_tiles, (a_desc, b_desc, rings, full, empty, tiles, STAGES)),
        ],
        [1, 1],
        [24, 24],
    )


@gluon.jit
def through_tensor_memory(x_ptr, y_ptr, M: gl.constexpr, N: gl.constexpr):
    """Copy x to y: into registers, to shared memory, by tcgen05_copy to tensor memory, and back."""
    columns: gl.constexpr = TensorMemoryLayout([M, N], col_stride=1)
    registers: gl.constexpr = get_tmem_reg_layout(gl.float32, [M, N], columns, gl.num_warps())
    rows = gl.arange(0, M, gl.SliceLayout(1, registers))
    at = rows[:, None] * N + gl.arange(0, N, gl.SliceLayout(0, registers))[None, :]
    tile = gl.allocate_shared_memory(gl.float32, [M, N], gl.NVMMASharedLayout(128, 32, rank=2))
    tile.store(gl.load(x_ptr + at))
    fence_async_shared()
    memory = allocate_tensor_memory(gl.float32, [M, N], columns)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    tcgen05_copy(tile, memory)
    tcgen05_commit(bar)
    mbarrier.wait(bar, 0)
    gl.store(y_ptr + at, memory.load(registers))


@gluon.jit
def shared_columns(x_ptr, y_ptr, READ_SCORES: gl.constexpr):
    """Scores, and their halves as fp16 in the first half of the same columns."""
    columns: gl.constexpr = TensorMemoryLayout([128, 64], col_stride=1)
    memory = allocate_tensor_memory(gl.float32, [128, 64], columns)
    halves = memory._reinterpret(gl.float16, [128, 64], columns)
    wide: gl.constexpr = get_tmem_reg_layout(gl.float32, [128, 64], columns, gl.num_warps())
    narrow: gl.constexpr = get_tmem_reg_layout(gl.float16, [128, 64], columns, gl.num_warps())
    rows = gl.arange(0, 128, gl.SliceLayout(1, wide))
    at = rows[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, wide))[None, :]
    memory.store(gl.load(x_ptr + at))
    x = memory.load(wide)
    halves.store(gl.convert_layout((x * 0.5).to(gl.float16), narrow))
    y = memory.load(wide) if READ_SCORES else gl.convert_layout(halves.load(narrow), wide).to(gl.float32)
    gl.store(y_ptr + at, y)
