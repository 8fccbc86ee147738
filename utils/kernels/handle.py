"""Launch a compiled Triton kernel again, without the work that Triton's `kernel[grid](...)` repeats at each call.

`kernel[grid](...)` binds the arguments to parameters, looks at each for what the kernel is specialized on, looks the
kernel up by a long string, and checks each TMA descriptor. None of that changes from call to call as long as shapes,
strides and alignment stay the same. A `Handle` keeps what came out of it, and takes only the tensors. `KEPT` holds what
was decided and launched before, by the `layout` of the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from utils.newest import Newest

KEPT: Newest[tuple, Any] = Newest(4096)


def layout(*tensors: torch.Tensor) -> tuple:
    """Return all that a launch depends on but the addresses: shapes, strides, types and devices."""
    return tuple([(x.shape, x.stride(), x.dtype, x.device) for x in tensors])


class _Map:
    """What Triton's launcher reads of a TMA descriptor; made at each launch, so that no tensor is kept alive."""

    __slots__ = ("base", "shape", "strides")
    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, base: torch.Tensor, shape: list[int], strides: list[int]):
        self.base, self.shape, self.strides = base, shape, strides


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

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch on these tensors, of the same shapes, strides and alignment as those of the launch that was kept."""
        given = [x.data_ptr() if kept is None else _Map(x, *kept) for x, kept in zip(tensors, self.maps, strict=True)]
        stream = self._stream(self.index)
        enter, leave, metadata = self._runtime.launch_enter_hook, self._runtime.launch_exit_hook, None
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler listens to launches
            metadata = self.compiled.launch_metadata(self.grid, stream, *given, *self.rest)
        else:
            enter = leave = None
        # The launch takes place on the current device, and almost always that is the tensors' own.
        if torch._C._cuda_getDevice() == self.index:
            self.run(*self.grid, stream, self.function, self.metadata, metadata, enter, leave, *given, *self.rest)
        else:
            with torch.cuda.device(self.index):
                self.run(*self.grid, stream, self.function, self.metadata, metadata, enter, leave, *given, *self.rest)


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
