"""Right kernels for Blackwell; test_gluon_blackwell.py breaks them line by line."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.hopper import tma

from utils.machine.versions import adopt_newest_gluon_names

adopt_newest_gluon_names()

clc = getattr(blackwell, "clc", None)  # in Triton from 3.8 on
TensorMemoryLayout, TensorMemoryScalesLayout = blackwell.TensorMemoryLayout, blackwell.TensorMemoryScalesLayout
allocate_tensor_memory, get_tmem_reg_layout = blackwell.allocate_tensor_memory, blackwell.get_tmem_reg_layout
tcgen05_commit, tcgen05_copy, tcgen05_mma = blackwell.tcgen05_commit, blackwell.tcgen05_copy, blackwell.tcgen05_mma
tcgen05_mma_scaled, mbarrier = blackwell.tcgen05_mma_scaled, blackwell.mbarrier
fence_async_shared = blackwell.fence_async_shared


@gluon.jit
def load_tiles(a_desc, b_desc, rings, full, empty, tiles, STAGES: gl.constexpr):
    a_ring, b_ring = rings
    row = gl.program_id(0) * a_desc.block_type.shape[0]
    column = gl.program_id(1) * b_desc.block_type.shape[0]
    for i in range(tiles):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma.async_load(a_desc, [row, i * a_desc.block_type.shape[1]], full.index(slot), a_ring.index(slot))
        tma.async_load(b_desc, [column, i * b_desc.block_type.shape[1]], full.index(slot), b_ring.index(slot))


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
    tma.async_store(c_desc, at, c_tile)
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
    """Store scores, and half of each as fp16 in the first half of the same columns."""
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


@gluon.jit
def chain_products(q, keys, values, scores, out, s_full, p_full, done, BLOCKS: gl.constexpr):
    for i in range(BLOCKS):
        tcgen05_mma(q, keys.index(i).permute((1, 0)), scores, use_acc=False, mbarriers=[s_full])
        mbarrier.wait(p_full, i & 1)
        p = scores._reinterpret(q.dtype, scores.shape, scores.layout)
        tcgen05_mma(p, values.index(i), out, use_acc=i > 0)
    tcgen05_commit(done)


@gluon.jit
def chain_powers(scores, s_full, p_full, dtype: gl.constexpr, BLOCKS: gl.constexpr):
    wide: gl.constexpr = get_tmem_reg_layout(gl.float32, scores.shape, scores.layout, gl.num_warps())
    narrow: gl.constexpr = get_tmem_reg_layout(dtype, scores.shape, scores.layout, gl.num_warps())
    p = scores._reinterpret(dtype, scores.shape, scores.layout)
    for i in range(BLOCKS):
        mbarrier.wait(s_full, i & 1)
        x = gl.exp2(scores.load(wide))
        p.store(gl.convert_layout(x.to(dtype), narrow))
        mbarrier.arrive(p_full, count=1)


@gluon.jit
def write_matrix(y_ptr, memory):
    registers: gl.constexpr = get_tmem_reg_layout(gl.float32, memory.shape, memory.layout, gl.num_warps())
    rows = gl.arange(0, memory.shape[0], gl.SliceLayout(1, registers))[:, None]
    columns = gl.arange(0, memory.shape[1], gl.SliceLayout(0, registers))[None, :]
    gl.store(y_ptr + rows * memory.shape[1] + columns, memory.load(registers))


@gluon.jit
def chain_out(y_ptr, out, done):
    mbarrier.wait(done, 0)
    write_matrix(y_ptr, out)


@gluon.jit
def barrier_for(COUNT: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=COUNT)
    return bar


@gluon.jit
def chain(q_desc, k_desc, v_desc, y_ptr, BLOCKS: gl.constexpr):
    """Y = 2^(Q K^T) V: P takes the columns of the scores, and the product that reads P adds to Y."""
    N: gl.constexpr = k_desc.block_type.shape[0]
    q = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_type.shape, q_desc.layout)
    keys = gl.allocate_shared_memory(k_desc.dtype, [BLOCKS, *k_desc.block_type.shape], k_desc.layout)
    values = gl.allocate_shared_memory(v_desc.dtype, [BLOCKS, *v_desc.block_type.shape], v_desc.layout)
    loaded = barrier_for(1)
    s_full = barrier_for(1)
    p_full = barrier_for(1)
    done = barrier_for(1)
    both: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes
    mbarrier.expect(loaded, q_desc.block_type.nbytes + BLOCKS * both)
    tma.async_load(q_desc, [0, 0], loaded, q)
    for i in gl.static_range(BLOCKS):
        tma.async_load(k_desc, [i * N, 0], loaded, keys.index(i))
        tma.async_load(v_desc, [i * N, 0], loaded, values.index(i))
    mbarrier.wait(loaded, 0)
    scores = allocate_tensor_memory(gl.float32, [128, N], TensorMemoryLayout([128, N], col_stride=1))
    WIDTH: gl.constexpr = v_desc.block_type.shape[1]
    out = allocate_tensor_memory(gl.float32, [128, WIDTH], TensorMemoryLayout([128, WIDTH], col_stride=1))
    gl.warp_specialize(
        [
            (chain_out, (y_ptr, out, done)),
            (chain_powers, (scores, s_full, p_full, q_desc.dtype, BLOCKS)),
            (chain_products, (q, keys, values, scores, out, s_full, p_full, done, BLOCKS)),
        ],
        [4, 1],
        [24, 24],
    )


@gluon.jit
def move_rows(x_desc, y_desc, from_ptr, to_ptr, column, ROWS: gl.constexpr):
    """Copy rows of x by their numbers to rows of y."""
    few: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, gl.num_warps()], [1, 0]))
    sources = gl.load(from_ptr + gl.arange(0, ROWS, few))
    targets = gl.load(to_ptr + gl.arange(0, ROWS, few))
    tile = gl.allocate_shared_memory(x_desc.dtype, [ROWS, x_desc.block_type.shape[1]], x_desc.layout)
    bar = barrier_for(1)
    mbarrier.expect(bar, ROWS * x_desc.block_type.nbytes)
    blackwell.tma.async_gather(x_desc, sources, column, bar, tile)
    mbarrier.wait(bar, 0)
    blackwell.tma.async_scatter(y_desc, targets, column, tile)
    tma.store_wait(0)


@gluon.jit
def store_scales(pointer, memory):
    registers: gl.constexpr = get_tmem_reg_layout(gl.uint8, memory.shape, memory.layout, gl.num_warps())
    rows = gl.arange(0, memory.shape[0], gl.SliceLayout(1, registers))[:, None]
    memory.store(
        gl.load(pointer + rows * memory.shape[1] + gl.arange(0, memory.shape[1], gl.SliceLayout(0, registers))[None, :])
    )


@gluon.jit
def scaled_product(a_desc, b_desc, a_scales, b_scales, y_ptr, KIND: gl.constexpr):
    """C = A B^T of one tile; each 32 elements along K have a scale, a power of two."""
    N: gl.constexpr = b_desc.block_type.shape[0]
    K: gl.constexpr = a_desc.block_type.shape[1] * (2 if KIND == "e2m1" else 1)
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    loaded = barrier_for(1)
    done = barrier_for(1)
    mbarrier.expect(loaded, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    tma.async_load(a_desc, [0, 0], loaded, a)
    tma.async_load(b_desc, [0, 0], loaded, b)
    a_scale = allocate_tensor_memory(gl.uint8, [128, K // 32], TensorMemoryScalesLayout())
    b_scale = allocate_tensor_memory(gl.uint8, [N, K // 32], TensorMemoryScalesLayout())
    store_scales(a_scales, a_scale)
    store_scales(b_scales, b_scale)
    acc = allocate_tensor_memory(gl.float32, [128, N], TensorMemoryLayout([128, N], col_stride=1))
    mbarrier.wait(loaded, 0)
    tcgen05_mma_scaled(a, b.permute((1, 0)), acc, a_scale, b_scale, KIND, KIND, use_acc=False)
    tcgen05_commit(done)
    mbarrier.wait(done, 0)
    write_matrix(y_ptr, acc)


@gluon.jit
def take_programs(y_ptr):
    """Add 1 to y[i] for the program i and for all programs that it takes over."""
    answer = gl.allocate_shared_memory(gl.int64, [2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = barrier_for(1)
    tile = gl.program_id(0)
    more = gl.to_tensor(True)
    phase = gl.to_tensor(0)
    while more:
        mbarrier.expect(bar, 16)
        clc.try_cancel(answer, bar)
        gl.atomic_add(y_ptr + tile, 1)
        mbarrier.wait(bar, phase)
        result = clc.load_result(answer)
        more = result.is_canceled()
        tile = result.program_id(0)
        phase ^= 1
        fence_async_shared()


@gluon.jit
def pair_product(a_desc, b_desc, c_desc, columns: gl.constexpr):
    """C = A B of one tile, in two blocks: each has half of the rows of A and of C, and half of the columns of B."""
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    c = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    loaded = mbarrier.allocate_mbarrier(two_ctas=True)
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(loaded, count=1)
    mbarrier.init(done, count=1)
    mbarrier.expect(loaded, a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
    tma.async_load(a_desc, [0, 0], loaded, a)
    tma.async_load(b_desc, [0, 0], loaded, b)
    acc = allocate_tensor_memory(gl.float32, c_desc.block_type.shape, columns)
    mbarrier.wait(loaded, 0)
    tcgen05_mma(a, b, acc, use_acc=False, mbarriers=[done])
    mbarrier.wait(done, 0)
    c.store(acc.load().to(c_desc.dtype))
    fence_async_shared()
    tma.async_store(c_desc, [0, 0], c)
    tma.store_wait(0)
