"""What a cold round found beside its shortcuts (`test_grading_shortcuts.py`): nothing that it tried costs others anything."""

import base64
import struct
import sys
import types

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell

from instructor.course import answered_notebook
from instructor.grading import grade_notebook
from instructor.grading.submission.harmless import is_picture
from tests.instructor.grading.attacks import COST, NUMBER, WRONG
from tests.instructor.grading.attacks_cold import HARM, HARMFUL_VALUES
from tests.instructor.grading.test_grading_attacks import _changes, _sleepers, surroundings
from utils.checking import watching
from utils.checking.kernel_files import ASKED_FOR, HELPERS, expect_kernel_file

__all__ = ["surroundings"]  # a fixture


def test_a_file_may_not_import_what_it_is_asked_to_write():
    for file, names in ASKED_FOR.items():
        for name in names:
            module = next(m for m, known in HELPERS.items() if name in known)
            text = f"from {module} import {name} as theirs\n"
            expect_kernel_file(text, "another.py")
            with pytest.raises(AssertionError, match="asked to write"):
                expect_kernel_file(text, file)


def test_the_text_of_a_formula_is_known_again():
    """A student's own short function is not: two people may write the same."""
    import inspect

    from utils.attention import reference  # noqa: F401

    module = sys.modules["utils.attention.reference"]
    assert watching.copied_from(compile(inspect.getsource(module), "mine.py", "exec")).endswith("reference.py")
    own = "def attend(q, k, v):\n    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v\n"
    assert not watching.copied_from(compile(own, "mine.py", "exec"))


def test_numbers_may_be_places_and_not_values():
    import numpy

    space: dict = {"numpy": numpy}
    exec(
        compile("def places(x):\n    return numpy.array([0, 2]), numpy.array_split(range(9), 2)\n", "mine.py", "exec"),
        space,
    )
    exec(compile("def values(x):\n    return numpy.array([x[0].item()])\n", "mine.py", "exec"), space)
    for function, left in (("places", False), ("values", True)):
        with watching.watch_operations() as watch:
            space[function](torch.ones(2))
        assert ("numpy, array" in watch.exits) == left
    assert isinstance(numpy.array, types.BuiltinFunctionType) and sys.getprofile() is None


def _png(width: int, height: int) -> str:
    return base64.b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, height)).decode()


def test_a_picture_has_no_more_pixels_than_a_browser_can_hold():
    assert is_picture("image/png", _png(4000, 3000)) and not is_picture("image/png", _png(100_000, 100_000))
    frame = b"\xff\xd8\xff\xc0\0\x11\x08" + struct.pack(">HH", 60_000, 60_000)
    assert not is_picture("image/jpeg", base64.b64encode(frame).decode())
    profile = frame[2:] + b"\xff" * 200  # bytes of a segment that look like a frame
    for thumbnail, width in ((profile, 400), (struct.pack(">4sHH", b"\xff\xc0\0\x11", 8, 8), 60_000)):
        segment = b"\xff\xe2" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
        picture = b"\xff\xd8" + segment + b"\xff\xc0\0\x11\x08" + struct.pack(">HH", width, width) + b"\x03"
        assert is_picture("image/jpeg", base64.b64encode(picture).decode()) is (width == 400)
    assert not is_picture("image/gif", base64.b64encode(b"GIF89a" + b"\xff" * 4).decode())


@pytest.mark.overnight
@pytest.mark.slow
@pytest.mark.parametrize("name", [*HARM, *HARMFUL_VALUES])
def test_it_costs_nobody_else_anything(suite_lab, surroundings, name):
    answers = dict(WRONG)
    if name in HARMFUL_VALUES:
        code = HARMFUL_VALUES[name]
        answers |= {NUMBER: f"cache_bytes = {code}\n", COST: f"def gemm_cost(m, n, k, dtype):\n    return {code}\n"}
    notebook = nbformat.reads(answered_notebook(suite_lab, answers), as_version=4)
    if name in HARM:
        place = next(i for i, c in enumerate(notebook.cells) if c.id == "q1_1")
        notebook.cells.insert(place, new_code_cell(HARM[name]))
    before = _kept_by_the_kernel()
    result = grade_notebook(suite_lab, nbformat.writes(notebook, version=4), timeout=4)
    assert result.score == 0 and len(result.notebook) < 1_000_000
    assert not _changes(surroundings) and not _sleepers() and _kept_by_the_kernel() == before


def _kept_by_the_kernel() -> list[int]:
    """Segments, semaphores and queues of System V, which outlive the process that made them."""
    found = []
    for kind in ("shm", "sem", "msg"):
        with open(f"/proc/sysvipc/{kind}") as file:
            found.append(len(file.readlines()))
    return found


@pytest.mark.overnight
@pytest.mark.slow
def test_the_submission_after_them_gets_every_point(suite_lab, full_points):
    result = grade_notebook(suite_lab, answered_notebook(suite_lab), timeout=20)
    assert result.score == sum(full_points.values()) and not result.flags
