"""Run kernel source as Python: compile each function anew, with the simulator's calls and assignments.

This patches nothing in Triton. A call looks up its function in the table of known functions by identity, so that aliases,
helpers in other modules and functions as arguments work. Line numbers are those of the source file.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types

import numpy as np
import triton.language as tl
from triton.compiler.code_generator import CodeGenerator
from triton.experimental.gluon import language as gl
from triton.runtime.jit import ConstexprFunction, JITFunction

from . import context, copies, language, layouts, ptx, reductions, tcgen05  # noqa: F401 (they fill the table)
from .aggregates import Aggregate, flatten, is_instance
from .context import refuse
from .known import TABLE, advice, meaning, once_for_constants, unwrap
from .memory import MemDesc
from .products import finished_tensor
from .rewriting import rewrite_body
from .tensors import NUMBERS, Tensor, to_tensor

_rewritten: dict = {}


def rewrite(jit) -> tuple:
    """Return (a Python function that runs a jit function's body, its signature, the places of the constexpr parameters)."""
    original = jit.fn
    if original in _rewritten:
        return _rewritten[original]
    tree = ast.parse(textwrap.dedent("".join(jit.raw_src)))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list, function.returns = [], None
    function.args.defaults, function.args.kw_defaults = [], [None] * len(function.args.kwonlyargs)
    for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        argument.annotation = None
    ast.increment_lineno(tree, jit.starting_line_number - 1)
    closure = inspect.getclosurevars(original).nonlocals if original.__closure__ else {}
    local = {a.arg for a in function.args.args} | {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    names = {k: v for k, v in {**original.__globals__, **closure}.items() if k not in local}
    function.body = rewrite_body(function.body, names, None if isinstance(jit, _AuthorBuiltin) else CodeGenerator)
    # An outer function holds the functions for rewritten code, and the variables of the original closure. Inside, the function
    # has a name that no kernel uses: with its own name, a method `load` would find itself when its body calls a global
    # function `load`.
    name, function.name = function.name, "__gluon_body"
    factory = ast.parse(f"def __gluon_factory({', '.join([*RUNTIME, *closure])}):\n    return {function.name}")
    assert isinstance(factory.body[0], ast.FunctionDef)
    factory.body[0].body.insert(0, function)
    space: dict = {}
    exec(compile(factory, original.__code__.co_filename, "exec"), original.__globals__, space)
    body = space["__gluon_factory"](*RUNTIME.values(), *closure.values())
    body.__code__ = body.__code__.replace(co_name=name)  # reports use the name from the source
    context.register_code(body.__code__, original.__globals__.get("__name__"))
    signature = inspect.signature(original)
    annotations = [(name, str(p.annotation)) for name, p in signature.parameters.items()]
    constant = {name: place for place, (name, text) in enumerate(annotations) if "constexpr" in text}
    _rewritten[original] = body, signature, constant
    return _rewritten[original]


def _run_of(jit):
    """Return a function that runs a @gluon.jit function; a call with all arguments by place is fast."""
    body, signature, constant = rewrite(jit)
    count, places = len(signature.parameters), tuple(constant.values())

    def run(*args, **kwargs):
        if kwargs or len(args) != count:
            return run_jit(jit, args, kwargs)
        if gl.constexpr in map(type, args):
            args = tuple(map(unwrap, args))
        for place in places:
            if isinstance(args[place], Tensor):
                return run_jit(jit, args, kwargs)
        return body(*args)

    return run


def run_jit(jit, args: tuple, kwargs: dict):
    """Run a @gluon.jit function; refuse arguments that do not fit its parameters."""
    body, signature, constant = rewrite(jit)
    named = dict(zip(signature.parameters, args, strict=False)) | kwargs
    once = len(named) == len(args) + len(kwargs)
    values = [unwrap(named.pop(name, p.default)) for name, p in signature.parameters.items()]
    if named or not once or any(value is inspect.Parameter.empty for value in values):
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            refuse("kernel", f"{jit.fn.__name__}: {error}.")
    for name, place in constant.items():
        if isinstance(values[place], Tensor):
            text = "is a gl.constexpr parameter, but its argument is known only when the kernel runs"
            refuse("kernel", f"{jit.fn.__name__}: {name} {text}.")
    return body(*values)


# ---- functions for rewritten code --------------------------------------------------------------------------------


_VALUES = (*NUMBERS, str, type(None), list, tuple, gl.dtype)


def _value(x):
    return x if isinstance(x, _VALUES) else x.value


def _assign(value, label: str | tuple[str, ...]):
    """Assign a value to a variable, or to several: numbers become run-time scalars, as in Triton."""
    kind = type(value)
    if kind is Tensor:
        return value
    if kind is gl.constexpr:
        value = value.value
    if isinstance(value, NUMBERS):
        return to_tensor(value)
    if value is None and isinstance(label, tuple):
        refuse("kernel", f"`{', '.join(label)}` are taken from a function that returns nothing: is its return missing?")
    if label:
        _hold(value, label)
    if isinstance(value, tuple):
        return tuple(_assign(v, "") for v in value)
    if isinstance(label, str) and isinstance(value, MemDesc):
        if not value.allocation.name:
            value.allocation.name = label
            context.program().labels.clear()
    elif label and kind is Aggregate:
        for path, leaf in Aggregate.leaves(value):
            if isinstance(leaf, MemDesc) and not leaf.allocation.path:
                leaf.allocation.path = f"{label}.{path}"
                context.program().labels.clear()
    return value


def _items(values):
    if not isinstance(values, tuple):
        refuse("kernel", "a kernel makes a list from a tuple only, such as [x + 1 for x in (a, b)].")
    return values


def _hold(value, label: str | tuple[str, ...]) -> None:
    """Remember the running function's names for memory: the memory lives until the last line with one of them (reuse.py)."""
    for part, names in zip(value, label, strict=False) if isinstance(label, tuple) else [(value, label)]:
        for leaf in (part,) if type(part) is MemDesc else flatten((part,)):
            if isinstance(leaf, MemDesc):
                function = context.site().function
                leaf.allocation.names.update((function, name) for name in names.split())


def _two_values(follower, other, names: tuple[str, str]) -> None:
    """Refuse a loop in which a name follows another name if both begin as one value: Triton then never changes the follower."""
    if follower is other and type(other) is Tensor:
        y, x = names
        text = f"{y} and {x} are one value before this loop, in which Triton then keeps {y} as it is"
        refuse("kernel", f"{text}. Write `{y} = {x} + 0` before the loop.")


def _layout(value, label: str):
    """Refuse an assignment of a layout without gl.constexpr."""
    refuse("kernel", f"A layout is a compile-time constant: write `{label or 'name'}: gl.constexpr = ...`.")


def _unnamed_layout(value):
    """Refuse a layout from a tensor's type in the call of a jit function: Triton 3.6 needs a name for it."""
    text = "Triton 3.6 takes no layout that is read from a type in the call of a jit function"
    refuse("kernel", f"{text}: write `layout: gl.constexpr = ...` before the call, and give it `layout`.")


def _constants(values: dict, names: tuple[str, ...]) -> dict:
    """Return the names with compile-time constants, and these constants."""
    return {name: values[name] for name in names if isinstance(values.get(name), NUMBERS)}


def _check_constants(constants: dict, values: dict) -> None:
    """Refuse a loop that gives a run-time value to a name with a compile-time constant."""
    for name, constant in constants.items():
        if name != _TURN and isinstance(values.get(name), Tensor):
            text = f"`{name}` was a compile-time constant before this loop ({constant}), and the loop assigns to it"
            hint = "Give the variable in the loop another name (the variable of gl.static_range is such a constant)"
            refuse("kernel", f"{text}: the compiler refuses a variable that changes its type in a loop. {hint}.")


_TURN = "of the turn before"  # key of the effects and values after a turn of a while loop; no name of a kernel


def _turn(state: dict, values: dict, names: tuple[str, ...]) -> None:
    """Let other partitions go on if a turn of a while loop has changed nothing: alone, the loop would never end."""
    program = context.program()
    now = [values.get(name) for name in names]
    effects, before = state.get(_TURN, (-1, []))
    if effects == program.effects and all(map(_is_same, before, now)):
        program.spin()
    state[_TURN] = program.effects, now


def _is_same(a, b) -> bool:
    return a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and np.array_equal(a._data, b._data))


def _constexpr(value, label: str, unrolled: set[str] | None = None):
    """Return the value of a constant; unrolled: names of constants from earlier turns of a static_range."""
    if isinstance(value, Tensor):
        refuse("kernel", f"{label}: gl.constexpr = ... needs a value known when the kernel is compiled.")
    if unrolled is not None:
        if label in unrolled:
            text = f"`{label}: gl.constexpr` gets a second value in the next turn of gl.static_range, and the compiler refuses that"
            refuse("kernel", f"{text}. Write the value where it is used, or compute it in a function of its own.")
        unrolled.add(label)
    return unwrap(value)


def _step() -> None:
    context.program().step()


class _LoopVariable(Tensor):
    """The variable of a loop after the loop: Triton leaves it undefined, so every use is refused."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        super().__init__(0, gl.int32)
        self.name = name

    @property
    def data(self):
        """Refuse a use."""
        text = f"`{self.name}` is the variable of a loop, and behind the loop Triton leaves it undefined"
        refuse("kernel", f"{text}. Compute it from the loop's bounds.")


def _range(*bounds):
    """Yield the numbers of `range` as run-time scalars."""
    if len(bounds) == 3 and isinstance(bounds[2], Tensor) and bounds[2].data < 1:
        text = f"range with a step of {bounds[2].data} that is known at run time only: Triton counts upwards there"
        refuse("kernel", f"{text}, so the loop has no turns, or no end. Write the step as a constant.")
    return (Tensor(i, gl.int32) for i in range(*(to_tensor(b).data for b in bounds)))


def _static_range(*bounds):
    if any(isinstance(b, Tensor) for b in bounds):
        text = "gl.static_range needs constexpr bounds"
        refuse("kernel", f"{text}; use range for bounds known only when the kernel runs.")
    return range(*(int(b) for b in bounds))


for _function in (bool, float, getattr, hasattr, int, len, list, print, repr, str, tuple, type):
    TABLE[_function] = _function  # functions of Python, for constants
TABLE |= {
    range: _range,
    min: lambda *values: functools.reduce(meaning("minimum"), values),
    max: lambda *values: functools.reduce(meaning("maximum"), values),
    isinstance: is_instance,
    gl.static_range: _static_range,
    tl.static_range: _static_range,
    tl.range: lambda *bounds, **hints: _range(*bounds),
    gl.constexpr: unwrap,
    tl.constexpr: unwrap,
    gl.tensor: lambda handle, type=None: finished_tensor(handle),  # for builtins of a kernel's author
}


_resolved: dict[int, tuple] = {}  # {id: (function, its meaning)}; the reference to the function keeps the id unique


def find(function):
    """Return the simulator's version of a function, before kernel code calls it."""
    context.program().step()
    found = _resolved.get(id(function))
    if found is not None:
        return found[1]
    if type(function) is types.MethodType:
        owner = function.__self__
        if type(owner) is not Aggregate:
            return function  # methods of tensors, shared memory and constants
        return functools.partial(_meaning_of(function.__func__), owner)
    return _meaning_of(function)


def call(function, *args, **kwargs):
    """Make a call in kernel code."""
    return find(function)(*args, **kwargs)


def _meaning_of(function):
    if id(function) not in _resolved:
        _resolved[id(function)] = function, _resolve(unwrap(function))
    return _resolved[id(function)][1]


def _resolve(function):
    try:
        ours = TABLE.get(function)
    except TypeError:  # the function has no hash
        ours = None
    if ours is not None:
        return ours
    if isinstance(function, JITFunction):
        return _run_of(function)
    if isinstance(function, ConstexprFunction):
        return once_for_constants(
            lambda *args, **kwargs: unwrap(function.fn(*map(unwrap, args), **{k: unwrap(v) for k, v in kwargs.items()}))
        )
    if getattr(function, "__triton_aggregate__", False):
        return lambda *args, **kwargs: Aggregate(function, args, kwargs)
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType):
        return function  # methods of Python's constants
    if isinstance(function, type):
        return once_for_constants(function)
    module = getattr(function, "__module__", "") or ""
    name = f"{module}.{getattr(function, '__qualname__', function)}".replace("_VariableFunctionsClass.", "")
    if module.startswith("triton."):
        refuse("unknown operation", f"gluon_cpu does not know {name}.{advice(name)}")
    if getattr(function, "__triton_builtin__", False):
        author = _AuthorBuiltin(function)
        return lambda *args, **kwargs: run_jit(author, args, {**kwargs, "_semantic": AUTHOR_SEMANTIC})
    refuse("kernel", f"{name} is no @triton.jit or @gluon.jit function, so a kernel cannot call it.")


class _AuthorBuiltin:
    """A @builtin function from a kernel's own module, in the form of a jit function."""

    def __init__(self, function):
        self.fn = inspect.unwrap(function)
        self.raw_src, self.starting_line_number = inspect.getsourcelines(self.fn)


class _Semantic:
    """The argument `_semantic` for an author's builtin. Triton's compiler is not there, so every use is refused."""

    def __getattr__(self, name):
        refuse("unknown operation", f"gluon_cpu does not know _semantic.{name}: call a function of gl in its place.")


AUTHOR_SEMANTIC = _Semantic()
_called: tuple = (find, refuse, set, unwrap, _items, _assign, _layout, _turn, _two_values, _constants, _check_constants)
_called += (_constexpr, _unnamed_layout, _value, _LoopVariable, _step)
RUNTIME = {f"__gluon_{function.__name__.strip('_')}": function for function in _called}
