"""Kernels whose PTX is rewritten after Triton has compiled them, for instructions that Triton has no word for."""

from __future__ import annotations

import copy
import hashlib
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from utils.machine.versions import ptxas_command


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


def reassembled(compiled: Any, ptx: str) -> Any:
    """Return a copy of a kernel that Triton compiled, with this PTX in place of its own; not yet loaded."""
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
