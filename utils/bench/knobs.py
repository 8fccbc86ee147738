"""Knobs of a target: their flags, their values, and where each value in force came from.

A knob's value comes from its flag in `--target-extra-arg 'TARGET=--flag value'`, else from its environment variable if
the target reads one, else from the target's default for this device.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from utils.bench.errors import BenchError, did_you_mean, nearest


@dataclass(frozen=True)
class Knob:
    """One setting of a target, given as `--name value` (a switch: `--name` or `--no-name`)."""

    name: str  # "block-size"
    help: str
    cpu: Any  # default on a CPU
    gpu: Any  # default on a GPU
    choices: tuple[str, ...] = ()  # words; empty for a whole number or a switch
    least: int = 1
    env: str | None = None  # environment variable read at run time
    many: bool = False  # several choices, separated by commas

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return isinstance(self.cpu, bool)

    def default(self, device_type: str) -> Any:
        return self.cpu if device_type == "cpu" else self.gpu

    def parse(self, text: str, source: str) -> Any:
        """The value that `text` stands for; an error names the flag or variable it came from."""
        if self.choices:
            words = [word.strip() for word in text.split(",")] if self.many else [text.strip()]
            for word in words:
                if word not in self.choices:
                    raise BenchError(
                        f"{source} is {word!r}; it must be one of {', '.join(self.choices)}."
                        + did_you_mean(word, self.choices)
                    )
            return tuple(dict.fromkeys(words)) if self.many else words[0]
        try:
            value = int(text)
        except ValueError:
            raise BenchError(f"{source} is {text!r}; it must be a whole number, {self.least} or more.") from None
        if value < self.least:
            raise BenchError(f"{source} is {value}; it must be {self.least} or more.")
        return value


@dataclass(frozen=True)
class Setting:
    """A knob's value in force and its origin: "default", "flag" or "environment VARIABLE"."""

    value: Any
    origin: str


def parse_flags(knobs: Sequence[Knob], text: str, target: str) -> dict[str, Any]:
    """Values by key out of `--flag value --flag=value --switch --no-switch`."""
    by_flag = {f"--{knob.name}": knob for knob in knobs}
    by_flag |= {f"--no-{knob.name}": knob for knob in knobs if knob.is_switch}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BenchError(f"the arguments {text!r} of {target} cannot be split: {error}.") from None
    values: dict[str, Any] = {}
    left = iter(words)
    for word in left:
        flag, equals, attached = word.partition("=")
        knob = by_flag.get(flag)
        if knob is None:
            what = "unknown flag" if flag.startswith("-") else "expected a flag and found"
            raise BenchError(f"{what} {flag!r} for {target}.{nearest(flag, sorted(by_flag))}")
        if knob.key in values:
            raise BenchError(f"--{knob.name} is given twice for {target}; give it once.")
        if knob.is_switch:
            if equals:
                raise BenchError(f"--{knob.name} is a switch without a value; write --{knob.name} or --no-{knob.name}.")
            values[knob.key] = not flag.startswith("--no-")
            continue
        value = attached if equals else next(left, None)
        if value is None or (not equals and value.startswith("--")):
            raise BenchError(
                f"{flag} of {target} needs a value"
                + (f", one of {', '.join(knob.choices)}." if knob.choices else ", a whole number.")
            )
        values[knob.key] = knob.parse(value, f"{flag} of {target}")
    return values


def settle(
    knobs: Sequence[Knob], given: Mapping[str, Any], device_type: str, environ: Mapping[str, str]
) -> dict[str, Setting]:
    """Every knob's value in force: flag before environment variable before default."""
    settings = {}
    for knob in knobs:
        if knob.key in given:
            settings[knob.key] = Setting(given[knob.key], "flag")
        elif knob.env and environ.get(knob.env, "") != "":
            value = knob.parse(environ[knob.env], f"the environment variable {knob.env}")
            settings[knob.key] = Setting(value, f"environment {knob.env}")
        else:
            settings[knob.key] = Setting(knob.default(device_type), "default")
    return settings


def split_extra_args(extra: Iterable[str]) -> dict[str, str]:
    """{target: flags} out of `TARGET=--flag value` strings; several for one target are joined."""
    found: dict[str, str] = {}
    for text in extra:
        target, equals, flags = text.partition("=")
        target, flags = target.strip(), flags.strip()
        if not equals or not target or not flags:
            raise BenchError(
                f"--target-extra-arg is {text!r}; write it as 'TARGET=--flag value', such as "
                "'labs/cudnn_sdpa_bench:flash_sdp=--backend cudnn'."
            )
        if len(flags) > 1 and flags[0] == flags[-1] and flags[0] in "\"'":
            flags = flags[1:-1]  # quotes that the shell left in place
        found[target] = f"{found[target]} {flags}" if target in found else flags
    return found
