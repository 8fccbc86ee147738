"""Rewrite the PTX of kernels that Triton has compiled, for instructions that Triton cannot express.

`policy_copies` gives TMA copies a policy of the L2. Lines with the policy `evict_first` are the first to leave the L2. Without it,
a cache of keys and values, which is read once, pushes the data of other kernels out of the L2, and dirty lines are written to
memory while the keys come in. The policy is an argument of the kernel, so one kernel serves both policies. `narrow_products`
leaves columns out of attention's P V, dV and dK at head dimensions 80 and 96. `gemm_launch.py` has the rewriting of the GEMM.
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

# Matches a TMA copy from global memory of a tensor with four dimensions.
_COPY = re.compile(
    r"(@%\w+ )?(cp\.async\.bulk\.tensor\.4d\.shared::\w+\.global\.mbarrier::complete_tx::bytes)( \[[^;]*\]);"
)
# Matches the argument of 64 bits behind the kernel's only fp32 number.
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


def reassemble(compiled: Any, rewrite: Callable[[str], str]) -> Any:
    """Return a copy of a compiled kernel with rewritten PTX. The kernel keeps the copy for later calls.

    The copy is loaded at its first use: then Triton gives the driver the size of shared memory in the copy's metadata, which the
    caller may have changed. Triton never unloads a kernel.
    """
    if not hasattr(compiled, "reassembled_twin"):
        ptx = rewrite(compiled.asm["ptx"])
        twin = copy.copy(compiled)
        twin.module = twin.function = twin._run = None
        twin.kernel = assemble(ptx)
        twin.asm = {**compiled.asm, "ptx": ptx, "cubin": twin.kernel}
        compiled.reassembled_twin = twin
    return compiled.reassembled_twin


# Matches a product of 128 columns with its left operand in registers: the sums, then the operand. The last number, 1, sets these
# products apart from those with K.
_PRODUCT = re.compile(r"(wgmma\.mma_async\.sync\.aligned\.m64n)128(k16[\w.]*) *\{([^{}]*)\}(?=, *\{[^;]*, *1;)")


def narrow_products(ptx: str, columns: int) -> str:
    """Cut products with their left operand in registers down to the first columns.

    The sums of all further columns must be zero. They stay zero, and are not scaled.
    """
    zeros: set[str] = set()

    def narrow(found: re.Match) -> str:
        sums = found[3].replace(" ", "").split(",")
        zeros.update(sums[columns // 2 :])  # a thread has four registers of every eight columns, in order
        return f"{found[1]}{columns}{found[2]} {{{','.join(sums[: columns // 2])}}}"

    ptx = _PRODUCT.sub(narrow, ptx)
    return re.sub(r"mul\.f32 (%\w+), \1, %\w+;", lambda found: "" if found[1] in zeros else found[0], ptx)


def narrow_kernel(compiled: Any, columns: int) -> Any:
    """Return a copy of a compiled kernel with products of so many columns (`narrow_products`); 0 returns the kernel itself."""
    return reassemble(compiled, lambda ptx: narrow_products(ptx, columns)) if columns else compiled


def policy_copies(ptx: str) -> str:
    """Give each TMA copy of four dimensions the policy from the kernel's argument."""
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
