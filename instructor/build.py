"""Build a lab's notebooks: source -> instructor notebook -> student notebook. Every build gives the same bytes.

nbgrader's own preprocessors make the student notebook, so that `nbgrader generate_assignment` on the instructor
notebook makes the same cells. Then the build searches the result for lines that must not reach students.
"""

from __future__ import annotations

import copy
import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from instructor.hints import fill_hints
from instructor.points import Question, fill_points, find_questions
from instructor.source import REGIONS, Cell, Lab, LabError, parse_code, read_lab
from utils.files import ROOT, repository_address, write_whole

CANARY_LENGTH = 16  # in characters; shorter lines, such as `return c`, give nothing away
QUOTE_LENGTH = 32  # a public line may not contain a secret line of at least this length
FETCH = """\
import importlib.util

if importlib.util.find_spec("utils") is None:  # a bare machine, such as Colab or Kaggle: fetch the course
    !git clone -q --depth 1 {address} gpu-efficiency-labs
    %cd gpu-efficiency-labs
    %pip install -q -c constraints.txt -e ."""
PUBLIC = "# public"  # this comment marks a line of a solution that students may see
MAY_RAISE = "raises-exception"  # JupyterLab's "Run All" and nbclient go on after a cell with this tag
COLLAPSED = "collapsed"  # JupyterLab folds a cell with this tag: a test cell that defines a check
# Steps of `nbgrader generate_assignment` for a course folder only: its header, its autotests, its gradebook.
COURSE_STEPS = ("IncludeHeaderFooter", "InstantiateTests", "SaveCells")


@dataclass(frozen=True)
class Built:
    """A lab's two notebooks as text, and its questions."""

    name: str
    instructor: str = field(repr=False)
    student: str = field(repr=False)
    questions: list[Question] = field(repr=False)
    hints: dict[str, list[str]] = field(repr=False)  # {number of a question: kinds of its hints}

    def files(self, root: Path = ROOT) -> dict[Path, str]:
        """The notebooks that a build writes, as {path: text}."""
        return {
            root / "build" / "instructor" / self.name / f"{self.name}.ipynb": self.instructor,
            root / f"{self.name}.ipynb": self.student,
        }


def build_lab(path: Path) -> Built:
    """Build both notebooks of the lab at `path`; `LabError` has a sentence for each problem."""
    lab = read_lab(path)
    questions = find_questions(lab)
    fill_points(lab, questions)
    hints = fill_hints(lab)
    secrets = secret_lines(lab)
    instructor = instructor_notebook(lab)
    student = student_notebook(instructor)
    problems = _student_problems(lab, student, secrets)
    if problems:
        raise LabError(problems)
    if address := repository_address():
        for notebook in (instructor, student):
            notebook.cells.insert(1, nbformat.v4.new_code_cell(FETCH.format(address=address), id="fetch"))
    return Built(lab.name, notebook_text(instructor), notebook_text(student), questions, hints)


def instructor_notebook(lab: Lab) -> NotebookNode:
    """Return the notebook with solutions, hidden tests and marking schemes."""
    notebook = nbformat.v4.new_notebook()
    notebook.nbformat_minor = 5
    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        language_info={"name": "python"},
    )
    repeats: dict[str, int] = {}
    first_answer = next((place for place, cell in enumerate(lab.cells) if cell.role == "answer"), len(lab.cells))
    for place, cell in enumerate(lab.cells):
        make = getattr(nbformat.v4, f"new_{cell.cell_type}_cell")
        node = make(cell.source, id=_cell_id(cell, repeats))
        may_raise = cell.cell_type == "code" and place >= first_answer  # if an answer is missing or wrong
        tags = sorted({*cell.tags, MAY_RAISE} if may_raise else cell.tags)
        if tags:
            node.metadata["tags"] = tags
        if COLLAPSED in tags or (cell.role == "tests" and "\ndef " in cell.source):
            node.metadata["jupyter"] = {"source_hidden": True}
        if cell.nbgrader:
            node.metadata["nbgrader"] = NotebookNode(cell.nbgrader)
        notebook.cells.append(node)
    return notebook


def _cell_id(cell: Cell, repeats: dict[str, int]) -> str:
    """Return the grade id, or a hash of the content, so that an id does not depend on the cells around it."""
    if cell.grade_id:
        return cell.grade_id
    digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
    repeats[digest] = repeats.get(digest, 0) + 1
    return digest if repeats[digest] == 1 else f"{digest}-{repeats[digest]}"


def student_notebook(instructor: NotebookNode) -> NotebookNode:
    """Make the students' notebook, by the steps of `nbgrader generate_assignment`."""
    from nbgrader.converters import GenerateAssignment

    notebook, resources = copy.deepcopy(instructor), dict[str, object]()
    for step in GenerateAssignment().preprocessors:
        if step.__name__ not in COURSE_STEPS:
            notebook, resources = step().preprocess(notebook, resources)
    return notebook


def notebook_text(notebook: NotebookNode) -> str:
    """Return the text of a valid notebook, with sorted keys and one newline at the end."""
    nbformat.validate(notebook)
    return nbformat.writes(notebook, version=4).rstrip("\n") + "\n"


def _squeeze(text: str) -> str:
    """Return the text with a single space in place of each run of spaces and line breaks."""
    return re.sub(r"\s+", " ", text).strip()


def secret_lines(lab: Lab) -> dict[str, tuple[Cell, int]]:
    """Return {line: (cell, line number in it)} of lines that students may not see, without short lines and imports."""
    secrets: dict[str, tuple[Cell, int]] = {}
    for cell in lab.cells:
        lines = cell.source.splitlines()
        inside = {n for r in cell.regions for n in range(r.first + 1, r.last)}
        if cell.role == "manual" and not cell.has("SOLUTION"):
            inside = set(range(len(lines)))
        for number in sorted(inside):
            line = lines[number].strip()
            secret = _squeeze(line.lstrip("# "))
            is_import = re.fullmatch(r"(from [\w.]+ )?import [\w.,* ()]+", secret)
            marker = any(f"{word} {kind}" in line for kind in REGIONS for word in ("BEGIN", "END"))
            if len(secret) >= CANARY_LENGTH and not is_import and not marker and not line.endswith(PUBLIC):
                secrets.setdefault(secret, (cell, number))
    return secrets


def _student_problems(lab: Lab, student: NotebookNode, secrets: dict[str, tuple[Cell, int]]) -> list[str]:
    problems = []
    everything = nbformat.writes(student, version=4)
    for kind in REGIONS:
        if f"BEGIN {kind}" in everything or f"END {kind}" in everything:
            problems.append(f"{lab.path.name}: a {kind} marker reaches the students' notebook.")
    public = [
        (cell, {_squeeze(line.strip().lstrip("# ")) for line in node.source.splitlines()}, _squeeze(node.source))
        for cell, node in zip(lab.cells, student.cells, strict=True)
    ]
    for secret, (origin, number) in secrets.items():
        seen = [c for c, lines, text in public if secret in lines or (len(secret) >= QUOTE_LENGTH and secret in text)]
        if seen:
            problems.append(
                f"{lab.at(origin)}: line {number + 1} of the cell, {secret!r}, is secret and reaches the students' "
                f"notebook in {' and '.join(map(lab.at, seen))}. Reword one of them, or end the secret line in "
                f"{PUBLIC!r}."
            )
    for cell, node in zip(lab.cells, student.cells, strict=True):
        if cell.cell_type == "code":
            try:
                parse_code(node.source)
            except SyntaxError as error:
                problems.append(
                    f"{lab.at(cell)}: without the solution the cell is no valid Python: {error.msg} "
                    f"(line {error.lineno} of the students' cell)."
                )
        if cell.source.strip() and not node.source.strip():
            problems.append(f"{lab.at(cell)}: nothing of the cell is left for students; keep one visible line.")
        if node.get("outputs"):
            problems.append(f"{lab.at(cell)}: the students' cell has outputs.")
    return problems


def write_files(files: dict[Path, str]) -> list[Path]:
    """Write the files that differ from their text, and return their paths."""
    changed = [path for path, text in files.items() if not _is_current(path, text)]
    for path in changed:
        write_whole(path, files[path])
    return changed


def stale_files(built: Built, root: Path = ROOT) -> list[Path]:
    """Return the committed notebooks that differ from the build of their source in any byte."""
    committed = root / f"{built.name}.ipynb"
    return [] if _is_current(committed, built.student) else [committed]


def _is_current(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()
