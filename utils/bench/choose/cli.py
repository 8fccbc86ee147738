"""`labs bench choose`: which attention backend is best where on this machine, and what the default costs."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import typer

from utils.bench.errors import BenchError, check_choice, check_choices
from utils.bench.terminal import STOPPED, AsJson, errors_as_lines, progress_bar, show_json, show_table
from utils.validation import whole_number

KINDS = ("training", "prefill", "decode")
HEAD_DIMS = ("64", "128", "256")

Out = Annotated[
    Path,
    typer.Option(
        help="The sweep's file; a sweep that was stopped goes on from it. The choices and a report are written next to it."
    ),
]
Providers = Annotated[
    str, typer.Option(help="Backends of attention in addition to the SDPA backends, such as gluon,cute.")
]
MaxSeconds = Annotated[float, typer.Option("--max-seconds", help="Stop after this time, with what there is.")]


def choose(
    out: Out = Path("artifacts/choose/sdpa_grid.json"),
    kinds: Annotated[str, typer.Option(help="training, prefill, decode: several with commas.")] = ",".join(KINDS),
    head_dims: Annotated[str, typer.Option("--head-dims", help="Head dimensions, with commas.")] = ",".join(HEAD_DIMS),
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; default: bf16, on a CPU fp32.")] = None,
    providers: Providers = "",
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    samples: Annotated[int, typer.Option(help="Timed samples of each backend near the best.")] = 21,
    max_seconds: MaxSeconds = math.inf,
    as_json: AsJson = False,
) -> None:
    """Time every attention backend over a grid of shapes: who is best where, and what torch's own choice costs."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences torch's profiler, which reads it at its first start
    with errors_as_lines():
        from utils.attention import BACKENDS
        from utils.bench.choose.grid import shapes
        from utils.bench.choose.report import COLUMNS, by_group, choices_document, group_lines, markdown
        from utils.bench.choose.timing import shape_fields, sweep
        from utils.bench.documents import write_json
        from utils.bench.targets.sdpa import BACKENDS as SDPA_BACKENDS
        from utils.bench.workload import DTYPES
        from utils.files import write_whole
        from utils.machine.device import default_device

        device = default_device()
        chosen_kinds = check_choices("--kinds", kinds, KINDS)
        dtype = check_choice("--dtype", dtype or ("fp32" if device.type == "cpu" else "bf16"), DTYPES)
        if dtype == "fp16" and device.type == "cpu":
            raise BenchError("--dtype is fp16, whose products run near 1 GFLOP/s on a CPU; use fp32 or bf16.")
        dims = [int(word) for word in check_choices("--head-dims", head_dims, HEAD_DIMS)]
        grid = [one for one in shapes(device.type, dims, dtype) if shape_fields(one)["kind"] in chosen_kinds]
        others = check_choices("--providers", providers, BACKENDS) if providers.strip() else ()
        whole_number("--samples", samples, 3, BenchError)
        whole_number("--seed", seed, 0, BenchError)
        if not max_seconds > 0:
            raise BenchError(f"--max-seconds is {max_seconds}; it must be above 0.")
        progress = progress_bar(remaining=True)
        task = progress.add_task("starting", total=len(grid))
        backends = tuple(dict.fromkeys((*SDPA_BACKENDS, *others)))
        try:
            with progress:
                document = sweep(
                    grid,
                    out,
                    device,
                    max_seconds=max_seconds,
                    on_shape=lambda done, label: progress.update(task, completed=done, description=label),
                    backends=backends,
                    samples=samples,
                    seed=seed,
                )
        except KeyboardInterrupt:
            typer.echo(f"interrupted: what was measured is in {out}; the same command goes on from there.", err=True)
            raise typer.Exit(STOPPED) from None
        choices, report = out.with_name(f"{out.stem}_choices.json"), out.with_suffix(".md")
        write_json(choices, choices_document(document), "points")
        write_whole(report, markdown(document))
    if as_json:
        files = {"grid": out, "choices": choices, "report": report}
        show_json({"status": document["status"], "groups": by_group(document), "files": files})
    else:
        show_table(COLUMNS, group_lines(document), title="Who is best where (times: default / best)")
        typer.echo(
            f'attention(backend="auto") uses them after use_choices("{choices}"), or with LABS_ATTENTION_CHOICES.'
        )
    again = "; the same command goes on from there" if document["status"] == "stopped" else ""
    typer.echo(f"{document['status']}: {out}, {choices}, {report}{again}.", err=True)
