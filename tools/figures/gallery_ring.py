"""A producer and a consumer that share two slots of shared memory: the kernel of the gallery's timeline.

With FORGET the consumer never releases one slot, and the kernel never ends. On a GPU it would hang without a message.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from utils.attention.gluon.shared import tma_load

SLOTS = gl.constexpr(2)


@gluon.jit
def _produce(x_desc, ring, ready, empty, tiles, FORGET: gl.constexpr):
    for i in range(tiles):
        mbarrier.wait(empty.index(i % SLOTS), (i // SLOTS & 1) ^ 1)
        mbarrier.expect(ready.index(i % SLOTS), x_desc.block_type.nbytes)
        tma_load(x_desc, [0, i * x_desc.block_type.shape[1]], ready.index(i % SLOTS), ring.index(i % SLOTS))


@gluon.jit
def _consume(y_ptr, ring, ready, empty, tiles, FORGET: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    largest = gl.zeros([ring.shape[1]], gl.float32, gl.SliceLayout(1, layout))
    for i in range(tiles):
        mbarrier.wait(ready.index(i % SLOTS), i // SLOTS & 1)
        x = ring.index(i % SLOTS).load(layout).to(gl.float32)
        fence_async_shared()  # else the next copy into the slot, which goes through the async proxy, may overtake this read
        if not FORGET or i != 3:
            mbarrier.arrive(empty.index(i % SLOTS))
        for _ in range(4):  # some work, to see it overlap with the copies
            x = gl.exp(x) * 0.5
        largest = gl.maximum(largest, gl.max(x, 1))
    gl.store(y_ptr + gl.arange(0, ring.shape[1], gl.SliceLayout(1, layout)), largest)


@gluon.jit
def ring_of_two(x_desc, y_ptr, tiles, FORGET: gl.constexpr):
    """The largest value of each row of x, tile by tile."""
    ring = gl.allocate_shared_memory(x_desc.dtype, [SLOTS] + x_desc.block_type.shape, x_desc.layout)  # noqa: RUF005
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (_consume, (y_ptr, ring, ready, empty, tiles, FORGET)),
            (_produce, (x_desc, ring, ready, empty, tiles, FORGET)),
        ],
        [1],
        [24],
    )
