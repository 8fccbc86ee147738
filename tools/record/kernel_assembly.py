"""Compile every Gluon kernel of the course for sm_90a, without a GPU, and record registers, spills and instructions.

    python -m tools.record.kernel_assembly --out build/versions/newest.json
    python -m tools.record.kernel_assembly table build/versions/*.json --out assets/results/kernel_versions.json

A recorded file is that of one environment, with its Triton; `table` puts several side by side. `make test-versions` does both.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tools.record.common import Record, arguments_parser, read_record, to_text
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

    for step, head_dim, mask in itertools.product((1, 2, 3, 4, 5), (64, 128, 256), ("", "causal")):
        name = f"attention step {step}, head dim {head_dim}, {mask or 'full'}"
        yield name, partial(compile_step, step, head_dim, mask=mask)
    for head_dim, variant, mask in (
        (64, "few", "causal"),
        (64, "few", ""),
        (64, "narrow", "causal"),
        (64, "four", "causal"),
        (128, "three", ""),
        (64, "", "packed"),
        (128, "", "window"),
    ):
        words = [f"attention step 5, head dim {head_dim}", mask, variant and f"variant {variant}"]
        yield ", ".join(filter(None, words)), partial(compile_step, 5, head_dim, variant=variant, mask=mask)
    for step in BACKWARD_STEPS:
        for head_dim in (64, 128, 256) if step == 6 else (128,):
            yield f"backward step {step}, head dim {head_dim}", partial(compile_backward, step, head_dim)
    for head_dim, tokens in ((64, 1), (128, 1), (128, 16), (256, 8)):
        tile = choose_tile(Shape(64, 8, 4, tokens, 4096, head_dim), 132)
        yield f"decode, head dim {head_dim}, {tokens} new tokens in groups of 4 heads", partial(compile_decode, tile)
    for plan, dtype in itertools.product(KERNELS, ("bf16", "fp16")):
        yield f"gemm {plan.name}, {dtype}", lambda p=plan, d=dtype: read_assembly(compile_for_hopper(p, d), "gemm")


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
    records = [read_record(file) for file in files]
    records.sort(key=lambda record: [int(part) for part in record["environment"]["triton"].split(".")])
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
        table = to_text(side_by_side(options.files))
        if options.out:
            write_whole(options.out, table)
        print(table)
        return
    options = arguments_parser(__doc__).parse_args()
    record = Record(options, "every Gluon kernel compiled for sm_90a", device="cpu")
    record.fill(kernels(), compile_row, show)


if __name__ == "__main__":
    main()
