# ruff: noqa: F841, SIM102 (nobody uses the result of a line that is refused)
"""Kernels into which a test plants bugs: BUG names the bug, and `# found: name` marks the line that must be reported.

The marked line is the one below the comment; for a deadlock, the line of the partition that waits first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from utils.machine.versions import adopt_newest_gluon_names

adopt_newest_gluon_names()
tma_load = gl.constexpr(tma.async_load)
tma_store = gl.constexpr(tma.async_store)
cp_async = gl.constexpr(async_copy.async_load)


# ---- a TMA ring between a producer and a consumer ----------------------------------------------------------------------


@gluon.jit
def producer(x_desc, w_desc, ring, weights, bars, steps, STAGES: gl.constexpr, BUG: gl.constexpr):
    full, empty, weights_full = bars
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    NBYTES: gl.constexpr = x_desc.block_type.nbytes
    mbarrier.expect(weights_full, w_desc.block_type.nbytes)
    if BUG != "uninitialized weights":
        tma_load(w_desc, [0, 0], weights_full, weights)
    rounds = steps
    if BUG == "producer stops early":
        rounds = steps - 1
    if BUG == "producer goes on":
        rounds = steps + 1
    for i in range(rounds):
        slot = i % STAGES
        free = (i // STAGES & 1) ^ 1
        if BUG == "producer waits for the wrong phase":
            free = i // STAGES & 1
        if BUG != "producer does not wait":
            # found: producer waits for the wrong phase, missing arrive, wrong arrive count
            mbarrier.wait(empty.index(slot), free)
        if BUG == "too many bytes":
            mbarrier.expect(full.index(slot), NBYTES + 64)
        elif BUG == "too few bytes":
            mbarrier.expect(full.index(slot), NBYTES - 64)
        elif BUG == "half of two copies":
            mbarrier.expect(full.index(slot), NBYTES // 2)
        elif BUG == "expect twice":
            mbarrier.expect(full.index(slot), NBYTES)
            # found: expect twice
            mbarrier.expect(full.index(slot), NBYTES)
        elif BUG != "missing expect":
            # found: producer does not wait
            mbarrier.expect(full.index(slot), NBYTES)
        target = slot
        if BUG == "copy into the wrong slot":
            target = (slot + 1) % STAGES
        if BUG == "half of two copies":
            # found: half of two copies
            tma_load(x_desc, [0, i * COLUMNS], full.index(slot), ring.index(target))
        else:
            # found: producer does not wait, early release, missing fence before release, too few bytes, producer goes on
            tma_load(x_desc, [0, i * COLUMNS], full.index(slot), ring.index(target))


@gluon.jit
def consumer(y_desc, ring, out, weights, bars, steps, STAGES: gl.constexpr, BUG: gl.constexpr):
    full, empty, weights_full = bars
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    COLUMNS: gl.constexpr = y_desc.block_type.shape[1]
    if BUG != "wait for the other copy" and BUG != "uninitialized weights":
        mbarrier.wait(weights_full, 0)
    for i in range(steps):
        slot = i % STAGES
        phase = i // STAGES & 1
        if BUG == "swapped phases":
            phase = phase ^ 1
        if BUG == "phase is no parity":
            phase = 2 + phase
        if BUG != "missing wait":
            # found: missing expect, too many bytes, producer stops early, phase is no parity, swapped phases
            mbarrier.wait(full.index(slot), phase)
        if BUG == "early release":
            mbarrier.arrive(empty.index(slot))
        read = slot
        if BUG == "slot off by one":
            read = (slot + 1) % STAGES
        # found: swapped phases, missing wait, slot off by one, copy into the wrong slot
        x = ring.index(read).load(layout)
        # found: wait for the other copy, uninitialized weights
        w = weights.load(layout)
        if BUG != "missing fence before release":
            fence_async_shared()
        if BUG == "too many arrivals":
            # found: too many arrivals
            mbarrier.arrive(empty.index(slot), count=2)
        elif BUG == "double arrive":
            mbarrier.arrive(empty.index(slot))
            mbarrier.arrive(empty.index(slot))
        elif BUG != "missing arrive" and BUG != "early release":
            mbarrier.arrive(empty.index(slot))
        if BUG != "missing store_wait":
            tma.store_wait(0)
        # found: missing store_wait
        out.store(x * w)
        if BUG != "missing fence before store":
            fence_async_shared()
        # found: missing fence before store, missing last store_wait
        tma_store(y_desc, [0, i * COLUMNS], out)
    if BUG != "missing last store_wait":
        tma.store_wait(0)


@gluon.jit
def pipeline(x_desc, w_desc, y_desc, steps, STAGES: gl.constexpr, BUG: gl.constexpr):
    """Y = w * x, tile by tile."""
    ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)  # noqa: RUF005
    weights = gl.allocate_shared_memory(x_desc.dtype, w_desc.block_type.shape, w_desc.layout)
    out = gl.allocate_shared_memory(x_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    weights_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ARRIVALS: gl.constexpr = 2 if BUG == "wrong arrive count" else 1
    for i in gl.static_range(STAGES):
        if BUG != "missing init":
            mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=ARRIVALS)
        if BUG == "init twice":
            # found: init twice
            mbarrier.init(empty.index(i), count=1)
    mbarrier.init(weights_full, count=1)
    bars = (full, empty, weights_full)
    gl.warp_specialize(
        [
            (consumer, (y_desc, ring, out, weights, bars, steps, STAGES, BUG)),
            (producer, (x_desc, w_desc, ring, weights, bars, steps, STAGES, BUG)),
        ],
        [1],
        [24],
    )


# ---- products ----------------------------------------------------------------------------------------------------------


@gluon.jit
def product(a_ptr, b_desc, c_ptr, SIZE: gl.constexpr, BUG: gl.constexpr, layout: gl.constexpr, swizzle: gl.constexpr):
    """C = (a @ b) @ b, all of them SIZE x SIZE; a is stored by threads, b copied by TMA."""
    dtype: gl.constexpr = b_desc.dtype
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle, 16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    a_layout: gl.constexpr = plain if BUG == "operand not for wgmma" else shared
    a = gl.allocate_shared_memory(dtype, [SIZE, SIZE], a_layout)
    b = gl.allocate_shared_memory(dtype, [SIZE, SIZE], shared)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, b_desc.block_type.nbytes)
    # found: another swizzle than the descriptor
    tma_load(b_desc, [0, 0], full, b)
    rows = gl.arange(0, SIZE, gl.SliceLayout(1, loads))[:, None]
    columns = gl.arange(0, SIZE, gl.SliceLayout(0, loads))[None, :]
    a.store(gl.load(a_ptr + rows * SIZE + columns))
    if BUG != "missing fence before wgmma":
        fence_async_shared()
    if BUG != "wgmma before its copy":
        mbarrier.wait(full, 0)
    zero = gl.zeros([SIZE, SIZE], gl.float32, layout)
    if BUG == "operands of different types":
        acc = warpgroup_mma(a_ptr, b, zero, use_acc=False, is_async=True)
    # found: missing fence before wgmma, wgmma before its copy, operand not for wgmma, old version, instruction too wide, instruction not 16 rows, warps along N
    acc = warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
    if BUG == "overwritten operand":
        # found: overwritten operand
        a.store(gl.full([SIZE, SIZE], 0.0, dtype, loads))
    if BUG == "refilled operand":
        mbarrier.expect(full, b_desc.block_type.nbytes)
        # found: refilled operand
        tma_load(b_desc, [0, 0], full, b)
    if BUG == "wait for too few":
        acc = warpgroup_mma_wait(1, deps=[acc])
    elif BUG != "missing warpgroup_mma_wait":
        acc = warpgroup_mma_wait(0, deps=[acc])
    # found: missing warpgroup_mma_wait, wait for too few
    p = acc.to(dtype)
    if BUG != "operand layout not converted":
        p = gl.convert_layout(p, left)
    # found: operand layout not converted
    acc = warpgroup_mma(p, b, zero, use_acc=False)
    rows = gl.arange(0, SIZE, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, SIZE, gl.SliceLayout(0, layout))[None, :]
    gl.store(c_ptr + rows * SIZE + columns, acc)


# ---- cp.async and ordinary memory --------------------------------------------------------------------------------------


@gluon.jit
def buffered(x_ptr, y_ptr, n, SIZE: gl.constexpr, BUG: gl.constexpr, layout: gl.constexpr):
    """Y = x + x reversed in pairs of buffers, by cp.async."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [2, SIZE], shared)
    at = gl.arange(0, SIZE, layout)
    last = gl.cdiv(n, SIZE)
    # found: two bytes a thread
    cp_async(ring.index(0), x_ptr + at, mask=at < n)
    async_copy.commit_group()
    for i in range(last):
        if BUG == "tile off by one":
            # found: tile off by one
            cp_async(ring.index((i + 1) % 2), x_ptr + (i + 1) * SIZE + at)
        elif BUG == "copy into the slot in use":
            # found: copy into the slot in use
            cp_async(ring.index(i % 2), x_ptr + (i + 1) * SIZE + at, mask=(i + 1) * SIZE + at < n)
        else:
            cp_async(ring.index((i + 1) % 2), x_ptr + (i + 1) * SIZE + at, mask=(i + 1) * SIZE + at < n)
        if BUG != "missing commit":
            async_copy.commit_group()
        if BUG == "group off by one":
            async_copy.wait_group(2)
        elif BUG != "missing wait_group":
            async_copy.wait_group(1)
        # found: group off by one, missing wait_group, missing commit
        x = ring.index(i % 2).load(layout)
        gl.store(y_ptr + i * SIZE + at, x, mask=i * SIZE + at < n)
    if BUG != "cp.async at the end":
        async_copy.wait_group(0)


# ---- layouts and the language ------------------------------------------------------------------------------------------


@gluon.jit
def helper(x, SIZE: gl.constexpr):
    return x + SIZE


def plain_python(x):
    return x


@gluon.jit
def refused(x_ptr, y_ptr, n, BUG: gl.constexpr):
    rows: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    other: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    eight: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    narrow: gl.constexpr = gl.BlockedLayout([1], [16], [4], [0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if BUG == "different layouts":
        a = gl.full([16, 32], 1.0, gl.float32, rows)
        b = gl.full([16, 32], 1.0, gl.float32, other)
        # found: different layouts
        c = a + b
    if BUG == "slice along the wrong dimension":
        a = gl.arange(0, 16, gl.SliceLayout(0, rows))
        # found: slice along the wrong dimension
        b = a[:, None]
    if BUG == "no power of two":
        # found: no power of two
        a = gl.arange(0, 48, line)
    if BUG == "layout for eight warps":
        # found: layout for eight warps
        a = gl.arange(0, 256, eight)
    if BUG == "half a warp":
        # found: half a warp
        a = gl.arange(0, 256, narrow)
    if BUG == "no constexpr":
        # found: no constexpr
        a = gl.arange(0, n, line)
    if BUG == "constexpr argument":
        # found: constexpr argument
        a = helper(n, n)
    if BUG == "too much shared memory":
        # found: too much shared memory
        a = gl.allocate_shared_memory(gl.float32, [256, 256], gl.NVMMASharedLayout(128, 32, rank=2))
        a.store(gl.full([256, 256], 1.0, gl.float32, rows))
    if BUG == "rows shorter than the swizzle":
        # found: rows shorter than the swizzle
        a = gl.allocate_shared_memory(gl.float16, [64, 32], gl.NVMMASharedLayout(128, 16, rank=2))
    if BUG == "never written":
        a = gl.allocate_shared_memory(gl.float32, [64, 64], gl.NVMMASharedLayout(128, 32, rank=2))
        # found: never written
        b = a.load(rows)
    if BUG == "half written":
        a = gl.allocate_shared_memory(gl.float32, [64, 64], gl.NVMMASharedLayout(128, 32, rank=2))
        a.slice(0, 32, dim=1).store(gl.full([64, 32], 1.0, gl.float32, rows))
        # found: half written
        b = a.load(rows)
    if BUG == "missing mask":
        # found: missing mask
        a = gl.load(x_ptr + gl.arange(0, 256, line))
    if BUG == "slot outside":
        a = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        # found: slot outside
        a.index(n).store(gl.full([64], 1.0, gl.float32, line))
    if BUG == "condition on a tensor":
        # found: condition on a tensor
        if gl.arange(0, 64, line) > 3:
            gl.store(y_ptr, 1.0)
    if BUG == "endless loop":
        # found: endless loop
        while n > 0:
            # found: endless loop
            n += 1
    if BUG == "plain python function":
        # found: plain python function
        a = plain_python(n)
    if BUG == "unknown operation":
        # found: unknown operation
        a = mma_v2(n, n, n)
    if BUG == "unknown assembly":
        # found: unknown assembly
        a = gl.inline_asm_elementwise("brkpt;", "=r,r", [n], gl.int32, False, 1)
