"""Right answers to lab 3 that differ from the model answers: (difference, answer cell, code or replacements).

Code runs after the model answer in the same cell. Replacements are pairs (text of the answer's file, new text).
"""

_TRANSPOSE_BODY = """
    line: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    rows = row + gl.arange(0, 32, gl.SliceLayout(1, line))
    columns = column + gl.arange(0, 32, gl.SliceLayout(0, line))
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    tile = gl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0)
    turned = gl.convert_layout(tile.permute([1, 0]), line)
    rows = row + gl.arange(0, 32, gl.SliceLayout(0, line))
    columns = column + gl.arange(0, 32, gl.SliceLayout(1, line))
    inside = (columns < n)[:, None] & (rows < m)[None, :]
    gl.store(y_ptr + columns[:, None] * y_stride + rows[None, :], turned, mask=inside)
"""
_ASYNC_BODY = """
    for i in gl.static_range(STAGES):
        order(a_ring, i, a_ptr, first + i * TILE, n, TILE, layout)
        order(b_ring, i, b_ptr, first + i * TILE, n, TILE, layout)
        async_copy.commit_group()
    for i in range(TILES):
        async_copy.wait_group(STAGES - 1)
        slot = i % STAGES
        a = a_ring.index(slot).load(layout)
        b = b_ring.index(slot).load(layout)
        if i + STAGES < TILES:
            order(a_ring, slot, a_ptr, first + (i + STAGES) * TILE, n, TILE, layout)
            order(b_ring, slot, b_ptr, first + (i + STAGES) * TILE, n, TILE, layout)
        async_copy.commit_group()
        at = first + i * TILE + gl.arange(0, TILE, layout)
        gl.store(c_ptr + at, a + b, mask=at < n)
    async_copy.wait_group(0)
"""
_RING_BODY = """
    for j in gl.static_range(STAGES):
        mbarrier.init(full.index(j), count=2)
        if j < tiles:
            mbarrier.expect(full.index(j), NBYTES)
            tma_load(x_desc, [row, j * COLUMNS], full.index(j), ring.index(j))
            mbarrier.arrive(full.index(j), count=1)
    slot = 0
    phase = 0
    for j in range(tiles):
        mbarrier.wait(full.index(slot), phase)
        x = ring.index(slot).load(layout).to(gl.float32)
        if j + STAGES < tiles:
            fence_async_shared()
            mbarrier.expect(full.index(slot), NBYTES)
            tma_load(x_desc, [row, (j + STAGES) * COLUMNS], full.index(slot), ring.index(slot))
            mbarrier.arrive(full.index(slot), count=1)
        total = total + gl.sum(x * x, 1)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
"""
_SOFTMAX_BODY = """
    keys = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, scores))
    s = s * c + gl.where(keys < sk, 0.0, float("-inf"))[None, :]
    highest = gl.max(s, 1)
    top = gl.where(highest > m, highest, m)
    p = gl.exp2(s - gl.expand_dims(top, 1))
    alpha = gl.exp2(m - top)
    total = gl.fma(total, alpha, gl.sum(p, 1))
    factor = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, output)), 1)
    return p, top, total, o * factor
"""
BODY = "between the first solution markers"  # stands for what the model answer has there

RIGHT_ANSWERS = [
    (
        "cycles added up by unit",
        "q1_1",
        """
def tile_cycles(rows, keys, d):
    scores = rows * keys
    macs = scores * d + scores * d
    return macs / 2048, scores / (4 * 4), (keys * d + keys * d) * 2 / 20
""",
    ),
    (
        "integers for slots",
        "bonus_1_3",
        """
def slots_needed(bandwidth_tb_s, latency_ns, sms, slot_bytes):
    needed = bytes_in_flight(bandwidth_tb_s, latency_ns, sms)
    slots = 1
    while slots * slot_bytes < needed:
        slots += 1
    return slots
""",
    ),
    (
        "owner by counting through the layout",
        "q2_1",
        """
def owner(row, column, shape, size, threads, warps, order):
    place, extents = [row, column], []
    register = lane = warp = 0
    for level, (blocks, name) in enumerate(((size, "r"), (threads, "l"), (warps, "w"), (None, "r"))):
        blocks = blocks or [1 << 30] * 2
        index, weight = 0, 1
        for axis in order:
            index += place[axis] % blocks[axis] * weight
            weight *= blocks[axis] if level < 3 else shape[axis] // (size[axis] * threads[axis] * warps[axis])
            place[axis] //= blocks[axis]
        if name == "l":
            lane = index
        elif name == "w":
            warp = index
        else:
            register += index * (size[0] * size[1] if level == 3 else 1)
    return [warp, lane, register]
""",
    ),
    ("transpose by permute and one layout", "q2_2", ((BODY, _TRANSPOSE_BODY),)),
    ("all slots ordered at first, refilled after reading", "q3_1", ((BODY, _ASYNC_BODY),)),
    ("ring with ifs, a running slot and two arrivals", "q3_2", ((BODY, _RING_BODY),)),
    (
        "repaired by two arrivals",
        "bonus_3_4",
        """
def repairs():
    return {
        "mbarrier.wait(empty.index(slot), (i // STAGES) & 1)":
            "mbarrier.wait(empty.index(slot), 1 - (i // STAGES) % 2)",
        "mbarrier.expect(full.index(slot), x_desc.block_type.nbytes // 2)":
            "mbarrier.expect(full.index(slot), 16 * 32 * 4)",
        "mbarrier.arrive(empty.index(slot), count=1)": "pass",
        "tma.store_wait(1)": "fence_async_shared()\\nmbarrier.arrive(empty.index(slot), count=2)\\ntma.store_wait(0)",
    }
""",
    ),
    (
        "synchronous wgmma",
        "q4_1",
        (
            (
                "acc = warpgroup_mma(a_tile, b_tile.permute([1, 0]), acc, is_async=True)",
                "acc = warpgroup_mma(a_tile, b_tile.permute([1, 0]), acc)",
            ),
            ("        acc = warpgroup_mma_wait(0, deps=[acc])  # public\n", ""),
        ),
    ),
    (
        "first product overwrites the accumulator",
        "q4_1",
        (("acc, is_async=True)", "acc, use_acc=k > 0, is_async=True)"),),
    ),
    ("scores scaled first, additive mask", "q5_1", ((BODY, _SOFTMAX_BODY),)),
    (
        "producer with two announcements, consumers that arrive for both",
        "q5_2",
        (
            (
                "mbarrier.expect(full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)",
                "mbarrier.expect(full.index(slot), k_desc.block_type.nbytes)\n"
                "        mbarrier.expect(full.index(slot), v_desc.block_type.nbytes)",
            ),
            ("mbarrier.init(full.index(i), count=1)", "mbarrier.init(full.index(i), count=2)"),
        ),
    ),
    (
        "both tiles awaited before either product",
        "q5_3",
        (
            ("        mbarrier.wait(v_full.index(v_slot), v_phase)\n", ""),
            (
                "        mbarrier.wait(k_full.index(k_slot), k_phase)\n",
                "        mbarrier.wait(v_full.index(v_slot), v_phase)\n"
                "        mbarrier.wait(k_full.index(k_slot), k_phase)\n",
            ),
        ),
    ),
    (
        "causal mask by distance",
        "bonus_5_5",
        (
            (
                "seen = (keys[None, :] <= position[:, None]) & (keys < sk)[None, :]",
                "seen = ((position[:, None] - keys[None, :]) >= 0) & (keys[None, :] <= sk - 1)",
            ),
            (
                "blocks = gl.minimum(gl.cdiv(sk, BLOCK_N), gl.cdiv(row + BLOCK_M + sk - sq, BLOCK_N))",
                "blocks = (gl.minimum(sk, row + BLOCK_M + sk - sq) + BLOCK_N - 1) // BLOCK_N",
            ),
        ),
    ),
]
