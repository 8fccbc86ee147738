"""Time products whose operands nearly fill the L2, by launches that begin early and by launches that wait, and with L2 hints.

    python -m tools.record.gemm_repeated --out build/gemm_repeated.json

A launch that begins early takes the SMs that the one before it leaves idle, so the same tile runs on other SMs from launch to
launch. Each half of the SMs has its own half of the L2, and what both halves read is in both. The question is whether a product
that is repeated therefore finds less of its operands there than one whose tiles stay where they are ("waiting"), and whether
telling the L2 what to keep helps. At the shapes of the two recorded tables with the lowest ratios, the model's first four
configurations; at 10216 x 88 x 1760 more of them, and products that differ from it in one thing.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from dataclasses import replace

import torch

from tools.record.common import Record, arguments_parser, in_many_processes
from tools.record.gemm_choice_shapes import SIZES, TABLES, config_of, recorded
from tools.record.gemm_shapes import PROCESSES, SMS, late_rows, operands, relative_error
from utils.benchmark.measuring import measure_together
from utils.kernels import gemm_model
from utils.kernels.assembling import reassembled
from utils.kernels.gemm_config import Config

POOR = 0.96
MOST_ERROR = {"bf16": 4e-3, "fp16": 5e-4}
THE_SHAPE = {"m": 10216, "n": 88, "k": 1760, "dtype": "bf16", "a_column_major": True, "b_column_major": False}
CONFIGS = ("128x128/1 4x1", "T 64x256/1 2x4", "T 128x128/1 1x4", "T 64x160/1 both B", "128x96/1 4x1", "T 128x96/1 1x4")
# What a copy that no other block shares tells the L2: here that is A, of which each byte is read once.
HINTS = {
    "evict_first": "mov.b64 policy, 0x12F0000000000000;",
    "evict_last": "mov.b64 policy, 0x14F0000000000000;",
    "half evict_last": "createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 policy, 0.5;",
    "half evict_first": "createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 policy, 0.5;",
}
_COPY = re.compile(
    r"(@%\w+ )?(cp\.async\.bulk\.tensor\.2d\.shared::(?:cta|cluster)\.global\.mbarrier::complete_tx::bytes)( \[[^;]*\]);"
)
_hint = ""  # of the kernels that are being made


def hinted(ptx: str, policy: str) -> tuple[str, int]:
    """Give each copy that no other block shares a hint; return the PTX and the number of copies."""
    return _COPY.subn(
        lambda x: f"{{ .reg .b64 policy; {policy} {x[1] or ''}{x[2]}.L2::cache_hint{x[3]}, policy; }}", ptx
    )


def patch() -> None:
    """Let `gemm_launch.launch` make kernels with the hint of `_hint`."""
    from utils.kernels import gemm_ptx

    plain = gemm_ptx.adapted

    def adapted(compiled, config):
        twin = plain(compiled, config)
        if not _hint:
            return twin
        ptx, copies = hinted(twin.asm["ptx"], HINTS[_hint])
        assert copies, "no copy to give a hint to"
        return reassembled(twin, ptx)

    if plain.__name__ == "adapted" and not hasattr(gemm_ptx, "patched"):
        gemm_ptx.adapted, gemm_ptx.patched = adapted, True


def launch(a: torch.Tensor, b: torch.Tensor, config: Config, hint: str = ""):
    """Return C and the launch of a configuration, with a hint."""
    global _hint
    from utils.kernels import gemm_launch

    patch()
    _hint = hint
    try:
        return gemm_launch.gemm_and_launch(a, b, config)
    finally:
        _hint = ""


def jobs_of(shape: dict) -> dict[str, tuple[Config, str]]:
    """Return by name what is timed at a shape: a configuration and a hint."""
    if shape.get("near"):
        configs = [config_of(name) for name in CONFIGS[:1]]
    elif {x: shape[x] for x in SIZES} == {x: THE_SHAPE[x] for x in SIZES}:
        configs = [config_of(name) for name in CONFIGS]
    else:
        sizes = shape["m"], shape["n"], shape["k"]
        configs = gemm_model.first_choices(*sizes, SMS, late_rows(shape), True, 4)
    found = {}
    for config in configs:
        found[config.name] = config, ""
        waiting = replace(config, early=False)
        found[waiting.name] = waiting, ""
    if len(configs) == len(CONFIGS):
        for config in (configs[0], configs[2]):  # A is not shared
            found |= {f"{config.name}, {hint}": (config, hint) for hint in HINTS}
            found |= {f"{config.name} waiting, {hint}": (replace(config, early=False), hint) for hint in HINTS}
    return found


def compile_one(job: tuple) -> float:
    """Compile and run a kernel at a shape; return the error."""
    shape, config, hint = job
    a, b = operands(shape)
    return relative_error(launch(a, b, config, hint)[0], a, b)


def all_shapes() -> list[dict]:
    """Return the shape, products near it, and the poor shapes of both tables."""
    near = [
        THE_SHAPE | change | {"near": what}
        for what, change in (
            ("A of 21 MB", {"m": 6008}),
            ("A of 28 MB", {"m": 8024}),
            ("A of 49 MB", {"m": 14024}),
            ("A at multiples of 32 bytes", {"m": 10208}),
            ("B at multiples of 32 bytes", {"n": 96}),
            ("both at multiples of 32 bytes", {"m": 10208, "n": 96}),
        )
    ]
    poor = sorted((row for name in TABLES for row in recorded(name) if row["ratio"] < POOR), key=lambda x: x["ratio"])
    kept = [{x: row[x] for x in (*SIZES, "dtype")} for row in poor if row["us"] < 70]
    return [THE_SHAPE, *near, *(x for x in kept if x != THE_SHAPE)]


def shape_row(shape: dict, rounds: int) -> dict:
    """Time what `jobs_of` names at a shape, and torch.matmul, in turns; a wrong one is named and not timed."""
    a, b = operands(shape)
    calls, wrong = {"torch.matmul": functools.partial(torch.matmul, a, b)}, {}
    for name, (config, hint) in jobs_of(shape).items():
        c, made = launch(a, b, config, hint)
        if (error := relative_error(c, a, b)) > MOST_ERROR[shape["dtype"]]:
            wrong[name] = error
        else:
            calls[name] = functools.partial(made, a, b)
    timed = measure_together(
        [*calls.values()], labels=[*calls], warmup=2, iterations=rounds, device="cuda", l2="warm", max_seconds=1.5
    )
    times = [[name, 1e3 * each.median_ms] for name, each in zip(calls, timed, strict=True)]
    return shape | {"torch_us": times[0][1], "times": times[1:], "wrong": wrong}


def show(row: dict) -> str:
    """Return the line that is printed for a row: torch's time, and ratios of the fastest early and waiting ones."""
    times = sorted(row["times"], key=lambda entry: entry[1])
    most = 12 if len(times) > 20 else 1
    kept = [x for x in times if "waiting" not in x[0]][:most] + [x for x in times if "waiting" in x[0]][:most]
    ratios = ", ".join(f"{name} {row['torch_us'] / us:.3f}" for name, us in kept)
    sizes = f"{row['m']}x{row['n']}x{row['k']} {row.get('near', '')}"
    return f"{sizes} {row['torch_us']:.1f} us: {ratios}{row['wrong'] or ''}".replace("waiting", "w")


def main() -> int:
    """Measure and record; return the exit status."""
    parser = arguments_parser(__doc__, pairs=11)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: products are timed on an NVIDIA GPU: torch.cuda.is_available() is False here.", file=sys.stderr)
        return 1
    shapes = all_shapes()
    kernels = {}
    for shape in shapes:
        for name, (config, hint) in jobs_of(shape).items():
            columns = config.width_at(shape["m"] if config.transposed else shape["n"])
            layouts = shape["dtype"], shape["a_column_major"], shape["b_column_major"]
            kernels.setdefault((name, *layouts, columns), (shape, config, hint))
    for job, (error, problem) in zip(
        kernels.values(), in_many_processes(compile_one, kernels.values(), PROCESSES), strict=True
    ):
        if problem or not error < MOST_ERROR[job[0]["dtype"]]:
            print("WRONG", job[1].name, job[2], error, problem)
    print(torch.cuda.get_device_name(), len(kernels), "kernels", len(shapes), "shapes", flush=True)
    record = Record(options.out, "GEMM, repeated launches", "cuda", options.seconds, rounds=options.pairs, l2="warm")
    complete = record.fill(shapes, functools.partial(shape_row, rounds=options.pairs), show)
    ratios = []
    for row in record.contents["rows"]:
        times = dict(row["times"])
        ratios += [us / times[f"{name} waiting"] for name, us in times.items() if f"{name} waiting" in times]
    if ratios:
        print(f"early / waiting: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}")
    record.finish() if complete else record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
