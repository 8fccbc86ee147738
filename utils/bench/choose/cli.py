"""`labs bench choose`: which attention backend is best where on this machine, and what the default costs."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from utils.bench.errors import BenchError, check_choice, check_choices
from utils.bench.terminal import (
    STOPPED,
    AsJson,
    CtrlC,
    errors_as_lines,
    progress_bar,
    remember_ctrl_c,
    show_json,
    show_table,
)
from utils.validation import whole_number

if TYPE_CHECKING:
    from utils.bench.targets.sdpa import SdpaWorkload

KINDS = ("training", "prefill", "decode")
HEAD_DIMS = ("64", "128", "256")

Out = Annotated[
    Path,
    typer.Option(
        help="The sweep's file; a sweep that was stopped goes on from it. The choices, a report and a heat map are "
        "written next to it."
    ),
]
Providers = Annotated[
    str, typer.Option(help="Providers of attention in addition to the SDPA backends, such as gluon,cute.")
]
HoldOut = Annotated[int, typer.Option("--hold-out", help="Random shapes in addition to the grid, to test the choices.")]


def choose(
    out: Out = Path("artifacts/choose/sdpa_grid.json"),
    kinds: Annotated[str, typer.Option(help="training, prefill, decode: several with commas.")] = ",".join(KINDS),
    head_dims: Annotated[str, typer.Option("--head-dims", help="Head dimensions, with commas.")] = ",".join(HEAD_DIMS),
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; default: bf16, on a CPU fp32.")] = None,
    providers: Providers = "",
    hold_out: HoldOut = 0,
    seed: Annotated[int, typer.Option(help="Seed of the inputs and of the held-out shapes.")] = 0,
    samples: Annotated[int, typer.Option(help="Timed samples of each provider near the best.")] = 21,
    max_seconds: Annotated[
        float | None, typer.Option("--max-seconds", help="Stop after this time, with what there is.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few shapes of one head dimension and few samples.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time every attention backend over a grid of shapes: who is best where, and what torch's own choice costs."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences torch's profiler, which reads it at its first start
    os.environ.setdefault("MPLBACKEND", "Agg")
    with errors_as_lines(), remember_ctrl_c() as ctrl_c:
        from utils.bench.choose.report import summary
        from utils.bench.choose.timing import shapes_done
        from utils.bench.targets.sdpa import BACKENDS as SDPA_BACKENDS
        from utils.machine.device import default_device

        device = default_device()
        shapes = _shapes(device.type, kinds, head_dims, dtype, hold_out, seed, quick)
        others = _other_providers(providers)
        for name, value, least in (("--samples", samples, 3), ("--hold-out", hold_out, 0), ("--seed", seed, 0)):
            whole_number(name, value, least, BenchError)
        seconds = math.inf if max_seconds is None else max_seconds
        if not seconds > 0:
            raise BenchError(f"--max-seconds is {max_seconds}; it must be above 0.")
        _check_writable(out)
        document = _sweep_with_progress(
            shapes,
            out,
            device,
            ctrl_c,
            providers=(*SDPA_BACKENDS, *others),
            seed=seed,
            samples=min(samples, 7) if quick else samples,
            max_seconds=seconds,
        )
        written = _write(document, out)
    if as_json:
        show_json(summary(document) | {"files": written})
    else:
        _show_choices(document, written["choices"])
    files = ", ".join(map(str, written.values()))
    typer.echo(f"{document['status']}: {shapes_done(document, shapes)} of {len(shapes)} shapes; {files}", err=True)
    if document["status"] == "stopped":
        typer.echo("--max-seconds ended it; the same command goes on from there.", err=True)


def _check_writable(out: Path) -> None:
    """Fail before the timing if the sweep's file could not be written after it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(out)) from None  # the user's name, not the trial's


def _other_providers(text: str) -> list[str]:
    """Return the providers of --providers that are no SDPA backends: the backends are always timed."""
    from utils.attention import BACKENDS
    from utils.bench.targets.sdpa import BACKENDS as SDPA_BACKENDS

    names = check_choices("--providers", text, BACKENDS) if text.strip() else ()
    return [name for name in names if name not in SDPA_BACKENDS]


def _shapes(
    device_type: str, kinds: str, head_dims: str, dtype: str | None, hold_out: int, seed: int, quick: bool
) -> list[tuple[str, SdpaWorkload]]:
    """Make pairs of "grid" or "held-out" and a shape from the command's options."""
    from utils.bench.choose.grid import cpu_grid, gpu_grid, held_out, quick_grid
    from utils.bench.choose.timing import shape_fields
    from utils.bench.workload import DTYPES

    chosen_kinds = check_choices("--kinds", kinds, KINDS)
    dtype = check_choice("--dtype", dtype or ("fp32" if device_type == "cpu" else "bf16"), DTYPES)
    if dtype == "fp16" and device_type == "cpu":
        raise BenchError("--dtype is fp16, whose products run near 1 GFLOP/s on a CPU; use fp32 or bf16.")
    dims = tuple(int(word) for word in check_choices("--head-dims", head_dims, HEAD_DIMS))
    if quick:
        grid = quick_grid(device_type, dims, dtype)
    else:
        grid = cpu_grid(dims, dtype) if device_type == "cpu" else gpu_grid(dims, dtype)
    random_shapes = held_out(hold_out, seed, device_type, dims, dtype, grid) if hold_out else []
    pairs = [*(("grid", shape) for shape in grid), *(("held-out", shape) for shape in random_shapes)]
    return [(which, shape) for which, shape in pairs if shape_fields(shape)["kind"] in chosen_kinds]


def _sweep_with_progress(shapes: list[tuple[str, SdpaWorkload]], out: Path, device, ctrl_c: CtrlC, **options) -> dict:
    """Sweep under a progress bar; Ctrl-C ends the command with a last line and status 130."""
    from utils.bench.choose.timing import load_grid, shapes_done, sweep

    progress = progress_bar(remaining=True)
    task = progress.add_task("starting", total=len(shapes))

    def show_shape(done: int, label: str) -> None:
        if done < len(shapes):
            ctrl_c.raise_again()
        progress.update(task, completed=done, description=label)

    try:
        with progress:
            return sweep(shapes, out, device, on_shape=show_shape, **options)
    except KeyboardInterrupt:
        done = shapes_done(load_grid(out), shapes) if out.exists() else 0
        typer.echo(
            f"interrupted: {done} of {len(shapes)} shapes are in {out}; the same command goes on from there.", err=True
        )
        raise typer.Exit(STOPPED) from None


def _show_choices(document: dict, choices: Path) -> None:
    """Print who is best where, how well the choices hold, and how to use them."""
    from utils.bench.choose.report import group_table, held_out_sentence, summary

    show_table(*group_table(document), title="Who is best where (times: default / best)")
    if held := summary(document)["held_out"]:
        typer.echo(held_out_sentence(held))
    typer.echo(
        f'attention(backend="auto") uses them after use_choices({str(choices)!r}), or with '
        f"LABS_ATTENTION_CHOICES={choices}."
    )


def _write(document: dict, out: Path) -> dict[str, Path]:
    """Write the choices, the report and the heat map next to the sweep."""
    from utils.bench.choose.report import choices_document, markdown, measured_shapes, paths
    from utils.bench.documents import write_json
    from utils.files import write_whole
    from utils.visualization.choices import plot_choices

    written = paths(out)
    write_json(written["choices"], choices_document(document), "points")
    write_whole(written["report"], markdown(document))
    figure, _ = plot_choices(measured_shapes(document, "grid"))
    figure.savefig(written["heatmap"], dpi=130, bbox_inches="tight")
    return written
