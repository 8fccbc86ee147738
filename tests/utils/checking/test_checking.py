"""Verdicts, closeness and numbers: what a student is told."""

import ast
import functools
import logging
import os
import sys

import numpy as np
import pytest
import torch

from utils.checking import (
    MATMUL,
    Answer,
    AnswerNeeded,
    Verdict,
    WrongAnswer,
    check,
    expect_close,
    expect_number,
    expect_rounded_once,
    is_answered,
    quiet_stderr,
    visible,
)
from utils.checking.verdicts import missing_answer, watch_cells

# --- verdicts ---


def test_verdict_raises_its_message_if_wrong(capsys):
    with pytest.raises(AssertionError, match=r"^Question 1\.1: too small$"):
        Verdict("1.1", False, "too small").raise_if_wrong()
    assert Verdict("1.1", True).raise_if_wrong() is None
    assert capsys.readouterr().out == "✓ Question 1.1: passed.\n"


# --- @check ---


@check("2.3", "Doubling")
def check_double(double, seed=None):
    """Double a tensor."""
    x = torch.arange(4.0)
    expect_close(double(x), 2 * x, rtol=0, atol=0, what="double(x)")


def verdict_of(answer):
    verdict = check_double(answer)
    assert isinstance(verdict, Verdict) and verdict.question == "2.3"
    return verdict


def test_a_right_answer_passes_and_a_wrong_one_fails_with_the_assertion():
    assert verdict_of(lambda x: x + x) == Verdict("2.3", True, "Doubling: passed.")
    verdict = verdict_of(lambda x: x)
    assert not verdict.passed and "wrong in 3 of 4 elements" in verdict.message


def test_exception_becomes_a_verdict_with_type_message_and_line():
    def helper(x):
        return x.no_such_method()

    def double(x):
        return helper(x)

    message = verdict_of(double).message
    assert "AttributeError" in message and "no_such_method" in message
    assert "in helper, line" in message and "return x.no_such_method()" in message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("assert x.dim() == 2, 'want a matrix'", "want a matrix\n  in double, line 5"),
        ("raise NotImplementedError()", "Question 2.3 is not answered yet."),
        ("for _ in range(1): raise NotImplementedError", "Question 2.3 is not answered yet."),
        ("return earlier(x)", "Question 2.3 calls earlier, which is not answered yet."),
        ("return torch.nonzero(x.to('meta'))", "raised NotImplementedError: "),  # an operator that torch lacks
        ("sys.exit(0)", "SystemExit"),
        ("return double(x)", "RecursionError"),
        ("raise ValueError('long ' * 1000)", "ValueError: long long"),
    ],
)
def test_what_is_said_of_an_answer_that_raises(body, words):
    names = {"torch": torch, "sys": sys}
    exec(f"def earlier(x):\n    raise NotImplementedError()\n\ndef double(x):\n    {body}", names)
    message = verdict_of(names["double"]).message
    assert words in message and len(message) < 800
    assert ("not answered" in words) == ("not answered" in message)


def test_of_two_answers_the_missing_one_is_named():
    def later():
        raise NotImplementedError

    judge = check("2.3")(lambda double, halve: None)
    assert judge(later, later).message == "Question 2.3 is not answered yet."
    assert judge(abs, later).message == "halve is not answered yet."


def test_keyboard_interrupt_passes_through():
    def interrupt(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_double(interrupt)


def test_stderr_stays_quiet_and_the_text_is_kept(capfd):
    logger = logging.getLogger("test_checking")
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    with quiet_stderr():
        print("one", file=sys.stderr)
        os.write(2, b"two\n")
        logger.warning("three")
    logger.removeHandler(handler)
    print("after", file=sys.stderr)
    out, err = capfd.readouterr()
    assert err == "after\n"
    assert all(word in out for word in ("one", "two", "three"))


# --- answered or not ---


def _stub(x):
    raise NotImplementedError()


def _stub_with_start(x):
    y = x + 1
    raise NotImplementedError([y])


def _stub_generator(x):
    raise NotImplementedError()
    yield x


def _guarded(x):
    if x < 0:
        raise NotImplementedError
    return x


class _Unfinished:
    def __init__(self):
        self.x = 1

    def run(self):
        raise NotImplementedError()


DECORATED = [torch.no_grad()(_stub), functools.partial(_stub, 1), functools.cache(_stub)]


@pytest.mark.parametrize("value", [None, ..., _stub, _stub_with_start, _stub_generator, _Unfinished().run, *DECORATED])
def test_not_answered(value):
    assert not is_answered(value)


@pytest.mark.parametrize(
    "value", [0, 0.0, "", [], torch.zeros(1), _guarded, lambda x: x, len, torch.mm, torch.nn.Linear]
)
def test_answered(value):
    assert is_answered(value)


def test_a_stub_of_triton_is_seen_through():
    triton = pytest.importorskip("triton", reason="Triton has no wheels for this platform")
    assert not is_answered(triton.jit(_stub)) and is_answered(triton.jit(_guarded))


def _of_two(gone, text: str = ""):
    pass


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("gemm(1); x", None),
        ("check_two(stub, gemm)", None),  # it says that the stub is not answered
        ("stub(1) if is_answered(stub) else 2", None),
        ("def helper():\n    return stub(1)", "This cell needs Question 1.2 (stub): answer it first."),
        ("def gone():\n    return stub(1)", None),  # an answer may call one that is written later
        ("for stub in [1]:\n    print(stub)", None),
        ("value = [stub(i) for i in range(3)]", "This cell needs Question 1.2 (stub): answer it first."),
        ("check_bonus(gone)", "This cell needs Bonus 1.6 (gone), and there is no gone. Run the cells above"),
        ("unknown(1), text", None),  # a NameError says that; the text of a file is no answer
    ],
)
def test_a_cell_says_which_answer_it_needs(cell, message):
    names = {"gemm": _guarded, "stub": _stub, "check_two": visible("1.2")(lambda stub, gemm: None)}
    names["check_bonus"] = visible("Bonus 1.6")(_of_two)
    said = missing_answer(ast.parse(cell), names)
    assert said == message or (message and said.startswith(message))


def test_a_notebook_stops_before_the_cell(monkeypatch):
    """The cell's first statements do not run, and the error has its own words."""
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    watch_cells()
    shell.user_ns |= {"stub": _stub, "check_one": visible("1.2")(lambda stub: None)}
    result = shell.run_cell("before = 1\nstub()")
    assert isinstance(result.error_in_exec, AnswerNeeded) and "before" not in shell.user_ns
    assert shell.run_cell("before = 1").success and shell.user_ns["before"] == 1


# --- closeness ---

EXPECTED = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def complaint(got, expected=EXPECTED, rtol=1e-3, atol=1e-3, **kwargs):
    with pytest.raises(AssertionError) as caught:
        expect_close(got, expected, rtol, atol, "the result", **kwargs)
    return str(caught.value)


def test_close_enough_by_the_tolerances_that_are_given_passes():
    expect_close(EXPECTED + 5e-4, EXPECTED, 0, 1e-3)
    expect_close(EXPECTED * (1 + 5e-4), EXPECTED, 1e-3, 0)
    expect_close(torch.empty(0, 3), torch.empty(0, 3), 0, 0)
    expect_close(torch.tensor([1, 2]), torch.tensor([1, 2]), 0, 0)
    expect_close(torch.tensor([1.0, float("inf"), float("nan")]), torch.tensor([1.0, float("inf"), float("nan")]), 0, 0)
    expect_close(torch.nn.Parameter(EXPECTED), EXPECTED, 0, 0)
    assert "wrong" in complaint(EXPECTED + 2e-3, rtol=0, atol=1e-3)
    assert "wrong" in complaint(EXPECTED * 1.002, rtol=1e-3, atol=0)


def test_type_dtype_device_and_shape_come_first():
    assert complaint(None) == "the result is None: is a return missing?"
    assert complaint(EXPECTED.numpy()) == "the result should be a torch.Tensor, and is of type ndarray."
    assert complaint(EXPECTED.double()) == "the result should have dtype torch.float32, and has torch.float64."
    assert complaint(EXPECTED.to("meta")) == "the result should have device cpu, and has meta."
    assert "layout torch.strided" in complaint(EXPECTED.to_sparse())
    message = complaint(EXPECTED.T)
    assert "should have shape (2, 3), and has shape (3, 2). It looks transposed." in message


@pytest.mark.parametrize(
    ("value", "name"), [(float("nan"), "NaN"), (float("inf"), "infinite"), (-float("inf"), "infinite")]
)
def test_nan_and_infinity_stand_where_they_are_expected_at_any_tolerance(value, name):
    odd = EXPECTED.clone()
    odd[1, 2] = value
    message = complaint(odd, rtol=1e9, atol=1e9)
    assert f"1 {name} values" in message and "[1, 2]" in message
    assert "wrong in 1 of 6" in complaint(EXPECTED, odd, rtol=1e9, atol=1e9)


def test_worst_position_and_hint():
    got = EXPECTED.clone()
    got[0, 0] += 1
    got[1, 1] += 3
    message = complaint(got, hint="Look at the last tile.")
    assert "wrong in 2 of 6 elements" in message and "at [1, 1]: got 8, expected 5" in message
    assert message.endswith("Look at the last tile.")


def test_patterns_of_wrong_values_are_named():
    assert "Every element is zero." in complaint(torch.zeros_like(EXPECTED))
    assert "Every element is 2 times the right one." in complaint(2 * EXPECTED)
    square = torch.randn(4, 4)
    assert "transpose" in complaint(square.T.contiguous(), square)
    assert "times" not in complaint(EXPECTED + torch.tensor([[0.0, 1, 0], [2, 0, 0]]))


# --- numbers ---


def number_complaint(got, expected, **kwargs):
    with pytest.raises(AssertionError) as caught:
        expect_number(got, expected, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    "got", [200, 200.0, np.float32(200), np.int64(200), torch.tensor(200), torch.tensor([200.0]), 201]
)
def test_right_numbers_pass(got):
    expect_number(got, 200, rel=0.01)


def test_what_is_no_number():
    assert "is a return missing" in number_complaint(None, 1)
    assert "should be a number in ms, and is '3' (str)" in number_complaint("3", 3, unit="ms")
    assert "should be a number" in number_complaint(True, 1)
    assert "finite" in number_complaint(float("nan"), 1)
    assert "should be a number" in number_complaint(torch.ones(2), 1)


@pytest.mark.parametrize(
    ("factor", "unit", "hint"),
    [
        (0.5, "FLOPs", "a multiply-accumulate (MAC) is one MAC, and two FLOPs"),
        (2, "MACs", "twice the right number"),
        (1000, "ms", "10^3 times too large"),
        (1e-3, "ms", "10^3 times too small"),
        (1e12, "TFLOP/s", "10^12 times too large"),
        (3.7, "", "too large"),
        (0.13, "", "too small"),
    ],
)
def test_known_factors_are_named(factor, unit, hint):
    assert hint in number_complaint(171.5 * factor, 171.5, rel=1e-3, unit=unit)


def test_known_mistakes_are_named_without_the_right_number():
    known = {"The result is written, too.": 160, "Ask dtype.itemsize.": 320}
    assert number_complaint(160, 240, rel=0, unit="bytes", mistakes=known) == (
        "the answer is not 160 bytes. The result is written, too."
    )
    assert "240" not in number_complaint(77, 240)
    told = number_complaint(960, 240, rel=0, unit="bytes", mistakes=known, tell=True)
    assert told == "the answer is not 960 bytes, expected 240 bytes. It is too large."
    expect_number(240, 240, rel=0, mistakes=known)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_result_that_was_rounded_on_its_way_is_found(dtype):
    """Rounding a factor of each term to 16 bits, or to eight bits inside of float32, changes the last rounding of many results."""
    torch.manual_seed(0)
    a, b = torch.randn(40, 16), torch.randn(16, 40).to(dtype).float()
    exact = a.double() @ b.double()
    expect_rounded_once((a @ b).to(dtype), exact, "a product", "the factors")
    eight_bits = a * 65537.0 - (a * 65537.0 - a)
    for narrow in (a.to(dtype).float(), eight_bits):
        with pytest.raises(AssertionError, match=r"a product: \d+% of the results .* Which of the factors"):
            expect_rounded_once((narrow @ b).to(dtype), exact, "a product", "the factors")


def test_an_answer_leaves_its_inputs_in_every_check():
    """Whoever clears the inputs has the right values for them; the check refuses it all the same."""
    x = torch.tensor([1.0, float("nan")])

    @check("1.1")
    def doubles(double):
        expect_close(double(x, more=(x.clone(),)), 2 * x, rtol=0, atol=0)

    def right(x, *, more):
        return x + x

    def writes(x, *, more):
        more[0].mul_(2)
        return x + x

    assert doubles(right).passed
    verdict = doubles(writes)
    assert not verdict.passed and "writes changed one of its inputs" in verdict.message
    with pytest.raises(AssertionError, match="changed one of its inputs"):
        Answer(lambda y: y.unsqueeze_(0))(torch.ones(2))
    assert torch.vmap(Answer(torch.sin))(torch.zeros(3)).sum() == 0


def test_a_visible_check_raises_by_itself(capsys):
    @visible("1.1", "Doubling", forbids=MATMUL)
    def check_double(double):
        assert double(2) == 4, "it is not twice as much"

    check_double(lambda x: x + x)
    assert capsys.readouterr().out == "✓ Question 1.1: Doubling: passed.\n"
    with pytest.raises(WrongAnswer, match="not twice"):
        check_double(lambda x: x)
    assert check_double.judge(lambda x: x).passed is False and check_double.rule.forbids == (MATMUL,)
