"""Tiles, slots and registers of each step of the backward ladder: plain Python, no Triton.

Chosen on an H200 (docs/backward-log.md). Gluon's tile shapes are powers of two; shared memory holds 227 KiB a block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from utils.attention.gluon.plan import block_head_dim

STEPS = {
    1: "one warpgroup, synchronous, atomics",
    2: "TMA and mbarriers",
    3: "warp-specialized",
    4: "overlapped",
    5: "a warp that stores dQ",
    6: "one consumer, block after block",
}
PIECE = 64  # dQ is summed in pieces of 64 queries x 64 columns (`fragments.py`)


@dataclass(frozen=True)
class BackwardPlan:
    """Tile and pipeline of one kernel; a kernel is compiled for a plan."""

    block_d: int  # tile width: the head dimension, rounded up
    block_m: int  # queries of a tile, the inner loop
    block_n: int  # keys of a block
    q_slots: int = 2  # slots of the ring of Q and lse
    do_slots: int = 2  # slots of the ring of dO and delta
    ds_slots: int = 2  # tiles of dS, which both consumers write and read
    by_tma: bool = False  # head dimension 256 and step 5: TMA adds dQ to the sums, not the threads
    stagger: bool = False  # step 5, without a mask: block n starts at tile n; fewer blocks add to the same rows of dQ
    producer_first: bool = False  # steps 5 and 6, where threads add: the producer is the default partition
    v_left: bool = False  # steps 5 and 6: the first 64 columns of V stay in registers, as a left operand of dP^T
    left: int = 0  # head dimension 256, dQ apart: so many columns of K and V stay in registers, as left operands
    queue: bool = False  # step 6: as many programs as SMs take block after block (`queue.py`)
    split: bool = False  # step 6: blocks are split where that ends earlier (`balance.py`)
    even: bool = False  # step 6, with queue: each program has an equal share of all tiles (`queue.py`)
    named: bool = False  # step 6: slots are given back at named barriers, by an arrival of each warp
    storer_fences: bool = False  # step 6, with by_tma: the storing warp fences dQ, and the consumer does not
    by_polynomial: int = 0  # step 6: of eight exponentials, so many are polynomials (`exponentials.py`)
    divided: bool = False  # step 6: half of the exponentials stand in front of the wait for dP^T
    registers: int = 240  # of a consumer thread

    def __post_init__(self) -> None:
        """Refuse fields that no kernel has together."""
        if self.by_tma and self.producer_first:
            raise ValueError(
                "by_tma and producer_first exclude each other: the storing warp needs the registers. Set one of them."
            )
        if self.even and (self.split or not self.queue):
            raise ValueError(
                "even needs queue=True and split=False: a program takes parts of blocks one after another."
            )


@dataclass(frozen=True)
class BackwardCase:
    """What a backward pass needs of a kernel: a kernel is compiled for each.

    tail: the keys are no multiple of a block. dq: whether dQ is summed here; in deterministic mode a kernel of its own
    computes it (`dq.py`).
    """

    causal: bool = False
    window: bool = False
    tail: bool = False
    dq: bool = True


FASTEST = {64: 5, 128: 5, 256: 4}  # the fastest step, by tile width, with a window or in deterministic mode
FASTEST_FULL = {64: 6, 128: 6, 256: 4}  # without a mask
FASTEST_CAUSAL = {64: 6, 128: 6, 256: 4}
_DQ_APART = (256,)  # tile widths at which computing dQ by itself is faster than adding it up
_SIMPLE = {d: BackwardPlan(d, 64, 64) for d in (64, 128, 256)}  # steps 1 and 2
_PLANS = {64: BackwardPlan(64, 128, 128), 128: BackwardPlan(128, 64, 128), 256: BackwardPlan(256, 64, 64, left=128)}


def plan_for(step: int, head_dim: int, causal: bool = False) -> BackwardPlan:
    """Return the plan of a step of the backward ladder for a head dimension; causal: whether the mask is."""
    if step not in STEPS:
        raise ValueError(f"The backward ladder has the steps {', '.join(map(str, STEPS))}; got step {step!r}.")
    plan = (_SIMPLE if step < 3 else _PLANS)[block_head_dim(head_dim)]
    if step < 5 or plan.block_d == 256:
        return plan
    # Step 6: a queue, and where all blocks take the same time those of the last round are split. Under a mask the next block
    # is drawn late (`queue.py`), which gains 1 to 4% over a program for each block.
    split = step == 6 and not causal
    if step == 6:
        # What a tile waits for most is the exponential unit (docs/backward-log.md, entries 45 and 46).
        plan = replace(plan, by_polynomial=2, divided=plan.block_d == 64 and causal)
    if plan.block_d == 128:
        fences = step == 6 and causal
        return replace(plan, by_tma=True, v_left=True, queue=step == 6, split=split, storer_fences=fences)
    if step == 6:
        return replace(plan, by_tma=True, named=True, storer_fences=True, queue=True, split=split)
    # At 64 the storing warp's share of the registers costs more than it saves where each warpgroup is a role.
    return replace(plan, producer_first=causal, stagger=not causal)


def fastest_step(head_dim: int, *, causal: bool = False, window: bool = False, deterministic: bool = False) -> int:
    """Return the step that was measured fastest.

    Args:
        head_dim: Head dimension.
        causal: Whether the mask is causal.
        window: Whether there is a sliding window, which no measurement of step 6 had.
        deterministic: Whether the same inputs must give the same bits.
    """
    width = block_head_dim(head_dim)
    if window or deterministic:
        return FASTEST[width]
    return (FASTEST_CAUSAL if causal else FASTEST_FULL)[width]


def dq_apart(head_dim: int) -> bool:
    """Tell whether a head dimension's fastest way is the deterministic one, with a kernel of its own for dQ."""
    return block_head_dim(head_dim) in _DQ_APART
