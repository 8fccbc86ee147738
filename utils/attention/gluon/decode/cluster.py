"""The decode kernel for few heads of keys: the programs of a head are one cluster, and merge in shared memory.

With one sequence a call takes ten to twenty microseconds, so the time before the first byte and after the last byte counts as
much as the bytes. Here 2 to 16 programs share a head and are a thread block cluster: the GPU starts them together, and each can
write to the shared memory of the others. Each program attends to its share of the head's blocks, with keys as the rows of the
products (`keys.py`, up to eight query rows) or with query rows (up to 64). Then it sends each program of the cluster a slice of
its output, and adds up the slices in its own inbox (`inbox.py`). So no part goes to memory, and no second launch follows.

    grid         (heads of keys, sequences) clusters; shares of a head differ by a block at most
    blocks       the programs take a head's blocks in turn, so the first loads need not wait for the sequence's length
    ring         tiles of K and V in turn; one barrier comes before all first loads
    tiles        keys x slots, 128 columns wide: 128 x 6; with query rows as rows 128 x 4
    inbox        from each program, for each query row, a slice of the output (fp32), a maximum and a sum
    end          a program ends when all programs of the cluster have received their slices
    measured     1 x 32/8 heads, 2048 keys: 1.32 times as fast as the best library (H200; docs/kernels/decode.md)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from utils.attention.gluon.decode.blocks import fill_ring, first_blocks, page_numbers
from utils.attention.gluon.decode.cluster_rows import RowsAsRows
from utils.attention.gluon.decode.inbox import (
    NOBODY,
    Team,
    add_up,
    join,
    leave,
    open_inbox,
    power,
    send_part,
    wait_for_slices,
)
from utils.attention.gluon.decode.keys import KeysAsRows, allocate_probabilities, attend_head
from utils.attention.gluon.decode.work import Cursor
from utils.attention.gluon.shared import accumulator


@gluon.jit
def merge_slices(results, team, barrier, start, o, m, total):
    """Send slices of this program's part to the programs of the cluster, and add up and store the slices that arrive here."""
    PLAN: gl.constexpr = results.cache.PLAN
    ROWS: gl.constexpr = 1 if PLAN.consumers == 0 else 0  # the dimension of o that holds query rows
    few: gl.constexpr = gl.SliceLayout(1 - ROWS, o.type.layout if ROWS == 1 else accumulator(16))
    # Convert before the inboxes open: a conversion may use the shared memory that becomes an inbox.
    m = gl.convert_layout(m, few)
    total = gl.convert_layout(total, few)
    inbox = join(barrier)
    send_part(inbox, barrier, team, results.cache.rows, o, m, total, PLAN, ROWS)
    wait_for_slices(barrier)
    for bits in gl.static_range(1, power(NOBODY) + 1):
        if team.bits == bits:
            add_up(results, inbox, team.rank, start, 1 << bits)
    leave()


@gluon.jit
def attend_cluster(results, q_desc, k_desc, v_desc, scales_ptr):
    """Attend to this program's share of one head's blocks, and store its slice of the head's output."""
    cache = results.cache
    PLAN: gl.constexpr = cache.PLAN
    flat = gl.program_id(0)
    bits = cache.bits
    team = Team(flat & ((1 << bits) - 1), bits)
    b = gl.program_id(1)
    none = b * 0
    # The loads of the length and of the first page numbers run at the same time: neither depends on the other.
    length = cache.length(b)
    blocks, following = first_blocks(cache, Cursor(b, flat >> bits, team.rank, none, none, none))
    start = Cursor(b, flat >> bits, team.rank, length, none, gl.cdiv(length, PLAN.block_n))
    # A program without a block computes one all the same: all its scores are masked, and its sums are zero.
    n = gl.maximum((start.blocks - team.rank + (1 << bits) - 1) >> bits, 1)
    ring, full, q_ring = fill_ring(cache, (q_desc, k_desc, v_desc), blocks, n, 1)
    barrier = open_inbox(team, cache.rows, PLAN)
    pages = page_numbers(cache, following)
    mbarrier.wait(full.index(PLAN.slots), 0)  # the queries have arrived
    q = q_ring.index(0).reshape([PLAN.columns, PLAN.block_d])
    if PLAN.consumers == 0:
        way = KeysAsRows(cache, q, allocate_probabilities(k_desc.dtype, PLAN))
    else:
        way = RowsAsRows(cache, q)
    tiles = ring, full, k_desc, v_desc
    o, m, total, _ = attend_head(way, start, (n, gl.to_tensor(0), n), tiles, (following, pages))
    merge_slices(results, team, barrier, start, o, m, total)
