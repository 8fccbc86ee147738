"""What was measured on this machine, as the order in which `attention(provider="auto")` tries its providers.

    use_choices("sdpa_grid_choices.json")      # or LABS_ATTENTION_CHOICES=sdpa_grid_choices.json
    attention(q, k, v, causal=True)            # the provider that was fastest on shapes like this one
    last_run().chosen_by                       # which file said so

`labs bench choose` writes the file: for each shape of a grid the time of each provider. A shape that was not measured
is ranked like its neighbours. Neighbours have the same kind (training, prefill or decode), head dimension, size of
dtype, causality and presence of grouped heads (in decode: one query or several), since each of these makes another
kernel run. Among them the distance is taken in log2 of what scales the work. In training and prefill that is batch x
heads, queries and heads in a group. In decode it is the keys and, counted double, the blocks of work: batch x heads
of K and V for one query, since a group then shares a block, batch x heads for several. Blocks count double because the
border between two kernels lies where the blocks stop fitting on the multiprocessors at once. For each provider log(its
time / the best time) is averaged over the three nearest measured shapes with weights 1 / distance**3, and the smallest
average comes first. Ratios move slowly between shapes where times move fast, so this holds at the border between two
providers, where the label of the nearest shape alone would flip. A measured shape is at distance 0 of itself: its own
order is taken.
"""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from utils.attention.request import Request, Shape

SCHEMA, VERSION = "labs-attention-choices", 1
VARIABLE = "LABS_ATTENTION_CHOICES"
KINDS = ("training", "prefill", "decode")
DECODE_QUERIES = 16  # up to this many queries over a longer cache are decode: one token, or a few guessed ones
NEIGHBOURS, FALL_OFF = 3, 3.0  # how many nearest shapes count, and the power of 1 / distance they count with
REMEMBERED = 4096  # shapes whose order is kept, so that a call need not rank again


def kind_of(sq: int, sk: int, needs_grad: bool) -> str:
    """ "training" (forward and backward), "decode" (a few queries over a longer cache) or "prefill"."""
    if needs_grad:
        return "training"
    return "decode" if sq <= DECODE_QUERIES and sk > sq else "prefill"


@dataclass(frozen=True)
class Point(Shape):
    """A shape as the chooser sees it, measured or asked for."""

    kind: str
    bits: int
    causal: bool

    @property
    def group(self) -> tuple:
        """What a neighbour must share: kind, bits, head_dim, causal, and grouped (decode: one query)."""
        last = self.sq == 1 if self.kind == "decode" else self.grouped
        return self.kind, self.bits, self.head_dim, self.causal, last

    @property
    def place(self) -> tuple[float, ...]:
        """Where it lies among its neighbours."""
        ratio = 0.25 * math.log2(self.heads / self.kv_heads)
        if self.kind == "decode":
            blocks = self.batch * (self.kv_heads if self.sq == 1 else self.heads)
            return 2.0 * math.log2(blocks), math.log2(self.sk), ratio
        return math.log2(self.batch * self.heads), math.log2(self.sq), ratio


def point_of(request: Request) -> Point:
    return Point(
        request.batch,
        request.heads,
        request.kv_heads,
        request.sq,
        request.sk,
        request.head_dim,
        kind_of(request.sq, request.sk, request.needs_grad),
        8 * request.dtype.itemsize,
        request.causal,
    )


@dataclass(frozen=True)
class Choices:
    """Measured points, each with {provider: ms}, and where they come from."""

    points: tuple[tuple[Point, dict], ...]
    machine: dict
    source: str
    ranked_before: dict[Point, tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def groups(self) -> dict[tuple, list[tuple[Point, dict]]]:
        found: dict[tuple, list] = {}
        for point, times in self.points:
            found.setdefault(point.group, []).append((point, times))
        return found

    def neighbours(self, wanted: Point) -> list[tuple[float, dict]]:
        """(weight, {provider: ms}) of the measured shapes to go by, nearest first; none where the kind is unmeasured.

        Without a measured shape of the very group, that of the nearest head dimension is taken, the other grouping, or
        at last the other causality.
        """
        group = self.groups.get(wanted.group)
        if group is None:

            def apart(other: tuple) -> tuple:
                return (
                    other[3] != wanted.causal,
                    abs(math.log2(other[2] / wanted.head_dim)),
                    other[4] != wanted.group[4],
                )

            alike = [other for other in self.groups if other[:2] == (wanted.kind, wanted.bits)]
            if not alike:
                return []
            group = self.groups[min(alike, key=apart)]
        ranked = sorted(
            ((math.dist(point.place, wanted.place), times) for point, times in group), key=lambda pair: pair[0]
        )[:NEIGHBOURS]
        if ranked[0][0] == 0.0:
            return [(1.0, ranked[0][1])]
        return [(distance**-FALL_OFF, times) for distance, times in ranked]

    def relative_times(self, wanted: Point, only: tuple[str, ...] | None = None) -> dict[str, float]:
        """{provider: expected time / best time}, the smallest first. A provider that a neighbour lacks is ranked by
        the others; one that no neighbour has is left out.
        """
        total: dict[str, float] = {}
        weights: dict[str, float] = {}
        for weight, times in self.neighbours(wanted):
            known = {name: ms for name, ms in times.items() if only is None or name in only}
            if not known:
                continue
            best = min(known.values())
            for name, ms in known.items():
                total[name] = total.get(name, 0.0) + weight * math.log(ms / best)
                weights[name] = weights.get(name, 0.0) + weight
        return {
            name: math.exp(total[name] / weights[name])
            for name in sorted(total, key=lambda name: total[name] / weights[name])
        }

    def rank(self, request: Request) -> tuple[str, ...]:
        """Providers for a request, the fastest first; empty where nothing like it was measured."""
        point = point_of(request)
        if point not in self.ranked_before:
            if len(self.ranked_before) >= REMEMBERED:
                self.ranked_before.clear()
            self.ranked_before[point] = tuple(self.relative_times(point))
        return self.ranked_before[point]


def machine_here(device: torch.device | str) -> dict:
    """What a choices file must have been measured on: the GPU's name, or the CPU's."""
    from utils.machine.environment import cpu_model

    device = torch.device(device)
    if device.type == "cuda":
        return {"gpu": torch.cuda.get_device_name(device), "cpu": None}
    return {"gpu": None, "cpu": cpu_model()}


def read_choices(path: str | os.PathLike, device: torch.device | str | None = None) -> Choices:
    """The choices of a file that `labs bench choose` wrote on this GPU (on a machine without one: on this CPU).

    A file of another machine is refused, as is one that is no such file. Other versions of torch or cuDNN than the
    file's bring other kernels: that is said in a warning.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"the attention choices {path} cannot be read: {error.strerror}. `labs bench choose` writes such a file."
        ) from None
    except ValueError as error:
        raise ValueError(
            f"the attention choices {path} are no JSON ({error}). `labs bench choose` writes them."
        ) from None
    if not isinstance(document, dict) or (document.get("schema"), document.get("version")) != (SCHEMA, VERSION):
        raise ValueError(
            f"{path} is no {SCHEMA} file of version {VERSION}. `labs bench choose` writes one, its name "
            "ends in _choices.json."
        )
    machine = document["machine"]
    here = machine_here(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    of, this = (one["gpu"] or one["cpu"] for one in (machine, here))
    if of != this:
        raise ValueError(
            f"the attention choices {path} were measured on {of}, and this is {this}: another machine has "
            "other fastest kernels. Run `labs bench choose` here, or leave the file out."
        )
    versions = {"torch": torch.__version__}
    if here["gpu"]:
        versions["cudnn"] = torch.backends.cudnn.version()
    if differ := [
        f"{name} {machine.get(name)} (here {now})" for name, now in versions.items() if machine.get(name) != now
    ]:
        import warnings

        warnings.warn(
            f"The attention choices {path} were measured with {' and '.join(differ)}: other versions, other "
            "kernels. `labs bench choose` measures anew.",
            stacklevel=2,
        )
    return parse_choices(document, str(path))


def parse_choices(document: dict, source: str) -> Choices:
    """Choices out of the JSON document, whatever machine it was measured on."""
    try:
        points = tuple(
            (Point(**{key: entry[key] for key in Point.__dataclass_fields__}), dict(entry["ms"]))
            for entry in document["points"]
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{source} is damaged: {error!r}. Run `labs bench choose` again.") from None
    return Choices(points, document["machine"], source)


_given: Choices | None = None


@functools.lru_cache(maxsize=8)
def _of_variable(path: str) -> Choices:
    return read_choices(path)


def use_choices(path: str | os.PathLike | None) -> Choices | None:
    """Have `attention(provider="auto")` go by a file of measured choices from now on; None goes back to the fixed
    order. The environment variable LABS_ATTENTION_CHOICES names a file for processes that do not call this.
    """
    global _given
    _given = None if path is None else read_choices(path)
    return _given


def active_choices() -> Choices | None:
    """The choices in force: those of `use_choices`, else of the environment variable, else None."""
    if _given is not None:
        return _given
    named = os.environ.get(VARIABLE)
    return _of_variable(named) if named else None


def ranked(request: Request) -> tuple[tuple[str, ...], str]:
    """(providers for a request, fastest first; the file that says so), or ((), "") where none is in force."""
    choices = active_choices()
    if choices is None:
        return (), ""
    order = choices.rank(request)
    return (order, choices.source) if order else ((), "")
