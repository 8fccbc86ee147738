"""Step 5 with an SM that takes block after block: the next block's K, Q and dO come while the last one's dK and dV leave.

A block of its own for each 128 keys begins with an empty SM: it is launched, sets up its barriers, and waits for the first
K and Q, a few microseconds in which the tensor cores do nothing; and it ends with two stores, one behind the other. Under a
causal mask a block of 4096 tokens has 33 tiles of 2 microseconds on average, so that this is several percent. Here as many
programs as the GPU has SMs draw blocks from a counter in memory:

    who         what
    producer    draws the number of the next block while this one runs, tells it the others through two slots in shared
                memory, and loads K as soon as both consumers have finished with the last one; V behind the stores of dV
                and dK, which go through V's rows
    consumers   count tiles through, over all blocks, as the rings do
    the end     a number behind the last block

The loops over tiles are those of step 5.
"""

# A tuple is unpacked whole: in a kernel `_` would be a variable like any other, with one type.

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from utils.attention.gluon.backward.arguments import Gradients
from utils.attention.gluon.backward.pipeline import Sizes, block_part, block_work, tma_add
from utils.attention.gluon.backward.split import store_part
from utils.attention.gluon.backward.step3_warp_specialized import store_rows
from utils.attention.gluon.backward.step5_storing_warp import launch_step5, walk_block
from utils.attention.gluon.shared import accumulator, aggregate, left_operand, tma_load, uniform


@aggregate
class Queue:
    """Blocks that a program works on one after another: numbers that the producer draws and tells the other roles."""

    counter: gl.tensor  # pointer to the number of blocks drawn so far, by all programs
    programs: gl.tensor  # of this launch; each has its own number as its first block
    end: gl.tensor  # number of blocks, or parts of blocks
    blocks_n: gl.tensor
    section: gl.tensor
    total: gl.tensor
    whole: gl.tensor
    parts: gl.tensor
    numbers: gl.shared_memory_descriptor  # (2, 1) int32
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    freed: gl.shared_memory_descriptor  # mbarriers: K, and V, may be overwritten

    @gluon.constexpr_function
    def __init__(self, counter, programs, end, blocks_n, section, total, whole, parts, numbers, full, empty, freed):
        self.counter = counter
        self.programs = programs
        self.end = end
        self.blocks_n = blocks_n
        self.section = section
        self.total = total
        self.whole = whole
        self.parts = parts
        self.numbers = numbers
        self.full = full
        self.empty = empty
        self.freed = freed

    @gluon.jit
    def place(self, work, number):
        """`work` at block `number`."""
        return work.moved(
            block_part(work.sizes, number, self.blocks_n, self.section, self.total, self.whole, self.parts)
        )

    @gluon.jit
    def draw(self):
        """Producer: the number of the next block."""
        return gl.atomic_add(self.counter, 1, sem="relaxed") + self.programs

    @gluon.jit
    def publish(self, turn, number, WARPS: gl.constexpr):
        """Producer: tell the other roles the number of the block after block `turn` of this program."""
        slot = turn & 1
        mbarrier.wait(self.empty.index(slot), ((turn >> 1) & 1) ^ 1)  # the number of two turns ago has been read
        self.numbers.index(slot).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
        mbarrier.arrive(self.full.index(slot), count=1)

    @gluon.jit
    def next(self, turn, WARPS: gl.constexpr):
        """Other roles: the number of the block after block `turn` of this program."""
        slot = turn & 1
        mbarrier.wait(self.full.index(slot), (turn >> 1) & 1)
        number = self.numbers.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0]))
        number = uniform(gl.sum(number, 0))
        mbarrier.arrive(self.empty.index(slot), count=1)
        return number


@gluon.jit
def make_queue(
    counter_ptr, end, blocks_n, section, total, whole, parts, READERS: gl.constexpr, CONSUMERS: gl.constexpr
):
    """Allocate a queue; READERS: roles that read the numbers, CONSUMERS: those that read K and V."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    read = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    freed = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for w in gl.static_range(2):
        mbarrier.init(told.index(w), count=1)
        mbarrier.init(read.index(w), count=READERS)
        mbarrier.init(freed.index(w), count=CONSUMERS)
    programs = gl.num_programs(0)
    return Queue(counter_ptr, programs, end, blocks_n, section, total, whole, parts, numbers, told, read, freed)


@gluon.jit
def producer(work, queue, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc):
    """Draw blocks, and load K, V, Q and dO of each, in the order of need."""
    PLAN: gl.constexpr = work.sizes.PLAN
    WARPS: gl.constexpr = 4 if PLAN.producer_first else 1
    heads = work.sizes.heads
    number = gl.program_id(0)
    turn = 0
    done = 0  # loads of Q, and of dO, so far
    while number < queue.end:
        here = queue.place(work, number)
        number = queue.draw()
        count, lo, hi = here.first()
        # Both consumers have computed the last dQ, and nobody reads K any more.
        mbarrier.wait(queue.freed.index(0), (turn & 1) ^ 1)
        mbarrier.expect(here.loaded.index(0), k_desc.block_type.nbytes)
        tma_load(k_desc, [here.batch, here.kv_head, here.key, 0], here.loaded.index(0), here.k)
        head = here.kv_head * here.sizes.group
        start = here.start(lo, hi)
        m = start
        for i in range(gl.maximum(count, 1)):
            if count > 0:
                here.q.load(done + i, q_desc, lse_desc, here.batch, head, heads, m * PLAN.block_m)
            if i == 0:
                # dV and dK of the last block have left through V's rows.
                mbarrier.wait(queue.freed.index(1), (turn & 1) ^ 1)
                mbarrier.expect(here.loaded.index(1), v_desc.block_type.nbytes * 2)
                for w in gl.static_range(2):
                    at = [here.batch, here.kv_head, here.key + w * 64, 0]
                    tma_load(v_desc, at, here.loaded.index(1), here.v.index(w))
                queue.publish(turn, number, WARPS)
            if count > 0:
                here.do.load(done + i, do_desc, delta_desc, here.batch, head, heads, m * PLAN.block_m)
            m += 1
            if m == hi:
                m = lo
            if m == start:
                head += 1
        done += count
        turn += 1


@gluon.jit
def storing_warp(work, queue, leave):
    """One warp: hand both parts of each tile's dQ to TMA, which adds them to the sums, and give their places back."""
    sums_desc, tiles, full, empty = leave
    PLAN: gl.constexpr = work.sizes.PLAN
    PIECES: gl.constexpr = PLAN.block_m * PLAN.block_d // 4096
    if work.sizes.CASE.dq and PLAN.by_tma:
        number = gl.program_id(0)
        turn = 0
        done = 0
        while number < queue.end:
            here = queue.place(work, number)
            count, lo, hi = here.first()
            head = here.batch * here.sizes.heads + here.kv_head * here.sizes.group
            start = here.start(lo, hi)
            m = start
            for j in range(count):
                i = done + j
                for w in gl.static_range(2):
                    mbarrier.wait(full.index(w), i & 1)
                    tma_add(sums_desc, [((head * here.sizes.tiles_m + m) * PIECES + w) * 32, 0], tiles.index(w))
                for w in gl.static_range(2):
                    tma.store_wait(1 - w)  # the first part has been read before the second
                    mbarrier.arrive(empty.index(w), count=1)
                m += 1
                if m == hi:
                    m = lo
                if m == start:
                    head += 1
            done += count
            number = queue.next(turn, 1)
            turn += 1


@gluon.jit
def consumer(work, queue, sums, leave, parts_ptr, dk_desc, dv_desc, W: gl.constexpr):
    """Warpgroup W: 64 keys of each block against all tiles of queries that see them."""
    PLAN: gl.constexpr = work.sizes.PLAN
    BLOCK_D: gl.constexpr = PLAN.block_d
    number = gl.program_id(0)
    turn = 0
    done = 0
    while number < queue.end:
        here = queue.place(work, number)
        dk = gl.zeros([64, BLOCK_D], gl.float32, accumulator(BLOCK_D))
        dv = gl.zeros([64, BLOCK_D], gl.float32, accumulator(BLOCK_D))
        count, lo, hi = here.first()
        mbarrier.wait(here.loaded.index(0), turn & 1)
        mbarrier.wait(here.loaded.index(1), turn & 1)
        v_left = 0
        if PLAN.v_left:
            v_left = here.v_rows(W).slice(0, 64, 1).load(left_operand(PLAN.block_m))
        dk, dv = walk_block(here, sums, leave, v_left, (dk, dv), lo, hi, done, W)
        done += count
        mbarrier.arrive(queue.freed.index(0), count=1)
        number = queue.next(turn, 4)
        if PLAN.split_tail and here.parts > 1:
            store_part(parts_ptr, here, dv, W, 0)
            store_part(parts_ptr, here, dk, W, 1)
        else:
            # V's own rows are not needed any more: they carry dV away, and then dK.
            store_rows(dv_desc, here, here.v.index(W), dv, W)
            store_rows(dk_desc, here, here.v.index(W), dk * here.scale, W)
        mbarrier.arrive(queue.freed.index(1), count=1)
        turn += 1


@gluon.jit(
    do_not_specialize=[
        *(
            "sq",
            "sk",
            "window",
            "heads",
            "kv_heads",
            "group",
            "tiles_m",
            "blocks_n",
            "section",
            "total",
            "whole",
            "parts",
        ),
        "end",
    ]
)
def attention_backward_queue(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dk_desc,
    dv_desc,
    lse_desc,
    delta_desc,
    sums_desc,
    dq_sums_ptr,
    parts_ptr,
    counter_ptr,
    end,
    whole,
    parts,
    sq,
    sk,
    window,
    heads,
    kv_heads,
    group,
    tiles_m,
    blocks_n,
    section,
    total,
    c,
    scale,
    PLAN: gl.constexpr,
    CASE: gl.constexpr,
):
    """A program computes dK and dV of BLOCK_N keys of one head, and adds to dQ, block after block: grid (SMs,)."""
    sizes = Sizes(sq, sk, window, heads, kv_heads, group, tiles_m, PLAN, CASE)
    descriptors = (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    work = block_work(sizes, descriptors, blocks_n, section, total, c, scale, 2, 2, whole, parts)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = work.ds
    full = work.loaded
    empty = work.loaded
    if PLAN.by_tma:
        tiles = gl.allocate_shared_memory(gl.float32, [2, 32, 128], sums_desc.layout)
        full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
        empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
        for w in gl.static_range(2):
            mbarrier.init(full.index(w), count=1)
            mbarrier.init(empty.index(w), count=1)
    READERS: gl.constexpr = 3 if PLAN.by_tma and CASE.dq else 2
    queue = make_queue(counter_ptr, end, blocks_n, section, total, whole, parts, READERS, 2)
    leave = (sums_desc, tiles, full, empty)
    loads = (work, queue, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    REGISTERS: gl.constexpr = PLAN.registers
    if PLAN.producer_first:
        gl.warp_specialize(
            [
                (producer, loads),
                (consumer, (work, queue, dq_sums_ptr, leave, parts_ptr, dk_desc, dv_desc, 0)),
                (consumer, (work, queue, dq_sums_ptr, leave, parts_ptr, dk_desc, dv_desc, 1)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )
    elif PLAN.by_tma:
        gl.warp_specialize(
            [
                (consumer, (work, queue, dq_sums_ptr, leave, parts_ptr, dk_desc, dv_desc, 0)),
                (consumer, (work, queue, dq_sums_ptr, leave, parts_ptr, dk_desc, dv_desc, 1)),
                (producer, loads),
                (storing_warp, (work, queue, leave)),
            ],
            [4, 1, 1],
            [REGISTERS, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (work, queue, dq_sums_ptr, leave, parts_ptr, dk_desc, dv_desc, 0)),
                (consumer, (work, queue, dq_sums_ptr, leave, parts_ptr, dk_desc, dv_desc, 1)),
                (producer, loads),
            ],
            [4, 1],
            [REGISTERS, 24],
        )


def launch(g: Gradients) -> None:
    """Run the kernel on tensors of a GPU."""
    launch_step5(attention_backward_queue, g)
