"""A lab as a Gradescope autograder: the bundle that is uploaded there, and what runs for each submission.

Gradescope unpacks the bundle to `/autograder/source` and runs `setup.sh` once, as root, which makes an image. For each
submission it starts a container from that image, puts the files into `/autograder/submission`, runs `run_autograder`, and
reads `/autograder/results/results.json`.

A container allows no new namespaces, so most walls of `labs grade` do not stand there. What stands in their place: one
container holds one submission; the student's process is another user, who may read neither the hidden tests nor the model
answers nor the results, since `run_autograder` closes their folders; seccomp refuses internet sockets.

Run as `python -m instructor.grading.class_.gradescope {calibrate,grade} LAB`, in the folder of the bundle.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
import zipfile
from pathlib import Path

from instructor.build import ROOT, Built, build_lab
from instructor.grading.class_.intake import MAX_FILE, choose_name
from instructor.grading.class_.platforms import gradescope_results
from instructor.grading.class_.report import student_of_result
from instructor.grading.submission.engine import calibrate, grade_notebook
from instructor.grading.submission.harmless import for_terminal
from instructor.grading.submission.results import GradingError, SubmissionResult
from instructor.points import lab_path
from utils.files import write_whole

TIMEOUT = 120.0  # seconds that a cell, or the tests of a question, may take
FOLDERS = ("assets", "expectations", "instructor", "tools", "utils")
FILES = ("LICENSE", "README.md", "constraints.txt", "nbgrader_config.py", "pyproject.toml")
LEFT_OUT = ("__pycache__", ".ipynb_checkpoints")
CLOSED = ("instructor", "build")  # folders of the bundle that a submission may not read

SETUP = """\
#!/usr/bin/env bash
# Gradescope runs this once, as root, when the image is built: it makes the environment and grades the model answers.
set -euo pipefail
top="${AUTOGRADER:-/autograder}"
cd "$top/source"
if [ ! -x "$top/venv/bin/python" ]; then
  newest() { for p in python3.12 python3.13 python3.11; do "$p" -c "" 2> /dev/null && echo "$p" && return; done; return 1; }
  if ! newest > /dev/null; then  # the images' own Python may be older than the course's
    apt-get update -q
    for v in 3.12 3.11; do DEBIAN_FRONTEND=noninteractive apt-get install -y -q "python$v" && break; done
  fi
  # The build of torch for a CPU, unless another index is named: there is no GPU in these containers.
  export PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-https://download.pytorch.org/whl/cpu}"
  "$(newest)" tools/environment.py sync --venv "$top/venv" --extra grading
fi
export OMP_NUM_THREADS=1 MPLBACKEND=Agg PYTHONPATH="$top/source" PYTHONDONTWRITEBYTECODE=1
"$top/venv/bin/python" -m instructor.grading.class_.gradescope calibrate LAB
"""

RUN = """\
#!/usr/bin/env bash
# Gradescope runs this for each submission, as root, in a container of its own.
set -euo pipefail
top="${AUTOGRADER:-/autograder}"
cd "$top/source"
mkdir -p "$top/results" build
# A submission runs as another user, who may read none of these.
chmod -R go-rwx CLOSED "$top/results" "$top/submission"
export OMP_NUM_THREADS=1 MPLBACKEND=Agg PYTHONPATH="$top/source" PYTHONDONTWRITEBYTECODE=1
exec "$top/venv/bin/python" -m instructor.grading.class_.gradescope grade LAB
"""


# ---- the bundle --------------------------------------------------------------------------------------------------


def bundle_scripts(lab: str) -> dict[str, str]:
    """{name: text} of the two scripts that Gradescope runs."""
    return {
        "setup.sh": SETUP.replace("LAB\n", f"{lab}\n"),
        "run_autograder": RUN.replace("LAB\n", f"{lab}\n").replace("CLOSED", " ".join(CLOSED)),
    }


def make_bundle(lab: str, target: Path) -> Path:
    """Write `LAB-gradescope.zip`, which holds solutions and hidden tests, to a folder; returns its path."""
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"{lab}-gradescope.zip"
    found = [ROOT / name for name in FILES]
    for folder in FOLDERS:
        found += sorted(p for p in (ROOT / folder).rglob("*") if p.is_file())
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in bundle_scripts(lab).items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, (stat.S_IFREG | 0o755) << 16
            file.writestr(entry, text)
        for place in found:
            relative = place.relative_to(ROOT)
            if place.is_file() and not any(part in LEFT_OUT or part.endswith(".pyc") for part in relative.parts):
                file.write(place, relative.as_posix())
    return path


# ---- in the container --------------------------------------------------------------------------------------------


def submitted_notebook(folder: Path, lab: str) -> tuple[bytes | None, str]:
    """(the notebook that was handed in for a lab, a note on it); without one, (None, why there is none)."""
    found = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file() or p.is_symlink()}
    plain = {name: (path.name, path.stat().st_mtime) for name, path in found.items() if not path.is_symlink()}
    name, note = choose_name(plain, lab)
    if name is None:
        return None, f"handed in {'a symbolic link' if len(plain) < len(found) else note}"
    if found[name].stat().st_size > MAX_FILE:
        return None, f"{name} is larger than {MAX_FILE >> 20} MB"
    return found[name].read_bytes(), note


def results_of(result: SubmissionResult, note: str = "") -> dict:
    """The `results.json` of a graded submission. Flags and missing walls are for the instructors' eyes alone."""
    results = gradescope_results(student_of_result(result))
    unread = [flag.detail for flag in result.flags if flag.kind == "unreadable"]
    results["output"] = "\n".join(filter(None, [results["output"], note, *unread]))
    results["stdout_visibility"] = "hidden"
    seen = [f"{flag.question or 'the notebook'}: {flag.kind}: {for_terminal(flag.detail)}" for flag in result.flags]
    seen += [f"wall: {name}: {how}" for name, how in result.walls.items()]
    told = {"name": "For the instructors", "visibility": "hidden", "score": 0.0, "max_score": 0.0}
    results["tests"].append({**told, "output": "\n".join(seen) or "no flags"})
    return results


def grade_submission(built: Built, top: Path) -> dict:
    """Grade what stands in `submission/`, and write `results/results.json`; a `GradingError` writes nothing."""
    data, note = submitted_notebook(top / "submission", built.name)
    if data is None:
        results: dict = {"score": 0.0, "output": f"Not graded: {note}. Hand in {built.name}.ipynb.", "tests": []}
    else:
        results = results_of(grade_notebook(built, data, timeout=TIMEOUT), note)
    text = json.dumps(results, indent=1, ensure_ascii=False)
    # Half a character, from a file's name or an error's text, is no UTF-8.
    write_whole(top / "results" / "results.json", text.encode("utf-8", "replace").decode())
    return results


def main() -> None:
    """Calibrate a lab, or grade the submission that stands beside this folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["calibrate", "grade"])
    parser.add_argument("lab")
    chosen = parser.parse_args()
    built = build_lab(Path(chosen.lab) if chosen.lab.endswith(".py") else lab_path(chosen.lab))
    try:
        if chosen.verb == "calibrate":
            found = calibrate(built)
            print(f"the model answers of {built.name} have {found.score:g} points here")
        else:
            results = grade_submission(built, Path(os.environ.get("AUTOGRADER", "/autograder")))
            print(f"{built.name}: {results['score']:g} points")
    except GradingError as error:  # no fault of the submission: Gradescope then says that the autograder failed
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
