"""Submissions that break: programs that hang, eat the machine or kill themselves, and files that are no notebooks.

`FAULTS` stand in one answer; what they cost is that question alone. `BROKEN_FILES` cannot be read as a notebook of the
lab, and get a result all the same: no points, and a sentence. `ODD_FILES` look broken and are not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from tests.instructor.grading.attacks import COST, FILE, GEMV, MODULE, NUMBER, PRODUCT, TIMER, WRONG


@dataclass(frozen=True)
class Fault:
    """Code that breaks, and where.

    Args:
        statuses: what the engine may call it
        says: words of the student's own error that the feedback shows, if the engine can have seen one
        walls: walls without which it is not run: it would harm the machine of the test
    """

    name: str
    question: str
    code: str
    statuses: tuple[str, ...] = ("failed", "error", "timeout", "killed")
    says: str = ""
    walls: tuple[str, ...] = ()
    wrong: bool = True  # the wrong answer follows the code
    alone: bool = False

    @property
    def source(self) -> str:
        return self.code + (WRONG[self.question] if self.wrong else "")

    @property
    def places(self) -> tuple[str, ...]:
        """Questions in whose answer it can be."""
        return (COST, GEMV, TIMER, NUMBER, MODULE) if self.wrong and self.question == COST else (self.question,)

    @property
    def loses(self) -> set[str]:
        return {f"{self.question}_tests"} | ({"q2_3_tests"} if self.question == PRODUCT else set())


def _when_called(question: str, body: str, head: str = "") -> str:
    """An answer of the question's signature with this body."""
    signature = {
        PRODUCT: "def gemm_broadcast(a, b):",
        COST: "def gemm_cost(m, n, k, dtype):",
        GEMV: "def gemv(a, x):",
        TIMER: "def time_calls(fn, n_calls, synchronize):",
    }[question]
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return f"{head}\n{signature}\n{lines}\n"


_LATE = ("timeout", "killed")
_DEAD = ("killed", "error", "failed")

FAULTS = [
    Fault("an endless loop in the cell", COST, "\nwhile True:\n    pass\n", _LATE),
    Fault("an endless loop when called", GEMV, _when_called(GEMV, "while True:\n    a = a + 1"), _LATE, wrong=False),
    Fault("sleeps for an hour", COST, _when_called(COST, "time.sleep(3600)"), _LATE, wrong=False),
    Fault(
        "a hang in C that no signal ends",
        COST,
        """
import ctypes, signal
signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
ctypes.PyDLL(None).pause()
""",
        _LATE,
    ),
    Fault(
        "a lock taken twice",
        GEMV,
        _when_called(GEMV, "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()"),
        _LATE,
        wrong=False,
    ),
    Fault(
        "time-outs caught",
        COST,
        """
while True:
    try:
        time.sleep(1)
    except BaseException:
        pass
""",
        _LATE,
    ),
    Fault("waits for the keyboard", COST, "\nsize = input('size? ')\n", ("failed", "error", "timeout"), "input"),
    Fault(
        "a child process that sleeps",
        COST,
        "\nimport subprocess\nsubprocess.run(['sleep', '3600'])\n",
        ("timeout", "killed", "error", "failed"),
    ),
    Fault(
        "an endless generator made a list",
        COST,
        """
import itertools
everything = list(itertools.count())
""",
        _LATE + _DEAD,
        walls=("memory",),
    ),
    Fault("all memory, at once", COST, "\nhoard = bytearray(1 << 40)\n", _DEAD, "MemoryError"),
    Fault(
        "all memory, piece by piece",
        GEMV,
        _when_called(GEMV, "while True:\n    hoard.append(torch.ones(1 << 22))", "hoard = []"),
        _LATE + _DEAD,
        walls=("memory",),
        wrong=False,
    ),
    Fault(
        "all memory, kept",
        COST,
        """
hoard = []
while True:
    hoard.append(torch.ones(1 << 20))
""",
        _LATE + _DEAD,
        walls=("memory",),
    ),
    Fault(
        "a tensor of a terabyte",
        GEMV,
        _when_called(GEMV, "return torch.zeros(1 << 38)[: a.shape[0]]"),
        _DEAD,
        "memory",
        wrong=False,
    ),
    Fault("the kernel kills itself", COST, "\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", ("killed",)),
    Fault(
        "the kernel kills itself when called",
        GEMV,
        _when_called(GEMV, "os.kill(os.getpid(), signal.SIGKILL)", "import os, signal"),
        ("killed",),
        wrong=False,
    ),
    Fault("a segmentation fault", COST, "\nimport ctypes\nctypes.string_at(0)\n", ("killed",)),
    Fault("abort()", MODULE, "\nimport os\nos.abort()\n", ("killed",)),
    Fault("stops itself", COST, "\nimport os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n", _LATE),
    Fault("endless recursion", GEMV, _when_called(GEMV, "return gemv(a, x)"), _DEAD, "RecursionError", wrong=False),
    Fault(
        "recursion without a limit",
        COST,
        """
import sys
sys.setrecursionlimit(10**9)
def down(n): return [down(n + 1)]
down(0)
""",
        _LATE + _DEAD,
        walls=("memory",),
    ),
    Fault(
        "10 GB of output",
        COST,
        """
line = "x" * 1000000
for _ in range(10000):
    print(line)
""",
        _LATE + _DEAD,
        walls=("output",),
    ),
    Fault(
        "10 GB of output when called, past Python",
        COST,
        _when_called(COST, "for _ in range(10000):\n    os.write(1, b'x' * 1000000)", "import os"),
        _LATE + _DEAD,
        walls=("output",),
        wrong=False,
    ),
    Fault(
        "10 GB to stderr",
        COST,
        """
import os
for _ in range(10000):
    os.write(2, b"x" * 1000000)
""",
        _LATE + _DEAD,
        walls=("output",),
    ),
    Fault(
        "the disk filled",
        COST,
        """
with open("big", "wb") as file:
    while True:
        file.write(bytes(1 << 24))
""",
        _LATE + _DEAD,
        walls=("limits",),
    ),
    Fault(
        "many files",
        COST,
        """
for number in range(200000):
    open(f"file{number}", "w").close()
raise ValueError("done")
""",
        _LATE + _DEAD,
        walls=("files",),
    ),
    Fault(
        "a fork bomb",
        COST,
        """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        _LATE + _DEAD,
        walls=("processes", "limits"),
    ),
    Fault(
        "threads without end",
        COST,
        """
import threading
while True:
    threading.Thread(target=time.sleep, args=(3600,)).start()
""",
        _LATE + _DEAD,
        walls=("processes", "limits"),
    ),
    Fault(
        "scratch deleted",
        COST,
        """
import os, shutil
shutil.rmtree(os.getcwd(), ignore_errors=True)
for name in os.listdir("/tmp"):
    shutil.rmtree(os.path.join("/tmp", name), ignore_errors=True)
""",
        walls=("files",),
        statuses=("failed", "error", "flagged"),
    ),  # a checkout under /tmp has `instructor` in the way
    Fault(
        "a huge value shown",
        NUMBER,
        """
cache_bytes = 1
torch.set_printoptions(threshold=10**9)
torch.zeros(3000, 3000)
""",
        _LATE + _DEAD,
        wrong=False,
    ),
    Fault(
        "a value that cannot be shown",
        NUMBER,
        """
class Shy:
    def __repr__(self): raise ValueError("not for your eyes")
cache_bytes = Shy()
cache_bytes
""",
        wrong=False,
    ),
    Fault("a cell of 5 MB", COST, "\nnumbers = [" + "1, " * 1600000 + "]\n"),
    Fault(
        "a syntax error",
        COST,
        "\ndef gemm_cost(m, n, k, dtype)\n    return {}\n",
        ("failed", "error"),
        "SyntaxError",
        wrong=False,
    ),
    Fault("a null byte", COST, "\nx = '\x00'\n", ("failed", "error")),
    Fault("brackets a thousand deep", COST, "\nx = " + "(" * 5000 + ")" * 5000 + "\n"),
    Fault("a file answer that is missing", FILE, "\nprint('later')\n", ("failed", "error", "missing"), wrong=False),
    Fault(
        "a file answer of 1 GB",
        FILE,
        """
with open("tiles.toml", "wb") as file:
    file.truncate(1 << 30)
""",
        wrong=False,
    ),
    Fault(
        "a file answer in another encoding",
        FILE,
        """
with open("tiles.toml", "wb") as file:
    file.write("BLOCK_M = 64 # Größe".encode("utf-16"))
""",
        wrong=False,
    ),
    Fault(
        "an error with its own traceback",
        COST,
        _when_called(COST, "return {'flops': 2 * m * n * k, 'bytes': sizes[dtype]}"),
        ("failed", "error"),
        "NameError",
        wrong=False,
    ),
]


# ---- files ---------------------------------------------------------------------------------------------------------


def _as_format_3(text: str) -> str:
    """As IPython 2 wrote it: worksheets, `input` in place of `source`."""
    import nbformat

    return nbformat.writes(nbformat.convert(nbformat.reads(text, as_version=4), 3), version=3)


def _changed(text: str, change: Callable[[dict], None]) -> str:
    notebook = json.loads(text)
    change(notebook)
    return json.dumps(notebook)


def _of_another_lab(text: str) -> str:
    """Leave out answers that are right in any cell: a file of the right name, a class that no stub replaces."""
    return text.replace("tiles.toml", "layers.toml").replace("RMSNorm", "LayerNorm")


BROKEN_FILES: dict[str, Callable[[str], str | bytes]] = {
    "empty": lambda text: "",
    "no bytes": lambda text: b"",
    "zero bytes throughout": lambda text: bytes(4096),
    "cut in the middle": lambda text: text[: len(text) // 2],
    "no JSON": lambda text: "# my notebook\nprint(1)\n",
    "a list": lambda text: "[1, 2, 3]",
    "null": lambda text: "null",
    "no cells": lambda text: _changed(text, lambda n: n.update(cells=[])),
    "cells of another type": lambda text: _changed(text, lambda n: n.update(cells="all of them")),
    "cells that are numbers": lambda text: _changed(text, lambda n: n.update(cells=[1, 2])),
    "another lab's notebook": lambda text: _of_another_lab(text).replace('"grade_id": "', '"grade_id": "x_'),
    "not UTF-8": lambda text: text.encode("utf-16"),
    "deep JSON": lambda text: "[" * 200000,
    "a PNG": lambda text: b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20,
    "metadata of other types": lambda text: _changed(
        _of_another_lab(text), lambda n: [cell.update(metadata={"nbgrader": 7}) for cell in n["cells"]]
    ),
}
ODD_FILES: dict[str, Callable[[str], str | bytes]] = {
    "a format of the future": lambda text: _changed(text, lambda n: n.update(nbformat=99)),
    "outputs of a cell of text": lambda text: _changed(
        text, lambda n: [c.update(outputs=[1]) for c in n["cells"] if c["cell_type"] == "markdown"]
    ),
    "Windows line ends": lambda text: text.replace("\n", "\r\n").encode(),
    "a byte order mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "sources as lists of lines": lambda text: _changed(
        text, lambda n: [c.update(source="".join(c["source"]).splitlines(keepends=True)) for c in n["cells"]]
    ),
    "format 3": _as_format_3,
    "no indentation": lambda text: json.dumps(json.loads(text), separators=(",", ":")),
    "escaped Unicode": lambda text: json.dumps(json.loads(text), ensure_ascii=True),
    "a huge prose cell": lambda text: _changed(
        text,
        lambda n: n["cells"].append({"cell_type": "markdown", "id": "h", "metadata": {}, "source": "word " * 500000}),
    ),
}
STUDENTS = ("søren kierkegård", "李小龍", "o'neil; rm -rf ~", "../other", "a" * 200, "name\nwith line", "")
