"""How much a program of a kernel works: model cycles, beside those of the model answer on the same launch.

The values say that the right thing was computed, and the counts of copies and products say by which ones. What lies between
(numbers computed twice, steps one after the other, loads element by element) is in the cycles.
"""

from __future__ import annotations

import torch

from instructor.checks.common import let_wait
from utils.checking.gluon_launches import (
    async_copy_launch,
    attention_inputs,
    attention_launch,
    causal_launch,
    overlap_launch,
    tma_ring_launch,
    transpose_launch,
    wgmma_launch,
)
from utils.checking.kernel_exercises import Launch, Run, simulate_launch

# Kernel: model cycles of the model answer's first program, and of the arithmetic of all its partitions.
# `test_the_work_of_the_model_answers` holds them against the model answers.
MODEL = {
    "transpose": (1063, 43),
    "async_copy": (2918, 161),
    "tma_ring": (2589, 194),
    "wgmma": (13295, 64),
    "softmax": (10905, 2431),
    "specialized": (9994, 7247),
    "overlap": (14605, 6727),
    "causal": (11181, 2707),
}
MORE = 1.3  # times the model answer's cycles; the other right answers that we know take 1.06 at most
MORE_ARITHMETIC = 1.2  # the same of the arithmetic: 1.11 at most, but for two questions
MORE_BESIDE = {"tma_ring": 1.5, "transpose": 1.5}  # squares by fma; offsets that are added up before the pointer


def launch_of(kernel: str, normal=torch.randn) -> tuple[Launch, dict]:
    """Return the launch on which a kernel's work is measured, and what it should write."""
    if kernel == "transpose":
        return transpose_launch(64, 32, normal)
    if kernel == "async_copy":
        return async_copy_launch(256 * 8, 8, 3, normal=normal)
    if kernel == "tma_ring":
        return tma_ring_launch(16, 64 * 8, 3, normal=normal)
    if kernel == "wgmma":
        return wgmma_launch(64, 64, 512, 64, torch.bfloat16, normal)
    sq, sk, d = {"specialized": (128, 384, 64), "overlap": (128, 384, 128)}.get(kernel, (64, 256, 64))
    q, k, v, right = attention_inputs(1, sq, sk, d, 1.0, torch.float16, normal)
    if kernel == "softmax":
        return attention_launch("lab3_softmax.py", 64, q, k, v, right)
    if kernel == "specialized":
        return attention_launch("lab3_specialized.py", 128, q, k, v, right, STAGES=2)
    return overlap_launch(q, k, v, right, 2) if kernel == "overlap" else causal_launch(q, k, v)


def work_of(run: Run) -> tuple[float, float]:
    """Return the model cycles of the first program, and of the arithmetic of all its partitions."""
    return run.cycles[0], sum(e.end - e.start for e in run.programs()[0] if e.kind == "compute")


def look_at_work(source: str, kernel: str, normal, words: str) -> None:
    """Let an answer wait whose program takes more than `MORE` times the model answer's cycles.

    That is what wasteful answers do, and an honest one may do: no question says how many cycles are too many.

    Args:
        source: the text of the student's file.
        kernel: a key of `MODEL`.
        normal: draws the inputs.
        words: what to look at.
    """
    launch, _ = launch_of(kernel, normal)
    _, run = simulate_launch(source, launch, timeline=True)
    limits = MORE, MORE_BESIDE.get(kernel, MORE_ARITHMETIC)
    for what, took, model, more in zip(
        ("cycles", "cycles of arithmetic"), work_of(run), MODEL[kernel], limits, strict=True
    ):
        if took > more * model:
            let_wait(
                f"takes {took:.0f} model {what}, where {model} are enough (does it compute what nobody needs, or more than once, or "
                f"one after the other what can run at the same time? {words})"
            )
