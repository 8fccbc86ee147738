"""Parts that the ladder's kernels share: masks, softmax, and single Hopper instructions.

The last query has the position of the last key, so query i has the position i + Sk - Sq. Under a causal mask it sees the keys up to
its position. With a window w, in step 5, it sees the keys that are fewer than w positions away. Scores are in base 2:
softmax(scale * s) = 2^(c * (s - max)) / sum, with c = scale * log2(e). A score then takes one FFMA and one MUFU.EX2.
"""

from __future__ import annotations

import linecache
from typing import dataclass_transform

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin, tensor
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma

from utils.machine import versions

versions.adopt_newest_gluon_names()
# These must not be `gl.constexpr`: its text, an address, would go into Triton's key of a kernel, and each process would compile again.
tma_load = tma.async_load
tma_store = tma.async_store
thread_barrier = gl.barrier


@dataclass_transform()
def aggregate(cls):
    """Make a class one of Gluon's aggregates. If it has no constructor, add one that takes the fields in their order.

    Triton 3.8 adds one, too. Triton's key of a kernel contains the source of all its functions, so the constructor has a source.
    """
    if "__init__" not in vars(cls):
        fields = {
            name: f"gl.constexpr({name})" if kind is gl.constexpr else name
            for name, kind in cls.__annotations__.items()
        }
        lines = [f"def __init__(self, {', '.join(fields)}):\n"]
        lines += [f"    self.{name} = {value}\n" for name, value in fields.items()]
        file = f"<constructor of {cls.__module__}.{cls.__qualname__}>"
        linecache.cache[file] = sum(map(len, lines)), None, lines, file
        names = {"gl": gl, "__name__": cls.__module__}
        exec(compile("".join(lines), file, "exec"), names)
        cls.__init__ = gluon.constexpr_function(names["__init__"])
    return gluon.aggregate(cls)


LN2 = gl.constexpr(0.6931471805599453)
MINUS_INF = gl.constexpr(float("-inf"))


@gluon.constexpr_function
def accumulator(columns, rows=64):
    """Return the layout of a product [rows, columns] in registers, with 64 rows for each warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [rows // 16, 1], [16, columns, 16])


@gluon.constexpr_function
def left_operand(columns, rows=64):
    """Return the layout of P as the left operand, in registers, of a product [rows, columns]."""
    return gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [rows // 16, 1], [16, columns, 16]), 2)


@gluon.jit
def key_blocks(row, ROWS: gl.constexpr, sq, sk, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the number of blocks of keys that the rows row .. row+ROWS-1 may see, and the number of keys that all these rows see.

    The number of blocks is at least one. For a row without keys, this block is all masked, and the output is zeros.
    """
    n, seen = gl.cdiv(sk, BLOCK_N), sk
    if CAUSAL:
        position = row + (sk - sq)
        n = gl.maximum(gl.minimum(n, gl.cdiv(gl.maximum(position + ROWS, 0), BLOCK_N)), 1)
        seen = gl.minimum(position + 1, sk)
    return n, seen


@gluon.jit
def mask_scores(s, row, key, sq, sk, layout: gl.constexpr, CAUSAL: gl.constexpr):
    """Replace the scores [BLOCK_M, BLOCK_N] of rows row.. and keys key.. by minus infinity where a row may not see a key."""
    positions = row + (sk - sq) + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))[:, None]
    keys = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))[None, :]
    keep = keys < sk
    if CAUSAL:
        keep = keep & (keys <= positions)
    return gl.where(keep, s, MINUS_INF)


@gluon.jit
def online_softmax(s, m, total, c):
    """Compute one block of the online softmax; return probabilities, and the new maximum, sum and rescale factor of each row."""
    top = gl.maximum(m, gl.max(s, 1))
    shifted = gl.where(top == MINUS_INF, 0.0, top * c)  # for a row without keys so far: 2^(-inf), not nan
    alpha = gl.exp2(m * c - shifted)
    p = gl.exp2(s * c - shifted[:, None])
    return p, top, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def inverse_and_lse(m, total, c):
    """Return 1 / total and the natural log-sum-exp of the scaled scores. A row without keys gets zero and minus infinity."""
    empty = total == 0.0
    safe = gl.where(empty, 1.0, total)
    return gl.where(empty, 0.0, 1.0 / safe), gl.where(empty, MINUS_INF, (m * c + gl.log2(safe)) * LN2)


@gluon.jit
def start_scores(q, k, DEPTH: gl.constexpr = 0, left=None, start=None):
    """Start the product q @ k^T on the tensor cores, added to `start` or to zero. q has 64 rows for each warpgroup.

    left: the first columns of q, in registers. DEPTH: the product uses this number of columns, 80 or 96; 0 means all columns. Further
    columns of the tiles are zeros, but would take as long as other numbers.
    """
    ROWS: gl.constexpr = q.shape[0]
    COLUMNS: gl.constexpr = k.shape[0]
    if left is None:  # the width of a slice is a power of two: 64 columns, then 16 or 32
        left = q if DEPTH == 0 else q.slice(0, 64, 1)
    FIRST: gl.constexpr = left.shape[1]
    REST: gl.constexpr = (DEPTH if DEPTH > 0 else q.shape[1]) - FIRST
    sums = start if start is not None else gl.zeros([ROWS, COLUMNS], gl.float32, accumulator(COLUMNS, ROWS))
    columns = k.permute([1, 0])
    s = warpgroup_mma(left, columns.slice(0, FIRST, 0), sums, use_acc=start is not None, is_async=True)
    if REST > 0:
        s = warpgroup_mma(q.slice(FIRST, REST, 1), columns.slice(FIRST, REST, 0), s, is_async=True)
    return s


@builtin
def view_sums(accumulator, _semantic=None):
    """Return the registers of a running product as a tensor, for `wait_products`."""
    return tensor(accumulator.handle, getattr(accumulator.type, "tensor_type", accumulator.type))


@gluon.constexpr_function
def _wait_asm(left):
    return f"wgmma.wait_group.sync.aligned {left};"


@gluon.constexpr_function
def _in_place(n, more=""):
    # Constraints of assembly: n outputs, which have the registers of the first n inputs, and n further inputs for each kind in `more`.
    return ",".join(["=f"] * n) + "," + ",".join(str(i) for i in range(n)) + more * n


@gluon.jit
def wait_products(accumulator, LEFT: gl.constexpr, COLUMNS: gl.constexpr):
    """Wait until at most LEFT products run. The accumulator is [64, COLUMNS] and belongs to one warpgroup.

    `warpgroup_mma_wait` does the same, but the compiler puts a barrier across the warpgroup behind it. A warp that reads only its
    rows of the accumulator does not need this barrier.
    """
    registers: gl.constexpr = COLUMNS // 2
    return gl.inline_asm_elementwise(
        _wait_asm(LEFT), _in_place(registers), [view_sums(accumulator)], dtype=gl.float32, is_pure=False, pack=registers
    )


@gluon.jit
def uniform(x):
    """Return the value of lane 0. It tells the compiler that a loaded scalar is the same in all lanes."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _barrier_asm(kind, threads):
    return f"bar.{kind} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def meet(number, THREADS: gl.constexpr):
    """Wait at a named barrier until THREADS threads have arrived there, by `meet` or `pass_by`."""
    gl.inline_asm_elementwise(_barrier_asm("sync", THREADS), "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_by(number, THREADS: gl.constexpr):
    """Arrive at a named barrier without waiting there."""
    gl.inline_asm_elementwise(_barrier_asm("arrive", THREADS), "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _rescale_asm(n):
    # In the accumulator of m64, two registers of row r and two registers of row r + 8 alternate. If all factors of a warp are one,
    # it skips all multiplications.
    factor = [f"${2 * n + i}" for i in range(n)]
    lines = [
        "{",
        ".reg .pred p, q;",
        f"setp.neu.f32 p, {factor[0]}, 0f3F800000;",
        f"setp.neu.f32 q, {factor[2]}, 0f3F800000;",
        "or.pred p, p, q;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra done;",
        *[f"mul.f32 ${i}, ${i}, {factor[i]};" for i in range(n)],
        "done:",
        "}",
    ]
    return " ".join(lines)


@gluon.jit
def rescale(o, factor):
    """Multiply o by factor, both [64, D]. A warp skips the multiplication if all its sixteen rows have the factor one."""
    registers: gl.constexpr = o.shape[1] // 2
    return gl.inline_asm_elementwise(
        _rescale_asm(registers),
        _in_place(registers, ",f"),
        [o, factor],
        dtype=gl.float32,
        is_pure=False,
        pack=registers,
    )


@gluon.constexpr_function
def _keep_asm(n, other):
    # Thread l of a quad holds the columns 2 l and 2 l + 1 of each group of eight: two registers of row r, two registers of row r + 8.
    # From $2n on, the inputs are the first column that a row keeps, and then the column behind the last one that it keeps. For
    # both, the code counts how many columns of this thread come before them. Both counts give a mask with a bit for each column of
    # the thread. From this mask, ptxas moves eight bits at a time into predicates (R2P).
    lines = ["{", ".reg .pred p;", ".reg .b32 c, first, behind, bits, t;"]
    lines += ["mov.u32 c, %laneid;", "and.b32 c, c, 3;", "shl.b32 c, c, 1;"]
    for row in (0, 2):
        for i, limit in enumerate(("first", "behind")):
            lines += [f"sub.s32 {limit}, ${(2 + i) * n + row}, c;", f"and.b32 t, {limit}, 7;", "min.u32 t, t, 2;"]
            lines += [f"shr.s32 {limit}, {limit}, 3;", f"shl.b32 {limit}, {limit}, 1;", f"add.s32 {limit}, {limit}, t;"]
            lines += [f"max.s32 {limit}, {limit}, 0;"]
        lines += ["bmsk.clamp.b32 bits, 0, behind;", "shl.b32 t, -1, first;", "and.b32 bits, bits, t;"]
        for bit in range(n // 2):
            register = bit // 2 * 4 + row + bit % 2
            lines += [f"and.b32 t, bits, {1 << bit};", "setp.ne.u32 p, t, 0;"]
            lines.append(f"selp.f32 ${register}, ${register}, {other}, p;")
    return " ".join([*lines, "}"])


@gluon.jit
def _replace_columns(x, first, behind, OTHER: gl.constexpr):
    """Replace the numbers [64, N], N at most 128, by OTHER, except in the columns first <= j < behind of each row."""
    gl.static_assert(x.shape[1] <= 128)
    registers: gl.constexpr = x.shape[1] // 2
    return gl.inline_asm_elementwise(
        _keep_asm(registers, OTHER),
        _in_place(registers, ",r,r"),
        [x, gl.broadcast(first[:, None], x)[0], gl.broadcast(behind[:, None], x)[0]],
        dtype=gl.float32,
        is_pure=True,
        pack=registers,
    )


@gluon.jit
def keep_columns(s, first, behind):
    """Replace the scores [64, N] by minus infinity, except in the columns first <= j < behind of each row.

    For comparisons of tensors, ptxas would compare before it has the scores, store the results in registers, and compare again: five
    instructions for a score. The assembly here takes 1.2 instructions for a score.
    """
    return _replace_columns(s, first, behind, "0fFF800000")


@gluon.jit
def zero_columns(p, first, behind):
    """Replace the numbers [64, N] by zero, except in the columns first <= j < behind of each row."""
    return _replace_columns(p, first, behind, "0f00000000")
