"""A student's kernel, tried in three ways: figures, compilation and messages."""

import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="gluon_cpu needs Triton for the language; there are wheels for Linux only")

from utils.checking import AnswerNeeded
from utils.checking import kernel_exercises as exercises
from utils.gluon_cpu import compiling
from utils.kernels import warm_process

ROOT = Path(__file__).parents[3]
HEAD = """from triton.experimental import gluon
from triton.experimental.gluon import language as gl

"""
COPY = (
    HEAD
    + """
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def move(x_ptr, y_ptr, stride, SIZE: gl.constexpr, PIECE: gl.constexpr):
    start: gl.constexpr = async_copy.async_load  # a name that Triton below 3.8 has only by this package
    layout: gl.constexpr = gl.BlockedLayout([PIECE], [32], [4], [0])
    at = gl.arange(0, SIZE, layout)
    gl.store(y_ptr + at, gl.load(x_ptr + at * stride))
"""
)
TURN = (
    HEAD
    + """
@gluon.jit
def turn(y_ptr, n):
    x = 0
    for i in range(n):
        x = x * 0.5
    gl.store(y_ptr, x)
"""
)
SPLIT = (
    HEAD
    + """
@gluon.jit
def first(y_ptr):
    gl.store(y_ptr, 1.0)


@gluon.jit
def second(y_ptr):
    gl.store(y_ptr + 1, gl.load(y_ptr) @ 2)


@gluon.jit
def split(y_ptr):
    gl.warp_specialize([(first, (y_ptr,)), (second, (y_ptr,))], [1], [24])
"""
)


def move(stride: int, piece: int) -> exercises.Launch:
    x = torch.randn(1024 * stride)
    args = {"x_ptr": x, "y_ptr": torch.zeros(1024), "stride": stride, "SIZE": 1024, "PIECE": piece}
    return exercises.Launch("move", (1,), args, ("y_ptr",))


SECTORS = [(1, 1, 128), (1, 4, 128), (2, 1, 256), (8, 1, 1024), (16, 1, 1024)]


@pytest.mark.parametrize(("stride", "piece", "loads"), SECTORS)
def test_sectors_are_counted(stride, piece, loads):
    launch = move(stride, piece)
    outputs, run = exercises.simulate_launch(COPY, launch, timeline=True)
    assert torch.equal(outputs["y_ptr"], launch.args["x_ptr"][::stride])
    assert not launch.args["y_ptr"].any(), "a launch leaves its tensors alone"
    load, store = (e for e in run.events if e.bytes)
    assert (load.kind, load.bytes, load.sectors) == ("load", 4096, loads)
    assert (store.kind, store.bytes, store.sectors) == ("store", 4096, 128)


@pytest.mark.slow
@pytest.mark.parametrize("fork", [True, False])
def test_it_compiles_for_hopper_and_the_compiler_is_heard(fork, monkeypatch):
    """Both in a fork and in a new process."""
    monkeypatch.setattr(warm_process, "has_one_thread", lambda: fork)
    launch = move(1, 4)
    compiled = exercises.compile_for_hopper(COPY, launch)
    assert compiled["global loads"] >= 1 and compiled["global stores"] >= 1 and compiled["wgmma"] == 0
    assert 0 < compiled.registers < 256 and compiled.spill_bytes == 0
    launch = exercises.Launch("turn", (1,), {"y_ptr": torch.zeros(1), "n": 3}, ("y_ptr",))
    exercises.simulate_launch(TURN, launch)  # Python does not mind that x changes its type
    with pytest.raises(AssertionError, match="the compiler for sm_90a refuses kernels") as error:
        exercises.compile_for_hopper(TURN, launch)
    assert "x" in str(error.value) and len(str(error.value)) < 3000 and "simulator" not in str(error.value)


@pytest.mark.slow
def test_the_compiler_points_at_the_line_inside_of_a_partition():
    """Not at the warp_specialize around it, which is where Triton's last message points."""
    launch = exercises.Launch("split", (1,), {"y_ptr": torch.zeros(2)}, ("y_ptr",))
    with pytest.raises(AssertionError) as error:
        exercises.compile_for_hopper(SPLIT, launch)
    message = str(error.value)
    number = SPLIT.splitlines().index("    gl.store(y_ptr + 1, gl.load(y_ptr) @ 2)") + 1
    assert f"line {number}: gl.store(y_ptr + 1, gl.load(y_ptr) @ 2)" in message, message
    assert "warp_specialize" not in message and "Traceback" not in message and len(message.splitlines()) == 3


def test_a_child_that_takes_too_long_is_a_message(monkeypatch):
    monkeypatch.setattr(compiling.PROCESS, "work", lambda request: time.sleep(60))
    monkeypatch.setattr(warm_process, "has_one_thread", lambda: True)
    monkeypatch.setattr(exercises, "COMPILE_SECONDS", 0.2)
    with pytest.raises(AssertionError, match="did not finish within 0 s"):
        exercises.compile_for_hopper(COPY, move(1, 4))


def test_a_complaint_names_the_students_line_and_the_compilers_words():
    error = "triton.compiler.errors.CompilationError: "
    inner = error + "at 2:12:\ndef max(input):\n    input = promote(input)\n            ^\nno scalar"
    outer = error + "at 3:4:\ndef mine(x):\n    top = gl.max(x, 1)\n          ^"
    between = "\n\nThe above exception was the direct cause of the following exception:\n\n"
    stderr = between.join([inner, outer, outer.replace("top", "other")])
    complaint = exercises._complaint(stderr, "\n\n    top = gl.max(x, 1)\n")
    assert complaint.split("\n") == ["    line 3: top = gl.max(x, 1)", "    no scalar"]
    assert exercises._complaint("ptxas fatal\nRuntimeError: out of registers: 300", "x = 1") == (
        "    RuntimeError: out of registers: 300"
    )


WAITS = (
    HEAD
    + """
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

@gluon.jit
def square(y_ptr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], shared, gl.full([64, 64], 1.0, gl.float16, layout))
    fence_async_shared()
    acc = warpgroup_mma(tile, tile, gl.zeros([64, 64], gl.float32, layout), is_async=True)
    WAIT
    gl.store(y_ptr, gl.max(gl.max(acc, 1), 0))
"""
)


@pytest.mark.parametrize(
    ("wait", "phrase"),
    [
        ("acc = warpgroup_mma_wait(0, deps=[acc])", None),
        ("acc = warpgroup_mma(tile, tile, acc)", None),  # goes on from the one under way, then waits
        ("warpgroup_mma_wait(0, deps=[acc])", "assign the result"),
        ("acc = warpgroup_mma_wait(0, deps=acc)", "`deps` is a list"),
        ("acc, other = warpgroup_mma_wait(0, deps=[acc])", "a tensor for one entry of deps"),
    ],
)
def test_what_a_wait_takes_and_returns(wait, phrase):
    launch = exercises.Launch("square", (1,), {"y_ptr": torch.zeros(1)}, ("y_ptr",))
    source = WAITS.replace("WAIT", wait)
    if phrase is None:
        outputs, _ = exercises.simulate_launch(source, launch)
        assert outputs["y_ptr"].item() in (64, 128)
    else:
        with pytest.raises(AssertionError, match=phrase):
            exercises.simulate_launch(source, launch)


def test_files_that_cannot_be_tried():
    launch = move(1, 1)
    with pytest.raises(AnswerNeeded, match="not answered yet"):
        exercises.load_kernels(COPY + "\n    raise NotImplementedError()\n", launch)
    with pytest.raises(AssertionError, match="no Python"):
        exercises.load_kernels("def move(", launch)
    with pytest.raises(AssertionError, match=r"should be a @gluon.jit function of \(x_ptr, y_ptr"):
        exercises.load_kernels(COPY.replace("stride, SIZE", "step, SIZE").replace("* stride", "* step"), launch)


def test_a_report_names_lines_and_no_paths():
    launch = move(1, 1)
    launch.args["x_ptr"] = torch.randn(1000)
    with pytest.raises(AssertionError, match="A mask is missing") as error:
        exercises.simulate_launch(COPY, launch)
    assert "in move: gl.store(y_ptr + at, gl.load(x_ptr + at * stride))" in str(error.value)
    assert "/" not in str(error.value).replace("//", "")


def test_overlap_is_measured_on_the_clock():
    from utils.gluon_cpu import Event

    events = [
        Event("a", "wgmma", "", None, 0.0, 10.0, 1, "tensor cores"),
        Event("a", "compute", "", None, 5.0, 15.0, 2),
        Event("b", "compute", "", None, 0.0, 10.0, 3),
    ]
    run = type("Run", (), {"events": events})()
    assert exercises.overlap(run) == pytest.approx(0.25)


@pytest.mark.filterwarnings("error")
def test_an_overflowing_sum_is_infinite_and_says_nothing():
    source = (
        HEAD
        + """
@gluon.jit
def add_up(x_ptr, y_ptr):
    x = gl.load(x_ptr + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0])))
    gl.store(y_ptr, gl.sum(x, 0))
"""
    )
    launch = exercises.Launch("add_up", (1,), {"x_ptr": torch.full((128,), 3e38), "y_ptr": torch.zeros(1)}, ("y_ptr",))
    outputs, _ = exercises.simulate_launch(source, launch)
    assert outputs["y_ptr"].item() == float("inf")


WAIT = (
    HEAD
    + """from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from utils.attention.gluon.shared import tma_load


@gluon.jit
def read(x_desc, y_ptr, PARITY: gl.constexpr, EXTRA: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slot = gl.allocate_shared_memory(x_desc.dtype, [16, 64], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, x_desc.block_type.nbytes + EXTRA)
    tma_load(x_desc, [0, 0], full, slot)
    mbarrier.wait(full, PARITY)
    gl.store(y_ptr, gl.max(gl.max(slot.load(layout).to(gl.float32), 1), 0))
"""
)


def wait_launch(parity: int, extra: int = 0) -> exercises.Launch:
    x = exercises.Tile(torch.ones(16, 64).half(), [16, 64])
    args = dict(x_desc=x, y_ptr=torch.zeros(1), PARITY=parity, EXTRA=extra)
    return exercises.Launch("read", (1,), args, ("y_ptr",))


def test_a_failure_is_drawn_with_the_missing_order():
    import matplotlib.pyplot as plt

    report, run = exercises.simulate_failure(WAIT, wait_launch(0))
    assert report == "" and run.ok and not any(e.kind in ("finding", "blocked") for e in run.events)
    report, run = exercises.simulate_failure(WAIT, wait_launch(1))
    assert report.startswith("race") and [e.line for e in run.events if e.kind == "finding"] == [run.reports[0].line]
    figure, axes = run.plot()
    assert any("race: line" in text.get_text() for text in axes.texts)
    assert any(getattr(text, "arrow_patch", None) for text in axes.texts), "no arrow from the copy to the read"
    plt.close(figure)
    report, run = exercises.simulate_failure(WAIT, wait_launch(0, 64))
    assert report.startswith("deadlock")
    (stuck,) = (e for e in run.events if e.kind == "blocked")
    assert stuck.buffer == "waits for full" and stuck.end > max(e.end for e in run.events if e is not stuck)
    figure, axes = run.plot()
    assert any("nobody can go on" in text.get_text() for text in axes.texts)
    plt.close(figure)


@pytest.mark.slow
def test_machine_code_stands_below_its_line():
    compiled = exercises.compile_for_hopper(WAIT, wait_launch(0))
    code = exercises.machine_code(WAIT, wait_launch(0), "tma_load(|mbarrier.wait|mbarrier.expect", compiled)
    lines = code.split("\nline ")
    assert len(lines) == 3 and "mbarrier.arrive.expect_tx" in lines[0] and "SYNCS.ARRIVE" in lines[0]
    assert "cp.async.bulk.tensor.2d" in lines[1] and "UTMALDG.2D" in lines[1]
    assert "mbarrier.try_wait.parity" in lines[2] and "SYNCS.PHASECHK" in lines[2]
    with pytest.raises(AssertionError, match="no line of"):
        exercises.machine_code(WAIT, wait_launch(0), "warpgroup_mma", compiled)


def test_a_wrong_result_names_the_mistake_that_explains_it():
    from utils.checking.gluon_launches import edge_inputs
    from utils.checking.mistakes import BLOCKS, SOFTMAX, Steps, attention_in_blocks, name_mistakes

    torch.manual_seed(0)  # in some draws a mistake changes nothing
    q, k, v, expected = edge_inputs(40, 67)
    right = attention_in_blocks(q, k, v, Steps())
    assert torch.allclose(right, expected) and torch.allclose(
        attention_in_blocks(q, k, v, Steps(), downward=True), expected
    )
    known = {words: attention_in_blocks(q, k, v, steps) for words, steps in (SOFTMAX | BLOCKS).items()}
    for words, values in known.items():
        noise = 1 + 0.001 * torch.randn_like(values)
        assert words in name_mistakes((values * noise).bfloat16(), expected.bfloat16(), known), words
    assert name_mistakes(torch.randn_like(expected), expected, known) == ""


def test_gluon_kernels_are_refused_under_tritons_interpreter_only(monkeypatch):
    source = "from triton.experimental import gluon\n\n\n@gluon.jit\ndef nothing(y_ptr):\n    pass\n"
    launch = exercises.Launch("nothing", grid=(1,), args={"y_ptr": torch.zeros(1)}, outputs=("y_ptr",))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(AssertionError, match="TRITON_INTERPRET is set"):
        exercises.load_kernels(source, launch)
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # Triton compiles here, so there is nothing to refuse
    assert exercises.load_kernels(source, launch).nothing is not None
