"""Tensor memory and tcgen05 in the simulator: right kernels give right numbers, and a broken line is named."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from utils import gluon_cpu
from utils.gluon_cpu.compiling import import_file, write_source
from utils.machine.versions import installed_version

if (installed_version("triton") or (0,)) < (3, 7):
    pytest.skip("Blackwell's kernels here are written for Triton 3.7 and later", allow_module_level=True)

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.utils.gluon_cpu import blackwell_kernels as kernels
from tests.utils.gluon_cpu.gluon_helpers import descriptor

TIMINGS = (None, 1, 2, 3)


def product(module, m=128, n=128, k=384, stages=2, block=(128, 128, 64)) -> float:
    """Return the error of one product, relative to its largest element."""
    a, b, c = torch.randn(m, k).half(), torch.randn(n, k).half(), torch.zeros(m, n).half()
    rows, columns, depth = block
    given = descriptor(a, [rows, depth]), descriptor(b, [columns, depth]), descriptor(c, [rows, columns])
    module.product[-(-m // rows), -(-n // columns)](*given, -(-k // depth), stages, num_warps=4)
    return difference(c, a.double() @ b.double().T)


def chain(module, blocks=2, n=64, width=64) -> float:
    q, k, v = (torch.randn(rows, size).half() / 4 for rows, size in ((128, 64), (blocks * n, 64), (blocks * n, width)))
    y = torch.zeros(128, width)
    given = descriptor(q, [128, 64]), descriptor(k, [n, 64]), descriptor(v, [n, width])
    module.chain[(1,)](*given, y, blocks, num_warps=4)
    return difference(y, torch.exp2(q.double() @ k.double().T) @ v.double())


def rows(module, count=32, width=64, column=0, first=0) -> float:
    x, y = torch.randn(100, 128).half(), torch.zeros(100, 128).half()
    sources, targets = (torch.randperm(100, dtype=torch.int32)[:count] + at for at in (first, 0))
    layout = gl.NVMMASharedLayout.get_default_for([count, width], gl.float16)
    given = [TensorDescriptor.from_tensor(tensor, [1, width], layout) for tensor in (x, y)]
    module.move_rows[(1,)](*given, sources, targets, column, count, num_warps=4)
    expected = torch.zeros(100, 128)
    inside = sources < 100  # all other rows are read as zeros
    expected[targets[inside].long(), column : column + width] = x[
        sources[inside].long(), column : column + width
    ].float()
    return difference(y, expected.double())


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def scaled(module, kind="e4m3", n=64, k=128) -> float:
    tiles, values = [], []
    for size in (128, n):
        if kind == "e2m1":
            tiles.append(torch.randint(0, 256, (size, k // 2), dtype=torch.uint8))
            values.append(torch.stack([_E2M1[tiles[-1].int() & 15], _E2M1[tiles[-1].int() >> 4]], 2).reshape(size, k))
        else:
            tiles.append(torch.randn(size, k).to(torch.float8_e4m3fn))
            values.append(tiles[-1].float())
    scales = [torch.randint(120, 134, (size, k // 32), dtype=torch.uint8) for size in (128, n)]
    y = torch.zeros(128, n)
    dtype = gl.uint8 if kind == "e2m1" else gl.float8e4nv
    layouts = [gl.NVMMASharedLayout.get_default_for(list(tile.shape), dtype) for tile in tiles]
    given = [
        TensorDescriptor.from_tensor(tile, list(tile.shape), layout)
        for tile, layout in zip(tiles, layouts, strict=True)
    ]
    module.scaled_product[(1,)](*given, *scales, y, kind, num_warps=4)
    a, b = (
        v.double() * (scale.double() - 127).exp2().repeat_interleave(32, 1)
        for v, scale in zip(values, scales, strict=True)
    )
    return difference(y, a @ b.T)


def programs(module, count=5) -> float:
    y = torch.zeros(count, dtype=torch.int32)
    module.take_programs[(count,)](y, num_warps=4)
    return difference(y, torch.ones(count).double())


def pair(module, m=256, n=128, k=64) -> float:
    a, b, c = torch.randn(m, k).half(), torch.randn(k, n).half(), torch.zeros(m, n).half()
    layouts = [
        gl.NVMMASharedLayout.get_default_for(list(x.shape), gl.float16, cga_layout=basis)
        for x, basis in ((a, [(1, 0)]), (b, [(0, 1)]), (c, [(1, 0)]))
    ]
    given = [
        TensorDescriptor.from_tensor(x, list(x.shape), layout) for x, layout in zip((a, b, c), layouts, strict=True)
    ]
    columns = TensorMemoryLayout((m // 2, n), col_stride=1, cga_layout=((1, 0),), two_ctas=True)
    module.pair_product[(1,)](*given, columns, num_warps=4, num_ctas=2)
    return difference(c, a.double() @ b.double())


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


FIRST = {  # where the kernels of each run begin
    "product": "def load_tiles",
    "chain": "def chain_products",
    "rows": "def move_rows",
    "scaled": "def store_scales",
    "programs": "def take_programs",
    "pair": "def pair_product",
}
RUNS = {run.__name__: run for run in (product, chain, rows, scaled, programs, pair)}
RIGHT = (
    *(("product", {"m": m, "n": n, "k": k, "block": block, "stages": stages}) for (m, n, k), block, stages in (
        ((256, 128, 256), (128, 128, 64), 2), ((200, 96, 136), (128, 64, 64), 2), ((64, 256, 64), (64, 256, 32), 2),
        ((128, 128, 512), (128, 128, 64), 4), ((100, 24, 40), (128, 32, 64), 1), ((64, 64, 192), (64, 64, 64), 3))),
    *(("chain", {"blocks": blocks, "n": n, "width": width}) for blocks, n, width in (
        (1, 64, 64), (2, 64, 64), (3, 64, 64), (4, 32, 64), (2, 128, 64), (2, 64, 128), (3, 32, 16), (1, 128, 128))),
    *(("rows", {"count": count, "width": width, "column": column, "first": first}) for count, width, column, first in (
        (8, 64, 0, 0), (32, 64, 0, 0), (32, 64, 32, 0), (64, 32, 96, 0), (16, 64, 64, 50), (32, 16, 0, 60))),
    *(("scaled", {"kind": kind, "n": n, "k": k}) for kind, n, k in (
        ("e4m3", 64, 128), ("e4m3", 32, 256), ("e2m1", 64, 128), ("e2m1", 128, 256), ("e4m3", 128, 128))),
    *(("programs", {"count": count}) for count in (1, 5)),
    *(("pair", {"m": m, "n": n, "k": k}) for m, n, k in ((256, 128, 64), (256, 64, 128), (128, 128, 64))),
)  # fmt: skip


@pytest.mark.parametrize("seed", TIMINGS)
def test_right_kernels_are_right_and_not_reported(seed):
    for run, sizes in RIGHT:
        if run in ("programs", "pair") and (installed_version("triton") or (0,)) < (3, 8):
            continue
        torch.manual_seed(0)
        with gluon_cpu.simulate(seed=seed) as seen:
            assert RUNS[run](kernels, **sizes) < 1e-3, (run, sizes)
        assert seen.ok, (run, sizes)


@pytest.mark.parametrize("shape", [(128, 64), (64, 64), (128, 256)])
def test_a_copy_through_tensor_memory(shape):
    x, y = torch.randn(shape), torch.zeros(shape)
    with gluon_cpu.simulate():
        kernels.through_tensor_memory[(1,)](x, y, *shape, num_warps=4)
    assert torch.equal(x, y)


def test_views_that_share_columns():
    x, y = torch.randn(128, 64), torch.zeros(128, 64)
    with gluon_cpu.simulate():
        kernels.shared_columns[(1,)](x, y, False, num_warps=4)
    assert torch.equal(y, (x / 2).half().float())
    with pytest.raises(gluon_cpu.LayoutError, match="written as fp16"), gluon_cpu.simulate():
        kernels.shared_columns[(1,)](x, y, True, num_warps=4)


def test_a_model_of_b200_has_its_rates():
    # By the data sheets a B200 does twice the products of an H200 per SM and cycle, and has 8 TB/s for 148 SMs, not 4.8 for 132.
    b200, h200 = gluon_cpu.CostModel.of("B200"), gluon_cpu.CostModel.of("H200")
    assert b200.mma_flops == 2 * h200.mma_flops and b200.global_bytes > 1.4 * h200.global_bytes
    assert (h200.mma_flops, round(h200.global_bytes)) == (gluon_cpu.CostModel().mma_flops, 20)
    cycles = []
    for model in (h200, b200):  # copies bound a product of many tiles, and they are faster
        with gluon_cpu.simulate(model=model) as run:
            product(kernels, k=1024)
        cycles += run.cycles
    assert cycles[1] < cycles[0]
    with pytest.raises(ValueError, match="Hopper and Blackwell"):
        gluon_cpu.CostModel.of("A100")


@dataclass(frozen=True)
class Bug:
    """A changed line of a kernel, the kinds of report that may follow, and parts of the lines that they may name, `a|b`."""

    run: str
    name: str
    old: str
    new: str
    kinds: tuple[str, ...]
    line: str
    sizes: dict = field(default_factory=dict)
    since: tuple[int, int] = (3, 7)


MMA = "tcgen05_mma(a_ring"
BUGS = (
    Bug("product", "accumulator read early", "    mbarrier.wait(done, 0)\n", "", ("race",), "acc.load"),
    Bug("product", "done before the products", "    for i in range(tiles):\n        slot = i % STAGES\n        mbarrier.wait(full",
        "    tcgen05_commit(done)\n    for i in range(tiles):\n        slot = i % STAGES\n        mbarrier.wait(full", ("race", "barrier"), "acc.load"),
    Bug("product", "no commit at the end", "        tcgen05_commit(empty.index(slot))\n    tcgen05_commit(done)", "        tcgen05_commit(empty.index(slot))",
        ("deadlock",), "mbarrier.wait(done"),
    Bug("product", "two commits for one slot", "        tcgen05_commit(empty.index(slot))\n", "        tcgen05_commit(empty.index(slot))\n        tcgen05_commit(empty.index(slot))\n",
        ("race", "barrier"), "full.index(slot), a_"),
    Bug("product", "slot refilled before the commit", "        tcgen05_commit(empty.index(slot))", "        mbarrier.arrive(empty.index(slot), count=1)",
        ("race",), "async_load"),
    Bug("product", "slot never freed", "        tcgen05_commit(empty.index(slot))\n", "", ("deadlock",), "mbarrier.wait"),
    Bug("product", "tile read before it has come", "        mbarrier.wait(full.index(slot), (i // STAGES) & 1)\n", "", ("race",), MMA),
    Bug("product", "phase of full off by one", "mbarrier.wait(full.index(slot), (i // STAGES) & 1)", "mbarrier.wait(full.index(slot), ((i // STAGES) & 1) ^ 1)",
        ("race", "barrier", "deadlock", "layout"), MMA),
    Bug("product", "phase of empty off by one", "((i // STAGES) & 1) ^ 1)", "(i // STAGES) & 1)", ("deadlock",), "mbarrier.wait"),
    Bug("product", "bytes of one tile only", "a_desc.block_type.nbytes + b_desc.block_type.nbytes)", "a_desc.block_type.nbytes)", ("barrier",), "async_load(b_desc"),
    Bug("product", "accumulator never set", "use_acc=i > 0", "use_acc=True", ("uninitialized",), MMA),
    Bug("product", "one warp stores", "            (store_tile, (c_desc, c_tile, acc, done)),\n            (multiply_tiles, (rings, acc, full, empty, done, tiles, STAGES)),",
        "            (multiply_tiles, (rings, acc, full, empty, done, tiles, STAGES)),\n            (store_tile, (c_desc, c_tile, acc, done)),",
        ("layout",), "get_tmem_reg_layout"),
    Bug("product", "no fence before the store", "    fence_async_shared()\n    at = ", "    at = ", ("missing fence",), "async_store"),
    Bug("product", "barrier for two commits", "mbarrier.init(done, count=1)", "mbarrier.init(done, count=2)", ("deadlock",), "mbarrier.wait(done"),
    Bug("product", "B is not transposed", ".permute((1, 0))", "", ("layout",), MMA),
    Bug("product", "no order of dimensions", ".permute((1, 0))", ".permute((0, 0))", ("layout",), "permute"),
    Bug("product", "too many columns", "allocate_tensor_memory(gl.float32, c_desc.block_type.shape, columns)",
        "allocate_tensor_memory(gl.float32, [5, *c_desc.block_type.shape], columns).index(0)", ("layout",), "allocate_tensor_memory"),
    Bug("product", "commit before the product", "        tcgen05_mma(a_ring", "        tcgen05_commit(empty.index(slot))\n        tcgen05_mma(a_ring", ("race", "barrier"), "async_load(a_desc"),
    Bug("product", "registers of another layout", "acc.load(registers)", "acc.load(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))", ("layout",), "acc.load"),
    Bug("product", "wait for the store is missing", "    tma.store_wait(0)\n", "", ("unfinished",), "async_store"),
    Bug("product", "done is never waited for by phase", "mbarrier.wait(done, 0)", "mbarrier.wait(done, 1)", ("race", "barrier"), "acc.load"),
    Bug("product", "A of another type", "[STAGES, *a_desc.block_type.shape], a_desc.layout)", "[STAGES, *b_desc.block_type.shape], a_desc.layout)", ("layout",), "async_load(a_desc", {"block": (64, 128, 64)}),
    Bug("product", "full waits for two", "mbarrier.init(full.index(slot), count=1)", "mbarrier.init(full.index(slot), count=2)", ("deadlock",), "mbarrier.wait"),
    Bug("product", "slot outside of the ring", "a_ring.index(slot), b_ring.index(slot).permute", "a_ring.index(slot + 1), b_ring.index(slot).permute", ("race", "out of bounds"), MMA),
    Bug("product", "products in one slot behind", "b_ring.index(slot).permute", "b_ring.index(slot ^ 1).permute", ("race", "uninitialized"), MMA),
    Bug("chain", "P announced before it is stored", "        p.store(gl.convert_layout(x.to(dtype), narrow))\n        mbarrier.arrive(p_full, count=1)",
        "        mbarrier.arrive(p_full, count=1)\n        p.store(gl.convert_layout(x.to(dtype), narrow))", ("race", "layout"), "tcgen05_mma(p"),
    Bug("chain", "P read before it is stored", "        mbarrier.wait(p_full, i & 1)\n", "", ("race", "layout", "barrier"), "scores.load(wide)"),
    Bug("chain", "scores read early", "        mbarrier.wait(s_full, i & 1)\n", "", ("race", "barrier"), "scores.load(wide)"),
    Bug("chain", "phase of the scores", "mbarrier.wait(s_full, i & 1)", "mbarrier.wait(s_full, 0)", ("race", "barrier", "deadlock", "layout"), "scores.load(wide)"),
    Bug("chain", "phase of P", "mbarrier.wait(p_full, i & 1)", "mbarrier.wait(p_full, (i & 1) ^ 1)", ("race", "barrier", "layout"), "scores.load(wide)"),
    Bug("chain", "P never announced", "        mbarrier.arrive(p_full, count=1)\n", "", ("deadlock",), "mbarrier.wait"),
    Bug("chain", "P announced twice", "        mbarrier.arrive(p_full, count=1)\n", "        mbarrier.arrive(p_full, count=2)\n", ("barrier",), "mbarrier.arrive(p_full"),
    Bug("chain", "out read early", "    mbarrier.wait(done, 0)\n    write_matrix(y_ptr, out)", "    write_matrix(y_ptr, out)", ("race", "uninitialized"), "memory.load"),
    Bug("chain", "scores committed before the product", "scores, use_acc=False, mbarriers=[s_full])", "scores, use_acc=False)", ("deadlock",), "mbarrier.wait"),
    Bug("chain", "P of another type", "p = scores._reinterpret(q.dtype, scores.shape", "p = scores._reinterpret(gl.bfloat16, scores.shape", ("layout",), "tcgen05_mma(p"),
    Bug("chain", "P as wide as fp32", "p = scores._reinterpret(dtype, scores.shape, scores.layout)", "p = scores._reinterpret(gl.float32, [128, 2 * scores.shape[1]], scores.layout)", ("layout",), "_reinterpret"),
    Bug("chain", "P stored in the layout of the scores", "gl.convert_layout(x.to(dtype), narrow)", "gl.convert_layout(x.to(dtype), gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))", ("layout",), "p.store"),
    Bug("chain", "the first product adds", "out, use_acc=i > 0)", "out)", ("uninitialized",), "tcgen05_mma(p"),
    Bug("chain", "no commit at the end", "out, use_acc=i > 0)\n    tcgen05_commit(done)", "out, use_acc=i > 0)", ("deadlock",), "mbarrier.wait(done"),
    Bug("chain", "commit before the last product", "        tcgen05_mma(p, values", "        tcgen05_commit(done, pred=i == 1)\n        tcgen05_mma(p, values", ("race", "barrier"), "tcgen05_mma(p"),
    Bug("chain", "two warps for the powers", "        [4, 1],", "        [2, 1],", ("layout",), "get_tmem_reg_layout"),
    Bug("chain", "operands not waited for", "    mbarrier.wait(loaded, 0)\n    scores", "    scores", ("race",), "tcgen05_mma"),
    Bug("chain", "bytes of one block only", "BLOCKS * both)", "both)", ("barrier",), "async_load(k_desc"),
    Bug("chain", "K of another block", "keys.index(i).permute", "keys.index(i + 1).permute", ("out of bounds",), "tcgen05_mma"),
    Bug("chain", "too many columns", "out = allocate_tensor_memory(gl.float32, [128, WIDTH]", "out = allocate_tensor_memory(gl.float32, [128, 8 * WIDTH]", ("layout",), "tcgen05_mma"),
    Bug("rows", "scattered before they came", "    mbarrier.wait(bar, 0)\n    blackwell.tma.async_scatter", "    blackwell.tma.async_scatter", ("race",), "async_scatter"),
    Bug("rows", "bytes of one row", "ROWS * x_desc.block_type.nbytes", "x_desc.block_type.nbytes", ("barrier",), "async_gather"),
    Bug("rows", "bytes never announced", "    mbarrier.expect(bar, ROWS * x_desc.block_type.nbytes)\n", "", ("deadlock", "barrier"), "mbarrier.wait(bar"),
    Bug("rows", "no wait at the end", "column, tile)\n    tma.store_wait(0)", "column, tile)", ("unfinished",), "async_scatter"),
    Bug("rows", "each thread has other rows", "few: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1]", "few: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [1, 32]", ("layout",), "async_gather"),
    Bug("rows", "rows that are too few", "tile = gl.allocate_shared_memory(x_desc.dtype, [ROWS, x", "tile = gl.allocate_shared_memory(x_desc.dtype, [2 * ROWS, x", ("layout",), "async_gather"),
    Bug("rows", "a negative target", "async_scatter(y_desc, targets,", "async_scatter(y_desc, targets - 40,", ("out of bounds",), "async_scatter"),
    Bug("rows", "written by threads, no fence", "    mbarrier.wait(bar, 0)\n    blackwell.tma.async_scatter", "    mbarrier.wait(bar, 0)\n    some: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])\n    tile.store(tile.load(some))\n    blackwell.tma.async_scatter", ("missing fence",), "async_scatter"),
    Bug("scaled", "operands not waited for", "    mbarrier.wait(loaded, 0)\n    tcgen05_mma_scaled", "    tcgen05_mma_scaled", ("race",), "tcgen05_mma_scaled"),
    Bug("scaled", "accumulator read early", "    mbarrier.wait(done, 0)\n    write_matrix(y_ptr, acc)", "    write_matrix(y_ptr, acc)", ("race", "uninitialized"), "memory.load"),
    Bug("scaled", "scales never stored", "    store_scales(b_scales, b_scale)\n", "", ("uninitialized",), "tcgen05_mma_scaled"),
    Bug("scaled", "scales of the other operand", "acc, a_scale, b_scale, KIND", "acc, b_scale, a_scale, KIND", ("layout",), "tcgen05_mma_scaled"),
    Bug("scaled", "another format", "a_scale, b_scale, KIND, KIND", 'a_scale, b_scale, KIND, "e5m2"', ("layout",), "tcgen05_mma_scaled"),
    Bug("scaled", "scales overwritten while they are read", "use_acc=False)\n    tcgen05_commit(done)", "use_acc=False)\n    store_scales(b_scales, b_scale)\n    tcgen05_commit(done)", ("race",), "memory.store"),
    Bug("programs", "answer read early", "        mbarrier.wait(bar, phase)\n        result", "        result", ("race", "uninitialized", "barrier"), "clc.load_result", {}, (3, 8)),
    Bug("programs", "answer never announced", "        mbarrier.expect(bar, 16)\n", "", ("deadlock", "barrier"), "mbarrier.wait(bar", {}, (3, 8)),
    Bug("programs", "phase never turned", "        phase ^= 1\n", "", ("race", "barrier", "deadlock"), "mbarrier.wait(bar|clc.load_result", {}, (3, 8)),
    Bug("pair", "a barrier for each block", "loaded = mbarrier.allocate_mbarrier(two_ctas=True)", "loaded = mbarrier.allocate_mbarrier()", ("race",), "tcgen05_mma", {}, (3, 8)),
    Bug("pair", "accumulator read early", "    mbarrier.wait(done, 0)\n    c.store", "    c.store", ("race", "uninitialized"), "acc.load", {}, (3, 8)),
    Bug("pair", "operands not waited for", "    mbarrier.wait(loaded, 0)\n    tcgen05_mma(a, b, acc", "    tcgen05_mma(a, b, acc", ("race",), "tcgen05_mma", {}, (3, 8)),
)  # fmt: skip


TEXT = Path(kernels.__file__).read_text()


def break_line(bug: Bug):
    """Return a module of the kernels with one change."""
    start = TEXT.index(FIRST[bug.run])
    end = min((TEXT.index(first) for first in FIRST.values() if TEXT.index(first) > start), default=len(TEXT))
    assert TEXT.count(bug.old, start, end) == 1, f"{bug.name}: the kernel has other lines now"
    text = TEXT[:start] + TEXT[start:end].replace(bug.old, bug.new) + TEXT[end:]
    return import_file(write_source(text, f"{bug.run}_{bug.name.replace(' ', '_')}.py"))


def check(bug: Bug, timings) -> None:
    if (installed_version("triton") or (0,)) < bug.since:
        pytest.skip("Triton has this later")
    module = break_line(bug)
    for seed in timings:
        torch.manual_seed(0)
        report = None
        try:
            with gluon_cpu.simulate(seed=seed) as run:
                RUNS[bug.run](module, **bug.sizes)
            report = run.notes[0] if run.notes else None  # a fence that the compiler adds
        except gluon_cpu.SimulationError as error:
            report = error.report
        assert report is not None and report.kind in bug.kinds, (seed, str(report))
        sites = (report.site, *(report.others if report.kind == "deadlock" else ()))
        assert any(line in site.text for site in sites for line in bug.line.split("|")), (seed, str(report))


@pytest.mark.parametrize("bug", BUGS[::7], ids=lambda bug: bug.name)
def test_a_broken_line_is_reported(bug):
    check(bug, TIMINGS[:1])


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_every_broken_line_is_reported_in_four_timings(bug):
    check(bug, TIMINGS)
