"""A call of a student's function: torch's state is the checker's, and the check's watches, whose data travel to and fro, see what runs."""

from __future__ import annotations

import contextlib
import json

import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

from instructor.grading.wire.channel import WireError
from utils.checking import poisoned_memory
from utils.checking.watching import OperationWatch

MAX_SEEN = 20_000_000  # characters of what a watch may have seen in one call: 200,000 operators and their shapes

# ---- the state of torch ---------------------------------------------------------------------------------------------


def set_conditions(stack: contextlib.ExitStack, conditions: dict) -> None:
    """Set the grad mode, the filling of uninitialised memory and SDPA's backends as the checker has them."""
    stack.enter_context(torch.set_grad_enabled(conditions["grad"]))
    if conditions["fill"]:
        stack.enter_context(poisoned_memory())
    stack.enter_context(sdpa_kernel([SDPBackend.__members__[name] for name in conditions["sdpa"]], set_priority=True))
    if conditions["flex"]:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        stack.enter_context(TransformGetItemToIndex())


def sdpa_backends() -> list[str]:
    """The backends of SDPA that torch may use, in the order in which it asks them."""
    return [backend.name for backend in _cur_sdpa_kernel_backends(with_priority=True)]


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


# ---- what ran ------------------------------------------------------------------------------------------------------


def describe_watch(watch: OperationWatch) -> str:
    """What a watch has seen until now, as JSON."""
    return json.dumps({name: getattr(watch, name) for name in OperationWatch.SEEN})


def watch_of(text: str) -> OperationWatch:
    """A watch that goes on from what a watch of the check has seen."""
    update_watch(watch := OperationWatch(), text)
    return watch


def update_watch(watch: OperationWatch, text: str) -> None:
    """Give a watch of the check what it saw in the student's process, from where the text may be forged."""
    fields = json.loads(text)
    known = {name: type(getattr(watch, name)) for name in OperationWatch.SEEN}
    if {name: type(value) for name, value in fields.items()} != known:
        raise WireError("a watch with other attributes than it has")
    for name, value in fields.items():
        setattr(watch, name, list(_tuples(value)) if isinstance(value, list) else value)


def _tuples(value: list) -> tuple:
    """Lists as tuples: JSON does not tell them apart, and what a watch lists does not change."""
    return tuple([_tuples(item) if type(item) is list else item for item in value])
