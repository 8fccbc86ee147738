"""Compare the decode kernel's variants on random shapes, lengths, pages and masks with float64; each call twice.

    python -m tools.record.decode_right --cases 60 --seconds 40 --out decode_right.json
    python -m tools.record.decode_right --clusters --out decode_right_clusters.json
    python -m tools.record.decode_right --paged --out decode_right_pages.json

A case is right if both calls are, and gave the same bits. Several processes share the work with `--part`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from functools import partial

import torch

from tools.record.common import Record, arguments_parser
from tools.record.decode_variants import MULTIPROCESSORS, WRONG, bound, error_of
from utils.attention import decode_reference
from utils.attention.gluon.decode.arrangement import arrange


def random_case(seed: int, paged: bool = False) -> dict:
    """Compare one variant on random shapes, lengths, pages and masks with float64, twice; paged: the cache is in pages."""
    from tests.utils.attention.decode_cases import random_cache

    rng = random.Random(seed)
    dtype = rng.choice((torch.bfloat16, torch.float16))
    consumers = rng.choice((0, 1, 2, 1, 2))
    batch, kv_heads, group = rng.choice((1, 2, 5, 17)), rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 4, 8, 16))
    sq, head_dim = rng.choice((1, 2, 7, 16, 33)), rng.choice((64, 128, 128, 256, 80))
    slots, page = rng.choice((5, 129, 700, 1500, 4097)), rng.choice((None, None, 16, 64, 256))
    case = {"causal": rng.random() < 0.7, "window": rng.choice((None, None, 1, 100, 1000))}
    # It takes neither lengths nor pages, and would be rare among all others.
    ahead = rng.random() < 0.3 and not paged
    if paged:
        page = page or rng.choice((16, 64, 256))
    if ahead:
        page, head_dim, consumers = None, min(head_dim, 128), consumers or 1
    k, v, lengths, table = (
        x if x is None else x.cuda() for x in random_cache(batch, kv_heads, slots, head_dim, dtype, seed, page)
    )
    if page is None and (ahead or rng.random() < 0.5):  # without lengths the programs of a head may merge it together
        k, v, lengths = *torch.randn(2, batch, kv_heads, max(slots, sq), head_dim, device="cuda", dtype=dtype), None
    q = torch.randn(batch, kv_heads * group, sq, head_dim, device="cuda", dtype=dtype)
    choices = {
        "consumers": consumers,
        "merge": rng.choice(("last", "second", None)),
        "programs": rng.choice((0, 3, 128)),
    }
    scales = None
    if ahead:
        choices |= {"ahead": True, "aligned": True, "block_n": rng.choice((64, 128)), "merge": None}
    elif rng.random() < 0.25 and head_dim % 16 == 0:
        # With keys as rows a tile holds 64 query rows, and all heads of a group.
        choices = choices | {
            "consumers": rng.choice((0, 0, 1, 2) if head_dim <= 128 else (0, 0, 1)),
            "fp8": True,
            "merge": rng.choice(("last", "second", None)),
        }
        k, v, scales = (
            k.to(torch.float8_e4m3fn),
            v.to(torch.float8_e4m3fn),
            torch.rand(2, kv_heads, device="cuda") + 0.5,
        )
    elif consumers == 1:
        choices["wide"] = rng.random() < 0.5
        choices["level"] = rng.random() < 0.5
        choices["producers"] = rng.choice((1, 2))
        if head_dim <= 128 and rng.random() < 0.3:
            choices |= {"per_sm": 2, "block_n": 64, "producers": 1}
    elif consumers == 0 and head_dim <= 128:
        choices |= rng.choice(({}, {"per_sm": 2, "block_n": 64}))
    if consumers and lengths is None and not ahead and not choices.get("fp8") and rng.random() < 0.6:
        choices |= {"by_tma": True, "aligned": True, "merge": None}
    if consumers and page is None and not choices.get("fp8"):
        choices["k_first"] = rng.random() < 0.5 and choices.get("producers", 1) == 1
        choices["prefill"] = rng.random() < 0.5 and lengths is None
        choices["backward"] = rng.random() < 0.5 and choices.get("aligned", False)
    if consumers == 0 and not choices.get("fp8"):
        choices["lean"] = rng.random() < 0.5
    call = bound(choices, q, k, v, lengths, table, scales, **case)
    expected = decode_reference(q, k, v, seqlens=lengths, block_table=table, kv_scales=scales, **case)
    shape = (batch, kv_heads * group, kv_heads, sq, slots, head_dim, page)
    return {"seed": seed, "shape": shape, "case": case, "choices": choices} | verdict(call, expected)


def verdict(call: Callable, expected: torch.Tensor) -> dict:
    """Call twice: the errors, whether both are small, and whether both calls gave the same bits."""
    outputs = [call() for _ in range(2)]
    errors = [error_of(out, expected) for out in outputs]
    same = torch.equal(*outputs)
    # An error that is nan is not below the limit; `max` might pass over it.
    return {"errors": errors, "same_bits": same, "right": same and all(error < WRONG for error in errors)}


def random_cluster_case(seed: int) -> dict:
    """Compare clusters of random sizes on random shapes, with lengths and pages, with float64, twice."""
    from tests.utils.attention.decode_cases import random_cache

    rng = random.Random(seed)
    while True:
        dtype, causal = rng.choice((torch.bfloat16, torch.float16)), rng.random() < 0.7
        batch, kv_heads, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 8)), rng.choice((1, 2, 3, 4, 8))
        sq, head_dim = rng.choice((1, 2, 7, 8, 16, 33)), rng.choice((64, 128, 128, 256, 80))
        choices = {"cluster": rng.choice((2, 4, 8, 16)), "consumers": rng.choice((0, 1)), "hint": rng.random() < 0.5}
        choices["in_turn"], choices["block_n"] = rng.random() < 0.7, (block := rng.choice((32, 64, 128)))
        choices["per_sm"] = rng.choice((1, 2)) if choices["consumers"] == 0 else 1
        each = choices["cluster"]
        blocks = each * rng.choice((1, 1, 2, 3, 5, 9)) + rng.choice((0, rng.randrange(each)))
        keys = max(blocks * block - rng.randrange(block), sq)
        page = rng.choice((None, None, 16, 64, 256))
        lengths = page is not None or rng.random() < 0.3
        with contextlib.suppress(ValueError):  # tiles that do not fit
            arrange(batch, kv_heads, group, sq, keys, head_dim, MULTIPROCESSORS, page=page, lengths=lengths, **choices)
            break
    torch.manual_seed(seed)
    q = torch.randn(batch, kv_heads * group, sq, head_dim, device="cuda", dtype=dtype)
    if lengths:
        cache = random_cache(batch, kv_heads, keys, head_dim, dtype, seed, page)
        k, v, used, table = (x if x is None else x.cuda() for x in cache)
    else:
        k, v = torch.randn(2, batch, kv_heads, keys, head_dim, device="cuda", dtype=dtype)
        used = table = None
    call = bound(choices, q, k, v, used, table, causal=causal)
    shape = (batch, kv_heads * group, kv_heads, sq, keys, head_dim, page, lengths)
    row = {"seed": seed, "shape": shape, "case": {"causal": causal}, "choices": choices}
    return row | verdict(call, decode_reference(q, k, v, seqlens=used, block_table=table, causal=causal))


def main() -> None:
    """Compare as many cases as the command line says."""
    parser = arguments_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--cases", type=int, default=60, help="random cases")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--part", default="0/1", help="part/parts: every parts-th case")
    parser.add_argument("--clusters", action="store_true", help="clusters only")
    parser.add_argument("--paged", action="store_true", help="caches in pages only")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    record = Record(options.out, "decode: random cases against float64", "cuda", options.seconds)
    case = random_cluster_case if options.clusters else partial(random_case, paged=options.paged)
    seeds = range(options.first, options.first + options.cases)[part::parts]
    if record.fill(seeds, case, lambda row: "" if row["right"] else str(row)):
        record.finish()
    wrong = [row for row in record.contents["rows"] if not row["right"]]
    print(f"{len(record.contents['rows'])} cases, {len(wrong)} wrong: {wrong}"[:800])


if __name__ == "__main__":
    main()
