"""Write constraints.txt, which pins one version of every package, and environment.yml: both follow from pyproject.toml.

python -m tools.lock
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools.environment import CONSTRAINTS, PYPROJECT, ROOT, SetupError, fits, load_project, version_tuple

CONDA_FILE = ROOT / "environment.yml"
EXTRAS = ("grading", "test", "site", "e2e", "gpu")  # whose packages are pinned as well


def conda_environment(project: dict) -> str:
    """Return the text of environment.yml: conda brings Python and pip, and pip installs the same ranges and pins."""
    pip_lines = ["--constraint constraints.txt", *project["dependencies"], "--editable ."]
    lines = [
        "# Made from pyproject.toml by `make lock`; edit that file instead.",
        "# This is a student's environment. Instructors and developers add: pip install -e '.[grading,test]'",
        f"name: {project['name']}",
        "channels:",
        "  - conda-forge",
        "dependencies:",
        f"  - python {project['requires-python']}",
        "  - pip",
        "  - pip:",
        *(f"      - {json.dumps(line)}" for line in pip_lines),
    ]
    return "\n".join(lines) + "\n"


LOCK_HEADER = """\
# Made from pyproject.toml by `make lock`: one tested version of every package, for Python 3.11 to 3.13.
# `flash2` is left out: its requirements are known only after it is built.
"""


def keep_allowed_pythons(pins: str, python_range: str) -> str:
    """Drop pins for Pythons above the range, and conditions that every Python of the range meets.

    uv's universal resolution knows the lower bound of `requires-python` and ignores the upper one.

    Args:
        pins: the output of `uv pip compile --universal`.
        python_range: `requires-python` of the project.
    """
    lines = []
    for line in pins.splitlines(keepends=True):
        least = re.findall(r"python_full_version >=? '([\d.]+)'", line)
        if " or " not in line and any(not fits(version, python_range) for version in least):
            continue
        for version in re.findall(r"python_full_version < '([\d.]+)' and ", line):
            if version_tuple(version) >= version_tuple(python_range.split("<")[1]):
                line = line.replace(f"python_full_version < '{version}' and ", "")
        lines.append(line)
    return "".join(lines)


def lock() -> None:
    """Resolve the ranges of pyproject.toml with uv, and write constraints.txt and environment.yml."""
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        raise SetupError("`uv` is needed to resolve versions for all platforms: `make env` installs it.")
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    options = ["--universal", "--python-version", "3.11", *extras, "--quiet"]
    plain = ["--no-header", "--no-annotate", "--no-emit-index-url"]
    result = subprocess.run(
        [uv, "pip", "compile", str(PYPROJECT), *options, *plain], check=False, capture_output=True, text=True
    )
    if result.returncode != 0:
        raise SetupError(f"The ranges in pyproject.toml have no common solution:\n{result.stderr.strip()}")
    project = load_project()
    CONSTRAINTS.write_text(
        LOCK_HEADER + keep_allowed_pythons(result.stdout, project["requires-python"]), encoding="utf-8"
    )
    CONDA_FILE.write_text(conda_environment(project), encoding="utf-8")
    print(f"Wrote {CONSTRAINTS.name} and {CONDA_FILE.name}.")


if __name__ == "__main__":
    try:
        lock()
    except SetupError as error:
        sys.exit(f"error: {error}")
