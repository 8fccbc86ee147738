"""Grading a class: every submission isolated, its tests out of its reach, in parallel, into nbgrader's gradebook."""

_HOME = {
    "grade_notebook": "submission.engine",
    "calibrate": "submission.engine",
    "SubmissionResult": "submission.results",
    "CellResult": "submission.results",
    "Flag": "submission.results",
    "GradingError": "submission.results",
    "Limits": "sandbox.walls",
}
__all__ = [*_HOME]


def __getattr__(name: str):
    # Loaded when used: a student's process imports this package, and has no use for the engine.
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"instructor.grading has no {name!r}; it has {', '.join(__all__)}.")
    return getattr(import_module(f"instructor.grading.{_HOME[name]}"), name)
