"""Which answers are alike: fingerprints of the code in answer cells, without what the lab gave to everybody.

A fingerprint is a hash of some tokens in a row. Names and numbers are replaced before, so that renaming hides nothing; what is in
the students' notebook, the course's library or many submissions is nobody's own.
"""

from __future__ import annotations

import collections
import io
import itertools
import keyword
import tokenize
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import nbformat

from instructor.build import Built
from instructor.grading.submission.plan import Unreadable, make_plan

GRAM = 12  # tokens of a fingerprint
COMMON = 0.4  # a fingerprint that more of the class has is nobody's own
MAX_CELL = 100_000  # characters of a cell that are compared: more would take minutes
LEAST, SHARE = 28, 0.5  # fingerprints that a pair has to share to be named, and this share of the smaller one's
_LEFT_OUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


class Pair(NamedTuple):
    """Two students whose answers are alike."""

    one: str
    other: str
    share: float  # of the smaller one's fingerprints
    shared: int
    cells: list[str]  # the answers in which most of them are


def tokens(source: str) -> list[str]:
    """The tokens of a code cell, without names, numbers and text; what cannot be read ends the list."""
    found: list[str] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.NAME:
                found.append(token.string if keyword.iskeyword(token.string) else "name")
            elif token.type in (tokenize.NUMBER, tokenize.STRING):
                found.append("value")
            elif token.type not in _LEFT_OUT:
                found.append(token.string)
    except (tokenize.TokenError, SyntaxError, IndentationError, ValueError):
        pass
    return found


def fingerprints(source: str) -> set[int]:
    """The fingerprints of a piece of code."""
    words = tokens(source)
    return {zlib.crc32(" ".join(words[i : i + GRAM]).encode()) for i in range(len(words) - GRAM + 1)}


def answers_of(built: Built, submission: bytes) -> dict[str, str]:
    """{answer cell: its code} of a submission, and its extra cells; empty if it cannot be read."""
    try:
        plan = make_plan(built, submission)
    except Unreadable:
        return {}
    return {
        s.name: s.source[:MAX_CELL]
        for s in plan.steps
        if s.kind == "student" and not s.untouched and s.cell.cell_type == "code"
    }


def given_code(built: Built) -> set[int]:
    """Fingerprints of what everybody was given: the code in the students' notebook."""
    cells = nbformat.reads(built.student, as_version=4).cells
    return {mark for cell in cells if cell.cell_type == "code" for mark in fingerprints(cell.source)}


def alike(classes: Mapping[str, Mapping[str, str]], given: set[int]) -> list[Pair]:
    """Pairs of students, {student: {answer cell: its code}}, whose code is alike beside what was given, the most alike first."""
    marks = {
        student: {cell: fingerprints(code) - given for cell, code in cells.items()}
        for student, cells in classes.items()
    }
    own = {student: set().union(*cells.values()) if cells else set() for student, cells in marks.items()}
    spread = collections.Counter(mark for found in own.values() for mark in found)
    most = max(2, int(COMMON * len(own)))
    own = {student: {mark for mark in found if spread[mark] <= most} for student, found in own.items()}
    pairs = []
    for one, other in itertools.combinations(sorted(own), 2):
        shared = own[one] & own[other]
        smaller = min(len(own[one]), len(own[other]))
        if len(shared) >= LEAST and len(shared) >= SHARE * smaller:
            counts = {cell: len(found & shared) for cell, found in marks[one].items() if found & shared}
            cells = sorted(counts, key=lambda cell: -counts[cell])[:5]
            pairs.append(Pair(one, other, len(shared) / smaller, len(shared), cells))
    return sorted(pairs, key=lambda pair: (-pair.share, -pair.shared))
