"""One call of scaled_dot_product_attention: its shape, its inputs, one backend pinned, and its float64 reference.

The target `labs/cudnn_sdpa_bench` and `labs bench choose` time the same calls; both take them from here.

    workload = SdpaWorkload(4, 32, 1024, 128, "bf16", "causal", kv_heads=8, direction="both")
    inputs = make_inputs(workload, device, seed=0)             # q, k, v and the gradient of the output
    why_not(workload, "efficient", inputs)                     # torch's reason in words, or ""
    call = bind(workload, "cudnn", inputs)                     # the call to time: attention and nothing else
    prove("cudnn", launched(call), workload.direction)      # raises unless cuDNN's kernels ran (`proof.py`)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from utils import attention
from utils.attention.problem import NO_OPTIONS, Bound
from utils.attention.reference import CHUNK_BYTES
from utils.bench.errors import Refused
from utils.bench.targets.proof import BACKEND_OF
from utils.bench.workload import DTYPES, Workload
from utils.model import costs as flops

BACKENDS = ("cudnn", "flash", "math", "efficient")
LAYOUTS = ("bhsd", "bshd")
DIRECTIONS = ("forward", "backward", "both")
# Backward multiplies five times where forward does twice: the scores are computed again, dP, dV, dQ and dK.
BACKWARD_FLOPS = 2.5


def _sum_of_clamped(start: int, count: int, high: int) -> int:
    """Return the sum of `count` whole numbers from `start` on, each raised to 0 and lowered to `high`."""
    below = min(max(-start, 0), count)
    start, count = start + below, count - below
    inside = min(count, max(high - start, 0))
    return inside * start + inside * (inside - 1) // 2 + (count - inside) * high


@dataclass(frozen=True)
class SdpaWorkload(Workload):
    """An SDPA call: q (B, H, Sq, D), k and v (B, Hkv, Sk, D). `mask` is "full" or "causal".

    kv_heads, seq_len_kv: None for as many as q has. layout: "bhsd" is contiguous, "bshd" a transposed view of a
    contiguous (B, S, H, D). direction: "forward", "backward" or "both". window: only keys fewer than this many
    positions away, given to SDPA as a boolean mask. The last query is at the last key.
    """

    kv_heads: int | None = None
    seq_len_kv: int | None = None
    layout: str = "bhsd"
    direction: str = "forward"
    window: int | None = None

    @property
    def hkv(self) -> int:
        """Number of heads of k and v."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def sk(self) -> int:
        """Number of keys."""
        return self.seq_len if self.seq_len_kv is None else self.seq_len_kv

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Shape of k and v, (B, Hkv, Sk, D)."""
        return self.batch, self.hkv, self.sk, self.head_dim

    @property
    def needs_mask(self) -> bool:
        """Whether SDPA needs a mask: its is_causal aligns the first query with the first key."""
        return self.window is not None or (self.causal and self.seq_len != self.sk)

    @property
    def attention_arguments(self) -> dict:
        """The arguments of `utils.attention.attention` besides q, k and v."""
        return {"causal": self.causal, "window": self.window}

    @property
    def label(self) -> str:
        """Such as "B4 H32/8 S1024 D128 bf16 causal both"."""
        heads = f"H{self.heads}" if self.hkv == self.heads else f"H{self.heads}/{self.hkv}"
        length = f"S{self.seq_len}" if self.sk == self.seq_len else f"S{self.seq_len}x{self.sk}"
        parts = [f"B{self.batch} {heads} {length} D{self.head_dim}", self.dtype, self.mask]
        parts += [f"window {self.window}"] if self.window is not None else []
        parts += [self.layout] if self.layout != "bhsd" else []
        return " ".join(parts + ([self.direction] if self.direction != "forward" else []))

    def to_dict(self) -> dict:
        """Return every field; those of this class only where they differ from plain self-attention, forward."""
        plain = {"kv_heads": self.heads, "seq_len_kv": self.seq_len, "layout": "bhsd", "direction": "forward"}
        return {
            key: value
            for key, value in asdict(self).items()
            if key in Workload.__dataclass_fields__ or value not in (None, plain.get(key))
        }

    @property
    def pairs(self) -> int:
        """Query-key pairs of one head that the mask lets through."""
        reach = self.sk + self.seq_len if self.window is None else self.window
        first = self.sk - self.seq_len  # position of the first query
        end = first + 1 if self.causal else first + reach
        return _sum_of_clamped(end, self.seq_len, self.sk) - _sum_of_clamped(first - reach + 1, self.seq_len, self.sk)

    @property
    def density(self) -> float:
        """Share of the query-key pairs that the mask lets through."""
        return self.pairs / (self.seq_len * self.sk)

    @property
    def cost(self) -> flops.Cost:
        """FLOPs of the pairs let through, and the least bytes: q, k, v, the output and gradients once each."""
        itemsize, query = DTYPES[self.dtype].itemsize, self.batch * self.heads * self.seq_len
        key = self.batch * self.hkv * self.sk
        forward = 4 * self.batch * self.heads * self.head_dim * self.pairs
        times = {"forward": 1.0, "backward": BACKWARD_FLOPS, "both": 1.0 + BACKWARD_FLOPS}[self.direction]
        moved = {"forward": 2 * query + 2 * key, "backward": 4 * query + 4 * key, "both": 6 * query + 6 * key}
        return flops.Cost(int(times * forward), moved[self.direction] * self.head_dim * itemsize)

    def bytes_needed(self, score_buffers: float) -> int:
        """Estimate a run's bytes: inputs and outputs of both sides, the float64 reference, and stored scores in fp32."""
        query = self.batch * self.heads * self.seq_len * self.head_dim
        elements = 2 * query + 2 * self.batch * self.hkv * self.sk * self.head_dim
        copies = 3 if self.direction == "forward" else 6
        scores = 4 * score_buffers * self.batch * self.heads * self.seq_len * self.sk
        return int(
            copies * DTYPES[self.dtype].itemsize * elements
            + 8 * 2 * elements
            + CHUNK_BYTES
            + scores * (1 if self.direction == "forward" else 2)
        )


class Inputs(NamedTuple):
    """q (B, H, Sq, D), k, v (B, Hkv, Sk, D), and the output's gradient (None for forward)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor | None

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v."""
        return self.q, self.k, self.v


def as_sdpa(workload: Workload) -> SdpaWorkload:
    """Return a plain workload (full or causal) as an SDPA call."""
    if isinstance(workload, SdpaWorkload):
        return workload
    return SdpaWorkload(
        workload.batch, workload.heads, workload.seq_len, workload.head_dim, workload.dtype, workload.mask
    )


def in_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return x (B, H, S, D), its shape unchanged, with the memory order of a layout."""
    return x.contiguous() if layout == "bhsd" else x.transpose(1, 2).contiguous().transpose(1, 2)


def make_inputs(workload: SdpaWorkload, device: torch.device, seed: int) -> Inputs:
    """Draw standard normal inputs. On a CPU they depend on the seed alone; a GPU draws its own, which is quick."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = [workload.shape, workload.kv_shape, workload.kv_shape]
    shapes += [workload.shape] * (workload.direction != "forward")
    normal = (torch.randn(shape, generator=generator, device=device, dtype=torch.float32) for shape in shapes)
    drawn = [in_layout(x.to(DTYPES[workload.dtype]), workload.layout) for x in normal]
    return Inputs(*drawn, *[None] * (4 - len(drawn)))


def leaves(workload: SdpaWorkload, inputs: Inputs) -> list[torch.Tensor]:
    """Return q, k, v as the call sees them: with gradients asked for, unless it is forward alone."""
    train = workload.direction != "forward"
    return [x.detach().requires_grad_(train) for x in inputs.qkv]


def _bound(workload: SdpaWorkload, backend: str, tensors: list[torch.Tensor]) -> Bound:
    """Bind a backend without asking whether it accepts the problem: the refusals here are torch's own."""
    problem = attention.make_problem(*tensors, **workload.attention_arguments)
    return attention.find_backend(BACKEND_OF.get(backend, backend)).bind(problem, NO_OPTIONS)


def bind(workload: SdpaWorkload, backend: str, inputs: Inputs) -> Callable[[], object]:
    """Return the call that is timed: the output, the three gradients ("backward"), or all four ("both").

    The output's gradient gets the output's own memory order, so that no backend pays for a copy of it.
    """
    tensors = leaves(workload, inputs)
    with torch.enable_grad():
        attend = _bound(workload, backend, tensors).call
    return timed_call(workload, attend, tensors, inputs.dout)


def timed_call(
    workload: SdpaWorkload, attend: Callable, tensors: list[torch.Tensor], dout: torch.Tensor | None
) -> Callable[[], object]:
    """Return the call that is timed, of `attend(q, k, v)` on the tensors of `leaves`: see `bind`."""
    if workload.direction == "forward":
        return torch.no_grad()(lambda: attend(*tensors))
    with torch.enable_grad():
        kept = attend(*tensors)
    assert dout is not None, "a backward pass has a gradient to begin with"
    gradient = torch.empty_like(kept, requires_grad=False).copy_(dout)
    if workload.direction == "backward":
        return lambda: torch.autograd.grad(kept, tensors, gradient, retain_graph=True)
    kept = None  # its graph holds tensors of the forward pass

    def both() -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            out = attend(*tensors)
            return (out.detach(), *torch.autograd.grad(out, tensors, gradient))

    return both


def why_not(workload: SdpaWorkload, backend: str, inputs: Inputs) -> str:
    """Return torch's own reason against a backend for these tensors, by trying it; "" if the backend takes them."""
    if backend == "auto":
        return ""
    tensors = leaves(workload, inputs)
    try:
        with torch.enable_grad():
            bound = _bound(workload, backend, tensors)
            (bound.first or bound.call)(*tensors)
    except attention.Refused as refusal:
        return str(refusal)
    return ""


def refuse(workload: SdpaWorkload, backend: str, inputs: Inputs) -> None:
    """Raise Refused, with torch's reason, if the backend does not take these tensors."""
    if reason := why_not(workload, backend, inputs):
        raise Refused(f"torch's {backend} backend does not take {workload.label}: {reason}")


def memory(call: Callable[[], object]) -> dict:
    """Measure {"peak_bytes", "output_bytes", "workspace_bytes"} of one call: all that it adds, its results, the rest."""
    from utils.benchmark import benchmark_memory

    results = call()
    tensors = results if isinstance(results, tuple) else (results,)
    output = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    del results, tensors
    peak = round(1e9 * benchmark_memory(call, n_warmup=0, n_repeat=1).allocated_memory_gb)
    return {"peak_bytes": peak, "output_bytes": output, "workspace_bytes": max(0, peak - output)}


def reference(workload: SdpaWorkload, q, k, v, dout=None) -> dict[str, torch.Tensor]:
    """Return the call's results in float64, in its order: "output", "gradient of q", "gradient of k", "gradient of v"."""
    if workload.direction == "forward":
        return {"output": attention.reference(q, k, v, **workload.attention_arguments)[0]}
    out, gradients = attention.reference_gradients(q, k, v, dout, **workload.attention_arguments)
    named = dict(zip(("gradient of q", "gradient of k", "gradient of v"), gradients, strict=True))
    return named if workload.direction == "backward" else {"output": out} | named
