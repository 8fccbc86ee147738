"""Part 1: which backend ran, why a backend refuses, how to pin a backend, and the order of the dispatcher."""

from __future__ import annotations

import warnings

from torch.nn.attention import SDPBackend, sdpa_kernel

from instructor.checks.common import Draw
from instructor.checks.lab4_sdpa.common import (
    KNOCKED_OUT,
    BackendRefused,
    in_one_line,
    knocked_out,
    reasons_of,
    refused_otherwise,
    sdpa_switches,
)
from utils.checking import check

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
