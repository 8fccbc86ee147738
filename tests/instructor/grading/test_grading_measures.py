"""What a question teaches is measured, and not only the values of its answer."""

import json
import re

import nbformat
import pytest
import torch

from instructor.build import build_lab
from instructor.checks.lab3_gluon.work import MODEL, launch_of, work_of
from instructor.grading.submission.reading import unusual_file
from instructor.grading.submission.remote import Gone, Remote
from instructor.grading.submission.text_words import lines_of_code, read_arguments
from instructor.grading.submission.usual import Usual
from instructor.grading.submission.usual_operators import unusual_calls
from instructor.points import lab_path
from utils.checking.kernel_exercises import simulate_launch
from utils.checking.masks import expect_program
from utils.checking.profiles import steps_that_wait
from utils.checking.sizes import SizeWatch
from utils.checking.watching import FUSED_ATTENTION, OperationWatch, demand


@pytest.fixture(scope="module")
def lab3():
    """The lab, and its files of kernels: {name: text of the model answer}."""
    built = build_lab(lab_path("lab3_gluon"))
    cells = nbformat.reads(built.instructor, as_version=4).cells
    found = (re.match(r"%%writefile (\S+)\n(.*)", c.source, flags=re.DOTALL) for c in cells)
    return built, {m[1]: m[2] for m in found if m}


@pytest.mark.parametrize("kernel", MODEL)
def test_the_work_of_the_model_answers(lab3, kernel):
    launch, _ = launch_of(kernel)
    _, run = simulate_launch(lab3[1][launch.file], launch, timeline=True)
    assert work_of(run) == pytest.approx(MODEL[kernel], rel=0.005)


def test_the_events_of_each_program_are_told_apart(lab3):
    launch, _ = launch_of("transpose")
    _, run = simulate_launch(lab3[1][launch.file], launch, timeline=2)
    assert len(run.programs()) == 2 and sum(map(len, run.programs())) == len(run.events)
    assert [sum(e.kind == "load" for e in events) for events in run.programs()] == [1, 1]


def test_a_tool_that_is_asked_for_has_to_run():
    watch = OperationWatch()
    watch.operations.update(bmm=2, _softmax=1)
    with pytest.raises(AssertionError, match="Call SDPA"):
        demand(watch, FUSED_ATTENTION, hint="call SDPA")
    watch.operations.update(_scaled_dot_product_flash_attention_for_cpu=1)
    demand(watch, FUSED_ATTENTION)


def test_products_that_nobody_sees_do_not_count():
    x = torch.randn(4, 5)
    with SizeWatch() as seen:
        x @ x.T
    seen.expect_seen(80, "a product")
    with SizeWatch() as singly:
        [[sum(a * b for a, b in zip(row, other, strict=True)) for other in x] for row in x]
    singly.expect_seen(80, "products of single numbers in tensors")
    with SizeWatch() as unseen:
        rows = [[number.item() for number in row] for row in x]
        [[sum(a * b for a, b in zip(row, other, strict=True)) for other in rows] for row in rows]
    with pytest.raises(AssertionError, match="read one by one"):
        unseen.expect_seen(80, "products of Python's numbers")


def test_a_product_counts_whatever_makes_it():
    x, y, product = torch.randn(6, 1, 8), torch.randn(1, 7, 8), 6 * 7 * 8
    ways = {
        "matrices": lambda: x[:, 0] @ y[0].T,
        "elements": lambda: (x * y).sum(-1),
        "norms": lambda: ((x + y).norm(dim=-1) ** 2 - (x - y).norm(dim=-1) ** 2) / 4,
        "pairs": lambda: torch.stack(torch.broadcast_tensors(x, y)).prod(0).sum(-1),
    }
    for name, way in ways.items():
        with SizeWatch() as sizes:
            torch.testing.assert_close(way(), x[:, 0] @ y[0].T)
        assert sizes.multiplied_at_once(product) >= product, name
    with SizeWatch() as sizes:
        (x + y).sum(-1).exp()
        (x[:, 0] * 2.0, x[:, 0] * x[:, 0])
    assert sizes.multiplied_at_once(product) == 0 and sizes.multiplied_in_all(product) == 48


def test_copies_are_counted_and_views_are_not():
    x = torch.randn(6, 10)
    with SizeWatch() as sizes:
        x[:3].T.unsqueeze(0)
        x[2:4].clone()
    assert sizes.moved == 20


def test_a_mask_computes_with_single_numbers():
    table = torch.arange(12)
    expect_program(lambda b, h, q, k: table[q] == table[k], 16, "a lookup")
    with pytest.raises(AssertionError, match="12 numbers at once"):
        expect_program(lambda b, h, q, k: (table == q).sum() == (table == k).sum(), 16, "a search")


def _trace(order: str) -> list[dict]:
    """A trace of two steps; in each an operator of fn, and a wait inside of the step, or at the beginning of the next one."""
    names = {"f": "aten::erf", "w": "aten::lgamma"}
    events = []
    for step in (0, 1):
        events.append({"name": f"ProfilerStep#{step}", "ts": 100 * step, "dur": 90})
        events += [{"name": names[c], "ts": 100 * step + 10 * (n + 1), "dur": 1} for n, c in enumerate(order)]
    return json.loads(json.dumps(events))


def test_waits_that_come_after_the_step_are_seen():
    assert [steps_that_wait(_trace(order), "aten::erf") for order in ("fw", "wf", "fwf", "f")] == [2, 0, 0, None]


def test_an_argument_that_every_right_answer_reads():
    import ast

    (function,) = ast.parse("def tiled(a, b, tile_m, tile_k):\n    return [a[i] for i in range(tile_m)]").body
    assert read_arguments(function) == [(0, "a"), (2, "tile_m")]


def test_numbers_that_leave_one_by_one_are_counted():
    watch = OperationWatch()
    watch.exits.update({".item()": 30, "bool(tensor)": 5})
    assert not unusual_calls([watch], numbers=35) and "35 single numbers" in unusual_calls([watch], numbers=34)[0]


def test_lines_of_a_file_that_were_given_stay(lab3):
    built, files = lab3
    usual = Usual(built.instructor, {}, needed={"q2_2": "convert_layout"})
    text = files["lab3_async_copy.py"]
    assert not unusual_file(text, usual, "q3_1")
    spaced = text.replace("    layout: gl.constexpr", "    # words\n    layout:  gl.constexpr")
    assert spaced != text and not unusual_file(spaced, usual, "q3_1")
    changed = text.replace("gl.BlockedLayout([4], [32], [4], [0])", "gl.BlockedLayout([1], [32], [4], [0])")
    assert "lines that stood there" in unusual_file(changed, usual, "q3_1")[0]
    without = files["lab3_transpose.py"].replace("convert_layout", "permute")
    assert any("does without convert_layout" in line for line in unusual_file(without, usual, "q2_2"))


def test_lines_are_compared_without_their_form():
    assert lines_of_code('"""A text."""\n  x  = 1  # one\n\n# two\n') == {"x=1": 1}


@pytest.mark.parametrize(
    ("why", "kind"), [("in __exit__\nMemoryError: std::bad_alloc\n", "killed"), ("KeyError: 1", "protocol")]
)
def test_memory_that_is_used_up_is_no_disturbance(why, kind):
    class Channel:
        def send(self, *_):
            pass

        def receive(self, _):
            return {"op": "broken", "n": 1, "why": why}, []

    remote = Remote.__new__(Remote)
    remote.number, remote.deadline, remote.channel, remote.beats = 0, 0.0, Channel(), lambda _: None
    with pytest.raises(Gone) as gone:
        remote.ask({})
    assert gone.value.kind == kind


def test_numbers_that_are_kept_by_an_operator_that_returns_nothing_are_counted():
    x = torch.randn(1000)
    with SizeWatch() as sizes:
        kept = torch.empty(1000)
        torch._foreach_copy_([kept], [x.exp()])
        assert torch.isfinite(kept.sum())
    assert sizes.held >= 2000  # the exponentials, and where they were kept

    with SizeWatch() as sizes:
        assert x.to(torch.bfloat16).sum() == x.to(torch.bfloat16).sum()
    assert sizes.narrowed == 2000
