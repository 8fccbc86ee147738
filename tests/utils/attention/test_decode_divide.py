"""Clusters that are divided among heads by the lengths: in the simulator, against float64 and against the rule in Python."""

import random

import pytest
import torch

pytest.importorskip("triton", reason="the simulator needs Triton for the language; there are wheels for Linux only")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tests.utils.attention.decode_cases import other_table, random_cache, relative_error
from utils import gluon_cpu
from utils.attention import decode_reference
from utils.attention.gluon.decode import divide
from utils.attention.gluon.decode.cluster_plan import cluster_plan
from utils.attention.gluon.decode.launch import Launch
from utils.attention.gluon.decode.plan import LOAD, OVERHEAD, PLACES, SLACK, Case
from utils.attention.gluon.decode.work import Cache


def divided(lengths, block, heads, cluster, most):
    """Programs of a head of each sequence, as divide.py's docstring has it."""
    weights = [max(1, -(-length // block)) + OVERHEAD for length in lengths]
    sizes = [cluster >> k for k in range(most + 1)]

    def of_total(total):
        return [min(n for n in sizes if n == cluster or w * PLACES * LOAD[1] <= LOAD[0] * total * n) for w in weights]

    total = sum(weights) * heads
    found = of_total(total)
    if max(w / n for w, n in zip(weights, found, strict=True)) <= sum(weights) / sum(found) + SLACK + 1e-9:
        return found
    return [cluster] * len(lengths)


@pytest.mark.parametrize("page", [None, 64])
@pytest.mark.parametrize(
    ("filled", "shares"),
    [
        ((700, 690, 700, 650, 700, 700, 600, 700), [2] * 8),
        ((2000, 2000, 2000, 2000), [4] * 4),
        ((1, 2000, 0, 130), [4, 8, 4, 4]),
        ((2000, 2000, 2000, 2), [8, 8, 8, 2]),
        ((1250, 60, 2000, 64), [8, 2, 8, 2]),
        ((2000, *[60] * 14, 0), [4, *[1] * 15]),
        ((0, 0, 0, 0), [4] * 4),
        ((1900, 300), [8, 8]),
    ],
    ids=str,
)
def test_heads_have_programs_by_their_lengths(filled, shares, page):
    batch, kv_heads, keys = len(filled), 8, max(*filled, 700)
    assert divided(filled, 64, kv_heads, 8, 3) == shares
    k, v, _, table = random_cache(batch, kv_heads, keys, 64, torch.bfloat16, 5, page, fill=0.5)
    table = other_table(len(k), filled, page, table) if page else None
    lengths = torch.tensor(filled, dtype=torch.int32)
    q = torch.randn(batch, 2 * kv_heads, 1, 64, dtype=torch.bfloat16)
    choices = {"cluster": 8, "consumers": 0, "block_n": 64, "per_sm": 2, "halvings": 3, "merge": "last"}
    launch = Launch(q, k, v, True, 0, True, table, **choices)
    assert launch.grid == (8 * kv_heads, batch, 1)
    with gluon_cpu.simulate(seed=len(str(filled))):
        out = launch(q, k, v, 0.1, lengths, table)
        again = launch(q, k, v, 0.1, lengths, table)  # finds the counters of the first call
    expected = decode_reference(q, k, v, seqlens=lengths, block_table=table, scale=0.1)
    assert (relative_error(out, expected) < 4e-3) if expected.any() else not out.any()
    assert torch.equal(out, again)


@gluon.jit
def places(lens_ptr, found_ptr, batch, kv_heads, PLAN: gl.constexpr, CASE: gl.constexpr):
    """Store where each cluster stands."""
    one = gl.to_tensor(1)
    cache = Cache(lens_ptr, lens_ptr, one, batch, kv_heads, one, one, one, one, PLAN, CASE)
    number = gl.program_id(0)
    place = divide.find(cache, kv_heads, number, divide.guess(cache, kv_heads, number))[0]
    gl.store(found_ptr + 3 * number, place.b)
    gl.store(found_ptr + 3 * number + 1, place.number)
    gl.store(found_ptr + 3 * number + 2, place.halvings)


def with_work(sizes, batch, kv_heads, cluster, most):
    """Which clusters have work, in the order of launch: the first ones, or sixteen of eight that lie evenly where the guess is right."""
    options = [cluster >> k for k in range(most + 1)]
    even = min(n for n in options if n == cluster or PLACES * LOAD[1] <= LOAD[0] * batch * kv_heads * n)
    count = sum(kv_heads * n // cluster for n in sizes)
    if set(sizes) == {even} and even < cluster == 8 and count == 16:
        return [*range(8), *range(15, 23)]
    return list(range(count))


@pytest.mark.parametrize(("batch", "cuts"), [(8, 2), (16, 3), (7, 1), (2, 0)])
def test_sixteen_clusters_with_equal_lengths_lie_evenly(batch, cuts):
    plan = cluster_plan(128, 4, 1, 8192, 8 * batch, 8, block_n=64, per_sm=2, halvings=3)
    case = Case(lengths=True, batch_block=1 << (batch - 1).bit_length())
    found = torch.full((batch * 8, 3), -1, dtype=torch.int32)
    with gluon_cpu.simulate():
        places[(len(found),)](torch.full((batch,), 8192, dtype=torch.int32), found, batch, 8, plan, case, num_warps=4)
    numbers = [number for number, row in enumerate(found.tolist()) if row[0] < batch]
    assert numbers == ([*range(8), *range(15, 23)] if batch in (8, 16) else list(range(8 * batch >> cuts)))
    used = found[numbers]
    assert [tuple(row) for row in used.tolist()] == [(b, i, cuts) for b in range(batch) for i in range(8 >> cuts)]


def test_every_head_has_its_team_once_and_long_ones_come_first():
    rng, seen = random.Random(0), set()
    for _ in range(60):
        kv_heads, cluster = rng.choice([(8, 8), (4, 16), (16, 4), (8, 2)])
        most = min(3, cluster.bit_length() - 1, kv_heads.bit_length() - 1)
        batch, keys = rng.randint(2, 16), rng.choice((300, 2048, 8192, 16384))
        long, short = rng.choice((keys, rng.randint(0, keys))), rng.choice((0, 1, rng.randint(0, keys)))
        lengths = [rng.choice((long, short, rng.randint(0, keys))) for _ in range(batch)]
        if rng.random() < 0.2:
            lengths = [long] * batch
        plan = cluster_plan(128, 4, 1, 16384, batch * kv_heads, cluster, block_n=64, per_sm=2, halvings=most)
        case = Case(lengths=True, batch_block=1 << (batch - 1).bit_length())
        found = torch.full((batch * kv_heads, 3), -1, dtype=torch.int32)
        with gluon_cpu.simulate():
            places[(len(found),)](
                torch.tensor(lengths, dtype=torch.int32), found, batch, kv_heads, plan, case, num_warps=4
            )
        sizes = divided(lengths, 64, kv_heads, cluster, most)
        used = [row for row in found.tolist() if row[0] < batch]
        expected = {
            (b, i, (cluster // n).bit_length() - 1) for b, n in enumerate(sizes) for i in range(kv_heads * n // cluster)
        }
        assert len(used) == len(expected) and {tuple(row) for row in used} == expected
        numbers = [number for number, row in enumerate(found.tolist()) if row[0] < batch]
        assert numbers == with_work(sizes, batch, kv_heads, cluster, most)
        if len(set(sizes)) > 1:
            assert [row[0] for row in used] == sorted(
                (row[0] for row in used), key=lambda b: (-max(1, -(-lengths[b] // 64)), b)
            )
        seen |= set(sizes)
    assert seen == {1, 2, 4, 8, 16}
