"""One Gemma-3 decoder layer from transformers: prefill and decode, with a static KV cache or without.

    layer, rotary_emb = build_decoder_layer()
    cache = initialize_kv_cache(layer.config, max_cache_len=1024)
    hidden_states, position_ids = create_prefill_inputs(1, 512, 640, torch.bfloat16, device)
    position_embeddings = get_position_embeddings(
        hidden_states, position_ids, rotary_emb, layer.self_attn.layer_type
    )
    prefill_forward(layer, hidden_states, position_ids, position_embeddings, cache)

- `prefill_forward` starts afresh: it drops what the cache held for this layer.
- `decode_forward` writes its token at `cache_positions` and attends to the positions up to it. The same call
  made twice gives the same result, so a step can be timed any number of times; the next token needs the next
  position.
- A decode step does not wait for the GPU, so it can be captured in a CUDA graph. Between replays change
  `hidden_states`, `position_embeddings` and `cache_positions` in place; nothing checks the positions of a
  replay.
- All of it is inference: no gradients are recorded.
"""

import copy
import difflib
import functools
import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from utils.model.kv_cache import (
    finish_decode,
    finish_prefill,
    initialize_kv_cache,
    is_capturing,
    remember_position,
    start_decode,
    start_prefill,
)

if TYPE_CHECKING:
    from transformers import Gemma3TextConfig, StaticCache

__all__ = [
    "build_decoder_layer",
    "create_decode_inputs_with_cache",
    "create_decode_inputs_without_cache",
    "create_prefill_inputs",
    "decode_forward",
    "get_position_embeddings",
    "initialize_kv_cache",
    "prefill_forward",
]

PositionEmbeddings = tuple[torch.Tensor, torch.Tensor]

ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")


def _names_checked(function):
    """Answer a misspelt keyword argument with the name that was probably meant."""
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args, **kwargs):
        for name in kwargs:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"its arguments are {', '.join(names)}"
                raise TypeError(f"{function.__name__}() has no argument {name!r}: {hint}")
        return function(*args, **kwargs)

    return checked


initialize_kv_cache = _names_checked(initialize_kv_cache)


# ---- the layer ---------------------------------------------------------------------------------------------


@_names_checked
def build_decoder_layer(
    config: "Gemma3TextConfig | None" = None,
    layer_idx: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    attn_implementation: str = "sdpa",
    seed: int = 0,
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Build one Gemma-3 decoder layer with random weights, and its rotary embedding; nothing is downloaded.

    Args:
        config: the model's sizes, `GEMMA_CONFIG` if None. The layer gets a copy; the original stays as it is.
        layer_idx: which layer. In `GEMMA_CONFIG` layers 0 to 4 attend within a sliding window, 5 to
            everything.
        device: where the weights go; if None the GPU, or the CPU where there is none.
        attn_implementation: "sdpa" (`scaled_dot_product_attention`) or "eager" (matmul, softmax, matmul).
        seed: of the weights, the same on every device; torch's own generator is left alone.

    Returns:
        `(layer, rotary_emb)`. `layer.self_attn.layer_type` is what `get_position_embeddings` wants to know.
    """
    if attn_implementation not in ATTENTION_IMPLEMENTATIONS:
        allowed = ", ".join(ATTENTION_IMPLEMENTATIONS)
        raise ValueError(f"attn_implementation is {attn_implementation!r}; allowed: {allowed}")
    if config is None:
        from utils.config import GEMMA_CONFIG as config
    if layer_idx not in range(config.num_hidden_layers):
        last = config.num_hidden_layers - 1
        raise ValueError(f"layer_idx is {layer_idx}; this config has layers 0 to {last}")
    if device is None:
        from utils.machine.device import default_device

        device = default_device()
    from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3RotaryEmbedding

    config = copy.deepcopy(config)
    config._attn_implementation = attn_implementation  # read at every forward: two layers must not share it
    with torch.device("meta"):
        layer = Gemma3DecoderLayer(config, layer_idx).to(dtype)
    layer.to_empty(device=device)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in layer.named_parameters():
        # Gemma's RMSNorm multiplies by 1 + weight, so zero is its neutral weight.
        std = 0.0 if name.endswith("norm.weight") else config.initializer_range
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * std)
    return layer.eval().requires_grad_(False), Gemma3RotaryEmbedding(config).to(device)


@_names_checked
def get_position_embeddings(
    hidden_states: torch.Tensor, position_ids: torch.Tensor, rotary_emb: torch.nn.Module, layer_type: str
) -> PositionEmbeddings:
    """Compute the rotary position embeddings (cos, sin) of some positions.

    Args:
        hidden_states: gives the dtype and the device.
        position_ids: (B, S) or (1, S), the positions.
        rotary_emb: from `build_decoder_layer`.
        layer_type: "sliding_attention" or "full_attention"; they rotate at different speeds.

    Returns:
        `(cos, sin)`, each (B, S, head_dim) or (1, S, head_dim).
    """
    if layer_type not in rotary_emb.layer_types:
        raise ValueError(f"layer_type is {layer_type!r}; allowed: {', '.join(rotary_emb.layer_types)}")
    if position_ids.dim() != 2:
        raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}; it must be (B, S) or (1, S)")
    return rotary_emb(hidden_states, position_ids, layer_type)


# ---- pseudo inputs -----------------------------------------------------------------------------------------


@_names_checked
def create_prefill_inputs(
    batch_size: int, seq_len: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Create pseudo inputs for the prefill of a prompt of `seq_len` tokens, standard normal.

    Returns:
        `(hidden_states, position_ids)`: (B, S, hidden_size) and (B, S), positions 0 to S - 1.
    """
    _check_counts(batch_size=batch_size, seq_len=seq_len, hidden_size=hidden_size)
    hidden_states = torch.randn(batch_size, seq_len, hidden_size, dtype=dtype, device=device)
    return hidden_states, torch.arange(seq_len, device=device).repeat(batch_size, 1)


@_names_checked
def create_decode_inputs_with_cache(
    batch_size: int, current_seq_len: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Create pseudo inputs for decoding the token after `current_seq_len` cached ones, standard normal.

    Returns:
        `(hidden_states, position_ids, cache_positions)`: (B, 1, hidden_size), (B, 1) and (1,). Both positions
        are `current_seq_len`: the first token has position 0.
    """
    _check_counts(batch_size=batch_size, current_seq_len=current_seq_len, hidden_size=hidden_size)
    hidden_states = torch.randn(batch_size, 1, hidden_size, dtype=dtype, device=device)
    cache_positions = torch.full((1,), current_seq_len, device=device)
    remember_position(cache_positions, current_seq_len)
    return hidden_states, cache_positions.repeat(batch_size, 1), cache_positions


@_names_checked
def create_decode_inputs_without_cache(
    batch_size: int, current_seq_len: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Create pseudo inputs for decoding the token after `current_seq_len` uncached ones, standard normal.

    Without a cache the whole sequence is computed again, so `position_ids` covers all of it.

    Returns:
        `(hidden_states, position_ids, prefill_hidden_states)`: (B, 1, hidden_size); (B, current_seq_len + 1),
        positions 0 to current_seq_len; (B, current_seq_len, hidden_size).
    """
    _check_counts(batch_size=batch_size, current_seq_len=current_seq_len, hidden_size=hidden_size)
    hidden_states = torch.randn(batch_size, 1, hidden_size, dtype=dtype, device=device)
    prefill_hidden_states = torch.randn(batch_size, current_seq_len, hidden_size, dtype=dtype, device=device)
    position_ids = torch.arange(current_seq_len + 1, device=device).repeat(batch_size, 1)
    return hidden_states, position_ids, prefill_hidden_states


# ---- forward passes ----------------------------------------------------------------------------------------


@_names_checked
@torch.no_grad()
def prefill_forward(
    layer: torch.nn.Module,
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    position_embeddings: PositionEmbeddings,
    past_key_values: "StaticCache | None" = None,
) -> torch.Tensor:
    """Run a whole prompt through the layer, causally, and fill the cache with its keys and values.

    Args:
        hidden_states: (B, S, hidden_size).
        position_ids: (B, S) or (1, S), counting from 0.
        position_embeddings: (cos, sin) of these positions, from `get_position_embeddings`.
        past_key_values: the cache to fill, from `initialize_kv_cache`. What it held for this layer is dropped
            first, so a second prefill gives the same result and the cache keeps its size. None: no cache.

    Returns:
        (B, S, hidden_size).
    """
    _check_inputs(layer, hidden_states, position_ids, position_embeddings)
    length = attended = hidden_states.shape[1]
    if past_key_values is not None:
        slots = start_prefill(past_key_values, layer, hidden_states)
        # The layer attends to all its slots, or to the prompt itself if that is longer.
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


@_names_checked
@torch.no_grad()
def decode_forward(
    layer: torch.nn.Module,
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    position_embeddings: PositionEmbeddings,
    use_kv_cache: bool,
    past_key_values: "StaticCache | None" = None,
    cache_positions: torch.Tensor | None = None,
    prefill_hidden_states: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one new token through the layer, with the cache or by computing the whole sequence again.

    Args:
        hidden_states: (B, 1, hidden_size), the new token.
        position_ids: (B, 1) with a cache; (B, S + 1), every position, without one.
        position_embeddings: (cos, sin) of `position_ids`, from `get_position_embeddings`.
        use_kv_cache: True uses the next two arguments, False the last one.
        past_key_values: the cache, filled by `prefill_forward`.
        cache_positions: (1,), the new token's position: how many tokens are before it. To decode at a
            position again overwrites it and drops what came after it. A GPU tensor that
            `create_decode_inputs_with_cache` did not make is read once, to check it: warm up before timing.
        prefill_hidden_states: (B, S, hidden_size), all tokens before the new one.

    Returns:
        (B, 1, hidden_size), the same with the cache and without it.
    """
    if hidden_states.dim() == 3 and hidden_states.shape[1] != 1:
        shape = tuple(hidden_states.shape)
        raise ValueError(f"decode takes one token, hidden_states (B, 1, hidden_size); its shape is {shape}")
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

    if past_key_values is None or cache_positions is None:
        missing = "past_key_values" if past_key_values is None else "cache_positions"
        raise ValueError(f"decode with a cache needs {missing}; use_kv_cache=False decodes without a cache")
    _check_inputs(layer, hidden_states, position_ids, position_embeddings)
    slots, visible, position = start_decode(past_key_values, layer, hidden_states, cache_positions)
    output = layer(
        hidden_states,
        position_embeddings=position_embeddings,
        attention_mask=_decode_mask(layer, visible, hidden_states),
        position_ids=position_ids,
        past_key_values=past_key_values,
    )
    finish_decode(slots, position)
    return output


# ---- masks -------------------------------------------------------------------------------------------------

_PREFILL_MASKS: dict[tuple, torch.Tensor | None] = {}
_PREFILL_MASKS_KEPT = 4


def _attention_implementation(layer: torch.nn.Module) -> str:
    # None is eager attention to transformers, and eager without a mask is not causal.
    implementation = layer.config._attn_implementation or "eager"
    if implementation not in ATTENTION_IMPLEMENTATIONS:
        raise ValueError(
            f"the layer's attention implementation is {implementation!r}; allowed: "
            f"{', '.join(ATTENTION_IMPLEMENTATIONS)} (build_decoder_layer(attn_implementation=...))"
        )
    return implementation


def _prefill_mask(layer: torch.nn.Module, hidden_states: torch.Tensor, attended: int) -> torch.Tensor | None:
    """The causal mask of a fresh sequence, (1, 1, S, attended); None where SDPA's own `is_causal` will do.

    It depends on shapes alone, so the last few are kept: a model, too, builds one mask for all its layers.
    """
    length = hidden_states.shape[1]
    window = layer.self_attn.sliding_window
    if window is not None and length <= window:
        window = None  # nothing is further back than the window
    implementation = _attention_implementation(layer)
    key = (implementation, window, length, attended, hidden_states.dtype, hidden_states.device)
    if key in _PREFILL_MASKS:
        return _PREFILL_MASKS[key]
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    create = create_causal_mask if window is None else create_sliding_window_causal_mask
    # An empty static cache whose length is known here; the real one would have to be read back from the GPU.
    empty_cache = SimpleNamespace(
        is_compileable=True, get_query_offset=lambda _: 0, get_mask_sizes=lambda *_: (attended, 0)
    )
    mask = create(
        SimpleNamespace(_attn_implementation=implementation, is_causal=True, sliding_window=window),
        inputs_embeds=hidden_states[:1],
        attention_mask=None,
        past_key_values=empty_cache,
        layer_idx=0,
    )
    if not (is_capturing(hidden_states) or torch.compiler.is_compiling()):  # a graph's memory is its own
        if len(_PREFILL_MASKS) >= _PREFILL_MASKS_KEPT:
            _PREFILL_MASKS.pop(next(iter(_PREFILL_MASKS)))
        _PREFILL_MASKS[key] = mask
    return mask


def _decode_mask(layer: torch.nn.Module, visible: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """(1, 1, 1, slots): boolean for SDPA; for eager 0 or the dtype's lowest number, to add to the scores."""
    if _attention_implementation(layer) == "eager":
        lowest = torch.finfo(hidden_states.dtype).min
        visible = hidden_states.new_zeros(()).masked_fill(visible.logical_not(), lowest)
    return visible[None, None, None]


# ---- checks: shapes, dtypes and devices only, so nothing waits for the GPU ---------------------------------


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} is {count!r}; it must be a whole number, 1 or more")


def _check_inputs(
    layer: torch.nn.Module,
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    position_embeddings: PositionEmbeddings,
) -> None:
    if not hasattr(layer, "self_attn"):
        raise TypeError(f"layer is a {type(layer).__name__}; build_decoder_layer() builds a decoder layer")
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
    wanted = (length, layer.self_attn.head_dim)
    for name, tensor in zip(("cos", "sin"), position_embeddings, strict=True):
        if tuple(tensor.shape) not in ((batch, *wanted), (1, *wanted)):
            raise ValueError(
                f"position_embeddings' {name} has shape {tuple(tensor.shape)}; this call needs "
                f"{(batch, *wanted)}, which get_position_embeddings gives for its position_ids"
            )
        if tensor.dtype != hidden_states.dtype or tensor.device != hidden_states.device:
            raise ValueError(
                f"position_embeddings' {name} is {tensor.dtype} on {tensor.device} and hidden_states "
                f"{hidden_states.dtype} on {hidden_states.device}: get_position_embeddings of these "
                "hidden_states gives the right ones"
            )
