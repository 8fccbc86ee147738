"""Every backend that runs here against float64, plain calls, and what the other backends say."""

import contextlib
import dataclasses
import functools
import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.utils.attention.errors import relative_error
from utils.attention import (
    BACKENDS,
    AttentionUnsupported,
    Refused,
    able_backends,
    allowed_keys,
    attention,
    backend_table,
    call,
    find_backend,
    last_run,
    make_problem,
    proof,
    reference,
    reference_gradients,
)
from utils.attention.masks import at_offset, both, causal, documents, score_mods, sliding_window
from utils.machine.device import compile_support

ON_CPU = tuple(name for name in BACKENDS if find_backend(name).machine())  # where there is no GPU
COMPILED = tuple(name for name in ON_CPU if find_backend(name).compiles)
# Each shape of a compiled backend compiles for seconds.
CASES_OF_BACKENDS = [pytest.param(n, marks=pytest.mark.slow) if n in COMPILED else n for n in ON_CPU]
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


def test_a_query_without_keys_is_zero():
    q, k, v = tensors(1, 1, 1, 5, 3, 8)
    q[0, 0, 3] = math.nan  # scores of nan must not be taken for a row without keys
    out, lse = reference(q, k, v, causal=True)
    assert (out[0, 0, :2] == 0).all() and torch.isinf(lse[0, 0, :2]).all() and torch.isfinite(lse[0, 0, [2, 4]]).all()
    for name in ("naive", "triton"):
        got = attention(q, k, v, causal=True, backend=name).double()
        torch.testing.assert_close(got, out, atol=1e-6, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("backend", ("auto", *CASES_OF_BACKENDS))
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"mask_mod": causal},
        {"score_mod": score_mods.soft_cap(2.0)},
        {"seqlens": torch.tensor([2], dtype=torch.int32)},
    ],
)
def test_no_queries_have_no_output(backend, arguments):
    """FlexAttention, compiled for a CPU, ended the process by a division by zero."""
    q, k, v = tensors(1, 2, 1, 0, 5, 16)
    with contextlib.suppress(AttentionUnsupported):
        assert attention(q, k, v, backend=backend, **arguments).shape == q.shape


@pytest.mark.parametrize("backend", CASES_OF_BACKENDS)
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("apart", (0, 1))
def test_a_tensor_whose_numbers_are_one_or_overlap(backend, which, apart):
    """FlexAttention, compiled for a CPU, read behind an expanded last dimension; torch's flash wrote among overlapping rows."""
    given = list(tensors(1, 2, 2, 7, 7, 16))
    rows, one = given[which].flatten(2)[..., :22].unfold(2, 16, 1), given[which][..., :1].expand(given[which].shape)
    given[which] = rows if apart else one
    expected, _ = reference(*given, causal=True)
    with contextlib.suppress(AttentionUnsupported):  # as torch's flash backend says
        got = attention(*given, causal=True, backend=backend).double()
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_large_scores_in_fp16():
    q, k, v = (x.half() for x in tensors(1, 2, 1, 9, 9, 64))
    expected, _ = reference(q * 100, k * 100, v)
    torch.testing.assert_close(attention(q * 100, k * 100, v, backend="naive").double(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("backend", ["auto", "flash", "math", "sdpa", "naive"])
def test_a_scale_that_is_not_positive(backend, scale):
    """Torch's flash backend on a CPU scales the minus infinity of its mask: it gave nan, or an output of the masked keys."""
    q, k, v = (4 * x for x in tensors(1, 2, 1, 33, 33, 16))
    q.requires_grad_()
    out = attention(q, k, v, causal=True, scale=scale, backend=backend)
    expected, (gradient, _, _) = reference_gradients(q.detach(), k, v, torch.ones_like(q), causal=True, scale=scale)
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q)[0].double(), gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scale, factor", [(0.3, 1), (-0.3, -1), (0.0, 0)])
def test_flash_attn_and_fa3_get_a_positive_scale(monkeypatch, scale, factor):
    from utils.attention.backends import fa3, flash_attn

    given = []
    monkeypatch.setattr(fa3, "_forward", lambda q, k, v, lengths, causal, scale, *_: given.append((q, scale)) or "o")
    q, k, v = tensors(1, 1, 1, 3, 3, 8)

    def package(q, k, v, softmax_scale):
        given.append((q.transpose(1, 2), softmax_scale))
        return q

    fa3._run(q, k, v, make_problem(q, k, v, scale=scale))
    flash_attn.call_package(package, q, k, v, softmax_scale=scale)
    assert len(given) == 2
    for queries, positive in given:
        assert positive > 0
        torch.testing.assert_close(queries * positive, q * scale)
        torch.testing.assert_close(queries, q * factor)


def test_gradients_of_the_reference_are_those_of_autograd_through_plain_operators():
    q, k, v = (x.double().requires_grad_() for x in tensors(2, 4, 2, 12, 20, 8))
    dout = torch.randn(2, 4, 12, 8)
    arguments = dict(causal=True, window=9, score_mod=score_mods.soft_cap(2.0))
    scores = 2 * torch.tanh(q @ k.repeat_interleave(2, 1).mT * 8**-0.5 / 2)
    hidden = ~allowed_keys(make_problem(q, k, v, causal=True, window=9))
    out = torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ v.repeat_interleave(2, 1)
    expected = torch.autograd.grad(out, (q, k, v), dout.double())
    with torch.no_grad():
        got, gradients = reference_gradients(q, k, v, dout, **arguments)
    torch.testing.assert_close(got, out.detach())
    for gradient, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, right)


def test_a_long_reference_is_computed_in_pieces_with_the_same_result(monkeypatch):
    q, k, v = tensors(1, 2, 1, 23, 31, 8)
    arguments = dict(mask_mod=lambda b, h, q, k: k <= q + h, score_mod=score_mods.alibi(2), window=12)
    whole = reference(q, k, v, **arguments)
    module = importlib.import_module("utils.attention.reference")  # the package exports its function by that name
    monkeypatch.setattr(module, "CHUNK_BYTES", 8 * 6 * 31 * 5)
    for one, other in zip(whole, reference(q, k, v, **arguments), strict=True):
        torch.testing.assert_close(one, other)
    allowed = torch.rand(1, 2, 23, 31) < 0.5
    masked, _ = reference(q, k, v, allowed=allowed)
    plain = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=allowed, enable_gqa=True
    )
    torch.testing.assert_close(masked, plain)


def test_mask_convention():
    problem = make_problem(*tensors(1, 1, 1, 2, 4, 8), causal=True, window=2)
    assert allowed_keys(problem).tolist() == [[False, True, True, False], [False, False, True, True]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's list of backends")
@pytest.mark.parametrize("name", CASES_OF_BACKENDS)
@pytest.mark.parametrize("shape, options", CASES, ids=str)
def test_backends_against_float64(name, shape, options):
    if name in COMPILED and (not compile_support() or shape in (CASES[0][0], CASES[2][0])):
        pytest.skip("each shape compiles for seconds: three of five are enough")
    torch.manual_seed(sum(shape.values()))
    q, k, v = tensors(**shape)
    expected, _ = reference(q, k, v, **options)
    out = attention(q, k, v, backend=name, **options)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert relative_error(out, expected) < 2e-6
    assert last_run().backend == name


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's list of backends")
@pytest.mark.parametrize("name", ["naive", "math", "flash", "triton"])
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 1e-2), (torch.float16, 1.5e-3)])
def test_half_precision(name, dtype, bound):
    torch.manual_seed(3)
    q, k, v = tensors(1, 2, 2, 40, 40, 32, dtype)
    assert relative_error(attention(q, k, v, causal=True, backend=name), reference(q, k, v, causal=True)[0]) < bound


def test_not_contiguous_and_large_logits():
    torch.manual_seed(4)
    q, k, v = (torch.randn(2, 33, 3, 32).transpose(1, 2) for _ in range(3))
    expected, _ = reference(q * 40, k, v, causal=True)
    for name in ("naive", "math", "flash", "triton"):
        assert relative_error(attention(q * 40, k, v, causal=True, backend=name), expected) < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in ON_CPU])
def test_gpu_backends_refuse_and_name_what_would_work(name):
    q, k, v = tensors(1, 2, 2, 16, 16, 32)
    with pytest.raises(AttentionUnsupported) as refused:
        attention(q, k, v, backend=name)
    assert name in str(refused.value) and "GPU" in refused.value.reason
    assert refused.value.alternatives == ON_CPU
    for other in ON_CPU:
        assert other in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
def test_auto_tells_who_ran_and_who_was_passed_over():
    q, k, v = tensors(1, 2, 2, 16, 16, 32)
    attention(q, k, v)
    run = last_run()
    passed_over = [name for name, _ in run.passed_over]
    assert run.backend == "flash" and passed_over == ["gluon", "fa3", "cute", "flash_attn", "cudnn"]
    assert all(reason for _, reason in run.passed_over)
    q, k, v = tensors(1, 1, 1, 5, 3, 8)
    attention(q, k, v, causal=True)  # rows without keys: only naive, FlexAttention and Triton define them
    assert last_run().backend == "naive" and "without keys" in dict(last_run().passed_over)["flash"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
def test_a_refusal_at_the_call_is_reported_or_passed_over(monkeypatch):
    real = find_backend("flash")

    def bind(problem, options):
        raise Refused("not today.")

    refusing = dataclasses.replace(real, bind=bind)
    monkeypatch.setattr(call, "CALLS", {})  # earlier tests left decisions for the real backend
    monkeypatch.setattr(call, "find_backend", lambda name: refusing if name == "flash" else find_backend(name))
    q, k, v = tensors(1, 2, 2, 16, 16, 32)
    with pytest.raises(AttentionUnsupported, match="not today"):
        attention(q, k, v, backend="flash")
    attention(q, k, v)
    assert last_run().backend == "math" and dict(last_run().passed_over)["flash"] == "not today."


@pytest.mark.skipif(torch.cuda.is_available(), reason="operator names of a CPU")
@pytest.mark.parametrize("name", ["naive", "math", "flash"])
def test_operators_prove_which_backend_ran(name):
    q, k, v = tensors(1, 2, 2, 32, 32, 32)
    assert proof(name, q, k, v, causal=True)
    flash_ran = any("flash" in launched for launched in proof(name, q, k, v))
    assert flash_ran == (name == "flash")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's list of backends")
@pytest.mark.parametrize("name", CASES_OF_BACKENDS)
def test_mask_functions_and_modifiers_in_plain_calls(name):
    """A backend does the mask with its function or by itself, or says that it cannot."""
    modifier, shape = score_mods.relative_bias(torch.randn(2, 48).double()), dict(b=1, h=2, hkv=2, sq=48, sk=48, d=16)
    cases = [{"mask_mod": both(causal, documents(16))}, {"mask_mod": sliding_window(9)}]
    cases += [{"mask_mod": documents(16), "score_mod": modifier}, {"mask_mod": documents(10), "window": 20}]
    for arguments in cases[-2:] if name in COMPILED else cases:
        q, k, v = tensors(**shape)
        can = find_backend(name).support(make_problem(q, k, v, **arguments))
        assert can or name not in ("naive", "flex_eager", *COMPILED), "these take all functions"
        if not can:
            with pytest.raises(AttentionUnsupported, match=r"takes no score modifier|and the mask is|takes no mask"):
                attention(q, k, v, backend=name, **arguments)
        else:
            expected = reference(q, k, v, **arguments)[0]
            assert relative_error(attention(q, k, v, backend=name, **arguments), expected) < 2e-6


def test_causal_as_a_field_and_as_a_function_differ_where_there_are_more_keys():
    """`causal` ends at the last key; a mask function compares index with index."""
    q, k, v = tensors(1, 1, 1, 4, 9, 8)
    as_field = attention(q, k, v, causal=True)
    torch.testing.assert_close(as_field, attention(q, k, v, mask_mod=at_offset(causal, 5), backend="naive"))
    as_function = attention(q, k, v, mask_mod=causal, backend="naive")
    assert relative_error(as_function, reference(q, k, v, mask_mod=causal)[0]) < 1e-6
    assert not torch.allclose(as_field, as_function)


def test_a_query_without_keys_under_a_function_is_zero_or_refused():
    q, k, v = tensors(1, 1, 1, 6, 6, 8)

    def later(b, h, q, k):
        return (q > 2) & (k <= q)

    out = attention(q, k, v, mask_mod=later, backend="naive")
    assert not out[:, :, :3].any() and torch.isfinite(out).all()
    with pytest.raises(AttentionUnsupported, match="rows without keys undefined, and later has such rows"):
        attention(q, k, v, mask_mod=later, backend="math")


@pytest.mark.skipif(not compile_support(), reason=compile_support().reason)
@pytest.mark.slow
def test_a_plain_call_of_a_compiled_backend_is_compiled_once_for_a_problem():
    from torch._dynamo.utils import counters

    q, k, v = tensors(1, 1, 1, 20, 20, 8)
    attention(q, k, v, mask_mod=causal, backend="naive_compiled")
    before = counters["stats"]["unique_graphs"]
    for _ in range(3):
        attention(q + 1, k, v, mask_mod=causal, backend="naive_compiled")
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.slow
def test_flex_never_falls_back_in_silence():
    if not find_backend("flex").machine():
        pytest.skip(find_backend("flex").machine().reason)
    import torch._dynamo

    torch._dynamo.reset()
    from torch._dynamo.utils import counters

    counters.clear()
    for sq in (16, 24):
        q, k, v = tensors(1, 1, 1, sq, 40, 16)
        attention(q, k, v, causal=True, backend="flex")
    assert counters["stats"]["unique_graphs"] >= 2 and not counters["graph_break"]


INT = functools.partial(torch.tensor, dtype=torch.int32)
MISTAKES = [  # a change of q, k, v (1, 4, 6, 16) and (1, 2, 6, 16), or arguments; the kind of the error and its key word
    (lambda q, k, v: (q[0], k, v), ValueError, "four dimensions"),
    (lambda q, k, v: (q, k, v[:, :, :3]), ValueError, "same B, Hkv"),
    (lambda q, k, v: (q[..., :8], k, v), ValueError, "agree in batch"),
    (lambda q, k, v: (q[:, :3], k, v), ValueError, "multiple"),
    (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), ValueError, "empty"),
    (lambda q, k, v: (q[:0], k[:0], v[:0]), ValueError, "empty"),
    (lambda q, k, v: (q.double(), k, v), TypeError, "one dtype"),
    (lambda q, k, v: (q.int(), k.int(), v.int()), TypeError, "floating-point"),
    (lambda q, k, v: (q, k.to("meta"), v), ValueError, "one device"),
    (lambda q, k, v: (q.tolist(), k, v), TypeError, "tensor"),
    (lambda q, k, v: (q.to_sparse(), k, v), TypeError, "dense"),
    ({"window": 0}, ValueError, "1 or more"),
    ({"window": 2.5}, ValueError, "whole number"),
    ({"causal": "yes"}, TypeError, "True or False"),
    ({"scale": "1"}, ValueError, "scale"),
    *(({"scale": true}, ValueError, "scale") for true in (True, np.True_, torch.tensor(True), np.array([True]))),
    ({"scale": 10**400}, ValueError, "scale"),
    ({"scale": math.nan}, ValueError, "scale"),
    ({"scale": torch.tensor(1.0, requires_grad=True)}, ValueError, "gradient"),
    ({"backend": "flash3"}, ValueError, "choose one of naive, naive_compiled, math"),
    ({"backend": ["flex"]}, ValueError, "flex"),
    ({"mask_mod": 3}, TypeError, "mask_mod"),
    ({"mask_mod": type("Mask", (), {"__call__": causal, "__hash__": None})()}, TypeError, "hashable"),
    ({"mask_mod": lambda b, h, q, k: None}, TypeError, "return"),
    ({"mask_mod": lambda b, h, q, k: q - k}, TypeError, "int32"),
    ({"mask_mod": lambda b, h, q, k: (q >= k)[None]}, TypeError, r"\(1,\)"),
    ({"mask_mod": lambda q, k: q >= k}, TypeError, "positional"),
    ({"mask_mod": lambda b, h, q, k: {}[0]}, ValueError, "KeyError"),
    ({"mask_mod": lambda b, h, q, k: q > 0 and k > 0}, TypeError, "&"),
    ({"mask_mod": lambda b, h, q, k: INT([1, 2])[k] > 0}, ValueError, "IndexError"),
    ({"score_mod": lambda s, b, h, q, k: None}, TypeError, "return"),
    ({"score_mod": lambda s, b, h, q, k: s > 0}, TypeError, "bool"),
    ({"score_mod": lambda s, b, h, q, k: s[None]}, TypeError, "one floating-point"),
    ({"score_mod": score_mods.relative_bias(torch.zeros(2, 9))}, ValueError, "IndexError"),
    ({"score_mod": score_mods.compose(score_mods.soft_cap(2.0), score_mods.alibi(2))}, ValueError, "2 heads.* 4"),
    ({"seqlens": torch.tensor([3])}, ValueError, "int32"),
    ({"seqlens": INT([9])}, ValueError, "6 keys"),
    ({"seqlens": INT([3]), "window": "x"}, ValueError, "window"),
    ({"seqlens": [3]}, TypeError, "tensor"),
    ({"cu_seqlens": INT([0, 4])}, ValueError, "6 tokens"),
    ({"cu_seqlens": INT([0, 7, 6])}, ValueError, "rise"),
    ({"cu_seqlens": INT([0, 6]).to("meta")}, ValueError, "meta"),
    ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, "int64"),
    ({"cu_seqlens": INT([0, 6]), "seqlens": INT([6])}, ValueError, "both"),
    ({"sink": torch.zeros(3)}, ValueError, r"\(4,\)"),
    ({"sink": torch.zeros(4).int()}, ValueError, "float32"),
    ({"sink": 0.5}, TypeError, "float"),
    ({"sink": torch.zeros(4), "return_lse": 1}, TypeError, "True or False"),
    ({"return_lse": True, "backend": "sdpa"}, AttentionUnsupported, "log-sum-exp"),
    ({"sink": torch.zeros(4), "backend": "flash"}, AttentionUnsupported, "log-sum-exp"),
]


def test_a_sink_of_minus_infinity_is_none_also_where_nothing_is_seen():
    q, k, v = tensors(1, 2, 2, 6, 6, 16)
    late = {"mask_mod": lambda b, h, q, k: (q > 2) & (k <= q)}
    out = attention(q, k, v, sink=torch.full((2,), -math.inf), **late)
    torch.testing.assert_close(out, attention(q, k, v, **late))


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_a_mistake_is_a_sentence(number):
    change, kind, word = MISTAKES[number]
    arguments = change if isinstance(change, dict) else {}
    for backend in ("auto", "naive", "flex_eager"):
        q, k, v = tensors(1, 4, 2, 6, 6, 16)
        with pytest.raises(kind, match=word):
            attention(*(change(q, k, v) if callable(change) else (q, k, v)), **{"backend": backend, **arguments})


def test_double_and_gradients_name_backends_that_take_them():
    q, k, v = (x.double() for x in tensors(1, 2, 2, 6, 6, 16))
    with pytest.raises(AttentionUnsupported, match=r"not float64.*would work: naive, naive_compiled, math"):
        attention(q, k, v, backend="triton")
    q = torch.empty(1, 65536, 1, 8)
    with pytest.raises(AttentionUnsupported, match="at most 65535, and 65536 were given"):
        attention(q, q, q, backend="triton")
    q, k, v = tensors(1, 2, 2, 6, 6, 16)
    q.requires_grad_()
    with pytest.raises(AttentionUnsupported, match="no backward"):
        attention(q, k, v, backend="triton")
    attention(q, k, v, backend="naive").sum().backward()
    assert q.grad is not None
    assert "triton" not in able_backends(make_problem(q, k, v))


def test_table_has_a_row_for_each_backend():
    rows = backend_table()
    assert [row["backend"] for row in rows] == list(BACKENDS)
    for row in rows:
        assert row["summary"] and (row["reason"] or row["ok"])
        assert row["ok"] or row["remedy"], row


def test_importing_attention_imports_no_triton():
    code = (
        "import sys, utils.attention as a, torch; [a.find_backend(n) for n in a.BACKENDS]; "
        "import utils.attention.gluon.launch; x = torch.ones(1, 1, 8, 8); "
        "[a.attention(x, x, x, backend='math') for _ in range(2)]; assert 'triton' not in sys.modules"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.slow
@pytest.mark.parametrize("shape, strides", [((1, 3, 20, 16), (0, 1 << 30, 16, 1)), ((1, 1, 3, 16), (0, 0, 1 << 30, 1))])
def test_triton_reaches_heads_and_rows_beyond_32_bits(shape, strides):
    """Run in another process, since a wrong kernel reads and writes elsewhere. Most of these 4 GB of memory are never touched."""
    pytest.importorskip("triton")
    code = f"""if True:
        import torch
        from utils.attention.backends.triton import forward
        from utils.gluon_cpu import simulate
        far = torch.empty((1 << 31) + 8192, dtype=torch.float16).as_strided({shape}, {strides})
        near = torch.randn({shape}, dtype=torch.float16)
        far.copy_(near)
        with simulate():
            assert torch.equal(forward(far, far, far, True, 0.25, 0), forward(near, near, near, True, 0.25, 0))
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
