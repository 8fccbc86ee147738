"""The attention of a benchmark: its shape and mask, its inputs, its float64 reference, its FLOPs and bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from utils import attention
from utils.attention.masks import by_name, score_mods
from utils.attention.masks.mask_mods import row_chunks
from utils.attention.reference import CHUNK_BYTES
from utils.bench.errors import Refused
from utils.machine.environment import available_memory_bytes, float32_matmul_precision
from utils.model.costs import Cost, attended_pairs

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MASKS = tuple(attention.masks.MASKS)
SCORE_MODS = ("none", "relative_bias", "soft_cap")
DIRECTIONS = ("forward", "backward", "both")
SOFT_CAP = 20.0
# The forward pass has two products. The backward pass has five: the scores again, dP, dV, dQ and dK.
BACKWARD_FLOPS = 2.5


@dataclass(frozen=True)
class Workload:
    """Attention of q (B, H, Sq, D) over k and v (B, Hkv, Sk, D). Two results are comparable if these fields are equal.

    doc_span: tokens of a document; the last document may be shorter. kv_heads, seq_len_kv: 0 means the same as q.
    direction: "forward", "backward" or "both". window: a query sees keys fewer than this many positions away. The last
    query is at the position of the last key.
    """

    batch: int
    heads: int
    seq_len: int
    head_dim: int
    dtype: str  # "fp16", "bf16", "fp32"
    mask: str = "full"
    doc_span: int | None = None
    score_mod: str = "none"
    kv_heads: int = 0
    seq_len_kv: int = 0
    direction: str = "forward"
    window: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "seq_len_kv", self.seq_len_kv or self.seq_len)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Sq, D)."""
        return self.batch, self.heads, self.seq_len, self.head_dim

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Shape of k and v, (B, Hkv, Sk, D)."""
        return self.batch, self.kv_heads, self.seq_len_kv, self.head_dim

    @property
    def causal(self) -> bool:
        """Whether a query sees no later key."""
        return self.mask.startswith("causal")

    @property
    def label(self) -> str:
        """Such as "B4 H16 S4096 D64 bf16 causal_document 512" or "B4 H32/8 S1024 D128 bf16 causal both"."""
        heads = f"H{self.heads}" if self.kv_heads == self.heads else f"H{self.heads}/{self.kv_heads}"
        length = f"S{self.seq_len}" if self.seq_len_kv == self.seq_len else f"S{self.seq_len}x{self.seq_len_kv}"
        parts = [f"B{self.batch} {heads} {length} D{self.head_dim}", self.dtype, self.mask]
        parts += [str(self.doc_span)] if self.doc_span is not None else []
        parts += [f"window {self.window}"] if self.window is not None else []
        return " ".join(parts + [one for one in (self.score_mod, self.direction) if one not in ("none", "forward")])

    def to_dict(self) -> dict:
        """Return the fields for a JSON file. Fields after `score_mod` are left out if they are as in plain self-attention."""
        plain = {"kv_heads": self.heads, "seq_len_kv": self.seq_len, "direction": "forward"}
        fields = asdict(self)
        always = list(fields)[: list(fields).index("score_mod") + 1]
        return {key: value for key, value in fields.items() if key in always or value not in (None, plain.get(key))}

    @property
    def attention_arguments(self) -> dict:
        """The arguments of `utils.attention.attention` besides q, k and v."""
        plain = self.mask in ("full", "causal")
        mask = {"causal": self.causal} if plain else {"mask_mod": by_name(self.mask, self.doc_span)}
        return mask | {"score_mod": score_mods.by_name(self.score_mod, self.heads, SOFT_CAP), "window": self.window}

    def problem(self, device: torch.device) -> attention.Problem:
        """Return the attention problem, made of tensors that take no memory."""
        like = torch.empty(1, dtype=DTYPES[self.dtype], device=device)
        q, k = like.expand(self.shape), like.expand(self.kv_shape)
        return attention.make_problem(q, k, k, **self.attention_arguments)

    @property
    def pairs(self) -> int:
        """Number of query-key pairs of one head that the mask allows."""
        if self.doc_span is not None:
            count, rest = divmod(self.seq_len, self.doc_span)
            lengths = {self.doc_span: count, rest: 1} if rest else {self.doc_span: count}
            return sum(many * attended_pairs(length, length, self.causal) for length, many in lengths.items())
        if self.mask not in ("full", "causal"):
            rows = row_chunks(by_name(self.mask), self.seq_len, self.seq_len_kv, "cpu")
            return sum(int(allowed.sum()) for _, allowed in rows)
        pairs = attended_pairs(self.seq_len, self.seq_len_kv, self.causal or self.window is not None, self.window)
        if self.window is not None and not self.causal:  # later keys, without the key at the query's position
            pairs += attended_pairs(self.seq_len, self.seq_len, True, self.window) - self.seq_len
        return pairs

    @property
    def cost(self) -> Cost:
        """FLOPs of the allowed pairs, and the fewest bytes: q, k, v, the output and the gradients once."""
        query, key = self.batch * self.heads * self.seq_len, self.batch * self.kv_heads * self.seq_len_kv
        forward = 4 * self.batch * self.heads * self.head_dim * self.pairs
        passes = {"forward": (1.0, 2), "backward": (BACKWARD_FLOPS, 4), "both": (1.0 + BACKWARD_FLOPS, 6)}
        times, moved = passes[self.direction]
        return Cost(int(times * forward), moved * (query + key) * self.head_dim * DTYPES[self.dtype].itemsize)

    def bytes_needed(self, score_buffers: float) -> int:
        """Estimate a run's bytes: inputs and outputs of both sides, the float64 reference, stored masks and scores."""
        passes, pairs = (1 if self.direction == "forward" else 2), self.seq_len * self.seq_len_kv
        elements = 2 * self.head_dim * self.batch * (self.heads * self.seq_len + self.kv_heads * self.seq_len_kv)
        copies = 3 * passes * DTYPES[self.dtype].itemsize * elements
        checking = 8 * 2 * elements + min(CHUNK_BYTES, 6 * 8 * pairs) + 2 * pairs
        return int(copies + checking + 4 * passes * score_buffers * self.batch * self.heads * pairs)


def make_inputs(workload: Workload, device: torch.device, seed: int) -> tuple[torch.Tensor, ...]:
    """Draw standard normal q (B, H, Sq, D), k and v (B, Hkv, Sk, D), and the output's gradient for a backward pass.

    On a CPU the numbers depend only on the seed. A GPU draws different numbers, because this is faster.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shapes = [workload.shape, workload.kv_shape, workload.kv_shape]
    shapes += [workload.shape] * (workload.direction != "forward")
    normal = (torch.randn(shape, generator=generator, device=device, dtype=torch.float32) for shape in shapes)
    return tuple(x.to(DTYPES[workload.dtype]) for x in normal)


def reference(workload: Workload, q, k, v, dout=None) -> dict[str, torch.Tensor]:
    """Return the results in float64, in the call's order: "output", "gradient of q", "gradient of k", "gradient of v"."""
    if workload.direction == "forward":
        return {"output": attention.reference(q, k, v, **workload.attention_arguments)[0]}
    out, gradients = attention.reference_gradients(q, k, v, dout, **workload.attention_arguments)
    named = dict(zip(("gradient of q", "gradient of k", "gradient of v"), gradients, strict=True))
    return named if workload.direction == "backward" else {"output": out} | named


def arithmetic(dtype: str, device: torch.device) -> str:
    """Return the precision of products of this dtype. With fp32 on a GPU it is TF32, if torch's setting allows TF32."""
    tf32 = dtype == "fp32" and device.type == "cuda" and float32_matmul_precision() != "highest"
    return "tf32" if tf32 else dtype


def check_fits(label: str, needed: int, device: torch.device) -> None:
    """Raise Refused if a run needs more bytes than the free memory has. This comes before all allocations."""
    if needed > (free := available_memory_bytes(device)):
        raise Refused(
            f"{label} needs about {needed / 1e9:,.1f} GB (inputs, float64 reference, stored scores) and {free / 1e9:,.1f} GB "
            f"are free on {device}: choose smaller sizes."
        )
