"""Masks and score modifiers as functions, and the blocks and costs that follow from a mask.

from utils.attention.masks import both, causal, dense_mask, documents, score_mods
from utils.attention.masks.sparsity import sparsity       # blocks and the speed-up that a mask promises
"""

from utils.attention.masks import score_mods
from utils.attention.masks.blocks import (
    Blocks,
    block_sizes,
    build_block_mask,
    count_blocks,
    seconds_to_build_block_mask,
)
from utils.attention.masks.mask_mods import (
    MASKS,
    MaskMod,
    at_offset,
    both,
    by_name,
    causal,
    dense_mask,
    dilated,
    document_ids,
    documents,
    either,
    evaluate,
    name_of,
    named,
    nearby,
    negate,
    prefix_lm,
    sliding_window,
)
from utils.attention.masks.score_mods import ScoreMod

__all__ = [
    "MASKS",
    "Blocks",
    "MaskMod",
    "ScoreMod",
    "at_offset",
    "block_sizes",
    "both",
    "build_block_mask",
    "by_name",
    "causal",
    "count_blocks",
    "dense_mask",
    "dilated",
    "document_ids",
    "documents",
    "either",
    "evaluate",
    "name_of",
    "named",
    "nearby",
    "negate",
    "prefix_lm",
    "score_mods",
    "seconds_to_build_block_mask",
    "sliding_window",
]
