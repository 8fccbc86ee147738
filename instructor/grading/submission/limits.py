"""Whether the text of an answer goes another way for inputs that no check draws. Nothing is run.

A check draws some sizes and some numbers of slots and programs, and runs on a CPU. Beyond them an answer may have a second way, whose
values are right and which breaks the words of its question. So an answer waits for a person if its text does one of these things:

1. *It goes by a large number of its own*: it compares something with it, cuts something there (`min`, `clamp`), or divides without a rest,
   the number by something or something by the number.
2. *It asks which device it runs on*: by `is_cuda` or `is_available`, or by comparing a device with "cuda", "cpu" or "mps".
3. *A program of a kernel asks which one it is*: it compares its own number, or what is computed from that, with a number.

**A number of its own** stands in the text: 512, 2**10, or a name for such a number. A name stands for a number if the text assigns it to the
name, sets it as a field, gives it to an argument by default, or hands it to the argument of a function of its own. If several are
given to a name, the largest counts. No number of its own is the default of an argument that has a large default in the lab's own answer
to the question: that is a tile, and checks give others.

**Large** are 9 and more (`LARGE`): right answers compare numbers of dimensions and bytes of an element. In a kernel 5 and more are
large (`LARGE_IN_KERNEL`), since slots, tiles and programs are few. A negative number counts by its size if it has no point: -n < -512 is
a limit, and -1e9 stands for minus infinity.

**What meets the number** may be anything in labs 2, 3 and 4, and in kernels. In the texts of lab 1, and of a lab of your own, it is a *size*: a shape,
a length, a number of elements or bytes, a tile, or what is computed from these. Right answers there compare values with large
numbers, such as the edges of GELU.

What the lab's own answer to the question does is no sign. Numbers that a text hides are not found: in a computation (`len("...")`), in a list or a
dictionary, in what a function returns or a class of its own is given.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator

from instructor.grading.submission.text_numbers import Given, Numbers, given_values, name_of, numbers_of, sizes_of
from utils.checking.sizes import words

LARGE = 9
LARGE_IN_KERNEL = 5
# What a message says of an answer that waits, before the places in its text.
BY_NUMBER = "may go another way for some inputs:"
BY_DEVICE = "asks which device it runs on:"
BY_PROGRAM = "may go another way in some programs:"
UNREAD = "has an expression of"

_PLACES = 1000  # of one kind that are written out, which takes time: a message names fewer
_DIVIDING = (ast.FloorDiv, ast.RShift, ast.Mod)
_CUTTING = words("min max minimum maximum clamp clip clamp_max clamp_min divmod islice floordiv")
_COMPARING = words("gt ge lt le eq ne greater less index")
_DEVICES = words("cuda cpu mps")
_ASKING_DEVICE = words("is_cuda is_cpu is_mps is_available")
_READING_TEXT = words("eq ne startswith endswith find index count")


def other_ways(
    trees: Iterable[ast.AST], large: int = LARGE, only_sizes: bool = False, tiles: Collection[str] = ()
) -> dict[str, list[str]]:
    """Return what a text waits for: {what is said of it: places in the text}.

    Args:
        trees: the statements of the text; names are followed through all of them.
        large: the least number that counts.
        only_sizes: whether a number counts only where it meets a size.
        tiles: what `tiles_of` gives for the lab's own answers.
    """
    try:
        return _other_ways([node for tree in trees for node in ast.walk(tree)], large, only_sizes, tiles)
    except RecursionError:
        return {UNREAD: ["too many parts to be read"]}


def _other_ways(nodes: list[ast.AST], large: int, only_sizes: bool, tiles: Collection[str]) -> dict[str, list[str]]:
    given = given_values(nodes)
    numbers, sizes, programs = numbers_of(given, tiles), sizes_of(given, tiles), _named_programs(given)
    found: dict[str, list[str]] = {BY_NUMBER: [], BY_DEVICE: [], BY_PROGRAM: []}

    def note(what: str, node: ast.AST) -> None:
        if len(found[what]) < _PLACES:
            found[what].append(ast.unparse(node.subject if isinstance(node, ast.Match) else node)[:80])

    for node in nodes:
        parts = list(_met(node, numbers))
        by_number = any(numbers.largest_in(part) >= large for part in parts)
        if by_number and (not only_sizes or any(part in sizes for part in parts)):
            note(BY_NUMBER, node)
        if _asks_device(node):
            note(BY_DEVICE, node)
        if isinstance(node, ast.Compare) and _asks_program(node, *programs):
            note(BY_PROGRAM, node)
    return {what: list(dict.fromkeys(places)) for what, places in found.items()}


def tiles_of(trees: Iterable[ast.AST]) -> set[str]:
    """Return the names of the arguments that have a large number as default in an answer of the lab's own."""
    given = given_values([node for tree in trees for node in ast.walk(tree)])
    defaults = ((name_of(target), Numbers({}).of(value)) for target, value, by_default in given if by_default)
    return {name for name, number in defaults if number is not None and number >= LARGE}


def _met(node: ast.AST, numbers: Numbers) -> Iterator[ast.expr]:
    """The expressions of which one decides about another here: compared, cut or divided without a rest."""
    if isinstance(node, ast.Compare):
        yield from (node.left, *node.comparators)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, _DIVIDING):
        if numbers.of(node) is None:  # of numbers alone it is one
            yield from (node.left, node.right)
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, _DIVIDING):
        yield from (node.target, node.value)
    elif isinstance(node, ast.Call) and (name_of(node.func) in _CUTTING or name_of(node.func).strip("_") in _COMPARING):
        yield from (*node.args, *(word.value for word in node.keywords))
        if isinstance(node.func, ast.Attribute):
            yield node.func.value
    elif isinstance(node, ast.Match):
        yield node.subject
        for case in node.cases:
            yield from (part.value for part in ast.walk(case.pattern) if isinstance(part, ast.MatchValue))


def _asks_device(node: ast.AST) -> bool:
    """Whether a text asks for the device: by an attribute, or by comparing its name."""
    if isinstance(node, ast.Attribute):
        return node.attr in _ASKING_DEVICE or (node.attr == "index" and name_of(node.value) == "device")
    reads = isinstance(node, ast.Call) and name_of(node.func).strip("_") in _READING_TEXT
    texts = ast.walk(node) if reads or isinstance(node, ast.Compare | ast.MatchValue) else ()
    return any(
        isinstance(t, ast.Constant) and isinstance(t.value, str) and t.value.partition(":")[0] in _DEVICES
        for t in texts
    )


def _named_programs(given: Iterable[Given]) -> tuple[set[str], set[str]]:
    """(names that are computed from `program_id`, names of whole rows and columns, which are computed from `arange`)."""
    programs: set[str] = set()
    several: set[str] = set()
    for _ in range(4):  # names of names
        for target, value, _ in given:
            if _mentions(value, several, "arange"):
                several.add(name_of(target))
            if _mentions(value, programs, "program_id"):
                programs.add(name_of(target))
    return programs - several - {""}, several - {""}


def _asks_program(node: ast.Compare, programs: set[str], several: set[str]) -> bool:
    parts = [node.left, *node.comparators]
    own = any(_mentions(p, programs, "program_id") and not _mentions(p, several, "arange") for p in parts)
    return own and any(Numbers({}).of(part) is not None for part in parts)


def _mentions(node: ast.AST, names: set[str], called: str) -> bool:
    return any(
        (isinstance(part, ast.Name) and part.id in names) or (isinstance(part, ast.Attribute) and part.attr == called)
        for part in ast.walk(node)
    )
