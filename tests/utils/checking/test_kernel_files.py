"""A student's file of kernels: what it may import is read from its text, before any of it runs."""

import nbformat
import pytest

from instructor.build import ROOT
from utils.checking import WrongAnswer
from utils.checking.kernel_files import expect_kernel_file

HEAD = """\
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


"""
KERNEL = """\
@gluon.jit
def scale(x_ptr, n, TILE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.program_id(0) * TILE + gl.arange(0, TILE, layout)
    gl.store(x_ptr + at, 2 * gl.load(x_ptr + at, mask=at < n), mask=at < n)
"""
UNUSUAL = {
    "helpers, constants and a lambda": "import math\nLOG2E = math.log2(math.e)\nhalf = lambda x: x / 2\n",
    "a helper of plain Python": "def layout(warps):\n    return gl.BlockedLayout([1], [32], [warps], [0])\n",
    "a docstring, a print, a check": '"""Mine."""\nprint("loaded")\nassert 2 + 2 == 4\n',
    "an option of jit": '@gluon.jit(do_not_specialize=["n"])\ndef other(n):\n    pass\n',
    "an aggregate with methods": (
        "from utils.attention.gluon.shared import aggregate\n"
        "@aggregate\nclass State:\n    top: gl.tensor\n    rows: gl.constexpr\n"
        "    def __init__(self, top, rows):\n        self.top = top\n        self.rows = gl.constexpr(rows)\n"
        "    @gluon.jit\n    def raised(self, s):\n        return State(gl.maximum(self.top, gl.max(s, 1)), self.rows)\n"
        "@gluon.jit\ndef use(state, s):\n    return state.raised(s).top + state.rows.value\n"
    ),
    "values of the language": (
        "@gluon.jit\ndef use(x, desc, bar):\n    y = x.to(gl.bfloat16).reshape([4, 2]).permute([1, 0]).trans()\n"
        "    return y.sum(0), y.shape[0], y.dtype.primitive_bitwidth, desc.block_type.shape, desc.layout, bar.index(0), y.T\n"
    ),
    "lists and text": "def names(n):\n    found = []\n    found.append('x'.upper())\n    return {'a': found}.items()\n",
    "a class and a decorator of their own": (
        "def mine(f):\n    return f\n@mine\ndef g():\n    pass\n"
        "class Sizes:\n    pairs = dict(zip('ab', sorted([2, 1])))\n"
    ),
    "types are asked": "def kind(x):\n    return type(x) is int or isinstance(x, float) or hasattr(x, 'shape')\n",
}
REACHING = {
    "another module": "import os\n",
    "torch": "from torch.nn.functional import softmax\n",
    "an import in a kernel": "def f():\n    import os\n",
    "the model answer": "from utils.attention.gluon.step4_warp_specialized import attention_step4\n",
    "all of utils": "from utils import *\n",
    "a module beside it": "from . import kernels\n",
}


def test_the_labs_files_are_files_of_kernels():
    checked = 0
    for lab in ROOT.glob("lab3*.ipynb"):
        for cell in nbformat.read(lab, as_version=4).cells:
            if cell.source.startswith("%%writefile"):
                head, _, text = cell.source.partition("\n")
                expect_kernel_file(text, head.split()[1])
                checked += 1
    assert checked >= 9


@pytest.mark.parametrize("what", UNUSUAL)
def test_what_a_kernel_needs_may_stand_there(what):
    expect_kernel_file(HEAD + UNUSUAL[what] + KERNEL, "mine.py")


@pytest.mark.parametrize("what", REACHING)
def test_nothing_else_may_be_imported(what):
    text = HEAD + KERNEL + REACHING[what]
    with pytest.raises(AssertionError, match=r"mine\.py, line \d+: .* file of kernels"):
        expect_kernel_file(text, "mine.py")


def test_what_a_file_is_asked_to_write_is_not_imported():
    text = "from utils.attention.gluon.step4_warp_specialized import producer\n"
    expect_kernel_file(text, "lab3_overlap.py")
    with pytest.raises(AssertionError, match=r"producer of the course, which this file is asked to write"):
        expect_kernel_file(text, "lab3_specialized.py")


def test_a_file_that_is_no_python_is_named():
    with pytest.raises(WrongAnswer, match=r"mine\.py is no Python"):  # without the lines of the house
        expect_kernel_file("def f(:\n", "mine.py")
