"""Prepared calls on a GPU: backends under mask functions against float64, refusals, the guard, and auto's choice."""

import pytest
import torch

from utils.attention import AttentionUnsupported, Recompiled, make_problem, prepare, reference
from utils.attention.backends.flex import triton_options
from utils.attention.masks import (
    both,
    causal,
    dilated,
    document_ids,
    documents,
    either,
    prefix_lm,
    score_mods,
    sliding_window,
)
from utils.machine.device import flash_attn_support, gluon_support

pytestmark = pytest.mark.gpu
needs_cute = pytest.mark.skipif(not flash_attn_support(4), reason="needs flash-attn-4 and a GPU that runs it")
needs_gluon = pytest.mark.skipif(not gluon_support(), reason="the Gluon kernel needs a Hopper GPU")
BF16_ERROR = 1e-2


def tensors(head_dim=64, length=512, heads=4, dtype=torch.bfloat16, seed=0):
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, heads, length, head_dim, generator=made).to("cuda", dtype) for _ in range(3))


def error(call, mask, modifier=None):
    expected, _ = reference(*call.inputs, mask_mod=mask, score_mod=modifier)
    return float((call().double() - expected).norm() / expected.norm())


def cases():
    ids = document_ids([130, 250, 132], "cuda")
    table = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).cuda()
    return {
        "ids and table": (both(causal, documents(ids)), score_mods.relative_bias(table)),
        "dilated and bias": (both(dilated(3), either(prefix_lm(77), causal)), score_mods.relative_bias(4)),
        "window and cap": (sliding_window(100), score_mods.soft_cap(2.0)),
        "either and composed": (
            either(documents(128), causal),
            score_mods.compose(score_mods.soft_cap(2.0), score_mods.alibi(4)),
        ),
    }


@pytest.mark.parametrize("name", ["ids and table", "dilated and bias", "window and cap", "either and composed"])
def test_flex_computes_mask_and_modifier(name):
    mask, modifier = cases()[name]
    q, k, v = tensors()
    assert error(prepare(q, k, v, mask_mod=mask, score_mod=modifier, backend="flex"), mask, modifier) < BF16_ERROR
    tuned = prepare(
        q,
        k,
        v,
        mask_mod=mask,
        score_mod=modifier,
        backend="flex",
        kernel_options=triton_options(make_problem(q, k, v, mask_mod=mask)),
    )
    assert error(tuned, mask, modifier) < BF16_ERROR
    assert tuned.settings["kernel_options"]["BLOCK_M"] == 64 or torch.cuda.get_device_capability() != (9, 0)


@pytest.mark.parametrize(("size", "length"), [(64, 512), (192, 512), (256, 384), (256, 512)])
def test_every_block_size_has_its_tile(size, length):
    """The last block may extend past the last key: what lies there must not be attended to."""
    q, k, v = tensors(length=length)
    call = prepare(q, k, v, mask_mod=documents(100), backend="flex", block_size=size)
    assert call.settings["block_size"] == (size, size) and error(call, documents(100)) < BF16_ERROR


def test_the_generated_triton_code_holds_the_modifier():
    q, k, v = tensors()
    with_cap = prepare(q, k, v, mask_mod=causal, score_mod=score_mods.soft_cap(2.0), backend="flex")
    assert "@triton.jit" in with_cap.generated_code() and "tanh" in with_cap.generated_code()
    assert "tanh" not in prepare(q, k, v, mask_mod=causal, backend="flex").generated_code()


def test_backward_of_the_compiled_path():
    q, k, v = (x.requires_grad_() for x in tensors(dtype=torch.float32))
    prepare(q, k, v, mask_mod=causal, backend="flex")().square().sum().backward()
    got, q.grad = q.grad, None
    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum().backward()
    assert float((got - q.grad).norm() / q.grad.norm()) < BF16_ERROR


def test_a_reset_between_calls_is_an_error():
    q, k, v = tensors()
    call = prepare(q, k, v, mask_mod=causal, backend="flex")
    call()
    torch._dynamo.reset()
    with pytest.raises(Recompiled, match="compiled again"):
        call()


@needs_cute
def test_head_dim_256_with_a_block_mask_is_refused_by_flash_attention_4_in_one_sentence():
    q, k, v = tensors(head_dim=256)
    for name in ("flex_flash", "cute"):
        with pytest.raises(AttentionUnsupported, match=r"ends at 128 .* These would work: .*flex"):
            prepare(q, k, v, mask_mod=documents(128), backend=name)
    assert error(prepare(q, k, v, mask_mod=documents(100), backend="auto"), documents(100)) < BF16_ERROR


@needs_cute
def test_the_flash_backend():
    q, k, v = tensors()
    mask = both(causal, documents(200))
    for name in ("flex_flash", "cute"):
        through = prepare(q, k, v, mask_mod=mask, backend=name)
        assert through.settings["kernel_options"]["BACKEND"] == "FLASH" and error(through, mask) < BF16_ERROR


@needs_cute
def test_auto_goes_on_where_the_flash_backend_refuses_and_says_so():
    mask, modifier = cases()["ids and table"]
    call = prepare(*tensors(), mask_mod=mask, score_mod=modifier)
    print(call.backend, call.settings["passed_over"])
    assert call.backend in ("flex_flash", "flex") and error(call, mask, modifier) < BF16_ERROR


@needs_gluon
def test_documents_as_sequences_in_the_gluon_kernel():
    for head_dim in (64, 128):
        q, k, v = tensors(head_dim)
        for mask in (documents(128), both(causal, documents(256)), both(documents(64), causal)):
            call = prepare(q, k, v, mask_mod=mask)
            assert call.backend == "gluon" and "as sequences" in call.settings["kernel_mask"]
            assert error(call, mask) < BF16_ERROR
    grouped = prepare(q, k[:, :2], v[:, :2], mask_mod=documents(128), backend="gluon")
    assert "4 packed sequences" in grouped.settings["kernel_mask"]
    assert error(grouped, documents(128)) < BF16_ERROR
