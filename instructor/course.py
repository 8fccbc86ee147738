"""An nbgrader course in a folder: release a lab, add submissions, grade them with nbgrader's own commands."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat

from instructor.build import ROOT, Built
from utils.files import write_whole
from utils.validation import UserError, first_line

CONFIG = """\
c = get_config()
c.CourseDirectory.course_id = "labs"
c.Execute.timeout = {timeout}  # seconds for one cell
"""


class CourseError(UserError):
    """An nbgrader command failed; carries its output."""


@dataclass(frozen=True)
class Score:
    """What the gradebook has for one graded cell of one submission."""

    auto: float | None  # None if a person has to grade the cell
    manual: float | None
    points: float  # the most that the cell can get
    needs_manual_grade: bool


class Course:
    """An nbgrader course folder.

    Args:
        root: the folder; it is made if it does not exist.
        timeout: seconds that one cell may run when nbgrader grades it.
    """

    def __init__(self, root: Path, timeout: int = 300):
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        config = self.root / "nbgrader_config.py"
        if not config.exists():
            write_whole(config, CONFIG.format(timeout=timeout))

    @property
    def database(self) -> str:
        """The address of nbgrader's gradebook."""
        return f"sqlite:///{(self.root / 'gradebook.db').resolve()}"

    def nbgrader(self, *arguments: str) -> str:
        """Run `nbgrader ARGUMENTS` in the course; returns what it printed."""
        # The kernels import `utils` and `instructor.checks` from here. Each gets one thread: several torch processes
        # with many threads on few cores slow each other down tenfold.
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "PATH": _path_with_scripts()}
        environment.setdefault("OMP_NUM_THREADS", "1")
        done = subprocess.run(
            [sys.executable, "-m", "nbgrader", *arguments],
            cwd=self.root,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._drop_empty_database()
        if done.returncode != 0:
            raise CourseError(f"nbgrader {' '.join(arguments)} failed ({done.returncode}):\n{done.stdout}")
        return done.stdout

    @contextmanager
    def gradebook(self) -> Iterator:
        """Nbgrader's gradebook, open for reading and writing."""
        _import_nbgrader()
        from nbgrader.api import Gradebook, InvalidEntry
        from sqlalchemy.exc import SQLAlchemyError

        os.environ["PATH"] = _path_with_scripts()
        self._drop_empty_database()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SQLAlchemy's warnings about nbgrader
            try:
                with Gradebook(self.database, "labs") as gradebook:
                    yield gradebook
            except (
                SQLAlchemyError,
                InvalidEntry,
            ) as error:  # a full disk, another program that holds it, a damaged file
                raise CourseError(f"{self.root}/gradebook.db cannot be used: {first_line(error)}.") from None

    def _drop_empty_database(self) -> None:
        """Remove the empty file that stays when the disk is full; nbgrader would take it for a gradebook without a version."""
        file = self.root / "gradebook.db"
        if file.is_file() and not file.stat().st_size:
            file.unlink()

    def release(self, built: Built) -> Path:
        """Put a lab's instructor notebook into `source/` and generate the students' one; returns the latter's path."""
        # Only the notebook: nbgrader copies every other file of source/<lab>/ to the students.
        source = self.root / "source" / built.name / f"{built.name}.ipynb"
        write_whole(source, built.instructor)
        self.nbgrader("generate_assignment", built.name, "--force")
        return self.root / "release" / built.name / f"{built.name}.ipynb"

    def submit(self, lab: str, student: str, notebook: str) -> None:
        """Add a student's notebook, given as text."""
        write_whole(self.root / "submitted" / student / lab / f"{lab}.ipynb", notebook)

    def scores(self, lab: str) -> dict[str, dict[str, Score]]:
        """{student: {id of a graded cell: Score}} of a lab, as the gradebook has it now."""
        with self.gradebook() as gradebook:
            return {
                submission.student.id: {
                    grade.name: Score(grade.auto_score, grade.manual_score, grade.max_score, grade.needs_manual_grade)
                    for notebook in submission.notebooks
                    for grade in notebook.grades
                }
                for submission in gradebook.assignment_submissions(lab)
            }


def _import_nbgrader() -> None:
    """Import nbgrader without its extensions of Jupyter's server: they load all of its exchange, and no command needs them."""
    extensions = ("assignment_list", "course_list", "validate_assignment", "formgrader")
    names = [f"nbgrader.server_extensions.{name}" for name in extensions if "nbgrader" not in sys.modules]
    for name in names:
        sys.modules[name] = types.SimpleNamespace(load_jupyter_server_extension=None)  # type: ignore[assignment]
    try:
        importlib.import_module("nbgrader")
    finally:
        for name in names:
            del sys.modules[name]


def _path_with_scripts() -> str:
    """PATH with the folder of this environment first: nbgrader calls `alembic` by name, and nobody has to activate it."""
    paths = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([sysconfig.get_path("scripts"), *paths]))


def answered_notebook(built: Built, answers: Mapping[str, str] | None = None) -> str:
    """A student's notebook, as text, with every answer filled in.

    Args:
        built: the lab.
        answers: {id of an answer cell: source} in place of model answers.
    """
    answers = dict(answers or {})
    student = nbformat.reads(built.student, as_version=4)
    model = {cell.id: cell.source for cell in nbformat.reads(built.instructor, as_version=4).cells}
    for cell in student.cells:
        if cell.metadata.get("nbgrader", {}).get("solution"):
            cell.source = answers.pop(cell.id, model[cell.id])
    if answers:
        raise KeyError(f"{built.name} has no answer cell {', '.join(sorted(answers))}.")
    return nbformat.writes(student, version=4)
