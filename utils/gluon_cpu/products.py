"""wgmma: products of tiles of shared memory on the tensor cores, asynchronous and in order; and Triton's `tl.dot`.

Until a warpgroup_mma_wait, the tensor cores may read the operands and write the results.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from . import context, layouts
from .accesses import access
from .barriers import is_true
from .context import refuse, report
from .dtypes import FP8_LARGEST, is_int, round_to
from .known import constant, known
from .memory import MemDesc
from .reports import Site
from .tensors import Tensor


class _Product:
    """A running wgmma."""

    def __init__(self, a, b, acc, use_acc: bool, dtype, number: int, end: float, site: Site):
        self.a, self.b, self.acc, self.use_acc, self.dtype = a, b, acc, use_acc, dtype
        self.number, self.end, self.site = number, end, site
        self.result: np.ndarray | None = None
        # The product reads A's registers. So at its end the loads of these registers are over, too, and a copy may overwrite
        # their memory without a fence.
        self.reads = () if isinstance(a, MemDesc) else a.reads

    def finish(self) -> tuple[int, float]:
        """Multiply, and add to the accumulator; return the product's number and its end."""
        a = self.a.view if isinstance(self.a, MemDesc) else self.a.data
        out = exact_product(a, self.b.view, self.a.dtype)
        if self.use_acc:
            out = out + (self.acc.product.result if isinstance(self.acc, Accumulator) else self.acc.data)
        self.result = round_to(out, self.dtype)
        self.a = self.b = self.acc = None
        for read in self.reads:
            read.settled = True
        return self.number, self.end


def exact_product(a: np.ndarray, b: np.ndarray, dtype) -> np.ndarray:
    """Multiply two tiles of one type. Products of 16-bit and 8-bit values are exact in fp32, and sums are fp32.

    With fp8 operands the hardware keeps fewer bits of the sums than fp32; this function keeps them all.
    """
    if dtype.name == "fp32":
        a, b = _tf32(a), _tf32(b)
    return np.matmul(np.asarray(a, np.float32), np.asarray(b, np.float32))


def _tf32(x: np.ndarray) -> np.ndarray:
    """Return the upper 19 bits of fp32 values, which a tensor core reads."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@functools.cache
def _unknown(shape: tuple) -> np.ndarray:
    return np.broadcast_to(np.float32(np.nan), shape)


class Accumulator(Tensor):
    """The result registers of a wgmma. Reading them before its wait is a race."""

    __slots__ = ("product", "token")

    def __init__(self, product: _Product, shape: list[int], dtype, layout, token: bool):
        super().__init__(_unknown(tuple(shape)), dtype, layout)
        self.product, self.token = product, token

    @property
    def data(self):
        """The values; an access before the wait for the product is reported or refused."""
        product = self.product
        if self.token and product.result is not None:
            text = f"The result of the asynchronous wgmma of {product.site} is not a tensor yet, though its product is over"
            hint = "Read what the wait returns: assign the result, `acc = warpgroup_mma_wait(0, deps=[acc])`."
            refuse("kernel", f"{text}. {hint}")
        if product.result is None:
            text = f"The result of the wgmma of {product.site} is read while it is still being computed"
            hint = "warpgroup_mma_wait must come first, with few enough products outstanding."
            report("race", f"{text}: {hint}", others=(product.site,))
            return self._data
        return product.result

    @property
    def type(self):
        """Triton's type: until the wait the type of a token."""
        return _TokenType(super().type) if self.token else super().type


@dataclass
class _TokenType:
    """The type of the value that an asynchronous warpgroup_mma returns."""

    tensor_type: object


_accepted: set[tuple] = set()  # the keys of operands that check_wgmma has accepted


def contiguous_dimension(x: MemDesc) -> int | None:
    """Return the contiguous dimension of a matrix for wgmma; None if wgmma cannot read the matrix."""
    layout = x.layout
    if isinstance(layout, gl.NVMMASharedLayout):
        return 0 if layout.transposed else 1
    if not isinstance(layout, gl.SharedLinearLayout) or len(layout.offset_bases[0]) != 2:
        return None
    # A core matrix has eight rows of 16 bytes. All steps are plain, without a swizzle.
    steps = [tuple(step) for step in layout.offset_bases]
    dimension = 1 if steps[0] == (0, 1) else 0
    row = {2: 3, 4: 2}.get(x.dtype.primitive_bitwidth // 8, 4)
    along = [(0, 1 << i) if dimension else (1 << i, 0) for i in range(row)]
    down = [(1 << i, 0) if dimension else (0, 1 << i) for i in range(3)]
    plain = all(0 in step for step in steps)
    return dimension if plain and steps[: row + 3] == along + down else None


def check_wgmma(a, b, acc_layout, acc_shape: list[int], acc_dtype) -> None:
    """Refuse operands that wgmma.mma_async does not accept. B must lie in shared memory, A there or in registers."""

    def require(holds: bool, reason: str) -> None:
        if not holds:
            refuse("layout", f"warpgroup_mma: {reason}")

    warps = context.partition().num_warps
    sides = [(type(x), x.dtype.name, tuple(x.shape), x.layout) for x in (a, b)]
    key = (*sides, acc_layout, tuple(acc_shape), acc_dtype.name, warps)
    if key in _accepted:
        return
    in_shared = "operand B must lie in shared memory; it is a register tensor. Only A may come from registers."
    require(isinstance(b, MemDesc), in_shared)
    both_fp8 = a.dtype.name in FP8_LARGEST and b.dtype.name in FP8_LARGEST  # wgmma has e4m3 times e5m2, too
    require(
        both_fp8 or a.dtype.name == b.dtype.name, f"A is {a.dtype} and B is {b.dtype}; both must have the same type."
    )
    dtype, bits = a.dtype, a.dtype.primitive_bitwidth
    multiplied = dtype.name in ("fp16", "bf16", "fp32", *FP8_LARGEST)
    require(multiplied, f"gluon_cpu multiplies fp16, bf16, tf32 (fp32) and fp8 tiles; got {dtype}.")
    fits = acc_dtype.name == "fp32" or acc_dtype.name == dtype.name == "fp16"
    require(fits, f"the accumulator of {dtype} operands must be fp32; got {acc_dtype}.")
    shapes = f"got shapes {list(a.shape)} and {list(b.shape)}"
    require(len(a.shape) == len(b.shape) == 2, f"A and B must be matrices; {shapes}. .reshape drops ones.")
    (m, k), (k2, n) = a.shape, b.shape
    fits = k == k2 and acc_shape == [m, n]
    require(fits, f"A {[m, k]} times B {[k2, n]} into an accumulator {acc_shape}: the shapes do not fit.")
    bases = layouts.block_bases(acc_layout)
    check_blocks("warpgroup_mma", a, bases, "A", [[m, 0] for m, _ in bases])
    check_blocks("warpgroup_mma", b, bases, "B", [[0, n] for _, n in bases])
    fits = isinstance(acc_layout, gl.NVMMADistributedLayout) and list(acc_layout.version) == [3, 0]
    require(fits, f"the accumulator needs an NVMMADistributedLayout of version [3, 0]; it has {acc_layout}.")
    wm, wn = acc_layout.warps_per_cta
    im, inn, *ik = acc_layout.instr_shape
    instruction = f"instr_shape {list(acc_layout.instr_shape)}"
    require(warps % 4 == 0, f"wgmma is one instruction of a warpgroup, 4 warps; this partition has {warps}.")
    along_m = "the four warps of a warpgroup lie along M, so its first must be a multiple of 4."
    require(wm % 4 == 0, f"warps_per_cta is {[wm, wn]}; {along_m}")
    require(im == 16, f"{instruction}: each of the four warps computes 16 rows, so M is 16.")
    require(inn in (8, 16, 32, 64, 128, 256), f"{instruction}: in Triton N is a power of two, from 8 to 256.")
    require(not ik or ik[0] * bits == 256, f"{instruction}: K is 32 bytes, {256 // bits} for {dtype}.")
    # If there are more warps than instructions for the accumulator, the further warps repeat the work. That is no mistake.
    one = f"{[64, inn]} (four warps of 16 rows, {instruction})"
    m, n = layouts.per_block([m, n], acc_layout)
    k = layouts.per_block(list(a.shape), a.layout)[1]
    require(m >= 64 and n >= inn, f"an accumulator {acc_shape} is smaller than one instruction of a warpgroup, {one}.")
    one = f"one instruction multiplies 32 bytes along K, {256 // bits} elements of {dtype}"
    require(k * bits >= 256, f"K is {k}; {one}.")
    for name, x in (("A", a), ("B", b)):
        fits = not isinstance(x, MemDesc) or contiguous_dimension(x) is not None
        text = "the instruction reads NVMMASharedLayout, or core matrices of 8 x 16 bytes in a SharedLinearLayout"
        require(fits, f"{name} lies in shared memory with {x.layout}; {text}.")
    k_innermost = (not isinstance(a, MemDesc) or contiguous_dimension(a) == 1) and contiguous_dimension(b) == 0
    how = "(B as a .permute((1, 0)) of [N, K]); only 16-bit types may be transposed"
    require(bits == 16 or k_innermost, f"{dtype} operands must lie with K innermost {how}.")
    if isinstance(a, Tensor):
        layout = gl.DotOperandLayout(0, acc_layout, 32 // bits)
        text = f"A in registers needs the layout {layout}; it has {a.layout}. Use gl.convert_layout."
        require(a.layout == layout, text)
    _accepted.add(key)


def check_blocks(what: str, x, bases: list[list[int]], name: str, wanted: list[list[int]]) -> None:
    """Refuse operands in a cluster if a block lacks the rows of A or the columns of B for its part of the accumulator."""
    got = [list(basis) for basis in layouts.block_bases(x.layout)]
    if got != wanted:
        text = f"the accumulator is spread over the blocks by {[list(basis) for basis in bases]}"
        refuse("layout", f"{what}: {text}, so {name} needs the cga_layout {wanted}; it has {got}.")


@known(of=(hopper,))
def warpgroup_mma(a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
    """Start a @ b + (acc if use_acc else 0) on the tensor cores; wait for it unless `is_async`."""
    if not isinstance(acc, Tensor):
        refuse("kernel", f"warpgroup_mma: the accumulator must be a tensor, got {acc!r}.")
    shape = list(acc._data.shape)
    check_wgmma(a, b, acc.layout, shape, acc.dtype)
    program = context.program()
    program.reschedule()
    p, model = program.partition, program.model
    p.wgmma_count += 1
    for name, x in (("A", a), ("B", b)):
        if isinstance(x, MemDesc):
            what = f"the wgmma that reads {name} from {x.label}"
            access(x, write=False, asynchronous=True, queue="wgmma", time=p.wgmma_count, what=what)
    a = a if isinstance(a, MemDesc) else Tensor(a.data, a.dtype, a.layout, reads=a.reads)
    # A product may add to a running product.
    source = acc if isinstance(acc, Accumulator) else Tensor(acc.data, acc.dtype, acc.layout)
    program.spend(model.issue, "issue", getattr(b, "label", ""))
    flops = 2 * a.shape[0] * a.shape[1] * b.shape[1] / program.num_ctas
    start = max(p.time, program.tensor_cores_free)
    twice = 2 if b.dtype.name in FP8_LARGEST else 1  # fp8 has twice the rate of 16 bits
    end = start + program.jitter(flops / (twice * model.mma_flops))
    program.tensor_cores_free = end
    operands = " x ".join(x.label if isinstance(x, MemDesc) else "registers" for x in (a, b))
    program.record("tensor cores", "wgmma", operands, None, start, end)
    product = _Product(a, b, source, is_true(use_acc), acc.dtype, p.wgmma_count, end, context.site())
    p.wgmmas.append(product)
    result = Accumulator(product, shape, acc.dtype, acc.layout, token=True)
    if constant(is_async, "is_async"):
        return result
    wait_products(0)
    return Tensor(product.result, acc.dtype, acc.layout)


def wait_products(outstanding) -> None:
    """Wait until all but the last `outstanding` products of the running partition are over."""
    context.program().wait_in_order("wgmma", context.partition().wgmmas, outstanding, _Product.finish)


@known(of=(tl,))
def dot(
    input, other, acc=None, input_precision=None, allow_tf32=None, max_num_imprecise_acc=None, out_dtype=gl.float32
):
    """Return the product of two of Triton's tiles, plus `acc`."""
    a, b, exact = input.data, other.data, allow_tf32 is not None and not allow_tf32
    if input.dtype.name == "fp32" and not exact and "ieee" not in str(input_precision).lower():
        refuse("kernel", 'tl.dot without input_precision="ieee": a GPU would round float32 tiles to ten bits.')
    if input.dtype != other.dtype or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        pair = " @ ".join(f"{list(x.shape)} in {x.dtype}" for x in (input, other))
        refuse("kernel", f"tl.dot: {pair} do not fit. Convert one, or look at the sizes of the blocks.")
    dtype = acc.dtype if acc is not None else gl.int32 if is_int(input.dtype) else out_dtype
    wide = {"fp64": np.float64, "int32": np.int32}.get(dtype.name, np.float32)
    result = a.astype(wide) @ b.astype(wide) + (0 if acc is None else acc.data)
    program = context.program()
    program.spend(2 * a.size * b.shape[-1] / program.model.mma_flops, "dot")
    return Tensor(round_to(result, dtype), dtype, layouts.AUTO)


@known(of=(hopper,))
def warpgroup_mma_wait(num_outstanding=0, deps=None):
    """Wait until all but the last `num_outstanding` products of this partition are over; return the tensors of `deps`."""
    if deps is None:
        refuse("kernel", "warpgroup_mma_wait: deps must be given: the accumulators that it makes readable.")
    if not isinstance(deps, (list, tuple)):
        refuse("kernel", "warpgroup_mma_wait: `deps` is a list; one dep returns a tensor, several a tuple.")
    if not deps:
        refuse("kernel", "warpgroup_mma_wait: `deps` is empty: name the accumulators that the wait makes readable.")
    context.program().reschedule()
    wait_products(num_outstanding)
    results = tuple(finished_tensor(x) for x in deps)
    return results[0] if len(results) == 1 else results


def finished_tensor(x):
    """Return an accumulator as a tensor. If its product is still running, reading the tensor is a race."""
    if isinstance(x, MemDesc):
        x._keep_alive()
    if not isinstance(x, Accumulator):
        return x
    if x.product.result is not None:
        return Tensor(x.product.result, x.dtype, x.layout)
    return Accumulator(x.product, list(x._data.shape), x.dtype, x.layout, token=False)


known("warpgroup_mma_init", of=(hopper,))(lambda value: value)
