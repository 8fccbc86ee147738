"""The environment: one source of versions, repeatable, quick the second time, and clear when something is missing."""

import itertools
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tools import environment, lock
from utils.files import ROOT

PROJECT = environment.load_project()
ALL_REQUIREMENTS = [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())]


def run_make(*arguments: str) -> subprocess.CompletedProcess:
    # `make test PYTHON=...` hands its own variables to every make below it.
    own = {name: x for name, x in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES", "PYTHON")}
    return subprocess.run(["make", "-s", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, env=own)


def pins() -> dict[str, list[Requirement]]:
    found: dict[str, list[Requirement]] = {}
    for line in environment.constraint_lines(environment.CONSTRAINTS.read_text(), set()).splitlines():
        requirement = Requirement(line)
        found.setdefault(environment.requirement_name(line), []).append(requirement)
    return found


@pytest.mark.parametrize(
    "version, fits",
    [("2.11.0+cu130", True), ("2.15.0+cu132", True), ("2.10.1", False), ("2.16.0.dev20261101+cu132", False)],
)
def test_a_version_fits_its_range_or_does_not(version, fits):
    (line,) = [line for line in PROJECT["dependencies"] if environment.requirement_name(line) == "torch"]
    assert environment.fits(version, line) is fits


def test_constraints_pin_one_version_inside_each_range():
    pinned = pins()
    for line in ALL_REQUIREMENTS:
        requirement = Requirement(line)
        name = environment.requirement_name(line)
        if name == "flash-attn":  # built from source: its needs cannot be resolved without building it
            continue
        assert name in pinned, f"{name} is not in constraints.txt: run `make lock`"
        for pin in pinned[name]:
            (specifier,) = pin.specifier
            assert specifier.operator == "=="
            assert requirement.specifier.contains(specifier.version, prereleases=True), f"{pin} against {line}"


def test_the_installed_packages_are_the_pinned_ones():
    from importlib import metadata

    # Only what lies in the environment itself: setuptools adds a folder with its own copies to the path once it is imported.
    found = metadata.distributions(path=[sysconfig.get_path("purelib")])
    installed = {environment.requirement_name(package.metadata["Name"]): Version(package.version) for package in found}
    wrong = []
    for name, candidates in pins().items():
        version = installed.get(name)
        if version is None:
            continue
        for pin in candidates:
            if pin.marker is not None and not pin.marker.evaluate():
                continue
            # A local version such as 2.13.0+cpu is the same release built for another machine.
            if Version(next(iter(pin.specifier)).version).public != version.public:
                wrong.append(f"{name} {version} against {pin}")
    stamp = Path(sys.prefix, "environment.json")
    if not stamp.exists() or '"host": ""' not in stamp.read_text():
        pytest.skip("this Python was not made by `make env`, or keeps its host's packages")
    assert "torch" in installed and not wrong


def test_environment_yml_is_what_pyproject_says():
    assert lock.CONDA_FILE.read_text() == lock.conda_environment(PROJECT)
    parsed = yaml.safe_load(lock.CONDA_FILE.read_text())
    pip_lines = parsed["dependencies"][-1]["pip"]
    assert set(PROJECT["dependencies"]) <= set(pip_lines)
    assert "--editable ." in pip_lines


def test_the_lock_keeps_to_the_pythons_of_the_project():
    pins = (
        "numpy==2.4.6 ; python_full_version < '3.12'\n"
        "numpy==2.5.5 ; python_full_version >= '3.12'\n"
        "triton==3.7.1 ; python_full_version < '3.15' and sys_platform == 'linux'\n"
        "triton==3.8.0 ; python_full_version >= '3.15' and sys_platform == 'linux'\n"
        "zipp==4.1.2\n"
    )
    expected = [line for line in pins.splitlines() if "3.8.0" not in line]
    expected[2] = "triton==3.7.1 ; sys_platform == 'linux'"
    assert lock.keep_allowed_pythons(pins, ">=3.11,<3.13").splitlines() == expected
    locked = environment.CONSTRAINTS.read_text()
    assert lock.keep_allowed_pythons(locked, PROJECT["requires-python"]) == locked, "run `make lock`"


def test_pins_of_the_host_are_dropped():
    text = "# a comment\ntorch==2.13.0\nnumpy==2.4.6 ; python_full_version < '3.12'\nnvidia_cublas==1.0\nrich==15.0.0\n"
    assert environment.constraint_lines(text, {"torch", "numpy", "nvidia-cublas"}) == "rich==15.0.0\n"


@pytest.mark.parametrize(
    "versions, kept, said",
    [
        ({"torch": "2.11.0+cu130", "triton": "3.6.0", "numpy": "2.5.2"}, True, "triton 3.6.0"),
        ({"torch": "2.9.0+cu128", "triton": "3.5.0"}, False, "torch>=2.11,<2.16"),
    ],
)
def test_a_host_torch_is_kept_if_it_fits(tmp_path, versions, kept, said):
    """A made-up host: a folder with the metadata of packages, as on a GPU machine."""
    folder, names, sentence = environment.host_packages(str(fake_host(tmp_path, **versions)), PROJECT)
    assert (folder, names) == ((tmp_path, set(versions)) if kept else (None, set()))
    assert versions["torch"] in sentence and said in sentence


def fake_host(folder: Path, **versions: str) -> Path:
    for name, version in versions.items():
        metadata_folder = folder / f"{name}-{version}.dist-info"
        metadata_folder.mkdir()
        (metadata_folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = folder / "python"
    # -S leaves the real packages out, so that only the made-up ones are found.
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return python


def current_state(folder: Path, monkeypatch, extras: list[str]) -> list[tuple]:
    """A current environment with these extras; returns the list that collects what is installed into it."""
    monkeypatch.setattr(environment, "host_packages", lambda python, project: (None, set(), ""))
    monkeypatch.setattr(environment, "wants_gpu_extra", lambda: False)
    monkeypatch.setattr(environment, "find_uv", lambda python, log: None)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").touch()
    stamp = {"fingerprint": environment.fingerprint("None"), "extras": extras}
    (folder / "environment.json").write_text(json.dumps(stamp))
    installed: list[tuple] = []
    monkeypatch.setattr(environment, "install", lambda python, pins, extras, log, uv: installed.append(extras) or True)
    monkeypatch.setattr(environment, "watch", lambda command, log, what: 0)
    return installed


def test_make_stays_with_the_python_of_the_environment(tmp_path):
    """Who named a Python once need not name it again; the name may hold a space."""
    python = tmp_path / "a folder" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    (tmp_path / "environment.json").write_text(json.dumps({"extras": [], "python": str(python)}))
    assert f'"{python}" tools/environment.py' in run_make("--dry-run", "lab", f"VENV={tmp_path}").stdout
    python.unlink()
    assert str(python) not in run_make("--dry-run", "lab", f"VENV={tmp_path}").stdout, "that Python is gone"


def test_a_current_environment_is_left_alone_and_an_extra_is_added_and_stays(tmp_path, monkeypatch):
    installed = current_state(tmp_path, monkeypatch, [])
    environment.sync(tmp_path)
    assert installed == []
    environment.sync(tmp_path, ("grading", "test"))
    assert installed == [["grading", "test"]]
    environment.sync(tmp_path)  # `make lab` after `make test` changes nothing
    environment.sync(tmp_path, ("test",))
    assert installed == [["grading", "test"]]


def test_an_environment_is_made_anew_when_a_pin_changes(tmp_path, monkeypatch):
    """In a folder of its own: the environment that runs this test must never be rebuilt by it."""
    current_state(tmp_path, monkeypatch, [])
    changed = tmp_path / "constraints.txt"
    changed.write_text(environment.CONSTRAINTS.read_text() + "another==1.0\n")
    monkeypatch.setattr(environment, "CONSTRAINTS", changed)
    made = []
    monkeypatch.setattr(environment, "install_system_packages", lambda: None)
    monkeypatch.setattr(environment, "create", lambda venv, host: made.append(venv))
    environment.sync(tmp_path)
    assert made == [tmp_path]


def test_students_get_neither_graders_nor_testers_tools():
    assert "--extra" not in run_make("--dry-run", "lab").stdout
    assert "--extra grading --extra test" in run_make("--dry-run", "test").stdout
    names = {environment.requirement_name(line) for line in PROJECT["dependencies"]}
    assert not names & {"pytest", "ruff", "mypy", "distributed", "uv"}
    assert "distributed" not in lock.CONDA_FILE.read_text()


def test_uv_gets_the_indexes_of_pip():
    settings = (
        "global.index-url='https://a.example/simple'\n"
        "global.extra-index-url='https://b.example/simple https://c.example/simple'\n"
        ":env:.find-links='/wheels'\nglobal.cert='/ca.pem'\nfreeze.all='true'\nglobal.timeout='60'\nglobal.constraint='/site.txt'\n"
    )
    options, variables = environment.uv_options(settings)
    text = " ".join(options)
    assert "--default-index https://a.example/simple --index https://b.example/simple" in text
    assert "--index https://c.example/simple --find-links /wheels" in text and "freeze" not in text
    assert "--constraints /site.txt" in text
    assert variables == {"SSL_CERT_FILE": "/ca.pem"}
    assert environment.uv_options("global.only-binary=':all:'\n") is None, (
        "uv cannot follow this one: pip does the work"
    )


def test_pip_installs_where_uv_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "uv_options", lambda settings: ([], {}))  # whatever this machine's pip is told
    ran = []
    monkeypatch.setattr(
        environment, "watch", lambda command, log, what, variables=None: ran.append(what) or len(ran) == 1
    )
    assert environment.install(Path(sys.executable), tmp_path / "pins", [], tmp_path / "log", "/no/uv")
    assert ran == ["installing with uv", "installing with pip"]


def test_a_folder_that_cannot_be_written_or_is_a_link_to_another_copys_environment_is_left_as_it_is(tmp_path):
    theirs, link = tmp_path / "theirs", tmp_path / ".venv"
    theirs.mkdir()
    (theirs / "in use").touch()
    link.symlink_to(theirs)
    for folder, said in ((theirs / "in use" / "venv", "no environment can be created"), (link, "remove the link")):
        with pytest.raises(environment.SetupError, match=said):
            environment.create(folder, None)
    assert (theirs / "in use").exists()


@pytest.mark.parametrize(
    "given, said",
    [("/nope", "there is no /nope"), ("", "Python 3.11, 3.12 or 3.13 is needed"), ("{shim}", "does not answer")],
)
def test_a_python_that_does_not_run_is_one_sentence(tmp_path, given, said):
    """A shim, such as pyenv's, is there as a file and fails when it is called."""
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho shim: not installed >&2\nexit 127\n")
    shim.chmod(0o755)
    result = run_make("env", f"PYTHON={given.format(shim=shim)}")
    assert result.returncode != 0 and said in result.stderr and "not found" not in result.stderr


def test_a_python_outside_the_range_is_one_sentence():
    with pytest.raises(environment.SetupError, match=r"Python 3\.14 was given and >=3\.11,<3\.14 is needed"):
        environment.check_python((3, 14), PROJECT)


def test_a_missing_system_package_is_named_with_its_reason(monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda name, path=None: None)
    missing = environment.missing_system_packages()
    assert "C++ compiler" in missing["g++"]
