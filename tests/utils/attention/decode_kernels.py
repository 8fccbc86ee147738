"""A kernel for the tests of decode: what `work.deal` says."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.decode.work import deal


@gluon.jit
def deal_blocks(out_ptr, lens_ptr, lengths, batch, heads, keys, programs):
    """Store the Split of calls with one new token, over blocks of 128 keys."""
    split = deal(lens_ptr, lengths, batch, heads, keys, 1, 1 << 29, 128, 0, programs)
    gl.store(out_ptr, split.share)
    gl.store(out_ptr + 1, split.extra)
    gl.store(out_ptr + 2, split.grain)
    gl.store(out_ptr + 3, split.beginning)
