import csv
import io
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.utils.bench.bench_runs import SDPA, SMALL
from utils.bench import terminal
from utils.bench.cli import app
from utils.bench.targets import TARGETS

runner = CliRunner()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def labs_bench(*words):
    return runner.invoke(app, [str(word) for word in words])


def small(flags, *words):
    return labs_bench("run", "--targets", SDPA, "--target-extra-arg", f"{SMALL} {flags}", *words)


def test_list_targets_of_a_chapter():
    short = labs_bench("list-targets", "--chapter", "labs/flexattention")
    assert short.exit_code == 0 and "--block-size" not in short.stdout and len(short.stdout.splitlines()) < 10
    found = labs_bench("list-targets", "--chapter", "labs/flexattention", "--flags")
    assert found.exit_code == 0
    for text in ("labs/flexattention:flex_attention_cute", "--block-size", "BLOCK_SIZE", "TORCH_COMPILE_MODE"):
        assert text in found.stdout
    assert "cudnn_sdpa_bench" not in found.stdout
    rows = json.loads(labs_bench("list-targets", "--json").stdout)
    assert len(rows) == len(TARGETS) and rows[0]["sides"]["baseline"] == "labs/flexattention:baseline_flex_attention"
    wrong = labs_bench("list-targets", "--chapter", "labs/flexatention")
    assert wrong.exit_code == 2 and "Did you mean labs/flexattention" in wrong.stderr


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_number_is_broken_whatever_the_width(width, monkeypatch, capsys):
    import rich.console

    console = rich.console.Console
    monkeypatch.setattr(terminal, "console", lambda: console(width=width, highlight=False))
    times = "12.71 [12.10, 13.02] ms", "1.29 [1.26, 1.31] ms"
    terminal.show_table(["Target", *"abcd"], [["chapter:workload " * 5, *4 * [side]] for side in times])
    shown = capsys.readouterr().out
    assert shown.count("chapter:workload") == (10 if width > 80 else 5) and shown.count(times[0]) == 4
    assert any(all(side in line for side in times) for line in shown.splitlines()) == (width == 80), "side by side"


def test_a_folder_that_cannot_be_written_is_one_line_before_anything_is_timed(monkeypatch):
    from utils.benchmark import measuring

    monkeypatch.setattr(measuring, "measure", None)
    words = ("attention_suite:sdpa", "--iterations", "1", "--artifacts-dir", "/proc/nowhere")
    result = labs_bench("run", *words)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("error: /proc/nowhere") and len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_run_compare_report_check(folder):
    for name, backend in (("a", "flash"), ("b", "math")):
        done = small(f"--backend {backend}", "--run-id", name, "--iterations", 12, "--profile", "roofline")
        assert done.exit_code == 0, done.output
        assert f"optimized: {backend}" in done.stdout and "complete: 1 ok" in done.stderr
    assert list((folder / "benchmark_profiles/labs/cudnn_sdpa_bench/a").glob("*.trace.json"))
    compared = labs_bench("compare", "a", "b")
    assert compared.exit_code == 0 and "flash" in compared.stdout and "backend flash and math" in compared.stdout
    comparison = json.loads(labs_bench("compare", "a", "b", "--output", folder / "held", "--json").stdout)
    assert {row["side"] for row in comparison["rows"]} == {"baseline", "optimized"}
    assert [Path(file).name for file in comparison["files"]] == ["comparison.csv", "comparison.md"]
    lines = list(csv.DictReader(io.StringIO((folder / "held/comparison.csv").read_text())))
    assert [float(line["speedup"]) for line in lines] == pytest.approx([row["speedup"] for row in comparison["rows"]])
    assert float(lines[0]["a_ms_low"]) <= float(lines[0]["a_ms"]) and "speedup_high" in lines[0]
    assert "| optimized | flash" in (folder / "held/comparison.md").read_text()
    reported = labs_bench("report", "a", "--output", folder / "page")
    assert reported.exit_code == 0
    written = {"results.csv", "report.md", "latency.png", "roofline.png"}
    assert {path.name for path in (folder / "page").iterdir()} == written
    if not torch.cuda.is_available():
        checked = labs_bench("check", "a")
        assert checked.exit_code == 2 and "of a CPU" in checked.stderr
        refused = labs_bench("run", "--targets", SDPA, "--target-extra-arg", SMALL, "--update-expectations")
        assert refused.exit_code == 2 and "of a CPU" in refused.stderr
        refused = small("--backend cudnn", "--run-id", "refused", "--profile", "minimal")
        assert refused.exit_code == 1 and refused.stderr.endswith("refused; artifacts/refused\n"), "without profiles"
    missing = labs_bench("compare", "a", "nothing")
    assert missing.exit_code == 2 and "no results at nothing" in missing.stderr


@pytest.mark.slow
def test_the_timing_asked_for_is_the_one_in_force_and_echoed(folder):
    def case_of(name, *words):
        done = small("--backend flash", "--run-id", name, *words)
        assert done.exit_code == 0, done.output
        return done, *json.loads((folder / f"artifacts/{name}/results.json").read_text())["cases"]

    _, case = case_of("cold", "--iterations", 4, "--l2", "cold")
    assert case["timing"]["l2"] == "cold" and case["timing"]["iterations"] == 4
    for record in case["sides"].values():
        assert record["method"]["l2"] == "cold" and record["method"]["l2_flush_bytes"] >= 64 * 1024**2
    assert "Timing: l2 cold" in (folder / "artifacts/cold/report.md").read_text()
    done, _ = case_of("budget", "--iterations", 100_000, "--max-seconds", "0.2")
    assert "time budget of 0.2 s used after" in done.stdout
    refused = labs_bench("compare", "cold", "budget")
    assert refused.exit_code == 2 and "l2 cold and warm" in refused.stderr


def test_ctrl_c_ends_with_a_clear_last_line(folder, monkeypatch):
    def interrupt(case, side, q, k, v):
        raise KeyboardInterrupt

    monkeypatch.setattr(TARGETS[SDPA], "build", interrupt)
    done = labs_bench("run", "--targets", SDPA, "--target-extra-arg", SMALL, "--run-id", "cut")
    assert done.exit_code == 130
    assert done.stderr.strip().endswith("interrupted: 1 interrupted; what was done is in artifacts/cut.")
    shown = labs_bench("report", "cut")
    assert shown.exit_code == 0 and "Status: interrupted" in (folder / "artifacts/cut/report.md").read_text()
