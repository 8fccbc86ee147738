"""Folded hints for a question. The source has up to three at the end of a question's prose; students see `<details>`.

    # %% [markdown]
    # ### Question 1.1: Naive GEMM {points}
    #
    # Write the formula as three loops ...
    #
    # {hint idea}
    # Which element of C does a pass of the inner loop add to?
    #
    # {hint plan}
    # Allocate C. Loop over its rows, its columns, ...
    #
    # {hint line}
    # The sum starts anew for each element of C.

A hint never holds a line of the solution: the build searches the students' notebook for these. `{counts}` in the prose of
a question becomes one more fold, "What the check counts", with the rules that its hidden checks declare.
"""

from __future__ import annotations

import re
from importlib import import_module

from instructor.points import HEADING, QUESTION
from instructor.source import Lab, LabError

KINDS = {"idea": "the idea", "plan": "the plan", "line": "the line that people miss"}
_MARK = re.compile(r"\{hint (\w*)\}")


def fill_hints(lab: Lab) -> dict[str, list[str]]:
    """Turn `{hint idea}`, `{hint plan}` and `{hint line}` in the prose into folded sections.

    Returns:
        {number of a question: the kinds of its hints, in order}, for all questions of the lab.

    Raises:
        LabError: if a hint has an unknown kind, no text or no question, or if the order is wrong.
    """
    found: dict[str, list[str]] = {}
    problems: list[str] = []
    current = ""
    for cell in lab.cells:
        if cell.cell_type != "markdown" or cell.role not in ("prose", "locked", "task"):
            continue
        for line in cell.source.splitlines():
            heading = HEADING.fullmatch(line)
            question = heading and QUESTION.fullmatch(heading[2])
            if heading:
                current = f"{question['part']}.{question['number']}" if question else ""
            if question:
                found[current] = []
        if "{counts}" in cell.source:
            cell.source = cell.source.replace("{counts}", _what_counts(lab.name, current))
        prose, *pieces = _MARK.split(cell.source)
        if not pieces:
            continue
        if not current:
            problems.append(f"{lab.at(cell)}: a hint stands under no question's heading.")
            continue
        folded = []
        for kind, text in zip(pieces[::2], pieces[1::2], strict=True):
            if kind not in KINDS:
                problems.append(f"{lab.at(cell)}: {{hint {kind}}} is unknown; write {', '.join(KINDS)}.")
            elif not text.strip():
                problems.append(f"{lab.at(cell)}: the hint {kind!r} of Question {current} is empty.")
            else:
                found[current].append(kind)
                title = f"Hint {len(found[current])}: {KINDS[kind]}"
                folded.append(f"<details>\n<summary>{title}</summary>\n\n{text.strip()}\n\n</details>")
        cell.source = "\n\n".join([prose.rstrip(), *folded]).strip()
    for number, kinds in found.items():
        if kinds != [kind for kind in KINDS if kind in kinds]:
            order = f"write {', '.join(KINDS)}, in this order"
            problems.append(f"{lab.path.name}: Question {number} has the hints {', '.join(kinds)}; {order}.")
    if problems:
        raise LabError(problems)
    return found


def _what_counts(lab: str, number: str) -> str:
    """Return a fold with the descriptions of the rules of the question's checks."""
    checks = vars(import_module(f"instructor.checks.{lab}")).values()
    mine = [c for c in checks if getattr(c, "question", "").removeprefix("Bonus ") == number and c.rule is not None]
    rules = {check.rule.describe(): f"**{check.title}.** " * (len(mine) > 1) for check in mine}
    text = "\n\n".join(title + rule for rule, title in rules.items())
    return f"<details>\n<summary>What the check counts</summary>\n\n{text}\n\n</details>"
