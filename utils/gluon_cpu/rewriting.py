"""Rewrite kernel source: calls, assignments and loops become calls of the interpreter's functions."""

from __future__ import annotations

import ast
import functools

from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from utils.machine import versions


def rewrite_body(body: list[ast.stmt], names: dict, reader: type | None) -> list[ast.stmt]:
    """Return the rewritten statements of a kernel. names: values of its global names. reader: a visitor with all allowed nodes."""
    return _Rewriter(names, reader, _reads(body)).visit(ast.Module(body, [])).body


class _Rewriter(ast.NodeTransformer):
    """Replaces calls, assignments, loops and constexpr globals by the functions of RUNTIME."""

    def __init__(self, names: dict, reader: type | None, reads: list[ast.Name]):
        self.names, self.reader, self.reads = names, reader, reads
        # Memory takes its names from kernels, and not from variables in Triton's helpers.
        self.names_memory = not str(names.get("__name__", "")).startswith("triton.")
        self.loops = 0

    def visit(self, node):
        kind = type(node).__name__
        of_others = not isinstance(node, ast.stmt | ast.expr) or kind in ("Starred", "FormattedValue")
        if of_others or self.reader is None or hasattr(self.reader, f"visit_{kind}"):
            return super().visit(node)
        why = f"Triton has no {kind} in a kernel: `{ast.unparse(node).splitlines()[0]}` does not compile."
        refused = _runtime_call("refuse", ast.Constant("kernel"), ast.Constant(why))
        return _at(ast.Expr(refused) if isinstance(node, ast.stmt) else refused, node)

    def visit_ListComp(self, node):
        self.generic_visit(node)
        node.generators[0].iter = _at(_runtime_call("items", node.generators[0].iter), node)
        return node

    def visit_Call(self, node):
        refused = unnamed_layouts(node, self.names) if versions.layouts_need_names() else []
        self.generic_visit(node)
        for argument in refused:
            argument.value = _at(_runtime_call("unnamed_layout", argument.value), argument)
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in ("_semantic", "_generator")]
        node.func = _at(_runtime_call("find", node.func), node)
        return node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if node.attr == "value" and isinstance(node.ctx, ast.Load):
            return _at(_runtime_call("value", node.value), node)
        return node

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Load) and isinstance(self.names.get(node.id), gl.constexpr):
            return _at(_runtime_call("unwrap", node), node)
        return node

    def visit_Assign(self, node):
        self.generic_visit(node)
        target = node.targets[0] if self.names_memory else ast.Tuple([])
        label = tuple(map(_names_in, target.elts)) if isinstance(target, ast.Tuple) else _names_in(target)
        kind = "layout" if _makes_a_layout(node.value) else "assign"
        node.value = _at(_runtime_call(kind, node.value, ast.Constant(label)), node)
        return node

    def visit_AugAssign(self, node):
        self.generic_visit(node)
        target = _name(node.target.id) if isinstance(node.target, ast.Name) else node.target
        value = _runtime_call("assign", ast.BinOp(target, node.op, node.value), ast.Constant(""))
        return _at(ast.Assign([node.target], value), node)

    def visit_AnnAssign(self, node):
        self.generic_visit(node)
        if node.value is None:
            return _at(ast.Pass(), node)
        kind = "constexpr" if "constexpr" in ast.unparse(node.annotation) else "assign"
        label = node.target.id if isinstance(node.target, ast.Name) else ""
        before = [_name(node.unrolled)] if kind == "constexpr" and hasattr(node, "unrolled") else []
        return _at(ast.Assign([node.target], _runtime_call(kind, node.value, ast.Constant(label), *before)), node)

    def visit_For(self, node):
        unrolled = isinstance(node, ast.For) and "static_range" in ast.unparse(node.iter)
        carried = [] if unrolled else _assigned(node.body)
        apart = [_runtime_call("two_values", *map(_name, x), ast.Constant(x)) for x in _followers(node) if not unrolled]
        for name in () if unrolled or isinstance(node, ast.While) else _only_bounds(node, self.reads):
            text = f"Triton up to 3.7 never changes `{name}`, which this loop carries for the bounds of an inner loop alone. "
            text += "Compute it from the loop's variable, or write the inner loop with while."
            apart.append(_runtime_call("refuse", ast.Constant("kernel"), ast.Constant(text)))
        self.loops += 1
        state = f"__gluon_loop_{self.loops}"
        for statement in node.body if unrolled else ():
            statement.unrolled = state
        self.generic_visit(node)
        node.body.insert(0, _at(ast.Expr(_runtime_call("step")), node))
        if unrolled:
            return [_at(ast.Assign([ast.Name(state, ast.Store())], _runtime_call("set")), node), node]
        # A name with a compile-time constant before the loop must not have a run-time value after a turn.
        before = _runtime_call("constants", _locals(), ast.Constant(tuple(carried)))
        node.body.insert(0, _at(ast.Expr(_runtime_call("check_constants", _name(state), _locals())), node))
        if isinstance(node, ast.While):
            turn = _runtime_call("turn", _name(state), _locals(), ast.Constant(tuple(carried)))
            node.body.insert(0, _at(ast.Expr(turn), node))
        after = _at(ast.Expr(_runtime_call("check_constants", _name(state), _locals())), node)
        apart = [_at(ast.Expr(call), node) for call in apart]
        begin = _at(ast.Assign([ast.Name(state, ast.Store())], before), node)
        if isinstance(node, ast.While):
            return [*apart, begin, node, after]
        behind = ast.Assign([node.target], _runtime_call("LoopVariable", ast.Constant(ast.unparse(node.target))))
        return [*apart, begin, node, after, _at(behind, node)]

    visit_While = visit_For


def _followers(loop: ast.For | ast.While) -> list[tuple[str, str]]:
    """Return pairs (y, x) of names: a loop reads y, then assigns y = x, and later changes x."""
    found = list[tuple[str, str]]()
    seen: list[ast.AST] = [loop.test] if isinstance(loop, ast.While) else []
    for i, statement in enumerate(loop.body):
        match statement:
            case ast.Assign(targets=[ast.Name(id=y)], value=ast.Name(id=x)) if x in _assigned(loop.body[i + 1 :]):
                read = any(isinstance(n, ast.Name) and n.id == y for part in seen for n in ast.walk(part))
                if read and not {x, y} & {*_assigned(loop.body[:i])} and y not in _assigned(loop.body[i + 1 :]):
                    found.append((y, x))
        seen.append(statement)
    return found


def _only_bounds(loop: ast.For, reads: list[ast.Name]) -> set[str]:
    """Return names that a loop carries from turn to turn only for the bounds of inner loops. reads: all reads in the kernel."""
    nodes = [node for statement in loop.body for node in ast.walk(statement)]
    bounds = [node.iter for node in nodes if isinstance(node, ast.For) and "static_range" not in ast.unparse(node.iter)]
    changes = sorted((x for x in nodes if isinstance(x, ast.Assign | ast.AugAssign)), key=lambda x: x.lineno)
    moves = [node for node in changes if not any(isinstance(part, ast.Call) for part in ast.walk(node.value))]
    apart = {id(name) for name in _reads([*bounds, *(move.value for move in moves)])}
    used, bounding = {name.id for name in reads if id(name) not in apart}, {name.id for name in _reads(bounds)}
    for move in moves * len(moves):  # the names that a move reads serve the purposes of the names that it assigns
        for purpose in (used, bounding):
            purpose |= {name.id for name in _reads([move.value])} if purpose & {*_assigned([move])} else set()
    first = {name: change for change in changes[::-1] for name in _assigned([change])}
    carried = {name.id for name in reads if name.id in first and name.lineno <= first[name.id].lineno}
    carried |= {name for name, change in first.items() if isinstance(change, ast.AugAssign)}
    return carried & bounding - used


def _reads(parts: list) -> list[ast.Name]:
    names = (node for part in parts for node in ast.walk(part) if isinstance(node, ast.Name))
    return [name for name in names if isinstance(name.ctx, ast.Load)]


def _assigned(body: list[ast.stmt]) -> list[str]:
    """Return the names to which statements assign run-time values."""
    targets = [
        target
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Assign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
    return list(dict.fromkeys(names))


def _makes_a_layout(node: ast.expr) -> bool:
    """Return whether an expression calls the class of a layout, such as `gl.BlockedLayout(...)`."""
    # Calls are rewritten already: the function is the argument of `find`.
    function = node.func.args[0] if isinstance(node, ast.Call) and isinstance(node.func, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", "")).endswith("Layout")


def unnamed_layouts(call: ast.Call, names: dict) -> list[ast.Attribute]:
    """Return the arguments `x.type.layout` in a call of a jit function of `names`: Triton 3.6 refuses them without a name."""
    callee: ast.expr = call.func
    path: list[str] = []
    while isinstance(callee, ast.Attribute):
        path.insert(0, callee.attr)
        callee = callee.value
    if not isinstance(callee, ast.Name) or callee.id not in names:
        return []
    function = functools.reduce(lambda value, part: getattr(value, part, None), path, names[callee.id])
    if not isinstance(function, JITFunction):
        return []
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return [a for a in arguments if isinstance(a, ast.Attribute) and ".type.layout" in ast.unparse(a)]


def _names_in(target: ast.expr) -> str:
    return " ".join(n.id for n in ast.walk(target) if isinstance(n, ast.Name))


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _locals() -> ast.Call:
    return ast.Call(_name("locals"), [], [])


def _runtime_call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(_name(f"__gluon_{name}"), list(arguments), [])


def _at(new, old):
    """Give a new node the line of the old node; its parts from the source keep their lines."""
    if not hasattr(new, "lineno"):
        ast.copy_location(new, old)
        for child in ast.iter_child_nodes(new):
            _at(child, old)
    return new
