"""Verdicts on answers, a watch over the operators that an answer runs, and runs of Gluon kernels for lab 3."""

# ruff: noqa: F401 (what is imported here is what the package offers)
from utils.checking.answers import Answer
from utils.checking.authors import StudentLine
from utils.checking.memory import expect_follows_device, poisoned_memory
from utils.checking.mistakes import attention_mistake, expect_rounded_once
from utils.checking.verdicts import (
    AnswerNeeded,
    Verdict,
    WrongAnswer,
    check,
    expect_close,
    expect_items,
    expect_number,
    is_answered,
    quiet_stderr,
    visible,
)
from utils.checking.watching import DERIVATIVES, FUSED_ATTENTION, GELU, MATMUL, SOFTMAX, OperationWatch
