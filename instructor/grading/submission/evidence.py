"""Which operators ran in a call: recorded in the student's process, shown to the check's own modes in the checker's."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import inspect
import types
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from instructor.grading.wire.channel import WireError
from instructor.grading.wire.values import DTYPES
from utils.checking import SizeWatch
from utils.checking.watching import LABELS, OperationWatch, StudentLine

MAX_RECORDS = 150_000  # operators recorded in one call: 20 MB
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_COUNTERS = [field.name for field in dataclasses.fields(OperationWatch) if field.name not in ("lines", "rules")]

# ---- in the student's process ------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Records every operator that runs, with the shapes of its inputs and outputs."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.records: list = []  # [name, overload, arguments, keyword arguments, result]
        self.numbers: dict[int, int] = {}  # the address of a tensor -> its number in the record
        self.kept: list[torch.Tensor] = []  # by number: kept alive, so that no address is used again
        self.names: dict[object, tuple[str, str]] = {}  # operator -> its name and its overload's
        self.words: dict[tuple, tuple[str, str]] = {}  # (dtype, device) -> what they are called
        self.cut = False  # more operators ran than are recorded

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        names = self.names.get(func)
        if names is None:
            schema = getattr(func, "_schema", None)
            own = (schema.name, schema.overload_name) if schema is not None else (getattr(func, "__name__", "?"), "")
            names = self.names[func] = own[0], own[1] or "default"
        self.cut |= len(self.records) >= MAX_RECORDS
        if names[0] in LABELS or self.cut:
            return func(*args, **kwargs)
        sketches = [self._sketch(a) for a in args], {k: self._sketch(v) for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        self.records.append([*names, *sketches, self._sketch(result)])
        return result

    def _sketch(self, value, depth: int = 0):
        """A value without the numbers in its tensors; each tensor has its place in the record."""
        if isinstance(value, torch.Tensor):
            dtype, device = value.dtype, value.device
            if (words := self.words.get((dtype, device))) is None:
                words = self.words[dtype, device] = str(dtype).removeprefix("torch."), str(device)
            return {"tensor": [[*value.shape], *words, self._number_of(value)]}
        if value is None or isinstance(value, bool | int | float | str):
            # Larger numbers do not travel. They are common: the end of x[1:] is 2**63 - 1.
            return value if not isinstance(value, int) or abs(value) < 1 << 62 else {"integer": str(value)}
        if isinstance(value, list | tuple) and depth < 4:
            parts = [self._sketch(v, depth + 1) for v in value[:1000]]
            return {"tuple" if isinstance(value, tuple) else "list": parts}
        if isinstance(value, _OF_TORCH):
            return {"torch": str(value).removeprefix("torch.")}
        return {"other": str(value)[:80]}

    def _number_of(self, tensor: torch.Tensor) -> int:
        number = self.numbers.setdefault(id(tensor), len(self.kept))
        if number == len(self.kept):
            self.kept.append(tensor)
        return number


class Profile:
    """What torch's profiler sees of a call, for a check that profiles it."""

    def __enter__(self) -> Profile:
        from torch._C._profiler import _ExperimentalConfig
        from torch.autograd import ProfilerActivity, ProfilerConfig, ProfilerState, _enable_profiler, _prepare_profiler

        plain = (False, False, False, False, False, _ExperimentalConfig(), "")
        config = ProfilerConfig(ProfilerState.KINETO, *plain)
        _prepare_profiler(config, {ProfilerActivity.CPU})
        _enable_profiler(config, {ProfilerActivity.CPU})
        return self

    def __exit__(self, *error: object) -> None:
        from torch.autograd import _disable_profiler

        events = _disable_profiler().events()
        self.names = [event.name() for event in sorted(events, key=lambda event: event.start_ns())]


def describe_watch(watch) -> dict:
    """What `watch_operations` saw, as data."""
    counts = {name: {str(k)[:200]: int(v) for k, v in getattr(watch, name).items()} for name in _COUNTERS}
    lines = {str(k)[:200]: [line.function[:200], line.number, line.text[:300]] for k, line in watch.lines.items()}
    return {**counts, "lines": lines}


class _Nothing(TorchDispatchMode):
    """A mode without data of its own."""


MEASURED = ("largest", "products", "copied", "steps")  # what a `SizeWatch` holds, as data
# It is filled where the operators run, and only what it holds travels; a mode that holds more is shown the record of them.
SIZES_TRAVEL = {n for n in vars(SizeWatch()).keys() - vars(_Nothing()).keys() if n[0] != "_"} == {*MEASURED}


def describe_sizes(sizes: SizeWatch) -> dict:
    """What a `SizeWatch` measured, as data."""
    return {name: getattr(sizes, name) for name in MEASURED}


# ---- in the checker's process ------------------------------------------------------------------------------------


def merge_watch(watch, fields: dict) -> None:
    """Add to a watch of the check what the student's process saw."""
    for name in _COUNTERS:
        counts = fields[name]
        if not all(type(n) is int and n >= 0 for n in counts.values()):
            raise WireError("counts that are no counts")
        getattr(watch, name).update(collections.Counter(counts))
    for name, (function, number, text) in fields["lines"].items():
        watch.lines.setdefault(name, StudentLine(str(function), int(number), str(text)))


def merge_sizes(sizes: Any, fields: dict) -> None:
    """Add to a `SizeWatch` of the check what was measured in the student's process."""
    for name, elements in fields["largest"].items():
        if type(elements) is not int:
            raise WireError("a size that is no number")
        sizes.largest[name] = max(sizes.largest.get(name, 0), elements)
    sizes.products += [tuple(map(int, product)) for product in fields["products"]]
    sizes.copied += [(str(name), int(elements)) for name, elements in fields["copied"]]
    for name, shapes, *numbers in fields["steps"]:
        sizes.steps.append((str(name), tuple(tuple(map(int, shape)) for shape in shapes), *map(_number, numbers)))


def _number(value) -> int | float:
    if type(value) not in (int, float):
        raise WireError("an argument that is no number")
    return value


class _RecordedOperator:
    """An operator that ran in the student's process: calling it gives the shapes of its result, without the numbers."""

    def __init__(self, operator, result):
        self._operator, self._result = operator, result

    def __call__(self, *args, **kwargs):
        return self._result

    def __getattr__(self, name):
        return getattr(self._operator, name)

    def __hash__(self):
        return hash(self._operator)

    def __eq__(self, other):
        return self._operator == (other._operator if isinstance(other, _RecordedOperator) else other)


def replay(modes: list, records: list) -> None:
    """Show the check's own modes each operator, with tensors that have shapes and no values."""
    tensors: dict[int, torch.Tensor] = {}  # a tensor that comes again is the same one
    operators: dict[tuple[str, str], object] = {}
    dispatches = [
        inspect.unwrap(type(mode).__torch_dispatch__).__get__(mode) for mode in modes
    ]  # without torch's wrapper
    for name, overload, args, kwargs, result in records if modes else ():
        values = [_unsketch(v, tensors) for v in args]
        named = {str(k): _unsketch(v, tensors) for k, v in kwargs.items()}
        key = str(name), str(overload)
        if key not in operators:
            operators[key] = _operator(*key)
        function = _RecordedOperator(operators[key], _unsketch(result, tensors))
        for dispatch in dispatches:
            dispatch(function, (), tuple(values), named)


def _operator(name: str, overload: str) -> object:
    """The operator of a name; a namespace that looks like one if only the student's process has its library."""
    namespace, _, plain = name.partition("::")
    if all(part.isidentifier() and not part.startswith("__") for part in (namespace, plain, overload)):
        operator = getattr(getattr(getattr(torch.ops, namespace), plain, None), overload, None)
        if isinstance(operator, torch._ops.OpOverload):
            return operator
    schema = types.SimpleNamespace(name=name, overload_name=overload)
    return types.SimpleNamespace(_schema=schema, __name__=f"{plain}.{overload}", namespace=namespace)


def _unsketch(value, tensors: dict[int, torch.Tensor]):
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "tensor":
            shape, dtype, number = content[0], content[1], content[3]
            known = tensors.get(number)
            if known is None or list(known.shape) != shape or known.dtype != DTYPES[dtype]:
                known = torch.empty([int(n) for n in shape], dtype=DTYPES[dtype], device="meta")
                if type(number) is int and number >= 0:
                    tensors[number] = known
            return known
        if kind in ("list", "tuple"):
            return getattr(builtins, kind)(_unsketch(v, tensors) for v in content)
        if kind == "integer":
            return _integer(content)
        if kind == "torch":
            value = getattr(torch, content)
            return value if isinstance(value, _OF_TORCH) else None
        return None
    return value


def _integer(text) -> int:
    """A number that travelled as text; of 64 bits, as operators take them."""
    if not isinstance(text, str) or len(text) > 20 or not -(1 << 63) <= (number := int(text)) < 1 << 63:
        raise WireError("a number that is no number")
    return number
