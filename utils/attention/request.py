"""What is asked of attention: shapes, types and the mask, checked once, and the errors that say what would work."""

from __future__ import annotations

from dataclasses import dataclass

import torch


class AttentionUnsupported(ValueError):
    """A provider cannot do what was asked. `provider`, `reason`, and `alternatives`: the providers that can."""

    def __init__(self, provider: str, reason: str, alternatives: tuple[str, ...]):
        would = f"These would work: {', '.join(alternatives)}." if alternatives else "No provider here can do it."
        super().__init__(f"Attention provider {provider!r}: {reason} {would}")
        self.provider, self.reason, self.alternatives = provider, reason, alternatives


class Refused(RuntimeError):
    """A library refused a request when it was called; the message says why."""


@dataclass(frozen=True)
class Shape:
    """The shapes of an attention call: q (B, H, Sq, D), k and v (B, Hkv, Sk, D), H a multiple of Hkv."""

    batch: int
    heads: int
    kv_heads: int
    sq: int
    sk: int
    head_dim: int

    @property
    def grouped(self) -> bool:
        """Several query heads share a head of K and V."""
        return self.heads != self.kv_heads


@dataclass(frozen=True)
class Request(Shape):
    """One attention call."""

    dtype: torch.dtype
    device: torch.device
    causal: bool
    scale: float
    window: int | None
    needs_grad: bool

    @property
    def has_empty_rows(self) -> bool:
        """Some query sees no key at all: more queries than keys, under a mask that moves along."""
        return self.sq > self.sk and (self.causal or (self.window is not None and self.sq - self.sk >= self.window))

    @property
    def aligned_at_start(self) -> bool:
        """The mask is the same whether the first or the last query and key are aligned."""
        return not self.causal or self.sq == self.sk

    @property
    def type_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def make_request(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, window: int | None
) -> Request:
    """Check the arguments of an attention call; a ValueError or TypeError says what was given and what is allowed."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor (B, H, S, D), and is a {type(x).__name__}.")
        if x.dim() != 4:
            raise ValueError(f"{name} must have the four dimensions (B, H, S, D), and has shape {tuple(x.shape)}.")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape (B, Hkv, Sk, D): {shapes}.")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q, k and v must agree in batch size and head dimension: {shapes}.")
    if 0 in k.shape or 0 in q.shape[1:2] + q.shape[3:]:
        raise ValueError(f"Heads, keys and head dimension must not be empty: {shapes}.")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"The {q.shape[1]} heads of q must be a multiple of the {k.shape[1]} of k and v: {shapes}.")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype: {q.dtype}, {k.dtype}, {v.dtype}.")
    if not q.dtype.is_floating_point:
        raise TypeError(f"Attention takes floating-point tensors, and these are {q.dtype}.")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device: {q.device}, {k.device}, {v.device}.")
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(f"window must be None or a whole number of keys, at least 1; it is {window!r}.")
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False; it is {causal!r}.")
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return Request(
        q.shape[0],
        q.shape[1],
        k.shape[1],
        q.shape[2],
        k.shape[2],
        q.shape[3],
        q.dtype,
        q.device,
        causal,
        q.shape[3] ** -0.5 if scale is None else float(scale),
        window,
        needs_grad,
    )


def allowed_keys(request: Request, device: torch.device | str | None = None) -> torch.Tensor | None:
    """The mask (Sq, Sk), True where a query sees a key; None if every query sees every key."""
    if not request.causal and request.window is None:
        return None
    device = request.device if device is None else device
    position = torch.arange(request.sq, device=device)[:, None] + request.sk - request.sq
    distance = position - torch.arange(request.sk, device=device)[None, :]
    keep = torch.ones_like(distance, dtype=torch.bool)
    if request.causal:
        keep &= distance >= 0
    if request.window is not None:
        keep &= distance.abs() < request.window
    return keep
