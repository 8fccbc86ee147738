"""Tell the L2 that what TMA brings is read once: Triton has no word for it, so the hint goes into the PTX.

A copy with the hint `evict_first` leaves lines in the L2 that are the first to go when the next ones come. Without it, a cache
of keys and values that is read once puts out what other kernels have left there, and what of that was written goes to memory
while the keys come in.
"""

from __future__ import annotations

import re
from typing import Any

from utils.kernels.assembling import reassembled

# A TMA copy from global memory, of a tensor of four dimensions: of pages or sequences, heads, keys, and the head dimension.
_COPY = re.compile(
    r"(@%\w+ )?(cp\.async\.bulk\.tensor\.4d\.shared::\w+\.global\.mbarrier::complete_tx::bytes)( \[[^;]*\]);"
)
# What createpolicy.fractional.L2::evict_first gives for all lines, as CUTLASS has it.
_EVICT_FIRST = "0x12F0000000000000"


def hint_copies(ptx: str) -> tuple[str, int]:
    """Give each TMA copy of four dimensions the hint; return the PTX and the number of copies."""
    return _COPY.subn(
        lambda found: (
            f"{{ .reg .b64 policy; mov.b64 policy, {_EVICT_FIRST}; {found[1] or ''}{found[2]}.L2::cache_hint{found[3]}, "
            "policy; }"
        ),
        ptx,
    )


def with_l2_hint(compiled: Any) -> Any:
    """Return a copy of a kernel that Triton compiled, whose TMA copies of four dimensions have the hint; not yet loaded."""
    ptx, copies = hint_copies(compiled.asm["ptx"])
    if not copies:
        raise ValueError(f"{compiled.name} has no TMA copy of four dimensions: there is nothing to give the hint to.")
    return reassembled(compiled, ptx)
