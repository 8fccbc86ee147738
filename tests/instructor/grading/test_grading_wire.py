"""What travels between checker and student: everything honest arrives, nothing else does."""

import collections
import enum
import fractions
import json
import socket
import struct
import threading
import time
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instructor.grading.submission.exceptions import describe_error, error_with_lines
from instructor.grading.wire.channel import Channel, Closed, TooLate, WireError
from instructor.grading.wire.pickles import CheckEncoder, StudentDecoder
from instructor.grading.wire.values import Decoder, Encoder
from utils.checking.authors import lines_of_error


def travelled(value, encoder=Encoder, decoder=Decoder):
    encode = encoder()
    node = json.loads(json.dumps(encode(value)))
    return decoder([bytearray(b) for b in encode.blobs])(node)


WAYS = ((CheckEncoder, StudentDecoder), (Encoder, Decoder))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@settings(max_examples=40, deadline=None)
@given(plain)
def test_plain_values_arrive_as_they_are(value):
    arrived = travelled(value)
    assert arrived == value and type(arrived) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (2, 0, 4), (2, 3, 4)])
def test_tensors_arrive_bit_for_bit(dtype, shape):
    tensor = (torch.randn(shape, dtype=torch.float64) * 3).to(dtype)
    arrived = travelled(tensor)
    assert type(arrived) is torch.Tensor and arrived.dtype == dtype and arrived.shape == tensor.shape
    if tensor.numel():
        assert torch.equal(arrived.view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("view", [lambda t: t.T, lambda t: t[::2, 1:], lambda t: t.expand(2, 4, 6), lambda t: -t])
def test_views_keep_their_strides(view):
    tensor = view(torch.randn(4, 6))
    for way in WAYS:
        arrived = travelled(tensor, *way)
        assert torch.equal(arrived, tensor)
        assert arrived.stride() == tensor.stride() if 0 not in tensor.stride() else arrived.is_contiguous()


@pytest.mark.parametrize(
    "view", [lambda t: t[:1, 2], lambda t: t[1:2, ::7], lambda t: torch.complex(t, t)[2:3, 1].real]
)
def test_one_element_arrives_whatever_its_strides_are(view):
    tensor = view(torch.randn(4, 6))
    assert tensor.numel() == 1 and tensor.is_contiguous() and 1 not in tensor.stride()
    for way in WAYS:
        assert torch.equal(travelled(tensor, *way), tensor)


def test_special_values_arrive():
    values = [float("nan"), float("inf"), -0.0, 1 << 4000, np.float32(1.5), np.arange(3), fractions.Fraction(1, 3)]
    values += [torch.bfloat16, torch.Size([1, 2]), {1, 2}, collections.OrderedDict(a=1)]
    for value in values:
        arrived = travelled(value)
        assert repr(arrived) == repr(value) or arrived == value, value
    assert travelled(torch.empty(3, device="meta")).device.type == "meta"


class Lying(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return True


def test_a_lying_tensor_arrives_as_its_numbers():
    arrived = travelled(torch.ones(3).as_subclass(Lying))
    assert type(arrived) is torch.Tensor and torch.equal(arrived, torch.ones(3))


class _Dict(dict):
    __getattr__ = dict.get
    __iter__ = keys = items = None  # what the class says of itself is not asked


class _Number(float):
    __float__ = __mul__ = None


class _Text(str):
    __str__ = encode = None


VALUES = {
    "dict": (_Dict(a=1), {"a": 1}),
    "ordered": (type("Own", (collections.OrderedDict,), {})(b=2), {"b": 2}),
    "float": (_Number(1.5), 1.5),
    "int": (type("Own", (int,), {"__int__": None, "__index__": None})(7), 7),
    "enumeration": (enum.IntEnum("Size", {"TILE": 64}).TILE, 64),
    "text": (_Text("x"), "x"),
    "list": (type("Own", (list,), {"__iter__": None, "__len__": lambda self: 9})([1, 2]), [1, 2]),
    "tuple": (type("Own", (tuple,), {"__iter__": None})((1, 2)), (1, 2)),
    "set": (type("Own", (set,), {"__iter__": None})({3}), {3}),
    "frozenset": (type("Own", (frozenset,), {})({3}), {3}),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_a_subclass_arrives_as_the_plain_value_in_it(name):
    given, expected = VALUES[name]
    made = travelled(given)
    assert made == expected and type(made) in (dict, float, int, str, list, tuple, set)


def test_what_cannot_travel_is_refused():
    deep = []
    for _ in range(100):
        deep = [deep]
    for value in (
        object(),
        lambda: 1,
        (i for i in ()),
        types.SimpleNamespace(a=1),
        deep,
        1 << 10**6,
        torch.ones(2).to_sparse(),
        np.array([object()]),
        torch.nn.Linear(2, 2),
    ):
        with pytest.raises(WireError):
            travelled(value)


BYTES = [bytearray(8)]


@pytest.mark.parametrize(
    "node",
    [
        *({}, [], [3], ["nothing"], ["__class__"], ["_data", 0], ["items", "list", {}], ["items", "list", None]),
        *(["items", [], []], ["items", "dict", []], ["items", "__class__", []]),
        ["dict", [[["items", "list", []], None]]],
        ["dtype", "object"],
        ["items", "size", ["x"]],
        ["object", {"id": 1}],
        *(["own", 1], ["known", 1], ["ref", "os", "system"], ["pickle", 0], ["namespace", []]),
        ["numpy", "|O8", [1], False, 0],
        ["numpy", "<f8", [2], False, 0],
        *(["numpy", "<f8", [1], False, i] for i in (-1, 7, True)),
        *(["function", 0, ["dict", []]], ["module", "os"]),
        ["fraction", 1, 0],
        ["view", 1, [1], [1], 0],
        *(
            [
                "tensor",
                {"dtype": "float32", "shape": [2], "stride": s, "device": "cpu", "grad": False, "key": None, "data": 0},
            ]
            for s in ([0], [-1], [1 << 40], [1, 1], ["1"], 1)
        ),
        *(
            ["tensor", {"dtype": d, "shape": s, "stride": None, "device": v, "grad": False, "key": None, "data": 0}]
            for d, s, v in [
                ("float32", [3], "cpu"),
                ("float32", [-2], "cpu"),
                ("float32", [1 << 62], "cpu"),
                ("float32", [True, 2], "cpu"),
                ("float32", "2", "cpu"),
                ("object", [2], "cpu"),
                ("float32", [1 << 40] * 40, "meta"),
                ("float32", [2.0], "cpu"),
            ]
        ),
    ],
)
def test_forged_values_are_refused(node):
    with pytest.raises(WireError):
        Decoder(BYTES)(node)


def pair():
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<QQ", 1 << 60, 0),
        struct.pack("<QQ", 2, 1 << 60) + b"{}",
        struct.pack("<QQ", 3, 0) + b"{]}",
        struct.pack("<QQ", 2, 0) + b"[]",
        struct.pack("<QQ", 2, 0) + b"{}",
        struct.pack("<QQ", 12, 0) + b'{"blobs":-1}',
        struct.pack("<QQ", 13, 0) + b'{"blobs":[5]}',
        struct.pack("<QQ", 100_000, 0) + b"[" * 100_000,
    ],
)
def test_forged_frames_are_refused(frame):
    channel, theirs = pair()
    threading.Thread(target=theirs.sendall, args=(frame,), daemon=True).start()
    with pytest.raises(WireError):
        channel.receive(time.monotonic() + 10)


def test_a_frame_that_drips_ends_at_the_deadline():
    channel, theirs = pair()
    theirs.sendall(struct.pack("<QQ", 1000, 0) + b"{")
    began = time.monotonic()
    with pytest.raises(TooLate):
        channel.receive(began + 0.2)
    assert time.monotonic() - began < 5
    theirs.close()
    with pytest.raises(Closed):
        pair_closed, other = pair()
        other.close()
        pair_closed.receive()


def test_an_error_arrives_with_the_students_lines():
    names = {}
    source = "def outer(x):\n    return inner(x)\n\ndef inner(x):\n    raise ValueError(f'no {x}')\n"
    exec(compile(source, "<a cell>", "exec"), names)
    try:
        names["outer"](3)
    except ValueError as error:
        said = json.loads(json.dumps(describe_error(error)))
    rebuilt = error_with_lines(said)
    assert type(rebuilt) is ValueError and str(rebuilt) == "no 3"
    lines = [(line.function, line.number) for line in lines_of_error(rebuilt)]
    assert lines[-2:] == [("outer", 2), ("inner", 5)]


def test_an_error_that_derives_from_nothing_known_is_no_way_out():
    said = {"kinds": ["builtins:KeyboardInterrupt", "builtins:BaseException", "os:system"], "words": "x", "lines": []}
    assert isinstance(error_with_lines(said), Exception)


def test_bytes_are_taken_once():
    encode = Encoder()
    node = encode(torch.ones(4))
    with pytest.raises(WireError, match="two values name the same bytes"):
        Decoder(encode.blobs)(["items", "list", [node, node]])


def test_the_corner_of_a_padded_result_travels_without_the_rest():
    whole = torch.randn(256, 256)
    node, blobs = (encode := Encoder())(whole[:3, :5]), encode.blobs
    assert sum(map(len, blobs)) == 3 * 5 * 4
    assert torch.equal(Decoder([bytearray(b) for b in blobs])(node), whole[:3, :5])
