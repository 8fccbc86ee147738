"""What `labs bench list-targets` says of each target: its sides, its flags, and whether it runs here."""

from __future__ import annotations

from utils.bench.knobs import Knob, settle
from utils.bench.targets import SIDES, targets_of
from utils.machine.device import Support, default_device


def _shown(value) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return "matrix" if value is None else str(value)


def _allowed(knob: Knob) -> str:
    if knob.is_switch:
        return f"--{knob.name}, --no-{knob.name}"
    allowed = ", ".join(knob.choices) if knob.choices else f"whole number >= {knob.least}"
    return f"{allowed}; or {knob.env}" if knob.env else allowed


def describe_targets(chapter: str | None = None) -> list[dict]:
    """One row for each target; "runs" is told from its default cases on this machine's device."""
    device = default_device()
    rows = []
    for target in targets_of(chapter):
        cases = target.cases(settle(target.knobs, {}, device.type, {}), device)
        # A target runs here if one of its default cases does, with both sides.
        answers = [[target.support(case, side) for side in reversed(SIDES)] for case in cases]
        able = any(all(sides) for sides in answers)
        why = Support(True) if able else next(one for sides in answers[::-1] for one in sides if not one)
        rows.append(
            {
                "target": target.name,
                "chapter": target.chapter,
                "summary": target.summary,
                "sides": {side: target.side_name(side) for side in SIDES},
                **dict(target.sides),
                "runs": able,
                "reason": why.reason,
                "remedy": why.remedy,
                "cases": [case.label for case in cases],
                "knobs": [
                    {
                        "name": knob.name,
                        "help": knob.help,
                        "default": _shown(knob.default(device.type)),
                        "allowed": _allowed(knob),
                        "environment": knob.env,
                    }
                    for knob in target.knobs
                ],
            }
        )
    return rows
