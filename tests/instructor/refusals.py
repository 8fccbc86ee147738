"""Count, from the catalogues, what the checks that students see do with wrong answers and with unusual right ones.

    python -m tests.instructor.refusals                  all labs: some minutes, most of them for lab 3
    python -m tests.instructor.refusals lab1 lab4_sdpa   these

Each answer is run once. A wrong answer is *refused* if the visible check says no, and *named* if its message holds the words
that the catalogue asks for. Lab 3's kernels run in the simulator and are not compiled: what only the compiler refuses counts as
accepted here. What is accepted or not named is listed below the table, and then the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import nbformat

from instructor.build import build_lab
from instructor.points import lab_path
from tests.instructor import lab_cases
from tests.instructor.visible import VisibleChecks

LABS = {
    "lab1": "lab1",
    "lab2_flexattention": "lab2",
    "lab3_gluon": "lab3",
    "lab4_sdpa": "lab4",
}  # {lab: its tests' name}
GOAL, IDIOMS = 0.95, 40  # of wrong answers refused visibly; of right answers written in another way


@dataclass
class Counts:
    """What became of a lab's catalogues."""

    lab: str
    wrong: int = 0
    right: int = 0
    accepted: list[str] = field(default_factory=list)  # wrong answers that no visible check refuses
    unnamed: list[str] = field(default_factory=list)  # refused, in other words than the catalogue's
    refused: list[str] = field(default_factory=list)  # right answers that are refused, with the message

    @property
    def share(self) -> float:
        """Share of the wrong answers that are refused visibly."""
        return 1 - len(self.accepted) / self.wrong

    @property
    def good(self) -> bool:
        """Whether the goals are met, and every message names its mistake."""
        return self.share >= GOAL and self.right >= IDIOMS and not (self.unnamed or self.refused)

    def row(self) -> str:
        """One line of the table."""
        seen = self.wrong - len(self.accepted)
        return (
            f"{self.lab:20}{self.wrong:7}{seen:9}{self.share:8.1%}{seen - len(self.unnamed):7}"
            f"{self.right:14}{self.right - len(self.refused):10}"
        )


class Catalogue:
    """A lab's answers, its visible checks, and its wrong and unusual right answers."""

    def __init__(self, lab: str, tests=None) -> None:
        self.tests = tests or importlib.import_module(f"tests.instructor.test_{LABS[lab]}")
        built = build_lab(lab_path(lab))
        cells = nbformat.reads(built.instructor, as_version=4).cells
        self.answers, self.visible = lab_cases.answers_in(cells), VisibleChecks(cells)
        self.files = {
            cell.source.split("\n", 1)[0].split()[1]: cell.source.split("\n", 1)[1]
            for cell in cells
            if cell.cell_type == "code" and cell.source.startswith("%%writefile")
        }
        locked = {cell.metadata.get("nbgrader", {}).get("grade_id"): cell.source for cell in cells}
        names: dict = {}
        setup = getattr(self.tests, "SETUP", None)
        if setup is None:
            setup, names = f"{locked['setup']}\n{locked['launches']}", {"__name__": "notebook"}
        with contextlib.redirect_stdout(None):
            exec(setup, names)
        self.names = lab_cases.run_answers(self.answers, names)

    def wrong(self) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
        """Yield (mistake, cell, source of the cell, words of the message): one of the words is enough."""
        for wrong in self.tests.WRONG_ANSWERS:
            source = self._changed(wrong.cell, wrong.replaces) if wrong.replaces else self.answers[wrong.cell]
            words = wrong.seen or wrong.phrase
            yield wrong.mistake, wrong.cell, f"{source}\n\n{wrong.code}", (words,) if isinstance(words, str) else words
        for mistake, cell, changes, words in getattr(self.tests, "SLIPS", ()):
            yield mistake, cell, self._changed(cell, changes), (words,) if isinstance(words, str) else words

    def right(self) -> Iterator[tuple[str, str, str]]:
        """Yield (name, cell, source of the cell)."""
        for name, cell, change in self.tests.RIGHT_ANSWERS:
            code = f"{self.answers[cell]}\n\n{change}" if isinstance(change, str) else self._changed(cell, change)
            yield name, cell, code

    def _changed(self, cell: str, replaces) -> str:
        if whole := getattr(self.tests, "_replaced", None):  # of lab 3, which can replace a whole body
            return whole(self.answers[cell], replaces)
        source = self.answers[cell]
        for old, new in replaces:
            assert old in source, (cell, old)
            source = source.replace(old, new)
        return source

    def message(self, cell: str, source: str) -> str:
        """Return what the visible checks of an answer cell say to this source of it; "" if all accept it."""
        names = dict(self.names)
        files = dict(self.files)
        if source.startswith("%%writefile"):
            first, text = source.split("\n", 1)
            files[first.split()[1]] = text
        for file, text in files.items():
            Path(file).write_text(text, encoding="utf-8")
        with contextlib.redirect_stdout(None), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not source.startswith("%%writefile"):
                exec(compile(source, cell, "exec"), names)
            scope = self.visible.scope(names)
            messages = [self.visible.message(test, scope) for test in self.visible.of(cell)]
        return " ".join(message for message in messages if message)


def count(lab: str, cells: tuple[str, ...] = (), tests=None) -> Counts:
    """Run the visible checks of a lab, or of some answer cells of it, on its catalogues.

    Args:
        lab: a name in LABS.
        cells: ids of answer cells; empty for all.
        tests: what holds the catalogues; the lab's test module by default.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        catalogue, found = Catalogue(lab, tests), Counts(lab)
        # Compiling a kernel takes seconds, and the compiler's own refusals are not what is counted.
        with mock.patch("utils.machine.device.offline_compile_support", lambda: False), _kept_switches():
            for mistake, cell, source, words in catalogue.wrong():
                if cells and cell not in cells:
                    continue
                found.wrong += 1
                message = catalogue.message(cell, source)
                if not message:
                    found.accepted.append(f"{cell}: {mistake}")
                elif not any(word.lower() in message.lower() for word in words):
                    found.unnamed.append(f"{cell}: {mistake}: {message}")
            for name, cell, source in catalogue.right():
                if cells and cell not in cells:
                    continue
                found.right += 1
                if message := catalogue.message(cell, source):
                    found.refused.append(f"{cell}: {name}: {message}")
    return found


@contextlib.contextmanager
def _kept_switches() -> Iterator[None]:
    """Undo what a wrong answer of lab 4 leaves behind: SDPA's switches."""
    import torch

    kinds = ("flash", "mem_efficient", "math", "cudnn")
    before = [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in kinds]
    try:
        yield
    finally:
        for kind, enabled in zip(kinds, before, strict=True):
            getattr(torch.backends.cuda, f"enable_{kind}_sdp")(enabled)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.instructor.refusals", description=__doc__.splitlines()[0])
    parser.add_argument(
        "labs", nargs="*", choices=[[], *LABS], metavar="LAB", help=f"of {', '.join(LABS)}; all by default"
    )
    given = parser.parse_args()
    os.environ.setdefault("MPLBACKEND", "Agg")
    print(
        f"{'lab':20}{'wrong':>7}{'refused':>9}{'share':>8}{'named':>7}{'right idioms':>14}{'accepted':>10}", flush=True
    )
    counts = []
    for lab in given.labs or LABS:
        counts.append(count(lab))
        print(counts[-1].row(), flush=True)
    for found in counts:
        for what in ("accepted", "unnamed", "refused"):
            for line in getattr(found, what):
                kind = "right answer refused" if what == "refused" else f"wrong answer {what}"
                print(f"{found.lab}: {kind}: {line[:400]}")
    return 0 if all(found.good for found in counts) else 1


if __name__ == "__main__":
    sys.exit(main())
