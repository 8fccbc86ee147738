"""Which names of cells above it does each cell of a lab use? The build writes that into the cell, as a call of `needs`.

A cell that uses the answer `gemm_naive` of Question 1.1, and `roofs` of the setup, begins in the notebook with

    from utils.checking import needs; needs(gemm_naive="1.1", after="roofs")

so that a student who restarted the kernel, skipped a cell or renamed a function reads which cell is missing, and no
NameError, not even for `needs`. Nobody writes this line by hand: it follows from the code.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from instructor.names import FILE_CELL, bound_names, python_of, used_names
from instructor.source import QUESTION_ID, Cell, Lab

NAME = "needs"  # of the function, which every cell imports anew
IPYTHONS = {"display", "get_ipython"}  # names that a notebook has without an import
# A run may skip the statements inside of these, and then the names that they define are missing.
_MAYBE = (ast.If, ast.Try, ast.For, ast.While, ast.Match)
_PLAIN = (ast.Import, ast.ImportFrom)


@dataclass
class CellNeeds:
    """What one code cell needs from cells above it."""

    own: str = ""  # a test cell: the question that it tests
    answers: dict[str, str] = field(default_factory=dict)  # {name: "1.1" or "Bonus 1.6"}
    files: dict[str, str] = field(default_factory=dict)  # {file that an answer cell writes: its question}
    after: list[str] = field(default_factory=list)  # one name of each other cell that it needs

    @property
    def line(self) -> str:
        """The line that the cell begins with; empty if it needs nothing."""
        arguments = [repr(self.own).replace("'", '"')] if self.own else []
        arguments += [f'{name}="{question}"' for name, question in self.answers.items()]
        if self.files:
            pairs = ", ".join(f'"{name}": "{question}"' for name, question in self.files.items())
            arguments.append(f"files={{{pairs}}}")
        arguments += [f'after="{" ".join(self.after)}"'] if self.after else []
        if not (self.answers or self.files or self.after):
            return ""
        return f"from utils.checking import {NAME}; {NAME}({', '.join(arguments)})\n"


def question_label(cell: Cell) -> str:
    """`1.1` or `Bonus 1.6`, from the cell's id; empty for a cell of no question."""
    match = QUESTION_ID.fullmatch(cell.grade_id or "")
    return f"{'Bonus ' if match[1] == 'bonus_' else ''}{match[2]}.{match[3]}" if match else ""


def find_needs(lab: Lab) -> dict[int, CellNeeds]:
    """{place of a code cell in the lab: its needs}, for all code cells but answers and locked ones."""
    answers: dict[str, str] = {}  # name -> question
    files: dict[str, str] = {}  # file that an answer cell writes -> question
    origin: dict[str, int] = {}  # name -> the last cell above that defines it
    indirect: dict[str, dict[str, str]] = {}  # name of a plain cell -> the answers without which it is not defined
    found: dict[int, CellNeeds] = {}
    for place, cell in enumerate(lab.cells):
        if cell.role == "answer" and (file := FILE_CELL.match(cell.source)):
            files[file[1]] = question_label(cell)
        text = python_of(cell.source) if cell.cell_type == "code" else None
        if text is None or cell.source.lstrip().startswith("%%"):
            continue
        tree = ast.parse(text)
        if cell.role == "answer":
            for node in tree.body:
                if not isinstance(node, _PLAIN):
                    answers |= dict.fromkeys(bound_names(node), question_label(cell))
            continue
        used = used_names(cell.source) - bound_names(tree)
        if "*" in origin:  # what no cell defines comes with the setup's `from utils import *`
            origin |= dict.fromkeys(used - answers.keys() - origin.keys() - IPYTHONS, origin["*"])
        mine = {name: answers[name] for name in answers if name in used}
        # A cell that asks `is_answered(name)` itself goes on without the answer.
        mine = {name: question for name, question in mine.items() if f"is_answered({name})" not in cell.source}
        others = sorted(used & origin.keys())
        if cell.role != "tests":
            for name in others:
                mine = {**mine, **indirect.get(name, {})}
        if cell.role != "locked":
            first = {origin[name]: name for name in reversed(others)}
            own = question_label(cell) if cell.role == "tests" else ""
            read = {name: question for name, question in files.items() if name in cell.source}
            found[place] = CellNeeds(own, mine, read, [first[cell_place] for cell_place in sorted(first)])
        for node in tree.body:
            if not isinstance(node, _MAYBE):
                for name in bound_names(node) - answers.keys():
                    origin[name], indirect[name] = place, mine
    return found
