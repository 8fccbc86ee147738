"""The arguments of a launch of any step: tensors, options, plan, and TMA descriptors of the tensors. Its import needs no Triton."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from utils.attention.gluon.plan import BLOCK_M, Plan


@dataclass(slots=True)
class Arguments:
    """The tensors and options of one launch: q, out (B, H, Sq, D), k, v (B, Hkv, Sk, D), not empty, and the plan of the step.

    lse: (B, H, Sq) in fp32; only a launch with return_lse writes it. window: 0 means no window. c: scale * log2(e).
    programs: the number of blocks that the GPU runs at the same time, one on each multiprocessor.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    causal: bool
    window: int
    return_lse: bool
    c: float
    plan: Plan
    programs: int
    lengths: tuple[int, ...] = ()  # of the packed sequences; empty without packing

    heads: int = field(init=False)  # query heads of one sequence
    heads_total: int = field(init=False)  # query heads of all sequences
    group: int = field(init=False)  # query heads that share a head of keys and values
    sq: int = field(init=False)
    sk: int = field(init=False)
    head_dim: int = field(init=False)
    tiles_m: int = field(init=False)  # tiles of query rows of one head

    def __post_init__(self):
        batch, self.heads, self.sq, self.head_dim = self.q.shape
        _, kv_heads, self.sk, _ = self.k.shape
        self.heads_total = batch * self.heads
        self.group = self.heads // kv_heads
        self.tiles_m = -(-self.sq // self.plan.rows)

    def grid(self) -> tuple[int, int]:
        """Return the grid of steps 1 to 4: a block for each tile of query rows of each head."""
        if self.window or self.lengths:
            raise ValueError("Steps 1 to 4 have no sliding window and no packed sequences; step 5 has both.")
        if self.heads_total > 65535:
            raise ValueError(
                f"Steps 1 to 4 launch a row of blocks for each head, at most 65535, not {self.q.shape[0]} x "
                f"{self.heads}. Step 5 takes any number."
            )
        return self.tiles_m, self.heads_total

    def constants(self) -> dict:
        """Return the constants for which steps 1 to 4 are compiled."""
        tile = {"BLOCK_M": BLOCK_M, "BLOCK_N": self.plan.block_n, "BLOCK_D": self.plan.block_d}
        return tile | {"CAUSAL": self.causal, "LSE": self.return_lse, "num_warps": 4}

    def sizes(self) -> tuple:
        """Return the arguments sq, sk, heads, group, c of steps 1 to 4."""
        return self.sq, self.sk, self.heads, self.group, self.c

    def descriptors(self) -> list:
        """Return TMA descriptors of q, k, v and out. A box has the 64 rows of a consumer, or the keys of a block."""
        rows = BLOCK_M, self.plan.block_n, self.plan.block_n, BLOCK_M
        tensors = self.q, self.k, self.v, self.out
        return [descriptor(x, n, self.plan.block_d) for x, n in zip(tensors, rows, strict=True)]


def descriptor(x: torch.Tensor, rows: int, columns: int):
    """Return the TMA descriptor of a tensor (B, H, S, D), or of a matrix in fp32, with boxes of `rows` rows and `columns` columns."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # Dimensions of size one may have any stride; TMA wants multiples of 16 bytes.
    strides = [stride if size > 1 else 8 for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)] + [1]
    layout = gl.NVMMASharedLayout(128 if x.ndim == 4 else 0, 8 * x.element_size(), rank=x.ndim)
    return TensorDescriptor(x, list(x.shape), strides, [1] * (x.ndim - 2) + [rows, columns], layout)


@functools.lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Return the number of SMs of a GPU. On a CPU, where kernels are simulated, it is 132, as on an H100 or H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@functools.lru_cache(maxsize=16)
def placeholder(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a small tensor for an argument that the kernel does not use."""
    return torch.zeros(4, dtype=dtype, device=device)


def strides_fit(x: torch.Tensor) -> bool:
    """Whether TMA can use these strides: the head dimension is contiguous, the other strides are multiples of 16 bytes."""
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return x.stride(-1) == 1 and all(stride * x.element_size() % 16 == 0 and stride > 0 for stride in strides)


def make_addressable(x: torch.Tensor) -> torch.Tensor:
    """Return x if TMA can address it, else a copy. TMA needs `strides_fit`, and a start at a multiple of 16 bytes."""
    x = x if strides_fit(x) else x.contiguous()
    if not strides_fit(x):
        least = 16 // x.element_size()  # TMA's rows are multiples of 16 bytes
        raise ValueError(f"The head dimension must be a multiple of {least} in {x.dtype}; {x.shape[-1]} was given.")
    return x.clone() if x.data_ptr() % 16 else x
