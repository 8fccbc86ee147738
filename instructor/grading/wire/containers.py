"""Lists, dictionaries, sets, arrays and tables that a call gets, on two sides: what a student's code changes in them arrives at the check.

Tensors have numbers, and travel anew when they were written to. These have none: both sides count those of a call's arguments in
the same order, and the student's side sends back what it finds changed when the call has ended.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from instructor.grading.wire.channel import WireError
from instructor.grading.wire.values import Encoder

_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_CONTAINERS = (list, *_DICTS, set, frozenset, np.ndarray)  # as the wire knows them; a frozenset arrives as a set


def containers_in(values: Iterable) -> Iterator:
    """Yield the containers in the values, and in those and in tuples, in an order that is the same on both sides."""
    for value in values:
        kind = type(value)
        if kind in _CONTAINERS or _is_table(value):
            yield value
        if kind in (list, tuple, set, frozenset):
            yield from containers_in(value)
        elif kind in _DICTS:
            yield from containers_in(value.values())


class Container:
    """One of a call's containers, and what was in it before the call."""

    def __init__(self, value: object) -> None:
        self.value, self.before = value, _contents(value)

    def has_changed(self) -> bool:
        """Whether something else is in it now."""
        now = _contents(self.value)
        if _is_table(self.value):
            return not (now[0].equals(self.before[0]) and now[1:] == self.before[1:])
        if isinstance(self.value, np.ndarray):
            return not (now.shape == self.before.shape and now.tobytes() == self.before.tobytes())
        return len(now) != len(self.before) or not all(map(_is_same, now, self.before))

    def nodes(self, encode: Encoder) -> list:
        """What the other side needs: the contents, None if they cannot travel; and of a table what `equals` does not look at."""
        try:
            contents = encode(self.value)
        except WireError:
            contents = encode(None)
        return [contents, encode(_about(self.value) if _is_table(self.value) else None)]


def overwrite(container: Any, value: object, about: object) -> None:
    """Put into a container of the check what `Container.nodes` of the student's side says; both may be forged."""
    if _is_table(container):
        if _is_table(value) and type(value).__name__ == type(container).__name__:
            container._update_inplace(value)
        # The names and what hangs on the table arrive as text, which equals none of the check's.
        container.attrs["changed"] = about
    elif isinstance(container, np.ndarray):
        if isinstance(value, np.ndarray) and value.shape == container.shape and container.flags.writeable:
            container[...] = value
    elif type(container) is list and type(value) is list:
        container[:] = value
    elif (type(container) in _DICTS and type(value) is dict) or (type(container) is set and type(value) is set):
        container.clear()
        container.update(value)


def _is_table(value: object) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and type(value) in (getattr(pandas, "Series", None), getattr(pandas, "DataFrame", None))


def _contents(value):
    if _is_table(value):
        return value.copy(deep=True), *_about(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return [part for item in value.items() for part in item]
    return [*value] if isinstance(value, list) else sorted(value, key=id)


def _about(table) -> list:
    names = [table.index.name, table.columns.name] if hasattr(table, "columns") else [table.index.name, table.name]
    try:
        return [repr(names), repr(table.attrs)]
    except Exception as error:  # what a student hung on it may have a `__repr__` of its own
        return [f"{type(error).__name__} when it was looked at"]


def _is_same(new: object, old: object) -> bool:
    # Of two objects that are not the same one, only plain ones are compared: `==` of others may be anything.
    return new is old or (type(new) is type(old) and type(new) in (int, float, str, bool, bytes) and new == old)
