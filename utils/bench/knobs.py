"""The knobs of a target: their flags, their values, and where each value came from.

A knob's value comes from its flag in `--target-extra-arg 'TARGET=--flag value'`, or else from its environment variable
if it has one, or else from the target's default for this device.
"""

from __future__ import annotations

import argparse
import functools
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise BenchError(f"the flags of {self.prog}: {message}; list-targets --flags shows them.")


def parse_flags(knobs: Sequence[Knob], text: str, target: str) -> dict[str, Any]:
    """Parse `--flag value --flag=value --switch --no-switch` into values by knob key."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BenchError(f"the arguments {text!r} of {target} cannot be split: {error}.") from None
    parser = _Parser(prog=target, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for knob in knobs:
        flag = f"--{knob.name}"
        if knob.is_switch:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(flag, type=functools.partial(knob.parse, source=f"{flag} of {target}"))
    values, unknown = parser.parse_known_args(words)
    if unknown:
        raise BenchError(
            f"{target} has no flag {unknown[0]!r}.{nearest(unknown[0], [f'--{knob.name}' for knob in knobs])}"
        )
    given = [word.partition("=")[0].replace("--no-", "--") for word in words if word.startswith("--")]
    if twice := {flag for flag in given if given.count(flag) > 1}:  # argparse would take the last one
        raise BenchError(f"{', '.join(sorted(twice))} is given twice for {target}; give it once.")
    return vars(values)


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
