"""Every provider that runs here against float64, and what the others say."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from utils.attention import (
    PROVIDERS,
    AttentionUnsupported,
    able_providers,
    allowed_keys,
    attention,
    last_run,
    make_request,
    proof,
    provider,
    provider_table,
    reference,
)

ON_CPU = ("naive", "math", "flash", "flex", "triton")
CASES = [
    (dict(b=2, h=4, hkv=4, sq=64, sk=64, d=32), {}),
    (dict(b=1, h=4, hkv=2, sq=37, sk=101, d=64), {"causal": True}),
    (dict(b=2, h=2, hkv=1, sq=1, sk=130, d=64), {"causal": True, "scale": 0.3}),
    (dict(b=1, h=2, hkv=2, sq=129, sk=129, d=32), {"causal": True, "window": 20}),
    (dict(b=1, h=3, hkv=1, sq=70, sk=50, d=16), {"window": 30, "scale": 0.05}),
]


def tensors(b, h, hkv, sq, sk, d, dtype=torch.float32):
    return (
        torch.randn(b, h, sq, d, dtype=dtype),
        torch.randn(b, hkv, sk, d, dtype=dtype),
        torch.randn(b, hkv, sk, d, dtype=dtype),
    )


def relative_error(x, expected):
    return ((x.double() - expected).norm() / expected.norm()).item()


def test_reference_is_softmax_of_scaled_scores_row_by_row():
    q, k, v = tensors(1, 2, 1, 5, 7, 4)
    out, lse = reference(q, k, v, causal=True, scale=0.7, window=3)
    for h in range(2):
        for i in range(5):
            keys = [j for j in range(7) if 0 <= i + 2 - j < 3]
            scores = [0.7 * sum(float(a) * float(b) for a, b in zip(q[0, h, i], k[0, 0, j], strict=True)) for j in keys]
            total = sum(math.exp(s) for s in scores)
            expected = sum(math.exp(s) / total * v[0, 0, j].double() for s, j in zip(scores, keys, strict=True))
            torch.testing.assert_close(out[0, h, i], expected)
            assert lse[0, h, i].item() == pytest.approx(math.log(total))


def test_reference_agrees_with_torch_where_they_mean_the_same():
    q, k, v = (x.double() for x in tensors(2, 3, 3, 40, 40, 16))
    torch.testing.assert_close(
        reference(q, k, v, causal=True)[0], torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    )


def test_a_query_without_keys_is_zero():
    q, k, v = tensors(1, 1, 1, 5, 3, 8)
    out, lse = reference(q, k, v, causal=True)
    assert (out[0, 0, :2] == 0).all() and torch.isinf(lse[0, 0, :2]).all() and torch.isfinite(lse[0, 0, 2:]).all()
    for name in ("naive", "triton"):
        torch.testing.assert_close(attention(q, k, v, causal=True, provider=name).double(), out, atol=1e-6, rtol=1e-5)


def test_mask_convention():
    request = make_request(*tensors(1, 1, 1, 2, 4, 8), True, None, 2)
    assert allowed_keys(request).tolist() == [[False, True, True, False], [False, False, True, True]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's list of providers")
@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("shape, options", CASES, ids=str)
def test_providers_against_float64(name, shape, options):
    if name == "flex" and shape in (CASES[0][0], CASES[2][0]):
        pytest.skip("each shape compiles for seconds: three of five are enough for FlexAttention")
    torch.manual_seed(sum(shape.values()))
    q, k, v = tensors(**shape)
    expected, _ = reference(q, k, v, **options)
    out = attention(q, k, v, provider=name, **options)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert relative_error(out, expected) < 2e-6
    assert last_run().provider == name


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's list of providers")
@pytest.mark.parametrize("name", ["naive", "math", "flash", "triton"])
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 1e-2), (torch.float16, 1.5e-3)])
def test_half_precision(name, dtype, bound):
    torch.manual_seed(3)
    q, k, v = tensors(1, 2, 2, 40, 40, 32, dtype)
    assert relative_error(attention(q, k, v, causal=True, provider=name), reference(q, k, v, causal=True)[0]) < bound


def test_not_contiguous_and_large_logits():
    torch.manual_seed(4)
    q, k, v = (torch.randn(2, 33, 3, 32).transpose(1, 2) for _ in range(3))
    expected, _ = reference(q * 40, k, v, causal=True)
    for name in ("naive", "math", "flash", "triton"):
        assert relative_error(attention(q * 40, k, v, causal=True, provider=name), expected) < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
@pytest.mark.parametrize("name", [name for name in PROVIDERS if name not in ON_CPU])
def test_gpu_providers_refuse_and_name_what_would_work(name):
    q, k, v = tensors(1, 2, 2, 16, 16, 32)
    with pytest.raises(AttentionUnsupported) as refused:
        attention(q, k, v, provider=name)
    assert name in str(refused.value) and "GPU" in refused.value.reason
    assert refused.value.alternatives == ON_CPU
    for other in ON_CPU:
        assert other in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
def test_auto_tells_who_ran_and_who_was_passed_over():
    q, k, v = tensors(1, 2, 2, 16, 16, 32)
    attention(q, k, v)
    run = last_run()
    assert run.provider == "flash" and [name for name, _ in run.passed_over] == ["gluon", "cute", "flash_attn", "cudnn"]
    assert all(reason for _, reason in run.passed_over)
    attention(q[:, :, :, :8].expand(1, 2, 16, 8), k[..., :8], v[..., :8], causal=True)
    q, k, v = tensors(1, 1, 1, 5, 3, 8)
    attention(q, k, v, causal=True)  # rows without keys: only naive (and Triton) define them
    assert last_run().provider == "naive" and "without keys" in dict(last_run().passed_over)["flash"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
def test_a_refusal_at_the_call_is_reported_or_passed_over(monkeypatch):
    from utils.attention import registry
    from utils.attention.request import Refused

    real = provider("flash")

    def refuse(q, k, v, request):
        raise Refused("not today.")

    refusing = dataclasses.replace(real, run=refuse)
    monkeypatch.setattr(registry, "provider", lambda name: refusing if name == "flash" else provider(name))
    monkeypatch.setattr(registry, "_provider", registry.provider)
    q, k, v = tensors(1, 2, 2, 16, 16, 32)
    with pytest.raises(AttentionUnsupported, match=r"'flash': not today\. .*: naive, math, flex, triton\."):
        attention(q, k, v, provider="flash")
    attention(q, k, v)
    assert last_run().provider == "math" and dict(last_run().passed_over)["flash"] == "not today."


@pytest.mark.skipif(torch.cuda.is_available(), reason="operator names of a CPU")
@pytest.mark.parametrize("name", ["naive", "math", "flash"])
def test_operators_prove_which_provider_ran(name):
    q, k, v = tensors(1, 2, 2, 32, 32, 32)
    assert proof(name, q, k, v, causal=True)
    flash_ran = any("flash" in launched for launched in proof(name, q, k, v))
    assert flash_ran == (name == "flash")


@pytest.mark.slow
def test_flex_never_falls_back_in_silence():
    if not provider("flex").machine():
        pytest.skip(provider("flex").machine().reason)
    import torch._dynamo

    torch._dynamo.reset()
    from torch._dynamo.utils import counters

    counters.clear()
    for sq in (16, 24):
        q, k, v = tensors(1, 1, 1, sq, 40, 16)
        attention(q, k, v, causal=True, provider="flex")
    assert counters["stats"]["unique_graphs"] >= 2 and not counters["graph_break"]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v: (q[0], k, v), "four dimensions"),
        (lambda q, k, v: (q, k, v[:, :, :3]), "same shape"),
        (lambda q, k, v: (q[..., :8], k, v), "agree in batch size and head dimension"),
        (lambda q, k, v: (q[:, :3], k, v), "must be a multiple of"),
        (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), "must not be empty"),
        (lambda q, k, v: (q.double(), k, v), "one dtype"),
        (lambda q, k, v: (q.int(), k.int(), v.int()), "floating-point"),
        (lambda q, k, v: (q.tolist(), k, v), "must be a tensor"),
    ],
)
def test_wrong_tensors(change, message):
    q, k, v = tensors(1, 4, 2, 6, 6, 16)
    with pytest.raises((ValueError, TypeError), match=message):
        attention(*change(q, k, v))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 0}, "at least 1"),
        ({"window": 2.5}, "whole number"),
        ({"causal": "yes"}, "True or False"),
        ({"provider": "flash3"}, "choose one of naive, math"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        attention(*tensors(1, 2, 2, 6, 6, 16), **options)


def test_double_and_gradients_name_providers_that_take_them():
    q, k, v = (x.double() for x in tensors(1, 2, 2, 6, 6, 16))
    with pytest.raises(AttentionUnsupported, match=r"not float64.*would work: naive, math"):
        attention(q, k, v, provider="triton")
    q, k, v = tensors(1, 2, 2, 6, 6, 16)
    q.requires_grad_()
    with pytest.raises(AttentionUnsupported, match="no backward"):
        attention(q, k, v, provider="triton")
    attention(q, k, v, provider="naive").sum().backward()
    assert q.grad is not None
    assert "triton" not in able_providers(make_request(q, k, v, False, None, None))


def test_table_has_a_row_for_each_provider():
    rows = provider_table()
    assert [row["provider"] for row in rows] == list(PROVIDERS)
    for row in rows:
        assert row["summary"] and (row["reason"] or row["ok"])
        assert row["ok"] or row["remedy"], row


def test_importing_attention_imports_no_triton():
    code = (
        "import sys, utils.attention as a, torch; [a.provider(n) for n in a.PROVIDERS]; "
        "import utils.attention.gluon.launch; assert 'triton' not in sys.modules"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"})
