"""Masks and modifiers that read the sequence or the head: right on every backend that takes them, or refused by name."""

import random

import pytest
import torch

from utils.attention import BACKENDS, able_backends, attention, make_problem, reference, reference_gradients
from utils.attention.masks import both, build_block_mask, causal, either, sliding_window
from utils.attention.masks.mask_mods import different_masks

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE, BOUND = ("cuda", torch.bfloat16, 1.5e-2) if ON_GPU else ("cpu", torch.float32, 1e-5)
LONGEST = 300 if ON_GPU else 60
COMPILED = ("naive_compiled", "flex", "flex_flash", "cute")


def draw(rng, turn):
    """Draw (q, k, v); each turn has another mask, in which every query sees a key, and every other one a modifier."""
    batch, kv_heads, group = rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 3)
    heads, sq, sk = kv_heads * group, rng.randint(1, LONGEST), rng.randint(5, LONGEST)
    shapes = (batch, heads, sq, 64), (batch, kv_heads, sk, 64), (batch, kv_heads, sk, 64)
    qkv = [torch.randn(shape, device=DEVICE).to(DTYPE) for shape in shapes]
    lengths = torch.randint(1, sk + 1, (batch,), device=DEVICE)
    windows = torch.randint(1, sk + 1, (heads,), device=DEVICE)
    table = torch.rand(batch, heads, 7, device=DEVICE) < 0.5
    bias = torch.randn(batch, heads, 7, device=DEVICE)
    masks = {
        "key padding": lambda b, h, q, k: k < lengths[b],
        "window of a head": lambda b, h, q, k: (q - k).abs() < windows[h],
        "table": lambda b, h, q, k: table[b][h][k % 7],
        "shift": lambda b, h, q, k: k <= q + 3 * b - h,
        "composed": both(causal, lambda b, h, q, k: k >= h),
        "without": sliding_window(9),
    }
    name = list(masks)[turn]
    modifiers = {"table": lambda s, b, h, q, k: s + bias[b][h][k % 7], "head": lambda s, b, h, q, k: s * (h + 1)}
    modifier = rng.choice(list(modifiers)) if turn % 2 else None
    mask = either(masks[name], lambda b, h, q, k: k == q % sk)
    return qkv, mask, modifiers.get(modifier), (name, modifier)


def error(x, expected):
    return float((x.double() - expected).norm() / expected.norm().clamp(min=1))


@pytest.mark.parametrize(
    "marked",
    [
        pytest.param("cpu", id="eager"),
        pytest.param("cpu_compiled", marks=pytest.mark.slow, id="compiled"),
        pytest.param("gpu", marks=pytest.mark.gpu, id="gpu"),
    ],
)
def test_random_masks_of_sequences_and_heads_against_float64(marked):
    if (marked == "gpu") != ON_GPU:
        pytest.skip("each machine runs its own part")
    rng, ran = random.Random(20261128), dict.fromkeys(BACKENDS, 0)
    torch.manual_seed(7)
    for turn in range({"cpu": 6, "cpu_compiled": 2, "gpu": 4}[marked]):
        (q, k, v), mask, modifier, what = draw(rng, turn)
        arguments = {"mask_mod": mask, "score_mod": modifier}
        dout = torch.randn_like(q)
        expected, gradients = reference_gradients(q, k, v, dout, **arguments)
        for name in able_backends(make_problem(q, k, v, **arguments)):
            if marked != "gpu" and (name in COMPILED) != (marked == "cpu_compiled"):
                continue
            case = name, what, q.shape, k.shape
            assert error(attention(q, k, v, backend=name, **arguments), expected) < BOUND, case
            ran[name] += 1
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            if name not in able_backends(make_problem(*leaves, **arguments)):
                continue
            got = torch.autograd.grad(attention(*leaves, backend=name, **arguments), leaves, dout)
            for one, right in zip(got, gradients, strict=True):
                assert error(one, right) < 2 * BOUND, ("gradient", *case)
        print({name: count for name, count in ran.items() if count})
    assert sum(ran.values())


def test_key_padding_is_what_auto_computes():
    q, k, v = (torch.randn(3, 2, 40, 16, device=DEVICE) for _ in range(3))
    lengths = torch.tensor([40, 7, 19], device=DEVICE)
    out = attention(q, k, v, mask_mod=lambda b, h, i, j: j < lengths[b], backend="sdpa")
    for b, length in enumerate(lengths.tolist()):
        expected, _ = reference(q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length])
        assert error(out[b : b + 1], expected) < 1e-5


def test_which_indices_a_mask_reads():
    numbers = torch.arange(4)
    cases = {
        (1, 1): [causal, lambda b, h, q, k: numbers[q % 4] == numbers[k % 4], both(causal, sliding_window(3))],
        (2, 1): [lambda b, h, q, k: k < numbers[b], both(causal, lambda b, h, q, k: q + b > k)],
        (1, 3): [lambda b, h, q, k: k > numbers[h][None][0]],
        (2, 3): [lambda b, h, q, k: (k < b) | (q < h)],
    }
    for sizes, masks in cases.items():
        for mask in masks:
            assert different_masks(mask, 2, 3, "cpu") == sizes
    assert build_block_mask(causal, 8, 8).shape[:2] == (1, 1)
    with pytest.raises(ValueError, match="batch="):
        build_block_mask(lambda b, h, q, k: k < numbers[b], 8, 8)
