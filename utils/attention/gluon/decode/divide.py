"""Clusters divided among heads by the lengths: each program works out for itself which head it has, and how many share that head.

With lengths the host does not know how long a head is. A whole cluster for each head is the fastest way for a long sequence among
short ones; where lengths are equal it makes more programs than run at once, and each costs some microseconds to begin and to end.
So a cluster may be halved, and halved again: its halves, quarters or eighths, the teams, have neighbouring heads of one sequence, and
each merges in shared memory as a whole cluster does. Each program reads all lengths, a few numbers, and finds its team; clusters
that are not needed leave at once.

    weight      blocks of a head, and OVERHEAD for what a program costs whatever it reads
    halvings    as many as leave a program at most LOAD times what each of PLACES programs would have of all weight: then all begin at
                once. None where some would read on for long when the others have ended: the GPU starts programs as others end
    order       heads of the longest sequence come first
    guess       for equal lengths a program's place is known without them: it asks for the page numbers of its first blocks beside
                the lengths, and once more if these differ
"""

# No `from __future__ import annotations` here: an aggregate checks its fields against the annotated types.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.decode import plan
from utils.attention.gluon.decode.blocks import page_numbers
from utils.attention.gluon.decode.inbox import Team, power
from utils.attention.gluon.decode.work import Cursor
from utils.attention.gluon.shared import aggregate

OVERHEAD = gl.constexpr(plan.OVERHEAD)
SLACK = gl.constexpr(plan.SLACK)
# weight * 2^halvings / cluster <= LOAD * total / PLACES, in whole numbers
LEFT = gl.constexpr(plan.PLACES * plan.LOAD[1])
RIGHT = gl.constexpr(plan.LOAD[0])


@aggregate
class Place:
    """Where a cluster stands: sequence (none: behind the last one), its number among those of the sequence, and its halvings."""

    b: gl.tensor
    number: gl.tensor
    halvings: gl.tensor

    @gluon.constexpr_function
    def __init__(self, b, number, halvings):
        self.b = b
        self.number = number
        self.halvings = halvings

    @gluon.jit
    def team(self, rank, tiles, tile, CLUSTER: gl.constexpr):
        """The team of program `rank` of this cluster, and its head: number of a head of keys times tiles of queries."""
        bits = power(CLUSTER) - self.halvings
        own = rank >> bits  # of the cluster's teams
        team = Team(own << bits, rank - (own << bits), bits)
        return team, ((self.number << self.halvings) + own) * tiles + tile


@gluon.jit
def halvings(cache, weight, total):
    """How often a cluster is halved for heads of this weight; total: weight of all heads, or 0 so that none is halved."""
    CLUSTER: gl.constexpr = cache.PLAN.cluster
    BASE: gl.constexpr = cache.PLAN.base
    found = weight * 0 + BASE
    for k in gl.static_range(BASE + 1, cache.PLAN.halvings + 1):
        found += ((weight << k) * LEFT <= total * (cache.PLAN.load * CLUSTER)).to(gl.int32)
    return found


@gluon.jit
def even_enough(cache, weights, cuts):
    """Whether the longest share of a program is at most SLACK blocks more than the mean."""
    CLUSTER: gl.constexpr = cache.PLAN.cluster
    programs = gl.sum(gl.where(weights > 0, CLUSTER >> cuts, 0), 0)
    return gl.max(weights << cuts, 0) * programs <= CLUSTER * (gl.sum(weights, 0) + SLACK * programs)


@gluon.jit
def spread(number):
    """The place in the order of work of cluster `number` in the order of launch, so that sixteen clusters with work lie evenly.

    The GPU gives a cluster of eight to each of its eight GPCs in turn; the next seven go to the GPCs that have eight more free SMs, all but
    one, and the eight behind them again to each GPC in turn. Which GPC is the first one is another one at each launch. So the first eight
    and those eight lie evenly, and not the first sixteen.
    """
    earlier = gl.where(number < 23, number - 7, number)
    later = gl.where(number < 15, number + 8, earlier)
    return gl.where(number < 8, number, later)


@gluon.jit
def guess(cache, kv_heads, number):
    """The place of cluster `number` if all lengths are equal."""
    k = halvings(cache, gl.to_tensor(1), cache.batch * cache.heads)
    each = kv_heads >> k
    b = number // each
    return Place(b, number - b * each, k)


@gluon.jit
def find(cache, kv_heads, number, guessed):
    """The place of cluster `number`, from the lengths, and whether it is another one than was guessed."""
    ALL: gl.constexpr = cache.CASE.batch_block
    # Rows stand for the sequence in question, one a lane; columns for all others, which each thread holds by itself.
    layout: gl.constexpr = gl.BlockedLayout([1, ALL], [32, 1], [gl.num_warps(), 1], [1, 0])
    one = gl.arange(0, ALL, gl.SliceLayout(1, layout))
    other = gl.arange(0, ALL, gl.SliceLayout(0, layout))
    length = gl.load(cache.lens_ptr + one, mask=one < cache.batch, other=0)
    lengths = gl.load(cache.lens_ptr + other, mask=other < cache.batch, other=0)
    weights = gl.where(other < cache.batch, cache.blocks(lengths) + OVERHEAD, 0)
    total = gl.sum(weights, 0) * cache.heads
    cuts = halvings(cache, weights, total)
    if not even_enough(cache, weights, cuts):
        total = 0 * total
        cuts = halvings(cache, weights, total)
    differs = (cuts != guessed.halvings) & (other < cache.batch)
    changed = gl.max(differs.to(gl.int32), 0) > 0
    b = guessed.b
    within = guessed.number
    k = guessed.halvings
    if changed:
        weight = cache.blocks(length) + OVERHEAD
        cut = halvings(cache, weight, total)
        clusters = gl.where(other < cache.batch, kv_heads >> cuts, 0)
        longer = weights[None, :] > weight[:, None]
        before = longer | ((weights[None, :] == weight[:, None]) & (other[None, :] < one[:, None]))
        # How many clusters the sequences in front of this one have.
        begin = gl.sum(gl.where(before, clusters[None, :].broadcast_to([ALL, ALL]), 0), 1)
        mine = (number >= begin) & (number < begin + (kv_heads >> cut)) & (one < cache.batch)
        # One lane at most has something to say: its three numbers in one sum, and 1 so that none is not sequence 0.
        said = gl.sum(gl.where(mine, 1 + cut + 8 * one + (number - begin) * (8 * ALL), 0), 0)
        k = gl.maximum(said - 1, 0) % 8
        b = gl.where(said > 0, gl.maximum(said - 1, 0) // 8 % ALL, cache.batch)
        within = gl.maximum(said - 1, 0) // (8 * ALL)
    return Place(b, within, k), changed


@gluon.jit
def first_pages(cache, b, head, team):
    """Page numbers of the blocks that a program's ring has room for."""
    AHEAD: gl.constexpr = cache.PLAN.slots // 2
    none = head * 0
    start = Cursor(b, head, team.rank, none, none, none)
    numbers = ()
    for i in gl.static_range(AHEAD):
        numbers = numbers + (page_numbers(cache, start.behind(i << team.bits)),)  # noqa: RUF005
    return numbers


@gluon.jit
def first_block(cache, b, head, team):
    """A program's first block, and how many it has: the programs of a team take a head's blocks in turn."""
    length = cache.length(b)
    blocks = cache.blocks(length)
    # A program behind the last block computes one all the same: all its scores are masked, and its sums are zero.
    n = gl.maximum((blocks - team.rank + (1 << team.bits) - 1) >> team.bits, 1)
    return Cursor(b, head, team.rank, length, length * 0, blocks), n
