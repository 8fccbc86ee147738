"""What cells show: collected in the student's process with limits, and cleaned in the checker's of what may do harm."""

from __future__ import annotations

import io
import json

import nbformat
from nbformat import NotebookNode

from instructor.grading.submission.harmless import harmless_latex, is_picture

MAX_TEXT = 200_000  # characters of output kept for one cell
MAX_IMAGE = 2_000_000  # characters of one displayed image, base64
MAX_IMAGES = 8_000_000  # characters of all images of one cell
MAX_NOTEBOOK = 24_000_000  # characters of all that the cells of a notebook show: a page of more is hard to open
MAX_ITEMS = 1000  # displays of one cell
# No HTML, no SVG, no script: they would run in the browser of whoever grades.
SHOWN_TYPES = ("text/plain", "text/latex", "image/png", "image/jpeg")
_BASE64 = 0.75e-6  # MB of a picture for each character of its text
_ALLOWED = f"one may have {MAX_IMAGE * _BASE64:g} MB, and those of a cell {MAX_IMAGES * _BASE64:g} MB together"


class Outputs:
    """What one cell shows, in order, with limits on its size."""

    def __init__(self) -> None:
        self.items: list[dict] = []
        self.left, self.left_for_images = MAX_TEXT, MAX_IMAGES

    def text(self, name: str, text: str) -> None:
        """Add text to the stream of this name."""
        if self.left <= 0:
            return
        text = text[: self.left]
        self.left -= len(text)
        if self.left <= 0:
            text += "\n... the rest of the output is left out."
        if self.items and self.items[-1].get("name") == name:
            self.items[-1]["text"] += text
        else:
            self.items.append({"output_type": "stream", "name": name, "text": text})

    def display(self, data: dict, metadata: dict | None, count: int | None = None) -> None:
        """Add a display, or the result of the cell if it has a count; `data` is {MIME type: content}."""
        kept = {}
        for kind, value in data.items():
            value = value if isinstance(value, str) else json.dumps(value, default=str)
            image = kind.startswith("image/")
            if 0 < len(value) <= (min(MAX_IMAGE, self.left_for_images) if image else self.left):
                kept[kind] = value
                self.left -= 0 if image else len(value)
                self.left_for_images -= len(value) if image else 0
            elif image:
                self.text("stdout", f"[a picture of {len(value) * _BASE64:.1f} MB is left out: {_ALLOWED}]\n")
        if kept and len(self.items) < MAX_ITEMS:
            result = {"output_type": "execute_result", "execution_count": count}
            kind = {"output_type": "display_data"} if count is None else result
            self.items.append({**kind, "data": kept, "metadata": {}})

    def error(self, name: str, value: str, trace: list[str]) -> None:
        """Add an error with the lines of its traceback."""
        cut = [line[:5000] for line in trace[-60:]]
        self.items.append({"output_type": "error", "ename": name[:200], "evalue": value[:5000], "traceback": cut})


class Stream(io.TextIOBase):
    """The `sys.stdout` or `sys.stderr` of a cell."""

    def __init__(self, name: str, outputs: Outputs):
        self.stream, self.outputs = name, outputs

    def writable(self):
        """True."""
        return True

    def write(self, text):
        """Add text to the outputs."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self.outputs.text(self.stream, text)
        return len(text)

    def fileno(self):
        """The descriptor that C code and child processes write to."""
        return 1 if self.stream == "stdout" else 2


def error_output(name: str, message: str) -> NotebookNode:
    """An error as a cell shows it."""
    return nbformat.v4.new_output("error", ename=name, evalue=message, traceback=[message])


def clean_outputs(outputs: object, room: int = MAX_NOTEBOOK) -> list[dict]:
    """The outputs of a cell, rebuilt: only what a notebook may hold, and no more than `room` characters of it."""
    given = outputs if isinstance(outputs, list) else []
    kept: list[dict] = []
    left_out = 0
    for output in given:
        cleaned = _clean_output(output) if isinstance(output, dict) else None
        if cleaned is None:
            continue
        size = output_size([cleaned])
        if size <= room and len(kept) < MAX_ITEMS:
            kept.append(cleaned)
            room -= size
        else:
            left_out += 1
    if left_out:
        what = "one output of this cell is" if left_out == 1 else f"{left_out} outputs of this cell are"
        note = f"[{what} left out: a notebook may show {MAX_NOTEBOOK / 1e6:.0f} MB]\n"
        kept.append({"output_type": "stream", "name": "stdout", "text": note})
    return kept


def output_size(outputs: list) -> int:
    """The characters of some outputs as a notebook's file holds them."""
    return len(json.dumps(outputs))


def _clean_output(output: dict) -> dict | None:
    kind = output.get("output_type")
    if kind == "stream":
        name = "stderr" if output.get("name") == "stderr" else "stdout"
        return {"output_type": "stream", "name": name, "text": _joined(output.get("text"))}
    if kind in ("display_data", "execute_result") and isinstance(output.get("data"), dict):
        data = {str(k): _joined(v) for k, v in output["data"].items() if k in SHOWN_TYPES}
        data = {k: v for k, v in data.items() if not k.startswith("image/") or is_picture(k, v)}
        if "text/latex" in data:
            data["text/latex"] = harmless_latex(data["text/latex"])
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
