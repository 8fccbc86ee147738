"""Who computes what in decode: for random sizes, the kernels' own code says which program takes which blocks of keys."""

import itertools
import random

import pytest
import torch

from tests.utils.kernel_code import Number, Pointer, kernel_code
from utils.attention.gluon.decode import launch as decode_launch
from utils.attention.gluon.decode.arrangement import arrange, most_parts
from utils.attention.gluon.decode.plan import PAGES, SHARED_BYTES, Case, power_of_two, refuse

CODE = kernel_code("utils/attention/gluon/decode/work.py", "@aggregate\nclass Cache")


def draw(rng):
    """Sizes of a call and lengths (None: all as long as the cache) that the kernel does not refuse."""
    while True:
        page = rng.choice((None, None, *PAGES))
        found = {
            "batch": rng.choice((1, 1, 2, 3, 5, 8, 17, 64, 300)),
            "kv_heads": rng.choice((1, 2, 3, 5, 8, 16)),
            "group": rng.choice((1, 2, 3, 4, 5, 7, 8, 16, 33, 64, 128)),
            "sq": rng.choice((1, 1, 2, 3, 7, 8, 16, 31, 33, 64)),
            "keys": int(2 ** rng.uniform(0, 17.6)),
            "head_dim": rng.choice((64, 80, 128, 128, 256)),
            "multiprocessors": rng.choice((132, 132, 114, 144, 3)),
        }
        options = {
            "page": page,
            "window": rng.choice((0, 0, 1, int(2 ** rng.uniform(0, 18)))),
            "fp8": rng.random() < 0.2,
        }
        found["keys"] = -(-found["keys"] // page) * page if page else found["keys"]
        few = found["batch"] * found["kv_heads"] * found["sq"] <= 2000
        if few and not refuse(found["group"], found["sq"], found["batch"], page, found["head_dim"], options["fp8"]):
            break
    lengths = None
    if page or rng.random() < 0.5:
        most = rng.choice((found["keys"], found["keys"], 0, 1, min(found["keys"], 300)))
        lengths = [rng.choice((0, most, rng.randint(0, most))) for _ in range(found["batch"])]
        lengths = [most] * found["batch"] if rng.random() < 0.2 else lengths
    return found, options | {"lengths": lengths is not None}, lengths


def pieces(cache, split, program):
    """What the kernels' loop over heads does: sequence, head, first block in it, blocks, part (None: the whole head)."""
    begin, end = split.begin(program), split.begin(program + 1)
    cursor, unit = cache.locate(begin), begin
    while unit < end:
        n = min(cursor.blocks - cursor.j, end - unit)
        part = None if n == cursor.blocks else 2 * program + int(split.owner(unit - cursor.j) == program)
        yield int(cursor.b), int(cursor.head), int(cursor.j), int(n), part, cursor
        unit += n
        cursor = cache.advance(cursor.at_last())


def check(rng):
    sizes, options, lengths = draw(rng)
    found = arrange(**sizes, **options)
    plan, sq, window, keys = found.plan, sizes["sq"], options["window"], sizes["keys"]
    assert plan.shared_bytes + plan.inbox_space * (plan.cluster > 0) < SHARED_BYTES // plan.per_sm
    if plan.cluster:  # a program of a cluster has one head's blocks: a run of them, or every so many-th one
        blocks, step = -(-keys // plan.block_n), plan.cluster
        assert plan.in_turn == (lengths is not None) and blocks >= step
        split = CODE.Split(Number(blocks // step), Number(blocks % step), Number(step), Number(1))
        starts = [split.begin(Number(i)) for i in range(step + 1)]
        taken = [j for a, b in itertools.pairwise(starts) for j in range(a, b)]
        if plan.in_turn:
            taken = [j for part in range(step) for j in range(part, blocks, step)]
        assert sorted(taken) == list(range(blocks))
        return "cluster"
    case = Case(sq > 1, window > 0, lengths is not None, power_of_two(sizes["batch"]), False, found.aligned)
    heads = sizes["kv_heads"] * found.tiles
    numbers = (sizes["batch"], heads, sq, keys, window)
    cache = CODE.Cache(Pointer(lengths or [0]), None, 0, *map(Number, numbers), Number(0), plan, case)
    CODE.gl.programs = found.programs
    alone = found.programs == sizes["batch"] * heads  # a program for each head: nobody waits for another
    assert (
        alone or found.programs <= sizes["multiprocessors"] * plan.per_sm
    )  # all run at once: those of a head may wait
    split = cache.split()
    assert split.programs <= found.programs
    done, parts = {}, {}
    for program in range(split.programs):
        assert split.begin(Number(program)) < split.begin(Number(program + 1))
        for b, head, j, n, part, cursor in pieces(cache, split, Number(program)):
            assert 0 <= b < sizes["batch"] and 0 <= head < heads
            done.setdefault((b, head), []).append((j, n))
            if part is not None:
                assert part < 2 * found.programs and part not in parts and not found.aligned
                parts[part] = b, head, program
            # The blocks hold all keys that some new token of the sequence sees: from the first one's window on.
            length = keys if lengths is None else lengths[b]
            last = (cursor.first + cursor.blocks) * plan.block_n
            assert last >= length and cursor.first * plan.block_n <= max(length - sq - window + 1, 0) * (window > 0)
    merged = 0
    for flat in range(sizes["batch"] * heads):
        b, head = divmod(flat, heads)
        begin, blocks = cache.place(Number(flat))
        at = 0
        for j, n in done.pop((b, head)):  # in the order of programs: disjoint, and without a hole
            assert j == at and n > 0
            at += n
        assert at == blocks
        first = split.owner(begin)
        count = split.owner(begin + blocks - 1) - first + 1
        if count > 1:
            merged += count
            if lengths is None:
                assert count <= most_parts(found.heads, blocks, found.programs)
            for i in range(count):
                assert parts[2 * (first + i) + (i == 0)] == (b, head, first + i)
    assert not done and merged == len(parts)
    return "lengths" if lengths else "aligned" if found.aligned else "split"


def test_each_block_of_each_head_is_computed_once_and_each_part_merged():
    rng = random.Random(1)
    assert {check(rng) for _ in range(25)} >= {"lengths", "split", "aligned"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_each_block_of_many_more_sizes_is_computed_once(seed):
    rng = random.Random(1000 + seed)
    for _ in range(150):
        check(rng)


def test_a_launch_has_room_for_all_parts():
    q, k = torch.zeros(3, 8, 2, 64).bfloat16(), torch.zeros(3, 2, 900, 64).bfloat16()
    launch = decode_launch.Launch(q, k, k, True, 0, True, None, programs=7)
    assert launch.parts == 2 * 7 * launch.plan.columns * (64 + 2)
