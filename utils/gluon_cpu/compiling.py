"""Gluon kernels compiled for Hopper without a GPU, and what came out: SASS instructions, registers, spills.

Triton carries its own ptxas and disassembler. Run as a module, this file reads one request (JSON) from stdin and
prints the answer: a wrong kernel can end the whole process, so callers use a process of its own (`exercises.py`).
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

HOPPER = ("cuda", 90, 32)
# What to look for in SASS, by what it does.
INSTRUCTIONS = {
    "global loads": r"\bLDG\.", "global stores": r"\bSTG\.", "cp.async": r"\bLDGSTS", "TMA loads": r"\bUTMALDG",
    "TMA stores": r"\bUTMASTG", "shared loads": r"\bLDS|\bLDSM", "shared stores": r"\bSTS|\bSTSM",
    "wgmma": r"\b[HQI]GMMA", "mbarrier": r"\bSYNCS", "block barriers": r"\bBAR\.SYNC", "exponentials": r"MUFU\.EX2",
    "register moves": r"\bUSETMAXREG",
}  # fmt: skip


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
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names = [p.name for p in kernel.params]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    signature = {name: "constexpr" if name in constants else signature[name] for name in names}
    source = GluonASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget(*HOPPER), options={"num_warps": num_warps})
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        ptx.write_text(compiled.asm["ptx"])
        cubin.write_bytes(compiled.asm["cubin"])
        sass = subprocess.run([tools / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
        # ptxas once more, for its own account of registers and spills.
        said = subprocess.run([tools / "ptxas", "-v", "--gpu-name=sm_90a", ptx, "-o", Path(folder) / "again.cubin"],
                              capture_output=True, text=True, check=True)
    report = said.stdout + said.stderr
    number = lambda pattern: sum(int(x) for x in re.findall(pattern, report))  # noqa: E731
    counts = {what: len(re.findall(pattern, sass)) for what, pattern in INSTRUCTIONS.items()}
    return Compiled(kernel.fn.__name__, counts, compiled.metadata.shared, number(r"Used (\d+) registers"),
                    number(r"(\d+) bytes spill"))


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
