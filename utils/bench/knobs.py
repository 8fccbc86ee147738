"""The knobs of a target: their flags, their values, and the origin of each value.

The value comes from the first of these that is set: the flag in `--target-extra-arg 'TARGET=--flag value'` or `--sweep`,
the knob's environment variable, and the target's default for this device.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from utils.bench.errors import BenchError, check_choice
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

    @property
    def key(self) -> str:
        """The knob's name in settings and results: "block_size"."""
        return self.name.replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether the knob takes no value and is only on or off."""
        return isinstance(self.cpu, bool)

    def describe(self, device_type: str) -> dict:
        """Return the knob's name, meaning, default on this kind of device and allowed values, for `list-targets`."""
        value = self.default(device_type)
        if self.is_switch:
            value, allowed = "on" if value else "off", f"--{self.name}, --no-{self.name}"
        else:
            allowed = ", ".join(self.choices) or f"whole number >= {self.least}"
        allowed += f"; or {self.env}" if self.env else ""
        default = "matrix" if value is None else str(value)
        return {"name": self.name, "help": self.help, "default": default, "allowed": allowed, "environment": self.env}

    def default(self, device_type: str) -> Any:
        """Return the default value on a "cpu" or a "cuda" device."""
        return self.cpu if device_type == "cpu" else self.gpu

    def parse(self, text: str, source: str) -> Any:
        """Convert `text` to a value; an error names `source`, the flag or variable that the text came from."""
        if self.choices:
            return check_choice(source, text.strip(), self.choices)
        return whole_number(source, int(text) if re.fullmatch(r"[+-]?\d+", text) else text, self.least, BenchError)


@dataclass(frozen=True)
class Setting:
    """The value of a knob and its origin: "default", "flag" or "environment VARIABLE"."""

    value: Any
    origin: str


def settle(
    knobs: Sequence[Knob], flags: str, target: str, device_type: str, environ: Mapping[str, str]
) -> dict[str, Setting]:
    """Return the setting of every knob: the flag, the environment variable or the default, in this order."""
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise BenchError(f"the arguments {flags!r} of {target} cannot be split: {error}.") from None
    given = [word.partition("=")[0].replace("--no-", "--") for word in words if word.startswith("--")]
    if twice := {flag for flag in given if given.count(flag) > 1}:  # click would take the last
        raise BenchError(f"{', '.join(sorted(twice))} is given twice for {target}; give it once.")
    from_environment = {
        knob.key: knob.parse(environ[knob.env], f"the environment variable {knob.env}")
        for knob in knobs
        if knob.env and environ.get(knob.env, "")
    }
    options: list[click.Parameter] = []
    for knob in knobs:
        flag, default = f"--{knob.name}", knob.default(device_type)
        words_of = [f"{flag}/--no-{knob.name}"] if knob.is_switch else [flag]
        options.append(click.Option(words_of, type=bool if knob.is_switch else click.UNPROCESSED, default=default))
    command = click.Command(target, params=options, add_help_option=False)
    try:
        context = command.make_context(target, words, default_map=from_environment)
    except click.UsageError as error:
        raise BenchError(f"{target}: {error.format_message()} `list-targets --flags` shows its flags.") from None
    settings = {}
    for knob in knobs:
        value, source = context.params[knob.key], context.get_parameter_source(knob.key)
        origin = "flag" if source == ParameterSource.COMMANDLINE else "default"
        origin = f"environment {knob.env}" if source == ParameterSource.DEFAULT_MAP else origin
        if origin == "flag" and not knob.is_switch:
            value = knob.parse(value, f"--{knob.name} of {target}")
        settings[knob.key] = Setting(value, origin)
    return settings


def split_extra_arg(text: str) -> tuple[str, str]:
    """Split `TARGET=--flag value` into the target and its flags."""
    target, flags = (part.strip() for part in text.partition("=")[::2])
    if not target or not flags:
        raise BenchError(
            f"--target-extra-arg is {text!r}; write it as 'TARGET=--flag value', such as "
            "'labs/cudnn_sdpa_bench:flash_sdp=--backend cudnn'."
        )
    if flags[0] == flags[-1] and flags[0] in "\"'":
        flags = flags[1:-1]  # the shell has not removed these quotes
    return target, flags


@dataclass(frozen=True)
class Sweep:
    """The values of a knob, or of a size of `--input`, for a series of cases."""

    name: str
    values: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Sweep:
        """Read "seq_len=1k:16k:x2" (values double), "m=256:1024:+256" (values grow by 256) or "backend=cudnn,flash"."""
        name, _, values = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        numbers = re.sub(r"\b(\d+)k\b", lambda found: str(1024 * int(found[1])), values.strip())
        listed = [word.strip() for word in numbers.split(",") if word.strip()]
        if steps := re.fullmatch(r"(\d+):(\d+):([x+])(\d+)", numbers):
            size, last, step = (int(steps[number]) for number in (1, 2, 4))
            growing = size > 0 and (step > 1 if steps[3] == "x" else step > 0)
            listed = []
            while growing and size <= last:
                listed.append(str(size))
                size = size * step if steps[3] == "x" else size + step
        if not name.isidentifier() or not listed or (":" in numbers and not steps):
            raise BenchError(
                f"--sweep is {text!r}; write NAME=FIRST:LAST:xFACTOR, NAME=FIRST:LAST:+STEP or NAME=A,B,C, such as "
                "seq_len=1k:16k:x2 (1k is 1024), with sizes that grow from a first one above 0."
            )
        return cls(name, tuple(listed))
