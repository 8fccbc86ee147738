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


class BlockMasks:
    """The BlockMasks that have crossed, on one side.

    A mask that comes back is the same object as before, so `is` holds on both sides.
    """

    def __init__(self) -> None:
        self.own: dict[int, object] = {}  # made on this side
        self.theirs: dict[int, object] = {}  # made on the other side

    def name_mask(self, value: object) -> list:
        """[whose, number] of a mask, as the other side sees it."""
        for whose, masks in (("theirs", self.own), ("own", self.theirs)):
            for number, mask in masks.items():
                if mask is value:
                    return [whose, number]
        self.own[len(self.own)] = value
        return ["theirs", len(self.own) - 1]

    def rebuild(self, whose: str, number: int, fields: dict) -> object:
        """The mask of that name on this side, with these fields."""
        masks = {"own": self.own, "theirs": self.theirs}[whose]
        if whose == "own" and number not in masks:
            raise WireError("a BlockMask that was never sent")
        masks[number] = rebuild_block_mask(fields, masks.get(number))
        return masks[number]


def rebuild_block_mask(fields: dict, into: object | None = None) -> object:
    """Make a BlockMask of its fields, or give these to the existing one `into`; `WireError` if they make none."""
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
        made = module.BlockMask(**fields)
    except Exception as error:
        raise WireError(f"a BlockMask that torch does not take: {error}") from None
    if into is None:
        return made
    vars(into).update(vars(made))
    return into
