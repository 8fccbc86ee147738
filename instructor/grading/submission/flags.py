"""What a person should look at: changes of the notebook, and signs that a student's process reported of itself."""

from __future__ import annotations

import json
import os

from instructor.grading.sandbox.tampering import KINDS, Sign
from instructor.grading.submission.plan import Step, question_of
from instructor.grading.submission.results import Flag

MOST_CHANGED = 3  # questions with changed cells that have a flag each


class Flags:
    """The flags of one submission, one for each question and kind.

    Args:
        steps: of its plan; they say which question a cell belongs to.
    """

    def __init__(self, steps: list[Step]) -> None:
        self.found: dict[tuple[str, str], list[str]] = {}  # (question, kind) -> what was seen
        self.owner = {step.name: step.question for step in steps}

    def add(self, question: str, kind: str, detail: str) -> None:
        """Flag a question; "" is the whole submission."""
        details = self.found.setdefault((question, kind), [])
        if detail not in details:
            details.append(detail)

    def read_signs(self, descriptor: int, during: str) -> None:
        """Flag what a student's process reported until its end, and close the pipe.

        Args:
            descriptor: of the pipe.
            during: the cell that ran, or was tested, last; a process that ran a text for its tests does not know it.
        """
        os.set_blocking(descriptor, False)  # something that the student started may hold the other end
        with os.fdopen(descriptor, "rb", buffering=0) as pipe:
            text = pipe.read(1_000_000) or b""
        for line in text.splitlines()[:5000]:
            try:
                fields = json.loads(line)
                sign = Sign(*(str(fields[name])[:300] for name in Sign._fields))
            except (ValueError, KeyError, TypeError, RecursionError):
                sign = Sign(during, "protocol", "unreadable sign")
            cell = sign.cell or during
            self.add(self.owner.get(cell) or question_of(cell), sign.kind, sign.detail)

    def serious(self, question: str) -> list[str]:
        """The kinds of attempts at the channel, the memory or the walls in a question."""
        return sorted(kind for name, kind in self.found if name == question and kind in KINDS)

    def as_tuple(self) -> tuple[Flag, ...]:
        """One flag for each question and kind, which says how much was seen; one for all, if many questions were changed."""
        flags, found = [], dict(self.found)
        changed = [key for key in found if key[1] == "structure"]
        if len(changed) > MOST_CHANGED:
            found["", "structure"] = [detail for key in changed for detail in found.pop(key)]
        for (question, kind), details in found.items():
            more = f" (and {len(details) - 1} more of this kind)" if len(details) > 1 else ""
            flags.append(Flag(question, kind, details[0] + more))
        return tuple(flags)
