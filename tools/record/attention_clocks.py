"""Read where a block's cycles go in step 5 of the forward: the SM's clock at points of the consumers' and the producer's loops.

    python -m tools.record.attention_clocks offline --out build/attention_clocks_offline.json
    python -m tools.record.attention_clocks measure --out build/attention_clocks.json --seconds 50 --processes 8

Each point is timed in every warp (`utils/attention/gluon/clocks.py`). `offline` compiles each kernel with clocks and without, needs no GPU, and
says what the clocks add: registers, spills, instructions of a block. `measure` runs both in turns, and checks that the output is
the same bits. A row has, over the last blocks of each program:

- `phases`: cycles from point to point of a block, of a consumer's warp: mean, and the 10th, 50th and 90th percentile; empty where a plan waits for P V
  before the softmax, whose points come in another order;
- `loads`: the same for the producer, whose waits for empty slots are among them; `tile`: for what a tile has beside its loop;
- `beside`: how much of the time 0, 1, 2, ... warps of one scheduler are in a softmax at the same time;
- `start`: cycles from the kernel's first instruction to the first consumer's first softmax; `idle_ns`: how long before the last program the others end;
- `mhz`: the SM's clock, by the time in nanoseconds that the kernel keeps (0 where a program has one tile), and `cycles_a_block` of the kernel with clocks and
  without: time x clock / blocks of a program, so that what stands beside the loop is in it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

from tools.record.attention_plans import named_plan
from tools.record.common import Record, arguments_parser
from utils.attention.gluon.plan import Plan, tile_blocks, variant_for


class Case(NamedTuple):
    """One attention: sizes, and the mask; window 0: none."""

    head_dim: int
    batch: int
    heads: int
    kv_heads: int
    length: int
    causal: bool = False
    window: int = 0
    changes: str = ""  # fields of the plan that are changed, as `attention_plans` names them

    def __str__(self):
        mask = ("causal" if self.causal else "full") + (f", window {self.window}" if self.window else "")
        changes = f" ({self.changes})" if self.changes else ""
        return f"{self.head_dim}: {self.batch} x {self.heads}/{self.kv_heads} x {self.length} {mask}{changes}"


# 16384 tokens and a model width of 2048, and the two shapes that are furthest behind (docs/attention-log.md, "Where it stands").
CASES = (
    *(Case(d, 1, 2048 // d, 2048 // d, 16384) for d in (64, 128, 256)),
    *(Case(d, 4, 2048 // d, 2048 // d, 4096, True) for d in (64, 128, 256)),
    Case(64, 2, 8, 2, 1408, window=256),
    Case(256, 16, 8, 8, 1024, True),
)
# What a program has before its first tile, and between tiles, by the plan.
STARTS = (
    Case(64, 1, 8, 8, 2816),
    Case(64, 1, 8, 8, 2816, changes="stagger=300"),
    Case(64, 4, 8, 8, 2816),
    *(Case(64, 2, 8, 2, 1408, window=256, changes=x) for x in ("prefill=0", "prefill=1")),
    *(Case(256, 16, 8, 8, 1024, True, changes=x) for x in ("prefill=0, keys_first=0", "prefill=2, keys_first=2")),
)
PROGRAMS = 132
LONGEST = 1 << 20  # cycles: two clocks further apart are not of the same block


def plan_of_case(case: Case, programs: int = PROGRAMS) -> tuple[str, Plan]:
    """Return the variant and the plan that attention takes."""
    d, batch, heads, _, length, causal, window, changes = case
    variant = variant_for(d, causal, window, length, length, batch * heads, programs)
    return variant, named_plan(f"{variant}, {changes}" if changes else variant, d)


# ---- what the clocks cost, offline ------------------------------------------------------------------------------------


def compile_case(case: Case) -> dict:
    """Compile the kernel of a case with clocks and without."""
    from tools.record.sass import inner_loops, instructions_between, units_of
    from utils.attention.gluon.offline import compile_step

    variant, _ = plan_of_case(case)
    row = {**case._asdict(), "variant": variant}
    for clocks in (False, True):
        mask = {"causal": case.causal, "window": case.window > 0}
        kernel = compile_step(5, case.head_dim, variant=variant, clocks=clocks, **mask)
        loops = inner_loops(kernel.sass)
        found = {"registers": kernel.registers, "spill_bytes": kernel.spill_bytes, "warnings": kernel.warnings}
        found["loops"] = [len(loop) for loop in loops]  # one for each consumer
        found["units"] = units_of(loops[0])
        if clocks:
            found["between"] = instructions_between(loops[0], "CS2R")
        row["with clocks" if clocks else "without"] = found
    return row


def named(row: dict) -> str:
    """Return a row's case and variant."""
    case = Case(**{field: row[field] for field in Case._fields})
    return f"{case}, {row['variant'] or 'whole'}"


def show_offline(row: dict) -> str:
    """Return the line that is printed for a compiled case."""
    kernels = (f"{key}: {row[key]['loops']}, {row[key]['spill_bytes']} bytes" for key in ("without", "with clocks"))
    return f"{named(row)}: instructions of a block {'; '.join(kernels)} spilled"


# ---- reading the entries ----------------------------------------------------------------------------------------------


def steps_between(entries: np.ndarray, points: list[int]) -> np.ndarray:
    """Return the cycles between consecutive points of entries [..., WORDS], those entries alone that are whole: (n, points - 1)."""
    clocks = entries[..., points].reshape(-1, len(points)).astype(np.int64)
    steps = np.diff(clocks, axis=1) % (1 << 32)
    return steps[(steps < LONGEST).all(1) & (clocks != 0).any(1)]


def to_next_block(entries: np.ndarray, first: int, last: int) -> np.ndarray:
    """Return the cycles from a point of each block to one of the next block of the same loop.

    entries: (..., BLOCKS, WORDS), a ring. A block's entry follows another's unless a new tile began in between, whose first
    block keeps nothing; then the next entry of the ring is older.
    """
    begins, ends = entries[..., first].astype(np.int64), np.roll(entries[..., last].astype(np.int64), -1, axis=-1)
    steps = ((ends - begins) % (1 << 32)).reshape(-1)
    whole = (begins.reshape(-1) != 0) & (ends.reshape(-1) != 0)
    return steps[whole & (steps < LONGEST)]


def summary(cycles: np.ndarray) -> dict:
    """Return mean and percentiles of some cycles."""
    if not len(cycles):
        return {}
    low, middle, high = np.percentile(cycles, (10, 50, 90))
    return {"mean": round(float(cycles.mean()), 1), "p10": int(low), "p50": int(middle), "p90": int(high)}


def beside_each_other(entries: np.ndarray, begin: int, end: int) -> list[float]:
    """Return the shares of time in which 0, 1, 2, ... consumers are between two points of their blocks.

    entries: (programs, consumers, 4, BLOCKS, WORDS). The warps number w of all consumers share a scheduler. The time is that
    in which all of them have blocks in their rings.
    """
    consumers = entries.shape[1]
    shares = np.zeros(consumers + 1)
    for program in (
        entries.reshape(len(entries), consumers, 4, *entries.shape[-2:])
        .swapaxes(1, 2)
        .reshape(-1, *entries.shape[1:2], *entries.shape[-2:])
    ):
        origin = int(program[0, 0, begin])
        # Differences from one clock, as signed numbers, put 32-bit clocks in order.
        spans = [((x[:, [begin, end]].astype(np.int64) - origin + (1 << 31)) % (1 << 32)) - (1 << 31) for x in program]
        spans = [x[(x[:, 1] > x[:, 0]) & (x[:, 1] - x[:, 0] < LONGEST)] for x in spans]
        if any(len(x) < 2 for x in spans):
            continue
        low, high = max(x[:, 0].min() for x in spans), min(x[:, 1].max() for x in spans)
        if high <= low:
            continue
        events = sorted(
            (int(np.clip(t, low, high)), change)
            for x in spans
            for row in x
            for t, change in zip(row, (1, -1), strict=True)
        )
        before, inside = low, 0
        for at, change in events:
            shares[min(max(inside, 0), consumers)] += at - before
            before, inside = at, inside + change
        shares[0] += high - before
    return [round(float(x), 3) for x in shares / max(shares.sum(), 1)]


def clock_rate(tiles: np.ndarray, point: int, time: int) -> float:
    """Return the SM's clock in MHz, from the clocks and times of each warp's tiles, (..., TILES, WORDS); 0 if none has two."""
    rates = []
    for ring in tiles.reshape(-1, *tiles.shape[-2:]):
        kept = ring[ring[:, time] != 0]
        if len(kept) < 2:
            continue
        ns = (kept[:, time].astype(np.int64) - int(kept[0, time]) + (1 << 31)) % (1 << 32)
        first, last = kept[ns.argmin()], kept[ns.argmax()]
        if ns.max() - ns.min() > 50_000:
            rates.append(1e3 * ((int(last[point]) - int(first[point])) % (1 << 32)) / float(ns.max() - ns.min()))
    return float(np.median(rates)) if rates else 0.0


def starts_and_ends(tiles: np.ndarray, points: tuple[str, ...]) -> dict:
    """Return what a program has before its first tile, and how long before the last program it ends.

    tiles: (programs, consumers, 4, TILES, WORDS). `start`: cycles from the kernel's first instruction to the first consumer's points.
    `idle_ns`: from the end of a program's last loop to that of all programs, in nanoseconds.
    """
    names = ("kernel begins", "barriers ready", "roles begin", "begins", "Q there", "first softmax")
    first = tiles[
        :, 0, :, 0
    ]  # of the first consumer's four warps; right where a program has no more tiles than entries
    steps = steps_between(first, [points.index(name) for name in names])
    found = {f"{a} to {b}": summary(steps[:, i]) for i, (a, b) in enumerate(itertools.pairwise(names))}
    times = tiles[..., points.index("nanoseconds")].astype(np.int64)
    origin = times[times != 0].min() if (times != 0).any() else 0
    kept = np.where(times != 0, (times - origin + (1 << 31)) % (1 << 32) - (1 << 31), -(1 << 40))
    last = kept.reshape(len(tiles), -1).max(1)
    return {"start": found, "idle_ns": summary(last.max() - last)}


def read_entries(words: np.ndarray, consumers: int) -> dict:
    """Return what the clocks of one launch say; words: all entries, uint32, (programs, warps, entries, WORDS)."""
    from utils.attention.gluon.clocks import BLOCK_POINTS, BLOCKS, LOAD_POINTS, TILE_POINTS

    of_consumers = words[:, : 4 * consumers].reshape(len(words), consumers, 4, *words.shape[-2:])
    blocks, tiles = of_consumers[..., :BLOCKS, :], of_consumers[..., BLOCKS:, :]
    loads = words[:, 4 * consumers, :BLOCKS]
    steps = steps_between(blocks, list(range(len(BLOCK_POINTS))))
    phases = {f"to {name}": summary(steps[:, i]) for i, name in enumerate(BLOCK_POINTS[1:])}
    phases["to the next block"] = summary(to_next_block(blocks, len(BLOCK_POINTS) - 1, 0))
    phases["block"] = summary(to_next_block(blocks, 0, 0))
    of_loads = steps_between(loads, list(range(len(LOAD_POINTS))))
    found = {"blocks": len(steps), "phases": phases}
    found["loads"] = {f"to {name}": summary(of_loads[:, i]) for i, name in enumerate(LOAD_POINTS[1:])}
    found["loads"]["block"] = summary(to_next_block(loads, 0, 0))
    # "ahead" keeps three of a tile's points: a tile's start and end are beside other products there.
    kept = [i for i in range(8) if (tiles[..., i] != 0).any()]
    of_tiles = steps_between(tiles, kept)
    names = [TILE_POINTS[i] for i in kept]
    found["tile"] = {f"{a} to {b}": summary(of_tiles[:, i]) for i, (a, b) in enumerate(itertools.pairwise(names))}
    found["blocks_of_loops"] = summary(tiles[..., 8][tiles[..., 9] != 0])
    found |= starts_and_ends(tiles, TILE_POINTS)
    found["beside"] = {  # of every fourth program, to save time
        "from scores to softmax": beside_each_other(blocks[::4], 4, 5),
        "from begin to scores": beside_each_other(blocks[::4], 0, 4),
    }
    found["mhz"] = round(clock_rate(tiles, 4, 9), 1)
    return found


# ---- running ----------------------------------------------------------------------------------------------------------


def launch_with_clocks(arguments) -> tuple:
    """Launch step 5 with clocks; return the launch (None in a simulation) and the entries, (programs, warps, entries, WORDS)."""
    from utils.attention.gluon.clocks import BLOCKS, TILES, WORDS
    from utils.attention.gluon.launch import step_module

    step5, warps = step_module(5), 4 * arguments.plan.consumers + 1
    size = arguments.programs, warps, BLOCKS + TILES, WORDS
    entries = torch.zeros(size, dtype=torch.float32, device=arguments.q.device)
    with (
        mock.patch.object(step5, "Case", partial(step5.Case, clocks=True)),
        mock.patch.object(step5, "workspace", lambda *given: (entries, arguments.lse)),
        mock.patch.object(step5, "parts_for", lambda *given: 1),
    ):
        return step5.launch(arguments), entries


def words_of(entries: torch.Tensor) -> np.ndarray:
    """Return the entries as whole numbers of 32 bits."""
    return entries.cpu().numpy().view(np.uint32)


def arguments_of(q, k, v, causal: bool, plan: Plan, programs: int = PROGRAMS, window: int = 0):
    """Return the arguments of a launch, with an output of its own."""
    from utils.attention.gluon.arguments import Arguments, unused
    from utils.attention.gluon.launch import LOG2_E

    c = q.shape[-1] ** -0.5 * LOG2_E
    return Arguments(q, k, v, torch.empty_like(q), unused(q.device), causal, window, False, c, plan, programs)


def arguments_of_case(case: Case, programs: int) -> list:
    """Return the arguments of two launches of a case, on the same inputs."""
    shapes = [(case.batch, heads, case.length, case.head_dim) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    plan = plan_of_case(case, programs)[1]
    return [arguments_of(q, k, v, case.causal, plan, programs, case.window) for _ in range(2)]


def prepare(case: Case) -> None:
    """Compile both kernels of a case for the cache on the disk, in a process of its own."""
    from utils.attention.gluon.launch import step_module

    plain, clocked = arguments_of_case(case, PROGRAMS)
    step_module(5).launch(plain)
    launch_with_clocks(clocked)
    torch.cuda.synchronize()


def measure(case: Case, pairs: int) -> dict:
    """Run a case with clocks and without, and read the clocks."""
    from utils.attention.gluon.launch import step_module
    from utils.benchmark.measuring import measure_together

    programs = torch.cuda.get_device_properties("cuda").multi_processor_count
    plain, clocked = arguments_of_case(case, programs)
    q, k, v = plain.q, plain.k, plain.v
    variant, plan = plan_of_case(case, programs)
    without = step_module(5).launch(plain)
    with_clocks, entries = launch_with_clocks(clocked)
    lse = plain.lse
    calls = [
        partial(without, q, k, v, plain.out, lse),
        partial(with_clocks.handle, q, k, v, clocked.out, clocked.out, lse, entries, lse),
    ]
    results = measure_together(
        calls, labels=["without", "with clocks"], warmup=3, iterations=pairs, device="cuda", l2="cold", max_seconds=3
    )
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    for _ in range(3):  # the clocks of the last call remain; its L2 is cold, too
        entries.zero_()
        flush.zero_()
        calls[1]()
    torch.cuda.synchronize()
    found = read_entries(words_of(entries), plan.consumers)
    ms = [result.median_ms for result in results]
    heads = case.batch * case.heads
    blocks = sum(tile_blocks(plan, case.length, case.length, case.causal, case.window)) * heads / programs
    cycles = [round(x * 1e3 * found["mhz"] / blocks, 1) for x in ms]
    row = {**case._asdict(), "variant": variant, "ms": {"without": ms[0], "with clocks": ms[1]}}
    row |= {"blocks_of_a_program": round(blocks, 1), "cycles_a_block": {"without": cycles[0], "with clocks": cycles[1]}}
    return row | {"same_bits": torch.equal(plain.out, clocked.out)} | found


def show(row: dict) -> str:
    """Return the lines that are printed for a measured case: medians in the order of the record's tables."""

    def medians(table: dict) -> str:
        return " ".join(str(x["p50"]) if x else "-" for x in table.values())

    ratio = row["ms"]["with clocks"] / row["ms"]["without"]
    return (
        f"{named(row)}: {row['ms']['without']:.4f} ms, x {ratio:.3f} with clocks, {row['mhz']:.0f} MHz, "
        f"{row['cycles_a_block']['without']:.0f} a block, same bits {row['same_bits']}\n"
        f"  block {medians(row['phases'])}; producer {medians(row['loads'])}; tile {medians(row['tile'])}\n"
        f"  start {medians(row['start'])}; idle at the end, ns {row['idle_ns']}\n"
        f"  in softmax {row['beside']['from scores to softmax']}, in products {row['beside']['from begin to scores']}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Compile or measure the cases; return the exit status."""
    parser: argparse.ArgumentParser = arguments_parser(__doc__, pairs=9)
    parser.add_argument("table", choices=("offline", "measure", "starts"))
    parser.add_argument("--processes", type=int, default=0, help="compile so many cases side by side beforehand")
    options = parser.parse_args(arguments)
    if options.table == "offline":
        record = Record(options.out, "step 5 with clocks and without, compiled for sm_90a", "cpu", options.seconds)
        complete = record.fill(CASES, compile_case, show_offline)
    else:
        if not torch.cuda.is_available():
            print("error: clocks are read on an NVIDIA GPU: torch.cuda.is_available() is False here.", file=sys.stderr)
            return 1
        torch.manual_seed(0)
        record = Record(options.out, "step 5: cycles between points of a block", "cuda", options.seconds)
        print(torch.cuda.get_device_name())
        cases = STARTS if options.table == "starts" else CASES
        if options.processes:
            with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
                list(pool.map(prepare, cases))
        complete = record.fill(cases, partial(measure, pairs=options.pairs), show)
    record.finish() if complete else record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
