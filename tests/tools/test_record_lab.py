"""The cells of a lab run without Jupyter as they do in it."""

import json
import subprocess
import sys

import pytest

from utils.files import ROOT

RUN = f"""
import sys
sys.modules.update(dict.fromkeys(["IPython", "nbformat"]))  # as if they were missing
sys.path.insert(0, {str(ROOT)!r})
from tools.record.lab import main
main()
"""
# As in FlexAttention, the compiled function is the library's, and it calls a mask that a cell defines.
COMPILES = """
library = {"__name__": "collections.abc"}
exec("def call(function, x): return function(x)", library)
def asked(x):
    return x[back]
compiled = torch.compile(library["call"], backend="eager")
assert compiled(asked, torch.arange(3.0)).tolist() == [2.0, 1.0, 0.0]
"""


@pytest.mark.slow  # imports the compiler
def test_cells_run_where_jupyter_is_missing_and_one_that_fails_stops_no_other(tmp_path):
    cells = {
        "order": "import torch\nback = torch.tensor([2, 1, 0])",
        "fails": "back.no_such_name",
        "compiles": COMPILES,
        "file": "%%writefile kernel.py\nx = 1\n",
        "table": "from utils.labs.session import show; show([{'n': 1, 'ms': 2.5}]); display('a line')",
    }
    notebook = [{"cell_type": "code", "id": name, "source": source} for name, source in cells.items()]
    (tmp_path / "lab.ipynb").write_text(json.dumps({"cells": notebook}))
    command = [sys.executable, "-c", RUN, "lab.ipynb", "--folder", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "5 cells" in done.stdout and "1 failed: fails" in done.stdout, done.stderr
    output = (tmp_path / "output.txt").read_text()
    assert "no_such_name" in output and "2.5" in output and "a line" in output
    assert (tmp_path / "kernel.py").read_text() == "x = 1\n"
