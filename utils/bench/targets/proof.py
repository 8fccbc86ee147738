"""Proof of which attention backend ran, from the operators and kernels that a call launched."""

from __future__ import annotations

import re

from utils.attention import find_backend
from utils.attention.backends.sdpa import BACKWARD_OPERATORS, FORWARD_OPERATORS, MATH_BACKWARD, PINS
from utils.bench.errors import WrongRun
from utils.benchmark.profiling import Launched

# What records, flags and targets call a backend, where that is not its name in `attention`; "auto" is torch's own choice.
BACKEND_OF = {"auto": "sdpa", "unfused": "naive", "eager": "flex_eager", "compiled": "flex"}


def sdpa_backend(launched: Launched, direction: str = "forward") -> str:
    """Return the SDPA backend that ran, by the operators of the forward pass, the backward pass, or both."""
    passes: dict[str, set[str]] = {}
    if direction != "backward":
        passes["forward"] = {FORWARD_OPERATORS[name] for name in launched.operators if name in FORWARD_OPERATORS}
    if direction != "forward":
        fused = {BACKWARD_OPERATORS[name] for name in launched.operators if name in BACKWARD_OPERATORS}
        passes["backward"] = fused or {"math" for name in launched.operators if name == MATH_BACKWARD}
    ran = set().union(*passes.values())
    if len(ran) != 1 or not all(passes.values()):
        shown = " and ".join(f"{name} ran {', '.join(sorted(found)) or 'none'}" for name, found in passes.items())
        raise WrongRun(f"one SDPA backend was expected: {shown}; the trace holds {', '.join(launched.operators[:12])}.")
    return ran.pop()


def prove(asked: str, launched: Launched, direction: str = "forward") -> str:
    """Return the name of the backend that ran; raise WrongRun unless it is the one that was asked for.

    On a GPU the kernels must be the backend's own too, and for a fused SDPA backend the operators.

    Args:
        asked: a backend's name; "auto" is torch's own choice of SDPA backend.
        launched: the operators and kernels of one call.
        direction: "forward", "backward" or "both", of an SDPA call.
    """
    ran = asked
    if asked == "auto" or asked in PINS:
        ran = sdpa_backend(launched, direction)
        if asked not in ("auto", ran):
            operators = [name for name in launched.operators if "scaled_dot" in name] or [MATH_BACKWARD]
            raise WrongRun(f"the SDPA backend {asked} was asked for and {ran} ran, by {', '.join(operators)}.")
        if not launched.kernels or ran not in PINS:
            return ran  # the operator is the proof; "overrideable" has no kernels of its own
    backend = find_backend(BACKEND_OF.get(ran, ran))
    pattern, names = (
        (backend.kernels, launched.kernels) if launched.kernels else (backend.cpu_operators, launched.operators)
    )
    if pattern and not any(re.search(pattern, name) for name in names):
        raise WrongRun(
            f"backend {ran} was asked for and none of what was launched is its own ({pattern}): "
            f"{', '.join(names[:8]) or 'nothing'}."
        )
    return ran
