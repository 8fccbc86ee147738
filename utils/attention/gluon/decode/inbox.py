"""Merge the parts of a head in shared memory: the programs of a cluster send slices to each other's inboxes.

Each program sends every program of its cluster a slice of its unnormalized output, with the maxima and sums of all rows. The
stores count their bytes on a barrier of the receiver (`st.async`). So a program waits once for all bytes, then adds up its slices
and stores the result. Triton has no clusters, so all of this is PTX.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from utils.attention.gluon.decode import plan
from utils.attention.gluon.decode.merge import inverse
from utils.attention.gluon.shared import MINUS_INF, accumulator, aggregate

NOBODY = gl.constexpr(plan.MOST_PARTS)  # the number of a receiver that no cluster has


@gluon.constexpr_function
def power(n):
    """Return the logarithm of n, a power of two."""
    return n.bit_length() - 1


@aggregate
class Team:
    """The programs of a cluster, which share a head."""

    rank: gl.tensor  # number of this program in the cluster
    bits: gl.tensor  # the cluster has 2^bits programs


@gluon.constexpr_function
def _open_asm(space):
    # The launch asks for more shared memory than Triton knows of, and the barrier and the inbox lie at its end. One thread
    # announces the bytes that will come.
    return (
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %dynamic_smem_size; mov.u32 $0, global_smem; add.u32 $0, $0, t; "
        f"sub.u32 $0, $0, {space}; "
        "mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; @p mbarrier.init.shared::cta.b64 [$0], 1; "
        "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1; "
        "@p fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed; }"
    )


# Wait until all programs have opened their inboxes, and return the place of the numbers. Without the wait, a slice could
# arrive before the barrier is initialized.
JOIN = gl.constexpr("barrier.cluster.wait.acquire; add.u32 $0, $1, 16;")


@gluon.constexpr_function
def _send_asm(pairs):
    # Send a number ($1: place, $2: receiver, $3: barrier that counts the bytes, $4: number), or two numbers to neighbouring
    # places. A receiver that does not exist gets nothing.
    at, owner, barrier, numbers, zeros = "$1", "$2", "$3", "$4", "mov.u32 $0, 0;"
    if pairs == "neighbours":  # two neighbouring elements, with the address of the first
        at, owner, barrier, numbers, zeros = "$2", "$4", "$6", "{$8, $9}", "mov.u32 $0, 0; mov.u32 $1, 0;"
    elif pairs:  # two tensors
        numbers = "{$4, $5}"
    return (
        f"{{ .reg .b32 a, b; .reg .pred p; setp.lt.u32 p, {owner}, {plan.MOST_PARTS}; "
        f"@p mapa.shared::cluster.u32 a, {at}, {owner}; @p mapa.shared::cluster.u32 b, {barrier}, {owner}; "
        f"@p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{'.v2' if pairs else ''}.f32 [a], {numbers}, [b]; "
        f"{zeros} }}"
    )


ARRIVED = gl.constexpr(
    "{ .reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$1], 0; @!p bra again; "
    "mov.u32 $0, 0; }"
)
# A program that ends gives its shared memory back, while stores to it may still be under way. So no program ends before all
# programs have received everything. The wait comes after the last work, when the others have long arrived.
ALL_HAVE = gl.constexpr("barrier.cluster.arrive.relaxed; mov.u32 $0, 0;")
LEAVE = gl.constexpr("barrier.cluster.wait.acquire; mov.u32 $0, 0;")


@gluon.jit
def open_inbox(team, rows, PLAN: gl.constexpr):
    """Set up the barrier of this program's inbox, which gets a slice of so many rows from each program; return its address."""
    expected = rows * ((8 << team.bits) + 4 * PLAN.block_d)
    asm: gl.constexpr = _open_asm(PLAN.inbox_space)
    return gl.inline_asm_elementwise(asm, "=r,r", [expected], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def join(barrier):
    """Wait until programs may write to all inboxes of the cluster; return the place of the numbers in an inbox."""
    return gl.inline_asm_elementwise(JOIN, "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send(inbox, barrier, team, rows, row, d, o, PLAN: gl.constexpr, PAIRS: gl.constexpr):
    """Send each program its slice of o; row, d: place of each number, in o's shape. PAIRS: send two neighbours along d at once."""
    width_bits = power(PLAN.block_d) - team.bits
    in_slice = d & ((1 << width_bits) - 1)
    at = inbox + PLAN.numbers_at + 4 * (((team.rank * PLAN.columns + row) << width_bits) + in_slice)
    owner = gl.where(row < rows, d >> width_bits, NOBODY)
    barrier = gl.full_like(at, 0) + barrier
    numbers = [at, owner, barrier, o]
    if PAIRS:
        two: gl.constexpr = _send_asm("neighbours")
        gl.inline_asm_elementwise(two, "=r,=r,r,r,r,r,r,r,f,f", numbers, dtype=gl.int32, is_pure=False, pack=2)
    else:
        one: gl.constexpr = _send_asm("")
        gl.inline_asm_elementwise(one, "=r,r,r,r,f", numbers, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send_sums(inbox, barrier, team, rows, row, other, m, total, PLAN: gl.constexpr):
    """Send the rows' maxima and sums to program `other` of the cluster, if it exists; row, other, m and total have one shape."""
    at = inbox + 8 * (team.rank * PLAN.columns + row)
    other = gl.where((row < rows) & (other < (1 << team.bits)), other, NOBODY)
    barrier = gl.full_like(at, 0) + barrier
    asm: gl.constexpr = _send_asm("tensors")
    gl.inline_asm_elementwise(
        asm, "=r,r,r,r,f,f", [at, other, barrier, m, total], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _load_asm(n):
    # Load n neighbours from the address of the first.
    numbers = ", ".join(f"${i}" for i in range(n))
    return f"ld.shared.v{n}.f32 {{{numbers}}}, [${n}];" if n > 1 else "ld.shared.f32 $0, [$1];"


@gluon.constexpr_function
def _load_constraints(n):
    return ",".join(["=f"] * n + ["r"] * n)


@gluon.jit
def load_shared(address, EACH: gl.constexpr):
    """Read fp32 numbers of this program's inbox; a thread reads its EACH neighbours at once."""
    return gl.inline_asm_elementwise(
        _load_asm(EACH), _load_constraints(EACH), [address], gl.float32, is_pure=False, pack=EACH
    )


@gluon.jit
def load_sums(address):
    """Read maxima and sums; a maximum and its sum are neighbours."""
    return gl.inline_asm_elementwise(
        "ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r", [address], (gl.float32, gl.float32), is_pure=False, pack=1
    )


@gluon.constexpr_function
def slice_layout(rows, width):
    """Return the layout of a program's slice [rows, width]: a thread holds up to four neighbours of a row."""
    each = max(1, min(rows * width // 128, 4, width))
    lanes = min(width // each, 32)
    return gl.BlockedLayout([1, each], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def wait_for_slices(barrier):
    """Wait until this program has received all slices: without it the sums would miss some of them."""
    gl.inline_asm_elementwise(ARRIVED, "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise(ALL_HAVE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def leave():
    """Wait until all programs of the cluster have received all slices: without it a store could reach freed memory."""
    gl.inline_asm_elementwise(LEAVE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def add_up(results, inbox, rank, start, PARTS: gl.constexpr):
    """Add up the slices in the inbox of program `rank` of PARTS, and store the sum: a slice of each row of the output."""
    PLAN: gl.constexpr = results.cache.PLAN
    ROWS: gl.constexpr = PLAN.columns
    WIDTH: gl.constexpr = PLAN.block_d // PARTS
    layout: gl.constexpr = slice_layout(ROWS, WIDTH)
    EACH: gl.constexpr = layout.size_per_thread[1]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    i = (row * WIDTH)[:, None] + column[None, :]
    d = rank * WIDTH + column
    place, exists = results.places(start, row)
    sums = inbox + 8 * row
    numbers = inbox + PLAN.numbers_at + 4 * i
    top = gl.full([ROWS], MINUS_INF, gl.float32, gl.SliceLayout(1, layout))
    loaded = ()
    for part in gl.static_range(PARTS):
        loaded += (load_sums(sums + 8 * part * ROWS),)  # type: ignore[assignment]  # in a kernel a name's tuple may grow
        top = gl.maximum(top, loaded[part][0])  # type: ignore[misc]
    shifted = gl.where(top == MINUS_INF, 0.0, top * results.cache.c)
    o = gl.zeros([ROWS, WIDTH], gl.float32, layout)
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    for part in gl.static_range(PARTS):
        weight = gl.exp2(loaded[part][0] * results.cache.c - shifted)
        o += weight[:, None] * load_shared(numbers + 4 * part * ROWS * WIDTH, EACH)
        total += weight * loaded[part][1]
    o = o * inverse(total)[:, None]
    keep = exists[:, None] & (d < results.head_dim)[None, :]
    gl.store(results.out_ptr + place[:, None] + d[None, :], o.to(results.out_ptr.dtype.element_ty), mask=keep)


@gluon.jit
def send_part(inbox, barrier, team, rows, o, m, total, PLAN: gl.constexpr, ROWS: gl.constexpr):
    """Send a part of so many rows to all programs. Dimension ROWS of o holds query rows, the other dimension D."""
    OTHER: gl.constexpr = 1 - ROWS
    layout: gl.constexpr = o.type.layout
    # The other dimension of the sums stands for programs: a thread sends sums to the programs whose places it holds.
    few: gl.constexpr = layout if ROWS == 1 else accumulator(16)
    shape: gl.constexpr = [64, PLAN.columns] if ROWS == 1 else [64, 16]
    other = gl.expand_dims(gl.arange(0, shape[OTHER], gl.SliceLayout(ROWS, few)), ROWS).broadcast_to(shape)
    row = gl.expand_dims(gl.arange(0, shape[ROWS], gl.SliceLayout(OTHER, few)), OTHER).broadcast_to(shape)
    m = gl.expand_dims(m, OTHER).broadcast_to(shape)
    total = gl.expand_dims(total, OTHER).broadcast_to(shape)
    send_sums(inbox, barrier, team, rows, row, other, m, total, PLAN)
    whole: gl.constexpr = o.shape
    d = gl.expand_dims(gl.arange(0, whole[OTHER], gl.SliceLayout(ROWS, layout)), ROWS).broadcast_to(whole)
    row = gl.expand_dims(gl.arange(0, whole[ROWS], gl.SliceLayout(OTHER, layout)), OTHER).broadcast_to(whole)
    send(inbox, barrier, team, rows, row, d, o, PLAN, ROWS == 0)
