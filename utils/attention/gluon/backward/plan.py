"""Tiles of each kernel of the backward ladder: plain Python, no Triton.

Gluon's tile shapes are powers of two; shared memory has 227 KiB for a block. Sizes and masks are arguments of a launch and no
constants, so one kernel for each head dimension takes all masks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from utils.attention.gluon.plan import block_head_dim

STEPS = 1, 3, 6
EVERYTHING = 1 << 29  # a window that holds all keys; a sum of two positions and a window fits in 32 bits


@dataclass(frozen=True)
class BackwardPlan:
    """The tile of one kernel; each plan has its compiled kernel."""

    block_d: int  # columns of a tile: the head dimension, rounded up
    block_m: int  # queries of a tile, the inner loop
    block_n: int  # keys of a block
    # "ends": a row of tiles needs a mask at its ends; "packed": at the ends in the table of `gluon/intervals.py`.
    mask: str = "ends"
    dq: bool = True  # whether this kernel sums dQ; in deterministic mode `dq.py` computes it
    depth: int = 0  # 80 or 96: step 6 computes so many columns instead of 128; 0: all columns


_FIRST = BackwardPlan(128, 64, 64)
_TILES = {64: BackwardPlan(64, 128, 128), 128: BackwardPlan(128, 64, 128), 256: BackwardPlan(256, 64, 64, dq=False)}


def plan_for(step: int, head_dim: int, deterministic: bool = False, mask: str = "ends") -> BackwardPlan:
    """Return the plan of step 1, 3 or 6; at head dimension 256 step 6 is the kernel of `wide_heads.py`."""
    if step not in STEPS or (step < 6 and (deterministic or head_dim > 128)):
        raise ValueError(
            f"The backward ladder has the steps 1, 3, 6; 1 and 3 take head dimensions up to 128, and are not deterministic. "
            f"Given: step {step!r}, head dimension {head_dim}, deterministic={deterministic}."
        )
    tile = _FIRST if step == 1 else _TILES[128 if step == 3 else block_head_dim(head_dim)]
    if step < 6 or tile.block_d == 256:
        return tile
    depth = -(-head_dim // 16) * 16 if 64 < head_dim <= 96 else 0
    return replace(tile, mask=mask, dq=not deterministic, depth=depth)


def span(causal: bool, window: int) -> tuple[int, int]:
    """Return how many keys before and after its position a query sees. window 0: only `causal` is a limit."""
    reach = window - 1 if window else EVERYTHING
    return reach, 0 if causal else reach
