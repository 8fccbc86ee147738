"""What a student reads: the words of verdicts, and the outputs of cells without what might harm a reader."""

from __future__ import annotations

import linecache

import nbformat
from nbformat import NotebookNode

from utils.checking import AnswerNeeded, WrongAnswer

# No HTML, no SVG, no script: they would run in the browser of whoever grades.
SHOWN_TYPES = ("text/plain", "text/latex", "image/png", "image/jpeg")


def question_title(question: str) -> str:
    """`q1_1` -> `Question 1.1`."""
    kind, _, number = question.partition("_")
    if kind == "bonus":
        return f"Bonus {number.replace('_', '.')}"
    return f"Question {question[1:].replace('_', '.')}" if question[:1] == "q" else "the notebook"


def explain(error: BaseException) -> tuple[str, str]:
    """(status, message): the words of a verdict, or what went wrong; never a line of a test."""
    linecache.checkcache()
    if isinstance(error, WrongAnswer | AnswerNeeded):
        return "failed", str(error)[:5000]
    words = " ".join(str(error).split())[:1000]
    if isinstance(error, AssertionError):
        return "failed", words or "A test of this question failed."
    return "error", f"{type(error).__name__}: {words}" if words else type(error).__name__


def error_output(name: str, message: str) -> NotebookNode:
    """An error as a cell shows it."""
    return nbformat.v4.new_output("error", ename=name, evalue=message, traceback=[message])


def clean_outputs(outputs: object) -> list[dict]:
    """The outputs of a cell, rebuilt: only what a notebook may hold."""
    given = outputs if isinstance(outputs, list) else []
    cleaned = [_clean_output(output) for output in given if isinstance(output, dict)]
    return [output for output in cleaned if output is not None]


def _clean_output(output: dict) -> dict | None:
    kind = output.get("output_type")
    if kind == "stream":
        name = "stderr" if output.get("name") == "stderr" else "stdout"
        return {"output_type": "stream", "name": name, "text": _joined(output.get("text"))}
    if kind in ("display_data", "execute_result") and isinstance(output.get("data"), dict):
        data = {str(k): _joined(v) for k, v in output["data"].items() if k in SHOWN_TYPES}
        return {"output_type": "display_data", "data": data, "metadata": {}} if data else None
    if kind == "error":
        trace = output.get("traceback")
        lines = [str(line) for line in trace] if isinstance(trace, list) else []
        words = {"ename": str(output.get("ename")), "evalue": str(output.get("evalue"))}
        return {"output_type": "error", **words, "traceback": lines}
    return None


def _joined(text: object) -> str:
    """A text that a notebook may keep as a list of lines."""
    return "".join(map(str, text)) if isinstance(text, list) else str(text)
