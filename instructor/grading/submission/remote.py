"""The checker's side of a student's process: proxies of the student's functions, and evidence of what ran in them.

A check calls a proxy as if it were the student's function. The arguments travel as data, the function runs in the
student's process, and its result comes back as plain data. What a check can observe of a call in its own process, it
observes of this one, too: inputs that were written to change here, exceptions carry the student's lines, and the
check's watches (`OperationWatch`) see the operators that ran there.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from instructor.grading.submission.conditions import describe_watch, sdpa_backends, update_watch
from instructor.grading.submission.exceptions import describe_error, error_with_lines
from instructor.grading.wire import vmaps
from instructor.grading.wire.block_masks import rebuild_block_mask
from instructor.grading.wire.channel import Channel, Closed, TooLate, WireError
from instructor.grading.wire.pickles import CheckEncoder
from instructor.grading.wire.signatures import Proxy, parameters_of
from instructor.grading.wire.values import Decoder
from utils.checking import watching

TOO_MANY = (
    "this call runs more than some 200,000 operators of torch, and the check looks at the size of each. Let an operator work on "
    "more numbers at once."
)
_OF_FLEX = "TransformGetItemToIndex"  # the mode under which FlexAttention calls masks
_MALFORMED = (WireError, KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError)


class Gone(BaseException):
    """The student's process ended, hung or broke the protocol; no check may catch this.

    Args:
        kind: "timeout", "killed" or "protocol".
        detail: what was wrong, for a reviewer.
    """

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(detail)
        self.kind, self.detail = kind, detail


class CannotTravel(BaseException):
    """The check needs something that does not work at a distance; no check may catch this."""


class Remote:
    """A student's process, as a checker uses it; `walls` says what each wall stands by, and `end` ends the process."""

    def __init__(self, channel: Channel, walls: dict[str, str] | None = None, end: Callable = lambda: None):
        self.channel, self.walls, self.end, self.number = channel, walls or {}, end, 0
        self.deadline = 0.0
        self.forget()

    def forget(self) -> None:
        """Drop the objects of a question."""
        self.objects: list = []  # objects of this side that the student's process knows by their place in this list
        self.proxies: dict[int, object] = {}  # of the student's objects, by their numbers
        self.tensors: dict[int, torch.Tensor] = {}  # sent, by key
        self.versions: dict[int, int] = {}
        self.keys: dict[int, int] = {}  # the address of a tensor -> its key
        self.shown: list[str] = []  # what calls print

    def close(self) -> None:
        """End the process, and the channel to it."""
        self.end()
        self.channel.close()

    def within(self, seconds: float) -> None:
        """Set the deadline of all requests from now on."""
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
                    why = str(reply.get("why")).rstrip()
                    if "MemoryError" in why.rpartition("\n")[2]:  # as when the kernel ends it: no sign of anything else
                        raise Gone("killed")
                    raise WireError(f"the process that runs it failed: {why[-280:]}")
                return reply, data
        except TooLate:
            raise Gone("timeout") from None
        except Closed:
            raise Gone("killed") from None
        except _MALFORMED as error:
            raise Gone("protocol", f"{type(error).__name__}: {error}"[-1500:]) from None

    # ---- values ----------------------------------------------------------------------------------------------

    def encoder(self, in_vmap: bool = False) -> CheckEncoder:
        """An encoder of the check's values, which may be functions and iterators; tensors of a vmap are made for one call."""

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
            fields = {"id": number, "kind": kind, "name": name if name.isidentifier() else ""}
            return ["object", {**fields, "parameters": parameters_of(value) if kind == "function" else None}]

        def known(tensor):
            if id(tensor) in self.keys or in_vmap:
                return self.keys.get(id(tensor))
            key = self.keys[id(tensor)] = len(self.tensors)
            self.tensors[key], self.versions[key] = tensor, tensor._version
            return [key]

        return CheckEncoder(handle, known)

    def decoder(self, blobs: list) -> Decoder:
        """A decoder of what the student's process sends: plain data, and proxies of what cannot travel."""
        return Decoder(blobs, self._proxy, self.objects.__getitem__, self.tensors.__getitem__)

    def _encode(self, encode: Callable, value):
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            try:
                return encode(value)
            except WireError as error:
                raise CannotTravel(str(error)) from None

    def _updates(self, encode: CheckEncoder) -> list:
        """Encode the tensors that were written to on this side since they were sent."""
        changed = []
        for key, tensor in self.tensors.items():
            if tensor._version != self.versions[key]:
                self.versions[key] = tensor._version
                known, encode.known = encode.known, None
                with _disable_current_modes():
                    changed.append([key, self._encode(encode, tensor.detach())])
                encode.known = known
        return changed

    def _change(self, written: list) -> None:
        """Give other values to the tensors that were written to on the student's side: which ones, no check asks."""
        for key in written:
            tensor = self.tensors[key]
            with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
                tensor.copy_(tensor == 0)
            self.versions[key] = tensor._version

    def values(self, names: list[str], new: bool = False) -> dict:
        """The student's values of these names, functions and objects as proxies; `new` begins a question."""
        if new:
            self.forget()
        reply, blobs = self.ask({"op": "values", "names": names, "new": new})
        decode = self.decoder(blobs)
        with _reading():
            return {name: decode(node) for name, node in reply["values"].items() if name in names}

    def _proxy(self, fields: dict):
        """A proxy of an object of the student's; `fields` may be forged."""
        number, kind = fields["id"], fields["kind"]
        if kind == "block_mask" and type(number) is int:
            mask = rebuild_block_mask(fields["parts"])
            known = self.proxies.setdefault(number, mask)
            if type(known) is not type(mask):
                raise WireError("an object of two kinds")
            vars(known).update(vars(mask))  # the same object as before, so that a check may ask by `is`
            return known
        if type(number) is int and number in self.proxies:
            return self.proxies[number]
        if type(number) is not int or kind not in ("function", "other"):
            raise WireError("an object without a number or a kind")
        name = fields["name"] if isinstance(fields["name"], str) and fields["name"].isidentifier() else "answer"
        if kind == "other":
            return type(str(fields["type"]), (_Opaque,), {})()
        if fields["answered"] is not True:

            def proxy(*args, **kwargs):
                raise NotImplementedError

            proxy.__name__ = proxy.__qualname__ = name
        else:

            def call(args, kwargs):
                return self.call(number, args, kwargs)

            proxy = Proxy(call, name, fields.get("parameters"), _Names(self))
        vars(proxy).update(remote_number=number, remote_run=self.run)
        self.proxies[number] = proxy
        return proxy

    def replace(self, values: dict) -> None:
        """Give names in the student's notebook other values."""
        encode = self.encoder()
        node = self._encode(encode, values)
        self.ask({"op": "replace", "values": node}, encode.blobs)

    # ---- calls -----------------------------------------------------------------------------------------------

    def run(self, function: Callable, *args):
        """Run one of the check's own functions in the student's process, where the student's objects are."""
        return self.call(function, args, {})

    def call(self, number: int | Callable | list, args: tuple, kwargs: dict):
        """Call the student's object `number`, a check's function, or what a node names; returns its result or raises what it raised."""
        try:
            return vmaps.across(lambda *plain: self._call(number, *plain), args, kwargs)
        except WireError as error:
            raise CannotTravel(str(error)) from None

    def _call(self, number: int | Callable | list, args: tuple, kwargs: dict, in_vmaps: vmaps.Vmaps):
        modes = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]
        watches = [mode for mode in modes if type(mode) is watching.OperationWatch]
        names = {type(mode).__name__ for mode in modes}
        if strange := names - {"OperationWatch", "_Calls", _OF_FLEX}:
            raise CannotTravel(f"its mode {min(strange)} sees nothing of a call in another process")
        encode = self.encoder(bool(in_vmaps))
        conditions = {
            "grad": torch.is_grad_enabled(),
            "fill": torch.are_deterministic_algorithms_enabled(),
            "flex": _OF_FLEX in names,
            "watches": [describe_watch(watch) for watch in watches],
            "sdpa": sdpa_backends(),
            "silent": bool(warnings.filters) and warnings.filters[0][0] == "ignore",  # the caller hides warnings
        }
        message = {
            "op": "call",
            "updates": self._updates(encode),
            "target": self._encode(encode, number) if callable(number) else number,
            "conditions": conditions,
            "vmaps": in_vmaps,
            "args": self._encode(encode, args),
            "kwargs": self._encode(encode, kwargs),
        }
        reply, blobs = self.ask(message, encode.blobs)
        with _reading():
            decode = self._take_effects(reply, blobs)
            if reply["seen"] is None:
                raise _mark_as_students(RuntimeError(TOO_MANY))
            for watch, text in zip(watches, reply["seen"], strict=True):
                update_watch(watch, text)
            if reply["op"] == "raised":
                raise _mark_as_students(error_with_lines(reply["error"]))
            if reply["op"] != "result":
                raise WireError("a reply that is neither a result nor an exception")
            return decode(reply["value"])

    def fetch(self, name: str) -> None:
        """Bring a file of the student's process into this one's folder, as data, if there is one."""
        for blob in self.ask({"op": "file", "name": name})[1][:1]:
            Path(Path(name).name).write_bytes(blob)

    def _take_effects(self, reply: dict, blobs: list) -> Decoder:
        """Leave behind what the call left, as a check sees it in one process; returns the decoder of the reply."""
        if reply["op"] == "unsendable":
            raise _mark_as_students(TypeError(f"your code returned what no check can use: {reply['why']}"))
        decode = self.decoder(blobs)
        self._change(reply["written"])
        other_switches, other_filters = reply["left"]
        if other_switches is True:  # a check asks whether SDPA's backends are as before, and not what they are
            torch.backends.cuda.enable_flash_sdp(not torch.backends.cuda.flash_sdp_enabled())
        if other_filters is True:  # for warnings
            warnings.simplefilter("ignore", type("OfTheCall", (Warning,), {}))
        if isinstance(reply.get("shown"), str):
            self.shown.append(reply["shown"][:20_000])
        return decode

    def _serve(self, message: dict, blobs: list) -> None:
        """Answer the student's code, which called a function of the check or took the next item of its iterator."""
        in_vmaps = message["vmaps"]
        decode = self.decoder(blobs)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self._change(message["written"])
            target = self.objects[message["id"]]
            args, kwargs = decode(message["args"]), decode(message["kwargs"])
        encode = self.encoder(bool(in_vmaps))
        try:
            # What the check's own functions do is not the student's: no mode of the check sees it.
            with _disable_current_modes():
                value = next(target) if message["next"] is True else vmaps.mapped(target, args, kwargs, in_vmaps)
            node = self._encode(encode, value)
            reply = {"op": "value", "value": node, "updates": self._updates(encode)}
        except Exception as error:  # StopIteration among them
            reply = {"op": "raise", "error": describe_error(error), "updates": self._updates(encode)}
        self.channel.send(reply, encode.blobs, self.deadline)


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Read what the student's process sent, which no mode of the check sees; what is not well formed ends the question."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        try:
            yield
        except _MALFORMED as error:
            if getattr(error, "remote", False):  # the student's own exception
                raise
            raise Gone("protocol", f"{type(error).__name__}: {error}"[-1500:]) from None


class _Names(dict):
    """The `__globals__` of a student's function: by `update` or by `[]`, a check replaces earlier answers in the notebook."""

    def __init__(self, remote: Remote):
        super().__init__()
        self.remote = remote

    def __contains__(self, name):
        return super().__contains__(name) or bool(self.remote.values([name]))

    def __missing__(self, name):
        return self.remote.values([name])[name]

    def __setitem__(self, name, value):
        self.update({name: value})

    def update(self, values):  # type: ignore[override]
        if values:
            self.remote.replace(values)


class _Opaque:
    """A result of a student's code that cannot travel; only the name of its type is known here."""


def _mark_as_students(error: BaseException) -> BaseException:
    """Tell an exception of the student's from one that a broken protocol raises here."""
    vars(error)["remote"] = True
    return error
