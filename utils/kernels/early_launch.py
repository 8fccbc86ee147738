"""Kernels of one stream whose launches overlap: the next one begins while this one ends (programmatic dependent launch).

The next kernel has to be launched so (`launch_pdl=True`); otherwise neither function has an effect.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def instruct(PTX: gl.constexpr):
    """Put these words into the PTX, which leave a number."""
    return gl.inline_asm_elementwise(PTX, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_launch_begin():
    """Let blocks of the stream's next kernel start where SMs are free; they still wait for this one's end."""
    instruct("griddepcontrol.launch_dependents; mov.u32 $0, 0;")


@gluon.jit
def wait_for_launch_before():
    """Wait until the stream's kernel before this one has ended, and all that it stored can be read."""
    instruct("griddepcontrol.wait; mov.u32 $0, 0;")
