"""The control of checks that run inside: wrong answers made of a student's, and hidden checks imported from memory."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import types

import torch


def corrupt(value: object) -> object:
    """Make a wrong answer of a student's: a function with wrong results, a class with wrong methods, a wrong value."""
    if isinstance(value, type):
        body = {name: corrupt(getattr(value, name)) for name in ("forward", "__call__") if name in vars(value)}
        try:
            return type(value)(value.__name__, (value,), body) if body else None
        except TypeError:
            return None
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):

        def wrong(*args, **kwargs):
            return corrupt_result(value(*args, **kwargs))

        wrong.__name__ = getattr(value, "__name__", "wrong")
        return wrong
    return corrupt_result(value)


def corrupt_result(value):
    """Change a result: tensors and numbers in value, texts in their letters, anything unknown to None."""
    if isinstance(value, torch.Tensor):
        return ~value if value.dtype is torch.bool else value * -3 + 5 if value.numel() else value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float | complex):
        return value * -3 + 5
    if isinstance(value, str):
        return value[::-1] + "?"
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(corrupt_result(v) for v in value)
    if type(value) is dict:
        return {k: corrupt_result(v) for k, v in value.items()}
    return None


class _FromMemory(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules from {name: [source, file name, whether it is a package]}."""

    def __init__(self, modules: dict[str, list]):
        self.modules = modules

    def find_spec(self, name, path=None, target=None):
        if name not in self.modules:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=self.modules[name][2])

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        source, file, _ = self.modules[module.__name__]
        module.__file__ = file
        exec(compile(source, file, "exec"), module.__dict__)


def install_sources(modules: dict[str, list]) -> None:
    """Make modules importable from their source text: {name: [source, file name, whether it is a package]}."""
    remove_sources()
    sys.meta_path.insert(0, _FromMemory(modules))


def remove_sources() -> None:
    """Forget the instructor's modules, and what imports them from memory."""
    for name in [n for n in sys.modules if n == "instructor" or n.startswith("instructor.")]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder) is not _FromMemory]
