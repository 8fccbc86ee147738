"""A student's function in a check: each call leaves its inputs as they were, and keeps to the rule of its question."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from utils.checking.watching import OperationWatch, Rule, tensors_in


class Answer:
    """A student's function, of which every call leaves its inputs as they were and keeps to a rule.

    Args:
        function: what the student wrote; its tensors may stand in tuples and lists.
        rule: what it keeps to; None watches nothing.
        limit: elements that an operator may work on; None takes the rule's number, if it has one.
    """

    watch: OperationWatch  # of the last call under a rule

    def __init__(self, function: Callable, rule: Rule | None = None, limit: int | None = None) -> None:
        self._function, self._rule, self._limit = function, rule, limit
        if rule is not None and limit is None and isinstance(rule.largest, int):
            self._limit = rule.largest

    def __call__(self, *args, **kwargs) -> Any:
        """Call the answer, and assert that its inputs are as they were and what ran is allowed."""
        before = [
            (tensor, tensor.shape, _bytes(tensor))
            for tensor in tensors_in([*args, *kwargs.values()])
            # No numbers to compare are on the meta device, and where vmap lets a tensor stand for many.
            if not (tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor))
        ]
        if self._rule is None:
            result = self._function(*args, **kwargs)
        else:
            with OperationWatch() as self.watch:
                result = self._function(*args, **kwargs)
            self._rule.expect(self.watch, self._limit)
        if not all(_is_as_before(*was) for was in before):
            name = getattr(self._function, "__name__", "your function")
            raise AssertionError(
                f"{name} changed one of its inputs, or its memory. Work on new tensors: `x += ...` writes into x."
            )
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and not name.startswith("__"):  # its own, before they are there
            raise AttributeError(name)
        return getattr(self._function, name)

    def limited(self, limit: int) -> Answer:
        """Return the same answer with a number of elements for the rule's words, such as those of one tile."""
        return Answer(self._function, self._rule, limit)


def run_beside(function: Callable) -> Callable[..., Any]:
    """Return what calls a part of a check, as `(part, *arguments)`, in the process where an answer runs: for a grader another one.

    The part is a function of `utils`, which that process can import.
    """
    return getattr(function, "remote_run", None) or (lambda part, *args: part(*args))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor's bytes, in which NaN equals NaN; no watch of the check sees it being made."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return tensor.detach().reshape(-1).contiguous().view(torch.uint8).clone()


def _is_as_before(tensor: torch.Tensor, shape: torch.Size, before: torch.Tensor) -> bool:
    after = _bytes(tensor)
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return tensor.shape == shape and torch.equal(after, before)
