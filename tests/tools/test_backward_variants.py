"""The record of a run of backward variants, out of the files of its folder."""

import json

from tools.record.backward_variants import join


def test_a_folder_becomes_a_record(tmp_path):
    rows = [
        {"head_dim": d, "length": length, "causal": False, "seed": 0, "samples": 3}
        | {"ms": {"gluon": 1.0}, "tflops": {"gluon": 512.345}, "differences": {"gluon": 1.23456789e-3}}
        for d in (64, 128)
        for length in (16384, 4096)
    ]
    for d in (64, 128):
        part = {"what": "a part", "environment": {"gpu": "one"}, "rows": [r for r in rows if r["head_dim"] == d]}
        (tmp_path / f"times-{d}-0.json").write_text(json.dumps(part))
    (tmp_path / "check-gluon-64-0.json").write_text(
        json.dumps({"name": "gluon", "head_dim": 64, "causal": False, "errors": [0.00234567], "right": True})
    )
    record = join(tmp_path, passes=1)
    assert record["environment"] == {"gpu": "one"}
    assert not record["complete"]  # the causal points are missing
    assert len(record["rows"]) == 4
    # Files in the order of their names: 128 before 64.
    assert record["rows"][0] == {"head_dim": 128, "length": 16384, "causal": False, "seed": 0, "samples": 3} | {
        "tflops": {"gluon": 512.3},
        "differences": {"gluon": 0.001235},
    }
    assert record["checks"][0]["errors"] == [0.002346]
