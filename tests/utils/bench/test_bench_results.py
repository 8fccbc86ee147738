import csv
import io

import matplotlib.pyplot as plt
import pytest

from utils.bench import results as res
from utils.bench.comparing import compare_results, notes, separate_speedup
from utils.bench.documents import write_json
from utils.bench.errors import BenchError
from utils.bench.report import markdown, rows, to_csv, write_report
from utils.bench.workload import Workload
from utils.benchmark.result import Measurement


def save(tmp_path, document, name="results.json"):
    return write_json(tmp_path / name, document)


def test_results_come_back_by_path_folder_and_run_id(small_run):
    folder, document = small_run
    for where in (folder / "small" / "results.json", folder / "small", "small"):
        assert res.load_results(where, folder)["run_id"] == document["run_id"]
    with pytest.raises(BenchError, match=r"no results at nowhere.*small"):
        res.load_results("nowhere", folder)


def test_truncated_foreign_and_old_files_are_refused_by_name(tmp_path, document):
    whole = save(tmp_path, document)
    text = whole.read_text()
    for share in (0.2, 0.5, 0.99):
        whole.write_text(text[: int(share * len(text))])
        with pytest.raises(BenchError, match=r"results.json is truncated"):
            res.load_results(whole)
    for change, message in (({"version": 9}, "version 9"), ({"schema": "x"}, "no labs-bench-results document")):
        with pytest.raises(BenchError, match=message):
            res.load_results(save(tmp_path, {**document, **change}))
    del document["cases"][0]["sides"]["baseline"]["samples_ms"]
    with pytest.raises(BenchError, match="damaged in case 0"):
        res.load_results(save(tmp_path, document))
    with pytest.raises(BenchError, match="cases missing"):
        res.load_results(save(tmp_path, {key: value for key, value in document.items() if key != "cases"}))


def test_a_faster_run_is_faster(document, small_run):
    faster = small_run[1]
    record = document["cases"][0]["sides"]["optimized"]
    record["samples_ms"] = [2.0 * value for value in record["samples_ms"]]
    row = next(row for row in compare_results(document, faster) if row["side"] == "optimized")
    assert row["speedup"] == pytest.approx(2.0) and row["verdict"] in ("faster", "not enough data")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("environment", "gpu"), "NVIDIA L4", "different machines, .* and NVIDIA L4"),
        (("workload", "seq_len"), 4096, "S48 D32 .* B1 H2 S4096 D32"),
        (("workload", "dtype"), "bf16", "fp32 causal .* bf16 causal"),
        (("workload", "mask"), "full", "fp32 causal .* fp32 full"),
        (("target",), "attention_suite:sdpa", "share no target"),
    ],
)
def test_other_gpus_shapes_and_dtypes_are_refused_by_name(document, small_run, path, value, message):
    place = document if path[0] == "environment" else document["cases"][0]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    if path[0] == "workload":
        document["cases"][0]["label"] = Workload(**place).label
    with pytest.raises(BenchError, match=message):
        compare_results(small_run[1], document)


def test_other_knobs_and_versions_are_listed(document, small_run):
    document["cases"][0]["knobs"]["backend"]["value"] = "math"
    document["environment"]["torch"] = "9.9"
    document["status"] = "interrupted"
    assert compare_results(small_run[1], document)[0]["knobs"] == "backend flash and math"
    text = " ".join(notes(small_run[1], document))
    assert "and 9.9" in text and "partial (interrupted)" in text
    document["cases"].append(document["cases"][0] | {"target": "attention_suite:sdpa"})
    assert len(compare_results(small_run[1], document)) == 2
    assert any("has attention_suite:sdpa B1 H2 S48" in note for note in notes(small_run[1], document))


def test_the_interval_of_two_runs_is_wider_than_that_of_each():
    a, b = Measurement((3.0,), (2.91, 3.09)), Measurement((2.0,), (1.92, 2.08))
    low, high = separate_speedup(a, b)["interval"]
    assert low == pytest.approx(1.5 / 1.05) and high == pytest.approx(1.5 * 1.05)  # 3% and 4% are 5%


def test_csv_has_a_row_for_each_side(document):
    lines = list(csv.DictReader(io.StringIO(to_csv(rows(document)))))
    assert [row["side"] for row in lines] == ["baseline", "optimized"]
    for row in lines:
        assert float(row["low_ms"]) <= float(row["median_ms"]) <= float(row["high_ms"])
    record = document["cases"][0]["sides"]["optimized"]
    assert float(lines[1]["median_ms"]) == pytest.approx(record["median_ms"])
    assert float(lines[1]["queries_per_s"]) == pytest.approx(2 * 48 / record["median_ms"] * 1e3)
    assert float(lines[1]["speedup"]) == pytest.approx(document["cases"][0]["comparison"]["speedup"])


def test_markdown_says_what_ran_and_what_was_in_force(document):
    page = markdown(document)
    for text in ("backend=flash", "aten::_scaled_dot_product_flash_attention_for_cpu", "Speed-up", "Profiles"):
        assert text in page and document["environment"]["torch"] in page
    case = document["cases"][0]
    case |= {"status": "failed", "reason": "a | b", "comparison": None, "sides": {}, "ran": {}, "profiles": {}}
    assert "failed | a \\| b |" in markdown(document)


def test_report_writes_tables_and_plots(tmp_path, document):
    before, written = plt.get_fignums(), write_report(document, tmp_path)
    assert [path.name for path in written] == ["results.csv", "report.md", "latency.png", "roofline.png"]
    assert all(path.stat().st_size > 500 for path in written) and plt.get_fignums() == before
    document["cases"].append(document["cases"][0] | {"target": "mine:flash_sdp"})  # the same name in another module
    assert len(set(write_report(document, tmp_path))) == 6
