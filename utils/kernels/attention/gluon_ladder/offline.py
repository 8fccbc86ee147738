"""Compile a step for Hopper without a GPU, and read what came out: PTX, SASS, registers, spills.

    python -m utils.kernels.attention.gluon_ladder.offline 5 --head-dim 128 --causal

Triton carries its own ptxas and disassembler. Not for a process that interprets Triton kernels (TRITON_INTERPRET).
It shows instructions; that the numbers are right and nothing deadlocks takes a GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from utils.kernels.attention.gluon_ladder.launch import kernel_of
from utils.kernels.attention.gluon_ladder.plan import BLOCK_M, STEPS, plan_for, tail_as_window

HOPPER = ("cuda", 90, 32)


@dataclass(frozen=True)
class Compiled:
    """One kernel compiled for sm_90a. registers: at launch, before setmaxnreg moves them between warpgroups."""

    name: str
    ptx: str
    sass: str
    shared_bytes: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    warnings: tuple[str, ...]

    def count(self, pattern: str, where: str = "sass") -> int:
        """How often a regular expression occurs in the SASS or the PTX."""
        return len(re.findall(pattern, getattr(self, where)))


def compile_step(step: int, head_dim: int = 128, *, dtype: str = "bf16", causal: bool = False, window: bool = False,
                 tail: bool = False, lse: bool = False, short: bool = False,
                 aligned: bool = False) -> Compiled:
    """Compile a step of the ladder for sm_90a. dtype "bf16" or "fp16"; tail: keys are no multiple of the block.
    short: the plan of step 5 for short causal attention; aligned: its loop needs no causal mask (`plan.aligned`)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    plan = plan_for(step, head_dim, short)
    kernel = kernel_of(step)
    window = window or (step == 5 and tail_as_window(plan, causal, window, tail))
    constants = dict(HEAD_DIM=head_dim, BLOCK_M=BLOCK_M, BLOCK_N=plan.block_n, BLOCK_D=plan.block_d, CAUSAL=causal,
                     WINDOW=window, LSE=lse, CONSUMERS=plan.consumers, STAGES=plan.stages, REGISTERS=plan.registers,
                     TAIL=tail, DEALT=causal and not window, HALVES=plan.halves, O_IN_Q=plan.o_in_q,
                     OWN_KEYS=plan.own_keys, SPLIT=plan.split, ALIGNED=causal and not window and aligned)
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    tile = {"q_desc": BLOCK_M, "o_desc": BLOCK_M, "k_desc": plan.block_n, "v_desc": plan.block_n}
    kinds = {"lse_ptr": "*fp32", "schedule": "*i32", "c": "fp32"}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in tile:
            signature[name] = f"tensordesc<{dtype}[1, 1, {tile[name]}, {plan.block_d}],{layout!r}>"
        elif name in ("q_ptr", "k_ptr", "v_ptr", "o_ptr"):
            signature[name] = f"*{dtype}"
        else:
            signature[name] = kinds.get(name, "i32")
    constants = {name: value for name, value in constants.items() if name in signature}
    # What a launch tells the compiler about its arguments: tensors start, and rows lie, at multiples of 16 bytes.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names)
               if name.endswith(("_ptr", "_batch", "_head", "_row"))}
    source = GluonASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget(*HOPPER), options={"num_warps": 4})
    return _read(compiled, f"attention_step{step}", Path(triton.__file__).parent / "backends" / "nvidia" / "bin")


def _read(compiled, name: str, tools: Path) -> Compiled:
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
    return Compiled(name, compiled.asm["ptx"], sass, compiled.metadata.shared, number(r"Used (\d+) registers"),
                    number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
                    number(r"(\d+) bytes stack frame"),
                    tuple(line.strip() for line in report.splitlines() if "warning" in line.lower() or "C75" in line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", type=int, choices=STEPS)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    for flag in ("causal", "window", "tail", "lse", "short", "aligned"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--sass", action="store_true", help="print the disassembly")
    given = vars(parser.parse_args())
    show = given.pop("sass")
    kernel = compile_step(given.pop("step"), given.pop("head_dim"), **given)
    if show:
        print(kernel.sass)
    print(f"{kernel.name}: {kernel.registers} registers at launch, {kernel.spill_bytes} bytes spilled, "
          f"{kernel.shared_bytes} bytes shared")
    for what in ("HGMMA", "UTMALDG", "LDGSTS", "SYNCS", "MUFU.EX2", "BAR.SYNC", "USETMAXREG", "LDL", "STL"):
        print(f"  {what:<12}{kernel.count(re.escape(what)):>6}")
    for line in kernel.warnings:
        print(" ", line)


if __name__ == "__main__":
    main()
