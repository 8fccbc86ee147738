"""For callers inside of torch.compile: a call that runs outside of their graphs, as it does elsewhere.

A file of its own, because `torch.compiler.disable` imports Triton, whose mode (TRITON_INTERPRET) is settled at its first
import. This file is imported only under torch.compile, which has imported Triton already.
"""

from collections.abc import Callable

import torch


@torch.compiler.disable
def call_outside_of_graphs(function: Callable, *arguments, **options):
    """Return function(*arguments, **options); torch.compile ends its graph before the call and begins another after it."""
    return function(*arguments, **options)
