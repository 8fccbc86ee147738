"""An answer that writes into its inputs is refused by the visible check as well, before anything is handed in."""

import contextlib
import functools

import nbformat
import pytest
import torch

from instructor.build import build_lab
from instructor.names import python_of
from instructor.points import lab_path
from tests.instructor.grading.test_grading_same_verdict import OneProcess
from tests.instructor.visible import VisibleChecks
from utils.checking import leaves_inputs

# lab -> functions whose tensors the visible check holds against copies: {test cell: its functions}
KEPT = {
    "lab1": {"q5_1_tests": ["standard_attention"], "q5_2_tests": ["attention_bshd"]},
    "lab2_flexattention": {
        "q1_1_tests": ["masked_attention"],
        "q1_2_tests": ["mask_costs"],
        "q3_1_tests": ["count_blocks"],
        "q3_3_tests": ["block_sparse_attention"],
        "q6_1_tests": ["bucketed_attention"],
        "q7_1_tests": ["lay_out"],
        "q7_1_blocks_tests": ["lay_out"],
        "bonus_8_3_tests": ["ragged_attention"],
    },
    "lab4_sdpa": {
        "q1_2_tests": ["why_not"],
        "q1_3_tests": ["pinned_sdpa"],
        "q2_2_tests": ["errors"],
        "bonus_2_4_tests": ["attention_backward"],
        "q3_2_part_tests": ["attend_part"],
        "q3_2_tests": ["split_kv_attention"],
        "q4_1_tests": ["knocked_out_by_strides", "strided_and_fast"],
        "q4_3_tests": ["unpack_qkv", "ready_for_flash"],
        "q5_2_tests": ["ulps_apart"],
    },
}


def _tensors(value) -> list[torch.Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def _clears(function, first: bool):
    """A right answer that sets its inputs to zero: before it computes, or after."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        given = _tensors([*args, *kwargs.values()])
        result = None if first else function(*args, **kwargs)
        for tensor in given:
            with contextlib.suppress(RuntimeError):  # one that is expanded
                tensor.detach().zero_()
        return function(*args, **kwargs) if first else result

    return call


@pytest.mark.slow
@pytest.mark.parametrize("lab", KEPT)
def test_the_visible_check_refuses_an_answer_that_clears_its_inputs(lab, tmp_path):
    built = build_lab(lab_path(lab))
    cells = nbformat.reads(built.instructor, as_version=4).cells
    visible, names = VisibleChecks(cells), dict(OneProcess(built, tmp_path).base)
    with contextlib.chdir(tmp_path):
        for cell in cells:
            answer = cell.cell_type == "code" and cell.metadata.get("nbgrader", {}).get("solution")
            if answer and not cell.source.startswith("%%"):
                exec(compile(python_of(cell.source), cell.id, "exec"), names)
        accepted = [
            (test, function, first)
            for test, functions in KEPT[lab].items()
            for function in functions
            for first in (True, False)
            if visible.message(test, visible.scope(names | {function: _clears(names[function], first)})) is None
        ]
        right = {test: visible.message(test, visible.scope(names)) for test in KEPT[lab]}
    assert accepted == [] and set(right.values()) == {None}


def test_what_writes_into_an_input_is_named_and_the_rest_goes_through():
    def doubled(x, *, more):
        more[0].mul_(2)
        return x

    x = torch.tensor([1.0, float("nan")])
    assert leaves_inputs(torch.add)(x, x) is not None
    with pytest.raises(AssertionError, match="doubled changed one of its inputs"):
        leaves_inputs(doubled)(x, more=(torch.ones(2),))
    with pytest.raises(AssertionError, match="changed one of its inputs"):
        leaves_inputs(lambda y: y.unsqueeze_(0))(torch.ones(2))
