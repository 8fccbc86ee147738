"""FlexAttention's BlockMasks between two processes: each travels as its tables, its sizes and its mask function."""

from __future__ import annotations

import importlib
import inspect
import sys

import torch

from instructor.grading.wire.channel import WireError


def block_mask_fields(value: object) -> dict | None:
    """The arguments that a BlockMask was made of; None for anything else."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    if module is None or type(value) is not module.BlockMask:
        return None
    names = inspect.signature(module.BlockMask.__init__).parameters
    return {name: getattr(value, name) for name in names if name != "self"}


def rebuild_block_mask(fields: dict) -> object:
    """Make a BlockMask of its fields; `WireError` if they make none."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    expected = set(inspect.signature(module.BlockMask.__init__).parameters) - {"self"}
    sizes = [fields.get(name) for name in ("seq_lengths", "BLOCK_SIZE")]
    if set(fields) != expected or not callable(fields["mask_mod"]):
        raise WireError("a BlockMask with other parts than it has")
    if any(type(s) is not tuple or len(s) != 2 or any(type(n) is not int or n < 0 for n in s) for s in sizes):
        raise WireError("a BlockMask without sizes")
    tables = {k: v for k, v in fields.items() if k not in ("seq_lengths", "BLOCK_SIZE", "mask_mod", "dq_kv_order_spt")}
    if any(v is not None and type(v) is not torch.Tensor for v in tables.values()):
        raise WireError("a BlockMask whose tables are no tensors")
    try:
        return module.BlockMask(**fields)
    except Exception as error:
        raise WireError(f"a BlockMask that torch does not take: {error}") from None
