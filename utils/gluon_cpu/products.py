"""wgmma: products of shared memory tiles on the tensor cores, asynchronous and in order.

Their operands are read and their results written until a warpgroup_mma_wait says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from . import context
from .barriers import is_true
from .context import refuse, report
from .dtypes import round_to
from .known import constant, known
from .memory import MemDesc, access
from .reports import Site
from .tensors import Tensor


class _Product:
    """One wgmma under way."""

    def __init__(self, a, b, acc, use_acc: bool, dtype, number: int, end: float, site: Site):
        self.a, self.b, self.acc, self.use_acc, self.dtype = a, b, acc, use_acc, dtype
        self.number, self.end, self.site = number, end, site
        self.result: np.ndarray | None = None

    def finish(self) -> None:
        """Multiply. Products of 16-bit values are exact in fp32, sums are fp32."""
        a = self.a.view if isinstance(self.a, MemDesc) else self.a.data
        b = self.b.view
        if self.dtype_is_tf32(self.a):
            a, b = _tf32(a), _tf32(b)
        with np.errstate(all="ignore"):
            out = np.matmul(np.ascontiguousarray(a, dtype=np.float32), np.ascontiguousarray(b, dtype=np.float32))
            if self.use_acc:
                out = out + (self.acc.product.result if isinstance(self.acc, Accumulator) else self.acc.data)
        self.result = round_to(out, self.dtype)
        self.a = self.b = self.acc = None

    @staticmethod
    def dtype_is_tf32(x) -> bool:
        return x.dtype.name == "fp32"


def _tf32(x: np.ndarray) -> np.ndarray:
    """The tensor core reads the upper 19 bits of an fp32 value."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


class Accumulator(Tensor):
    """Registers that a wgmma may still be writing; reading them before its wait is a race."""

    __slots__ = ("product", "token")

    def __init__(self, product: _Product, shape: list[int], dtype, layout, token: bool):
        super().__init__(np.broadcast_to(np.float32(np.nan), shape), dtype, layout)
        self.product, self.token = product, token

    @property
    def data(self):
        product = self.product
        if self.token and product.result is not None:
            refuse(
                "kernel",
                f"The result of the asynchronous wgmma of {product.site} is not a tensor yet, "
                "though its product is over. Read what the wait returns: assign the result, "
                "`acc = warpgroup_mma_wait(0, deps=[acc])`.",
            )
        if product.result is None:
            report(
                "race",
                f"The result of the wgmma of {product.site} is read while it is still being "
                "computed: warpgroup_mma_wait must come first, with few enough products outstanding.",
                others=(product.site,),
            )
            return self._data
        return self.product.result

    @property
    def type(self):
        if self.token:
            return _TokenType(super().type)
        return super().type


@dataclass
class _TokenType:
    """The type of what an asynchronous warpgroup_mma returns."""

    tensor_type: object


def check_wgmma(a, b, acc_layout, acc_shape: list[int], acc_dtype, precision) -> None:
    """What the instruction wgmma.mma_async accepts; a and b are shared memory, a may be registers."""

    def no(reason: str) -> None:
        refuse("layout", f"warpgroup_mma: {reason}")

    warps = context.partition().num_warps
    if not isinstance(b, MemDesc):
        no("operand B must lie in shared memory; it is a register tensor. Only A may come from registers.")
    if a.dtype.name != b.dtype.name:
        no(f"A is {a.dtype} and B is {b.dtype}; both must have the same type.")
    bits = a.dtype.primitive_bitwidth
    if a.dtype.name not in ("fp16", "bf16", "fp32"):
        no(f"gluon_cpu multiplies fp16, bf16 and tf32 (fp32) tiles; got {a.dtype}.")
    if acc_dtype.name != "fp32" and not (acc_dtype.name == "fp16" and a.dtype.name == "fp16"):
        no(f"the accumulator of {a.dtype} operands must be fp32; got {acc_dtype}.")
    if len(a.shape) != 2 or len(b.shape) != 2:
        no(f"A and B must be matrices; got shapes {list(a.shape)} and {list(b.shape)}. .reshape drops ones.")
    (m, k), (k2, n) = a.shape, b.shape
    if k != k2 or acc_shape != [m, n]:
        no(f"A {[m, k]} times B {[k2, n]} into an accumulator {acc_shape}: the shapes do not fit.")
    if not isinstance(acc_layout, gl.NVMMADistributedLayout) or list(acc_layout.version) != [3, 0]:
        no(f"the accumulator needs an NVMMADistributedLayout of version [3, 0]; it has {acc_layout}.")
    wm, wn = acc_layout.warps_per_cta
    im, inn, *ik = acc_layout.instr_shape
    if warps % 4:
        no(f"wgmma is one instruction of a warpgroup, 4 warps; this partition has {warps}.")
    if wm % 4:
        no(
            f"warps_per_cta is {[wm, wn]}; the four warps of a warpgroup lie along M, so its first must be a "
            "multiple of 4."
        )
    if im != 16:
        no(f"instr_shape {list(acc_layout.instr_shape)}: each of the four warps computes 16 rows, so M is 16.")
    if inn % 8 or not 8 <= inn <= 256:
        no(f"instr_shape {list(acc_layout.instr_shape)}: N must be a multiple of 8 up to 256.")
    if ik and ik[0] * bits != 256:
        no(f"instr_shape {list(acc_layout.instr_shape)}: K is 32 bytes, {256 // bits} for {a.dtype}.")
    if m < 16 * wm or n < inn * wn:
        no(
            f"an accumulator {acc_shape} is smaller than one instruction for all warps, {[16 * wm, inn * wn]} "
            f"(warps_per_cta {[wm, wn]}, instr_shape {list(acc_layout.instr_shape)})."
        )
    if k * bits < 256:
        no(f"K is {k}; one instruction multiplies 32 bytes along K, {256 // bits} elements of {a.dtype}.")
    for name, x in (("A", a), ("B", b)):
        if isinstance(x, MemDesc) and not isinstance(x.layout, gl.NVMMASharedLayout):
            no(f"{name} lies in shared memory with {x.layout}; the instruction reads NVMMASharedLayout only.")
    k_contiguous = (not a.layout.transposed if isinstance(a, MemDesc) else True, b.layout.transposed)
    if bits != 16 and not all(k_contiguous):
        no(
            f"{a.dtype} operands must lie with K innermost (B as a .permute((1, 0)) of [N, K]); only 16-bit types may "
            "be transposed."
        )
    if isinstance(a, Tensor):
        want = gl.DotOperandLayout(0, acc_layout, 32 // bits)
        if a.layout != want:
            no(f"A in registers needs the layout {want}; it has {a.layout}. Use gl.convert_layout.")


@known(of=(hopper,))
def warpgroup_mma(a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
    """warpgroup_mma: acc = a @ b + (acc if use_acc else 0), on the tensor cores."""
    if not isinstance(acc, Tensor):
        refuse("kernel", f"warpgroup_mma: the accumulator must be a tensor, got {acc!r}.")
    shape = list(acc._data.shape)
    check_wgmma(a, b, acc.layout, shape, acc.dtype, precision)
    program = context.program()
    program.reschedule()
    p, model = program.partition, program.model
    p.wgmma_count += 1
    me = ("wgmma", p.index)
    for name, x in (("A", a), ("B", b)):
        if isinstance(x, MemDesc):
            access(
                x,
                write=False,
                asynchronous=True,
                component=me,
                time=p.wgmma_count,
                what=f"the wgmma that reads {name} from {x.label}",
            )
    left = a if isinstance(a, MemDesc) else Tensor(a.data, a.dtype, a.layout)
    # A product may go on from one that is not waited for.
    source = acc if isinstance(acc, Accumulator) else Tensor(acc.data, acc.dtype, acc.layout)
    program.spend(model.issue, "issue", getattr(b, "label", ""))
    flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
    start = max(p.time, program.tensor_cores_free)
    end = start + program.jitter(flops / model.mma_flops)
    program.tensor_cores_free = end
    operands = " x ".join(x.label if isinstance(x, MemDesc) else "registers" for x in (a, b))
    program.record("tensor cores", "wgmma", operands, None, start, end)
    product = _Product(left, b, source, is_true(use_acc), acc.dtype, p.wgmma_count, end, context.site())
    p.wgmmas.append(product)
    result = Accumulator(product, shape, acc.dtype, acc.layout, token=True)
    if constant(is_async, "is_async"):
        return result
    wait_products(0)
    return Tensor(product.result, acc.dtype, acc.layout)


def wait_products(left: int) -> None:
    program = context.program()
    p = program.partition
    start = p.time
    while len(p.wgmmas) > left:
        product = p.wgmmas.pop(0)
        product.finish()
        p.clock["wgmma", p.index] = product.number
        p.time = max(p.time, product.end)
    if p.time > start:
        program.record("partition", "wgmma wait", "", None, start, p.time)


@known(of=(hopper,))
def warpgroup_mma_wait(num_outstanding=0, deps=None):
    """warpgroup_mma_wait: all but the last `num_outstanding` products of this partition are over."""
    if deps is None:
        refuse("kernel", "warpgroup_mma_wait: deps must be given: the accumulators that it makes readable.")
    if not isinstance(deps, (list, tuple)):
        refuse("kernel", "warpgroup_mma_wait: `deps` is a list; one dep returns a tensor, several a tuple.")
    context.program().reschedule()
    wait_products(constant(num_outstanding, "warpgroup_mma_wait's num_outstanding"))
    results = tuple(finished_tensor(x) for x in deps)
    return results[0] if len(results) == 1 else results


def finished_tensor(x):
    """An accumulator as a tensor; it stays guarded while its product is under way."""
    if not isinstance(x, Accumulator):
        return x
    if x.product.result is not None:
        return Tensor(x.product.result, x.dtype, x.layout)
    return Accumulator(x.product, list(x._data.shape), x.dtype, x.layout, token=False)


@known(of=(hopper,))
def warpgroup_mma_init(value):
    """warpgroup_mma_init: a tensor as the accumulator to start from."""
    return value
