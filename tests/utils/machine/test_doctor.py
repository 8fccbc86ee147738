"""`labs doctor`: one table of the four labs, a reason and a remedy for what does not run, JSON for scripts."""

import json
from importlib import metadata

import pytest
import torch
from typer.testing import CliRunner

from utils import cli
from utils.machine import doctor


def run_doctor(*arguments: str, columns=100):
    return CliRunner().invoke(cli.app, ["doctor", *arguments], env={"COLUMNS": str(columns)})


def test_json_lists_labs_and_backends_with_reasons_and_remedies():
    from utils.attention import BACKENDS

    result = run_doctor("--json")
    report = json.loads(result.stdout)
    assert [lab["lab"] for lab in report["labs"]] == ["lab1", "lab2_flexattention", "lab3_gluon", "lab4_sdpa"]
    for part in (part for lab in report["labs"] for part in lab["parts"]):
        assert part["reason"].endswith(".") and (part["runs"] or part["remedy"].endswith(".")), part
    assert report["machine"]["versions"]["torch"] == metadata.version("torch")  # torch.__version__ may have +cu132
    assert result.exit_code == (1 if report["faults"] else 0)
    rows = {row["backend"]: row for row in report["attention_providers"]}
    assert set(rows) == set(BACKENDS) and rows["naive"]["ok"] and rows["math"]["ok"]
    assert all(row["ok"] or row["reason"].endswith(".") for row in rows.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_table_says_once_what_needs_one():
    text = run_doctor(columns=300).stdout
    for word in ("lab1", "lab4_sdpa", "CUDA graphs", "Hopper"):
        assert word in text
    for sentence in ("It needs a GPU.", "FlashAttention 4 needs an NVIDIA GPU", "The Gluon kernels use Hopper's wgmma"):
        assert text.count(sentence) == 1
    assert f"of torch {torch.__version__}" not in text


def test_a_missing_notebook_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    assert not doctor.examine_lab("lab1")["notebook"]
    (tmp_path / "lab1.ipynb").write_text("{}")
    assert doctor.examine_lab("lab1")["notebook"]


def test_a_package_outside_its_range_is_a_fault_with_a_remedy(monkeypatch):
    required = ["torch>=99", "no-such-package>=1", "rich", "x; extra == 'gpu'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: required)
    torch_fault, missing_fault = doctor.installation_faults()
    assert metadata.version("torch") in torch_fault and "torch>=99" in torch_fault and "make env" in torch_fault
    assert "no-such-package is missing" in missing_fault


def test_a_broken_installation_exits_with_1(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["torch>=99"])
    result = run_doctor()
    assert result.exit_code == 1
    assert "Broken installation" in result.output
