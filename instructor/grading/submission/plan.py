"""What of a submission runs, and where: the student's cells and the instructor's brought together.

A submission is data. Answers are taken from it by their ids; locked cells and tests come from the instructor's
notebook; a student's extra cells stay where they are. Cells of the instructor that only show something (plots, timing
tables) are left out when the student left them as they were and nothing that is graded uses a name of theirs.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import json
import re
import symtable
from dataclasses import dataclass, field

import nbformat
from nbformat import NotebookNode

from instructor.source import QUESTION_ID

MAX_NOTEBOOK = 64 << 20  # bytes
MAX_CELLS = 2000
MAX_SOURCE = 200_000  # characters of a cell whose names are looked at
_DYNAMIC = re.compile(r"\b(globals|eval|exec|locals|get_ipython|vars)\s*\(|^\s*%run\b", flags=re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} (Bonus )?Question (\d+)\.(\d+)", flags=re.MULTILINE)
_FILE = re.compile(r"%%(?:writefile|file)\s+(?:-a\s+)?(\S+)")


class Unreadable(ValueError):
    """A submission that is no notebook; the message is for the student."""


@dataclass(frozen=True)
class Structure:
    """A change of the notebook's structure: the question, the kind, what it is."""

    question: str
    kind: str
    detail: str


@dataclass
class Step:
    """One code cell of the merged notebook, or one that a person grades."""

    kind: str  # student (runs in the student's process), tests, skipped, manual (prose graded by hand)
    cell: NotebookNode  # of the notebook that comes out
    name: str  # grade_id, or the place of an extra cell
    question: str  # whose question it is, or whose it counts as
    source: str = ""
    answer: bool = False
    points: float = 0.0
    by_hand: bool = False
    untouched: bool = False
    submitted: list = field(default_factory=list)  # skipped: the outputs that came with the submission
    names: list[str] = field(default_factory=list)  # tests: names that come from the student
    files: list[str] = field(default_factory=list)  # tests: files that come from the student
    definitions: list[str] = field(default_factory=list)  # tests: statements of the instructor's that they need


@dataclass
class Plan:
    """The merged notebook and what to do with its cells."""

    notebook: NotebookNode
    steps: list[Step]
    structure: list[Structure]


# ---- names of a piece of code ------------------------------------------------------------------------------------


def python_of(source: str) -> str | None:
    """A code cell as plain Python, or None if it is not."""
    from IPython.core.inputtransformer2 import TransformerManager

    if len(source) > MAX_SOURCE or _FILE.match(source.lstrip()):
        return None
    try:
        try:
            ast.parse(source)
            return source  # as most cells are; the transformer is slow
        except SyntaxError:
            text = TransformerManager().transform_cell(source)
            ast.parse(text)
            return text
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def used_names(source: str) -> set[str]:
    """Names that the code takes from the notebook: read at the top level, or as globals inside of functions."""
    text = python_of(source)
    if text is None:
        return set()
    found: set[str] = set()

    def visit(table: symtable.SymbolTable) -> None:
        for symbol in table.get_symbols():
            outer = table.get_type() == "module" or symbol.is_global()
            if outer and symbol.is_referenced():
                found.add(symbol.get_name())
        for child in table.get_children():
            visit(child)

    try:
        visit(symtable.symtable(text, "cell", "exec"))
    except (SyntaxError, ValueError, RecursionError):
        return set()
    return found - set(vars(builtins))


def bound_names(node: ast.AST) -> set[str]:
    """Names that a statement, or a whole cell, gives to the notebook."""
    found: set[str] = set()
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)

    def visit(part: ast.AST) -> None:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(part.name)
        elif isinstance(part, ast.Import | ast.ImportFrom):
            found.update((alias.asname or alias.name).split(".")[0] for alias in part.names)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            found.add(part.id)
        if not isinstance(part, inner):
            for child in ast.iter_child_nodes(part):
                visit(child)

    visit(node)
    return found


def _binds(source: str) -> set[str]:
    text = python_of(source)
    return bound_names(ast.parse(text)) if text is not None else set()


# ---- reading -----------------------------------------------------------------------------------------------------


def read_notebook(text: str | bytes) -> NotebookNode:
    """A submission as a notebook of format 4; `Unreadable` says in a sentence what is wrong with it."""
    data = text.encode("utf-8", errors="replace") if isinstance(text, str) else bytes(text)
    if not data.strip():
        raise Unreadable("The submitted file is empty.")
    if len(data) > MAX_NOTEBOOK:
        raise Unreadable(f"The submitted notebook has {len(data) >> 20} MB; at most {MAX_NOTEBOOK >> 20} are read.")
    try:
        raw = json.loads(data.decode("utf-8-sig"))
        if not isinstance(raw, dict):
            raise ValueError("it is no JSON object")
        # Outputs are made anew, and broken ones are the most common reason for a notebook that does not validate.
        for cell in _raw_cells(raw):
            if isinstance(cell, dict) and cell.get("cell_type") == "code":
                cell["outputs"] = [o for o in cell.get("outputs") or [] if _is_output(o)][:200]
        old = raw.get("nbformat", 0) < 4  # its sources are lists of lines, which `convert` alone does not take
        notebook = nbformat.reads(json.dumps(raw), as_version=4) if old else nbformat.from_dict(raw)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, nbformat.ValidationError) as error:
        raise Unreadable(f"The submitted file is no notebook: {str(error)[:200]}") from None
    cells = notebook.get("cells")
    if not isinstance(cells, list) or not cells:
        raise Unreadable("The submitted notebook has no cells.")
    if len(cells) > MAX_CELLS:
        raise Unreadable(f"The submitted notebook has {len(cells)} cells; at most {MAX_CELLS} are read.")
    return notebook


def _raw_cells(raw: dict) -> list:
    sheets = raw.get("worksheets")
    cells = sheets[0].get("cells") if isinstance(sheets, list) and sheets and isinstance(sheets[0], dict) else None
    cells = cells or raw.get("cells")
    return cells if isinstance(cells, list) else []


def _is_output(output) -> bool:
    kinds = ("stream", "display_data", "execute_result", "error", "pyout", "pyerr")
    return isinstance(output, dict) and output.get("output_type") in kinds


def _grade_id(cell) -> str | None:
    metadata = cell.get("metadata")
    said = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    found = said.get("grade_id") if isinstance(said, dict) else None
    return found if isinstance(found, str) else None


def _source(cell) -> str:
    source = cell.get("source", "")
    source = "".join(map(str, source)) if isinstance(source, list) else str(source)
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    return source.encode("utf-8", errors="replace").decode("utf-8")


def _squeezed(source: str) -> str:
    return "\n".join(line.rstrip() for line in source.strip().splitlines())


# ---- merging -----------------------------------------------------------------------------------------------------


def make_plan(instructor: str, student: str, submission: str | bytes, tests: dict | None = None) -> Plan:
    """Bring a submission together with the instructor's and the students' notebook of its lab, all given as text.

    Args:
        tests: `plan_tests(instructor)`, if it is there already
    """
    original, given = read_built(instructor).cells, read_built(student)
    released = {cell.id: cell for cell in given.cells}
    order = {cell.id: place for place, cell in enumerate(original)}
    structure: list[Structure] = []
    merged = _merge(read_notebook(submission), original, released, order, structure)
    first_answer = next((i for i, c in enumerate(original) if _is_answer(c)), len(original))
    notebook = nbformat.v4.new_notebook(metadata=given.metadata)
    notebook.nbformat_minor = 5
    steps, section, taken = [], "", set()
    for number, (cell, known) in enumerate(merged):
        name = f"{known.id}" if known is not None else f"extra-{number}"
        node = _new_cell(cell.get("cell_type"), f"{name[:50]}-{number}" if name in taken else name, _source(cell))
        taken.add(node.id)
        if known is not None:
            node.metadata.update(json.loads(json.dumps(released[known.id].metadata)))
        notebook.cells.append(node)
        new = _steps_of(cell, known, node, released, order, first_answer, number)
        if known is not None and known.cell_type == "markdown" and (opened := _HEADING.search(known.source)):
            section = f"{'bonus_' if opened[1] else 'q'}{opened[2]}_{opened[3]}"
        for step in new:
            step.question = step.question or section
        steps += new
    _attribute(steps)
    planned = plan_tests(instructor) if tests is None else tests
    for step in steps:
        if step.kind == "tests":
            step.names, step.files, step.definitions = planned[step.name]
    _leave_out(steps)
    return Plan(notebook, steps, structure)


def read_built(text: str) -> NotebookNode:
    """A notebook that the build wrote; it is valid, and checking that again takes longer than reading it."""
    return nbformat.v4.nbjson.reads(text)


def _new_cell(kind: str, name: str, source: str) -> NotebookNode:
    """As nbformat makes one, without checking each against the schema: the notebook is checked when it is written."""
    more = {"execution_count": None, "outputs": []} if kind == "code" else {}
    kind = kind if kind in ("code", "markdown") else "raw"
    return nbformat.from_dict({"id": name, "cell_type": kind, "metadata": {}, "source": source, **more})


def _is_answer(cell) -> bool:
    return bool(cell.metadata.get("nbgrader", {}).get("solution"))


def question_of(grade_id: str) -> str:
    match = QUESTION_ID.fullmatch(grade_id)
    return f"{match[1]}{match[2]}_{match[3]}" if match else grade_id


def _merge(submission, original, released, order, structure) -> list[tuple]:
    """[(cell of the submission or of the instructor's, the instructor's cell it is or None)] in running order."""
    by_grade_id = {_grade_id(cell): cell for cell in original if _grade_id(cell)}
    plain = {cell.id: cell for cell in original if not _grade_id(cell)}
    groups: dict[int, list] = {-1: []}  # place in the original -> cells there, extras behind
    seen: dict[str, str] = {}
    places, last = [], -1
    for cell in submission.cells:
        if not isinstance(cell, dict) or cell.get("cell_type") not in ("code", "markdown", "raw"):
            continue
        grade_id = _grade_id(cell)
        known = by_grade_id.get(grade_id) if grade_id else plain.get(cell.get("id"))
        if known is None:
            groups.setdefault(last, []).append((cell, None))
            continue
        if known.id in seen and not (_is_answer(known) or grade_id is None):
            structure.append(Structure(question_of(grade_id), "structure", f"the cell {grade_id} is there twice"))
            continue
        if known.id in seen:  # a copied answer runs where it stands, as an extra cell
            if grade_id and _squeezed(_source(cell)) != seen[known.id]:
                structure.append(Structure(question_of(grade_id), "structure", f"{grade_id} is answered twice"))
            groups.setdefault(last, []).append((cell, None))
            continue
        seen[known.id] = _squeezed(_source(cell))
        last = order[known.id]
        places.append((last, known))
        groups.setdefault(last, []).insert(0, (_chosen(cell, known, released, structure), known))
    _note_moves(places, structure)
    for cell in original:
        if cell.id not in seen and _grade_id(cell):
            # Locked cells and tests are put back, answers stay empty.
            groups.setdefault(order[cell.id], []).insert(0, (released[cell.id], cell))
            if not _is_answer(cell):
                name = _grade_id(cell)
                structure.append(Structure(question_of(name), "structure", f"the cell {name} was deleted"))
    return [entry for place in sorted(groups) for entry in groups[place]]


def _chosen(cell, known, released, structure):
    """The student's text for answers and plain cells, the instructor's for locked cells and tests."""
    said = known.metadata.get("nbgrader", {})
    if not said:
        return cell
    name, mine = said["grade_id"], released[known.id]
    points = cell["metadata"]["nbgrader"].get("points")
    if "points" in said and points != said["points"]:
        structure.append(Structure(question_of(name), "structure", f"the points of {name} were changed"))
    if said.get("solution"):
        if cell.get("cell_type") != known.cell_type:
            return {**cell, "cell_type": known.cell_type}
        return cell
    if any(output.get("output_type") == "execute_result" for output in cell.get("outputs") or []):
        detail = f"the cell {name} was submitted with an output that its code does not make"
        structure.append(Structure(question_of(name), "structure", detail))
    if cell.get("cell_type") != known.cell_type or _squeezed(_source(cell)) != _squeezed(mine.source):
        lines = _squeezed(mine.source).splitlines(), _squeezed(_source(cell)).splitlines()
        first = next((new for old, new in itertools.zip_longest(*lines, fillvalue="") if new != old), "")
        structure.append(Structure(question_of(name), "structure", f"the cell {name} was changed: {first[:120]}"))
    return mine


def _note_moves(places: list[tuple], structure: list[Structure]) -> None:
    """Name tests and locked cells that do not stand in the order of the lab."""
    graded = [(place, known) for place, known in places if _grade_id(known)]
    # The longest run of cells that are in order stays; the others were moved.
    best: list[list[int]] = []
    for i, (place, _) in enumerate(graded):
        before = max((run for run in best if graded[run[-1]][0] < place), key=len, default=[])
        best.append([*before, i])
    stay = set(max(best, key=len, default=[]))
    for i, (_, known) in enumerate(graded):
        if i not in stay:
            name = _grade_id(known)
            structure.append(Structure(question_of(name), "structure", f"the cell {name} was moved"))


def _steps_of(cell, known, node, released, order, first_answer, number) -> list[Step]:
    said = known.metadata.get("nbgrader", {}) if known is not None else {}
    name = said.get("grade_id") or node.id
    question = question_of(name) if said.get("grade") or said.get("solution") else ""
    points = float(said.get("points", 0))
    by_hand = bool((said.get("grade") and said.get("solution")) or said.get("task"))
    touched = known is None or _squeezed(node.source) != _squeezed(released[known.id].source)
    shown = cell.get("outputs") if isinstance(cell.get("outputs"), list) else []
    common = {
        "points": points,
        "by_hand": by_hand,
        "untouched": not touched,
        "answer": bool(said.get("solution")),
        "submitted": shown,
    }
    if node.cell_type != "code":
        return [Step("manual", node, name, question, **common)] if by_hand else []
    if said.get("grade") and not said.get("solution"):
        return [Step("tests", node, name, question, known.source, **common)]
    if known is not None and order[known.id] < first_answer and not touched:
        return [Step("skipped", node, name, question, node.source, **common)]  # ran when the worker was warmed
    return [Step("student", node, name, question, node.source, **common)]


def _attribute(steps: list[Step]) -> None:
    """Cells under no question's heading count as the question before them, or else the one after."""
    for direction in (steps, steps[::-1]):
        last = ""
        for step in direction:
            last = step.question or last
            step.question = step.question or last


def plan_tests(instructor: str) -> dict[str, tuple[list[str], list[str], list[str]]]:
    """{test cell: (names from the student, files from the student, statements of the instructor's that it needs)}."""
    original = read_built(instructor).cells
    first_answer = next((i for i, c in enumerate(original) if _is_answer(c)), len(original))
    answers = [c for c in original if c.cell_type == "code" and _is_answer(c)]
    from_student: set[str] = set()
    for cell in answers:
        for node in ast.parse(python_of(cell.source) or "").body:
            if not isinstance(node, ast.Import | ast.ImportFrom):  # a module is the instructor's, whoever imports it
                from_student |= bound_names(node)
    files = [match[1] for c in answers if (match := _FILE.match(c.source.lstrip()))]
    planned, statements = {}, []
    for cell in original[first_answer:]:
        if cell.cell_type != "code":
            continue
        if cell.metadata.get("nbgrader", {}).get("grade") and not _is_answer(cell):
            needed, chosen, own = used_names(cell.source), [], _binds(cell.source)
            for text, binds, uses in reversed(statements):
                if binds & needed - from_student - own:
                    chosen.append(text)
                    needed |= uses
            beside = [name for name in files if any(name in text for text in (cell.source, *chosen))]
            planned[_grade_id(cell)] = sorted(needed & from_student), beside, chosen[::-1]
        statements += _statements(cell)
    return planned


def _statements(cell: NotebookNode) -> list[tuple[str, set, set]]:
    """(text, names it binds, names it uses) of an instructor's cell; of an answer, its imports."""
    found, text = [], python_of(cell.source)
    for node in ast.parse(text).body if text else []:
        if isinstance(node, ast.Expr) or not (binds := bound_names(node)):
            continue
        if not _is_answer(cell) or isinstance(node, ast.Import | ast.ImportFrom):
            piece = ast.unparse(node)
            found.append((piece, binds, used_names(piece)))
    return found


def _leave_out(steps: list[Step]) -> None:
    """Turn the instructor's own unchanged cells that nothing needs into skipped ones."""
    own = [s for s in steps if s.kind == "student"]
    theirs = [s for s in own if not (s.untouched and "nbgrader" not in s.cell.metadata)]
    if any(len(s.source) > MAX_SOURCE or _DYNAMIC.search(s.source) for s in theirs):
        return
    needed = set().union(*(used_names(s.source) for s in theirs)) if theirs else set()
    rest = [s for s in own if s not in theirs]
    while True:
        more = [s for s in rest if _binds(s.source) & needed]
        if not more:
            break
        for step in more:
            rest.remove(step)
            needed |= used_names(step.source)
    for step in rest:
        step.kind = "skipped"
