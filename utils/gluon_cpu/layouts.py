"""Rules for layouts: they must fit the warps of a partition and the instructions, and they change in views.

Triton's own layout algebra, which runs without a GPU, computes the layouts after permute, reshape, join and split. This file
has the rules of TMA and cp.async, and products.py the rules of wgmma, each with its reason.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import AutoLayout, DistributedLayout, SharedLayout

from . import context
from .context import refuse
from .known import constant, once_for_constants

AUTO = AutoLayout()  # one object for all, because layouts are compared by identity first


_refuse = functools.partial(refuse, "layout")


def threads(layout) -> tuple[int, int] | None:
    """Return a layout's (threads of a warp, warps); None if it fits any numbers."""
    if isinstance(layout, (gl.SliceLayout, gl.DotOperandLayout)):
        return threads(layout.parent)
    if isinstance(layout, gl.BlockedLayout):
        return math.prod(layout.threads_per_warp), math.prod(layout.warps_per_cta)
    if isinstance(layout, gl.NVMMADistributedLayout):
        return 32, math.prod(layout.warps_per_cta)
    if isinstance(layout, gl.DistributedLinearLayout):
        return 1 << len(layout.lane_bases), 1 << len(layout.warp_bases)
    return None


def block_bases(layout) -> list[list[int]]:
    """Return the spread of a tensor over the blocks of a cluster: a step in the tensor for each bit of the block's number."""
    if isinstance(layout, gl.SliceLayout):
        return [[*basis[: layout.dim], *basis[layout.dim + 1 :]] for basis in block_bases(layout.parent)]
    if isinstance(layout, gl.DistributedLinearLayout | gl.SharedLinearLayout):
        # Steps of this layout count elements; steps of a cga_layout count the blocks' parts of the tensor.
        steps = [sorted({abs(s) for s in along} - {0}) for along in zip(*layout.block_bases, strict=True)]
        return [[1 << steps[d].index(s) if s else 0 for d, s in enumerate(basis)] for basis in layout.block_bases]
    return getattr(layout, "cga_layout", None) or []


def per_block(shape: list[int], layout) -> list[int]:
    """Return the part of a shape that each block of a cluster holds; a leading dimension may count buffers."""
    part = list(shape)
    for basis in block_bases(layout):
        for d, step in enumerate(basis, len(shape) - len(basis)):
            part[d] //= 2 if step else 1
    return part


def places(layout, shape: list[int]) -> tuple:
    """Return a key that is equal for two layouts if they put the elements of a tile, counted in order, in the same places."""
    bases = tuple(map(tuple, block_bases(layout)))
    if isinstance(layout, gl.NVMMASharedLayout) and not layout.transposed:
        row, swizzle = per_block(shape, layout)[-1] * layout.element_bitwidth // 8, layout.swizzle_byte_width
        if swizzle in (0, row):  # rows follow each other in memory for every shape of the tile
            return swizzle, bases
    if (
        isinstance(layout, gl.SwizzledSharedLayout)
        and layout.max_phase == 1
        and layout.order[0] == len(layout.order) - 1
    ):
        return 0, bases
    return layout, tuple(shape)


def block_groups(layout, blocks: int) -> list[tuple[int, int]]:
    """Return for each block of a cluster the first block with the same part of a tensor, and the number of such blocks."""
    if blocks == 1:
        return [(0, 1)]
    same = sum(1 << bit for bit, basis in enumerate(block_bases(layout)) if not any(basis))
    return [(block & ~same, 1 << same.bit_count()) for block in range(blocks)]


def check_same_blocks(smem, layout, operation: str) -> None:
    """Refuse an access to shared memory that lies in another block of the cluster."""
    if context.program().num_ctas == 1 or isinstance(layout, AutoLayout):
        return
    for held, wanted in zip(block_bases(smem.layout), block_bases(layout), strict=True):
        needed = wanted if operation == "store" or "scatter" in operation else held
        if list(held) != list(wanted) and any(needed):
            text = f"{smem.label}.{operation}: the memory is spread over the blocks by {block_bases(smem.layout)}"
            text += f", the other side by {block_bases(layout)}: gluon_cpu lets a block use its own shared memory only"
            advice = "Use the same cga_layout on both sides; gl.convert_layout moves values between blocks"
            refuse("unknown operation", f"{text}. {advice}.")


def _check_cluster(layout, what: str) -> None:
    blocks, bases = context.program().num_ctas, block_bases(layout)
    if 1 << len(bases) != blocks:
        need = blocks.bit_length() - 1
        _refuse(
            f"{what}: {layout} has {len(bases)} bases for the blocks of a cluster; num_ctas={blocks} needs {need}: "
            f"cga_layout, a list of {need} steps."
        )


_checked: dict[tuple, DistributedLayout] = {}  # a key has the layout's id; the reference to the layout keeps it unique


slice_layout = once_for_constants(gl.SliceLayout)


def register_layout(layout, shape: list[int], what: str):
    """Return a register layout; refuse one that does not fit the shape or the warps of the running partition."""
    layout = constant(layout, f"{what}'s layout")
    if layout is None:
        return AUTO
    if isinstance(layout, AutoLayout):
        return layout
    warps = context.partition().num_warps
    key = (id(layout), len(shape), warps, context.program().num_ctas)
    if key in _checked:
        return layout
    if not isinstance(layout, DistributedLayout):
        _refuse(f"{what} needs a register layout (BlockedLayout, NVMMADistributedLayout, ...), got {layout!r}.")
    if isinstance(layout, gl.CoalescedLayout):
        return AUTO  # the compiler chooses this layout, so here it fits everything, like an automatic layout
    if layout.rank != len(shape):
        _refuse(f"{what}: shape {list(shape)} has {len(shape)} dimensions, {layout} has {layout.rank}.")
    spread = threads(layout)
    if spread is not None and spread[0] != 32:
        _refuse(f"{what}: {layout} spreads over {spread[0]} threads a warp; a warp has 32.")
    if spread is not None and spread[1] != warps:
        _refuse(f"{what}: {layout} is for {spread[1]} warps; this partition has {warps}.")
    _check_cluster(layout, what)
    if len(_checked) > 10000:
        _checked.clear()
    _checked[key] = layout
    return layout


def check_block(shape: list[int], what: str) -> None:
    """Refuse a shape of a register tensor if a dimension is no power of two."""
    for size in shape:
        if not isinstance(size, int) or size < 1 or size & (size - 1):
            text = "every dimension of a tensor must be a power of two. Take the next one up and mask"
            _refuse(f"{what}: shape {list(shape)}; {text}.")


def common_layout(a, b, what: str):
    """Return the common layout of two operands; refuse different layouts."""
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
    _check_cluster(layout, "Shared memory")
    if not isinstance(layout, gl.NVMMASharedLayout):
        return
    if layout.rank not in (len(shape), len(shape) - 1):
        _refuse(
            f"{layout} has rank {layout.rank}; shape {shape} needs {len(shape)}, or "
            f"{len(shape) - 1} if its first dimension counts buffers."
        )
    tile = per_block(shape, layout)[len(shape) - layout.rank :]
    inner = (tile[0] if layout.transposed else tile[-1]) * (2 if layout.fp4_padded else 1)
    if inner * dtype.primitive_bitwidth // 8 < layout.swizzle_byte_width:
        _refuse(
            f"A row of {inner} {dtype} has {inner * dtype.primitive_bitwidth // 8} bytes; "
            f"a swizzle of {layout.swizzle_byte_width} bytes needs rows at least that long. "
            "NVMMASharedLayout.get_default_for(shape, dtype) picks one that fits."
        )


def check_elements(smem, what: str) -> None:
    """Refuse memory with a layout for another element size: threads may use it, TMA and tensor cores may not."""
    bits = getattr(smem.layout, "element_bitwidth", smem.dtype.primitive_bitwidth)
    if bits != smem.dtype.primitive_bitwidth:
        _refuse(f"{what}: {smem.layout} is for {bits}-bit elements; {smem.label} is {smem.dtype}.")


def check_tma(desc, coord, smem, what: str) -> None:
    """Refuse shared memory that does not fit the descriptor of a TMA copy."""
    check_elements(smem, what)
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
    """Refuse a cp.async with different shapes or dtypes, or with less than four neighbouring bytes in a thread.

    offsets: the addresses in elements. A thread's elements are neighbours if their addresses follow each other.
    """
    if list(smem.shape) != list(shape):
        _refuse(f"cp.async: {smem.label} has shape {list(smem.shape)}, the pointers {list(shape)}.")
    if dtype.name != smem.dtype.name:
        _refuse(f"cp.async: {smem.label} is {smem.dtype}, the pointers are to {dtype}.")
    if dtype.primitive_bitwidth >= 32 or isinstance(layout, (AutoLayout, gl.CoalescedLayout)):
        return
    elements = elements_of(layout, tuple(shape), *_warps_and_blocks())
    held = set(offsets.reshape(-1)[elements[:, 0, 0]].tolist())
    firsts = [at for at in held if at - 1 not in held]
    neighbours = min(next(n for n in itertools.count(1) if at + n not in held) for at in firsts)
    if neighbours * dtype.primitive_bitwidth < 32:
        _refuse(
            f"cp.async copies 4, 8 or 16 bytes of a thread at once; with {layout} and these pointers a thread has "
            f"{neighbours} neighbouring element of {dtype}, {neighbours * dtype.primitive_bitwidth // 8} bytes. "
            "Give each thread more elements along the rows of memory."
        )


# ---- Triton's own layout algebra ---------------------------------------------------------------------------------


@functools.cache
def _semantic(num_warps: int, num_ctas: int):
    """Return Triton's code generator on a scratch module, which is never compiled."""
    from triton._C.libtriton import gluon_ir, ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.experimental.gluon.language._semantic import GluonSemantic

    backend = make_backend(GPUTarget("cuda", 90, 32))
    ir_context = ir.context()
    ir.load_dialects(ir_context)
    backend.load_dialects(ir_context)
    builder = gluon_ir.GluonOpBuilder(ir_context)
    builder.options = backend.parse_options({"num_warps": num_warps, "num_ctas": num_ctas})
    builder.set_loc("gluon_cpu", 1, 1)
    module = builder.create_module()
    module.set_attr("ttg.target", builder.get_string_attr("cuda:90"))
    for name, value in (("num-warps", num_warps), ("num-ctas", num_ctas), ("threads-per-warp", 32)):
        module.set_attr(f"ttg.{name}", builder.get_int32_attr(value))
    function = builder.get_or_insert_function(module, "scratch", builder.get_function_ty([], []), "public", False)
    module.push_back(function)
    block = function.add_entry_block()
    builder.set_insertion_point_to_start(block)
    semantic = GluonSemantic(builder)
    semantic.keep = (ir_context, module, function, block)
    return semantic


_VIEWS = {
    "reshape": lambda semantic, x, shape: semantic.reshape(x, list(shape), False),
    "permute": lambda semantic, x, order: semantic.permute(x, order),
    "split": lambda semantic, x, _: semantic.split(x)[0],
    "join": lambda semantic, x, _: semantic.join(x, x),
    "convert_layout(assert_trivial=True)": lambda semantic, x, layout: semantic.convert_layout(x, layout, True),
    "reshape of memory": lambda semantic, x, shape: semantic.memdesc_reshape(x, list(shape)),
    "permute of memory": lambda semantic, x, order: semantic.memdesc_trans(x, list(order)),
}


@once_for_constants
def _layout_of_view(warps: int, blocks: int, layout, dtype, shape: tuple, operation: str, argument):
    semantic = _semantic(warps, blocks)
    if isinstance(layout, SharedLayout):
        x = semantic.allocate_shared(dtype, list(shape), layout, None)
    else:
        x = semantic.full(list(shape), 0.0, dtype, layout)
    view = _VIEWS[operation](semantic, x, argument)
    return view.layout if isinstance(layout, SharedLayout) else view.type.layout


def view(layout, shape: list[int], operation: str, argument=None, dtype=gl.float32):
    """Return the layout of a register tensor, or of shared memory, after an operation of _VIEWS."""
    if isinstance(layout, AutoLayout):
        return layout
    # Triton would end the process in these two cases.
    if "permute" in operation and sorted(argument) != list(range(len(shape))):
        _refuse(f"{operation}: {list(argument)} does not name each dimension of {list(shape)} once, from 0.")
    if getattr(layout, "rank", len(getattr(layout, "order", shape))) != len(shape):
        _refuse(f"{operation}: the first dimension of {list(shape)} counts buffers: take one of them by .index(i).")
    try:
        return _layout_of_view(*_warps_and_blocks(), layout, dtype, tuple(shape), operation, argument)
    except (RuntimeError, ValueError, TypeError) as error:
        _refuse(f"{operation}: {list(shape)} with {layout}: {str(error).strip()}")


def _warps_and_blocks() -> tuple[int, int]:
    """Return the warps of the running partition and the blocks of the cluster."""
    return context.partition().num_warps, context.program().num_ctas


def linear(layout, shape: list[int]):
    """Return a layout in the form of a DistributedLinearLayout or SharedLinearLayout."""
    return _linear(layout, tuple(shape), *_warps_and_blocks())


@functools.lru_cache(maxsize=256)
def _linear(layout, shape: tuple[int, ...], warps: int, blocks: int):
    result = _semantic(warps, blocks).to_linear_layout(layout, list(shape))
    return getattr(result, "value", result)


@functools.lru_cache(maxsize=64)
def elements_of(layout, shape: tuple[int, ...], warps: int, blocks: int = 1) -> np.ndarray:
    """Return the flat index of the element in each register of each lane of each warp: (registers, lanes, warps).

    The warps of all blocks of the cluster count.
    """
    basis_of = _linear(layout, shape, warps, blocks)
    flat: np.ndarray = np.zeros((1, 1, 1), np.int64)
    kinds = (basis_of.reg_bases, basis_of.lane_bases, [*basis_of.warp_bases, *basis_of.block_bases])
    for axis, bases in enumerate(kinds):
        for basis in bases:
            flat = np.concatenate([flat, flat ^ int(np.ravel_multi_index(basis, shape))], axis)
    return flat


def crosses_warps(a, b, shape: list[int]) -> bool:
    """Return whether layout b gives a warp elements that layout a gives to other warps; False if the compiler chooses a or b."""
    automatic = isinstance(a, AutoLayout) or isinstance(b, AutoLayout)
    return not automatic and _crosses_warps(a, b, tuple(shape), *_warps_and_blocks())


@functools.lru_cache(maxsize=256)
def _crosses_warps(a, b, shape: tuple[int, ...], warps: int, blocks: int) -> bool:
    held, wanted = (elements_of(x, shape, warps, blocks) for x in (a, b))
    return not all(np.isin(wanted[..., warp], held[..., warp]).all() for warp in range(held.shape[-1]))


def spans_warps(layout, shape: list[int], axis: int) -> bool:
    """Return whether several warps hold a slice along an axis; False if the compiler chooses the layout."""
    return layout not in (None, AUTO) and any(basis[axis] for basis in linear(layout, shape).warp_bases)


def bank_conflicts(distr_ty, shared_ty) -> int:
    """Return the bank conflicts of an access, as Triton counts them."""
    from triton.experimental.gluon.language._core import shared_memory_descriptor_type

    kind = shared_memory_descriptor_type(
        shared_ty.dtype, list(shared_ty.shape), shared_ty.layout, list(shared_ty.alloc_shape)
    )
    return _semantic(*_warps_and_blocks()).bank_conflicts(distr_ty, kind)
