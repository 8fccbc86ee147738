"""A student's function in a check: a call may not change its inputs, and has to keep to the rule of its question."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from utils.checking.watching import OperationWatch, Rule, tensors_in


class Answer:
    """A student's function. A call fails if it changes its inputs, or if it breaks a rule.

    Args:
        function: the student's function; its tensors may stand in tuples and lists.
        rule: the rule of the question; with None there is no watch.
        limit: the largest number of elements that an operator may work on; None takes the number of the rule.
    """

    watch: OperationWatch  # the watch over the last call, if there is a rule

    def __init__(self, function: Callable, rule: Rule | None = None, limit: int | None = None) -> None:
        self._function, self._rule, self._limit = function, rule, limit
        if rule is not None and limit is None and isinstance(rule.largest, int):
            self._limit = rule.largest

    def __call__(self, *args, **kwargs) -> Any:
        """Call the answer, and assert that its inputs are unchanged and that it kept to the rule."""
        before = [
            (tensor, tensor.shape, _bytes(tensor))
            for tensor in tensors_in([*args, *kwargs.values()])
            # A tensor on the meta device, or a tensor of vmap, has no numbers to compare.
            if not (tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor))
        ]
        if self._rule is None:
            result = self._function(*args, **kwargs)
        else:
            with OperationWatch() as self.watch:
                result = self._function(*args, **kwargs)
            self._rule.expect(self.watch, self._limit)
        if not all(_is_unchanged(*was) for was in before):
            name = getattr(self._function, "__name__", "your function")
            raise AssertionError(
                f"{name} changed one of its inputs, or its memory. Work on new tensors: `x += ...` writes into x."
            )
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and not name.startswith("__"):  # fields of this class, before __init__ has set them
            raise AttributeError(name)
        return getattr(self._function, name)

    def with_limit(self, limit: int) -> Answer:
        """Return the same answer with a number of elements for the rule's words, such as "one tile"."""
        return Answer(self._function, self._rule, limit)


def run_beside(function: Callable) -> Callable[..., Any]:
    """Return a function that calls `part(*arguments)` in the answer's process, which is not the grader's process.

    The part of a check is a function of `utils`, so that process can import it.
    """
    return getattr(function, "remote_run", None) or (lambda part, *args: part(*args))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor's bytes, so that NaN equals NaN. The watch of a check does not see this copy."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return tensor.detach().reshape(-1).contiguous().view(torch.uint8).clone()


def _is_unchanged(tensor: torch.Tensor, shape: torch.Size, before: torch.Tensor) -> bool:
    after = _bytes(tensor)
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return tensor.shape == shape and torch.equal(after, before)
