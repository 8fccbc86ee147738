"""Grading with `--gpu`, as far as a machine without a GPU can show it.

CUDA does not survive a fork. So every process runs the setup for itself.
"""

import types
from pathlib import Path

import pytest
import torch

from instructor.build import build_lab
from instructor.course import answered_notebook
from instructor.grading.sandbox.walls import Limits
from instructor.grading.submission import student
from instructor.grading.submission.engine import grade_notebook

LIMITS = Limits(gpu=True)
SETUP = "torch.manual_seed(0)\n"
NORM = """
import os

class RMSNorm(torch.nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        {first}
        return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps) * self.weight
"""
OWN_SETUP = "assert set_up_in == os.getpid(), f'set up in {set_up_in}, tested in {os.getpid()}'"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The suite's lab; its setup notes which process it runs in."""
    text = (Path(__file__).parent / "suite_lab.py").read_text(encoding="utf-8")
    assert text.count(SETUP) == 1
    path = tmp_path_factory.mktemp("lab") / "suite_lab_gpu.py"
    path.write_text(text.replace(SETUP, f"{SETUP}import os\n\nset_up_in = os.getpid()\n"), encoding="utf-8")
    return build_lab(path)


def graded(lab, first):
    return grade_notebook(lab, answered_notebook(lab, {"q2_2": NORM.format(first=first)}), timeout=6, limits=LIMITS)


@pytest.mark.slow
def test_no_process_is_forked_that_ran_the_setup(lab, full_points):
    result = graded(lab, OWN_SETUP)
    points = {name: cell.points for name, cell in result.cells.items() if cell.status != "by_hand"}
    assert points == full_points, [cell.message for cell in result.cells.values() if not cell.points]
    assert result.flags == ()


@pytest.mark.slow
def test_what_a_check_leaves_behind_harms_no_other_question(lab, full_points):
    result = graded(lab, "os._exit(0)")
    cell = result.cells["q2_2_tests"]
    assert (cell.points, cell.status) == (0, "killed") and "os._exit" in cell.message
    points = {name: cell.points for name, cell in result.cells.items() if cell.status != "by_hand"}
    assert points == {**full_points, "q2_2_tests": 0}


def test_a_gpus_memory_is_not_read_while_a_profiler_of_the_students_counts(monkeypatch):
    # 4.1 of lab 1 calls the check from inside of a profiled step: reading an input of 64 MB there was counted as its kernels.
    read = []
    monkeypatch.setattr(student, "_state_of", lambda tensor: read.append(tensor) or ("new",))
    x = types.SimpleNamespace(is_cuda=True, detach=lambda: x)
    process = types.SimpleNamespace(tensors={7: x}, sent={7: ("old",)})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert student.Student._written(process, True) == [] and not read
    assert student.Student._written(process) == [7] and read == [x]
