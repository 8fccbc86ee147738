"""The backends of attention, one file a library, in the order of the course: from the plainest to the fastest.

docs/contributing.md has the steps to add a backend. Import the library inside of the functions: importing this package must
import neither Triton nor flash-attn.
"""

from __future__ import annotations

import importlib

from utils.attention.problem import NO_OPTIONS, Backend, Options, Problem

MODULES = {
    "naive": "plain",
    "naive_compiled": "plain",
    "math": "sdpa",
    "flash": "sdpa",
    "efficient": "sdpa",
    "cudnn": "sdpa",
    "sdpa": "sdpa",
    "varlen": "flash_attn",
    "flash_attn": "flash_attn",
    "fa3": "fa3",
    "cute": "flash_attn",
    "flex_eager": "flex",
    "flex": "flex",
    "flex_flash": "flex",
    "triton": "triton",
    "gluon": "gluon",
}
BACKENDS = tuple(MODULES)


def find_backend(name: str) -> Backend:
    """Return the backend of this name; for a wrong name a ValueError lists all names."""
    if not isinstance(name, str) or name not in MODULES:
        raise ValueError(f"There is no attention backend {name!r}; choose one of {', '.join(BACKENDS)}, or auto.")
    return importlib.import_module(f"{__name__}.{MODULES[name]}").BACKENDS[name]


def able_backends(problem: Problem, options: Options = NO_OPTIONS) -> tuple[str, ...]:
    """Return the names of the backends that can do this problem on this machine."""
    return tuple(name for name in BACKENDS if find_backend(name).support(problem, options))
