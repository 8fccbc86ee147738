"""One attention problem: its shape and mask, its inputs, its float64 reference, its FLOPs and bytes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

from utils.bench.errors import Refused
from utils.machine.environment import available_memory_bytes, float32_matmul_precision
from utils.model import costs as flops

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MASKS = ("full", "causal", "document", "causal_document")
SCORE_MODS = ("none", "relative_bias", "soft_cap")
SOFT_CAP = 20.0
REFERENCE_BYTES = 512 * 1024**2  # the reference works on as many heads at a time as fit into this


@dataclass(frozen=True)
class Workload:
    """Self-attention over (B, H, S, D): two results are comparable when these fields are equal."""

    batch: int
    heads: int
    seq_len: int
    head_dim: int
    dtype: str  # "fp16", "bf16", "fp32"
    mask: str = "full"
    doc_span: int | None = None  # tokens a document has; the last one may be shorter
    score_mod: str = "none"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.seq_len, self.head_dim

    @property
    def causal(self) -> bool:
        return self.mask.startswith("causal")

    @property
    def label(self) -> str:
        """Such as "B4 H16 S4096 D64 bf16 causal_document 512"."""
        parts = [f"B{self.batch} H{self.heads} S{self.seq_len} D{self.head_dim}", self.dtype, self.mask]
        if self.doc_span is not None:
            parts.append(str(self.doc_span))
        if self.score_mod != "none":
            parts.append(self.score_mod)
        return " ".join(parts)

    def to_dict(self) -> dict:
        return asdict(self)

    @property
    def documents(self) -> list[int]:
        """Length of each stretch of tokens that attends to itself alone; the whole sequence without documents."""
        if self.doc_span is None or self.doc_span >= self.seq_len:
            return [self.seq_len]
        whole, rest = divmod(self.seq_len, self.doc_span)
        return [self.doc_span] * whole + ([rest] if rest else [])

    @property
    def cost(self) -> flops.Cost:
        """FLOPs of the pairs that the mask lets through, and the bytes of q, k, v and the output."""
        return sum(
            flops.attention(
                self.batch,
                self.heads,
                self.heads,
                length,
                length,
                self.head_dim,
                DTYPES[self.dtype],
                causal=self.causal,
            )
            for length in self.documents
        )

    @property
    def density(self) -> float:
        """Share of the query-key pairs that the mask lets through."""
        return self.cost.flops / (4 * self.batch * self.heads * self.head_dim * self.seq_len**2)

    def bytes_needed(self, score_buffers: float) -> int:
        """Bytes a run takes: inputs and outputs, the reference, and `score_buffers` (B, H, S, S) buffers in fp32."""
        elements = self.batch * self.heads * self.seq_len * self.head_dim
        pairs = self.seq_len**2
        at_once = max(1, REFERENCE_BYTES // (3 * 8 * pairs))
        checking = 4 * 8 * elements + 3 * 8 * pairs * min(at_once, self.batch * self.heads) + 2 * pairs
        return int(
            8 * DTYPES[self.dtype].itemsize * elements + checking + 4 * score_buffers * self.batch * self.heads * pairs
        )


def arithmetic(dtype: str, device: torch.device) -> str:
    """The precision that products of this dtype run in: fp32 ones on a GPU may be allowed TF32."""
    tf32 = dtype == "fp32" and device.type == "cuda" and float32_matmul_precision() != "highest"
    return "tf32" if tf32 else dtype


def make_inputs(workload: Workload, device: torch.device, seed: int) -> tuple[torch.Tensor, ...]:
    """q, k, v (B, H, S, D), standard normal, drawn from `seed` on the CPU so that every machine has the same."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(workload.shape, generator=generator).to(device, DTYPES[workload.dtype]) for _ in range(3))


def allowed_pairs(workload: Workload, device: torch.device) -> torch.Tensor | None:
    """(S, S) bool, True where the query (row) may see the key (column); None where it may see all."""
    if workload.mask == "full":
        return None
    position = torch.arange(workload.seq_len, device=device)
    query, key = position[:, None], position[None, :]
    allowed = query >= key if workload.causal else torch.ones_like(query == key)
    if workload.doc_span is not None:
        allowed = allowed & (query // workload.doc_span == key // workload.doc_span)
    return allowed


def modified_scores(workload: Workload, scores: torch.Tensor, first_head: int = 0) -> torch.Tensor:
    """Scores (..., H, S, S) after the score modifier; `first_head` is the number of the first head given."""
    if workload.score_mod == "relative_bias":
        heads = torch.arange(first_head, first_head + scores.shape[-3], device=scores.device) % workload.heads
        slope = torch.exp2(-8.0 * (heads + 1).to(scores.dtype) / workload.heads)[:, None, None]
        position = torch.arange(workload.seq_len, device=scores.device, dtype=scores.dtype)
        return scores + slope * (position[None, :] - position[:, None])
    if workload.score_mod == "soft_cap":
        return SOFT_CAP * torch.tanh(scores / SOFT_CAP)
    return scores


def unfused_attention(workload: Workload, q, k, v, allowed: torch.Tensor | None, first_head: int = 0) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v as separate operators, the scores stored in full, in the dtype of q."""
    scores = (q @ k.transpose(-1, -2)) * (1.0 / math.sqrt(workload.head_dim))
    scores = modified_scores(workload, scores, first_head)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


@torch.no_grad()
def reference(workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same attention in float64, (B, H, S, D), a few heads at a time."""
    allowed = allowed_pairs(workload, q.device)
    flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    heads_at_once = max(1, REFERENCE_BYTES // (3 * 8 * workload.seq_len**2))
    out = torch.empty(flat[0].shape, dtype=torch.float64, device=q.device)
    for first in range(0, out.shape[0], heads_at_once):
        part = [tensor[first : first + heads_at_once].double() for tensor in flat]
        out[first : first + heads_at_once] = unfused_attention(workload, *part, allowed, first)
    return out.view(workload.shape)


def check_fits(workload: Workload, score_buffers: float, device: torch.device) -> int:
    """The estimate in bytes; refuses, before anything is allocated, what the free memory cannot hold."""
    needed = workload.bytes_needed(score_buffers)
    if device.type == "cuda":
        free = (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    else:
        free = available_memory_bytes()
    if free is not None and needed > free:
        stored = " (its unfused side stores all scores)" if score_buffers else ""
        raise Refused(
            f"{workload.label} needs about {needed / 1e9:,.1f} GB{stored} and {free / 1e9:,.1f} GB are free "
            f"on {device}: choose a smaller --batch, --heads or --seq-len."
        )
    return needed
