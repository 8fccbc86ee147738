"""Inline assembly: the simulator knows the idioms of `utils/attention/gluon`, and refuses all else.

test_gluon_ptx.py runs the functions there through the simulator, so that neither side changes alone.
"""

from __future__ import annotations

import re

import numpy as np
import torch
from triton.experimental.gluon import language as gl

from . import context
from .barriers import come_to_named_barrier
from .context import refuse
from .known import known
from .products import Accumulator, finished_tensor, wait_products
from .ptx_numbers import computes_numbers, run_numbers
from .tensors import Tensor, to_tensor

_E4M3_TO_FP16 = (
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float16).numpy()  # by their bits


@known()
def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    """Run `gl.inline_asm_elementwise` if its text is known.

    A wait for products, a broadcast from lane 0, a scalar plus zero, a product, a mask by columns, four e4m3 numbers as fp16; a
    prefetch by TMA; named barriers; and what lets a launch begin before the last one has ended, which says nothing here, where
    launches run one after another.
    """
    args = list(args)
    text = " ".join(str(asm).split())
    if re.fullmatch(_PREFETCH_TILE, text):
        return Tensor(0, gl.int32)
    if re.fullmatch(r"griddepcontrol\.(wait|launch_dependents); mov\.u32 \$0, 0;", text):
        return Tensor(0, gl.int32)
    named = re.fullmatch(r"bar\.(sync|arrive) \$1, (\d+); mov\.u32 \$0, 0;", text)
    if named:
        come_to_named_barrier(int(to_tensor(args[0]).data), int(named[2]), named[1] == "sync")
        return Tensor(0, gl.int32)
    wait = re.fullmatch(r"wgmma\.wait_group\.sync\.aligned (\d+);", text)
    if wait:
        context.program().reschedule()
        wait_products(int(wait[1]))
        return finished_tensor(args[0])
    is_scalar = isinstance(args[0], Tensor) and not isinstance(args[0], Accumulator) and not args[0].shape
    if text == "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;" and is_scalar:
        return args[0]  # a scalar is the same in every lane
    if text == _ADD_ZERO and is_scalar:
        return args[0]
    if len(args) == 2 and text == _product_text(pack):
        return args[0] * args[1]
    kept = re.fullmatch(r"\{ \.reg \.pred p; \.reg \.b32 c, first, last; .* (0f00000000|0fFF800000), p; \}", text)
    if kept:
        limits = _kept_limits(text, pack, kept[1], len(args))
        columns = np.arange(args[0].data.shape[-1])
        keep = np.full(args[0].data.shape, True)
        for name, limit in zip(limits, args[1:], strict=True):
            keep &= columns < limit.data if name == "last" else columns >= limit.data
        other = np.float32("-inf") if kept[1] == "0fFF800000" else np.float32(0)
        return Tensor(np.where(keep, args[0].data, other), gl.float32, args[0].layout)
    if text == _E4M3_TO_FP16 and pack == 4 and args[0].dtype.name == "uint8":
        return Tensor(_E4M3[args[0].data], gl.float16, args[0].layout)
    if len(args) == 1 and computes_numbers(text):
        return run_numbers(text, args[0], pack)
    refuse("unknown operation", f"gluon_cpu does not know this inline assembly: {text[:120]}")


_PREFETCH_TILE = (
    r"\{ \.reg \.b64 map; \.reg \.pred first; elect\.sync _\|first, 0xffffffff; mov\.b64 map, \w+_param_0; "
    r"cvta\.param\.u64 map, map; "
    r"@first cp\.async\.bulk\.prefetch\.tensor\.4d\.L2\.global\.tile \[map, \{\$1, \$2, \$3, \$4\}\]; mov\.u32 \$0, 0; \}"
)
_ADD_ZERO = "{ .reg .b32 t; mov.u32 t, %laneid; shr.u32 t, t, 5; add.u32 $0, $1, t; }"  # a lane's number is below 32


def _product_text(n: int) -> str:
    """The text that multiplies n registers by n factors, unless a vote says that all factors of the warp are 1.

    The registers alternate between two rows, so the factors number 0 and 2 are those of both rows.
    """
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.f32 q, ${2 * n + 2}, 0f3F800000; "
        f"or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra done; {products} done: }}"
    )


_LIMITS = {  # what each limit of a mask by columns compares, and with how many others before it
    ("last",): ["setp.gt.s32 p, last, {};"],
    ("first",): ["setp.le.s32 p, first, {};"],
    ("last", "first"): ["setp.gt.s32 p, last, {};", "setp.le.and.s32 p, first, {}, p;"],
}


def _kept_text(n: int, limits: tuple[str, ...], other: str) -> str:
    """The text that keeps of n registers those whose column is below a limit (last), not below one (first), or both.

    Registers and limits lie as in `_product_text`; a thread has two neighbouring columns of every eight.
    """
    text = "{ .reg .pred p; .reg .b32 c, first, last; mov.u32 c, %laneid; and.b32 c, c, 3; shl.b32 c, c, 1;"
    for row in (0, 2):
        for i, name in enumerate(limits):
            text += f" sub.s32 {name}, ${(2 + i) * n + row}, c;"
        for register in range(row, n, 4):
            for i in (register, register + 1):
                for test in _LIMITS[limits]:
                    text += " " + test.format(i // 4 * 8 + i % 2)
                text += f" selp.f32 ${i}, ${i}, {other}, p;"
    return text + " }"


def _kept_limits(text: str, n: int, other: str, count: int) -> tuple[str, ...]:
    """Return which limits a mask by columns has, in the order of its arguments; refuse any other text."""
    for limits in _LIMITS:
        if len(limits) == count - 1 and text == _kept_text(n, limits, other):
            return limits
    refuse("unknown operation", f"gluon_cpu does not know this mask by columns: {text[:120]}")
