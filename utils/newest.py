"""A dictionary with a greatest number of entries, for the decisions and launches of earlier calls."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Newest(dict[K, V]):
    """A dictionary that drops its oldest entries when it is full."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        while key not in self and len(self) >= self.most:
            self.pop(next(iter(self)), None)  # the oldest; another thread may have dropped it
        super().__setitem__(key, value)
