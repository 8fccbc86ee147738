"""The work under a mask: pairs, blocks, and the ideal speed-up.

    s = sparsity(both(causal, documents(1024)), 8192, 8192)
    s.density, s.block_density, s.ideal_speedup
    s.full, s.partial, s.empty                      # blocks of 128 x 128

A block kernel computes whole blocks. `block_density` is its share of the dense work, and `density` the share that the
mathematics needs. The difference is the masked pairs of partial blocks: they are computed and thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch

from utils.attention.masks.blocks import Blocks, BlockSize, count_blocks
from utils.attention.masks.mask_mods import MaskMod, name_of


@dataclass(frozen=True)
class Sparsity:
    """The counts of one mask over (Sq, Sk), for one head of one sequence."""

    mask: str
    sq: int
    sk: int
    block_size: tuple[int, int]
    pairs: int  # query-key pairs that the mask lets through
    full: int  # blocks without a masked pair: the kernel evaluates no mask in them
    partial: int  # blocks with masked and visible pairs: the kernel computes them whole, then masks them
    empty: int  # blocks that are skipped
    blocks: Blocks | None = field(default=None, compare=False, repr=False)

    @property
    def total(self) -> int:
        """Number of all blocks."""
        return self.full + self.partial + self.empty

    @property
    def density(self) -> float:
        """Share of the pairs that the mask lets through."""
        return self.pairs / (self.sq * self.sk)

    @property
    def block_density(self) -> float:
        """Share of the blocks that must be computed."""
        return (self.full + self.partial) / self.total

    @property
    def ideal_speedup(self) -> float:
        """Speed-up over no mask if the time depends on the number of blocks only: 1 / block density."""
        return 1.0 / self.block_density if self.full + self.partial else float("inf")

    def to_dict(self) -> dict:
        """Return the counts and their shares, for a JSON file."""
        counts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "blocks"}
        shares = ("density", "block_density", "ideal_speedup")
        return counts | {name: getattr(self, name) for name in shares}

    def __str__(self) -> str:
        return (
            f"{self.mask} over {self.sq} x {self.sk}: {self.density:.1%} of the pairs, {self.block_density:.1%} of "
            f"the blocks of {self.block_size[0]} x {self.block_size[1]} ({self.full} full, {self.partial} partial, "
            f"{self.empty} empty), at best {self.ideal_speedup:.2f}x as fast as without a mask"
        )


def sparsity(
    mask_mod: MaskMod | None, sq: int, sk: int, block_size: BlockSize = 128, device: torch.device | str = "cpu"
) -> Sparsity:
    """Evaluate a mask on every pair, and count."""
    blocks = count_blocks(mask_mod, sq, sk, device, block_size)
    total, full, partial = blocks.counts.numel(), int(blocks.full.sum()), int(blocks.partial.sum())
    empty, pairs = total - full - partial, int(blocks.counts.sum(dtype=torch.int64))
    return Sparsity(name_of(mask_mod), sq, sk, blocks.block_size, pairs, full, partial, empty, blocks)
