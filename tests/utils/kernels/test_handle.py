"""A kept launch: what it takes from the first one, and on a GPU that it does the same as `kernel[grid](...)`."""

import ctypes
import struct
import types

import pytest
import torch

from utils.kernels import handle as launching
from utils.kernels.handle import CALLS, Handle, needs_autograd, needs_operator, start
from utils.machine.device import gluon_support

hopper = pytest.mark.skipif(not gluon_support(), reason="the Gluon kernels need a Hopper GPU")

POINTER, NUMBERS = ".u64 .ptr .global .align 1", [".u32", ".u32", ".u64", ".u64"]
DECLARED = ".align 64 .b8", *NUMBERS, POINTER, POINTER, ".u32", ".f32", POINTER, POINTER
PTX = ",\n".join(f"\t.param {kind} p{i}" + "[128]" * (i == 0) for i, kind in enumerate(DECLARED))
PTX = f".visible .entry kernel(\n{PTX}\n) {{ .param .b32 none; }}"
FORMATS = "128s", "i", "i", "q", "q", "q", "q", "i", "f", "q", "q"


class Driver:
    """A stand-in for the CUDA driver that records its calls."""

    def __init__(self):
        self.launches, self.described, self.results = [], [], []

    def cuTensorMapEncodeTiled(self, place, kind, rank, address, *numbers):
        self.described.append((kind, rank, *[list(x) for x in numbers[:4]], *numbers[4:]))
        ctypes.memmove(place, struct.pack("q120s", address, b"descriptor"), 128)

    def cuTensorMapReplaceAddress(self, place, address):
        assert place % 64 == 0
        ctypes.c_uint64.from_address(place).value = address

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        at = struct.unpack("7I4xqqI4x", ctypes.string_at(config.value, 56))
        attributes = [struct.unpack("I4x3I", ctypes.string_at(at[8] + 72 * i, 20)) for i in range(at[9])]
        places = struct.unpack(f"{len(FORMATS)}q", ctypes.string_at(parameters.value, 8 * len(FORMATS)))
        values = [
            struct.unpack(x, ctypes.string_at(i, struct.calcsize(x)))[0] for i, x in zip(places, FORMATS, strict=True)
        ]
        assert extra is None
        self.launches.append((at[:8], function.value, attributes, values))
        return self.results.pop() if self.results else 0


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(launching, "_driver", lambda: found)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
    return found


X, Y, TABLE = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(2), torch.arange(3)


def handle(*more, ptx=PTX, scratch=0):
    """Return a kept launch of a kernel with a descriptor, two pointers, numbers and a constant."""
    facts = dict(num_warps=12, shared=4096, launch_pdl=True, tensordesc_meta=[dict(swizzle=3, block_size=[64, 32])])
    facts |= dict(global_scratch_size=scratch, profile_scratch_size=0, name="kernel")
    kinds = "tensordesc<bf16[64,32]>", "*fp32", "*i32", "i32", "fp32", "constexpr"
    source, metadata = types.SimpleNamespace(signature=dict(enumerate(kinds))), types.SimpleNamespace(**facts)
    kernel = types.SimpleNamespace(asm={"ptx": ptx}, metadata=metadata, src=source, run=None, function=11)
    described = types.SimpleNamespace(base=torch.zeros_like(X), shape=[4, 8], strides=[8, 1])
    return Handle(kernel, (5,), (described, torch.zeros(2)), (TABLE, -9, 0.5, "PLAN"), 3, *more)


def test_a_launch_is_repeated_with_other_tensors(driver):
    def expected(x, y):
        words = struct.pack("q120s", x, b"descriptor"), 4, 8, 8, 1, y, TABLE.data_ptr(), -9, 0.5, 0, 0
        return (10, 1, 1, 384, 1, 1, 4096, 73), 11, [(6, 1, 0, 0), (4, 2, 1, 1), (5, 1, 0, 0)], [*words]

    first, other = handle(2), handle(2, ((1, 0), (0, 8)))
    assert driver.described == [(9, 2, [8, 4], [16, 0], [32, 64], [1, 1], 0, 3, 2, 0)] * 2 and not driver.launches
    for x in (X, X.clone(), X):
        first(x, Y)
        start((other, first), (x.data_ptr(), Y.data_ptr()))
        alone = expected(x.data_ptr(), Y.data_ptr())
        assert driver.launches == [alone, expected(Y.data_ptr(), x.data_ptr() + 8), alone]
        driver.launches.clear()


def test_a_launch_that_the_driver_refuses_is_an_error(driver, monkeypatch):
    contexts = []
    driver.results = [719]
    with pytest.raises(RuntimeError, match="719"):
        handle()(X, Y)
    monkeypatch.setattr(torch.cuda, "mem_get_info", contexts.append)
    driver.results = [0, 201]  # a thread that has no context yet
    handle()(X, Y)
    assert contexts == [3] and not driver.results
    for changes in ({"scratch": 128}, {"ptx": PTX.replace("\t.param .f32 p8,\n", "")}):
        with pytest.raises(RuntimeError, match="parameters"):
            handle(**changes)


def test_who_has_to_see_the_operator():
    x = torch.ones(2)
    assert not needs_operator(x, x)
    assert needs_operator(x, [1]) and needs_operator(x.as_subclass(type("Own", (torch.Tensor,), {})))
    assert not needs_operator(x, torch.nn.Parameter(x))  # a Parameter, as weights are
    leaf = torch.nn.Parameter(x)
    assert needs_autograd(x, leaf) and not needs_autograd(x, x)
    with torch.no_grad():
        assert not needs_autograd(x, leaf)
    seen = []
    torch.vmap(lambda y: seen.append(needs_operator(y)) or y)(x)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        seen.append(needs_operator(x))
    assert seen == [True, True]


@pytest.mark.gpu
@hopper
def test_attention_by_a_kept_launch():
    from utils.attention.gluon import launch

    torch.manual_seed(0)
    for causal in (False, True):
        q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        CALLS.clear()
        first, lse = launch.forward(q, k, v, causal=causal, return_lse=True)
        assert len(CALLS) == 1
        again, lse_again = launch.forward(q, k, v, causal=causal, return_lse=True)
        assert torch.equal(first, again) and torch.equal(lse, lse_again) and first.data_ptr() != again.data_ptr()
        others = [torch.randn_like(x) for x in (q, k, v)]
        through_the_operator = torch.ops.labs.attention_gluon(*others, causal, 0.125, 0, True, 5)
        CALLS.clear()
        for _ in range(2):
            out, lse = launch.forward(*others, causal=causal, scale=0.125, return_lse=True)
            assert torch.equal(out, through_the_operator[0]) and torch.equal(lse, through_the_operator[1])
        # The same shapes and strides, but q starts two bytes past a multiple of 16: it is copied.
        shifted = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape).copy_(others[0])
        assert torch.equal(launch.forward(shifted, *others[1:], causal=causal, scale=0.125, return_lse=True)[0], out)


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
        CALLS.clear()
        first = gemm.gemm_warp_specialized(left, right)
        assert len(CALLS) == 1
        assert torch.equal(first, gemm.gemm_warp_specialized(left, right))
        a.normal_()
        assert torch.equal(gemm.gemm_warp_specialized(left, right), gemm_launch.prepare(left, right)(left, right))
        with pytest.raises(ValueError, match="forward only"):
            gemm.gemm_warp_specialized(left.requires_grad_(), right)
