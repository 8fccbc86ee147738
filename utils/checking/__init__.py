"""Verdicts on answers, what is watched while an answer runs, and the runs of Gluon kernels that lab 3 checks."""

from utils.checking.verdicts import (
    MATMUL,
    AnswerNeeded,
    OperationWatch,
    StudentLine,
    Verdict,
    WrongAnswer,
    check,
    expect_close,
    expect_number,
    forbid,
    forbid_leaving,
    is_answered,
    quiet_stderr,
    require_answer,
    watch_operations,
)

__all__ = [
    "MATMUL",
    "AnswerNeeded",
    "OperationWatch",
    "StudentLine",
    "Verdict",
    "WrongAnswer",
    "check",
    "expect_close",
    "expect_number",
    "forbid",
    "forbid_leaving",
    "is_answered",
    "quiet_stderr",
    "require_answer",
    "watch_operations",
]
