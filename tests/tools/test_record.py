"""Recorded files: one row a line, saved after each row, and true about whether the run came to its end."""

import json
import re
import subprocess

import pytest
import torch

from tools.record import attention_ratios, backward, flex_sweep, sdpa_grid
from tools.record.common import Record, arguments_parser, read_record, to_text
from utils.files import ROOT


def test_a_row_is_a_line_and_the_file_is_json():
    contents = {"what": "squares", "environment": {"gpu": None}, "rows": [{"n": 1, "square": 1}, {"n": 2, "square": 4}]}
    text = to_text(contents)
    assert json.loads(text) == contents
    assert [line for line in text.splitlines() if '"n": 2' in line] == ['  {"n": 2, "square": 4}']


def test_every_row_is_saved_and_the_end_is_marked(tmp_path, capsys):
    path = tmp_path / "new" / "squares.json"
    record = Record(arguments_parser("What.").parse_args(["--out", str(path)]), "squares", pairs=3)
    saved = []

    def square(n: int) -> dict:
        saved.append(len(read_record(path)["rows"]) if path.exists() else 0)
        return {"n": n, "square": n * n}

    record.fill([1, 2, 3], square, lambda row: f"{row['n']} -> {row['square']}")
    assert saved == [0, 1, 2] and not read_record(path)["complete"]
    record.finish()
    written = read_record(path)
    assert written["complete"] and written["pairs"] == 3 and written["rows"][-1] == {"n": 3, "square": 9}
    assert written["environment"]["torch"]
    assert "3 -> 9" in capsys.readouterr().out


def test_a_run_out_of_time_says_so_and_without_a_path_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    record = Record(arguments_parser("What.").parse_args(["--seconds", "60"]), "squares")
    record.began -= 61.0
    record.fill([1, 2], lambda n: {"n": n}, str)  # the first row in any case: a summary of none is an error
    record.finish()
    assert record.contents["rows"] == [{"n": 1}] and not record.contents["complete"]
    assert "before the table was complete" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_options_that_belong_together(capsys):
    assert arguments_parser("What.", pairs=15).parse_args([]).pairs == 15
    with pytest.raises(SystemExit):
        flex_sweep.main(["plot", "--out", "x.svg"])
    assert "--read" in capsys.readouterr().err


def test_recorded_tables_can_still_be_read_shown_and_averaged():
    results = ROOT / "assets" / "results"
    ratios = read_record(results / "h200" / "attention_ratios.json")
    assert attention_ratios.geometric_means(ratios["rows"]) == pytest.approx(ratios["geometric_means"])
    ladder = read_record(results / "h200" / "attention_ladder.json")
    assert all("step" in attention_ratios.show(row) for row in ladder["rows"])
    assert all("gluon" in attention_ratios.show(row) for row in ratios["rows"])
    for path in (results / "cpu" / "flex_sweep.json", results / "h200" / "flex_promise.json"):
        assert all(flex_sweep.show(row) for row in read_record(path)["rows"])


def test_the_forward_kernels_shapes_are_drawn_by_seed():
    shapes = attention_ratios.random_shapes(40)
    assert len(shapes) == 40 and shapes == attention_ratios.random_shapes(40) != attention_ratios.random_shapes(41)
    assert all(500 <= shape[s] <= 40_000 for shape in shapes for s in ("sq", "sk"))
    assert all(shape["sk"] >= shape["sq"] or not shape["causal"] for shape in shapes)
    assert {shape["head_dim"] for shape in shapes} == {64, 128, 256}
    for feature in ("window", "causal"):
        assert 0 < sum(bool(shape[feature]) for shape in shapes) < 40
    assert any(shape["sk"] % 128 for shape in shapes) and any(shape["heads"] > shape["kv_heads"] for shape in shapes)
    rows = [shape | {"ratio": ratio} for shape, ratio in zip(shapes, (0.5, 2.0), strict=False)]
    summary = attention_ratios.random_summary(rows)
    assert summary == {"geometric_mean": pytest.approx(1.0), "smallest": 0.5, "under_0.95": 1}


def test_the_commits_of_the_records_are_in_the_history():
    """A reader who checks out a record's commit gets the code that was measured."""

    def git(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("the history is not here: this is an installed copy or a shallow clone")
    named = {
        (path.name, commit)
        for path in (ROOT / "assets" / "results").rglob("*.json")
        for commit in re.findall(r'"commit": "([0-9a-f]+)"', path.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    assert not {record for record in named if git("merge-base", "--is-ancestor", record[1], "HEAD").returncode}


def test_a_grid_is_measured_again_at_its_shapes():
    recorded = sdpa_grid.shapes_of(read_record(ROOT / "assets/results/h200/sdpa_grid.json"))
    assert len({sdpa_grid.workload_of(shape).label for shape in recorded}) > 200
    tiny = dict(zip(sdpa_grid.SIZES, (2, 4, 2, 1, 40, 16), strict=True)) | {"dtype": "fp32", "causal": False}
    rows = sdpa_grid.measure_shape(tiny | {"set": "grid", "kind": "decode", "pass": "forward"}, torch.device("cpu"))
    assert {row["backend"]: row["status"] for row in rows} == {
        **{"cudnn": "refused", "flash": "ok", "math": "ok", "efficient": "refused"}
    }
    assert [row["backend"] for row in rows if row["is_default"]] == ["flash"]
    assert all(row["ms_low"] <= row["ms"] <= row["ms_high"] for row in rows if row["status"] == "ok")


def test_the_backward_shapes_are_drawn_by_seed():
    points = backward.drawn_points(1)
    assert points == backward.drawn_points(1) != backward.drawn_points(2)
    assert [point.kind for point in points[:3]] == ["full", "causal", "window"] and len(points) == 24
    assert all(400 <= point.length <= 24_000 and point.flops <= backward.WORK for point in points)
    assert all(point.keys >= point.length for point in points if point.causal)
    assert all(128 <= point.window <= min(4096, point.length) for point in points if point.window)
    full, causal = (backward.Point(64, 512, masked, 1, 1, 1, 512) for masked in (False, True))
    assert full.flops == 2 * causal.flops == 2 * causal._replace(window=512).flops  # a window as wide as all keys
