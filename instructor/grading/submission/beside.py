"""Functions of the course that run a student's text: a check calls them, and they run behind the walls."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable

from instructor.grading.submission.remote import CannotTravel

# Functions that run a student's text in a process of their own; each test cell gets one where no cell of theirs has run.
RUNNERS = {
    "utils.checking.labs.lab1.triton_kernels": ("run_cases",),
    "utils.checking.kernel_exercises": ("simulate_file", "compile_file", "run_file"),
}
_STARTS = ("compile", "subprocess.Popen", "os.posix_spawn", "os.exec", "os.system")  # audit events


def put_behind_walls(base: dict, runner: Callable) -> None:
    """Replace the functions in their modules, in checks and in a notebook's names, by ones that run elsewhere.

    Args:
        base: the names of the notebook.
        runner: runner(module, name, args, kwargs) calls a function in a process without the student's cells.
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


def refuse_to_run(texts: list[str], testing: Callable[[], bool]) -> Callable[[str, tuple], None]:
    """An audit hook that keeps a student's texts from being run in a check, and processes from being started with them.

    Args:
        texts: of the student's files.
        testing: says whether a check runs now.
    """

    def refuse(event: str, args: tuple) -> None:
        if event not in _STARTS or not testing():  # a million other events come here
            return
        if event == "compile" and texts and args[1] != "<unknown>":  # that is ast.parse, which runs nothing
            text = args[0].decode(errors="replace") if isinstance(args[0], bytes) else args[0]
            if isinstance(text, str) and any(own in text for own in texts):
                raise CannotTravel("the check runs a student's text itself")
        elif event != "compile":
            raise CannotTravel(f"the check starts a process ({event})")

    return refuse
