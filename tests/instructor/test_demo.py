"""`labs demo`: solved labs as pages, with what they wrote and a summary."""

import nbformat
import pytest
from typer.testing import CliRunner

from instructor.build import Built
from instructor.cli import app
from instructor.demo import run_demo
from utils.files import ROOT


@pytest.mark.slow
def test_a_demo_has_pages_files_and_a_summary(tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")  # a terminal's setting takes no picture away
    sources = {
        "lab8": [
            "from pathlib import Path\nimport utils",
            "Path('trace.json').write_text('[]')\nPath('assets/gemm_tiling.svg').stat()",
        ],
        "lab9": ["1 / 0", "import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show(); print('went on')"],
    }
    labs = []
    for name, cells in sources.items():
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.cells.insert(0, nbformat.v4.new_markdown_cell("## Bytes and FLOPs (2 points)"))
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        labs.append(Built(name, nbformat.writes(notebook), "", [], {}))
    steps = []
    page, failed = run_demo(labs, tmp_path, lambda *step: steps.append(step), timeout=60)
    assert failed == ["lab9, cell under 'Bytes and FLOPs': ZeroDivisionError: division by zero"]
    text = page.read_text()
    assert 'href="lab8/lab8.html"' in text and 'href="lab8/trace.json"' in text and "ZeroDivisionError" in text
    assert "went on" in (tmp_path / "lab9" / "lab9.html").read_text()
    assert "image/png" in (tmp_path / "lab9" / "lab9.ipynb").read_text() and (tmp_path / "lab9" / "run.json").exists()
    assert text.count("in: Bytes and FLOPs<") == 2
    assert steps[-1] == ("lab9", 6, 6) and steps[:2] == [("lab8", 0, 6), ("lab8", 2, 6)]
    assert (tmp_path / "lab8" / "assets").resolve() == ROOT / "assets"


def test_the_command_fails_when_a_cell_does(tmp_path, monkeypatch):
    """The page is written all the same, and the failed cell is named on standard error."""
    said = "lab1, cell under 'Setup': NameError: no"
    monkeypatch.setattr("instructor.demo.run_demo", lambda labs, out, step, timeout: (out / "index.html", [said]))
    result = CliRunner().invoke(app, ["demo", "lab1", "--out", str(tmp_path)])
    assert result.exit_code == 1 and "index.html" in result.stdout and f"error: {said}" in result.stderr
