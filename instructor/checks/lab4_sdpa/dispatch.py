"""Part 1: which backend ran, why a backend refuses, how to pin a backend, and the order of the dispatcher."""

from __future__ import annotations

import itertools
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from instructor.checks.common import Draw, SizeWatch, expect_unchanged, let_wait
from instructor.checks.lab4_sdpa.common import (
    BACKENDS,
    KNOCKED_OUT,
    Attentions,
    BackendRefused,
    in_one_line,
    knocked_out,
    reasons_of,
    refused_otherwise,
    sdpa_switches,
    with_right_answers,
)
from utils.checking import check, expect_close

_OPERATORS = {
    "math": ("aten::_scaled_dot_product_attention_math",),
    "flash": ("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    "efficient": ("aten::_scaled_dot_product_efficient_attention",),
    "cudnn": ("aten::_scaled_dot_product_cudnn_attention",),
}
_INSIDE = {
    "aten::_scaled_dot_product_attention_math": ("aten::mul", "aten::matmul", "aten::bmm", "aten::_safe_softmax"),
    "aten::_scaled_dot_product_flash_attention": ("aten::transpose", "aten::_flash_attention_forward", "aten::empty"),
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("aten::empty_like", "aten::transpose"),
    "aten::_scaled_dot_product_efficient_attention": ("aten::_efficient_attention_forward", "aten::empty"),
    "aten::_scaled_dot_product_cudnn_attention": ("aten::_cudnn_attention_forward", "aten::zeros"),
}
_BETWEEN = (
    "aten::linear",
    "aten::add",
    "flash attention, step 3",
    "cudnn warm-up",
    "aten::_efficientzerotensor",
    "aten::cudnn_convolution",
    "math",
)
_BACKWARD = (
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention_backward",
    "aten::_flash_attention_backward",
)


@check("1.1", "Which backend ran?")
def backends_in(backends_in, seed=None):
    """Check operator lists of a GPU and of a CPU, with nested, other and backward operators."""
    draw = Draw(seed)

    def expect(operators: list[str], expected: list[str], what: str, hint: str) -> None:
        got = backends_in(list(operators))
        got = list(got) if isinstance(got, tuple) else got
        if got != expected:
            shown = ", ".join(name.removeprefix("aten::") for name in operators)
            raise AssertionError(f"backends_in gives {got!r} for {what}, expected {expected!r}: {shown}. {hint}")

    for backend, names in _OPERATORS.items():
        for name in names:
            operators = ["aten::scaled_dot_product_attention", name, *_INSIDE[name]]
            expect(
                operators,
                [backend],
                f"one call that ran {backend}",
                "One attention call leaves several operators, one inside the other; only one of them is in the table.",
            )
    expect(
        ["aten::linear", "aten::cudnn_convolution", "cudnn warm-up", "aten::softmax"],
        [],
        "a program without attention",
        "Only the operators of the table tell.",
    )
    same = ["aten::scaled_dot_product_attention", _OPERATORS["flash"][0]] * 2
    expect(same, ["flash", "flash"], "two calls that both ran flash", "One entry for each call.")
    expect(
        ["aten::scaled_dot_product_attention", _OPERATORS["flash"][0], _BACKWARD[0], _BACKWARD[4]],
        ["flash"],
        "a forward and a backward pass",
        "A backward operator is no call of attention.",
    )
    for _ in range(3):
        operators, expected = [], []
        for _ in range(draw.size(3, 6)):
            backend = draw.choice(tuple(_OPERATORS))
            name = draw.choice(_OPERATORS[backend])
            operators += [draw.choice(_BETWEEN), "aten::scaled_dot_product_attention", name, *_INSIDE[name]]
            expected.append(backend)
        operators += [draw.choice(_BACKWARD) for _ in range(3)]
        expect(operators, expected, f"{len(expected)} calls", "One entry for each call, in their order.")


def _expect_reasons(got: object, what: str) -> list[str]:
    if isinstance(got, str) or not isinstance(got, list | tuple) or not all(isinstance(r, str) for r in got):
        raise AssertionError(f"{what} should be a list of sentences, and is {got!r}.")
    for reason in got:
        if "Triggered internally" in reason:
            raise AssertionError(f"{what} holds {reason[:160]!r} ...: cut it where ' (Triggered internally' begins.")
        if "not used because" in reason or "runtime disabled" in reason:
            raise AssertionError(
                f"{what} holds {reason!r}, which is no reason: it heads the reasons, or names a "
                "backend that the pin switched off."
            )
    if len(set(got)) != len(got):
        raise AssertionError(f"{what} says something twice: {got!r}. Each reason once.")
    return list(got)


def _expect_all_reasons(got: list[str], expected: list[str], what: str) -> None:
    """Assert that the reasons are torch's own for this call: all of them, each whole, and no others."""
    wanted, said = [in_one_line(reason) for reason in expected], [in_one_line(reason) for reason in got]
    if strange := [reason for reason in said if reason not in wanted]:
        raise AssertionError(
            f"{what} says {strange[0]!r}, and torch does not say that about this call. Torch's reason is: {wanted[0]!r}, whole "
            "and word for word."
        )
    if missing := [reason for reason in wanted if reason not in said]:
        raise AssertionError(f"{what} gives {got!r}. Torch's reason is: {missing[0]}")


@check("1.2", "Ask it why")
def why_not(why_not, seed=None):
    """Check real refusals of this torch, also with warnings off and inside other contexts, and calls that run."""
    draw = Draw(seed)
    b, h, s, d = draw.size(1, 2), draw.size(2, 4), draw.size(9, 20), 8 * draw.size(2, 5)
    q, k, v = (draw.normal(b, h, s, d) for _ in range(3))
    for backend in ("math", "flash"):
        for options in ({}, {"is_causal": True}):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got = _ask(why_not, backend, (q, k, v), options, f"why_not({backend!r}, q, k, v)")
            if got:
                raise AssertionError(
                    f"why_not({backend!r}, q, k, v, {options}) is {got!r}, but {backend} runs this "
                    "here: the list should be empty."
                )
    for name in draw.numbers.sample(KNOCKED_OUT, len(KNOCKED_OUT)):
        tensors, options = knocked_out(name, q, k, v)
        expected = reasons_of("flash", *tensors, **options)
        for outside in ("default", "ignore"):
            with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
                warnings.simplefilter(outside)
                got = _ask(why_not, "flash", tensors, options, f"why_not of flash with {name}")
            if not got:
                hint = " while the caller silences warnings: open your own filter inside" if outside == "ignore" else ""
                raise AssertionError(f"why_not says that flash runs {name}{hint}. Torch refuses: {expected[0]}")
        _expect_all_reasons(got, expected, f"why_not of flash with {name}")
        if _ask(why_not, "math", tensors, options, f"why_not of math with {name}"):
            raise AssertionError(f"math takes everything, also {name}: why_not('math', ...) should be empty.")
    if not _ask(why_not, "efficient", (q, k, v), {}, "why_not('efficient', q, k, v) on CPU tensors"):
        raise AssertionError(
            "the efficient backend is CUDA only, and why_not of it is empty for CPU tensors. Torch "
            "says so in an exception alone: then its first line is the reason."
        )
    q, k, v = (draw.normal(2, 4, s, d) for _ in range(3))
    for name in draw.some(2, KNOCKED_OUT):
        _expect_two_reasons(why_not, draw, *knocked_out(name, q, k, v), name)
    for name, (backend, tensors, options) in refused_otherwise(q, k, v).items():
        if backend == "math":
            continue  # whoever asks the dispatcher gets no reason, since it takes the call
        what = f"why_not of {name}"
        _expect_all_reasons(
            _ask(why_not, backend, tensors, options, what), reasons_of(backend, *tensors, **options), what
        )


def _ask(why_not, backend: str, tensors, options: dict, what: str) -> list[str]:
    """Return the reasons that an answer gives; everything has to be as before, whether it finds some or not."""
    switches, filters = sdpa_switches(), list(warnings.filters)
    got = why_not(backend, *tensors, **options)
    if sdpa_switches() != switches:
        raise AssertionError(
            f"after {what}, other backends are allowed than before. Use sdpa_kernel in a `with` block: it restores them."
        )
    if list(warnings.filters) != filters:
        raise AssertionError(
            f"after {what}, the warning filters are others than before: warnings.catch_warnings() restores them."
        )
    return _expect_reasons(got, what)


class _OneReasonMore(TorchFunctionMode):
    """Lets SDPA and its dispatcher warn of one reason more than they have, as a GPU's flash does that has two, and say it twice."""

    def __init__(self, reason: str):
        super().__init__()
        self.reason = reason

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = str(getattr(func, "__name__", func))
        if "scaled_dot_product" in name or "sdp_choice" in name:
            for _ in range(2):
                warnings.warn(f"{self.reason} (Triggered internally at sdp_utils.cpp:1.)", stacklevel=2)
        return func(*args, **(kwargs or {}))


def _expect_two_reasons(why_not, draw: Draw, tensors, options: dict, name: str) -> None:
    """Assert that a reason that nobody could foresee is among those that are given: they come from the call's own warnings."""
    sizes = ", ".join(str(draw.size(1, 9999)) for _ in range(200))  # as long as no reason of torch's is
    reason = f"Flash attention is not made for calls of kind {draw.size(1000, 9999)}. Got sizes: [{sizes}]."
    expected = reasons_of("flash", *tensors, **options)
    what = f"why_not of flash with {name}, of which torch warns for two reasons, one of them twice,"
    with _OneReasonMore(reason):
        got = _ask(why_not, "flash", tensors, options, what)
    _expect_all_reasons(got, [reason, *expected], what)


@check("1.3", "A pin that pins")
def pinned_sdpa(pinned_sdpa, seed=None):
    """Check that only the requested backend runs, or an error has torch's reason, and that all settings are restored."""
    draw = Draw(seed)
    (q, k, v), calls = _calls_to_pin(draw, draw.size(9, 20), 16)
    calls += _calls_to_pin(draw, draw.size(100, 300), draw.choice((16, 32)))[1]
    switches = sdpa_switches()
    with with_right_answers(pinned_sdpa):
        for backend in ("math", "flash"):
            for tensors, options in calls:
                what = f"pinned_sdpa({backend!r}, q, k, v{', ' if options else ''}{', '.join(options)})"
                copies = [t.clone() for t in tensors]
                for outside in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
                    with sdpa_kernel(outside), Attentions() as ran:
                        got = pinned_sdpa(backend, *tensors, **options)
                    _expect_ran(ran.backends, backend, what)
                expect_unchanged(copies, tensors, what)
                expected = F.scaled_dot_product_attention(*(t.double() for t in tensors), **_in_float64(options))
                near = {"rtol": 1e-4, "atol": 1e-5} if tensors[0].itemsize > 2 else {"rtol": 3e-2, "atol": 3e-2}
                expect_close(got, expected.to(tensors[0].dtype), **near, what=what, hint="Do all options reach SDPA?")
        for name in KNOCKED_OUT:
            tensors, options = knocked_out(name, q, k, v)
            _expect_refusal(pinned_sdpa, "flash", tensors, options, f"flash with {name}")
            if sdpa_switches() != switches:
                raise AssertionError(f"after a refusal (flash with {name}), other backends are allowed than before.")
        for name, (backend, tensors, options) in refused_otherwise(q, k, v).items():
            _expect_refusal(pinned_sdpa, backend, tensors, options, name)
        for backend, (tensors, options) in itertools.product(("flash", "math"), calls):
            _expect_nothing_beside(pinned_sdpa, backend, tensors, options)
            if "enable_gqa" not in options:
                views = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
                _expect_nothing_beside(pinned_sdpa, backend, views, options)
        _expect_ran_once_with_dropout(pinned_sdpa, q, k, v)
        _expect_alone(pinned_sdpa, q, k, v)
    if sdpa_switches() != switches:
        raise AssertionError(
            "after pinned_sdpa, other backends are switched on than before: use sdpa_kernel in a "
            "`with` block, which restores them."
        )


def _calls_to_pin(draw: Draw, length: int, d: int) -> tuple[tuple, list[tuple[tuple, dict]]]:
    """Return (q, k, v), and calls that flash and math run: [((q, k, v), options)]."""
    q, k, v = (draw.normal(2, 4, length, d) for _ in range(3))
    grouped = [draw.normal(2, 2, length, d) for _ in range(2)]
    mask = draw.normal(length, length) > 0
    mask[:, 0] = True
    calls: list[tuple[tuple, dict]] = [
        ((q, k, v), {}),
        ((q, k, v), {"is_causal": True, "scale": 0.5}),
        ((q, k, v), {"attn_mask": mask}),
        ((q, *grouped), {"enable_gqa": True}),
        ((q, k, v), {"attn_mask": draw.normal(length, length)}),
    ]
    calls += [
        ((q, k, v), {"attn_mask": mask, "scale": 0.25}),
        ((q, *grouped), {"attn_mask": mask, "enable_gqa": True}),
        ((q, *grouped), {"is_causal": True, "scale": 0.75, "enable_gqa": True}),
    ]
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        calls.append((tuple(t.to(dtype) for t in (q, k, v)), {"is_causal": draw.choice((True, False))}))
    calls.append((tuple(t[:1, :1] for t in (q, k, v)), {}))
    return (q, k, v), calls


def _in_float64(options: dict) -> dict:
    """Return options whose mask of numbers, if there is one, is in float64."""
    mask = options.get("attn_mask")
    return {**options, "attn_mask": mask.double()} if mask is not None and mask.is_floating_point() else options


class _AloneOrZeros(TorchFunctionMode):
    """Lets SDPA run where one backend is allowed, and gives zeros where several are."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if "scaled_dot_product" in str(getattr(func, "__name__", func)):
            names = ("flash", "mem_efficient", "math", "cudnn")
            if sum(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in names) > 1:
                return torch.zeros(3)
        return func(*args, **(kwargs or {}))


def _expect_alone(pinned_sdpa, q, k, v) -> None:
    """Assert that a backend that no CPU has is allowed alone, too."""
    for backend in ("efficient", "cudnn", "math"):
        what = f"pinned_sdpa({backend!r}, q, k, v)"
        try:
            with _AloneOrZeros():
                got = pinned_sdpa(backend, q, k, v)
        except Exception as error:
            if backend == "math" or type(error).__name__ != "BackendRefused":
                raise
            continue
        if backend != "math" or got.shape != q.shape:
            raise AssertionError(
                f"{what} calls SDPA where several backends are allowed. A pin allows one backend, alone."
            )


def _expect_ran_once_with_dropout(pinned_sdpa, q, k, v) -> None:
    """Assert that math computes a call with dropout once; what comes out is drawn."""
    options = {"dropout_p": 0.25}
    what = "pinned_sdpa('math', q, k, v, dropout_p=0.25)"
    with Attentions() as ran:
        got = pinned_sdpa("math", q, k, v, **options)
    _expect_ran(ran.backends, "math", what)
    if not isinstance(got, torch.Tensor) or got.shape != q.shape:
        raise AssertionError(f"{what} should be a tensor of shape {tuple(q.shape)}.")
    if torch.allclose(got, pinned_sdpa("math", q, k, v), rtol=1e-3, atol=1e-3):
        raise AssertionError(f"{what} drops nothing: all options go through to SDPA.")
    _expect_nothing_beside(pinned_sdpa, "math", (q, k, v), options)


def _expect_nothing_beside(pinned_sdpa, backend: str, tensors, options: dict) -> None:
    """Assert that the inputs are handed on as they are, in whatever way they could be copied."""
    with SizeWatch() as own, sdpa_kernel(BACKENDS[backend]):
        F.scaled_dot_product_attention(*tensors, **options)
    with SizeWatch() as sizes:
        pinned_sdpa(backend, *tensors, **options)
    what = f"pinned_sdpa of {backend}{' with ' if options else ''}{', '.join(options)}"
    if sizes.moved > own.moved:
        raise AssertionError(
            f"{what} copies {sizes.moved:,} elements, and {backend} by itself {own.moved:,}: it runs these "
            "tensors as they are. No copies of the inputs that nobody asked for."
        )
    # What computes copies as well: t * 1 is t once more.
    smallest = min(t.numel() for t in tensors)
    if (more := sizes.created_in_all - own.created_in_all) >= smallest:
        raise AssertionError(
            f"{what} makes tensors of {more:,} elements more than {backend} by itself. Hand q, k and v on as they "
            "are: no copies of the inputs that nobody asked for."
        )
    if sizes.read - own.read >= smallest:
        let_wait(
            f"runs operators on q, k or v beside those of {backend} itself: do they copy the inputs, into memory that was there before?"
        )


def _expect_ran(ran: list[str], backend: str, what: str) -> None:
    if set(ran) - {backend}:
        other = next(name for name in ran if name != backend)
        raise AssertionError(f"{what} ran {other}. A pin allows one backend, alone.")
    if len(ran) != 1:
        raise AssertionError(
            f"{what} computed attention {len(ran)} times. Where the backend takes the call, compute "
            "once: asking first would double every time that you measure."
        )


def _expect_refusal(pinned_sdpa, backend: str, tensors, options, what: str) -> None:
    expected = reasons_of(backend, *tensors, **options)
    try:
        with Attentions() as ran:
            pinned_sdpa(backend, *tensors, **options)
    except Exception as error:
        if type(error).__name__ != "BackendRefused":
            raise AssertionError(
                f"pinned_sdpa of {what} should raise BackendRefused, and raised "
                f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            ) from None
        if not all(in_one_line(reason) in in_one_line(str(error)) for reason in expected):
            raise AssertionError(
                f"the message of BackendRefused for {what} should hold torch's reason "
                f"({expected[0]!r}), and is {str(error)!r}."
            ) from None
        if ran.backends:
            raise AssertionError(
                f"pinned_sdpa of {what} raises BackendRefused, and computes attention by {ran.backends[0]} before. No other backend."
            ) from None
        return
    also = " (on copies, which the caller did not ask for)" if ran.backends and ran.backends[0] == backend else ""
    raise AssertionError(
        f"torch refuses {what}, and pinned_sdpa returned a result all the same{also}; what ran is "
        f"{', '.join(ran.backends) or 'unknown'}. Raise BackendRefused."
    )


@check("1.4", "The order of priority")
def dispatch(dispatch, seed=None):
    """Check random orders, subsets and refusals."""
    draw = Draw(seed)
    names = ["math", "flash", "efficient", "cudnn"]
    for case in range(30):
        order = draw.numbers.sample(names, 4)
        allowed = draw.numbers.sample(names, draw.size(1, 4))
        refused = {name: ["no"] if draw.size(0, 2) == 0 else [] for name in names}
        first = case % 2 == 1
        if case < 2:
            allowed, refused = order[2:0:-1], {name: [] for name in names}
        if case in (10, 11):  # no allowed backend can run, and another backend could
            allowed, refused = order[:2], {name: ["no"] if name in order[:2] else [] for name in names}
        asked = [*allowed, *(name for name in order if name not in allowed)] if first else order
        able = [name for name in asked if name in allowed and not refused[name]]
        what = f"dispatch(order={order}, allowed={allowed}, reasons={refused}, set_priority={first})"
        kept = list(order), list(allowed), {name: list(r) for name, r in refused.items()}
        try:
            got = dispatch(order, allowed, refused, first)
        except Exception as error:
            if type(error).__name__ != "BackendRefused":
                raise
            got = BackendRefused
        if (order, allowed, refused) != kept:
            raise AssertionError("dispatch changed one of its arguments. Work on copies of the lists.")
        if able and got is BackendRefused:
            raise AssertionError(f"{what} raised BackendRefused, and {able[0]} can run.")
        if not able and got is not BackendRefused:
            raise AssertionError(f"{what} is {got!r}, and no backend that is allowed can run: raise BackendRefused.")
        if able and got != able[0]:
            hint = ""
            if refused.get(got):
                hint = " A backend with a reason cannot run."
            elif got not in allowed:
                hint = " That one is not allowed."
            elif not first:
                hint = " Without set_priority, the order of `allowed` says nothing: it is a set."
            else:
                hint = " With set_priority, the allowed backends are asked in the order in which they were given."
            raise AssertionError(f"{what} is {got!r}, expected {able[0]!r}.{hint}")
