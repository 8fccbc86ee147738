"""Which slot of the cache each token gets, and which calls are refused."""

import copy

import pytest
import torch

from tests.utils.model.layers import decode, decode_rest, embed, prefill
from utils.config import GEMMA_CONFIG
from utils.model import build_decoder_layer, create_prefill_inputs, get_position_embeddings, prefill_forward
from utils.model.kv_cache import initialize_kv_cache

SLIDING, FULL = 0, 5


def small_config(window=8, layers=6):
    config = copy.deepcopy(GEMMA_CONFIG)
    config.update({"sliding_window": window, "num_hidden_layers": layers})
    config.layer_types = config.layer_types[:layers]
    return config


@pytest.mark.parametrize("max_cache_len, sliding, full", [(600, 512, 600), (100, 100, 100), (512, 512, 512)])
def test_slots_of_each_layer_type(max_cache_len, sliding, full):
    from transformers import StaticCache

    cache = initialize_kv_cache(GEMMA_CONFIG, max_cache_len)
    assert isinstance(cache, StaticCache) and len(cache.layers) == 18
    for layer_idx, slots in ((SLIDING, sliding), (FULL, full)):
        built = build_decoder_layer(layer_idx=layer_idx, dtype=torch.float32, device="cpu")
        prefill(built, torch.randn(3, 4, 640), cache)
        assert cache.layers[layer_idx].keys.shape == cache.layers[layer_idx].values.shape == (3, 1, slots, 256)
    assert sum(layer.is_initialized for layer in cache.layers) == 2  # other layers allocate nothing


@pytest.mark.parametrize("prompt", [3, 8, 13, 30])
def test_a_sliding_layer_is_a_ring(prompt):
    ring = build_decoder_layer(small_config(window=8), dtype=torch.float32, device="cpu")
    wide = build_decoder_layer(small_config(window=64), dtype=torch.float32, device="cpu")
    hidden_states = torch.randn(1, prompt + 10, 640)
    caches = [initialize_kv_cache(built[0].config, 64) for built in (ring, wide)]
    for built, cache in zip((ring, wide), caches, strict=True):
        prefill(built, hidden_states[:, :prompt], cache)
    for held in range(prompt, prompt + 10):
        in_ring, in_order = (cache.layers[SLIDING] for cache in caches)
        for position in range(max(held - 8, 0), held):
            for name in ("keys", "values"):
                in_slot = getattr(in_ring, name)[:, :, position % 8]
                torch.testing.assert_close(in_slot, getattr(in_order, name)[:, :, position])
        for built, cache in zip((ring, wide), caches, strict=True):
            decode(built, hidden_states[:, held : held + 1], held, cache)


def test_a_model_of_sliding_layers_decodes_to_the_length_of_its_cache():
    built = build_decoder_layer(small_config(window=8, layers=2), dtype=torch.float32, device="cpu")
    cache = initialize_kv_cache(built[0].config, 12)
    hidden_states = torch.randn(1, 13, 640)
    expected = prefill(built, hidden_states[:, :12], None)
    prefill(built, hidden_states[:, :6], cache)
    output = decode_rest(built, hidden_states[:, :12], 6, cache)
    torch.testing.assert_close(output, expected[:, 6:], atol=1e-4, rtol=0)
    with pytest.raises(IndexError, match="position 12 is past the end of the cache, which has room for 12 tokens"):
        decode(built, hidden_states[:, 12:], 12, cache)


def test_a_ring_that_has_moved_on_cannot_go_back():
    built = build_decoder_layer(small_config(window=8), dtype=torch.float32, device="cpu")
    cache = initialize_kv_cache(built[0].config, 32)
    prefill(built, torch.randn(1, 12, 640), cache)
    decode(built, torch.randn(1, 1, 640), 11, cache)  # the newest token may be replaced
    with pytest.raises(ValueError, match="position 10 cannot be decoded again: the sliding window's 8 slots"):
        decode(built, torch.randn(1, 1, 640), 10, cache)


@pytest.mark.parametrize("layer_idx", [SLIDING, FULL])
def test_a_position_changed_in_place_is_read_again(layer_idx):
    built = build_decoder_layer(layer_idx=layer_idx, dtype=torch.float32, device="cpu")
    cache = initialize_kv_cache(GEMMA_CONFIG, 8)
    hidden_states = torch.randn(1, 8, 640)
    expected = prefill(built, hidden_states, None)
    prefill(built, hidden_states[:, :5], cache)
    cache_positions = torch.tensor([5])
    for position in range(5, 8):
        output = decode(built, hidden_states[:, position : position + 1], position, cache, cache_positions)
        torch.testing.assert_close(output, expected[:, position : position + 1], atol=1e-4, rtol=0)
        cache_positions += 1
    with pytest.raises(IndexError, match="position 8 is past the end"):
        decode(built, hidden_states[:, 7:], 8, cache, cache_positions)


def test_embeddings_changed_in_place_are_of_the_new_layer_type():
    built = build_decoder_layer(layer_idx=FULL, dtype=torch.float32, device="cpu")
    hidden_states, position_ids = create_prefill_inputs(1, 4, 640, torch.float32, "cpu")
    buffers = get_position_embeddings(hidden_states, position_ids, built[1], "sliding_attention")
    arguments = built[0], hidden_states, position_ids, buffers
    with pytest.raises(ValueError, match="layer_type 'sliding_attention'"):
        prefill_forward(*arguments)
    for buffer, new in zip(buffers, embed(built, hidden_states, position_ids), strict=True):
        buffer.copy_(new)
    torch.testing.assert_close(prefill_forward(*arguments), prefill(built, hidden_states))
    with torch.inference_mode():  # torch does not count the changes of an inference tensor: it keeps its first type
        buffers = get_position_embeddings(hidden_states, position_ids, built[1], "sliding_attention")
        with pytest.raises(ValueError, match="layer_type 'sliding_attention'"):
            prefill_forward(*arguments[:3], buffers)
