"""`make test-versions`: what it installs, and the table of kernels that it writes."""

import json
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools import versions
from tools.record.kernel_assembly import side_by_side
from utils.files import ROOT
from utils.machine.versions import TESTED

TABLE = json.loads((ROOT / "assets" / "results" / "kernel_versions.json").read_text())


@pytest.mark.parametrize(("which", "end"), [("oldest", 0), ("newest", 1)])
def test_an_environment_has_one_end_of_each_range(which, end):
    lines = {Requirement(line).name: Requirement(line) for line in versions.requirements(which)}
    for package, ends in TESTED.items():
        major, minor = ends[end]
        assert lines[package].specifier.contains(f"{major}.{minor}.1")
        assert not lines[package].specifier.contains(f"{major}.{minor + 1}.0")
    assert {"pytest", "transformers", "distributed"} <= set(lines)


def test_the_tests_that_call_make_leave_the_users_environment_alone(monkeypatch, tmp_path):
    """`make` reads VENV; with .venv it would build the user's environment anew, from the one with the pins."""
    commands = []

    def run(command, env=None, **_):
        commands.append((list(map(str, command)), (env or {}).get("VENV", ".venv")))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setattr(versions.subprocess, "run", run)
    assert versions.check_environment(Path("/oldest/bin/python"), "oldest")
    assert [venv for _, venv in commands] == 3 * [str(tmp_path / "oldest-make")]
    assert commands[0][0] == ["make", "-s", "env"] and "pytest" in commands[2][0]


def test_the_recorded_table_has_both_ends_and_every_kernel_compiles():
    tritons = [environment["triton"] for environment in TABLE["environments"]]
    ends = {tuple(map(int, triton.split(".")[:2])) for triton in tritons}
    assert {TESTED["triton"][0], TESTED["triton"][1]} <= ends
    for row in TABLE["rows"]:
        assert all("error" not in row[triton] and row[triton]["registers"] <= 255 for triton in tritons), row


def test_the_recorded_table_has_every_kernel():
    pytest.importorskip("triton", reason="there are Triton wheels for Linux only")
    from tools.record.kernel_assembly import kernels

    assert [row["kernel"] for row in TABLE["rows"]] == [name for name, _ in kernels()], "run: make test-versions"


def test_what_the_page_says_of_spills_is_so():
    old, new = (environment["triton"] for environment in TABLE["environments"])
    spills = [(row["kernel"], row[old]["spill_bytes"], row[new]["spill_bytes"]) for row in TABLE["rows"]]
    page = " ".join((ROOT / "docs" / "versions.md").read_text(encoding="utf-8").split())
    spill = [sum(row[version] > 0 for row in spills) for version in (1, 2)]
    assert f"of {len(spills)} kernels" in page
    assert f"With 3.6, {spill[0]} kernels spill; with 3.9, {spill[1]}." in page
    changed = [f"| {name} | {before} | {after} |" for name, before, after in spills if before != after]
    assert [row for row in changed if row not in page] == []


def test_records_side_by_side_are_in_the_order_of_triton(tmp_path):
    for name, triton, registers in (("a", "3.10.0", 96), ("b", "3.9.0", 128)):
        row = {"kernel": "k", "registers": registers, "spill_bytes": 0, "shared_bytes": 1, "warnings": []}
        (tmp_path / name).write_text(json.dumps({"environment": {"triton": triton}, "rows": [row]}))
    table = side_by_side([tmp_path / "a", tmp_path / "b"])
    assert [e["triton"] for e in table["environments"]] == ["3.9.0", "3.10.0"]
    assert table["rows"][0]["3.10.0"]["registers"] == 96 and "warnings" not in table["rows"][0]["3.9.0"]
