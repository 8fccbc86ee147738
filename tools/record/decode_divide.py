"""Time decode's clusters that are divided among heads by the lengths, short rings, and pages of 256 beside pages of 64.

    python -m tools.record.decode_divide --workers 15 --seconds 88 --fa3 fa3/_C.so --fa4 --out decode_divide.json

- `lengths`: sequences of equal and of other lengths, in one piece and in pages: clusters divided by the lengths (`divide.py`,
  `divided`); whole clusters for all heads, or none (`before`); one piece without lengths (`piece`).
- `slots`: clusters of two for each head, without lengths, with four tiles and with six.
- `single`: one sequence in pages and in one piece.

Each variant is compared with float64 in all sequences before it is timed; all calls of a row are timed in one process, interleaved,
with a cold L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tools.record import decode_bound
from tools.record.decode import draw, in_pages, others
from tools.record.decode_variants import WRONG, error_of, right_calls
from utils.attention import decode_reference
from utils.attention.gluon.decode.arrangement import MOST_HALVINGS

PAGES = 0, 256, 64, 16  # tokens of a page; 0: in one piece
FRACTIONS = decode_bound.FRACTIONS | {
    "one long, last": lambda batch: [1 / 64] * (batch - 1) + [1.0],
    "half short": lambda batch: [1.0 if i % 2 else 0.25 for i in range(batch)],
    "two long": lambda batch: [1.0, 1.0] + [1 / 64] * (batch - 2),
    "drawn": lambda batch: [(37 * i % 64 + 1) / 64 for i in range(batch)],
}
# Sequences, heads, heads of keys, keys, head dimension, new tokens, tokens of a page, lengths; the most important first.
LENGTHS = (
    *((8, 32, 8, 8192, 128, 1, page, kind) for kind in ("equal", "one long", "even steps") for page in PAGES),
    *((8, 32, 8, 8192, 128, 1, page, kind) for kind in ("two long", "drawn", "half short") for page in (0, 64)),
    (8, 32, 8, 8192, 128, 1, 64, "one long, last"),
    *((8, 32, 8, 2048, 128, 1, 64, kind) for kind in ("equal", "one long", "drawn")),
    *((16, 32, 8, 8192, 128, 1, page, kind) for page in (64, 0) for kind in ("equal", "one long", "drawn")),
    *((batch, 32, 8, 8192, 128, 1, 64, kind) for batch in (4, 5, 12) for kind in ("equal", "drawn")),
    *((8, 32, 8, 8192, 128, 2, 64, kind) for kind in ("equal", "drawn")),
    *((4, 4 * kv_heads, kv_heads, 8192, 128, 1, 64, "drawn") for kv_heads in (4, 16)),
    *((8, 32, 8, 16384, 128, 1, 64, kind) for kind in ("equal", "drawn")),
)
# Without lengths.
SLOTS = (*((8, 32, 8, 8192, 128, new) for new in (1, 8, 16)), *((8, 32, 8, keys, 128, 1) for keys in (4096, 16384)))
SINGLE = tuple((1, 32, 8, keys, 128, 1) for keys in (32768, 8192))
POINTS = {"lengths": LENGTHS, "slots": SLOTS, "single": SINGLE}


def fa3_calls(row: dict, q, k, v, used, table) -> dict[str, Callable]:
    """Return FlashAttention 3's call with lengths, and pages if there are any; why it does not run goes into the row."""
    options = {"seqused_k": used, "num_splits": 0, "is_causal": q.shape[2] > 1}
    options |= {} if table is None else {"page_table": table}
    try:
        call = partial(torch.ops.flash_attn_3.fwd, *(x.transpose(1, 2) for x in (q, k, v)), **options)
        call()
        torch.cuda.synchronize()
    except Exception as problem:  # a peer that cannot do this must not end the others
        row["left_out"]["fa3"] = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:100]}"
        return {}
    return {"fa3": call}


def add_right(calls: dict, row: dict, named: dict[str, dict], expected: torch.Tensor, *tensors) -> None:
    """Add the calls of those variants that are right in every sequence, in three calls."""
    for name, choices in named.items():
        found, missing = right_calls({name: choices}, expected[:1], *tensors, errors=row["errors"])
        for call in found.values():
            if error_of(call(), expected) < WRONG:
                calls[name] = call
            else:
                missing[name] = "wrong: other sequences"
        row["left_out"] |= missing


def prepare(point: tuple, fa3: bool) -> list[tuple[dict, dict[str, Callable], int]]:
    """Prepare the variants of a point with lengths, and one piece without them where all lengths are the cache's."""
    *sizes, page, kind = point
    q, k, v = draw(*sizes)
    used = torch.tensor([int(x * sizes[3]) for x in FRACTIONS[kind](len(q))], dtype=torch.int32, device="cuda")
    row: dict = {"point": list(point), "series": 0, "errors": {}, "left_out": {}}
    calls, expected = dict[str, Callable](), decode_reference(q, k, v, seqlens=used)
    if kind == "equal":
        add_right(calls, row, {"piece": {}}, expected, q, k, v)
    table = None
    if page:
        table = torch.randperm(sizes[0] * sizes[3] // page, device="cuda").int().view(sizes[0], -1)
        k, v = (in_pages(x, page, table) for x in (k, v))
    add_right(calls, row, variants_of_lengths(point), expected, q, k, v, used, table)
    calls |= fa3_calls(row, q, k, v, used, table) if fa3 else {}
    return [(row, calls, 4 * k.numel())]


def variants_of_lengths(point: tuple) -> dict[str, dict]:
    """Name the ways to read sequences whose lengths may differ."""
    batch, _, kv_heads, keys, _, _, page, _ = point
    cluster = 64 // kv_heads
    whole = {"cluster": cluster, "consumers": 0, "block_n": 64, "per_sm": 2}
    most = min(MOST_HALVINGS, cluster.bit_length() - 1, kv_heads.bit_length() - 1)
    divided = whole | {"slots": 4, "halvings": most}
    before: dict = whole | {"slots": 6 if 4 < batch <= 8 and keys >= 8192 else 4}
    return {"divided": divided, "before": before if batch <= 8 or page else {"cluster": 0}}


def prepare_one(point: tuple, fa3: bool) -> list[tuple[dict, dict[str, Callable], int]]:
    """Prepare one sequence in one piece and in pages, in random order."""
    q, k, v = draw(*point)
    used = torch.full((1,), point[3], dtype=torch.int32, device="cuda")
    row: dict = {"point": list(point), "series": 0, "errors": {}, "left_out": {}}
    calls, expected = dict[str, Callable](), decode_reference(q, k, v)
    add_right(calls, row, {"piece": {}}, expected, q, k, v)
    for page in (256, 128, 64, 16):
        table = torch.randperm(point[3] // page, device="cuda").int().view(1, -1)
        named: dict[str, dict] = {f"pages of {page}": {}}
        add_right(calls, row, named, expected, q, *(in_pages(x, page, table) for x in (k, v)), used, table)
    return [(row, calls, 4 * k.numel())]


def prepare_whole(point: tuple, fa3: bool) -> list[tuple[dict, dict[str, Callable], int]]:
    """Prepare caches without lengths, beside the other libraries; two series."""
    named: dict[str, dict] = {"default": {}}
    named |= {f"{slots} slots": {"cluster": 2, "block_n": 128, "slots": slots} for slots in (6,)}
    series = []
    for number in range(2):
        q, k, v = draw(*point)
        row: dict = {"point": list(point), "series": number, "errors": {}, "left_out": {}}
        calls = dict[str, Callable]()
        add_right(calls, row, named, decode_reference(q, k, v), q, k, v)
        found = others(q, k, v, fa3, False, row["left_out"])
        calls |= {n: call for n, call in found.items() if n == "fa3" or (n == "cudnn" and point[5] == 1)}
        series.append((row, calls, 4 * k.numel()))
    return series


def ways(options) -> dict[str, Callable]:
    """Return what prepares a point of each table."""
    fa3 = options.fa3 is not None
    whole = partial(prepare_whole, fa3=fa3)
    return {"lengths": partial(prepare, fa3=fa3), "single": partial(prepare_one, fa3=fa3), "slots": whole}


def show(rows: list[dict]) -> str:
    """Return a point as a line: the medians, the fastest first, and what is wrong."""
    us = {name: sum(row["us"][name] for row in rows) / len(rows) for name in rows[0]["us"] if name in rows[-1]["us"]}
    batch, _, _, keys, _, new, *more = rows[0]["point"]
    line = f"{batch}x{keys} q{new} {' '.join(map(str, more[::-1]))}: "
    line += ", ".join(f"{name} {time:.1f}" for name, time in sorted(us.items(), key=lambda pair: pair[1]))
    known = "fa2", "fa3", "fa4", "cudnn", "flashinfer", "fa3_lengths"
    out = {name: why[:60] for row in rows for name, why in row["left_out"].items() if name not in known}
    return line + (f" OUT {out}" if out else "")


if __name__ == "__main__":
    decode_bound.run(
        "tools.record.decode_divide", __doc__, POINTS, ways, show, "decode: clusters divided by the lengths"
    )
