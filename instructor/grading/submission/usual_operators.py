"""Whether a call ran what right answers run. What it ran beside that waits for a person, whatever its values are."""

from __future__ import annotations

from collections.abc import Iterable

from instructor.grading.submission import vocabulary
from instructor.grading.submission.usual import told
from utils.checking.watching import SCALAR_EXITS, OperationWatch


def unusual_calls(
    calls: Iterable[OperationWatch],
    more: Iterable[str] = (),
    most: int | None = None,
    numbers: int | None = None,
    narrow: Iterable[str] | None = None,
) -> list[str]:
    """What ran in a question that forbids something, beside what right answers run, in words.

    Args:
        calls: what ran in each call of the student's functions.
        more: operators that right answers to this question run beside the usual ones.
        most: operators that all calls together may run.
        numbers: values that all calls together may take out of torch one by one: what is computed with them is in no record.
        narrow: all operators that right answers to this question run, in place of the usual ones.
    """
    found: dict[str, list[str]] = {}
    known, total, taken = {*(vocabulary.OPERATORS if narrow is None else narrow), *more}, 0, 0
    for watch in calls:
        total += sum(watch.operations.values())
        taken += sum(count for name, count in watch.exits.items() if name in SCALAR_EXITS)
        plain = {name.rstrip("_") for name in watch.operations}
        found.setdefault("runs", []).extend(sorted(n for n in plain if n not in known and n.lstrip("_") not in known))
        found["runs"] += [n for n in watch.custom if n not in known]
        found["runs"] += [f"the kernel {n}" for n in watch.kernels if n not in known]
        found["runs"] += ["autograd" for name in watch.calls if name == "autograd" and name not in known]
        found.setdefault("takes values out of torch by", []).extend(
            n for n in watch.exits if n not in SCALAR_EXITS and n not in known
        )
    if numbers is not None and taken > numbers:
        found["takes values out of torch by"].append(
            f"{taken:,} single numbers, and right answers take {numbers:,} at most"
        )
    if most is not None and total > most:
        found["runs"].insert(0, f"{total:,} operators, and right answers run fewer than {most:,}")
    return told(found)
