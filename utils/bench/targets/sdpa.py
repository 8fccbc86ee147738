"""One call of scaled_dot_product_attention, with one backend pinned.

workload = Workload(4, 32, 1024, 128, "bf16", "causal", kv_heads=8, direction="both")
inputs = make_inputs(workload, device, seed=0)             # q, k, v and the gradient of the output
why_not(workload, "efficient", inputs)                     # torch's reason in words, or ""
call = bind(workload, "cudnn", inputs)                     # the call to time: attention and nothing else
prove("cudnn", launched(call), workload.direction)      # raises unless cuDNN's kernels ran (`proof.py`)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from utils import attention
from utils.attention.problem import NO_OPTIONS, Bound
from utils.bench.targets.proof import BACKEND_OF
from utils.bench.workload import Inputs, Workload

BACKENDS = ("cudnn", "flash", "math", "efficient")
CHOICES = ("auto", *BACKENDS)


@torch.enable_grad()
def _bound(workload: Workload, backend: str, inputs: Inputs) -> tuple[list[torch.Tensor], Bound]:
    """Bind a backend to q, k and v, with gradients asked for unless it is forward alone; return these, and what was bound.

    The backend is not asked whether it accepts the problem: the refusals here are torch's own.
    """
    tensors = [x.detach().requires_grad_(workload.direction != "forward") for x in inputs.qkv]
    problem = attention.make_problem(*tensors, **workload.attention_arguments)
    return tensors, attention.find_backend(BACKEND_OF.get(backend, backend)).bind(problem, NO_OPTIONS)


def bind(workload: Workload, backend: str, inputs: Inputs) -> Callable[[], object]:
    """Return the call that is timed: the output, the three gradients ("backward"), or all four ("both").

    The output's gradient gets the output's own memory order, so that no backend pays for a copy of it.
    """
    tensors, bound = _bound(workload, backend, inputs)
    attend = bound.call
    if workload.direction == "forward":
        return torch.no_grad()(lambda: attend(*tensors))
    with torch.enable_grad():
        kept = attend(*tensors)
    assert inputs.dout is not None, "a backward pass has a gradient to begin with"
    gradient = torch.empty_like(kept, requires_grad=False).copy_(inputs.dout)
    if workload.direction == "backward":
        return lambda: torch.autograd.grad(kept, tensors, gradient, retain_graph=True)
    kept = None  # its graph holds tensors of the forward pass

    def both() -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            out = attend(*tensors)
            return (out.detach(), *torch.autograd.grad(out, tensors, gradient))

    return both


def why_not(workload: Workload, backend: str, inputs: Inputs) -> str:
    """Return torch's own reason against a backend for these tensors, by trying it; "" if the backend takes them."""
    if backend == "auto":
        return ""
    try:
        tensors, bound = _bound(workload, backend, inputs)
        with torch.enable_grad():
            (bound.first or bound.call)(*tensors)
    except attention.Refused as refusal:
        return str(refusal)
    return ""
