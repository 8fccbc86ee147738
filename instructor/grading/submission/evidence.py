"""Which operators ran in a call: seen in the student's process by the check's modes, whose data travel to and fro."""

from __future__ import annotations

import collections
import copy
import dataclasses
import json

from torch.utils._python_dispatch import TorchDispatchMode

from instructor.grading.wire.channel import WireError
from utils.checking.watching import OperationWatch, StudentLine

MAX_SEEN = 20_000_000  # characters of what a mode may have seen in one call: 200,000 operators and their shapes
_COUNTERS = [field.name for field in dataclasses.fields(OperationWatch) if field.name not in ("lines", "rules")]


class _Nothing(TorchDispatchMode):
    """A mode without data of its own."""


_OF_TORCH = vars(_Nothing()).keys()

# ---- in the student's process ------------------------------------------------------------------------------------


def describe_watch(watch) -> dict:
    """What `watch_operations` saw, as data."""
    counts = {name: {str(k)[:200]: int(v) for k, v in getattr(watch, name).items()} for name in _COUNTERS}
    lines = {str(k)[:200]: [line.function[:200], line.number, line.text[:300]] for k, line in watch.lines.items()}
    return {**counts, "lines": lines}


def _attributes(mode: object) -> dict:
    """What a mode has seen: its public attributes, all of them data."""
    return {name: value for name, value in vars(mode).items() if name[0] != "_" and name not in _OF_TORCH}


def describe_mode(mode: object) -> str:
    """What a mode of the check has seen in the student's process, as JSON."""
    return json.dumps(_attributes(mode))


# ---- in the checker's process ------------------------------------------------------------------------------------


def merge_watch(watch, fields: dict) -> None:
    """Add to a watch of the check what the student's process saw."""
    for name in _COUNTERS:
        counts = fields[name]
        if not all(type(n) is int and n >= 0 for n in counts.values()):
            raise WireError("counts that are no counts")
        getattr(watch, name).update(collections.Counter(counts))
    for name, (function, number, text) in fields["lines"].items():
        watch.lines.setdefault(name, StudentLine(str(function), int(number), str(text)))


def without_private(mode: object) -> object:
    """A copy of a mode that has forgotten the objects of this process which it knows, such as tensors by their ids."""
    made = copy.copy(mode)
    for name, value in vars(made).items():
        if name[0] == "_" and isinstance(value, dict | list | set):
            vars(made)[name] = type(value)()
    return made


def update_mode(mode: object, text: str) -> None:
    """Give a mode of the check what it saw in the student's process, from where the text may be forged."""
    fields, known = json.loads(text), _attributes(mode)
    if {name: type(value) for name, value in fields.items()} != {name: type(value) for name, value in known.items()}:
        raise WireError("a mode with other attributes than it has")
    for name, value in fields.items():
        setattr(mode, name, list(_tuples(value)) if isinstance(value, list) else value)


def _tuples(value: list) -> tuple:
    """Lists as tuples: JSON does not tell them apart, and what a mode lists does not change."""
    return tuple([_tuples(item) if type(item) is list else item for item in value])
