"""Lab 2: the model answers pass every check, each wrong answer loses its question, and the notebook runs."""

import functools
import json
import re

import pytest
import torch

from instructor.build import ROOT
from tests.instructor import lab_cases
from tests.instructor.every_lab import EveryAnswer, EveryLab, slow
from tests.instructor.lab2_right_answers import RIGHT_ANSWERS
from tests.instructor.lab2_wrong_answers import WRONG_ANSWERS
from utils.attention.masks import dense_mask, documents

LAB = "lab2_flexattention"
RECORD = ROOT / "assets/results/h200/lab2.json"  # two tables were measured anew, at a commit of their own
NOTEBOOK_OVERNIGHT = True  # its solved run compiles for minutes; `labs grade` judges its answers in the slow set
BY_HAND = {"q1_3": 4, "q5_2": 5, "q5_3": 4, "q6_2": 4, "q7_2": 4}
SETUP = """
import functools, math, warnings
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
"""  # the part of the notebook's setup cell that answers use


class TestLab(EveryLab):
    points = (100, 12)
    by_hand = BY_HAND
    wrong_answers, least_mistakes = WRONG_ANSWERS, 60
    least_figures, least_predictions = 4, 9
    prediction = r"\*\*Before you (?:run|look)\.\*\*"
    longest_cell_s = 8 * 60
    hinted = True

    @slow
    def test_solved_lab_keeps_its_tables(self, solved):
        text = json.dumps(solved.cells[-2])
        for table in ("mask_as_data", "promises", "race", "traces", "cliff", "buckets", "sweep", "layout"):
            assert table in text


class TestAnswers(EveryAnswer):
    right_answers, wrong_answers = RIGHT_ANSWERS, WRONG_ANSWERS


def test_python_max_in_a_bias_is_named(visible, names):
    exec("def relative_bias(table):\n    return lambda s, b, h, q, k: s + table[h, max(0, min(q - k + 1, 2))]", names)
    assert "clamp" in visible.message("q4_2_tests", visible.scope(names))


def test_arguments_are_counted_as_flex_attention_counts_them():
    """The checks refuse exactly the masks that create_block_mask refuses."""
    from torch.nn.attention.flex_attention import create_block_mask

    from utils.checking.masks import count_arguments

    class Mask:
        def __call__(self, b, h, q, k):
            return k <= q

    def shifted(by, b, h, q, k):
        return k <= q + by

    for mod, accepted in (
        (lambda b, h, q, k: k <= q, True),
        (lambda b, h, q, k, by=1: k <= q + by, True),
        (Mask(), True),
        (functools.partial(shifted, 1), True),
        (lambda b, h, q, k, *more: k <= q, True),
        (lambda *where: where[3] <= where[2], False),
        (lambda b, h, *where: where[1] <= where[0], False),
    ):
        assert (count_arguments(mod) == 4) is accepted
        if accepted:
            create_block_mask(mod, None, None, 4, 4, device="cpu", BLOCK_SIZE=2)
        else:
            with pytest.raises(AssertionError):
                create_block_mask(mod, None, None, 4, 4, device="cpu", BLOCK_SIZE=2)


def test_unanswered_questions_say_so(calls, checks, names):
    def stub(*args, **kwargs):
        raise NotImplementedError()

    unanswered = dict.fromkeys(names, stub)
    for cell, verdict in lab_cases.verdicts_on(calls, unanswered, checks).items():
        assert not verdict.passed and "not answered yet" in verdict.message, cell


@pytest.mark.gpu
def test_model_answers_run_on_a_gpu(names):
    """The checks feed CPU tensors; here the same functions get tensors on the GPU, and FlexAttention compiles them."""
    from utils.attention import reference

    cuda = torch.device("cuda")
    length = 512
    q, k, v = (torch.randn(2, 4, length, 64, device=cuda, dtype=torch.bfloat16) for _ in range(3))
    numbers = names["document_numbers"]([200, 150, 100], length, cuda)
    windows = torch.tensor([64, 100, 200, 300], device=cuda)
    compiled = torch.compile(names["flex_attention"], dynamic=False)
    score = names["in_turn"](names["soft_cap"](5.0), names["alibi"](torch.rand(4, device=cuda)))
    for mask in (
        names["causal"],
        names["sliding_window"](100),
        names["prefix_lm"](70),
        names["sinks_and_window"](4, 64),
        names["packed_documents"](numbers.expand(2, -1)),
    ):
        attend = names["prepare_flex"](compiled, mask, score, length, cuda)
        expected, _ = reference(q, k, v, mask_mod=mask, score_mod=score)
        torch.testing.assert_close(attend(q, k, v).double(), expected, rtol=3e-2, atol=3e-2)
    block_mask = names["create_block_mask"](
        names["window_per_head"](windows), None, 4, length, length, device="cuda", BLOCK_SIZE=128
    )
    got = compiled(q, k, v, block_mask=block_mask)
    expected, _ = reference(q, k, v, mask_mod=names["window_per_head"](windows))
    torch.testing.assert_close(got.double(), expected, rtol=3e-2, atol=3e-2)
    shared = names["create_block_mask"](names["causal"], None, None, length, length, device="cuda", BLOCK_SIZE=128)
    got = names["block_sparse_attention"](q, k, v, shared)
    expected, _ = reference(q, k, v, mask_mod=names["causal"])
    torch.testing.assert_close(got.double(), expected, rtol=3e-2, atol=3e-2)


# ---- the notebook ------------------------------------------------------------------------------------------------


def test_cells_bring_the_names_they_measure_with(cells):
    """A cell that runs again, or out of order, does not use another cell's tensors."""
    shared = {"q", "k", "v", "span", "block", "rows"}
    for cell, used, _ in lab_cases.names_by_cell(cells):
        if not (lab_cases.has_role(cell, "solution") or lab_cases.has_role(cell, "grade")):
            assert not used & shared, cell.source.partition("\n")[0]


# ---- what is said about recorded tables --------------------------------------------------------------------------


def test_a_shown_table_was_not_measured_anew(cells):
    """The line above a shown table names the commit of the whole record."""
    shown = set(re.findall(r'show_recorded\("(\w+)"\)', "\n".join(c.source for c in cells)))
    assert shown and not shown & set(json.loads(RECORD.read_text())["measured_anew"]["tables"])


def test_the_tensor_saves_nothing_on_the_recorded_gpu(prose, recorded):
    """The documents' tensor against no mask: "2.2 on an H200"."""
    ratio = recorded["mask_as_data"].set_index("way")["time over no mask"]
    assert f"{ratio['documents of 1024, as a tensor']:.1f} on an H200" in prose


def test_the_recorded_cliff_is_as_the_text_says(prose, recorded):
    """One setting falls, more than tenfold; the default compiles twice, dynamic=True once."""
    rows = recorded["cliff"]
    static = rows[rows["setting"] == "dynamic=False"]
    falling = static["TFLOP/s"].tolist()
    assert "more than tenfold" in prose and falling[1] > 10 * falling[2]
    cliff = rows.groupby("setting", sort=False)
    speed = cliff["TFLOP/s"].agg(list)
    for name in ("default", "dynamic=True"):
        assert min(speed[name]) > 0.5 * max(speed[name])
    assert cliff["kernels so far"].max().to_dict() == {"dynamic=False": 2, "default": 2, "dynamic=True": 1}


def test_flex_trains_faster_under_the_mask_on_the_recorded_gpu_and_the_loop_slower(names, prose, recorded):
    """Each way has the promise of its own blocks: the loop's are of 512, FlexAttention's of 128."""
    mask = dense_mask(names["both"](names["causal"], documents(512)), 4096, 4096)
    promised = [names["promised_speedup"](names["count_blocks"](mask, block)) for block in (512, 128)]
    training = recorded["training"].set_index("way")
    assert training["its blocks promise"].tolist() == [1.0, *promised] == [1.0, 8.0, 12.8]
    assert set(training["dtype"]) == {"bf16"}
    assert list(training.index) == ["SDPA, mask as a tensor", "your block_sparse_attention", "FlexAttention"]
    tensor, loop, flex = training["both ms"]
    assert f"FlexAttention took {flex:.2f} ms where the mask as a tensor took {tensor:.2f} ms" in prose
    assert f"{tensor / flex:.1f} times as fast, {tensor / flex / promised[1]:.0%} of what its blocks promise" in prose
    assert f"The course's took {loop:.1f} ms" in prose and flex < tensor < loop
