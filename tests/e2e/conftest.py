"""A copy of the course, JupyterLab on it, and headless Chromium, for the tests of `tests/e2e`.

Everything happens in a copy of the course, which is a repository of its own: `git status` then says what a look at a lab
changed. Screenshots are kept in `build/e2e`.
"""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.jupyter import git, jupyterlab
from utils.files import ROOT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FIXTURE_LAB = ROOT / "tests" / "instructor" / "fixture_lab.py"
SCREENSHOTS = ROOT / "build" / "e2e"


def pytest_collection_modifyitems(items):
    """Mark every test of this folder: it is slow, needs a browser, and is skipped where Playwright is missing."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(900))
            if find_spec("playwright") is None:
                item.add_marker(pytest.mark.skip(reason="Playwright is missing: `make test-e2e` adds it"))


@pytest.fixture(scope="session")
def course(tmp_path_factory) -> Path:
    """A copy of the course with its files under git's eyes."""
    folder = tmp_path_factory.mktemp("course")
    for name in filter(None, git(ROOT, "ls-files", "-co", "--exclude-standard").split("\n")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "as given out")
    return folder


@pytest.fixture(scope="session")
def lab(course, tmp_path_factory):
    """JupyterLab as a student has it: a function from the path of a notebook to its address."""
    with jupyterlab(course, tmp_path_factory.mktemp("jupyter")) as address:
        yield address


@pytest.fixture(scope="session")
def graded_class(course):
    """The folder of a class in the copy: Ada's and Bob's small labs were graded, and their prose waits for a person."""
    from instructor.build import build_lab
    from instructor.course import Course, answered_notebook
    from tests.e2e.jupyter import run_labs

    built, folder = build_lab(FIXTURE_LAB), course / "course"
    answers = {
        "ada": "It writes every product to memory before it adds them: M x K x N numbers.",
        "bob": "Because Python is slow.",
    }
    for student, prose in answers.items():
        Course(folder).submit(built.name, student, answered_notebook(built, {"q1_2": prose}))
    run_labs(course, "grade", str(FIXTURE_LAB.relative_to(ROOT)), "--course", "course", "--jobs", "1")
    return Course(folder)


@pytest.fixture(scope="session")
def teacher(graded_class, course, tmp_path_factory):
    """JupyterLab as an instructor has it, beside a graded class: a function from the path of a file to its address."""
    with jupyterlab(course, tmp_path_factory.mktemp("jupyter"), "--instructor") as address:
        yield address


@pytest.fixture(scope="session")
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
    page.set_default_timeout(60_000)
    missing = page.missing = []
    page.on(
        "response",
        lambda answer: missing.append(answer.url) if answer.status == 404 and "/files/" in answer.url else None,
    )
    yield page
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{re.sub(r'[^a-z0-9]+', '-', request.node.name)}.png")
    page.close()
