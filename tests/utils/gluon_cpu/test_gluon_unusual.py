"""Right kernels in an unusual form raise no report; what only the compiler used to refuse is refused with its reason.

That the compiler for sm_90a accepts or refuses the same was found by compiling them; `test_the_compiler_agrees` does so.
"""

import inspect

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="gluon_cpu needs Triton for the language; there are wheels for Linux only")

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.utils.gluon_cpu import gluon_unusual_kernels as kernels
from tests.utils.gluon_cpu.gluon_helpers import descriptor
from utils import gluon_cpu


def core_matrices(rows: int, columns: int, turned: bool = False, swizzled: bool = False):
    """A SharedLinearLayout of core matrices: 8 x 16 bytes, plain or with their chunks exchanged."""
    if turned:
        rows, columns = columns, rows
    steps = [[0, 1 << i] for i in range(3)] + [[1 << i, 0] for i in range(rows.bit_length() - 1)]
    steps += [[0, 8 << i] for i in range((columns // 8).bit_length() - 1)]
    if swizzled:
        steps[3] = [1, 8]
    return gl.SharedLinearLayout([step[::-1] for step in steps] if turned else steps)


def run_product(m: int, n: int, warps: list[int], instruction: list[int], shared=None, version=(3, 0)) -> None:
    a, b, c = torch.randn(m, 64).half(), torch.randn(n, 64).half(), torch.zeros(m, n)
    shared = shared or gl.NVMMASharedLayout.get_default_for([m, 64], gl.float16)
    layout = gl.NVMMADistributedLayout(list(version), warps, instruction)
    with gluon_cpu.simulate():
        kernels.product[(1,)](a, descriptor(b, [n, 64]), c, m, n, 64, layout, shared, num_warps=warps[0] * warps[1])
    assert (c.double() - a.double() @ b.double().T).abs().max() < 1e-2


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_read_that_a_finished_product_used_needs_no_fence(seed):
    a, b, c = torch.randn(64, 192).half(), torch.randn(32, 192).half(), torch.zeros(64, 32)
    with gluon_cpu.simulate(seed=seed) as run:
        kernels.matmul_from_registers[(1,)](descriptor(a, [64, 64]), descriptor(b, [32, 64]), c, 3, 0.5, True)
    assert run.ok and (c.double() - 0.5 * a.double() @ b.double().T).abs().max() < 2e-2
    with pytest.raises((gluon_cpu.FenceError, gluon_cpu.RaceError)), gluon_cpu.simulate(seed=seed):
        kernels.matmul_from_registers[(1,)](descriptor(a, [64, 64]), descriptor(b, [32, 64]), c, 3, 0.5, False)


@pytest.mark.parametrize(
    ("m", "n", "warps", "instruction"),
    [
        (64, 64, [8, 1], [16, 64, 16]),
        (64, 64, [4, 2], [16, 64, 16]),
        (64, 32, [4, 2], [16, 32, 16]),
        (128, 64, [8, 1], [16, 64, 16]),
    ],
)
def test_more_warps_than_the_accumulator_has_rows(m, n, warps, instruction):
    run_product(m, n, warps, instruction)


@pytest.mark.parametrize("turned", [False, True])
def test_core_matrices_are_an_operand(turned):
    run_product(64, 32, [4, 1], [16, 32, 16], core_matrices(64, 64, turned))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"shared": core_matrices(64, 64, swizzled=True)}, "core matrices"),
        ({"shared": gl.SwizzledSharedLayout(8, 1, 8, [1, 0])}, "core matrices"),
        ({"version": [2, 0]}, r"version \[3, 0\]"),
        ({"instruction": [16, 128, 16]}, "smaller than one instruction"),
        ({"instruction": [64, 64, 16]}, "16 rows"),
        ({"warps": [1, 4], "instruction": [16, 16, 16]}, "multiple of 4"),
    ],
)
def test_other_operands_are_refused(given, words):
    with pytest.raises(gluon_cpu.LayoutError, match=words):
        run_product(64, 32, **({"warps": [4, 1], "instruction": [16, 32, 16]} | given))


def test_cp_async_counts_neighbours_in_memory():
    """The pointers alone decide how many bytes of a thread lie side by side, not the layout's order."""
    along = gl.BlockedLayout([1, 128], [32, 1], [4, 1], [0, 1])
    single = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    x, y = torch.randn(128, 128).half(), torch.zeros(128, 128).half()
    with gluon_cpu.simulate():
        kernels.copy_by_cp_async[(1,)](x, y, 128, 1, along)
    assert torch.equal(x, y)
    for strides, layout in (((128, 1), single), ((1, 128), along)):
        with pytest.raises(gluon_cpu.LayoutError, match="1 neighbouring element"), gluon_cpu.simulate():
            kernels.copy_by_cp_async[(1,)](x, y, *strides, layout)


def test_a_method_calls_a_global_function_of_its_own_name():
    y = torch.zeros(1, dtype=torch.int32)
    with gluon_cpu.simulate():
        kernels.method_and_function_of_one_name[(1,)](y, 21)
    assert y.item() == 42


@pytest.mark.skipif(
    "round_f32_to_tf32" not in inspect.signature(TensorDescriptor).parameters,
    reason="descriptors round from Triton 3.7 on",
)
def test_rounding_to_tf32_on_the_way_is_refused():
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float32)
    b = TensorDescriptor(torch.zeros(64, 64), [64, 64], [64, 1], [64, 64], layout, round_f32_to_tf32=True)
    with pytest.raises(gluon_cpu.UnknownOperationError, match=r"b_desc: .* round to tf32"), gluon_cpu.simulate():
        kernels.product[(1,)](torch.zeros(64, 64), b, torch.zeros(64, 64), 64, 64, 64, None, layout)


@pytest.mark.slow
def test_the_compiler_agrees():
    from utils.kernels.offline import compile_gluon

    half = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    turned = core_matrices(64, 64, turned=True)
    for warps, shared in (([8, 1], half), ([4, 2], half), ([4, 1], core_matrices(64, 64)), ([4, 1], turned)):
        layout = gl.NVMMADistributedLayout([3, 0], warps, [16, 64, 16])
        constants = dict(M=64, N=64, K=64, layout=layout, shared=shared)
        signature = dict(a_ptr="*fp16", b_desc=f"tensordesc<fp16[64, 64],{half!r}>", c_ptr="*fp32")
        assert compile_gluon(kernels.product, signature, constants, ["a_ptr", "c_ptr"], warps[0] * warps[1]).asm[
            "cubin"
        ]
    line = gl.BlockedLayout([1, 128], [32, 1], [4, 1], [0, 1])
    signature = dict(x_ptr="*fp16", y_ptr="*fp16", row="i32")
    compiled = compile_gluon(
        kernels.copy_by_cp_async, signature, dict(layout=line, column=1), ["x_ptr", "y_ptr", "row"]
    )
    assert "cp.async" in compiled.asm["ptx"]


def test_a_line_of_the_courses_own_files_is_named_with_its_file():
    from utils.attention.gluon import shared
    from utils.gluon_cpu.reports import Site

    assert str(Site(shared.__file__, 12, "tma_load")).startswith(
        "line 12 of utils/attention/gluon/shared.py in tma_load:"
    )
    assert str(Site("/tmp/kernels-x/lab3_wgmma.py", 12, "matmul")).startswith("line 12 in matmul:")


def test_the_compilers_layout_and_cudas_functions():
    x, y = torch.randn(16, 64), torch.zeros(16, 64)
    with gluon_cpu.simulate(timeline=True):
        kernels.coalesced[(1,)](x, y, 1000)
    torch.testing.assert_close(y.flatten()[:1000], x.exp().flatten()[:1000] / 2)
    assert not y.flatten()[1000:].any()


def test_what_lies_between_the_rows_of_a_view_is_outside():
    from utils.gluon_cpu.global_memory import GlobalBuffer

    memory = torch.arange(40.0).reshape(4, 10)
    for view, inside, outside in (
        (memory[:, :6], [0, 5, 10, 35], [6, 19]),
        (memory[:, :6].T, [0, 5, 10, 35], [6, 19]),
        (memory[:, ::2], [0, 2, 38], [1, 19]),
        (memory[0].expand(3, 10), [0, 9], []),
        (memory, [0, 9, 10, 39], []),
    ):
        buffer = GlobalBuffer(view, "x_ptr")
        buffer.check(np.array(inside), "gl.load")
        for offset in outside:
            with pytest.raises(gluon_cpu.GlobalMemoryError, match="between two of its rows"):
                buffer.check(np.array([offset]), "gl.load")
