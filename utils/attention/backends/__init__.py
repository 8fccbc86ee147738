"""The backends of attention, one file a library, in the order of the course: from the plainest to the fastest.

To add a backend: write a file here whose `BACKENDS` holds a `Backend` (see `problem.py`) for each name, and name it in
`MODULES`. A kernel that knows `causal` and `window` only is `run(q, k, v, problem)` behind `refuse_functions` and
`bind_plain`; one that also takes mask functions writes `refuses` and `bind` itself. Import the library inside of the
functions: importing this package must import neither Triton nor flash-attn. If `backend="auto"` should try it, give it
a place in `choosing.PLAIN_ORDER` or `choosing.FUNCTION_ORDER`. `tests/utils/attention` then compares it with the
float64 reference.
"""

from __future__ import annotations

import functools
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
    """Return the backend of that name; a ValueError lists the names."""
    if not isinstance(name, str) or name not in MODULES:
        raise ValueError(f"There is no attention backend {name!r}; choose one of {', '.join(BACKENDS)}, or auto.")
    return _load_backend(name)


@functools.cache
def _load_backend(name: str) -> Backend:
    return importlib.import_module(f"{__name__}.{MODULES[name]}").BACKENDS[name]


def able_backends(problem: Problem, options: Options = NO_OPTIONS) -> tuple[str, ...]:
    """Return the names of the backends that can do this problem on this machine."""
    return tuple(name for name in BACKENDS if find_backend(name).support(problem, options))
