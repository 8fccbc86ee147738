"""What a launch of any step of the backward ladder needs: tensors, options, plan, and descriptors. No Triton yet."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from utils.attention.gluon.arguments import descriptor
from utils.attention.gluon.backward.balance import Order, order_of
from utils.attention.gluon.backward.plan import BackwardCase, BackwardPlan

LOG2_E = math.log2(math.e)


def processors(device: torch.device) -> int:
    """SMs of a GPU; those of an H100 or H200 where a kernel is simulated."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@dataclass(slots=True)
class Gradients:
    """One backward pass to launch: q, out, dout (B, H, Sq, D), k, v (B, Hkv, Sk, D), not empty, and the step's plan.

    lse, dlse: (B, H, Sq) fp32, natural logarithm. window: 0 for none. deterministic: dQ is computed by a kernel of its
    own. The tensors from `dq` on are made here.
    """

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None
    causal: bool
    window: int
    scale: float
    plan: BackwardPlan
    deterministic: bool

    dq: torch.Tensor = field(init=False)
    dk: torch.Tensor = field(init=False)
    dv: torch.Tensor = field(init=False)
    lse2: torch.Tensor = field(init=False)  # (B * H, rows) fp32: lse * log2(e)
    delta: torch.Tensor = field(init=False)  # (B * H, rows) fp32: rowsum(dO * O)
    dq_sums: torch.Tensor = field(init=False)  # B * H * rows * block_d, fp32; not touched in deterministic mode
    counter: torch.Tensor = field(init=False)  # (1,) int32: blocks that were drawn (`queue.py`)
    heads: int = field(init=False)  # query heads of one sequence
    heads_total: int = field(init=False)  # query heads of all sequences
    kv_heads: int = field(init=False)
    kv_heads_total: int = field(init=False)
    group: int = field(init=False)  # query heads that share a head of keys and values
    sq: int = field(init=False)
    sk: int = field(init=False)
    head_dim: int = field(init=False)
    rows: int = field(init=False)  # Sq, rounded up to whole tiles of every kernel here
    blocks_n: int = field(init=False)  # blocks of keys of one head

    def __post_init__(self):
        batch, self.heads, self.sq, self.head_dim = self.q.shape
        _, self.kv_heads, self.sk, _ = self.k.shape
        self.heads_total, self.kv_heads_total = batch * self.heads, batch * self.kv_heads
        self.group = self.heads // self.kv_heads
        self.rows = -(-self.sq // 128) * 128
        self.blocks_n = -(-self.sk // self.plan.block_n)
        self.dq, self.dk, self.dv = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (self.q, self.k, self.v)
        )
        self.lse2, self.delta = (self.lse.new_empty((self.heads_total, self.rows)) for _ in range(2))
        self.counter = self.lse.new_empty(1, dtype=torch.int32) if self.plan.queue else self.delta
        # In deterministic mode nothing is summed in memory, and the kernels get a pointer that they do not use.
        self.dq_sums = self.lse.new_empty(4 if self.deterministic else self.lse2.numel() * self.plan.block_d)

    @property
    def c(self) -> float:
        """Factor of the scores in base 2."""
        return self.scale * LOG2_E

    def case(self) -> BackwardCase:
        """What the kernel is compiled for."""
        return BackwardCase(self.causal, self.window > 0, self.sk % self.plan.block_n != 0, not self.deterministic)

    def sizes(self) -> tuple[int, ...]:
        """The arguments sq, sk, window, heads, kv_heads, group, tiles_m."""
        return self.sq, self.sk, self.window, self.heads, self.kv_heads, self.group, self.rows // self.plan.block_m

    def grid(self) -> tuple[int, int]:
        """Steps 1 and 2: a block for each block of keys of each head."""
        return self.kv_heads_total, self.blocks_n

    def warps(self) -> int:
        """Steps 1 and 2: one warpgroup, or two where dK and dV would not fit in the registers of one."""
        return 8 if self.plan.block_d == 256 else 4

    @property
    def order(self) -> Order:
        """Steps 3 and on: in which order blocks of keys are taken, and which are split."""
        sizes = self.sq, self.sk, self.kv_heads_total, self.group, processors(self.q.device)
        return order_of(self.plan, *sizes, self.causal, self.window)

    def row_descriptors(self, rows: dict[str, int]) -> list:
        """TMA descriptors of the tensors named, with boxes of so many rows."""
        return [descriptor(getattr(self, name), count, self.plan.block_d) for name, count in rows.items()]

    def sums_descriptor(self):
        """TMA descriptor of the sums of dQ, with boxes of a piece, 4096 numbers that follow each other."""
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        sums = self.dq_sums.view(-1, self.dq_sums.numel() if self.deterministic else 128)
        layout = gl.NVMMASharedLayout(0, 32, rank=2)
        return TensorDescriptor(sums, list(sums.shape), list(sums.stride()), [32, 128], layout)

    def descriptors(self, keys: int) -> list:
        """TMA descriptors of q, dout, k, v, dk, dv, and of the statistics of a tile of queries."""
        plan = self.plan
        boxes = {"q": plan.block_m, "dout": plan.block_m, "k": plan.block_n, "v": keys, "dk": keys, "dv": keys}
        return [*self.row_descriptors(boxes), *(self._numbers(x) for x in (self.lse2, self.delta))]

    def _numbers(self, x: torch.Tensor):
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        layout = gl.NVMMASharedLayout(0, 32, rank=2)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, self.plan.block_m], layout)
