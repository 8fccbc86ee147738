"""Right values by a way that the question forbids earn nothing, in the hidden check alone and in a whole submission."""

import importlib
import math
import time
import warnings

import nbformat
import pandas
import pytest
import torch
import torch.nn.functional as F
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_raw_cell

import utils
from instructor.build import build_lab
from instructor.checks.common import to_look_at
from instructor.course import answered_notebook
from instructor.grading import grade_notebook
from instructor.grading.submission.harmless import MAX_ALL_CODE, MAX_CODE, MAX_LINE
from instructor.grading.submission.plan import make_plan, plan_tests
from instructor.names import FILE_CELL
from instructor.points import lab_path
from tests.instructor.grading.attacks import WRONG
from tests.instructor.grading.attacks_blind import BLIND
from tests.instructor.grading.attacks_blind_again import BLIND_AGAIN
from tests.instructor.grading.attacks_cold import COLD
from tests.instructor.grading.attacks_for_show import FOR_SHOW
from tests.instructor.grading.attacks_fourth import FIFTH, FOURTH
from tests.instructor.grading.attacks_fourth import KIN as MORE_KIN
from tests.instructor.grading.attacks_large_inputs import LARGE
from tests.instructor.grading.attacks_late_rounds import LATE_ROUNDS
from tests.instructor.grading.attacks_narrow import NARROWED
from tests.instructor.grading.attacks_other_inputs import OTHER_INPUTS
from tests.instructor.grading.attacks_paths import PATHS
from tests.instructor.grading.attacks_shortcuts import CELLS, CODE, SHORTCUTS, Shortcut, answer_of
from tests.instructor.grading.attacks_tenth import TENTH
from tests.instructor.grading.attacks_third import KIN, THIRD
from tests.instructor.grading.attacks_words_lab1_lab2 import WORDS as WORDS_1_2
from tests.instructor.grading.attacks_words_lab3_lab4 import WORDS as WORDS_3_4
from tests.instructor.grading.test_grading_attacks import TOKEN, _changes, _sleepers, hidden_lines, surroundings

__all__ = ["hidden_lines", "surroundings"]  # fixtures
LABS = ("lab1", "lab2_flexattention", "lab3_gluon", "lab4_sdpa")
TIMEOUT = 120  # seconds; other work on the machine may slow a submission down


@pytest.fixture(scope="module")
def labs():
    """{lab: (its notebooks, {answer cell: the model answer without its marks})}."""
    found = {}
    for name in LABS:
        built = build_lab(lab_path(name))
        cells = nbformat.reads(built.instructor, as_version=4).cells
        lines = {c.id: [line for line in c.source.split("\n") if line.strip()[:3] != "###"] for c in cells}
        found[name] = built, {name: "\n".join(text) for name, text in lines.items()}
    return found


def test_there_are_enough():
    assert len(SHORTCUTS) >= 35 and {s.lab for s in SHORTCUTS} == set(LABS)
    assert len({(s.name, s.lab) for s in SHORTCUTS}) == len(SHORTCUTS)


def _names() -> dict:
    """What a lab's setup gives its answers."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    backends = {
        "math": SDPBackend.MATH,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    names = {
        "torch": torch,
        "pd": pandas,
        "math": math,
        "F": F,
        "time": time,
        "warnings": warnings,
        "sdpa_kernel": sdpa_kernel,
        "BACKENDS": backends,
        "create_block_mask": create_block_mask,
        "BlockMask": BlockMask,
        "synchronize": lambda: None,
        "BackendRefused": type("BackendRefused", (RuntimeError,), {}),
        "why_not": lambda *args, **options: [],  # a check puts the right one there
    }
    return names | {
        name: getattr(utils, name)
        for name in (
            *(
                "build_decoder_layer",
                "get_position_embeddings",
                "prefill_forward",
                "decode_forward",
                "initialize_kv_cache",
            ),
            *("count_cuda_kernels", "default_schedule"),
        )
    }


SLOW = (
    "every sentence",
    "differences",
    "tiles of a fixed size",
    "a slice of one tile",
)  # of a cold round: seconds each


DEAR = ("forward mode, a number at a time", "1.2 tile sizes not used: three loops")  # 8 to 13 s each


def _case(shortcut, overnight: bool):
    marks = [pytest.mark.overnight] if overnight else [pytest.mark.slow] if shortcut.name in DEAR else []
    return pytest.param(shortcut, id=shortcut.name, marks=marks)


@pytest.mark.parametrize(
    "shortcut",
    [
        *(
            _case(s, False)
            for s in (
                *SHORTCUTS,
                *THIRD,
                *KIN,
                *FOURTH,
                *FIFTH,
                *MORE_KIN,
                *WORDS_1_2,
                *WORDS_3_4,
                *BLIND,
                *BLIND_AGAIN,
                *FOR_SHOW,
                *LARGE,
                *PATHS,
                *NARROWED,
                *OTHER_INPUTS,
                *TENTH,
                *LATE_ROUNDS,
            )
            if s.check
        ),
        *(_case(s, any(word in s.name for word in SLOW)) for s in COLD),
    ],
)
def test_the_hidden_check_refuses_it_or_lets_it_wait_and_says_why(labs, shortcut):
    text, (check, *names) = answer_of(shortcut, labs[shortcut.lab][1]), shortcut.check
    if FILE_CELL.match(text):
        answers = [text.partition("\n")[2]]
    else:
        space = _names()
        exec(text, space)
        answers = [space[name] for name in names]
    verdict = getattr(importlib.import_module(f"instructor.checks.{shortcut.lab}"), check, None)
    if verdict is None:  # the lab's package hands out some checks under a longer name
        verdict = getattr(importlib.import_module("instructor.checks.lab1.profiling"), check)
    to_look_at()
    verdict = verdict(*answers)
    said = "; ".join(to_look_at()) if verdict.passed else str(verdict)
    assert said and shortcut.words in said


def _packs(lab: str) -> list[list[Shortcut]]:
    """The shortcuts of a lab, in as few notebooks as there are of one answer cell."""
    packs: list[list[Shortcut]] = []
    for shortcut in (s for s in [*SHORTCUTS, *COLD] if s.lab == lab):
        pack = next((p for p in packs if all(other.cell != shortcut.cell for other in p)), None)
        if pack is None:
            packs.append(pack := [])
        pack.append(shortcut)
    return packs


@pytest.mark.overnight
@pytest.mark.slow
@pytest.mark.parametrize("pack", [p for lab in LABS for p in _packs(lab)], ids=lambda p: f"{p[0].lab}, {p[0].name}")
def test_a_whole_submission_gets_no_point_for_it(labs, pack):
    built, model = labs[pack[0].lab]
    answers = {s.cell: answer_of(s, model) for s in pack}
    result = grade_notebook(built, answered_notebook(built, answers), timeout=TIMEOUT)
    got = {s.name: (result.cells[s.tests].status, result.cells[s.tests].message) for s in pack}
    assert all(result.cells[s.tests].points == 0 for s in pack), got
    # Words, and no flag: who takes such a way honestly is told what the question wants.
    assert all(status in ("failed", "error") for status, _ in got.values()), got
    assert not [flag for flag in result.flags if flag.kind != "structure"]
    attacked = {s.cell for s in pack}
    # The message of lab 4's 1.3 holds what the submission's own `why_not` of 1.2 says.
    attacked |= {"q1_3"} if pack[0].lab == "lab4_sdpa" and "q1_2" in attacked else set()
    lost = {n for n, c in result.cells.items() if c.points < c.max_points and c.status != "by_hand"}
    assert all(any(n.startswith(cell) for cell in attacked) for n in lost), lost


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "many lines")) for n in CODE])
def test_code_of_any_length_is_shown_in_time_and_runs_in_whole(suite_lab, name):
    code = f"x = '''\n{CODE[name]}\n'''"
    notebook = nbformat.reads(answered_notebook(suite_lab), as_version=4)
    notebook.cells[6:6] = [new_code_cell(code) for _ in range(4)]
    text = nbformat.writes(notebook, version=4)
    plan = make_plan(suite_lab.instructor, suite_lab.student, text, plan_tests(suite_lab.instructor))
    assert sum(step.source == code for step in plan.steps) == 4
    shown = [step.cell.source for step in plan.steps if step.source == code]
    assert sum(map(len, shown)) < MAX_ALL_CODE + 2_000 and max(map(len, shown)) < MAX_CODE + 200
    assert all(len(line) < MAX_LINE + 100 for text in shown for line in text.split("\n"))
    assert all("this line goes on" in text or "is not shown" in text for text in shown)
    # The same signs outside of a text, where the colours take their time; a tenth of what a notebook may show.
    began = time.process_time()
    cell = new_code_cell(shown[0].removeprefix("x = '''\n")[: MAX_ALL_CODE // 10])
    HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    assert time.process_time() - began < 12


def test_other_cells_hold_no_tag_either(suite_lab):
    notebook = nbformat.reads(answered_notebook(suite_lab), as_version=4)
    notebook.cells.insert(
        3, new_raw_cell("<svg onload=alert(1)>" + "r" * 1_000_000, metadata={"raw_mimetype": "text/html"})
    )
    text = nbformat.writes(notebook, version=4)
    plan = make_plan(suite_lab.instructor, suite_lab.student, text, plan_tests(suite_lab.instructor))
    raw = next(cell for cell in plan.notebook.cells if cell.cell_type == "raw")
    assert "<svg" not in raw.source and len(raw.source) < 21_000 and not raw.metadata


_TELLS = """
import torch
import torch.nn.functional as F


def mask_costs(mask, batch, heads, head_dim, dtype):
    print("given", tuple(mask.shape), batch, heads, head_dim)
    hidden = int((~mask).sum())
    pairs = batch * heads * mask.numel()
    return 1 - hidden / mask.numel(), 4 * head_dim * batch * heads * hidden, pairs * dtype.itemsize
"""


@pytest.mark.overnight
@pytest.mark.slow
def test_hidden_inputs_are_those_of_the_file(labs):
    """Who was told the inputs by an earlier hand-in, and hands in a table of them, meets others."""
    built, shown = labs["lab2_flexattention"][0], []
    for text in (_TELLS, _TELLS, _TELLS + "# handed in again\n"):
        result = grade_notebook(built, answered_notebook(built, {"q1_2": text}), timeout=TIMEOUT)
        assert result.cells["q1_2_tests"].status == "passed"
        cell = next(c for c in nbformat.reads(result.notebook, as_version=4).cells if c.id == "q1_2_tests")
        shown.append([line for line in str(cell.outputs).split("\\n") if "given" in line])
    assert len(shown[0]) > 3 and shown[0] == shown[1] != shown[2]


@pytest.mark.overnight
@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_cells_of_ones_own_get_nothing(suite_lab, surroundings, hidden_lines, part):
    """Several attempts in one notebook: each runs, and what one of them breaks is the author's own."""
    notebook = nbformat.reads(answered_notebook(suite_lab, dict(WRONG)), as_version=4)
    place = next(i for i, c in enumerate(notebook.cells) if c.id == "q1_1")
    notebook.cells[place:place] = [new_code_cell(code) for code in list(CELLS.values())[part::4]]
    result = grade_notebook(suite_lab, nbformat.writes(notebook, version=4), timeout=6)
    assert result.score == 0, {n: (c.status, c.message) for n, c in result.cells.items() if c.points}
    shown = result.notebook + "".join(cell.message for cell in result.cells.values())
    assert TOKEN not in shown and not [line for line in hidden_lines if line in shown]
    assert not _changes(surroundings) and not _sleepers() and surroundings.connections() == 0


@pytest.mark.overnight
@pytest.mark.slow
def test_the_submission_after_them_gets_every_point(suite_lab, full_points):
    result = grade_notebook(suite_lab, answered_notebook(suite_lab), timeout=20)
    assert result.score == sum(full_points.values()) and not result.flags
