"""What all labs share in a notebook: guesses and their score, this run's tables, and what an H200 measured beside them.

A lab's module binds the name of its record: `show_recorded = functools.partial(session.show_recorded, "lab2")`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
import torch
from IPython.display import display

from utils.files import ROOT, output_path, recorded_table
from utils.machine.environment import environment
from utils.visualization import series, style_axes

H200 = ROOT / "assets/results/h200"  # tables that were recorded on an H200
NEAR = 0.25  # a guess of a number counts for you if it is off by a quarter at most

results: dict[str, list[dict]] = {}  # this run's tables, saved at the end
guesses: dict[str, object] = {}  # your predictions; a measured value is printed beside its guess
outcomes: dict[str, object] = {}  # what came out, by the same names


def beside_guess(what: str, measured: object) -> None:
    """Print a measured value beside your guess, keep both, and say how you stand against the machine."""
    guess, outcomes[what] = guesses.get(what), measured
    shown = f"{measured:.3g}" if isinstance(measured, float) else str(measured)
    won, lost = score()
    score_text = f"   (you guessed {guess}; so far: you {won}, the machine {lost})"
    print(f"{what}: {shown}" + ("   (no guess)" if guess is None else score_text))


def score() -> tuple[int, int]:
    """Count the guesses that came near what was measured, and those that did not."""
    near = [is_near(guesses[what], measured) for what, measured in outcomes.items() if guesses.get(what) is not None]
    return sum(near), len(near) - sum(near)


def is_near(guess: object, measured: object) -> bool:
    """Return whether a guess is what was measured, or for numbers within a quarter of it."""
    mine, right = number_of(guess), number_of(measured)
    if mine is None or right is None:
        return str(guess).strip().lower() == str(measured).strip().lower()
    return abs(mine - right) <= NEAR * abs(right)


def number_of(value: object) -> float | None:
    """Return a finite number as a float, and None for anything else, truth values too."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def keep(name: str, table: pd.DataFrame, digits: int = 3) -> None:
    """Show a table, and keep it in `results`."""
    results[name] = table.to_dict("records")
    display(table.set_index(table.columns[0]).convert_dtypes().round(digits))


def show_recorded(lab: str, table: str, renamed: Mapping[str, str] | None = None, digits: int = 3) -> None:
    """Show a table of a lab as it was recorded on an H200, and say that it was not measured here."""
    rows = recorded_table(H200 / f"{lab}.json", table)
    if rows is not None:
        display(rows.rename(columns=renamed or {}).convert_dtypes().round(digits))


def plot_beside_recorded(lab: str, table: str, column: str, title: str, unit: str = "", log: bool = False) -> None:
    """Draw a column of a table of this run, and beside it the same column as it was recorded on an H200.

    Args:
        lab: the name of the lab's record, such as `lab2`.
        table: name of the table in `results` and in the record; its first column names the rows.
        column: the column to draw.
        title: title of the picture.
        unit: label of the axis; the column's name if left out.
        log: dots on a logarithmic axis, in place of bars, whose lengths would mean nothing there.
    """
    path = H200 / f"{lab}.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    there = record.get("tables", {}).get(table)
    rows = {"this machine": results.get(table), f"{record.get('machine')}, recorded": there}
    plot_panels({place: pd.DataFrame(found) for place, found in rows.items() if found}, column, title, unit, log)


def plot_panels(tables: Mapping[str, pd.DataFrame], column: str, title: str, unit: str = "", log: bool = False) -> None:
    """Draw a column of several tables side by side, each with an axis of its own; the first column names the rows."""
    tables = {place: table.dropna(subset=column) for place, table in tables.items() if column in table}
    if not tables:
        return
    tall = max(map(len, tables.values()))
    figure, axes = plt.subplots(1, len(tables), figsize=(5.4 * len(tables), 1.3 + 0.34 * tall), squeeze=False)
    for i, (ax, (place, table)) in enumerate(zip(axes[0], tables.items(), strict=True)):
        values = table[column].astype(float).tolist()
        if log:
            ax.plot(values, range(len(values)), series(i).marker, color=series(i).color)
            ax.set_xscale("log")
        else:
            ax.barh(range(len(values)), values, height=0.6, **series(i).bar)
        for row, value in enumerate(values):
            ax.annotate(f"{value:.3g}", (value, row), va="center", xytext=(6, 0), textcoords="offset points")
        ax.set(yticks=range(len(values)), yticklabels=table.iloc[:, 0].astype(str), ylim=(tall - 0.5, -0.5))
        ax.margins(x=0.2)
        style_axes(ax, x=unit or column, title=place)
    figure.suptitle(title)
    figure.tight_layout()
    plt.show()


def save(lab: str) -> None:
    """Write this run's tables and guesses to a file, with the machine they were made on, and draw your guesses."""
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
    print(f"you made {won + lost} of {len(outcomes)} guesses: you {won}, the machine {lost}")
    plot_guesses()


def plot_guesses() -> None:
    """Draw each guess of a number as a multiple of what was measured."""
    pairs = {what: (number_of(guesses.get(what)), number_of(outcome)) for what, outcome in outcomes.items()}
    ratios = {what: mine / right for what, (mine, right) in pairs.items() if mine and right and mine * right > 0}
    if not ratios:
        return
    _, ax = plt.subplots(figsize=(8, 1.2 + 0.3 * len(ratios)))
    ax.axvspan(1 - NEAR, 1 + NEAR, color="#d3ebdf")
    ax.plot(list(ratios.values()), range(len(ratios)), "o", color=series(0).color)
    ax.set(xscale="log", yticks=range(len(ratios)), yticklabels=list(ratios), ylim=(len(ratios) - 0.5, -0.5))
    style_axes(ax, x="your guess / what was measured; green: within a quarter", title="You against the machine")
    plt.show()
