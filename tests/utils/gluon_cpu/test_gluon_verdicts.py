"""The table of verdicts: planted bugs are reported by their line, correct kernels are not reported."""

import json
import random
from collections import Counter

import pytest

pytest.importorskip("triton", reason="gluon_cpu needs Triton for the language; there are wheels for Linux only")

from tests.utils.gluon_cpu.verdict_cases import BUGS, CASES, CORRECT, MISUSES, Case, simulate_case, source
from tools.record.gluon_verdicts import judge_verdict, side_by_side
from utils.files import ROOT

RECORD = ROOT / "assets" / "results" / "gluon_verdicts.json"
JUDGED = ROOT / "assets" / "results" / "h200" / "gluon_verdicts.json"
CLASSES = {
    *("missing fence", "phase", "count", "slot reused early", "wait left out", "order of waits", "bytes expected"),
    *("uninitialized read", "out of bounds"),
}


def wrong_verdicts(cases, seeds) -> list[str]:
    found = [(case, simulate_case(case, seed)) for case in cases for seed in seeds]
    return [f"{case.label}: {verdict}" for case, verdict in found if not verdict["right"]]


def test_there_are_enough_cases_and_each_has_a_reason():
    assert len(CORRECT) >= 20 and len(BUGS) >= 40 and len(CASES) == len(CORRECT) + len(BUGS)
    assert {case.bug for case in BUGS} == CLASSES and min(Counter(case.bug for case in BUGS).values()) >= 2
    assert all(case.reason.endswith(".") for case in CASES.values())
    texts = {(source(case), tuple(case.sizes.items())) for case in CASES.values()}
    assert len(texts) == len(CASES), "two cases are the same kernel with the same sizes"


def test_a_sample_gets_the_right_verdicts():
    """One bug of each class, and one correct kernel of each kind, drawn anew in each run."""
    bugs = [random.choice([case for case in BUGS if case.bug == kind]) for kind in CLASSES]
    kernels = sorted({case.kernel for case in CORRECT})
    correct = [random.choice([case for case in CORRECT if case.kernel == kernel]) for kernel in kernels]
    assert wrong_verdicts([*bugs, *correct], [random.choice((None, random.randrange(10**6)))]) == []


@pytest.mark.slow
def test_all_get_the_right_verdicts():
    assert wrong_verdicts(CASES.values(), [None, random.randrange(10**6)]) == []


@pytest.mark.parametrize("case", MISUSES, ids=lambda case: case.label)
def test_a_misused_mbarrier_is_reported(case):
    assert wrong_verdicts([case], [None, 1]) == []


def test_a_verdict_can_be_wrong():
    """A correct kernel labelled as a bug gets a wrong verdict, and so does a bug labelled as correct."""
    import dataclasses

    (bug,) = [case for case in BUGS if case.label == "ring: no wait"]
    assert not simulate_case(dataclasses.replace(bug, edits=()))["right"]
    assert not simulate_case(dataclasses.replace(bug, bug="", kinds=(), at=()))["right"]
    assert not simulate_case(dataclasses.replace(bug, at=("mbarrier.init",)))["right"]


def test_the_recorded_table_is_that_of_these_cases():
    record = json.loads(RECORD.read_text())
    assert record["complete"] and [row["case"] for row in record["rows"]] == list(CASES)
    assert all(row["right"] == row["runs"] for row in record["rows"])
    assert {row["case"]: row["bug"] for row in record["rows"]} == {label: case.bug for label, case in CASES.items()}


def test_multicast_to_one_block_is_an_ordinary_copy():
    line = "        tma_load(x_desc, [0, s * COLUMNS], full.index(s), slots.index(s), pred=s < steps)\n"
    edit = (line, line.replace("pred", "multicast=True, pred"))
    verdict = simulate_case(Case("ring", "multicast", "", (edit,)))
    assert verdict["kind"] == "" and verdict["right"]


# Lines as compute-sanitizer, a device-side assertion and Python print them.
@pytest.mark.parametrize(
    ("judge", "code", "text", "expected"),
    [
        ("plain", 0, "result: right", ("right numbers", False)),
        ("plain", 0, "result: wrong", ("wrong numbers", False)),
        ("plain", None, "", ("did not end", False)),
        ("plain", 1, "RuntimeError: CUDA error", ("error", True)),
        ("consan", 1, "ring.py:50: ring: block: [0,0,0], thread: [0,0,0] Assertion `a read` failed.", ("error", True)),
        ("consan", 0, "result: right", ("right numbers", False)),
        ("consan", 1, "RuntimeError: CUDA error: device-side assert triggered", ("error", True)),
        ("consan", 1, "CUDA error: illegal address\nenable device-side assertions", ("error", False)),
        ("memcheck", 0, "========= Invalid __global__ write of size 4 bytes\nresult: right", ("right numbers", True)),
        ("racecheck", 0, "========= Error: Race reported between Write access\nresult: right", ("right numbers", True)),
        ("synccheck", 0, "result: right\n========= ERROR SUMMARY: 0 errors", ("right numbers", False)),
        ("memcheck", 1, "========= Error: Target application terminated before first", ("error", False)),
        ("synccheck", None, "========= Error: No attachable process found.", ("did not end", False)),
    ],
)
def test_what_a_process_on_the_gpu_printed_is_read(judge, code, text, expected):
    verdict = judge_verdict(judge, code, text)
    assert (verdict["result"], verdict["reported"]) == expected


def test_verdicts_side_by_side_show_where_they_differ():
    simulated = {
        "rows": [{"case": "a", "bug": "phase", "kinds": ["race"]}, {"case": "b", "bug": "", "kinds": ["none"]}]
    }
    judged = [
        {"case": case, "judge": "consan", "reported": False, "result": "right numbers", "message": ""} for case in "ab"
    ]
    first, second = side_by_side(simulated, [{"rows": judged[:1]}, {"rows": judged[1:]}])
    assert (first["case"], first["simulator"], first["consan"]) == ("a", "reported", "right numbers")
    assert first["differs"] == ["consan"] and second["differs"] == []
    assert "nothing wrong happened" in first["reasons"]["consan"] and second["reasons"] == {}


def test_every_difference_on_the_gpu_is_explained():
    rows = json.loads(JUDGED.read_text())["rows"]
    assert {row["case"] for row in rows} >= set(CASES) and sum("consan" in row for row in rows) >= 150
    assert all(sum(tool in row for row in rows) >= 16 for tool in ("memcheck", "racecheck", "synccheck"))
    assert all((row["simulator"] == "reported") == bool(row["bug"]) for row in rows)
    differing = [row for row in rows if row["differs"]]
    assert all(set(row["reasons"]) == set(row["differs"]) for row in differing)
    assert "not explained" not in {reason for row in differing for reason in row["reasons"].values()}
