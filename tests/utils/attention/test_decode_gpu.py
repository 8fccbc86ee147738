"""Decode on a Hopper GPU: float64 over random lengths, pages and windows, streams, graphs, and what runs."""

import random

import pytest
import torch

from tests.utils.attention.decode_cases import random_cache
from tests.utils.attention.errors import relative_error
from utils.attention import attention, attention_decode, decode_reference, last_run, proof, reference
from utils.machine.device import gluon_support

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gluon_support(), reason=gluon_support().reason),
    pytest.mark.timeout(300),
]


@pytest.fixture(autouse=True)
def seeded():
    """Seed torch: otherwise a test's draws would depend on the tests before it, and a failure could not be repeated."""
    torch.manual_seed(0)


@pytest.mark.parametrize("seed", range(60))
def test_random_lengths_pages_and_windows(seed):
    rng = random.Random(seed)
    dtype = rng.choice((torch.bfloat16, torch.float16))
    batch, kv_heads, group = rng.choice((1, 2, 5, 17)), rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 4, 5, 8, 16))
    sq, head_dim = rng.choice((1, 1, 2, 4, 7, 16, 33, 64)), rng.choice((64, 128, 256, 80, 40))
    slots, page = rng.choice((1, 5, 64, 129, 700, 1500, 4097)), rng.choice((None, None, 16, 32, 64, 128, 256))
    options = {"causal": rng.random() < 0.7, "window": rng.choice((None, None, 1, 100, 1000))}
    k, v, lengths, table = (
        x if x is None else x.cuda() for x in random_cache(batch, kv_heads, slots, head_dim, dtype, seed, page)
    )
    q = torch.randn(batch, sq, kv_heads * group, head_dim, device="cuda", dtype=dtype).transpose(1, 2)
    q = q if seed % 2 else q.contiguous()
    expected = decode_reference(q, k, v, seqlens=lengths, block_table=table, **options)
    for _ in range(2):
        out = attention_decode(q, k, v, seqlens=lengths, block_table=table, backend="gluon", **options)
        assert not out.isnan().any()
        assert relative_error(out, expected) < 5e-3 if expected.any() else not out.any()


@pytest.mark.parametrize("seed", range(40))
def test_random_full_caches_row_by_row(seed):
    """Without lengths the host chooses among all kernels; in some sequences the error of each row is checked."""
    rng = random.Random(1000 + seed)
    dtype, fp8 = rng.choice((torch.bfloat16, torch.float16)), rng.random() < 0.2
    while True:
        batch, kv_heads = rng.choice((1, 1, 2, 4, 8, 16, 66, 140)), rng.choice((1, 2, 4, 8))
        group, sq = rng.choice((1, 2, 3, 4, 8, 16, 24, 64)), rng.choice((1, 1, 1, 2, 8, 13, 16, 40, 64))
        head_dim, keys = rng.choice((64, 128, 128, 128, 256, 80)), rng.choice((70, 512, 700, 1024, 2048, 4100, 9000))
        if seed % 4 == 0:  # what clusters take
            batch, kv_heads, group, head_dim = rng.choice((1, 1, 2, 8)), 8, min(group, 4), 128
        elif seed % 4 == 1:  # whole heads, several for each SM, with query rows as the rows of the product
            batch, kv_heads, group, head_dim = rng.choice((66, 132)), rng.choice((4, 8)), rng.choice((4, 8)), 128
        if keys >= sq and batch * kv_heads * keys * head_dim < 1 << 26 and batch * kv_heads * group * sq < 1 << 16:
            break
    windows = (None,) if seed % 4 == 0 else (None, None, None, 1, 300)
    torch.manual_seed(seed)
    options = {"causal": rng.random() < 0.8, "window": rng.choice(windows), "scale": 0.1}

    def cache():
        x = torch.randn(batch, keys, kv_heads, head_dim, device="cuda").to(dtype).transpose(1, 2)  # tokens first
        x = x if seed % 2 else x.contiguous()
        return x.to(torch.float8_e4m3fn) if fp8 else x

    q, k, v = torch.randn(batch, kv_heads * group, sq, head_dim, device="cuda").to(dtype), cache(), cache()
    scales = torch.rand(2, kv_heads, device="cuda") + 0.5 if fp8 else None
    some = sorted({0, batch - 1, rng.randrange(batch), rng.randrange(batch)})
    expected = decode_reference(q[some], k[some], v[some], kv_scales=scales, **options)
    for _ in range(2):
        out = attention_decode(q, k, v, kv_scales=scales, backend="gluon", **options)
        assert not out.isnan().any()
        rows = (out[some].double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-2)
        assert rows.max() < 2.5e-2


@pytest.mark.parametrize("sq", [1, 8, 40])
def test_the_door_takes_the_decode_kernel_for_few_queries(sq):
    q, k, v = (
        torch.randn(2, h, s, 128, device="cuda", dtype=torch.bfloat16) for h, s in ((8, sq), (2, 3000), (2, 3000))
    )
    out = attention(q, k, v, causal=True)
    assert last_run().backend == "gluon"
    assert relative_error(out, reference(q, k, v, causal=True)[0]) < 5e-3
    assert any("decode" in name for name in proof("gluon", q, k, v, causal=True))


@pytest.mark.parametrize("filled", ["equal", "one long", "steps", "nearly none"])
@pytest.mark.parametrize("page", [None, 16, 64, 256])
@pytest.mark.parametrize(("batch", "keys"), [(1, 8192), (5, 4096), (8, 9216), (2, 17408)])
def test_lengths_that_differ_also_in_a_graph(batch, keys, page, filled):
    """Many clusters, single ones, and programs that share all sequences; with and without the policy for the L2."""
    k, v = (torch.randn(batch, 8, keys, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    table = None
    if page:
        k, v = (x.view(batch, 8, -1, page, 128).transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v))
        table = torch.arange(len(k), device="cuda", dtype=torch.int32).view(batch, -1)
    q = torch.randn(batch, 32, 2, 128, device="cuda", dtype=torch.bfloat16)
    lengths = {
        "equal": [keys] * batch,
        "one long": [keys, *[1] * (batch - 1)],
        "steps": [max(keys - 777 * i, 0) for i in range(batch)],
        "nearly none": [0] * (batch - 1) + [3],
    }[filled]
    used = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    arguments = {"seqlens": used, "block_table": table, "backend": "gluon"}
    attention_decode(q, k, v, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_decode(q, k, v, **arguments)
    expected = decode_reference(q, k, v, seqlens=used, block_table=table)
    for _ in range(3):
        graph.replay()
        assert relative_error(out, expected) < 5e-3
        assert torch.equal(attention_decode(q, k, v, **arguments), out)


def test_clusters_stay_right_beside_other_work():
    """Many calls on two streams: messages within a cluster were once lost while other processes used the GPU."""
    cases = []
    for kv_heads, group, sq, keys in ((8, 4, 1, 2200), (8, 4, 16, 3060), (4, 4, 2, 5100), (32, 1, 1, 1000)):
        q = torch.randn(1, kv_heads * group, sq, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(1, kv_heads, keys, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        cases.append((q, k, v, attention_decode(q, k, v, backend="gluon")))
        assert relative_error(cases[-1][-1], decode_reference(q, k, v)) < 5e-3
    noise = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    beside = torch.cuda.Stream()
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(500):
        with torch.cuda.stream(beside):
            noise @ noise
        for q, k, v, expected in cases:
            wrong += (attention_decode(q, k, v, backend="gluon") != expected).sum()
    assert not wrong.item()


@pytest.mark.parametrize("seed", range(12))
def test_fp8_caches(seed):
    rng = random.Random(seed)
    head_dim, page, sq = rng.choice((64, 128, 256)), rng.choice((None, 16, 64)), rng.choice((1, 4, 16))
    k, v, lengths, table = (
        x if x is None else x.cuda() for x in random_cache(3, 2, 1500, head_dim, torch.float32, seed, page)
    )
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    q = torch.randn(3, 8, sq, head_dim, device="cuda", dtype=rng.choice((torch.bfloat16, torch.float16)))
    arguments = {"seqlens": lengths, "block_table": table, "kv_scales": torch.rand(2, 2, device="cuda") + 0.5}
    expected = decode_reference(q, k, v, **arguments)
    for _ in range(2):
        assert relative_error(attention_decode(q, k, v, backend="gluon", **arguments), expected) < 5e-3


@pytest.mark.parametrize("layer_idx", [0, 5])
def test_a_captured_layer_step_takes_the_kernel(layer_idx):
    from utils import (
        build_decoder_layer,
        create_decode_inputs_with_cache,
        create_prefill_inputs,
        decode_forward,
        get_position_embeddings,
        initialize_kv_cache,
        prefill_forward,
    )

    layer, rotary = build_decoder_layer(layer_idx=layer_idx, device="cuda")
    kind, hidden = layer.self_attn.layer_type, layer.config.hidden_size
    cache = initialize_kv_cache(layer.config, 700)
    states, ids = create_prefill_inputs(2, 600, hidden, torch.bfloat16, "cuda")
    prefill_forward(layer, states, ids, get_position_embeddings(states, ids, rotary, kind), cache)
    token, ids, positions = create_decode_inputs_with_cache(2, 600, hidden, torch.bfloat16, "cuda")
    step = (layer, token, ids, get_position_embeddings(token, ids, rotary, kind), True, cache, positions)
    own = decode_forward(*step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_forward(*step)
    assert last_run().backend == "gluon"
    graph.replay()
    assert relative_error(out, own.double()) < 2e-2


def test_many_sequences():
    k, v, lengths, _ = (x if x is None else x.cuda() for x in random_cache(300, 2, 300, 128, torch.bfloat16))
    q = torch.randn(300, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    out = attention_decode(q, k, v, seqlens=lengths, backend="gluon")
    assert relative_error(out, decode_reference(q, k, v, seqlens=lengths)) < 5e-3


def test_a_graph_follows_lengths_and_pages_that_change_in_place():
    k, v, lengths, table = (x.cuda() for x in random_cache(4, 2, 1000, 128, torch.bfloat16, 0, 64))
    q = torch.randn(4, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    attention_decode(q, k, v, seqlens=lengths, block_table=table, backend="gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_decode(q, k, v, seqlens=lengths, block_table=table, backend="gluon")
    for _ in range(3):
        lengths.copy_(torch.randint(1, int(lengths.max()), (4,)).clamp(max=lengths.cpu()))
        q.normal_()
        graph.replay()
        expected = decode_reference(q, k, v, seqlens=lengths, block_table=table)
        assert relative_error(out, expected) < 5e-3


def test_two_streams_do_not_disturb_each_other():
    q, k, v = (
        torch.randn(1, h, s, 128, device="cuda", dtype=torch.bfloat16) for h, s in ((8, 1), (2, 9000), (2, 9000))
    )
    expected = attention_decode(q, k, v, backend="gluon")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs = []
    for i in range(40):
        with torch.cuda.stream(streams[i % 2]):
            outs.append(attention_decode(q, k, v, backend="gluon"))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


def test_tensors_that_tma_cannot_address_are_copied():
    whole = torch.randn(2, 2, 500, 128 + 4, device="cuda", dtype=torch.bfloat16)
    k, q = whole[..., :128], torch.randn(2, 4, 1, 128, device="cuda", dtype=torch.bfloat16)
    out = attention_decode(q, k, k, backend="gluon")
    assert relative_error(out, decode_reference(q, k, k)) < 5e-3


def test_a_call_compiled_whole_without_an_eager_one_before():
    from utils.attention import decode

    decode._decided.clear()
    q, k, v = (torch.randn(1, h, s, 64, device="cuda", dtype=torch.bfloat16) for h, s in ((8, 1), (2, 900), (2, 900)))
    lengths = torch.tensor([700], device="cuda", dtype=torch.int32)
    compiled = torch.compile(
        lambda q, k, v, n: attention_decode(q, k, v, seqlens=n, backend="gluon") * 2, fullgraph=True
    )
    assert relative_error(compiled(q, k, v, lengths), 2 * decode_reference(q, k, v, seqlens=lengths)) < 5e-3
