"""A kept launch: what it takes from the first one, and on a GPU that it does the same as `kernel[grid](...)`."""

import types

import pytest
import torch

from utils.kernels.handle import KEPT, Handle, _Map, observed
from utils.machine.device import gluon_support, triton_support

needs_triton = pytest.mark.skipif(not __import__("importlib").util.find_spec("triton"), reason=triton_support().reason)
hopper = pytest.mark.skipif(not gluon_support(), reason="the Gluon kernels need a Hopper GPU")


@needs_triton
def test_a_launch_is_repeated_with_other_tensors(monkeypatch):
    import triton
    from triton import knobs

    calls, metadata = [], []
    driver = types.SimpleNamespace(get_current_stream=lambda index: 70 + index)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver, raising=False)
    monkeypatch.setattr(type(triton.runtime.driver), "active", property(lambda self: driver))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    compiled = types.SimpleNamespace(
        run=lambda *given: calls.append(given),
        function=11,
        packed_metadata="packed",
        launch_metadata=lambda *given: metadata.append(given) or "told",
    )
    described = types.SimpleNamespace(block_shape=[64, 64], shape=[4, 8], strides=[8, 1])
    table = torch.arange(3)
    handle = Handle(compiled, (5,), (described, torch.zeros(2)), (table, 9, "PLAN"), 3)
    x, y = torch.ones(4, 8), torch.ones(2)
    handle(x, y)
    (given,) = calls
    assert given[:9] == (5, 1, 1, 73, 11, "packed", None, None, None)
    assert isinstance(given[9], _Map) and given[9].base is x and (given[9].shape, given[9].strides) == ([4, 8], [8, 1])
    assert given[10:] == (y.data_ptr(), table.data_ptr(), 9, "PLAN")

    listener = types.SimpleNamespace(calls=[1])
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", listener)
    handle(x, y)
    assert calls[1][6] == "told" and calls[1][7] is listener and len(metadata) == 1


def test_who_has_to_see_the_operator():
    x = torch.ones(2)
    assert not observed(x, x)
    assert observed(x, torch.nn.Parameter(x)) and observed(x, [1])
    leaf = torch.ones(2, requires_grad=True)
    assert observed(x, leaf)
    with torch.no_grad():
        assert not observed(x, leaf) and not observed(x, torch.nn.Parameter(x))  # a layer's weight
        assert observed(x, x.as_subclass(type("Own", (torch.Tensor,), {})))
    seen = []
    torch.vmap(lambda y: seen.append(observed(y)) or y)(x)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        seen.append(observed(x))
    assert seen == [True, True]


@pytest.mark.gpu
@hopper
def test_attention_by_a_kept_launch():
    from utils.attention.gluon import launch

    torch.manual_seed(0)
    for causal in (False, True):
        q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        KEPT.clear()
        first, lse = launch.forward(q, k, v, causal=causal, return_lse=True)
        assert len(KEPT) == 1
        again, lse_again = launch.forward(q, k, v, causal=causal, return_lse=True)
        assert torch.equal(first, again) and torch.equal(lse, lse_again) and first.data_ptr() != again.data_ptr()
        others = [torch.randn_like(x) for x in (q, k, v)]
        through_the_operator = torch.ops.labs.attention_gluon(*others, causal, 0.125, 0, True, 5)
        KEPT.clear()
        for _ in range(2):
            out, lse = launch.forward(*others, causal=causal, scale=0.125, return_lse=True)
            assert torch.equal(out, through_the_operator[0]) and torch.equal(lse, through_the_operator[1])
        # The same shapes and strides, but q starts two bytes past a multiple of 16: it is copied.
        shifted = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape).copy_(others[0])
        assert torch.equal(launch.forward(shifted, *others[1:], causal=causal, scale=0.125), out)


@pytest.mark.gpu
@hopper
def test_another_stream_and_a_graph():
    from utils.attention import attention
    from utils.kernels.gemm import gemm_warp_specialized

    q, k, v = (torch.randn(1, 4, 512, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    for call, inputs in (
        (lambda: attention(q, k, v, causal=True, backend="gluon"), (q, k, v)),
        (lambda: gemm_warp_specialized(a, b), (a, b)),
    ):
        call()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            on_side = call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        for x in inputs:
            x.normal_()
        graph.replay()
        assert torch.equal(captured, call()) and not torch.equal(captured, on_side)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gluon", "fa3", "cute", "cudnn", "flash", "efficient", "math", "flex", "auto"])
def test_a_graph_captures_every_backend(name):
    from utils.attention import attention, find_backend, make_problem

    q, k, v = (torch.randn(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    if name != "auto" and not (support := find_backend(name).support(make_problem(q, k, v, causal=True))):
        pytest.skip(support.reason)
    for _ in range(3):
        attention(q, k, v, causal=True, backend=name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, causal=True, backend=name)
    for x in (q, k, v):
        x.normal_()
    graph.replay()
    assert torch.equal(out, attention(q, k, v, causal=True, backend=name))


@pytest.mark.gpu
@hopper
def test_products_by_a_kept_launch():
    from utils.kernels import gemm, gemm_launch

    torch.manual_seed(0)
    for transposed in (False, True):
        a, b = (torch.randn(264, 520, device="cuda", dtype=torch.float16) for _ in "ab")
        left, right = (a.T, b) if transposed else (a, b.T)
        gemm._launches.clear()
        first = gemm.gemm_warp_specialized(left, right)
        assert len(gemm._launches) == 1
        assert torch.equal(first, gemm.gemm_warp_specialized(left, right))
        a.normal_()
        assert torch.equal(gemm.gemm_warp_specialized(left, right), gemm_launch.gemm_and_launch(left, right)[0])
        with pytest.raises(ValueError, match="forward only"):
            gemm.gemm_warp_specialized(left.requires_grad_(), right)
