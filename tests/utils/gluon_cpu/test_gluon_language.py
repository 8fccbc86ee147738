"""Parts of Gluon that the course's own kernels do not use: what runs is compared with torch, what does not is refused by name."""

import ast
import contextlib
import importlib
import inspect
import math
import pkgutil

import pytest
import torch

pytest.importorskip("triton", reason="gluon_cpu needs Triton for the language; there are wheels for Linux only")

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.utils.gluon_cpu import gluon_language_kernels as kernels
from utils import gluon_cpu
from utils.attention import gluon as gluon_kernels
from utils.gluon_cpu import interpreter, rewriting
from utils.machine import versions

clusters = pytest.mark.skipif(
    not hasattr(mbarrier, "allocate_mbarrier"), reason="Gluon has barriers for clusters from Triton 3.7 on"
)
LINE = gl.BlockedLayout([1], [32], [4], [0])
FP8 = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}


def refused_before_triton_38(error, words: str):
    return contextlib.nullcontext() if versions.clusters_are_complete() else pytest.raises(error, match=words)


def blocked(cga_layout):
    return gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], cga_layout)


def described(x: torch.Tensor, block: list[int], cga_layout=()):
    element = FP8.get(x.dtype) or {torch.float16: gl.float16, torch.float32: gl.float32, torch.int32: gl.int32}[x.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, element, cga_layout=[list(basis) for basis in cga_layout])
    return TensorDescriptor.from_tensor(x, block, layout)


# ---- boxes over the edge -----------------------------------------------------------------------------------------


def test_tma_reads_before_a_tensor_but_does_not_write_there():
    """On a GPU a load of such a box writes zeros; a store to a negative coordinate is an illegal instruction."""
    x, y = torch.randn(64, 64).half(), torch.zeros(64, 64).half()
    descriptors = described(x, [64, 64]), described(y, [64, 64])
    with gluon_cpu.simulate():
        kernels.copy_tile[(1,)](*descriptors, -24, 0)
        assert (y[:24] == 0).all() and torch.equal(y[24:], x[:40])
        kernels.copy_tile[(1,)](*descriptors, 0, 40)
    assert torch.equal(y[40:], x[:24])
    words = r"store to the coordinates \[-24, 0\].*illegal instruction"
    with pytest.raises(gluon_cpu.GlobalMemoryError, match=words), gluon_cpu.simulate():
        kernels.copy_tile[(1,)](*descriptors, 0, -24)


# ---- clusters ----------------------------------------------------------------------------------------------------


@clusters
@pytest.mark.parametrize("blocks", [2, 4])
def test_a_multicast_copy_reaches_every_block(blocks):
    x, y = torch.randn(64, 64).half(), torch.zeros(64, 64).half()
    same = [[0, 0]] * (blocks.bit_length() - 1)
    x_desc, y_desc = described(x, [64, 64], same), described(y, [64, 64], same)
    with gluon_cpu.simulate():
        kernels.multicast_copy[(1,)](x_desc, y_desc, 8192, True, num_ctas=blocks)
    assert torch.equal(x, y)
    with pytest.raises(gluon_cpu.DeadlockError, match=r"bar of block 0.*4096 of 12288"), gluon_cpu.simulate():
        kernels.multicast_copy[(1,)](x_desc, y_desc, 12288, True, num_ctas=blocks)


@clusters
def test_a_barrier_that_the_cluster_may_not_see_yet():
    x_desc, y_desc = (described(torch.zeros(64, 64).half(), [64, 64], [[0, 0]]) for _ in "xy")
    with refused_before_triton_38(gluon_cpu.BarrierError, "sync_cluster_init"), gluon_cpu.simulate():
        kernels.multicast_copy[(1,)](x_desc, y_desc, 8192, False, num_ctas=2)


def run_cluster_matmul(
    blocks=2, multicast=True, empty="each block's", waits=True, meets=True, b_cga=None, nbytes=16384, seed=None
):
    a, b, c = torch.randn(64 * blocks, 320).half(), torch.randn(64, 320).half(), torch.zeros(64 * blocks, 64)
    bits = blocks.bit_length() - 1
    rows, same = [[1 << i, 0] for i in range(bits)], [[0, 0]] * bits
    own = [[1 << i] for i in range(bits)]
    layout = mbarrier.MBarrierLayout(own if empty == "each block's" else [[0]] * bits)
    acc = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16], rows)
    tiles = described(a, [64 * blocks, 64], rows), described(b, [64, 64], b_cga or same), c, 5, acc, layout
    how = blocks if empty == "each block's" else 1, nbytes, multicast, waits, meets
    with gluon_cpu.simulate(seed=seed) as run:
        kernels.cluster_matmul[(1,)](*tiles, *how, num_ctas=blocks)
    assert (c.double() - a.double() @ b.double().T).abs().max() < 2e-2
    return run


@clusters
@pytest.mark.parametrize(("blocks", "seed"), [(2, None), (2, 1), (4, None)])
def test_blocks_of_a_cluster_share_a_tile(blocks, seed):
    assert run_cluster_matmul(blocks, seed=seed).ok
    assert run_cluster_matmul(blocks, multicast=False, meets=False, seed=seed).ok  # each block copies for itself


@clusters
@pytest.mark.parametrize(("blocks", "seed"), [(2, None), (2, 1), (4, None)])
def test_a_barrier_that_the_blocks_share(blocks, seed):
    with refused_before_triton_38(gluon_cpu.UnknownOperationError, "from 3.8 on; before, each block gets its own"):
        assert run_cluster_matmul(blocks, empty="the cluster's", meets=False, seed=seed).ok


@clusters
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_multicast_that_waits_for_its_own_block_only_is_a_race(seed):
    with pytest.raises(gluon_cpu.RaceError, match=r"TMA multicast into b_slots\[0\].*memory of block 1") as error:
        run_cluster_matmul(meets=False, seed=seed)
    assert "multicast=MULTICAST" in error.value.report.site.text


@clusters
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"waits": False, "meets": False}, gluon_cpu.RaceError, "TMA multicast into b_slots"),
        ({"b_cga": [[1, 0]], "nbytes": 12288}, gluon_cpu.LayoutError, r"B needs the cga_layout \[\[0, 0\]\]"),
        ({"nbytes": 20480}, gluon_cpu.DeadlockError, "announced bytes missing"),
    ],
    ids=["no wait", "another layout", "too many bytes"],
)
def test_bugs_in_a_cluster_are_found(change, error, words):
    with pytest.raises(error, match=words):
        run_cluster_matmul(**change)


@clusters
def test_values_move_between_blocks():
    x, y = torch.randn(64, 64), torch.zeros(64, 64)
    with gluon_cpu.simulate():
        kernels.between_blocks[(1,)](x, y, blocked([[1, 0]]), blocked([[0, 1]]), num_ctas=2)
    assert torch.equal(y, x + 2)
    with pytest.raises(gluon_cpu.LayoutError, match="num_ctas=2 needs 1"), gluon_cpu.simulate():
        kernels.between_blocks[(1,)](x, y, blocked([]), blocked([]), num_ctas=2)


@clusters
@pytest.mark.parametrize("blocks", [1, 4])
def test_reductions_across_blocks(blocks):
    x, y = torch.randn(3, 2048), torch.zeros(3, 2048)
    layout = gl.BlockedLayout([4], [32], [4], [0], [[1 << i] for i in range(blocks.bit_length() - 1)])
    refused = refused_before_triton_38(gluon_cpu.UnknownOperationError, "from 3.8 on")
    with refused if blocks > 1 else contextlib.nullcontext(), gluon_cpu.simulate():
        kernels.cluster_softmax[(3,)](x, y, 2048, layout, num_ctas=blocks)
        assert (y - torch.softmax(x, 1)).abs().max() < 1e-6


@clusters
@pytest.mark.parametrize(
    ("second", "part", "swizzle", "words"),
    [
        ([[0, 1]], "", 1, "gl.convert_layout moves values"),
        ([[1, 0]], "slice", 1, "does not cut smem"),
        ([[0, 0]], "reinterpret", 1, "each block has 2048 elements"),
        ([[0, 1]], "reinterpret", 1, "written through a layout"),
        ([[1, 0]], "reinterpret", 8, "written through a layout"),
    ],
)
def test_memory_of_another_block_or_in_other_places_is_refused_by_name(second, part, swizzle, words):
    shared = gl.SwizzledSharedLayout(1, 1, 1, [1, 0], [[1, 0]])
    x = torch.zeros(64, 64)
    refused = (gluon_cpu.UnknownOperationError, gluon_cpu.LayoutError)
    with pytest.raises(refused, match=words), gluon_cpu.simulate():
        whole = gl.SwizzledSharedLayout(1, 1, swizzle, [1, 0], second)
        kernels.through_memory[(1,)](x, x, blocked([[1, 0]]), blocked(second), shared, part, whole, num_ctas=2)


@clusters
@pytest.mark.parametrize("kind", ["arrive", "barrier"])
def test_the_clusters_barrier_stands_outside_of_partitions(kind):
    if kind == "arrive" and not hasattr(kernels.hopper.cluster, "arrive"):
        pytest.skip("Triton 3.9 has cluster.barrier in its place")
    with gluon_cpu.simulate():
        kernels.meeting[(1,)](kind, num_ctas=2)
    with refused_before_triton_38(gluon_cpu.KernelError, "inside of warp_specialize"), gluon_cpu.simulate():
        kernels.meeting_in_a_partition[(1,)](kind, num_ctas=2)


@clusters
@pytest.mark.parametrize("kept", [None, 0, 1, 2])
def test_arrivals_from_the_first_block(kept):
    y = torch.zeros(1)
    if kept == 2:
        with pytest.raises(gluon_cpu.BarrierError, match="from 0 to 1"), gluon_cpu.simulate():
            kernels.arrival_of_the_first_block[(1,)](y, kept, num_ctas=2)
        return
    if kept == 0 and not versions.clusters_are_complete():
        pytest.skip("from_cta is in Triton from 3.9 on, where the compiler makes the barriers visible to the cluster")
    with gluon_cpu.simulate():
        kernels.arrival_of_the_first_block[(1,)](y, kept, num_ctas=2)
    assert y.item() == 1


# ---- fp8 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize("left", FP8)
@pytest.mark.parametrize("right", FP8)
def test_fp8_products(left, right, in_registers):
    a, b, c = torch.randn(64, 128).to(left), torch.randn(32, 128).to(right), torch.zeros(64, 32)
    acc = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 32])
    with gluon_cpu.simulate():
        kernels.fp8_product[(1,)](described(a, [64, 128]), described(b, [32, 128]), c, acc, 96 * 128, in_registers)
    assert (c.double() - a.double() @ b.double().T).abs().max() < 1e-4


def test_fp8_instructions_multiply_32_elements():
    a, b = torch.zeros(64, 128).to(torch.float8_e4m3fn), torch.zeros(32, 128).to(torch.float8_e4m3fn)
    acc = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    with pytest.raises(gluon_cpu.LayoutError, match="K is 32 bytes, 32 for"), gluon_cpu.simulate():
        tiles = described(a, [64, 128]), described(b, [32, 128]), torch.zeros(64, 32)
        kernels.fp8_product[(1,)](*tiles, acc, 96 * 128, False)


@pytest.mark.parametrize("kind", FP8)
def test_fp8_conversions_round_to_even_and_saturate(kind):
    largest = torch.finfo(kind).max
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, largest, 1.04 * largest, -1e9, 1e-9, 2.0**-9])
    x = torch.cat([special, torch.randn(246) * torch.logspace(-3, 2, 246)])
    y, bits, back = torch.zeros(256).to(kind), torch.zeros(256, dtype=torch.uint8), torch.zeros(256)
    with gluon_cpu.simulate():
        kernels.fp8_conversions[(1,)](x, y, bits, back, FP8[kind], LINE)
    want = x.clamp(-largest, largest).to(kind)
    assert torch.equal(y.view(torch.uint8), want.view(torch.uint8)) and torch.equal(bits, want.view(torch.uint8))
    assert torch.equal(back.nan_to_num(7.0), want.float().nan_to_num(7.0))


def test_fp8_sums_are_refused_by_name():
    with pytest.raises(gluon_cpu.UnknownOperationError, match="convert first"), gluon_cpu.simulate():
        kernels.fp8_sum[(1,)](torch.zeros(256).to(torch.float8_e4m3fn), LINE)


# ---- others ------------------------------------------------------------------------------------------------------

REDUCTIONS = {
    "add": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}


@pytest.mark.parametrize("name", [name for name in REDUCTIONS if hasattr(tma, f"async_atomic_{name}")])
def test_tma_reductions(name):
    reduce = getattr(tma, f"async_atomic_{name}")
    x, y = (torch.randint(-99, 99, (16, 32), dtype=torch.int32) for _ in "xy")
    want = REDUCTIONS[name](x, y)
    with gluon_cpu.simulate():
        kernels.tma_reduction[(1,)](described(y, [16, 32]), x, reduce, blocked([]))
    assert torch.equal(y, want)


@pytest.mark.skipif(not hasattr(tma, "async_atomic_min"), reason="Gluon has this function from Triton 3.8 on")
def test_tma_has_no_minimum_of_fp32():
    x = torch.zeros(16, 32)
    with pytest.raises(gluon_cpu.LayoutError, match=r"takes fp16, bf16.* the descriptor is fp32"), gluon_cpu.simulate():
        kernels.tma_reduction[(1,)](described(x, [16, 32]), x, tma.async_atomic_min, blocked([]))


def test_loops_carry_tuples_and_static_range_unrolls():
    y = torch.zeros(2, 128, dtype=torch.int32)
    with gluon_cpu.simulate():
        kernels.carried_tuples[(1,)](y, 4, LINE)
    assert y[:, 0].tolist() == [6, 1 + 0 + 0 + 1 + 3] and (y == y[:, :1]).all()


def test_a_descriptor_that_the_kernel_makes():
    x, y = torch.randn(16, 64), torch.zeros(16, 64)
    shared = gl.NVMMASharedLayout.get_default_for([16, 32], gl.float32)
    with gluon_cpu.simulate():
        kernels.descriptor_of_the_kernel[(1,)](x, y, 16, 64, shared)
    assert torch.equal(y[:, :32], x[:, 32:])


# ---- the compiler ------------------------------------------------------------------------------------------------


def tile(kind: str, shape: list[int], cga_layout=()) -> str:
    element = {"fp16": gl.float16, "i32": gl.int32, "fp8e4nv": gl.float8e4nv, "fp8e5": gl.float8e5}[kind]
    layout = gl.NVMMASharedLayout.get_default_for(shape, element, cga_layout=[list(basis) for basis in cga_layout])
    return f"tensordesc<{kind}{shape},{layout!r}>"


def compile_and_list(words: list[str], kernel, signature: dict, constants: dict, **options) -> list[str]:
    """Compile a kernel for sm_90a; return the words that occur in its PTX."""
    from utils.kernels.offline import compile_gluon

    ptx = compile_gluon(kernel, signature, constants, **options).asm["ptx"]
    return [word for word in words if word in ptx]


# ---- what Triton 3.6 refuses ---------------------------------------------------------------------------------------


def unnamed_layouts_of(module) -> list[str]:
    """Return the calls in a module's source that Triton 3.6 refuses because a layout has no name of its own."""
    tree, names = ast.parse(inspect.getsource(module)), vars(module)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if rewriting.unnamed_layouts(call, names)]


def test_layouts_have_a_name_in_the_courses_kernels():
    """`make test` runs with Triton 3.7, which accepts layouts without a name; 3.6 refuses them, so they are searched for here."""
    names = [module.name for module in pkgutil.walk_packages(gluon_kernels.__path__, f"{gluon_kernels.__name__}.")]
    modules = [
        importlib.import_module(name) for name in [*names, *(f"utils.kernels.gemm_{x}" for x in ("gluon", "work"))]
    ]
    assert sum("@gluon.jit" in inspect.getsource(module) for module in modules) > 15
    assert {module.__name__: found for module in modules if (found := unnamed_layouts_of(module))} == {}
    assert unnamed_layouts_of(kernels) == ["line_of_ones(N, at.type.layout)"]


@pytest.mark.parametrize("triton_36", [True, False])
def test_a_layout_without_a_name_is_refused_as_triton_36_does(monkeypatch, triton_36):
    monkeypatch.setattr(versions, "layouts_need_names", lambda: triton_36)
    monkeypatch.setattr(interpreter, "_rewritten", {})
    y = torch.zeros(128)
    with gluon_cpu.simulate():
        kernels.named_layout[(1,)](y, 128, LINE)
    assert (y == 1).all()
    y.zero_()
    if triton_36:
        with pytest.raises(gluon_cpu.KernelError, match=r"layout: gl\.constexpr = ") as caught, gluon_cpu.simulate():
            kernels.unnamed_layout[(1,)](y, 128, LINE)
        assert "line_of_ones(N, at.type.layout)" in caught.value.report.site.text
    else:
        with gluon_cpu.simulate():
            kernels.unnamed_layout[(1,)](y, 128, LINE)
        assert (y == 1).all()


@pytest.mark.slow
@clusters
def test_the_compiler_makes_cluster_instructions_of_the_same_kernels():
    words = ["multicast::cluster", "wgmma.mma_async", "barrier.cluster", "mbarrier.arrive.shared::cluster"]
    same = tile("fp16", [64, 64], [[0, 0]])
    signature = dict(in_desc=same, out_desc=same)
    found = compile_and_list(words, kernels.multicast_copy, signature, dict(BYTES=8192, INIT_VISIBLE=True), num_ctas=2)
    assert found == ["multicast::cluster", "barrier.cluster"]
    constants = dict(
        ACC=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16], [[1, 0]]),
        EMPTY=mbarrier.MBarrierLayout([[0]]),
        GROUPS=1,
        BYTES=16384,
        MULTICAST=True,
        WAITS=True,
        MEETS=False,
    )
    signature = dict(a_desc=tile("fp16", [128, 64], [[1, 0]]), b_desc=same, c_ptr="*fp32", steps="i32")
    found = compile_and_list(words, kernels.cluster_matmul, signature, constants, num_ctas=2)
    assert found == (words if versions.clusters_are_complete() else words[:-1])  # Triton 3.7 makes two barriers of it
    if versions.clusters_are_complete():
        layout = gl.BlockedLayout([4], [32], [4], [0], [[1]])
        constants = dict(N=2048, LAYOUT=layout)
        signature = dict(x_ptr="*fp32", y_ptr="*fp32")
        assert "barrier.cluster" in compile_and_list(words, kernels.cluster_softmax, signature, constants, num_ctas=2)


@pytest.mark.slow
def test_the_compiler_makes_fp8_instructions_of_the_same_kernels():
    constants = dict(ACC=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 32]), BYTES=96 * 128)
    for left, right, in_registers in (("fp8e4nv", "fp8e4nv", True), ("fp8e4nv", "fp8e5", False)):
        signature = dict(a_desc=tile(left, [64, 128]), b_desc=tile(right, [32, 128]), c_ptr="*fp32")
        types = ".".join({"fp8e4nv": "e4m3", "fp8e5": "e5m2"}[kind] for kind in (left, right))
        given = constants | dict(IN_REGISTERS=in_registers)
        assert compile_and_list([types], kernels.fp8_product, signature, given) == [types]
    signature = dict(x_ptr="*fp32", y_ptr="*fp8e4nv", bits_ptr="*u8", back_ptr="*fp32")
    found = compile_and_list(
        ["satfinite.e4m3"], kernels.fp8_conversions, signature, dict(TYPE=gl.float8e4nv, LAYOUT=LINE)
    )
    assert found
