"""Clusters that merge in shared memory, without a GPU: what is sent, to whom, and what is added up, against float64."""

import pytest
import torch

pytest.importorskip("triton", reason="the simulator needs Triton for the language; there are wheels for Linux only")

from tests.utils.attention.cluster_exchange import clusters_simulated
from tests.utils.attention.decode_cases import other_table, random_cache, relative_error
from utils.attention import decode_reference
from utils.attention.gluon.decode.launch import Launch

CASES = {  # sequences, heads, heads of keys, new tokens, keys, head dimension, page; lengths; choices
    "one token": ((1, 4, 1, 1, 1000, 128, None), None, {"cluster": 4}),
    "the case that failed once": (
        (4, 8, 2, 3, 2000, 128, 256),
        (2000, 0, 3, 700),
        {"cluster": 2, "consumers": 1, "block_n": 64},
    ),
    "keys as rows, two an SM": (
        (2, 4, 2, 2, 900, 128, 64),
        (900, 70),
        {"cluster": 4, "block_n": 64, "per_sm": 2, "consumers": 0},
    ),
    "query rows as rows, an inbox in the ring": ((1, 4, 1, 16, 700, 128, None), None, {"cluster": 2, "block_n": 64}),
    "two tiles, rows and columns that are none": (
        (1, 6, 2, 11, 500, 80, None),
        None,
        {"cluster": 2, "consumers": 0, "block_n": 64},
    ),
    "sixteen programs": ((1, 4, 1, 1, 1100, 64, None), None, {"cluster": 16, "block_n": 64}),
    "head dimension 200": ((1, 4, 1, 2, 600, 200, None), None, {"cluster": 4}),
    "halves and quarters of clusters, a long sequence": (
        (4, 16, 8, 2, 1500, 64, 256),
        (130, 1500, 0, 64),
        {"cluster": 8, "consumers": 0, "block_n": 64, "per_sm": 2, "halvings": 3},
    ),
    "whole clusters and quarters": (
        (12, 8, 4, 1, 1300, 128, 64),
        (1300, *[60] * 10, 0),
        {"cluster": 16, "consumers": 0, "block_n": 64, "per_sm": 2, "halvings": 2},
    ),
    "one program for each head, 48 rows": (
        (8, 12, 2, 8, 300, 80, None),
        (300,) * 8,
        {"cluster": 2, "consumers": 1, "block_n": 64, "per_sm": 2, "slots": 4, "halvings": 1},
    ),
    "one row": ((1, 1, 1, 1, 300, 64, None), None, {"cluster": 2, "block_n": 64}),
}


@pytest.mark.parametrize(("sizes", "filled", "choices"), CASES.values(), ids=CASES)
def test_each_program_gets_what_it_expects_and_adds_it_up(sizes, filled, choices):
    batch, heads, kv_heads, sq, keys, head_dim, page = sizes
    k, v, _, table = random_cache(batch, kv_heads, keys, head_dim, torch.bfloat16, 3, page, fill=0.5)
    lengths = torch.tensor(filled, dtype=torch.int32) if filled else None
    if page:
        table = other_table(len(k), filled, page, table)
    q = torch.randn(batch, heads, sq, head_dim, dtype=torch.bfloat16)
    launch = Launch(q, k, v, True, 0, filled is not None, table, **choices)
    assert launch.plan.merge == "cluster" and launch.plan.cluster == choices["cluster"]
    # Triton's launcher multiplies the grid by the size of a cluster; here the programs of a cluster are neighbours.
    launch.grid = (launch.grid[0] * launch.plan.cluster, *launch.grid[1:])
    with clusters_simulated(launch.plan.cluster, seed=len(str(sizes))) as exchange:
        launch(q, k, v, 0.1, lengths, table)
        exchange.run_again()
        out = launch(q, k, v, 0.1, lengths, table)
    assert not out.isnan().any()
    assert relative_error(out, decode_reference(q, k, v, seqlens=lengths, block_table=table, scale=0.1)) < 4e-3


def test_inboxes_in_the_ring_and_beside_it_are_among_the_cases():
    in_ring = set()
    for (batch, heads, kv_heads, sq, keys, head_dim, page), filled, choices in CASES.values():
        q, k = (
            torch.zeros(batch, heads, sq, head_dim).bfloat16(),
            torch.zeros(batch, kv_heads, keys, head_dim).bfloat16(),
        )
        if page is None:
            in_ring.add(Launch(q, k, k, True, 0, filled is not None, None, **choices).plan.inbox_in_ring)
    assert in_ring == {True, False}
