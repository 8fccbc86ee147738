"""Submissions of the last kinds that were tried: files that break what reads them, unusual right answers, and names.

`FILES` are right answers in a file that is odd: each is graded, or refused in a sentence, and stops nobody else.
`HONEST` are right answers in unusual Python: every point, and no flag. `PRODUCTS` are forbidden answers to Question 1.1.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

import nbformat

from tests.instructor.grading.attacks import WRONG

_PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(3_000_000)).decode()


def changed(text: str, change: Callable[[dict], dict | None]) -> str:
    """A notebook's text after a change of its JSON, which may also return other JSON."""
    notebook = json.loads(text)
    return json.dumps(change(notebook) or notebook)


def _each(only_code: bool = False, **fields: object) -> Callable[[dict], None]:
    """Give each cell, or each cell of code, these fields."""

    def change(notebook: dict) -> None:
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code" or not only_code:
                cell.update(fields)

    return change


def _as_format_3(notebook: dict) -> dict:
    made = nbformat.convert(nbformat.reads(json.dumps(notebook), as_version=4), 3)
    return json.loads(nbformat.writes(made, version=3))


def _headings(notebook: dict) -> dict:
    """Headings of format 3, which become as many `#` as their level says."""
    old = _as_format_3(notebook)
    heading = {"cell_type": "heading", "level": 3 * 10**9, "source": ["x"], "metadata": {}}
    old["worksheets"][0]["cells"][1:1] = [heading] * 3
    return old


def _decoy(notebook: dict) -> None:
    """Worksheets beside the cells, so that a reader may clean the wrong ones."""
    notebook["worksheets"] = [{"cells": [{"cell_type": "markdown", "source": "", "metadata": {}}]}]
    _each(only_code=True, outputs=[1])(notebook)


def _pictures(notebook: dict) -> None:
    prose = [cell for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    for cell in prose[:10]:
        cell["attachments"] = {"a.png": {"image/png": _PNG}}
        cell["source"] = ["![mine](attachment:a.png)"]


def _metadata(notebook: dict) -> None:
    deep: dict = {}
    inner = deep
    for _ in range(200):
        inner["state"] = {}
        inner = inner["state"]
    models = {f"m{n}": {"state": {"value": "<script>alert(1)</script>"}} for n in range(1000)}
    notebook["metadata"] |= {"widgets": {"state": models, "deep": deep}, "kernelspec": ["python3"], "language_info": 7}
    notebook["metadata"]["authors"] = [{"name": "\ud800"}]


def _huge(notebook: dict) -> None:
    more = {"metadata": {}, "outputs": [], "execution_count": None}
    text = f"x = '''{'a' * 8_000_000}'''"
    notebook["cells"].append({"cell_type": "code", "id": "huge", "source": text, **more})
    notebook["cells"].append({"cell_type": "raw", "id": "raw", "metadata": {}, "source": "r" * 8_000_000})


_HALF = [
    {"output_type": "stream", "name": "stdout", "text": "\ud800"},
    {"output_type": "error", "ename": "\ud800", "evalue": "\ud800", "traceback": ["\ud800"]},
    {"output_type": "display_data", "data": {"text/plain": "\udfff", "text/latex": "\ud800"}, "metadata": {}},
]
FILES: dict[str, Callable[[dict], dict | None]] = {
    "half characters in the outputs": _each(only_code=True, outputs=_HALF),
    "worksheets beside the cells": _decoy,
    "ids that are lists": _each(id=[1]),
    "ids that are objects": _each(id={"a": 1}),
    "headings of three thousand million levels": _headings,
    "pictures of 40 MB": _pictures,
    "widgets, deep metadata, and metadata of other types": _metadata,
    "cells of 8 MB": _huge,
}
# The format is no number, or that of the first notebooks: nbformat's converters fail in ways of their own.
UNREADABLE: dict[str, Callable[[dict], dict | None]] = {
    "a format that is true": lambda notebook: notebook.update(nbformat=True),
    "the first format": lambda notebook: notebook.update(nbformat=1),
    "cells of the third format without their parts": lambda notebook: {
        "nbformat": 3,
        "nbformat_minor": 0,
        "metadata": {},
        "worksheets": [{"cells": [{"cell_type": "code"}, {"cell_type": "heading", "source": 5}]}],
    },
}

PRODUCTS = {
    "sparse": "    return aten._sparse_sparse_matmul(a.to_sparse(), b.to_sparse()).to_dense()\n",
    "a convolution's gradient": (
        "    none = torch.zeros(a.shape[0], b.shape[1], 1)\n"
        "    return aten.convolution_backward(a[:, :, None], none, b[:, :, None], None, [1], [0], [1], False, [0], 1, "
        "[True, False, False])[0][:, :, 0]\n"
    ),
    "slow_conv_dilated2d": (
        "    w = b.T[:, :, None, None].contiguous()\n"
        "    return aten.slow_conv_dilated2d(a[:, :, None, None], w, [1, 1], None, [1, 1], [0, 0], [1, 1])[:, :, 0, 0]\n"
    ),
    "slow_conv3d": (
        "    w, ones = b.T[:, :, None, None, None].contiguous(), [1, 1, 1]\n"
        "    return aten.slow_conv3d_forward(a[:, :, None, None, None], w, ones, None, ones, [0, 0, 0]).flatten(1)\n"
    ),
    "slow_conv2d": (
        "    w = b.T[:, :, None, None].contiguous()\n"
        "    return aten._slow_conv2d_forward(a[:, :, None, None], w, [1, 1], None, [1, 1], [0, 0])[:, :, 0, 0]\n"
    ),
    "weights in fp16, in two parts": (
        "    high = b.half().float()\n    low, none = (b - high) * 1024, torch.zeros(b.shape[1])\n"
        "    pack, run = aten.fbgemm_pack_gemm_matrix_fp16, aten.fbgemm_linear_fp16_weight_fp32_activation\n"
        "    return run(a, pack(high.T.contiguous()), none) + run(a, pack(low.T.contiguous()), none) / 1024\n"
    ),
}


def forbidden_answers(name: str) -> dict[str, str]:
    """The answers of a notebook whose product is one of `PRODUCTS`, and whose others are wrong."""
    return {**WRONG, "q1_1": f"aten = torch.ops.aten\n\ndef gemm_broadcast(a, b):\n{PRODUCTS[name]}"}


# name -> (answers, cells before the answer to Question 1.3)
HONEST: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "future annotations, generators, patterns with a guard": (
        {
            "q1_1": """from __future__ import annotations
import itertools

def rows_of(a: torch.Tensor, b: torch.Tensor):
    for row in a:
        yield (row[:, None] * b).sum(0)

def gemm_broadcast(a: torch.Tensor, b: torch.Tensor) -> NoSuchName:
    return torch.stack([*itertools.chain(rows_of(a, b))])
""",
            "q1_2": """def gemm_cost(m, n, k, dtype):
    match (m, n, k):
        case (int() as m, int() as n, int() as k) if (mnk := m * n * k) >= 0:
            return {'flops': 2 * mnk, 'bytes': sum(x * y for x, y in [(m, k), (k, n), (m, n)]) * dtype.itemsize}
        case _:
            raise TypeError(f"{m=} {'a' + f'{n!r:>{10}}'} {k=}")
""",
        },
        (),
    ),
    "numbers, dicts and lists of classes of their own": (
        {
            "q1_2": """class Cost(dict):
    __getattr__ = dict.get

class Count(float):
    unit = "FLOPs"

def gemm_cost(m, n, k, dtype):
    cost = Cost(flops=Count(2 * m * n * k), bytes=(m * k + k * n + m * n) * dtype.itemsize)
    assert cost.flops.unit == "FLOPs"
    return cost
""",
            "q1_3": """class Bytes(int):
    def __str__(self):
        return f"{int(self) / 2**20:.1f} MiB"

cache_bytes = Bytes(2 * 26 * 256 * 4096 * 2)
print(cache_bytes)
""",
            "q2_1": """class Times(list):
    def mean(self):
        return sum(self) / len(self)

def time_calls(fn, n_calls, synchronize):
    times = Times()
    for _ in range(n_calls):
        synchronize(); start = time.perf_counter(); fn(); synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times
""",
        },
        (),
    ),
    "members of enumerations": (
        {
            "q1_3": "import enum\n\nclass Cache(enum.IntEnum):\n    BYTES = 2 * 26 * 256 * 4096 * 2\n\n"
            "cache_bytes = Cache.BYTES\n"
        },
        (),
    ),
    "compiled and scripted": (
        {
            "q1_1": "@torch.compile\ndef gemm_broadcast(a, b):\n    return (a[:, :, None] * b[None]).sum(dim=1)\n",
            "bonus_2_5": "@torch.jit.script\ndef gemv(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:\n"
            "    return (a * x).sum(1)\n",
        },
        (),
    ),
    "a module as a function, steps as a list": (
        {
            "q1_1": "class Product(torch.nn.Module):\n    def forward(self, a, b):\n"
            "        return (a[:, :, None] * b[None]).sum(dim=1)\n\ngemm_broadcast = Product().eval()\n",
            "q2_3": """import functools, operator

def mlp(x, w1, w2):
    steps = lambda y: gemm_broadcast(y, w1), operator.methodcaller("relu"), lambda y: gemm_broadcast(y, w2)
    return functools.reduce(lambda y, step: step(y), steps, x)
""",
        },
        (),
    ),
    "overloads and dispatch by type": (
        {
            "q1_1": """from typing import overload

@overload
def gemm_broadcast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: ...
@overload
def gemm_broadcast(a: list, b: list) -> torch.Tensor: ...
def gemm_broadcast(a, b):
    return total(a[:, :, None] * b[None])

total = lambda products: products.sum(dim=1)
""",
            "q1_2": """from functools import singledispatch

@singledispatch
def width(of):
    raise TypeError(of)

@width.register
def _(of: torch.dtype) -> int:
    return of.itemsize

def gemm_cost(m, n, k, dtype):
    return dict(flops=2 * m * n * k, bytes=(m * k + k * n + m * n) * width(dtype))
""",
        },
        (),
    ),
    "the last result, and a cell that awaits": (
        {
            "q1_2": "%%time\ndef gemm_cost(m, n, k, dtype):\n"
            "    return {'flops': 2 * m * n * k, 'bytes': (m * k + k * n + m * n) * dtype.itemsize}\n",
            "q1_3": "import asyncio\n\nasync def count():\n    await asyncio.sleep(0)\n    return kept\n\n"
            "cache_bytes = await count()\n",
        },
        ("2 * 26 * 256 * 4096 * 2", "kept = _", "%config InlineBackend.figure_format = 'retina'"),
    ),
    "Windows' line ends, spaces that do not break": (
        {
            "q1_2": "def gemm_cost(m, n, k, dtype): # two\u00a0FLOPs each\r\n    '''a\u00a0b\u202fc\u200b'''\r\n"
            "    return {'flops': 2 * m * n * k, 'bytes': (m * k + k * n + m * n) * dtype.itemsize}\r\n",
            "q1_4": "%%writefile tiles.toml\r\n# Kacheln\u00a0für fp16\r\nBLOCK_M = 64\r\nBLOCK_N = 64\r\nBLOCK_K = 32\r\n",
        },
        (),
    ),
    "dataclasses with slots, pickles, the module's own name": (
        {
            "q1_2": """from __future__ import annotations
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import ClassVar, get_type_hints

@dataclass(slots=True, frozen=True)
class Cost:
    flops: int
    _: KW_ONLY
    bytes: int = field(default=0)
    unit: ClassVar[str] = "B"

get_type_hints(Cost)

def gemm_cost(m, n, k, dtype):
    return asdict(Cost(2 * m * n * k, bytes=(m * k + k * n + m * n) * dtype.itemsize))
""",
            "bonus_2_5": """import copy, pickle

class Row:
    def __init__(self, row): self.row = row
    def dot(self, x): return (self.row * x).sum()

def gemv(a, x):
    return torch.stack([pickle.loads(pickle.dumps(copy.deepcopy(Row(row)))).dot(x) for row in a])
""",
        },
        ("import __main__\n__main__.mine = 3\nassert mine == 3",),
    ),
    "a class that prepares its subclasses, torch's own RMSNorm": (
        {
            "q2_2": """class Base(torch.nn.Module):
    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)

class RMSNorm(Base):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), eps
    def forward(self, x, /):
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
"""
        },
        (
            "try:\n    raise ExceptionGroup('two', [ValueError(1), TypeError(2)])\n"
            "except* (ValueError, TypeError) as group:\n    print(group)",
            "%precision 4\n%whos\n!ls -la | head -3\nfiles = !ls",
        ),
    ),
}
