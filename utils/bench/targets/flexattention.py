"""labs/flexattention: FlexAttention eager against compiled, and the CuTe kernel for machines without FlexAttention.

Block size, document span and compile mode are read at run time: from the flags, else from BLOCK_SIZE, DOC_SPAN and
TORCH_COMPILE_MODE. All batches and heads share one block mask. The results contain the time to build it.
"""

from __future__ import annotations

from collections.abc import Mapping

from utils.attention.masks import by_name, seconds_to_build_block_mask
from utils.attention.masks.sparsity import sparsity
from utils.attention.prepared import MODES
from utils.bench.errors import BenchError
from utils.bench.knobs import Knob
from utils.bench.targets.attention import (
    MASK_KNOBS,
    AttentionTarget,
    UnfusedFused,
    build_prepared,
    provider_knob,
    shape_knobs,
)

BLOCK_SIZES = ("16", "32", "64", "128", "256")
# Eager FlexAttention stores all scores, so every fused kernel looks fast in comparison. The other two baselines are dense
# attention under a stored mask, compiled or by SDPA.
BASELINES = ("eager", "naive_compiled", "sdpa")


class FlexAttention(AttentionTarget):
    """Eager FlexAttention against compiled FlexAttention."""

    chapter, workload = "labs/flexattention", "flex_attention"
    summary = "FlexAttention with a block mask and a score modifier: eager against torch.compile"
    sides: Mapping[str, str] = {
        "baseline": "--baseline (eager FlexAttention: all scores stored)",
        "optimized": "compiled: one fused kernel",
    }
    knobs = (
        *shape_knobs(cpu=(1, 4, 1024, 64, "fp32"), gpu=(4, 16, 4096, 64, "bf16")),
        *MASK_KNOBS,
        Knob("block-size", "tokens of a block of the block mask", "128", "128", choices=BLOCK_SIZES, env="BLOCK_SIZE"),
        Knob("baseline", "what the compiled side is compared with", "eager", "eager", choices=BASELINES),
        Knob("compile-mode", "mode of torch.compile", "default", "default", choices=MODES, env="TORCH_COMPILE_MODE"),
    )

    def workload_of(self, settings, device):
        """Make the workload of these settings; raise BenchError for values that do not go together."""
        if settings["mask"].value == "full" and (size := settings["block_size"]).origin != "default":
            where = "--block-size" if size.origin == "flag" else "BLOCK_SIZE"
            raise BenchError(
                f"{where} is {size.value} and --mask full has no block mask; choose another --mask, or "
                f"leave {where} out."
            )
        return super().workload_of(settings, device)

    def backend(self, case, side):
        """Return the name of a side's backend."""
        return case.value("baseline") if side == "baseline" else "compiled"

    def build(self, case, side, q, k, v):
        """Prepare the side's call."""
        name, size, mode = self.backend(case, side), int(case.value("block_size")), case.value("compile_mode")
        options = {"compiled": {"block_size": size, "mode": mode}, "eager": {"block_size": size}}.get(name, {})
        return build_prepared(name, case, (q, k, v), **options)

    def facts(self, case, side, built):
        """Return the settings, and for the compiled side also sparsity and cost of the mask."""
        facts, length = super().facts(case, side, built), case.workload.seq_len
        mask, size = by_name(case.workload.mask, case.workload.doc_span), int(case.value("block_size"))
        if side == "baseline" or mask is None:
            return facts
        counted = sparsity(mask, length, length, size, case.device)
        building = seconds_to_build_block_mask(mask, length, length, case.device, size)
        compiling = facts["seconds"]["compile"]
        share = building / (building + compiling)
        return facts | {
            "sparsity": counted.to_dict(),
            "block_mask": {"seconds": building, "share_of_preparation": share},
            "notes": [
                f"{counted}.",
                f"create_block_mask takes {1e3 * building:.3g} ms, once for all calls, batches and heads: {share:.1%} "
                f"of the preparation (compiling: {compiling:.3g} s).",
            ],
        }


class FlexAttentionCute(UnfusedFused):
    """Unfused attention against FlashAttention 4 under the same mask and score modifier."""

    chapter, workload = "labs/flexattention", "flex_attention_cute"
    summary = "the same mask and score modifier without FlexAttention: FlashAttention in the CuTe DSL"
    sides: Mapping[str, str] = {
        "baseline": "unfused, with a mask",
        "optimized": "CuTe, else flash-attn, else torch flash",
    }
    order = ("cute", "flash_attn", "flash")  # the last two: documents of equal length, no modifier
    knobs = (
        *shape_knobs(cpu=(1, 4, 1024, 64, "fp32"), gpu=(4, 16, 4096, 64, "bf16")),
        *MASK_KNOBS,
        provider_knob(order),
    )


TARGETS = (FlexAttention(), FlexAttentionCute())
