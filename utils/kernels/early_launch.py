"""Let the next kernel of a stream begin while this kernel ends (programmatic dependent launch).

The next kernel must be launched with `launch_pdl=True`; otherwise neither function has an effect.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def instruct(PTX: gl.constexpr):
    """Put instructions into the PTX; they write a number that nobody reads."""
    return gl.inline_asm_elementwise(PTX, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_launch_begin():
    """Let blocks of the next kernel start on free SMs; in it `wait_for_launch_before` waits for the end of this kernel."""
    instruct("griddepcontrol.launch_dependents; mov.u32 $0, 0;")


@gluon.jit
def wait_for_launch_before():
    """Wait until the kernel before has ended and its stores can be read; any earlier, a load could read old data."""
    instruct("griddepcontrol.wait; mov.u32 $0, 0;")
