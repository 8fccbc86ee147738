"""One Gemma-3 decoder layer from transformers: prefill and decode, with a static KV cache or without.

    layer, rotary_emb = build_decoder_layer()
    cache = initialize_kv_cache(layer.config, max_cache_len=1024)
    hidden_states, position_ids = create_prefill_inputs(1, 512, 640, torch.bfloat16, device)
    position_embeddings = get_position_embeddings(
        hidden_states, position_ids, rotary_emb, layer.self_attn.layer_type
    )
    prefill_forward(layer, hidden_states, position_ids, position_embeddings, cache)

- `prefill_forward` starts from an empty cache: it drops the keys and values that the cache has for this layer.
- `decode_forward` writes its token at `cache_positions` and attends to the positions up to it. The same call gives the
  same result again, so a step can be timed any number of times. The next token needs the next position.
- A decode step does not wait for the GPU, so it can be captured in a CUDA graph. Between replays change
  `hidden_states`, `position_embeddings` and `cache_positions` in place; nothing checks the positions of a replay.
- These functions are for inference: no gradients are recorded.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from utils.config import GEMMA_CONFIG
from utils.machine.device import usable_device
from utils.model.kv_cache import (
    check_config,
    filled_slots,
    finish_decode,
    finish_prefill,
    first_position,
    is_capturing,
    known_position,
    remember_position,
    start_decode,
    start_prefill,
    visible_slots,
)
from utils.newest import Newest
from utils.validation import floating_dtype, whole_number, whole_numbers

if TYPE_CHECKING:
    from transformers import Gemma3TextConfig, StaticCache

PositionEmbeddings = tuple[torch.Tensor, torch.Tensor]

ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")
_GIVEN_ATTENTION = "given_attention"  # the name in transformers for the argument `attend` of `decode_forward`


# ---- the layer ---------------------------------------------------------------------------------------------


def build_decoder_layer(
    config: Gemma3TextConfig | None = None,
    layer_idx: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    attn_implementation: str = "sdpa",
    seed: int = 0,
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Build one Gemma-3 decoder layer with random weights, and its rotary embedding; nothing is downloaded.

    Args:
        config: the model's sizes; None is `GEMMA_CONFIG`. The layer gets a copy, and the original does not change.
        layer_idx: number of the layer. In `GEMMA_CONFIG` layers 0 to 4 attend within a sliding window, and layer 5 to
            all positions.
        dtype: of the weights.
        device: of the weights; None is the GPU, or the CPU if there is no GPU.
        attn_implementation: "sdpa" (`scaled_dot_product_attention`) or "eager" (matmul, softmax, matmul).
        seed: of the weights, which are the same on every device. Torch's global generator stays unchanged.

    Returns:
        `(layer, rotary_emb)`. `layer.self_attn.layer_type` is the `layer_type` for `get_position_embeddings`.
    """
    if attn_implementation not in ATTENTION_IMPLEMENTATIONS:
        raise ValueError(f"attn_implementation is {attn_implementation!r}; allowed: {ATTENTION_IMPLEMENTATIONS}")
    config = GEMMA_CONFIG if config is None else config
    check_config(config)
    if whole_number("layer_idx", layer_idx, least=0) >= config.num_hidden_layers:
        raise ValueError(f"layer_idx is {layer_idx}; this config has layers 0 to {config.num_hidden_layers - 1}")
    dtype, device = floating_dtype(dtype), usable_device(device)
    from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3RotaryEmbedding

    config = copy.deepcopy(config)
    config._attn_implementation = attn_implementation  # forward passes read it, so layers must not share it
    with torch.device("meta"):
        layer = Gemma3DecoderLayer(config, layer_idx).to(dtype)
    layer.to_empty(device=device)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in layer.named_parameters():
        # Gemma's RMSNorm multiplies by 1 + weight, so zero is its neutral weight.
        std = 0.0 if name.endswith("norm.weight") else config.initializer_range
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * std)
    return layer.eval().requires_grad_(False), Gemma3RotaryEmbedding(config).to(device)


def get_position_embeddings(
    hidden_states: torch.Tensor, position_ids: torch.Tensor, rotary_emb: torch.nn.Module, layer_type: str
) -> PositionEmbeddings:
    """Compute the rotary position embeddings (cos, sin) of some positions.

    Args:
        hidden_states: the result has their dtype and device.
        position_ids: the positions, (B, S) or (1, S).
        rotary_emb: from `build_decoder_layer`.
        layer_type: "sliding_attention" or "full_attention"; the two rotate at different speeds.

    Returns:
        `(cos, sin)`, each (B, S, head_dim) or (1, S, head_dim).
    """
    if not hasattr(rotary_emb, "layer_types"):
        raise TypeError(f"rotary_emb is a {type(rotary_emb).__name__}; build_decoder_layer() returns layer, rotary_emb")
    if layer_type not in rotary_emb.layer_types:
        raise ValueError(f"layer_type is {layer_type!r}; allowed: {', '.join(rotary_emb.layer_types)}")
    if position_ids.dim() != 2:
        raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}; it must be (B, S) or (1, S)")
    embeddings = rotary_emb(hidden_states, position_ids, layer_type)
    if (first := first_position(position_ids)) is not None:
        remember_position(embeddings[0], first, layer_type)
    return embeddings


# ---- random inputs -----------------------------------------------------------------------------------------


def create_prefill_inputs(
    batch_size: int, seq_len: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Create random inputs (standard normal) for the prefill of a prompt of `seq_len` tokens.

    Returns:
        `(hidden_states, position_ids)`: (B, S, hidden_size) and (B, S), positions 0 to S - 1.
    """
    whole_numbers(batch_size=batch_size, seq_len=seq_len, hidden_size=hidden_size)
    dtype, device = floating_dtype(dtype), usable_device(device)
    hidden_states = torch.randn(batch_size, seq_len, hidden_size, dtype=dtype, device=device)
    return hidden_states, torch.arange(seq_len, device=device).repeat(batch_size, 1)


def create_decode_inputs_with_cache(
    batch_size: int, current_seq_len: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Create random inputs (standard normal) for decoding the token after `current_seq_len` cached tokens.

    Returns:
        `(hidden_states, position_ids, cache_positions)`: (B, 1, hidden_size), (B, 1) and (1,). Every position is
        `current_seq_len`, because the first token has position 0.
    """
    whole_numbers(current_seq_len=current_seq_len)
    hidden_states, _ = create_prefill_inputs(batch_size, 1, hidden_size, dtype, device)
    cache_positions = torch.full((1,), current_seq_len, device=hidden_states.device)
    position_ids = cache_positions.repeat(batch_size, 1)
    for positions in (position_ids, cache_positions):  # so that a step need not wait for the GPU to read them
        remember_position(positions, current_seq_len)
    return hidden_states, position_ids, cache_positions


def create_decode_inputs_without_cache(
    batch_size: int, current_seq_len: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Create random inputs (standard normal) for decoding the token after `current_seq_len` tokens without a cache.

    Without a cache the whole sequence is computed again, so `position_ids` has every position.

    Returns:
        `(hidden_states, position_ids, prefill_hidden_states)`: (B, 1, hidden_size); (B, current_seq_len + 1),
        positions 0 to current_seq_len; (B, current_seq_len, hidden_size).
    """
    whole_numbers(current_seq_len=current_seq_len)
    hidden_states, _ = create_prefill_inputs(batch_size, 1, hidden_size, dtype, device)
    prefill_hidden_states, _ = create_prefill_inputs(batch_size, current_seq_len, hidden_size, dtype, device)
    position_ids = torch.arange(current_seq_len + 1, device=hidden_states.device).repeat(batch_size, 1)
    return hidden_states, position_ids, prefill_hidden_states


# ---- forward passes ----------------------------------------------------------------------------------------


@torch.no_grad()
def prefill_forward(
    layer: torch.nn.Module,
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    position_embeddings: PositionEmbeddings,
    past_key_values: StaticCache | None = None,
) -> torch.Tensor:
    """Run a whole prompt through the layer, causally, and fill the cache with its keys and values.

    Args:
        layer: from `build_decoder_layer`.
        hidden_states: (B, S, hidden_size).
        position_ids: (B, S) or (1, S), counting from 0.
        position_embeddings: (cos, sin) of these positions, from `get_position_embeddings`.
        past_key_values: the cache to fill, from `initialize_kv_cache`. The call first drops the cache's keys and values for
            this layer, so a second prefill gives the same result and the cache keeps its size. None: no cache.

    Returns:
        (B, S, hidden_size).
    """
    _check_inputs(layer, hidden_states, position_ids, position_embeddings)
    _check_positions(0, position_ids, position_embeddings)
    length = attended = hidden_states.shape[1]
    if past_key_values is not None:
        slots = start_prefill(past_key_values, layer, hidden_states)
        # The layer attends to all its slots, or to the prompt itself if the prompt is longer.
        attended = max(length, slots.max_cache_len)
    output = layer(
        hidden_states,
        position_embeddings=position_embeddings,
        attention_mask=_prefill_mask(layer, hidden_states, attended),
        position_ids=position_ids,
        past_key_values=past_key_values,
    )
    if past_key_values is not None:
        finish_prefill(slots, length)
    return output


@torch.no_grad()
def decode_forward(
    layer: torch.nn.Module,
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    position_embeddings: PositionEmbeddings,
    use_kv_cache: bool,
    past_key_values: StaticCache | None = None,
    cache_positions: torch.Tensor | None = None,
    prefill_hidden_states: torch.Tensor | None = None,
    attend: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Run one new token through the layer, with the cache or by computing the whole sequence again.

    Args:
        layer: from `build_decoder_layer`.
        hidden_states: the new token, (B, 1, hidden_size).
        position_ids: (B, 1) with a cache; every position, (B, S + 1), without a cache.
        position_embeddings: (cos, sin) of `position_ids`, from `get_position_embeddings`.
        use_kv_cache: True uses the next two arguments, False uses `prefill_hidden_states`.
        past_key_values: the cache, filled by `prefill_forward`.
        cache_positions: (1,), the new token's position, which is the number of tokens before it. Decoding again at an
            earlier position overwrites it and drops the later tokens. Positions on a GPU that
            `create_decode_inputs_with_cache` did not make are read once for a check: warm up before timing.
        prefill_hidden_states: all tokens before the new token, (B, S, hidden_size).
        attend: with a cache, the attention to use in place of the layer's own: called as attend(q, keys, values,
            seqlens=..., scale=..., causal=False), such as `utils.attention.attention_decode`. None: the layer's own.
            `utils.decode_forward` also takes "auto", its default: in a CUDA graph on a Hopper GPU the course's decode
            kernel, elsewhere the layer's own.

    Returns:
        (B, 1, hidden_size), the same with and without the cache.
    """
    if hidden_states.dim() == 3 and hidden_states.shape[1] != 1:
        raise ValueError(f"decode takes one token, hidden_states (B, 1, hidden_size), not {tuple(hidden_states.shape)}")
    if not use_kv_cache:
        if prefill_hidden_states is None:
            raise ValueError(
                "decode without a cache computes the whole sequence again: pass prefill_hidden_states "
                "(B, S, hidden_size), from create_decode_inputs_without_cache"
            )
        if prefill_hidden_states.dim() != 3 or prefill_hidden_states.shape[::2] != hidden_states.shape[::2]:
            raise ValueError(
                f"prefill_hidden_states has shape {tuple(prefill_hidden_states.shape)} and hidden_states "
                f"{tuple(hidden_states.shape)}: batch and hidden size must agree"
            )
        sequence = torch.cat((prefill_hidden_states, hidden_states), dim=1)
        return prefill_forward(layer, sequence, position_ids, position_embeddings)[:, -1:]

    if past_key_values is None or not isinstance(cache_positions, torch.Tensor):
        missing = "past_key_values" if past_key_values is None else "cache_positions, torch.tensor([position])"
        raise ValueError(f"decode with a cache needs {missing}; use_kv_cache=False decodes without a cache")
    _check_inputs(layer, hidden_states, position_ids, position_embeddings)
    slots, position = start_decode(past_key_values, layer, hidden_states, cache_positions)
    _check_positions(position, position_ids, position_embeddings)
    arguments = dict(
        position_embeddings=position_embeddings, position_ids=position_ids, past_key_values=past_key_values
    )
    if attend is None:
        visible = visible_slots(slots, cache_positions)[None]
        output = layer(hidden_states, attention_mask=_attention_mask(layer, visible, hidden_states.dtype), **arguments)
    else:
        seqlens = filled_slots(slots, cache_positions, hidden_states.shape[0])
        with _use_attend(layer):
            output = layer(hidden_states, attention_mask=None, attend=attend, seqlens=seqlens, **arguments)
    finish_decode(slots, position)
    return output


@contextlib.contextmanager
def _use_attend(layer: torch.nn.Module) -> Iterator[None]:
    """Let the layer compute attention by the argument `attend` of its call."""
    from transformers import AttentionInterface

    AttentionInterface.register(_GIVEN_ATTENTION, _attend_to_cache)
    before = layer.config._attn_implementation
    layer.config._attn_implementation = _GIVEN_ATTENTION
    try:
        yield
    finally:
        layer.config._attn_implementation = before


def _attend_to_cache(module, query, key, value, attention_mask, *, attend, seqlens, scaling, **options):
    """Compute attention of one new token over the cache's slots; transformers calls this function."""
    out = attend(query, key, value, seqlens=seqlens, scale=scaling, causal=False)
    return out.transpose(1, 2), None


# ---- masks -------------------------------------------------------------------------------------------------

_PREFILL_MASKS: Newest[tuple, torch.Tensor] = Newest(4)


def _attention_implementation(layer: torch.nn.Module) -> str:
    # transformers reads None as eager attention. Eager attention without a mask is not causal.
    implementation = layer.config._attn_implementation or "eager"
    if implementation not in ATTENTION_IMPLEMENTATIONS:
        raise ValueError(f"the layer's attn_implementation is {implementation!r}; allowed: {ATTENTION_IMPLEMENTATIONS}")
    return implementation


def _prefill_mask(layer: torch.nn.Module, hidden_states: torch.Tensor, attended: int) -> torch.Tensor | None:
    """Return the causal mask of a prompt, (1, 1, S, attended), or None if SDPA's own `is_causal` is enough.

    The mask depends on shapes only, so the newest masks are kept: a whole model, too, builds one mask for all its layers.
    """
    length = hidden_states.shape[1]
    window = min(layer.self_attn.sliding_window or length, length)  # a longer window hides nothing
    if window == length > 1 and _attention_implementation(layer) == "sdpa":
        return None  # `is_causal` is aligned at the first key, so it hides the empty slots after the prompt
    device = hidden_states.device
    key = (_attention_implementation(layer), window, length, attended, hidden_states.dtype, device)
    if key in _PREFILL_MASKS:
        return _PREFILL_MASKS[key]
    query_position, key_position = torch.arange(length, device=device)[:, None], torch.arange(attended, device=device)
    visible = (key_position <= query_position) & (key_position > query_position - window)
    mask = _attention_mask(layer, visible, hidden_states.dtype)
    if not (is_capturing(hidden_states) or torch.compiler.is_compiling()):  # graphs free their tensors
        _PREFILL_MASKS[key] = mask
    return mask


def _attention_mask(layer: torch.nn.Module, visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask (1, 1, Sq, Sk): boolean for SDPA; for eager attention 0 or the dtype's lowest number, to add to scores."""
    if _attention_implementation(layer) == "eager":
        zero = torch.zeros((), dtype=dtype, device=visible.device)
        visible = zero.masked_fill(visible.logical_not(), torch.finfo(dtype).min)
    return visible[None, None]


# ---- checks of shapes, dtypes, devices and positions (which are read from a GPU once at most) ---------------


def _check_inputs(
    layer: torch.nn.Module,
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    position_embeddings: PositionEmbeddings,
) -> None:
    if not hasattr(layer, "self_attn"):
        raise TypeError(f"layer is a {type(layer).__name__}; build_decoder_layer() returns layer, rotary_emb")
    weight = layer.self_attn.q_proj.weight
    shape = tuple(hidden_states.shape)
    if len(shape) != 3 or shape[2] != weight.shape[1]:
        raise ValueError(f"hidden_states has shape {shape}; this layer takes (B, S, {weight.shape[1]})")
    if hidden_states.dtype != weight.dtype or hidden_states.device != weight.device:
        raise ValueError(
            f"hidden_states is {hidden_states.dtype} on {hidden_states.device} and the layer's weights are "
            f"{weight.dtype} on {weight.device}: create the inputs with the layer's dtype and device"
        )
    batch, length, _ = shape
    if tuple(position_ids.shape) not in ((batch, length), (1, length)):
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}; batch {batch} with {length} token(s) needs "
            f"({batch}, {length})"
        )
    kind, expected = layer.self_attn.layer_type, (length, layer.self_attn.head_dim)
    if (other := known_position(position_embeddings[0])[1] or kind) != kind:
        raise ValueError(f"position_embeddings have the layer_type {other!r}; make them with this layer's, {kind!r}")
    for name, tensor in zip(("cos", "sin"), position_embeddings, strict=True):
        if tuple(tensor.shape) not in ((batch, *expected), (1, *expected)) or tensor.dtype != weight.dtype:
            raise ValueError(
                f"position_embeddings' {name} has shape {tuple(tensor.shape)} in {tensor.dtype}; this call needs "
                f"{(batch, *expected)} in {weight.dtype}: use get_position_embeddings with these tokens and position_ids"
            )


def _check_positions(first: int | None, position_ids: torch.Tensor, position_embeddings: PositionEmbeddings) -> None:
    embedded, _ = known_position(position_embeddings[0])
    given = {"position_ids": first_position(position_ids), "position_embeddings": embedded}
    for name, begin in given.items():
        if None not in (first, begin) and first != begin:
            alike = "position_ids, the rotary embedding and cache_positions are of the same tokens"
            raise ValueError(f"{name} must count up from {first}, the first token's position: {alike}")
