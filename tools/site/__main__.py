"""Build the site: see `tools.site`."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat

from tools.site.pages import collect, with_outputs, withhold
from utils.files import ROOT


class SiteError(Exception):
    """A problem that the reader can solve; only its text is printed."""


def executed_notebooks(run: bool) -> dict[str, str]:
    """Return {lab: the students' notebook with the outputs of the solved run}; run what was not run yet if `run`."""
    from instructor.build import build_lab
    from instructor.demo import run_demo
    from instructor.points import lab_names, lab_path

    notebooks = {}
    for name in lab_names():
        built = build_lab(lab_path(name))
        executed = kept_run(name, built.instructor)
        if executed is None and run:
            print(f"running {name}, solved: some minutes ...", flush=True)
            run_demo([built], ROOT / "out" / "demo", lambda name, done, total: None)
            executed = kept_run(name, built.instructor)
        if executed is None:
            raise SiteError(
                f"no run of this version of {name} is kept: run `labs demo {name}`, or `make demo` for all labs."
            )
        notebooks[name] = with_outputs(built.student, executed)
    return notebooks


def kept_run(name: str, instructor: str) -> nbformat.NotebookNode | None:
    """Return the notebook of a solved run that `labs demo` kept; None if it has not the present code."""
    path = ROOT / "out" / "demo" / name / f"{name}.ipynb"
    executed = nbformat.read(path, as_version=4) if path.exists() else None
    return executed if executed is not None and same_code(instructor, executed) else None


def same_code(instructor: str, executed: nbformat.NotebookNode) -> bool:
    """Whether an executed notebook has the code of the present one."""
    notebooks = nbformat.reads(instructor, as_version=4), executed
    present, run = ([cell.source for cell in notebook.cells if cell.cell_type == "code"] for notebook in notebooks)
    return present == run


def build(folder: Path, notebooks: dict[str, str]) -> Path:
    """Build the site into `folder` from notebooks with outputs; raise SiteError if it would publish a solution."""
    from instructor.grading.release import find_leaks, secrets_of_all_labs

    secrets = secrets_of_all_labs()
    notebooks = {
        lab: withhold(text, lambda output: bool(find_leaks({"output.ipynb": output.encode()}, secrets)))
        for lab, text in notebooks.items()
    }
    with tempfile.TemporaryDirectory() as name:
        source = Path(name)
        published = collect(source, notebooks)
        pages = {path: data for path, data in published.items() if not path.startswith("instructor-sources")}
        leaks = find_leaks(pages, secrets)
        if leaks:
            raise SiteError("the site would publish solutions:\n" + "\n".join(f"  {leak}" for leak in leaks[:20]))
        (source / "_static").mkdir()
        shutil.copy(Path(__file__).with_name("print.css"), source / "_static")
        (source / "extra").mkdir()
        if (source / "files").exists():  # linked files keep their place beside the pages
            shutil.copytree(source / "files", source / "extra" / "files")
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(source), str(folder)]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise SiteError(f"Sphinx found something:\n{result.stderr.strip()[-3000:]}")
    for name in (".doctrees", "_sources"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return folder / "index.html"


def main() -> int:
    """Run the command of the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build" / "site")
    parser.add_argument("--no-run", action="store_true", help="fail instead of running a lab that was not run yet")
    arguments = parser.parse_args()
    try:
        page = build(arguments.folder, executed_notebooks(run=not arguments.no_run))
    except SiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"The site is in {arguments.folder}: open {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
