"""The inline assembly that the attention kernels generate is what the simulator knows; anything else it refuses."""

import pytest
import torch

pytest.importorskip("triton", reason="gluon_cpu needs Triton for the language; there are wheels for Linux only")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from utils import gluon_cpu
from utils.attention.gluon.shared import keep_columns, rescale, uniform, wait_products


@gluon.jit
def idioms(y_ptr, factor_ptr, COLUMNS: gl.constexpr, WAITS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, COLUMNS], gl.float16)
    a = gl.allocate_shared_memory(gl.float16, [64, 64], a_layout, gl.full([64, 64], 1.0, gl.float16, layout))
    b = gl.allocate_shared_memory(gl.float16, [64, COLUMNS], b_layout, gl.full([64, COLUMNS], 0.5, gl.float16, layout))
    fence_async_shared()
    acc = warpgroup_mma(a, b, gl.zeros([64, COLUMNS], gl.float32, layout), is_async=True)
    if WAITS:
        acc = wait_products(acc, 0, COLUMNS)
    factor = gl.full([64, COLUMNS], uniform(gl.load(factor_ptr)).to(gl.float32), gl.float32, layout)
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    gl.store(y_ptr + rows * COLUMNS + columns, rescale(acc, factor))


@gluon.jit
def kept(y_ptr, first_ptr, behind_ptr, COLUMNS: gl.constexpr, BOTH: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    scores = gl.full([64, COLUMNS], 1.0, gl.float32, layout)
    scores = keep_columns(scores, gl.load(first_ptr + rows), gl.load(behind_ptr + rows), BOTH)
    gl.store(y_ptr + rows[:, None] * COLUMNS + columns, scores)


@gluon.jit
def other_assembly(y_ptr, ASM: gl.constexpr):
    x = gl.full([128], 2.0, gl.float32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(ASM, "=f,0,f", [x, x], dtype=gl.float32, is_pure=True, pack=1)


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_the_idioms_of_the_attention_kernels_are_known(columns):
    y, factor = torch.zeros(64, columns), torch.tensor([3], dtype=torch.int32)
    with gluon_cpu.simulate() as run:
        idioms[(1,)](y, factor, columns, True)
    assert run.ok and torch.equal(y, torch.full_like(y, 3 * 32))


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("columns", [64, 128])
def test_columns_are_kept_between_two_limits(columns, both):
    first = torch.randint(-20, columns + 20, (64,), dtype=torch.int32)
    behind = torch.randint(-20, columns + 20, (64,), dtype=torch.int32)
    y = torch.zeros(64, columns)
    with gluon_cpu.simulate() as run:
        kept[(1,)](y, first, behind, columns, both)
    number = torch.arange(columns)[None]
    keep = (number < behind[:, None]) & ((number >= first[:, None]) | (not both))
    assert run.ok and torch.equal(y, torch.where(keep, 1.0, -torch.inf))


def test_without_the_wait_the_product_is_not_there_yet():
    with pytest.raises(gluon_cpu.RaceError), gluon_cpu.simulate():
        idioms[(1,)](torch.zeros(64, 64), torch.tensor([3], dtype=torch.int32), 64, False)


@pytest.mark.parametrize("asm", ["add.f32 $0, $0, $2;", "mul.f32 $0, $0, $2;", "wgmma.wait_group.sync.aligned;"])
def test_other_assembly_is_refused(asm):
    with pytest.raises(gluon_cpu.UnknownOperationError, match="inline assembly"), gluon_cpu.simulate():
        other_assembly[(1,)](torch.zeros(1), asm)
