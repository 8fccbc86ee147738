"""How much of a mask's promise arrives: FlexAttention's paths over masks, block sizes and document spans.

    python -m tools.record.flex_sweep sweep --out assets/results/cpu/flex_sweep.json      # block size x document span
    python -m tools.record.flex_sweep promise --out assets/results/h200/flex_promise.json # paths x masks
    python -m tools.record.flex_sweep plot --read assets/results/h200/flex_sweep.json --out sweep.svg

The promise of a mask is 1 / block density. Every row compares the same path without and with the mask, calls
interleaved on the same inputs, after the first two heads of the output were held to float64; `share` is the speed-up
over the promise. The file is written after every point.

A row: path (the name that recorded tables use for the backend: see PATHS), options (kernel options in force), picked
(what backend="auto" takes), mask, batch, heads, seq_len, head_dim,
dtype, doc_span, block_size, density, block_density, ideal, ms, dense_ms, speedup, interval, share, error (relative, to
float64), block_mask_ms (the first build in a process loads torch.compile too), compile_s (from inductor's cache where
--warm has filled it); or refused (why) in the place of the measurements.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from utils.attention import AttentionUnsupported, Prepared, find_backend, make_problem, masks, prepare, reference
from utils.attention.backends.flex import triton_options
from utils.attention.choosing import rank_backends
from utils.attention.masks.sparsity import Sparsity, sparsity
from utils.attention.problem import NO_OPTIONS
from utils.bench.workload import DTYPES
from utils.benchmark.measuring import compare
from utils.files import write_whole
from utils.machine.device import default_device
from utils.machine.environment import environment

CHECKED_HEADS = 2
ALLOWED_ERROR = {"fp16": 2e-3, "bf16": 1e-2, "fp32": 2e-6}  # relative, Frobenius, to float64
# Recorded tables name the backends by these older names; `attention` has its own.
PATHS = {
    "eager": "flex_eager",
    "compiled": "flex",
    "cute": "flex_flash",
    "cute_direct": "cute",
    "gluon": "gluon",
    "dense": "naive",
    "dense_compiled": "naive_compiled",
    "sdpa": "sdpa",
}
# (batch, heads, seq_len, dtype), spans, block sizes, head dimensions
CPU = ((1, 4, 1024, "fp32"), (64, 128, 256, 512), (32, 64, 128, 256), (64,))
GPU = ((1, 16, 8192, "bf16"), (256, 512, 1024, 2048, 4096), (64, 128, 256), (64, 128))


@dataclass
class Point:
    """One case of a table."""

    head_dim: int
    mask: str
    span: int | None
    path: str
    block_size: int
    tuned: bool = False
    batch: int = 1


class Bench:
    """Inputs, dense calls and sparsities are kept between points: many points share them."""

    def __init__(self, device: torch.device, shape: tuple, pairs: int):
        self.device, self.pairs = device, pairs
        _, self.heads, self.length, self.dtype = shape
        self._inputs, self._dense, self._counted, self._expected = {}, {}, {}, {}

    def inputs(self, point: Point) -> tuple[torch.Tensor, ...]:
        key = point.batch, point.head_dim
        if key not in self._inputs:
            made = torch.Generator().manual_seed(sum(key))
            self._inputs[key] = tuple(
                torch.randn(point.batch, self.heads, self.length, point.head_dim, generator=made).to(
                    self.device, DTYPES[self.dtype]
                )
                for _ in range(3)
            )
        return self._inputs[key]

    def prepare(self, point: Point, masked: bool) -> Prepared:
        q, k, v = self.inputs(point)
        mask = masks.by_name(point.mask, point.span) if masked else None
        options = {}
        if point.tuned:
            options["kernel_options"] = triton_options(make_problem(q, k, v, mask_mod=mask), point.block_size)
        name = PATHS[point.path]
        if point.block_size != 128 and "block_size" in find_backend(name).options:
            options["block_size"] = point.block_size
        return prepare(q, k, v, mask_mod=mask, backend=name, **options)

    def dense(self, point: Point) -> Prepared:
        key = point.path, point.tuned, point.batch, point.head_dim
        if key not in self._dense:
            self._dense[key] = self.prepare(point, masked=False)
        return self._dense[key]

    def counted(self, point: Point) -> Sparsity:
        key = point.mask, point.span, point.block_size
        if key not in self._counted:
            self._counted[key] = sparsity(
                masks.by_name(point.mask, point.span), self.length, self.length, point.block_size, self.device
            )
        return self._counted[key]

    def error(self, point: Point, call: Prepared) -> float:
        """Relative error of the first heads to float64; too large a one ends the run."""
        key = point.mask, point.span, point.batch, point.head_dim
        if key not in self._expected:
            few = [x[:1, :CHECKED_HEADS] for x in self.inputs(point)]
            self._expected[key], _ = reference(*few, mask_mod=masks.by_name(point.mask, point.span))
        expected = self._expected[key]
        out = call()[:1, :CHECKED_HEADS].double()
        error = float((out - expected).norm() / expected.norm())
        if not error <= ALLOWED_ERROR[self.dtype]:
            raise AssertionError(
                f"{point} is wrong: its relative error is {error:.3g}, and {self.dtype} allows "
                f"{ALLOWED_ERROR[self.dtype]:.3g}."
            )
        return error

    def row(self, point: Point) -> dict:
        """The measured point."""
        counted = self.counted(point)
        row = {
            "path": point.path,
            "tuned": point.tuned,
            "mask": point.mask,
            "batch": point.batch,
            "heads": self.heads,
            "seq_len": self.length,
            "head_dim": point.head_dim,
            "dtype": self.dtype,
            "doc_span": point.span,
            "block_size": point.block_size,
            "density": counted.density,
            "block_density": counted.block_density,
            "ideal": counted.ideal_speedup,
        }
        try:
            call, dense = self.prepare(point, masked=True), self.dense(point)
        except AttentionUnsupported as error:
            return row | {"refused": str(error)}
        problem = make_problem(*self.inputs(point), mask_mod=masks.by_name(point.mask, point.span))
        best = next(name for name in rank_backends(problem, NO_OPTIONS).names if find_backend(name).support(problem))
        error = self.error(point, call)
        pair = compare(dense, call, warmup=5, iterations=self.pairs, labels=("dense", "masked"), device=self.device)
        call.check()
        options = call.settings.get("kernel_options")
        # "auto" lets compiled FlexAttention choose its options: the tuned row is the one that it takes.
        picked = best == PATHS[point.path] and (point.tuned or best != "flex" or not triton_options(problem))
        return row | {
            "options": options,
            "picked": picked and point.block_size == 128,
            "ms": pair.b.median_ms,
            "dense_ms": pair.a.median_ms,
            "speedup": pair.speedup,
            "interval": list(pair.interval),
            "share": pair.speedup / counted.ideal_speedup,
            "error": error,
            "block_mask_ms": 1e3 * call.seconds.get("block_mask", 0.0),
            "compile_s": call.seconds.get("compile"),
            "kernel_mask": call.settings.get("kernel_mask"),
        }

    def cute_against_triton(self, head_dim: int, mask: str, span: int | None) -> dict:
        """How many times as fast the CuTe path is as the Triton path, both under one mask, interleaved."""
        triton, cute = (
            self.prepare(Point(head_dim, mask, span, path, 128), masked=True) for path in ("compiled", "cute")
        )
        pair = compare(triton, cute, warmup=5, iterations=self.pairs, labels=("compiled", "cute"), device=self.device)
        return {
            "head_dim": head_dim,
            "mask": mask,
            "doc_span": span,
            "compiled_ms": pair.a.median_ms,
            "cute_ms": pair.b.median_ms,
            "ratio": pair.speedup,
            "interval": list(pair.interval),
        }


def sweep_points(sizes: tuple) -> list[Point]:
    """Block size x document span, on the compiled path."""
    _, spans, blocks, head_dims = sizes
    return [
        Point(head_dim, "document", span, "compiled", block)
        for head_dim, span, block in itertools.product(head_dims, spans, blocks)
    ]


def promise_points(sizes: tuple, device: torch.device) -> list[Point]:
    """Paths x masks. On a GPU also four times the batch at the shortest documents: what a longer kernel changes."""
    (_, _, length, _), _, _, head_dims = sizes
    spans = (length // 8, length // 4, length // 2)
    cases = [("causal", None, 1), *(("document", span, 1) for span in spans)]
    paths = [("compiled", False)]
    if device.type == "cuda":
        cases.append(("document", spans[0], 4))
        paths += [("compiled", True), ("cute", False), ("cute_direct", False), ("gluon", False)]
    return [
        Point(head_dim, mask, span, path, 128, tuned, batch)
        for head_dim in head_dims
        for mask, span, batch in cases
        for path, tuned in paths
        if path != "cute_direct" or mask == "causal"
    ]


def table(rows: list[dict]) -> str:
    """The rows for the eye."""
    lines = [
        f"{'D':>4}{'B':>3} {'mask':<18}{'block':>6} {'path':<18}{'ms':>9}{'dense':>9}{'times':>8}{'ideal':>7}"
        f"{'share':>7}"
    ]
    for row in rows:
        mask = row["mask"] + (f" {row['doc_span']}" if row["doc_span"] else "")
        path = row["path"] + (" tuned" if row["tuned"] else "")
        head = f"{row['head_dim']:>4}{row['batch']:>3} {mask:<18}{row['block_size']:>6} {path:<18}"
        lines.append(
            f"{head} refused: {row['refused']}"
            if "refused" in row
            else f"{head}{row['ms']:>9.4f}{row['dense_ms']:>9.4f}{row['speedup']:>8.2f}{row['ideal']:>7.2f}"
            f"{row['share']:>7.2f}{' picked' if row['picked'] else ''}"
        )
    return "\n".join(lines)


def plot(record: dict, out: Path) -> None:
    """The heat map of a sweep, a row of two for each head dimension."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from utils.visualization import plot_sparsity_sweep

    head_dims = sorted({row["head_dim"] for row in record["rows"]})
    machine = record["environment"].get("gpu") or record["environment"].get("cpu") or "CPU"
    for head_dim in head_dims:
        figure, _ = plot_sparsity_sweep(
            [row for row in record["rows"] if row["head_dim"] == head_dim],
            title=f"times as fast as dense, D = {head_dim}\n{machine}",
        )
        target = out if len(head_dims) == 1 else out.with_stem(f"{out.stem}_d{head_dim}")
        figure.savefig(target)
        plt.close(figure)
        print(target)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("sweep", "promise", "plot"))
    parser.add_argument("--out", type=Path, required=True, help="JSON file; plot: the picture")
    parser.add_argument("--read", type=Path, help="plot: the recorded sweep")
    parser.add_argument("--pairs", type=int, default=15, help="interleaved pairs of a comparison")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time, with what there is")
    parser.add_argument("--head-dims", help="with commas, instead of the machine's own")
    parser.add_argument("--warm", help="I/N: only compile every N-th point, so that N processes fill inductor's cache")
    args = parser.parse_args(arguments)
    if args.what == "plot":
        if args.read is None:
            parser.error("plot needs --read, the sweep's JSON file.")
        plot(json.loads(args.read.read_text()), args.out)
        return
    device = default_device()
    sizes = GPU if device.type == "cuda" else CPU
    if args.head_dims:
        sizes = (*sizes[:3], tuple(int(x) for x in args.head_dims.split(",")))
    points = sweep_points(sizes) if args.what == "sweep" else promise_points(sizes, device)
    bench, began = Bench(device, sizes[0], args.pairs), time.monotonic()
    if args.warm:
        first, step = (int(x) for x in args.warm.split("/"))
        jobs = {(point.path, point.tuned, point.head_dim, point.batch, None): (point, False) for point in points}
        jobs |= {(*vars(point).values(), 0): (point, True) for point in points}
        for point, masked in list(jobs.values())[first::step]:
            try:
                bench.prepare(point, masked)
            except AttentionUnsupported:
                continue
        return
    record = {"what": args.what, "environment": environment(device), "pairs": args.pairs, "complete": False, "rows": []}
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        write_whole(args.out, json.dumps(record, indent=1, default=str))

    for point in points:
        if time.monotonic() - began > args.seconds:
            print(f"stopped after {args.seconds:g} s, before the table was complete")
            break
        record["rows"].append(bench.row(point))
        save()
    else:
        if args.what == "promise" and device.type == "cuda":
            cases = [
                (head_dim, mask, span)
                for head_dim in sizes[3]
                for mask, span in (("causal", None), ("document", sizes[0][2] // 8))
            ]
            record["cute_against_compiled"] = []
            for case in cases:
                record["cute_against_compiled"].append(bench.cute_against_triton(*case))
                save()
        record["complete"] = True
    save()
    print(table(record["rows"]))
    for row in record.get("cute_against_compiled", []):
        print(
            f"D={row['head_dim']} {row['mask']} {row['doc_span'] or ''}: cute is {row['ratio']:.2f}x as fast as "
            f"compiled [{row['interval'][0]:.2f}, {row['interval'][1]:.2f}]"
        )


if __name__ == "__main__":
    main()
