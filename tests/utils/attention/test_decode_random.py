"""Decode in the simulator at problems drawn at random, on made-up GPUs so small that programs share heads and walk over several."""

import random

import pytest
import torch

from utils.attention import decode_reference
from utils.attention.gluon.decode import launch as decode_launch
from utils.attention.gluon.decode.plan import PAGES, refuse

GARBAGE = torch.tensor([-7, 10**6, 2**31 - 1, -(2**31), 0, 1], dtype=torch.int32)  # behind a sequence's last page


def draw_cache(rng, batch, kv_heads, slots, head_dim, dtype, page, lengths):
    """Draw keys, values and a block table; what lies behind a sequence's end is nan, and its table's entries are garbage."""
    keep = (torch.arange(slots) < lengths[:, None])[:, None, :, None]
    k, v = (torch.where(keep, torch.randn(batch, kv_heads, slots, head_dim), torch.nan) for _ in "kv")
    table = None
    if page:
        each = -(-slots // page) + rng.choice((0, 0, 1))
        order = torch.randperm(batch * each + 3)[: batch * each]

        def in_pages(x):
            x = torch.nn.functional.pad(x, (0, 0, 0, each * page - slots), value=torch.nan)
            pages = torch.full((batch * each + 3, kv_heads, page, head_dim), torch.nan)
            pages[order] = x.view(batch, kv_heads, each, page, head_dim).transpose(1, 2).flatten(0, 1)
            return pages

        k, v = in_pages(k), in_pages(v)
        table = torch.full((batch, each + 2), 2**31 - 1, dtype=torch.int32)[
            :, :each
        ]  # rows are farther apart than long
        table.copy_(order.view(batch, each))
        behind = torch.arange(each) * page >= lengths[:, None]
        table[behind] = GARBAGE[torch.randint(0, len(GARBAGE), (int(behind.sum()),))]
    if rng.random() < 0.4:  # tokens first
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    return k.to(dtype), v.to(dtype), table


def draw(rng):
    """Draw sizes that the kernel takes: a few hundred keys, and groups, tokens and pages of all kinds."""
    while True:
        group, sq = rng.choice((1, 2, 3, 4, 5, 8, 16, 24)), rng.choice((1, 1, 1, 2, 3, 5, 8, 11, 16, 33))
        kv_heads = rng.choice((1, 2, 3)) if group < 8 else 1
        head_dim = rng.choice((64, 64, 64, 128, 128, 256, 72, 80, 40))
        slots = rng.choice((16, 40, 64, 65, 128, 129, 200, 257, 400))
        batch = rng.choice((1, 2, 3, 5)) if kv_heads * slots < 500 else 1
        page, fp8 = rng.choice((None, None, None, *PAGES)), rng.random() < 0.25
        if group * sq <= 130 and not refuse(group, sq, batch, page, head_dim, fp8):
            return batch, kv_heads, group, sq, slots, head_dim, page, fp8


def check(seed, monkeypatch):
    from utils import gluon_cpu

    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, kv_heads, group, sq, slots, head_dim, page, fp8 = draw(rng)
    window, causal = rng.choice((0, 0, 1, 17, 64, 100, 300, 2**31 - 1)), rng.random() < 0.7
    arrange, multiprocessors = decode_launch.arrange, rng.choice((1, 2, 3, 5, 11))

    def on_small_gpu(*sizes, **choices):
        found = arrange(*sizes[:6], multiprocessors, **choices)
        waits = found.plan.merge == "together"  # in the simulator programs cannot wait for each other
        return arrange(*sizes[:6], multiprocessors, **choices, merge="last") if waits else found

    lengths = None
    if page or sq > slots or rng.random() < 0.5:
        most = rng.choice((slots, slots, slots // 2, 0))
        lengths = torch.tensor([rng.choice((0, most, rng.randint(0, most))) for _ in range(batch)], dtype=torch.int32)
    dtype = rng.choice((torch.bfloat16, torch.float16))
    filled = torch.full((batch,), slots) if lengths is None else lengths
    of_cache = torch.float8_e4m3fn if fp8 else dtype
    k, v, table = draw_cache(rng, batch, kv_heads, slots, head_dim, of_cache, page, filled)
    q = torch.randn(batch, sq, group * kv_heads, head_dim).to(dtype).transpose(1, 2)
    q = q.contiguous() if rng.random() < 0.6 else q
    scales = torch.rand(2, kv_heads) + 0.5 if fp8 else None
    with monkeypatch.context() as patched:
        patched.setattr(decode_launch, "arrange", on_small_gpu)
        launch = decode_launch.Launch(q, k, v, causal, window, lengths is not None, table, fp8=fp8)
    with gluon_cpu.simulate(seed=rng.choice((None, seed))):
        out = launch(q, k, v, 0.1, lengths, table, scales)
        again = launch(q, k, v, 0.1, lengths, table, scales) if launch.counters else out  # counters are left at zero
    more = {"kv_scales": scales, "scale": 0.1, "causal": causal, "window": window or None}
    expected = decode_reference(q, k, v, seqlens=lengths, block_table=table, **more)
    rows = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-2)
    assert rows.max() < 2.5e-2, (seed, launch.plan)
    assert torch.equal(out, again)
    return launch.plan.merge, launch.plan.consumers > 0, fp8, page is not None


def test_random_problems_in_the_simulator(monkeypatch):
    pytest.importorskip("triton", reason="the simulator needs Triton for the language")
    seen = {check(seed, monkeypatch) for seed in range(8)}
    assert len(seen) > 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400, 30))
def test_many_random_problems_in_the_simulator(monkeypatch, seed):
    pytest.importorskip("triton", reason="the simulator needs Triton for the language")
    for each in range(seed, seed + 30):
        check(each, monkeypatch)
