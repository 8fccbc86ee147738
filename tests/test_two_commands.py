"""`make lab` serves the notebook of the chosen lab and prints its address."""

import asyncio
import contextlib
import json
import os
import platform
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import nbformat
import pytest
from jupyter_server.services.kernels.kernelmanager import MappingKernelManager
from typer.testing import CliRunner

from tools import environment
from utils import cli, server

ROOT = Path(__file__).resolve().parent.parent


def environment_is_current() -> bool:
    """Whether make leaves the environment alone; it asks the Python that the environment was made with."""
    file = ROOT / ".venv" / "environment.json"
    stamp = json.loads(file.read_text()) if file.exists() else {}
    with mock.patch.object(sys, "executable", stamp.get("python")):
        return environment.fingerprint(stamp.get("host") or "None") == stamp.get("fingerprint")


@pytest.fixture
def served(tmp_path):
    """JupyterLab as `make lab` starts it, on a free port without a display: (address, log file)."""
    if not environment_is_current():
        pytest.skip("there is no current .venv here, and make would renew it under the running tests: `make test` does")
    log = tmp_path / "jupyter.log"
    # Runtime and settings folders of its own: it neither finds nor changes the user's own JupyterLab.
    environment = {
        **{key: value for key, value in os.environ.items() if key not in ("DISPLAY", "WAYLAND_DISPLAY", "MAKEFLAGS")},
        **{f"JUPYTER_{kind}_DIR": str(tmp_path / kind) for kind in ("RUNTIME", "CONFIG", "DATA")},
        "JUPYTER_PORT": "0",
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            ["make", "-s", "lab"], cwd=ROOT, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 60
            address = None
            while address is None and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
                address = re.search(r"http://localhost:\d+/lab/tree/lab1\.ipynb\?token=\w+", log.read_text())
            assert address is not None, f"no address of lab1.ipynb was printed:\n{log.read_text()}"
            yield address.group(), log
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def fetch(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=20) as response:
        return response.read()


def test_make_lab_serves_lab1(served):
    address, log = served
    text = log.read_text()
    assert "Config option" not in text and ("file://" not in text or sys.platform != "linux")  # nobody can open that
    assert "at the address below" in text and len(text.splitlines()) <= 10, text
    base, token = re.match(r"(http://localhost:\d+)/lab/tree/lab1\.ipynb\?token=(\w+)", address).groups()
    assert b"JupyterLab" in fetch(address)
    listing = json.loads(fetch(f"{base}/api/contents/lab1.ipynb?token={token}"))
    assert listing["type"] == "notebook" and listing["content"]["cells"]
    names = {item["name"] for item in json.loads(fetch(f"{base}/api/contents?token={token}"))["content"]}
    assert {"lab1.ipynb", "lab4_sdpa.ipynb", "README.md", "utils"} <= names
    assert not names & {"instructor", "tests"}, "solutions are not among what a student sees"
    settings = fetch(f"{base}/lab/api/settings/@jupyterlab/apputils-extension:notification?token={token}")
    assert json.loads(settings)["schema"]["properties"]["fetchNews"]["default"] == "false", "no popup about news"
    kernels = json.loads(fetch(f"{base}/api/kernelspecs?token={token}"))
    assert kernels["default"] in kernels["kernelspecs"]


@pytest.mark.parametrize("name", ["lab9", "", "../lab1", "/elsewhere/lab1.ipynb"])
def test_an_unknown_lab_names_those_that_are_here(name):
    result = CliRunner().invoke(cli.app, ["open", name])
    assert result.exit_code == 2 and f"there is no lab {name!r}" in result.stderr and "lab1" in result.stderr


@pytest.mark.parametrize(
    ("variables", "expected"), [({}, False), ({"DISPLAY": ":0"}, True), ({"WAYLAND_DISPLAY": "wayland-0"}, True)]
)
def test_a_browser_is_opened_only_on_a_display(monkeypatch, variables, expected):
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert server.has_display() is expected
    command = server.jupyter_command(cli.ROOT / "lab1.ipynb", None)
    assert ("--no-browser" in command) is not expected


@pytest.mark.parametrize("name", ["lab3", "lab3_gluon", "lab3_gluon.ipynb", "./lab3_gluon.ipynb"])
def test_a_lab_is_named_in_full_or_by_its_beginning(name):
    assert cli.find_lab(name) == ROOT / "lab3_gluon.ipynb"


def test_an_instructors_server_starts_in_the_folder_of_the_class(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "ROOT", tmp_path / "labs")
    assert cli.class_folder(None) == tmp_path / "labs", "no class yet"
    for folder in ("labs/course", "labs/spring27", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "nbgrader_config.py").touch()
    assert cli.class_folder(None) == tmp_path / "labs" / "course"
    assert cli.class_folder(tmp_path / "labs" / "spring27") == tmp_path / "labs" / "spring27"
    for folder, why in (("elsewhere", "is not below"), ("labs", "has no nbgrader_config.py")):
        with pytest.raises(cli.UserError, match=why):
            cli.class_folder(tmp_path / folder)


def test_saving_an_unchanged_lab_leaves_its_file_as_it_is(tmp_path):
    stored = (ROOT / "lab1.ipynb").read_text(encoding="utf-8")
    (tmp_path / "lab1.ipynb").write_text(stored, encoding="utf-8")
    content = nbformat.reads(stored, as_version=4)
    content["metadata"]["language_info"] = {"name": "python", "version": "3.12.1"}  # as JupyterLab fills it in
    model = {"type": "notebook", "content": content}
    server.keep_language_version(model, "lab1.ipynb", SimpleNamespace(root_dir=str(tmp_path)))
    assert nbformat.writes(model["content"], version=4).rstrip("\n") + "\n" == stored


def test_the_server_hooks_into_opening_and_saving():
    hooks = []
    opened = {"type": "notebook", "content": {"metadata": {"language_info": {"name": "python"}}}}
    manager = SimpleNamespace(register_pre_save_hook=hooks.append, get=lambda path: opened)
    kernels = MappingKernelManager(root_dir=str(ROOT))
    server._load_jupyter_server_extension(SimpleNamespace(contents_manager=manager, kernel_manager=kernels))
    assert hooks == [server.keep_language_version]
    shown = asyncio.run(manager.get("lab1.ipynb"))["content"]["metadata"]["language_info"]
    assert shown["version"] == platform.python_version(), "JupyterLab has nothing to fill in, and the tab no dot"


@pytest.mark.parametrize(
    ("opened", "starts"),
    [("", ""), ("instructor/labs", ""), ("instructor/labs/", ""), ("instructor", "instructor"), ("docs", "docs")],
)
def test_the_kernel_of_a_labs_source_starts_where_the_labs_are(opened, starts):
    kernels = MappingKernelManager(root_dir=str(ROOT))
    server.start_sources_at_the_top(kernels)
    assert Path(kernels.cwd_for_path(opened, env={})) == ROOT / starts


def test_who_comes_by_ssh_reads_how_to_forward_the_port(monkeypatch):
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.2 50000 10.0.0.1 22")
    monkeypatch.setenv("USER", "ada")
    assert server.forwarding_command(8890) == "ssh -L 8890:localhost:8890 ada@10.0.0.1"
    monkeypatch.delenv("SSH_CONNECTION")
    assert server.forwarding_command(8890) is None


def test_a_taken_port_is_passed_over():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert server.free_port(port) != port


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_ctrl_c_asks_before_the_server_stops(tmp_path):
    """The question of Jupyter is answered with n: the server goes on; then with y: it stops and leaves no file."""
    folders = {f"JUPYTER_{kind}_DIR": str(tmp_path / kind) for kind in ("RUNTIME", "CONFIG", "DATA")}
    environment = {**os.environ, **folders, "JUPYTER_PORT": "0"}
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-m", "utils.cli", "open"], environment)
    try:
        address = re.search(r"http://127\S+", read_until(terminal, r"http://127\S+\s", 60))[0]
        os.write(terminal, b"\x03")
        read_until(terminal, r"Shut down this Jupyter server", 20)
        os.write(terminal, b"n\n")
        time.sleep(2)  # Jupyter's handler comes back in a later turn of its loop, and says nothing
        assert b"JupyterLab" in fetch(address)
        os.write(terminal, b"\x03")
        read_until(terminal, r"Shut down this Jupyter server", 20)
        os.write(terminal, b"y\n")
        read_until(terminal, r"\Z.", 20, at_end=True)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        pid = 0
        assert not list((tmp_path / "RUNTIME").glob("jpserver-*")), "the server put its files away"
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(terminal)


def read_until(terminal: int, pattern: str, seconds: float, at_end: bool = False) -> str:
    """What the terminal shows until the pattern comes, or until the program has ended."""
    text, deadline = "", time.monotonic() + seconds
    while not re.search(pattern, text) and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                text += os.read(terminal, 4096).decode(errors="replace")
            except OSError:  # Linux reports the end of a terminal's program as an error
                if at_end:
                    return text
                raise
    assert not at_end and re.search(pattern, text), f"{pattern} did not come in {seconds} s:\n{text}"
    return text
