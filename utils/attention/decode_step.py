"""A decode step of the Gemma-3 layer, with the fastest attention for it.

In a CUDA graph on a Hopper GPU that is the decode kernel of `utils/attention/gluon/decode`. On an H200, a step of the sliding
layer took 142.4 us with the kernel and 153.2 us with the layer's own attention (one sequence), and 204.9 and 239.7 us (64
sequences of 4096 tokens). A step of the full layer took 262.9 and 465.8 us (64 sequences): assets/results/h200/decode_layer.json.
Outside of a graph the host limits the step: it needs 1.6 to 2.6 ms for the launches of either attention. So there the layer
keeps its own attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from utils import model
from utils.attention.decode import attention_decode
from utils.attention.gluon.decode.plan import refuse
from utils.machine.device import gluon_support

if TYPE_CHECKING:
    from transformers import StaticCache


def decode_forward(  # noqa: D103 (its docstring is the model's, below)
    layer: torch.nn.Module,
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    use_kv_cache: bool,
    past_key_values: StaticCache | None = None,
    cache_positions: torch.Tensor | None = None,
    prefill_hidden_states: torch.Tensor | None = None,
    attend: Callable[..., torch.Tensor] | str | None = "auto",
) -> torch.Tensor:
    if isinstance(attend, str):
        if attend != "auto":
            raise ValueError(
                f'attend is {attend!r}; allowed: "auto", None (the layer\'s own attention), or a function such as '
                "utils.attention.attention_decode"
            )
        attend = attention_for_step(layer, hidden_states) if use_kv_cache else None
    return model.decode_forward(
        layer,
        hidden_states,
        position_ids,
        position_embeddings,
        use_kv_cache,
        past_key_values,
        cache_positions,
        prefill_hidden_states,
        attend,
    )


decode_forward.__doc__ = model.decode_forward.__doc__  # it has the same arguments, and describes "auto", too


def attention_for_step(layer: torch.nn.Module, hidden_states: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """Return the attention for a layer's decode step under "auto"; None: the layer's own attention.

    A layer with eager attention keeps it, because the caller has named it.
    """
    if not hidden_states.is_cuda or not gluon_support() or not torch.cuda.is_current_stream_capturing():
        return None
    attention = layer.self_attn
    if layer.config._attn_implementation != "sdpa" or hidden_states.dtype not in (torch.float16, torch.bfloat16):
        return None
    group = attention.q_proj.out_features // attention.k_proj.out_features
    if attention.head_dim % 8 or attention.head_dim > 256 or refuse(group, 1, len(hidden_states)):
        return None
    return functools.partial(attention_decode, backend="gluon")
