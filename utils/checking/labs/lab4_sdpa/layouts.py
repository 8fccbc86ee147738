"""Part 4: strides that flash refuses, further reasons why it refuses calls, and q, k, v as views of a projection.

The judge is the dispatcher of this machine's torch, on CPU tensors, so that the verdict is the same with a GPU.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from utils.checking import expect_items
from utils.checking.labs.lab4_sdpa.common import BACKENDS, in_one_line, runs, visible


def expect_same_values(got: object, x: torch.Tensor, what: str) -> None:
    """Assert that an answer returned a tensor of the shape, the dtype and the values of x."""
    if not isinstance(got, torch.Tensor):
        raise AssertionError(f"{what} should be a tensor, and is of type {type(got).__name__}.")
    assert got.shape == x.shape, (
        f"{what} should keep the shape {tuple(x.shape)}, and has {tuple(got.shape)}: a tensor that was transposed has to be "
        "transposed back. Only the memory may differ."
    )
    assert got.dtype == x.dtype and torch.equal(got, x), f"{what} should hold the values of x, and holds other values."


def expect_strides(knocked_out_by_strides, strided_and_fast, q: torch.Tensor) -> None:
    """Assert that the dispatcher accepts and refuses the layouts of q as Question 4.1 asks."""
    bad, good = knocked_out_by_strides(q), strided_and_fast(q)
    expect_same_values(bad, q, "knocked_out_by_strides(x)")
    assert not runs("flash", bad, q, q), (
        f"flash still runs with knocked_out_by_strides(x), strides {bad.stride()}, as q. Which dimension does a kernel want "
        "to read in one piece?"
    )
    expect_same_values(good, q, "strided_and_fast(x)")
    assert not good.is_contiguous(), "strided_and_fast(x) is contiguous. It should not be, and flash should run it."
    assert runs("flash", good, q, q), f"flash refuses strided_and_fast(x), strides {good.stride()}, as q."


@visible("4.1", "Strides")
def check_strides(knocked_out_by_strides, strided_and_fast):
    """Check both layouts of one tensor."""
    expect_strides(knocked_out_by_strides, strided_and_fast, torch.randn(2, 3, 10, 16))


def first_reason(arguments: dict) -> str:
    """Return torch's first reason why flash refuses a call."""
    with sdpa_kernel(BACKENDS["flash"]), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            F.scaled_dot_product_attention(**arguments)
        except RuntimeError as error:
            texts = [str(warning.message) for warning in said]
            told = [text for text in texts if "because" not in text and "disabled" not in text]
            return (told or [str(error)])[0].split(" (Triggered")[0].splitlines()[0]
    return ""


def expect_knock_outs(knock_outs, normal: Callable[..., torch.Tensor]) -> None:
    """Assert at least four calls that flash refuses and math computes, for different reasons other than strides.

    Args:
        knock_outs: the answer.
        normal: returns a random tensor of a shape.
    """
    assert knock_outs != {}, "not answered yet: KNOCK_OUTS is empty."
    assert isinstance(knock_outs, dict), f"KNOCK_OUTS should be a dict of functions, and is {knock_outs!r:.120}."
    found: dict[str, str] = {}
    for name, build in knock_outs.items():
        what = f"KNOCK_OUTS[{name!r}]"
        assert callable(build), f"{what} should be a function of (q, k, v), and is {build!r:.80}."
        arguments = build(*(normal(2, 4, 24, 32) for _ in range(3)))
        if not isinstance(arguments, dict) or not {"query", "key", "value"} <= set(arguments):
            given = sorted(arguments) if isinstance(arguments, dict) else f"a {type(arguments).__name__}"
            raise AssertionError(
                f"{what} should return a dict with query, key, value and options of SDPA, not {given}."
            )
        away = any(x.device.type != "cpu" for x in arguments.values() if isinstance(x, torch.Tensor))
        assert not away, f"{what} moves tensors to a GPU. The check asks the CPU's flash: leave them where they are."
        reason = _reason_of(arguments, what)
        assert "stride" not in reason, f"{what} is refused for its strides. That was 4.1: find another way."
        same = found.setdefault(re.sub(r"-?\d+", "#", reason)[:60], name)
        assert same == name, (
            f"{what} is refused for the reason of {same!r}: {reason[:90].rstrip('.')}. Four different reasons were asked for."
        )
    assert len(found) >= 4, f"KNOCK_OUTS holds {len(found)} knock-outs, and four were asked for."


def _reason_of(arguments: dict, what: str) -> str:
    """Assert that math runs a call and flash refuses it, and return the reason."""
    can = {}
    for backend, meaning in (
        ("math", "math cannot compute it either: a wrong call is no knock-out"),
        ("flash", "that is a defect of torch, no refusal with a reason"),
    ):
        try:
            can[backend] = runs(backend, **arguments)
        except Exception as error:
            text = f"{type(error).__name__}: {in_one_line(str(error))[:90]}"
            raise AssertionError(
                f"{what} ends inside of SDPA, pinned to {backend}, with {text}: {meaning}. Find another call."
            ) from None
    assert can["math"], f"math cannot compute {what} either: a wrong call is no knock-out."
    assert not can["flash"], f"flash runs {what}: with torch {torch.__version__} it is no knock-out."
    return first_reason(arguments)


@visible("4.2", "Four more knock-outs")
def check_knock_outs(KNOCK_OUTS):
    """Check all knock-outs on one shape."""
    expect_knock_outs(KNOCK_OUTS, torch.randn)


def at_the_same_places(got: torch.Tensor, x: torch.Tensor) -> bool:
    """Return whether corresponding numbers of two tensors have the same address.

    It is not enough that both share a storage: a copy may lie behind the numbers of x, or between them.
    """
    steps = [tuple(step for step, n in zip(t.stride(), t.shape, strict=True) if n > 1) for t in (got, x)]
    return got.data_ptr() == x.data_ptr() and steps[0] == steps[1]


def expect_unpacked(unpack_qkv, packed: torch.Tensor, heads: int, kv_heads: int) -> None:
    """Assert that q, k and v are views of a projection, head by head, and that flash runs them."""
    batch, tokens, width = packed.shape
    size = width // (heads + 2 * kv_heads)
    what = f"unpack_qkv of {tuple(packed.shape)}, strides {packed.stride()}, with {heads} query heads and {kv_heads} key heads"
    got = expect_items(unpack_qkv(packed, heads, kv_heads), "q, k, v", what)
    first = 0
    for name, tensor, count in zip("qkv", got, (heads, kv_heads, kv_heads), strict=True):
        shape = (batch, count, tokens, size)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape or tensor.dtype != packed.dtype:
            found = f"{tuple(tensor.shape)} in {tensor.dtype}" if isinstance(tensor, torch.Tensor) else type(tensor)
            raise AssertionError(f"{name} of {what} should have shape {shape} and packed's dtype, and has {found}.")
        for head in range(count):
            numbers = packed[:, :, first : first + size]
            assert torch.equal(tensor[:, head], numbers), (
                f"{name} of {what}: head {head} of a token should be its numbers {first} to {first + size - 1}, and is others. "
                "Split each token's numbers into heads first, then swap tokens and heads: a reshape mixes tokens."
            )
            assert at_the_same_places(tensor[:, head], numbers), (
                f"{name} of {what} is a copy, and a view was asked for."
            )
            first += size
    assert runs("flash", *got, enable_gqa=True), f"flash refuses the strides of {what}."


def layouts_of(x: torch.Tensor) -> dict[str, tuple[torch.Tensor, bool]]:
    """Return pairs: a view of a tensor or of a copy, and whether flash needs a copy of this view."""
    return {
        "a contiguous tensor": (x, False),
        "transposed heads": (x.transpose(1, 2).contiguous().transpose(1, 2), False),
        "every second token": (x[:, :, ::2], False),
        "one head for all": (x[:, :1].expand(x.shape), False),
        "a transposed memory": (x.mT.contiguous().mT, True),
        "every second number": (x[..., ::2], True),
    }


def expect_ready(ready_for_flash, tensor: torch.Tensor, copied: bool, what: str) -> None:
    """Assert that flash runs the answer's tensor, and that this is a copy only if flash needs a copy."""
    what = f"ready_for_flash of {what}, strides {tensor.stride()},"
    place = tensor.data_ptr()
    got = ready_for_flash(tensor)
    assert tensor.data_ptr() == place, f"{what} put its input on other memory, which is a copy. Leave x where it lies."
    expect_same_values(got, tensor, what)
    assert runs("flash", got, got, got), f"flash refuses {what} which has the strides {got.stride()} after it."
    assert copied or at_the_same_places(got, tensor), (
        f"{what} is a copy, and flash runs it as it is. Copy only where it is needed."
    )


@visible("4.3", "Apart without a copy")
def check_unpack(unpack_qkv, ready_for_flash):
    """Check a projection and a slice of one, and tensors with several strides."""
    expect_unpacked(unpack_qkv, torch.randn(2, 3, 24), 2, 1)
    expect_unpacked(unpack_qkv, torch.randn(2, 10, 64)[:, ::2], 4, 2)
    for what, (tensor, copied) in layouts_of(torch.randn(2, 3, 12, 16)).items():
        expect_ready(ready_for_flash, tensor, copied, what)
