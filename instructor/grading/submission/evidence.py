"""Which operators ran in a call: recorded in the student's process, shown to the check's own modes in the checker's."""

from __future__ import annotations

import builtins
import collections
import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from instructor.grading.wire.channel import WireError
from instructor.grading.wire.values import DTYPES
from utils.checking.watching import StudentLine

MAX_RECORDS = 100_000  # operators recorded in one call
_COUNTERS = ("operations", "calls", "exits", "custom", "kernels")

# ---- in the student's process ------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Records every operator that runs, with the shapes of its inputs and outputs."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.records: list = []  # [name, overload, arguments, keyword arguments, result]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if len(self.records) < MAX_RECORDS:
            schema = getattr(func, "_schema", None)
            name = schema.name if schema is not None else getattr(func, "__name__", "?")
            overload = schema.overload_name if schema is not None else ""
            sketches = [_sketch(a) for a in args], {k: _sketch(v) for k, v in (kwargs or {}).items()}
            self.records.append([name, overload or "default", *sketches, _sketch(result)])
        return result


def _sketch(value, depth: int = 0):
    """A value without the numbers of its tensors."""
    if isinstance(value, torch.Tensor):
        return {"tensor": [list(value.shape), str(value.dtype).removeprefix("torch."), str(value.device)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value if not isinstance(value, int) or abs(value) < 1 << 62 else str(value)
    if isinstance(value, list | tuple) and depth < 4:
        return {"tuple" if isinstance(value, tuple) else "list": [_sketch(v, depth + 1) for v in value[:1000]]}
    return {"other": str(value)[:80]}


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
        if end[:1] != ["aten::special_i1e"] or end[2][0] != {"tensor": [[size], "float32", "meta"]}:
            raise WireError("the record of operators does not hold what has to be in it")
    return records[1:-1]


def expect_consistent(records: list, fields: dict, shape: list | None) -> str:
    """Say how the two records of one call contradict each other, or the result; "" if they do not.

    Args:
        records: of the `Recorder`, without the canaries.
        fields: of `describe_watch`.
        shape: of the result, if that is a tensor which the call made itself.
    """
    own = {str(r[0]).rpartition("::")[2].rstrip("_") for r in records if str(r[0]).startswith(("aten::", "prim"))}
    if unseen := sorted(own - {str(name).strip("_") for name in fields["operations"]} - set(fields["operations"])):
        return f"{unseen[0]} is in one record of the call, and not in the other"
    opaque = fields["exits"] or fields["custom"] or fields["kernels"]
    if shape is not None and not opaque and not any(_holds_shape(part, shape) for r in records for part in r[2:]):
        return "no operator in the record made the result"
    return ""


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
    for name, overload, args, kwargs, result in records if modes else ():
        function = _RecordedOperator(_operator(str(name), str(overload)), _unsketch(result))
        values, named = [_unsketch(v) for v in args], {str(k): _unsketch(v) for k, v in kwargs.items()}
        for mode in modes:
            mode.__torch_dispatch__(function, (), tuple(values), named)


def _operator(name: str, overload: str) -> object:
    """The operator of a name; a namespace that looks like one if only the student's process has its library."""
    namespace, _, plain = name.partition("::")
    if all(part.isidentifier() and not part.startswith("__") for part in (namespace, plain, overload)):
        operator = getattr(getattr(getattr(torch.ops, namespace), plain, None), overload, None)
        if isinstance(operator, torch._ops.OpOverload):
            return operator
    schema = types.SimpleNamespace(name=name, overload_name=overload)
    return types.SimpleNamespace(_schema=schema, __name__=f"{plain}.{overload}", namespace=namespace)


def _unsketch(value):
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "tensor":
            shape, dtype, _ = content
            return torch.empty([int(n) for n in shape], dtype=DTYPES[dtype], device="meta")
        if kind in ("list", "tuple"):
            return getattr(builtins, kind)(_unsketch(v) for v in content)
        return None
    return value
