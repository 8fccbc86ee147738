"""Additions to global memory in the simulator: atomics, and tiles that TMA adds."""

import pytest
import torch

from utils.machine.device import offline_compile_support

if not offline_compile_support():
    pytest.skip(offline_compile_support().reason, allow_module_level=True)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from utils import gluon_cpu
from utils.attention.gluon.backward.step6_one_consumer import tma_add
from utils.machine.versions import compiler_adds_fences

ROWS = gl.NVMMASharedLayout(0, 32, rank=2)


@gluon.jit
def add_places(sums_ptr, places_ptr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, layout)
    gl.atomic_add(sums_ptr + gl.load(places_ptr + i), i.to(gl.float32))


@gluon.jit
def add_tile(desc, value, FENCE: gl.constexpr, WAIT: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.float32, [32, 128], desc.layout)
    tile.store(gl.full([32, 128], 1.0, gl.float32, layout) * value)
    if FENCE:
        fence_async_shared()
    tma_add(desc, [gl.program_id(0) * 16, 0], tile)
    if WAIT:
        tma.store_wait(0)
    tile.store(gl.zeros([32, 128], gl.float32, layout))


def tiles(sums, **options):
    desc = TensorDescriptor(sums, list(sums.shape), list(sums.stride()), [32, 128], ROWS)
    with gluon_cpu.simulate() as run:
        add_tile[(2,)](desc, 2.5, **({"FENCE": True, "WAIT": True} | options))
    return run


@pytest.mark.parametrize("same", [False, True])
def test_atomics_add_at_every_place_also_at_the_same_one(same):
    sums = torch.ones(128)
    places = torch.zeros(128, dtype=torch.int32) if same else torch.randperm(128).int()
    with gluon_cpu.simulate():
        add_places[(2,)](sums, places)
    expected = torch.ones(128).index_add(0, places, 2 * torch.arange(128.0))
    assert torch.equal(sums, expected)


def test_tma_adds_and_leaves_out_what_lies_outside():
    sums = torch.full((40, 128), 1.0)
    tiles(sums)  # rows 0 to 31 and 16 to 47, of which eight do not exist
    assert (sums[:16] == 3.5).all() and (sums[16:32] == 6.0).all() and (sums[32:] == 3.5).all()


def test_a_tile_that_tma_still_reads_must_not_be_written():
    with pytest.raises(gluon_cpu.RaceError, match="TMA reduction"):
        tiles(torch.zeros(64, 128), WAIT=False)


def test_tma_needs_a_fence_behind_ordinary_stores():
    if not compiler_adds_fences():
        with pytest.raises(gluon_cpu.FenceError, match="TMA reduction"):
            tiles(torch.zeros(64, 128), FENCE=False)
        return
    run = tiles(torch.zeros(64, 128), FENCE=False)
    assert len(run.notes) == 1 and "TMA reduction" in run.notes[0].message
