"""Helpers of lab 3's cells that a student need not read: this machine, timelines, sliders, the recorded race, games."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from IPython.display import HTML, display

# ruff: noqa: F401 (what is imported here is what the notebook gets)
from utils import compare, count_cuda_kernels, default_device, gluon_cpu, nvtx_range, profile
from utils.attention import attention
from utils.checking import AnswerNeeded
from utils.checking.gluon_launches import (
    async_copy_launch,
    attention_inputs,
    attention_launch,
    overlap_launch,
    repair_launch,
    tcgen05_launch,
    tma_ring_launch,
    two_softmax_launch,
    wgmma_launch,
)
from utils.checking.kernel_exercises import (
    Launch,
    Tile,
    compile_for_hopper,
    descriptor,
    load_kernels,
    machine_code,
    overlap,
    simulate_failure,
    simulate_launch,
)
from utils.checking.labs.lab3_gluon import *  # noqa: F403 (all the visible checks)
from utils.config import GPU_SPECS
from utils.files import ROOT
from utils.gluon_cpu.timeline import COLORS
from utils.kernels.offline import BLACKWELL as BLACKWELL_CHIP
from utils.kernels.offline import HOPPER
from utils.labs import session
from utils.labs.session import answered, beside_guess, guesses, outcomes, results, save, text_of
from utils.machine.device import gluon_on_blackwell, gluon_support, offline_compile_support
from utils.visualization import series, style_axes

show_recorded = partial(session.show_recorded, "lab3")
RECORDED = ROOT / "assets/results/h200"
PEAK = GPU_SPECS["H200"]["bf16_tflops"]
# Keys and values from the L2: twice the bandwidth of memory, half its latency. These round numbers are not measured.
FROM_L2, BLACKWELL = (
    replace(gluon_cpu.CostModel.of(gpu), global_bytes=40.0, global_latency=300.0) for gpu in ("H200", "B200")
)

device = default_device()
on_gpu = device.type == "cuda"
on_hopper = bool(gluon_support())
big = attention_inputs(1, 128, 512, d=128)


def machine() -> None:
    """Print which parts of the lab run on this machine."""
    import triton

    print(f"device      {torch.cuda.get_device_name() if on_gpu else 'CPU'}, PyTorch {torch.__version__}")
    print(f"simulator   Gluon of Triton {triton.__version__}")
    print(f"compiler    {offline_compile_support().reason}")
    print(f"Hopper GPU  {'yes: your kernels run here, too' if on_hopper else gluon_support().reason}")


# ---- lines that a student writes for no points -----------------------------------------------------------------------

check_same_time = session.small_task(
    "the head dimension of equal times",
    64,
    "4 rows keys d FLOPs at 4096 a cycle, beside rows keys exponentials at 16.",
    {128: "There are two products.", 256: "A multiply-accumulate is two FLOPs, and there are two products."},
)
check_naive_mb = session.small_task(
    "MB that the naive version moves",
    71.3,
    "Q, K, V and O once each; scores and probabilities are written once and read once each.",
    {67.1: "Q, K, V and O travel, too.", 37.7: "What is written is read again."},
)
check_sectors = session.small_task(
    "sectors and their use",
    (32, 1 / 8),
    "Each number lies in a sector of its own: how many of its 32 bytes are needed?",
    {(32, 1 / 32): "A number has four bytes.", (32, 4): "The share, between 0 and 1."},
)
check_held = session.small_task(
    "elements of a thread", 8, "128 threads share them.", {4: "The tile is repeated.", 32: "Four warps."}
)
check_tile_11 = session.small_task(
    "slot and parity of tile 11",
    (2, 1),
    "Slot i % 3, and phase i // 3 of that slot's barrier, modulo 2.",
    {(2, 3): "That is the phase: its parity is what a wait takes."},
)
check_slots = session.small_task(
    "slots for Little's law",
    6,
    "Bandwidth times latency, over 2048 bytes a slot.",
    {5.86: "A whole number.", 5: "Round up."},
)
check_lane = session.small_task(
    "the lane of row 3, column 6",
    15,
    "Row r lies in lanes 4 r to 4 r + 3, two columns each.",
    {18: "Two columns a lane."},
)
check_place = session.small_task(
    "the place of chunk 2 of row 3", 1, "2 XOR 3.", {5: "XOR does not carry.", 2: "XOR 3."}
)
check_causal_blocks = session.small_task(
    "blocks of keys for rows 64 to 127",
    4,
    "The last row stands at key 127 + 300 - 200, and sees it.",
    {2: "The last query stands at the last key: 100 keys further on.", 5: "No row of the tile sees the last block."},
)
check_registers = session.small_task(
    "registers for each thread of the consumers",
    232,
    "384 threads had 168 each; 128 keep 40, and 256 share the rest.",
    {464: "There are two consumers, of 128 threads each."},
)
check_row_a_thread = session.small_task(
    "scores of a thread",
    128,
    "128 rows, four warps: how many rows has a thread?",
    {64: "On Hopper; here it has a row."},
)
check_columns = session.small_task(
    "columns of tensor memory", 512, "A column holds one number of each of 128 rows.", {256: "Two tiles of each."}
)


# ---- timelines ---------------------------------------------------------------------------------------------------


def plot_runs(runs: dict, window: tuple[float, float] | None = None) -> None:
    """Draw the first program of each run, {title: run}, above each other; model cycles, not nanoseconds.

    Args:
        runs: runs that were simulated with timeline=True.
        window: the cycles (first, last) to show; None shows all.
    """
    rows = [len({(e.unit, e.partition) for e in run.events}) for run in runs.values()]
    size = {"figsize": (9.6, 1.3 + 0.4 * sum(rows)), "height_ratios": rows, "layout": "constrained"}
    figure, axes = plt.subplots(len(runs), sharex=True, squeeze=False, **size)
    shown = window or (0, max(e.end for run in runs.values() for e in run.events))
    key: dict[str, object] = {}
    for ax, (title, run) in zip(axes.flat, runs.items(), strict=True):
        run.plot(ax=ax, window=shown)
        style_axes(ax, title=title if window or not run.cycles else f"{title}: {run.cycles[0]:,.0f} model cycles")
        ax.grid(False, axis="y")
        ax.label_outer()
        legend = ax.get_legend()
        for text, patch in zip(legend.get_texts(), legend.legend_handles, strict=True):
            patch.set(edgecolor="#8a8a8a", linewidth=0.5)  # grey waits would hardly show on the grey card
            key[text.get_text().replace("wgmma", "product")] = patch  # Blackwell has no wgmma
        legend.remove()
    figure.legend(key.values(), key, ncols=6, fontsize=7, loc="outside lower center", frameon=False)
    plt.show()


def show_timeline(text: str, launch: Launch, title: str, below: dict | None = None, **options):
    """Simulate a launch and draw its first program, and below it further runs, {title: run}."""
    _, run = simulate_launch(text, launch, timeline=True, **options)
    plot_runs({title: run} | (below or {}))
    return run


def tensor_core_share(run) -> float:
    """Return the share of the first program's time during which a product runs."""
    return sum(e.end - e.start for e in run.events if e.kind == "wgmma") / run.cycles[0]


def draw_slider(text: str, keys=(32, 64, 128), slots=(1, 2, 3), head_dims=(64, 128)) -> None:
    """Show the timeline of Question 5.2's kernel under three sliders; all pictures are drawn before."""
    choices = {"keys a block": keys, "slots": slots, "head dimension": head_dims}
    controls = "".join(
        f'<label style="margin-right:2em">{name} ({", ".join(map(str, values))}) '
        f'<input type="range" min="0" max="{len(values) - 1}" value="0"></label>'
        for name, values in choices.items()
    )
    runs = {}
    for (i, n), (j, stages), (k, d) in itertools.product(*map(enumerate, choices.values())):
        inputs = attention_inputs(1, 128, 512, d=d)
        launch, _ = attention_launch("lab3_specialized.py", 128, *inputs, keys=n, STAGES=stages)
        run = simulate_launch(text, launch, timeline=True, model=FROM_L2)[1]
        title = f"keys {n}, slots {stages}, head dimension {d}: {run.cycles[0]:,.0f} model cycles"
        runs[f"{i}-{j}-{k}"] = run, f"<b>{title}, tensor cores at work {tensor_core_share(run):.0%}</b><br>"
    until = max(run.cycles[0] for run, _ in runs.values())
    frames = "".join(
        f'<div data-key="{key}"{" style=display:none" * (key != "0-0-0")}>{title}{timeline_svg(run, until)}</div>'
        for key, (run, title) in runs.items()
    )
    change = (
        "const key=[...this.querySelectorAll('input')].map(i=>i.value).join('-');"
        "this.querySelectorAll('[data-key]').forEach(f=>f.style.display=f.dataset.key===key?'':'none')"
    )
    keep = 'onkeydown="event.stopPropagation()"'  # otherwise JupyterLab uses the arrow keys for the notebook's cursor
    display(HTML(f'<div {keep} oninput="{change}">{controls}{frames}</div>'))


def timeline_svg(run, until: float, width: int = 640, label: int = 190, height: int = 17) -> str:
    """Draw the first program of a run as small SVG that needs no library: a row for each partition and unit."""
    rows = sorted({(e.partition, e.unit) for e in run.events}, key=lambda row: (row[0], row[1] != "partition", row[1]))
    parts = [
        f'<text x="0" y="{height * i + 12}" fill="currentColor">{partition if unit == "partition" else unit}</text>'
        for i, (partition, unit) in enumerate(rows)
    ]
    for e in run.events:
        x, wide = label + width * e.start / until, width * (e.end - e.start) / until
        if wide > 0.4:
            y = height * rows.index((e.partition, e.unit)) + 2
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="12" fill="{COLORS.get(e.kind, "#999")}"/>'
            )
    size = f'width="{label + width}" height="{height * len(rows) + 4}"'
    return f'<svg {size} font-size="11" font-family="sans-serif">{"".join(parts)}</svg>'


def plot_shares(shares: dict[str, float]) -> None:
    """Draw the tensor cores' share of the simulated time, beside an H200's measured share of its peak."""
    race = pd.DataFrame(json.loads((RECORDED / "lab3.json").read_text())["tables"]["race"]).set_index("against")
    measured = {"5.2": race["its TFLOP/s"]["ladder step 4"], "5.3": race["your TFLOP/s"]["cuDNN"]}
    reached = {what: tflops / PEAK for what, tflops in measured.items()}
    tables = {
        place: pd.DataFrame(found.items(), columns=["", "share of the time"])
        for place, found in (("simulated", shares), ("H200, of 989 TFLOP/s", reached))
    }
    session.plot_bars(tables, ["share of the time"], title="Tensor cores at work (5.2: step 4 of the ladder)")


# ---- games -------------------------------------------------------------------------------------------------------


def play(what: str, text: str, launch: Launch) -> None:
    """Simulate a kernel that may be wrong; print the report, draw the timeline up to it, and compare with the guess."""
    for seed in (None, 1, 2):  # the cost model's own timing, and two more timings
        report, run = simulate_failure(text, launch, seed=seed)
        if report:
            break
    print(f"{what}: {report or 'right in three timings'}\n")
    kind = report.partition(" ")[0].rstrip(",")
    beside_guess(what, {"": "right", "deadlock": "hangs"}.get(kind, kind))
    if report:
        plot_runs({what: run})


def break_it(text: str, cases: dict[str, tuple[int, int]]) -> None:
    """Play a kernel that reads one tile, waits for this phase, and expects `extra_bytes` too many."""
    x = Tile(torch.ones(16, 64).half(), [16, 64])
    for what, (phase, extra) in cases.items():
        args = dict(x_desc=x, y_ptr=torch.zeros(1), PHASE=phase, EXTRA=extra)
        play(what, text, Launch("read_one", (1,), args, ("y_ptr",)))


def play_orders(text: str) -> None:
    """Play the kernel of 5.3 with one arrival moved, or at another slot's barrier."""
    k_done, v_done = "arrive(k_empty.index(k_slot)", "arrive(v_empty.index(v_slot)"
    launch, _ = overlap_launch(*big)
    play("(a) k_empty before the wait", swap_lines(text, k_done, "warpgroup_mma_wait(1"), launch)
    play("(b) v_empty of K's slot", swap_lines(text, v_done, "", "arrive(v_empty.index(k_slot)"), launch)
    play("(c) v_empty before the wait", swap_lines(text, v_done, "warpgroup_mma_wait(0"), launch)


def play_hand_offs(text: str) -> None:
    """Play the kernel of 6.2 with a wrong hand-off on each side."""
    launch, _ = two_softmax_launch(*attention_inputs(1, 256, 512))
    play("(a) P announced early", swap_lines(text, "arrive(bars.p_full", "p_view.store("), launch)
    play("(b) o_ready never arrives", swap_lines(text, "mbarrier.arrive(bars.o_ready", "", "pass  # ("), launch)


def swap_lines(text: str, line: str, before: str, instead: str = "") -> str:
    """Move the only line that contains `line` before the line that contains `before`, change it, and return the text.

    Args:
        text: the text of a file.
        line: a part of the line to move.
        before: a part of the line to move it before; "" leaves it where it is.
        instead: a text that replaces `line`; "" changes nothing.
    """
    lines = text.splitlines()
    places = [[i for i, words in enumerate(lines) if part and part in words] for part in (line, before)]
    if len(places[0]) != 1 or (before and len(places[1]) != 1):
        raise AnswerNeeded(f"your file says `{line}` or `{before}` in another way, or more than once: move it by hand.")
    moved = lines.pop(places[0][0])
    at = places[1][0] - (places[1][0] > places[0][0]) if before else places[0][0]
    indent = re.match(r" *", lines[at] if before else moved)
    lines.insert(at, (indent[0] if indent else "") + (moved.replace(line, instead) if instead else moved).strip())
    return "\n".join(lines) + "\n"


# ---- small plots -------------------------------------------------------------------------------------------------


def plot_tiles(table: pd.DataFrame) -> None:
    """Draw the cycles of the three units for each tile, and show the memory and registers that a tile needs."""
    _, ax = plt.subplots(figsize=(8.4, 3.2), layout="constrained")
    for i, unit in enumerate(("products", "exponentials", "loads")):
        ax.bar([x + 0.27 * (i - 1) for x in range(len(table))], table[unit], 0.27, label=unit, **series(i).bar)
    names = [f"d {d}\n{q} queries" for d, q in zip(table["head dim"], table["queries"], strict=True)]
    ax.set_xticks(range(len(table)), names)
    ax.legend(ncols=3)
    style_axes(ax, y="cycles of one SM", title="One block of keys: which unit takes longest?")
    plt.show()
    display(table.round(2))


def plot_slots(cycles: dict[int, float]) -> None:
    """Draw the model cycles of a ring for each number of slots, and compare with the guess."""
    gains = [math.nan, *(cycles[n] / cycles[n + 1] - 1 for n in cycles if n + 1 in cycles)]
    table = pd.DataFrame({"slots": cycles.keys(), "model cycles": cycles.values(), "gained by the last slot": gains})
    enough = next((n for n, gain in zip(cycles, gains[1:], strict=False) if gain < 0.05), max(cycles))
    beside_guess("slots, from which one more gains less than 5%", enough)
    session.plot_bars({"32 tiles, by slots": table}, ["model cycles", "gained by the last slot"])


CONFLICTS = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def conflicts(y_ptr, shared: gl.constexpr, layout: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], shared)
    x = gl.full([64, 64], 1.0, gl.float16, layout)
    tile.store(x)
    gl.store(y_ptr, gl.bank_conflicts(x.type, tile.type))
"""


def plot_conflicts() -> None:
    """Draw the extra turns of a store for four layouts of a tile, as Triton counts them; compare with the guesses."""
    from triton.experimental.gluon import language as gl

    tiles = {"plain rows": gl.SwizzledSharedLayout(8, 1, 1, [1, 0])}
    tiles |= {f"swizzle of {width} bytes": gl.NVMMASharedLayout(width, 16, rank=2) for width in (32, 64, 128)}
    table = pd.DataFrame({"tile": tiles.keys()})
    for lanes, threads, warps, order in (("a row", [4, 8], [4, 1], [1, 0]), ("a column", [32, 1], [1, 4], [0, 1])):
        layout, turns = gl.BlockedLayout([1, 8], threads, warps, order), []
        for shared in tiles.values():
            args = dict(y_ptr=torch.zeros(1, dtype=torch.int32), shared=shared, layout=layout)
            launch = Launch("conflicts", (1,), args, outputs=("y_ptr",), file="conflicts.py")
            turns.append(simulate_launch(CONFLICTS, launch)[0]["y_ptr"].item())
        table[f"lanes along {lanes}"] = turns
    title = "Extra turns (bank conflicts) of storing a tile of 64 rows of 128 bytes"
    session.plot_bars({"turns": table}, ["lanes along a row", "lanes along a column"], title=title)
    for name, extra in zip(tiles, turns, strict=True):
        if name in ("plain rows", "swizzle of 128 bytes"):
            beside_guess(f"extra turns, lanes along a column, {name}", extra)


def plot_naive_and_fused(naive_attention) -> None:
    """Time naive and fused attention here, count kernels and bytes, and draw them beside an H200 (recorded)."""
    if on_gpu:
        batch, heads, length, d, dtype = 4, 16, 4096, 128, torch.bfloat16
    else:
        batch, heads, length, d, dtype = 1, 4, 1024, 64, torch.float32
    q, k, v = (torch.randn(batch, heads, length, d, device=device, dtype=dtype) for _ in range(3))
    naive, fused = partial(naive_attention, q, k, v), partial(attention, q, k, v, backend="flash")
    with nvtx_range("flashattention_baseline_unfused"):  # names of a GPU's kernels in a trace
        expected = naive()
    with nvtx_range("flashattention_optimized_flash"):
        difference = (fused().float() - expected.float()).abs().max().item()
    print(f"(B, H, S, D) = ({batch}, {heads}, {length}, {d}), {dtype}; largest difference {difference:.1e}")
    result = compare(naive, fused, warmup=3, iterations=15, labels=("naive", "fused"))
    qkvo, scores, unit = 4 * batch * heads * length * d, batch * heads * length**2, "kernels" if on_gpu else "operators"
    rows = []
    for name, call, measurement, elements in (
        ("naive", naive, result.a, qkvo + 4 * scores),  # scores and probabilities: each is written once and read once
        ("fused", fused, result.b, qkvo),
    ):
        counts, ms = count_cuda_kernels(profile(call)), measurement.median_ms
        rows.append({"": name, unit: counts["total"], "ms": ms, "MB moved": elements * dtype.itemsize / 1e6,
                     "TFLOP/s": 4 * scores * d / ms / 1e9})  # fmt: skip
    results["naive_and_fused"] = rows
    display(pd.DataFrame(rows).round(4))
    print(result.sentence())
    for row in rows:
        beside_guess(f"kernels or operators, {row['']}", row[unit])
    show_recorded("naive_and_fused")
    session.plot_beside("lab3", "naive_and_fused", ["ms", "MB moved"], title="Naive and fused attention")


def show_recorded_fences() -> None:
    """Show the number of launches with wrong results on an H200, with and without each fence."""
    fences = json.loads((RECORDED / "gluon_fences.json").read_text())
    print(
        f"\nRecorded on an {fences['gpu']}, Triton {fences['triton']}, not measured here: launches with wrong results."
    )
    display(pd.DataFrame(fences["rows"]))


def plot_owner(owner) -> None:
    """Draw the lane that holds each element of two layouts, and the warp numbers of lane 5."""
    layouts = ((1, 4), (4, 8), (4, 1), (1, 0)), ((4, 1), (8, 4), (1, 4), (0, 1))
    figure, axes = plt.subplots(1, 2, figsize=(10.4, 5.2), layout="constrained")
    for ax, layout in zip(axes, layouts, strict=True):
        held = [[owner(row, column, (32, 32), *layout) for column in range(32)] for row in range(32)]
        ax.imshow([[lane for _, lane, _ in line] for line in held], cmap="viridis", aspect="auto")
        for row in range(32):
            for column in range(32):
                if held[row][column][1] == 5:
                    ax.text(column, row, held[row][column][0], ha="center", va="center", color="white", fontsize=9)
        style_axes(ax, x="column", y="row", title=f"BlockedLayout{layout}")
        ax.grid(False)
    figure.suptitle("Lane that holds each element (colour); lane 5 carries its warp's number", fontsize=10)
    plt.show()


def count_fences(file: str, launch: Launch) -> dict | None:
    """Compile a kernel with and without its fences, and count the fences in machine code; None without a compiler."""
    if not offline_compile_support():
        return print(offline_compile_support().reason)
    text = text_of(file)
    bare = re.sub(r"^( *)fence_async_shared\(\)", r"\1pass", text, flags=re.M)
    found = {words: compile_for_hopper(kernel, launch) for words, kernel in (("with", text), ("without", bare))}
    print(machine_code(text, launch, "tma_load(|mbarrier.|.load(layout)|fence_async_shared()", found["with"]), "\n")
    return {words: compiled["proxy fences"] for words, compiled in found.items()}


# ---- what the compiler made of it --------------------------------------------------------------------------------


def compile_answers(kernels: dict[str, Launch], capability: int = HOPPER) -> dict:
    """Compile the files that are answered, and print a line before each; return {name: the compiler's result}."""
    if not (able := offline_compile_support()):
        print(able.reason)
        return {}
    whole = {}
    for name, launch in kernels.items():
        try:
            text = answered(launch.file)
            print(f"{name} is compiled ...", flush=True)
            whole[name] = compile_for_hopper(text, launch, capability=capability)
        except (AnswerNeeded, AssertionError) as refused:
            print(f"{name}: {refused}")
            if capability == BLACKWELL_CHIP and not gluon_on_blackwell():
                print(f"    {gluon_on_blackwell().reason}")  # for example, Triton is too old
    return whole


def show_compiled() -> None:
    """Count the instructions of every answer, and show the machine code of lines of 4.1 and 5.3."""
    small = attention_inputs(2, 100, 200)
    kernels = {
        "3.1 cp.async": async_copy_launch(2000, 4, 3)[0],
        "3.2 TMA ring": tma_ring_launch(40, 440, 3)[0],
        "4.1 wgmma": wgmma_launch(100, 72, 200)[0],
        "5.1 one warpgroup": attention_launch("lab3_softmax.py", 64, *small)[0],
        "5.2 specialized": attention_launch("lab3_specialized.py", 128, *small, STAGES=2)[0],
        "5.3 overlapped": overlap_launch(*small)[0],
    }
    whole = compile_answers(kernels)
    rows = [
        {"kernel": name, **made.instructions, "registers": made.registers}
        | {"spilled bytes": made.spill_bytes, "shared KiB": made.shared_bytes / 1024}
        for name, made in whole.items()
    ]
    if rows:
        results["instructions"] = rows
        display(pd.DataFrame(rows).set_index("kernel").T.map(lambda number: f"{number:.4g}"))
    for name, lines in {
        "4.1 wgmma": "tma_load(|.wait(|warpgroup_mma|c_tile.store|fence_async|tma_store(",
        "5.3 overlapped": "mbarrier.wait(k_full.index(k_slot)|warpgroup_mma|mbarrier.arrive(k_empty",
    }.items():
        if name in whole:
            print(f"{name}\n{machine_code(text_of(kernels[name].file), kernels[name], lines, whole[name])}\n")


# ---- Blackwell: compiled and simulated, never run on such a GPU ---------------------------------------------------


def course_on(gpu: str) -> dict:
    """Simulate the course's attention on 256 queries: step 5 on an "H200", or the kernel for a "B200"; {title: run}."""
    from utils.attention.gluon import step5_overlapped
    from utils.attention.gluon.arguments import Arguments
    from utils.attention.gluon.blackwell import attention as blackwell
    from utils.attention.gluon.plan import plan_for

    q, k, v, _ = (x[None] for x in attention_inputs(1, 256, 512, d=128))
    out, lse, scale = torch.empty_like(q), torch.empty(1, 1, 256), math.log2(math.e) / math.sqrt(128)
    with gluon_cpu.simulate(timeline=True, model={"H200": FROM_L2, "B200": BLACKWELL}[gpu]) as run:
        if gpu == "B200":
            blackwell.launch(q, k, v, out, lse, False, scale)
        else:
            step5_overlapped.launch(Arguments(q, k, v, out, lse, False, 0, False, scale, plan_for(5, 128), 1))
    kernel = {"H200": "Step 5 of the ladder, on Hopper", "B200": "The course's kernel for Blackwell"}[gpu]
    return {f"{kernel}, 256 queries": run}


def compile_for_blackwell() -> None:
    """Compile the answers of Part 6 for sm_100a, and show registers, spills and columns of tensor memory."""
    kernels = {
        "6.1 tcgen05": tcgen05_launch(200, 72, 200)[0],
        "6.2 two softmaxes": two_softmax_launch(*attention_inputs(1, 256, 256))[0],
    }
    shown = {"registers": "registers", "spilled bytes": "spill_bytes", "columns": "tensor_columns"}
    whole = compile_answers(kernels, BLACKWELL_CHIP)
    display(pd.DataFrame({name: {x: getattr(made, y) for x, y in shown.items()} for name, made in whole.items()}).T)


# ---- the race, and what an H200 gave -----------------------------------------------------------------------------


def race(naive_attention) -> None:
    """Time the kernel of 5.3 on a Hopper GPU against the naive one, libraries and the ladder, in turns."""
    show_recorded("race", {"your TFLOP/s": "5.3 TFLOP/s", "you are faster by": "5.3 faster by"})
    if not on_hopper:
        return print(f"No race here. {gluon_support().reason}")
    from utils.attention.gluon.launch import forward

    module = load_kernels(answered("lab3_overlap.py"), overlap_launch(*big)[0])

    def student_attention(q, k, v, block_n=128, stages=2):
        """Launch the kernel of 5.3 on GPU tensors (B, H, S, D)."""
        out = torch.empty_like(q)
        blocks = [
            descriptor(x, [1, 1, rows, q.shape[-1]]) for x, rows in ((q, 64), (k, block_n), (v, block_n), (out, 64))
        ]
        grid = (math.ceil(q.shape[2] / 128), q.shape[0] * q.shape[1])
        scale = math.log2(math.e) / math.sqrt(q.shape[-1])
        module.attention[grid](*blocks, q.shape[2], k.shape[2], q.shape[1], scale, stages, num_warps=4)
        return out

    batch, heads, length, d = 1, 16, 16384, 128
    q, k, v = (torch.randn(batch, heads, length, d, device=device, dtype=torch.bfloat16) for _ in range(3))
    mine, expected = student_attention(q, k, v), attention(q, k, v, backend="flash")
    difference = ((mine.double() - expected.double()).norm() / expected.double().norm()).item()
    assert difference < 0.01, f"on this GPU your kernel differs from flash attention by {difference:.3f}: no race then"
    contenders = {
        "naive": partial(naive_attention, q, k, v),
        "FlashAttention 2": partial(attention, q, k, v, backend="flash"),
        "cuDNN": partial(attention, q, k, v, backend="cudnn"),
    }
    if find_spec("flash_attn_interface"):  # FlashAttention 3's package; its tensors are (B, S, H, D)
        from flash_attn_interface import flash_attn_func

        contenders["FlashAttention 3"] = partial(flash_attn_func, *(x.transpose(1, 2).contiguous() for x in (q, k, v)))
    contenders |= {f"ladder step {step}": partial(forward, q, k, v, step=step) for step in range(1, 6)}
    flops, rows = 4 * batch * heads * length**2 * d, []
    for name, call in contenders.items():
        try:
            turns = compare(call, partial(student_attention, q, k, v), warmup=2, iterations=8, labels=(name, "yours"))
        except (RuntimeError, ValueError) as refused:
            print(f"{name}: {refused}")
            continue
        rows.append({"against": name, "its TFLOP/s": flops / turns.a.median_ms / 1e9,
                     "your TFLOP/s": flops / turns.b.median_ms / 1e9, "you are faster by": turns.speedup})  # fmt: skip
    results["race"] = rows
    display(pd.DataFrame(rows).round(3))
    return None


def plot_ladder() -> None:
    """Draw the recorded speeds of the five steps and their rivals at head dimension 128; compare with the guesses."""
    print("Recorded on an H200, not measured here: head dimension 128, 16384 tokens, full.")
    tables = {}
    for file in ("attention_ladder.json", "attention_ratios.json"):
        record = json.loads((RECORDED / file).read_text())
        rows = pd.DataFrame([row for row in record["rows"] if "ratio" in row])
        rows = rows[~rows["causal"] & (rows["head_dim"] == 128) & (rows["length"] == 16384)]
        ladder = "ladder" in file
        names = "step " + rows["step"].astype(str) if ladder else rows["against"]
        place = f"{'over cuDNN' if ladder else 'over each library'}, torch {record['environment']['torch']}"
        tables[place] = pd.DataFrame({"": names, "Gluon's speed": rows["ratio"]})
        for step, ratio in zip(rows["step"], rows["ratio"], strict=True) if ladder else ():
            beside_guess(f"ladder step {step}, speed over cuDNN's", ratio)
    session.plot_bars(tables, ["Gluon's speed"])
