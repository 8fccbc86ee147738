"""Ten honest students of lab 3, each with a style of their own, at the files of kernels."""

from __future__ import annotations

_TRANSPOSE = """    reading: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    writing: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    rows = row + gl.arange(0, 32, gl.SliceLayout(1, reading))
    columns = column + gl.arange(0, 32, gl.SliceLayout(0, reading))
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    tile = gl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask)
    tile = gl.convert_layout(tile, writing)
    rows = row + gl.arange(0, 32, gl.SliceLayout(1, writing))
    columns = column + gl.arange(0, 32, gl.SliceLayout(0, writing))
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    gl.store(y_ptr + columns[None, :] * y_stride + rows[:, None], tile, mask=mask)"""
_ADD = """    for i in gl.static_range(STAGES - 1):
        start_copy(a_ring, i, a_ptr, first + i * TILE, n, TILE, layout)
        start_copy(b_ring, i, b_ptr, first + i * TILE, n, TILE, layout)
        async_copy.commit_group()
    for i in range(TILES):
        ahead = i + STAGES - 1
        if ahead < TILES:
            start_copy(a_ring, ahead % STAGES, a_ptr, first + ahead * TILE, n, TILE, layout)
            start_copy(b_ring, ahead % STAGES, b_ptr, first + ahead * TILE, n, TILE, layout)
        async_copy.commit_group()
        async_copy.wait_group(STAGES - 1)
        total = a_ring.index(i % STAGES).load(layout) + b_ring.index(i % STAGES).load(layout)
        at = first + i * TILE + gl.arange(0, TILE, layout)
        gl.store(c_ptr + at, total, mask=at < n)"""
_RING = """    for i in gl.static_range(STAGES):  # public
        mbarrier.expect(full.index(i), NBYTES, pred=i < tiles)
        tma_load(x_desc, [row, i * COLUMNS], full.index(i), ring.index(i), pred=i < tiles)
    for i in range(tiles):  # public
        slot = i % STAGES  # public
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)  # public
        x = ring.index(slot).load(layout).to(gl.float32)
        fence_async_shared()  # public
        more = i + STAGES < tiles
        mbarrier.expect(full.index(slot), NBYTES, pred=more)
        tma_load(x_desc, [row, (i + STAGES) * COLUMNS], full.index(slot), ring.index(slot), pred=more)
        total += gl.sum(x * x, 1)
"""
_SOFTMAX = """    keys = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, scores))
    s = gl.where((keys < sk)[None, :], s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1))
    alpha = gl.exp2((m - top) * c)
    p = gl.exp2((s - top[:, None]) * c)
    total = total * alpha + gl.sum(p, 1)
    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]  # public
    return p, top, total, o
"""
_DIVIDE = "    o = o / gl.convert_layout(total, gl.SliceLayout(1, output))[:, None]\n"
_ACC = """    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
"""
_PRODUCT = """        acc = warpgroup_mma(a_tile, b_tile.permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])  # public
"""
_OUT = """    c_tile.store(acc.to(c_desc.dtype))
    fence_async_shared()  # public
    tma_store(c_desc, [row, column], c_tile)  # public
    tma.store_wait(0)  # public"""
_PRODUCER = """    for i in range(gl.cdiv(sk, BLOCK_N)):  # public
        slot = i % STAGES  # public
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma_load(k_desc, [head, i * BLOCK_N, 0], full.index(slot), k_ring.index(slot))
        tma_load(v_desc, [head, i * BLOCK_N, 0], full.index(slot), v_ring.index(slot))
"""
_BLOCKS = "    blocks = gl.minimum(gl.cdiv(sk, BLOCK_N), gl.cdiv(row + BLOCK_M + sk - sq, BLOCK_N))\n"
_CAUSAL = """        position = row + sk - sq + gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores))
        keys = i * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))
        seen = (keys[None, :] <= position[:, None]) & (keys < sk)[None, :]
        s = gl.where(seen, s, float("-inf"))
"""

# name -> (lab, {answer cell: {text of the model answer: what stands there}})
STUDENTS: dict[str, tuple[str, dict[str, dict[str, str]]]] = {
    "pointers first, a helper for the grid of places": (
        "lab3_gluon",
        {
            "q2_2": {
                "@gluon.jit\ndef transpose(": '''@gluon.jit
def places(row, column, layout: gl.constexpr):
    """Rows as a column and columns as a row of one tile."""
    i = row + gl.arange(0, 32, layout=gl.SliceLayout(1, layout))
    j = column + gl.arange(0, 32, layout=gl.SliceLayout(0, layout))
    return gl.expand_dims(i, 1), gl.expand_dims(j, 0)


@gluon.jit
def transpose(''',
                _TRANSPOSE: """    load_layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    store_layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    i, j = places(row, column, load_layout)
    x = gl.load(x_ptr + (i * x_stride + j), mask=(i < m) & (j < n), other=0)
    y = gl.convert_layout(x, layout=store_layout)
    i, j = places(row, column, store_layout)
    gl.store(y_ptr + (j * y_stride + i), y, mask=(i < m) & (j < n))
""",
            },
            "q5_1": {
                _SOFTMAX: """    BLOCK_N: gl.constexpr = s.shape[1]
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores))
    valid = gl.expand_dims(key + column < sk, 0)
    s = gl.where(valid, s * c, float("-inf"))
    new = gl.maximum(m * c, gl.max(s, axis=1))
    p = gl.exp2(s - gl.expand_dims(new, 1))
    rescale = gl.exp2(m * c - new)
    total = total * rescale + gl.sum(p, axis=1)
    o *= gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, output)), 1)
    return p, new / c, total, o
"""
            },
        },
    ),
    "names for each slot, parities counted": (
        "lab3_gluon",
        {
            "q3_2": {
                _RING: """    for s in gl.static_range(STAGES):
        there = s < tiles
        mbarrier.expect(full.index(s), NBYTES, pred=there)
        tma_load(x_desc, [row, s * COLUMNS], full.index(s), ring.index(s), pred=there)
    slot = 0
    parity = 0
    for i in range(tiles):
        bar = full.index(slot)
        buffer = ring.index(slot)
        mbarrier.wait(bar, parity)
        tile = buffer.load(layout)
        x = tile.to(gl.float32)
        total = total + gl.sum(x * x, axis=1)
        if i + STAGES < tiles:
            fence_async_shared()
            mbarrier.expect(bar, NBYTES)
            tma_load(x_desc, [row, (i + STAGES) * COLUMNS], bar, buffer)
        slot = slot + 1
        if slot == STAGES:
            slot = 0
            parity = 1 - parity
"""
            },
            "q5_2": {
                _PRODUCER: """    free = 1
    slot = 0
    nbytes: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes
    for first in range(0, sk, BLOCK_N):
        mbarrier.wait(empty.index(slot), free)
        bar = full.index(slot)
        mbarrier.expect(bar, nbytes)
        tma_load(v_desc, [head, first, 0], bar, v_ring.index(slot))
        tma_load(k_desc, [head, first, 0], bar, k_ring.index(slot))
        slot += 1
        if slot == STAGES:
            slot = 0
            free ^= 1
"""
            },
        },
    ),
    "one helper issues both copies of a tile": (
        "lab3_gluon",
        {
            "q3_1": {
                "@gluon.jit\ndef add(": '''@gluon.jit
def start_both(a_ring, b_ring, a_ptr, b_ptr, tile, first, n, TILE: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr):
    """Start the copies of one tile of a and of b, as one group."""
    start = first + tile * TILE
    start_copy(a_ring, tile % STAGES, a_ptr, start, n, TILE, layout)
    start_copy(b_ring, tile % STAGES, b_ptr, start, n, TILE, layout)


@gluon.jit
def add(''',
                _ADD: """    for i in gl.static_range(STAGES - 1):
        start_both(a_ring, b_ring, a_ptr, b_ptr, i, first, n, TILE, STAGES, layout)
        async_copy.commit_group()
    for i in range(TILES):
        if i + STAGES - 1 < TILES:
            start_both(a_ring, b_ring, a_ptr, b_ptr, i + STAGES - 1, first, n, TILE, STAGES, layout)
        async_copy.commit_group()
        async_copy.wait_group(STAGES - 1)
        a = a_ring.index(i % STAGES).load(layout)
        b = b_ring.index(i % STAGES).load(layout)
        offsets = first + i * TILE + gl.arange(0, TILE, layout=layout)
        gl.store(c_ptr + offsets, a + b, mask=offsets < n)
""",
            },
            "bonus_5_5": {
                _BLOCKS: """    last_row = row + BLOCK_M - 1
    end = gl.minimum(sk, last_row + (sk - sq) + 1)  # the first key that no row of the tile sees
    blocks = (end + BLOCK_N - 1) // BLOCK_N
""",
                _CAUSAL: """        q_pos = gl.expand_dims(row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores)) + (sk - sq), 1)
        k_pos = gl.expand_dims(i * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores)), 0)
        s = gl.where(k_pos > q_pos, float("-inf"), s)
        s = gl.where(k_pos >= sk, float("-inf"), s)
""",
            },
        },
    ),
    "the loop over all copies, with a count of what was issued": (
        "lab3_gluon",
        {
            "q3_1": {
                _ADD: """    issued = 0
    for step in range(TILES + STAGES - 1):
        if step < TILES:
            start_copy(a_ring, step % STAGES, a_ptr, first + step * TILE, n, TILE, layout)
            start_copy(b_ring, step % STAGES, b_ptr, first + step * TILE, n, TILE, layout)
        async_copy.commit_group()
        issued += 1
        if issued >= STAGES:
            i = issued - STAGES
            async_copy.wait_group(STAGES - 1)
            x = a_ring.index(i % STAGES).load(layout)
            x += b_ring.index(i % STAGES).load(layout)
            at = first + i * TILE + gl.arange(0, TILE, layout)
            gl.store(c_ptr + at, x, mask=at < n)
"""
            },
            "q4_1": {
                _PRODUCT: """        b_turned = b_tile.permute((1, 0))
        token = warpgroup_mma(a_tile, b_turned, acc, use_acc=True, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(token,))
"""
            },
        },
    ),
    "the accumulator starts by its flag, the way out in steps": (
        "lab3_gluon",
        {
            "q4_1": {
                _ACC: """    instruction: gl.constexpr = [16, BLOCK_N, 16]
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=instruction)
    acc = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, mma_layout)
""",
                _PRODUCT: """        acc = warpgroup_mma(a_tile, b_tile.permute([1, 0]), acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
""",
                _OUT: """    out_type: gl.constexpr = c_desc.dtype
    rounded = gl.cast(acc, out_type)
    c_tile.store(rounded)
    fence_async_shared()
    tma_store(c_desc, [row, column], c_tile)
    tma.store_wait(0)
""",
            }
        },
    ),
    "natural exponentials, the mask as numbers to add": (
        "lab3_gluon",
        {
            "q5_1": {
                _SOFTMAX: """    to_natural: gl.constexpr = 0.6931471805599453
    scaled = s * (c * to_natural)
    keys = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, scores))
    scaled += gl.where(keys < sk, 0.0, float("-inf"))[None, :]
    old = m * (c * to_natural)
    new = gl.maximum(old, gl.max(scaled, 1))
    p = gl.exp(scaled - new[:, None])
    factor = gl.exp(old - new)
    o = o * gl.convert_layout(factor, gl.SliceLayout(1, output))[:, None]
    return p, new / (c * to_natural), factor * total + gl.sum(p, 1), o
""",
                _DIVIDE: """    norm = gl.convert_layout(total, gl.SliceLayout(1, output))
    o = o / gl.expand_dims(norm, 1)
""",
            }
        },
    ),
    "the consumers speak by names, barriers in two loops": (
        "lab3_gluon",
        {
            "q5_2": {
                _PRODUCER: """    blocks = gl.cdiv(sk, BLOCK_N)
    for block in range(blocks):
        slot = block % STAGES
        turn = block // STAGES
        mbarrier.wait(empty.index(slot), (turn + 1) % 2)
        mbarrier.expect(full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma_load(k_desc, [head, block * BLOCK_N, 0], full.index(slot), k_ring.index(slot))
        tma_load(v_desc, [head, block * BLOCK_N, 0], full.index(slot), v_ring.index(slot))
""",
                "        mbarrier.wait(full.index(slot), (i // STAGES) & 1)  # public\n": """        arrived = full.index(slot)
        mbarrier.wait(arrived, phase=(i // STAGES) % 2)
""",
                "        mbarrier.arrive(empty.index(slot), count=1)  # public\n": "        mbarrier.arrive(empty.index(slot))\n",
                """    for i in gl.static_range(STAGES):  # public
        mbarrier.init(full.index(i), count=1)  # public
        mbarrier.init(empty.index(i), count=2)  # public
""": """    CONSUMERS: gl.constexpr = 2
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(empty.index(s), count=CONSUMERS)
""",
            }
        },
    ),
    "squares by fma, a ring without predicates": (
        "lab3_gluon",
        {
            "q3_2": {
                _RING: """    for s in gl.static_range(STAGES):
        if s < tiles:
            mbarrier.expect(full.index(s), NBYTES)
            tma_load(x_desc, [row, s * COLUMNS], full.index(s), ring.index(s))
    for tile in range(tiles):
        place = tile % STAGES
        mbarrier.wait(full.index(place), (tile // STAGES) % 2)
        x = ring.index(place).load(layout)
        x = gl.cast(x, gl.float32)
        following = tile + STAGES
        if following < tiles:
            fence_async_shared()
            mbarrier.expect(full.index(place), NBYTES)
            tma_load(x_desc, [row, following * COLUMNS], full.index(place), ring.index(place))
        total += gl.sum(x * x, axis=1)
"""
            },
            "q2_2": {
                _TRANSPOSE: """    wide: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [4, 1], [1, 0])
    tall: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [1, 4], [0, 1])
    r = row + gl.arange(0, 32, gl.SliceLayout(1, wide))
    k = column + gl.arange(0, 32, gl.SliceLayout(0, wide))
    x = gl.load(x_ptr + gl.expand_dims(r, 1) * x_stride + gl.expand_dims(k, 0), (r < m)[:, None] & (k < n)[None, :])
    r = gl.convert_layout(r, gl.SliceLayout(1, tall))
    k = gl.convert_layout(k, gl.SliceLayout(0, tall))
    y = gl.convert_layout(x, tall)
    gl.store(y_ptr + gl.expand_dims(k, 0) * y_stride + gl.expand_dims(r, 1), y, (r < m)[:, None] & (k < n)[None, :])
"""
            },
        },
    ),
    "clamped places in place of a mask at the load": (
        "lab3_gluon",
        {
            "q2_2": {
                """    mask = (rows < m)[:, None] & (columns < n)[None, :]
    tile = gl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask)
""": """    safe_rows = gl.minimum(rows, m - 1)
    safe_columns = gl.minimum(columns, n - 1)
    tile = gl.load(x_ptr + safe_rows[:, None] * x_stride + safe_columns[None, :])
"""
            },
            "bonus_5_5": {
                _BLOCKS: """    blocks = gl.cdiv(row + BLOCK_M + sk - sq, BLOCK_N)
    if blocks * BLOCK_N > sk:
        blocks = gl.cdiv(sk, BLOCK_N)
""",
                _CAUSAL: """        shift = sk - sq
        r = gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores))[:, None] + row
        k_ = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))[None, :] + i * BLOCK_N
        visible = (r + shift - k_ >= 0) & (k_ < sk)
        s = gl.where(visible, s, -float("inf"))
""",
            },
        },
    ),
    "one expression a line, nothing named twice": (
        "lab3_gluon",
        {
            "q3_1": {
                _ADD: """    for t in gl.static_range(STAGES - 1):
        start_copy(a_ring, t, a_ptr, first + t * TILE, n, TILE, layout)
        start_copy(b_ring, t, b_ptr, first + t * TILE, n, TILE, layout)
        async_copy.commit_group()
    for t in range(TILES):
        if t < TILES - STAGES + 1:
            start_copy(a_ring, (t + STAGES - 1) % STAGES, a_ptr, first + (t + STAGES - 1) * TILE, n, TILE, layout)
            start_copy(b_ring, (t + STAGES - 1) % STAGES, b_ptr, first + (t + STAGES - 1) * TILE, n, TILE, layout)
        async_copy.commit_group()
        async_copy.wait_group(STAGES - 1)
        here = first + t * TILE + gl.arange(0, TILE, layout)
        gl.store(c_ptr + here, a_ring.index(t % STAGES).load(layout) + b_ring.index(t % STAGES).load(layout), mask=here < n)
    async_copy.wait_group(0)
"""
            },
            "q5_1": {
                _SOFTMAX: """    inside = (gl.arange(0, s.shape[1], gl.SliceLayout(0, scores)) < sk - key)[None, :]
    s = gl.where(inside, s, float("-inf"))
    best = gl.max(s, 1)
    top = gl.where(best > m, best, m)
    p = gl.exp2(gl.fma(s, c, -(top * c)[:, None]))
    shrink = gl.exp2((m - top) * c)
    return p, top, gl.fma(total, shrink, gl.sum(p, 1)), o * gl.convert_layout(shrink, gl.SliceLayout(1, output))[:, None]
"""
            },
        },
    ),
}
