"""Versions: the tested ranges are those of pyproject.toml, and what lies outside them is said in words."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from utils.machine import versions

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("package", versions.TESTED)
def test_the_tested_versions_are_the_ranges_of_the_project(package):
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (line,) = [line for line in lines if re.match(rf"{package}\b", line)]
    oldest, newest = versions.TESTED[package]
    assert f">={oldest[0]}.{oldest[1]}," in line
    assert f"<{newest[0]}.{newest[1] + 1}" in line


@pytest.mark.parametrize(("version", "word"), [("2.10.1", "older"), ("2.16.0", "newer"), ("3.0.0+cu140", "newer")])
def test_an_untested_torch_is_named_with_the_range(monkeypatch, version, word):
    real = versions.metadata.version
    monkeypatch.setattr(versions.metadata, "version", lambda name: version if name == "torch" else real(name))
    versions.package_version.cache_clear()
    versions.installed_version.cache_clear()
    try:
        (sentence,) = versions.untested_versions()
        assert version in sentence and word in sentence and "torch 2.11 to 2.15" in sentence and "make env" in sentence
    finally:
        versions.package_version.cache_clear()
        versions.installed_version.cache_clear()


def test_importing_utils_warns_of_an_untested_triton(tmp_path):
    """A Triton of the future, by its metadata alone: the first import of utils says so, once."""
    future = tmp_path / "triton-4.0.0.dist-info"
    future.mkdir()
    (future / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 4.0.0\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import utils; from utils import GPU_SPECS"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr.count("The course was tested with triton 3.6 to 3.9; triton 4.0.0 is newer") == 1
