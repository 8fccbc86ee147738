"""The options of a run, and their checks."""

from __future__ import annotations

import datetime
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import torch

from utils.bench.errors import BenchError, check_choice
from utils.bench.profiles import LEVELS
from utils.benchmark.sampling import Timing

TIMING = ("l2", "graph", "warmup", "iterations", "target_interval", "max_seconds", "discard")


def new_run_id() -> str:
    """Name a run by date and time, with four random digits for runs that begin in the same second."""
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


@dataclass
class Options:
    """How a plan is run; None leaves warm-up and iterations to each target's protocol."""

    profile: str = "none"
    iterations: int | None = None
    warmup: int | None = None
    l2: str = "warm"  # "cold": the cache is flushed before every sample
    graph: bool = False  # time CUDA graph replays
    target_interval: float | None = None  # sample until the interval is within plus or minus this share
    max_seconds: float | None = None  # time budget of each case's timing
    discard: tuple[str, ...] = ()  # samples to leave out: "outliers", "throttled"
    run_id: str = field(default_factory=new_run_id)
    artifacts_dir: Path = Path("artifacts")
    profiles_dir: Path = Path("benchmark_profiles")
    command: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The folder of the run's files."""
        return self.artifacts_dir / self.run_id

    @property
    def timing(self) -> dict:
        """How this run times, as the results record it; None where each target decides."""
        return {name: getattr(self, name) for name in TIMING}

    def check(self, device_type: str = "cuda") -> None:
        """Raise BenchError for options that are wrong, or impossible on this kind of device."""
        check_choice("--profile", self.profile, LEVELS)
        check_choice("--l2", self.l2, ("warm", "cold"))
        try:
            Timing(torch.device(device_type), **{name: one for name, one in self.timing.items() if one is not None})
        except ValueError as error:  # it begins with the option's name
            raise BenchError(f"--{str(error).replace('_', '-', 1)}") from None
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.run_id):
            raise BenchError(f"--run-id is {self.run_id!r}; it names a folder: letters, digits, dot, dash, underscore.")
        if self.folder.exists():
            raise BenchError(f"{self.folder} exists and results are never overwritten; choose another --run-id.")
