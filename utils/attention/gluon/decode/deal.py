"""Clusters dealt to heads by the lengths: each works out for itself which head it has, and which share of it.

With lengths the host does not know how long a head is. A cluster of two programs for each head is the fastest way for equal lengths, and
too little for a long sequence among short ones. So more clusters are launched than there are heads, and each program reads all lengths
(a few numbers, asked for beside the first page numbers), deals 128 programs to the heads in proportion to their blocks, and finds
itself in the deal; clusters that are not needed leave at once. Heads of the longest sequence come first. A head that has several
clusters is merged through memory by the last one that stores its share.

    weight      blocks of a head, and OVERHEAD for what a cluster costs whatever its length
    shares      weight / (weight of all / clusters that run at once), rounded down, or to the nearest number: memory is as fast with a
                third of the SMs, so a head may be longer than the mean before a second cluster pays for its merge
    even        lengths, where no head has more than one cluster, give sequence g to the clusters (., g), whose page numbers are asked for
                before the lengths are there
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.decode import plan
from utils.attention.gluon.decode.blocks import page_numbers
from utils.attention.gluon.decode.work import Cursor
from utils.attention.gluon.shared import MINUS_INF, aggregate, thread_barrier

OVERHEAD = gl.constexpr(plan.OVERHEAD)
PLACES = gl.constexpr(plan.PLACES)


@aggregate
class Share:
    """A cluster's share of a head."""

    b: gl.tensor  # sequence
    length: gl.tensor
    number: gl.tensor  # of this share
    count: gl.tensor  # shares of the head; 0: this cluster is not needed
    first: gl.tensor  # number of the head's first program among all programs that have work

    @gluon.constexpr_function
    def __init__(self, b, length, number, count, first):
        self.b = b
        self.length = length
        self.number = number
        self.count = count
        self.first = first


@gluon.jit
def shares(cache, length, exists, target):
    """Weight of a head of such a sequence, and its shares."""
    PLAN: gl.constexpr = cache.PLAN
    blocks = cache.blocks(length)
    weight = gl.where(exists, blocks + OVERHEAD, 0)
    half: gl.constexpr = 1 if PLAN.nearest else 0
    count = gl.minimum(gl.minimum((2 * weight + half * target) // (2 * target), blocks // PLAN.cluster), PLAN.deal)
    return weight, gl.where(exists, gl.maximum(count, 1), 0)


@gluon.jit
def deal(cache, head, group, target):
    """The share of cluster (head, group): heads of the longest sequence come first, each share of a head in a group of its own."""
    PLAN: gl.constexpr = cache.PLAN
    ALL: gl.constexpr = cache.CASE.batch_block
    # Rows stand for the sequence in question, one a lane; columns for all others, which each thread holds by itself.
    layout: gl.constexpr = gl.BlockedLayout([1, ALL], [32, 1], [gl.num_warps(), 1], [1, 0])
    one = gl.arange(0, ALL, gl.SliceLayout(1, layout))
    other = gl.arange(0, ALL, gl.SliceLayout(0, layout))
    length = gl.load(cache.lens_ptr + one, mask=one < cache.batch, other=0)
    lengths = gl.load(cache.lens_ptr + other, mask=other < cache.batch, other=0)
    weight, count = shares(cache, length, one < cache.batch, target)
    weights, counts = shares(cache, lengths, other < cache.batch, target)
    longer = weights[None, :] > weight[:, None]
    equal = weights[None, :] == weight[:, None]
    before = longer | (equal & (other[None, :] < one[:, None]))
    # How many groups the sequences in front of this one have.
    begin = gl.sum(gl.where(before, counts[None, :].broadcast_to([ALL, ALL]), 0), 1)
    mine = (group >= begin) & (group < begin + count)
    b = gl.sum(gl.where(mine, one, 0), 0)
    number = gl.sum(gl.where(mine, group - begin, 0), 0)
    of = gl.sum(gl.where(mine, count, 0), 0)
    own_length = gl.sum(gl.where(mine, length, 0), 0)
    first = ((group - number) * cache.heads + head * of) * PLAN.cluster
    return b, own_length, number, of, first


@gluon.jit
def first_pages(cache, b, head, first, step):
    """Page numbers of the blocks that a program's ring has room for."""
    AHEAD: gl.constexpr = cache.PLAN.slots // 2
    none = head * 0
    start = Cursor(b, head, first, none, none, none)
    numbers = ()
    for i in gl.static_range(AHEAD):
        numbers = numbers + (page_numbers(cache, start.behind(i * step)),)  # noqa: RUF005
    return numbers


@gluon.jit
def ask(cache, head, group, rank):
    """What a program loads before anything else: all lengths, one a lane, its own, and its first pages, where sequence g has group g."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    one = gl.arange(0, cache.CASE.batch_block, layout)
    lengths = gl.load(cache.lens_ptr + one, mask=one < cache.batch, other=0)
    return lengths, cache.length(group), first_pages(cache, group, head, rank, cache.PLAN.cluster)


@gluon.jit
def own_share(cache, head, group, rank, asked):
    """The share of the cluster (head, group), and the page numbers of the first blocks of its program `rank`."""
    CLUSTER: gl.constexpr = cache.PLAN.cluster
    lengths, length, numbers = asked
    one = gl.arange(0, cache.CASE.batch_block, lengths.type.layout)
    weight = gl.where(one < cache.batch, cache.blocks(lengths) + OVERHEAD, 0)
    # The weight that is worth a cluster. Where none is worth two, each head has one, and group g is sequence g.
    target = gl.cdiv(gl.sum(weight, 0) * cache.heads, PLACES // CLUSTER)
    b = group
    number = group * 0
    count = (group < cache.batch).to(gl.int32)
    first = (group * cache.heads + head) * CLUSTER
    twice: gl.constexpr = 3 if cache.PLAN.nearest else 4
    if 2 * gl.max(weight, 0) >= twice * target:
        b, length, number, count, first = deal(cache, head, group, target)
        numbers = first_pages(cache, b, head, number * CLUSTER + rank, count * CLUSTER)
    return Share(b, length, number, count, first), numbers


@gluon.jit
def first_block(cache, share, head, rank):
    """A program's first block, how many it has, and from one to the next."""
    CLUSTER: gl.constexpr = cache.PLAN.cluster
    blocks = cache.blocks(share.length)
    step = share.count * CLUSTER
    first = share.number * CLUSTER + rank
    n = gl.maximum((blocks - first + (step - 1)) // step, 1)
    return Cursor(share.b, head, first, share.length, share.length * 0, blocks), n, step


@gluon.jit
def merge_shares(results, share, rank, i, row, top, o, total):
    """Store a program's slice of its head's share; who stores the last one adds them up: whether this program does, output, sums.

    i: numbers of the slice, [rows, width] as o; row: of the rows, as their maxima `top` and sums `total`.
    """
    PLAN: gl.constexpr = results.cache.PLAN
    ROWS: gl.constexpr = PLAN.sent
    WIDTH: gl.constexpr = PLAN.block_d // PLAN.cluster
    SIZE: gl.constexpr = ROWS * (WIDTH + 2)
    MOST: gl.constexpr = PLAN.deal
    own = results.parts_ptr + (share.first + rank) * SIZE
    part = own + share.number * (PLAN.cluster * SIZE)
    sums = ROWS * WIDTH + 2 * row
    gl.store(part + i, o)
    gl.store(part + sums, top)
    gl.store(part + sums + 1, total)
    thread_barrier()  # one thread says so for all: without it, another's numbers might not be stored yet
    counter = results.counters_ptr + share.first + rank
    last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1 == share.count
    if last:
        thread_barrier()  # one thread has seen that: the others may read only behind it
        gl.store(counter, 0)  # for the next launch
        # All of them are under way at once.
        maxima = ()
        totals = ()
        values = ()
        top = gl.full_like(top, 0.0) + MINUS_INF
        for k in gl.static_range(MOST):
            part = own + k * (PLAN.cluster * SIZE)
            here = k < share.count
            m = gl.load(part + sums, mask=here & (row >= 0), other=MINUS_INF, cache_modifier=".cg")
            of_part = gl.load(part + sums + 1, mask=here & (row >= 0), other=0.0, cache_modifier=".cg")
            numbers = gl.load(part + i, mask=here & (i >= 0), other=0.0, cache_modifier=".cg")
            maxima = maxima + (m,)  # noqa: RUF005
            totals = totals + (of_part,)  # noqa: RUF005
            values = values + (numbers,)  # noqa: RUF005
            top = gl.maximum(top, m)
        shifted = gl.where(top == MINUS_INF, 0.0, top * results.c)
        o = gl.full_like(o, 0.0)
        total = gl.full_like(total, 0.0)
        for k in gl.static_range(MOST):
            weight = gl.exp2(maxima[k] * results.c - shifted)
            total += weight * totals[k]
            o += weight[:, None] * values[k]
    return last, o, total
