"""Compile kernels of the ladder in this process and print what came out as JSON; run by test_offline.py.

A process of its own, because a wrong target aborts.
"""

import json
import sys

from tests.utils.barrier_places import covered_barriers
from utils.attention.gluon.offline import compile_step

PATTERNS = {
    "wgmma": ("ptx", r"wgmma\.mma_async"),
    "tma_load": ("ptx", r"cp\.async\.bulk\.tensor\.4d\.shared"),
    "tma_store": ("ptx", r"cp\.async\.bulk\.tensor\.4d\.global"),
    "cp_async": ("ptx", r"cp\.async\.(cg|ca)\.shared"),
    "mbarrier_wait": ("ptx", r"mbarrier\.try_wait"),
    "expect_bytes": ("ptx", r"mbarrier\.arrive\.expect_tx"),
    "setmaxnreg": ("ptx", r"setmaxnreg"),
    "HGMMA": ("sass", r"HGMMA"),
    "UTMALDG": ("sass", r"UTMALDG"),
    "UTMASTG": ("sass", r"UTMASTG"),
    "LDGSTS": ("sass", r"LDGSTS"),
    "local_memory": ("sass", r"\b(LDL|STL)\b"),
    "HMMA": ("sass", r"\bHMMA"),
}


def main() -> None:
    answer = {}
    for case in json.loads(sys.argv[1]):
        kernel = compile_step(case["step"], case["head_dim"], **case["flags"])
        row = {name: kernel.count(pattern, where) for name, (where, pattern) in PATTERNS.items()}
        row |= {
            "registers": kernel.registers,
            "spill_bytes": kernel.spill_bytes,
            "covered_barriers": covered_barriers(kernel.ttgir),
            "stack_bytes": kernel.stack_bytes,
            "shared_bytes": kernel.shared_bytes,
            "warnings": kernel.warnings,
            "loop": hot_loop(kernel.sass),
        }
        answer[json.dumps(case, sort_keys=True)] = row
    print("REPORT " + json.dumps(answer))


def hot_loop(sass: str) -> list[str]:
    """The opcodes of the innermost loop that has matrix products and exponentials, in the order of the SASS."""
    import re

    labels, code = {}, []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label.group(1)] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction.group(1))
    loops = []
    for end, text in enumerate(code):
        jump = re.search(r"BRA.*?`\((\.L_x_\d+)\)", text)
        if jump and labels.get(jump.group(1), end) < end:
            body = code[labels[jump.group(1)] : end + 1]
            # The retries of a wait for a barrier follow the kernel and jump back into the loop: they are no loops.
            if not any("EXIT" in x or "USETMAXREG" in x for x in body) and any("MUFU.EX2" in x for x in body):
                loops.append(body)
    body = min((body for body in loops if any("HGMMA" in x for x in body)), key=len, default=[])
    return [re.sub(r"^@!?U?P\d+\s+", "", text) for text in body]


if __name__ == "__main__":
    main()
