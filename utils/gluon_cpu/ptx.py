"""Inline assembly: the simulator knows the idioms of `utils/attention/gluon`, and refuses all other texts.

test_gluon_ptx.py runs those functions in the simulator, so that both sides must change together.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gl

from . import context
from .barriers import MBarrier, spend_barrier, wait
from .context import Block, refuse
from .known import known
from .products import finished_tensor, wait_products
from .reports import Site
from .tensors import Tensor, to_tensor

_E4M3_TO_FP16 = (
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float16).numpy()  # indexed by the bits


class NamedBarrier(MBarrier):
    """One of the sixteen numbered barriers of a block, which need no shared memory.

    A round ends when `count` threads have arrived. A thread may also arrive without a wait (bar.arrive).
    """

    def __init__(self, number: int, threads: int, site: Site, block: Block):
        self.number, self.count, self.site, self.block, self.shared = number, threads, site, block.index, False
        self._start(("named barrier", number, 0, block.index), threads)

    @property
    def name(self) -> str:
        """The name of the barrier in reports."""
        return f"named barrier {self.number}"

    def check_visible(self, block: Block) -> None:
        """Accept every use: a named barrier needs no initialization."""


def come_to_named_barrier(number: int, threads: int, waits: bool) -> None:
    """Let the threads of the running partition arrive at a named barrier, and with `waits` wait for the end of the round."""
    program = context.program()
    p = program.partition
    if program.num_ctas > 1:
        refuse("unknown operation", "gluon_cpu knows named barriers in kernels without clusters only.")
    if not 0 <= number < 16:
        refuse("kernel", f"A block has the named barriers 0 to 15; got {number}.")
    program.reschedule()
    block = p.blocks[0]
    if number not in program.named_barriers:
        program.named_barriers[number] = NamedBarrier(number, threads, context.site(), block)
    barrier = program.named_barriers[number]
    if barrier.count != threads:
        refuse("kernel", f"{barrier.name} was for {barrier.count} threads ({barrier.site}), and is now for {threads}.")
    parity = barrier.phase & 1
    barrier.arrive(32 * p.num_warps, "bar.sync" if waits else "bar.arrive", block)
    if waits:
        wait(barrier, parity, block)
    else:
        spend_barrier(barrier.name)


@known()
def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    """Run `gl.inline_asm_elementwise` if its text is known.

    The idioms are: a wait for products, unchanged numbers, a product, a mask by columns, four e4m3 numbers as fp16, named
    barriers, short arithmetic, and the early start of launches, which does nothing here.
    """
    idiom, found = _idiom(str(asm), pack, len(args))
    if idiom == "nothing":
        return Tensor(0, gl.int32)
    if idiom == "named barrier":
        kind, threads = found
        come_to_named_barrier(int(to_tensor(args[0]).data), int(threads), kind == "sync")
        return Tensor(0, gl.int32)
    if idiom == "wait":
        context.program().reschedule()
        wait_products(int(found))
        return finished_tensor(args[0])
    if idiom == "itself" and type(args[0]) is Tensor and (found or not args[0].shape):
        return args[0]
    if idiom == "product":
        return args[0] * args[1]
    if idiom == "columns":
        columns, (numbers, first, behind) = np.arange(args[0].data.shape[-1]), args
        keep = (columns >= first.data) & (columns < behind.data)
        return Tensor(np.where(keep, numbers.data, found), gl.float32, numbers.layout)
    if idiom == "e4m3" and args[0].dtype.name == "uint8":
        return Tensor(_E4M3[args[0].data], gl.float16, args[0].layout)
    if idiom == "numbers":
        return _run_numbers(found, args[0], pack)
    refuse("unknown operation", f"gluon_cpu does not know this inline assembly: {' '.join(str(asm).split())[:120]}")


@functools.cache
def _idiom(asm: str, pack: int, count: int) -> tuple[str, Any]:
    """Return the idiom of a text with `count` arguments, and the values in the text; "" for an unknown text."""
    text = " ".join(asm.split())
    if re.fullmatch(r"((griddepcontrol\.\w+;|\{.*@p trap; \}) )?mov\.u32 \$0, 0;( // [\w $]+)?", text):
        return "nothing", None
    if named := re.fullmatch(r"bar\.(sync|arrive) \$1, (\d+); mov\.u32 \$0, 0;", text):
        return "named barrier", named.groups()
    if wait := re.fullmatch(r"wgmma\.wait_group\.sync\.aligned (\d+);", text):
        return "wait", wait[1]
    if text in ("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", _ADD_ZERO, _SUMS, "mov.f32 $0, $1;"):
        return "itself", ".f32" in text  # a scalar is the same in every lane
    if count == 2 and text == _product_text(pack):
        return "product", None
    for other, value in (("0f00000000", 0.0), ("0fFF800000", -np.inf)):
        if count == 3 and text == _kept_text(pack, other):
            return "columns", np.float32(value)
    if text == _E4M3_TO_FP16 and pack == 4:
        return "e4m3", None
    return ("numbers", text) if count == 1 and _BLOCK.fullmatch(text) else ("", None)


_ADD_ZERO = "{ .reg .b32 t; mov.u32 t, %laneid; shr.u32 t, t, 5; add.u32 $0, $1, t; }"  # a lane's number is below 32
_SUMS = "{ .reg .pred p; mov.f32 $0, $1; on: setp.lt.f32 p, $0, 0f00000000; @p abs.f32 $0, $0; @p bra on; }"


def _product_text(n: int) -> str:
    """Return the text that multiplies n registers by n factors, unless all factors of the warp are 1.

    The registers alternate between two rows, and the factors 0 and 2 belong to these rows.
    """
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.f32 q, ${2 * n + 2}, 0f3F800000; "
        f"or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra done; {products} done: }}"
    )


def _kept_text(n: int, other: str) -> str:
    """Return the text that keeps registers with columns from a row's first limit up to its second, and sets others to `other`.

    Registers and limits lie as in `_product_text`. A thread has two neighbouring columns of every eight, and a bit for each.
    """
    text = "{ .reg .pred p; .reg .b32 c, first, behind, bits, t; mov.u32 c, %laneid; and.b32 c, c, 3; shl.b32 c, c, 1;"
    for row in (0, 2):
        for limit, register in (("first", 2 * n + row), ("behind", 3 * n + row)):
            text += f" sub.s32 {limit}, ${register}, c; and.b32 t, {limit}, 7; min.u32 t, t, 2;"
            text += f" shr.s32 {limit}, {limit}, 3; shl.b32 {limit}, {limit}, 1; add.s32 {limit}, {limit}, t;"
            text += f" max.s32 {limit}, {limit}, 0;"
        text += " bmsk.clamp.b32 bits, 0, behind; shl.b32 t, -1, first; and.b32 bits, bits, t;"
        for bit, i in enumerate(i for i in range(n) if i % 4 // 2 == row // 2):
            text += f" and.b32 t, bits, {1 << bit}; setp.ne.u32 p, t, 0; selp.f32 ${i}, ${i}, {other}, p;"
    return text + " }"


# ---- numbers from numbers: a few instructions, in fp32 ------------------------------------------------------------

_BLOCK = re.compile(r"\{ (?:\.reg \.(?:f32|b32) [a-z, ]+; )+((?:ex2|max|add|sub|mov|fma|shl)[^{}]*;) \}")


def _floor_sum(x, y):
    # add.rm.f32 rounds the exact sum down. The sum of two fp32 numbers is exact in fp64 if their sizes are similar.
    exact = x.astype(np.float64) + y.astype(np.float64)
    near = exact.astype(np.float32)
    return np.where(near.astype(np.float64) > exact, np.nextafter(near, np.float32("-inf")), near)


def _flushed(x):
    return np.where(np.abs(x) < np.float32(2.0**-126), np.float32(0), x)


_OPERATIONS = {
    "ex2.approx.ftz.f32": lambda x: _flushed(np.exp2(x)),
    "max.NaN.f32": np.maximum,
    "add.rm.f32": _floor_sum,
    "sub.f32": np.subtract,
    "mov.b32": lambda x: x,
    "fma.rn.f32": lambda x, y, z: (x.astype(np.float64) * y + z).astype(np.float32),
    "shl.b32": lambda x, y: (x.view(np.uint32) << np.uint32(y)).view(np.float32),
    "add.s32": lambda x, y: (x.view(np.uint32) + y.view(np.uint32)).view(np.float32),
}


def _run_numbers(text: str, x: Tensor, pack: int) -> Tensor:
    """Run a block of such instructions on a product [rows, columns]; the block gets `pack` registers at a time.

    In each tile of sixteen rows and columns, register 2 h + 4 b + p holds rows from 8 h on and columns from 8 b on, where p
    tells two neighbouring columns apart.
    """
    if pack != 8 or x.data.ndim != 2 or x.dtype.name != "fp32":
        refuse("unknown operation", f"gluon_cpu does not know this inline assembly with pack={pack}: {text[:120]}")
    rows, columns = (np.arange(n) for n in x.data.shape)
    register = (rows % 16 // 8 * 2)[:, None] + (columns % 16 // 8 * 4 + columns % 2)[None, :]
    out = np.empty_like(x.data)
    values = {f"${pack + i}": x.data[register == i] for i in range(pack)}

    def read(name: str):
        if name.startswith("0f"):
            return np.full(values["$8"].shape, np.uint32(int(name[2:], 16)).view(np.float32))
        return values[name] if not name.isdigit() else int(name)

    with np.errstate(all="ignore"):
        for line in _BLOCK.sub(r"\1", text).strip("; ").split("; "):
            operation, _, names = line.partition(" ")
            if operation not in _OPERATIONS:
                refuse("unknown operation", f"gluon_cpu does not know {operation} in inline assembly: {line}")
            target, *sources = names.split(", ")
            values[target] = _OPERATIONS[operation](*(read(name) for name in sources))
    for i in range(pack):
        out[register == i] = values[f"${i}"]
    return Tensor(out, x.dtype, x.layout)
