"""Compile Gluon kernels for Hopper and Blackwell without a GPU, and read the PTX, the SASS, the registers and the spills.

Triton carries its own ptxas and disassembler. Do not use this module in a process that interprets Triton kernels
(TRITON_INTERPRET). A wrong kernel can end the whole process. The assembly shows the instructions; only a run shows
whether results are right.
"""

from __future__ import annotations

import math
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
    """One kernel compiled.

    registers: at launch, before setmaxnreg moves them between warpgroups. columns: of Blackwell's tensor memory.
    covered_barriers: see the function of this name.
    """

    name: str
    ptx: str
    sass: str
    shared_bytes: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    warnings: tuple[str, ...]
    covered_barriers: list[str]
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


def disassemble(cubin: bytes, *options: str) -> str:
    """Return the SASS of machine code; with the option -g, comments name the lines of source that it comes from."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        program = str(Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm")
        return subprocess.run([program, *options, "-c", file.name], capture_output=True, text=True, check=True).stdout


def read_assembly(compiled, name: str) -> Assembly:
    """Read a compiled kernel's assembly; ptxas runs once more, for its own report of registers and spills."""
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
        compiled.asm["ptx"],
        disassemble(compiled.asm["cubin"]),
        compiled.metadata.shared,
        total(r"Used (\d+) registers"),
        total(r"(\d+) bytes spill (?:stores|loads)"),
        total(r"(\d+) bytes stack frame"),
        tuple(line.strip() for line in report.splitlines() if "warning" in line.lower() or "C75" in line),
        covered_barriers(compiled.asm["ttgir"], int(target[1][3:-1])),
        getattr(compiled.metadata, "tmem_size", None) or 0,
    )


def covered_barriers(ttgir: str, capability: int = HOPPER) -> list[str]:
    """Return the mbarriers, by their names in Triton's IR, in whose shared memory the compiler puts something else too.

    It gives a barrier's place to what is allocated behind the last line that names it, while a copy may still complete on it.
    PTX forbids that without mbarrier.inval: on an H200 such tiles had nan at the barriers' places.
    """
    from triton._C.libtriton import ir, nvidia, passes

    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    manager = ir.pass_manager(context)  # as Triton goes on from here, up to the places
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, 80)
    manager.run(module, "places in shared memory")
    barriers, places = {}, []
    for line in re.findall(r".*allocation\.offset = .*", str(module)):
        begin = int(line.split("allocation.offset = ")[1].split(" ")[0])
        buffer = re.search(r"(%\S+) = ttg\.local_alloc .*memdesc<([\dx]+)x[a-z]+(\d+)", line)
        # The IR does not say how much other operations, such as a sum over warps, store on their way: a byte at the least.
        size = math.prod(map(int, buffer[2].split("x"))) * int(buffer[3]) // 8 if buffer else 1
        places.append(range(begin, begin + size))
        if buffer and re.search(r"memdesc<(?:\d+x)?1xi64", line):
            barriers[buffer[1]] = places[-1]
    return [name for name, b in barriers.items() if sum(p.start < b.stop and b.start < p.stop for p in places) > 1]
