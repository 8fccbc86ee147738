"""Run the code cells of a lab's notebook in order, without Jupyter, and save its figures, output and record.

    python -m tools.record.lab build/instructor/lab2_flexattention/lab2_flexattention.ipynb --folder out/lab2

It is for machines that have PyTorch and no Jupyter. The notebook is a solved one, as `labs build` writes it. The cells run in
a module of their own, registered as `__main__`: there `torch.compile` looks for the globals of the functions that they define.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import json
import linecache
import sys
import time
import traceback
import types
from importlib.util import find_spec
from pathlib import Path


def code_cells(path: Path) -> list[tuple[str, str]]:
    """Return (id, source) of each code cell of a notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [(cell["id"], "".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]


def run_cells(cells: list[tuple[str, str]]) -> tuple[dict[str, float], dict[str, str]]:
    """Run cells one after the other in a new `__main__`; a cell that fails does not stop the next.

    Args:
        cells: (id, source) of each cell. `%%writefile NAME` on the first line writes the rest to a file, as in Jupyter.

    Returns:
        Seconds of each cell, and the error of each cell that failed, by id.
    """
    module, before = types.ModuleType("__main__"), sys.modules["__main__"]
    seconds, errors = {}, {}
    sys.modules["__main__"] = module
    try:
        for cell, source in cells:
            began, name = time.perf_counter(), f"<cell {cell}>"
            linecache.cache[name] = (len(source), None, source.splitlines(True), name)  # for tracebacks and inspect
            print(f"\n=== {cell}", flush=True)
            try:
                first, _, rest = source.partition("\n")
                if first.startswith("%%writefile "):
                    Path(first.split(maxsplit=1)[1]).write_text(rest, encoding="utf-8")
                else:
                    exec(compile(source, name, "exec"), vars(module))
            except Exception as error:
                errors[cell] = f"{type(error).__name__}: {error}"
                traceback.print_exc(file=sys.stdout)
            seconds[cell] = time.perf_counter() - began
    finally:
        sys.modules["__main__"] = before
    return seconds, errors


def main() -> None:
    """Run a notebook's cells, with its figures as PNG files and its output as a text file."""
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path, help="a solved notebook")
    parser.add_argument("--folder", type=Path, required=True, help="where figures, output and seconds go")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)

    def show(*_, **__) -> None:
        for number in pyplot.get_fignums():
            saved = len(list(given.folder.glob("figure*.png")))
            pyplot.figure(number).savefig(given.folder / f"figure{saved:02}.png", bbox_inches="tight")
        pyplot.close("all")

    pyplot.switch_backend("Agg")
    pyplot.show = show
    builtins.display = print  # type: ignore[attr-defined]  # Jupyter has it in every cell
    if find_spec("IPython") is None:  # `utils.labs` imports from it
        stand_in = types.SimpleNamespace(display=print, HTML=lambda page: f"{len(page)} characters of HTML")
        sys.modules["IPython.display"] = stand_in  # type: ignore[assignment]
    with (given.folder / "output.txt").open("w", encoding="utf-8") as output, contextlib.redirect_stdout(output):
        seconds, errors = run_cells(code_cells(given.notebook))
    run = {"seconds": seconds, "errors": errors}
    (given.folder / "run.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    print(f"{len(seconds)} cells in {sum(seconds.values()):.0f} s, {len(errors)} failed: {', '.join(errors) or 'none'}")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
