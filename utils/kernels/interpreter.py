"""Triton kernels on a CPU: Triton's interpreter, in a process of its own for each call.

Triton decides when it is first imported whether kernels are compiled or interpreted, by TRITON_INTERPRET=1, and
a process cannot have both. Setting the variable here would break every later `torch.compile` of the caller.
So a kernel is interpreted in a child process: tensors go there and back in a file, and the caller does not change.

    run_interpreted("gemm_tiled", a, b)                    a function of utils.kernels
    run_interpreted_cases("gemm_tiled", [(a, b), ...])     several inputs in one process
    run_interpreted_cases((source, "gemm"), [(a, b)])      source text: @triton.jit functions and a launch wrapper

The interpreter takes about 2 ms for each iteration of a kernel's inner loop, whatever the tile: use large tiles and
small matrices. It shows what a kernel computes, never how fast: it has no races, no shared memory, no registers.

In the child, `interpreter_repairs` puts right what the interpreter computes wrongly, and refuses what it cannot
compute, and every access outside of the tensors.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import tempfile
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from utils.files import ROOT
from utils.kernels.warm_process import WarmProcess

_STUDENT_FILE = "student_kernel.py"
_MACHINERY = (__file__, str(Path(__file__).with_name("interpreter_repairs.py")))  # no lines of a kernel
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class InterpretedKernelError(RuntimeError):
    """A kernel failed in the interpreter; `case` is the index of the failing input."""

    def __init__(self, message: str, case: int | None = None):
        super().__init__(message)
        self.case = case


def run_interpreted(function_name: str, *args, timeout: float = 60) -> torch.Tensor:
    """Call a kernel function of `utils` through Triton's interpreter and return its result.

    Args:
        function_name: A name in `kernels.gemm` or `kernels.gelu` ("gemm_tiled"), or the whole path of a function in `utils`.
        *args: CPU tensors and plain values.
        timeout: Seconds, without the start of a process (two to seven, for the first call of a program).
    """
    return run_interpreted_cases(function_name, [args], timeout=timeout)[0]


def run_interpreted_cases(
    call: str | tuple[str, str], cases: Sequence[Sequence], *, timeout: float = 60
) -> list[torch.Tensor]:
    """Run one kernel on several inputs in a single interpreter process; return one result for each.

    The first case that fails raises InterpretedKernelError, and its `case` is the index.

    Args:
        call: A function name as in `run_interpreted`, or (source, entry): Python text that defines `@triton.jit` kernels, with
            `torch`, `triton` and `tl` imported, and the name of its function that returns the output tensor.
        cases: The positional arguments of each call.
        timeout: Seconds for all cases together, without the start of a process.
    """
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError(
            "Triton's interpreter needs Triton, which is not installed here. "
            "On Linux `make env` installs it with the course. There are no wheels for other systems."
        )
    source, name = (None, call) if isinstance(call, str) else call
    cases = [tuple(_for_child(value, f"argument {i}") for i, value in enumerate(case)) for case in cases]
    with tempfile.TemporaryDirectory(prefix="interpreted-kernel-") as folder:
        if source is not None:
            Path(folder, _STUDENT_FILE).write_text(textwrap.dedent(source), encoding="utf-8")
        torch.save({"call": name, "from_source": source is not None, "cases": cases}, Path(folder, "job.pt"))
        _run_child(folder, name, timeout)
        answer = torch.load(Path(folder, "answer.pt"), weights_only=True)
    if "error" in answer:
        raise InterpretedKernelError(answer["error"], answer["case"])
    return answer["results"]


def _for_child(value, name: str):
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise ValueError(
                f"the interpreter computes on the CPU, and {name} is on {value.device}: "
                "pass it with .cpu(), or call the kernel itself to run it on the GPU"
            )
        return value.detach()
    if isinstance(value, _PLAIN) or (isinstance(value, (tuple, list)) and all(isinstance(v, _PLAIN) for v in value)):
        return value
    raise TypeError(
        f"{name} is a {type(value).__name__}; the interpreter's process takes CPU tensors, numbers, "
        "strings, dtypes and tuples of them"
    )


def _run_child(folder: str, name: str, timeout: float) -> None:
    """Run the job of a folder in another process; raise InterpretedKernelError, with the reason, if there is no answer."""
    try:
        ended = PROCESS.run(folder, timeout)
    except TimeoutError:
        raise InterpretedKernelError(
            f"{name} did not finish within {timeout:g} s in Triton's interpreter, which takes about 2 ms for each "
            "iteration of an inner loop: use smaller tensors or larger blocks, look for a loop that never ends, or "
            "pass a longer timeout="
        ) from None
    if ended.printed:
        print(ended.printed, end="")
    if ended.status == 0 and Path(folder, "answer.pt").exists():
        return
    if ended.status < 0:
        signal_name = signal.Signals(-ended.status).name
        raise InterpretedKernelError(
            f"{name} ended Triton's interpreter with {signal_name}. A load or store outside its tensor does that: "
            "check the pointer arithmetic, and that every load and store at an edge has a mask."
        )
    raise InterpretedKernelError(
        f"{name} ended Triton's interpreter with exit status {ended.status} before it "
        f"returned. It said:\n{ended.complaints.strip()[-2000:]}"
    )


# The child ------------------------------------------------------------------------------------------------------


def _repair() -> None:
    importlib.import_module("utils.kernels.interpreter_repairs")


def _load_function(job: dict, folder: str):
    name = job["call"]
    if job["from_source"]:
        import triton
        import triton.language as tl

        path = Path(folder, _STUDENT_FILE)  # Triton and tracebacks read the source from there
        names = {"__name__": path.stem, "torch": torch, "triton": triton, "tl": tl}
        exec(compile(path.read_text("utf-8"), path, "exec"), names)
        if not callable(function := names.get(name)):
            functions = (key for key, value in names.items() if callable(value) and not isinstance(value, type))
            defined = ", ".join(key for key in functions if not key.startswith("_")) or "none"
            raise NameError(f"the source defines no function {name!r}; it defines: {defined}")
        return function
    module, _, name = name.rpartition(".")
    places = [module] if module else ["utils.kernels.gemm", "utils.kernels.gelu"]
    for place in places:
        if callable(function := getattr(importlib.import_module(place), name, None)):
            return function
    raise NameError(f"there is no function {name!r} in {', '.join(places)}: name it, or give the path of one in utils")


def _in_short(error: BaseException, folder: str) -> str:
    """Say what went wrong, and on which line of the kernel's source, without the frames of Triton and this module."""
    frames: list[traceback.FrameSummary] = []
    while True:
        frames += traceback.extract_tb(error.__traceback__)
        if type(error).__name__ != "InterpreterError" or error.__cause__ is None:
            break
        error = error.__cause__  # what the kernel raised says more than what Triton wraps it in
    text = "".join(traceback.format_exception_only(error)).strip()
    own = [x for x in frames if x.filename.startswith((folder, str(ROOT / "utils"))) and x.filename not in _MACHINERY]
    if own:
        text += f"\n  in {own[-1].name}, line {own[-1].lineno}: {own[-1].line}"
    return text.replace(folder + os.sep, "")


def _answer(folder: str) -> None:
    """Run the job in a folder, and write its results or its error there."""
    job = torch.load(Path(folder, "job.pt"), weights_only=True)
    results: list[torch.Tensor] = []
    said: dict = {"results": results}
    case: int | None = None  # nothing ran yet
    try:
        function = _load_function(job, folder)
        for case in range(len(job["cases"])):
            result = function(*job["cases"][case])
            if not isinstance(result, torch.Tensor):
                raise TypeError(
                    f"{job['call']} returned {type(result).__name__}, not a tensor: return the output tensor"
                )
            results.append(result.detach())
    except BaseException as error:
        said = {"error": _in_short(error, folder), "case": case}
    torch.save(said, Path(folder, "answer.pt"))


# No GPU, and one thread: the caller's threads and the interpreter's would share the cores.
PROCESS = WarmProcess(
    *("utils.kernels.interpreter", _repair, _answer),
    **{"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
)

if __name__ == "__main__":
    PROCESS.serve()
