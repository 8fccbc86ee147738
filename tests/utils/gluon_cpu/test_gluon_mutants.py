"""One statement of a correct kernel is removed or reversed: the simulator reports it, and no wrong number passes in silence.

The kernels are the steps of the attention ladder, and the statements those that order asynchronous work: waits, announced
bytes, arrivals, initializations, fences. `UNSEEN` names the mutants that are not reported, and why.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="gluon_cpu needs Triton for the language; there are wheels for Linux only")

from utils import gluon_cpu
from utils.attention import reference
from utils.attention.gluon import launch
from utils.gluon_cpu.compiling import import_file, write_source

REMOVED = (
    *("mbarrier.wait(", "mbarrier.expect(", "mbarrier.arrive(", "mbarrier.init("),
    *("fence_async_shared()", "thread_barrier()", "tma.store_wait("),
    *("work.q.wait_full(", "work.k.wait_full(", "work.v.wait_full("),
)
# A part of the statement -> why a kernel without it, or with its opposite, may pass.
UNSEEN = {
    "thread_barrier()": "the warps of a partition are one actor in the simulator",
    "use_acc": "the accumulator is zero in each of these places",
    "fence behind init": "Triton's own tutorials start copies right behind mbarrier.init",
}
# (batch, heads, heads of keys, queries, keys, head dimension), causal
SMALL = [((1, 2, 1, 100, 300, 64), False), ((1, 2, 2, 200, 260, 128), True)]
# One program computes all tiles, so the code between two tiles runs, too, in each of step 5's plans.
SEVERAL_TILES = [
    *[((1, 3, 3, 300, 300, 64), False), ((1, 3, 3, 300, 300, 128), False), ((1, 3, 3, 400, 300, 128), True)],
    *[((1, 2, 2, 384, 256, 64), True), ((1, 2, 2, 384, 384, 256), False), ((1, 2, 2, 300, 331, 256), True)],
]


class Mutant(NamedTuple):
    """A kernel with one changed line."""

    line: int
    what: str
    statement: str
    text: str


def mutants(text: str) -> Iterator[Mutant]:
    """Yield the mutants of a kernel's file: each has one changed line."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("@gluon"))
    for number, line in enumerate(lines[first:], first):
        code = line.split("  #")[0]
        statement = code.strip()
        changes = {}
        if statement.startswith(REMOVED) and code.count("(") == code.count(")"):
            changes["removed"] = code[: len(code) - len(code.lstrip())] + "pass"
        if wait := re.match(r"(\s*mbarrier\.wait\(.+, )([^,()]+)(\).*)$", code):
            changes["other phase"] = f"{wait[1]}({wait[2]}) ^ 1{wait[3]}"
        if "mbarrier.expect" in code:
            changes["more bytes"] = code.replace("nbytes", "nbytes + 64")
            changes["fewer bytes"] = code.replace("nbytes", "nbytes - 64")
        if "mbarrier.init" in code:
            changes["one more arrival"] = re.sub(r"count=([^)]+)\)", r"count=\1 + 1)", code)
        if "use_acc=False" in code:
            changes["use_acc"] = code.replace("use_acc=False", "use_acc=True")
        behind_init = statement == "fence_async_shared()" and re.search(
            "mbarrier.init|async proxy, and may", "".join(lines[number - 5 : number + 1])
        )
        for what, changed in changes.items():
            what = "fence behind init" if behind_init else what
            yield Mutant(
                number + 1, what, statement, "\n".join([*lines[:number], changed, *lines[number + 1 :]]) + "\n"
            )


def load(text: str, name: str):
    """Import a kernel's file from a text."""
    return import_file(write_source(text, f"{name}.py"))


def error_of(step: int, module, shape: tuple, causal: bool, seed: int | None, monkeypatch) -> float:
    """Run a step in the simulator and return its largest error against float64; nan where nothing was stored."""
    batch, heads, kv_heads, sq, sk, head_dim = shape
    random = torch.Generator().manual_seed(5)
    q = torch.randn(batch, heads, sq, head_dim, generator=random).bfloat16()
    k, v = (torch.randn(batch, kv_heads, sk, head_dim, generator=random).bfloat16() for _ in "kv")
    monkeypatch.setattr(launch, "step_module", lambda step: module)
    with gluon_cpu.simulate(seed=seed, max_seconds=60) as run:
        out, _ = launch.run_step(q, k, v, causal, head_dim**-0.5, 0, True, step)
    if run.notes:  # a missing fence that the compiler adds is only a note
        raise gluon_cpu.FenceError(run.notes[0])
    expected, _ = reference(q, k, v, causal=causal)
    return (out.double() - expected.double()).abs().max().item()


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize(
    ("step", "multiprocessors", "shapes", "at_least"),
    [
        pytest.param(3, 2, SMALL, 14, marks=pytest.mark.slow),
        pytest.param(4, 2, SMALL, 30, marks=pytest.mark.overnight),
        pytest.param(2, 2, SMALL, 1, marks=pytest.mark.overnight),
        pytest.param(5, 1, SEVERAL_TILES, 3, marks=pytest.mark.overnight),
    ],
)
def test_no_mutant_of_the_ladder_passes_in_silence(step, multiprocessors, shapes, at_least, monkeypatch):
    monkeypatch.setattr(launch, "processors", lambda device: multiprocessors)
    text = Path(launch.__file__).with_name(f"{launch.MODULES[step - 1]}.py").read_text(encoding="utf-8")
    for shape, causal in shapes:
        assert error_of(step, load(text, f"step{step}_itself"), shape, causal, None, monkeypatch) < 0.01

    silent, wrong, reported = [], [], 0
    for number, mutant in enumerate(mutants(text)):
        module, said, errors = load(mutant.text, f"step{step}_mutant{number}"), [], []
        for shape, causal in shapes:
            for seed in (None, 1, 2):
                try:
                    errors.append(error_of(step, module, shape, causal, seed, monkeypatch))
                except gluon_cpu.SimulationError as error:
                    said.append(error)
        reported += bool(said)
        assert all(error.report.line > 0 for error in said), mutant
        if not all(error < 0.01 for error in errors):  # nan is none
            wrong.append(mutant[:3])
        if not said and not any(part in (mutant.what, mutant.statement) for part in UNSEEN):
            silent.append(mutant[:3])
    assert not wrong, "wrong numbers without a report"
    assert not silent
    assert reported >= at_least
