"""Part 4: strides that knock flash out, other knock-outs, and projections taken apart without a copy.

The judge is the dispatcher of this machine's torch, on CPU tensors, so that the verdict is the same with a GPU.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from instructor.checks.common import Draw
from instructor.checks.lab4_sdpa.common import reasons_of, with_right_answers
from utils.checking import check, expect_close


def _expect_same_values(got: object, x: torch.Tensor, what: str) -> None:
    if not isinstance(got, torch.Tensor):
        raise AssertionError(f"{what} should be a torch.Tensor, and is a {type(got).__name__}.")
    if got.shape != x.shape:
        also = " A transposed tensor has to be transposed back: only the memory may differ."
        raise AssertionError(f"{what} should keep the shape {tuple(x.shape)}, and has {tuple(got.shape)}.{also}")
    if got.dtype != x.dtype or not torch.equal(got, x):
        raise AssertionError(f"{what} should hold the values of x, and holds others.")


@check("4.1", "Strides")
def strides(knocked_out_by_strides, strided_and_fast, seed=None):
    """Check that shape and values stay the same; the dispatcher decides which backends still accept the call."""
    draw = Draw(seed)
    for length in (draw.size(9, 30), draw.size(31, 90)):
        shape = draw.size(1, 3), draw.size(2, 5), length, draw.choice((16, 32, 64))
        q, k, v = (draw.normal(*shape) for _ in range(3))
        got = knocked_out_by_strides(q)
        _expect_same_values(got, q, "knocked_out_by_strides(x)")
        reasons = reasons_of("flash", got, k, v)
        if reasons and not any("stride" in reason for reason in reasons):
            raise AssertionError(f"flash refuses knocked_out_by_strides(q), and not for its strides: {reasons[0]}")
        if not reasons:
            raise AssertionError(
                f"flash still runs with knocked_out_by_strides(q), strides {tuple(got.stride())}. "
                "Which dimension does a kernel want to read in one piece?"
            )
        got = strided_and_fast(q)
        _expect_same_values(got, q, "strided_and_fast(x)")
        if got.is_contiguous():
            raise AssertionError("strided_and_fast(x) is contiguous. It should not be, and flash should run it.")
        reasons = reasons_of("flash", got, k, v)
        if reasons:
            raise AssertionError(f"flash refuses strided_and_fast(q), strides {tuple(got.stride())}: {reasons[0]}")


def _pattern(reason: str) -> str:
    """Remove the numbers from a reason, so that two sizes of the same reason count once."""
    return re.sub(r"-?\d+", "#", reason)[:60]


@check("4.2", "Four more knock-outs")
def knock_outs(knock_outs, seed=None):
    """Check calls that flash refuses and math computes, for four different reasons other than strides."""
    draw = Draw(seed)
    if knock_outs == {}:
        raise AssertionError("not answered yet: KNOCK_OUTS is empty.")
    if not isinstance(knock_outs, dict):
        raise AssertionError(f"KNOCK_OUTS should be a dict with at least four functions, and is {knock_outs!r}.")
    name_of_reason: dict[str, str] = {}
    for name, build in knock_outs.items():
        if not callable(build):
            raise AssertionError(f"KNOCK_OUTS[{name!r}] should be a function of (q, k, v), and is {build!r}.")
        arguments = build(*(draw.normal(2, 4, 24, 32) for _ in range(3)))
        if not isinstance(arguments, dict) or not {"query", "key", "value"} <= set(arguments):
            raise AssertionError(
                f"KNOCK_OUTS[{name!r}] should return the arguments of SDPA in a dict with the keys "
                f"query, key, value, and options such as is_causal; got {type(arguments).__name__}"
                f"{sorted(arguments) if isinstance(arguments, dict) else ''}."
            )
        options = {key: value for key, value in arguments.items() if key not in ("query", "key", "value")}
        tensors = tuple(arguments[key] for key in ("query", "key", "value"))
        if any(t.device.type != "cpu" for t in tensors):
            raise AssertionError(
                f"KNOCK_OUTS[{name!r}] moves tensors to a GPU. The check asks the CPU's flash: leave "
                "them where they are."
            )
        try:
            with sdpa_kernel(SDPBackend.MATH):
                F.scaled_dot_product_attention(*tensors, **options)
        except Exception as error:
            text = " ".join(str(error).split())[:120]
            raise AssertionError(
                f"math cannot compute KNOCK_OUTS[{name!r}] either ({text}): a wrong call is no knock-out."
            ) from None
        try:
            reasons = reasons_of("flash", *tensors, **options)
        except Exception as error:  # a RuntimeError is a refusal, and is among the reasons
            text = " ".join(str(error).split())[:120]
            raise AssertionError(
                f"KNOCK_OUTS[{name!r}] ends inside of torch's flash with {type(error).__name__} ({text}). That is a "
                "defect of torch, not a refusal: it gives no reason. Find a call that flash refuses."
            ) from None
        if not reasons:
            raise AssertionError(f"flash runs KNOCK_OUTS[{name!r}]: with torch {torch.__version__} it is no knock-out.")
        if "stride" in reasons[0]:
            raise AssertionError(
                f"KNOCK_OUTS[{name!r}] knocks flash out by its strides ({reasons[0][:90]}). That was "
                "Question 4.1: find another way."
            )
        pattern = _pattern(reasons[0])
        if pattern in name_of_reason:
            raise AssertionError(
                f"KNOCK_OUTS[{name!r}] is refused for the reason of {name_of_reason[pattern]!r}: "
                f"{reasons[0][:100].rstrip('.')}. Four different reasons were asked for."
            )
        name_of_reason[pattern] = name
    if len(name_of_reason) < 4:
        raise AssertionError(f"KNOCK_OUTS holds {len(name_of_reason)} knock-outs, and four were asked for.")


def _at_the_same_places(got: torch.Tensor, x: torch.Tensor) -> bool:
    """Return whether each number of one tensor lies at the address of the same number of the other.

    A shared storage is not enough: a copy may lie behind the numbers of x, or between them.
    """
    steps = [tuple(step for step, n in zip(t.stride(), t.shape, strict=True) if n > 1) for t in (got, x)]
    return got.data_ptr() == x.data_ptr() and steps[0] == steps[1]


def _layouts(draw: Draw, half: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, bool]]:
    """Return tensors with 2 * half tokens, and for each whether flash needs a copy of it."""
    x = draw.normal(draw.size(2, 3), draw.size(2, 4), 2 * half, draw.choice((16, 32)), dtype=dtype)
    return [
        (x, False),
        (x.transpose(1, 2).contiguous().transpose(1, 2), False),
        (x[:, :, ::2], False),
        (x[:, :1].expand(x.shape), False),
        (x.mT.contiguous().mT, True),
        (x[..., ::2], True),
    ]


@check("4.3", "Apart without a copy")
def unpack(unpack_qkv, ready_for_flash, seed=None):
    """Check views of one projection that flash accepts; a copy is allowed only where it is needed."""
    draw = Draw(seed)
    for length, dtype, apart in ((20, torch.float32, 1), (60, torch.bfloat16, 1), (60, torch.float16, 2)):
        b, kv, group = (draw.size(2, 3) for _ in range(3))
        s, d = draw.size(9, length), draw.choice((8, 16, 32))
        h = kv * group
        packed = draw.normal(b, s * apart, (h + 2 * kv) * d, dtype=dtype)[:, apart - 1 :: apart]
        lies = " that is every second token of a longer one" if apart > 1 else ""
        what = f"unpack_qkv of ({b}, {s}, {packed.shape[2]}){lies} with {h} query heads and {kv} key heads"
        got = unpack_qkv(packed, h, kv)
        if not isinstance(got, tuple | list) or len(got) != 3:
            raise AssertionError(f"{what} should be (q, k, v), and is a {type(got).__name__}.")
        start = 0
        for name, tensor, heads in zip("qkv", got, (h, kv, kv), strict=True):
            columns = packed[:, :, start : start + heads * d]
            expected = columns.unflatten(2, (heads, d)).transpose(1, 2)
            start += heads * d
            hint = ""
            if isinstance(tensor, torch.Tensor) and tensor.shape == expected.shape:
                tokens_last = columns.reshape(b, heads, s, d)
                if torch.equal(tensor, tokens_last):
                    hint = "Split the columns into heads first, then swap tokens and heads: a reshape mixes tokens."
            expect_close(tensor, expected, rtol=0, atol=0, what=f"{name} of {what}", hint=hint)
            if not _at_the_same_places(tensor, expected):
                raise AssertionError(
                    f"{name} of {what} is a copy. A view of `packed` has the same values for no "
                    "bytes: slice, unflatten or view, transpose. Its numbers are those of `packed`, at their own addresses."
                )
        if reasons := reasons_of("flash", *got, enable_gqa=True):
            raise AssertionError(f"flash refuses the tensors of {what}: {reasons[0]}")
    for tensor, copies in [*_layouts(draw, draw.size(5, 10), torch.float32), *_layouts(draw, 20, torch.bfloat16)]:
        place = tensor.data_ptr()
        what = f"ready_for_flash of a tensor with strides {tuple(tensor.stride())}"
        with with_right_answers(ready_for_flash):
            got = ready_for_flash(tensor)
        if tensor.data_ptr() != place:
            raise AssertionError(f"{what} put its input on other memory, which is a copy. Leave x where it lies.")
        _expect_same_values(got, tensor, what)
        if reasons := reasons_of("flash", got, got, got):
            raise AssertionError(f"flash refuses {what}, strides {tuple(got.stride())} after it: {reasons[0]}")
        if not copies and not _at_the_same_places(got, tensor):
            raise AssertionError(
                f"{what} is a copy, and flash runs the tensor as it is. Copy only where the last "
                "dimension's stride is not 1."
            )
