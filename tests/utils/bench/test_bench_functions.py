"""A function of the user's own, GEMM and GELU as targets, and sweeps."""

import json
import math
import sys

import pytest
import torch
from typer.testing import CliRunner

from tests.utils.bench.bench_runs import SDPA, run_cpu
from utils.bench import report
from utils.bench.cli import app
from utils.bench.errors import BenchError, WrongRun
from utils.bench.report import rows, to_csv
from utils.bench.targets import TARGETS, plan
from utils.bench.targets.base import Built
from utils.bench.targets.functions import read_argument
from utils.benchmark.profiling import Launched
from utils.benchmark.result import digits

CPU = torch.device("cpu")
MINE = """
import torch

def plain(x, w):
    return torch.relu(x @ w)

def fused(x, w):
    return torch.relu_(torch.mm(x, w))

def wrong(x, w):
    return 1.01 * torch.relu(x @ w)

def single(x, w):  # as a kernel that has no float64
    assert x.dtype == torch.float32
    return torch.relu(x @ w)

def nothing(*tensors):
    pass

def first(x, w):
    return x.argmax(-1), x < 0
"""
INPUTS = ["--input", "x=randn(n, 32)", "--input", "w=randn(32, 16)"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def labs_bench(*words):
    done = CliRunner().invoke(app, ["run", *words, "--iterations", "12", "--run-id", "x", "--json"])
    return done, json.loads(done.stdout) if done.stdout else None


def test_a_function_of_the_users_own_is_verified_timed_and_swept(folder):
    done, document = labs_bench(
        "mine:fused", "--against", "mine:plain", *INPUTS, "--sweep", "n=16:64:x2", "--discard", "outliers,throttled"
    )
    assert done.exit_code == 0 and [case["swept"]["n"] for case in document["cases"]] == ["16", "32", "64"]
    case = document["cases"][-1]
    assert case["workload"] == {"inputs": "x 64x32 randn fp32; w 32x16 randn fp32"}
    assert case["cost"]["flops"] == 2 * 64 * 32 * 16 and case["cost"]["bytes"] == 4 * (64 * 32 + 32 * 16 + 64 * 16)
    assert any("no sample is left out as throttled" in note for note in case["notes"]), "a CPU's clocks are not read"
    assert all({"outliers", "throttled", "discarded"} <= row.keys() and row["discarded"] >= 0 for row in rows(document))
    assert case["comparison"]["verdict"] and any("aten::mm" in name for name in case["ran"]["optimized"]["operators"])
    assert (
        case["verification"]["optimized"]["whole_bound"] < 1e-5 and "compared with plain in float64." in case["notes"]
    )
    sides = [(case, side) for case in document["cases"] for side in case["sides"]]
    drawn = {text.get_text() for text in report._figures("mine:fused", sides, "run")["sweep"].axes[0].texts}
    assert {f"{digits(case['comparison']['speedup'])}x" for case in document["cases"]} <= drawn  # as in the table
    written = {path.name for path in (folder / "artifacts/x").iterdir()}
    assert written == {"results.json", "report.md", "results.csv", "sweep.png"}
    steps = [line for line in done.stderr.splitlines() if line.startswith(("0/9 mine:fused", "8/9 mine:fused"))]
    assert len(steps) == 2, "progress is said in lines where there is no terminal"
    assert "e-05" not in to_csv(rows(document))


def test_a_wrong_function_is_never_timed():
    done, document = labs_bench("mine:wrong", "--against", "mine:plain", *INPUTS, "--sweep", "n=16")
    (case,) = document["cases"]
    assert done.exit_code == 1 and case["status"] == "failed" and not case["sides"] and "at row " in case["reason"]
    assert "(compared with plain in float64) is not the float64 reference's" in case["reason"]


def test_what_a_function_was_compared_with_is_said():
    for words, said in (
        (["mine:plain", "--against", "mine:single"], "compared with single: single does not compute in float64"),
        (["mine:single"], "not compared: single does not compute in float64"),
        (["mine:first"], "compared with first in float64"),
        (["mine:nothing"], "not compared: no tensor is returned"),
    ):
        (found,) = plan(
            [words[0]], [], CPU, {}, inputs=["x=randn(4, 8)", "w=randn(8, 4)"], against=words[2:] and words[2]
        )
        (case,) = found.cases
        results = found.target.expected(case, *found.target.inputs(case))
        assert said in found.target.compared_with and all(x.dtype == torch.float64 for x in results.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mine:fusde", "--input", "x=randn(4)"], "no function 'mine:fusde'"),
        (["mine:fused", "--input", "x=randn(n)"], "n is no size"),
        (["mine:fused", "--input", "x=rnad(4)"], "Did you mean rand"),
        (["mine:fused", "--input", "x"], "write it as"),
        (["mine:fused", "--input", "w=randn(4, 4)", "--input", "x=randn(4, 4)"], "fused takes x, w"),
        ([SDPA, "--input", "x=randn(4)"], "module:function"),
        (["mine:fused", "--input", "x=randn(4)", "--sweep", "n=1,2"], "no --input has it"),
        ([SDPA, "--sweep", "seq_length=16,32"], "No such option '--seq-length'"),
        ([SDPA, "--discard", "slow"], "--discard is ['slow']; it is a list of 'outliers' and 'throttled'"),
        (["--targets", "labs/cudnn_sdpa_bench:flash_spd"], "Did you mean labs/cudnn_sdpa_bench:flash_sdp"),
        (["--targets", SDPA, "--profile", "maximal"], "none, minimal, roofline, deep_dive"),
        (["--targets", SDPA, "--target-extra-arg", f"{SDPA}=--backend flush"], "Did you mean flash"),
        ([SDPA, "--l2", "hot"], '--l2 must be "warm" or "cold"'),
        ([SDPA, "--max-seconds", "0"], "--max-seconds must be"),
        ([], "no target was given"),
    ],
)
def test_bad_input_is_one_line(folder, words, said):
    done, _ = labs_bench(*words)
    assert done.exit_code == 2 and done.stderr.startswith("error:") and said in done.stderr
    assert not (folder / "artifacts").exists()


def test_arguments():
    tensor = read_argument("a=randn(4096, n, bf16)", {"n": 8})
    assert (tensor.fill, tensor.shape, tensor.dtype, str(tensor)) == ("randn", (4096, 8), "bf16", "a 4096x8")
    assert read_argument("dim=-1", {}).constant == -1
    with pytest.raises(BenchError, match="whole number"):
        read_argument("a=randn(0)", {})


def test_gelu_runs_on_a_cpu_and_gemm_says_why_not(tmp_path):
    extra = ["labs/gelu:gelu=--elements 4096", "labs/gemm:gemm=--m 32 --n 32 --k 32"]
    gelu, gemm = run_cpu(tmp_path, ["labs/gelu", "labs/gemm"], extra)["cases"]
    assert gelu["status"] == "ok" and gelu["ran"]["optimized"]["provider"] == "gelu_torch"
    assert math.isclose(gelu["cost"]["bytes"], 2 * 4 * 4096)
    if not torch.cuda.is_available():
        assert gemm["status"] == "refused" and "simulator" in gemm["reason"] and "baseline_gemm" in gemm["reason"]
    (alone,) = run_cpu(tmp_path, ["labs/gemm:baseline_gemm"], extra[1:], run_id="alone")["cases"]
    assert alone["status"] == "ok" and alone["cost"]["flops"] == 2 * 32**3
    (alone,) = run_cpu(tmp_path, ["labs/gelu:optimized_gelu"], extra[:1], run_id="kernel")["cases"]
    assert alone["verification"]["optimized"]["whole_bound"] < 1e-5, "without its baseline it is compared as closely"


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("gemm_tiled_grouped", ("tiled_kernel",)),
        ("gemm_warp_specialized", ("gemm_kernel",)),
        ("torch.matmul", ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",)),
    ],
)
def test_a_rung_is_proved_by_its_kernel(name, kernels):
    target = TARGETS["labs/gemm:gemm"]
    assert target.prove(None, "optimized", Built(None, name), Launched((), kernels, 1)) == name
    with pytest.raises(WrongRun, match="was asked for"):
        target.prove(None, "optimized", Built(None, name), Launched((), ("vectorized_elementwise_kernel",), 1))
