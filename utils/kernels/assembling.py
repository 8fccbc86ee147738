"""Kernels whose PTX is rewritten after Triton has compiled them, for instructions that Triton has no word for.

`policy_copies` tells the L2 how long to keep what TMA brings. Copies with the policy `evict_first` leave lines in the L2 that are the
first to go when the next ones come. Without it, a cache of keys and values that is read once puts out what other kernels have left
there, and what of that was written goes to memory while the keys come in. The policy is an argument of the kernel, so one kernel
reads with it and without it. `narrow_products` leaves columns out of attention's P V, dV and dK at head dimensions 80 and 96. What
the GEMM rewrites is in `gemm_launch.py`.
"""

from __future__ import annotations

import copy
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from utils.machine.versions import ptxas_command

# A TMA copy from global memory, of a tensor of four dimensions.
_COPY = re.compile(
    r"(@%\w+ )?(cp\.async\.bulk\.tensor\.4d\.shared::\w+\.global\.mbarrier::complete_tx::bytes)( \[[^;]*\]);"
)
# The kernel's argument behind its one number in fp32.
_POLICY = re.compile(r"\.param \.f32 \w+,\s*\.param \.u64 (\w+)")


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


def reassembled(compiled: Any, rewrite: Callable[[str], str]) -> Any:
    """Return a copy of a kernel that Triton compiled, with its PTX rewritten: one copy, kept with the kernel.

    Triton keeps a compiled kernel for each device, and never unloads one. The copy is loaded when it is first used: then Triton
    tells the driver how much shared memory a launch may ask for, as the copy's metadata say by then.
    """
    if not hasattr(compiled, "reassembled_twin"):
        ptx = rewrite(compiled.asm["ptx"])
        twin = copy.copy(compiled)
        twin.module = twin.function = twin._run = None
        twin.kernel = assemble(ptx)
        twin.asm = {**compiled.asm, "ptx": ptx, "cubin": twin.kernel}
        compiled.reassembled_twin = twin
    return compiled.reassembled_twin


# A product of 128 columns whose left operand is in registers: its sums, and then the operand. Its last number is 1, which K's is not.
_PRODUCT = re.compile(r"(wgmma\.mma_async\.sync\.aligned\.m64n)128(k16[\w.]*) *\{([^{}]*)\}(?=, *\{[^;]*, *1;)")


def narrow_products(ptx: str, columns: int) -> str:
    """Make products whose left operand is in registers have the first columns only. The sums of the others have to be zero.

    They stay so, and are not scaled.
    """
    zeros: set[str] = set()

    def narrow(found: re.Match) -> str:
        sums = found[3].replace(" ", "").split(",")
        zeros.update(sums[columns // 2 :])  # a thread has four registers of every eight columns, in their order
        return f"{found[1]}{columns}{found[2]} {{{','.join(sums[: columns // 2])}}}"

    ptx = _PRODUCT.sub(narrow, ptx)
    return re.sub(r"mul\.f32 (%\w+), \1, %\w+;", lambda found: "" if found[1] in zeros else found[0], ptx)


def narrowed(compiled: Any, columns: int) -> Any:
    """Return a copy of a kernel that Triton compiled, with narrow products (`narrow_products`); for 0 the kernel itself."""
    return reassembled(compiled, lambda ptx: narrow_products(ptx, columns)) if columns else compiled


def policy_copies(ptx: str) -> str:
    """Give each TMA copy of four dimensions the policy that the kernel gets."""
    argument = _POLICY.search(ptx)
    if argument is None:
        raise ValueError("the kernel has no argument for the policy: 64 bits behind an argument in fp32.")
    load = f"{{ .reg .b64 policy; ld.param.b64 policy, [{argument[1]}]; "
    ptx, copies = _COPY.subn(
        lambda found: f"{load}{found[1] or ''}{found[2]}.L2::cache_hint{found[3]}, policy; }}", ptx
    )
    if not copies:
        raise ValueError("the kernel has no TMA copy of four dimensions: there is nothing to give the policy to.")
    return ptx
