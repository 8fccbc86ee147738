"""FlashAttention against standard attention: latency and memory over the sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import checks
from .style import INK, SOFT, key_above, log_axis, name_axes, open_axes, series

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure


def plot_flash_attn_improvement(
    df: pd.DataFrame,
    latency_cols: Sequence[str] = ("sdpa_ms", "flash_ms"),
    memory_cols: Sequence[str] = ("sdpa_mem_gb", "flash_mem_gb"),
    seq_len_col: str = "seq_len",
    *,
    ax: Any = None,
    labels: Sequence[str] | None = None,
    title: str | None = None,
) -> tuple[Figure, np.ndarray]:
    """Plot FlashAttention against standard attention: bars of latency (ms) and memory (GB) a sequence length.

    Args:
        df: one row a sequence length.
        latency_cols: columns of latencies in ms, the baseline first.
        memory_cols: columns of memory in GB (1e9 bytes), in the same order.
        seq_len_col: column of sequence lengths.
        ax: two Axes to draw in; a new Figure without.
        labels: names of the bars; without, the latency columns' names less "_ms".
        title: instead of the default one.

    Returns:
        (Figure, array of two Axes): latency, memory.
    """
    import numpy as np

    latency_cols, memory_cols = _columns("latency_cols", latency_cols), _columns("memory_cols", memory_cols)
    if len(latency_cols) != len(memory_cols):
        raise ValueError(f"latency_cols {latency_cols} and memory_cols {memory_cols} must pair up, one each a kernel.")
    if not hasattr(df, "columns"):
        raise ValueError(f"df must be a pandas DataFrame with one row a sequence length, got {type(df).__name__}.")
    missing = [name for name in (seq_len_col, *latency_cols, *memory_cols) if name not in df.columns]
    if missing:
        raise ValueError(
            f"df has no column {', '.join(map(repr, missing))}; it has {[str(c) for c in df.columns]}. "
            "Name yours with latency_cols=, memory_cols= and seq_len_col=."
        )
    if len(df) == 0:
        raise ValueError("df has no rows; pass one row a sequence length.")
    lengths = checks.sizes(seq_len_col, df[seq_len_col])
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    lengths = [lengths[i] for i in order]
    names = [name.removesuffix("_ms") for name in latency_cols] if labels is None else [str(name) for name in labels]
    if len(names) != len(latency_cols):
        raise ValueError(f"labels {names} must name the {len(latency_cols)} columns of latency_cols.")

    def column(name: str, check: Any) -> list[float]:
        values = list(df[name])
        return [check(f"{name} at {seq_len_col} {length}", values[i]) for i, length in zip(order, lengths, strict=True)]

    latency = [column(name, checks.latency) for name in latency_cols]
    memory = [column(name, _gigabytes) for name in memory_cols]

    figure, axes = open_axes(ax, (9.6, 4.0), count=2)
    own = ax is None
    _bars(axes[0], own, lengths, latency, "latency (ms)", "faster")
    _bars(axes[1], own, lengths, memory, "peak memory (GB)", "less")
    head = "FlashAttention against standard attention" if title is None else title
    name_axes(axes[0], own, title=head)
    name_axes(axes[1], own, title=" ")
    for axis in axes:
        key_above(axis, own, _key(names))
    return figure, np.array(axes)


def _columns(argument: str, names: Any) -> list[str]:
    return [str(name) for name in checks.sequence(argument, names, "column names")]


def _gigabytes(name: str, value: Any) -> float:
    result = checks.number(name, value, "GB")
    if result > checks.MAX_MEMORY_GB:
        raise ValueError(f"{name} is {result:g} GB, more than any machine holds: it looks like MB or bytes.")
    return result


def _bars(ax: Any, own: bool, lengths: list[int], columns: list[list[float]], unit: str, gain: str) -> None:
    from .labels import LabelLayer

    values = [value for column in columns for value in column]
    low, high = min(values), max(values)
    log = high / low > 25  # below that, a linear axis keeps lengths of bars honest and still readable
    if log:
        log_axis(ax.yaxis, 10 ** _floor_decade(low), high * 3)
    else:
        ax.set_ylim(0, high * 1.2)
    width = 0.8 / len(columns)
    base = ax.get_ylim()[0]
    layer = LabelLayer(ax)
    for i, column in enumerate(columns):
        look = series(i)
        at = [x - 0.4 + (i + 0.5) * width for x in range(len(lengths))]
        ax.bar(
            at,
            [value - base for value in column],
            width * 0.94,
            bottom=base,
            color=look.color,
            hatch=look.hatch,
            edgecolor="white",
            linewidth=0.0,
            zorder=3,
        )
        for x, value in zip(at, column, strict=True):
            layer.avoid_line([x - 0.45 * width, x + 0.45 * width], [value, value])
            layer.avoid_line([x, x], [base, value])
    if len(columns) == 2:
        for x, (first, second) in enumerate(zip(*columns, strict=True)):
            layer.add(
                f"{first / second:.2g}x" if first / second < 99.5 else f"{first / second:.0f}x",
                (x, max(first, second)),
                prefer="N",
                gap=3,
                color=INK if first > second else SOFT,
                leader=False,
                size=8.5,
                fontweight="bold" if first > second else "normal",
            )
    ax.set_xticks(
        range(len(lengths)),
        labels=[str(n) for n in lengths],
        rotation=0 if sum(len(str(n)) + 2 for n in lengths) < 60 else 45,
    )
    ax.set_xlim(-0.6, len(lengths) - 0.4)
    ax.tick_params(axis="x", length=0)
    ax.grid(False, axis="x")
    kind = f"{unit}, log scale" if log else unit
    note = f"   (numbers: times {gain})" if len(columns) == 2 else ""
    name_axes(ax, own, x=f"sequence length{note}", y=kind)


def _floor_decade(value: float) -> int:
    import math

    return math.floor(math.log10(value / 1.5))


def _key(names: list[str]) -> list[Any]:
    from matplotlib.patches import Patch

    return [
        Patch(facecolor=series(i).color, hatch=series(i).hatch, edgecolor="white", linewidth=0, label=name)
        for i, name in enumerate(names)
    ]
