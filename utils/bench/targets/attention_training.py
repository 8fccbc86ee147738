"""labs/flashattention_gluon:attention_training: the passes of training, one attention backend against another."""

from __future__ import annotations

from collections.abc import Mapping

from utils.bench.knobs import Knob
from utils.bench.targets.cudnn_sdpa_bench import FlashSdp
from utils.bench.targets.prepared import backend_support
from utils.bench.workload import DIRECTIONS

WITH_GRADIENTS = ("gluon", "cute", "flash_attn")  # backends outside of torch that have a backward pass
CHOICES = (*FlashSdp.choices, *WITH_GRADIENTS)


class AttentionTraining(FlashSdp):
    """Forward plus backward, or one of them: the course's Gluon kernels, or a package's, against an SDPA backend."""

    chapter, workload = "labs/flashattention_gluon", "attention_training"
    summary = "forward plus backward of one attention backend against another"
    sides: Mapping[str, str] = {
        "baseline": "SDPA with --baseline-backend (cudnn)",
        "optimized": "attention with --backend (gluon)",
    }
    knobs = (
        *(knob for knob in FlashSdp.knobs if knob.name not in ("pass", "backend", "baseline-backend")),
        Knob("pass", "what is timed", "both", "both", choices=DIRECTIONS),
        Knob("backend", "backend of the optimized side", "flash", "gluon", choices=CHOICES),
        Knob("baseline-backend", "backend of the baseline side", "math", "cudnn", choices=CHOICES),
    )

    def support(self, case, side):
        """Whether this machine runs this side of the case, and why not."""
        answer, name = super().support(case, side), self._backend(case, side)
        return backend_support(name, case) if answer and name in WITH_GRADIENTS else answer


TARGETS = (AttentionTraining(),)
