"""The formulas against brute force, and against the FLOPs that torch counts while a layer runs."""

import pytest
import torch
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


@pytest.mark.parametrize("layer_idx, slots", [(0, 512), (5, 700)], ids=["sliding", "full"])
def test_products_of_the_decoder_layer_are_those_that_torch_counts(layer_idx, slots):
    """Attention apart, whose matrix products also compute the pairs that a mask hides."""
    layer, rotary_emb = build_decoder_layer(layer_idx=layer_idx, dtype=F32, device="cpu", attn_implementation="eager")
    layer_type = layer.self_attn.layer_type
    cache = initialize_kv_cache(GEMMA_CONFIG, 700)

    def check(counter, new, past, keys):
        parts = decoder_layer(GEMMA_CONFIG, 2, new, past, layer_type, F32)
        all_pairs = attention(2, 4, 1, new, keys, 256, F32).flops
        products = sum(cost.flops for name, cost in parts.items() if name != "attention")
        assert counter.get_total_flops() == products + all_pairs

    x, ids = create_prefill_inputs(2, 600, 640, F32, "cpu")
    with FlopCounterMode(display=False) as counter:
        prefill_forward(layer, x, ids, get_position_embeddings(x, ids, rotary_emb, layer_type), cache)
    check(counter, 600, 0, 600 if slots == 512 else slots)
    token, at, place = create_decode_inputs_with_cache(2, 600, 640, F32, "cpu")
    with FlopCounterMode(display=False) as counter:
        embeddings = get_position_embeddings(token, at, rotary_emb, layer_type)
        decode_forward(layer, token, at, embeddings, True, cache, place)
    check(counter, 1, 600, slots)


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
