"""Masks that a kernel does by itself, without a mask function: causal, a window, documents as sequences of their own.

Such a kernel walks only the blocks it needs in an order of its own and masks with two comparisons: faster than the
same mask as a function, for the few masks it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from utils.attention.masks import causal


@dataclass(frozen=True)
class KernelMask:
    """What the kernel is told instead of a mask function."""

    causal: bool = False
    window: int | None = None  # with causal: the last keys that a query sees, its own included
    span: int | None = None  # documents of this many tokens, each a sequence of its own

    def __str__(self) -> str:
        parts = ["causal"] if self.causal else []
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"documents of {self.span} as sequences"] if self.span else []
        return ", ".join(parts) or "no mask"


def kernel_mask(mask_mod: Callable | None, sq: int, sk: int, documents: bool = False) -> KernelMask | None:
    """How a kernel is told this mask; None if it needs the function. `documents`: those of equal length too."""
    if mask_mod is None:
        return KernelMask()
    if sq != sk:  # a kernel's masks end at the last key, a mask function's begin at the first
        return None
    if mask_mod is causal:
        return KernelMask(causal=True)
    kind, parts = getattr(mask_mod, "kind", ""), getattr(mask_mod, "mods", (mask_mod,))
    if kind == "sliding_window":
        return KernelMask(causal=True, window=mask_mod.window)
    if not documents or kind not in ("both", "documents"):
        return None
    spans = [part.span for part in parts if getattr(part, "kind", "") == "documents"]
    others = [part for part in parts if getattr(part, "kind", "") != "documents"]
    if len(spans) != 1 or sq % spans[0] or any(part is not causal for part in others):
        return None
    return KernelMask(causal=bool(others), span=spans[0])
