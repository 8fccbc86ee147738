"""Functions of `utils` that are answers to a lab's questions: a student's code cannot call them while it is graded."""

from __future__ import annotations

import importlib
import importlib.util
import types
from collections.abc import Mapping
from typing import Any

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
    "lab4_sdpa": {"utils.model.costs": _COSTS},
}


def files_of(answers: Answers) -> list[str]:
    """The files that hold the functions, as source and compiled: a child process could import them anew."""
    found: dict[str, None] = {}
    for module, names in answers.items():
        space = vars(importlib.import_module(module))
        for name in names:
            if isinstance(function := space.get(name), types.FunctionType):
                source = function.__globals__["__file__"]
                found |= dict.fromkeys((source, importlib.util.cache_from_source(source)))
    return list(found)


WORDS = "{name} answers a question of this lab, so it cannot be used while the lab is graded. Write your own."


def disable(function: types.FunctionType, name: str, seen: set[int] | None = None) -> None:
    """Give a function code that refuses, in place: by whatever name or closure it is reached, it is the same object.

    Functions of the course in its closure, such as the one that a decorator wrapped, are disabled, too.
    """
    seen = set() if seen is None else seen
    if id(function) in seen:
        return
    seen.add(id(function))
    for cell in function.__closure__ or ():
        inside = cell.cell_contents
        if isinstance(inside, types.FunctionType) and inside.__module__ == function.__module__:
            disable(inside, name, seen)
    free = function.__code__.co_freevars  # code can be replaced only by code with as many variables of a closure
    given = "".join(f"        {variable} = None\n" for variable in free)
    used = f"            ({', '.join(free)},)\n" if free else ""
    text = f"def around():\n{given}        def refuse(*args, **kwargs):\n{used}            raise AssertionError({WORDS.format(name=name)!r})\n        return refuse\n"
    space: dict[str, Any] = {}
    exec(compile(text.replace("        ", " "), __file__, "exec"), space)
    refuse = space["around"]()
    function.__code__, function.__defaults__, function.__kwdefaults__ = refuse.__code__, None, None


def hide(answers: Answers) -> None:
    """Disable the functions in this process. Nothing that the course does for a student while a lab is graded needs them."""
    for module, names in answers.items():
        found = importlib.import_module(module)  # a student could import it later
        for name in names:
            if isinstance(function := vars(found).get(name), types.FunctionType):
                disable(function, f"{module}.{name}")
