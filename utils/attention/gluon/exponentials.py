"""2^x of a tile, some of its numbers without the exponential unit, which is the slowest unit of a softmax.

A Hopper SM has 16 results a cycle of its exponential unit and 128 of its multipliers. A warp's exponentials take 8 cycles
of the unit each and one issue slot; a polynomial takes eight issue slots of other units. Where a softmax waits for the
unit while issue slots are free, some of the exponentials are faster as a polynomial: with two warps on a scheduler, 64
exponentials each, and 300 other instructions, one of four. The idea is FlashAttention 4's, which needs it on Blackwell.

    2^x = 2^n * 2^f,  n = floor(x),  f in [0, 1)      2^f = 1 + f (C1 + f (C2 + f C3)), within 8.6e-5 of it

n is added to the exponent's bits. The error is 1/22 of a rounding to bf16 and 1/6 of one to fp16, at most.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# In fp32: 0.695117, 0.227645, 0.077067, the least relative error on [0, 1) with a constant term of 1; 1.5 * 2^23; -127.
_C1, _C2, _C3, _ROUND, _LEAST = "0f3F31F32D", "0f3E691BB9", "0f3D9DD568", "0f4B400000", "0fC2FE0000"


@gluon.constexpr_function
def _exp2_asm(n, by_polynomial):
    # Registers are taken evenly, the last of each group. Below -127 the result is 0, and a nan becomes the greatest number.
    chosen = {(i + 1) * n // by_polynomial - 1 for i in range(by_polynomial)}
    lines = ["{", ".reg .f32 x, y, f;", ".reg .b32 a, b;"]
    for i in range(n):
        if i not in chosen:
            lines.append(f"ex2.approx.ftz.f32 ${i}, ${n + i};")
            continue
        lines += [
            f"max.NaN.f32 x, ${n + i}, {_LEAST};",
            f"add.rm.f32 y, x, {_ROUND};",
            f"sub.f32 f, y, {_ROUND};",
            "sub.f32 f, x, f;",
            "mov.b32 a, y;",
            f"fma.rn.f32 y, f, {_C3}, {_C2};",
            f"fma.rn.f32 y, y, f, {_C1};",
            "fma.rn.f32 y, y, f, 0f3F800000;",
            "mov.b32 b, y;",
            "shl.b32 a, a, 23;",
            "add.s32 b, b, a;",
            f"mov.b32 ${i}, b;",
        ]
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def _exp2_constraints(n):
    return ",".join(["=f"] * n + ["f"] * n)


@gluon.jit
def exp2(x, BY_POLYNOMIAL: gl.constexpr):
    """2^x, of each eight registers BY_POLYNOMIAL without the exponential unit (0 to 4)."""
    if BY_POLYNOMIAL == 0:
        return gl.exp2(x)
    else:
        return gl.inline_asm_elementwise(
            _exp2_asm(8, BY_POLYNOMIAL), _exp2_constraints(8), [x], dtype=gl.float32, is_pure=True, pack=8
        )
