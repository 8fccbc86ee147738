"""One call of scaled_dot_product_attention, with one backend pinned.

workload = Workload(4, 32, 1024, 128, "bf16", "causal", kv_heads=8, direction="both")
inputs = make_inputs(workload, device, seed=0)             # q, k, v and the gradient of the output
call = bind(workload, "cudnn", inputs)                     # the call to time: attention and nothing else
prove("cudnn", launched(call), workload.direction)      # raises unless cuDNN's kernels ran (`proof.py`)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from utils import attention
from utils.attention.problem import NO_OPTIONS
from utils.bench.errors import Refused
from utils.bench.targets.proof import BACKEND_OF
from utils.bench.workload import Inputs, Workload

BACKENDS = ("cudnn", "flash", "math", "efficient")
CHOICES = ("auto", *BACKENDS)


@torch.enable_grad()
def bind(workload: Workload, backend: str, inputs: Inputs) -> Callable[[], object]:
    """Return the call that is timed: the output, the three gradients ("backward"), or all four ("both").

    The backend is not asked whether it accepts the problem but tried: what raises Refused here is torch's own reason. The
    output's gradient gets the output's own memory order, so that no backend pays for a copy of it.
    """
    tensors = [x.detach().requires_grad_(workload.direction != "forward") for x in inputs.qkv]
    problem = attention.make_problem(*tensors, **workload.attention_arguments)
    bound = attention.find_backend(BACKEND_OF.get(backend, backend)).bind(problem, NO_OPTIONS)
    try:
        kept = (bound.first or bound.call)(*tensors)
    except attention.Refused as reason:
        raise Refused(f"torch's {backend} backend does not take {workload.label}: {reason}") from reason
    attend = bound.call
    if workload.direction == "forward":
        return torch.no_grad()(lambda: attend(*tensors))
    assert inputs.dout is not None, "a backward pass has a gradient to begin with"
    gradient = torch.empty_like(kept, requires_grad=False).copy_(inputs.dout)
    if workload.direction == "backward":
        return lambda: torch.autograd.grad(kept, tensors, gradient, retain_graph=True)

    def both() -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            out = attend(*tensors)
            return (out.detach(), *torch.autograd.grad(out, tensors, gradient))

    return both
