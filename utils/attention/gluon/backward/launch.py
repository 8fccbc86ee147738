"""Run a step of the backward ladder on tensors (B, H, S, D) of a Hopper GPU.

    out, lse = forward(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = backward(dout, q, k, v, out, lse, causal=True)

A pass has three kernels: `start_backward` (delta, and zeros for the sums of dQ), the kernel of the step, and `finish_backward`.
Each may begin while the kernel before it ends. In deterministic mode and at head dimension 256 the kernel of `dq.py` comes second.
"""

from __future__ import annotations

import operator

import torch

from utils.attention.gluon.arguments import make_addressable, processors
from utils.attention.gluon.backward.arguments import Gradients, launches, run
from utils.attention.gluon.backward.order import Order, best_order, blocks_of
from utils.attention.gluon.backward.plan import plan_for, span
from utils.kernels.handle import CALLS, empty, form, start


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    dlse: torch.Tensor | None = None,
    deterministic: bool = False,
    step: int = 6,
    lengths: tuple[int, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v.

    Args:
        dout: Gradient of the output (B, H, Sq, D).
        q: Queries (B, H, Sq, D), fp16 or bf16.
        k: Keys (B, Hkv, Sk, D); H is a multiple of Hkv.
        v: Values (B, Hkv, Sk, D).
        out: The forward's output (B, H, Sq, D).
        lse: The forward's log-sum-exp (B, H, Sq), fp32, natural logarithm.
        causal: Whether a query sees keys up to its own position only.
        scale: Factor of the scores, 1/sqrt(D) by default.
        window: A query sees keys fewer positions away than this; None: all keys.
        dlse: Gradient of the log-sum-exp, if it was used too.
        deterministic: Whether the same inputs must give the same bits; then `dq.py` computes dQ.
        step: The kernel of the ladder: 1, 3 or 6, the fastest.
        lengths: Lengths of packed sequences, for head dimensions up to 128, not in deterministic mode.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return gradients(dout, dlse, q, k, v, out, lse, (causal, scale, window or 0, deterministic, lengths), step)


def gradients(dout, dlse, q, k, v, out, lse, problem: tuple[bool, float, int, bool, tuple[int, ...]], step=6):
    """Compute `backward`, with all arguments given, by the launches of an earlier call with such tensors, if there was one.

    problem: causal, scale, window, deterministic, lengths.
    """
    given = dout, q, k, v, out, lse, lse if dlse is None else dlse
    shapes = q.shape, k.shape, v.shape, q.dtype, q.device, lse.dtype, lse.is_contiguous()
    strides = q.stride(), k.stride(), v.stride(), out.stride(), dout.stride()
    key = "backward", problem, step, shapes, strides, dlse is None or (dlse.dtype, dlse.is_contiguous())
    # The key does not have the addresses of the tensors, so each call checks their alignment.
    a, b, c, d, e, f, g = addresses = [x.data_ptr() for x in given]
    kept = CALLS.get(key)
    if kept is not None and (a | b | c | d | e | f | g) % 16 == 0:
        made = empty(kept[1], q.device.index)
    else:
        fit = [x.contiguous() if step == 1 else make_addressable(x) for x in given[:5]]
        fit += [x.float().contiguous() for x in given[5:]]
        if any(map(operator.is_not, fit, given)):  # TMA needed copies of some tensors
            dout, q, k, v, out, lse, seventh = fit
            return gradients(dout, None if dlse is None else seventh, q, k, v, out, lse, problem, step)
        if not q.numel():
            # The results are contiguous like all others: torch.compile checks the layout that the operator promises.
            return q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        with torch.cuda.device(q.device if q.is_cuda else -1):
            handles, made = _prepare(dout, q, k, v, out, lse, dlse, problem, step)
        if handles[0] is None:  # the simulator has run the kernels
            return tuple(made[:3])
        kept = CALLS[key] = handles, form(*made)
    start(kept[0], (*addresses, *[x.data_ptr() for x in made]))
    return tuple(made[:3])


def _prepare(dout, q, k, v, out, lse, dlse, problem: tuple, step: int) -> tuple[tuple, list[torch.Tensor]]:
    """Return the launches of a backward pass, and the memory for dQ, dK, dV and between the launches."""
    causal, scale, window, deterministic, lengths = problem
    if q.shape[-1] % 8:
        raise ValueError(
            f"The head dimension must be a multiple of 8, not {q.shape[-1]}: TMA moves 16 bytes at a time."
        )
    if lengths and (deterministic or step < 6 or q.shape[-1] > 128):
        raise NotImplementedError(
            "The backward pass of packed sequences takes step 6, head dimensions up to 128, and no deterministic mode."
        )
    packed, plan = None, plan_for(step, q.shape[-1], deterministic, "packed" if lengths else "ends")
    if lengths:
        from utils.attention.gluon.intervals import packed_keys

        packed = packed_keys(lengths, causal, window, plan.block_n, plan.block_m, q.device)
    tiles = packed.blocks if packed else ()
    blocks = blocks_of(plan, q, k, processors(q.device), span(causal, window), tiles, deterministic)
    order = best_order(blocks) if step == 6 else Order(1, 0)
    g = Gradients(dout, q, k, v, out, lse, dlse, plan, order, blocks.dq_pieces)
    found = launches(step, g, order, causal, window, scale, packed)
    return tuple([run(g, launch) for launch in found]), [g.dq, g.dk, g.dv, g.between]
