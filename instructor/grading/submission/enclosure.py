"""A student's process before the first line of a submission runs: its walls go up one after the other."""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import sys
import tempfile
from dataclasses import dataclass, field
from typing import NoReturn

from instructor.grading.sandbox import walls
from instructor.grading.submission import student
from instructor.grading.submission.library import hide
from instructor.grading.submission.warmup import Warm
from instructor.grading.wire.channel import Channel


@dataclass
class Enclosure:
    """A student's process while its walls go up, before the first line of a submission runs."""

    channel: Channel  # to the checker
    folder: str  # an empty one: its root is built there, or it works there if it cannot have one
    warm: Warm
    clean: bool = False  # for a file's text, in place of the notebook's cells: it has no use for the setup's names
    walls: dict[str, str] = field(default_factory=dict)  # wall -> what it stands by, or "none" and why
    own_root: bool = False
    user: int = field(default_factory=lambda: 61000 + os.getpid() % 4000)  # taken before it is number 1 of a namespace

    def run(self) -> NoReturn:
        """Raise the walls one after the other, tell the checker, and become the student's process."""
        try:
            try:
                self.raise_walls()
                if not self.clean:
                    self.warm.names()
            except BaseException as error:
                self.walls = {"all": f"none: {error!r}"}
            self.channel.send({"walls": self.walls})
            if "all" not in self.walls:
                self._become_student()
        finally:
            os._exit(1)

    def raise_walls(self) -> None:
        """Raise every wall, in the only order that works."""
        limits = self.warm.options.limits
        walls.die_with_parent()  # the kernel ends this process with the warden
        os.setsid()  # and no signal of the terminal's reaches it
        self._close_descriptors()
        self.own_root = walls.enter_namespaces(self.walls)
        self._build_root()  # makes mounts, which needs the privileges of the new mount namespace
        if self.walls.get("processes") == "namespace":  # it begins with the next child, whose end ends all in there
            if first := os.fork():
                self.channel.close()
                os.waitpid(first, 0)
                os._exit(0)
            walls.die_with_parent()
        if self.own_root:
            walls.finish_root()  # mounts /proc, which has to show the new processes and not the machine's
        walls.limit_resources(limits, self.walls)
        self._drop_privileges()  # after everything that needs them
        # As the user without privileges: the first process, which stays to collect those that end, may not outrank the student.
        if self.walls.get("processes") == "namespace" and (child := os.fork()):
            self.channel.close()
            _reap_until(child)
        self._settle()  # makes files, which belong to the new user
        walls.filter_calls(self.walls, limits.gpu)  # last: the steps above make calls that the filter refuses

    def _close_descriptors(self) -> None:
        """Keep nothing open that belongs to the warden."""
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in {self.channel.sock.fileno(), 0, 1, 2}:
                with contextlib.suppress(OSError):
                    os.close(int(name))

    def _build_root(self) -> None:
        """Enter a root folder that holds only what a submission may see; without one, work in a private folder."""
        if self.own_root:
            try:
                walls.build_root(self.folder, self.warm.options.limits, self.walls)
            except OSError as error:
                self.walls["files"] = f"none ({error})"
                self.own_root = False
        if not self.own_root:
            os.chdir(self.folder)
            os.chmod(self.folder, 0o700)
            if os.getuid() == 0:
                os.chown(self.folder, self.user, self.user)

    def _drop_privileges(self) -> None:
        """Become another user, without capabilities."""
        walls.drop_privileges(self.walls, self.user)
        walls.die_with_parent()  # a change of user clears it
        for library in (json.__file__, str(sys.modules["torch"].__file__)):
            if not os.access(library, os.R_OK):
                raise PermissionError(
                    f"submissions run as another user here, who may not read {library}: install Python and the "
                    "environment in folders that every user may read, such as below /opt"
                )

    def _settle(self) -> None:
        """Set the working folder, the environment and the three standard descriptors."""
        place = walls.SCRATCH if self.own_root else self.folder
        os.chdir(place)
        os.umask(0o077)
        os.environ.update(
            HOME=place,
            TMPDIR="/tmp" if self.own_root else place,
            USER="student",
            IPYTHONDIR=f"{place}/.ipython",
            MPLCONFIGDIR=f"{place}/.matplotlib",
            TRITON_HOME=place,
            TORCHINDUCTOR_CACHE_DIR=f"{place}/.inductor",
        )
        sys.path.insert(0, place)  # as in Jupyter: a cell may write a module, and another import it
        tempfile.tempdir = None
        null = os.open("/dev/null", os.O_RDONLY)
        output = os.open(f"{'/out' if self.own_root else place}/shown", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(output)
        self.walls["output"] = f"{self.warm.options.limits.output_mb} MB a cell kept at most"

    def _become_student(self) -> None:
        shell = self.warm.shell
        shell.starting_dir = os.getcwd()
        hide(self.warm.options.lab)
        linecache.clearcache()  # it names the grader's files
        for name in [n for n in sys.modules if n == "instructor" or n.startswith("instructor.")]:
            del sys.modules[name]
        student.Student(self.channel, shell).serve()


def _reap_until(child: int) -> NoReturn:
    """Collect processes that end, as the first one of a namespace has to, until `child` ends."""
    while True:
        try:
            if os.waitpid(-1, 0)[0] == child:
                os._exit(0)
        except ChildProcessError:
            os._exit(0)
        except InterruptedError:
            continue
