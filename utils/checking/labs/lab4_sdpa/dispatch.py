"""Part 1: which backend ran, why a backend refuses, a pin, and the order in which torch asks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from utils.checking import OperationWatch, expect_close
from utils.checking.labs.lab4_sdpa.common import (
    BACKENDS,
    attentions,
    in_one_line,
    is_refusal,
    replace_answers,
    sdpa_switches,
    visible,
)


def operators_of(call: Callable) -> list[str]:
    """Return the names of the CPU events of call() in torch's profiler, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        call()
    events = sorted(recorded.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events]


def expect_backends(backends_in, operators: list[str], expected: list[str], what: str, hint: str) -> None:
    """Assert the backends that an answer finds in a list of operators."""
    got = backends_in(list(operators))
    got, hint = (list(got), hint) if isinstance(got, list | tuple) else (got, "Return a list of names.")
    shown = ", ".join(operators)[:400]
    assert got == expected, f"backends_in of {what} is {got!r}, expected {expected!r}. {hint}\n  {shown}"


@visible("1.1", "Which backend ran?")
def check_backends_in(backends_in):
    """Check two calls on this CPU, and lists of operators from a GPU."""
    x, turned = torch.randn(1, 2, 16, 32), torch.randn(1, 2, 32, 16).transpose(2, 3)

    def two_calls():
        F.scaled_dot_product_attention(x, x, x)
        F.scaled_dot_product_attention(turned, x, x)

    frame, head = "aten::scaled_dot_product_attention", "aten::_scaled_dot_product_"
    inside = "One attention call leaves several operators, one inside the other; only one of them is in the table."
    cpu = "Look at the table again: on a CPU flash has a name of its own."
    other = ["aten::cudnn_convolution", "flash attention, step 3", "aten::_efficientzerotensor", "math"]
    gpu_backward = ["flash_attention", "flash_attention_backward"]
    cpu_backward = ["flash_attention_for_cpu", "flash_attention_for_cpu_backward"]
    backward = "A backward operator is no call of attention."
    for operators, expected, what, hint in (
        (operators_of(two_calls), ["flash", "math"], "two calls on this CPU", cpu),
        ([frame, head + "flash_attention", "aten::_flash_attention_forward"], ["flash"], "a call of flash", inside),
        ([frame, head + "efficient_attention"], ["efficient"], "a call of efficient", inside),
        ([frame, head + "cudnn_attention", "aten::_cudnn_attention_forward"], ["cudnn"], "a call of cuDNN", inside),
        (other, [], "a program without attention", "Only the operators of the table tell, by their whole names."),
        ([frame, head + "flash_attention"] * 2, ["flash", "flash"], "two calls of flash", "One entry for each call."),
        ([frame, *(head + tail for tail in gpu_backward)], ["flash"], "forward and backward on a GPU", backward),
        ([frame, *(head + tail for tail in cpu_backward)], ["flash"], "forward and backward on a CPU", backward),
    ):
        expect_backends(backends_in, operators, expected, what, hint)


def reasons_by(why_not, backend: str, tensors: tuple, options: dict, what: str) -> list[str]:
    """Return the answer's reasons; assert that they are sentences, and that the call changes no switch."""
    switches, filters = sdpa_switches(), list(warnings.filters)
    got = why_not(backend, *tensors, **options)
    assert sdpa_switches() == switches, (
        f"after {what}, other backends are allowed than before. Use sdpa_kernel in a `with` block: it restores them."
    )
    assert list(warnings.filters) == filters, (
        f"after {what}, the warning filters are others than before: warnings.catch_warnings() restores them."
    )
    if isinstance(got, str) or not isinstance(got, list | tuple) or not all(isinstance(r, str) for r in got):
        raise AssertionError(f"{what} should be a list of sentences, and is {got!r}.")
    for reason in got:
        shown = reason[:160]
        assert "Triggered" not in reason, f"{what}: cut each reason where ' (Triggered internally' begins: {shown!r}"
        assert "not used because" not in reason, (
            f"{what} holds a headline ('... because:'), which is no reason: {shown!r}"
        )
        assert "runtime disabled" not in reason, f"{what} holds {shown!r}: no reason, your own pin switched it off."
    return list(got)


@visible("1.2", "Ask it why")
def check_why_not(why_not):
    """Check calls that run and calls that torch refuses, with warnings on and off, inside and outside of a block."""
    x, turned = torch.randn(2, 2, 16, 32), torch.randn(2, 2, 32, 16).transpose(2, 3)
    blocks = {"": contextlib.nullcontext, " inside of another sdpa_kernel block": lambda: sdpa_kernel(SDPBackend.MATH)}
    for where, block in blocks.items():
        for outside in ("default", "ignore"):
            for name, tensors, options, word in (
                ("plain attention", (x, x, x), {}, ""),
                ("a q with other strides", (turned, x, x), {}, "query.stride(-1): 16"),
                ("a k with other strides", (x, turned, x), {}, "key.stride(-1): 16"),
                ("tensors of two dimensions", (x[0, 0], x[0, 0], x[0, 0]), {}, "4 dimensional"),
                ("narrow values", (x, x, x[..., :8].contiguous()), {}, "value.size(-1): 8"),
                ("dropout", (x, x, x), {"dropout_p": 0.5}, "dropout"),
                ("causal attention", (x, x, x), {"is_causal": True}, ""),
            ):
                with warnings.catch_warnings(), block():
                    warnings.simplefilter(outside)
                    what, by_math = f"why_not of flash for {name}{where}", f"why_not of math for {name}{where}"
                    got = reasons_by(why_not, "flash", tensors, options, what)
                    math_says = reasons_by(why_not, "math", tensors, options, by_math)
                _expect_word(got, word, what, silenced=outside == "ignore")
                assert not math_says, f"{by_math} is {math_says!r}, and math runs it."
    got = reasons_by(why_not, "efficient", (x, x, x), {}, "why_not of efficient")
    exception = "efficient does not exist for CPU tensors, and torch says so in an exception alone: then its first line"
    assert got, f"why_not of efficient is empty. {exception} is the reason."
    assert len(got) == 1 and " " in got[0] and "\n" not in got[0], (
        f"why_not of efficient is {got!r}. {exception} is the only reason."
    )


def _expect_word(got: list[str], word: str, what: str, silenced: bool) -> None:
    """Assert that the reasons contain a word; without a word, assert that there are no reasons."""
    if not word:
        assert not got, f"{what} is {got!r}, but flash runs this here: the list should be empty."
        return
    why = " while the caller silences warnings: open your own filter inside" if silenced else "; torch refuses the call"
    assert got, f"{what} is empty{why}."
    assert any(word in reason.lower() for reason in got), f"{what} is {got!r}, and torch's reason speaks of {word!r}."
    last = "the exception's first line is a reason where no other is left"
    assert not any("no available kernel" in reason.lower() for reason in got), f"{what} is {got!r}: {last}."


def expect_ran_once(ran: list[str], backend: str, what: str) -> None:
    """Assert that one backend computed attention, once."""
    assert set(ran) <= {backend}, f"{what} ran {ran}. A pin allows one backend, alone, also inside of another block."
    assert len(ran) == 1, (
        f"{what} computed attention {len(ran)} times. Compute once: asking first would double every time that you measure."
    )


def expect_pinned(pinned_sdpa, backend: str, tensors: tuple, options: dict) -> tuple[torch.Tensor, str]:
    """Assert that a pin runs its backend once inside of other pins, and restores them; return (result, description)."""
    what = f"pinned_sdpa({backend!r}, q, k, v{''.join(f', {name}=...' for name in options)})"
    got = None
    for outside in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(outside):
            switches = sdpa_switches()
            with OperationWatch() as watch:
                got = pinned_sdpa(backend, *tensors, **options)
            assert sdpa_switches() == switches, f"after {what}, other backends are allowed than before."
        expect_ran_once(attentions(watch), backend, what)
    return got, what


def expect_refused(pinned_sdpa, backend: str, tensors: tuple, options: dict, reasons: list[str], what: str) -> None:
    """Assert that a pin raises BackendRefused with torch's words, computes nothing, and restores all switches."""
    switches = sdpa_switches()
    try:
        with OperationWatch() as watch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without this, torch's warnings would stand above the message of the check
            pinned_sdpa(backend, *tensors, **options)
    except RuntimeError as error:
        said = in_one_line(str(error))
        if not is_refusal(error):
            raise AssertionError(f"pinned_sdpa of {what} should raise BackendRefused, not {error!r:.160}") from None
        missing = [reason for reason in reasons if in_one_line(reason).lower() not in said.lower()]
        assert said and not missing, (
            f"BackendRefused for {what} should hold torch's reason {missing}, and says {said!r}."
        )
        ran = attentions(watch)
        assert not ran, f"pinned_sdpa of {what} computes attention by {ran[0]}, and refuses then."
    else:
        ran = attentions(watch)
        copies = " (on unnecessary copies)" if ran == [backend] else ""
        raise AssertionError(
            f"torch refuses {what}, and pinned_sdpa returned a result all the same{copies}; {ran} ran."
        )
    assert sdpa_switches() == switches, f"after a refusal ({what}), other backends are allowed than before."


def _restore_switches(why_not: Callable) -> Callable:
    """Return the student's why_not, and restore switches after it: a forgotten switch costs points in 1.2 only."""

    def restored(*args, **options):
        with sdpa_kernel(list(BACKENDS.values())):
            return why_not(*args, **options)

    return restored


@visible("1.3", "A pin that pins")
def check_pinned_sdpa(pinned_sdpa):
    """Check calls that run, and calls that torch refuses."""
    x, y, z = torch.randn(3, 2, 4, 16, 32)
    turned, few, mask = torch.randn(2, 4, 32, 16).mT, torch.randn(2, 2, 16, 32), torch.ones(16, 16).tril(2) > 0
    for backend in ("math", "flash"):
        for tensors, options in (
            ((x, y, z), {}),
            ((x, y, z), {"is_causal": True, "scale": 0.3}),
            ((x, y, z), {"attn_mask": mask}),
            ((x, few, few), {"enable_gqa": True}),
        ):
            got, what = expect_pinned(pinned_sdpa, backend, tensors, options)
            expected = F.scaled_dot_product_attention(*tensors, **options)
            expect_close(got, expected, rtol=1e-4, atol=1e-5, what=what, hint="Do all options reach SDPA?")
    wide = {"attn_mask": torch.zeros(16, 19)}
    own = getattr(pinned_sdpa, "__globals__", {}).get("why_not")  # None also if the answer runs in another process
    with replace_answers(pinned_sdpa, {"why_not": _restore_switches(own)} if own else {}):
        for backend, tensors, options, words, what in (
            ("flash", (turned, x, x), {}, ["last dimension"], "flash of a q with other strides"),
            ("flash", (x, x, x), {"dropout_p": 0.5}, ["dropout"], "flash with dropout"),
            ("cudnn", (x, x, x), {}, [], "cudnn on CPU tensors"),
            ("math", (x, x, x), wide, [], "math with a mask of another size"),
        ):
            expect_refused(pinned_sdpa, backend, tensors, options, words, what)


def expect_default(default_backend, capability, cudnn: int, reasons: dict, expected: str, hint: str) -> None:
    """Assert the backend that runs on a GPU; "" stands for BackendRefused."""
    what = f"default_backend(capability={capability}, cudnn={cudnn}, reasons={reasons})"
    try:
        got = default_backend(capability, cudnn, {name: list(texts) for name, texts in reasons.items()})
    except RuntimeError as error:
        if not is_refusal(error):
            raise
        got = ""
    assert not (expected and got == ""), f"{what} raised BackendRefused, and a backend can run. {hint}"
    assert expected or got == "", f"{what} is {got!r}, and each backend has a reason against it: raise BackendRefused."
    assert got == expected, f"{what} is {got!r}. {hint}"


@visible("1.4", "The rule of the order")
def check_default_backend(default_backend):
    """Check GPUs and versions of cuDNN on both sides of the rule, and calls that some backends refuse."""
    both = "cuDNN is asked first where both hold: capability 9.0 or 10.0, and a cuDNN newer than 9.15.0 (91500)."
    later = "A backend with a reason cannot run; the next one in the order of the picture is asked."
    first, last = ["cudnn", "flash", "efficient", "math"], ["flash", "efficient", "math", "cudnn"]
    able: dict[str, list] = {name: [] for name in first}
    cases = [
        ((9, 0), 91900, able, "cudnn", both),
        ((10, 0), 91501, able, "cudnn", both),
        ((10, 1), 92000, able, "flash", both),
        ((9, 0), 91500, able, "flash", both),
        ((9, 0), 91900, {name: ["no"] for name in able}, "", later),
    ]
    for capability, order in (((9, 0), first), ((8, 9), last)):
        for place in (1, 2, 3):  # all backends before this backend have a reason
            cases.append((capability, 91900, able | {name: ["no"] for name in order[:place]}, order[place], later))
    for capability, cudnn, reasons, expected, hint in cases:
        expect_default(default_backend, capability, cudnn, reasons, expected, hint)
