"""The state of torch in which a student's function is called: that of the checker, without what a caller left on."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

from utils.checking import poisoned_memory


def set_conditions(stack: contextlib.ExitStack, conditions: dict) -> None:
    """Set the grad mode and the filling of uninitialised memory as the checker has them."""
    stack.enter_context(torch.set_grad_enabled(conditions["grad"]))
    if conditions["fill"]:
        stack.enter_context(poisoned_memory())
    if (wanted := conditions["sdpa"]) != (now := sdpa_switches()):
        stack.callback(set_sdpa_switches, now)
        set_sdpa_switches(wanted)


_SDPA = ("flash", "mem_efficient", "math", "cudnn")


def sdpa_switches() -> list:
    """Which backends of SDPA torch may use, and the order in which it asks them."""
    flags = [bool(getattr(torch.backends.cuda, f"{name}_sdp_enabled")()) for name in _SDPA]
    return [flags, [int(n) for n in torch._C._get_sdp_priority_order()]]


def set_sdpa_switches(switches: list) -> None:
    """Undo changes since `sdpa_switches`."""
    flags, order = switches
    for name, allowed in zip(_SDPA, flags, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(allowed)
    torch._C._set_sdp_priority_order(order)


def expect_sdpa_switches(switches: Any) -> list:
    """Return switches that came from another process; `ValueError` if they are not well formed."""
    plain = type(switches) is list and len(switches) == 2 and all(type(part) is list for part in switches)
    if not plain or [type(flag) for flag in switches[0]] != [bool] * len(_SDPA):
        raise ValueError("no switches of SDPA's backends")
    if sorted(switches[1]) != sorted(torch._C._get_sdp_priority_order()):
        raise ValueError("no order of SDPA's backends")
    return switches


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
