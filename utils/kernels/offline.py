"""Compile Gluon kernels for Hopper and Blackwell without a GPU, and read the PTX, the SASS, the registers and the spills.

Triton has its own ptxas and disassembler. Do not use this module in a process that interprets Triton kernels
(TRITON_INTERPRET). A wrong kernel can end the whole process. The assembly shows the instructions; only a run shows
whether results are right.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from utils.machine import versions

HOPPER, BLACKWELL, BLACKWELL_ULTRA = 90, 100, 103  # compute capabilities: Triton compiles for sm_90a, sm_100a, sm_103a
TARGETS = (HOPPER, BLACKWELL, BLACKWELL_ULTRA)


@dataclass(frozen=True)
class Assembly:
    """The assembly and the figures of one kernel.

    registers: at launch, before setmaxnreg moves them between warpgroups. columns: those of Blackwell's tensor memory.
    """

    name: str
    ttgir: str
    ptx: str
    sass: str
    shared_bytes: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    warnings: tuple[str, ...]
    columns: int = 0

    def count(self, pattern: str, where: str = "sass") -> int:
        """Count the matches of a regular expression in the SASS or the PTX."""
        return len(re.findall(pattern, getattr(self, where)))


def compile_gluon(
    kernel,
    signature: dict[str, str],
    constants: dict,
    aligned: Iterable[str] = (),
    num_warps: int = 4,
    capability: int = HOPPER,
    **options,
):
    """Compile a kernel, by default for sm_90a: Triton's object with `.asm["ptx"]`, `.asm["cubin"]`, `.metadata.shared`.

    Args:
        kernel: A @gluon.jit function.
        signature: {parameter: Triton's type}, without the constants.
        constants: {parameter: value} of the gl.constexpr parameters.
        aligned: Parameters with values that are multiples of 16. (A launch finds them by itself.)
        num_warps: Warps of the default partition.
        capability: One of TARGETS.
        **options: Triton's other launch options, such as `maxnreg`, or `instrumentation_mode="consan"` for its sanitizer.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    if capability not in TARGETS:
        known = ", ".join(f"{target} (sm_{target}a)" for target in TARGETS)
        raise ValueError(f"The course's kernels compile for {known}; compute capability {capability} was asked for.")
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else signature[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps, **options})


def disassemble(cubin: bytes, *options: str) -> str:
    """Return the SASS of machine code; with the option -g, comments name the lines of the source."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        program = str(Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm")
        return subprocess.run([program, *options, "-c", file.name], capture_output=True, text=True, check=True).stdout


def read_assembly(compiled, name: str) -> Assembly:
    """Read the assembly of a compiled kernel; ptxas runs once more and reports registers and spills."""
    target = re.search(r"\.target (\w+)", compiled.asm["ptx"])
    assert target, "PTX names its target"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(compiled.asm["ptx"])
        ptx.flush()
        command = [*versions.ptxas_command(target[1]), ptx.name, "-o", os.devnull]
        ptxas = subprocess.run(command, capture_output=True, text=True, check=True)
    report = ptxas.stdout + ptxas.stderr

    def total(pattern: str) -> int:
        return sum(int(number) for number in re.findall(pattern, report))

    return Assembly(
        name,
        compiled.asm["ttgir"],
        compiled.asm["ptx"],
        disassemble(compiled.asm["cubin"]),
        compiled.metadata.shared,
        total(r"Used (\d+) registers"),
        total(r"(\d+) bytes spill (?:stores|loads)"),
        total(r"(\d+) bytes stack frame"),
        tuple(line.strip() for line in report.splitlines() if "warning" in line.lower() or "C75" in line),
        getattr(compiled.metadata, "tmem_size", None) or 0,
    )
