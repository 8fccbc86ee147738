"""Functions of tensors as targets: any function of a module, the GEMM ladder, and GELU.

    labs bench run mymodule:fused --against mymodule:plain --input "x=randn(n, 4096, bf16)" --sweep n=1k:16k:x2

A function gets its tensors in the order of the inputs, and constants by name. The reference is the baseline in float64.
Without a baseline it is the function itself in float64, and the error shows its rounding. If the baseline cannot compute
in float64, its plain result is the reference, and a note says so.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from utils.bench.errors import BenchError, WrongRun, check_choice
from utils.bench.knobs import Knob
from utils.bench.targets.base import Built, Case, Target, interpreted
from utils.bench.verify import rounding_bounds
from utils.bench.workload import DTYPES
from utils.kernels import gelu, gemm
from utils.machine.device import Support, compute_capability
from utils.model.costs import Cost
from utils.validation import first_line, whole_number

FILLS: dict[str, Callable] = {"randn": torch.randn, "rand": torch.rand, "zeros": torch.zeros, "ones": torch.ones}
HOW = "write it as 'a=randn(4096, 4096, bf16)' (or rand, zeros, ones) or as a constant, 'dim=-1'"
SLACK = 2.0  # an optimized side may have this many times the error of the baseline


@dataclass(frozen=True)
class Argument:
    """One argument of a function: a tensor to be filled, or a constant."""

    name: str
    fill: str = ""  # a key of FILLS; "" for a constant
    shape: tuple[int, ...] = ()
    dtype: str = ""
    constant: Any = None

    def __str__(self) -> str:
        return f"{self.name} {'x'.join(map(str, self.shape))}" if self.fill else f"{self.name}={self.constant!r}"


def read_argument(text: str, values: Mapping[str, Any]) -> Argument:
    """Read "a=randn(4096, n, bf16)" or "dim=-1". `values` maps a name, such as n, to its size."""
    try:
        (line,) = ast.parse(text.strip()).body
        assert isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
        name, value = line.targets[0].id, line.value
        if not isinstance(value, ast.Call):
            return Argument(name, constant=ast.literal_eval(value))
        assert isinstance(value.func, ast.Name) and not value.keywords
        words = [ast.unparse(word) for word in value.args]
    except (SyntaxError, ValueError, AssertionError):
        raise BenchError(f"--input is {text!r}; {HOW}.") from None
    words = [str(values.get(word, word)) for word in words]
    dtype = words.pop() if words and words[-1] in DTYPES else "fp32"
    if other := [word for word in words if not word.isdigit()]:
        raise BenchError(
            f"--input is {text!r}, and {other[0]} is no size: give a whole number, a dtype of {', '.join(DTYPES)} at the "
            f"end, or values with --sweep {other[0]}=1k:16k:x2."
        )
    shape = tuple(whole_number(f"a size of --input {text!r}", int(word), 1, BenchError) for word in words)
    return Argument(name, check_choice(f"the filling of {name}", value.func.id, FILLS), shape, dtype)


@dataclass(frozen=True)
class CallWorkload:
    """The arguments of the functions, and the cost of one call."""

    arguments: tuple[Argument, ...]
    functions: tuple[Callable, ...] = ()  # the baseline's first

    @functools.cached_property
    def cost(self) -> Cost:
        """FLOPs and bytes of the first function, as far as `count_cost` can count them. They are counted once."""
        costs = (count_cost(fn, self) for fn in self.functions)
        return next((cost for cost in costs if cost.flops or cost.bytes), Cost(0, 0))

    @property
    def dtype(self) -> str:
        """The dtype of the first tensor; fp32 for a function without tensors."""
        return next((one.dtype for one in self.arguments if one.fill), "fp32")

    @property
    def label(self) -> str:
        """A short text such as "a 4096x4096 b 4096x4096 bf16"."""
        return " ".join([*map(str, self.arguments), self.dtype])

    def to_dict(self) -> dict:
        """Return the fields that two comparable results share."""
        return {"inputs": "; ".join(f"{one} {one.fill} {one.dtype}".strip() for one in self.arguments)}

    def bytes_needed(self) -> int:
        """Estimate a run's bytes: inputs, results and their copies in float64."""
        numbers = sum(math.prod(one.shape) for one in self.arguments if one.fill)
        return int(self.cost.bytes + numbers * (DTYPES[self.dtype].itemsize + 3 * 8))

    def fill(self, device: torch.device | str, seed: int) -> tuple[torch.Tensor, ...]:
        """Draw the tensors from the seed. They are the same on every machine."""
        generator = torch.Generator().manual_seed(seed)
        drawn = []
        for one in self.arguments:
            if one.fill:
                random = {"generator": generator} if one.fill.startswith("rand") else {}
                drawn.append(FILLS[one.fill](one.shape, **random).to(device, DTYPES[one.dtype]))
        return tuple(drawn)

    @property
    def constants(self) -> dict[str, Any]:
        """The constants: name -> value."""
        return {one.name: one.constant for one in self.arguments if not one.fill}


def count_cost(fn: Callable, workload: CallWorkload) -> Cost:
    """Count FLOPs of matrix products, and bytes read and written, on tensors without memory; 0 if it fails."""
    tensors = [torch.empty(one.shape, dtype=DTYPES[one.dtype], device="meta") for one in workload.arguments if one.fill]
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            results = fn(*tensors, **workload.constants)
    except (Exception, SystemExit):  # a kernel in Triton has no tensors without memory
        return Cost(0, 0)
    written = [one for one in _tuple(results) if isinstance(one, torch.Tensor)]
    return Cost(int(counter.get_total_flops()), sum(tensor.nbytes for tensor in (*tensors, *written)))


def check_order(name: str, fn: Callable, given: list[str]) -> None:
    """Raise BenchError if the tensors have the names of the function's parameters, but in a different order."""
    with contextlib.suppress(ValueError):  # a function in C may hide its parameters
        takes = list(inspect.signature(fn).parameters)
        if set(given) <= set(takes) and given != takes[: len(given)]:
            raise BenchError(f"{name} takes {', '.join(takes)}; give the tensors of --input in that order, first.")


def _tuple(results: Any) -> tuple:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _double(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


class FunctionTarget(Target):
    """Two functions on the same tensors."""

    arguments: tuple[str, ...] = ()  # as in --input: "a=randn(m, k, dtype)" uses the knobs m, k and dtype

    def function(self, case: Case, side: str) -> tuple[str, Callable]:
        """Return the name and the function of a side; ("", ...) if there is no such side."""
        raise NotImplementedError

    def cases(self, settings, device):
        """Return the case of these settings. Its workload has the functions, to count their cost."""
        values = {key: setting.value for key, setting in settings.items()}
        arguments = tuple(read_argument(text, values) for text in values.get("inputs", self.arguments))
        case = Case(self.name, CallWorkload(arguments), settings, device)
        found = [one for one in (self.function(case, side) for side in self.sides) if one[0]]
        for name, fn in found:
            check_order(name, fn, [one.name for one in arguments if one.fill])
        return [replace(case, workload=CallWorkload(arguments, tuple(fn for _, fn in found)))]

    def inputs(self, case):
        """Return the tensors of the call."""
        seed = case.settings.get("seed")
        return case.workload.fill(case.device, seed.value if seed else 42)

    def expected(self, case, *inputs):
        """Return a reference for each tensor of the result, by name. `compared_with` describes the references."""
        results, said = self._reference(case, inputs)
        tensors = [one.double() for one in _tuple(results) if isinstance(one, torch.Tensor)]
        self.compared_with = said if tensors or said.startswith("not") else "not compared: no tensor is returned"
        return {f"output {i} ({said})": tensor for i, tensor in enumerate(tensors)}

    def _reference(self, case: Case, inputs: tuple) -> tuple[Any, str]:
        """Return the reference results of both sides, and a description in words."""
        alone = not self.function(case, "baseline")[0]
        name, fn = self.function(case, "optimized" if alone else "baseline")
        if alone and not inputs:
            return None, "not compared: it has no --against and no --input"
        constants = case.workload.constants
        try:
            return fn(*map(_double, inputs), **constants), f"compared with {name} in float64"
        except Exception as error:
            why = f"{name} does not compute in float64 ({first_line(error)})"
        return (None, f"not compared: {why}") if alone else (fn(*inputs, **constants), f"compared with {name}: {why}")

    def bounds(self, case, side, precision, earlier):
        """Return the bounds: none for the function that made the reference, and SLACK times its error for the other side."""
        if side == "baseline" or not self.function(case, "baseline")[0]:
            return 1.0, 1.0
        whole, row = rounding_bounds(precision)
        found = earlier.get("baseline", {"whole": 0.0, "worst_row": 0.0})
        return max(whole, SLACK * found["whole"]), max(row, SLACK * found["worst_row"])

    def build(self, case, side, *inputs):
        """Bind the side's function to the tensors."""
        name, fn = self.function(case, side)
        bound = functools.partial(fn, *inputs, **case.workload.constants)
        return Built(bound, name, getattr(fn, "__module__", "") or "")

    def prove(self, case, side, built, launched):
        """Return the function's name. There is no proof; the results list the launches."""
        return built.provider

    def facts(self, case, side, built):
        """Return the description of the reference."""
        return {} if side == "baseline" else {"notes": [f"{self.compared_with}."]}


class UserFunction(FunctionTarget):
    """A function `module:function`, and the baseline of --against, if given."""

    knobs = ()

    def __init__(self, name: str):
        self.chapter, _, self.workload = name.partition(":")
        self.summary = f"the function {name}"
        self.sides: Mapping[str, str] = {"baseline": "--against", "optimized": name}

    def function(self, case, side):
        """Return the name and the function of a side; ("", ...) without --against."""
        name = self.name if side == "optimized" else case.value("against")
        return (name.rpartition(":")[2], find_function(name)) if name else ("", find_function)


def find_function(name: str) -> Callable:
    """Import `module:function`, also from the current folder; raise BenchError if it is not there."""
    module, _, path = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as error:  # the import runs the user's module, which may raise anything
        raise BenchError(f"there is no function {name!r}: {type(error).__name__}: {first_line(error)}.") from None
    if not callable(found):
        raise BenchError(f"{name} is a {type(found).__name__} and no function.")
    return found


class Versions(FunctionTarget):
    """A version of an operator of `utils.kernels` against torch's operator. --kernel chooses the version."""

    versions: Mapping[str, tuple[Callable, str]]  # function, name pattern of its kernel; the baseline is first

    def function(self, case, side):
        """Return the name and the function of a side."""
        name = next(iter(self.versions)) if side == "baseline" else case.value("kernel")
        return name, self.versions[name][0]

    def support(self, case, side):
        """Whether this machine runs this side of the case, and why not."""
        name, answer = case.value("kernel"), Support(True)
        if side == "optimized" and name != "gelu_torch":
            answer = interpreted(name, case.device)
            if answer and "warp" in name and (here := compute_capability() or (0, 0)) < (9, 0):
                answer = Support(False, f"{name} needs compute capability 9.0; here is {here[0]}.{here[1]}.")
        return answer and super().support(case, side)

    def prove(self, case, side, built, launched):
        """Return the version that ran; raise WrongRun if no launch belongs to the version."""
        pattern = self.versions[built.provider][1]
        if not any(re.search(pattern, name) for name in (*launched.kernels, *launched.operators)):
            raise WrongRun(
                f"{built.provider} was asked for, and {', '.join((launched.kernels or launched.operators)[:8])} ran."
            )
        return built.provider


COMMON = (
    Knob("dtype", "dtype of the tensors", "fp32", "bf16", choices=tuple(DTYPES)),
    Knob("seed", "seed of the random inputs", 42, 42, least=0),
)


class Gemm(Versions):
    """C = A @ B by one of the course's kernels, against torch.matmul."""

    chapter, workload = "labs/gemm", "gemm"
    summary = "C = A @ B: a kernel of the course's ladder against torch.matmul"
    sides: Mapping[str, str] = {"baseline": "torch.matmul", "optimized": "the kernel of --kernel"}
    arguments = ("a=randn(m, k, dtype)", "b=randn(k, n, dtype)")
    versions: Mapping[str, tuple[Callable, str]] = {
        "torch.matmul": (torch.matmul, r"gemm|nvjet|cutlass|xmma|splitk|aten::mm"),
        **{name: (kernel, "^tiled_kernel") for name, kernel in gemm.LADDER.items()},
        "gemm_naive": (gemm.LADDER["gemm_naive"], "^naive_kernel"),
        "gemm_warp_specialized": (gemm.LADDER["gemm_warp_specialized"], "^(gemm|short)_kernel"),
    }
    knobs = (
        Knob("m", "rows of A", 512, 4096),
        Knob("n", "columns of B", 512, 4096),
        Knob("k", "columns of A, rows of B", 512, 4096),
        Knob("kernel", "rung of the ladder", "gemm_tiled", "gemm_warp_specialized", choices=tuple(gemm.LADDER)),
        *COMMON,
    )


class Gelu(Versions):
    """tanh-GELU in one kernel, against tanh-GELU in nine kernels."""

    chapter, workload = "labs/gelu", "gelu"
    summary = "tanh-GELU: one fused kernel against an operation at a time"
    sides: Mapping[str, str] = {"baseline": "gelu_unfused, nine kernels", "optimized": "the version of --kernel"}
    arguments = ("x=randn(elements, dtype)",)
    versions: Mapping[str, tuple[Callable, str]] = {
        "gelu_unfused": (gelu.gelu_unfused, "tanh"),
        "gelu_torch": (gelu.VERSIONS["gelu_torch"], "(?i)gelu"),
        "gelu_triton": (gelu.VERSIONS["gelu_triton"], "^gelu_kernel"),
    }
    knobs = (
        Knob("elements", "numbers of x", 1_000_000, 67_108_864),
        Knob("kernel", "version", "gelu_torch", "gelu_triton", choices=("gelu_torch", "gelu_triton")),
        *COMMON,
    )


TARGETS = (Gemm(), Gelu())
