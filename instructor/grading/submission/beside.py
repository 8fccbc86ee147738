"""Functions of the course that run a student's text: a check calls them, and they run behind the walls."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable

# Functions that run a student's text in a process of their own; each test cell gets one where no cell of theirs has run.
RUNNERS = {
    "utils.checking.labs.lab1.triton_kernels": ("run_cases",),
    "utils.checking.kernel_exercises": ("simulate_file", "compile_file", "run_file"),
}


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
