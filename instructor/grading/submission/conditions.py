"""A call of a student's function: torch's state is the checker's, and the check's modes, whose data travel to and fro, see what runs."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from instructor.grading.wire.channel import WireError
from utils.checking import poisoned_memory
from utils.checking.watching import OperationWatch

MAX_SEEN = 20_000_000  # characters of what a mode may have seen in one call: 200,000 operators and their shapes


class _Nothing(TorchDispatchMode):
    """A mode without data of its own."""


_OF_TORCH = vars(_Nothing()).keys()

# ---- the state of torch ---------------------------------------------------------------------------------------------


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


def uncompiled_flex() -> contextlib.AbstractContextManager:
    """Have eager FlexAttention call masks and score modifiers for the time of a `with` block.

    Otherwise it compiles them, and proxies of the checker's functions have nothing to compile.
    """
    module, name = sys.modules.get("torch.nn.attention.flex_attention"), "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    return mock.patch.object(module, name, True) if hasattr(module, name) else contextlib.nullcontext()


# ---- what ran: in the student's process ------------------------------------------------------------------------


def _attributes(mode: object) -> dict:
    """What a mode has seen: its public attributes, all of them data."""
    return {name: value for name, value in vars(mode).items() if name[0] != "_" and name not in _OF_TORCH}


def describe_mode(mode: object) -> str:
    """What a mode of the check has seen in the student's process, as JSON."""
    return json.dumps(_attributes(mode))


def watch_of(text: str) -> OperationWatch:
    """A watch that goes on from what a watch of the check has seen."""
    update_mode(watch := OperationWatch(), text)
    return watch


# ---- what ran: in the checker's process ------------------------------------------------------------------------------------


def without_private(mode: object) -> object:
    """A copy of a mode that has forgotten the objects of this process which it knows, such as tensors by their ids."""
    made = copy.copy(mode)
    for name, value in vars(made).items():
        if name[0] == "_" and isinstance(value, dict | list | set):
            vars(made)[name] = type(value)()
    return made


def update_mode(mode: object, text: str) -> None:
    """Give a mode of the check what it saw in the student's process, from where the text may be forged."""
    fields, known = json.loads(text), _attributes(mode)
    if {name: type(value) for name, value in fields.items()} != {name: type(value) for name, value in known.items()}:
        raise WireError("a mode with other attributes than it has")
    for name, value in fields.items():
        setattr(mode, name, list(_tuples(value)) if isinstance(value, list) else value)


def _tuples(value: list) -> tuple:
    """Lists as tuples: JSON does not tell them apart, and what a mode lists does not change."""
    return tuple([_tuples(item) if type(item) is list else item for item in value])
