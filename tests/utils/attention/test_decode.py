"""Decode on every machine: the call, its errors and its torch path against float64, and the kernel in the simulator."""

import itertools

import pytest
import torch

from tests.utils.attention.decode_cases import random_cache, relative_error
from utils.attention import AttentionUnsupported, attention_decode, decode_reference, last_run
from utils.attention.gluon.decode.arrangement import SHORT_RING_BYTES, aligned_split, arrange, shared_programs
from utils.attention.gluon.decode.plan import SHARED_BYTES, make_plan, power_of_two, refuse


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
    # The scales once more, by hand: the second head of keys is the query heads 2 and 3.
    plain = attention_decode(q, 3.0 * k.float(), 0.1 * v.float(), seqlens=lengths, block_table=table)
    assert relative_error(out[:, 2:], plain[:, 2:].double()) < 1e-5


@pytest.mark.parametrize(
    ("scales", "error", "says"),
    [
        (None, ValueError, "NoneType. Without scales pass ones"),
        (torch.ones(2), ValueError, r"float32 of shape \(2, 2\)"),
        (torch.ones(2, 2, dtype=torch.float64), ValueError, "torch.float64 of shape"),
    ],
    ids=("none", "a scale for each of K and V", "float64"),
)
def test_wrong_scales_are_named(scales, error, says):
    k = torch.randn(2, 2, 50, 16).to(torch.float8_e4m3fn)
    with pytest.raises(error, match=says):
        attention_decode(torch.randn(2, 4, 1, 16), k, k, kv_scales=scales)


def test_scales_without_an_fp8_cache_are_named():
    k = torch.randn(2, 2, 50, 16)
    with pytest.raises(TypeError, match=r"they are torch\.float32 and"):
        attention_decode(torch.randn(2, 4, 1, 16), k, k, kv_scales=torch.ones(2, 2))


def test_a_full_cache_is_plain_attention():
    q, k, v = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 50, 16), torch.randn(2, 2, 50, 16)
    expected = decode_reference(q, k, v)
    assert relative_error(attention_decode(q, k, v), expected) < 1e-5


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


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"seqlens": [3, 4]}, TypeError, "int32"),
        ({"seqlens": torch.tensor([3, 4])}, ValueError, "torch.int64"),
        ({"seqlens": torch.tensor([3], dtype=torch.int32)}, ValueError, r"\(2,\)"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int32)}, ValueError, "seqlens"),
        ({"block_table": torch.zeros(2, dtype=torch.int32)}, ValueError, "pages"),
        ({"backend": "cudnn"}, ValueError, "gluon, sdpa"),
        ({"backend": "gluon"}, AttentionUnsupported, "sdpa"),
        ({"window": 0}, ValueError, "window"),
        ({"q": torch.randn(2, 3, 1, 16)}, ValueError, "multiple"),
        ({"q": torch.randn(2, 4, 1, 16, requires_grad=True)}, ValueError, "backward"),
        ({"seqlen": torch.tensor([3, 4])}, TypeError, "seqlens"),
    ],
    ids=(
        "lengths as a list",
        "lengths in int64",
        "too few lengths",
        "pages without lengths",
        "pages in one dimension",
        "a backend that cannot",
        "a backend that is not here",
        "no window",
        "heads that do not fit",
        "a gradient",
        "a typo",
    ),
)
def test_wrong_arguments_are_named(change, error, says):
    arguments = {"q": torch.randn(2, 4, 1, 16), "k_cache": torch.randn(2, 2, 50, 16)} | change
    with pytest.raises(error, match=says):
        attention_decode(arguments.pop("q"), arguments.pop("k_cache"), torch.randn(2, 2, 50, 16), **arguments)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 16, 128])
@pytest.mark.parametrize("page", [None, 16, 256])
def test_every_plan_fits(head_dim, group, page):
    for sq in (1, 2, 5, 16, 64):
        plan = make_plan(head_dim, group, sq, page)
        assert not refuse(group, sq, 1, page)
        assert plan.shared_bytes + (700 if plan.consumers else 3000) < SHARED_BYTES
        assert plan.slots >= 4 and (plan.consumers or plan.slots % 2 == 0)
        assert 8 <= plan.columns <= 128 and plan.heads >= group
        assert plan.block_n % plan.box == 0 and plan.block_n % 64 == 0
        if group <= 64:
            plan = make_plan(head_dim, group, sq, page, fp8=True)
            assert plan.per_sm * (plan.shared_bytes + 1024) < SHARED_BYTES
            assert plan.raw_slots >= 2 and plan.consumers == (0 if power_of_two(group) * sq <= 16 else 1)
            if head_dim <= 128:
                two = make_plan(head_dim, group, sq, page, fp8=True, consumers=2)
                assert two.raw_slots >= 2 and two.columns == 128 and two.shared_bytes + 1024 < SHARED_BYTES
            else:
                with pytest.raises(ValueError, match="two consumers take head dimensions up to 128"):
                    make_plan(head_dim, group, sq, page, fp8=True, consumers=2)
        for consumers in (1, 2) if group <= 64 else (2,):
            plan = make_plan(head_dim, group, sq, page, consumers=consumers)
            assert plan.shared_bytes + 700 < SHARED_BYTES  # no reduction exchanges anything
            assert plan.columns == 64 * consumers and plan.heads >= group
            assert plan.slots // 2 >= 2 and plan.block_n % plan.box == 0


def test_the_next_head_begins_early_only_where_programs_take_several_whole_heads():
    seen = set()
    for batch, kv_heads, group, sq, head_dim in itertools.product(
        (1, 16, 64, 200), (1, 8), (1, 3, 8, 64, 128), (1, 8, 16, 64), (64, 80, 128, 256)
    ):
        for options in ({}, {"lengths": True}, {"lengths": True, "page": 16}, {"fp8": True}):
            if refuse(group, sq, batch, options.get("page"), head_dim, options.get("fp8", False)):
                continue
            found = arrange(batch, kv_heads, group, sq, 1024, head_dim, 132, **options)
            plan, several = found.plan, found.aligned and found.heads > 132
            by_rows = plan.consumers > 0 and plan.block_d == 128 and not options
            large = 4 * batch * kv_heads * 1024 * head_dim >= SHORT_RING_BYTES
            assert plan.ahead == (several and by_rows and plan.consumers == 2 and not large)
            assert (plan.per_sm == 2) == (several and plan.consumers == 1) or not by_rows
            whole, one_head = found.aligned and by_rows and not plan.ahead, found.programs >= found.heads
            assert plan.by_tma == (whole and one_head and (plan.consumers == 2 or plan.per_sm == 2))
            assert plan.wide == (whole and plan.consumers == 1 and not plan.by_tma)
            assert plan.shared_bytes + 1024 <= SHARED_BYTES // plan.per_sm
            seen.add((plan.ahead, plan.wide, plan.by_tma, plan.consumers))
    assert {(True, False, False, 2), (False, True, False, 1), (False, False, True, 1), (False, False, True, 2)} <= seen
    assert not arrange(128, 8, 8, 16, 1024, 128, 132, aligned=False).plan.ahead
    assert not arrange(16, 8, 8, 8, 8192, 128, 132, wide=False).plan.wide


def test_how_many_programs_share_a_cache():
    def programs(*sizes, **options):
        return arrange(*sizes, 132, **options).programs

    # Whole heads: two programs an SM take several short ones each, or one long one each.
    assert programs(64, 8, 4, 1, 4096, 128) == programs(64, 8, 4, 16, 4096, 128) == 512
    assert programs(64, 8, 4, 1, 1024, 64) == programs(32, 16, 1, 16, 1024, 64) == 264
    # From 250 MB on, and where there are many short ones, a program each with an SM's whole memory.
    assert programs(128, 8, 8, 1, 1024, 128) == programs(64, 16, 1, 16, 2048, 64) == 1024
    assert programs(128, 16, 1, 1, 512, 64) == 2048 and programs(64, 16, 1, 1, 512, 64) == 132
    assert arrange(128, 8, 8, 1, 1024, 128, 132).plan.per_sm == 1
    assert programs(128, 8, 8, 8, 1024, 128) == 1024
    assert programs(99, 4, 8, 8, 1024, 128) == 396  # three for each SM, which two places an SM would not share evenly
    # With lengths, for a large cache, as many as share equal heads evenly.
    apart: dict = {"lengths": True, "cluster": 0}
    assert programs(8, 8, 4, 1, 8192, 128, **apart) == programs(64, 8, 4, 1, 4096, 128, lengths=True) == 128
    assert programs(1, 8, 4, 1, 32768, 128, **apart) == programs(8, 8, 4, 1, 8192, 128, page=64, **apart) == 132
    assert (shared_programs(64, 132), shared_programs(6, 132), shared_programs(70, 132)) == (128, 132, 0)
    assert shared_programs(1000, 132) == 0 and shared_programs(1001, 144) == 143


@pytest.mark.parametrize(
    ("sizes", "per_sm", "programs", "cluster"),
    [
        ((12, 8, 4, 1, 2048, 128), 2, 96, 0),
        ((14, 8, 4, 1, 16384, 128), 2, 112, 0),  # of any length: there is room for all of them at once
        ((20, 8, 4, 1, 2048, 128), 3, 160, 0),
        ((24, 8, 4, 1, 512, 64), 2, 192, 0),
        ((16, 8, 4, 1, 2048, 128), 1, 128, 0),  # nearly as many as SMs
        ((24, 8, 4, 1, 16384, 128), 1, 132, 0),  # 1.5 GB: equal shares
        ((12, 8, 4, 4, 2048, 128), 1, 132, 0),  # 16 query rows were not timed
        ((6, 8, 4, 1, 2048, 64), 1, 96, 2),
        ((8, 8, 4, 1, 512, 64), 1, 128, 2),
        ((8, 8, 4, 1, 16384, 64), 1, 128, 0),  # too long for what was timed: the programs of a head wait for each other
        ((6, 8, 4, 4, 2048, 64), 1, 132, 0),
    ],
    ids=str,
)
def test_heads_that_are_not_as_many_as_multiprocessors_have_a_program_each(sizes, per_sm, programs, cluster):
    found = arrange(*sizes, 132)
    assert (found.plan.per_sm, found.programs, found.plan.cluster) == (per_sm, programs, cluster)
    assert found.plan.shared_bytes + 1024 <= SHARED_BYTES // per_sm
    if per_sm > 1:  # nothing is merged
        assert found.aligned and found.plan.lean and found.programs == found.heads
        assert arrange(*sizes, 132, window=100).plan.per_sm == arrange(*sizes, 132, lengths=True).plan.per_sm == 1
        assert arrange(*sizes, 108).plan.per_sm == 1  # another GPU


def test_orders_of_blocks_and_early_rings_go_with_the_kernels_that_were_timed_with_them():
    def order(*sizes, **options):
        plan = arrange(*sizes, 132, **options).plan
        return plan.backward, plan.k_first, plan.prefill

    assert order(16, 8, 8, 16, 8192, 128) == order(16, 8, 8, 8, 8192, 128) == (False, True, 2)
    assert order(64, 8, 4, 16, 4096, 128) == (False, False, 2) and order(1, 8, 4, 16, 8192, 128) == (False, False, 3)
    assert order(128, 8, 8, 16, 1024, 128) == (False, True, 2)
    assert order(64, 8, 8, 16, 512, 128) == (True, False, 0)  # each head begun before the last one ends
    for options in ({"window": 100}, {"lengths": True}, {"lengths": True, "page": 16}, {"fp8": True}):
        assert order(16, 8, 8, 16, 8192, 128, **options) == (False, False, 0)
    # Heads of so few blocks that the rings would hold more, and parts that a program has two of.
    assert order(16, 8, 8, 16, 300, 128)[2] == order(3, 8, 4, 16, 5000, 128)[2] == 0


def test_sizes_out_of_range_are_named():
    assert "64 new tokens" in refuse(4, 65, 1)
    assert "129 share" in refuse(129, 1, 1)
    assert "48 were given" in refuse(4, 1, 1, 48)
    assert "multiple of 16" in refuse(4, 1, 1, None, 72, fp8=True)
    assert "128 share" in refuse(128, 1, 1, None, 64, fp8=True)
    with pytest.raises(ValueError, match="groups of 33"):
        make_plan(128, 33, 1, consumers=0)
    with pytest.raises(ValueError, match="groups of 65"):
        make_plan(128, 65, 1, consumers=1)
    with pytest.raises(ValueError, match="128 share"):
        make_plan(128, 128, 1, fp8=True)
    with pytest.raises(ValueError, match="consumers=1 or 2"):
        make_plan(128, 4, 1, ahead=True)
    with pytest.raises(ValueError, match="smaller blocks"):
        make_plan(256, 8, 16, consumers=2, ahead=True)
    with pytest.raises(ValueError, match="whole heads"):
        arrange(1, 8, 4, 16, 8192, 128, 132, ahead=True)


def test_two_programs_share_an_sm_where_each_takes_whole_long_heads():
    def chosen(*sizes, **options):
        plan = arrange(*sizes, 132, **options).plan
        return plan.consumers, plan.per_sm

    assert chosen(32, 16, 4, 4, 1024, 64) == chosen(32, 16, 1, 16, 1024, 64) == (0, 2)
    assert chosen(64, 8, 4, 4, 4096, 128) == chosen(64, 16, 1, 16, 2048, 64) == (0, 1)  # from 250 MB on
    assert chosen(64, 8, 4, 8, 4096, 128) == chosen(64, 8, 4, 16, 4096, 128) == (1, 2)  # 32 and 64 query rows
    assert chosen(16, 8, 8, 8, 8192, 128) == chosen(64, 8, 4, 16, 4096, 128, lengths=True) == (1, 1)
    assert chosen(16, 8, 8, 1, 8192, 128) == chosen(1, 8, 4, 1, 2048, 128) == (0, 1)  # 128 and 8 heads
    assert chosen(64, 8, 4, 1, 4096, 128, lengths=True) == (0, 1)


def test_warps_that_load_pages():
    def chosen(batch, keys, page):
        plan = arrange(batch, 8, 4, 1, keys, 128, 132, page=page, lengths=True, cluster=0).plan
        return plan.consumers, plan.producers, plan.level

    assert chosen(1, 32768, 16) == (1, 2, True)
    assert chosen(64, 4096, 16) == (1, 1, True)
    assert chosen(64, 4096, 64) == (1, 1, False)
    assert chosen(1, 32768, 256)[0] == 0


def test_whole_heads_only_where_they_are_balanced():
    assert aligned_split(1024, 8, 132)  # 7.76 rounds done in 8
    assert not aligned_split(140, 64, 132)  # 1.06 rounds done in 2
    assert aligned_split(5, 1, 132)


def test_each_program_of_a_cluster_has_a_block_and_all_clusters_fit_at_once():
    for keys, sq, (batch, parts) in itertools.product((2048, 8192, 32768), (1, 8, 16), ((1, 8), (8, 2))):
        plan = arrange(batch, 8, 4, sq, keys, 128, 132, cluster=parts).plan
        assert plan.cluster == parts and plan.sent == 4 * sq
        assert plan.slots >= min(4, 2 * (keys // plan.block_n // parts))
        assert plan.shared_bytes + plan.inbox_space + 8 * plan.slots <= SHARED_BYTES
        # An inbox has its own place unless that would cost tiles, which long shares use.
        assert plan.inbox_in_ring == (sq > 8 and keys // plan.block_n // parts > 2)
    for says, sizes, choices in (
        ("8 share 7 blocks", (1, 8, 4, 1, 7 * 128, 128), {"cluster": 8, "block_n": 128}),
        ("by its last program", (1, 8, 4, 1, 2048, 128), {"cluster": 8, "merge": "together"}),
        ("run at once; 8 of 16", (1, 8, 4, 1, 2048, 128), {"cluster": 16}),
        ("no window", (1, 8, 4, 1, 2048, 128), {"cluster": 8, "window": 100}),
        ("do not fit", (1, 8, 4, 16, 8192, 256), {"cluster": 8, "block_n": 128}),
        ("10 slots of 128 keys do not fit", (1, 8, 4, 1, 8192, 128), {"cluster": 8, "slots": 10}),
        ("64 rows at least", (1, 8, 4, 1, 8192, 128), {"cluster": 8, "block_n": 32}),
        ("up to 32 query rows", (1, 1, 40, 1, 8192, 128), {"cluster": 2, "consumers": 0}),
    ):
        with pytest.raises(ValueError, match=says):
            arrange(*sizes, 132, **choices)


def test_clusters_and_the_hint_are_chosen_where_they_were_timed():
    for (batch, kv_heads, sq, keys), parts, hint in (
        ((1, 8, 1, 2048), 8, False),
        ((1, 8, 1, 8192), 8, True),
        ((1, 8, 1, 131072), 8, False),
        ((1, 8, 16, 2048), 8, False),
        ((1, 8, 16, 8192), 0, True),
        ((8, 8, 16, 8192), 2, False),
        ((1, 8, 4, 8192), 8, True),
        ((1, 8, 16, 4096), 8, True),
        ((1, 4, 1, 2048), 16, False),
        ((2, 8, 1, 8192), 4, True),
        ((2, 8, 8, 8192), 0, True),
        ((4, 8, 1, 2048), 2, True),
        ((4, 8, 1, 8192), 0, True),
        ((4, 8, 8, 2048), 0, True),
        ((1, 8, 1, 896), 0, False),  # seven blocks for eight programs
        ((8, 16, 1, 8192), 0, False),
    ):
        found = arrange(batch, kv_heads, 4, sq, keys, 128, 132)
        assert (found.plan.cluster, found.hint) == (parts, hint), (batch, kv_heads, sq, keys)
    for options, parts in (
        ({"lengths": True}, 8),
        ({"lengths": True, "page": 16}, 8),
        ({"window": 9000}, 0),
        ({"fp8": True}, 0),
    ):
        found = arrange(1, 8, 4, 1, 8192, 128, 132, **options)
        assert (found.plan.cluster, found.hint) == (parts, parts > 0), options
    # With lengths: also many query rows over few blocks; of several sequences each has 64 programs, two an SM.
    for batch, sq, keys, parts in (
        (1, 16, 8192, 8),
        (1, 16, 9000, 0),
        (2, 2, 8192, 8),
        (2, 3, 8192, 0),
        (8, 1, 2048, 8),
        (8, 1, 2047, 0),
        (9, 1, 4095, 0),
        (64, 1, 4096, 8),
        (65, 1, 4096, 0),
        (4, 1, 16385, 0),
    ):
        for stateless in (False, True):
            found = arrange(batch, 8, 4, sq, keys, 128, 132, lengths=True, page=64, stateless=stateless)
            assert found.plan.cluster == parts, (batch, sq, keys)
            assert found.plan.per_sm == (2 if parts and batch > 1 else 1) and found.plan.merge != "last"
    # Such clusters may be divided among heads for five to eight sequences, and in one piece for sixteen.
    for (batch, kv_heads), paged, piece in (
        ((4, 8), 0, 0),
        ((5, 8), 3, 3),
        ((8, 16), 2, 2),
        ((8, 4), 2, 2),
        ((16, 8), 0, 3),
        ((17, 8), 0, None),
    ):
        for page, halvings in ((64, paged), (None, piece)):
            plan = arrange(batch, kv_heads, 4, 1, 8192, 128, 132, lengths=True, page=page).plan
            found = (plan.halvings, plan.slots, plan.block_n) if plan.cluster else None
            assert found == (None if halvings is None else (halvings, 4, 64)), (batch, kv_heads, page)
    # Two blocks of K and of V where clusters of two fill all SMs, three where they do not.
    for batch, keys, slots in ((8, 8192, 4), (8, 4096, 4), (8, 2048, 6), (4, 2048, 6)):
        plan = arrange(batch, 8, 4, 1, keys, 128, 132).plan
        assert (plan.cluster, plan.slots) == (2, slots), (batch, keys)
    # Programs that take blocks in turn share pages of 256 keys; those of one sequence have a run of blocks there.
    for page, in_turn in ((None, True), (16, True), (128, True), (256, False)):
        assert arrange(1, 8, 4, 1, 8192, 128, 132, lengths=True, page=page).plan.in_turn == in_turn
    assert arrange(2, 8, 4, 1, 8192, 128, 132, lengths=True, page=256).plan.in_turn
    # More than sixteen sequences only in pages.
    assert arrange(17, 8, 4, 1, 8192, 128, 132, lengths=True).plan.cluster == 0
    assert arrange(1, 8, 4, 1, 8192, 128, 114).plan.cluster == 0  # another GPU


def test_what_the_rule_chooses_is_never_refused():
    sizes = itertools.product(
        (1, 2, 8), (1, 4, 8), (1, 3, 4, 8, 16, 64), (1, 2, 5, 8, 16, 33, 64), (1, 64, 897, 1024, 2049, 5000)
    )
    for batch, kv_heads, group, sq, keys in sizes:
        for head_dim in (64, 80, 128, 256):
            assert arrange(batch, kv_heads, group, sq, max(keys, sq), head_dim, 132).plan.slots >= 2


def test_a_captured_graph_keeps_nothing_in_counters():
    for batch, sq, keys in itertools.product((1, 2, 8, 64), (1, 8, 16), (1000, 2048, 8192)):
        assert arrange(batch, 8, 4, sq, keys, 128, 132, stateless=True).plan.merge in ("second", "cluster")


# ---- the kernel, in the simulator ----------------------------------------------------------------------------------

KERNEL_CASES = {  # batch, heads, kv_heads, new tokens, slots, head_dim, page; options; choices of the launch
    "one token": ((1, 4, 1, 1, 300, 64, None), {}, {}),
    "group of two, three tokens": ((2, 4, 2, 3, 300, 64, None), {}, {"merge": "second"}),
    "lengths and a window": ((3, 4, 2, 2, 500, 64, None), {"window": 100}, {"lengths": True}),
    "pages of 64": ((2, 4, 2, 1, 300, 128, 64), {}, {"lengths": True, "merge": "second"}),
    "pages of 256, no causal mask": ((2, 2, 2, 5, 400, 64, 256), {"causal": False, "window": 90}, {"lengths": True}),
    "32 columns": ((1, 4, 1, 7, 300, 128, None), {}, {}),
    "three tiles of queries": ((1, 2, 1, 64, 70, 64, None), {}, {"merge": "second"}),
    "whole heads": ((4, 2, 2, 1, 200, 64, None), {}, {"aligned": True}),
    "head dimension 256": ((1, 4, 1, 2, 300, 256, None), {}, {"merge": "second"}),
    "head dimension 72": ((1, 4, 1, 2, 300, 72, None), {}, {}),
    "eighteen parts": ((1, 2, 1, 3, 1150, 64, None), {}, {"merge": "second", "block_n": 64, "programs": 18}),
    "64 rows": ((1, 4, 1, 16, 400, 128, None), {}, {}),
    "128 rows, lengths": ((2, 8, 1, 16, 150, 128, None), {}, {"lengths": True, "merge": "second"}),
    "64 rows, a window, pages of 16": ((2, 3, 1, 5, 300, 64, 16), {"window": 60}, {"lengths": True}),
    "fp8": ((1, 4, 1, 4, 150, 128, None), {}, {"fp8": True, "consumers": 1}),
    "a warp for K and one for V": ((2, 4, 2, 1, 150, 64, 16), {}, {"consumers": 1, "producers": 2, "lengths": True}),
    "equal lengths, whole heads": (
        (2, 4, 2, 2, 200, 64, None),
        {},
        {"consumers": 0, "lengths": [200, 70], "level": True, "programs": 4},
    ),
    "other lengths, level": ((2, 4, 2, 1, 300, 64, None), {}, {"consumers": 1, "lengths": [300, 20], "level": True}),
    "two programs an SM": ((2, 4, 2, 2, 200, 64, None), {}, {"consumers": 0, "per_sm": 2, "block_n": 64}),
    "fp8, keys as rows": ((1, 4, 1, 4, 400, 128, None), {}, {"fp8": True, "consumers": 0}),
    "fp8, keys as rows, lengths, pages, 64": (
        (2, 4, 2, 1, 300, 64, 16),
        {"window": 70},
        {"fp8": True, "lengths": True, "consumers": 0, "merge": "second"},
    ),
    "fp8, keys as rows, 256": ((1, 3, 1, 5, 200, 256, None), {}, {"fp8": True, "consumers": 0}),
    "fp8, 64 rows, head dimension 256": ((1, 4, 1, 4, 150, 256, None), {}, {"fp8": True, "consumers": 1}),
    "fp8, lengths, a window, pages": (
        (2, 4, 2, 1, 300, 64, 16),
        {"window": 70},
        {"fp8": True, "lengths": True, "consumers": 1},
    ),
    "64 rows, three heads, each begun before the last one ends": (
        (1, 9, 3, 5, 150, 64, None),
        {"window": 80},
        {"consumers": 1, "block_n": 64, "aligned": True, "programs": 1, "ahead": True},
    ),
    "a cluster of four": ((1, 4, 1, 1, 1000, 128, None), {}, {"cluster": 4}),
    "a cluster of four, shares of three and two blocks": ((1, 4, 1, 1, 1200, 128, None), {}, {"cluster": 4}),
    "shares of two blocks and one, query rows as rows": (
        (1, 4, 2, 9, 350, 64, None),
        {},
        {"cluster": 4, "consumers": 1, "block_n": 64},
    ),
    "clusters of two, keys as rows": (
        (2, 4, 1, 5, 500, 64, None),
        {"causal": False},
        {"cluster": 2, "consumers": 0, "block_n": 64},
    ),
    "clusters of two, two tiles of query rows": (
        (1, 8, 1, 11, 750, 80, None),
        {},
        {"cluster": 2, "block_n": 64, "slots": 6},
    ),
    "a cluster whose programs have runs of blocks": (
        (1, 4, 1, 1, 1200, 128, None),
        {},
        {"cluster": 4, "in_turn": False},
    ),
    "clusters of two, lengths of 0 and of the whole cache": (
        (3, 4, 2, 2, 300, 64, None),
        {},
        {"cluster": 2, "consumers": 0, "block_n": 64, "lengths": [300, 0, 130]},
    ),
    "a cluster of four, query rows as rows, pages of 16": (
        (2, 8, 1, 5, 700, 80, 16),
        {},
        {"cluster": 4, "consumers": 1, "block_n": 64, "lengths": True},
    ),
    "a cluster of four, pages of 256": ((2, 4, 1, 1, 700, 128, 256), {}, {"cluster": 4, "lengths": True}),
    "clusters of four, two programs an SM": (
        (3, 4, 2, 1, 700, 128, 64),
        {},
        {"cluster": 4, "per_sm": 2, "slots": 4, "block_n": 64, "lengths": True},
    ),
    "clusters of two, lengths that are nearly the same": (
        (3, 4, 2, 2, 300, 64, None),
        {},
        {"cluster": 2, "consumers": 0, "block_n": 64, "lengths": [300, 290, 280]},
    ),
    "128 rows, the output by TMA, queries and heads that are none": (
        (2, 10, 2, 11, 300, 128, None),
        {},
        {"consumers": 2, "aligned": True, "programs": 4, "by_tma": True},
    ),
    "two programs an SM with 64 rows, a program a head": (
        (2, 6, 2, 13, 300, 128, None),
        {"window": 150},
        {"consumers": 1, "block_n": 64, "per_sm": 2, "aligned": True, "programs": 4, "by_tma": True},
    ),
    "the output by TMA, several heads a program": (
        (1, 9, 3, 20, 200, 64, None),
        {},
        {"consumers": 1, "aligned": True, "programs": 2, "by_tma": True},
    ),
    "whole heads, a program each, lean": ((3, 4, 2, 1, 300, 64, None), {}, {"aligned": True, "programs": 6}),
    "lengths, lean": ((3, 4, 2, 2, 300, 64, None), {}, {"lengths": [300, 0, 130], "lean": True, "programs": 4}),
    "fp8, products in fp16": ((2, 8, 2, 9, 300, 128, None), {}, {"fp8": True, "consumers": 1, "fp16": True}),
    "fp8, products in fp16, blocks of 128 keys": (
        (2, 8, 2, 9, 700, 128, None),
        {},
        {"fp8": True, "consumers": 1, "fp16": True, "block_n": 128},
    ),
    "fp8, two consumers, products in fp16, pages": (
        (2, 8, 1, 11, 300, 64, 16),
        {"window": 70},
        {"fp8": True, "lengths": True, "merge": "second", "consumers": 2, "fp16": True},
    ),
    "fp8, two consumers": ((2, 8, 1, 16, 300, 128, None), {}, {"fp8": True, "consumers": 2}),
    "fp8, two consumers, lengths, pages": (
        (2, 8, 1, 11, 300, 64, 16),
        {"window": 70},
        {"fp8": True, "lengths": True, "merge": "second", "consumers": 2},
    ),
    "128 rows, keys backwards, rings filled before the roles begin": (
        (2, 16, 2, 13, 430, 128, None),
        {},
        {"consumers": 2, "aligned": True, "programs": 4, "by_tma": True, "backward": True, "prefill": True},
    ),
    "keys backwards under a window, two heads a program, K first": (
        (2, 6, 2, 13, 420, 64, None),
        {"window": 150},
        {"consumers": 1, "aligned": True, "programs": 2, "backward": True, "k_first": True, "q_slots": 1},
    ),
    "each head begun before the last one ends, in the new order": (
        (1, 9, 3, 5, 350, 64, None),
        {},
        {"consumers": 1, "block_n": 64, "aligned": True, "programs": 1, "ahead": True}
        | {"backward": True, "k_first": True, "prefill": True},
    ),
    "parts, K first": ((1, 8, 2, 16, 500, 64, None), {}, {"consumers": 1, "k_first": True, "programs": 3}),
    "a block of keys and one of values": (
        (2, 8, 2, 2, 330, 64, None),
        {},
        {"consumers": 0, "block_n": 64, "aligned": True, "slots": 2, "programs": 3},
    ),
    "128 rows, whole heads of 256": ((2, 5, 1, 7, 90, 256, None), {}, {"consumers": 2, "aligned": True, "wide": True}),
}


@pytest.mark.parametrize(("sizes", "options", "choices"), KERNEL_CASES.values(), ids=KERNEL_CASES)
def test_the_kernel_is_right_in_the_simulator(sizes, options, choices):
    pytest.importorskip("triton", reason="the simulator needs Triton for the language; there are wheels for Linux only")
    from utils import gluon_cpu
    from utils.attention.gluon.decode.launch import Launch

    batch, heads, kv_heads, sq, slots, head_dim, page = sizes
    choices = {"programs": 5, "merge": "last", **choices}  # programs cannot wait for each other in the simulator
    with_lengths = choices.pop("lengths", False)
    fill = float("nan") if with_lengths else 0.5
    k, v, lengths, table = random_cache(batch, kv_heads, slots, head_dim, torch.bfloat16, len(str(sizes)), page, fill)
    if isinstance(with_lengths, list):
        lengths = torch.tensor(with_lengths, dtype=torch.int32)
        k, v = k.nan_to_num(0.5), v.nan_to_num(0.5)  # there are more keys than of the lengths that were drawn
    lengths = lengths if with_lengths else None
    q = torch.randn(batch, heads, sq, head_dim, dtype=torch.bfloat16)
    causal, window = options.get("causal", True), options.get("window", 0)
    scales = None
    if choices.get("fp8"):
        k, v, scales = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), torch.rand(2, kv_heads) + 0.5
    launch = Launch(q, k, v, causal, window, bool(with_lengths), table, **choices)
    with gluon_cpu.simulate():
        out = launch(q, k, v, 0.1, lengths, table, scales)
        again = (
            launch(q, k, v, 0.1, lengths, table, scales) if launch.counters else out
        )  # which the first call left at zero
    expected = decode_reference(q, k, v, seqlens=lengths, block_table=table, kv_scales=scales, scale=0.1, **options)
    assert relative_error(out, expected) < 4e-3
    assert torch.equal(out, again)
