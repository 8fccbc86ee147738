"""A kept launch: what it takes from the first one, and on a GPU that it does the same as `kernel[grid](...)`."""

import ctypes
import struct
import types

import pytest
import torch

from utils.kernels import handle as launching
from utils.kernels.handle import KEPT, Handle, needs_grad, observed, parameters, start
from utils.machine.device import gluon_support

hopper = pytest.mark.skipif(not gluon_support(), reason="the Gluon kernels need a Hopper GPU")

PTX = """
.visible .entry kernel(
	.param .align 64 .b8 kernel_param_0[128],
	.param .u32 kernel_param_1,
	.param .u32 kernel_param_2,
	.param .u64 kernel_param_3,
	.param .u64 kernel_param_4,
	.param .u64 .ptr .global .align 1 kernel_param_5,
	.param .u64 .ptr .global .align 1 kernel_param_6,
	.param .u32 kernel_param_7,
	.param .f32 kernel_param_8,
	.param .u64 .ptr .global .align 1 kernel_param_9,
	.param .u64 .ptr .global .align 1 kernel_param_10
)
{ .param .b32 none; }
"""
PLACES = 0, 128, 132, 136, 144, 152, 160, 168, 172, 176, 184
SIZES = 128, 4, 4, 8, 8, 8, 8, 4, 4, 8, 8


class Driver:
    """Stands for the CUDA driver: keeps what it is told."""

    def __init__(self):
        self.launches, self.described, self.results = [], [], []

    def cuTensorMapEncodeTiled(self, place, kind, rank, address, *numbers):
        self.described.append((kind, rank, *[list(x) for x in numbers[:4]], *numbers[4:]))
        ctypes.memmove(place, struct.pack("8s56s", struct.pack("q", address), b"descriptor"), 64)
        return 0

    def cuTensorMapReplaceAddress(self, place, address):
        assert place % 64 == 0
        ctypes.c_uint64.from_address(place).value = address
        return 0

    def cuGetErrorString(self, result, text):
        return 0

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        at = struct.unpack("7I4xqqI4x", ctypes.string_at(config.value, 56))
        attributes = [struct.unpack("I4x3I", ctypes.string_at(at[8] + 72 * i, 20)) for i in range(at[9])]
        pointers = struct.unpack(f"{len(SIZES)}q", ctypes.string_at(parameters.value, 8 * len(SIZES)))
        values = [ctypes.string_at(place, size) for place, size in zip(pointers, SIZES, strict=True)]
        assert extra is None and pointers[0] % 64 == 0
        self.launches.append((at[:8], function.value, attributes, values))
        return self.results.pop() if self.results else 0


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(launching, "_driver", lambda: found)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
    return found


def compiled_kernel(**changes):
    box = dict(swizzle=3, elem_size=2, elem_type=10, block_size=[64, 32], fp4_padded=False)
    facts = dict(num_warps=12, shared=4096, launch_pdl=True, launch_cooperative_grid=False, tensordesc_meta=[box])
    facts |= dict(global_scratch_size=0, profile_scratch_size=0, name="kernel") | changes
    kinds = "tensordesc<bf16[64,32]>", "*fp32", "*i32", "i32", "fp32", "constexpr"
    source = types.SimpleNamespace(signature=dict(enumerate(kinds)))
    return types.SimpleNamespace(
        asm={"ptx": PTX}, metadata=types.SimpleNamespace(**facts), src=source, run=None, function=11
    )


def test_a_launch_is_repeated_with_other_tensors(driver):
    base, table = torch.zeros(4, 8, dtype=torch.bfloat16), torch.arange(3)
    described = types.SimpleNamespace(base=base, shape=[4, 8], strides=[8, 1], block_shape=[64, 32])
    assert [size for _, size in parameters(PTX)] == list(SIZES)
    handle = Handle(compiled_kernel(), (5,), (described, torch.zeros(2)), (table, -9, 0.5, "PLAN"), 3, cluster=2)
    assert driver.described == [(9, 2, [8, 4], [16, 0], [32, 64], [1, 1], 0, 3, 2, 0)] and not driver.launches
    facts = (10, 1, 1, 384, 1, 1, 4096, 73), 11, [(6, 1, 0, 0), (4, 2, 1, 1), (5, 1, 0, 0)]

    def expected(x, y):
        described = struct.pack("q56s64x", x, b"descriptor")
        numbers = struct.pack("iiqqqqifqq", 4, 8, 8, 1, y, table.data_ptr(), -9, 0.5, 0, 0)
        return *facts, [
            described,
            *(numbers[begin - 128 : begin - 128 + n] for begin, n in list(zip(PLACES, SIZES, strict=True))[1:]),
        ]

    x, y = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(2)
    for tensors in ((x, y), (base, y), (x, y)):
        handle(*tensors)
        assert driver.launches.pop() == expected(*[tensor.data_ptr() for tensor in tensors])
    places = (1, 0), (0, 8)
    other = Handle(compiled_kernel(), (5,), (described, torch.zeros(2)), (table, -9, 0.5, "PLAN"), 3, 2, places)
    for _ in range(2):
        start((other, handle), (x.data_ptr(), y.data_ptr()))
        assert driver.launches.pop() == expected(x.data_ptr(), y.data_ptr())
        assert driver.launches.pop() == expected(y.data_ptr(), x.data_ptr() + 8)
    assert not driver.launches


def test_a_launch_that_the_driver_refuses_is_an_error(driver, monkeypatch):
    base = torch.zeros(4, 8, dtype=torch.bfloat16)
    described = types.SimpleNamespace(base=base, shape=[4, 8], strides=[8, 1], block_shape=[64, 32])
    arguments = (5,), (described, torch.zeros(2)), (torch.arange(3), 9, 0.5, "PLAN"), 3
    handle, contexts = Handle(compiled_kernel(), *arguments), []
    driver.results = [719]
    with pytest.raises(RuntimeError, match="719"):
        handle(base, base)
    monkeypatch.setattr(torch.cuda, "mem_get_info", contexts.append)
    driver.results = [0, 201]  # a thread that has no context yet
    handle(base, base)
    assert contexts == [3] and not driver.results
    with pytest.raises(RuntimeError, match="parameters"):
        Handle(compiled_kernel(global_scratch_size=128), *arguments)
    kernel = compiled_kernel()
    kernel.asm["ptx"] = PTX.replace("\t.param .u32 kernel_param_7,\n", "")
    with pytest.raises(RuntimeError, match="parameters"):
        Handle(kernel, *arguments)


def test_who_has_to_see_the_operator():
    x = torch.ones(2)
    assert not observed(x, x)
    assert observed(x, [1]) and observed(x.as_subclass(type("Own", (torch.Tensor,), {})))
    assert not observed(x, torch.nn.Parameter(x))  # a layer's weight
    leaf = torch.nn.Parameter(x)
    assert needs_grad(x, leaf) and not needs_grad(x, x)
    with torch.no_grad():
        assert not needs_grad(x, leaf)
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
