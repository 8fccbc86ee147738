"""The rule for slow tests, tried on a folder of made-up tests: `tests/conftest.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHILD = f"{sys.executable!r}, '-c', 'import time\\nwhile time.process_time() < 0.6: pass'"
TESTS = f"""
import subprocess
import time

import pytest

def burn():
    end = time.process_time() + 0.6
    while time.process_time() < end:
        pass

@pytest.fixture(scope="module")
def expensive():
    burn()

def test_quick(): pass
def test_sleeps_a_little(): time.sleep(0.6)
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
def test_an_unmarked_slow_test_fails_and_a_marked_one_is_left_out(tmp_path):
    output = run_tests(tmp_path, "-n", "1", "-m", "not slow")
    results = dict(reversed(line.split(" - ")[0].split(" ")) for line in output.splitlines() if "::test" in line)
    expected = {
        "test_quick": "PASSED",
        "test_sleeps_a_little": "PASSED",
        "test_burns": "FAILED",
        "test_burns_in_a_child": "FAILED",
        "test_uses_a_fixture": "ERROR",
        "test_uses_it_again": "PASSED",
    }
    assert {name.partition("::")[2]: result for name, result in results.items()} == expected, output
    assert "s of CPU time, more than 0.3 s: mark it @pytest.mark.slow" in output
    assert output.splitlines()[-1] == "1 test left out (slow): make test-slow runs them."


def test_a_marked_test_may_be_slow(tmp_path):
    output = run_tests(tmp_path, "-m", "slow")
    assert "1 passed" in output and "left out" not in output
