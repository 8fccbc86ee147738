"""Measure how much of a mask's promise arrives: FlexAttention's paths over masks, block sizes and document lengths.

    python -m tools.record.flex_sweep sweep --out assets/results/cpu/flex_sweep.json      # block size x document length
    python -m tools.record.flex_sweep promise --out assets/results/h200/flex_promise.json # paths x masks
    python -m tools.record.flex_sweep plot --read assets/results/h200/flex_sweep.json --out sweep.svg

The promise of a mask is 1 / block density: so many times faster would the kernel be if its time were proportional to the
blocks that it visits. Each row compares the same path without and with the mask. The calls are interleaved on the same
inputs, and the first two heads of the output are compared with float64 first. `share` is the speed-up over the promise.

The keys of a row: path (the name of the backend in recorded tables: see PATHS), options (kernel options in force), picked
(whether backend="auto" takes this backend), mask, batch, heads, seq_len, head_dim, dtype, doc_span (tokens of a
document), block_size, density, block_density, ideal, ms, dense_ms, speedup, interval, share, error (relative, to
float64), block_mask_ms (the first build in a process also loads torch.compile), compile_s. A path that refuses has `refused`, the
reason, instead.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tools.record.common import Record, arguments_parser, read_record, relative_difference, save_picture
from utils.attention import AttentionUnsupported, Prepared, find_backend, make_problem, masks, prepare, reference
from utils.attention.backends.flex import triton_options
from utils.attention.choosing import rank_backends
from utils.attention.masks.sparsity import Sparsity, sparsity
from utils.attention.problem import NO_OPTIONS
from utils.bench.results import machine_name
from utils.bench.workload import DTYPES
from utils.benchmark.measuring import compare
from utils.machine.device import default_device

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
    doc_span: int | None
    path: str
    block_size: int
    tuned: bool = False
    batch: int = 1


class Bench:
    """Measures points; inputs, dense calls and sparsities are kept, since many points share them."""

    def __init__(self, device: torch.device, shape: tuple, pairs: int) -> None:
        """Keep `shape`, (batch, heads, seq_len, dtype), and the number of interleaved pairs of each comparison."""
        self.device, self.pairs = device, pairs
        _, self.heads, self.length, self.dtype = shape
        self._inputs, self._dense, self._sparsity, self._expected = {}, {}, {}, {}

    def inputs(self, point: Point) -> tuple[torch.Tensor, ...]:
        """Draw q, k and v of a point, (B, H, S, D); the same shape gets the same numbers."""
        key = point.batch, point.head_dim
        if key not in self._inputs:
            generator = torch.Generator().manual_seed(sum(key))
            self._inputs[key] = tuple(
                torch.randn(point.batch, self.heads, self.length, point.head_dim, generator=generator).to(
                    self.device, DTYPES[self.dtype]
                )
                for _ in range(3)
            )
        return self._inputs[key]

    def prepare(self, point: Point, masked: bool) -> Prepared:
        """Prepare the call of a point, with its mask or without one."""
        q, k, v = self.inputs(point)
        mask = masks.by_name(point.mask, point.doc_span) if masked else None
        options = {}
        if point.tuned:
            options["kernel_options"] = triton_options(make_problem(q, k, v, mask_mod=mask), point.block_size)
        name = PATHS[point.path]
        if point.block_size != 128 and "block_size" in find_backend(name).options:
            options["block_size"] = point.block_size
        return prepare(q, k, v, mask_mod=mask, backend=name, **options)

    def dense(self, point: Point) -> Prepared:
        """Prepare the call of a point without its mask, once for all masks."""
        key = point.path, point.tuned, point.batch, point.head_dim
        if key not in self._dense:
            self._dense[key] = self.prepare(point, masked=False)
        return self._dense[key]

    def sparsity(self, point: Point) -> Sparsity:
        """Count the pairs and the blocks that the mask of a point keeps."""
        key = point.mask, point.doc_span, point.block_size
        if key not in self._sparsity:
            self._sparsity[key] = sparsity(
                masks.by_name(point.mask, point.doc_span), self.length, self.length, point.block_size, self.device
            )
        return self._sparsity[key]

    def error(self, point: Point, call: Prepared) -> float:
        """Compare the first heads with float64; raise AssertionError if the relative error is too large."""
        key = point.mask, point.doc_span, point.batch, point.head_dim
        if key not in self._expected:
            first_heads = [x[:1, :CHECKED_HEADS] for x in self.inputs(point)]
            self._expected[key], _ = reference(*first_heads, mask_mod=masks.by_name(point.mask, point.doc_span))
        error = relative_difference(call()[:1, :CHECKED_HEADS], self._expected[key])
        if not error <= ALLOWED_ERROR[self.dtype]:
            raise AssertionError(
                f"{point} is wrong: its relative error is {error:.3g}, and {self.dtype} allows "
                f"{ALLOWED_ERROR[self.dtype]:.3g}."
            )
        return error

    def row(self, point: Point) -> dict:
        """Measure a point: the path with the mask against the same path without it."""
        counts = self.sparsity(point)
        row = asdict(point) | {
            "heads": self.heads,
            "seq_len": self.length,
            "dtype": self.dtype,
            "density": counts.density,
            "block_density": counts.block_density,
            "ideal": counts.ideal_speedup,
        }
        try:
            call, dense = self.prepare(point, masked=True), self.dense(point)
        except AttentionUnsupported as error:
            return row | {"refused": str(error)}
        problem = make_problem(*self.inputs(point), mask_mod=masks.by_name(point.mask, point.doc_span))
        best = next(name for name in rank_backends(problem, NO_OPTIONS) if find_backend(name).support(problem))
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
            "share": pair.speedup / counts.ideal_speedup,
            "error": error,
            "block_mask_ms": 1e3 * call.seconds.get("block_mask", 0.0),
            "compile_s": call.seconds.get("compile"),
            "kernel_mask": call.settings.get("kernel_mask"),
        }


def sweep_points(sizes: tuple) -> list[Point]:
    """List the points of `sweep`: block sizes x document lengths, on the compiled path."""
    _, spans, blocks, head_dims = sizes
    return [
        Point(head_dim, "document", span, "compiled", block)
        for head_dim, span, block in itertools.product(head_dims, spans, blocks)
    ]


def promise_points(sizes: tuple, device: torch.device) -> list[Point]:
    """List the points of `promise`: paths x masks.

    On a GPU the shortest documents come with four times the batch as well, to see what a longer kernel changes.
    """
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


HEADER = (
    f"{'D':>4}{'B':>3} {'mask':<18}{'block':>6} {'path':<18}{'ms':>9}{'dense':>9}{'times':>8}{'ideal':>7}{'share':>7}"
)


def show(row: dict) -> str:
    """Return the line that is printed for a row, under HEADER."""
    mask = row["mask"] + (f" {row['doc_span']}" if row["doc_span"] else "")
    path = row["path"] + (" tuned" if row["tuned"] else "")
    start = f"{row['head_dim']:>4}{row['batch']:>3} {mask:<18}{row['block_size']:>6} {path:<18}"
    if "refused" in row:
        return f"{start} refused: {row['refused']}"
    return (
        f"{start}{row['ms']:>9.4f}{row['dense_ms']:>9.4f}{row['speedup']:>8.2f}{row['ideal']:>7.2f}{row['share']:>7.2f}"
        f"{' picked' if row['picked'] else ''}"
    )


def plot(path: Path, out: Path) -> None:
    """Draw the heat maps of a recorded sweep, one picture for each head dimension."""
    import matplotlib

    matplotlib.use("Agg")
    from utils.visualization import plot_sparsity_sweep

    record = read_record(path)
    head_dims = sorted({row["head_dim"] for row in record["rows"]})
    for head_dim in head_dims:
        rows = [row for row in record["rows"] if row["head_dim"] == head_dim]
        title = f"times as fast as dense, D = {head_dim}\n{machine_name(record)}"
        target = out if len(head_dims) == 1 else out.with_stem(f"{out.stem}_d{head_dim}")
        save_picture(plot_sparsity_sweep(rows, title=title)[0], target)


def main(arguments: list[str] | None = None) -> None:
    """Measure and record a table, or draw a recorded sweep."""
    parser = arguments_parser(__doc__, pairs=15)
    parser.add_argument("table", choices=("sweep", "promise", "plot"))
    parser.add_argument("--read", type=Path, help="plot: the recorded sweep")
    options = parser.parse_args(arguments)
    if options.table == "plot":
        if options.read is None or options.out is None:
            parser.error("plot needs --read, the sweep's JSON file, and --out, the picture.")
        plot(options.read, options.out)
        return
    device = default_device()
    sizes = GPU if device.type == "cuda" else CPU
    points = sweep_points(sizes) if options.table == "sweep" else promise_points(sizes, device)
    bench = Bench(device, sizes[0], options.pairs)
    record = Record(options, options.table, device, pairs=options.pairs)
    print(HEADER)
    record.fill(points, bench.row, show)
    record.finish()


if __name__ == "__main__":
    main()
