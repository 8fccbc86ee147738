"""The record names machine, versions and commit; it does not name the person or the folder."""

import getpass
import json
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from utils.machine import environment as env


def test_record_has_versions_machine_and_commit_and_is_json():
    record = json.loads(json.dumps(env.environment()))
    assert record["torch"] == torch.__version__
    assert record["python"] == platform.python_version()
    assert record["threads"] == torch.get_num_threads()
    assert record["cpu"]
    assert {"gpu", "driver", "cuda", "cudnn", "triton", "commit", "dirty"} <= set(record)


def test_record_names_no_person_no_host_and_no_folder():
    text = json.dumps(env.environment())
    assert str(Path.home()) not in text
    assert str(env.ROOT) not in text
    assert platform.node() not in text or len(platform.node()) < 4
    values = [value for value in env.environment().values() if isinstance(value, str)]
    assert getpass.getuser() not in values
    assert not any(value.startswith("/") for value in values)


def _git(folder, *arguments):
    subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t", *arguments],
        check=True,
        capture_output=True,
    )


def git_state(folder):
    env.git_state.cache_clear()  # a process asks once
    return env.git_state(folder)


def test_git_state_of_a_clean_a_dirty_and_a_foreign_checkout(tmp_path):
    assert git_state(tmp_path) == {"commit": None, "dirty": None}
    _git(tmp_path, "init", "-q")
    (tmp_path / "a.txt").write_text("a")
    assert git_state(tmp_path) == {"commit": None, "dirty": True}
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-q", "-m", "first")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "a.txt").write_text("b")
    assert git_state(tmp_path) == {"commit": clean["commit"], "dirty": True}
    # A copy of the course inside another repository has no commit of its own.
    inner = tmp_path / "course"
    inner.mkdir()
    assert git_state(inner) == {"commit": None, "dirty": None}


def test_the_last_level_is_as_large_as_any():
    cache = env.last_level_cache_bytes()
    levels = [path.read_text() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    assert cache == (max(1024 * int(text.strip()[:-1]) for text in levels) if levels else None)
    assert cache is None or cache >= 256 * 1024


def test_without_nvml_its_state_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(env, "_nvml", lambda: (_ for _ in ()).throw(RuntimeError("no driver")))
    assert env.gpu_state("cuda:0") == {"unavailable": "NVML is not read: no driver."}


class _Nvml:
    """A driver that offers clocks and throttle reasons only."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetPowerUsage(self, handle):
        raise self.NVMLError("not supported")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return 0x4 | 0x40


def test_readings_a_driver_lacks_are_none_and_throttle_bits_become_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(env, "_nvml", _Nvml)
    monkeypatch.setattr(env, "_nvml_handle", lambda index: index)
    state = env.gpu_state("cuda:0")
    assert state["sm_clock_mhz"] == 1980 and state["memory_clock_mhz"] == 3201
    assert state["power_w"] is None and state["temperature_c"] is None
    assert state["throttle_reasons"] == ["software power cap", "hardware thermal slowdown"]


@pytest.mark.gpu
def test_gpu_state_reads_plausible_values():
    state = env.gpu_state()
    assert "unavailable" not in state, state
    assert 100 <= state["sm_clock_mhz"] <= 4000
    assert 10 <= state["power_w"] <= 2000
    assert 10 <= state["temperature_c"] <= 110
    assert isinstance(state["throttle_reasons"], list)
    record = env.environment("cuda")
    assert record["gpu"] and record["driver"] and record["cudnn"]


@pytest.mark.parametrize(("named", "dirty"), [("abc123", False), ("abc123-dirty", True)])
def test_a_copy_without_history_names_its_commit(monkeypatch, tmp_path, named, dirty):
    monkeypatch.setenv("LABS_COMMIT", named)
    assert git_state(tmp_path) == {"commit": "abc123", "dirty": dirty}
