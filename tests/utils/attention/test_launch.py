"""How a step is launched: tiles, schedules, and that every argument of a kernel is given exactly once."""

import inspect
import itertools
import math
import random
import types
import weakref

import pytest
import torch

from tools.record.common import read_record
from utils.attention import make_problem
from utils.attention.backends import gluon
from utils.attention.gluon import launch
from utils.attention.gluon.plan import (
    BLOCK_M,
    SECTION_BYTES,
    STEPS,
    block_head_dim,
    deal_tiles,
    plan_for,
    row_offset,
    tile_blocks,
    variant_for,
    whole_tiles,
)
from utils.attention.gluon.plan import VARIANTS as PLANS
from utils.files import ROOT
from utils.machine.device import offline_compile_support, triton_support

needs_triton = pytest.mark.skipif(not __import__("importlib").util.find_spec("triton"), reason=triton_support().reason)


@needs_triton
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "causal, window, return_lse", [(False, 0, False), (False, 0, True), (True, 0, True), (False, 40, True)]
)
def test_every_kernel_argument_is_given_once(monkeypatch, step, causal, window, return_lse):
    calls = []
    real = launch.kernel_of(step)
    module = launch.step_module(step)

    class Recorder:
        def __getitem__(self, grid):
            bind = inspect.signature(real.fn).bind
            return lambda *args, num_warps, **constants: calls.append((grid, bind(*args, **constants).arguments))

    monkeypatch.setattr(module, f"attention_step{step}", Recorder())
    monkeypatch.setattr(launch, "processors", lambda device: 132)
    q = torch.randn(2, 4, 300, 72, dtype=torch.bfloat16)
    if return_lse:  # rows of one head do not follow those of another
        q = torch.randn(2, 300, 4, 72, dtype=torch.bfloat16).transpose(1, 2)
    k, v = torch.randn(2, 2, 517, 72, dtype=torch.bfloat16), torch.randn(2, 2, 517, 72, dtype=torch.bfloat16)
    if window and step < 5:
        with pytest.raises(ValueError, match="step 5"):
            launch.run_step(q, k, v, causal, 0.1, window, return_lse, step)
        return
    launch.run_step(q, k, v, causal, 0.1, window, return_lse, step)
    ((grid, given),) = calls
    assert set(given) == set(inspect.signature(real.fn).parameters)
    joined = step == 5 and not causal and not window and not return_lse  # two heads that share keys are one
    assert given["sk"] == 517 and (given["sq"], given["group"], given["heads"]) == (
        (600, 1, 2) if joined else (300, 2, 4)
    )
    if step == 5:
        mask = "window" if window else "causal" if causal else ""
        assert given["CASE"].mask == mask and given["lse_wanted"] == return_lse
        assert given["PLAN"] == launch.plan_of(5, q.view(2, 2, 600, 72) if joined else q, k, causal, window > 0)
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
    rows = sq + row_offset(not window, sk - sq)
    bits = (len(blocks) - 1).bit_length()
    assert sorted(tiles) == [head << bits | m for head in range(heads) for m in range(math.ceil(rows / 128))]
    loads = [sum(blocks[tile % (1 << bits)] for tile in program) for program in dealt]
    assert max(loads) - sum(loads) / programs <= max(blocks)  # at most one tile more than the mean
    if len(tiles) > 1000:
        assert sum(loads) / programs / max(loads) > 0.97


@pytest.mark.parametrize("batch, length", [(16, 1024), (8, 2048)])
def test_sections_of_heads_follow_each_other_and_leave_no_program_behind(batch, length):
    """At head dimension 256 and sections of 16 MiB the busiest program has 3% more work than the mean."""
    blocks = tile_blocks(plan_for(5, 256), length, length, True, 0)
    head_bytes = length * 256 * 4
    dealt = deal_tiles(blocks, batch * 8, 1, head_bytes, 132)
    bits = (len(blocks) - 1).bit_length()
    loads = [sum(blocks[tile % (1 << bits)] + 2.5 for tile in program) for program in dealt]
    assert max(loads) < 1.035 * sum(loads) / 132
    heads, last = SECTION_BYTES // head_bytes, batch * 8 - 2 * (SECTION_BYTES // head_bytes)
    for program in dealt:
        sections = [min(tile >> bits, last) // heads for tile in program]
        assert sections == sorted(sections)


def test_tiles_without_number_are_dealt_in_turns_the_longest_first():
    dealt = deal_tiles([1, 2, 3], 40_000, 1, 1, 132)
    assert sorted(tile for tiles in dealt for tile in tiles) == [h << 2 | m for h in range(40_000) for m in range(3)]
    loads = [sum(tile % 4 + 1 for tile in tiles) for tiles in dealt]
    assert max(loads) - min(loads) <= 6 and all(tile % 4 == 2 for tiles in dealt for tile in tiles[:300])


@pytest.mark.parametrize("causal, window", [(True, 0), (True, 100), (False, 100), (False, 0)])
def test_blocks_of_tiles_are_those_that_their_rows_see(causal, window):
    """Counted key by key; a tile whose rows see no key has one block, which is masked completely."""
    for head_dim, variant in ((64, ""), (64, "few"), (128, ""), (256, "")):
        plan = plan_for(5, head_dim, variant)
        for sq, sk in itertools.product((1, 64, 100, 192, 321, 512, 640), repeat=2):
            first_row, expected = -row_offset(causal and not window, sk - sq), []
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
        for head_dim, variant in itertools.product((8, 64, 72, 128, 136, 256), PLANS):
            plan = plan_for(step, head_dim, variant)
            assert plan.block_d == block_head_dim(head_dim) >= head_dim
            slots = plan.stages + (max(3, plan.stages) if step == 5 else plan.stages)
            q_slots = 2 if step == 5 and plan.consumers * plan.block_d < 512 else 1
            assert 2 * plan.block_d * (plan.rows * q_slots + slots * plan.block_n) < 227 * 1024
    with pytest.raises(ValueError, match="steps 1 to 5"):
        plan_for(6, 64)


VARIANTS = [  # variant; head dimension, causal, window, queries, keys, heads. Times: of an H200, in us
    *[("", 64, True, 0, n, n, 32 * 16384 // n) for n in (2048, 4096, 8192, 16384)],
    ("few", 64, True, 0, 2944, 2944, 6),  # half as many tiles as programs, the longest twice as long: 54 (cuDNN 37)
    *[(v, 64, True, 0, n, n, h) for v, n, h in (("few", 1408, 32), ("", 2447, 16))],  # 0.96 of the other's time
    *[("narrow", 64, True, 0, n, n, h) for n, h in ((768, 672), (557, 64))],  # 0.92 and 0.89 of that of "few"
    *[("four", 64, True, 0, n, n, h) for n, h in ((512, 1024), (1024, 512))],  # 0.90 and 0.93
    ("few", 64, False, 0, 1024, 1024, 16),  # 16.5, with one consumer 20.4
    ("few", 64, False, 1024, 4096, 4096, 8),  # two rounds by either plan, so "few" has half as many rows
    ("", 64, False, 1024, 4096, 4096, 32),  # 12.5% more rows in all rounds, but a sixth less time for each row
    *[("few", 64, True, w, n, n, 16) for w, n in ((256, 4096), (1024, 3000))],  # 0.85 and 0.96 of the other's time
    ("", 64, True, 4096, 5248, 5248, 64),  # few masks
    ("", 128, True, 0, 1024, 1024, 128),
    ("one", 128, True, 0, 528, 528, 8),  # 12.4, the other plan 15.2
    ("one", 256, False, 256, 1024, 1024, 8),  # 17.2, 22.5
    ("one", 64, True, 0, 896, 896, 8),  # 12.8, 15.6
    ("one", 128, True, 0, 3968, 3968, 4),  # two tiles of 64 rows for most programs: 40, one of 128 rows 50
    ("", 128, True, 0, 1024, 4096, 16),  # no short tiles: all queries see most of the keys
    ("one", 128, False, 0, 1920, 1920, 2),
    *[("", d, False, 0, 1024, 1024, 128) for d in (128, 256)],
    ("three", 96, False, 0, 1228, 1228, 16),  # one round of 192 rows against two of 128
    ("", 96, False, 0, 4563, 4563, 32),  # 6 against 9
    ("one", 64, False, 0, 653, 653, 24),  # 16.7, tiles of 192 rows 19.1
    ("few", 64, False, 0, 1024, 1024, 128),  # 8 rounds of 128 rows against 6 of 192
    ("", 64, False, 0, 6528, 6528, 8),  # 4 against 3, of many blocks: 0.98
]


@pytest.mark.parametrize(("variant", "head_dim", "causal", "window", "sq", "sk", "heads"), VARIANTS)
def test_which_plan_is_taken(variant, head_dim, causal, window, sq, sk, heads):
    assert variant_for(head_dim, causal, window, sq, sk, heads, 132) == variant


@needs_triton
@pytest.mark.parametrize(("windows", "most"), [(0.0, 21), (0.25, 26)])
def test_a_hundred_shapes_compile_few_kernels(monkeypatch, windows, most):
    """Kernels are compiled for the dtype, the plan and the case, nothing else: not for whether the log-sum-exp is stored."""
    from utils.attention.gluon import step5_overlapped

    rng, kernels = random.Random(2026), set()
    monkeypatch.setattr(
        step5_overlapped,
        "attention_step5",
        {(n,): lambda *_, **given: kernels.add((given["PLAN"], given["CASE"])) for n in range(133)},
    )
    monkeypatch.setattr(launch, "processors", lambda device: 132)
    for i in range(100):
        s = round(math.exp(rng.uniform(math.log(400), math.log(16000))))
        s = max(512, s // 128 * 128) if rng.random() < 0.4 else s
        group, head_dim = rng.choice((1, 1, 4)), (64, 80, 96, 128, 256)[i % 5]
        kv_heads = rng.choice((2, 4, 8) if group == 4 else (4, 8, 16, 32))
        batch = max(1, min(rng.choice((1, 2, 4, 8)), 65536 // s))
        k = torch.empty(batch, kv_heads, s, head_dim, dtype=torch.bfloat16, device="meta")
        q = k.repeat(1, group, 1, 1)
        causal, window = rng.random() < 0.5, rng.choice((128, 512, 1024, 4096)) if rng.random() < windows else 0
        launch.run_step(q, k, k, causal, 0.1, min(window, s - 1), rng.random() < 0.5, 5)
    assert 16 < len(kernels) <= most


def test_the_plan_of_full_attention_is_the_faster_one():
    """Within 0.6% of the faster time in assets/results/h200/attention_tails.json, where "ahead" are the small tiles."""
    for row in read_record(ROOT / "assets/results/h200/attention_tails.json")["tails"]:
        chosen = variant_for(64, False, 0, row["sq"], row["sk"], row["batch"] * row["heads"], 132)
        us = row["us"]
        assert us[{"few": "ahead", "": "whole"}[chosen]] <= 1.006 * min(us["whole"], us["ahead"]), row


def test_inputs_that_tma_cannot_address_are_copied():
    x = torch.randn(2, 3, 50, 64, dtype=torch.bfloat16)
    rows_first = torch.randn(2, 50, 3, 64, dtype=torch.bfloat16).transpose(1, 2)
    for view in (x, rows_first, x[:, :, 3:40], x[:, 1:2]):
        assert launch.make_addressable(view) is view
    odd = torch.randn(2, 3, 50, 67, dtype=torch.bfloat16)[..., :64]
    turned, shared = x.transpose(2, 3).contiguous().transpose(2, 3), x[:, :1].expand(2, 3, 50, 64)
    shifted = torch.randn(2 * 3 * 50 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 3, 50, 64)
    for view in (odd, turned, shared, shifted):
        copy = launch.make_addressable(view)
        assert torch.equal(copy, view) and copy.data_ptr() % 16 == 0 and copy.is_contiguous()


def test_a_kept_launch_gets_copies_of_such_inputs(monkeypatch):
    made, again = [], lambda *tensors: made.append(tensors)
    monkeypatch.setattr(launch, "step_module", lambda step: types.SimpleNamespace(launch=lambda arguments: again))
    monkeypatch.setattr(launch, "empty", lambda forms, index: [torch.empty(shape) for shape, *_ in forms])
    monkeypatch.setattr(launch, "CALLS", {})
    monkeypatch.setattr(gluon, "CALLS", launch.CALLS)
    x = torch.randn(1, 2, 16, 64).bfloat16()
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    for q in (x, shifted):
        out, lse = launch.run_step(q, x, x, True, 0.1, 0, True, 5)
    ((q, k, *_),) = made  # of the second call: the first one went to `launch`
    assert q.data_ptr() % 16 == 0 and torch.equal(q, x) and k is x and (out.shape, lse.shape) == (x.shape, (1, 2, 16))
    assert gluon._again(x, x, x, make_problem(x, x, x, causal=True, scale=0.1, with_lse=True)) in launch.CALLS.values()
    with pytest.raises(ValueError, match="multiple of 8"):
        launch.run_step(*[x[..., :60].contiguous()] * 3, True, 0.1, 0, True, 5)


@pytest.mark.parametrize("head_dim, variant", [(64, ""), (64, "few"), (128, ""), (256, "")])
def test_causal_rows_need_a_mask_in_their_last_block_alone(head_dim, variant):
    """The walk begins with the last block: in all other blocks every row sees every key."""
    plan, offsets = plan_for(5, head_dim, variant), set()
    for sq, sk in itertools.product((1, 64, 100, 192, 321, 512, 640), repeat=2):
        offset = row_offset(True, sk - sq)
        assert 0 <= offset < BLOCK_M
        offsets.add(offset)
        for row in range(-offset, sq, BLOCK_M):
            last = min(-(-sk // plan.block_n), -(-max(row + BLOCK_M + sk - sq, 0) // plan.block_n))
            behind = max(last - 1, 0) * plan.block_n
            assert not behind or max(row, 0) + sk - sq >= behind - 1, (sq, sk)
    assert len(offsets) > 2
    assert row_offset(False, 1) == 0


def compare_simulated(monkeypatch, q, k, v, plan, programs, *, causal=False, window=0, lse=True, seed=None, runs=1):
    """Run step 5 in the simulator on so many multiprocessors, and compare it with float64."""
    from utils import gluon_cpu
    from utils.attention.reference import reference

    monkeypatch.setattr(launch, "processors", lambda device: programs)
    monkeypatch.setattr(launch, "plan_of", lambda *given: plan)
    for _ in range(runs):
        with gluon_cpu.simulate(seed=seed) as run:
            found = launch.run_step(q, k, v, causal, q.shape[-1] ** -0.5, window, lse, 5)
        assert run.ok
    expected, expected_lse = reference(q, k, v, causal=causal, window=window or None)
    what = str((q.shape, k.shape, q.dtype, plan, programs, causal, window, lse))
    out, sums = found if lse else (found, None)
    assert (out.double() - expected).norm() <= 6e-3 * expected.norm(), what
    if lse:
        torch.testing.assert_close(sums.double(), expected_lse.double(), atol=2e-3, rtol=0, msg=what)


@pytest.mark.usefixtures("unwritten_is_nan")
@needs_triton
@pytest.mark.parametrize(
    ("head_dim", "heads", "sq", "programs"), [(128, 3, 300, 8), (256, 1, 100, 7), (64, 2, 500, 5), (96, 2, 190, 3)]
)
@pytest.mark.skipif(not offline_compile_support(), reason=offline_compile_support().reason)
def test_tiles_of_a_short_last_round_are_shared(monkeypatch, head_dim, heads, sq, programs):
    """Of 9, 1, 6 and 4 tiles, the last one is computed in parts of 64 rows, some behind the last query; the first block masks a tail."""
    torch.manual_seed(0)
    plan = plan_for(5, head_dim)
    tiles = math.ceil(sq / plan.rows) * heads
    assert whole_tiles(tiles, plan.consumers, programs) == tiles - 1
    q = torch.randn(1, heads, sq, head_dim, dtype=torch.bfloat16)
    k, v = (torch.randn(1, heads, 333, head_dim, dtype=torch.bfloat16) for _ in range(2))
    compare_simulated(monkeypatch, q, k, v, plan, programs)


def test_only_a_short_last_round_is_shared():
    assert [whole_tiles(n, 2, 132) for n in (66, 67, 132, 198, 199, 300)] == [0, 67, 132, 132, 199, 264]
    assert [whole_tiles(n, consumers, 132) for n, consumers in ((176, 3), (177, 3), (100, 1))] == [132, 177, 0]


@needs_triton
@pytest.mark.parametrize("capturing", [False, True])
def test_a_captured_graph_keeps_its_schedule(monkeypatch, capturing):
    """A graph only has the schedule's address: after 64 other shapes it once read its tiles from freed memory."""
    from utils.attention.gluon import step5_overlapped

    monkeypatch.setattr(step5_overlapped, "_graph_schedules", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    schedule = torch.zeros(4, dtype=torch.int32)
    alive, ran = weakref.ref(schedule), []
    kept = step5_overlapped.make_launcher(lambda *tensors: ran.append(len(tensors)), schedule)
    kept(*[torch.zeros(1)] * 5)
    del kept, schedule  # as when newer launches and schedules have taken their places
    assert ran == [6] and (alive() is not None) == capturing


@pytest.mark.usefixtures("unwritten_is_nan")
@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.skipif(not offline_compile_support(), reason=offline_compile_support().reason)
def test_random_problems_on_random_machines(monkeypatch, seed):
    """Few multiprocessors, so that programs walk over several tiles, or many, so that each has one, in any order of the roles."""
    rng = random.Random(seed)
    for _ in range(10):
        torch.manual_seed(seed)
        head_dim, causal, many = rng.choice((24, 64, 128, 136, 256)), rng.random() < 0.6, rng.random() < 0.5
        sq, sk, group = rng.randint(1, 257), rng.randint(1, 900 if many else 400), rng.choice((1, 2))
        window = rng.choice((0, 0, 1, 65, rng.randint(1, 400)))
        programs = rng.choice((24, 78) if many else (1, 2, 3, 7))
        dtype, lse = rng.choice((torch.bfloat16, torch.float16)), rng.random() < 0.5
        q = torch.randn(1, sq, group, head_dim, dtype=dtype).transpose(1, 2)
        k, v = (torch.randn(1, 1, sk, head_dim, dtype=dtype) for _ in range(2))
        plan = plan_for(5, head_dim, variant_for(head_dim, causal, window, sq, sk, group, programs))
        order = rng.choice((None, seed))
        compare_simulated(monkeypatch, q, k, v, plan, programs, causal=causal, window=window, lse=lse, seed=order)


@needs_triton
@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False)])
def test_few_tiles_over_many_keys_go_to_the_decode_kernel(monkeypatch, head_dim, causal):
    from utils import gluon_cpu
    from utils.attention import make_problem
    from utils.attention.backends.gluon import decodes
    from utils.attention.gluon.decode import launch as decode_launch
    from utils.attention.gluon.decode.plan import arrange
    from utils.attention.reference import reference

    torch.manual_seed(0)
    q = torch.randn(1, 2, 130, head_dim, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1, 540, head_dim, dtype=torch.bfloat16) for _ in range(2))
    assert decodes(make_problem(q, k, v, causal=causal))
    assert not decodes(make_problem(q, k[:, :, :500], v[:, :, :500], causal=causal))
    assert not decodes(make_problem(q.expand(23, 2, 130, head_dim), *(x.expand(23, 1, 540, head_dim) for x in (k, v))))
    monkeypatch.setattr(decode_launch, "arrange", lambda shape, _: arrange(shape, 7))
    with gluon_cpu.simulate() as run:
        out = decode_launch.Launch(q, k, v, causal, 0.1, 0, False, None)(q, k, v, None, None, None)
    expected = reference(q, k, v, causal=causal, scale=0.1)[0]
    assert run.ok and (out.double() - expected).norm() <= 6e-3 * expected.norm()
