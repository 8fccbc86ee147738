"""`simulate(scaled=...)`: an operation that makes the result changes it, and one that runs for show does not."""

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from utils import gluon_cpu
from utils.checking.kernel_exercises import Launch, Tile, simulate_launch


@gluon.jit
def halves(x_ptr, y_ptr, SHOW: gl.constexpr):
    wide: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    narrow: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    tile = gl.allocate_shared_memory(gl.float32, [512], plain)
    i = gl.arange(0, 512, wide)
    async_copy.async_load(tile, x_ptr + i)
    async_copy.commit_group()
    async_copy.wait_group(0)
    x = tile.load(wide)
    if SHOW:
        x = gl.load(x_ptr + i)
    moved = gl.convert_layout(x, narrow)
    if SHOW:
        moved = gl.load(x_ptr + gl.arange(0, 512, narrow))
    y = moved / 2.0
    if SHOW:
        y = moved * 0.5
    gl.store(y_ptr + gl.arange(0, 512, narrow), y)


@pytest.mark.parametrize("kind", ["copy", "conversion", "division"])
def test_a_result_follows_what_it_is_made_of(kind):
    x = torch.randn(512)
    for show in (False, True):
        y = torch.zeros(512)
        with gluon_cpu.simulate(scaled={kind: 4.0}):
            halves[(1,)](x, y, SHOW=show, num_warps=4)
        assert torch.equal(y, x / 2 if show else 2 * x)


PRODUCT = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from utils.attention.gluon.shared import tma_load, tma_store


@gluon.jit
def product(a_desc, b_desc, c_desc):
    a = gl.allocate_shared_memory(a_desc.dtype, [64, 64], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [64, 64], b_desc.layout)
    c = gl.allocate_shared_memory(c_desc.dtype, [64, 64], c_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    tma_load(a_desc, [0, 0], bar, a)
    tma_load(b_desc, [0, 0], bar, b)
    mbarrier.wait(bar, 0)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = warpgroup_mma(a, b.permute([1, 0]), gl.full([64, 64], 3.0, gl.float32, layout))
    c.store(acc.to(c_desc.dtype))
    fence_async_shared()
    tma_store(c_desc, [0, 0], c)
    tma.store_wait(0)
"""


def test_a_product_and_its_accumulator_have_factors_of_their_own():
    a, b = (torch.randint(-2, 3, (64, 64)).to(torch.float16) for _ in range(2))
    launch = Launch(
        "product",
        (1,),
        {"a_desc": Tile(a, [64, 64]), "b_desc": Tile(b, [64, 64]), "c_desc": Tile(torch.zeros_like(a), [64, 64])},
        ("c_desc",),
    )
    right = a.double() @ b.double().T
    for scaled, expected in (
        (None, right + 3),
        ({"product": 2.0}, 2 * right + 3),
        ({"accumulator": 0.0}, right),
        ({"copy": 2.0}, 4 * right + 3),
    ):
        outputs, _ = simulate_launch(PRODUCT, launch, scaled=scaled)
        assert torch.equal(outputs["c_desc"].double(), expected), scaled


def test_an_unknown_kind_is_refused():
    with (
        pytest.raises(ValueError, match="knows product, accumulator, conversion, copy, division; got sum"),
        gluon_cpu.simulate(scaled={"sum": 2.0}),
    ):
        pass
