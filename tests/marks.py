"""Marks that several test files use."""

from collections.abc import Sequence

import pytest


def slow_but_first(cases: Sequence) -> list:
    """Mark all cases of a long parametrization `slow` but the first, which stays in the quick set."""
    return [*cases[:1], *(pytest.param(case, marks=pytest.mark.slow) for case in cases[1:])]
