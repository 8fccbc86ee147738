"""Which operators ran in a call: recorded in the student's process, shown to the check's own modes in the checker's."""

from __future__ import annotations

import builtins
import collections
import inspect
import types
from collections.abc import Mapping

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from instructor.grading.wire.channel import WireError
from instructor.grading.wire.values import DTYPES
from utils.checking.watching import LABELS, StudentLine

MAX_RECORDS = 150_000  # operators recorded in one call: 20 MB
CANARY = "aten::special_i1e"
MAX_LEAF = 1_000_000  # elements of a tensor in a record that no operator in it made
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_COUNTERS = ("operations", "calls", "exits", "custom", "kernels", "borrowed")

# ---- in the student's process ------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Records every operator that runs, with the shapes of its inputs and outputs."""

    supports_higher_order_operators = True

    def __init__(self, given: Mapping[int, torch.Tensor] | None = None) -> None:
        super().__init__()
        self.records: list = []  # [name, overload, arguments, keyword arguments, result]
        self.given = {id(tensor): key for key, tensor in (given or {}).items()}  # the checker's tensors
        self.numbers: dict[int, int] = {}  # the address of a tensor -> its number in the record
        self.kept: list[torch.Tensor] = []  # by number: kept alive, so that no address is used again
        self.memory: dict[int, int] = {}  # the address of a tensor's memory -> the number of the first tensor in it
        self.names: dict[object, tuple[str, str]] = {}  # operator -> its name and its overload's
        self.words: dict[tuple, tuple[str, str]] = {}  # (dtype, device) -> what they are called
        self.leaves: list = []  # [number, what it is] of tensors that no operator in the record made
        self.cut = False  # more operators ran than are recorded

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        names = self.names.get(func)
        if names is None:
            schema = getattr(func, "_schema", None)
            own = (schema.name, schema.overload_name) if schema is not None else (getattr(func, "__name__", "?"), "")
            names = self.names[func] = own[0], own[1] or "default"
        if len(self.records) >= MAX_RECORDS and names[0] != CANARY:
            self.cut = True
        if names[0] in LABELS or (self.cut and names[0] != CANARY):
            return func(*args, **kwargs)
        sketches = [self._sketch(a, leaf=True) for a in args], {k: self._sketch(v, True) for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        self.records.append([*names, *sketches, self._sketch(result)])
        return result

    def _sketch(self, value, leaf: bool = False, depth: int = 0):
        """A value without the numbers in its tensors; each tensor has its place in the record."""
        if isinstance(value, torch.Tensor):
            dtype, device = value.dtype, value.device
            if (words := self.words.get((dtype, device))) is None:
                words = self.words[dtype, device] = str(dtype).removeprefix("torch."), str(device)
            number = self.numbers.get(id(value))
            return {"tensor": [[*value.shape], *words, self.number_of(value, leaf) if number is None else number]}
        if value is None or isinstance(value, bool | int | float | str):
            # Larger numbers do not travel. They are common: the end of x[1:] is 2**63 - 1.
            return value if not isinstance(value, int) or abs(value) < 1 << 62 else {"integer": str(value)}
        if isinstance(value, list | tuple) and depth < 4:
            parts = [self._sketch(v, leaf, depth + 1) for v in value[:1000]]
            return {"tuple" if isinstance(value, tuple) else "list": parts}
        if isinstance(value, _OF_TORCH):
            return {"torch": str(value).removeprefix("torch.")}
        return {"other": str(value)[:80]}

    def number_of(self, tensor: torch.Tensor, leaf: bool = False) -> int:
        """The number of a tensor in the record; -1 for one that nothing in the record made."""
        if (number := self.numbers.get(id(tensor))) is not None:
            return number
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.device.type == "meta":
            return -1
        place = tensor.untyped_storage().data_ptr() if tensor.numel() else 0
        if leaf:  # a result is made by its operator, also where it is a view of what was there
            described = self._describe(tensor, place)
            if described is None:
                return -1
            self.leaves.append([len(self.kept), *described])
        number = self.numbers[id(tensor)] = len(self.kept)
        self.kept.append(tensor)
        if place:
            self.memory.setdefault(place, number)
        return number

    def _describe(self, tensor: torch.Tensor, place: int) -> list | None:
        """What a tensor is that no operator in the record made: an argument, a part of a known one, or its numbers."""
        if id(tensor) in self.given:
            return ["given", self.given[id(tensor)]]
        if place in self.memory:
            known = self.memory[place]
            same = self.kept[known].dtype == tensor.dtype
            return ["part", known, list(tensor.shape), list(tensor.stride()), tensor.storage_offset()] if same else None
        return ["made", tensor.detach().clone()] if tensor.numel() <= MAX_LEAF else None

    def made(self, value) -> list[int] | None:
        """The numbers of a result's tensors, in order; None if it holds none, or one that the record does not explain."""
        tensors = tensors_in(value)
        numbers = [self.numbers.get(id(t), -1) for t in tensors]
        return numbers if numbers and -1 not in numbers else None


def tensors_in(value) -> list[torch.Tensor]:
    """The tensors of a result, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, list | tuple) else []


def run_canary(x: torch.Tensor) -> None:
    """Run an operator that no lab uses: the checker expects it at both ends of a record."""
    torch.special.i1e(x)


def describe_watch(watch) -> dict:
    """What `watch_operations` saw, as data, without the canary."""
    for counter in (watch.operations, watch.calls):
        counter.pop("special_i1e", None)
    counts = {name: {str(k)[:200]: int(v) for k, v in getattr(watch, name).items()} for name in _COUNTERS}
    lines = {str(k)[:200]: [line.function[:200], line.number, line.text[:300]] for k, line in watch.lines.items()}
    return {**counts, "lines": lines}


# ---- in the checker's process ------------------------------------------------------------------------------------


def expect_canaries(records: list, sizes: list[int]) -> list:
    """The records between the two canaries; `WireError` if these are not where and what they have to be."""
    ends = [records[0], records[-1]] if len(records) > 1 else [[], []]
    for end, size in zip(ends, sizes, strict=True):
        if end[:1] != [CANARY] or end[2][0]["tensor"][:3] != [[size], "float32", "meta"]:
            raise WireError("the record of operators does not hold what has to be in it")
    return records[1:-1]


def expect_consistent(records: list, fields: dict) -> str:
    """Say how the two records of one call contradict each other; "" if they do not.

    Args:
        records: of the `Recorder`, without the canaries.
        fields: of `describe_watch`.
    """
    own = {str(r[0]).rpartition("::")[2].rstrip("_") for r in records if str(r[0]).startswith(("aten::", "prim"))}
    if unseen := sorted(own - {str(name).strip("_") for name in fields["operations"]} - set(fields["operations"])):
        return f"{unseen[0]} is in one record of the call, and not in the other"
    return ""


def made_by_nothing(records: list, fields: dict, shape: list | None) -> bool:
    """True for a new tensor of which neither record has the shape: something made it that was not recorded.

    Args:
        records: of the `Recorder`, without the canaries.
        fields: of `describe_watch`.
        shape: of the result, if that is a tensor which the call made itself.
    """
    opaque = fields["exits"] or fields["custom"] or fields["kernels"]
    return shape is not None and not opaque and not any(_holds_shape(part, shape) for r in records for part in r[2:])


def _holds_shape(sketch, shape: list) -> bool:
    if isinstance(sketch, dict):
        if "tensor" in sketch:
            return list(sketch["tensor"][0]) == shape
        return any(_holds_shape(part, shape) for part in sketch.values())
    return isinstance(sketch, list | tuple) and any(_holds_shape(part, shape) for part in sketch)


def merge_watch(watch, fields: dict) -> None:
    """Add to a watch of the check what the student's process saw."""
    for name in _COUNTERS:
        counts = fields[name]
        if not all(type(n) is int and n >= 0 for n in counts.values()):
            raise WireError("counts that are no counts")
        getattr(watch, name).update(collections.Counter(counts))
    for name, (function, number, text) in fields["lines"].items():
        watch.lines.setdefault(name, StudentLine(str(function), int(number), str(text)))


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


# ---- the record, run again ---------------------------------------------------------------------------------------

SCALARS = (
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::equal",
)  # what follows may depend on them


def run_again(program: dict, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run the operators of a record on other arguments; returns the tensors of the result.

    This is for a process in which no code of the student's has run: the record is data.
    """
    tensors: dict[int, torch.Tensor] = {}
    leaves = {int(number): how for number, *how in program["leaves"]}

    def tensor_of(number: int) -> torch.Tensor:
        if number not in tensors:
            kind, *about = leaves[number]
            if kind == "part":
                tensors[number] = torch.as_strided(tensor_of(about[0]).detach(), *about[1:])
            else:
                tensors[number] = given[about[0]] if kind == "given" else about[0]
        return tensors[number]

    def fill(sketch):
        if not isinstance(sketch, dict):
            return sketch
        ((kind, content),) = sketch.items()
        if kind == "tensor":
            return tensor_of(content[3])
        if kind in ("list", "tuple"):
            return getattr(builtins, kind)(fill(part) for part in content)
        if kind == "torch" and isinstance(value := getattr(torch, content), _OF_TORCH):
            return value
        if kind == "integer":
            return _integer(content)
        if content == "cpu":
            return torch.device("cpu")
        raise WireError(f"{content} cannot be given again")

    def bind(sketch, value) -> None:
        if isinstance(sketch, dict) and "tensor" in sketch:
            tensors.setdefault(sketch["tensor"][3], value)
        elif isinstance(sketch, dict) and isinstance(value, list | tuple):
            for part, item in zip(*sketch.values(), value, strict=True):
                bind(part, item)

    for name, overload, args, kwargs, result in program["records"]:
        operator = _operator(str(name), str(overload))
        if not isinstance(operator, torch._ops.OpOverload):
            raise WireError(f"{name} cannot be run again")
        bind(result, operator(*[fill(a) for a in args], **{k: fill(v) for k, v in kwargs.items()}))
    return [tensor_of(number) for number in program["result"]]
