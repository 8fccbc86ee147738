"""Shared memory that the compiler gives to a second buffer while a copy or a product still uses the first.

Triton's compiler lets two buffers share memory if the last line that names the first comes before the allocation of the
second. It knows of lines, not of copies: a TMA store or a wgmma may read the first buffer for long after that line, and the
compiler puts no wait there. The simulator gives each buffer its own memory, so it compares times in place of bytes. Whoever
touches the second buffer first must know that what was under way in the first is over.

Only pairs are reported of which the text shows that they may share memory: both are allocated by the same call of a function, the
second in no loop that the first is not in, and no later line of that function names the first or a view of it. So buffers that
different functions allocate are never reported. Where one line allocates both, in two turns of a loop, they are
the same memory.
"""

from __future__ import annotations

import ast
import functools
import itertools
from pathlib import Path

from .accesses import Access, is_over
from .context import report
from .memory import Allocation
from .reports import Site

_LOOPS = (ast.For, ast.While)
_GIVE_TENSORS = {"load", "gather", "warpgroup_mma"}  # calls whose results are values, no views of memory


@functools.cache
def _functions(file: str) -> tuple[ast.FunctionDef, ...]:
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):  # a cell of a notebook may have no file, or magic commands
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@functools.cache
def _source(site: Site) -> ast.FunctionDef | None:
    """Return the innermost function around a line."""
    around = [f for f in _functions(site.file) if f.lineno <= site.line <= (f.end_lineno or 0)]
    return max(around, key=lambda f: f.lineno) if around else None


def _lines_around(function: ast.FunctionDef, line: int) -> set[int]:
    """Return the first lines of the loops around a line."""
    return {n.lineno for n in ast.walk(function) if isinstance(n, _LOOPS) and n.lineno <= line <= (n.end_lineno or 0)}


def _called(call: ast.Call) -> str:
    """Return the last part of the name of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _names_of(function: ast.FunctionDef, line: int) -> set[str]:
    """Return the names that what a line allocates may have: its own, those of views, and of what holds it."""
    statements = [n for n in ast.walk(function) if isinstance(n, ast.Assign | ast.AnnAssign | ast.AugAssign)]
    names: set[str] = set()
    while True:
        before = len(names)
        for statement in statements:
            if isinstance(statement.value, ast.Call) and _called(statement.value) in _GIVE_TENSORS:
                continue
            inside = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            if statement.lineno <= line <= (statement.end_lineno or 0) or inside & names:
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                names |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        if len(names) == before:
            return names


@functools.cache
def _may_share(first: Site, second: Site) -> bool:
    """Return whether the text lets the compiler give a buffer the memory of one that was allocated before it."""
    if first == second:
        return True
    function = _source(first)
    if function is None or _source(second) is not function or second.line <= first.line:
        return False
    if _lines_around(function, second.line) - _lines_around(function, first.line):
        return False  # what a loop uses is alive in all of its turns
    names = _names_of(function, first.line)
    if not names:
        return False  # nobody holds it by a name: the text does not show its life
    simple = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
    allocating = [n for n in ast.walk(function) if isinstance(n, simple) and n.lineno <= second.line]
    after = max(n.end_lineno or n.lineno for n in allocating)
    later = (n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    return not any(n.id in names and n.lineno > after for n in later)


def _under_way(first: Allocation, second: Allocation) -> Access | None:
    """Return what still used the first buffer when the second one was first touched."""
    for index, records in enumerate(first.records):
        for old in records:
            if old.component[0] != "partition" and not is_over(old, second.opened[index]):
                return old
    return None


def finish(program) -> None:
    """Report buffers that may lie in the memory of one that was still in use when they were first touched."""
    busy = [a for a in program.allocations if any(r.component[0] != "partition" for rs in a.records for r in rs)]
    # A line that allocates several buffers in one turn: which of them a later turn's buffer is, its number does not say.
    pairs = itertools.combinations(busy, 2)
    several = {a.site for a, b in pairs if a.site == b.site and a.first <= b.last and b.first <= a.last}
    for first in busy:
        for second in program.allocations[first.index + 1 :]:
            if second.first <= first.last or not second.opened or second.place != first.place:
                continue
            if not _may_share(first.site, second.site) or (first.site == second.site and first.site in several):
                continue
            old = _under_way(first, second)
            if old is None:
                continue
            again = first.site == second.site  # the same line in the next turn of a loop
            share = "is the same memory in the next turn of the loop" if again else "may get its memory"
            text = (
                f"{second.label} is allocated after the last line that uses {first.label}, so it {share}. When "
                f"{second.label} is first used, {old.what} ({old.partition}, {old.site}) may still be under way"
            )
            hint = "" if again else f", or allocate both before line {old.site.line}"
            report(
                "race",
                f"{text}. Wait for it before that{hint}.",
                at=second.opened_at,
                others=(old.site,),
                partition=second.opened_by,
            )
            break
