"""What the simulator refuses is refused by the right kind of report, at the right line."""

import pytest
import torch

pytest.importorskip("triton", reason="gluon_cpu needs Triton for the language; there are wheels for Linux only")

from tests.utils.gluon_cpu import gluon_refused_kernels as kernels
from tests.utils.gluon_cpu.gluon_helpers import marked_lines
from utils import gluon_cpu

LINES = marked_lines(kernels)

# name -> kind of report and words that its message must have
REFUSED = {
    "different layouts": ("layout", "convert_layout"),
    "slice along the wrong dimension": ("layout", "SliceLayout(1"),
    "operand layout not converted": ("layout", "DotOperandLayout"),
    "another swizzle than the descriptor": ("layout", "layout of the descriptor"),
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
    "two names for one value": ("kernel", "Write `before = place + 0` before the loop"),
    "only bounds": ("kernel", "never changes `begin`"),
    "no return": ("kernel", "`bar, _phase` are taken from a function that returns nothing"),
    "variable behind its loop": ("kernel", "`at` is the variable of a loop"),
    "step of the run": ("kernel", "step of -1"),
    "false promise": ("kernel", "the condition does not hold"),
    "no multiple": ("kernel", "65 is no multiple of 16"),
    "slots reshaped": ("layout", "take one of them by .index(i)"),
    "fewer than none": ("kernel", "got -1"),
    "barrier that another partition ends": ("barrier", "nothing puts it behind the last use"),
    "base between 16 bytes": ("layout", "multiples of 16 bytes"),
    "barrier of another partition": ("barrier", "initialize it before gl.warp_specialize"),
    "name of a constant in a loop": ("kernel", "`t` was a compile-time constant before this loop"),
    "layout without constexpr": ("kernel", "write `layout: gl.constexpr = ...`"),
    "subscript of shared memory": ("kernel", "ring.index(i) is slot i"),
    "wait for nothing": ("kernel", "`deps` is empty"),
    "exponential in fp16": ("kernel", "needs fp32 or fp64"),
    "mask of numbers": ("kernel", "this one is int32"),
    "other without a mask": ("kernel", "there is no mask"),
    "plain python function": ("kernel", "no @triton.jit or @gluon.jit function"),
    "unknown operation": ("unknown operation", "mma_v2. Hopper's product is warpgroup_mma"),
    "break": ("kernel", "Triton has no Break in a kernel: `break` does not compile"),
    "list of a range": ("kernel", "makes a list from a tuple only"),
    "lambda": ("kernel", "Triton has no Lambda in a kernel"),
    "unknown assembly": ("unknown operation", "brkpt"),
}


@pytest.mark.parametrize("bug", REFUSED)
def test_refused(bug):
    x, y = torch.zeros(200), torch.zeros(200)
    with pytest.raises(gluon_cpu.SimulationError) as error, gluon_cpu.simulate(max_steps=50_000):
        kernels.refused[(1,)](x, y, 64, bug)
    kind, words = REFUSED[bug]
    report = error.value.report
    assert (report.kind, report.site.file) == (kind, kernels.__file__) and words in report.message, str(report)
    assert report.line in LINES[bug], f"{sorted(LINES[bug])}: {report}"
