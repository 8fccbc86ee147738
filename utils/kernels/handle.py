"""Launch a compiled Triton kernel again, without the work that Triton's `kernel[grid](...)` repeats at each call.

`kernel[grid](...)` binds the arguments to parameters, looks at each for what the kernel is specialized on, looks the
kernel up by a long string, and encodes each TMA descriptor. None of that changes from call to call as long as shapes,
strides and alignment stay the same. A `Handle` keeps what came out of it, and takes only the tensors. `KEPT` holds what
was decided and launched before, by the `layout` of the tensors.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
from collections.abc import Sequence
from typing import Any

import torch

from utils.newest import Newest

KEPT: Newest[tuple, Any] = Newest(4096)


def layout(*tensors: torch.Tensor) -> tuple:
    """Return all that a launch depends on but the addresses: shapes, strides, types and devices."""
    return tuple([(x.shape, x.stride(), x.dtype, x.device) for x in tensors])


class Map:
    """What Triton's launcher reads of a TMA descriptor; made at each launch, since Triton's own class takes longer."""

    __slots__ = ("base", "shape", "strides")
    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, base: torch.Tensor, shape: list[int], strides: list[int]):
        self.base, self.shape, self.strides = base, shape, strides


class _Direct:
    """The C function behind Triton's launcher, with the arguments of a launch: stream, pointers and descriptors change.

    Triton's launcher encodes every TMA descriptor at every launch, which takes longer than the launch itself. Here a
    descriptor is kept by the address that it holds; the rest of it is the same for all launches of a handle.
    """

    def __init__(self, launcher: Any, before: tuple, tensors: Sequence[torch.Tensor], maps: list, rest: tuple):
        """Find out what Triton's launcher gives to the C function, by running it with a function that only listens.

        Args:
            launcher: the compiled kernel's own.
            before: its arguments up to the kernel's: grid, stream, function, metadata and hooks.
            tensors: of a launch, each the base of a descriptor, or passed as a pointer.
            maps: (shape, strides) of each tensor that is passed in a descriptor, else None.
            rest: the kernel's other arguments.
        """
        given: list = []
        marks = [Map(x, *kept) if kept else object() for x, kept in zip(tensors, maps, strict=True)]
        wrapper, listening = launcher.launch, copy.copy(launcher)
        listening.launch = lambda *arguments: given.extend(arguments)
        listening(*before, *marks, *rest)
        # Triton 3.7 passes the kernel's own arguments as one list, versions before it one by one.
        flat = marks[0] in given
        inner = given if flat else list(given[-1])
        self.outer = None if flat else given
        self.launch, of_map = wrapper, iter(())
        if any(maps):  # a function that makes descriptors is around the C function
            around = inspect.getclosurevars(wrapper).nonlocals
            self.launch, of_map = around["launcher"], iter(around["tensordesc_meta"])
            self.describe = wrapper.__globals__["make_tensordesc_arg"]
        first = inner.index(marks[0])
        self.arguments = inner[:first]
        self.places: list[tuple] = []  # (where the argument stands, None or how its descriptor is made)
        for mark, kept in zip(marks, maps, strict=True):
            description = ({}, *kept, next(of_map)) if kept else None
            self.places.append((len(self.arguments), description))
            self.arguments += self.describe(mark, description[-1]) if description else [mark]
        self.arguments += inner[first + len(marks) :]

    def bind(self, stream: int, tensors: Sequence[torch.Tensor]) -> Sequence:
        """Return what `launch` gets for these tensors."""
        arguments = self.arguments.copy()
        for x, (place, description) in zip(tensors, self.places, strict=True):
            address = x.data_ptr()
            if description is None:
                arguments[place] = address
                continue
            known, shape, strides, metadata = description
            if (descriptor := known.get(address)) is None:
                if len(known) == 1024:
                    known.clear()
                descriptor = known[address] = self.describe(Map(x, shape, strides), metadata)[0]
            arguments[place] = descriptor
        if self.outer is None:
            arguments[3] = stream
            return arguments
        return *self.outer[:3], stream, *self.outer[4:-1], arguments


class Handle:
    """A compiled kernel, its grid, and all of its arguments but the tensors, which come first."""

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        leading: Sequence[Any],
        rest: Sequence[Any],
        index: int,
        cluster: int = 1,
    ):
        """Keep a launch.

        Args:
            compiled: what `kernel[grid](...)` returned.
            grid: the blocks of the launch in up to three directions.
            leading: the first arguments of that launch: TMA descriptors, and tensors that are passed as pointers.
            rest: the other arguments in the kernel's order, constants too. Tensors among them are kept alive.
            index: the CUDA device.
            cluster: blocks of a cluster; with more than one the grid counts clusters in its first direction.
        """
        from triton import knobs
        from triton.runtime import driver

        self.grid = (*grid, 1, 1)[:3]
        self.maps = [(list(x.shape), list(x.strides)) if hasattr(x, "block_shape") else None for x in leading]
        self.rest = tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in rest)
        self.kept = [x for x in rest if isinstance(x, torch.Tensor)]
        self.index = index
        self.run, self.function, self.metadata = compiled.run, compiled.function, compiled.packed_metadata
        if cluster > 1:  # Triton compiled one block and knows of no other; only its launcher makes clusters
            self.metadata = (compiled.metadata.num_warps, cluster, compiled.metadata.shared)
        self.compiled = compiled
        self._stream, self._runtime = driver.active.get_current_stream, knobs.runtime
        self._direct: _Direct | None = None
        scratch = [getattr(self.run, f"{kind}_scratch_size", 1) for kind in ("global", "profile")]
        if not any(scratch):  # memory that each launch would need
            bases = [x if kept is None else x.base for x, kept in zip(leading, self.maps, strict=True)]
            before = (*self.grid, 0, self.function, self.metadata, None, None, None)
            # If another Triton builds its launcher otherwise, each launch goes through it.
            with contextlib.suppress(AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError):
                self._direct = _Direct(self.run, before, bases, self.maps, self.rest)

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch on these tensors, of the same shapes, strides and alignment as those of the launch that was kept."""
        # The launch takes place on the current device, and almost always that is the tensors' own.
        if torch._C._cuda_getDevice() != self.index:
            with torch.cuda.device(self.index):
                return self(*tensors)
        stream = self._stream(self.index)
        enter, leave = self._runtime.launch_enter_hook, self._runtime.launch_exit_hook
        listened = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)  # a profiler listens to launches
        if self._direct is not None and not listened:
            self._direct.launch(*self._direct.bind(stream, tensors))
            return None
        given = [x.data_ptr() if kept is None else Map(x, *kept) for x, kept in zip(tensors, self.maps, strict=True)]
        metadata = self.compiled.launch_metadata(self.grid, stream, *given, *self.rest) if listened else None
        hooks = (enter, leave) if listened else (None, None)
        return self.run(*self.grid, stream, self.function, self.metadata, metadata, *hooks, *given, *self.rest)


def _place(address: int) -> Any:
    """Return a place in memory, which launches ask for its address as they ask a tensor."""
    return types.SimpleNamespace(data_ptr=lambda: address)


class Series:
    """Launches that follow each other, with all their arguments kept by the addresses of the call's tensors.

    A training's steps get the same addresses again from torch's allocator; then each launch is a call of the C function.
    """

    def __init__(self, handles: Sequence[tuple[Handle, Sequence[tuple[int, int]]]]):
        """Keep handles of one device, each with its tensors: number among a call's addresses, bytes behind that address."""
        self.handles, self.first = handles, handles[0][0]
        self.direct = [handle._direct for handle, _ in handles if handle._direct is not None]
        self.known: Newest[tuple, list] = Newest(256)

    def __call__(self, addresses: tuple[int, ...]) -> None:
        """Launch all on tensors that begin at these addresses."""
        stream, runtime = self.first._stream(self.first.index), self.first._runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        listened = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
        here = not listened and torch._C._cuda_getDevice() == self.first.index
        bound = self.known.get((stream, addresses)) if here else None
        if bound is None:
            given = [[_place(addresses[i] + offset) for i, offset in places] for _, places in self.handles]
            if not here or len(self.direct) < len(given):
                for (handle, _), tensors in zip(self.handles, given, strict=True):
                    handle(*tensors)
                return
            bound = [(x.launch, tuple(x.bind(stream, tensors))) for x, tensors in zip(self.direct, given, strict=True)]
            self.known[stream, addresses] = bound
        for launch, arguments in bound:
            launch(*arguments)


def observed(*tensors: torch.Tensor) -> bool:
    """Whether more than the GPU has to see a call as an operator, so that a bare launch would go unnoticed.

    torch.compile, autograd, a function transform (vmap, grad), a dispatch mode (FlopCounterMode, fake tensors), or a
    subclass of Tensor other than Parameter.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    grad = torch.is_grad_enabled()
    for x in tensors:
        kind = x.__class__  # a Parameter is a Tensor with another name
        if (kind is not torch.Tensor and kind is not torch.nn.Parameter) or (grad and x.requires_grad):
            return True
    return False
