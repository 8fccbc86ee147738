"""Part 3: the work, the traffic and the cache of a Gemma-3 decoder layer."""

from __future__ import annotations

import math
from types import SimpleNamespace

from instructor.checks.common import DTYPES, Draw, dtype_name, expect_counts, expect_value
from utils.checking import check
from utils.checking.labs.lab1.gemma import expect_decoded, small_layer
from utils.config import GEMMA_CONFIG

_UNITS = ("MACs", "FLOPs", "bytes")


def _draw_config(draw: Draw) -> SimpleNamespace:
    """Draw the configuration of a model like Gemma-3 in which no two sizes are equal."""
    kv_heads, group = draw.choice((2, 3)), draw.choice((2, 4, 5))
    return SimpleNamespace(
        hidden_size=draw.size(100, 900),
        intermediate_size=draw.size(1000, 3000),
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=draw.choice((32, 48, 96, 256)),
        num_hidden_layers=6,
        sliding_window=draw.size(100, 300),
        layer_types=["sliding_attention"] * 4 + ["full_attention"] + ["sliding_attention"],
    )


def _pairs(query_len: int, kv_len: int, window: int | None) -> int:
    return sum(p + 1 if window is None else min(p + 1, window) for p in range(kv_len - query_len, kv_len))


@check("3.1", "Attended pairs")
def attended_pairs(attended_pairs, seed=None):
    """Check prefill, decode and chunks, with and without a window."""
    draw = Draw(seed)
    length, window = draw.size(40, 90), draw.size(5, 20)
    cases = [(1, 1, None), (length, length, None), (1, length, None), (draw.size(2, 30), length, None)]
    cases += [(length, length, window), (1, length, window), (1, window, window), (1, window + 1, window)]
    cases += [(draw.size(2, 30), length, window), (length, length, length + 7), (length, length, 1)]
    for query_len, kv_len, w in cases:
        expect_value(
            attended_pairs(query_len, kv_len, w),
            _pairs(query_len, kv_len, w),
            "pairs",
            f"attended_pairs({query_len}, {kv_len}, {w})",
            {
                "The causal mask hides the keys after each query.": query_len * kv_len,
                "A query attends to itself, too.": _pairs(query_len, kv_len, w) - query_len,
                "A window of w has w keys, the query's own included.": _pairs(query_len, kv_len, w and w + 1),
                "The window has one key more.": _pairs(query_len, kv_len, w - 1) if w and w > 1 else math.nan,
                "The window is not used.": _pairs(query_len, kv_len, None),
                "The first queries see fewer keys than a whole window.": query_len * min(kv_len, w) if w else math.nan,
                "The queries are the LAST query_len of the kv_len positions.": _pairs(query_len, query_len, w),
            },
        )


def _attention(batch, query_len, kv_len, config, size, window=None, *, kv_heads=None, keys_read=None, pairs=None):
    """Return (MACs, FLOPs, bytes) of attention; each keyword argument stands for a known mistake."""
    h, d, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    kv_heads = config.num_key_value_heads if kv_heads is None else kv_heads
    pairs = _pairs(query_len, kv_len, window) if pairs is None else pairs
    if keys_read is None:
        keys_read = kv_len if window is None else min(kv_len, window + query_len - 1)
    t, wide, narrow = batch * query_len, heads * d, kv_heads * d
    macs = t * h * wide + 2 * t * h * narrow + t * wide * h + 2 * batch * heads * pairs * d
    elements = (t * h + h * wide + t * wide) + 2 * (t * h + h * narrow + t * narrow)
    elements += t * wide + 2 * batch * keys_read * narrow + t * wide
    elements += t * wide + wide * h + t * h
    return macs, 2 * macs, elements * size


def _follows_pairs(got, attended_pairs, place: tuple, args: tuple[int, int, int, object], size: int) -> bool:
    """Return whether the counts follow from the student's own number of pairs."""
    query_len, kv_len, window = place
    try:
        pairs = attended_pairs(query_len, kv_len, window)
        if int(pairs) != pairs or not 0 <= pairs <= query_len * kv_len:  # any formula matches infinity
            return False
        own = _attention(*args, size, window, pairs=pairs)
        return len(got) == 3 and all(math.isclose(g, e, rel_tol=1e-9) for g, e in zip(got, own, strict=True))
    except Exception:  # a missing or failing attended_pairs says nothing about the cost
        return False


@check("3.1", "Cost of attention")
def attention_cost(attention_macs_flops_bytes, attended_pairs=None, seed=None):
    """Check the five operators with grouped heads, in prefill and decode, in full and in sliding layers.

    A wrong number of pairs costs the points of `attended_pairs` only: a cost that follows from this number passes.
    """
    draw = Draw(seed)
    configs = GEMMA_CONFIG, _draw_config(draw), _draw_config(draw)
    for config, dtype in zip(configs, draw.choose(3, DTYPES), strict=True):
        length, window = draw.size(300, 900), draw.size(20, 200)
        size = dtype.itemsize
        for query_len, kv_len, w in (
            (length, length, None),
            (1, length, None),
            (length, length, window),
            (1, length, window),
            (7, length, window),
            (1, window - 3, window),
        ):
            batch = draw.size(2, 9)
            args = (batch, query_len, kv_len, config)
            expected = _attention(*args, size, w)
            no_projections = 2 * batch * config.num_attention_heads * _pairs(query_len, kv_len, w) * config.head_dim
            where = "sliding window" if w else "full attention"
            got = attention_macs_flops_bytes(*args, dtype, w)
            if got == expected or _follows_pairs(got, attended_pairs, (query_len, kv_len, w), args, size):
                continue
            expect_counts(
                got,
                expected,
                _UNITS,
                f"attention_macs_flops_bytes({batch}, {query_len}, {kv_len}, config, {dtype_name(dtype)}, {w}) "
                f"({where}, hidden {config.hidden_size}, heads {config.num_attention_heads}, "
                f"kv heads {config.num_key_value_heads}, head_dim {config.head_dim})",
                {
                    "Keys and values have num_key_value_heads heads, not num_attention_heads.": _attention(
                        *args, size, w, kv_heads=config.num_attention_heads
                    ),
                    "Count the pairs that the mask lets through, not the whole square.": _attention(
                        *args, size, w, pairs=query_len * kv_len
                    ),
                    "With a window, only the keys that at least one query can see are read.": _attention(
                        *args, size, w, keys_read=kv_len
                    ),
                    "The window limits the pairs.": (*_attention(*args, size, None)[:2], math.nan),
                    "A window of w has w keys, the query's own included.": _attention(
                        *args, size, w, pairs=_pairs(query_len, kv_len, w and w + 1)
                    ),
                    "Several queries see more keys together than one window.": _attention(
                        *args, size, w, keys_read=min(kv_len, w or kv_len)
                    ),
                    "The number of bytes depends on the dtype.": _attention(*args, 4, w),
                    "These are elements, not bytes.": _attention(*args, 1, w),
                    "A FLOP is not a MAC: one multiply-accumulate is two FLOPs.": (
                        2 * expected[0],
                        expected[0],
                        math.nan,
                    ),
                    "The four projections are missing.": (no_projections, 2 * no_projections, math.nan),
                    "The scores are a matrix product, and so is their product with the values.": _attention(
                        *args, size, w, pairs=_pairs(query_len, kv_len, w) / 2
                    ),
                    "Each pair costs D MACs for each QUERY head.": _attention(
                        *args,
                        size,
                        w,
                        pairs=_pairs(query_len, kv_len, w) * config.num_key_value_heads / config.num_attention_heads,
                    ),
                },
            )


def _mlp(t, h, i, size, *, wide=8, narrow=3, weights=3):
    macs = 3 * t * h * i
    return macs, 2 * macs, (weights * h * i + narrow * t * h + wide * t * i) * size


@check("3.2", "MLP and norms")
def mlp_and_norm_costs(mlp_macs_flops_bytes, rms_norm_flops_bytes, seed=None):
    """Check the five operators of the gated MLP, and RMSNorm."""
    draw = Draw(seed)
    for config in (GEMMA_CONFIG, _draw_config(draw)):
        for dtype in DTYPES:
            t, h, i, size = draw.size(1, 5000), config.hidden_size, config.intermediate_size, dtype.itemsize
            macs, flops, n_bytes = _mlp(t, h, i, size)
            expect_counts(
                mlp_macs_flops_bytes(t, config, dtype),
                (macs, flops, n_bytes),
                _UNITS,
                f"mlp_macs_flops_bytes({t}, config, {dtype_name(dtype)}) (hidden {h}, intermediate {i})",
                {
                    "There are three matrices: gate, up and down.": (
                        2 * t * h * i,
                        4 * t * h * i,
                        _mlp(t, h, i, size, weights=2)[2],
                    ),
                    "The number of bytes depends on the dtype.": _mlp(t, h, i, 4),
                    "These are elements, not bytes.": _mlp(t, h, i, 1),
                    "A FLOP is not a MAC: one multiply-accumulate is two FLOPs.": (2 * macs, macs, math.nan),
                    "gate and up are two operators, and each reads its input.": _mlp(t, h, i, size, narrow=2),
                    "GELU and the product are operators of their own: they read and write.": _mlp(
                        t, h, i, size, wide=3
                    ),
                    "GELU and the product are two operators here, each with its own reads and writes.": _mlp(
                        t, h, i, size, wide=6
                    ),
                    "The elementwise product reads two tensors.": _mlp(t, h, i, size, wide=7),
                    "Weights are read, too.": _mlp(t, h, i, size, weights=0),
                },
            )
            expect_counts(
                rms_norm_flops_bytes(t, h, dtype),
                (4 * t * h, (2 * t * h + h) * size),
                ("FLOPs", "bytes"),
                f"rms_norm_flops_bytes({t}, {h}, {dtype_name(dtype)})",
                {
                    "The number of bytes depends on the dtype.": (math.nan, (2 * t * h + h) * 4),
                    "The weight is read, too.": (math.nan, 2 * t * h * size),
                    "The weight is one vector, the same for all tokens.": (math.nan, 3 * t * h * size),
                    "One fused operator reads its input once.": (math.nan, (3 * t * h + h) * size),
                },
            )


@check("3.3", "Decoding with a KV cache")
def decode_with_cache(decode_with_cache, seed=None):
    """Check that the result equals a full prefill, and that the prompt runs once and each new token alone."""
    draw = Draw(seed)
    for layer_idx in (5, 0):
        layer, rotary_emb = small_layer(layer_idx)
        batch, prompt_len, new = draw.size(2, 3), draw.size(11, 14), draw.size(4, 7)
        tokens = draw.normal(batch, prompt_len + new, layer.config.hidden_size)
        expect_decoded(decode_with_cache, layer, rotary_emb, tokens, prompt_len)


@check("3.3", "KV-cache bytes")
def kv_cache_bytes(kv_cache_bytes, seed=None):
    """Check the size of the keys and values of all layers; sliding layers keep their window only."""
    draw = Draw(seed)
    for config in (GEMMA_CONFIG, _draw_config(draw)):
        kinds, window, d = config.layer_types, config.sliding_window, config.head_dim
        sliding = sum(kind == "sliding_attention" for kind in kinds)
        full = len(kinds) - sliding
        lengths = draw.size(10, 99), window, draw.size(1000, 40000)
        for length, dtype in zip(lengths, draw.choose(3, DTYPES), strict=True):
            batch = draw.size(2, 64)
            tokens = sliding * min(length, window) + full * length
            token = 2 * batch * config.num_key_value_heads * d * dtype.itemsize
            expect_value(
                kv_cache_bytes(batch, length, config, dtype),
                tokens * token,
                "bytes",
                f"kv_cache_bytes({batch}, {length}, config, {dtype_name(dtype)})",
                {
                    "Keys and values are both kept.": tokens * token // 2,
                    "The cache holds num_key_value_heads heads (GQA).": tokens
                    * token
                    * config.num_attention_heads
                    // config.num_key_value_heads,
                    "Sliding layers keep at most config.sliding_window tokens.": len(kinds) * length * token,
                    "Full layers keep every token.": len(kinds) * min(length, window) * token,
                    "Every layer has its own cache.": length * token,
                    "The number of bytes depends on the dtype.": tokens * token // dtype.itemsize * 4,
                },
            )


@check("Bonus 3.5", "The floor under decode")
def decode_floor(decode_floor_ms, break_even_batch, seed=None):
    """Check weights and cache over bandwidth, and the batch at which the cache is larger than the weights."""
    draw = Draw(seed)
    for config in (GEMMA_CONFIG, _draw_config(draw)):
        h, d, kinds = config.hidden_size, config.head_dim, config.layer_types
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        weights = (2 * h * heads * d + 2 * h * kv_heads * d + 3 * h * config.intermediate_size) * len(kinds)
        for weight_bytes, cache_bytes in ((2, 2), (1, 2), (0.5, 1)):
            batch, length, bandwidth = draw.size(2, 200), draw.size(1000, 50000), draw.real(0.05, 8)
            tokens = sum(min(length, config.sliding_window) if k == "sliding_attention" else length for k in kinds)
            cache = 2 * tokens * kv_heads * d

            def floor(weight=weights * weight_bytes, kept=cache * cache_bytes, batch=batch, bandwidth=bandwidth):
                return (weight + batch * kept) / bandwidth / 1e9

            what = f"({batch}, {length}, config, {bandwidth:.4g}, {weight_bytes}, {cache_bytes})"
            expect_value(
                decode_floor_ms(batch, length, config, bandwidth, weight_bytes, cache_bytes),
                floor(),
                "ms",
                f"decode_floor_ms{what}",
                {
                    "All layers count.": floor() / len(kinds),
                    "The batch shares the weights: they are read once a step.": batch
                    * floor(kept=cache * cache_bytes / batch, weight=weights * weight_bytes),
                    "Each sequence has its own cache.": floor(kept=cache * cache_bytes / batch),
                    "Sliding layers read at most their window.": floor(
                        kept=2 * length * len(kinds) * kv_heads * d * cache_bytes
                    ),
                    "Weights and cache have their own bytes per number.": floor(kept=cache * weight_bytes),
                },
            )
            batches = weights * weight_bytes / (cache * cache_bytes)
            if abs(batches - round(batches)) < 1e-6:
                continue
            expect_value(
                break_even_batch(length, config, weight_bytes, cache_bytes),
                math.ceil(batches),
                "",
                f"break_even_batch({length}, config, {weight_bytes}, {cache_bytes})",
                {
                    "A batch is an integer; this one is still below.": math.floor(batches),
                    "A batch is an integer.": batches,
                },
            )
    size = draw.choice((0.5, 1, 4))  # a power of two, so that nothing is rounded
    what, hint = f"break_even_batch(1520, GEMMA_CONFIG, {size}, {size})", "At 16 the two are equal, and that is enough."
    expect_value(break_even_batch(1520, GEMMA_CONFIG, size, size), 16, "", what, {hint: 17})
