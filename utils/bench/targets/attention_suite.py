"""attention_suite: SDPA, flash-attn, Gluon and other attention backends over one matrix of shapes, in two dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from utils.bench.targets.attention import CAUSAL, AttentionTarget, shape_knobs
from utils.bench.targets.backends import backend_of
from utils.bench.targets.base import Case
from utils.bench.workload import Workload

MATRIX = ((1, 1, 128, 64), (8, 4, 128, 64), (32, 8, 128, 64), (32, 8, 256, 64))  # B, H, S, D


class Suite(AttentionTarget):
    """One contender over the matrix: a shape given by a flag replaces that column of every row."""

    chapter = "attention_suite"
    # The matrix has the shapes. On a CPU fp16 products run near 1 GFLOP/s.
    cpu, gpu = (None, None, None, None, ("fp32", "bf16")), (None, None, None, None, ("fp16", "bf16"))
    knobs = (*shape_knobs(cpu, gpu, many_dtypes=True), CAUSAL)
    protocol: Mapping[str, tuple[int, int]] = {"cpu": (5, 30), "cuda": (200, 500)}

    def __init__(self, workload: str, optimized: str, baseline: str = "auto"):
        self.workload, self.contenders = workload, {"baseline": baseline, "optimized": optimized}
        self.sides = {side: backend_of(name).summary for side, name in self.contenders.items()}
        self.summary = f"over the matrix of shapes: {self.sides['optimized']}"

    def cases(self, settings, device):
        """Return a case for each shape and dtype."""
        given = [settings[key].value for key in ("batch", "heads", "seq_len", "head_dim")]
        shapes = dict.fromkeys(tuple(new or old for new, old in zip(given, row, strict=True)) for row in MATRIX)
        mask = "causal" if settings["causal"].value else "full"
        return [
            Case(self.name, Workload(*shape, dtype, mask), settings, device)
            for dtype, shape in itertools.product(settings["dtype"].value, shapes)
        ]

    def backend(self, case, side):
        """Return the name of a side's backend."""
        return self.contenders[side]


CONTENDERS = ("flash_attn", "gluon", "fa3", "cute", "flex", "flex_flash", "triton")
TARGETS = (Suite("sdpa", "auto", baseline="math"), *(Suite(name, name) for name in CONTENDERS))
