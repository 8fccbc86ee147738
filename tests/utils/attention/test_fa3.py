"""FlashAttention 3: where its library is found, what it accepts, and on a GPU what it computes."""

import types

import pytest
import torch

from utils.attention import attention, last_run, make_problem, proof, reference, reference_gradients
from utils.attention.backends import fa3, find_backend

BACKEND = find_backend("fa3")


@pytest.fixture
def fresh():
    fa3._library.cache_clear()
    yield
    fa3._library.cache_clear()


def tensors(batch, heads, kv_heads, sq, sk, head_dim, device="cpu", dtype=torch.bfloat16):
    made = torch.Generator().manual_seed(sq * sk + head_dim)
    shapes = [(batch, heads, sq, head_dim)] + 2 * [(batch, kv_heads, sk, head_dim)]
    return [torch.randn(shape, generator=made).to(device, dtype) for shape in shapes]


def test_where_the_library_is_looked_for(monkeypatch, tmp_path, fresh):
    monkeypatch.setattr(fa3, "_registered", lambda: False)
    monkeypatch.setattr(fa3.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv(fa3.VARIABLE, raising=False)
    absent, _ = fa3._library()
    assert not absent and "FLASH_ATTENTION_3_LIBRARY names no file" in absent.reason and "_C.so" in absent.remedy

    fa3._library.cache_clear()
    monkeypatch.setenv(fa3.VARIABLE, str(tmp_path / "missing.so"))
    assert "there is no such file" in fa3._library()[0].reason

    fa3._library.cache_clear()
    broken = tmp_path / "_C.so"
    broken.write_bytes(b"no library")
    monkeypatch.setenv(fa3.VARIABLE, str(broken))
    assert "does not load" in fa3._library()[0].reason

    fa3._library.cache_clear()
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    assert "registers no operators" in fa3._library()[0].reason

    fa3._library.cache_clear()
    monkeypatch.setattr(fa3, "_registered", lambda: True)
    support, origin = fa3._library()
    assert support and origin == "operators registered elsewhere"


def test_a_package_that_brings_the_library_is_found_without_importing_it(monkeypatch, tmp_path, fresh):
    folder = tmp_path / "xformers" / "flash_attn_3"
    folder.mkdir(parents=True)
    (folder / "_C.abi3.so").write_bytes(b"")
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "xformers")])
    monkeypatch.setattr(fa3.importlib.util, "find_spec", lambda name: spec if name == "xformers" else None)
    monkeypatch.setattr(fa3.metadata, "version", lambda name: "0.0.34" if name == "xformers" else "")
    assert fa3._installed() == (folder / "_C.abi3.so", "xformers 0.0.34")


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
def test_without_a_gpu_it_says_what_it_needs():
    support = BACKEND.support(make_problem(*tensors(1, 2, 2, 16, 16, 64)))
    assert not support and "needs a Hopper GPU" in support.reason


# ---- on a GPU -----------------------------------------------------------------------------------------------

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not BACKEND.machine(), reason=BACKEND.machine().reason)]
CASES = {
    "full": ((2, 4, 4, 256, 256, 64), {}),
    "causal, grouped": ((2, 8, 2, 300, 300, 128), {"causal": True}),
    "more keys": ((1, 4, 4, 100, 517, 128), {"causal": True}),
    "window": ((1, 4, 4, 500, 500, 64), {"window": 70}),
    "causal window": ((1, 4, 1, 500, 500, 128), {"window": 70, "causal": True, "scale": 0.2}),
    "256": ((1, 2, 2, 333, 333, 256), {"causal": True}),
    "72": ((1, 2, 2, 200, 200, 72), {}),
    "decode": ((4, 8, 2, 1, 3000, 128), {"causal": True}),
}


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("name", CASES)
    def test_output_and_log_sum_exp_against_float64(self, name):
        shape, arguments = CASES[name]
        q, k, v = tensors(*shape, device="cuda")
        expected, expected_lse = reference(q, k, v, **arguments)
        out = attention(q, k, v, backend="fa3", **arguments)
        assert last_run().backend == "fa3" and out.shape == q.shape
        assert (out.double() - expected).norm() / expected.norm() < 5e-3
        problem = make_problem(q, k, v, **arguments)
        _, lse = fa3._forward(q, k, v, (), problem.causal, problem.scale, *fa3.window_size(problem, -1))
        torch.testing.assert_close(lse.double(), expected_lse.double(), atol=2e-3, rtol=2e-3)

    @pytest.mark.parametrize("name", ["full", "causal, grouped", "more keys", "causal window", "256"])
    def test_gradients_against_float64(self, name):
        shape, arguments = CASES[name]
        q, k, v = tensors(*shape, device="cuda")
        dout = torch.randn_like(q)
        _, expected = reference_gradients(q, k, v, dout, **arguments)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        attention(*leaves, backend="fa3", **arguments).backward(dout)
        for leaf, right in zip(leaves, expected, strict=True):
            assert (leaf.grad.double() - right).norm() / right.norm() < 1e-2

    def test_its_kernels_prove_it(self):
        q, k, v = tensors(1, 4, 4, 256, 256, 128, device="cuda")
        assert proof("fa3", q, k, v, causal=True)
        assert not any("Sm90" in name and "Fwd" in name for name in proof("cudnn", q, k, v, causal=True))

    def test_rows_without_keys_are_zero(self):
        q, k, v = tensors(1, 2, 2, 200, 100, 64, device="cuda")
        out = attention(q, k, v, causal=True, backend="fa3")
        expected, _ = reference(q, k, v, causal=True)
        assert (out.double() - expected).norm() / expected.norm() < 5e-3
