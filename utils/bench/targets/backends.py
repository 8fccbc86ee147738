"""Call an attention backend by its name, and prove that this backend ran.

workload = Workload(4, 32, 1024, 128, "bf16", "causal", kv_heads=8, direction="both")
inputs = make_inputs(workload, device, seed=0)             # q, k, v and the gradient of the output
call = bind(workload, "cudnn", inputs)                     # the call to time: attention and nothing else
prove("cudnn", launched(call), workload.direction)         # raises WrongRun unless cuDNN's kernels ran
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

from utils import attention
from utils.attention.backends.sdpa import BACKWARD_OPERATORS, FORWARD_OPERATORS, MATH_BACKWARD, PINS
from utils.attention.problem import Backend
from utils.bench.errors import Refused, WrongRun
from utils.bench.workload import Workload
from utils.benchmark.profiling import Launched

SDPA = ("cudnn", "flash", "math", "efficient")
SDPA_CHOICES = ("auto", *SDPA)  # "auto" is torch's own choice
# Names in records, flags and targets -> names in `attention`, if they differ.
NAMES = {"auto": "sdpa", "unfused": "naive", "eager": "flex_eager", "compiled": "flex"}


def backend_of(name: str) -> Backend:
    """Return the attention backend with this name in records, flags and targets."""
    return attention.find_backend(NAMES.get(name, name))


@torch.enable_grad()
def bind(workload: Workload, name: str, inputs: Sequence[torch.Tensor]) -> Callable[[], object]:
    """Return the call that is timed: the output, the three gradients ("backward"), or all four ("both").

    One try shows whether the backend accepts the problem; if not, Refused has torch's reason. The output's gradient gets
    the memory order of the output, so that no backend must copy it.
    """
    tensors = [x.detach().requires_grad_(workload.direction != "forward") for x in inputs[:3]]
    problem = attention.make_problem(*tensors, **workload.attention_arguments)
    bound = backend_of(name).bind_problem(problem)
    try:
        kept = (bound.first or bound.call)(*tensors)
    except attention.Refused as reason:
        raise Refused(f"torch's {name} backend does not take {workload.label}: {reason}") from reason
    attend = bound.call
    if workload.direction == "forward":
        return torch.no_grad()(lambda: attend(*tensors))
    gradient = torch.empty_like(kept, requires_grad=False).copy_(inputs[3])
    if workload.direction == "backward":
        return lambda: torch.autograd.grad(kept, tensors, gradient, retain_graph=True)

    def both() -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            out = attend(*tensors)
            return (out.detach(), *torch.autograd.grad(out, tensors, gradient))

    return both


def sdpa_backend(launched: Launched, direction: str = "forward") -> str:
    """Find the SDPA backend that ran by its operators: of the forward pass, the backward pass, or both."""
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
    """Return the name of the backend that ran; raise WrongRun unless it is the backend `asked`.

    On a GPU the kernels must belong to the backend, and for a fused SDPA backend also the operators.

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
            return ran  # the operator is the proof, because "overrideable" has no special kernels
    backend = backend_of(ran)
    names = launched.kernels or launched.operators
    pattern = backend.kernels if launched.kernels else backend.cpu_operators
    if pattern and not any(re.search(pattern, name) for name in names):
        raise WrongRun(
            f"backend {ran} was asked for and none of what was launched is its own ({pattern}): "
            f"{', '.join(names[:8]) or 'nothing'}."
        )
    return ran
