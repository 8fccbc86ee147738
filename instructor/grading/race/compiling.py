"""A student's file compiled for Hopper in a process of its own, and its machine code read before it may run.

There the file's imports are first read as text (`expect_kernel_file`). The process that compiles it
knows no inputs and no times; what comes back is machine code and a few numbers.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from instructor.grading.race.problem import FILE, LONG, Shape
from instructor.grading.submission.results import GradingError
from utils.checking.gluon_launches import overlap_launch
from utils.checking.kernel_exercises import Launch, load_kernels, triton_type
from utils.files import ROOT
from utils.kernels import offline

COMPILE_SECONDS = 90.0
MEMORY_GB = 32  # of addresses; torch's libraries for CUDA take some
# Instructions that reach memory by an address. The tensors of this kernel come as TMA descriptors, so it needs none.
_BY_ADDRESS = re.compile(
    r"(LD|LDG|LDGSTS|ST|STG|STAS|ATOM|ATOMG|RED|REDG|REDAS|SULD|SUST|SUATOM|SURED|TEX|TLD|TLD4|CCTL|CCTLL|CCTLT|"
    r"UBLKCP|UBLKPF|UBLKRED|UTMACCTL|PREFETCH|MULTIMEM|CALL|JMP|JMX|RPCMOV|BPT|NANOSLEEP|ACQBULK|PREEXIT)"
)
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.M)


class Refused(GradingError):
    """A file, or its kernel, does not take part; the message says why, to its author."""


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel as data."""

    name: str  # its symbol in the machine code
    shared: int  # bytes of shared memory
    num_warps: int  # warps of all partitions
    cubin: bytes  # machine code for sm_90a
    descriptors: list  # how the launch encodes its TMA descriptors
    ptx: str  # its text declares the parameters


def race_launch(shape: Shape) -> Launch:
    """Return the launch of Question 5.3 at a shape, with small tensors: only their types decide what is compiled."""
    q, k = (torch.empty(1, rows, shape.head_dim, dtype=torch.bfloat16) for rows in (128, shape.block))
    launch, _ = overlap_launch(q, k, k, q, stages=shape.stages, block_n=shape.block)
    return launch


def signature(launch: Launch, constants: Collection[str] = ("STAGES",)) -> dict[str, str]:
    """Return the types of a launch's arguments as Triton spells them."""
    return {name: "constexpr" if name in constants else triton_type(value) for name, value in launch.args.items()}


def compile_text(source: str, shape: Shape = LONG) -> Kernel:
    """Compile a student's file for a shape's block, slots and head dimension in a process of its own, and read what it became."""
    with tempfile.TemporaryDirectory(prefix="race-") as folder:
        kept = ("PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "TRITON_PTXAS_PATH", "LANG", "PYTHONPATH")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment |= {"HOME": folder, "TMPDIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
        answer = Path(folder, "answer.json")
        command = [sys.executable, "-m", "instructor.grading.race.compiling", str(answer)]
        request = json.dumps({"source": source, "shape": asdict(shape)})
        try:
            ended = subprocess.run(
                command,
                input=request,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=COMPILE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise Refused(f"{FILE} did not compile within {COMPILE_SECONDS:.0f} s.") from None
        if ended.returncode or not answer.is_file():
            lines = [line for line in ended.stderr.splitlines() if line.strip()]
            raise Refused(f"{FILE} does not compile: {' '.join(lines[-2:])[:600]}")
        try:
            return read_machine_code(json.loads(answer.read_text()))
        except (ValueError, KeyError, TypeError, subprocess.CalledProcessError):  # a file may have reached Python
            raise Refused(f"what became of {FILE} cannot be read.") from None


def read_machine_code(facts: dict) -> Kernel:
    """Return a kernel by what the compiler's process wrote; raise Refused if it needs or does what this race does not give."""
    for what in ("global_scratch_size", "profile_scratch_size"):
        if facts[what]:
            raise Refused("the kernel asks for memory of its own: descriptors may not be made in the kernel.")
    if facts["launch_pdl"] or facts["launch_cooperative_grid"] or facts["num_ctas"] != 1:
        raise Refused("the kernel asks for another kind of launch than the question's.")
    cubin = bytes.fromhex(facts["cubin"])
    found = sorted({code for code in opcodes(cubin) if _BY_ADDRESS.fullmatch(code)})
    if found:
        words = "its tensors come as descriptors, and memory is reached through those alone"
        raise Refused(f"the kernel's machine code has {', '.join(found)}: {words}.")
    numbers = int(facts["shared"]), int(facts["num_warps"])  # the driver refuses more than an SM has
    return Kernel(str(facts["name"]), *numbers, cubin, facts["descriptors"], facts["ptx"])


def opcodes(cubin: bytes) -> set[str]:
    """Return the instructions of a machine code by name, without their modifiers."""
    found = set(_OPCODE.findall(offline.disassemble(cubin)))
    if "EXIT" not in found:
        raise Refused("the kernel's machine code cannot be read.")
    return found


# ---- the process that compiles ---------------------------------------------------------------------------------------


def _answer(request: dict) -> dict:
    """Compile what a request asks for; return the facts that `read_machine_code` reads."""
    launch = race_launch(Shape(**request["shape"]))
    kernel = getattr(load_kernels(request["source"], launch), launch.kernel)
    constants = {p.name: launch.args[p.name] for p in kernel.params if p.is_constexpr}
    built = offline.compile_gluon(kernel, signature(launch, constants), constants)
    numbers = ("global_scratch_size", "profile_scratch_size", "launch_pdl", "launch_cooperative_grid", "num_ctas")
    facts = {name: getattr(built.metadata, name, 0) for name in (*numbers, "name", "shared", "num_warps")}
    facts |= {"descriptors": built.metadata.tensordesc_meta, "ptx": built.asm["ptx"]}
    return {**facts, "cubin": built.asm["cubin"].hex()}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_GB << 30, MEMORY_GB << 30))
    try:
        Path(sys.argv[1]).write_text(json.dumps(_answer(json.load(sys.stdin))))
    except Exception as error:  # whatever the file does, its author should read
        sys.exit(str(error) or type(error).__name__)
