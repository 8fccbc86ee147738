"""Functions of `utils` that are answers to a lab's questions: a student's code cannot call them while it is graded."""

from __future__ import annotations

import importlib
import types
from typing import Any

_MASKS = ["causal", "sliding_window", "prefix_lm", "both", "either", "document_ids"]
_SCORES = ["soft_cap", "alibi", "compose", "relative_bias"]
_COSTS = ["attended_pairs"]
ANSWERS: dict[str, dict[str, list[str]]] = {  # lab -> module -> names in it
    "lab1": {"utils.model.costs": _COSTS, "utils.kernels.gelu": ["gelu_unfused"]},
    "lab2_flexattention": {
        "utils.attention.masks": _MASKS,
        "utils.attention.masks.mask_mods": _MASKS,
        "utils.attention.masks.score_mods": _SCORES,
        "utils.model.costs": _COSTS,
    },
    "lab4_sdpa": {"utils.model.costs": _COSTS},
}


WORDS = "{name} answers a question of this lab, so it cannot be used while the lab is graded. Write your own."


def disable(function: types.FunctionType, name: str) -> None:
    """Give a function code that refuses, in place: by whatever name it is reached, it is the same object."""
    space: dict[str, Any] = {}
    exec(f"def refuse(*args, **kwargs):\n    raise AssertionError({WORDS.format(name=name)!r})", space)
    function.__code__, function.__defaults__, function.__kwdefaults__ = space["refuse"].__code__, None, None


def hide(lab: str) -> None:
    """Disable a lab's functions in this process. Nothing that the course does for a student while it is graded needs them."""
    for module, names in ANSWERS.get(lab, {}).items():
        found = importlib.import_module(module)  # a student could import it later
        for name in names:
            if isinstance(function := vars(found).get(name), types.FunctionType):
                disable(function, f"{module}.{name}")
