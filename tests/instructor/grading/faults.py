"""Submissions that break: programs that hang, eat the machine or kill themselves, and files that are no notebooks.

`FAULTS` stand in one answer; what they cost is that question alone. `BROKEN_FILES` cannot be read as a notebook of the
lab, and get a result all the same: no points, and a sentence. `ODD_FILES` look broken and are not.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image

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
    Fault("an endless loop when called", GEMV, _when_called(GEMV, "while True:\n    a = a + 1"), _LATE, wrong=False),
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
    Fault("all memory, at once", COST, "\nhoard = bytearray(1 << 40)\n", _DEAD, "MemoryError"),
    Fault(
        "all memory, piece by piece",
        GEMV,
        _when_called(GEMV, "while True:\n    hoard.append(torch.ones(1 << 22))", "hoard = []"),
        _LATE + _DEAD,
        walls=("memory",),
        wrong=False,
    ),
    Fault("a segmentation fault", COST, "\nimport ctypes\nctypes.string_at(0)\n", ("killed",)),
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
        "10 GB of output when called, past Python",
        COST,
        _when_called(COST, "for _ in range(10000):\n    os.write(1, b'x' * 1000000)", "import os"),
        _LATE + _DEAD,
        walls=("output",),
        wrong=False,
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
        statuses=("failed", "error"),
    ),
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
    Fault("a cell of 5 MB", COST, "\nnumbers = [" + "1, " * 1600000 + "]\n"),
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
        "an error with its own traceback",
        COST,
        _when_called(COST, "return {'flops': 2 * m * n * k, 'bytes': sizes[dtype]}"),
        ("failed", "error"),
        "NameError",
        wrong=False,
    ),
]


# ---- files ---------------------------------------------------------------------------------------------------------


def _changed(text: str, change: Callable[[dict], object]) -> str:
    """A notebook's text after a change of its JSON, which may also return other JSON."""
    notebook = json.loads(text)
    made = change(notebook)
    return json.dumps(made if isinstance(made, dict) else notebook)


Image.frombytes("RGB", (1000, 1000), os.urandom(3_000_000)).save(_MADE := io.BytesIO(), "PNG")
_PNG = base64.b64encode(_MADE.getvalue()).decode()


def _each(only_code: bool = False, **fields: object) -> Callable[[dict], None]:
    """Give each cell, or each cell of code, these fields."""

    def change(notebook: dict) -> None:
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code" or not only_code:
                cell.update(fields)

    return change


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


def _of_another_lab(text: str) -> str:
    """Leave out answers that are right in any cell: a file of the right name, a class that no stub replaces."""
    return text.replace("tiles.toml", "layers.toml").replace("RMSNorm", "LayerNorm")


BROKEN_FILES: dict[str, Callable[[str], str | bytes]] = {
    "empty": lambda text: "",
    "zero bytes throughout": lambda text: bytes(4096),
    "cut in the middle": lambda text: text[: len(text) // 2],
    "no JSON": lambda text: "# my notebook\nprint(1)\n",
    "no cells": lambda text: _changed(text, lambda n: n.update(cells=[])),
    "another lab's notebook": lambda text: _of_another_lab(text).replace('"grade_id": "', '"grade_id": "x_'),
    "not UTF-8": lambda text: text.encode("utf-16"),
    "deep JSON": lambda text: "[" * 200000,
}
ODD_FILES: dict[str, Callable[[str], str | bytes]] = {
    "a format of the future": lambda text: _changed(text, lambda n: n.update(nbformat=99)),
    "Windows line ends": lambda text: text.replace("\n", "\r\n").encode(),
    "a byte order mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "sources as lists of lines": lambda text: _changed(
        text, lambda n: [c.update(source="".join(c["source"]).splitlines(keepends=True)) for c in n["cells"]]
    ),
    "a huge prose cell": lambda text: _changed(
        text,
        lambda n: n["cells"].append({"cell_type": "markdown", "id": "h", "metadata": {}, "source": "word " * 500000}),
    ),
}

# Odd in ways of which nbformat, its converters or the JSON of a frame know nothing: changes of the notebook's JSON.
ODD_JSON: dict[str, Callable[[dict], dict | None]] = {
    "half characters in the outputs": _each(only_code=True, outputs=_HALF),
    "ids that are lists": _each(id=[1]),
    "pictures of 40 MB": _pictures,
    "widgets, deep metadata, and metadata of other types": _metadata,
    "cells of 8 MB": _huge,
}
ODD_FILES |= {name: lambda text, change=change: _changed(text, change) for name, change in ODD_JSON.items()}
BROKEN_FILES["a number of 5,000 digits"] = lambda text: text.replace(
    '"nbformat_minor"', f'"largest": {"9" * 5_000}, "nbformat_minor"', 1
)
