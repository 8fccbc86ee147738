"""Lab 4: the model answers pass every check, each wrong answer loses its question, and the notebook runs."""

import functools
import json
import math
import re

import pandas as pd
import pytest
import torch

from instructor.build import ROOT
from instructor.checks.lab4_sdpa.common import KNOCKED_OUT, knock_out, reasons_of
from instructor.course import answered_notebook
from tests.instructor import lab_cases
from tests.instructor.every_lab import EveryAnswer, EveryLab, kept_conditions, slow
from tests.instructor.lab4_right_answers import RIGHT_ANSWERS
from tests.instructor.lab4_wrong_answers import WRONG_ANSWERS
from utils.attention import AttentionUnsupported, attention, find_backend
from utils.checking.labs.lab4_sdpa.common import sdpa_switches
from utils.labs import lab4_sdpa as lab4
from utils.machine.versions import installed_version

LAB = "lab4_sdpa"
BY_HAND = {"q2_3": 5, "q3_4": 4, "q5_4": 5, "q6_2": 5}
SETUP = """
import functools, math, warnings
import pandas as pd
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from utils import GPU_SPECS
from utils.labs.lab4_sdpa import BACKEND_OF, BACKENDS, BackendRefused, default_slowdown, fastest, geometric_mean, to_bf16
"""  # the part of the notebook's setup cell that answers use


class TestLab(EveryLab):
    points = (100, 20)
    by_hand = BY_HAND
    wrong_answers, least_mistakes = WRONG_ANSWERS, 35
    least_figures, least_predictions = 2, 10
    bare_stubs = True
    hinted = True

    @slow
    def test_stock_nbgrader_gives_every_point(self, graded):
        """Of the labs the quickest goes through stock nbgrader; the others' notebooks are executed."""
        scores = graded.scores["solved"]
        assert {name: score.points for name, score in scores.items() if score.needs_manual_grade} == self.by_hand
        assert {name for name, score in scores.items() if score.auto != score.points} == set(self.by_hand)
        assert sum(score.points for score in scores.values()) == sum(self.points)


@pytest.fixture(scope="module")
def graded(lab, grade_notebooks) -> lab_cases.Graded:
    return lab_cases.graded_by_nbgrader(lab, grade_notebooks, solved=answered_notebook(lab))


@pytest.fixture(scope="module")
def solved(graded):
    return graded.notebooks["solved"]


class TestAnswers(EveryAnswer):
    right_answers, wrong_answers = RIGHT_ANSWERS, WRONG_ANSWERS


def test_what_why_not_leaves_behind_costs_no_later_question(calls, checks, names, visible):
    """1.2 answered by switches that stay off: green would be wrong, and the right answers of 1.3 and 2.2 stay green."""
    code = next(wrong.code for wrong in WRONG_ANSWERS if wrong.mistake.startswith("backends switched off one by one"))
    switches = sdpa_switches()
    exec(code, names)
    with kept_conditions():
        names["why_not"]("efficient", *(torch.randn(1, 1, 4, 8) for _ in range(3)))
        scope = visible.scope(names)
        assert "other backends are allowed" in visible.message("q1_2_tests", scope)
        assert [visible.message(test, scope) for test in ("q1_3_tests", "q2_2_tests")] == [None, None]
        later = lab_cases.calls_of("q1_3", calls) | lab_cases.calls_of("q2_2", calls)
        assert lab_cases.refusals(lab_cases.verdicts_on(later, names, checks)) == []
    assert sdpa_switches() == switches


# ---- what flash refuses on a CPU, by torch's version ------------------------------------------------------------


@pytest.mark.parametrize("name", KNOCKED_OUT)
def test_every_torch_refuses_the_calls_that_the_checks_draw(name):
    """With this list no version of torch decides about a point; the calls below, which do, are not on it."""
    tensors, options = knock_out(name, *(torch.randn(2, 4, 12, 16) for _ in range(3)))
    assert reasons_of("flash", *tensors, **options) and reasons_of("math", *tensors, **options) == []


@pytest.mark.parametrize(
    ("name", "runs_from", "code"),
    [
        ("no batch dimension", (2, 14), "q[0], key=k[0], value=v[0]"),
        ("one head of keys", (2, 14), "q, key=k[:, :1], value=v[:, :1]"),
        ("keys of length zero", (2, 12), "q, key=k[:, :, :0], value=v[:, :, :0]"),
    ],
)
def test_the_installed_torch_decides_where_versions_differ(calls, checks, names, visible, name, runs_from, code):
    """The three calls of which the text of 4.2 says what each version does; both checks judge them as torch does."""
    names["KNOCK_OUTS"][name] = eval(f"lambda q, k, v: dict(query={code})")
    hidden = lab_cases.refusals(lab_cases.verdicts_on(lab_cases.calls_of("q4_2", calls), names, checks))
    seen = visible.message("q4_2_tests", visible.scope(names))
    if installed_version("torch") < runs_from:
        assert (hidden, seen) == ([], None)
    else:
        words = f"flash runs KNOCK_OUTS['{name}']: with torch {torch.__version__} it is no knock-out"
        assert words in hidden[0] and words in seen


# ---- the course's door -------------------------------------------------------------------------------------------


def test_the_door_says_what_its_backends_do():
    """What the table says runs is right against float64, and what it says is refused raises: one call for each cell."""
    rows = lab4.ask_the_door()
    q, k, v = (torch.randn(2, 4, 24, 32, device=lab4.device, dtype=lab4.dtype) for _ in range(3))
    one, number = (q[:1], k[:1], v[:1]), functools.partial(torch.tensor, dtype=torch.int32, device=lab4.device)
    calls = {
        "nothing more": ((q, k, v), {}),
        "a gradient": ((q.clone().requires_grad_(), k, v), {}),
        "return_lse=True, sink=...": ((q, k, v), {"return_lse": True, "sink": q.new_zeros(4)}),
        "seqlens=...": ((q, k, v), {"seqlens": number([24, 7])}),
        "cu_seqlens=...": (one, {"cu_seqlens": number([0, 10, 24])}),
        "a mask of b and h": ((q, k, v), {"mask_mod": lambda b, h, i, j: j <= i + b + h}),
        "V narrower than K": ((q, k, v[..., :16]), {}),
        "q, k, v in fp8": (tuple(x.to(torch.float8_e4m3fn) for x in (q, k, v)), {}),
    }
    assert [row["call"] for row in rows] == list(calls)
    for row in rows:
        tensors, options = calls[row.pop("call")]
        expected = None
        for backend in (name for name in row if not find_backend(name).compiles):  # compiling takes minutes
            if row[backend] != "runs":
                with pytest.raises(AttentionUnsupported):
                    attention(*tensors, **options, backend=backend)
                continue
            out = attention(*tensors, **options, backend=backend)
            found = out[0] if isinstance(out, tuple) else out
            expected = found if expected is None else expected  # the first is plain operators of torch
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
            assert found.requires_grad == tensors[0].requires_grad


def test_a_rule_is_scored_against_the_default_and_the_best(grid):
    default, best = (
        lab4.score_rule(rule, grid, "") for rule in (lambda call: "cudnn", lambda call: lab4.fastest(grid)[call.name])
    )
    assert default["default / rule"] == 1 and math.isclose(default["rule / best"], best["default / rule"])
    assert (best["rule / best"], best["worst"], best["within 3% of the best"], best["refused"]) == (1, 1, 1, 0)
    few = lab4.score_rule(lambda call: "efficient", grid, "")
    assert few["refused"] > 0 and few["worst"] > default["worst"]
    with pytest.raises(ValueError, match="None"):
        lab4.score_rule(lambda call: None, grid, "")


@pytest.mark.gpu
def test_model_answers_run_on_a_gpu(names):
    """The checks feed CPU tensors; here the same functions get tensors on the GPU, and all four backends run."""
    q, k, v = (torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for backend in ("math", "flash", "efficient", "cudnn"):
        assert names["why_not"](backend, q, k, v) == []
        out = names["pinned_sdpa"](backend, q, k, v)
        _, rms = names["errors"](out, q, k, v)
        assert 0 < rms < 0.01
    assert names["why_not"]("flash", q.float(), k.float(), v.float())
    with pytest.raises(names["BackendRefused"], match=r"dtype|Float|float"):
        names["pinned_sdpa"]("flash", q.float(), k.float(), v.float())
    expected = torch.nn.functional.scaled_dot_product_attention(q[:, :, :1], k, v)
    torch.testing.assert_close(names["split_kv_attention"](q[:, :, :1], k, v, 5), expected, rtol=2e-2, atol=2e-2)
    assert names["distinct_results"](lambda: (q + 1, k), 3) == 1
    assert int(names["ulps_apart"](q, q.clone()).max()) == 0
    x8, scale = names["quantize_fp8"](q, 16)
    torch.testing.assert_close(names["dequantize_fp8"](x8, scale, 16), q.float(), rtol=0.07, atol=1e-2)


# ---- the notebook ------------------------------------------------------------------------------------------------


def test_recorded_results_answer_the_questions(names, monkeypatch):
    """The grid that the notebook loads has the rows and columns that Part 6 uses."""
    monkeypatch.chdir(ROOT)
    grid = lab4.load_grid()
    assert grid["shape"].nunique() >= 60 and set(grid["kind"]) == {"training", "prefill", "decode"}
    assert set(grid["head_dim"]) == {64, 128, 256} and (grid["kv_heads"] < grid["heads"]).any()
    assert not grid.duplicated(["shape", "backend"]).any()
    answers = names["grid_answers"](grid)
    assert 1.0 <= names["geometric_mean"](names["default_slowdown"](grid)) < 10
    # The case: the picture of the first cell, and the text that closes it.
    assert (answers["sm80_one_query"], answers["splits_four_queries"]) == (1.0, 0.0)
    assert answers["decode_winner"] == "cudnn" and round(answers["worst_default"], 1) == 5.4


# ---- what is said about recorded tables --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grid():
    """The recorded sweep, one row a shape and backend."""
    rows = pd.DataFrame(json.loads((ROOT / "assets/results/h200/sdpa_grid.json").read_text())["rows"])
    rows = rows[(rows["set"] == "grid") & rows["backend"].isin(["math", "flash", "efficient", "cudnn"])].copy()
    sizes = ["kind", "pass", "batch", "heads", "kv_heads", "seq_len_q", "seq_len_kv", "head_dim", "causal"]
    rows["shape"], rows["is_default"] = rows.groupby(sizes).ngroup(), rows["is_default"].eq(True)
    return rows


def test_kernels_are_for_the_chips_that_the_text_names(prose, recorded):
    """Who the four are: cuDNN's kernel is for sm90 and uses wgmma, efficient's is for sm80, flash's is FlashAttention-2's."""
    names = recorded["traces"].groupby("backend")["name"].first()
    assert "sm90" in names["cudnn"] and "wgmma" in names["cudnn"] and "sm80" in names["efficient"]
    assert "flash_fwd_kernel" in names["flash"] and "fmha_cutlassF_bf16_aligned_64x128_rf_sm80" in prose
    assert names["efficient"].startswith("fmha_cutlassF_bf16_aligned_64x128_rf_sm80")


def test_the_ratio_of_cudnn_and_flash_is_the_recorded_one(prose, recorded):
    full = recorded["backends"].query("not causal").set_index("backend")["ms"]
    assert f"cuDNN is {full['flash'] / full['cudnn']:.1f} times as fast as flash" in prose


def test_recorded_errors_are_those_of_the_model_answer(prose, recorded):
    rms = recorded["backends"].query("not causal").set_index("backend")["rms error"]
    assert math.isclose(rms["math"], 1.6e-3, rel_tol=0.06) and "(1.6e-3 on an H200)" in prose and "2.27e-3" in prose
    assert all(math.isclose(rms[b], 2.27e-3, rel_tol=0.01) for b in ("flash", "efficient", "cudnn"))


def test_recorded_queries_ride_as_the_model_answer_says(prose, recorded):
    ms = recorded["queries"].set_index("queries")["ms"]
    assert "An H200 is flat up to 64 and takes three times as long at 256" in prose
    assert ms[64] < 1.05 * ms[1] and 2.7 < ms[256] / ms[1] < 3.4


def test_recorded_gradients_differ_where_the_question_says_so(recorded):
    runs = recorded["determinism"].set_index("backend")
    assert runs["backward"]["math"] == 1 and (runs["backward"] > 1).sum() >= 2 and set(runs["forward"]) == {1}


def test_the_recorded_host_times_are_as_the_text_says(prose, recorded):
    torch_decides, is_pinned = recorded["host"].iloc[0], recorded["host"].iloc[1]
    host, device = torch_decides["host us"], torch_decides["device us"]
    words = f"torch needs {host:.0f} µs on the host before a call of 16 tokens computes for {device:.0f} µs"
    assert words in prose and f"a pin in a `with` block adds {is_pinned['host us'] - host:.0f} µs" in prose


def test_knock_outs_are_refused_for_their_own_reasons(recorded):
    """A call of the course's that is refused for its dtype alone says that it was made in float32."""
    layouts = recorded["layouts"].astype(str)
    own = layouts[layouts["call"].str.contains("yours|the course's")]
    refused = own.apply(lambda c: c.str.contains("Got Query dtype: float,")).any(axis=1)
    assert len(own) >= 4 and own["call"][refused].str.contains("in fp32").all()


def test_what_cudnn_refused_is_what_the_model_answer_names(prose, recorded):
    """6.2 names each refusal of cuDNN in the recorded maps, and none that did not happen."""
    layouts, dtypes = recorded["layouts"].set_index("call")["cudnn"], recorded["dtypes"].set_index("call")["cudnn"]
    names = {
        "knocked out by strides": "strides",
        "torch.float32": "fp32",
        "torch.float64": "fp64",
        "float64": "fp64",
        "head dimension 300": "head dimension 300",
        "yours: no batch dimension": "tensors of three dimensions (torch 2.11)",
        "yours: mask of three dimensions": "a mask of three dimensions",
        "yours: one batch of keys": "one batch of keys for all",
    }
    refused = {call for cells in (layouts, dtypes) for call, cell in cells.items() if cell != "runs"}
    assert refused == set(names)
    (said,) = re.findall(r"3\. cuDNN: (.*?), in torch's words", prose)
    assert set(re.split(r", | and ", said)) == set(names.values())


def test_recorded_decode_is_as_the_text_says(prose):
    record = json.loads((ROOT / "assets/results/h200/decode.json").read_text())
    rows = pd.DataFrame(record["rows"])
    rows["copy"] = rows["tb_s"] / record["copy_tb_s"]
    short = rows.query("new_tokens == 1 and batch == 1 and head_dim == 128 and keys <= 8192")
    assert "is 1.3 times as fast as the best other for one sequence of 2048 or 8192 keys" in prose
    assert [round(ratio, 1) for ratio in short["ratio"]] == [1.3, 1.3]
    assert "2048 keys reach less than a quarter of the speed of a copy" in prose
    assert 0.2 < rows.query("batch == 1 and keys == 2048")["copy"].max() < 0.25
    level = rows.query("new_tokens == 1 and batch >= 8")
    assert "With eight sequences or more the kernel and the best other are within 5%" in prose
    assert 0.04 < (level["ratio"] - 1).abs().max() < 0.05
    assert "at 0.84 to 0.98 of the speed of a copy" in prose
    assert round(level["copy"].min(), 2) == 0.84 and round(level["copy"].max(), 2) == 0.98


def test_the_default_is_cudnn_for_every_recorded_shape(prose, grid):
    assert set(grid[grid["is_default"]]["backend"]) == {"cudnn"}
    assert "torch picked cuDNN for every call" in prose and "the default was cuDNN for every shape" in prose


def test_the_case_is_as_the_text_says(prose, grid):
    """The picture of the first cell and the text that closes the case: kernels, splits and the largest losses."""
    decode = grid[(grid["status"] == "ok") & (grid["kind"] == "decode")]
    cudnn = decode[decode["backend"] == "cudnn"].set_index("shape")
    slower = cudnn["ms"] / decode.groupby("shape")["ms"].min()
    four, few = cudnn["seq_len_q"] == 4, cudnn["batch"] * cudnn["kv_heads"] < 32
    assert "takes up to 5.4 times as long as the best" in prose and round(slower[four].max(), 1) == 5.4
    assert (slower[~four] == 1).mean() > 0.5 and "mostly the fastest" in prose
    names = cudnn["kernels"].map(" ".join)
    assert names[~four].str.contains("sm80").all() and names[four].str.contains("sm90").all()
    assert not names[four].str.contains("reduction").any() and names[~four & few].str.contains("reduction").mean() > 0.8
    assert (slower[four & ~few] < 1.2).all() and (slower[four & few] > 1).mean() > 0.8


def test_the_rule_of_the_model_answer_has_its_numbers(prose, grid):
    """6.2: who wins where, what the rule gains over the default, and what it loses against the best."""
    ok = grid[grid["status"] == "ok"]
    ms = ok.pivot(index="shape", columns="backend", values="ms")
    facts = ok.drop_duplicates("shape").set_index("shape")
    programs = facts["batch"] * facts["kv_heads"]
    best = ms.idxmin(axis=1)
    many = facts["kind"] != "decode"
    assert f"it wins {(best[many] == 'cudnn').sum()} of {many.sum()} shapes" in prose
    few = (facts["kind"] == "decode") & (facts["seq_len_q"] == 4) & (programs <= 16)
    wide = (facts["kind"] == "decode") & (facts["seq_len_q"] == 1) & (facts["head_dim"] == 256)
    for which, words in ((few, "{} of {} shapes, {:.1f} times as fast"), (wide, "{} of {}, {:.2f} times")):
        ratio = (ms["cudnn"] / ms["flash"])[which]
        mean = math.exp(ratio.map(math.log).mean())
        assert words.format((best[which] == "flash").sum(), which.sum(), mean) in prose
    rule = ms["flash"].where(few | wide, ms["cudnn"])
    gain, loss = (math.exp(r.map(math.log).mean()) for r in (ms["cudnn"] / rule, rule / ms.min(axis=1)))
    assert f"gains {gain:.2f}, and takes {loss:.2f} times the best" in prose
