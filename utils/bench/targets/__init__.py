"""The registry of targets, and how their names are read: a target, one side of it, or a whole chapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from utils.bench.errors import BenchError, nearest
from utils.bench.knobs import parse_flags, settle, split_extra_args
from utils.bench.targets import attention_suite, cudnn_sdpa_bench, flashattention_gluon, flexattention
from utils.bench.targets.base import SIDES, Built, Case, Target

FAMILIES = (flexattention, flashattention_gluon, cudnn_sdpa_bench, attention_suite)
TARGETS: dict[str, Target] = {target.name: target for family in FAMILIES for target in family.TARGETS}

__all__ = ["SIDES", "TARGETS", "Built", "Case", "Plan", "Target", "chapters", "plan", "read_name", "targets_of"]


@dataclass(frozen=True)
class Plan:
    """A target with the sides and cases to be run."""

    target: Target
    sides: tuple[str, ...]
    cases: tuple[Case, ...]


def chapters() -> list[str]:
    return list(dict.fromkeys(target.chapter for target in TARGETS.values()))


def targets_of(chapter: str | None) -> list[Target]:
    """All targets, or those of one chapter."""
    if chapter is None:
        return list(TARGETS.values())
    if chapter not in chapters():
        raise BenchError(f"there is no chapter {chapter!r}.{nearest(chapter, chapters())}")
    return [target for target in TARGETS.values() if target.chapter == chapter]


def read_name(name: str) -> list[tuple[Target, tuple[str, ...]]]:
    """The targets and sides a name stands for: `chapter`, `chapter:workload`, `chapter:baseline_workload`."""
    given = name.strip()
    if given.startswith("labs.") and given.count(".") == 2:  # the module name, labs.<chapter>.<workload>
        given = "labs/" + given[len("labs.") :].replace(".", ":")
    if given in chapters():
        return [(target, SIDES) for target in targets_of(given)]
    if given in TARGETS:
        return [(TARGETS[given], SIDES)]
    one_sided = {target.side_name(side): (target, (side,)) for target in TARGETS.values() for side in SIDES}
    if given in one_sided:
        return [one_sided[given]]
    raise BenchError(
        f"there is no target {name!r}.{nearest(given, [*TARGETS, *one_sided, *chapters()])} "
        "`labs bench list-targets` lists them."
    )


def plan(
    names: Iterable[str], extra_args: Iterable[str], device: torch.device, environ: Mapping[str, str]
) -> list[Plan]:
    """What is to be run, everything checked before anything runs."""
    chosen: dict[str, tuple[str, ...]] = {}
    for name in names:
        for target, sides in read_name(name):
            both = {*chosen.get(target.name, ()), *sides}
            chosen[target.name] = tuple(side for side in SIDES if side in both)
    if not chosen:
        raise BenchError(
            "no target was given; name one with --targets, such as "
            f"{next(iter(TARGETS))} (`labs bench list-targets` lists them)."
        )
    given: dict[str, dict] = {name: {} for name in chosen}
    for name, flags in split_extra_args(extra_args).items():
        named = read_name(name)
        if len(named) > 1:
            raise BenchError(
                f"--target-extra-arg names the chapter {name}; name one target of it: "
                f"{', '.join(target.name for target, _ in named)}."
            )
        target = named[0][0]
        if target.name not in chosen:
            raise BenchError(
                f"--target-extra-arg is for {target.name}, which is not among the targets to run "
                f"({', '.join(chosen)}); add it to --targets."
            )
        values = parse_flags(target.knobs, flags, target.name)
        if twice := set(values) & set(given[target.name]):
            raise BenchError(f"{', '.join(sorted(twice))} of {target.name} is given twice; give it once.")
        given[target.name] |= values
    plans = []
    for name, sides in chosen.items():
        target = TARGETS[name]
        settings = settle(target.knobs, given[name], device.type, environ)
        plans.append(Plan(target, sides, tuple(target.cases(settings, device))))
    return plans
