"""Inline assembly: the few idioms that the course's kernels use, understood; anything else is refused by name."""

from __future__ import annotations

import re

from . import context
from .known import known
from .products import Accumulator, settled, wait_products
from .tensors import Tensor


@known()
def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    """gl.inline_asm_elementwise.

    `wgmma.wait_group` waits; `shfl.sync.idx` from lane 0 of a scalar is that scalar; a body whose only results are
    `mul.f32 $i, $i, factor` under a vote that skips factors of one is a multiplication.
    """
    args = list(args)
    text = " ".join(str(asm).split())
    wait = re.fullmatch(r"wgmma\.wait_group\.sync\.aligned (\d+);", text)
    if wait:
        context.program().reschedule()
        wait_products(int(wait[1]))
        return settled(args[0])
    if (
        re.fullmatch(r"shfl\.sync\.idx\.b32 \$0, \$1, 0, 31, 0xffffffff;", text)
        and isinstance(args[0], Tensor)
        and not args[0].shape
        and not isinstance(args[0], Accumulator)
    ):
        return args[0]
    results = re.findall(r"(\w[\w.]*) (\$\d+), (\$\d+), (\$\d+);", text)
    if len(args) == 2 and results and all(op == "mul.f32" for op, *_ in results):
        products = re.fullmatch(
            r"\{ \.reg \.pred p, q; setp\.neu\.f32 p, (\$\d+), 0f3F800000; setp\.neu\.f32 q, (\$\d+), 0f3F800000; "
            r"or\.pred p, p, q; vote\.sync\.any\.pred p, p, 0xffffffff; @!p bra done; "
            r"(?:mul\.f32 \$\d+, \$\d+, \$\d+; )+done: \}",
            text,
        )
        n = len(results)
        in_place = all(
            (out, left, right) == (f"${i}", f"${i}", f"${2 * n + i}") for i, (_, out, left, right) in enumerate(results)
        )
        if products and in_place and pack == n:
            return args[0] * args[1]
    context.refuse("unknown operation", f"gluon_cpu does not know this inline assembly: {text[:120]}")
