"""FlashAttention against standard attention: latency and memory over the sequence length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import inputs
from .latency import draw_lines
from .style import name_axes, open_axes

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
    title: str = "FlashAttention against standard attention",
) -> tuple[Figure, np.ndarray]:
    """Plot FlashAttention against standard attention: latency and memory over the sequence length, on logarithmic axes.

    Args:
        df: one row for each sequence length.
        latency_cols: columns of latencies in ms, the baseline first.
        memory_cols: columns of memory in GB (1e9 bytes), in the same order. NaN in both columns of a kernel means that it
            ran out of memory, and the picture says so.
        seq_len_col: column of sequence lengths.
        ax: two Axes to draw in; None for a new figure.
        labels: names of the lines; None for the names of the latency columns without "_ms".
        title: the title.

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
    lengths = sorted(inputs.sizes(seq_len_col, df[seq_len_col]))
    df = df.sort_values(seq_len_col)
    names = [name.removesuffix("_ms") for name in latency_cols] if labels is None else [str(name) for name in labels]
    if len(names) != len(latency_cols):
        raise ValueError(f"labels {names} must name the {len(latency_cols)} columns of latency_cols.")
    latency = [_column(df, name, seq_len_col, inputs.latency) for name in latency_cols]
    memory = [_column(df, name, seq_len_col, _gigabytes) for name in memory_cols]
    for name, times, sizes in zip(latency_cols, latency, memory, strict=True):
        if [math.isnan(t) for t in times] != [math.isnan(m) for m in sizes]:
            raise ValueError(f"{name} is NaN where its memory is not, or the reverse: NaN in both means out of memory.")
        if all(map(math.isnan, times)):
            raise ValueError(f"{name} is NaN at every length: leave that kernel out.")
    small = all(size < 1 for sizes in memory for size in sizes if not math.isnan(size))
    memory = [[size * 1e3 for size in sizes] for sizes in memory] if small else memory
    units = "latency (ms)", f"peak memory ({'MB' if small else 'GB'})"

    figure, axes = open_axes(ax, (9.6, 4.0), count=2)
    for axis, columns, unit, gain in zip(axes, (latency, memory), units, ("faster", "less"), strict=True):
        lines = {
            name: {length: (value, None) for length, value in zip(lengths, column, strict=True)}
            for name, column in zip(names, columns, strict=True)
        }
        ratios = {n: a / b for n, a, b in zip(lengths, *columns, strict=True)} if len(columns) == 2 else {}
        draw_lines(axis, lines, ratios)
        name_axes(axis, x=f"sequence length   (numbers: times {gain})" if ratios else "sequence length", y=unit)
    name_axes(axes[0], title=title)
    return figure, np.array(axes)


def _columns(argument: str, names: Any) -> list[str]:
    return [str(name) for name in inputs.sequence(argument, names, "column names")]


def _column(df: Any, name: str, seq_len_col: str, check: Any) -> list[float]:
    return [
        math.nan if missing else check(f"{name} at {seq_len_col} {length}", value)
        for length, value, missing in zip(df[seq_len_col], df[name], df[name].isna(), strict=True)
    ]


def _gigabytes(name: str, value: Any) -> float:
    result = inputs.number(name, value, "GB")
    if result > inputs.MAX_MEMORY_GB:
        raise ValueError(f"{name} is {result:g} GB, more than any machine holds: it looks like MB or bytes.")
    return result
