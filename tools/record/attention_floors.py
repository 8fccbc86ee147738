"""Time the parts of a block of the forward apart: its products alone and its softmax alone, with one, two and three consumers.

    python -m tools.record.attention_floors --processes 12 --out build/attention_floors.json

A program stays on each SM. Its consumers walk over one block of keys in shared memory, with no loads and no barriers, and compute
nothing that anybody asks for; the SM's clock says how long. Modes: "scores" (Q K^T), "output" (P V, P in registers, as in step 5),
"output, P shared" (P in shared memory, as in FlashAttention 3's full attention at head dim 64), "products" (scores and output), and "softmax"
(maxima, exponentials and sums; without packing P to bf16, which the compiler leaves out where no product follows). In "softmax beside products"
the first consumer has products alone and the others softmax alone: what slows down there, beside the same number alone, is what both
share. A row has the cycles of a block of each consumer: where n consumers share a unit, n times what one block needs of it.
"""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from tools.record.common import Record, arguments_parser
from utils.attention.gluon.plan import Plan
from utils.attention.gluon.shared import accumulator, left_operand, thread_barrier, wait_products
from utils.attention.gluon.softmax import first_softmax, half_softmax, join_rows, split_rows, whole_softmax

MODES = ("scores", "output", "output, P shared", "products", "softmax", "softmax beside products")
# The plans' consumers, and fewer: consumers, head dim, keys of a block, registers, halves.
SHAPES = (
    *((n, 64, 128, 160, False) for n in (1, 2, 3)),
    *((n, 128, 128, 240, True) for n in (1, 2)),
    *((n, 256, 64, 240, True) for n in (1, 2)),
)
POINTS = tuple((shape, mode) for shape in SHAPES for mode in MODES if shape[0] > 1 or "beside" not in mode)
ROUNDS = 400
LONGER = 4  # times as many blocks for products beside softmax, so that they do not end first
_LONGER = gl.constexpr(LONGER)


@gluon.jit
def read_clock(number):
    """The SM's clock; number: anything."""
    return gl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def softmax(s, state, c, HALVES: gl.constexpr):
    """A block's softmax as in `blocks.finish_block`: P in fp32 and the state."""
    if HALVES:
        upper, lower = state
        s0, s1 = split_rows(s)
        top0 = gl.maximum(upper.maximum, gl.max(s0, 2))
        top1 = gl.maximum(lower.maximum, gl.max(s1, 2))
        p0, upper = half_softmax(s0, upper, top0, c, gl.float32, False)
        p1, lower = half_softmax(s1, lower, top1, c, gl.float32, False)
        return gl.convert_layout(join_rows(p0, p1), s.type.layout), (upper, lower)
    else:
        p, rows = whole_softmax(s, state[0], c, gl.float32, False)
        return p, (rows,)


@gluon.jit
def add_scores(q, k, s):
    """Hand Q K^T to the tensor cores, added to s: a product whose result nobody uses would not be computed."""
    return warpgroup_mma(q, k.permute([1, 0]), s, is_async=True)


@gluon.jit
def at_rows_and_columns(pointer, x):
    """Pointers to a matrix behind `pointer`, one for each element of x."""
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    return pointer + rows * x.shape[1] + columns


@gluon.jit
def walk(tiles, clocks, numbers, rounds, c, W: gl.constexpr, PLAN: gl.constexpr, MODE: gl.constexpr):
    """Consumer W: so many blocks of a mode, between two readings of the clock."""
    BLOCK_N: gl.constexpr = PLAN.block_n
    BLOCK_D: gl.constexpr = PLAN.block_d
    q, k, v, p_tiles = tiles
    q = q.index(W)
    p_tile = p_tiles.index(W)
    s = gl.zeros([64, BLOCK_N], gl.float32, accumulator(BLOCK_N))
    s = gl.load(at_rows_and_columns(numbers, s))  # of constants the compiler would know the softmax
    p, state = first_softmax(s, c, q.dtype, PLAN.halves, False)
    p = gl.convert_layout(p, left_operand(BLOCK_D))
    o = gl.zeros([64, BLOCK_D], gl.float32, accumulator(BLOCK_D))
    BESIDE: gl.constexpr = MODE == "softmax beside products"
    if BESIDE and W == 0:
        rounds = rounds * _LONGER
    begin = read_clock(rounds)
    for _ in range(rounds):
        if MODE == "scores":
            s = wait_products(add_scores(q, k, s), 0, BLOCK_N)
        elif MODE == "output":
            o = wait_products(warpgroup_mma(p, v, o, is_async=True), 0, BLOCK_D)
        elif MODE == "output, P shared":
            o = wait_products(warpgroup_mma(p_tile, v, o, is_async=True), 0, BLOCK_D)
        elif MODE == "products" or (BESIDE and W == 0):
            scores = add_scores(q, k, s)
            pv = warpgroup_mma(p, v, o, is_async=True)
            s = wait_products(scores, 1, BLOCK_N)
            o = wait_products(pv, 0, BLOCK_D)
        else:
            # P is the next block's scores: others would be known to the compiler, or need registers of their own.
            s, state = softmax(s, state, c, PLAN.halves)
    gl.store(clocks + gl.program_id(0) * PLAN.consumers + W, read_clock(rounds) - begin)
    # What nobody reads would not be computed.
    gl.store(at_rows_and_columns(numbers, s), s)
    gl.store(at_rows_and_columns(numbers, o), o)
    for part in gl.static_range(len(state)):
        gl.store(numbers, gl.sum(state[part].total))


@gluon.jit
def idle(clocks):
    """In the producer's place, so that registers are shared out as in step 5."""


@gluon.jit
def floors(clocks, numbers, rounds, c, PLAN: gl.constexpr, MODE: gl.constexpr):
    """Tiles of zeros, and then the consumers."""
    CONSUMERS: gl.constexpr = PLAN.consumers
    REGISTERS: gl.constexpr = PLAN.registers
    BLOCK_N: gl.constexpr = PLAN.block_n
    BLOCK_D: gl.constexpr = PLAN.block_d
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    zeros: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q = gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS, 64, BLOCK_D], layout)
    p = gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS, 64, BLOCK_N], layout)
    k = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, BLOCK_D], layout)
    v = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, BLOCK_D], layout)
    k.store(gl.zeros([BLOCK_N, BLOCK_D], gl.bfloat16, zeros))
    v.store(gl.zeros([BLOCK_N, BLOCK_D], gl.bfloat16, zeros))
    for w in gl.static_range(CONSUMERS):
        q.index(w).store(gl.zeros([64, BLOCK_D], gl.bfloat16, zeros))
        p.index(w).store(gl.zeros([64, BLOCK_N], gl.bfloat16, zeros))
    fence_async_shared()  # products read through the async proxy what the threads have written
    thread_barrier()
    tiles = (q, k, v, p)
    if CONSUMERS == 1:
        walk(tiles, clocks, numbers, rounds, c, 0, PLAN, MODE)
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (walk, (tiles, clocks, numbers, rounds, c, 0, PLAN, MODE)),
                (walk, (tiles, clocks, numbers, rounds, c, 1, PLAN, MODE)),
                (idle, (clocks,)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (walk, (tiles, clocks, numbers, rounds, c, 0, PLAN, MODE)),
                (walk, (tiles, clocks, numbers, rounds, c, 1, PLAN, MODE)),
                (walk, (tiles, clocks, numbers, rounds, c, 2, PLAN, MODE)),
                (idle, (clocks,)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 32],
        )


def plan_of_shape(shape: tuple) -> Plan:
    """Return the plan of a shape."""
    consumers, head_dim, block_n, registers, halves = shape
    return Plan(head_dim, block_n, consumers, registers=registers, halves=halves)


def cycles_of(shape: tuple, mode: str, device: str = "cuda", programs: int = 132, rounds: int = ROUNDS) -> list[int]:
    """Run a mode twice; return for each consumer the cycles of all its blocks the second time, the median of the programs."""
    plan = plan_of_shape(shape)
    clocks = torch.zeros((programs, plan.consumers), dtype=torch.int32, device=device)
    for _ in range(2):
        numbers = torch.zeros(64 * max(plan.block_d, plan.block_n), device=device)
        floors[(programs,)](clocks, numbers, rounds, 0.18, PLAN=plan, MODE=mode)
    return (clocks.cpu().to(torch.int64) % (1 << 32)).median(0).values.tolist()


def measure(point: tuple) -> dict:
    """Measure one mode of one shape."""
    shape, mode = point
    row = dict(zip(("consumers", "head_dim", "block_n", "registers", "halves"), shape, strict=True))
    cycles = cycles_of(shape, mode)
    if "beside" in mode:
        cycles[0] /= LONGER
    return row | {"mode": mode, "cycles": [round(x / ROUNDS, 1) for x in cycles]}


def show(row: dict) -> str:
    """Return the line that is printed for a row."""
    return f"{row['head_dim']:<4}{row['consumers']} consumers  {row['mode']:<24}{row['cycles']}"


def compile_point(point: tuple):
    """Compile a mode of a shape for sm_90a, without a GPU."""
    from utils.kernels.offline import compile_gluon, read_assembly

    shape, mode = point
    constants = {"PLAN": plan_of_shape(shape), "MODE": mode}
    signature = {"clocks": "*i32", "numbers": "*fp32", "rounds": "i32", "c": "fp32"}
    return read_assembly(compile_gluon(floors, signature, constants, ("clocks", "numbers")), "floors")


def main() -> int:
    """Measure all modes of all shapes; return the exit status."""
    parser = arguments_parser(__doc__, pairs=1)
    parser.add_argument("--processes", type=int, default=0, help="compile so many kernels side by side beforehand")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: clocks are read on an NVIDIA GPU: torch.cuda.is_available() is False here.", file=sys.stderr)
        return 1
    record = Record(options.out, "cycles of a block's parts, each consumer", "cuda", options.seconds, rounds=ROUNDS)
    print(torch.cuda.get_device_name())
    if options.processes:
        with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(measure, POINTS))  # for the cache on the disk
    complete = record.fill(POINTS, measure, show)
    record.finish() if complete else record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
