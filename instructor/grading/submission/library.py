"""Functions of `utils` that are answers to a lab's questions: a student's code cannot call them while it is graded."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from utils.checking import watching

Answers = Mapping[str, list[str]]  # module -> names in it
_MASKS = ["causal", "sliding_window", "prefix_lm", "both", "either", "document_ids"]
_SCORES = ["soft_cap", "alibi", "compose", "relative_bias"]
_COSTS = ["gemm", "gemv", "rms_norm", "attended_pairs", "attention", "decoder_layer"]
ANSWERS: dict[str, Answers] = {
    "lab1": {"utils.model.costs": _COSTS, "utils.kernels.gelu": ["gelu_unfused", "_by_hand"]},
    "lab2_flexattention": {
        "utils.attention.masks": _MASKS,
        "utils.attention.masks.mask_mods": _MASKS,
        "utils.attention.masks.score_mods": _SCORES,
        "utils.model.costs": _COSTS,
    },
}


def _words(name: str) -> str:
    return f"{name} answers a question of this lab, so it cannot be used while the lab is graded. Write your own."


def guard(function: Callable, name: str) -> Callable:
    """A function that works for the course and refuses a student's code."""

    @functools.wraps(function)
    def guarded(*args, **kwargs):
        if watching.is_students(sys._getframe(1).f_code):
            raise AssertionError(_words(name))
        return function(*args, **kwargs)

    del guarded.__wrapped__  # type: ignore[attr-defined]
    return guarded


class Library:
    """The functions that are out of a student's reach in this process."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}  # the address of such a function -> its name
        self.kept: list[Callable] = []  # so that no address is used again

    def hide(self, answers: Answers) -> None:
        """Guard the functions, where a student can find them."""
        for module, names in answers.items():
            space = vars(sys.modules[module]) if module in sys.modules else {}
            for name in names:
                found = space.get(name)
                if callable(found) and not isinstance(found, type):
                    guarded = guard(found, f"{module}.{name}")
                    self.names |= {id(found): f"{module}.{name}", id(guarded): f"{module}.{name}"}
                    self.kept += [found, guarded]
                    space[name] = guarded

    def own(self, value: Any) -> Any:
        """A student's answer; where it is the library's function itself, one that says so."""
        name = self.names.get(id(value))
        if name is None:
            return value

        def answer(*args, **kwargs):
            raise AssertionError(_words(name))

        return answer
