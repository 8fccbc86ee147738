"""What a student's process sends to the checker: JSON and raw bytes, never a pickle.

A number, a text or None is itself in JSON; any other value is a list whose first item says what it is. `Decoder` accepts exactly these and rebuilds plain objects
of the exact types. So a subclass with a lying `__eq__` or `__torch_function__` arrives as the numbers in it, or not at
all. The other direction is in `pickles`.
"""

from __future__ import annotations

import fractions
import math
from collections.abc import Callable

import numpy as np
import torch

from instructor.grading.wire.channel import MAX_BLOBS, WireError

_from_buffer = torch.frombuffer  # the original: the checker's watch replaces it while a check runs
Node = list | bool | int | float | str | None
MAX_DEPTH, MAX_NODES = 32, 200_000  # of one value
MAX_BITS = 10_000  # of an integer
CONTAINERS: dict[str, Callable] = {"list": list, "tuple": tuple, "size": torch.Size, "set": set}
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits", "torch.uint1b"))
}


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in row-major order, as bytes."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # A tensor of one element counts as contiguous whatever its strides are; reading it as bytes asks for a stride of 1.
    flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _own_memory(size: list[int], stride: list[int]) -> bool:
    """True if every element has a place of its own in memory (no expanded or overlapping views)."""
    reach = 0
    for step, length in sorted(zip(stride, size, strict=True)):
        if length > 1:
            if step <= reach:
                return False
            reach += step * (length - 1)
    return True


def _keeps_strides(shape: list[int], stride: list[int]) -> bool:
    """True for a tensor that arrives with its strides: not expanded, and not scattered over much more memory."""
    return _own_memory(shape, stride) and _reach(shape, stride) <= 8 * math.prod(shape) + 64


class Encoder:
    """Turns values into nodes and bytes.

    Args:
        handle: encodes an object that cannot travel as a number; None refuses such objects.
        known: gives the number of a tensor that the other side has already; for a new tensor [its number], or None if
            it needs none.
        shared: gives [number, offset] of a tensor that the other side has and in whose memory this tensor lies, or None.
    """

    def __init__(self, handle: Callable | None = None, known: Callable | None = None, shared: Callable | None = None):
        self.handle, self.known, self.shared = handle, known, shared
        self.blobs: list = []
        self.nodes = 0

    def __call__(self, value, depth: int = 0) -> Node:
        """The node of a value; its bytes are added to `blobs`."""
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise WireError("the value is nested too deeply or has too many parts")
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            if value.bit_length() > MAX_BITS:
                raise WireError("the integer has too many digits")
            return value
        if kind in (*CONTAINERS.values(), frozenset):
            name = next((name for name, known in CONTAINERS.items() if known is kind), "set")
            return ["items", name, [self(item, depth + 1) for item in value]]
        if kind is dict:
            return ["dict", [[self(k, depth + 1), self(v, depth + 1)] for k, v in value.items()]]
        if kind is fractions.Fraction:
            return ["fraction", self(value.numerator, depth + 1), self(value.denominator, depth + 1)]
        if kind is torch.dtype:
            return ["dtype", str(value).removeprefix("torch.")]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufc":
            plain = np.ascontiguousarray(value)
            is_scalar = isinstance(value, np.generic)
            return ["numpy", plain.dtype.str, list(value.shape), is_scalar, self._blob(plain.tobytes())]
        if (plain := _plain_value(value)) is not None:
            return self(plain, depth + 1)
        if self.handle is not None:
            return self.handle(value)
        raise WireError(f"a {kind.__name__} cannot travel")

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """The numbers of a student's subclass."""
        return tensor if type(tensor) is torch.Tensor else tensor.detach().as_subclass(torch.Tensor)

    def _blob(self, data) -> int:
        self.blobs.append(data)
        return len(self.blobs) - 1

    def _tensor(self, tensor: torch.Tensor) -> list:
        with torch._C.DisableTorchFunctionSubclass():
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                raise WireError("a tensor of torch.vmap or torch.func cannot travel in a list")
            tensor = self._plain(tensor)
            key = self.known(tensor) if self.known else None
            if isinstance(key, int):
                return ["known", key]
            if self.shared is not None and (place := self.shared(tensor)) is not None:
                return ["view", *place, list(tensor.shape), list(tensor.stride())]
            if tensor.layout is not torch.strided:
                raise WireError(f"a tensor of layout {tensor.layout} cannot travel")
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in DTYPES:
                raise WireError(f"a tensor of {dtype} cannot travel")
            # The corner of a large tensor travels without the rest: its strides would ask for memory that it has no use for.
            stride = list(tensor.stride()) if _keeps_strides(list(tensor.shape), list(tensor.stride())) else None
            meta = tensor.device.type == "meta"
            fields = {"dtype": dtype, "shape": list(tensor.shape), "stride": stride, "device": str(tensor.device)}
            fields |= {"grad": tensor.requires_grad, "key": key[0] if key else None}
            return ["tensor", {**fields, "data": None if meta else self._blob(tensor_bytes(tensor))}]


def _plain_value(value):
    """The number, text or container in an instance of a subclass, such as an IntEnum's member; None for anything else.

    A check asks `isinstance`, and so takes a dict whose class gives its items as attributes.
    """
    # Read past the methods of the subclass, which may look up something else: `dict.copy` and not `value.copy`.
    readers = {
        int: int.__int__,
        float: float.__float__,
        str: str.__str__,
        dict: lambda value: dict(dict.items(value)),
        list: list.copy,
    }
    readers |= {tuple: lambda value: tuple.__add__((), value), set: set.copy, frozenset: frozenset.union}
    return next((read(value) for base, read in readers.items() if base in type(value).__mro__), None)


class Decoder:
    """Rebuilds values from nodes; `WireError` for anything that is not exactly one.

    Each kind of node has a method `_read_KIND`.

    Args:
        blobs: the bytes that came with the nodes.
        handle: makes something of ["object", fields], an object of the other side; None refuses such objects.
        own: gives the object of this side that has a number.
        known: gives the tensor that has a number.
        keep: is called with (number, tensor) for each tensor that the other side gave a number.
    """

    def __init__(
        self,
        blobs: list,
        handle: Callable | None = None,
        own: Callable | None = None,
        known: Callable | None = None,
        keep: Callable | None = None,
    ):
        self.blobs, self.handle, self.own, self.known, self.keep = blobs, handle, own, known, keep
        self.nodes = self.taken = 0
        self.used: set[int] = set()  # bytes that a value was made of: a second value of them would take memory again

    def __call__(self, node, depth: int = 0):
        """The value of a node."""
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise WireError("a value is nested too deeply or has too many parts")
        if node is None or type(node) in (bool, int, float, str):
            return node
        if not isinstance(node, list) or not node or not isinstance(node[0], str):
            raise WireError("a value is no node")
        method = getattr(self, f"_read_{node[0]}", None) if node[0].isidentifier() else None
        if method is None:
            raise WireError(f"a value of the unknown kind {node[0]!r}")
        try:
            return method(depth + 1, *node[1:])
        except WireError:
            raise
        except Exception as error:
            raise WireError(f"a {node[0]} is not well formed ({type(error).__name__}: {error})") from None

    def _data(self, index) -> bytearray:
        if type(index) is not int or not 0 <= index < len(self.blobs):
            raise WireError("a value names bytes that are not there")
        if index in self.used:
            raise WireError("two values name the same bytes")
        self.used.add(index)
        return self.blobs[index]

    def _read_items(self, depth, kind, items):
        return CONTAINERS[kind]([self(item, depth) for item in _exactly(items, list)])

    def _read_dict(self, depth, pairs):
        return {self(k, depth): self(v, depth) for k, v in _exactly(pairs, list)}

    def _read_fraction(self, depth, numerator, denominator):
        return fractions.Fraction(_exactly(self(numerator, depth), int), _exactly(self(denominator, depth), int))

    def _read_dtype(self, depth, name):
        return DTYPES[name]

    def _read_numpy(self, depth, dtype, shape, scalar, index):
        kind = np.dtype(_exactly(dtype, str))
        if kind.kind not in "biufc":
            raise WireError("an array that is not of numbers")
        data = self._data(index)
        _expect_size(shape, kind.itemsize, len(data))
        array = np.frombuffer(data, dtype=kind).reshape(shape).copy()
        return array[()] if _exactly(scalar, bool) and not shape else array

    def _read_tensor(self, depth, fields):
        dtype, shape, device = DTYPES[fields["dtype"]], fields["shape"], fields["device"]
        if device == "meta":
            _expect_size(shape, 1, None)
            return torch.empty(shape, dtype=dtype, device="meta")
        data = self._data(fields["data"])
        _expect_size(shape, dtype.itemsize, len(data))
        flat = _from_buffer(data, dtype=torch.uint8).clone().view(dtype) if data else torch.empty(0, dtype=dtype)
        if dtype is torch.bool and data:
            flat = flat.view(torch.uint8) != 0  # other bytes are no truth values, and comparisons do what they like
        tensor = flat.view(shape)
        stride = fields["stride"]
        if stride is not None and list(tensor.stride()) != stride:
            _expect_strides(shape, stride)
            if not _keeps_strides(shape, stride):
                raise WireError("the strides of a tensor would take much more memory than its elements")
            self.taken += _reach(shape, stride) * dtype.itemsize
            if self.taken > MAX_BLOBS:
                raise WireError("the tensors of a message would take too much memory")
            tensor = torch.empty_strided(shape, stride, dtype=dtype).copy_(tensor)
        if _exactly(device, str) != "cpu":
            tensor = tensor.to(torch.device(device))
        if fields["grad"] is True and (dtype.is_floating_point or dtype.is_complex):
            tensor.requires_grad_()
        if self.keep and type(fields["key"]) is int:
            self.keep(fields["key"], tensor)
        return tensor

    def _read_known(self, depth, key):
        return self.known(_exactly(key, int))

    def _read_view(self, depth, key, offset, shape, stride):
        """A part of a tensor of this side: its own numbers, whatever the other side says."""
        whole = self.known(_exactly(key, int)).detach()
        _expect_size(shape, 1, None)
        _expect_strides(shape, stride)
        _expect_strides([1], [offset])
        if offset + _reach(shape, stride) > _reach(list(whole.shape), list(whole.stride())):
            raise WireError("a view reaches beyond its tensor")
        return whole.as_strided(shape, stride, whole.storage_offset() + offset)

    def _read_own(self, depth, number):
        return self.own(_exactly(number, int))

    def _read_object(self, depth, fields):
        if self.handle is None or not isinstance(fields, dict):
            raise WireError("an object where only data is taken")
        parts = {k: self(v, depth) for k, v in _exactly(fields.get("parts", {}), dict).items()}
        return self.handle({**fields, "parts": parts})


def _exactly(value, kind: type):
    if type(value) is not kind:
        raise WireError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _expect_size(shape, itemsize: int, length: int | None) -> None:
    """Refuse a shape that is none, or that contradicts the number of bytes; nothing is allocated before."""
    if type(shape) is not list or len(shape) > 32 or any(type(n) is not int or not 0 <= n < 1 << 48 for n in shape):
        raise WireError("a shape is no list of sizes")
    total = itemsize
    for n in shape:
        total *= n
    if length is not None and total != length:
        raise WireError(f"a tensor of shape {shape} should have {total} bytes, and has {length}")


def _expect_strides(shape: list, stride) -> None:
    plain = type(stride) is list and all(type(n) is int and 0 <= n < 1 << 48 for n in stride)
    if not plain or len(stride) != len(shape):
        raise WireError("the strides of a tensor are no list of sizes")


def _reach(shape: list[int], stride: list[int]) -> int:
    """Elements from the first one in memory to the last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
