"""Creates and keeps the course's environment, from the standard library alone.

    python tools/environment.py sync [--venv .venv]   make the environment, or leave it if it is current
    python tools/environment.py lock                  write constraints.txt and environment.yml anew
    python tools/environment.py check                 exit 1 if environment.yml differs from pyproject.toml

`pyproject.toml` is the one source of version ranges. `constraints.txt` pins what those ranges resolve to.
A torch and Triton that the calling Python already has are kept when they fit the ranges: they are put on the
environment's path, and the pins of every package that comes with them are lifted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036  (an older Python gets a sentence, not a traceback)
    sys.exit(
        f"error: Python {sys.version_info[0]}.{sys.version_info[1]} was given and Python 3.11 or 3.12 is needed: "
        "install one, or name it with make PYTHON=/path/to/python3.12."
    )
import tomllib

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"
CONSTRAINTS = ROOT / "constraints.txt"
CONDA_FILE = ROOT / "environment.yml"
# Everything the course, its grading and its tests need on any machine.
EXTRAS = ("grading", "test")


class SetupError(Exception):
    """Something the reader can mend; its text is all that is printed."""


def requirement_name(requirement: str) -> str:
    """The normalized distribution name of a requirement or constraint line."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    if match is None:
        raise SetupError(f"{requirement!r} is not a requirement: it should start with a package name.")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def load_project() -> dict:
    return tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]


# ----------------------------------------------------------------------------- the host's own torch


def version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"\d+(?:\.\d+)*", version).group().split("."))


def fits(version: str, requirement: str) -> bool:
    """Whether `version` is inside the `>=` and `<` bounds of `requirement`."""
    release = version_tuple(version)
    for operator, bound in re.findall(r"(>=|<)\s*([\d.]+)", requirement.split(";")[0]):
        limit = version_tuple(bound)
        if (operator == ">=" and release < limit) or (operator == "<" and release >= limit):
            return False
    return True


# Asked of the interpreter that the environment is made from, so that a virtual environment counts as a host too.
HOST_PROBE = """
import importlib.metadata as metadata, json
found = {}
for name in ("torch", "triton"):
    try:
        distribution = metadata.distribution(name)
        found[name] = [distribution.version, str(distribution.locate_file(""))]
    except metadata.PackageNotFoundError:
        pass
packages = []
if "torch" in found:
    beside = metadata.distributions(path=[found["torch"][1]])
    packages = sorted({d.metadata["Name"] for d in beside if d.metadata["Name"]})
print(json.dumps({"found": found, "packages": packages}))
"""


def host_packages(python: str, project: dict) -> tuple[Path | None, set[str], str]:
    """Where the host's torch lives if it is to be kept, the names of all packages beside it, and a sentence."""
    probe = json.loads(subprocess.run([python, "-c", HOST_PROBE], check=True, capture_output=True, text=True).stdout)
    found = probe["found"]
    if "torch" not in found:
        return None, set(), ""
    ranges = {requirement_name(line): line for line in project["dependencies"]}
    for name, (version, _) in found.items():
        if not fits(version, ranges[name]):
            text = f"This Python's {name} {version} is outside {ranges[name]}: the environment gets its own."
            return None, set(), text
    folder = Path(found["torch"][1])
    kept = ", ".join(f"{name} {version}" for name, (version, _) in found.items())
    return folder, {requirement_name(name) for name in probe["packages"]}, f"Keeping this Python's own {kept}."


# ----------------------------------------------------------------------------- what the system must have


def check_python(version: tuple[int, int], project: dict) -> None:
    allowed = project["requires-python"]
    if not fits(".".join(map(str, version)), allowed):
        raise SetupError(
            f"Python {version[0]}.{version[1]} was given and {allowed} is needed: "
            "install Python 3.12 or 3.11, or name one with `make PYTHON=/path/to/python3.12`."
        )


def missing_system_packages() -> dict[str, str]:
    """Debian package -> why it is needed, for what this machine lacks."""
    import sysconfig

    missing = {}
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not (shutil.which("g++") or shutil.which("clang++")):
        missing["g++"] = "torch.compile builds its CPU kernels with a C++ compiler"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing[f"{python}-dev"] = "Triton and torch.compile include Python.h"
    try:
        import ensurepip  # noqa: F401  (Debian ships it apart from python3)
    except ImportError:
        missing[f"{python}-venv"] = "the environment is a venv with pip in it"
    return missing


def install_system_packages() -> None:
    """Installs what is missing where that is possible (Debian, as root); elsewhere says it in a sentence."""
    missing = missing_system_packages()
    if not missing:
        return
    names = sorted(missing)
    reasons = "; ".join(f"{name}: {missing[name]}" for name in names)
    if shutil.which("apt-get") and os.geteuid() == 0:
        print(f"Installing {', '.join(names)} ({reasons})")
        quiet = {"env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
        subprocess.run(["apt-get", "update", "-qq"], check=False, **quiet)
        if subprocess.run(["apt-get", "install", "-y", "-qq", *names], check=False, **quiet).returncode == 0:
            return
    text = f"This machine lacks {reasons}. Install with: sudo apt-get install {' '.join(names)}"
    if any(name.endswith("-venv") for name in names):
        raise SetupError(text)
    print(f"Note: {text}", file=sys.stderr)


# ----------------------------------------------------------------------------- sync


def wants_gpu_extra() -> bool:
    """CUDA 13 and a driver: what the `gpu` extra is built for."""
    if sys.platform != "linux" or not shutil.which("nvidia-smi"):
        return False
    report = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"CUDA Version:\s*(\d+)", report)
    return version is not None and int(version.group(1)) >= 13


def fingerprint(extras: list[str], host: str) -> str:
    """What the environment depends on: the project's table (no tool's settings), the pins, this file, this Python."""
    made_from = [load_project(), sys.version, sys.executable, str(ROOT), extras, host]
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode())
    digest.update(CONSTRAINTS.read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()


def constraint_lines(text: str, lifted: set[str]) -> str:
    """The constraints without the pins of packages in `lifted`."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return "".join(f"{line}\n" for line in lines if requirement_name(line) not in lifted)


def pip_install(python: Path, constraints: Path, extras: list[str], log: Path) -> int:
    """Installs the course into the environment. A person sees pip's progress; elsewhere it goes to `log`."""
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-c", str(constraints), "-e", target]
    if sys.stdout.isatty():
        return subprocess.run(command, check=False).returncode
    with log.open("w") as output:
        code = subprocess.run(command, check=False, stdout=output, stderr=subprocess.STDOUT).returncode
    if code != 0:
        print("".join(log.read_text().splitlines(keepends=True)[-15:]), file=sys.stderr)
    return code


def sync(venv: Path) -> None:
    project = load_project()
    check_python(sys.version_info[:2], project)
    host_folder, host_names, sentence = host_packages(sys.executable, project)
    gpu = wants_gpu_extra()
    extras = [*EXTRAS, *(["gpu"] if gpu else [])]
    stamp = venv / "environment.json"
    wanted = fingerprint(extras, str(host_folder))
    python = venv / "bin" / "python"
    if python.exists() and stamp.exists() and json.loads(stamp.read_text()).get("fingerprint") == wanted:
        return

    install_system_packages()
    if sentence:
        print(sentence)
    print(f"Creating the environment in {venv.name} (a few minutes the first time)", flush=True)
    stamp.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    if host_folder is not None:
        site = subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        Path(site, "host_torch.pth").write_text(f"{host_folder}\n")
    constraints = venv / "constraints.txt"
    constraints.write_text(constraint_lines(CONSTRAINTS.read_text(encoding="utf-8"), host_names))

    log = venv / "install.log"
    if pip_install(python, constraints, extras, log) != 0:
        if not gpu or pip_install(python, constraints, list(EXTRAS), log) != 0:
            raise SetupError(
                "pip could not install the packages (its own message is above): check the network or the "
                "package index, then run the same command again."
            )
        print(
            "Note: flash-attn-4 could not be installed, so the `cute` and `flex_flash` providers will say that "
            f"they are missing. Try again with: {venv.name}/bin/pip install '.[gpu]'",
            file=sys.stderr,
        )
    stamp.write_text(json.dumps({"fingerprint": wanted, "extras": extras, "host": str(host_folder or "")}))
    print("The environment is ready.")


# ----------------------------------------------------------------------------- lock and conda


def conda_environment(project: dict) -> str:
    """The text of environment.yml: conda gives Python and pip, pip installs the same ranges and pins."""
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    pip_lines = ["--constraint constraints.txt", *requirements, "--editable ."]
    lines = [
        "# Made from pyproject.toml by `make lock`; edit that file instead.",
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
# Made from pyproject.toml by `make lock`: one tested version of every package, for Python 3.11 and 3.12.
# `flash2` is left out: reading its needs means building it.
"""


def lock() -> None:
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        raise SetupError("`uv` is needed to resolve versions for all platforms: `make env` installs it.")
    extras = [word for extra in (*EXTRAS, "gpu") for word in ("--extra", extra)]
    options = ["--universal", "--python-version", "3.11", *extras, "--quiet"]
    plain = ["--no-header", "--no-annotate", "--no-emit-index-url"]
    result = subprocess.run(
        [uv, "pip", "compile", str(PYPROJECT), *options, *plain], check=False, capture_output=True, text=True
    )
    if result.returncode != 0:
        raise SetupError(f"The ranges in pyproject.toml have no common solution:\n{result.stderr.strip()}")
    CONSTRAINTS.write_text(LOCK_HEADER + result.stdout, encoding="utf-8")
    CONDA_FILE.write_text(conda_environment(load_project()), encoding="utf-8")
    print(f"Wrote {CONSTRAINTS.name} and {CONDA_FILE.name}.")


def check() -> None:
    if not CONDA_FILE.exists() or CONDA_FILE.read_text(encoding="utf-8") != conda_environment(load_project()):
        raise SetupError(f"{CONDA_FILE.name} differs from what pyproject.toml says: run `make lock`.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("sync", help="make the environment, or leave it if it is current").add_argument(
        "--venv", type=Path, default=ROOT / ".venv"
    )
    commands.add_parser("lock", help="write constraints.txt and environment.yml anew")
    commands.add_parser("check", help="exit 1 if environment.yml differs from pyproject.toml")
    arguments = parser.parse_args()
    try:
        if arguments.command == "sync":
            sync(arguments.venv.absolute())
        elif arguments.command == "lock":
            lock()
        else:
            check()
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
