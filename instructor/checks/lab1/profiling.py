"""Part 4: traces, GELU, and the model of a launch queue."""

from __future__ import annotations

import math

import torch

from instructor.checks.common import DTYPES, Draw, dtype_name, expect_value
from utils.checking import check
from utils.checking.labs.lab1.profiling import GELU_RULE, expect_gelu, expect_profile


@check("4.1", "Profile and trace")
def profile_steps(profile_steps, seed=None):
    """Check that six steps are recorded, that each waits, that the Chrome trace is readable, and that the profiler is returned."""
    expect_profile(profile_steps, "erfinv", Draw(seed).size(2, 5))


@check(**GELU_RULE)
def gelu_by_hand(gelu_by_hand, seed=None):
    """Check the tanh form of GELU, made of elementwise operators, on any shape and dtype."""
    draw = Draw(seed)
    few, many = (draw.size(2, 5), draw.size(20, 40)), (draw.size(40, 60), draw.size(100, 200))
    # A constant in float32, such as torch.sqrt(torch.tensor(2 / math.pi)), is right in float64, too.
    for dtype, shape, rtol, atol in (
        (torch.float64, few, 1e-5, 1e-7),
        (torch.float32, few, 1e-4, 1e-6),
        (torch.float32, many, 1e-4, 1e-6),
        (torch.bfloat16, many, 3e-2, 3e-2),
    ):
        x = 3 * draw.normal(*shape, dtype=dtype)
        x[0, :4] = torch.tensor([0.0, -30.0, 30.0, math.nan], dtype=dtype)
        expect_gelu(gelu_by_hand, x, rtol, atol)


@check("4.2", "Bytes of fusion")
def fusion_bytes(elementwise_bytes, fusion_speedup, seed=None):
    """Check the traffic of a chain of elementwise operators, and how much of it fusion saves."""
    draw = Draw(seed)
    for dtype in DTYPES[:3]:
        numel, one, two = draw.size(10, 10**7), draw.size(1, 9), draw.size(10, 19)
        size = dtype.itemsize
        expect_value(
            elementwise_bytes(numel, dtype, one, two),
            (2 * one + 3 * two) * numel * size,
            "bytes",
            f"elementwise_bytes({numel}, {dtype_name(dtype)}, {one}, {two})",
            {
                "Each operator writes one tensor, too.": (one + 2 * two) * numel * size,
                "An operator with two inputs reads both.": 2 * (one + two) * numel * size,
                "The number of bytes depends on the dtype.": (2 * one + 3 * two) * numel * 4,
                "These are elements, not bytes.": (2 * one + 3 * two) * numel,
            },
        )
        expect_value(
            fusion_speedup(one, two),
            (2 * one + 3 * two) / 2,
            "",
            f"fusion_speedup({one}, {two})",
            {
                "The fused kernel reads one tensor and writes one.": 2 * one + 3 * two,
                "Count bytes, not kernels.": one + two,
                "How many times FASTER: the chain over the fused kernel.": 2 / (2 * one + 3 * two),
            },
        )


@check("4.3", "The launch queue")
def launch_model(eager_time_us, graph_time_us, seed=None):
    """Compare the model with a simulation of the queue, with launches slower and faster than the kernels."""
    draw = Draw(seed)
    for launch, kernel in ((draw.real(5, 9), draw.real(0.5, 4)), (draw.real(1, 4), draw.real(5, 90)), (3.0, 3.0)):
        for n in (1, 2, draw.size(20, 90)):
            done = 0.0
            for i in range(1, n + 1):
                done = max(done, i * launch) + kernel
            slow, fast = max(launch, kernel), min(launch, kernel)
            what = f"({n}, {launch:.4g}, {kernel:.4g})"
            expect_value(
                eager_time_us(n, launch, kernel),
                done,
                "µs",
                f"eager_time_us{what}",
                {
                    "Launching and running overlap: the CPU launches the next kernel while the GPU runs this one.": n
                    * (launch + kernel),
                    "Before the first kernel there is a launch, and after the last launch there is a kernel.": n * slow,
                    "The slower of the two sets the pace.": launch + (n - 1) * fast + kernel,
                },
            )
            expect_value(
                graph_time_us(n, launch, kernel),
                launch + n * kernel,
                "µs",
                f"graph_time_us{what}",
                {
                    "The graph is launched, too: once.": n * kernel,
                    "The graph is launched once, not once a kernel.": n * (launch + kernel),
                },
            )
