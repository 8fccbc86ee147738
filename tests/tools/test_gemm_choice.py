"""The shapes of the GEMM's recordings, and the fit of the model that chooses a configuration."""

import importlib.util
from dataclasses import replace

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tools.record import gemm_choice, gemm_shapes
from tools.record.common import read_record
from tools.record.gemm_shapes import draw_shapes, summary
from utils.files import ROOT


def test_shapes_are_drawn_by_seed():
    shapes = draw_shapes()
    assert len(shapes) == 80 and shapes == draw_shapes() and shapes != draw_shapes(17)
    for shape in shapes:
        assert all(64 <= shape[x] <= 16384 and shape[x] % 8 == 0 for x in "mnk") and shape["dtype"] in ("bf16", "fp16")
        assert 2e7 <= 2 * shape["m"] * shape["n"] * shape["k"] <= 4e12
    assert {shape["a_column_major"] for shape in shapes} == {True, False}
    assert not [
        s for s in gemm_choice.training_shapes(count=40) if any(s["m"] == t["m"] and s["k"] == t["k"] for t in shapes)
    ]


def test_what_is_summed_up():
    rows = [{"ratio": 0.5}, {"ratio": 2.0}, {"ratio": 1.0}]
    assert summary(rows) == {"geometric_mean": pytest.approx(1.0), "smallest": 0.5, "under_0.90": 1, "shapes": 3}


@pytest.mark.slow
def test_the_fit_finds_constants_that_choose_well():
    from utils.kernels import gemm_model

    truth = replace(gemm_model.COST, product=0.5, bytes=0.02, late=1.3, tile=2.0, launch=3.0)
    rows = []
    for shape in gemm_choice.training_shapes(count=10):
        row = shape | {"kind": "train", "torch_us": 10.0, "times": []}
        for config in gemm_choice.ranked(shape, 5):
            assert gemm_choice.config_of(config.name) == config
            row["times"].append((config.name, gemm_choice.estimate(row, config, truth)))
        row["times"].append(("8x8/1", 0.1))  # a tile that the kernel does not have is left out
        rows.append(row)
    found = gemm_choice.fit(rows, gemm_model.COST, tries=3000)
    assert gemm_choice.error(rows, found) < 0.1 * gemm_choice.error(rows, gemm_model.COST)
    judged = gemm_choice.judge(rows, found)
    assert judged["best / chosen"] > 0.98 and judged["shapes"] == 10
    assert gemm_choice.judge(rows, truth)["best / chosen"] == 1.0


def test_a_record_that_was_cut_off_is_gone_on_with():
    path = ROOT / "assets/results/h200/gemm_shapes.json"
    kept = gemm_shapes.kept_rows(path, seed=16, l2="warm")
    assert not gemm_shapes.missing_shapes(draw_shapes(), kept)
    assert gemm_shapes.missing_shapes(draw_shapes(), kept[:58]) == draw_shapes()[58:]
    with pytest.raises(SystemExit, match="no one table"):
        gemm_shapes.kept_rows(path, seed=16, l2="cold")


def test_the_worst_shapes_are_divided_evenly():
    worst = gemm_choice.worst_shapes(6)
    assert [shape["kind"] for shape in worst] == ["train", "test"] * 3
    rows = read_record(ROOT / "assets/results/h200/gemm_shapes.json")["rows"]
    assert worst[0].items() <= (min(rows, key=lambda row: row["ratio"]) | {"kind": "train"}).items()
