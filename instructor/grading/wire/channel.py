"""A channel between two processes: frames of JSON with raw bytes after it, whose sizes are checked before they are read.

A frame is two lengths (8 bytes each, little-endian), a JSON header, and blobs such as the bytes of tensors.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable

MAX_HEADER = 32 << 20  # bytes of JSON in one frame
MAX_BLOBS = 1 << 30  # bytes of tensors in one frame


class WireError(Exception):
    """A frame or value that is not well formed: nothing of it is used."""


class TooLate(Exception):
    """Nothing came before the deadline."""


class Closed(Exception):
    """The process on the other side has closed the channel or ended."""


class Channel:
    """One end of a socket pair that carries frames."""

    def __init__(self, sock: socket.socket):
        self.sock = sock

    def send(self, message: dict, blobs: list | None = None, deadline: float | None = None) -> None:
        """Send a frame; `deadline` is a time of `time.monotonic`, for the whole frame."""
        blobs = blobs or []
        header = json.dumps({**message, "blobs": [len(b) for b in blobs]}).encode()
        total = sum(len(b) for b in blobs)
        if len(header) > MAX_HEADER or total > MAX_BLOBS:
            raise WireError(f"a message of {len(header) + total:,} bytes is too large")
        for part in (struct.pack("<QQ", len(header), total) + header, *blobs):
            view = memoryview(part)
            while len(view):
                view = view[self._try(self.sock.send, view[: 1 << 18], deadline) :]

    def _try(self, operation: Callable, argument, deadline: float | None):
        """What an operation on the socket returns before the deadline."""
        while True:
            rest = None if deadline is None else deadline - time.monotonic()
            if rest is not None and rest <= 0:
                raise TooLate
            self.sock.settimeout(rest)
            try:
                return operation(argument)
            except TimeoutError:
                raise TooLate from None
            except BlockingIOError:  # a student's code found the descriptor, and changed it
                continue
            except OSError as error:
                raise Closed(str(error)) from None

    def receive(self, deadline: float | None = None) -> tuple[dict, list[bytearray]]:
        """Read the next frame; `deadline` is a time of `time.monotonic`, for the whole frame."""
        lengths = struct.unpack("<QQ", self._read(16, deadline))
        if lengths[0] > MAX_HEADER or lengths[1] > MAX_BLOBS:
            raise WireError(f"a message says that it is {sum(lengths):,} bytes long")
        header = self._read(lengths[0], deadline)
        try:
            message = json.loads(header)
            sizes = message.pop("blobs")
            plain = isinstance(sizes, list) and all(type(n) is int and n >= 0 for n in sizes)
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
            raise WireError("a message is no JSON object with its sizes") from None
        if not plain or sum(sizes) != lengths[1]:
            raise WireError("the sizes in a message contradict each other")
        if b"\\ud" in header.lower():
            message = without_surrogates(message)
        return message, [self._read(size, deadline) for size in sizes]

    def _read(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray()
        while len(data) < size:  # grows with what arrives, not with what was announced
            piece = self._try(self.sock.recv, min(size - len(data), 1 << 20), deadline)
            if not piece:
                raise Closed("the other side closed the channel")
            data += piece
        return data

    def close(self) -> None:
        """Close this end; the other side finds the channel closed."""
        self.sock.close()


def without_surrogates(value):
    """Replace halves of characters: JSON allows them, and nothing that stores text does."""
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace").decode("utf-8")
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {without_surrogates(k): without_surrogates(v) for k, v in value.items()}
    return value
