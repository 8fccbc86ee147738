"""Run a call outside of torch.compile's graphs, for callers inside of them.

This is a separate file because `torch.compiler.disable` imports Triton, and the first import fixes Triton's mode
(TRITON_INTERPRET). The file is imported only under torch.compile, which has imported Triton already.
"""

from collections.abc import Callable

import torch


@torch.compiler.disable
def call_outside_of_graphs(function: Callable, *arguments, **options):
    """Return function(*arguments, **options); torch.compile ends its graph before the call and begins a new graph after it."""
    return function(*arguments, **options)
