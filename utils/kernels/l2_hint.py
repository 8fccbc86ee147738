"""Tell the L2 that what TMA brings is read once: Triton has no word for it, so the hint goes into the PTX.

A copy with the hint `evict_first` leaves lines in the L2 that are the first to go when the next ones come. Without it, a cache
of keys and values that is read once puts out what other kernels have left there, and what of that was written goes to memory
while the keys come in.
"""

from __future__ import annotations

import copy
import hashlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from utils.machine.versions import ptxas_command

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


def assemble(ptx: str) -> bytes:
    """Assemble PTX for Hopper with Triton's assembler, or take the result from Triton's cache."""
    from triton.runtime.cache import get_cache_manager

    command = ptxas_command()
    cache = get_cache_manager(hashlib.sha256("\n".join([*command, ptx]).encode()).hexdigest())
    kept = cache.get_file("hinted.cubin")
    if kept:
        return Path(kept).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        subprocess.run([*command, str(source), "-o", str(target)], check=True, capture_output=True)
        cubin = target.read_bytes()
    cache.put(cubin, "hinted.cubin", binary=True)
    return cubin


def with_l2_hint(compiled: Any) -> Any:
    """Return a copy of a kernel that Triton compiled, whose TMA copies of four dimensions have the hint; not yet loaded."""
    ptx, copies = hint_copies(compiled.asm["ptx"])
    if not copies:
        raise ValueError(f"{compiled.name} has no TMA copy of four dimensions: there is nothing to give the hint to.")
    twin = not_loaded(compiled)
    twin.kernel = assemble(ptx)
    twin.asm = {**compiled.asm, "ptx": ptx, "cubin": twin.kernel}
    return twin


def not_loaded(compiled: Any) -> Any:
    """Return a copy of a kernel that Triton compiled, which is loaded when it is first used, by what the copy says then.

    When Triton loads a kernel, it tells the driver how much shared memory a launch may ask for.
    """
    twin = copy.copy(compiled)
    twin.module = twin.function = twin._run = None
    return twin
