"""Building a lab: the two notebooks that its source makes, and the sources that are refused."""

import json
import re
from pathlib import Path

import jupytext
import nbformat
import pytest
from typer.testing import CliRunner

from instructor import build as builder
from instructor import points as points_module
from instructor.build import build_lab, stale_files
from instructor.cli import app
from instructor.points import lab_names, lab_path, points_table, put_points_table
from instructor.source import LabError, read_lab
from tests.instructor.lab_cases import built
from utils.validation import UserError

FIXTURE_LAB = Path(__file__).parent / "fixture_lab.py"
HEADER = FIXTURE_LAB.read_text().split("\n\n")[0] + "\n\n"
HEADING = "# %% [markdown]\n# ### Question 1.1: Double {points}\n\n"
ANSWER = """\
# %% nbgrader={"grade_id": "q1_1", "solution": true}
def double(x):
    ### BEGIN SOLUTION
    twice_as_much = x + x
    return twice_as_much
    ### END SOLUTION

"""
TESTS = """\
# %% nbgrader={"grade_id": "q1_1_tests", "grade": true, "points": 6}
assert double(2) == 4
### BEGIN HIDDEN TESTS
assert double("ab") == "abab"
### END HIDDEN TESTS

"""


@pytest.fixture
def lab_file(tmp_path):
    """Write a lab's source after the common header and return its path."""

    def write(*parts, name="tiny"):
        path = tmp_path / f"{name}.py"
        path.write_text(HEADER + "".join(parts), encoding="utf-8")
        return path

    return write


def cells(text):
    return {cell.id: cell for cell in nbformat.reads(text, as_version=4).cells}


def problems_of(path):
    with pytest.raises(LabError) as caught:
        build_lab(path)
    return caught.value.problems


# --- what is built ---


def test_student_notebook_keeps_the_question_and_loses_the_answer(lab_file):
    built = build_lab(lab_file(HEADING, ANSWER, TESTS))
    student, instructor = cells(built.student), cells(built.instructor)
    assert student["q1_1"].source == "def double(x):\n    # YOUR CODE HERE\n    raise NotImplementedError()"
    assert student["q1_1_tests"].source.endswith("assert double(2) == 4")
    assert "twice_as_much" in instructor["q1_1"].source and "abab" in instructor["q1_1_tests"].source
    assert "twice_as_much" not in built.student and "abab" not in built.student
    assert list(student) == list(instructor)


def test_metadata_is_completed(lab_file):
    meta = {i: c.metadata for i, c in cells(build_lab(lab_file(HEADING, ANSWER, TESTS)).student).items()}
    answer, tests = meta["q1_1"], meta["q1_1_tests"]
    common = {"schema_version": 3, "cell_type": "code", "task": False}
    assert answer["nbgrader"].items() >= {"solution": True, "grade": False, "locked": False, **common}.items()
    graded = {"solution": False, "grade": True, "locked": True, "points": 6, **common}
    assert tests["nbgrader"].items() >= graded.items()
    assert answer["deletable"] is False and "editable" not in answer
    assert tests["editable"] is False and tests["deletable"] is False


def test_build_is_deterministic_and_normal(small_lab):
    again = build_lab(FIXTURE_LAB)
    assert (again.student, again.instructor) == (small_lab.student, small_lab.instructor)
    for text in (small_lab.student, small_lab.instructor):
        assert text.endswith("}\n") and not text.endswith("\n\n")
        notebook = json.loads(text)
        assert notebook["nbformat"] == 4 and notebook["nbformat_minor"] == 5
        assert notebook["metadata"] == {
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
        allowed = {"deletable", "editable", "jupyter", "nbgrader", "tags"}
        for cell in notebook["cells"]:
            assert set(cell["metadata"]) <= allowed
            assert cell["cell_type"] != "code" or (cell["outputs"] == [] and cell["execution_count"] is None)


def test_cell_ids_survive_an_inserted_cell(lab_file):
    prose = "# %% [markdown]\n# Some words.\n\n"
    before = list(cells(build_lab(lab_file(prose, HEADING, ANSWER, TESTS)).student))
    after = list(cells(build_lab(lab_file("# %%\nx = 1\n\n", prose, HEADING, ANSWER, TESTS)).student))
    assert after[1:] == before


def test_equal_cells_get_different_ids(lab_file):
    prose = "# %% [markdown]\n# Some words.\n\n"
    assert len(cells(build_lab(lab_file(prose, prose, prose, HEADING, ANSWER, TESTS)).student)) == 6


def test_source_goes_through_jupyterlab_unchanged():
    """A source that is opened as a notebook and saved again changes only jupytext's version in the header."""
    text = FIXTURE_LAB.read_text()
    saved = jupytext.writes(jupytext.reads(text, fmt="py:percent"), fmt="py:percent")
    saved = re.sub(r"#       (format_version|jupytext_version): .*\n", "", saved)
    assert saved.rstrip() == text.rstrip()


def test_cells_from_the_first_answer_on_may_raise(small_lab):
    tagged = {i for i, c in cells(small_lab.student).items() if "raises-exception" in c.metadata.get("tags", [])}
    code = [i for i, c in cells(small_lab.student).items() if c.cell_type == "code"]
    assert tagged == {*code[code.index("q1_1") :]} < {*code}


def test_text_answer_keeps_what_stands_around_its_markers(lab_file):
    words = """\
# %% [markdown] nbgrader={"grade_id": "q1_1", "grade": true, "solution": true, "points": 2}
# Because:
#
# ### BEGIN SOLUTION
# memory is slower than arithmetic.
#
# === BEGIN MARK SCHEME ===
# Two points for naming memory.
# === END MARK SCHEME ===
# ### END SOLUTION
"""
    built = build_lab(lab_file(HEADING, words))
    assert cells(built.student)["q1_1"].source == "Because:\n\nYOUR ANSWER HERE"
    assert "naming memory" in built.instructor


def test_task_cell_loses_its_marking_scheme(lab_file):
    task = """\
# %% [markdown] nbgrader={"grade_id": "q1_1", "task": true, "points": 5}
# Measure it, in as many cells as you need.
#
# === BEGIN MARK SCHEME ===
# Five points for five measurements.
# === END MARK SCHEME ===
"""
    built = build_lab(lab_file(HEADING, task))
    assert cells(built.student)["q1_1"].source.rstrip() == "Measure it, in as many cells as you need."
    assert built.questions[0].points == 5 and built.questions[0].graded == "by hand"


# --- hidden checks, and hints ---


@pytest.mark.parametrize("name, asked", [("lab1", True), ("tiny", False)])
def test_a_test_of_one_line_is_asked_of_the_hidden_check(lab_file, name, asked):
    """The build writes the hidden tests of a lab that has hidden checks."""
    tests = TESTS.split("assert")[0] + "check_gemm(double)\n\n"
    built = build_lab(lab_file("# %%\nfrom utils import *\n\n", HEADING, ANSWER, tests, name=name))
    hidden = (
        "### BEGIN HIDDEN TESTS\nfrom instructor.checks import lab1 as hidden\nhidden.gemm(double).raise_if_wrong()\n"
    )
    assert (hidden in cells(built.instructor)["q1_1_tests"].source) is asked
    assert cells(built.student)["q1_1_tests"].source == "check_gemm(double)"


def test_long_cells_are_folded(lab_file, small_lab):
    """A cell with the tag `collapsed`, and a test cell that defines its check."""
    built = build_lab(lab_file(HEADING, ANSWER, TESTS, '# %% tags=["collapsed"]\nprint(1)\n'))
    folded = [
        c.get("metadata", {}).get("jupyter", {}).get("source_hidden", False) for c in cells(built.student).values()
    ]
    assert folded == [False, False, False, True]
    assert cells(small_lab.student)["q1_1_tests"].metadata.jupyter.source_hidden


HINTS = "{hint idea}\nTwo of it.\n\n{hint plan}\nAdd it\nto itself.\n\n{hint line}\nReturn it."


def as_prose(text: str) -> str:
    return "# %% [markdown]\n" + "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines()) + "\n"


def test_hints_are_folded(lab_file):
    built = build_lab(lab_file(HEADING, as_prose(HINTS), ANSWER, TESTS))
    assert built.hints == {"1.1": ["idea", "plan", "line"]}
    folded = list(cells(built.student).values())[1].source
    assert folded.count("<details>") == folded.count("</details>") == 3
    assert "<summary>Hint 2: the plan</summary>\n\nAdd it\nto itself.\n\n</details>" in folded
    assert "{hint" not in built.student
    fewer = build_lab(lab_file(HEADING, as_prose(HINTS[HINTS.index("{hint plan}") :]), ANSWER, TESTS))
    assert fewer.hints == {"1.1": ["plan", "line"]} and "<summary>Hint 1: the plan</summary>" in fewer.student


# --- points ---


def test_points_are_written_into_the_prose(small_lab):
    sources = [cell.source for cell in cells(small_lab.student).values()]
    assert sources[0].startswith("# A small lab\n\nIt is worth 12.5 points and 3 bonus points.\n\n| Question |")
    headings = [s.splitlines()[0] for s in sources if s.startswith("### ")]
    assert headings == [
        "### Question 1.1: A product (6 points)",
        "### Question 1.2: In words (4 points)",
        "### Question 1.3: A number (2.5 points)",
        "### Bonus Question 1.4: A GEMV (3 bonus points)",
    ]


def test_one_number_changes_points_everywhere(lab_file):
    sources = HEADING, "# %% [markdown]\n# {points:1.1} of {points:regular}\n\n", ANSWER
    built = build_lab(lab_file(*sources, TESTS.replace('"points": 6', '"points": 1')))
    text = [cell.source for cell in cells(built.student).values()]
    assert text[:2] == ["### Question 1.1: Double (1 point)", "1 of 1"]
    assert cells(built.student)["q1_1_tests"].metadata.nbgrader.points == 1


def test_points_table_in_a_readme():
    table = points_table(FIXTURE_LAB)
    assert "| 1.2 | In words | 4 | by hand |" in table
    assert "| 1.3 | A number | 2.5 | automatically |" in table and "| **Sum** | | **12.5 + 3 bonus** | |" in table
    readme = "before\n<!-- points:lab9 -->\nold\n<!-- /points -->\nafter\n"
    new = put_points_table(readme, "lab9", table)
    assert new == f"before\n<!-- points:lab9 -->\n{table}\n<!-- /points -->\nafter\n"
    assert put_points_table(new, "lab9", table) == new
    with pytest.raises(LabError, match="no <!-- points:lab1 -->"):
        put_points_table(readme, "lab1", table)


# --- what is refused ---

MANUAL = '# %% [markdown] nbgrader={"grade_id": "q1_1", "grade": true, "solution": true, "points": 4}\n'


def with_answer(old, new):
    return HEADING, ANSWER.replace(old, new), TESTS


def with_tests(old, new):
    return HEADING, ANSWER, TESTS.replace(old, new)


def with_hints(old, new):
    return HEADING, as_prose(HINTS.replace(old, new)), ANSWER, TESTS


def with_more(text):
    return HEADING, ANSWER, TESTS, text


SCHEMES = "# ### BEGIN SOLUTION\n# a\n# ### END SOLUTION\n# === BEGIN MARK SCHEME ===\n# b\n# === END MARK SCHEME ===\n"
NO_MARKERS = '# %% nbgrader={"grade_id": "q1_1", "solution": true}\nx = 1\n'
WITHOUT_GRADE = MANUAL.replace('"grade": true, ', "").replace(', "points": 4', "")
REFUSED = {
    "locked answer": (with_answer('"solution"', '"locked": true, "solution"'), "may not be locked"),
    "answer without metadata": (with_answer(ANSWER.splitlines()[0], "# %%"), "give the cell a grade_id"),
    "answer without id": (with_answer('"grade_id": "q1_1", ', ""), "has no grade_id"),
    "stub without metadata": (with_more("# %%\n# YOUR CODE HERE\n"), "an answer needs a grade_id"),
    "double id": ((HEADING, ANSWER, ANSWER, TESTS), "the id is used before, in line 17"),
    "id nbgrader refuses": (with_answer("q1_1", "q1.1"), "nbgrader refuses the id 'q1.1'"),
    "id without question": (with_tests("q1_1_tests", "tests"), "names its question"),
    "id of another question": (with_tests("q1_1_", "q1_2_"), "stands under Question 1.1"),
    "answer under no heading": ((ANSWER, TESTS, HEADING), "no question's heading"),
    "no END SOLUTION": (with_answer("    ### END SOLUTION\n", ""), "BEGIN SOLUTION without END"),
    "no BEGIN": (with_answer("    ### BEGIN SOLUTION\n", ""), "END SOLUTION without a BEGIN"),
    "unknown key": (with_answer('"solution"', '"solutoin"'), "unknown nbgrader metadata 'solutoin'"),
    "unknown cell metadata": (with_more('# %% slideshow={"a": 1}\nx = 1\n'), "metadata 'slideshow'"),
    "broken JSON": (with_answer("true}", "tru}"), "no valid JSON"),
    "points differ": ((HEADING.replace("{points}", "(5 points)"), ANSWER, TESTS), "says 5 points itself"),
    "heading without points": ((HEADING.replace(" {points}", ""), ANSWER, TESTS), "has to end in {points}"),
    "question without cells": (with_more(HEADING.replace("1.1", "1.2")), "Question 1.2 has no graded"),
    "question twice": (with_more(HEADING), "number of an earlier question"),
    "answer that gives nothing": ((HEADING, ANSWER), "Question 1.1 has no graded cell"),
    "bonus id without word": (with_answer("q1_1", "bonus_1_1"), "belongs to bonus_1_1"),
    "tests before answer": ((HEADING, TESTS, ANSWER), "stands before its answer"),
    "tests without answer": ((HEADING, TESTS), "has no answer cell to test"),
    "hidden without points": (with_tests(', "points": 6', ""), "needs points"),
    "zero points": (with_tests('"points": 6', '"points": 0'), "should be more than 0"),
    "hidden in plain cell": (
        with_more("# %%\n### BEGIN HIDDEN TESTS\nx = 1\n### END HIDDEN TESTS\n"),
        "a HIDDEN TESTS region in a cell without",
    ),
    "hidden in answer": (with_answer("SOLUTION", "HIDDEN TESTS"), "hidden tests belong into a test"),
    "tests that cannot fail": (with_tests("assert ", ""), "the tests cannot fail"),
    "dropped verdict": (
        with_tests("assert double(2) == 4", "def check_it(x): ...\ncheck_it(double)\nassert 1"),
        "add .raise_if_wrong()",
    ),
    "partial credit": (with_more("double(3)\n"), "partial grade"),
    "answer without markers": ((HEADING, NO_MARKERS, TESTS), "needs BEGIN SOLUTION"),
    "no Python": (with_answer("x + x", "x +"), "no valid Python"),
    "nothing visible": (with_tests("assert double(2) == 4\n", ""), "keep one visible line"),
    "markdown not manual": ((HEADING, WITHOUT_GRADE + "# Words.\n"), "needs both grade and solution"),
    "scheme outside solution": ((HEADING, MANUAL + SCHEMES), "put the marking scheme"),
    "unknown placeholder": (("# %% [markdown]\n# {points:7.7}\n\n", HEADING, ANSWER, TESTS), "{points:7.7} is unknown"),
    "solution leaks": (
        (HEADING, "# %%\nx = 1\n#   twice_as_much  =  x + x\n\n", ANSWER, TESTS),
        "is secret and reaches",
    ),
    "no Python without the solution": (
        with_answer("".join(ANSWER.splitlines(True)[2:5]), "    if x:\n### BEGIN SOLUTION\n        return x + x\n"),
        "without the solution the cell is no valid Python",
    ),
    "unknown hint": (with_hints("{hint plan}", "{hint trick}"), "{hint trick} is unknown; write idea, plan, line"),
    "empty hint": (with_hints("Return it.", ""), "the hint 'line' of Question 1.1 is empty"),
    "hints out of order": (
        with_hints("{hint idea}", "{hint line}"),
        "has the hints line, plan, line; write idea, plan",
    ),
    "secret hint": (with_hints("Two of it.", "twice_as_much = x + x"), "is secret and reaches the students' notebook"),
    "hint under no heading": ((as_prose(HINTS), HEADING, ANSWER, TESTS), "a hint stands under no question's heading"),
    "autotest": (with_tests("assert double(2)", "### AUTOTEST double(2)\nassert double(2)"), "AUTOTEST"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(lab_file, name):
    parts, message = REFUSED[name]
    found = problems_of(lab_file(*parts))
    assert any(message in problem for problem in found), found
    for problem in found:
        assert problem.startswith("tiny.py") and problem.endswith((".", "}"))


def test_problems_name_line_and_cell(lab_file):
    path = lab_file(HEADING, "# %%\ntext = '''\n# %% no cell\n'''\n\n", ANSWER, TESTS + "double(3)\n")
    (problem,) = problems_of(path)
    lines = path.read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "q1_1_tests" in text)
    assert problem.startswith(f"tiny.py, line {line} (cell q1_1_tests): ")


def test_all_problems_of_a_source_come_at_once(lab_file):
    broken = ANSWER.replace('"solution"', '"locked": true, "solution"')
    assert len(problems_of(lab_file(HEADING, broken, TESTS.replace("assert ", "")))) == 2


def test_a_long_secret_may_not_even_be_quoted(lab_file):
    secret = "assert double([1, 2, 3]) == [1, 2, 3, 1, 2, 3]"
    tests = TESTS.replace('assert double("ab") == "abab"', secret)
    (problem,) = problems_of(lab_file(HEADING, ANSWER, tests, f"# %% [markdown]\n# Try `{secret}` too.\n"))
    assert "is secret and reaches the students' notebook in tiny.py, line 30" in problem


def test_public_lines_and_imports_are_no_secret(lab_file):
    answer = ANSWER.replace("twice_as_much = x + x", "import numpy as np\n    twice_as_much = x + x  # public")
    build_lab(lab_file(HEADING, "# %%\nimport numpy as np\nx = 1\ntwice_as_much = x + x\n\n", answer, TESTS))


# --- files and commands ---


@pytest.fixture
def house(tmp_path, monkeypatch, lab_file):
    """A folder with the lab `tiny`, which the commands use as the repository."""
    path = lab_file(HEADING, ANSWER, TESTS)
    monkeypatch.setattr(points_module, "LABS", path.parent)
    monkeypatch.setattr(builder, "ROOT", tmp_path / "house")
    monkeypatch.setattr("instructor.refusals.REGULAR_POINTS", 6)
    return tmp_path / "house"


def labs(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_build_command(house):
    assert labs("build", "--check").exit_code == 1
    result = labs("build")
    assert result.exit_code == 0 and "tiny: 6 points + 0 bonus in 1 questions" in result.output
    assert sorted(p.relative_to(house).as_posix() for p in house.rglob("*.ipynb")) == [
        "build/instructor/tiny/tiny.ipynb",
        "tiny.ipynb",
    ]
    written = (house / "tiny.ipynb").stat().st_mtime_ns
    assert "unchanged" in labs("build", "tiny").output
    assert (house / "tiny.ipynb").stat().st_mtime_ns == written


def test_check_command_finds_an_edited_notebook(house):
    labs("build")
    assert labs("build", "--check").exit_code == 0
    notebook = house / "tiny.ipynb"
    notebook.write_bytes(notebook.read_bytes() + b"\n")
    edited = notebook.read_bytes()
    result = labs("build", "--check")
    assert result.exit_code == 1 and "tiny.ipynb differs from its source: run `labs build tiny`" in result.output
    assert notebook.read_bytes() == edited


def test_a_lab_goes_by_its_beginning():
    assert lab_path("lab4") == lab_path("lab4_sdpa.ipynb") == lab_path("lab4_sdpa")
    with pytest.raises(UserError, match=r"'lab' could be lab1 or lab2_.*; the labs are: lab1, lab2_"):
        lab_path("lab")


def test_a_kernel_that_a_cell_wrote_is_no_lab(lab_file):
    folder = lab_file(HEADING, ANSWER, TESTS).parent
    (folder / "tiny_kernel.py").write_text("from triton.experimental import gluon\n")
    (folder / "empty.py").write_bytes(b"\xff")
    assert lab_names(folder) == ["tiny"] and lab_path("tin", folder) == folder / "tiny.py"


def test_commands_refuse_bad_input(house, lab_file):
    result = labs("build", "lab9")
    assert result.exit_code == 2 and "there is no lab 'lab9'; the labs are: tiny" in result.output
    lab_file(HEADING, ANSWER)
    result = labs("build")
    assert result.exit_code == 2 and "Question 1.1 has no graded cell" in result.output
    assert labs("points", "--readme", "nowhere.md").exit_code == 2


def test_points_command(house, tmp_path):
    assert "| 1.1 | Double | 6 | automatically |" in labs("points").output
    readme = tmp_path / "README.md"
    readme.write_text("<!-- points:tiny -->\n<!-- /points -->\n")
    assert labs("points", "--readme", str(readme)).exit_code == 0
    assert "| 1.1 | Double | 6 | automatically |" in readme.read_text()


# --- the labs themselves ---


@pytest.mark.parametrize("name", lab_names())
def test_committed_notebook_is_what_its_source_builds(name):
    assert stale_files(built(name)) == [], f"run `labs build {name}`"


@pytest.mark.parametrize("name", lab_names())
def test_every_cell_is_found_where_it_stands(name):
    """An error in a cell names the line of the cell's marker."""
    path = lab_path(name)
    lines = path.read_text().splitlines()
    lab = read_lab(path)
    assert [cell.line for cell in lab.cells] == sorted({cell.line for cell in lab.cells})
    for cell in lab.cells:
        assert lines[cell.line - 1].startswith(("# %%", "### TESTS"))
        assert cell.grade_id is None or cell.grade_id in lines[cell.line - 1]


def test_a_line_at_an_answers_end_is_its_test_cell(lab_file):
    line = "### TESTS q1_1_tests, 6 points: assert double(2) == 4\n\n"
    built = cells(build_lab(lab_file(HEADING, ANSWER.rstrip(), "\n", line)).instructor)
    assert built["q1_1_tests"].source.endswith("assert double(2) == 4")
    assert built["q1_1_tests"].metadata.nbgrader["points"] == 6 and "TESTS" not in built["q1_1"].source
    with pytest.raises(LabError, match="a test cell's line reads"):
        build_lab(lab_file(HEADING, ANSWER.rstrip(), "\n", line.replace(" 6 points", "")))


def test_what_a_check_counts_is_written_from_its_rule(lab_file):
    heading = HEADING + "# %% [markdown]\n# {counts}\n\n"
    built = build_lab(lab_file(heading, ANSWER, TESTS, name="lab1"))
    assert (
        '<summary>What the check counts</summary>\\n",\n    "\\n",\n    "What runs counts: no matrix' in built.student
    )


def test_with_a_public_address_a_notebook_fetches_the_course_on_a_bare_machine(monkeypatch):
    assert "fetch" not in cells(build_lab(FIXTURE_LAB).student)
    monkeypatch.setattr(builder, "repository_address", lambda: "https://github.com/us/labs")
    built = build_lab(FIXTURE_LAB)
    for text in (built.student, built.instructor):
        assert [*cells(text)][1] == "fetch" and "git clone -q --depth 1 https://github.com/us/labs" in cells(text)[
            "fetch"
        ].source
