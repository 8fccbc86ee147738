"""Prepare measurements in several processes side by side, then time them one after another, alone on the GPU.

Most of the time of a record is spent on compiling kernels, on loading them and on reference results. Processes that share
a folder do that in parallel; the timing begins when all are ready, and then one process at a time has the GPU.

    turns = Turns(folder, parts=15, seconds=50)
    ... prepare while turns.time_left() ...
    turns.wait_for_all(part)
    with turns.alone():
        ... time one row ...
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path


class Turns:
    """The turns of `parts` processes that share a folder, which is empty at first.

    Args:
        folder: shared by the processes.
        parts: number of processes.
        seconds: time to prepare, counted from here; a process that starts nothing new after it is ready soon.
        patience: seconds that the others wait for one that is not ready in time.
    """

    def __init__(self, folder: Path, parts: int, seconds: float, patience: float = 20) -> None:
        self.folder, self.parts = folder, parts
        self.deadline, self.patience = time.monotonic() + seconds, patience
        folder.mkdir(parents=True, exist_ok=True)

    def time_left(self) -> bool:
        """Whether there is time to prepare one more row."""
        return time.monotonic() < self.deadline

    def wait_for_all(self, name: str) -> bool:
        """Say that this process is ready, and wait for the others; False if one of them was not ready in time."""
        (self.folder / f"ready-{name}").touch()
        while len(list(self.folder.glob("ready-*"))) < self.parts:
            if time.monotonic() > self.deadline + self.patience:
                return False
            time.sleep(0.05)
        return True

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the GPU while no other of these processes does."""
        with (self.folder / "gpu.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield  # closing the file ends the lock, also where this process dies


def run_parts(commands: list[list[str]], end: float) -> None:
    """Run commands side by side, and stop those that still run at `end`, by the monotonic clock."""
    processes = [subprocess.Popen(command) for command in commands]
    for process in processes:
        try:
            process.wait(None if math.isinf(end) else max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
