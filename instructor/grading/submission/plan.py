"""Merge a submission with the instructor's notebook, and decide which of its cells run, and where.

A submission is data. Answers are taken from it by their ids; locked cells and tests come from the instructor's
notebook; a student's extra cells keep their places. Cells of the instructor's that only show something (plots, timing
tables) are left out if the student did not change them and nothing graded uses a name that they define.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbformat import NotebookNode

from instructor.build import Built
from instructor.grading.submission import harmless
from instructor.grading.submission.results import CellResult, Flag, SubmissionResult
from instructor.grading.wire.channel import without_surrogates
from instructor.names import FILE_CELL, bound_names, is_too_much, names_taken, python_of, used_names
from instructor.source import QUESTION_ID

MAX_NOTEBOOK = 64 << 20  # bytes
MAX_CELLS = 2000
_DYNAMIC = re.compile(r"\b(globals|eval|exec|locals|get_ipython|vars)\s*\(|^\s*%run\b", flags=re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} (Bonus )?Question (\d+)\.(\d+)", flags=re.MULTILINE)


class Unreadable(ValueError):
    """A submission that is no notebook; the message is for the student."""


class Needs(NamedTuple):
    """What a test cell needs to run."""

    names: list[str]  # names that come from the student
    files: list[str]  # files that come from the student


@dataclass
class Step:
    """One code cell of the merged notebook, or one that a person grades."""

    kind: str  # student (runs in the student's process), tests, skipped, manual (prose graded by hand)
    cell: NotebookNode  # the cell of the merged notebook
    name: str  # grade_id, or the place of an extra cell
    question: str  # the question that it belongs to, or counts for
    source: str = ""
    answer: bool = False
    points: float = 0.0
    by_hand: bool = False
    untouched: bool = False
    submitted: list = field(default_factory=list)  # skipped: the outputs that came with the submission
    needs: Needs = field(default_factory=lambda: Needs([], []))  # of tests


@dataclass
class Plan:
    """The merged notebook and what to do with its cells."""

    notebook: NotebookNode
    steps: list[Step]
    files: dict[str, str]  # that cells of the instructor's write, and no answer
    foreign: bool  # none of the lab's tests is in it


# ---- reading -----------------------------------------------------------------------------------------------------


def read_notebook(text: str | bytes) -> NotebookNode:
    """Read a submission as a notebook of format 4; `Unreadable` says in a sentence what is wrong with it."""
    data = text.encode("utf-8", errors="replace") if isinstance(text, str) else bytes(text)
    if not data.strip():
        raise Unreadable("The submitted file is empty.")
    if len(data) > MAX_NOTEBOOK:
        raise Unreadable(f"The submitted notebook has {len(data) >> 20} MB; at most {MAX_NOTEBOOK >> 20} are read.")
    try:
        raw = json.loads(data.decode("utf-8-sig"))
        if b"\\ud" in data.lower():
            raw = without_surrogates(raw)
        if not isinstance(raw, dict):
            raise ValueError("it is no JSON object")
        notebook = nbformat.from_dict(raw)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"The submitted file is no notebook: {str(error)[:200]}") from None
    cells = notebook.get("cells")
    if not isinstance(cells, list) or not cells:
        raise Unreadable("The submitted notebook has no cells. Save it with a Jupyter that writes format 4.")
    if len(cells) > MAX_CELLS:
        raise Unreadable(f"The submitted notebook has {len(cells)} cells; at most {MAX_CELLS} are read.")
    return notebook


def not_graded(built: Built, student: str, kind: str, why: str) -> SubmissionResult:
    """The result of a submission that cannot be graded at all: no points, and a flag of this kind that says why."""
    facts = [cell.metadata.get("nbgrader", {}) for cell in read_built(built.student).cells]
    cells = {f["grade_id"]: CellResult(0.0, "missing", why) for f in facts if "points" in f}
    return SubmissionResult(student, built.name, cells, (Flag("", kind, why),), {}, built.student)


def _grade_id(cell) -> str | None:
    metadata = cell.get("metadata")
    fields = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    grade_id = fields.get("grade_id") if isinstance(fields, dict) else None
    return grade_id if isinstance(grade_id, str) else None


def _source(cell) -> str:
    source = cell.get("source", "")
    source = "".join(map(str, source)) if isinstance(source, list) else str(source)
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    return source.encode("utf-8", errors="replace").decode("utf-8")


def _squeezed(source: str) -> str:
    return "\n".join(line.rstrip() for line in source.strip().splitlines())


# ---- merging -----------------------------------------------------------------------------------------------------


def make_plan(built: Built, submission: str | bytes) -> Plan:
    """Merge a submission with the notebooks of its lab; `Unreadable` if it is no notebook."""
    original, released = read_built(built.instructor).cells, read_built(built.student)
    lab = _Lab(original, {cell.id: cell for cell in released.cells})
    submitted = read_notebook(submission)
    merged = _merge(submitted, lab)
    notebook = nbformat.v4.new_notebook(metadata=released.metadata)
    notebook.nbformat_minor = 5
    steps: list[Step] = []
    section, taken, room = "", set(), harmless.MAX_ALL
    for number, (cell, known) in enumerate(merged):
        name = f"{known.id}" if known is not None else f"extra-{number}"
        node = _new_cell(cell.get("cell_type"), f"{name[:50]}-{number}" if name in taken else name, _source(cell))
        taken.add(node.id)
        step = _step_of(cell, known, node, lab)
        if not (known is not None and node.source in (known.source, lab.released[known.id].source)):
            node.source = harmless.shortened(
                node.source, min(room, harmless.MAX_CELL), "# " if node.cell_type == "code" else ""
            )
            room = max(0, room - len(node.source))
        if node.cell_type != "code" and not (known is not None and node.source == known.source):
            node.source = harmless.harmless_markdown(node.source)
            pictures = harmless.harmless_attachments(cell.get("attachments"))
            if pictures:
                node["attachments"] = pictures
            node.source = harmless.without_lost_pictures(node.source, pictures)
        if known is not None:
            node.metadata.update(json.loads(json.dumps(lab.released[known.id].metadata)))
        notebook.cells.append(node)
        if known is not None and known.cell_type == "markdown" and (heading := _HEADING.search(known.source)):
            section = f"{'bonus_' if heading[1] else 'q'}{heading[2]}_{heading[3]}"
        if step is not None:
            step.question = step.question or section
            steps.append(step)
    _attribute(steps)
    needs = plan_tests(built.instructor)
    for step in steps:
        if step.kind == "tests":
            step.needs = needs[step.name]
    _leave_out(steps)
    texts = {_squeezed(_source(cell)) for cell in submitted.cells if isinstance(cell, dict)}
    foreign = texts.isdisjoint(_squeezed(lab.released[name].source) for name in needs)
    return Plan(notebook, steps, _files_of_lab(original), foreign)


def _files_of_lab(original: list[NotebookNode]) -> dict[str, str]:
    """{name: text} of the files that cells of the lab write which are no answers."""
    found = {}
    for cell in original:
        if cell.cell_type == "code" and not _is_answer(cell) and (match := FILE_CELL.match(cell.source)):
            found[Path(match[1]).name] = cell.source.partition("\n")[2] + "\n"
    return found


class _Lab:
    """The cells of a lab: the instructor's in order, and the students' by id."""

    def __init__(self, original: list, released: dict[str, NotebookNode]):
        self.original, self.released = original, released
        self.order = {cell.id: place for place, cell in enumerate(original)}
        # Cells before the first answer are the setup.
        self.first_answer = next((place for place, cell in enumerate(original) if _is_answer(cell)), len(original))


def read_built(text: str) -> NotebookNode:
    """Read a notebook that the build wrote. It is valid; to validate it again would take longer than to read it."""
    return nbformat.v4.nbjson.reads(text)


def _new_cell(kind: str, name: str, source: str) -> NotebookNode:
    """Make a cell without validating it, as nbformat would: the notebook is validated as a whole when it is written."""
    more: dict = {"execution_count": None, "outputs": []} if kind == "code" else {}
    kind = kind if kind in ("code", "markdown") else "raw"
    return nbformat.from_dict({"id": name, "cell_type": kind, "metadata": {}, "source": source, **more})


def _is_answer(cell) -> bool:
    return bool(cell.metadata.get("nbgrader", {}).get("solution"))


def question_of(grade_id: str) -> str:
    """The question that a cell belongs to by its id: `q1_1_tests` -> `q1_1`."""
    match = QUESTION_ID.fullmatch(grade_id)
    return f"{match[1]}{match[2]}_{match[3]}" if match else grade_id


def question_title(question: str) -> str:
    """`q1_1` -> `Question 1.1`."""
    kind, _, number = question.partition("_")
    if kind == "bonus":
        return f"Bonus {number.replace('_', '.')}"
    return f"Question {question[1:].replace('_', '.')}" if question[:1] == "q" else "the notebook"


def _merge(submission: NotebookNode, lab: _Lab) -> list[tuple]:
    """[(cell of the submission or the lab, the lab's cell that it is or None)] in running order."""
    original, released, order = lab.original, lab.released, lab.order
    by_grade_id = {grade_id: cell for cell in original if (grade_id := _grade_id(cell))}
    plain = {cell.id: cell for cell in original if not _grade_id(cell)}
    groups: dict[int, list] = {-1: []}  # place in the lab -> the cell there, and extra cells after it
    seen: set[str] = set()
    last = -1
    for cell in submission.cells:
        if not isinstance(cell, dict) or cell.get("cell_type") not in ("code", "markdown", "raw"):
            continue
        grade_id = _grade_id(cell)
        known = by_grade_id.get(grade_id) if grade_id else plain.get(str(cell.get("id")))
        if known is None:
            groups.setdefault(last, []).append((cell, None))
            continue
        if known.id in seen:
            if _is_answer(known) or grade_id is None:  # a copied answer runs in its place, as an extra cell
                groups.setdefault(last, []).append((cell, None))
            continue
        seen.add(known.id)
        last = order[known.id]
        groups.setdefault(last, []).insert(0, (_chosen(cell, known, released), known))
    for cell in original:
        if cell.id not in seen and _grade_id(cell):  # locked cells and tests are put back, answers stay empty
            groups.setdefault(order[cell.id], []).insert(0, (released[cell.id], cell))
    return [entry for place in sorted(groups) for entry in groups[place]]


def _chosen(cell: dict, known: NotebookNode, released: dict):
    """The student's text for answers and plain cells, the instructor's for locked cells and tests."""
    if not known.metadata.get("nbgrader"):
        return cell
    return {**cell, "cell_type": known.cell_type} if _is_answer(known) else released[known.id]


def _step_of(cell: dict, known: NotebookNode | None, node: NotebookNode, lab: _Lab) -> Step | None:
    """What to do with a merged cell; None for prose that nobody grades.

    `cell` was chosen, with the outputs that came along; `known` is the lab's cell that it is; `node` is in the merged notebook.
    """
    metadata = known.metadata.get("nbgrader", {}) if known is not None else {}
    grade, solution = bool(metadata.get("grade")), bool(metadata.get("solution"))
    name = metadata.get("grade_id") or node.id
    outputs = cell.get("outputs")
    step = Step(
        kind="student",
        cell=node,
        name=name,
        question=question_of(name) if grade or solution else "",
        source=node.source,
        answer=solution,
        points=float(metadata.get("points", 0)),
        by_hand=(grade and solution) or bool(metadata.get("task")),
        untouched=known is not None and _squeezed(node.source) == _squeezed(lab.released[known.id].source),
        submitted=outputs if isinstance(outputs, list) else [],
    )
    if node.cell_type != "code":
        step.kind = "manual"
        return step if step.by_hand else None
    if known is not None and grade and not solution:
        step.kind, step.source = "tests", known.source
    elif known is not None and lab.order[known.id] < lab.first_answer and step.untouched:
        step.kind = "skipped"  # the setup, which the warm process has run
    return step


def _attribute(steps: list[Step]) -> None:
    """Let cells under no question's heading count for the question before them, or else for the one after."""
    for direction in (steps, steps[::-1]):
        last = ""
        for step in direction:
            last = step.question or last
            step.question = step.question or last


def plan_tests(instructor_notebook: str) -> dict[str, Needs]:
    """{test cell: what it takes from the student} for each test cell of a lab; the rest stands in the cell or the setup."""
    original = read_built(instructor_notebook).cells
    answers = [c for c in original if c.cell_type == "code" and _is_answer(c)]
    from_student: set[str] = set()
    for cell in answers:
        for node in ast.parse(python_of(cell.source) or "").body:
            if not isinstance(node, ast.Import | ast.ImportFrom):  # a module is the instructor's, whoever imports it
                from_student |= bound_names(node)
    files = [match[1] for c in answers if (match := FILE_CELL.match(c.source.lstrip()))]
    return {
        name: Needs(sorted(used_names(cell.source) & from_student), [f for f in files if f in cell.source])
        for cell in original
        if cell.cell_type == "code"
        and (name := _grade_id(cell))
        and cell.metadata["nbgrader"].get("grade")
        and not _is_answer(cell)
    }


def _leave_out(steps: list[Step]) -> None:
    """Skip the instructor's own unchanged cells that nothing needs."""
    run = [s for s in steps if s.kind == "student"]
    needed_anyway = [s for s in run if not s.untouched or "nbgrader" in s.cell.metadata]
    if any(is_too_much(s.source) or _DYNAMIC.search(s.source) for s in needed_anyway):
        return
    names = set().union(*(names_taken(s.source) for s in needed_anyway))
    rest = [s for s in run if s not in needed_anyway]
    while more := [s for s in rest if bound_names(ast.parse(python_of(s.source) or "")) & names]:
        for step in more:
            rest.remove(step)
            names |= names_taken(step.source)
    for step in rest:
        step.kind = "skipped"
