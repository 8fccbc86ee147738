"""How a step is launched: tiles, schedules, and that every argument of a kernel is given exactly once."""

import inspect
import itertools
import math
import random
import weakref

import numpy as np
import pytest
import torch

from utils.attention.gluon import launch
from utils.attention.gluon.dealing import SECTION_BYTES, _exchange, _longest_first, deal_tiles
from utils.attention.gluon.plan import (
    BLOCK_M,
    STEPS,
    block_head_dim,
    busiest,
    parts_for,
    plan_for,
    row_offset,
    tile_blocks,
    variant_for,
)
from utils.machine.device import offline_compile_support, triton_support

needs_triton = pytest.mark.skipif(not __import__("importlib").util.find_spec("triton"), reason=triton_support().reason)


@needs_triton
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("causal, window, return_lse", [(False, 0, False), (True, 0, True), (False, 40, True)])
def test_every_kernel_argument_is_given_once(monkeypatch, step, causal, window, return_lse):
    calls = []
    real = launch.kernel_of(step)
    module = launch.step_module(step)

    class Recorder:
        def __getitem__(self, grid):
            def call(*args, **kwargs):
                kwargs.pop("num_warps")
                calls.append((grid, inspect.signature(real.fn).bind(*args, **kwargs).arguments))

            return call

    monkeypatch.setattr(module, f"attention_step{step}", Recorder())
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    q = torch.randn(2, 4, 300, 72, dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 517, 72, dtype=torch.bfloat16), torch.randn(2, 2, 517, 72, dtype=torch.bfloat16)
    lse = torch.empty(2, 4, 300)
    launch._launch(step, q, k, v, torch.empty_like(q), lse, causal, 0.1, window, return_lse)
    ((grid, given),) = calls
    assert set(given) == set(inspect.signature(real.fn).parameters)
    assert given["sq"] == 300 and given["sk"] == 517 and given["group"] == 2 and given["heads"] == 4
    if step == 5:
        assert given["CASE"].causal is (causal and not window) and given["lse_rows"] == 300 * return_lse
        assert given["PLAN"] == launch.plan_of(5, q, k, causal, window)
    else:
        assert given["CAUSAL"] is causal and given["LSE"] is return_lse
    assert math.prod(grid) <= 132 if step == 5 else grid == (math.ceil(300 / plan_for(step, 72).rows), 8)


@pytest.mark.parametrize(
    "sq, sk, heads, group, window",
    [(16384, 16384, 16, 1, 0), (4096, 4096, 64, 4, 1000), (1000, 3000, 5, 1, 0), (64, 64, 1, 1, 0)],
)
def test_causal_tiles_are_dealt_once_and_evenly(sq, sk, heads, group, window):
    programs, blocks = 132, tile_blocks(plan_for(5, 128), sq, sk, True, window)
    dealt = deal_tiles(blocks, heads, group, sk * 512, programs)
    tiles = [tile for program in dealt for tile in program]
    rows = sq + row_offset(plan_for(5, 128), True, window > 0, sk - sq)
    assert sorted(tiles) == list(range(heads * math.ceil(rows / 128)))
    loads = [sum(blocks[tile % len(blocks)] for tile in program) for program in dealt]
    assert max(loads) - sum(loads) / programs <= max(blocks)  # at worst one tile too many
    if len(tiles) > 1000:
        assert sum(loads) / programs / max(loads) > 0.97


def test_exchanges_deal_out_few_long_tiles_better():
    """Three tiles for each program: longest first the busiest one has a fifth more work than the mean, and a twentieth after exchanges."""
    costs = np.array([min(77, 41 + 3 * m // 2) + 2.5 for m in range(26) for _ in range(16)])
    load, section = np.zeros(132), np.zeros(len(costs), dtype=int)
    owner = _longest_first(costs, load)
    before = load.max()
    _exchange(costs, owner, load, section)
    assert load.max() < 1.05 * load.mean() < 1.15 * load.mean() < before
    np.testing.assert_allclose(load, np.bincount(owner, weights=costs, minlength=132))


def test_exchanges_keep_the_sections_of_every_program():
    rng, gained = random.Random(5), 0
    for _ in range(40):
        programs = rng.choice((1, 2, 7, 132))
        costs = np.array([rng.choice((2.5, float(rng.randint(1, 90)))) for _ in range(rng.randint(1, 4 * programs))])
        section = np.sort([rng.randrange(3) for _ in costs])
        load = np.zeros(programs)
        owner = _longest_first(costs, load)
        old, before = owner.copy(), load.max()
        _exchange(costs, owner, load, section)
        assert load.max() <= before + 1e-6
        gained += load.max() < before - 1e-6
        for number in set(
            section[section < section[-1]]
        ):  # each program keeps its number of tiles of all but the last one
            counts = [np.bincount(x[section == number], minlength=programs) for x in (old, owner)]
            assert (counts[0] == counts[1]).all()
    assert gained > 5


@pytest.mark.parametrize("batch, length", [(16, 1024), (8, 2048)])
def test_sections_of_heads_follow_each_other_and_leave_no_program_behind(batch, length):
    """At head dim 256, in sections of 16 MiB, the busiest program had 3% more than the mean before there were exchanges within sections."""
    blocks = tile_blocks(plan_for(5, 256), length, length, True, 0)
    head_bytes = length * 256 * 4
    dealt = deal_tiles(blocks, batch * 8, 1, head_bytes, 132)
    loads = [sum(blocks[tile % len(blocks)] + 2.5 for tile in program) for program in dealt]
    assert max(loads) < 1.015 * sum(loads) / 132
    heads, last = SECTION_BYTES // head_bytes, batch * 8 - 2 * (SECTION_BYTES // head_bytes)
    for program in dealt:
        sections = [min(tile // len(blocks), last) // heads for tile in program]
        assert sections == sorted(sections)


def test_very_many_tiles_are_dealt_evenly():
    blocks = tile_blocks(plan_for(5, 64), 4096, 4096, True, 0)
    dealt = deal_tiles(blocks, 5000, 1, 4096 * 256, 132)
    loads = [sum(blocks[tile % len(blocks)] + 2.5 for tile in program) for program in dealt]
    assert sum(map(len, dealt)) == 5000 * len(blocks) and max(loads) < 1.01 * sum(loads) / 132


@pytest.mark.parametrize("sq, heads", [(2944, 6), (16384, 2), (1024, 64), (8192, 1)])
def test_the_busiest_program_has_about_the_work_that_is_foreseen(sq, heads):
    plan = plan_for(5, 64)
    blocks = tile_blocks(plan, sq, sq, True, 0)
    dealt = deal_tiles(blocks, heads, 1, sq * 256, 132)
    most = max(sum(blocks[tile % len(blocks)] + 2.5 for tile in program) for program in dealt)
    assert 0.95 * most <= busiest(plan, sq, sq, heads, 132) / 3 <= most  # in blocks of 192 rows


@pytest.mark.parametrize("causal, window", [(True, 0), (True, 100), (False, 100), (False, 0)])
def test_blocks_of_tiles_are_those_that_their_rows_see(causal, window):
    """Counted key by key; a tile whose rows see no key has one block, in which all is masked."""
    for head_dim, variant in ((64, ""), (64, "few"), (96, ""), (128, ""), (256, "")):
        plan = plan_for(5, head_dim, variant)
        for sq, sk in itertools.product((1, 64, 100, 192, 321, 512, 640), repeat=2):
            first_row, expected = -row_offset(plan, causal, window > 0, sk - sq), []
            for row in range(first_row, sq, plan.rows):
                positions = torch.arange(row, row + plan.rows)[:, None] + sk - sq
                keys = torch.arange(sk)[None, :]
                seen = keys <= positions if causal else torch.ones(plan.rows, sk, dtype=torch.bool)
                if window:
                    seen &= (keys - positions).abs() < window
                columns = seen.any(0).nonzero()
                low, high = (columns[0].item(), columns[-1].item()) if len(columns) else (0, 0)
                expected.append(high // plan.block_n - low // plan.block_n + 1)
            assert tile_blocks(plan, sq, sk, causal, window) == expected, (head_dim, variant, sq, sk)


def test_plans_fit_the_machine():
    for step in STEPS:
        for head_dim, variant in itertools.product((8, 64, 72, 96, 104, 128, 136, 256), ("", "one", "few", "ahead")):
            plan = plan_for(step, head_dim, variant)
            assert plan.block_d == block_head_dim(head_dim) >= sum(plan.columns) >= head_dim
            q_rows = plan.rows * (plan.q_slots + (0 if plan.o_in_q or step < 5 else 1))
            assert 2 * plan.block_d * (q_rows + (plan.stages + plan.v_stages) * plan.block_n) < 227 * 1024
            if step >= 4:  # registers of the consumers, and of the warpgroup that the producer is rounded up to
                assert 128 * (plan.consumers * plan.registers + (32 if plan.consumers == 3 else 24)) <= 65536
    with pytest.raises(ValueError, match="steps 1 to 5"):
        plan_for(6, 64)


def variant(head_dim, causal=False, window=0, length=1024, sk=None, heads=128):
    return variant_for(head_dim, causal, window, length, sk or length, heads, 132)


def drawn_shapes(seed, count=100):
    """Shapes of all kinds: lengths 500 to 40,000, tails, grouped heads, Sq != Sk, windows, five head dimensions."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        sq = sk = round(math.exp(draw.uniform(math.log(500), math.log(40_000))))
        if draw.random() < 0.25:
            sk = min(40_000, max(500, round(sq * draw.uniform(0.4, 2.5))))
        causal = draw.random() < 0.5
        window = draw.choice((256, 1024, 4096)) if sq == sk and draw.random() < 0.2 else 0
        heads = draw.choice((1, 2, 3, 4, 8, 16)) * draw.choice((1, 2, 4, 8)) * draw.choice((1, 1, 2, 4, 8))
        head_dim = draw.choice((64, 80, 96, 128, 256))
        if 1e9 <= 4.0 * heads * sq * min(sk, window or sk) * head_dim <= 1e13 and (not causal or sk >= sq):
            found.append((head_dim, causal, window, sq, sk, heads))
    return found


@needs_triton
@pytest.mark.parametrize("seed", range(4))
def test_few_kernels_are_compiled_for_many_shapes(monkeypatch, seed):
    """What a kernel is compiled for: its plan, its case, its types, and nothing of the sizes, which are not specialized."""
    from utils.attention.gluon import step5_overlapped
    from utils.attention.gluon.arguments import Arguments

    kernel, keys = launch.kernel_of(5), set()
    numbers = {p.name for p in kernel.params if p.do_not_specialize}
    names = inspect.signature(kernel.fn).parameters

    class Recorder:
        def __getitem__(self, grid):
            def call(*args, **kwargs):
                given = (
                    inspect.signature(kernel.fn)
                    .bind(*args, **{n: v for n, v in kwargs.items() if n in names})
                    .arguments
                )
                integers = {name for name, value in given.items() if isinstance(value, int)}
                assert integers <= numbers, f"compiled again for a number: {integers - numbers}"
                keys.add((given["PLAN"], given["CASE"]))

            return call

    monkeypatch.setattr(step5_overlapped, "attention_step5", Recorder())
    monkeypatch.setattr(step5_overlapped, "deal_tiles", lambda *given: [[0]])
    monkeypatch.setattr(step5_overlapped, "workspace", lambda like, *numbers: (like, like))
    monkeypatch.setattr(step5_overlapped, "tensor_on", lambda device, table: table)
    monkeypatch.setattr(step5_overlapped, "unused", lambda *given: None)
    monkeypatch.setattr(Arguments, "descriptors", lambda self: [None] * 4)
    step5_overlapped.tile_schedule.cache_clear()
    for head_dim, causal, window, sq, sk, heads in drawn_shapes(seed):
        plan = plan_for(5, head_dim, variant_for(head_dim, causal, window, sq, sk, heads, 132))
        q, k = (torch.empty(1, heads, n, head_dim, dtype=torch.bfloat16, device="meta") for n in (sq, sk))
        step5_overlapped.launch(Arguments(q, k, k, q, q, causal, window, sq % 2 == 0, 1.0, plan, 132))
    step5_overlapped.tile_schedule.cache_clear()
    assert 10 < len(keys) <= 24


def test_one_consumer_where_even_its_tiles_are_few():
    # Measured on an H200, in microseconds: the other plan, one consumer.
    assert variant(128, causal=True, length=528, heads=8) == "one"  # 15.2, 12.4
    assert variant(256, window=256, length=1024, heads=8) == "one"  # 22.5, 17.2
    assert variant(64, causal=True, length=896, heads=8) == "one"  # 15.6, 12.8
    assert variant(64, length=2048, heads=4) == "one"  # 20.8 in two parts, 19.0
    assert variant(256, length=2048, heads=2) == "one"  # 30.2 in four parts, 27.8 in two
    assert variant(256, causal=True, length=1024, heads=4) == "one"  # 22.1 in four parts, 19.0 in two
    assert variant(128, length=1920, heads=2) == "", "18.1 in four parts, 18.7 in two"
    assert variant(128, causal=True, length=1024, sk=4096, heads=4) == "", "24.3 in four parts, 27.6 in two"
    assert variant(128, length=896, heads=16) == "ahead", "17.6, and 22.5 in two rounds of tiles of 64 rows"
    assert variant(64, length=1024, heads=16) == "ahead", "16.5, 20.4"
    assert plan_for(5, 128, "one").rows == 64


def test_few_tiles_or_many_masks_take_smaller_tiles():
    assert variant(64, causal=True, heads=16) == variant(64, window=4096, length=5259, heads=3) == "few"
    assert variant(128, causal=True, heads=16) == variant(256, heads=16) == ""
    assert variant(64, causal=True, length=2944, heads=6) == "few", "of 192 rows half as many tiles as programs"
    assert variant(64, window=1024, length=4096, heads=32) == "", "rounds of 12.5% more rows"
    assert variant(64, window=1024, length=4096, heads=8) == "few", "two rounds of either, so half as many rows more"
    assert variant(64, causal=True, window=4096, length=5248, heads=64) == "", "few masks"
    assert variant(64, causal=True, window=1024, length=8192, heads=64) == ""
    assert variant(64, causal=True, heads=512) == "few" and variant(64, causal=True, length=4096, heads=128) == ""


def test_full_attention_overlaps_tiles_where_that_pays():
    assert variant(128) == variant(72, length=150, sk=129) == variant(96, heads=4, length=4096) == "ahead"
    assert variant(128, sk=128) == variant(64, sk=128) == "", "a tile of one block has no second product"
    assert variant(128, window=100) == variant(256) == ""
    # Head dim 64: 8 rounds of 128 rows against 6 of 192, and 16 against 11.
    assert variant(64) == variant(64, length=8192, heads=16) == "ahead"
    assert variant(64, length=8192, heads=32) == variant(64, length=16384, heads=32) == ""


def test_inputs_that_tma_cannot_address_are_copied():
    x = torch.randn(2, 3, 50, 64, dtype=torch.bfloat16)
    rows_first = torch.randn(2, 50, 3, 64, dtype=torch.bfloat16).transpose(1, 2)
    for view in (x, rows_first, x[:, :, 3:40], x[:, 1:2]):
        assert launch.addressable(view) is view
    odd = torch.randn(2, 3, 50, 67, dtype=torch.bfloat16)[..., :64]
    for view in (
        odd,
        x.transpose(2, 3).contiguous().transpose(2, 3),
        x[:, :1].expand(2, 3, 50, 64),
        torch.randn(2 * 3 * 50 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 3, 50, 64),
    ):
        copy = launch.addressable(view)
        assert torch.equal(copy, view) and copy.data_ptr() % 16 == 0 and copy.is_contiguous()


@pytest.mark.parametrize("head_dim, variant", [(64, ""), (64, "few"), (96, ""), (128, ""), (256, "")])
def test_causal_rows_need_a_mask_in_their_last_block_alone(head_dim, variant):
    """Checked key by key: behind the first block of a walk, every row sees every key that there is."""
    plan, offsets = plan_for(5, head_dim, variant), set()
    for sq, sk in itertools.product((1, 64, 100, 192, 321, 512, 640), repeat=2):
        offset = row_offset(plan, True, False, sk - sq)
        assert 0 <= offset < (BLOCK_M if plan.own_keys else plan.rows)
        offsets.add(offset)
        for row in range(-offset, sq, BLOCK_M):
            first, rows = (
                (row, BLOCK_M) if plan.own_keys else ((row + offset) // plan.rows * plan.rows - offset, plan.rows)
            )
            last = min(-(-sk // plan.block_n), -(-max(first + rows + sk - sq, 0) // plan.block_n))
            behind = max(last - 1, 0) * plan.block_n
            assert not behind or max(row, 0) + sk - sq >= behind - 1, (sq, sk)
    assert len(offsets) > 2
    assert row_offset(plan, True, True, 1) == row_offset(plan, False, False, 1) == 0


def test_programs_share_tiles_where_there_are_few():
    few, plan = plan_for(5, 64, "few"), plan_for(5, 128)
    # As measured on an H200: 26.6, 22.8, 19.6 and 17.9 us in 1 to 4 parts; 65.7, 27.8 and 25.1 in 1, 4 and 5.
    assert parts_for(plan, 1920, 1920, 2, False, 0, 132) == 4  # 30 tiles of 15 blocks
    assert parts_for(plan, 384, 6000, 8, False, 0, 132) == 5
    assert parts_for(few, 2048, 2048, 1, False, 0, 132) == 8
    assert parts_for(few, 896, 896, 8, True, 0, 132) == 1  # 15.8 us whole, 16.5 in two parts
    assert parts_for(plan_for(5, 256), 1024, 1024, 8, False, 256, 132) == 1  # a window of eleven blocks
    assert parts_for(few, 2048, 8192, 2, True, 0, 132) == 4
    for shared in (few, plan, plan_for(5, 256)):
        assert parts_for(shared, 4096, 4096, 32, False, 0, 132) == 1  # more tiles than programs
        assert parts_for(shared, 128, 128, 1, False, 0, 132) == 1  # nothing to share
        assert parts_for(shared, 512, 4096, 1, True, 32, 132) == 1  # the window leaves few blocks
    assert parts_for(plan_for(5, 64), 512, 8192, 1, False, 0, 132) == 1  # registers for two consumers only


@pytest.mark.slow
def test_no_program_has_two_shared_tiles():
    """Programs that share tiles wait for each other, so all of them run at once; a tile too many would never be computed."""
    rng, shared = random.Random(11), 0
    for _ in range(3000):
        causal, window = rng.random() < 0.6, rng.choice((0, 0, 200, 3000))
        head_dim, programs, heads = rng.choice((64, 96, 128, 256)), rng.choice((4, 78, 132)), rng.randint(1, 40)
        sq, sk = rng.randint(1, 3000), rng.randint(64, 20000)
        variant = variant_for(head_dim, causal, window, sq, sk, heads, programs)
        plan = plan_for(5, head_dim, variant)
        parts = parts_for(plan, sq, sk, heads, causal, window, programs)
        rows = sq + row_offset(plan, causal, window > 0, sk - sq)
        assert parts == 1 or parts * heads * -(-rows // plan.rows) <= programs, (sq, sk, heads, variant)
        shared += parts > 1
    assert shared > 150


@needs_triton
@pytest.mark.parametrize("sizes", [(1, 2, 1, 200, 201), pytest.param((2, 2, 2, 300, 333), marks=pytest.mark.slow)])
@pytest.mark.skipif(not offline_compile_support(), reason=offline_compile_support().reason)
def test_a_tail_that_only_the_first_block_masks(monkeypatch, sizes):
    """Three consumers with a tail: the first block alone has a mask."""
    from utils import gluon_cpu
    from utils.attention.reference import reference

    batch, heads, kv_heads, sq, sk = sizes
    torch.manual_seed(0)
    q = torch.randn(batch, heads, sq, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, kv_heads, sk, 64, dtype=torch.bfloat16) for _ in range(2))
    expected, expected_lse = reference(q, k, v)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 3)
    monkeypatch.setattr(launch, "plan_of", lambda *given: plan_for(5, 64))
    out, lse = torch.full_like(q, float("nan")), torch.empty(batch, heads, sq)
    with gluon_cpu.simulate() as run:
        launch._launch(5, q, k, v, out, lse, False, 64**-0.5 * math.log2(math.e), 0, True)
    assert run.ok and ((out.double() - expected).norm() / expected.norm()) < 4e-3
    assert (lse - expected_lse).abs().max() < 1e-3


@needs_triton
@pytest.mark.parametrize("capturing", [False, True])
def test_a_captured_graph_keeps_its_schedule(monkeypatch, capturing):
    """A graph has the schedule's address only: once 64 other shapes had come, it read which tiles to compute from freed memory."""
    from utils.attention.gluon import step5_overlapped

    monkeypatch.setattr(step5_overlapped, "_captured", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    schedule = torch.zeros(4, dtype=torch.int32)
    alive, ran = weakref.ref(schedule), []
    kept = step5_overlapped.Launch(lambda *tensors: ran.append(len(tensors)), 0, 0, schedule)
    kept(*[torch.zeros(1)] * 5)
    del kept, schedule  # as when newer launches and schedules have taken their places
    assert ran == [8] and (alive() is not None) == capturing


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.skipif(not offline_compile_support(), reason=offline_compile_support().reason)
def test_random_problems_on_random_machines(monkeypatch, seed):
    """Few multiprocessors, so that programs walk over several tiles, or many, so that they share one, in any order of the roles."""
    from utils import gluon_cpu
    from utils.attention.gluon import step5_overlapped
    from utils.attention.reference import reference

    rng, shared = random.Random(seed), 0
    for _ in range(10):
        torch.manual_seed(seed)
        head_dim, causal, many = rng.choice((24, 64, 80, 96, 128, 136, 256)), rng.random() < 0.6, rng.random() < 0.5
        sq, sk, group = rng.randint(1, 257), rng.randint(1, 900 if many else 400), rng.choice((1, 2))
        window, programs = (
            rng.choice((0, 0, 1, 65, rng.randint(1, 400))),
            rng.choice((24, 78) if many else (1, 2, 3, 7)),
        )
        dtype, lse = rng.choice((torch.bfloat16, torch.float16)), rng.random() < 0.5
        q = torch.randn(1, sq, group, head_dim, dtype=dtype).transpose(1, 2)
        k, v = (torch.randn(1, 1, sk, head_dim, dtype=dtype) for _ in range(2))
        plan = plan_for(5, head_dim, variant_for(head_dim, causal, window, sq, sk, group, programs))
        can_share = plan.consumers < 3 and not plan.ahead and not window
        most = min(programs // (-(-(sq + 127) // plan.rows) * group), 8) if can_share else 1
        parts = rng.randint(1, max(most, 1))  # more than the rule would take, too
        monkeypatch.setattr(launch, "_multiprocessors", lambda device, programs=programs: programs)
        monkeypatch.setattr(launch, "plan_of", lambda *given, plan=plan: plan)
        monkeypatch.setattr(step5_overlapped, "parts_for", lambda *given, parts=parts: parts)
        out, sums = torch.full((1, group, sq, head_dim), math.nan, dtype=dtype), torch.full((1, group, sq), math.nan)
        with gluon_cpu.simulate(seed=rng.choice((None, seed))) as run:
            launch._launch(5, q, k, v, out, sums, causal, head_dim**-0.5 * math.log2(math.e), window, lse)
        expected, expected_lse = reference(q, k, v, causal=causal, window=window or None)
        what = head_dim, causal, window, sq, sk, group, programs, parts, dtype, lse
        assert run.ok and (out.double() - expected).norm() <= 6e-3 * expected.norm(), what
        if lse:
            torch.testing.assert_close(sums.double(), expected_lse.double(), atol=2e-3, rtol=0, msg=str(what))
        shared += parts > 1
    assert shared
