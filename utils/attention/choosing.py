"""The order in which `attention(backend="auto")` tries backends.

This file imports no backend, because `call` imports the backends and this file.
"""

from __future__ import annotations

from utils.attention.masks.mask_mods import MaskMod
from utils.attention.problem import Options, Problem

# The order without mask functions: Gluon on Hopper, else FlashAttention 3 (the fastest backward pass over all head
# dimensions), else flash-attn, else SDPA's backends by their speed on a GPU. A CPU runs flash, math and naive.
PLAIN_ORDER = dict.fromkeys(
    ("gluon", "fa3", "cute", "flash_attn", "cudnn", "flash", "efficient", "math", "naive"),
    "the first in the fixed order that can do this",
)
# The order with mask functions, score modifiers or options of a block mask, with the reason for each place. It was measured on
# an H200 (docs/flexattention.md).
_STORED = "no fused backend does this here"
FUNCTION_ORDER = {
    "gluon": "the Gluon kernel does this mask by itself, and is persistent",
    "flex_flash": "FlashAttention 4's pipeline under any mask function",
    "flex": "inductor's kernel under any mask function; FlashAttention 4 cannot do this here",
    "flex_eager": _STORED,
    "sdpa": _STORED,
    "naive_compiled": _STORED,
    "naive": _STORED,
}
# A small mask of lengths is stored as a tensor: a compiled kernel would serve these lengths only, after seconds of compiling.
STORED_PAIRS = 2**28
_LENGTHS = "the lengths change from call to call, and a kernel would be compiled for each"
LENGTHS_ORDER = {"sdpa": _LENGTHS, "naive": _LENGTHS} | FUNCTION_ORDER
# Kernels that skip the keys of other packed sequences.
PACKED = dict.fromkeys(("gluon", "fa3", "varlen"), "it does packed sequences by itself, of any lengths")
# FlashAttention 4 does some masks by itself. It is ahead of Gluon at head dimensions up to 64.
CUTE = {"cute": "FlashAttention 4 does this mask by itself"}


def rank_backends(problem: Problem, options: Options) -> dict[str, str]:
    """Return the names of the backends that "auto" tries, best first, with the reason for each."""
    if options.option_names:
        return FUNCTION_ORDER
    if problem.mask_mod is None and problem.score_mod is None:
        return PLAIN_ORDER
    plain, order = problem.plain_or_packed(), FUNCTION_ORDER
    if plain is not None and plain.sq == problem.sq and not plain.lengths:
        gluon = {"gluon": order["gluon"]}
        order = (CUTE | order) if problem.head_dim <= 64 else (gluon | CUTE | order)
    elif of_lengths(problem.mask_mod) and problem.batch * problem.sq * problem.sk <= STORED_PAIRS:
        order = LENGTHS_ORDER
    return PACKED | order if plain is not None and plain.lengths else order


def of_lengths(mask_mod: MaskMod | None) -> bool:
    """Whether a mask, or a part of it, comes from the lengths of one call."""
    return hasattr(mask_mod, "lengths") or any(map(of_lengths, getattr(mask_mod, "mods", ())))
