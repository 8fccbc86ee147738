"""The race of lab 3's kernels: what is refused, and who wins. Here kernels run in the simulator, in model cycles."""

import json
import os
import signal
import subprocess
import types
from collections import Counter
from dataclasses import replace

import nbformat
import pytest
import torch

from instructor.build import build_lab
from instructor.course import answered_notebook
from instructor.grading.race import compiling
from instructor.grading.race import race as racing
from instructor.grading.race import track as track_module
from instructor.grading.race.compiling import Kernel, Refused, read_machine_code
from instructor.grading.race.problem import LONG, TAIL, Shape, draw_inputs, reference_rows, rows_to_read, special_rows
from instructor.grading.race.race import Race, entry_of, in_order, model_answer, race_class, table
from instructor.grading.race.track import Result, Time, Track, expect_right
from instructor.points import lab_path
from tests.instructor.grading.race_cheats import CHEATS, HONEST
from utils.checking.gluon_launches import overlap_launch
from utils.checking.kernel_exercises import descriptor, load_kernels
from utils.checking.kernel_files import expect_kernel_file
from utils.gluon_cpu.reports import SimulationError
from utils.gluon_cpu.simulation import simulate

LAB = build_lab(lab_path("lab3_gluon"))
MODEL = model_answer(LAB)
# The simulator knows neither this assembly nor 8 bits; these files race on a GPU only (race_on_gpu.py).
GPU_ONLY = ("asm", "inline_asm", "float8")


KERNEL = Kernel("attention", 1024, 12, b"", [], "")
CYCLE_FLOPS = 4096.0  # the simulator's tensor cores: FLOPs of one SM in one cycle
SIMULATED, SIMULATED_TAIL = Shape("192 keys", 2, 192, 192, 64, 64), Shape("tail", 1, 70, 100, 64, 64)


class SimulatedTrack(Track):
    """Runs the text of a file in the simulator, in this process; its clock counts the model cycles of all programs."""

    shapes, tail = (SIMULATED_TAIL,), SIMULATED_TAIL

    def __init__(self, reference=None):
        self.kernels, self.calls, self.device, self.roof = {"reference": reference}, Counter(), "cpu", CYCLE_FLOPS

    def load(self, name, kernel):
        self.kernels[name] = kernel

    def launch(self, name, shape, inputs, cold):
        used = [*inputs, torch.full_like(inputs[0], float("nan"))]
        launch, _ = overlap_launch(*(x[0] for x in (*inputs, inputs[0])), block_n=shape.block)
        kernel = getattr(load_kernels(self.kernels[name].text, launch), launch.kernel)
        tiles = [descriptor(x, a.block) for x, a in zip(used, launch.args.values(), strict=False)]
        try:
            with simulate() as run:
                kernel[launch.grid](*tiles, *list(launch.args.values())[len(tiles) :])
        except SimulationError as error:
            raise Refused(f"the simulator stopped it: {error}") from None
        return used[3], float(sum(run.cycles)), True


def simulated(text: str, *shapes) -> str:
    """Run a file in the simulator and return why it is refused; "" if it is not."""
    track = SimulatedTrack()
    track.load("entry", types.SimpleNamespace(text=text))
    try:
        for shape in shapes:
            track.call("entry", shape)
    except Refused as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("file", [*CHEATS, *HONEST], ids=lambda f: f.name)
def test_what_is_refused_before_it_runs(file):
    try:
        expect_kernel_file(file.text(MODEL), "lab3_overlap.py")
    except AssertionError as refused:
        assert file.stage == "text", refused
        assert file.words in str(refused)
    else:
        assert file.stage != "text"


@pytest.mark.parametrize("name", ["zeros", "it writes into its inputs"])
def test_a_cheat_is_refused_and_the_model_answer_is_not(name):
    cheat = next(f for f in CHEATS if f.name == name)
    assert cheat.words in simulated(cheat.text(MODEL), SIMULATED_TAIL) != ""
    if name == "zeros":
        assert simulated(MODEL, SIMULATED_TAIL) == ""


@pytest.mark.slow
def test_every_cheat_that_a_kernel_can_try_is_refused_in_the_simulator():
    accepted = []
    for file in CHEATS:
        text = file.text(MODEL)
        if file.stage == "run" and not any(word in text for word in GPU_ONLY):
            why = simulated(text, SIMULATED_TAIL, SIMULATED)
            if not why or file.words not in why:
                accepted.append((file.name, why))
    assert not accepted


@pytest.mark.slow
def test_a_race(monkeypatch):
    cheat = next(f for f in CHEATS if f.name == "nothing is written").text(MODEL)

    def compiled(text):
        if text == "import os":
            raise Refused(text)
        return types.SimpleNamespace(text=text)

    monkeypatch.setattr(racing, "compile_text", compiled)
    monkeypatch.setattr(racing.device, "gluon_support", lambda: True)
    race = Race(MODEL)
    monkeypatch.setattr(race, "on_track", lambda kernel: SimulatedTrack(race.reference).run(kernel, 3))
    results = race_class(race, {"ada": MODEL, "ben": cheat, "cy": "import os", "di": Refused("not answered")})
    assert [r.student for r in results] == ["ada", "ben", "cy", "di"]
    ada, ben, cy, di = results
    assert not ada.refused and ada.calls == 2 + 2 * 3 and "not written" in ben.refused
    assert "import os" in cy.refused and di.refused == "not answered"
    assert 0.8 < ada.times[0].ratio < 1.25  # against itself; cycles of a random lot of inputs are all the same
    assert [(row["place"], row["student"]) for row in table(results)[0]][:2] == [(1, "ada"), ("", "ben")]


def _end(kernel, number):
    """What a kernel may do to its process."""
    return os._exit(3) if number == 3 else signal.raise_signal(number) if number else [][1]


@pytest.mark.parametrize(
    ("number", "words"), [(3, "has ended"), (signal.SIGALRM, "wait for itself"), (0, "IndexError")]
)
def test_a_track_that_has_ended_says_so_and_the_next_entry_gets_another(monkeypatch, number, words):
    monkeypatch.setattr(track_module, "start", print)
    monkeypatch.setattr(track_module, "run", _end)
    monkeypatch.setattr(racing, "compile_text", lambda text: KERNEL)
    monkeypatch.setattr(racing.device, "gluon_support", lambda: True)
    race = Race(MODEL, number)
    for _ in range(2):
        assert words in race.run("ada", KERNEL).refused and race.pool is None


def test_a_reference_that_does_not_run_ends_the_race(monkeypatch):
    monkeypatch.setattr(racing, "compile_text", lambda text: KERNEL)
    monkeypatch.setattr(racing.device, "gluon_support", lambda: True)
    with pytest.raises(Refused, match="reference"):  # there is no GPU
        Race(MODEL).run("ada", KERNEL)


@pytest.mark.slow
@pytest.mark.parametrize("file", [f for f in CHEATS if f.stage == "compiled"], ids=lambda f: f.name)
def test_what_the_compiler_or_its_machine_code_refuses(file):
    with pytest.raises(Refused, match=file.words or "."):
        compiling.compile_text(file.text(MODEL), replace(LONG, stages=1, block=64))


# ---- the judge -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows_of_a_call():
    """Rows of an honest output, and what they should be."""
    inputs = draw_inputs(SIMULATED_TAIL, 1, "cpu")
    right = reference_rows(SIMULATED_TAIL, inputs, *rows_to_read(SIMULATED_TAIL, 1, 2))
    return right.bfloat16().double(), right


def test_right_rows_are_accepted(rows_of_a_call):
    expect_right(SIMULATED_TAIL, *rows_of_a_call)


@pytest.mark.parametrize(("ms", "ahead", "words"), [(1e-3, True, "faster than the roof"), (1e9, False, "too slow")])
def test_a_time_that_cannot_be_and_a_launch_that_was_not_queued_are_refused(monkeypatch, ms, ahead, words):
    monkeypatch.setattr(track_module, "expect_right", lambda *facts: None)
    track = SimulatedTrack()
    monkeypatch.setattr(track, "launch", lambda name, shape, inputs, cold: (inputs[0], ms, ahead))
    with pytest.raises(Refused, match=words):
        track.call("entry", SIMULATED_TAIL)
    track.roof, ahead = 1e12, True
    assert track.call("entry", SIMULATED_TAIL) == ms


@pytest.mark.parametrize("row", [0, -1])
def test_one_wrong_row_is_seen(rows_of_a_call, row):
    rows, right = rows_of_a_call[0].clone(), rows_of_a_call[1]
    rows[row] *= 1.05
    with pytest.raises(Refused, match="1 of"):
        expect_right(SIMULATED_TAIL, rows, right)
    rows[row] = float("nan")
    with pytest.raises(Refused, match="not written"):
        expect_right(SIMULATED_TAIL, rows, right)


def test_rows_of_an_earlier_call_are_refused(rows_of_a_call):
    inputs = draw_inputs(SIMULATED_TAIL, 2, "cpu")
    later = reference_rows(SIMULATED_TAIL, inputs, *rows_to_read(SIMULATED_TAIL, 1, 2))
    with pytest.raises(Refused, match="differ"):
        expect_right(SIMULATED_TAIL, rows_of_a_call[0], later)


def test_rows_of_every_tile_are_read_and_nobody_foresees_which():
    heads, rows = rows_to_read(TAIL, 1, 2)
    tiles = set(zip(heads.tolist(), (rows // 64).tolist(), strict=True))
    assert tiles == {(h, t) for h in range(TAIL.heads) for t in range(4)} and int(rows.max()) < TAIL.queries
    assert not torch.equal(rows, rows_to_read(TAIL, 1, 3)[1])


def test_no_row_and_no_key_is_special_twice():
    # On an H200 an honest file was refused: a key was assigned twice, and inputs that were drawn twice were not the same.
    for seed in range(20):
        heads, rows, keys, sharp = special_rows(TAIL, seed)
        for places in (rows, keys):
            assert len({*zip(heads.tolist(), places.tolist(), strict=True)}) == len(heads)
        assert int(sharp.sum()) == len(heads) // 2


# ---- what a kernel may be --------------------------------------------------------------------------------------------

FACTS = {
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
    "launch_pdl": False,
    "launch_cooperative_grid": False,
    "num_ctas": 1,
    "name": "attention",
    "shared": 1024,
    "num_warps": 12,
    "descriptors": [],
    "cubin": "",
    "ptx": "",
}


@pytest.mark.parametrize(
    "changes",
    [
        {"global_scratch_size": 128},
        {"profile_scratch_size": 8},
        {"launch_pdl": True},
        {"launch_cooperative_grid": True},
        {"num_ctas": 2},
    ],
)
def test_a_kernel_that_asks_for_more_is_refused(monkeypatch, changes):
    monkeypatch.setattr(compiling, "opcodes", lambda cubin: {"EXIT", "HGMMA"})
    assert isinstance(read_machine_code(FACTS), Kernel)
    with pytest.raises(Refused, match="asks for"):
        read_machine_code({**FACTS, **changes})


@pytest.mark.parametrize("facts", ["[]", "no JSON", json.dumps(FACTS | {"cubin": "ff"})])
def test_a_forged_answer_refuses_its_own_file(monkeypatch, facts):
    run = subprocess.run
    forge = lambda command, **rest: run(["sh", "-c", 'printf %s "$1" > "$0"', command[-1], facts])  # noqa: E731
    monkeypatch.setattr(compiling, "subprocess", types.SimpleNamespace(**vars(subprocess) | {"run": forge}))
    with pytest.raises(Refused, match="cannot be read"):
        compiling.compile_text("")


@pytest.mark.parametrize("code", ["STG", "ATOMG", "LDGSTS", "CALL"])
def test_instructions_that_reach_memory_by_an_address_are_refused(monkeypatch, code):
    monkeypatch.setattr(compiling, "opcodes", lambda cubin: {"EXIT", "LDS", "STSM", "UTMALDG", code})
    with pytest.raises(Refused, match=f"has {code}:"):
        read_machine_code(FACTS)


# ---- entries and the table -------------------------------------------------------------------------------------------


def test_the_file_is_taken_from_the_notebook():
    notebook = answered_notebook(LAB, {"q5_3": f"%%writefile lab3_overlap.py\n{MODEL}"})
    assert entry_of(LAB, notebook.encode()) == MODEL + "\n"
    cells = nbformat.reads(notebook, as_version=4)
    cells.cells = cells.cells[:3]
    assert "NotImplementedError" in entry_of(LAB, nbformat.writes(cells).encode())  # as it was released


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"no JSON", "no notebook"),
        (b'{"cells": []}', "no cells"),
        (answered_notebook(LAB, {"q5_3": "x = 1"}).encode(), "does not begin with"),
    ],
)
def test_who_has_no_file_is_told_why(data, words):
    entry = entry_of(LAB, data)
    assert isinstance(entry, Refused) and words in str(entry)


def _result(student: str, speed: float, spread: float = 0.001) -> Result:
    times = [1.0 / speed * (1 + spread * (-1) ** i) for i in range(20)]
    return Result(student, [Time("fake", "cold", 1e9, times, [1.0] * 20)], calls=40)


def test_a_place_is_shared_where_intervals_meet():
    results = in_order(
        [_result("slow", 0.5), _result("fast", 1.5), Result("no", refused="why"), _result("same", 1.499)]
    )
    rows, lines = table(results)
    assert [(r["student"], r["place"]) for r in rows] == [("fast", 1), ("same", 1), ("slow", 3), ("no", "")]
    assert rows[3]["refused"] == "why" and rows[0]["fake, cold: times the reference"] == pytest.approx(1.5, rel=0.01)
    assert "1.50" in lines[0] and "does not count: why" in lines[3]
