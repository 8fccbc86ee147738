"""What right answers to a lab use: the words of its model answers, and lists of more for single questions.

A list of ways around a question never ends, so an answer is read the other way round: `vocabulary` holds what right answers are written
with, a question's model answer adds its own words, and `usual_words` what other right answers use. `reading` holds the text of an
answer against them, `usual_operators` what ran. An answer that uses more waits for a person, whatever its values are. Nothing
here says that it is wrong.
"""

from __future__ import annotations

import ast
import sys
import types
from collections import Counter
from collections.abc import Iterable, Mapping

import nbformat

from instructor.grading.submission import vocabulary
from instructor.grading.submission.limits import LARGE, LARGE_IN_KERNEL, other_ways, tiles_of
from instructor.grading.submission.plan import question_of
from instructor.grading.submission.text_words import Words, lines_given, read_arguments, words_in
from instructor.names import FILE_CELL, python_of

MAX_TOLD = 4  # words of one kind that a message names
_METHODS = (types.FunctionType, property, classmethod, staticmethod)


class Usual:
    """What a lab's right answers use.

    Args:
        instructor_notebook: the lab with its solutions.
        base: the notebook's names after its setup.
        more: {question: words that right answers use beside those of the model answer}; "" is for all questions.
        needed: {question: words that every right answer uses}.
        narrow: {test cell or question: all words of Python and torch that right answers use, and signs of Python's operators beside
            +, - and *}, in place of the wide lists.
        forbidden: {test cell: words for what its question forbids}.
        keeps_lines: whether a file of kernels keeps the lines that students get: questions with holes ask for these alone.
        only_sizes: whether a large number of the answer's own is unusual only where it meets a size (`limits`).
    """

    def __init__(
        self,
        instructor_notebook: str,
        base: Mapping[str, object],
        more: Mapping[str, str] | None = None,
        needed: Mapping[str, str] | None = None,
        narrow: Mapping[str, str] | None = None,
        forbidden: Mapping[str, str] | None = None,
        keeps_lines: bool = True,
        only_sizes: bool = True,
    ):
        self.base, self.more, self.needed, self.narrow = base, more or {}, needed or {}, narrow or {}
        self.forbidden, self.only_sizes = forbidden or {}, only_sizes
        self.methods_of_course = _methods_of_course()  # of objects that the course hands out
        self.models: dict[str, Words] = {}  # question -> words of its model answer
        self.kernels = Words()  # of all files of kernels
        self.given_lines: dict[str, Counter[str]] = {}  # question -> lines of its file of kernels that students get
        # function of a model answer -> (place, name) of the arguments that it reads
        self.reads: dict[str, list[tuple[int, str]]] = {}
        self.trees: dict[str, list[ast.Module]] = {}  # question -> the text of its model answer
        for cell in nbformat.v4.nbjson.reads(instructor_notebook).cells:
            if cell.cell_type != "code" or not cell.metadata.get("nbgrader", {}).get("solution"):
                continue
            is_file = FILE_CELL.match(cell.source.lstrip())
            text = cell.source.partition("\n")[2] if is_file else python_of(cell.source) or ""
            try:
                tree = ast.parse(text)
            except SyntaxError:  # a file that is no Python
                continue
            question, words = question_of(cell.metadata["nbgrader"]["grade_id"]), words_in(tree)
            for known in (self.models.setdefault(question, Words()), *([self.kernels] if is_file else [])):
                known.add(words)
            if is_file and keeps_lines:
                self.given_lines[question] = lines_given(text)
            elif not is_file:
                functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
                self.reads |= {function.name: read_arguments(function) for function in functions}
            self.trees.setdefault(question, []).append(tree)

    def words(self, question: str) -> Words:
        """The words of a question's model answer, and of other right answers to it."""
        extra = {*self.more.get("", "").split(), *self.more.get(question, "").split()}
        words = Words(set(extra), set(extra), set(extra))
        words.add(self.models.get(question, Words()))
        return words

    def other_ways(self, question: str, trees: Iterable[ast.AST], in_kernel: bool = False) -> dict[str, list[str]]:
        """What `limits` finds in the text of an answer, without what it finds in the model answer, too."""
        large, only_sizes = (LARGE_IN_KERNEL, False) if in_kernel else (LARGE, self.only_sizes)
        model = self.trees.get(question, [])
        tiles = tiles_of(model)
        of_model = other_ways(model, large, only_sizes, tiles)
        found = other_ways(trees, large, only_sizes, tiles)
        return {kind: [p for p in places if p not in of_model.get(kind, ())] for kind, places in found.items()}


def told(found: Mapping[str, Iterable[str]]) -> list[str]:
    """[kind word, word, ...] for each kind of which there is something."""
    lines = []
    for kind, words in found.items():
        several = list(dict.fromkeys(words))
        if several:
            lines.append(f"{kind} {', '.join(several[:MAX_TOLD])}{' and more' * (len(several) > MAX_TOLD)}")
    return lines


def _methods_of_course() -> frozenset[str]:
    """The methods and properties of the course's classes, as far as they are loaded."""
    found: set[str] = set()
    for module in [m for n, m in list(sys.modules.items()) if n.partition(".")[0] == "utils" and m is not None]:
        for kind in [v for v in list(vars(module).values()) if isinstance(v, type) and v.__module__ == module.__name__]:
            found |= {n for n, v in vars(kind).items() if isinstance(v, _METHODS) and not n.startswith("_")}
    return frozenset(found) - vocabulary.OF_LIBRARIES  # such as gc.collect
