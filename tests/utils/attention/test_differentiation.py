"""Attention as a part of a model that learns: gradcheck in float64, checkpoints, and torch.compile, on a CPU."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.marks import slow_but_first
from utils.attention import attention, last_run, reference_gradients


def tensors(dtype=torch.float64, length=7):
    torch.manual_seed(0)
    q = torch.randn(1, 4, length, 8, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(1, 2, length + 2, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("problem", [{"causal": True}, {"causal": True, "window": 3}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("backend", ["naive", "math"])
def test_gradients_match_differences(backend, problem):
    def attend(q, k, v):
        return attention(q, k, v, backend=backend, **problem)

    assert torch.autograd.gradcheck(attend, tensors(), fast_mode=True)
    assert last_run().backend == backend


WAYS = {
    "eager": lambda attend: attend,
    "checkpointed": lambda attend: lambda q, k, v: checkpoint(attend, q, k, v, use_reentrant=False),
    "compiled": lambda attend: torch.compile(lambda q, k, v: attend(q * 1.0, k, v) * 1.0, backend="aot_eager"),
}


@pytest.mark.parametrize("way", slow_but_first([*WAYS]))  # checkpoint and torch.compile import many modules
def test_gradients_are_the_same_however_it_is_called(way):
    q, k, v = tensors()
    dout = torch.randn_like(q)
    attend = WAYS[way](lambda q, k, v: attention(q, k, v, causal=True, backend="math"))
    gradients = torch.autograd.grad(attend(q, k, v), (q, k, v), dout)
    expected = reference_gradients(q, k, v, dout, causal=True)[1]
    for x, y in zip(gradients, expected, strict=True):
        torch.testing.assert_close(x, y)
