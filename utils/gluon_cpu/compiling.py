"""A student's Gluon kernel compiled for Hopper without a GPU: its instructions by what they do, registers, spills.

Run as a module, this file reads one request (JSON) from stdin and prints the answer: a wrong kernel can end the whole
process, so callers use a process of its own (`exercises.py`).
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from utils.kernels.offline import compile_gluon, read_assembly

# What to look for in SASS, by what it does.
INSTRUCTIONS = {
    "global loads": r"\bLDG\.",
    "global stores": r"\bSTG\.",
    "cp.async": r"\bLDGSTS",
    "TMA loads": r"\bUTMALDG",
    "TMA stores": r"\bUTMASTG",
    "shared loads": r"\bLDS|\bLDSM",
    "shared stores": r"\bSTS|\bSTSM",
    "wgmma": r"\b[HQI]GMMA",
    "mbarrier": r"\bSYNCS",
    "block barriers": r"\bBAR\.SYNC",
    "exponentials": r"MUFU\.EX2",
    "register moves": r"\bUSETMAXREG",
}


@dataclass(frozen=True)
class Compiled:
    """One kernel compiled for sm_90a. registers: at launch, before setmaxnreg moves them between warpgroups."""

    name: str
    instructions: dict[str, int]
    shared_bytes: int
    registers: int
    spill_bytes: int

    def __getitem__(self, what: str) -> int:
        """How many instructions of a kind: one of INSTRUCTIONS."""
        return self.instructions[what]


def compile_kernel(kernel, signature: dict[str, str], constants: dict, aligned: list[str], num_warps: int) -> Compiled:
    """Compile a @gluon.jit function for sm_90a. aligned: parameters at multiples of 16."""
    read = read_assembly(compile_gluon(kernel, signature, constants, aligned, num_warps), kernel.fn.__name__)
    counts = {what: read.count(pattern) for what, pattern in INSTRUCTIONS.items()}
    return Compiled(read.name, counts, read.shared_bytes, read.registers, read.spill_bytes)


def import_file(path: Path):
    """A Python file as a module under a name of its own."""
    name = f"{path.stem}_in_{path.parent.name}"  # shadows no other module
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton looks a function's module up
    spec.loader.exec_module(module)
    return module


def main() -> None:
    request = json.load(sys.stdin)
    kernel = getattr(import_file(Path(request.pop("path"))), request.pop("kernel"))
    print(json.dumps(asdict(compile_kernel(kernel, **request))))


if __name__ == "__main__":
    main()
