"""Questions and points: find them in a lab's source, add them up, and write the sums into notebooks and docs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from instructor.source import Cell, Lab, LabError, find_regions, read_lab
from utils.validation import lab_named

LABS = Path(__file__).resolve().parent / "labs"

HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*$")
QUESTION = re.compile(r"(?P<bonus>Bonus )?Question (?P<part>\d+)\.(?P<number>\d+)[:.]?\s*(?:[—–-]\s*)?(?P<title>.*)")
PLACEHOLDER = re.compile(r"\{points(?::([^{}]*))?\}")
WRITTEN_POINTS = re.compile(r"[(\[]\s*(\d+(?:\.\d+)?)\s+(?:bonus\s+)?points?\s*[)\]]", re.IGNORECASE)


@dataclass
class Question:
    """A question of a lab, with its graded cells."""

    key: str  # q1_1 or bonus_4_5: its cells' ids begin with it
    number: str  # 1.1
    title: str
    bonus: bool
    line: int
    cells: list[Cell] = field(default_factory=list)

    @property
    def name(self) -> str:
        """`Question 1.1` or `Bonus Question 4.5`."""
        return f"{'Bonus Question' if self.bonus else 'Question'} {self.number}"

    @property
    def points(self) -> float:
        """The sum of the points of its graded cells."""
        return sum(cell.points for cell in self.cells)

    @property
    def graded(self) -> str:
        """How it is graded: `automatically`, `by hand` or `both`."""
        how = {"automatically" if cell.role == "tests" else "by hand" for cell in self.cells if cell.points}
        return "both" if len(how) > 1 else next(iter(how), "")


def number_text(points: float) -> str:
    """Return a number as a text without trailing zeros: `6` and `2.5`."""
    return f"{points:g}"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: `1 answer` or `3 answers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def answers_wait(number: int) -> str:
    """Return `1 answer waits for a person` or `3 answers wait for a person`."""
    return f"{counted(number, 'answer')} wait{'s' if number == 1 else ''} for a person"


def _prose_lines(cell: Cell) -> list[tuple[int, str]]:
    """Yield (number, line) for the lines of a markdown cell outside of code blocks."""
    lines, fence = [], False
    for number, line in enumerate(cell.source.splitlines()):
        if line.lstrip().startswith(("```", "~~~")):
            fence = not fence
        elif not fence:
            lines.append((number, line))
    return lines


def find_questions(lab: Lab) -> list[Question]:
    """Return the questions of a lab in order, with their cells; `LabError` if cells and headings do not fit."""
    questions: list[Question] = []
    problems: list[str] = []
    current: tuple[int, Question] | None = None  # heading level, question
    for cell in lab.cells:
        if cell.cell_type == "markdown" and cell.role in ("prose", "locked", "task"):
            for number, line in _prose_lines(cell):
                heading = HEADING.fullmatch(line)
                if heading is None:
                    continue
                level, text = len(heading[1]), heading[2]
                where = f"{lab.path.name}, line {cell.line + number + 1}"
                question = QUESTION.fullmatch(text)
                if question is None:
                    if "{points}" in text:
                        problems.append(f"{where}: {{points}} in a heading without 'Question 1.1: Title'.")
                    if current and level <= current[0]:
                        current = None
                    continue
                opened, wrong = _question(question, cell.line + number + 1, where)
                problems += wrong
                if any(q.number == opened.number for q in questions):
                    problems.append(f"{where}: {opened.number} is the number of an earlier question.")
                questions.append(opened)
                current = (level, opened)
        if cell.question is None:
            continue
        owner = current[1] if current else None
        if owner is not None and owner.key == cell.question:
            owner.cells.append(cell)
        else:
            under = f"{owner.name} ({owner.key})" if owner else "no question's heading"
            problems.append(f"{lab.at(cell)}: the id belongs to {cell.question}, and the cell stands under {under}.")
    for each in questions:
        problems += [f"{lab.path.name}, line {each.line}: {p}" for p in _question_problems(each)]
    if problems:
        raise LabError(problems)
    return questions


def _question(match: re.Match, line: int, where: str) -> tuple[Question, list[str]]:
    problems, title = [], match["title"].strip()
    bonus = match["bonus"] is not None
    number = f"{match['part']}.{match['number']}"
    key = f"{'bonus_' if bonus else 'q'}{match['part']}_{match['number']}"
    written = WRITTEN_POINTS.search(title)
    if written:
        problems.append(
            f"{where}: the heading of {number} says {written[1]} points itself; points live in the marker lines "
            "of the graded cells. Write {points}."
        )
    elif not title.endswith("{points}"):
        problems.append(f"{where}: the heading of {number} has to end in {{points}}.")
    return Question(key, number, title.removesuffix("{points}").strip(), bonus, line), problems


def _question_problems(question: Question) -> list[str]:
    if not any(cell.points for cell in question.cells):
        return [f"{question.name} has no graded cell: give one of its cells points."]
    problems, answered = [], False
    for cell in question.cells:
        answered = answered or cell.role in ("answer", "manual")
        if cell.role == "tests" and not answered:
            later = any(c.role in ("answer", "manual") for c in question.cells)
            what = "stands before its answer" if later else "has no answer cell to test"
            problems.append(f"the test cell {cell.grade_id} (line {cell.line}) of {question.name} {what}.")
    return problems


def fill_points(lab: Lab, questions: list[Question]) -> None:
    """Replace `{points...}` in the prose of `lab` by the sums of the points in the marker lines."""
    problems: list[str] = []
    by_number = {question.number: question for question in questions}
    for cell in lab.cells:
        if cell.cell_type != "markdown" or "{points" not in cell.source:
            continue

        def fill(match: re.Match, cell: Cell = cell) -> str:
            name = match[1]
            if name in ("regular", "bonus"):
                return number_text(sum(q.points for q in questions if q.bonus == (name == "bonus")))
            if name == "table":
                return _table(questions)
            if name in by_number:
                return number_text(by_number[name].points)
            problems.append(
                f"{lab.at(cell)}: {match[0]} is unknown; write {{points:1.1}} (a question's number), "
                "{points:regular}, {points:bonus} or {points:table}."
            )
            return match[0]

        lines = cell.source.splitlines()
        for number, line in _prose_lines(cell):
            heading = HEADING.fullmatch(line)
            match = heading and QUESTION.fullmatch(heading[2])
            if match:
                question = by_number[f"{match['part']}.{match['number']}"]
                line = line.replace("{points}", f"({_worth(question)})")
            lines[number] = PLACEHOLDER.sub(fill, line)
        cell.source = "\n".join(lines)
        find_regions(cell)  # again, as a table adds lines
    if problems:
        raise LabError(problems)


def _worth(question: Question) -> str:
    word = "point" if question.points == 1 else "points"
    return f"{number_text(question.points)} {'bonus ' if question.bonus else ''}{word}"


def _table(questions: list[Question]) -> str:
    rows = ["| Question | | Points | Graded |", "|---|---|---:|---|"]
    for question in questions:
        number = f"{question.number} (bonus)" if question.bonus else question.number
        rows.append(f"| {number} | {question.title} | {number_text(question.points)} | {question.graded} |")
    regular, bonus = (sum(q.points for q in questions if q.bonus == which) for which in (False, True))
    extra = f" + {number_text(bonus)} bonus" if bonus else ""
    rows.append(f"| **Sum** | | **{number_text(regular)}{extra}** | |")
    return "\n".join(rows)


_HEADER = "# ---\n# jupyter:\n"  # Jupytext begins a notebook in Python with this line


def lab_path(name: str, labs: Path | None = None) -> Path:
    """Return the source of a lab, by its name or the beginning of its name, such as lab4 or lab4_sdpa.ipynb."""
    return (labs or LABS) / f"{lab_named(name, lab_names(labs))}.py"


def lab_names(labs: Path | None = None) -> list[str]:
    """Return the names of the labs with a source. Kernels that a lab's cells wrote into the same folder are no labs."""
    return sorted(path.stem for path in (labs or LABS).glob("*.py") if _is_notebook(path))


def _is_notebook(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(len(_HEADER)) == _HEADER


def points_table(lab: str | Path) -> str:
    """Return the Markdown table of a lab's questions and points."""
    return _table(find_questions(read_lab(Path(lab) if isinstance(lab, Path) else lab_path(lab))))


def put_points_table(text: str, lab: str, table: str | None = None) -> str:
    """Return `text` with the table of `lab` between `<!-- points:lab1 -->` and `<!-- /points -->`."""
    pattern = re.compile(rf"(<!-- points:{re.escape(lab)} -->\n).*?(<!-- /points -->)", re.DOTALL)
    if not pattern.search(text):
        raise LabError([f"no <!-- points:{lab} --> ... <!-- /points --> to put the table of {lab} between."])
    table = points_table(lab) if table is None else table
    return pattern.sub(lambda match: f"{match[1]}{table}\n{match[2]}", text)
