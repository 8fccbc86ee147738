"""The gallery of the README: `python -m tools.figures.gallery` writes it to `docs/gallery`.

Every picture comes from results that are recorded in `assets/results`, or is computed here without a measurement: a mask
is counted and a timeline is simulated. Each picture says which.
"""

from __future__ import annotations

import io
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.figures.drawing import drawn_alike, shorten_path
from utils.files import ROOT
from utils.visualization.style import CARD, HAIR, INK, PAPER, SMALL, SOFT, TEXT, log_axis, name_axes, open_axes, series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = ROOT / "assets" / "results" / "h200"
FOLDER = ROOT / "docs" / "gallery"
WIDE = 4.95  # inches: on a page that shows a picture 400 px wide, its smallest text is 9 px high
STEPS = ("plain", "async\ncopies", "copy\nengine", "warps with\nroles", "two tiles\nat once")


def record(name: str) -> dict[str, Any]:
    """Return a recorded result by the name of its file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def source(document: dict[str, Any]) -> str:
    """Return the line that says where a recorded result comes from."""
    env = document["environment"]
    changed = " and local changes" if env["dirty"] else ""
    return f"{env['gpu']}, torch {env['torch']}, Triton {env['triton']}, commit {env['commit'][:7]}{changed}"


def _signed(figure: Figure, text: str) -> Figure:
    """Write the origin of the data at the foot of a picture, in lines that are no longer than the picture is wide."""
    text = "\n".join(textwrap.fill(" ".join(line.split()), 58) for line in text.split("\n\n"))
    figure.supxlabel(text, fontsize=SMALL, color=SOFT, x=0.99, ha="right")
    return figure


def waiting() -> Figure:
    """What share of an H200 four pieces of PyTorch use, and what the rest of the time goes into."""
    from utils.config import GPU_SPECS

    lab1, bandwidth = record("lab1"), 1e3 * GPU_SPECS["H200"]["memory_bandwidth_tb_s"]
    tables = lab1["tables"]
    used = {row["operation"]: row["share"] for row in (*tables["roofline"], *tables["layer_roofline"])}
    gelu = {row["GELU"]: row["GB/s of one read and one write"] / bandwidth for row in tables["gelu"]}
    kernels = {row["GELU"]: row["kernels"] for row in tables["gelu"]}["by hand"]
    launches = next(row["kernels"] for row in tables["cuda_graphs"] if row["phase"].startswith("decode"))
    rows = (
        ("matmul 8192 x 8192", used["gemm 8192"], "it computes"),
        ("matmul 256 x 256", used["gemm 256"], "too small: most of the chip has no work"),
        (f"GELU, {kernels} torch lines", gelu["by hand"], f"{kernels} trips to memory"),
        ("GELU, one kernel", gelu["Triton kernel"], "one trip to memory"),
        ("next token, Gemma-3", used["decode B1"], f"waits for Python to start {launches} kernels"),
    )
    figure, (ax,) = open_axes(None, (WIDE, 2.75))
    ax.grid(False)
    for place, (_, share, why) in enumerate(rows):
        ax.barh(place, 100, height=0.6, color=HAIR, alpha=0.25)
        ax.barh(place, 100 * share, height=0.6, **series(0).bar)
        look = {"x": 2, "color": PAPER} if share > 0.5 else {"x": 100 * share + 2, "color": INK}
        text = f"{100 * share:.{0 if share > 0.01 else 1}f}%  {why}"
        ax.text(y=place, s=text, va="center", fontsize=SMALL, **look)
    ax.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=SMALL)
    ax.invert_yaxis()
    ax.set_xlim(0, 100)
    ax.set_xticks([0, 50, 100], ["0", "50", "100%"], fontsize=SMALL)
    name_axes(ax, title="How much of an H200 your PyTorch uses")
    foot = "of what its arithmetic or its memory allows, whichever ends first (lab 1)"
    return _signed(figure, f"{foot}\n\n{source(lab1)}")


def ladder() -> Figure:
    """The five steps of the attention kernel, with cuDNN, measured in turn with each step, and FlashAttention 3 and 4."""
    head_dim, length = 128, 16384
    steps = record("attention_ladder")
    rows = [row for row in steps["rows"] if (row["head_dim"], row["length"], row["causal"]) == (head_dim, length, True)]
    ratios = record("attention_ratios")
    peers = {
        row["against"]: row["against_tflops"]
        for row in ratios["rows"]
        if (row["head_dim"], row["length"], row["causal"]) == (head_dim, length, True)
    }
    figure, (ax,) = open_axes(None, (WIDE, 3.9))
    ax.grid(False, axis="x")
    rows.sort(key=lambda row: row["step"])
    for row in rows:
        best = row["step"] == len(rows)
        look = series(0).bar if best else {**series(0).bar, "alpha": 0.45}
        ax.bar(row["step"], row["tflops"], width=0.62, **look)
        ax.text(row["step"], row["tflops"] + 12, f"{row['tflops']:.0f}", ha="center", fontsize=TEXT, fontweight="bold")
    cudnn = sorted(row["against_tflops"] for row in rows)[len(rows) // 2]
    for value, name, look, above in (
        (cudnn, "cuDNN", series(4), False),
        (peers["cute"], "FlashAttention 4", series(2), False),
        (peers["fa3"], "FlashAttention 3", series(3), True),
    ):
        ax.axhline(value, color=look.color, linestyle=look.linestyle, linewidth=1.6)
        place = {"y": value + 8, "va": "bottom"} if above else {"y": value - 10, "va": "top"}
        ax.text(0.42, s=f"{name} {value:.0f}", color=INK, fontsize=TEXT, **place)
    ax.set_xticks([row["step"] for row in rows], [f"{row['step']}\n{STEPS[row['step'] - 1]}" for row in rows])
    ax.set_xlim(0.4, len(rows) + 0.5)
    ax.set_ylim(0, 880)
    name_axes(ax, y="TFLOP/s", title="The attention kernel of lab 3, in five steps")
    others = f"the two FlashAttentions: commit {ratios['environment']['commit'][:7]}"
    return _signed(figure, f"causal, {length} tokens, head dim {head_dim}, bf16; {source(steps)}; {others}")


def roofline() -> Figure:
    """Lab 1's matrix products, a Gemma-3 layer and attention under the roofs of an H200."""
    from utils.config import GPU_SPECS
    from utils.visualization import plot_roofline

    lab1 = record("lab1")
    names = {
        "gemm 256": "matmul 256",
        "gemm 8192": "matmul 8192",
        "gemv 16384": "matrix x vector",
        "prefill B1": "prompt",
        "decode B1": "next token",
        "standard": "attention, 3 ops",
    }
    measured = {
        names[row["operation"]]: (row["FLOPs/Byte"], row["TFLOP/s"])
        for table in ("roofline", "layer_roofline", "attention_roofline")
        for row in lab1["tables"][table]
        if row["operation"] in names
    }
    spec = GPU_SPECS["H200"]
    figure, _ = plot_roofline(
        "H200",
        spec["bf16_tflops"],
        spec["memory_bandwidth_tb_s"],
        measured=measured,
        title="Predict, measure, explain the gap (lab 1)",
    )
    figure.set_size_inches(WIDE, 3.7)
    return _signed(figure, f"roofs: datasheet; points: {source(lab1)}")


def decode() -> Figure:
    """One decode step of a Gemma-3 layer over the batch: measured, and the three roofs above it."""
    from utils.config import GEMMA_CONFIG, GPU_SPECS

    shape, lab1, spec, past = GEMMA_CONFIG, record("lab1"), GPU_SPECS["H200"], 2048
    eager = {row["batch"]: row["cached_ms"] for row in lab1["tables"]["decoder_layer"] if row["length"] == past}
    decode = [row for row in lab1["tables"]["cuda_graphs"] if row["phase"].startswith("decode")]
    graphs = {row["batch"]: row["graph_ms"] for row in decode}
    batches = [2**i for i in range(6)]
    heads, kv_heads, keys = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim * (past + 1)
    weights = shape.hidden_size * (2 * shape.head_dim * (heads + kv_heads) + 3 * shape.intermediate_size)
    moved = [2 * (weights + 2 * b * kv_heads * keys) for b in batches]  # bytes in bf16: each weight, key and value once
    flops = [2 * b * weights + 4 * b * heads * keys for b in batches]
    figure, (ax,) = open_axes(None, (WIDE, 3.9))
    ax.set_xscale("log", base=2)
    ax.set_xticks(batches, [str(batch) for batch in batches])
    log_axis(ax.yaxis, 1e-5, 4)
    ax.set_yticks([1e-4, 1e-3, 1e-2, 0.1, 1], ["0.0001", "0.001", "0.01", "0.1", "1"])
    for values, name, look in (
        (eager, f"PyTorch: the CPU starts {decode[0]['kernels']} kernels", series(0)),
        (graphs, "CUDA graph: the GPU starts them itself", series(1)),
    ):
        ax.plot(list(values), list(values.values()), **look.line, markersize=7)
        ax.text(1.05, values[1] * 1.5, name, color=INK, fontsize=TEXT)
    for work, rate, name in (
        (moved, spec["memory_bandwidth_tb_s"], "limit of memory: bytes / 4.8 TB/s"),
        (flops, spec["bf16_tflops"], "limit of arithmetic: FLOPs / 989 TFLOP/s"),
    ):
        ax.plot(batches, [count / rate / 1e9 for count in work], color=INK, linewidth=1.4)
        ax.text(batches[2], work[2] / rate / 1e9 * 0.5, name, color=SOFT, fontsize=TEXT, va="top")
    name_axes(ax, x="batch", y="ms for one token in one layer", title="Decode waits for the CPU (lab 1)")
    return _signed(figure, f"{past} tokens in the cache; limits: datasheet; {source(lab1)}")


def attention() -> Figure:
    """The course's attention kernel against each other backend: median of the ratio over lengths, and its range."""
    document = record("attention_ratios")
    names = {"cudnn": "cuDNN", "fa3": "FlashAttention 3", "cute": "FlashAttention 4"}
    figure, axes = open_axes(None, (WIDE, 3.4), count=2)
    for ax, causal in zip(axes, (False, True), strict=True):
        for place, backend in enumerate(names):
            for offset, head_dim in enumerate((64, 128, 256)):
                ratios = sorted(
                    row["ratio"]
                    for row in document["rows"]
                    if (row["against"], row["head_dim"], row["causal"]) == (backend, head_dim, causal)
                    and row.get("ratio")
                )
                if not ratios:
                    continue
                look, y = series((0, 4, 2)[offset]), place + (offset - 1) * 0.22
                ax.hlines(y, ratios[0], ratios[-1], color=look.color, linewidth=1.4)
                middle = ratios[len(ratios) // 2]
                label = f"head dim {head_dim}" if place == 0 else None
                ax.plot([middle], [y], marker=look.marker, color=look.color, linestyle="none", label=label)
        ax.axvline(1, color=INK, linewidth=1.2)
        ax.set_yticks(range(len(names)), list(names.values()) if not causal else [""] * len(names))
        ax.invert_yaxis()
        ax.set_xlim(0.92, 1.5)
        name_axes(ax, x="our speed / theirs", title="causal" if causal else "full")
    entries = axes[1].get_legend_handles_labels()
    figure.legend(*entries, frameon=False, fontsize=SMALL, loc="outside upper right", ncols=3)
    return _signed(figure, f"forward, bf16, median and range over lengths 1k to 16k; {source(document)}")


def mask() -> Figure:
    """Packed documents under a causal mask, as pairs and as blocks."""
    from utils.attention.masks.mask_mods import both, causal, document_ids, documents
    from utils.visualization import plot_mask

    lengths = (300, 120, 420, 184)
    packed = both(causal, documents(document_ids(lengths)))
    figure, axes = plot_mask(packed, sum(lengths))
    figure.set_size_inches(WIDE, 3.2)
    for ax, kind in zip(axes[0], ("pairs", "blocks"), strict=True):
        share = next(word for word in ax.get_title(loc="left").split() if word.endswith("%"))
        name_axes(ax, title=f"{share} of the {kind}")
        ax.set_xlabel("")
    return _signed(figure, "four packed documents under a causal mask: counted, not measured (lab 2)")


def deadlock() -> Figure:
    """A ring of two slots in the simulator: as it should run, and with one slot that is never released."""
    import torch
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from tools.figures.gallery_ring import ring_of_two
    from utils import gluon_cpu

    x, tiles = torch.arange(64 * 512, dtype=torch.float32).reshape(64, 512).div(1e5).half(), 8
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    figure, axes = open_axes(None, (WIDE, 4.8), count=2, rows=2)
    for ax, forget in zip(axes, (False, True), strict=True):
        arguments = (TensorDescriptor.from_tensor(x, [64, 64], layout), torch.zeros(64), tiles, forget)
        with gluon_cpu.simulate(timeline=True) as run:
            try:
                ring_of_two[(1,)](*arguments)
                text = f"runs to the end: {run.cycles[0]:,.0f} model cycles"
                whole = run.cycles[0]
            except gluon_cpu.DeadlockError as error:
                waits = re.findall(r"(\w+) waits for (\w+\[\d\]), phase parity (\d)", str(error))
                text = "deadlock found:\n" + "\n".join(f"{who.strip('_')} waits for {bar}" for who, bar, _ in waits)
        run.plot(ax=ax)
        ax.get_legend().remove()  # the picture's foot names the colours
        for note in ax.texts:  # the title says it
            note.set_visible(False)
        ax.set_title(text, loc="left", fontsize=TEXT, fontweight="bold")
        ax.set_xlim(0, whole)
        ax.set_yticks(ax.get_yticks(), [label.get_text().replace("_", "") for label in ax.get_yticklabels()])
        if forget:
            end = max(event.end for event in run.events)
            ax.axvspan(end, whole, facecolor=PAPER, edgecolor=HAIR, hatch="///", linewidth=0)
            middle = (end + whole) / 2, ax.get_ylim()[0] / 2 - 0.3
            ax.text(*middle, "nobody can go on", ha="center", backgroundcolor=CARD)
        else:
            ax.set_xlabel("")
    return _signed(figure, "grey waits, blue computes, green copies; simulated on a CPU, no GPU needed (lab 3)")


PICTURES: dict[str, Callable[[], Figure]] = {
    "waiting": waiting,
    "ladder": ladder,
    "roofline": roofline,
    "decode": decode,
    "attention": attention,
    "mask": mask,
    "deadlock": deadlock,
}


def draw(name: str) -> str:
    """Draw one picture and return it as SVG, the same text every time."""
    import matplotlib.pyplot as plt

    with drawn_alike():
        figure = PICTURES[name]()
        text = io.StringIO()
        figure.savefig(
            text, format="svg", metadata={"Date": None}, facecolor=CARD, bbox_inches="tight", pad_inches=0.12
        )
        plt.close(figure)
    return re.sub(r"\n +", "\n", re.sub(r' d="[^"]+"|translate\([^)]+\)', shorten_path, text.getvalue()))


def main(folder: Path = FOLDER) -> list[Path]:
    """Write every picture to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        (folder / f"{name}.svg").write_text(draw(name), encoding="utf-8")
    return [folder / f"{name}.svg" for name in PICTURES]


if __name__ == "__main__":
    for written in main():
        print(f"{written}  {written.stat().st_size / 1000:.0f} kB")
