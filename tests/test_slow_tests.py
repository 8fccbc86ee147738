"""The rule for slow tests, tried on a folder of made-up tests: `tests/conftest.py`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import is_slow

ROOT = Path(__file__).resolve().parent.parent
CHILD = f"{sys.executable!r}, '-c', 'import time\\nwhile time.process_time() < 1.2: pass'"
TESTS = f"""
import subprocess
import time

import pytest

def burn():
    end = time.process_time() + 1.2
    while time.process_time() < end:
        pass

@pytest.fixture(scope="module")
def expensive():
    burn()

def test_quick(): pass
def test_burns(): burn()
def test_burns_in_a_child(): subprocess.run([{CHILD}], check=True)
def test_uses_a_fixture(expensive): pass
def test_uses_it_again(expensive): pass

@pytest.mark.slow
def test_is_marked(): burn()
"""


def run_tests(folder: Path, *options: str) -> str:
    """Run the made-up tests, of which 0.3 s of CPU time are allowed; return pytest's output."""
    (folder / "test_made_up.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: is slow\n")
    options = "-p", "tests.conftest", "-p", "no:cacheprovider", "-q", "-rA", "--tb=line", *options
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLOW_TEST_SECONDS": "0.3"}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_an_unmarked_slow_test_is_named_and_passes(tmp_path):
    output = run_tests(tmp_path, "-n", "1", "-m", "not slow")
    named = set(re.findall(r"^\S+::(\w+): it", output, re.MULTILINE))
    assert named == {"test_burns", "test_burns_in_a_child", "test_uses_a_fixture"}, output
    assert output.splitlines()[-1] == "1 test left out (slow): make test-slow runs them."
    assert "5 passed" in output


def test_a_slower_machine_is_allowed_more():
    assert is_slow(23.0, lambda: 1.0)
    assert not is_slow(23.0, lambda: 1.2) and not is_slow(19.0, lambda: 1.0)
