"""Part 3: the work, the traffic and the cache of a Gemma-3 decoder layer."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import torch

from utils.checking import expect_close, expect_items, expect_number, visible
from utils.checking.labs.lab1.gemm import BF16, DTYPE, ELEMENTS, FP32
from utils.config import GEMMA_CONFIG
from utils.model import build_decoder_layer, get_position_embeddings, prefill_forward

Numbers = dict[str, float | list[float]]
GROUPED = SimpleNamespace(**vars(GEMMA_CONFIG) | {"num_key_value_heads": 3})  # an answer may not ignore heads


def name_hints(hints: dict[str, str], wrong: dict[str, float]) -> Numbers:
    """Return {hint: number} for {short name of a mistake: the number that it leads to}."""
    return {hints[name]: number for name, number in wrong.items()}


@visible("3.1", "Attended pairs")
def check_attended_pairs(attended_pairs):
    """Check prefill, decode and a chunk, with and without a window."""
    causal, alone = "The causal mask hides the keys after each query.", "A query attends to itself, too."
    wide = "A window of w has w keys, the query's own included: one fewer."
    narrow, unused = "The window has one key more.", "The window is not used."
    first = "The first queries see fewer keys than a whole window."
    last = "The queries are the LAST query_len of the kv_len positions."
    for arguments, right, known in (
        ((1, 4), 4, {last: 1, alone: 3}),
        ((3, 5), 12, {causal: 15, alone: 9, last: 6}),
        ((4, 4, 2), 7, {causal: 16, unused: 10, first: 8, wide: 9, narrow: 4, alone: 3}),
        ((3, 7, 2), 6, {unused: 18, causal: 21, wide: 9, narrow: 3, last: 5}),
        ((2, 3, 9), 5, {causal: 6, first: 18, last: 3}),
        ((567, 567, 567), 161_028, {first: 321_489, alone: 160_461, narrow: 161_027}),
        ((1, 6, 1), 1, {unused: 6, wide: 2, narrow: 0}),
    ):
        got, what = attended_pairs(*arguments), f"attended_pairs{arguments}"
        expect_number(got, right, rel=0, unit="pairs", what=what, mistakes=known)


_ATTENTION = {
    "heads": "Keys and values have num_key_value_heads heads, not num_attention_heads.",
    "mask": "Count the pairs that the mask lets through, not the whole square.",
    "window": "The window limits the pairs.",
    "wide": "A window of w has w keys, the query's own included.",
    "projections": "The four projections are missing.",
    "both": "Each pair costs D MACs for its score AND D MACs for the value.",
    "query": "Each pair costs its MACs for each QUERY head.",
    "flop": "These are FLOPs: one MAC is two FLOPs.",
    "seen": "Keys are read that at least one query can see, and there are kv_len of them at most.",
    "together": "Several queries see more keys together than one window.",
    "elements": ELEMENTS,
    "dtype": DTYPE,
    "hidden": "q, k and v each read the hidden states.",
    "queries": "Is each vector both written by one operator and read by the next?",
    "two": "Queries and outputs of attention are each written by one operator and read by the next.",
    "new": "The new keys and values are written into the cache, and read with the old ones.",
    "values": "Keys AND values are read from the cache.",
    "weights": "The weights are read, too.",
    "shared": "The batch shares the weights: they are read once.",
    "sequences": "Each sequence has keys and values of its own.",
    "output": "o_proj writes the hidden states.",
    "o_proj": "o_proj is an operator, too: it reads the vectors and writes the hidden states.",
    "key": "One key fewer: with a window of w, query_len queries see query_len + w - 1 keys together.",
}
# (batch, query_len, kv_len), window, dtype, pairs, MACs, bytes; then MACs and bytes for each known mistake.
_PLACES: tuple = (
    (
        ((3, 5, 7), None, BF16, 25, 9900, 5184),
        {"heads": 13500, "mask": 10980, "projections": 2700, "both": 8550, "query": 8100, "flop": 19800},
        {"heads": 7392, "dtype": 10368, "elements": 2592, "hidden": 4584, "queries": 4644, "two": 4104, "new": 4824}
        | {"values": 4932, "weights": 4224, "shared": 7104, "sequences": 4848, "output": 4884, "o_proj": [4344, 3984]},
    ),
    (((3, 5, 7), 12, BF16, 25, 9900, 5184), {}, {"seen": 5832}),
    (
        ((3, 5, 8), 2, FP32, 10, 8280, 10224),
        {"heads": 11880, "mask": 11520, "window": 10440, "wide": 8820, "projections": 1080, "both": 7740}
        | {"query": 7560, "flop": 16560},
        {"heads": 14352, "seen": 10512, "together": 9648, "dtype": 5112, "elements": 2556, "hidden": 9024}
        | {"queries": 9144, "two": 8064, "new": 9504, "values": 9792, "weights": 8304, "shared": 14064}
        | {"sequences": 9648, "output": 9624, "o_proj": [8544, 7824], "key": 10368},
    ),
    (
        ((3, 1, 9), 4, BF16, 4, 1872, 1992),
        {"heads": 2592, "mask": 2412, "window": 2412, "wide": 1980, "projections": 432, "both": 1656}
        | {"query": 1584, "flop": 3744},
        {"heads": 3192, "seen": 2352, "dtype": 3984, "elements": 996, "hidden": 1872, "queries": 1884, "two": 1776}
        | {"new": 1920, "values": 1848, "weights": 1032, "shared": 3912, "sequences": 1800, "output": 1932}
        | {"o_proj": [1824, 1464], "key": 2064},
    ),
)


@visible("3.1", "Cost of attention")
def check_attention_cost(attention_macs_flops_bytes, attended_pairs):
    """Check three layers of a small model; a count that follows from the student's own number of pairs passes."""
    config = SimpleNamespace(hidden_size=10, num_attention_heads=6, num_key_value_heads=2, head_dim=3)
    for (place, window, kind, pairs, macs, n_bytes), wrong_macs, wrong_bytes in _PLACES:
        what = f"attention_macs_flops_bytes(*{place}, config, {kind}, {window})"
        got = expect_items(attention_macs_flops_bytes(*place, config, kind, window), "macs, flops, bytes", what)
        if got[0] != macs:
            macs += (attended_pairs(*place[1:], window) - pairs) * place[0] * 36
        known = name_hints(_ATTENTION, wrong_macs), name_hints(_ATTENTION, wrong_bytes)
        expect_number(got[0], macs, rel=0, unit="MACs", what=f"{what}, MACs,", mistakes=known[0])
        expect_number(got[1], 2 * got[0], rel=0, unit="FLOPs", what=f"{what}, FLOPs,")
        expect_number(got[2], n_bytes, rel=0, unit="bytes", what=f"{what}, bytes,", mistakes=known[1])


_MLP = {
    "three": "There are three matrices: gate, up and down.",
    "weights": "The weights are read, too.",
    "each": "gate and up are two operators, and each reads its input. (Or: down writes its output.)",
    "own": "GELU and the product are operators of their own: they read and write.",
    "one": "GELU and the product are TWO operators here, each with its own reads and writes.",
    "product": "The elementwise product reads two tensors.",
    "dtype": DTYPE,
    "elements": ELEMENTS,
}


@visible("3.2", "MLP and norms")
def check_mlp_and_norm_costs(mlp_macs_flops_bytes, rms_norm_flops_bytes):
    """Check seven tokens of a small MLP and a norm, in two dtypes."""
    config = SimpleNamespace(hidden_size=10, intermediate_size=30)
    elements = {"three": 2490, "weights": 1890, "each": 2720, "own": 1740, "one": 2370, "product": 2580}
    for kind, size in ((BF16, 2), (FP32, 4)):
        what = f"of the MLP, 7 tokens, hidden 10, intermediate 30, {kind},"
        got = expect_items(mlp_macs_flops_bytes(7, config, kind), "macs, flops, bytes", f"the cost {what}")
        macs: Numbers = {_MLP["three"]: 4200, "A multiply-accumulate is ONE MAC.": 12600}
        wrong = {name: n * size for name, n in elements.items()} | {"dtype": 2790 * (6 - size), "elements": 2790}
        expect_number(got[0], 6300, rel=0, unit="MACs", what=f"MACs {what}", mistakes=macs)
        expect_number(got[1], 12600, rel=0, unit="FLOPs", what=f"FLOPs {what}")
        expect_number(got[2], 2790 * size, rel=0, unit="bytes", what=f"bytes {what}", mistakes=name_hints(_MLP, wrong))
        what = f"of RMSNorm of (137, 41) in {kind}"
        got = expect_items(rms_norm_flops_bytes(137, 41, kind), "flops, bytes", f"the cost {what}")
        four: dict[str, list[float]] = {"Count 4 FLOPs an element.": [5617, 11234, 16851]}
        known: Numbers = {
            "The weight is read, too.": 11234 * size,
            "The weight is one vector, the same for all tokens.": 16851 * size,
            "One fused operator reads its input once.": 16892 * size,
            "The tokens are read and written.": 5658 * size,
            ELEMENTS: 11275,
            DTYPE: 11275 * (6 - size),
        }
        expect_number(got[0], 22468, rel=0, unit="FLOPs", what=f"FLOPs {what}", mistakes=four)
        expect_number(got[1], 11275 * size, rel=0, unit="bytes", what=f"bytes {what}", mistakes=known)


_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")


def expect_decoded(decode_with_cache, layer, rotary_emb, tokens: torch.Tensor, prompt_len: int) -> None:
    """Assert that the outputs equal a full prefill, and that the prompt runs once and each new token alone."""
    batch, length, _ = tokens.shape
    positions, kind = torch.arange(length).expand(batch, -1), layer.self_attn.layer_type
    embeddings = get_position_embeddings(tokens, positions, rotary_emb, kind)
    right = prefill_forward(layer, tokens, positions, embeddings)[:, prompt_len:]
    seen: dict[str, list[int]] = {name: [] for name in _PROJECTIONS}
    hooks = [
        layer.get_submodule(name).register_forward_pre_hook(
            lambda _, args, counts=counts: counts.append(args[0].shape[-2])
        )
        for name, counts in seen.items()
    ]
    try:
        got = decode_with_cache(layer, rotary_emb, tokens[:, :prompt_len].clone(), tokens[:, prompt_len:].clone())
    finally:
        for hook in hooks:
            hook.remove()
    new = length - prompt_len
    what = f"decode_with_cache of {prompt_len} + {new} tokens, a layer with {kind.replace('_', ' ')},"
    hint = (
        f"The first new token has position {prompt_len}: position_ids, the rotary embedding and cache_positions say so."
    )
    expect_close(got, right, rtol=1e-3, atol=1e-4, what=what, hint=hint)
    for name, counts in seen.items():
        if counts != [prompt_len] + [1] * new:
            raise AssertionError(
                f"{what.removesuffix(',')}: the values are right, but the layer's {name} ran on {counts} tokens, call by call. One prefill of {prompt_len} "
                f"tokens and then {new} times 1 token is what the cache is for."
            )


def small_layer(layer_idx: int) -> tuple:
    """Build a small layer, and the rotary embedding of its model; layer 5 is full, and layer 0 slides over 8 tokens."""
    config = copy.deepcopy(GEMMA_CONFIG)
    config.hidden_size, config.intermediate_size, config.head_dim = 48, 96, 16
    config.query_pre_attn_scalar, config.sliding_window = 16, 8
    return build_decoder_layer(config, layer_idx, torch.float32, "cpu", seed=layer_idx)


@visible("3.3", "Decoding with a KV cache")
def check_decode_with_cache(decode_with_cache):
    """Check nine tokens of prompt and four new ones, in a full layer and in a sliding one."""
    for layer_idx in (5, 0):
        expect_decoded(decode_with_cache, *small_layer(layer_idx), torch.randn(2, 13, 48), 9)


_CACHE = {
    "both": "Keys AND values are kept.",
    "heads": "The cache holds num_key_value_heads heads (GQA).",
    "layers": "Every layer has its own cache.",
    "window": "Sliding layers keep at most config.sliding_window tokens.",
    "full": "Full layers keep every token.",
    "swapped": "Which layers slide? Look at config.layer_types.",
    "dtype": f"{DTYPE} (Or is a factor of 2 lost?)",
    "batch": "Each sequence has its own cache.",
}


@visible("3.3", "KV-cache bytes")
def check_kv_cache_bytes(kv_cache_bytes):
    """Check one token, and a length beyond the window."""
    long = {"both": 164_044_800, "layers": 30_720_000, "window": 552_960_000, "full": 283_115_520, "batch": 65_617_920}
    for batch, length, kind, right, wrong in (
        (1, 1, BF16, 55_296, {"both": 27_648, "heads": [73_728, 18_432], "layers": 3_072, "dtype": 110_592}),
        (5, 1000, FP32, 328_089_600, long | {"swapped": 507_985_920, "heads": [437_452_800, 109_363_200]}),
    ):
        got = kv_cache_bytes(batch, length, GROUPED, kind)
        what = f"kv_cache_bytes({batch}, {length}, config, {kind}) with 3 key-value heads"
        expect_number(got, right, rel=0, unit="bytes", what=what, mistakes=name_hints(_CACHE, wrong))


@visible("Bonus 3.5", "The floor under decode")
def check_decode_floor(decode_floor_ms, break_even_batch):
    """Check one token, a batch of long sequences with two formats, and two break-even batches."""
    layers, window = "All 18 layers count.", "Sliding layers read at most their window."
    own, in_ms = "Weights and cache have their own bytes per number.", "The answer is in ms."
    # 100 million weights of 2 bytes at 1 TB/s
    known: Numbers = {layers: 0.0111421, "Keys AND values are read.": 0.200549, in_ms: 2.00559e-4}
    got, what = decode_floor_ms(1, 1, GEMMA_CONFIG, 1.0), "one token in the cache, 1 TB/s"
    expect_number(got, 0.200559, rel=1e-5, unit="ms", what=what, mistakes=known)
    known = {
        "The batch shares the weights: they are read once a step.": 0.289751,
        _CACHE["batch"]: 0.0362189,
        _CACHE["heads"]: [0.115507, 0.0498893],
        window: 0.138609,
        own: [0.0608256, 0.121651],
        layers: 0.00520192,
        in_ms: 9.36346e-5,
    }
    what = "decode_floor_ms(8, 1000, config, 16.0, weight_bytes=4, cache_bytes=8) with 3 key-value heads"
    got = decode_floor_ms(8, 1000, GROUPED, 16.0, 4, 8)
    expect_number(got, 0.0936346, rel=1e-5, unit="ms", what=what, mistakes=known)
    below, real = "At this batch the cache traffic is still the smaller.", "A batch is an integer."
    for length, weight_bytes, cache_bytes, right, known in (
        (1000, 4, 8, 10, {below: 9, real: 9.168539325842696, own: 19, window: 6}),
        (1520, 4, 4, 16, {"At 16 the two are equal, and that is enough.": 17, window: 8}),
    ):
        got = break_even_batch(length, GEMMA_CONFIG, weight_bytes, cache_bytes)
        what = f"break_even_batch({length}, GEMMA_CONFIG, {weight_bytes}, {cache_bytes})"
        expect_number(got, right, rel=0, what=what, mistakes=known)
