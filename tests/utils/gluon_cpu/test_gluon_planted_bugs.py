"""The simulator finds each planted bug, with the right kind of report, at the right line, for several seeds."""

import random

import pytest
import torch

pytest.importorskip("triton", reason="gluon_cpu needs Triton for the language; there are wheels for Linux only")

from triton.experimental.gluon import language as gl

from tests.utils.gluon_cpu import gluon_planted_bugs as bugs
from tests.utils.gluon_cpu.gluon_helpers import descriptor, marked_lines
from utils import gluon_cpu

LINES = marked_lines(bugs)
SEEDS = (None, 1, 2, 3)  # of the table
TIMINGS = (None, random.randrange(10**6))  # of a test

# name -> kind of report and words that its message must have. Where two kinds stand, the first thing that goes wrong
# depends on who is faster: a wait for the wrong parity passes at once, or blocks.
PIPELINE = {
    "swapped phases": ("race | barrier", "parity"),
    "missing wait": ("race", "TMA copy into ring"),
    "slot off by one": ("race", "ring"),
    "wait for the other copy": ("race", "weights"),
    "early release": ("race", "ring"),
    "producer does not wait": ("race | barrier", "full["),
    "copy into the wrong slot": ("race", "ring"),
    "missing store_wait": ("race", "store_wait"),
    "missing fence before release": ("missing fence", "Between partitions no version"),
    "missing fence before store": ("missing fence", "Inside one partition Triton 3.7"),
    "producer waits for the wrong phase": ("deadlock", "empty[0], phase parity 0"),
    "missing arrive": ("deadlock", "1 of 1 arrivals missing"),
    "wrong arrive count": ("deadlock", "1 of 2 arrivals missing"),
    "missing expect": ("deadlock", "no mbarrier.expect announced"),
    "too many bytes": ("deadlock", "64 of 2112 announced bytes missing"),
    "producer stops early": ("deadlock", "full["),
    "too few bytes": ("barrier", "more than mbarrier.expect announced"),
    "expect twice": ("barrier", "arrival"),
    "too many arrivals": ("barrier", "2 arrivals"),
    "phase is no parity": ("barrier", "parity"),
    "missing init": ("barrier", "mbarrier.init"),
    "init twice": ("barrier", "initialized already"),
    "missing last store_wait": ("unfinished", "store_wait"),
    "producer goes on": ("unfinished", "ring"),
    "double arrive": ("race | barrier | deadlock", "["),
}


def run_pipeline(bug: str, seed, **options):
    x, w, y = torch.randn(16, 6 * 32), torch.randn(16, 32), torch.zeros(16, 6 * 32)
    block = [16, 32]
    with gluon_cpu.simulate(seed=seed, **options) as run:
        bugs.pipeline[(1,)](descriptor(x, block), descriptor(w, block), descriptor(y, block), 6, 2, bug, num_warps=4)
    return run, y, x * w.repeat(1, 6)


def test_the_pipeline_without_a_bug():
    for seed in (None, *range(1, 6)):
        run, y, want = run_pipeline("", seed)
        assert run.ok and torch.equal(y, want)


def check(error: pytest.ExceptionInfo, bug: str, kind: str, words: str) -> None:
    """The report's kind is one of `kind`, its line is marked; a deadlock has the line of every partition that waits."""
    report = error.value.report
    assert report.kind in kind.split(" | "), str(report)
    assert words in report.message, str(report)
    lines = {report.line} | ({s.line for s in report.others} if report.kind == "deadlock" else set())
    if bug in LINES:
        assert lines & LINES[bug], f"{sorted(LINES[bug])}: {report}"
    assert report.site.file == bugs.__file__


@pytest.mark.parametrize("seed", TIMINGS, ids=("model", "drawn"))
@pytest.mark.parametrize("bug", PIPELINE)
def test_pipeline_bugs(bug, seed):
    with pytest.raises(gluon_cpu.SimulationError) as error:
        run_pipeline(bug, seed)
    check(error, bug, *PIPELINE[bug])


HOPPER = dict(version=[3, 0], instruction=[16, 64, 16], warps=[4, 1])
PRODUCT = {
    "missing fence before wgmma": ("missing fence", "wgmma that reads A", {}),
    "wgmma before its copy": ("race", "TMA copy into b", {}),
    "overwritten operand": ("race", "warpgroup_mma_wait", {}),
    "refilled operand": ("race", "warpgroup_mma_wait", {}),
    "missing warpgroup_mma_wait": ("race", "warpgroup_mma_wait", {}),
    "wait for too few": ("race", "warpgroup_mma_wait", {}),
    "operand layout not converted": ("layout", "DotOperandLayout", {}),
    "operand not for wgmma": ("layout", "the instruction reads NVMMASharedLayout", {}),
    "old version": ("layout", "version [3, 0]", {"version": [2, 0]}),
    "instruction too wide": ("layout", "smaller than one instruction", {"instruction": [16, 128, 16]}),
    "instruction not 16 rows": ("layout", "16 rows", {"instruction": [64, 64, 16]}),
    "warps along N": ("layout", "multiple of 4", {"warps": [1, 4], "instruction": [16, 16, 16]}),
    "another swizzle than the descriptor": ("layout", "layout of the descriptor", {"swizzle": 64}),
}


def run_product(bug: str, seed=None, **changed):
    a, b = torch.randn(64, 64).half() / 8, torch.randn(64, 64).half() / 8
    c = torch.zeros(64, 64)
    swizzle = changed.pop("swizzle", 128)
    parts = {**HOPPER, **changed}
    layout = gl.NVMMADistributedLayout(parts["version"], parts["warps"], parts["instruction"])
    with gluon_cpu.simulate(seed=seed) as run:
        bugs.product[(1,)](a, descriptor(b, [64, 64]), c, 64, bug, layout, swizzle)
    return run, c, (a.double() @ b.double()).half().double() @ b.double()


def test_the_product_without_a_bug():
    for seed in range(4):
        run, c, want = run_product("", seed)
        assert run.ok and torch.allclose(c.double(), want, atol=1e-3)


@pytest.mark.parametrize("seed", TIMINGS, ids=("model", "drawn"))
@pytest.mark.parametrize("bug", PRODUCT)
def test_product_bugs(bug, seed):
    kind, words, changed = PRODUCT[bug]
    with pytest.raises(gluon_cpu.SimulationError) as error:
        run_product(bug, seed, **changed)
    check(error, bug, kind, words)


BUFFERED = {
    "missing wait_group": ("race", "wait_group"),
    "group off by one": ("race", "wait_group"),
    "missing commit": ("race", "wait_group"),
    "copy into the slot in use": ("race", "two writes"),
    "tile off by one": ("out of bounds", "mask"),
    "two bytes a thread": ("layout", "4, 8 or 16 bytes"),
    "cp.async at the end": ("unfinished", "wait_group(0)"),
}


def run_buffered(bug: str, seed=None):
    x = torch.randn(600).half()
    y = torch.zeros_like(x)
    layout = gl.BlockedLayout([1 if bug == "two bytes a thread" else 2], [32], [4], [0])
    with gluon_cpu.simulate(seed=seed) as run:
        bugs.buffered[(1,)](x, y, 600, 256, bug, layout)
    return run, x, y


@pytest.mark.parametrize("seed", TIMINGS, ids=("model", "drawn"))
@pytest.mark.parametrize("bug", BUFFERED)
def test_cp_async_bugs(bug, seed):
    with pytest.raises(gluon_cpu.SimulationError) as error:
        run_buffered(bug, seed)
    check(error, bug, *BUFFERED[bug])


def test_cp_async_without_a_bug():
    for seed in range(4):
        run, x, y = run_buffered("", seed)
        assert run.ok and torch.equal(x, y)


REFUSED = {
    "different layouts": ("layout", "convert_layout"),
    "slice along the wrong dimension": ("layout", "SliceLayout(1"),
    "no power of two": ("layout", "power of two"),
    "layout for eight warps": ("layout", "8 warps; this partition has 4"),
    "half a warp": ("layout", "a warp has 32"),
    "no constexpr": ("kernel", "constexpr"),
    "constexpr argument": ("kernel", "SIZE is a gl.constexpr parameter"),
    "too much shared memory": ("layout", "232448"),
    "rows shorter than the swizzle": ("layout", "64 bytes"),
    "never written": ("uninitialized", "nothing has written"),
    "half written": ("uninitialized", "nothing has written"),
    "missing mask": ("out of bounds", "x_ptr"),
    "slot outside": ("out of bounds", "2 slots"),
    "condition on a tensor": ("kernel", "scalar"),
    "endless loop": ("endless loop", "steps"),
    "plain python function": ("kernel", "no @gluon.jit function"),
    "unknown operation": ("unknown operation", "mma_v2. Hopper's product is warpgroup_mma"),
    "unknown assembly": ("unknown operation", "brkpt"),
}


@pytest.mark.parametrize("bug", REFUSED)
def test_refused(bug):
    x, y = torch.zeros(200), torch.zeros(200)
    with pytest.raises(gluon_cpu.SimulationError) as error, gluon_cpu.simulate(max_steps=50_000):
        bugs.refused[(1,)](x, y, 64, bug)
    check(error, bug, *REFUSED[bug])


def test_more_than_twenty():
    assert len(PIPELINE) + len(PRODUCT) + len(BUFFERED) + len(REFUSED) > 60
