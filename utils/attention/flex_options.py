"""Which path and which options are best for a mask: what `flex(..., path="auto")` takes.

The order and the tile were measured on an H200 (docs/flexattention.md). Two of the Triton kernel's options are claims
about the mask: they are made only after counting the mask's blocks has shown that they hold.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from utils.attention.kernel_masks import kernel_mask
from utils.attention.masks import MaskMod, block_sizes, count_blocks, name_of, row_chunks
from utils.attention.score_mods import ScoreMod
from utils.machine.device import compute_capability

# Triton's tile on Hopper in 16 bit, by head dimension: 64 x 64 with 4 warps leaves room for several tiles on an SM,
# so that one tile's start and end run under another's loop. Inductor's own choice, without claims, is 4 to 15% slower.
HOPPER_TILES = {
    64: {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
    128: {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
}


@dataclass(frozen=True)
class Choice:
    """A path with its options, and why."""

    path: str
    block_size: tuple[int, int]
    kernel_options: dict | None
    why: str


def pick(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask_mod: MaskMod | None = None,
    score_mod: ScoreMod | None = None,
    block_size: int | tuple[int, int] | None = None,
    without: tuple[str, ...] = (),
) -> Choice:
    """The best fused path for this mask on this machine, but none of `without`.

    A `block_size` that is given is kept, so that a path with a block mask is taken.
    """
    from utils.attention import flex_paths

    given = None if block_size is None else block_sizes(block_size)
    blocks = given or (128, 128)
    case = flex_paths.path_case(q, k, v, mask_mod, score_mod, blocks)

    def able(path: str) -> bool:
        return path not in without and bool(flex_paths.support(path, case))

    known = kernel_mask(mask_mod, *case.lengths, documents=True)
    if given is None and known is not None and able("gluon"):
        if q.shape[-1] <= 64 and known.span is None and able("cute_direct"):
            return Choice(
                "cute_direct",
                blocks,
                None,
                f"FlashAttention 4 does {name_of(mask_mod)} by itself and is "
                "ahead of Gluon at head dimensions up to 64",
            )
        return Choice("gluon", blocks, None, f"the Gluon kernel does {known} by itself, and is persistent")
    for path in ("cute", "cute_direct"):
        if able(path):
            return Choice(path, blocks, None, "FlashAttention 4's pipeline under any mask function")
    if able("compiled"):
        return Choice(
            "compiled",
            blocks,
            triton_options(q, k, mask_mod, blocks) or None,
            "inductor's kernel under any mask function; FlashAttention 4 cannot do this here",
        )
    others = tuple(path for path in flex_paths.able_paths(case) if path not in without)
    if not others:
        raise ValueError(f"no path does {name_of(mask_mod)} with {name_of(score_mod)} on {q.device} in {q.dtype}.")
    return Choice(others[0], blocks, None, "no fused path does this here")


def triton_options(
    q: torch.Tensor, k: torch.Tensor, mask_mod: MaskMod | None, block_size: int | tuple[int, int] = 128
) -> dict:
    """Kernel options of FlexAttention's Triton kernel: the measured tile, and what the mask is proved to allow."""
    if q.device.type != "cuda":
        return {}
    blocks = block_sizes(block_size)
    tile = HOPPER_TILES.get(q.shape[-1]) if compute_capability() == (9, 0) and q.dtype.itemsize == 2 else None
    if not tile or blocks[0] % tile["BLOCK_M"] or blocks[1] % tile["BLOCK_N"]:
        tile = {}
    # Where inductor chooses the tile, the claims must hold for its smallest.
    proved = proved_options(mask_mod, q.shape[2], k.shape[2], str(q.device), blocks, tile.get("BLOCK_N", 16))
    return tile | proved


@functools.lru_cache(maxsize=64)
def proved_options(
    mask_mod: MaskMod | None, sq: int, sk: int, device: str, block_size: tuple[int, int], tile_keys: int
) -> dict:
    """What counting a mask shows to hold of it, for tiles of `tile_keys` keys.

    ROWS_GUARANTEED_SAFE: each query sees a key of the first tile that the kernel visits. That it sees one somewhere is
    not enough, though FlexAttention's documentation says so: the running maximum would still be minus infinity after
    the first tile, and its difference with itself is NaN. BLOCKS_ARE_CONTIGUOUS: no row of blocks has a gap.
    """
    if mask_mod is None:
        return {"ROWS_GUARANTEED_SAFE": True}
    blocks = count_blocks(mask_mod, sq, sk, device, block_size)
    proved = {}
    # Partial blocks are visited before full ones, each kind from the left.
    first = torch.where(blocks.partial.any(1), blocks.partial.int().argmax(1), blocks.full.int().argmax(1))
    keys = first.repeat_interleave(block_size[0])[:sq, None] * block_size[1] + torch.arange(tile_keys, device=device)

    def safe(at: int, rows: torch.Tensor) -> bool:
        visited = keys[at : at + len(rows)]
        return bool((rows.gather(1, visited.clamp(max=sk - 1)) & (visited < sk)).any(1).all())

    if all(safe(at, rows) for at, rows in row_chunks(mask_mod, sq, sk, device)):
        proved["ROWS_GUARANTEED_SAFE"] = True
    if _without_gaps(blocks.partial) and _without_gaps(blocks.full):
        proved["BLOCKS_ARE_CONTIGUOUS"] = True
    return proved


def _without_gaps(wanted: torch.Tensor) -> bool:
    """Whether the True cells of every row stand side by side."""
    starts = wanted & ~torch.nn.functional.pad(wanted, (1, 0))[:, :-1]
    return bool((starts.sum(1) <= 1).all())
