"""The cells of a lab run without Jupyter as they do in it."""

import sys

import pytest

from tools.record.lab import run_cells

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
def test_compiled_functions_find_the_globals_of_the_cells(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main = sys.modules["__main__"]
    cells = [
        ("order", "import torch\nback = torch.tensor([2, 1, 0])"),
        ("fails", "back.no_such_name"),
        ("compiles", COMPILES),
        ("main", "import sys; assert sys.modules['__main__'].back is back"),
        ("file", "%%writefile kernel.py\nx = 1\n"),
    ]
    seconds, errors = run_cells(cells)
    assert list(seconds) == [name for name, _ in cells]
    assert list(errors) == ["fails"] and "no_such_name" in errors["fails"]
    assert (tmp_path / "kernel.py").read_text() == "x = 1\n"
    assert sys.modules["__main__"] is main
