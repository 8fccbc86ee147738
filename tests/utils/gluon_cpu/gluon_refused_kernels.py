# ruff: noqa: F841, SIM102 (nobody uses the result of a line that is refused)
"""What the compiler, the hardware or the simulator refuses: BUG names it, and `# found: name` marks the line to be reported.

The marked line is the one below the comment.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from utils.attention.gluon.shared import thread_barrier
from utils.machine.versions import adopt_newest_gluon_names

adopt_newest_gluon_names()


@gluon.jit
def helper(x, SIZE: gl.constexpr):
    return x + SIZE


@gluon.jit
def initialize(bar):
    mbarrier.init(bar, count=1)


@gluon.jit
def invalidate(bar):
    for _ in range(99):  # late, but in no order
        thread_barrier()
    # found: barrier that another partition ends
    mbarrier.invalidate(bar)


@gluon.jit
def arrive(bar):
    # found: barrier of another partition
    mbarrier.arrive(bar, count=1)


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
    if BUG == "operand layout not converted":
        acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
        a = gl.zeros([64, 64], gl.float16, rows)
        b = gl.allocate_shared_memory(gl.float16, [64, 64], gl.NVMMASharedLayout(128, 16, rank=2))
        # found: operand layout not converted
        c = warpgroup_mma(a, b, gl.zeros([64, 64], gl.float32, acc))
    if BUG == "another swizzle than the descriptor":
        swizzled: gl.constexpr = gl.NVMMASharedLayout(64, 32, rank=2)
        desc = tma.make_tensor_descriptor(x_ptr, [8, 16], [16, 1], [8, 16], swizzled)
        a = gl.allocate_shared_memory(gl.float32, [8, 16], gl.NVMMASharedLayout(32, 32, rank=2))
        bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(bar, count=1)
        # found: another swizzle than the descriptor
        tma.async_load(desc, [0, 0], bar, a)
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
    if BUG == "two names for one value":
        place = n
        before = place + 0
        for _ in range(2):  # where the values differ, Triton keeps both
            gl.store(y_ptr + before, 1.0)
            before = place
            place += 1
        before = place
        # found: two names for one value
        for _ in range(2):
            gl.store(y_ptr + before, 1.0)
            before = place
            place += 1
    if BUG == "only bounds":
        count = n - 63
        for k in range(2):  # a store reads this one, too
            for i in range(count):
                gl.store(y_ptr + i + k * count, 1.0)
            count += 1
            fresh = k * 2
            fresh += 1  # and this one is new in each turn
            for i in range(fresh):
                gl.store(y_ptr + i, 1.0)
        begin = n - 64
        # found: only bounds
        for _ in range(2):
            first = begin + 1
            for i in range(first, n):
                gl.store(y_ptr + i, 1.0)
            begin = 0
    if BUG == "no return":
        bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        # found: no return
        bar, _phase = initialize(bar)
    if BUG == "variable behind its loop":
        for at in gl.static_range(2):  # a static loop leaves its variable defined
            gl.store(y_ptr + at, 1.0)
        gl.store(y_ptr + at, 1.0)
        for at in range(2):
            gl.store(y_ptr + at, 1.0)
        # found: variable behind its loop
        gl.store(y_ptr + at, 1.0)
    if BUG == "step of the run":
        for at in range(n, 0, -1):
            gl.store(y_ptr + at, 1.0)
        # found: step of the run
        for at in range(n, 0, 63 - n):
            gl.store(y_ptr + at, 1.0)
    if BUG == "false promise":
        gl.assume(n > 0)
        # found: false promise
        gl.assume(n > 64)
    if BUG == "no multiple":
        n = gl.multiple_of(n, 16)
        # found: no multiple
        n = gl.multiple_of(n + 1, 16)
    if BUG == "slots reshaped":
        a = gl.allocate_shared_memory(gl.float16, [2, 64, 64], gl.NVMMASharedLayout(128, 16, rank=2))
        # found: slots reshaped
        b = a.reshape([128, 64])
    if BUG == "fewer than none":
        # found: fewer than none
        tma.store_wait(-1)
    if BUG == "base between 16 bytes":
        # found: base between 16 bytes
        desc = tma.make_tensor_descriptor(x_ptr + 2, [8, 16], [16, 1], [8, 16], gl.NVMMASharedLayout(32, 32, rank=2))
    if BUG == "barrier that another partition ends":
        bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(bar, count=1)
        gl.warp_specialize([(arrive, (bar,)), (invalidate, (bar,))], [4], [24])
    if BUG == "barrier of another partition":
        bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        gl.warp_specialize([(initialize, (bar,)), (arrive, (bar,))], [4], [24])
    if BUG == "name of a constant in a loop":
        for t in gl.static_range(2):
            gl.store(y_ptr + t, 1.0)
        # found: name of a constant in a loop
        for i in range(n):
            t = i + 1
    if BUG == "layout without constexpr":
        # found: layout without constexpr
        layout = gl.BlockedLayout([1], [32], [4], [0])
    if BUG == "subscript of shared memory":
        ring = gl.allocate_shared_memory(gl.int32, [2, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        # found: subscript of shared memory
        ring[0].store(gl.arange(0, 128, line))
    if BUG == "wait for nothing":
        # found: wait for nothing
        warpgroup_mma_wait(0, deps=[])
    if BUG == "exponential in fp16":
        # found: exponential in fp16
        a = gl.exp2(gl.load(x_ptr).to(gl.float16))
    if BUG == "mask of numbers":
        # found: mask of numbers
        a = gl.load(y_ptr, mask=n)
    if BUG == "other without a mask":
        # found: other without a mask
        a = gl.load(y_ptr, other=0)
    if BUG == "plain python function":
        # found: plain python function
        a = plain_python(n)
    if BUG == "unknown operation":
        # found: unknown operation
        a = mma_v2(n, n, n)
    if BUG == "unknown assembly":
        # found: unknown assembly
        a = gl.inline_asm_elementwise("brkpt;", "=r,r", [n], gl.int32, False, 1)
    if BUG == "break":
        while n > 0:
            # found: break
            break
    if BUG == "list of a range":
        # found: list of a range
        a = [i for i in range(2)]
    if BUG == "lambda":
        # found: lambda
        a = lambda: n  # noqa: E731
