"""A static KV cache: the slot of each token, the slots that a token may see, and the checks of calls.

The `StaticCache` of transformers keeps its own position and advances it at every call. Here the position is an argument:

| layer              | slots                                | token at position p goes to slot |
|--------------------|--------------------------------------|----------------------------------|
| full attention     | `max_cache_len`                      | p                                |
| sliding attention  | `min(sliding_window, max_cache_len)` | p mod slots, a ring              |

`StaticCache` moves a full sliding window down by one slot for each token. The ring writes one slot instead. Writing the
same position twice leaves the same cache, so a decode step can be repeated and timed.

A decode step computes its slot and its mask on the device from the position, so it need not wait for the GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from utils.validation import whole_number

if TYPE_CHECKING:
    from transformers import Gemma3TextConfig, StaticCache
    from transformers.cache_utils import StaticLayer


def initialize_kv_cache(config: Gemma3TextConfig, max_cache_len: int) -> StaticCache:
    """Make an empty static KV cache for `max_cache_len` tokens, prompt and decoded tokens together.

    A layer's slots are allocated at its first prefill, which fixes their batch size, dtype and device.

    Returns:
        A transformers `StaticCache`. Keys and values of a full-attention layer have the shape
        (B, Hkv, max_cache_len, D); a sliding-window layer has at most `config.sliding_window` slots.
    """
    check_config(config)
    whole_number("max_cache_len", max_cache_len)
    from transformers import StaticCache

    cache = StaticCache(config=config, max_cache_len=max_cache_len)
    cache.capacity = max_cache_len  # in tokens: if every layer slides, the number of slots is smaller
    return cache


def check_config(config: object) -> None:
    """Raise TypeError if `config` is not the configuration of a text model."""
    if not hasattr(config, "num_hidden_layers"):
        raise TypeError(f"config is {config!r}; it must be a Gemma3TextConfig, such as GEMMA_CONFIG of utils.")


def start_prefill(cache: StaticCache, layer: torch.nn.Module, hidden_states: torch.Tensor) -> StaticLayer:
    """Empty or allocate the layer's slots for a prompt (B, S, hidden_size), and return them."""
    slots, capacity = _slots(cache, layer)
    length = hidden_states.shape[1]
    if length > capacity:
        raise ValueError(
            f"the prompt has {length} tokens and the cache has room for {capacity}: make a longer one with "
            f"initialize_kv_cache(config, max_cache_len={length}) or more"
        )
    if slots.is_initialized:
        _check_allocation(slots, hidden_states)
        slots.reset()
    else:
        # Allocate the slots before the layer runs, so that a compiled or captured layer finds them.
        head_dim = layer.self_attn.head_dim
        heads = layer.self_attn.k_proj.out_features // head_dim
        with torch.inference_mode(False):  # an inference tensor cannot be written outside that mode
            no_keys = hidden_states.new_empty(hidden_states.shape[0], heads, 0, head_dim)
            slots.lazy_initialization(no_keys, no_keys)
            slots.slot_numbers = torch.arange(slots.max_cache_len, device=hidden_states.device)
    slots.tokens_held = 0
    return slots


def finish_prefill(slots: StaticLayer, length: int) -> None:
    """Put the newest tokens in ring order after a prompt of `length` tokens, and note the number of tokens."""
    if length > slots.max_cache_len and (shift := length % slots.max_cache_len):
        # transformers has written the newest tokens in order from slot 0.
        slots.keys.copy_(slots.keys.roll(shift, dims=2))
        slots.values.copy_(slots.values.roll(shift, dims=2))
    slots.tokens_held = length


def start_decode(
    cache: StaticCache, layer: torch.nn.Module, hidden_states: torch.Tensor, cache_positions: torch.Tensor
) -> tuple[StaticLayer, int | None]:
    """Point the layer's slots at the position to write.

    Returns:
        `(slots, position)`: the layer's slots; the position as a Python int, or None in a trace or capture.
    """
    slots, capacity = _slots(cache, layer)
    if not hasattr(slots, "tokens_held"):
        raise ValueError("the cache is empty: run prefill_forward on it before decode_forward")
    _check_allocation(slots, hidden_states)
    if tuple(cache_positions.shape) != (1,) or cache_positions.dtype != torch.int64:
        raise ValueError(
            f"cache_positions is {cache_positions.dtype} of shape {tuple(cache_positions.shape)}; it must be "
            "one position, torch.tensor([position], device=...)"
        )
    position = first_position(cache_positions)
    if position is not None:
        _check_position(slots, position, capacity)
    # transformers writes to the slot in `cumulative_length`, if `cumulative_length_int` says that the window is not full.
    slot = cache_positions.view(())
    if slots.is_sliding:
        torch.remainder(slot, slots.max_cache_len, out=slots.cumulative_length)
        slots.cumulative_length_int = 0
    else:
        slots.cumulative_length.copy_(slot)
    return slots, position


def visible_slots(slots: StaticLayer, cache_positions: torch.Tensor) -> torch.Tensor:
    """Return a boolean (slots,), True for the slots that the token at this position may see."""
    # After the first round of a ring, every slot number is at or below the position, and the token sees every slot.
    return slots.slot_numbers <= cache_positions


def filled_slots(slots: StaticLayer, cache_positions: torch.Tensor, batch: int) -> torch.Tensor:
    """Return the number of slots that the token at this position may see, from the first slot on: (batch,) int32."""
    filled = torch.empty(batch, dtype=torch.int32, device=cache_positions.device)
    torch.add(cache_positions.expand(batch), 1, out=filled)
    return filled.clamp_(max=slots.max_cache_len) if slots.is_sliding else filled


def finish_decode(slots: StaticLayer, position: int | None) -> None:
    """Note that the newest token in the slots is at `position`."""
    if slots.is_sliding and position is not None:
        slots.cumulative_length_int = position + 1  # the result of cache.get_seq_length()
    # A replay of a captured step has other positions: then the number of tokens is unknown until the next prefill.
    slots.tokens_held = None if position is None or is_capturing(slots.keys) else position + 1


def remember_position(positions: torch.Tensor, first: int | None, layer_type: str | None = None) -> None:
    """Attach the first position to a tensor of positions; to embeddings, attach the first position and their type of layer."""
    positions.known_position = first, layer_type, None if positions.is_inference() else positions._version


def known_position(positions: torch.Tensor) -> tuple[int | None, str | None]:
    """Return the attached position and layer type; None for each if it is missing or the tensor has changed in place."""
    first, layer_type, version = getattr(positions, "known_position", (None, None, None))
    if torch.compiler.is_compiling() or positions.is_inference():  # torch does not count the changes of such tensors
        return None, layer_type
    return (first, layer_type) if version == positions._version else (None, None)


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is capturing work on this tensor's device."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def first_position(positions: torch.Tensor) -> int | None:
    """Return the first position; -1 if the positions do not count up along their last dimension; None in a trace or capture.

    A tensor is read once, and again only after a change in place, so that the timed calls of a benchmark do not wait for
    the GPU. An inference tensor is read at each call.
    """
    if (first := known_position(positions)[0]) is not None or torch.compiler.is_compiling() or is_capturing(positions):
        return first
    here = positions.cpu()
    first = int(here.flatten()[0])
    first = first if (here == torch.arange(first, first + here.shape[-1])).all() else -1
    remember_position(positions, first)
    return first


def _slots(cache: StaticCache, layer: torch.nn.Module) -> tuple[StaticLayer, int]:
    """Return the layer's slots, and the capacity of the cache in tokens."""
    from transformers import StaticCache

    if not isinstance(cache, StaticCache):
        raise TypeError(f"past_key_values is a {type(cache).__name__}; make a StaticCache by initialize_kv_cache")
    return cache.layers[layer.self_attn.layer_idx], getattr(cache, "capacity", None) or cache.get_max_length()


def _check_allocation(slots: StaticLayer, hidden_states: torch.Tensor) -> None:
    allocated, needed = ((t.shape[0], t.dtype, t.device) for t in (slots.keys, hidden_states))
    if allocated != needed:
        raise ValueError(
            "the cache was allocated for batch {}, {} on {}, and hidden_states has batch {}, {} on {}: make "
            "a new cache with initialize_kv_cache(config, max_cache_len)".format(*allocated, *needed)
        )


def _check_position(slots: StaticLayer, position: int, capacity: int) -> None:
    if position >= capacity:
        raise IndexError(
            f"position {position} is past the end of the cache, which has room for {capacity} tokens, "
            f"positions 0 to {capacity - 1}: make a longer one, initialize_kv_cache(config, max_cache_len), "
            "and prefill it"
        )
    held = slots.tokens_held
    if held is None:
        return
    if not 0 <= position <= held:
        raise ValueError(
            f"cache_positions says {position}, and the cache holds {held} tokens: the next position is {held}"
        )
    if slots.is_sliding and held > slots.max_cache_len and position < held - 1:
        raise ValueError(
            f"position {position} cannot be decoded again: the sliding window's {slots.max_cache_len} slots "
            f"have moved on to position {held - 1}; run prefill_forward again"
        )
