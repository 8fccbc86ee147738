"""What the checker sends to a student's process: a pickle, since whatever a check hands over is no secret.

Tensors, functions and iterators are nodes in it, as `values` has them. A function of the check stays with
the check and is called from afar. Those that the other side can import are named, and those that a check marks
(`by_value` in `utils.checking`) travel by their code: a profiler or a FLOP counter of the student's would see nothing of
a call from afar. A marked function holds no expected value, since a student can read what travels.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator

import cloudpickle
import torch

import instructor.checks
from instructor.grading.wire.channel import WireError
from instructor.grading.wire.values import Decoder, Encoder

MARK = "travels_by_value"
cloudpickle.register_pickle_by_value(instructor.checks)  # the student's process cannot import it


class CheckEncoder(Encoder):
    """Turns values of a check into pickles and bytes."""

    def __call__(self, value, depth: int = 0) -> list:
        """The node of a value; its bytes are added to `blobs`."""
        return self._pickled(value, self._node)

    def by_value(self, value) -> list:
        """The node of objects that travel with all of their code, such as a check's modes."""
        return self._pickled(value, lambda part: None)

    def _pickled(self, value, node: Callable) -> list:
        class Pickler(cloudpickle.Pickler):
            def persistent_id(self, part):
                return node(part)

        buffer = io.BytesIO()
        try:
            Pickler(buffer).dump(value)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise WireError(f"a {type(value).__name__} cannot travel: {error}") from None
        return ["pickle", self._blob(buffer.getvalue())]

    def _node(self, part) -> list | None:
        """The node of a part that is no plain object; None for what is pickled."""
        if isinstance(part, torch.Tensor):
            return self._tensor(part)
        if isinstance(part, torch.nn.Module):  # with its weights; hooks of the check stay
            return self._pickled(part, self._function)
        return self._function(part)

    def _function(self, part) -> list | None:
        if isinstance(part, type | staticmethod | classmethod) or not (callable(part) or isinstance(part, Iterator)):
            return None
        if isinstance(part, types.FunctionType) and (MARK in vars(part) or _is_method(part)):
            return None
        if isinstance(part, torch.nn.Module):  # the one that is pickled, and those in it
            return None
        if (reference := _reference(part)) is not None:
            return ["ref", *reference]
        if self.handle is None:
            raise WireError(f"a {type(part).__name__} cannot travel")
        return self.handle(part)

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def _is_method(function: types.FunctionType) -> bool:
    """True for a function in the body of a class, which travels with the class; one in `[lambda: 1 for x in y]` is none."""
    name = function.__qualname__.rpartition("<locals>.")[2]
    return "." in name and "<" not in name


def _reference(value) -> tuple[str, str] | None:
    """Module and name of a function that the other side can import itself; the instructor's are not."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(name, str) or "<" in name:
        return None
    for place in (module, "torch", "torch._C._nn", "torch.nn.functional"):
        for path in (name, name.rpartition(".")[2]):  # torch.matmul calls itself _VariableFunctionsClass.matmul
            if isinstance(place, str) and not place.startswith(("instructor", "__main__")):
                found = sys.modules.get(place)
                for part in path.split("."):
                    found = getattr(found, part, None)
                if found is value:
                    return place, path
    return None


class StudentDecoder(Decoder):
    """Rebuilds what the checker sent, in the student's process."""

    def _read_pickle(self, depth, index):
        decode = self

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, node):
                return decode(node)

        return Unpickler(io.BytesIO(self._data(index))).load()

    def _read_ref(self, depth, module, name):
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found
