"""The knobs of a target: their flags, their values, and where each value came from.

A knob's value comes from its flag in `--target-extra-arg 'TARGET=--flag value'`, or else from its environment variable
if it has one, or else from the target's default for this device.

The flags are parsed here because click would silently take the last of two equal flags and would read the second flag
of `--block-size --causal` as a value. (Newer versions of typer do not bring click either.)
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from utils.bench.errors import BenchError, check_choice, check_choices, nearest
from utils.validation import whole_number


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
        """The knob's name in settings and results: "block_size"."""
        return self.name.replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether the knob is on or off, without a value."""
        return isinstance(self.cpu, bool)

    @property
    def allowed(self) -> str:
        """The allowed values in words, for `list-targets`."""
        if self.is_switch:
            return f"--{self.name}, --no-{self.name}"
        values = ", ".join(self.choices) if self.choices else f"whole number >= {self.least}"
        return f"{values}; or {self.env}" if self.env else values

    def default(self, device_type: str) -> Any:
        """Return the default value on a "cpu" or a "cuda" device."""
        return self.cpu if device_type == "cpu" else self.gpu

    def parse(self, text: str, source: str) -> Any:
        """Convert `text` to a value; an error names `source`, the flag or variable that the text came from."""
        if self.choices:
            check = check_choices if self.many else check_choice
            return check(source, text.strip(), self.choices)
        try:
            value: object = int(text)
        except ValueError:
            value = text
        return whole_number(source, value, self.least, BenchError)


@dataclass(frozen=True)
class Setting:
    """A knob's value in force and its origin: "default", "flag" or "environment VARIABLE"."""

    value: Any
    origin: str


def parse_flags(knobs: Sequence[Knob], text: str, target: str) -> dict[str, Any]:
    """Parse `--flag value --flag=value --switch --no-switch` into values by knob key."""
    by_flag = {f"--{knob.name}": knob for knob in knobs}
    by_flag |= {f"--no-{knob.name}": knob for knob in knobs if knob.is_switch}
    try:
        words = iter(shlex.split(text))
    except ValueError as error:
        raise BenchError(f"the arguments {text!r} of {target} cannot be split: {error}.") from None
    values: dict[str, Any] = {}
    for word in words:
        flag, equals, attached = word.partition("=")
        knob = by_flag.get(flag)
        if knob is None:
            problem = "unknown flag" if flag.startswith("-") else "expected a flag and found"
            raise BenchError(f"{problem} {flag!r} for {target}.{nearest(flag, sorted(by_flag))}")
        if knob.key in values:
            raise BenchError(f"--{knob.name} is given twice for {target}; give it once.")
        if knob.is_switch:
            if equals:
                raise BenchError(f"--{knob.name} is a switch without a value; write --{knob.name} or --no-{knob.name}.")
            values[knob.key] = not flag.startswith("--no-")
            continue
        value = attached if equals else next(words, None)
        if value is None or (not equals and value.startswith("--")):
            kind = f"one of {', '.join(knob.choices)}" if knob.choices else "a whole number"
            raise BenchError(f"{flag} of {target} needs a value, {kind}.")
        values[knob.key] = knob.parse(value, f"{flag} of {target}")
    return values


def settle(
    knobs: Sequence[Knob], flags: Mapping[str, Any], device_type: str, environ: Mapping[str, str]
) -> dict[str, Setting]:
    """Return every knob's value in force: the flag's, or else the environment variable's, or else the default."""
    settings = {}
    for knob in knobs:
        if knob.key in flags:
            settings[knob.key] = Setting(flags[knob.key], "flag")
        elif knob.env and environ.get(knob.env, "") != "":
            value = knob.parse(environ[knob.env], f"the environment variable {knob.env}")
            settings[knob.key] = Setting(value, f"environment {knob.env}")
        else:
            settings[knob.key] = Setting(knob.default(device_type), "default")
    return settings


def split_extra_args(extra_args: Iterable[str]) -> dict[str, str]:
    """Split `TARGET=--flag value` strings into {target: flags}; several strings for one target are joined."""
    by_target: dict[str, str] = {}
    for text in extra_args:
        target, equals, flags = text.partition("=")
        target, flags = target.strip(), flags.strip()
        if not equals or not target or not flags:
            raise BenchError(
                f"--target-extra-arg is {text!r}; write it as 'TARGET=--flag value', such as "
                "'labs/cudnn_sdpa_bench:flash_sdp=--backend cudnn'."
            )
        if len(flags) > 1 and flags[0] == flags[-1] and flags[0] in "\"'":
            flags = flags[1:-1]  # quotes that the shell left in place
        by_target[target] = f"{by_target[target]} {flags}" if target in by_target else flags
    return by_target
