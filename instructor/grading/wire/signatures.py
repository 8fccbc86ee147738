"""Proxies: functions that call a function in another process, and have its name and its parameters.

FlexAttention counts the positional arguments of a function to tell a mask from a score modifier, and so do checks.
A proxy with `(*args, **kwargs)` would be neither of the two.
"""

from __future__ import annotations

import inspect
import keyword
import unicodedata
from collections.abc import Callable
from typing import Any

MAX_PARAMETERS = 40
_KINDS = ("only", "plain", "rest", "named", "named rest")
_OF = {
    inspect.Parameter.POSITIONAL_ONLY: "only",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "plain",
    inspect.Parameter.VAR_POSITIONAL: "rest",
    inspect.Parameter.KEYWORD_ONLY: "named",
    inspect.Parameter.VAR_KEYWORD: "named rest",
}
_ANYTHING = [["args", "rest", False], ["kwargs", "named rest", False]]
_LEFT_OUT = type("default", (), {"__repr__": lambda self: "..."})()


def parameters_of(function: Callable) -> list[list] | None:
    """[[name, kind, has a default], ...] as the caller meets them; None where Python does not know."""
    try:
        code = getattr(function, "__code__", None)
        if code is not None and not inspect.ismethod(function):  # what FlexAttention looks at; no `__wrapped__`
            known = inspect.Signature.from_callable(function, follow_wrapped=False)
        else:
            known = inspect.signature(function)
        found = [[p.name, _OF[p.kind], p.default is not inspect.Parameter.empty] for p in known.parameters.values()]
    except Exception:  # a student's __signature__ may do anything
        return None
    return found if _well_formed(found) else None


def _well_formed(parameters: object) -> bool:
    if type(parameters) is not list or len(parameters) > MAX_PARAMETERS:
        return False
    names, places = [], []
    for part in parameters:
        if type(part) is not list or len(part) != 3:
            return False
        name, kind, optional = part
        if type(name) is not str or not name.isidentifier() or keyword.iskeyword(name) or len(name) > 80:
            return False
        if unicodedata.normalize("NFKC", name) != name:  # Python would take it for another name
            return False
        if name.startswith("__") or kind not in _KINDS or type(optional) is not bool:
            return False
        names.append(name)
        places.append(_KINDS.index(kind))
    once = places.count(2) <= 1 and places.count(4) <= 1
    return once and len(set(names)) == len(names) and places == sorted(places)


def make_proxy(
    call: Callable[[tuple, dict], object], name: str, parameters: object, make_globals: Callable[[], dict] = dict
) -> Any:
    """Make a function that hands its arguments to `call(args, kwargs)`.

    Args:
        call: is called with the arguments that were given, and none of the defaults.
        name: what the function is called; an identifier.
        parameters: its parameters, as `parameters_of` gives them; if they are not well formed, it takes any arguments.
        make_globals: makes its `__globals__`.
    """
    made = None
    if parameters and _well_formed(parameters):
        made = _with_parameters(call, parameters, make_globals())
    made = made or _with_parameters(call, _ANYTHING, make_globals())
    made.__name__ = made.__qualname__ = name
    made._torchdynamo_disable = True  # torch.compile calls it, and does not look into it
    return made


def _with_parameters(call: Callable, parameters: Any, space: dict) -> Any:
    parts, before = [], ""
    for name, kind, optional in parameters:
        if before == "only" and kind != "only":
            parts.append("/")
        if kind == "named" and "rest" not in [k for _, k, _ in parameters] and "*" not in parts:
            parts.append("*")
        stars = {"rest": "*", "named rest": "**"}.get(kind, "")
        parts.append(f"{stars}{name}" + ("=__left_out" if optional and not stars else ""))
        before = kind
    if before == "only":
        parts.append("/")
    places = [(name, kind) for name, kind, _ in parameters if kind in ("only", "plain")]
    rest = next((name for name, kind, _ in parameters if kind == "rest"), None)
    named = [name for name, kind, _ in parameters if kind == "named"]
    more = next((name for name, kind, _ in parameters if kind == "named rest"), None)
    values = ", ".join(f"({name!r}, {name})" for name, _ in places)
    keywords = ", ".join(f"({name!r}, {name})" for name in named)
    text = (
        f"def made({', '.join(parts)}):\n"
        f"    return __hand_over([{values}], {rest or '()'}, [{keywords}], {more or '{}'})\n"
    )

    def hand_over(positional, rest, named, more):
        args = []
        for position, (_, value) in enumerate(positional):
            if value is _LEFT_OUT:
                named = [*positional[position + 1 :], *named]
                break
            args.append(value)
        given = {name: value for name, value in named if value is not _LEFT_OUT}
        return call((*args, *rest), {**given, **more})

    dict.update(space, {"__left_out": _LEFT_OUT, "__hand_over": hand_over, "__name__": __name__})
    try:
        exec(compile(text, __file__, "exec"), space, found := {})
    except SyntaxError:  # a parameter without a default behind one that has one
        return None
    return found["made"]
