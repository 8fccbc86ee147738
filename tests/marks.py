"""Marks that several test files use."""

from collections.abc import Callable, Sequence

import pytest


def slow_but_first(cases: Sequence) -> list:
    """Mark all cases of a long parametrization `slow` but the first, which stays in the quick set."""
    return [*cases[:1], *(pytest.param(case, marks=pytest.mark.slow) for case in cases[1:])]


def overnight_but_first_of_each(cases: Sequence, kind: Callable) -> list:
    """Mark all cases of a long parametrization `overnight` but the first of each kind, as `kind(case)` tells them apart."""
    seen, marked = set(), []
    for case in cases:
        marked.append(pytest.param(case, marks=pytest.mark.overnight) if kind(case) in seen else case)
        seen.add(kind(case))
    return marked
