"""The labs in a real JupyterLab and a real browser, as a student and as an instructor see them."""

import json
import re

import nbformat
import pytest

from instructor.build import build_lab
from instructor.points import lab_path
from tests.e2e.jupyter import base_and_token, git, graded, open_notebook, run_all, run_labs, small_lab
from utils.files import ROOT

LABS = sorted(path.name for path in ROOT.glob("lab*.ipynb"))


@pytest.mark.parametrize("name", LABS)
def test_a_look_at_a_lab_shows_it_and_changes_nothing(lab, page, course, name):
    open_notebook(page, lab(name))
    assert page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) h1").first.is_visible()
    page.wait_for_timeout(3000)
    assert page.locator("text=official Jupyter news").count() == 0
    assert page.locator("text=Create Assignment").count() == 0 and page.locator("text=Nbgrader").count() == 0
    assert page.locator(".jp-DirListing-item:has-text('instructor')").count() == 0
    assert page.locator(".lm-TabBar-tab.jp-mod-dirty").count() == 0, "a lab that was only opened is saved"
    page.keyboard.press("Control+s")
    page.wait_for_timeout(2000)
    assert git(course, "status", "--porcelain") == ""
    assert page.missing == []


def test_a_wrong_answer_is_answered_with_a_sentence(lab, page, course):
    """The first question of lab 1, typed into its cell."""
    source = json.loads((course / "lab1.ipynb").read_text())
    cells = {cell["id"]: cell for cell in source["cells"]}
    chosen = [nbformat.from_dict({**cells[name], "outputs": []}) for name in ("setup", "q1_1", "q1_1_tests")]
    chosen[1]["source"] = "def gemm_naive(a, b):\n    return a @ b * 2"
    for cell in chosen:
        cell["source"] = "".join(cell["source"])
    small_lab(course, "wrong.ipynb", *chosen)
    open_notebook(page, lab("wrong.ipynb"))
    notebook = run_all(page, course, "wrong.ipynb", 240)
    (error,) = notebook["cells"][-1]["outputs"]
    assert error["output_type"] == "error" and "Question 1.1" in error["evalue"]
    shown = page.locator(".jp-OutputArea-output").last.inner_text()
    assert "Question 1.1" in shown and "Traceback" not in shown
    (course / "wrong.ipynb").unlink()


def test_validate_waits_for_a_cell_of_more_than_half_a_minute(lab, page, course):
    """Nbgrader's own limit is 30 s, which a compilation exceeds."""
    answer = graded("import time\ntime.sleep(33)\nanswer = 1", "q1_1", solution=True, locked=False)
    small_lab(course, "slow.ipynb", answer, graded("assert answer == 1", "q1_1_tests", grade=True, points=1))
    open_notebook(page, lab("slow.ipynb"))
    page.click(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Toolbar >> text=Validate")
    page.wait_for_selector(".jp-Dialog >> text=/Success|passes all the tests/", timeout=180_000)
    (course / "slow.ipynb").unlink()


def test_the_slider_of_lab_3_shows_another_picture(lab, page, course):
    """The kernel of Question 5.2 as its model answer has it, with few choices."""
    built = nbformat.reads(build_lab(lab_path("lab3_gluon")).instructor, as_version=4)
    (kernel,) = (cell.source for cell in built.cells if cell.source.startswith("%%writefile lab3_specialized.py"))
    draw = "lab3.draw_slider(lab3.answered('lab3_specialized.py'), keys=(64, 128), slots=(1, 2), head_dims=(64,))"
    cells = kernel, f"from utils.labs import lab3_gluon as lab3\n{draw}"
    small_lab(course, "slider.ipynb", *map(nbformat.v4.new_code_cell, cells))
    open_notebook(page, lab("slider.ipynb"))
    run_all(page, course, "slider.ipynb", 240)
    assert page.locator("[data-key]").count() == 4 and page.locator("[data-key='0-0-0'] svg").is_visible()
    slider = page.locator("input[type=range]").first
    slider.click(position={"x": slider.bounding_box()["width"] - 4, "y": 8})
    page.locator("[data-key='1-0-0'] svg").wait_for()
    assert not page.locator("[data-key='0-0-0']").is_visible()
    slider.press("ArrowLeft")  # JupyterLab has a shortcut of this name
    page.locator("[data-key='0-0-0'] svg").wait_for()
    for name in ("slider.ipynb", "lab3_specialized.py"):
        (course / name).unlink()


PANEL_LAB = (
    graded("from utils import *\nfrom utils.checking import Verdict", "setup"),
    graded("answer = 1", "q1_1", solution=True, locked=False),
    graded("Verdict('1.1', answer == 1).raise_if_wrong()", "q1_1_tests", grade=True, points=3),
    graded("other = 1", "q1_2", solution=True, locked=False),
    graded("Verdict('1.2', other == 2, 'off by one').raise_if_wrong()", "q1_2_tests", grade=True, points=7),
)


def test_the_panel_of_points_follows_the_checks_and_a_restart_of_the_kernel(lab, page, course):
    small_lab(course, "panel.ipynb", *PANEL_LAB)
    open_notebook(page, lab("panel.ipynb"))
    run_all(page, course, "panel.ipynb", 240)
    panel = page.locator(".jp-Cell").first.locator(".jp-OutputArea-output")
    assert "3 of 10 points by visible checks" in panel.inner_text()
    assert [panel.locator(f"text={chip}").count() for chip in ("1.1 ✓", "1.2 ✗")] == [1, 1]
    assert page.locator(".jp-Cell").nth(2).locator("text=3 of 10 points").count() == 1, (
        "and below the check that passed"
    )
    page.click("li.lm-MenuBar-item:has-text('Kernel')")
    page.click("li.lm-Menu-item:has-text('Restart Kernel and Clear Outputs of All Cells')")
    page.click(".jp-Dialog button:has-text('Restart')")
    panel.wait_for(state="detached")
    page.locator(".jp-Cell .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    panel.wait_for()
    assert "3 of 10 points by visible checks" in panel.inner_text() and panel.locator("text=1.2 ✗").count() == 1
    assert run_labs(course, "progress").count("points by visible checks") == len(LABS)
    assert page.request.delete("{}/api/contents/panel.ipynb{}".format(*base_and_token(lab("")))).ok
    (course / "out" / "progress" / "panel.json").unlink()


def test_an_instructor_opens_a_source_as_a_notebook_and_it_keeps_its_text_when_saved(teacher, page, course):
    """The source is read and saved as a notebook by the server's own interface, as *Open With > Notebook* does."""
    page.goto(teacher("lab3_gluon.ipynb"))
    page.wait_for_selector("li.lm-MenuBar-item:has-text('Nbgrader')")
    base, token = base_and_token(teacher(""))
    source = f"{base}/api/contents/instructor/labs/lab3_gluon.py{token}"
    model = page.request.get(f"{source}&type=notebook").json()
    assert model["type"] == "notebook" and len(model["content"]["cells"]) > 50
    for image in re.findall(r"\]\((assets/[^)]+)\)", json.dumps(model["content"])):
        assert page.request.get(f"{base}/files/instructor/labs/{image}{token}").ok, image
    body = {"type": "notebook", "format": "json", "content": model["content"]}
    assert page.request.put(source, data=body).ok
    assert git(course, "status", "--porcelain") == ""


def test_an_instructor_grades_a_prose_answer_in_the_formgrader(teacher, page, graded_class):
    """From JupyterLab's menu to an answer in words; points and comment are in the gradebook afterwards."""
    page.goto(teacher("lab3_gluon.ipynb"))
    page.click("li.lm-MenuBar-item:has-text('Nbgrader')")
    page.click("li.lm-Menu-item:has-text('Formgrader')")
    page.wait_for_selector("iframe[src*='formgrader']")
    base, token = base_and_token(teacher(""))
    page.goto(f"{base}/formgrader/gradebook{token}")
    page.click("td a[href$='/gradebook/fixture_lab']")
    page.click("td a[href$='/gradebook/fixture_lab/fixture_lab']")
    page.click("td a:has-text('Submission #1')")
    student = "ada" if "every product" in page.inner_text("#notebook") else "bob"
    before = graded_class.scores("fixture_lab")[student]["q1_2"]
    assert before.needs_manual_grade and before.manual is None
    page.fill("#q1_2", "3")
    page.fill("#q1_2-comment", "Say what is read again.")
    with page.expect_response(re.compile("/formgrader/api/comment/")) as answer:
        page.press("#q1_2-comment", "Tab")
    assert answer.value.ok and answer.value.json()["manual_comment"] == "Say what is read again."
    after = graded_class.scores("fixture_lab")[student]["q1_2"]
    assert after.manual == 3 and not after.needs_manual_grade
