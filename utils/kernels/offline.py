"""Compile Gluon kernels for Hopper and Blackwell without a GPU, and read the PTX, the SASS, the registers and the spills.

Triton carries its own ptxas and disassembler. Do not use this module in a process that interprets Triton kernels
(TRITON_INTERPRET). A wrong kernel can end the whole process. The assembly shows the instructions; only a run shows
whether results are right.
"""

from __future__ import annotations

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
    """One kernel compiled.

    registers: at launch, before setmaxnreg moves them between warpgroups. columns: of Blackwell's tensor memory.
    unused_barriers: see the function of this name.
    """

    name: str
    ptx: str
    sass: str
    shared_bytes: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    warnings: tuple[str, ...]
    unused_barriers: tuple[str, ...] = ()
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
        aligned: Parameters that are multiples of 16, which a launch finds out for itself.
        num_warps: Warps of the default partition.
        capability: One of TARGETS.
        **options: Triton's other options of a launch, such as `maxnreg`, or `instrumentation_mode="consan"` for its sanitizer.
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


def disassemble(compiled, lines: bool = False) -> str:
    """Return the SASS of a compiled kernel; with `lines`, comments name the lines of source that it comes from."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        return _tool("nvdisasm", *(["-g"] if lines else []), "-c", cubin).stdout


def read_assembly(compiled, name: str) -> Assembly:
    """Read a compiled kernel's assembly; ptxas runs once more, for its own report of registers and spills."""
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        target = re.search(r"\.target (\w+)", compiled.asm["ptx"])
        assert target, "PTX names its target"
        command = [*versions.ptxas_command(target[1]), str(ptx), "-o", str(Path(folder) / "again.cubin")]
        ptxas = subprocess.run(command, capture_output=True, text=True, check=True)
    report = ptxas.stdout + ptxas.stderr

    def total(pattern: str) -> int:
        return sum(int(number) for number in re.findall(pattern, report))

    return Assembly(
        name,
        compiled.asm["ptx"],
        disassemble(compiled),
        compiled.metadata.shared,
        total(r"Used (\d+) registers"),
        total(r"(\d+) bytes spill (?:stores|loads)"),
        total(r"(\d+) bytes stack frame"),
        tuple(line.strip() for line in report.splitlines() if "warning" in line.lower() or "C75" in line),
        unused_barriers(compiled.asm["ttgir"]),
        getattr(compiled.metadata, "tmem_size", None) or 0,
    )


def unused_barriers(ttgir: str) -> tuple[str, ...]:
    """Return the mbarriers, by their names in Triton's IR, that a kernel initialises and never uses.

    Behind its last use the compiler gives a barrier's place in shared memory to a tile. PTX forbids that without
    mbarrier.inval. Where several processes took turns on an H200, such tiles had nan at the barriers' places.
    """
    lines = [line.split(" loc(")[0] for line in ttgir.splitlines()]
    where: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        for name in set(re.findall(r"%[\w$.-]+", line)):
            where.setdefault(name, []).append(number)

    def only_initialised(name: str, defined: int) -> bool:
        for number in where[name]:
            part = re.match(r"\s*(%[\w$.-]+) = ttg\.memdesc_(?:index|sub\w+) ", lines[number])
            if number == defined or "ttng.init_barrier" in lines[number]:
                continue
            if part is None or not only_initialised(part.group(1), number):
                return False
        return True

    arrays = ((n, re.match(r"\s*(%[\w$.-]+) = ttg\.local_alloc .*memdesc<[\dx]*xi64", x)) for n, x in enumerate(lines))
    return tuple(found.group(1) for n, found in arrays if found and only_initialised(found.group(1), n))


def _tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program of Triton's own folder."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True)
