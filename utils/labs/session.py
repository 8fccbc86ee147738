"""Parts that the notebooks of all labs share: guesses and their score, this run's tables, and recorded tables.

A lab's module binds the name of its record: `show_recorded = functools.partial(session.show_recorded, "lab2")`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import torch
from IPython.display import display
from matplotlib.ticker import MaxNLocator

from utils.benchmark.profiling import TraceEvent, read_trace
from utils.checking import AnswerNeeded
from utils.checking.verdicts import raises_not_implemented, watch_cells
from utils.files import ROOT, output_path, recorded_table
from utils.machine.environment import environment
from utils.visualization import series, style_axes

H200 = ROOT / "assets/results/h200"  # tables that were recorded on an H200
COLORS = {"math": "#0072b2", "flash": "#00694d", "efficient": "#e39a1f", "cudnn": "#a8548a"}  # as in the figures
NEAR = 0.25  # you win with a number if its error is at most a quarter

results: dict[str, list[dict]] = {}  # this run's tables, saved at the end
guesses: dict[str, object] = {}  # your predictions; a measured value is printed beside its guess
outcomes: dict[str, object] = {}  # measured values, by the same names

watch_cells()


def beside_guess(what: str, measured: object) -> None:
    """Print a measured value beside your guess, store both, and print your score against the machine."""
    guess, outcomes[what] = guesses.get(what), measured
    shown = f"{measured:.3g}" if isinstance(measured, float) else str(measured)
    won, lost = score()
    score_text = f"   (you guessed {guess}; so far: you {won}, the machine {lost})"
    print(f"{what}: {shown}" + ("   (no guess)" if guess is None else score_text))


def score() -> tuple[int, int]:
    """Return the number of guesses near the measured value, and the number of other guesses."""
    near = [is_near(guesses[what], measured) for what, measured in outcomes.items() if guesses.get(what) is not None]
    return sum(near), len(near) - sum(near)


def is_near(guess: object, measured: object, rel: float = NEAR) -> bool:
    """Return whether a guess equals the measured value, or is near a measured number; in tuples, for each item."""
    if isinstance(measured, tuple):
        many = isinstance(guess, tuple | list) and len(guess) == len(measured)
        return many and all(is_near(mine, right, rel) for mine, right in zip(guess, measured, strict=True))  # type: ignore[call-overload]
    mine, right = number_of(guess), number_of(measured)
    if mine is None or right is None:
        return str(guess).strip().lower() == str(measured).strip().lower()
    return abs(mine - right) <= rel * abs(right)


def number_of(value: object) -> float | None:
    """Return a finite number, or its text, as a float; None for all other values, also for truth values."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):  # such as a tensor of three numbers
        return None
    return number if math.isfinite(number) else None


def show(rows: Sequence[Mapping] | pd.DataFrame, index: str | list[str] | None = None) -> None:
    """Display a table with four significant digits and full texts; the default of `index` is the first column."""
    # The name of a kernel may be wider than the page. A space without width allows a line break.
    table = pd.DataFrame(rows).map(lambda x: re.sub("(?<=[,:<_])", "\u200b", f"{x}") if len(f"{x}") > 80 else x)
    with pd.option_context("display.float_format", "{:.4g}".format, "display.max_colwidth", None):
        display(table.set_index(index or table.columns[0]))


def keep(name: str, table: pd.DataFrame) -> None:
    """Show a table, and store it in `results`."""
    results[name] = table.to_dict("records")
    show(table)


def show_recorded(lab: str, table: str, renamed: Mapping[str, str] | None = None) -> None:
    """Show a lab's recorded table of an H200, and print that it was not measured here."""
    rows = recorded_table(H200 / f"{lab}.json", table)
    if rows is not None:
        show(rows.rename(columns=renamed or {}))


def here_and_recorded(lab: str, name: str) -> dict[str, pd.DataFrame]:
    """Return {machine: table} for this run and for an H200 (recorded), without tables that have no rows."""
    recorded = recorded_table(H200 / f"{lab}.json", name)
    tables = {"this machine": pd.DataFrame(results.get(name, [])), "H200, recorded": recorded}
    return {place: table for place, table in tables.items() if table is not None and len(table)}


def plot_beside(lab: str, name: str, columns: Sequence[str], label: str | list[str] = "", title: str = "") -> None:
    """Draw columns of a table of this run, and below it of the same table from an H200 (recorded).

    Args:
        lab: the name of the lab's record, such as `lab2`.
        name: name of the table in `results` and in the record.
        columns: the columns to draw.
        label: as for `plot_bars`.
        title: title of the picture.
    """
    plot_bars(here_and_recorded(lab, name), columns, label, title)


def plot_bars(tables: Mapping[str, pd.DataFrame], columns: Sequence[str], label: str | list[str] = "", title: str = ""):
    """Draw bars: a row of panels for each table. Each panel has its own scale.

    Args:
        tables: {the words above its panels: a table}.
        columns: the columns to draw.
        label: the column, or columns, that name the bars; the default is the first column.
        title: title of the picture.
    """
    if not tables:
        return
    sizes = [len(table) for table in tables.values()]
    size = 1.5 + 3 * max(len(columns), 2), 0.28 * sum(sizes) + 0.7 * len(tables) + 0.3 * bool(title)
    shape = {"squeeze": False, "height_ratios": sizes, "layout": "constrained"}
    figure, grid = plt.subplots(len(tables), len(columns), figsize=size, **shape)
    for i, (place, table) in enumerate(tables.items()):
        words = table[[label] if isinstance(label, str) and label else label or [table.columns[0]]]
        names = words.replace({True: "causal", False: "full"}).astype(str).agg(", ".join, axis=1).tolist()
        kinds = next((table[kind] for kind in ("backend", "ran") if kind in table), words.iloc[:, 0])
        other = "0.5" if {*kinds} & {*COLORS} else series(i).color  # grey, so that it is not the colour of a backend
        for ax, column in zip(grid[i], columns, strict=True):
            values = table[column].astype(float) if column in table else pd.Series(math.nan, table.index)
            bars = ax.barh(range(len(table)), values, color=[COLORS.get(kind, other) for kind in kinds])
            marks = ["" if math.isnan(v) else f"{v:,.0f}" if v >= 1000 else f"{v:.3g}" for v in values]
            ax.bar_label(bars, marks, padding=3, fontsize=8)
            ax.set_ylim(len(table) - 0.5, -0.5)
            ax.xaxis.set_major_locator(MaxNLocator(4))
            ax.margins(x=0.25)
            style_axes(ax, title=f"{column}   ({place})")
            ax.set_yticks(range(len(table)), names if ax is grid[i][0] else [""] * len(table))
    figure.suptitle(title)
    plt.show()


def inside_of_last(trace: str | Path, name: str, without: str = "") -> list[TraceEvent]:
    """Return the events inside of a trace's last event whose name begins with `name`; remove the prefix `without`."""
    events = read_trace(trace)
    call = [event for event in events if event.name.startswith(name)][-1]
    inside = [event for event in events if event != call and call.start_us <= event.start_us <= call.end_us]
    names = ["generated kernel" if "CompiledFxGraph" in e.name else e.name.removeprefix(without) for e in inside]
    lanes = [re.sub(r"thread \d+", "CPU", event.lane) for event in inside]
    return [replace(event, name=n, lane=lane) for event, n, lane in zip(inside, names, lanes, strict=True)]


def text_of(file: str) -> str:
    """Return the text of an exercise's file."""
    if not Path(file).exists():
        raise AnswerNeeded(f"{file} is not there: run the cell that begins with %%writefile {file}.")
    return Path(file).read_text()


def answered(file: str) -> str:
    """Return the text of an exercise's file; `AnswerNeeded` if it is not answered yet."""
    if raises_not_implemented(text := text_of(file)):
        raise AnswerNeeded(f"This cell needs {file}: answer its question first, and run its cell.")
    return text


def small_task(
    what: str, right: object, hint: str, mistakes: Mapping[Any, str] | None = None, rel: float = 0.01
) -> Callable[[object], None]:
    """Return a check of a line without points. The check prints whether the line is right, and never raises.

    Args:
        what: the value of the line, in words.
        right: the right value: a number, a word, or a tuple of these.
        hint: advice for a wrong line.
        mistakes: {value of a known mistake: words that name it}.
        rel: relative tolerance for numbers.
    """

    def check_line(yours: object = None) -> None:
        if yours is None:
            return print(f"… {what}: write your line, and run the cell again.")
        if is_near(yours, right, rel):
            return print(f"✓ {what}: {yours}")
        known = next((words for wrong, words in (mistakes or {}).items() if is_near(yours, wrong, rel)), hint)
        return print(f"✗ {what}: not {yours}. {known}")

    check_line.what = what  # type: ignore[attr-defined]
    return check_line


def save(lab: str) -> None:
    """Write this run's tables and guesses and the machine's facts to a file, and draw your guesses."""
    machine = environment()
    record = {
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else machine.get("cpu"),
        "commit": machine.get("commit"),
        "environment": machine,
        "tables": results,
        "guesses": {what: {"guess": guesses.get(what), "outcome": outcome} for what, outcome in outcomes.items()},
    }
    saved = output_path(f"{lab}_results.json")
    saved.write_text(json.dumps(record, indent=1, default=str))
    won, lost = score()
    print(f"saved {', '.join(results) or 'no table'} to {saved}")
    print(f"you made {won + lost} of {len(outcomes.keys() & guesses.keys())} guesses: you {won}, the machine {lost}")
    plot_guesses()


def plot_guesses() -> None:
    """Draw each guess of a number over the measured number."""
    pairs = {what: (number_of(guesses.get(what)), number_of(outcome)) for what, outcome in outcomes.items()}
    ratios = {what: mine / right for what, (mine, right) in pairs.items() if mine and right and mine * right > 0}
    if not ratios:
        return
    _, ax = plt.subplots(figsize=(8, 1.2 + 0.3 * len(ratios)))
    ax.axvspan(1 - NEAR, 1 + NEAR, color="#b4d9c5")
    ax.plot(list(ratios.values()), range(len(ratios)), "o", color=series(0).color)
    ax.set(xscale="log", yticks=range(len(ratios)), yticklabels=list(ratios), ylim=(len(ratios) - 0.5, -0.5))
    style_axes(ax, x="your guess / what was measured; green: within a quarter", title="You against the machine")
    plt.show()
