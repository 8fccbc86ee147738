"""FlashAttention for Blackwell, forward: six partitions, scores and output in tensor memory, two softmaxes in turn.

A program computes two tiles of 128 query rows. While one tile's softmax works, the tensor cores multiply for the other tile. The
output stays in tensor memory and is rescaled there, so that the softmax keeps a row of scores in registers and nothing else.

    partition    warps  what it does
    correction   4      rescales O when a row's maximum grows; at the end writes O / sum into Q's tile
    softmax 0,1  4 + 4  masks one tile's scores, takes maxima and exponentials, and puts P into the place of S
    products     1      starts S = Q K^T and O += P V on the tensor cores, which run them in order
    load         1      loads Q, and K and V through rings of STAGES slots, by TMA
    store        1      stores the output by TMA

    tensor memory, 512 columns: S 2 x 128 (P of 16 bits in the first half of each), O 2 x head dimension

Measured: not at all. It is compiled for sm_100a and simulated against float64, and no GPU has run it. With Triton 3.7 to 3.9
nothing is spilled. Loops over the two tiles are not unrolled, because registers cannot hold the addresses of both tiles at once.
Words before a colon ("Memory:", "Sync:") name the lines of the checklist "from a naive kernel to one for Blackwell".
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    get_tmem_reg_layout,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)

from utils.attention.gluon.arguments import descriptor
from utils.attention.gluon.shared import (
    MINUS_INF,
    aggregate,
    inverse_and_lse,
    mask_scores,
    online_softmax,
    thread_barrier,
    tma_load,
    tma_store,
    uniform,
)

BLOCK = 128  # rows of a tile, and keys of a block: tensor memory has so many lanes
COLUMNS_AT_ONCE = gl.constexpr(32)  # columns of O in a step of `rescale`: more would not fit into its registers


@aggregate
class Barriers:
    """The mbarriers between partitions: each field has a barrier for each slot of a ring, or for each of the two tiles."""

    q_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    s_full: gl.shared_memory_descriptor  # products -> softmax: the scores are there
    p_full: gl.shared_memory_descriptor  # softmax -> products: P is there, and the scores have been read
    alpha_full: gl.shared_memory_descriptor  # softmax -> correction: by how much O shrinks
    o_ready: gl.shared_memory_descriptor  # correction -> products: O is rescaled
    o_done: gl.shared_memory_descriptor  # products -> correction: P V has been added to O
    sum_full: gl.shared_memory_descriptor  # softmax -> correction: 1 / sum of each row
    out_full: gl.shared_memory_descriptor  # correction -> store: the output lies in Q's tile

    @gluon.constexpr_function
    def __init__(
        self, q_full, k_full, k_empty, v_full, v_empty, s_full, p_full, alpha_full, o_ready, o_done, sum_full, out_full
    ):
        self.q_full = q_full
        self.k_full = k_full
        self.k_empty = k_empty
        self.v_full = v_full
        self.v_empty = v_empty
        self.s_full = s_full
        self.p_full = p_full
        self.alpha_full = alpha_full
        self.o_ready = o_ready
        self.o_done = o_done
        self.sum_full = sum_full
        self.out_full = out_full


@gluon.jit
def make_barriers(COUNT: gl.constexpr):
    """Return COUNT mbarriers. A phase of each waits for one arrival."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def matrix(tile):
    """View a tile [1, 1, rows, columns] of a descriptor as a matrix."""
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def work(sizes, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Return this program's batch, head, head of K and V, first row, and number of blocks of keys.

    Each partition calls it: a value from before the partitions would stay in a register of all partitions, or be spilled.
    """
    sq, sk, heads, group = sizes
    sk = uniform(sk)  # hides the value from the assembler, which would otherwise count the blocks before the partitions
    flat = gl.program_id(1)
    batch = flat // heads
    head = flat - batch * heads
    # The last rows see the most keys: they begin first, so that no long program is left at the end.
    row = (gl.num_programs(0) - 1 - gl.program_id(0)) * (2 * BLOCK_M)
    blocks = gl.cdiv(sk, BLOCK_N)
    if CAUSAL:
        blocks = gl.minimum(blocks, gl.cdiv(gl.maximum(row + 2 * BLOCK_M + sk - sq, 1), BLOCK_N))
    return batch, head, head // group, row, blocks


@gluon.jit
def load(descriptors, q_tiles, k_ring, v_ring, bars, sizes, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """Loads: one warp asks TMA for whole tiles in the order of the products: Q0 K0 Q1 V0 K1 V1 ..."""
    q_desc, k_desc, v_desc = descriptors
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    batch, head, kv_head, row, blocks = work(sizes, BLOCK_M, BLOCK_N, CAUSAL)
    mbarrier.expect(bars.q_full.index(0), q_desc.block_type.nbytes)
    tma_load(q_desc, [batch, head, row, 0], bars.q_full.index(0), q_tiles.index(0))
    for i in range(blocks):
        slot = i % STAGES
        free = ((i // STAGES) & 1) ^ 1  # a fresh barrier counts as if the slot had been freed once
        # Without the waits for k_empty and v_empty TMA would overwrite tiles that a product still reads.
        mbarrier.wait(bars.k_empty.index(slot), free)
        mbarrier.expect(bars.k_full.index(slot), k_desc.block_type.nbytes)
        tma_load(k_desc, [batch, kv_head, i * BLOCK_N, 0], bars.k_full.index(slot), k_ring.index(slot))
        if i == 0:
            mbarrier.expect(bars.q_full.index(1), q_desc.block_type.nbytes)
            tma_load(q_desc, [batch, head, row + BLOCK_M, 0], bars.q_full.index(1), q_tiles.index(1))
        mbarrier.wait(bars.v_empty.index(slot), free)
        mbarrier.expect(bars.v_full.index(slot), v_desc.block_type.nbytes)
        tma_load(v_desc, [batch, kv_head, i * BLOCK_N, 0], bars.v_full.index(slot), v_ring.index(slot))


@gluon.jit
def probabilities(scores, dtype: gl.constexpr):
    """Memory: return the place of P, of 16 bits, in tensor memory: the left half of its scores."""
    ROWS: gl.constexpr = scores.shape[0]
    KEYS: gl.constexpr = scores.shape[1]
    return scores.reinterpret(dtype, [ROWS, 2 * KEYS], TensorMemoryLayout([ROWS, 2 * KEYS], 1)).slice(0, KEYS)


@gluon.jit
def start_scores(q_tiles, k_ring, slot, scores, bars, tile):
    """Start S = Q K^T of one tile; its end completes `s_full`."""
    k = matrix(k_ring.index(slot)).permute((1, 0))
    done = [bars.s_full.index(tile)]
    tcgen05_mma(matrix(q_tiles.index(tile)), k, scores.index(tile), use_acc=False, mbarriers=done)


@gluon.jit
def products(q_tiles, k_ring, v_ring, scores, output, bars, sizes, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """Pipeline and critical path: one thread starts all products, and waits only if an operand comes from registers.

    The scores of a tile's next block take the place of its P. Their product starts after the product that reads P, and the tensor
    cores keep that order, so no wait is needed.
    """
    _, _, _, _, blocks = work(sizes, scores.shape[1], scores.shape[2], CAUSAL)
    mbarrier.wait(bars.k_full.index(0), 0)  # K has arrived
    for tile in range(2):
        mbarrier.wait(bars.q_full.index(tile), 0)  # Q has arrived
        start_scores(q_tiles, k_ring, 0, scores, bars, tile)
    tcgen05_commit(bars.k_empty.index(0))  # the slot becomes free when the products have read it, not when they start
    for i in range(blocks):
        slot = i % STAGES
        following = (i + 1) % STAGES
        mbarrier.wait(bars.v_full.index(slot), (i // STAGES) & 1)  # V has arrived
        v = matrix(v_ring.index(slot))
        for tile in range(2):
            # Sync: P is handed over. Without `p_full` the product would read P before it is stored, and without `o_ready`
            # it would add to O during the rescaling.
            mbarrier.wait(bars.p_full.index(tile), i & 1)
            mbarrier.wait(bars.o_ready.index(tile), i & 1)
            tcgen05_mma(
                probabilities(scores.index(tile), v.dtype),
                v,
                output.index(tile),
                use_acc=i > 0,
                mbarriers=[bars.o_done.index(tile)],
            )
            if i + 1 < blocks:
                if tile == 0:
                    mbarrier.wait(bars.k_full.index(following), ((i + 1) // STAGES) & 1)  # the next K has arrived
                start_scores(q_tiles, k_ring, following, scores, bars, tile)
        tcgen05_commit(bars.v_empty.index(slot))
        tcgen05_commit(bars.k_empty.index(following), pred=i + 1 < blocks)


@gluon.jit
def softmax(
    scores,
    alphas,
    sums,
    bars,
    lse_ptr,
    sizes,
    c,
    dtype: gl.constexpr,
    TILE: gl.constexpr,
    CAUSAL: gl.constexpr,
    LSE: gl.constexpr,
):
    """Softmax and masking: compute one tile's rows, a row in each thread, while the products work for the other tile."""
    sq, sk, _, _ = sizes
    BLOCK_M: gl.constexpr = scores.shape[1]
    BLOCK_N: gl.constexpr = scores.shape[2]
    _, _, _, first, blocks = work(sizes, BLOCK_M, BLOCK_N, CAUSAL)
    row = first + TILE * BLOCK_M
    s_view = scores.index(TILE)
    p_view = probabilities(s_view, dtype)
    wide: gl.constexpr = get_tmem_reg_layout(gl.float32, [BLOCK_M, BLOCK_N], scores.layout, gl.num_warps())
    narrow: gl.constexpr = get_tmem_reg_layout(dtype, [BLOCK_M, BLOCK_N], scores.layout, gl.num_warps())
    rows: gl.constexpr = gl.SliceLayout(1, wide)
    m = gl.full([BLOCK_M], MINUS_INF, gl.float32, rows)
    total = gl.zeros([BLOCK_M], gl.float32, rows)
    seen = sk
    if CAUSAL:
        seen = gl.minimum(sk, row + sk - sq + 1)  # the tile's first row sees so many keys: blocks of these need no mask
    for i in range(blocks):
        mbarrier.wait(bars.s_full.index(TILE), i & 1)  # the scores are there
        s = s_view.load(wide)
        if (i + 1) * BLOCK_N > seen:
            s = mask_scores(s, row, i * BLOCK_N, sq, sk, wide, CAUSAL)
        p, m, total, alpha = online_softmax(s, m, total, c)
        # The correction has read the last alpha: these scores came after its arrival at `o_ready`.
        alphas.index(TILE).store(alpha)
        mbarrier.arrive(bars.alpha_full.index(TILE), count=1)
        p_view.store(gl.convert_layout(p.to(dtype), narrow))
        mbarrier.arrive(bars.p_full.index(TILE), count=1)
    inverse, logsumexp = inverse_and_lse(m, total, c)
    sums.index(TILE).store(inverse)
    mbarrier.arrive(bars.sum_full.index(TILE), count=1)
    if LSE:
        at = row + gl.arange(0, BLOCK_M, rows)
        gl.store(lse_ptr + gl.program_id(1).to(gl.int64) * sq + at, logsumexp, mask=at < sq)


@gluon.jit
def rescale(o_view, factor, into, WRITE_OUT: gl.constexpr):
    """Multiply the rows of O by factors, a few columns at a time, and write them back, or into a tile of shared memory."""
    some: gl.constexpr = TensorMemoryLayout([o_view.shape[0], COLUMNS_AT_ONCE], 1)
    registers: gl.constexpr = get_tmem_reg_layout(gl.float32, [o_view.shape[0], COLUMNS_AT_ONCE], some, gl.num_warps())
    HEAD_DIM: gl.constexpr = o_view.shape[1]
    by_row = gl.convert_layout(factor, gl.SliceLayout(1, registers))[:, None]
    for first in gl.static_range(0, HEAD_DIM, COLUMNS_AT_ONCE):
        part = o_view.slice(first, COLUMNS_AT_ONCE)
        scaled = part.load(registers) * by_row
        if WRITE_OUT:
            into.slice(first, COLUMNS_AT_ONCE, dim=1).store(scaled.to(into.dtype))
        else:
            part.store(scaled)


@gluon.jit
def correction(q_tiles, output, alphas, sums, bars, sizes, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Critical path: rescale O in this partition, beside the softmax."""
    BLOCK_M: gl.constexpr = output.shape[1]
    _, _, _, _, blocks = work(sizes, BLOCK_M, BLOCK_N, CAUSAL)
    part: gl.constexpr = TensorMemoryLayout([BLOCK_M, COLUMNS_AT_ONCE], 1)
    whole: gl.constexpr = get_tmem_reg_layout(gl.float32, [BLOCK_M, COLUMNS_AT_ONCE], part, gl.num_warps())
    rows: gl.constexpr = gl.SliceLayout(1, whole)
    for i in range(blocks):
        for tile in range(2):
            mbarrier.wait(bars.alpha_full.index(tile), i & 1)  # the softmax has stored alpha
            if i > 0:  # the first product overwrites O
                alpha = alphas.index(tile).load(rows)
                mbarrier.wait(bars.o_done.index(tile), (i - 1) & 1)  # without it a product could still add to O
                rescale(output.index(tile), alpha, output.index(tile), False)
            mbarrier.arrive(bars.o_ready.index(tile), count=1)
    for tile in range(2):
        mbarrier.wait(bars.sum_full.index(tile), 0)  # the softmax has stored 1 / sum
        inverse = sums.index(tile).load(rows)
        mbarrier.wait(bars.o_done.index(tile), (blocks - 1) & 1)  # without it O could miss the last product
        rescale(output.index(tile), inverse, matrix(q_tiles.index(tile)), True)
        fence_async_shared()  # threads store the output and TMA reads it: without the fence TMA may read Q
        mbarrier.arrive(bars.out_full.index(tile), count=1)


@gluon.jit
def store(o_desc, q_tiles, bars, sizes):
    """Loads, backwards: one warp stores the output of both tiles by TMA, which drops rows after the last query."""
    BLOCK_M: gl.constexpr = o_desc.block_type.shape[2]
    batch, head, _, row, _ = work(sizes, BLOCK_M, BLOCK_M, False)
    for tile in range(2):
        mbarrier.wait(bars.out_full.index(tile), 0)  # the output lies in Q's tile
        tma_store(o_desc, [batch, head, row + tile * BLOCK_M, 0], q_tiles.index(tile))
    tma.store_wait(0)  # without it the block could end and free its shared memory while TMA reads it


# `do_not_specialize` makes one kernel for all sizes: without it, sizes of 1 and multiples of 16 would have further kernels.
@gluon.jit(do_not_specialize=["sq", "sk", "heads", "group"])
def attention_blackwell(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse_ptr,
    sq,
    sk,
    heads,
    group,
    c,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    LSE: gl.constexpr,
):
    """Compute 256 query rows of one head in each program: grid (pairs of row tiles, batch * heads)."""
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    sizes = (sq, sk, heads, group)
    # Layouts: each tile has the layout for TMA and the tensor cores; conversions are only between registers and tensor memory.
    q_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    alphas = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], vector)
    sums = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], vector)
    scores = allocate_tensor_memory(gl.float32, [2, BLOCK_M, BLOCK_N], TensorMemoryLayout([BLOCK_M, BLOCK_N], 1))
    output = allocate_tensor_memory(gl.float32, [2, BLOCK_M, BLOCK_D], TensorMemoryLayout([BLOCK_M, BLOCK_D], 1))
    bars = Barriers(
        make_barriers(2),
        make_barriers(STAGES),
        make_barriers(STAGES),
        make_barriers(STAGES),
        make_barriers(STAGES),
        make_barriers(2),
        make_barriers(2),
        make_barriers(2),
        make_barriers(2),
        make_barriers(2),
        make_barriers(2),
        make_barriers(2),
    )
    # Threads initialize the barriers, and TMA and the tensor cores complete them: without the fence they may find old data there.
    fence_async_shared()
    thread_barrier()  # without it a partition could use a barrier that is not initialized

    # Autotune: partitions, warps and registers are chosen here by hand.
    gl.warp_specialize(
        [
            (correction, (q_tiles, output, alphas, sums, bars, sizes, BLOCK_N, CAUSAL)),
            (softmax, (scores, alphas, sums, bars, lse_ptr, sizes, c, dtype, 0, CAUSAL, LSE)),
            (softmax, (scores, alphas, sums, bars, lse_ptr, sizes, c, dtype, 1, CAUSAL, LSE)),
            (products, (q_tiles, k_ring, v_ring, scores, output, bars, sizes, STAGES, CAUSAL)),
            (load, ((q_desc, k_desc, v_desc), q_tiles, k_ring, v_ring, bars, sizes, STAGES, CAUSAL)),
            (store, (o_desc, q_tiles, bars, sizes)),
        ],
        [4, 4, 1, 1, 1],
        [192, 192, 32, 32, 32],
    )


def launch(q, k, v, out, lse, causal: bool, c: float) -> None:
    """Run the kernel on tensors (B, H, S, D) of one 16-bit type, not empty; lse: (B, H, Sq) fp32; c: scale * log2(e)."""
    batch, heads, sq, head_dim = q.shape
    columns = 64 if head_dim <= 64 else 128  # TMA writes zeros for columns beyond the head dimension
    descriptors = [descriptor(x, BLOCK, columns) for x in (q, k, v, out)]
    stages = 3 if columns == 64 else 2  # three slots of 128 columns do not fit into shared memory
    attention_blackwell[(-(-sq // (2 * BLOCK)), batch * heads)](
        *descriptors,
        lse,
        *(sq, k.shape[2], heads, heads // k.shape[1], c),
        BLOCK_D=columns,
        STAGES=stages,
        CAUSAL=causal,
        LSE=True,
        num_warps=4,
    )
