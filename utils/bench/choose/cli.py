"""`labs bench choose`: which attention backend is best where on this machine, and what the default costs."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

KINDS = ("training", "prefill", "decode")


def choose(
    out: Annotated[
        Path,
        typer.Option(
            help="The sweep's file; a sweep that was stopped goes on from it. The choices, a "
            "report and a heat map are written beside it."
        ),
    ] = Path("artifacts/choose/sdpa_grid.json"),
    kinds: Annotated[str, typer.Option(help="training, prefill, decode: several with commas.")] = ",".join(KINDS),
    head_dims: Annotated[str, typer.Option("--head-dims", help="Head dimensions, with commas.")] = "64,128,256",
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; default: bf16, on a CPU fp32.")] = None,
    providers: Annotated[
        str,
        typer.Option(
            help="Providers of attention beside the SDPA backends, such as gluon,cute; they are timed forward."
        ),
    ] = "",
    hold_out: Annotated[
        int, typer.Option("--hold-out", help="Random shapes beside the grid, to test the choices.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the inputs and of the held-out shapes.")] = 0,
    samples: Annotated[int, typer.Option(help="Timed samples of each provider near the best.")] = 21,
    max_seconds: Annotated[
        float | None, typer.Option("--max-seconds", help="Stop after this time, with what there is.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few shapes of one head dimension and few samples.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Time every attention backend over a grid of shapes: who is best where, and what torch's own choice costs."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("MPLBACKEND", "Agg")
    from utils.bench.choose import report as choose_report
    from utils.bench.choose.timing import shapes_done, sweep
    from utils.bench.cli import STOPPED, console, errors_as_lines, show_table
    from utils.bench.targets.sdpa import BACKENDS as SDPA_BACKENDS
    from utils.machine.device import default_device

    device, seconds = default_device(), math.inf if max_seconds is None else max_seconds
    with errors_as_lines():
        shapes = _shapes(device.type, kinds, head_dims, dtype, hold_out, seed, quick)
        extra = _providers(providers)
        for name, value, least in (("--samples", samples, 3), ("--hold-out", hold_out, 0), ("--seed", seed, 0)):
            if value < least:
                _wrong(f"{name} is {value}; it must be {least} or more.")
        if not seconds > 0:
            _wrong(f"--max-seconds is {max_seconds}; it must be above 0.")
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        task = progress.add_task("starting", total=len(shapes))
        try:
            with progress:
                document = sweep(
                    shapes,
                    out,
                    device,
                    providers=(*SDPA_BACKENDS, *extra),
                    seed=seed,
                    samples=min(samples, 7) if quick else samples,
                    max_seconds=seconds,
                    on_shape=lambda done, label: progress.update(task, completed=done, description=label),
                )
        except KeyboardInterrupt:
            typer.echo(
                f"interrupted: {_there(out, shapes)} of {len(shapes)} shapes are in {out}; the same command "
                "goes on from there.",
                err=True,
            )
            raise typer.Exit(STOPPED) from None
        written = _write(document, out)
    told = choose_report.summary(document)
    if as_json:
        typer.echo(json.dumps(told | {"files": {name: str(path) for name, path in written.items()}}, indent=1))
    else:
        show_table(*choose_report.group_lines(document), title="Who is best where (times: default / best)")
        if held := told["held_out"]:
            typer.echo(
                f"Held out: within 3% of the best for {held['within_3_percent']} of {held['shapes']} shapes; "
                f"torch's default for {held['default_within_3_percent']}. Default / chosen, geometric mean: "
                f"{held['default_over_chosen']:.4f}."
            )
        typer.echo(
            f'attention(backend="auto") goes by them after use_choices({str(written["choices"])!r}), or with '
            f"LABS_ATTENTION_CHOICES={written['choices']}."
        )
    done = shapes_done(document, shapes)
    typer.echo(
        f"{document['status']}: {done} of {len(shapes)} shapes; {', '.join(map(str, written.values()))}", err=True
    )
    if document["status"] == "stopped":
        typer.echo("--max-seconds ended it; the same command goes on from there.", err=True)


def _wrong(text: str) -> None:
    from utils.bench.errors import BenchError

    raise BenchError(text)


def _words(flag: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    from utils.bench.errors import did_you_mean

    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in words:
        if word not in allowed:
            _wrong(f"{flag} names {word!r}; allowed are {', '.join(allowed)}.{did_you_mean(word, allowed)}")
    return words


def _providers(text: str) -> list[str]:
    from utils.attention import BACKENDS
    from utils.bench.targets.sdpa import BACKENDS as SDPA_BACKENDS

    return [name for name in _words("--providers", text, BACKENDS) if name not in SDPA_BACKENDS]


def _shapes(
    device_type: str, kinds: str, head_dims: str, dtype: str | None, hold_out: int, seed: int, quick: bool
) -> list:
    """("grid" or "held-out", shape) pairs."""
    from utils.bench.choose.grid import cpu_grid, gpu_grid, held_out, quick_grid
    from utils.bench.choose.timing import shape_fields
    from utils.bench.workload import DTYPES

    wanted = _words("--kinds", kinds, KINDS)
    if not wanted:
        _wrong(f"--kinds names nothing; allowed are {', '.join(KINDS)}.")
    dtype = dtype or ("fp32" if device_type == "cpu" else "bf16")
    if dtype not in DTYPES:
        _wrong(f"--dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}.")
    if dtype == "fp16" and device_type == "cpu":
        _wrong("--dtype is fp16, whose products run near 1 GFLOP/s on a CPU; use fp32 or bf16.")
    dims = _words("--head-dims", head_dims, ("64", "128", "256"))
    dims = tuple(int(word) for word in dims) or _wrong("--head-dims names nothing; allowed are 64, 128, 256.")
    grid = (
        quick_grid(device_type, dims, dtype) if quick else (cpu_grid if device_type == "cpu" else gpu_grid)(dims, dtype)
    )
    out = held_out(hold_out, seed, device_type, dims, dtype, grid) if hold_out else []
    return [
        (which, one)
        for which, shapes in (("grid", grid), ("held-out", out))
        for one in shapes
        if shape_fields(one)["kind"] in wanted
    ]


def _there(out: Path, shapes: list) -> int:
    from utils.bench.choose.timing import load_grid, shapes_done

    return shapes_done(load_grid(out), shapes) if out.exists() else 0


def _write(document: dict, out: Path) -> dict[str, Path]:
    """The choices, the report and the heat map beside the sweep."""
    from utils.bench.choose import report as choose_report
    from utils.files import write_whole
    from utils.visualization.choices import plot_choices

    written = choose_report.paths(out)
    write_whole(written["choices"], choose_report.choices_text(choose_report.choices_document(document)))
    write_whole(written["report"], choose_report.markdown(document))
    figure, _ = plot_choices(choose_report.measured_shapes(document, "grid"))
    figure.savefig(written["heatmap"], dpi=130, bbox_inches="tight")
    return written
