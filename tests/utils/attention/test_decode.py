"""Decode on every machine: the call, its errors and its torch path against float64, and the kernels in the simulator."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.utils.attention.decode_cases import other_table, random_cache
from tests.utils.attention.errors import relative_error
from utils.attention import AttentionUnsupported, attention_decode, decode_reference, last_run
from utils.attention.gluon.decode.plan import PAGES, SHARED_BYTES, TILES, Arrangement, Plan, Shape, arrange, refuse
from utils.machine.device import offline_compile_support


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"causal": False, "window": 9}, {"scale": -0.3}], ids=str)
def test_torch_path_is_right_with_lengths_pages_and_garbage_behind_the_end(page, options):
    k, v, lengths, table = random_cache(4, 2, 70, 16, page=page, seed=len(str(options)))
    q = torch.randn(4, 6, 5, 16)
    out = attention_decode(q, k, v, seqlens=lengths, block_table=table, **options)
    assert last_run().backend == "sdpa"
    assert "Hopper" in dict(last_run().passed_over)["gluon"]
    expected = decode_reference(q, k, v, seqlens=lengths, block_table=table, **options)
    assert relative_error(out, expected) < 1e-5
    assert not out[lengths == 0].any()


@pytest.mark.parametrize("page", [None, 16])
def test_an_fp8_cache_has_a_scale_for_each_head(page):
    k, v, lengths, table = random_cache(3, 2, 70, 16, page=page)
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    q, scales = torch.randn(3, 4, 3, 16), torch.tensor([[0.5, 3.0], [2.0, 0.1]])
    arguments = {"seqlens": lengths, "block_table": table, "kv_scales": scales}
    out = attention_decode(q, k, v, **arguments)
    assert relative_error(out, decode_reference(q, k, v, **arguments)) < 1e-5
    # Apply the scales by hand: query heads 2 and 3 read the second head of keys.
    plain = attention_decode(q, 3.0 * k.float(), 0.1 * v.float(), seqlens=lengths, block_table=table)
    assert relative_error(out[:, 2:], plain[:, 2:].double()) < 1e-5


def test_a_layer_step_takes_the_kernel_by_itself_only_in_a_graph_on_a_hopper_gpu(monkeypatch):
    from types import SimpleNamespace

    from utils import decode_forward
    from utils.attention import decode_step

    def projection(n):
        return SimpleNamespace(out_features=n)

    def layer(implementation="sdpa", head_dim=256):
        attention = SimpleNamespace(head_dim=head_dim, q_proj=projection(1024), k_proj=projection(256))
        return SimpleNamespace(self_attn=attention, config=SimpleNamespace(_attn_implementation=implementation))

    class OnGpu(torch.Tensor):
        is_cuda = True

    token = torch.zeros(2, 1, 640, dtype=torch.bfloat16)
    assert decode_step.attention_for_step(layer(), token) is None
    token = token.as_subclass(OnGpu)
    monkeypatch.setattr(decode_step, "gluon_support", lambda: True)
    capturing = iter((False, True, True, True, True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: next(capturing))
    assert decode_step.attention_for_step(layer(), token) is None
    assert decode_step.attention_for_step(layer(), token).func is attention_decode
    assert decode_step.attention_for_step(layer("eager"), token) is None
    assert decode_step.attention_for_step(layer(head_dim=260), token) is None
    assert decode_step.attention_for_step(layer(), token.float()) is None
    with pytest.raises(ValueError, match="'flash'"):
        decode_forward(None, token, None, None, True, attend="flash")


def test_strides_are_free():
    k, v, lengths, table = random_cache(3, 2, 40, 16, page=16)
    q = torch.randn(3, 2, 4, 16).transpose(1, 2)
    expected = decode_reference(q, k, v, seqlens=lengths, block_table=table)
    tokens_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    out = attention_decode(q, *tokens_first, seqlens=lengths, block_table=table)
    assert relative_error(out, expected) < 1e-5


FP8 = dict.fromkeys(("k_cache", "v_cache"), torch.randn(2, 2, 50, 16).to(torch.float8_e4m3fn))
MISTAKES = {
    "lengths as a list": ({"seqlens": [3, 4]}, TypeError, "int32"),
    "lengths in int64": ({"seqlens": torch.tensor([3, 4])}, ValueError, "torch.int64"),
    "too few lengths": ({"seqlens": torch.tensor([3], dtype=torch.int32)}, ValueError, r"\(2,\)"),
    "pages without lengths": ({"block_table": torch.zeros(2, 3, dtype=torch.int32)}, ValueError, "seqlens"),
    "pages in one dimension": ({"block_table": torch.zeros(2, dtype=torch.int32)}, ValueError, "pages"),
    "a backend that cannot": ({"backend": "cudnn"}, ValueError, "gluon, sdpa"),
    "a backend that is not here": ({"backend": "gluon"}, AttentionUnsupported, "sdpa"),
    "no window": ({"window": 0}, ValueError, "window"),
    "heads that do not fit": ({"q": torch.randn(2, 3, 1, 16)}, ValueError, "multiple"),
    "a gradient": ({"q": torch.randn(2, 4, 1, 16, requires_grad=True)}, ValueError, "backward"),
    "scales of a cache that is not fp8": ({"kv_scales": torch.ones(2, 2)}, TypeError, r"they are torch\.float32 and"),
    "fp8 without scales": (FP8, TypeError, "kv_scales must be a tensor"),
    "no such page": ({"block_table": torch.ones(2, 3).int() * 7, "seqlens": torch.ones(2).int()}, ValueError, "has 7"),
    "a scale for each of K and V": (FP8 | {"kv_scales": torch.ones(2)}, ValueError, r"float32 of shape \(2, 2\)"),
    "scales in float64": (FP8 | {"kv_scales": torch.ones(2, 2).double()}, ValueError, "torch.float64 of shape"),
    "a typo": ({"seqlen": torch.tensor([3, 4])}, TypeError, "seqlen"),
}


@pytest.mark.parametrize(("change", "error", "says"), MISTAKES.values(), ids=MISTAKES)
def test_wrong_arguments_are_named(change, error, says):
    q, k, v = torch.randn(2, 4, 1, 16), *torch.randn(2, 2, 2, 50, 16)
    with pytest.raises(error, match=says):
        attention_decode(**({"q": q, "k_cache": k, "v_cache": v} | change))


def draw_shape(rng: random.Random, *, fp8: bool = False) -> Shape:
    """Draw a call: in half of the calls there are lengths, in half of these pages, in one of eight a window."""
    while True:
        lengths, paged = rng.choice(((False, False), (False, False), (True, False), (True, True)))
        found = Shape(
            batch=rng.choice((1, 1, 2, 4, 8, 16, 32, 64, 128)),
            kv_heads=rng.choice((1, 2, 4, 8, 8, 16, 32)),
            group=rng.choice((1, 2, 3, 4, 4, 5, 8, 16)),
            sq=rng.choice((1, 1, 1, 2, 3, 4, 8, 16)),
            keys=int(2 ** rng.uniform(7, 17)) // 256 * 256 + 256,
            head_dim=rng.choice((64, 80, 128, 128, 128, 256)),
            window=rng.choice((0,) * 7 + (1024,)),
            page=rng.choice(PAGES) if paged else 0,
            lengths=lengths,
            fp8=fp8,
        )
        if found.batch * found.kv_heads * found.keys * found.head_dim < 1 << 30:
            return found


def test_drawn_shapes_need_sixteen_kernels_at_most():
    """Kernels are compiled for their plan and the type of their tensors, nothing else; one more adds up parts."""
    rng = random.Random(0)
    assert len({arrange(draw_shape(rng), 132).plan for _ in range(5000)}) <= 16
    with_fp8 = {arrange(draw_shape(rng, fp8=True), 132).plan for _ in range(500)}
    assert len(with_fp8) <= 2 * 8  # tiles, of pages of 64 and more, or of fewer tokens


@pytest.mark.parametrize("plan", TILES.values(), ids=str)
def test_every_tile_fits(plan: Plan):
    assert plan.per_sm * (plan.shared_bytes + plan.inbox_space + (4608 if plan.consumers else 1100)) <= SHARED_BYTES
    assert plan.slots % 2 == 0 and plan.slots >= 4 and plan.block_n % plan.box == 0
    assert plan.columns == 64 * plan.consumers or not plan.consumers


def test_what_is_chosen_fits_the_call():
    rng = random.Random(7)
    kinds = set()
    for _ in range(2000):
        shape = draw_shape(rng, fp8=rng.random() < 0.2)
        found = arrange(shape, rng.choice((132, 132, 114, 3)))
        plan = found.plan
        assert plan.fp8 == shape.fp8 and plan.block_d >= shape.head_dim
        assert found.tiles * plan.columns >= shape.rows > (found.tiles - 1) * plan.columns
        assert plan.block_n % plan.box == 0 and plan.box <= (shape.page or 128)
        if found.parts:
            assert found.programs == shape.batch * shape.kv_heads * found.parts and found.tiles == 1
            assert plan.cluster and not shape.window and found.parts in (2, 4, 8, 16)
        else:
            heads = shape.batch * shape.kv_heads
            assert not plan.cluster and not (found.whole and shape.lengths and heads != found.programs)
            assert not found.whole or heads % found.programs == 0 or heads > 0.96 * found.programs
        kinds.add((plan.consumers, bool(found.parts), found.whole, found.hint))
    assert len(kinds) >= 10


@pytest.mark.parametrize(
    ("shape", "programs", "parts", "whole"),
    [
        (Shape(1, 8, 4, 1, 8192, 128), 64, 8, False),  # one sequence: half of the SMs in clusters
        (Shape(1, 8, 4, 16, 2048, 128), 64, 8, False),
        (Shape(1, 8, 4, 16, 32768, 128), 132, 0, False),  # more keys: all SMs together are faster
        (Shape(1, 8, 4, 1, 131072, 128), 64, 8, False),  # except for few rows
        (Shape(1, 1, 4, 8, 32768, 256), 66, 0, False),  # the parts of one head, from half of the SMs
        (Shape(1, 2, 2, 4, 1600, 128), 32, 16, False),  # few bytes for each of few programs of a cluster
        (Shape(1, 4, 2, 1, 116800, 128), 132, 0, False),  # four heads too long for clusters of sixteen
        (Shape(1, 4, 4, 3, 256, 128), 8, 2, False),  # no more programs than blocks
        (Shape(4, 8, 4, 1, 1024, 128, lengths=True), 64, 2, False),  # short, so all may wait for the longest
        (Shape(4, 8, 4, 1, 8192, 128, lengths=True), 132, 0, False),
        (Shape(8, 8, 4, 1, 8192, 128), 128, 2, False),
        (Shape(16, 8, 8, 1, 8192, 128), 128, 0, True),  # nearly as many heads as SMs
        (Shape(24, 8, 4, 1, 2048, 128), 192, 0, True),
        (Shape(16, 8, 1, 1, 512, 128, lengths=True), 128, 0, True),  # short: each program takes one head
        (Shape(32, 8, 8, 16, 512, 128, lengths=True), 256, 0, True),  # more heads than SMs
        (Shape(2, 8, 4, 1, 4096, 128, page=16, lengths=True), 264, 0, False),  # small pages: two programs on each SM
        (Shape(1, 2, 8, 16, 5632, 80, window=1024), 33, 0, False),  # two tiles of rows for each head, of width 128
    ],
    ids=str,
)
def test_who_shares_a_cache(shape, programs, parts, whole):
    found = arrange(shape, 132)
    assert (found.programs, found.parts, found.whole) == (programs, parts, whole)
    assert found.needs_merge == (not parts and not whole)


def test_sizes_out_of_range_are_named():
    assert "64 new tokens" in refuse(4, 65, 1)
    assert "129 share" in refuse(129, 1, 1)
    assert "48 were given" in refuse(4, 1, 1, 48)
    assert "4097" in refuse(4, 1, 4097)
    assert "multiple of 16" in refuse(4, 1, 1, None, 72, fp8=True)


# ---- the kernels, in the simulator ---------------------------------------------------------------------------------

CASES = {  # tile; sequences, heads, heads of keys, new tokens, keys, head dimension, page; lengths; options
    "keys, one token": ("keys", 64, (1, 4, 1, 1, 600, 64, None), None, {}),
    "keys, lengths, one is empty": ("keys", 128, (3, 4, 2, 2, 700, 128, None), (700, 0, 130), {}),
    "keys, a window, not causal": ("keys", 128, (2, 4, 2, 5, 400, 72, None), None, {"causal": False, "window": 90}),
    "keys, a window, lengths": ("keys", 256, (2, 3, 1, 4, 300, 200, 256), (300, 20), {"window": 100}),
    "keys, a head of 36 parts": ("keys", 64, (1, 3, 1, 2, 4600, 64, None), None, {"programs": 36}),
    "keys, whole heads": ("keys", 64, (4, 2, 2, 3, 300, 64, None), None, {"whole": True}),
    "keys, whole heads, lengths": ("keys", 64, (2, 4, 2, 2, 700, 64, None), (700, 530), {"whole": True, "window": 300}),
    "keys, two tiles, 140 sequences": ("keys", 64, (140, 3, 1, 6, 40, 64, None), tuple(range(1, 36)) * 4, {}),
    "64 rows, groups of five": ("rows", 64, (1, 10, 2, 7, 500, 64, None), None, {}),
    "64 rows, a window, pages of 32": ("rows", 64, (2, 8, 1, 5, 300, 64, 32), (300, 70), {"window": 60}),
    "64 rows, whole heads of 256": ("rows", 256, (2, 5, 1, 7, 90, 256, None), None, {"whole": True}),
    "128 rows": ("rows", 128, (2, 16, 2, 13, 430, 128, None), None, {}),
    "two tiles, pages of 16": ("rows of many heads", 128, (2, 16, 2, 13, 430, 128, 16), (430, 70), {}),
    "128 rows of 256, one tile of Q": ("rows", 256, (1, 16, 1, 7, 300, 256, None), None, {}),
    "80 rows, two tiles, lengths": ("rows", 64, (2, 8, 1, 20, 300, 64, 128), (300, 33), {}),
    "fp8": ("fp8", 128, (2, 8, 2, 4, 400, 128, None), None, {}),
    "fp8, lengths, a window, pages": ("fp8", 64, (2, 8, 2, 1, 400, 64, 16), (400, 120), {"window": 70}),
    "fp8, head dimension 256, two tiles": ("fp8", 256, (1, 6, 1, 5, 200, 256, None), None, {}),
}


def tile_of(kind: str, head_dim: int, rows: int, page: int | None) -> Plan:
    """Return the tile of a kind for so many rows, with boxes as small as the pages."""
    tiles = [plan for key, plan in TILES.items() if key[:2] == (kind, head_dim)]
    plan = next((plan for plan in tiles if plan.columns >= rows), tiles[-1])
    return replace(plan, box=16) if page and page < 64 else plan


def draw_call(sizes, filled, dtype=torch.bfloat16):
    """Draw q, k, v, lengths and block table; after a sequence's last key there are nan, and numbers of no page."""
    batch, heads, kv_heads, sq, keys, head_dim, page = sizes
    k, v, _, table = random_cache(batch, kv_heads, keys, head_dim, dtype, len(str(sizes)), page, fill=0.5)
    lengths = None if filled is None else torch.tensor(filled, dtype=torch.int32)
    if page:
        table = other_table(len(k), filled, page, table)
    elif filled:
        for b, length in enumerate(filled):
            k[b, :, length:], v[b, :, length:] = torch.nan, torch.nan
    return torch.randn(batch, heads, sq, head_dim).to(dtype), k, v, lengths, table


def test_every_block_has_one_program_and_none_has_more_blocks_or_heads_than_its_share():
    pytest.importorskip("triton", reason="the simulator needs Triton for the language; there are wheels for Linux only")
    from tests.utils.attention.decode_kernels import deal_blocks
    from utils import gluon_cpu

    plan = TILES["keys", 128]
    for seed in range(40):
        rng, lengths = random.Random(seed), seed % 2
        batch, heads, programs = rng.choice((1, 2, 3, 5, 9, 140)), rng.choice((1, 2, 3, 8)), rng.choice((5, 17, 66))
        keys, window = rng.choice((40, 700, 5000, 40000)), rng.choice((1 << 29, 1 << 29, 300))
        filled = [rng.randint(0, keys) if lengths else keys for _ in range(batch)]
        out, lens = torch.zeros(programs, 4, dtype=torch.int32), torch.tensor(filled, dtype=torch.int32)
        with gluon_cpu.simulate():
            deal_blocks[(1, programs)](out, lens, lengths, batch, heads, keys, window, plan, num_warps=4)
        blocks = [max(1, -(-n // plan.block_n) - max(0, n - window) // plan.block_n) for n in filled]
        row = [[b, head, j] for b in range(batch) for head in range(heads) for j in range(blocks[b])]
        loads = []  # blocks and heads begun of each program
        for *first, count in out[out[:, 3] > 0].tolist():
            mine, row = row[:count], row[count:]
            assert mine[0] == first
            loads.append((count, sum(j == 0 for _, _, j in mine)))
        assert not row
        assert max(map(sum, loads)) <= heads * (sum(blocks) + batch) / programs + 2


@pytest.mark.parametrize(
    ("kind", "width", "sizes", "filled", "options"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] if "140" in name else []) for name, case in CASES.items()],
)
def test_the_kernel_is_right_in_the_simulator(kind, width, sizes, filled, options):
    pytest.importorskip("triton", reason="the simulator needs Triton for the language; there are wheels for Linux only")
    from utils import gluon_cpu
    from utils.attention.gluon.decode.launch import Launch

    options = dict(options)
    whole = options.pop("whole", False)
    programs = options.pop("programs", 4 if whole else 5)
    q, k, v, lengths, table = draw_call(sizes, filled)
    scales = None
    if kind == "fp8":
        k, v, scales = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), torch.rand(2, sizes[2]) + 0.5
    rows = sizes[1] // sizes[2] * sizes[3]
    plan = tile_of(kind, width, rows, sizes[-1])
    found = Arrangement(plan, programs, -(-rows // plan.columns), whole=whole)
    launch = Launch(q, k, v, options.get("causal", True), 0.1, options.get("window", 0), bool(filled), table, found)
    with gluon_cpu.simulate():
        out = launch(q, k, v, lengths, table, scales)
    expected = decode_reference(q, k, v, seqlens=lengths, block_table=table, kv_scales=scales, scale=0.1, **options)
    assert not out.isnan().any() and relative_error(out, expected) < 4e-3


CLUSTERS = {  # tile; sequences, heads, heads of keys, new tokens, keys, head dimension, page; lengths; programs
    "one token": (("cluster", 128), (1, 4, 1, 1, 1000, 128, None), None, 4),
    "sixteen programs": (("cluster", 128), (1, 4, 1, 2, 1100, 64, None), None, 16),
    "head dimension 80, fewer blocks than programs": (("cluster", 128), (1, 6, 2, 2, 300, 80, None), None, 8),
    "64 rows": (("cluster of rows", 128), (1, 4, 1, 15, 700, 128, None), None, 2),
    "the case that failed once": (("cluster of rows", 128), (4, 8, 2, 3, 2000, 128, 256), (2000, 0, 3, 700), 2),
    "lengths, pages of 64": (("cluster", 128), (3, 8, 2, 2, 900, 128, 64), (900, 0, 70), 4),
}


@pytest.mark.parametrize(("tile", "sizes", "filled", "parts"), CLUSTERS.values(), ids=CLUSTERS)
def test_each_program_of_a_cluster_gets_what_it_expects_and_adds_it_up(tile, sizes, filled, parts):
    pytest.importorskip("triton", reason="the simulator needs Triton for the language; there are wheels for Linux only")
    from tests.utils.attention.cluster_exchange import clusters_simulated
    from utils.attention.gluon.decode.launch import Launch

    q, k, v, lengths, table = draw_call(sizes, filled)
    found = Arrangement(TILES[tile], sizes[0] * sizes[2] * parts, parts=parts)
    launch = Launch(q, k, v, True, 0.1, 0, filled is not None, table, found)
    # Triton's launcher multiplies the grid by the size of a cluster; in the simulator a cluster is a row of neighbouring programs.
    launch.grid = (launch.grid[0] * parts, *launch.grid[1:])
    with clusters_simulated(parts, seed=len(str(sizes))) as exchange:
        launch(q, k, v, lengths, table)
        exchange.run_again()
        out = launch(q, k, v, lengths, table)
    assert not out.isnan().any()
    assert relative_error(out, decode_reference(q, k, v, seqlens=lengths, block_table=table, scale=0.1)) < 4e-3


def check_drawn(seed: int, monkeypatch) -> tuple:
    """Compare a drawn call with float64, on a made-up GPU so small that programs share heads and compute several of them."""
    from utils import gluon_cpu
    from utils.attention.gluon.decode import launch as decode_launch

    rng = random.Random(seed)
    torch.manual_seed(seed)
    group, sq = rng.choice((1, 2, 3, 4, 5, 8, 16, 24)), rng.choice((1, 1, 1, 2, 3, 5, 8, 11, 16))
    kv_heads = rng.choice((1, 2, 3)) if group < 8 else 1
    head_dim = rng.choice((64, 64, 128, 128, 256, 72, 80, 40))
    keys = rng.choice((16, 40, 64, 65, 128, 129, 200, 257, 400))
    batch, page = rng.choice((1, 2, 3, 5)) if kv_heads * keys < 500 else 1, rng.choice((None, None, None, *PAGES))
    window, causal = rng.choice((0, 0, 1, 17, 64, 100, 300, 2**31 - 1)), rng.random() < 0.7
    fp8 = rng.random() < 0.25 and not head_dim % 16
    filled = None
    if page or sq > keys or rng.random() < 0.5:
        filled = [rng.choice((0, keys, rng.randint(0, keys))) for _ in range(batch)]
    dtype = rng.choice((torch.bfloat16, torch.float16))
    q, k, v, lengths, table = draw_call((batch, group * kv_heads, kv_heads, sq, keys, head_dim, page), filled, dtype)
    q = q.transpose(1, 2).contiguous().transpose(1, 2) if sq == 1 else q
    scales = None
    if fp8:
        k, v, scales = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), torch.rand(2, kv_heads) + 0.5
    if rng.random() < 0.4:  # tokens first
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    multiprocessors = rng.choice((1, 2, 3, 5, 11))
    with monkeypatch.context() as patched:
        patched.setattr(decode_launch, "arrange", lambda shape, _: arrange(shape, multiprocessors))
        launch = decode_launch.Launch(q, k, v, causal, 0.1, window, lengths is not None, table)
    with gluon_cpu.simulate(seed=rng.choice((None, seed))):
        out = launch(q, k, v, lengths, table, scales)
    more = {"kv_scales": scales, "scale": 0.1, "causal": causal, "window": window or None}
    expected = decode_reference(q, k, v, seqlens=lengths, block_table=table, **more)
    rows = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-2)
    assert rows.max() < 2.5e-2, (seed, launch.plan)
    return launch.plan.consumers > 0, launch.found.whole, fp8, page is not None


def test_drawn_calls_in_the_simulator(monkeypatch):
    pytest.importorskip("triton", reason="the simulator needs Triton for the language")
    assert len({check_drawn(seed, monkeypatch) for seed in range(8)}) > 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160, 20))
def test_many_drawn_calls_in_the_simulator(monkeypatch, seed):
    pytest.importorskip("triton", reason="the simulator needs Triton for the language")
    for each in range(seed, seed + 20):
        check_drawn(each, monkeypatch)


# ---- compiled for sm_90a, without a GPU ----------------------------------------------------------------------------

PROGRAM = """
import json
from dataclasses import replace
from tests.utils.attention.test_decode import COMPILED
from tests.utils.barrier_places import covered_barriers
from utils.attention.gluon.decode.offline import compile_decode
from utils.attention.gluon.decode.plan import TILES
from utils.kernels.assembling import assemble, policy_copies
reports, assembled = [], False
for key, box in COMPILED:
    plan = replace(TILES[key], box=box) if key in TILES else None
    found = compile_decode(plan)
    changed = policy_copies(found.ptx) if plan else ""
    if plan and not assembled:
        assembled = len(assemble(changed)) > 10_000
    products = [part.split("DEPBAR.LE gsb0, 0x0")[0] for part in found.sass.split("DEPBAR.LE gsb0, 0x1")[1:]]
    reports.append([found.spill_bytes, found.shared_bytes, found.count("wgmma.mma_async", "ptx"),
                    changed.count("L2::cache_hint"), found.count("cp.async.bulk.tensor", "ptx"), found.count("STAS"),
                    len(covered_barriers(found.ttgir)), found.count("griddepcontrol", "ptx"),
                    min((part.count("MUFU.EX2") for part in products), default=0),
                    sum("maxnreg" in w or "wgmma" in w for w in found.warnings)])
assert assembled
print(json.dumps(reports))
"""
# All tiles of 16-bit types, three of the fp8 tiles, some of either also with pages of 16 tokens; and the merge.
COMPILED = [
    *((key, 64) for key in TILES if key[0] != "fp8"),
    (("rows", 256, 1), 16),
    (("rows of many heads", 128), 16),
    *((("fp8", *tile), box) for tile in ((64, 64), (128, 64), (256, 8)) for box in (64, 16)),
    (("merge",), 0),
]


@pytest.fixture(scope="module")
def assemblies():
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, f"compiling failed:\n{done.stderr[-3000:]}"
    return dict(zip(COMPILED, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not offline_compile_support(), reason=offline_compile_support().reason)
@pytest.mark.parametrize(("key", "box"), COMPILED, ids=str)
def test_the_assembly_is_what_the_plan_says(assemblies, key, box):
    spill, shared, wgmma, policies, copies, sends, covered, overlap, beside, warnings = assemblies[key, box]
    plan = replace(TILES[key], box=box) if key in TILES else None
    # The operand, output and scores of the largest fp8 tiles fill the registers: numbers that are used once for each head are spilled.
    full = plan and plan.fp8 and (plan.block_d == 256 or plan.block_d * plan.columns == 128 * 64)
    assert spill <= (64 if key[2:] == (2,) else 240 if full else 0)
    assert covered == warnings == 0 and overlap == 1
    if key[0].startswith("rows"):  # half of a block's exponentials run during the product with V
        assert beside >= plan.block_n // 4
    if plan:
        assert plan.shared_bytes <= shared <= plan.shared_bytes + 4608 and wgmma >= 8
        assert shared + plan.inbox_space <= SHARED_BYTES // plan.per_sm
        assert policies == copies > 0 and (sends > 0) == plan.cluster
