"""Honest students: habits of writing that change no value, right answers in many hands, and what stands around answers.

A habit is a change of text. It is made to the model answer of any question of any lab, so that one row of `HABITS` stands
for some seventy answers: NumPy's square roots, assertions, prints, code for debugging that never runs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output, new_raw_cell

# ---- habits of writing ------------------------------------------------------------------------------------------------


class _NumPy(ast.NodeTransformer):
    """Take constants and roots of numbers from NumPy."""

    NAMES: ClassVar = {
        "sqrt": "np.sqrt",
        "inf": "np.inf",
        "pi": "np.pi",
        "log2": "np.log2",
        "exp": "np.exp",
        "log": "np.log",
    }

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "math" and node.attr in self.NAMES:
            return ast.parse(self.NAMES[node.attr], mode="eval").body
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if ast.unparse(node) in ("float('inf')", "float('-inf')"):
            return ast.parse("-np.inf" if "-" in ast.unparse(node) else "np.inf", mode="eval").body
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        node = self.generic_visit(node)
        for place in node.slice.elts if isinstance(node.slice, ast.Tuple) else ():
            if isinstance(place, ast.Constant) and place.value is None:
                node.slice.elts[node.slice.elts.index(place)] = ast.parse("np.newaxis", mode="eval").body
        return node


@dataclass(frozen=True)
class Habit:
    """A way of writing that changes no value.

    Args:
        above: lines before the answer.
        inside: a line at the head of every function; {name} is the function, {first} its first parameter.
        tensors: a line at the head of every function, for each parameter {x} that its signature calls a tensor.
        below: lines after the answer; {name} is its last function.
        change: a change of the answer's syntax tree.
    """

    above: str = ""
    inside: str = ""
    tensors: str = ""
    below: str = ""
    change: type[ast.NodeTransformer] | None = None

    def __call__(self, answer: str) -> str:
        """Return an answer as a student with this habit writes it; a file of kernels stays as it is."""
        if answer.startswith("%%"):
            return answer
        tree = ast.parse(answer)
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.decorator_list]
        for function in functions:
            self._write_inside(function)
        if self.change:
            tree = ast.fix_missing_locations(self.change().visit(tree))
        below = self.below.format(name=functions[-1].name) if functions else ""
        return "\n\n".join(filter(None, (self.above, ast.unparse(tree), below))) + "\n"

    def _write_inside(self, function: ast.FunctionDef) -> None:
        parameters = function.args.args
        lines = [self.inside.format(name=function.name, first=parameters[0].arg)] if parameters else []
        lines += [
            self.tensors.format(x=parameter.arg)
            for parameter in parameters
            if parameter.annotation and ast.unparse(parameter.annotation) == "torch.Tensor"
        ]
        place = 1 if ast.get_docstring(function) else 0
        function.body[place:place] = ast.parse("\n".join(lines)).body


HABITS = {
    "NumPy's roots, infinity and new axes": Habit("import numpy as np", change=_NumPy),
    "assertions on shapes": Habit(tensors="assert isinstance({x}, torch.Tensor) and {x}.ndim >= 0, {x}"),
    "errors for bad arguments": Habit(
        tensors="if not torch.is_tensor({x}):\n    raise TypeError(f'{x} is a {{type({x}).__name__}}')"
    ),
    "waiting for the device": Habit(tensors="if {x}.is_cuda:\n    torch.cuda.synchronize({x}.device)"),
    "emptying the GPU's cache": Habit(inside="if torch.cuda.is_available():\n    torch.cuda.empty_cache()"),
    "limits that no input meets": Habit(tensors="if {x}.numel() > 2**40:\n    raise MemoryError({x}.shape)"),
    "a comparison under DEBUG": Habit(
        "DEBUG = False", tensors="if DEBUG:\n    print(torch.allclose({x} @ {x}.T, torch.matmul({x}, {x}.T)))"
    ),
    "prints": Habit(inside="print('{name}', type({first}).__name__)"),
    "logging": Habit(
        "import logging\n\nlog = logging.getLogger('mine')", inside="log.debug('called with %r', {first})"
    ),
    "a clock": Habit("import time", inside="began = time.perf_counter()"),
    "a decorator that counts": Habit(
        "import functools",
        below="""
def counted(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        inner.calls += 1
        return function(*args, **kwargs)

    inner.calls = 0
    return inner


{name} = counted({name})
""",
    ),
    "a class around it": Habit(below="class Mine:\n    answer = staticmethod({name})\n\n\n{name} = Mine.answer"),
    "a data class": Habit(
        "from dataclasses import dataclass\n\n\n@dataclass(frozen=True)\nclass Sizes:\n    rows: int\n    columns: int = 1",
        inside="assert Sizes(2).columns == 1",
    ),
    "imports once more": Habit(
        "import math\n\nimport torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
        "from torch.nn.attention import SDPBackend, sdpa_kernel"
    ),
    "a plot below": Habit(
        below="import matplotlib.pyplot as plt\n\nfigure, axes = plt.subplots()\naxes.plot([1, 2], label='{name}')\nplt.close()"
    ),
    "notes in another language": Habit("größe = 3  # Größe der Kachel\n'''第一步：写出循环。'''"),
    "a look at itself below": Habit(below="import inspect\n\nprint(inspect.signature({name}), {name}.__doc__)"),
    "type hints and an alias": Habit("from typing import Any, Final\n\nTensor = torch.Tensor\nLIMIT: Final[int] = 7"),
}


# ---- right answers to the small lab --------------------------------------------------------------------------------

ANSWERS: dict[str, dict[str, str]] = {
    "q1_1": {
        "torch.compile": """
@torch.compile
def gemm_broadcast(a, b):
    return (a[:, :, None] * b[None]).sum(dim=1)
""",
        "a module as a function, below a line of the shell": """
!ls
class Product(torch.nn.Module):
    def forward(self, a, b):
        return (a[:, :, None] * b[None]).sum(dim=1)

gemm_broadcast = Product().eval()
""",
    },
    "q1_2": {
        "a dict and a number of classes of their own": """
class Cost(dict):
    __getattr__ = dict.get

class Count(float):
    unit = "FLOPs"

def gemm_cost(m, n, k, dtype):
    cost = Cost(flops=Count(2 * m * n * k), bytes=(m * k + k * n + m * n) * dtype.itemsize)
    assert cost.flops.unit == "FLOPs"
    return cost
""",
        "numpy integers": """
import numpy as np

def gemm_cost(m, n, k, dtype):
    m, n, k = np.array([m, n, k], dtype=np.int64)
    return {"flops": 2 * m * n * k, "bytes": (m * k + k * n + m * n) * dtype.itemsize}
""",
    },
    "q1_3": {
        "an integer of a class of its own": """
class Bytes(int):
    def __str__(self):
        return f"{int(self) / 2**20:.1f} MiB"

cache_bytes = Bytes(2 * 26 * 256 * 4096 * 2)
print(cache_bytes)
""",
        "a cell that awaits": """
import asyncio

async def count():
    await asyncio.sleep(0)
    return 2 * 26 * 256 * 4096 * 2

cache_bytes = await count()
""",
    },
    "q1_4": {
        "Windows' line ends and spaces that do not break": "%%writefile tiles.toml\r\n# Kacheln\xa0f\xfcr fp16\r\nBLOCK_M = 64\r\nBLOCK_N = 64\r\nBLOCK_K = 32\r\n",
        "written by Python": """
from pathlib import Path
lines = [f"BLOCK_{name} = {size}" for name, size in (("M", 64), ("N", 64), ("K", 64))]
Path("tiles.toml").write_text("\\n".join(lines))
""",
    },
    "q2_1": {
        "a list of a class of its own": """
class Times(list):
    def mean(self):
        return sum(self) / len(self)

def time_calls(fn, n_calls, synchronize):
    times = Times()
    for _ in range(n_calls):
        synchronize(); start = time.perf_counter(); fn(); synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times
""",
        "a context manager": """
from contextlib import contextmanager

@contextmanager
def stopwatch(into, synchronize):
    synchronize()
    start = time.perf_counter()
    yield
    synchronize()
    into.append((time.perf_counter() - start) * 1e3)

def time_calls(fn, n_calls, synchronize):
    times = []
    for _ in range(n_calls):
        with stopwatch(times, synchronize):
            fn()
    return times
""",
    },
    "q2_2": {
        "torch's own RMSNorm, in a class that prepares its subclasses": """
class Base(torch.nn.Module):
    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)

class RMSNorm(Base):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), eps
    def forward(self, x, /):
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
""",
        "a subclass of torch.nn.RMSNorm": """
class RMSNorm(torch.nn.RMSNorm):
    def __init__(self, width, eps=1e-6):
        super().__init__(width, eps=eps)
""",
    },
    "q2_3": {
        "steps as a list": """
import functools, operator

def mlp(x, w1, w2):
    steps = lambda y: gemm_broadcast(y, w1), operator.methodcaller("relu"), lambda y: gemm_broadcast(y, w2)
    return functools.reduce(lambda y, step: step(y), steps, x)
"""
    },
    "bonus_2_5": {
        "torch.jit.script": """
@torch.jit.script
def gemv(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (a * x).sum(1)
""",
        "pickles and copies": """
import copy, pickle

class Row:
    def __init__(self, row): self.row = row
    def dot(self, x): return (self.row * x).sum()

def gemv(a, x):
    return torch.stack([pickle.loads(pickle.dumps(copy.deepcopy(Row(row)))).dot(x) for row in a])
""",
    },
    "q3_1": {
        "a method of an object": """
class Documents:
    def __init__(self, numbers, also):
        self.numbers, self.also = numbers, also

    def __call__(self, b, h, q, k):
        return (self.numbers[q] == self.numbers[k]) & self.also(b, h, q, k)

documents_and = Documents
""",
        "a vmap over documents": """
def documents_and(numbers, also):
    one_each = torch.arange(3)
    def mask_mod(b, h, q, k):
        inside = torch.vmap(lambda n: (numbers[q] == n) & (numbers[k] == n))(one_each)
        return inside.any() & also(b, h, q, k)
    return mask_mod
""",
    },
}


# ---- what stands around answers ------------------------------------------------------------------------------------


def _code(grade_id: str, *texts: str, after: bool = False) -> Callable[[NotebookNode], None]:
    """Cells of the student's own before a cell of the lab, or after it."""

    def edit(notebook: NotebookNode) -> None:
        ids = [c.metadata.get("nbgrader", {}).get("grade_id") for c in notebook.cells]
        place = ids.index(grade_id) + after
        notebook.cells[place:place] = [new_code_cell(text) for text in texts]

    return edit


def _outputs(notebook: NotebookNode) -> None:
    """What JupyterLab leaves: counts in the order of use, outputs, timings, a collapsed cell."""
    for number, cell in enumerate(c for c in notebook.cells if c.cell_type == "code"):
        cell.execution_count = (number * 7) % 31 + 1
        cell.outputs = [new_output("stream", name="stdout", text="✓ passed.\n")]
        cell.metadata["execution"] = {"iopub.execute_input": "2026-01-01T00:00:00.000000Z"}
        cell.metadata["collapsed"] = number % 2 == 0
        cell.metadata["jupyter"] = {"outputs_hidden": False}
    notebook.metadata["toc-autonumbering"] = True
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}


def _without_ids(notebook: NotebookNode) -> None:
    """As an editor writes that knows no cell ids (nbformat 4.4)."""
    notebook.nbformat_minor = 4
    for cell in notebook.cells:
        cell.pop("id", None)


def _line_ends(notebook: NotebookNode) -> None:
    for cell in notebook.cells:
        cell.source = cell.source.replace("\n", "\r\n")


def _prose(notebook: NotebookNode) -> None:
    notes = new_markdown_cell("My notes: ✓ ∑ 中文 🙂, and `assert`, `import instructor`, `os._exit`.")
    notebook.cells[3:3] = [notes, new_raw_cell("raw")]
    notebook.cells.append(new_markdown_cell("# The end\n\n<b>bold</b>"))


NOTEBOOKS: dict[str, Callable[[NotebookNode], None]] = {
    "outputs and odd counts kept": _outputs,
    "no cell ids": _without_ids,
    "carriage returns in the cells": _line_ends,
    "prose and raw cells": _prose,
    "a scratch cell with an error": _code("q1_2", "1 / 0"),
    "a plot": _code("q1_2", "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 4, 9])\nplt.show()"),
    "names of builtins used as variables": _code("setup", "sum = 0\nmax = min = 3\ninput = 'x'\nid = 7", after=True),
    "the checks' names used as variables": _code(
        "q1_1_tests", "x = seed = generator = a = b = got = expected = shape = 5", after=True
    ),
    "a file of its own": _code(
        "q1_2",
        (
            "import json\nfrom pathlib import Path\nPath('mine').mkdir(exist_ok=True)\n"
            "Path('mine/notes.json').write_text(json.dumps({'a': 1}))\n"
            "print(json.loads(Path('mine/notes.json').read_text()))"
        ),
    ),
    "the checks called by the student": _code(
        "q1_1_tests", "check_gemm(gemm_broadcast, (3, 3, 3), seed=5)", after=True
    ),
    "a dispatch mode of its own": _code(
        "q1_2",
        (
            "from utils.checking import OperationWatch\nwith OperationWatch() as mine:\n"
            "    gemm_broadcast(torch.ones(3, 3), torch.ones(3, 3))\nprint(mine.operations)"
        ),
    ),
    "an own module, and reloaded": _code(
        "q1_2",
        "%%writefile tools_of_mine.py\ndef twice(x):\n    return 2 * x\n",
        "import importlib\nimport tools_of_mine\nimportlib.reload(tools_of_mine)\nassert tools_of_mine.twice(2) == 4",
    ),
    "magics of cells": _code(
        "q1_2", "%%capture shown\nprint('hidden')", "print(shown.stdout)", "%%time\nsum(range(1000))"
    ),
    "the last result, magics, and the module's own name": _code(
        "q1_2",
        "6 * 7",
        "kept = _\nassert kept == 42\nimport __main__\n__main__.mine = 3\nassert mine == 3",
        "%config InlineBackend.figure_format = 'retina'\n%precision 4\n%whos\nfiles = !ls",
    ),
}
