"""`labs bench`: list-targets, run, compare, report, check."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from utils.bench.terminal import FAILED, STOPPED, ArtifactsDir, AsJson, Commands, RunName, show_json, show_table

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    help="Benchmarks with a baseline and an optimized side: list, run, compare, report, check.",
)


@app.command("list-targets")
def list_targets(
    chapter: Annotated[str | None, typer.Option(help="One chapter, such as labs/flexattention.")] = None,
    flags: Annotated[bool, typer.Option("--flags", help="Also the two sides and the flags of each target.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the targets, and whether each runs on this machine."""
    from utils.bench.targets import describe_targets

    rows = describe_targets(chapter)
    if as_json:
        show_json(rows)
        return
    for row in rows:
        typer.echo(row["target"])
        typer.echo(f"    {row['summary']}" if row["runs"] else f"    not here: {row['reason'].split(': ')[-1]}")
        if flags:
            typer.echo(f"    {row['optimized']}, against {row['baseline']}")
    if not flags:
        typer.echo("\n--flags lists the two sides and the flags of each; --chapter takes one chapter.")
        return
    sets: dict[tuple, list[str]] = {}  # a set of flags -> the targets with these flags
    for row in rows:
        knobs = tuple((f"--{k['name']}", k["default"], k["allowed"], k["help"]) for k in row["knobs"])
        sets.setdefault(knobs, []).append(row["target"])
    typer.echo("\nFlags, for --target-extra-arg 'TARGET=--flag value'")
    for knobs, names in sets.items():
        typer.echo("\n" + "\n".join(names))
        show_table(["Flag", "Default here", "Allowed", "Meaning"], knobs, wrap=["Default here", "Allowed", "Meaning"])


@app.command()
def run(
    targets: Annotated[
        list[str] | None,
        typer.Option(help="A target, one side (chapter:baseline_x), or a chapter; or several, by commas."),
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="[TARGET]...", help="Further targets.")] = None,
    profile: Annotated[str, typer.Option(help="none, minimal (trace, nsys), roofline or deep_dive (ncu).")] = "none",
    target_extra_arg: Annotated[
        list[str] | None, typer.Option(help="'TARGET=--flag value ...', repeatable; list-targets --flags shows them.")
    ] = None,
    iterations: Annotated[int | None, typer.Option(help="Timed samples of each side; default: the target's.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Calls before the timing; default: the target's.")] = None,
    l2: Annotated[str, typer.Option(help="warm, or cold: the cache is flushed before every sample, untimed.")] = "warm",
    graph: Annotated[bool, typer.Option("--graph", help="Time CUDA graph replays; needs a GPU.")] = False,
    max_seconds: Annotated[
        float | None, typer.Option(help="Most seconds of each case's timing, warm-up included.")
    ] = None,
    discard: Annotated[str, typer.Option(help="Samples to leave out: outliers, throttled, or both, by a comma.")] = "",
    run_id: Annotated[str | None, typer.Option(help="Name of the run's folder; default: date and time.")] = None,
    artifacts_dir: ArtifactsDir = Path("artifacts"),
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="An argument of your function: 'a=randn(4096, n, bf16)' or 'dim=-1'; repeatable."),
    ] = None,
    against: Annotated[str | None, typer.Option(help="Baseline of your function: module:function.")] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="A knob or a size of --input: seq_len=1k:16k:x2, m=256:1024:+256, backend=cudnn,flash."),
    ] = None,
    update_expectations: Annotated[
        bool, typer.Option("--update-expectations", help="Record the results as expected of this GPU.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run targets, or a function of yours: verify both sides, prove what ran, time them interleaved, keep everything.

    A function is named as module:function; it gets the tensors of --input.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reads it at its first start
    from utils.bench.documents import to_json
    from utils.bench.expectations import expectations_file, update_file
    from utils.bench.knobs import Sweep
    from utils.bench.report import terminal_remarks, times_table, write_report
    from utils.bench.results import exit_code, status_text
    from utils.bench.run import Options, Runner, new_run_id
    from utils.bench.targets import plan
    from utils.bench.terminal import show_steps
    from utils.machine.device import default_device
    from utils.machine.environment import environment

    words = sys.argv[sys.argv.index("bench") + 1 :] if "bench" in sys.argv else sys.argv[1:]
    names = [part for name in [*(targets or []), *(more or [])] for part in name.split(",") if part]
    given = {"l2": l2, "graph": graph, "warmup": warmup, "iterations": iterations, "max_seconds": max_seconds}
    given["discard"] = discard.split(",") if discard else None
    timing = {name: value for name, value in given.items() if value is not None}
    command = ["labs", "bench", *map(shlex.quote, words)]
    options = Options(profile, timing, new_run_id() if run_id is None else run_id, artifacts_dir, command=command)
    swept = Sweep.read(sweep) if sweep else None
    extra, device = target_extra_arg or [], default_device()
    plans = plan(names, extra, device, os.environ, sweep=swept, inputs=inputs or (), against=against)
    if update_expectations:
        expectations_file(environment()["gpu"])  # raises for a CPU, before anything is timed
    with show_steps() as show:
        runner = Runner(plans, options, device, show)
        try:
            document = runner.run()
        except KeyboardInterrupt:
            typer.echo(f"interrupted: {status_text(runner.document)}; what was done is in {options.folder}.", err=True)
            raise typer.Exit(STOPPED) from None
    if sweep:
        for path in write_report(document, options.folder):
            typer.echo(path, err=True)
    if as_json:
        typer.echo(to_json(document), nl=False)
    else:
        columns, lines = times_table(document)
        if lines:
            show_table(columns, lines)
        for text in terminal_remarks(document):
            typer.echo(text)
    if update_expectations:
        path, changes = update_file(document)
        for line in (*changes, f"recorded in {path}"):
            typer.echo(line, err=as_json)
    profiles = f", profiles in {options.profiles_dir}" if any(case["profiles"] for case in document["cases"]) else ""
    typer.echo(f"{document['status']}: {status_text(document)}; {options.folder}{profiles}", err=True)
    raise typer.Exit(exit_code(document))


@app.command()
def compare(
    a: RunName,
    b: Annotated[str, typer.Argument(help="The run to compare with it.")],
    artifacts_dir: ArtifactsDir = Path("artifacts"),
    output: Annotated[Path | None, typer.Option(help="Also write CSV and Markdown into this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how many times as fast run B is as run A, for each side; other GPUs, shapes and dtypes are refused."""
    from utils.bench.comparing import SEPARATE_RUNS, compare_results, comparison_table, notes, write_comparison
    from utils.bench.results import load_results

    first, second = load_results(a, artifacts_dir), load_results(b, artifacts_dir)
    rows, different = compare_results(first, second), notes(first, second)
    written = [] if output is None else write_comparison(first, second, rows, output)
    if as_json:
        ids = {"a": first["run_id"], "b": second["run_id"]}
        show_json({**ids, "rows": rows, "notes": different, "files": written})
        return
    show_table(*comparison_table(first, second, rows))
    typer.echo(SEPARATE_RUNS)
    if different:
        typer.echo("Also different: " + "; ".join(different) + ".")
    for path in written:
        typer.echo(path)


@app.command()
def report(
    run: RunName,
    artifacts_dir: ArtifactsDir = Path("artifacts"),
    output: Annotated[Path | None, typer.Option(help="Folder to write to; default: the run's own.")] = None,
) -> None:
    """Write a run's CSV and Markdown tables and its plots: latency with intervals, TFLOP/s under the roof."""
    from utils.bench.report import write_report
    from utils.bench.results import find_results, load_results

    document = load_results(run, artifacts_dir)
    written = write_report(document, output or find_results(run, artifacts_dir).parent)
    for path in written:
        typer.echo(path)


@app.command()
def check(run: RunName, artifacts_dir: ArtifactsDir = Path("artifacts"), as_json: AsJson = False) -> None:
    """Check a run against the expectations of its GPU, within 5%; exit status 1 on a regression. It changes nothing."""
    from utils.bench import expectations
    from utils.bench.results import load_results

    document = load_results(run, artifacts_dir)
    path = expectations.expectations_file(document["environment"].get("gpu"))
    rows = expectations.check(document, expectations.load_expectations(path))
    failing = [row for row in rows if row["fails"]]
    if as_json:
        show_json({"expectations": path, "fails": bool(failing), "rows": rows})
    else:
        lines = []
        for row in rows:
            metrics = [row["metrics"].get(name) for name in ("optimized_ms", "baseline_ms", "speedup")]
            words = [
                f"{one['now']['value']:.4g} ({one['expected']['value']:.4g}) {one['judged']}" if one else ""
                for one in metrics
            ]
            lines.append([row["target"], row["workload"], *words, row["verdict"], row["why"]])
        columns = ["Optimized ms (expected)", "Baseline ms", "Speed-up"]
        show_table(["Target", "Workload", *columns, "Verdict", "Why"], lines, wrap=["Why"])
        typer.echo(f"{len(failing)} of {len(rows)} cases fail against {path.name}.")
    raise typer.Exit(FAILED if failing else 0)
