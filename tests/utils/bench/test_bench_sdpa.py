"""The SDPA calls behind labs/cudnn_sdpa_bench: shapes, references, the pin, its proof, and what torch refuses."""

import json
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.utils.bench.bench_runs import SDPA, SMALL, run_cpu
from utils.attention import allowed_keys, find_backend, make_problem
from utils.bench import results
from utils.bench.errors import Refused, WrongRun
from utils.bench.report import markdown
from utils.bench.targets import backends
from utils.bench.targets.backends import prove, sdpa_backend
from utils.bench.workload import Workload, make_inputs, reference
from utils.benchmark.profiling import Launched
from utils.files import ROOT

CPU = torch.device("cpu")
GRID = ROOT / "assets/results/h200/sdpa_grid.json"
SHAPES = [
    Workload(1, 2, 20, 16, "fp32", "causal"),
    Workload(2, 4, 9, 8, "fp32", "full", kv_heads=2, seq_len_kv=21),
    Workload(1, 4, 7, 8, "fp32", "causal", kv_heads=1, seq_len_kv=19),
    Workload(1, 2, 18, 8, "fp32", "causal", window=5),
    Workload(1, 2, 18, 8, "fp32", "full", window=5, seq_len_kv=23),
]


def directed(workload, direction):
    return Workload(**{**workload.__dict__, "direction": direction})


@pytest.mark.parametrize("workload", SHAPES, ids=lambda one: one.label)
def test_reference_and_every_direction_agree_with_autograd_in_float64(workload):
    inputs = make_inputs(directed(workload, "both"), CPU, seed=3)
    q, k, v = (x.double().requires_grad_() for x in inputs[:3])
    group = workload.heads // workload.kv_heads
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * workload.head_dim**-0.5
    mask = allowed_keys(make_problem(q, k, v, **workload.attention_arguments))
    if mask is not None:
        assert int(mask.sum()) == workload.pairs
        scores = scores.masked_fill(~mask, float("-inf"))
    out = torch.softmax(scores, -1) @ v.repeat_interleave(group, 1)
    right = (out, *torch.autograd.grad(out, (q, k, v), inputs[3].double()))
    for direction, part in (("forward", right[:1]), ("backward", right[1:]), ("both", right)):
        case = directed(workload, direction)
        named = reference(case, *inputs)
        called = backends.bind(case, "math", inputs)()
        called = called if isinstance(called, tuple) else (called,)
        assert len(called) == len(named) == len(part)
        for got, exact, expected in zip(called, named.values(), part, strict=True):
            torch.testing.assert_close(exact, expected, atol=1e-12, rtol=1e-10)
            torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=1e-4)
        assert not called[0].requires_grad


def test_a_workload_counts_what_it_does():
    plain = Workload(4, 16, 128, 64, "bf16", "causal")
    assert list(plain.to_dict())[-1] == "score_mod", "what older results hold"
    assert Workload(4, 16, 128, 64, "bf16", "causal", kv_heads=16, seq_len_kv=128).to_dict() == plain.to_dict()
    both, back = directed(plain, "both"), directed(plain, "backward")
    assert both.cost.flops == 3.5 * plain.cost.flops and back.cost.flops == 2.5 * plain.cost.flops
    assert back.to_dict()["direction"] == "backward" and back.label.endswith("causal backward")
    decode = Workload(8, 32, 1, 128, "bf16", kv_heads=8, seq_len_kv=4096)
    assert decode.cost.bytes == 2 * (2 * 8 * 32 * 128 + 2 * 8 * 8 * 4096 * 128)
    assert decode.label == "B8 H32/8 S1x4096 D128 bf16 full" and decode.pairs == 4096
    full, documents = (Workload(2, 4, 128, 32, "bf16", *mask) for mask in (("full",), ("causal_document", 48)))
    pairs = int(allowed_keys(documents.problem(CPU)).sum())
    assert documents.cost.flops == 4 * 2 * 4 * 32 * pairs and documents.cost.bytes == full.cost.bytes
    assert plain.bytes_needed(3.0) - plain.bytes_needed(0.0) == 3 * 4 * 4 * 16 * 128 * 128


def extra(flags):
    return [f"{SMALL} {flags}"]


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ("--backend flash --causal --pass both", "causal both"),
        ("--backend flash --pass backward --kv-heads 1", "H2/1"),
        ("--backend flash --seq-len-kv 80 --causal", "S48x80"),
        ("--backend math --window 8", "window 8"),
    ],
)
def test_flags_of_the_target(tmp_path, flags, shown):
    document = run_cpu(tmp_path, [SDPA], extra(flags), iterations=10)
    (case,) = document["cases"]
    assert case["status"] == "ok", case["reason"]
    assert shown in case["label"]
    asked = case["knobs"]["backend"]["value"]
    assert case["ran"]["optimized"]["provider"] == asked == case["ran"]["optimized"]["asked"]
    assert case["verification"]["optimized"]["whole"] < 2e-6
    assert results.options(case) == {"backend": asked, "baseline_backend": "math"}
    assert shown in markdown(document)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_pin_that_allows_two_backends_is_caught(tmp_path, monkeypatch, direction):
    def two(backend, attend):
        def attend_pinned(q, k, v):
            with sdpa_kernel([backend, SDPBackend.FLASH_ATTENTION]):
                return attend(q, k, v)

        return attend_pinned

    monkeypatch.setattr("utils.attention.backends.sdpa._pin", two)
    (case,) = run_cpu(tmp_path, [SDPA], extra(f"--backend math --pass {direction}"))["cases"]
    assert case["status"] == "failed" and not case["sides"]
    assert "math was asked for and flash ran" in case["reason"]


def test_a_wrong_gradient_is_never_timed(tmp_path, monkeypatch):
    bind = backends.bind

    def wrong(workload, backend, inputs):
        call = bind(workload, backend, inputs)

        def changed():
            out, dq, dk, dv = call()
            return out, dq, 1.01 * dk, dv

        return changed if backend == "flash" else call

    monkeypatch.setattr(backends, "bind", wrong)
    (case,) = run_cpu(tmp_path, [SDPA], extra("--backend flash --pass both"))["cases"]
    assert case["status"] == "failed" and "gradient of k" in case["reason"] and not case["sides"]


def test_a_refusal_is_torchs_own_reason(monkeypatch):
    workload = Workload(1, 2, 8, 16, "fp32")
    inputs = make_inputs(workload, CPU, 0)
    for backend in ("math", "auto"):
        assert backends.bind(workload, backend, inputs)().shape == (1, 2, 8, 16)

    def refusing(*args, **kwargs):
        for text in (
            "Flash attention kernel not used because: (Triggered internally at x.cpp:1.)",
            "Flash attention has been runtime disabled. (Triggered internally at x.cpp:2.)",
            "Both fused kernels require the last dimension of the input to have stride 1. Got [2]. (function "
            "check_last_dim)",
            "cuDNN attention has been runtime disabled.",
        ):
            warnings.warn(text, stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(F, "scaled_dot_product_attention", refusing)
    with pytest.raises(Refused, match="does not take B1 H2 S8 D16 fp32 full: ") as refusal:
        backends.bind(workload, "flash", inputs)
    assert str(refusal.value.__cause__) == (
        "Both fused kernels require the last dimension of the input to have stride 1. Got [2]."
    )


def test_proof_needs_forward_backward_and_kernels_to_agree():
    forward, backward = "aten::_scaled_dot_product_{}_attention", "aten::_scaled_dot_product_{}_attention_backward"
    flash = forward.format("flash"), backward.format("flash")
    assert sdpa_backend(Launched(flash, ()), "both") == "flash"
    with pytest.raises(WrongRun, match="forward ran flash and backward ran cudnn"):
        sdpa_backend(Launched((flash[0], backward.format("cudnn")), ()), "both")
    with pytest.raises(WrongRun, match="forward ran cudnn, flash"):
        sdpa_backend(Launched((*flash, forward.format("cudnn")), ()), "both")
    with pytest.raises(WrongRun, match="backward ran none"):
        sdpa_backend(Launched(flash[:1], ()), "both")
    with pytest.raises(WrongRun, match="none of what was launched"):
        prove("auto", Launched(flash, ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80",), 1), "both")


def test_recorded_kernels_prove_their_own_backend_alone():
    import re

    rows = [row for row in json.loads(GRID.read_text())["rows"] if row["status"] == "ok"]
    assert {row["backend"] for row in rows} >= {"cudnn", "flash", "efficient", "math"}
    for row in rows:
        for name in ("cudnn", "flash", "efficient"):
            own = any(re.search(find_backend(name).kernels, kernel) for kernel in row["kernels"])
            assert own == (name == row["backend"]), (row["label"], row["backend"], name)


@pytest.mark.parametrize("target", ["labs/cudnn_sdpa_bench:flash_sdp", "labs/flexattention:flex_attention"])
def test_a_size_that_cannot_fit_is_refused_at_once(tmp_path, target):
    begin = time.monotonic()
    (case,) = run_cpu(tmp_path, [target], [f"{target}=--seq-len 999999999"])["cases"]
    assert case["status"] == "refused" and "GB are free" in case["reason"]
    assert time.monotonic() - begin < 10
