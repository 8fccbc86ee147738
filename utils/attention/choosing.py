"""The order in which `attention(backend="auto")` tries backends: as measured on this machine, else a fixed one.

    use_choices("sdpa_grid_choices.json")      # or LABS_ATTENTION_CHOICES=sdpa_grid_choices.json
    attention(q, k, v, causal=True)            # the backend that was fastest on shapes like this one
    last_run().chosen_by                       # which file decided

`labs bench choose` writes the file: for each shape of a grid the time of each backend. RULE says how a shape that was
not measured is ranked. Ratios of times move slowly between shapes where times move fast, so averaging them holds at the
border between two backends, where the label of the nearest shape alone would flip.

This file imports no backend: backends are imported by `call`, which imports this file.
"""

from __future__ import annotations

import functools
import json
import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from utils.attention.problem import Options, Problem, Shape
from utils.machine.device import compute_capability

SCHEMA, VERSION = "labs-attention-choices", 1
RULE = (
    "A shape that was not measured is ranked like its neighbours. Neighbours have the same kind (training, prefill or "
    "decode), head dimension, size of dtype, causality and presence of grouped heads (in decode: one query or several), "
    "since each of these makes another kernel run. Among them the distance is taken in log2 of the quantities that "
    "scale the work. In training and prefill these are batch x heads, queries, and heads in a group. In decode they are "
    "the keys and, counted double, the thread blocks: batch x KV heads when there is one query (its group shares a "
    "block), batch x heads otherwise. Blocks count double because the border between two kernels lies where the blocks "
    "no longer fit on the multiprocessors at once. For each backend log(its time / the best time) is averaged over the "
    "three nearest measured shapes with weights 1 / distance**3, and the smallest average comes first. A measured shape "
    "is at distance 0 from itself, so its own order is taken."
)
VARIABLE = "LABS_ATTENTION_CHOICES"
KINDS = ("training", "prefill", "decode")
DECODE_QUERIES = 16  # up to this many queries over a longer cache are decode: one token, or a few speculative ones
NEIGHBOURS, FALL_OFF = 3, 3.0  # number of nearest shapes to average; their weights are 1 / distance**FALL_OFF

# The order without mask functions: Gluon on Hopper, else FlashAttention 3 (the fastest backward pass over all head
# dimensions), else flash-attn, else SDPA's backends by their speed on a GPU. A CPU has flash, math and naive.
PLAIN_ORDER = ("gluon", "fa3", "cute", "flash_attn", "cudnn", "flash", "efficient", "math", "naive")
# The order with mask functions, score modifiers or options of a block mask, with the reason for each place. Measured on
# an H200: docs/flexattention.md.
_STORED = "no fused backend does this here"
FUNCTION_ORDER = {
    "gluon": "the Gluon kernel does this mask by itself, and is persistent",
    "flex_flash": "FlashAttention 4's pipeline under any mask function",
    "flex": "inductor's kernel under any mask function; FlashAttention 4 cannot do this here",
    "flex_eager": _STORED,
    "sdpa": _STORED,
    "naive_compiled": _STORED,
    "naive": _STORED,
}
# Masks that FlashAttention 4 does by itself; it is ahead of Gluon at head dimensions up to 64.
CUTE = {"cute": "FlashAttention 4 does this mask by itself"}


def kind_of(sq: int, sk: int, needs_grad: bool) -> str:
    """Return "training" (forward and backward), "decode" (a few queries over a longer cache) or "prefill"."""
    if needs_grad:
        return "training"
    return "decode" if sq <= DECODE_QUERIES and sk > sq else "prefill"


@dataclass(frozen=True)
class Point(Shape):
    """A shape in the terms of the ranking, measured or asked for."""

    kind: str
    bits: int
    causal: bool

    @property
    def group(self) -> tuple:
        """The properties that neighbours share: kind, bits, head_dim, causal, and grouped (decode: one query)."""
        last = self.sq == 1 if self.kind == "decode" else self.grouped
        return self.kind, self.bits, self.head_dim, self.causal, last

    @property
    def place(self) -> tuple[float, ...]:
        """The coordinates between which distances are taken."""
        ratio = 0.25 * math.log2(self.heads / self.kv_heads)
        if self.kind == "decode":
            blocks = self.batch * (self.kv_heads if self.sq == 1 else self.heads)
            return 2.0 * math.log2(blocks), math.log2(self.sk), ratio
        return math.log2(self.batch * self.heads), math.log2(self.sq), ratio


def point_of(problem: Problem) -> Point:
    """Return the point of a problem without functions."""
    kind = kind_of(problem.sq, problem.sk, problem.needs_grad)
    heads = problem.heads, problem.kv_heads
    lengths = problem.sq, problem.sk, problem.head_dim
    return Point(problem.batch, *heads, *lengths, kind, 8 * problem.dtype.itemsize, problem.causal)


@dataclass(frozen=True)
class Choices:
    """Measured points, each with {backend: ms}, and the machine and file that they come from."""

    points: tuple[tuple[Point, dict], ...]
    machine: dict
    source: str

    @functools.cached_property
    def groups(self) -> dict[tuple, list[tuple[Point, dict]]]:
        """The measured points by group."""
        groups: dict[tuple, list] = {}
        for point, times in self.points:
            groups.setdefault(point.group, []).append((point, times))
        return groups

    def neighbours(self, wanted: Point) -> list[tuple[float, dict]]:
        """Return (weight, {backend: ms}) of the nearest measured shapes, nearest first; empty for an unmeasured kind.

        If no shape of the same group was measured, the group with the same causality is taken, then the one with the
        nearest head dimension, then the one with the same grouping.
        """

        def apart(other: tuple) -> tuple:
            return other[3] != wanted.causal, abs(math.log2(other[2] / wanted.head_dim)), other[4] != wanted.group[4]

        alike = [group for group in self.groups if group[:2] == (wanted.kind, wanted.bits)]
        if not alike:
            return []
        group = self.groups[min(alike, key=apart)]
        distances = ((math.dist(point.place, wanted.place), times) for point, times in group)
        nearest = sorted(distances, key=lambda pair: pair[0])[:NEIGHBOURS]
        if nearest[0][0] == 0.0:
            return [(1.0, nearest[0][1])]
        return [(distance**-FALL_OFF, times) for distance, times in nearest]

    def relative_times(self, wanted: Point) -> dict[str, float]:
        """Return {backend: expected time / best time}, the smallest first.

        A backend that one neighbour lacks is ranked by the others; a backend that no neighbour has is left out.
        """
        found: dict[str, list[tuple[float, float]]] = {}  # {backend: (weight, log of its relative time)}
        for weight, times in self.neighbours(wanted):
            for name, ms in times.items():
                found.setdefault(name, []).append((weight, math.log(ms / min(times.values()))))
        means = {name: sum(w * x for w, x in pairs) / sum(w for w, _ in pairs) for name, pairs in found.items()}
        return {name: math.exp(means[name]) for name in sorted(means, key=means.__getitem__)}

    def rank(self, problem: Problem) -> tuple[str, ...]:
        """Return the backends for a problem, the fastest first; empty if nothing like it was measured."""
        return tuple(self.relative_times(point_of(problem)))


def machine_here(device: torch.device | str) -> dict:
    """Return this machine as a choices file names it: {"gpu": name, "cpu": None} or {"gpu": None, "cpu": name}."""
    from utils.machine.environment import cpu_model

    device = torch.device(device)
    if device.type == "cuda":
        return {"gpu": torch.cuda.get_device_name(device), "cpu": None}
    return {"gpu": None, "cpu": cpu_model()}


def read_choices(path: str | os.PathLike, device: torch.device | str | None = None) -> Choices:
    """Read a file that `labs bench choose` wrote on this GPU (on a machine without a GPU: on this CPU).

    A ValueError refuses a file of another machine, and a file that is no such file. A warning says if torch or cuDNN
    have another version here, since other versions bring other kernels.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"are no JSON ({error})"
        raise ValueError(f"the attention choices {path} {what}. `labs bench choose` writes such a file.") from None
    if not isinstance(document, dict) or (document.get("schema"), document.get("version")) != (SCHEMA, VERSION):
        raise ValueError(
            f"{path} is no {SCHEMA} file of version {VERSION}. `labs bench choose` writes one, its name "
            "ends in _choices.json."
        )
    machine = document["machine"]
    here = machine_here(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    measured_on, this = (names["gpu"] or names["cpu"] for names in (machine, here))
    if measured_on != this:
        raise ValueError(
            f"the attention choices {path} were measured on {measured_on}, and this is {this}: another machine has "
            "other fastest kernels. Run `labs bench choose` here, or leave the file out."
        )
    versions = {"torch": torch.__version__} | ({"cudnn": torch.backends.cudnn.version()} if here["gpu"] else {})
    differ = [f"{name} {machine.get(name)} (here {now})" for name, now in versions.items() if machine.get(name) != now]
    if differ:
        warnings.warn(
            f"The attention choices {path} were measured with {' and '.join(differ)}: other versions, other "
            "kernels. `labs bench choose` measures anew.",
            stacklevel=2,
        )
    return parse_choices(document, str(path))


def parse_choices(document: dict, source: str) -> Choices:
    """Parse the JSON document of a choices file, whatever machine it was measured on."""
    try:
        points = tuple(
            (Point(**{key: entry[key] for key in Point.__dataclass_fields__}), dict(entry["ms"]))
            for entry in document["points"]
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{source} is damaged: {error!r}. Run `labs bench choose` again.") from None
    return Choices(points, document["machine"], source)


_in_use: Choices | None = None


@functools.cache
def _choices_of_environment() -> Choices | None:
    path = os.environ.get(VARIABLE)
    return read_choices(path) if path else None


def use_choices(path: str | os.PathLike | None) -> Choices | None:
    """Let `attention(backend="auto")` follow a file of measured choices; None goes back to the fixed order.

    The environment variable LABS_ATTENTION_CHOICES names a file for processes that do not call this. It is read at the
    first call of `attention`, and after this one.
    """
    global _in_use
    _choices_of_environment.cache_clear()
    _in_use = None if path is None else read_choices(path)
    return _in_use


def active_choices() -> Choices | None:
    """Return the choices in force: those of `use_choices`, else of the environment variable, else None."""
    return _choices_of_environment() if _in_use is None else _in_use


@dataclass(frozen=True)
class Ranking:
    """The names of the backends to try, best first; the file of choices behind it or ""; {name: why}."""

    names: tuple[str, ...]
    source: str
    reasons: dict[str, str]


_FIXED = Ranking(PLAIN_ORDER, "", dict.fromkeys(PLAIN_ORDER, "the first in the fixed order that can do this"))


def rank_backends(problem: Problem, options: Options) -> Ranking:
    """Rank the backends that "auto" tries: by measured choices, then by a fixed order."""
    if problem.has_functions or options.given:
        plain = problem.plain()
        alone = plain is not None and plain.sq == problem.sq and not options.given
        order = FUNCTION_ORDER
        if alone:
            gluon = {"gluon": order["gluon"]}
            order = (CUTE | order) if problem.head_dim <= 64 else (gluon | CUTE | order)
        return Ranking(tuple(order), "", order)
    if problem.device.type == "cuda" and (compute_capability() or (0, 0))[0] == 10:
        # No GPU has run Gluon's kernel for Blackwell, so it is taken by its name only.
        return Ranking(PLAIN_ORDER[1:], "", _FIXED.reasons)
    choices = active_choices()
    measured = () if choices is None else choices.rank(problem)
    if choices is None or not measured:
        return _FIXED
    why = f"the fastest on shapes like this one, by {choices.source}"
    names = tuple(dict.fromkeys((*measured, *PLAIN_ORDER)))
    return Ranking(names, choices.source, _FIXED.reasons | dict.fromkeys(measured, why))
