"""Functions of the course that are not what they are while a lab is graded: answers refuse, and runners of a student's text run elsewhere."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

_MASKS = ["causal", "sliding_window", "prefix_lm", "both", "either", "document_ids"]
_SCORES = ["soft_cap", "alibi", "compose", "relative_bias"]
_COSTS = ["attended_pairs"]
# Functions of `utils` that are answers to a lab's questions: lab -> module -> names in it.
ANSWERS: dict[str, dict[str, list[str]]] = {
    "lab1": {"utils.model.costs": _COSTS, "utils.kernels.gelu": ["gelu_unfused"]},
    "lab2_flexattention": {
        "utils.attention.masks": _MASKS,
        "utils.attention.masks.mask_mods": _MASKS,
        "utils.attention.masks.score_mods": _SCORES,
        "utils.model.costs": _COSTS,
    },
    "lab4_sdpa": {"utils.model.costs": _COSTS},
}
# Functions that run a student's text in a process of their own; each test cell gets one where no cell of theirs has run.
RUNNERS = {
    "utils.checking.labs.lab1.triton_kernels": ("run_cases",),
    "utils.checking.kernel_exercises": ("simulate_file", "compile_file", "run_file"),
}
WORDS = "{name} answers a question of this lab, so it cannot be used while the lab is graded. Write your own."


def hide(lab: str) -> None:
    """Give the answers of a lab code that refuses, in place: by whatever name one is reached, it is the same object.

    Nothing that the course does for a student while the lab is graded needs them.
    """
    for module, names in ANSWERS.get(lab, {}).items():
        found = importlib.import_module(module)  # a student could import it later
        for name in names:
            if isinstance(function := vars(found).get(name), types.FunctionType):
                words, space = WORDS.format(name=f"{module}.{name}"), dict[str, Any]()
                exec(f"def refuse(*args, **kwargs):\n    raise AssertionError({words!r})", space)
                function.__code__, function.__defaults__, function.__kwdefaults__ = space["refuse"].__code__, None, None


def put_behind_walls(base: dict, runner: Callable) -> None:
    """Replace the functions in their modules, in checks and in the notebook's names `base`, by ones that run elsewhere.

    `runner(module, name, args, kwargs)` calls a function in a process without the student's cells.
    """

    def run_elsewhere(module: str, name: str) -> Callable:
        def run(*args, **kwargs):
            return runner(module, name, args, kwargs)

        run.__name__ = name
        return run

    for module, names in RUNNERS.items():
        with contextlib.suppress(ImportError):
            owner = importlib.import_module(module)
            for name in names:
                before = getattr(owner, name)
                after = run_elsewhere(module, name)
                checks = [
                    vars(m) for k, m in sys.modules.items() if k.startswith(("utils.checking", "instructor.checks"))
                ]
                for names_of in (vars(owner), base, *checks):  # checks that were loaded before hold the function, too
                    names_of.update({key: after for key, value in names_of.items() if value is before})
