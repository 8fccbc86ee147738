"""The inline assembly that the attention kernels generate is what the simulator knows; anything else it refuses."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="gluon_cpu needs Triton for the language; there are wheels for Linux only")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from utils import gluon_cpu
from utils.attention.gluon.backward.step6_one_consumer import exp2
from utils.attention.gluon.shared import (
    _keep_asm,
    keep_columns,
    meet,
    pass_by,
    rescale,
    uniform,
    wait_products,
    zero_columns,
)


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
def between(y_ptr, first_ptr, behind_ptr, COLUMNS: gl.constexpr, replace: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    at = y_ptr + rows[:, None] * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    gl.store(at, replace(gl.load(at), gl.load(first_ptr + rows), gl.load(behind_ptr + rows)))


@gluon.jit
def powers(y_ptr, x_ptr, ROWS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, 64, 16])
    at = (
        gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None] * 64
        + gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    )
    y = exp2(gl.load(x_ptr + at))
    gl.store(y_ptr + at, y)


@gluon.jit
def write_and_tell(tile, ROUNDS: gl.constexpr, NUMBER: gl.constexpr):
    for i in range(ROUNDS):
        meet(9 + i * 0, 160)  # the last round's values have been read
        tile.store(gl.full([128], i, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
        pass_by(NUMBER + i * 0, 160)


@gluon.jit
def hear_and_read(y_ptr, tile, ROUNDS: gl.constexpr, THREADS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    for i in range(ROUNDS):
        pass_by(9 + i * 0, 160)
        meet(10 + i * 0, THREADS)
        gl.store(y_ptr + i * 128 + gl.arange(0, 128, layout), tile.load(layout))


@gluon.jit
def named_barriers(y_ptr, ROUNDS: gl.constexpr, NUMBER: gl.constexpr, THREADS: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize(
        [(write_and_tell, (tile, ROUNDS, NUMBER)), (hear_and_read, (y_ptr, tile, ROUNDS, THREADS))], [1], [24]
    )


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


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize(("replace", "other"), [(keep_columns, -torch.inf), (zero_columns, 0.0)])
def test_columns_outside_of_two_limits_are_replaced(columns, replace, other):
    first = torch.randint(-20, columns + 20, (64,), dtype=torch.int32)
    behind = torch.randint(-20, columns + 20, (64,), dtype=torch.int32)
    x = torch.full((64, columns), torch.inf)
    y = x.clone()
    with gluon_cpu.simulate() as run:
        between[(1,)](y, first, behind, columns, replace)
    number = torch.arange(columns)[None]
    keep = (number < behind[:, None]) & (number >= first[:, None])
    assert run.ok and torch.equal(y, torch.where(keep, x, other))


@pytest.mark.parametrize("columns", [64, 128])
def test_a_mask_by_columns_keeps_the_bits_of_the_columns_between_its_limits(columns):
    """Run the text instruction by instruction here: the simulator only knows what it does as a whole."""
    n, word = columns // 2, 0xFFFFFFFF
    operations = {
        "sub": lambda a, b: a - b,
        "add": lambda a, b: a + b,
        "and": lambda a, b: a & b,
        "min": lambda a, b: min(a & word, b),
        "max": max,
        "shr": lambda a, b: a >> b,
        "shl": lambda a, b: ((a << b if b < 32 else 0) + 2**31 & word) - 2**31,
        "bmsk": lambda a, b: (1 << min(b, 32)) - 1 << a,
    }
    body = (
        _keep_asm.fn(n, "other").removeprefix("{ .reg .pred p; .reg .b32 c, first, behind, bits, t;").removesuffix("}")
    )
    for first, behind in itertools.product(range(-9, columns + 20, 5), range(-11, columns + 20, 3)):
        for lane in range(4):
            values = {f"${i}": True for i in range(n)} | {"%laneid": 28 + lane}
            # Operands: n outputs, n inputs in the same registers, n times each limit.
            values |= {f"${2 * n + i}": first for i in range(n)} | {f"${3 * n + i}": behind for i in range(n)}
            read = lambda name: values[name] if name in values else int(name)  # noqa: B023,E731
            for line in body.split(";")[:-1]:
                name, target, *given = line.replace(",", " ").split()
                operation = name.split(".")[0]
                if operation == "selp":
                    values[target] = values[target] and values["p"]
                elif operation == "mov":
                    values[target] = read(given[0])
                else:
                    values[target] = (
                        read(given[0]) != 0 if operation == "setp" else operations[operation](*map(read, given))
                    )
            kept = [8 * (i // 4) + 2 * lane + i % 2 for i in range(n) if values[f"${i}"] and i % 4 < 2]
            assert kept == [8 * (i // 4) + 2 * lane + i % 2 for i in range(n) if values[f"${i}"] and i % 4 > 1]
            expected = [j for j in range(max(first, 0), min(behind, columns)) if j % 8 // 2 == lane]
            assert kept == expected, (first, behind, lane)


@pytest.mark.parametrize("rows", [64, 128])
def test_some_powers_are_polynomials(rows):
    x = torch.linspace(-30, 1, rows * 64).reshape(rows, 64)
    x[1] = torch.linspace(-200, 120, 64)
    x[9] = -torch.inf
    y = torch.empty_like(x)
    with gluon_cpu.simulate() as run:
        powers[(1,)](y, x, rows, num_warps=rows // 16)
    assert run.ok
    expected = torch.exp2(x.double())
    error = (y - expected).abs() / expected.clamp_min(1e-30)  # below 2^-126 there are fewer bits
    assert error.max() < 9e-5 and not y[9].any()
    share = (error > 1e-6).double().mean().item()
    assert 0.2 <= share <= 0.25


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_named_barriers_order_what_two_partitions_do(seed):
    y = torch.zeros(5, 128, dtype=torch.int32)
    with gluon_cpu.simulate(seed=seed) as run:
        named_barriers[(1,)](y, 5, 10, 160)
    assert run.ok and torch.equal(y, torch.arange(5, dtype=torch.int32)[:, None].expand(5, 128))


@pytest.mark.parametrize(("number", "threads", "words"), [(11, 160, "Nobody can go on"), (10, 192, "10 was for")])
def test_a_named_barrier_has_one_number_and_one_count_of_threads(number, threads, words):
    with pytest.raises(gluon_cpu.SimulationError, match=words), gluon_cpu.simulate():
        named_barriers[(1,)](torch.zeros(5, 128, dtype=torch.int32), 5, number, threads)


def test_without_the_wait_the_product_is_not_there_yet():
    with pytest.raises(gluon_cpu.RaceError), gluon_cpu.simulate():
        idioms[(1,)](torch.zeros(64, 64), torch.tensor([3], dtype=torch.int32), 64, False)


@pytest.mark.parametrize("asm", ["add.f32 $0, $0, $2;", "mul.f32 $0, $0, $2;", "wgmma.wait_group.sync.aligned;"])
def test_other_assembly_is_refused(asm):
    with pytest.raises(gluon_cpu.UnknownOperationError, match="inline assembly"), gluon_cpu.simulate():
        other_assembly[(1,)](torch.zeros(1), asm)
