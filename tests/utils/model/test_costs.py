"""The formulas against brute force and against FLOPs counted while a function runs, to the last FLOP."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from utils.config import GEMMA_CONFIG
from utils.model import (
    build_decoder_layer,
    create_decode_inputs_with_cache,
    create_prefill_inputs,
    decode_forward,
    get_position_embeddings,
    initialize_kv_cache,
    prefill_forward,
)
from utils.model.costs import Cost, attended_pairs, attention, decoder_layer, elementwise, gemm, gemv, rms_norm

F32, BF16 = torch.float32, torch.bfloat16


def test_cost_adds_and_divides():
    total = sum([Cost(20, 4), Cost(10, 6)])
    assert total == Cost(30, 10) and total.macs == 15 and total.intensity == 3.0
    with pytest.raises(TypeError):
        Cost(1, 1) + 1
    with pytest.raises(TypeError):
        1 + Cost(1, 1)


def test_gemm_and_gemv_by_hand():
    assert gemm(1024, 1024, 1024, BF16) == Cost(2 * 1024**3, 3 * 1024**2 * 2)
    assert gemm(1024, 1024, 1024, BF16).intensity == pytest.approx(1024 / 3)
    assert gemm(2, 3, 4, F32) == Cost(48, (8 + 12 + 6) * 4)
    assert gemv(1024, 1024, F32) == Cost(2 * 1024**2, (1024**2 + 2 * 1024) * 4)
    assert elementwise(10, 2, F32) == Cost(0, 120)
    assert rms_norm(3, 8, BF16) == Cost(0, (24 + 24 + 8) * 2)


@pytest.mark.parametrize("sq, sk", [(1, 1), (1, 9), (9, 9), (4, 9), (7, 30)])
@pytest.mark.parametrize("window", [None, 1, 3, 5, 9, 100])
def test_attended_pairs_counts_the_mask(sq, sk, window):
    distance = torch.arange(sk - sq, sk)[:, None] - torch.arange(sk)
    seen = (distance >= 0) & (distance < (window or sk))
    assert attended_pairs(sq, sk, causal=True, window=window) == int(seen.sum())
    keys_seen = int(seen.any(dim=0).sum())
    cost = attention(2, 4, 1, sq, sk, 16, F32, causal=True, window=window)
    assert cost == Cost(2 * 4 * int(seen.sum()) * 4 * 16, (2 * 2 * 4 * sq * 16 + 2 * 2 * keys_seen * 16) * 4)


def test_attention_without_a_mask():
    assert attention(1, 2, 2, 5, 7, 8, BF16) == Cost(4 * 2 * 8 * 35, (2 * 2 * 5 * 8 + 2 * 2 * 7 * 8) * 2)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: gemm(0, 1, 1, F32), "m is 0; it must be a whole number"),
        (lambda: gemm(1, 1, 1.5, F32), "k is 1.5"),
        (lambda: attended_pairs(4, 4, window=2), "needs causal=True"),
        (lambda: attended_pairs(5, 4, causal=True), "5 queries over 4 keys"),
        (lambda: attended_pairs(4, 4, causal=True, window=0), "window is 0"),
        (lambda: decoder_layer(GEMMA_CONFIG, 1, 1, layer_type="sliding"), "'sliding'; allowed: sliding_attention"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- the FLOPs counted while a function runs ---------------------------------------------------------------


def count_flops(fn, *args, **kwargs) -> int:
    """Count the matrix-product FLOPs of one call of `fn`, forward: the oracle for the formulas.

    This is PyTorch's FlopCounterMode with two corrections: fused attention counts the pairs that its mask lets through
    (PyTorch: all pairs, and none on a CPU), and matrix-vector products count (PyTorch: 0). Attention made of matmuls
    also computes the masked pairs, so they count.
    """
    with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
        fn(*args, **kwargs)
    return counter.get_total_flops()


def _formulas() -> dict:
    aten = torch.ops.aten
    fused = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    operators = [getattr(aten, f"_scaled_dot_product_{name}") for name in fused]
    return {operator: _fused_attention_formula(operator) for operator in operators} | {
        aten.mv: lambda matrix, vector, **_: 2 * matrix[0] * matrix[1],
        aten.addmv: lambda bias, matrix, vector, **_: 2 * matrix[0] * matrix[1],
        aten.dot: lambda a, b, **_: 2 * a[0],
    }


def _fused_attention_formula(operator):
    names = [argument.name for argument in operator.default._schema.arguments]

    def flops(*args, **kwargs) -> int:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        (b, h, sq, d), (_, _, sk, dv) = arguments["query"].shape, arguments["value"].shape
        mask = arguments.get("attn_mask", arguments.get("attn_bias"))
        pairs = b * h * sq * sk
        if mask is not None:
            seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
            pairs = int(seen.sum()) * (pairs // seen.numel())  # the mask may be broadcast
        elif arguments.get("is_causal"):  # aligned at the first query and the first key
            square = min(sq, sk)
            pairs = b * h * (square * (square + 1) // 2 + (sq - square) * sk)
        return 2 * pairs * (d + dv)

    flops._get_raw = True  # FlopCounterMode passes tensors, not shapes
    return flops


def test_counter_of_matrix_products():
    a, b, v = torch.randn(6, 5), torch.randn(5, 7), torch.randn(5)
    assert count_flops(torch.matmul, a, b) == gemm(6, 7, 5, F32).flops
    assert count_flops(torch.mv, a, v) == count_flops(lambda: a @ v) == gemv(6, 5, F32).flops
    assert count_flops(torch.addmv, torch.randn(6), a, v) == 60
    assert count_flops(torch.dot, v, v) == 10
    assert count_flops(F.linear, a, weight=torch.randn(3, 5), bias=torch.randn(3)) == gemm(6, 3, 5, F32).flops
    assert count_flops(torch.bmm, torch.randn(4, 6, 5), torch.randn(4, 5, 7)) == 4 * gemm(6, 7, 5, F32).flops
    assert count_flops(torch.add, a, a) == 0


def qkv(b, h, hkv, sq, sk, d, device="cpu", dtype=F32):
    return (torch.randn(b, n, s, d, device=device, dtype=dtype) for n, s in ((h, sq), (hkv, sk), (hkv, sk)))


def test_counter_of_fused_attention():
    q, k, v = qkv(2, 4, 4, 33, 33, 16)
    sdpa = F.scaled_dot_product_attention
    assert count_flops(sdpa, q, k, v) == attention(2, 4, 4, 33, 33, 16, F32).flops
    assert count_flops(sdpa, q, k, v, is_causal=True) == attention(2, 4, 4, 33, 33, 16, F32, causal=True).flops
    distance = torch.arange(33)[:, None] - torch.arange(33)
    seen = (distance >= 0) & (distance < 5)
    windowed = attention(2, 4, 4, 33, 33, 16, F32, causal=True, window=5).flops
    assert count_flops(sdpa, q, k, v, attn_mask=seen) == windowed
    assert count_flops(sdpa, q, k, v, attn_mask=seen.expand(2, 4, 33, 33)) == windowed
    for lowest in (-torch.inf, torch.finfo(F32).min):
        added = torch.zeros(33, 33).masked_fill(~seen, lowest)
        assert count_flops(sdpa, q, k, v, attn_mask=added) == windowed
    q, k, v = qkv(1, 4, 1, 1, 20, 16)
    assert count_flops(sdpa, q, k, v, enable_gqa=True) == attention(1, 4, 1, 1, 20, 16, F32).flops


@pytest.mark.parametrize("layer_idx", [0, 5], ids=["sliding", "full"])
@pytest.mark.parametrize("batch, prompt", [(2, 40), (1, 600)])
def test_counter_of_the_decoder_layer(layer_idx, batch, prompt):
    layer, rotary_emb = build_decoder_layer(layer_idx=layer_idx, dtype=F32, device="cpu")
    layer_type = layer.self_attn.layer_type
    cache = initialize_kv_cache(GEMMA_CONFIG, 700)
    x, ids = create_prefill_inputs(batch, prompt, 640, F32, "cpu")
    embeddings = get_position_embeddings(x, ids, rotary_emb, layer_type)
    expected = sum(decoder_layer(GEMMA_CONFIG, batch, prompt, layer_type=layer_type, dtype=F32).values())
    assert count_flops(prefill_forward, layer, x, ids, embeddings, cache) == expected.flops

    token, at, cache_positions = create_decode_inputs_with_cache(batch, prompt, 640, F32, "cpu")
    embeddings = get_position_embeddings(token, at, rotary_emb, layer_type)
    expected = sum(decoder_layer(GEMMA_CONFIG, batch, 1, prompt, layer_type, F32).values())
    assert count_flops(decode_forward, layer, token, at, embeddings, True, cache, cache_positions) == expected.flops


def test_bytes_of_the_decoder_layer():
    parts = decoder_layer(GEMMA_CONFIG, 8, 2048)
    weights = 640 * (1024 + 2 * 256) + 1024 * 640 + 3 * 640 * 2048
    rows = 8 * 2048
    assert sum(parts.values()).flops == 2 * rows * weights + 4 * 8 * 4 * 256 * (2048 * 2049 // 2)
    mlp = sum(parts[name] for name in ("gate_proj", "up_proj", "activation", "down_proj"))
    # Op by op: 3 products, gelu (1 read, 1 write), times (2 reads, 1 write).
    assert mlp.bytes == 2 * (3 * 640 * 2048 + 3 * rows * 640 + 3 * rows * 2048 + 5 * rows * 2048)
    assert mlp.intensity == pytest.approx(212.0, abs=0.1)

    decode = decoder_layer(GEMMA_CONFIG, 1, 1, past=2047)
    assert decode["attention"].bytes == 2 * (2 * 4 * 256 + 2 * 2048 * 256)
    sliding = decoder_layer(GEMMA_CONFIG, 1, 1, past=2047, layer_type="sliding_attention")
    assert sliding["attention"].bytes == 2 * (2 * 4 * 256 + 2 * 512 * 256)
    assert 0.5 < sum(decode.values()).intensity < 1.5
    assert "cache_write" not in decoder_layer(GEMMA_CONFIG, 1, 4, cached=False)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_counter_of_fused_attention_on_the_gpu(backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = qkv(2, 4, 4, 128, 128, 64, "cuda", BF16)
    sdpa = F.scaled_dot_product_attention
    with sdpa_kernel(getattr(SDPBackend, backend)):
        assert count_flops(sdpa, q, k, v) == attention(2, 4, 4, 128, 128, 64, BF16).flops
        assert count_flops(sdpa, q, k, v, is_causal=True) == attention(2, 4, 4, 128, 128, 64, BF16, True).flops
        if backend == "EFFICIENT_ATTENTION":
            distance = torch.arange(128, device="cuda")[:, None] - torch.arange(128, device="cuda")
            windowed = attention(2, 4, 4, 128, 128, 64, BF16, causal=True, window=9).flops
            assert count_flops(sdpa, q, k, v, attn_mask=(distance >= 0) & (distance < 9)) == windowed
