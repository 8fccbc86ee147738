"""Functions that travel to a student's process, and the answers of the library, which are out of reach there."""

import fractions
import importlib
import subprocess
import sys

import pytest
import torch

from instructor.build import ROOT
from instructor.checks.common import Draw
from instructor.grading.submission.library import ANSWERS
from instructor.grading.wire.channel import WireError
from instructor.grading.wire.pickles import CheckEncoder, StudentDecoder

# ---- functions that travel ---------------------------------------------------------------------------------------


def _there_and_back(value):
    functions = []

    def handle(thing):
        functions.append(thing)
        return ["object", {"id": len(functions) - 1}]

    encode = CheckEncoder(handle)
    node = encode(value)
    return StudentDecoder(encode.blobs, lambda fields: functions[fields["id"]])(node), functions


def test_a_function_stays_and_one_of_a_library_is_named():
    for function in (lambda: 1, *[lambda: 1 for _ in "x"], [].append, iter([1])):
        made, stayed = _there_and_back(function)
        assert stayed == [function] and made is function
    made, stayed = _there_and_back([torch.matmul, torch.nn.functional.gelu, len, torch.float32])
    assert stayed == [] and made == [torch.matmul, torch.nn.functional.gelu, len, torch.float32]


@pytest.mark.parametrize("value", [Draw(1), Draw, fractions.Fraction])
def test_classes_of_the_instructors_do_not_travel(value):
    if value is fractions.Fraction:
        assert _there_and_back([value]) == ([value], [])
        return
    with pytest.raises(WireError, match="Draw cannot travel"):
        _there_and_back([value])


def test_a_module_travels_with_its_weights_and_its_hooks_stay():
    layer, seen = torch.nn.Linear(3, 2), []
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    made, stayed = _there_and_back(layer)
    x = torch.randn(5, 3)
    assert made is not layer and torch.equal(made(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert len(stayed) == 1 and seen == [5]


# ---- answers in the library ----------------------------------------------------------------------------------------


def test_the_librarys_answers_are_out_of_a_students_reach():
    """By any name, through any other module, a closure or a library that calls for the student; and not a second time."""
    script = """
import importlib, sys
from concurrent.futures import ThreadPoolExecutor
import utils.attention.problem as other
from utils.attention.masks import mask_mods
from utils.kernels import gelu
from utils.model import costs
from instructor.checks.common import Draw
from instructor.grading.submission.library import ANSWERS, hide

before = mask_mods.causal
for lab in ANSWERS:
    hide(lab)
tries = {
    "causal": lambda: before(0, 0, 1, 0),
    "another module": lambda: other.causal(0, 0, 1, 0),
    "a thread": lambda: ThreadPoolExecutor(1).submit(mask_mods.sliding_window, 3).result(),
    "closures": lambda: [c.cell_contents for c in mask_mods.both.__closure__ or ()] or mask_mods.both(before, before),
    "a table": lambda: gelu.VERSIONS["gelu_unfused"](None) if hasattr(gelu, "VERSIONS") else gelu.gelu_unfused(None),
    "costs": lambda: costs.attended_pairs(1, 2),
}
for name, attempt in tries.items():
    try:
        attempt()
    except AssertionError as error:
        assert "answers a question of this lab" in str(error), error
    else:
        raise SystemExit(f"{name} got through")
print("all refused")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.endswith("all refused\n"), done.stdout + done.stderr


@pytest.mark.parametrize("lab", ANSWERS)
def test_the_named_functions_are_there(lab):
    for module, names in ANSWERS[lab].items():
        assert [name for name in names if not hasattr(importlib.import_module(module), name)] == []
