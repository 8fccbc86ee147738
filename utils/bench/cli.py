"""`labs bench`: list-targets, run, compare, report, check."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from utils.bench.choose.cli import choose
from utils.bench.errors import BenchError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Benchmarks with a baseline and an optimized side: list, run, compare, report, check.",
)

ArtifactsDir = Annotated[Path, typer.Option("--artifacts-dir", help="Where runs are kept, each in a folder of its id.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
USAGE, FAILED, STOPPED = 2, 1, 130


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """A BenchError is bad input: one clear line on standard error and exit status 2."""
    try:
        yield
    except BenchError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(USAGE) from None


def console(stderr: bool = False):
    """A rich console; as wide as its contents when the output is no terminal, so that no cell is cut."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 200, highlight=False)


def show_table(columns: list[str], lines: list[list[str]], title: str | None = None) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name == "Target")
    for line in lines:
        table.add_row(*(escape(str(value)) for value in line))
    console().print(table)


@app.command("list-targets")
def list_targets(
    chapter: Annotated[str | None, typer.Option(help="One chapter, such as labs/flexattention.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the targets, their two sides, their flags, and whether each runs on this machine."""
    from utils.bench.listing import describe_targets

    with errors_as_lines():
        described = describe_targets(chapter)
    if as_json:
        typer.echo(json.dumps(described, indent=1))
        return
    show_table(
        ["Target", "Baseline", "Optimized", "Here"],
        [
            [row["target"], row["baseline"], row["optimized"], "yes" if row["runs"] else f"no: {row['reason']}"]
            for row in described
        ],
    )
    show_table(
        ["Target", "Flag", "Default here", "Allowed", "Meaning"],
        [
            [row["target"] if number == 0 else "", f"--{knob['name']}", knob["default"], knob["allowed"], knob["help"]]
            for row in described
            for number, knob in enumerate(row["knobs"])
        ],
        title="Flags, for --target-extra-arg 'TARGET=--flag value'",
    )


@app.command()
def run(
    targets: Annotated[
        list[str] | None,
        typer.Option("--targets", help="A target, one side (chapter:baseline_x), or a chapter; repeat, or use commas."),
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="[TARGET]...", help="Further targets.")] = None,
    profile: Annotated[str, typer.Option(help="none, minimal (trace, nsys), roofline or deep_dive (ncu).")] = "none",
    target_extra_arg: Annotated[
        list[str] | None,
        typer.Option("--target-extra-arg", help="'TARGET=--flag value ...', repeatable; list-targets shows the flags."),
    ] = None,
    iterations: Annotated[int | None, typer.Option(help="Timed samples of each side; default: the target's.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Calls before the timing; default: the target's.")] = None,
    l2: Annotated[str, typer.Option(help="warm, or cold: the cache is flushed before every sample, untimed.")] = "warm",
    graph: Annotated[bool, typer.Option("--graph", help="Time CUDA graph replays; needs a GPU.")] = False,
    target_interval: Annotated[
        float | None,
        typer.Option("--target-interval", help="Sample on until the interval is plus or minus this share: 0.01 is 1%."),
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option("--max-seconds", help="Time budget of each case's timing, warm-up included.")
    ] = None,
    run_id: Annotated[str | None, typer.Option(help="Name of the run's folder; default: date and time.")] = None,
    artifacts_dir: ArtifactsDir = Path("artifacts"),
    format: Annotated[str, typer.Option(help="Files to write: json, markdown or both.")] = "both",
    update_expectations: Annotated[
        bool,
        typer.Option(
            "--update-expectations", help="Record the results as what this GPU is to do; old values are kept."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run targets: verify both sides, prove what ran, time them interleaved, keep everything under artifacts/."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own chatter; read when it first starts
    from utils.bench import expectations
    from utils.bench import results as res
    from utils.bench.run import STEPS, Interrupted, Options, Runner, counts, exit_code
    from utils.bench.targets import plan
    from utils.machine.device import default_device

    names = [part for name in [*(targets or []), *(more or [])] for part in name.split(",") if part]
    options = Options(
        profile=profile,
        iterations=iterations,
        warmup=warmup,
        l2=l2,
        graph=graph,
        target_interval=target_interval,
        max_seconds=max_seconds,
        run_id=run_id,
        artifacts_dir=artifacts_dir,
        format=format,
        command=["labs", "bench", *_command_line()],
    )
    device = default_device()
    with errors_as_lines():
        plans = plan(names, target_extra_arg or [], device, os.environ)
        if update_expectations:
            from utils.machine.environment import environment

            expectations.expectations_file(environment(device)["gpu"])
            if alone := [one.target.name for one in plans if len(one.sides) < 2]:
                raise BenchError(
                    f"--update-expectations records both sides and their ratio, and {', '.join(alone)} is "
                    "to run on one side alone: name the target without baseline_ or optimized_."
                )
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            console=console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        cases = [case for one in plans for case in one.cases]
        task = progress.add_task("starting", total=len(cases) * len(STEPS))

        def on_step(case, step: str) -> None:
            index = next(i for i, one in enumerate(cases) if one is case)
            progress.update(
                task,
                completed=index * len(STEPS) + STEPS.index(step),
                description=f"{case.target} {case.label}: {step}",
            )

        runner = Runner(plans, options, device, on_step)
        try:
            with progress:
                document = runner.run()
        except Interrupted as stop:
            typer.echo(f"interrupted: {_told(counts(stop.document))}; what was done is in {runner.folder}.", err=True)
            raise typer.Exit(STOPPED) from None
    if as_json:
        typer.echo(res.to_json(document), nl=False)
    else:
        show_run(document)
    if update_expectations:
        with errors_as_lines():
            path, changes = expectations.update_file(document)
        for change in changes:
            typer.echo(change, err=as_json)
        typer.echo(f"recorded in {path}", err=as_json)
    typer.echo(f"{document['status']}: {_told(counts(document))}; {runner.folder}", err=True)
    raise typer.Exit(exit_code(document))


def _command_line() -> list[str]:
    """The arguments after `bench`, quoted, as they were typed."""
    words = sys.argv[1:]
    if "bench" in words:
        words = words[words.index("bench") + 1 :]
    return [shlex.quote(word) for word in words]


def _told(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {status}" for status, number in counts.items()) or "no case ran"


def show_run(document: dict) -> None:
    """The run as a table: medians with intervals, what ran, the speed-up; then refusals and failures."""
    from utils.bench.report import memory_text, options_text, with_interval
    from utils.benchmark.result import format_ms

    lines, said = [], {}
    for case in document["cases"]:
        for side, record in case["sides"].items():
            low, high = record["interval_ms"]
            pair = case["comparison"] if side == "optimized" else None
            speedup = "" if pair is None else f"{with_interval(pair['speedup'], *pair['interval'])} {pair['verdict']}"
            lines.append(
                [
                    case["target"],
                    case["label"],
                    f"{side}: {case['ran'][side]['provider']}",
                    f"{format_ms(record['median_ms'])} [{format_ms(low)}, {format_ms(high)}]",
                    f"{record['tflops']:.3g}",
                    "-" if record["roof_share"] is None else f"{record['roof_share']:.1%}",
                    speedup,
                    options_text(case),
                ]
            )
        for text in ([case["reason"]] if case["reason"] else []) + case["notes"]:
            said.setdefault((case["target"], case["status"], text), []).append(case["label"])
    if lines:
        show_table(
            ["Target", "Workload", "Side: ran", "Median [95%]", "TFLOP/s", "Of roof", "Speed-up", "Options"], lines
        )
    for case in document["cases"]:
        for side, ran in case["ran"].items():
            if memory := memory_text(ran):
                launches = f"{ran['launches']} launches, " if ran["launches"] else ""
                console().print(
                    f"{case['label']} {side}: {ran['provider']}: {launches}{memory}", markup=False, soft_wrap=True
                )
    for (target, status, text), labels in said.items():
        console().print(f"{target} ({'; '.join(labels)}) {status}: {text}", markup=False, soft_wrap=True)


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="A run id, its folder, or a results file.")],
    b: Annotated[str, typer.Argument(help="The run to hold against it.")],
    artifacts_dir: ArtifactsDir = Path("artifacts"),
    output: Annotated[Path | None, typer.Option(help="Also write CSV, Markdown and a plot into this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how many times as fast run B is as run A, side by side; other GPUs, shapes and dtypes are refused."""
    from utils.bench.comparing import compare_results, notes
    from utils.bench.report import SEPARATE_RUNS, with_interval, write_comparison
    from utils.bench.results import load_results
    from utils.benchmark.result import format_ms

    os.environ.setdefault("MPLBACKEND", "Agg")
    with errors_as_lines():
        first, second = load_results(a, artifacts_dir), load_results(b, artifacts_dir)
        rows = compare_results(first, second)
    told = notes(first, second)
    written = [] if output is None else write_comparison(first, second, rows, told, output)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "a": first["run_id"],
                    "b": second["run_id"],
                    "rows": rows,
                    "notes": told,
                    "files": [str(path) for path in written],
                },
                indent=1,
            )
        )
        return
    show_table(
        ["Target", "Workload", "Side", f"A: {first['run_id']}", f"B: {second['run_id']}", "B over A", "Other knobs"],
        [
            [
                row["target"],
                row["workload"],
                row["side"],
                f"{row['a_ran']} {format_ms(row['a_ms'])}",
                f"{row['b_ran']} {format_ms(row['b_ms'])}",
                f"{with_interval(row['speedup'], *row['interval'])} {row['verdict']}",
                "; ".join(row["knobs"]),
            ]
            for row in rows
        ],
    )
    typer.echo(SEPARATE_RUNS)
    if told:
        typer.echo("Also different: " + "; ".join(told) + ".")
    for path in written:
        typer.echo(path)


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="A run id, its folder, or a results file.")],
    artifacts_dir: ArtifactsDir = Path("artifacts"),
    output: Annotated[Path | None, typer.Option(help="Folder to write to; default: the run's own.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's CSV and Markdown tables and its plots: latency with intervals, TFLOP/s under the roof."""
    from utils.bench.report import write_report
    from utils.bench.results import find_results, load_results

    os.environ.setdefault("MPLBACKEND", "Agg")
    with errors_as_lines():
        document = load_results(run, artifacts_dir)
        written = write_report(document, output or find_results(run, artifacts_dir).parent)
    if as_json:
        typer.echo(json.dumps({"run_id": document["run_id"], "files": [str(path) for path in written]}, indent=1))
    else:
        for path in written:
            typer.echo(path)


@app.command()
def check(
    run: Annotated[str, typer.Argument(help="A run id, its folder, or a results file.")],
    artifacts_dir: ArtifactsDir = Path("artifacts"),
    tolerance: Annotated[float, typer.Option(help="How far beyond the stored interval counts, 0.05 is 5%.")] = 0.05,
    as_json: AsJson = False,
) -> None:
    """Hold a run against what its GPU is expected to do; exit status 1 on a regression. It changes nothing."""
    from utils.bench import expectations
    from utils.bench.results import load_results

    with errors_as_lines():
        if not 0.0 <= tolerance < 1.0:
            raise BenchError(f"--tolerance is {tolerance}; it is a share, from 0 to 1: 0.05 is 5%.")
        document = load_results(run, artifacts_dir)
        path = expectations.expectations_file(document["environment"].get("gpu"))
        rows = expectations.check(document, expectations.load_expectations(path), tolerance)
    failing = [row for row in rows if row["fails"]]
    if as_json:
        typer.echo(json.dumps({"expectations": str(path), "fails": bool(failing), "rows": rows}, indent=1))
    else:

        def told(row: dict, name: str) -> str:
            metric = row["metrics"].get(name)
            return (
                ""
                if metric is None
                else (f"{metric['now']['value']:.4g} ({metric['expected']['value']:.4g}) {metric['judged']}")
            )

        show_table(
            ["Target", "Workload", "Optimized ms (expected)", "Baseline ms", "Speed-up", "Verdict", "Why"],
            [
                [
                    row["target"],
                    row["workload"],
                    told(row, "optimized_ms"),
                    told(row, "baseline_ms"),
                    told(row, "speedup"),
                    row["verdict"],
                    row["why"],
                ]
                for row in rows
            ],
        )
        typer.echo(f"{len(failing)} of {len(rows)} cases fail against {path.name}.")
    raise typer.Exit(FAILED if failing else 0)


app.command()(choose)

if __name__ == "__main__":
    app()
