"""Time the FP8 GEMM against torch._scaled_mm (cuBLAS): its configurations at some shapes, or its choice at 20 others.

    python -m tools.record.gemm_fp8 shapes --out assets/results/h200/gemm_fp8.json
    python -m tools.record.gemm_fp8 choice --out assets/results/h200/gemm_fp8_choice.json
    python -m tools.record.gemm_fp8 fit --read assets/results/h200/gemm_fp8_choice.json
    python -m tools.record.gemm_fp8 errors --out assets/results/h200/gemm_fp8_errors.json

M, N and K are multiples of 16, drawn evenly in their logarithm from 512 to 16,384, and 4096 and 8192 cubed stand behind
them. `shapes` times one scale for a matrix and one for each row, and both ways to add, with bf16 C; beside each call, launches
that differ from it in one thing (`variants`). `choice` times the configurations that the model ranks first, at shapes of another seed, and `fit` fits the model to them. `errors` compares both
libraries with float64 as K grows, with fp16 C, whose rounding hides less. Calls are interleaved in one process, L2 warm.
Ratio: time of torch._scaled_mm with the same way to add / time of the kernel.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from tools.record.common import Record, arguments_parser, in_many_processes, read_record
from tools.record.gemm_choice_fit import fit
from tools.record.gemm_shapes import summary
from utils.benchmark.measuring import measure_together
from utils.benchmark.profiling import launched
from utils.kernels.gemm_fp8 import gemm_fp8, quantize_fp8

SEED, SHAPES = 16, 20
CHOICE_SEED, CHOICE_SHAPES = 7, 14
SMALLEST, LARGEST = 512, 16384
MOST_FLOPS = 8e12
SQUARES = (4096, 8192)
SMS = 132
MOST_ERROR = 1e-2  # of C in bf16 as the tensor cores add it; 2.6e-3 at K = 8192
ROW_SECONDS = 0.35
OTHERS = ("waiting_us", "before_us", "alone_us", "parity_us")
PROCESSES = 15


def draw_shapes(seed: int, count: int) -> list[tuple[int, int, int]]:
    """Return `count` random shapes (M, N, K) and the squares."""
    draw, shapes = random.Random(seed), []
    while len(shapes) < count:
        m, n, k = (16 * round(math.exp(draw.uniform(math.log(SMALLEST), math.log(LARGEST))) / 16) for _ in "mnk")
        if 2.0 * m * n * k <= MOST_FLOPS:
            shapes.append((m, n, k))
    return shapes + [(size, size, size) for size in SQUARES]


def operands(shape: tuple[int, int, int], by: str, positive: bool = False) -> tuple[torch.Tensor, ...]:
    """Draw A (M, K), B (K, N) column-major and their scales on the GPU, from normal or, `positive`, uniform numbers."""
    m, n, k = shape
    draw = torch.rand if positive else torch.randn
    a, scale_a = quantize_fp8(draw(m, k, device="cuda", dtype=torch.bfloat16), by)
    w, scale_w = quantize_fp8(draw(n, k, device="cuda", dtype=torch.bfloat16), by)
    return a, w.T, scale_a, scale_w.T if by == "row" else scale_w


def torch_call(given: tuple[torch.Tensor, ...], fast: bool, out_dtype=torch.bfloat16) -> Callable[[], torch.Tensor]:
    """Return torch's product of the same operands."""
    a, b, scale_a, scale_b = given
    return lambda: torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=fast)


def relative_error(c: torch.Tensor, given: tuple[torch.Tensor, ...], rows: int = 64) -> float:
    """Return the error of the first and last rows of C against their float64 product."""
    a, b, scale_a, scale_b = given
    half = min(rows, len(a)) // 2
    chosen = [*range(half), *range(len(a) - half, len(a))]
    left = a[chosen].double() * (scale_a[chosen] if scale_a.numel() > 1 else scale_a).double()
    exact = left @ b.double() * scale_b.double()
    return ((c[chosen].double() - exact).norm() / exact.norm()).item()


def compile_one(job: tuple) -> tuple[float, bool]:
    """Compile and run a configuration: relative error, and whether the same bits came twice."""
    from utils.kernels import gemm_fp8_launch

    config, by = job
    given = operands((3 * config.block_m - 8, 5 * config.block_n - 8, 128 * 17 - 16), by)
    c = torch.empty(len(given[0]), given[1].shape[1], device="cuda", dtype=torch.bfloat16)
    again = c.clone()
    for out in (c, again):
        gemm_fp8_launch.launch(*given, out, not config.promote, config)
    return relative_error(c, given), torch.equal(c, again)


def compile_all(jobs: set[tuple]) -> dict[str, str]:
    """Compile configurations in many processes; return those that are wrong, and what is wrong."""
    began = time.monotonic()
    wrong, listed = {}, sorted(jobs, key=str)
    for job, (answer, problem) in zip(listed, in_many_processes(compile_one, listed, PROCESSES), strict=True):
        if problem or answer[0] > 4e-3 or not answer[1]:
            wrong[job[0].name] = problem or f"error {answer[0]:.3g}, same bits twice: {answer[1]}"
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - began:.0f} s; wrong: {wrong or 'none'}", flush=True)
    return wrong


def late_rows(shape: tuple[int, int, int]) -> tuple[int, int]:
    """Return for A and for B whether every second row starts at an odd multiple of 16 bytes: both rows have K bytes."""
    late = int(shape[2] % 32 > 0)
    return late, late


def chosen(shape: tuple[int, int, int], fast: bool):
    """Return the configuration that a call takes at a shape."""
    from utils.kernels.gemm_fp8_plan import choose

    return choose(*shape, SMS, fast, late_rows(shape))


def ranked(shape: tuple[int, int, int], fast: bool) -> list:
    """Return what `choice` times at a shape: of each kind of configuration those that the model ranks first."""
    from utils.kernels import gemm_fp8_plan

    def expected(config) -> float:
        return gemm_fp8_plan.estimate(*shape, config, SMS, late_rows(shape))

    found = sorted(gemm_fp8_plan.candidates(*shape, SMS, fast, late_rows(shape)), key=expected)
    width = {(config.block_m, config.block_n) for config in gemm_fp8_plan.FAST_WIDTHS}
    of_width = lambda config: (config.block_m, config.block_n) in width  # noqa: E731
    kinds = (
        (2, lambda x: not (x.multicast or x.pairs or of_width(x))),
        (3, lambda x: x.multicast and not x.pairs and not of_width(x)),
        (1, lambda x: x.pairs and not x.multicast),
        (2, lambda x: x.pairs and x.multicast),
        (1, lambda x: of_width(x) and not x.multicast),
        (2, lambda x: of_width(x) and x.multicast),
    )
    kept: list = []
    for count, of_kind in kinds:
        tiles: dict = {}
        for config in found:
            if of_kind(config):
                tiles.setdefault(replace(config, split=1), config)
        kept += [*tiles.values()][:count]
    first = kept[0]
    waiting = replace(first, early=False, prefetch=False, lean=False)
    return [*dict.fromkeys([waiting, replace(first, prefetch=False, lean=False), *kept])]


def choice_row(point: tuple, wrong: dict[str, str]) -> dict:
    """Time the ranked configurations and torch at a shape."""
    from utils.kernels import gemm_fp8_launch

    shape, fast = point
    given = operands(shape, "tensor")
    c = torch.empty(shape[0], shape[1], device="cuda", dtype=torch.bfloat16)
    configs = [config for config in ranked(shape, fast) if config.name not in wrong]
    launches = []
    for config in configs:
        launches.append(gemm_fp8_launch.launch(*given, c, fast, config))
        if (error := relative_error(c, given)) > MOST_ERROR:
            raise RuntimeError(f"{config.name} at {shape}: error {error:.3g}")
    calls = [torch_call(given, fast), *(lambda launch=launch: launch(*given) for launch in launches)]
    names = [config.name for config in configs]
    timed = measure_together(
        calls, labels=["torch", *names], warmup=2, iterations=9, device="cuda", l2="warm", max_seconds=0.9
    )
    torch_us, *times = (1e3 * each.median_ms for each in timed)
    m, n, k = shape
    return {"m": m, "n": n, "k": k, "fast": fast, "torch_us": torch_us, "times": [*zip(names, times, strict=True)]}


def show_choice(row: dict) -> str:
    """Return the line that is printed for a row of `choice`."""
    times = "  ".join(f"{name} {row['torch_us'] / us:.3f}" for name, us in sorted(row["times"], key=lambda x: x[1]))
    way = "fast    " if row["fast"] else "promoted"
    return f"{row['m']:>6} x {row['n']:>6} x {row['k']:>6} {way} torch {row['torch_us']:8.1f} us: {times}"


def times_of(row: dict) -> list[tuple]:
    """Return the configurations of a row of `choice` that the kernel still has, each with its measured time."""
    from utils.kernels import gemm_fp8_plan
    from utils.kernels.gemm_plan import SPLITS

    known = {
        config.name: config
        for tile in (*gemm_fp8_plan.FAST_CONFIGS, *gemm_fp8_plan.FAST_WIDTHS, *gemm_fp8_plan.PROMOTED_CONFIGS)
        for split in SPLITS
        for pairs in (False, True)
        for multicast in ("", "A", "B")
        for config in [replace(tile, split=split, pairs=pairs, multicast=multicast)]
    }
    return [(known[name], us) for name, us in row["times"] if name in known]


def estimates(row: dict, cost) -> list[tuple[float, float]]:
    """Return for each configuration of a row the model's time and the measured one."""
    from utils.kernels import gemm_fp8_plan

    shape = row["m"], row["n"], row["k"]
    model = functools.partial(gemm_fp8_plan.estimate, *shape, sms=SMS, late=late_rows(shape), cost=cost)
    return [(model(config=config), us) for config, us in times_of(row)]


def model_error(rows: list[dict], cost) -> float:
    """Return the mean square of log(estimate / measured)."""
    logs = [math.log(model / us) for row in rows for model, us in estimates(row, cost)]
    return sum(value * value for value in logs) / len(logs)


def print_fit(path: Path) -> None:
    """Fit the model's constants to a record of `choice`, and print how its choice does at the same shapes."""
    from utils.kernels.gemm_fp8_plan import COST

    record = read_record(path)["rows"]
    for fast in (True, False):
        rows = [row for row in record if row["fast"] == fast]
        fitted = fit(rows, COST, error=model_error)
        # Each half of the shapes is judged by constants that were fitted to the other half.
        halves = [(rows[i::2], fit(rows[1 - i :: 2], COST, error=model_error)) for i in (0, 1)]
        print("fast" if fast else "promoted", {x: float(f"{y:.4g}") for x, y in asdict(fitted).items()})
        for what, parts in (
            ("fitted", [(rows, fitted)]),
            ("fitted to the others", halves),
            ("present", [(rows, COST)]),
        ):
            error = sum(model_error(*part) * len(part[0]) for part in parts) / len(rows)
            found = [(row, min(estimates(row, cost))[1]) for part, cost in parts for row in part]
            best = [min(us for _, us in times_of(row)) / us for row, us in found]
            mean = math.exp(sum(map(math.log, best)) / len(best))
            print(f"  {what}: off by {math.sqrt(error):.1%}, best / chosen {mean:.3f}, worst {min(best):.3f}")
            print(f"    torch / chosen: {summary([{'ratio': row['torch_us'] / us} for row, us in found])}")


def simplest(shape: tuple[int, int, int], fast: bool):
    """Return the configuration that the model ranks first among those of powers of two and 192, alone, with all rows."""
    from utils.kernels import gemm_fp8_plan

    tiles = gemm_fp8_plan.FAST_CONFIGS if fast else gemm_fp8_plan.PROMOTED_CONFIGS
    late = late_rows(shape)
    found = gemm_fp8_plan.in_parts(tiles, *shape, SMS)
    return min(found, key=lambda config: gemm_fp8_plan.estimate(*shape, config, SMS, late))


def variants(shape: tuple[int, int, int], by: str, fast: bool) -> dict:
    """Return what `shapes` times: the configuration that a call takes, and others that differ from it in one thing."""
    config = chosen(shape, fast)
    found = {"": config}
    if by == "tensor":
        found["waiting"] = replace(config, early=False, prefetch=False, lean=False)
        if (before := simplest(shape, fast)) != config:
            found["before"] = before
        if config.multicast:
            found["alone"] = replace(config, multicast="")
        if late_rows(shape)[0] and shape[0] % 2 == 0:
            found["parity"] = replace(config, pairs=not config.pairs)
    return found


def shape_row(point: tuple, pairs: int, wrong: dict[str, str]) -> dict:
    """Time the chosen configuration, and others like it, against torch at a shape, by one kind of scales and one way to add."""
    from utils.kernels import gemm_fp8_launch

    shape, by, fast = point
    given = operands(shape, by)
    theirs = torch_call(given, fast)
    m, n, k = shape
    c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    configs = {name: config for name, config in variants(*point).items() if config.name not in wrong}
    row = {"m": m, "n": n, "k": k, "scales": by, "fast": fast, "config": configs[""].name}
    row["error"] = relative_error(gemm_fp8(*given, fast=fast), given)
    row["torch_error"] = relative_error(theirs(), given)
    if m == n == k:
        row["torch_kernels"] = launched(theirs).kernels
    launches = [gemm_fp8_launch.launch(*given, c, fast, config) for config in configs.values()]
    calls = [theirs, *(lambda launch=launch: launch(*given) for launch in launches)]
    timed = measure_together(
        calls, labels=["torch", *configs], warmup=2, iterations=pairs, device="cuda", l2="warm", max_seconds=ROW_SECONDS
    )
    torch_us, us, *others = (1e3 * each.median_ms for each in timed)
    row |= {f"{name}_us": other for name, other in zip([*configs][1:], others, strict=True)}
    flops = 2.0 * m * n * k
    row |= {"ratio": torch_us / us, "us": us, "torch_us": torch_us, "samples": len(timed[1].samples_ms)}
    return row | {"tflops": flops / us / 1e6, "torch_tflops": flops / torch_us / 1e6}


def show_shape(row: dict) -> str:
    """Return the line that is printed for a row of `shapes`."""
    way = "fast    " if row["fast"] else "promoted"
    return (
        f"{row['m']:>6} x {row['n']:>6} x {row['k']:>6} {row['scales']:<6} {way} {row['us']:8.1f} us {row['tflops']:6.0f} "
        f"TFLOP/s {row['ratio']:.3f}x  error {row['error']:.2e} ({row['torch_error']:.2e})  {row['config']}  "
        + "  ".join(f"{name[:-3]} {row['torch_us'] / row[name]:.3f}" for name in row if name in OTHERS)
    )


def error_row(point: tuple) -> dict:
    """Compare both ways to add of both libraries with float64, at 512 x 512 x K."""
    k, positive = point
    given = operands((512, 512, k), "tensor", positive)
    row = {"k": k, "numbers": "uniform" if positive else "normal"}
    for fast in (True, False):
        way = "fast" if fast else "promoted"
        row[way] = relative_error(gemm_fp8(*given, out_dtype=torch.float16, fast=fast), given, 512)
        row[f"torch_{way}"] = relative_error(torch_call(given, fast, torch.float16)(), given, 512)
    return row


def main(arguments: list[str] | None = None) -> int:
    """Measure one of the three tables and record it; return the exit status."""
    parser = arguments_parser(__doc__, pairs=15)
    parser.add_argument("what", choices=("shapes", "choice", "fit", "errors"))
    parser.add_argument("--read", type=Path, help="fit: the recorded times")
    options = parser.parse_args(arguments)
    if (options.what == "fit") != (options.read is not None):
        parser.error("--read names the recorded times for `fit`, and goes with nothing else")
    if options.what == "fit":
        print_fit(options.read)
        return 0
    if not torch.cuda.is_available():
        print("error: the shapes are timed on an NVIDIA GPU: torch.cuda.is_available() is False here.", file=sys.stderr)
        return 1
    torch.manual_seed(SEED)
    ways = (True, False)
    points: list[tuple]
    measure: Callable[..., dict]
    show: Callable[[dict], str]
    if options.what == "choice":
        points = [*itertools.product([*draw_shapes(SEED, SHAPES), *draw_shapes(CHOICE_SEED, CHOICE_SHAPES)[:-2]], ways)]
        wrong = compile_all({(config, "tensor") for point in points for config in ranked(*point)})
        measure, show = functools.partial(choice_row, wrong=wrong), show_choice
    elif options.what == "errors":
        points = [*itertools.product((512, 1024, 2048, 4096, 8192, 16384), (False, True))]
        measure, show = error_row, str
    else:
        points = [*itertools.product(draw_shapes(SEED, SHAPES), ("tensor", "row"), ways)]
        wrong = compile_all({(config, point[1]) for point in points for config in variants(*point).values()})
        points = [point for point in points if chosen(point[0], point[2]).name not in wrong]
        measure, show = functools.partial(shape_row, pairs=options.pairs, wrong=wrong), show_shape
    method = {"l2": "warm", "pairs": options.pairs}
    record = Record(options.out, f"FP8 GEMM, {options.what}", "cuda", options.seconds, **method)
    complete = record.fill(points, measure, show)
    for by, fast in itertools.product(("tensor", "row"), ways if options.what == "shapes" else ()):
        rows = [row for row in record.contents["rows"] if (row["scales"], row["fast"]) == (by, fast)]
        if rows:
            name = f"summary, {by}, {'fast' if fast else 'promoted'}"
            record.contents[name] = summary(rows)
            print(name, record.contents[name])
    record.finish() if complete else record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
