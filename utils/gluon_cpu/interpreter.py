"""Running kernel source as Python: the function is compiled anew with every call and assignment going through here.

Nothing of Triton is patched for this: a call looks up what the callee means to the simulator, by identity, so aliases,
helpers in other modules and functions passed as arguments work. Line numbers stay those of the source file.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from . import barriers, context, copies, language, ptx, reductions  # noqa: F401 (they fill the table)
from .aggregates import Aggregate, is_instance
from .context import refuse
from .dtypes import of_number, round_number
from .known import TABLE, meaning, unwrap
from .memory import MemDesc
from .products import finished_tensor
from .tensors import NUMBERS, Tensor, to_tensor

try:
    from triton.runtime.jit import ConstexprFunction
except ImportError:
    from triton.runtime.jit import constexpr_function as ConstexprFunction  # type: ignore


# ---- rewriting ---------------------------------------------------------------------------------------------------


class _Rewriter(ast.NodeTransformer):
    """Calls, assignments, loops and constexpr globals go through the runtime names below."""

    def __init__(self, names: dict):
        self.names = names  # what the function's global names stand for

    def visit_Call(self, node):
        self.generic_visit(node)
        return _at(ast.Call(_name("__gluon_call"), [node.func, *node.args], node.keywords), node)

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if node.attr == "value" and isinstance(node.ctx, ast.Load):
            return _at(ast.Call(_name("__gluon_value"), [node.value], []), node)
        return node

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Load) and isinstance(self.names.get(node.id), gl.constexpr):
            return _at(ast.Call(_name("__gluon_unwrap"), [node], []), node)
        return node

    def visit_Assign(self, node):
        self.generic_visit(node)
        label = node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""
        node.value = _at(ast.Call(_name("__gluon_assign"), [node.value, ast.Constant(label)], []), node)
        return node

    def visit_AugAssign(self, node):
        self.generic_visit(node)
        target = ast.Name(node.target.id, ast.Load()) if isinstance(node.target, ast.Name) else node.target
        value = ast.Call(_name("__gluon_assign"), [ast.BinOp(target, node.op, node.value), ast.Constant("")], [])
        return _at(ast.Assign([node.target], value), node)

    def visit_AnnAssign(self, node):
        self.generic_visit(node)
        is_constant = "constexpr" in ast.unparse(node.annotation)
        if node.value is None:
            return _at(ast.Pass(), node)
        name = "__gluon_constexpr" if is_constant else "__gluon_assign"
        label = node.target.id if isinstance(node.target, ast.Name) else ""
        value = ast.Call(_name(name), [node.value, ast.Constant(label)], [])
        return _at(ast.Assign([node.target], value), node)

    def visit_For(self, node):
        self.generic_visit(node)
        node.body.insert(0, _at(ast.Expr(ast.Call(_name("__gluon_step"), [], [])), node))
        return node

    def visit_While(self, node):
        self.generic_visit(node)
        node.body.insert(0, _at(ast.Expr(ast.Call(_name("__gluon_step"), [], [])), node))
        return node


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _at(new, old):
    for child in ast.walk(new):
        if not hasattr(child, "lineno"):
            ast.copy_location(child, old)
    return new


_compiled: dict = {}


def compiled(jit) -> tuple:
    """(Python function that runs a jit function's body, its signature, which parameters are constexpr)."""
    key = jit.fn
    if key in _compiled:
        return _compiled[key]
    raw, first = jit.raw_src, jit.starting_line_number
    tree = ast.parse(textwrap.dedent("".join(raw)))
    function = tree.body[0]
    function.decorator_list, function.returns = [], None
    function.args.defaults, function.args.kw_defaults = [], [None] * len(function.args.kwonlyargs)
    for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        argument.annotation = None
    ast.increment_lineno(tree, first - 1)
    closure = inspect.getclosurevars(key).nonlocals if key.__closure__ else {}
    local = {a.arg for a in function.args.args} | {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    names = {k: v for k, v in {**key.__globals__, **closure}.items() if k not in local}
    function.body = [_Rewriter(names).visit(statement) for statement in function.body]
    outer = [*RUNTIME, *closure]
    factory = ast.FunctionDef(
        "__gluon_factory",
        ast.arguments([], [ast.arg(n) for n in outer], None, [], [], None, []),
        [function, ast.Return(_name(function.name))],
        [],
        None,
    )
    if "type_params" in ast.FunctionDef._fields:
        factory.type_params = []
    module = ast.Module([_at(factory, function)], [])
    ast.fix_missing_locations(module)
    space: dict = {}
    exec(compile(module, key.__code__.co_filename, "exec"), key.__globals__, space)
    body = space["__gluon_factory"](*RUNTIME.values(), *closure.values())
    context.register_code(body.__code__)
    parameters = inspect.signature(key).parameters
    constant = {name for name, p in parameters.items() if "constexpr" in str(p.annotation)}
    _compiled[key] = body, parameters, constant
    return _compiled[key]


def run_jit(jit, args: tuple, kwargs: dict):
    """Run a @gluon.jit function."""
    body, parameters, constant = compiled(jit)
    values = dict(zip(parameters, args, strict=False))
    if len(args) > len(parameters):
        raise TypeError(f"{jit.fn.__name__} takes {len(parameters)} arguments, got {len(args)}.")
    for name, value in kwargs.items():
        if name not in parameters or name in values:
            raise TypeError(f"{jit.fn.__name__} has no parameter {name}, or it was given twice.")
        values[name] = value
    for name, p in parameters.items():
        if name not in values:
            if p.default is p.empty:
                refuse("kernel", f"{jit.fn.__name__}: the argument {name} is missing.")
            values[name] = p.default
        value = values[name]
        values[name] = value = unwrap(value)
        if name in constant and isinstance(value, Tensor):
            refuse(
                "kernel",
                f"{jit.fn.__name__}: {name} is a gl.constexpr parameter, but its argument is "
                "known only when the kernel runs.",
            )
    return body(*(values[name] for name in parameters))


# ---- what rewritten code calls -----------------------------------------------------------------------------------


def _value(x):
    return x if isinstance(x, (*NUMBERS, str, type(None), list, tuple, gl.dtype)) else x.value


def _assign(value, label: str):
    """A plain assignment: numbers become run-time scalars, as in Triton."""
    if isinstance(value, Tensor):
        return value
    value = unwrap(value)
    if isinstance(value, NUMBERS):
        dtype = of_number(value)
        return Tensor(round_number(value, dtype), dtype)
    if isinstance(value, tuple):
        return tuple(_assign(v, "") for v in value)
    if label and isinstance(value, MemDesc):
        value.allocation.name = value.allocation.name or label
    elif label and isinstance(value, Aggregate):
        for path, leaf in value.leaves():
            if isinstance(leaf, MemDesc):
                leaf.allocation.path = leaf.allocation.path or f"{label}.{path}"
    return value


def _constexpr(value, label: str):
    if isinstance(value, Tensor):
        refuse("kernel", f"{label}: gl.constexpr = ... needs a value known when the kernel is compiled.")
    return unwrap(value)


def _step() -> None:
    context.program().step()


def _range(*bounds):
    """range: the loop variable is a run-time scalar, unless it runs over constants that stay constants."""
    values = [to_tensor(b).data for b in bounds]
    return (Tensor(i, gl.int32) for i in range(*values))


def _static_range(*bounds):
    for b in bounds:
        if isinstance(b, Tensor):
            refuse(
                "kernel",
                "gl.static_range needs constexpr bounds; use range for bounds known only when the kernel runs.",
            )
    return range(*(int(b) for b in bounds))


def _min(*values):
    out = values[0]
    for v in values[1:]:
        out = meaning("minimum")(out, v)
    return out


def _max(*values):
    out = values[0]
    for v in values[1:]:
        out = meaning("maximum")(out, v)
    return out


def _len(x):
    return len(x)


def _tensor(handle, type=None):
    """gl.tensor(handle, type) in a kernel author's own builtin: the registers that a token stands for."""
    return finished_tensor(handle)


TABLE.update(
    {
        len: _len,
        range: _range,
        min: _min,
        max: _max,
        isinstance: is_instance,
        int: int,
        float: float,
        bool: bool,
        str: str,
        repr: repr,
        list: list,
        tuple: tuple,
        getattr: getattr,
        hasattr: hasattr,
        type: type,
        print: print,
        abs: lambda x: meaning("abs")(x),
        gl.static_range: _static_range,
        gl.constexpr: unwrap,
        tl.constexpr: unwrap,
        gl.tensor: _tensor,
    }
)


def call(function, *args, **kwargs):
    """A call in kernel code."""
    context.program().step()
    function = unwrap(function)
    if isinstance(function, types.MethodType) and isinstance(function.__self__, Aggregate):
        function, args = function.__func__, (function.__self__, *args)
    kwargs.pop("_semantic", None)
    kwargs.pop("_generator", None)
    try:
        found = TABLE.get(function)
    except TypeError:
        found = None
    if found is not None:
        return found(*args, **kwargs)
    if isinstance(function, JITFunction):
        return run_jit(function, args, kwargs)
    if isinstance(function, ConstexprFunction):
        return unwrap(function.fn(*map(unwrap, args), **{k: unwrap(v) for k, v in kwargs.items()}))
    if getattr(function, "__triton_aggregate__", False):
        return Aggregate(function, args, kwargs)
    owner = getattr(function, "__self__", None)
    if isinstance(function, types.MethodType) and isinstance(owner, (Tensor, MemDesc)):
        return function(*args, **kwargs)
    if owner is not None and not isinstance(owner, types.ModuleType):
        return function(*args, **kwargs)  # methods of constants: numbers, strings, layouts
    if isinstance(function, type):
        return function(*args, **kwargs)  # layouts and other constants
    module = getattr(function, "__module__", "") or ""
    name = f"{module}.{getattr(function, '__qualname__', function)}"
    if getattr(function, "__triton_builtin__", False) and not module.startswith("triton."):
        return _author_builtin(function, args, kwargs)
    if module.startswith("triton."):
        refuse("unknown operation", f"gluon_cpu does not know {name}.")
    refuse("kernel", f"{name} is no @gluon.jit function, so a kernel cannot call it.")


class _AuthorBuiltin:
    """A @builtin function from a kernel's own module, seen as a jit function."""

    def __init__(self, function):
        self.fn = inspect.unwrap(function)
        self.raw_src, self.starting_line_number = inspect.getsourcelines(self.fn)


def _author_builtin(function, args, kwargs):
    return run_jit(_AuthorBuiltin(function), args, {**kwargs, "_semantic": None})


RUNTIME = {
    "__gluon_call": call,
    "__gluon_assign": _assign,
    "__gluon_constexpr": _constexpr,
    "__gluon_value": _value,
    "__gluon_unwrap": unwrap,
    "__gluon_step": _step,
}
