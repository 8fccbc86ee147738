"""The state of torch in which a student's function is called: that of the checker, without what a caller left on."""

from __future__ import annotations

import contextlib
import sys

import torch


def set_conditions(stack: contextlib.ExitStack, conditions: dict) -> None:
    """Set the grad mode and the filling of uninitialised memory as the checker has them."""
    stack.enter_context(torch.set_grad_enabled(conditions["grad"]))
    if conditions["inference"]:
        stack.enter_context(torch.inference_mode())
    if conditions["fill"]:
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        stack.callback(torch.use_deterministic_algorithms, before[0], warn_only=before[1])


@contextlib.contextmanager
def no_modes():
    """Leave all of torch's modes for the time of a `with` block, those for operators and those for functions."""
    taken = []
    with torch.utils._python_dispatch._disable_current_modes():
        while torch._C._len_torch_function_stack():
            taken.append(torch._C._pop_torch_function_stack())
        try:
            yield
        finally:
            while taken:
                torch._C._push_on_torch_function_stack(taken.pop())


@contextlib.contextmanager
def uncompiled_flex():
    """Have eager FlexAttention call masks and score modifiers for the time of a `with` block.

    Otherwise it compiles them, and proxies of the checker's functions have nothing to compile.
    """
    module = sys.modules.get("torch.nn.attention.flex_attention")
    name = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    if module is None or not hasattr(module, name):
        yield
        return
    before = getattr(module, name)
    setattr(module, name, True)
    try:
        yield
    finally:
        setattr(module, name, before)


def reads_by_tensor() -> bool:
    """True where FlexAttention calls a mask: there `x[i]` reads a tensor with a tensor for an index."""
    depth = torch._C._len_torch_function_stack()
    modes = [torch._C._get_function_stack_at(i) for i in range(depth)]
    return any(type(mode).__name__ == "TransformGetItemToIndex" for mode in modes)
