"""A mark for functions of a check that run where the answer runs, and not where the check runs."""

from collections.abc import Callable


def by_value(function: Callable) -> Callable:
    """Mark a check's function that runs where the answer runs, as a profiler or a counter of the student's needs it.

    The grader sends such a function, with what it refers to, into the student's process. It may hold nothing that gives
    an answer away. Functions that it refers to are called from afar if they are not marked.
    """
    function.travels_by_value = True  # type: ignore[attr-defined]
    return function
