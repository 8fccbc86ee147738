"""FlashAttention in plain Triton: for GPUs before Hopper, and for a CPU in the simulator.

One program owns BLOCK_M rows of queries and walks over the keys in blocks. For each block it computes the scores, the
running maximum and sum, rescales the output, and adds P V. Triton chooses shared memory, pipelining and the instructions.

    tile       BLOCK_M x BLOCK_N: 128 x 64 (head dim up to 128), 64 x 32 beyond; simulator: 128 x 128
    pipeline   num_stages=2, by Triton
    measured   not among the recorded kernels
"""

from __future__ import annotations

import torch

from utils.attention.problem import Backend, Options, Problem
from utils.machine.device import triton_support

LOG2_E = 1.4426950408889634  # the kernel uses exp2: e^x = 2^(x log2 e)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, window: int) -> torch.Tensor:
    """Launch the kernel; window 0 means no window."""
    import triton

    from utils.attention.backends.triton_kernel import flash_forward_kernel

    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    batch, heads, sq, head_dim = q.shape
    kv_heads, sk = k.shape[1:3]
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_m, block_n = (128, 128) if not q.is_cuda else (128, 64) if block_d <= 128 else (64, 32)
    if q.numel():
        strides = [x.stride() for x in (q, k, v, out)]
        lengths = (sq, sk, head_dim, heads, heads // kv_heads, window)
        tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d}
        launch = {"num_warps": 4 if block_d <= 64 else 8, "num_stages": 2}
        grid = (triton.cdiv(sq, block_m), batch * heads)
        flash_forward_kernel[grid](
            *(q, k, v, out), *strides, *lengths, scale * LOG2_E, CAUSAL=causal, WINDOW=window > 0, **tile, **launch
        )
    return out


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> torch.Tensor:
    arguments = (q, k, v, problem.causal, problem.scale, problem.window or 0)
    if q.is_cuda:
        with torch.cuda.device(q.device):
            return forward(*arguments)
    from utils.gluon_cpu import simulate

    with simulate():
        return forward(*arguments)


def _refuses(problem: Problem, options: Options) -> str:
    if problem.device.type == "cuda" and not (able := triton_support()):
        return f"Triton compiles nothing in this process: {able.reason}"
    if problem.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it takes float16, bfloat16 and float32, not {problem.type_name}."
    if problem.head_dim > 256:
        return f"its head dimension ends at 256, and {problem.head_dim} was given."
    if (heads := problem.batch * problem.heads) > 65535:
        return f"it launches a row of blocks for each head, at most 65535, and {heads} were given."
    return "it has no backward pass, and an input requires a gradient." if problem.needs_autograd else ""


def _implementation() -> str:
    from importlib import metadata

    return f"Triton {metadata.version('triton')}, " + ("compiled" if torch.cuda.is_available() else "simulated")


BACKENDS = {
    "triton": Backend(
        name="triton",
        summary="FlashAttention in plain Triton (Ampere and later; a CPU in the simulator)",
        machine=triton_support,
        refuses=_refuses,
        run=_run,
        kernels=r"flash_forward_kernel",
        implementation=_implementation,
    )
}
