"""Question 1.3: a pin allows one backend alone, runs once, copies nothing, and refuses with torch's own reasons."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from instructor.checks.common import Draw
from instructor.checks.lab4_sdpa.common import KNOCKED_OUT, knock_out, other_refusals, reasons_of
from utils.checking import OperationWatch, expect_close
from utils.checking.labs.lab4_sdpa.common import BACKENDS, attentions, check, replace_answers
from utils.checking.labs.lab4_sdpa.dispatch import expect_pinned, expect_ran_once, expect_refused
from utils.checking.watching import VIEWS


@check("1.3", "A pin that pins")
def pinned_sdpa(pinned_sdpa, seed=None):
    """Check that only the requested backend runs, or that an error gives torch's reason. No setting may change."""
    draw = Draw(seed)
    (q, k, v), calls = _calls_to_pin(draw, draw.size(9, 20), 16)
    with replace_answers(pinned_sdpa, {"why_not": reasons_of}):
        for backend in ("math", "flash"):
            for tensors, options in calls:
                got, what = expect_pinned(pinned_sdpa, backend, tensors, options)
                expected = F.scaled_dot_product_attention(*(t.double() for t in tensors), **_in_float64(options))
                near = {"rtol": 1e-4, "atol": 1e-5} if tensors[0].itemsize > 2 else {"rtol": 3e-2, "atol": 3e-2}
                expect_close(got, expected.to(tensors[0].dtype), **near, what=what, hint="Do all options reach SDPA?")
        for name in KNOCKED_OUT:
            tensors, options = knock_out(name, q, k, v)
            reasons = reasons_of("flash", *tensors, **options)
            expect_refused(pinned_sdpa, "flash", tensors, options, reasons, f"flash with {name}")
        for name, (backend, tensors, options) in other_refusals(q, k, v).items():
            reasons = reasons_of(backend, *tensors, **options)
            expect_refused(pinned_sdpa, backend, tensors, options, reasons, name)
        for backend, (tensors, options) in itertools.product(("flash", "math"), calls):
            _expect_nothing_beside(pinned_sdpa, backend, tensors, options)
            if "enable_gqa" not in options:
                views = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
                _expect_nothing_beside(pinned_sdpa, backend, views, options)
        _expect_ran_once_with_dropout(pinned_sdpa, q, k, v)


def _calls_to_pin(draw: Draw, length: int, d: int) -> tuple[tuple, list[tuple[tuple, dict]]]:
    """Return (q, k, v), and calls that flash and math run: [((q, k, v), options)]."""
    q, k, v = (draw.normal(2, 4, length, d) for _ in range(3))
    grouped = [draw.normal(2, 2, length, d) for _ in range(2)]
    mask = draw.normal(length, length) > 0
    mask[:, 0] = True
    calls: list[tuple[tuple, dict]] = [
        ((q, k, v), {}),
        ((q, k, v), {"is_causal": True, "scale": 0.5}),
        ((q, k, v), {"attn_mask": mask}),
        ((q, k, v), {"attn_mask": draw.normal(length, length), "scale": 0.25}),
        ((q, *grouped), {"is_causal": True, "scale": 0.75, "enable_gqa": True}),
        (tuple(t.bfloat16() for t in (q, k, v)), {}),
    ]
    return (q, k, v), calls


def _in_float64(options: dict) -> dict:
    """Return the options, with a mask of numbers converted to float64."""
    mask = options.get("attn_mask")
    return {**options, "attn_mask": mask.double()} if mask is not None and mask.is_floating_point() else options


def _expect_ran_once_with_dropout(pinned_sdpa, q, k, v) -> None:
    """Assert that math computes a call with dropout once. Its output is random, so only its shape is checked."""
    options = {"dropout_p": 0.25}
    what = "pinned_sdpa('math', q, k, v, dropout_p=0.25)"
    with OperationWatch() as watch:
        got = pinned_sdpa("math", q, k, v, **options)
    expect_ran_once(attentions(watch), "math", what)
    if not isinstance(got, torch.Tensor) or got.shape != q.shape:
        raise AssertionError(f"{what} should be a tensor of shape {tuple(q.shape)}.")
    if torch.allclose(got, pinned_sdpa("math", q, k, v), rtol=1e-3, atol=1e-3):
        raise AssertionError(f"{what} drops nothing: all options go through to SDPA.")
    _expect_nothing_beside(pinned_sdpa, "math", (q, k, v), options)


def _expect_nothing_beside(pinned_sdpa, backend: str, tensors, options: dict) -> None:
    """Assert that the answer passes on its inputs unchanged: no operator runs except the backend's own operators."""
    with OperationWatch() as own, sdpa_kernel(BACKENDS[backend]):
        F.scaled_dot_product_attention(*tensors, **options)
    with OperationWatch() as watch:
        pinned_sdpa(backend, *tensors, **options)
    if more := sorted(set(Counter(watch.operations) - Counter(own.operations)) - VIEWS):
        raise AssertionError(
            f"pinned_sdpa of {backend}{' with ' if options else ''}{', '.join(options)} runs {', '.join(more)}, and {backend} by itself "
            "does not. Hand q, k and v on as they are: make no copies of the inputs."
        )
