"""Time decode's clusters that are dealt to heads by the lengths, boxes of pages, and the sum of what clusters send.

    python -m tools.record.decode_deal --workers 14 --seconds 88 --fa3 fa3/_C.so --out decode_deal.json

- `lengths`: sequences of equal and of other lengths, in one piece and in pages: `deal` (`deal.py`, one program an SM), with four
  tiles instead of six (`deal4`), with shares rounded to the nearest number (`nearest`), and with copies of 64 keys (`deal, box 64`), beside the default, clusters of two for each head whatever
  its length (`fixed`), no clusters (`none`), and one piece without lengths (`piece`, `piece4`).
- `single`: one sequence in pages, with copies of 64 and of 32 keys.
- `tokens`: one sequence with 1 to 16 new tokens: the inbox read four neighbours at once (`fours`) and one by one, blocks of 64 keys.

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

PAGES = 0, 256, 64, 16  # tokens of a page; 0: in one piece
FRACTIONS = decode_bound.FRACTIONS | {
    "one long, last": lambda batch: [1 / 64] * (batch - 1) + [1.0],
    "two long": lambda batch: [1.0, 1.0] + [1 / 64] * (batch - 2),
    "drawn": lambda batch: [(37 * i % 64 + 1) / 64 for i in range(batch)],
}
# Sequences, heads, heads of keys, keys, head dimension, new tokens, tokens of a page, lengths; the most important first.
LENGTHS = (
    *((8, 32, 8, 8192, 128, 1, page, kind) for kind in ("equal", "one long", "even steps") for page in PAGES),
    *((8, 32, 8, 8192, 128, 1, 64, kind) for kind in ("one long, last", "two long", "drawn")),
    *((8, 32, 8, 2048, 128, 1, 64, kind) for kind in ("equal", "one long", "drawn")),
    *((8, 32, 8, 8192, 128, 2, 64, kind) for kind in ("equal", "one long")),
    *((16, 32, 8, 8192, 128, 1, 64, kind) for kind in ("equal", "one long", "drawn")),
    *((5, 32, 8, 8192, 128, 1, 64, kind) for kind in ("equal", "one long")),
    (64, 32, 8, 4096, 128, 1, 64, "equal"),
)
SINGLE = tuple((1, 32, 8, keys, 128, 1, page, "equal") for keys in (32768, 8192) for page in (256, 64))
TOKENS = tuple((1, 32, 8, keys, 128, new) for keys in (2048, 8192) for new in (16, 8, 1))
POINTS = {"lengths": LENGTHS, "tokens": TOKENS, "single": SINGLE}
TWO: dict = {"cluster": 2, "consumers": 0, "block_n": 128}


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
    """Add the calls of those variants that are right in every sequence, three times: later calls find the counters of the first."""
    for name, choices in named.items():
        found, missing = right_calls({name: choices}, expected[:1], *tensors, errors=row["errors"])
        for call in found.values():
            if error_of(call(), expected) < WRONG:
                calls[name] = call
            else:
                missing[name] = "wrong: other sequences"
        row["left_out"] |= missing


def prepare(point: tuple, fa3: bool, variants: Callable) -> list[tuple[dict, dict[str, Callable], int]]:
    """Prepare the variants of a point with lengths, and one piece without them where all lengths are the cache's."""
    *sizes, page, kind = point
    q, k, v = draw(*sizes)
    used = torch.tensor([int(x * sizes[3]) for x in FRACTIONS[kind](len(q))], dtype=torch.int32, device="cuda")
    row: dict = {"point": list(point), "series": 0, "errors": {}, "left_out": {}}
    calls, expected = dict[str, Callable](), decode_reference(q, k, v, seqlens=used)
    if kind == "equal":
        pieces = {"piece": {}} | ({"piece4": TWO | {"slots": 4}} if len(q) == 8 else {})
        add_right(calls, row, pieces, expected, q, k, v)
    table = None
    if page:
        table = torch.randperm(sizes[0] * sizes[3] // page, device="cuda").int().view(sizes[0], -1)
        k, v = (in_pages(x, page, table) for x in (k, v))
    add_right(calls, row, variants(point), expected, q, k, v, used, table)
    calls |= fa3_calls(row, q, k, v, used, table) if fa3 else {}
    return [(row, calls, 4 * k.numel())]


def variants_of_lengths(point: tuple) -> dict[str, dict]:
    """Name the ways to read sequences whose lengths may differ."""
    batch, page = point[0], point[6]
    found: dict[str, dict] = {"default": {}}
    if batch > 16:
        return found
    dealt = TWO | {"deal": 8}
    if point[7] != "equal":
        found["nearest"] = dealt | {"nearest": True}
    found |= {"deal": dealt, "deal4": dealt | {"slots": 4}, "none": {"cluster": 0}}
    if batch <= 8:
        found["fixed"] = TWO
    if page > 64:
        found["deal, box 64"] = dealt | {"box": 64}
    return found


def variants_of_one(point: tuple) -> dict[str, dict]:
    """Name the ways to read one sequence in pages."""
    found: dict[str, dict] = {"default": {}}
    return found | {f"box {box}": {"cluster": 8, "box": box} for box in (64, 32) if box < point[6]}


def prepare_tokens(point: tuple, fa3: bool) -> list[tuple[dict, dict[str, Callable], int]]:
    """Prepare one sequence in one piece, with several new tokens, beside the other libraries; two series."""
    small = {"cluster": 8, "block_n": 64}
    named: dict[str, dict] = {"default": {}, "fours": {"cluster": 8}, "one by one": {"cluster": 8, "fours": False}}
    named |= {"64 keys": small, "64 keys, one by one": small | {"fours": False}}
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
    return {
        "lengths": partial(prepare, fa3=fa3, variants=variants_of_lengths),
        "single": partial(prepare, fa3=fa3, variants=variants_of_one),
        "tokens": partial(prepare_tokens, fa3=fa3),
    }


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
    decode_bound.run("tools.record.decode_deal", __doc__, POINTS, ways, show, "decode: clusters dealt by the lengths")
