"""The process in which a submission runs: it runs cells, calls the student's functions, and says what happened.

Nothing here decides anything. A student's code shares this process and may replace whatever it likes in it; what this
process says is data for the checker, which sits in another process behind `wire`. The one exception is named where it
happens: checks that cannot work at a distance run here, in a fork, and are then compared with a control.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import importlib
import io
import json
import linecache
import math
import os
import resource
import signal
import stat
import sys
import traceback
import types
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from instructor.grading.sandbox import tampering
from instructor.grading.sandbox.walls import SCRATCH
from instructor.grading.wire.protocol import (
    BlockMasks,
    Channel,
    Closed,
    Decoder,
    Encoder,
    WireError,
    tensor_bytes,
    vmaps,
)
from instructor.grading.wire.signatures import parameters_of, standing_for
from utils.checking import is_answered
from utils.checking.watching import watch_operations

MAX_TEXT = 200_000  # characters of output kept for one cell
MAX_IMAGE = 2_000_000  # characters of one displayed image, base64
MAX_RECORDS = 100_000  # operators recorded in one call
MAX_FILE = 1_000_000  # bytes of a file that is an answer


class Outputs:
    """What a cell shows, in order and bounded, as a notebook keeps it."""

    def __init__(self):
        self.items: list[dict] = []
        self.left = MAX_TEXT

    def text(self, name: str, text: str) -> None:
        if self.left <= 0:
            return
        text = text[: self.left]
        self.left -= len(text)
        if self.left <= 0:
            text += "\n... the rest of the output is left out."
        if self.items and self.items[-1].get("name") == name:
            self.items[-1]["text"] += text
        else:
            self.items.append({"output_type": "stream", "name": name, "text": text})

    def display(self, data: dict, metadata: dict | None, count: int | None = None) -> None:
        kept = {}
        for kind, value in data.items():
            value = value if isinstance(value, str) else json.dumps(value, default=str)
            limit = MAX_IMAGE if kind.startswith("image/") else self.left
            if 0 < len(value) <= limit:
                kept[kind] = value
                self.left -= 0 if kind.startswith("image/") else len(value)
        if kept and len(self.items) < 1000:
            kind = (
                {"output_type": "display_data"}
                if count is None
                else {"output_type": "execute_result", "execution_count": count}
            )
            self.items.append({**kind, "data": kept, "metadata": {}})

    def error(self, name: str, value: str, trace: list[str]) -> None:
        cut = [line[:5000] for line in trace[-60:]]
        self.items.append({"output_type": "error", "ename": name[:200], "evalue": value[:5000], "traceback": cut})


class _Stream(io.TextIOBase):
    """sys.stdout of a student's cell."""

    def __init__(self, name: str):
        self.stream, self.outputs = name, Outputs()
        self.encoding_errors = "replace"

    def writable(self):
        return True

    def write(self, text):
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self.outputs.text(self.stream, text)
        return len(text)

    def fileno(self):
        return 1 if self.stream == "stdout" else 2


class Recorder(TorchDispatchMode):
    """Every operator that runs, with the shapes of what went in and came out, for the checker's own modes."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.records: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if len(self.records) < MAX_RECORDS:
            schema = getattr(func, "_schema", None)
            name = schema.name if schema is not None else getattr(func, "__name__", "?")
            overload = schema.overload_name if schema is not None else ""
            sketched = [_sketch(a) for a in args], {k: _sketch(v) for k, v in (kwargs or {}).items()}
            self.records.append([name, overload or "default", *sketched, _sketch(result)])
        return result


def _sketch(value, depth: int = 0):
    """A value without the numbers of its tensors."""
    if isinstance(value, torch.Tensor):
        return {"tensor": [list(value.shape), str(value.dtype).removeprefix("torch."), str(value.device)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value if not isinstance(value, int) or abs(value) < 1 << 62 else str(value)
    if isinstance(value, list | tuple) and depth < 4:
        return {"tuple" if isinstance(value, tuple) else "list": [_sketch(v, depth + 1) for v in value[:1000]]}
    return {"other": str(value)[:80]}


class Student:
    """Serves the checker's requests, one after the other."""

    def __init__(self, channel: Channel, shell, base: dict, watch_flags: tampering.Watcher):
        self.channel, self.shell, self.base, self.flags = channel, shell, base, watch_flags
        self.outputs = Outputs()
        own_root = os.getcwd() == SCRATCH and os.path.ismount("/out")  # or else the folders are the machine's
        self.folders = (SCRATCH, "/tmp") if own_root else ()
        self.memory = memory_left()
        self.strays = self.question = 0
        self._forget()

    def _forget(self) -> None:
        """Drop the objects of a question."""
        self.question += 1
        self.objects: dict[int, object] = {}  # of this side, by the number the checker has
        self.numbers: dict[int, int] = {}  # these numbers by the address of the object
        self.stubs: dict[int, object] = {}  # for objects of the checker, by their numbers
        self.block_masks = BlockMasks()
        self.tensors: dict[int, torch.Tensor] = {}  # of the checker, as they are here
        self.sent: dict[int, bytes] = {}  # their bytes as the checker knows them

    # ---- the loop --------------------------------------------------------------------------------------------

    def serve(self) -> None:
        while True:
            try:
                message, blobs = self.channel.receive()
                self.answer(message, blobs)
            except (Closed, BrokenPipeError):
                os._exit(0)
            except KeyboardInterrupt:
                continue

    def answer(self, message: dict, blobs: list) -> None:
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
        """Run a cell as Jupyter does."""
        self.flags.begin(message["cell"])
        self.outputs = outputs = Outputs()
        self._redirect(outputs)
        result = raised = None
        try:
            result = self.shell.run_cell(message["source"], store_history=False)
        except BaseException as error:
            raised = error
        self.flags.scan()  # first of all: what follows needs builtins that are whole
        if raised is not None:
            outputs.error(type(raised).__name__, _words(raised), [type(raised).__name__])
        ok = raised is None and getattr(result, "success", None) is True
        with contextlib.suppress(Exception):
            self._keep_descriptor_output(outputs)
        self._end_strays()
        return {"op": "ran", "ok": ok, "outputs": outputs.items, "used_up": used_up(self.folders, self.memory)}, []

    def _redirect(self, outputs: Outputs) -> None:
        for name in ("stdout", "stderr"):
            stream = _Stream(name)
            stream.outputs = outputs
            setattr(sys, name, stream)
        self.shell.outputs = outputs
        with contextlib.suppress(OSError):
            os.lseek(1, 0, os.SEEK_SET)
            os.ftruncate(1, 0)

    def _keep_descriptor_output(self, outputs: Outputs) -> None:
        """What C code and child processes wrote to file descriptors 1 and 2, a file here."""
        if stat.S_ISREG(os.fstat(1).st_mode):
            text = os.pread(1, 20_000, 0).decode(errors="replace")
            if text:
                outputs.text("stdout", text)

    def _end_strays(self) -> None:
        """End processes that a cell left behind, if they are many: later questions need the room."""
        if os.getpid() == 2 and sum(name.isdigit() for name in os.listdir("/proc")) > 16:
            self.strays += 1
            os.kill(-1, signal.SIGKILL)  # all of this namespace but its first process and this one

    def do_file(self, message: dict, blobs: list) -> tuple[dict, list]:
        """The bytes of a file that is an answer."""
        name = os.path.basename(message["name"])
        if os.path.islink(name):
            self.flags.sign("files", f"the answer {name} is a link to {os.readlink(name)}")
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError("it is no plain file")
            data = os.read(descriptor, MAX_FILE + 1)
            os.close(descriptor)
            if len(data) > MAX_FILE:
                raise OSError(f"it is larger than {MAX_FILE:,} bytes")
        except OSError as error:
            return {"op": "file", "there": False, "why": str(error)[:200]}, []
        return {"op": "file", "there": True}, [data]

    # ---- values and calls ------------------------------------------------------------------------------------

    def do_get(self, message: dict, blobs: list) -> tuple[dict, list]:
        """Values of names in the notebook; a new question begins."""
        self.flags.begin(message["cell"])
        self._forget()
        return self.do_values(message, blobs)

    def do_values(self, message: dict, blobs: list) -> tuple[dict, list]:
        """Values of names in the notebook."""
        encode = self._encoder()
        values = {}
        for name in message["names"]:
            if name in self.shell.user_ns:
                self.flags.look_at(self.shell.user_ns[name])
                try:
                    values[name] = encode(self.shell.user_ns[name])
                except WireError:
                    values[name] = self._handle(self.shell.user_ns[name])
        return {"op": "values", "values": values}, encode.blobs

    def do_room(self, message: dict, blobs: list) -> tuple[dict, list]:
        """What calls have left too little of for what comes after them."""
        return {"op": "room", "used_up": used_up(self.folders, self.memory)}, []

    def do_replace(self, message: dict, blobs: list) -> tuple[dict, list]:
        """Give names in the notebook the values that a check has for them."""
        self.shell.user_ns.update(self._decoder(blobs)(message["values"]))
        return {"op": "replaced"}, []

    def do_runner(self, message: dict, blobs: list) -> tuple[dict, list]:
        """Offer a function of the course that runs a student's text, in a process where no cell of theirs ran."""
        self.objects[1] = getattr(importlib.import_module(message["module"]), message["name"])
        return {"op": "ready"}, []

    def do_call(self, message: dict, blobs: list) -> tuple[dict, list]:
        """Call an object of this side, under the modes and vmaps that the checker has on."""
        for key in message["drop"]:
            del self.tensors[key], self.sent[key]
        shown = self.outputs
        with vmaps.lifted(), no_modes(), uncompiled_flex():  # a callback may ask in the middle of another call
            try:
                return self._call(message, blobs)
            finally:
                self.outputs = shown
                self._redirect(shown)

    def _call(self, message: dict, blobs: list) -> tuple[dict, list]:
        levels = message["levels"]
        decode = self._decoder(blobs, levels)
        self._apply(message["updates"], decode)
        target = self.objects[message["target"]]
        args, kwargs = decode(message["args"]), decode(message["kwargs"])
        conditions = message["conditions"]
        modes = decode(conditions["modes"])
        self.outputs = outputs = Outputs()
        self._redirect(outputs)
        recorder, seen, raised, value = None, None, None, None
        ends = [torch.empty(size, device="meta") for size in conditions["canary"]]
        with contextlib.ExitStack() as stack:
            _conditions(stack, conditions)
            if conditions["record"]:
                recorder = stack.enter_context(Recorder())
            for mode in modes:
                stack.enter_context(mode)
            if conditions["watch"]:
                seen = stack.enter_context(watch_operations())
            profile = stack.enter_context(tampering.Profile()) if conditions["record"] else None
            try:
                if recorder is not None:
                    canary(ends[0])
                with vmaps.entered(levels):
                    value = target(*args, **kwargs) if not message["next"] else next(target)
            except BaseException as error:
                if type(error) is Closed:
                    raise
                raised = error
            finally:
                self.flags.mend()
            if recorder is not None:
                canary(ends[1])
        self.flags.scan()
        ran = [record[0] for record in recorder.records] if recorder is not None else []
        evidence = [{name.rpartition("::")[2] for name in ran}] if recorder is not None else []
        evidence += [set(seen.operations)] if seen is not None else []
        opaque = any("::" in name and not name.startswith(("aten::", "prim")) for name in ran)  # the watch names those
        for recorded in evidence:
            if not opaque and (name := profile.unseen(recorded)):
                code = getattr(target, "__code__", None)
                self.flags.sign("switches off the watch", f"{name} ran, and the watch does not show it", code)
        reply: dict = {"op": "raised" if raised is not None else "result"}
        encode = self._encoder(levels)
        if raised is not None:
            reply["error"] = describe_error(raised)
        else:
            self.flags.look_at(value)
            reply["value"] = encode(value)
        reply["mutated"] = self._mutations(encode)
        if seen is not None:
            reply["watch"] = _describe_watch(seen)
        if recorder is not None:
            reply["records"] = recorder.records
        reply["shown"] = "".join(i.get("text", "") for i in outputs.items)[:20_000]
        return reply, encode.blobs

    def _handle(self, value) -> list:
        number = self.numbers.setdefault(id(value), len(self.objects) + 1)
        self.objects[number] = value
        kind = "iterator" if isinstance(value, Iterator) else "function" if callable(value) else "other"
        try:
            answered = bool(is_answered(value))
        except Exception:
            answered = True
        name = getattr(value, "__name__", "")
        return [
            "object",
            {
                "id": number,
                "kind": kind,
                "type": type(value).__name__[:80],
                "answered": answered,
                "name": name[:80] if isinstance(name, str) else "",
                "class": isinstance(value, type),
                "parameters": parameters_of(value) if kind == "function" else None,
            },
        ]

    def _encoder(self, levels: vmaps.Levels = ()) -> Encoder:
        keys = {id(tensor): key for key, tensor in self.tensors.items()}
        own = {id(stub): number for number, stub in self.stubs.items()}

        def handle(value):
            return ["own", own[id(value)]] if id(value) in own else self._handle(value)

        def shared(tensor):
            if tensor.device.type == "meta" or not tensor.numel():
                return None
            memory = tensor.untyped_storage().data_ptr()
            for key, known in self.tensors.items():
                if known.dtype == tensor.dtype and known.numel() and known.untyped_storage().data_ptr() == memory:
                    return key, tensor.storage_offset()
            return None

        return Encoder(
            handle, lambda tensor: keys.get(id(tensor)), levels=levels, shared=shared, block_mask=self.block_masks.named
        )

    def _decoder(self, blobs: list, levels: vmaps.Levels = ()) -> Decoder:
        def keep(key, tensor):
            self.tensors[key] = tensor
            self.sent[key] = _bytes_of(tensor)

        return Decoder(
            blobs,
            self._stub,
            self.objects.__getitem__,
            self.tensors.__getitem__,
            keep,
            trusted=True,
            levels=levels,
            block_mask=self.block_masks.rebuilt,
        )

    def _stub(self, said: dict):
        """A function or an iterator of the checker, as the student meets it."""
        number, question = said["id"], self.question
        if number in self.stubs:
            return self.stubs[number]

        def ask(args, kwargs, step=False):
            if question != self.question:
                raise RuntimeError("a function of an earlier question's tests")
            return self._callback(number, args, kwargs, step)

        if said["kind"] == "iterator":
            stub = _RemoteIterator(lambda: ask((), {}, True))
        else:
            stub = standing_for(ask, said.get("name") or "function", said.get("parameters"))
        self.stubs[number] = stub
        return stub

    def _callback(self, number: int, args: tuple, kwargs: dict, step: bool):
        quiet = torch.utils._python_dispatch._disable_current_modes
        levels = vmaps.levels_here()
        message = {"op": "callback", "id": number, "next": step, "levels": levels, "indices": reads_by_tensor()}
        with vmaps.lifted(), torch._C.DisableTorchFunction(), quiet():
            encode = self._encoder(levels)
            message |= {"args": encode(args), "kwargs": encode(kwargs), "mutated": self._mutations(encode)}
            self.channel.send(message, encode.blobs)
        while True:
            reply, blobs = self.channel.receive()
            if reply["op"] != "call":  # what is called by the student may call the student again
                break
            self.answer(reply, blobs)
        with vmaps.lifted(), torch._C.DisableTorchFunction(), quiet():
            decode = self._decoder(blobs, levels)
            self._apply(reply["updates"], decode)
            if reply["op"] == "stop":
                raise StopIteration
            if reply["op"] == "raise":
                raise rebuild_error(reply["error"])
            return decode(reply["value"])

    def _mutations(self, encode: Encoder) -> list:
        """Tensors of the checker that were written to here."""
        changed = []
        for key, tensor in self.tensors.items():
            now = _bytes_of(tensor)
            if now != self.sent[key]:
                self.sent[key] = now
                known, encode.known = encode.known, None
                changed.append([key, encode(tensor.detach())])
                encode.known = known
        return changed

    def _apply(self, updates: list, decode: Decoder) -> None:
        """Tensors that the checker wrote to since it sent them."""
        for key, node in updates:
            with torch.no_grad():
                self.tensors[key].copy_(decode(node))
            self.sent[key] = _bytes_of(self.tensors[key])

    # ---- checks that cannot work at a distance -----------------------------------------------------------------

    def do_inside(self, message: dict, blobs: list) -> tuple[dict, list]:
        """Run a test cell in a fork of this process; its source is in memory there and nowhere else.

        Run twice: with the answers as they are, and with answers that were spoilt. A check that accepts both has been
        tampered with. With a GPU, whose state a fork does not have, it runs here, once, and this process ends after it.
        """
        self.flags.begin(message["cell"])
        if message["here"]:
            return {"op": "verdicts", "verdicts": [self._judged(message, message["here"] == "spoilt")]}, []
        verdicts = []
        for spoil in (False, True) if message["control"] else (False,):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(read)
                self._inside(message, spoil, write)
            os.close(write)
            with os.fdopen(read, "rb") as pipe:
                said = pipe.read(MAX_TEXT + 100_000)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            verdicts.append(json.loads(said) if said else None)
        self._end_strays()
        return {"op": "verdicts", "verdicts": verdicts}, []

    def _inside(self, message: dict, spoil: bool, write: int) -> None:
        try:
            os.write(write, json.dumps(self._judged(message, spoil)).encode())
        finally:
            os._exit(0)

    def _judged(self, message: dict, spoil: bool) -> dict:
        """What a test cell says of the answers in this process, or of spoilt ones."""
        self.outputs = outputs = Outputs()
        self._redirect(outputs)
        install_sources(message["modules"])
        names = {**self.base, "__name__": "__main__"}
        mine = {n: self.shell.user_ns[n] for n in message["names"] if n in self.shell.user_ns}
        names.update({n: spoilt(v) for n, v in mine.items()} if spoil else mine)
        error = None
        with self._files(message["files"] if spoil else []):
            try:
                for source, name in message["sources"]:
                    exec(compile(source, name, "exec"), names)
            except BaseException as raised:
                error = raised
        remove_sources()  # or they would count as planted
        self.flags.scan()
        shown = "".join(i.get("text", "") for i in outputs.items)[:20_000]
        return {"passed": error is None, "shown": shown, "error": error and describe_error(error)}

    @contextlib.contextmanager
    def _files(self, names: list[str]):
        for name in names:
            with open(os.path.basename(name), "w") as file:
                file.write("spoilt = True\n")
        yield


@contextlib.contextmanager
def no_modes():
    """Inside, no mode of torch's is on: neither those that see operators nor those that see functions."""
    taken = []
    with torch.utils._python_dispatch._disable_current_modes():
        while torch._C._len_torch_function_stack():
            taken.append(torch._C._pop_torch_function_stack())
        try:
            yield
        finally:
            while taken:
                torch._C._push_on_torch_function_stack(taken.pop())


@contextlib.contextmanager
def uncompiled_flex():
    """Inside, eager FlexAttention calls masks and score modifiers; else it compiles them, and those of the checker
    have nothing to compile.
    """
    module = sys.modules.get("torch.nn.attention.flex_attention")
    name = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    if module is None or not hasattr(module, name):
        yield
        return
    before = getattr(module, name)
    setattr(module, name, True)
    try:
        yield
    finally:
        setattr(module, name, before)


def reads_by_tensor() -> bool:
    """True where FlexAttention calls a mask: there `x[i]` reads a tensor with a tensor for an index."""
    depth = torch._C._len_torch_function_stack()
    modes = [torch._C._get_function_stack_at(i) for i in range(depth)]
    return any(type(mode).__name__ == "TransformGetItemToIndex" for mode in modes)


class _RemoteIterator:
    def __init__(self, step):
        self._step = step

    def __iter__(self):
        return self

    def __next__(self):
        return self._step()


def memory_left() -> float:
    """Bytes of address space that this process may still take."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY or not os.path.isfile("/proc/self/statm"):
        return math.inf
    with open("/proc/self/statm") as statm:
        return most - int(statm.read().split()[0]) * resource.getpagesize()


def used_up(folders: tuple[str, ...], memory: float) -> str:
    """What a cell or a call has left too little of for those after it, in words: threads, memory, room; or nothing.

    Args:
        folders: those that fill up
        memory: bytes that were left before the first cell
    """
    if memory_left() < 0.1 * memory < math.inf:
        return "its variables and threads hold nearly all the memory"
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if most != resource.RLIM_INFINITY and threads > most // 2:
        return f"{threads} threads go on running"
    for folder in folders:
        with contextlib.suppress(OSError):
            room = os.statvfs(folder)
            if room.f_bavail * 20 < room.f_blocks or room.f_favail * 20 < room.f_files:
                return f"the folder {folder} is full"
    return ""


def canary(x: torch.Tensor) -> None:
    """An operator that no lab uses: it has to turn up at both ends of a record."""
    torch.special.i1e(x)


def _conditions(stack: contextlib.ExitStack, conditions: dict) -> None:
    """Grad mode, default dtype and the poison of uninitialised memory, as the checker has them."""
    stack.enter_context(torch.set_grad_enabled(conditions["grad"]))
    if conditions["inference"]:
        stack.enter_context(torch.inference_mode())
    if conditions["fill"]:
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        stack.callback(torch.use_deterministic_algorithms, before[0], warn_only=before[1])


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return b"" if tensor.device.type == "meta" else tensor_bytes(tensor)


def _describe_watch(seen) -> dict:
    for counter in (seen.operations, seen.calls):
        counter.pop("special_i1e", None)
    described = {
        name: {str(k)[:200]: int(v) for k, v in getattr(seen, name).items()}
        for name in ("operations", "calls", "exits", "custom", "kernels")
    }
    described["lines"] = {
        str(k)[:200]: [line.function[:200], line.number, line.text[:300]] for k, line in seen.lines.items()
    }
    return described


# ---- errors ------------------------------------------------------------------------------------------------------


def describe_error(error: BaseException) -> dict:
    """An exception as data: its type, its words, and the lines of the student's that it went through."""
    frames, last_is_raise, last_is_students = [], False, False
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        last_is_students = tampering.is_students(code)
        if last_is_students:
            text = linecache.getline(code.co_filename, trace.tb_lineno).strip()
            frames.append([code.co_filename[:200], code.co_name[:200], trace.tb_lineno, text[:500]])
            last_is_raise = dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
        trace = trace.tb_next
    words = _words(error)
    state = {
        str(k)[:40]: v if not isinstance(v, str) else v[:5000]
        for k, v in vars(error).items()
        if v is None or isinstance(v, bool | int | float | str)
    }
    kinds = [f"{k.__module__}:{k.__qualname__}"[:200] for k in type(error).__mro__ if isinstance(k.__module__, str)]
    return {
        "kinds": kinds[:12],
        "words": words[:5000],
        "frames": frames[-12:],
        "state": state,
        "raised_there": last_is_students and last_is_raise,
    }


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "(the exception has no words: its __str__ fails)"


def rebuild_error(said: dict) -> BaseException:
    for kind in said["kinds"]:
        module, _, name = kind.partition(":")
        found = getattr(builtins, name, None) if module == "builtins" else None
        if isinstance(found, type) and issubclass(found, Exception):
            return found(said["words"])
    return RuntimeError(said["words"])


# ---- the control -------------------------------------------------------------------------------------------------


def spoilt(value):
    """A wrong answer made of a student's: results are shifted, texts cut, classes give shifted results."""
    if isinstance(value, type):
        body = {}
        for name in ("forward", "__call__"):
            if name in vars(value):
                body[name] = spoilt(getattr(value, name))
        try:
            return type(value)(value.__name__, (value,), body) if body else None
        except TypeError:
            return None
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):

        def wrong(*args, **kwargs):
            return shifted(value(*args, **kwargs))

        wrong.__name__ = getattr(value, "__name__", "wrong")
        return wrong
    return shifted(value)


def shifted(value):
    if isinstance(value, torch.Tensor):
        return ~value if value.dtype is torch.bool else value * -3 + 5 if value.numel() else value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float | complex):
        return value * -3 + 5
    if isinstance(value, str):
        return value[::-1] + "?"
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(shifted(v) for v in value)
    if type(value) is dict:
        return {k: shifted(v) for k, v in value.items()}
    return None


def install_sources(modules: dict[str, list]) -> None:
    """Make modules importable from their source text: {name: [source, file name, is a package]}."""
    import importlib.abc
    import importlib.util

    class FromMemory(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, path=None, target=None):
            if name not in modules:
                return None
            return importlib.util.spec_from_loader(name, self, is_package=modules[name][2])

        def create_module(self, spec):
            return None

        def exec_module(self, module):
            source, file, _ = modules[module.__name__]
            module.__file__ = file
            exec(compile(source, file, "exec"), module.__dict__)

    remove_sources()
    sys.meta_path.insert(0, FromMemory())


def remove_sources() -> None:
    """Forget modules of the instructor's, and what imports them from memory."""
    for name in [n for n in sys.modules if n == "instructor" or n.startswith("instructor.")]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "FromMemory"]
