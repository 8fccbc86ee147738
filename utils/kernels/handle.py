"""Launch a compiled Triton kernel again, without the work that Triton's `kernel[grid](...)` repeats at each call.

`kernel[grid](...)` binds the arguments to parameters, specializes the kernel on each of them, looks the kernel up by a
long string, and encodes each TMA descriptor. The result is the same as long as shapes, strides and alignment are the
same. A `Handle` packs the parameters once, as the kernel's PTX declares them, and keeps them by the addresses of the
tensors. Torch's allocator gives the steps of a training the same addresses again; then a launch is one call of the CUDA
driver. `CALLS` maps the `layout` of tensors to the decisions and launches of earlier calls.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import re
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_compiling

from utils.newest import Newest

_PLAIN, _requires_grad = {torch.Tensor, torch.nn.Parameter}, operator.attrgetter("requires_grad")
_empty_strided = torch._C._dynamo.guards._empty_strided_cuda
CALLS: Newest[tuple, Any] = Newest(4096)
_BOUND: Newest[tuple, list] = Newest(4096)  # {(handles, stream, addresses): packed launches}
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: the thread has not used CUDA before
_CLUSTER, _CLUSTER_POLICY, _EARLY = 4, 5, 6  # CUlaunchAttributeID
_TMA_TYPES = {torch.uint8: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType
_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.([busf])(\d+)[^,\[\n]*(?:\[(\d+)\])?")


@functools.cache
def _driver() -> Any:
    driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p
    driver.cuTensorMapEncodeTiled.argtypes = [address, ctypes.c_int, ctypes.c_uint, *[address] * 5, *[ctypes.c_int] * 4]
    driver.cuTensorMapReplaceAddress.argtypes = [address, address]
    return driver


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"The CUDA driver refuses a launch: error {result} of CUresult.")


def layout(*tensors: torch.Tensor) -> tuple:
    """Return shapes, strides, types and devices: a launch depends on them and on the addresses."""
    return tuple([(x.shape, x.stride(), x.dtype, x.device) for x in tensors])


def form(*tensors: torch.Tensor) -> list[tuple]:
    """Return the forms (shape, strides, dtype) from which `empty` makes such tensors."""
    return [(tuple(x.shape), x.stride(), x.dtype) for x in tensors]


def empty(forms: Sequence[tuple], index: int) -> list[torch.Tensor]:
    """Make tensors on a GPU without torch's dispatcher, in a third of its time, as inductor's code does."""
    if torch._C._cuda_getDevice() != index:
        with torch.cuda.device(index):
            return empty(forms, index)
    return [_empty_strided(*x) for x in forms]


def parameters(ptx: str) -> list[tuple[str, int]]:
    """Return the kind and the bytes of each parameter of a kernel."""
    head = ptx[ptx.index(".entry") : ptx.index(")", ptx.index(".entry"))]
    return [(kind, int(bits) // 8 * int(number or 1)) for kind, bits, number in _PARAMETER.findall(head)]


def _describe(place: int, described: Any, metadata: dict) -> None:
    """Write the TMA descriptor of a tensor into memory, from Triton's descriptor and the metadata of the compiled kernel."""
    rank, size = len(described.shape), described.base.element_size()
    numbers = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    dims, steps = numbers[0](*described.shape[::-1]), numbers[1](*[1] * rank)
    strides, box = numbers[0](*[size * n for n in described.strides[-2::-1]]), numbers[1](*metadata["block_size"][::-1])
    before = place, _TMA_TYPES[described.base.dtype], rank, described.base.data_ptr()
    # The zeros and the 2: no interleaving, 128 bytes into the L2, zeros behind the end of the tensor.
    _check(_driver().cuTensorMapEncodeTiled(*before, dims, strides, box, steps, 0, metadata["swizzle"], 2, 0))


def _memory(size: int) -> tuple[Any, int]:
    """Return memory, and the address in it that is a multiple of 128 bytes, for descriptors."""
    memory = ctypes.create_string_buffer(size + 128)
    return memory, -(-ctypes.addressof(memory) // 128) * 128


class Handle:
    """A compiled kernel with its grid and its arguments. The tensors come first, and each launch has its own."""

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        leading: Sequence[Any],
        rest: Sequence[Any],
        index: int,
        cluster: int = 1,
        places: Sequence[tuple[int, int]] = (),
    ):
        """Keep a launch.

        Args:
            compiled: the kernel, as `kernel[grid](...)` returns it.
            grid: the blocks of the launch in up to three directions.
            leading: the first arguments of the launch: TMA descriptors, and tensors for pointers.
            rest: the other arguments in the kernel's order, constants too. The handle keeps their tensors alive.
            index: the CUDA device.
            cluster: blocks of a cluster; above 1, the grid counts clusters in its first direction.
            places: where each leading tensor begins: (number of a launch's address, bytes behind that address);
                by default tensor i begins at address i.
        """
        places = places or [(i, 0) for i in range(len(leading))]
        self.index, self.references = index, [compiled, *(x for x in rest if isinstance(x, torch.Tensor))]
        metadata, declared = compiled.metadata, parameters(compiled.asm["ptx"])
        (x, y, z), boxes = (*grid, 1, 1)[:3], iter(getattr(metadata, "tensordesc_meta", None) or ())
        values: list = []  # for each parameter a number, or the place of a tensor
        for i, (kind, value) in enumerate(zip(compiled.src.signature.values(), (*leading, *rest), strict=True)):
            if kind.startswith("tensordesc"):
                values += [(places[i], value, next(boxes)), *value.shape, *value.strides]
            elif kind != "constexpr":
                values.append((places[i], None, None) if i < len(leading) else value)
        scratch = metadata.global_scratch_size, metadata.profile_scratch_size
        if len(values) + len(scratch) != len(declared) or any(scratch):
            raise RuntimeError(
                f"{metadata.name} declares {len(declared)} parameters and {max(scratch)} bytes of memory for itself; "
                f"{len(values) + len(scratch)} and none were expected of this version of Triton."
            )
        self.begins: list[int] = []
        self.size = 0
        for _, size in declared:  # a descriptor must begin at a multiple of 64 bytes
            self.begins.append(-(-self.size // 64) * 64 if size > 8 else self.size)
            self.size = self.begins[-1] + max(size, 8)
        self.memory, self.start = _memory(self.size)  # the parameters without the addresses
        # For each tensor: place of its parameter, number of its address, bytes behind it, whether it is a descriptor.
        self.tensors: list[tuple[int, int, int, bool]] = []
        for begin, (kind, size), value in zip(self.begins, declared, values, strict=False):
            if isinstance(value, tuple):
                place, described, box = value
                self.tensors.append((begin, *place, described is not None))
                if described is not None:
                    _describe(self.start + begin, described, box)
            else:
                value = value.data_ptr() if isinstance(value, torch.Tensor) else value
                bits = struct.pack("f", value) if kind == "f" else int(value).to_bytes(size, "little", signed=True)
                ctypes.memmove(self.start + begin, bits, size)
        _ = compiled.run  # Triton loads the kernel
        self.function = ctypes.c_void_p(compiled.function)
        attributes = [(_EARLY, 1, 0, 0)] if metadata.launch_pdl else []
        if cluster > 1:
            attributes += [(_CLUSTER, cluster, 1, 1), (_CLUSTER_POLICY, 1, 0, 0)]  # policy 1: spread over the SMs
        if cluster == 16:  # a cluster above 8 blocks must be allowed: not every GPU can have one
            _check(_driver().cuFuncSetAttribute(self.function, 14, 1))
        # an array of CUlaunchAttribute
        self.attribute_memory = ctypes.create_string_buffer(b"".join(struct.pack("I4x3I52x", *x) for x in attributes))
        self.attributes = ctypes.addressof(self.attribute_memory), len(attributes)
        self.blocks = x * cluster, y, z, 32 * metadata.num_warps, 1, 1, metadata.shared

    def bind(self, stream: int, addresses: Sequence[int]) -> tuple:
        """Return the driver's arguments for a launch on tensors at these addresses, and the memory that must stay alive."""
        (memory, start), replace = _memory(self.size + 8 * len(self.begins) + 64), _driver().cuTensorMapReplaceAddress
        ctypes.memmove(start, self.start, self.size)
        for begin, i, behind, described in self.tensors:
            if described:
                _check(replace(start + begin, addresses[i] + behind))
            else:
                ctypes.c_uint64.from_address(start + begin).value = addresses[i] + behind
        # The pointers to all parameters, and then CUlaunchConfig.
        pointers = start + self.size
        config = pointers + 8 * len(self.begins)
        places = [start + begin for begin in self.begins]
        bits = struct.pack(f"{len(places)}q7I4xqqI4x", *places, *self.blocks, stream, *self.attributes)
        ctypes.memmove(pointers, bits, len(bits))
        return (ctypes.c_void_p(config), self.function, ctypes.c_void_p(pointers), None), memory

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch on tensors with the shapes, strides and alignment of the leading tensors."""
        start((self,), tuple([x.data_ptr() for x in tensors]))


def start(handles: tuple[Handle, ...], addresses: tuple[int, ...]) -> None:
    """Launch kernels of one device, one after another, on tensors that begin at these addresses."""
    index = handles[0].index
    # A launch takes place on the current device, which almost always is the device of the tensors.
    if torch._C._cuda_getDevice() != index:
        with torch.cuda.device(index):
            return start(handles, addresses)
    key = handles, torch._C._cuda_getCurrentRawStream(index), addresses
    if (bound := _BOUND.get(key)) is None:
        bound = _BOUND[key] = [handle.bind(*key[1:]) for handle in handles]
    launch = _driver().cuLaunchKernelEx
    for arguments, _ in bound:
        if (result := launch(*arguments)) == _NO_CONTEXT:
            torch.cuda.mem_get_info(index)  # gives this thread the device's context
            result = launch(*arguments)
        _check(result)


def needs_operator(*tensors: torch.Tensor) -> bool:
    """Whether torch must see a call as an operator, because somebody besides autograd and the GPU would miss a bare launch.

    That is so under torch.compile, a function transform (vmap, grad) or a dispatch mode (FlopCounterMode, fake tensors),
    and for a subclass of Tensor other than Parameter.
    """
    if is_compiling() or _len_torch_dispatch_stack() or peek_interpreter_stack() is not None:
        return True
    return not _PLAIN.issuperset(map(type, tensors))


def needs_autograd(*tensors: torch.Tensor) -> bool:
    """Whether autograd must see a call."""
    return torch.is_grad_enabled() and any(map(_requires_grad, tensors))
