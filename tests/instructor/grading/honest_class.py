"""A hundred honest notebooks: variants of right answers and habits of their authors, drawn together by a seed."""

import random
from collections.abc import Callable

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from instructor.course import answered_notebook
from tests.instructor.grading.honest_variants import ANSWERS, NOTEBOOKS

# Cells that students put between the questions. None changes an answer.
HABITS = {
    "an own module, and reloaded": (
        "%%writefile tools_of_mine.py\ndef twice(x):\n    return 2 * x\n",
        "import importlib\nimport tools_of_mine\nimportlib.reload(tools_of_mine)\nassert tools_of_mine.twice(2) == 4",
    ),
    "an own package": (
        "from pathlib import Path\nPath('mine').mkdir(exist_ok=True)\nPath('mine/__init__.py').write_text('size = 7')",
        "from mine import size\nassert size == 7",
    ),
    "float64 in one cell": (
        "torch.set_default_dtype(torch.float64)\nprint(torch.ones(2).dtype)\ntorch.set_default_dtype(torch.float32)",
    ),
    "a dataclass": (
        "from dataclasses import dataclass, field\n@dataclass(order=True)\nclass Row:\n    ms: float\n"
        "    name: str = field(compare=False)\nsorted([Row(2.0, 'b'), Row(1.0, 'a')])",
    ),
    "an enum and a match": (
        "import enum\nclass Kind(enum.Enum):\n    READ = 1\n    WRITE = 2\n"
        "match Kind(1):\n    case Kind.READ:\n        print('read')\n    case _:\n        print('other')",
    ),
    "threads": (
        "import threading\nseen = []\nworkers = [threading.Thread(target=seen.append, args=(i,)) for i in range(4)]\n"
        "for w in workers: w.start()\nfor w in workers: w.join()\nassert sorted(seen) == [0, 1, 2, 3]",
    ),
    "a pool of threads": (
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(2) as pool:\n"
        "    print(list(pool.map(lambda n: n * n, range(5))))",
    ),
    "caches": (
        "import functools\n@functools.lru_cache(maxsize=None)\ndef fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
        "print(fib(60), fib.cache_info())",
    ),
    "type hints and a protocol": (
        "from typing import Generic, Protocol, TypeVar\nT = TypeVar('T')\nclass Sized(Protocol):\n"
        "    def __len__(self) -> int: ...\nclass Box(Generic[T]):\n    def __init__(self, item: T) -> None:\n"
        "        self.item = item\nprint(Box[int](3).item)",
    ),
    "tasks that run together": (
        "import asyncio\nasync def later(n):\n    await asyncio.sleep(0.01)\n    return n\n"
        "print(await asyncio.gather(*(later(i) for i in range(3))))",
    ),
    "another style of plots": (
        "import matplotlib.pyplot as plt\nplt.style.use('ggplot')\nplt.rcParams['figure.figsize'] = (4, 3)\n"
        "fig, axes = plt.subplots(1, 2)\naxes[0].bar(['a', 'b'], [1, 2])\naxes[1].semilogx([1, 10], [3, 4])\n"
        "fig.savefig('mine.png')\nplt.close('all')",
    ),
    "magics of cells": ("%%capture shown\nprint('hidden')", "print(shown.stdout)", "%%time\nsum(range(1000))"),
    "magics of lines": ("%env MINE=1\n%pwd\n%precision 3\n%lsmagic\n%xmode Plain",),
    "autoreload": ("%load_ext autoreload\n%autoreload 2",),
    "an environment variable and the path": (
        "import os, sys\nos.environ.setdefault('PYTHONHASHSEED', '0')\nsys.path.insert(0, os.getcwd())\n"
        "print(os.cpu_count(), sys.version_info[:2], sys.argv[:0])",
    ),
    "warnings as a filter": (
        "import warnings\nwith warnings.catch_warnings(record=True) as caught:\n    warnings.simplefilter('always')\n"
        "    warnings.warn('old', DeprecationWarning)\nassert len(caught) == 1\nwarnings.filterwarnings('ignore')",
    ),
    "all seeds": (
        "import random\nimport numpy as np\nrandom.seed(0)\nnp.random.seed(0)\ntorch.manual_seed(0)\n"
        "torch.use_deterministic_algorithms(False)\ngenerator = torch.Generator().manual_seed(3)\n"
        "print(torch.randn(2, generator=generator), np.random.default_rng(0).random())",
    ),
    "a context manager": (
        "import contextlib, io, time\n@contextlib.contextmanager\ndef clock(name):\n    began = time.perf_counter()\n"
        "    try:\n        yield\n    finally:\n        print(name, time.perf_counter() - began)\n"
        "with clock('sum'), contextlib.redirect_stdout(io.StringIO()):\n    print(sum(range(10)))",
    ),
    "a decorator that counts": (
        "import functools\ndef counted(f):\n    @functools.wraps(f)\n    def inner(*args, **kwargs):\n"
        "        inner.calls += 1\n        return f(*args, **kwargs)\n    inner.calls = 0\n    return inner\n"
        "probe = counted(len)\nprobe([1])\nassert probe.calls == 1",
    ),
    "print of its own": ("import functools\nsay = functools.partial(print, flush=True, end='.\\n')\nsay('ready')",),
    "IPython's display": (
        "from IPython.display import HTML, Markdown, clear_output, display\ndisplay(Markdown('**bold**'))\n"
        "clear_output()\ndisplay(HTML('<table><tr><td>1</td></tr></table>'))",
    ),
    "files that do not stay": (
        "import tempfile\nfrom pathlib import Path\nwith tempfile.TemporaryDirectory() as folder:\n"
        "    torch.save({'w': torch.ones(2)}, Path(folder) / 'w.pt')\n"
        "    print(torch.load(Path(folder) / 'w.pt', weights_only=True))",
    ),
    "pickle, json, csv": (
        "import csv, io, json, pickle\nassert pickle.loads(pickle.dumps({'a': (1, 2)})) == {'a': (1, 2)}\n"
        "print(json.dumps({'ms': 1.5}), list(csv.reader(io.StringIO('a,b\\n1,2'))))",
    ),
    "a table of pandas": (
        "import pandas as pd\ntable = pd.DataFrame({'m': [1, 2, 2], 'ms': [3.0, 4.0, 5.0]})\n"
        "print(table.groupby('m').ms.agg(['mean', 'max']))\ntable.describe()",
    ),
    "another program": (
        "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'print(6 * 7)'], "
        "capture_output=True, text=True).stdout)",
    ),
    "autograd and hooks": (
        "w = torch.ones(3, requires_grad=True)\nhandle = w.register_hook(lambda g: g * 2)\n(w * w).sum().backward()\n"
        "handle.remove()\nprint(w.grad)",
    ),
    "a small training": (
        "net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))\n"
        "steps = torch.optim.AdamW(net.parameters(), lr=1e-2)\nfor _ in range(3):\n"
        "    steps.zero_grad()\n    net(torch.randn(16, 4)).square().mean().backward()\n    steps.step()",
    ),
    "threads of torch": ("torch.set_num_threads(1)\nprint(torch.get_num_threads(), torch.__config__.show()[:20])",),
    "inference mode": ("with torch.inference_mode():\n    print((torch.ones(2, 2) @ torch.ones(2, 2)).sum())",),
    "asserts and tests of its own": (
        "import unittest\nclass Mine(unittest.TestCase):\n    def test_sum(self):\n        self.assertEqual(sum([1, 2]), 3)\n"
        "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(Mine))",
    ),
    "an abstract class and slots": (
        "import abc\nclass Shape(abc.ABC):\n    __slots__ = ()\n    @abc.abstractmethod\n    def area(self): ...\n"
        "class Square(Shape):\n    __slots__ = ('side',)\n    def __init__(self, side): self.side = side\n"
        "    @property\n    def area(self): return self.side ** 2\nprint(Square(3).area)",
    ),
    "an exception with a traceback": (
        "import traceback\ntry:\n    {}['missing']\nexcept KeyError:\n    traceback.print_exc()",
    ),
    "names in another alphabet": ("größe = 3\n長さ = 4\nprint(f'{größe * 長さ=}')",),
    "exact numbers": (
        "from decimal import Decimal\nfrom fractions import Fraction\nprint(Decimal('0.1') * 3, Fraction(1, 3))",
    ),
}
PLACES = ("q1_1", "q1_2", "q1_3", "q2_1", "q2_2", "q2_3", "q3_1")


def honest_notebook(lab, seed: int) -> tuple[str, list[str]]:
    """Draw a notebook: a variant of every answer, four habits between the questions, and up to two changes around them.

    Returns:
        The notebook's text, and the names of what was drawn.
    """
    draw = random.Random(seed)
    variants = {cell: draw.choice(sorted(texts.items())) for cell, texts in ANSWERS.items()}
    notebook = nbformat.reads(
        answered_notebook(lab, {cell: text for cell, (_, text) in variants.items()}), as_version=4
    )
    names = sorted(HABITS)
    # The first of the habits goes through the list, so that a hundred notebooks hold each of them.
    habits = list(dict.fromkeys([names[seed % len(names)], *draw.sample(names, 4)]))[:4]
    for name in habits:
        _insert(notebook, draw.choice(PLACES), HABITS[name])
    around: list[tuple[str, Callable[[NotebookNode], None]]] = draw.sample(sorted(NOTEBOOKS.items()), 2)
    # A notebook that sets `sum = 0` and later calls `sum` would be wrong in Jupyter, too.
    around = [(name, change) for name, change in around if name != "names of builtins used as variables"]
    for _, change in around:
        change(notebook)
    drawn = [name for name, _ in variants.values()] + habits + [name for name, _ in around]
    return nbformat.writes(notebook, version=4), drawn


def _insert(notebook: NotebookNode, grade_id: str, texts: tuple[str, ...]) -> None:
    ids = [cell.metadata.get("nbgrader", {}).get("grade_id") for cell in notebook.cells]
    place = ids.index(grade_id)
    notebook.cells[place:place] = [new_code_cell(text) for text in texts]
