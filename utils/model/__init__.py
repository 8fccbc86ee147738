"""One Gemma-3 decoder layer, its KV cache, and the FLOPs and bytes of its operations."""

# ruff: noqa: F401 (these imports are the names of the package)
from utils.model.kv_cache import initialize_kv_cache
from utils.model.layer import (
    build_decoder_layer,
    create_decode_inputs_with_cache,
    create_decode_inputs_without_cache,
    create_prefill_inputs,
    decode_forward,
    get_position_embeddings,
    prefill_forward,
)
