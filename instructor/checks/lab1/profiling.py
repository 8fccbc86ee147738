"""Part 4: traces, GELU, kernel counts, and the model of a launch queue."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import tempfile
from pathlib import Path

import torch

from instructor.checks.common import (
    DTYPES,
    Draw,
    SizeWatch,
    by_value,
    dtype_name,
    expect_unchanged,
    expect_value,
    let_wait,
)
from utils.checking import MATMUL, check, expect_close, forbid, forbid_leaving, watch_operations
from utils.checking.altered import Altered
from utils.checking.profiles import marked_waits, steps_that_wait, wait_with_mark, waits_before
from utils.checking.sizes import MOVES, tensors_in
from utils.checking.watching import demand
from utils.machine.device import default_device

# Or it waits by a function of torch's, which leaves no mark.
_NO_WAIT = "calls the notebook's synchronize() by that name in no step of its profile"


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
    if (waits := steps_that_wait(events, "aten::erfinv")) is None:
        let_wait(_NO_WAIT)
    elif waits < 6:
        raise AssertionError(
            f"{waits} of 6 recorded steps wait for the device after fn and before they end: call synchronize() between fn() and "
            "prof.step()."
        )
    elif (waited := sum(pair == ("fn", "wait") for pair in itertools.pairwise(calls))) < 10:
        raise AssertionError(
            f"{waited} of the 10 calls of fn are followed by synchronize(). In the steps before the first recorded one it is needed, too: "
            "what has not ended when the recording begins ends inside of it."
        )
    elif waits_before(events, "aten::erfinv") >= _waits_behind(calls, 4):
        raise AssertionError(
            "the last step before the recorded ones calls synchronize() behind its prof.step(): what it left on the device ends inside "
            "of the first recorded step. Wait between fn() and prof.step(), in all ten steps."
        )


def _waits_behind(calls: list[str], number: int) -> int:
    """Return how many waits there are between a call of fn, counted from 1, and the next one."""
    places = [i for i, what in enumerate(calls) if what == "fn"]
    return places[number] - places[number - 1] - 1


_LOOKUPS = (
    "gather",
    "take",
    "take_along_dim",
    "index_select",
    "searchsorted",
    "bucketize",
    "embedding",
    r"grid_sample\w*",
)
_EXPONENTIALS = (r"tanh|erfc?|sinh|cosh|exp2?|expm1|\w*sigmoid|expit|rpow",)  # e ** x
_POWERS = (r"pow|float_power",)  # e ** x is a power, but x ** 3 is one, too
_MORE = 0.25  # than an exponential really is
_FOLLOWS = 0.002  # what that changes GELU by between 0.5 and 1, at least: by 0.006 to 0.1 in the forms that we know
_CONSTANTS = 4  # of the formula, that may be computed by torch and read


@check("4.2", "GELU by hand")
def gelu_by_hand(gelu_by_hand, seed=None):
    """Check the tanh form of GELU, made of elementwise operators, on any shape and dtype."""
    draw = Draw(seed)
    x = draw.normal(3, 5)
    right = torch.nn.functional.gelu(x.double(), approximate="tanh").float()
    with watch_operations() as watch:
        watched = gelu_by_hand(x)
    forbid(watch, ("gelu", r"\w*gelu\w*", *MATMUL), hint="write the formula from +, * and torch.tanh")
    forbid(
        watch, _LOOKUPS, hint="an elementwise operator computes each element from its own input, and looks nothing up"
    )
    forbid_leaving(watch)
    if sum(watch.exits.values()) > _CONSTANTS:
        raise AssertionError(
            f"gelu_by_hand took {sum(watch.exits.values())} single numbers out of torch. Write it from operators on whole tensors."
        )
    few, many = (draw.size(2, 5), draw.size(20, 40)), (draw.size(150, 250), draw.size(300, 400))
    # A constant in float32, such as torch.sqrt(torch.tensor(2 / math.pi)), is right in float64, too.
    for dtype, shape, rtol, atol in (
        (torch.float64, few, 1e-5, 1e-7),
        (torch.float32, few, 1e-4, 1e-6),
        (torch.float32, many, 1e-4, 1e-6),
        (torch.bfloat16, many, 3e-2, 3e-2),
    ):
        x = 3 * draw.normal(*shape, dtype=dtype)
        x[0, :4] = torch.tensor([0.0, -30.0, 30.0, math.nan], dtype=dtype)
        before = x.clone()
        what = f"gelu_by_hand of {tuple(x.shape)} in {dtype_name(dtype)}"
        with watch_operations() as every:
            got = gelu_by_hand(x)
        forbid(every, (r"\w*gelu\w*", *MATMUL, *_LOOKUPS), hint="write the formula from +, * and torch.tanh")
        expect_unchanged((before,), (x,), what)
        wide = torch.nn.functional.gelu(before.double(), approximate="tanh").to(dtype)
        exact = torch.nn.functional.gelu(before.double()).to(dtype)
        hint = "Compare each factor with the formula: 1/2, the square root of 2/pi, 0.044715, the cube."
        comparable = isinstance(got, torch.Tensor) and got.shape == x.shape and dtype is torch.float64
        if comparable and torch.allclose(got.double(), exact.double(), rtol=1e-6, atol=1e-9, equal_nan=True):
            hint = "This is the exact GELU, with erf. Gemma uses the tanh form."
        expect_close(got, wide, rtol=rtol, atol=atol, what=what, hint=hint)
    expect_close(watched, right, rtol=1e-4, atol=1e-6, what="gelu_by_hand of (3, 5)")
    _let_parts_wait(gelu_by_hand, draw)
    for shape in ((3, 5), many):
        _expect_exponentials_used(gelu_by_hand, draw, shape)


class _Amounts(SizeWatch):
    """Records how many real numbers each operator computes on, constants not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.amounts: dict[int, str] = {}  # numbers -> an operator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.split("::")[1].rstrip("_")
        amount = max((t.numel() for t in tensors_in((*args, result)) if t.is_floating_point()), default=0)
        if name not in MOVES and amount > _CONSTANTS:
            self.amounts[amount] = name
        return result


def _let_parts_wait(gelu_by_hand, draw: Draw) -> None:
    """Let an answer wait that computes on parts of a tensor, or on more numbers than it has, such as a table."""
    x = draw.normal(draw.size(30, 40), draw.size(30, 40))
    with _Amounts() as watch:
        gelu_by_hand(x)
    for amount, name in watch.amounts.items():
        if amount != x.numel():
            let_wait(f"computes on {amount:,} numbers at once (in {name}), and x has {x.numel():,}")


def _expect_exponentials_used(gelu_by_hand, draw: Draw, shape: tuple[int, int]) -> None:
    """Assert that the result is made of a tanh or of exponentials: when these are larger, each element changes."""
    x = draw.normal(*shape)
    x = (0.5 + 0.5 * x.abs() / x.abs().max()) * x.sign()
    with watch_operations() as watch:
        right = gelu_by_hand(x)
    with watch_operations(), Altered((*_EXPONENTIALS, *_POWERS), _MORE):
        got = gelu_by_hand(x)
    if bool(((got - right).abs() > _FOLLOWS).all()):
        return
    demand(
        watch,
        (*_EXPONENTIALS, *_POWERS),
        hint="the formula has the tanh of each element, or exponentials that make one",
    )
    called, ran = (
        any(re.fullmatch(_EXPONENTIALS[0], name.strip("_")) for name in names)
        for names in (watch.calls, watch.operations)
    )
    if ran and not called:  # by compiled code
        let_wait(
            "has a tanh or an exponential that is called where the check cannot tell whether the result is made of it"
        )
        return
    raise AssertionError(
        "the tanh of gelu_by_hand, or its exponentials, does not reach the result: when what they return is larger by a quarter, some "
        "elements stay as they were. Compute each element from its own tanh, as in the formula."
    )


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
        if not any(waited):
            let_wait(_NO_WAIT)
        elif not all(waited):
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
