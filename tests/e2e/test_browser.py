"""The course in a real JupyterLab and a real browser: headless Chromium, driven by Playwright.

Everything happens in a copy of the course, which is a repository of its own: `git status` then says what a look at a lab
changed. Screenshots are kept in `build/e2e`.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest

from utils.files import ROOT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCREENSHOTS = ROOT / "build" / "e2e"
LABS = sorted(path.name for path in ROOT.glob("lab*.ipynb"))

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("playwright") is None, reason="Playwright is missing: `make test-e2e` adds it"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """A copy of the course with its files under git's eyes."""
    folder = tmp_path_factory.mktemp("course")
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "as given out")
    return folder


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout


@contextlib.contextmanager
def jupyterlab(course: Path, tmp_path: Path, *options: str):
    """The address of a JupyterLab that `labs open` started in the copy."""
    environment = {
        **{key: value for key, value in os.environ.items() if key not in ("DISPLAY", "WAYLAND_DISPLAY")},
        **{f"JUPYTER_{kind}_DIR": str(tmp_path / kind) for kind in ("RUNTIME", "CONFIG", "DATA")},
    }
    log = tmp_path / "jupyter.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "utils.cli", "open", "lab1", *options],
            **{"cwd": course, "stdout": output, "stderr": output, "env": environment, "start_new_session": True},
        )
    try:
        for _ in range(600):
            if found := re.search(r"(http://localhost:\d+)/lab/tree/lab1\.ipynb(\?token=\w+)", log.read_text()):
                break
            time.sleep(0.2)
        assert found, log.read_text()
        yield lambda path: f"{found[1]}/lab/tree/{path}{found[2]}&reset"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def lab(course, tmp_path_factory):
    with jupyterlab(course, tmp_path_factory.mktemp("jupyter")) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}; install it, or `playwright install chromium`")
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, request):
    """A page that notes files that were not found; a screenshot of its end is kept."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.set_default_timeout(120_000)
    missing = page.missing = []
    page.on(
        "response",
        lambda answer: missing.append(answer.url) if answer.status == 404 and "/files/" in answer.url else None,
    )
    yield page
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{re.sub(r'[^a-z0-9]+', '-', request.node.name)}.png")
    page.close()


def open_notebook(page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell")
    page.wait_for_selector("text=/Python 3.*Idle|\\| Idle/")


def run_all(page, course: Path, name: str, seconds: int) -> dict:
    """Run all cells, wait until the last one has run, save; return the notebook as it is on disk then."""
    page.click("li.lm-MenuBar-item:has-text('Run')")
    page.click("li.lm-Menu-item:has-text('Run All Cells')")
    page.wait_for_timeout(1500)
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status='idle']", timeout=1000 * seconds)
    page.keyboard.press("Control+s")
    deadline = time.monotonic() + 30
    while True:
        notebook = json.loads((course / name).read_text())
        last = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"][-1]
        if last["execution_count"] or time.monotonic() > deadline:
            return notebook
        time.sleep(0.5)


@pytest.mark.parametrize("name", LABS)
def test_a_look_at_a_lab_shows_it_and_changes_nothing(lab, page, course, name):
    open_notebook(page, lab(name))
    assert page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) h1").first.is_visible()
    page.wait_for_timeout(3000)
    assert page.locator("text=official Jupyter news").count() == 0
    assert page.locator("text=Create Assignment").count() == 0 and page.locator("text=Nbgrader").count() == 0
    assert page.locator(".jp-DirListing-item:has-text('instructor')").count() == 0
    page.keyboard.press("Control+s")
    page.wait_for_timeout(2000)
    assert git(course, "status", "--porcelain") == ""
    assert page.missing == []


def small_lab(course: Path, name: str, *cells) -> None:
    notebook = nbformat.v4.new_notebook(cells=list(cells))
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    (course / name).write_text(nbformat.writes(notebook))


def graded(source: str, grade_id: str, **meta):
    cell = nbformat.v4.new_code_cell(source, id=grade_id)
    fields = {"grade": False, "solution": False, "locked": True, "task": False, "schema_version": 3}
    cell.metadata["nbgrader"] = {**fields, "grade_id": grade_id, **meta}
    return cell


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
    page.click("button:has-text('Validate')")
    page.wait_for_selector(".jp-Dialog >> text=/Success|passes all the tests/", timeout=180_000)
    (course / "slow.ipynb").unlink()


def test_lab3_runs_from_top_to_bottom_with_all_its_pictures(lab, page, course):
    open_notebook(page, lab("lab3_gluon.ipynb"))
    notebook = run_all(page, course, "lab3_gluon.ipynb", 600)
    allowed = {"NotImplementedError", "AnswerNeeded", "WrongAnswer"}
    errors = [o["ename"] for c in notebook["cells"] for o in c.get("outputs", []) if o["output_type"] == "error"]
    assert errors and set(errors) <= allowed, "an unanswered lab complains about answers, and about nothing else"
    for image in page.locator(".jp-RenderedImage img, .jp-RenderedMarkdown img").all():
        assert image.evaluate("image => image.complete && image.naturalWidth > 0")
    assert page.missing == []
    written = [line[3:] for line in git(course, "status", "--porcelain").splitlines()]
    assert written == ["lab3_gluon.ipynb"], "results go to out/"
    git(course, "checkout", "-q", "lab3_gluon.ipynb")


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_both_themes(lab, page, theme):
    open_notebook(page, lab("lab4_sdpa.ipynb"))
    page.click("li.lm-MenuBar-item:has-text('Settings')")
    page.hover("li.lm-Menu-item:has-text('Theme')")
    page.click(f"li.lm-Menu-item:has-text('{theme}')")
    light = "true" if "Light" in theme else "false"
    page.wait_for_selector(f"body[data-jp-theme-light='{light}']")


def test_an_instructor_sees_the_formgrader_and_opens_a_source_with_its_images(browser, page, course, tmp_path):
    with jupyterlab(course, tmp_path, "--instructor") as address:
        page.goto(address("instructor/labs/lab1.py").replace("?", "?factory=Notebook&"))
        page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
        assert page.locator("text=Nbgrader").count() > 0
        page.wait_for_selector("text=/Idle/")
        for part in ("#Part-1", "#Part-3", "#Part-5"):  # images are loaded when they come into view
            page.evaluate("part => document.querySelector(`[id^='${part.slice(1)}']`)?.scrollIntoView()", part)
            page.wait_for_timeout(700)
        page.keyboard.press("Control+s")
        page.wait_for_timeout(2000)
        assert page.missing == []
        assert git(course, "status", "--porcelain") == ""
