"""The formgrader's pages: whose scripts may run, and what stands beside an answer."""

import re
from importlib.util import find_spec
from pathlib import Path

import jinja2
import nbformat

from instructor.build import build_lab
from instructor.grading.formgrader import policy, refusal, schemes_of, with_nonces, with_schemes, without_autograde
from tests.instructor.conftest import FIXTURE_LAB

PAGE = """<!doctype html><head><script>var own = 1;</script><SCRIPT src="/own.js"></script></head><body>
<div id="notebook"><div class="panel-heading"><input class="score tabbable" id="q1_2" type="number" /></div>
<div class="panel-body">an answer <script>document.title = "mine"</script></div>
<input class="score tabbable" id="q1_1_tests" /><div class="panel-body">code</div></div></body>"""


def test_the_pages_own_scripts_have_a_nonce_and_a_students_have_none():
    page = with_nonces(PAGE, "abc")
    own, _, student = page.partition('<div id="notebook"')
    assert own.count('nonce="abc"') == 2 and "nonce" not in student
    rules = dict(rule.split(" ", 1) for rule in policy("abc").split("; "))
    assert "'nonce-abc'" in rules["script-src"] and "'unsafe-inline'" not in rules["script-src"]
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"


def test_the_marking_scheme_stands_above_the_answer_that_it_is_for(tmp_path):
    lab = build_lab(FIXTURE_LAB)
    (tmp_path / "lab.ipynb").write_text(lab.instructor)
    schemes = schemes_of(tmp_path / "lab.ipynb")
    assert set(schemes) == {"q1_2"} and "Two points for the intermediate tensor" in schemes["q1_2"]
    assert "MARK SCHEME" not in schemes["q1_2"]
    page = with_schemes(PAGE, {"q1_2": "<b>two</b> points", "q9": "x"})
    shown = re.search(r'<div class="panel-body"><div class="grading-note".*?</div>an answer', page, flags=re.DOTALL)
    assert shown and "&lt;b&gt;two" in shown[0] and page.count("grading-note") == 1
    assert with_schemes(PAGE, {}) == PAGE and schemes_of(tmp_path / "none.ipynb") == {}
    assert all("Two points" not in cell.source for cell in nbformat.reads(lab.student, as_version=4).cells)


def test_the_lightning_says_what_to_do_instead():
    assert "labs grade lab1 --only 'ada'" in refusal("lab1", "ada")


def test_the_list_of_submissions_offers_no_lightning():
    """The template is that of nbgrader itself, so that a new version with other words fails here."""
    folder = Path(find_spec("nbgrader").origin).parent / "server_extensions/formgrader/templates"
    page = jinja2.Environment(loader=jinja2.FileSystemLoader(folder), autoescape=True)
    page = page.get_template("manage_submissions.tpl").render(
        base_url="", course_dir="/course", assignment_id="lab3_gluon"
    )
    assert "nbgrader autograde" in page and "Autograde</th>" in page
    shown = without_autograde(page)
    assert (
        shown.index("#accordion { display: none; }") < shown.index('id="accordion"') < shown.index("nbgrader autograde")
    )
    assert page.count("panel-group") == 1  # there are no other instructions
    assert '<th class="text-center no-sort autograde">' in shown and "<style>.autograde, #" in shown
    assert shown.count("<th") == page.count("<th")
    assert without_autograde(PAGE) == PAGE
