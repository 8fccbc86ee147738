"""The SM's clock at points of step 5's roles, for `tools/record/attention_clocks.py`. The kernel that attention runs has none of it.

With `Case.clocks` each warp writes the clock to entries of its own in global memory, where parts of tiles would be: one instruction
reads it, one stores it, and nothing waits for that. A warp's entries are a ring for its last blocks, and behind it one for its last tiles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCKS, TILES = 64, 16  # entries of a warp
WORDS = 16  # of 32 bits in an entry, one for each point
BLOCK_POINTS = (
    "begins",
    "scores handed over",
    "V there",
    "output handed over",
    "scores there",
    "softmax",  # with halves the first one
    "next K there",
    "output there",
    "ends",
)
LOAD_POINTS = ("begins", "K loads", "V's turn", "V loads")  # of the producer's block
TILE_POINTS = (
    "begins",
    "Q there",
    "first softmax",
    "loop begins",
    "loop ends",
    "last output handed over",
    "last output there",
    "stored",
    "blocks in the loop",  # a number
    "nanoseconds",  # at the loop's end
    "kernel begins",  # these three of a program's first tile, by the first consumer's warps, which make the barriers
    "barriers ready",
    "roles begin",
)

_WORD_OF = {name: word for table in (BLOCK_POINTS, LOAD_POINTS, TILE_POINTS) for word, name in enumerate(table)}
_BLOCKS, _TILES, _WORDS = gl.constexpr(BLOCKS), gl.constexpr(TILES), gl.constexpr(WORDS)


@gluon.constexpr_function
def _own_asm(words):
    # The address of this thread's warp: each has so many words.
    return (
        "{ .reg .b32 t; .reg .b64 a; mov.u32 t, %tid.x; shr.u32 t, t, 5; "
        f"mul.wide.u32 a, t, {4 * words}; add.u64 $0, $1, a; }}"
    )


@gluon.constexpr_function
def _keep_asm(register, point):
    return f"{{ .reg .b32 t; mov.u32 t, {register}; st.global.b32 [$1+{4 * _WORD_OF[point]}], t; mov.u32 $0, 0; }}"


@gluon.constexpr_function
def _keep_number_asm(point):
    return f"st.global.b32 [$1+{4 * _WORD_OF[point]}], $2; mov.u32 $0, 0;"


@gluon.jit
def own_entries(work):
    """Where this warp's entries begin; without clocks a pointer that nobody uses."""
    if work.CASE.clocks:
        OWN: gl.constexpr = (_BLOCKS + _TILES) * _WORDS
        WARPS: gl.constexpr = 4 * work.PLAN.consumers + 1
        first = work.parts.results + gl.program_id(0) * (WARPS * OWN)
        asm: gl.constexpr = _own_asm(OWN)
        return gl.inline_asm_elementwise(asm, "=l,l", [first], dtype=first.dtype, is_pure=True, pack=1)
    else:
        return work.parts.results


@gluon.jit
def block_entry(work, entries, number):
    """Where the clocks of block `number` go."""
    return entries + number % _BLOCKS * _WORDS if work.CASE.clocks else entries


@gluon.jit
def tile_entry(work, entries, i):
    """Where the clocks of this program's tile i go."""
    return entries + (_BLOCKS + i % _TILES) * _WORDS if work.CASE.clocks else entries


@gluon.jit
def keep_clock(work, entry, POINT: gl.constexpr):
    """With `Case.clocks`, keep the SM's clock for a point of the tables above, by its name.

    Without an entry nothing is kept, and nothing is asked of `work.CASE`: decode shares the blocks of step 5.
    """
    if entry is not None:  # noqa: SIM102 (both decided by the compiler, the second only where there is an entry)
        if work.CASE.clocks:
            asm: gl.constexpr = _keep_asm("%clock", POINT)
            gl.inline_asm_elementwise(asm, "=r,l", [entry], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def clock_now(work_case: gl.constexpr):
    """The SM's clock, with `Case.clocks`; else zero, and nothing is read."""
    if work_case.clocks:
        return gl.inline_asm_elementwise(
            "mov.u32 $0, %clock;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        return gl.to_tensor(0)


@gluon.jit
def keep_start(work, begins, ready):
    """With `Case.clocks`, keep when the kernel began, when its barriers were made, and now, as the roles begin."""
    if work.CASE.clocks:
        entry = tile_entry(work, own_entries(work), 0)
        began: gl.constexpr = _keep_number_asm("kernel begins")
        gl.inline_asm_elementwise(began, "=r,l,r", [entry, begins], dtype=gl.int32, is_pure=False, pack=1)
        made: gl.constexpr = _keep_number_asm("barriers ready")
        gl.inline_asm_elementwise(made, "=r,l,r", [entry, ready], dtype=gl.int32, is_pure=False, pack=1)
        keep_clock(work, entry, "roles begin")


@gluon.jit
def keep_loop(work, entry, blocks):
    """With `Case.clocks`, keep how many blocks a tile's loop has had, and the time in nanoseconds, the same in all SMs."""
    if work.CASE.clocks:
        asm: gl.constexpr = _keep_number_asm("blocks in the loop")
        gl.inline_asm_elementwise(asm, "=r,l,r", [entry, blocks], dtype=gl.int32, is_pure=False, pack=1)
        time: gl.constexpr = _keep_asm("%globaltimer_lo", "nanoseconds")
        gl.inline_asm_elementwise(time, "=r,l", [entry], dtype=gl.int32, is_pure=False, pack=1)
