"""The shapes of the GEMM's recordings, and the fit of the model that chooses a configuration."""

import importlib.util
from dataclasses import replace

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tools.record import gemm_choice, gemm_choice_fit, gemm_choice_shapes, gemm_shapes
from tools.record.gemm_shapes import draw_shapes, summary
from utils.files import ROOT
from utils.kernels import gemm_choose, gemm_model


def test_shapes_are_drawn_by_seed():
    shapes = draw_shapes()
    assert len(shapes) == 80 and shapes == draw_shapes() and shapes != draw_shapes(17)
    for shape in shapes:
        assert all(64 <= shape[x] <= 16384 and shape[x] % 8 == 0 for x in "mnk") and shape["dtype"] in ("bf16", "fp16")
        assert 2e7 <= 2 * shape["m"] * shape["n"] * shape["k"] <= 4e12
    assert {shape["a_column_major"] for shape in shapes} == {True, False}


def test_shapes_of_the_search_are_new_and_half_of_them_are_held_out():
    table = {tuple(s[x] for x in "mnk") for seed in (16, 1123) for s in draw_shapes(seed)}
    drawn = gemm_choice_shapes.drawn_shapes()
    assert not [s for s in drawn if tuple(s[x] for x in "mnk") in table]
    for group in ("few tiles", "large", "any"):
        kinds = [s["kind"] for s in drawn if s["group"] == group]
        assert len(kinds) >= 4 and abs(kinds.count("test") - kinds.count("train")) <= 1
    shapes = gemm_choice_shapes.all_shapes()
    parts = [gemm_choice.part_of(shapes, part) for part in ("1/2", "2/2")]
    assert sorted(map(str, parts[0] + parts[1])) == sorted(map(str, shapes))
    poor = gemm_choice_shapes.poor_shapes(0.95)
    assert all(s["before"] and all(gemm_choice_shapes.config_of(x) for x in s["before"]) for s in poor)


def test_configurations_of_different_families_are_timed():
    shape = {"m": 784, "n": 824, "k": 3440, "a_column_major": False, "b_column_major": True}
    found = gemm_choice_shapes.families_of(shape)
    families = {gemm_choice_shapes.family(config)[:3] for config in found}
    whole, cluster = {x for x in families if x[2] == "whole"}, {x for x in families if x[2] == "cluster"}
    assert len(found) == len(set(found)) <= gemm_choice_shapes.MOST and cluster
    assert {(True, 1), (False, 1), (False, 4), (False, 8)} <= {x[:2] for x in whole | families}
    assert all(gemm_choice_shapes.config_of(config.name) == config for config in found)


def test_what_is_summed_up():
    rows = [{"ratio": 0.5}, {"ratio": 2.0}, {"ratio": 1.0}]
    assert summary(rows) == {"geometric_mean": pytest.approx(1.0), "smallest": 0.5, "under_0.90": 1, "shapes": 3}


def made_up_rows(truth, count: int) -> list[dict]:
    """Rows whose times are those of the model with other constants."""
    rows = []
    for shape in gemm_choice_shapes.training_shapes(7, count):
        row = shape | {"torch_us": 10.0, "families": True}
        configs = gemm_choice_shapes.families_of(shape)[:6]
        sizes = [shape[x] for x in "mnk"]
        late = gemm_shapes.late_rows(shape)
        times = [(x.name, gemm_model.estimate(*sizes, x, 132, late, truth)) for x in configs]
        assert all(gemm_choice_shapes.config_of(x.name) == x for x in configs)
        rows.append(row | {"times": [*times, ("8x8/1", 0.1)]})  # a tile that the kernel does not have is left out
    return rows


def test_the_fit_finds_constants_that_choose_well():
    truth = replace(gemm_model.COST, product=0.5, bytes=0.02, late=1.5, launch=3.5, few=0.9)
    given = gemm_choice_fit.measured(made_up_rows(truth, 12))
    found = gemm_choice_fit.fit(given, gemm_model.COST, tries=1500)
    assert gemm_choice_fit.error(given, truth) < 1e-12
    assert gemm_choice_fit.error(given, found) < 0.1 * gemm_choice_fit.error(given, gemm_model.COST)
    judged = gemm_choice_fit.judge(gemm_choice_fit.choices(given, found))
    assert judged["best / chosen"] > 0.98 and judged["shapes"] == 12
    assert gemm_choice_fit.judge(gemm_choice_fit.choices(given, truth))["best / chosen"] == 1.0


def test_what_a_choice_loses_is_counted():
    assert gemm_choice_fit.judge([(8.0, 10.0, 8.5), (5.0, 5.0, 10.0)]) == {
        "shapes": 2,
        "best / chosen": pytest.approx(0.8**0.5),
        "worst choice": 0.8,
        "torch / chosen": pytest.approx(1.7**0.5),
        "torch / best": pytest.approx(2.125**0.5),
        "under_0.90": 1,
        "best under_0.90": 0,
    }


def test_a_shape_is_judged_by_constants_that_have_not_seen_it():
    rows = made_up_rows(gemm_model.COST, 9)
    parts = gemm_choice_fit.groups(rows + rows)
    shapes = [{tuple(row[x] for x in gemm_choice_shapes.SIZES) for row in part} for part in parts]
    assert sum(map(len, shapes)) == 9 and len(set().union(*shapes)) == 9


def test_a_record_that_was_cut_off_is_gone_on_with():
    path = ROOT / "assets/results/h200/gemm_shapes.json"
    kept = gemm_shapes.kept_rows(path, seed=16, l2="warm")
    assert not gemm_shapes.missing_shapes(draw_shapes(), kept)
    assert gemm_shapes.missing_shapes(draw_shapes(), kept[:58]) == draw_shapes()[58:]
    with pytest.raises(SystemExit, match="no one table"):
        gemm_shapes.kept_rows(path, seed=16, l2="cold")
    with pytest.raises(SystemExit, match="tune"):
        gemm_shapes.kept_rows(path, seed=16, l2="warm", tune=True)


def test_what_a_table_compiles_has_what_is_timed_and_each_kernel_once():
    shapes = gemm_shapes.draw_shapes(count=6)
    kernels = gemm_shapes.kernels_of([*shapes, *shapes], tune=True)
    assert len(kernels) == len(gemm_shapes.kernels_of(shapes, tune=True)) <= 24
    for shape in shapes:
        sizes = shape["m"], shape["n"], shape["k"]
        first = gemm_choose.choose(*sizes, gemm_shapes.SMS, gemm_shapes.late_rows(shape))
        assert (shape, first) in gemm_shapes.kernels_of([shape], tune=False)
        assert any(config == first for _, config in kernels)
