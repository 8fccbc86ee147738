"""Part 4: traces, GELU, kernel counts, and the model of a launch queue."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import tempfile
from pathlib import Path

import torch

from instructor.checks.common import DTYPES, Draw, by_value, dtype_name, expect_value
from utils.checking import DERIVATIVES, GELU, LOOKUPS, MATMUL, check, expect_close
from utils.checking.profiles import marked_waits, steps_that_wait, wait_with_mark
from utils.machine.device import default_device


@check("4.1", "Profile and trace")
def profile_steps(profile_steps, seed=None):
    """Check that six steps are recorded, that the Chrome trace is readable, and that the profiler is returned."""
    draw = Draw(seed)
    repeats = draw.size(2, 5)
    x, calls = draw.normal(64), []

    def note(what):
        calls.append(what)

    @by_value
    def step():
        note("fn")
        for _ in range(repeats):
            torch.erfinv(x)

    @by_value
    def wait():
        note("wait")
        wait_with_mark()

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        path = Path(f"trace_{draw.size(0, 999)}.json")
        with marked_waits(profile_steps, wait):
            prof = profile_steps(step, str(path))
        if not path.exists():
            raise AssertionError(
                f"no file was written to trace_path ({path.name}): prof.export_chrome_trace(trace_path)."
            )
        try:
            events = json.loads(path.read_text())["traceEvents"]
        except (ValueError, KeyError, TypeError):
            raise AssertionError("the file at trace_path is no Chrome trace (JSON with traceEvents).") from None
    if not isinstance(prof, torch.profiler.profile):
        raise AssertionError(f"profile_steps should return the profiler, and returned {type(prof).__name__}.")
    if (ran := calls.count("fn")) != 10:
        raise AssertionError(
            f"fn should run 10 times (1 wait + 3 warm-up + 6 active steps of default_schedule), and ran {ran} times."
        )
    steps = {event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep#")}
    recorded = sum(event.get("name") == "aten::erfinv" for event in events)
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
    # Whoever waits by a function of torch's leaves no mark, and has waited all the same.
    if (waits := steps_that_wait(events, "aten::erfinv")) is None:
        return
    if waits < 6:
        raise AssertionError(
            f"{waits} of 6 recorded steps wait for the device after fn and before they end: call synchronize() between fn() and "
            "prof.step()."
        )
    if (waited := sum(pair == ("fn", "wait") for pair in itertools.pairwise(calls))) < 10:
        raise AssertionError(
            f"{waited} of the 10 calls of fn are followed by synchronize(). In the steps before the first recorded one it is needed, too: "
            "what has not ended when the recording begins ends inside of it."
        )


@check(
    "4.2",
    "GELU by hand",
    forbids=(GELU, MATMUL, LOOKUPS, DERIVATIVES),
    hint="write the formula from +, * and torch.tanh",
)
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
        what = f"gelu_by_hand of {tuple(x.shape)} in {dtype_name(dtype)}"
        got = gelu_by_hand(x)
        wide = torch.nn.functional.gelu(x.double(), approximate="tanh").to(dtype)
        exact = torch.nn.functional.gelu(x.double()).to(dtype)
        hint = "Compare each factor with the formula: 1/2, the square root of 2/pi, 0.044715, the cube."
        comparable = isinstance(got, torch.Tensor) and got.shape == x.shape and dtype is torch.float64
        if comparable and torch.allclose(got.double(), exact.double(), rtol=1e-6, atol=1e-9, equal_nan=True):
            hint = "This is the exact GELU, with erf. Gemma uses the tanh form."
        expect_close(got, wide, rtol=rtol, atol=atol, what=what, hint=hint)


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


@check("4.3", "Kernels per step")
def kernels_per_step(kernels_per_step, seed=None):
    """Check that the kernels of one call are counted, not those of all recorded calls."""
    draw = Draw(seed)
    device = default_device()
    # On a GPU the kernels are long enough to be still in the queue when a step ends.
    x = draw.normal(4096 if device.type == "cpu" else 1 << 24).to(device)
    functions = (torch.sin, torch.cos, torch.tanh, torch.exp, torch.sigmoid)
    for count in (draw.size(2, 4), draw.size(5, 9)):
        chosen = [draw.choice(functions) for _ in range(count)]

        profiled: list[bool] = []
        order: list[str] = []

        def note(enabled, profiled=profiled, order=order):
            profiled.append(bool(enabled))
            order.append("profiled" if enabled else "call")

        def note_wait(order=order):
            order.append("wait")

        @by_value
        def wait(note_wait=note_wait):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            note_wait()

        @by_value
        def chain(chosen=chosen, note=note):
            note(torch.autograd._profiler_enabled())
            y = x
            for function in chosen:
                y = function(y)

        with marked_waits(kernels_per_step, wait):
            got = kernels_per_step(chain)
        expect_value(
            got,
            count,
            "",
            f"kernels_per_step of {count} elementwise operators",
            {
                "That is the sum over the 6 recorded steps.": 6 * count,
                "That is the sum over all 10 calls.": 10 * count,
                "Wait for the GPU before prof.step(): kernels of earlier steps ran in the recorded ones.": round(
                    count * 10 / 6
                ),
            },
        )
        if any(profiled) and (len(profiled) < 3 or profiled[0]):
            raise AssertionError(
                f"kernels_per_step called fn {len(profiled)} times, from the first one on under the profiler: profile it with a "
                "schedule, which waits and warms up first."
            )
        if not any(profiled):
            raise AssertionError(
                "kernels_per_step never called fn under the profiler: what a compiled function launches, only a profile shows."
            )
        after = zip(order, [*order[1:], ""], strict=True)
        waited = [what == "wait" for event, what in after if event == "profiled"]  # one may call fn before, to warm up
        if any(waited) and not all(waited):
            raise AssertionError(
                f"kernels_per_step waits for the device after {sum(waited)} of {len(waited)} profiled calls: call synchronize() before each "
                "prof.step(), as in Question 4.1."
            )


@check("4.4", "The launch queue")
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
