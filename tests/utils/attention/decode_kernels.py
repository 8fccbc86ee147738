"""A kernel for the tests of decode: it stores where the blocks of each program begin."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.decode.work import Cache


@gluon.jit
def deal_blocks(out_ptr, lens_ptr, lengths, batch, heads, keys, window, PLAN: gl.constexpr):
    """Store sequence, head, block and number of blocks of each program, for calls with one new token."""
    zero = keys * 0
    cache = Cache(
        lens_ptr, lens_ptr, zero, batch, heads, zero + 1, zero + 1, keys, window, zero, lengths,
        zero + 30, zero, zero, zero, zero.to(gl.float32), PLAN
    )  # fmt: skip
    cursor, count = cache.start()
    out_ptr += 4 * gl.program_id(1)
    gl.store(out_ptr, cursor.b)
    gl.store(out_ptr + 1, cursor.head)
    gl.store(out_ptr + 2, cursor.j)
    gl.store(out_ptr + 3, count)
