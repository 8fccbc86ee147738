"""Read where a tile's cycles go in step 6 of the backward: the SM's clock at ten points of each tile.

    python -m tools.record.backward_clocks --out build/backward_clocks.json

A kernel with `probe=2` keeps the clock of one thread of each warpgroup at ten points, for its last 64 tiles. The points
cost some 50 instructions a tile. A row has, for a head dimension, mask and plan, the median of the cycles between two
points over all programs and tiles, for each warpgroup, and of the whole tile.
"""

from __future__ import annotations

import itertools

import torch

from tools.record.attention_ratios import inputs
from tools.record.backward import maker_of
from tools.record.common import Record, arguments_parser

POINTS = (
    "start",
    "both products handed over",
    "scores",
    "dP",
    "dS stored",
    "dQ handed over",
    "dV",
    "dQ",
    "dQ left",
    "dK",
)
CASES = ((64, True), (64, False), (128, True), (128, False))
VARIANTS = ("", "early=1", "early=1,dk_first=1")


def read(head_dim: int, causal: bool, fields: str, zeros: bool) -> dict:
    """Run a backward at 16384 tokens, and read its clocks."""
    from utils.attention.gluon.backward.step6_one_consumer import stamps_of

    torch.manual_seed(0)
    q, k, v = inputs(head_dim, 16384)
    if zeros:
        q, k, v = (torch.zeros_like(x) for x in (q, k, v))
    name = "gluon:probe=2,split=0" + ("," + fields if fields else "")
    call = maker_of(name)(q, k, v, torch.zeros_like(q) if zeros else torch.randn_like(q), causal)
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    stamps = stamps_of(q.device).to(torch.int64)[..., : len(POINTS)]
    steps = (stamps[..., 1:] - stamps[..., :-1]) % (1 << 32)
    # Tiles follow each other but for the one where the ring of stamps begins, and where a block begins.
    whole = (stamps[..., 1:, 0] - stamps[..., :-1, 0]) % (1 << 32)
    between = (stamps[..., 1:, 0] - stamps[..., :-1, -1]) % (1 << 32)
    middle = [[int(steps[:, w, :, p].flatten().median()) for p in range(len(POINTS) - 1)] for w in range(2)]
    return {
        "head_dim": head_dim,
        "causal": causal,
        "fields": fields,
        "zeros": zeros,
        "tile": [int(whole[:, w].flatten().median()) for w in range(2)],
        "next": [int(between[:, w].flatten().median()) for w in range(2)],
        "cycles": [dict(zip(POINTS[1:], row, strict=True)) for row in middle],
        "second_is_behind": int((stamps[:, 1, :, 0] - stamps[:, 0, :, 0]).flatten().median()),
    }


def show(row: dict) -> str:
    """Two lines for a row."""
    head = f"{row['head_dim']} {'causal' if row['causal'] else 'full'} {row['fields'] or 'default'}"
    head += f"{' zeros' if row['zeros'] else ''}: tile {row['tile']} next {row['next']} skew {row['second_is_behind']}"
    return "\n  ".join([head, *(" ".join(map(str, x.values())) for x in row["cycles"])])


def main() -> None:
    """Read the clocks of each case."""
    options = arguments_parser(__doc__, pairs=1).parse_args()
    record = Record(options.out, "backward: cycles between points of a tile, step 6", "cuda", options.seconds)
    points = itertools.product(CASES, VARIANTS, (False, True))
    if record.fill(points, lambda x: read(*x[0], *x[1:]), show):
        record.finish()


if __name__ == "__main__":
    main()
