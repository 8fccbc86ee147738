"""The training record: its text, its judgement of loss curves, and whole runs of a tiny model on a CPU."""

import re

import pytest
import torch

from tools.record import training
from tools.record.common import read_record


def test_the_text_repeats_by_seed_and_its_sums_are_right():
    text = bytes(training.make_text(5000, 3)).decode()
    assert len(text) == 5000 and torch.equal(training.make_text(5000, 3), training.make_text(5000, 3))
    assert text != bytes(training.make_text(5000, 4)).decode()
    sums = re.findall(r"(\d+) plus (\d+) is (\d+)\.", text)
    assert len(sums) > 20 and all(int(a) + int(b) == int(c) for a, b, c in sums)
    for line in text.splitlines()[:-1]:
        name, answer = re.search(r"has (\w+)\? (\d+)\.$", line).groups()
        assert f"{name} has {answer} " in line


def test_batches_are_the_same_for_all_backends():
    first, second = ([*training.batches(training.TINY, 3, 5, torch.device("cpu"))] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and first[0].shape == (4, 65)
    assert not torch.equal(first[0], first[1])


def test_a_curve_is_judged_by_the_noise_of_its_seed():
    rows = [
        {"backend": name, "seed": seed, "losses": [9.0, 9.0] + [seed + 1.0 + off] * 2}
        for name, off in (("cudnn", 0.0), ("gluon", 0.1), (training.MOVED, 0.2))
        for seed in (0, 1)
    ]
    judged = training.judge_curves(rows, "cudnn")
    assert judged["gluon"] == {"final": pytest.approx(1.6), "distance": pytest.approx(0.1), "noise": pytest.approx(0.2)}
    alone = [row for row in rows if row["backend"] != "moved"]
    assert training.judge_curves(alone, "cudnn")["gluon"]["noise"] is None  # NaN is no JSON
    assert judged["cudnn"]["distance"] == 0.0


def test_files_of_a_seed_each_are_joined_and_judged_together(tmp_path):
    def write(seed, steps=4):
        rows = [{"backend": name, "seed": seed, "losses": [2.0] * 4} for name in ("gluon", training.MOVED)]
        rows[1]["losses"] = [2.0, 2.0, 2.0 + seed, 2.0 + seed]
        method = {"run": {}, "steps": steps, "first": "gluon", "skipped": {}, "seeds": [seed], "complete": True}
        path = tmp_path / f"{seed}.json"
        path.write_text(training.to_text(method | {"rows": rows}))
        return str(path)

    out = tmp_path / "all.json"
    training.main(["join", "--read", write(1), write(2), "--out", str(out)])
    record = read_record(out)
    assert record["seeds"] == [1, 2] and len(record["rows"]) == 4
    assert record["judged"]["gluon"]["noise"] == pytest.approx(2.5**0.5)
    with pytest.raises(SystemExit, match="a seed in common"):
        training.main(["join", "--read", write(1), write(1), "--out", str(out)])
    with pytest.raises(SystemExit, match="differ in 'steps'"):
        training.main(["join", "--read", write(1), write(2, steps=5), "--out", str(out)])


@pytest.mark.slow  # imports transformers
def test_the_flops_of_a_step_by_hand():
    run, config = training.TINY, training.TINY.config()
    rows, width = 4 * 64, 32
    products = rows * (width * 16 * (2 + 1 + 1 + 2) + 3 * width * 4 * width) * 2 * 2  # two layers
    pairs = 64 * 65 // 2 + (16 * 17 // 2 + 48 * 16)
    head = 2 * rows * width * 256
    assert training.model_flops(run, config) == 3 * (products + head + 4 * 4 * 2 * 16 * pairs)


def test_options_that_do_not_fit(capsys, tmp_path):
    for arguments in (["curves"], ["plot", "--out", "x.svg"], ["step", "--out", "x.json", "--builds", "fast"]):
        with pytest.raises(SystemExit):
            training.main(arguments)
    assert "allowed: unfused, eager, compiled" in capsys.readouterr().err


def test_what_cannot_run_is_skipped_with_its_reason():
    found, skipped = training.able(["math", "fa3", "cute"], training.TINY, torch.device("cpu"))
    assert found == ["math"] and set(skipped) == {"fa3", "cute"}
    assert all(len(reason) > 20 for reason in skipped.values())


@pytest.mark.slow
def test_a_tiny_model_learns_and_a_wrong_gradient_is_seen(tmp_path, monkeypatch, capsys):
    def damaged(q, k, v, *, backend, **problem):
        if backend == "naive":
            v = v + 0.2 * (v - v.detach())  # the same output, and a gradient of v that is a fifth too large
        return honest(q, k, v, backend=backend, **problem)

    def curves():
        path = tmp_path / "curves.json"
        training.main(["curves", "--out", str(path), "--steps", "50", "--seeds", "1", "--backends", "math,naive,fa3"])
        return read_record(path)

    record = curves()
    judged = record["judged"]
    assert record["complete"] and list(judged) == ["math", "naive", "moved"] and "fa3" in record["skipped"]
    assert record["rows"][0]["losses"][0] > 5.4 and judged["math"]["final"] < 4.5
    assert judged["naive"]["distance"] <= judged["math"]["noise"]
    training.main(["plot", "--read", str(tmp_path / "curves.json"), "--out", str(tmp_path / "curves.svg")])
    assert "<svg" in (tmp_path / "curves.svg").read_text()

    honest = training.attention
    monkeypatch.setattr(training, "attention", damaged)
    damaged_curves = curves()["judged"]
    assert damaged_curves["naive"]["distance"] > 5 * damaged_curves["math"]["noise"]


@pytest.mark.slow
def test_the_table_of_steps(tmp_path, capsys):
    path = tmp_path / "step.json"
    training.main(["step", "--out", str(path), "--builds", "unfused,eager", "--pairs", "3", "--backends", "math"])
    record = read_record(path)
    assert record["complete"] and [row["build"] for row in record["rows"]] == ["unfused", "eager"]
    assert (
        all(row["ms"] > 0 and 0 < row["mfu"] < 1 for row in record["rows"]) and "of the roof" in capsys.readouterr().out
    )
