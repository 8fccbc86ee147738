"""A launch of each correct kernel on random shapes, on any device, to compare the simulator with a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from triton.experimental.gluon import language as gl

from tests.utils.gluon_cpu import gluon_correct_kernels as kernels
from tests.utils.gluon_cpu import gluon_planted_bugs as bugs
from tests.utils.gluon_cpu.gluon_helpers import descriptor


@dataclass
class Tile:
    """A matrix that the kernel sees through a TMA descriptor of this block."""

    matrix: torch.Tensor
    block: list[int]


@dataclass
class Launch:
    """A kernel, its grid and its arguments; `outputs` are the positions of the arguments to compare."""

    kernel: object
    grid: tuple[int, ...]
    args: list
    outputs: list[int]
    options: dict = field(default_factory=dict)
    rounding: torch.dtype | None = None  # the least precise type of the computation, if it is not the output's

    def run(self, device: str) -> list[torch.Tensor]:
        """Launch on copies of the tensors on `device`, and return the outputs on the CPU."""

        def copy(x: torch.Tensor) -> torch.Tensor:  # with the same strides
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)

        tensors = [
            copy(a.matrix if isinstance(a, Tile) else a) if isinstance(a, (Tile, torch.Tensor)) else None
            for a in self.args
        ]
        args = [
            descriptor(t, a.block) if isinstance(a, Tile) else a if t is None else t
            for a, t in zip(self.args, tensors, strict=True)
        ]
        self.kernel[self.grid](*args, **self.options)
        return [tensors[i].cpu() for i in self.outputs]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _copy(rng):
    n = rng.randint(1, 700)
    return Launch(kernels.copy_1d, (cdiv(n, 256),), [torch.randn(n), torch.zeros(n), n, 256], [1])


def _scale_add(rng):
    m, n, dtype = rng.randint(1, 90), rng.randint(1, 90), rng.choice((torch.float32, torch.float16, torch.bfloat16))
    a, b, c = torch.randn(m, n).to(dtype), torch.randn(n, m).to(dtype).T, torch.zeros(m, n, dtype=dtype)
    return Launch(
        kernels.scale_add_2d, (cdiv(m, 16), cdiv(n, 32)), [a, b, c, m, n, *a.stride(), *b.stride(), 0.3, 16, 32], [2]
    )


def _softmax(rng):
    m, n, dtype = rng.randint(1, 40), rng.randint(1, 128), rng.choice((torch.float32, torch.bfloat16))
    x = (5 * torch.randn(m, n)).to(dtype)
    return Launch(
        kernels.softmax_rows,
        (cdiv(m, 8),),
        [x, torch.zeros_like(x), m, n, n, 8, 128],
        [1],
        {"num_warps": rng.choice((1, 4, 8))},
    )


def _transpose(rng):
    m, n = rng.randint(1, 90), rng.randint(1, 90)
    return Launch(
        kernels.transpose, (cdiv(m, 32), cdiv(n, 32)), [torch.randn(m, n), torch.zeros(n, m), m, n, 32, 32], [1]
    )


def _reductions(rng):
    return Launch(kernels.reductions, (1,), [torch.randn(512), torch.zeros(5), 512], [1])


def _integers(rng):
    a, b = rng.randint(-(2**31), 2**31 - 1), rng.choice((-1, 1)) * rng.randint(1, 1000)
    return Launch(kernels.integers, (1,), [torch.zeros(6, dtype=torch.int32), a, b, 20], [0])


def _cp_async(rng):
    n = rng.randint(1, 4000)
    return Launch(
        kernels.add_double_buffered,
        (cdiv(n, 1024),),
        [torch.randn(n), torch.randn(n), torch.zeros(n), n, 256, 4, rng.randint(1, 3)],
        [2],
    )


def _tma_ring(rng):
    m, n, dtype = rng.randint(1, 60), 8 * rng.randint(1, 20), rng.choice((torch.float32, torch.bfloat16))
    x = torch.randn(m, n).to(dtype)
    return Launch(
        kernels.copy_tiles,
        (cdiv(m, 16),),
        [Tile(x, [16, 64]), Tile(torch.zeros_like(x), [16, 64]), n, 0.5, rng.randint(1, 3)],
        [1],
    )


def _matmul(rng):
    m, n, k, dtype = rng.randint(1, 200), 8 * rng.randint(1, 16), 8 * rng.randint(1, 20), torch.bfloat16
    transposed, registers = rng.random() < 0.5, rng.random() < 0.5
    b = torch.randn(*((n, k) if transposed else (k, n))).to(dtype)
    return Launch(
        kernels.matmul,
        (cdiv(m, 64), cdiv(n, 64)),
        [
            Tile(torch.randn(m, k).to(dtype), [64, 32]),
            Tile(b, [64, 32] if transposed else [32, 64]),
            Tile(torch.zeros(m, n, dtype=dtype), [64, 64]),
            k,
            transposed,
            registers,
        ],
        [2],
        {"num_warps": 4 if registers else rng.choice((4, 8))},
    )


def _matmul_persistent(rng):
    m, n, k, dtype = rng.randint(65, 200), 8 * rng.randint(9, 24), 8 * rng.randint(1, 24), torch.float16
    a, b, c = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.zeros(m, n, dtype=dtype)
    return Launch(
        kernels.matmul_persistent,
        (rng.randint(1, 3),),
        [Tile(a, [64, 64]), Tile(b, [64, 64]), Tile(c, [64, 64]), m, n, k],
        [2],
    )


def _add_specialized(rng):
    m, n = rng.randint(1, 60), 4 * rng.randint(1, 80)
    return Launch(
        kernels.add_specialized,
        (cdiv(m, 16),),
        [
            *(Tile(torch.randn(m, n), [16, 32]) for _ in "ab"),
            Tile(torch.zeros(m, n), [16, 32]),
            n,
            2.0,
            rng.randint(1, 3),
        ],
        [2],
    )


def _halve_specialized(rng):
    n = rng.randint(1, 2000)
    return Launch(kernels.halve_cp_async_specialized, (1,), [torch.randn(n), torch.zeros(n), n, 128, 3], [1])


def _pipeline(rng):
    tiles = rng.randint(1, 9)
    x, w, y = torch.randn(16, 32 * tiles), torch.randn(16, 32), torch.zeros(16, 32 * tiles)
    return Launch(bugs.pipeline, (1,), [*(Tile(t, [16, 32]) for t in (x, w, y)), tiles, 2, ""], [2])


def _product(rng):
    a, b = (torch.randn(64, 64).half() / 8 for _ in "ab")
    layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    return Launch(
        bugs.product,
        (1,),
        [a, Tile(b, [64, 64]), torch.zeros(64, 64), 64, "", layout, 128],
        [2],
        rounding=torch.float16,
    )


LAUNCHES: dict[str, Callable[[random.Random], Launch]] = {
    name.removeprefix("_"): function
    for name, function in list(globals().items())
    if name.startswith("_") and callable(function) and getattr(function, "__module__", "") == __name__
}
