"""A kept launch: what it takes from the first one, and on a GPU that it does the same as `kernel[grid](...)`."""

import types

import pytest
import torch

from utils.kernels.handle import KEPT, Handle, Map, Series, observed
from utils.machine.device import gluon_support, triton_support
from utils.machine.versions import installed_version

needs_triton = pytest.mark.skipif(not __import__("importlib").util.find_spec("triton"), reason=triton_support().reason)
hopper = pytest.mark.skipif(not gluon_support(), reason="the Gluon kernels need a Hopper GPU")


class PyCUtensorMap(tuple):
    """Stands for the driver's descriptor."""


@needs_triton
@pytest.mark.parametrize("described", [True, False])
def test_a_launch_is_repeated_with_other_tensors(monkeypatch, described):
    """Triton's own launcher without a GPU: what reaches its C function, for other tensors, a known one and a listener."""
    if installed_version("triton")[:2] != (3, 7):
        pytest.skip("it stands in for the parts of Triton 3.7's launcher; on a GPU every version launches")
    import triton
    from triton import knobs
    from triton.backends.nvidia import driver as nvidia

    calls, filled, metadata = [], [], []
    utils = types.SimpleNamespace(
        fill_tma_descriptor_tiled=lambda address, *facts: filled.append(address) or PyCUtensorMap((address, *facts))
    )
    driver = types.SimpleNamespace(get_current_stream=lambda index: 70 + index, utils=utils)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver, raising=False)
    monkeypatch.setattr(type(triton.runtime.driver), "active", property(lambda self: driver))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    box = dict(swizzle=3, elem_size=2, elem_type=10, block_size=[64, 64], fp4_padded=False)
    signature = {
        0: "tensordesc<bf16[64,64]>" if described else "*bf16",
        1: "*fp32",
        2: "*i32",
        3: "i32",
        4: "constexpr",
    }
    run = object.__new__(nvidia.CudaLauncher)
    run.launch = nvidia.wrap_handle_tensordesc(lambda *given: calls.append(given), signature, [box] * described)
    run.global_scratch_size = run.profile_scratch_size = run.global_scratch_align = run.profile_scratch_align = 0
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, False
    run.arg_annotations, run.kernel_signature = "annotations", b"signature"
    compiled = types.SimpleNamespace(
        run=run, function=11, packed_metadata="packed", launch_metadata=lambda *given: metadata.append(given) or "told"
    )
    base, table = torch.zeros(4, 8), torch.arange(3)
    first = types.SimpleNamespace(block_shape=[64, 64], shape=[4, 8], strides=[8, 1], base=base) if described else base
    handle = Handle(compiled, (5,), (first, torch.zeros(2)), (table, 9, "PLAN"), 3)
    assert not calls  # it only listened
    x, y = torch.ones(4, 8), torch.ones(2)

    def expected(hooks):
        """What Triton's launcher itself passes on."""
        before = (5, 1, 1, 73, 11, "packed", *hooks)
        run(*before, Map(x, [4, 8], [8, 1]) if described else x.data_ptr(), y.data_ptr(), table.data_ptr(), 9, "PLAN")
        return [list(part) if isinstance(part, (list, tuple)) else part for part in calls.pop()]

    for _ in range(2):
        handle(x, y)
        assert [list(part) if isinstance(part, (list, tuple)) else part for part in calls.pop()] == expected([None] * 3)
    assert filled.count(x.data_ptr()) == 3 * described  # once by the handle, twice by Triton's launcher
    series = Series([(handle, ((1, 0), (0, 8)))] * 2)
    for _ in range(2):
        series((y.data_ptr() - 8, x.data_ptr()))
        found = [[list(part) if isinstance(part, (list, tuple)) else part for part in calls.pop()] for _ in "12"]
        assert found == [expected([None] * 3)] * 2
    assert filled.count(x.data_ptr()) == 5 * described  # the series needs none
    listener = types.SimpleNamespace(calls=[1])
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", listener)
    handle(x, y)
    assert calls[0][8] == "told" and calls[0][9] is listener and len(metadata) == 1


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
        (kept,) = KEPT.values()
        assert kept.handle._direct is not None  # not the slower way through Triton's launcher
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


BACKENDS = ["gluon", "fa3", "cute", "cudnn", "flash", "efficient", "math", "flex", "auto"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*BACKENDS, pytest.param("gemm", marks=hopper)])
def test_another_stream_and_a_graph(name):
    """Every backend of attention, and the last rung of the GEMM."""
    from utils.attention import attention, find_backend, make_problem
    from utils.kernels.gemm import gemm_warp_specialized

    if name == "gemm":
        inputs = [torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in "ab"]
        call = lambda: gemm_warp_specialized(*inputs)  # noqa: E731
    else:
        inputs = [torch.randn(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
        if name != "auto" and not (support := find_backend(name).support(make_problem(*inputs, causal=True))):
            pytest.skip(support.reason)
        call = lambda: attention(*inputs, causal=True, backend=name)  # noqa: E731
    for _ in range(3):
        call()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        on_side = call()
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(on_side, call())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for x in inputs:
        x.normal_()
    graph.replay()
    assert torch.equal(captured, call()) and not torch.equal(captured, on_side)


@pytest.mark.gpu
@hopper
def test_products_by_a_kept_launch():
    from utils.kernels import gemm, gemm_launch

    torch.manual_seed(0)
    for transposed in (False, True):
        a, b = (torch.randn(264, 520, device="cuda", dtype=torch.float16) for _ in "ab")
        left, right = (a.T, b) if transposed else (a, b.T)
        KEPT.clear()
        first = gemm.gemm_warp_specialized(left, right)
        assert len(KEPT) == 1
        assert torch.equal(first, gemm.gemm_warp_specialized(left, right))
        a.normal_()
        assert torch.equal(gemm.gemm_warp_specialized(left, right), gemm_launch.prepare(left, right)(left, right))
        with pytest.raises(ValueError, match="forward only"):
            gemm.gemm_warp_specialized(left.requires_grad_(), right)
