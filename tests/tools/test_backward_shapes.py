"""Training shapes for the backward: drawn alike each time, within their limits, and joined to one record."""

import json

from tools.record.backward_shapes import all_shapes, join, predicted_us, random_shapes


def test_shapes_are_drawn_by_seed_within_their_limits():
    shapes = random_shapes()
    assert shapes == random_shapes() and shapes != random_shapes(seed=18)
    for batch, heads, kv_heads, length, head_dim, _ in shapes:
        assert heads % kv_heads == 0 and 4 <= heads <= 32 and heads // kv_heads <= 8
        assert 300 <= length <= 8000 and batch * length <= 32768 and head_dim in (64, 128)


def test_the_schedule_predicts_that_balance_ends_earlier():
    found = predicted_us((2, 8, 8, 4128, 64, True))
    assert found["blocks"] < 0.8 * found["before"]


def test_a_folder_becomes_a_record(tmp_path):
    shape = list(all_shapes()[2])
    row = {"shape": shape, "errors": {"gluon": [0.0023456789]}, "refused": {}, "ms": {"gluon": 0.2, "fa3": 0.3}}
    row |= {
        "tflops": {"gluon": 300.04, "fa3": 200.0},
        "ratios": {"gluon": 1.5, "fa3": 1.0},
        "environment": {"gpu": "one"},
    }
    (tmp_path / "shape-2.json").write_text(json.dumps(row))
    record = join(tmp_path)
    assert record["geometric_means"] == {"D=128 causal": 1.5}
    assert not record["complete"] and record["environment"] == {"gpu": "one"}
    assert record["rows"][0]["errors"] == {"gluon": [0.002346]}
