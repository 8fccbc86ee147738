"""Whole solved labs in a real JupyterLab: every plot and table is there and nothing is cut, in both themes.

The screenshots in `build/e2e/labs` show each notebook from top to bottom, for a person to look at.
"""

import re

import pytest

from tests.e2e.conftest import SCREENSHOTS
from tests.e2e.jupyter import git, open_notebook, run_all, run_every_cell, stop_kernels
from utils.files import ROOT

LABS = sorted(path.stem for path in ROOT.glob("lab*.ipynb"))
HEIGHT = 2400  # pixels of a screenshot

# What a reader could not see: pictures that did not load, and code, outputs or tables that are wider than their place.
UNSEEN = """notebook => {
    const all = selector => [...notebook.querySelectorAll(selector)];
    const told = (what, element) => `${what}: ${element.tagName}.${element.className} ${element.scrollWidth} in `
        + `${element.clientWidth} px, under ${element.closest('.jp-Cell').innerText.slice(0, 80)}`;
    const right = notebook.getBoundingClientRect().right;
    return [
        ...all('.jp-OutputArea-output img, .jp-RenderedMarkdown img')
            .filter(image => !image.complete || !image.naturalWidth).map(image => told('no picture', image)),
        ...all('.jp-CodeCell .cm-scroller, .jp-OutputArea-output, .jp-RenderedMarkdown, .jp-OutputArea-output table, .jp-RenderedMarkdown table')
            .filter(element => element.clientWidth > 0 && (element.scrollWidth > element.clientWidth + 2
                || element.getBoundingClientRect().right > right + 2))
            .map(element => told('cut', element)),
    ];
}"""


def solved(stem: str) -> str:
    from instructor.build import build_lab
    from instructor.course import answered_notebook
    from instructor.points import lab_path

    return answered_notebook(build_lab(lab_path(stem)))


def look_at(page, name: str, theme: str) -> list[str]:
    """Choose a theme, keep screenshots of the whole notebook, and return what a reader could not see."""
    page.click("li.lm-MenuBar-item:has-text('Settings')")
    page.hover("li.lm-Menu-item:has-text('Theme')")
    page.click(f"li.lm-Menu-item:has-text('JupyterLab {theme}')")
    page.wait_for_selector(f"body[data-jp-theme-light='{str(theme == 'Light').lower()}']", state="attached")
    panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    inside = panel.locator(".jp-WindowedPanel-outer").first
    problems = set()
    folder = SCREENSHOTS / "labs"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(200):
        at_end = inside.evaluate(
            "(box, at) => { box.scrollTop = at; return box.scrollTop + box.clientHeight >= box.scrollHeight - 2; }",
            number * (HEIGHT - 200),
        )
        page.wait_for_timeout(400)  # cells that come into sight are drawn
        problems |= set(panel.locator(".jp-Notebook").first.evaluate(UNSEEN))
        page.screenshot(path=folder / f"{name}-{theme.lower()}-{number:02}.png")
        if at_end:
            return sorted(problems)
    raise AssertionError(f"the end of {name} was not reached")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stem", LABS)
def test_a_solved_lab_shows_every_plot_and_table_in_both_themes(lab, page, course, stem):
    name = f"{stem}.ipynb"
    page.set_viewport_size({"width": 1400, "height": HEIGHT})
    (course / name).write_text(solved(stem), encoding="utf-8")
    try:
        open_notebook(page, lab(name))
        notebook = run_all(page, course, name, 1200)
        outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
        assert [output["evalue"] for output in outputs if output["output_type"] == "error"] == []
        assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3, "a lab draws"
        unseen = [*look_at(page, stem, "Dark"), *look_at(page, stem, "Light")]
        assert not unseen, "\n".join(unseen)
        assert page.missing == []
    finally:
        stop_kernels(page, lab(""))
        git(course, "checkout", "-q", name)


@pytest.mark.timeout(1800)
def test_the_source_of_lab1_runs_as_a_notebook_and_git_sees_no_new_file(teacher, page, course):
    """By *Open With > Notebook*: figures and recorded results are found, and git sees no new file."""
    page.set_viewport_size({"width": 1400, "height": HEIGHT})
    before = git(course, "status", "--porcelain")
    page.goto(teacher("instructor/labs"))
    page.click(".jp-DirListing-item:has-text('lab1.py')", button="right")
    page.hover("li.lm-Menu-item:has-text('Open With')")
    page.click(".lm-Menu li.lm-Menu-item >> text=/^Notebook$/")
    page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell")
    page.wait_for_selector("text=/Python 3.*Idle|\\| Idle/")
    run_every_cell(page, 1200)
    text = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook").inner_text()
    assert "No recorded table" not in text and re.findall(r"^\w*Error(?=:)", text, re.MULTILINE) == []
    assert page.missing == []
    stop_kernels(page, teacher(""))
    assert git(course, "status", "--porcelain") == before
    beside = git(course, "status", "--porcelain", "--ignored", "instructor/labs")
    assert [line for line in beside.splitlines() if not line.endswith(("__pycache__/", ".ipynb_checkpoints/"))] == []
