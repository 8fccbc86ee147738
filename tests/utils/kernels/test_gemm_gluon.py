"""The Gluon GEMM: its assembly for sm_90a and its host side without a GPU, its results on a Hopper GPU."""

import importlib.util
import itertools
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.utils.barrier_places import covered_barriers
from tests.utils.kernels.products import assert_product, matrix
from utils.kernels.gemm_plan import KERNELS, PLANS, SPLITS, Plan

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

ORDERS = [(False, False), (False, True), (True, False), (True, True)]
# Three plans (the short kernel, four warps, eight warps), each with another order of A and B in memory.
KINDS = {(plan.short > 0, plan.warps): plan for plan in KERNELS}.values()
VARIANTS = [
    (replace(plan, a_column_major=a, b_column_major=b), dtype)
    for plan, (a, b), dtype in zip(KINDS, ORDERS, ("bf16", "fp16", "bf16"), strict=False)
]


@pytest.mark.slow
@pytest.mark.parametrize("plan, dtype", VARIANTS, ids=lambda x: getattr(x, "name", x))
def test_the_assembly_does_what_the_header_says(plan, dtype, tmp_path, monkeypatch):
    from utils.kernels.gemm_launch import compile_for_hopper
    from utils.kernels.offline import read_assembly

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compiled here and now
    kernel = read_assembly(compile_for_hopper(plan, dtype), plan.name)
    kind = dtype.replace("fp", "f")
    assert kernel.count(r"\b(?:LDL|STL)\b") == kernel.spill_bytes == kernel.count("HMMA") == 0
    assert kernel.shared_bytes <= 225 * 1024 and covered_barriers(kernel.ttgir) == []
    assert kernel.count(r"prefetch\.tensormap", "ptx") == len(plan.boxes)
    assert kernel.count("UTMASTG") == plan.pieces
    # Sums of parts are stored 16 bytes at a time.
    assert kernel.count(r"STG\.E\.128") == plan.block_m * plan.columns // (128 * plan.warps)
    loops = {tile.block_n for tile in PLANS if tile.kernel == replace(plan, a_column_major=False, b_column_major=False)}
    for width in loops:
        wgmma = rf"wgmma\.mma_async\.sync\.aligned\.m64n{width}k16\.f32\.{kind}\.{kind}"
        assert kernel.count(wgmma, "ptx") == plan.block_m // 4 // plan.warps == kernel.count("HGMMA") // len(loops)
    in_flight = sorted(re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[012])", kernel.sass))
    assert in_flight == ["0x0"] * len(loops) + ["0x1"] * len(loops)
    copies, joins = kernel.count("UTMALDG"), kernel.count("UCGABAR_ARV")
    moves = kernel.count(r"setmaxnreg\.inc\S*\s+240", "ptx"), kernel.count(r"setmaxnreg", "ptx")
    if plan.short:
        # A and B of each slot before the first step, and of one slot in the loop.
        assert moves == (0, 0) and joins == 0 and copies == 2 * (plan.slots + 1)
    else:
        # One loop of the producer for all widths.
        assert 0 < moves[0] < moves[1] if plan.warps == 8 else moves == (0, 0)
        init, move = (kernel.ptx.find(word) for word in ("mbarrier.init", "setmaxnreg"))
        assert init < move or move < 0  # no role waits for registers before the barriers are set up
        assert 0 < kernel.count(r"UTMALDG\.[23]D\.MULTICAST") < copies <= 5
        # The consumer releases a slot in each loop and once more after it; all warps join the cluster, also those without a role.
        assert kernel.count(r"mbarrier\.arrive\.shared::cluster", "ptx") == 2 * len(loops) and joins == 4
        # A slot's bytes are those of the launch's tiles.
        assert kernel.count(r"expect_tx", "ptx") == kernel.count(r"expect_tx[^;]*, bytes;", "ptx") == 1


COPY = "cp.async.bulk.tensor.{}d.shared::{}.global.mbarrier::complete_tx::bytes"
PTX = f"""
    .param .u32 split, .param .u32 eighths, .param .u64 .ptr .global .align 1 scratch
    @%p1 {COPY.format(2, "cta")} [%r1], [%rd1, {{%r2, %r3}}], [%r7];
    mov.u32 %r9, 0; // for all blocks of the cluster
    @%p2 {COPY.format(2, "cta")} [%r1], [%rd1, {{%r2, %r3}}], [%r7];
    @%p3 {COPY.format(3, "cluster")} [%r1], [%rd1, {{%r2, %r3, %r4}}], [%r7];
    mov.u32 %r9, 0; // for this block
    @%p4 {COPY.format(2, "cluster")} [%r1], [%rd1, {{%r2, %r3}}], [%r7];
    @%p5 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r7], 49152;
    @%p6 mbarrier.arrive.shared::cta.b64 _, [%r8];
"""


@pytest.mark.parametrize("plan", [Plan(128, 256, cluster=2), Plan(64, 96, cluster=4)], ids=lambda plan: plan.name)
def test_copies_between_the_marks_go_to_all_blocks_and_lanes_arrive_in_all(plan):
    from utils.kernels.gemm_launch import adapt, multicast

    ptx = multicast(PTX, plan)
    assert (ptx.count("mapa"), ptx.count(".multicast")) == (1, 2)
    _, before, _, first, second, _, behind, expect, arrive = ptx.strip().splitlines()
    for line, condition in ((first, "@%p2"), (second, "@%p3")):
        assert re.search(rf"{condition} cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global", line)
        assert ".multicast::cluster [%r1]" in line and line.endswith("[%r7], all; }")
        assert f"mov.b16 all, {2**plan.cluster - 1};" in line
    assert "multicast" not in before + behind and "mapa" not in expect
    assert "ld.param.b32 bytes, [eighths];" in expect and "[%r7], bytes;" in expect
    assert f"and.b32 bytes, bytes, -8; mad.lo.u32 bytes, bytes, 1024, {128 * plan.block_m};" in expect
    assert "vote.sync.any.pred arrives, %p6, -1;" in arrive
    assert f"setp.lt.and.u32 arrives, lane, {plan.cluster}, arrives;" in arrive
    assert arrive.count("mbarrier.arrive") == 1 and "mapa.shared::cluster.u32 there, %r8, lane;" in arrive
    with pytest.raises(ValueError, match="condition"):
        multicast(PTX.replace("@%p6 ", ""), plan)
    with pytest.raises(ValueError, match="has 0 shared copies and 0 arrivals"):
        adapt(SimpleNamespace(asm={"ptx": "ret;"}), plan)


def test_one_warp_waits_for_itself_between_copies_and_all_warps_elsewhere():
    from utils.kernels.gemm_launch import fewer_meetings

    copy, meeting = f"@%p1 {COPY.format(2, 'cta')} [%r1], [%rd1, {{%r2, %r3}}], [%r7];", "bar.sync 0;"
    expect, wait = "@%p5 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r7], 49152;", "mbarrier.try_wait.parity.shared"
    steps = [expect, meeting, ".loc 1", copy, meeting, copy, meeting, wait, meeting, expect]
    lines = ["mbarrier.init;", meeting, "mbarrier.init;", meeting, *steps]
    changed = [i for i, line in enumerate(fewer_meetings("\n".join(lines)).splitlines()) if line != lines[i]]
    assert changed == [1, 5, 8]


def test_products_are_as_wide_as_the_mark_in_their_basic_block_says_and_take_b_from_where_it_says():
    from utils.kernels.gemm_launch import narrow

    product = "wgmma.mma_async.sync.aligned.m64n{}k16.f32 {{{}}}, %rd1, {}, %p1, 1, 1, 0, 1;"
    numbers = [",".join(f"%r{i}" for i in range(n // 2)) for n in (256, 80)]
    given, expected = product.format(256, numbers[0], "%rd2"), product.format(80, numbers[1], "b")
    place = "{ .reg .b64 b; cvt.u64.u32 b, %r9; add.s64 b, b, %rd2; "
    mark = "// width 80 at %r9\n$L__tmp1:\n"
    assert narrow(f"{mark}{given}\n") == f"{mark}{place}{expected} }}\n"
    with pytest.raises(ValueError, match="No mark"):
        narrow(f"// width 80 at %r9\n$L__BB0_1:\n{given}\n")


def test_operands_that_tma_can_copy_and_those_it_cannot():
    from utils.kernels.gemm_launch import rows_in_memory

    half = lambda *shape: torch.zeros(*shape, dtype=torch.float16)  # noqa: E731
    for x, rows in (
        (half(10, 24), (False, [10, 24], [24, 1])),
        (half(24, 16).T, (True, [24, 16], [16, 1])),
        (half(10, 40)[:, :33], (False, [10, 33], [40, 1])),  # the pitch counts, not K
        (half(10, 32), (False, [10, 32], [32, 1])),
        (half(1, 33), (False, [1, 33], [40, 1])),  # one row has no pitch
        (half(33, 1), (True, [1, 33], [40, 1])),
    ):
        assert rows_in_memory("A", x) == rows
    for x in (half(10, 33), half(10, 40)[:, 1:], half(10, 80)[:, ::2], half(1, 40).expand(10, 40)):
        with pytest.raises(ValueError, match=r"copies A by TMA.*gemm_autotuned"):
            rows_in_memory("A", x)


def test_without_a_hopper_gpu_the_kernel_says_so():
    from utils.kernels.gemm import gemm_warp_specialized

    with pytest.raises(ValueError, match=r"runs on a Hopper GPU.*A \(2, 8\) and B \(8, 8\) on cpu"):
        gemm_warp_specialized(torch.ones(2, 8).half(), torch.ones(8, 8).half())
    with pytest.raises(TypeError, match=r"takes float16 or bfloat16; got .*float32"):
        gemm_warp_specialized(torch.ones(2, 8), torch.ones(8, 8))


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda plan: plan.name)
@pytest.mark.parametrize("a_column_major, b_column_major", ORDERS)
def test_random_shapes_against_float64(kernel, a_column_major, b_column_major):
    """Odd tails, clusters that extend past both edges, fewer steps than slots, and rings that go round many times."""
    from utils.kernels.gemm_launch import prepare

    dtype = random.choice((torch.float16, torch.bfloat16))
    plans = itertools.cycle([plan for plan in PLANS if plan.kernel == kernel])
    fixed = [(1, 8, 8), (1, 1, 1), (128, 256, 64), (129, 257, 65), (127, 248, 2048), (3000, 1032, 520)]
    drawn = [[random.randint(1, limit) for limit in (1500, 1500, 1500)] for _ in range(6)]
    # Many tiles of two steps each: one tile's pieces are stored right after those of another.
    for m, n, k in (*fixed, (2600, 5000, 1160), (6048, 6216, 120), *drawn):
        plan = next(plans)
        split = random.choice([split for split in SPLITS if split <= -(-k // 64)])
        a, b = matrix(m, k, a_column_major, dtype), matrix(k, n, b_column_major, dtype)
        launch = prepare(a, b, plan, split)
        c = launch(a, b)
        assert_product(c, a, b, f"{plan} {split} {m} x {n} x {k} {dtype} A^T {a_column_major} B^T {b_column_major}")
        assert c.is_contiguous()
        assert all(torch.equal(c, launch(a, b)) for _ in range(20)), f"{plan} {split}: not the same bits twice"


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("plan", KERNELS, ids=lambda plan: plan.name)
def test_a_launch_that_begins_early_waits_for_what_it_reads(plan, split):
    """Each product of a chain reads the one before it, and writes to memory that an earlier one has left."""
    from utils.kernels.gemm_launch import prepare

    x = matrix(520, 520)
    weight = torch.linalg.qr(torch.randn(520, 520, device="cuda"))[0].half()
    results = []
    for wait in (torch.cuda.synchronize, lambda: None):
        launch = prepare(x, weight, plan, split)
        y = launch(x, weight)
        for _ in range(300):
            wait()
            y = launch(y, weight)
        results.append(y)
    assert results[0].float().norm() > 100 and torch.equal(*results)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("columns", [256, 203])
def test_nothing_is_written_outside_of_c(columns):
    from utils.kernels.gemm_launch import prepare

    a, b = matrix(131, 72), matrix(72, columns)
    zone = torch.full((64 + 131 + 64, -(-columns // 8) * 8), 7.0, device="cuda", dtype=torch.float16)
    rows = zone[64:-64]
    for plan, split in itertools.product(PLANS, (1, 2)):  # of all widths
        prepare(a, b, plan, split)(a, b, rows[:, :columns])
        assert_product(rows[:, :columns], a, b, str(plan))
        rows.fill_(7.0)
        assert (zone == 7.0).all(), plan


@pytest.mark.gpu
@hopper
def test_a_new_shape_compiles_nothing_and_takes_20_ms_at_most():
    from time import perf_counter

    from utils.kernels.gemm_launch import prepare

    for plan in KERNELS:
        tiles = [tile for tile in PLANS if tile.kernel == plan]
        prepare(matrix(520, 520), matrix(520, 520), plan, 2)  # compiles the kernel that adds up parts, too
        operands = [(matrix(m, k), matrix(k, n)) for m, n, k in ((1, 8, 8), (16, 1024, 128), (1000, 264, 1032))]
        torch.cuda.synchronize()
        for (a, b), split in zip(operands, (1, 2, 4), strict=True):
            start = perf_counter()
            prepare(a, b, tiles[split % len(tiles)], split)(a, b)
            assert perf_counter() - start < 0.02, (plan, a.shape)


@pytest.mark.gpu
@hopper
def test_empty_products():
    from utils.kernels.gemm import gemm_warp_specialized

    half = lambda *shape: torch.ones(*shape, device="cuda", dtype=torch.float16)  # noqa: E731
    assert gemm_warp_specialized(half(0, 8), half(8, 8)).shape == (0, 8)
    assert (gemm_warp_specialized(half(3, 0), half(0, 5)) == torch.zeros(3, 5, device="cuda")).all()
    with pytest.raises(ValueError, match="copies A by TMA"):
        gemm_warp_specialized(half(10, 33), half(33, 8))
