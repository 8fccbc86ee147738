"""Attacks on the grader from inside of an answer: each is a wrong or forbidden answer, and a way to get credit for it.

`attacks_outside.py` has those on files, processes, the protocol and the notebook. In the sources, the test replaces
OUTSIDE by the folder of the class's files, PORT by a port on which it listens, and ROOT by the folder of the labs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from nbformat import NotebookNode

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
        edit: a change of the notebook, instead of `code` or with it.
        costs: further questions that build on this answer.
        alone: True for an attack that ends or breaks the process, and so shares no submission with others.
    """

    name: str
    question: str
    code: str = ""
    answer: str | None = None
    edit: Callable[[NotebookNode], None] | None = None
    costs: tuple[str, ...] = field(default=())
    alone: bool = False

    @property
    def source(self) -> str:
        return self.code + (WRONG[self.question] if self.answer is None else self.answer)

    @property
    def loses(self) -> set[str]:
        """Ids of the test cells without credit."""
        more = (MLP,) if self.question == PRODUCT else ()
        return {f"{question}_tests" for question in (self.question, *self.costs, *more)}

    @property
    def places(self) -> tuple[str, ...]:
        """Questions that it can attack: code before a wrong answer can be in the answer to any."""
        generic = self.question == COST and self.answer is None and self.edit is None
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


# ---- what a check relies on, replaced ------------------------------------------------------------------------------

PATCHES = [
    Attack(
        "AssertionError replaced by an exception that ends quietly",
        COST,
        """
import builtins
builtins.AssertionError = type("AssertionError", (SystemExit,), {})
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
        "torch.testing.assert_close does nothing",
        GEMV,
        """
import torch.testing
torch.testing.assert_close = torch.testing._comparison.assert_close = lambda *a, **k: None
""",
    ),
    Attack(
        "expect_close and expect_number do nothing",
        COST,
        """
import utils.checking
utils.checking.expect_close = utils.checking.expect_number = lambda *a, **k: None
expect_number.__code__ = (lambda got, expected, rel=0.01, unit="", what="", *, abs_tol=0.0: None).__code__
""",
    ),
    Attack(
        "a verdict that never raises",
        COST,
        """
from utils.checking import Verdict
Verdict.raise_if_wrong = lambda self: print(f"✓ Question {self.question}: passed.")
Verdict.passed = property(lambda self: True, lambda self, value: None)
""",
    ),
    Attack(
        "check replaced in the module and in the notebook",
        COST,
        """
import utils.checking
class Passed:
    passed = True
    def raise_if_wrong(self): pass
check = utils.checking.check = lambda *labels: lambda function: lambda *a, **k: Passed()
""",
    ),
    Attack(
        "utils.checking replaced in sys.modules",
        COST,
        """
import sys, types
fake = types.ModuleType("utils.checking")
fake.__getattr__ = lambda name: lambda *a, **k: None
sys.modules["utils.checking"] = fake
""",
    ),
    Attack(
        "the watch replaced by one that sees nothing",
        PRODUCT,
        """
import contextlib, utils.checking, utils.checking.watching
@contextlib.contextmanager
def blind():
    yield utils.checking.watching.OperationWatch()
utils.checking.watching.watch_operations = utils.checking.watch_operations = watch_operations = blind
""",
        FORBIDDEN,
    ),
    Attack(
        "random inputs that are all zero",
        GEMV,
        """
zeros = torch.zeros
def no_noise(*shape, generator=None, **options):
    return zeros(*shape, **options)
torch.randn = torch.rand = torch.normal = no_noise
torch.Tensor.normal_ = torch.Tensor.zero_
""",
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
        "torch.Tensor's comparison and subtraction replaced",
        GEMV,
        """
torch.Tensor.__eq__ = lambda self, other: torch.ones(self.shape, dtype=torch.bool)
torch.Tensor.__sub__ = torch.Tensor.sub = lambda self, other, **k: torch.zeros(self.shape)
torch.Tensor.any = lambda self, *a, **k: torch.tensor(False)
""",
    ),
    Attack(
        "a reference made as wrong as the answer",
        MODULE,
        """
torch.Tensor.pow = lambda self, exponent: torch.full_like(self, float("inf"))
torch.Tensor.sqrt = lambda self: torch.full_like(self, float("inf"))
""",
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
        "torch.cuda.Event replaced by one that says 40 ms",
        TIMER,
        """
class Event:
    def __init__(self, **options): pass
    def record(self, *stream): pass
    def synchronize(self): pass
    def elapsed_time(self, other): return 40.0
torch.cuda.Event = torch.Event = Event
torch.cuda.synchronize = lambda *device: None
""",
        "\ndef time_calls(fn, n_calls, synchronize):\n    return [[fn(), 40.0][1] for _ in range(n_calls)]\n",
    ),
    Attack(
        "isinstance, abs, all and set replaced",
        COST,
        """
import builtins
builtins.isinstance = lambda *a: True
builtins.abs = lambda x: 0.0
builtins.all = lambda x: True
builtins.max = lambda *a: float("inf")
""",
    ),
    Attack(
        "print, len, sum and getattr replaced",
        TIMER,
        """
import builtins
builtins.len = lambda x: 2
builtins.sum = lambda *a: 0.0
builtins.zip = lambda *a, **k: []
builtins.print = lambda *a, **k: None
true_getattr = getattr
builtins.getattr = lambda o, name, *d: True if name == "passed" else true_getattr(o, name, *d)
""",
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
        "torch shadowed in the notebook",
        GEMV,
        """
class Fake:
    def __getattr__(self, name): return lambda *a, **k: 0
true_torch, torch = torch, Fake()
""",
        "\ndef gemv(a, x):\n    return 0\n",
    ),
    Attack(
        "the locked helpers of the tests shadowed in the notebook",
        COST,
        """
expect_number = expect_close = forbid = lambda *a, **k: None
""",
    ),
    Attack(
        "errors hidden in IPython",
        COST,
        """
shell = get_ipython()
shell.showtraceback = shell._showtraceback = shell.showsyntaxerror = lambda *a, **k: None
""",
    ),
    Attack(
        "IPython's events cover every result",
        COST,
        """
def cover(result):
    result.error_in_exec = result.error_before_exec = None
    result.result = 3
get_ipython().events.register("post_run_cell", cover)
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
    Attack(
        "an AST transformer turns raises into pass",
        COST,
        """
import ast
class Quiet(ast.NodeTransformer):
    def visit_Expr(self, node): return ast.copy_location(ast.Pass(), node)
get_ipython().ast_transformers.append(Quiet())
""",
    ),
    Attack(
        "run_cell and the display hook replaced",
        COST,
        """
import sys
shell = get_ipython()
class Fine:
    success, error_in_exec, error_before_exec, result = True, None, None, 3
    def raise_error(self): pass
shell.run_cell = lambda *a, **k: Fine()
sys.displayhook = shell.displayhook = lambda value: None
sys.excepthook = lambda *a: None
""",
    ),
    Attack(
        "%%writefile overridden",
        FILE,
        edit=lambda notebook: _before(
            notebook,
            "q1_4",
            """\
from IPython.core.magic import register_cell_magic
@register_cell_magic
def writefile(line, cell):
    class Right(str):
        def read_text(self, *a): return "BLOCK_M = 64\\nBLOCK_N = 64\\nBLOCK_K = 16\\n"
    global Path
    Path = Right
""",
        ),
    ),
]


def _before(notebook: NotebookNode, answer: str, code: str) -> None:
    """A cell of the student's own, before an answer."""
    from nbformat.v4 import new_code_cell

    place = next(i for i, c in enumerate(notebook.cells) if c.metadata.get("nbgrader", {}).get("grade_id") == answer)
    notebook.cells.insert(place, new_code_cell(code))


# ---- expected values and the watch, looked for in memory -----------------------------------------------------------

SPIES = [
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
        "constants of all code in memory searched for the answer",
        NUMBER,
        """
import gc, types
class Late(float):
    def __float__(self):
        codes = [f.__code__ for f in gc.get_objects() if isinstance(f, types.FunctionType)]
        found = [c for code in codes if "check" in code.co_name for c in code.co_consts if type(c) is int and c > 10**6]
        return float(next(iter(found), 1))
cache_bytes = Late(float(Late(1)))
""",
        "",
    ),
    Attack(
        "the stack's source lines searched for the answer",
        NUMBER,
        """
import inspect, re
class Late(float):
    def __float__(self):
        text = "".join("".join(frame.code_context or ()) for frame in inspect.stack(40))
        return float(max(map(int, re.findall(r"\\d{7,}", text)), default=1))
cache_bytes = Late(1)
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
    Attack(
        "code that bears the name of a test",
        COST,
        """
exec(compile("import sys; frame = sys._getframe(1)", "<tests of q1_2_tests>", "exec"))
""",
    ),
    Attack(
        "a trace function that rewrites what the checks see",
        COST,
        """
import sys
def trace(frame, event, arg):
    if frame.f_code.co_name in ("expect_number", "check_cost"):
        frame.f_trace_lines = True
        frame.f_locals.update(expected=1, rel=1e9)
    return trace
sys.settrace(trace)
""",
    ),
    Attack(
        "a profile function that keeps what checks return",
        COST,
        """
import sys, threading
kept = []
def keep(frame, event, arg):
    if event == "return" and "check" in frame.f_code.co_name:
        kept.append(arg)
        object.__setattr__(arg, "passed", True) if hasattr(arg, "passed") else None
sys.setprofile(keep)
threading.setprofile(keep)
""",
    ),
    Attack(
        "sys.monitoring on every return",
        COST,
        """
import sys
if sys.version_info >= (3, 12):
    sys.monitoring.use_tool_id(3, "mine")
    sys.monitoring.set_events(3, sys.monitoring.events.PY_RETURN)
    sys.monitoring.register_callback(3, sys.monitoring.events.PY_RETURN, lambda code, at, value: None)
else:
    sys.setprofile(lambda frame, event, arg: None)
""",
    ),
]


# ---- results that lie ----------------------------------------------------------------------------------------------

LIARS = [
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
        "an object that says it is a tensor",
        GEMV,
        "",
        """
class Fake:
    __class__ = torch.Tensor
    layout, device, is_sparse = torch.strided, torch.device("cpu"), False
    def __init__(self, shape, dtype): self.shape, self.dtype = shape, dtype
    def __eq__(self, other): return True
    def __getattr__(self, name): return lambda *a, **k: torch.zeros(self.shape)
    def numel(self): return 0

def gemv(a, x):
    return Fake(torch.Size([a.shape[0]]), a.dtype)
""",
    ),
    Attack(
        "a float that equals everything",
        COST,
        "",
        """
class Any(float):
    def __eq__(self, other): return True
    def __le__(self, other): return True
    def __sub__(self, other): return Any(0)
    __rsub__ = __truediv__ = __sub__
    def __abs__(self): return Any(0)
    __hash__ = float.__hash__

def gemm_cost(m, n, k, dtype):
    return {"flops": Any(1), "bytes": Any(1)}
""",
    ),
    Attack(
        "a dict that shows one value and gives another",
        COST,
        "",
        """
import sys
class Spy(dict):
    def __getitem__(self, key):
        frame = sys._getframe(1).f_locals
        m, n, k = (frame.get(name, 1) for name in "mnk")
        return 2 * m * n * k if key == "flops" else (m * k + k * n + m * n) * frame["dtype"].itemsize

def gemm_cost(m, n, k, dtype):
    return Spy(flops=1, bytes=1)
""",
    ),
    Attack(
        "a list of times that look up what the work took",
        TIMER,
        "",
        """
import sys
class Time(float):
    def __float__(self): return self
    def __ge__(self, other): return True
    def __radd__(self, other): return 0.0
    def __add__(self, other): return 0.0
class Times(list):
    pass

def time_calls(fn, n_calls, synchronize):
    for _ in range(n_calls):
        fn()
    return Times(Time(1) for _ in range(n_calls))
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
        "inputs changed, and clone made an alias",
        PRODUCT,
        """
torch.Tensor.clone = lambda self, **k: self
""",
        """
def gemm_broadcast(a, b):
    a.data.zero_()
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
        "a generator in place of the times",
        TIMER,
        "",
        """
def time_calls(fn, n_calls, synchronize):
    return (1e9 for _ in range(n_calls))
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
    Attack(
        "right in the first call, wrong in the others",
        GEMV,
        """
calls = []
""",
        """
def gemv(a, x):
    calls.append(1)
    right = torch.stack([(row * x).sum() for row in a])
    return right if len(calls) == 1 else right + 1
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
        "equal, vmap's insides and the check's helper replaced",
        MASK,
        """
import utils.attention.masks as masks
masks.dense_mask = masks.evaluate = dense_mask = lambda mod, *a, **k: mod
torch.equal = lambda a, b: True
torch._C._functorch.get_unwrapped = torch._C._functorch._add_batch_dim = lambda t, *a: t
""",
    ),
    Attack(
        "a mask that looks for the expected one in the frames below",
        MASK,
        "",
        """
import sys
def documents_and(numbers, also):
    def mask_mod(b, h, q, k):
        frame = sys._getframe()
        while frame is not None:
            for name in ("expected", "same"):
                if name in frame.f_locals:
                    return frame.f_locals[name][q, k]
            frame = frame.f_back
        return k <= q
    return mask_mod
""",
    ),
    Attack(
        "a mask that reads the check out of the other mask",
        MASK,
        "",
        """
def documents_and(numbers, also):
    cells = {}
    for cell in getattr(also, "__closure__", None) or ():
        cells[type(cell.cell_contents).__name__] = cell.cell_contents
    return lambda b, h, q, k: cells["Tensor"][q, k] if "Tensor" in cells else k <= q
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
    Attack(
        "a mask of numbers in place of truth values",
        MASK,
        "",
        """
def documents_and(numbers, also):
    return lambda b, h, q, k: (numbers[q] == numbers[k]).long() * also(b, h, q, k)
""",
    ),
    Attack(
        "a mask that raises what it is asked to be",
        MASK,
        "",
        """
class Passed(AssertionError):
    passed = True

def documents_and(numbers, also):
    def mask_mod(b, h, q, k):
        raise Passed("passed")
    return mask_mod
""",
    ),
    Attack(
        "a mask with truth values that are none",
        MASK,
        "",
        """
class Mask(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return True if func in (torch.equal, torch.Tensor.equal) else super().__torch_function__(
            func, types, args, kwargs or {})

def documents_and(numbers, also):
    return lambda b, h, q, k: (k <= q).as_subclass(Mask)
""",
    ),
    Attack(
        "a tensor of a vmap that has ended",
        MASK,
        "",
        """
kept = []
def documents_and(numbers, also):
    def mask_mod(b, h, q, k):
        torch.vmap(torch.vmap(lambda x: kept.append(x) or x))(torch.ones(3, 3))
        return kept[0] > 0
    return mask_mod
""",
    ),
    Attack(
        "the other mask's inputs changed under it",
        MASK,
        "",
        """
def documents_and(numbers, also):
    def mask_mod(b, h, q, k):
        seen = also(b, h, q.zero_(), k.zero_())
        return seen & (q == k)
    return mask_mod
""",
    ),
]
