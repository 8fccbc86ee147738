"""Deal the work of step 6 to programs: blocks of keys one after another, or pieces of blocks; and the sums of the pieces.

There is a program for each SM, and programs draw numbers from a counter in memory. The producer draws the next number when it
has started the load of its last tile. It tells the other roles their part through two slots in shared memory, and loads while
dV and dK are stored. So an SM is never empty between two blocks. The first `whole` numbers are whole blocks.

Few blocks leave SMs without work: 72 blocks on 132 SMs, or the last 68 blocks of 2048. These blocks are cut into equal pieces
(`order.py`). The pieces add dK and dV to sums in fp32, like dQ. In deterministic mode each piece has its own place, and
`finish_backward` adds up the pieces of a block, always in the same order.

    sums of dK and dV    (blocks or pieces, halves of the keys, dV and dK, 64 * BLOCK_D) fp32, in the order of `fragments.py`
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from utils.attention.gluon.backward.fragments import to_fragments
from utils.attention.gluon.backward.pipeline import Part
from utils.attention.gluon.shared import aggregate, uniform


@aggregate
class Share:
    """Two slots through which the producer tells the other roles their parts."""

    slots: gl.shared_memory_descriptor  # (2 * 11, 1) int32: the fields of two parts
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def tell(self, part, turn):
        """Producer: tell the other roles this program's part number `turn`; a negative key means that there is none."""
        slot = turn & 1
        mbarrier.wait(self.empty.index(slot), ((turn >> 1) & 1) ^ 1)  # without it a role may still read this slot
        fields = (part.key, part.stop, part.batch, part.kv_head, part.lo, part.first)
        fields += (part.end, part.hi, part.at, part.count, part.slot)
        for i in gl.static_range(11):
            number = gl.full([1], fields[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
            self.slots.index(slot * 11 + i).store(number)
        mbarrier.arrive(self.full.index(slot), count=1)

    @gluon.jit
    def field(self, turn, i, WARPS: gl.constexpr):
        """Other roles: return field i of part number `turn`."""
        number = self.slots.index((turn & 1) * 11 + i).load(gl.BlockedLayout([1], [32], [WARPS], [0]))
        return uniform(gl.sum(number, 0))

    @gluon.jit
    def next(self, turn, WARPS: gl.constexpr):
        """Other roles: wait for part number `turn`, and return its key."""
        mbarrier.wait(self.full.index(turn & 1), (turn >> 1) & 1)
        return self.field(turn, 0, WARPS)

    @gluon.jit
    def read(self, turn, WARPS: gl.constexpr):
        """Other roles: return part number `turn`. Reading it again later saves its registers in between."""
        fields = (self.field(turn, 0, WARPS),)
        for i in gl.static_range(1, 11):
            fields += (self.field(turn, i, WARPS),)  # type: ignore[assignment]  # in a kernel a name's tuple may grow
        return Part(*fields)  # type: ignore[call-arg]

    @gluon.jit
    def release(self, turn):
        """Other roles: say that part number `turn` is done."""
        mbarrier.arrive(self.empty.index(turn & 1), count=1)


@gluon.jit
def make_share(READERS: gl.constexpr):
    """Allocate the slots and barriers of a Share; READERS: the number of other roles."""
    slots = gl.allocate_shared_memory(gl.int32, [22, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Share(slots, full, empty)


@gluon.jit
def leave_part(parts_ptr, slot, x, WHICH: gl.constexpr, PLAN: gl.constexpr):
    """Store or add a part of dV (WHICH = 0) or dK (1), in fp32 and not scaled, for 128 keys or the 64 keys of a warpgroup."""
    HALVES: gl.constexpr = x.shape[0] // 64
    HALF: gl.constexpr = 64 * x.shape[1]
    flat = to_fragments(x)
    i = gl.arange(0, HALVES * HALF, flat.type.layout)
    at = parts_ptr + ((slot.to(gl.int64) * HALVES + i // HALF) * 2 + WHICH) * HALF + i % HALF
    if PLAN.dq:
        # The sums lie eight columns after eight columns. The columns behind `depth` are zeros.
        gl.atomic_add(at, flat, mask=i % HALF < (PLAN.depth if PLAN.depth > 0 else x.shape[1]) * 64, sem="relaxed")
    else:
        gl.store(at, flat)
