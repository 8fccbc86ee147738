"""Find shared memory that the compiler gives to a second buffer while a copy or a product still uses the first buffer.

Triton's compiler lets two buffers share memory if the last line with the first buffer's name comes before the allocation of
the second buffer. It does not see copies: a TMA store or a wgmma may read the first buffer long after that line, and the
compiler adds no wait. The simulator gives each buffer its own memory, so it compares times instead of bytes: the first use of
the second buffer must know the end of all copies and products in the first buffer.

A pair is reported only if the text lets the buffers share memory. Both allocations are in one function or in its calls. Every
loop around the second is also around the first. No later line has a name of the first buffer or of its views in this run.
If one line allocates both buffers, in two turns of a loop, they are the same memory.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable
from pathlib import Path

from . import context
from .accesses import Access, is_over
from .context import Clock, report
from .memory import Allocation
from .reports import Site

_LOOPS = (ast.For, ast.While)
Chain = tuple[Site, ...]


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


@functools.cache
def _may_share(first: Chain, second: Chain, names: frozenset, second_names: frozenset) -> bool:
    """Return whether the text lets the compiler give the second buffer the memory of the first.

    first, second: the line of each allocation and the lines of the calls around it, innermost first. names, second_names: the
    (function, variable) pairs of the buffers.
    """
    if first == second:
        return True
    while len(first) > 1 and len(second) > 1 and first[-1] == second[-1]:
        first, second = first[:-1], second[:-1]
    if second[-1].line < first[-1].line:  # it is from the next turn of a loop: take the order in the text
        first, second, names = second, first, second_names
    (here, there), function = (first[-1].line, second[-1].line), _source(first[-1])
    if function is None or _source(second[-1]) is not function or here == there:
        return False
    if _lines_around(function, there) - _lines_around(function, here):
        return False  # a loop's buffers are alive in all of its turns
    simple = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
    allocating = [n for n in ast.walk(function) if isinstance(n, simple) and n.lineno <= there]
    # The arguments of a function that allocates may be used inside of it.
    after = max(n.lineno - 1 if len(second) > 1 else n.end_lineno or n.lineno for n in allocating)
    later = (n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    return not any((function.name, n.id) in names and n.lineno > after for n in later)


def _under_way(first: Allocation, clocks: list[Clock]) -> Access | None:
    """Return an asynchronous access to a buffer that is not over by these clocks, one for each block; None without one."""
    for records, clock in zip(first.records, clocks, strict=True):
        for old in records:
            if old.component[0] != "partition" and not is_over(old, clock):
                return old
    return None


def exchange(what: str, crosses: Callable[[], bool]) -> None:
    """Report a buffer in use during an exchange of values between warps: the exchange goes through memory like a new buffer's."""
    program = context.program()
    p = program.partition
    if not (p.wgmmas or p.stores or p.copies):
        return
    clocks = [block.clock for block in p.blocks]
    for first in program.allocations:
        old = _under_way(first, clocks) if first.partition == p.index else None
        if old and crosses() and _may_share(first.chain, context.sites(), frozenset(first.names), frozenset()):
            text = f"{what} moves values between warps through shared memory, and may get that of {first.label}, which no later line uses"
            text += f": {old.what} ({old.partition}, {old.site}) may still be under way there. Wait for it before that."
            report("race", text, others=(old.site,))


def finish(program) -> None:
    """Report buffers that may share the memory of another buffer which was still in use at their first use."""
    busy = [a for a in program.allocations if any(r.component[0] != "partition" for rs in a.records for r in rs)]
    # If a line allocates several buffers in one turn, nobody can tell which of them is a buffer of a later turn.
    pairs = itertools.combinations(busy, 2)
    several = {a.chain for a, b in pairs if a.chain == b.chain and a.first <= b.last and b.first <= a.last}
    for first in busy:
        for second in program.allocations[first.index + 1 :]:
            if second.first <= first.last or not second.opened or second.partition != first.partition:
                continue
            again = first.chain == second.chain  # the same line in the next turn of a loop
            names = frozenset(first.names), frozenset(second.names)
            if not _may_share(first.chain, second.chain, *names) or (again and first.chain in several):
                continue
            old = _under_way(first, second.opened)
            if old is None:
                continue
            share = "is the same memory in the next turn of the loop" if again else "may get its memory"
            text = (
                f"{second.label} is allocated after the last line that uses {first.label}, so it {share}. When "
                f"{second.label} is first used, {old.what} ({old.partition}, {old.site}) may still be under way"
            )
            hint = "" if again else f", or allocate both before line {old.site.line}"
            report("race", f"{text}. Wait for it before that{hint}.", second.opened_at, (old.site,), second.opened_by)
            break
