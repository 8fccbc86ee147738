"""The barrier across a warpgroup that Triton puts in front of each wait for next keys, taken out of the PTX."""

import re

_BARRIER = re.compile(r"\tbar\.sync[ \t]+\d+, 128;\n(?=(?:\s*//[^\n]*\n|\s*\n)*\{\n\s*@!%p\d+ bra\.uni skipWait;)")


def without_barriers(ptx: str) -> str:
    """Return PTX without these barriers: a wait at an mbarrier touches nothing that they protect."""
    return _BARRIER.sub("", ptx)
