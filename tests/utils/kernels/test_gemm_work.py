"""Who computes what in a GEMM: for random sizes, the kernel's own code says which block takes which tile, or part of one."""

import itertools
import random
from dataclasses import replace

import pytest

from tests.utils.kernel_code import Number, kernel_code
from utils.kernels import gemm_fp8_plan, gemm_plan
from utils.kernels.gemm_candidates import candidates
from utils.kernels.gemm_choose import choose
from utils.kernels.gemm_plan import parts_of

RANK = [0]  # of the block in its cluster
CODE = kernel_code(
    "utils/kernels/gemm_work.py", "@aggregate\nclass Work", "@gluon.jit\ndef producer", rank=lambda cluster=2: RANK[0]
)
SHARED_BYTES = 232_448


def size(rng):
    return rng.choice(
        (1, 7, 8, 64, 65, 128, 136, 192, 256, 1000, int(2 ** rng.uniform(0, 14.3)), rng.randint(1, 20_000))
    )


def configurations(rng, m, n, k, sms):
    """All configurations that could do a product, of both kernels."""
    late = rng.choice(((0, 0), (1, 0), (1, 2), (2, 1)))
    if m % 2 or n % 8:
        late = (2 * (late[0] > 0), late[1])
    found = candidates(m, n, k, sms, late, n % 8 == 0)
    fast = rng.random() < 0.5
    of_fp8 = gemm_fp8_plan.candidates(m, n, k, sms, fast, (int(late[0] == 1), late[1]))
    return found, of_fp8, late, fast


def check(m, n, k, config, sms):
    """One product by one configuration: every tile once, whole or in its parts, and every part of K once."""
    whole, rest = parts_of(m, n, config, sms)
    config = config if rest or config.in_cluster else replace(config, split=1)  # as the launch does
    clusters = whole if config.in_cluster else min(sms // config.cluster, whole + rest * config.split)
    CODE.gl.programs = clusters * config.cluster
    sizes = [Number(x) for x in (m, n, k, whole)]
    work = CODE.Work(None, None, None, None, None, *sizes, config, False, False)
    assert work.items() == whole + rest * config.split
    steps = -(-(k + config.shift * config.pairs) // config.block_k)
    tiles, own_parts = {}, set()
    for program in range(CODE.gl.programs):
        CODE.gl.program, RANK[0] = program, program % config.cluster
        for item in range(work.first_item(), work.items(), work.stride()):
            item = Number(item)
            tile, first, last = work.locate(item)
            place = tuple(map(int, work.origin(tile)))
            tiles.setdefault(place, []).append((int(first), int(last)))
            assert first < last  # a part without a step would release a slot that nobody filled
            part = work.part(item)
            if part >= 0 and config.split > 1:
                own = int(work.own_part(part))
                assert own not in own_parts
                own_parts.add(own)
    assert own_parts == set(range(rest * config.cluster * config.split if config.split > 1 else 0))
    rows = -(-(m // 2 if config.pairs else m) // config.cluster_tile[0]) * config.cluster_tile[0]
    columns = -(-n // config.cluster_tile[1]) * config.cluster_tile[1]
    places = {
        (row, column, parity)
        for row in range(0, rows, config.block_m)
        for column in range(0, columns, config.block_n)
        for parity in range(1 + config.pairs)
    }
    assert set(tiles) == places  # and so C is covered, since tiles lie side by side
    for parts in tiles.values():
        parts.sort()
        assert parts[0][0] == 0 and parts[-1][1] == steps
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
        assert len(parts) in (1, config.split)


def check_some(rng, most_tiles):
    sms = rng.choice((132, 132, 114, 144, 5))
    m, n, k = size(rng), size(rng), size(rng)
    found, of_fp8, late, fast = configurations(rng, m, n, k, sms)
    seen = set()
    for chosen in (choose(m, n, k, sms, late, n % 8 == 0), gemm_fp8_plan.choose(m, n, k, sms, fast, late)):
        whole, rest = parts_of(*((n, m) if chosen.transposed else (m, n)), chosen, sms)
        # What is chosen fits, and its parts take no more than their share of memory.
        assert chosen.shared_bytes <= SHARED_BYTES and whole + rest * chosen.split < 2**31
        assert 4 * rest * chosen.cluster * chosen.split * chosen.block_m * chosen.block_n < 2**30
    for config in [*rng.sample(found, 3), *rng.sample(of_fp8, 2)]:
        assert config.shared_bytes <= SHARED_BYTES
        sizes = (n, m) if config.transposed else (m, n)
        if config.short or sum(parts_of(*sizes, config, sms)) > most_tiles:
            continue  # the short kernel has one block a tile or part
        check(*sizes, k, config, sms)
        seen.add((config.pairs, config.multicast, config.split > 1))
    return seen


def test_each_tile_is_computed_once_whole_or_in_parts():
    rng = random.Random(2)
    seen = set().union(*(check_some(rng, 600) for _ in range(60)))
    assert {(False, "", True), (False, "A", False), (False, "B", True)} <= seen
    assert any(pairs for pairs, _, _ in seen)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_each_tile_of_many_more_sizes_is_computed_once(seed):
    rng = random.Random(2000 + seed)
    for _ in range(400):
        check_some(rng, 6000)


def test_a_configuration_is_never_cut_finer_than_two_steps():
    rng = random.Random(3)
    for _ in range(200):
        m, n, k = size(rng), size(rng), size(rng)
        for config in candidates(m, n, k, 132, (1, 0) if m % 2 == n % 8 == 0 else (0, 0)):
            assert config.split == 1 or 2 * config.split <= -(-k // config.block_k)
            assert config.split <= (gemm_plan.MOST_IN_CLUSTER if config.in_cluster else gemm_plan.most_parts(config))


def test_a_tile_s_parts_in_a_cluster_are_all_of_its_steps():
    rng, count = random.Random(9), 0
    while count < 60:
        sms = rng.choice((132, 114, 20))
        m, n, k = size(rng), size(rng), size(rng)
        found = [x for x in candidates(m, n, k, sms) if x.in_cluster and not x.transposed]
        if not found:
            continue
        count += 1
        config = rng.choice(found)
        assert config.shared_bytes <= gemm_plan.SHARED_BYTES and config.split <= gemm_plan.MOST_IN_CLUSTER
        tiles, rest = parts_of(m, n, config, sms)
        assert rest == 0 and tiles <= gemm_plan.clusters_at_once(config.split, sms)
        CODE.gl.programs = tiles * config.split
        work = CODE.Work(None, None, None, None, None, *[Number(x) for x in (m, n, k, tiles)], config, False, False)
        steps, parts = int(work.steps()), {}
        for program in range(CODE.gl.programs):
            CODE.gl.program, RANK[0] = program, program % config.split
            for item in range(work.first_item(), work.items(), work.stride()):
                tile, first, last = map(int, work.locate(Number(item)))
                assert first < last  # a part without a step would release a slot that nobody filled
                parts.setdefault(tile, []).append((first, last))
        assert set(parts) == set(range(tiles))
        for found_parts in parts.values():
            assert len(found_parts) == config.split and found_parts[0][0] == 0 and found_parts[-1][1] == steps
            assert all(a[1] == b[0] for a, b in itertools.pairwise(found_parts))
