import copy
import json

import pytest

from utils.bench import expectations as exp
from utils.bench.errors import BenchError
from utils.bench.targets import TARGETS
from utils.bench.targets.base import WORKLOAD_KNOBS


@pytest.fixture
def on_h200(document):
    """The small run as if an H200 had made it: base 2 ms, optimized 1 ms, tight intervals."""
    document["environment"] |= {"gpu": "NVIDIA H200", "commit": "aaa"}
    return scaled(document, 2.0, 1.0)


def scaled(document, baseline_ms, optimized_ms, spread=0.01):
    document = copy.deepcopy(document)
    (case,) = document["cases"]
    for side, center in (("baseline", baseline_ms), ("optimized", optimized_ms)):
        record = case["sides"][side]
        record["samples_ms"] = [center * (1 + spread * (i % 5 - 2) / 2) for i in range(25)]
        record["interval_ms"] = [center * (1 - spread / 2), center * (1 + spread / 2)]
    ratio = baseline_ms / optimized_ms
    case["comparison"] |= {"speedup": ratio, "interval": [ratio * (1 - spread), ratio * (1 + spread)]}
    return document


@pytest.fixture
def stored(on_h200, tmp_path):
    return exp.load_expectations(exp.update_file(on_h200, tmp_path)[0])


def verdict(document, stored):
    (row,) = exp.check(document, stored)
    return row["verdict"], row["fails"]


@pytest.mark.parametrize(
    ("baseline", "optimized", "expected"),
    [
        (2.0, 1.0, ("steady", False)),
        (2.0, 1.02, ("steady", False)),
        (2.0, 1.3, ("regression", True)),
        (2.6, 1.3, ("regression", True)),  # the ratio alone would pass
        (1.5, 1.0, ("baseline faster", False)),  # the ratio alone would fail
        (2.6, 1.0, ("regression", True)),  # no faster kernel, whatever the ratio says
        (2.0, 0.8, ("improvement", False)),
        (1.6, 0.8, ("improvement", False)),
    ],
)
def test_time_and_ratio_decide_together(on_h200, stored, baseline, optimized, expected):
    assert verdict(scaled(on_h200, baseline, optimized), stored) == expected


def test_wide_intervals_are_not_enough_data(on_h200, stored):
    assert verdict(scaled(on_h200, 2.0, 1.1, spread=0.4), stored) == ("not enough data", False)


def test_another_way_of_timing_has_expectations_of_its_own(tmp_path, on_h200, stored):
    cold = scaled(on_h200, 2.0, 1.3)
    cold["cases"][0]["timing"]["l2"] = "cold"
    assert verdict(cold, stored) == ("no expectation", False)
    both = exp.load_expectations(exp.update_file(cold, tmp_path)[0])
    assert [entry["timing"]["l2"] for entry in both["entries"]] == ["warm", "cold"]
    assert verdict(cold, both) == ("steady", False)
    del stored["entries"][0]["timing"]  # an older entry without it means a warm cache, on a stream
    assert verdict(scaled(on_h200, 2.0, 1.3), stored) == ("regression", True)


def test_checking_never_writes_and_small_slips_do_not_add_up(tmp_path, on_h200):
    path, _ = exp.update_file(on_h200, tmp_path)
    assert path == tmp_path / "h200.json"
    before = path.read_text()
    outcome = [
        exp.check(scaled(on_h200, 2.0, 1.0 * 1.02**step), exp.load_expectations(path))[0]["fails"]
        for step in range(1, 8)
    ]
    assert path.read_text() == before
    assert outcome[0] is False and outcome[-1] is True  # 2% a time ends as a regression


def test_an_update_replaces_the_old_value_and_names_what_is_worse(tmp_path, on_h200):
    exp.update_file(on_h200, tmp_path)
    for step, optimized in enumerate((1.2, 0.9)):
        newer = scaled(on_h200, 2.0, optimized)
        newer["run_id"] = f"run{step}"
        path, (change,) = exp.update_file(newer, tmp_path)
        assert ("WORSE" in change) == (optimized == 1.2)
    (entry,) = json.loads(path.read_text())["entries"]
    assert entry["metrics"]["optimized_ms"]["value"] == 0.9 and entry["recorded"]["run_id"] == "run1"
    assert entry["recorded"]["commit"] == "aaa"


def test_two_backends_are_two_entries(tmp_path, on_h200, stored):
    other = copy.deepcopy(on_h200)
    other["cases"][0]["knobs"]["backend"]["value"] = "cudnn"
    assert verdict(other, stored) == ("no expectation", False)
    assert len(exp.load_expectations(exp.update_file(other, tmp_path)[0])["entries"]) == 2


def test_a_case_that_no_longer_runs_fails(on_h200, stored):
    on_h200["cases"][0] |= {"status": "failed", "reason": "wrong result"}
    assert verdict(on_h200, stored) == ("failed", True)


def test_other_gpus_cpus_and_broken_files(tmp_path, document, on_h200, stored):
    assert exp.expectations_file("NVIDIA H200", tmp_path).name == "h200.json"
    assert exp.expectations_file("NVIDIA H100 NVL", tmp_path).name == "h100-nvl.json"
    with pytest.raises(BenchError, match="of a CPU"):
        exp.expectations_file(None)
    with pytest.raises(BenchError, match="no expectations yet"):
        exp.load_expectations(tmp_path / "none.json")
    document["environment"]["gpu"] = "NVIDIA L4"
    with pytest.raises(BenchError, match="NVIDIA L4 and the expectations of NVIDIA H200"):
        exp.check(document, stored)
    path, _ = exp.update_file(on_h200, tmp_path)
    path.write_text(path.read_text()[:200])
    with pytest.raises(BenchError, match=r"h200.json is truncated"):
        exp.load_expectations(path)


@pytest.mark.parametrize("path", sorted(exp.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_committed_entries_are_of_targets_and_options_that_exist(path):
    """An entry with an option that is gone would never be found again, and its target never checked."""
    for entry in exp.load_expectations(path)["entries"]:
        knobs = {knob.key for knob in TARGETS[entry["target"]].knobs} - set(WORKLOAD_KNOBS)
        assert set(entry["options"]) == knobs, entry["target"]
