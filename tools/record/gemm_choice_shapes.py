"""At which shapes, and by which configurations, `gemm_choice` measures the GEMM.

The shapes are those that are poor in the two recorded tables (kind "train"), and others of a seed, every second one held
out (kind "test"): products with few tiles, large ones whose rows start at odd multiples of 16 bytes, and any. At each shape the
configurations are of different families, such as tiles in parts or clusters that share tiles, of each family the first by the
model: where the model is wrong about a family, its own first ones would not show it.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import replace

from tools.record.common import read_record
from tools.record.gemm_shapes import LARGEST, SMALLEST, SMS, draw_shapes, late_rows
from utils.files import ROOT
from utils.kernels import gemm_choose, gemm_model
from utils.kernels.gemm_config import Config

SEED = 2043
FEW_TILES, LARGE_LATE, ANY = 12, 4, 14  # shapes of the seed
SHORTEST_US = 5.0  # by the model: shorter products are ahead
RANKED, MOST = 5, 11  # configurations at a shape: the first of all tiles, then the first of the families
WITHIN = 1.7  # a family whose first takes so many times as long as the first of all is left out
MORE_SPLITS = (5, 7, 12)  # numbers of parts that were tried in earlier records and are no candidates
AS_IN_TABLES = "as in tables"
FIRST = 6  # configurations at a shape that is drawn as in tables
POOR = 0.95  # ratio in a table below which a shape is searched
TABLES = ("gemm_shapes", "gemm_shapes_other")
SIZES = ("m", "n", "k", "a_column_major", "b_column_major")


def recorded(name: str) -> list[dict]:
    """Return the rows of a record of the H100."""
    return read_record(ROOT / f"assets/results/h100/{name}.json")["rows"]


def searches() -> list[dict]:
    """Return the rows of all recorded searches, on either GPU."""
    paths = sorted(ROOT.glob("assets/results/h?00/gemm_choice_*.json"))
    return [row for path in paths for row in read_record(path)["rows"] if "times" in row]


def poor_shapes(ratio: float) -> list[dict]:
    """Return the shapes of both tables whose ratio is below `ratio`, with what was taken and what was best in other records."""
    rows = sorted((row for name in TABLES for row in recorded(name) if row["ratio"] < ratio), key=lambda x: x["ratio"])
    searched = searches()
    found = []
    for row in rows:
        times = sorted(
            (us / other["torch_us"], name)
            for other in searched
            if all(other[x] == row[x] for x in SIZES)
            for name, us in other["times"]
        )
        before = dict.fromkeys([row["config"], *(name for _, name in times[:2])])
        found.append({x: row[x] for x in SIZES} | {"kind": "train", "before": [*before]})
    return found


def drawn_shapes(seed: int = SEED) -> list[dict]:
    """Draw the other shapes, of three groups: "few tiles", "large" with late rows, and "any"; every second one is held out."""
    draw = random.Random(seed)
    few: list[dict] = []
    while len(few) < FEW_TILES:
        small = [8 * round(math.exp(draw.uniform(math.log(64), math.log(1100))) / 8) for _ in range(2)]
        thin = [
            8 * round(math.exp(draw.uniform(math.log(least), math.log(most))) / 8)
            for least, most in ((64, 512), (1000, LARGEST))
        ]
        sides = draw.sample(thin, 2) if len(few) % 2 else small
        k = 8 * round(math.exp(draw.uniform(math.log(400), math.log(LARGEST))) / 8)
        shape = dict(zip(SIZES, (*sides, k, draw.random() < 0.5, draw.random() < 0.5), strict=True))
        if shortest(shape) > SHORTEST_US:
            few.append(shape)
    others = [{x: shape[x] for x in SIZES} for shape in draw_shapes(seed, 200)]
    large = [x for x in others if min(x["m"], x["n"]) > 512 and {1, 2} & {*late_rows(x)} and 2e10 < work(x) < 1e12]
    large = [x for x in large if shortest(x) > 4 * SHORTEST_US][:LARGE_LATE]
    rest = [x for x in others if x not in large and shortest(x) > SHORTEST_US][:ANY]
    groups = (("few tiles", few), ("large", large), ("any", rest))
    return [
        shape | {"kind": ("test", "train")[i % 4 in (1, 2)], "group": group}
        for group, shapes in groups
        for i, shape in enumerate(shapes)
    ]


def all_shapes(ratio: float = POOR) -> list[dict]:
    """Return the poor shapes and the drawn ones, mixed, so that each part of them has some of each group."""
    found = poor_shapes(ratio) + drawn_shapes()
    random.Random(SEED).shuffle(found)
    return found


def shapes_as_in_tables(seed: int, count: int) -> list[dict]:
    """Draw shapes as those of the tables are drawn, none of which is in one; `families_of` takes the model's first for them."""
    in_tables = [{x: shape[x] for x in SIZES[:3]} for table in TABLES for shape in recorded(table)]
    drawn = [{x: shape[x] for x in SIZES} for shape in draw_shapes(seed, count)]
    return [shape | {"kind": AS_IN_TABLES} for shape in drawn if {x: shape[x] for x in SIZES[:3]} not in in_tables]


def work(shape: dict) -> float:
    """Return the operations of a product."""
    return 2.0 * shape["m"] * shape["n"] * shape["k"]


def shortest(shape: dict) -> float:
    """Return the model's time of what it would take, in microseconds."""
    return ranked(shape)[0][0]


def ranked(shape: dict) -> list[tuple[float, Config]]:
    """Return the candidates of a shape, each behind the model's time in microseconds, the shortest first."""
    from utils.kernels.gemm_candidates import table

    sizes, late = (shape["m"], shape["n"], shape["k"]), late_rows(shape)
    entries = table().possible(*sizes, SMS, late, True)
    times = gemm_model.estimates(*sizes, table().traits.take(entries), SMS, late)
    order = times.argsort(kind="stable")
    return [(float(times[i]), table().config(entries[i])) for i in order if times[i] < WITHIN * times.min()]


def training_shapes(seed: int, count: int) -> list[dict]:
    """Draw shapes as `gemm_shapes` does, up to a smaller size; A is row-major, B either."""
    draw = random.Random(seed)
    shapes: list[dict] = []
    while len(shapes) < count:
        m, n, k = (8 * round(math.exp(draw.uniform(math.log(SMALLEST), math.log(LARGEST))) / 8) for _ in "mnk")
        column_major = draw.random() < 0.5
        if 2e7 <= 2 * m * n * k <= 1.2e12:
            shapes.append({"m": m, "n": n, "k": k, "a_column_major": False, "b_column_major": column_major})
    return shapes


def family(config) -> tuple:
    """Return what kind of configuration it is: which kernel, how many blocks share tiles, parts, rows by parity."""
    parts = "cluster" if config.in_cluster else "parts" if config.split > 1 else "whole"
    return config.short, 1 if config.in_cluster else config.cluster, parts, config.pairs


def families_of(shape: dict) -> list:
    """Return the configurations that are timed: those before, the first by the model, and the first of each family.

    The first ones have different tiles; slots and places along K make no other tile, nor does the number of parts.
    """
    if shape.get("kind") == AS_IN_TABLES:
        sizes = shape["m"], shape["n"], shape["k"]
        return gemm_choose.first_choices(*sizes, SMS, late_rows(shape), True, FIRST)
    near = [config for _, config in ranked(shape)]
    kept = [config for name in shape.get("before", ()) if (config := config_of(name))]
    keys = ((RANKED, lambda x: x.tile), (MOST, family), (MOST, lambda x: (family(x), x.transposed)))
    for count, key in keys:
        taken = {key(config) for config in kept}
        for config in near:
            if key(config) not in taken and len(kept) < count:
                taken.add(key(config))
                kept.append(config)
    return kept


@functools.cache
def _configs_by_name() -> dict:
    from utils.kernels.gemm_config import SHAPES
    from utils.kernels.gemm_plan import CONFIGS, DEEP, MOST_IN_CLUSTER, SHORT_CONFIGS, SPLITS, WIDTHS, as_cluster

    found = [
        replace(config, split=split, pairs=pairs, multicast=multicast, transposed=transposed, early=early, join=join)
        for config in (*CONFIGS, *WIDTHS, *DEEP, *SHORT_CONFIGS)
        for split in (*SPLITS, *MORE_SPLITS)
        for pairs in (False, True)
        for multicast in SHAPES
        for transposed in (False, True)
        for early in (True, False)
        for join in (True, False)
        if not (config.short and (multicast or transposed)) and not (pairs and transposed) and (join or config.can_join)
    ]
    found += [
        as_cluster(replace(config, pairs=pairs, transposed=transposed), split)
        for config in (*CONFIGS, *WIDTHS, *DEEP)
        for split in range(2, MOST_IN_CLUSTER + 1)
        for pairs, transposed in ((False, False), (True, False), (False, True))
    ]
    # Of configurations with one name, as of a cluster whose sums leave no room for more slots, the first.
    return {config.name: config for config in reversed(found)}


def config_of(name: str):
    """Return the configuration with a name; None if the kernels no longer have its tile.

    "spread" in a name of an earlier record says that tiles began at other places along K, which they no longer can.
    """
    plain, _, stream = name.replace("spread ", "").partition(" streams ")
    config = _configs_by_name().get(plain)
    return replace(config, stream=stream) if config and stream else config
