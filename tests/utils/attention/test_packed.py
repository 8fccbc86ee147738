"""Packed sequences by the Gluon kernels: forward and backward in the simulator, and as a form of a problem."""

import math

import numpy as np
import pytest
import torch

from utils.attention import attention, last_run, make_problem
from utils.attention.masks import both, causal, documents
from utils.attention.masks.mask_mods import document_ids
from utils.attention.sequences import packed_mask
from utils.machine.device import offline_compile_support

simulates = pytest.mark.skipif(not offline_compile_support(), reason=offline_compile_support().reason)
CASES = [
    (64, (70, 100, 1, 30), True, 0),
    pytest.param(64, (130, 30), False, 20, marks=pytest.mark.slow),
    pytest.param(128, (33, 80, 90), False, 0, marks=pytest.mark.slow),
    (128, (100, 44), True, 30),
]


def visible(lengths, is_causal, window):
    """The mask (S, S) of packed sequences."""
    ids, i = document_ids(lengths), torch.arange(sum(lengths))
    mask = (ids[:, None] == ids) & ((i[:, None] >= i) | (not is_causal))
    return mask & ((i[:, None] - i).abs() < window) if window else mask


@simulates
@pytest.mark.parametrize(("head_dim", "lengths", "is_causal", "window"), CASES)
def test_kernels_match_float64(monkeypatch, head_dim, lengths, is_causal, window):
    from utils import gluon_cpu
    from utils.attention.gluon.arguments import Arguments
    from utils.attention.gluon.backward import arguments, order
    from utils.attention.gluon.backward import launch as launches
    from utils.attention.gluon.plan import packed_variant, plan_for
    from utils.attention.gluon.step5_overlapped import launch

    torch.manual_seed(0)
    tokens, scale = sum(lengths), head_dim**-0.5
    q, dout = (torch.randn(2, 2, tokens, head_dim, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(2, 1, tokens, head_dim, dtype=torch.bfloat16) for _ in range(2))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 1) for x in leaves[1:])
    scores = (leaves[0] @ keys.mT * scale).masked_fill(~visible(lengths, is_causal, window), -math.inf)
    expected, expected_lse = torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    for module in (arguments, launches):
        monkeypatch.setattr(module, "processors", lambda device: 3)  # programs have several blocks
    if window:  # pieces of all blocks, as where there are few
        pieces = lambda blocks: order.Order(blocks.heads, 0, 3, 3 * blocks.count)  # noqa: E731
        monkeypatch.setattr(launches, "best_order", pieces)
    with gluon_cpu.simulate() as run:
        plan = plan_for(5, head_dim, packed_variant(head_dim, lengths, is_causal, window, 4, 132 if window else 1))
        launch(Arguments(q, k, v, out, lse, is_causal, window, True, scale / math.log(2), plan, 3, lengths))
        found = launches.backward(dout, q, k, v, out, lse, causal=is_causal, window=window or None, lengths=lengths)
    assert run.ok and (lse - expected_lse).abs().max() < 1e-5
    wanted = [expected, *torch.autograd.grad(expected, leaves, dout.double())]
    for x, y in zip((out, *found), wanted, strict=True):
        assert (x.double() - y).norm() / y.norm() < 8e-3


def test_which_plan_packed_sequences_take():
    from utils.attention.gluon.plan import packed_variant

    many, few = (64, [372] * 44), (64, [341] * 12)  # 32 heads: 0.94 of the other's time; 4 heads: 0.88
    assert packed_variant(*many, True, 0, 32, 132) == "narrow" and packed_variant(*few, True, 0, 4, 132) == "few"
    assert {packed_variant(*many, *mask, 32, 132) for mask in ((False, 0), (True, 100))} == {""}
    assert packed_variant(64, [1638] * 10, True, 0, 32, 132) == packed_variant(128, many[1], True, 0, 32, 132) == ""


@simulates
def test_bounds_of_keys_are_those_of_queries_turned():
    from utils.attention.gluon.intervals import packed_bounds

    for lengths, is_causal, window in (((5, 1, 9), True, 0), ((5, 1, 9), False, 3), ((15,), False, 0)):
        first, behind, earliest, past = packed_bounds(lengths, is_causal, window)
        mask, i = visible(lengths, is_causal, window).numpy(), np.arange(15)
        assert (mask == ((first[:, None] <= i) & (i < behind[:, None]))).all()
        assert (mask == ((earliest <= i[:, None]) & (i[:, None] < past))).all()


def test_which_masks_are_packed_sequences():
    q, k, v = (torch.randn(1, heads, 12, 8) for heads in (2, 1, 1))
    packed = packed_mask(q, k, torch.tensor([0, 5, 12], dtype=torch.int32))
    cases = {
        packed: ((5, 7), False),
        both(causal, packed): ((5, 7), True),
        documents(5): ((5, 5, 2), False),
        both(causal, documents(4)): ((4, 4, 4), True),
    }
    for mask, (lengths, is_causal) in cases.items():
        form = make_problem(q, k, v, mask_mod=mask).plain_or_packed()
        assert (form.lengths, form.causal, form.mask_mod) == (lengths, is_causal, None)
    for mask in (documents(document_ids([5, 7])), both(packed, packed), lambda b, h, q, k: q >= k):
        assert make_problem(q, k, v, mask_mod=mask).plain_or_packed() is None
    attention(q, k, v, cu_seqlens=torch.tensor([0, 5, 12], dtype=torch.int32))
    assert torch.cuda.is_available() or last_run().backend == "sdpa"
