"""Read a lab's source, text in jupytext's percent format, into cells with their roles and complete nbgrader metadata.

This module checks each single cell, and reports problems with file and line. `instructor.points` checks that cells and
questions fit together, and `instructor.build` checks the students' notebooks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from utils.validation import UserError

SCHEMA_VERSION = 3  # the version of nbgrader's cell metadata
KEYS = ("grade_id", "grade", "solution", "locked", "task", "points")
GRADE_ID = re.compile(r"[a-zA-Z0-9_\-]+")  # nbgrader accepts these ids
QUESTION_ID = re.compile(r"(q|bonus_)(\d+)_(\d+)(?:_[a-z0-9_]+)?")
REGIONS = ("SOLUTION", "HIDDEN TESTS", "MARK SCHEME")
STUBS = ("YOUR CODE HERE", "YOUR ANSWER HERE")
# This line at the end of an answer cell stands for a test cell behind it.
TESTS = re.compile(r"### TESTS (\S+), ([\d.]+) points?: (.+)")
CHECKS = Path(__file__).resolve().parent / "checks"  # the hidden checks, a package for each lab
# jupytext stores the spelling of a cell under these keys; the notebook does not need them.
JUPYTEXT_KEYS = ("lines_to_next_cell", "lines_to_end_of_cell_marker", "cell_marker")


class LabError(UserError):
    """A lab that cannot be built, with one sentence for each problem."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join(problems))


@dataclass(frozen=True)
class Region:
    """A marked stretch of a cell: lines `first` to `last` of its source, markers included, counted from 0."""

    kind: str
    first: int
    last: int


@dataclass
class Cell:
    """One cell of a lab's source."""

    cell_type: str  # code, markdown or raw
    source: str
    line: int  # the line of its marker in the file, counted from 1
    tags: list[str] = field(default_factory=list)
    nbgrader: dict | None = None  # complete nbgrader metadata
    regions: list[Region] = field(default_factory=list)

    @property
    def grade_id(self) -> str | None:
        """The cell's id in nbgrader's metadata, or None."""
        return self.nbgrader["grade_id"] if self.nbgrader else None

    @property
    def role(self) -> str:
        """The cell's role: prose, code, locked, answer, tests, manual (an answer graded by hand) or task."""
        meta = self.nbgrader
        if meta is None:
            return "code" if self.cell_type == "code" else "prose"
        if meta["task"]:
            return "task"
        if meta["solution"]:
            return "manual" if meta["grade"] else "answer"
        return "tests" if meta["grade"] else "locked"

    @property
    def points(self) -> float:
        """The cell's points; 0 if it is not graded."""
        return self.nbgrader.get("points", 0) if self.nbgrader else 0

    @property
    def question(self) -> str | None:
        """The question this cell belongs to, by its id: `q1_1` or `bonus_4_5`."""
        match = QUESTION_ID.fullmatch(self.grade_id or "")
        return f"{match[1]}{match[2]}_{match[3]}" if match else None

    def has(self, kind: str) -> bool:
        """Return whether the cell has a region of this kind, one of `REGIONS`."""
        return any(region.kind == kind for region in self.regions)


@dataclass
class Lab:
    """A lab's source: its name, its file and its cells."""

    name: str
    path: Path
    cells: list[Cell]

    def at(self, cell: Cell) -> str:
        """Return a cell's place, such as `lab1.py, line 40 (cell q1_1)`."""
        name = f" (cell {cell.grade_id})" if cell.grade_id else ""
        return f"{self.path.name}, line {cell.line}{name}"


def read_lab(path: Path) -> Lab:
    """Read `path` and check each cell by itself; `LabError` names all problems."""
    import jupytext

    text = path.read_text(encoding="utf-8")
    notebook = jupytext.reads(text, fmt="py:percent")
    problems: list[str] = []
    lab = Lab(path.stem, path, [])
    for raw, line in _split_tests(notebook.cells, text):
        cell = Cell(raw.cell_type, raw.source.rstrip(), line)
        lab.cells.append(cell)
        metadata = {k: v for k, v in raw.metadata.items() if k not in JUPYTEXT_KEYS}
        cell.tags = sorted(set(metadata.pop("tags", [])))
        fields = metadata.pop("nbgrader", None)
        marker = text.splitlines()[line - 1]
        if fields is None and "nbgrader" in marker:
            problems.append(f"{lab.at(cell)}: the nbgrader metadata is no valid JSON: {marker}")
        elif metadata:
            problems.append(
                f"{lab.at(cell)}: unknown cell metadata {', '.join(map(repr, sorted(metadata)))}; "
                "a marker line takes nbgrader={...} and tags=[...]."
            )
        if fields is not None:
            wrong = _metadata_problems(cell, dict(fields))
            problems += [f"{path.name}, line {line} (cell {fields.get('grade_id', '?')}): {p}" for p in wrong]
            if not wrong:
                cell.nbgrader = _complete(dict(fields))
            if cell.nbgrader and cell.role == "tests" and (CHECKS / lab.name).is_dir():
                cell.source += _hidden_tests(cell.source, lab.name)
        problems += [f"{lab.at(cell)}: {p}" for p in find_regions(cell)]
        if fields is None or cell.nbgrader is not None:  # a cell with wrong metadata has no role
            problems += [f"{lab.at(cell)}: {p}" for p in _role_problems(cell)]
    seen: dict[str, Cell] = {}
    for cell in lab.cells:
        if cell.grade_id in seen:
            problems.append(f"{lab.at(cell)}: the id is used before, in line {seen[cell.grade_id].line}.")
        elif cell.grade_id:
            seen[cell.grade_id] = cell
    if not lab.cells:
        problems.append(f"{path.name} has no cells.")
    if problems:
        raise LabError(problems)
    return lab


def _split_tests(cells: list, text: str) -> Iterator[tuple]:
    """Yield the cells with the lines of their markers; each `### TESTS` line becomes a test cell behind its answer."""
    lines = text.splitlines()
    for cell, line in zip(cells, _marker_lines(text, cells), strict=True):
        tests = TESTS.findall(cell.source)
        cell.source = TESTS.sub("", cell.source)
        yield cell, line
        for grade_id, points, call in tests:
            meta = {"grade_id": grade_id, "grade": True, "points": float(points) if "." in points else int(points)}
            line = next(i for i in range(line, len(lines)) if f"### TESTS {grade_id}," in lines[i]) + 1
            yield type(cell)(cell_type="code", source=call, metadata={"nbgrader": meta}), line


def _hidden_tests(source: str, lab: str) -> str:
    """Return the hidden tests of a cell of one line: `check_gemm(gemm)` also runs the lab's hidden check `gemm`."""
    call = re.fullmatch(r"check_(\w+\(.*\))", source)
    if call is None:
        return ""
    return (
        f"\n### BEGIN HIDDEN TESTS\nfrom instructor.checks import {lab} as hidden\n"
        f"hidden.{call[1]}.raise_if_wrong()\n### END HIDDEN TESTS"
    )


def _marker_lines(text: str, cells: list) -> list[int]:
    """Return the line of each cell's marker, counted from 1.

    A `# %%` inside of a string starts no cell. So this compares the text below a marker with the cell.
    """
    lines = text.splitlines()
    candidates = [i for i, line in enumerate(lines) if re.match(r"# %%", line)]
    found, start = [], 0
    for cell in cells:
        first = next((line.strip("#% ") for line in cell.source.splitlines() if line.strip("#% ")), "")
        matching = [c for c in candidates[start:] if not first or first in "\n".join(lines[c + 1 : c + 6])]
        if matching:
            start = candidates.index(matching[0]) + 1
        found.append(matching[0] + 1 if matching else 1)
    return found


def _metadata_problems(cell: Cell, fields: dict) -> list[str]:
    problems = []
    for key in sorted(set(fields) - set(KEYS)):
        problems.append(f"unknown nbgrader metadata {key!r}; the source may say {', '.join(KEYS)}.")
    grade_id = fields.get("grade_id")
    if not grade_id:
        problems.append("the nbgrader metadata has no grade_id.")
    elif not isinstance(grade_id, str) or not GRADE_ID.fullmatch(grade_id):
        problems.append(f"nbgrader refuses the id {grade_id!r}: letters, digits, _ and - are allowed.")
    elif len(grade_id) > 64:
        problems.append(f"the id is {len(grade_id)} characters long; a notebook's cell ids end at 64.")
    for key in ("grade", "solution", "locked", "task"):
        if not isinstance(fields.get(key, False), bool):
            problems.append(f"{key} is {fields[key]!r} and should be true or false.")
    grade, solution, task = (bool(fields.get(key)) for key in ("grade", "solution", "task"))
    points = fields.get("points")
    if solution and fields.get("locked"):
        problems.append("an answer may not be locked: what a student writes there would be thrown away.")
    if not (grade or solution or task or fields.get("locked")):
        problems.append("the metadata says nothing: neither grade, solution, task nor locked is true.")
    if task and (grade or solution):
        problems.append("a task cell is neither a grade nor a solution cell.")
    if task and cell.cell_type != "markdown":
        problems.append("a task cell has to be markdown.")
    if cell.cell_type != "code" and not task and grade != solution:
        problems.append("a markdown answer needs both grade and solution: it is graded by hand.")
    if grade or task:
        if isinstance(points, bool) or not isinstance(points, int | float):
            problems.append("a graded cell needs points, a number.")
        elif points <= 0:
            problems.append(f"a graded cell is worth {points} points; it should be more than 0.")
        if isinstance(grade_id, str) and not QUESTION_ID.fullmatch(grade_id):
            problems.append("the id of a graded cell names its question: q1_1, q1_1_tests or bonus_4_5_tests.")
    elif points:
        problems.append("points stand in a cell that is not graded.")
    if solution and not grade and isinstance(grade_id, str) and not QUESTION_ID.fullmatch(grade_id):
        problems.append("the id of an answer names its question: q1_1 or bonus_4_5.")
    return problems


def _complete(fields: dict) -> dict:
    """Return nbgrader's full metadata for the short form of the source."""
    grade, solution, task = (bool(fields.get(key)) for key in ("grade", "solution", "task"))
    meta = {
        "grade": grade,
        "grade_id": fields["grade_id"],
        "locked": not solution,  # the grader restores locked cells: tests, tasks and read-only cells, never answers
        "schema_version": SCHEMA_VERSION,
        "solution": solution,
        "task": task,
    }
    if grade or task:
        meta["points"] = fields["points"]
    return meta


def find_regions(cell: Cell) -> list[str]:
    """Fill `cell.regions` and return problems. As nbgrader, this searches for the markers anywhere in a line."""
    problems: list[str] = []
    open_at: dict[str, int] = {}
    cell.regions = []
    for number, line in enumerate(cell.source.splitlines()):
        for kind in REGIONS:
            place = f"line {number + 1} of the cell"
            if f"BEGIN {kind}" in line:
                if kind in open_at:
                    problems.append(f"BEGIN {kind} inside of another one ({place}).")
                elif open_at and kind != "MARK SCHEME":
                    problems.append(f"BEGIN {kind} inside of a {next(iter(open_at))} region ({place}).")
                open_at.setdefault(kind, number)
            elif f"END {kind}" in line:
                if kind not in open_at:
                    problems.append(f"END {kind} without a BEGIN ({place}).")
                else:
                    cell.regions.append(Region(kind, open_at.pop(kind), number))
        if "AUTOTEST" in line and line.lstrip().startswith("#"):
            problems.append("nbgrader's AUTOTEST lines are not supported: write the test out.")
    problems += [f"BEGIN {kind} without END {kind}." for kind in open_at]
    return problems


def _role_problems(cell: Cell) -> list[str]:
    problems, role = [], cell.role
    if cell.nbgrader is None:
        for kind in REGIONS:
            if cell.has(kind):
                problems.append(f"a {kind} region in a cell without nbgrader metadata: give the cell a grade_id.")
        for stub in STUBS:
            if any(line.strip(" #_*") == stub for line in cell.source.splitlines()):
                problems.append(f"{stub!r} stands in a cell without nbgrader metadata: an answer needs a grade_id.")
    elif cell.has("SOLUTION") and role not in ("answer", "manual"):
        problems.append("a SOLUTION region in a cell that is no solution cell.")
    if cell.nbgrader and cell.has("HIDDEN TESTS") and role != "tests":
        problems.append("hidden tests belong into a test cell, with grade and points.")
    if cell.nbgrader and cell.has("MARK SCHEME"):
        inside = all(_inside_solution(cell, r) for r in cell.regions if r.kind == "MARK SCHEME")
        whole = cell.cell_type == "markdown" and not cell.has("SOLUTION")
        if role not in ("manual", "task"):
            problems.append("a marking scheme belongs into a cell graded by hand.")
        elif role == "manual" and not (inside or whole):
            problems.append("put the marking scheme inside of the SOLUTION markers (nbgrader refuses it outside).")
    if "### TESTS" in cell.source:
        problems.append("a test cell's line reads `### TESTS q1_1_tests, 3 points: check_gemm(gemm)`.")
    if role in ("answer", "manual") and cell.cell_type == "code" and not cell.has("SOLUTION"):
        problems.append("a code answer needs BEGIN SOLUTION and END SOLUTION; keep def and docstring outside.")
    if cell.cell_type == "code":
        problems += _code_problems(cell)
    return problems


def _inside_solution(cell: Cell, region: Region) -> bool:
    return any(r.kind == "SOLUTION" and r.first < region.first and region.last < r.last for r in cell.regions)


def parse_code(source: str) -> ast.Module:
    """Return the syntax tree of a code cell, which may have IPython's magics and shell lines."""
    from IPython.core.inputtransformer2 import TransformerManager

    return ast.parse(TransformerManager().transform_cell(source))


def _code_problems(cell: Cell) -> list[str]:
    try:
        tree = parse_code(cell.source)
    except SyntaxError as error:
        return [f"no valid Python: {error.msg} (line {error.lineno} of the cell)."]
    if cell.role != "tests":
        return []
    problems = []
    calls = {_name(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    asserts = any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(tree))
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if not asserts and not any(_may_raise(name, own) for name in calls):
        problems.append("the tests cannot fail: nothing is asserted, and no verdict has .raise_if_wrong().")
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _name(node.value) in own:
            problems.append(f"the verdict of {_name(node.value)}(...) is dropped: add .raise_if_wrong().")
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr) and not problems:
        name = _name(last.value) if isinstance(last.value, ast.Call) else ""
        if not _may_raise(name, own) and name != "print":
            problems.append(
                "the last line is an expression: nbgrader takes its value for a partial grade. "
                "End in .raise_if_wrong(), assert or raise."
            )
    return problems


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", "") or getattr(call.func, "id", ""))


def _may_raise(name: str, own: set[str]) -> bool:
    """Return whether a call may raise. A check of `utils` raises; a check that the cell defines (`own`) does not."""
    return name not in own and (name == "raise_if_wrong" or name.startswith(("assert", "expect_", "forbid", "check_")))
