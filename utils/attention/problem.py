"""A `Problem` (shapes, types, mask), which is checked once, and a `Backend`, which solves it.

`causal` and `window` count positions from the end: the last query is at the last key, so query i is at position i + Sk - Sq.
A `mask_mod` compares the index of a query with the index of a key. If both are given, a query sees the keys that both
let through.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from utils.attention.masks.mask_mods import (
    MaskMod,
    at_offset,
    both,
    causal,
    document_lengths,
    evaluate,
    name_of,
    nearby,
    sliding_window,
)
from utils.attention.masks.score_mods import ScoreMod, modify_scores, trains
from utils.kernels.handle import needs_autograd
from utils.machine.device import Support
from utils.validation import whole_number

# A function of q, k and v that returns the output, or (output, log-sum-exp) for a problem `with_lse`.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


class AttentionUnsupported(ValueError):
    """A backend cannot do a problem: `backend` its name, `reason` why, `alternatives` the backends that can."""

    def __init__(self, backend: str, reason: str, alternatives: tuple[str, ...]):
        remedy = f"These would work: {', '.join(alternatives)}." if alternatives else "No backend here can do it."
        super().__init__(f"Attention backend {backend!r}: {reason.rstrip('.')}. {remedy}")
        self.backend, self.reason, self.alternatives = backend, reason, alternatives


class Refused(RuntimeError):
    """A library refused a problem when it was called; the message says why."""


@dataclass(frozen=True)
class Problem:
    """One attention problem without its tensors, q (B, H, Sq, D), k and v (B, Hkv, Sk, D); it decides which backends can do it."""

    batch: int
    heads: int
    kv_heads: int
    sq: int
    sk: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    causal: bool
    scale: float
    window: int | None
    needs_autograd: bool
    mask_mod: MaskMod | None = None
    score_mod: ScoreMod | None = None
    v_dim: int = 0  # width of the values; 0: the same as the keys'
    with_lse: bool = False
    lengths: tuple[int, ...] = ()  # lengths of packed sequences; then there is no mask function

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a head of K and V."""
        return self.heads != self.kv_heads

    @property
    def has_empty_rows(self) -> bool:
        """Whether some query sees no key under `causal` and `window`, which is possible if Sq > Sk."""
        return self.sq > self.sk and (self.causal or (self.window is not None and self.sq - self.sk >= self.window))

    @property
    def type_name(self) -> str:
        """The dtype's name, such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    def mask_function(self) -> MaskMod | None:
        """Return the whole mask as one function of indices; None if every query sees every key."""
        if not self.causal and self.window is None:
            return self.mask_mod
        return _mask_function(self.causal, self.window, self.sk - self.sq, self.mask_mod)

    def plain(self) -> Problem | None:
        """Return `plain_or_packed()`, or None if that needs packed sequences."""
        plain = self.plain_or_packed()
        return None if plain is not None and plain.lengths else plain

    def plain_or_packed(self) -> Problem | None:
        """Return the same attention without functions, for kernels that take none; None if it needs its function.

        Documents of equal length become sequences: heads are multiplied, lengths divided. Documents of unequal lengths, or with
        grouped heads, become packed sequences with `lengths`.
        """
        mask_mod: Any = self.mask_mod
        if mask_mod is None or self.score_mod is not None:
            return self if self.score_mod is None else None
        # Masks of kernels are aligned at the last key, mask functions at the first key: they agree only if Sq == Sk.
        if self.sq != self.sk:
            return None
        kind, alone = getattr(mask_mod, "kind", ""), not self.causal and self.window is None
        if mask_mod is causal and alone:
            return replace(self, mask_mod=None, causal=True)
        if kind in ("sliding_window", "nearby") and alone:
            is_causal = kind == "sliding_window"
            window = _limiting_window(mask_mod.window, is_causal, self.sq, self.sk)
            return replace(self, mask_mod=None, causal=is_causal, window=window)
        parts = mask_mod.mods if kind == "both" else (mask_mod,)
        others = [part for part in parts if part is not causal]
        lengths = document_lengths(others[0], self.sq) if len(others) == 1 else ()
        if not lengths:
            return None
        found = replace(self, mask_mod=None, causal=self.causal or len(parts) > 1)
        if self.grouped or not alone or len(set(lengths)) > 1:
            return replace(found, lengths=lengths)
        heads = self.heads * len(lengths)
        return replace(found, heads=heads, kv_heads=heads, sq=lengths[0], sk=lengths[0])


@functools.lru_cache(maxsize=64)  # the same mask gives the same function object, which is the key of its block mask
def _mask_function(is_causal: bool, window: int | None, offset: int, mask_mod: MaskMod | None) -> MaskMod:
    own = causal if window is None else sliding_window(window) if is_causal else nearby(window)
    own = at_offset(own, offset) if offset else own
    return own if mask_mod is None else both(own, mask_mod)


def make_problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    mask_mod: MaskMod | None = None,
    score_mod: ScoreMod | None = None,
    with_lse: bool = False,
) -> Problem:
    """Return the problem of an attention call; if the arguments are wrong, an error says what was given and what is allowed."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor (B, H, S, D); its type is {type(x).__name__}.")
        if x.layout is not torch.strided or x.is_nested:
            raise TypeError(f"{name} must be a dense tensor; it is nested, or has another layout: {x.layout}.")
        if x.dim() != 4:
            raise ValueError(f"{name} must have the four dimensions (B, H, S, D), and has shape {tuple(x.shape)}.")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    batch, heads, sq, head_dim = q.shape
    kv_heads, sk, v_dim = k.shape[1], k.shape[2], v.shape[3]
    if k.shape[:3] != v.shape[:3] or batch != k.shape[0] or head_dim != k.shape[3]:
        alike = "k and v must have the same B, Hkv and Sk of (B, Hkv, Sk, D), and agree in batch size and D with q"
        raise ValueError(f"{alike}: {shapes}.")
    if 0 in k.shape or not heads or not v_dim:
        raise ValueError(f"Sequences, heads, keys and head dimension must not be empty: {shapes}.")
    if heads % kv_heads:
        raise ValueError(f"The heads of q must be a multiple of those of k and v: {shapes}.")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype: {q.dtype}, {k.dtype}, {v.dtype}.")
    if not q.dtype.is_floating_point:
        raise TypeError(f"Attention takes floating-point tensors, and these are {q.dtype}.")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device: {q.device}, {k.device}, {v.device}.")
    for name, flag in (("causal", causal), ("return_lse", with_lse)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False; it is {flag!r}.")
    if window is not None:
        window = _limiting_window(whole_number("window", window), causal, sq, sk)
    for name, mod in (("mask_mod", mask_mod), ("score_mod", score_mod)):
        if mod is not None and (not callable(mod) or mod.__hash__ is None):
            raise TypeError(f"{name} must be None or a hashable function of indices; its type is {type(mod).__name__}.")
    # Do not call the functions under fake tensors and vmap: the caller may count the calls.
    if not torch._C._len_torch_dispatch_stack() and torch._C._functorch.peek_interpreter_stack() is None:
        _try_once(mask_mod, score_mod, q.device, (batch - 1, heads - 1, max(sq - 1, 0), sk))
    scale = head_dim**-0.5 if scale is None else finite_scale(scale)
    if not sq:  # without queries nothing is masked, and no function is called
        causal, window, mask_mod, score_mod = False, None, None, None
    shape = batch, heads, kv_heads, sq, sk, head_dim
    more = needs_autograd(q, k, v) or trains(score_mod), mask_mod, score_mod, v_dim * (v_dim != head_dim), with_lse
    return Problem(*shape, q.dtype, q.device, causal, scale, window, *more)


def _limiting_window(window: int, is_causal: bool, sq: int, sk: int) -> int | None:
    """Return the window, or None if it reaches every key: without a window kernels are faster, and more kernels can do it.

    The last query is sk - 1 positions after the first key. The first query is sq - 1 positions before the last key; under a
    causal mask it does not see that key.
    """
    farthest = sk - 1 if is_causal else max(sq, sk) - 1
    return None if window > farthest else window


def positive_scale(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Return queries and a positive scale for the same scores: some kernels mask, or take the maximum, before they scale."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def finite_scale(scale: float) -> float:
    """Return the scale as a number; raise an error if it is no finite number, or if its gradient would be lost."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        kind = f"{type(scale).__name__} {getattr(scale, 'dtype', '')}"  # NumPy and torch have truth values of their own
        lost = getattr(scale, "requires_grad", False)
        if not (lost or isinstance(scale, (str, bytes)) or "bool" in kind) and math.isfinite(number := float(scale)):
            return number
    raise ValueError(f"scale must be None or a finite number without a gradient (multiply q by one); it is {scale!r}.")


@functools.lru_cache(maxsize=64)  # try new functions only
def _try_once(mask_mod: MaskMod | None, score_mod: ScoreMod | None, device: torch.device, last: tuple) -> None:
    """Call functions for the last query, and raise an error if they raise, or return no mask or no score.

    On a GPU, compiled FlexAttention would read behind the end of a short table, and would take None for no change.
    """
    b, h, query, sk = last
    if mask_mod is not None:
        ends = torch.tensor([query, 0, sk - 1], dtype=torch.int32, device=device)
        evaluate(mask_mod, ends[:1], ends[1:], b, h)
    for part in (score_mod, *getattr(score_mod, "mods", ())):
        if getattr(part, "heads", h + 1) <= h:
            raise ValueError(f"score modifier {name_of(part)} is for {part.heads} heads, and q has {h + 1}.")
    if score_mod is not None:  # at most a million keys: a score that cannot fit is refused later
        modify_scores(score_mod, torch.zeros(1, min(sk, 1 << 20), device=device), b, h, query)


# ---- backends ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Options that only some backends take.

    block_size: (queries, keys) of a block of the block mask. mode: torch.compile's. kernel_options: FlexAttention's.
    tuned: whether the backend may choose kernel options, as under backend="auto".
    """

    block_size: tuple[int, int] | None = None
    mode: str | None = None
    kernel_options: dict | None = None
    tuned: bool = False

    @property
    def option_names(self) -> tuple[str, ...]:
        """The names of the options from the caller."""
        return tuple(x for x in ("block_size", "mode", "kernel_options") if getattr(self, x) is not None)

    @property
    def blocks(self) -> tuple[int, int]:
        """(queries, keys) of a block: the given ones, or 128 x 128."""
        return self.block_size or (128, 128)


NO_OPTIONS = Options()


@dataclass
class Bound:
    """A backend's function for one problem.

    Attributes:
        call: computes attention of q, k, v with the shapes of the problem.
        settings: the settings in force, such as the block size.
        seconds: time of the preparation, such as {"block_mask": 0.02}.
        source: the function that torch.compile compiled, if it did.
        block_mask: FlexAttention's BlockMask, if there is one.
        first: makes the first call in place of `call`, if the library may raise Refused or need a second attempt.
        light: whether it holds no tensor, such as a stored mask; then `attention` may keep it for later calls.
        again: returns, after the first call on q, k, v, a quicker function for tensors with the same strides.
    """

    call: Attend
    settings: dict = field(default_factory=dict)
    seconds: dict = field(default_factory=dict)
    source: Callable | None = None
    block_mask: Any = None
    first: Attend | None = None
    light: bool = False
    again: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Attend] | None = None


@dataclass(frozen=True)
class Backend:
    """A way to compute attention. It has `run` for problems without functions, `bind` for all others, or both.

    Attributes:
        name: its name in `attention(..., backend=name)`.
        summary: half a sentence for tables.
        machine: whether it runs on this machine at all.
        refuses: why it cannot do a problem with these options, a sentence that begins with "it"; "" if it can.
        kernels: regular expression for the names of its GPU kernels: a match proves that it ran.
        bind: returns its function for a problem; may raise Refused.
        run: run(q, k, v, problem) computes a problem in its plain form; `refuses` gets the plain form, too.
        again: again(q, k, v, problem) returns a quicker function for tensors with these strides, or None.
        form: returns a problem's plain form, by `Problem.plain` or `Problem.plain_or_packed`; if that is None, `bind` takes it.
        largest_head: largest head dimension of a GPU kernel for 16-bit tensors and multiples of 8; 0 for all other backends.
        cpu_operators: regular expression for the names of its operators on a CPU.
        implementation: the package and version behind it.
        options: the fields of Options that it takes; any other option is refused.
        returns_lse: whether it can return the log-sum-exp with the output.
        takes_v_dim: whether values may have another width than keys.
        compiles: whether its first call takes seconds, so that `attention` keeps the bound function.
    """

    name: str
    summary: str
    machine: Callable[[], Support]
    refuses: Callable[[Problem, Options], str]
    kernels: str
    bind: Callable[[Problem, Options], Bound] | None = None
    run: Callable[..., Any] | None = None
    again: Callable[..., Attend | None] = lambda q, k, v, problem: None
    form: Callable[[Problem], Problem | None] = Problem.plain
    largest_head: int = 0
    cpu_operators: str = ""
    implementation: Callable[[], str] = lambda: ""
    options: tuple[str, ...] = ()
    returns_lse: bool = False
    takes_v_dim: bool = False
    compiles: bool = False

    def support(self, problem: Problem, options: Options = NO_OPTIONS) -> Support:
        """Whether this machine and this backend can do the problem."""
        for name in options.option_names:
            if name not in self.options:
                return Support(False, f"it takes no {name}, and {getattr(options, name)} was given.")
        if not (machine := self.machine()).ok:
            return machine
        plain = self.form(problem) if self.run else None
        if problem.dtype.itemsize == 1:
            reason = f"it takes no 8-bit numbers, and the tensors are {problem.type_name}: convert them, or use attention_decode."
        elif problem.with_lse and not self.returns_lse:
            reason = "it keeps its log-sum-exp to itself, and return_lse or sink needs it."
        elif problem.v_dim and not self.takes_v_dim:
            reason = f"it takes values as wide as the keys, and these are {problem.v_dim} and {problem.head_dim} wide."
        elif self.largest_head and problem.device.type != "cuda":
            reason = f"it needs an NVIDIA GPU, and the tensors are on {problem.device}."
        elif self.largest_head and problem.dtype not in (torch.float16, torch.bfloat16):
            reason = f"it takes float16 and bfloat16, not {problem.type_name}."
        elif self.largest_head and (problem.head_dim % 8 or problem.head_dim > self.largest_head):
            reason = f"its head dimension is a multiple of 8 up to {self.largest_head}, and {problem.head_dim} is none."
        elif plain is not None or self.bind:
            reason = self.refuses(plain or problem, options)
        elif problem.score_mod is not None:
            reason = f"it takes no score modifier, and {name_of(problem.score_mod)} was given."
        else:
            reason = (
                "it takes causal, sliding_window, documents(span) and both(causal, documents(span)) with as many queries "
                "as keys (documents: as many heads of K as of Q, a span that divides the length), and the mask is "
                f"{name_of(problem.mask_function())}."
            )
        return Support(not reason, reason)

    def bind_problem(self, problem: Problem, options: Options = NO_OPTIONS) -> Bound:
        """Return its function for a problem that it supports; raise Refused if the library refuses only now."""
        plain = self.form(problem) if self.run else None
        if plain is None or self.run is None:
            assert self.bind is not None, "support has said no"
            return self.bind(problem, options)
        call: Attend = functools.partial(self.run, problem=plain)
        settings = {} if plain is problem else describe_plain(problem, plain)
        if plain.sq != problem.sq:  # each call makes the views of documents
            return Bound(on_plain_shapes(problem, plain, call), settings, light=True)
        return Bound(call, settings, light=True, again=lambda q, k, v: self.again(q, k, v, plain) or call)


def on_plain_shapes(problem: Problem, plain: Problem, attend: Attend) -> Attend:
    """Return a function for the shapes of the problem from `attend`, a function for the shapes of the plain problem.

    Q, K and V are copied if they are not contiguous, and the output if its order is not (B, H, S, D).
    """
    if plain.sq == problem.sq:
        return attend

    def attend_documents(q, k, v):
        result = attend(*(x.reshape(plain.batch, -1, plain.sq, x.shape[-1]) for x in (q, k, v)))
        if problem.with_lse:
            return result[0].reshape(q.shape), result[1].reshape(q.shape[:3])
        return result.reshape(*q.shape[:3], -1)

    return attend_documents


def describe_plain(problem: Problem, plain: Problem) -> dict:
    """Return the setting "kernel_mask": the kernel's own mask in place of the problem's mask function."""
    parts = ["causal"] if plain.causal else []
    parts += [f"window {plain.window}"] if plain.window else []
    parts += [f"documents of {plain.sq} as sequences"] if plain.sq != problem.sq else []
    parts += [f"{len(plain.lengths)} packed sequences"] if plain.lengths else []
    return {"kernel_mask": ", ".join(parts) or "no mask"}
