"""Decode on a Hopper GPU: float64 over random lengths, pages and windows, streams, graphs, and what runs."""

import random

import pytest
import torch

from tests.utils.attention.decode_cases import other_table, random_cache, relative_error
from utils.attention import attention, attention_decode, decode_reference, last_run, proof, reference
from utils.machine.device import gluon_support

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gluon_support(), reason=gluon_support().reason),
    pytest.mark.timeout(300),
]


@pytest.fixture(autouse=True)
def seeded():
    """Without a seed a test's draws depend on the tests that ran before it in its process, and a failure is not repeated."""
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
    """Without lengths the host chooses among all kernels and merges; each row of some sequences has an error of its own."""
    rng = random.Random(1000 + seed)
    dtype, fp8 = rng.choice((torch.bfloat16, torch.float16)), rng.random() < 0.2
    while True:
        batch, kv_heads = rng.choice((1, 1, 2, 4, 8, 16, 66, 140)), rng.choice((1, 2, 4, 8))
        group, sq = rng.choice((1, 2, 3, 4, 8, 16, 24, 64)), rng.choice((1, 1, 1, 2, 8, 13, 16, 40, 64))
        head_dim, keys = rng.choice((64, 128, 128, 128, 256, 80)), rng.choice((70, 512, 700, 1024, 2048, 4100, 9000))
        if seed % 4 == 0:  # what clusters take
            batch, kv_heads, group, head_dim = rng.choice((1, 1, 2, 8)), 8, min(group, 4), 128
        elif seed % 4 == 1:  # whole heads, several an SM, with query rows as rows
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
    for _ in range(2):  # the second call finds the counters of the first
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


@pytest.mark.parametrize(
    ("sizes", "choices"),
    {
        "128 rows, the output by TMA": ((16, 40, 8, 13, 900, 128), {"consumers": 2, "aligned": True, "by_tma": True}),
        "two programs an SM, a program a head": ((66, 24, 8, 11, 700, 128), {}),
        "two programs an SM, several heads each": (
            (66, 32, 8, 16, 300, 128),
            {"consumers": 1, "block_n": 64, "per_sm": 2, "aligned": True, "programs": 264, "by_tma": True},
        ),
        "128 rows, keys backwards, K first, rings filled early": (
            (16, 64, 8, 13, 500, 128),
            {"backward": True, "k_first": True, "prefill": True},
        ),
        "each head begun before the last one ends, in the new order": (
            (66, 32, 4, 16, 400, 128),
            {"backward": True, "k_first": True, "prefill": True},
        ),
        "two programs an SM, in the new order": (
            (66, 24, 8, 11, 700, 128),
            {"backward": True, "k_first": True, "prefill": True},
        ),
        "programs that wait for each other, K first, rings filled early": (
            (1, 32, 8, 16, 8192, 128),
            {"k_first": True, "prefill": True},
        ),
        "keys as rows, a program a head": ((66, 32, 8, 1, 4100, 128), {}),
        "fp8, two consumers, whole heads": ((16, 64, 8, 15, 500, 128), {"fp8": True}),
        "fp8, two consumers, parts": ((2, 64, 8, 16, 3000, 128), {"fp8": True}),
    }.values(),
)
def test_whole_heads_and_two_consumers(sizes, choices):
    from utils.attention.gluon.decode.launch import Launch

    batch, heads, kv_heads, sq, keys, head_dim = sizes
    shapes = (batch, heads, sq, head_dim), *2 * [(batch, kv_heads, keys, head_dim)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    scales = None
    if choices.get("fp8"):
        k, v, scales = (
            k.to(torch.float8_e4m3fn),
            v.to(torch.float8_e4m3fn),
            torch.rand(2, kv_heads, device="cuda") + 0.5,
        )
    launch = Launch(q, k, v, True, 0, False, None, **choices)
    expected = decode_reference(q, k, v, kv_scales=scales, scale=0.1)
    outs = [launch(q, k, v, 0.1, None, None, scales) for _ in range(3)]
    assert relative_error(outs[0], expected) < 5e-3 and all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize(("batch", "longest"), [(8, 9000), (2, 17000)])
def test_lengths_that_differ_over_a_large_cache(batch, longest):
    """Above 192 MB of room 128 programs share 64 heads; below it the cache comes with the hint to the L2."""
    q, k, v = (
        torch.randn(batch, h, s, 128, device="cuda", dtype=torch.bfloat16)
        for h, s in ((32, 1), (8, longest), (8, longest))
    )
    for lengths in ([longest] * batch, [longest, *[1] * (batch - 1)], [longest - 777 * i for i in range(batch)]):
        used = torch.tensor(lengths, device="cuda", dtype=torch.int32).clamp(min=0)
        out = attention_decode(q, k, v, seqlens=used, backend="gluon")
        assert relative_error(out, decode_reference(q, k, v, seqlens=used)) < 5e-3


@pytest.mark.parametrize("merge", ["second", "together", "last"])
@pytest.mark.parametrize("consumers", [0, 1, 2])
def test_both_kernels_with_every_merge(consumers, merge):
    from utils.attention.gluon.decode.launch import Launch

    q, k, v = (
        torch.randn(2, h, s, 128, device="cuda", dtype=torch.bfloat16) for h, s in ((8, 16), (2, 3000), (2, 3000))
    )
    launch = Launch(q, k, v, True, 0, False, None, consumers=consumers, merge=merge)
    expected = decode_reference(q, k, v, scale=0.1)
    for _ in range(5):
        assert relative_error(launch(q, k, v, 0.1, None, None), expected) < 5e-3


@pytest.mark.parametrize(
    ("sizes", "choices"),
    {
        "one token": ((1, 32, 8, 1, 2048, 128), {"cluster": 8}),
        "shares of three and two blocks": ((1, 32, 8, 1, 2200, 128), {"cluster": 8}),
        "16 programs, a hint": ((1, 16, 4, 16, 5100, 128), {"cluster": 16, "hint": True, "block_n": 32}),
        "query rows as rows, an inbox in the ring": ((2, 16, 4, 9, 3060, 128), {"cluster": 8, "consumers": 1}),
        "keys as rows, two tiles": ((3, 6, 2, 17, 1000, 64), {"cluster": 2, "consumers": 0}),
        "head dimension 200": ((1, 8, 2, 2, 2000, 200), {"cluster": 4}),
    }.values(),
    ids=str,
)
def test_clusters_merge_in_shared_memory_also_when_captured(sizes, choices):
    from utils.attention.gluon.decode.launch import Launch

    batch, heads, kv_heads, sq, keys, head_dim = sizes
    shapes = (batch, heads, sq, head_dim), *2 * [(batch, kv_heads, keys, head_dim)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    launch = Launch(q, k, v, True, 0, False, None, **choices)
    assert launch.plan.cluster == choices["cluster"] and launch.plan.merge == "cluster"
    expected = decode_reference(q, k, v, scale=0.1)
    for _ in range(5):
        assert relative_error(launch(q, k, v, 0.1, None, None), expected) < 5e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(q, k, v, 0.1, None, None)
    for _ in range(3):
        q.normal_()
        graph.replay()
        assert relative_error(out, decode_reference(q, k, v, scale=0.1)) < 5e-3


@pytest.mark.parametrize("page", [None, 16, 64, 256])
@pytest.mark.parametrize(
    "filled", [(2000, 2000, 2000, 2000), (2000, 1950, 2000, 1990), (2000, 0, 3, 700), (1, 0, 0, 0)], ids=str
)
@pytest.mark.parametrize(
    "choices",
    [
        {"cluster": 2, "consumers": 0},
        {"cluster": 2, "consumers": 1, "block_n": 64},
        {"cluster": 4, "consumers": 0, "block_n": 64, "per_sm": 2},
        {"cluster": 8, "consumers": 0, "block_n": 64, "per_sm": 2, "halvings": 3},
        {"cluster": 4, "consumers": 0, "block_n": 64, "per_sm": 2, "halvings": 2, "slots": 4},
        {"cluster": 2, "consumers": 1, "block_n": 64, "per_sm": 2, "slots": 4, "halvings": 1},
    ],
    ids=str,
)
def test_clusters_read_lengths_that_differ_and_pages(choices, filled, page):
    from utils.attention.gluon.decode.launch import Launch

    batch, group, sq, keys = 4, 4, 3, 2000
    k, v, _, table = random_cache(batch, 8, keys, 128, torch.bfloat16, page or 0, page, fill=0.5)
    lengths = torch.tensor(filled, dtype=torch.int32)
    if page:  # that of `random_cache` is for its own lengths
        table = other_table(len(k), filled, page, table)
    else:
        for b, length in enumerate(filled):
            k[b, :, length:], v[b, :, length:] = torch.nan, torch.nan
    k, v, lengths, table = (x if x is None else x.cuda() for x in (k, v, lengths, table))
    q = torch.randn(batch, 8 * group, sq, 128, device="cuda", dtype=torch.bfloat16)
    launch = Launch(q, k, v, True, 0, True, table, **choices)
    assert launch.plan.merge == "cluster" and not launch.counters
    expected = decode_reference(q, k, v, seqlens=lengths, block_table=table, scale=0.1)
    for _ in range(5):
        assert relative_error(launch(q, k, v, 0.1, lengths, table), expected) < 5e-3


@pytest.mark.parametrize("page", [None, 64])
@pytest.mark.parametrize("batch", [5, 8, 16])
def test_divided_clusters_follow_lengths_that_change_also_in_a_graph(batch, page):
    from utils.attention.gluon.decode.launch import Launch

    rng, keys = random.Random(batch), 4096
    k, v = (torch.randn(batch, 8, keys, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = None
    if page:
        k, v = (x.view(batch, 8, -1, page, 128).transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v))
        table = torch.arange(len(k), device="cuda", dtype=torch.int32).view(batch, -1)
    q = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
    choices = {"cluster": 8, "consumers": 0, "block_n": 64, "per_sm": 2, "halvings": 3}
    launch = Launch(q, k, v, True, 0, True, table, **choices)
    launch(q, k, v, 0.1, lengths, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launch(q, k, v, 0.1, lengths, table)
    draws = [[keys] * batch, [1] * batch, [0] * batch, [keys] + [1] * (batch - 1), [1] * (batch - 1) + [keys]]
    draws += [[rng.choice((0, 1, keys, rng.randint(0, keys))) for _ in range(batch)] for _ in range(6)]
    for drawn in draws:
        lengths.copy_(torch.tensor(drawn, dtype=torch.int32))
        expected = decode_reference(q, k, v, seqlens=lengths, block_table=table, scale=0.1)
        graph.replay()
        outs = [captured, *(launch(q, k, v, 0.1, lengths, table) for _ in range(3))]
        for out in outs:
            assert (relative_error(out, expected) < 5e-3) if expected.any() else not out.any(), drawn
            assert torch.equal(out, outs[0])


def test_barriers_under_an_inbox_are_invalidated(monkeypatch):
    """Four programs an SM whose inboxes lie over the ring's barriers: with these kept, each call gave nan."""
    from utils.attention.gluon.decode import arrangement, launch
    from utils.attention.gluon.decode.plan import Plan

    plan = Plan(128, 32, 2, 32, 2, 1, 32, consumers=1, cluster=16, merge="cluster", sent=64, inbox_in_ring=True)
    assert plan.inbox_bytes > plan.shared_bytes
    monkeypatch.setattr(arrangement, "cluster_plan", lambda *sizes: plan)
    monkeypatch.setattr(launch, "ALONE_BYTES", plan.inbox_bytes + plan.inbox_space)
    q, k, v = (
        torch.randn(3, h, s, 128, device="cuda", dtype=torch.bfloat16) for h, s in ((16, 33), (8, 512), (8, 512))
    )
    call = launch.Launch(q, k, v, True, 0, False, None, cluster=16)
    expected = decode_reference(q, k, v, scale=0.1)
    for _ in range(20):
        assert relative_error(call(q, k, v, 0.1, None, None), expected) < 5e-3


@pytest.mark.parametrize("size", [1.0, 1e30, 1e-30])
@pytest.mark.parametrize("consumers", [1, 2])
def test_an_fp8_cache_with_products_in_fp16(consumers, size):
    from utils.attention.gluon.decode.launch import Launch

    q = torch.randn(2, 16, 13, 128, device="cuda").mul(size).bfloat16()
    k, v = (torch.randn(2, 2, 900, 128, device="cuda").to(torch.float8_e4m3fn) for _ in "kv")
    scales = torch.rand(2, 2, device="cuda") + 0.5
    launch = Launch(q, k, v, True, 0, False, None, fp8=True, consumers=consumers, fp16=True)
    expected = decode_reference(q, k, v, kv_scales=scales, scale=0.1 / size)
    for _ in range(2):
        assert relative_error(launch(q, k, v, 0.1 / size, None, None, scales), expected) < 5e-3


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


def test_compiled_by_torch():
    q, k, v = (torch.randn(1, h, s, 64, device="cuda", dtype=torch.bfloat16) for h, s in ((8, 1), (2, 900), (2, 900)))
    from utils.attention.gluon.decode.launch import decode

    compiled = torch.compile(lambda q, k, v: decode(q, k, v) * 2, fullgraph=True)
    assert relative_error(compiled(q, k, v), 2 * decode_reference(q, k, v)) < 5e-3


def test_a_call_compiled_whole_without_an_eager_one_before():
    from utils.attention import decode

    decode._decided.clear()
    q, k, v = (torch.randn(1, h, s, 64, device="cuda", dtype=torch.bfloat16) for h, s in ((8, 1), (2, 900), (2, 900)))
    lengths = torch.tensor([700], device="cuda", dtype=torch.int32)
    compiled = torch.compile(
        lambda q, k, v, n: attention_decode(q, k, v, seqlens=n, backend="gluon") * 2, fullgraph=True
    )
    assert relative_error(compiled(q, k, v, lengths), 2 * decode_reference(q, k, v, seqlens=lengths)) < 5e-3


def test_a_captured_merge_of_programs_that_wait_has_counters_of_its_own():
    q, k, v = (
        torch.randn(1, h, s, 128, device="cuda", dtype=torch.bfloat16) for h, s in ((8, 1), (2, 9000), (2, 9000))
    )
    from utils.attention.gluon.decode.launch import Launch

    launch = Launch(q, k, v, True, 0, False, None, merge="together")
    expected = launch(q, k, v, 0.1, None, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(q, k, v, 0.1, None, None)
    side = torch.cuda.Stream()
    for _ in range(20):  # beside launches whose counters it would share
        with torch.cuda.stream(side):
            graph.replay()
        side.synchronize()
        assert torch.equal(launch(q, k, v, 0.1, None, None), expected) and torch.equal(out, expected)
