"""Rules for layouts: which fit a partition's warps, which an instruction accepts, and what they become in a view.

Triton's own layout algebra, which runs without a GPU, says what a layout becomes under permute, reshape, join and
split. The rules of TMA and cp.async are here, those of wgmma in products.py, each with its reason.
"""

from __future__ import annotations

import functools
import math
from typing import NoReturn

import numpy as np
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import AutoLayout, DistributedLayout, SharedLayout

from . import context
from .context import refuse
from .known import constant


def _refuse(message: str) -> NoReturn:
    refuse("layout", message)


def threads(layout) -> tuple[int, int] | None:
    """Return (threads of a warp, warps) that a layout is for; None if it is for any."""
    if isinstance(layout, (gl.SliceLayout, gl.DotOperandLayout)):
        return threads(layout.parent)
    if isinstance(layout, gl.BlockedLayout):
        return math.prod(layout.threads_per_warp), math.prod(layout.warps_per_cta)
    if isinstance(layout, gl.NVMMADistributedLayout):
        return 32, math.prod(layout.warps_per_cta)
    if isinstance(layout, gl.DistributedLinearLayout):
        return 1 << len(layout.lane_bases), 1 << len(layout.warp_bases)
    return None


_checked: set = set()


def distributed(layout, shape: list[int], what: str):
    """Return a register layout; refuse one that does not fit the shape or the warps of the running partition."""
    layout = constant(layout, f"{what}'s layout")
    if layout is None:
        layout = AutoLayout()
    if isinstance(layout, AutoLayout):
        return layout
    warps = context.partition().num_warps
    key = (layout, len(shape), warps)
    if key in _checked:
        return layout
    if not isinstance(layout, DistributedLayout):
        _refuse(f"{what} needs a register layout (BlockedLayout, NVMMADistributedLayout, ...), got {layout!r}.")
    if isinstance(layout, gl.CoalescedLayout):
        return AutoLayout()  # the compiler chooses; here it fits everything, like an automatic one
    if layout.rank != len(shape):
        _refuse(f"{what}: shape {list(shape)} has {len(shape)} dimensions, {layout} has {layout.rank}.")
    spread = threads(layout)
    if spread is not None and spread[0] != 32:
        _refuse(f"{what}: {layout} spreads over {spread[0]} threads a warp; a warp has 32.")
    if spread is not None and spread[1] != warps:
        _refuse(f"{what}: {layout} is for {spread[1]} warps; this partition has {warps}.")
    _checked.add(key)
    return layout


def check_block(shape: list[int], what: str) -> None:
    """Refuse a shape of a register tensor whose dimensions are not powers of two."""
    for size in shape:
        if not isinstance(size, int) or size < 1 or size & (size - 1):
            _refuse(
                f"{what}: shape {list(shape)}; every dimension of a tensor must be a power of "
                "two. Take the next one up and mask."
            )


def same(a, b, what: str):
    """Return the common layout of two operands; refuse two different ones."""
    if a is b or a == b or isinstance(b, AutoLayout):
        return a
    if isinstance(a, AutoLayout):
        return b
    _refuse(
        f"{what}: the operands have different layouts,\n    {a}\n    {b}\n  and Gluon converts "
        "nothing by itself: use gl.convert_layout."
    )


def check_shared(layout, dtype, shape: list[int]) -> None:
    """Refuse a shared memory layout that does not fit dtype and shape."""
    if not isinstance(layout, SharedLayout):
        _refuse(f"Shared memory needs a shared layout (NVMMASharedLayout, SwizzledSharedLayout, ...), got {layout!r}.")
    for size in shape:
        if not isinstance(size, int) or size < 1:
            _refuse(f"Shared memory of shape {shape}: dimensions must be positive constants.")
    if not isinstance(layout, gl.NVMMASharedLayout):
        return
    if layout.element_bitwidth != dtype.primitive_bitwidth:
        _refuse(f"{layout} is for {layout.element_bitwidth}-bit elements; {dtype} has {dtype.primitive_bitwidth}.")
    if layout.rank not in (len(shape), len(shape) - 1):
        _refuse(
            f"{layout} has rank {layout.rank}; shape {shape} needs {len(shape)}, or "
            f"{len(shape) - 1} if its first dimension counts buffers."
        )
    tile = shape[len(shape) - layout.rank :]
    inner = tile[0] if layout.transposed else tile[-1]
    if inner * dtype.primitive_bitwidth // 8 < layout.swizzle_byte_width:
        _refuse(
            f"A row of {inner} {dtype} has {inner * dtype.primitive_bitwidth // 8} bytes; "
            f"a swizzle of {layout.swizzle_byte_width} bytes needs rows at least that long. "
            "NVMMASharedLayout.get_default_for(shape, dtype) picks one that fits."
        )


def check_tma(desc, coord, smem, what: str) -> None:
    """Refuse shared memory that does not fit the descriptor of a TMA copy."""
    if len(coord) != len(desc.block_shape):
        _refuse(f"{what}: {len(coord)} coordinates for a descriptor of {len(desc.block_shape)} dimensions.")
    if list(smem.shape) != list(desc.block_shape):
        _refuse(
            f"{what}: the descriptor moves boxes {list(desc.block_shape)}, {smem.label} has shape {list(smem.shape)}."
        )
    if smem.dtype.name != desc.dtype.name:
        _refuse(f"{what}: the descriptor is {desc.dtype}, {smem.label} is {smem.dtype}.")
    if smem.layout != desc.layout:
        _refuse(
            f"{what}: TMA uses the layout of the descriptor,\n    {desc.layout}\n  but "
            f"{smem.label} has\n    {smem.layout}"
        )


def check_cp_async(smem, shape, dtype, layout, offsets) -> None:
    """Refuse a cp.async whose shapes or dtypes differ, or in which a thread copies less than four bytes at once.

    `offsets` are the addresses in elements. A thread's elements are neighbours if their addresses follow each other.
    """
    if list(smem.shape) != list(shape):
        _refuse(f"cp.async: {smem.label} has shape {list(smem.shape)}, the pointers {list(shape)}.")
    if dtype.name != smem.dtype.name:
        _refuse(f"cp.async: {smem.label} is {smem.dtype}, the pointers are to {dtype}.")
    if dtype.primitive_bitwidth >= 32 or isinstance(layout, (AutoLayout, gl.CoalescedLayout)):
        return
    held = np.unique(offsets.reshape(-1)[elements_of(layout, tuple(shape), context.partition().num_warps)[:, 0, 0]])
    neighbours = int(np.diff(np.flatnonzero(np.diff(held, prepend=-2, append=held[-1] + 2) != 1)).min())
    if neighbours * dtype.primitive_bitwidth < 32:
        _refuse(
            f"cp.async copies 4, 8 or 16 bytes of a thread at once; with {layout} and these pointers a thread has "
            f"{neighbours} neighbouring element of {dtype}, {neighbours * dtype.primitive_bitwidth // 8} bytes. "
            "Give each thread more elements along the rows of memory."
        )


# ---- Triton's own layout algebra ---------------------------------------------------------------------------------


@functools.cache
def _semantic(num_warps: int):
    """Triton's code generator on a scratch module, which is never compiled."""
    from triton._C.libtriton import gluon_ir, ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.experimental.gluon.language._semantic import GluonSemantic

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    ir_context = ir.context()
    ir.load_dialects(ir_context)
    backend.load_dialects(ir_context)
    builder = gluon_ir.GluonOpBuilder(ir_context)
    builder.options = backend.parse_options({"num_warps": num_warps})
    builder.set_loc("gluon_cpu", 1, 1)
    module = builder.create_module()
    module.set_attr("ttg.target", builder.get_string_attr("cuda:90"))
    for name, value in (("num-warps", num_warps), ("num-ctas", 1), ("threads-per-warp", 32)):
        module.set_attr(f"ttg.{name}", builder.get_int32_attr(value))
    function = builder.get_or_insert_function(module, "scratch", builder.get_function_ty([], []), "public", False)
    module.push_back(function)
    block = function.add_entry_block()
    builder.set_insertion_point_to_start(block)
    semantic = GluonSemantic(builder)
    semantic.keep = (ir_context, module, function, block)
    return semantic


@functools.cache
def _register_view(warps: int, layout, shape: tuple, operation: str, argument):
    semantic = _semantic(warps)
    x = semantic.full(list(shape), 0.0, gl.float32, layout)
    if operation == "reshape":
        return semantic.reshape(x, list(argument), False).type.layout
    if operation == "permute":
        return semantic.permute(x, argument).type.layout
    if operation == "split":
        return semantic.split(x)[0].type.layout
    if operation == "join":
        return semantic.join(x, semantic.full(list(shape), 0.0, gl.float32, layout)).type.layout
    raise ValueError(operation)


def register_view(layout, shape: list[int], operation: str, argument=None):
    """Return the layout of a register tensor after reshape, permute, split or join."""
    if isinstance(layout, AutoLayout):
        return layout
    try:
        return _register_view(context.partition().num_warps, layout, tuple(shape), operation, argument)
    except (RuntimeError, ValueError, TypeError) as error:
        _refuse(f"{operation} of a tensor {list(shape)} with {layout}: {str(error).strip()}")


@functools.cache
def _shared_view(dtype, shape: tuple, layout, operation: str, argument: tuple):
    semantic = _semantic(4)
    desc = semantic.allocate_shared(dtype, list(shape), layout, None)
    view = (
        semantic.memdesc_trans(desc, list(argument))
        if operation == "permute"
        else semantic.memdesc_reshape(desc, list(argument))
    )
    return view.layout


def shared_view(dtype, shape: list[int], layout, operation: str, argument: tuple):
    """Return the layout of shared memory after permute or reshape."""
    try:
        return _shared_view(dtype, tuple(shape), layout, operation, argument)
    except (RuntimeError, ValueError, TypeError) as error:
        _refuse(f"{operation} of shared memory {list(shape)} with {layout}: {str(error).strip()}")


def linear(layout, shape: list[int]):
    """Return a layout as the DistributedLinearLayout or SharedLinearLayout that it is."""
    return _linear(layout, shape, context.partition().num_warps)


def _linear(layout, shape, warps: int):
    result = _semantic(warps).to_linear_layout(layout, list(shape))
    return getattr(result, "value", result)


@functools.lru_cache(maxsize=64)
def elements_of(layout, shape: tuple[int, ...], warps: int) -> np.ndarray:
    """Return which element each register of each lane of each warp holds: flat indices, (registers, lanes, warps)."""
    basis_of = _linear(layout, shape, warps)
    flat: np.ndarray = np.zeros((1, 1, 1), np.int64)
    for axis, bases in enumerate((basis_of.reg_bases, basis_of.lane_bases, basis_of.warp_bases)):
        for basis in bases:
            step = int(np.ravel_multi_index(basis, shape))
            flat = np.concatenate([flat, flat ^ step], axis)
    return flat


def bank_conflicts(distr_ty, shared_ty) -> int:
    """Return the bank conflicts of an access, as Triton counts them."""
    from triton.experimental.gluon.language._core import shared_memory_descriptor_type

    kind = shared_memory_descriptor_type(
        shared_ty.dtype, list(shared_ty.shape), shared_ty.layout, list(shared_ty.alloc_shape)
    )
    return _semantic(context.partition().num_warps).bank_conflicts(distr_ty, kind)


@functools.cache
def _is_trivial(warps: int, a, b, shape: tuple) -> bool:
    semantic = _semantic(warps)
    try:
        semantic.convert_layout(semantic.full(list(shape), 0.0, gl.float32, a), b, True)
    except TypeError:
        return False
    return True


def check_trivial(a, b, shape: list[int]) -> None:
    """Refuse a conversion that moves data between threads."""
    if not _is_trivial(context.partition().num_warps, a, b, tuple(shape)):
        _refuse(f"convert_layout(assert_trivial=True): from\n    {a}\n  to\n    {b}\n  moves values between threads.")
