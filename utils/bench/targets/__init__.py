"""The registry of targets. A name selects a target, one side of a target, or a whole chapter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from utils.bench.errors import BenchError, check_choice
from utils.bench.knobs import Setting, Sweep, settle, split_extra_arg
from utils.bench.targets import attention, flexattention, functions
from utils.bench.targets.base import SIDES, Case, Target
from utils.machine.device import default_device
from utils.validation import did_you_mean

FAMILIES = (flexattention, attention, functions)
TARGETS: dict[str, Target] = {target.name: target for family in FAMILIES for target in family.TARGETS}


@dataclass(frozen=True)
class Plan:
    """A target with the sides and the cases to run."""

    target: Target
    sides: tuple[str, ...]
    cases: tuple[Case, ...]


def read_name(name: str) -> list[tuple[Target, tuple[str, ...]]]:
    """Return the targets and sides of a name: `chapter`, `chapter:workload`, `chapter:baseline_workload` or a function's."""
    named: dict[str, list[tuple[Target, tuple[str, ...]]]] = {}
    for target in TARGETS.values():
        named.setdefault(target.chapter, []).append((target, SIDES))
        named[target.name] = [(target, SIDES)]
        named |= {target.side_name(side): [(target, (side,))] for side in SIDES}
    key = name.strip()
    if key in named:
        return named[key]
    module, colon, function = key.partition(":")
    if colon and module not in named and all(word.isidentifier() for word in f"{module}.{function}".split(".")):
        return [(functions.UserFunction(key), ("optimized",))]
    raise BenchError(
        f"there is no target {name!r}.{did_you_mean(key, named)} `labs bench list-targets` lists the targets."
    )


def _read_flags(extra_args: Iterable[str], chosen: Iterable[str]) -> dict[str, str]:
    """Join the --target-extra-arg strings of each target: {target: flags}. Flags of a chapter are for each of its targets."""
    flags = dict.fromkeys(chosen, "")
    for name, text in map(split_extra_arg, extra_args):
        for target, _ in read_name(name):
            if target.name not in flags:
                raise BenchError(
                    f"--target-extra-arg is for {target.name}, which is not among the targets to run "
                    f"({', '.join(flags)}); add it to --targets."
                )
            flags[target.name] = f"{flags[target.name]} {text}".strip()
    return flags


def plan(
    names: Iterable[str],
    extra_args: Iterable[str],
    device: torch.device,
    environ: Mapping[str, str],
    *,
    sweep: Sweep | None = None,
    inputs: Iterable[str] = (),
    against: str | None = None,
) -> list[Plan]:
    """Plan a run of targets, sides or chapters, and check everything before anything runs.

    `extra_args` are "TARGET=--flag value" strings. `sweep` names a knob, or a size of `inputs`; these are the arguments of
    functions (see `functions.read_argument`), and `against` is their baseline.
    """
    chosen: dict[str, Plan] = {}
    for name in names:
        for target, sides in read_name(name):
            if against and isinstance(target, functions.UserFunction):
                sides = SIDES
            before = chosen[target.name].sides if target.name in chosen else ()
            chosen[target.name] = Plan(target, tuple(side for side in SIDES if side in (*before, *sides)), ())
    if not chosen:
        raise BenchError(
            "no target was given; name one with --targets, such as "
            f"{next(iter(TARGETS))} (`labs bench list-targets` lists them)."
        )
    flags, given = _read_flags(extra_args, chosen), {"inputs": tuple(inputs), "against": against}
    if any(given.values()) and not any(isinstance(one.target, functions.UserFunction) for one in chosen.values()):
        raise BenchError("--input and --against are for a function of yours: name it as module:function.")
    if sweep and any(given.values()) and not any(re.search(rf"\b{sweep.name}\b", text) for text in inputs):
        raise BenchError(f"--sweep is of {sweep.name}, and no --input has it: 'x=randn({sweep.name}, 4096)' has.")
    plans = []
    for name, one in chosen.items():
        cases: list[Case] = []
        for swept in [{sweep.name: value} for value in sweep.values] if sweep else [{}]:
            if isinstance(one.target, functions.UserFunction):
                settings = {key: Setting(value, "flag") for key, value in (given | swept).items()}
            else:
                words = [flags[name], *(f"--{key.replace('_', '-')} {value}" for key, value in swept.items())]
                settings = settle(one.target.knobs, " ".join(words), name, device.type, environ)
            cases += [replace(case, swept=swept) for case in one.target.cases(settings, device)]
        plans.append(replace(one, cases=tuple(cases)))
    return plans


def describe_targets(chapter: str | None = None) -> list[dict]:
    """Describe each target, or each target of one chapter: sides, flags, and whether its default cases run on this machine."""
    if chapter is not None:
        check_choice("the chapter", chapter, dict.fromkeys(target.chapter for target in TARGETS.values()))
    device = default_device()
    rows = []
    for target in (target for target in TARGETS.values() if chapter in (None, target.chapter)):
        cases = target.cases(settle(target.knobs, "", target.name, device.type, {}), device)
        answers = [target.support(case, "optimized") and target.support(case, "baseline") for case in cases]
        support = next(filter(None, answers), answers[-1])  # if none runs, the last case's reason
        rows.append(
            {
                "target": target.name,
                "chapter": target.chapter,
                "summary": target.summary,
                "sides": {side: target.side_name(side) for side in SIDES},
                **target.sides,
                "runs": support.ok,
                "reason": support.reason,
                "remedy": support.remedy,
                "cases": [case.label for case in cases],
                "knobs": [knob.describe(device.type) for knob in target.knobs],
            }
        )
    return rows
