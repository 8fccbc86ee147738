"""FlexAttention's paths on a GPU: every path against float64, refusals, the guard, and what auto picks."""

import pytest
import torch

from utils.attention import masks, score_mods
from utils.attention.flex_dense import flex_reference
from utils.attention.flex_options import triton_options
from utils.attention.flex_paths import FlexUnsupported, Recompiled, flex
from utils.attention.masks import both, causal, dilated, document_ids, documents, either, prefix_lm, sliding_window
from utils.machine.device import flash_attn_support, gluon_support

pytestmark = pytest.mark.gpu
needs_cute = pytest.mark.skipif("not __import__('utils.machine.device').device.flash_attn_support(4)")
BF16_ERROR = 1e-2


def tensors(head_dim=64, length=512, heads=4, dtype=torch.bfloat16, seed=0):
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, heads, length, head_dim, generator=made).to("cuda", dtype) for _ in range(3))


def error(call, mask, modifier=None):
    expected = flex_reference(*call.inputs, mask, modifier)
    return float((call().double() - expected).norm() / expected.norm())


def cases():
    ids = document_ids([130, 250, 132], "cuda")
    table = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).cuda()
    return {
        "ids and table": (both(causal, documents(ids)), score_mods.relative_bias(table)),
        "dilated and decay": (both(dilated(3, 200), either(prefix_lm(77), causal)), score_mods.document_decay(100)),
        "window and cap": (sliding_window(100), score_mods.soft_cap(2.0)),
        "either and composed": (
            either(documents(128), causal),
            score_mods.compose(score_mods.soft_cap(2.0), score_mods.alibi(4)),
        ),
    }


@pytest.mark.parametrize("name", ["ids and table", "dilated and decay", "window and cap", "either and composed"])
def test_compiled_and_cute_compute_the_same_mask_and_modifier(name):
    mask, modifier = cases()[name]
    q, k, v = tensors()
    paths = ["compiled"] + ["cute_direct"] * bool(flash_attn_support(4))
    for path in paths:
        assert error(flex(q, k, v, mask_mod=mask, score_mod=modifier, path=path), mask, modifier) < BF16_ERROR, path
    tuned = flex(q, k, v, mask_mod=mask, score_mod=modifier, path="compiled", kernel_options=triton_options(q, k, mask))
    assert error(tuned, mask, modifier) < BF16_ERROR
    assert tuned.settings["kernel_options"]["BLOCK_M"] == 64 or torch.cuda.get_device_capability() != (9, 0)


@pytest.mark.parametrize(("size", "length"), [(64, 512), (192, 512), (256, 384), (256, 512)])
def test_every_block_size_has_its_tile(size, length):
    """Where the last block reaches behind the last key, memory that is not the sequence's is not attended to."""
    q, k, v = tensors(length=length)
    call = flex(q, k, v, mask_mod=documents(100), path="compiled", block_size=size)
    assert call.settings["block_size"] == (size, size) and error(call, documents(100)) < BF16_ERROR


def test_the_generated_triton_code_holds_the_modifier():
    q, k, v = tensors()
    with_cap = flex(q, k, v, mask_mod=causal, score_mod=score_mods.soft_cap(2.0), path="compiled")
    assert "@triton.jit" in with_cap.generated_code() and "tanh" in with_cap.generated_code()
    assert "tanh" not in flex(q, k, v, mask_mod=causal, path="compiled").generated_code()


def test_backward_of_the_compiled_path():
    q, k, v = (x.requires_grad_() for x in tensors(dtype=torch.float32))
    flex(q, k, v, mask_mod=causal, path="compiled")().square().sum().backward()
    got, q.grad = q.grad, None
    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum().backward()
    assert float((got - q.grad).norm() / q.grad.norm()) < BF16_ERROR


def test_a_reset_between_calls_is_an_error():
    q, k, v = tensors()
    call = flex(q, k, v, mask_mod=causal, path="compiled")
    call()
    torch._dynamo.reset()
    with pytest.raises(Recompiled, match="compiled again"):
        call()


@needs_cute
def test_head_dim_256_with_a_block_mask_is_refused_by_the_cute_paths_in_one_sentence():
    q, k, v = tensors(head_dim=256)
    for path in ("cute", "cute_direct"):
        with pytest.raises(FlexUnsupported, match=r"up to 128 .*; path='compiled' can\.$"):
            flex(q, k, v, mask_mod=documents(128), path=path)
    assert error(flex(q, k, v, mask_mod=documents(100), path="auto"), documents(100)) < BF16_ERROR


@needs_cute
def test_the_flash_backend_and_its_absence(monkeypatch):
    q, k, v = tensors()
    mask = both(causal, documents(200))
    through = flex(q, k, v, mask_mod=mask, path="cute")
    assert through.settings["kernel_options"]["BACKEND"] == "FLASH" and error(through, mask) < BF16_ERROR
    monkeypatch.setattr(masks, "has_flex", lambda: False)
    direct = flex(q, k, v, mask_mod=mask, path="cute")
    assert "directly" in direct.settings["implementation"] and error(direct, mask) < BF16_ERROR
    with pytest.raises(FlexUnsupported, match="does not have"):
        flex(q, k, v, mask_mod=mask, path="compiled")


@needs_cute
def test_auto_goes_on_where_the_flash_backend_refuses_and_says_so():
    mask, modifier = cases()["ids and table"]
    q, k, v = tensors()
    call = flex(q, k, v, mask_mod=mask, score_mod=modifier)
    print(call.settings["path"], call.settings["passed_over"])
    assert call.settings["path"] in ("cute", "cute_direct") and error(call, mask, modifier) < BF16_ERROR


@pytest.mark.skipif("not __import__('utils.machine.device').device.gluon_support()")
def test_documents_as_sequences_in_the_gluon_kernel():
    assert gluon_support()
    for head_dim in (64, 128):
        q, k, v = tensors(head_dim)
        for mask in (documents(128), both(causal, documents(256)), both(documents(64), causal)):
            call = flex(q, k, v, mask_mod=mask)
            assert call.settings["path"] == "gluon" and "as sequences" in call.settings["kernel_mask"]
            assert error(call, mask) < BF16_ERROR
    with pytest.raises(FlexUnsupported, match="gluon' takes causal"):
        flex(q, k[:, :2], v[:, :2], mask_mod=documents(128), path="gluon")
