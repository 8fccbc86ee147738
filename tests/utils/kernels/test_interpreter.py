"""Kernels through Triton's interpreter in a process of its own: results, failures, and an untouched caller."""

import importlib.util
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch

from utils.kernels import interpreter, warm_process
from utils.kernels.interpreter import InterpretedKernelError, run_interpreted, run_interpreted_cases
from utils.kernels.warm_process import WarmProcess

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

DOUBLE = """
    @triton.jit
    def double_kernel(x, y, count, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(x + i, mask=i < count)
        tl.store(y + i, v * 2, mask=i < count)

    def double(x):
        y = torch.empty_like(x)
        double_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
        print("launched", x.numel())
        return y
"""

DOT = """
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(a, b, c, K, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        for k in range(0, K, BLOCK):
            x = tl.load(a + i[:, None] * K + k + i[None, :])
            y = tl.load(b + (k + i[:, None]) * BLOCK + i[None, :])
            total = tl.dot(x, y, total)
        tl.store(c + i[:, None] * BLOCK + i[None, :], total.to(c.dtype.element_ty))

    def dot(a, b):
        c = torch.empty(16, 16, dtype=a.dtype)
        kernel[(1,)](a, b, c, a.shape[1], BLOCK=16)
        return c
"""


def run_source(source, entry, *tensors, **options):
    """Call a function of source text through the interpreter."""
    return run_interpreted_cases((source, entry), [tensors], **options)[0]


def test_source_text_runs_on_several_inputs_and_its_prints_arrive(capfd):
    cases = [(torch.randn(count),) for count in (1, 64, 100)]
    before = dict(os.environ)
    results = run_interpreted_cases((DOUBLE, "double"), cases)
    assert all(torch.equal(y, 2 * x) for (x,), y in zip(cases, results, strict=True))
    assert capfd.readouterr().out == "launched 1\nlaunched 64\nlaunched 100\n"
    assert dict(os.environ) == before


def test_the_caller_can_still_compile():
    """Neither TRITON_INTERPRET nor Triton itself is left behind in the calling process, and no process behind it."""
    code = (
        "import os, sys, torch\nfrom utils.kernels.interpreter import run_interpreted\n"
        "run_interpreted('gelu_triton', torch.ones(3))\n"
        "print('triton' in sys.modules, os.environ.get('TRITON_INTERPRET'))\n"
        "from utils.kernels import interpreter\nprint(interpreter.PROCESS.server.pid)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    *left, server = done.stdout.split()
    assert left == ["False", "None"]
    until = time.monotonic() + 20
    while psutil.pid_exists(int(server)) and psutil.Process(int(server)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the server has outlived its program"
        time.sleep(0.05)


def test_bf16_is_computed_as_a_gpu_does():
    """tl.dot multiplies bf16 values, and numbers become the nearest of bf16: the bare interpreter does neither."""
    a, b = torch.randn(16, 48).bfloat16(), torch.randn(48, 16).bfloat16()
    count = torch.arange(-300, 300)
    halves = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.3e38, -1e-40, float("inf"), float("nan")])
    rounding = DOUBLE.replace("v * 2", "v.to(tl.bfloat16)").replace("torch.empty_like(x)", "x.bfloat16()")
    c, (rounded, whole) = run_source(DOT, "dot", a, b), run_interpreted_cases((rounding, "double"), [[halves], [count]])
    assert torch.equal(whole, count.bfloat16())
    exact = a.double() @ b.double()
    assert ((c.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()  # half a unit in the last place
    assert torch.equal(rounded[:-1], halves.bfloat16()[:-1]) and rounded[-1].isnan()


LEAVES_A_MARK = """
    def mark(x):
        seen, torch.mark = getattr(torch, "mark", 0), 1
        return torch.tensor([seen, os.getpid(), os.getppid(), int(os.environ.get("A_WORD", 0))])
"""


def _mark() -> list[int]:
    return run_source("import os\n" + textwrap.dedent(LEAVES_A_MARK), "mark", torch.ones(1)).tolist()


def test_calls_share_one_start_and_nothing_else(monkeypatch):
    first = _mark()
    monkeypatch.setenv("A_WORD", "7")
    second = _mark()
    assert first[0] == second[0] == 0 and first[1] != second[1] and first[2] == second[2]
    assert (first[3], second[3]) == (0, 7)  # the environment is that of the call
    assert first[2] == interpreter.PROCESS.server.pid


def test_a_killed_process_is_replaced_and_a_fork_gets_its_own(monkeypatch):
    first = _mark()
    interpreter.PROCESS.server.kill()
    interpreter.PROCESS.server.wait()
    second = _mark()
    assert second[2] != first[2]
    monkeypatch.setattr(interpreter.PROCESS, "owner", 0)  # as in a fork of the process that started it
    assert _mark()[2] != second[2]


def test_a_process_with_the_jobs_environment_forks_them_itself(monkeypatch):
    for name, value in interpreter.PROCESS.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(interpreter.PROCESS, "prepare", lambda: None)  # this process goes on compiling
    for threads in (1, 2):
        monkeypatch.setattr(warm_process, "has_one_thread", lambda: threads == 1)  # noqa: B023 (called in this turn)
        assert (_mark()[2] == os.getpid()) == (threads == 1)


# (text of DOUBLE, the text that replaces it, phrases of the error)
FAULTS = [
    ("v * 2", "w * 2", ["NameError: name 'w' is not defined\n  in double_kernel, line 6: tl.store(y + i, w * 2"]),
    ("BLOCK=64)", "BLOCK=64", ["line 10", "SyntaxError"]),
    ("return y", "", ["double returned NoneType, not a tensor", "return the output tensor"]),
    ("def double(", "def twice(", ["defines no function 'double'"]),
    ("tl.load(x + i, mask=i < count)", "tl.load(x + i)", ["line 5", "reads outside every tensor", "28 of 64", "mask"]),
    ("y + i, v * 2, mask=i < count", "y + i + 1, v * 2, mask=i < count", ["line 6", "writes outside", "1 of 64"]),
    ("v * 2", "v.to(tl.bfloat16) * 2", ["line 6", "no bf16 arithmetic", "x.to(tl.float32)"]),
    ("y = torch.empty_like(x)", "import os; os._exit(3)", ["exit status 3 before it returned"]),
    ("y = torch.empty_like(x)", "import os; os.kill(os.getpid(), 11)", ["SIGSEGV", "pointer arithmetic"]),
]


@pytest.mark.parametrize(("old", "new", "phrases"), FAULTS, ids=[fault[1] for fault in FAULTS])
def test_a_failure_comes_back_with_the_line_of_the_source(old, new, phrases):
    assert old in DOUBLE
    with pytest.raises(InterpretedKernelError) as failure:
        run_source(DOUBLE.replace(old, new), "double", torch.randn(100))
    message = str(failure.value)
    assert [phrase for phrase in phrases if phrase not in message] == [], message
    assert "/interpreter.py" not in message and "/tmp" not in message


def test_an_endless_kernel_is_stopped():
    begin = time.perf_counter()
    source = DOUBLE.replace("y = torch.empty_like(x)", "import time; time.sleep(300)")
    with pytest.raises(InterpretedKernelError, match=r"did not finish within 5 s.*2 ms"):
        run_source(source, "double", torch.randn(100), timeout=5)
    assert time.perf_counter() - begin < 15


def test_a_failure_names_its_case():
    with pytest.raises(InterpretedKernelError) as failure:
        run_interpreted_cases((DOUBLE, "double"), [(torch.randn(1),), (torch.randn(64),), ("text",)])
    assert InterpretedKernelError.__new__(InterpretedKernelError, "as the grader gets it").case is None
    assert failure.value.case == 2 and "must be Tensor, not str" in str(failure.value)


def test_a_function_of_the_package_runs_by_its_name_and_views_arrive_as_views():
    x = torch.randn(6, 8)[::2, 1:].T
    y = run_interpreted("utils.kernels.gelu.gelu_torch", x)
    assert torch.equal(y, torch.nn.functional.gelu(x, approximate="tanh"))
    assert y.stride() == torch.empty_like(x).stride()


def test_an_unknown_name_or_a_refusal_is_an_error():
    for name, message in (("gemm_tilled", "no function 'gemm_tilled' in utils"), ("gemm_tiled", "ValueError")):
        with pytest.raises(InterpretedKernelError, match=message):
            run_interpreted(name, torch.ones(2, 3), torch.ones(2, 3))


def test_what_cannot_travel_is_refused_before_a_process_starts(monkeypatch):
    with pytest.raises(ValueError, match=r"argument 1 is on meta: pass it with \.cpu\(\)"):
        run_interpreted("gemm_tiled", torch.ones(2, 2), torch.ones(2, 2, device="meta"))
    with pytest.raises(TypeError, match="argument 0 is a object"):
        run_interpreted("gemm_tiled", object())
    monkeypatch.setattr(interpreter.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="Triton's interpreter needs Triton, which is not installed here"):
        run_interpreted("gemm_tiled", torch.ones(2, 2), torch.ones(2, 2))


# ---- jobs in forks of this process -------------------------------------------------------------------------------


def test_a_forked_job_has_this_process_as_its_parent_and_none_of_its_files(tmp_path, monkeypatch):
    mine = os.open(tmp_path / "mine", os.O_RDWR | os.O_CREAT)

    def work(job):
        os.write(1, f"printed {job}".encode())
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(mine, b"reached")  # a descriptor of the parent's
        return [os.getppid(), os.getcwd()]

    monkeypatch.setattr(warm_process, "has_one_thread", lambda: True)
    ended = WarmProcess("none", lambda: None, work).run("it", timeout=30)
    os.close(mine)
    parent, folder = ended.answer
    assert parent == os.getpid() and not Path(folder).exists()
    assert (ended.printed, ended.status) == ("printed it", 0)
    assert (tmp_path / "mine").read_bytes() == b""
