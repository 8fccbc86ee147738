"""Run the quick tests and compile every kernel with the oldest and the newest torch and Triton of the ranges.

    python -m tools.versions                    both environments: tests, then the table of the kernels
    python -m tools.versions --only newest      one of them

Each environment is made anew in build/versions, with the newest versions of all other packages in their ranges, and stays
there, so that a piece of the tests can be run in it. torch comes with its CUDA libraries, about 6 GB an environment, because
there is no CPU wheel of every release. What each test said is in build/versions/*.xml; the table of registers and spills goes to
assets/results/kernel_versions.json. This is `make test-versions`; it takes about half an hour.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.environment import ROOT, find_uv, load_project, uv_options
from tools.lock import EXTRAS
from utils.machine.versions import TESTED

FOLDER = ROOT / "build" / "versions"
TABLE = ROOT / "assets" / "results" / "kernel_versions.json"
# What is pinned; everything else is the newest that fits.
PINS = {which: {name: ends[end] for name, ends in TESTED.items()} for end, which in enumerate(("oldest", "newest"))}


def requirements(which: str) -> list[str]:
    """Return the project's requirements with the pins of one environment in place of the ranges."""
    project = load_project()
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    pins = {name: f"{name}=={'.'.join(map(str, version))}.*" for name, version in PINS[which].items()}
    return [next((pin for name, pin in pins.items() if line.startswith(name)), line) for line in lines]


def make_environment(which: str) -> Path:
    """Create an environment from nothing and return its Python."""
    folder = FOLDER / which
    for old in (folder, FOLDER / f"{which}-make"):
        shutil.rmtree(old, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    settings = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    uv, translated = find_uv(python, folder / "install.log"), uv_options(settings)
    if uv is not None and translated is not None:
        options, variables = translated
        install = [uv, "pip", "install", "--quiet", "--python", python, *options]
    else:
        install, variables = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"], {}
    environment = {**os.environ, **variables}
    subprocess.run([*install, *requirements(which)], check=True, env=environment)
    subprocess.run([*install, "--no-deps", "--editable", ROOT], check=True, env=environment)
    return python


def prepare_make(which: str, environment: dict[str, str]) -> None:
    """Give the tests that call `make` an environment of their own; otherwise `make` would replace the user's .venv.

    `make` takes the first Python on the path, and that is the one with the pinned torch: it keeps that torch.
    """
    environment["VENV"] = str(FOLDER / f"{which}-make")
    subprocess.run(["make", "-s", "env"], cwd=ROOT, env=environment, check=True)


def check_environment(python: Path, which: str) -> bool:
    """Compile the kernels and run all tests; return whether everything passed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    kernels = [python, "-m", "tools.record.kernel_assembly", "--out", FOLDER / f"{which}.json"]
    quick = ["-m", "not slow and not overnight and not gpu", f"--junitxml={FOLDER / which}.xml"]
    parallel = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
    tests = [python, "-m", "pytest", *parallel, *quick, "tests"]
    prepare_make(which, environment)
    return all([subprocess.run(command, cwd=ROOT, env=environment).returncode == 0 for command in (kernels, tests)])


def main() -> int:
    """Check the environments and write the table; return 0 if everything passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=tuple(PINS), help="check one environment")
    options = parser.parse_args()
    passed = {}
    for which in [options.only] if options.only else PINS:
        print(f"== {which}: {', '.join(requirements(which)[:3])}", flush=True)
        passed[which] = check_environment(make_environment(which), which)
    files = sorted(FOLDER.glob("*.json"))
    table = [sys.executable, "-m", "tools.record.kernel_assembly", "table", *files, "--out", TABLE]
    subprocess.run(table, cwd=ROOT, check=True)
    print("; ".join(f"{which}: {'passed' if ok else 'FAILED'}" for which, ok in passed.items()))
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
