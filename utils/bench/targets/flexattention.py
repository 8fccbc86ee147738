"""labs/flexattention: FlexAttention eager against compiled, and the CuTe path for machines without FlexAttention.

Block size, document span and compile mode are read at run time: from the flags, else from BLOCK_SIZE, DOC_SPAN and
TORCH_COMPILE_MODE. The block mask is one for all batches and heads. Eager FlexAttention stores all scores, so that
anything fused looks fast beside it: the compiled side is also timed against compiled dense attention and SDPA under a
stored mask (`--against`), and the results say what the block mask cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from utils.attention import masks, score_mods
from utils.attention.flex_paths import FlexUnsupported, Prepared, compiled_versions, flex, path_case
from utils.attention.flex_paths import support as path_support
from utils.attention.sparsity import sparsity
from utils.bench.errors import BenchError, Refused, WrongRun
from utils.bench.knobs import Knob
from utils.bench.targets import providers
from utils.bench.targets.base import Built, Case, Target, dtype_support, mask_knobs, masked_workload, shape_knobs
from utils.bench.targets.unfused_fused import UnfusedFused, provider_knob
from utils.bench.workload import DTYPES, SCORE_MODS, SOFT_CAP, Workload
from utils.benchmark.measuring import compare
from utils.machine.device import Support, compile_support

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
BLOCK_SIZES = ("16", "32", "64", "128", "256")
CPU_HEAD_DIMS = (8, 256)
# Further baselines of the compiled side: what each is told as, in a sentence.
AGAINST = {
    "dense_compiled": "compiled dense attention under a stored mask",
    "sdpa": "SDPA, under a stored mask unless it is a plain causal one",
}
PAIRS = {"cpu": 15, "cuda": 30}  # interleaved pairs of each further comparison


def mask_mod(workload: Workload):
    """The workload's mask as FlexAttention wants it; None where every query sees every key."""
    return masks.by_name(workload.mask, workload.doc_span)


def score_mod(workload: Workload):
    """The workload's score modifier as FlexAttention wants it; None without one."""
    return score_mods.by_name(workload.score_mod, workload.heads, SOFT_CAP)


@dataclass
class FlexBuilt(Built):
    """A side with the prepared call behind it and the tensors it works on."""

    prepared: Prepared | None = None
    inputs: tuple[torch.Tensor, ...] = ()


class FlexAttention(Target):
    chapter, workload = "labs/flexattention", "flex_attention"
    summary = "FlexAttention with a block mask and a score modifier: eager against torch.compile"
    sides: ClassVar = {"baseline": "eager FlexAttention: all scores stored", "optimized": "compiled: one fused kernel"}
    knobs = (
        *shape_knobs(cpu=(1, 4, 1024, 64, "fp32"), gpu=(4, 16, 4096, 64, "bf16")),
        *mask_knobs(256, 1024),
        Knob("score-mod", "change of the scores before the softmax", "none", "none", choices=SCORE_MODS),
        Knob("block-size", "tokens of a block of the block mask", "128", "128", choices=BLOCK_SIZES, env="BLOCK_SIZE"),
        Knob(
            "compile-mode",
            "mode of torch.compile",
            "default",
            "default",
            choices=COMPILE_MODES,
            env="TORCH_COMPILE_MODE",
        ),
        Knob("against", "further baselines of the compiled side", "all", "all", choices=("all", "none", *AGAINST)),
    )

    def cases(self, settings, device):
        mode = settings["compile_mode"]
        if device.type == "cpu" and mode.value in ("reduce-overhead", "max-autotune"):
            raise BenchError(
                f"--compile-mode {mode.value} uses CUDA graphs, and this runs on a CPU; use default or "
                "max-autotune-no-cudagraphs."
            )
        if settings["mask"].value == "full" and (size := settings["block_size"]).origin != "default":
            where = "--block-size" if size.origin == "flag" else "BLOCK_SIZE"
            raise BenchError(
                f"{where} is {size.value} and --mask full has no block mask; choose another --mask, or "
                f"leave {where} out."
            )
        return [Case(self.name, masked_workload(settings, settings["score_mod"].value), settings, device)]

    def support(self, case, side):
        if not (kind := dtype_support(case.workload.dtype, case.device)):
            return kind
        if side == "optimized":
            if not (here := compile_support()):
                return here
            low, high = CPU_HEAD_DIMS
            if case.device.type == "cpu" and not low <= case.workload.head_dim <= high:
                return Support(
                    False,
                    f"compiled FlexAttention on a CPU takes head dimensions {low} to {high}, not "
                    f"{case.workload.head_dim}.",
                    "Choose another --head-dim.",
                )
        return Support(True)

    def score_buffers(self, case, side):
        return 4.0 if side == "baseline" else 0.0  # scores, modified, masked, weights

    def build(self, case, side, q, k, v):
        options = {"mask_mod": mask_mod(case.workload), "score_mod": score_mod(case.workload)}
        try:
            if side == "baseline":
                eager = flex(q, k, v, path="eager", block_size=int(case.value("block_size")), **options)
                attend = eager.fn
                return FlexBuilt(
                    lambda: attend(q, k, v), "eager", eager.settings["implementation"], prepared=eager, inputs=(q, k, v)
                )
            mode = case.value("compile_mode")
            prepared = flex(q, k, v, path="compiled", block_size=int(case.value("block_size")), mode=mode, **options)
        except FlexUnsupported as error:
            raise Refused(str(error)) from None
        compiled = prepared.fn  # what is timed has no guard around it: `after` holds it to one version

        def after() -> None:
            versions = compiled_versions(prepared.source)
            if versions != 1:
                raise WrongRun(
                    f"compiled FlexAttention was compiled {versions} times and once is right: a recompile "
                    "or a fallback to eager was among the timed calls, so these times are void."
                )

        return FlexBuilt(
            lambda: compiled(q, k, v),
            "compiled",
            f"{prepared.settings['implementation']}, mode {mode}",
            after,
            prepared,
            (q, k, v),
        )

    def facts(self, case, side, built):
        """What was in force, what the mask leaves, what its block mask cost; of the compiled side, honest baselines."""
        if getattr(built, "prepared", None) is None:
            return {}
        settings = built.prepared.settings
        found = {"settings": settings, "seconds": built.prepared.seconds, "notes": []}
        if side == "baseline":
            return found
        mask, size = mask_mod(case.workload), int(case.value("block_size"))
        if mask is not None:
            counted = sparsity(mask, case.workload.seq_len, case.workload.seq_len, size, case.device)
            found["sparsity"] = counted.to_dict()
            again = masks.seconds_to_build_block_mask(mask, *2 * (case.workload.seq_len,), case.device, size)
            compiling = built.prepared.seconds["compile"]
            found["block_mask"] = {"seconds": again, "share_of_preparation": again / (again + compiling)}
            found["notes"] += [
                f"{counted}.",
                f"create_block_mask takes {1e3 * again:.3g} ms, once for all calls, "
                f"batches and heads: {again / (again + compiling):.1%} of the preparation (compiling: "
                f"{compiling:.3g} s).",
            ]
        found["against"] = {}
        for name in AGAINST:
            if case.value("against") in ("all", name):
                found["against"][name], note = self._against(case, built, name)
                found["notes"].append(note)
        return found

    def _against(self, case: Case, built: FlexBuilt, name: str) -> tuple[dict, str]:
        """The compiled side against another baseline: speed-up with its interval, and that in a sentence."""
        try:
            other = flex(*built.inputs, path=name, mask_mod=mask_mod(case.workload), score_mod=score_mod(case.workload))
        except FlexUnsupported as error:
            return {"refused": str(error)}, f"not compared with {AGAINST[name]}: {error}."
        pair = compare(
            other.fn,
            built.prepared.fn,
            *built.inputs,
            warmup=3,
            iterations=PAIRS[case.device.type],
            labels=(name, "compiled FlexAttention"),
            device=case.device,
        )
        other.check()
        told = {
            "speedup": pair.speedup,
            "interval": list(pair.interval),
            "verdict": pair.verdict,
            "ms": pair.a.median_ms,
            "implementation": other.settings["implementation"],
        }
        return told, (
            f"against {AGAINST[name]} ({pair.a.median_ms:.3g} ms), compiled FlexAttention is "
            f"{pair.speedup:.3g}x as fast [{pair.interval[0]:.3g}, {pair.interval[1]:.3g}]."
        )

    def prove(self, case, side, built, launched):
        names = launched.shown
        fused = (
            any("CompiledFxGraph" in name or name.startswith("cpp_fused") for name in launched.operators)
            if not launched.kernels
            else any("triton_tem_fused" in name or "flex" in name for name in names)
        )
        stored = any("softmax" in name.lower() for name in names)
        ran = "compiled" if fused and not stored else "eager"
        if ran != built.provider:
            raise WrongRun(
                f"the {side} side should run {built.provider} FlexAttention and launched "
                f"{', '.join(names[:8])}: that is {ran}."
            )
        return ran


class FlexAttentionCute(UnfusedFused):
    chapter, workload = "labs/flexattention", "flex_attention_cute"
    summary = "the same mask and score modifier without FlexAttention: FlashAttention in the CuTe DSL"
    sides: ClassVar = {"baseline": "unfused, with a mask", "optimized": "CuTe, else flash-attn, else torch flash"}
    order = ("cute", "flash_attn", "flash")  # the last two take documents as sequences of one length, no modifier
    knobs = (
        *shape_knobs(cpu=(1, 4, 1024, 64, "fp32"), gpu=(4, 16, 4096, 64, "bf16")),
        *mask_knobs(256, 1024),
        Knob("score-mod", "change of the scores before the softmax", "none", "none", choices=SCORE_MODS),
        provider_knob(order),
    )

    def cases(self, settings, device):
        workload = masked_workload(settings, settings["score_mod"].value)
        if device.type == "cpu":
            try:
                providers.as_sequences(workload)
            except Refused as error:
                raise BenchError(str(error)) from None
        return [Case(self.name, workload, settings, device)]

    def _provider(self, case):
        asked = case.value("provider")
        reason = ""
        if asked in ("auto", "cute"):
            cute = self._cute(case)
            if cute or asked == "cute":
                return "cute", cute
            reason = f"path cute_direct {cute.reason.rstrip('.')}; "
        names = self.order[1:] if asked == "auto" else (asked,)
        try:
            name, answer = providers.first_able(names, case.workload, case.device)
        except Refused as error:
            name, answer = None, Support(False, str(error))
        return name, answer or Support(False, reason + answer.reason, answer.remedy)

    @staticmethod
    def _cute(case: Case) -> Support:
        """Whether FlashAttention 4 does this itself, asked with tensors that take no memory."""
        like = torch.empty(1, dtype=DTYPES[case.workload.dtype], device=case.device).expand(case.workload.shape)
        return path_support(
            "cute_direct", path_case(like, like, like, mask_mod(case.workload), score_mod(case.workload))
        )

    def build(self, case, side, q, k, v):
        if side == "baseline" or self._provider(case)[0] != "cute":
            return super().build(case, side, q, k, v)
        prepared = flex(
            q, k, v, mask_mod=mask_mod(case.workload), score_mod=score_mod(case.workload), path="cute_direct"
        )
        attend = prepared.fn
        return FlexBuilt(
            lambda: attend(q, k, v), "cute", prepared.settings["implementation"], prepared=prepared, inputs=(q, k, v)
        )

    def facts(self, case, side, built):
        if getattr(built, "prepared", None) is None:
            return {}
        return {"settings": built.prepared.settings, "seconds": built.prepared.seconds}


TARGETS = (FlexAttention(), FlexAttentionCute())
