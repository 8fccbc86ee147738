"""The variants of the decode kernel that are measured: each has a tile that fits, and none is measured twice."""

import itertools
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tools.record.common import read_record
from tools.record.decode import CACHES, NEW_TOKENS
from tools.record.decode_right import verdict
from tools.record.decode_shared import differences
from tools.record.decode_variants import BETWEEN, arrangement, describe, points_of_default, variants, variants_between
from tools.record.turns import Turns
from utils.attention.gluon.decode.arrangement import arrange
from utils.attention.gluon.decode.plan import SHARED_BYTES

ROOT = Path(__file__).resolve().parents[2]
KEPT_OF_SIXTH = {(1, 32768, 16)}  # sequences, keys, new tokens: `decode_again` and `decode_bound` have the other twelve


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_variants_differ_and_fit(cache):
    for new_tokens in NEW_TOKENS:
        point = (*cache, new_tokens)
        found = variants(point)
        assert "default" in found and len(found) >= 2
        for choices in found.values():
            plan = arrangement(point, choices).plan
            assert plan.shared_bytes + 700 < SHARED_BYTES
            assert plan.slots >= (2 if plan.cluster else 4)  # a program of a cluster may have a single block
            if plan.consumers:
                # All query rows of a head of keys in one tile: otherwise the cache would be read once for each tile.
                assert plan.columns >= cache[1] // cache[2] * new_tokens
        assert len({arrangement(point, choices) for choices in found.values()}) == len(found)


def test_sizes_between_the_points_have_each_kernel_once():
    assert not set(BETWEEN) & {(*cache, new) for cache in CACHES for new in NEW_TOKENS}
    for point in BETWEEN:
        found = variants_between(point)
        plans = [arrangement(point, choices).plan for choices in found.values()]
        assert {bool(plan.cluster) for plan in plans} == {False, True}
        assert len({arrangement(point, choices) for choices in found.values()}) == len(found)


@pytest.mark.parametrize(
    ("second", "right", "same"),
    [([1.0, 2.0], True, True), ([1.0, 2.001], False, False), ([1.0, float("nan")], False, False)],
    ids=["the same", "other bits", "nan in the second call"],
)
def test_a_random_case_is_right_if_both_calls_are(second, right, same):
    outputs = [torch.tensor([1.0, 2.0]), torch.tensor(second)]
    found = verdict(lambda: outputs.pop(0), torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert (found["right"], found["same_bits"], found["errors"][0]) == (right, same, 0)


def test_results_that_are_not_the_same_are_described():
    right = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    assert differences(right.clone(), right) is None
    out = torch.tensor([[1.0, float("nan")], [3.0, 4.5]], dtype=torch.bfloat16)
    found = differences(out, right)
    assert (found["numbers"], found["nan"]) == (2, 1)
    assert found["places"][0][:2] == [0, 1] and found["places"][1] == [1, 1, 4.5, 4.0]


def old_order(point):
    """How a point is computed now, but for the order of its blocks, which has been measured by `decode_again` alone."""
    now = arrangement(tuple(point), {})
    return describe(replace(now, plan=replace(now.plan, backward=False, k_first=False, prefill=0)))


def four_tiles(point):
    """Whether eight sequences' clusters of two have four tiles of 128 keys at a point now, and were faster so than with six on an H100."""
    plan = arrangement(tuple(point), {}).plan
    if (plan.cluster, plan.block_n, plan.slots) != (2, 128, 4):
        return False
    rows = [r for r in read_record(ROOT / "assets/results/h100/decode_divide.json")["rows"] if r["table"] == "slots"]
    near = [r for r in rows if (r["point"][0], r["point"][-1]) == (point[0], point[-1]) or r["point"][3] == point[3]]
    assert near and all(row["us"]["default"] <= row["us"]["6 slots"] for row in near)
    return True


def measured_since(point):
    """Whether what is the default at a point now was measured by `decode_again`, or with shorter rings on an H100, and nearly the best there."""
    if four_tiles(point):
        return True
    now = describe(arrangement(tuple(point), {}))
    for row in read_record(ROOT / "assets/results/h200/decode_again.json")["rows"]:
        if row["point"] == list(point) and now in row["own"].values():
            us = {name: row["cold"]["us"][name] for name in row["own"]}
            (name,) = [name for name, what in row["own"].items() if what == now]
            assert us[name] <= 1.01 * min(us.values()), point
            return True
    for record in ("decode_bound", "decode_bound_between", "decode_clusters"):
        for row in read_record(ROOT / f"assets/results/h100/{record}.json")["rows"]:
            if row["table"] in ("bound", "rings") and row["point"] == list(point):
                names = [name for name, what in row["own"].items() if what == now]
                if names:
                    assert row["us"][names[0]] <= 1.01 * min(row["us"][name] for name in row["own"]), point
                    return True
    return False


def test_the_default_is_nearly_the_best_that_was_measured_at_every_point():
    record = read_record(ROOT / "assets/results/h200/decode_variants_sixth.json")
    measured = {tuple(row["point"]): row for row in record["rows"]}
    points = [row for row in record["rows"] if isinstance(row["point"][0], int)]
    assert len(points) == 13
    kept = [row for row in points if not measured_since(row["point"])]
    rows = points_of_default({**record, "rows": kept})["rows"]
    assert {(row["batch"], row["keys"], row["new_tokens"]) for row in rows} == KEPT_OF_SIXTH
    for row in rows:
        point = tuple(row[name] for name in ("batch", "heads", "kv_heads", "keys", "head_dim", "new_tokens"))
        assert row["us"]["gluon"] <= 1.02 * measured[point]["us"][measured[point]["best"]], point
    table = read_record(ROOT / "assets/results/h200/decode.json")["rows"]
    assert len(table) == len(CACHES) * len(NEW_TOKENS)
    assert not any("arrangement" in row for row in table)  # one run of all libraries, nothing taken from another


def test_a_later_row_takes_a_place_in_the_table_only_with_the_library_that_was_the_best_other():
    record = read_record(ROOT / "assets/results/h200/decode_variants_sixth.json")
    point = dict(batch=1, heads=4, kv_heads=1, keys=32768, head_dim=256, new_tokens=16)
    before = [point | {"best_other": name} for name in ("cudnn", "fa3")]
    rows = [row for row in record["rows"] if row["point"] == [1, 4, 1, 32768, 256, 16]]
    kept = points_of_default({**record, "rows": rows}, {"rows": before})["rows"]
    assert kept[0] is before[0] and kept[1]["us"]["gluon"] > 0  # FlashAttention 3 was there, cuDNN was not


def test_the_default_was_nearly_the_best_of_all_variants_in_the_run_that_had_them():
    record = read_record(ROOT / "assets/results/h200/decode_variants_fourth.json")
    again = read_record(ROOT / "assets/results/h200/decode_variants_sixth.json")["rows"]
    assert len(record["rows"]) == len(CACHES) * len(NEW_TOKENS)
    unchanged = 0
    for row in record["rows"]:
        now = old_order(row["point"])
        measured = [row["us"][name] for name, what in row["own"].items() if what == now]
        if measured:
            assert measured[0] <= 1.02 * row["us"][row["best"]], row["point"]
            unchanged += 1
        else:  # another default since, which was measured too
            assert row["point"] in [later["point"] for later in again] or measured_since(row["point"])
    assert unchanged == 13  # nine more have shorter rings since (entries 46, 48 and 57)


def test_between_the_points_the_rule_takes_nearly_the_best():
    record = read_record(ROOT / "assets/results/h200/decode_between.json")
    assert [tuple(row["point"]) for row in record["rows"]] == list(BETWEEN)
    for row in record["rows"]:
        now = old_order(row["point"])
        if four_tiles(row["point"]):
            now = now.replace("4 slots", "6 slots")  # as it was in that run
        (measured,) = [row["us"][name] for name, what in row["own"].items() if what == now]
        assert measured <= 1.03 * row["us"][row["best"]], row["point"]


@pytest.mark.parametrize(
    ("sizes", "options", "consumers", "merge", "programs"),
    [
        ((1, 8, 4, 7, 3000, 128), {}, 0, "cluster", 64),  # 28 rows; 24 blocks, three for each of eight programs
        ((1, 8, 4, 9, 3000, 128), {}, 1, "cluster", 64),
        ((1, 8, 4, 7, 6000, 128), {}, 0, "together", 132),  # 47 blocks are not divided by 16 programs
        ((1, 8, 4, 9, 6000, 128), {}, 1, "together", 132),
        ((2, 8, 4, 1, 16384, 128), {}, 0, "cluster", 64),
        ((3, 8, 4, 1, 16384, 128), {}, 0, "second", 132),
        ((2, 8, 8, 16, 16384, 128), {}, 2, "together", 128),  # 8 programs a head, 16 blocks each
        ((2, 8, 8, 16, 16384, 128), {"lengths": True}, 2, "second", 132),
        ((1, 8, 4, 1, 16384, 128), {"lengths": True, "page": 64}, 0, "cluster", 64),
        ((2, 8, 4, 1, 16384, 128), {"lengths": True, "page": 64}, 0, "cluster", 128),
        ((9, 8, 4, 1, 16384, 128), {"lengths": True, "page": 64}, 1, "second", 132),
        ((9, 8, 4, 1, 16384, 128), {"lengths": True, "page": 128}, 0, "second", 132),
        ((1, 1, 4, 16, 32768, 256), {}, 1, "second", 132),  # 132 parts
    ],
    ids=str,
)
def test_sizes_between_the_measured_ones_follow_the_same_rules(sizes, options, consumers, merge, programs):
    found = arrange(*sizes, 132, **options)
    assert (found.plan.consumers, found.plan.merge, found.programs) == (consumers, merge, programs)


def _take_turns(folder, part, times):
    turns = Turns(folder, 3, 5)
    time.sleep(0.05 * part)
    times.put(("ready", time.monotonic()))
    assert turns.wait_for_all(str(part))
    for _ in range(2):
        with turns.alone():
            began = time.monotonic()
            time.sleep(0.02)
            times.put((began, time.monotonic()))


def test_processes_time_in_turns_once_all_are_ready(tmp_path):
    context = multiprocessing.get_context("fork")
    times = context.Queue()
    processes = [context.Process(target=_take_turns, args=(tmp_path, part, times)) for part in range(3)]
    for process in processes:
        process.start()
    said = [times.get(timeout=20) for _ in range(9)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    turns = sorted(entry for entry in said if entry[0] != "ready")
    assert turns[0][0] >= max(at for word, at in said if word == "ready")
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(turns))


def test_a_process_that_never_comes_is_not_waited_for_for_ever(tmp_path):
    assert not Turns(tmp_path, 2, 0.0, patience=0.1).wait_for_all("0")
