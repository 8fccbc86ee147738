"""The decoder layer against the same layer written by hand in float64."""

import copy
import functools

import pytest
import torch

from tests.utils.model.layers import decode, decode_rest, embed, prefill
from utils.config import GEMMA_CONFIG
from utils.model import (
    build_decoder_layer,
    create_decode_inputs_with_cache,
    create_decode_inputs_without_cache,
    create_prefill_inputs,
    decode_forward,
    get_position_embeddings,
    initialize_kv_cache,
    prefill_forward,
)

HIDDEN = 640
WINDOW = 32
CONFIG = copy.deepcopy(GEMMA_CONFIG)  # with a small window
CONFIG.update({"sliding_window": WINDOW})
SLIDING, FULL = 0, 5  # indices of one layer of each type
both_types = pytest.mark.parametrize("layer_idx", [SLIDING, FULL], ids=["sliding", "full"])
both_implementations = pytest.mark.parametrize("implementation", ["sdpa", "eager"])


@functools.cache
def build(layer_idx, implementation="sdpa", dtype=torch.float32, device="cpu"):
    return build_decoder_layer(CONFIG, layer_idx, dtype, device, implementation)


def reference(layer, hidden_states):
    """Compute a Gemma-3 decoder layer over a whole sequence in float64, line by line."""
    weights = {name: weight.detach().cpu().double() for name, weight in layer.named_parameters()}
    config, attention = layer.config, layer.self_attn
    x = hidden_states.cpu().double()
    batch, length, _ = x.shape

    def norm(x, name):
        x = x * (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        return x * (1 + weights[f"{name}.weight"])

    def heads(x, name):
        return (x @ weights[f"self_attn.{name}_proj.weight"].T).view(batch, length, -1, 256).transpose(1, 2)

    position = torch.arange(length, dtype=torch.float64)
    theta = config.rope_parameters[attention.layer_type]["rope_theta"]
    angle = position[:, None] / theta ** (torch.arange(0, 256, 2, dtype=torch.float64) / 256)

    def rotate(x):
        a, b = x[..., :128], x[..., 128:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)

    y = norm(x, "input_layernorm")
    q = rotate(norm(heads(y, "q"), "self_attn.q_norm"))
    k = rotate(norm(heads(y, "k"), "self_attn.k_norm"))
    v = heads(y, "v")
    distance = position[:, None] - position[None, :]
    seen = distance >= 0
    if attention.layer_type == "sliding_attention":
        seen &= distance < WINDOW
    scores = (q @ k.transpose(2, 3) / 256**0.5).masked_fill(~seen, -torch.inf)
    y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1)
    x = x + norm(y @ weights["self_attn.o_proj.weight"].T, "post_attention_layernorm")
    y = norm(x, "pre_feedforward_layernorm")
    gate = torch.nn.functional.gelu(y @ weights["mlp.gate_proj.weight"].T, approximate="tanh")
    y = (gate * (y @ weights["mlp.up_proj.weight"].T)) @ weights["mlp.down_proj.weight"].T
    return x + norm(y, "post_feedforward_layernorm")


def assert_close(actual, expected, tolerance=1e-4):
    assert actual.shape == expected.shape
    error = (actual.cpu().double() - expected).abs().max().item()
    assert error < tolerance, f"largest error {error:.1e}"


# ---- right results -----------------------------------------------------------------------------------------


@both_types
@both_implementations
@pytest.mark.parametrize("prompt, decoded, max_cache_len", [(1, 6, 7), (25, 12, 37), (120, 4, 220)])
def test_prefill_and_decode_with_cache_are_rows_of_a_full_forward(
    layer_idx, implementation, prompt, decoded, max_cache_len
):
    built = build(layer_idx, implementation)
    hidden_states = torch.randn(2, prompt + decoded, HIDDEN)
    expected = reference(built[0], hidden_states)
    assert_close(prefill(built, hidden_states), expected)
    cache = initialize_kv_cache(CONFIG, max_cache_len)
    assert_close(prefill(built, hidden_states[:, :prompt], cache), expected[:, :prompt])
    assert_close(decode_rest(built, hidden_states, prompt, cache), expected[:, prompt:])
    assert int(cache.get_seq_length(layer_idx)) == prompt + decoded


@both_types
@pytest.mark.parametrize("prompt", [30, WINDOW + 5])
def test_decode_with_a_given_attention_is_the_same(layer_idx, prompt):
    from utils.attention import attention_decode

    built = build(layer_idx)
    hidden_states, _ = create_prefill_inputs(2, prompt, HIDDEN, torch.float32, "cpu")
    own, given = (initialize_kv_cache(built[0].config, WINDOW + 20) for _ in range(2))
    prefill(built, hidden_states, own)
    prefill(built, hidden_states, given)
    for position in (prompt, prompt + 1):
        token, position_ids, cache_positions = create_decode_inputs_with_cache(
            2, position, HIDDEN, torch.float32, "cpu"
        )
        arguments = built[0], token, position_ids, embed(built, token, position_ids), True
        expected = decode_forward(*arguments, own, cache_positions)
        out = decode_forward(*arguments, given, cache_positions, attend=attention_decode)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
        assert built[0].config._attn_implementation == "sdpa"


@both_types
@both_implementations
def test_decode_without_cache_is_the_last_row_of_a_full_forward(layer_idx, implementation):
    built = build(layer_idx, implementation)
    token, position_ids, prompt = create_decode_inputs_without_cache(2, 60, HIDDEN, torch.float32, "cpu")
    output = decode_forward(built[0], token, position_ids, embed(built, token, position_ids), False, None, None, prompt)
    assert_close(output, reference(built[0], torch.cat((prompt, token), dim=1))[:, -1:])


@both_types
def test_bfloat16_is_as_close_with_the_cache_as_without(layer_idx):
    built = build(layer_idx, dtype=torch.bfloat16)
    hidden_states = torch.randn(1, 38, HIDDEN).bfloat16()
    expected = reference(built[0], hidden_states)
    cache = initialize_kv_cache(CONFIG, 38)
    prefill(built, hidden_states[:, :28], cache)
    decoded = decode_rest(built, hidden_states, 28, cache)
    # Some ten roundings of values up to 8 to the 8 bits of bfloat16, 2^-8 each.
    assert_close(prefill(built, hidden_states), expected, 0.1)
    assert_close(decoded, expected[:, 28:], 0.1)
    assert decoded.dtype == torch.bfloat16


# ---- what the cache keeps ----------------------------------------------------------------------------------


@both_types
@pytest.mark.parametrize("first", ["longer", "shorter", "broken"])
def test_a_second_prefill_starts_afresh(layer_idx, first):
    built = build(layer_idx)
    hidden_states = torch.randn(1, 80, HIDDEN)
    expected = reference(built[0], hidden_states)
    cache = initialize_kv_cache(CONFIG, 220)
    length = {"longer": 170, "shorter": 30, "broken": 70}[first]
    before = torch.full((1, length, HIDDEN), torch.nan) if first == "broken" else torch.randn(1, length, HIDDEN)
    prefill(built, before, cache)
    if first != "broken":
        decode(built, torch.randn(1, 1, HIDDEN), length, cache)
    keys = cache.layers[layer_idx].keys
    shape, address = keys.shape, keys.data_ptr()
    for _ in range(2):
        assert_close(prefill(built, hidden_states[:, :70], cache), expected[:, :70])
        assert int(cache.get_seq_length(layer_idx)) == 70
    assert_close(decode(built, hidden_states[:, 70:71], 70, cache), expected[:, 70:71])
    keys = cache.layers[layer_idx].keys
    assert (keys.shape, keys.data_ptr()) == (shape, address)


@both_types
@pytest.mark.parametrize("prompt", [20, 120])
def test_the_same_decode_step_can_be_repeated(layer_idx, prompt):
    built = build(layer_idx)
    cache = initialize_kv_cache(CONFIG, prompt + 1)  # no room for a second token
    prefill(built, torch.randn(1, prompt, HIDDEN), cache)
    token = torch.randn(1, 1, HIDDEN)
    first = decode(built, token, prompt, cache)
    for _ in range(5):
        assert torch.equal(decode(built, token, prompt, cache), first)


@both_types
def test_a_decode_at_an_earlier_position_drops_what_came_after(layer_idx):
    built = build(layer_idx)
    hidden_states = torch.randn(1, 30, HIDDEN)
    expected = reference(built[0], hidden_states)
    cache = initialize_kv_cache(CONFIG, 64)
    prefill(built, torch.cat((hidden_states[:, :20], torch.randn(1, 10, HIDDEN)), dim=1), cache)
    assert_close(decode_rest(built, hidden_states, 20, cache), expected[:, 20:])


def test_one_cache_serves_several_layers():
    first, second = build(4), build(5)  # a sliding layer and the full one after it
    hidden_states = torch.randn(1, 25, HIDDEN)
    middle = reference(first[0], hidden_states)
    expected = reference(second[0], middle)
    cache = initialize_kv_cache(CONFIG, 32)
    prefill(second, prefill(first, hidden_states[:, :20], cache), cache)
    for position in range(20, 25):
        here = slice(position, position + 1)
        output = decode(second, decode(first, hidden_states[:, here], position, cache), position, cache)
        assert_close(output, expected[:, here])


def test_inference_mode_and_no_gradients():
    built = build(SLIDING)
    cache = initialize_kv_cache(CONFIG, 120)
    hidden_states = torch.randn(1, 71, HIDDEN, requires_grad=True)
    expected = reference(built[0], hidden_states.detach())
    with torch.inference_mode():
        prefill(built, hidden_states[:, :70], cache)
        assert_close(decode(built, hidden_states[:, 70:], 70, cache), expected[:, 70:])
        token, at, slot = create_decode_inputs_with_cache(1, 71, HIDDEN, torch.float32, "cpu")
        for position in range(71, 120):
            decode_forward(built[0], token, at, embed(built, token, at), True, cache, slot)
            assert int(cache.get_seq_length(SLIDING)) == position + 1
            at += 1
            slot += 1  # torch does not count the changes of an inference tensor
        with pytest.raises(IndexError, match="room for 120"):
            decode_forward(built[0], token, at, embed(built, token, at), True, cache, slot)
    output = prefill(built, hidden_states[:, :70], cache)
    assert_close(output, expected[:, :70])
    assert not output.requires_grad and not cache.layers[SLIDING].keys.requires_grad


# ---- building ----------------------------------------------------------------------------------------------


def test_building_leaves_config_and_generator_alone():
    before, state = GEMMA_CONFIG.to_dict(), torch.get_rng_state()
    eager, _ = build_decoder_layer(dtype=torch.float32, device="cpu", attn_implementation="eager")
    sdpa, _ = build_decoder_layer(dtype=torch.float32, device="cpu", attn_implementation="sdpa")
    other, _ = build_decoder_layer(dtype=torch.float32, device="cpu", seed=1)
    assert GEMMA_CONFIG.to_dict() == before and torch.equal(torch.get_rng_state(), state)
    assert (eager.config._attn_implementation, sdpa.config._attn_implementation) == ("eager", "sdpa")
    assert torch.equal(eager.mlp.up_proj.weight, sdpa.mlp.up_proj.weight)
    assert not torch.equal(other.mlp.up_proj.weight, sdpa.mlp.up_proj.weight)
    assert not any(weight.requires_grad for weight in sdpa.parameters()) and not sdpa.training


def test_a_layer_that_names_no_attention_implementation_is_causal():
    from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer

    built = build(FULL, "eager")
    plain = Gemma3DecoderLayer(type(GEMMA_CONFIG).from_dict(GEMMA_CONFIG.to_dict()), FULL)
    assert plain.config._attn_implementation is None
    plain.load_state_dict(built[0].state_dict())
    hidden_states = torch.randn(1, 30, HIDDEN)
    assert_close(prefill((plain, built[1]), hidden_states), reference(plain, hidden_states))


# ---- errors ------------------------------------------------------------------------------------------------


def wrong_calls():
    """Return {what the message must match: a call that is wrong}."""
    f32 = torch.float32
    built = layer, rotary_emb = build(SLIDING)
    x, ids = create_prefill_inputs(2, 6, HIDDEN, f32, "cpu")
    emb = embed(built, x, ids)
    token, at, slot = create_decode_inputs_with_cache(2, 6, HIDDEN, f32, "cpu")
    at_emb = embed(built, token, at)
    filled = initialize_kv_cache(CONFIG, 16)
    prefill(built, x, filled)

    def step(**changed):
        arguments = {
            "hidden_states": token,
            "position_ids": at,
            "position_embeddings": at_emb,
            "use_kv_cache": True,
            "past_key_values": filled,
            "cache_positions": slot,
        }
        return lambda: decode_forward(layer, **(arguments | changed))

    no_cache = {"use_kv_cache": False, "past_key_values": None, "cache_positions": None}
    from transformers import DynamicCache

    return {
        "this layer takes .B, S, 640.": lambda: prefill_forward(layer, x[..., :600], ids, emb),
        "create the inputs with the layer's dtype": lambda: prefill_forward(layer, x.bfloat16(), ids, emb),
        r"position_ids has shape \(2, 5\).*\(2, 6\)": lambda: prefill_forward(layer, x, ids[:, :5], emb),
        r"cos has shape \(2, 1, 256\).*\(2, 6, 256\)": lambda: prefill_forward(layer, x, ids, at_emb),
        "in torch.bfloat16; this call": lambda: prefill_forward(layer, x, ids, [e.bfloat16() for e in emb]),
        "build_decoder_layer": lambda: prefill_forward(rotary_emb, x, ids, emb),
        "6 tokens .* room for 4": lambda: prefill_forward(layer, x, ids, emb, initialize_kv_cache(CONFIG, 4)),
        "DynamicCache; make a StaticCache": lambda: prefill_forward(layer, x, ids, emb, DynamicCache()),
        "batch 2, .* has batch 1, .*new cache": lambda: prefill_forward(
            layer, x[:1], ids[:1], [e[:1] for e in emb], filled
        ),
        "takes one token": step(hidden_states=x),
        "needs past_key_values": step(past_key_values=None),
        "needs cache_positions, torch.tensor": step(cache_positions=6),
        "the cache is empty: run prefill_forward": step(past_key_values=initialize_kv_cache(CONFIG, 16)),
        "holds 6 tokens: the next position is 6": step(cache_positions=torch.tensor([7])),
        "position_ids must count up from 6": step(position_ids=at - 1),
        "position_embeddings must count up from 6": step(position_embeddings=embed(built, token, at + 1)),
        "position_ids must count up from 0": lambda: prefill_forward(layer, x, ids + 1, emb),
        "position_embeddings must count up from 0": lambda: prefill_forward(
            layer, x, ids, embed(built, x, ids.flip(1))
        ),
        "it must be one position": step(cache_positions=torch.tensor([6, 6])),
        "pass prefill_hidden_states": step(**no_cache),
        "batch and hidden size must agree": step(**no_cache, prefill_hidden_states=x[:1]),
        "layer_type is 'global'.*full_attention": lambda: get_position_embeddings(x, ids, rotary_emb, "global"),
        "rotary_emb is a Gemma3DecoderLayer": lambda: get_position_embeddings(x, ids, layer, "full_attention"),
        "layer_type 'full_attention'; make them with this layer's, 'sliding_attention'": lambda: prefill_forward(
            layer, x, ids, get_position_embeddings(x, ids, rotary_emb, "full_attention")
        ),
        "max_cache_len is 0": lambda: initialize_kv_cache(CONFIG, 0),
        "'flash'; allowed": lambda: build_decoder_layer(attn_implementation="flash"),
        "layers 0 to 17": lambda: build_decoder_layer(layer_idx=18),
        "config is 3; it must be a Gemma3TextConfig": lambda: build_decoder_layer(3),
        "dtype is torch.int64": lambda: create_prefill_inputs(1, 4, 8, torch.int64, "cpu"),
    }


def test_errors_say_what_was_given_and_what_to_do():
    for message, call in wrong_calls().items():
        with pytest.raises((ValueError, TypeError), match=message):
            call()


# ---- compiled and captured ---------------------------------------------------------------------------------


@both_types
def test_the_compiled_layer_is_one_graph_and_right(layer_idx):
    torch._dynamo.reset()
    layer, rotary_emb = build(layer_idx)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend=backend), rotary_emb
    hidden_states = torch.randn(1, 44, HIDDEN)
    expected = reference(layer, hidden_states)
    cache = initialize_kv_cache(CONFIG, 120)
    for _ in range(2):
        assert_close(prefill(compiled, hidden_states[:, :25], cache), expected[:, :25])
        # Past the window's 32 slots.
        assert_close(decode_rest(compiled, hidden_states, 25, cache), expected[:, 25:])
    assert len(graphs) == 2, "one graph for prefill and one for every decode step"
    position_ids = torch.arange(44)[None]
    arguments = layer, hidden_states, position_ids, embed((layer, rotary_emb), hidden_states, position_ids)
    assert_close(torch.compile(prefill_forward, fullgraph=True, backend="eager")(*arguments), expected)
    torch._dynamo.reset()


@pytest.mark.gpu
@both_types
def test_prefill_and_decode_do_not_wait_for_the_gpu(layer_idx):
    built = layer, _ = build(layer_idx, device="cuda")
    cache = initialize_kv_cache(CONFIG, 220)
    hidden_states, position_ids = create_prefill_inputs(2, 120, HIDDEN, torch.float32, "cuda")
    position_embeddings = embed(built, hidden_states, position_ids)
    token, at, cache_positions = create_decode_inputs_with_cache(2, 120, HIDDEN, torch.float32, "cuda")
    at_embeddings = embed(built, token, at)

    def both():
        prefill_forward(layer, hidden_states, position_ids, position_embeddings, cache)
        return decode_forward(layer, token, at, at_embeddings, True, cache, cache_positions)

    both()  # the first run loads libraries and makes the mask
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(output, reference(layer, torch.cat((hidden_states, token), dim=1))[:, -1:])


@pytest.mark.gpu
@both_types
@both_implementations
def test_a_decode_step_in_a_cuda_graph(layer_idx, implementation):
    built = layer, _ = build(layer_idx, implementation, device="cuda")
    hidden_states = torch.randn(2, 40, HIDDEN, device="cuda")
    expected = reference(layer, hidden_states)
    cache = initialize_kv_cache(CONFIG, 120)
    prefill(built, hidden_states[:, :25], cache)
    _, position_ids, cache_positions = create_decode_inputs_with_cache(2, 25, HIDDEN, torch.float32, "cuda")
    token = hidden_states[:, 25:26].clone()
    position_embeddings = embed(built, token, position_ids)
    arguments = (layer, token, position_ids, position_embeddings, True, cache, cache_positions)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            decode_forward(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = decode_forward(*arguments)

    for position in range(25, 38):  # past the window's 32 slots
        here = slice(position, position + 1)
        token.copy_(hidden_states[:, here])
        cache_positions.fill_(position)
        position_ids.fill_(position)
        for static, new in zip(position_embeddings, embed(built, token, position_ids), strict=True):
            static.copy_(new)
        graph.replay()
        assert_close(output, expected[:, here])
    # An ordinary step reads what the replays wrote.
    assert_close(decode(built, hidden_states[:, 38:39], 38, cache), expected[:, 38:39])
