"""Vector clocks: who knows that what has happened.

A clock maps components to counts. Components: ("partition", p) for the ordinary instructions of a partition,
("barrier", b) for completed phases of an mbarrier, ("wgmma", p), ("tma store", p) and ("cp.async", p) for the
in-order queues of a partition. Whoever's clock has count >= t for a component knows that event t of it is over.
"""

from __future__ import annotations

Clock = dict[tuple, int]


def join(into: Clock, other: Clock) -> None:
    """Learn what `other` knows."""
    get = into.get
    for component, time in other.items():
        if get(component, 0) < time:
            into[component] = time
