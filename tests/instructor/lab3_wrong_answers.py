"""Typical mistakes in lab 3 by answer cell, each with words of the messages; `mistakes` explains a row."""

from tests.instructor.lab_cases import BODY, mistakes

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
        loses=("q1_1_budget_tests",),
    ),
    *mistakes(
        "q2_1",
        (
            "order read backwards",
            ("fast, slow = order", "slow, fast = order"),
            ("fastest dimension first", "Expected here"),
        ),
        (
            "lanes do not wrap",
            ("return warp, lane,", "return warp, lane + 32 * warp,"),
            ("Expected here", "lanes 0 to 31"),
        ),
        (
            "repetitions counted along columns first",
            (
                "repetition = flatten([position[i] // tile[i] for i in (0, 1)], [shape[i] // tile[i] for i in (0, 1)])",
                "repetition = column // tile[1] + shape[1] // tile[1] * (row // tile[0])",
            ),
            "Repetitions are counted in the layout's order",
        ),
        (
            "registers before repetitions",
            (
                "piece + size[0] * size[1] * repetition",
                "repetition + shape[0] * shape[1] // (tile[0] * tile[1]) * piece",
            ),
            "within the piece",
        ),
        ("repetitions dropped", (" + size[0] * size[1] * repetition", ""), "further registers"),
    ),
    *mistakes(
        "q2_2",
        (
            "written along the columns",
            ("([4, 1], [8, 4], [1, 4], [0, 1])", "([1, 4], [4, 8], [4, 1], [1, 0])"),
            "sectors of 32 bytes",
        ),
        ("no conversion", ("    tile = gl.convert_layout(tile, writing)\n", ""), "convert_layout"),
        ("no mask on the store", ("tile, mask=mask)", "tile)"), ("out of bounds", "A mask is missing")),
        (
            "rows taken to lie side by side",
            (
                ("x_ptr + rows[:, None] * x_stride", "x_ptr + rows[:, None] * n"),
                ("y_ptr + columns[None, :] * y_stride", "y_ptr + columns[None, :] * m"),
            ),
            ("x_stride =", "a stride is wrong"),
        ),
        (
            "not transposed",
            ("columns[None, :] * y_stride + rows[:, None]", "rows[:, None] * y_stride + columns[None, :]"),
            ("addresses turned", "out of bounds"),
        ),
        ("mask of the load without columns", (" & (columns < n)[None, :]\n    tile", "\n    tile"), "out of bounds"),
        ("half a warp in the layout", ("([1, 4], [4, 8]", "([1, 4], [2, 8]"), "a warp has 32"),
        ("layout without constexpr", ("writing: gl.constexpr = gl.", "writing = gl."), "gl.constexpr = ..."),
        (
            "mask of the store with m and n exchanged",
            (
                "(columns < n)[None, :]\n    gl.store",
                "(columns < n)[None, :]\n    mask = (rows < n)[:, None] & (columns < m)[None, :]\n    gl.store",
            ),
            ("m and n exchanged", "never written"),
        ),
    ),
    *mistakes(
        "q3_1",
        (
            "no commit in the loop",
            ("        async_copy.commit_group()\n        async_copy.wait_group", "        async_copy.wait_group"),
            "async_copy.wait_group",
        ),
        ("waits for one group too few", ("wait_group(STAGES - 1)", "wait_group(STAGES)"), "nothing orders them"),
        ("waits for everything", ("wait_group(STAGES - 1)", "wait_group(0)"), "the copies wait for each other"),
        ("copy into the slot in use", ("start_copy(a_ring, ahead", "start_copy(a_ring, i"), ("race", "wrong in")),
        ("program's offset forgotten", ("at = first + i * TILE", "at = i * TILE"), ("wrong in", "never written")),
        (
            "the next tile ordered after this one is read",
            (
                BODY,
                """
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
""",
            ),
            "when tile 0 is read",
        ),
        ("store without mask", ("total, mask=at < n)", "total)"), "A mask is missing"),
        (
            "commit only when something was issued",
            (
                "        async_copy.commit_group()\n        async_copy.wait_group",
                "            async_copy.commit_group()\n        async_copy.wait_group",
            ),
            ("race", "wait_group", "unfinished"),
        ),
        (
            "constant reused in the loop",
            (
                ("        ahead = i + STAGES - 1\n", "        t = i\n        ahead = i + STAGES - 1\n"),
                (
                    "    for i in gl.static_range(STAGES - 1):\n",
                    "    for t in gl.static_range(STAGES):\n        pass\n    for i in gl.static_range(STAGES - 1):\n",
                ),
            ),
            "was a compile-time constant before this loop",
        ),
    ),
    *mistakes(
        "q3_2",
        (
            "barriers not initialized",
            ("mbarrier.init(full.index(i), count=1)", "pass"),
            "was not initialized by mbarrier.init",
        ),
        ("no fence before the refill", ("        fence_async_shared()  # public\n", ""), "missing fence"),
        (
            "parity of the tile, not of the round",
            ("wait(full.index(slot), (i // STAGES) & 1)", "wait(full.index(slot), i & 1)"),
            ("parity", "race", "deadlock"),
        ),
        (
            "phase, not parity",
            ("wait(full.index(slot), (i // STAGES) & 1)", "wait(full.index(slot), i // STAGES)"),
            "Take it `& 1`",
        ),
        (
            "half of the bytes announced",
            ("expect(full.index(i), NBYTES", "expect(full.index(i), NBYTES // 2"),
            ("announced", "mbarrier.expect"),
        ),
        (
            "refill not announced",
            ("        mbarrier.expect(full.index(slot), NBYTES, pred=more)\n", ""),
            "no mbarrier.expect announced",
        ),
        ("goes on behind the last tile", ("more = i + STAGES < tiles", "more = i >= 0"), ("unfinished", "TMA copies")),
        (
            "refilled before it is read",
            (
                (
                    "        x = ring.index(slot).load(layout).to(gl.float32)\n        fence_async_shared()  # public\n",
                    "",
                ),
                (
                    "        total += gl.sum(x * x, 1)\n",
                    "        x = ring.index(slot).load(layout).to(gl.float32)\n        total += gl.sum(x * x, 1)\n",
                ),
            ),
            ("race", "barrier"),
        ),
        (
            "endless loop",
            (
                ("    for i in range(tiles):  # public\n", "    i = 0\n    while i < tiles:\n"),
                ("        more = i + STAGES < tiles\n", "        more = i < 0\n"),
                ("mbarrier.wait(full.index(slot), (i // STAGES) & 1)", "mbarrier.wait(full.index(slot), 0)"),
            ),
            "More than",
        ),
        (
            "one tile too many",
            ("for i in range(tiles):", "for i in range(tiles + 1):"),
            ("TMA copies", "race", "deadlock", "parity"),
        ),
        (
            "refill with the same tile",
            ("[row, (i + STAGES) * COLUMNS]", "[row, i * COLUMNS]"),
            ("refill begin", "wrong in"),
        ),
        ("sum of x", ("total += gl.sum(x * x, 1)", "total += gl.sum(x, 1)"), "sum of x, not of x * x"),
        ("sum over the rows", ("total += gl.sum(x * x, 1)", "total += gl.sum(x * x, 0)"), ("layout", "shape")),
        ("last tile alone", ("total += gl.sum(x * x, 1)", "total = gl.sum(x * x, 1)"), "add to `total`"),
        (
            "two arrivals awaited",
            ("init(full.index(i), count=1)", "init(full.index(i), count=2)"),
            "1 of 2 arrivals missing",
        ),
        (
            "refills at the tile's number",
            ("[row, (i + STAGES) * COLUMNS]", "[row, i + STAGES]"),
            "The refills begin at the tile's number",
        ),
        ("coordinates swapped", ("[row, i * COLUMNS]", "[i * COLUMNS, row]"), "in this order"),
        ("barrier without index", ("wait(full.index(slot), ", "wait(full, "), ".index(i) takes one"),
        ("subscripts for slots", ("ring.index(slot).load", "ring[slot].load"), ".index(i) is slot i"),
        (
            "columns count tiles",
            (("[row, i * COLUMNS]", "[row, i]"), ("[row, (i + STAGES) * COLUMNS]", "[row, i + STAGES]")),
            "count elements",
        ),
    ),
    *mistakes(
        "bonus_3_4",
        ("repaired but for the fence", _REPAIRS.format(behind="", more=_STORE + _COUNT), "missing fence"),
        ("repaired but for the count", _REPAIRS.format(behind=_FENCE, more=_STORE), "1 of 2 arrivals missing"),
        ("repaired but for the store", _REPAIRS.format(behind=_FENCE, more=_COUNT), "tma.store_wait"),
        (
            "more lines than six",
            """
right_repairs = repairs
def repairs():
    return {**right_repairs(), "slot = i % STAGES": "slot = i % STAGES", "out.store(x * factor)": "out.store(x * factor)"}
""",
            "6 at most",
        ),
        (
            "repairs what is not there",
            'def repairs():\n    return {"mbarrier.wait(empty, 0)": "pass"}\n',
            "stands 0 times",
        ),
    ),
    *mistakes(
        "q4_1",
        (
            "accumulator read too early",
            ("        acc = warpgroup_mma_wait(0, deps=[acc])  # public\n", ""),
            "warpgroup_mma_wait",
        ),
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
        (
            "tile of C at column, row",
            ("[row, column], c_tile", "[column, row], c_tile"),
            ("leaves to [column, row]", "never written"),
        ),
        ("wait for all but one", ("_wait(0, deps=[acc])", "_wait(1, deps=[acc])"), ("race", "still being computed")),
        ("result of the wait dropped", ("acc = warpgroup_mma_wait", "warpgroup_mma_wait"), "assign the result"),
        ("two warps by two", ("[3, 0], [4, 1]", "[3, 0], [2, 2]"), "multiple of 4"),
        ("K of 8", ("[16, BLOCK_N, 16]", "[16, BLOCK_N, 8]"), "K is 32 bytes"),
        ("stored in fp32", ("c_tile.store(acc.to(c_desc.dtype))", "c_tile.store(acc)"), "use .to("),
        (
            "fence after the TMA store",
            (
                "    fence_async_shared()  # public\n    tma_store(c_desc, [row, column], c_tile)  # public\n",
                "    tma_store(c_desc, [row, column], c_tile)  # public\n    fence_async_shared()  # public\n",
            ),
            "missing fence",
        ),
        ("nothing to wait for", ("_wait(0, deps=[acc])", "_wait(0, deps=[])"), "`deps` is empty"),
    ),
    *mistakes(
        "q5_1",
        ("tail of keys not masked", ("(keys < sk)[None, :]", "(keys < sk + 64)[None, :]"), "keys in blocks of 64"),
        ("output not rescaled", ("    o = o * gl", "    unused = o * gl"), "wrong in"),
        ("sum not rescaled", ("total = total * alpha + gl.sum(p, 1)", "total = total + gl.sum(p, 1)"), "wrong in"),
        (
            "no maximum subtracted",
            ("gl.maximum(m, gl.max(s, 1))", "gl.maximum(m, gl.max(s, 1)) * 0.0"),
            ("NaN", "infinite", "wrong in"),
        ),
        (
            "maximum of this block alone",
            ("gl.maximum(m, gl.max(s, 1))", "gl.max(s, 1)"),
            ("NaN", "wrong in", "infinite"),
        ),
        (
            "never divided",
            ("    o = o / gl.convert_layout(total, gl.SliceLayout(1, output))[:, None]\n", ""),
            "wrong in",
        ),
        (
            "factor in the scores' layout",
            ("gl.convert_layout(alpha, gl.SliceLayout(1, output))", "alpha"),
            ("layout", "convert_layout"),
        ),
        ("factor without c", ("alpha = gl.exp2((m - top) * c)", "alpha = gl.exp2(m - top)"), "in the factor"),
        ("old maximum returned", ("return p, top, total, o", "return p, m, total, o"), "Only the last block"),
        ("one key too many", ("(keys < sk)[None, :]", "(keys <= sk)[None, :]"), "One key too many"),
        ("last key masked", ("(keys < sk)[None, :]", "(keys < sk - 1)[None, :]"), "The last key takes no part"),
        ("keys counted in the block", ("keys = key + gl", "keys = gl"), "counts the keys of each block from 0"),
        ("alpha turned around", ("alpha = gl.exp2((m - top) * c)", "alpha = gl.exp2((top - m) * c)"), "turned around"),
        ("powers of e", (("p = gl.exp2(", "p = gl.exp("), ("alpha = gl.exp2(", "alpha = gl.exp(")), "powers of e"),
        ("sum lost", ("total = total * alpha + gl.sum(p, 1)", "total = gl.sum(p, 1)"), "the sum so far is lost"),
        ("maximum over the rows", ("gl.max(s, 1)", "gl.max(s, 0)"), ("layout", "shape")),
        (
            "p and alpha without c",
            (
                ("alpha = gl.exp2((m - top) * c)", "alpha = gl.exp2(m - top)"),
                ("p = gl.exp2((s - top[:, None]) * c)", "p = gl.exp2(s - top[:, None])"),
            ),
            "c is missing",
        ),
    ),
    *mistakes(
        "q5_2",
        (
            "empty counts one arrival",
            ("init(empty.index(i), count=2)", "init(empty.index(i), count=1)"),
            ("arrival", "race"),
        ),
        ("slot never given back", ("mbarrier.arrive(empty.index(slot), count=1)", "pass"), "2 of 2 arrivals missing"),
        ("producer waits for the first round", ("((i // STAGES) & 1) ^ 1)", "(i // STAGES) & 1)"), "deadlock"),
        ("bytes of V not announced", (" + v_desc.block_type.nbytes", ""), ("announced", "more than mbarrier.expect")),
        (
            "consumer does not wait",
            ("mbarrier.wait(full.index(slot), (i // STAGES) & 1)", "pass"),
            "nothing orders them",
        ),
        (
            "producer does not wait",
            ("        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)\n", ""),
            ("race", "barrier"),
        ),
        (
            "slot given back before it is used",
            (
                ("mbarrier.arrive(empty.index(slot), count=1)", "pass"),
                (
                    "        mbarrier.wait(full.index(slot), (i // STAGES) & 1)  # public\n",
                    "        mbarrier.wait(full.index(slot), (i // STAGES) & 1)\n        mbarrier.arrive(empty.index(slot), count=1)\n",
                ),
            ),
            ("race", "barrier"),
        ),
        (
            "parity of the tile",
            ("wait(full.index(slot), (i // STAGES) & 1)", "wait(full.index(slot), i & 1)"),
            ("parity", "race", "deadlock"),
        ),
        (
            "last block forgotten",
            ("    for i in range(gl.cdiv(sk, BLOCK_N)):  # public\n", "    for i in range(sk // BLOCK_N):  # public\n"),
            ("left out", "deadlock"),
        ),
        (
            "one tile of V",
            ("tma_load(v_desc, [head, i * BLOCK_N, 0]", "tma_load(v_desc, [head, 0, 0]"),
            "same block of V",
        ),
        (
            "one tile of K",
            ("tma_load(k_desc, [head, i * BLOCK_N, 0]", "tma_load(k_desc, [head, 0, 0]"),
            "K of every step is the same block",
        ),
        (
            "each thread is to arrive",
            ("init(empty.index(i), count=2)", "init(empty.index(i), count=256)"),
            "arrivals missing",
        ),
        (
            "full counts two",
            ("init(full.index(i), count=1)", "init(full.index(i), count=2)"),
            "1 of 2 arrivals missing",
        ),
        (
            "two arrivals of each consumer",
            ("arrive(empty.index(slot), count=1)", "arrive(empty.index(slot), count=2)"),
            ("arrival", "race"),
        ),
        (
            "arrives at the wrong barrier",
            ("arrive(empty.index(slot)", "arrive(full.index(slot)"),
            ("arrival", "deadlock", "parity"),
        ),
        (
            "head forgotten",
            ("tma_load(k_desc, [head, i * BLOCK_N, 0]", "tma_load(k_desc, [0, i * BLOCK_N, 0]"),
            ("wrong in", "NaN"),
        ),
        (
            "rows count blocks",
            (
                ("tma_load(k_desc, [head, i * BLOCK_N, 0]", "tma_load(k_desc, [head, i, 0]"),
                ("tma_load(v_desc, [head, i * BLOCK_N, 0]", "tma_load(v_desc, [head, i, 0]"),
            ),
            "count elements",
        ),
    ),
    *mistakes(
        "q5_3",
        (
            "nothing overlaps",
            ("s = warpgroup_mma_wait(1, deps=[s])", "s, o = warpgroup_mma_wait(0, deps=[s, o])"),
            "softmax runs",
        ),
        (
            "scores read too early",
            ("s = warpgroup_mma_wait(1, deps=[s])", "s = warpgroup_mma_wait(2, deps=[s])"),
            "read while it is still being computed",
        ),
        (
            "output rescaled under its product",
            (
                (
                    "        o = warpgroup_mma_wait(0, deps=[o])\n        mbarrier.arrive(v_empty.index(v_slot), count=1)\n",
                    "",
                ),
                (
                    "[:, None]  # public\n",
                    "[:, None]\n        o = warpgroup_mma_wait(0, deps=[o])\n        mbarrier.arrive(v_empty.index(v_slot), count=1)\n",
                ),
            ),
            "read while it is still being computed",
        ),
        (
            "V's slot given back too early",
            (
                "        o = warpgroup_mma_wait(0, deps=[o])\n        mbarrier.arrive(v_empty.index(v_slot), count=1)\n",
                "        mbarrier.arrive(v_empty.index(v_slot), count=1)\n        o = warpgroup_mma_wait(0, deps=[o])\n",
            ),
            "race",
        ),
        ("K's slot never given back", ("        mbarrier.arrive(k_empty.index(k_slot), count=1)\n", ""), "deadlock"),
        (
            "output not rescaled in the overlap",
            ("        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]  # public\n", ""),
            "wrong in",
        ),
        (
            "p never replaced",
            ("p = gl.convert_layout(p_next.to(dtype), left)", "unused = gl.convert_layout(p_next.to(dtype), left)"),
            "P of the first block",
        ),
        (
            "scores accumulate",
            (
                "s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)",
                "s = warpgroup_mma(q, k, o, is_async=True)",
            ),
            "wrong in",
        ),
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
        (
            "P announced before it is stored",
            (
                "        p_view.store(gl.convert_layout(p.to(dtype), narrow))\n        mbarrier.arrive(bars.p_full.index(TILE), count=1)\n",
                "        mbarrier.arrive(bars.p_full.index(TILE), count=1)\n        p_view.store(gl.convert_layout(p.to(dtype), narrow))\n",
            ),
            "race",
        ),
        ("alpha never announced", ("        mbarrier.arrive(bars.alpha_full.index(TILE), count=1)\n", ""), "deadlock"),
        ("scores read early", ("        mbarrier.wait(bars.s_full.index(TILE), i & 1)\n", ""), ("race", "layout")),
        (
            "O rescaled under its product",
            ("                mbarrier.wait(bars.o_done.index(tile), (i - 1) & 1)\n", ""),
            ("race", "never waited for"),
        ),
        (
            "O never rescaled",
            ("                rescale(output.index(tile), alpha, output.index(tile), False)\n", ""),
            "not rescaled",
        ),
        (
            "waits for the product of this block",
            ("mbarrier.wait(bars.o_done.index(tile), (i - 1) & 1)", "mbarrier.wait(bars.o_done.index(tile), i & 1)"),
            ("deadlock", "parity"),
        ),
    ),
]
