"""The options of a run, and their checks."""

from __future__ import annotations

import datetime
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from utils.bench.errors import BenchError, check_choice
from utils.bench.profiles import LEVELS
from utils.benchmark.sampling import Timing

# How the samples are taken: options of `Timing` that a run decides. A target's protocol fills in what is None.
TIMING: dict[str, Any] = {
    "l2": "warm",
    "graph": False,
    "warmup": None,
    "iterations": None,
    "target_interval": None,
    "max_seconds": None,
    "discard": (),
}


def new_run_id() -> str:
    """Name a run by date and time, with four random digits for runs that begin in the same second."""
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


@dataclass
class Options:
    """How a plan is run: what is profiled, how samples are taken (see TIMING), and where results go."""

    profile: str = "none"
    timing: dict[str, Any] = field(default_factory=dict)
    run_id: str = field(default_factory=new_run_id)
    artifacts_dir: Path = Path("artifacts")
    profiles_dir: Path = Path("benchmark_profiles")
    command: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.timing = TIMING | self.timing

    @property
    def folder(self) -> Path:
        """The folder of the run's files."""
        return self.artifacts_dir / self.run_id

    def check(self, device_type: str = "cuda") -> None:
        """Raise BenchError for options that are wrong, or impossible on this kind of device."""
        check_choice("--profile", self.profile, LEVELS)
        check_choice("--l2", self.timing["l2"], ("warm", "cold"))
        try:
            Timing(torch.device(device_type), **{name: one for name, one in self.timing.items() if one is not None})
        except ValueError as error:  # it begins with the option's name
            raise BenchError(f"--{str(error).replace('_', '-', 1)}") from None
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.run_id):
            raise BenchError(f"--run-id is {self.run_id!r}; it names a folder: letters, digits, dot, dash, underscore.")
        if self.folder.exists():
            raise BenchError(f"{self.folder} exists and results are never overwritten; choose another --run-id.")
