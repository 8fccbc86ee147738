"""A mark for functions of a check that run in the process of the answer, and not in that of the check."""

from collections.abc import Callable


def by_value(function: Callable) -> Callable:
    """Mark a check's function that must run in the answer's process, such as one that profiles the answer.

    The grader sends the function, with what it refers to, into the student's process, so it must not contain anything
    that gives an answer away. A function that it refers to and that has no mark stays with the check and is called there.
    """
    function.travels_by_value = True  # type: ignore[attr-defined]
    return function
