"""Verdicts on answers, a watch over the operators that an answer runs, and the runs of Gluon kernels that lab 3 checks."""

from utils.checking.mistakes import attention_mistake, leaves_inputs
from utils.checking.rounding import expect_rounded_once
from utils.checking.sizes import SizeWatch, expect_follows_device, poisoned_memory
from utils.checking.travel import by_value
from utils.checking.verdicts import (
    AnswerNeeded,
    Verdict,
    WrongAnswer,
    check,
    expect_close,
    expect_number,
    is_answered,
    needs,
    quiet_stderr,
    require_answer,
)
from utils.checking.watching import (
    FUSED_ATTENTION,
    MATMUL,
    OperationWatch,
    StudentLine,
    forbid,
    forbid_leaving,
    watch_operations,
)

__all__ = [
    "FUSED_ATTENTION",
    "MATMUL",
    "AnswerNeeded",
    "OperationWatch",
    "SizeWatch",
    "StudentLine",
    "Verdict",
    "WrongAnswer",
    "attention_mistake",
    "by_value",
    "check",
    "expect_close",
    "expect_follows_device",
    "expect_number",
    "expect_rounded_once",
    "forbid",
    "forbid_leaving",
    "is_answered",
    "leaves_inputs",
    "needs",
    "poisoned_memory",
    "quiet_stderr",
    "require_answer",
    "watch_operations",
]
