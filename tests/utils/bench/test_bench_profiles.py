"""The profilers' paths, with programs in their place that behave as nsys and ncu do: they work, or fail in each way."""

import dataclasses
import json
import os
import stat

import pytest
import torch

from tests.utils.bench.bench_runs import CPU, SDPA, SMALL
from utils.bench import profiles
from utils.bench.report import markdown
from utils.bench.targets import plan

REQUEST = profiles.Request(SDPA, "optimized", "any", "flash_sdp_optimized_cudnn", "cuda:0", {})


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a shell script on PATH under a profiler's name, in front of everything."""

    def put(name: str, script: str):
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}{os.environ['PATH']}")

    return put


def a_working_ncu(tmp_path):
    return f'echo "$@" >> {tmp_path}/arguments\nwhile [ "$1" != --export ]; do shift; done\ntouch "$2.ncu-rep"'


def test_an_ncu_that_works(tmp_path, program):
    program("ncu", a_working_ncu(tmp_path))
    assert profiles.nsight(tmp_path / "side", REQUEST, "roofline", "warm") == (tmp_path / "side.ncu-rep", "")
    arguments = (tmp_path / "arguments").read_text()
    for words in ("--clock-control none", "--cache-control none", "--set roofline", "flash_sdp_optimized_cudnn/"):
        assert words in arguments


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"; exit 1', "only administrators"),
        ('echo "==ERROR== LibraryNotLoaded"; exit 1', "made no report: ==ERROR== LibraryNotLoaded"),
        ('echo "all well, and no file"', "made no report: all well"),
        ("exit 3", "made no report: it said nothing."),
    ],
)
def test_an_ncu_that_fails_is_one_sentence(tmp_path, program, script, message):
    program("ncu", script)
    report, why_not = profiles.nsight(tmp_path / "x", REQUEST, "deep_dive", "cold")
    assert report is None and message in why_not and "\n" not in why_not


def test_nsys_that_works_and_one_that_does_not(tmp_path, program):
    program(
        "nsys",
        f'echo "$@" > {tmp_path}/arguments\nfor word; do case $word in --output=*) '
        'touch "${word#--output=}.nsys-rep";; esac; done',
    )
    assert profiles.nsight(tmp_path / "s", REQUEST, "minimal", "warm") == (tmp_path / "s.nsys-rep", "")
    assert "--trace=cuda,nvtx" in (tmp_path / "arguments").read_text()
    program("nsys", 'echo "Importer error status: The importer binary could not be found."')
    report, why_not = profiles.nsight(tmp_path / "t", REQUEST, "minimal", "warm")
    assert report is None and why_not.startswith("Nsight Systems made no report: Importer error")


def test_tools_that_are_missing_or_too_slow(tmp_path, program, monkeypatch):
    monkeypatch.setattr(profiles, "TOOL_SECONDS", 0.2)
    program("nsys", "exec sleep 30")
    assert "not done after 0.2 s" in profiles.nsight(tmp_path / "s", REQUEST, "minimal", "warm")[1]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert profiles.nsight(tmp_path / "s", REQUEST, "minimal", "warm")[1].endswith("nsys is not on PATH.")
    assert profiles.nsight(tmp_path / "s", REQUEST, "roofline", "warm")[1].endswith("ncu is not on PATH.")


def test_a_profile_stands_in_the_results_and_the_report(tmp_path, program, monkeypatch, document):
    """The whole path of `--profile roofline`, on a request that claims to be of a GPU."""
    program("ncu", a_working_ncu(tmp_path))
    monkeypatch.setattr(profiles, "gpu_idle_share", lambda trace: 0.25)
    (found,) = plan([SDPA], [SMALL], CPU, {})
    (case,) = found.cases
    built = found.target.build(case, "optimized", *found.target.inputs(case))
    values = {key: setting.value for key, setting in case.settings.items()}
    request = profiles.Request(SDPA, "optimized", case.label, "r", "cuda:0", values)
    record = document["cases"][0]
    with torch.no_grad():
        profile = profiles.profile_side(built.fn, request, tmp_path / "p", "roofline", "warm")
        own_process = json.loads(json.dumps(dataclasses.asdict(dataclasses.replace(request, device="cpu"))))
        profiles.replay(profiles.Request(**own_process))
    assert profile["gpu_busy_share"] == 0.75
    assert profile["why_not"] == [] and len(profile["files"]) == 2
    record["profiles"] = {"optimized": profile}
    assert "GPU busy 75.0% of the time" in markdown(document)
