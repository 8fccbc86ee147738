"""Time products whose operands nearly fill the L2, by launches that begin early and by launches that wait, and with L2 hints.

    python -m tools.record.gemm_repeated --out build/gemm_repeated.json

A launch that begins early takes the SMs that the one before it leaves idle, so the same tile runs on other SMs from launch to
launch. Each half of the SMs has its own half of the L2, and what both halves read is in both. The question is whether a product
that is repeated therefore finds less of its operands there than one whose tiles stay where they are ("waiting"), and whether
telling the L2 what to keep helps. The shapes are drawn as those of the tables, and kept where the operands are about as large as
the L2 and the model's first configuration leaves a third of the SMs idle, or C has few rows or columns.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from dataclasses import replace

import torch

from tools.record.common import Record, arguments_parser, in_many_processes
from tools.record.gemm_shapes import PROCESSES, SMS, draw_shapes, late_rows, operands, relative_error
from utils.benchmark.measuring import measure_together
from utils.kernels import gemm_model
from utils.kernels.assembling import reassembled
from utils.kernels.gemm_config import Config
from utils.kernels.gemm_plan import items_of
from utils.kernels.gemm_tune import CANDIDATES

MOST_ERROR = {"bf16": 4e-3, "fp16": 5e-4}
SEED = 4242
MOST_BLOCKS, IDLE_MB, MOST_IDLE = 92, (15, 60), 16
THIN, THIN_MB, MOST_THIN = 256, (30, 90), 8
HINTED = 2  # of a shape's configurations
# What copies of an operand that no block shares tell the L2: half of their lines are the first to go.
HINT = "half evict_first"
HINTS = {HINT: "createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 policy, 0.5;"}
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


def blocks_of(config: Config, shape: dict) -> int:
    """Return how many blocks a launch has."""
    sizes = (shape["n"], shape["m"]) if config.transposed else (shape["m"], shape["n"])
    return items_of(*sizes, config, SMS) * config.cluster


def first_of(shape: dict) -> list[Config]:
    """Return the model's first configurations at a shape."""
    return gemm_model.first_choices(shape["m"], shape["n"], shape["k"], SMS, late_rows(shape), True, CANDIDATES)


def jobs_of(shape: dict) -> dict[str, tuple[Config, str]]:
    """Return by name what is timed at a shape: configurations, early and waiting, and the first ones with a hint."""
    found = {}
    for i, config in enumerate(first_of(shape)):
        ways = [(config, ""), (replace(config, early=False), "")]
        # Of both operands, one that no other block shares has copies that take a hint.
        if i < HINTED and not config.pairs and not (config.down > 1 and config.abreast > 1):
            ways += [(way, HINT) for way, _ in ways]
        found |= {way.name + f", {hint}" * (hint != ""): (way, hint) for way, hint in ways}
    return found


def compile_one(job: tuple) -> float:
    """Compile and run a kernel at a shape; return the error."""
    shape, config, hint = job
    a, b = operands(shape)
    return relative_error(launch(a, b, config, hint)[0], a, b)


def all_shapes() -> list[dict]:
    """Draw shapes as those of the tables are drawn: with operands near the L2's size, and idle SMs or few rows or columns."""
    found = []
    for shape in draw_shapes(SEED, 1500):
        config, size = first_of(shape)[0], 2e-6 * shape["k"] * (shape["m"] + shape["n"])
        idle = blocks_of(config, shape) <= MOST_BLOCKS and IDLE_MB[0] < size < IDLE_MB[1]
        thin = min(shape["m"], shape["n"]) <= THIN and THIN_MB[0] < size < THIN_MB[1]
        if sum(x["idle"] == idle for x in found) < (MOST_IDLE if idle else MOST_THIN) and (idle or thin):
            found.append(shape | {"idle": idle, "blocks": blocks_of(config, shape), "mb": size})
    return sorted(found, key=lambda x: x["mb"])


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
    """Return the line that is printed for a row: torch's time, and ratios of the first configuration's ways and of the fastest."""
    times = row["times"]
    ratios = ", ".join(f"{row['torch_us'] / us:.3f}" for _, us in times[:4])
    best = min(times, key=lambda entry: entry[1])
    name = f"{best[0]} {row['torch_us'] / best[1]:.3f}".replace("waiting", "w").replace("evict_first", "ef")
    sizes = f"{row['m']}x{row['n']}x{row['k']} {row['mb']:.0f}MB {row['blocks']}b"
    return f"{sizes} {row['torch_us']:.1f}: {ratios} | {name}{row['wrong'] or ''}"


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
