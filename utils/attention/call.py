"""The door to attention: a plain call, a prepared call, and the record of the backend that ran.

out = attention(q, k, v, causal=True)            # "auto": the best backend that can do it
last_run().backend                               # which backend that was
attend = prepare(q, k, v, mask_mod=mask)         # bound, compiled and run once; attend() is guarded
for row in backend_table(): print(row)           # which backends run on this machine
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace

import torch

from utils.attention.backends import BACKENDS, able_backends, find_backend
from utils.attention.choosing import rank_backends
from utils.attention.masks.blocks import BlockSize, block_sizes
from utils.attention.masks.mask_mods import MaskMod, captures
from utils.attention.masks.mask_mods import causal as causal_mask
from utils.attention.masks.score_mods import ScoreMod, trains
from utils.attention.prepared import MODES, Prepared, compiled_graphs, compiled_versions
from utils.attention.problem import (
    NO_OPTIONS,
    AttentionUnsupported,
    Backend,
    Bound,
    Options,
    Problem,
    Refused,
    make_problem,
)
from utils.attention.sequences import both_masks, check_tensor, clear_behind, packed_mask, padded_mask
from utils.benchmark.profiling import launched
from utils.kernels.handle import CALLS, layout, needs_autograd
from utils.newest import Newest

# With more than eight versions, a function of torch.compile would silently run unfused, fifty times slower. `attention` may call
# its kept functions with many layouts: allow more versions, and raise an error beyond these.
_MANY_VERSIONS = {"recompile_limit": 256, "accumulated_recompile_limit": 1024, "fail_on_recompile_limit_hit": True}

_compiled: Newest[tuple[str, Problem, tuple], Bound] = Newest(256)
_last: Run | None = None


@dataclass(frozen=True)
class Run:
    """The record of one attention call.

    Attributes:
        backend: the name of the backend that ran.
        problem: the problem that it solved.
        passed_over: (name, reason) of the better backends that could not do it ("auto").
        why: why "auto" took the backend; "" for a backend that the caller named.
    """

    backend: str
    problem: Problem
    passed_over: tuple[tuple[str, str], ...] = ()
    why: str = ""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    mask_mod: MaskMod | None = None,
    score_mod: ScoreMod | None = None,
    seqlens: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
):
    """Compute attention of q (B, H, Sq, D) over k and v (B, Hkv, Sk, D): the output (B, H, Sq, D).

    With grouped heads, head h of q reads head h * Hkv // H of k and v. `last_run()` says which backend ran.

    Args:
        q: queries (B, H, Sq, D).
        k: keys (B, Hkv, Sk, D).
        v: values (B, Hkv, Sk, D).
        causal: query i sees keys up to i + Sk - Sq, so the last query sees the last key.
        scale: of the scores, 1/sqrt(D) by default.
        window: a query sees only keys fewer than this many positions away (causal: its own and those before).
        mask_mod: (b, h, q, k) -> bool, True where query q of sequence b and head h sees key k. It compares index with
            index: for Sq < Sk, masks.at_offset(mask, Sk - Sq) aligns the last query with the last key. Pass the same
            function object at each call: each new object is compiled anew.
        score_mod: (score, b, h, q, k) -> score, applied before the softmax.
        seqlens: number of keys of each sequence, (B,) int32; no query sees later keys. The last query is at a sequence's
            last key, as in `attention_decode`. Reading the numbers waits for the GPU.
        cu_seqlens: first tokens of packed sequences, int32 from 0 to Sq. A sequence sees only itself.
        sink: (H,), a score of each head that takes its share of the softmax and adds nothing to the output (gpt-oss).
        return_lse: return (output, log-sum-exp): the logarithm of the sum of exp(score) of each query (B, H, Sq) in fp32,
            minus infinity for a query that sees nothing; the sink is part of the sum.
        backend: a name in BACKENDS, or "auto". A backend that cannot do this raises AttentionUnsupported and names
            those that can.
    """
    global _last
    if torch.compiler.is_exporting() and any(x is not None for x in (mask_mod, score_mod, seqlens, cu_seqlens)):
        raise TypeError("torch.export traces no masks, modifiers or lengths: export a call without them.")
    compiling = torch.compiler.is_dynamo_compiling()  # `is_compiling` is also true while another thread compiles
    if compiling or seqlens is not None or cu_seqlens is not None or sink is not None:
        given: dict = dict(causal=causal, scale=scale, window=window, mask_mod=mask_mod, score_mod=score_mod)
        given |= dict(return_lse=return_lse, backend=backend)
        if not compiling:
            return _compose(q, k, v, seqlens, cu_seqlens, sink, given)
        # The decision is Python code, and no graph can hold it.
        from utils.attention.uncompiled import call_outside_of_graphs

        return call_outside_of_graphs(attention, q, k, v, seqlens=seqlens, cu_seqlens=cu_seqlens, sink=sink, **given)
    key = _key(q, k, v, causal, scale, window, mask_mod, score_mod, return_lse, backend)
    if key is not None and (kept := CALLS.get(key)) is not None:
        again, run, graphs = kept
        if graphs is None or graphs == compiled_graphs():
            try:
                out, _last = again(q, k, v), run
                return out
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                pass  # the full decision below says which backend refuses and why; "auto" then tries the next backend
        CALLS.pop(key, None)  # another thread may have removed it
    functions: dict = {"mask_mod": mask_mod, "score_mod": score_mod}
    problem = make_problem(q, k, v, causal=causal, scale=scale, window=window, **functions, with_lse=return_lse)
    refusals: dict[str, str] = {}
    read = captures(mask_mod)
    while True:
        chosen, options, run = _choose(problem, NO_OPTIONS, backend, refusals)
        try:
            kept = chosen.name, problem, read
            bound = _compiled.get(kept) or chosen.bind_problem(problem, options)
            if chosen.compiles:
                if kept not in _compiled and len(_compiled) == _compiled.most:
                    CALLS.clear()  # otherwise its decisions would keep the block mask of a dropped function alive
                _compiled[kept] = bound
            with torch._dynamo.config.patch(_MANY_VERSIONS) if bound.source else nullcontext():
                out = (bound.first or bound.call)(q, k, v)
            break
        except Refused as refusal:  # some libraries refuse only when they are called
            refusals[chosen.name] = str(refusal)
    bound.first, _last = None, run
    if key is not None and _may_be_kept(bound):
        graphs = None if bound.source is None else compiled_graphs()  # counting them imports Triton
        # The number of graphs is not in the key, so each call compares it: after further compilations a call is decided anew,
        # and an eager fallback is an error there.
        CALLS[key] = bound.call if bound.again is None else bound.again(q, k, v), run, graphs
    return out


def _compose(q, k, v, seqlens, cu_seqlens, sink, arguments: dict):
    """Compute attention with lengths as a mask, and apply the sink to the output of an attention without a sink."""
    make_problem(q, k, v, causal=arguments["causal"], window=arguments["window"], with_lse=arguments["return_lse"])
    if seqlens is not None and cu_seqlens is not None:
        raise ValueError("seqlens and cu_seqlens were both given: sequences are padded, or packed.")
    mask = None
    if seqlens is not None:
        mask = padded_mask(q, k, seqlens, arguments["causal"], arguments["window"])
        k, v = clear_behind(seqlens, k, v)
        arguments |= {"causal": False, "window": None}
    elif cu_seqlens is not None:
        mask = packed_mask(q, k, cu_seqlens)
        if arguments["causal"] and arguments["window"] is None:
            mask, arguments["causal"] = both_masks(causal_mask, mask), False  # kernels know this form
    if mask is not None:
        arguments["mask_mod"] = both_masks(mask, given) if (given := arguments["mask_mod"]) is not None else mask
    if sink is None:
        return attention(q, k, v, **arguments)
    types = dict.fromkeys((torch.float32, q.dtype))
    check_tensor("sink", sink, (q.shape[1],), q.device, *types)  # it has a score for each head
    out, lse = attention(q, k, v, **(arguments | {"return_lse": True}))
    # A sink of minus infinity becomes the least number, so that rows without a key stay at zero.
    score = sink.float()[:, None].clamp(min=torch.finfo(torch.float32).min)
    # The sink scales each weight by exp(lse) / (exp(lse) + exp(sink)).
    out = (out * torch.sigmoid(lse - score)[..., None]).to(out.dtype)
    return (out, torch.logaddexp(lse, score)) if arguments["return_lse"] else out


def _key(q, k, v, causal, scale, window, mask_mod, score_mod, return_lse, backend) -> tuple | None:
    """Return the key of a call: everything that decides its backend and its launch. None: the call must be decided anew.

    Arguments of unusual types have no key: True and 1 would be equal keys, and 1 is no legal value of `causal`.
    """
    if not q.__class__ is k.__class__ is v.__class__ is torch.Tensor:
        return None
    if not causal.__class__ is return_lse.__class__ is bool:
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return None  # tensors of fake modes and of vmap have no memory for a kernel
    if scale.__class__ not in _NUMBERS or window.__class__ not in _WHOLE_NUMBERS:
        return None
    try:
        hash((mask_mod, score_mod, backend))
        functions = mask_mod, score_mod, mask_mod is not None and captures(mask_mod)
        grad = needs_autograd(q, k, v), trains(score_mod)
        return backend, causal, scale, window, functions, return_lse, grad, layout(q, k, v)
    except (RuntimeError, TypeError):
        return None  # sparse and nested tensors have no strides; they are refused later, like arguments without a hash


_NUMBERS, _WHOLE_NUMBERS = (float, int, type(None)), (int, type(None))


def _may_be_kept(bound: Bound) -> bool:
    """Whether a later call may use `bound.call` without a new decision.

    A compiled function may be used again while it has fewer versions than torch.compile allows: then a call that needs a
    new version compiles it, and does not silently run unfused. The number of graphs shows the compilation.
    """
    if bound.source is None:
        # A function in _compiled may hold a mask, because it is alive anyway.
        return bound.light or any(bound is kept for kept in _compiled.values())
    return compiled_versions(bound.source) < torch._dynamo.config.recompile_limit


def _choose(problem: Problem, given: Options, name: str, refusals: dict[str, str]) -> tuple[Backend, Options, Run]:
    """Return the backend `name`, or the best that does not refuse ("auto"), its options and the record of the call.

    Args:
        problem: the problem.
        given: the options of the caller.
        name: a backend or "auto".
        refusals: {backend: reason} of the libraries that have refused when they were called.
    """
    auto = name == "auto"
    ranking = rank_backends(problem, given) if auto else {find_backend(name).name: ""}
    options = replace(given, tuned=True) if auto else given
    passed_over: list[tuple[str, str]] = []
    for candidate, why in ranking.items():
        chosen = find_backend(candidate)
        support = chosen.support(problem, options)
        reason = refusals.get(candidate, "" if support.ok else support.reason)
        if not reason:
            return chosen, options, Run(candidate, problem, tuple(passed_over), why)
        passed_over.append((candidate, reason))
    last, reason = passed_over[-1]
    if auto:
        reason = f"no backend in its order can do this; {last} says: {reason}"
    others = able_backends(problem, given)
    if not others and given.option_names:
        others = able_backends(problem)
        reason = f"{reason.rstrip('.')}, and no other backend can do it with {' and '.join(given.option_names)} given"
    raise AttentionUnsupported(name, reason, tuple(other for other in others if other != name))


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    mask_mod: MaskMod | None = None,
    score_mod: ScoreMod | None = None,
    backend: str = "auto",
    block_size: BlockSize | None = None,
    mode: str | None = None,
    kernel_options: dict | None = None,
) -> Prepared:
    """Prepare attention of q (B, H, Sq, D) over k, v (B, Hkv, Sk, D): bind a backend, compile it and call it once.

    Some backends take further arguments: `block_size`, the tokens of a block of the block mask, or (queries, keys), 128 by
    default; torch.compile's `mode`; and FlexAttention's `kernel_options`, which replace the options for the block size. With
    backend="auto", `settings["backend"]` of the result names the backend, and `settings["picked_because"]` says why.
    """
    problem = make_problem(q, k, v, causal=causal, scale=scale, window=window, mask_mod=mask_mod, score_mod=score_mod)
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode is {mode!r}; it must be None or one of {', '.join(MODES)}.")
    given = Options(None if block_size is None else block_sizes(block_size), mode, kernel_options)
    refusals: dict[str, str] = {}
    while True:
        chosen, options, run = _choose(problem, given, backend, refusals)
        settings: dict = {"backend": chosen.name, "implementation": chosen.implementation()}
        if backend == "auto":
            settings |= {"picked_because": run.why, "passed_over": list(run.passed_over)}
        try:
            return Prepared(chosen.bind_problem(problem, options), problem, (q, k, v), settings)
        except Refused as refusal:
            refusals[chosen.name] = str(refusal)


def last_run() -> Run | None:
    """Return the record of the last `attention` call of this process; None before the first."""
    return _last


def record_run(run: Run) -> None:
    """Set the record for `last_run`, after an attention that `attention` has not computed."""
    global _last
    _last = run


def backend_table() -> list[dict]:
    """Return a row for each backend: backend, summary, ok, reason, remedy and implementation on this machine."""
    rows = []
    for found in map(find_backend, BACKENDS):
        support = found.machine()
        made = {"implementation": found.implementation() if support else ""}
        rows.append({"backend": found.name, "summary": found.summary} | asdict(support) | made)
    return rows


def proof(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments) -> list[str]:
    """Return the launched kernels (CPU: operators) that prove that a backend computed this call; empty if none do."""
    found = find_backend(name)
    launches = launched(lambda: attention(q, k, v, backend=name, **arguments))
    pattern, names = (found.kernels, launches.kernels) if q.is_cuda else (found.cpu_operators, launches.operators)
    return [launch for launch in names if pattern and re.search(pattern, launch)]
