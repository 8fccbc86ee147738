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
    """A kernel failed in the interpreter; `case` is the index of the failing input, where it is known."""

    case: int | None = None  # also while an answer is graded, where an error travels as its class and its words


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
    try:
        ended = PROCESS.run({"source": source and textwrap.dedent(source), "name": name, "cases": cases}, timeout)
    except TimeoutError:
        raise InterpretedKernelError(
            f"{name} did not finish within {timeout:g} s in Triton's interpreter, which takes about 2 ms for each "
            "iteration of an inner loop: use smaller tensors or larger blocks, look for a loop that never ends, or "
            "pass a longer timeout="
        ) from None
    print(ended.printed, end="")
    if ended.answer is None:
        how = signal.Signals(-ended.status).name if ended.status < 0 else f"exit status {ended.status}"
        raise InterpretedKernelError(
            f"{name} ended Triton's interpreter with {how} before it returned. After a signal, check the pointer arithmetic, "
            f"and the masks at the edges. It said:\n{ended.complaints.strip()[-2000:]}"
        )
    if "error" in ended.answer:
        error = InterpretedKernelError(ended.answer["error"])
        error.case = ended.answer["case"]
        raise error
    return ended.answer["results"]


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


# The child ------------------------------------------------------------------------------------------------------


def _load_function(name: str, source: str | None):
    if source is not None:
        import triton
        import triton.language as tl

        path = Path(_STUDENT_FILE).absolute()  # Triton and tracebacks read the source from there
        path.write_text(source, encoding="utf-8")
        names = {"__name__": path.stem, "torch": torch, "triton": triton, "tl": tl}
        exec(compile(source, path, "exec"), names)
        if name not in names:
            raise NameError(f"the source defines no function {name!r}")
        return names[name]
    module, _, name = name.rpartition(".")
    places = [module] if module else ["utils.kernels.gemm", "utils.kernels.gelu"]
    for place in places:
        if callable(function := getattr(importlib.import_module(place), name, None)):
            return function
    raise NameError(f"there is no function {name!r} in {', '.join(places)}: name it, or give the path of one in utils")


def _in_short(error: BaseException) -> str:
    """Say what went wrong, and on which line of the kernel's source, without the frames of Triton and this module."""
    frames: list[traceback.FrameSummary] = []
    while True:
        frames += traceback.extract_tb(error.__traceback__)
        if type(error).__name__ != "InterpreterError" or error.__cause__ is None:
            break
        error = error.__cause__  # what the kernel raised says more than what Triton wraps it in
    text = "".join(traceback.format_exception_only(error)).strip()
    here = os.getcwd()
    own = [x for x in frames if x.filename.startswith((here, str(ROOT / "utils"))) and x.filename not in _MACHINERY]
    if own:
        text += f"\n  in {own[-1].name}, line {own[-1].lineno}: {own[-1].line}"
    return text.replace(here + os.sep, "")


def _answer(job: dict) -> dict:
    """Return the results of a job, or its error and the case that failed."""
    results: list[torch.Tensor] = []
    case: int | None = None  # nothing ran yet
    try:
        function = _load_function(job["name"], job["source"])
        for case, arguments in enumerate(job["cases"]):  # noqa: B007 (an error names its case)
            result = function(*arguments)
            if not isinstance(result, torch.Tensor):
                words = f"{type(result).__name__}, not a tensor: return the output tensor"
                raise TypeError(f"{job['name']} returned {words}")
            results.append(result.detach())
    except BaseException as error:
        return {"error": _in_short(error), "case": case}
    return {"results": results}


# No GPU, and one thread: the caller's threads and the interpreter's would share the cores.
PROCESS = WarmProcess(
    "utils.kernels.interpreter",
    lambda: importlib.import_module("utils.kernels.interpreter_repairs"),
    _answer,
    TRITON_INTERPRET="1",
    CUDA_VISIBLE_DEVICES="",
    OMP_NUM_THREADS="1",
)

if __name__ == "__main__":
    PROCESS.serve()
