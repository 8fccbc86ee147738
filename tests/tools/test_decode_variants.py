"""The variants of the decode kernel that are measured: each has a tile that fits, and none is measured twice."""

import itertools
import multiprocessing
import time

import pytest

from tools.record.decode import CACHES, NEW_TOKENS
from tools.record.decode_variants import arrangement, variants
from tools.record.turns import Turns
from utils.attention.gluon.decode.plan import SHARED_BYTES


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_variants_differ_and_fit(cache):
    for new_tokens in NEW_TOKENS:
        point = (*cache, new_tokens)
        found = variants(point)
        assert "default" in found and len(found) >= 2
        for choices in found.values():
            plan = arrangement(point, choices).plan
            assert plan.shared_bytes + 700 < SHARED_BYTES
            assert plan.slots >= 4
            if plan.consumers:
                # All query rows of a head of keys in one tile: otherwise the cache would be read once for each tile.
                assert plan.columns >= cache[1] // cache[2] * new_tokens
        assert len({arrangement(point, choices) for choices in found.values()}) == len(found)


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
