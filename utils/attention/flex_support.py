"""What each path of `flex_paths` can do on this machine, and the sentence that says what it cannot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from utils.attention import masks
from utils.attention.kernel_masks import kernel_mask
from utils.attention.masks import MaskMod, block_sizes, name_of
from utils.attention.score_mods import ScoreMod
from utils.machine.device import Support, compile_support, cuda_support, flash_attn_support, gluon_support

PATHS = ("eager", "compiled", "cute", "cute_direct", "gluon", "dense", "dense_compiled", "sdpa")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # modes that replay CUDA graphs
SMALLEST_TILE, DEFAULT_TILE = 16, 128  # of the Triton kernel, in queries and in keys


class FlexUnsupported(ValueError):
    """A path cannot do what was asked; `alternatives` are the paths that can."""

    def __init__(self, path: str, reason: str, alternatives: tuple[str, ...]):
        would = f"path={alternatives[0]!r} can." if alternatives else "no path here can."
        super().__init__(f"path {path!r} {reason.rstrip('.')}; {would}")
        self.path, self.reason, self.alternatives = path, reason, alternatives


@dataclass(frozen=True)
class Case:
    """What a path is asked for."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask_mod: MaskMod | None
    score_mod: ScoreMod | None
    block_size: tuple[int, int]
    mode: str
    scale: float
    kernel_options: dict | None
    own_options: dict | None = None  # the library's choice of kernel options, under the given ones

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.q, self.k, self.v))

    @property
    def grouped(self) -> bool:
        return self.q.shape[1] != self.k.shape[1]

    @property
    def lengths(self) -> tuple[int, int]:
        return self.q.shape[2], self.k.shape[2]


def path_case(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask_mod: MaskMod | None = None,
    score_mod: ScoreMod | None = None,
    block_size: int | tuple[int, int] = 128,
) -> Case:
    """A case to ask `support` about."""
    return Case(q, k, v, mask_mod, score_mod, block_sizes(block_size), "default", q.shape[-1] ** -0.5, None)


def able_paths(case: Case, asked: str = "") -> tuple[str, ...]:
    """The paths that can do a case on this machine, those of the same kind as `asked` first."""
    order = ("compiled", "cute", "cute_direct", "gluon", "eager", "sdpa", "dense_compiled", "dense")
    return tuple(path for path in order if path != asked and support(path, case))


def support(path: str, case: Case) -> Support:
    """Whether a path can do a case here; the reason is the end of a sentence that begins with the path's name."""
    kind, head_dim, dtype = case.device.type, case.q.shape[-1], case.q.dtype
    masked = case.mask_mod is not None
    flexible = path in ("eager", "compiled", "cute")
    if flexible and not masks.has_flex() and not (path == "cute" and kind == "cuda"):
        return Support(False, f"needs FlexAttention, which torch {torch.__version__} does not have")
    if path in ("compiled", "dense_compiled") and not (here := compile_support()):
        return Support(False, f"needs torch.compile, and here {here.reason}", here.remedy)
    if path in ("compiled", "dense_compiled") and kind == "cpu" and case.mode in GRAPH_MODES:
        return Support(False, f"with mode {case.mode!r} uses CUDA graphs, and the tensors are on a CPU")
    if path in ("eager", "compiled") and case.needs_grad and kind == "cpu":
        return Support(False, "has no backward pass on a CPU, and an input requires a gradient")
    if flexible and dtype == torch.float64:
        return Support(False, "does not take float64")
    if path == "compiled":
        low, high = (8, 256) if kind == "cpu" else (16, 256)
        if not low <= head_dim <= high:
            return Support(False, f"takes head dimensions {low} to {high} on this device, not {head_dim}")
        if kind == "cuda" and masked and (least := _smallest(case)) < SMALLEST_TILE:
            return Support(
                False,
                f"takes blocks of {SMALLEST_TILE} tokens or a multiple, and the block size is "
                f"{least} (of {case.block_size[0]} x {case.block_size[1]})",
            )
    if path in ("cute", "cute_direct"):
        return _cute_support(path, case)
    if path == "gluon":
        return _gluon_support(case)
    if path == "sdpa" and case.score_mod is not None:
        return Support(False, f"takes no score modifier, and {name_of(case.score_mod)} was given")
    return Support(True)


def _cute_support(path: str, case: Case) -> Support:
    head_dim = case.q.shape[-1]
    if case.device.type != "cuda" or not (cuda := cuda_support()):
        reason = "the tensors are on a CPU" if case.device.type != "cuda" else cuda.reason.rstrip(".")
        return Support(False, f"needs a Hopper or newer NVIDIA GPU, and {reason}")
    if not (here := flash_attn_support(4)):
        return Support(False, f"needs flash-attn-4: {here.reason.rstrip('.')}", here.remedy)
    if case.q.dtype not in (torch.float16, torch.bfloat16):
        return Support(False, f"takes float16 and bfloat16, not {str(case.q.dtype).removeprefix('torch.')}")
    if case.needs_grad:
        return Support(False, "is used forward only here, and an input requires a gradient")
    if head_dim % 8 or head_dim > 256:
        return Support(False, f"takes head dimensions that are multiples of 8 up to 256, not {head_dim}")
    if _own_mask(path, case):
        return Support(True)
    if head_dim > 128:
        return Support(
            False,
            "with a block mask takes head dimensions up to 128 (from there on its key tile does not "
            f"divide the blocks), not {head_dim}",
        )
    if case.block_size[1] != 128 or case.block_size[0] % 64:
        return Support(
            False,
            "takes blocks of 128 keys and a multiple of 64 queries, and the block size is "
            f"{case.block_size[0]} x {case.block_size[1]}",
        )
    return Support(True)


def _own_mask(path: str, case: Case) -> bool:
    """Whether the kernel does the mask by itself: no block mask, no mask function."""
    if path == "cute" and masks.has_flex():
        return case.mask_mod is None
    return kernel_mask(case.mask_mod, *case.lengths) is not None


def _gluon_support(case: Case) -> Support:
    if case.device.type != "cuda":
        return Support(False, "needs a Hopper GPU, and the tensors are on a CPU")
    if not (here := gluon_support()):
        return Support(False, f"does not run here: {here.reason.rstrip('.')}", here.remedy)
    if case.score_mod is not None:
        return Support(False, f"takes no score modifier, and {name_of(case.score_mod)} was given")
    mask = kernel_mask(case.mask_mod, *case.lengths, documents=not case.grouped)
    if mask is None:
        return Support(
            False,
            "takes causal, sliding_window, documents(span) and both(causal, documents(span)) with as "
            "many queries as keys (documents: as many heads of K as of Q, a span that divides the "
            f"length), and the mask is {name_of(case.mask_mod)}",
        )
    if case.q.dtype not in (torch.float16, torch.bfloat16):
        return Support(False, f"takes float16 and bfloat16, not {str(case.q.dtype).removeprefix('torch.')}")
    if case.needs_grad:
        return Support(False, "has no backward pass, and an input requires a gradient")
    if case.q.shape[-1] % 8 or case.q.shape[-1] > 256:
        return Support(False, f"takes head dimensions that are multiples of 8 up to 256, not {case.q.shape[-1]}")
    return Support(True)


def _smallest(case: Case) -> int:
    return min(size & -size for size in case.block_size)  # the largest power of two in it: the tile it allows
