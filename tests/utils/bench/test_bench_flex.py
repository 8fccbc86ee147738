"""labs/flexattention as its documentation promises: the three commands of the validation checklist, and its notes."""

import json
import sys

import pytest

from tests.utils.bench.bench_runs import run_cpu
from tools.record import flex_sweep
from utils.attention.masks.sparsity import sparsity
from utils.bench.results import exit_code
from utils.bench.targets import TARGETS, plan
from utils.benchmark.profiling import launched
from utils.machine.device import compile_support

FLEX, CUTE = "labs/flexattention:flex_attention", "labs/flexattention:flex_attention_cute"


@pytest.fixture(scope="module")
def documented_run(tmp_path_factory):
    """Run `BLOCK_SIZE=64 DOC_SPAN=128 labs bench run --targets labs/flexattention:flex_attention --profile minimal`."""
    if not (here := compile_support()):
        pytest.skip(here.reason)
    folder = tmp_path_factory.mktemp("flex")
    document = run_cpu(
        folder,
        [FLEX],
        [f"{FLEX}=--heads 2 --seq-len 512 --head-dim 16"],
        {"BLOCK_SIZE": "64", "DOC_SPAN": "128"},
        profile="minimal",
    )
    (case,) = document["cases"]
    assert case["status"] == "ok", case["reason"]
    return folder, document, case


@pytest.mark.slow
def test_checklist_1_captures_the_eager_versus_compiled_delta_and_stores_artifacts(documented_run):
    folder, _, case = documented_run
    assert (case["ran"]["baseline"]["provider"], case["ran"]["optimized"]["provider"]) == ("eager", "compiled")
    low, high = case["comparison"]["interval"]
    assert 1.0 < low <= case["comparison"]["speedup"] <= high and case["comparison"]["verdict"] == "faster"
    for side in ("baseline", "optimized"):
        assert len(case["sides"][side]["samples_ms"]) == 12 and case["verification"][side]["whole"] < 1e-5
    assert json.loads((folder / "small" / "results.json").read_text())["cases"][0]["label"] == case["label"]


@pytest.mark.slow
def test_the_block_mask_has_a_price(documented_run):
    folder, _, case = documented_run
    ran, report = case["ran"]["optimized"], (folder / "small" / "report.md").read_text()
    assert 0 < ran["block_mask"]["share_of_preparation"] < 0.5 and "create_block_mask takes" in report


@pytest.mark.slow
def test_checklist_2_block_size_and_doc_span_of_the_environment_make_a_sparsity_sweep(documented_run):
    _, _, case = documented_run
    knobs, ran = case["knobs"], case["ran"]["optimized"]
    assert (knobs["block_size"]["value"], knobs["block_size"]["origin"]) == ("64", "environment BLOCK_SIZE")
    assert (case["workload"]["doc_span"], knobs["doc_span"]["origin"]) == (128, "environment DOC_SPAN")
    assert ran["settings"]["block_size"] == (64, 64) and ran["settings"]["mask"] == "both(causal, documents(128))"
    counted = sparsity(lambda b, h, q, k: (q >= k) & (q // 128 == k // 128), 512, 512, 64)
    for key in ("pairs", "full", "partial", "empty", "block_density", "ideal_speedup"):
        assert ran["sparsity"][key] == counted.to_dict()[key]
    assert ran["sparsity"]["block_density"] == 12 / 64


def plan_case(flags, environ=None):
    import torch

    extra = [f"{FLEX}={' '.join(flags)}"] if flags else []
    return plan([FLEX], extra, torch.device("cpu"), environ or {})[0].cases[0]


ASKED = ["score_mod none", "score_mod relative_bias", "score_mod soft_cap", "baseline sdpa"]


@pytest.mark.parametrize("asked", ASKED)
def test_the_baseline_and_the_score_modifier_asked_for_are_those_that_run(asked):
    """Eager FlexAttention, the usual baseline, stores all scores, so that anything fused looks fast beside it."""
    setting, value = asked.split()
    flag = f"--{setting.replace('_', '-')} {value}"
    target, case = TARGETS[FLEX], plan_case(["--seq-len 64", "--heads 2", "--head-dim 16", flag])
    q, k, v = target.inputs(case)
    built, expected = target.build(case, "baseline", q, k, v), target.expected(case, q, k, v)["output"]
    assert ((built.fn().double() - expected).norm() / expected.norm()) < 1e-5
    found = built.prepared.settings | {"baseline": target.prove(case, "baseline", built, launched(built.fn))}
    assert value in found[setting]


def test_checklist_3_the_cute_target_runs_where_flexattention_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.flex_attention", None)  # importing it fails, as when missing
    document = run_cpu(tmp_path, [CUTE], [f"{CUTE}=--heads 2 --seq-len 96 --doc-span 40 --head-dim 16"])
    (case,) = document["cases"]
    assert case["status"] == "ok", case["reason"]
    assert case["ran"]["optimized"]["provider"] == "flash" and case["comparison"] is not None
    assert exit_code(document) == 0
    (case,) = run_cpu(tmp_path / "flex", [FLEX], [f"{FLEX}=--heads 1 --seq-len 64 --head-dim 16"])["cases"]
    assert case["status"] == "refused" and "needs FlexAttention, which torch" in case["reason"]


def test_the_cute_target_refuses_on_a_cpu_what_only_its_cute_side_can(tmp_path):
    (case,) = run_cpu(tmp_path, [CUTE], [f"{CUTE}=--heads 1 --seq-len 64 --head-dim 16 --score-mod soft_cap"])["cases"]
    assert case["status"] == "refused" and "takes no score modifier" in case["reason"]
    assert "needs an NVIDIA GPU" in case["reason"]


def test_a_sweep_never_times_a_wrong_output(tmp_path, monkeypatch):
    import torch

    bench = flex_sweep.Bench(torch.device("cpu"), (1, 2, 64, "fp32"), 3)
    point = flex_sweep.Point(16, "document", 16, "dense", 32)
    assert bench.error(point, bench.prepare(point, masked=True)) < 1e-6
    with pytest.raises(AssertionError, match="is wrong: its relative error"):
        bench.error(point, bench.prepare(point, masked=False))
