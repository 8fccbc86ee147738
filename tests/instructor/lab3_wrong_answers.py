"""Typical mistakes in lab 3, each with the question that it loses and words of the message.

`code` runs after the model answer in the same cell, and so replaces one of its functions. `replaces` are pairs (text that
the answer's file contains once, new text).
"""

from tests.instructor.lab_cases import BODY, WrongAnswer


def _after(mistake: str, cell: str, phrase, *, code: str, loses: tuple[str, ...] = ()) -> WrongAnswer:
    return WrongAnswer(mistake, cell, code, phrase, loses)


def _instead(mistake: str, cell: str, phrase, *replaces: tuple[str, str]) -> WrongAnswer:
    return WrongAnswer(mistake, cell, phrase=phrase, replaces=replaces)


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
    # ---- 1.1, 1.3
    _after(
        "MACs for FLOPs",
        "q1_1",
        "two FLOPs for each multiply-accumulate",
        code="""
def tile_cycles(rows, keys, d):
    return 2 * rows * keys * d / 4096, rows * keys / 16, 4 * keys * d / 20
""",
    ),
    _after(
        "Q loaded with each block",
        "q1_1",
        "before the loop",
        code="""
def tile_cycles(rows, keys, d):
    return 4 * rows * keys * d / 4096, rows * keys / 16, (4 * keys + 2 * rows) * d / 20
""",
    ),
    _after(
        "one ring for K and V",
        "q1_1",
        "a ring each",
        loses=("q1_1_budget_tests",),
        code="""
def shared_bytes(consumers, keys, d, stages):
    return 2 * consumers * 64 * d + 2 * stages * keys * d
""",
    ),
    _after(
        "one slot of V, whatever the stages",
        "q1_1",
        "shared_bytes",
        loses=("q1_1_budget_tests",),
        code="""
def shared_bytes(consumers, keys, d, stages):
    return 2 * (consumers * 64 * d + (stages + 1) * keys * d)
""",
    ),
    _after(
        "registers of the scores alone",
        "q1_1",
        "lies in registers, too",
        loses=("q1_1_budget_tests",),
        code="""
def registers_per_thread(keys, d):
    return 64 * keys / 128
""",
    ),
    # ---- 2.1
    _after(
        "order read backwards",
        "q2_1",
        ("fastest dimension first", "Expected here"),
        code="""
right_owner = owner
def owner(row, column, shape, size, threads, warps, order):
    return right_owner(row, column, shape, size, threads, warps, order[::-1])
""",
    ),
    _after(
        "lanes do not wrap",
        "q2_1",
        ("Expected here", "lanes 0 to 31"),
        code="""
right_owner = owner
def owner(row, column, shape, size, threads, warps, order):
    warp, lane, register = right_owner(row, column, shape, size, threads, warps, order)
    return warp, lane + 32 * warp, register
""",
    ),
    _after(
        "repetitions counted along columns first",
        "q2_1",
        "Repetitions are counted in the layout's order",
        code="""
right_owner = owner
def owner(row, column, shape, size, threads, warps, order):
    warp, lane, register = right_owner(row, column, shape, size, threads, warps, order)
    tile = [size[i] * threads[i] * warps[i] for i in (0, 1)]
    repetition = column // tile[1] + shape[1] // tile[1] * (row // tile[0])
    return warp, lane, register % (size[0] * size[1]) + size[0] * size[1] * repetition
""",
    ),
    # ---- 2.2
    _instead(
        "written along the columns",
        "q2_2",
        "sectors of 32 bytes",
        (
            "writing: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])",
            "writing: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])",
        ),
    ),
    _instead("no conversion", "q2_2", "convert_layout", ("    tile = gl.convert_layout(tile, writing)\n", "")),
    _instead(
        "no mask on the store",
        "q2_2",
        ("out of bounds", "A mask is missing"),
        (
            "gl.store(y_ptr + columns[None, :] * y_stride + rows[:, None], tile, mask=mask)",
            "gl.store(y_ptr + columns[None, :] * y_stride + rows[:, None], tile)",
        ),
    ),
    _instead(
        "rows taken to lie side by side",
        "q2_2",
        ("x_stride =", "a stride is wrong"),
        ("x_ptr + rows[:, None] * x_stride", "x_ptr + rows[:, None] * n"),
        ("y_ptr + columns[None, :] * y_stride", "y_ptr + columns[None, :] * m"),
    ),
    _instead(
        "not transposed",
        "q2_2",
        ("addresses turned", "out of bounds"),
        ("y_ptr + columns[None, :] * y_stride + rows[:, None]", "y_ptr + rows[:, None] * y_stride + columns[None, :]"),
    ),
    # ---- 3.1
    _instead(
        "no commit in the loop",
        "q3_1",
        "async_copy.wait_group",
        ("        async_copy.commit_group()\n        async_copy.wait_group", "        async_copy.wait_group"),
    ),
    _instead(
        "waits for one group too few", "q3_1", "nothing orders them", ("wait_group(STAGES - 1)", "wait_group(STAGES)")
    ),
    _instead(
        "waits for everything", "q3_1", "the copies wait for each other", ("wait_group(STAGES - 1)", "wait_group(0)")
    ),
    _instead(
        "copy into the slot in use",
        "q3_1",
        ("race", "wrong in"),
        (
            "start_copy(a_ring, ahead % STAGES, a_ptr, first + ahead",
            "start_copy(a_ring, i % STAGES, a_ptr, first + ahead",
        ),
    ),
    _instead(
        "program's offset forgotten",
        "q3_1",
        ("wrong in", "never written"),
        ("at = first + i * TILE + gl.arange(0, TILE, layout)", "at = i * TILE + gl.arange(0, TILE, layout)"),
    ),
    _instead(
        "the next tile ordered after this one is read",
        "q3_1",
        "when tile 0 is read",
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
    ),
    # ---- 3.2
    _instead(
        "barriers not initialized",
        "q3_2",
        "was not initialized by mbarrier.init",
        ("        mbarrier.init(full.index(i), count=1)  # public\n", "        pass\n"),
    ),
    _instead("no fence before the refill", "q3_2", "missing fence", ("        fence_async_shared()  # public\n", "")),
    _instead(
        "parity of the tile, not of the round",
        "q3_2",
        ("parity", "race", "deadlock"),
        ("mbarrier.wait(full.index(slot), (i // STAGES) & 1)", "mbarrier.wait(full.index(slot), i & 1)"),
    ),
    _instead(
        "phase, not parity",
        "q3_2",
        "Take it `& 1`",
        ("mbarrier.wait(full.index(slot), (i // STAGES) & 1)", "mbarrier.wait(full.index(slot), i // STAGES)"),
    ),
    _instead(
        "half of the bytes announced",
        "q3_2",
        ("announced", "mbarrier.expect"),
        (
            "mbarrier.expect(full.index(i), NBYTES, pred=i < tiles)",
            "mbarrier.expect(full.index(i), NBYTES // 2, pred=i < tiles)",
        ),
    ),
    _instead(
        "refill not announced",
        "q3_2",
        "no mbarrier.expect announced",
        ("        mbarrier.expect(full.index(slot), NBYTES, pred=more)\n", ""),
    ),
    _instead(
        "goes on behind the last tile",
        "q3_2",
        ("unfinished", "TMA copies"),
        ("more = i + STAGES < tiles", "more = i >= 0"),
    ),
    _instead(
        "refilled before it is read",
        "q3_2",
        ("race", "barrier"),
        ("        x = ring.index(slot).load(layout).to(gl.float32)\n        fence_async_shared()  # public\n", ""),
        (
            "        total += gl.sum(x * x, 1)\n",
            "        x = ring.index(slot).load(layout).to(gl.float32)\n        total += gl.sum(x * x, 1)\n",
        ),
    ),
    _instead(
        "endless loop",
        "q3_2",
        "endless loop",
        ("    for i in range(tiles):  # public\n", "    i = 0\n    while i < tiles:\n"),
        ("        more = i + STAGES < tiles\n", "        more = i < 0\n"),
        ("mbarrier.wait(full.index(slot), (i // STAGES) & 1)", "mbarrier.wait(full.index(slot), 0)"),
    ),
    # ---- 3.4
    _after(
        "repaired but for the fence",
        "bonus_3_4",
        "missing fence",
        code=_REPAIRS.format(behind="", more=_STORE + _COUNT),
    ),
    _after(
        "repaired but for the count",
        "bonus_3_4",
        "1 of 2 arrivals missing",
        code=_REPAIRS.format(behind=_FENCE, more=_STORE),
    ),
    _after(
        "repaired but for the store", "bonus_3_4", "tma.store_wait", code=_REPAIRS.format(behind=_FENCE, more=_COUNT)
    ),
    _after(
        "more lines than six",
        "bonus_3_4",
        "6 at most",
        code="""
right_repairs = repairs
def repairs():
    return {**right_repairs(), "slot = i % STAGES": "slot = i % STAGES", "out.store(x * factor)": "out.store(x * factor)"}
""",
    ),
    _after(
        "repairs what is not there",
        "bonus_3_4",
        "stands 0 times",
        code="""
def repairs():
    return {"mbarrier.wait(empty, 0)": "pass"}
""",
    ),
    # ---- 4.1
    _instead(
        "accumulator read too early",
        "q4_1",
        "warpgroup_mma_wait",
        ("        acc = warpgroup_mma_wait(0, deps=[acc])  # public\n", ""),
    ),
    _instead(
        "Ampere's layout",
        "q4_1",
        "version [3, 0]",
        ("gl.NVMMADistributedLayout([3, 0]", "gl.NVMMADistributedLayout([2, 0]"),
    ),
    _instead("B not turned", "q4_1", ("layout", "wrong in", "shape"), ("b_tile.permute([1, 0])", "b_tile")),
    _instead("steps not added up", "q4_1", "wrong in", ("acc, is_async=True)", "acc, use_acc=False, is_async=True)")),
    *(
        _instead(
            f"the accumulator rounded to {dtype} after each step",
            "q4_1",
            ("does that stay in fp32", "overflow in 16 bits", "something else multiplies", "A is (100, 200)"),
            (
                "        acc = warpgroup_mma_wait(0, deps=[acc])  # public\n",
                f"        acc = warpgroup_mma_wait(0, deps=[acc]).to(gl.{dtype}).to(gl.float32)\n",
            ),
        )
        for dtype in ("bfloat16", "float16")
    ),
    _instead("no fence before the TMA store", "q4_1", "missing fence", ("    fence_async_shared()  # public\n", "")),
    _instead("kernel ends before its store", "q4_1", "unfinished", ("    tma.store_wait(0)  # public\n", "")),
    # ---- 5.1
    _instead(
        "tail of keys not masked", "q5_1", "keys in blocks of 64", ("(keys < sk)[None, :]", "(keys < sk + 64)[None, :]")
    ),
    _instead(
        "output not rescaled",
        "q5_1",
        "wrong in",
        ("    o = o * gl.convert_layout(alpha", "    unused = o * gl.convert_layout(alpha"),
    ),
    _instead(
        "sum not rescaled", "q5_1", "wrong in", ("total = total * alpha + gl.sum(p, 1)", "total = total + gl.sum(p, 1)")
    ),
    _instead(
        "no maximum subtracted",
        "q5_1",
        ("NaN", "infinite", "wrong in"),
        ("top = gl.maximum(m, gl.max(s, 1))", "top = gl.maximum(m, gl.max(s, 1)) * 0.0"),
    ),
    _instead(
        "maximum of this block alone",
        "q5_1",
        ("NaN", "wrong in", "infinite"),
        ("top = gl.maximum(m, gl.max(s, 1))", "top = gl.max(s, 1)"),
    ),
    _instead(
        "never divided",
        "q5_1",
        "wrong in",
        ("    o = o / gl.convert_layout(total, gl.SliceLayout(1, output))[:, None]\n", ""),
    ),
    _instead(
        "factor in the scores' layout",
        "q5_1",
        ("layout", "convert_layout"),
        ("gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]", "alpha[:, None]"),
    ),
    # ---- 5.2
    _instead(
        "empty counts one arrival",
        "q5_2",
        ("arrival", "race"),
        ("mbarrier.init(empty.index(i), count=2)", "mbarrier.init(empty.index(i), count=1)"),
    ),
    _instead(
        "slot never given back",
        "q5_2",
        "2 of 2 arrivals missing",
        ("        mbarrier.arrive(empty.index(slot), count=1)  # public\n", "        pass\n"),
    ),
    _instead(
        "producer waits for the first round", "q5_2", "deadlock", ("((i // STAGES) & 1) ^ 1)", "(i // STAGES) & 1)")
    ),
    _instead(
        "bytes of V not announced",
        "q5_2",
        ("announced", "more than mbarrier.expect"),
        ("k_desc.block_type.nbytes + v_desc.block_type.nbytes", "k_desc.block_type.nbytes"),
    ),
    _instead(
        "consumer does not wait",
        "q5_2",
        "nothing orders them",
        ("        mbarrier.wait(full.index(slot), (i // STAGES) & 1)  # public\n", "        pass\n"),
    ),
    _instead(
        "producer does not wait",
        "q5_2",
        ("race", "barrier"),
        ("        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)\n", ""),
    ),
    _instead(
        "slot given back before it is used",
        "q5_2",
        ("race", "barrier"),
        ("        mbarrier.arrive(empty.index(slot), count=1)  # public\n", "        pass\n"),
        (
            "        mbarrier.wait(full.index(slot), (i // STAGES) & 1)  # public\n",
            "        mbarrier.wait(full.index(slot), (i // STAGES) & 1)\n        mbarrier.arrive(empty.index(slot), count=1)\n",
        ),
    ),
    # ---- 5.3
    _instead(
        "nothing overlaps",
        "q5_3",
        "softmax runs",
        ("s = warpgroup_mma_wait(1, deps=[s])", "s, o = warpgroup_mma_wait(0, deps=[s, o])"),
    ),
    _instead(
        "scores read too early",
        "q5_3",
        "read while it is still being computed",
        ("s = warpgroup_mma_wait(1, deps=[s])", "s = warpgroup_mma_wait(2, deps=[s])"),
    ),
    _instead(
        "output rescaled under its product",
        "q5_3",
        "read while it is still being computed",
        ("        o = warpgroup_mma_wait(0, deps=[o])\n        mbarrier.arrive(v_empty.index(v_slot), count=1)\n", ""),
        (
            "[:, None]  # public\n",
            "[:, None]\n        o = warpgroup_mma_wait(0, deps=[o])\n        mbarrier.arrive(v_empty.index(v_slot), count=1)\n",
        ),
    ),
    _instead(
        "V's slot given back too early",
        "q5_3",
        "race",
        (
            "        o = warpgroup_mma_wait(0, deps=[o])\n        mbarrier.arrive(v_empty.index(v_slot), count=1)\n",
            "        mbarrier.arrive(v_empty.index(v_slot), count=1)\n        o = warpgroup_mma_wait(0, deps=[o])\n",
        ),
    ),
    _instead(
        "K's slot never given back",
        "q5_3",
        "deadlock",
        ("        mbarrier.arrive(k_empty.index(k_slot), count=1)\n", ""),
    ),
    _instead(
        "output not rescaled in the overlap",
        "q5_3",
        "wrong in",
        ("        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]  # public\n", ""),
    ),
    # ---- 5.5
    # ---- more, by question
    _after(
        "exponentials of one quarter",
        "q1_1",
        "four",
        code="""
def tile_cycles(rows, keys, d):
    return 4 * rows * keys * d / 4096, rows * keys / 4, 4 * keys * d / 20
""",
    ),
    _after(
        "K alone is loaded",
        "q1_1",
        "K and V",
        code="""
def tile_cycles(rows, keys, d):
    return 4 * rows * keys * d / 4096, rows * keys / 16, 2 * keys * d / 20
""",
    ),
    _after(
        "elements for bytes",
        "q1_1",
        "two bytes",
        loses=("q1_1_budget_tests",),
        code="""
def shared_bytes(consumers, keys, d, stages):
    return consumers * 64 * d + 2 * stages * keys * d
""",
    ),
    _after(
        "one Q for all consumers",
        "q1_1",
        "64 rows of Q of its own",
        loses=("q1_1_budget_tests",),
        code="""
def shared_bytes(consumers, keys, d, stages):
    return 2 * (64 * d + 2 * stages * keys * d)
""",
    ),
    _after(
        "registers of one warp",
        "q1_1",
        "128 threads share",
        loses=("q1_1_budget_tests",),
        code="""
def registers_per_thread(keys, d):
    return 64 * (keys + d) / 32
""",
    ),
    _after(
        "registers before repetitions",
        "q2_1",
        "within the piece",
        code="""
right_owner = owner
def owner(row, column, shape, size, threads, warps, order):
    warp, lane, register = right_owner(row, column, shape, size, threads, warps, order)
    piece = size[0] * size[1]
    times = shape[0] * shape[1] // (piece * 32 * warps[0] * warps[1])
    return warp, lane, register // piece + times * (register % piece)
""",
    ),
    _after(
        "repetitions dropped",
        "q2_1",
        "further registers",
        code="""
right_owner = owner
def owner(row, column, shape, size, threads, warps, order):
    warp, lane, register = right_owner(row, column, shape, size, threads, warps, order)
    return warp, lane, register % (size[0] * size[1])
""",
    ),
    _instead(
        "mask of the load without columns",
        "q2_2",
        "out of bounds",
        (
            "    mask = (rows < m)[:, None] & (columns < n)[None, :]\n    tile = gl.load",
            "    mask = (rows < m)[:, None]\n    tile = gl.load",
        ),
    ),
    _instead(
        "half a warp in the layout",
        "q2_2",
        "a warp has 32",
        (
            "reading: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8]",
            "reading: gl.constexpr = gl.BlockedLayout([1, 4], [2, 8]",
        ),
    ),
    _instead(
        "layout without constexpr", "q2_2", "gl.constexpr = ...", ("writing: gl.constexpr = gl.", "writing = gl.")
    ),
    _instead(
        "store without mask",
        "q3_1",
        "A mask is missing",
        ("gl.store(c_ptr + at, total, mask=at < n)", "gl.store(c_ptr + at, total)"),
    ),
    _instead(
        "mask of the store with m and n exchanged",
        "q2_2",
        ("m and n exchanged", "never written"),
        (
            "(columns < n)[None, :]\n    gl.store",
            "(columns < n)[None, :]\n    mask = (rows < n)[:, None] & (columns < m)[None, :]\n    gl.store",
        ),
    ),
    _instead(
        "commit only when something was issued",
        "q3_1",
        ("race", "wait_group", "unfinished"),
        (
            "        async_copy.commit_group()\n        async_copy.wait_group",
            "            async_copy.commit_group()\n        async_copy.wait_group",
        ),
    ),
    _instead(
        "constant reused in the loop",
        "q3_1",
        "was a compile-time constant before this loop",
        ("        ahead = i + STAGES - 1\n", "        t = i\n        ahead = i + STAGES - 1\n"),
        (
            "    for i in gl.static_range(STAGES - 1):\n",
            "    for t in gl.static_range(STAGES):\n        pass\n    for i in gl.static_range(STAGES - 1):\n",
        ),
    ),
    _instead(
        "one tile too many",
        "q3_2",
        ("TMA copies", "race", "deadlock", "parity"),
        ("    for i in range(tiles):  # public\n", "    for i in range(tiles + 1):  # public\n"),
    ),
    _instead(
        "refill with the same tile",
        "q3_2",
        ("refill begin", "wrong in"),
        ("tma_load(x_desc, [row, (i + STAGES) * COLUMNS]", "tma_load(x_desc, [row, i * COLUMNS]"),
    ),
    _instead("sum of x", "q3_2", "sum of x, not of x * x", ("total += gl.sum(x * x, 1)", "total += gl.sum(x, 1)")),
    _instead(
        "sum over the rows", "q3_2", ("layout", "shape"), ("total += gl.sum(x * x, 1)", "total += gl.sum(x * x, 0)")
    ),
    _instead("last tile alone", "q3_2", "add to `total`", ("total += gl.sum(x * x, 1)", "total = gl.sum(x * x, 1)")),
    _instead(
        "two arrivals awaited",
        "q3_2",
        "1 of 2 arrivals missing",
        ("mbarrier.init(full.index(i), count=1)", "mbarrier.init(full.index(i), count=2)"),
    ),
    _instead(
        "refills at the tile's number",
        "q3_2",
        "The refills begin at the tile's number",
        ("[row, (i + STAGES) * COLUMNS]", "[row, i + STAGES]"),
    ),
    _instead(
        "tile of C at column, row",
        "q4_1",
        "leaves to [column, row]",
        ("[row, column], c_tile", "[column, row], c_tile"),
    ),
    _instead(
        "factor without c", "q5_1", "in the factor", ("alpha = gl.exp2((m - top) * c)", "alpha = gl.exp2(m - top)")
    ),
    _instead(
        "old maximum returned", "q5_1", "Only the last block", ("return p, top, total, o", "return p, m, total, o")
    ),
    _instead("coordinates swapped", "q3_2", ("wrong in", "NaN"), ("[row, i * COLUMNS]", "[i * COLUMNS, row]")),
    _instead(
        "barrier without index",
        "q3_2",
        ".index(i) takes one",
        ("mbarrier.wait(full.index(slot), (i // STAGES) & 1)", "mbarrier.wait(full, (i // STAGES) & 1)"),
    ),
    _instead(
        "subscripts for slots",
        "q3_2",
        ".index(i) is slot i",
        ("x = ring.index(slot).load(layout)", "x = ring[slot].load(layout)"),
    ),
    _instead(
        "wait for all but one",
        "q4_1",
        ("race", "still being computed"),
        ("warpgroup_mma_wait(0, deps=[acc])", "warpgroup_mma_wait(1, deps=[acc])"),
    ),
    _instead(
        "result of the wait dropped",
        "q4_1",
        "assign the result",
        ("acc = warpgroup_mma_wait(0, deps=[acc])", "warpgroup_mma_wait(0, deps=[acc])"),
    ),
    _instead("two warps by two", "q4_1", "multiple of 4", ("[3, 0], [4, 1]", "[3, 0], [2, 2]")),
    _instead("K of 8", "q4_1", "K is 32 bytes", ("[16, BLOCK_N, 16]", "[16, BLOCK_N, 8]")),
    _instead("stored in fp32", "q4_1", "use .to(", ("c_tile.store(acc.to(c_desc.dtype))", "c_tile.store(acc)")),
    _instead(
        "fence after the TMA store",
        "q4_1",
        "missing fence",
        (
            "    fence_async_shared()  # public\n    tma_store(c_desc, [row, column], c_tile)  # public\n",
            "    tma_store(c_desc, [row, column], c_tile)  # public\n    fence_async_shared()  # public\n",
        ),
    ),
    _instead(
        "nothing to wait for",
        "q4_1",
        "`deps` is empty",
        ("warpgroup_mma_wait(0, deps=[acc])", "warpgroup_mma_wait(0, deps=[])"),
    ),
    _instead("one key too many", "q5_1", "One key too many", ("(keys < sk)[None, :]", "(keys <= sk)[None, :]")),
    _instead("four keys too many", "q5_1", "masked", ("(keys < sk)[None, :]", "(keys < sk + 4)[None, :]")),
    _instead(
        "last key masked", "q5_1", "The last key takes no part", ("(keys < sk)[None, :]", "(keys < sk - 1)[None, :]")
    ),
    _instead(
        "keys counted in the block",
        "q5_1",
        "counts the keys of each block from 0",
        ("keys = key + gl.arange", "keys = gl.arange"),
    ),
    _instead(
        "alpha turned around",
        "q5_1",
        "turned around",
        ("alpha = gl.exp2((m - top) * c)", "alpha = gl.exp2((top - m) * c)"),
    ),
    _instead(
        "powers of e", "q5_1", "powers of e", ("p = gl.exp2(", "p = gl.exp("), ("alpha = gl.exp2(", "alpha = gl.exp(")
    ),
    _instead(
        "sum lost", "q5_1", "the sum so far is lost", ("total = total * alpha + gl.sum(p, 1)", "total = gl.sum(p, 1)")
    ),
    _instead("maximum over the rows", "q5_1", ("layout", "shape"), ("gl.max(s, 1)", "gl.max(s, 0)")),
    _instead(
        "parity of the tile",
        "q5_2",
        ("parity", "race", "deadlock"),
        ("mbarrier.wait(full.index(slot), (i // STAGES) & 1)", "mbarrier.wait(full.index(slot), i & 1)"),
    ),
    _instead(
        "last block forgotten",
        "q5_2",
        ("left out", "deadlock"),
        ("    for i in range(gl.cdiv(sk, BLOCK_N)):  # public\n", "    for i in range(sk // BLOCK_N):  # public\n"),
    ),
    _instead(
        "one tile of V",
        "q5_2",
        "same block of V",
        ("tma_load(v_desc, [head, i * BLOCK_N, 0]", "tma_load(v_desc, [head, 0, 0]"),
    ),
    _instead(
        "one tile of K",
        "q5_2",
        "K of every step is the same block",
        ("tma_load(k_desc, [head, i * BLOCK_N, 0]", "tma_load(k_desc, [head, 0, 0]"),
    ),
    _instead(
        "each thread is to arrive",
        "q5_2",
        "arrivals missing",
        ("mbarrier.init(empty.index(i), count=2)", "mbarrier.init(empty.index(i), count=256)"),
    ),
    _instead(
        "full counts two",
        "q5_2",
        "1 of 2 arrivals missing",
        ("mbarrier.init(full.index(i), count=1)", "mbarrier.init(full.index(i), count=2)"),
    ),
    _instead(
        "two arrivals of each consumer",
        "q5_2",
        ("arrival", "race"),
        ("mbarrier.arrive(empty.index(slot), count=1)", "mbarrier.arrive(empty.index(slot), count=2)"),
    ),
    _instead(
        "arrives at the wrong barrier",
        "q5_2",
        ("arrival", "deadlock", "parity"),
        ("mbarrier.arrive(empty.index(slot), count=1)", "mbarrier.arrive(full.index(slot), count=1)"),
    ),
    _instead(
        "head forgotten",
        "q5_2",
        ("wrong in", "NaN"),
        ("tma_load(k_desc, [head, i * BLOCK_N, 0]", "tma_load(k_desc, [0, i * BLOCK_N, 0]"),
    ),
    _instead(
        "p never replaced",
        "q5_3",
        "P of the first block",
        ("p = gl.convert_layout(p_next.to(dtype), left)", "unused = gl.convert_layout(p_next.to(dtype), left)"),
    ),
    _instead(
        "scores accumulate",
        "q5_3",
        "wrong in",
        ("s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)", "s = warpgroup_mma(q, k, o, is_async=True)"),
    ),
    _instead(
        "no wait for V", "q5_3", "nothing orders them", ("        mbarrier.wait(v_full.index(v_slot), v_phase)\n", "")
    ),
    _instead(
        "tile stored elsewhere",
        "q4_1",
        "never written",
        ("tma_store(c_desc, [row, column]", "tma_store(c_desc, [column, row]"),
    ),
    _instead(
        "columns count tiles",
        "q3_2",
        "count elements",
        ("tma_load(x_desc, [row, i * COLUMNS]", "tma_load(x_desc, [row, i]"),
        ("tma_load(x_desc, [row, (i + STAGES) * COLUMNS]", "tma_load(x_desc, [row, i + STAGES]"),
    ),
    _instead(
        "rows count blocks",
        "q5_2",
        "count elements",
        ("tma_load(k_desc, [head, i * BLOCK_N, 0]", "tma_load(k_desc, [head, i, 0]"),
        ("tma_load(v_desc, [head, i * BLOCK_N, 0]", "tma_load(v_desc, [head, i, 0]"),
    ),
    _instead(
        "p and alpha without c",
        "q5_1",
        "c is missing",
        ("alpha = gl.exp2((m - top) * c)", "alpha = gl.exp2(m - top)"),
        ("p = gl.exp2((s - top[:, None]) * c)", "p = gl.exp2(s - top[:, None])"),
    ),
    # ---- 6.1, 6.2
    _instead("no commit", "bonus_6_1", "deadlock", ("        tcgen05_commit(done)\n", "")),
    _instead("no wait for the product", "bonus_6_1", "race", ("        mbarrier.wait(done, phase)\n", "")),
    _instead("the first product adds, too", "bonus_6_1", "uninitialized", ("use_acc=k > 0", "use_acc=True")),
    _instead("no product adds", "bonus_6_1", "Only the last step", ("use_acc=k > 0", "use_acc=False")),
    _instead(
        "waits for the other parity", "bonus_6_1", ("race", "parity"), ("wait(done, phase)", "wait(done, phase ^ 1)")
    ),
    _instead(
        "P announced before it is stored",
        "bonus_6_2",
        "race",
        (
            "        p_view.store(gl.convert_layout(p.to(dtype), narrow))\n        mbarrier.arrive(bars.p_full.index(TILE), count=1)\n",
            "        mbarrier.arrive(bars.p_full.index(TILE), count=1)\n        p_view.store(gl.convert_layout(p.to(dtype), narrow))\n",
        ),
    ),
    _instead(
        "alpha never announced",
        "bonus_6_2",
        "deadlock",
        ("        mbarrier.arrive(bars.alpha_full.index(TILE), count=1)\n", ""),
    ),
    _instead(
        "scores read early",
        "bonus_6_2",
        ("race", "layout"),
        ("        mbarrier.wait(bars.s_full.index(TILE), i & 1)\n", ""),
    ),
    _instead(
        "O rescaled under its product",
        "bonus_6_2",
        ("race", "never waited for"),
        ("                mbarrier.wait(bars.o_done.index(tile), (i - 1) & 1)\n", ""),
    ),
    _instead(
        "O never rescaled",
        "bonus_6_2",
        "not rescaled",
        ("                rescale(output.index(tile), alpha, output.index(tile), False)\n", ""),
    ),
    _instead(
        "waits for the product of this block",
        "bonus_6_2",
        ("deadlock", "parity"),
        ("mbarrier.wait(bars.o_done.index(tile), (i - 1) & 1)", "mbarrier.wait(bars.o_done.index(tile), i & 1)"),
    ),
]
