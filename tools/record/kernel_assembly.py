"""Compile every Gluon kernel of the course for sm_90a, without a GPU, and record registers, spills and instructions.

    python -m tools.record.kernel_assembly --out build/versions/newest.json
    python -m tools.record.kernel_assembly table build/versions/*.json --out assets/results/kernel_versions.json

A recorded file is that of one environment, with its Triton; `table` puts several side by side. `make test-versions` does both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from tools.record.common import Record, arguments_parser
from utils.files import write_whole
from utils.kernels.offline import Assembly, read_assembly

INSTRUCTIONS = ("HGMMA", "UTMALDG", "UTMASTG", "LDGSTS", "SYNCS", "MUFU.EX2", "BAR.SYNC", "LDL", "STL")


def kernels() -> Iterator[tuple[str, Callable[[], Assembly]]]:
    """Yield the name of each kernel with its variant, and a function that compiles it."""
    from utils.attention.gluon.backward.offline import compile_backward
    from utils.attention.gluon.backward.plan import STEPS as BACKWARD_STEPS
    from utils.attention.gluon.decode.offline import compile_decode
    from utils.attention.gluon.decode.plan import Shape, choose_tile
    from utils.attention.gluon.offline import compile_step
    from utils.kernels.gemm_launch import compile_for_hopper
    from utils.kernels.gemm_plan import KERNELS

    for step in (1, 2, 3, 4, 5):
        for head_dim in (64, 128, 256):
            for mask in ("", "causal"):
                yield (
                    f"attention step {step}, head dim {head_dim}, {mask or 'full'}",
                    lambda step=step, head_dim=head_dim, mask=mask: compile_step(step, head_dim, mask=mask),
                )
    for head_dim, variant, flags in (
        (64, "few", {"mask": "causal"}),
        (64, "few", {}),
        (64, "narrow", {"mask": "causal"}),
        (64, "four", {"mask": "causal"}),
        (128, "three", {}),
        (64, "", {"mask": "packed"}),
        (128, "", {"mask": "window"}),
    ):
        words = ", ".join([*flags.values(), *([f"variant {variant}"] if variant else [])])
        yield (
            f"attention step 5, head dim {head_dim}, {words}" if words else f"attention step 5, head dim {head_dim}",
            lambda head_dim=head_dim, variant=variant, flags=flags: compile_step(5, head_dim, variant=variant, **flags),
        )
    for step in BACKWARD_STEPS:
        for head_dim in (64, 128, 256) if step == 6 else (128,):
            yield (
                f"backward step {step}, head dim {head_dim}",
                lambda step=step, head_dim=head_dim: compile_backward(step, head_dim),
            )
    for head_dim, tokens in ((64, 1), (128, 1), (128, 16), (256, 8)):
        shape = Shape(64, 8, 4, tokens, 4096, head_dim)
        yield (
            f"decode, head dim {head_dim}, {tokens} new tokens in groups of 4 heads",
            lambda shape=shape: compile_decode(choose_tile(shape, 132)),
        )
    for plan in KERNELS:
        for dtype in ("bf16", "fp16"):
            yield (
                f"gemm {plan.name}, {dtype}",
                lambda plan=plan, dtype=dtype: read_assembly(compile_for_hopper(plan, dtype), "gemm"),
            )


def compile_row(point: tuple[str, Callable[[], Assembly]]) -> dict:
    """Compile one kernel and return what its assembly says; a kernel that fails to compile says why."""
    name, build = point
    try:
        assembly = build()
    except Exception as error:  # whatever the compiler raises belongs in the table
        return {"kernel": name, "error": f"{type(error).__name__}: {error}".strip().splitlines()[0]}
    figures = asdict(assembly)
    return {
        "kernel": name,
        **{key: figures[key] for key in ("registers", "spill_bytes", "stack_bytes", "shared_bytes", "warnings")},
        "instructions": {name: assembly.count(rf"\b{name.replace('.', chr(92) + '.')}") for name in INSTRUCTIONS},
    }


def show(row: dict) -> str:
    """Return the line that is printed for a row."""
    if "error" in row:
        return f"{row['kernel']}: {row['error']}"
    return f"{row['kernel']}: {row['registers']} registers, {row['spill_bytes']} bytes spilled"


def side_by_side(files: list[Path]) -> dict:
    """Return one table of several recorded files: a row for each kernel, a column for each Triton."""
    records = sorted(
        (json.loads(file.read_text(encoding="utf-8")) for file in files),
        key=lambda record: [int(part) for part in record["environment"]["triton"].split(".")],
    )
    rows: dict[str, dict] = {}
    for record in records:
        triton = record["environment"]["triton"]
        for row in record["rows"]:
            figures = {key: row[key] for key in ("registers", "spill_bytes", "shared_bytes", "error") if key in row}
            rows.setdefault(row["kernel"], {"kernel": row["kernel"]})[triton] = figures
    return {
        "what": "registers at launch, bytes spilled and bytes of shared memory of each kernel, compiled for sm_90a",
        "environments": [record["environment"] for record in records],
        "rows": list(rows.values()),
    }


def main() -> None:
    """Compile the kernels with this Triton, or put recorded files side by side."""
    if sys.argv[1:2] == ["table"]:
        parser = arguments_parser("Put recorded files side by side.")
        parser.add_argument("files", nargs="+", type=Path)
        options = parser.parse_args(sys.argv[2:])
        table = side_by_side(options.files)
        if options.out:
            write_whole(options.out, json.dumps(table, indent=1) + "\n")
        for row in table["rows"]:
            print(
                row["kernel"],
                *(
                    f"{t}: {f.get('error') or (f['registers'], f['spill_bytes'])}"
                    for t, f in row.items()
                    if t != "kernel"
                ),
                sep="  ",
            )
        return
    options = arguments_parser(__doc__).parse_args()
    record = Record(options.out, "every Gluon kernel compiled for sm_90a", device="cpu")
    record.fill(kernels(), compile_row, show)


if __name__ == "__main__":
    main()
