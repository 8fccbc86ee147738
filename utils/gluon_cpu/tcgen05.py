"""tcgen05: asynchronous products with accumulators in tensor memory.

A `tcgen05_commit` after a product arrives at an mbarrier, and a wait for that mbarrier shows the end of the product. The
products and copies of one partition run in their order, so they need no waits for each other.

In a cluster each block issues its own products, unless the accumulator's layout has two_ctas. Then the first block of each pair
issues products for both blocks: they read the shared memory of both, write the tensor memory of both, and commits arrive in both.
"""

from __future__ import annotations

import math

import numpy as np
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell

from . import context, layouts
from .accesses import access
from .barriers import is_true, own_barriers
from .context import refuse, report
from .dtypes import round_to
from .known import constant, known
from .memory import MemDesc
from .products import check_blocks, exact_product
from .tensor_memory import TensorMemory

QUEUE = "tcgen05"
# {format of scaled products: the type that holds it}.
FORMATS = {"e2m1": "uint8", "e4m3": "fp8e4nv", "e5m2": "fp8e5"}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _in_pairs() -> bool:
    """Return whether pairs of blocks multiply together. That holds for all products of a kernel, or for none."""
    return any(getattr(columns.layout, "two_ctas", False) for columns in context.program().tensor_memory)


def _check_product(a, b, acc) -> None:
    """Refuse operands that tcgen05.mma does not accept."""
    if not isinstance(acc, TensorMemory):
        refuse("layout", f"tcgen05_mma: the accumulator lies in tensor memory (allocate_tensor_memory); got {acc!r}.")
    if not isinstance(b, MemDesc) or isinstance(b, TensorMemory):
        refuse("layout", f"tcgen05_mma: B lies in shared memory; got {b!r}.")
    if not isinstance(a, MemDesc):
        refuse("layout", f"tcgen05_mma: A lies in shared or in tensor memory, and not in registers; got {a!r}.")
    if len(a.shape) != 2 or len(b.shape) != 2 or acc.rank != 2:
        shapes = f"{list(a.shape)}, {list(b.shape)} and {list(acc.shape)}"
        refuse("layout", f"tcgen05_mma: A, B and the accumulator are matrices; got {shapes}. .index(i) takes one tile.")
    if acc.dtype.name not in ("fp32", "fp16"):
        refuse("layout", f"tcgen05_mma: the accumulator is fp32 or fp16; got {acc.dtype}.")
    for name, x in (("A", a), ("B", b)):
        if not isinstance(x, TensorMemory) and not isinstance(x.layout, gl.NVMMASharedLayout):
            refuse("layout", f"tcgen05_mma: {name} in shared memory needs an NVMMASharedLayout; it has {x.layout}.")
    bases = layouts.block_bases(acc.layout)
    pair = getattr(acc.layout, "two_ctas", False)
    columns = [[0, n * (2 if pair else 1)] for _, n in bases]
    if not isinstance(a, TensorMemory):
        check_blocks("tcgen05_mma", a, bases, "A", [[m, 0] for m, _ in bases])
    check_blocks("tcgen05_mma", b, bases, "B", [[0, 1], *columns[1:]] if pair else columns)


def _check_shapes(a, b, acc) -> None:
    """Refuse tiles of shapes and types that do not fit together."""
    (m, k), (k2, n) = a.shape, b.shape
    if k != k2 or list(acc.shape) != [m, n]:
        refuse("layout", f"tcgen05_mma: A {[m, k]} times B {[k2, n]} into {list(acc.shape)}: the shapes do not fit.")
    if a.dtype.name != b.dtype.name and "fp8" not in a.dtype.name:
        refuse("layout", f"tcgen05_mma: A is {a.dtype} and B is {b.dtype}; both must have the same type.")
    least = 256 // b.dtype.primitive_bitwidth
    if k % least or n % 8 or acc.layout.block[1] > 256:
        text = f"K is a multiple of {least} (32 bytes), N of 8, and an instruction has at most 256 columns"
        refuse("layout", f"tcgen05_mma: {text}; got K {k}, N {n} and a block of {acc.layout.block[1]} columns.")


def _issue(operands: list[tuple[MemDesc, bool, str]], cycles: float, label: str) -> float:
    """Put an operation into the running partition's queue, check its accesses, and return its end."""
    program = context.program()
    program.reschedule()
    p = program.partition
    p.tensor_count, p.tensor_site = p.tensor_count + 1, context.site()
    issuers = [index & ~1 for index in range(program.num_ctas)] if _in_pairs() else None
    # The queue is in order: this operation begins when all earlier operations of the partition are over.
    queues = [
        (p.blocks[issuers[index] if issuers else index].clock, (QUEUE, p.index, index))
        for index in range(program.num_ctas)
    ]
    before = [clock.get(key, 0) for clock, key in queues]
    for clock, key in queues:
        clock[key] = p.tensor_count - 1
    for x, write, words in operands:
        what = f"the {words} {x.label}"
        access(x, write=write, asynchronous=True, queue=QUEUE, time=p.tensor_count, issuers=issuers, what=what)
    for (clock, key), count in zip(queues, before, strict=True):
        clock[key] = count
    program.spend(program.model.issue, "issue", label)
    start = max(p.time, program.tensor_cores_free)
    end = start + program.jitter(cycles / program.num_ctas)
    program.tensor_cores_free = p.tensor_end = end
    program.record("tensor cores", "wgmma", label, None, start, end)
    return end


def _start(a, b, acc, scales: tuple, add: bool, work: float, multiply) -> None:
    """Start a product; multiply() returns its result, work is its number of FLOPs at the rate of 16-bit values."""
    program = context.program()
    operands = [(a, False, "tcgen05_mma that reads A from"), (b, False, "tcgen05_mma that reads B from")]
    operands += [(x, False, "tcgen05_mma that reads scales from") for x in scales]
    operands.append((acc, True, "tcgen05_mma that writes"))
    unwritten = add and not acc.written.all()
    end = _issue(operands, work / program.model.mma_flops, f"{a.label} x {b.label}")
    if unwritten:  # the product reads its accumulator
        program.unwritten_reads.append(acc.allocation.records[0][-1])

    def finish() -> None:
        for x in (a, *scales, *((acc,) if add else ())):
            if isinstance(x, TensorMemory):
                x.check_type("tcgen05_mma")
        out = multiply()
        acc._claim()
        acc.values[...] = round_to(out + acc.values if add else out, acc.dtype)

    program.later(end, finish)


def _commit_all(a, b, multicast, mbarriers, mbarrier_preds) -> None:
    shared = [x for x in (a, b) if not isinstance(x, TensorMemory)] if constant(multicast, "multicast") else ()
    for index, barrier in enumerate(mbarriers or ()):
        tcgen05_commit(barrier, pred=mbarrier_preds[index] if mbarrier_preds else True, descs=shared)


@known(of=(blackwell,))
def tcgen05_mma(a, b, acc, *, use_acc=True, pred=True, multicast=False, mbarriers=None, mbarrier_preds=None) -> None:
    """Start acc = a @ b + (acc if use_acc else 0); its end arrives at the mbarriers, as by a commit for each."""
    _check_product(a, b, acc)
    _check_shapes(a, b, acc)
    if is_true(pred):
        work = 2 * math.prod(a.shape) * b.shape[1] / (2 if b.dtype.primitive_bitwidth == 8 else 1)
        _start(a, b, acc, (), is_true(use_acc), work, lambda: exact_product(a.values, b.values, b.dtype))
    _commit_all(a, b, multicast, mbarriers, mbarrier_preds)


def _unscaled(x: MemDesc, kind: str, axis: int) -> np.ndarray:
    """Return the numbers of a tile; a byte of e2m1 has two numbers along `axis`, the lower half first."""
    data = x.values
    if kind != "e2m1":
        return data
    both = np.stack([_E2M1[data & 15], _E2M1[data >> 4]], axis=axis + 1)
    return both.reshape([size * 2 if d == axis else size for d, size in enumerate(data.shape)])


def _factors(scale: TensorMemory, k: int) -> np.ndarray:
    """Return the factor of each element: a byte is an exponent of two, an e4m3 value is the factor itself."""
    values = scale.values
    if scale.dtype.name == "uint8":
        values = np.where(values == 255, np.nan, np.exp2(values.astype(np.float32) - 127)).astype(np.float32)
    return np.repeat(values, k // values.shape[1], axis=1)


@known(of=(blackwell,))
def tcgen05_mma_scaled(
    a, b, acc, a_scale, b_scale, a_type, b_type, *, use_acc=True, pred=True, multicast=False, mbarriers=None,
    mbarrier_preds=None,
) -> None:  # fmt: skip
    """Start acc = (a * a_scale) @ (b * b_scale) + (acc if use_acc else 0): a scale for each 16 or 32 elements along K."""
    _check_product(a, b, acc)
    packed = [2 if kind == "e2m1" else 1 for kind in (a_type, b_type)]
    (m, k), (k2, n) = a.shape, b.shape
    k, k2 = k * packed[0], k2 * packed[1]
    if k != k2 or list(acc.shape) != [m, n] or acc.layout.block[0] != 128:
        text = f"A {[m, k]} times B {[k2, n]} into {list(acc.shape)}, blocks of {acc.layout.block[0]} rows"
        refuse("layout", f"tcgen05_mma_scaled: {text}: the shapes do not fit. Blocks have 128 rows.")
    for name, x, kind, scale, rows in (("A", a, a_type, a_scale, m), ("B", b, b_type, b_scale, n)):
        if FORMATS.get(kind) != x.dtype.name:
            refuse("layout", f"tcgen05_mma_scaled: {name} is {x.dtype}; the format {kind} is one of {FORMATS}.")
        if not isinstance(scale, TensorMemory) or list(scale.shape) not in ([rows, k // 32], [rows, k // 16]):
            text = f"the scales of {name} lie in tensor memory, {[rows, k // 32]} or, for nvfp4, {[rows, k // 16]}"
            refuse("layout", f"tcgen05_mma_scaled: {text}; got {scale!r}.")

    def multiply() -> np.ndarray:
        left = _unscaled(a, a_type, 1) * _factors(a_scale, k)
        return np.matmul(left, _unscaled(b, b_type, 0) * _factors(b_scale, k).T)

    if is_true(pred):
        _start(a, b, acc, (a_scale, b_scale), is_true(use_acc), 2 * m * n * k / (2 * min(packed)), multiply)
    _commit_all(a, b, multicast, mbarriers, mbarrier_preds)


@known(of=(blackwell,))
def tcgen05_copy(src, dst) -> None:
    """Start a copy from shared memory to tensor memory, in order with the products."""
    if not isinstance(dst, TensorMemory) or not isinstance(src, MemDesc) or isinstance(src, TensorMemory):
        refuse("layout", f"tcgen05_copy takes shared memory and tensor memory; got {src!r} and {dst!r}.")
    dst.check_value(src)
    operands = [(src, False, "tcgen05_copy that reads"), (dst, True, "tcgen05_copy that writes")]
    end = _issue(operands, src.nbytes / context.program().model.shared_bytes, f"{src.label} to {dst.label}")

    def finish() -> None:
        dst._claim()
        dst.values[...] = src.values

    context.program().later(end, finish)


def _committers(block: int, descs: tuple) -> list[int]:
    """Return the blocks with commits for a block: the block itself, and with `descs` the blocks that multiply the same tiles."""
    blocks, step = context.program().num_ctas, 2 if _in_pairs() else 1
    own = block - block % step

    def share(desc, other: int) -> bool:
        bases = layouts.block_bases(desc.layout)
        return not any(any(basis) for bit, basis in enumerate(bases) if (own ^ other) >> bit & 1)

    return [other for other in range(0, blocks, step) if other == own or any(share(desc, other) for desc in descs)]


@known(of=(blackwell,))
def tcgen05_commit(barrier, pred=True, descs=()) -> None:
    """Let the end of all products and copies so far of this partition arrive at an mbarrier."""
    if not is_true(pred):
        return
    program = context.program()
    program.reschedule()
    p, site = program.partition, context.site()
    end, count, step = max(p.time, p.tensor_end), p.tensor_count, 2 if _in_pairs() else 1
    arrivals = []
    for bar, block in zip(own_barriers(barrier, "tcgen05_commit"), p.blocks, strict=True):
        for committer in _committers(block.index, descs):
            by = p.blocks[committer]
            bar.check_visible(by)
            ends = {(QUEUE, p.index, index): count for index in range(committer, committer + step)}
            arrivals.append((bar, by.copy(ends), p.label(by)))

    def finish() -> None:
        for bar, knowledge, who in arrivals:
            bar.learn_end_of_copy(knowledge)
            bar.count_arrivals(1, "tcgen05_commit", who, site, end)

    program.later(end, finish)


def finish(program) -> None:
    """Check at the end of a program that some partition has waited for the last operation of each partition."""
    if program.pair_signals and not _in_pairs():
        site, label = program.pair_signals[0]
        text = f"a copy signals {label}, which two blocks share; only kernels whose products run in pairs (two_ctas) may do so"
        report("layout", f"{text}. mbarrier.allocate_mbarrier() gives each block its own.", at=site)
    for p in program.partitions:
        known_count = max(block.clock.get((QUEUE, p.index, 0), 0) for q in program.partitions for block in q.blocks)
        if known_count < p.tensor_count:
            text = "tcgen05 operations may still run when the kernel ends: nothing waits for the last one"
            hint = "tcgen05_commit(bar) after it, and mbarrier.wait(bar, ...)"
            report("unfinished", f"{text}. {hint}.", at=p.tensor_site, partition=p.name)
