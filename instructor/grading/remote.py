"""The checker's side of a student's process: their functions as proxies, and what ran inside of them as evidence.

A check calls a proxy as if it were the student's function. The arguments travel as data, the function runs in the
student's process, its result comes back as plain data. What the check can see of a call in its own process, it sees
of this one: written inputs are written here too, exceptions carry the student's lines, and the modes that the check
has on (`watch_operations`, its own dispatch modes) are shown the operators that ran there.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import importlib
import linecache
import secrets
import sys
import time
import types
from collections.abc import Iterator

import cloudpickle
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from instructor.grading.wire import DTYPES, Channel, Closed, Decoder, Encoder, TooLate, WireError
from utils import watching
from utils.watching import StudentLine


class Gone(BaseException):
    """The student's process ended, hung or broke the protocol; no check may catch it.

    kind: "timeout", "killed" or "protocol".
    """

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(detail)
        self.kind, self.detail = kind, detail


class CannotTravel(BaseException):
    """The check asks for what does not work at a distance."""


class Remote:
    """A student's process, as a checker uses it.

    Args:
        channel: to the process
        seconds: how long one request may take, what the check does in between included
    """

    def __init__(self, channel: Channel):
        self.channel, self.number = channel, 0
        self.deadline = 0.0
        self.shown: list[str] = []
        self.forget()

    def forget(self) -> None:
        """Drop the objects of a question."""
        self.objects: list = []  # of this side, that the student's has numbers of
        self.tensors: list[torch.Tensor] = []  # sent, by key
        self.versions: list[int] = []
        self.keys: dict[int, int] = {}
        self.shown = []

    def within(self, seconds: float) -> None:
        """Everything asked from now on has to be done in so many seconds."""
        self.deadline = time.monotonic() + seconds

    def ask(self, message: dict, blobs: list | None = None) -> tuple[dict, list]:
        """Send a request and return the answer to it; `Gone` if there is none."""
        self.number += 1
        try:
            self.channel.send({**message, "n": self.number}, blobs, self.deadline)
            while True:
                reply, data = self.channel.receive(self.deadline)
                if reply.get("op") == "callback":
                    self._serve(reply, data)
                    continue
                if reply.get("n") != self.number or not isinstance(reply.get("op"), str):
                    raise WireError("an answer to another question")
                if reply["op"] == "broken":
                    raise WireError(f"the process that runs it failed: {str(reply.get('why'))[-280:]}")
                return reply, data
        except TooLate:
            raise Gone("timeout") from None
        except Closed:
            raise Gone("killed") from None
        except (WireError, KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
            raise Gone("protocol", f"{type(error).__name__}: {error}"[-1500:]) from None

    # ---- values ----------------------------------------------------------------------------------------------

    def encoder(self) -> Encoder:
        def handle(value):
            kind = "function" if callable(value) else "iterator" if isinstance(value, Iterator) else None
            if kind is None:
                raise CannotTravel(f"a {type(value).__name__} cannot travel to the student's process")
            if (number := getattr(value, "remote_number", None)) is not None:
                return ["own", number]
            self.objects.append(value)
            name = getattr(value, "__name__", "function")
            return ["object", {"id": len(self.objects) - 1, "kind": kind, "name": name if name.isidentifier() else ""}]

        def known(tensor):
            if id(tensor) in self.keys:
                return self.keys[id(tensor)]
            self.tensors.append(tensor)
            self.versions.append(tensor._version)
            self.keys[id(tensor)] = len(self.tensors) - 1
            return [len(self.tensors) - 1]

        return Encoder(handle, known, trusted=True)

    def decoder(self, blobs: list) -> Decoder:
        return Decoder(blobs, self._proxy, self.objects.__getitem__, self.tensors.__getitem__)

    def _encode(self, encode: Encoder, value):
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            try:
                return encode(value)
            except WireError as error:
                raise CannotTravel(str(error)) from None

    def _updates(self, encode: Encoder) -> list:
        """Tensors that were written to on this side since they were sent."""
        changed = []
        for key, tensor in enumerate(self.tensors):
            if tensor._version != self.versions[key]:
                self.versions[key] = tensor._version
                known, encode.known = encode.known, None
                changed.append([key, self._encode(encode, tensor.detach())])
                encode.known = known
        return changed

    def _apply(self, changed, decode: Decoder) -> None:
        """Tensors that were written to on the student's side."""
        for key, node in changed:
            tensor, new = self.tensors[key], decode(node)
            with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
                if new.shape == tensor.shape and new.dtype == tensor.dtype:
                    tensor.copy_(new)
                else:  # reshaped in place: the check's own tensor keeps its shape, and is no longer what it was
                    tensor.copy_(~tensor if tensor.dtype is torch.bool else tensor + 1)
            self.versions[key] = tensor._version

    def get(self, cell: str, names: list[str]) -> dict:
        """The student's values of these names; functions and objects as proxies."""
        self.forget()
        reply, blobs = self.ask({"op": "get", "cell": cell, "names": names})
        decode = self.decoder(blobs)
        try:
            return {name: decode(node) for name, node in reply["values"].items() if name in names}
        except (WireError, KeyError, AttributeError) as error:
            raise Gone("protocol", str(error)[:300]) from None

    def _proxy(self, said: dict):
        number, kind = said["id"], said["kind"]
        if type(number) is not int or kind not in ("function", "iterator", "other"):
            raise WireError("an object without a number or a kind")
        name = said["name"] if isinstance(said["name"], str) and said["name"].isidentifier() else "answer"
        if kind == "iterator":
            return _ProxyIterator(self, number)
        if kind == "other":
            return type(str(said["type"]), (_Opaque,), {})()
        if said["answered"] is not True:

            def proxy(*args, **kwargs):
                raise NotImplementedError

        else:

            def proxy(*args, **kwargs):
                return self.call(number, args, kwargs)

        proxy.__name__ = proxy.__qualname__ = name
        proxy.remote_number = number
        return proxy

    # ---- calls -----------------------------------------------------------------------------------------------

    def call(self, number: int, args: tuple, kwargs: dict, step: bool = False):
        """Call the student's object `number`; returns its result or raises what it raised."""
        dispatch, functions = _get_current_dispatch_mode_stack(), _get_current_function_mode_stack()
        watches = [mode.seen for mode in dispatch if type(mode) is watching._Dispatch]
        replayed = [mode for mode in dispatch if type(mode) is not watching._Dispatch]
        shipped = [mode for mode in functions if type(mode) is not watching._Calls]
        sizes = [1 + secrets.randbelow(10**6) for _ in range(2)]
        encode = self.encoder()
        conditions = {
            "grad": torch.is_grad_enabled(), "inference": torch.is_inference_mode_enabled(),
            "fill": torch.are_deterministic_algorithms_enabled(),
            "watch": bool(watches), "record": bool(watches or replayed), "canary": sizes,
            "modes": ["pickle", encode._blob(_ship(shipped))] if shipped else ["list", []],
        }  # fmt: skip
        updates = self._updates(encode)
        message = {
            "op": "call", "target": number, "next": step, "conditions": conditions, "updates": updates,
            "args": self._encode(encode, args), "kwargs": self._encode(encode, kwargs),
        }  # fmt: skip
        reply, blobs = self.ask(message, encode.blobs)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            try:
                return self._conclude(reply, blobs, watches, replayed, sizes)
            except (WireError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                if getattr(error, "remote", False):
                    raise
                raise Gone("protocol", f"{type(error).__name__}: {error}"[:300]) from None

    def _conclude(self, reply, blobs, watches, replayed, sizes):
        if reply["op"] == "unsendable":
            raise _marked(TypeError(f"your code returned what no check can use: {reply['why']}"))
        decode = self.decoder(blobs)
        self._apply(reply["mutated"], decode)
        if isinstance(reply.get("shown"), str):
            self.shown.append(reply["shown"][:20_000])
        if watches or replayed:
            records = reply["records"]
            ends = [records[0], records[-1]] if len(records) > 1 else [[], []]
            for end, size in zip(ends, sizes, strict=True):
                if end[:1] != ["aten::special_i1e"] or end[2][0] != _meta(size):
                    raise WireError("the record of operators does not hold what has to be in it")
            for seen in watches:
                _merge_watch(seen, reply["watch"])
            _replay(replayed, records[1:-1])
        if reply["op"] == "raised":
            raise _marked(error_with_lines(reply["error"]))
        if reply["op"] != "result":
            raise WireError("an answer that is none")
        return decode(reply["value"])

    def _serve(self, message: dict, blobs: list) -> None:
        """The student's code called a function of the check, or took the next item of an iterator of it."""
        decode = self.decoder(blobs)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self._apply(message["mutated"], decode)
            target = self.objects[message["id"]]
            args, kwargs = decode(message["args"]), decode(message["kwargs"])
        encode = self.encoder()
        try:
            value = next(target) if message["next"] is True else target(*args, **kwargs)
            node = self._encode(encode, value)
            reply = {"op": "value", "value": node, "updates": self._updates(encode)}
        except StopIteration:
            reply = {"op": "stop", "updates": self._updates(encode)}
        except Exception as error:
            kinds = [f"{k.__module__}:{k.__qualname__}" for k in type(error).__mro__]
            reply = {"op": "raise", "error": {"kinds": kinds, "words": str(error)[:2000]}, "updates": []}
        self.channel.send(reply, encode.blobs, self.deadline)


class _ProxyIterator:
    def __init__(self, remote: Remote, number: int):
        self._remote, self.remote_number = remote, number

    def __iter__(self):
        return self

    def __next__(self):
        return self._remote.call(self.remote_number, (), {}, step=True)


class _Opaque:
    """Something that a student's code returned and that cannot travel; only its type's name is known here."""


def _marked(error: BaseException) -> BaseException:
    error.remote = True
    return error


def _ship(modes: list) -> bytes:
    for mode in modes:
        module = sys.modules.get(type(mode).__module__)
        if module is not None and module.__name__.startswith("instructor"):
            cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(modes)
    except Exception as error:
        raise CannotTravel(f"a mode of the check cannot travel: {error}") from None


# ---- what ran ----------------------------------------------------------------------------------------------------


def _meta(size: int) -> dict:
    return {"tensor": [[size], "float32", "meta"]}


def _merge_watch(seen, said: dict) -> None:
    for name in ("operations", "calls", "exits", "custom", "kernels"):
        counted = said[name]
        if not all(type(n) is int and n >= 0 for n in counted.values()):
            raise WireError("counts that are no counts")
        getattr(seen, name).update(collections.Counter(counted))
    for name, (function, number, text) in said["lines"].items():
        seen.lines.setdefault(name, StudentLine(str(function), int(number), str(text)))


class _RecordedOperator:
    """An operator that ran in the student's process: calling it gives what came out there, without the numbers."""

    def __init__(self, operator, result):
        self._operator, self._result = operator, result

    def __call__(self, *args, **kwargs):
        return self._result

    def __getattr__(self, name):
        return getattr(self._operator, name)

    def __hash__(self):
        return hash(self._operator)

    def __eq__(self, other):
        return self._operator == (other._operator if isinstance(other, _RecordedOperator) else other)


def _replay(modes: list, records: list) -> None:
    """Show the check's own modes each operator, with tensors that have shapes and no values."""
    for name, overload, args, kwargs, result in records if modes else ():
        namespace, _, plain = str(name).partition("::")
        operator = None
        if all(part.isidentifier() and not part.startswith("__") for part in (namespace, plain, str(overload))):
            operator = getattr(getattr(getattr(torch.ops, namespace), plain, None), str(overload), None)
        if not isinstance(operator, torch._ops.OpOverload):  # of a library that only the student's process has
            schema = types.SimpleNamespace(name=str(name), overload_name=str(overload))
            operator = types.SimpleNamespace(_schema=schema, __name__=f"{plain}.{overload}", namespace=namespace)
        function = _RecordedOperator(operator, _unsketch(result))
        values, named = [_unsketch(v) for v in args], {str(k): _unsketch(v) for k, v in kwargs.items()}
        for mode in modes:
            mode.__torch_dispatch__(function, (), tuple(values), named)


def _unsketch(value):
    if isinstance(value, dict):
        ((kind, inside),) = value.items()
        if kind == "tensor":
            shape, dtype, _ = inside
            return torch.empty([int(n) for n in shape], dtype=DTYPES[dtype], device="meta")
        if kind in ("list", "tuple"):
            return getattr(builtins, kind)(_unsketch(v) for v in inside)
        return None
    return value


# ---- errors ------------------------------------------------------------------------------------------------------


def error_with_lines(said: dict) -> BaseException:
    """The student's exception, of the nearest type known here, with a traceback through the student's lines."""
    error = _error(said["kinds"], str(said["words"])[:5000])
    for name, value in said["state"].items():
        plain = value is None or type(value) in (int, str, bool, float)
        if plain and name.isidentifier() and not name.startswith("_"):
            with contextlib.suppress(Exception):
                setattr(error, name, value)
    frames = [(str(f), str(n), int(line), str(text)) for f, n, line, text in said["frames"][-12:]]
    for file, _, line, text in frames:
        lines = list(linecache.cache[file][2]) if file in linecache.cache and len(linecache.cache[file]) > 2 else []
        lines += ["\n"] * (min(line, 100_000) - len(lines))
        if 0 < line <= len(lines):
            lines[line - 1] = text + "\n"
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    names: dict = {"error": error}
    inner = "raise error"
    if not said["raised_there"]:  # it came out of a library that the student called
        exec(compile("def go():\n    raise error", __file__, "exec"), names)
        inner = "go()"
    for file, function, line, _ in reversed(frames):
        line = max(1, min(line, 100_000))
        code = compile("\n" * (line - 1) + f"def go(go=go): {inner}" if inner == "go()" else
                       "\n" * (line - 1) + f"def go(): {inner}", file, "exec")  # fmt: skip
        exec(code, names)
        made = names["go"]
        made.__code__ = made.__code__.replace(co_name=function, co_qualname=function)
        inner = "go()"
    if inner == "go()":
        try:
            names["go"]()
        except BaseException as raised:
            error = raised.with_traceback(raised.__traceback__.tb_next)
    return error


def _error(kinds: list, words: str) -> BaseException:
    for kind in kinds:
        module, _, name = str(kind).partition(":")
        known = module == "builtins" or module.partition(".")[0] in ("torch", "utils")
        found = sys.modules.get(module) if known else None
        for part in name.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type) and (issubclass(found, Exception) or found is SystemExit):
            with contextlib.suppress(Exception):
                error = found.__new__(found, words)
                error.args = (words,)
                return error
    # KeyboardInterrupt, GeneratorExit, and exceptions of the student's that derive from BaseException alone
    return RuntimeError(words)


def import_quietly(name: str):
    """A module, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
