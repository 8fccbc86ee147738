"""Tiles and slots of each step, and which tile step 5 takes for an attention: plain Python, no Triton.

Chosen on an H200 and an H100. Gluon's shapes are powers of two. Shared memory holds 227 KiB a block; a thread has at most 255
registers, an SM 65536: 2 x 128 x 240 + 128 x 24 for two consumers and a producer, 3 x 128 x 160 + 128 x 32 for three.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from utils.attention.gluon.dealing import TILE_OVERHEAD

BLOCK_M = 64  # query rows of a warpgroup: one wgmma m64
STEPS = {
    1: "one warpgroup, synchronous",
    2: "cp.async, double-buffered",
    3: "TMA and mbarriers",
    4: "warp-specialized",
    5: "overlapped and persistent",
}
HEAD_DIMS = (64, 128, 256)  # widths of tiles; any multiple of 8 up to 256 runs in the next larger one


@dataclass(frozen=True)
class Plan:
    """Tile and pipeline of one kernel: five numbers, and what follows from them.

    All are fields, because Triton finds a compiled kernel again by the text of its plan's fields.

    columns: widths of the products that a tile's columns are computed in, powers of two. Beyond their sum the tile has zeros.
    block_n: keys of a block.
    consumers: warpgroups that compute, 64 query rows each.
    stages: slots of the K ring.
    ahead: a tile's end overlaps the next tile's start (`consumer_ahead`).
    """

    columns: tuple[int, ...]
    block_n: int
    consumers: int = 1
    stages: int = 2
    ahead: bool = False

    rows: int = field(init=False)  # query rows of a block
    block_d: int = field(init=False)  # width of a tile
    registers: int = field(init=False)  # of a consumer's thread
    halves: bool = field(init=False)  # rows r and r + 8 of a warp have a softmax each (softmax.py); takes 240 registers
    v_stages: int = field(init=False)  # slots of the V ring: V's is released half a block later than K's
    q_slots: int = field(init=False)  # tiles of Q; with two, the next tile's Q comes while this one is computed
    o_in_q: bool = field(init=False)  # the output leaves through Q's tile, for which there is no room beside it
    own_keys: bool = field(init=False)  # each consumer starts at its own rows' last block, not at the tile's

    def __post_init__(self):
        wide = sum(self.columns) > 64
        derived = {
            "rows": BLOCK_M * self.consumers,
            "block_d": block_head_dim(sum(self.columns)),
            "registers": 160 if self.consumers == 3 else 240,
            "halves": self.consumers < 3,
            "v_stages": self.stages + wide,
            "q_slots": 1 if sum(self.columns) > 128 else 2,
            "o_in_q": wide,
            "own_keys": BLOCK_M * self.consumers > self.block_n and not self.ahead,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Case:
    """What an attention needs of step 5's kernel beside its plan: a kernel is compiled for each.

    window: the mask has two edges; whether it is causal, too, is decided at each launch. causal: the mask has one edge, the diagonal.
    parts: programs share the keys of a tile (`parts_for`). offset: a head's first tile may begin before its first query (`row_offset`).
    """

    causal: bool = False
    window: bool = False
    parts: bool = False
    offset: bool = False


def case_for(plan: Plan, causal: bool, window: bool, parts: bool, offset: int) -> Case:
    """Return the case of an attention, the same for any offset where the store of such rows has registers enough.

    With 160 registers it would move a row's maximum behind the other row's exponentials: 10% of a block.
    """
    diagonal = causal and not window
    return Case(diagonal, window, parts, diagonal and (plan.halves or offset > 0))


def block_head_dim(head_dim: int) -> int:
    """Return the tile width that holds a head dimension: 64, 128 or 256."""
    return next(width for width in HEAD_DIMS if head_dim <= width)


# Step 5's plans, by head dimension and variant (`variant_for`).
_COLUMNS = {64: (64,), 96: (64, 32), 128: (128,), 256: (256,)}
_STEP_5 = {
    (64, ""): Plan((64,), 128, 3, 4),
    (64, "ahead"): Plan((64,), 128, 2, 3, ahead=True),
    (64, "few"): Plan((64,), 128, 2, 3),
    (64, "one"): Plan((64,), 128, 1, 4),
    (256, ""): Plan((256,), 64, 2, 2),
    (256, "one"): Plan((256,), 64, 1, 2),
}
for _width in (96, 128):
    _STEP_5[_width, ""] = Plan(_COLUMNS[_width], 128, 2, 2)
    _STEP_5[_width, "ahead"] = Plan(_COLUMNS[_width], 128, 2, 2, ahead=True)
    _STEP_5[_width, "one"] = Plan(_COLUMNS[_width], 128, 1, 2)


def plan_for(step: int, head_dim: int, variant: str = "") -> Plan:
    """Return the plan of a step of the ladder for a head dimension. variant: of step 5, see `variant_for`."""
    d = block_head_dim(head_dim)
    if step in (1, 2):
        return Plan((d,), 32 if d == 256 else 64)
    if step == 3:
        return Plan((d,), 64 if d == 256 else 128)
    if step == 4:
        return Plan((d,), 64 if d == 256 else 128, 3 if d == 64 else 2, 3 if d == 64 else 2)
    if step == 5:
        width = _width_of(head_dim)
        return _STEP_5.get((width, variant)) or _STEP_5[width, ""]
    raise ValueError(f"The ladder has the steps 1 to 5; got step {step!r}.")


def _width_of(head_dim: int) -> int:
    """Return the head dimension whose plans step 5 takes."""
    return next(width for width in _COLUMNS if head_dim <= width)


def row_offset(plan: Plan, causal: bool, window: bool, shift: int) -> int:
    """Return how many rows before the first query the tiles of step 5 begin. shift: Sk - Sq.

    Where a consumer's 64 rows (or a tile's, if all its consumers walk over the same blocks) begin at the position of a
    block's first key or its middle one, their diagonal lies in one block, and the others need no mask.
    """
    return shift % (BLOCK_M if plan.own_keys else plan.rows) if causal and not window else 0


def row_tiles(plan: Plan, sq: int, sk: int, causal: bool, window: int) -> int:
    """Return how many tiles the rows of a head make, the rows before the first query included (`row_offset`)."""
    return -(-(sq + row_offset(plan, causal, window > 0, sk - sq)) // plan.rows)


def tile_blocks(plan: Plan, sq: int, sk: int, causal: bool, window: int) -> list[int]:
    """Return how many blocks of keys each row tile of a head sees (`shared.key_blocks`), from the first to the last."""
    last, shift, found = -(-sk // plan.block_n), sk - sq, []
    for row in range(-row_offset(plan, causal, window > 0, shift), sq, plan.rows):
        behind = row + plan.rows + shift + (0 if causal else window - 1)  # of the first key that no row sees
        high = min(last, -(-max(behind, 0) // plan.block_n)) if causal or window else last
        low = min(max(row + shift - window + 1, 0) // plan.block_n, last - 1) if window else 0
        found.append(max(high - low, 1))
    return found


def variant_for(head_dim: int, causal: bool, window: int, sq: int, sk: int, heads: int, programs: int) -> str:
    """Name the variant of step 5's plan that an attention takes.

    window: 0 for none. heads: of all sequences. programs: multiprocessors.

    "one": one consumer, where even tiles of 64 rows are fewer than programs. "few": at head dimension 64 smaller tiles and more
    registers, where there are few tiles or many masks. "ahead": full attention, where one tile's end overlaps the next tile's
    start. "": any other.
    """
    d = _width_of(head_dim)
    whole, one = _STEP_5[d, ""], _STEP_5[d, "one"]
    two = _STEP_5.get((d, "few"), whole)
    sizes = sq, sk, heads, causal, window, programs
    full = not (causal or window) and d < 256 and sk > whole.block_n  # a tile of one block has no end to overlap
    if row_tiles(two, sq, sk, causal, window) * heads <= programs:  # a program has one tile, or a part of one
        time, parts = shared_time(two, *sizes)
        if row_tiles(one, sq, sk, causal, window) * heads <= programs and shared_time(one, *sizes)[0] < time:
            return "one"
        return "ahead" if full and parts == 1 else "few" if d == 64 else ""
    if causal or window:
        return "few" if d == 64 and _few_pays(*sizes) else ""
    return "ahead" if full and (d > 64 or _ahead_pays(sq, sk, heads, programs)) else ""


def _few_pays(sq: int, sk: int, heads: int, causal: bool, window: int, programs: int) -> bool:
    """Whether at head dimension 64 a masked attention is faster in tiles of 128 rows, with more registers, than of 192."""
    whole, few = _STEP_5[64, ""], _STEP_5[64, "few"]
    if not window:  # a causal block takes "few" 1.13 times as long
        return 1.13 * busiest(few, sq, sk, heads, programs) < busiest(whole, sq, sk, heads, programs)
    # Where a quarter of a tile's blocks are masked, a row takes "few" 1.2 times as long.
    masked = 3 if causal else 5  # blocks of a tile that the window's edges, or the diagonal, go through
    rounds, more = (-(-(-(-sq // plan.rows) * heads) // programs) * plan.rows for plan in (whole, few))
    return 4 * masked > visible(whole, sk, causal, window) and 1.25 * more <= rounds


def _ahead_pays(sq: int, sk: int, heads: int, programs: int) -> bool:
    """Whether at head dimension 64 full attention is faster in tiles of 128 rows that overlap than in tiles of 192.

    A round of 192 rows takes 4/3 as long for each block of keys, and for a tile's start and end, which nothing overlaps there,
    as long as 2.7 blocks, not 2.
    """
    ahead, whole = (-(-(-(-sq // _STEP_5[64, name].rows) * heads) // programs) for name in ("ahead", ""))
    blocks = -(-sk // _STEP_5[64, ""].block_n)
    return 3 * ahead * (blocks + 2) <= 4 * whole * (blocks + 2.7)


@functools.lru_cache(maxsize=256)
def busiest(plan: Plan, sq: int, sk: int, heads: int, programs: int) -> float:
    """Return the least work that the busiest program of a causal attention has: in blocks of 64 rows and 128 keys.

    It has the mean at least. And of the k * programs + 1 longest tiles some program has k + 1, the shortest of them at best.
    """
    lengths = sorted((n + TILE_OVERHEAD for n in tile_blocks(plan, sq, sk, True, 0)), reverse=True)
    tiles = len(lengths) * heads
    bounds = [sum(lengths) * heads / programs]
    for k in range(min((tiles - 1) // programs, 8) + 1):
        bounds.append(sum(lengths[i // heads] for i in range(k * programs - k, k * programs + 1)))
    return max(bounds) * plan.rows * plan.block_n / (64 * 128)


MOST_PARTS = 8  # of a tile
# The time of a block of keys with one consumer, beside that with two.
_ONE_CONSUMER = 0.65
# What programs pay for sharing a tile, in blocks of keys of two consumers: for leaving their parts, for waiting, and for adding up
# their share of the rows, whose bytes do not depend on the number of parts. By tile width: one consumer, two.
_SHARING = {64: (3.0, 3.0), 128: (4.0, 4.0), 256: (4.5, 7.0)}


def visible(plan: Plan, sk: int, causal: bool, window: int) -> int:
    """Return how many blocks of keys the rows of one tile see at most."""
    blocks = -(-sk // plan.block_n)
    if window:
        blocks = min(blocks, (plan.rows + (1 if causal else 2) * (window - 1) - 1) // plan.block_n + 2)
    return blocks


def shared_time(
    plan: Plan, sq: int, sk: int, heads: int, causal: bool, window: int, programs: int
) -> tuple[float, int]:
    """Return the time of a program that has one tile or shares it, in blocks of keys, and how many programs should share it."""
    tiles, blocks = row_tiles(plan, sq, sk, causal, window) * heads, visible(plan, sk, causal, window)
    most = 1 if plan.ahead or plan.consumers > 2 or window else min(programs // tiles, blocks, MOST_PARTS)
    block = _ONE_CONSUMER if plan.consumers == 1 else 1.0
    times = [(block * blocks, 1)]
    sharing = _SHARING[plan.block_d][plan.consumers > 1]
    times += [(block * -(-blocks // parts) + sharing, parts) for parts in range(2, most + 1)]
    return min(times)


def parts_for(plan: Plan, sq: int, sk: int, heads: int, causal: bool, window: int, programs: int) -> int:
    """Return how many programs share the keys of a tile: more than one where there are more programs than tiles, and no window."""
    return shared_time(plan, sq, sk, heads, causal, window, programs)[1]
