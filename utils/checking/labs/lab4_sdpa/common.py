"""Parts that all checks of lab 4 share: the backends, which of them ran, and the switches that a call changes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from utils import checking

BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class BackendRefused(RuntimeError):
    """The backend that was asked for cannot run this call."""


def is_refusal(error: Exception) -> bool:
    """Return whether an answer raised BackendRefused. Only the name counts: each process has its own class."""
    return type(error).__name__ == "BackendRefused"


def _with_all_backends(kind: Callable) -> Callable:
    """Return a decorator that allows all backends during a check, even if an answer has switched some off before."""

    def declare(question: str, title: str, **rule) -> Callable:
        def decorate(function: Callable) -> Callable:
            @functools.wraps(function)
            def with_all(*args, **kwargs):
                with sdpa_kernel(list(BACKENDS.values())):
                    return function(*args, **kwargs)

            return kind(question, title, **rule)(with_all)

        return decorate

    return declare


check, visible = _with_all_backends(checking.check), _with_all_backends(checking.visible)


def attentions(watch: checking.OperationWatch) -> list[str]:
    """Return the SDPA backends that ran on CPU tensors, in order; a softmax means the math backend."""
    names = {"_scaled_dot_product_flash_attention_for_cpu": "flash", "_softmax": "math", "_safe_softmax": "math"}
    return [names[step[0]] for step in watch.steps if step[0] in names]


def sdpa_switches() -> tuple:
    """Return which backends torch may use now, and in which order it tries them."""
    flags = (getattr(torch.backends.cuda, f"{n}_sdp_enabled")() for n in ("flash", "mem_efficient", "math", "cudnn"))
    return (*flags, tuple(torch._C._get_sdp_priority_order()))


def runs(backend: str, query, key, value, **options) -> bool:
    """Return whether torch runs this call with `backend` alone."""
    with warnings.catch_warnings(), sdpa_kernel(BACKENDS[backend]):
        warnings.simplefilter("ignore")
        try:
            F.scaled_dot_product_attention(query, key, value, **options)
        except RuntimeError:
            return False
    return True


@contextlib.contextmanager
def replace_answers(function: Callable, others: Mapping[str, Callable]) -> Iterator[list[str]]:
    """Let a student's function call {name: function} in place of earlier answers; yield the names that it knows."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    before = {name: names[name] for name in others if name in names}
    names.update({name: others[name] for name in before})
    try:
        yield list(before)
    finally:
        names.update(before)


def in_one_line(text: str) -> str:
    """Return a text with single spaces, so that only its words count."""
    return " ".join(text.split())
