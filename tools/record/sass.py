"""Read machine code: the loops of a kernel, and which unit of the SM each of its instructions needs."""

from __future__ import annotations

import itertools
import re
from collections import Counter

# Cycles for which an instruction of a warp holds its unit of one scheduler: 32 threads over the unit's lanes.
# Hopper, a scheduler: 32 lanes of FP32 (FMA), 16 of integers, comparisons and selections (ALU), 4 of exponentials (MUFU), and its
# quarter of the SM's 32 lanes of loads, stores and shuffles (LSU). "uniform" is the datapath that all threads share.
CYCLES = {"MUFU": 8, "FMA": 1, "ALU": 2, "conversion": 2, "LSU": 4, "uniform": 2, "tensor": 0, "sync": 0, "control": 0}
_UNITS = (
    ("tensor", r"[HQI]GMMA|WARPGROUP"),
    ("MUFU", r"MUFU"),
    ("conversion", r"F2FP|F2F|I2F|F2I"),
    ("FMA", r"FFMA|FADD|FMUL|IMAD|HFMA2|HADD2|HMUL2"),
    ("LSU", r"SHFL|LDS|STS|LDSM|STSM|LDG|STG|LDL|STL|LDC|ATOM|RED|ARRIVES|UTMA|S2R\b"),
    ("sync", r"SYNCS|BAR|DEPBAR|FENCE|MEMBAR|ERRBAR|CCTL|WARPSYNC|VOTE|ELECT|NANOSLEEP|DEPBAR"),
    ("control", r"BRA|BSYNC|BSSY|EXIT|NOP|CALL|RET|YIELD|CS2R|BREAK|JMP"),
    ("uniform", r"U[A-Z]|R2UR|VOTEU"),
    (
        "ALU",
        r"FMNMX|FSEL|FSETP|ISETP|SEL|LOP3|IADD3|SHF|MOV|PRMT|LEA|PLOP3|VIADD|VIMNMX|IMNMX|LEA|SGXT|BMSK|IABS|FCHK|P2R|R2P",
    ),
)


def unit_of(instruction: str) -> str:
    """Name the unit that an instruction needs, such as "FMA" for "@!P0 FMUL R88, R88, R3"."""
    opcode = re.sub(r"^@!?U?P[\dT]+\s+", "", instruction)
    return next((unit for unit, pattern in _UNITS if re.match(pattern, opcode)), "other")


def code_of(sass: str) -> tuple[list[str], dict[str, int]]:
    """Return a kernel's instructions in order, and for each label the number of the instruction behind it."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction[1])
    return code, labels


def inner_loops(sass: str) -> list[list[str]]:
    """Return the innermost loops that have products and exponentials, in the order of the code."""
    code, labels = code_of(sass)
    found: list[tuple[int, int]] = []
    for end, text in enumerate(code):
        jump = re.search(r"BRA.*?`\((\.L_x_\d+)\)", text)
        begin = labels.get(jump[1], end) if jump else end
        body = code[begin : end + 1]
        # Retries of a barrier's wait stand behind the kernel and jump back into the loop: those are no loops.
        outside = any("EXIT" in x or "USETMAXREG" in x for x in body)
        if begin < end and not outside and any("HGMMA" in x for x in body) and any("MUFU.EX2" in x for x in body):
            found.append((begin, end))
    inner = [x for x in found if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in found)]
    return [code[begin : end + 1] for begin, end in inner]


def units_of(instructions: list[str]) -> dict[str, int]:
    """Count the instructions by unit."""
    return dict(Counter(unit_of(x) for x in instructions).most_common())


def instructions_between(loop: list[str], opcode: str) -> list[dict[str, int]]:
    """Count by unit the instructions from each one with an opcode to the next, around the loop; clocks' own are left out."""
    at = [i for i, x in enumerate(loop) if re.match(rf"(@!?U?P\d+\s+)?{opcode}", x)]
    parts = [loop[a + 1 : b] for a, b in itertools.pairwise(at)] + [loop[at[-1] + 1 :] + loop[: at[0]]]
    return [units_of([x for x in part if not x.startswith("STG")]) for part in parts]
