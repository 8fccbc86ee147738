"""Right answers to lab 3 that differ from the model answers; `answers_in_text` explains the form."""

from tests.instructor.lab_cases import answers_in_text

RIGHT_ANSWERS = answers_in_text(r"""
# %% q2_1: owner by counting through the layout
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

# %% q2_2: transpose by permute and one layout
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

# %% q3_1: all slots ordered at first, refilled after reading
    for i in gl.static_range(STAGES):
        start_copy(a_ring, i, a_ptr, first + i * TILE, n, TILE, layout)
        start_copy(b_ring, i, b_ptr, first + i * TILE, n, TILE, layout)
        async_copy.commit_group()
    for i in range(TILES):
        async_copy.wait_group(STAGES - 1)
        slot = i % STAGES
        a = a_ring.index(slot).load(layout)
        b = b_ring.index(slot).load(layout)
        if i + STAGES < TILES:
            start_copy(a_ring, slot, a_ptr, first + (i + STAGES) * TILE, n, TILE, layout)
            start_copy(b_ring, slot, b_ptr, first + (i + STAGES) * TILE, n, TILE, layout)
        async_copy.commit_group()
        at = first + i * TILE + gl.arange(0, TILE, layout)
        gl.store(c_ptr + at, a + b, mask=at < n)
    async_copy.wait_group(0)

# %% q3_2: ring with ifs, a running slot and two arrivals
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

# %% bonus_3_4: repaired by two arrivals
def repairs():
    return {
        "mbarrier.wait(empty.index(slot), (i // STAGES) & 1)":
            "mbarrier.wait(empty.index(slot), 1 - (i // STAGES) % 2)",
        "mbarrier.expect(full.index(slot), x_desc.block_type.nbytes // 2)":
            "mbarrier.expect(full.index(slot), 16 * 32 * 4)",
        "mbarrier.arrive(empty.index(slot), count=1)": "pass",
        "tma.store_wait(1)": "fence_async_shared()\nmbarrier.arrive(empty.index(slot), count=2)\ntma.store_wait(0)",
    }

# %% q4_1: synchronous wgmma
-        acc = warpgroup_mma(a_tile, b_tile.permute([1, 0]), acc, is_async=True)
-        acc = warpgroup_mma_wait(0, deps=[acc])  # public
+        acc = warpgroup_mma(a_tile, b_tile.permute([1, 0]), acc)

# %% q4_1: first product overwrites the accumulator
-        acc = warpgroup_mma(a_tile, b_tile.permute([1, 0]), acc, is_async=True)
+        acc = warpgroup_mma(a_tile, b_tile.permute([1, 0]), acc, use_acc=k > 0, is_async=True)

# %% q5_1: scores scaled first, additive mask
    keys = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, scores))
    s = s * c + gl.where(keys < sk, 0.0, float("-inf"))[None, :]
    highest = gl.max(s, 1)
    top = gl.where(highest > m, highest, m)
    p = gl.exp2(s - gl.expand_dims(top, 1))
    alpha = gl.exp2(m - top)
    total = gl.fma(total, alpha, gl.sum(p, 1))
    factor = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, output)), 1)
    return p, top, total, o * factor

# %% q5_2: producer with two announcements, consumers that arrive for both
-        mbarrier.expect(full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
+        mbarrier.expect(full.index(slot), k_desc.block_type.nbytes)
+        mbarrier.expect(full.index(slot), v_desc.block_type.nbytes)

-        mbarrier.init(full.index(i), count=1)  # public
+        mbarrier.init(full.index(i), count=2)  # public

# %% q5_3: both tiles awaited before either product
-        mbarrier.wait(v_full.index(v_slot), v_phase)

-        mbarrier.wait(k_full.index(k_slot), k_phase)
+        mbarrier.wait(v_full.index(v_slot), v_phase)
+        mbarrier.wait(k_full.index(k_slot), k_phase)

# %% q1_1: cycles with powers of two and floats
def tile_cycles(rows, keys, d):
    flops = 2 * rows * keys * d * 2.0
    return [flops / (1024 * 4), float(rows) * keys / 16.0, keys * d * 4 / 20.0]

# %% q2_2: transpose with single elements
-    reading: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
-    writing: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
+    reading: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
+    writing: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])

# %% q3_1: copies issued under a counter of their own
-        start_copy(b_ring, i, b_ptr, first + i * TILE, n, TILE, layout)
-        async_copy.commit_group()
+        start_copy(b_ring, i, b_ptr, first + i * TILE, n, TILE, layout)
+        async_copy.commit_group()
+    slot = 0

-        total = a_ring.index(i % STAGES).load(layout) + b_ring.index(i % STAGES).load(layout)
+        total = a_ring.index(slot).load(layout) + b_ring.index(slot).load(layout)
+        slot = gl.where(slot == STAGES - 1, 0, slot + 1)

# %% q3_1: groups for a and b of their own
-        start_copy(a_ring, i, a_ptr, first + i * TILE, n, TILE, layout)
+        start_copy(a_ring, i, a_ptr, first + i * TILE, n, TILE, layout)
+        async_copy.commit_group()

-            start_copy(a_ring, ahead % STAGES, a_ptr, first + ahead * TILE, n, TILE, layout)
+            start_copy(a_ring, ahead % STAGES, a_ptr, first + ahead * TILE, n, TILE, layout)
+        async_copy.commit_group()
+        if ahead < TILES:

-        async_copy.wait_group(STAGES - 1)
+        async_copy.wait_group(2 * (STAGES - 1))

# %% q3_2: added before the refill
-        total += gl.sum(x * x, 1)

-        x = ring.index(slot).load(layout).to(gl.float32)
+        x = ring.index(slot).load(layout).to(gl.float32)
+        total += gl.sum(x * x, 1)

# %% bonus_3_4: repaired by a fence of the other side
def repairs():
    return {
        "mbarrier.wait(empty.index(slot), (i // STAGES) & 1)": "mbarrier.wait(empty.index(slot), (i // STAGES + 1) & 1)",
        "mbarrier.expect(full.index(slot), x_desc.block_type.nbytes // 2)":
            "mbarrier.expect(full.index(slot), x_desc.block_type.nbytes)",
        "mbarrier.arrive(empty.index(slot), count=1)": "x = ring.index(slot).load(layout)",
        "x = ring.index(slot).load(layout)": "fence_async_shared()\nmbarrier.arrive(empty.index(slot), count=1)",
        "tma.store_wait(1)": "tma.store_wait(0)",
        "mbarrier.init(empty.index(i), count=2)": "mbarrier.init(empty.index(i), count=1)",
    }

# %% q4_1: operand A through registers
-        acc = warpgroup_mma(a_tile, b_tile.permute([1, 0]), acc, is_async=True)
+        a = a_tile.load(gl.DotOperandLayout(0, layout, 2))
+        acc = warpgroup_mma(a, b_tile.permute([1, 0]), acc, is_async=True)

# %% q4_1: converted in a line of its own
-    c_tile.store(acc.to(c_desc.dtype))
+    rounded = gl.cast(acc, c_desc.dtype)
+    c_tile.store(rounded)

# %% q5_1: factor computed from scaled maxima
-    alpha = gl.exp2((m - top) * c)
-    p = gl.exp2((s - top[:, None]) * c)
+    alpha = gl.exp2(m * c - top * c)
+    p = gl.exp2(s * c - (top * c)[:, None])

# %% q5_1: probabilities masked to zero, too
-    p = gl.exp2((s - top[:, None]) * c)
+    p = gl.where((keys < sk)[None, :], gl.exp2((s - top[:, None]) * c), 0.0)

# %% q5_2: a running slot and parity in both partitions
-    for i in range(gl.cdiv(sk, BLOCK_N)):  # public
-        slot = i % STAGES  # public
-        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
+    slot = 0
+    turn = 1
+    for i in range((sk + BLOCK_N - 1) // BLOCK_N):
+        mbarrier.wait(empty.index(slot), turn)

-        tma_load(v_desc, [head, i * BLOCK_N, 0], full.index(slot), v_ring.index(slot))
+        tma_load(v_desc, [head, i * BLOCK_N, 0], full.index(slot), v_ring.index(slot))
+        slot += 1
+        if slot == STAGES:
+            slot = 0
+            turn ^= 1

# %% q5_2: no wait in the first round
-        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
+        mbarrier.wait(empty.index(slot), (i // STAGES - 1) & 1, pred=i >= STAGES)

# %% q5_2: V announced and copied first
-        tma_load(v_desc, [head, i * BLOCK_N, 0], full.index(slot), v_ring.index(slot))

-        mbarrier.expect(full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
+        mbarrier.expect(full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
+        tma_load(v_desc, [head, i * BLOCK_N, 0], full.index(slot), v_ring.index(slot))

# %% q5_3: P converted before the second wait
-        p_next, m, total, alpha = online_softmax(s, m, total, c)
+        p_next, m, total, alpha = online_softmax(s, m, total, c)
+        after = gl.convert_layout(p_next.to(dtype), left)

-        p = gl.convert_layout(p_next.to(dtype), left)
+        p = after

# %% q5_3: K's slot announced before the wait for its product: the producer loads V of this block before it refills K
-        mbarrier.arrive(k_empty.index(k_slot), count=1)

-        o = warpgroup_mma(p, v, o, is_async=True)
+        o = warpgroup_mma(p, v, o, is_async=True)
+        mbarrier.arrive(k_empty.index(k_slot), count=1)

# %% bonus_6_1: the product's own barrier, and a counter of steps
-        tcgen05_mma(a_tile, b_tile.permute([1, 0]), acc, use_acc=k > 0)
-        tcgen05_commit(done)
-        mbarrier.wait(done, phase)
+        tcgen05_mma(a_tile, b_tile.permute([1, 0]), acc, use_acc=k != 0, mbarriers=[done])
+        mbarrier.wait(done, (k // BLOCK_K) % 2)

# %% bonus_6_2: P converted early, and the alpha loaded after the wait
-        alphas.index(TILE).store(alpha)
+        p = gl.convert_layout(p.to(dtype), narrow)
+        alphas.index(TILE).store(alpha)

-        p_view.store(gl.convert_layout(p.to(dtype), narrow))  # public
+        p_view.store(p)

-            if i > 0:
+            if i > 0:
+                mbarrier.wait(bars.o_done.index(tile), (i + 1) & 1)

-                mbarrier.wait(bars.o_done.index(tile), (i - 1) & 1)  # public
""")
