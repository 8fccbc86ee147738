"""One attention call under a mask and a score modifier, on the path that is asked for, compiled once and guarded.

    attend = flex(q, k, v, mask_mod=causal, score_mod=soft_cap(20.0), path="compiled")
    out = attend()                     # on q, k, v; attend(q2, k2, v2) on others of the same shape
    attend.settings                    # what is in force
    attend.seconds                     # {"block_mask": ..., "compile": ...}
    print(attend.generated_code())     # Triton on a GPU, C++ on a CPU

| path | what runs |
|---|---|
| eager | FlexAttention as Python: all scores stored, the mask evaluated for every pair |
| compiled | FlexAttention, one fused kernel made by inductor (Triton on a GPU, C++ on a CPU) |
| cute | FlashAttention 4's CuTe kernel: through FlexAttention's FLASH backend; without FlexAttention, cute_direct |
| cute_direct | the same kernel called by itself, mask and modifier translated to the CuTe DSL |
| gluon | this course's own Hopper kernel, for the masks that it does by itself: `kernel_masks` |
| dense, dense_compiled | matmul, softmax, matmul under a stored mask: the baselines |
| sdpa | scaled_dot_product_attention under a stored mask (is_causal for a plain causal one) |
| auto | the best of the fused ones for this mask: `flex_options.pick` |

A path that cannot do what is asked raises FlexUnsupported, in one sentence that names a path that can.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from utils.attention import masks
from utils.attention.flex_dense import stored_scores
from utils.attention.flex_prepared import Prepared, Recompiled, compiled_versions, own_copy
from utils.attention.flex_support import (
    DEFAULT_TILE,
    MODES,
    PATHS,
    Case,
    FlexUnsupported,
    able_paths,
    path_case,
    support,
)
from utils.attention.kernel_masks import kernel_mask
from utils.attention.masks import MaskMod, block_sizes, build_block_mask, dense_mask, name_of
from utils.attention.request import make_request
from utils.attention.score_mods import ScoreMod

__all__ = [
    "MODES",
    "PATHS",
    "Case",
    "FlexUnsupported",
    "Prepared",
    "Recompiled",
    "able_paths",
    "compiled_versions",
    "flex",
    "needed_kernel_options",
    "own_copy",
    "path_case",
    "support",
]


def flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask_mod: MaskMod | None = None,
    score_mod: ScoreMod | None = None,
    block_size: int | tuple[int, int] | None = None,
    path: str = "auto",
    mode: str | None = None,
    scale: float | None = None,
    kernel_options: dict | None = None,
) -> Prepared:
    """Prepare attention of q (B, H, Sq, D) over k, v (B, Hkv, Sk, D): built, compiled and called once.

    Args:
        mask_mod: (b, h, q, k) -> bool, the same for all batches and heads; query i is compared with key i, so
            causal with Sq < Sk wants masks.at_offset(causal, Sk - Sq).
        score_mod: (score, b, h, q, k) -> score.
        block_size: tokens of a block of the block mask, or (queries, keys); 128, or with path="auto" the best.
        path: one of PATHS, or "auto"; `attend.settings["path"]` says which one.
        mode: torch.compile's mode, of the compiled paths.
        scale: of the scores, 1/sqrt(D) by default.
        kernel_options: FlexAttention's, over those that the block size makes necessary.
    """
    request = make_request(q, k, v, False, scale, None)
    if path != "auto" and path not in PATHS:
        raise ValueError(f"path is {path!r}; it must be auto or one of {', '.join(PATHS)}.")
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode is {mode!r}; it must be None or one of {', '.join(MODES)}.")
    if path == "auto":
        return _automatic(q, k, v, mask_mod, score_mod, block_size, mode, request.scale, kernel_options)
    case = Case(
        q,
        k,
        v,
        mask_mod,
        score_mod,
        block_sizes(128 if block_size is None else block_size),
        mode or "default",
        request.scale,
        kernel_options,
    )
    here = support(path, case)
    if not here:
        raise FlexUnsupported(path, here.reason, able_paths(case, path))
    return _BUILDERS[path](case)


def _automatic(q, k, v, mask_mod, score_mod, block_size, mode, scale, kernel_options) -> Prepared:
    """The best path; where a library refuses when it is called, the next one. `settings` says which and why."""
    from utils.attention.flex_options import pick

    passed_over: list[tuple[str, str]] = []
    while True:
        choice = pick(q, k, v, mask_mod, score_mod, block_size, without=tuple(name for name, _ in passed_over))
        case = Case(
            q,
            k,
            v,
            mask_mod,
            score_mod,
            choice.block_size,
            mode or "default",
            scale,
            kernel_options,
            choice.kernel_options,
        )
        try:
            prepared = _BUILDERS[choice.path](case)
        except FlexUnsupported as error:
            passed_over.append((choice.path, error.reason))
            continue
        prepared.settings |= {"picked_because": choice.why, "passed_over": passed_over}
        return prepared


def needed_kernel_options(block_size: tuple[int, int], lengths: tuple[int, int] = (0, 0)) -> dict:
    """What FlexAttention's Triton kernel has to be told about the blocks of a mask.

    Its tiles must divide the blocks: the tile is named where inductor's own, 128, does not. And it leaves the check
    of the sequence's end out where the lengths are multiples of 128: if they are none of the block size, the last
    block reaches behind the last key, and what lies there in memory would be attended to.
    """
    names: dict = {}
    for name, size in (("BLOCK_M", block_size[0]), ("BLOCK_N", block_size[1])):
        if size % DEFAULT_TILE:
            names[name] = min(size & -size, DEFAULT_TILE)
    names = {"BLOCK_M": DEFAULT_TILE, "BLOCK_N": DEFAULT_TILE} | names if names else {}
    overhang = any(length % size for length, size in zip(lengths, block_size, strict=True))
    return names | {"IS_DIVISIBLE": False} if overhang else names


def _settings(case: Case, path: str, **more) -> dict:
    batch, heads, sq, head_dim = case.q.shape
    return {
        "path": path,
        "mask": name_of(case.mask_mod),
        "score_mod": name_of(case.score_mod),
        "batch": batch,
        "heads": heads,
        "kv_heads": case.k.shape[1],
        "sq": sq,
        "sk": case.k.shape[2],
        "head_dim": head_dim,
        "dtype": str(case.q.dtype).removeprefix("torch."),
        "device": str(case.device),
        "scale": case.scale,
        **more,
    }


def _block_mask(case: Case):
    """(block mask, seconds that building it took)."""
    arguments = (case.mask_mod, *case.lengths, case.device, case.block_size)
    return build_block_mask(*arguments), masks.block_mask_seconds(*arguments)


def _flex_call(case: Case, block_mask, options: dict | None) -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    modifier, scale, grouped = case.score_mod, case.scale, case.grouped

    def attend(q, k, v):
        return flex_attention(
            q, k, v, score_mod=modifier, block_mask=block_mask, scale=scale, enable_gqa=grouped, kernel_options=options
        )

    return own_copy(attend)


def _compile(function: Callable, mode: str) -> Callable:
    return torch.compile(function, fullgraph=True, dynamic=False, mode=None if mode == "default" else mode)


def _eager(case: Case) -> Prepared:
    block_mask, seconds = _block_mask(case)
    return Prepared(
        _flex_call(case, block_mask, None),
        (case.q, case.k, case.v),
        _settings(
            case,
            "eager",
            implementation=f"FlexAttention of torch {torch.__version__}, eager",
            block_size=case.block_size if case.mask_mod else None,
        ),
        {"block_mask": seconds},
        block_mask=block_mask,
    )


def _compiled(case: Case, path: str = "compiled", backend: dict | None = None) -> Prepared:
    block_mask, seconds = _block_mask(case)
    options = dict(backend or {})
    if backend is None and case.device.type == "cuda" and case.mask_mod is not None:
        options = needed_kernel_options(case.block_size, case.lengths)
    given = case.kernel_options or {}
    told = "FLASH backend" if backend else "compiled"

    def prepare(options: dict) -> Prepared:
        attend = _flex_call(case, block_mask, options or None)
        return Prepared(
            _compile(attend, case.mode),
            (case.q, case.k, case.v),
            _settings(
                case,
                path,
                implementation=f"FlexAttention of torch {torch.__version__}, {told}",
                block_size=case.block_size if case.mask_mod else None,
                mode=case.mode,
                kernel_options=options,
            ),
            {"block_mask": seconds},
            source=attend,
            block_mask=block_mask,
        )

    return _in_shared_memory(prepare, options | (case.own_options or {}) | given, given)


def _in_shared_memory(prepare: Callable[[dict], Prepared], options: dict, given: dict) -> Prepared:
    """Prepared with these options, or with fewer stages if the kernel needs more shared memory than there is.

    Tensors that a mask or a modifier reads go through the pipeline too, and inductor does not count them when it
    chooses the stages. What the caller gave is not changed.
    """
    fewer = [n for n in (2, 1) if n < options.get("num_stages", 3) and "num_stages" not in given]
    first = None
    for attempt in (options, *(options | {"num_stages": n} for n in fewer)):
        try:
            return prepare(attempt)
        except RuntimeError as error:
            if "out of resource" not in str(error):
                raise
            first = first or error
    raise first


def _cute(case: Case) -> Prepared:
    if not masks.has_flex():
        return _cute_direct(case, "cute")
    try:
        return _compiled(case, "cute", {"BACKEND": "FLASH"})
    except (RuntimeError, NotImplementedError) as error:  # what the backend cannot do it says when it compiles
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        able = tuple(path for path in able_paths(case, "cute") if path != "cute")
        raise FlexUnsupported("cute", f"was refused by FlexAttention's FLASH backend ({reason[:300]})", able) from error


def _cute_direct(case: Case, path: str = "cute_direct") -> Prepared:
    from importlib import metadata

    from utils.attention.cute_mods import bind

    began = time.perf_counter()
    call, native = bind(case)
    masks._synchronize(case.device)
    seconds = time.perf_counter() - began
    blocks = None if native else case.block_size

    return Prepared(
        call,
        (case.q, case.k, case.v),
        _settings(
            case,
            path,
            implementation=f"flash-attn-4 {metadata.version('flash-attn-4')}, directly",
            block_size=blocks,
            kernel_mask=str(native) if native else None,
        ),
        {"block_mask": seconds},
    )


def _gluon(case: Case) -> Prepared:
    from utils.attention.gluon.launch import forward

    mask, scale = kernel_mask(case.mask_mod, *case.lengths, documents=True), case.scale
    batch, _, _, head_dim = case.q.shape

    def attend(q, k, v):
        shape = q.shape
        if mask.span is not None:  # a view: each document of a head is a head of its own
            q, k, v = (x.reshape(batch, -1, mask.span, head_dim) for x in (q, k, v))
        return forward(q, k, v, causal=mask.causal, window=mask.window, scale=scale).view(shape)

    return Prepared(
        attend,
        (case.q, case.k, case.v),
        _settings(
            case, "gluon", implementation="the course's Gluon kernel, step 5", block_size=None, kernel_mask=str(mask)
        ),
        {"block_mask": 0.0},
    )


def _stored_mask(case: Case) -> tuple[torch.Tensor | None, float]:
    began = time.perf_counter()
    allowed = None if case.mask_mod is None else dense_mask(case.mask_mod, *case.lengths, case.device)
    masks._synchronize(case.device)
    return allowed, time.perf_counter() - began


def _dense(case: Case, path: str = "dense") -> Prepared:
    allowed, seconds = _stored_mask(case)
    modifier, scale = case.score_mod, case.scale

    def attend(q, k, v):
        return stored_scores(q, k, v, allowed, modifier, scale)

    settings = _settings(case, path, implementation=f"matmul, softmax, matmul of torch {torch.__version__}")
    inputs, spent = (case.q, case.k, case.v), {"mask": seconds}
    if path == "dense":
        return Prepared(attend, inputs, settings, spent)
    attend = own_copy(attend)
    return Prepared(_compile(attend, case.mode), inputs, settings | {"mode": case.mode}, spent, source=attend)


def _sdpa(case: Case) -> Prepared:
    native = case.mask_mod is masks.causal and case.lengths[0] == case.lengths[1]
    allowed, seconds = (None, 0.0) if native else _stored_mask(case)
    scale, grouped = case.scale, case.grouped

    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, is_causal=native, scale=scale, enable_gqa=grouped
        )

    return Prepared(
        attend,
        (case.q, case.k, case.v),
        _settings(
            case,
            "sdpa",
            implementation=f"SDPA of torch {torch.__version__}, its own choice",
            stored_mask=not native and case.mask_mod is not None,
        ),
        {"mask": seconds},
    )


_BUILDERS = {
    "eager": _eager,
    "compiled": _compiled,
    "cute": _cute,
    "cute_direct": _cute_direct,
    "gluon": _gluon,
    "dense": _dense,
    "dense_compiled": lambda case: _dense(case, "dense_compiled"),
    "sdpa": _sdpa,
}
