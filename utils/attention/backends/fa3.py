"""FlashAttention 3: the C++ kernels for Hopper, called through the operators of their library.

The library is found in this order: its operators are registered already; FLASH_ATTENTION_3_LIBRARY names the file
`_C.so`; the package flash-attn-3 or xformers, which has a copy, is installed. The operators are
`torch.ops.flash_attn_3.fwd` and `bwd`; their tensors are (B, S, H, D).
"""

from __future__ import annotations

import functools
import importlib.util
import os
from importlib import metadata
from pathlib import Path

import torch

from utils.attention.backends.flash_attn import heads_first, one_batch, packed_arguments, rows_first, window_size
from utils.attention.problem import Backend, Options, Problem, positive_scale
from utils.kernels.handle import needs_autograd
from utils.machine.device import Support, compute_capability, cuda_support
from utils.validation import first_line

VARIABLE = "FLASH_ATTENTION_3_LIBRARY"
# {package with the library: distribution with its version}.
_PACKAGES = {"flash_attn_3": "flash-attn-3", "xformers.flash_attn_3": "xformers"}


def _registered() -> bool:
    return hasattr(torch.ops.flash_attn_3, "fwd") and hasattr(torch.ops.flash_attn_3, "bwd")


def _installed() -> tuple[Path, str] | None:
    """Return the library's file in an installed package, and the package with its version; None without such a package."""
    for package, distribution in _PACKAGES.items():
        top, _, below = package.partition(".")
        spec = importlib.util.find_spec(top)  # only the top-level package: a search for a submodule would import it
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if files := sorted((Path(folder) / below).glob("_C*.so")):
                try:
                    return files[0], f"{distribution} {metadata.version(distribution)}"
                except metadata.PackageNotFoundError:
                    return files[0], package
    return None


@functools.cache
def _library() -> tuple[Support, str]:
    """Load the library once; return whether its operators can be called, and their origin."""
    if _registered():
        return Support(True, "FlashAttention 3's operators are registered."), "operators registered elsewhere"
    named = os.environ.get(VARIABLE)
    found = (Path(named).expanduser(), f"the library of {VARIABLE}") if named else _installed()
    remedy = f"Set {VARIABLE} to the file _C.so of a build of FlashAttention 3 for this torch and CUDA version."
    if found is None:
        reason = f"No package flash-attn-3 or xformers brings FlashAttention 3, and {VARIABLE} names no file."
        return Support(False, reason, remedy), ""
    path, origin = found
    if not path.is_file():
        return Support(False, f"{VARIABLE} is {named}, and there is no such file.", remedy), ""
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return Support(False, f"{path.name} of {origin} does not load: {first_line(error)}", remedy), ""
    if not _registered():
        reason = f"{path.name} of {origin} registers no operators flash_attn_3.fwd and flash_attn_3.bwd."
        return Support(False, reason, remedy), ""
    return Support(True, f"FlashAttention 3 is loaded: {origin}."), origin


@functools.cache
def _machine() -> Support:
    if not (cuda := cuda_support()):
        return Support(False, f"FlashAttention 3 needs a Hopper GPU: {cuda.reason}", cuda.remedy)
    major, minor = compute_capability() or (0, 0)
    if (major, minor) != (9, 0):
        reason = f"FlashAttention 3 is for Hopper, compute capability 9.0, and this GPU has {major}.{minor}."
        return Support(False, reason, "Run on an H100 or H200.")
    return _library()[0]


def _refuses(problem: Problem, options: Options) -> str:
    if problem.causal and problem.window is None and problem.has_empty_rows and problem.needs_autograd:
        return f"its gradients are not tested for rows without keys (Sq {problem.sq} > Sk {problem.sk})."
    return one_batch(problem, options)


# ---- the operators ------------------------------------------------------------------------------------------


def _arguments(device, lengths: tuple[int, ...], causal: bool, scale: float, left: int, right: int) -> dict:
    """Return the operators' further arguments, after the tensors."""
    given = {"softmax_scale": scale, "is_causal": causal, "window_size_left": left, "window_size_right": right}
    return given | packed_arguments(lengths, device)


def _forward(q, k, v, lengths: tuple[int, ...], *options) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (B, H, S, D), a view of (B, S, H, D), and the log-sum-exp (B, H, S); for packed sequences it is (H, S)."""
    rows = (rows_first(x, lengths) for x in (q, k, v))
    out, lse, *_ = torch.ops.flash_attn_3.fwd.default(*rows, **_arguments(q.device, lengths, *options))
    return heads_first(out, lengths), lse


class _Differentiable(torch.autograd.Function):
    """Computes `_forward`, with the library's backward pass."""

    @staticmethod
    def forward(ctx, q, k, v, lengths, *options):
        out, lse = _forward(q, k, v, lengths, *options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = lengths, *options
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, _dlse):
        q, k, v, out, lse = ctx.saved_tensors
        lengths = ctx.options[0]
        rows = [rows_first(x, lengths) for x in (dout, q, k, v, out)]
        gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in rows[1:4]]
        torch.ops.flash_attn_3.bwd.default(*rows, lse, *gradients, **_arguments(q.device, *ctx.options))
        return *(heads_first(x, lengths) for x in gradients), None, None, None, None, None


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> torch.Tensor:
    q, scale = positive_scale(q, problem.scale)  # the kernels take the maximum before they scale
    attend = _Differentiable.apply if needs_autograd(q, k, v) else _forward
    return attend(q, k, v, problem.lengths, problem.causal, scale, *window_size(problem, -1))[0]


BACKENDS = {
    "fa3": Backend(
        name="fa3",
        summary="FlashAttention 3, the C++ kernels for Hopper",
        machine=_machine,
        refuses=_refuses,
        run=_run,
        form=Problem.plain_or_packed,
        largest_head=256,
        kernels=r"flash::.*Sm90|FlashAttnFwdSm90|FlashAttnBwdSm90",
        implementation=lambda: f"FlashAttention 3, {_library()[1]}",
    )
}
