"""Right values of labs 3 and 4 by a way that breaks a word for some inputs only, or beside an operation that runs for show.

Checks that look at small inputs, at one number of slots or at the first program say nothing about the others, and a count of what ran
says nothing about where the result came from. All of these passed the hidden and the visible checks of their questions.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_shortcuts import Shortcut


def _lab3(name: str, cell: str, check: str, words: str, code: dict[str, str]) -> Shortcut:
    return Shortcut(name, "lab3_gluon", cell, f"{cell}_tests", code, (check,), words)


_ISSUE_V = "        mbarrier.wait(v_full.index(v_slot), v_phase)\n"
_WAIT = "        async_copy.wait_group(STAGES - 1)\n"
_PRODUCT = (
    "        acc = warpgroup_mma(a_tile, b_tile.permute([1, 0]), acc, is_async=True)\n"
    "        acc = warpgroup_mma_wait(0, deps=[acc])"
)
_OWN_SUM = """
            part = warpgroup_mma(a_tile, b_tile.permute([1, 0]), acc, use_acc=False, is_async=True)
            acc = acc + warpgroup_mma_wait(0, deps=[part])"""
_DIVIDE = "o = o / gl.convert_layout(total, gl.SliceLayout(1, output))[:, None]\n"
_PV = "        o = warpgroup_mma(gl.convert_layout(p.to(dtype), left), v_tile.reshape([BLOCK_N, BLOCK_D]), o)\n"
_SOFTMAX = "        p, m, total, o = online_softmax(s, m, total, o, c, key, sk)\n"
_MULTIPLY = "o = o * gl.convert_layout(total, gl.SliceLayout(1, output))[:, None]\n"

LAB3 = [
    _lab3(
        "2.2 strided stores where X has no whole tiles",
        "q2_2",
        "transpose",
        "did not go through gl.convert_layout",
        {
            "    tile = gl.convert_layout(tile, writing)\n": """
    if m % 32 + n % 32 > 0:
        gl.store(y_ptr + columns[None, :] * y_stride + rows[:, None], tile, mask=mask)
        return
    tile = gl.convert_layout(tile, writing)
"""
        },
    ),
    _lab3(
        "2.2 strided stores but for two tiles",
        "q2_2",
        "transpose",
        "would do",
        {
            "    tile = gl.convert_layout(tile, writing)\n": """
    if m + n != 96:
        gl.store(y_ptr + columns[None, :] * y_stride + rows[:, None], tile, mask=mask)
        return
    tile = gl.convert_layout(tile, writing)
"""
        },
    ),
    _lab3(
        "3.1 with two and four slots all copies are waited for",
        "q3_1",
        "async_copy",
        "waits for copies of later tiles",
        {_WAIT: "        if (STAGES % 2 == 0) & (i > 0):\n            async_copy.wait_group(0)\n" + _WAIT},
    ),
    _lab3(
        "3.1 with two slots the copies are for show",
        "q3_1",
        "async_copy",
        "all tiles come through the ring",
        {
            "        gl.store(c_ptr + at, total, mask=at < n)": """
        if STAGES == 2:
            total = gl.load(a_ptr + at, mask=at < n) + gl.load(b_ptr + at, mask=at < n)
        gl.store(c_ptr + at, total, mask=at < n)"""
        },
    ),
    _lab3(
        "3.1 no pipeline from the third program on",
        "q3_1",
        "async_copy",
        "on their way at a time",
        {_WAIT: "        if gl.program_id(0) > 1:\n            async_copy.wait_group(0)\n" + _WAIT},
    ),
    _lab3(
        "3.1 no pipeline behind tile 10",
        "q3_1",
        "async_copy",
        "waits for copies of later tiles",
        {_WAIT: "        if i > 10:\n            async_copy.wait_group(0)\n" + _WAIT},
    ),
    _lab3(
        "4.1 sums in registers behind the eighth step",
        "q4_1",
        "wgmma",
        "should add to the accumulator",
        {
            _PRODUCT: "        if k < 512:\n"
            + "\n".join(f"    {line}" for line in _PRODUCT.split("\n"))
            + "\n        else:"
            + _OWN_SUM
        },
    ),
    _lab3(
        "5.1 divided and multiplied again in every block, around online_softmax",
        "q5_1",
        "softmax",
        "not in every block",
        {
            "    " + _DIVIDE: "    o = o * 1.0\n",
            _SOFTMAX: "        if key > 0:\n            " + _MULTIPLY + _SOFTMAX,
            _PV: _PV + "        " + _DIVIDE,
        },
    ),
    _lab3(
        "5.1 the same where the head dimension is 128",
        "q5_1",
        "softmax",
        "not in every block",
        {
            "    " + _DIVIDE: "    if BLOCK_D < 128:\n        " + _DIVIDE,
            _SOFTMAX: "        if (key > 0) & (BLOCK_D > 64):\n            " + _MULTIPLY + _SOFTMAX,
            _PV: _PV + "        if BLOCK_D > 64:\n            " + _DIVIDE,
        },
    ),
    _lab3(
        "5.2 behind the first round the producer waits until all slots are free",
        "q5_2",
        "specialized",
        "waits for nothing but a free slot",
        {
            "        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)\n": """
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        if (i >= STAGES) & (slot == 0):
            for other in gl.static_range(STAGES):
                mbarrier.wait(empty.index(other), ((i // STAGES) & 1) ^ 1)
"""
        },
    ),
    *(
        _lab3(
            f"5.3 one product at a time {when}",
            "q5_3",
            "overlap",
            "is issued while the first one runs",
            {_ISSUE_V: f"        if {condition}:\n            s = warpgroup_mma_wait(0, deps=[s])\n" + _ISSUE_V},
        )
        for when, condition in (
            ("with three slots", "STAGES > 2"),
            ("from the second head on", "gl.program_id(1) > 0"),
            ("behind the seventh block", "i > 6"),
            ("where there are four blocks", "blocks == 4"),
        )
    ),
]
PATHS = LAB3
