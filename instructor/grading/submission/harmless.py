"""What a student wrote, made harmless for the browser and the terminal of whoever grades it.

Prose is shown by nbconvert and by nbgrader's formgrader, in pages that may do all that the grader may. Their Markdown
lets HTML through. So a `<` that would begin a tag gets a space after it, in the autograded notebook itself: whatever
renders that notebook later meets no tag. A `<` in mathematics or in a table of code means the same with a space.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Collection

from PIL import Image

# Characters that are shown of a cell, and of all cells of a notebook that a student changed. nbconvert takes quadratic time for
# some texts, such as `\\begin{a}` again and again or one long line of code: seconds for a cell of this length.
MAX_CELL, MAX_ALL = 20_000, 300_000
MAX_BRACKETS = 2_000  # opening brackets of one answer; nbconvert looks for the end of each
MAX_PICTURE, MAX_ATTACHED = 8 << 20, 20  # characters of one picture, base64; pictures of one answer
_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_ENTITY = re.compile(r"&(?=#|colon|Tab|NewLine|lpar)", flags=re.IGNORECASE)  # hide a scheme such as javascript:
_SCHEME = re.compile(r"\b(javascript|vbscript|data|file)(\s*):", flags=re.IGNORECASE)
# Commands of MathJax that make links, attributes, styles or load more of it.
_MACRO = re.compile(
    r"\\(href|url|cssId|class|style|require|html\w*|data|bbox|Newextarrow|enclose|mmlToken)(?![A-Za-z])"
)
_PICTURE = re.compile(r"!(?=\[(?![^\]]*\]\(attachment:))")  # of another machine, which a page would ask for it
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029]")
_PASTED = re.compile(r"attachment\\?:([\w.%()-]*)", flags=re.IGNORECASE)
MAX_PIXELS = 50_000_000  # of a picture; a plot of 4 by 3 inches at 1000 dots an inch has 12 million
PICTURES = {"image/png": ["PNG"], "image/jpeg": ["JPEG"], "image/gif": ["GIF"]}


def shortened(text: str, most: int, sign: str = "") -> str:
    """A cell's text as it is shown: the end of a long one is left out, and a line says so after `sign`. All code runs."""
    rest = f"\n\n{sign}(The rest of this cell is not shown: it is too long.)"
    return text if len(text) <= most else text[:most] + rest


def harmless_markdown(text: str) -> str:
    """Markdown without HTML, without links that run code or pictures from elsewhere, and without MathJax's commands for either."""
    if text.count("[") > MAX_BRACKETS:
        text = text.replace("[", "(").replace("]", ")")
    text = _PICTURE.sub("", _TAG.sub("< ", _CONTROL.sub("", text)))
    text = _SCHEME.sub(r"\1 :", _ENTITY.sub("& ", text))
    return _MACRO.sub(r"\\ \1", text)


def harmless_latex(text: str) -> str:
    """LaTeX of an output, without commands that make links or attributes."""
    return _MACRO.sub(r"\\ \1", _TAG.sub("< ", text))


def is_picture(kind: str, data: str) -> bool:
    """True for base64 of a picture that a page may show; a browser makes room for all pixels, however few bytes there are."""
    if kind not in PICTURES or len(data) > MAX_PICTURE:
        return False
    try:
        content = io.BytesIO(base64.b64decode("".join(data.split()), validate=True))
        with Image.open(content, formats=PICTURES[kind]) as picture:  # reads the header alone
            return picture.width * picture.height <= MAX_PIXELS
    except (ValueError, OSError, SyntaxError, Image.DecompressionBombError):
        return False


def harmless_attachments(attachments: object) -> dict[str, dict[str, str]]:
    """The pictures that were pasted into an answer in words: {name: {type: base64}}; anything else is left out."""
    kept: dict[str, dict[str, str]] = {}
    for name, kinds in attachments.items() if isinstance(attachments, dict) else ():
        if re.fullmatch(r"[\w .()-]{1,100}", str(name)) and isinstance(kinds, dict) and len(kept) < MAX_ATTACHED:
            pictures = {k: v for k, v in kinds.items() if isinstance(v, str) and is_picture(str(k), v)}
            kept |= {str(name): pictures} if pictures else {}
    return kept


def without_lost_pictures(text: str, pictures: Collection[str]) -> str:
    """Markdown that refers to no pasted picture but these: nbconvert makes no page at all where one is missing."""
    return _PASTED.sub(lambda found: found[0] if found[1] in pictures else f"attachment {found[1]}", text)


def for_terminal(text: object, most: int = 300) -> str:
    """A student's text as one line for a terminal: control characters are shown, and not sent to it."""
    shown = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text).replace("\n", "\\n"))
    return shown if len(shown) <= most else shown[: most - 4] + " ..."


# ---- pages of feedback -------------------------------------------------------------------------------------------

_INLINE = re.compile(r"<script(?![^>]*\bsrc=)[^>]*>(.*?)</script>", flags=re.DOTALL | re.IGNORECASE)
_SOURCES = re.compile(r"<script[^>]*\bsrc=[\"'](https://[\w.-]+)/", flags=re.IGNORECASE)


def script_hash(text: str) -> str:
    """How a content security policy names a script that may run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def with_policy(page: str) -> str:
    """A page of feedback that may run the scripts in its head, which are nbconvert's, and none that its cells hold."""
    head = page.partition("</head>")[0]
    hosts = " ".join(sorted(set(_SOURCES.findall(head))))
    scripts = " ".join(sorted(set(map(script_hash, _INLINE.findall(head)))))
    allowed = f"{hosts} {scripts}".strip() or "'none'"
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline' {hosts}; font-src data: {hosts}; "
        f"script-src {allowed}; base-uri 'none'; form-action 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return re.sub(r"(<head[^>]*>)", lambda head: head[1] + meta, page, count=1, flags=re.IGNORECASE)
