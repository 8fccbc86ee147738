"""Simulate what the programs of a cluster send each other (`decode/inbox.py`): the simulator runs one program after another.

The grid runs twice. In the first run every program sends, and finds nothing in its inbox; in the second one it finds what the others
sent in the first, and must have got the bytes that its barrier expects, each place once. Both runs must send the same.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import numpy as np
from triton.experimental.gluon import language as gl

from utils import gluon_cpu
from utils.gluon_cpu import context, interpreter, known, ptx
from utils.gluon_cpu.tensors import Tensor, to_tensor

BARRIER = 4096  # its address in each program; the inbox begins 16 bytes after it


class Inbox:
    """Shared memory of one program: numbers by their addresses, and the number of bytes that its barrier expects."""

    def __init__(self) -> None:
        self.numbers: dict[int, np.float32] = {}
        self.sent: set[int] = set()  # addresses, in this run of the grid
        self.expected = 0


class Exchange:
    """The inboxes of all programs, and the inline assembly that fills and reads them."""

    def __init__(self, parts: int) -> None:
        self.parts, self.second = parts, False
        self.inboxes: dict[tuple, Inbox] = {}
        self.others = known.TABLE[gl.inline_asm_elementwise]

    def inbox(self, rank: int | None = None) -> Inbox:
        """Return the inbox of a program in the cluster of the running program, by default the running program's own."""
        x, *rest = context.program().ids
        number = x // self.parts * self.parts + (x % self.parts if rank is None else rank)
        return self.inboxes.setdefault((number, *rest), Inbox())

    def run_again(self) -> None:
        """Begin the second run of the grid."""
        for inbox in self.inboxes.values():
            assert 4 * len(inbox.numbers) == inbox.expected > 0
            inbox.sent.clear()
        self.second = True

    def __call__(self, asm, constraints, args, dtype, is_pure, pack):
        """Run assembly of `inbox.py`; the simulator itself runs the rest."""
        text, args = " ".join(str(asm).split()), [to_tensor(x) for x in args]
        if "st.async" in text:
            return self._send(text, args, int(pack))
        if "ld.shared" in text:
            return self._load(text, args[0], int(pack))
        if "mbarrier.init" in text:
            assert "expect_tx.shared::cta.b64 _, [$0], $1;" in text
            self.inbox().expected = int(args[0].data)
            return Tensor(BARRIER, gl.int32)
        if "barrier.cluster.wait.acquire" in text and "mov.u32 $0, 0" not in text:  # `join`
            return Tensor(BARRIER + 16, gl.int32)
        if "barrier.cluster" in text or "mbarrier.try_wait" in text:  # in the second run there is nothing to wait for
            return Tensor(0, gl.int32)
        return self.others(asm, constraints, args, dtype, is_pure, pack)

    def _send(self, text: str, args: list[Tensor], pack: int) -> Tensor:
        at, owner, barrier, *numbers = (np.broadcast_to(x.data, args[0].data.shape) for x in args)
        assert (barrier == BARRIER).all()
        if pack == 2:  # two neighbours are sent together, to the first one's address
            assert (at[..., 1::2] == at[..., ::2] + 4).all() and (owner[..., 1::2] == owner[..., ::2]).all()
            at, owner, numbers = at[..., ::2], owner[..., ::2], [numbers[0][..., ::2], numbers[0][..., 1::2]]
        assert (".v2.f32" in text) == (len(numbers) == 2) and not (at % (4 * len(numbers))).any()
        for place, rank, *pair in zip(*(x.ravel() for x in (at, owner, *numbers)), strict=True):
            if rank < self.parts:
                inbox = self.inbox(int(rank))
                for address, number in enumerate(pair):
                    address = int(place) + 4 * address
                    assert address not in inbox.sent, "sent twice"
                    inbox.sent.add(address)
                    before = inbox.numbers.setdefault(address, number)
                    assert before == number or (np.isnan(before) and np.isnan(number))
        return Tensor(np.zeros(args[0].data.shape, np.int32), gl.int32, args[0].layout)

    def _load(self, text: str, address: Tensor, pack: int):
        width = int(found[1]) if (found := re.search(r"ld\.shared\.v(\d)", text)) else 1
        places = address.data
        assert not (places.reshape(-1, pack)[:, 0] % (4 * width)).any()

        def read(offset: int) -> Tensor:
            numbers = self.inbox().numbers
            # Nobody sends numbers of rows that do not exist. They are nan: a use of them would show in the output.
            get = (lambda x: numbers.get(int(x), np.float32("nan"))) if self.second else (lambda x: np.float32(0))
            values = np.array([get(x + offset) for x in places.ravel()], np.float32).reshape(places.shape)
            return Tensor(values, gl.float32, address.layout)

        if width > pack:  # a pair for each address
            return tuple(read(4 * i) for i in range(width))
        grouped = places.reshape(-1, width)
        assert (
            grouped == grouped[:, :1] + 4 * np.arange(width)
        ).all()  # one load at the first address reads the neighbours, too
        return read(0)


@contextlib.contextmanager
def clusters_simulated(parts: int, seed: int | None = None) -> Iterator[Exchange]:
    """Run kernels of clusters in the simulator; between the two runs of a grid call `run_again`."""
    exchange = Exchange(parts)
    functions = [f for f, meaning in known.TABLE.items() if meaning is ptx.inline_asm_elementwise]
    try:
        interpreter._resolved.clear()  # it keeps the former meanings of these functions
        known.TABLE.update(dict.fromkeys(functions, exchange))
        with gluon_cpu.simulate(seed=seed):
            yield exchange
    finally:
        known.TABLE.update(dict.fromkeys(functions, ptx.inline_asm_elementwise))
        interpreter._resolved.clear()
