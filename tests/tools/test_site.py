"""The site: students' cells with the outputs of a solved run, links that lead somewhere, no solutions."""

import json
import re
from importlib.util import find_spec

import nbformat
import pytest

import tools.site.__main__ as site
from instructor.points import lab_names
from tests.instructor import lab_cases
from tools.site import pages
from utils.files import ROOT


@pytest.fixture(scope="module")
def built():
    return lab_cases.built("lab3_gluon")


def executed(built) -> dict:
    """The instructor's notebook, as after a run in which every code cell printed its own id."""
    notebook = nbformat.reads(built.instructor, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [nbformat.v4.new_output("stream", text=f"out of {cell.id}\n")]
    return notebook


def test_the_cells_are_the_students_and_the_outputs_are_those_of_the_run(built, tmp_path, monkeypatch):
    monkeypatch.setattr(site, "ROOT", tmp_path)
    (tmp_path / "out" / "demo" / built.name).mkdir(parents=True)
    nbformat.write(executed(built), tmp_path / "out" / "demo" / built.name / f"{built.name}.ipynb")
    student = nbformat.reads(built.student, as_version=4)
    run = pages.with_outputs(built.student, site.kept_run(built.name, built.instructor))
    shown = nbformat.reads(run, as_version=4)
    assert [cell.source for cell in shown.cells] == [cell.source for cell in student.cells]
    for cell in shown.cells:
        if cell.cell_type == "code":
            assert cell.outputs[0].text == f"out of {cell.id}\n"


def test_a_check_that_passed_says_so_once():
    texts = ("✓ 1.1: passed.\n✓ 1.1: passed.\n", "✓ 1.1: passed.\n", "twice\ntwice\n", "\n")
    outputs = [nbformat.v4.new_output("stream", text=text) for text in texts]
    outputs.append(nbformat.v4.new_output("display_data", data={"text/plain": "✓ 1.1: passed."}))
    assert [output.get("text") for output in pages.said_once(outputs)] == ["✓ 1.1: passed.\n", "twice\ntwice\n", None]


def test_a_run_of_other_code_is_not_taken(built):
    notebook = executed(built)
    assert site.same_code(built.instructor, notebook)
    next(cell for cell in notebook.cells if cell.cell_type == "code").source += "\n# changed"
    assert not site.same_code(built.instructor, notebook)


def test_an_output_with_a_solution_is_not_published(built, tmp_path, monkeypatch):
    notebook = executed(built)
    answer = next(c for c in notebook.cells if "### BEGIN SOLUTION" in c.source)
    answer.outputs = [nbformat.v4.new_output("stream", text=answer.source)]
    leaking = pages.with_outputs(built.student, notebook)
    monkeypatch.setattr(site, "collect", lambda folder, notebooks: {"lab3_gluon.ipynb": leaking.encode()})
    with pytest.raises(site.SiteError, match="would publish solutions"):
        site.build(tmp_path / "site", {})
    assert not (tmp_path / "site").exists()


def test_an_output_that_quotes_an_answer_is_left_out_and_the_others_stay(built):
    notebook = executed(built)
    answer = next(c for c in notebook.cells if c.id == "q3_2")
    answer.outputs.append(nbformat.v4.new_output("stream", text="line 22: secret"))
    shown = nbformat.reads(pages.withhold(nbformat.writes(notebook), lambda output: "secret" in output), as_version=4)
    (cell,) = [cell for cell in shown.cells if cell.id == "q3_2"]
    assert [output.text for output in cell.outputs] == ["out of q3_2\n", pages.WITHHELD]


@pytest.mark.parametrize("document", [file for file in pages.PAGES if file.endswith(".md")])
def test_links_of_the_pages_lead_to_pages_or_copies(document):
    links = pages.Links()
    text = links.rewrite((ROOT / document).read_text(encoding="utf-8"), document)
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)):
        known = {*pages.PAGES.values(), *links.files.values()}
        assert target in known or re.match(r"[a-z]+:", target), f"{document}: {target}"


def test_a_link_in_code_stays_as_it_is():
    text = "[a](students.md)\n```\n[b](docs/students.md)\n```\n[c](docs/students.md) [d](docs)"
    assert pages.Links().rewrite(text.replace("[a](students.md)", "x"), "README.md") == (
        "x\n```\n[b](docs/students.md)\n```\n[c](students.md) d"
    )


def test_a_link_that_leads_nowhere_stops_the_build():
    with pytest.raises(FileNotFoundError, match=r"README\.md links to gone\.md"):
        pages.Links().rewrite("[a](gone.md)", "README.md")


def test_a_word_of_the_glossary_leads_there_where_a_lab_uses_it_first():
    terms = ["SM", "tensor core", "Triton, Gluon"]
    hint = "<details><summary>Hint 1</summary>SM</details>"
    text = pages.link_first_uses(
        f"# SM\n{hint} `SM` a [SM](x) sm, $SM$ SMs and SM; Tensor cores in Gluon, Triton", terms
    )
    for word, anchor in (("SMs", "sm"), ("Tensor cores", "tensor-core"), ("Gluon", "triton-gluon")):
        assert f'<a href="glossary.html#word-{anchor}">{word}</a>' in text
    assert text.count("<a ") == 3 and terms == []


@pytest.mark.parametrize("lab", lab_names())
def test_each_part_of_a_lab_is_a_page_and_nothing_is_lost(lab):
    notebook = nbformat.read(ROOT / f"{lab}.ipynb", as_version=4)
    text = "\n\n".join(cell.source for cell in notebook.cells)
    parts = pages.parts_of(notebook, lab)
    numbers = re.findall(r"^# Part (\d+):", text, re.MULTILINE)
    assert list(parts) == [f"{lab}.ipynb", *(f"{lab}-part{number}.ipynb" for number in numbers)] and len(numbers) > 4
    assert set(text.split()) <= {
        word for part in parts.values() for cell in part["cells"] for word in cell["source"].split()
    }


def test_the_reference_has_every_name():
    import utils

    text = pages.api_page()
    for name in utils.__all__:
        assert f"## `{name}`" in text


@pytest.mark.slow
@pytest.mark.skipif(find_spec("sphinx") is None, reason="Sphinx is missing: `make site` adds it")
def test_the_site_is_built_without_a_warning(built, tmp_path):
    labs = {name: lab_cases.built(name).student for name in lab_names()}
    labs["lab3_gluon"] = pages.with_outputs(built.student, executed(built))
    page = site.build(tmp_path / "site", labs)
    text = page.read_text(encoding="utf-8")
    assert "Search" in text and "theme-switch" in text
    lab = (page.parent / "lab3_gluon-part3.html").read_text(encoding="utf-8")
    assert "out of q3_2" in lab and "YOUR CODE HERE" in lab and "BEGIN SOLUTION" not in lab
    assert all(f"lab3_gluon-part{other}.html" in lab for other in (2, 4)), "the parts before and after"
    formulas = (page.parent / "lab1-part1.html").read_text(encoding="utf-8")
    assert "<math" in formulas
    for html in page.parent.glob("*.html"):
        from_elsewhere = r'<(script|link)[^>]*(src|href)="(https?:)?//'
        assert not re.search(from_elsewhere, html.read_text(encoding="utf-8")), html.name
    assert (page.parent / "files" / "lab3_gluon.ipynb").exists()
    assert "A100" in (page.parent / "roofline.html").read_text()
    assert json.loads(re.search(r"\((.*)\)", (page.parent / "searchindex.js").read_text(), re.DOTALL)[1])["titles"]
    assert not (page.parent / "_sources").exists()
    for target in re.findall(r'(?:href|src)="([^"#:?]+)["#?]', text):
        assert (page.parent / target).exists(), target
