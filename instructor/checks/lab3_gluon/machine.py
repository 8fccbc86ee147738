"""Parts 1 and 2: time and memory of a tile, and which thread holds which element."""

from __future__ import annotations

from instructor.checks.common import Draw, expect_counts
from utils.checking import check
from utils.checking.labs.lab3_gluon import rules

TENSOR, SPECIAL, MEMORY = 4096, 16, 20  # rates of one SM in a cycle: bf16 FLOPs, exponentials, bytes from memory


@check("1.1", "What a tile costs")
def tile_cycles(tile_cycles, seed=None):
    """Check the cycles of one block of keys on the tensor cores, the special function units and the path from memory."""
    draw = Draw(seed)
    # Every case has new sizes: if one size hides a mistake, the next size shows it.
    drawn = draw.choose(3, (64, 128, 192, 256)), draw.choose(3, range(32, 193, 32)), draw.choose(3, (64, 96, 128, 256))
    for rows, keys, d in zip(*drawn, strict=True):
        right = (4 * rows * keys * d / TENSOR, rows * keys / SPECIAL, 4 * keys * d / MEMORY)
        rules.expect_cycles(tile_cycles, (rows, keys, d), right)


@check("1.1", "What a tile needs")
def tile_budget(shared_bytes, registers_per_thread, seed=None):
    """Check the shared memory of a block, and the registers of a consumer thread for scores and output."""
    draw = Draw(seed)
    # No number of keys equals a head dimension, and no two mistakes lead to the same number of bytes.
    drawn = draw.sizes(3, 1, 3), draw.choose(3, (96, 160, 192)), draw.choose(3, (64, 128, 256)), draw.sizes(3, 1, 4)
    for consumers, keys, d, stages in zip(*drawn, strict=True):
        q, ring = 64 * consumers * d * 2, 2 * stages * keys * d * 2
        rules.expect_shared_bytes(shared_bytes, (consumers, keys, d, stages), q, ring)
        rules.expect_registers(registers_per_thread, (keys, d), 64 * (keys + d) / 128)


@check("2.1", "Who holds an element")
def owner(owner, seed=None):
    """Compare (warp, lane, register) of elements in blocked layouts with Triton's own layout algebra."""
    from triton.experimental.gluon import language as gl

    from utils.gluon_cpu.layouts import elements_of

    draw = Draw(seed)
    powers = {
        2: ((1, 2), (2, 1)),
        4: ((1, 4), (2, 2), (4, 1)),
        8: ((1, 8), (2, 4), (4, 2), (8, 1)),
        32: ((1, 32), (2, 16), (4, 8), (8, 4), (16, 2), (32, 1)),
    }
    once = (draw.choice((1, 2)), draw.choice((1, 2)))
    for order, repeats in (((1, 0), (2, 2)), ((0, 1), (2, 2)), (draw.choice(((1, 0), (0, 1))), once)):
        size, threads = draw.choice(powers[draw.choice((2, 4, 8))]), draw.choice(powers[32])
        warps = draw.choice(powers[draw.choice((2, 4))])
        tile = [size[i] * threads[i] * warps[i] for i in range(2)]
        shape = (tile[0] * repeats[0], tile[1] * repeats[1])
        layout = gl.BlockedLayout(list(size), list(threads), list(warps), list(order))
        held = elements_of(layout, shape, warps[0] * warps[1])  # (registers, lanes, warps)
        for _ in range(12):
            r, t, w = draw.size(0, held.shape[0] - 1), draw.size(0, 31), draw.size(0, held.shape[2] - 1)
            row, column = divmod(int(held[r, t, w]), shape[1])
            what = f"owner({row}, {column}, {shape}, {size}, {threads}, {warps}, {order})"
            got = owner(row, column, shape, size, threads, warps, order)
            known = {
                words: _owner(row, column, shape, size, threads, warps, order, slip) for words, slip in SLIPS.items()
            }
            expect_counts(got, (w, t, r), ("warp", "lane", "register"), what, known)


SLIPS = {
    "`order` names the fastest dimension first: (1, 0) counts along columns first.": "backwards",
    "A warp has lanes 0 to 31: its grid of pieces repeats from warp to warp.": "lanes",
    "Repetitions are counted in the layout's order, too.": "repetitions",
    "Registers count first within the piece of a thread, and then over the repetitions.": "pieces",
    "A tensor that is larger than the layout's tile repeats it: each repetition takes further registers.": "once",
}


def _owner(row, column, shape, size, threads, warps, order, slip=""):
    """Compute the answer by the rule; for a hint, compute it with one of the SLIPS."""
    order = order[::-1] if slip == "backwards" else order

    def flat(at, extent, order=order):
        fast, slow = order
        return at[fast] + extent[fast] * at[slow]

    at = (row, column)
    inside = [at[i] % size[i] for i in (0, 1)]
    lane = [at[i] // size[i] % (threads[i] if slip != "lanes" else shape[i]) for i in (0, 1)]
    warp = [at[i] // (size[i] * threads[i]) % warps[i] for i in (0, 1)]
    tile = [size[i] * threads[i] * warps[i] for i in (0, 1)]
    repeat = [at[i] // tile[i] for i in (0, 1)]
    repeats = [shape[i] // tile[i] for i in (0, 1)]
    again = flat(repeat, repeats, order[::-1] if slip == "repetitions" else order)
    register = flat(inside, size) + (size[0] * size[1] * again if slip != "once" else 0)
    if slip == "pieces":
        register = again + repeats[0] * repeats[1] * flat(inside, size)
    return flat(warp, warps), flat(lane, threads), register
