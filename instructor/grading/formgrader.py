"""nbgrader's formgrader, made safer and more helpful: a content security policy, the marking scheme, no autograde.

This is a Jupyter server extension, which `labs formgrader` switches on. nbgrader's own extension serves the pages; this
one changes what its handlers send:

- Every page may run the formgrader's own scripts and no other, whatever a student's text gets into it.
- Beside each answer that a person grades stands the marking scheme, from the lab's source in the course's folder.
- The lightning (autograde) would run a submission's code without any of the walls. Neither its column nor the instructions for it
  are shown; whoever asks for it still reads the command that grades inside of them.
"""

from __future__ import annotations

import html
import json
import re
import secrets
from pathlib import Path

import nbformat

from instructor.grading.submission.harmless import script_hash

HANDLERS = ("toggle_name(true);", "toggle_name(false);", "toggleAllNames()")  # in attributes of nbgrader's templates
MATHJAX = "https://cdnjs.cloudflare.com"
_CELLS = '<div id="notebook"'  # what follows may hold a student's text
_SCRIPT = re.compile(r"<script\b", flags=re.IGNORECASE)
_SCORE = re.compile(r'<input class="score tabbable" id="([\w-]+)"')
_BODY = '<div class="panel-body">'
STYLE = (
    "border-left: 4px solid #2f7d5b; background: #f3f8f5; padding: 6px 12px; margin: 0 0 12px; "
    "white-space: pre-wrap; overflow-wrap: anywhere"
)
# nbgrader's pages leave no room between the columns of a notebook's tables.
TABLES = "<style>#notebook .rendered_html :is(td, th) { padding: 0.2em 0.9em 0.2em 0; }</style></head>"


def policy(nonce: str) -> str:
    """The content security policy of one page."""
    hashes = " ".join(map(script_hash, HANDLERS))
    # MathJax evaluates its own configuration, which stands in a script with this nonce.
    scripts = f"'self' 'nonce-{nonce}' 'unsafe-eval' 'unsafe-hashes' {hashes} {MATHJAX}"
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'self' 'unsafe-inline' {MATHJAX}; img-src 'self' data:; "
        f"font-src 'self' data: {MATHJAX}; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
    )


def with_nonces(page: str, nonce: str) -> str:
    """A page whose own scripts have a nonce: those before the cells of a submission, and none in it."""
    own, cells, rest = page.partition(_CELLS)
    return _SCRIPT.sub(f'<script nonce="{nonce}"', own) + cells + rest


def schemes_of(notebook: Path) -> dict[str, str]:
    """{answer that a person grades: its marking scheme} of the instructor's notebook; empty if there is none."""
    try:
        cells = nbformat.read(notebook, as_version=4).cells
    except (OSError, ValueError):
        return {}
    found = {}
    for cell in cells:
        facts = cell.metadata.get("nbgrader", {})
        if facts.get("grade") and facts.get("solution"):
            lines = [line for line in cell.source.splitlines() if not re.search(r"(###|===) (BEGIN|END) ", line)]
            found[facts["grade_id"]] = "\n".join(lines).strip()
    return found


def with_schemes(page: str, schemes: dict[str, str]) -> str:
    """A submission's page with the marking scheme above each answer that has one."""
    pieces, end = [], 0
    for found in _SCORE.finditer(page):
        place = page.find(_BODY, found.end())
        if found[1] in schemes and place >= 0:
            text = html.escape(schemes[found[1]])
            shown = f'<div class="grading-note" style="{STYLE}"><strong>Marking scheme</strong>\n{text}</div>'
            pieces += [page[end : place + len(_BODY)], shown]
            end = place + len(_BODY)
    return "".join([*pieces, page[end:]])


_AUTOGRADE_COLUMN = '<th class="text-center no-sort">Autograde</th>'
_HIDDEN = "<style>.autograde, #accordion { display: none; }</style></head>"


def without_autograde(page: str) -> str:
    """The page of a lab's submissions without the column of lightnings, and without the instructions, which speak of them alone."""
    if _AUTOGRADE_COLUMN not in page:
        return page
    page = page.replace(_AUTOGRADE_COLUMN, _AUTOGRADE_COLUMN.replace('no-sort"', 'no-sort autograde"'))
    return page.replace("</head>", _HIDDEN, 1)


def refusal(lab: str, student: str) -> str:
    """What the lightning answers."""
    return (  # shown as it is, without wrapping
        f"It is switched off: it would run the code of {student}\non your machine, without any wall around it.\n"
        f"Grade it in a terminal instead:\n\n    labs grade {lab} --only '{student}'"
    )


def _load_jupyter_server_extension(app) -> None:
    """Change the handlers of nbgrader's formgrader, which is loaded by its own extension."""
    from nbgrader.server_extensions.formgrader import apihandlers, base, handlers

    send = base.BaseHandler.write

    def write(self, chunk):
        if isinstance(chunk, str) and chunk.lstrip()[:9].lower() == "<!doctype":
            nonce = secrets.token_urlsafe(16)
            self.set_header("Content-Security-Policy", policy(nonce))
            self.set_header("X-Content-Type-Options", "nosniff")
            chunk = with_nonces(without_autograde(chunk).replace("</head>", TABLES, 1), nonce)
        return send(self, chunk)

    def write_submission(self, chunk):
        if isinstance(chunk, str):
            submission = self.gradebook.find_submission_notebook_by_id(self.path_args[0])
            lab = submission.assignment.assignment.name
            folder = Path(self.coursedir.format_path(self.coursedir.source_directory, ".", lab))
            chunk = with_schemes(chunk, schemes_of(folder / f"{submission.notebook.name}.ipynb"))
        return write(self, chunk)

    def refuse(self, lab, student):
        self.write(json.dumps({"success": False, "log": "", "error": refusal(lab, student)}))

    base.BaseHandler.write = write
    handlers.SubmissionHandler.write = write_submission
    apihandlers.AutogradeHandler.post = refuse
    app.log.info("formgrader: policy, marking schemes and no autograde")


def _jupyter_server_extension_points() -> list[dict]:
    return [{"module": "instructor.grading.formgrader"}]
