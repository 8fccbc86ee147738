"""Tell the L2 how long to keep what TMA brings: Triton has no word for it, so the policy goes into the PTX.

Copies with the policy `evict_first` leave lines in the L2 that are the first to go when the next ones come. Without it, a cache
of keys and values that is read once puts out what other kernels have left there, and what of that was written goes to memory
while the keys come in. The policy is an argument of the kernel, so one kernel reads with it and without it.
"""

from __future__ import annotations

import re
from typing import Any

from utils.kernels.assembling import reassembled

# A TMA copy from global memory, of a tensor of four dimensions.
_COPY = re.compile(
    r"(@%\w+ )?(cp\.async\.bulk\.tensor\.4d\.shared::\w+\.global\.mbarrier::complete_tx::bytes)( \[[^;]*\]);"
)
# The kernel's argument behind its one number in fp32.
_POLICY = re.compile(r"\.param \.f32 \w+,\s*\.param \.u64 (\w+)")


def policy_copies(ptx: str) -> tuple[str, int]:
    """Give each TMA copy of four dimensions the policy that the kernel gets; return the PTX and the number of copies."""
    argument = _POLICY.search(ptx)
    if argument is None:
        raise ValueError("the kernel has no argument for the policy: 64 bits behind an argument in fp32.")
    return _COPY.subn(
        lambda found: (
            f"{{ .reg .b64 policy; ld.param.b64 policy, [{argument[1]}]; {found[1] or ''}{found[2]}.L2::cache_hint{found[3]}, "
            "policy; }"
        ),
        ptx,
    )


def with_policy(compiled: Any) -> Any:
    """Return a copy of a kernel that Triton compiled, whose TMA copies have the policy of its argument; not yet loaded."""
    ptx, copies = policy_copies(compiled.asm["ptx"])
    if not copies:
        raise ValueError(f"{compiled.name} has no TMA copy of four dimensions: there is nothing to give the policy to.")
    return reassembled(compiled, ptx)
