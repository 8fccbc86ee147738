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

from instructor.grading.wire.protocol import (
    DTYPES,
    BlockMasks,
    Channel,
    Closed,
    Decoder,
    Encoder,
    TooLate,
    WireError,
    vmaps,
)
from instructor.grading.wire.signatures import parameters_of, standing_for
from utils.checking import watching
from utils.checking.watching import StudentLine


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
        errors: {name: class} of exceptions that the notebook itself defines
    """

    def __init__(self, channel: Channel, errors: dict[str, type] | None = None):
        self.channel, self.number, self.errors = channel, 0, errors or {}
        self.deadline = 0.0
        self.shown: list[str] = []
        self.forget()

    def forget(self) -> None:
        """Drop the objects of a question."""
        self.objects: list = []  # of this side, that the student's has numbers of
        self.proxies: dict[int, object] = {}  # of objects of the student's, by their numbers
        self.block_masks = BlockMasks()
        self.tensors: dict[int, torch.Tensor] = {}  # sent, by key
        self.versions: dict[int, int] = {}
        self.keys: dict[int, int] = {}  # by the address of the tensor
        self.dropped: list[int]  # keys of tensors that the student's process may forget
        self.last_key, self.dropped = 0, []
        self.shown = []

    def within(self, seconds: float) -> None:
        """Everything asked from now on has to be done in so many seconds."""
        self.deadline = time.monotonic() + seconds

    def ask(self, message: dict, blobs: list | None = None) -> tuple[dict, list]:
        """Send a request and return the answer to it; `Gone` if there is none."""
        self.number = number = self.number + 1  # a callback may ask in between
        try:
            self.channel.send({**message, "n": number}, blobs, self.deadline)
            while True:
                reply, data = self.channel.receive(self.deadline)
                if reply.get("op") == "callback":
                    self._serve(reply, data)
                    continue
                if reply.get("n") != number or not isinstance(reply.get("op"), str):
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

    def encoder(self, levels: vmaps.Levels = ()) -> Encoder:
        def handle(value):
            kind = "function" if callable(value) else "iterator" if isinstance(value, Iterator) else None
            if kind is None:
                raise CannotTravel(f"a {type(value).__name__} cannot travel to the student's process")
            if (number := getattr(value, "remote_number", None)) is not None:
                return ["own", number]
            number = next((i for i, known in enumerate(self.objects) if known is value), len(self.objects))
            if number == len(self.objects):
                self.objects.append(value)
            name = getattr(value, "__name__", "function")
            return [
                "object",
                {
                    "id": number,
                    "kind": kind,
                    "name": name if name.isidentifier() else "",
                    "parameters": parameters_of(value) if kind == "function" else None,
                },
            ]

        def known(tensor):
            if id(tensor) in self.keys:
                return self.keys[id(tensor)]
            self.last_key += 1
            self.tensors[self.last_key], self.versions[self.last_key] = tensor, tensor._version
            self.keys[id(tensor)] = self.last_key
            return [self.last_key]

        return Encoder(handle, known, trusted=True, levels=levels, block_mask=self.block_masks.named)

    def decoder(self, blobs: list, levels: vmaps.Levels = ()) -> Decoder:
        return Decoder(
            blobs,
            self._proxy,
            self.objects.__getitem__,
            self.tensors.__getitem__,
            levels=levels,
            block_mask=self.block_masks.rebuilt,
        )

    def _drop(self, since: int) -> list[int]:
        """Forget the tensors of a call under vmap, made for it alone; without that, masks would pile up thousands."""
        dropped = [key for key in self.tensors if key > since]
        for key in dropped:
            del self.keys[id(self.tensors[key])], self.tensors[key], self.versions[key]
        return dropped

    def _encode(self, encode: Encoder, value):
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            try:
                return encode(value)
            except WireError as error:
                raise CannotTravel(str(error)) from None

    def _updates(self, encode: Encoder) -> list:
        """Tensors that were written to on this side since they were sent."""
        changed = []
        for key, tensor in self.tensors.items():
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
        return self._values({"op": "get", "cell": cell, "names": names})

    def _values(self, message: dict) -> dict:
        reply, blobs = self.ask(message)
        decode = self.decoder(blobs)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            try:
                return {name: decode(node) for name, node in reply["values"].items() if name in message["names"]}
            except (WireError, KeyError, AttributeError) as error:
                raise Gone("protocol", str(error)[:300]) from None

    def _proxy(self, said: dict):
        number, kind = said["id"], said["kind"]
        if type(number) is int and number in self.proxies:
            return self.proxies[number]
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

            proxy.__name__ = proxy.__qualname__ = name
        else:
            proxy = standing_for(
                lambda args, kwargs: self.call(number, args, kwargs), name, said.get("parameters"), lambda: _Names(self)
            )
        proxy.remote_number = number
        self.proxies[number] = proxy
        return proxy

    def values(self, names: list[str]) -> dict:
        """The student's values of these names, without a new question."""
        return self._values({"op": "values", "names": names})

    def replace(self, values: dict) -> None:
        """Give names in the student's notebook other values."""
        encode = self.encoder()
        node = self._encode(encode, values)
        self.ask({"op": "replace", "values": node}, encode.blobs)

    # ---- calls -----------------------------------------------------------------------------------------------

    def call(self, number: int, args: tuple, kwargs: dict, step: bool = False):
        """Call the student's object `number`; returns its result or raises what it raised."""
        try:
            levels = vmaps.levels_here()
        except vmaps.NotVmap as error:
            raise CannotTravel(str(error)) from None
        with vmaps.lifted():
            return self._call(number, args, kwargs, step, levels)

    def _call(self, number: int, args: tuple, kwargs: dict, step: bool, levels: vmaps.Levels):
        dispatch, functions = _get_current_dispatch_mode_stack(), _get_current_function_mode_stack()
        watches = [mode.seen for mode in dispatch if type(mode) is watching._Dispatch]
        replayed = [mode for mode in dispatch if type(mode) is not watching._Dispatch]
        shipped = [mode for mode in functions if type(mode) is not watching._Calls]
        sizes = [1 + secrets.randbelow(10**6) for _ in range(2)]
        encode, before = self.encoder(levels), self.last_key
        conditions = {
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "fill": torch.are_deterministic_algorithms_enabled(),
            "watch": bool(watches),
            "record": bool(watches or replayed),
            "canary": sizes,
            "modes": ["pickle", encode._blob(_ship(shipped))] if shipped else ["list", []],
        }
        updates = self._updates(encode)
        message = {
            "op": "call",
            "target": number,
            "next": step,
            "conditions": conditions,
            "updates": updates,
            "levels": levels,
            "drop": self.dropped,
            "args": self._encode(encode, args),
            "kwargs": self._encode(encode, kwargs),
        }
        self.dropped = []
        reply, blobs = self.ask(message, encode.blobs)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            try:
                return self._conclude(reply, blobs, watches, replayed, sizes, levels)
            except (WireError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                if getattr(error, "remote", False):
                    raise
                raise Gone("protocol", f"{type(error).__name__}: {error}"[:300]) from None
            finally:
                if levels:
                    self.dropped += self._drop(before)

    def _conclude(self, reply, blobs, watches, replayed, sizes, levels):
        if reply["op"] == "unsendable":
            raise _marked(TypeError(f"your code returned what no check can use: {reply['why']}"))
        decode = self.decoder(blobs, levels)
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
            raise _marked(error_with_lines(reply["error"], self.errors))
        if reply["op"] != "result":
            raise WireError("an answer that is none")
        return decode(reply["value"])

    def _serve(self, message: dict, blobs: list) -> None:
        """The student's code called a function of the check, or took the next item of an iterator of it."""
        levels = vmaps.checked(message["levels"])
        decode = self.decoder(blobs, levels)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self._apply(message["mutated"], decode)
            target = self.objects[message["id"]]
            args, kwargs = decode(message["args"]), decode(message["kwargs"])
        encode = self.encoder(levels)
        try:
            with vmaps.entered(levels), _indices(message["indices"] is True):
                value = next(target) if message["next"] is True else target(*args, **kwargs)
            node = self._encode(encode, value)
            reply = {"op": "value", "value": node, "updates": self._updates(encode)}
        except StopIteration:
            reply = {"op": "stop", "updates": self._updates(encode)}
        except Exception as error:
            kinds = [f"{k.__module__}:{k.__qualname__}" for k in type(error).__mro__]
            reply = {"op": "raise", "error": {"kinds": kinds, "words": str(error)[:2000]}, "updates": []}
        self.channel.send(reply, encode.blobs, self.deadline)


def _indices(wanted: bool):
    """As FlexAttention calls a mask: `x[i]` reads a tensor with a tensor for an index."""
    if not wanted:
        return contextlib.nullcontext()
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


class _Names(dict):
    """`__globals__` of a student's function: a check may replace earlier answers in it, by `update`."""

    def __init__(self, remote: Remote):
        super().__init__()
        self.remote = remote

    def __contains__(self, name):
        return super().__contains__(name) or bool(self.remote.values([name]))

    def __missing__(self, name):
        found = self.remote.values([name])
        if name not in found:
            raise KeyError(name)
        return found[name]

    def update(self, values):
        if values:
            self.remote.replace(values)


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


def error_with_lines(said: dict, own: dict[str, type] | None = None) -> BaseException:
    """The student's exception, of the nearest type known here, with a traceback through the student's lines.

    Args:
        own: {name: class} of exceptions that the notebook itself defines
    """
    error = _error(said["kinds"], str(said["words"])[:5000], own or {})
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
        code = compile(
            "\n" * (line - 1) + f"def go(go=go): {inner}"
            if inner == "go()"
            else "\n" * (line - 1) + f"def go(): {inner}",
            file,
            "exec",
        )
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


def _error(kinds: list, words: str, own: dict[str, type]) -> BaseException:
    for kind in kinds:
        module, _, name = str(kind).partition(":")
        known = module == "builtins" or module.partition(".")[0] in ("torch", "utils")
        found = sys.modules.get(module) if known else None
        for part in name.split("."):
            found = getattr(found, part, None)
        found = own.get(name) if module == "__main__" else found
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
