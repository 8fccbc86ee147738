"""Part 4: traces, GELU, and the model of a launch queue."""

from __future__ import annotations

import json
import re
from typing import Any

import torch
import torch.nn.functional as F

from utils.checking import DERIVATIVES, GELU, expect_close, expect_number, visible
from utils.checking.answers import run_beside
from utils.checking.labs.lab1.gemm import BF16, DTYPE, ELEMENTS, FP32
from utils.checking.profiles import profile_on_pretended_gpu

Rates = dict[str, float]


def expect_profile(profile_steps, operator: str, repeats: int) -> None:
    """Call profile_steps on a function that runs an operator of torch, and check the trace.

    Args:
        profile_steps: the answer.
        operator: the name of a function of torch with one argument, such as `erf`.
        repeats: how often the profiled function runs it.
    """
    there = run_beside(profile_steps)
    try:
        kind, trace, calls, kernels = there(profile_on_pretended_gpu, profile_steps, operator, repeats)
    except (RuntimeError, AssertionError) as error:
        if "Profiler must be initialized" not in str(error):
            raise
        raise AssertionError("the profiler recorded nothing: call prof.step() after each call of fn.") from None
    if not trace:
        raise AssertionError("no file was written to trace_path: prof.export_chrome_trace(trace_path).")
    try:
        events = json.loads(trace)["traceEvents"]
    except (ValueError, KeyError, TypeError):
        raise AssertionError("the file at trace_path is no Chrome trace (JSON with traceEvents).") from None
    if kind != "profile":
        raise AssertionError(f"profile_steps should return the profiler, and returned {kind}.")
    if (ran := calls.count("fn")) != 10:
        raise AssertionError(f"fn should run 10 times (1 wait + 3 warm-up + 6 active steps), and ran {ran} times.")
    steps = {event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep#")}
    recorded = sum(event.get("name") == f"aten::{operator}" for event in events)
    if len(steps) != 6 or recorded != 6 * repeats:
        raise AssertionError(
            f"the trace holds {len(steps)} steps and {recorded} of fn's operators; expected 6 steps and {6 * repeats}. "
            "Is schedule=default_schedule given, and is prof.step() called after each call?"
        )
    if steps != (fourth := {f"ProfilerStep#{number}" for number in range(4, 10)}):
        raise AssertionError(
            f"the trace holds the steps {', '.join(sorted(steps))} of the profiler, and default_schedule records {min(fourth)} to "
            f"{max(fourth)}: all ten calls of fn are under the profiler, the first four as well."
        )
    if (waited := len(re.findall("fn (?:wait )+step", " ".join(calls)))) < 10:
        raise AssertionError(
            f"{waited} of 10 calls of fn wait for the device: call synchronize(), or torch.cuda.synchronize() where there is a GPU, "
            "between fn() and prof.step(). Without it a GPU's steps end too early, and what has not ended when the recording "
            "begins ends inside of it."
        )
    if not kernels:
        raise AssertionError(
            "the profile has no CUDA activity, so on a GPU its trace has no kernels: add ProfilerActivity.CUDA to the activities where "
            "torch.cuda.is_available()."
        )


@visible("4.1", "Profile and trace")
def check_profile_steps(profile_steps):
    """Check the trace of one operator, as if there were a GPU to wait for."""
    expect_profile(profile_steps, "erf", 1)


GELU_RULE: dict[str, Any] = {
    "question": "4.2",
    "title": "GELU by hand",
    "forbids": (GELU, DERIVATIVES),
    "hint": "write the formula from +, * and torch.tanh",
}


def expect_gelu(gelu_by_hand, x: torch.Tensor, rtol: float, atol: float) -> None:
    """Assert the tanh form of GELU, in the dtype of x."""
    got, wide = gelu_by_hand(x), x.double()
    hint = "Compare each factor with the formula: 1/2, the square root of 2/pi, 0.044715, the cube."
    comparable = isinstance(got, torch.Tensor) and got.shape == x.shape and x.dtype.itemsize > 2
    if comparable and torch.allclose(got.double(), F.gelu(wide), rtol=1e-5, atol=1e-6, equal_nan=True):
        hint = "This is the exact GELU, with erf. Gemma uses the tanh form."
    right, what = F.gelu(wide, approximate="tanh").to(x.dtype), f"gelu_by_hand of {tuple(x.shape)} in {x.dtype}"
    expect_close(got, right, rtol=rtol, atol=atol, what=what, hint=hint)


@visible(**GELU_RULE)
def check_gelu_by_hand(gelu_by_hand):
    """Check eleven numbers in two dtypes."""
    x = torch.cat((torch.linspace(-4, 4, 9), torch.tensor([-30.0, 30.0])))
    expect_gelu(gelu_by_hand, x, 1e-4, 1e-6)
    expect_gelu(gelu_by_hand, x[None].bfloat16(), 3e-2, 3e-2)


@visible("4.2", "Bytes of fusion")
def check_fusion_bytes(elementwise_bytes, fusion_speedup):
    """Check the bytes of two chains of operators, and the speed-up by fusion."""
    # exp(x) + y on 100 numbers in fp32: exp reads 1 and writes 1, + reads 2 and writes 1
    writes, both = "Each operator writes one tensor, too.", "An operator with two inputs reads both."
    fused = "The fused kernel reads one tensor and writes one."
    known: Rates
    for arguments, right, what, known in (
        ((100, FP32, 1, 1), 2000, "bytes of exp(x) + y", {writes: 1200, both: 1600, ELEMENTS: 500, DTYPE: 1000}),
        ((1237, BF16, 3, 2), 29688, "elementwise_bytes(1237, torch.bfloat16, 3, 2)", {DTYPE: 59376, ELEMENTS: 14844}),
    ):
        expect_number(elementwise_bytes(*arguments), right, rel=0, unit="bytes", what=what, mistakes=known)
    what = "the speed-up of fusing one operator with nothing"
    expect_number(fusion_speedup(1, 0), 1.0, rel=1e-6, what=what, mistakes={fused: 2.0})
    known = {
        fused: 15.0,
        "Count bytes, not kernels. (Or: an operator with two inputs reads both.)": 6.0,
        "How many times FASTER: the chain over the fused kernel.": 1 / 7.5,
        writes: 4.5,
    }
    expect_number(fusion_speedup(3, 3), 7.5, rel=1e-6, what="fusion_speedup(3, 3)", mistakes=known)


@visible("4.3", "The launch queue")
def check_launch_model(eager_time_us, graph_time_us):
    """Check short kernels, long kernels, and a single kernel. In the first row, launches end at 6, 12 and 18 µs."""
    overlap = "Launching and running overlap: the CPU launches the next kernel while the GPU runs this one."
    ends = "Before the first kernel there is a launch, and after the last launch there is a kernel."
    slower = "The slower of the two sets the pace."
    known: Rates
    for function, arguments, right, what, known in (
        (eager_time_us, (3, 6, 2), 20, "3 short kernels, eager,", {overlap: 24, ends: 18, slower: 12}),
        (eager_time_us, (4, 2, 5), 22, "4 long kernels, eager,", {overlap: 28, ends: 20, slower: 13}),
        (eager_time_us, (1, 6.0625, 2.125), 8.1875, "a single kernel, eager,", {ends: 6.0625}),
        (graph_time_us, (3, 6.0625, 2.125), 12.4375, "3 short kernels in a graph", {
            "The graph is launched, too: once.": 6.375,
            "The graph is launched once, not once a kernel.": 24.5625,
            "All kernels run, one after the other.": 8.1875,
        }),
    ):  # fmt: skip
        expect_number(function(*arguments), right, rel=1e-6, unit="µs", what=what, mistakes=known)
