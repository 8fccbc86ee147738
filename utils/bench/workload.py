"""The workload of a benchmark: its shape and mask, its inputs, its float64 reference, its FLOPs and bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from utils import attention
from utils.attention.masks import by_name, score_mods
from utils.attention.reference import CHUNK_BYTES
from utils.bench.errors import Refused
from utils.machine.environment import available_memory_bytes, float32_matmul_precision
from utils.model import costs as flops

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MASKS = ("full", "causal", "document", "causal_document")
SCORE_MODS = ("none", "relative_bias", "soft_cap")
SOFT_CAP = 20.0


@dataclass(frozen=True)
class Workload:
    """Self-attention over (B, H, S, D). Two results are comparable if these fields are equal."""

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
        """(B, H, S, D)."""
        return self.batch, self.heads, self.seq_len, self.head_dim

    @property
    def causal(self) -> bool:
        """Whether a query sees no later key."""
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
        """Return the fields, for a JSON file."""
        return asdict(self)

    @property
    def attention_arguments(self) -> dict:
        """The arguments of `utils.attention.attention` besides q, k and v."""
        mask = {"causal": self.causal} if self.doc_span is None else {"mask_mod": by_name(self.mask, self.doc_span)}
        return mask | {"score_mod": score_mods.by_name(self.score_mod, self.heads, SOFT_CAP)}

    def problem(self, device: torch.device) -> attention.Problem:
        """Return the attention problem, made of tensors that take no memory."""
        like = torch.empty(1, dtype=DTYPES[self.dtype], device=device).expand(self.shape)
        return attention.make_problem(like, like, like, **self.attention_arguments)

    @property
    def documents(self) -> tuple[int, int, int]:
        """(number of whole documents, their length, length of the last, shorter one or 0); attention stays within each."""
        span = self.seq_len if self.doc_span is None else min(self.doc_span, self.seq_len)
        return self.seq_len // span, span, self.seq_len % span

    @property
    def cost(self) -> flops.Cost:
        """FLOPs of the pairs that the mask lets through, and the bytes of q, k, v and the output."""

        def of_length(length: int) -> flops.Cost:
            heads = (self.batch, self.heads, self.heads)
            return flops.attention(*heads, length, length, self.head_dim, DTYPES[self.dtype], causal=self.causal)

        count, span, rest = self.documents
        whole, last = of_length(span), of_length(rest) if rest else flops.Cost(0, 0)
        return flops.Cost(count * whole.flops + last.flops, count * whole.bytes + last.bytes)

    @property
    def density(self) -> float:
        """Share of the query-key pairs that the mask lets through."""
        return self.cost.flops / (4 * self.batch * self.heads * self.head_dim * self.seq_len**2)

    def bytes_needed(self, score_buffers: float) -> int:
        """Estimate a run's bytes: inputs, outputs, the reference, and `score_buffers` (B, H, S, S) buffers in fp32."""
        elements, pairs = self.batch * self.heads * self.seq_len * self.head_dim, self.seq_len**2
        checking = 4 * 8 * elements + min(CHUNK_BYTES, 6 * 8 * pairs) + 2 * pairs
        scores = 4 * score_buffers * self.batch * self.heads * pairs
        return int(8 * DTYPES[self.dtype].itemsize * elements + checking + scores)


def arithmetic(dtype: str, device: torch.device) -> str:
    """Return the precision of products of this dtype: in fp32 on a GPU, torch may be allowed to use TF32."""
    tf32 = dtype == "fp32" and device.type == "cuda" and float32_matmul_precision() != "highest"
    return "tf32" if tf32 else dtype


def make_inputs(workload: Workload, device: torch.device, seed: int) -> tuple[torch.Tensor, ...]:
    """Draw q, k, v (B, H, S, D), standard normal, from `seed` on the CPU so that every machine has the same."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(workload.shape, generator=generator).to(device, DTYPES[workload.dtype]) for _ in range(3))


def reference(workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute the workload's attention in float64, (B, H, S, D)."""
    return attention.reference(q, k, v, **workload.attention_arguments)[0]


def free_bytes(device: torch.device) -> int:
    """Return the bytes that tensors can still take on a device: on a GPU, what torch's allocator holds unused too."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return available_memory_bytes()


def check_fits(workload, score_buffers: float, device: torch.device) -> int:
    """Estimate the bytes; raise Refused, before anything is allocated, if the free memory cannot hold them."""
    needed = workload.bytes_needed(score_buffers)
    free = free_bytes(device)
    if needed > free:
        stored = " (its unfused side stores all scores)" if score_buffers else ""
        raise Refused(
            f"{workload.label} needs about {needed / 1e9:,.1f} GB{stored} and {free / 1e9:,.1f} GB are free "
            f"on {device}: choose smaller sizes."
        )
    return needed
