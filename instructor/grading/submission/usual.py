"""Whether an answer keeps to what right answers need. One that does not waits for a person, whatever its values are.

A list of ways around a question never ends, so this reads the other way round. `vocabulary` holds what right answers are
written with, and a question's model answer adds its own words. The code of an answer is read as text: the functions that a
check calls, and whatever of the student's cells and files they reach by name. The record of a call's operators is held against
the same lists. Nothing here says that an answer is wrong.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import nbformat
import torch

from instructor.grading.submission import vocabulary
from instructor.grading.submission.limits import devices_named, named_numbers, own_limits, program_branches
from instructor.grading.submission.plan import Step, question_of
from instructor.grading.submission.statements import (
    DEFINITIONS,
    annotating_names,
    called_names,
    changed_names,
    handed_names,
    imports_by_text,
    taken_names,
)
from instructor.grading.submission.text_sizes import branches_by_size, large_constants
from instructor.grading.submission.text_words import (
    Words,
    lines_given,
    lines_of_code,
    loops,
    read_arguments,
    sign_of,
    words_in,
    words_of,
)
from instructor.names import FILE_CELL, bound_names, python_of
from utils.checking.watching import SCALAR_EXITS, OperationWatch

LEAST_LIMIT = 9  # a whole number of an answer's own that may be a size; dimensions and bytes of an element are smaller
LEAST_OF_KERNEL = 5  # the same in a kernel, where it may be a number of slots, tiles or programs
MAX_TOLD = 4  # words of one kind that a message names
_DUNDER = re.compile(r"__\w+__")
_METHODS = (types.FunctionType, property, classmethod, staticmethod)
# What a student could give a class of theirs to make a library's name look like their own.
_LIBRARY = frozenset(
    {*dir(torch), *dir(torch.Tensor), *dir(torch.nn.functional), *dir(torch.nn), *dir(torch.nn.Module)}
)


class Usual:
    """What a lab's right answers use.

    Args:
        instructor_notebook: the lab with its solutions.
        base: the notebook's names after its setup.
        more: {question: words that right answers use beside those of the model answer}; "" is for all questions.
        needed: {question: words that every right answer uses}.
        keeps_lines: whether a file of kernels keeps the lines that students get: questions with holes ask for these alone.
        narrow: {test cell or question: all words of Python and torch that right answers use, and signs of Python's operators beside
            +, - and *}, in place of the wide lists.
        forbidden: {test cell: words for what its question forbids}.
        any_number: whether each comparison with a number of the answer's own is unusual where a question has a list, and not
            that of a size alone: for labs whose questions give no sizes of tiles.
    """

    def __init__(
        self,
        instructor_notebook: str,
        base: Mapping[str, object],
        more: Mapping[str, str] | None = None,
        needed: Mapping[str, str] | None = None,
        narrow: Mapping[str, str] | None = None,
        keeps_lines: bool = True,
        forbidden: Mapping[str, str] | None = None,
        any_number: bool = False,
    ):
        self.forbidden, self.any_number = forbidden or {}, any_number
        self.base, self.more, self.needed, self.narrow = base, more or {}, needed or {}, narrow or {}
        self.reads: dict[
            str, list[tuple[int, str]]
        ] = {}  # function of a model answer -> (place, name) of what it reads
        self.of_course = _methods_of_course()  # of objects that the course hands out
        self.models: dict[str, Words] = {}  # question -> words of its model answer
        self.kernels = Words()  # of all files of kernels
        self.given: dict[str, Counter[str]] = {}  # question -> lines of its file of kernels that students get
        for cell in nbformat.v4.nbjson.reads(instructor_notebook).cells:
            if cell.cell_type == "code" and cell.metadata.get("nbgrader", {}).get("solution"):
                is_file = FILE_CELL.match(cell.source.lstrip())
                text = cell.source.partition("\n")[2] if is_file else python_of(cell.source) or ""
                try:
                    words = words_of(text)
                except SyntaxError:  # a file that is no Python
                    continue
                if is_file:
                    given = lines_given(text) if keeps_lines else Counter()
                    self.given[question_of(cell.metadata["nbgrader"]["grade_id"])] = given
                else:
                    for node in ast.parse(text).body:
                        if isinstance(node, ast.FunctionDef):
                            self.reads[node.name] = read_arguments(node)
                question = self.models.setdefault(question_of(cell.metadata["nbgrader"]["grade_id"]), Words())
                for own in (question, self.kernels) if is_file else (question,):
                    own.names |= words.names
                    own.attributes |= words.attributes
                    own.modules |= words.modules

    def words(self, question: str) -> Words:
        """The words of a question's model answer, and of other right answers to it."""
        model, more = self.models.get(question, Words()), self.more
        extra = {*more.get("", "").split(), *more.get(question, "").split()}
        return Words(model.names | extra, model.attributes | extra, model.modules | extra)


@dataclass
class _Place:
    """A statement at the top of a student's cell or file."""

    node: ast.stmt
    number: int  # in running order
    names: set[str]  # that it takes from elsewhere


class Reading:
    """The code of a submission, as text."""

    def __init__(self, steps: Iterable[Step], usual: Usual):
        self.usual = usual
        self.of_lab: set[str] = set()  # names that the lab's own cells define
        self.bindings: dict[str, list[_Place]] = {}
        self.handed: dict[
            str, list[_Place]
        ] = {}  # name -> statements that hand it to a call, which may change what it holds
        self.large: set[str] = set()  # names that are given large numbers
        self.called: set[str] = set()  # names of functions, by whatever statement they come: somebody calls them
        self.whole: dict[
            str, list[_Place]
        ] = {}  # name -> its statements, and those that hand it on if it is data; kept: what was followed is known by its list
        self.files: dict[str, list[_Place]] = {}  # module of the student's -> its statements
        self.own: set[str] = set()  # attributes of the student's own classes
        self.unread: set[str] = set()  # cells that are no Python
        self.strict, self.count = True, 0
        self.narrow: frozenset[str] | None = None  # of the question that is read, if it has a narrow list
        self.forbidden: frozenset[str] = frozenset()  # words for what the question that is read forbids
        for step in steps:
            if step.kind == "tests":
                self.called |= set(step.needs.names)
            if step.cell.cell_type != "code":
                continue
            if step.untouched and not step.answer:
                for node in ast.parse(python_of(step.source) or "").body:
                    self.of_lab |= set() if isinstance(node, ast.Import | ast.ImportFrom) else bound_names(node)
            elif step.kind == "student" and not step.untouched:
                self._take(step)

    def _take(self, step: Step) -> None:
        match = FILE_CELL.match(step.source.lstrip())
        text = step.source.lstrip().partition("\n")[2] if match else python_of(step.source)
        try:
            tree = ast.parse(text or "")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            tree, text = ast.Module([], []), None
        if text is None:
            self.unread.add(step.name)
        self._note_own(tree)
        places = [self._place(node) for node in tree.body]
        if match:
            path = Path(match[1])
            self.files.setdefault(path.stem if path.stem != "__init__" else path.parent.name, []).extend(places)
        for place in places:
            for name in changed_names(place.node):
                # Whoever changes a module for others is found by other signs; their answers are not to blame.
                # `import torch.fft` gives the module that is there.
                is_module = isinstance(self.usual.base.get(name), types.ModuleType)
                imported = isinstance(place.node, ast.Import)
                if not is_module or (name in bound_names(place.node) and not imported):
                    self.bindings.setdefault(name, []).append(place)
            self.called |= called_names(place.node)
            self.large |= large_constants(place.node)
            for name in handed_names(place.node):
                self.handed.setdefault(name, []).append(place)

    def _bound(self, name: str) -> list[_Place]:
        """The statements that a name's value comes from; a function or a class is what its definition says."""
        if name not in self.whole:
            own = self.bindings.get(name, [])
            defined = any(isinstance(place.node, (*DEFINITIONS, ast.Import, ast.ImportFrom)) for place in own)
            is_data = own and not defined and name not in self.called and name in self.handed
            self.whole[name] = own + self.handed[name] if is_data else own
        return self.whole[name]

    def _place(self, node: ast.stmt) -> _Place:
        self.count += 1
        return _Place(node, self.count, taken_names(node))

    def _note_own(self, tree: ast.AST) -> None:
        """Note the fields and methods of the student's classes, and what is set on their functions."""
        found: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found |= set().union(*(bound_names(part) for part in node.body))
                found |= {
                    p.target.id for p in node.body if isinstance(p, ast.AnnAssign) and isinstance(p.target, ast.Name)
                }
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif (
                isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "namedtuple"
            ):
                texts = [c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
                found |= {word for text in texts for word in re.findall(r"\w+", text)}
        self.own |= found - _LIBRARY

    def unusual(self, step: Step, strict: bool) -> list[str]:
        """What the code that a test cell calls reaches for, in words, beside what right answers need.

        Args:
            step: the test cell.
            strict: the question forbids something. Where none does, any library that computes may be used; what the course has
                beside the model answer's words, and what leads to the insides of Python, may not.
        """
        narrow = self.usual.narrow.get(step.name) or self.usual.narrow.get(step.question)
        strict |= bool(narrow)
        words, self.strict = self.usual.words(step.question), strict
        self.forbidden = frozenset(self.usual.forbidden.get(step.name, "").split())
        self.narrow = frozenset(narrow.split()) | words.names | words.attributes if narrow else None
        found: dict[str, list[str]] = {}
        todo: list[_Place] = []
        for name in step.needs.names:
            if name in self.bindings:
                todo += self.bindings[name]
            elif name in self.of_lab or name in self.usual.base:
                continue  # an answer left as it was
            elif strict:
                found.setdefault("defines out of sight", []).append(name)
        missing = set(self.usual.needed.get(step.question, "").split()) if todo else set()
        seen: set[int] = set()
        # Lists of statements: without it, a cell of n assignments to one name takes n * n steps.
        followed: set[int] = set()
        while todo:
            place = todo.pop()
            if place.number in seen:
                continue
            seen.add(place.number)
            if missing:
                missing -= words_in(place.node).names | words_in(place.node).attributes
            for statements in self._look(place, words, lambda kind, word: found.setdefault(kind, []).append(word)):
                if id(statements) not in followed:
                    followed.add(id(statements))
                    todo += statements
        if self.narrow is not None and self.usual.any_number:
            read = [place.node for place in self._all_places() if place.number in seen]
            named = named_numbers(read)
            found["takes another way where"] = [w for node in read for w in own_limits(node, named, LEAST_LIMIT)]
            found["asks where it runs:"] = [d for node in read for d in devices_named(node)]
        found["does without"] = sorted(missing)
        if strict:  # elsewhere the values tell, and an argument may cancel
            found["does not read"] = [w for name in sorted(step.needs.names) for w in self._unread_arguments(name)]
        return told(found)

    def _all_places(self) -> list[_Place]:
        """Every statement at the top of a student's cell or file, once."""
        several = (*self.bindings.values(), *self.files.values())
        return list({place.number: place for places in several for place in places}.values())

    def _unread_arguments(self, name: str) -> list[str]:
        """The arguments that the model answer's function of this name reads, and the student's does not."""
        own = self.bindings.get(name, [])
        last = max(own, key=lambda place: place.number, default=None)
        if last is None or not isinstance(last.node, ast.FunctionDef) or last.node.args.vararg or last.node.args.kwarg:
            return []
        places = {place for place, _ in read_arguments(last.node)}
        count = len(last.node.args.posonlyargs) + len(last.node.args.args)
        return [f"{name}'s {arg}" for at, arg in self.usual.reads.get(name, []) if at < count and at not in places]

    def _look(self, place: _Place, words: Words, note: Callable[[str, str], object]) -> list[list[_Place]]:
        """Note what is unusual in a statement; returns the lists of statements, of `bindings` and `files`, that it reaches."""
        reached: list[list[_Place]] = []
        for name in sorted(place.names):
            own = self.bindings.get(name, [])
            before = isinstance(place.node, DEFINITIONS) or any(p.number < place.number for p in own)
            written = bool(own) and before and (name in vocabulary.BUILTINS or not hasattr(builtins, name))
            if written or name in self.of_lab or name in words.names:
                reached.append(self._bound(name))
            elif name in self.usual.base:
                value = self.usual.base[name]
                if isinstance(value, types.ModuleType):
                    self._module(value.__name__, words, note)
                elif not _is_plain(name, value):
                    note("calls", name)
            elif hasattr(builtins, name):
                known = name in vocabulary.BUILTINS or (not self.strict and name in vocabulary.BUILTINS_ELSEWHERE)
                known &= self.narrow is None or name in self.narrow or name in vocabulary.ERRORS
                if not known and not (name == "__import__" and imports_by_text(place.node)):
                    note("calls", name)
            elif name not in vocabulary.DUNDERS and not own and name not in annotating_names(place.node):
                note("takes from out of sight", name)
        for node in ast.walk(place.node):
            reached += self._look_at(node, words, note)
        if self.strict and not self.usual.any_number:
            large = place.names & self.large
            for line in branches_by_size(place.node, large):
                note("takes another way where", line)
        return reached

    def _look_at(self, node: ast.AST, words: Words, note: Callable[[str, str], object]) -> list[list[_Place]]:
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult) and "@" in self.forbidden:
            note("has a way with what the question forbids:", "@")
        if "loop" in self.forbidden and loops(node):
            note("has a way with what the question forbids:", "a loop")
        if isinstance(node, ast.Attribute):
            self._attribute(node.attr, words, note)
        elif isinstance(node, ast.BinOp | ast.AugAssign) and self.narrow is not None:
            if not isinstance(node.op, ast.Add | ast.Sub | ast.Mult) and sign_of(node.op) not in self.narrow:
                note("computes by", type(node.op).__name__)
        elif isinstance(node, ast.Import):
            return [self._module(alias.name, words, note) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            reached = self._module(node.module or "", words, note)
            if not reached:
                for alias in node.names:
                    if f"{node.module}.{alias.name}" not in vocabulary.MODULES and alias.name != "*":
                        self._attribute(alias.name, words, note)
            return [reached]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _DUNDER.fullmatch(node.value) and node.value not in vocabulary.DUNDERS:
                note("names", node.value)
        elif isinstance(node, ast.ClassDef):
            if any(getattr(base, "attr", getattr(base, "id", "")) == "Tensor" for base in node.bases) or node.keywords:
                note("makes a class of a kind of its own,", node.name)
        elif isinstance(node, ast.FunctionDef) and _DUNDER.fullmatch(node.name):
            if node.name not in vocabulary.DUNDERS:
                note("defines", node.name)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if called == "type" and len(node.args) > 1:
                note("calls", "type with three arguments")
            elif called == "__import__" and node.args and isinstance(node.args[0], ast.Constant):
                return [self._module(str(node.args[0].value), words, note)]
            elif called in vocabulary.BY_NAME:
                self._by_name(called, node, words, note)
        return []

    def _by_name(self, called: str, node: ast.Call, words: Words, note: Callable[[str, str], object]) -> None:
        """Note attributes that `attrgetter`, `methodcaller` or `getattr` name by a text."""
        named = node.args[1:2] if called == "getattr" else node.args[:1] if called == "methodcaller" else node.args
        for part in named:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                for name in part.value.split("."):
                    self._attribute(name, words, note)
            elif self.strict and (self.narrow is None or called not in self.narrow):
                note("asks for an attribute whose name it computes, by", called)

    def _attribute(self, name: str, words: Words, note: Callable[[str, str], object]) -> None:
        if name.startswith("__"):
            known = name in vocabulary.DUNDERS
        else:
            known = name in (vocabulary.ATTRIBUTES if self.narrow is None else self.narrow) or name in self.own
            if not self.strict:
                inside = name in vocabulary.INSIDE_TORCH or name.startswith(vocabulary.INSIDE)
                known |= not inside and name not in self.usual.of_course
        if name in self.forbidden and name not in self.own:
            note("has a way with what the question forbids:", f".{name}")
        elif not known and name not in words.attributes and name not in words.names:
            note("uses", f".{name}")

    def _module(self, name: str, words: Words, note: Callable[[str, str], object]) -> list[_Place]:
        """Note a module that right answers do not import; returns the statements of one of the student's own."""
        if (own := name.partition(".")[0]) in self.files:
            return self.files[own]
        known = name in vocabulary.MODULES or name in words.modules
        if not self.strict:
            known |= name.partition(".")[0] in vocabulary.LIBRARIES or name in vocabulary.OF_TORCH
        if not known:
            note("imports", name)
        return []


def unusual_file(text: str, usual: Usual, question: str) -> list[str]:
    """What a file of kernels uses beside what the lab's own files of kernels do, in words."""
    try:
        used = words_of(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # a file that is no Python
    tree, own = ast.parse(text), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            own |= set().union(*(bound_names(part) for part in node.body))
            own |= {p.target.id for p in node.body if isinstance(p, ast.AnnAssign) and isinstance(p.target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.attributes.discard(node.value)
    known = vocabulary.ATTRIBUTES | vocabulary.KERNELS | usual.kernels.attributes | usual.words(question).attributes
    if narrow := usual.narrow.get(question):
        model = usual.words(question)
        known = frozenset(narrow.split()) | model.attributes | model.names
        used.attributes |= {n.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for n in node.names}
    missing = set(usual.needed.get(question, "").split()) - used.attributes - used.names
    limits: list[str] = []
    if usual.any_number:
        limits = own_limits(tree, named_numbers([tree]), LEAST_OF_KERNEL) + program_branches(tree)
    elif not usual.given.get(question):  # no lines that the lab gives
        limits = branches_by_size(tree, of_all=True)
    uses = [f".{name}" for name in sorted(used.attributes - known - own)]
    gone = sorted((usual.given.get(question, Counter()) - lines_of_code(text)).elements())
    return told(
        {
            "uses": uses,
            "does without": sorted(missing),
            "changes lines that stood there:": gone,
            "takes another way where": limits,
        }
    )


def unusual_calls(
    calls: Iterable[OperationWatch],
    more: Iterable[str] = (),
    most: int | None = None,
    numbers: int | None = None,
    narrow: Iterable[str] | None = None,
) -> list[str]:
    """What ran in a question that forbids something, beside what right answers run, in words.

    Args:
        calls: what ran in each call of the student's functions.
        more: operators that right answers to this question run beside the usual ones.
        most: operators that all calls together may run.
        numbers: values that all calls together may take out of torch one by one: what is computed with them is in no record.
        narrow: all operators that right answers to this question run, in place of the usual ones.
    """
    found: dict[str, list[str]] = {}
    known, total, taken = {*(vocabulary.OPERATORS if narrow is None else narrow), *more}, 0, 0
    for watch in calls:
        total += sum(watch.operations.values())
        taken += sum(count for name, count in watch.exits.items() if name in SCALAR_EXITS)
        plain = {name.rstrip("_") for name in watch.operations}
        found.setdefault("runs", []).extend(sorted(n for n in plain if n not in known and n.lstrip("_") not in known))
        found["runs"] += [n for n in watch.custom if n not in known]
        found["runs"] += [f"the kernel {n}" for n in watch.kernels if n not in known]
        found["runs"] += ["autograd" for name in watch.calls if name == "autograd" and name not in known]
        found.setdefault("takes values out of torch by", []).extend(
            n for n in watch.exits if n not in SCALAR_EXITS and n not in known
        )
    if numbers is not None and taken > numbers:
        found["takes values out of torch by"].append(
            f"{taken:,} single numbers, and right answers take {numbers:,} at most"
        )
    if most is not None and total > most:
        found["runs"].insert(0, f"{total:,} operators, and right answers run fewer than {most:,}")
    return told(found)


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


def _is_plain(name: str, value: object) -> bool:
    """Whether right answers may name a value of the setup: numbers, objects, the lab's own functions, usual ones of torch."""
    if not callable(value) or isinstance(value, torch.dtype | torch.device):
        return True
    origin = str(getattr(value, "__module__", None) or "").partition(".")[0]
    if origin in ("__main__", ""):
        return True
    usual = name in vocabulary.ATTRIBUTES or origin in vocabulary.MODULES - {"torch"}
    return origin != "utils" and usual
