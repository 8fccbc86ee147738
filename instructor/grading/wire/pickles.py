"""What the checker sends to a student's process: a pickle, since whatever a check hands over is no secret.

Tensors, functions and iterators are nodes in it, as `values` has them. Functions and classes that the other side can
import are named; any other function stays with the check and is called from afar.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Callable, Iterator

import torch

from instructor.grading.wire.channel import WireError
from instructor.grading.wire.values import Decoder, Encoder


class CheckEncoder(Encoder):
    """Turns values of a check into pickles and bytes."""

    def __call__(self, value, depth: int = 0) -> list:
        """The node of a value; its bytes are added to `blobs`."""
        return self._pickled(value, self._node)

    def _pickled(self, value, node: Callable) -> list:
        class Pickler(pickle.Pickler):
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
        if isinstance(part, torch.nn.Module) or not (callable(part) or isinstance(part, Iterator)):
            return None
        if (reference := _reference(part)) is not None:
            return ["ref", *reference]
        if self.handle is None or isinstance(part, type):
            raise WireError(f"a {getattr(part, '__name__', type(part).__name__)} cannot travel")
        return self.handle(part)

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def _reference(value) -> tuple[str, str] | None:
    """Module and name of a function or class that the other side can import itself; the instructor's are not."""
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
