"""What a warm process does before its first fork: import the libraries, and run the lab's setup."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

from instructor.grading.submission.library import ANSWERS
from instructor.grading.submission.outputs import Outputs
from instructor.grading.submission.results import WarmUp

PRELOADED = (  # modules that labs and checks import
    *("matplotlib.pyplot", "matplotlib_inline.backend_inline", "pandas", "transformers", "linecache"),
    *("torch.profiler", "torch.utils.flop_counter", "torch.nn.attention", "importlib.util"),
    *("utils.model", "transformers.models.gemma3.modeling_gemma3"),
)
# With a GPU a lab's setup runs in each fork and not here, and a process for a file of kernels runs none: it has these.
FOR_KERNELS = ("utils.checking.kernel_exercises", "utils.gluon_cpu.compiling")


@dataclass
class Warm:
    """What every fork of the warm process inherits."""

    options: WarmUp
    shell: Any  # an IPython shell
    base: dict | None = None  # the names that the setup gave; None where each process runs the setup itself

    def names(self) -> dict:
        """The names that the cells before the first answer give; `RuntimeError` if one of the cells fails."""
        if self.base is not None:
            return self.base
        for name, source in self.options.setup:
            result = self.shell.run_cell(source, store_history=False)
            if not result.success:
                error = result.error_before_exec or result.error_in_exec
                raise RuntimeError(f"the setup cell {name} failed: {error!r}")
        return dict(self.shell.user_ns)


def make_shell():
    """Make an IPython shell in this process: cells run as in Jupyter, and no kernel has to start."""
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell.instance(config=config)

    class Publisher(DisplayPublisher):
        def publish(self, data, metadata=None, **rest):
            shell.outputs.display(data, metadata)

        def clear_output(self, wait=False):
            pass

    class Hook(DisplayHook):
        def __call__(self, result=None):
            if result is not None:
                data, metadata = self.compute_format_data(result)
                shell.outputs.display(data, metadata, count=1)
                self.update_user_ns(result)  # `_` in the next cell

        def flush(self):
            pass

    def show_error(kind, value, lines):
        shell.outputs.error(getattr(kind, "__name__", str(kind)), str(value), list(lines))

    shell.outputs = Outputs()
    shell.system = shell.system_raw  # for `!nvidia-smi`; the usual way needs a terminal, which the walls leave out
    shell.display_pub = Publisher(parent=shell)
    shell.displayhook = Hook(parent=shell, shell=shell)
    shell.displayhook.do_full_cache = False  # the last results alone, and not all of them, as in `Out`
    shell.display_trap.hook = shell.displayhook
    shell._showtraceback = show_error
    return shell


def warm_up(options: WarmUp) -> Warm:
    """Import what labs need and run the cells before the first answer; returns what forks inherit.

    The setup of a lab asks for the GPU, and a process that has started CUDA cannot be forked with it. So with GPUs
    every process runs the setup for itself.
    """
    os.environ.setdefault("MPLBACKEND", "Agg")
    # Answers of the course, too: what is loaded can be disabled.
    for name in (*PRELOADED, *(FOR_KERNELS if options.limits.gpu else ()), *ANSWERS.get(options.lab, ())):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    warm = Warm(options, make_shell())
    if not options.limits.gpu:
        warm.base = warm.names()
    for name in FOR_KERNELS:  # what a fork would do again for each file of kernels: a third of a second
        if name in sys.modules:
            sys.modules[name].warm_up()
    sys.stdout.flush()
    # Native threads (torch's autograd keeps one) are idle here and hold no lock; Python's could.
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        raise RuntimeError(
            f"threads run after the setup ({', '.join(threads)}): such a process cannot be forked safely"
        )
    return warm
