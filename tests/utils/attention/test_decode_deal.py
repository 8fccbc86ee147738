"""Clusters that are dealt to heads by the lengths: in the simulator against float64, and their merge through memory by itself."""

import random

import pytest
import torch

pytest.importorskip("triton", reason="the simulator needs Triton for the language; there are wheels for Linux only")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tests.utils.attention.decode_cases import other_table, random_cache, relative_error
from utils import gluon_cpu
from utils.attention import decode_reference
from utils.attention.gluon.decode.cluster_plan import cluster_plan
from utils.attention.gluon.decode.deal import Share, merge_shares
from utils.attention.gluon.decode.inbox import slice_layout
from utils.attention.gluon.decode.launch import Launch
from utils.attention.gluon.decode.merge import Results
from utils.attention.gluon.decode.plan import PLACES, Case
from utils.attention.gluon.decode.work import Cache


def dealt(lengths, block, heads, cluster, most, half=0):
    """Clusters of a head of each sequence, as deal.py's docstring has it."""
    blocks = [max(1, -(-length // block)) for length in lengths]
    target = -(-sum(n + 4 for n in blocks) * heads // (PLACES // cluster))
    return [max(1, min((2 * n + 8 + half * target) // (2 * target), n // cluster, most)) for n in blocks]


@pytest.mark.parametrize(("page", "nearest"), [(None, False), (64, False), (64, True)])
@pytest.mark.parametrize(
    ("filled", "shares"),
    [
        ((700, 690, 700, 650, 700, 700, 600, 700), [1] * 8),
        ((2000, 2000, 2000, 2000), [2, 2, 2, 2]),
        ((1, 2000, 0, 130), [1, 4, 1, 1]),
        ((2000, 2000, 2000, 2), [2, 2, 2, 1]),
        ((1250, 60, 2000, 64), [2, 1, 4, 1]),
        ((0, 0, 0, 0), [1, 1, 1, 1]),
    ],
    ids=str,
)
def test_heads_have_clusters_by_their_lengths(filled, shares, page, nearest):
    batch, kv_heads, keys, most = len(filled), 8, max(*filled, 700), 4
    assert dealt(filled, 64, kv_heads, 2, most) == shares
    if nearest:
        shares = dealt(filled, 64, kv_heads, 2, most, 1)
        assert shares == ([3, 1, 4, 1] if filled[0] == 1250 else dealt(filled, 64, kv_heads, 2, most))
    k, v, _, table = random_cache(batch, kv_heads, keys, 64, torch.bfloat16, 5, page, fill=0.5)
    table = other_table(len(k), filled, page, table) if page else None
    lengths = torch.tensor(filled, dtype=torch.int32)
    q = torch.randn(batch, 2 * kv_heads, 1, 64, dtype=torch.bfloat16)
    choices = {"cluster": 2, "consumers": 0, "block_n": 64, "deal": most, "nearest": nearest, "merge": "last"}
    launch = Launch(q, k, v, True, 0, True, table, **choices)
    assert launch.grid == (2 * kv_heads, launch.plan.groups(batch, kv_heads, keys), 1)
    assert sum(shares) <= launch.grid[1] <= min(batch * most, PLACES // 2 // kv_heads + batch)
    with gluon_cpu.simulate(seed=len(str(filled))):
        out = launch(q, k, v, 0.1, lengths, table)
        again = launch(q, k, v, 0.1, lengths, table)  # finds the counters of the first call
    expected = decode_reference(q, k, v, seqlens=lengths, block_table=table, scale=0.1)
    assert (relative_error(out, expected) < 4e-3) if expected.any() else not out.any()
    assert torch.equal(out, again)


@pytest.mark.parametrize("nearest", [False, True])
def test_a_launch_has_clusters_for_all_lengths(nearest):
    rng, met = random.Random(int(nearest)), 0
    for _ in range(3000):
        batch, heads, keys = rng.randint(1, 16), rng.choice((1, 2, 4, 8, 12)), rng.choice((300, 2048, 8192, 16384))
        plan = cluster_plan(128, 4, 1, keys, batch * heads, 2, block_n=128, deal=rng.choice((2, 5, 8)), nearest=nearest)
        groups = plan.groups(batch, heads, keys)
        long, short = rng.choice((keys, rng.randint(0, keys))), rng.choice((0, 1, rng.randint(0, keys)))
        lengths = [rng.choice((long, short, rng.randint(0, keys))) for _ in range(batch)]
        needed = sum(dealt(lengths, 128, heads, 2, plan.deal, int(nearest)))
        assert batch <= needed <= groups
        met += batch < needed == groups
    assert met > 20  # it is no larger than it must be
    # Eight sequences of eight heads of keys: half of the clusters or fewer leave at once where lengths are equal.
    plan = cluster_plan(128, 4, 1, 8192, 64, 2, deal=8, nearest=nearest)
    assert plan.groups(8, 8, 8192) <= 14 and plan.groups(8, 8, 2048) <= 12


@gluon.jit
def merge_alone(
    o_ptr, top_ptr, total_ptr, out_ptr, parts_ptr, counters_ptr, count, PLAN: gl.constexpr, CASE: gl.constexpr
):
    """A program stores its slice of a share, given, and the last one of a rank stores their sum."""
    ROWS: gl.constexpr = PLAN.sent
    WIDTH: gl.constexpr = PLAN.block_d // PLAN.cluster
    one = gl.to_tensor(1)
    cache = Cache(counters_ptr, counters_ptr, one, one, one, one, one, one, one, one, PLAN, CASE)
    results = Results(out_ptr, parts_ptr, counters_ptr, one, one, one, gl.to_tensor(0.5), cache)
    program = gl.program_id(0)
    number, rank = program // PLAN.cluster, program % PLAN.cluster
    layout: gl.constexpr = slice_layout(ROWS, WIDTH)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    i = (row * WIDTH)[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    share = Share(one, one, number, count, one * 0)
    o = gl.load(o_ptr + program * ROWS * WIDTH + i)
    top = gl.load(top_ptr + number * ROWS + row)
    total = gl.load(total_ptr + number * ROWS + row)
    last, o, total = merge_shares(results, share, rank, i, row, top, o, total)
    gl.store(out_ptr + rank * ROWS * WIDTH + i, o / total[:, None], mask=last & (i >= 0))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_shares_of_a_head_are_added_up_by_the_last_one(count):
    plan = cluster_plan(128, 4, 1, 8192, 64, 2, deal=5)
    rows, width = plan.sent, 64
    torch.manual_seed(count)
    o, top = torch.randn(count, 2, rows, width), 3 * torch.randn(count, rows)
    total = torch.rand(count, rows) + 0.1
    top[0, 1], total[0, 1], o[0, :, 1] = float("-inf"), 0.0, 0.0  # a share without a key that the row sees
    out = torch.full((2, rows, width), float("nan"))
    parts = torch.full((count * 2 * rows * (width + 2),), float("nan"))
    counters = torch.zeros(64, dtype=torch.int32)
    for _ in range(2):
        with gluon_cpu.simulate():
            merge_alone[(2 * count,)](o, top, total, out, parts, counters, count, plan, Case(lengths=True), num_warps=4)
        weight = torch.exp2(0.5 * top.double())
        expected = (weight[:, None, :, None] * o.double()).sum(0) / (weight * total).sum(0)[None, :, None]
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        assert not counters.any()  # ready for the next launch
