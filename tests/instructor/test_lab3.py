"""Lab 3: the model answers pass every check, each wrong answer loses its question, and the notebook runs."""

import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="lab 3 needs Triton for Gluon itself; there are wheels for Linux only")

from instructor.points import lab_path
from tests.instructor import lab_cases
from tests.instructor.every_lab import EveryAnswer, EveryLab
from tests.instructor.lab3_right_answers import RIGHT_ANSWERS
from tests.instructor.lab3_wrong_answers import WRONG_ANSWERS
from utils.checking import gluon_launches as launches
from utils.checking import kernel_exercises
from utils.labs import lab3_gluon as lab3

LAB = "lab3_gluon"
BY_HAND = {"q1_2": 4, "q3_3": 4, "q4_2": 4, "q5_4": 6}


SETUP = """
import math
from functools import partial
import torch
from utils import *
from utils.labs.lab3_gluon import *
"""  # the part of the notebook's setup cell that answers and their tests use


class TestLab(EveryLab):
    points = (100, 26)
    by_hand = BY_HAND
    wrong_answers, least_mistakes = WRONG_ANSWERS, 30
    least_figures, least_predictions = 9, 8
    hinted = True

    def test_the_checklist_is_the_map(self, lab):
        prose = lab_cases.prose_of(lab.student)
        lines = "Pipeline", "Layouts", "Softmax", "Sync", "Memory", "Loads", "Critical path", "Schedule", "Masking"
        assert [line for line in lines if f"| {line} |" not in prose] == []


def test_what_the_lab_says_of_its_records(lab):
    """Sentences about recorded figures hold for the files that the lab shows."""
    recorded = Path(__file__).parents[2] / "assets" / "results" / "h200"
    prose = " ".join(lab_cases.prose_of(lab.student).split())
    assert "the recorded 4.1 and 5.1 without their fence gave wrong numbers in *every* launch" in prose
    assert "In the record the ring of 3.4 came through without that fence." in prose
    fences = json.loads((recorded / "gluon_fences.json").read_text())
    assert fences["triton"].startswith("3.6")
    wrong = {(row["kernel"].split(",")[0].split()[0], row["fence"]): row for row in fences["rows"]}
    for kernel in ("4.1", "5.1"):
        assert wrong[kernel, "removed"]["wrong launches"] == wrong[kernel, "removed"]["launches"] > 0
        assert wrong[kernel, "kept"]["wrong launches"] == wrong[kernel, "removed"]["fences in PTX"] == 0
    assert wrong["3.2", "removed"]["fences in PTX"] == 1 and wrong["3.2", "removed"]["wrong launches"] == 0
    assert wrong["3.4", "between partitions removed"]["wrong launches"] == 0
    tables = json.loads((recorded / "lab3.json").read_text())["tables"]
    race = {row["against"]: row["you are faster by"] for row in tables["race"]}
    assert set(race) > {"naive", "cuDNN", "FlashAttention 2", "FlashAttention 3"}
    naive = tables["naive_and_fused"][0]
    assert naive["kernels"] < 8 and naive["MB moved"] / naive["ms"] > 1500, "a weak baseline: more than three operators"
    assert (
        "the naive version has six kernels: the two products, the softmax, the scaling" in prose
        and naive["kernels"] == 6
    )
    bench = json.loads((recorded / "bench/labs/results.json").read_text())
    (unfused,) = (
        c["ran"]["baseline"]
        for c in bench["cases"]
        if c["ran"]["baseline"]["range"] == "flashattention_baseline_unfused"
    )
    assert unfused["launches"] == 6  # at the same shape, with names: five, one of which comes twice
    words = ("Memset", "nvjet_sm90_tst_256x128", "MulFunctor", "SoftMax", "nvjet_sm90_tst_128x256")
    assert len(unfused["kernels"]) == 5
    assert all(any(word in name for name in unfused["kernels"]) for word in words)
    # "The same library at the same shape reads differently in the three records."
    ladder, ratios = (
        json.loads((recorded / f"attention_{name}.json").read_text())["rows"] for name in ("ladder", "ratios")
    )
    shape = (128, 16384, False, "cudnn")
    same = [r for r in (*ladder, *ratios) if (r["head_dim"], r["length"], r["causal"], r.get("against")) == shape]
    cudnn = [row["against_tflops"] for row in same] + [
        r["its TFLOP/s"] for r in tables["race"] if r["against"] == "cuDNN"
    ]
    assert max(cudnn) > 1.03 * min(cudnn)
    assert "Step 3 is slower than step 2 at head dimension 128." in prose
    at_16k = [row for row in ladder if (row["head_dim"], row["length"], row["causal"]) == (128, 16384, False)]
    tflops = {row["step"]: row["tflops"] for row in at_16k if "tflops" in row}
    assert tflops[3] < tflops[2] < tflops[4] < tflops[5]


def test_tiles_that_no_one_writes_are_named_as_such(files):
    """Not "is there 0 / 0?" for a tile that is stored at the wrong place: an output that nothing wrote is told from NaN."""
    text = files["lab3_wgmma.py"].replace("tma_store(c_desc, [row, column]", "tma_store(c_desc, [column, row]")
    with pytest.raises(AssertionError, match=r"4,096 elements are never written, the first at \(0, 64\)"):
        list(kernel_exercises.run_tries(text, [launches.wgmma_launch(64, 128, 64)]))


def test_the_games_end_as_the_text_says(files, monkeypatch, capsys):
    """(a) hangs or races as the lab says after the guess, and the orders that look like races are right."""
    monkeypatch.setattr(lab3, "plot_runs", lambda _: None)
    lab3.play_orders(files["lab3_overlap.py"])
    lab3.play_hand_offs(files["lab3_two_softmax.py"])
    said = capsys.readouterr().out
    for words in ("before the wait: right", "of K's slot: right", "v_empty before the wait: race"):
        assert words in said
    for words in ("P announced early: race", "o_ready never arrives: hangs"):
        assert words in said
    with pytest.raises(lab3.AnswerNeeded, match="another way"):
        lab3.swap_lines("one\ntwo\n", "three", "one")


def test_the_slider_shows_a_picture_for_each_choice(files, monkeypatch):
    shown = []
    monkeypatch.setattr(lab3, "display", lambda page: shown.append(page.data))
    lab3.draw_slider(files["lab3_specialized.py"], keys=(64, 128), slots=(1, 2), head_dims=(64,))
    assert shown[0].count("<svg") == 4 and shown[0].count("display:none") == 3
    assert len(shown[0]) < 400_000


@pytest.mark.slow
def test_part_6_compiles_for_blackwell(files, monkeypatch, tmp_path):
    """The cell only prints what the compiler refuses: the table has both answers, with the tensor memory that they take."""
    if not (able := lab3.offline_compile_support()):
        pytest.skip(able.reason)
    monkeypatch.chdir(tmp_path)
    for file in ("lab3_tcgen05.py", "lab3_two_softmax.py"):
        Path(file).write_text(files[file])
    shown = []
    monkeypatch.setattr(lab3, "display", shown.append)
    lab3.compile_for_blackwell()
    assert shown[0]["columns"].to_dict() == {"6.1 tcgen05": 64, "6.2 two softmaxes": 512}


@pytest.fixture(scope="module")
def files(cells):
    """The files that cells write: {file: its text}."""
    found = (re.match(r"%%writefile (\S+)\n(.*)", c.source, flags=re.DOTALL) for c in cells if c.cell_type == "code")
    return {m[1]: m[2] for m in found if m}


@pytest.mark.usefixtures("simulated_alone")
class TestAnswers(EveryAnswer):
    right_answers, wrong_answers = RIGHT_ANSWERS, WRONG_ANSWERS
    quick = 2
    many_draws = pytest.mark.overnight


@pytest.fixture
def simulated_alone(monkeypatch):
    """Compiling is slow, and the tests concern the simulated run only."""
    monkeypatch.setattr("utils.machine.device.offline_compile_support", lambda: False)


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("def sum_of_squares(:\n", "is no Python"),
        ("import nowhere_to_be_found\ndef sum_of_squares(): pass\n", "may not stand in a file of kernels"),
        ("x = 1\n", "defines no sum_of_squares"),
        ("def sum_of_squares(): pass\n", "should be a @gluon.jit function of"),
        ("### BEGIN SOLUTION", "not answered yet"),
    ],
)
def test_an_unanswered_or_broken_file_is_a_message(checks, files, text, phrase):
    if text.startswith("###"):
        text = files["lab3_tma_ring.py"].replace(text, "raise NotImplementedError()")
    verdict = checks.tma_ring(text)
    assert not verdict.passed and phrase in verdict.message, verdict.message


@pytest.mark.gpu
def test_model_answers_agree_on_a_gpu():
    """The lab's own check simulates the kernels, compiles them, and runs them on this machine's Hopper GPU."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("TMA, mbarriers and wgmma need a Hopper GPU (H100, H200)")
    source = lab_path(LAB).read_text()
    texts = {m[1]: m[2] for m in re.finditer(r"^# %%writefile (\S+)\n(.*?)(?=^# %% )", source, re.M | re.S)}
    qkv = launches.edge_inputs(150, 230)
    for each in (
        launches.transpose_launch(45, 70),
        launches.async_copy_launch(2000, 4, 3),
        launches.tma_ring_launch(40, 440, 3),
        launches.wgmma_launch(100, 72, 200),
        launches.attention_launch("lab3_softmax.py", 64, *qkv),
        launches.attention_launch("lab3_specialized.py", 128, *qkv, STAGES=2),
        launches.overlap_launch(*qkv),
    ):
        close = {"rtol": 1e-2, "atol": 2e-2}
        list(kernel_exercises.run_tries(texts[each[0].file], [each], compiles=True, close=close))
