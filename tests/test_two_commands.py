"""`make lab` serves the notebook of the chosen lab and prints its address."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from utils import cli

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def served(tmp_path):
    """JupyterLab as `make lab` starts it, on a free port without a display: (address, log file)."""
    if not (ROOT / ".venv" / "environment.json").exists():
        pytest.skip("there is no .venv here: `make test` makes one")
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
    assert "open the address below" in log.read_text()
    base, token = re.match(r"(http://localhost:\d+)/lab/tree/lab1\.ipynb\?token=(\w+)", address).groups()
    assert b"JupyterLab" in fetch(address)
    listing = json.loads(fetch(f"{base}/api/contents/lab1.ipynb?token={token}"))
    assert listing["type"] == "notebook" and listing["content"]["cells"]
    kernels = json.loads(fetch(f"{base}/api/kernelspecs?token={token}"))
    assert kernels["default"] in kernels["kernelspecs"]


def test_an_unknown_lab_names_those_that_are_here():
    result = subprocess.run(
        [sys.executable, "-m", "utils.cli", "open", "lab9"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "there is no lab9.ipynb" in result.stderr and "lab1" in result.stderr


@pytest.mark.parametrize(
    ("variables", "expected"), [({}, False), ({"DISPLAY": ":0"}, True), ({"WAYLAND_DISPLAY": "wayland-0"}, True)]
)
def test_a_browser_is_opened_only_on_a_display(monkeypatch, variables, expected):
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.has_display() is expected
    assert ("--no-browser" in cli.jupyter_command(cli.ROOT / "lab1.ipynb", None)) is not expected
