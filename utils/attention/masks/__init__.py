"""Masks and score modifiers as functions, and the blocks and costs of a mask.

from utils.attention.masks import both, causal, dense_mask, documents, score_mods
from utils.attention.masks.sparsity import sparsity       # blocks and the speed-up that a mask promises
"""

# ruff: noqa: F401 (these imports are the names of the package)
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
