"""The README is true: its example runs, its names and links exist, its points are those of the lab."""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

import utils

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_two_commands_are_on_the_first_screen():
    first_screen = "\n".join(README.splitlines()[:12])
    assert "make lab " in first_screen and "make test " in first_screen


def test_the_api_page_lists_exactly_what_utils_exports():
    section = README.split("## `utils` in one page")[1].split("```")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ") and "Names" not in line]
    listed = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert listed == set(utils.__all__)


@pytest.mark.slow
def test_the_example_runs():
    code = README.split("```python")[1].split("```")[0]
    space: dict = {}
    exec("import torch\n" + code, space)
    plt.close("all")


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()


def test_the_points_table_is_the_labs():
    from instructor.points import put_points_table

    assert put_points_table(README, "lab1") == README, "run: labs points lab1 --readme README.md"


def test_verbs_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for verb in set(re.findall(r"`?make ([a-z-]+)", README)):
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), verb
