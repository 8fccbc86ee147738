"""The two calls of a decoder layer in the tests: with a whole prompt, and with one token and the cache."""

import torch

from utils.model import decode_forward, get_position_embeddings, prefill_forward


def embed(built, hidden_states, position_ids):
    layer, rotary_emb = built
    return get_position_embeddings(hidden_states, position_ids, rotary_emb, layer.self_attn.layer_type)


def prefill(built, hidden_states, cache=None):
    position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
    return prefill_forward(built[0], hidden_states, position_ids, embed(built, hidden_states, position_ids), cache)


def decode(built, token, position, cache, cache_positions=None):
    """Decode one token (B, 1, hidden) at a position, with the cache; `cache_positions` may be a tensor in use."""
    position_ids = torch.full((token.shape[0], 1), position, device=token.device)
    if cache_positions is None:
        cache_positions = torch.tensor([position], device=token.device)
    position_embeddings = embed(built, token, position_ids)
    return decode_forward(built[0], token, position_ids, position_embeddings, True, cache, cache_positions)


def decode_rest(built, hidden_states, first, cache):
    """Decode the tokens from a position on, one after the other; return all outputs."""
    steps = range(first, hidden_states.shape[1])
    return torch.cat([decode(built, hidden_states[:, i : i + 1], i, cache) for i in steps], dim=1)
