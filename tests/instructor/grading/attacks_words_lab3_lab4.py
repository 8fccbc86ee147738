"""Right values that break one word of a question of labs 3 and 4, from before each word was measured or taken back.

They were written while the questions were read sentence by sentence: what is asked for, and which line of a check would notice
if it was not done. All passed then, but for squares in 16 bits, which passed where the draw did not show them.
"""

from __future__ import annotations

from tests.instructor.grading.attacks_shortcuts import Shortcut


def _lab3(name: str, cell: str, check: str, words: str, code: dict[str, str]) -> Shortcut:
    return Shortcut(name, "lab3_gluon", cell, f"{cell}_tests", code, (check,), words)


def _lab4(name: str, cell: str, check: str, words: str, code: str) -> Shortcut:
    """A shortcut of lab 4 whose hidden check has the name of the function."""
    return Shortcut(name, "lab4_sdpa", cell, f"{cell}_tests", code, (check, check), words)


WORDS = [
    _lab3(
        "2.2 gl.convert_layout for show, the tile turned in shared memory of its own",
        "q2_2",
        "transpose",
        "did not go through gl.convert_layout",
        {
            "    tile = gl.convert_layout(tile, writing)\n": """
    unused = gl.convert_layout(tile, writing)
    plain: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], plain, tile).load(writing)
"""
        },
    ),
    _lab3(
        "3.1 slots counted from the last one down",
        "q3_1",
        "async_copy",
        "other slots than the question says",
        {
            "start_copy(a_ring, i, a_ptr": "start_copy(a_ring, STAGES - 1 - i, a_ptr",
            "start_copy(b_ring, i, b_ptr": "start_copy(b_ring, STAGES - 1 - i, b_ptr",
            "start_copy(a_ring, ahead % STAGES": "start_copy(a_ring, STAGES - 1 - ahead % STAGES",
            "start_copy(b_ring, ahead % STAGES": "start_copy(b_ring, STAGES - 1 - ahead % STAGES",
            "a_ring.index(i % STAGES)": "a_ring.index(STAGES - 1 - i % STAGES)",
            "b_ring.index(i % STAGES)": "b_ring.index(STAGES - 1 - i % STAGES)",
        },
    ),
    _lab3(
        "3.1 a pipeline in the first program alone",
        "q3_1",
        "async_copy",
        "on their way at a time",
        {
            "        async_copy.wait_group(STAGES - 1)\n": (
                "        if gl.program_id(0) > 0:\n            async_copy.wait_group(0)\n        async_copy.wait_group(STAGES - 1)\n"
            )
        },
    ),
    _lab3(
        "3.2 squares in 16 bits",
        "q3_2",
        "tma_ring",
        "wrong in",
        {"load(layout).to(gl.float32)": "load(layout)", "gl.sum(x * x, 1)": "gl.sum((x * x).to(gl.float32), 1)"},
    ),
    _lab3(
        "5.2 in the first round the producer waits for a slot that is not free",
        "q5_2",
        "specialized",
        "waits for nothing but a free slot",
        {
            "        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)\n": """
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        if (i >= 2) & (i < STAGES):
            mbarrier.wait(empty.index(0), 0)
"""
        },
    ),
    _lab3(
        "5.3 in every other turn the scores are waited for before P V is issued",
        "q5_3",
        "overlap",
        "is issued while the first one runs",
        {
            "        mbarrier.wait(v_full.index(v_slot), v_phase)\n": """
        if i % 2 == 0:
            warpgroup_mma_wait(0, deps=[s])
        mbarrier.wait(v_full.index(v_slot), v_phase)
"""
        },
    ),
    _lab4(
        "1.2 the first sixty letters of a reason",
        "q1_2",
        "why_not",
        "word for word",
        """
def why_not(backend, q, k, v, **options):
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            F.scaled_dot_product_attention(q, k, v, **options)
            return []
        except RuntimeError as error:
            first = str(error).splitlines()[0]
    found = [str(w.message).split(" (Triggered")[0] for w in said]
    return [t[:60] for t in found if "not used because" not in t and "runtime disabled" not in t] or [first]
""",
    ),
    _lab4(
        "1.3 copies where math runs",
        "q1_3",
        "pinned_sdpa",
        "of math copies",
        """
def pinned_sdpa(backend, q, k, v, **options):
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if backend == "math":
                q, k, v = q.clone(), k.clone(), v.clone()
            return F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as error:
            raise BackendRefused(" ".join(why_not(backend, q, k, v, **options))) from error
""",
    ),
    _lab4(
        "1.3 math behind a refusal",
        "q1_3",
        "pinned_sdpa",
        "No other backend",
        """
def pinned_sdpa(backend, q, k, v, **options):
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError as error:
            with sdpa_kernel(BACKENDS["math"]):
                F.scaled_dot_product_attention(q, k, v, **options)
            raise BackendRefused(" ".join(why_not(backend, q, k, v, **options))) from error
""",
    ),
    _lab4(
        "b2.4 six products",
        "bonus_2_4",
        "attention_backward",
        "compute the scores once",
        """
def attention_backward(q, k, v, out, lse, dout):
    scale = 1 / math.sqrt(q.shape[-1])
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    again = torch.exp(q @ k.mT * scale - lse[..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(dim=-1, keepdim=True))
    return ds @ k * scale, ds.mT @ q * scale, again.mT @ dout
""",
    ),
    _lab4(
        "b2.4 gradients in float32, whatever the inputs are",
        "bonus_2_4",
        "attention_backward",
        "should have dtype torch.float64",
        """
def attention_backward(*tensors):
    q, k, v, out, lse, dout = (t.float() for t in tensors)
    scale = 1 / math.sqrt(q.shape[-1])
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(dim=-1, keepdim=True))
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ dout
""",
    ),
    _lab4(
        "5.3 every NaN is the same",
        "q5_3",
        "distinct_results",
        "NaN have other bits",
        """
def distinct_results(fn, runs):
    found = set()
    for _ in range(runs):
        result = fn()
        tensors = [t.nan_to_num(nan=12345.0) if t.dtype.itemsize > 1 else t for t in (result if isinstance(result, tuple) else (result,))]
        found.add(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors))
    return len(found)
""",
    ),
    _lab4(
        "5.3 bits of float32, whatever came",
        "q5_3",
        "distinct_results",
        "differ in the last bit",
        """
def distinct_results(fn, runs):
    found = set()
    for _ in range(runs):
        result = fn()
        tensors = result if isinstance(result, tuple) else (result,)
        found.add(b"".join(t.float().contiguous().numpy().tobytes() for t in tensors))
    return len(found)
""",
    ),
]
