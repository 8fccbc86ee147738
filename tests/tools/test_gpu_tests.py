"""The runner of GPU tests: what it says when the time is over. The tests that it runs here need no GPU."""

import signal
import subprocess
import time

from tools.gpu_tests import outcomes, reasons, run

TESTS = """
import time
import pytest
pytestmark = pytest.mark.gpu
def test_right():
    pass
def test_wrong():
    assert 1 == 2, "a reason"
def test_long():
    time.sleep(600)
"""


def test_when_the_time_is_over_the_log_says_why_a_test_failed(tmp_path, monkeypatch):
    file = tmp_path / "test_three.py"
    file.write_text(TESTS, encoding="utf-8")
    names = [f"{file}::{name}" for name in ("test_right", "test_wrong", "test_long")]
    log = tmp_path / "logs" / "shard-0.log"

    class Process(subprocess.Popen):
        def wait(self, timeout=None):  # on a machine of any speed, the time is over once the third test runs
            while timeout and timeout > 100 and "FAILED" not in log.read_text(encoding="utf-8"):
                time.sleep(0.1)
            return super().wait(timeout if timeout is None or timeout < 100 else 0.1)

    monkeypatch.setattr(subprocess, "Popen", Process)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignored, as in a shell's background
    try:
        result = run(names, tmp_path / "logs", processes=1, seconds=600.0)
    finally:
        signal.signal(signal.SIGINT, before)
    log = log.read_text(encoding="utf-8")
    assert sorted(outcomes(log).values()) == ["FAILED", "PASSED"]
    assert list(result.values()).count("NOT RUN") >= 1
    assert len(reasons(log)) == 1 and "a reason" in reasons(log)[0]
