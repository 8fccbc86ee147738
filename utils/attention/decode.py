"""Attention of a few new tokens over a cache: sequences of different lengths, and caches in pages.

    out = attention_decode(q, keys, values, seqlens=lengths)                           # (B, Hkv, S, D), filled so far
    out = attention_decode(q, keys, values, seqlens=lengths, block_table=table)        # (P, Hkv, page, D)
    out = attention_decode(q, keys, values, kv_scales=scales)                          # keys, values in float8_e4m3fn
    last_run().backend                                                                 # which backend that was

If all sequences fill the cache, `attention(q, k, v, causal=True)` computes the same. On a Hopper GPU both run the decode
kernel of `utils/attention/gluon/decode`. On other machines the cache is gathered and masked for torch's
`scaled_dot_product_attention`. This works everywhere, but copies a cache in pages at every call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from utils.attention.backends import find_backend
from utils.attention.backends.sdpa import separate_rows
from utils.attention.call import Run, record_run
from utils.attention.problem import AttentionUnsupported, Problem, finite_scale, make_problem
from utils.attention.reference import reference
from utils.attention.sequences import check_tensor, clear_behind, mask_by_ends, read_lengths
from utils.machine.device import Support
from utils.newest import Newest

BACKENDS = ("gluon", "sdpa")  # in the order in which "auto" tries them


# The decision for arguments of some shapes: the record, and the kernel's entry for Gluon. A decode step takes microseconds.
_decided: Newest[tuple, tuple[Run, Callable[..., torch.Tensor] | None]] = Newest(512)


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute attention of the newest tokens q (B, H, Sq, D) over a cache: the output (B, H, Sq, D).

    The cache already holds the new tokens, and the last query of a sequence is at its last key: with `seqlens`, query i of
    sequence b is at position seqlens[b] - Sq + i. The cache after a sequence's last key never enters a result, so it may be
    uninitialized. A query that sees no key gets zeros.

    Args:
        q: queries (B, H, Sq, D).
        k_cache: keys (B, Hkv, S, D); with a block table pages of keys (P, Hkv, page, D). Any strides, so a cache
            (B, S, Hkv, D) or (P, page, Hkv, D) goes in as `cache.transpose(1, 2)`, without a copy.
        v_cache: values, of the same shape.
        seqlens: tokens of each sequence in the cache, the new ones included: (B,) int32 on the device of q. None: the
            whole cache. Its numbers are checked on a CPU only: reading them would wait for a GPU.
        block_table: (B, pages) int32: numbers of the pages with a sequence's tokens 0 .. page - 1, page .. 2 page - 1, ...
            Entries behind the sequence's last page may be anything. Checked on a CPU only. Needs `seqlens`.
        kv_scales: required for a cache in float8_e4m3fn, and only for it: (2, Hkv) fp32, a factor for the keys and a factor
            for the values of each head. The keys and values are the cache's numbers times these factors.
        causal: whether a query sees keys up to its own position only.
        scale: of the scores, 1/sqrt(D) by default.
        window: a query sees only keys fewer than this many positions away (causal: its own and those before).
        backend: "gluon", "sdpa", or "auto": gluon where it can, else sdpa.
    """
    if scale is not None and scale.__class__ is not float:
        scale = finite_scale(scale)  # the value of a tensor may change before the next call
    given = q, k_cache, v_cache, seqlens, block_table, kv_scales, causal, scale, window, backend
    needs_autograd = torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad)
    if torch.compiler.is_compiling() and not needs_autograd:
        return _attention_decode_whole(*given)
    return _decode(*given)


def _decode(q, k_cache, v_cache, seqlens, block_table, kv_scales, causal, scale, window, backend: str) -> torch.Tensor:
    """Compute `attention_decode` by the decision for arguments of these shapes, strides and types."""
    tensors = q, k_cache, v_cache, seqlens, block_table, kv_scales
    key = (*map(_kind, tensors), causal, scale, window, backend, torch.is_grad_enabled())
    if (decision := _decided.get(key)) is None:
        decision = _decided[key] = _decide(*tensors, causal, scale, window, backend)
    run, decode = decision
    more = {"seqlens": seqlens, "block_table": block_table, "kv_scales": kv_scales}
    if decode is not None:
        out = decode(q, k_cache, v_cache, causal=causal, scale=run.problem.scale, window=window, **more)
    else:
        k_cache, v_cache = _in_one_piece(k_cache, v_cache, seqlens, block_table, kv_scales, q.dtype)
        out = _masked(run.problem, q, k_cache, v_cache, seqlens)
    record_run(run)
    return out


@torch.library.custom_op("labs::attention_decode_whole", mutates_args=())
def _attention_decode_whole(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens: torch.Tensor | None,
    block_table: torch.Tensor | None,
    kv_scales: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    window: int | None,
    backend: str,
) -> torch.Tensor:
    """Compute `attention_decode` as one operator: torch.compile cannot trace the choice of a backend, and need not."""
    given = q, k_cache, v_cache, seqlens, block_table, kv_scales, causal, scale, window, backend
    return _decode(*given).contiguous()


@_attention_decode_whole.register_fake
def _attention_decode_shape(q, _keys, v_cache, *_given) -> torch.Tensor:
    return q.new_empty((*q.shape[:3], v_cache.shape[3]))


def _kind(x) -> object:
    return (x.shape, x.stride(), x.dtype, x.device, x.requires_grad) if isinstance(x, torch.Tensor) else type(x)


def _decide(q, k_cache, v_cache, seqlens, block_table, kv_scales, causal, scale, window, backend: str) -> tuple:
    """Check the arguments and choose the backend."""
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"There is no decode backend {backend!r}; choose one of {', '.join(BACKENDS)}, or auto.")
    problem = _check(q, k_cache, v_cache, seqlens, block_table, kv_scales, causal, scale, window)
    able = gluon_takes(problem, k_cache if block_table is not None else None, fp8=kv_scales is not None)
    if backend == "gluon" and not able:
        raise AttentionUnsupported("gluon", able.reason, ("sdpa",))
    if backend == "sdpa" or not able:
        return Run("sdpa", problem, (("gluon", able.reason),) if backend == "auto" else ()), None
    from utils.attention.gluon.decode.launch import decode

    return Run("gluon", problem), decode


def gluon_takes(problem: Problem, pages: torch.Tensor | None = None, fp8: bool = False) -> Support:
    """Whether the Gluon decode kernel runs here and takes this problem; pages: the keys, if they are in pages."""
    from utils.attention.gluon.decode.plan import refuse

    whole = find_backend("gluon").support(problem)
    if not whole:
        return whole
    page = None if pages is None else pages.shape[2]
    group = problem.heads // problem.kv_heads
    reason = refuse(group, problem.sq, problem.batch, page, problem.head_dim, fp8)
    return Support(not reason, reason)


def gather_pages(cache: torch.Tensor, block_table: torch.Tensor, seqlens: torch.Tensor) -> torch.Tensor:
    """Copy a cache in pages (P, Hkv, page, D) to (B, Hkv, pages x page, D). Invalid entries of the table read page 0."""
    pages, kv_heads, page, head_dim = cache.shape
    valid = (block_table >= 0) & (block_table < pages)
    if cache.device.type == "cpu":
        used = torch.arange(block_table.shape[1], device=cache.device) * page < seqlens[:, None]
        if len(wrong := block_table[used & ~valid]):
            raise ValueError(f"block_table has {wrong[0]} where a sequence has tokens; pages are 0 to {pages - 1}.")
    numbers = torch.where(valid, block_table, 0).long()
    gathered = cache[numbers.flatten()].view(*numbers.shape, kv_heads, page, head_dim)
    return gathered.transpose(1, 2).reshape(len(numbers), kv_heads, -1, head_dim)


def _in_one_piece(k_cache, v_cache, seqlens, block_table, kv_scales, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return keys and values (B, Hkv, S, D). An fp8 cache is multiplied by its scales and rounded once, to `dtype`."""
    caches = [k_cache, v_cache]
    if kv_scales is not None:
        caches = [(x.to(kv_scales.dtype) * s[:, None, None]).to(dtype) for x, s in zip(caches, kv_scales, strict=True)]
    return caches if block_table is None else [gather_pages(x, block_table, seqlens) for x in caches]


def decode_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    **arguments,
) -> torch.Tensor:
    """Return the output of `attention_decode` in float64, sequence by sequence, for the same arguments.

    Every number of a cache with scales is multiplied before anything is rounded.
    """
    if kv_scales is not None:
        q, kv_scales = q.double(), kv_scales.double()
    k_cache, v_cache = _in_one_piece(k_cache, v_cache, seqlens, block_table, kv_scales, torch.float64)
    lengths = [k_cache.shape[2]] * len(q) if seqlens is None else seqlens.tolist()
    out = torch.zeros((*q.shape[:3], v_cache.shape[3]), dtype=torch.float64, device=q.device)
    for b, length in enumerate(lengths):
        if length > 0:
            sequence = (x[b : b + 1, :, :length] for x in (k_cache, v_cache))
            out[b] = reference(q[b : b + 1], *sequence, **{"causal": True, **arguments})[0]
    return out


def _masked(problem: Problem, q, k_cache, v_cache, seqlens) -> torch.Tensor:
    """Compute attention by torch, over a cache in one piece and with a mask (B, 1, Sq, S)."""
    sequences, queries, keys = (torch.arange(n, device=q.device) for n in (len(q), problem.sq, k_cache.shape[2]))
    lengths = torch.full_like(sequences, len(keys)) if seqlens is None else seqlens
    see = mask_by_ends(lengths, problem.sq, problem.causal, problem.window)
    visible = see(sequences[:, None, None, None], None, queries[:, None], keys)
    if seqlens is not None:
        if q.device.type == "cpu":
            read_lengths(seqlens, len(keys))
        k_cache, v_cache = clear_behind(seqlens, k_cache, v_cache)
    out = F.scaled_dot_product_attention(
        separate_rows(q), k_cache, v_cache, attn_mask=visible, scale=problem.scale, enable_gqa=problem.grouped
    )
    return torch.where(visible.any(-1, keepdim=True), out, 0)


def _check(q, k_cache, v_cache, seqlens, block_table, kv_scales, causal, scale, window) -> Problem:
    """Check the arguments, and return the problem of sequences that fill the cache."""
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(
                f"{name} must have four dimensions (q: B, H, Sq, D; cache: P, Hkv, page, D); it is {shape}."
            )
    keys, values = k_cache, v_cache
    if kv_scales is not None or torch.float8_e4m3fn in (keys.dtype, values.dtype):
        if not keys.dtype == values.dtype == torch.float8_e4m3fn:
            raise TypeError(
                f"kv_scales go with keys and values in float8_e4m3fn; they are {keys.dtype} and {values.dtype}. Leave "
                "kv_scales out, or convert both."
            )
        if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(f"with a cache in float8_e4m3fn, q is float16, bfloat16 or float32; it is {q.dtype}.")
        check_tensor("kv_scales", kv_scales, (2, keys.shape[1]), q.device, torch.float32)
        if not kv_scales.is_contiguous():
            raise ValueError("kv_scales must be contiguous, which kv_scales.contiguous() is.")
        # Give the cache the queries' type; nothing is allocated.
        keys, values = (q.new_empty(()).expand(x.shape) for x in (keys, values))
    if block_table is not None:
        check_tensor("block_table", block_table, (len(q), "pages"), q.device)
        if seqlens is None:
            raise ValueError("block_table was given without seqlens: say how many tokens each sequence has.")
        if not len(keys):
            raise ValueError(f"k_cache has no pages: its shape (P, Hkv, page, D) is {tuple(keys.shape)}.")
        if keys.shape != values.shape:
            shapes = f"{tuple(keys.shape)} and {tuple(values.shape)}"
            raise ValueError(f"k_cache and v_cache must have the same shape (P, Hkv, page, D): {shapes}.")
        slots = block_table.shape[1] * keys.shape[2]
        # Take the shapes of a cache in one piece; nothing is read or allocated.
        keys, values = (x[:1, :, :1].expand(len(q), -1, slots, -1) for x in (keys, values))
    problem = make_problem(q, keys, values, causal=causal, scale=scale, window=window)
    if problem.needs_autograd:
        raise ValueError(
            "attention_decode has no backward pass, and an input requires a gradient: use torch.no_grad()."
        )
    if seqlens is not None:
        check_tensor("seqlens", seqlens, (len(q),), q.device)
    return problem
