"""A kernel that reads keys and values by TMA and does nothing with them: how fast a cache can be read at all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from utils.attention.gluon.shared import thread_barrier, tma_load


@gluon.jit
def load(k_desc, v_desc, i, first, step, tile, full, pred):
    """Ask for load number i of a program: K and V of its blocks alternate."""
    row = (first + i // 2 * step) * tile.shape[0]
    mbarrier.expect(full, k_desc.block_type.nbytes, pred=pred)
    tma_load(k_desc, [row, 0], full, tile, pred=pred & (i % 2 == 0))
    tma_load(v_desc, [row, 0], full, tile, pred=pred & (i % 2 == 1))


@gluon.jit
def read_alone(k_desc, v_desc, blocks, group, SLOTS: gl.constexpr):
    """Read an equal share of all blocks: `group` neighbouring programs share a run of blocks, which they take in turn."""
    BLOCK: gl.constexpr = k_desc.block_type.shape[0]
    WIDTH: gl.constexpr = k_desc.block_type.shape[1]
    ring = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, BLOCK, WIDTH], k_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for fill in gl.static_range(SLOTS):
        mbarrier.init(full.index(fill), count=1)
    fence_async_shared()
    thread_barrier()
    program, programs = gl.program_id(0), gl.num_programs(0)
    groups, rank = programs // group, program % group
    begin = program // group * blocks // groups
    end = (program // group + 1) * blocks // groups
    first = begin + rank
    count = 2 * ((end - first + group - 1) // group)
    for fill in gl.static_range(SLOTS):
        i = gl.to_tensor(fill)
        load(k_desc, v_desc, i, first, group, ring.index(fill), full.index(fill), i < count)
    for i in range(count):
        slot = i % SLOTS
        mbarrier.wait(full.index(slot), (i // SLOTS) & 1)
        more = i + SLOTS < count
        load(k_desc, v_desc, i + SLOTS, first, group, ring.index(slot), full.index(slot), more)


def reader(k: torch.Tensor, v: torch.Tensor, programs: int, block: int, slots: int, group: int) -> Callable[[], object]:
    """Return a call that reads k and v (rows, width) in blocks of `block` rows, `slots` of them on their way a program."""
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    k_desc, v_desc = (TensorDescriptor.from_tensor(x, [block, x.shape[1]], layout) for x in (k, v))
    return lambda: read_alone[(programs,)](k_desc, v_desc, len(k) // block, group, slots, num_warps=4)
