"""labs/flexattention: FlexAttention eager against compiled, and the CuTe path for machines without FlexAttention.

Block size, document span and compile mode are read at run time: from the flags, else from BLOCK_SIZE, DOC_SPAN and
TORCH_COMPILE_MODE. The block mask is one for all batches and heads.
"""

from __future__ import annotations

import warnings
from typing import ClassVar

import torch

from utils.bench.errors import BenchError, Refused, WrongRun
from utils.bench.knobs import Knob
from utils.bench.targets import providers
from utils.bench.targets.base import (
    Built,
    Case,
    Target,
    dtype_support,
    mask_knobs,
    masked_workload,
    shape_knobs,
)
from utils.bench.targets.unfused_fused import UnfusedFused, provider_knob
from utils.bench.workload import SCORE_MODS, SOFT_CAP, Workload
from utils.device import Support, compile_support

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
BLOCK_SIZES = ("16", "32", "64", "128", "256")
DEFAULT_TILE = 128  # inductor's largest query tile: smaller blocks must name their own tile
CPU_HEAD_DIMS = (8, 256)


def mask_mod(workload: Workload):
    """The workload's mask as FlexAttention wants it; None where every query sees every key."""
    span = workload.doc_span

    def causal(b, h, q, k):
        return q >= k

    def document(b, h, q, k):
        return q // span == k // span

    def causal_document(b, h, q, k):
        return (q >= k) & (q // span == k // span)

    return {"full": None, "causal": causal, "document": document, "causal_document": causal_document}[workload.mask]


def score_mod(workload: Workload):
    """The workload's score modifier as FlexAttention wants it; None without one."""
    heads = workload.heads

    def relative_bias(score, b, h, q, k):
        return score + torch.exp2(-8.0 * (h + 1) / heads) * (k - q)

    def soft_cap(score, b, h, q, k):
        return SOFT_CAP * torch.tanh(score / SOFT_CAP)

    return {"none": None, "relative_bias": relative_bias, "soft_cap": soft_cap}[workload.score_mod]


def compiled_versions(function) -> int:
    """How many compiled versions torch.compile holds of a function; more than one is a recompile."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(function.__code__))


class FlexAttention(Target):
    chapter, workload = "labs/flexattention", "flex_attention"
    summary = "FlexAttention with a block mask and a score modifier: eager against torch.compile"
    sides: ClassVar = {"baseline": "eager FlexAttention: all scores stored", "optimized": "compiled: one fused kernel"}
    knobs = (
        *shape_knobs(cpu=(1, 4, 1024, 64, "fp32"), gpu=(4, 16, 4096, 64, "bf16")),
        *mask_knobs(256, 1024),
        Knob("score-mod", "change of the scores before the softmax", "none", "none", choices=SCORE_MODS),
        Knob("block-size", "tokens of a block of the block mask", "128", "128", choices=BLOCK_SIZES, env="BLOCK_SIZE"),
        Knob("compile-mode", "mode of torch.compile", "default", "default", choices=COMPILE_MODES,
             env="TORCH_COMPILE_MODE"),
    )

    def cases(self, settings, device):
        mode = settings["compile_mode"]
        if device.type == "cpu" and mode.value in ("reduce-overhead", "max-autotune"):
            raise BenchError(f"--compile-mode {mode.value} uses CUDA graphs, and this runs on a CPU; use default or "
                             "max-autotune-no-cudagraphs.")
        if settings["mask"].value == "full" and (size := settings["block_size"]).origin != "default":
            where = "--block-size" if size.origin == "flag" else "BLOCK_SIZE"
            raise BenchError(f"{where} is {size.value} and --mask full has no block mask; choose another --mask, or "
                             f"leave {where} out.")
        return [Case(self.name, masked_workload(settings, settings["score_mod"].value), settings, device)]

    def support(self, case, side):
        if not (kind := dtype_support(case.workload.dtype, case.device)):
            return kind
        if side == "optimized":
            if not (here := compile_support()):
                return here
            low, high = CPU_HEAD_DIMS
            if case.device.type == "cpu" and not low <= case.workload.head_dim <= high:
                return Support(False, f"compiled FlexAttention on a CPU takes head dimensions {low} to {high}, not "
                                      f"{case.workload.head_dim}.", "Choose another --head-dim.")
        return Support(True)

    def score_buffers(self, case, side):
        return 4.0 if side == "baseline" else 0.0  # scores, modified, masked, weights

    def build(self, case, side, q, k, v):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        size = int(case.value("block_size"))
        block_mask, modifier = None, score_mod(case.workload)
        if (mask := mask_mod(case.workload)) is not None:
            length = case.workload.seq_len
            block_mask = create_block_mask(mask, None, None, length, length, device=str(case.device), BLOCK_SIZE=size)
        options = {}
        if case.device.type == "cuda" and block_mask is not None and size < DEFAULT_TILE:
            # Inductor's tile is larger than such a block, and compiling would fail: the tile is the block.
            options = {"kernel_options": {"BLOCK_M": size, "BLOCK_N": size}}

        def attend(q, k, v):
            return flex_attention(q, k, v, score_mod=modifier, block_mask=block_mask, **options)

        if side == "baseline":
            def eager():
                with warnings.catch_warnings():  # it warns once that it stores all scores: that is the point here
                    warnings.simplefilter("ignore")
                    return attend(q, k, v)

            eager()
            return Built(lambda: attend(q, k, v), "eager", f"FlexAttention of torch {torch.__version__}, eager")
        mode = case.value("compile_mode")
        compiled = torch.compile(attend, fullgraph=True, dynamic=False, mode=None if mode == "default" else mode)

        def after() -> None:
            versions = compiled_versions(attend)
            if versions != 1:
                raise WrongRun(f"compiled FlexAttention was compiled {versions} times and once is right: a recompile "
                               "or a fallback to eager was among the timed calls, so these times are void.")

        return Built(lambda: compiled(q, k, v), "compiled",
                     f"FlexAttention of torch {torch.__version__}, compiled, mode {mode}", after)

    def prove(self, case, side, built, launched):
        names = launched.shown
        fused = any("CompiledFxGraph" in name or name.startswith("cpp_fused") for name in launched.operators) \
            if not launched.kernels else any("triton_tem_fused" in name or "flex" in name for name in names)
        stored = any("softmax" in name.lower() for name in names)
        ran = "compiled" if fused and not stored else "eager"
        if ran != built.provider:
            raise WrongRun(f"the {side} side should run {built.provider} FlexAttention and launched "
                           f"{', '.join(names[:8])}: that is {ran}.")
        return ran


class FlexAttentionCute(UnfusedFused):
    chapter, workload = "labs/flexattention", "flex_attention_cute"
    summary = "the same masks without FlexAttention: FlashAttention in the CuTe DSL, documents as sequences"
    sides: ClassVar = {"baseline": "unfused, with a mask", "optimized": "CuTe, else flash-attn, else torch flash"}
    order = ("cute", "flash_attn", "flash")
    knobs = (
        *shape_knobs(cpu=(1, 4, 1024, 64, "fp32"), gpu=(4, 16, 4096, 64, "bf16")),
        *mask_knobs(256, 1024),
        provider_knob(order),
    )

    def cases(self, settings, device):
        workload = masked_workload(settings)
        try:
            providers.as_sequences(workload)
        except Refused as error:
            raise BenchError(str(error)) from None
        return [Case(self.name, workload, settings, device)]


TARGETS = (FlexAttention(), FlexAttentionCute())
