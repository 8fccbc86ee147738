"""Typical mistakes in lab 3 by answer cell, each with words of the messages: `mistakes` explains a row, `mistakes_in_text` a cell."""

from tests.instructor.lab_cases import mistakes, mistakes_in_text

_REPAIRS = """
def repairs():
    return {{
        "mbarrier.wait(empty.index(slot), (i // STAGES) & 1)": "mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)",
        "mbarrier.expect(full.index(slot), x_desc.block_type.nbytes // 2)":
            "mbarrier.expect(full.index(slot), x_desc.block_type.nbytes)",
        "mbarrier.arrive(empty.index(slot), count=1)": "pass",
        "x = ring.index(slot).load(layout)": "x = ring.index(slot).load(layout)\\n{behind}mbarrier.arrive(empty.index(slot), count=1)",
        {more}
    }}
"""
_STORE, _COUNT = (
    '"tma.store_wait(1)": "tma.store_wait(0)",',
    '"mbarrier.init(empty.index(i), count=2)": "mbarrier.init(empty.index(i), count=1)",',
)
_FENCE = "fence_async_shared()\\n"

WRONG_ANSWERS = [
    *mistakes(
        "q1_1",
        ("MACs for FLOPs", ("return 2 * 2 *", "return 2 *"), "two FLOPs for each multiply-accumulate"),
        ("Q loaded with each block", ("2 * keys * d * 2 / 20", "(4 * keys + 2 * rows) * d / 20"), "before the loop"),
        ("exponentials of one quarter", ("rows * keys / 16", "rows * keys / 4"), "four"),
        ("K alone is loaded", ("2 * keys * d * 2 / 20", "2 * keys * d / 20"), "K and V"),
    ),
    *mistakes(
        "q1_1",
        ("one ring for K and V", ("2 * stages * keys", "stages * keys"), "a ring each"),
        ("one slot of V, whatever the stages", ("2 * stages * keys", "(stages + 1) * keys"), "shared_bytes"),
        ("registers of the scores alone", ("(keys + d) / 128", "keys / 128"), "lies in registers, too"),
        ("elements for bytes", ("return 2 * (consumers", "return (consumers"), "two bytes"),
        ("one Q for all consumers", ("consumers * 64", "64"), "64 rows of Q of its own"),
        ("registers of one warp", ("(keys + d) / 128", "(keys + d) / 32"), "128 threads share"),
        ("registers of two warps", ("(keys + d) / 128", "(keys + d) / 64"), "128 threads share"),
        loses=("q1_1_budget_tests",),
    ),
    *mistakes(
        "q2_1",
        ("order read backwards", ("fast, slow =", "slow, fast ="), ("fastest dimension first", "expected")),
        ("repetitions dropped", (" + size[0] * size[1] * repetition", ""), "further registers"),
    ),
    *mistakes(
        "q2_2",
        ("no conversion", ("    tile = gl.convert_layout(tile, writing)\n", ""), "convert_layout"),
        ("no mask on the store", ("tile, mask=mask)", "tile)"), ("out of bounds", "A mask is missing")),
        ("mask of the load without columns", (" & (columns < n)[None, :]\n    tile", "\n    tile"), "out of bounds"),
        ("half a warp in the layout", ("([1, 4], [4, 8]", "([1, 4], [2, 8]"), "a warp has 32"),
        ("layout without constexpr", ("writing: gl.constexpr = gl.", "writing = gl."), "gl.constexpr = ..."),
    ),
    *mistakes(
        "q3_1",
        ("no commit in the loop", (".commit_group()\n        async_copy.", "."), "async_copy.wait_group"),
        ("waits for one group too few", ("wait_group(STAGES - 1)", "wait_group(STAGES)"), "nothing orders them"),
        ("waits for everything", ("wait_group(STAGES - 1)", "wait_group(0)"), "the copies wait for each other"),
        ("copy into the slot in use", ("start_copy(a_ring, ahead", "start_copy(a_ring, i"), ("race", "wrong in")),
        ("program's offset forgotten", ("at = first + i * TILE", "at = i * TILE"), ("wrong in", "never written")),
        ("store without mask", ("total, mask=at < n)", "total)"), "A mask is missing"),
    ),
    *mistakes(
        "q3_2",
        ("no fence before the refill", ("        fence_async_shared()  # public\n", ""), "missing fence"),
        ("parity of the tile, not of the round", ("(i // STAGES) & 1", "i & 1"), ("parity", "race", "deadlock")),
        ("phase, not parity", (".index(slot), (i // STAGES) & 1", ".index(slot), i // STAGES"), "Take it `& 1`"),
        ("half of the bytes announced", ("(i), NBYTES", "(i), NBYTES // 2"), ("announced", "mbarrier.expect")),
        ("goes on behind the last tile", ("more = i + STAGES < tiles", "more = i >= 0"), ("unfinished", "TMA copies")),
        (
            "endless loop",
            (
                ("    for i in range(tiles):  # public\n", "    i = 0\n    while i < tiles:\n"),
                ("        more = i + STAGES < tiles\n", "        more = i < 0\n"),
                ("mbarrier.wait(full.index(slot), (i // STAGES) & 1)", "mbarrier.wait(full.index(slot), 0)"),
            ),
            "More than",
        ),
        ("one tile too many", ("in range(tiles)", "in range(tiles + 1)"), ("TMA copies", "race", "deadlock", "parity")),
        ("refill with the same tile", ("row, (i + STAGES) *", "row, i *"), ("refill begin", "wrong in")),
        ("sum of x", ("total += gl.sum(x * x, 1)", "total += gl.sum(x, 1)"), "sum of x, not of x * x"),
        ("sum over the rows", ("total += gl.sum(x * x, 1)", "total += gl.sum(x * x, 0)"), ("layout", "shape")),
        ("last tile alone", ("total += gl.sum(x * x, 1)", "total = gl.sum(x * x, 1)"), "add to `total`"),
        ("two arrivals awaited", ("(full.index(i), count=1)", "(full.index(i), count=2)"), "1 of 2 arrivals missing"),
        ("coordinates swapped", ("[row, i * COLUMNS]", "[i * COLUMNS, row]"), "in this order"),
        ("barrier without index", ("wait(full.index(slot), ", "wait(full, "), ".index(i) takes one"),
        ("subscripts for slots", ("ring.index(slot).load", "ring[slot].load"), ".index(i) is slot i"),
        ("columns count tiles", (("i * COLUMNS", "i"), ("(i + STAGES) * COLUMNS", "i + STAGES")), "count elements"),
    ),
    *mistakes(
        "bonus_3_4",
        ("repaired but for the fence", _REPAIRS.format(behind="", more=_STORE + _COUNT), "missing fence"),
        ("repaired but for the count", _REPAIRS.format(behind=_FENCE, more=_STORE), "1 of 2 arrivals missing"),
        ("repaired but for the store", _REPAIRS.format(behind=_FENCE, more=_COUNT), "tma.store_wait"),
    ),
    *mistakes(
        "q4_1",
        ("Ampere's layout", ("Layout([3, 0]", "Layout([2, 0]"), "version [3, 0]"),
        ("B not turned", ("b_tile.permute([1, 0])", "b_tile"), ("layout", "wrong in", "shape")),
        ("steps not added up", ("acc, is_async=True)", "acc, use_acc=False, is_async=True)"), "wrong in"),
        *(
            (
                f"the accumulator rounded to {dtype} after each step",
                ("deps=[acc])  # public\n", f"deps=[acc]).to(gl.{dtype}).to(gl.float32)\n"),
                ("does that stay in fp32", "overflow in 16 bits", "something else multiplies", "A is (100, 200)"),
            )
            for dtype in ("bfloat16", "float16")
        ),
        ("no fence before the TMA store", ("    fence_async_shared()  # public\n", ""), "missing fence"),
        ("kernel ends before its store", ("    tma.store_wait(0)  # public\n", ""), "unfinished"),
        ("tile of C at column, row", ("[row, column]", "[column, row]"), ("leaves to [column, row]", "never written")),
        ("wait for all but one", ("_wait(0, deps=[acc])", "_wait(1, deps=[acc])"), ("race", "still being computed")),
        ("result of the wait dropped", ("acc = warpgroup_mma_wait", "warpgroup_mma_wait"), "assign the result"),
        ("two warps by two", ("[3, 0], [4, 1]", "[3, 0], [2, 2]"), "multiple of 4"),
        ("K of 8", ("[16, BLOCK_N, 16]", "[16, BLOCK_N, 8]"), "K is 32 bytes"),
        ("stored in fp32", ("c_tile.store(acc.to(c_desc.dtype))", "c_tile.store(acc)"), "use .to("),
        ("nothing to wait for", ("_wait(0, deps=[acc])", "_wait(0, deps=[])"), "`deps` is empty"),
    ),
    *mistakes(
        "q5_1",
        ("tail of keys not masked", ("(keys < sk)[None, :]", "(keys < sk + 64)[None, :]"), "Keys that do not exist"),
        ("output not rescaled", ("    o = o * gl", "    unused = o * gl"), "wrong in"),
        ("sum not rescaled", ("total = total * alpha + gl.sum(p, 1)", "total = total + gl.sum(p, 1)"), "wrong in"),
        ("no maximum subtracted", ("(m, gl.max(s, 1))", "(m, gl.max(s, 1)) * 0.0"), ("NaN", "infinite", "wrong in")),
        ("maximum of this block alone", (".maximum(m, gl.max(s, 1))", ".max(s, 1)"), ("NaN", "wrong in", "infinite")),
        ("factor without c", ("alpha = gl.exp2((m - top) * c)", "alpha = gl.exp2(m - top)"), "in the factor"),
        ("old maximum returned", ("return p, top, total, o", "return p, m, total, o"), "Only the last block"),
        ("one key too many", ("(keys < sk)[None, :]", "(keys <= sk)[None, :]"), "One key too many"),
        ("last key masked", ("(keys < sk)[None, :]", "(keys < sk - 1)[None, :]"), "The last key takes no part"),
        ("keys counted in the block", ("keys = key + gl", "keys = gl"), "counts the keys of each block from 0"),
        ("alpha inverted", ("alpha = gl.exp2((m - top) * c)", "alpha = gl.exp2((top - m) * c)"), "is inverted"),
        ("powers of e", (("p = gl.exp2(", "p = gl.exp("), ("alpha = gl.exp2(", "alpha = gl.exp(")), "powers of e"),
        ("sum lost", ("total = total * alpha + gl.sum(p, 1)", "total = gl.sum(p, 1)"), "the sum so far is lost"),
        ("maximum over the rows", ("gl.max(s, 1)", "gl.max(s, 0)"), ("layout", "shape")),
    ),
    *mistakes(
        "q5_2",
        ("empty counts one arrival", ("(empty.index(i), count=2)", "(empty.index(i), count=1)"), ("arrival", "race")),
        ("slot never given back", ("mbarrier.arrive(empty.index(slot), count=1)", "pass"), "2 of 2 arrivals missing"),
        ("producer waits for the first round", ("((i // STAGES) & 1) ^ 1)", "(i // STAGES) & 1)"), "deadlock"),
        ("bytes of V not announced", (" + v_desc.block_type.nbytes", ""), ("announced", "more than mbarrier.expect")),
        ("parity of the tile", ("(slot), (i // STAGES) & 1", "(slot), i & 1"), ("parity", "race", "deadlock")),
        ("last block forgotten", ("(gl.cdiv(sk, BLOCK_N)):  #", "(sk // BLOCK_N):  #"), ("left out", "deadlock")),
        ("one tile of V", ("(v_desc, [head, i * BLOCK_N, 0]", "(v_desc, [head, 0, 0]"), "same block of V"),
        ("one tile of K", ("k_desc, [head, i * BLOCK_N", "k_desc, [head, 0"), "K of every step is the same block"),
        ("each thread is to arrive", ("(empty.index(i), count=2)", "(empty.index(i), count=256)"), "arrivals missing"),
        ("full counts two", ("(full.index(i), count=1)", "(full.index(i), count=2)"), "1 of 2 arrivals missing"),
        ("two arrivals of each consumer", (".index(slot), count=1", ".index(slot), count=2"), ("arrival", "race")),
        ("arrives at the wrong barrier", ("arrive(empty.", "arrive(full."), ("arrival", "deadlock", "parity")),
        ("head forgotten", ("(k_desc, [head, i * BLOCK_N, 0]", "(k_desc, [0, i * BLOCK_N, 0]"), ("wrong in", "NaN")),
    ),
    *mistakes(
        "q5_3",
        ("scores read too early", ("(1, deps=[s])", "(2, deps=[s])"), "read while it is still being computed"),
        ("K's slot never given back", ("        mbarrier.arrive(k_empty.index(k_slot), count=1)\n", ""), "deadlock"),
        ("scores accumulate", ("(q, k, zero, use_acc=False, is_async=True)", "(q, k, o, is_async=True)"), "wrong in"),
        ("no wait for V", ("        mbarrier.wait(v_full.index(v_slot), v_phase)\n", ""), "nothing orders them"),
    ),
    *mistakes(
        "bonus_6_1",
        ("no commit", ("        tcgen05_commit(done)\n", ""), "deadlock"),
        ("no wait for the product", ("        mbarrier.wait(done, phase)\n", ""), "race"),
        ("the first product adds, too", ("use_acc=k > 0", "use_acc=True"), "uninitialized"),
        ("no product adds", ("use_acc=k > 0", "use_acc=False"), "Only the last step"),
        ("waits for the other parity", ("wait(done, phase)", "wait(done, phase ^ 1)"), ("race", "parity")),
    ),
    *mistakes(
        "bonus_6_2",
        ("alpha never announced", ("        mbarrier.arrive(bars.alpha_full.index(TILE), count=1)\n", ""), "deadlock"),
        ("scores read early", ("        mbarrier.wait(bars.s_full.index(TILE), i & 1)\n", ""), ("race", "layout")),
        ("waits for the product of this block", ("(tile), (i - 1) & 1", "(tile), i & 1"), ("deadlock", "parity")),
        ("a phase that is no parity", ("(tile), (i - 1) & 1", "(tile), i - 1"), "0 or 1"),
    ),
    *mistakes_in_text(r"""
# %% q2_1: lanes do not wrap => expected | lanes 0 to 31
-    return warp, lane, piece + size[0] * size[1] * repetition
+    return warp, lane + 32 * warp, piece + size[0] * size[1] * repetition

# %% q2_1: repetitions counted along columns first => Repetitions are counted in the layout's order
-    repetition = flatten([position[i] // tile[i] for i in (0, 1)], [shape[i] // tile[i] for i in (0, 1)])
+    repetition = column // tile[1] + shape[1] // tile[1] * (row // tile[0])

# %% q2_1: registers before repetitions => within the piece
-    return warp, lane, piece + size[0] * size[1] * repetition
+    return warp, lane, repetition + shape[0] * shape[1] // (tile[0] * tile[1]) * piece

# %% q2_2: written along the columns => sectors of 32 bytes
-    writing: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
+    writing: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])

# %% q2_2: rows taken to lie side by side => x_stride = | a stride is wrong
-    tile = gl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask)
+    tile = gl.load(x_ptr + rows[:, None] * n + columns[None, :], mask=mask)

-    gl.store(y_ptr + columns[None, :] * y_stride + rows[:, None], tile, mask=mask)
+    gl.store(y_ptr + columns[None, :] * m + rows[:, None], tile, mask=mask)

# %% q2_2: not transposed => addresses turned | out of bounds
-    gl.store(y_ptr + columns[None, :] * y_stride + rows[:, None], tile, mask=mask)
+    gl.store(y_ptr + rows[:, None] * y_stride + columns[None, :], tile, mask=mask)

# %% q2_2: mask of the store with m and n exchanged => m and n exchanged | never written
-    columns = column + gl.arange(0, 32, gl.SliceLayout(0, writing))
-    mask = (rows < m)[:, None] & (columns < n)[None, :]
+    columns = column + gl.arange(0, 32, gl.SliceLayout(0, writing))
+    mask = (rows < m)[:, None] & (columns < n)[None, :]
+    mask = (rows < n)[:, None] & (columns < m)[None, :]

# %% q3_1: the next tile ordered after this one is read => when tile 0 is read
    for i in gl.static_range(STAGES - 1):
        start_copy(a_ring, i, a_ptr, first + i * TILE, n, TILE, layout)
        start_copy(b_ring, i, b_ptr, first + i * TILE, n, TILE, layout)
        async_copy.commit_group()
    for i in range(TILES):
        ahead = i + STAGES - 1
        slot = i % STAGES
        total = gl.zeros([TILE], gl.float32, layout)
        if STAGES > 1:
            async_copy.wait_group(STAGES - 2)
            total = a_ring.index(slot).load(layout) + b_ring.index(slot).load(layout)
        if ahead < TILES:
            start_copy(a_ring, ahead % STAGES, a_ptr, first + ahead * TILE, n, TILE, layout)
            start_copy(b_ring, ahead % STAGES, b_ptr, first + ahead * TILE, n, TILE, layout)
        async_copy.commit_group()
        if STAGES == 1:
            async_copy.wait_group(0)
            total = a_ring.index(slot).load(layout) + b_ring.index(slot).load(layout)
        at = first + i * TILE + gl.arange(0, TILE, layout)
        gl.store(c_ptr + at, total, mask=at < n)

# %% q3_1: commit only when something was issued => race | wait_group | unfinished
-            start_copy(b_ring, ahead % STAGES, b_ptr, first + ahead * TILE, n, TILE, layout)
-        async_copy.commit_group()
+            start_copy(b_ring, ahead % STAGES, b_ptr, first + ahead * TILE, n, TILE, layout)
+            async_copy.commit_group()

# %% q3_1: constant reused in the loop => was a compile-time constant before this loop
-    for i in gl.static_range(STAGES - 1):
+    for t in gl.static_range(STAGES):
+        pass
+    for i in gl.static_range(STAGES - 1):

-    for i in range(TILES):
+    for i in range(TILES):
+        t = i

# %% q3_2: barriers not initialized => was not initialized by mbarrier.init
-        mbarrier.init(full.index(i), count=1)  # public
+        pass  # public

# %% q3_2: refill not announced => no mbarrier.expect announced
-        mbarrier.expect(full.index(slot), NBYTES, pred=more)

# %% q3_2: refilled before it is read => race | barrier
-        x = ring.index(slot).load(layout).to(gl.float32)
-        fence_async_shared()  # public

-        tma_load(x_desc, [row, (i + STAGES) * COLUMNS], full.index(slot), ring.index(slot), pred=more)
+        tma_load(x_desc, [row, (i + STAGES) * COLUMNS], full.index(slot), ring.index(slot), pred=more)
+        x = ring.index(slot).load(layout).to(gl.float32)

# %% q3_2: refills at the tile's number => The refills begin at the tile's number
-        tma_load(x_desc, [row, (i + STAGES) * COLUMNS], full.index(slot), ring.index(slot), pred=more)
+        tma_load(x_desc, [row, i + STAGES], full.index(slot), ring.index(slot), pred=more)

# %% bonus_3_4: more lines than six => 6 at most
right_repairs = repairs
def repairs():
    return {**right_repairs(), "slot = i % STAGES": "slot = i % STAGES", "out.store(x * factor)": "out.store(x * factor)"}

# %% bonus_3_4: repairs what is not there => stands 0 times
def repairs():
    return {"mbarrier.wait(empty, 0)": "pass"}

# %% q4_1: accumulator read too early => warpgroup_mma_wait
-        acc = warpgroup_mma_wait(0, deps=[acc])  # public

# %% q4_1: fence after the TMA store => missing fence
-    tma_store(c_desc, [row, column], c_tile)  # public

-    c_tile.store(acc.to(c_desc.dtype))
+    c_tile.store(acc.to(c_desc.dtype))
+    tma_store(c_desc, [row, column], c_tile)  # public

# %% q5_1: never divided => wrong in
-    o = o / gl.convert_layout(total, gl.SliceLayout(1, output))[:, None]

# %% q5_1: factor in the scores' layout => layout | convert_layout
-    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]  # public
+    o = o * alpha[:, None]  # public

# %% q5_1: p and alpha without c => c is missing
-    alpha = gl.exp2((m - top) * c)
-    p = gl.exp2((s - top[:, None]) * c)
+    alpha = gl.exp2(m - top)
+    p = gl.exp2(s - top[:, None])

# %% q5_2: consumer does not wait => nothing orders them
-        mbarrier.wait(full.index(slot), (i // STAGES) & 1)  # public
+        pass  # public

# %% q5_2: producer does not wait => race | barrier
-        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)

# %% q5_2: slot given back before it is used => race | barrier
-        mbarrier.wait(full.index(slot), (i // STAGES) & 1)  # public
+        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
+        mbarrier.arrive(empty.index(slot), count=1)

-        mbarrier.arrive(empty.index(slot), count=1)  # public
+        pass  # public

# %% q5_2: rows count blocks => count elements
-        tma_load(k_desc, [head, i * BLOCK_N, 0], full.index(slot), k_ring.index(slot))
-        tma_load(v_desc, [head, i * BLOCK_N, 0], full.index(slot), v_ring.index(slot))
+        tma_load(k_desc, [head, i, 0], full.index(slot), k_ring.index(slot))
+        tma_load(v_desc, [head, i, 0], full.index(slot), v_ring.index(slot))

# %% q5_3: nothing overlaps => softmax runs
-        s = warpgroup_mma_wait(1, deps=[s])
+        s, o = warpgroup_mma_wait(0, deps=[s, o])

# %% q5_3: output rescaled under its product => read while it is still being computed
-        p_next, m, total, alpha = online_softmax(s, m, total, c)
+        p_next, m, total, alpha = online_softmax(s, m, total, c)
+        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]

-        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]  # public

# %% q5_3: V's slot given back too early => race
-        mbarrier.arrive(v_empty.index(v_slot), count=1)

-        p_next, m, total, alpha = online_softmax(s, m, total, c)
+        p_next, m, total, alpha = online_softmax(s, m, total, c)
+        mbarrier.arrive(v_empty.index(v_slot), count=1)

# %% q5_3: output not rescaled in the overlap => wrong in
-        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]  # public

# %% q5_3: p never replaced => P of the first block
-        p = gl.convert_layout(p_next.to(dtype), left)
+        unused = gl.convert_layout(p_next.to(dtype), left)

# %% bonus_6_2: P announced before it is stored => race
-        mbarrier.arrive(bars.p_full.index(TILE), count=1)

-        mbarrier.arrive(bars.alpha_full.index(TILE), count=1)
+        mbarrier.arrive(bars.alpha_full.index(TILE), count=1)
+        mbarrier.arrive(bars.p_full.index(TILE), count=1)

# %% bonus_6_2: O rescaled under its product => race | never waited for
-                mbarrier.wait(bars.o_done.index(tile), (i - 1) & 1)  # public

# %% bonus_6_2: O written out as if in shared memory => takes no dim in this Triton
-                rescale(output.index(tile), alpha, output.index(tile), False)
+                rescale(output.index(tile), alpha, output.index(tile), True)

# %% bonus_6_2: O never rescaled => not rescaled
-                rescale(output.index(tile), alpha, output.index(tile), False)
"""),
]
