"""One call of scaled_dot_product_attention: its shape, its inputs, one backend pinned alone, proof, and a reference.

The target `labs/cudnn_sdpa_bench` and the chooser time the same calls, and both get them here.

    workload = SdpaWorkload(4, 32, 1024, 128, "bf16", "causal", kv_heads=8, direction="both")
    inputs = make_inputs(workload, device, seed=0)             # q, k, v and the gradient of the output
    why_not(workload, "efficient", inputs)                     # torch's reason in words, or ""
    call = bind(workload, "cudnn", inputs)                     # what is timed; attention and nothing else
    prove(workload, "cudnn", launched_by(call))                # raises unless cuDNN's kernels ran

A pin allows one backend and no other, so torch cannot fall back: it raises, and the reason is passed on.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from utils.attention import allowed_keys, make_request
from utils.attention import provider as provider_named
from utils.bench.errors import Refused, WrongRun, first_line
from utils.bench.targets.providers import SDPA_OPERATORS, Launched
from utils.bench.workload import DTYPES, Workload
from utils.model import costs as flops

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
LAYOUTS = ("bhsd", "bshd")
DIRECTIONS = ("forward", "backward", "both")
# Operators of the backward pass; the math backend's is made of plain operators, the softmax's among them.
BACKWARD_OPERATORS = {
    "aten::_scaled_dot_product_cudnn_attention_backward": "cudnn",
    "aten::_scaled_dot_product_flash_attention_backward": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "flash",
    "aten::_scaled_dot_product_efficient_attention_backward": "efficient",
}
MATH_BACKWARD = "aten::_softmax_backward_data"
# Backward multiplies five times where forward does twice: the scores are computed again, dP, dV, dQ and dK.
BACKWARD_FLOPS = 2.5
REFERENCE_BYTES = 1 << 30  # the reference works on as many query rows at a time as fit into this


@dataclass(frozen=True)
class SdpaWorkload(Workload):
    """An SDPA call: q (B, H, Sq, D), k and v (B, Hkv, Sk, D). `mask` is "full" or "causal".

    kv_heads, seq_len_kv: None for as many as q has. layout: "bhsd" is contiguous, "bshd" a transposed view of a
    contiguous (B, S, H, D). direction: "forward", "backward" or "both". window: only keys fewer than this many
    positions away, given to SDPA as a boolean mask. The last query stands at the last key.
    """

    kv_heads: int | None = None
    seq_len_kv: int | None = None
    layout: str = "bhsd"
    direction: str = "forward"
    window: int | None = None

    @property
    def hkv(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def sk(self) -> int:
        return self.seq_len if self.seq_len_kv is None else self.seq_len_kv

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.hkv, self.sk, self.head_dim

    @property
    def needs_mask(self) -> bool:
        """SDPA's is_causal alone does not say it: it aligns the first query with the first key."""
        return self.window is not None or (self.causal and self.seq_len != self.sk)

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
        """Every field; those of this class only where they differ from plain self-attention, forward."""
        plain = {"kv_heads": self.heads, "seq_len_kv": self.seq_len, "layout": "bhsd", "direction": "forward"}
        return {
            key: value
            for key, value in asdict(self).items()
            if key in Workload.__dataclass_fields__ or value not in (None, plain.get(key))
        }

    @property
    def pairs(self) -> int:
        """Query-key pairs of one head that the mask lets through."""
        position = torch.arange(self.seq_len) + self.sk - self.seq_len
        reach = self.sk + self.seq_len if self.window is None else self.window
        first = (position - reach + 1).clamp_min(0)
        last = position if self.causal else (position + reach - 1).clamp_max(self.sk - 1)
        return int((last - first + 1).clamp_min(0).sum())

    @property
    def density(self) -> float:
        return self.pairs / (self.seq_len * self.sk)

    @property
    def cost(self) -> flops.Cost:
        """FLOPs of the pairs let through, and the least bytes: each of q, k, v, the output and gradients once."""
        one, query = DTYPES[self.dtype].itemsize, self.batch * self.heads * self.seq_len
        key = self.batch * self.hkv * self.sk
        forward = 4 * self.batch * self.heads * self.head_dim * self.pairs
        times = {"forward": 1.0, "backward": BACKWARD_FLOPS, "both": 1.0 + BACKWARD_FLOPS}[self.direction]
        moved = {"forward": 2 * query + 2 * key, "backward": 4 * query + 4 * key, "both": 6 * query + 6 * key}
        return flops.Cost(int(times * forward), moved[self.direction] * self.head_dim * one)

    def bytes_needed(self, score_buffers: float) -> int:
        """Bytes a run takes: inputs and outputs of both sides, the float64 reference, and stored scores in fp32."""
        query = self.batch * self.heads * self.seq_len * self.head_dim
        elements = 2 * query + 2 * self.batch * self.hkv * self.sk * self.head_dim
        copies = 3 if self.direction == "forward" else 6
        scores = 4 * score_buffers * self.batch * self.heads * self.seq_len * self.sk
        return int(
            copies * DTYPES[self.dtype].itemsize * elements
            + 8 * 2 * elements
            + REFERENCE_BYTES
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
        return self.q, self.k, self.v


def as_sdpa(workload: Workload) -> SdpaWorkload:
    """A plain workload (full or causal) as an SDPA call."""
    if isinstance(workload, SdpaWorkload):
        return workload
    return SdpaWorkload(
        workload.batch, workload.heads, workload.seq_len, workload.head_dim, workload.dtype, workload.mask
    )


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """X (B, H, S, D) with the memory order of a layout; its shape stays."""
    return x.contiguous() if layout == "bhsd" else x.transpose(1, 2).contiguous().transpose(1, 2)


def make_inputs(workload: SdpaWorkload, device: torch.device, seed: int) -> Inputs:
    """Standard normal inputs. On a CPU the numbers depend on the seed alone; a GPU draws its own, which is quick."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = [workload.shape, workload.kv_shape, workload.kv_shape]
    shapes += [workload.shape] * (workload.direction != "forward")
    drawn = [
        laid_out(
            torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(DTYPES[workload.dtype]),
            workload.layout,
        )
        for shape in shapes
    ]
    return Inputs(*drawn, *[None] * (4 - len(drawn)))


def _mask(workload: SdpaWorkload, inputs: Inputs) -> torch.Tensor | None:
    if not workload.needs_mask:
        return None
    return allowed_keys(make_request(*inputs.qkv, workload.causal, None, workload.window))


def forward_call(workload: SdpaWorkload, backend: str, q, k, v, mask=None) -> Callable[[], torch.Tensor]:
    """SDPA on these tensors with one backend pinned alone, or with torch's own choice ("auto")."""
    options = dict(
        attn_mask=mask, is_causal=workload.causal and mask is None, enable_gqa=workload.hkv != workload.heads
    )
    if backend == "auto":
        return lambda: F.scaled_dot_product_attention(q, k, v, **options)
    pinned = BACKENDS[backend]

    def call() -> torch.Tensor:
        with sdpa_kernel(pinned):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return call


def leaves(workload: SdpaWorkload, inputs: Inputs) -> list[torch.Tensor]:
    """q, k, v as the call sees them: with gradients asked for unless it is forward alone."""
    train = workload.direction != "forward"
    return [x.detach().requires_grad_(train) for x in inputs.qkv]


def bind(workload: SdpaWorkload, backend: str, inputs: Inputs) -> Callable[[], object]:
    """The call that is timed: the output, the three gradients ("backward"), or all four ("both"), and nothing else.

    The output's gradient has the output's own memory order, so that no backend pays for a copy of it.
    """
    given = leaves(workload, inputs)
    forward = forward_call(workload, backend, *given, _mask(workload, inputs))
    if workload.direction == "forward":
        return torch.no_grad()(forward)
    with torch.enable_grad():
        kept = forward()
    dout = torch.empty_like(kept, requires_grad=False).copy_(inputs.dout)
    if workload.direction == "backward":
        return lambda: torch.autograd.grad(kept, given, dout, retain_graph=True)
    kept = None  # its graph holds tensors of the forward pass

    def both() -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            out = forward()
            return (out.detach(), *torch.autograd.grad(out, given, dout))

    return both


# ---- whether, and why not ----------------------------------------------------------------------------------


def _told(said: list) -> str:
    """Torch's warnings as sentences, without where they came from and without those about other backends."""
    texts = [re.sub(r"\s*\((?:Triggered|function) .*", "", str(one.message), flags=re.S).strip() for one in said]
    texts = [text for text in texts if "not used because" not in text and "been runtime disabled" not in text]
    return " ".join(text if text.endswith(".") else f"{text}." for text in dict.fromkeys(texts) if text)


def why_not(workload: SdpaWorkload, backend: str, inputs: Inputs) -> str:
    """Torch's own reason against a backend for these tensors, in words; "" where the backend takes them.

    The pinned call is tried: where its only backend does not take it, torch raises and gives the reasons as warnings.
    (`torch.backends.cuda.can_use_flash_attention(params, debug=True)` and its sisters answer without a call; on a GPU
    they write the reason to standard error, past Python's warnings, and on a CPU they say no to everything.)
    """
    if backend == "auto":
        return ""
    call = forward_call(workload, backend, *leaves(workload, inputs), _mask(workload, inputs))
    with torch.enable_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            call()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if "DefaultCPUAllocator" in str(error):
                raise
            return _told(said) or f"torch: {first_line(error).rstrip('.')}."
    return ""


def refuse(workload: SdpaWorkload, backend: str, inputs: Inputs) -> None:
    """Raise Refused with torch's reason where the backend does not take these tensors."""
    if reason := why_not(workload, backend, inputs):
        raise Refused(f"torch's {backend} backend does not take {workload.label}: {reason}")


# ---- proof -------------------------------------------------------------------------------------------------


def _one(found: list[str], launched: Launched) -> str:
    if len(set(found)) != 1:
        raise WrongRun(
            f"the trace shows {len(set(found))} SDPA backends ({', '.join(found) or 'none'}) and one was "
            f"expected; it holds {', '.join(launched.operators[:12])}."
        )
    return found[0]


def ran(workload: SdpaWorkload, launched: Launched) -> str:
    """The backend that ran, from the operators of the trace: forward, backward, or both, which must agree."""
    found = []
    if workload.direction != "backward":
        found.append(_one([SDPA_OPERATORS[name] for name in launched.operators if name in SDPA_OPERATORS], launched))
    if workload.direction != "forward":
        fused = [BACKWARD_OPERATORS[name] for name in launched.operators if name in BACKWARD_OPERATORS]
        found.append(_one(fused or ["math"] * (MATH_BACKWARD in launched.operators), launched))
    if len(set(found)) > 1:
        raise WrongRun(f"forward ran {found[0]} and backward {found[1]}.")
    return found[0]


def prove(workload: SdpaWorkload, asked: str, launched: Launched) -> str:
    """The backend that ran; WrongRun unless it is the one asked for and the launched kernels are its own."""
    name = ran(workload, launched)
    if asked not in ("auto", name):
        raise WrongRun(
            f"the SDPA backend {asked} was asked for and {name} ran, by the operators "
            f"{', '.join(one for one in launched.operators if 'scaled_dot' in one) or MATH_BACKWARD}."
        )
    if launched.kernels and name in BACKENDS:
        pattern = provider_named(name).kernels
        if not any(re.search(pattern, kernel) for kernel in launched.kernels):
            raise WrongRun(
                f"the operators say {name} and none of the launched kernels is its own ({pattern}): "
                f"{', '.join(launched.kernels[:8])}."
            )
    return name


def memory(call: Callable[[], object]) -> dict:
    """{"peak_bytes", "output_bytes", "workspace_bytes"} of one call: what it adds, its results, and the rest."""
    from utils.benchmark import benchmark_memory

    results = call()
    tensors = results if isinstance(results, tuple) else (results,)
    output = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    del results, tensors
    peak = round(1e9 * benchmark_memory(call, n_warmup=0, n_repeat=1).allocated_memory_gb)
    return {"peak_bytes": peak, "output_bytes": output, "workspace_bytes": max(0, peak - output)}


# ---- the reference -----------------------------------------------------------------------------------------


@torch.no_grad()
def reference(workload: SdpaWorkload, q, k, v, dout=None) -> dict[str, torch.Tensor]:
    """What the call returns, in float64, by name and in its order: "output", "gradient of q", "... of k", "... of v".

    The gradients are the formulas written out, with no use of autograd; heads one by one, query rows in pieces.
    """
    grouped, scale = q.shape[1] // k.shape[1], workload.head_dim**-0.5
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    gradients = (
        [torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q, k, v)]
        if workload.direction != "forward"
        else []
    )
    rows = max(1, REFERENCE_BYTES // (8 * 5 * workload.sk))
    column = torch.arange(workload.sk, device=q.device)[None, :]
    reach = workload.sk + workload.seq_len if workload.window is None else workload.window
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys, values = k[b, h // grouped].double(), v[b, h // grouped].double()
            for first in range(0, workload.seq_len, rows):
                part = slice(first, min(first + rows, workload.seq_len))
                query = q[b, h, part].double()
                scores = query @ keys.T * scale
                if workload.causal or workload.window is not None:
                    position = torch.arange(part.start, part.stop, device=q.device)[:, None]
                    distance = position + workload.sk - workload.seq_len - column
                    hidden = distance.abs() >= reach
                    scores.masked_fill_(hidden | (distance < 0) if workload.causal else hidden, float("-inf"))
                weights = torch.softmax(scores, dim=-1)
                out[b, h, part] = weights @ values
                if gradients:
                    upstream = dout[b, h, part].double()
                    dscores = weights * (upstream @ values.T - (upstream * out[b, h, part]).sum(-1, keepdim=True))
                    gradients[0][b, h, part] = dscores @ keys * scale
                    gradients[1][b, h // grouped] += dscores.T @ query * scale
                    gradients[2][b, h // grouped] += weights.T @ upstream
    named = dict(zip(("gradient of q", "gradient of k", "gradient of v"), gradients, strict=False))
    return named if workload.direction == "backward" else {"output": out} | named
