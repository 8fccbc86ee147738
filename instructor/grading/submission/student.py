"""The process in which a submission runs: it runs cells, calls the student's functions, and reports what happened.

Nothing here decides a grade. A student's code shares this process and may replace whatever it likes in it; what this
process reports is data for the checker, which is another process and reads it through `wire`.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import stat
import sys
import traceback
import warnings
from typing import Any, NoReturn

import torch

from instructor.grading.sandbox.walls import SCRATCH, address_space
from instructor.grading.submission import conditions
from instructor.grading.submission.exceptions import describe_error, nearest_error, words_of
from instructor.grading.submission.outputs import Outputs, Stream
from instructor.grading.wire import vmaps
from instructor.grading.wire.block_masks import block_mask_fields
from instructor.grading.wire.channel import Channel, Closed, WireError
from instructor.grading.wire.pickles import StudentDecoder
from instructor.grading.wire.signatures import Proxy, parameters_of
from instructor.grading.wire.values import Encoder, tensor_bytes
from utils.checking import is_answered
from utils.checking.watching import uncompiled_flex

MAX_PROCESSES = 16  # that a cell may leave behind
MAX_FILE = 8_000_000  # bytes of a file that is an answer


class Student:
    """Serves the checker's requests, one after the other."""

    def __init__(self, channel: Channel, shell):
        self.channel, self.shell = channel, shell
        self.outputs = Outputs()
        # Without a root of its own the folders are the machine's, and other programs fill them, too.
        own_root = os.getcwd() == SCRATCH and os.path.ismount("/out")
        self.folders: tuple[str, ...] = (SCRATCH, "/tmp") if own_root else ()
        self.memory = memory_left()
        self.question = 0
        self._forget()

    def _forget(self) -> None:
        """Drop the objects of a question."""
        self.question += 1
        self.objects: dict[int, Any] = {}  # objects of this side, by the numbers that the checker has for them
        self.numbers: dict[int, int] = {}  # the address of such an object -> its number
        self.stubs: dict[int, object] = {}  # proxies of the checker's objects, by the checker's numbers
        self.tensors: dict[int, torch.Tensor] = {}  # the checker's tensors, as they are here
        self.sent: dict[int, tuple] = {}  # their bytes and places as the checker knows them

    # ---- the loop --------------------------------------------------------------------------------------------

    def serve(self) -> NoReturn:
        """Answer requests until the checker closes the channel."""
        while True:
            try:
                message, blobs = self.channel.receive()
                self.answer(message, blobs)
            except (Closed, BrokenPipeError):
                os._exit(0)
            except KeyboardInterrupt:
                continue

    def answer(self, message: dict, blobs: list) -> None:
        """Answer one request by the method `do_OP`."""
        operation = getattr(self, f"do_{message['op']}")
        try:
            reply, data = operation(message, blobs)
        except Closed:
            raise
        except WireError as error:
            reply, data = {"op": "unsendable", "why": str(error)[:500]}, []
        except Exception as error:
            reply, data = {"op": "broken", "why": traceback.format_exc()[-2000:] or str(error)}, []
        self.channel.send({**reply, "n": message.get("n")}, data)

    # ---- cells -----------------------------------------------------------------------------------------------

    def do_run(self, message: dict, blobs: list) -> tuple[dict, list]:
        """Run a cell as Jupyter does, and say which resource the submission has nearly used up."""
        self.outputs = outputs = Outputs()
        self._redirect(outputs)
        try:
            self.shell.run_cell(message["source"], store_history=False)
        except BaseException as error:
            outputs.error(type(error).__name__, words_of(error), [type(error).__name__])
        with contextlib.suppress(Exception):
            self._keep_descriptor_output(outputs)
        self._end_strays()
        exhausted = exhausted_resource(self.folders, self.memory)
        return {"op": "ran", "outputs": outputs.items, "exhausted": exhausted}, []

    def _redirect(self, outputs: Outputs) -> None:
        for name in ("stdout", "stderr"):
            setattr(sys, name, Stream(name, outputs))
        self.shell.outputs = outputs
        with contextlib.suppress(OSError):
            os.lseek(1, 0, os.SEEK_SET)
            os.ftruncate(1, 0)

    def _keep_descriptor_output(self, outputs: Outputs) -> None:
        """Add what C code and child processes wrote to file descriptors 1 and 2, which are a file here."""
        if stat.S_ISREG(os.fstat(1).st_mode):
            text = os.pread(1, 20_000, 0).decode(errors="replace")
            if text:
                outputs.text("stdout", text)

    def _end_strays(self) -> None:
        """End processes that a cell left behind, if they are many: later questions need the memory."""
        if os.getpid() == 2 and sum(name.isdigit() for name in os.listdir("/proc")) > MAX_PROCESSES:
            os.kill(-1, signal.SIGKILL)  # all processes of this namespace but the first one and this one

    def do_file(self, message: dict, blobs: list) -> tuple[dict, list]:
        """Send the bytes of a file that is an answer; none where it is a link or a pipe, too large, or not there."""
        data = []
        with contextlib.suppress(OSError):
            descriptor = os.open(os.path.basename(message["name"]), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                if stat.S_ISREG(os.fstat(descriptor).st_mode) and len(text := file.read(MAX_FILE + 1)) <= MAX_FILE:
                    data = [text]
        return {"op": "file"}, data

    # ---- values and calls ------------------------------------------------------------------------------------

    def do_values(self, message: dict, blobs: list) -> tuple[dict, list]:
        """Send the values of names in the notebook; a new question begins if the checker says so."""
        if message["new"]:
            self._forget()
        encode = self._encoder()
        values = {}
        for name in message["names"]:
            if name in self.shell.user_ns:
                value = self.shell.user_ns[name]
                try:
                    values[name] = encode(value)
                except WireError:
                    values[name] = self._handle(value)
        return {"op": "values", "values": values}, encode.blobs

    def do_replace(self, message: dict, blobs: list) -> tuple[dict, list]:
        """Give names in the notebook other values, as a check asks."""
        self.shell.user_ns.update(self._decoder(blobs)(message["values"]))
        return {"op": "replaced"}, []

    def do_call(self, message: dict, blobs: list) -> tuple[dict, list]:
        """Call an object of this side, under the watches and vmaps that the checker has on."""
        shown = self.outputs
        with (
            vmaps.leave_levels(),
            conditions.no_modes(),
            uncompiled_flex(),
        ):  # a callback may ask in the middle of another call
            try:
                return self._call(message, blobs)
            finally:
                self.outputs = shown
                self._redirect(shown)

    def _call(self, message: dict, blobs: list) -> tuple[dict, list]:
        decode = self._decoder(blobs)
        self._apply(message["updates"], decode)
        target = message["target"]
        target = self.objects[target] if type(target) is int else decode(target)
        args, kwargs = decode(message["args"]), decode(message["kwargs"])
        asked = message["conditions"]
        watches = [conditions.watch_of(text) for text in asked["watches"]]
        self.outputs = outputs = Outputs()
        self._redirect(outputs)
        raised = value = None
        with contextlib.ExitStack() as stack:
            conditions.set_conditions(stack, asked)
            for watch in watches:
                stack.enter_context(watch)
            stack.enter_context(warnings.catch_warnings())  # what a call leaves is told below, and undone
            if asked["silent"]:
                warnings.simplefilter("ignore")
            filters = list(warnings.filters)
            try:
                value = vmaps.mapped(target, args, kwargs, message["vmaps"])
            except BaseException as error:
                if type(error) is Closed:
                    raise
                raised = error
            finally:
                left = [conditions.sdpa_backends() != asked["sdpa"], list(warnings.filters) != filters]
        reply: dict = {"op": "raised" if raised is not None else "result"}
        encode = self._encoder()
        if raised is not None:
            reply["error"] = describe_error(raised)
        else:
            reply["value"] = encode(value)
        reply["written"] = self._written()
        seen = [conditions.describe_watch(watch) for watch in watches]
        reply["seen"] = seen if sum(map(len, seen)) <= conditions.MAX_SEEN else None
        reply["left"] = left
        reply["shown"] = "".join(i.get("text", "") for i in outputs.items)[:20_000]
        return reply, encode.blobs

    def _handle(self, value) -> list:
        number = self.numbers.setdefault(id(value), len(self.objects) + 1)
        self.objects[number] = value
        kind = "function" if callable(value) else "other"
        try:
            answered = bool(is_answered(value))
        except Exception:
            answered = True
        name = getattr(value, "__name__", "")
        fields = {"id": number, "kind": kind, "type": type(value).__name__[:80], "answered": answered}
        fields["name"] = name[:80] if isinstance(name, str) else ""
        return ["object", {**fields, "parameters": parameters_of(value) if kind == "function" else None}]

    def _encoder(self) -> Encoder:
        keys = {id(tensor): key for key, tensor in self.tensors.items()}
        own = {id(stub): number for number, stub in self.stubs.items()}

        def handle(value):
            if id(value) in own:
                return ["own", own[id(value)]]
            node, parts = self._handle(value), block_mask_fields(value)
            if parts is not None:
                node[1] |= {"kind": "block_mask", "parts": {name: encode(part) for name, part in parts.items()}}
            return node

        def shared(tensor):
            if tensor.device.type == "meta" or not tensor.numel():
                return None
            memory = tensor.untyped_storage().data_ptr()
            for key, known in self.tensors.items():
                if known.dtype == tensor.dtype and known.numel() and known.untyped_storage().data_ptr() == memory:
                    return key, tensor.storage_offset()
            return None

        encode = Encoder(handle, lambda tensor: keys.get(id(tensor)), shared)
        return encode

    def _decoder(self, blobs: list) -> StudentDecoder:
        def keep(key, tensor):
            self.tensors[key] = tensor
            self.sent[key] = _state_of(tensor)

        return StudentDecoder(blobs, self._stub, self.objects.__getitem__, self.tensors.__getitem__, keep)

    def _stub(self, fields: dict) -> object:
        """A function or an iterator of the checker, as the student meets it."""
        number, question = fields["id"], self.question
        if number in self.stubs:
            return self.stubs[number]

        def ask(args, kwargs, step=False):
            if question != self.question:
                raise RuntimeError("a function of an earlier question's tests")
            return vmaps.across(lambda *plain: self._callback(number, *plain, step), args, kwargs)

        if fields["kind"] == "iterator":

            def items():
                with contextlib.suppress(StopIteration):
                    while True:
                        yield ask((), {}, True)

            self.stubs[number] = items()
        else:
            self.stubs[number] = Proxy(ask, fields.get("name") or "function", fields.get("parameters"))
        return self.stubs[number]

    def _callback(self, number: int, args: tuple, kwargs: dict, in_vmaps: vmaps.Vmaps, step: bool):
        quiet = torch.utils._python_dispatch._disable_current_modes
        message = {"op": "callback", "id": number, "next": step, "vmaps": in_vmaps}
        with torch._C.DisableTorchFunction(), quiet():
            encode = self._encoder()
            message |= {"args": encode(args), "kwargs": encode(kwargs), "written": self._written(True)}
            self.channel.send(message, encode.blobs)
        while True:
            reply, blobs = self.channel.receive()
            if reply["op"] != "call":  # what is called by the student may call the student again
                break
            self.answer(reply, blobs)
        with torch._C.DisableTorchFunction(), quiet():
            decode = self._decoder(blobs)
            self._apply(reply["updates"], decode)
            if reply["op"] == "raise":
                raise nearest_error(reply["error"]["kinds"], reply["error"]["words"])
            return decode(reply["value"])

    def _written(self, during: bool = False) -> list[int]:
        """The numbers of the checker's tensors that were written to here, moved to other memory or seen as another shape.

        To read a GPU's memory is a copy, which a profiler of the student's would count: `during` a call those wait for its end.
        """
        profiled = during and torch.autograd._profiler_enabled()
        written = []
        for key, tensor in self.tensors.items():
            if not (profiled and tensor.is_cuda) and (now := _state_of(tensor)) != self.sent[key]:
                self.sent[key] = now
                written.append(key)
        return written

    def _apply(self, updates: list, decode: StudentDecoder) -> None:
        """Tensors that the checker wrote to since it sent them."""
        for key, node in updates:
            with torch.no_grad():
                self.tensors[key].copy_(decode(node))
            self.sent[key] = _state_of(self.tensors[key])


def memory_left() -> float:
    """Bytes of address space that this process may still take."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return math.inf if limit == resource.RLIM_INFINITY else limit - address_space()


def exhausted_resource(folders: tuple[str, ...], memory: float) -> str:
    """Say which resource (memory, threads, disk) is nearly used up; "" if none. `memory` bytes were left before the first cell."""
    if memory_left() < 0.1 * memory < math.inf:
        return "its variables and threads hold nearly all the memory"
    threads = len(os.listdir("/proc/self/task"))
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit != resource.RLIM_INFINITY and threads > limit // 2:
        return f"{threads} threads go on running"
    for folder in folders:
        with contextlib.suppress(OSError):
            room = os.statvfs(folder)
            if room.f_bavail * 20 < room.f_blocks or room.f_favail * 20 < room.f_files:
                return f"the folder {folder} is full"
    return ""


def _state_of(tensor: torch.Tensor) -> tuple:
    """A tensor's bytes, and where they lie: its memory, and its shape and strides there."""
    place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return (b"" if tensor.device.type == "meta" else tensor_bytes(tensor), *place)
