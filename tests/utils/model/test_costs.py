"""The number of query-key pairs against a count of all of them."""

import pytest
import torch

from utils.model.costs import attended_pairs


@pytest.mark.parametrize("sq, sk", [(1, 1), (1, 9), (9, 9), (4, 9), (7, 30)])
@pytest.mark.parametrize("window", [None, 1, 3, 5, 9, 100])
def test_attended_pairs_counts_the_mask(sq, sk, window):
    distance = torch.arange(sk - sq, sk)[:, None] - torch.arange(sk)
    seen = (distance >= 0) & (distance < (window or sk))
    assert attended_pairs(sq, sk, causal=True, window=window) == int(seen.sum())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(sq=0, sk=4), "sq is 0; it must be a whole number"),
        (dict(sq=4, sk=4, window=2), "needs causal=True"),
        (dict(sq=5, sk=4, causal=True), "5 queries over 4 keys"),
        (dict(sq=4, sk=4, causal=True, window=0), "window is 0"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        attended_pairs(**arguments)
