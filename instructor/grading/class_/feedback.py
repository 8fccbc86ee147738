"""A student's page of feedback: nbgrader's page, made readable, and with no script but its own.

nbgrader's list names every graded cell "Test cell", counts an answer that waits for a person as 0 points, adds bonus
points to the others, cuts long lines, and points at the lab's pictures in a folder that the student's page does not have.
"""

from __future__ import annotations

import base64
import html
import mimetypes
import re
from pathlib import Path

from instructor.build import ROOT
from instructor.grading.class_.report import Student
from instructor.grading.submission.harmless import with_policy
from instructor.grading.submission.plan import question_of, question_title
from instructor.points import answers_wait, number_text
from utils.files import write_whole

_LIST = re.compile(r"<h4>[^<]*</h4>\s*<div id=\"toc\">.*?</div>", re.DOTALL)
_ENTRY = re.compile(r"<a href=\"#([\w-]+)\">[^<]*</a> \(Score:")
_PICTURE = re.compile(r"(<img\b[^>]*?\bsrc=\")((?:\.?/)?assets/[\w./-]+)(\")")
_STYLE = """<style>
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
p, li, td { overflow-wrap: anywhere; }
div.prompt { display: none; }
img { max-width: 100%; }
summary { display: list-item; cursor: pointer; }
.rendered_html table { margin: 0.8em 0; }
.rendered_html td, .rendered_html th, #toc td, #toc th { padding: 0.2em 0.9em 0.2em 0; }
#toc td.points { text-align: right; white-space: nowrap; }
</style>
"""


def finished_page(page: str, lab: str, student: Student, titles: dict[str, str]) -> str:
    """Return nbgrader's page with questions by their titles or else numbers, points as they stand, wrapped lines, and pictures."""
    first_cells: dict[str, str] = {}
    found = _LIST.search(page)
    for cell in _ENTRY.findall(found[0]) if found else ():
        first_cells.setdefault(question_of(cell), cell)
    if found:
        page = page[: found.start()] + _contents(lab, student, titles, first_cells) + page[found.end() :]
    for question in student.waiting:
        cells = rf"(<a name=\"{re.escape(question)}\w*\"></a><div class=\"panel-heading\">.*?)Score: [\d.]+ / ([\d.]+)"
        page = re.sub(cells, r"\1Waits for a person, \2 points", page, flags=re.DOTALL, count=1)
    page = _PICTURE.sub(lambda match: match[1] + _embedded(match[2]) + match[3], page)
    return with_policy(page.replace("</head>", _STYLE + "</head>", 1))


def _contents(lab: str, student: Student, titles: dict[str, str], cells: dict[str, str]) -> str:
    """The table at the top: each question with its points, and what they are in sum."""
    said = f"{number_text(student.total(False))} of {number_text(student.possible(False))} points"
    if bonus := student.possible(True):
        said += f", {number_text(student.total(True))} of {number_text(bonus)} bonus points"
    if student.penalty:
        said += f", {number_text(round(student.penalty, 2))} points less because it came late"
    if waiting := len(student.waiting):
        said += f"; {answers_wait(waiting)} and can add to this"
    rows = []
    for question, cell in cells.items():
        name = question_title(question) + (f": {titles[question]}" if question in titles else "")
        got, most = student.points.get(question, 0.0), number_text(student.most.get(question, 0.0))
        points = f"waits, {most}" if question in student.waiting else f"{number_text(got)} of {most}"
        link = f'<a href="#{cell}">{html.escape(name)}</a>'
        rows.append(f'<tr><td>{link}</td><td class="points">{points}</td></tr>')
    return f'<h4>{html.escape(lab)}: {said}</h4>\n<div id="toc"><table>\n' + "\n".join(rows) + "\n</table></div>"


def _embedded(address: str) -> str:
    """A picture of the course's own `assets` as a data address; any other address as it is."""
    path = (ROOT / address.lstrip("./")).resolve()
    kind = mimetypes.guess_type(path.name)[0] or ""
    if not path.is_relative_to((ROOT / "assets").resolve()) or not path.is_file() or not kind.startswith("image/"):
        return address
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def question_titles(lab: str) -> dict[str, str]:
    """The titles of a lab's questions, from its source; empty for a lab whose source is not here."""
    from instructor.points import find_questions, lab_path
    from instructor.source import read_lab
    from utils.validation import UserError

    try:
        return {question.key: question.title for question in find_questions(read_lab(lab_path(lab)))}
    except UserError:
        return {}


def finish_pages(folder: Path, lab: str, students: list[Student]) -> None:
    """Finish the pages that nbgrader wrote just now; one of a student without points gets the policy alone."""
    titles, known = question_titles(lab), {student.id: student for student in students}
    for path in folder.glob(f"*/{lab}/*.html"):
        page = path.read_text(encoding="utf-8")
        if "Content-Security-Policy" in page.partition("</head>")[0]:  # it was finished before
            continue
        student = known.get(path.parts[-3])
        page = with_policy(page) if student is None else finished_page(page, lab, student, titles)
        write_whole(path, page)
