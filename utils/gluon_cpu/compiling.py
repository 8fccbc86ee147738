"""Compile a student's Gluon kernel for Hopper without a GPU, and count its instructions by kind, registers and spills.

A wrong kernel can end the process that compiles it, so a child process does it: a fork of this process if that is safe
(milliseconds), else a fork of a server process (`utils.kernels.warm_process`), which runs this file as a module.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType

from utils.kernels import offline
from utils.kernels.warm_process import WarmProcess
from utils.machine import versions

# {kind of instruction: regular expression for SASS}.
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
    "proxy fences": r"\bFENCE\.VIEW\.ASYNC",
    "block barriers": r"\bBAR\.SYNC",
    "exponentials": r"MUFU\.EX2",
    "register moves": r"\bUSETMAXREG",
}

# Instructions to show beside their line of source.
READABLE = {
    "PTX": r"cp\.async|wgmma\.|mbarrier\.|fence\.proxy\.async|bar(rier)?\.(cta\.)?sync|setmaxnreg|ex2\.approx|(ld|st)\.(global|shared)",
    "SASS": r"UTMA(LDG|STG)|SYNCS|HGMMA|FENCE|BAR\.SYNC|WARPGROUP|LDGSTS|MUFU\.EX2|USETMAXREG|\b(LDG|STG|LDS|STS|LDSM|STSM)\b",
}


@dataclass(frozen=True)
class Compiled:
    """The figures of a compiled kernel. registers: at launch, before setmaxnreg moves them between warpgroups.

    `lines` has the READABLE instructions by their line in the kernel's file:
    {"PTX": {"40": ["wgmma.mma_async...", ...]}, "SASS": ...}.
    """

    name: str
    instructions: dict[str, int]
    shared_bytes: int
    registers: int
    spill_bytes: int
    lines: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    tensor_columns: int = 0  # columns of tensor memory; Hopper has none

    def __getitem__(self, what: str) -> int:
        """Return the number of instructions of a kind, one of INSTRUCTIONS."""
        return self.instructions[what]


@dataclass(frozen=True)
class Request:
    """A kernel to compile for sm_90a."""

    source: str  # the text of the file
    file: str  # the file's name, for messages
    kernel: str  # the name of the @gluon.jit function
    signature: dict[str, str]  # Triton's types of the parameters, without the constants
    constants: dict[str, object]  # values of the gl.constexpr parameters
    aligned: list[str]  # parameters whose values are multiples of 16, as a launch tells the compiler
    num_warps: int  # warps of the default partition
    capability: int = offline.HOPPER


class CompilerRefusal(Exception):
    """The compiler refuses a kernel; the message is the compiler's output."""


def compile_kernel(request: Request, *, figures: bool = True, timeout: float = 120.0) -> Compiled | None:
    """Compile a kernel for sm_90a in a child process; raise CompilerRefusal if it does not compile.

    figures: whether to count instructions, registers and spills. Without them the result is None, in half the time.
    """
    path = write_source(request.source, request.file)
    ended = PROCESS.run({"path": str(path), **asdict(request), "figures": figures}, timeout)
    if ended.status:
        raise CompilerRefusal(ended.words)
    return Compiled(**ended.answer) if figures else None


# ---- the child ---------------------------------------------------------------------------------------------------


def warm_up() -> None:
    """Import the compiler's modules, so that a fork of this process compiles at once."""
    from triton.runtime.cache import triton_key

    versions.adopt_newest_gluon_names()  # imports Gluon
    triton_key()  # reads all of Triton: most of a second


def answer(request: dict) -> dict | None:
    """Compile the kernel of a request; return the fields of `Compiled`, or None if it asks for no figures."""
    kernel = getattr(import_file(Path(request["path"])), request["kernel"])
    given = ("signature", "constants", "aligned", "num_warps", "capability")
    built = offline.compile_gluon(kernel, *(request[name] for name in given))
    if not request["figures"]:
        return None
    read = offline.read_assembly(built, kernel.fn.__name__)
    counts = {what: read.count(pattern) for what, pattern in INSTRUCTIONS.items()}
    lines = {
        "PTX": _by_line(read.ptx, request["file"], READABLE["PTX"]),
        "SASS": _by_line(offline.disassemble(built.asm["cubin"], "-g"), request["file"], READABLE["SASS"]),
    }
    numbers = read.shared_bytes, read.registers, read.spill_bytes
    return asdict(Compiled(read.name, counts, *numbers, lines, read.columns))


def _by_line(assembly: str, file: str, pattern: str) -> dict[str, list[str]]:
    """Return the instructions of a pattern by their line in a file. An inlined function counts for the line of its call."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+) "([^"]*)"', assembly, re.M))  # PTX numbers its files
    lines: dict[str, list[str]] = {}
    line = ""
    for text in assembly.splitlines():
        if re.match(r"\s*\.loc\s", text):
            numbers = re.findall(r"(?:\.loc|inlined_at)\s+(\d+) (\d+)", text)
            places = [(files.get(number, ""), at) for number, at in numbers]
        elif "//## File" in text:
            places = re.findall(r'"([^"]*)", line (\d+)', text)
        else:
            instruction = text.split("//")[0].strip().removesuffix(";").strip()
            instruction = re.sub(r"^/\*[0-9a-f]+\*/\s*", "", instruction)
            if line and not instruction.startswith(".") and re.search(pattern, instruction):
                lines.setdefault(line, []).append(" ".join(instruction.split()))
            continue
        own = [at for name, at in places if Path(name).name == file]
        line = own[-1] if own else ""
    return lines


# ---- kernels in files --------------------------------------------------------------------------------------------


@functools.cache
def _folder(process: int) -> tempfile.TemporaryDirectory:
    """Return a folder for each process: a fork behind the grader's walls does not see the folder of its parent."""
    return tempfile.TemporaryDirectory(prefix="kernels-")


def write_source(source: str, file: str) -> Path:
    """Write a text to a file of this name: Triton and error messages read the source of a kernel from its file."""
    folder = Path(_folder(os.getpid()).name) / hashlib.sha256(source.encode()).hexdigest()[:12]
    folder.mkdir(exist_ok=True)
    path = folder / file
    path.write_text(source, encoding="utf-8")
    return path


def import_file(path: Path) -> ModuleType:
    """Import a Python file under a new module name, which hides no other module."""
    name = f"{path.stem}_in_{path.parent.name}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton looks a function's module up
    spec.loader.exec_module(module)
    return module


PROCESS = WarmProcess("utils.gluon_cpu.compiling", warm_up, answer)

if __name__ == "__main__":
    PROCESS.serve()
