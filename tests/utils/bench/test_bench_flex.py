"""labs/flexattention as its documentation promises: the three commands of the validation checklist, and its notes."""

import json
import sys

import pytest

from tests.utils.bench.bench_runs import run_cpu
from tools.record import flex_sweep
from utils.attention.masks.sparsity import sparsity
from utils.bench.errors import BenchError
from utils.bench.results import exit_code
from utils.bench.targets import TARGETS, plan
from utils.machine.device import compile_support

FLEX, CUTE = "labs/flexattention:flex_attention", "labs/flexattention:flex_attention_cute"
needs_compiler = pytest.mark.skipif(not compile_support(), reason=compile_support().reason)


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
    folder, document, case = documented_run
    assert (case["ran"]["baseline"]["provider"], case["ran"]["optimized"]["provider"]) == ("eager", "compiled")
    low, high = case["comparison"]["interval"]
    assert 1.0 < low <= case["comparison"]["speedup"] <= high and case["comparison"]["verdict"] == "faster"
    for side in ("baseline", "optimized"):
        assert len(case["sides"][side]["samples_ms"]) == 12 and case["verification"][side]["whole"] < 1e-5
    for name in ("results.json", "report.md"):
        assert (folder / "small" / name).stat().st_size > 0
    assert json.loads((folder / "small" / "results.json").read_text())["cases"][0]["label"] == case["label"]
    assert exit_code(document) == 0


@pytest.mark.slow
def test_the_speed_up_is_also_told_against_compiled_dense_attention_and_sdpa(documented_run):
    """Eager FlexAttention stores all scores: anything fused looks fast beside it."""
    folder, _, case = documented_run
    against = case["ran"]["optimized"]["against"]
    assert set(against) == {"dense_compiled", "sdpa"}
    for found in against.values():
        assert found["interval"][0] <= found["speedup"] <= found["interval"][1] and found["ms"] > 0
    report = (folder / "small" / "report.md").read_text()
    assert "against compiled dense attention under a stored mask (" in report and "against SDPA" in report


@pytest.mark.slow
def test_the_cost_of_create_block_mask_is_reported_and_does_not_dominate(documented_run):
    folder, _, case = documented_run
    block_mask = case["ran"]["optimized"]["block_mask"]
    assert 0 < block_mask["share_of_preparation"] < 0.5 and block_mask["seconds"] > 0
    assert "create_block_mask takes" in (folder / "small" / "report.md").read_text()


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


@pytest.mark.parametrize("score_mod", ["none", "relative_bias", "soft_cap"])
def test_the_score_modifier_asked_for_is_the_one_that_runs(score_mod):
    target = TARGETS[FLEX]
    case = plan_case(["--seq-len 64", "--heads 2", "--head-dim 16", f"--score-mod {score_mod}"])
    q, k, v = target.inputs(case)
    built, expected = target.build(case, "baseline", q, k, v), target.expected(case, q, k, v)["output"]
    assert ((built.fn().double() - expected).norm() / expected.norm()) < 1e-5
    assert score_mod in built.prepared.settings["score_mod"]


def test_checklist_3_the_cute_target_runs_where_flexattention_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.flex_attention", None)  # importing it fails, as when missing
    from utils.attention.masks import has_flex

    assert not has_flex()
    document = run_cpu(tmp_path, [CUTE], [f"{CUTE}=--heads 2 --seq-len 96 --doc-span 48 --head-dim 16"])
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


@pytest.mark.slow
def test_traces_with_ranges_are_kept_for_both_sides(documented_run):
    """The artifacts show the fusion: many operators before compiling, one region after."""
    from utils.benchmark.profiling import read_trace

    _, _, case = documented_run
    operators = {}
    for side in ("baseline", "optimized"):
        found = case["profiles"][side]
        assert found["range"] == f"flex_attention_{side}_{case['ran'][side]['provider']}"
        traces = [file for file in found["files"] if ".json" in file]
        assert traces, found
        events = read_trace(traces[0])
        assert any(event.name == found["range"] for event in events)
        operators[side] = sum(event.category == "cpu_op" for event in events)
    assert operators["optimized"] * 3 < operators["baseline"]


@needs_compiler
@pytest.mark.slow
def test_a_sweep_is_checked_recorded_and_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(flex_sweep, "CPU", ((1, 2, 256, "fp32"), (64,), (64,), (16,)))
    out = tmp_path / "sweep.json"
    flex_sweep.main(["sweep", "--out", str(out), "--pairs", "3"])
    record = json.loads(out.read_text())
    assert record["complete"] and record["environment"]["torch"]
    (row,) = record["rows"]
    assert row["ideal"] == 4.0 and row["block_size"] == 64 and row["picked"] is False
    assert row["error"] < 1e-5 and row["share"] == pytest.approx(row["speedup"] / row["ideal"])
    assert row["interval"][0] <= row["speedup"] <= row["interval"][1]
    assert "document 64" in capsys.readouterr().out
    flex_sweep.main(["plot", "--read", str(out), "--out", str(tmp_path / "sweep.svg")])
    assert "<svg" in (tmp_path / "sweep.svg").read_text()


def test_a_sweep_never_times_a_wrong_output(tmp_path, monkeypatch):
    import torch

    bench = flex_sweep.Bench(torch.device("cpu"), (1, 2, 64, "fp32"), 3)
    point = flex_sweep.Point(16, "document", 16, "dense", 32)
    assert bench.error(point, bench.prepare(point, masked=True)) < 1e-6
    with pytest.raises(AssertionError, match="is wrong: its relative error"):
        bench.error(point, bench.prepare(point, masked=False))


def test_further_baselines_are_chosen_by_a_flag():
    assert plan_case([]).value("against") == "all" and plan_case(["--against sdpa"]).value("against") == "sdpa"
    with pytest.raises(BenchError, match="must be one of all, none, dense_compiled, sdpa"):
        plan_case(["--against eager"])
