"""Answers of the tenth round, and one of the eleventh, whose authors had the notebooks and `utils` alone: right values, each breaks a word, and each was accepted.

`TENTH` are refused in words by a hidden check. `TENTH_BY_TEXT` wait by their text. Some are the model answer with a few lines changed: {text of the
model answer: what stands there instead}.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_shortcuts import Shortcut

TENTH = [
    Shortcut(
        "4.1 waits behind the step in the warm-up",
        "lab1",
        "q4_1",
        "q4_1_tests",
        {
            "        for _ in range(10):\n": "        for number in range(10):\n",
            "            synchronize()\n            prof.step()\n": """            if number >= 4:
                synchronize()
            prof.step()
            if number < 4:
                synchronize()
""",
        },
        ("profile_steps", "profile_steps"),
        "behind its prof.step()",
    ),
    Shortcut(
        "8.1 a constant for each 64 positions",
        "lab2_flexattention",
        "bonus_8_1",
        "bonus_8_1_tests",
        {
            "    def moved(": """    base = int(positions.min()) // 64 * 64
    rest = positions - base

    def moved(""",
            "q + positions[b]": "q + base + rest[b]",
        },
        ("at_positions", "at_positions"),
        "became constants of the mask",
    ),
    Shortcut(
        "6.1 the product in 80 bits",
        "lab4_sdpa",
        "q6_1",
        "q6_1_tests",
        {
            "    return math.exp(sum(math.log(value) for value in values) / len(values))": """    import numpy as np

    wide = np.asarray(values, dtype=np.longdouble)
    return float(np.multiply.reduce(wide) ** (1 / np.longdouble(len(wide))))"""
        },
        ("fastest_and_default", "fastest", "default_slowdown", "geometric_mean"),
        "whose product overflows",
    ),
    Shortcut(
        "5.3 a checksum of 32 bits",
        "lab4_sdpa",
        "q5_3",
        "q5_3_tests",
        """
def distinct_results(fn, runs):
    import zlib

    def checksum(value):
        if isinstance(value, torch.Tensor):
            return zlib.crc32(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return tuple(checksum(part) for part in value)

    return len({checksum(fn()) for _ in range(runs)})
""",
        ("distinct_results", "distinct_results"),
        "equal checksums",
    ),
]

_SMALL_MASK = {
    "    return length // block * max(1, span // block)": """    unit = min(span, block)
    length, span, block = length // unit, span // unit, block // unit
    copies, length = length // max(span, block), max(span, block)
    finer = 1
    if length > 8:
        finer = (length // 8) ** 2 if span > 1 else 1
        length, span, block = 8, max(1, span * 8 // length), max(1, block * 8 // length)
    token = torch.arange(length)
    mask = token[:, None] // span == token[None, :] // span
    tiles = mask.view(length // block, block, length // block, block).any(3).any(1)
    return copies * finer * int(tiles.sum())"""
}
_REFERENCE_BY_ITS_TEXT = """
import ast
import inspect
import sys

import utils.attention

tree = ast.parse(inspect.getsource(sys.modules["utils.attention.reference"]))
for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef):
        node.body.insert(0, ast.parse("here = 0").body[0])
written = {"__name__": "my_reference"}
exec(compile(ast.fix_missing_locations(tree), "my_reference", "exec"), written)


def errors(out, q, k, v, causal=False):
    right, _ = written["reference"](q, k, v, causal=causal)
    wrong = out.double() - right
    return wrong.abs().max().item(), (wrong.square().mean() / right.square().mean()).sqrt().item()
"""
TENTH_BY_TEXT = [
    Shortcut("3.2 counts a small mask", "lab2_flexattention", "q3_2", "q3_2_tests", _SMALL_MASK, (), "uses .arange"),
    Shortcut(
        "2.2 the course's text with a line more",
        "lab4_sdpa",
        "q2_2",
        "q2_2_tests",
        _REFERENCE_BY_ITS_TEXT,
        (),
        "calls compile, exec",
    ),
]
