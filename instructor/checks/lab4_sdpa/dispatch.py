"""Part 1: which backend ran, why a backend refuses, how to pin a backend, and the order of the dispatcher."""

from __future__ import annotations

import functools
import warnings

from torch.nn.attention import SDPBackend, sdpa_kernel

from instructor.checks.common import Draw
from instructor.checks.lab4_sdpa.common import KNOCKED_OUT, knock_out, other_refusals, reasons_of
from utils.checking.labs.lab4_sdpa.common import check, in_one_line
from utils.checking.labs.lab4_sdpa.dispatch import expect_backends, expect_default, reasons_by

_OTHER_CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (10, 1), (12, 0))
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

    expect = functools.partial(expect_backends, backends_in)
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


def _expect_all_reasons(got: list[str], expected: list[str], what: str) -> None:
    """Assert that the answer gives all of torch's reasons for this call, in full, and no further reasons."""
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
    """Check calls that run, and calls that torch refuses, also with warnings off and inside of other contexts."""
    draw = Draw(seed)
    b, h, s, d = draw.size(1, 2), draw.size(2, 4), draw.size(9, 20), 8 * draw.size(2, 5)
    q, k, v = (draw.normal(b, h, s, d) for _ in range(3))
    for backend in ("math", "flash"):
        for options in ({}, {"is_causal": True}):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got = reasons_by(why_not, backend, (q, k, v), options, f"why_not({backend!r}, q, k, v)")
            if got:
                raise AssertionError(
                    f"why_not({backend!r}, q, k, v, {options}) is {got!r}, but {backend} runs this "
                    "here: the list should be empty."
                )
    for name in draw.numbers.sample(KNOCKED_OUT, len(KNOCKED_OUT)):
        tensors, options = knock_out(name, q, k, v)
        expected = reasons_of("flash", *tensors, **options)
        for outside in ("default", "ignore"):
            with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
                warnings.simplefilter(outside)
                got = reasons_by(why_not, "flash", tensors, options, f"why_not of flash with {name}")
            if not got:
                hint = " while the caller silences warnings: open your own filter inside" if outside == "ignore" else ""
                raise AssertionError(f"why_not says that flash runs {name}{hint}. Torch refuses: {expected[0]}")
        _expect_all_reasons(got, expected, f"why_not of flash with {name}")
        if reasons_by(why_not, "math", tensors, options, f"why_not of math with {name}"):
            raise AssertionError(f"math takes everything, also {name}: why_not('math', ...) should be empty.")
    if not reasons_by(why_not, "efficient", (q, k, v), {}, "why_not('efficient', q, k, v) on CPU tensors"):
        raise AssertionError(
            "the efficient backend is CUDA only, and why_not of it is empty for CPU tensors. Torch "
            "says so in an exception alone: then its first line is the reason."
        )
    q, k, v = (draw.normal(2, 4, s, d) for _ in range(3))
    for name, (backend, tensors, options) in other_refusals(q, k, v).items():
        if backend == "math":
            continue  # the dispatcher accepts the call, so it gives no reason
        what = f"why_not of {name}"
        _expect_all_reasons(
            reasons_by(why_not, backend, tensors, options, what), reasons_of(backend, *tensors, **options), what
        )


@check("1.4", "The rule of the order")
def default_backend(default_backend, seed=None):
    """Check random GPUs, versions of cuDNN and refusals."""
    draw = Draw(seed)
    for case in range(40):
        capability = draw.choice(((9, 0), (10, 0))) if case % 2 else _OTHER_CAPABILITIES[case // 2 % 6]
        cudnn = (91501, 91600, 91900, 92001)[case // 4 % 4] if case % 4 < 2 else (91500, 90100, 91002)[case // 4 % 3]
        refused = {name: ["no"] if draw.size(0, 2) == 0 else [] for name in _OPERATORS}
        if case < 4:
            refused = {name: [] for name in _OPERATORS}
        if case in (10, 11):
            refused = {name: ["no"] for name in _OPERATORS}
        if case in (12, 13):
            refused |= {"flash": ["no"], "efficient": ["no"], "math": [], "cudnn": []}
        first = capability in ((9, 0), (10, 0)) and cudnn > 91500
        order = ("cudnn", "flash", "efficient", "math") if first else ("flash", "efficient", "math", "cudnn")
        right = next((name for name in order if not refused[name]), "")
        hint = f"Torch asks in the order {', '.join(order)} there, and a backend with a reason cannot run."
        expect_default(default_backend, capability, cudnn, refused, right, hint)
