"""Create and keep the course's environment, with the standard library alone.

    python tools/environment.py sync [--venv .venv] [--extra grading --extra test]

creates the environment, or leaves it if it is current. `pyproject.toml` is the one source of version ranges, and
`constraints.txt` pins one version of every package in those ranges (`tools/lock.py` writes it).
If the calling Python already has a torch and a Triton that fit the ranges, the environment uses them: their folder is put on
its path, and the pins of all packages in that folder are dropped.

A student's environment has no extra. An extra that is missing is added to the environment that is there.

`sync` installs with uv, which takes a tenth of pip's time, and with pip where uv cannot do the same. Those cases are two:
packages of the host, which a .pth file puts on the path and uv does not see; and settings of pip that `uv_options` cannot
translate. uv itself does not read pip's settings, which may name a site's own index with a CPU build of torch.
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
import time
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036  (an older Python gets a sentence, not a traceback)
    sys.exit(
        f"error: Python {sys.version_info[0]}.{sys.version_info[1]} was given and Python 3.11, 3.12 or 3.13 is needed: "
        "install one, or name it with make PYTHON=/path/to/python3.12."
    )
import tomllib

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"
CONSTRAINTS = ROOT / "constraints.txt"
# Jupyter's event log asks for it, to check addresses in schemas that have none. It is optional where it is used, and every
# process that reads a notebook would work three seconds on its grammar when it starts.
LEFT_OUT = "rfc3987-syntax"


class SetupError(Exception):
    """A problem that the reader can solve; only its text is printed."""


def requirement_name(requirement: str) -> str:
    """Return the normalized package name of a requirement or of a line of constraints.txt."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    if match is None:
        raise SetupError(f"{requirement!r} is not a requirement: it should start with a package name.")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def load_project() -> dict:
    """Read the [project] table of pyproject.toml."""
    return tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]


def version_tuple(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: (2, 11, 0) for "2.11.0+cu130"."""
    return tuple(int(part) for part in re.match(r"[\d.]*\d", version).group().split("."))


def fits(version: str, requirement: str) -> bool:
    """Return whether `version` is inside the `>=` and `<` bounds of `requirement`."""
    release = version_tuple(version)
    for operator, bound in re.findall(r"(>=|<)\s*([\d.]+)", requirement.split(";")[0]):
        limit = version_tuple(bound)
        if (operator == ">=" and release < limit) or (operator == "<" and release >= limit):
            return False
    return True


# The program runs in the Python that the environment is created from; that may itself be a virtual environment.
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
    distributions = metadata.distributions(path=[found["torch"][1]])
    packages = sorted({d.metadata["Name"] for d in distributions if d.metadata["Name"]})
print(json.dumps({"found": found, "packages": packages}))
"""


def host_packages(python: str, project: dict) -> tuple[Path | None, set[str], str]:
    """Look for a torch and a Triton of this Python that fit the ranges of the project.

    Args:
        python: path of the interpreter.
        project: the [project] table.

    Returns:
        The folder of the host's torch, or None if the environment needs its own; the names of all packages in that folder;
        a sentence for the user, "" if there is nothing to say.
    """
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


def check_python(version: tuple[int, int], project: dict) -> None:
    """Raise SetupError if the course does not run on this Python."""
    allowed = project["requires-python"]
    if not fits(".".join(map(str, version)), allowed):
        raise SetupError(
            f"Python {version[0]}.{version[1]} was given and {allowed} is needed: "
            "install Python 3.11, 3.12 or 3.13, or name one with `make PYTHON=/path/to/python3.12`."
        )


def missing_system_packages() -> dict[str, str]:
    """Return the Debian packages that this machine lacks: {name: why it is needed}."""
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
    """Install the missing packages on Debian as root; elsewhere print which ones are missing and why."""
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


def wants_gpu_extra() -> bool:
    """Return whether this machine has an NVIDIA driver for CUDA 13, which the `gpu` extra needs."""
    if sys.platform != "linux" or not shutil.which("nvidia-smi"):
        return False
    report = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"CUDA Version:\s*(\d+)", report)
    return version is not None and int(version.group(1)) >= 13


def fingerprint(host: str) -> str:
    """Hash everything the environment depends on: the [project] table, the pins, this file, this Python, the host."""
    inputs = [load_project(), sys.version, sys.executable, str(ROOT), host]
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode())
    digest.update(CONSTRAINTS.read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()


def constraint_lines(text: str, dropped: set[str]) -> str:
    """Return the lines of constraints.txt without comments and without the packages in `dropped`."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return "".join(f"{line}\n" for line in lines if requirement_name(line) not in dropped)


# pip's settings that uv knows by another name, and those that do not change what is installed.
UV_NAMES = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
    "constraint": "--constraints",
}
HARMLESS = {
    *("timeout", "default-timeout", "retries", "disable-pip-version-check", "cache-dir", "progress-bar", "no-color"),
    *("quiet", "verbose", "root-user-action", "no-input", "break-system-packages", "require-virtualenv", "cert"),
}


def uv_options(pip_settings: str) -> tuple[list[str], dict[str, str]] | None:
    """Translate the output of `pip config list` into options and environment variables of uv.

    Returns None if a setting has no translation: then pip has to install.
    """
    options, variables = ["--index-strategy", "unsafe-best-match"], dict[str, str]()  # as pip chooses between indexes
    for line in pip_settings.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        value = value.strip("'\"")
        if section not in ("global", "install", ":env:"):
            continue  # a setting of another command
        if name == "cert":
            variables["SSL_CERT_FILE"] = value
        elif name == "no-index":
            options += ["--no-index"] if value.lower() in ("1", "true", "yes", "on") else []
        elif name in UV_NAMES:
            options += [word for part in value.split() for word in (UV_NAMES[name], part)]
        elif name not in HARMLESS:
            return None
    return options, variables


def find_uv(python: Path, log: Path) -> str | None:
    """Return the path of uv: the user's own, or one that pip puts into a folder of the environment; None if neither."""
    if found := shutil.which("uv"):
        return found
    pins = re.findall(r"^uv==\S+", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    folder = python.parent.parent / "uv"
    command = [str(python), "-m", "pip", "install", "--quiet", "--target", str(folder), *(pins or ["uv"])]
    if watch(command, log, "fetching uv") != 0:
        return None
    return shutil.which("uv", path=str(folder / "bin"))


def watch(command: list[str], log: Path, what: str, variables: dict[str, str] | None = None) -> int:
    """Run a command into `log` and return its exit status; meanwhile say how far it is, without a terminal each 30 s."""
    begin = time.monotonic()
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(variables or {})}
        )
        try:
            while True:
                try:
                    return process.wait(timeout=1)
                except subprocess.TimeoutExpired:
                    seconds = round(time.monotonic() - begin)
                    if sys.stdout.isatty() or seconds % 30 == 0:
                        show_progress(f"{what}, {seconds} s{packages_begun(log)}")
        except KeyboardInterrupt:
            process.wait(timeout=10)  # Ctrl-C reached it, too
            raise
        finally:
            show_progress("")


def packages_begun(log: Path) -> str:
    """Return how many packages a log of pip or uv names as begun, and the last one, as part of a sentence; "" for none."""
    begun = r"^(?:Collecting|Downloading|Processing) (?:\S*/)?([\w.]+(?:-[A-Za-z]\w*)*)"
    text = log.read_text(errors="replace")
    names = list(dict.fromkeys(re.findall(begun, text, re.MULTILINE)))
    if "Installing collected packages" in text:
        return f": writing {len(names)} packages"
    return f": {len(names)} packages begun, now {names[-1]}" if names else ""


def show_progress(text: str) -> None:
    """Write a line over the last one; without a terminal, below it."""
    width = shutil.get_terminal_size().columns - 1
    if sys.stdout.isatty():
        print(f"\r{text[:width]:<{width}}\r", end="", flush=True)
    elif text:
        print(text[:width], flush=True)


def install(python: Path, constraints: Path, extras: list[str], log: Path, uv: str | None) -> bool:
    """Install the course into the environment, with uv or with pip if that fails; return whether it worked."""
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    if uv is not None:
        settings = subprocess.run(
            [str(python), "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
        )
        translated = uv_options(settings.stdout)
        if translated is not None:
            options, variables = translated
            command = [uv, "pip", "install", "--python", str(python), *options, "-c", str(constraints), "-e", target]
            if watch(command, log, "installing with uv", variables) == 0:
                return True
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    return watch([*command, "-c", str(constraints), "-e", target], log, "installing with pip") == 0


def sync(venv: Path, wanted: tuple[str, ...] = ()) -> None:
    """Create the environment in `venv` with these extras at least, or return at once if it is current."""
    project = load_project()
    check_python(sys.version_info[:2], project)
    host_folder, host_names, sentence = host_packages(sys.executable, project)
    gpu = wants_gpu_extra()
    stamp, python, log = venv / "environment.json", venv / "bin" / "python", venv / "install.log"
    current = fingerprint(str(host_folder))
    state = json.loads(stamp.read_text()) if python.exists() and stamp.exists() else {}
    is_current = state.get("fingerprint") == current
    if is_current and {*wanted, *(["gpu"] if gpu else [])} <= {*state["extras"], *state.get("refused", [])}:
        return

    begin = time.monotonic()
    extras = sorted({*wanted, *state.get("extras", []), *(["gpu"] if gpu else [])})
    if is_current:
        print(
            f"Adding {', '.join(sorted(set(extras) - set(state['extras'])))} to the environment in {venv.name}.",
            flush=True,
        )
    else:
        install_system_packages()
        if sentence:
            print(sentence)
        pins = constraint_lines(CONSTRAINTS.read_text(encoding="utf-8"), host_names).count("\n")
        print(
            f"Creating the environment in {venv.name}: up to {pins} packages, torch is the largest. The first download takes "
            f"minutes. The log is {os.path.relpath(log)}.",
            flush=True,
        )
        create(venv, host_folder)
    stamp.unlink(missing_ok=True)
    constraints = venv / "constraints.txt"
    constraints.write_text(constraint_lines(CONSTRAINTS.read_text(encoding="utf-8"), host_names))

    uv = find_uv(python, log) if host_folder is None else None
    refused: list[str] = []
    worked = install(python, constraints, extras, log, uv)
    if not worked and gpu:
        extras, refused = [extra for extra in extras if extra != "gpu"], ["gpu"]
        worked = install(python, constraints, extras, log, uv)
    shutil.rmtree(venv / "uv", ignore_errors=True)
    watch([str(python), "-m", "pip", "uninstall", "--yes", LEFT_OUT], log, f"leaving out {LEFT_OUT}")
    if not worked:
        print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-15:]), file=sys.stderr)
        raise SetupError(
            f"the packages could not be installed (pip's own message is above, the rest in {log}): check the network or "
            "the package index, then run the same command again."
        )
    if refused:
        print(
            "Note: flash-attn-4 could not be installed, so the attention backends that need it will say that it is "
            f"missing. Try again with: {venv.name}/bin/pip install '.[gpu]'",
            file=sys.stderr,
        )
    record = {
        **{"fingerprint": current, "extras": extras, "refused": refused, "host": str(host_folder or "")},
        "python": sys.executable,  # the Makefile reads it: without PYTHON=, make stays with the Python of this environment
    }
    stamp.write_text(json.dumps(record))
    print(f"The environment is ready after {time.monotonic() - begin:.0f} s.")


def create(venv: Path, host_folder: Path | None) -> None:
    """Make an empty environment in `venv` that also sees the packages of `host_folder`."""
    if venv.is_symlink():  # what it leads to may be another copy's environment, in use
        raise SetupError(
            f"{venv} is a link to {venv.resolve()}, which is no current environment of this copy, and would be emptied: "
            "remove the link, then run the same command again."
        )
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        why = (result.stderr.strip() or result.stdout.strip() or "no message").splitlines()[-1]
        raise SetupError(
            f"no environment can be created in {venv}: {why}. Make the folder writable, or name another Python."
        )
    if host_folder is not None:
        site_packages = venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (site_packages / "host_torch.pth").write_text(f"{host_folder}\n")


def main() -> int:
    """Run the command of the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("sync",))
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the folder of the environment")
    extras = tuple(load_project()["optional-dependencies"])
    parser.add_argument("--extra", action="append", default=[], choices=extras, help="add it")
    arguments = parser.parse_args()
    try:
        sync(arguments.venv.absolute(), tuple(arguments.extra))
    except (SetupError, OSError) as error:
        hint = ". The environment needs a folder it may write to." if isinstance(error, OSError) else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. The same command goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
