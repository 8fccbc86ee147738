"""Hidden checks of lab 2: each takes the student's functions and a seed, and returns a Verdict.

`seed=None` draws fresh inputs at each call. All inputs live on the CPU, so the verdict is the same with and without a
GPU. A check evaluates a mask for each pair under vmap, as FlexAttention does, and compares it with its definition. The
sizes, heads, sequences and captured tensors are drawn. A check also measures the tensors that a mask reads for one
pair, so it finds a mask that reads a tensor of pairs.
"""

from instructor.checks.lab2_flexattention.blocks import block_sparse_attention, count_blocks, promises
from instructor.checks.lab2_flexattention.data import mask_costs, masked_attention
from instructor.checks.lab2_flexattention.kernels import buckets, prepare_flex
from instructor.checks.lab2_flexattention.layout import layout_blocks, layout_mask
from instructor.checks.lab2_flexattention.masks import compositions, packed_documents, three_masks, windows_and_sinks
from instructor.checks.lab2_flexattention.scores import relative_bias, score_mods
from instructor.checks.lab2_flexattention.serving import at_positions, paged_mask

__all__ = [
    "at_positions",
    "block_sparse_attention",
    "buckets",
    "compositions",
    "count_blocks",
    "layout_blocks",
    "layout_mask",
    "mask_costs",
    "masked_attention",
    "packed_documents",
    "paged_mask",
    "prepare_flex",
    "promises",
    "relative_bias",
    "score_mods",
    "three_masks",
    "windows_and_sinks",
]
