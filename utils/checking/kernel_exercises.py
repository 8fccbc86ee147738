"""Try a kernel of a student's file in three ways: simulate it, compile it for sm_90a, and run it on a Hopper GPU.

Only `simulate_file`, `compile_file` and `run_file` run a student's text. They take and return plain data, so that the
grader can call them in another process, and judge their results in its own process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, astuple, dataclass
from typing import Any, cast

import torch

from utils.checking.kernel_files import HELPERS, expect_kernel_file
from utils.checking.mistakes import name_mistakes
from utils.checking.verdicts import AnswerNeeded, WrongAnswer, expect_close, raises_not_implemented
from utils.gluon_cpu.compiling import Compiled, CompilerRefusal, Request, compile_kernel, import_file, write_source
from utils.gluon_cpu.reports import SimulationError
from utils.gluon_cpu.simulation import Run, simulate
from utils.gluon_cpu.timeline import CostModel, Event
from utils.kernels.offline import HOPPER
from utils.machine import device

# Limits for endless loops: calls and loop turns of a program, and seconds of a launch. Above, a message ends the run.
LIMITS: dict[str, Any] = {"max_steps": 60_000, "max_seconds": 40.0}
COMPILE_SECONDS = 120.0
UNWRITTEN = -61440.0  # fills the outputs before a launch: 16 bits hold it exactly, and no right output has it
EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 0.0}
Seeds = tuple[int | None, ...]  # timings of the simulator: None is the cost model's own


@dataclass(frozen=True)
class Tile:
    """A tensor that the kernel sees through a TMA descriptor of this block shape."""

    tensor: torch.Tensor
    block: list[int]


@dataclass
class Launch:
    """A kernel, its grid and its arguments."""

    kernel: str  # the name of the @gluon.jit function
    grid: tuple[int, ...]
    args: dict[str, Any]  # by name; a `Tile` becomes a TMA descriptor
    outputs: tuple[str, ...]  # the names of the tensors that the kernel writes
    file: str = "kernels.py"  # the name of the student's file

    def run(self, module, device: str) -> dict[str, torch.Tensor]:
        """Launch the kernel of a module on a device, with copies that have the same strides; return the outputs on the CPU."""
        tensors, values = {}, []
        for name, a in self.args.items():
            x = a.tensor if isinstance(a, Tile) else a
            if isinstance(x, torch.Tensor):
                copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
                tensors[name] = copy.fill_(UNWRITTEN) if name in self.outputs else copy.copy_(x)
            values.append(descriptor(tensors[name], a.block) if isinstance(a, Tile) else tensors.get(name, a))
        getattr(module, self.kernel)[self.grid](*values)
        return {name: tensors[name].cpu() for name in self.outputs}


Try = tuple[Launch, dict[str, torch.Tensor]]  # a launch, and its right outputs


def descriptor(x: torch.Tensor, block: list[int]):
    """Return a TMA descriptor of a tensor, with Gluon's default layout for the block."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = getattr(gl, {torch.float32: "float32", torch.float16: "float16"}.get(x.dtype, "bfloat16"))
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


# ---- the student's file ------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _module(source: str, file: str):
    """Read and import a file once, as a check simulates it many times. An error is not cached."""
    # Look in the text: when a kernel is compiled, its `raise` never runs.
    if raises_not_implemented(source):
        raise AnswerNeeded(f"{file} is not answered yet: it still has `raise NotImplementedError()` in it.")
    expect_kernel_file(source, file)
    try:
        if device.interpreter_requested():
            text = "TRITON_INTERPRET is set, and Gluon kernels are not for Triton's interpreter"
            raise RuntimeError(f"{text}: unset it and restart the kernel.")
        return import_file(write_source(source, file))
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise WrongAnswer(f"{file} cannot be imported: {type(error).__name__}: {text}") from None


def load_kernels(source: str, launch: Launch):
    """Return the student's file as a module with a launch's kernel; `AnswerNeeded` if the kernel is not written yet."""
    module = _module(source, launch.file)
    if not hasattr(module, launch.kernel):
        raise WrongAnswer(f"{launch.file} defines no {launch.kernel}: keep the kernel's name and arguments.")
    parameters = [p.name for p in getattr(getattr(module, launch.kernel), "params", [])]
    if parameters != list(launch.args):
        expected, given = ", ".join(launch.args), ", ".join(parameters)
        raise WrongAnswer(f"{launch.kernel} should be a @gluon.jit function of ({expected}), and is one of ({given}).")
    return module


def warm_up() -> None:
    """Import libraries and read the course's helpers now, so that forks of this process need not do it again."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    from utils.gluon_cpu import interpreter, reuse, scheduler  # noqa: F401 (the first simulation would import them)

    with simulate():
        for module in map(importlib.import_module, HELPERS):
            for helper in list(vars(module).values()):
                if type(helper) is GluonJITFunction:
                    interpreter.rewrite(helper)  # for the simulator
                    _ = helper.cache_key  # for the compiler


# ---- three ways to try it ------------------------------------------------------------------------------------------


def simulate_launch(
    source: str,
    launch: Launch,
    *,
    seed: int | None = None,  # None runs by the cost model's times; a number stretches and shrinks them
    timeline: bool | int = False,  # how many programs to record
    model: CostModel | None = None,
) -> tuple[dict[str, torch.Tensor], Run]:
    """Run a launch in the simulator; return the outputs by name, and the Run. A bug that it finds is a WrongAnswer."""
    outputs, seen = simulate_file(source, launch, {"seed": seed, "timeline": timeline, "model": model})
    run = Run(seed, True, int(timeline), **LIMITS, model=model or CostModel())
    vars(run).update(seen, events=[Event(*fields) for fields in seen["events"]])
    return outputs, run


def simulate_file(source: str, launch: Launch, options: dict) -> tuple[dict[str, torch.Tensor], dict]:
    """Run a launch in the simulator with options of `simulate`; return the outputs and the fields of the Run."""
    module = load_kernels(source, launch)
    try:
        with simulate(**LIMITS, **options) as run:
            outputs = launch.run(module, "cpu")
    except SimulationError as error:
        raise WrongAnswer(f"the simulator stopped {launch.kernel}.\n  {error}") from None
    if run.notes:
        raise WrongAnswer(f"{launch.kernel} lacks a fence, and lab 3 asks for each.\n  {run.notes[0]}")
    seen = {name: getattr(run, name) for name in ("launches", "recorded", "ends")}
    return outputs, {**seen, "cycles": [*map(float, run.cycles)], "events": [astuple(event) for event in run.events]}


def simulate_failure(source: str, launch: Launch, seed: int | None = None) -> tuple[str, Run]:
    """Run a launch that may fail; return the report, or "" if it does not fail, and the timeline up to this point."""
    module = load_kernels(source, launch)
    with simulate(seed=seed, timeline=True, **LIMITS) as run, contextlib.suppress(SimulationError):
        launch.run(module, "cpu")
    found = [*run.reports, *run.notes]
    return str(found[0]) if found else "", run


def run_file(source: str, launch: Launch) -> dict[str, torch.Tensor]:
    """Run a launch on this machine's GPU, and return the outputs on the CPU. Simulate first: a deadlock hangs a GPU."""
    return launch.run(load_kernels(source, launch), "cuda")


def compile_for_hopper(source: str, launch: Launch, capability: int = HOPPER) -> Compiled:
    """Compile a launch's kernel for sm_90a or another capability; count instructions by kind, registers and spills."""
    return Compiled(**cast(dict, compile_file(source, launch, True, capability)))


def compile_file(source: str, launch: Launch, figures: bool, capability: int = HOPPER) -> dict | None:
    """Compile a launch's kernel; return the fields of `Compiled`, or None if the caller needs no figures."""
    kernel = getattr(load_kernels(source, launch), launch.kernel)
    constant = [p.name for p in kernel.params if p.is_constexpr]
    request = Request(
        source,
        launch.file,
        launch.kernel,
        signature={name: triton_type(a) for name, a in launch.args.items() if name not in constant},
        constants={name: launch.args[name] for name in constant},
        aligned=[name for name, a in launch.args.items() if isinstance(a, torch.Tensor)],
        num_warps=4,
        capability=capability,
    )
    compiler = f"the compiler for sm_{capability}a"
    try:
        compiled = compile_kernel(request, figures=figures, timeout=COMPILE_SECONDS)
    except CompilerRefusal as refusal:
        words = _complaint(str(refusal), source)
        raise WrongAnswer(f"{compiler} refuses {launch.file}:\n{words}") from None
    except TimeoutError:
        raise WrongAnswer(f"{launch.file}: {compiler} did not finish within {COMPILE_SECONDS:.0f} s.") from None
    return asdict(compiled) if compiled is not None else None


def _complaint(stderr: str, source: str) -> str:
    """Return the compiler's message for the innermost line of the student's file, without Python's traceback.

    Triton reports an error once for each call in the stack, innermost first: a line of a library, the line of the
    student's function that calls it, then the warp_specialize that calls this function.
    """
    student_lines, words = [line.strip() for line in source.splitlines()], ""
    for block in stderr.split("The above exception was the direct cause")[:-1] or [stderr]:
        match = re.search(r"^\S*CompilationError: at \d+:\d+:\n(.*?)\n *\^\n(.*)", block, re.M | re.S)
        message = (match[2] if match else block).strip().splitlines()
        words = words or (message[-1].strip() if message else "")
        line = match[1].splitlines()[-1].strip() if match else None
        if line and line in student_lines:
            where = f"line {student_lines.index(line) + 1}: " if student_lines.count(line) == 1 else ""
            return f"    {where}{line}" + (f"\n    {words}" if words else "")
    lines = stderr.strip().splitlines()
    first = max((i for i, line in enumerate(lines) if re.match(r"\S*(Error|Exception)\b", line)), default=-1)
    return "\n".join(f"    {line}" for line in lines[first:][:14])


def machine_code(source: str, launch: Launch, containing: str, compiled: Compiled) -> str:
    """Return PTX and SASS of the lines of a student's file that hold a text; "|" separates several texts."""
    shown = []
    for number, text in enumerate(source.splitlines(), 1):
        if not any(part in text.split("#")[0] for part in containing.split("|")):
            continue
        rows = [f"line {number}: {text.strip()}"]
        for kind, lines in compiled.lines.items():
            # Registers, addresses and predicates are left out, so that equal instructions can be counted.
            plain = [re.sub(r"^@!?[%\w]+ ", "", instruction) for instruction in lines.get(str(number), [])]
            names = r"(\.[a-zA-Z0-9_:.]+) .*" if kind == "PTX" else r"^([A-Z][A-Z0-9_.x]+).*"
            for short, count in Counter(re.sub(names, r"\1", instruction) for instruction in plain).items():
                rows.append(f"    {kind:5}{short}{f'  ({count} times)' if count > 1 else ''}")
        shown += ["\n".join(rows)] if len(rows) > 1 else []
    if not shown:
        raise WrongAnswer(f"no line of {launch.file} that contains {containing!r} became an instruction.")
    return "\n".join(shown)


def triton_type(value: object) -> str:
    """Return the type of a launch argument in Triton's spelling."""
    from triton.runtime.jit import mangle_type

    return mangle_type(descriptor(value.tensor, value.block) if isinstance(value, Tile) else value)


# ---- all three together --------------------------------------------------------------------------------------------


def overlap(run: Run) -> float:
    """Return the share of the partitions' arithmetic that runs during a wgmma of the same partition (model cycles)."""
    total = hidden = 0.0
    for e in (e for e in run.events if e.kind == "compute"):
        total += e.end - e.start
        products = (p for p in run.events if p.kind == "wgmma" and p.partition == e.partition)
        hidden += sum(max(0.0, min(e.end, p.end) - max(e.start, p.start)) for p in products)
    return hidden / total if total else 0.0


def run_tries(
    source: str,
    tries: Iterable[Try],
    *,
    hint: str = "",
    mistakes: Callable[[Launch, dict], dict[str, torch.Tensor]] | None = None,
    seeds: Seeds = (None,),
    compiles: bool = False,
    close: dict[str, Any] = EXACT,
) -> Iterator[tuple[Launch, Run]]:
    """Assert the outputs of a kernel; yield each launch with its first simulation, which records all programs.

    Args:
        source: the text of the student's file.
        tries: launches, and the right outputs by name.
        hint: advice for wrong values.
        mistakes: returns {mistake: the first output with this mistake} for a launch; called only for wrong values.
        seeds: a simulation for each seed; None is the cost model's own timing, and a number stretches and shrinks
            times, so that a wrong order shows.
        compiles: whether to compile the last launch for sm_90a, too, and to run it on a Hopper GPU if there is one.
        close: rtol and atol.
    """
    tries = list(tries)
    for launch, expected in tries:
        programs = math.prod(launch.grid)
        runs: list[Run] = []
        compare = functools.partial(_expect_outputs, launch, expected, hint, mistakes, close)
        for seed in seeds:
            outputs, run = simulate_launch(source, launch, seed=seed, timeline=0 if runs else programs)
            compare(outputs, "" if seed is None else f" (simulated with times of seed {seed})")
            runs.append(run)
        last = compiles and launch is tries[-1][0]
        if last and device.offline_compile_support():
            try:
                compile_file(source, launch, figures=False)
            except AssertionError as refused:
                raise AssertionError(f"the simulator accepts {launch.file}, but {refused}") from None
        if last and device.gluon_support():
            compare(run_file(source, launch), " on this machine's GPU (the simulator's result was right)")
        yield launch, runs[0]


def _expect_outputs(
    launch: Launch, expected: dict, hint: str, mistakes, close: dict, outputs: dict, where: str
) -> None:
    """Assert that the outputs are right; otherwise name the known mistake that gives them."""
    for name, right in expected.items():
        got, what = outputs[name], f"{name} after {launch.kernel}{where}"
        left = got == UNWRITTEN
        try:
            if left.any():
                first = ", ".join(map(str, left.nonzero()[0].tolist()))
                raise AssertionError(
                    f"{what}: {int(left.sum()):,} elements are never written, the first at ({first}). Does each program store "
                    "its own tile, at its own row and column, and does a mask keep too much away?"
                )
            expect_close(got, right.to(got.dtype), **close, what=what)
        except AssertionError as wrong:
            got = got.masked_fill(left, math.nan)
            words = name_mistakes(got, right.to(got.dtype), mistakes(launch, expected)) if mistakes else ""
            known = words and f"These are the values of this mistake: {words}"
            sizes = {name: getattr(value, "tensor", value) for name, value in launch.args.items()}
            shapes = (
                f"{n} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"{n} = {x}" for n, x in sizes.items()
            )
            advice = " ".join(filter(None, (known or hint, f"The launch: {', '.join(shapes)}.")))
            raise AssertionError(f"{wrong} {advice}") from None
