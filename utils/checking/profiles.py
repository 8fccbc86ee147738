"""Whether a profile's steps wait for the device: on a CPU nothing has to be waited for, so a wait leaves a mark in the trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from utils.checking.travel import by_value

_MARK = "aten::lgamma"


@by_value
def wait_with_mark() -> None:
    """Wait for the device, and leave the mark that `steps_that_wait` looks for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    torch.lgamma(torch.ones(2))


@contextlib.contextmanager
def marked_waits(function: Callable, wait: Callable[[], None] = wait_with_mark) -> Iterator[None]:
    """Let the `synchronize` of a function's notebook leave a mark, for the length of a `with` block.

    Args:
        function: the answer.
        wait: what `synchronize` does meanwhile; by default it leaves an operator in a profile.
    """
    names = getattr(function, "__globals__", {})
    if "synchronize" not in names:
        yield
        return
    before = {"synchronize": names["synchronize"]}
    names.update({"synchronize": wait})
    try:
        yield
    finally:
        names.update(before)


def steps_that_wait(events: list[dict], operator: str) -> int | None:
    """Count the recorded steps of a trace in which a wait follows the last `operator` of the step.

    Args:
        events: the trace's events.
        operator: what the profiled function runs.

    Returns:
        The number of steps; None if there is no mark, because nobody waited, or by another function.
    """
    timed = [e for e in events if "ts" in e and "dur" in e]
    if not any(e.get("name") == _MARK for e in timed):
        return None
    found = 0
    for ran, waited in _steps(timed, operator):
        found += bool(ran and waited and max(waited) > max(ran))
    return found


def _steps(timed: list[dict], operator: str) -> Iterator[tuple[list[float], list[float]]]:
    """Of each recorded step, in their order: when the operator ran, and when the marks were left."""
    steps = [e for e in timed if str(e.get("name", "")).startswith("ProfilerStep#")]
    for step in sorted(steps, key=lambda e: e["ts"]):
        inside = [e for e in timed if step["ts"] <= e["ts"] <= step["ts"] + step["dur"]]
        yield (
            [e["ts"] for e in inside if e.get("name") == operator],
            [e["ts"] for e in inside if e.get("name") == _MARK],
        )
