"""Streams of the GEMM (`Config.stream`): what TMA brings of an operand that is about as large as the L2.

A product that reads more than the L2 holds, from first to last, finds nothing there when it is repeated: each line has put out the
one that is needed next. So the copies of the larger operand say that half of its lines are the first to leave the L2, and the other
half is there the next time. Triton has no word for that: its copies stand between two marks, and `stream_copies` writes the policy
into the PTX. Which products get it says `gemm_choose.for_l2`; measured: docs/gemm-log.md, entry 48.
"""

from __future__ import annotations

import re

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

STREAMS, STAYS = "copies of a stream", "copies that stay"
MARK_STREAMS, MARK_STAYS = (gl.constexpr(f"mov.u32 $0, 0; // {mark}") for mark in (STREAMS, STAYS))
# PTX says "half of the accesses", not which; by the times (docs/gemm-log.md, entry 48) they are the same at each launch.
_POLICY = "createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 policy, 0.5;"
_ANY_COPY = re.compile(
    r"(@!?%\w+ )?(cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global\.mbarrier::complete_tx::bytes\S*)( \[[^;]*);"
)


@gluon.jit
def copies_stream():
    """Mark the copies that follow: half of the lines that they read are the first to leave the L2."""
    gl.inline_asm_elementwise(MARK_STREAMS, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def copies_stay():
    """Mark the copies that follow: the L2 treats what they read as it treats all without a mark."""
    gl.inline_asm_elementwise(MARK_STAYS, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


def stream_copies(ptx: str) -> tuple[str, int]:
    """Give the marked copies the policy of a stream; return the PTX and how many there were."""
    lines, streams, copies = [], False, 0
    for line in ptx.splitlines():
        if "// " + STREAMS in line or "// " + STAYS in line:
            streams = "// " + STREAMS in line
        elif streams:
            hinted = rf"{{ .reg .b64 policy; {_POLICY} \1\2.L2::cache_hint\3, policy; }}"
            line, found = _ANY_COPY.subn(hinted, line)
            copies += found
        lines.append(line)
    return "\n".join(lines) + "\n", copies
